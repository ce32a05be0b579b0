"""How fast this machine moves bytes: RAM to the device, the drive to RAM. Measured once, in a second or two, and kept.

What was measured is kept in `$XDG_CACHE_HOME/group_offload/speeds.json` (`~/.cache` if that is not set), by device, driver
and file system. Nothing depends on that file: one that cannot be read is as good as none, and is written anew.

[Note: How a drive is measured]
As the engine reads where RAM is scarce: past the page cache, by the threads of the pool, in large pieces. A file of the
model is read if there is one. Otherwise a file without a name is written to the folder, so that nothing is left of it even
if the process is killed. Where direct reads are refused (tmpfs, some network drives) pieces that are not in the page cache
are read through it. What a measurement brought into the page cache is dropped again, and nothing else is.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import platform
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..base.device import Backend
from ..base.layout import memory_of
from ..base.mapping import cached_bytes, flat_view, map_anonymous, map_page_cache
from ..base.pool import num_threads, run_all
from ..base.publish import open_to_read, publish_anew
from ..base.reading import open_direct, read_part, refuses_direct
from ..base.strict_json import as_size, as_text, parse
from ..errors import DeviceError, GroupFileError

ASSUMED_H2D = 25_000_000_000
"""Bytes per second, where nothing was measured: PCIe 4 x16."""
ASSUMED_DRIVE = 3_500_000_000
"""The same: an NVMe drive on PCIe 3 x4."""
LINK_BYTES = 256 << 20
MAX_DRIVE_BYTES = 1 << 30
MIN_DRIVE_BYTES = 64 << 20
"""Of less nothing can be told."""
_COPY_BYTES = 32 << 20
"""One copy. PCIe is at full speed with 16 MiB."""
_NUM_TRIES = 3
_PIECE_BYTES = 8 << 20
_CACHED_BYTES = 128 << 20
_CACHED_SECONDS = 0.1
_DRIVE_SECONDS = 1.0
_WRITE_SECONDS = 1.5
_MAX_SPARSENESS = 1.1
_MIN_ROOM = 4
"""So many times what is written has to be free: others write there too."""
_MAX_FILES_SEEN = 10_000
_VERSION = 1
_MAX_RECORD_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpeeds:
    """What was measured. Speeds are whole bytes per second."""

    h2d: int
    """From page-locked RAM to the device. If the device is the CPU: from RAM to RAM."""
    drive: int | None
    """From the drive to RAM; None if it could not be measured."""
    cached: int | None
    """From the page cache to RAM, by as many threads as read files."""
    is_direct: bool
    """Whether `drive` is past the page cache."""
    problem: str
    """Why a drive was not measured, or not as it should be; else empty."""
    device: str
    driver: str
    filesystem: str
    """Where it is mounted, and its device id; empty if none was measured."""
    measured_at: str
    """UTC, ISO 8601."""


def known_speeds(backend: Backend, path: Path | None, *, max_drive_bytes: int = MAX_DRIVE_BYTES) -> MachineSpeeds:
    """What was measured before with this device, driver and file system; else it is measured now, and kept.

    Args:
        path: a folder, or a file of the model, on the drive in question. It need not exist yet. None: no drive matters.

    Raises:
        DeviceError: the device has no room for a measurement.
    """
    key = (*_device_and_driver(backend), "" if path is None else filesystem_of(path))
    for found in recorded():
        if (found.device, found.driver, found.filesystem) == key:
            return found
    measured = measure(backend, path, max_drive_bytes=max_drive_bytes)
    if path is None or measured.drive is not None:  # else it may be possible the next time
        record(measured)
    return measured


def measure(
    backend: Backend,
    path: Path | None,
    *,
    link_bytes: int = LINK_BYTES,
    max_drive_bytes: int = MAX_DRIVE_BYTES,
    min_drive_bytes: int = MIN_DRIVE_BYTES,
    on_step: Callable[[str], object] = lambda text: None,
) -> MachineSpeeds:
    """Measure the link to the device, and the drive. See [Note: How a drive is measured].

    Args:
        path: a folder, or a file of the model, on the drive in question. If it is not there, the nearest folder above is
            taken; None: no drive is measured.
        link_bytes: page-locked RAM that is taken for it.
        max_drive_bytes, min_drive_bytes: so much is read, or written first if there is no file.
        on_step: is told what is measured next.

    Raises:
        DeviceError: the device has no room for it.
    """
    device, driver = _device_and_driver(backend)
    on_step("copies to the device")
    h2d = _measure_link(backend, link_bytes)
    drive = _Drive(None, None, False, "")
    if path is not None:
        on_step("reads of files")
        drive = _measure_path(_existing(path), min_drive_bytes, max_drive_bytes)
    return MachineSpeeds(
        h2d=h2d,
        drive=drive.speed,
        cached=drive.cached,
        is_direct=drive.is_direct,
        problem=drive.problem,
        device=device,
        driver=driver,
        filesystem="" if path is None else filesystem_of(path),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def filesystem_of(path: Path) -> str:
    """Where the file system is mounted that holds `path`, or will, and its device id."""
    folder = _existing(path).resolve()
    number = folder.stat().st_dev
    while folder.parent != folder and folder.parent.stat().st_dev == number:
        folder = folder.parent
    return f"{folder} ({os.major(number)}:{os.minor(number)})"


# ------------------------------------------------------------------------------------------------ what was measured before


def record_file() -> Path | None:
    """Where speeds are kept. None for a user without a home: nothing is made or believed in the current folder."""
    for base in (os.environ.get("XDG_CACHE_HOME", ""), os.path.join(os.path.expanduser("~"), ".cache")):
        if os.path.isabs(base):
            return Path(base, "group_offload", "speeds.json")
    return None


def recorded() -> list[MachineSpeeds]:
    """All that was kept, the newest first; nothing if the file is not there, damaged, or another version's."""
    path = record_file()
    if path is None:
        return []
    try:
        fd = open_to_read(path)
    except OSError:
        return []
    try:
        data = bytearray(_MAX_RECORD_BYTES)
        text = bytes(data[: read_part(fd, memoryview(data), 0)])
        found = _speeds_in(parse(text))
    except OSError:  # GroupFileError too: it is not what we write
        return []
    finally:
        os.close(fd)
    return sorted(found, key=lambda speeds: speeds.measured_at, reverse=True)


