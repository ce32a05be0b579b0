"""The session of one root module: what is offloaded when autograd saves it, and brought back when backward comes near.

[Note: Hooks of activation offloading]
The hooks are pushed once, around the root's forward. The gates of modules inside only say that a group begins. Hooks of a
checkpoint that runs inside lie over ours, as they must: ours never see what it recomputes. Everything that runs in backward
(recomputation, backward of backward) is left alone. The object that autograd gets instead of a tensor owns the bytes: a graph
that is dropped frees them, in RAM, in the file and on the device, without being told.

Tensors that are saved after the last call of a group count as that group's. So the input of a checkpoint around the next
group, which the checkpoint saves, is offloaded too.

[Note: Interrupts of activation offloading]
Ctrl-C, or an error that is not expected here, may break off an offloader's work between any two steps. Then it is not known
which of its bytes are where. So all work is done in methods that are `_guarded`. After such a break the guard waits for the
copies that are under way, before anything that they use is freed. It gives the offloaders up, and marks all stashes as lost,
which frees their bytes. The next pass gets new offloaders. A graph that has lost a stash refuses its backward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import nn
from torch.utils import checkpoint

from ..base.device import Stream, backend_for
from ..base.saved import Kept, Passed, hooks_in_force, keep
from ..base.torch_internals import (
    are_saved_tensors_hooks_enabled,
    current_graph_task_id,
    current_transform,
    num_autograd_nodes,
)
from ..errors import GroupOffloadError, StateError
from .config import ActivationConfig
from .counters import ActivationCounters
from .forward import Forward, lowest, weights_of
from .offloader import DeviceOffloader
from .packed import PackedView
from .parts import bytes_of, moved_part
from .stash import Stash, StashState
from .tape import Tape
from .trace import ActivationTrace

_READ_AHEAD = 2
"""Groups that are read from the file beyond those that are brought to the device."""

_EXPECTED = (GroupOffloadError, torch.OutOfMemoryError)
"""Errors that may be raised in the middle of an offloader's work, and leave it in order."""

P = ParamSpec("P")
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


