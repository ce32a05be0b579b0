"""The format of compressed files, as compression/layout.py describes it, read in plain Python."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import torch
from safetensors import safe_open

from group_offload.base.layout import TensorViews, lay_out
from group_offload.stores.compressed_files import Wanted, find_or_compress
from group_offload.stores.folder import Folder


def test_a_reader_in_plain_python(tmp_path: Path) -> None:
    """A compressed file that only the version that wrote it can read."""
    given = [torch.randn(50_001, dtype=torch.bfloat16), torch.randn(99), torch.randn(30_000).exp().pow(4).bfloat16()]
    given += [torch.randn(30_001).to(torch.float8_e4m3fn)]
    layout = lay_out(["a", "b", "c", "d"], given)
    file = find_or_compress(Folder(tmp_path / "compressed", "Model"), Wanted("block", layout, given))
    assert file is not None
    image = torch.frombuffer(bytearray(decompressed(file.source.path)), dtype=torch.uint8)
    views = [view.view(torch.uint8) for view in TensorViews([(0, layout)]).of(image)]
    assert all(torch.equal(view, each.view(torch.uint8)) for view, each in zip(views, given, strict=True))


def decompressed(path: Path) -> bytes:
    with safe_open(path, "pt") as file:
        data, metadata = file.get_tensor("compressed").numpy().tobytes(), file.metadata()
    assert metadata["group_offload.codec"] == "exponents" and metadata["group_offload.version"] == "5"
    layout = json.loads(metadata["group_offload.compressed"])
    image = b""
    for num_escapes, spans in layout["strips"]:
        strip, data = decompressed_strip(data, num_escapes, spans)
        image += strip
    return image


def decompressed_strip(data: bytes, num_escapes: int, spans: list[tuple[int, int, str]]) -> tuple[bytearray, bytes]:
    """The first strip of `data`, and what follows it."""
    image = bytearray(sum(size for size, _, _ in spans))
    rows = [struct.unpack_from("<QQQII16s", data, 48 * number) for number in range(len(spans))]
    num_tiles = sum(-(-size // 4096) for size, _, _ in spans)
    tiles_at = -(-48 * len(spans) // 256) * 256
    _, size, place, _, code, _ = rows[-1]
    end = place + (size // 4096 * (256 * (code & 15) + 2048) if code else size)
    escapes_at = -(-end // 256) * 256
    for tile in range(num_tiles):
        (entry,) = struct.unpack_from("<Q", data, tiles_at + 8 * tile)
        offset, size, place, first, code, exponents = rows[entry >> 32 & 0xFFFFF]
        bits, is_fp8 = code & 15, code > 16
        offset, escape = offset + 4096 * (tile - first), escapes_at + (entry & 0xFFFFFFFF)
        if not bits:
            start = place + 4096 * (tile - first)
            part = data[start : min(start + 4096, place + size)]
            image[offset : offset + len(part)] = part
            continue
        record = place + (256 * bits + 2048) * (tile - first)
        for weight in range(2048):
            codes = sum(data[record + 256 * plane + weight // 8] << 8 * plane for plane in range(bits))
            code = codes >> bits * (weight % 8) & (1 << bits) - 1
            exponent = exponents[code]
            if code == (1 << bits) - 1:
                exponent, escape = data[escape], escape + 1
            rest = data[record + 256 * bits + weight]
            word = (rest & 0x80) << 8 | exponent << 7 | rest & 0x7F
            if is_fp8:  # two weights: bits 3 to 6 and 7 to 10 are exchanged
                word = word & 0xF807 | (word & 0x780) >> 4 | (word & 0x78) << 4
            struct.pack_into("<H", image, offset + 2 * weight, word)
    return image, data[-(-(escapes_at + num_escapes + 2064) // 256) * 256 :]
