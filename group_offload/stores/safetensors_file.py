"""The format of group files: safetensors files whose data section is one flat blob.

The format is that of https://github.com/huggingface/safetensors: 8 bytes of header length, a JSON header, the data. Any
reader opens these files.

The writer is our own because the safetensors package cannot write these files. Direct reads need a blob that lies in the file
as it lies in memory: from a page on, with gaps between tensors. The package neither aligns the data to a page nor allows a gap.
The format allows both: the header is padded with spaces so that the data begins on a page, and `__padding_N` entries cover the
gaps. A header is not interpreted: it is compared with the one that would be written now.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import xxhash

from ..base.layout import BlobLayout, extent_bytes, memory_of
from ..base.reading import read_into, read_part
from ..compression.layout import CompressedLayout

DATA_ALIGNMENT = 4096
_VERSION, _COMPRESSED_VERSION = "2", "5"
_COMPRESSED_NAME = "compressed"
"""The entry of a compressed group file."""
_CONTENT_KEY = "group_offload.content"
_COMPRESSED_KEY = "group_offload.compressed"
_FROM_KEY = "group_offload.compressed_from"
_HASH_KEY = "group_offload.header"
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the format."""
_CHUNK_BYTES = 16 << 20

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def encode_header(
    layout: BlobLayout,
    group_id: str,
    model_class: str,
    content: str,
    compressed: CompressedLayout | None = None,
    compressed_from: CompressedFrom | None = None,
) -> bytes:
    """The bytes before the data section. Equal tensors of one group always give equal headers.

    Args:
        content: the hash of the data section, from `content_of`.
        compressed: how the blob is compressed in the data section, if it is.
        compressed_from: what it was compressed from, if that is in a file.
    """
    metadata = {
        "format": "pt",
        "group_offload.version": _VERSION if compressed is None else _COMPRESSED_VERSION,
        "group_offload.model_class": model_class,
        "group_offload.group": group_id,
        "group_offload.codec": "none" if compressed is None else "exponents",
        _CONTENT_KEY: content,
        "group_offload.tensors": json.dumps(
            [[s.fqn, str(s.dtype).removeprefix("torch."), s.shape, s.stride, s.offset] for s in layout.specs]
        ),
    }
    entries: dict[str, object] = {"__metadata__": metadata}
    if compressed is None:
        entries |= _entries_of(layout)
    else:
        metadata[_COMPRESSED_KEY] = compressed.to_json()
        if compressed_from is not None:
            metadata[_FROM_KEY] = json.dumps(compressed_from)
        entries[_COMPRESSED_NAME] = _entry("U8", [compressed.compressed_bytes], 0, compressed.compressed_bytes)
        metadata[_HASH_KEY] = xxhash.xxh3_128_hexdigest(json.dumps(entries).encode())
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _entries_of(layout: BlobLayout) -> dict[str, object]:
    """The tensors of a blob, and the bytes between them."""
    entries: dict[str, object] = {}
    end = 0
    for number, extent in enumerate((*layout.extents, None)):
        start = layout.num_bytes if extent is None else extent.offset
        if start > end:
            entries[f"__padding_{number}"] = _entry("U8", [start - end], end, start)
        if extent is None:
            break
        spec = layout.specs[extent.tensors[0]]
        end = extent.offset + extent.num_bytes
        is_contiguous = torch.empty_strided(spec.shape, spec.stride, device="meta").is_contiguous()
        is_plain = len(extent.tensors) == 1 and spec.dtype in _DTYPE_NAMES and is_contiguous
        entries[spec.fqn] = (
            _entry(_DTYPE_NAMES[spec.dtype], list(spec.shape), start, end)
            if is_plain
            else _entry("U8", [extent.num_bytes], start, end)  # strides, or tensors that overlap: see the metadata
        )
    return entries


def data_pieces(layout: BlobLayout, tensors: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
    """The data section in order, as flat uint8 CPU tensors: the bytes of each extent, and zeros between them."""
    end = 0
    for extent in sorted(layout.extents, key=lambda extent: extent.offset):
        yield torch.zeros(extent.offset - end, dtype=torch.uint8, device="cpu")
        yield extent_bytes(tensors, extent).cpu()
        end = extent.offset + extent.num_bytes
    yield torch.zeros(layout.num_bytes - end, dtype=torch.uint8, device="cpu")


def content_of(data: Iterable[torch.Tensor]) -> str:
    """The hash of the data section that stands in the header: xxh3_128, in hex."""
    digest = xxhash.xxh3_128()
    for piece in data:
        digest.update(memory_of(piece))
    return digest.hexdigest()


def content_of_file(fd: int, start: int) -> str:
    """The same hash, of the bytes of a file from `start` on.

    Raises:
        OSError: the file cannot be read.
    """
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    while num_bytes := read_into(fd, buffer, start):
        digest.update(buffer[:num_bytes])
        start += num_bytes
    return digest.hexdigest()


def file_holds(fd: int, header: bytes, content: str) -> bool:
    """Whether the file holds exactly `header` and data whose hash is `content`. Every byte is read then.

    Raises:
        OSError: the file cannot be read.
    """
    found = bytearray(len(header))
    read_part(fd, memoryview(found), 0)
    return found == header and content_of_file(fd, len(header)) == content


class CompressedFrom(NamedTuple):
    """The bytes that a compressed group file was made from. See [Note: Whose a compressed file is] in `compressed_files`."""

    path: str
    """The checkpoint, or the group file."""
    facts: str
    """What changes if a byte of that file does: see [Note: Which file it is] in `source`."""
    place: str
    """A hash of where the weights lie in it, and of where they go."""


class CompressedHeader(NamedTuple):
    """What the header of a compressed group file says."""

    content: str
    """xxh3_128 of the data section, in hex."""
    compressed: CompressedLayout
    compressed_from: CompressedFrom | None


def read_compressed_header(fd: int, layout: BlobLayout, group_id: str, model_class: str) -> CompressedHeader | None:
    """The header of a compressed group file; None if the file is not one of this blob, or if its header or size is wrong.

    All of the header follows from the blob and from what is returned, so one that differs in a single byte is not believed.

    Raises:
        OSError: the file cannot be read.
    """
    size = os.fstat(fd).st_size
    prefix = bytearray(8)
    read_part(fd, memoryview(prefix), 0)
    num_bytes = 8 + int.from_bytes(prefix, "little")
    if num_bytes > min(size, _MAX_HEADER_BYTES):
        return None
    raw = bytearray(num_bytes)
    read_part(fd, memoryview(raw), 0)
    try:
        entries = json.loads(raw[8:])
        metadata = entries["__metadata__"]
        if metadata.pop(_HASH_KEY) != xxhash.xxh3_128_hexdigest(json.dumps(entries).encode()):
            return None
        compressed, content = CompressedLayout.from_json(metadata[_COMPRESSED_KEY]), metadata[_CONTENT_KEY]
        compressed_from = CompressedFrom(*json.loads(metadata[_FROM_KEY])) if _FROM_KEY in metadata else None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    is_right = raw == encode_header(layout, group_id, model_class, content, compressed, compressed_from)
    if not is_right or size != num_bytes + compressed.compressed_bytes:
        return None
    return CompressedHeader(content, compressed, compressed_from)


def _entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
