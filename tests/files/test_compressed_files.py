"""Compressed group files: written, found again, proven, and refused if anything about them is wrong."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import struct
import tempfile
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from group_offload import StorageError
from group_offload.stores import compressed_files
from group_offload.stores.compressed_files import Wanted, find, find_or_compress
from group_offload.stores.folder import Folder
from group_offload.stores.safetensors_file import read_compressed_header

from ..support.compressed_files import compressed, image_in, origin_of
from ..support.compression import compressible, image_of, weights
from ..support.faults import raise_at
from ..support.folders import headers_in
from ..support.portable import IS_PORTABLE
from ..support.reading import num_fds

TENSORS = [compressible(), torch.randn(33), weights("wide", 30_000)]
IMAGE, LAYOUT = image_of(TENSORS)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"a": TENSORS[0]}, path)
    return path


def test_other_weights_get_another_file(tmp_path: Path) -> None:
    first = compressed(tmp_path, TENSORS)
    edited = [TENSORS[0].clone(), *TENSORS[1:]]
    edited[0][5] = 1
    second = compressed(tmp_path, edited)
    assert second.source.path != first.source.path
    assert torch.equal(image_in(first), IMAGE) and torch.equal(image_in(second), image_of(edited)[0])
    renamed = replace(LAYOUT, specs=tuple(replace(spec, fqn=f"{spec.fqn}_2") for spec in LAYOUT.specs))
    third = find_or_compress(Folder(tmp_path, "Model"), Wanted("blocks_0", renamed, TENSORS))
    other_class = find_or_compress(Folder(tmp_path, "Other"), Wanted("blocks_0", LAYOUT, TENSORS))
    assert third is not None and other_class is not None
    assert len({each.source.path for each in (first, second, third, other_class)}) == 4


NUM_BLOBS = 9
MANY = [
    Wanted(f"blocks_{seed}", image_of([tensor])[1], [tensor])
    for seed in range(NUM_BLOBS)
    for tensor in [weights("normal", 50_000, seed=seed)]
]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_compression_that_ends_early(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor and no temporary file is left; what was written is found the next time. Hazard: a full disk or Ctrl-C
    leaves descriptors or half a file."""
    before, folder = num_fds(), Folder(tmp_path, "Model")
    num_syncs = 1 if IS_PORTABLE else 2  # of each file, and of the folder after it
    raise_at(monkeypatch, os, "fsync", num_syncs * 4 + 1, error)
    with pytest.raises(StorageError if error is OSError else error):
        [find_or_compress(folder, wanted) for wanted in MANY]
    gc.collect()
    assert num_fds() <= before and all(path.suffix == ".safetensors" for path in tmp_path.iterdir())
    assert len(headers_in(tmp_path)) == 4
    monkeypatch.undo()
    for wanted in MANY:
        found = find_or_compress(folder, wanted)
        assert found is not None and torch.equal(image_in(found), image_of(wanted.tensors)[0])
    assert len(headers_in(tmp_path)) == NUM_BLOBS


# ------------------------------------------------------------------------------------------------ by facts


def from_checkpoint(checkpoint: Path, position: int = 64) -> Wanted:
    tensors = [load_file(checkpoint)["a"]]
    return Wanted("blocks_0", image_of(tensors)[1], tensors, origin_of(checkpoint, tensors[0], position))


@pytest.mark.parametrize("is_full", [False, True], ids=["", "full"])
def test_a_checkpoint_that_is_the_same_under_new_facts(
    is_full: bool, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was touched, or copied: the hashes find the file, nothing is compressed, and from then on its facts find it.

    Where the folder takes no file, the hashes find it each time.
    """
    first = compressed(tmp_path, TENSORS[:1], from_checkpoint(checkpoint).origin)
    os.utime(checkpoint, (1, 1))
    now = from_checkpoint(checkpoint)
    monkeypatch.setattr(compressed_files, "compress", lambda *args, **kwargs: pytest.fail("it was compressed again"))
    if is_full:
        monkeypatch.setattr(os, "write", lambda *args: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    assert compressed(tmp_path, TENSORS[:1], now.origin).source.path == first.source.path
    found = find(Folder(tmp_path, "Model"), now)
    assert (None if found is None else found.source.path) == (None if is_full else first.source.path)
    assert len(headers_in(tmp_path)) == 1
    assert torch.equal(image_in(first), image_of(TENSORS[:1])[0])


# ------------------------------------------------------------------------------------------------ damage


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_headers(tmp_path: Path, data: st.DataObject) -> None:
    """Any header that differs is refused, at a cost that the file's size bounds. Hazard: a damaged header is believed,
    or crashes the reader."""
    path = tmp_path / "group_0.safetensors"
    if not path.exists():
        shutil.copy(compressed(tmp_path / "groups", TENSORS).source.path, path)
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
        assert read_compressed_header(file.fileno(), LAYOUT, "blocks_0", "Model") is None


def test_a_header_that_claims_to_be_huge(tmp_path: Path) -> None:
    """What a length field says is not allocated before it is known to be a header's. Hazard: a damaged header makes the
    reader allocate without bounds."""
    path = tmp_path / "sparse"
    path.write_bytes(struct.pack("<Q", 1 << 39))
    os.truncate(path, 1 << 40)
    tracemalloc.start()
    try:
        with open(path, "rb") as file:
            assert read_compressed_header(file.fileno(), LAYOUT, "blocks_0", "Model") is None
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