def record(speeds: MachineSpeeds) -> bool:
    """Keep what was measured, in the place of an earlier measurement of the same.

    Returns:
        Whether that was possible.
    """
    others = [found for found in recorded() if _key(found) != _key(speeds)]
    text = json.dumps({"version": _VERSION, "speeds": [asdict(each) for each in (speeds, *others)]}, indent=1)
    path = record_file()
    if path is None:
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(publish_anew(path, text.encode()))
    except OSError:
        return False
    return True


def _key(speeds: MachineSpeeds) -> tuple[str, str, str]:
    return speeds.device, speeds.driver, speeds.filesystem


def _speeds_in(content: object) -> list[MachineSpeeds]:
    entries = content.get("speeds") if isinstance(content, dict) and content.get("version") == _VERSION else None
    if not isinstance(entries, list):
        raise GroupFileError("it is of another version")
    return [_speeds_of(entry) for entry in entries]


def _speeds_of(entry: object) -> MachineSpeeds:
    if not isinstance(entry, dict) or entry.keys() != set(MachineSpeeds.__dataclass_fields__):
        raise GroupFileError("it has something else where speeds belong")
    return MachineSpeeds(
        h2d=_as_speed(entry["h2d"]),
        drive=None if entry["drive"] is None else _as_speed(entry["drive"]),
        cached=None if entry["cached"] is None else _as_speed(entry["cached"]),
        is_direct=entry["is_direct"] is True,
        **{name: as_text(entry[name]) for name in ("problem", "device", "driver", "filesystem", "measured_at")},
    )


def _as_speed(value: object) -> int:
    speed = as_size(value)
    if not speed:
        raise GroupFileError("it has a speed of 0")
    return speed


# ------------------------------------------------------------------------------------------------ the device


