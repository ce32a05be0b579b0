"""The lock of a model whose forwards may travel together: it goes from traveller to traveller.

[Note: Turns of travellers]
A convoy has the lock for the length of its pass, and one of its travellers owns it at a time. All steps of the engine, and the
modules' own code between two gates, run in the thread that owns it. A traveller gives the lock away where it comes to a gate
whose groups are not there, and at the end of its forward. The lock then goes to a traveller that can go on. If none can, the
front goes on: the first of those that wait. A traveller that stays in its own code for longer than
`Tuning.traveller_patience_seconds` while others wait is left behind: the lock is taken from it. It waits for its turn at its
next gate, and nobody waits for it any more.

One mutex guards all fields. No step of the engine, and no code of a user, runs under it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from ...base.recent import Recent
from ...base.tuning import tuning

TIMEOUT_MAX = threading.TIMEOUT_MAX
IN_THE_ENGINE = float("inf")
"""See `Traveller.since`."""


class CalledOff(BaseException):
    """Ends the forward of a traveller whose result nobody wants any more. No handler of errors is meant to catch it."""


class Traveller:
    """One forward in a convoy. The mutex of its lock guards its fields, except `calls`."""

    def __init__(self, convoy: Convoy, mutex: Any, shapes: Collection[Any]) -> None:
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
        self.is_behind = False
        """Whether the traveller was left behind. Nobody waits for it any more."""
        self.is_called_off = False
        self.leads = False
        """Whether the traveller got the lock because no other one could go on."""
        self.since = time.monotonic()
        """The time since when the traveller runs code that is not the engine's; infinite in a step of the engine."""
        self.turn = threading.Condition(mutex)


class Convoy:
    """The forwards that share a pass."""

    def __init__(self, number: int, most: int) -> None:
        self.number = number
        self.most = most
        """How many forwards there is room for."""
        self.travellers: list[Traveller] = []
        self.callers: set[int] = set()
        """The threads that have called the model, and not been started for a forward."""
        self.size = 0
        """How many forwards began the journey."""
        self.has_departed = False
        self.has_begun = False
        """Whether the convoy's pass has begun."""
        self.formed_at = time.monotonic()
        self.is_torn = False
        """Whether a traveller has left that still held groups."""
        self.departs_at = self.formed_at + tuning().convoy_wait_seconds
        self.users: dict[Any, set[Traveller]] = {}
        """For each group that is held, the travellers that have used it since it was brought."""
        self.lingering: dict[Any, None] = {}
        """The groups that the convoy itself holds, for travellers that have yet to use them."""
        self.bytes_before = 0
        """The bytes sent before the pass began."""


