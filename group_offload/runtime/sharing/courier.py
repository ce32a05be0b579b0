"""The thread of a rank that offers groups to the others, and sends what all have agreed on. See [Note: How ranks agree]."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ...base.device import Event
from ...base.system import started_at
from ...base.tuning import tuning
from ...errors import StateError
from .board import Board, State, all_of
from .jobs import Progress, Shared, ShareJob
from .links import Link

logger = logging.getLogger("group_offload")

_WAITED_FOR_SECONDS = 1e-4
"""The time between two looks while compute waits, here or elsewhere. A copy of a group takes longer."""
_BUSY_SECONDS = 2e-4
"""The same while copies are about to begin, or parts are on their way. Each look takes Python's time from the thread that
launches compute; with fewer looks ranks that compute together wait longer for each other."""
_IDLE_SECONDS = 2e-3
"""The same while groups are offered that nobody waits for."""
_JOIN_SECONDS = 5.0
_MOST_HALVINGS = 5
"""Of a pass's patience. With less, ranks that have gone apart for long would never meet again."""
_LOOK_SECONDS = 0.05
"""The time between two looks at whether the other ranks are still there, while something waits for them."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The process of a rank."""

    rank: int
    """Its number among all processes."""
    pid: int
    started: str | None

    @property
    def is_there(self) -> bool:
        return started_at(self.pid) == self.started


@dataclass(slots=True)
class _Model:
    """What the thread knows of one offloaded model."""

    patience: float = 0.0
    """For how much longer the pass may wait for other ranks, in seconds."""
    read_limit: float = 0.0
    """For how long, in seconds, the pass may wait for ranks that read while no group arrives."""
    read_patience: float = 0.0
    """What is left of that."""
    misses: int = 0
    """How many passes in a row have offered groups, and gathered none."""
    num_offered: int = 0
    num_gathered: int = 0
    has_left: bool = False
    """Whether this rank does not run it any more."""
    jobs: dict[ShareJob, None] = field(default_factory=dict)


@dataclass(slots=True)
class _OnWay:
    """A group of the log that has not arrived."""

    job: ShareJob
    shared: Shared
    sent: list[Event]
    """They are behind this rank's parts."""
    since: float


