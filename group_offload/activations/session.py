"""Saved-tensor hooks: what is offloaded when autograd saves it, and brought back when backward comes near.

[Note: Hooks]
The hooks are pushed once, around the root's forward; modules inside only mark that a group begins. Hooks of a checkpoint
that runs inside lie over ours, as they must: what it recomputes is none of our business. Whatever runs in backward
(recomputation, backward of backward) is left alone. What autograd gets instead of a tensor owns the bytes: a graph that
is dropped frees them, in RAM, in the file and on the device, without being told.

What follows the last call of a group counts as that group's: so what a checkpoint around the next group saves, its
input, is offloaded too.

[Note: Interrupts of activation offloading]
Ctrl-C, or an error that nothing here expects, may break off a lane's work between any two steps. Nobody can tell then
which of its bytes are where. So all work is done through `Session._do`: it waits for the copies that are under way, before
anything that they use is let go of, gives the lanes up, and lets all stashes go of their bytes. The next pass gets new
lanes. A graph that has lost a stash refuses its backward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

from ..base.device import Backend, Stream, backend_for
from ..base.saved import Kept, Pack, Passed, Unpack, hooks_in_force, keep, unwatched
from ..base.torch_internals import are_saved_tensors_hooks_enabled, current_graph_task_id, current_transform
from ..errors import GroupOffloadError, StateError
from .config import ActivationConfig
from .counters import ActivationCounters
from .lane import Lane
from .packed import PackedView
from .stash import Stash, StashState
from .tape import Tape
from .trace import ActivationTrace

_READ_AHEAD = 2
"""Groups that are read from the file beyond those that are brought to the device."""
_ALIGNMENT = 256
"""A part of a storage begins at a multiple of this, as its memory does: some kernels round by alignment."""

_EXPECTED = (GroupOffloadError, torch.OutOfMemoryError)
"""What may be raised in the middle of a lane's work, and leaves it in order."""

T = TypeVar("T")
_threads = threading.local()


class no_activation_offloading:
    """Leave on the device what is saved for backward inside the `with` block, in this thread.

    Example:
        >>> with no_activation_offloading():
        ...     loss = head(features)
    """

    def __enter__(self) -> None:
        _threads.num_off = getattr(_threads, "num_off", 0) + 1

    def __exit__(self, *exception: object) -> None:
        _threads.num_off -= 1


