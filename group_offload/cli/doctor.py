"""The command `group-offload doctor`: what this machine supports, and what the engine does without.

The engine's own code answers: it pins, maps, reads and measures here as it does for a model. So a row never says anything else
than the engine does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import psutil
import torch

from .. import __version__
from ..base.device import Backend, backend_for
from ..base.pagemap import can_detect_writes, scans_quickly
from ..base.pinning import PinLimit, careful_bytes, is_wsl2
from ..base.ram import available_ram
from ..base.system import advise, max_locked_bytes, ram_of_machine
from ..base.text import describe_bytes
from ..base.tuning import tuning
from ..errors import StorageError
from ..plan import speeds
from ..plan.budgets import auto_ram, total_ram
from ..plan.speeds import device_name, measure_disk, measure_link
from ..stores.pinned import Segment
from .arguments import add_device, add_json, chosen_backend, new_command, path_of
from .output import say, say_meanwhile

OK, SLOWER, MISSING, UNKNOWN = "ok", "slower", "missing", "unknown"
"""The engine takes its fastest way, or another one; it does without; the system or the driver failed when it was asked."""
_CPU = "not needed: the CPU computes from RAM"
_SLOW_LINK = 10e9
"""Bytes per second. PCIe 3 x16 carries 12 GB/s, PCIe 4 x16 25 GB/s."""
_SLOW_DRIVE = 1e9
"""Bytes per second. SATA and hard disks and most network disks are slower, NVMe drives are faster."""
_LIBRARIES = ("diffusers", "accelerate", "safetensors", "transformers", "peft")


class Row(NamedTuple):
    """What one probe found out."""

    found: str
    verdict: str = OK
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the probes look at."""

    folder: Path
    backend: Backend
    problem: str
    """What the driver said when it was asked for an accelerator and failed; else empty."""
    nvidia: str
    """The version of NVIDIA's driver; empty where `nvidia-smi` does not answer."""


def add_command(commands: Any) -> None:
    """Add the command to what `ArgumentParser.add_subparsers` returned."""
    text = (
        "Check what this machine supports, with a fix for what is slow, and measure speeds for later plans. Include this in an "
        "issue report."
    )
    command = new_command(commands, "doctor", text)
    add_device(command)
    add_json(command)
    text = (
        "a folder on the disk of your models; without a model in it, a small file is written and removed (default: .)"
    )
    command.add_argument("folder", metavar="DIR", type=path_of, nargs="?", default=Path(), help=text)
    command.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    folder: Path = arguments.folder
    problem = ""
    try:
        backend = chosen_backend(arguments.device)
    except Exception as error:
        if arguments.device is not None:
            raise
        backend, problem = backend_for(torch.device("cpu")), _in_one_line(error)
    say_meanwhile("Checking this machine takes some seconds ...")
    machine = Machine(folder, backend, problem, nvidia_driver())
    rows = {name: _ask(probe, machine) for name, probe in PROBES.items()}
    if arguments.json:
        shown = [{"name": name, **row._asdict()} for name, row in rows.items()]
        print(json.dumps({"folder": str(folder.absolute()), "device": str(backend.device), "rows": shown}, indent=2))
        return 0
    say(f"group-offload doctor {folder.absolute()}")
    for name, row in rows.items():
        say(f"{name.replace('_', ' '):<14}{row.verdict:<9}{row.found}")
        if row.remedy:
            say(f"{'':<23}Fix: {row.remedy}")
    return 0


def _ask(probe: Callable[[Machine], Row], machine: Machine) -> Row:
    """The row of a probe, or one that says how the probe failed."""
    try:
        return probe(machine)
    except StorageError:
        raise  # about the folder, which is an argument
    except Exception as error:  # a system or a driver may fail in any way, and the other rows still come
        return Row(f"unknown: {_in_one_line(error)}", UNKNOWN)


def _in_one_line(error: Exception) -> str:
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


