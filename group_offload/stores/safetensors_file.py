"""The format of group files: safetensors files whose data section is one flat blob.

The format is that of https://github.com/huggingface/safetensors: 8 bytes of header length, a JSON header, the data. Any
reader opens these files.

The writer is our own because the safetensors package cannot write these files. Direct reads need a blob that lies in the file
as it lies in memory: from a page on, with gaps between tensors. The package neither aligns the data to a page nor allows a gap.
The format allows both: the header is padded with spaces so that the data begins on a page, and `__padding_N` entries cover the
gaps. A tensor whose name the format cannot have, or has for something else, is the entry `__tensor_N`, and the metadata has its
name. The checks of a header are our own because an error names the tensor that is wrong, and because the metadata of a group
file has to agree with its tensors.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import xxhash

from ..base.layout import BlobLayout, Extent, TensorSpec, extent_bytes, memory_of, span_of
from ..base.reading import read_into, read_part
from ..base.strict_json import as_size, as_sizes, as_text, parse
from ..errors import GroupFileError
from ..packing.layout import PackedLayout

DATA_ALIGNMENT = 4096
FORMAT_VERSION = "2"
PACKED_VERSION = "4"
"""Of packed group files: programs that know version 2 alone leave them to a later version, and do not call them damaged."""
_PLAIN_CODEC, _PACKED_CODEC = "none", "exponents"
_PACKED_NAME = "packed"
"""The entry of a packed group file."""
_VERSION_KEY = "group_offload.version"
_CONTENT_KEY = "group_offload.content"
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the format."""
_TOO_LARGE = 1 << 64
"""The format counts with 64 bits."""
_CHUNK_BYTES = 16 << 20
_BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
"""The bits of an element, for each dtype of the format."""
_RESERVED = re.compile(r"__metadata__|__(?:padding|tensor)_.*|.*[\ud800-\udfff].*", re.DOTALL)
"""The names that the entry of a tensor cannot have."""

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
    layout: BlobLayout, group_id: str, model_class: str, content: str, packed: PackedLayout | None = None
) -> bytes:
    """The bytes before the data section. Equal tensors of one group always give equal headers.

    Args:
        content: the hash of the data section, from `content_of`.
        packed: how the blob is packed in the data section, if it is.
    """
    metadata = {
        "format": "pt",
        _VERSION_KEY: FORMAT_VERSION if packed is None else PACKED_VERSION,
        "group_offload.model_class": model_class,
        "group_offload.group": printable_id(group_id),
        "group_offload.codec": _PLAIN_CODEC if packed is None else _PACKED_CODEC,
        _CONTENT_KEY: content,
        "group_offload.tensors": json.dumps(
            [[s.fqn, str(s.dtype).removeprefix("torch."), s.shape, s.stride, s.offset] for s in layout.specs]
        ),
    }
    entries: dict[str, object] = {"__metadata__": metadata}
    if packed is None:
        entries |= _entries_of(layout)
    else:
        metadata["group_offload.packed"] = packed.to_json()
        entries[_PACKED_NAME] = _entry("U8", [packed.packed_bytes], 0, packed.packed_bytes)
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
        is_plain = len(extent.tensors) == 1 and spec.dtype in _DTYPE_NAMES and _is_contiguous(spec.shape, spec.stride)
        name = f"__tensor_{extent.tensors[0]}" if _RESERVED.fullmatch(spec.fqn) else spec.fqn
        entries[name] = (
            _entry(_DTYPE_NAMES[spec.dtype], list(spec.shape), start, end)
            if is_plain
            else _entry("U8", [extent.num_bytes], start, end)  # strides, or tensors that overlap: see the metadata
        )
    return entries


def printable_id(group_id: str) -> str:
    """The id of a group as it stands in files. The name of a module may have half of a surrogate pair, which no file may."""
    return group_id.encode(errors="backslashreplace").decode()


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


def content_of_file(fd: int, start: int, on_read: Callable[[int], None]) -> str:
    """The same hash, of the bytes of a file from `start` on.

    Raises:
        OSError: the file cannot be read.
    """
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    while num_bytes := read_into(fd, buffer, start):
        digest.update(buffer[:num_bytes])
        start += num_bytes
        on_read(num_bytes)
    return digest.hexdigest()