class Session:
    """Activation offloading of one root module, as long as it or any graph that it made lives."""

    def __init__(self, config: ActivationConfig, num_groups: int) -> None:
        self.config = config
        self.counters = ActivationCounters()
        self._lock = threading.RLock()  # backward has a thread for each device
        self._lanes: dict[torch.device, Lane] = {}
        self._tapes: weakref.WeakSet[Tape] = weakref.WeakSet()
        """The passes whose graphs are alive, and those whose forward runs."""
        self._is_whole = True
        """Whether no thread is in the middle of a lane's work, or was when something broke it off."""
        self._expected = num_groups
        self._thread = threading.local()
        self._title: str | None = None
        """Of the trace that is recorded."""

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return tuple(self._lanes.values())

    def settle(self) -> tuple[Lane, ...]:
        """The lanes, with all that graphs gave up taken back."""
        return self._do(self._settle)

    def _settle(self) -> tuple[Lane, ...]:
        for lane in self._lanes.values():
            lane.settle()
        return self.lanes

    def begin_trace(self, title: str) -> None:
        """
        Raises:
            StateError: a trace is being recorded.
        """
        self._do(self._begin_trace, title)

    def _begin_trace(self, title: str) -> None:
        if self._title is not None:
            raise StateError("A trace of this module's activations is being recorded already. End that one first.")
        self._title = title
        for lane in self._lanes.values():
            lane.trace(self._tracer(lane))

    def end_trace(self) -> list[ActivationTrace]:
        """The traces of all devices."""
        return self._do(self._end_trace)

    def _end_trace(self) -> list[ActivationTrace]:
        self._title = None
        found = []
        for lane in self._lanes.values():
            if lane.tracer is not None:
                lane.tracer.reach(None, lane.backend.current_stream())
                found.append(lane.tracer)
            lane.trace(None)
        return found

    def _tracer(self, lane: Lane) -> ActivationTrace | None:
        return None if self._title is None else ActivationTrace(lane.backend, f"{self._title} on {lane.backend.device}")

    def close(self) -> None:
        """No forward is seen any more: what copies to RAM hold on the device is let go."""
        self.end()
        self._do(self._close)

    def _close(self) -> None:
        for lane in self._lanes.values():
            lane.close()

    def _do(self, work: Callable[..., T], *args: object) -> T:
        """Call what works on lanes, one thread at a time. See [Note: Interrupts of activation offloading]."""
        with self._lock:
            if not self._is_whole:
                self._give_up()
            self._is_whole = False
            try:
                result = work(*args)
            except _EXPECTED:
                self._is_whole = True
                raise
            except BaseException:
                self._give_up()  # now: once this is raised, what the frames below hold goes
                raise
            self._is_whole = True
            return result

    def _give_up(self) -> None:
        for lane in self._lanes.values():
            lane.give_up()
        for tape in self._tapes:
            tape.lose()
        self._lanes = {}
        self._is_whole = True

    def begin(self, root: nn.Module) -> None:
        """The root's forward begins in this thread."""
        if current_graph_task_id() != -1:
            return
        if current_transform() is not None:
            return  # transforms of torch.func refuse saved-tensor hooks
        if not are_saved_tensors_hooks_enabled():
            return  # nor does `torch.autograd.graph.disable_saved_tensors_hooks` let them
        if self._pass is not None:  # it was interrupted where no hook could run
            self.end()
        outer = hooks_in_force()
        if outer is not None and _lowest(outer[0]).__module__ == checkpoint.__name__:
            return  # the root as a whole is recomputed: it saves nothing, and ours would hide that from the checkpoint
        if torch.is_grad_enabled():
            weights = [tensor for tensor in _tensors_of(root) if type(tensor) in (torch.Tensor, nn.Parameter)]
            devices = {weight.device for weight in weights if self.config.offloads(weight.device)}
            tape = Tape(self._expected)
            self._do(self._begin, tape, devices)
            current = self._thread.current = _Pass(self, tape, weights, outer)
            current.open()
            self.counters.passes += 1

    def _begin(self, tape: Tape, devices: Iterable[torch.device]) -> None:
        self._tapes.add(tape)
        for device in devices:
            self._lane(device)

    def end(self) -> None:
        """The root's forward is over, whichever way."""
        current = self._pass
        if current is None or current_graph_task_id() != -1:
            return
        current.close()
        self._thread.current = None
        for lane in self.settle():
            if lane.tracer is not None:
                lane.tracer.reach(None, lane.backend.current_stream())

    def enter(self, name: str) -> None:
        """The call of a group begins."""
        current = self._pass
        if current is None or current_graph_task_id() != -1:
            return
        self._do(self._enter, current.tape, name)

    def _enter(self, tape: Tape, name: str) -> None:
        tape.begin_group(name)
        for lane in self._lanes.values():
            if lane.tracer is not None:
                lane.tracer.reach(name, lane.backend.current_stream())
            lane.tick()
            lane.write_ahead()
        # A pass that is longer than expected: what was kept for its last groups is not needed first.
        while tape.num_decided <= tape.position - self.config.keep_last:
            for stash in [*tape.at(tape.num_decided)][::-1]:
                if stash.state is StashState.ON_DEVICE:
                    self._lanes[stash.device].send(stash)
            tape.num_decided += 1

    def complete(self, tape: Tape) -> None:
        """A forward came to its end: the next one is expected to be as long."""
        if tape.stashes:
            self._expected = len(tape.stashes)

    # Pack

    def pack(self, tensor: torch.Tensor) -> Kept | Passed | PackedView:
        current = self._pass
        if current is None:
            return keep(tensor, None)
        if not self._moves(tensor, current):
            return keep(tensor, current.outer)
        start, end = self._part_of(tensor)
        if end - start < max(self.config.min_bytes, 1):
            return keep(tensor, current.outer)
        if self.config.skip is not None and self.config.skip(tensor, current.tape.names[-1]):
            return keep(tensor, current.outer)
        return self._do(self._stash, tensor, start, end, current)

    def _moves(self, tensor: torch.Tensor, current: _Pass) -> bool:
        return (
            type(tensor) is torch.Tensor
            and tensor.layout is torch.strided
            # Most that autograd saves is small, or a weight: this comes first. (One that repeats itself is measured below.)
            and (tensor.nbytes >= self.config.min_bytes or not tensor.is_contiguous())
            and current.tape.position >= 0
            and self.config.offloads(tensor.device)
            and current_graph_task_id() == -1
            and not getattr(_threads, "num_off", 0)
            and not tensor.is_quantized
            and not tensor.is_nested
            and not tensor.is_conj()
            and not tensor.is_neg()
            and not tensor._is_zerotensor()  # what forward-mode differentiation has for zeros: without memory
            and not current.is_weight(tensor)
        )

    def _part_of(self, tensor: torch.Tensor) -> tuple[int, int]:
        """The bytes of its storage that are moved: the first, and the last (exclusive). Nothing if they are too few."""
        start, end = extent(tensor)
        if end - start < self.config.min_bytes:
            return 0, 0
        # The version counts changes of what this is a view of. Not of the whole storage: what `unsafe_chunk` gives (a GRU's
        # gates) shares that, and is changed in place part by part, each with a counter of its own.
        if tensor._base is not None:
            counted = extent(tensor._base)
            if counted[1] - counted[0] <= 2 * (end - start):
                return counted
        return start, end

    def _stash(self, tensor: torch.Tensor, start: int, end: int, current: _Pass) -> PackedView:
        tape, counters = current.tape, self.counters
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor._version, start, end - start
        counters.saved_tensors += 1
        is_last = tape.position >= tape.expected - self.config.keep_last
        stash = tape.find(key)
        if stash is not None:
            counters.shared_tensors += 1
            tape.mark(stash)
            if is_last:
                self._lanes[stash.device].keep(stash, _alias(tensor, start, end))
            return PackedView(tensor, stash, start, tape)
        lane = self._lane(tensor.device)
        stream = lane.backend.current_stream()
        home = current.home(lane.backend)
        streams = [stream] if stream == home else [stream, home]
        stash = Stash(tape.names[-1], _alias(tensor, start, end), streams, lane.dead)
        tape.add(key, storage, stash)
        tape.mark(stash)
        if is_last:
            counters.kept_bytes += stash.num_bytes
        else:
            lane.send(stash)
        return PackedView(tensor, stash, start, tape)

    def _lane(self, device: torch.device) -> Lane:
        lane = self._lanes.get(device)
        if lane is None:
            lane = self._lanes[device] = Lane(backend_for(device), self.config, self.counters)
            lane.trace(self._tracer(lane))
        return lane

    # Unpack

    def unpack(self, packed: Kept | Passed | PackedView) -> torch.Tensor:
        if not isinstance(packed, PackedView):
            return packed.unpack()
        packed.check()
        return self._do(self._restore, packed)

    def _restore(self, packed: PackedView) -> torch.Tensor:
        stash = packed.stash
        if stash.state is StashState.LOST:
            raise StateError(
                "An interrupt broke off the forward or the backward of this graph, or of another one of the same module, while "
                "activations were on their way: what this graph saved is lost. Call the forward again, then its backward."
            )
        lane = self._lanes[stash.device]
        stream = lane.backend.current_stream()
        if packed.tape.reached != packed.position:
            self._arrive(packed, lane, stream)
        return packed.view(lane.restore(stash, stream))

    def _arrive(self, packed: PackedView, lane: Lane, stream: Stream) -> None:
        """Backward came to a group, on `stream` of `lane`: bring the rest of it, and what comes after it."""
        tape, position = packed.tape, packed.position
        tape.reached = position
        for each in self._lanes.values():
            if each.tracer is not None:
                on = stream if each is lane else each.backend.current_stream()
                each.tracer.reach(f"{tape.names[position]} (backward)", on)
            each.tick()
        for past in [other for other in tape.fetched if other > position + 1]:
            tape.fetched.discard(past)
            for stash in tape.at(past):
                if min(stash.positions) > position + 1:
                    self._lanes[stash.device].evict(stash)
        here = dict.fromkeys((packed.stash, *tape.at(position)))
        self.counters.stalls += sum(len(found) for found in self._fetch(here, lane, stream))
        tape.fetched.add(position)
        num_ahead = 0
        for ahead in range(position - 1, -1, -1):
            stashes = [*tape.at(ahead)]
            num_ahead += bool(stashes)  # a group may have saved nothing: it computes nothing to hide a copy behind
            if num_ahead <= self.config.prefetch:
                self._fetch(stashes, lane, stream)
                tape.fetched.add(ahead)
            elif num_ahead <= self.config.prefetch + _READ_AHEAD:
                for stash in stashes:
                    self._lanes[stash.device].read_ahead([stash])
            else:
                break

    def _fetch(self, stashes: Iterable[Stash], lane: Lane, stream: Stream) -> list[list[Stash]]:
        by_lane: dict[Lane, list[Stash]] = {}
        for stash in stashes:
            by_lane.setdefault(self._lanes[stash.device], []).append(stash)
        return [
            each.fetch(mine, stream if each is lane else each.backend.current_stream())
            for each, mine in by_lane.items()
        ]

    @property
    def _pass(self) -> _Pass | None:
        return getattr(self._thread, "current", None)


