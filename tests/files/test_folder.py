"""A folder of group files under kills, other processes, links, masks and disks that say no."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import logging
import multiprocessing
import os
import signal
import stat
import subprocess
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
import torch

from group_offload import GroupFileError
from group_offload.base import publish as publish_module
from group_offload.base import reading
from group_offload.base.tuning import tune
from group_offload.stores.folder import Folder, file_name

from ..support.files import failing
from ..support.folders import GROUPS, assert_holds, headers_in, names, put, set_up, weights
from ..support.processes import fork, in_new_process, status_of

# ---------------------------------------------------------------- what a file says, and when it is used


def test_other_weights_are_told_by_the_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their data is not read. Hazard: a file is trusted for its name: a second model runs with the first one's weights."""
    first = put(Folder(tmp_path), weights(0))
    positions = []
    read_at = reading.read_at

    def watched(fd: int, target: memoryview, position: int) -> int:
        positions.append(position)
        return read_at(fd, target, position)

    monkeypatch.setattr(reading, "read_at", watched)
    second = put(Folder(tmp_path), weights(1))
    assert second.path != first.path and set(positions) == {0}
    positions.clear()
    assert put(Folder(tmp_path), weights(1)).path == second.path
    assert max(positions) >= 4096


@pytest.mark.parametrize("model_class", ["", "../../etc", "Ünï/code\n", "x" * 500])
def test_equal_models_share_files(model_class: str, tmp_path: Path) -> None:
    """Whatever their class is called."""
    folder = tmp_path / "groups"
    files = set_up(folder, model_class=model_class)
    before = names(folder)
    assert [file.path for file in set_up(folder, model_class=model_class)] == [file.path for file in files]
    assert names(folder) == before and names(tmp_path) == {"groups"}
    set_up(folder, seed=1, model_class=model_class)
    assert len(names(folder)) == 4
    set_up(folder, model_class="Other")
    assert len(names(folder)) == 6
    assert {header.model_class for header in headers_in(folder).values()} == {model_class, "Other"}


# ---------------------------------------------------------------- names that somebody planted


def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_bytes(b"precious")
    return path


@pytest.mark.parametrize("target", ["victim", "nothing"])
@pytest.mark.parametrize("what", ["group file", "temporary file", "probe"])
def test_planted_links_are_not_followed(
    what: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: a planted link makes it write outside of the folder."""
    precious, folder = victim(tmp_path), tmp_path / "groups"
    set_up(folder)
    group = folder / file_name(GROUPS[0])
    suffix = f".{os.getpid()}.{b'12345678'.hex()}.tmp"
    planted = {
        "group file": group,
        "temporary file": folder / f".{group.name}{suffix}",
        "probe": folder / f".probe{suffix}",
    }[what]
    for path in folder.iterdir():
        path.unlink()
    planted.symlink_to(precious if target == "victim" else tmp_path / "nothing")
    monkeypatch.setattr(os, "urandom", lambda n: b"12345678")
    fails = what in ("temporary file", "probe")
    if fails:
        with pytest.raises(GroupFileError, match="File exists"):
            set_up(folder)
    else:
        assert_holds(set_up(folder))
    assert names(tmp_path) == {"groups", "victim"} and precious.read_bytes() == b"precious"
    assert planted.is_symlink()
    assert "tmp" not in what or not names(folder) - {planted.name}


def test_group_file_behind_a_link_is_not_used(tmp_path: Path) -> None:
    """Whoever owns the link can lead it elsewhere."""
    (tmp_path / "elsewhere").mkdir()
    file = put(Folder(tmp_path / "elsewhere"), weights())
    (tmp_path / "groups").mkdir()
    (tmp_path / "groups" / file.path.name).symlink_to(file.path)
    found = put(Folder(tmp_path / "groups"), weights())
    assert found.path.name == file_name("blocks_0@1") and not found.path.is_symlink()


@pytest.mark.parametrize("group", ["../../x", "/etc/passwd", "a\0b", "", "x" * 5000, "\N{SNOWMAN}", "@1", "half\ud800"])
def test_group_ids_do_not_lead_out_of_the_folder(group: str, tmp_path: Path) -> None:
    """Hazard: a crafted module name makes it write outside of the folder."""
    folder = tmp_path / "groups"
    folder.mkdir()
    file = put(Folder(folder), weights(), group)
    assert file.path.parent == folder and names(tmp_path) == {"groups"} and names(folder) == {file.path.name}
    (header,) = headers_in(folder).values()
    assert header.group_id == group.replace("\ud800", "\\ud800")


@pytest.mark.parametrize("mask", [0o077, 0o002])
def test_mode_follows_the_umask(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        set_up(tmp_path / "groups")
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "groups").iterdir()}
    assert modes == {0o644 & ~mask}  # others cannot write, whatever the umask
    assert stat.S_IMODE((tmp_path / "groups").stat().st_mode) == 0o755 & ~mask
    assert_holds(set_up(tmp_path / "groups"))


def test_name_is_given_to_durable_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def watch(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            is_folder = name == "fsync" and stat.S_ISDIR(os.fstat(args[0]).st_mode)
            calls.append("fsync folder" if is_folder else name)
            return original(*args, **kwargs)

        return call

    for name in ("write", "fsync", "link", "replace", "unlink"):
        monkeypatch.setattr(os, name, watch(name, getattr(os, name)))
    put(Folder(tmp_path), weights())
    assert calls[-4:] == ["fsync", "link", "fsync folder", "unlink"] and set(calls[:-4]) == {"write"}


@pytest.mark.parametrize("has_links", [True, False])
def test_a_name_that_was_taken_meanwhile(has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = tmp_path / file_name(GROUPS[0])
    taken.symlink_to(tmp_path / "nowhere")
    if has_links:  # it was free when somebody looked
        monkeypatch.setattr(os.path, "lexists", lambda path: path != taken)
    else:
        monkeypatch.setattr(os, "link", failing(errno.EPERM))
    assert publish_module.publish(taken, [b"content"], replaces=False) is None and taken.is_symlink()
    assert publish_module.publish(tmp_path / "free", [b"content"], replaces=False) is not None
    assert names(tmp_path) == {taken.name, "free"} and (tmp_path / "free").read_bytes() == b"content"


def test_a_temporary_file_that_another_set_up_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the process for dead, which did not get the lock. Hazard: a set-up fails beside another one."""
    real, removed = os.link, []

    def late(source: Any, target: Any) -> None:
        if not removed:
            removed.append(source)
            os.unlink(source)
        real(source, target)

    monkeypatch.setattr(os, "link", late)
    file = put(Folder(tmp_path), weights())
    assert removed and names(tmp_path) == {file.path.name}
    headers_in(tmp_path)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES, errno.ESTALE])