def file_holds(fd: int, header: bytes, data: Iterable[torch.Tensor]) -> bool:
    """Whether the file holds exactly `header` and `data`. Every byte is compared."""
    if not _equals(fd, 0, torch.frombuffer(bytearray(header), dtype=torch.uint8)):
        return False
    position = len(header)
    for piece in data:
        if not _equals(fd, position, piece):
            return False
        position += piece.numel()
    return os.fstat(fd).st_size == position


@dataclass(frozen=True, slots=True)
class Header:
    """The JSON header of a safetensors file, as it stands there."""

    raw: bytes
    """All bytes before the data section."""
    entries: dict[str, object]
    """The entries of the tensors by name, not checked yet."""
    metadata: dict[str, str]

    @property
    def version(self) -> str | None:
        """The version of the format of group files that it claims to have. None: it does not claim to be a group file."""
        return self.metadata.get(_VERSION_KEY)

    @property
    def content(self) -> str | None:
        """The hash of the data section that it claims, as `content_of` gives it."""
        return self.metadata.get(_CONTENT_KEY)


@dataclass(frozen=True, slots=True)
class GroupHeader:
    """What the header of a group file says about its content."""

    model_class: str
    group_id: str
    content: str
    """xxh3_128 of the data section, in hex."""
    layout: BlobLayout
    packed: PackedLayout | None = None
    """How the blob is packed in the data section, if it is."""

    @property
    def data_bytes(self) -> int:
        """The size of the data section."""
        return self.layout.num_bytes if self.packed is None else self.packed.packed_bytes


