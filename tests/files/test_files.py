"""Group files: their names, whose they are, and what happens when a disk or another program misbehaves."""

from __future__ import annotations

import copy
import errno
import hashlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from group_offload import GroupFileError, apply_group_offloading
from group_offload.stores.checkpoint import FileMap

from ..support.asserts import assert_at_rest, assert_own_memory, assert_same, named_tensors
from ..support.files import flip_a_bit
from ..support.models import Model, inputs, make
from ..support.processes import run_python
from ..support.rigs import LEVELS, check, offload_to, pair, run
from ..support.tuning import tune

every_level = pytest.mark.parametrize("level", LEVELS)


def name_of(group_id: str) -> str:
    return f"group_{hashlib.sha256(group_id.encode()).hexdigest()[:16]}.safetensors"


def contents(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Inode, time of change and bytes of every file."""
    return {
        path.name: (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.glob("*.safetensors")
        if path.is_file()
    }


# ---------------------------------------------------------------- names and content


@every_level
def test_names_of_group_files(level: str, tmp_path: Path) -> None:
    model, _ = pair()
    handle = offload_to(tmp_path / "not" / "there" / "yet", model, level)
    run(model, inputs())
    names = {path.name for path in (tmp_path / "not" / "there" / "yet").glob("*.safetensors")}
    assert names == {name_of(group.group_id) for group in handle.groups}
    assert {group.where for group in handle.groups} == names


@every_level
def test_files_are_safetensors(level: str, tmp_path: Path) -> None:
    model, reference = pair()
    offload_to(tmp_path, model, level)
    found = {}
    for path in tmp_path.glob("*.safetensors"):
        found |= {name: value for name, value in load_file(path).items() if not name.startswith("__padding")}
    expected = reference.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value)


@every_level
def test_equal_weights_use_the_files_again(level: str, tmp_path: Path) -> None:
    model, reference = pair()
    offload_to(tmp_path, model, level)
    before = contents(tmp_path)
    for _ in range(2):
        other = make(Model)
        handle = offload_to(tmp_path, other, level)
        check(other, reference, inputs())
        handle.remove()
    check(model, reference, inputs())
    assert contents(tmp_path) == before


@every_level
def test_files_stay_after_remove(level: str, tmp_path: Path) -> None:
    model, reference = pair()
    handle = offload_to(tmp_path, model, level)
    before = contents(tmp_path)
    handle.remove()
    assert contents(tmp_path) == before
    assert_own_memory(model)
    shutil.rmtree(tmp_path)
    assert_at_rest(model, reference)


def test_removed_model_does_not_need_the_folder(tmp_path: Path) -> None:
    model, reference = pair()
    handle = offload_to(tmp_path, model)
    handle.remove()
    for path in tmp_path.iterdir():
        path.write_bytes(b"")
    assert_at_rest(model, reference)


@every_level
def test_two_models_of_one_class_in_one_folder(level: str, tmp_path: Path) -> None:
    pairs = [pair(seed=seed) for seed in range(3)]
    for model, _ in pairs:
        offload_to(tmp_path, model, level)
    for model, reference in (*pairs, *pairs):
        check(model, reference, inputs(), passes=1)


# ---------------------------------------------------------------- what else may be there


def _garbage(path: Path) -> None:
    path.write_bytes(b"not a safetensors file" * 1000)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _other_weights(path: Path) -> None:
    save_file({"weight": torch.randn(5)}, path)


def _same_size_other_byte(path: Path) -> None:
    data = bytearray(_right(path))
    data[-300] ^= 1
    path.write_bytes(data)


def _other_header(path: Path) -> None:
    data = bytearray(_right(path))
    data[60] ^= 1
    path.write_bytes(data)


def _truncated(path: Path) -> None:
    path.write_bytes(_right(path)[:-1])


def _longer(path: Path) -> None:
    path.write_bytes(_right(path) + b"\0")


def _header_only(path: Path) -> None:
    path.write_bytes(_right(path)[:4096])


def _folder(path: Path) -> None:
    path.mkdir()


def _dangling_symlink(path: Path) -> None:
    path.symlink_to(path.parent.parent / "outside")


def _symlink_to_itself(path: Path) -> None:
    path.symlink_to(path)


def _symlink_to_a_file_outside(path: Path) -> None:
    outside = path.parent.parent / "outside"
    outside.write_bytes(b"precious")
    path.symlink_to(outside)


def _right(path: Path) -> bytes:
    """What would be written."""
    elsewhere = path.parent.parent / "elsewhere"
    offload_to(elsewhere, make(Model))
    return (elsewhere / path.name).read_bytes()


OBSTACLES = [
    _garbage,
    _empty,
    _other_weights,
    _same_size_other_byte,
    _other_header,
    _truncated,
    _longer,
    _header_only,
    _folder,
    _dangling_symlink,
    _symlink_to_itself,
    _symlink_to_a_file_outside,
]


@pytest.mark.parametrize("place", OBSTACLES, ids=lambda place: place.__name__[1:])
def test_foreign_file_is_neither_used_nor_touched(place: Callable[[Path], None], tmp_path: Path) -> None:
    folder = tmp_path / "groups"
    folder.mkdir()
    foreign = [folder / name_of("blocks_0_0"), folder / name_of("Model_unmatched_group")]
    place(foreign[0])
    if place not in (_symlink_to_a_file_outside, _dangling_symlink):
        place(foreign[1])
    before = [(path.lstat(), path.read_bytes() if path.is_file() else None) for path in foreign if _exists(path)]
    outside = tmp_path / "outside"
    precious = outside.read_bytes() if outside.exists() else None

    model, reference = pair()
    handle = offload_to(folder, model)
    check(model, reference, inputs())
    for twin in (model, reference):
        twin.blocks[0].up.weight.data.mul_(2)
        twin.gain.data.mul_(2)
    check(model, reference, inputs())
    for twin in (model, reference):
        twin.half()
    check(model, reference, inputs().half())
    handle.remove()
    assert_at_rest(model, reference)

    after = [(path.lstat(), path.read_bytes() if path.is_file() else None) for path in foreign if _exists(path)]
    assert [_identity(stat) for stat, _ in after[: len(before)]] == [_identity(stat) for stat, _ in before]
    assert [data for _, data in after[: len(before)]] == [data for _, data in before]
    assert (outside.read_bytes() if outside.exists() else None) == precious
    assert not [path for path in folder.iterdir() if path.name.endswith(".tmp")]


def _exists(path: Path) -> bool:
    return os.path.lexists(path)


def _identity(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def test_fifo_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name_of("blocks_0_0"))
    try:
        done = run_python(
            """
            model = make(Model); reference = copy.deepcopy(model)
            offload_to(pathlib.Path(sys.argv[1]), model)
            check(model, reference, inputs())
            """,
            tmp_path,
        )
    finally:
        (tmp_path / name_of("blocks_0_0")).unlink()
    assert done.returncode == 0, done.stderr[-500:]


# ---------------------------------------------------------------- edits


@every_level
def test_edit_writes_a_new_file_and_removes_the_old_one(level: str, tmp_path: Path) -> None:
    model, reference = pair()
    handle = offload_to(tmp_path, model, level)
    num_files = len(list(tmp_path.glob("*.safetensors")))
    for _ in range(3):
        before = contents(tmp_path)
        for twin in (model, reference):
            twin.gain.data[0] += 1
        check(model, reference, inputs(), passes=2)
        after = contents(tmp_path)
        assert len(after) == num_files
        assert len(before.items() - after.items()) == 1
        assert {group.where for group in handle.groups} == after.keys()


@every_level
def test_edit_leaves_files_of_earlier_runs(level: str, tmp_path: Path) -> None:
    model = make(Model)
    offload_to(tmp_path, model, level).remove()
    before = contents(tmp_path)
    model, reference = pair()
    offload_to(tmp_path, model, level)
    for _ in range(2):
        for twin in (model, reference):
            twin.gain.data[0] += 1
        check(model, reference, inputs(), passes=2)
        assert before.items() <= contents(tmp_path).items()
        assert len(contents(tmp_path)) == len(before) + 1


@every_level
def test_edit_of_one_model_leaves_the_other(level: str, tmp_path: Path) -> None:
    """Two models share files; the one that wrote them moves on."""
    (model, reference), (other, unchanged) = pair(), pair()
    offload_to(tmp_path, model, level)
    handle = offload_to(tmp_path, other, level)
    for twin in (model, reference):
        twin.gain.data[0] += 1
        twin.half()
    check(model, reference, inputs().half())
    check(other, unchanged, inputs())
    for twin in (other, unchanged):
        twin.gain.data[1] += 1
    check(other, unchanged, inputs())
    check(model, reference, inputs().half())
    handle.remove()
    assert_at_rest(other, unchanged)


def test_edit_does_not_reach_the_file(tmp_path: Path) -> None:
    model, _ = pair()
    offload_to(tmp_path, model)
    before = contents(tmp_path)
    model.gain.data.zero_()
    assert contents(tmp_path) == before


def test_file_that_took_the_name_is_left_when_weights_are_edited(tmp_path: Path) -> None:
    """Another program replaced a file of ours under its name; then the group gets another file."""
    model, reference = pair()
    handle = offload_to(tmp_path, model)
    path = tmp_path / name_of("blocks_0_0")
    for change in (
        lambda twin: twin.blocks[0].up.weight.data.mul_(2),
        lambda twin: twin.blocks[0].double().float().half(),
    ):
        path = tmp_path / next(group.where for group in handle.groups if group.group_id == "blocks_0_0")
        foreign = tmp_path / "foreign"
        foreign.write_bytes(b"foreign" * 1000)
        foreign.rename(path)
        for twin in (model, reference):
            change(twin)
            twin.float()
        check(model, reference, inputs())
        assert path.read_bytes() == b"foreign" * 1000


# ---------------------------------------------------------------- folders that cannot be written


def assert_untouched(model: nn.Module, reference: nn.Module, before: dict[str, int]) -> None:
    assert_at_rest(model, reference)
    assert_own_memory(model)
    assert {name: id(tensor) for name, tensor in named_tensors(model)} == before
    assert_same(run(model, inputs()), run(reference, inputs()))


def ids(model: nn.Module) -> dict[str, int]:
    return {name: id(tensor) for name, tensor in named_tensors(model)}


@pytest.mark.parametrize("kind", ["a file", "below a file", "not allowed"])
@every_level
def test_folder_that_cannot_be_written(kind: str, level: str, tmp_path: Path) -> None:
    model, reference = pair()
    before = ids(model)
    folder = tmp_path / "file"
    folder.write_bytes(b"x")
    if kind == "below a file":
        folder = folder / "groups"
    if kind == "not allowed":
        folder = Path("/proc/self/groups")
    with pytest.raises(GroupFileError, match="offload_to_disk_path") as caught:
        offload_to(folder, model, level)
    assert str(folder) in str(caught.value)
    assert_untouched(model, reference, before)
    offload_to(tmp_path / "groups", model, level)
    check(model, reference, inputs())


def fail_in_the_middle(monkeypatch: pytest.MonkeyPatch, code: int, after: int) -> None:
    """`os.write` fails with `code` once it has written `after` times, and again from then on."""
    write, calls = os.write, 0

    def failing(fd: int, data: Any) -> int:
        nonlocal calls
        calls += 1
        if calls > after:
            if len(data) > 10:
                write(fd, bytes(data[: len(data) // 2]))
            raise OSError(code, os.strerror(code))
        return write(fd, data)

    monkeypatch.setattr(os, "write", failing)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("after", [0, 3, 20, 40])
def test_write_that_fails_in_the_middle(code: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = pair()
    before = ids(model)
    with monkeypatch.context() as patch:
        fail_in_the_middle(patch, code, after)
        with pytest.raises(GroupFileError) as caught:
            offload_to(tmp_path, model)
    message = str(caught.value)
    assert os.strerror(code) in message and "group_" in message and str(tmp_path) in message
    assert "blocks_" in message or "Model_unmatched_group" in message
    assert_untouched(model, reference, before)
    assert not list(tmp_path.iterdir())
    offload_to(tmp_path, model)
    check(model, reference, inputs())


@pytest.mark.parametrize("call", ["fsync", "link", "open"])
def test_interrupt_while_files_are_written(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = pair()
    before = ids(model)
    original, calls = getattr(os, call), 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, interrupted)
        with pytest.raises(KeyboardInterrupt):
            offload_to(tmp_path, model)
    assert_untouched(model, reference, before)
    for path in tmp_path.glob("*.safetensors"):  # one that had its name already is whole
        assert path.suffix == ".safetensors" and load_file(path)


@pytest.mark.parametrize("change", ["edit", "cast", "add"])
def test_write_that_fails_for_a_changed_weight(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward raises, nothing is lost, and it works once there is room."""
    model, reference = pair()
    handle = offload_to(tmp_path, model)
    check(model, reference, inputs())
    for twin in (model, reference):
        if change == "edit":
            twin.gain.data.mul_(2)
            twin.blocks[1].up.weight.data.mul_(2)
        elif change == "cast":
            twin.double()
        else:
            twin.blocks[1].extra = nn.Linear(2, 2)
            nn.init.ones_(twin.blocks[1].extra.weight)
            nn.init.ones_(twin.blocks[1].extra.bias)
    x = inputs().to(next(reference.parameters()).dtype)
    for after in (0, 2, 1):
        with monkeypatch.context() as patch:
            fail_in_the_middle(patch, errno.ENOSPC, after)
            with pytest.raises(GroupFileError, match=os.strerror(errno.ENOSPC)):
                run(model, x)
        assert_at_rest(model, reference)
    check(model, reference, x)
    names = {name for group in handle.groups for name in group.where.split(", ")}
    assert names <= {path.name for path in tmp_path.glob("*.safetensors")}
    handle.remove()
    assert_at_rest(model, reference)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("needs the right to mount")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_full_disk(small_disk: Path) -> None:
    torch.manual_seed(0)
    model = Model(4, 256).eval()
    reference = copy.deepcopy(model)
    with pytest.raises(GroupFileError, match="free"):
        offload_to(small_disk, model)
    assert not list(small_disk.iterdir())
    x = inputs(0, 2, 256)
    assert_same(run(model, x), run(reference, x))
    small = make(Model)
    offload_to(small_disk, small)
    check(small, make(Model), inputs())


# ---------------------------------------------------------------- other programs, under a running model


_MISHAPS = {
    "truncated": "os.truncate(path, 5000)",
    "emptied": "os.truncate(path, 0)",
    "deleted": "path.unlink()",
    "replaced": "other = path.with_name('other'); other.write_bytes(b'x' * path.stat().st_size); other.rename(path)",
    "replaced by a short one": "other = path.with_name('other'); other.write_bytes(b'x'); other.rename(path)",
    "replaced by a folder": "path.unlink(); path.mkdir()",
    "changed in place": "f = open(path, 'r+b'); f.seek(5000); f.write(b'abcd'); f.close()",
    "appended to": "f = open(path, 'ab'); f.write(b'abcd'); f.close()",
    "folder deleted": "import shutil; shutil.rmtree(path.parent)",
}
_STEPS = {
    "forward": "outcome(lambda: assert_same(run(model, inputs()), run(reference, inputs())))",
    "remove": "outcome(lambda: (handle.remove(), assert_at_rest(model, reference)))",
    "replace": """
for twin in (model, reference): twin.blocks[1].up.weight = nn.Parameter(torch.ones_like(twin.blocks[1].up.weight))
outcome(lambda: assert_same(run(model, inputs()), run(reference, inputs())))
""",
    "edit": """
for twin in (model, reference):
    twin.gain.data = torch.ones_like(twin.gain)  # reading it would be a SIGBUS: see docs/troubleshooting.md
    twin.blocks[0].scale.data = torch.ones_like(twin.blocks[0].scale)
outcome(lambda: assert_same(run(model, inputs()), run(reference, inputs())))
""",
}


@every_level
def test_file_that_is_spoilt_under_a_running_model(level: str, tmp_path: Path) -> None:
    """Every step gives the right result or raises `GroupFileError`; none kills the process."""
    done = run_python(
        f"""
        from torch import nn
        level, root = sys.argv[1], pathlib.Path(sys.argv[2])
        def outcome(step):
            try:
                step()
            except GroupFileError as error:
                assert str(folder) in str(error), error
        for mishap, spoil in {_MISHAPS!r}.items():
            for name, step in {_STEPS!r}.items():
                model = make(Model); reference = copy.deepcopy(model)
                folder = root / mishap / name
                handle = offload_to(folder, model, level)
                run(model, inputs())
                for path in sorted(folder.glob("group_*"))[:3]:
                    exec(spoil)
                    if not folder.exists(): break
                print(f"{{mishap}}, then {{name}}", flush=True)
                exec(step)
        """,
        level,
        tmp_path,
    )
    said = done.stdout.splitlines()
    assert done.returncode == 0, f"{said[-1:]}: exit {done.returncode}, {done.stderr[-1500:]}"
    assert len(said) == len(_MISHAPS) * len(_STEPS)


def test_descriptors_do_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each file, up to a number; also with edits, which need new files."""

    def num_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    tune(monkeypatch, max_kept_open=70)
    offload_to(tmp_path / "first", make(Model)).remove()  # what is opened once a process is open now
    before = num_open()
    torch.manual_seed(0)
    models = [Model(30).eval() for _ in range(2)]
    handles = [offload_to(tmp_path, model, "leaf_level") for model in models]
    for _ in range(3):
        for model in models:
            run(model, inputs())
            model.gain.data.add_(1)
        assert num_open() <= before + 70
    for handle in handles:
        handle.remove()
    assert num_open() <= before  # others' may have gone meanwhile


@pytest.mark.parametrize("call", ["write", "fsync", "link"])
def test_killed_in_the_middle_of_writing(call: str, tmp_path: Path) -> None:
    done = run_python(
        """
        import signal
        call, calls, original = sys.argv[2], 0, getattr(os, sys.argv[2])
        def kill(*args, **kwargs):
            global calls
            calls += 1
            if calls == (14 if call == "write" else 3):
                if call == "write":
                    original(args[0], bytes(args[1][: len(args[1]) // 2]))
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)
        setattr(os, call, kill)
        offload_to(pathlib.Path(sys.argv[1]), make(Model))
        """,
        tmp_path,
        call,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    for path in tmp_path.glob("*.safetensors"):
        assert load_file(path)
    complete = contents(tmp_path)
    model, reference = pair()
    offload_to(tmp_path, model)
    check(model, reference, inputs())
    after = contents(tmp_path)
    assert {name: complete[name] for name in complete if name.endswith(".safetensors")}.items() <= after.items()


def test_two_processes_write_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes second finds that the file is right, and uses it."""
    elsewhere = tmp_path / "elsewhere"
    offload_to(elsewhere, make(Model))
    folder, link = tmp_path / "groups", os.link

    def late(source: Any, target: Any, **kwargs: Any) -> None:
        shutil.copy(elsewhere / Path(target).name, target)
        link(source, target, **kwargs)

    monkeypatch.setattr(os, "link", late)
    model, reference = pair()
    handle = offload_to(folder, model)
    check(model, reference, inputs())
    assert {path.name for path in folder.glob("*.safetensors")} == {name_of(group.group_id) for group in handle.groups}


def test_ram_falls_by_the_weights(tmp_path: Path) -> None:
    done = run_python(
        """
        def anonymous():
            return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) / 1024
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(12))  # 192 MiB
        model = nn.Sequential(*model)
        x = torch.randn(1, 2048)
        expected = run(model, x)
        before = anonymous()
        handle = offload_to(pathlib.Path(sys.argv[1]), model)
        after = anonymous()
        for _ in range(3):
            assert torch.equal(run(model, x), expected)
        running = anonymous()
        handle.remove()
        print(before - after, before - running, anonymous() - before)
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    fell, stayed, came_back = map(float, done.stdout.split())
    assert fell > 180 and stayed > 140 and abs(came_back) < 40


# ---------------------------------------------------------------- bits that flip


@every_level
@pytest.mark.parametrize("tier", ["groups", "checkpoint"])
def test_verification_finds_flipped_bits(level: str, tier: str, tmp_path: Path) -> None:
    model, reference = pair()
    options: dict[str, Any] = {"verify_files": True, "offload_type": level}
    if tier == "groups":
        options["offload_to_disk_path"] = tmp_path
    else:
        save_file(model.state_dict(), tmp_path / "model.safetensors")
        model.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
        options["offload_device"] = "disk"
    handle = apply_group_offloading(model, "cpu", **options)
    check(model, reference, inputs(), passes=2)
    if tier == "groups":
        path = tmp_path / next(group.where for group in handle.groups if re.match("blocks[_.]1", group.group_id))
        position = 4096 + 100
    else:
        place = FileMap().find(model.blocks[1].up.weight.detach())
        assert place is not None
        path, position = Path(place.path), place.position + place.num_bytes // 2
    for _ in range(2):
        flip_a_bit(path, position)
        for _ in range(2):
            with pytest.raises(GroupFileError, match="XXH3") as caught:
                run(model, inputs())
            assert path.name in str(caught.value) and "'blocks" in str(caught.value)
        flip_a_bit(path, position)
        check(model, reference, inputs(), passes=2)
    handle.remove()
