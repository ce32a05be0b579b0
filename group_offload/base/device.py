"""What the engine asks of a device: memory, streams, events, copies.

Everything that touches an accelerator goes through a :class:`Backend`. The engine never names CUDA: one backend serves
every accelerator that ``torch.accelerator`` knows, one serves the CPU, and the tests bring a simulated one whose copies
land late.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any, Protocol

import torch

from ..errors import DeviceError
from .system import ram_of_machine
from .text import describe_bytes
from .torch_internals import allocator_settings, set_allocator, watch_refusals

logger = logging.getLogger("group_offload")


class Event(Protocol):
    """A point in a stream's work. Recording it again moves it; waits that were already enqueued keep the old point."""

    def record(self, stream: Any, /) -> None: ...

    def query(self) -> bool:
        """Whether the work before the point is done (true before the first record)."""

    def synchronize(self) -> None:
        """Block the calling thread until the work before the point is done."""


class Stream(Protocol):
    """A queue of work on the device."""

    def wait_event(self, event: Any, /) -> None:
        """Work that is enqueued from now on starts after `event`, as last recorded."""


class _Nothing:
    """The stream, and each event, of a device where everything is done when a call returns."""

    def wait_event(self, event: Any, /) -> None: ...

    def record(self, stream: Any, /) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


_NOTHING = _Nothing()
_CPU = torch.device("cpu")


class Refused(torch.OutOfMemoryError):
    """Device memory that was refused: an error that operators written in C++ do not catch as they do the allocator's."""


class Refusal(threading.local):
    """Whom this thread asks when it is refused memory of a device."""

    must_fail: Callable[[], bool] | None = None
    """Whether to raise `Refused`, so that no operator goes on without the memory."""

    def note(self, num_bytes: int) -> None:
        """Memory is refused, and the caller is about to hear of it.

        Raises:
            Refused: it is not to hear of it.
        """
        if self.must_fail is not None and self.must_fail():
            raise Refused(f"Out of device memory: tried to allocate {describe_bytes(num_bytes)}.")


