"""Reads past the page cache, and what happens where the system refuses them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from group_offload import StorageError
from group_offload.base import reading
from group_offload.base.mapping import cached_bytes, forget_writes

from ...support.reading import Preadv, Rig, assert_tells, every_rig, has_direct_reads, is_direct
from ...support.tuning import tune


@every_rig
def test_direct_reads(where: str, tier: str, tmp_path: Path, preadv: Preadv, scarce_ram: None) -> None:
    """At any position, also where a file ends inside a block: most of these do. An error is told, and not taken for a
    refusal."""
    with Rig(where, tier, tmp_path, [3, 5, 300, 7]) as rig:
        preadv.arm(-1, -1)  # set-up has looked at what else is in the folder
        rig.check(3)
        rig.settle()
        stats = rig.handle.stats()
        assert preadv.num_direct == preadv.num_calls > 0
        assert stats.bytes_read["direct"] > 0 and stats.bytes_read["page cache"] == 0
        assert {group.read_mode for group in rig.handle.groups if group.num_bytes} == {"direct"}
        preadv.fail(errno.EIO, 0, 10**6)
        with pytest.raises(StorageError) as caught:
            rig.check(2)
        assert_tells(caught.value, rig, os.strerror(errno.EIO))
        preadv.arm(-1, -1)
        rig.check(2)
        rig.settle()
        assert rig.handle.stats().bytes_read["page cache"] == 0


@pytest.mark.parametrize("where", ["cpu", "simulated"])
def test_a_cold_file_is_read_past_the_page_cache(
    where: str, tmp_path: Path, preadv: Preadv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is told to the reader here but that RAM is scarce: the page cache really does not have the file."""
    if not has_direct_reads(tmp_path):
        pytest.skip("this file system has none")
    monkeypatch.setattr("group_offload.runtime.transfers.page_cache_pins.available_ram", lambda: 0)
    tune(monkeypatch, chunk_bytes=256 << 10)
    widths = [60_000] * 3
    with Rig(where, "checkpoint", tmp_path, widths) as rig:
        (path,) = rig.paths()
        size = path.stat().st_size
        drop_from_page_cache(path)
        if num_cached(path) > size / 5:
            pytest.skip("the page cache cannot be emptied here")
        rig.check()
        rig.settle()
        assert rig.handle.stats().bytes_read["direct"] > size * 0.7 and preadv.num_direct > 0
        assert num_cached(path) < size / 3  # and it did not get there by that
        path.read_bytes()
        preadv.arm(-1, -1)
        rig.check(2)
        rig.settle()
        assert preadv.num_direct < preadv.num_calls / 2


def drop_from_page_cache(path: Path) -> None:
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path)):  # what is mapped stays
            start, end = (int(address, 16) for address in line.split()[0].split("-"))
            forget_writes(start, end - start)
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def num_cached(path: Path) -> int:
    whole = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
    return cached_bytes(whole.data_ptr(), whole.numel())


@every_rig
@pytest.mark.parametrize(
    ("what", "first", "code"),
    [("read", 0, errno.EINVAL), ("read", 0, errno.EFAULT), ("read", 4, errno.EOPNOTSUPP), ("open", 0, errno.EINVAL)],
)
def test_direct_reads_that_are_refused(
    what: str,
    first: int,
    code: int,
    where: str,
    tier: str,
    tmp_path: Path,
    preadv: Preadv,
    scarce_ram: None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then files are read through the page cache, which is said once. Hazard: a file system refuses direct reads, or to open
    files for them."""
    real_open = os.open
    monkeypatch.setattr(reading, "_said", {})

    def refuse_to_open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return real_open(path, flags, *args, **kwargs)

    if what == "open":
        monkeypatch.setattr(os, "open", refuse_to_open)

    def refuse(real: Any, fd: int, buffers: Any, position: int) -> int:
        if is_direct(fd):
            raise OSError(code, os.strerror(code))
        return real(fd, buffers, position)

    with Rig(where, tier, tmp_path) as rig:
        preadv.arm(first, 10**9, refuse)
        rig.check(3)
        rig.settle()
        assert rig.handle.stats().bytes_read["page cache"] > 0
    told = [message for message in caplog.messages if "Direct reads" in message]
    assert len(told) == 1 and os.strerror(code) in told[0]
