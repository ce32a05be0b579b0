"""Errors of the drive under a running model, and how fast the drive turns out to be."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from group_offload import GroupFileError

from ...support.reading import Preadv, Rig, assert_tells, every_rig, is_direct, within

# ---------------------------------------------------------------- errors of the drive


def test_an_error_at_every_read(rig: Rig, preadv: Preadv) -> None:
    """One forward for each read that a forward makes, and that one read fails. What was read ahead is tried once more.
    Hazard: the disk fails in the middle of a forward (`EIO`), and the model is lost; a read that fails is reported as a
    lack of memory (ComfyUI #12332, #13598, #15255)."""
    rig.check(2)
    rig.settle()
    preadv.arm(-1, -1)
    rig.check()
    rig.settle()
    num_reads = preadv.num_calls
    assert num_reads >= 4
    num_told = 0
    for number in range(num_reads):
        preadv.fail(errno.EIO, number)
        try:
            rig.check()
        except GroupFileError as error:
            assert_tells(error, rig, os.strerror(errno.EIO))
            num_told += 1
        rig.settle()
        rig.check_at_rest()
        preadv.arm(-1, -1)
        rig.check()
        rig.check()
    assert num_told <= num_reads and (num_told == num_reads or rig.device is not None)


def test_remove_while_every_read_fails(rig: Rig, preadv: Preadv) -> None:
    """Weights at rest do not go the way of the reader."""
    rig.check()
    preadv.fail(errno.EIO, 0, 10**6)
    with pytest.raises(GroupFileError):
        rig.check(3)
    within(60, rig.handle.remove)
    rig.check_at_rest()


@every_rig
@pytest.mark.parametrize(("size", "direct"), [(1, False), (5000, False), (4096, True), (1000, True)])
def test_reads_that_return_less(
    size: int, direct: bool, where: str, tier: str, tmp_path: Path, preadv: Preadv, request: pytest.FixtureRequest
) -> None:
    """Hazard: a read returns less than was asked for, and the rest of the buffer is garbage."""
    if direct:
        request.getfixturevalue("scarce_ram")

    def short(real: Any, fd: int, buffers: Any, position: int) -> int:
        count: int = real(fd, buffers, position)
        if is_direct(fd) == direct:
            count = min(count, size)
            buffers[0][count:] = bytes(len(buffers[0]) - count)  # it did not come
        return count

    with Rig(where, tier, tmp_path) as rig:
        preadv.arm(0, 40 if size == 1 else 10**9, short)  # byte by byte takes too long
        rig.check(2)
        assert preadv.num_faults


# ---------------------------------------------------------------- what other programs do


@every_rig
@pytest.mark.parametrize("direct", [False, True], ids=["page cache", "direct"])
def test_a_truncated_file_comes_back(
    direct: bool, where: str, tier: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Hazard: a file is truncated while the model runs: a crash, or garbage."""
    if direct:
        request.getfixturevalue("scarce_ram")
    # What is in a checkpoint can be told if it was hashed.
    with Rig(where, tier, tmp_path, verify_files=tier == "checkpoint") as rig:
        rig.check()
        rig.settle()
        paths = rig.paths()
        before = [(path.read_bytes(), path.stat()) for path in paths]
        for path, (content, _) in zip(paths, before, strict=True):
            os.truncate(path, len(content) - 100)
        for _ in range(3):
            with pytest.raises(GroupFileError) as caught:
                rig.check()
            assert any(str(path) in str(caught.value) for path in paths) and "cut off" in str(caught.value)
        for path, (content, stat) in zip(paths, before, strict=True):
            path.write_bytes(content)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        rig.check(3)
        rig.check_at_rest()


def test_a_file_that_is_cut_off_while_it_is_read(rig: Rig, preadv: Preadv) -> None:
    """After it was looked at, and before it is read: the read says that it ends."""
    rig.check()
    rig.settle()
    preadv.arm(5, 10**6, lambda *args: 0)
    with pytest.raises(GroupFileError) as caught:
        rig.check(2)
    assert_tells(caught.value, rig, "ends there")
    del caught
    preadv.arm(-1, -1)
    rig.check(3)