def _device_and_driver(backend: Backend) -> tuple[str, str]:
    device = backend.device
    if device.type == "cpu":
        return f"CPU {_cpu_name()} of {platform.node()}", platform.release()
    properties = getattr(torch, device.type).get_device_properties(device)
    versions = [getattr(properties, "driver_version", ""), *map(_module_version, ("nvidia", "amdgpu"))]
    runtimes = [getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu")]
    name = " ".join(str(part) for part in (properties.name, getattr(properties, "uuid", "")) if part)
    return name, " ".join(str(part) for part in (*versions, *runtimes) if part)


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.machine()


def _module_version(name: str) -> str:
    with suppress(OSError):
        return Path(f"/sys/module/{name}/version").read_text().strip()
    return ""


def _measure_link(backend: Backend, num_bytes: int) -> int:
    """Bytes per second, the best of a few tries."""
    copy_bytes = min(num_bytes, _COPY_BYTES)
    num_copies = num_bytes // copy_bytes
    with _locked_memory(backend, num_copies * copy_bytes) as source:
        source.fill_(1)  # what was never written is one page of zeros
        stream = backend.new_stream()
        try:
            target = backend.empty(copy_bytes, stream)
        except torch.OutOfMemoryError as error:
            raise DeviceError(
                f"{backend.device} has no room for the {copy_bytes >> 20} MiB that a measurement takes: give some of it free."
            ) from error
        parts = torch.split(source, copy_bytes)
        best = 0.0
        try:
            for _ in range(1 + _NUM_TRIES):  # the first one wakes the link up
                best = max(best, num_copies * copy_bytes / _seconds_of_copies(backend, target, parts, stream))
        finally:
            backend.free(target)
    return max(1, int(best))


def _seconds_of_copies(backend: Backend, target: torch.Tensor, parts: Iterable[torch.Tensor], stream: Any) -> float:
    start, end = backend.new_event(), backend.new_event()
    began = time.perf_counter()
    start.record(stream)
    for part in parts:
        backend.copy(target, part, stream)
    end.record(stream)
    end.synchronize()
    by_clock = time.perf_counter() - began
    by_events = backend.seconds_between(start, end) if backend.has_streams else None
    return by_events or by_clock


@contextmanager
def _locked_memory(backend: Backend, num_bytes: int) -> Iterator[torch.Tensor]:
    """Page-locked if the device can do so."""
    memory = flat_view(map_anonymous(num_bytes), 0, num_bytes)
    unpin = backend.pin(memory)
    if unpin is None:
        made = backend.empty_pinned(num_bytes)
        memory = memory if made is None else made
    try:
        yield memory
    finally:
        if unpin is not None:
            unpin()


# ------------------------------------------------------------------------------------------------ the drive


@dataclass(frozen=True, slots=True)
class _Drive:
    speed: int | None
    cached: int | None
    is_direct: bool
    problem: str


def _measure_path(path: Path, min_bytes: int, max_bytes: int) -> _Drive:
    """A file of a model if there is one, else one that is written for it, else any that is large enough."""
    folder = path if path.is_dir() else path.parent
    weights = sorted(folder.glob("*.safetensors")) if path.is_dir() else [path]
    measured = _measure_one_of(weights, min_bytes, max_bytes)
    if measured is not None:
        return measured
    try:
        with _nameless_file(folder, min_bytes, max_bytes) as (fd, num_bytes):
            return _measure_file(fd, num_bytes, num_bytes, is_ours=True)
    except OSError as error:
        problem = f"Cannot write {min_bytes >> 20} MiB to {folder} for a measurement: {error.strerror or error}."
    measured = _measure_one_of(_files_in(folder, min_bytes), min_bytes, max_bytes)
    return measured or _Drive(None, None, False, f"{problem} Nor is there a file of that size to read.")


def _measure_one_of(paths: Iterable[Path], min_bytes: int, max_bytes: int) -> _Drive | None:
    return next((found for path in paths if (found := _measure_named(path, min_bytes, max_bytes)) is not None), None)


def _measure_named(path: Path, min_bytes: int, max_bytes: int) -> _Drive | None:
    """None if nothing can be told from that file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        if not _is_large(status, min_bytes):
            return None
        found = _measure_file(fd, status.st_size, max_bytes, is_ours=False)
        return None if found.speed is None else found
    except OSError:
        return None
    finally:
        os.close(fd)


def _files_in(folder: Path, min_bytes: int) -> Iterator[Path]:
    """The files that are large enough, without looking through a whole drive."""
    num_seen = 0
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(parent, name)
            with suppress(OSError):
                if _is_large(path.stat(), min_bytes):
                    yield path
        num_seen += len(names) + 1
        if num_seen > _MAX_FILES_SEEN:
            return


def _is_large(status: os.stat_result, min_bytes: int) -> bool:
    """Whether it is a file with so many bytes on the drive: holes are read from nowhere."""
    on_drive = status.st_blocks * 512
    return stat.S_ISREG(status.st_mode) and min_bytes <= status.st_size <= on_drive * _MAX_SPARSENESS


@contextmanager
def _nameless_file(folder: Path, min_bytes: int, max_bytes: int) -> Iterator[tuple[int, int]]:
    """A file that goes with its descriptor, and is on the drive: as large as can be written in about a second.

    Raises:
        OSError: it cannot be written.
    """
    found = os.statvfs(folder)
    max_bytes = min(max_bytes, found.f_bavail * found.f_frsize // _MIN_ROOM)
    if max_bytes < min_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    content = os.urandom(min(_PIECE_BYTES, min_bytes))  # not what a file system or a drive could compress
    with tempfile.TemporaryFile(dir=folder, buffering=0, prefix=".group_offload-") as file:
        fd, num_bytes, began = file.fileno(), 0, time.monotonic()
        while num_bytes < min_bytes or (num_bytes < max_bytes and time.monotonic() - began < _WRITE_SECONDS):
            num_bytes += os.write(fd, content)
            if not num_bytes % (8 * len(content)):
                os.fdatasync(fd)  # so that the time is that of the drive
        os.fsync(fd)
        yield fd, num_bytes


def _measure_file(fd: int, num_bytes: int, max_bytes: int, *, is_ours: bool) -> _Drive:
    size = min(_PIECE_BYTES, num_bytes)
    pieces = [(start, size) for start in range(0, num_bytes - size + 1, size)]
    pieces = pieces[:: -(-num_bytes // max(max_bytes, size))]
    with _buffers(size) as buffers:
        if is_ours:
            _drop(fd, pieces)
        cold = [piece for piece in pieces if not _is_cached(fd, *piece)]
        speed, problem = _speed_past_cache(fd, cold or pieces, buffers), ""
        is_direct = speed is not None
        if speed is None and cold:
            speed, problem = _read_all(fd, cold, buffers), "Direct reads are not possible there: it was read without."
            _drop(fd, cold)
        few = pieces[: max(1, _CACHED_BYTES // size)]
        cached = _speed_from_cache(fd, few, buffers)
        _drop(fd, set(few) & set(cold))
    if speed is None and is_ours:  # tmpfs
        speed, problem = cached, "What is written there stays in RAM: its speed is that of RAM."
    return _Drive(speed, cached, is_direct, problem)


def _speed_past_cache(fd: int, pieces: list[tuple[int, int]], buffers: list[memoryview]) -> int | None:
    """None if the file system has no direct reads."""
    direct = open_direct(fd)
    if direct is None:
        return None
    try:
        return _read_all(direct, pieces, buffers)
    except OSError as error:
        if refuses_direct(error):
            return None
        raise
    finally:
        os.close(direct)


def _speed_from_cache(fd: int, pieces: list[tuple[int, int]], buffers: list[memoryview]) -> int:
    _read_all(fd, pieces, buffers)
    began, best = time.monotonic(), 1
    while time.monotonic() - began < _CACHED_SECONDS:
        best = max(best, _read_all(fd, pieces, buffers))
    return best


def _read_all(fd: int, pieces: Iterable[tuple[int, int]], buffers: list[memoryview]) -> int:
    """Read pieces, one after another, by the threads of the pool until there are no more or the time is over.

    Returns:
        Bytes per second.

    Raises:
        OSError: what the system said.
    """
    left, lock = iter(list(pieces)), threading.Lock()
    began = time.perf_counter()

    def work(buffer: memoryview) -> int:
        done = 0
        while not done or time.perf_counter() - began < _DRIVE_SECONDS:
            with lock:
                start, size = next(left, (0, 0))
            if not size:
                break
            done += read_part(fd, buffer[:size], start)
        return done

    num_bytes = sum(run_all(partial(work, buffer) for buffer in buffers))
    return max(1, int(num_bytes / (time.perf_counter() - began)))


@contextmanager
def _buffers(size: int) -> Iterator[list[memoryview]]:
    """Memory for each thread, aligned to pages, and there already."""
    memory = flat_view(map_anonymous(num_threads() * size), 0, num_threads() * size)
    memory.fill_(1)
    yield [memory_of(part) for part in torch.split(memory, size)]


def _is_cached(fd: int, start: int, num_bytes: int) -> bool:
    """Whether some of it is in the page cache; true too if the system does not tell."""
    start = start // mmap.PAGESIZE * mmap.PAGESIZE
    with suppress(OSError):
        mapped = flat_view(map_page_cache(fd, start, num_bytes), 0, num_bytes)
        return cached_bytes(mapped.data_ptr(), num_bytes) > 0
    return True


def _drop(fd: int, pieces: Iterable[tuple[int, int]]) -> None:
    for start, num_bytes in pieces:
        with suppress(OSError):
            os.posix_fadvise(fd, start, num_bytes, os.POSIX_FADV_DONTNEED)


def _existing(path: Path) -> Path:
    """`path`, or the nearest folder above it that is there."""
    path = path.absolute()
    while not path.exists() and path.parent != path:
        path = path.parent
    return path
