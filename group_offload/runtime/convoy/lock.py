"""The lock of a model whose forwards may travel together: it goes from traveller to traveller.

[Note: Turns of travellers]
A convoy has the lock for the length of its pass, and one of its travellers owns it at a time. All steps of the engine, and the
modules' own code between two gates, run in the thread that owns it. A traveller gives the lock away where it comes to a gate
whose groups are not there, and at the end of its forward. Once all travellers wait, the lock goes to one that can go on. If
none can, the front goes on: the first of those that wait.

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
"""How often those who wait look whose turn it is: an interrupt may come between the choice of a traveller and its notice."""


class Traveller:
    """One forward in a convoy. The mutex of its lock guards its fields, except `calls`."""

    def __init__(self, lock: TurnLock, convoy: Convoy, shapes: tuple[Any, ...]) -> None:
        self.lock = lock
        self.convoy = convoy
        self.shapes = shapes
        self.thread = 0
        """The thread of the forward; 0 until it starts."""
        self.calls: list[Any] = []
        """The gated calls of the forward that are in progress."""
        self.depth = 0
        """How many times the traveller has acquired the lock, while it does not own it."""
        self.can_go: Callable[[], bool] | None = None
        """Whether the groups are there that the traveller waits for. None if it needs none to go on."""
        self.is_waiting = False
        self.turn = threading.Condition(lock.mutex)


_travellers: dict[int, Traveller] = {}
"""The traveller of each thread of the process that has one."""


def is_on_its_way() -> bool:
    """Whether a forward of this thread shares a pass. A model inside goes alone: the others wait for this thread's turn."""
    return threading.get_ident() in _travellers


class Convoy:
    """The forwards that share a pass."""

    def __init__(self) -> None:
        self.travellers: list[Traveller] = []
        self.size = 0
        """How many forwards began the journey; 0 until it departs."""
        self.has_begun = False
        """Whether the convoy's pass has begun."""
        self.formed_at = time.monotonic()
        self.departs_at = self.formed_at + tuning().convoy_wait_seconds
        self.is_torn = False
        """Whether a traveller has left that still held groups."""
        self.users: dict[Any, set[Traveller]] = {}
        """For each group that the convoy holds until all have used it, the travellers that have."""


