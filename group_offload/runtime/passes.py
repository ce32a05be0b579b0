"""The passes of one offloaded module, from beginning to end: the engine's state machine. Read this file first.

[Note: A pass]
A pass is one call of a module with a gate that is not inside another such call: mostly the root's forward, sometimes a
part of it (`vae.decode` calls the decoder). A pass holds the engine's lock, so that threads take turns. In order:

1. `_begin`: changes since the last pass (weights replaced or added, modules compiled, and edits, unless they can wait until
   their group is sent or used) are taken up, slots are leased, and the copies of the first groups are started, unless those
   groups are on the device already.
2. For each gated call inside: `begin_call` acquires the groups that the call needs. `acquire` makes compute wait for a
   group's bytes and binds its weights to their slot. `end_call` releases them. `release` records the last use, binds the
   weights to their blobs again, and lets the next groups start into the free bytes.
3. `_end`: all weights are bound to their blobs. The groups that the next pass needs first are on their way by then. The host
   has waited for no copy (but see `Blob.detects_edits`).

An exception unwinds through the gates and ends the pass the same way. The next pass then starts from nothing. A backward
over the weights of a pass is a pass too: see [Note: Backward].

[Note: Interrupts]
Ctrl-C raises between any two steps of the engine's own code, also where a call ends and is taken off the list of calls.
So no list and no flag is trusted to say that a call goes on: a call goes on as long as its frame is on the stack. Likewise
the state of `Passes` is UNKNOWN during each step of the engine, and becomes another only at the end of the step. A pass that
ends in that state, or in which an exception was raised, ends with `Passes.recover`. That method trusts only the weights and
their blobs: bytes on the device or on their way there are dropped. If it is interrupted, the next pass begins it again.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from types import FrameType
from typing import Any

import torch
from torch import nn

from ..base.device import Stream
from ..base.system import forked_free
from ..base.torch_internals import DisableTorchFunctionSubclass, current_transform, in_profile, is_profiler_enabled
from ..base.tuning import tuning
from ..base.weak import Weak
from ..config import OffloadConfig
from ..errors import EXPECTED, StateError
from ..partition import Method
from .budget.need import InputSignature
from .changes import Changes
from .deadlock import where_it_waits
from .groups.group import Group
from .groups.part import Part
from .interleave.contract import is_function
from .measure.recorder import Recorder
from .placer import Placer
from .prefetch.phase_order import Model, PhaseOrder
from .prefetch.prefetcher import Prefetcher

_BACKWARD = "backward"
"""The name of backward passes in their `InputSignature`."""


class PassState(Enum):
    """How far a pass has come."""

    CLEAN = "clean"
    """No pass has begun since the last one ended."""
    OPEN = "open"
    """A pass is in progress, and everything is in order."""
    FAILED = "failed"
    """Something was raised in the pass in progress. The engine is in order, and the pass ends with `recover`."""
    UNKNOWN = "unknown"
    """The engine is in the middle of a step, or was interrupted in one: see [Note: Interrupts]."""


class Entry:
    """Where calls of a module, or of one of its methods, enter: a gate."""

    module = Weak[nn.Module]()
    method: Method | None = None
    """The method that is called; None for the module itself."""
    groups: tuple[Group, ...] = ()
    """The groups that a call needs. They may be others once a pass has begun."""


class Call:
    """One call of a gate, which lasts for as long as `frame` is on the stack."""

    __slots__ = ("_frame", "entry", "groups", "is_complete", "is_deferred", "module")

    def __init__(self, entry: Entry, frame: FrameType) -> None:
        self.entry, self.module = entry, entry.module
        self.groups: list[Group] = []
        """The groups that the call holds."""
        self.is_deferred = False
        """Whether the call may do without its groups: they are onloaded once its module's own forward is called."""
        self.is_complete = False
        """Whether the call returned and raised no exception."""
        self._frame = id(frame)  # the frame itself would keep the call's arguments alive

    def is_on_stack(self) -> bool:
        """Whether the call is in progress. Only the thread that began the call may ask."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and id(frame) != self._frame:
            frame = frame.f_back
        return frame is not None


class _Step:
    """A step of the engine, whose state is UNKNOWN meanwhile. It is as before once the step, or an expected error, is over."""

    __slots__ = ("_before", "_passes")

    def __init__(self, passes: Passes) -> None:
        self._passes, self._before = passes, passes._state

    def __enter__(self) -> PassState:
        self._passes._state = PassState.UNKNOWN
        return self._before

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None or issubclass(kind, EXPECTED):
            self._passes._state = self._before


class Passes:
    """Begins and ends passes and the calls in them, and lends weights to calls. All methods but `wait_for_turn` need the lock.

    Order of calls: `set_groups` whenever the module was partitioned; then `begin_call` ... `end_call`, nested as modules are,
    or `begin_backward`, any of `acquire` and `release`, and `end_backward`.
    """

    root = Weak[nn.Module]()
    """The offloaded module. An engine keeps no module alive: see "Lifetimes" in docs/how-it-works.md."""

    def __init__(
        self,
        root: nn.Module,
        config: OffloadConfig,
        placer: Placer,
        prefetcher: Prefetcher,
        changes: Changes,
        recorder: Recorder,
        prepare: Callable[[nn.Module, InputSignature], set[Group]],
    ) -> None:
        self.root = root
        self.name = type(root).__name__
        self.is_function = is_function(config, root)
        """Whether forwards are known to be functions of their inputs and the weights."""
        self.backend = config.backend
        self.prefetcher = prefetcher  # which has the same device memory, transfer, counters and files
        self.memory, self._transfer = prefetcher.memory, prefetcher.transfer
        self.counters, self._files = prefetcher.counters, prefetcher.files
        self.placer, self._changes, self._recorder = placer, changes, recorder
        self._prepare = prepare
        """Commits changes of the module before a forward, and returns the groups that the forward can need. If it makes
        the groups again, it calls `set_groups` first."""
        self._groups: tuple[Group, ...] = ()
        self._group_of: dict[Part, Group] = {}
        self.detects_edits = True
        """Whether edits of weights between passes are noticed, however they are made."""
        self._state = PassState.CLEAN
        self._calls: list[Call] = []
        """The gated calls in progress, outermost first, if none was interrupted: see [Note: Interrupts]."""
        self._thread = 0
        """The thread that began the pass in progress."""
        self.lingering: Group | None = None
        """A group that stays held between two calls, because the next call should need it too."""
        self.kind: InputSignature | None = None
        """The kind of the last forward."""
        self.tasks: dict[int, Any] = {}
        """The runs of autograd that make up the backward in progress. `Backward` adds and removes them."""
        self.is_removed = False
        self.phase_order: PhaseOrder | None = None
        """The models of the same pipeline, and which runs next: see [Note: Models of a pipeline]."""
        self._next_model: Model | None = None
        """The model that should run after the pass in progress, if it is another one."""
        self._teaches = True
        """Whether the pass in progress needs groups in an order that a next one may have."""
        self.before_forward: Callable[[nn.Module, Any], None] = lambda root, kwargs: None
        """Called before a forward takes device memory."""
        self.lock: Any = forked_free(threading.RLock())
        """The lock that a pass holds for its length. Models that share weights have one lock: see `shared_lock`."""

    def enter_child(self) -> None:
        """Forget what threads of the parent are at, in a forked child. See [Note: Interrupts]: the weights tell the rest."""
        self._transfer.reader.reset_after_fork()
        if self.lock._is_owned():
            return  # this thread has forked in the middle of a pass
        self._calls, self._thread = [], 0
        self.tasks.clear()
        if self._state is not PassState.CLEAN:
            self._state = PassState.UNKNOWN

    def set_groups(self, groups: tuple[Group, ...]) -> None:
        """Take over the groups that the module was partitioned into."""
        self._groups = groups
        self._group_of = {part: group for group in groups for part in group.parts}
        self.detects_edits = all(group.detects_edits for group in groups)

    # ---------------------------------------------------------------- where a pass is

    @property
    def is_running(self) -> bool:
        """Whether a pass is in progress, forward or backward."""
        return bool(self._calls or self.tasks)

    @property
    def runs_here(self) -> bool:
        """Whether the calling thread is in the middle of a pass."""
        return self.is_running and self._thread == threading.get_ident()

    @property
    def is_inside_a_call(self) -> bool:
        """Whether the gated call that begins lies inside another one, or in a backward."""
        return len(self._calls) > 1 or bool(self.tasks)

    # ---------------------------------------------------------------- a call

    def begin_call(self, call: Call, args: Any, kwargs: Any) -> None:
        """Make the weights ready that a gate's call needs. The gate calls `end_call` afterwards, whatever happens."""
        self._refuse_capture()
        self.forget_interrupted_calls()
        is_first = not self.is_running
        self._calls.append(call)
        if is_first:
            try:
                self._begin(call, InputSignature.of(call.entry.method or call.module, args, kwargs), kwargs)
            except EXPECTED:
                self._state = PassState.OPEN
                raise
        else:
            self._refuse_interrupted()
        if not call.is_deferred:
            self._acquire_groups_of(call)

    def acquire_late(self, call: Call) -> None:
        """Make the weights ready of a call that might have done without them, now that it needs them."""
        if not call.is_deferred or (call not in self._calls and not call.is_on_stack()):
            return  # it calls the forward once more, or was interrupted and left this behind
        self._refuse_interrupted()
        call.is_deferred = False
        self._acquire_groups_of(call)

    def _acquire_groups_of(self, call: Call) -> None:
        with _Step(self), DisableTorchFunctionSubclass():  # a quantized weight answers for each attribute in Python
            for group in call.entry.groups:
                if group.num_bytes:
                    self.acquire(group)
                    call.groups.append(group)
            self._end_lingering()
            self.placer.needs.look()
            self.prefetcher.before_call()

    def _refuse_interrupted(self) -> None:
        if self._state is PassState.UNKNOWN:
            raise StateError(
                f"A forward of {self.name} goes on after it was interrupted. Let it end, and call it again."
            )

    def _refuse_capture(self) -> None:
        if self.backend.is_capturing():
            raise StateError(
                f"{self.name} is offloaded and can't be captured in a CUDA graph. Use torch.compile without "
                f"mode='reduce-overhead', or call handle.remove() first."
            )

    def end_call(self, call: Call) -> None:
        """End a call: release the groups that `begin_call` acquired, and end the pass with the outermost call."""
        if call not in self._calls:  # `begin_call` raised before it noted the call
            return
        while self._calls[-1] is not call:
            self._forget_last_call()
        # A checkpoint breaks off the calls that it repeats: an incomplete call in a backward is no failure.
        if self._state is PassState.OPEN and not (call.is_complete or self.tasks):
            self._state = PassState.FAILED
        if self._state is PassState.UNKNOWN:
            self._calls.pop()
        else:
            with _Step(self) as state, DisableTorchFunctionSubclass():
                self._end_lingering()
                if state is PassState.OPEN and self._may_linger(call):
                    self.lingering = call.groups[0]
                    self.lingering.holds += 1
                while call.groups:
                    self.release(call.groups.pop(), self.backend.current_stream())
                self._calls.pop()
                if self.is_running:
                    self.prefetcher.after_call()
        if not self.is_running:
            self._end()

    def _may_linger(self, call: Call) -> bool:
        group = call.groups[0] if len(call.groups) == 1 and len(self._calls) > 1 else None
        schedule = self.prefetcher.schedule
        return (
            group is not None
            and group.holds == 1
            and schedule.expected is group
            and (group.slot is None or group.slot.owner is not None)
            and not (schedule.is_learning or self.placer.has_budget or self.tasks)
            and not torch.is_grad_enabled()
        )

    def _end_lingering(self) -> None:
        group, self.lingering = self.lingering, None
        if group is not None:
            stream = None if group.slot is None else group.slot.last_stream
            self.release(group, stream or self.backend.current_stream())

    def can_use_again(self, group: Group) -> bool:
        """Whether the call that begins can compute with the group that lingers, as the call before did."""
        slot = group.slot
        return (
            self._thread == threading.get_ident()
            and self._state is PassState.OPEN
            and (slot is None or slot.waited_on == slot.last_stream == self.backend.current_stream())
            and not (torch.is_grad_enabled() or self.backend.is_capturing() or is_profiler_enabled())
        )

    def use_again(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a module that needs the group that lingers, and nothing else."""
        group, schedule = self.lingering, self.prefetcher.schedule
        assert group is not None
        try:
            self.lingering = None  # else a call inside would end its use
            schedule.observe(group)
            self.placer.needs.look()
            output = call(*args, **kwargs)
            if self.lingering is None and self._state is PassState.OPEN and schedule.expected is group:
                self.lingering = group
                return output
        except BaseException:
            if self._state is PassState.OPEN:
                self._state = PassState.FAILED
            raise
        if self._state is not PassState.UNKNOWN:
            with _Step(self), DisableTorchFunctionSubclass():
                self._end_lingering()  # what a call inside has left
                self.lingering = group
                if schedule.expected is not group:
                    self._end_lingering()
                    self.prefetcher.after_call()
        return output

    # ---------------------------------------------------------------- a forward

    def _begin(self, call: Call, kind: InputSignature, inputs: Any) -> None:
        root, top, method = self.root, call.module, call.entry.method
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise StateError(
                f"{self.name} is offloaded and can't be recorded by torch.jit.trace: its weights move. Call handle.remove() "
                f"first."
            )
        if current_transform() is not None:
            raise StateError(
                f"{self.name} is offloaded and can't run inside torch.func transforms (grad, vmap, jvp). Use "
                f"torch.autograd.grad or torch.autograd.functional, or call handle.remove() first."
            )
        self.before_forward(root, inputs if top is root and method is None else {})
        self.counters.passes += 1
        self.begin_work()
        self._thread = threading.get_ident()
        scope = self._prepare(top, kind)  # first: it may make other groups
        self.kind = kind
        if self.phase_order is not None:
            if not kind.with_grad:  # a backward would come next
                self._next_model = self.phase_order.begin(self, method or top)
            self.memory.protected = self.phase_order.protected_from(self)
        self._start(kind, scope)

    def _start(self, kind: InputSignature, scope: set[Group], guess: Sequence[Group] | None = None) -> None:
        """Take the slots, and start the first copies: in the order of `guess`, as long as none is known."""
        self.placer.replan(kind)  # before slots are taken: a new plan changes their sizes
        self._files.before_pass(self.name)
        phase_order = None if kind.is_backward else self.phase_order
        self.placer.make_room(kind, begins_phase=phase_order is not None and phase_order.is_first_of_phase)
        self.memory.take()
        self._recorder.begin(kind if self.placer.begin_pass(kind) else None, self.backend.current_stream())
        self._teaches = True
        self.prefetcher.begin(kind.top, scope, guess, is_last=self._next_model is not None)
        self._state = PassState.OPEN

    def begin_work(self) -> None:
        """Clear away a pass that was interrupted. The module then owns its slots until `_end` or `end_work`."""
        if self._state is not PassState.CLEAN:
            self.recover()
        self._state = PassState.UNKNOWN
        self.memory.claim()
        self.memory.arena.answer()  # what was refused before is nothing that a call could be repeated for

    def end_work(self) -> None:
        """End work that `begin_work` began and that was no pass."""
        self.memory.give_back()
        self._state = PassState.CLEAN

    def _end(self) -> None:
        """End a pass, forward or backward."""
        if self._state is PassState.CLEAN:
            return
        if self._state is not PassState.OPEN:
            self.recover()
            return
        self._state = PassState.UNKNOWN
        for group in [*self.memory.bound]:
            self.memory.unbind(group)
        self.prefetcher.schedule.end(completed=self._teaches)
        self._changes.end_pass()
        stream = self.backend.current_stream()
        self._recorder.end(stream)
        self.placer.end_pass(completed=True)
        self._end_slots(stream)
        self.memory.give_back()
        self._thread = 0
        next_model, self._next_model = self._next_model, None
        self._state = PassState.CLEAN
        if next_model is not None:
            next_model.if_at_rest(next_model.take_over)
        if self.kind is not None:
            self.placer.plan_ahead(self.kind)

    def _end_slots(self, stream: Stream) -> None:
        """Let the pass end after the work of all streams in it. No name of the caller keeps a slot: its memory may go next."""
        for slot in self.memory.slots:
            if slot.last_stream is not None and slot.last_stream != stream:
                stream.wait_event(slot.last_use())
        if not self.detects_edits:
            # Users may edit the sources of copies from now on, and the engine would not detect that.
            self._transfer.wait_for_copies()
            for slot in self.memory.slots:
                if not all(group.detects_edits for group in slot.groups):
                    self.memory.free(slot)

    # ---------------------------------------------------------------- another model's turn comes

    def take_over(self) -> None:
        """Take the slots, and start the copies of the first groups. May be called in another model's pass."""
        if not self.prefetcher.wraps:
            return
        self.begin_work()
        try:
            if self.phase_order is not None:
                self.memory.protected = self.phase_order.protected_from(self)
            if self.kind is not None:
                self.placer.make_room(self.kind, begins_phase=True)
            with suppress(torch.OutOfMemoryError):  # its own pass may find more, or says that there is too little
                self.memory.take()
                self.prefetcher.prepare()
        except BaseException as error:
            self.recover()
            if not isinstance(error, Exception):  # else it is for this module's own pass to raise
                raise
        else:
            self.end_work()

    def if_at_rest(self, step: Callable[[], None]) -> None:
        """Do this under the lock, unless another thread has it, or a pass is in progress."""
        was_owned = self.lock._is_owned()
        try:
            is_owned = was_owned or self.lock.acquire(blocking=False)
            if is_owned and self._state is PassState.CLEAN and not self.is_removed:
                step()
        finally:
            while not was_owned and self.lock._is_owned():  # Ctrl-C may have come just after the lock was acquired
                self.lock.release()

    # ---------------------------------------------------------------- too little device memory

    def give_way(self, factor: int) -> bool:
        """Device memory was refused in a call: evict `factor` times as much, so that the call can be repeated. False if no
        resident is left."""
        if self._state is PassState.UNKNOWN:
            return False
        with _Step(self):
            gave = self.placer.give_way(factor, self.backend.refusals()[1])
            self.memory.arena.answer()
        return gave

    def begin_again(self) -> None:
        """The call in progress is repeated. Calls inside of it may have failed, and may have been learnt twice by then."""
        if self._state is PassState.FAILED:
            self._state = PassState.OPEN
        self._teaches = False

    # ---------------------------------------------------------------- a group

    def acquire(self, group: Group, *, binds: bool = True) -> None:
        """Let compute wait for the group's bytes from here on. The bytes stay on the device until `release`.

        Args:
            binds: Whether the weights become views of the slot, for a module's call.
        """
        if not group.holds or group is self.lingering:
            self.prefetcher.schedule.observe(group)
        if not group.is_bound:
            self._changes.commit_group(group, binds=binds)
            if group.slot is not None and not group.is_current:
                self.memory.drop(group)
        stream = self.backend.current_stream()
        if not group.is_in_place:
            slot = group.slot
            if slot is None:  # nobody has started its copy
                self.counters.stalls += 1
                slot = self.prefetcher.onload_now(group)
            # Another stream may compute with a bound group. (`!=` of a torch stream and None is False: None is tested first.)
            if slot.waited_on is None or slot.waited_on != stream:
                self._recorder.arrives(stream)
                with in_profile("wait", group.group_id):
                    if slot.job is not None:
                        slot = self.prefetcher.wait_for_read(group, slot)
                    # An interrupt may lose the record of the streams that read slots.
                    self._transfer.last_copies.expect(stream)
                    stream.wait_event(slot.ready)
                slot.waited_on = stream
            slot.unused.discard(group)
        if binds and not group.is_bound:
            group.onload()
            if group.slot is not None:
                self.memory.bound[group] = None
        group.holds += 1
        self._recorder.begins(group.group_id, stream)

    def release(self, group: Group, stream: Stream) -> None:
        """End one use of the group: the work enqueued on `stream` so far is the last of that use."""
        group.holds -= 1
        if group.is_in_place:
            if not group.holds:
                self._recorder.ends(group.group_id, stream)
                if group.is_bound:
                    self.counters.changed += group.offload(self._transfer)
            return
        slot = group.slot
        assert slot is not None
        if slot.last_stream is not None and slot.last_stream != stream:
            stream.wait_event(slot.last_use())  # the new event then covers the earlier use too
        slot.note_use(stream)
        if slot.owner is not None and slot.owner != stream:
            self.backend.record_stream(slot.memory, stream)
        if group.holds:
            return
        self._recorder.ends(group.group_id, stream)
        self.prefetcher.was_released(group)
        if self.prefetcher.schedule.expected is not group:
            if group in self.memory.bound:
                self.memory.unbind(group)
            if slot.owner is not None and not slot.is_resident and not slot.unused and not slot.is_held:
                self.memory.free(slot)

    def group_of(self, part: Part) -> Group:
        """The group that a part belongs to.

        Raises:
            StateError: The part was given up.
        """
        found = self._group_of.get(part)
        if found is None:
            raise StateError(
                f"Backward needs weights of {self.name} that are not offloaded any more: its groups were rebuilt after the "
                f"forward, because modules were changed, weights in files were edited, or others require gradients now. Do "
                f"that after backward()."
            )
        return found

    # ---------------------------------------------------------------- a backward

    def begin_backward(self) -> None:
        """Begin a pass in which autograd needs weights or repeats calls. Each call until `end_backward` needs the lock too."""
        self._refuse_capture()
        forward = self.prefetcher.schedule.order
        self.counters.backward_passes += 1
        # The next forward commits changes made since the last one. Backward follows the graph, and keeps the groups.
        self.begin_work()
        self._thread = threading.get_ident()
        kind = InputSignature(_BACKWARD, (), with_grad=True)
        self.memory.protected = {}  # what the forward left to models that run after it
        self._start(kind, set(self._groups), forward[::-1])

    def end_backward(self, *, completed: bool) -> None:
        if self._state is PassState.CLEAN:
            return
        self._calls.clear()  # calls that a checkpoint repeated have broken off with the backward
        if not completed:
            self._state = PassState.UNKNOWN  # the backward may have broken off anywhere
        self._end()

    # ---------------------------------------------------------------- interrupts

    def end_interrupted_call(self, module: nn.Module) -> None:
        """End the gated call of `module` that is over, if its `end_call` was interrupted."""
        is_left_over = self._state is not PassState.CLEAN if not self._calls else self._calls[-1].module is module
        if is_left_over:
            self.forget_interrupted_calls()
            if not self.is_running and self._state is not PassState.CLEAN:
                self.recover()

    def forget_interrupted_calls(self) -> None:
        """Drop calls from the list that are not in progress any more. See [Note: Interrupts]."""
        while self._calls and not (self._thread == threading.get_ident() and self._calls[-1].is_on_stack()):
            self._forget_last_call()

    def _forget_last_call(self) -> None:
        self._calls.pop()
        if self._state is not PassState.CLEAN:
            self._state = PassState.UNKNOWN  # the groups that the call holds, and the steps it began, are unknown

    def recover(self) -> None:
        """End a pass that failed or was interrupted at any point. See [Note: Interrupts].

        The host waits until no copy is on its way and no slot is read, so that the memory is free for another use.
        """
        is_whole = self._state is not PassState.UNKNOWN
        self._state = PassState.UNKNOWN
        self.backend.refusal.must_fail = None  # of a call that was interrupted
        self._transfer.recover(is_whole=is_whole)
        self.lingering = None
        for group in self._groups:
            group.recover(self._transfer)
        self.memory.recover()
        self._recorder.forget_measured()
        self.placer.end_pass(completed=False)
        self._changes.recover(Passes.root.of(self))
        self._next_model = None
        self.prefetcher.recover(self._groups, is_whole=is_whole)
        self.placer.reside()
        self._files.look()
        self._thread = 0
        self._state = PassState.CLEAN

    # ---------------------------------------------------------------- turns of threads

    def wait_for_turn(self, module: nn.Module) -> None:
        """Return once no pass is in progress in another thread.

        Raises:
            StateError: That pass waits for a thread, which is most likely the calling one.
        """
        if self._thread in (0, threading.get_ident()) or self.lock._is_owned():
            return
        before: FrameType | None = None
        try:
            while not self.lock.acquire(timeout=tuning().turn_timeout_seconds):
                # A call of the whole module is separate work, whose turn will come. A call of a part may belong to the pass.
                may_be_inside = self.is_running and module is not self.root
                now = where_it_waits(self._thread) if may_be_inside else None
                if now is not None and now is before:
                    raise StateError(
                        f"{type(module).__name__}, of {self.name}, is called in another thread than a forward "
                        f"that is in progress and waits for a thread: each would wait for the other. Call the parts of an "
                        f"offloaded module in the thread of its forward."
                    )
                before = now
        finally:
            while self.lock._is_owned():  # Ctrl-C may have come just after the lock was acquired
                self.lock.release()
