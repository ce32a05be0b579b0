"""What a benchmark reads from the machine and the device: facts, memory, and the calls that a step makes to the driver."""

from __future__ import annotations

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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

BANDWIDTH_BYTES = 1 << 30
PROFILED_STEPS = 3
GIB = 1 << 30
QUIET = {"GROUP_OFFLOAD_PROGRESS_BAR": "0", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
"""The environment of processes."""
SYNCHRONIZATION = re.compile(r"(cuda(Stream|Device|Event)|cu(Stream|Ctx|Event))Synchronize")
"""The host waits for the device."""
ALLOCATION = re.compile(
    r"cuda(Malloc|Free|MallocAsync|FreeAsync|MallocHost|HostAlloc|FreeHost|HostRegister|HostUnregister)"
    r"|cuMem(Alloc|Free|Create|Release|Map|Unmap|HostAlloc|FreeHost|HostRegister|HostUnregister)"
)
"""Memory of the device, or pinned memory, is taken from the driver or given back. Most of these wait, too."""


# ------------------------------------------------------------------------------------------------ facts


QUANTIZERS = ("torchao", "bitsandbytes", "optimum-quanto", "gguf", "sdnq")


def measure_machine(device: torch.device) -> dict[str, Any]:
    """The machine that the arms run on, and what its link to the device can do."""
    is_cpu = device.type == "cpu"
    return {
        "device": "CPU" if is_cpu else str(getattr(torch, device.type).get_device_name(device)),
        "cpu_count": os.cpu_count(),
        "ram_bytes": psutil.virtual_memory().total,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        **{name: _version(name) for name in ("diffusers", "accelerate", "transformers", *QUANTIZERS)},
        "glibc_tunables": os.environ.get("GLIBC_TUNABLES"),  # they change how fast RAM is copied
        "pinned_h2d_bytes_per_s": None if is_cpu else link_speed(device),
    }


def _version(package: str) -> str | None:
    imported = getattr(sys.modules.get(package), "__version__", None)
    if imported is not None:  # which may be a copy on the path that was never installed
        return str(imported)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def link_speed(device: torch.device) -> float:
    """Bytes a second from pinned RAM to the device: the median of all times but the first."""
    host = torch.empty(BANDWIDTH_BYTES, dtype=torch.uint8, pin_memory=True)
    copy = partial(torch.empty_like(host, device=device).copy_, host, non_blocking=True)
    return BANDWIDTH_BYTES / statistics.median([timed(copy, device)[0] for _ in range(8)][1:])


def timed(call: Callable[[], Any], device: torch.device, in_a_row: int = 1) -> tuple[float, Any]:
    """Seconds of one of so many calls, between which nobody waits, until the device is done; and what the last one returns."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(in_a_row):
        output = call()
    synchronize(device)
    return (time.perf_counter() - start) / in_a_row, output


def sha256(output: torch.Tensor) -> str:
    return hashlib.sha256(output.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def fix_algorithms() -> None:
    """Convolutions run the same kernels in every process, so that outputs can be compared bit by bit."""
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


def fix_training_algorithms() -> None:
    """The same for backward: what `torch.use_deterministic_algorithms` needs. It is called before the device is used."""
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


PEAK, RESERVED = "allocated_bytes.all.peak", "reserved_bytes.all.peak"
"""The most that torch's allocator counted as allocated, and had taken from the device."""


def allocator(device: torch.device, key: str) -> int | None:
    """A number of torch's allocator; None on the CPU."""
    return None if device.type == "cpu" else int(torch.accelerator.memory_stats(device).get(key, 0))


class PeakWatch:
    """The most device memory since `with`, though somebody else resets torch's counters: budgets measure single passes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.allocated: int | None = None
        """`PEAK`. Known after `with`."""
        self.reserved: int | None = None
        """`RESERVED`."""

    def __enter__(self) -> PeakWatch:
        if self._device.type != "cpu":
            runtime = getattr(torch, self._device.type)
            self._reset = runtime.reset_peak_memory_stats
            self._reset(self._device)
            runtime.reset_peak_memory_stats = self._note_and_reset
        return self

    def __exit__(self, *exc: object) -> None:
        if self._device.type != "cpu":
            self._note()
            getattr(torch, self._device.type).reset_peak_memory_stats = self._reset

    def _note(self) -> None:
        self.allocated = max(self.allocated or 0, allocator(self._device, PEAK) or 0)
        self.reserved = max(self.reserved or 0, allocator(self._device, RESERVED) or 0)

    def _note_and_reset(self, *args: Any, **kwargs: Any) -> None:
        self._note()
        self._reset(*args, **kwargs)


def process_memory() -> dict[str, int]:
    """This process's memory in RAM now, and the most there was."""
    return {
        "rss_bytes": psutil.Process().memory_info().rss,
        "rss_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def share_of_anonymous_bytes() -> int:
    """Memory of this process that is in no file, where memory that N processes have mapped counts 1/N in each."""
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in rollup if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


# ------------------------------------------------------------------------------------------------ calls to the driver


def count_driver_calls(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """How often one `step` makes the host wait for the device, and takes or gives back memory of the driver.

    All threads count. The wait for the end of the step, which is the benchmark's, does not. All are None where torch's profiler
    sees no calls.
    """
    names = ("host_synchronizations", "device_allocations", "driver_calls")
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

    synchronizations, allocations = count(SYNCHRONIZATION), count(ALLOCATION)
    return {
        "host_synchronizations": sum(synchronizations.values()),
        "device_allocations": sum(allocations.values()),
        "driver_calls": {**synchronizations, **allocations},
    }
