"""How fast this machine moves bytes: RAM to the device, the drive to RAM. Measured once, in a second or two, and kept.

Measurements are kept in `$XDG_CACHE_HOME/group_offload/speeds.json` (`~/.cache` if that is not set), by device or file
system. Nothing depends on that file: a file that cannot be read counts as no file, and is written anew.

[Note: How a drive is measured]
A file of the model is read as the engine reads where RAM is scarce: past the page cache, by the threads of the pool, in
large pieces. Where direct reads are refused (some network drives), pieces that are not in the page cache are read through
it. Where there is no such file, nothing is measured, and `ASSUMED_DRIVE` stands in.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from ..base.device import Backend, Stream
from ..base.layout import lay_out, memory_of
from ..base.mapping import cached_bytes, flat_view, map_anonymous, page_cache_of
from ..base.page_lock import PageLock
from ..base.pool import num_threads, run_all
from ..base.publish import publish
from ..base.reading import open_direct, read_part, refuses_direct
from ..base.system import name_of_drive
from ..base.text import describe_bytes
from ..errors import DeviceError
from ..packing.codec import pack, unpack
from .placement import ASSUMED_UNPACK, Speeds

ASSUMED_H2D = 25_000_000_000
"""Bytes per second where the link was not measured: PCIe 4 x16."""
ASSUMED_DRIVE = 3_500_000_000
"""Bytes per second where the drive was not measured: an NVMe drive on PCIe 3 x4."""
LINK_BYTES = 256 << 20
UNPACKED_BYTES = 64 << 20
_MAX_DRIVE_BYTES = 1 << 30
MIN_DRIVE_BYTES = 64 << 20
"""A smaller file takes too little time to tell a speed."""
_COPY_BYTES = 32 << 20
"""One copy. PCIe is at full speed with 16 MiB."""
_NUM_TRIES = 3
_UNPACKS_IN_A_ROW = 8
"""The first one begins late: the device waits for the host, for as long as it takes for 64 MiB."""
_PIECE_BYTES = 8 << 20
_DRIVE_SECONDS = 1.0
_VERSION = 4

Take = Callable[[int, Stream], torch.Tensor]


class Measured(NamedTuple):
    """A measurement that was kept."""

    what: str
    """"h2d", "drive" or "unpack"."""
    where: str
    """The name of the device, or the file system that the drive is mounted as."""
    speed: int
    """Bytes per second, more than 0."""
    at: str
    """UTC, ISO 8601."""


def known_speeds(backend: Backend, path: Path | None, *, unpacks: bool = False, take: Take | None = None) -> Speeds:
    """The speeds of this device and file system: measured before, measured now and kept, or else assumed.

    Args:
        path: a file of the model, or its folder; it need not exist. None: no drive matters.
        unpacks: whether it matters how fast the device unpacks weights.
        take: takes device memory for a stream, as `Backend.empty` does.

    Raises:
        DeviceError: the device has no room for a measurement.
    """
    known = {(each.what, each.where): each.speed for each in recorded()}
    device, where = device_name(backend), "" if path is None else filesystem_of(path)
    h2d = known.get(("h2d", device)) or measure_link(backend, LINK_BYTES, take=take)
    drive = unpack = None
    if path is not None:
        drive = known.get(("drive", where)) or measure_drive(path, MIN_DRIVE_BYTES)[0]
    if unpacks:
        unpack = known.get(("unpack", device)) or measure_unpacking(backend, take=take)
    record({("h2d", device): h2d, ("drive", where): drive, ("unpack", device): unpack})
    return Speeds(h2d=h2d, drive=drive or ASSUMED_DRIVE, unpack=unpack or ASSUMED_UNPACK)


def filesystem_of(path: Path) -> str:
    """The place where the file system is mounted that holds `path`, or will, and its device id."""
    folder = path.absolute()
    while not folder.exists() and folder.parent != folder:
        folder = folder.parent
    folder = folder.resolve()
    number = folder.stat().st_dev
    while folder.parent != folder and folder.parent.stat().st_dev == number:
        folder = folder.parent
    return f"{folder} ({name_of_drive(number)})"


# ------------------------------------------------------------------------------------------------ what was measured before


def record_file() -> Path | None:
    """The file that keeps speeds. None for a user without a home: no file in the current folder is made or believed."""
    for base in (os.environ.get("XDG_CACHE_HOME", ""), os.path.join(os.path.expanduser("~"), ".cache")):
        if os.path.isabs(base):
            return Path(base, "group_offload", "speeds.json")
    return None


def recorded() -> list[Measured]:
    """All measurements that were kept, the newest first; none if the file is missing, damaged, or another version's."""
    path = record_file()
    if path is None:
        return []
    try:
        content = json.loads(path.read_bytes())
        found = [Measured(*entry) for entry in content["speeds"]] if content["version"] == _VERSION else []
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return []
    return sorted(found, key=lambda each: each.at, reverse=True)


