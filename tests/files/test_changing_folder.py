"""A folder of group files while others have its locks, change it, or have died in it."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from group_offload import GroupFileError
from group_offload.stores.folder import Folder

from ..support.files import failing
from ..support.folders import assert_holds, put, set_up, weights
from ..support.tuning import tune

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    tune(monkeypatch, seconds_until_said=0.05, setup_patience_seconds=0.3)


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
    """A set-up goes on without the lock. Hazard: whoever may read the folder locks it, or a writer is stopped (SIGSTOP),
    and every set-up hangs silently."""
    with held_by_another(tmp_path):
        assert_holds(set_up(tmp_path))
        waiting, going_on = (record.getMessage() for record in caplog.records)
        assert waiting.startswith("Another process is setting a model up in") and "continuing without" in going_on


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
        (folder / f".probe.1.{0:016}.tmp").write_bytes(b"")
        with monkeypatch.context() as patch:
            was_reached = vanishing(patch, step, list(folder.glob(patterns[goes])))
            files = set_up(folder, seed=2)
        assert_holds(files, seed=2)
        if not was_reached():
            break
    assert step > 8


# ---------------------------------------------------------------- what the dead leave


@pytest.mark.parametrize("of", ["a process that sets up", "a file system without locks"])
def test_temporary_files_that_a_set_up_does_not_remove(
    of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: a set-up removes the temporary files of a process that's still writing."""
    temporary = tmp_path / f".probe.1.{0:016}.tmp"
    temporary.write_bytes(b"")
    with ExitStack() as stack:
        if of == "a process that sets up":
            stack.enter_context(held_by_another(tmp_path))
        else:
            stack.enter_context(monkeypatch.context()).setattr(fcntl, "flock", failing(errno.ENOLCK))
        set_up(tmp_path)
        assert temporary.exists()
    set_up(tmp_path)
    assert not temporary.exists()


def test_a_full_drive_says_what_helps(tmp_path: Path) -> None:
    with (
        pytest.raises(GroupFileError, match=r"Not enough disk space in .* free, 1\d* TiB needed\. Free"),
        Folder(tmp_path).locked(1 << 60),
    ):
        pass
