"""`pack` an image, `check` what somebody packed, `unpack` it where it lies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from typing import NamedTuple

import torch
import xxhash

from ..base.layout import BlobLayout, memory_of
from ..base.pool import Task, on_pool
from . import operators
from .layout import MOST_ESCAPES, SPAN_ALIGNMENT, TILE_WEIGHTS, PackedError, PackedLayout, packed_size
from .spans import choose_spans

MIN_SAVING = 1 / 16
"""Of the image: what saves less stays plain. Unpacking takes time too."""


class Packed(NamedTuple):
    """A packed image."""

    layout: PackedLayout
    data: torch.Tensor
    """uint8 [layout.packed_bytes], on the CPU."""


def _new_memory(num_bytes: int) -> Callable[[], torch.Tensor]:
    return partial(torch.empty, num_bytes, dtype=torch.uint8, device="cpu")


def pack(
    image: torch.Tensor,
    layout: BlobLayout,
    device: torch.device | None = None,
    memory: Callable[[int], Callable[[], torch.Tensor]] = _new_memory,
    hashed: Task[str] | None = None,
) -> Packed | None:
    """Pack the image of a blob without loss. What was packed is unpacked again there, and compared.

    Args:
        image: uint8 [layout.num_bytes], on the CPU or on a device.
        layout: says where bf16 weights are.
        device: packs, or the CPU where its memory is full. None: the device of the image.
        memory: begins to make memory of the CPU for the packed bytes, such as page-locked memory, and returns a function that
            waits for it. It is asked for a little more than is used.
        hashed: The work of the pool that hashes the image, if it has begun.

    Returns:
        None if packing saves less than `MIN_SAVING`.
    """
    device = image.device if device is None else device
    try:
        return _pack(image, layout, device, memory, hashed)
    except torch.OutOfMemoryError:
        if device.type == "cpu":
            raise
    return _pack(image, layout, torch.device("cpu"), memory, hashed)


def _pack(
    image: torch.Tensor,
    layout: BlobLayout,
    device: torch.device,
    memory: Callable[[int], Callable[[], torch.Tensor]],
    hashed: Task[str] | None,
) -> Packed | None:
    if hashed is None:
        hashed = on_pool(hash_of, image.cpu())  # the CPU has nothing else to do while a device packs
    there = image.to(device)
    spans, most_escapes = choose_spans(layout, lambda start, end: operators.count_exponents(there, start, end))
    largest = packed_size(spans, most_escapes)
    if largest > layout.num_bytes - int(layout.num_bytes * MIN_SAVING) or most_escapes > MOST_ESCAPES:
        return None
    allocated = memory(largest)  # page-locking takes time too
    draft = PackedLayout(layout.num_bytes, packed_size(spans, 0), spans, 0, "0" * 32)
    data = torch.zeros(largest, dtype=torch.uint8, device=device)
    escapes = operators.encode(there, draft, data)
    num_escapes = sum(each.numel() for each in escapes)
    size = packed_size(spans, num_escapes)
    end = draft.escapes_at
    for each in escapes:
        data[end : end + each.numel()] = each
        end += each.numel()
    data = data[:size]
    found = replace(draft, packed_bytes=size, num_escapes=num_escapes)
    again = torch.empty_like(there)
    if can_unpack(device):
        unpack(data, found, again)
    else:
        operators.decode(data, found, again)
    if not torch.equal(again, there):
        raise PackedError(
            f"Weights packed on {device} do not unpack to what they were: it is broken, or its compiler is"
        )
    hashed.wait()
    return Packed(replace(found, hash=hashed.result()), allocated()[:size].copy_(data))


def can_unpack(device: torch.device) -> bool:
    """Whether `unpack` works there: on the CPU, and where Triton is installed, which comes with torch for accelerators."""
    return device.type == "cpu" or (device.type in ("cuda", "xpu") and _has_triton())


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def hash_of(image: torch.Tensor) -> str:
    """The hash of an image on the CPU that a `PackedLayout` has: XXH3 (128 bits, hexadecimal)."""
    return xxhash.xxh3_128_hexdigest(memory_of(image))


def unpack(data: torch.Tensor, layout: PackedLayout, out: torch.Tensor, start: int = 0) -> None:
    """Write the image, or a part of it, to `out`: enqueued on the current stream of a device, done at return on the CPU.

    Args:
        data: uint8 [layout.packed_bytes], that `check` has passed. Of a part, only what is `needed` has to be there.
        out: uint8 [at most layout.plain_bytes] on the same device.
        start: The byte of the image that `out` begins at, a multiple of 16.

    Raises:
        PackedError: on the CPU, the codes do not fit the escapes. A device writes something, and nothing outside of `out`.
    """
    _check_sizes(data, layout)
    if not 0 < out.numel() <= layout.plain_bytes - start or start < 0:
        raise ValueError(f"out has {out.numel():,} bytes from {start:,} on, and the image has {layout.plain_bytes:,}")
    if (data.data_ptr() | out.data_ptr() | start | out.numel()) % SPAN_ALIGNMENT:
        raise ValueError(f"data and out have to begin, and out has to end, at multiples of {SPAN_ALIGNMENT} bytes")
    if out.device.type == "cpu":
        operators.decode(data, layout, out, start)
        return
    from .kernels import decode  # here, as there is no Triton on many machines

    decode(data, layout, out, start)


def check(data: torch.Tensor, layout: PackedLayout) -> None:
    """Compare the tables of packed bytes on the CPU with their layout. What they hold is proven by a hash, not here.

    Raises:
        PackedError: one is damaged. The message does not name the file.
    """
    _check_sizes(data, layout)
    rows = layout.rows().view(torch.uint8).flatten()
    if not torch.equal(data[: rows.numel()], rows):
        raise PackedError("its table of spans is damaged")
    found, spans = operators.tile_table(data, layout), layout.spans_of_tiles(data.device)
    starts, halves = found & 0xFFFFFFFF, found >> 52 & 0xFFF
    is_packed = torch.tensor([span.bits > 0 for span in layout.spans], device="cpu")[spans]
    ends = torch.cat([starts[1:], torch.tensor([layout.num_escapes], device="cpu")])
    is_right = (halves <= TILE_WEIGHTS // 2) & (halves <= ends - starts) & (ends - starts <= TILE_WEIGHTS * is_packed)
    if not torch.equal(found, layout.entries(starts, halves)) or not bool(is_right.all()) or bool(starts[:1].any()):
        raise PackedError("its table of tiles is damaged")


def _check_sizes(data: torch.Tensor, layout: PackedLayout) -> None:
    if data.numel() != layout.packed_bytes:
        raise PackedError(f"it has {data.numel():,} packed bytes, and {layout.packed_bytes:,} were written")
