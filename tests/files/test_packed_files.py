"""Packed group files: written, found again, proven, and refused if anything about them is wrong."""

from __future__ import annotations

import _thread
import gc
import json
import os
import shutil
import signal
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from group_offload import GroupFileError
from group_offload.base.layout import BlobLayout, lay_out
from group_offload.packing.codec import unpack
from group_offload.stores import packed_files
from group_offload.stores.folder import Folder
from group_offload.stores.manifest import Manifest, PackedFrom
from group_offload.stores.packed_files import (
    Origin,
    PackedFile,
    PackedFiles,
    Wanted,
    give_up_outdated,
    origin_of,
)
from group_offload.stores.safetensors_file import read_header
from group_offload.stores.source import Piece, SourceFile

from ..support.folders import assert_whole, headers_in, manifests
from ..support.packing import image_of, packable, weights

TENSORS = [packable(), torch.randn(33), weights("wide", 30_000)]
IMAGE, LAYOUT = image_of(TENSORS)


def find_or_pack(folder: Folder, wanted: Wanted) -> PackedFile | None:
    (found,) = PackedFiles(folder).find_or_pack([wanted])
    return found


def packed(path: Path, tensors: list[torch.Tensor] = TENSORS, origin: Origin | None = None) -> PackedFile:
    """What a set-up does: the packed file of a group, and the manifest."""
    folder = Folder(path, "Model")
    with folder.locked():
        folder.prepare(1000)
        found = find_or_pack(folder, Wanted("blocks_0", image_of(tensors)[1], tensors, origin))
        assert found is not None
        os.close(found.fd)
        folder.publish_manifest([found.entry])
        folder.keep_manifest()
    return found


def reopened(found: PackedFile) -> PackedFile:
    return replace(found, fd=os.open(found.path, os.O_RDONLY))


def image_in(found: PackedFile) -> torch.Tensor:
    again = reopened(found)
    memory = torch.empty(found.packed.packed_bytes, dtype=torch.uint8)
    try:
        again.read(memory)
    finally:
        os.close(again.fd)
    out = torch.empty(found.packed.plain_bytes, dtype=torch.uint8)
    unpack(memory, found.packed, out)
    return out


def stamps(path: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in path.iterdir() if file.name.startswith("group_")}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"a": TENSORS[0]}, path)
    return path


def test_a_packed_file_is_a_safetensors_file(tmp_path: Path) -> None:
    found = packed(tmp_path / "groups")
    loaded = load_file(found.path)
    assert {name: (value.dtype, value.numel()) for name, value in loaded.items()} == {
        "packed": (torch.uint8, found.packed.packed_bytes)
    }
    with safe_open(found.path, "pt") as file:
        metadata = file.metadata()
    assert metadata["group_offload.codec"] == "exponents" and metadata["group_offload.version"] == "4"
    assert json.loads(metadata["group_offload.packed"])["version"] == 2
    assert found.start % 4096 == 0
    assert torch.equal(image_in(found), IMAGE)


def test_it_is_found_again_and_verified(tmp_path: Path) -> None:
    first = packed(tmp_path)
    before = stamps(tmp_path)
    assert packed(tmp_path).path == first.path and stamps(tmp_path) == before
    assert_whole(tmp_path)
    (header,) = headers_in(tmp_path).values()
    assert header.packed == first.packed


def test_it_stands_beside_the_plain_file_of_its_group(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "Model")
    plain = folder.find_or_write("blocks_0", LAYOUT, TENSORS, lambda num_bytes: None)
    os.close(plain.fd)
    assert packed(tmp_path).path != plain.path
    again = folder.find_or_write("blocks_0", LAYOUT, TENSORS, lambda num_bytes: None)
    os.close(again.fd)
    assert again.path == plain.path and len(stamps(tmp_path)) == 2


