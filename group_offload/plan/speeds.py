"""How fast this machine moves bytes: RAM to the device, the disk to RAM. Measured once, in a second or two, and kept.

Measurements are kept in `$XDG_CACHE_HOME/group_offload/speeds.json` (`~/.cache` if that is not set), by device or file
system. Nothing depends on that file: a file that cannot be read counts as no file, and is written anew.

[Note: How a disk is measured]
A file of the model is read as the engine reads where RAM is scarce: past the page cache, by the threads of the pool, in
large pieces. Where direct reads are refused (some network disks), pieces that are not in the page cache are read through
it. Where there is no such file, nothing is measured, and `ASSUMED_DISK` stands in.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from ..base.device import Backend, Stream
from ..base.layout import lay_out, memory_of
from ..base.mapping import cached_bytes, flat_view, map_anonymous, page_cache_of
from ..base.pinning import PinLimit
from ..base.pool import num_threads, run_all
from ..base.publish import publish
from ..base.reading import open_direct, read_part, refuses_direct
from ..base.system import name_of_disk
from ..base.text import describe_bytes
from ..compression.codec import compress, decompress
from ..errors import DeviceError
from ..stores.pinned import Segment
from .placement import ASSUMED_DECOMPRESS, Speeds

ASSUMED_H2D = 25_000_000_000
"""Bytes per second where the link was not measured: PCIe 4 x16."""
ASSUMED_DISK = 3_500_000_000
"""Bytes per second where the disk was not measured: an NVMe disk on PCIe 3 x4."""
LINK_BYTES = 256 << 20
DECOMPRESSED_BYTES = 64 << 20
_MAX_DRIVE_BYTES = 1 << 30
MIN_DISK_BYTES = 64 << 20
"""A smaller file takes too little time to tell a speed."""
_COPY_BYTES = 32 << 20
"""One copy. PCIe is at full speed with 16 MiB."""
_NUM_TRIES = 3
_DECOMPRESSES_IN_A_ROW = 8
"""The first one begins late: the device waits for the host, for as long as it takes for 64 MiB."""
_PIECE_BYTES = 8 << 20
_DRIVE_SECONDS = 1.0

Take = Callable[[int, Stream], torch.Tensor]


def known_speeds(
    backend: Backend, path: Path | None, *, decompresses: bool = False, take: Take | None = None
) -> Speeds:
    """The speeds of this device and file system: measured before, measured now and kept, or else assumed.

    Args:
        path: a file of the model, or its folder; it need not exist. None: no disk matters.
        decompresses: whether it matters how fast the device decompresses weights.
        take: takes device memory for a stream, as `Backend.empty` does.

    Raises:
        DeviceError: the device has no room for a measurement.
    """
    device, disk, decompress = device_name(backend), None, None
    h2d = _known("h2d", device, lambda: measure_link(backend, LINK_BYTES, take=take))
    if path is not None:
        disk = _known("disk", filesystem_of(path), lambda: measure_disk(path, MIN_DISK_BYTES)[0])
    if decompresses:
        decompress = _known("decompress", device, lambda: measure_decompression(backend, take=take))
    return Speeds(h2d=h2d or ASSUMED_H2D, disk=disk or ASSUMED_DISK, decompress=decompress or ASSUMED_DECOMPRESS)


def _known(what: str, where: str, measure: Callable[[], int | None]) -> int | None:
    """A speed that was measured before, or is measured now and kept; None if it can't be measured."""
    speed = recorded()[what].get(where)
    if speed is None:
        speed = measure()
        if speed is not None:
            record(what, where, speed)
    return speed


def filesystem_of(path: Path) -> str:
    """The place where the file system is mounted that holds `path`, or will, and its device id."""
    folder = path.absolute()
    while not folder.exists() and folder.parent != folder:
        folder = folder.parent
    folder = folder.resolve()
    while folder.parent != folder and not os.path.ismount(folder):
        folder = folder.parent
    return f"{folder} ({name_of_disk(folder.stat().st_dev)})"


# ------------------------------------------------------------------------------------------------ what was measured before


def record_file() -> Path | None:
    """The file that keeps speeds. None for a user without a home: no file in the current folder is made or believed."""
    for base in (os.environ.get("XDG_CACHE_HOME", ""), os.path.join(os.path.expanduser("~"), ".cache")):
        if os.path.isabs(base):
            return Path(base, "group_offload", "speeds.json")
    return None