def read_header(fd: int) -> Header:
    """Read the header of a file that anybody may have written.

    Raises:
        GroupFileError: it is not a safetensors file. The message does not name the file.
        OSError: the file cannot be read.
    """
    size = os.fstat(fd).st_size
    prefix = _read(fd, 0, 8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
        raise GroupFileError(f"its header does not end within the file, which has {size:,} bytes")
    text = _read(fd, 8, length)
    entries = parse(text)
    if not isinstance(entries, dict):
        raise GroupFileError("its header is not an object")
    metadata = entries.pop("__metadata__", None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        raise GroupFileError("its metadata is not an object")
    return Header(prefix + text, entries, {key: as_text(value) for key, value in metadata.items()})


def check_group_header(header: Header, file_bytes: int) -> GroupHeader:
    """Check the header of a group file against its own metadata and the size of the file.

    The whole header follows from the metadata, so a header that differs in a single byte is damaged.

    Raises:
        GroupFileError: the header contradicts itself or the file. The message does not name the file.
    """
    data_bytes = file_bytes - len(header.raw)
    check_tensor_entries(header.entries, data_bytes)
    try:
        codec = header.metadata["group_offload.codec"]
        if (header.version, codec) not in ((FORMAT_VERSION, _PLAIN_CODEC), (PACKED_VERSION, _PACKED_CODEC)):
            raise GroupFileError("another version of this package wrote it")
        is_packed = codec == _PACKED_CODEC
        packed = PackedLayout.from_json(header.metadata["group_offload.packed"]) if is_packed else None
        num_bytes = data_bytes if packed is None else packed.plain_bytes
        found = GroupHeader(
            model_class=header.metadata["group_offload.model_class"],
            group_id=header.metadata["group_offload.group"],
            content=header.metadata[_CONTENT_KEY],
            layout=_layout_of(header.metadata["group_offload.tensors"], num_bytes),
            packed=packed,
        )
    except KeyError as error:
        raise GroupFileError(f"its metadata has no {error}") from error
    except UnicodeEncodeError as error:
        raise GroupFileError("its metadata is no text") from error
    if encode_header(found.layout, found.group_id, found.model_class, found.content, found.packed) != header.raw:
        raise GroupFileError("its metadata and its tensors contradict each other")
    return found


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor, as the header of a safetensors file describes it."""

    dtype: str
    num_elements: int
    num_bytes: int


def check_tensor_entries(entries: dict[str, object], data_bytes: int) -> dict[str, Entry]:
    """The tensors of a header by name, checked: as the format wants it they fill the data section without a gap.

    Raises:
        GroupFileError: they do not. The message does not name the file.
    """
    found, places = {}, []
    for name, entry in entries.items():
        if not isinstance(entry, dict) or not entry.keys() >= {"dtype", "shape", "data_offsets"}:
            raise GroupFileError(f"its entry {name!r:.80} is not that of a tensor")
        place, dtype, num_elements = as_sizes(entry["data_offsets"]), as_text(entry["dtype"]), 1
        if dtype not in _BITS:
            raise GroupFileError(f"{name!r:.80} has the dtype {dtype!r:.40}, which the format does not have")
        for n in as_sizes(entry["shape"]):
            num_elements *= n
            if num_elements >= _TOO_LARGE:  # not to the end: the product of many huge sizes takes for ever
                break
        num_bits = num_elements * _BITS[dtype]
        if len(place) != 2 or num_bits >= _TOO_LARGE or (place[1] - place[0]) * 8 != num_bits:
            raise GroupFileError(f"the dtype, the shape and the place of {name!r:.80} contradict each other")
        found[name] = Entry(dtype, num_elements, num_bits // 8)
        places.append(place)
    reach = 0
    for start, end in sorted(places):
        if start != reach:
            raise GroupFileError(
                f"its tensors {'overlap' if start < reach else 'leave a gap'} at byte {start:,} of the data"
            )
        reach = end
    if reach != data_bytes:
        what = "was cut off" if data_bytes < reach else "is too long"
        raise GroupFileError(f"it {what}: it holds {data_bytes:,} bytes of data, and its tensors take {reach:,}")
    return found


def _layout_of(text: str, data_bytes: int) -> BlobLayout:
    """The layout that `group_offload.tensors` describes. Tensors that overlap are one extent, as `lay_out` makes it."""
    tensors = parse(text.encode(), may_have_halves=True)
    if not isinstance(tensors, list):
        raise GroupFileError("its metadata lists no tensors")
    specs = tuple(_spec_of(item) for item in tensors)
    ranges = sorted(
        (spec.offset, spec.offset + span_of(spec.shape, spec.stride, spec.dtype.itemsize), i)
        for i, spec in enumerate(specs)
    )
    clusters: list[tuple[int, int, list[int]]] = []
    for start, end, index in ranges:
        if end > data_bytes:
            raise GroupFileError(f"by its metadata {specs[index].fqn!r:.80} lies past the end of the data")
        if start < end and clusters and start < clusters[-1][1]:
            low, high, members = clusters[-1]
            members.append(index)  # in place, so the time is linear in the number of tensors, whatever overlaps
            clusters[-1] = low, max(high, end), members
        else:
            clusters.append((start, end, [index]))
    extents = [Extent(low, high - low, tuple(sorted(members))) for low, high, members in clusters]
    return BlobLayout(specs, tuple(sorted(extents, key=lambda extent: extent.tensors)), data_bytes)


def _spec_of(item: object) -> TensorSpec:
    if not isinstance(item, list) or len(item) != 5:
        raise GroupFileError("its metadata lists something else than tensors")
    fqn, dtype_name, shape, stride, offset = item
    # Not getattr: torch imports some of its modules when their names are asked for.
    dtype = vars(torch).get(as_text(dtype_name))
    if not isinstance(dtype, torch.dtype):
        raise GroupFileError(f"its metadata has a dtype that this torch does not: {dtype_name!r:.40}")
    spec = TensorSpec(as_text(fqn), dtype, as_sizes(shape), as_sizes(stride), as_size(offset))
    if len(spec.shape) != len(spec.stride):
        raise GroupFileError(
            f"by its metadata {spec.fqn!r:.80} has {len(spec.shape)} sizes and {len(spec.stride)} strides"
        )
    return spec


def _read(fd: int, position: int, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    return bytes(data[: read_part(fd, memoryview(data), position)])


def _equals(fd: int, position: int, expected: torch.Tensor) -> bool:
    buffer = torch.empty(min(_CHUNK_BYTES, expected.numel()), dtype=torch.uint8, device="cpu")
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
