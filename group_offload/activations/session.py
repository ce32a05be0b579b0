"""The session of one root module: what is offloaded when autograd saves it, and fetched when backward comes near.

[Note: Hooks of activation offloading]
The hooks are pushed once, around the root's forward. The gates of modules inside only say that a group begins. Hooks of a
checkpoint that runs inside lie over ours, as they must: ours never see what it recomputes. Everything that runs in backward
(recomputation, backward of backward) is left alone. The object that autograd gets in place of a tensor owns the bytes: a
graph that is dropped frees them, in host memory and on the device, without being told.

Tensors that are saved after the last call of a group count as that group's. So the input of a checkpoint around the next
group, which the checkpoint saves, is offloaded too.

What a group saves is offloaded once `keep_last` groups have begun after it, one at least. So the last groups stay, however long
the forward is, and copies are enqueued behind all operations that saved (some fill a tensor after autograd has saved it:
`rrelu` saves its noise before it draws it). What a later group saves again counts as that group's.

[Note: Interrupts of activation offloading]
Ctrl-C, or an error that isn't expected here, may break off an offloader's work between any two steps. Then nobody knows which
of its bytes are where. So all work is done in methods that are `_guarded`. After such a break the guard waits for the copies
that are under way, before anything that they use is freed. It abandons the offloader and marks all stashes as lost, which
frees their bytes. The next forward gets a new offloader. A graph that has lost a stash refuses its backward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import nn
from torch.utils import checkpoint

from ..base.device import Stream, backend_for
from ..base.saved import Kept, Passed, hooks_in_force, keep
from ..base.torch_internals import are_saved_tensors_hooks_enabled, current_graph_task_id, current_transform
from ..errors import GroupOffloadError, ModuleError, StateError
from .config import ActivationConfig
from .offloader import DeviceOffloader, Stash, StashState
from .packed import PackedView, bytes_of, needed_part
from .stats import ActivationStats
from .tape import Tape, lowest, weights_of

_EXPECTED = (GroupOffloadError, torch.OutOfMemoryError)
"""Errors that may be raised in the middle of an offloader's work, and leave it in order."""

P = ParamSpec("P")
T = TypeVar("T")