class Backend:
    """One device. Safe to call from several threads; what it hands out is not. As it stands, it is the CPU.

    Order of calls for a byte that moves: `pin` the host memory, `empty` for the device memory, then `copy` on a stream
    that waited for the last use of the target, `Event.record`, and `Stream.wait_event` before the bytes are used.
    """

    joins_fragments = True
    """Whether pieces of memory that were freed serve allocations of other sizes, wherever they lie."""
    has_streams = False
    """Whether work is asynchronous. Without streams every call is done when it returns, and events are no-ops."""

    def __init__(self, device: torch.device = _CPU) -> None:
        self.device = device
        self.refusal = Refusal()

    def current_stream(self) -> Stream:
        """The stream that the calling thread's compute goes to."""
        return _NOTHING

    def new_stream(self) -> Stream:
        return _NOTHING

    def on_stream(self, stream: Stream | None) -> contextlib.AbstractContextManager[object]:
        """Make a stream, and its device, the current ones of this thread. None: those that are."""
        return contextlib.nullcontext()

    def new_event(self) -> Event:
        return _NOTHING

    def is_capturing(self) -> bool:
        """Whether what the calling thread enqueues now becomes part of a graph, and does not run."""
        return False

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is in memory of the device, and not in memory that the host reads."""
        return False

    def bring(self, tensor: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
        """A copy of a tensor on the device, for compute of the calling thread. The host waits for no compute.

        Args:
            non_blocking: `tensor` is left alone until the copy is done. If not, it may be changed once this returns.
        """
        return tensor.to(self.device)

    def seconds_between(self, start: Event, end: Event) -> float | None:
        """Time from one recorded event to another, negative if `end` came first; None if one is not reached yet."""
        return 0.0

    def empty(self, num_bytes: int, stream: Stream | None = None) -> torch.Tensor:
        """Uninitialized uint8 device memory, owned by `stream` (default: the current one), 256-byte aligned."""
        # torch's CPU allocator aligns to 64 bytes; blobs are laid out for 256, and MKL rounds by alignment.
        memory = plain_empty(num_bytes + 255, self.device)
        start = -memory.data_ptr() % 256
        with torch.inference_mode(False):
            return memory[start : start + num_bytes]

    def bytes_in_use(self) -> int:
        """Device memory in use by this process: weights, activations, everything. Takes some time to find out."""
        return self._bytes("allocated_bytes", "current")

    def reserved_bytes(self) -> int:
        """Device memory that this process has taken: in use, or kept by its allocator for the next use."""
        return self._bytes("reserved_bytes", "current")

    def peak_reserved_bytes(self) -> int:
        """The most that `reserved_bytes` has been since `reset_peak`."""
        return self._bytes("reserved_bytes", "peak")

    def _bytes(self, which: str, when: str) -> int:
        return 0

    def reset_peak(self) -> None: ...

    def total_bytes(self) -> int:
        """The device's memory."""
        return ram_of_machine("total")

    def free_bytes(self) -> int:
        """What this process could take of it, beside what it has taken."""
        return ram_of_machine("available")

    def release_unused(self) -> None:
        """Give memory that was freed back to the device, so that it can be had in pieces of other sizes."""

    def avoid_fragments(self, *, is_shared: bool) -> None:
        """Let memory be taken so that freed pieces can be joined, unless the user has decided how it is taken.

        Args:
            is_shared: Whether other processes open the memory. They cannot if it can be joined.
        """

    def refusals(self) -> tuple[int, int]:
        """How often this process was refused device memory, also where an operator caught the error; and the bytes that it
        asked for the last time. (0, 0) as long as nothing was refused, and where nothing tells."""
        return 0, 0

    def generator_state(self) -> object:
        """The state of the device's random generator. Two are equal if nothing was drawn in between."""
        return None

    def free(self, memory: torch.Tensor) -> None:
        """Give memory from `empty` back. Its owner stream, and streams marked by `record_stream`, may still use it.

        (torch's caching allocator takes it back when the last reference goes, in the order of its stream.)
        """

    def record_stream(self, memory: torch.Tensor, stream: Stream) -> None:
        """Let `memory` be used by `stream` too: once freed it is not handed out again before that use is done."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream, *, blocking: bool = False) -> None:
        """Copy bytes on `stream`. Asynchronous if the host side is pinned, unless `blocking`."""
        with self.on_stream(stream):
            target.copy_(source, non_blocking=self.has_streams and not blocking)

    def copy_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: Stream) -> None:
        """`copy` of each (target, source), in less of the host's time."""
        with self.on_stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=self.has_streams)

    def transform(
        self,
        kernel: Callable[[torch.Tensor, torch.Tensor], None],
        target: torch.Tensor,
        source: torch.Tensor,
        stream: Stream,
    ) -> None:
        """Enqueue `kernel(source, target)` on `stream`: it reads device memory, and writes other device memory.

        The host does not wait, and the kernel takes no memory of its own.
        """
        with self.on_stream(stream):
            kernel(source, target)

    def pin(self, memory: torch.Tensor, undo: list[Callable[[], None]], *, read_only: bool = False) -> bool:
        """Pin host memory in place. See `PinnedPages`, which everything but tests uses.

        Args:
            undo: Gets the call that unpins the memory, before it is pinned: so an interrupt leaves nothing pinned. The call
                does nothing if the memory is not pinned.
            read_only: Whether nothing will ever be copied to the memory. Pages of a file that is mapped read-only can be
                pinned so.

        Returns:
            False if the device refuses.
        """
        return False

    def empty_pinned(self, num_bytes: int) -> torch.Tensor | None:
        """Pinned memory of the device's own making, for where `pin` is refused; None if that is too."""
        return None


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_REGISTER_READ_ONLY = 8  # cudaHostRegisterReadOnly
_TRIED_BYTES = 4096