class Courier:
    """One thread, for all models that a rank shares with the same other ranks. Only the thread uses the board."""

    def __init__(self, board: Board, peers: Sequence[Peer], link: Link, enter: Callable[[], None]) -> None:
        """
        Args:
            peers: The processes of all ranks, in order.
            enter: A function that the thread calls first: it makes the device the current one.
        """
        self._board = board
        self._rank = board.rank
        self._peers = peers
        self._link = link
        self._enter = enter
        self._requests: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._models: dict[str, _Model] = {}
        self._submitted: list[ShareJob] = []
        """Jobs that have come since the last look."""
        self._offered: dict[str, tuple[ShareJob, Shared]] = {}
        self._state = State()
        self._turn = 0
        self._on_way: deque[_OnWay] = deque()
        """In the order of the log. What is in it when sharing ends by an error stays: others may yet write to its memory."""
        self._num_sent = self._num_arrived = 0
        self._begins_next: ShareJob | None = None
        """The first job whose copies have not begun."""
        self._is_sent_next: _OnWay | None = None
        """The first group of which this rank's parts have not come to the others."""
        self._is_closing = False
        self._looked_at = 0.0
        self.alone: set[str] = set()
        """The models whose pass in progress has waited for long enough: it brings the rest by itself. The thread adds them."""
        self.error: BaseException | None = None
        """Why nothing is shared any more."""
        self.residents: dict[str, list[str]] = {}
        """By model and place, the groups that the first rank puts there."""
        self._thread = threading.Thread(target=self._run, name="group_offload sharing", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- other threads

    def post(self, request: str, content: Any) -> None:
        """Ask the thread for something. It answers by what it does with jobs."""
        self._requests.put((request, content))
        if self.error is not None:
            self._settle_all()

    def begin_pass(self, model: str, absent: Sequence[str], patience: float) -> None:
        """
        Args:
            absent: The keys of groups that are on the device.
            patience: For how long the pass may wait for other ranks, in seconds.
        """
        # At once: the pass may be over before the thread comes to it, and had gone alone because the one before did.
        self.alone.discard(model)
        self.post("begin", (model, absent, patience))

    def leave_all(self) -> None:
        """This process ends, as it should: the others go on without it."""
        self._requests.put(("close", None))
        self._thread.join(_JOIN_SECONDS)

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            self._enter()
            while not (self._is_closing and not self._on_way and self._board.turn == self._turn):
                self._serve()
                self._announce()
                self._offer()
                self._follow()
                self._tell()
                self._note_arrivals()
                self._give_up()
                self._note_what_is_next()
        except BaseException as error:
            self.error = self._blame(error)
        finally:
            self.error = self.error or StateError("Sharing weights with other processes has ended. Restart all ranks.")
            self._settle_all()
            with suppress(StateError):
                self._forget_reading()
            self._board.close()

    def _settle_all(self) -> None:
        jobs = [job for model in [*self._models.values()] for job in [*model.jobs]]
        while True:
            try:
                _, content = self._requests.get_nowait()
            except queue.Empty:
                break
            jobs += [content] if isinstance(content, ShareJob) else []
        for job in jobs:
            job.settle(self.error)

    def _blame(self, error: BaseException) -> BaseException:
        """The error for the user: what ended, if that is why something failed."""
        limit = time.monotonic() + 1
        while not isinstance(error, StateError) and time.monotonic() < limit:
            gone = [peer for peer in self._peers if not peer.is_there]
            if gone:
                return _have_ended(gone)
            time.sleep(_LOOK_SECONDS)  # the connection breaks a moment before the process has ended
        if isinstance(error, StateError):
            return error
        found = StateError(
            f"Couldn't exchange weights with the other GPUs: {error}. Pass share=False so that each loads its own."
        )
        found.__cause__ = error
        return found

    def _serve(self) -> None:
        """Do what was asked for; with nothing to do, wait."""
        timeout, limit = self._until_next_look(), time.monotonic() + _IDLE_SECONDS
        while True:
            try:
                request, content = self._requests.get(timeout=timeout) if timeout != 0 else self._requests.get_nowait()
            except queue.Empty:
                if timeout == 0 or self._has_news() or time.monotonic() > limit:
                    return
                continue
            timeout = 0
            getattr(self, f"_on_{request}")(content)

    def _note_what_is_next(self) -> None:
        jobs = [job for model in self._models.values() for job in model.jobs]
        self._begins_next = next(
            (job for job in jobs if any(each.progress is Progress.SENT for each in job.shared)), None
        )
        self._is_sent_next = next(islice(self._on_way, self._num_sent - self._num_arrived, None), None)

    def _has_news(self) -> bool:
        """Whether anything may have happened since `_note_what_is_next`.

        Most looks find nothing, and a thread that looks takes Python's time from the one that launches compute.
        """
        return (
            self._board.turn != self._turn
            or (self._begins_next is not None and _may_be_offered(self._begins_next))
            or (self._is_sent_next is not None and _has_sent(self._is_sent_next))
            or (bool(self._on_way) and self._num_arrived < min(self._board.sent))
        )

    def _until_next_look(self) -> float | None:
        jobs = [job for model in self._models.values() for job in model.jobs]
        if not (jobs or self._on_way or self._is_closing):
            return None
        if self._state.awaited or any(job.wanted_at for job in jobs):
            return _WAITED_FOR_SECONDS
        if self._on_way or self._is_closing:
            return _BUSY_SECONDS
        is_busy = any(each.progress is Progress.SENT for job in jobs for each in job.shared)
        return _BUSY_SECONDS if is_busy else _IDLE_SECONDS

    def _on_close(self, content: None) -> None:
        for name in [*self._models]:
            self._on_leave(name)
        self._is_closing = True

    def _on_join(self, name: str) -> None:
        self._model(name)  # known from now on, so that this rank leaves it if the process ends before a pass

    def _on_submit(self, job: ShareJob) -> None:
        self._model(job.model).jobs[job] = None
        self._submitted.append(job)

    def _on_want(self, job: ShareJob) -> None:
        job.wanted_at = time.monotonic()

    def _on_cancel(self, job: ShareJob) -> None:
        self._withdraw(job, [each for each in job.shared if each.progress in (Progress.SENT, Progress.OFFERED)])

    def _on_decline(self, keys: list[str]) -> None:
        with self._changed() as state:
            state.decline(self._rank, keys)

    def _on_begin(self, content: tuple[str, Sequence[str], float]) -> None:
        name, absent, patience = content
        model = self._model(name)
        if model.num_offered:
            model.misses = 0 if model.num_gathered else model.misses + 1
        model.num_offered = model.num_gathered = 0
        share = 0.5 ** min(model.misses, _MOST_HALVINGS)
        model.patience = patience * share
        model.read_limit = model.read_patience = tuning().share_limit_seconds * share
        self._refuse_dead(name)
        self._link.forget_freed()
        with self._changed() as state:
            state.begin_pass(self._rank, name, absent)
            state.memories[str(self._rank)] = self._link.handles

    def _on_end(self, name: str) -> None:
        """A pass has failed. The jobs were cancelled before."""
        with self._changed() as state:
            state.decline(self._rank, [all_of(name)])

    def _on_leave(self, name: str) -> None:
        model = self._model(name)
        for job in [*model.jobs]:
            self._on_cancel(job)
        with self._changed() as state:
            state.leave(self._rank, name, self._board.num_ranks)
        model.has_left = True
        self._forget_left(name)

    def _forget_left(self, name: str) -> None:
        """Forget a model that this rank has left, once nothing of it is on its way."""
        model = self._models[name]
        if model.has_left and not model.jobs:
            del self._models[name]
            if not self._models:  # else memory that the others give back would stay taken
                self._link.look({})

    def _on_reside(self, content: tuple[str, list[str]]) -> None:
        with self._changed() as state:
            state.residents[content[0]] = content[1]

    def _model(self, name: str) -> _Model:
        return self._models.setdefault(name, _Model())

    def _announce(self) -> None:
        """Tell the others what is being read: how long a drive takes says nothing about what this rank needs."""
        submitted, self._submitted = self._submitted, []
        jobs = [job for job in submitted if job.reads is not None and not job.reads.is_over and _waiting(job)]
        if jobs:
            with self._changed() as state:
                for job in jobs:
                    state.read(self._rank, [each.key for each in _waiting(job)])
                    job.is_announced = True

    def _forget_reading(self) -> None:
        """This rank offers nothing any more."""
        with self._board.change() as state:
            state.forget_read(self._rank, state.reading.get(str(self._rank), ()))

    def _offer(self) -> None:
        """Offer what has begun. Let the others know what will not come, and what is read and has to wait for its slot."""
        found: list[tuple[ShareJob, Shared]] = []
        given_up: list[ShareJob] = []
        read: list[ShareJob] = []
        for model in self._models.values():
            are_offered = True
            for job in model.jobs:
                waiting = _waiting(job)
                if not waiting:
                    continue
                if job.reads is not None and job.reads.is_over and not job.reads.is_whole:
                    given_up.append(job)
                    continue
                if job.is_announced and (job.reads is None or job.reads.is_over):
                    read.append(job)
                are_offered = are_offered and _may_be_offered(job)
                if are_offered:
                    found += [(job, each) for each in waiting if each.key not in self._offered]
        for job in given_up:
            self._withdraw(job, _waiting(job))
        read = [job for job in read if not any(job is offered for offered, _ in found)]
        if read:
            with self._changed() as state:
                for job in read:
                    state.forget_read(self._rank, [each.key for each in _waiting(job)])
                    job.is_announced = False
        if not found:
            return
        now = time.monotonic()
        places = [() if each.bytes is None else self._link.place_of(each.bytes.memory) for _, each in found]
        with self._changed() as state:
            state.memories[str(self._rank)] = self._link.handles
            for (job, each), place in zip(found, places, strict=True):
                state.offer(self._rank, each.key, each.digest, place, self._board.num_ranks)
                each.progress, each.waits_since = Progress.OFFERED, now
                self._offered[each.key] = job, each
                self._model(job.model).num_offered += 1

    def _follow(self) -> None:
        """Send this rank's parts of what is in the log."""
        if self._board.turn != self._turn:
            self._look()
        for key, places in self._state.log[self._num_arrived + len(self._on_way) - self._state.first :]:
            job, shared = self._offered.pop(key)
            on_way = _OnWay(job, shared, [], time.monotonic())
            self._on_way.append(on_way)
            shared.progress = Progress.AGREED
            self._model(job.model).num_gathered += 1
            on_way.sent = job.send(shared, places)

    def _tell(self) -> None:
        """Tell the others how far this rank's parts have come."""
        number = self._num_sent
        for each in islice(self._on_way, number - self._num_arrived, None):
            if not _has_sent(each):
                break
            number += 1
        if number == self._num_sent:
            return
        self._num_sent = number
        self._board.has_sent(number)
        agreed = [each.shared.key for each in self._on_way]
        if self._awaits(self._state, agreed):
            with self._changed() as state:
                self._forget_awaited(state, agreed)

    def _note_arrivals(self) -> None:
        """
        Raises:
            StateError: a rank that has to send its parts has ended, or takes too long.
        """
        while self._on_way and self._num_arrived < min(self._board.sent):
            each = self._on_way.popleft()
            self._num_arrived += 1
            model = self._model(each.job.model)
            model.read_patience = model.read_limit
            each.shared.bytes = None
            each.shared.progress = Progress.GATHERED
            self._settle(each.job)
        if self._on_way and time.monotonic() - max(self._looked_at, self._on_way[0].since) > _LOOK_SECONDS:
            self._looked_at = time.monotonic()
            there = [peer.is_there for peer in self._peers]
            sent = self._board.sent  # after: what a rank has done is told before it ends
            late = [rank for rank, number in enumerate(sent) if number <= self._num_arrived]
            gone = [self._peers[rank] for rank in late if not there[rank]]
            if gone:
                raise _have_ended(gone)
            if late and time.monotonic() - self._on_way[0].since > tuning().share_limit_seconds:
                names = " and ".join(str(self._peers[rank].rank) for rank in late)
                raise StateError(
                    f"Timed out after {tuning().share_limit_seconds:g} s waiting for weights from rank {names} (stopped or "
                    f"hung?). Restart all ranks."
                )

    def _look(self) -> None:
        self._take(*self._board.read())

    @contextmanager
    def _changed(self) -> Iterator[State]:
        """The board's state, which is written at the end of the block."""
        with self._board.change() as state:
            yield state
        self._take(state, self._board.written)

    def _take(self, state: State, turn: int) -> None:
        self._state, self._turn = state, turn
        self._link.look(state.memories)
        self.residents = state.residents

    def _give_up(self) -> None:
        """Let ranks that wait bring by themselves what the others will not offer, or not soon."""
        now = time.monotonic()
        for name, model in self._models.items():
            for job in [*model.jobs]:
                waiting = [each for each in job.shared if each.progress is Progress.OFFERED] if job.wanted_at else []
                if not waiting:
                    continue
                since = max(job.wanted_at, *(each.waits_since for each in waiting))
                if name not in self.alone and model.read_patience > 0 and self._are_being_read(waiting):
                    model.read_patience -= now - since
                    since = now
                    for each in waiting:
                        each.waits_since = now
                is_late = now - since > model.patience
                hopeless = [each for each in waiting if is_late or self._is_hopeless(each, model)]
                if hopeless:
                    model.patience -= now - since
                    if is_late:
                        model.patience = 0.0
                        self.alone.add(name)
                    self._withdraw(job, hopeless)
                    if is_late:
                        self._on_decline([all_of(name)])
                    continue
                if now - since > _IDLE_SECONDS:
                    self._say_what_is_awaited(waiting[0].key, model)
                if now - self._looked_at > _LOOK_SECONDS:
                    self._refuse_dead(name)

    def _are_being_read(self, waiting: Sequence[Shared]) -> bool:
        num_ranks = self._board.num_ranks
        return any(self._state.is_being_read(self._rank, each.key, num_ranks) for each in waiting)

    def _is_hopeless(self, shared: Shared, model: _Model) -> bool:
        return self._state.is_hopeless(self._rank, shared.key, self._board.num_ranks, is_first=not model.num_gathered)

    def _say_what_is_awaited(self, key: str, model: _Model) -> None:
        if self._state.awaited.get(str(self._rank), ("",))[0] != key:
            with self._changed() as state:
                if key in state.offers:
                    state.awaited[str(self._rank)] = key, not model.num_gathered

    def _awaits(self, state: State, keys: Sequence[str]) -> bool:
        return state.awaited.get(str(self._rank), ("",))[0] in keys

    def _forget_awaited(self, state: State, keys: Sequence[str]) -> None:
        if self._awaits(state, keys):
            del state.awaited[str(self._rank)]

    def _withdraw(self, job: ShareJob, shared: list[Shared]) -> None:
        with self._changed() as state:
            for each in shared:
                if each.progress is Progress.SENT or state.take_back(self._rank, each.key):
                    each.progress = Progress.ALONE
                    if self._offered.get(each.key) == (job, each):
                        del self._offered[each.key]
                    state.decline(self._rank, [each.key])
            self._forget_awaited(state, [each.key for each in shared])
        self._settle(job)  # else the log has them

    def _settle(self, job: ShareJob) -> None:
        if job.is_settled:
            self._model(job.model).jobs.pop(job, None)
            self._forget_left(job.model)
            job.settle()

    def _refuse_dead(self, name: str) -> None:
        """
        Raises:
            StateError: a rank that still runs the model has ended.
        """
        self._looked_at = time.monotonic()
        gone = {str(rank): peer for rank, peer in enumerate(self._peers) if not peer.is_there}
        if gone:
            self._look()  # after: a rank that ends as it should has left before
            left = self._state.left.get(name, ())
            unexpected = [peer for rank, peer in gone.items() if rank not in left]
            if unexpected:
                raise _have_ended(unexpected)


def _waiting(job: ShareJob) -> list[Shared]:
    return [each for each in job.shared if each.progress is Progress.SENT]


def _may_be_offered(job: ShareJob) -> bool:
    return (job.reads is None or job.reads.is_whole) and _has_begun(job)


def _has_begun(job: ShareJob) -> bool:
    """Whether the slot is free: other ranks may write to it."""
    return job.begun.query()


def _has_sent(each: _OnWay) -> bool:
    """Whether the parts of this rank are where they belong: it may change its slot."""
    return all(event.query() for event in each.sent)


def _have_ended(gone: Sequence[Peer]) -> StateError:
    names = " and ".join(f"Rank {peer.rank} (process {peer.pid})" for peer in gone)
    return StateError(
        f"{names}, which shares weights of an offloaded model, ended without remove(). Restart all ranks; a rank that ends "
        f"before the others must call handle.remove() first."
    )
