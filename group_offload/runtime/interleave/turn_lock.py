"""The lock of a model whose forwards may be interleaved: it goes from participant to participant.

[Note: Turns of participants]
An interleaved pass has the lock for its length, and one of its participants owns it at a time. All steps of the engine, and
the modules' own code between two gates, run in the thread that owns it. A participant gives the lock away where it comes to a
gate whose groups are not there, and at the end of its forward. Once all participants wait, the lock goes to one that can go on.
If none can, the front goes on: the first of those that wait.

One mutex guards all fields. No step of the engine, and no code of a user, runs under it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from ...base.recent import Recent
from ...base.tuning import tuning

_GLANCE_SECONDS = 1.0
"""How often those who wait look whose turn it is: an interrupt may come between the choice of a participant and its notice."""


class Participant:
    """One forward in an interleaved pass. The mutex of its lock guards its fields, except `calls`."""

    def __init__(self, lock: TurnLock, interleaved: InterleavedPass, shapes: tuple[Any, ...]) -> None:
        self.lock = lock
        self.interleaved = interleaved
        self.shapes = shapes
        self.thread = 0
        """The thread of the forward; 0 until it starts."""
        self.calls: list[Any] = []
        """The gated calls of the forward that are in progress."""
        self.depth = 0
        """How many times the participant has acquired the lock, while it does not own it."""
        self.can_go: Callable[[], bool] | None = None
        """Whether the groups are there that the participant waits for. None if it needs none to go on."""
        self.is_waiting = False
        self.turn = threading.Condition(lock.mutex)


_participants: dict[int, Participant] = {}
"""The participant of each thread of the process that has one."""


def is_on_its_way() -> bool:
    """Whether a forward of this thread shares a pass. A model inside goes alone: the others wait for this thread's turn."""
    return threading.get_ident() in _participants


class InterleavedPass:
    """The forwards that share a pass."""

    def __init__(self) -> None:
        self.participants: list[Participant] = []
        self.size = 0
        """How many forwards the pass departed with; 0 until it departs."""
        self.has_begun = False
        """Whether the pass has begun."""
        self.formed_at = time.monotonic()
        self.departs_at = self.formed_at + tuning().interleave_wait_seconds
        self.is_torn = False
        """Whether a participant has left that still held groups."""
        self.users: dict[Any, set[Participant]] = {}
        """For each group that the interleaved pass holds until all have used it, the participants that have."""