class AcceleratorBackend(Backend):
    """Any accelerator that torch's device-agnostic streams and events serve: CUDA, ROCm, XPU."""

    has_streams = True
    _is_memory_shared = False
    """Whether other processes may open memory of this one, whichever device's: torch has one setting for all devices."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.joins_fragments = False
        if device.type == "cuda":
            _watch_refusals()

    def current_stream(self) -> Stream:
        return torch.accelerator.current_stream(self.device.index)  # a device would be looked at for long

    def new_stream(self) -> Stream:
        return torch.Stream(device=self.device)

    def on_stream(self, stream: Any) -> contextlib.AbstractContextManager[object]:
        if stream is None:
            return contextlib.nullcontext()
        # What was current before is kept in the object, and the same stream is used by threads that read files.
        return torch.Stream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )

    def new_event(self) -> Event:
        return torch.Event(device=self.device, enable_timing=True)

    def is_capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.device

    def bring(self, tensor: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
        if non_blocking or tensor.device.type != "cpu" or type(tensor) not in _PLAIN or tensor.layout != torch.strided:
            return tensor.to(self.device, non_blocking=non_blocking)
        # A blocking copy would wait for all that compute has to do before. So it is made from pinned memory of our own,
        # which torch gives to nobody else before the copy is done.
        try:
            staged = torch.empty_like(tensor, pin_memory=True)
        except RuntimeError:  # the driver's own limits
            return tensor.to(self.device)
        return staged.copy_(tensor).to(self.device, non_blocking=True)

    def seconds_between(self, start: Event, end: Event) -> float | None:
        if not (start.query() and end.query()):
            return None
        return float(start.elapsed_time(end)) / 1e3  # type: ignore[attr-defined]

    def empty(self, num_bytes: int, stream: Stream | None = None) -> torch.Tensor:
        with self.on_stream(stream):
            return plain_empty(num_bytes, self.device)

    def _bytes(self, which: str, when: str) -> int:
        # What memory_allocated() looks up, without all that it sorts before.
        stats = self._runtime.memory.memory_stats_as_nested_dict(self.device)
        return int(stats[which]["all"][when]) if stats else 0

    def reset_peak(self) -> None:
        self._runtime.reset_peak_memory_stats(self.device)

    def total_bytes(self) -> int:
        return int(self._runtime.get_device_properties(self.device).total_memory)

    def free_bytes(self) -> int:
        free, total = self._runtime.mem_get_info(self.device)
        if getattr(self._runtime.get_device_properties(self.device), "is_integrated", False):
            # The device's memory is the host's: what the page cache holds of it can be had too.
            free = max(free, ram_of_machine("available"))
        fraction = getattr(self._runtime.memory, "get_per_process_memory_fraction", None)
        share = 1.0 if fraction is None else fraction(self.device)
        return int(free) if share >= 1 else max(0, min(int(free), int(total * share) - self.reserved_bytes()))

    def release_unused(self) -> None:
        self._runtime.empty_cache()

    def avoid_fragments(self, *, is_shared: bool) -> None:
        if self.device.type == "cuda":
            if is_shared and not AcceleratorBackend._is_memory_shared:
                AcceleratorBackend._is_memory_shared = True
                self.release_unused()  # else memory that can be joined would be used again
            set_allocator(f"expandable_segments:{not AcceleratorBackend._is_memory_shared}")
            self.joins_fragments = "expandable_segments:True" in allocator_settings()

    def refusals(self) -> tuple[int, int]:
        return _refused.get(self.device, (0, 0))

    def generator_state(self) -> object:
        generators = getattr(self._runtime, "default_generators", ())
        if self.device.type != "cuda" or not generators:
            return self._runtime.get_rng_state(self.device).numpy().tobytes()
        generator = generators[self.device.index]
        return generator.initial_seed(), generator.get_offset()

    @property
    def _runtime(self) -> Any:
        return getattr(torch, self.device.type)

    def record_stream(self, memory: torch.Tensor, stream: Stream) -> None:
        memory.record_stream(stream)  # type: ignore[arg-type]

    def pin(self, memory: torch.Tensor, undo: list[Callable[[], None]], *, read_only: bool = False) -> bool:
        if self.device.type != "cuda" or not memory.numel():
            return False
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address, num_bytes = memory.data_ptr(), memory.numel()
        flags = _REGISTER_READ_ONLY if read_only else 0
        pinned: list[Any] = []
        unpinned: list[Any] = []

        def unpin() -> None:
            if pinned and int(pinned[0]) == 0 and not unpinned:
                unpinned.extend(map(runtime.cudaHostUnregister, (address,)))

        undo.append(unpin)
        with torch.cuda.device(self.device):
            # `extend` calls the driver and keeps its answer in C code: an interrupt comes before both or after both.
            pinned.extend(map(runtime.cudaHostRegister, (address,), (num_bytes,), (flags,)))
            if int(pinned[0]) == 0:
                if self._can_copy_from(memory):
                    return True
                unpin()
                return False
            # The failure also waits as CUDA's "last error", for the next kernel launch to stumble over. Here it does.
            with contextlib.suppress(RuntimeError):
                torch.empty(1, device=self.device).zero_()
        return False

    def _can_copy_from(self, memory: torch.Tensor) -> bool:
        """Whether the first and the last bytes of pinned memory arrive. Drivers may lock memory that they cannot copy from."""
        try:
            for end in (memory[:_TRIED_BYTES], memory[-_TRIED_BYTES:]):
                # No byte of `back` is right before it is copied, whatever was in this memory before.
                there, back = self.empty(end.numel(), self._trials), end.bitwise_not()
                self.copy(there, end, self._trials, blocking=True)
                self.copy(back, there, self._trials, blocking=True)
                if not torch.equal(back, end):
                    raise RuntimeError("other bytes arrived")
        except torch.OutOfMemoryError:
            return True  # the device is full, which says nothing of this memory
        except RuntimeError as error:
            logger.warning(
                "%s pinned %s of RAM, but a copy from there failed (%s). Using a staging buffer, which is slower. Update "
                "the driver.",
                self.device,
                describe_bytes(memory.numel()),
                error,
            )
            return False
        return True

    @cached_property
    def _trials(self) -> Stream:
        """A stream of its own: what waits for it waits for nobody's work."""
        return self.new_stream()

    def empty_pinned(self, num_bytes: int) -> torch.Tensor | None:
        try:
            with torch.inference_mode(False):
                return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError:  # the driver's own limits
            return None