def test_other_weights_get_another_file(tmp_path: Path) -> None:
    first = packed(tmp_path)
    edited = [TENSORS[0].clone(), *TENSORS[1:]]
    edited[0][5] = 1
    second = packed(tmp_path, edited)
    assert second.path != first.path
    assert torch.equal(image_in(first), IMAGE) and torch.equal(image_in(second), image_of(edited)[0])
    renamed = replace(LAYOUT, specs=tuple(replace(spec, fqn=f"{spec.fqn}_2") for spec in LAYOUT.specs))
    third = find_or_pack(Folder(tmp_path, "Model"), Wanted("blocks_0", renamed, TENSORS))
    other_class = find_or_pack(Folder(tmp_path, "Other"), Wanted("blocks_0", LAYOUT, TENSORS))
    assert third is not None and other_class is not None
    assert len({first.path, second.path, third.path, other_class.path}) == 4
    os.close(third.fd)
    os.close(other_class.fd)


def test_what_does_not_pack_is_in_no_file(tmp_path: Path) -> None:
    tensors = [torch.randn(10_000)]
    layout = image_of(tensors)[1]
    assert find_or_pack(Folder(tmp_path, "Model"), Wanted("blocks_0", layout, tensors)) is None
    assert not stamps(tmp_path)


NUM_BLOBS = 9
MANY = [
    Wanted(f"blocks_{seed}", image_of([tensor])[1], [tensor])
    for seed in range(NUM_BLOBS)
    for tensor in [weights("normal", 50_000, seed=seed)]
]