class TurnLock:
    """A reentrant lock, as `threading.RLock`, that an interleaved pass may have: see [Note: Turns of participants]."""

    def __init__(self, switch: Callable[[Participant | None], None]) -> None:
        self._switch = switch
        """Called under the mutex by a participant that has got the lock, and with None by the last one as it leaves."""
        self.mutex = threading.RLock()
        """Reentrant, for finalizers: see `_is_busy`."""
        self._changed = threading.Condition(self.mutex)
        """The lock was released, or an interleaved pass has departed or ended."""
        self.most = 1
        """How many forwards there is room for in one pass, as far as the last pass has shown."""
        self._owner = 0
        self._depth = 0
        self._outsiders: set[int] = set()
        """The threads of no interleaved pass that wait for the lock."""
        self._is_lent = False
        """Whether a participant waits for something that a thread of no interleaved pass does under the lock."""
        self._last: InterleavedPass | None = None
        self._number = 0
        """How many interleaved passes have formed."""
        self._recent: Recent[int, int] = Recent()
        """The number of the interleaved pass that each calling thread took part in last."""

    # ---------------------------------------------------------------- as a lock

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = threading.get_ident()
        if not blocking and self._is_busy:
            return False
        with self.mutex:
            participant = self.here
            if participant is not None:
                self.regain(participant)
            elif self._owner != me:
                self._outsiders.add(me)
                try:
                    seconds = 0 if not blocking else None if timeout < 0 else timeout
                    if not self._changed.wait_for(lambda: not (self._owner or self._is_reserved), seconds):
                        return False
                finally:
                    self._outsiders.discard(me)
                self._owner, self._depth = me, 0
            self._depth += 1
            return True

    def release(self) -> None:
        me = threading.get_ident()
        with self.mutex:
            participant = self.here
            if self._owner != me and participant is not None:  # interrupted where it waited to end a call
                participant.interleaved.is_torn = True
                self._wait_for_turn(participant)
            assert self._owner == me, "the lock is another thread's"
            self._depth -= 1
            if not self._depth:
                self._owner = 0
                if participant is not None:
                    self._remove(participant)
                self._moved()

    def let_go(self) -> None:
        """Take this thread's participant off, and end the turn that an interrupt may have left it."""
        with self.mutex:
            if self._owner == threading.get_ident():
                self._owner = self._depth = 0
            if self.here is not None:
                self._remove(self.here)
            self._moved()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *args: object) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        for thread in [thread for thread, each in _participants.items() if each.lock is self]:
            del _participants[thread]
        self.__init__(self._switch)  # type: ignore[misc]

    def _is_owned(self) -> bool:
        return self._owner == threading.get_ident() and not self._is_busy

    @property
    def _is_busy(self) -> bool:
        """Whether this thread is in the middle of a call of the lock: a finalizer of garbage asks."""
        return self.mutex._is_owned()  # type: ignore[attr-defined,no-any-return]

    # What `threading.Condition` asks of a reentrant lock.

    def _release_save(self) -> int:
        with self.mutex:
            depth, self._owner, self._depth = self._depth, 0, 0
            self._is_lent = self.here is not None
            self._moved()
            return depth

    def _acquire_restore(self, depth: int) -> None:
        me = threading.get_ident()
        with self.mutex:
            is_here = self.here is not None
            self._changed.wait_for(lambda: not (self._owner or (self._is_reserved and not is_here)))
            self._owner, self._depth = me, depth
            self._is_lent &= not is_here

    # ---------------------------------------------------------------- an interleaved pass forms

    def announce(self) -> int:
        """Say that this thread calls the model, and return how many threads have done so lately."""
        with self.mutex:
            self._recent[threading.get_ident()] = self._number
            return len(self._expected)

    def board(self, shapes: Collection[tuple[Any, ...]], mine: list[Participant]) -> None:
        """Join the interleaved pass that forms, with as many forwards as there are `shapes`, and wait until it departs.

        The first of the participants is the calling thread's. `join` is for the threads of the others.

        Args:
            mine: List that gets the participants.
        """
        me = threading.get_ident()

        def has_seats() -> bool:
            last = self._interleaved
            return last is None or (not last.size and len(last.participants) + len(shapes) <= self.most)

        with self.mutex:
            self._changed.wait_for(has_seats)
            interleaved = self._interleaved
            if interleaved is None:
                self._number += 1
                self._last = interleaved = InterleavedPass()
            try:
                for each in shapes:
                    mine.append(Participant(self, interleaved, each))
                    interleaved.participants.append(mine[-1])
                self._recent[me] = self._number
                mine[0].thread = me
                _participants[me] = mine[0]
                while not interleaved.size:
                    if self._may_depart(interleaved):
                        interleaved.size = len(interleaved.participants)
                        self._changed.notify_all()
                    else:
                        self._changed.wait(max(0.001, interleaved.departs_at - time.monotonic()))
            except BaseException:
                for participant in mine:
                    self._remove(participant)
                self._moved()
                raise

    def join(self, participant: Participant) -> bool:
        """Make the calling thread that of the participant, unless it was taken off before."""
        with self.mutex:
            if participant not in participant.interleaved.participants:
                return False
            participant.thread = threading.get_ident()
            _participants[participant.thread] = participant
            return True

    def leave(self, participant: Participant) -> None:
        """Take a participant off that has no thread, and so will not come to the gate."""
        with self.mutex:
            if not participant.thread:
                self._remove(participant)
                self._moved()

    # ---------------------------------------------------------------- on the way

    @property
    def here(self) -> Participant | None:
        """The participant of the calling thread."""
        participant = _participants.get(threading.get_ident())
        return participant if participant is not None and participant.lock is self else None

    def give_way(self, participant: Participant, can_go: Callable[[], bool]) -> None:
        """Let others go on until this participant can, or until no other one can: it is the front then."""
        with self.mutex:
            participant.can_go = can_go
            try:
                if self._owner == participant.thread:
                    participant.depth, self._owner, self._depth = self._depth, 0, 0
                self._wait_for_turn(participant)
            finally:
                participant.can_go = None

    def regain(self, participant: Participant) -> None:
        """Wait for this participant's turn, unless it is there: an interrupt may have come where it gave way."""
        with self.mutex:
            if self._owner == participant.thread:
                self._switch(participant)
            else:
                self._wait_for_turn(participant)

    def _wait_for_turn(self, participant: Participant) -> None:
        me = threading.get_ident()
        participant.is_waiting = True
        try:
            self._pass_on()
            while self._owner != me:
                participant.turn.wait(_GLANCE_SECONDS)
                self._pass_on()
            self._switch(participant)
        finally:
            participant.is_waiting = False
            if self._owner != me:
                self._moved()

    def _pass_on(self) -> None:
        """Give the lock to the participant whose turn it is, if nobody has it, and all have come to where they wait."""
        interleaved = self._interleaved
        if self._owner or interleaved is None or not interleaved.size or self._is_lent:
            return
        waiting = [each for each in interleaved.participants if each.is_waiting]
        if not waiting or len(waiting) < len(interleaved.participants):
            return
        chosen = next((each for each in waiting if each.can_go is None or each.can_go()), waiting[0])
        self._owner, self._depth = chosen.thread, chosen.depth
        chosen.turn.notify()

    # ---------------------------------------------------------------- under the mutex

    @property
    def _interleaved(self) -> InterleavedPass | None:
        """The interleaved pass that forms, or is on its way."""
        last = self._last
        return None if last is None or (last.size and not last.participants) else last

    @property
    def _is_reserved(self) -> bool:
        """Whether an interleaved pass is on its way: the lock is for its participants."""
        return self._interleaved is not None and self._interleaved.size > 0 and not self._is_lent

    @property
    def _expected(self) -> set[int]:
        """The threads that took part in one of the last two interleaved passes, or called since."""
        return {thread for thread, number in self._recent.items() if number >= self._number - 2}

    def _may_depart(self, interleaved: InterleavedPass) -> bool:
        now = time.monotonic()
        missing = self._expected - {each.thread for each in interleaved.participants}
        # Those who wait for the lock go first, and so does who has it and may take part afterwards.
        lets_others_go = now - interleaved.formed_at < tuning().participant_timeout_seconds
        if lets_others_go and (self._outsiders or self._owner in missing):
            interleaved.departs_at = now + tuning().interleave_wait_seconds
            return False
        return len(interleaved.participants) >= self.most or not missing or now >= interleaved.departs_at

    def _remove(self, participant: Participant) -> None:
        interleaved = participant.interleaved
        if participant in interleaved.participants:
            interleaved.participants.remove(participant)
        if _participants.get(participant.thread) is participant:
            del _participants[participant.thread]
        if not interleaved.participants:
            if self._last is interleaved:
                self._last = None
            self._switch(None)

    def _moved(self) -> None:
        self._pass_on()
        self._changed.notify_all()
