"""A device on which every copy and every kernel takes the time that it is given: how long would a step take?

`TimedDevice` is a `Backend` with a clock of its own. Copies take their bytes over the bandwidth of the one link, what a
module computes is told by `compute`, and the host takes no time at all, as on a machine that launches faster than the device
runs. Nothing is copied. So the engine's own decisions, not a model of them, give the time of a step, its stalls and its
trace, in milliseconds of real time and without an accelerator.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch


class TimedStream:
    def __init__(self) -> None:
        self.now = 0.0
        """When the work that was enqueued so far is done."""

    def wait_event(self, event: TimedEvent, /) -> None:
        self.now = max(self.now, event.at)


class TimedEvent:
    def __init__(self) -> None:
        self.at = 0.0

    def record(self, stream: TimedStream, /) -> None:
        self.at = stream.now

    def query(self) -> bool:
        return False  # the host is ahead of the device, always

    def synchronize(self) -> None:
        pass


class TimedDevice:
    """Order of use: `use_simulated_device(device)`, offload a model that calls `compute` in its forward, run, look at `now`."""

    has_streams = True

    def __init__(self, bytes_per_second: float, capacity: int = 1 << 50) -> None:
        self.device = torch.device("cpu")
        self.errors: list[AssertionError] = []
        self.bytes_per_second = bytes_per_second
        self._link = 0.0
        self._compute = TimedStream()
        self._in_use = 0
        self._peak = 0
        self._capacity = capacity
        self.copied_bytes = 0
        self.copy_seconds = 0.0
        self.unpacked_bytes_per_second = 20 * bytes_per_second
        self.scale = 1.0
        """Compute takes that many times what it is told to."""

    @property
    def now(self) -> float:
        """When compute is done with what was enqueued so far."""
        return self._compute.now

    def compute(self, seconds: float) -> None:
        self._compute.now += seconds * self.scale

    def synchronize(self) -> None:
        pass

    def is_capturing(self) -> bool:
        return False

    def holds(self, tensor: torch.Tensor) -> bool:
        return False

    def bring(self, tensor: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
        raise AssertionError("All tensors are on the CPU, which it stands for.")

    def current_stream(self) -> TimedStream:
        return self._compute

    def on_stream(self, stream: TimedStream) -> Any:
        return nullcontext()

    def new_stream(self) -> TimedStream:
        return TimedStream()

    def new_event(self) -> TimedEvent:
        return TimedEvent()

    def seconds_between(self, start: TimedEvent, end: TimedEvent) -> float | None:
        return end.at - start.at

    def empty(self, num_bytes: int, stream: Any = None) -> torch.Tensor:
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        self._take(num_bytes)
        weakref.finalize(memory, self._take, -num_bytes).atexit = False
        return memory

    def _take(self, num_bytes: int) -> None:
        self._in_use += num_bytes
        self._peak = max(self._peak, self._in_use)

    def free(self, memory: torch.Tensor) -> None:
        pass

    def record_stream(self, memory: torch.Tensor, stream: Any) -> None:
        pass

    def bytes_in_use(self) -> int:
        return self._in_use

    def peak_bytes_in_use(self) -> int:
        return self._peak

    def reset_peak(self) -> None:
        self._peak = self._in_use

    def total_bytes(self) -> int:
        return self._capacity

    def free_bytes(self) -> int:
        return self._capacity - self._in_use

    def release_unused(self) -> None:
        pass

    def copy_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: Any) -> None:
        for target, source in pairs:
            self.copy(target, source, stream)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: TimedStream, *, blocking: bool = False) -> None:
        begun = max(stream.now, self._link)
        seconds = target.numel() / self.bytes_per_second
        self._link = stream.now = begun + seconds
        self.copied_bytes += target.numel()
        self.copy_seconds += seconds

    def transform(self, kernel: Any, target: torch.Tensor, source: torch.Tensor, stream: TimedStream) -> None:
        stream.now += target.numel() / self.unpacked_bytes_per_second

    def pin(self, memory: torch.Tensor, undo: list[Callable[[], None]], *, read_only: bool = False) -> bool:
        return True

    def empty_pinned(self, num_bytes: int) -> torch.Tensor | None:
        return torch.empty(num_bytes, dtype=torch.uint8)