@pytest.mark.parametrize(("overlaps", "has_threads"), [(False, True), (True, True), (True, False)])
def test_many_blobs_are_packed_in_order(
    overlaps: bool, has_threads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads read and write beside the one that packs. No more is in RAM at once than there is room for."""
    if not has_threads:
        monkeypatch.setattr(threading.Thread, "start", no_more_threads)
    here, pack, num_begun, num_packed = threading.get_ident(), packed_files.pack, 0, 0

    def spy(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_packed
        assert threading.get_ident() == here
        num_packed += 1
        return pack(*args, **kwargs)

    def wanted() -> Iterator[Wanted]:
        nonlocal num_begun
        for each in MANY:
            num_begun += 1
            yield each

    monkeypatch.setattr(packed_files, "pack", spy)
    for _ in range(2):
        num_begun, names = 0, []
        for number, found in enumerate(
            PackedFiles(Folder(tmp_path, "Model")).find_or_pack(wanted(), overlaps=overlaps)
        ):
            assert found is not None and num_begun <= number + (packed_files._MOST_AT_ONCE if overlaps else 1)
            names.append(found.entry.group_id)
            assert torch.equal(image_in(found), image_of(MANY[number].tensors)[0])
            os.close(found.fd)
        assert names == [each.group_id for each in MANY] and num_packed == NUM_BLOBS
    assert len(stamps(tmp_path)) == NUM_BLOBS


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("fault", ["a full drive", "an interrupt", "the caller's own error", "nobody asks for more"])
def test_packing_that_ends_early(fault: str, overlaps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor and no temporary file is left; what was written is found the next time."""
    before, write, num_written = descriptors(), Folder.write, 0

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_written
        num_written += 1
        if num_written == 5 and fault == "a full drive":
            raise GroupFileError("The folder is full.")
        if num_written == 5 and fault == "an interrupt":
            _thread.interrupt_main()
        return write(*args, **kwargs)

    def wanted() -> Iterator[Wanted]:
        for number, each in enumerate(MANY):
            if number == 5 and fault == "the caller's own error":
                raise GroupFileError("a checkpoint changed")
            yield each

    monkeypatch.setattr(Folder, "write", fail)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored in the background
    found = PackedFiles(Folder(tmp_path, "Model")).find_or_pack(wanted(), overlaps=overlaps)
    errors = {"an interrupt": KeyboardInterrupt, "nobody asks for more": StopIteration}

    def consume() -> None:
        for number, one in enumerate(found):
            assert one is not None
            os.close(one.fd)
            if number == 3 and fault == "nobody asks for more":
                found.close()
                next(found)
        time.sleep(1)  # for the interrupt

    try:
        with pytest.raises(errors.get(fault, GroupFileError)):
            consume()
    finally:
        signal.signal(signal.SIGINT, handler)
    found.close()
    assert descriptors() == before and all(path.suffix == ".safetensors" for path in tmp_path.iterdir())
    monkeypatch.undo()
    for one in PackedFiles(Folder(tmp_path, "Model")).find_or_pack(MANY, overlaps=overlaps):
        assert one is not None
        os.close(one.fd)
    assert len(stamps(tmp_path)) == NUM_BLOBS


def no_more_threads(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def descriptors() -> list[str]:
    """What is open in this process."""
    gc.collect()
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the list itself
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(found)


def test_tensors_of_a_checkpoint_in_another_order(tmp_path: Path) -> None:
    """There the offsets follow the file, not the module."""
    tensors = [weights("cauchy", 3000), packable()]
    layout = lay_out(["b", "a"], tensors[::-1])
    layout = BlobLayout(layout.specs[::-1], layout.extents[::-1], layout.num_bytes)
    layout = replace(layout, extents=tuple(replace(extent, tensors=(i,)) for i, extent in enumerate(layout.extents)))
    found = find_or_pack(Folder(tmp_path, "Model"), Wanted("blocks_0", layout, tensors))
    assert found is not None
    os.close(found.fd)
    assert all(torch.equal(view, tensor) for view, tensor in zip(layout.views(image_in(found)), tensors, strict=True))
    assert_whole(tmp_path)


# ------------------------------------------------------------------------------------------------ by facts


def from_checkpoint(checkpoint: Path, position: int = 64) -> tuple[Origin, BlobLayout]:
    layout = image_of(TENSORS[:1])[1]
    with open(checkpoint, "rb") as file:
        source = SourceFile(checkpoint, file.fileno(), 0, checkpoint.stat().st_size)
    origin = origin_of(source, [Piece(0, position, TENSORS[0].nbytes)], layout)
    assert origin is not None
    return origin, layout


def test_it_is_found_without_reading_the_weights(tmp_path: Path, checkpoint: Path) -> None:
    origin, layout = from_checkpoint(checkpoint)
    first = packed(tmp_path / "groups", TENSORS[:1], origin)
    files = PackedFiles(Folder(tmp_path / "groups", "Model"))
    found = files.find("blocks_0", layout, origin)
    assert found is not None and found.path == first.path and files.num_changed == 0
    os.close(found.fd)
    assert torch.equal(image_in(found), image_of(TENSORS[:1])[0])
    elsewhere, _ = from_checkpoint(checkpoint, 72)
    assert files.find("blocks_0", layout, elsewhere) is None


def test_a_checkpoint_that_changed_since(tmp_path: Path, checkpoint: Path) -> None:
    origin, layout = from_checkpoint(checkpoint)
    packed(tmp_path / "groups", TENSORS[:1], origin)
    save_file({"a": weights("normal", len(TENSORS[0]), seed=9)}, checkpoint)
    now, _ = from_checkpoint(checkpoint)
    files = PackedFiles(Folder(tmp_path / "groups", "Model"))
    assert files.find("blocks_0", layout, now) is None and files.num_changed == 1
    changed = [weights("normal", len(TENSORS[0]), seed=9)]
    second = packed(tmp_path / "groups", changed, now)
    assert torch.equal(image_in(second), image_of(changed)[0])
    folder = Folder(tmp_path / "groups")
    assert give_up_outdated(folder, [packed(tmp_path / "groups").entry]) == 0  # another model
    assert give_up_outdated(folder, [second.entry]) == 1
    assert_whole(folder.path)
    assert len(manifests(folder.path)) == 2
    checkpoint.unlink()  # or its drive is not there
    assert give_up_outdated(folder, [second.entry]) == 0


def test_a_checkpoint_that_is_the_same_under_new_facts(tmp_path: Path, checkpoint: Path) -> None:
    """It was touched, or copied: the hashes find the file, and from then on its facts do."""
    origin, layout = from_checkpoint(checkpoint)
    first = packed(tmp_path / "groups", TENSORS[:1], origin)
    os.utime(checkpoint)
    now, _ = from_checkpoint(checkpoint)
    assert packed(tmp_path / "groups", TENSORS[:1], now).path == first.path
    found = PackedFiles(Folder(tmp_path / "groups", "Model")).find("blocks_0", layout, now)
    assert found is not None
    os.close(found.fd)


def test_a_checkpoint_that_changes_while_it_is_packed(tmp_path: Path, checkpoint: Path) -> None:
    origin, layout = from_checkpoint(checkpoint)
    os.utime(checkpoint)
    with pytest.raises(GroupFileError, match="changed while it was being packed"):
        find_or_pack(Folder(tmp_path / "groups", "Model"), Wanted("blocks_0", layout, TENSORS[:1], origin))
    assert not (tmp_path / "groups").exists() or not stamps(tmp_path / "groups")


def test_a_packed_file_that_was_replaced_is_not_found_by_facts(tmp_path: Path, checkpoint: Path) -> None:
    origin, layout = from_checkpoint(checkpoint)
    first = packed(tmp_path / "groups", TENSORS[:1], origin)
    shutil.copy(first.path, tmp_path / "copy")
    os.replace(tmp_path / "copy", first.path)
    assert PackedFiles(Folder(tmp_path / "groups", "Model")).find("blocks_0", layout, origin) is None


def test_facts_in_manifests() -> None:
    facts = PackedFrom("/model.safetensors", "1:2:3:4:5", "ab", "5:4:3:2:1")
    plain = {"group_id": "a", "file": f"group_{'0' * 16}.safetensors", "content": "c", "num_bytes": 1}
    text = {"kind": "group_offload.manifest", "version": 1, "model_class": "Model"}
    for extra, expected in (({}, None), ({"packed_from": {**vars_of(facts)}}, facts)):
        manifest = Manifest.decode(json.dumps({**text, "groups": [{**plain, **extra}]}).encode())
        assert manifest.entries[0].packed_from == expected
        assert Manifest.decode(manifest.encode()).entries[0].packed_from == expected
        assert ("packed_from" in manifest.encode().decode()) == (expected is not None)
    with pytest.raises(GroupFileError):
        Manifest.decode(json.dumps({**text, "groups": [{**plain, "packed_from": {"path": 1}}]}).encode())


def vars_of(facts: PackedFrom) -> dict[str, str]:
    return {name: getattr(facts, name) for name in ("path", "source", "place", "file")}


# ------------------------------------------------------------------------------------------------ damage


def with_metadata(path: Path, **values: str) -> None:
    """Another header. The data stays where it is."""
    with open(path, "rb") as file:
        raw = read_header(file.fileno()).raw
    entries = json.loads(raw[8:])
    entries["__metadata__"] |= {f"group_offload.{key}": value for key, value in values.items()}
    text = json.dumps(entries, separators=(",", ":")).encode()
    path.write_bytes(struct.pack("<Q", len(raw) - 8) + text.ljust(len(raw) - 8) + path.read_bytes()[len(raw) :])


@pytest.mark.parametrize("what", ["byte", "cut", "table"])
def test_a_damaged_file(tmp_path: Path, what: str) -> None:
    found = packed(tmp_path)
    data = bytearray(found.path.read_bytes())
    if what == "cut":
        del data[-4096:]
    else:
        data[found.start + (10 if what == "table" else 70_000)] ^= 1
    found.path.write_bytes(data)
    with pytest.raises(GroupFileError, match="cut off" if what == "cut" else "not what was written"):
        headers_in(tmp_path)
    with pytest.raises(GroupFileError, match="Delete it: it is packed again"):
        image_in(found)
    again = packed(tmp_path)
    assert again.path != found.path and torch.equal(image_in(again), IMAGE)


def test_a_later_version_is_left_alone(tmp_path: Path) -> None:
    found = packed(tmp_path)
    with_metadata(found.path, version="5")
    assert packed(tmp_path).path != found.path


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"codec": "none"}, "another version of this package"),
        ({"version": "2"}, "another version of this package"),
        ({"packed": "{}"}, "another version packed it"),
        ({"packed": "["}, "cannot be read"),
        ({"content": "0" * 32}, "not what was written"),
        ({"tensors": '[["a","bfloat16",[1000000000],[1],0]]'}, "lies past the end"),
    ],
)
def test_wrong_headers(tmp_path: Path, values: dict[str, str], problem: str) -> None:
    found = packed(tmp_path)
    with_metadata(found.path, **values)
    with pytest.raises(GroupFileError, match=problem):
        headers_in(tmp_path)
