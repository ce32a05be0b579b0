"""What a machine allows, one row for each question.

The engine's own code answers: it page-locks, maps, reads and measures here as it does for a model. So a row never says
anything else than the engine does.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from .. import __version__
from ..base.control_groups import memory_limits
from ..base.device import Backend
from ..base.layout import memory_of
from ..base.mapping import flat_view, map_anonymous
from ..base.page_lock import LockLimit, careful_bytes, is_wsl2
from ..base.pagemap import Detection, detection
from ..base.ram import available_ram
from ..base.system import max_locked_bytes, open_to_read, ram_of_machine
from ..base.tuning import tuning
from ..plan.budgets import auto_ram, describe_bytes
from ..plan.speeds import LINK_BYTES, device_name, measure_drive, measure_link
from ..stores.pinned import Segment
from ..stores.source import Piece, SourceFile

_CPU = "not needed: the CPU computes from RAM itself"
_LANE_SPEEDS = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Bytes per second of one lane, by generation of PCIe."""
_SLOW_LINK_SHARE = 0.5
"""A link that carries less than this share of what PCIe could is slower than it has to be."""
_SLOW_DRIVE = 1e9
"""Bytes per second. SATA drives, disks and most network drives are slower, NVMe drives are faster."""
_LIBRARIES = ("diffusers", "accelerate", "safetensors", "transformers", "peft")


class Verdict(str, Enum):
    OK = "ok"
    SLOWER = "slower"
    """The engine works, and another way than the fastest is taken."""
    MISSING = "missing"
    """The engine does without it."""
    UNKNOWN = "unknown"
    """The system or the driver failed when it was asked."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one probe found out."""

    found: str
    verdict: Verdict = Verdict.OK
    remedy: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    """The same for programs: bytes, bytes per second, names."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the probes look at."""

    folder: Path
    file: Path
    """A file in the folder, for trying reads out."""
    backend: Backend
    driver_problem: str
    """What the driver said when it was asked for an accelerator and failed; else empty."""
    nvidia: dict[str, str]
    """What `nvidia-smi` said of the device; nothing where it does not answer."""


def ask(probe: Callable[[Machine], Row], machine: Machine) -> Row:
    """The row of a probe, or one that says how the probe failed."""
    try:
        return probe(machine)
    except Exception as error:  # a system or a driver may fail in any way, and the other rows still come
        return Row(f"could not be told: {in_one_line(error)}", Verdict.UNKNOWN)


def in_one_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def ask_nvidia(backend: Backend) -> dict[str, str]:
    """What `nvidia-smi` says of the device, or of the first one if torch sees none; nothing where it does not answer."""
    fields = ("name", "driver_version", "pcie.link.gen.max", "pcie.link.width.max")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        if backend.device.type == "cuda":  # torch numbers the devices in another way than nvidia-smi
            command.append(f"--id=GPU-{torch.cuda.get_device_properties(backend.device).uuid}")
        said = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError, RuntimeError, AttributeError):
        return {}
    return dict(zip(fields, (said.splitlines() or [""])[0].split(", "), strict=False))


def _kernel(machine: Machine) -> Row:
    release = f"{platform.system()} {platform.release()}"
    values = {"release": platform.release(), "is_wsl2": is_wsl2()}
    if not is_wsl2():
        return Row(release, values=values)
    return Row(
        f"{release}, which is WSL2: Windows gives half of the RAM to page-lock ({describe_bytes(careful_bytes())})",
        Verdict.SLOWER,
        "Set `memory=` in .wslconfig to more of the RAM of Windows.",
        values,
    )


def _page_map(machine: Machine) -> Row:
    way = detection()
    values = {"way": way.value}
    if way is Detection.SCAN:
        return Row("PAGEMAP_SCAN: one call finds edits of weights at rest", values=values)
    if way is Detection.ENTRIES:
        return Row(
            "only /proc/self/pagemap: threads read it to find edits of weights at rest",
            Verdict.SLOWER,
            "Linux 6.7 or newer has PAGEMAP_SCAN, unless a sandbox forbids it.",
            values,
        )
    return Row(
        "refused: nothing is prefetched across passes, and the host waits for copies at the end of each pass",
        Verdict.MISSING,
        "Allow this process to read /proc/self/pagemap: sandboxes such as gVisor do not.",
        values,
    )


