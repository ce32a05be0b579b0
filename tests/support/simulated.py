"""A simulated accelerator on CPU memory: work lands late, in a random legal order, and every missing wait is an error.

`SimulatedDevice` is a `Backend`. Memory from its `empty`, and what ops under `running()` make of it, is device memory;
everything else is host memory. Two independent halves find a missing wait:

- *When work runs.* Streams are queues whose work runs late, so early reads see NaN (0xFF bytes).
- *What orders it.* Each stream and the host has a vector clock. An access that conflicts with an earlier one raises
  `RaceError` when it is enqueued, unless events, waits or stream order put one before the other. This does not depend
  on when work ran, so it shows with every seed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import random
import sys
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

import group_offload.base.device as backends
from group_offload.stores.moves import Decompress

from . import allocator
from .allocator import Memory, Meter, OnCard

Laziness = Literal["random", "lazy", "eager"]
Clock = dict["_Timeline", int]

_ALLOCATES = {"empty_like", "new_empty", "new_empty_strided"}
_OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "_foreach_copy_"}
_ASKS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_by_start = attrgetter("start")
_lock = threading.RLock()
"""Guards all devices."""
_NOT_CALLERS = (__file__, contextlib.__file__, str(Path(torch.__file__).parent))


@functools.cache
def _may_be_caller(file: str) -> bool:
    return not file.startswith(_NOT_CALLERS)


class RaceError(AssertionError):
    """Two accesses of the same bytes conflict, and nothing orders them; or memory was used after it was freed."""


class UninitializedRead(AssertionError):
    """Device memory was read that nobody has written since `empty`."""


class _Timeline:
    """A stream or the host. `clock` says which ticks of each timeline come before what happens here next."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Clock = {self: 0}

    def join(self, clock: Clock) -> None:
        mine = self.clock
        for timeline, tick in clock.items():
            if tick > mine.get(timeline, 0):
                mine[timeline] = tick


class _Access(NamedTuple):
    timeline: _Timeline
    tick: int
    label: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.label!r} on {self.timeline.name} ({Path(self.file).name}:{self.line})"


@dataclass(slots=True)
class _Segment:
    start: int
    end: int
    written: bool
    write: _Access | None = None  # or what handed the memory out
    reads: dict[_Timeline, _Access] = field(default_factory=dict)  # since then; a timeline's last covers the earlier


class _Region:
    """Addresses that are tracked: a device block, or a pinned host range."""

    name = ""

    def __init__(self, start: int, num_bytes: int) -> None:
        self.start, self.end = start, start + num_bytes
        self.segments = [_Segment(self.start, self.end, written=True)]

    def read(self, start: int, end: int, access: _Access, clock: Clock) -> None:
        for segment in self.segments[self._cut(start, end)]:
            self._check(segment, access, "reads what was written by", [segment.write], clock)
            if not segment.written:
                raise UninitializedRead(f"{access} reads what nobody wrote: {self._describe(segment)}.")
            segment.reads[access.timeline] = access

    def write(self, start: int, end: int, access: _Access, clock: Clock) -> None:
        inside = self._cut(start, end)
        for segment in self.segments[inside]:
            self._check(segment, access, "writes what was written by", [segment.write], clock)
            self._check(segment, access, "writes what was read by", segment.reads.values(), clock)
        self.segments[inside] = [_Segment(start, end, True, access)]

    def _check(
        self, segment: _Segment, access: _Access, clash: str, others: Iterable[_Access | None], clock: Clock
    ) -> None:
        for other in others:
            if other is not None and clock.get(other.timeline, 0) < other.tick:
                raise RaceError(f"{access} {clash} {other}, and nothing orders the two: {self._describe(segment)}.")

    def _describe(self, segment: _Segment) -> str:
        span = f"bytes {segment.start - self.start} to {segment.end - self.start}"
        return f"{self.name}, {span} (0x{segment.start:x} to 0x{segment.end:x})"

    def _cut(self, start: int, end: int) -> slice:
        """Where the segments of [start, end) are, after splitting those that cross its ends."""
        if len(self.segments) == 1 and start <= self.start < self.end <= end:
            return slice(0, 1)
        for edge in (start, end):
            index = bisect_right(self.segments, edge, key=_by_start) - 1
            segment = self.segments[index]
            if segment.start < edge < segment.end:
                rest = _Segment(edge, segment.end, segment.written, segment.write, dict(segment.reads))
                self.segments.insert(index + 1, rest)
                segment.end = edge
        return slice(bisect_left(self.segments, start, key=_by_start), bisect_left(self.segments, end, key=_by_start))


