"""Group files: their names, whose they are, and what happens when a disk or another program misbehaves."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import nn

from group_offload import StorageError, apply_group_offloading
from group_offload.stores import files
from group_offload.stores.files import FileMap
from group_offload.stores.folder import file_name

from ..support.asserts import assert_at_rest, assert_own_memory, assert_same, named_tensors
from ..support.faults import raise_at
from ..support.files import failing, flip_a_bit
from ..support.folders import facts
from ..support.models import Model, inputs, make
from ..support.processes import run_python
from ..support.rigs import LEVELS, check, offload_to, pair, run

every_level = pytest.mark.parametrize("level", LEVELS)


# ---------------------------------------------------------------- what else may be there


FOREIGN: dict[str, Callable[[Path], Any]] = {
    "garbage": lambda path: path.write_bytes(b"not a safetensors file" * 1000),
    "other byte": lambda path: flip_a_bit(path, path.write_bytes(_right(path)) - 300),
    "truncated": lambda path: path.write_bytes(_right(path)[:-1]),
    "longer": lambda path: path.write_bytes(_right(path) + b"\0"),
    "fifo": os.mkfifo,  # whoever opens it to read is blocked
    "folder": Path.mkdir,
}


def _right(path: Path) -> bytes:
    """What would be written."""
    elsewhere = path.parent.parent / "elsewhere"
    offload_to(elsewhere, make(Model))
    return (elsewhere / path.name).read_bytes()


@pytest.mark.parametrize("place", FOREIGN.values(), ids=FOREIGN)
def test_foreign_file_is_neither_used_nor_touched(place: Callable[[Path], None], tmp_path: Path) -> None:
    """Hazard: a file with a group's name is trusted because it exists, or is overwritten."""
    folder = tmp_path / "groups"
    folder.mkdir()
    foreign = [folder / file_name("blocks_0_0"), folder / file_name("Model_unmatched_group")]
    for path in foreign:
        place(path)
    before = facts(folder)
    model, reference = pair()
    handle = offload_to(folder, model)
    check(model, reference, inputs())
    for twin in (model, reference):
        twin.blocks[0].up.weight.data.mul_(2)
        twin.half()
    check(model, reference, inputs().half())
    handle.remove()
    assert_at_rest(model, reference)
    assert before.items() <= facts(folder).items() and not list(folder.glob("*.tmp"))


# ---------------------------------------------------------------- edits