def recorded() -> dict[str, dict[str, int]]:
    """The speeds that were kept, in bytes per second.

    Returns:
        For each of "h2d", "disk" and "decompress": the speeds by the name of the device or file system, the last one that was
        measured as the last. None of them if the file is missing, damaged, or another version's.
    """
    found: dict[str, dict[str, int]] = {"h2d": {}, "disk": {}, "decompress": {}}
    path = record_file()
    if path is not None:
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            kept = json.loads(path.read_bytes())
            return {
                what: {where: speed for where, speed in kept[what].items() if isinstance(speed, int) and speed > 0}
                for what in found
            }
    return found


def record(what: str, where: str, speed: int) -> bool:
    """Keep a speed in place of an earlier one.

    Returns:
        Whether that was possible.
    """
    path, known = record_file(), recorded()
    if path is None:
        return False
    known[what].pop(where, None)
    known[what][where] = speed
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        publish(path, [json.dumps(known, indent=1).encode()])
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
    """Bytes per second from pinned RAM to the device: the best of a few tries.

    Raises:
        DeviceError: the device has no room for a measurement.
    """
    copy_bytes = min(num_bytes, _COPY_BYTES)
    segment = Segment(num_bytes // copy_bytes * copy_bytes, backend, pin=True, wait=lambda: None)
    segment.fill([])
    segment.bytes.fill_(1)  # memory that was never written is one page of zeros
    segment.lock(PinLimit(backend))
    stream = backend.new_stream()
    try:
        target = (take or backend.empty)(copy_bytes, stream)
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"{backend.device} has no {describe_bytes(copy_bytes)} free, which a measurement needs. Free some."
        ) from error

    def copy() -> None:
        for part in torch.split(segment.bytes, copy_bytes):
            backend.copy(target, part, stream)

    try:
        return _best_speed(backend, segment.bytes.numel(), stream, copy)
    finally:
        backend.free(target)


def measure_decompression(
    backend: Backend, num_bytes: int = DECOMPRESSED_BYTES, *, take: Take | None = None
) -> int | None:
    """Bytes of weights that the device decompresses in a second: the best of a few tries. None if it has no room for that."""
    weights = torch.randn(num_bytes // 2, generator=torch.Generator().manual_seed(0), device="cpu").bfloat16()
    compressed = compress(weights.view(torch.uint8), lay_out(["weights"], [weights]), backend.device)
    if compressed is None:
        return None
    stream = backend.new_stream()
    try:
        source, target = ((take or backend.empty)(size, stream) for size in (compressed.data.numel(), num_bytes))
    except torch.OutOfMemoryError:
        return None
    backend.copy(source, compressed.data, stream, blocking=True)

    def decompress_all() -> None:
        for _ in range(_DECOMPRESSES_IN_A_ROW):
            backend.transform(lambda data, out: decompress(data, compressed.layout, out), target, source, stream)

    speed = _best_speed(backend, _DECOMPRESSES_IN_A_ROW * num_bytes, stream, decompress_all)
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


# ------------------------------------------------------------------------------------------------ the disk


def measure_disk(path: Path, min_bytes: int) -> tuple[int | None, str]:
    """Bytes per second, or None, and what was wrong, if anything: see [Note: How a disk is measured].

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
    """Bytes per second, if it could be read from the disk, and whether it was read past the page cache."""
    num_bytes = os.fstat(fd).st_size
    size = min(_PIECE_BYTES, num_bytes)
    pieces = range(0, num_bytes - size + 1, size)[:: -(-num_bytes // _MAX_DRIVE_BYTES)]
    direct = open_direct(fd)
    if direct is not None:
        try:
            return _read_all(direct.fileno(), pieces, size), True
        except OSError as error:
            if not refuses_direct(error):
                raise
    cold = list[int]()
    with suppress(OSError):  # a system that does not tell what is in the page cache
        mapped = page_cache_of(fd, num_bytes)
        cold = [start for start in pieces if not cached_bytes(mapped.data_ptr() + start, size)]
    return _read_all(fd, cold, size) if cold else None, False


def _read_all(fd: int, pieces: Iterable[int], size: int) -> int:
    """Read pieces by the threads of the pool, until there are no more or the time is over. Returns bytes per second."""
    memory = flat_view(map_anonymous(num_threads() * size), 0, num_threads() * size)
    memory.fill_(1)  # it is there before the clock runs
    left, began = deque(pieces), time.perf_counter()

    def work(buffer: memoryview) -> int:
        done = 0
        with suppress(IndexError):  # there are no more
            while not done or time.perf_counter() - began < _DRIVE_SECONDS:
                done += read_part(fd, buffer, left.popleft())
        return done

    num_bytes = sum(run_all(partial(work, memory_of(part)) for part in torch.split(memory, size)))
    return max(1, int(num_bytes / (time.perf_counter() - began)))