class _Block(_Region):
    """Device memory that the caching allocator hands out again and again to one stream."""

    def __init__(self, num_bytes: int, owner: SimulatedStream) -> None:
        with torch.inference_mode(False):  # whoever poisons it later may not be in that mode
            self.raw = torch.empty(num_bytes + 255, dtype=torch.uint8, device="cpu")
        super().__init__(self.raw.data_ptr() + -self.raw.data_ptr() % 256, num_bytes)
        self.owner = owner
        self.users: set[SimulatedStream] = set()  # marked by record_stream
        self.freed: _Access | None = None
        self.num_bytes = 0  # asked for; the block may be larger
        self.meter = Meter()
        self.place: allocator.Block | None = None  # on the card
        self.finalizer: weakref.finalize[..., Any] | None = None
        self.poison()

    def poison(self) -> None:
        self.raw.fill_(0xFF)

    def hand_out(
        self, num_bytes: int, place: allocator.Block, access: _Access, meter: Meter, released: deque[_Block]
    ) -> torch.Tensor:
        """The memory with a storage of its own: its last reference going is noticed, whatever queued work holds."""
        handle = (ctypes.c_uint8 * num_bytes).from_address(self.start)
        self.finalizer = weakref.finalize(handle, released.append, self)
        self.finalizer.atexit = False
        # The owner's earlier work may still use the memory, so other streams must wait for it, even for a new block.
        self.segments = [_Segment(self.start, self.end, False, access)]
        self.freed, self.num_bytes, self.place, self.meter = None, num_bytes, place, meter
        meter.add(num_bytes)
        return torch.frombuffer(handle, dtype=torch.uint8)


@dataclass(slots=True, eq=False)
class _Work:
    stream: SimulatedStream
    access: _Access
    clock: Clock
    run: Callable[[], object] | None = None
    after: _Work | None = None  # a wait: not before this is done
    done: bool = False
    finished: int = 0  # how many things had run by then
    grad: bool = field(default_factory=torch.is_grad_enabled)

    # As a point that the allocator waits for. That orders nothing for the host, which does not hear of it.

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.stream.device._run_until(self)


class SimulatedStream(_Timeline):
    # Compared with None, a torch.Stream is neither equal nor unequal.
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return other is not None and self is not other

    def __init__(self, device: SimulatedDevice, name: str) -> None:
        super().__init__(name)
        self.device = device
        self.queue: deque[_Work] = deque()
        self.tail: _Work | None = None

    def wait_event(self, event: SimulatedEvent, /) -> None:
        with self.device._host_call():
            if event.point is not None:
                self.join(event.point.clock)
                self.device._enqueue(self, "wait", after=event.point)


class SimulatedEvent:
    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.point: _Work | None = None  # as last recorded: whoever waits takes the point, so recording again is safe

    def record(self, stream: SimulatedStream, /) -> None:
        with self.device._host_call():
            self.point = self.device._enqueue(stream, "record")

    def query(self) -> bool:
        with self.device._host_call():
            if self.point is not None and self.point.done:
                self.device._host.join(self.point.clock)  # having seen it is as good as having waited
            return self.point is None or self.point.done

    def synchronize(self) -> None:
        with self.device._host_call():
            if self.point is not None:
                self.device._wait([self.point])


_NOTHING = contextlib.nullcontext()


def _no_inference() -> contextlib.AbstractContextManager[Any]:
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING


@contextlib.contextmanager
def _as_enqueued(work: _Work) -> Iterator[None]:
    """Run work as its kernels would: some ask for the grad mode, which is the enqueuer's, not that of whoever waits.

    A finalizer may wait for the device: what it waits for would run in the middle of the work before.
    """
    collects, casts = gc.isenabled(), torch.is_autocast_enabled("cpu")
    gc.disable()
    # Not `torch.autocast`: it forgets all casts when a thread leaves its outermost one, also those of other threads.
    torch.set_autocast_enabled("cpu", False)
    try:
        with _no_inference(), torch.set_grad_enabled(work.grad):
            yield
    finally:
        torch.set_autocast_enabled("cpu", casts)
        if collects:
            gc.enable()


