"""Runs one offloaded module: notices what changed, onloads what a call needs, starts what the next one will need.

[Note: A pass]
A pass is one call of a module with a gate that is not inside another one: mostly the root's forward, sometimes a part
of it (`vae.decode` calls the decoder). It holds the engine's lock, so that two threads take turns. In order:

1. `_begin`: what changed since the last pass (weights edited, replaced or added, modules compiled) is taken up, slots are
   leased, the first images are started, unless they are there already.
2. For each gated call inside: `enter` makes compute wait for the images it needs and binds the weights to their slots;
   `leave` records the last use, binds the weights to their place at rest, and starts the next images into the free bytes.
3. `_end`: everything is bound to its place at rest. The images that the next pass needs first are on their way by then.
   The host has waited for nothing (but see `Image.is_stable`).

An exception anywhere unwinds through the gates and ends the pass the same way. The next pass then starts from nothing.
What autograd does with the weights of a pass is a pass too: see [Note: Backward].

[Note: Slots in rings, and just in time]
Groups that are needed one after another share a ring of fixed memory, filled as far ahead as it reaches. At leaf level,
and with `record_stream`, memory for them comes from torch's caching allocator instead, just in time: when compute comes to
a group, what is needed next gets memory, as much as the largest group takes (more where activations take much more, see
`_window`). The host decides that before the activations
of the current call are allocated, and the copies wait until compute has got there: so weights that wait for their turn and
activations at their peak are not there at the same time.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Mapping
from functools import partial
from heapq import nlargest
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..base.compiled import is_compiled
from ..base.device import Backend, Stream
from ..base.layout import overlapping
from ..base.saved import view_of
from ..base.torch_internals import current_transform
from ..config import OffloadConfig, OffloadType
from ..errors import ConfigError, GroupFileError, StateError
from ..partition import NEVER_CALLED, TensorRef, holds_tensors
from ..plan.budgets import AUTO, describe_bytes
from ..plan.planner import Place, Plan, Speeds
from ..plan.speeds import ASSUMED_DRIVE, known_speeds
from ..stores.base import Tier
from ..stores.files import FileImage
from ..stores.folder import Folder, keep, leave
from ..stores.group_file import GroupFile
from .backward import Backward, SavedWeight, bytes_at_rest
from .budget.budgeter import Budgeter, Kind, ram_for_weights
from .budget.stopwatch import Stopwatch
from .calls import EXPECTED, Call
from .changes import Seen, Watch
from .copies.cached import CachedFiles
from .copies.reader import NUM_FRAMES, SMALL_CHUNK_BYTES
from .copies.transfer import Transfer
from .foresight.lookahead import LookAhead
from .foresight.schedule import first_guess
from .gates import Gate, InnerGate, map_tensors
from .groups.build import build_groups, materialise
from .groups.group import Group, Part, Residence
from .groups.trained import Trained
from .groups.versions import share_counters
from .measure.counters import Counters
from .measure.trace import Tracer
from .measure.weighing import Weighing
from .memory import DeviceMemory
from .slots.slot import Slot
from .slots.stalls import Stalls
from .threads import where_it_waits
from .turns import check as check_turns
from .turns import join

logger = logging.getLogger("group_offload")

MIN_WINDOW_BYTES = 4 << 20
"""Just in time: so much may be on its way, however small the groups are, or an eighth of all. Less would be all work and no
memory saved."""
_DEEP_WINDOW = 4
"""At leaf level, `record_stream` lets this many times the largest layer be on its way: for models that compute bounds."""

STAGING_BYTES = NUM_FRAMES * SMALL_CHUNK_BYTES
"""What files take of a RAM budget, besides weights."""
HOST_ACTIVATIONS_SHARE = 0.2
"""Of a RAM budget, where the CPU computes: so much is for activations, which nobody can measure there."""
_AUTO_SHARE = 0.95
"""Of the device memory that is there to take, if the budget is "auto"."""
PATIENCE_SECONDS = 30.0
"""With a forward that waits for a thread, while another thread wants to call a part of what it runs: both will for ever."""
_MOST_REBUILDS = 3
"""Before a pass: more only if somebody goes on changing the module meanwhile."""
_IN_PLACE = 1e18
"""Bytes a second: what rests in RAM is computed with where it is."""

_offloaded: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def is_offloaded(module: nn.Module) -> bool:
    """Whether the module is, or is a part of, an offloaded module."""
    return module in _offloaded


class Engine:
    """The runtime of one offloaded module. Thread-safe: passes of several threads take turns."""

    def __init__(self, root: nn.Module, config: OffloadConfig) -> None:
        self.root = root
        self.config = config
        self.counters = Counters()
        self.groups: tuple[Group, ...] = ()
        self.lock = threading.RLock()
        """Held for the length of a pass."""
        self._backend = config.backend
        path = config.offload_to_disk_path
        self._folder = None if path is None else Folder(path, type(root).__name__, is_verified=config.verify_files)
        self._manifest: list[Path] = []
        """What says in the folder which files this module needs, if there is one."""
        weakref.finalize(self, _leave_all, self._manifest).atexit = False
        self.backward = Backward(self)
        self._trained = Trained(self._backend)
        self.records_graphs = False
        """A forward has recorded a graph, so that modules inside of groups may be called alone, by a checkpoint."""
        self.transfer = Transfer(
            self._backend,
            use_stream=config.use_stream,
            # Without a stream a copy is as asynchronous as it was asked to be.
            blocking=not config.use_stream and not config.non_blocking,
        )
        self._skip_inputs = frozenset(config.exclude_kwargs)
        self.stalls = Stalls(self._backend)
        self._stopwatch = Stopwatch(self._backend)
        self._kind: Kind | None = None
        """Of the last pass."""
        self.tracer: Tracer | None = None
        self._calls: list[Call] = []
        """The gated calls in progress, outermost first, if none was interrupted: see [Note: Interrupts]."""
        self._thread = 0
        """That began the pass in progress."""
        self._has_failed = False
        """Something was raised in the pass."""
        self._is_whole = True
        """The engine is not in the middle of anything."""
        self._is_clean = True
        """No pass has begun since the last one ended."""
        self.is_removed = False
        # At leaf level least memory counts, and layers are small enough for torch's allocator to fit them in anywhere.
        is_leaf_level = config.offload_type is OffloadType.LEAF_LEVEL
        is_just_in_time = config.record_stream or (is_leaf_level and config.use_stream)
        self._is_tight = is_just_in_time and not config.record_stream
        self._memory = DeviceMemory(
            self._backend,
            self.transfer,
            self.stalls,
            self.counters,
            just_in_time=is_just_in_time,
            tight=self._is_tight,
        )
        self._gates: dict[nn.Module, Gate] = {}
        self._inner_gates: dict[nn.Module, InnerGate] = {}
        self._group_of: dict[Part, Group] = {}
        self._refs: tuple[TensorRef, ...] = ()
        self._is_cut = False
        """Groups and gates are what the module was last found to need: nothing broke in between."""
        self._watches: dict[nn.Module, Watch] = {}
        self._seen: dict[nn.Module, Seen] = {}
        self._files = CachedFiles(
            self._backend,
            self.transfer.last_copies.synchronize,
            may_lock=not config.low_cpu_mem_usage and not config.verify_files,
        )
        # Not a method of the engine: the two would keep each other.
        self._budgeter = Budgeter(self._backend, partial(_measure_speeds, self._backend, self._files), config.num_slots)
        self._lookahead = LookAhead(
            self._memory,
            self.transfer,
            self.stalls,
            self.counters,
            self._files,
            use_stream=config.use_stream,
            model=type(root).__name__,
        )
        self._ram: int | None = None
        """For weights, as it was when the module was offloaded; None for no limit."""
        self._total_bytes = 0
        self._activations: dict[nn.Module, Weighing] = {}
        """For each kind of pass, what activations take."""
        self._is_stable = False
        self._weighed = Weighing()

    def start(self, casts: Mapping[int, torch.dtype]) -> None:
        """Offload the module. Call `remove` if that raises, whatever it is: some may be done."""
        join(self)
        with self.lock:
            self._build(casts)

    @property
    def root_gate(self) -> Gate:
        return self._gates[self.root]

    @property
    def gated_modules(self) -> tuple[nn.Module, ...]:
        return tuple(self._gates)

    @property
    def slot_bytes(self) -> int:
        """Device memory that a pass takes for weights, at most."""
        if not self._memory.is_just_in_time:
            return sum(self._memory.ring_sizes.values())
        return self._memory.largest + self._window(None) + self._memory.outer_bytes

    @property
    def is_running(self) -> bool:
        """A pass is in progress, forward or backward."""
        return bool(self._calls) or self.backward.is_open

    @property
    def runs_here(self) -> bool:
        """The calling thread is in the middle of a pass."""
        return self.is_running and self._thread == threading.get_ident()

    @property
    def runs_elsewhere(self) -> bool:
        """Another thread seems to be in the middle of a pass."""
        return self._thread not in (0, threading.get_ident())

    @property
    def is_inside_a_call(self) -> bool:
        """The gated call that begins is not the outermost one."""
        return len(self._calls) > 1 or self.backward.is_open

    @property
    def device(self) -> torch.device:
        return self._backend.device

    @property
    def current_stream(self) -> Stream:
        return self._backend.current_stream()

    @property
    def trainable_bytes(self) -> int:
        """Device memory of parameters that are trained: they stay there."""
        return self._trained.num_bytes

    @property
    def has_budget(self) -> bool:
        """For the device."""
        return self._budgeter.vram is not None

    def refresh(self) -> None:
        """Take up what was changed since the last pass now, not at the next one."""
        with self.lock:
            self.backward.settle()
            self._forget_interrupted_calls()
            if self.is_running:
                return
            self._begin_clean()
            try:
                if self._notice_changes(self.root) is None:
                    self._rebuild_for(self.root)
            except BaseException:
                self._recover()  # now: what is edited from here on has to be where it is looked for
                raise
            self._memory.disclaim()
            self._is_whole = self._is_clean = True

    def remove(self) -> None:
        """Give every tensor memory of its own again, where it was before, and take the gates away.

        Where there is no room for that it raises in between, and loses nothing: what has memory of its own keeps it, the
        next forward takes it up again, and `remove()` goes on with the rest.
        """
        with self.lock:
            self.backward.settle()
            self._forget_interrupted_calls()
            if self.is_running:
                raise StateError(
                    "remove() was called in the middle of a forward or backward of the module. Call it afterwards."
                )
            self._begin_clean()
            self._lookahead.abandon()
            self._memory.release()
            self._is_cut = False  # what has memory of its own by then is taken up again by the next forward
            self._give_up_images()
            self._trained.give_back()
            for path in self._manifest:
                keep(path)  # as the files, for whoever comes next
            _leave_all(self._manifest)
            # As long as the root has its gate the next forward takes all up again. So that goes last.
            for gate in (*self._inner_gates.values(), *reversed(self._gates.values())):
                gate.uninstall()
            self.is_removed = True
            for module in self._seen:
                _offloaded.discard(module)
            self._gates, self._watches, self._seen, self._inner_gates = {}, {}, {}, {}
            self._stopwatch.clear()
            self._forget_groups()
            self.backward.close()
            self.transfer.close()
            self._is_whole = self._is_clean = True

    def _forget_groups(self) -> None:
        """So that what maps files goes at once, not when Python's collector comes: until then it counts as RAM in use."""
        self.groups, self._group_of, self._refs = (), {}, ()
        self._lookahead.reset((), wraps=False)
        self._budgeter.clear()
        self._files.begin(())

    def _give_up_images(self) -> None:
        """Give tensors memory of their own, group by group: what their images took is given back meanwhile."""
        for group in self.groups:
            group.check()
        for group in self.groups:
            for part in group.parts:
                materialise(part)
            group.give_up()

    # ---------------------------------------------------------------- calls

    def wait_for_turn(self, module: nn.Module) -> None:
        """Return once no pass is in progress in another thread.

        Raises:
            StateError: that pass waits for a thread, which is most likely the calling one.
        """
        if self.lock._is_owned():  # type: ignore[attr-defined]
            return
        before: FrameType | None = None
        try:
            while not self.lock.acquire(timeout=PATIENCE_SECONDS):
                top = None if self._kind is None else self._kind.top
                # Who calls the whole of it has work of its own, and a turn that comes.
                parts = top.modules() if self.is_running and isinstance(top, nn.Module) and module is not top else ()
                is_inside = any(module is part for part in parts)
                now = where_it_waits(self._thread) if is_inside else None
                if now is not None and now is before:
                    raise StateError(
                        f"{type(module).__name__}, of {type(self.root).__name__}, is called in another thread than a forward "
                        f"that is in progress and waits for a thread: each would wait for the other. Call the parts of an "
                        f"offloaded module in the thread of its forward."
                    )
                before = now
        finally:
            while self.lock._is_owned():  # type: ignore[attr-defined]  # also if Ctrl-C came just when it was had
                self.lock.release()

    def begin_call(self, call: Call, args: Any, kwargs: Any) -> None:
        """Make the weights that a gate's call needs ready. The lock is held; `end_call` follows, whatever happens."""
        self._refuse_capture()
        self._forget_interrupted_calls()
        is_first = not self.is_running
        self._calls.append(call)
        if not is_first and not self._is_whole:
            raise StateError(
                f"A forward of {type(self.root).__name__} goes on after it was interrupted. Let it end, and call it again."
            )
        try:
            if is_first:
                self._begin(call.module, Kind.of(call.module, args, kwargs))
            self._is_whole = False
            # Another gate, if the module was just cut into groups again.
            gate = self._gates.get(call.module, self._inner_gates.get(call.module))
            for group in () if gate is None else gate.groups:
                if group.num_bytes:
                    self.hold(group)
                    call.groups.append(group)
            self._weigh_activations(call.module)
            self._lookahead.before_call()
        except EXPECTED:
            self._is_whole = True
            raise
        self._is_whole = True

    def _refuse_capture(self) -> None:
        if self._backend.is_capturing():
            raise StateError(
                f"{type(self.root).__name__} is group-offloaded and was called while a CUDA graph is captured: a replay would "
                f"read device memory that holds other weights by then. Capture a module that is not offloaded, or call "
                f"remove() before. torch.compile without mode='reduce-overhead' captures no graphs."
            )

    def end_call(self, call: Call) -> None:
        """End what `begin_call` began."""
        if call not in self._calls:  # nothing was begun
            return
        # A checkpoint breaks off calls that it repeats: that is no failure.
        self._has_failed |= not (call.is_complete or self.backward.is_open)
        self._forget_calls_above(call)
        is_whole, self._is_whole = self._is_whole, False
        if is_whole:
            try:
                while call.groups:
                    self.let_go(call.groups.pop(), self._backend.current_stream())
                self._calls.pop()
                if self.is_running:
                    self._lookahead.after_call()
            except EXPECTED:
                self._is_whole = True
                raise
            self._is_whole = True
        else:
            self._calls.pop()
        if not self.is_running:
            self._end()

    def settle(self, module: nn.Module) -> None:
        """A gate's call of `module` is over: if `end_call` was interrupted, end it now."""
        if self._calls[-1].module is module if self._calls else not self._is_clean:
            self._forget_interrupted_calls()
            if not self.is_running and not self._is_clean:
                self._recover()

    def _forget_interrupted_calls(self) -> None:
        """Take calls off the list that are not in progress any more. See [Note: Interrupts]."""
        while self._calls and not (self._thread == threading.get_ident() and self._calls[-1].is_on_stack()):
            self._calls.pop()
            self._is_whole = False  # what it holds, and what it had begun, nobody knows

    def _forget_calls_above(self, call: Call) -> None:
        while self._calls[-1] is not call:
            self._calls.pop()
            self._is_whole = False

    def move_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The inputs of a call, on the onload device, except those that the options exclude."""
        backend, non_blocking = self._backend, self.config.non_blocking

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if tensor.device == backend.device else backend.bring(tensor, non_blocking=non_blocking)

        args = tuple(map_tensors(value, moved) for value in args)
        kwargs = {
            name: value if name in self._skip_inputs else map_tensors(value, moved) for name, value in kwargs.items()
        }
        return args, kwargs

    # ---------------------------------------------------------------- a pass

    def _begin(self, top: nn.Module, kind: Kind) -> None:
        if current_transform() is not None:
            raise StateError(
                f"{type(self.root).__name__} is group-offloaded: its weights cannot be brought inside of a transform of "
                f"torch.func (grad, vmap, jvp). Use torch.autograd.grad or torch.autograd.functional, which work, or call "
                f"remove() before."
            )
        self.counters.passes += 1
        self._begin_clean()
        self._thread = threading.get_ident()
        watch = self._notice_changes(top) or self._rebuild_for(top)
        if kind.with_grad:
            watch = self._prepare_for_backward(top, watch)
        self._kind = kind
        self._note_times()
        if self.config.has_budgets:
            self._replan(kind)
        self._files.before_pass(type(self.root).__name__)
        self._memory.take()
        self._keep_within_budgets(kind)
        if self._memory.is_just_in_time:
            self._memory.window_bytes = self._window(top)
            weighed = self._activations.setdefault(top, Weighing())
            weighed.begin(self._other_bytes() if self._is_tight else 0)
            self._weighed = weighed
        if self._budgeter.is_timed(kind):
            self._stopwatch.begin(kind, self._backend.current_stream())
        self._lookahead.begin(top, watch.scope)

    def _begin_clean(self) -> None:
        """What every pass begins with: nothing is left of one that was interrupted."""
        if not self._is_clean:
            self._recover()
        self._is_clean = self._is_whole = False
        self._memory.claim()

    def _rebuild_for(self, top: nn.Module) -> Watch:
        # Images that the first one keeps may turn out to be edited: then the second one makes them again.
        for _ in range(_MOST_REBUILDS):
            self._rebuild()
            watch = self._notice_changes(top)
            if watch is not None:
                return watch
        raise StateError(f"{type(self.root).__name__} was changed by another thread while a pass began.")

    def _end(self) -> None:
        if self._has_failed or not self._is_whole:
            self._recover()
            return
        for group in [*self._memory.bound]:
            self._memory.unbind(group)
        self._lookahead.schedule.end(completed=True)
        stream = self._backend.current_stream()
        self._stopwatch.end(stream, completed=True)
        self._budgeter.stop(self.counters.device_bytes, completed=True)
        if self._files.are_read:
            self.transfer.note_drive(self._budgeter.drive)
        for slot in self._memory.slots:
            if slot.last_stream is not None and slot.last_stream != stream:
                stream.wait_event(slot.last_use())  # the end of the pass is the end of what other streams did in it
            if slot.owner is not None and slot.waited_on is None:
                self._backend.record_stream(slot.memory, self.transfer.stream)  # if another module's pass drops it
        if not self._is_stable:
            # What copies read is what can be edited from now on, and nothing would tell.
            self.transfer.finish()
            for slot in self._memory.slots:
                if not all(group.is_stable for group in slot.groups):
                    self._memory.free(slot)
        self._memory.give_back()
        self._thread = 0
        self._is_clean = True

    def _recover(self) -> None:
        """End a pass that failed or was interrupted, wherever that was. See [Note: Interrupts].

        The host waits until no copy is on its way and no slot is read, so that memory that gets another use is nobody's.
        """
        is_whole, self._is_whole = self._is_whole, False
        self._is_clean = False
        self.transfer.recover(is_whole=is_whole)
        for group in self.groups:
            group.recover(self.transfer)
        self._memory.recover()
        self.stalls.recover()
        self._stopwatch.clear()
        self._budgeter.stop(0, completed=False)
        self._watches = {}
        self._lookahead.recover(self.groups, is_whole=is_whole)
        self._memory.reside(self._budgeter.at(Place.DEVICE), self.groups, self.config)
        self._files.look()
        self._thread = 0
        self._has_failed = False
        self._is_whole = self._is_clean = True

    def hold(self, group: Group, *, binds: bool = True) -> None:
        """Let what compute does from now on come after the group's images arrived, which stay until `let_go`.

        Args:
            binds: let the weights be views of the slot, for a module's call.
        """
        if not group.holds:
            self._lookahead.schedule.observe(group)
        if group.residence is Residence.AT_REST:
            # (Backward computes with what its forward had, which the image holds still.)
            was_replaced = group.was_replaced()
            if was_replaced and binds and not self._absorb_replaced([group]):
                raise StateError(
                    f"A weight of {group.group_id!r} was given another dtype, shape or memory that others share, or what it "
                    f"was before is kept, in the middle of a forward. Do that between forwards."
                )
            if group.was_touched() and (binds or not was_replaced):
                group.take_up_edits(self.transfer)
            if group.slot is not None and not group.is_current:
                self._memory.drop(group)
        was_ahead = self._lookahead.is_on_its_way(group)
        if group.slot is None:
            self.counters.stalls += 1
            self._lookahead.onload_now(group)
        slot = group.slot
        assert slot is not None
        stream = self._backend.current_stream()
        if self.tracer is not None:
            self.tracer.compute_arrives(group, stream)
        arrived = self._stopwatch.arrive(stream)
        if slot.waited_on is None:
            self.stalls.arrive(slot, group, stream)
        if slot.job is not None:
            slot = self._wait_for_files(group, slot, was_ahead)
        # Also if it is bound already: this call may compute on another stream. (A torch stream is not unequal to None.)
        if slot.waited_on is None or slot.waited_on != stream:
            self.transfer.last_copies.expect(stream)  # after an interrupt nobody knows which streams read the slots
            stream.wait_event(slot.ready)
            slot.waited_on = stream
        self._stopwatch.waited(arrived, stream)
        if binds and group.residence is Residence.AT_REST:
            group.onload(is_watched=torch.is_grad_enabled())
            self._memory.bound[group] = None
        group.holds += 1
        self._memory.is_used(group, slot)
        if self.tracer is not None:
            self.tracer.compute_begins(group, stream)
        self._stopwatch.start(group, stream)

    def _wait_for_files(self, group: Group, slot: Slot, was_ahead: bool) -> Slot:
        """Wait for the drive, not for the device. What could not be read ahead, earlier, is tried again now.

        Returns:
            The slot that holds the group.
        """
        assert slot.job is not None
        try:
            slot.job.wait()
        except GroupFileError:
            if not was_ahead:
                raise
            self._memory.free(slot)
            self._lookahead.onload_now(group)
            assert group.slot is not None
            slot = group.slot
            if slot.job is not None:
                slot.job.wait()
        slot.job = None
        return slot

    def let_go(self, group: Group, stream: Stream) -> None:
        """What was enqueued on `stream` so far was the last that uses the group."""
        group.holds -= 1
        slot = group.slot
        assert slot is not None
        if slot.last_stream is not None and slot.last_stream != stream:
            stream.wait_event(slot.last_use())  # so that this end includes that one
        slot.note_use(stream)
        if slot.owner is not None and slot.owner != stream:
            self._backend.record_stream(slot.memory, stream)
        if self.tracer is not None:
            self.tracer.compute_ends(group, stream)
        if group.holds:
            return
        self._stopwatch.stop(group, stream)
        self._lookahead.was_let_go(group)
        if not self._lookahead.schedule.expects(group):
            if group in self._memory.bound:
                self._memory.unbind(group)
            if not slot.is_fixed and not slot.is_resident and not slot.unused and not slot.is_held:
                self._memory.free(slot)

    # ---------------------------------------------------------------- backward

    def _prepare_for_backward(self, top: nn.Module, watch: Watch) -> Watch:
        """A forward that records a graph begins."""
        is_first, self.records_graphs = not self.records_graphs, True
        if self._trained.take_up(self._refs):
            return self._rebuild_for(top)
        if not is_first:
            return watch
        share_counters(self.groups)
        self._install_gates()
        return self._notice_changes(top) or self._rebuild_for(top)

    def begin_backward(self) -> None:
        """Autograd needs weights, or repeats calls. The lock is held now, and in each call until `end_backward`."""
        self._refuse_capture()
        forward = self._lookahead.schedule.order
        self.counters.backward_passes += 1
        # What the forward has changed is for the next one: here the graph counts, and groups as they were.
        self._begin_clean()
        self._thread = threading.get_ident()
        kind = Kind((Backward, self.root), (), with_grad=True)
        self._files.before_pass(type(self.root).__name__)
        self._memory.take()
        self._keep_within_budgets(kind)
        self._memory.window_bytes = self._window(self.root)
        self._weighed = Weighing()
        self._lookahead.begin((Backward, self.root), set(self.groups), guess=forward[::-1])
        self._is_whole = True

    def end_backward(self, *, completed: bool) -> None:
        if not self._is_clean:
            self._calls.clear()  # what a checkpoint called again has broken off with it
            self._is_whole &= completed  # it may have broken off anywhere
            self._end()

    def look_ahead(self) -> None:
        """Start what comes next, if there is something to start."""
        self._lookahead.before_call()

    def is_in_forward(self, number: int) -> bool:
        """Whether the forward of this number has yet to end."""
        return self.is_running and not self.backward.is_open and self.counters.passes == number

    def own(self, output: Any, gate: Gate) -> Any:
        """What a call gives, without views of weights in a slot that others take turns in: those get memory of their own."""
        spans = [
            (group.slot.memory.data_ptr() + group.offset, group.num_bytes)
            for group in gate.groups
            if group.slot is not None and group.slot.is_fixed
        ]

        def apart(tensor: torch.Tensor) -> torch.Tensor:
            is_plain = type(tensor) in (torch.Tensor, nn.Parameter)
            is_inside = is_plain and any(0 <= tensor.data_ptr() - start < num_bytes for start, num_bytes in spans)
            return tensor.clone() if is_inside else tensor

        return map_tensors(output, apart, enters_dataclasses=True) if spans else output

    def find_weight(self, tensor: torch.Tensor) -> tuple[Part, int, int] | None:
        """The weight that a tensor is a view of, if it is onloaded: see `Group.find`."""
        address = tensor.data_ptr()
        for group in reversed(self._memory.bound):
            found = group.find(address)
            if found is not None:
                return found
        return None

    def group_of(self, part: Part) -> Group:
        """
        Raises:
            StateError: the part was given up.
        """
        found = self._group_of.get(part)
        if found is None:
            raise StateError(
                f"Backward needs weights of {type(self.root).__name__} that are not offloaded any more: it was cut into groups "
                f"again between forward and backward, because modules were changed, or others require gradients now. Do that "
                f"after backward()."
            )
        return found

    def copy_of(self, saved: SavedWeight) -> torch.Tensor:
        """A saved weight in memory of its own, on the device."""
        source = bytes_at_rest(saved)
        memory = self._backend.empty(source.numel())
        self._backend.copy(memory, source, self._backend.current_stream(), blocking=True)
        return view_of(memory, 0, saved.dtype, saved.size, saved.stride)

    # ---------------------------------------------------------------- budgets

    def _plan_first(self, *, is_first: bool) -> None:
        """Decide what the budgets are, for weights alone, and share files out between RAM and the drive.

        Args:
            is_first: the module is being offloaded. Else it was cut into groups again, and keeps the RAM that it was given.

        Raises:
            ConfigError: a budget is too small.
        """
        config = self.config
        images = [part.image for group in self.groups for part in group.parts]
        in_ram = sum(image.layout.num_bytes for image in images if not isinstance(image, FileImage))
        vram = config.vram_budget
        if vram is AUTO:
            vram = int((self._backend.bytes_in_use() + self._backend.free_bytes()) * _AUTO_SHARE)
        if is_first or self._ram is None:  # without a limit, as long as nothing was in files
            self._ram = self._ram_for_weights(in_ram, is_first=is_first)
        ram = None if self._ram is None else max(self._ram, in_ram)
        promised = 0
        if ram is not None and self._backend.has_streams and (config.ram_budget, config.ram_share) != (None, None):
            promised = min(ram - in_ram, sum(image.layout.num_bytes for image in self._files.images))
        if not self._backend.has_streams and ram is not None and self._files.images:
            # The device is RAM: what rests there is in its way already, and the rest is for what comes from files.
            vram, ram = int((ram - in_ram) * (1 - HOST_ACTIVATIONS_SHARE)), in_ram
        outer = sum(group.num_bytes for group in self.groups if group.height)
        if ram is not None:
            # The outer groups rest in RAM, whatever the plan; so do those that are in no file.
            in_no_file = [group for group in self.groups if not group.height and not group.is_in_file]
            ram = max(sum(group.num_bytes for group in in_no_file), ram - outer)
        plan = self._budgeter.begin(
            self.groups,
            first_guess(self.groups),
            vram=vram,
            ram_bytes=ram,
            outer_bytes=self._memory.outer_bytes,
            staging_bytes=STAGING_BYTES,
            too_small=partial(self._too_small, vram=vram, is_first=is_first),
        )
        self._budgeter.promised_bytes = promised
        if plan is not None and self._backend.has_streams:
            self._share_out_files()

    def _ram_for_weights(self, in_ram: int, *, is_first: bool) -> int | None:
        """RAM for weights, `in_ram` of which they take already; None for no limit."""
        config = self.config
        if config.ram_share is not None:
            return in_ram + config.ram_share
        if self._files.images or config.ram_budget is not None:
            staging = STAGING_BYTES if self._files.images else 0
            turns = 0
            if is_first and self._files.images and not self._backend.has_streams:
                sizes = [group.num_bytes for group in self.groups if not group.height]
                least = sum(nlargest(config.num_slots, sizes)) + self._memory.outer_bytes
                turns = int(least / (1 - HOST_ACTIVATIONS_SHARE)) + 1
            return ram_for_weights(config.ram_budget, in_ram, staging, turn_bytes=turns)
        return None

    def _too_small(self, least: int, *, vram: int | None, is_first: bool) -> ConfigError | None:
        """How to tell that weights need `least` bytes to take turns in; None: they take them."""
        smaller = "or make the groups smaller: offload_type='leaf_level'."
        if self._backend.has_streams:
            return ConfigError(
                f"vram_budget is {describe_bytes(vram or 0)}, and the weights of {type(self.root).__name__} alone take turns "
                f"in {describe_bytes(least, round_up=True)}. Give it that and what activations need, {smaller}"
            )
        if not is_first or not isinstance(self.config.ram_budget, int):
            return None
        missing = int((least - (vram or 0)) / (1 - HOST_ACTIVATIONS_SHARE)) + 1
        return ConfigError(
            f"ram_budget is {describe_bytes(self.config.ram_budget)}, and the weights of {type(self.root).__name__} take turns "
            f"in {describe_bytes(least, round_up=True)} of it. Give it "
            f"{describe_bytes(self.config.ram_budget + missing, round_up=True)} at least, {smaller}"
        )

    def current_plan(self) -> Plan | None:
        """The plan that is carried out, with what is known by now; without budgets, what they would say of how things are.

        None if the module has no weights that take turns.
        """
        self._note_times()
        if not self.config.has_budgets:
            order = self._lookahead.schedule.order
            self._budgeter.describe(self.groups, order, outer_bytes=0, staging_bytes=STAGING_BYTES)
        self._budgeter.refresh()
        return self._budgeter.plan

    def _note_times(self) -> None:
        for timed, by_group, rest in self._stopwatch.results():
            assert isinstance(timed, Kind)
            self._budgeter.note_times(timed, by_group, rest)

    def _share_out_files(self) -> None:
        """Groups that the plan puts into RAM are locked there, and those that are needed around others."""
        in_ram = self._budgeter.at(Place.RAM)
        self._files.share_out(
            part.image
            for group in self.groups
            for part in group.parts
            if isinstance(part.image, FileImage) and group.num_bytes and (group in in_ram or group.height)
        )

    def _replan(self, kind: Kind) -> None:
        """Make the plan again if more is known by now, and carry it out."""
        memory = self._memory
        others = max(0, self._backend.bytes_in_use() - memory.held_bytes - memory.others_bytes)
        order = self._lookahead.schedule.order_of(kind.top)
        if self._budgeter.before_pass(kind, order, others) is not None:
            self._memory.reside(self._budgeter.at(Place.DEVICE), self.groups, self.config)
            if self._backend.has_streams:
                self._share_out_files()

    def _keep_within_budgets(self, kind: Kind) -> None:
        """The slots are there: what is left of the budget is for groups that stay."""
        if self._budgeter.vram is None:
            return
        others = max(0, self._other_bytes())
        self._memory.give_up_residents(self._budgeter.room_for_residents(kind, others))
        if self._budgeter.start(kind, others, self.counters.device_bytes):
            self._memory.resident_room = min(self._memory.resident_room, self.counters.resident_bytes)

    def too_little(self, error: torch.OutOfMemoryError) -> torch.OutOfMemoryError:
        """Device memory ran out in a forward: give up what stays there. The same error, with what helps."""
        given_up = self.counters.resident_bytes
        self._memory.give_up_residents(0)
        self._backend.release_unused()
        if self._kind is not None:
            self._budgeter.ran_out(self._kind)
        if given_up:
            return torch.OutOfMemoryError(
                f"{error} Groups of {type(self.root).__name__} that stayed on the device took {describe_bytes(given_up)}, and "
                f"were given up: call it again. With "
                f"vram_budget={describe_bytes(self._budgeter.smaller_budget(given_up))!r} it would have had that room."
            )
        return torch.OutOfMemoryError(
            f"{error} No group of {type(self.root).__name__} stays on the device that could be given up: a smaller input, "
            f"offload_type='leaf_level', or attention slicing needs less."
        )

    # ---------------------------------------------------------------- how far ahead

    def _window(self, top: nn.Module | None) -> int:
        """Just in time: how much may be on its way in passes that begin at `top`.

        The largest group, mostly. At leaf level that does not hide the copy of a large layer behind a small one's
        compute, which matters where compute, not copies, sets the time: then activations are large, and weights may take
        a third of what those take. With `record_stream` they may from the start. A budget's plan counts on no more than
        the largest group.
        """
        least = max(self._memory.largest, min(MIN_WINDOW_BYTES, self._total_bytes // 8))
        if self.config.offload_type is not OffloadType.LEAF_LEVEL or self._budgeter.vram is not None:
            return least
        if not self._is_tight:
            return _DEEP_WINDOW * least
        weighed = self._activations.get(top) if top is not None else None
        third = 0 if weighed is None else weighed.most // 3
        return max(least, min(_DEEP_WINDOW * least, third))

    def _other_bytes(self) -> int:
        return self._backend.bytes_in_use() - self.counters.device_bytes

    def _weigh_activations(self, module: nn.Module) -> None:
        is_learning = self._lookahead.schedule.is_learning
        if self._is_tight and self._weighed.is_due(module, is_learning, len(self._gates)):
            self._weighed.note(module, self._other_bytes())

    # ---------------------------------------------------------------- changes

    def _notice_changes(self, top: nn.Module) -> Watch | None:
        """Take up what happened to the weights under `top` since they were left at rest.

        Returns:
            What calls under `top` can need; None if the module has to be cut into groups again.
        """
        if not self._is_cut:
            return None
        watch = self._watches.get(top)
        if watch is None:
            is_cut_by_calls = self.records_graphs or self.config.offload_type is OffloadType.LEAF_LEVEL
            groups_of = {module: gate.groups for module, gate in (self._gates | self._inner_gates).items()}
            watch = Watch(top, groups_of, self._seen, is_cut_by_calls=is_cut_by_calls)
            self._watches[top] = watch
        if not watch.has_same_modules():
            return None
        if not watch.has_same_tensors():
            if any(group.was_moved() for group in watch.scope):
                return None
            if not self._absorb_replaced([group for group in watch.scope if not group.is_as_left()]):
                return None
            watch.expect_tensors()
        was_edited = True
        try:
            found = [store.take_up_edits(self.transfer.finish) for store in watch.stores]
            was_edited = any(found)
        finally:
            if was_edited:  # or one could not take them up: others before it may rest in other files by now
                for group in watch.scope:
                    group.rebind_moved()
                watch.expect_tensors()
        if was_edited:
            self._publish_manifest()
            if any(group.is_outdated for group in watch.scope):
                return None
        return watch

    def _absorb_replaced(self, groups: list[Group]) -> bool:
        """Take up values that were put in place of views at rest. False if groups have to be laid out again for that."""
        replaced: list[torch.Tensor] = []
        for group in groups:
            group.check()
            found = group.replaced()
            if found is None:
                return False
            replaced += found
        if replaced:
            # What was tied, or swapped, shares memory with a place at rest: writing there would change another weight.
            at_rest = [view for group in self.groups for part in group.parts for view in part.image.rest]
            clusters = overlapping([tensor.detach() for tensor in replaced] + at_rest)
            if any(cluster[0] < len(replaced) and len(cluster) > 1 for cluster in clusters):
                return False
            for group in groups:
                group.absorb_replaced()
        return True

    def _rebuild(self) -> None:
        for name, module in self.root.named_modules():
            if module not in self._seen and is_offloaded(module):
                raise StateError(
                    f"{name} of {type(self.root).__name__} is group-offloaded as a part of another module. Call "
                    f"remove_group_offloading() on that one before its parts are used here, or put a copy there."
                )
        check_turns(self)
        self.counters.rebuilds += 1
        self._build()

    def _build(self, casts: Mapping[int, torch.dtype] = MappingProxyType({})) -> None:
        """Cut the module into groups, for the first time or because it has changed."""
        self._is_cut = False
        before = self.groups
        if before:
            self._lookahead.abandon()  # images are about to go
            self._stopwatch.clear()
            self._memory.release()  # and will have other sizes
        self.groups = build_groups(
            self.root,
            self.config,
            self._folder,
            before,
            self.transfer.last_copies.synchronize,
            casts,
            self._trained.ids,
        )
        with torch.no_grad():
            for tensor in (*self.root.parameters(), *self.root.buffers()):
                if is_lazy(tensor) and tensor.data.device != self.device:
                    tensor.data = tensor.to(self.device)  # where it will get its shape
        if self.records_graphs:
            share_counters(self.groups)
        self._group_of = {part: group for group in self.groups for part in group.parts}
        self._refs = tuple(ref for part in self._group_of for ref in part.refs)
        self._memory.reside(frozenset(), self.groups, self.config)
        self._total_bytes = sum(group.num_bytes for group in self.groups)
        self._activations = {}
        images = [part.image for group in self.groups for part in group.parts]
        self._is_stable = all(image.is_stable for image in images)
        # What goes through staging buffers of pageable memory holds the launching thread up.
        is_async = all(image.tier is not Tier.PAGEABLE for image in images)
        self._lookahead.reset(self.groups, wraps=self._is_stable and is_async and self.config.use_stream)
        in_files: list[FileImage] = [
            image for image in images if isinstance(image, FileImage) and image.tier is Tier.FILE
        ]
        for image in in_files:
            image.is_verified = self.config.verify_files
        self._files.begin(in_files)
        if self.config.has_budgets:
            self._plan_first(is_first=not before)
        if not self.config.has_budgets or not self._backend.has_streams:
            self._files.choose_ways()
        self._files.lock_what_is_there(was_read=False)
        self.transfer.prepare_for(
            max((image.layout.num_bytes for image in images), default=0),
            sum(image.layout.num_bytes for image in in_files),
            is_scarce=any(image.is_direct for image in in_files),
        )
        self._publish_manifest()
        in_use = {part for group in self.groups for part in group.parts}
        for group in before:
            for part in group.parts:
                if part not in in_use and not part.is_given_up:
                    part.image.close(forget=True)
        self._trained.guard(self._refs)
        self._install_gates()

    def _publish_manifest(self) -> None:
        images = [part.image for group in self.groups for part in group.parts]
        entries = [image.entry for image in images if isinstance(image, GroupFile)]
        if self._folder is not None:
            found = self._folder.publish_manifest(entries, replaces=self._manifest[0] if self._manifest else None)
            self._manifest[:] = [] if found is None else [found]

    def _install_gates(self) -> None:
        self._is_cut = False
        # The root's stays: what is interrupted here is done again by the next call of the root.
        root_gate = self._gates.get(self.root)
        if root_gate is not None and self.root.__dict__.get("_compiled_call_impl") is not root_gate:
            root_gate = None
        for gate in (*self._gates.values(), *self._inner_gates.values()):
            if gate is not root_gate:
                gate.uninstall()
        needs: dict[nn.Module, list[Group]] = {self.root: []}
        for group in self.groups:
            for module in group.modules:
                needs.setdefault(module, []).append(group)
        for child in self.root.children():
            if not isinstance(child, NEVER_CALLED):
                needs.setdefault(child, [])  # calls of a part of the model (`vae.decode`) are passes too
        self._gates = {} if root_gate is None else {self.root: root_gate}
        for module, groups in needs.items():
            gate = self._gates.get(module, Gate(self, module, is_root=module is self.root))
            gate.groups = tuple(sorted(groups, key=lambda group: -group.height))
            self._gates[module] = gate
            if gate is not root_gate:
                gate.install()
        self._install_inner_gates()
        self._watches = {}
        _offloaded.difference_update(self._seen)
        self._seen = {module: Seen.of(module) for module in self.root.modules()}
        _offloaded.update(self._seen)
        self._is_cut = True

    def _install_inner_gates(self) -> None:
        """A checkpoint may repeat the call of any module. Without gradients only what is in no block is called by itself."""
        self._inner_gates = {}
        needs: dict[nn.Module, dict[Group, None]] = {}
        blocks = {block for each in self.root.modules() if isinstance(each, NEVER_CALLED) for block in each.children()}
        for module, gate in self._gates.items():
            if module in blocks and not self.records_graphs:
                continue
            groups = [group for group in gate.groups if group.num_bytes]
            if groups and (gate.compiled is None or module is self.root):
                for inside in _modules_inside(module, self._gates):
                    if not self.records_graphs and not any(map(holds_tensors, inside.modules())):
                        continue
                    needs.setdefault(inside, {}).update(dict.fromkeys(groups))
        for module, held in needs.items():
            inner = self._inner_gates[module] = InnerGate(self, module, is_root=False)
            inner.groups = tuple(held)
            inner.install()


def _modules_inside(top: nn.Module, gates: Mapping[nn.Module, Gate]) -> list[nn.Module]:
    """Modules that are called inside of `top`'s call, up to those that have gates, or compile themselves."""
    found: dict[nn.Module, None] = {}
    pending = [top]
    while pending:
        module = pending.pop()
        if isinstance(module, torch.jit.ScriptModule):
            continue  # what is inside is called by torch's own interpreter
        inside = [each for each in module.children() if not (each in found or each in gates or is_compiled(each))]
        found.update(dict.fromkeys(inside))
        pending += inside
    return [module for module in found if not isinstance(module, NEVER_CALLED)]


def _measure_speeds(backend: Backend, files: CachedFiles) -> Speeds:
    found = known_speeds(backend, next((image.source.path for image in files.images), None))
    h2d = found.h2d if backend.has_streams else _IN_PLACE
    return Speeds(h2d=h2d, drive=found.drive or ASSUMED_DRIVE)


def _leave_all(paths: list[Path]) -> None:
    while paths:
        leave(paths.pop())
