"""Passes in which several forwards of one module are interleaved.

[Note: Interleaved passes]
An interleaved pass is one pass with several forwards, the participants. Each runs in a thread of its own, and one at a time:
see [Note: Turns of participants]. Each has its own list of gated calls, which the state machine of `Passes` gets together with
the lock. So a participant takes the steps of any other pass, with four differences:

- The first participant begins the pass, and the last one ends it.
- At a gate whose groups no call holds, a participant gives way: the others compute with the groups that are there first.
- A group lingers: the interleaved pass holds it until all participants have used it. If nobody can go on, what lingers goes,
  and the front brings what it needs. A participant that has not come by until then calls in another order. It goes on alone
  after the others, from where it is.
- An interrupt in the middle of a step leaves the pass in an unknown state. The others then end with `Broken`, and
  `InterleavePolicy` calls them again.
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
from ..budget.need import InputSignature
from ..groups.group import Group
from ..passes import Call, Passes, PassState
from .turn_lock import Participant, TurnLock


class Broken(StateError):
    """Another participant was interrupted in the middle of a step of the engine."""


class InterleavedPasses(Passes):
    """Passes that forwards of several threads may share."""

    at_gate: Callable[[], None] | None = None
    """Called as a call begins in a pass that is not shared."""
    least_too_many = sys.maxsize
    """The fewest forwards that ran out of device memory in one pass."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.lock = self.turns = forked_free(TurnLock(weakly(self._switch)))
        """The module's own lock. Models that share weights have another one, in common, and no interleaved passes."""

    def _switch(self, participant: Participant | None) -> None:
        if participant is None:
            self._calls = []
        else:
            self._calls, self._thread = participant.calls, participant.thread

    # ---------------------------------------------------------------- where a pass is

    def wait_for_turn(self, module: nn.Module) -> None:
        if self.turns.here is None:
            super().wait_for_turn(module)

    def edits(self) -> int:
        """A number that rises with each edit of weights that was committed."""
        return self.counters.rebuilds + sum(part.blob.generation for part in self._group_of)

    def were_touched(self) -> bool:
        """Whether offloaded weights were changed in place, or replaced, since the last pass, as far as torch counts that."""
        return any(group.was_touched() or group.was_replaced() for group in self._groups)

    # ---------------------------------------------------------------- a call

    def begin_call(self, call: Call, args: Any, kwargs: Any) -> None:
        participant = self.turns.here
        if participant is not None:
            self._come_to(call, participant)
        super().begin_call(call, args, kwargs)
        if participant is None and self.at_gate is not None:
            self.at_gate()

    def end_call(self, call: Call) -> None:
        participant = self.turns.here
        if participant is not None:
            self.turns.regain(participant)
            assert self.turns._is_owned()
        Passes.end_call(self, call)

    def end_interrupted_call(self, module: Any) -> None:
        participant = self.turns.here
        if participant is None:
            super().end_interrupted_call(module)
        elif self.turns._is_owned():
            if self._calls and self._calls[-1].module is module:
                self.forget_interrupted_calls()
            is_last = participant.interleaved.participants == [participant]
            if not self._calls and is_last and self._state is not PassState.CLEAN:
                self.recover()

    def _come_to(self, call: Call, participant: Participant) -> None:
        """Wait until the call's groups are there for this participant to compute with, or until it is the one to bring them."""
        interleaved = participant.interleaved

        def can_go() -> bool:
            held = {group for outer in participant.calls for group in outer.groups}
            return all(
                group.holds and (group in held or participant not in interleaved.users.get(group, ()))
                for group in call.entry.groups
                if group.num_bytes
            )

        assert self.turns._is_owned()
        has_company = len(interleaved.participants) > 1 or interleaved.users
        if has_company and not can_go():
            self.turns.give_way(participant, can_go)
            if not can_go():  # nor can anybody else
                self._drop_lingering(participant)
        assert self.turns._is_owned()
        if interleaved.is_torn:
            self._state = PassState.UNKNOWN
        if interleaved.has_begun and self._state is PassState.UNKNOWN:
            raise Broken(
                f"A forward of {self.name} ran together with one of another thread that was interrupted. Call it again."
            )

    # ---------------------------------------------------------------- a pass

    def _begin(self, call: Call, kind: InputSignature, inputs: Any) -> None:
        self.turns.most = max(1, min(self.least_too_many - 1, self.placer.forwards_that_fit(kind)))
        participant = self.turns.here
        if participant is None:
            super()._begin(call, kind, inputs)
            return
        interleaved = participant.interleaved
        if interleaved.has_begun:
            self.before_forward(self.root, inputs)
            self.counters.passes += 1
        else:
            kinds = [replace(kind, shapes=each.shapes) for each in interleaved.participants]
            super()._begin(call, InputSignature.of_all(kinds), inputs)
            interleaved.has_begun = True
        if interleaved.size > 1:
            self.counters.shared += 1

    def _may_linger(self, call: Call) -> bool:
        return self.turns.here is None and super()._may_linger(call)  # participants meet at each gate

    def _end(self) -> None:
        participant = self.turns.here
        if participant is not None:
            if participant.interleaved.participants != [participant]:
                return  # it leaves the interleaved pass as it releases the lock
            if participant.interleaved.is_torn:
                self._state = PassState.UNKNOWN
            if self._state is PassState.OPEN:
                self._drop_lingering(participant)
        super()._end()

    def leave(self) -> None:
        """This thread's forward is over: take its participant off the interleaved pass. Mostly it has left by itself."""
        participant = self.turns.here
        try:
            if participant is not None and participant in participant.interleaved.participants:
                with self.turns:
                    if participant.interleaved.has_begun:
                        self._calls.clear()
                        self._end()
        finally:
            self.turns.let_go()

    # ---------------------------------------------------------------- a group

    def acquire(self, group: Group, *, binds: bool = True) -> None:
        super().acquire(group, binds=binds)
        participant = self.turns.here
        if participant is not None:
            interleaved = participant.interleaved
            if len(interleaved.participants) > 1 and group not in interleaved.users:
                interleaved.users[group] = set()
                group.holds += 1
            interleaved.users.get(group, set()).add(participant)

    def release(self, group: Group, stream: Stream) -> None:
        participant = self.turns.here
        if participant is not None:
            interleaved = participant.interleaved
            used = interleaved.users.get(group)
            if used is not None and used.issuperset(interleaved.participants):
                del interleaved.users[group]
                group.holds -= 1
        super().release(group, stream)

    def _drop_lingering(self, participant: Participant) -> None:
        """Release what nobody but the interleaved pass holds, for participants that have not come by."""
        interleaved = participant.interleaved
        state, self._state = self._state, PassState.UNKNOWN
        if state is PassState.UNKNOWN:
            return
        for group in [each for each in interleaved.users if each.holds == 1]:
            del interleaved.users[group]
            stream = None if group.slot is None else group.slot.last_stream
            super().release(group, stream or self.backend.current_stream())
        self._state = state
