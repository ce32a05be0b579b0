"""What a benchmark reads from the machine and the device: facts, memory, and the calls that a step makes to the driver."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib.metadata
import os
import re
import resource
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

BANDWIDTH_BYTES = 1 << 30
PROFILED_STEPS = 3
GIB = 1 << 30
SYNCHRONISATION = re.compile(r"(cuda(Stream|Device|Event)|cu(Stream|Ctx|Event))Synchronize")
"""The host waits for the device."""
ALLOCATION = re.compile(
    r"cuda(Malloc|Free|MallocAsync|FreeAsync|MallocHost|HostAlloc|FreeHost|HostRegister|HostUnregister)"
    r"|cuMem(Alloc|Free|Create|Release|Map|Unmap|HostAlloc|FreeHost|HostRegister|HostUnregister)"
)
"""Memory of the device, or page-locked memory, is taken from the driver or given back. Most of these wait, too."""


# ------------------------------------------------------------------------------------------------ facts


QUANTISERS = ("torchao", "bitsandbytes", "optimum-quanto", "gguf", "sdnq")


def measure_machine(device: torch.device) -> dict[str, Any]:
    """The machine that the arms run on, and what its link to the device can do."""
    is_cpu = device.type == "cpu"
    back = None if is_cpu else CopiesBeside(BANDWIDTH_BYTES, device, BANDWIDTH_BYTES).back
    return {
        "device": "CPU" if is_cpu else str(getattr(torch, device.type).get_device_name(device)),
        "cpu_count": os.cpu_count(),
        "ram_bytes": psutil.virtual_memory().total,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        **{name: _version(name) for name in ("diffusers", "accelerate", "transformers", *QUANTISERS)},
        "glibc_tunables": os.environ.get("GLIBC_TUNABLES"),  # they change how fast RAM is copied
        "pinned_h2d_bytes_per_s": None if back is None else bandwidth(back, device, repeats=8),
    }


def _version(package: str) -> str | None:
    imported = getattr(sys.modules.get(package), "__version__", None)
    if imported is not None:  # which may be a copy on the path that was never installed
        return str(imported)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def bandwidth(copy: Callable[[], object], device: torch.device, *, repeats: int) -> float:
    """Bytes a second if `copy` copies BANDWIDTH_BYTES: the median of all times but the first."""
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        copy()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return BANDWIDTH_BYTES / statistics.median(times[1:])


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "xpu" if torch.xpu.is_available() else "cpu"


def sha256(output: torch.Tensor) -> str:
    return hashlib.sha256(output.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def fix_algorithms() -> None:
    """Convolutions run the same kernels in every process, so that outputs can be compared bit by bit."""
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


def fix_training_algorithms() -> None:
    """The same for backward: what `torch.use_deterministic_algorithms` needs. It is called before the device is used."""
    fix_algorithms()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward does not repeat itself


def mark(device: torch.device) -> Any:
    """Now, for the current stream of the device; on the CPU, for everybody."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device=device, enable_timing=True)
    event.record()
    return event


def elapsed(start: Any, end: Any) -> float:
    return float(end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3)


def say(text: str, elapsed: float | None = None) -> None:
    when = "        " if elapsed is None else f"[{elapsed:4.0f} s]"
    print(f"{when} {text}\n", end="", file=sys.stderr, flush=True)  # one write: several processes may say something


@contextlib.contextmanager
def said(what: str) -> Iterator[None]:
    """Say how long the block took."""
    start = time.perf_counter()
    yield
    say(f"{what}: {time.perf_counter() - start:.1f} s")


# ------------------------------------------------------------------------------------------------ memory


def start_device(device: torch.device) -> None:
    """What every process that uses the device has to do: one tiny kernel."""
    torch.ones(1, device=device).add_(1)
    synchronize(device)


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def wait_for_output(device: torch.device) -> None:
    """Until what was computed is there; copies for the next step may still be on their way."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


def forget_device_peak(device: torch.device) -> None:
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)


def reset_peak(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)


def device_peak(device: torch.device) -> int | None:
    """The most that torch's allocator counted as allocated."""
    return None if device.type == "cpu" else torch.accelerator.max_memory_allocated(device)


def device_reserved(device: torch.device) -> int | None:
    """The most that torch's allocator had taken from the device."""
    return None if device.type == "cpu" else torch.accelerator.max_memory_reserved(device)


def allocated(device: torch.device) -> int | None:
    """What torch's allocator counts as allocated now."""
    return None if device.type == "cpu" else torch.accelerator.memory_allocated(device)


def alloc_retries(device: torch.device) -> int:
    """How often torch's allocator has had to give back what it kept, because the device had no more. Each time takes long."""
    return 0 if device.type == "cpu" else int(torch.accelerator.memory_stats(device)["num_alloc_retries"])