class SimulatedDevice(OnCard):
    """A `Backend` for tests. `laziness`: work runs at random moments, only when somebody waits, or as soon as it may.

    When 'lazy', an event that nobody waits for is never reached: code that polls `query` needs another mode.
    All host threads share one clock: what they hand each other through locks and queues is not seen here, and must not
    look like a race. Only `current_stream` is a thread's own. What `card` has, keeps and refuses
    is what the device has; which of its bytes a tensor gets is decided here, so that a race shows whatever the card does.
    """

    def __init__(self, seed: int = 0, laziness: Laziness = "random", *, card: Memory | None = None) -> None:
        super().__init__(card or Memory(1 << 40))
        self.laziness = laziness
        self.num_copies = 0
        self.num_copies_back = 0  # those of `num_copies` that went device to host
        self.copied_bytes = 0
        self.num_host_waits = 0  # times that the host asked for a point that was not reached yet
        self.pinned_bytes = 0
        self.captures = False  # a graph, which the engine is to refuse
        self.memory = Meter()  # from `empty`
        self.activations = Meter()  # made by ops and `put`
        self._random = random.Random(seed)
        self._pace = self._random.random()
        self._host = _Timeline("the host")
        self._compute = SimulatedStream(self, "compute")
        self._streams.append(self._compute)
        self._thread = threading.local()
        self._regions: list[_Region] = []  # by address
        self._starts: list[int] = []  # of the regions: it is made anew where it has not as many
        self._num_regions = 0
        self._num_run = 0
        self._cached: list[_Block] = []
        self._freed: list[tuple[_Block, list[_Work]]] = []  # not reusable before that work is done
        self._released: deque[_Block] = deque()  # filled by the garbage collector, at any moment

    def release_unused(self) -> None:
        with self._host_call():
            self.card.release_cached()

    @property
    def allocated_bytes(self) -> int:
        return self.memory.now

    @property
    def peak_bytes(self) -> int:
        return self.memory.peak

    # Streams and events

    def current_stream(self) -> SimulatedStream:
        return getattr(self._thread, "stream", self._compute)

    @contextlib.contextmanager
    def use_stream(self, stream: SimulatedStream) -> Iterator[None]:
        previous = self.current_stream()
        self._thread.stream = stream
        try:
            yield
        finally:
            self._thread.stream = previous

    on_stream = use_stream

    def new_stream(self) -> SimulatedStream:
        with _lock:
            self._streams.append(SimulatedStream(self, f"stream {len(self._streams)}"))
            return self._streams[-1]

    def new_event(self) -> SimulatedEvent:
        return SimulatedEvent(self)

    def is_capturing(self) -> bool:
        return self.captures

    def synchronize(self) -> None:
        with self._host_call():
            self._wait([stream.tail for stream in self._streams if stream.tail])

    # Memory

    def seconds_between(self, start: Any, end: Any) -> float | None:
        """Time is the number of things that ran."""
        if not (start.query() and end.query()):
            return None
        assert start.point is not None and end.point is not None
        return float(end.point.finished - start.point.finished)

    def empty(self, num_bytes: int, stream: Any = None) -> torch.Tensor:
        with self._host_call():
            return self._allocate(num_bytes, stream or self.current_stream(), self.memory)

    def free(self, memory: torch.Tensor) -> None:
        with self._host_call():
            if memory.numel():
                self._retire(self._block(memory))

    def record_stream(self, memory: torch.Tensor, stream: Any) -> None:
        with self._host_call():
            if memory.numel():
                block = self._block(memory)
                block.users |= {stream} - {block.owner}

    def holds(self, tensor: torch.Tensor) -> bool:
        with self._host_call():
            return self._on_device(tensor)

    def empty_pinned(self, num_bytes: int) -> torch.Tensor | None:
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        return memory if self.pin(memory, []) else None

    def pin(self, memory: torch.Tensor, undo: list[Callable[[], None]], *, read_only: bool = False) -> bool:
        with self._host_call():
            if not memory.numel() or self._overlapping(*_extent(memory)):
                return False
            start, end = _extent(memory)
            region = _Region(start, end - start)
            undo.append(lambda: self._unpin(region))
            self._track(region, "pinned range")
            self.pinned_bytes += end - start
            return True

    def host_access(self, memory: torch.Tensor, *, write: bool) -> None:
        """Tell of an access by the host that no op under `running()` shows, such as reading a file into `memory`."""
        with self._host_call():
            access = self._stamp(self._host, "write" if write else "read")
            self._touch([memory], access, self._host.clock, write=write)

    # Copies

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any, *, blocking: bool = False) -> None:
        with self._host_call():
            if target.shape != source.shape or target.dtype != source.dtype:
                raise ValueError(f"{list(source.shape)} {source.dtype} is not {list(target.shape)} {target.dtype}.")
            self.num_copies += 1
            self.num_copies_back += not self._on_device(target)
            self.copied_bytes += target.nbytes
            if not target.is_inference():
                torch.autograd.graph.increment_version(target)  # the copy itself goes through an alias
            self._copy(target, source, stream, blocking=blocking)

    def transform(
        self,
        kernel: Callable[[torch.Tensor, torch.Tensor], None],
        target: torch.Tensor,
        source: torch.Tensor,
        stream: Any,
    ) -> None:
        with self._host_call():
            assert self._on_device(target) and self._on_device(source), "Kernels read and write device memory only."
            into, out_of = self._alias(target), self._alias(source)

            def run() -> None:
                trace = sys.gettrace()
                sys.settrace(None)  # a kernel hears of no Ctrl-C: see tests/interrupts.py
                try:
                    kernel(out_of, into)
                finally:
                    sys.settrace(trace)

            move = getattr(kernel, "__self__", None)
            reads = [source[start:end] for start, end in move.sent] if isinstance(move, Decompress) else [source]
            self._enqueue(stream, "decompress", run, reads=reads, writes=[target])

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A device copy of a host tensor."""
        with self._host_call():
            target = self._make(_dense(tensor.shape, tensor.stride(), tensor.dtype), self.current_stream())
            self._copy(target, tensor.detach(), self.current_stream(), blocking=False)
            return target

    def get(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host copy of a tensor, once all work is done. Does not count as a host wait."""
        with self._host_call():
            self._wait([stream.tail for stream in self._streams if stream.tail], count=False)
            self._touch([tensor], self._stamp(self._host, "get"), self._host.clock, write=False)
            return tensor.detach().clone()

    # Compute

    @contextlib.contextmanager
    def running(self, *, strict: bool = False) -> Iterator[None]:
        """Ops of this thread that use device memory are queued on its current stream; ops on host memory run at once.

        Host operands of queued ops are read at the call; pinned ones (a weight that nobody onloaded) are an error, and
        so are all of one dimension or more if `strict`. If not, what a forward makes with `torch.zeros` may be used.
        """
        with _Running(self, strict):
            yield

    def _dispatch(self, func: Any, op: _Op, args: tuple[Any, ...], kwargs: dict[str, Any], strict: bool) -> Any:
        uses = op.uses(args, kwargs)
        with self._host_call():
            host = [tensor for tensor, _, _ in uses if not self._on_device(tensor)]
            if len(host) < len(uses):
                return self._launch(func, op, args, kwargs, uses, host, strict)
            access = self._stamp(self._host, op.label)
            self._touch([tensor for tensor, reads, _ in uses if reads], access, self._host.clock, write=False)
            self._touch([tensor for tensor, _, writes in uses if writes], access, self._host.clock, write=True)
        return func(*args, **kwargs)

    def _launch(
        self,
        func: Any,
        op: _Op,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        uses: list[_Use],
        host: list[torch.Tensor],
        strict: bool,
    ) -> Any:
        stream = self.current_stream()
        if op.name == "copy_":
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            self._copy(args[0], args[1], stream, blocking=not non_blocking and any(map(self._pinned, host)))
            return args[0]
        written = [tensor for tensor, _, writes in uses if writes]
        written_ids = {id(tensor) for tensor in written}
        read_at_call = {id(tensor) for tensor in host} - written_ids
        for tensor in host:
            if id(tensor) in read_at_call and tensor.dim() and (strict or self._pinned(tensor)):
                raise RuntimeError(f"Expected all operands of {func} on the device, but {list(tensor.shape)} is not.")
        given = op.given(args, kwargs)
        in_place = bool(given) or not op.has_returns
        predicted = _NO_OUTPUTS if in_place else _predict(func, args, kwargs)
        leaves, structure = predicted or _NO_OUTPUTS
        outputs = [self._make(leaf, stream) if isinstance(leaf, _Layout) else leaf for leaf in leaves]
        if op.name in _ALLOCATES:
            return tree_unflatten(outputs, structure)

        # Operands that are one tensor stay one tensor: some kernels look.
        operands = {id(t): self._alias(t.clone() if id(t) in read_at_call else t) for t, _, _ in uses}
        real_args, real_kwargs = tree_map_only(torch.Tensor, lambda tensor: operands[id(tensor)], (args, kwargs))
        made = [output for output in outputs if isinstance(output, torch.Tensor)]
        targets = [self._alias(output) if isinstance(output, torch.Tensor) else None for output in outputs]
        produced: list[Any] = []

        def kernel() -> None:
            produced.append(func(*real_args, **real_kwargs))
            for target, value in zip(targets, tree_leaves(produced[0]), strict=False):  # in place: no targets
                if target is not None and value is not None:
                    assert target.shape == value.shape and target.dtype == value.dtype, f"{func} was predicted wrongly"
                    target.copy_(value)

        reads = [tensor for tensor, is_read, _ in uses if is_read]
        work = self._enqueue(stream, op.label, kernel, reads=reads, writes=written + made)
        if (predicted is None and op.asks) or written_ids & {id(tensor) for tensor in host}:
            self._wait([work])  # the host needs a value or a shape, or its own memory is written
        elif predicted is None or op.is_random:
            self._run_until(work)  # orders nothing: real shapes are known without, random numbers are taken at the call
        if predicted is None:
            return tree_map_only(torch.Tensor, self.put, produced[0])
        if in_place:
            return None if not given else given[0] if len(given) == 1 else tuple(given)
        return tree_unflatten(outputs, structure)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, stream: SimulatedStream, *, blocking: bool) -> None:
        if not target.numel():
            return
        to_device, from_device = self._on_device(target), self._on_device(source)
        if not from_device and not self._pinned(source):
            source = source.clone()  # the driver stages pageable memory before the call returns
        destination, origin = self._alias(target), self._alias(source)
        label = f"copy {'D' if from_device else 'H'}2{'D' if to_device else 'H'}"
        work = self._enqueue(stream, label, lambda: destination.copy_(origin), reads=[source], writes=[target])
        if blocking or not (to_device or self._pinned(target)):
            self._wait([work])

    # When work runs

    @contextlib.contextmanager
    def _host_call(self) -> Iterator[None]:
        """A call from the host: queued work may move on meanwhile. What is below does not see the dispatch mode."""
        # Half a million of these are made in the tests, most without a mode. (A class of our own would be interrupted between
        # its lock and its body.)
        hidden = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else _NOTHING
        with _lock, hidden:
            try:
                while self._released:
                    self._retire(self._released.popleft())
                if self._freed:
                    self._recycle()
                self._progress()
                yield
            except AssertionError as error:
                # A copy, without the frames that it came through: they hold the models, whose finalizers hold this device.
                self.errors.append(type(error)(*error.args))
                raise

    def _enqueue(
        self,
        stream: SimulatedStream,
        label: str,
        run: Callable[[], object] | None = None,
        *,
        after: _Work | None = None,
        reads: Iterable[torch.Tensor] = (),
        writes: Iterable[torch.Tensor] = (),
    ) -> _Work:
        access = self._stamp(stream, label)
        self._touch(reads, access, stream.clock, write=False)
        self._touch(writes, access, stream.clock, write=True)
        stream.tail = work = _Work(stream, access, dict(stream.clock), run, after)
        stream.queue.append(work)
        self._progress()
        return work

    def _progress(self) -> None:
        while self.laziness == "eager" or (self.laziness == "random" and self._random.random() < self._pace):
            heads = self._runnable()
            if not heads:
                return
            self._run(self._random.choice(heads))

    def _run_until(self, work: _Work) -> None:
        while not work.done:
            head = work.stream.queue[0]
            if self.laziness == "lazy":  # only what `work` needs
                while head.after is not None and not head.after.done:
                    head = head.after.stream.queue[0]
            else:
                head = self._random.choice(self._runnable())
            self._run(head)

    def _runnable(self) -> list[_Work]:
        heads = [stream.queue[0] for stream in self._streams if stream.queue]
        return [head for head in heads if head.after is None or head.after.done]

    def _run(self, work: _Work) -> None:
        with _as_enqueued(work):
            if work.done:  # a finalizer has waited for it just now
                return
            work.stream.queue.popleft()
            work.done = True
            self._num_run += 1
            work.finished = self._num_run
            run, work.run, work.after = work.run, None, None
            if run is not None:
                try:
                    run()
                except Exception as error:
                    raise RuntimeError(f"{work.access} failed when its turn came.") from error

    def _wait(self, works: list[_Work], *, count: bool = True) -> None:
        self.num_host_waits += count and not all(work.done for work in works)
        for work in works:
            self._run_until(work)
        for work in works:
            self._host.join(work.clock)  # it knows that they are done: it may touch what they copied from

    # What orders it

    def _stamp(self, timeline: _Timeline, label: str) -> _Access:
        """The next tick of `timeline`. What the host did so far comes before it; the other way needs a wait."""
        timeline.join(self._host.clock)
        timeline.clock[timeline] += 1
        frame = sys._getframe(1)
        while frame.f_back is not None and not _may_be_caller(frame.f_code.co_filename):
            frame = frame.f_back
        return _Access(timeline, timeline.clock[timeline], label, frame.f_code.co_filename, frame.f_lineno)

    def _touch(self, tensors: Iterable[torch.Tensor], access: _Access, clock: Clock, *, write: bool) -> None:
        for tensor in tensors:
            start, end = _extent(tensor)
            for region in self._overlapping(start, end):
                if isinstance(region, _Block) and region.freed:
                    raise RaceError(f"{access} uses {region.name} after {region.freed}.")
                use = region.write if write else region.read
                use(max(start, region.start), min(end, region.end), access, clock)

    # What is where

    def _overlapping(self, start: int, end: int) -> list[_Region]:
        starts = self._starts
        if len(starts) != len(self._regions):  # a Ctrl-C may come between changes of two lists
            starts = self._starts = [region.start for region in self._regions]
        first = max(bisect_right(starts, start) - 1, 0)
        return [region for region in self._regions[first : bisect_left(starts, end, first)] if region.end > start]

    def _track(self, region: _Region, kind: str) -> None:
        self._num_regions += 1
        region.name = f"{kind} {self._num_regions}"
        self._regions.insert(bisect_left(self._regions, region.start, key=_by_start), region)
        self._starts = []

    def _block(self, memory: torch.Tensor) -> _Block:
        for region in self._overlapping(*_extent(memory)):
            if isinstance(region, _Block) and not region.freed:
                return region
        raise ValueError(f"Memory at 0x{memory.data_ptr():x} is not from empty(), or was freed.")

    def _on_device(self, tensor: torch.Tensor) -> bool:
        for region in self._overlapping(*_extent(tensor)):  # noqa: SIM110 (asked for each operand of each op)
            if isinstance(region, _Block):
                return True
        return False

    def _pinned(self, memory: torch.Tensor) -> bool:
        start, end = _extent(memory)
        regions = self._overlapping(start, end)
        if regions and not (regions[0].start <= start and end <= regions[0].end):
            raise RuntimeError(f"0x{start:x} to 0x{end:x} crosses the end of {regions[0].name}: a copy cannot.")
        return bool(regions)

    def _unpin(self, region: _Region) -> None:
        with self._host_call():
            if region in self._regions:
                region.write(region.start, region.end, self._stamp(self._host, "unpin"), self._host.clock)
                self._regions.remove(region)
                self._starts = []
                self.pinned_bytes -= region.end - region.start

    # The caching allocator

    def _allocate(self, num_bytes: int, stream: SimulatedStream, meter: Meter) -> torch.Tensor:
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        place = self.card.malloc(num_bytes, stream)
        fitting = [block for block in self._cached if block.owner is stream and block.end - block.start >= num_bytes]
        if fitting:
            block = min(fitting, key=lambda block: block.end - block.start)
            self._cached.remove(block)
        else:
            block = _Block(num_bytes, stream)
            self._track(block, "block")
        return block.hand_out(num_bytes, place, self._stamp(stream, "empty"), meter, self._released)

    def _retire(self, block: _Block) -> None:
        """From here on the owner stream may write the block: poison it in that order, or after all marked streams."""
        assert block.finalizer is not None and block.place is not None
        block.finalizer.detach()
        block.freed = self._stamp(block.owner, "free")
        block.meter.add(-block.num_bytes)
        self.card.free(block.place, [stream.tail for stream in block.users if stream.tail])
        users, block.users = {block.owner, *block.users}, set()
        order = _Timeline("the allocator")
        for stream in users:
            order.join(stream.clock)
        try:
            block.write(block.start, block.end, block.freed, order.clock)
        finally:
            if len(users) > 1:
                self._freed.append((block, [stream.tail for stream in users if stream.tail]))
            else:
                self._enqueue(block.owner, "poison", block.poison)
                self._cached.append(block)

    def _recycle(self) -> None:
        freed, self._freed = self._freed, []
        for block, last_uses in freed:
            if all(work.done for work in last_uses):
                block.poison()
                self._cached.append(block)
            else:
                self._freed.append((block, last_uses))

    def _finish(self, stream: SimulatedStream) -> None:
        if stream.tail is not None:
            self._run_until(stream.tail)

    def _make(self, layout: _Layout, stream: SimulatedStream) -> torch.Tensor:
        memory = self._allocate(layout.num_bytes, stream, self.activations)
        return _place(memory.untyped_storage(), 0, layout.shape, layout.stride, layout.dtype)

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, for queued work: does not keep device memory from being freed."""
        with _no_inference():
            for region in self._overlapping(*_extent(tensor)):
                if isinstance(region, _Block):
                    return _view(region.raw.untyped_storage(), tensor.data_ptr() - region.raw.data_ptr(), tensor)
            return _view(tensor.untyped_storage(), int(tensor.storage_offset()) * tensor.itemsize, tensor)


class _Running(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, device: SimulatedDevice, strict: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.strict = strict

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        op = _op_of(func)
        if op.needs_no_memory and not op.is_composite:  # most are such: they are asked first
            return func(*args, **kwargs)
        tensors = _tensors((args, kwargs))
        plain = all(tensor.device.type == "cpu" and tensor.layout == torch.strided for tensor in tensors)
        if not tensors or not plain:
            return func(*args, **kwargs)
        if op.is_composite:
            with self:  # in inference mode torch leaves this to us: the parts come back here one by one
                return func._op_dk(_COMPOSITE, *args, **kwargs)  # decompose() may take parts that round differently
        return self.device._dispatch(func, op, args, kwargs, self.strict)


_Use = tuple[torch.Tensor, bool, bool]  # (operand, read, written)


class _Op:
    """What is asked about an operator again and again: torch takes longer to say it than to compute with small tensors."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name = name = schema.name.partition("::")[2]
        self.label = str(func)
        self.is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE)
        self.asks = bool(_ASKS & set(func.tags))
        self.is_random = torch.Tag.nondeterministic_seeded in func.tags
        self.has_returns = bool(schema.returns)
        asks_metadata = self.has_returns and not any("Tensor" in str(value.type) for value in schema.returns)
        asks_metadata &= not schema.is_mutable and torch.Tag.data_dependent_output not in func.tags
        self.needs_no_memory = asks_metadata or func.is_view or torch.Tag.inplace_view in func.tags
        ignores = name.startswith("new_") or name.endswith("_like")
        self._arguments: list[tuple[int, str, bool, bool]] = []  # where, by which name, read, written
        places = {}
        for index, argument in enumerate(schema.arguments):
            alias = argument.alias_info
            writes = alias is not None and alias.is_write
            reads = not ignores and not (writes and (argument.is_out or name in _OVERWRITES))
            self._arguments.append((index, argument.name, reads, writes))
            if alias is not None:
                places[frozenset(alias.before_set)] = index, argument.name
        aliases = [] if self.needs_no_memory else [value.alias_info for value in schema.returns if value.alias_info]
        self._returned = [places[frozenset(alias.before_set)] for alias in aliases]

    def uses(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[_Use]:
        uses: list[_Use] = []
        for index, name, reads, writes in self._arguments:
            if self.name == "native_batch_norm" and name in ("running_mean", "running_var"):
                writes = bool(args[5])  # `training`: the schema does not tell
            uses += [(tensor, reads, writes) for tensor in _tensors(_argument(args, kwargs, index, name))]
        return uses

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The arguments that it returns, if it is in place or has an `out`."""
        return [_argument(args, kwargs, *place) for place in self._returned]


_op_of = functools.cache(_Op)


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str) -> Any:
    return args[index] if index < len(args) else kwargs.get(name)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True, slots=True)
class _Layout:
    """All of a dense tensor but its memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int


@functools.cache
def _dense(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> _Layout:
    """The layout of what torch makes for a result that is like a tensor with this shape and these strides."""
    layout = torch.empty_like(torch.empty_strided(shape, stride, dtype=dtype, device="meta"))
    return _Layout(tuple(layout.shape), layout.stride(), dtype, layout.nbytes)


_NO_OUTPUTS: tuple[list[Any], Any] = tree_flatten([])
_fake = FakeTensorMode(allow_fallback_kernels=False)
_predicted: dict[Any, tuple[list[Any], Any] | None] = {}


def _predict(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any] | None:
    """The outputs, with layouts instead of tensors, and their structure; None where only the kernel can tell."""
    key = func, _frozen(args), _frozen(kwargs), torch.get_default_dtype()
    if key not in _predicted:
        outputs = _fake_outputs(func, args, kwargs)
        leaves, structure = tree_flatten(outputs)
        layouts = [
            _dense(leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
        ]
        _predicted[key] = None if outputs is None else (layouts, structure)
    return _predicted[key]


def _frozen(value: Any) -> Any:
    """What an argument tells about outputs: hashable, and equal only for what is the same."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return type(value), *map(_frozen, value)
    if isinstance(value, dict):
        return tuple((name, _frozen(each)) for name, each in value.items())
    return type(value), value


def _fake_outputs(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The outputs as tensors without memory, or None where only the kernel can tell."""
    if func is torch.ops.aten.mkldnn_rnn_layer.default:
        return None  # an LSTM's workspace: torch thinks that it is empty

    def shape(value: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")

    # Not meta tensors: some outputs have another dtype or shape on the CPU (the statistics of bf16 layer_norm).
    with torch.inference_mode(False), torch.no_grad(), _fake:
        args, kwargs = tree_map_only(torch.Tensor, shape, (args, kwargs))
        try:
            return func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException):
            return None


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last (exclusive) address that the tensor can reach; for strided tensors the gaps count too."""
    if not tensor.numel():
        return 0, 0
    if tensor.is_contiguous():
        return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + int(last + 1) * tensor.itemsize


def _view(storage: torch.UntypedStorage, offset_bytes: int, like: torch.Tensor) -> torch.Tensor:
    view = _place(storage, offset_bytes, like.shape, like.stride(), like.dtype)
    view = view.conj() if like.is_conj() else view
    return view._neg_view() if like.is_neg() else view


def _place(
    storage: torch.UntypedStorage,
    offset_bytes: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    view = torch.empty(0, dtype=dtype, device="cpu")
    return view.set_(storage, offset_bytes // dtype.itemsize, shape, stride)


if hasattr(os, "register_at_fork"):  # no thread is in the middle of a call then: in the child the lock would stay taken
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


@contextlib.contextmanager
def use_simulated_device(device: SimulatedDevice) -> Iterator[SimulatedDevice]:
    """Make `backend_for("cpu")` return `device`. At the end all work runs, and an error that was swallowed is raised.

    Tests that expect an error inside clear `device.errors`.
    """
    cpu = torch.device("cpu")
    previous = backends._backends.get(cpu)
    backends._backends[cpu] = device
    try:
        yield device
        device.synchronize()
    finally:
        if previous is None:
            del backends._backends[cpu]
        else:
            backends._backends[cpu] = previous
    if device.errors:
        raise device.errors[0]