def _page_locking(machine: Machine) -> Row:
    soft = max_locked_bytes()
    values: dict[str, Any] = {"memlock_limit_bytes": soft}
    said = f"ulimit -l: {'unlimited' if soft is None else describe_bytes(soft)}"
    if not machine.backend.has_streams:
        return Row(f"{_CPU} ({said})", values=values)
    limit = LockLimit(machine.backend)
    num_tried = _try_locks(machine.backend, limit)
    values |= {
        "tried_bytes": num_tried,
        "locked_bytes": limit.num_locked,
        "driver_bytes": limit.num_by_driver,
        "is_refused": limit.was_refused,
    }
    num_locked = limit.num_locked + limit.num_by_driver
    if limit.was_refused:
        return Row(
            f"{describe_bytes(num_locked)} of {describe_bytes(num_tried)} were locked, then the system refused: threads copy "
            f"the other weights to a staging buffer ({said})",
            Verdict.SLOWER if num_locked else Verdict.MISSING,
            "`ulimit -l unlimited`; for containers `--ulimit memlock=-1` and a larger `--memory`; for WSL2 .wslconfig.",
            values,
        )
    if limit.num_by_driver:
        return Row(
            f"only memory of the driver's own making, {describe_bytes(num_locked)} tried: it may take twice as much ({said})",
            Verdict.SLOWER,
            "A newer driver may lock memory where it is.",
            values,
        )
    return Row(f"{describe_bytes(num_locked)} were tried, and none refused ({said})", values=values)


