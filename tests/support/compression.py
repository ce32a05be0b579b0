"""Images of blobs to compress, of all kinds of weights."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch
from hypothesis import strategies as st

from group_offload.base.layout import BlobLayout, TensorViews, lay_out
from group_offload.base.tuning import Tuning, tune
from group_offload.compression.codec import Compressed, compress
from group_offload.compression.layout import ENTRY_BYTES, SPAN_ALIGNMENT, TILE_BYTES, TILE_WEIGHTS, Strip
from group_offload.compression.operators import tile_table

KINDS = ("normal", "wide", "cauchy", "words", "exponents", "zeros", "constant", "nan", "infinite", "denormal", "sparse")
"""Of weights in bf16."""
FP8_KINDS = ("cast", "scaled", "bytes")
OTHERS = (torch.float32, torch.float16, torch.float8_e5m2, torch.int8, torch.bool, torch.float64)
LENGTHS = (0, 1, 2, 7, 100, 127, TILE_WEIGHTS - 1, TILE_WEIGHTS, TILE_WEIGHTS + 1, 3 * TILE_WEIGHTS, 10_007)


def weights(kind: str, num: int, seed: int = 0) -> torch.Tensor:
    """`num` weights in bf16, or in fp8."""
    random = torch.Generator().manual_seed(seed)
    normal = torch.randn(num, generator=random)
    words = torch.randint(-(1 << 15), 1 << 15, (num,), generator=random, dtype=torch.int32).to(torch.int16)
    if kind == "bytes":
        return words.to(torch.uint8).view(torch.float8_e4m3fn)
    if kind in FP8_KINDS:
        return (normal * (0.02 if kind == "cast" else 100)).to(torch.float8_e4m3fn)
    if kind == "words":
        return words.view(torch.bfloat16)
    if kind == "exponents":  # all equally often, the mantissa always the same
        return (torch.arange(num) % 256 << 7).to(torch.int16).view(torch.bfloat16)
    if kind in ("nan", "infinite", "denormal"):
        exponent = 0 if kind == "denormal" else 0x7F80
        mantissa = 0 if kind == "infinite" else 0x7F
        return ((words & (0x8000 - 0x10000)) | exponent | (words & mantissa)).view(torch.bfloat16)
    scale = {"wide": torch.exp(4 * normal.roll(1)), "cauchy": 1 / normal.roll(1).abs(), "zeros": 0}.get(kind, 0.02)
    found = normal * scale
    if kind == "constant":
        found = torch.full((num,), -1.5)
    if kind == "sparse":
        found[::2] = 0
    return found.bfloat16()


def image_of(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, BlobLayout]:
    """The image of a blob that holds the tensors, and its layout."""
    layout = lay_out([f"tensor_{i}" for i in range(len(tensors))], tensors)
    image = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for view, tensor in zip(TensorViews([(0, layout)]).of(image), tensors, strict=True):
        view.copy_(tensor)
    return image, layout


def compressible() -> torch.Tensor:
    """Enough weights that compress well for an image to be compressed, whatever else is in it."""
    return weights("normal", 150_000, seed=1)


@st.composite
def tensors(draw: st.DrawFn) -> list[torch.Tensor]:
    """Some tensors of a blob that is worth compressing."""
    found = [compressible()]
    for seed in range(draw(st.integers(0, 6))):
        length = draw(st.sampled_from(LENGTHS))
        kind = draw(st.sampled_from((*KINDS, *FP8_KINDS, None)))
        dtype = draw(st.sampled_from(OTHERS))
        tensor = weights(kind or "words", length, seed)
        if kind is None:
            tensor = tensor.view(torch.uint8)[: length // 16 * 16].view(torch.uint8 if dtype == torch.bool else dtype)
            tensor = tensor % 2 == 1 if dtype == torch.bool else tensor
        found.insert(draw(st.integers(0, len(found))), tensor)
    return found


def compressed_of(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Compressed]:
    """The image of a blob, and the same compressed."""
    image, layout = image_of(tensors)
    compressed = compress(image, layout)
    assert compressed is not None
    return image, compressed


GUARD = 4096
"""The bytes before and behind an image that have to stay as they are."""


def written_by(
    decode: Callable[[torch.Tensor], None], num_bytes: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """What `decode` writes to memory of so many bytes, none of them outside."""
    memory = torch.full((GUARD + num_bytes + GUARD,), 0x5A, dtype=torch.uint8, device=device)
    out = memory[GUARD : GUARD + num_bytes]
    try:
        decode(out)
    finally:
        assert bool((memory[:GUARD] == 0x5A).all()) and bool((memory[GUARD + num_bytes :] == 0x5A).all())
    return out


def parts_of(strip: Strip) -> Iterator[tuple[int, int]]:
    """Parts of a strip, as first and last byte, exclusive. They begin and end at the ends of tiles, and inside of them."""
    random = torch.Generator().manual_seed(1)
    most = strip.plain_bytes // SPAN_ALIGNMENT
    yield 0, SPAN_ALIGNMENT
    yield strip.plain_bytes - SPAN_ALIGNMENT, strip.plain_bytes
    for span in strip.spans[:4]:
        yield max(0, span.offset - SPAN_ALIGNMENT), min(strip.plain_bytes, span.offset + TILE_BYTES + SPAN_ALIGNMENT)
    for _ in range(12):
        start, end = sorted(torch.randperm(most + 1, generator=random)[:2].tolist())
        yield start * SPAN_ALIGNMENT, end * SPAN_ALIGNMENT


def only_needed(data: torch.Tensor, strip: Strip, start: int, end: int) -> torch.Tensor:
    """Compressed bytes of which only those are right that a part is decoded from."""
    found = torch.full_like(data, 0xEE)
    starts = [*(tile_table(data, strip) & 0xFFFFFFFF).tolist()]
    for low, high in strip.needed(start, end, starts.__getitem__):
        assert 0 <= low < high <= len(data)
        found[low:high] = data[low:high]
    return found


def check_kernel(device: torch.device | str, num_tiles: int, num_damages: int) -> None:
    """Compare the kernel with the CPU, on all kinds of weights and beside other dtypes, strip by strip; then let it decode
    damaged strips.

    Args:
        device: "cpu" in Triton's interpreter.
        num_tiles: how large the images are.
    """
    from group_offload.compression.kernels import decode

    def decoded(
        data: torch.Tensor, strip: Strip, start: int = 0, end: int | None = None, around: int = 0
    ) -> torch.Tensor:
        """What the kernel makes of it in memory of the device, with bytes `around` it."""
        there = torch.nn.functional.pad(data.to(device), (GUARD, GUARD), value=around)[GUARD:-GUARD]
        size = (strip.plain_bytes if end is None else end) - start
        return written_by(lambda out: decode(there, strip, out, start), size, device).cpu()

    def check_damaged(data: torch.Tensor, start: int = 0, end: int | None = None) -> None:
        """What lies around makes no difference. (On a device, of tiles that tables send to one place, one counts.)"""
        found = [decoded(data, strip, start, end, around) for around in (0, 0xFF)]
        if str(device) == "cpu" or torch.equal(data[:tables_end], tables):
            assert torch.equal(*found)

    size = num_tiles * TILE_WEIGHTS
    many = [each for kind in (*KINDS, *FP8_KINDS) for each in (weights(kind, 2 * TILE_WEIGHTS + 5), torch.randn(77))]
    images = [
        ([*many, weights("normal", size)], Tuning().strip_bytes),
        ([weights("wide", size + 1), torch.randn(1500)], Tuning().strip_bytes),
        ([weights("cast", size + 1), weights("scaled", size)], Tuning().strip_bytes),
        ([weights("normal", size), torch.randn(77), weights("cauchy", size)], 20 * TILE_BYTES),
    ]
    for given, strip_bytes in images:
        tune(strip_bytes=strip_bytes)
        image, (layout, data) = compressed_of(given)
        assert len(layout.strips) == -(-layout.plain_bytes // strip_bytes)
        for strip, first, place in layout.placed:
            compressed = data[place : place + strip.compressed_bytes]
            assert torch.equal(decoded(compressed, strip), image[first : first + strip.plain_bytes]), strip
            for start, end in parts_of(strip):
                found = decoded(only_needed(compressed, strip, start, end), strip, start, end)
                assert torch.equal(found, image[first + start : first + end]), (strip, start, end)
    tune(strip_bytes=Tuning().strip_bytes)
    image, (layout, data) = compressed_of([weights("normal", size // 2), torch.randn(700), weights("wide", size // 2)])
    (strip,) = layout.strips
    assert {span.bits for span in strip.spans} == {0, 3, 4}
    tables_end = strip.tiles_at + strip.num_tiles * ENTRY_BYTES
    tables = data[:tables_end]
    random = torch.Generator().manual_seed(0)
    tables = torch.tensor([0, 8, 16, 24, 30, 48, *range(strip.tiles_at, strip.tiles_at + 16)])
    for number in range(num_damages):
        damaged = data.clone()
        bytes_ = torch.randint(256, (8,), generator=random, dtype=torch.uint8)
        place = (
            int(tables[number % len(tables)]) if number % 3 else int(torch.randint(len(data) - 8, (), generator=random))
        )
        damaged[place : place + 8] = bytes_ if number % 2 else 0xFF
        check_damaged(damaged)
    garbage = torch.randint(256, (len(data),), generator=random, dtype=torch.uint8)
    check_damaged(garbage)
    for start, end in parts_of(strip):
        check_damaged(garbage, start, end)


TARGETS: tuple[tuple[str, int | str, int, str], ...] = (
    ("cuda", 80, 32, r"st.global.*v4.b32"),
    ("cuda", 90, 32, r"st.global.*v4.b32"),
    ("hip", "gfx942", 64, "store_dwordx4"),
    ("hip", "gfx1100", 32, "store_b128"),
)
"""Devices, the threads of a warp, and how a store of 16 bytes is called there."""


def check_compiler() -> None:
    """Compile the kernel for devices, which do not have to be there. Each thread has to store 16 bytes at once."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from group_offload.compression.kernels import _decode

    names = list(_decode.arg_names)
    signature = {n: "*u8" if n in ("data", "out") else "constexpr" if n.isupper() else "i64" for n in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in ("data", "out")}
    for (backend, arch, warp_size, wide_store), is_part in product(TARGETS, (False, True)):
        options = {"num_warps": 64 // warp_size, "enable_fp_fusion": False}
        source = ASTSource(_decode, signature, {"IS_PART": is_part, "HAS_PRMT": backend == "cuda"}, aligned)
        target = GPUTarget(backend, arch, warp_size)
        try:
            text = triton.compile(source, target=target, options=options).asm["ptx" if backend == "cuda" else "amdgcn"]
        except Exception as error:
            if "ROCm" in str(error):  # Triton 3.3 has no linker of its own
                continue
            raise
        assert len(re.findall(wide_store, text)) >= 4, target


if __name__ == "__main__":  # a process of its own: importing triton changes what torch can do
    torch.set_num_threads(1)
    if sys.argv[1:] == ["compile"]:
        check_compiler()
    else:
        check_kernel("cpu", *map(int, sys.argv[1:]))
