"""What other programs do to files under a running model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from group_offload import GroupFileError

from ...support.reading import Preadv, Rig, assert_tells, every_rig


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
