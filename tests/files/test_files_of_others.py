"""Files that other users wrote do not decide what is computed, and what this package did not write is not deleted."""

from __future__ import annotations

import json
import os
import stat
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from group_offload import StorageError
from group_offload.base.ownership import ForeignFileError, Owners
from group_offload.compression.codec import hash_of
from group_offload.compression.layout import CompressedLayout
from group_offload.stores.compressed_files import Wanted, find
from group_offload.stores.folder import Folder, file_name
from group_offload.stores.safetensors_file import CompressedFrom

from ..support.asserts import assert_at_rest
from ..support.compressed_files import compressed, image_in, origin_of
from ..support.compression import compressible, image_of
from ..support.files import as_root
from ..support.folders import GROUPS, assert_holds, names, set_up
from ..support.models import Model, make
from ..support.rigs import offload_to

A, B = compressible(), compressible() * 2
LAYOUT = image_of([A])[1]
UID = 12345


def give_away(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
    """Let `Owners` be told that another user owns these files."""
    inodes, check = {path.stat().st_ino for path in paths}, Owners.check

    def told(self: Owners, found: Any) -> None:
        check(self, SimpleNamespace(st_uid=UID, st_mode=found.st_mode) if found.st_ino in inodes else found)  # type: ignore[arg-type]

    monkeypatch.setattr(Owners, "check", told)


def checkpoint(path: Path, tensor: torch.Tensor) -> CompressedFrom:
    save_file({"a": tensor}, path)
    return origin_of(path, tensor)


# ------------------------------------------------------------------------------------------------ what is believed


def claim_that_it_is(path: Path, tensor: torch.Tensor, origin: CompressedFrom) -> None:
    """Another header of a compressed file: it says to hold other weights, of another checkpoint."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:start])
    metadata = entries["__metadata__"]
    layout = CompressedLayout.from_json(metadata["group_offload.compressed"])
    metadata["group_offload.compressed"] = replace(layout, hash=hash_of(image_of([tensor])[0])).to_json()
    metadata["group_offload.compressed_from"] = json.dumps(origin)
    del metadata["group_offload.header"]
    metadata["group_offload.header"] = xxhash.xxh3_128_hexdigest(json.dumps(entries).encode())
    text = json.dumps(entries, separators=(",", ":")).encode()
    path.write_bytes(struct.pack("<Q", start - 8) + text.ljust(start - 8) + data[start:])


@pytest.mark.parametrize("is_ours", [False, True], ids=["theirs", "ours"])
def test_compressed_files_of_other_weights(is_ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's header says that what was compressed from B is A. (It would be believed if it were ours.) Hazard:
    another user's compressed file claims to be compressed from your checkpoint."""
    groups, origin = tmp_path / "groups", checkpoint(tmp_path / "a.safetensors", A)
    theirs = compressed(groups, [B], checkpoint(tmp_path / "b.safetensors", B))
    claim_that_it_is(theirs.source.path, A, origin)
    if not is_ours:
        give_away(monkeypatch, theirs.source.path)
    found = find(Folder(groups, "Model"), Wanted("blocks_0", LAYOUT, [A], origin))
    assert (found is not None) == is_ours
    if found is not None:
        return
    assert torch.equal(image_in(compressed(groups, [A], origin)), image_of([A])[0])
    assert theirs.source.path.exists()


@pytest.mark.parametrize("verifies", [False, True], ids=["", "verify_checksums"])
def test_group_files(verifies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are equal now, and could be changed at any time. Hazard: a group file belongs to another user, who changes
    it after it was proven."""
    model = make(Model)
    offload_to(tmp_path, model).remove()
    theirs = sorted(tmp_path.glob("*.safetensors"))
    give_away(monkeypatch, *theirs)
    model = make(Model)
    handle = offload_to(tmp_path, model, verify_checksums=verifies)
    assert not {group.location for group in handle.groups} & {path.name for path in theirs}
    for path in theirs:
        path.write_bytes(b"changed")
    assert_at_rest(model, make(Model))
    handle.remove()


def test_files_that_others_can_write_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Hazard: others may write to a file, and so decide what is computed."""
    files = set_up(tmp_path)
    files[0].path.chmod(0o666)
    again = set_up(tmp_path)
    assert again[0].path != files[0].path and again[1].path == files[1].path
    assert f"Didn't use 1 files in {tmp_path}: other users own them or can write to them." in caplog.text


def test_a_folder_that_others_can_write_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They can replace files there, unless it is sticky. A folder in it is used that is this user's alone."""
    caplog.set_level("INFO")
    groups = tmp_path / "groups"
    groups.mkdir()
    groups.chmod(0o1777)
    files = set_up(groups)
    assert files[0].path.parent == groups
    groups.chmod(0o777)
    with pytest.raises(ForeignFileError):
        Folder(groups, "Model").owners.open(files[0].path)
    before = names(groups)
    for _ in range(2):
        files = set_up(groups)
        assert_holds(files)
        (own,) = names(groups) - before
        assert {file.path.parent for file in files} == {groups / own}
        assert stat.S_IMODE((groups / own).stat().st_mode) == 0o700
    assert caplog.text.count(f"Every user can replace files in {groups}, so group files go to {groups / own}.") == 2
    (groups / own).chmod(0o770)
    with pytest.raises(
        StorageError, match=rf"every user can replace.*{own} there can't be used: others can write to it"
    ):
        set_up(groups)
    (groups / own).chmod(0o700)
    (groups / own).rename(groups / "elsewhere")
    (groups / own).symlink_to(groups / "elsewhere")
    with pytest.raises(StorageError, match=rf"{own} there can't be used.*Pass a folder of your own"):
        set_up(groups)


@as_root
def test_another_user_took_the_name_of_our_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    own = set_up(tmp_path)[0].path.parent
    os.chown(own, UID, UID)
    with pytest.raises(StorageError, match=r"can't be used: it belongs to another user \(uid 12345\)"):
        set_up(tmp_path)


@as_root
def test_a_link_of_another_user(tmp_path: Path) -> None:
    """Hazard: another user's link decides what is computed."""
    link = tmp_path / "link"
    (tmp_path / "groups").mkdir()
    link.symlink_to(tmp_path / "groups")
    assert_holds(set_up(link))
    os.chown(link, UID, UID, follow_symlinks=False)
    with pytest.raises(StorageError, match="it is a link of another user"):
        set_up(link)


# ------------------------------------------------------------------------------------------------ what is deleted


def foreign(path: Path) -> set[str]:
    """What is not ours and must be there afterwards: all kinds of files, some with names like ours."""
    before, ours = names(path), file_name(GROUPS[0])
    for name in ("photo.jpg", "config.json", "model.safetensors", ".group_x.tmp", f"{ours}.bak", f".{ours}.1.tmp"):
        (path / name).write_text("precious")
    save_file({"weight": torch.ones(5)}, path / file_name("diffusers"))  # of diffusers, which has the same names
    outside = path.parent / "outside"
    outside.mkdir(exist_ok=True)
    (outside / "thesis.txt").write_text("precious")
    for name in (file_name("link"), f".{ours}.1.{0:016}.tmp"):
        (path / name).symlink_to(outside / "thesis.txt")
    (path / "linked").symlink_to(outside)
    (path / f".probe.2.{0:016}.tmp").write_bytes(b"")  # of another user: see `give_away`
    os.mkfifo(path / f".{ours}.2.{0:016}.tmp")
    os.mknod(path / file_name("socket"), 0o600 | stat.S_IFSOCK)
    return names(path) - before


@pytest.mark.parametrize("is_link", [False, True], ids=["a folder", "a link"])
def test_nothing_foreign_is_deleted(is_link: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By set-ups, edits, compression, removal, and by tidying up what the dead left. Hazard: other programs' files and
    links in the folder are deleted."""
    real, groups = tmp_path / "real", tmp_path / "groups"
    real.mkdir()
    there = foreign(real)
    give_away(monkeypatch, real / f".probe.2.{0:016}.tmp")
    groups.symlink_to(real) if is_link else real.rename(groups)
    (groups / f".probe.1.{0:016}.tmp").write_bytes(b"")  # a dead process's
    model = make(Model)
    handle = offload_to(groups, model)
    for _ in range(2):
        model.blocks[0].up.weight.data.add_(1)
        handle.refresh()
    handle.remove()
    compressed(groups, [A], checkpoint(tmp_path / "a.safetensors", A))
    assert there <= names(groups) and not list(groups.glob(".probe.1*"))
    assert (groups / "photo.jpg").read_text() == (tmp_path / "outside" / "thesis.txt").read_text() == "precious"