class TurnLock:
    """A reentrant lock, as `threading.RLock`, that a convoy may have: see [Note: Turns of travellers]."""

    def __init__(self, switch: Callable[[Traveller | None], None]) -> None:
        """
        Args:
            switch: Function that is called under the mutex when the lock goes to a traveller, and with None when it leaves the
                last one.
        """
        self._switch = switch
        self._mutex = threading.RLock()
        """Reentrant, for finalizers: see `_is_busy`."""
        self._changed = threading.Condition(self._mutex)
        """The lock was released, or a convoy has departed or ended."""
        self._owner = 0
        self._depth = 0
        self._owned_since = 0.0
        """When a thread of no convoy has acquired the lock last."""
        self._outsiders: dict[int, float] = {}
        """The threads of no convoy that wait for the lock, and since when."""
        self._is_lent = False
        """Whether a traveller waits for something that a thread of no convoy does under the lock."""
        self._here: dict[int, Traveller] = {}
        self._convoy: Convoy | None = None
        self._number = 0
        self._recent: Recent[int, int] = Recent()
        """The number of the convoy that each calling thread came along with last."""

    # ---------------------------------------------------------------- as a lock

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = threading.get_ident()
        if not blocking and self._is_busy:
            return False
        with self._mutex:
            if self._owner == me:
                self._depth += 1
                return True
            traveller = self._here.get(me)
            if traveller is not None:
                self._wait_for_turn(traveller, may_end=True)
                self._depth += 1
                return True
            if not blocking:
                timeout = 0
            deadline = time.monotonic() + (TIMEOUT_MAX if timeout < 0 else timeout)
            self._outsiders[me] = time.monotonic()
            try:
                while self._owner or self._is_reserved:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return False
                    self._changed.wait(min(left, 3600))
                self._owner, self._depth, self._owned_since = me, 1, time.monotonic()
                return True
            finally:
                del self._outsiders[me]

    def release(self) -> None:
        me = threading.get_ident()
        with self._mutex:
            traveller = self._here.get(me)
            if self._owner != me and traveller is not None:  # interrupted where it waited to end a call
                traveller.convoy.is_torn = True
                self._wait_for_turn(traveller)
            assert self._owner == me, "the lock is another thread's"
            self._depth -= 1
            if traveller is not None:
                traveller.since = time.monotonic()
            if not self._depth:
                self._owner = 0
                if traveller is not None:
                    self._remove(traveller)
                self._moved()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *args: object) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        self.__init__(self._switch)  # type: ignore[misc]

    def _is_owned(self) -> bool:
        return self._owner == threading.get_ident() and not self._is_busy

    @property
    def _is_busy(self) -> bool:
        """Whether this thread is in the middle of a call of the lock: a finalizer of garbage asks."""
        return self._mutex._is_owned()  # type: ignore[attr-defined,no-any-return]

    # What `threading.Condition` asks of a reentrant lock.

    def _release_save(self) -> int:
        with self._mutex:
            depth, self._owner, self._depth = self._depth, 0, 0
            self._is_lent = threading.get_ident() in self._here
            self._moved()
            return depth

    def _acquire_restore(self, depth: int) -> None:
        me = threading.get_ident()
        with self._mutex:
            while self._owner or (me not in self._here and self._is_reserved):
                self._changed.wait()
            self._owner, self._depth = me, depth
            if me in self._here:
                self._is_lent = False

    # ---------------------------------------------------------------- a convoy forms

    def announce(self) -> int:
        """Say that this thread calls the model, and return how many threads have done so lately."""
        with self._mutex:
            self._recent[threading.get_ident()] = self._number
            return len(self._expected)

    def board(self, shapes: Collection[Collection[Any]], most: int, mine: list[Traveller]) -> None:
        """Join the convoy that forms, with as many forwards as there are `shapes`, and wait until it departs.

        The first of the travellers is the calling thread's. `embark` is for the threads of the others.

        Args:
            most: How many forwards there is room for.
            mine: List that gets the travellers.
        """
        me = threading.get_ident()
        with self._mutex:
            self._recent[me] = self._number
            while not self._has_seats(len(shapes), most):
                self._changed.wait()
            if self._convoy is None:
                self._number += 1
                self._convoy = Convoy(self._number, most)
            convoy = self._convoy
            try:
                convoy.most = min(convoy.most, most)
                for each in shapes:
                    mine.append(Traveller(convoy, self._mutex, each))
                    convoy.travellers.append(mine[-1])
                convoy.callers.add(me)
                self._recent[me] = convoy.number
                mine[0].thread = me
                self._here[me] = mine[0]
                while not convoy.has_departed:
                    if self._may_depart(convoy):
                        self._depart(convoy)
                    else:
                        self._changed.wait(max(0.001, convoy.departs_at - time.monotonic()))
            except BaseException:
                for traveller in mine:
                    self._remove(traveller)
                self._moved()
                raise
            mine[0].since = time.monotonic()

    def embark(self, traveller: Traveller) -> None:
        """Make the calling thread that of the traveller."""
        with self._mutex:
            traveller.thread = threading.get_ident()
            traveller.since = time.monotonic()
            self._here[traveller.thread] = traveller

    def disembark(self, traveller: Traveller) -> None:
        """Take a traveller off that will not come to the gate, or has not left."""
        with self._mutex:
            if self._owner and self._owner == traveller.thread and self._here.get(self._owner) is traveller:
                self._owner = self._depth = 0
            self._remove(traveller)
            self._moved()

    def call_off(self, traveller: Traveller) -> None:
        """Let the traveller's forward end at the next gate that it waits at."""
        with self._mutex:
            traveller.is_called_off = True
            traveller.turn.notify()

    # ---------------------------------------------------------------- on the way

    @property
    def here(self) -> Traveller | None:
        """The traveller of the calling thread."""
        return self._here.get(threading.get_ident())

    def give_way(self, traveller: Traveller, can_go: Callable[[], bool]) -> bool:
        """Let others go on until this traveller can, or until no other one can.

        Returns:
            Whether the traveller is the front: no other one could go on.
        """
        with self._mutex:
            traveller.can_go = can_go
            try:
                if self._owner == traveller.thread:
                    traveller.depth, self._owner, self._depth = self._depth, 0, 0
                self._wait_for_turn(traveller, may_end=True)
            finally:
                traveller.can_go = None
            return traveller.leads

    def regain(self, traveller: Traveller) -> None:
        """Wait for this traveller's turn, if it was left behind."""
        with self._mutex:
            if self._owner != traveller.thread:
                self._wait_for_turn(traveller)

    def _wait_for_turn(self, traveller: Traveller, *, may_end: bool = False) -> None:
        """
        Args:
            may_end: Whether a forward that nobody wants may end here: no call of it is about to end.
        """
        me = threading.get_ident()
        traveller.leads = False
        try:
            while True:
                traveller.is_waiting = self._owner != me
                self._pass_on()
                if self._owner == me:
                    return
                if may_end and traveller.is_called_off:
                    traveller.is_called_off = False  # the calls that it unwinds through need the lock
                    raise CalledOff
                patience = tuning().traveller_patience_seconds
                if not traveller.turn.wait(patience / 4):
                    self._overtake(patience)
        finally:
            traveller.is_waiting = False
            if self._owner != me:
                self._moved()

    def _pass_on(self) -> None:
        """Give the lock to the traveller whose turn it is, if nobody has it."""
        convoy = self._convoy
        if self._owner or convoy is None or not convoy.has_departed or self._is_lent:
            return
        waiting = [each for each in convoy.travellers if each.is_waiting]
        if not waiting or any(not (each.is_waiting or each.is_behind) for each in convoy.travellers):
            return
        chosen = next((each for each in waiting if each.can_go is None or each.can_go()), None)
        leads = chosen is None
        if chosen is None:
            chosen = next((each for each in waiting if not each.is_behind), waiting[0])
        self._owner, self._depth = chosen.thread, chosen.depth
        chosen.is_waiting, chosen.leads = False, leads
        chosen.since = IN_THE_ENGINE
        self._switch(chosen)
        chosen.turn.notify()

    def _overtake(self, patience: float) -> None:
        """Leave those behind that have run code of their own for too long."""
        convoy, now = self._convoy, time.monotonic()
        if convoy is None or not convoy.has_departed:
            return
        for each in convoy.travellers:
            if not (each.is_waiting or each.is_behind) and now - each.since > patience:
                each.is_behind = True
                if self._owner == each.thread:
                    each.depth, self._owner, self._depth = self._depth, 0, 0

    # ---------------------------------------------------------------- under the mutex

    @property
    def _is_reserved(self) -> bool:
        """Whether a convoy is on its way: the lock is for its travellers."""
        return self._convoy is not None and self._convoy.has_departed and not self._is_lent

    @property
    def _expected(self) -> set[int]:
        """The threads that came along with one of the last two convoys."""
        return {thread for thread, number in self._recent.items() if number >= self._number - 2}

    def _has_seats(self, num: int, most: int) -> bool:
        convoy = self._convoy
        if convoy is None:
            return True
        return not convoy.has_departed and len(convoy.travellers) + num <= min(most, convoy.most)

    def _may_depart(self, convoy: Convoy) -> bool:
        now, wait = time.monotonic(), tuning().convoy_wait_seconds
        missing = self._expected - convoy.callers
        is_complete = len(convoy.travellers) >= convoy.most or not missing
        # Those who waited before it formed go first, and those who may come along afterwards.
        goes_first = any(at < convoy.formed_at or thread in missing for thread, at in self._outsiders.items())
        if goes_first and now - convoy.formed_at < tuning().traveller_patience_seconds:
            convoy.departs_at = now + wait
            return False
        # Nobody waits for a thread that takes the lock again and again.
        if self._owner and self._owned_since <= convoy.formed_at and not is_complete:
            convoy.departs_at = now + wait
        return is_complete or now >= convoy.departs_at

    def _depart(self, convoy: Convoy) -> None:
        convoy.has_departed = True
        convoy.size = len(convoy.travellers)
        here = self._expected
        if convoy.size < convoy.most:
            here &= convoy.callers  # nobody waits again for those who have not come
        for thread in self._recent.keys() - here:
            del self._recent[thread]
        self._changed.notify_all()

    def _remove(self, traveller: Traveller) -> None:
        convoy = traveller.convoy
        if traveller in convoy.travellers:
            convoy.travellers.remove(traveller)
        if self._here.get(traveller.thread) is traveller:
            del self._here[traveller.thread]
        if not convoy.travellers and self._convoy is convoy:
            self._convoy = None
            self._switch(None)

    def _moved(self) -> None:
        self._pass_on()
        self._changed.notify_all()