class PeakWatch:
    """The most device memory since `with`, though somebody else resets torch's counters: budgets measure single passes."""

    def __init__(self, device: torch.device, *, forgets: bool = True) -> None:
        """
        Args:
            forgets: whether the device gets back what the allocator keeps, before.
        """
        self._device, self._forget = device, forget_device_peak if forgets else reset_peak
        self.allocated: int | None = None
        """As `device_peak`. Known after `with`."""
        self.reserved: int | None = None
        """As `device_reserved`."""

    def __enter__(self) -> PeakWatch:
        self._forget(self._device)
        if self._device.type != "cpu":
            runtime = getattr(torch, self._device.type)
            self._reset = runtime.reset_peak_memory_stats
            runtime.reset_peak_memory_stats = self._note_and_reset
        return self

    def __exit__(self, *exc: object) -> None:
        if self._device.type != "cpu":
            self._note()
            getattr(torch, self._device.type).reset_peak_memory_stats = self._reset

    def _note(self) -> None:
        self.allocated = max(self.allocated or 0, torch.accelerator.max_memory_allocated(self._device))
        self.reserved = max(self.reserved or 0, torch.accelerator.max_memory_reserved(self._device))

    def _note_and_reset(self, *args: Any, **kwargs: Any) -> None:
        self._note()
        self._reset(*args, **kwargs)


def used_ram() -> int:
    """RAM that is neither free nor reclaimable, page-locked RAM included. The page cache is not in it."""
    memory = psutil.virtual_memory()
    return int(memory.total - memory.available)


def process_memory() -> dict[str, int | None]:
    """This process's memory in RAM now, what it consists of where the kernel tells, and the most there was."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    parts = {"rss_anonymous_bytes": "RssAnon", "rss_file_bytes": "RssFile", "rss_shared_bytes": "RssShmem"}
    return {
        "rss_bytes": psutil.Process().memory_info().rss,
        "rss_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        **{ours: int(fields[name].split()[0]) * 1024 if name in fields else None for ours, name in parts.items()},
    }


def anonymous_bytes(pid: int | str = "self") -> int:
    """Memory of a process that is in no file: RssAnon, and RssShmem, in which page-locked memory of torch is counted."""
    with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
        status = file.read(1 << 12)
    found = (status.partition(name)[2].split(maxsplit=1)[:1] for name in (b"RssAnon:", b"RssShmem:"))
    return sum(int(value[0]) << 10 for value in found if value)


def share_of_anonymous_bytes() -> int:
    """The same for this process, where memory that N processes have mapped counts 1/N in each."""
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in rollup if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


class CopiesBeside:
    """Copies bytes for nothing, on streams of their own: out to page-locked RAM, or back to the device."""

    def __init__(self, num_bytes: int, device: torch.device, buffer_bytes: int) -> None:
        self._num_bytes = num_bytes
        size = min(num_bytes, buffer_bytes)
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type != "cpu")
        self._device = torch.empty_like(self._host, device=device)
        self._streams = [torch.Stream(device=device) if device.type != "cpu" else None for _ in range(2)]

    def out(self) -> None:
        self._copy(self._streams[0], self._host, self._device)

    def back(self) -> None:
        self._copy(self._streams[1], self._device, self._host)

    def _copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        with stream or contextlib.nullcontext():
            for start in range(0, self._num_bytes, max(1, target.numel())):
                size = min(target.numel(), self._num_bytes - start)
                target[:size].copy_(source[:size], non_blocking=True)


# ------------------------------------------------------------------------------------------------ calls to the driver


def count_driver_calls(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """How often one `step` makes the host wait for the device, and takes or gives back memory of the driver.

    All threads count. The wait for the end of the step, which is the benchmark's, does not. All are None where torch's profiler
    sees no calls.
    """
    names = ("host_synchronisations", "device_allocations", "driver_calls")
    counts: dict[str, Any] = dict.fromkeys(names)
    if device.type != "cuda":
        return counts
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile, record_function

    try:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
            for _ in range(PROFILED_STEPS):
                with record_function("benchmark: step"):
                    step()
                with record_function("benchmark: wait"):
                    synchronize(device)
        on_host = [event for event in profiler.events() or () if event.device_type == DeviceType.CPU]
    except RuntimeError as error:  # no profiler in this build or on this machine: the times are good all the same
        return {**counts, "profiler_error": str(error).partition("\n")[0]}
    events = [(event.name, event.time_range.start, event.time_range.end) for event in on_host]
    begins, waits = (
        sorted(each[1:] for each in events if each[0] == f"benchmark: {name}") for name in ("step", "wait")
    )
    if not begins or not waits:
        return counts
    (begin, _), (wait, end) = begins[-1], waits[-1]  # the last step is counted: the first one starts the profiler
    inside = [(re.sub(r"(_v\d+|_ptsz|_ptds)+$", "", name), start) for name, start, _ in events if begin <= start <= end]
    calls = Counter(name for name, _ in inside)
    if not any(re.match(r"cu(da)?Launch", name) for name in calls):
        return counts  # every step launches kernels: calls are not recorded here
    own = next((name for name, start in inside if start >= wait and name.endswith("DeviceSynchronize")), None)
    if own is not None:
        calls[own] -= 1

    def count(pattern: re.Pattern[str]) -> dict[str, int]:
        return {name: number for name, number in sorted(calls.items()) if number and pattern.fullmatch(name)}

    synchronisations, allocations = count(SYNCHRONISATION), count(ALLOCATION)
    return {
        "host_synchronisations": sum(synchronisations.values()),
        "device_allocations": sum(allocations.values()),
        "driver_calls": {**synchronisations, **allocations},
    }
