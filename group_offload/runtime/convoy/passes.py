"""Passes in which several forwards of one module travel together.

[Note: A convoy]
A convoy is one pass with several forwards, the travellers. Each runs in a thread of its own, and one at a time: see
[Note: Turns of travellers]. Each has its own list of gated calls, which the state machine of `Passes` gets together with the
lock. So a traveller takes the steps of any other pass, with four differences:

- The first traveller begins the pass, and the last one ends it.
- At a gate whose groups no call holds, a traveller gives way: the others compute with the groups that are there first.
- A group lingers: the convoy holds it until all travellers have used it. If nobody can go on, what lingers goes, and the front
  brings what it needs. A traveller that has not come by until then calls in another order. It goes on alone after the others,
  from where it is.
- An interrupt in the middle of a step leaves the pass in an unknown state. The others then end with `Broken`, and
  `SharingPolicy` calls them again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from ...base.device import Stream
from ...base.system import forked_free
from ...base.weak import weakly
from ...errors import StateError
from ..budget.need import Kind
from ..groups.group import Group
from ..passes import Call, Passes, State
from .lock import Traveller, TurnLock


class Broken(StateError):
    """Another traveller was interrupted in the middle of a step of the engine."""


class SharedPasses(Passes):
    """Passes that forwards of several threads may share."""

    at_gate: Callable[[], None] | None = None
    """Called as a call begins in a pass that is not shared."""
    least_too_many = sys.maxsize
    """The fewest forwards that ran out of device memory in one pass."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.lock = self.turns = forked_free(TurnLock(weakly(self._switch)))
        """The module's own lock. Models that share weights have another one, in common, and no convoys."""

    def _switch(self, traveller: Traveller | None) -> None:
        if traveller is None:
            self._calls = []
        else:
            self._calls, self._thread = traveller.calls, traveller.thread

    # ---------------------------------------------------------------- where a pass is

    def wait_for_turn(self, module: nn.Module) -> None:
        if self.turns.here is None:
            super().wait_for_turn(module)

    def edits(self) -> int:
        """A number that rises with each edit of weights that was committed."""
        return self.counters.rebuilds + sum(part.blob.generation for part in self._group_of)

    def were_touched(self) -> bool:
        """Whether weights at rest were changed in place, or replaced, since the last pass, as far as torch counts that."""
        return any(group.was_touched() or group.was_replaced() for group in self._groups)

    # ---------------------------------------------------------------- a call

    def begin_call(self, call: Call, args: Any, kwargs: Any) -> None:
        traveller = self.turns.here
        if traveller is not None:
            self._come_to(call, traveller)
        super().begin_call(call, args, kwargs)
        if traveller is None and self.at_gate is not None:
            self.at_gate()

    def end_call(self, call: Call) -> None:
        traveller = self.turns.here
        if traveller is not None:
            self.turns.regain(traveller)
            assert self.turns._is_owned()
        Passes.end_call(self, call)

    def end_interrupted_call(self, module: Any) -> None:
        traveller = self.turns.here
        if traveller is None:
            super().end_interrupted_call(module)
        elif self.turns._is_owned():
            if self._calls and self._calls[-1].module is module:
                self.forget_interrupted_calls()
            if not self._calls and traveller.convoy.travellers == [traveller] and self._state is not State.CLEAN:
                self.recover()

    def _come_to(self, call: Call, traveller: Traveller) -> None:
        """Wait until the call's groups are there for this traveller to compute with, or until it is the one to bring them."""
        convoy = traveller.convoy

        def can_go() -> bool:
            held = {group for outer in traveller.calls for group in outer.groups}
            return all(
                group.holds and (group in held or traveller not in convoy.users.get(group, ()))
                for group in call.entry.groups
                if group.num_bytes
            )

        assert self.turns._is_owned()
        has_company = len(convoy.travellers) > 1 or convoy.users
        if has_company and not can_go():
            self.turns.give_way(traveller, can_go)
            if not can_go():  # nor can anybody else
                self._drop_lingering(traveller)
        assert self.turns._is_owned()
        if convoy.is_torn:
            self._state = State.UNKNOWN
        if convoy.has_begun and self._state is State.UNKNOWN:
            raise Broken(
                f"A forward of {self.name} ran together with one of another thread that was interrupted. Call it again."
            )

    # ---------------------------------------------------------------- a pass

    def _begin(self, call: Call, kind: Kind, inputs: Any) -> None:
        self.turns.most = max(1, min(self.least_too_many - 1, self.placer.forwards_that_fit(kind)))
        traveller = self.turns.here
        if traveller is None:
            super()._begin(call, kind, inputs)
            return
        convoy = traveller.convoy
        if convoy.has_begun:
            self.before_forward(self.root, inputs)
            self.counters.passes += 1
        else:
            super()._begin(call, Kind.of_all([replace(kind, shapes=each.shapes) for each in convoy.travellers]), inputs)
            convoy.has_begun = True
        if convoy.size > 1:
            self.counters.shared += 1

    def _may_linger(self, call: Call) -> bool:
        return self.turns.here is None and super()._may_linger(call)  # travellers meet at each gate

    def _end(self) -> None:
        traveller = self.turns.here
        if traveller is not None:
            if traveller.convoy.travellers != [traveller]:
                return  # it leaves the convoy as it releases the lock
            if traveller.convoy.is_torn:
                self._state = State.UNKNOWN
            if self._state is State.OPEN:
                self._drop_lingering(traveller)
        super()._end()

    def leave(self) -> None:
        """This thread's forward is over: take its traveller off the convoy. Mostly it has left by itself."""
        traveller = self.turns.here
        try:
            if traveller is not None and traveller in traveller.convoy.travellers:
                with self.turns:
                    if traveller.convoy.has_begun:
                        self._calls.clear()
                        self._end()
        finally:
            self.turns.let_go()

    # ---------------------------------------------------------------- a group

    def acquire(self, group: Group, *, binds: bool = True) -> None:
        super().acquire(group, binds=binds)
        traveller = self.turns.here
        if traveller is not None:
            convoy = traveller.convoy
            if len(convoy.travellers) > 1 and group not in convoy.users:
                convoy.users[group] = set()
                group.holds += 1
            convoy.users.get(group, set()).add(traveller)

    def release(self, group: Group, stream: Stream) -> None:
        traveller = self.turns.here
        if traveller is not None:
            convoy = traveller.convoy
            used = convoy.users.get(group)
            if used is not None and used.issuperset(convoy.travellers):
                del convoy.users[group]
                group.holds -= 1
        super().release(group, stream)

    def _drop_lingering(self, traveller: Traveller) -> None:
        """Release what nobody but the convoy holds, for travellers that have not come by."""
        convoy = traveller.convoy
        state, self._state = self._state, State.UNKNOWN
        if state is State.UNKNOWN:
            return
        for group in [each for each in convoy.users if each.holds == 1]:
            del convoy.users[group]
            stream = None if group.slot is None else group.slot.last_stream
            super().release(group, stream or self.backend.current_stream())
        self._state = state