@every_level
def test_edited_weights_rest_in_ram(level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written, so a full disk stops no edit; no file is deleted. Hazard: in-place edits of weights in files are
    lost."""
    offload_to(tmp_path, make(Model), level).remove()
    before = facts(tmp_path)
    model, reference = pair()
    handle = offload_to(tmp_path, model, level)
    assert handle.stats().host_bytes == 0
    monkeypatch.setattr(os, "write", failing(errno.ENOSPC))
    for number in range(3):
        for twin in (model, reference):
            twin.gain.data[0] += 1
            if number == 1:
                twin.blocks[1].up.weight.data.mul_(2)
        check(model, reference, inputs(), passes=2)
        assert facts(tmp_path) == before
        edited = model.gain.nbytes + (model.blocks[1].up.weight.nbytes if number else 0)
        in_ram = sum(group.num_bytes for group in handle.groups if "RAM" in group.location)
        assert edited <= handle.stats().host_bytes <= in_ram
    handle.remove()
    shutil.rmtree(tmp_path)
    assert_own_memory(model)
    assert_at_rest(model, reference)


# ---------------------------------------------------------------- folders that cannot be written


def assert_untouched(model: nn.Module, reference: nn.Module, before: dict[str, int]) -> None:
    assert_at_rest(model, reference)
    assert_own_memory(model)
    assert {name: id(tensor) for name, tensor in named_tensors(model)} == before
    assert_same(run(model, inputs()), run(reference, inputs()))


def ids(model: nn.Module) -> dict[str, int]:
    return {name: id(tensor) for name, tensor in named_tensors(model)}


@pytest.mark.parametrize(
    ("name", "why"),
    [("file/groups", ""), ("/proc/self/groups", ""), ("file", "not a folder"), ("link", "a link that leads nowhere")],
)
def test_folder_that_cannot_be_written(name: str, why: str, tmp_path: Path) -> None:
    model, reference = pair()
    before = ids(model)
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StorageError, match=f"{tmp_path / name}.*{why}.*offload_to_disk_path"):
        offload_to(tmp_path / name, model)
    assert_untouched(model, reference, before)
    offload_to(tmp_path / "groups", model)
    check(model, reference, inputs())
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link", "groups"}


@pytest.mark.parametrize(("code", "after"), [(errno.ENOSPC, 0), (errno.EIO, 3), (errno.EDQUOT, 20), (errno.EIO, 40)])
def test_write_that_fails_in_the_middle(code: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = pair()
    before = ids(model)
    with monkeypatch.context() as patch:
        raise_at(patch, os, "write", after + 1, OSError(code, os.strerror(code)), ever_after=True)
        with pytest.raises(StorageError) as caught:
            offload_to(tmp_path, model)
    message = str(caught.value)
    assert os.strerror(code) in message and "group_" in message and str(tmp_path) in message
    assert code != errno.ENOSPC or "Free some space" in message
    assert "blocks_" in message or "Model_unmatched_group" in message
    assert_untouched(model, reference, before)
    for path in tmp_path.iterdir():  # one that had its name already is whole, and is used the next time
        assert path.suffix == ".safetensors" and load_file(path)
    offload_to(tmp_path, model)
    check(model, reference, inputs())


def test_small_weights_share_a_mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has 65530 mappings. Where each takes a descriptor, a file has one."""
    large = nn.Linear(256, 256)
    model = nn.Sequential(nn.Sequential(large, *(nn.Linear(4, 4) for _ in range(200))))
    for expected in (3, 2):  # the page cache, the large one, and the small ones
        handle = apply_group_offloading(model, "cpu", offload_to_disk_path=tmp_path, num_blocks_per_group=1)
        (where,) = {group.location for group in handle.groups if group.num_bytes}
        assert Path("/proc/self/maps").read_text().count(f"{tmp_path}/{where}") == expected
        handle.remove()
        monkeypatch.setattr(files, "IS_LINUX", False)


@pytest.mark.parametrize("tier", ["groups", "checkpoint"])
def test_ram_falls_by_the_weights(tier: str, tmp_path: Path) -> None:
    """Those of a checkpoint never take any. Hazard: weights that are on disk still take their RAM (ComfyUI #12332, #13598,
    #15255); offloading takes as much RAM again as the checkpoint (diffusers #10847, #11106, #7970)."""
    done = run_python(
        """
        from tests.support.on_device import lay_in_file
        def anonymous():
            return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) / 1024
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in "ab")) for _ in range(6)))  # 192 MiB
        x = torch.randn(1, 2048)
        expected = run(model, x)
        options = {"offload_to_disk_path": sys.argv[2]}
        if sys.argv[1] == "checkpoint":
            lay_in_file(model, pathlib.Path(sys.argv[2]) / "model.safetensors")
            options = {"offload_device": "disk"}
        before = anonymous()
        handle = apply_group_offloading(model, "cpu", **options)
        after = anonymous()
        for _ in range(3):
            assert torch.equal(run(model, x), expected)
        running = anonymous()
        for block in model:
            block[0].weight.data.neg_()
        assert torch.equal(run(model, x), expected)
        edited = anonymous()
        print(handle.stats().host_bytes >> 20)
        handle.remove()
        print(before - after, before - running, edited - running, anonymous() - before)
        """,
        tier,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    in_ram, fell, stayed, edited, came_back = map(float, done.stdout.split())
    took = 192 if tier == "groups" else 0
    assert fell > took - 12 and stayed > took - 52
    assert in_ram == (96 if tier == "groups" else 192) and edited < in_ram + 24  # of a checkpoint, whole groups
    assert abs(came_back) < 40 or tier == "checkpoint"


# ---------------------------------------------------------------- bits that flip


@every_level
@pytest.mark.parametrize("tier", ["groups", "checkpoint"])
def test_verification_finds_flipped_bits(level: str, tier: str, tmp_path: Path) -> None:
    """Hazard: a bit flips on the disk or in memory."""
    model, reference = pair()
    options: dict[str, Any] = {"verify_checksums": True, "offload_type": level}
    if tier == "groups":
        options["offload_to_disk_path"] = tmp_path
    else:
        save_file(model.state_dict(), tmp_path / "model.safetensors")
        model.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
        options["offload_device"] = "disk"
    handle = apply_group_offloading(model, "cpu", **options)
    check(model, reference, inputs(), passes=2)
    if tier == "groups":
        path = tmp_path / next(group.location for group in handle.groups if re.match("blocks[_.]1", group.group_id))
        position = 4096 + 100
    else:
        place = FileMap().find(model.blocks[1].up.weight.detach())
        assert place is not None
        path, position = Path(place.path), place.position + place.num_bytes // 2
    for _ in range(2):
        flip_a_bit(path, position)
        for _ in range(2):
            with pytest.raises(StorageError, match="XXH3") as caught:
                run(model, inputs())
            assert path.name in str(caught.value) and "'blocks" in str(caught.value)
        flip_a_bit(path, position)
        check(model, reference, inputs(), passes=2)
    handle.remove()
