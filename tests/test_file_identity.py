"""Which file it is that weights rest in: what other programs may do to it, and what must be noticed.

What may end in a SIGBUS runs in a process of its own.
"""

from __future__ import annotations

import copy
import logging
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from group_offload import ConfigError, GroupFileError, apply_group_offloading
from group_offload.stores import folder as folders

from .common import Model, assert_at_rest, assert_same, check, inputs, make, offload_to, run
from .test_files import pair, run_python

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs to be root")


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that any user may write to: pytest's own are for its user alone."""
    path = Path(tempfile.mkdtemp(prefix="group_offload-test-"))
    path.chmod(0o777)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def loaded(path: Path, seed: int = 0, num_files: int = 1, num_blocks: int = 4) -> tuple[Any, Any]:
    """A model whose weights are views of checkpoints in `path`, and its resident twin."""
    reference = make(Model, num_blocks, seed=seed)
    names = [*reference.state_dict()]
    path.mkdir(exist_ok=True)
    model, state = copy.deepcopy(reference), {}
    for number in range(num_files):
        mine = {name: reference.state_dict()[name] for name in names[number::num_files]}
        if mine:
            save_file(mine, path / f"{number}.safetensors")
            state |= load_file(path / f"{number}.safetensors")
    model.load_state_dict(state, assign=True)
    return model, reference


def offloaded(tier: str, path: Path, *, many: bool, **options: Any) -> tuple[Any, Any, Any, list[Path]]:
    """A model in files that has run once, its resident twin, its handle, and the files."""
    num_blocks = 24 if many else 3
    if tier == "groups":
        model: Any = make(Model, num_blocks)
        reference: Any = copy.deepcopy(model)
        handle = offload_to(path, model, "leaf_level" if many else "block_level", **options)
    else:
        model, reference = loaded(path, num_files=120 if many else 2, num_blocks=num_blocks)
        handle = apply_group_offloading(model, "cpu", offload_device="disk", **options)
    assert_same(run(model, inputs()), run(reference, inputs()))
    return model, reference, handle, sorted(path.glob("*.safetensors"))


def change(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-64, 2)
        file.write(b"\1" * 64)


def change_and_put_the_time_back(path: Path) -> None:
    before = path.stat()
    change(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"x" * path.stat().st_size)
    other.rename(path)


def cut(path: Path) -> None:
    os.truncate(path, 0)


def shred(path: Path) -> None:
    subprocess.run(["shred", "-u", path], check=True)


def link(path: Path) -> None:
    os.link(path, path.with_name(f"linked-{path.name}"))


def rename(path: Path) -> None:
    path.rename(path.with_name(f"renamed-{path.name}"))


def put_a_link(path: Path) -> None:
    """To what blocks whoever opens it to read."""
    fifo = path.with_name("fifo")
    if not fifo.exists():
        os.mkfifo(fifo)
    path.unlink()
    path.symlink_to(fifo)


def move_the_folder(path: Path) -> None:
    if path.parent.exists():
        path.parent.rename(path.parent.with_name("moved"))


def mount_over(path: Path) -> None:
    if not path.parent.is_mount():
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", path.parent], check=True)


HARMFUL = {
    "change": [change],
    "change+rm": [change, Path.unlink],
    "change+mv": [change, replace],
    "cut": [cut],
    "cut+rm": [cut, Path.unlink],
    "cut+mv": [cut, replace],
    "shred": [shred],
    "change, time put back": [change_and_put_the_time_back],
}
HARMLESS = {
    "rm": [Path.unlink],
    "mv": [replace],
    "symlink": [put_a_link],
    "link": [link],
    "rename": [rename],
    "chmod": [lambda path: path.chmod(0o640)],
    "folder moved": [move_the_folder],
    "mounted over": [mount_over],
}
LOSES_THE_NAME = {"rm", "mv", "symlink"}


def outcome(step: Any) -> str:
    try:
        step()
    except GroupFileError as error:
        assert ".safetensors" in str(error)
        return "told"
    return "right"


def go_through(tier: str, root: Path, *, many: bool, verifies: bool, may_lose: bool = False, with_mounts: bool) -> None:
    """Every case, in this process. `may_lose`: where nobody knows whether the file is what it was, that is told."""
    cases: dict[str, list[Any]] = {**HARMFUL, **HARMLESS}
    for number, (name, steps) in enumerate(cases.items()):
        if name == "mounted over" and not with_mounts:
            continue
        print(name, flush=True)
        model, reference, handle, paths = offloaded(tier, root / f"{number}", many=many, verify_files=verifies)
        for step in steps:
            for path in paths:
                step(path)
        forward = lambda: assert_same(run(model, inputs()), run(reference, inputs()))  # noqa: B023, E731
        found = {outcome(step) for step in (forward, forward, handle.refresh)}
        if name == "rename":
            for path in paths:
                rename(path.with_name(f"renamed-{path.name}"))
            found |= {outcome(forward)}
        found |= {outcome(handle.remove)}
        if name in HARMFUL:
            assert found == {"told"}, (name, found)
        elif may_lose and name in LOSES_THE_NAME:
            assert found <= {"right", "told"}
        else:
            assert found == {"right"}, (name, found)
            assert_at_rest(model, reference)
    print("done", flush=True)


_CASES = """
import ctypes, resource
import tests.test_file_identity as t
tier, root, verifies, limit, user = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3] == "True", *map(int, sys.argv[4:])
import torch._dynamo
os.fsync = os.fstat
libc = ctypes.CDLL(None)
with_mounts = user == 0 and libc.unshare(0x20000) == 0 and not os.system("mount --make-rprivate / 2> /dev/null")
if limit:
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
if user:
    os.setgroups([]); os.setgid(user); os.setuid(user)
    libc.prctl(4, 1)  # PR_SET_DUMPABLE: may look into its own /proc, as if it had been started so
"""


@pytest.mark.parametrize("verifies", [False, True], ids=["", "verify_files"])
@pytest.mark.parametrize("tier", ["groups", "checkpoint"])
def test_files_that_are_held(tier: str, verifies: bool, place: Path) -> None:
    """What changed is told, also of files that have no name any more; nothing else is, and no case is a SIGBUS."""
    code = "t.go_through(tier, root, many=False, verifies=verifies, with_mounts=with_mounts)"
    done = run_python(_CASES + code, tier, place, verifies, 0, 0)
    assert done.returncode == 0 and done.stdout.endswith("done\n"), (done.returncode, done.stdout, done.stderr[-1500:])


@as_root
@pytest.mark.parametrize("user", [0, 65534], ids=["root", "nobody"])
@pytest.mark.parametrize(("tier", "verifies"), [("groups", False), ("checkpoint", False), ("checkpoint", True)])
def test_more_files_than_descriptors(tier: str, verifies: bool, user: int, place: Path) -> None:
    """The same. Of checkpoints whose content nobody knows what lost its name is lost, if a user may not ask the kernel."""
    code = """
t.go_through(tier, root, many=True, verifies=verifies, with_mounts=with_mounts,
    may_lose=tier == "checkpoint" and user and not verifies)
"""
    done = run_python(_CASES + code, tier, place, verifies, 256, user)
    assert done.returncode == 0 and done.stdout.endswith("done\n"), (done.returncode, done.stdout, done.stderr[-1500:])
