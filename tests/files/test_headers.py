"""Headers of group files that anybody may have written: read right, or refused with `GroupFileError`, at a bounded cost."""

from __future__ import annotations

import json
import os
import struct
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from group_offload import GroupFileError
from group_offload.base.layout import lay_out
from group_offload.stores.manifest import Manifest, ManifestEntry
from group_offload.stores.safetensors_file import (
    check_group_header,
    content_of,
    data_pieces,
    encode_header,
    read_header,
)


def tensors() -> dict[str, torch.Tensor]:
    """All that a layout can hold: strides, scalars, nothing, tied and overlapping ones, dtypes that the format lacks."""
    base = torch.arange(100.0)
    return {
        "plain": torch.randn(3, 5),
        "transposed": torch.randn(4, 4).t(),
        "nothing": torch.zeros(0, 3),
        "scalar": torch.zeros(()),
        "half": torch.randn(3).half(),
        "complex": torch.randn(2).to(torch.complex64),
        "left": base[10:50],
        "right": base[20:80],
        "tied": base[20:80],
        "expanded": torch.ones(1).expand(7),
    }


def group_file() -> bytes:
    named = tensors()
    layout = lay_out(list(named), list(named.values()))
    data = list(data_pieces(layout, list(named.values())))
    header = encode_header(layout, "blocks_0", "Model", content_of(data))
    return header + b"".join(piece.numpy().tobytes() for piece in data)


torch.manual_seed(0)
VALID = group_file()
DATA = VALID[8 + struct.unpack("<Q", VALID[:8])[0] :]
HEADER = json.loads(VALID[8 : -len(DATA)])


def file_of(header: object, data: bytes = DATA) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    return struct.pack("<Q", len(text)) + text + data


def read(content: bytes) -> Any:
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        return check_group_header(read_header(file.fileno()), len(content))


def refused(content: bytes) -> str:
    with pytest.raises(GroupFileError) as caught:
        read(content)
    return str(caught.value)


def test_what_was_written_is_read() -> None:
    named = tensors()
    found = read(VALID)
    assert (found.model_class, found.group_id) == ("Model", "blocks_0")
    assert found.layout == lay_out(list(named), list(named.values()))
    assert file_of(HEADER) == VALID


def test_empty_group() -> None:
    header = encode_header(lay_out([], []), "empty", "Model", content_of([]))
    assert read(header).layout.num_bytes == 0


def with_entry(name: str, **changes: object) -> bytes:
    return file_of({**HEADER, name: {**HEADER[name], **changes}})


def with_metadata(**changes: object) -> bytes:
    metadata = HEADER["__metadata__"] | {f"group_offload.{key}": value for key, value in changes.items()}
    return file_of({**HEADER, "__metadata__": metadata})


def with_tensors(value: object) -> bytes:
    return with_metadata(tensors=json.dumps(value))


SPECS = json.loads(HEADER["__metadata__"]["group_offload.tensors"])
HUGE = 10**4000

