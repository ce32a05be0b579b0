"""Memory that is mapped twice."""

from __future__ import annotations

import ctypes
import os
from functools import partial

import pytest

from group_offload.base import mapping, pagemap
from group_offload.base.mapping import TwiceMapped, forget_writes
from group_offload.base.pagemap import _MAX_REGIONS, PAGE, can_detect_writes, written_pages

from ..support.reading import num_fds
from ..support.tuning import tune

pytestmark = pytest.mark.skipif(not can_detect_writes(), reason="this system does not tell which pages were written")


@pytest.mark.parametrize("num_bytes", [1, PAGE, 3 * PAGE + 5, 200 * PAGE + 7])
def test_bytes_of_any_number_in_pieces(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large it is, it takes few descriptors, and those only until it is filled."""
    tune(monkeypatch, min_mapped_piece_bytes=PAGE)
    content = os.urandom(num_bytes)
    before = num_fds()
    memory = TwiceMapped(num_bytes)
    assert num_fds() - before <= mapping._MAX_PIECES
    middle = num_bytes // 3
    memory.write([(middle, memoryview(content)[middle:]), (0, memoryview(content)[:middle])])
    memory.seal()
    assert num_fds() <= before  # what other tests left may go meanwhile
    assert bytes(memory.shared) == bytes(memory.private) == content


@pytest.mark.parametrize("num_scans", [0, 1])
def test_a_kernel_whose_scans_do_nothing(num_scans: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox answers each request with success, from the first one on or later. Entries are read then."""
    scans: list[int] = []
    real = pagemap.ioctl

    def ioctl(fd: int, request: int, argument: bytearray) -> int:
        scans.append(request)
        return real(fd, request, argument) if len(scans) <= num_scans else 0

    memory = TwiceMapped(4 * PAGE)
    memory.write([(0, memoryview(bytes(4 * PAGE)))])
    memory.seal()
    scan = partial(written_pages, ctypes.addressof(memory.private), 4 * PAGE)
    monkeypatch.setattr(pagemap._Known, "lacks_scan", False)
    monkeypatch.setattr(pagemap, "ioctl", ioctl)
    assert scan() == []
    memory.private[2 * PAGE] = b"b"
    assert scan() == [(2 * PAGE, 3 * PAGE)]
    assert pagemap._Known.lacks_scan


@pytest.mark.parametrize("lacks_scan", [False, True])
def test_one_scan_tells_again_and_again_of_more_pages_than_the_kernel_tells_at_once(
    lacks_scan: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_pages = 4 * _MAX_REGIONS + 3
    memory = TwiceMapped(num_pages * PAGE)
    memory.write([(0, memoryview(bytes(num_pages * PAGE)))])
    memory.seal()
    address = ctypes.addressof(memory.private)
    scan = partial(written_pages, address, num_pages * PAGE)
    monkeypatch.setattr(pagemap._Known, "lacks_scan", lacks_scan)
    for step in (2, 1, 3):
        assert scan() == []
        for page in range(0, num_pages, step):
            memory.private[page * PAGE] = b"b"
        ranges = [(page * PAGE, (page + 1) * PAGE) for page in range(0, num_pages, step)]
        wanted = [(0, num_pages * PAGE)] if step == 1 else ranges
        assert scan() == scan() == wanted
        with monkeypatch.context() as patch:  # threads look at parts of what is large
            patch.setattr(pagemap, "_LOOK_BYTES", 7 * PAGE)
            found = {at for start, end in scan() or [] for at in range(start, end, PAGE)}
            assert found == {at for start, end in wanted for at in range(start, end, PAGE)}
        forget_writes(address, num_pages * PAGE)
