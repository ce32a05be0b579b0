"""What other programs do to files under a running model."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from group_offload import GroupFileError

from ...support.processes import run_python
from ...support.reading import Preadv, Rig, assert_tells, every_device, every_tier


@every_tier
@every_device
@pytest.mark.parametrize("direct", [False, True], ids=["page cache", "direct"])
def test_a_truncated_file_comes_back(
    direct: bool, where: str, tier: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
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


@every_tier
@every_device
def test_a_file_that_is_cut_off_while_it_is_read(where: str, tier: str, tmp_path: Path, preadv: Preadv) -> None:
    """After it was looked at, and before it is read: the read says that it ends."""
    with Rig(where, tier, tmp_path) as rig:
        rig.check()
        rig.settle()
        preadv.arm(5, 10**6, lambda *args: 0)
        with pytest.raises(GroupFileError) as caught:
            rig.check(2)
        assert_tells(caught.value, rig, "ends there")
        del caught
        preadv.arm(-1, -1)
        rig.check(3)


@every_tier
@every_device
@pytest.mark.parametrize("what", ["deleted", "replaced", "replaced by a folder", "folder gone"])
def test_a_file_that_goes_under_a_running_model(what: str, where: str, tier: str, tmp_path: Path) -> None:
    """What was opened is read on, whatever has its name."""
    (tmp_path / "weights").mkdir()
    with Rig(where, tier, tmp_path / "weights") as rig:
        rig.check()
        for path in rig.paths():
            if what == "replaced":
                other = path.with_name("other")
                other.write_bytes(bytes(path.stat().st_size))
                os.replace(other, path)
            elif what != "folder gone":
                path.unlink()
                if what == "replaced by a folder":
                    path.mkdir()
        if what == "folder gone":
            shutil.rmtree(rig.folder)
        rig.check(3)
        rig.check_at_rest()


@pytest.mark.parametrize(("where", "tier"), [("simulated", "folder"), ("cpu", "checkpoint")])
def test_a_folder_that_may_not_be_entered_any_more(where: str, tier: str, tmp_path: Path) -> None:
    """By a process that is not root, which this one may be. Right or told; right again once it may be entered."""
    done = run_python(
        """
        from group_offload.base.tuning import tune
        tune(locked_share=0.0)
        import tests.support.reading as t
        where, tier, folder = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
        folder.mkdir()
        os.chown(folder, 12345, 12345) if os.geteuid() == 0 else None
        inner = folder / "weights"
        import torch._dynamo  # which may be where that user may not read
        if os.geteuid() == 0:
            os.setgroups([]); os.setgid(12345); os.setuid(12345)
            import ctypes
            ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: may look into its own /proc, as if it had been started so
        inner.mkdir()
        told = []
        with t.Rig(where, tier, inner) as rig:
            rig.check(2)
            for mode in (0, 0o700) * 2:
                inner.chmod(mode)
                for number in range(3):
                    try:
                        rig.check()
                    except GroupFileError as error:
                        assert str(inner) in str(error) and "Permission denied" in str(error), error
                        assert mode == 0 or number == 0, error  # of what was read ahead
                        told.append(mode)
            for path in rig.paths():
                for mode in (0, 0o600):
                    path.chmod(mode)
                    try:
                        rig.check()
                    except GroupFileError as error:  # with 0o600: of what was read ahead
                        assert str(inner) in str(error) and "Permission denied" in str(error), error
                rig.check()
            rig.check(2)
        print(len(told))
        """,
        where,
        tier,
        tmp_path_for_others(tmp_path),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    if tier == "checkpoint":
        assert int(done.stdout) == 0  # it is open


def tmp_path_for_others(tmp_path: Path) -> Path:
    """A folder that another user may reach: pytest's own are for its user alone."""
    folder = Path(tempfile.mkdtemp(prefix="group_offload-test-"))
    folder.chmod(0o755)
    _to_delete.append(folder)
    return folder / "in"


_to_delete: list[Path] = []


@pytest.fixture(autouse=True, scope="module")
def _delete_at_the_end() -> Iterator[None]:
    yield
    for folder in _to_delete:
        shutil.rmtree(folder, ignore_errors=True)
