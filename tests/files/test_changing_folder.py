"""A folder of group files while others have its locks, change it, or have died in it."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from group_offload import GroupFileError
from group_offload.base import tuning as tuning_module
from group_offload.base.publish import boot
from group_offload.stores.folder import Folder

from ..support.folders import assert_holds, headers_in, names, put, set_up, weights
from ..support.models import Model, make
from ..support.processes import fork, in_new_process, status_of
from ..support.rigs import offload_to
from ..support.tuning import tune

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    tune(
        monkeypatch,
        seconds_until_said=0.05,
        setup_patience_seconds=0.3,
    )


# ---------------------------------------------------------------- locks that others keep


@contextmanager
def held_by_another(path: Path) -> Iterator[None]:
    """Another process has the lock, for as long as it likes."""
    code = """
import fcntl, os, sys
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
print("x", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"x"
        try:
            yield
        finally:
            process.kill()


def test_a_group_file_that_somebody_keeps_locked(tmp_path: Path) -> None:
    """Nobody waits for such a lock. Hazard: whoever may read a file locks it, and every set-up hangs silently."""
    first = put(Folder(tmp_path), weights())
    with held_by_another(first.path):
        assert put(Folder(tmp_path), weights()).path == first.path


def test_a_folder_that_somebody_keeps_locked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A set-up goes on without the lock. Hazard: whoever may read the folder locks it, and every set-up hangs
    silently."""
    with held_by_another(tmp_path):
        assert_holds(set_up(tmp_path))
        waiting, going_on = (record.getMessage() for record in caplog.records)
        assert waiting.startswith("Another process is setting a model up in") and "going on without" in going_on


def stopped_writer(path: str) -> None:
    """A writer is stopped at every step, and another process sets the same model up all the same."""
    tuning_module.tune(setup_patience_seconds=0.2)
    for step in itertools.count(1):
        folder = Path(path) / str(step)
        pid = fork(lambda folder=folder, step=step: (stop_at(step), set_up(folder)))
        _, status = os.waitpid(pid, os.WUNTRACED)
        assert_holds(set_up(folder))
        if not os.WIFSTOPPED(status):
            assert status == 0
            break
        os.kill(pid, signal.SIGCONT)
        assert status_of(pid) == 0, step
        assert_holds(set_up(folder))
        headers_in(folder)
        assert not [name for name in names(folder) if name.endswith(".tmp")]
    print(f"{step - 1} steps")


def stop_at(step: int) -> None:
    counter = itertools.count(1)

    def stopping(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(counter) == step:
                os.kill(os.getpid(), signal.SIGSTOP)
            return original(*args, **kwargs)

        return call

    for name in ("write", "fsync", "link", "unlink"):
        setattr(os, name, stopping(getattr(os, name)))


def test_stopped_at_every_step(tmp_path: Path) -> None:
    """Hazard: a writer is stopped (SIGSTOP), and every set-up in the folder hangs silently."""
    said = in_new_process(stopped_writer, tmp_path)
    assert int(said.split()[0]) > 10, said


# ---------------------------------------------------------------- files that go while they are looked at


def vanishing(monkeypatch: pytest.MonkeyPatch, step: int, victims: list[Path]) -> Callable[[], bool]:
    """Before the n-th call that looks at the folder, files go. Tells whether there was such a call."""
    counter, was_reached = itertools.count(1), []

    def watch(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(counter) == step:
                was_reached.append(step)
                for path in victims:
                    path.unlink(missing_ok=True)
            return original(*args, **kwargs)

        return call

    for name in ("open", "stat", "lstat", "fstat", "listdir", "scandir"):
        monkeypatch.setattr(os, name, watch(getattr(os, name)))
    monkeypatch.setattr(Path, "lstat", watch(Path.lstat))
    return lambda: bool(was_reached)


@pytest.mark.parametrize("goes", ["all", "temporary", "foreign"])
def test_files_that_go_meanwhile(goes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any step of a set-up: they are not there, which is no error. Hazard: a file goes while the folder is listed,
    and counts as damaged."""
    patterns = {"all": "*", "temporary": ".probe*", "foreign": "for*"}
    for step in itertools.count(1):
        folder = tmp_path / str(step)
        set_up(folder)
        (folder / "foreign").write_bytes(b"")
        (folder / f".probe.1.{boot()}00000000.tmp").write_bytes(b"")
        with monkeypatch.context() as patch:
            was_reached = vanishing(patch, step, list(folder.glob(patterns[goes])))
            files = set_up(folder, seed=2)
        assert_holds(files, seed=2)
        if not was_reached():
            break
    assert step > 8


# ---------------------------------------------------------------- what the dead leave


def killed(path: str) -> None:
    """One model is set up by processes that die one after the other. How much is there after each of them?"""
    torch.set_num_threads(1)
    folder = Path(path)
    for _ in range(6):
        assert status_of(fork(lambda: die(folder))) == -signal.SIGKILL
        print(sum(file.stat().st_size for file in folder.iterdir()))
    model = make(Model)
    handle = offload_to(folder, model)
    assert names(folder) == {group.where for group in handle.groups}
    headers_in(folder)
    handle.remove()


def die(folder: Path) -> None:
    os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
    offload_to(folder, make(Model))


def test_kills_do_not_fill_the_drive(tmp_path: Path) -> None:
    """Hazard: processes that are killed again and again fill the disk with temporary files."""
    sizes = [*map(int, in_new_process(killed, tmp_path / "groups").split())]
    assert max(sizes) == sizes[0]


@pytest.mark.parametrize("of", ["another boot", "a process that lives", "a file system without locks"])
def test_temporary_files_that_a_set_up_does_not_remove(
    of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: a set-up removes the temporary files of a process that's still writing."""
    temporary = tmp_path / f".probe.1.{'00000000' if of == 'another boot' else boot()}00000000.tmp"
    temporary.write_bytes(b"")
    with ExitStack() as stack:
        if of == "a process that lives":
            stack.enter_context(held_by_another(temporary))
        if of == "a file system without locks":

            def refuses(*args: Any) -> None:
                raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

            stack.enter_context(monkeypatch.context()).setattr(fcntl, "flock", refuses)
        set_up(tmp_path)
        assert temporary.exists()
    set_up(tmp_path)
    assert temporary.exists() == (of == "another boot")


def test_a_full_drive_says_what_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path)
    with pytest.raises(GroupFileError, match="Free some room"), folder.locked(1 << 60):
        pass

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(GroupFileError, match="Free some room"):
        put(folder, weights())


# ---------------------------------------------------------------- names
