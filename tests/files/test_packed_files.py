"""Packed group files: written, found again, proven, and refused if anything about them is wrong."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import struct
import tempfile
import tracemalloc
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from group_offload import GroupFileError
from group_offload.stores import packed_files
from group_offload.stores.folder import Folder
from group_offload.stores.packed_files import PackedFile, PackedFiles, Wanted
from group_offload.stores.safetensors_file import read_packed_header

from ..support.folders import headers_in
from ..support.packed_files import find_or_pack, image_in, origin_of, packed
from ..support.packing import image_of, packable, weights

TENSORS = [packable(), torch.randn(33), weights("wide", 30_000)]
IMAGE, LAYOUT = image_of(TENSORS)


def groups_in(path: Path) -> list[str]:
    return [file.name for file in path.iterdir() if file.name.startswith("group_")]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"a": TENSORS[0]}, path)
    return path


def test_other_weights_get_another_file(tmp_path: Path) -> None:
    first = packed(tmp_path, TENSORS)
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


NUM_BLOBS = 9
MANY = [
    Wanted(f"blocks_{seed}", image_of([tensor])[1], [tensor])
    for seed in range(NUM_BLOBS)
    for tensor in [weights("normal", 50_000, seed=seed)]
]


@pytest.mark.parametrize("error", [GroupFileError, KeyboardInterrupt])
@pytest.mark.parametrize("at", ["a write", "the caller's own blobs"])
def test_packing_that_ends_early(
    at: str, error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor and no temporary file is left; what was written is found the next time. Hazard: a full disk, Ctrl-C
    or a changed checkpoint leaves descriptors or half a file."""
    before, obtain, num_written = descriptors(), Folder.obtain, 0

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_written
        num_written += 1
        if num_written == 5:
            raise error
        return obtain(*args, **kwargs)

    def wanted() -> Iterator[Wanted]:
        yield from MANY[:5]
        raise error

    if at == "a write":
        monkeypatch.setattr(Folder, "obtain", fail)
    with pytest.raises(error):
        close_all(PackedFiles(Folder(tmp_path, "Model")).find_or_pack(wanted()))
    assert descriptors() == before and all(path.suffix == ".safetensors" for path in tmp_path.iterdir())
    assert len(groups_in(tmp_path)) == (4 if at == "a write" else 5)
    monkeypatch.undo()
    for wanted_one, found in zip(MANY, PackedFiles(Folder(tmp_path, "Model")).find_or_pack(MANY), strict=True):
        assert found is not None and torch.equal(image_in(found), image_of(wanted_one.tensors)[0])
        os.close(found.fd)
    assert len(groups_in(tmp_path)) == NUM_BLOBS


def close_all(found: Iterable[PackedFile | None]) -> None:
    for one in found:
        assert one is not None
        os.close(one.fd)


def descriptors() -> list[str]:
    """What is open in this process."""
    gc.collect()
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the list itself
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(found)


# ------------------------------------------------------------------------------------------------ by facts


def from_checkpoint(checkpoint: Path, position: int = 64) -> Wanted:
    tensors = [load_file(checkpoint)["a"]]
    return Wanted("blocks_0", image_of(tensors)[1], tensors, origin_of(checkpoint, tensors[0], position))


def find(folder: Path, wanted: Wanted) -> tuple[Path | None, int]:
    """The file that is found by facts, and how many blobs have changed."""
    files = PackedFiles(Folder(folder, "Model"))
    found = files.find(wanted)
    if found is not None:
        os.close(found.fd)
    return None if found is None else found.path, files.num_changed


@pytest.mark.parametrize("is_full", [False, True], ids=["", "full"])
def test_a_checkpoint_that_is_the_same_under_new_facts(
    is_full: bool, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was touched, or copied: the hashes find the file, nothing is packed, and from then on its facts find it.

    Where the folder takes no file, the hashes find it each time.
    """
    first = packed(tmp_path, TENSORS[:1], from_checkpoint(checkpoint).origin)
    os.utime(checkpoint, (1, 1))
    now = from_checkpoint(checkpoint)
    monkeypatch.setattr(packed_files, "pack", lambda *args, **kwargs: pytest.fail("it was packed again"))
    if is_full:
        monkeypatch.setattr(os, "write", lambda *args: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    assert packed(tmp_path, TENSORS[:1], now.origin).path == first.path
    assert find(tmp_path, now) == ((None, 1) if is_full else (first.path, 0)) and len(headers_in(tmp_path)) == 1
    assert torch.equal(image_in(first), image_of(TENSORS[:1])[0])


# ------------------------------------------------------------------------------------------------ damage


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_headers(tmp_path: Path, data: st.DataObject) -> None:
    """Any header that differs is refused, at a cost that the file's size bounds. Hazard: a damaged header is believed,
    or crashes the reader."""
    path = tmp_path / "group_0.safetensors"
    if not path.exists():
        shutil.copy(packed(tmp_path / "groups", TENSORS).path, path)
    right = path.read_bytes()
    length = 8 + int.from_bytes(right[:8], "little")
    content = bytearray(right[:length])
    place = data.draw(st.integers(0, right.rindex(b"}", 0, length)))
    match data.draw(st.sampled_from(["flip", "delete", "insert", "cut", "all"])):
        case "flip":
            content[place] ^= 1 << data.draw(st.integers(0, 7))
        case "delete":
            del content[place : place + data.draw(st.integers(1, 20))]
        case "insert":
            content[place:place] = data.draw(st.binary(min_size=1, max_size=8))
        case "cut":
            del content[place:]
        case "all":
            content[8:] = data.draw(
                st.sampled_from([b"[" * 100_000, b'{"a":' * 1000, b"null", b"{}", b'{"__metadata__":1}'])
            )
    with tempfile.TemporaryFile() as file:
        file.write(bytes(content) + right[length:])
        file.flush()
        assert read_packed_header(file.fileno(), LAYOUT, "blocks_0", "Model") is None


def test_a_header_that_claims_to_be_huge(tmp_path: Path) -> None:
    """What a length field says is not allocated before it is known to be a header's. Hazard: a damaged header makes the
    reader allocate without bounds."""
    path = tmp_path / "sparse"
    path.write_bytes(struct.pack("<Q", 1 << 39))
    os.truncate(path, 1 << 40)
    tracemalloc.start()
    try:
        with open(path, "rb") as file:
            assert read_packed_header(file.fileno(), LAYOUT, "blocks_0", "Model") is None
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