@contextmanager
def _file_to_try(folder: Path) -> Iterator[Path]:
    """A file of random bytes that are on the disk and not in the page cache.

    Raises:
        StorageError: the folder is none, or cannot be written to.
    """
    size = tuning().tried_file_bytes
    with ExitStack() as stack:
        try:
            file = stack.enter_context(NamedTemporaryFile(dir=folder, prefix="group_offload_probe_"))
            file.write(os.urandom(size))
            file.flush()
            os.fsync(file.fileno())
            advise(file.fileno(), 0, 0, "DONTNEED")
        except OSError as error:
            raise StorageError(
                f"Cannot write to {folder}: {error.strerror or error}. Pass a folder on the disk of your models that you can "
                f"write to, with {describe_bytes(size)} free."
            ) from error
        yield Path(file.name)


def nvidia_driver() -> str:
    """The version of NVIDIA's driver; empty where `nvidia-smi` does not answer."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.partition("\n")[0]


# ------------------------------------------------------------------------------------------------ the rows


def _page_map(machine: Machine) -> Row:
    if scans_quickly():
        return Row("PAGEMAP_SCAN: one call finds edits of weights")
    if can_detect_writes():
        found = "only /proc/self/pagemap: finding edits of weights takes longer"
        return Row(found, SLOWER, "Use Linux 6.7 or newer, which has PAGEMAP_SCAN (sandboxes may forbid it).")
    found = "refused: no prefetch across forwards, and a sync after each"
    return Row(found, MISSING, "Allow this process to read /proc/self/pagemap; sandboxes such as gVisor don't.")


def _pinning(machine: Machine) -> Row:
    """Pins RAM as that of weights is pinned, segment by segment, and gives it back."""
    soft = max_locked_bytes()
    said = f"ulimit -l: {'unlimited' if soft is None else describe_bytes(soft)}"
    if is_wsl2():
        said += f"; WSL2 pins at most half of its RAM, {describe_bytes(careful_bytes())}"
    if not machine.backend.has_streams:
        return Row(f"{_CPU} ({said})")
    limit, until = PinLimit(machine.backend), time.monotonic() + tuning().tried_pin_seconds
    most = int(min(tuning().tried_pin_bytes, available_ram() // 4, careful_bytes()))
    tried, held = 0, list[Segment]()  # what is dropped is unpinned
    while tried < most and not limit.was_refused and time.monotonic() < until:
        held.append(Segment(min(tuning().segment_bytes, most - tried), machine.backend, pin=True, wait=lambda: None))
        held[-1].fill([])
        held[-1].lock(limit)
        tried += held[-1].bytes.numel()
    pinned = limit.num_pinned + limit.num_by_driver
    found, verdict, remedy = f"pinned {describe_bytes(pinned)} of {describe_bytes(tried)}", SLOWER, ""
    if limit.was_refused:
        found += ", then the system refused: the rest is copied through a staging buffer"
        verdict = SLOWER if pinned else MISSING
        remedy = "`ulimit -l unlimited`; containers: `--ulimit memlock=-1` and more `--memory`; WSL2: `memory=` in .wslconfig."
    elif limit.num_by_driver:
        found += (
            f", {describe_bytes(limit.num_by_driver)} of it allocated by the driver, which can take up to twice the RAM"
        )
        remedy = "A newer driver may pin memory in place."
    elif is_wsl2():
        remedy = "Raise `memory=` in .wslconfig."
    else:
        verdict = OK
    return Row(f"{found} ({said})", verdict, remedy)


def _ram(machine: Machine) -> Row:
    total, limit, auto = ram_of_machine("total"), total_ram(), auto_ram()
    found = f"{describe_bytes(total)}, {describe_bytes(available_ram())} available"
    found += f'; ram_budget="auto" is {describe_bytes(auto)} now'
    found += f"; the container's limit is {describe_bytes(limit)}" if limit < total else ""
    if limit < total:
        remedy = "Raise the container's `--memory`, or larger models are read from disk in every forward."
        return Row(found, SLOWER if auto else MISSING, remedy)
    return Row(found) if auto else Row(found, MISSING, "Close programs that take RAM.")


def _device(machine: Machine) -> Row:
    backend = machine.backend
    if machine.problem:
        remedy = "Repair or update the driver: `nvidia-smi` and `torch.accelerator.current_accelerator()` must work."
        return Row(f"the driver failed: {machine.problem}", MISSING, remedy)
    if backend.has_streams:
        total, free = describe_bytes(backend.total_bytes()), describe_bytes(backend.free_bytes())
        return Row(f"{backend.device}: {device_name(backend)}, {total}, {free} free")
    if not machine.nvidia or torch.accelerator.is_available():
        return Row("the CPU")
    found = f"the CPU: NVIDIA's driver {machine.nvidia} is installed, and torch {torch.__version__} sees no accelerator"
    remedy = (
        "Install a torch build with CUDA that the driver supports, or a newer driver. CUDA_VISIBLE_DEVICES may hide it."
    )
    return Row(found, MISSING, remedy)


def _link(machine: Machine) -> Row:
    if not machine.backend.has_streams:
        return Row(_CPU)
    measured = measure_link(machine.backend, min(speeds.LINK_BYTES, tuning().tried_pin_bytes))
    found = f"{measured / 1e9:.1f} GB/s from RAM to the device{_kept('h2d', device_name(machine.backend), measured)}"
    if measured >= _SLOW_LINK:
        return Row(found)
    remedy = "Use a slot with all PCIe lanes (PCIe 4 x16 carries 25 GB/s). If pinning isn't ok, fix that first."
    return Row(found, SLOWER, remedy)


def _disk(machine: Machine) -> Row:
    folder = machine.folder.resolve()
    mounts = [each for each in psutil.disk_partitions(all=True) if folder.is_relative_to(each.mountpoint)]
    kind = max(mounts, key=lambda each: len(each.mountpoint)).fstype if mounts else "unknown file system"
    speed, problem = measure_disk(folder, speeds.MIN_DISK_BYTES)
    if speed is None:  # it holds no model whose files are large enough
        with _file_to_try(folder) as file:
            speed, problem = measure_disk(file, file.stat().st_size)
    found = f"{kind}, {describe_bytes(shutil.disk_usage(folder).free)} free"
    if speed is None:
        return Row(f"{found}; not measured: {problem}", UNKNOWN)
    found += f", {speed / 1e9:.2f} GB/s from disk to RAM{_kept('disk', speeds.filesystem_of(folder), speed)}"
    remedies = ["Keep models on an NVMe disk; under WSL2 outside of /mnt."] if speed < _SLOW_DRIVE else []
    if problem:  # O_DIRECT is refused: reads go through the page cache
        found += f". {problem}"
        remedies.append("Keep models that are larger than RAM on a local ext4, XFS or btrfs disk.")
    return Row(found, SLOWER if remedies else OK, " ".join(remedies))


def _kept(what: str, where: str, speed: int) -> str:
    """Keep a speed for plans. Returns what is to be said if that fails."""
    if speeds.record(what, where, speed):
        return ""
    return " (plans won't use it: set XDG_CACHE_HOME to a folder that you can write to)"


def _versions(machine: Machine) -> Row:
    numbers = {
        "group_offload": __version__,
        platform.system(): platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": machine.nvidia,
        **dict.fromkeys(_LIBRARIES),
    }
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            numbers[name] = version(name)
    found = ", ".join(f"{name} {number or '-'}" for name, number in numbers.items())
    if numbers["diffusers"]:
        return Row(found)
    return Row(found, MISSING, "To offload pipelines: pip install 'group-offload[diffusers]'")


PROBES: dict[str, Callable[[Machine], Row]] = {
    probe.__name__[1:]: probe for probe in (_page_map, _pinning, _ram, _device, _link, _disk, _versions)
}
"""The rows, in their order."""