class TurnLock:
    """A reentrant lock, as `threading.RLock`, that a convoy may have: see [Note: Turns of travellers]."""

    def __init__(self, switch: Callable[[Traveller | None], None]) -> None:
        self._switch = switch
        """Called under the mutex by a traveller that has got the lock, and with None by the last one as it leaves."""
        self.mutex = threading.RLock()
        """Reentrant, for finalizers: see `_is_busy`."""
        self._changed = threading.Condition(self.mutex)
        """The lock was released, or a convoy has departed or ended."""
        self.most = 1
        """How many forwards there is room for in one pass, as far as the last pass has shown."""
        self._owner = 0
        self._depth = 0
        self._outsiders: set[int] = set()
        """The threads of no convoy that wait for the lock."""
        self._is_lent = False
        """Whether a traveller waits for something that a thread of no convoy does under the lock."""
        self._last: Convoy | None = None
        self._number = 0
        """How many convoys have formed."""
        self._recent: Recent[int, int] = Recent()
        """The number of the convoy that each calling thread came along with last."""

    # ---------------------------------------------------------------- as a lock

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = threading.get_ident()
        if not blocking and self._is_busy:
            return False
        with self.mutex:
            traveller = self.here
            if traveller is not None:
                self.regain(traveller)
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
            traveller = self.here
            if self._owner != me and traveller is not None:  # interrupted where it waited to end a call
                traveller.convoy.is_torn = True
                self._wait_for_turn(traveller)
            assert self._owner == me, "the lock is another thread's"
            self._depth -= 1
            if not self._depth:
                self._owner = 0
                if traveller is not None:
                    self._remove(traveller)
                self._moved()

    def let_go(self) -> None:
        """Take this thread's traveller off, and end the turn that an interrupt may have left it."""
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
        for thread in [thread for thread, each in _travellers.items() if each.lock is self]:
            del _travellers[thread]
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

    # ---------------------------------------------------------------- a convoy forms

    def announce(self) -> int:
        """Say that this thread calls the model, and return how many threads have done so lately."""
        with self.mutex:
            self._recent[threading.get_ident()] = self._number
            return len(self._expected)

    def board(self, shapes: Collection[tuple[Any, ...]], mine: list[Traveller]) -> None:
        """Join the convoy that forms, with as many forwards as there are `shapes`, and wait until it departs.

        The first of the travellers is the calling thread's. `embark` is for the threads of the others.

        Args:
            mine: List that gets the travellers.
        """
        me = threading.get_ident()

        def has_seats() -> bool:
            last = self._convoy
            return last is None or (not last.size and len(last.travellers) + len(shapes) <= self.most)

        with self.mutex:
            self._changed.wait_for(has_seats)
            convoy = self._convoy
            if convoy is None:
                self._number += 1
                self._last = convoy = Convoy()
            try:
                for each in shapes:
                    mine.append(Traveller(self, convoy, each))
                    convoy.travellers.append(mine[-1])
                self._recent[me] = self._number
                mine[0].thread = me
                _travellers[me] = mine[0]
                while not convoy.size:
                    if self._may_depart(convoy):
                        convoy.size = len(convoy.travellers)
                        self._changed.notify_all()
                    else:
                        self._changed.wait(max(0.001, convoy.departs_at - time.monotonic()))
            except BaseException:
                for traveller in mine:
                    self._remove(traveller)
                self._moved()
                raise

    def embark(self, traveller: Traveller) -> bool:
        """Make the calling thread that of the traveller, unless it was taken off before."""
        with self.mutex:
            if traveller not in traveller.convoy.travellers:
                return False
            traveller.thread = threading.get_ident()
            _travellers[traveller.thread] = traveller
            return True

    def disembark(self, traveller: Traveller) -> None:
        """Take a traveller off that has no thread, and so will not come to the gate."""
        with self.mutex:
            if not traveller.thread:
                self._remove(traveller)
                self._moved()

    # ---------------------------------------------------------------- on the way

    @property
    def here(self) -> Traveller | None:
        """The traveller of the calling thread."""
        traveller = _travellers.get(threading.get_ident())
        return traveller if traveller is not None and traveller.lock is self else None

    def give_way(self, traveller: Traveller, can_go: Callable[[], bool]) -> None:
        """Let others go on until this traveller can, or until no other one can: it is the front then."""
        with self.mutex:
            traveller.can_go = can_go
            try:
                if self._owner == traveller.thread:
                    traveller.depth, self._owner, self._depth = self._depth, 0, 0
                self._wait_for_turn(traveller)
            finally:
                traveller.can_go = None

    def regain(self, traveller: Traveller) -> None:
        """Wait for this traveller's turn, unless it is there: an interrupt may have come where it gave way."""
        with self.mutex:
            if self._owner == traveller.thread:
                self._switch(traveller)
            else:
                self._wait_for_turn(traveller)

    def _wait_for_turn(self, traveller: Traveller) -> None:
        me = threading.get_ident()
        traveller.is_waiting = True
        try:
            self._pass_on()
            while self._owner != me:
                traveller.turn.wait(_GLANCE_SECONDS)
                self._pass_on()
            self._switch(traveller)
        finally:
            traveller.is_waiting = False
            if self._owner != me:
                self._moved()

    def _pass_on(self) -> None:
        """Give the lock to the traveller whose turn it is, if nobody has it, and all have come to where they wait."""
        convoy = self._convoy
        if self._owner or convoy is None or not convoy.size or self._is_lent:
            return
        waiting = [each for each in convoy.travellers if each.is_waiting]
        if not waiting or len(waiting) < len(convoy.travellers):
            return
        chosen = next((each for each in waiting if each.can_go is None or each.can_go()), waiting[0])
        self._owner, self._depth = chosen.thread, chosen.depth
        chosen.turn.notify()

    # ---------------------------------------------------------------- under the mutex

    @property
    def _convoy(self) -> Convoy | None:
        """The convoy that forms, or is on its way."""
        last = self._last
        return None if last is None or (last.size and not last.travellers) else last

    @property
    def _is_reserved(self) -> bool:
        """Whether a convoy is on its way: the lock is for its travellers."""
        return self._convoy is not None and self._convoy.size > 0 and not self._is_lent

    @property
    def _expected(self) -> set[int]:
        """The threads that came along with one of the last two convoys."""
        return {thread for thread, number in self._recent.items() if number >= self._number - 2}

    def _may_depart(self, convoy: Convoy) -> bool:
        now = time.monotonic()
        missing = self._expected - {each.thread for each in convoy.travellers}
        # Those who wait for the lock go first, and who has it and may come along afterwards.
        if (self._outsiders or self._owner in missing) and now - convoy.formed_at < tuning().convoy_patience_seconds:
            convoy.departs_at = now + tuning().convoy_wait_seconds
            return False
        return len(convoy.travellers) >= self.most or not missing or now >= convoy.departs_at

    def _remove(self, traveller: Traveller) -> None:
        convoy = traveller.convoy
        if traveller in convoy.travellers:
            convoy.travellers.remove(traveller)
        if _travellers.get(traveller.thread) is traveller:
            del _travellers[traveller.thread]
        if not convoy.travellers:
            if self._last is convoy:
                self._last = None
            self._switch(None)

    def _moved(self) -> None:
        self._pass_on()
        self._changed.notify_all()