REFUSED = {
    "nothing": b"",
    "seven bytes": b"\0" * 7,
    "a header longer than the file": struct.pack("<Q", 1 << 20) + VALID[8:],
    "a header of 2**64": b"\xff" * 8 + VALID[8:],
    "not UTF-8": file_of(b'{"\xff": 1}'),
    "UTF-16": file_of(json.dumps(HEADER).encode("utf-16")),
    "a list": file_of([]),
    "a number": file_of(1),
    "deep": file_of(b"[" * 100_000),
    "deep objects": file_of(b'{"a":' * 100_000),
    "NaN": file_of(b'{"a": NaN}'),
    "Infinity": file_of(b'{"a": -Infinity}'),
    "a fraction": file_of(b'{"a": 1.0}'),
    "too many digits": file_of(b'{"a": ' + b"1" * 5000 + b"}"),
    "a key twice": file_of(
        json.dumps(HEADER)[:-1].encode() + b',"plain":' + json.dumps(HEADER["plain"]).encode() + b"}"
    ),
    "text behind it": file_of(json.dumps(HEADER).encode() + b"x"),
    "no metadata": file_of({key: value for key, value in HEADER.items() if key != "__metadata__"}),
    "metadata that is a list": file_of({**HEADER, "__metadata__": []}),
    "metadata that is a number": with_metadata(version=2),
    "metadata that is null": with_metadata(group=None),
    "a later version": with_metadata(version="4"),
    "the version of packed files": with_metadata(version="4"),
    "another codec": with_metadata(codec="zstd"),
    "an entry that is a list": file_of({**HEADER, "plain": []}),
    "an entry with more": with_entry("plain", more=1),
    "an unknown dtype": with_entry("plain", dtype="F1"),
    "a dtype that is a list": with_entry("plain", dtype=[]),
    "another dtype": with_entry("plain", dtype="F64"),
    "a dtype of the same size": with_entry("plain", dtype="I32"),
    "a dtype unknown to an empty tensor": with_entry("nothing", dtype="F1"),
    "a negative offset": with_entry("plain", data_offsets=[-60, 0]),
    "offsets the wrong way": with_entry("plain", data_offsets=[60, 0]),
    "one offset": with_entry("plain", data_offsets=[0]),
    "an offset past the end": with_entry("plain", data_offsets=[0, 1 << 40]),
    "overlapping": with_entry("half", data_offsets=HEADER["plain"]["data_offsets"], shape=[30]),
    "a hole": file_of({key: value for key, value in HEADER.items() if key != "__padding_1"}),
    "a huge shape": with_entry("plain", shape=[1 << 62, 1 << 62]),
    "a shape that overflows to the right size": with_entry("plain", shape=[15, (1 << 64) + 1]),
    "a huge shape of nothing": with_entry("nothing", shape=[HUGE, 0]),
    "a shape with many huge sizes": with_entry("plain", shape=[(1 << 63) - 1] * 10_000),
    "a negative shape": with_entry("plain", shape=[-3, -5]),
    "true as a size": with_entry("plain", shape=[True, 15]),
    "another shape": with_entry("plain", shape=[5, 3]),
    "a text as a shape": with_entry("plain", shape="35"),
    "tensors that are no JSON": with_metadata(tensors="x"),
    "tensors that are no text": with_metadata(tensors="\ud800"),
    "tensors that are an object": with_tensors({}),
    "no tensors": with_tensors([]),
    "tensors that are numbers": with_tensors([1]),
    "tensors of four": with_tensors([spec[:4] for spec in SPECS]),
    "a tensor too many": with_tensors([*SPECS, ["more", "float32", [1], [1], 0]]),
    "a tensor of an unknown dtype": with_tensors([[spec[0], "load", *spec[2:]] for spec in SPECS]),
    "a tensor past the end": with_tensors([[*spec[:4], 1 << 62] for spec in SPECS]),
    "a tensor of huge strides": with_tensors([[*spec[:3], [1 << 62] * len(spec[3]), spec[4]] for spec in SPECS]),
    "a tensor with more strides": with_tensors([[*spec[:3], [*spec[3], 1], spec[4]] for spec in SPECS]),
    "a tensor of another stride": with_tensors([[*spec[:3], spec[3][::-1], spec[4]] for spec in SPECS]),
    "a tensor that is called otherwise": with_tensors([["x", *SPECS[0][1:]], *SPECS[1:]]),
    "a tensor that is called as the metadata": with_tensors([["__metadata__", *SPECS[0][1:]], *SPECS[1:]]),
    "cut off": VALID[:-1],
    "cut off in the header": VALID[:1000],
    "longer": VALID + b"\0",
}


@pytest.mark.parametrize("content", REFUSED.values(), ids=REFUSED)
def test_refused(content: bytes) -> None:
    assert len(refused(content)) < 300


def test_messages_say_what_is_wrong() -> None:
    assert "cut off" in refused(VALID[:-1])
    assert "too long" in refused(VALID + b"\0")
    assert "'plain'" in refused(with_entry("plain", dtype="F64"))
    assert "overlap" in refused(with_entry("half", data_offsets=HEADER["plain"]["data_offsets"], shape=[30]))
    assert "does not end" in refused(VALID[:1000])