def _guarded(work: Callable[Concatenate[Session, P], T]) -> Callable[Concatenate[Session, P], T]:
    """A method that works with offloaders, for one thread at a time. It calls no other method that is guarded.

    See [Note: Interrupts of activation offloading].
    """

    @wraps(work)
    def call(session: Session, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with session._lock:
            if not session._is_whole:
                session._give_up()
            session._is_whole = False
            try:
                result = work(session, *args, **kwargs)
            except _EXPECTED:
                session._is_whole = True
                raise
            except BaseException:
                session._give_up()  # before this is raised, which drops the locals of the frames below
                raise
            session._is_whole = True
            return result

    return call


class Session:
    """Activation offloading of one root module. It lives as long as its hooks, or any graph that was recorded under them."""

    def __init__(self, config: ActivationConfig, num_groups: int) -> None:
        self.config = config
        self.counters = ActivationCounters()
        self._lock = threading.RLock()  # backward has a thread for each device
        self._offloaders: dict[torch.device, DeviceOffloader] = {}
        self._tapes: weakref.WeakSet[Tape] = weakref.WeakSet()
        """The tapes of forwards that run, and of graphs that are alive."""
        self._is_whole = True
        """Whether no thread is in the middle of an offloader's work, or was when an error broke it off."""
        self._expected = num_groups
        self._thread = threading.local()
        self._title: str | None = None
        """The title of the trace that is recorded."""

    @property
    def offloaders(self) -> tuple[DeviceOffloader, ...]:
        return tuple(self._offloaders.values())

    @_guarded
    def settle(self) -> tuple[DeviceOffloader, ...]:
        """The offloaders, with everything taken back that dropped graphs left behind."""
        for offloader in self.offloaders:
            offloader.settle()
        return self.offloaders

    def close(self) -> None:
        """Free the device memory that copies to RAM hold. No forward is seen any more."""
        self.end()
        self._close()

    @_guarded
    def _close(self) -> None:
        for offloader in self.offloaders:
            offloader.close()

    def _give_up(self) -> None:
        for offloader in self.offloaders:
            offloader.give_up()
        for tape in self._tapes:  # only now that no copy is under way
            tape.lose()
        self._offloaders = {}
        self._is_whole = True

    def _offloader(self, device: torch.device) -> DeviceOffloader:
        found = self._offloaders.get(device)
        if found is None:
            found = self._offloaders[device] = DeviceOffloader(backend_for(device), self.config, self.counters)
            self._trace(found)
        return found

    # Traces

    @_guarded
    def begin_trace(self, title: str) -> None:
        """
        Raises:
            StateError: a trace is being recorded.
        """
        if self._title is not None:
            raise StateError("A trace of this module's activations is being recorded already. End that one first.")
        self._title = title
        for offloader in self.offloaders:
            self._trace(offloader)

    def _trace(self, offloader: DeviceOffloader) -> None:
        if self._title is not None:
            offloader.set_trace(ActivationTrace(offloader.backend, f"{self._title} on {offloader.backend.device}"))

    @_guarded
    def end_trace(self) -> list[ActivationTrace]:
        """The traces of all devices."""
        self._title = None
        found = []
        for offloader in self.offloaders:
            if offloader.trace is not None:
                offloader.trace.reach(None, offloader.backend.current_stream())
                found.append(offloader.trace)
            offloader.set_trace(None)
        return found

    # Forward

    def begin(self, root: nn.Module) -> None:
        """The root's forward begins in this thread."""
        if current_graph_task_id() != -1:
            return
        if current_transform() is not None:
            return  # transforms of torch.func refuse saved-tensor hooks
        if not are_saved_tensors_hooks_enabled():
            return  # so does `torch.autograd.graph.disable_saved_tensors_hooks`
        if self._forward is not None:  # it was interrupted where no hook could run
            self.end()
        outer = hooks_in_force()
        if outer is not None and lowest(outer[0]).__module__ == checkpoint.__name__:
            return  # the root as a whole is recomputed: it saves nothing, and ours would hide that from the checkpoint
        if torch.is_grad_enabled():
            weights = weights_of(root)
            tape = Tape(self._expected)
            self._begin(tape, {weight.device for weight in weights})
            current = self._thread.current = Forward(tape, weights, self.pack, self.unpack, outer)
            current.open([offloader.backend for offloader in self.offloaders])
            self.counters.passes += 1

    @_guarded
    def _begin(self, tape: Tape, devices: Iterable[torch.device]) -> None:
        self._tapes.add(tape)
        for device in devices:
            if self.config.offloads(device):
                self._offloader(device)

    def end(self) -> None:
        """The root's forward is over, whichever way."""
        current = self._forward
        if current is None or current_graph_task_id() != -1:
            return
        if current.tape.stashes:
            self._expected = len(current.tape.stashes)  # the next forward is expected to be as long
        current.close()
        self._thread.current = None
        self._send_unfilled(current)
        for offloader in self.settle():
            if offloader.trace is not None:
                offloader.trace.reach(None, offloader.backend.current_stream())

    def enter(self, name: str) -> None:
        """The call of a group begins."""
        current = self._forward
        if current is None or current_graph_task_id() != -1:
            return
        self._send_unfilled(current)
        self._enter(current.tape, name)

    @_guarded
    def _enter(self, tape: Tape, name: str) -> None:
        tape.begin_group(name)
        for offloader in self.offloaders:
            if offloader.trace is not None:
                offloader.trace.reach(name, offloader.backend.current_stream())
            offloader.begin_group()
            offloader.write_ahead()
        # A pass that is longer than expected: backward does not first need the groups that were kept as its last.
        while tape.num_decided <= tape.position - self.config.keep_last:
            for stash in [*tape.at(tape.num_decided)][::-1]:
                if stash.state is StashState.ON_DEVICE:
                    self._offloaders[stash.device].offload(stash)
            tape.num_decided += 1

    @property
    def _forward(self) -> Forward | None:
        return getattr(self._thread, "current", None)

    # Pack

    def pack(self, tensor: torch.Tensor) -> Kept | Passed | PackedView:
        current = self._forward
        if current is None:
            return keep(tensor, None)
        if current.unfilled and num_autograd_nodes() != current.unfilled_by:
            self._send_unfilled(current)
        if not self._moves(tensor, current):
            return keep(tensor, current.outer)
        start, end = moved_part(tensor, self.config.min_bytes)
        if end - start < max(self.config.min_bytes, 1):
            return keep(tensor, current.outer)
        if self.config.skip is not None and self.config.skip(tensor, current.tape.names[-1]):
            return keep(tensor, current.outer)
        return self._stash(tensor, start, end, current)

    def _moves(self, tensor: torch.Tensor, current: Forward) -> bool:
        return (
            type(tensor) is torch.Tensor
            and tensor.layout is torch.strided
            # Most tensors that autograd saves are small, or weights: this comes first. (One that repeats itself is measured
            # in `moved_part`.)
            and (tensor.nbytes >= self.config.min_bytes or not tensor.is_contiguous())
            and current.tape.position >= 0
            and self.config.offloads(tensor.device)
            and current_graph_task_id() == -1
            and not getattr(_threads, "num_off", 0)
            and not tensor.is_quantized
            and not tensor.is_nested
            and not tensor.is_conj()
            and not tensor.is_neg()
            and not tensor._is_zerotensor()  # the zeros of forward-mode differentiation have no memory
            and not current.is_weight(tensor)
        )

    @_guarded
    def _stash(self, tensor: torch.Tensor, start: int, end: int, current: Forward) -> PackedView:
        tape, counters = current.tape, self.counters
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor._version, start, end - start
        counters.saved_tensors += 1
        is_last = tape.position >= tape.expected - self.config.keep_last
        offloader = self._offloader(tensor.device)
        stash = tape.find(key)
        if stash is not None:
            counters.shared_tensors += 1
            tape.mark(stash)
            if is_last:
                offloader.keep(stash, bytes_of(tensor, start, end))
            return PackedView(tensor, stash, start, tape)
        stream = offloader.backend.current_stream()
        home = current.home(offloader.backend, stream)
        streams = [stream] if stream == home else [stream, home]
        memory = bytes_of(tensor, start, end)
        stash = Stash(tape.names[-1], memory, streams, offloader.dead, tensor.device, end - start)
        tape.add(key, storage, stash)
        tape.mark(stash)
        if is_last:
            counters.kept_bytes += stash.num_bytes
        elif tensor.grad_fn is None and not tensor.requires_grad:
            # No operation that was recorded has made it. The one that saves it may be about to fill it (`rrelu` saves its
            # noise before it draws it), so its copy has to come behind that one.
            current.unfilled.append(stash)
            current.unfilled_by = num_autograd_nodes()
        else:
            offloader.offload(stash)
        return PackedView(tensor, stash, start, tape)

    def _send_unfilled(self, current: Forward) -> None:
        """Offload what waited for the operation that saved it. That one is enqueued by now."""
        if current.unfilled:
            stashes, current.unfilled = current.unfilled, []
            self._offload(stashes)

    @_guarded
    def _offload(self, stashes: Sequence[Stash]) -> None:
        for stash in stashes:
            if stash.state is StashState.ON_DEVICE:
                self._offloaders[stash.device].offload(stash)

    # Unpack

    def unpack(self, packed: Kept | Passed | PackedView) -> torch.Tensor:
        if not isinstance(packed, PackedView):
            return packed.unpack()
        packed.check()
        return self._restore(packed)

    @_guarded
    def _restore(self, packed: PackedView) -> torch.Tensor:
        stash = packed.stash
        if stash.state is StashState.LOST:
            raise StateError(
                "An interrupt broke off the forward or the backward of this graph, or of another one of the same module, while "
                "activations were on their way: what this graph saved is lost. Call the forward again, then its backward."
            )
        offloader = self._offloaders[stash.device]
        stream = offloader.backend.current_stream()
        if packed.tape.reached != packed.position:
            self._arrive(packed, offloader, stream)
        return packed.view(offloader.restore(stash, stream))

    def _arrive(self, packed: PackedView, offloader: DeviceOffloader, stream: Stream) -> None:
        """Backward came to a group, on `stream` of `offloader`: bring the rest of the group, and those that come next."""
        tape, position = packed.tape, packed.position
        tape.reached = position
        for each in self.offloaders:
            if each.trace is not None:
                on = stream if each is offloader else each.backend.current_stream()
                each.trace.reach(f"{tape.names[position]} (backward)", on)
            each.begin_group()
        for past in [other for other in tape.fetched if other > position + 1]:
            tape.fetched.discard(past)
            for stash in tape.at(past):
                if min(stash.positions) > position + 1:
                    self._offloaders[stash.device].evict(stash)
        here = dict.fromkeys((packed.stash, *tape.at(position)))
        self.counters.stalls += self._fetch(here, offloader, stream)
        tape.fetched.add(position)
        num_ahead = 0
        for ahead in range(position - 1, -1, -1):
            stashes = [*tape.at(ahead)]
            num_ahead += bool(stashes)  # a group may have saved nothing: it computes nothing to hide a copy behind
            if num_ahead <= self.config.prefetch:
                self._fetch(stashes, offloader, stream)
                tape.fetched.add(ahead)
            elif num_ahead <= self.config.prefetch + _READ_AHEAD:
                for stash in stashes:
                    self._offloaders[stash.device].host.read_ahead([stash])
            else:
                break

    def _fetch(self, stashes: Iterable[Stash], offloader: DeviceOffloader, stream: Stream) -> int:
        """Start to bring stashes back, on each device. Returns how many were not there."""
        by_offloader: dict[DeviceOffloader, list[Stash]] = {}
        for stash in stashes:
            by_offloader.setdefault(self._offloaders[stash.device], []).append(stash)
        return sum(
            each.fetch(mine, stream if each is offloader else each.backend.current_stream())
            for each, mine in by_offloader.items()
        )
