"""A folder of group files under kills, other processes, links, masks and disks that say no; while others have its locks, change
it, or have died in it."""

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
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from group_offload import StorageError
from group_offload.base import tuning
from group_offload.stores.folder import Folder, file_name

from ..support.files import failing
from ..support.folders import GROUPS, assert_holds, headers_in, names, put, set_up, weights
from ..support.processes import fork, in_new_process, status_of
from ..support.tuning import tune

# ---------------------------------------------------------------- what a file says, and when it is used


@pytest.mark.parametrize("model_class", ["", "../../etc\n"])
def test_equal_models_share_files(model_class: str, tmp_path: Path) -> None:
    """Whatever their class is called. Hazard: a file is trusted for its name: a second model runs with the first one's
    weights."""
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


@pytest.mark.parametrize("target", ["victim", "nothing"])
@pytest.mark.parametrize("what", ["group file", "temporary file", "probe"])
def test_planted_links_are_not_followed(
    what: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even one that leads to the right file: whoever owns it can lead it elsewhere. Hazard: a planted link makes it
    write outside of the folder."""
    victim, folder = tmp_path / "victim", tmp_path / "groups"
    set_up(folder)
    group = folder / file_name(GROUPS[0])
    precious = group.read_bytes()
    victim.write_bytes(precious)
    suffix = f".{os.getpid()}.{b'12345678'.hex()}.tmp"
    planted = {
        "group file": group,
        "temporary file": folder / f".{group.name}{suffix}",
        "probe": folder / f".probe{suffix}",
    }[what]
    for path in folder.iterdir():
        path.unlink()
    planted.symlink_to(tmp_path / target)
    monkeypatch.setattr(os, "urandom", lambda n: b"12345678")
    fails = what in ("temporary file", "probe")
    if fails:
        with pytest.raises(StorageError, match="File exists"):
            set_up(folder)
    else:
        files = set_up(folder)
        assert_holds(files)
        assert planted not in [file.path for file in files]
    assert names(tmp_path) == {"groups", "victim"} and victim.read_bytes() == precious
    assert planted.is_symlink()
    assert "tmp" not in what or not names(folder) - {planted.name}


@pytest.mark.parametrize("group", ["../../x", "/etc/passwd", "a\0b", "", "x" * 5000, "\N{SNOWMAN}", "@1"])
def test_group_ids_do_not_lead_out_of_the_folder(group: str, tmp_path: Path) -> None:
    """Hazard: a crafted module name makes it write outside of the folder."""
    folder = tmp_path / "groups"
    folder.mkdir()
    file = put(Folder(folder), weights(), group)
    assert file.path.parent == folder and names(tmp_path) == {"groups"} and names(folder) == {file.path.name}
    (header,) = headers_in(folder).values()
    assert header.group_id == group


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
    """Of a file that is closed: Windows gives no name to an open one."""
    calls = []

    def watch(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            is_folder = name == "fsync" and stat.S_ISDIR(os.fstat(args[0]).st_mode)
            calls.append("fsync folder" if is_folder else name)
            if name in ("link", "unlink"):
                assert os.fspath(args[0]) not in map(os.path.realpath, Path("/proc/self/fd").iterdir())
            return original(*args, **kwargs)

        return call

    for name in ("write", "fsync", "link", "replace", "unlink"):
        monkeypatch.setattr(os, name, watch(name, getattr(os, name)))
    put(Folder(tmp_path), weights())
    assert calls[-4:] == ["fsync", "link", "fsync folder", "unlink"] and set(calls[:-4]) == {"write"}


@pytest.mark.parametrize("call", ["open", "fsync"])
def test_file_system_that_does_not_sync_folders(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SMB and 9p refuse it; a folder that may be written to and not be read cannot even be opened. Hazard: every set-up
    fails, one file later each time."""
    original = getattr(os, call)

    def refuses(what: Any, *args: Any, **kwargs: Any) -> Any:
        if (call == "open" and what == tmp_path) or (call == "fsync" and stat.S_ISDIR(os.fstat(what).st_mode)):
            failing(errno.EINVAL)()
        return original(what, *args, **kwargs)

    monkeypatch.setattr(os, call, refuses)
    assert_holds(set_up(tmp_path))
    monkeypatch.undo()
    assert len(headers_in(tmp_path)) == 2


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
    tuning.tune(seconds_until_said=0.1)
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
    with pytest.raises(StorageError, match=r"Cannot write group .* to .*(Permission denied|Read-only file system)"):
        set_up(Path(path), seed=1)
    with pytest.raises(StorageError, match="Cannot write group files"), Folder(Path(path)).hold(1 << 20):
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


# ---------------------------------------------------------------- locks that nobody gets


@pytest.mark.parametrize("locks", ["held by another", "not there"])
def test_a_set_up_that_gets_no_lock(
    locks: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on without, and leaves temporary files to the next one. Hazard: whoever may read the folder locks it, or a
    writer is stopped (SIGSTOP), and every set-up hangs silently; a set-up removes the temporary files of a process that's
    still writing."""
    tune(monkeypatch, seconds_until_said=0.05, setup_timeout_seconds=0.3)
    temporary = tmp_path / f".probe.1.{0:016}.tmp"
    temporary.write_bytes(b"")
    with ExitStack() as stack:
        if locks == "not there":
            stack.enter_context(monkeypatch.context()).setattr(fcntl, "flock", failing(errno.ENOLCK))
        else:  # whoever opens a folder once more counts as another process
            fd = os.open(tmp_path, os.O_RDONLY)
            stack.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX)
        assert_holds(set_up(tmp_path))
        assert temporary.exists()
    if locks == "held by another":
        waiting, going_on = caplog.messages
        assert waiting.startswith("Another process is setting a model up in") and "continuing without" in going_on
    set_up(tmp_path)
    assert not temporary.exists()