def test_a_folder_that_cannot_be_searched(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be opened is left alone, and another name is used. What isn't about the file is told."""
    folder = Folder(tmp_path)
    put(folder, weights())
    monkeypatch.setattr(folder.owners, "open", failing(code))
    with pytest.raises(GroupFileError, match=os.strerror(code)):
        put(folder, weights())


@pytest.mark.parametrize(("call", "code"), [("open", "EACCES"), ("fsync", "EINVAL"), ("fsync", "EIO")])
def test_file_system_that_does_not_sync_folders(
    call: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SMB and 9p refuse it; a folder that may be written to and not be read cannot even be opened. Hazard: every set-up
    fails, one file later each time."""
    original = getattr(os, call)

    def refuses(what: Any, *args: Any, **kwargs: Any) -> Any:
        if (call == "open" and what == tmp_path) or (call == "fsync" and stat.S_ISDIR(os.fstat(what).st_mode)):
            failing(getattr(errno, code))()
        return original(what, *args, **kwargs)

    monkeypatch.setattr(os, call, refuses)
    assert_holds(set_up(tmp_path))
    monkeypatch.undo()
    assert len(names(tmp_path)) == 2
    headers_in(tmp_path)


@pytest.mark.parametrize("call", ["fstat", "write", "fsync", "replace"])
def test_a_file_that_cannot_be_written_leaves_nothing(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a file nor a descriptor, whatever fails."""

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(errno.EIO))
        with pytest.raises(OSError, match="Input/output"):
            publish_module.publish(tmp_path / "new", [b"content"])
    assert not names(tmp_path) and len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_a_folder_that_is_none(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "groups"
    if kind == "file":
        path.write_bytes(b"precious")
    else:
        path.symlink_to(tmp_path / "nowhere")
    said = "it is not a folder" if kind == "file" else "it is a link that leads nowhere"
    with pytest.raises(GroupFileError, match=said):
        set_up(path)
    assert names(tmp_path) == {"groups"}


# ---------------------------------------------------------------- kills


_CALLS = ("open", "write", "fsync", "link", "unlink")


def die_at(step: int) -> None:
    """From now on, the `step`th of these system calls of this process kills it; a write is half done."""
    counter = itertools.count(1)

    def deadly(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(counter) == step:
                if name == "write":
                    original(args[0], bytes(args[1])[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return call

    for name in _CALLS:
        setattr(os, name, deadly(name, getattr(os, name)))


def kill_at_every_step(path: str) -> None:
    """A set-up that dies at every step, and the next one too."""

    def work(folder: Path, step: int) -> None:
        die_at(step)
        set_up(folder)

    for step in itertools.count(1):
        folder = Path(path) / str(step)
        status, again = (status_of(fork(lambda folder=folder, step=step: work(folder, step))) for _ in range(2))
        assert {status, again} <= {0, -signal.SIGKILL}, f"step {step}: {status}, {again}"
        if folder.exists():
            headers_in(folder)
            leftovers = {name for name in names(folder) if name.endswith(".tmp")}
            assert len([name for name in leftovers if "probe" not in name]) <= 1, leftovers  # a probe is empty
            assert again or not leftovers, leftovers
        whole = {file_name(group) for group in GROUPS if (folder / file_name(group)).exists()}
        assert_holds(set_up(folder))
        assert whole <= names(folder) == {file_name(group) for group in GROUPS}
        if status == 0:
            print(f"{step - 1} steps")
            return


def test_killed_at_every_step(tmp_path: Path) -> None:
    """Hazard: a process is killed while it writes, and half a file is used later; processes that are killed again and
    again fill the disk with temporary files."""
    said = in_new_process(kill_at_every_step, tmp_path)
    assert 20 < int(said.split()[0]) < 60, said


# ---------------------------------------------------------------- two processes


def set_up_beside(path: Path, log: int, both: Barrier) -> None:
    """Set up while another process does. The first file gets its name once the other one has a file too, or waits."""
    link, is_beside = os.link, False

    def meet() -> None:
        nonlocal is_beside
        if not is_beside:
            is_beside = True
            both.wait(60)

    def link_late(source: Any, target: Any) -> None:
        meet()
        link(source, target)
        os.write(log, f"{os.fspath(target)}\n".encode())

    class Meets(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            meet()

    os.link = link_late  # type: ignore[assignment]
    tune(seconds_until_said=0.1)
    logging.basicConfig()
    logging.getLogger("group_offload").addHandler(Meets())
    assert_holds(set_up(path))


def set_up_in_two(path: str, locks: str) -> None:
    if locks == "without":
        fcntl.flock = failing(errno.ENOLCK)
    reader, writer = os.pipe()
    both = multiprocessing.get_context("fork").Barrier(2)
    pids = [fork(lambda: set_up_beside(Path(path), writer, both)) for _ in range(2)]
    os.close(writer)
    assert [status_of(pid) for pid in pids] == [0, 0]
    with open(reader) as log:
        print(log.read(), end="")
    headers_in(Path(path))
    assert_holds(set_up(Path(path)))


@pytest.mark.parametrize("locks", ["with", "without"])
def test_two_processes_set_up_at_once(locks: str, tmp_path: Path) -> None:
    """Hazard: two processes write one folder, and one reads what the other has half written."""
    said = in_new_process(set_up_in_two, tmp_path / "groups", locks)
    expected = {file_name(group) for group in GROUPS}
    written = [Path(line).name for line in said.splitlines() if line.endswith(".safetensors")]
    assert set(written) == expected and (locks == "without" or len(written) == len(expected))
    assert names(tmp_path / "groups") == expected
    assert said.count("Another process is setting a model up") == (locks == "with")


# ---------------------------------------------------------------- disks that say no


def without_rights() -> None:
    """The process started next has root's powers over files no more: modes hold for it."""
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


def set_up_read_only(path: str) -> None:
    assert_holds(set_up(Path(path)))
    with pytest.raises(GroupFileError, match=r"Cannot write group .* to .*(Permission denied|Read-only file system)"):
        set_up(Path(path), seed=1)
    with pytest.raises(GroupFileError, match="Cannot write group files"), Folder(Path(path)).locked(1 << 20):
        pass  # more than there is
    print("right")


def test_read_only_folder(tmp_path: Path) -> None:
    """Works if all its files are there. Hazard: a read-only folder that has all files is refused."""
    folder = tmp_path / "groups"
    set_up(folder)
    before = names(folder)
    folder.chmod(0o555)
    try:
        assert "right" in in_new_process(set_up_read_only, folder, preexec_fn=without_rights)
    finally:
        folder.chmod(0o755)
    assert names(folder) == before


def mounted(path: str) -> None:
    """In a mount namespace of its own: a disk that is full, and one that is read-only."""
    disk = Path(path)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", path], capture_output=True).returncode:
        print("no mount")
        return
    set_up(disk)
    large = {"large": torch.randn(40, 1000)}
    with pytest.raises(GroupFileError, match="No space left on device"):
        put(Folder(disk), large)
    assert len(names(disk)) == 2
    filler = os.open(disk / "filler", os.O_WRONLY | os.O_CREAT)
    with suppress(OSError):
        while os.write(filler, b"x" * 512):
            pass
    os.close(filler)
    assert_holds(set_up(disk))
    (disk / "filler").unlink()
    subprocess.run(["mount", "-o", "remount,ro", path], check=True)
    set_up_read_only(path)


def test_real_disks_that_are_full_or_read_only(tmp_path: Path) -> None:
    """Hazard: the disk is full or read-only, and weights are lost."""
    unshare = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    try:
        if subprocess.run([*unshare, "true"], capture_output=True).returncode:
            pytest.skip("needs a mount namespace")
    except FileNotFoundError:
        pytest.skip("needs unshare(1)")
    if "no mount" in in_new_process(mounted, tmp_path, under=unshare):
        pytest.skip("needs the right to mount")
