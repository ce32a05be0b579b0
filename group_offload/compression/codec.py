"""`compress` an image, `decompress` it where it lies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import torch
import xxhash

from ..base.arena import retried
from ..base.layout import BlobLayout, memory_of
from ..base.pool import Task, on_pool
from ..base.tuning import tuning
from ..errors import StorageError
from . import operators
from .layout import SPAN_ALIGNMENT, TILE_BYTES, CompressedLayout, Span, Strip, compressed_size
from .spans import choose_spans

MIN_SAVING = 1 / 16
"""Of the image: what saves less stays plain. Decompression takes time too."""


class Compressed(NamedTuple):
    """A compressed image."""

    layout: CompressedLayout
    data: torch.Tensor
    """uint8 [layout.compressed_bytes], on the CPU."""


def _new_memory(num_bytes: int) -> Task[torch.Tensor]:
    return on_pool(partial(torch.empty, num_bytes, dtype=torch.uint8, device="cpu"))


def compress(
    image: torch.Tensor,
    layout: BlobLayout,
    device: torch.device | None = None,
    memory: Callable[[int], Task[torch.Tensor]] = _new_memory,
    plain: str | None = None,
) -> Compressed | None:
    """Compress the image of a blob without loss. What was compressed is decompressed again there, and compared.

    Args:
        image: uint8 [layout.num_bytes], on the CPU or on a device.
        layout: says where weights in bf16 and fp8 are.
        device: one that `can_decompress` compresses, or the CPU where its memory is full. None: the device of the image.
        memory: begins to make memory of the CPU for the compressed bytes, such as pinned memory. It is asked for a little
            more than is used.
        plain: The hash of the image, if it is known.

    Returns:
        None if compression saves less than `MIN_SAVING`.
    """
    device = image.device if device is None else device
    try:
        return retried(device, partial(_compress, image, layout, device, memory, plain), layout.num_bytes)
    except torch.OutOfMemoryError:
        if device.type == "cpu":
            raise
    return _compress(image, layout, torch.device("cpu"), memory, plain)


def _compress(
    image: torch.Tensor,
    layout: BlobLayout,
    device: torch.device,
    memory: Callable[[int], Task[torch.Tensor]],
    plain: str | None,
) -> Compressed | None:
    # The CPU has little to do while a device compresses.
    hashing = on_pool(hash_of, image.cpu()) if plain is None else None
    there = image.to(device)
    num_bytes, drafts = layout.num_bytes, list[tuple[torch.Tensor, tuple[Span, ...], int]]()
    for first, last in _strips_of(num_bytes):
        part = there[first:last]
        spans, most_escapes = choose_spans(layout, first, last, partial(operators.count_exponents, part))
        drafts.append((part, spans, compressed_size(spans, most_escapes)))
    largest = sum(size for *_, size in drafts)
    if largest > num_bytes - int(num_bytes * MIN_SAVING) or not drafts:
        return None
    allocated = memory(largest)  # pinning takes time too
    compressed = [_compress_strip(*draft) for draft in drafts]
    if hashing is not None:
        hashing.wait()
        plain = hashing.result()
    assert plain is not None
    size = sum(data.numel() for _, data in compressed)
    found = CompressedLayout(num_bytes, size, tuple(strip for strip, _ in compressed), plain)
    allocated.wait()
    target = allocated.result()[:size]
    for part, (_, data) in zip(found.cut(target), compressed, strict=True):
        part.copy_(data)
    return Compressed(found, target)


def _strips_of(num_bytes: int) -> list[tuple[int, int]]:
    """The first and the last byte, exclusive, of each strip of an image: about equally large, and cut where tiles may be."""
    num_strips = -(-num_bytes // tuning().strip_bytes)
    step = -(-num_bytes // max(1, num_strips * TILE_BYTES)) * TILE_BYTES
    return [(first, min(first + step, num_bytes)) for first in range(0, num_bytes, step or 1)]


def _compress_strip(image: torch.Tensor, spans: tuple[Span, ...], most_bytes: int) -> tuple[Strip, torch.Tensor]:
    draft = Strip(spans, 0)
    data = torch.zeros(most_bytes, dtype=torch.uint8, device=image.device)
    escapes = operators.encode(image, draft, data)
    strip = replace(draft, num_escapes=sum(each.numel() for each in escapes))
    end = draft.escapes_at
    for each in escapes:
        data[end : end + each.numel()] = each
        end += each.numel()
    data = data[: strip.compressed_bytes]
    again = torch.empty_like(image)
    decompress_strip(data, strip, again)
    if not torch.equal(again, image):
        raise StorageError(
            f"Weights compressed on {image.device} do not decompress to what they were: it is broken, or its compiler is."
        )
    return strip, data


def can_decompress(device: torch.device) -> bool:
    """Whether `decompress` works there: on the CPU, and where Triton is installed, which comes with torch for accelerators."""
    return device.type == "cpu" or (device.type in ("cuda", "xpu") and find_spec("triton") is not None)


def hash_of(image: torch.Tensor) -> str:
    """The hash of an image on the CPU that a `CompressedLayout` has: XXH3 (128 bits, hexadecimal)."""
    return xxhash.xxh3_128_hexdigest(memory_of(image))


def decompress(data: torch.Tensor, layout: CompressedLayout, out: torch.Tensor) -> None:
    """Write the image to `out`: enqueued on the current stream of a device, done at return on the CPU.

    Args:
        data: uint8 [layout.compressed_bytes].
        out: uint8 [layout.plain_bytes] on the same device.

    Raises:
        StorageError: on the CPU, the codes do not fit the escapes. A device writes something, and nothing outside of `out`.
    """
    assert out.numel() == layout.plain_bytes
    for part, (strip, start, _) in zip(layout.cut(data), layout.placed, strict=True):
        decompress_strip(part, strip, out[start : start + strip.plain_bytes])


def decompress_strip(data: torch.Tensor, strip: Strip, out: torch.Tensor, start: int = 0) -> None:
    """`decompress` for one strip, or for a part of it.

    Args:
        data: uint8 [strip.compressed_bytes]. Of a part, only what is `needed` has to be there.
        out: uint8 [at most strip.plain_bytes] on the same device.
        start: The byte of the strip that `out` begins at, a multiple of 16.
    """
    assert data.numel() == strip.compressed_bytes and 0 <= start < start + out.numel() <= strip.plain_bytes
    assert (data.data_ptr() | out.data_ptr() | start | out.numel()) % SPAN_ALIGNMENT == 0
    if out.device.type == "cpu":
        operators.decode(data, strip, out, start)
        return
    from .kernels import decode  # here, as there is no Triton on many machines

    decode(data, strip, out, start)