def _try_locks(backend: Backend, limit: LockLimit) -> int:
    """Lock RAM as weights at rest are locked, segment by segment, and give it back.

    Returns:
        The bytes that were tried.
    """
    most = int(min(tuning().tried_lock_bytes, available_ram() // 4, careful_bytes()))
    num_tried, until = 0, time.monotonic() + tuning().tried_lock_seconds
    held = []  # what is dropped is unlocked
    while num_tried < most and not limit.was_refused and time.monotonic() < until:
        held.append(Segment(min(tuning().segment_bytes, most - num_tried), backend, pin=True, wait=lambda: None))
        held[-1].fill([])
        held[-1].lock(limit)
        num_tried += held[-1].bytes.numel()
    return num_tried


@contextmanager
def _opened(machine: Machine) -> Iterator[SourceFile]:
    """The file, as weights rest in it."""
    fd = open_to_read(machine.file)
    try:
        source = SourceFile(machine.file, fd, 0, os.fstat(fd).st_size)
    finally:
        os.close(fd)
    try:
        yield source
    finally:
        source.release()


def _mapped_files(machine: Machine) -> Row:
    if not machine.backend.has_streams:
        return Row(_CPU)
    with _opened(machine) as source:
        is_locked = source.lock(None, machine.backend, lambda: None)
    values = {"is_locked": is_locked}
    if is_locked:
        return Row("the driver page-locks files in the page cache: checkpoints are sent from there", values=values)
    return Row(
        "the driver page-locks no mapped file: threads copy checkpoints to a staging buffer",
        Verdict.SLOWER,
        "A newer driver may do it, and another file system may allow it.",
        values,
    )


def _direct_reads(machine: Machine) -> Row:
    with _opened(machine) as source:
        size = min(source.num_bytes, tuning().small_chunk_bytes)
        for pause in (0, 0.01, 0.1):  # the kernel keeps a page that some other work of it holds just then
            time.sleep(pause)
            source.forget_cached([Piece(0, 0, source.num_bytes)])
            if not (is_cached := source.is_cached(0, size)):
                break
        area = memory_of(flat_view(map_anonymous(size), 0, size))
        is_direct = source.read(area, 0, size, direct=True)
    values = {"is_direct": is_direct, "stays_cached": is_cached}
    if is_direct:
        return Row("O_DIRECT works: where RAM is scarce, files are read past the page cache", values=values)
    why = "files stay in the page cache" if is_cached else "the file system has no O_DIRECT"
    return Row(
        f"{why}: files are read through the page cache",
        Verdict.SLOWER,
        "Keep models on a local drive with ext4, XFS or btrfs, if they are larger than RAM.",
        values,
    )


def _ram(machine: Machine) -> Row:
    total, available, auto = ram_of_machine("total"), available_ram(), auto_ram()
    values = {"total_bytes": total, "available_bytes": available, "auto_budget_bytes": auto}
    found = f'{describe_bytes(total)}, {describe_bytes(available)} available; ram_budget="auto" takes {describe_bytes(auto)}'
    if auto:
        return Row(found, values=values)
    return Row(found, Verdict.MISSING, "End programs that take RAM, or keep weights in files.", values)


def _control_groups(machine: Machine) -> Row:
    total = ram_of_machine("total")
    limit = min(memory_limits(), default=total)
    if limit >= total:
        return Row("no limit below the RAM of the machine", values={"limit_bytes": None})
    return Row(
        f"{describe_bytes(limit)} of {describe_bytes(total)}: a model that is larger is read from its files in each pass",
        Verdict.SLOWER,
        "Give the container a larger `--memory`.",
        {"limit_bytes": limit},
    )


def _device(machine: Machine) -> Row:
    backend, nvidia = machine.backend, machine.nvidia
    if machine.driver_problem:
        remedy = "Repair or update the driver: `nvidia-smi` and `torch.accelerator.current_accelerator()` have to work."
        return Row(f"the driver failed: {machine.driver_problem}", Verdict.MISSING, remedy)
    if not backend.has_streams:
        values = {"name": "CPU", "total_bytes": None, "free_bytes": None}
        if not nvidia or torch.accelerator.is_available():
            return Row("the CPU", values=values)
        return Row(
            f"the CPU: torch {torch.__version__} sees no accelerator, and the driver has {nvidia.get('name')}",
            Verdict.MISSING,
            "Install a torch build with CUDA that the driver supports, or a newer driver. CUDA_VISIBLE_DEVICES may hide it.",
            values,
        )
    name, total, free = device_name(backend), backend.total_bytes(), backend.free_bytes()
    return Row(
        f"{backend.device}: {name}, {describe_bytes(total)}, {describe_bytes(free)} free",
        values={"name": name, "total_bytes": total, "free_bytes": free},
    )


def _link(machine: Machine) -> Row:
    if not machine.backend.has_streams:
        return Row(_CPU)
    measured = measure_link(machine.backend, min(LINK_BYTES, tuning().tried_lock_bytes))
    generation, width = (machine.nvidia.get(f"pcie.link.{name}.max", "") for name in ("gen", "width"))
    values: dict[str, Any] = {"h2d": measured, "pcie_generation": None, "pcie_width": None}
    found = f"{measured / 1e9:.1f} GB/s from RAM to the device"
    if not (generation.isdecimal() and width.isdecimal()):
        return Row(f"{found}; which PCIe it is was not told", values=values)
    values |= {"pcie_generation": int(generation), "pcie_width": int(width)}
    found += f"; PCIe {generation} x{width}"
    if measured >= _SLOW_LINK_SHARE * _LANE_SPEEDS.get(int(generation), 0) * int(width):
        return Row(found, values=values)
    return Row(
        f"{found} could carry more than twice as much",
        Verdict.SLOWER,
        "Use a slot with all lanes. If page-locking is refused, see there.",
        values,
    )


def _drive(machine: Machine) -> Row:
    folder = machine.folder.resolve()
    mounts = [each for each in psutil.disk_partitions(all=True) if folder.is_relative_to(each.mountpoint)]
    kind = max(mounts, key=lambda each: len(each.mountpoint)).fstype if mounts else "unknown file system"
    free, size = shutil.disk_usage(folder).free, machine.file.stat().st_size
    speed, problem = measure_drive(machine.file, size, size)
    values = {"filesystem": kind, "free_bytes": free, "read": speed, "problem": problem or None}
    found = f"{kind}, {describe_bytes(free)} free"
    if speed is None:
        return Row(f"{found}; not measured: {problem}", Verdict.UNKNOWN, values=values)
    found += f", {speed / 1e9:.2f} GB/s from the drive to RAM"
    if speed >= _SLOW_DRIVE:
        return Row(found, values=values)
    remedy = "Keep models on an NVMe drive, or have RAM for all weights. Under WSL2 keep them outside of /mnt."
    return Row(found, Verdict.SLOWER, remedy, values)


def _versions(machine: Machine) -> Row:
    values: dict[str, str | None] = {
        "group_offload": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": machine.nvidia.get("driver_version"),
    }
    for name in _LIBRARIES:
        values[name] = None
        with suppress(PackageNotFoundError):
            values[name] = version(name)
    found = ", ".join(f"{name} {number or '-'}" for name, number in values.items())
    if values["diffusers"]:
        return Row(found, values=values)
    return Row(found, Verdict.MISSING, "pip install 'group-offload[diffusers]', to offload pipelines.", values)


PROBES: dict[str, Callable[[Machine], Row]] = {
    "kernel": _kernel,
    "page_map": _page_map,
    "page_locking": _page_locking,
    "mapped_files": _mapped_files,
    "direct_reads": _direct_reads,
    "ram": _ram,
    "control_groups": _control_groups,
    "device": _device,
    "link": _link,
    "drive": _drive,
    "versions": _versions,
}
"""The rows, in their order."""