def record(speeds: Mapping[tuple[str, str], int | None]) -> bool:
    """Keep measurements, by what was measured and where, in place of earlier ones.

    Returns:
        Whether that was possible.
    """
    path, before, now = record_file(), recorded(), datetime.now(timezone.utc).isoformat(timespec="seconds")
    known = {(each.what, each.where): each for each in before}
    news = {
        key: Measured(*key, speed, now)
        for key, speed in speeds.items()
        if speed is not None and (key not in known or known[key].speed != speed)
    }
    if path is None or not news:
        return path is not None
    text = json.dumps({"version": _VERSION, "speeds": [*(known | news).values()]}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        publish(path, [text.encode()])
    except OSError:
        return False
    return True


# ------------------------------------------------------------------------------------------------ the device


def device_name(backend: Backend) -> str:
    device = backend.device
    if device.type == "cpu":
        return f"CPU of {platform.node()}"
    return str(getattr(torch, device.type).get_device_properties(device).name)


def measure_link(backend: Backend, num_bytes: int, *, take: Take | None = None) -> int:
    """Bytes per second from page-locked RAM to the device: the best of a few tries.

    Raises:
        DeviceError: the device has no room for a measurement.
    """
    copy_bytes = min(num_bytes, _COPY_BYTES)
    num_copies = num_bytes // copy_bytes
    with _locked_memory(backend, num_copies * copy_bytes) as source:
        source.fill_(1)  # memory that was never written is one page of zeros
        stream = backend.new_stream()
        try:
            target = (take or backend.empty)(copy_bytes, stream)
        except torch.OutOfMemoryError as error:
            raise DeviceError(
                f"{backend.device} has no {describe_bytes(copy_bytes)} free, which a measurement needs. Free some."
            ) from error

        def copy() -> None:
            for part in torch.split(source, copy_bytes):
                backend.copy(target, part, stream)

        try:
            return _best_speed(backend, num_copies * copy_bytes, stream, copy)
        finally:
            backend.free(target)


def measure_unpacking(backend: Backend, num_bytes: int = UNPACKED_BYTES, *, take: Take | None = None) -> int | None:
    """Bytes of weights that the device unpacks in a second: the best of a few tries. None if it has no room for that."""
    weights = torch.randn(num_bytes // 2, generator=torch.Generator().manual_seed(0), device="cpu").bfloat16()
    packed = pack(weights.view(torch.uint8), lay_out(["weights"], [weights]), backend.device)
    if packed is None:
        return None
    stream = backend.new_stream()
    try:
        source, target = ((take or backend.empty)(size, stream) for size in (packed.data.numel(), num_bytes))
    except torch.OutOfMemoryError:
        return None
    backend.copy(source, packed.data, stream, blocking=True)

    def unpack_all() -> None:
        for _ in range(_UNPACKS_IN_A_ROW):
            backend.transform(lambda data, out: unpack(data, packed.layout, out), target, source, stream)

    speed = _best_speed(backend, _UNPACKS_IN_A_ROW * num_bytes, stream, unpack_all)
    backend.free(source)
    backend.free(target)
    return speed


def _best_speed(backend: Backend, num_bytes: int, stream: Stream, work: Callable[[], object]) -> int:
    """Bytes per second of the fastest of a few tries."""
    best = 0.0
    for _ in range(1 + _NUM_TRIES):  # the first one wakes the link up, or compiles the kernel
        start, end = backend.new_event(), backend.new_event()
        began = time.perf_counter()
        start.record(stream)
        work()
        end.record(stream)
        end.synchronize()
        by_clock = time.perf_counter() - began
        by_events = backend.seconds_between(start, end) if backend.has_streams else None
        best = max(best, num_bytes / (by_events or by_clock))
    return max(1, int(best))


@contextmanager
def _locked_memory(backend: Backend, num_bytes: int) -> Iterator[torch.Tensor]:
    """Memory that is page-locked if the device can do so."""
    memory = flat_view(map_anonymous(num_bytes), 0, num_bytes)
    lock = PageLock.take(backend, memory, lambda: None)
    if lock is None:
        made = backend.empty_pinned(num_bytes)
        memory = memory if made is None else made
    try:
        yield memory
    finally:
        if lock is not None:
            lock.release()


# ------------------------------------------------------------------------------------------------ the drive


def measure_drive(path: Path, min_bytes: int) -> tuple[int | None, str]:
    """Bytes per second, or None, and what was wrong, if anything: see [Note: How a drive is measured].

    Args:
        path: a file of at least `min_bytes`, or the folder of a model with such a file.
    """
    folder = path if path.is_dir() else path.parent
    files = path, *sorted(folder.glob("*.safetensors")), *sorted(folder.glob("*/*.safetensors"))  # of a pipeline
    chosen = next((file for file in files if file.is_file() and file.stat().st_size >= min_bytes), None)
    if chosen is None:
        return None, f"Not measuring the disk: {path} has no safetensors file of {describe_bytes(min_bytes)} or more."
    try:
        with chosen.open("rb", buffering=0) as file:
            speed, is_direct = _measure_file(file.fileno())
    except OSError as error:
        return None, f"Cannot read {chosen} to measure the disk: {error.strerror or error}."
    in_ram = "" if speed else ", and it is in RAM: the disk was not measured"
    return speed, "" if is_direct else f"Direct reads of {chosen} aren't possible{in_ram}."


def _measure_file(fd: int) -> tuple[int | None, bool]:
    """Bytes per second, if it could be read from the drive, and whether it was read past the page cache."""
    num_bytes = os.fstat(fd).st_size
    size = min(_PIECE_BYTES, num_bytes)
    pieces = [(start, size) for start in range(0, num_bytes - size + 1, size)]
    pieces = pieces[:: -(-num_bytes // _MAX_DRIVE_BYTES)]
    direct = open_direct(fd)
    if direct is not None:
        try:
            return _read_all(direct.fileno(), pieces), True
        except OSError as error:
            if not refuses_direct(error):
                raise
    cold = [piece for piece in pieces if not _is_cached(fd, *piece)]
    return _read_all(fd, cold) if cold else None, False


def _read_all(fd: int, pieces: Sequence[tuple[int, int]]) -> int:
    """Read pieces by the threads of the pool, until there are no more or the time is over. Returns bytes per second."""
    size = pieces[0][1]
    memory = flat_view(map_anonymous(num_threads() * size), 0, num_threads() * size)
    memory.fill_(1)  # it is there before the clock runs
    left, began = deque(pieces), time.perf_counter()

    def work(buffer: memoryview) -> int:
        done = 0
        with suppress(IndexError):  # there are no more
            while not done or time.perf_counter() - began < _DRIVE_SECONDS:
                start, size = left.popleft()
                done += read_part(fd, buffer[:size], start)
        return done

    num_bytes = sum(run_all(partial(work, memory_of(part)) for part in torch.split(memory, size)))
    return max(1, int(num_bytes / (time.perf_counter() - began)))


def _is_cached(fd: int, start: int, num_bytes: int) -> bool:
    """Whether some of it is in the page cache; true too if the system does not tell."""
    start = start // mmap.PAGESIZE * mmap.PAGESIZE
    with suppress(OSError):
        mapped = page_cache_of(fd, start, num_bytes)
        return cached_bytes(mapped.data_ptr(), num_bytes) > 0
    return True