def plain_empty(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Uninitialized uint8 memory that is no inference tensor, whatever mode the caller is in.

    A weight that is bound to an inference tensor could not be used outside of inference mode any more.
    """
    if not torch.is_inference_mode_enabled():  # entering the other mode takes longer than all the rest
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    with torch.inference_mode(False):
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)


_refused: dict[torch.device, tuple[int, int]] = {}
"""For each CUDA device, how often memory was refused, and the bytes of the last time."""


@cache
def _watch_refusals() -> None:
    def note(index: int, num_bytes: int) -> None:
        device = torch.device("cuda", index)
        _refused[device] = _refused.get(device, (0, 0))[0] + 1, num_bytes
        if device in _backends:
            _backends[device].refusal.note(num_bytes)

    watch_refusals(note)


_backends: dict[torch.device, Backend] = {}


def default_device() -> torch.device:
    """The current accelerator, else the CPU. Apple's, for which there is no backend, does not count."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return _CPU if found is None or found.type == "mps" else found


def backend_for(device: str | int | torch.device, *, option: str = "onload_device=") -> Backend:
    """The backend of `device`, which the user gave as `option`: one object for each device of the process.

    Raises:
        DeviceError: it is no device, or does not exist here.
    """
    try:
        device = torch.device(device)
    except (TypeError, RuntimeError) as error:  # torch's own messages are tables of overloads and of devices
        raise DeviceError(f"{option}{device!r} isn't a device. Use 'cuda', 'cuda:1', 'xpu' or 'cpu'.") from error
    device = _with_index(device, option)
    if device not in _backends:
        _backends[device] = Backend(device) if device.type == "cpu" else AcceleratorBackend(device)
    return _backends[device]


@cache
def say_that_the_cpu_computes() -> None:
    """Say it once: forwards that nobody asked to run there take minutes for seconds."""
    logger.warning(
        "No GPU is available to torch %s, so offloaded models compute on the CPU. %s, or pass onload_device='cpu'.",
        *(torch.__version__, _why_none("cuda")),
    )


def is_cpu_build() -> bool:
    """Whether torch was built for no accelerator."""
    return torch.version.cuda is None and torch.version.hip is None and getattr(torch.version, "xpu", None) is None


def _why_none(kind: str) -> str:
    """What to do where torch sees no device of this kind."""
    if kind == "cuda" and torch.version.cuda is None and torch.version.hip is None:
        return "This build has no CUDA support: install one that has (https://pytorch.org/get-started)"
    return "Check that the driver works (nvidia-smi)" if kind == "cuda" else "Check the driver and the torch build"


def _with_index(device: torch.device, option: str) -> torch.device:
    runtime = getattr(torch, device.type, None)
    if device.type in ("meta", "mps") or runtime is None or not hasattr(runtime, "is_available"):
        raise DeviceError(f"{option}{str(device)!r} isn't supported. Use 'cuda', 'xpu' or 'cpu'.")
    if not runtime.is_available():
        raise DeviceError(
            f"No {str(device)!r} device is available to torch {torch.__version__}. {_why_none(device.type)}, or pass "
            f"{option}'cpu'."
        )
    if device.index is not None and device.index >= runtime.device_count():
        raise DeviceError(
            f"{option}{str(device)!r} doesn't exist: torch sees {runtime.device_count()} {device.type} device(s)."
        )
    if device.type == "cpu":
        return _CPU
    return device if device.index is not None else torch.device(device.type, runtime.current_device())