BOMBS = {
    "lists": b"[" + b"[]," * 300_000 + b"[]]",
    "sizes": b'{"a":{"shape":[' + b"1000," * 200_000 + b"1]}}",
    "keys": b"{" + b",".join(b'"%d":{}' % i for i in range(100_000)) + b"}",
    "depth": b"[" * 1_000_000,
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_memory_is_bounded_by_the_file(bomb: bytes) -> None:
    content = file_of(bomb, b"")
    tracemalloc.start()
    try:
        refused(content)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * len(content)


def test_huge_sparse_file(tmp_path: Path) -> None:
    """What a length field says is not allocated before it is known to be a header's."""
    path = tmp_path / "sparse"
    path.write_bytes(struct.pack("<Q", 1 << 39))
    os.truncate(path, 1 << 40)
    fd = os.open(path, os.O_RDONLY)
    tracemalloc.start()
    try:
        with pytest.raises(GroupFileError):
            read_header(fd)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
        os.close(fd)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("overlaps", [True, False])
def test_many_tensors(overlaps: bool) -> None:
    """Each is checked once, and not against all before it: with so many, that would take many minutes."""
    num_tensors = 100_000
    specs = [["x", "uint8", [1], [1], 0 if overlaps else number] for number in range(num_tensors)]
    metadata = HEADER["__metadata__"] | {"group_offload.tensors": json.dumps(specs)}
    entries = {"x": {"dtype": "U8", "shape": [num_tensors], "data_offsets": [0, num_tensors]}}
    assert "contradict" in refused(file_of({**entries, "__metadata__": metadata}, bytes(num_tensors)))


NAMES = [
    "__metadata__",
    "__padding_0",
    "__padding_1",
    "__tensor_0",
    "__tensor_x",
    "\ud800",
    "\\ud800",
    "a\udfff.b",
    "\n",
]


def test_names_that_the_format_cannot_have(tmp_path: Path) -> None:
    """Any reader opens the file, and all names are there."""
    named = {name: torch.full((3,), number) for number, name in enumerate(NAMES)}
    layout = lay_out(list(named), list(named.values()))
    data = list(data_pieces(layout, list(named.values())))
    header = encode_header(layout, "group\ud800", "Model", content_of(data))
    content = header + b"".join(piece.numpy().tobytes() for piece in data)
    found = read(content)
    assert found.layout == layout and found.group_id == "group\\ud800"
    path = tmp_path / "file.safetensors"
    path.write_bytes(content)
    loaded = {name: value for name, value in load_file(path).items() if not name.startswith("__padding_")}
    assert sorted(value[0].item() for value in loaded.values()) == list(range(len(NAMES)))
    assert loaded["\\ud800"][0] == NAMES.index("\\ud800")


def survives(content: bytes) -> None:
    try:
        found = read(content)
    except GroupFileError:
        return
    header = encode_header(found.layout, found.group_id, found.model_class, found.content)
    assert content.startswith(header) and len(content) == len(header) + found.layout.num_bytes


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_random_bytes(content: bytes, is_header: bool) -> None:
    survives(file_of(content) if is_header else content)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_mutated_bytes(data: st.DataObject) -> None:
    content = bytearray(VALID)
    length = VALID.rindex(b"}") + 1
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, length))
        match data.draw(st.sampled_from(["flip", "delete", "insert", "cut"])):
            case "flip":
                content[min(place, len(content) - 1)] ^= 1 << data.draw(st.integers(0, 7))
            case "delete":
                del content[place : place + data.draw(st.integers(1, 20))]
            case "insert":
                content[place:place] = data.draw(st.binary(max_size=8))
            case "cut" if place > 1:
                del content[place:]
    survives(bytes(content))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(0, 300) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [found for key, child in children for found in paths_in(child, (*path, key))]


def put(value: Any, path: tuple[Any, ...], new: object) -> None:
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = new


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutated_values(data: st.DataObject) -> None:
    header, specs = json.loads(json.dumps(HEADER)), json.loads(json.dumps(SPECS))
    for _ in range(data.draw(st.integers(1, 2))):
        target = data.draw(st.sampled_from([header, specs]))
        put(target, data.draw(st.sampled_from(paths_in(target))), data.draw(JSON))
        if not isinstance(header.get("__metadata__"), dict):
            break
        header["__metadata__"]["group_offload.tensors"] = json.dumps(specs)
    survives(file_of(header))


MANIFEST = Manifest("Model", (ManifestEntry("a", "group_0123456789abcdef.safetensors", "0" * 32, 5),))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutated_manifests(data: st.DataObject) -> None:
    content = json.loads(MANIFEST.encode())
    put(content, data.draw(st.sampled_from(paths_in(content))), data.draw(JSON))
    try:
        found = Manifest.decode(json.dumps(content).encode())
    except GroupFileError:
        return
    assert Manifest.decode(found.encode()) == found
    assert all("/" not in entry.file for entry in found.entries)


@pytest.mark.parametrize("file", ["../group_0123456789abcdef.safetensors", "/etc/passwd", "group_x.safetensors", ""])
def test_manifest_that_leads_out_of_the_folder(file: str) -> None:
    content = json.loads(MANIFEST.encode())
    content["groups"][0]["file"] = file
    with pytest.raises(GroupFileError, match="no name of a group file"):
        Manifest.decode(json.dumps(content).encode())


REFUSED_MANIFESTS = {
    "a key twice": MANIFEST.encode().replace(b'"version": 1', b'"version": 1, "version": 1'),
    "a later version": MANIFEST.encode().replace(b'"version": 1', b'"version": 2'),
    "another kind": MANIFEST.encode().replace(b"group_offload.manifest", b"other"),
    "a list": b"[]",
    "nothing": b"",
    "cut off": MANIFEST.encode()[:-5],
    "a negative size": MANIFEST.encode().replace(b'"num_bytes": 5', b'"num_bytes": -5'),
}


@pytest.mark.parametrize("content", REFUSED_MANIFESTS.values(), ids=REFUSED_MANIFESTS)
def test_refused_manifests(content: bytes) -> None:
    with pytest.raises(GroupFileError):
        Manifest.decode(content)
    assert Manifest.decode(MANIFEST.encode()) == MANIFEST
