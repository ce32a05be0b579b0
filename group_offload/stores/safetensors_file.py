"""Write and prove safetensors files whose data section is one flat image.

The format is that of https://github.com/huggingface/safetensors: 8 bytes of header length, a JSON header, the data. Any
reader opens these files. Two liberties that the format leaves are used: the header is padded with spaces so that the
data begins on a page, and bytes between tensors are covered by `__padding_N` entries, so that an image read from the
file is aligned as it was laid out.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from ..layout import ImageLayout, extent_bytes
from .base import memory_of
from .reading import read_into

DATA_ALIGNMENT = 4096
FORMAT_VERSION = "1"
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


def encode_header(layout: ImageLayout, group_id: str) -> bytes:
    """The bytes before the data section. The same tensors of the same group always give the same header."""
    entries: dict[str, object] = {
        "__metadata__": {
            "format": "pt",
            "group_offload.version": FORMAT_VERSION,
            "group_offload.group": group_id,
            "group_offload.codec": "none",
            "group_offload.tensors": json.dumps(
                [[s.fqn, str(s.dtype).removeprefix("torch."), s.shape, s.stride, s.offset] for s in layout.specs]
            ),
        }
    }
    end = 0
    for number, extent in enumerate((*layout.extents, None)):
        start = layout.num_bytes if extent is None else extent.offset
        if start > end:
            entries[f"__padding_{number}"] = _entry("U8", [start - end], end, start)
        if extent is None:
            break
        spec = layout.specs[extent.tensors[0]]
        end = extent.offset + extent.num_bytes
        is_plain = len(extent.tensors) == 1 and spec.dtype in _DTYPE_NAMES and _is_contiguous(spec.shape, spec.stride)
        entries[spec.fqn] = (
            _entry(_DTYPE_NAMES[spec.dtype], list(spec.shape), start, end)
            if is_plain
            else _entry("U8", [extent.num_bytes], start, end)  # strides, or tensors that overlap: see the metadata
        )
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def pieces(layout: ImageLayout, tensors: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
    """The data section in order, as flat uint8 CPU tensors: what fills each extent, and zeros between them."""
    end = 0
    for extent in layout.extents:
        yield torch.zeros(extent.offset - end, dtype=torch.uint8)
        yield extent_bytes(tensors, extent).cpu()
        end = extent.offset + extent.num_bytes
    yield torch.zeros(layout.num_bytes - end, dtype=torch.uint8)


def holds(fd: int, header: bytes, data: Iterable[torch.Tensor]) -> bool:
    """Whether the file holds exactly `header` and `data`: every byte is compared, nothing is taken on trust."""
    if not _equals(fd, 0, torch.frombuffer(bytearray(header), dtype=torch.uint8)):
        return False
    position = len(header)
    for piece in data:
        if not _equals(fd, position, piece):
            return False
        position += piece.numel()
    return os.fstat(fd).st_size == position


def publish(path: Path, header: bytes, data: Iterable[torch.Tensor], on_written: Callable[[int], None]) -> int | None:
    """Write a file and give it its name once it is durable.

    A crash at any moment leaves either no file of that name or the whole one; a file that is already there is never
    replaced.

    Returns:
        A descriptor of the file, or None if the name was taken meanwhile.

    Raises:
        OSError: the file cannot be written; nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        _write_all(fd, memoryview(header))
        for piece in data:
            _write_all(fd, memory_of(piece))
            on_written(piece.numel())
        os.fsync(fd)
        if _name_exclusively(temporary, path):
            _sync_folder(path.parent)
            return fd
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def _name_exclusively(temporary: Path, path: Path) -> bool:
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError:
        # A file system without hard links (exFAT, some network drives): the name is checked, then taken.
        if path.exists():
            return False
        temporary.rename(path)
    return True


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data[:_CHUNK_BYTES]) :]


def _equals(fd: int, position: int, expected: torch.Tensor) -> bool:
    buffer = torch.empty(min(_CHUNK_BYTES, expected.numel()), dtype=torch.uint8)
    for start in range(0, expected.numel(), _CHUNK_BYTES):
        part = expected[start : start + _CHUNK_BYTES]
        chunk = buffer[: part.numel()]
        if read_into(fd, memory_of(chunk), position + start) < part.numel() or not torch.equal(chunk, part):
            return False
    return True


def _entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def _is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for n, s in zip(reversed(shape), reversed(stride), strict=True):
        if n != 1 and s != expected:
            return False
        expected *= n
    return True