def _guarded(work: Callable[Concatenate[Session, P], T]) -> Callable[Concatenate[Session, P], T]:
    """A method that works with the offloader, for one thread at a time. It calls no other method that is guarded.

    See [Note: Interrupts of activation offloading].
    """

    @wraps(work)
    def call(session: Session, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with session._lock:
            if not session._is_whole:
                session._abandon()
            session._is_whole = False
            try:
                result = work(session, *args, **kwargs)
            except _EXPECTED:
                session._is_whole = True
                raise
            except BaseException:
                session._abandon()  # before this is raised, which drops the locals of the frames below
                raise
            session._is_whole = True
            return result

    return call


class _Current(threading.local):
    tape: Tape | None = None
    """That of the root's forward that runs in this thread."""


class Session:
    """Activation offloading of one root module. It lives as long as its hooks, or any graph that was recorded under them."""

    def __init__(self, config: ActivationConfig, title: str) -> None:
        """
        Args:
            title: What messages call the root.
        """
        self._config = config
        self._title = title
        self._stats = ActivationStats()
        self._lock = threading.RLock()  # autograd runs backward in a thread of its own
        self._offloader: DeviceOffloader | None = None
        """None until the first forward whose device is known, and after an interrupt."""
        self._tapes: weakref.WeakSet[Tape] = weakref.WeakSet()
        """The tapes of forwards that run, and of graphs that are alive."""
        self._is_whole = True
        """No thread is in the middle of the offloader's work, or was when an error broke it off."""
        self._current = _Current()

    @_guarded
    def stats(self) -> ActivationStats:
        """The counts so far, once what dropped graphs left behind is freed."""
        if self._offloader is not None:
            self._offloader.clean_up()
        return replace(self._stats)

    def close(self) -> None:
        """Free the device memory that copies to host memory hold. No forward is seen any more."""
        self.end()
        self._close()

    @_guarded
    def _close(self) -> None:
        if self._offloader is not None:
            self._offloader.free_offloaded()

    def _abandon(self) -> None:
        if self._offloader is not None:
            self._offloader.abandon()
        for tape in self._tapes:  # only now that no copy is under way
            tape.lose()
        self._offloader = None
        self._is_whole = True

    def _offloader_on(self, device: torch.device) -> DeviceOffloader:
        """
        Raises:
            ModuleError: there is one already, on another device.
        """
        if self._offloader is None:
            self._offloader = DeviceOffloader(backend_for(device), self._stats)
        elif self._offloader.backend.device != device:
            raise ModuleError(
                f"{self._title} runs on {self._offloader.backend.device} and on {device}, and activation offloading serves one "
                f"device. Pass device='{device}' to offload from that one only. If you moved the model, call remove() of the "
                f"handle and apply again."
            )
        return self._offloader

    # Forward

    def begin(self, root: nn.Module) -> None:
        """The root's forward begins in this thread.

        Raises:
            ModuleError: its weights are on several accelerators.
        """
        if current_graph_task_id() != -1:
            return
        if current_transform() is not None or not are_saved_tensors_hooks_enabled():
            return  # transforms of torch.func refuse saved-tensor hooks, and `disable_saved_tensors_hooks` does
        if self._current.tape is not None:  # it was interrupted where no hook could run
            self.end()
        outer = hooks_in_force()
        if outer is not None and lowest(outer[0]).__module__ == checkpoint.__name__:
            return  # the root as a whole is recomputed: it saves nothing, and ours would hide that from the checkpoint
        if not torch.is_grad_enabled():
            return
        weights = weights_of(root)
        tape = Tape(outer)
        self._begin(tape, {weight.device for weight in weights})
        self._current.tape = tape
        tape.open(weights, self.pack, self.unpack)
        self._stats.passes += 1

    @_guarded
    def _begin(self, tape: Tape, devices: Iterable[torch.device]) -> None:
        for device in sorted(devices, key=str):
            if self._config.offloads(device):
                self._offloader_on(device)
        self._tapes.add(tape)
        if self._offloader is not None:
            self._offloader.clean_up()
            tape.home = self._offloader.backend.current_stream()

    @_guarded
    def end(self) -> None:
        """The root's forward is over, whichever way."""
        tape = self._current.tape
        if tape is None or current_graph_task_id() != -1:
            return
        tape.close()
        self._current.tape = None
        if self._offloader is not None:
            self._let_leave(tape, tape.position + 1 - self._config.keep_last, self._offloader)
            self._offloader.clean_up()

    @_guarded
    def enter(self, name: str) -> None:
        """The call of a group begins."""
        tape = self._current.tape
        if tape is None or current_graph_task_id() != -1:
            return
        tape.name = name
        tape.stashes.append([])
        if self._offloader is not None:
            self._offloader.free_offloaded()
            self._let_leave(tape, tape.position + 1 - max(self._config.keep_last, 1), self._offloader)

    def _let_leave(self, tape: Tape, end: int, offloader: DeviceOffloader) -> None:
        """Offload what groups before position `end` saved, but for what later ones saved too."""
        while tape.num_left < end:
            leaving = [stash for stash in tape.at(tape.num_left) if stash.position == tape.num_left]
            offloader.offload(leaving[::-1])
            tape.num_left += 1

    # Pack

    def pack(self, tensor: torch.Tensor) -> Kept | Passed | PackedView:
        tape, config = self._current.tape, self._config
        if tape is None:
            return keep(tensor, None)
        if not self._moves(tensor, tape):
            return keep(tensor, tape.outer)
        start, end = needed_part(tensor, config.min_bytes)
        if end - start < max(config.min_bytes, 1) or (config.skip is not None and config.skip(tensor, tape.name)):
            return keep(tensor, tape.outer)
        return self._stash(tensor, start, end, tape)

    def _moves(self, tensor: torch.Tensor, tape: Tape) -> bool:
        return (
            type(tensor) is torch.Tensor
            and tensor.layout is torch.strided
            # Most tensors that autograd saves are small, or weights: this comes first. (One that repeats itself is measured
            # in `needed_part`.)
            and (tensor.nbytes >= self._config.min_bytes or not tensor.is_contiguous())
            and tape.position >= 0
            and self._config.offloads(tensor.device)
            and current_graph_task_id() == -1
            and not tensor.is_quantized
            and not tensor.is_nested
            and not tensor.is_conj()
            and not tensor.is_neg()
            and not tensor._is_zerotensor()  # the zeros of forward-mode differentiation have no memory
            and not tape.is_weight(tensor)
        )

    @_guarded
    def _stash(self, tensor: torch.Tensor, start: int, end: int, tape: Tape) -> PackedView:
        stats, num_bytes = self._stats, end - start
        offloader = self._offloader_on(tensor.device)
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor._version, start, num_bytes
        stats.saved_tensors += 1
        stash = tape.find(key)
        if stash is not None:
            stats.shared_tensors += 1
            tape.mark(stash)
            offloader.keep(stash, bytes_of(tensor, start, end))
            return PackedView(tensor, stash, start, tape)
        stream = offloader.backend.current_stream()
        if tape.home is None:
            tape.home = stream
        streams = [stream] if stream == tape.home else [stream, tape.home]
        stash = Stash(bytes_of(tensor, start, end), streams, offloader.remains, num_bytes)
        tape.add(key, storage, stash)
        tape.mark(stash)
        return PackedView(tensor, stash, start, tape)

    # Unpack

    def unpack(self, packed: Kept | Passed | PackedView) -> torch.Tensor:
        if not isinstance(packed, PackedView):
            return packed.unpack()
        packed.check()
        return self._restore(packed)

    @_guarded
    def _restore(self, packed: PackedView) -> torch.Tensor:
        if packed.stash.state is StashState.LOST:
            raise StateError(
                f"An interrupt or an error stopped a forward or a backward of {self._title} while its activations were being "
                f"copied, so what this graph saved is lost. Call the forward again, then its backward."
            )
        assert self._offloader is not None
        stream = self._offloader.backend.current_stream()
        if packed.tape.reached != packed.position:
            self._arrive(packed, self._offloader, stream)
        return packed.view(self._offloader.restore(packed.stash, stream))

    def _arrive(self, packed: PackedView, offloader: DeviceOffloader, stream: Stream) -> None:
        """Backward has reached a group, on `stream`: fetch the rest of the group, and those that come next."""
        tape, position = packed.tape, packed.position
        tape.reached = position
        offloader.clean_up()
        self._stats.stalls += offloader.fetch([*dict.fromkeys((packed.stash, *tape.at(position)))], stream)
        num_ahead = 0
        for ahead in range(position - 1, -1, -1):
            stashes = [*tape.at(ahead)]
            num_ahead += bool(stashes)  # a group may have saved nothing: it computes nothing to hide a copy behind
            if num_ahead > self._config.prefetch:
                break
            offloader.fetch(stashes, stream)
        offloader.free_offloaded()  # behind what is still there, and comes next