class _Pass:
    """A forward of the root in one thread: the hooks are pushed as long as it is open."""

    def __init__(
        self, session: Session, tape: Tape, weights: Sequence[torch.Tensor], outer: tuple[Pack, Unpack] | None
    ) -> None:
        self._session = session
        self.tape = tape
        self.outer = outer
        """The hooks that ours are pushed over."""
        self._homes = {lane.backend: lane.backend.current_stream() for lane in session.lanes}
        self._weights = {weight.untyped_storage()._cdata for weight in weights}
        self._hooks = saved_tensors_hooks(unwatched(session.pack), unwatched(session.unpack))

    def open(self) -> None:
        self._hooks.__enter__()

    def close(self) -> None:
        top = hooks_in_force()
        if top is not None and top[0] is self._hooks.pack_hook:  # else an interrupt left others behind
            self._hooks.__exit__()
        self._session.complete(self.tape)
        self.tape.end()

    def home(self, backend: Backend) -> Stream:
        """The stream that the pass began on, on the backend's device."""
        found = self._homes.get(backend)
        if found is None:
            found = self._homes[backend] = backend.current_stream()
        return found

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is a parameter or buffer, a view of one, or autocast's copy of one: they stay anyway.

        FSDP2 frees the memory of gathered parameters and gathers them again, in the same storage.
        """
        base = tensor if tensor._base is None else tensor._base
        if type(base) is not torch.Tensor and isinstance(base, nn.Parameter):
            return True
        if base.untyped_storage()._cdata in self._weights:
            return True
        made_by = base.grad_fn
        if made_by is None or made_by.name() != "ToCopyBackward0":
            return False
        return isinstance(getattr(made_by.next_functions[0][0], "variable", None), nn.Parameter)


def _tensors_of(root: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers. For each forward: `Module.parameters()` takes longer."""
    seen = {root}
    modules = [root]
    while modules:
        module = modules.pop()
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                yield tensor
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                modules.append(child)


def _alias(tensor: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Bytes of the tensor's storage, without its graph."""
    alias = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return alias.set_(tensor.untyped_storage(), start, (end - start,), (1,))


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The first and last (exclusive) byte of its storage that a tensor reaches, the first one rounded down."""
    if not tensor.numel():
        return 0, 0
    first = int(tensor.storage_offset()) * tensor.itemsize
    if tensor.is_contiguous():
        return first - first % _ALIGNMENT, first + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return first // _ALIGNMENT * _ALIGNMENT, first + (int(last) + 1) * tensor.itemsize


def _lowest(pack: Pack) -> Pack:
    """The hook that all that this one leaves alone ends up with."""
    while getattr(pack, "below", None) is not None:
        pack = pack.below  # type: ignore[attr-defined]
    return pack
