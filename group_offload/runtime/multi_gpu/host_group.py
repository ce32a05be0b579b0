"""The thread of a rank that offers groups to the others, and sends what all have agreed on. See [Note: How ranks agree]."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from ...base.device import Backend
from ...base.tuning import tuning
from ...errors import StateError
from .links import GatherSpeeds, PeerLink
from .rendezvous import Peer
from .shard_reads import Progress, ShardJob, Shared
from .shared_state import RankStates, SharedState

_WAITED_FOR_SECONDS = 1e-4
"""The time between two looks while compute waits, here or elsewhere. A copy of a group takes longer."""
_BUSY_SECONDS = 2e-4
"""The same while copies are about to begin, or parts are on their way. Each look takes Python's time from the thread that
launches compute; with fewer looks ranks that compute together wait longer for each other."""
_IDLE_SECONDS = 2e-3
"""The same while groups are offered that nobody waits for."""
_JOIN_SECONDS = _END_SECONDS = 5.0
_MOST_HALVINGS = 5
"""Of a pass's patience. With less, ranks that have gone apart for long would never meet again."""
_LOOK_SECONDS = 0.05
"""The time between two looks at whether the other ranks are still there, while something waits for them."""


@dataclass(slots=True)
class _Model:
    """What the thread knows of one offloaded model."""

    num_breaks: int = 0
    """How many of its passes had been broken off when the one in progress began."""
    patience: float = 0.0
    """For how much longer the pass may wait for other ranks, in seconds."""
    read_patience: float = 0.0
    """The same, in addition, while one of them reads."""
    counted_until: float = 0.0
    """The time up to which waiting has been taken off these."""
    misses: int = 0
    """How many passes in a row have offered groups, and gathered none."""
    num_offered: int = 0
    num_gathered: int = 0
    has_left: bool = False
    """Whether this rank does not run it any more."""
    jobs: dict[ShardJob, None] = field(default_factory=dict)

    def awaited(self) -> tuple[Shared, float] | None:
        """The group that other ranks have to offer before compute can go on, and since when."""
        for job in self.jobs:
            for each in job.shared if job.wanted_at else ():
                if each.progress is Progress.OFFERED:
                    return each, max(job.wanted_at, each.since)
        return None


class HostGroup:
    """The ranks of one host that share models, as one of them sees it. A thread of its own changes the shared state.

    It lives as long as the process group.
    """

    def __init__(
        self, backend: Backend, shared_state: SharedState, peers: Sequence[Peer], link: PeerLink, speeds: GatherSpeeds
    ) -> None:
        """
        Args:
            peers: The processes of all ranks, in order.
            link: Used by the thread from now on.
        """
        self._backend = backend
        self._shared_state = shared_state
        self.rank, self.num_ranks = shared_state.rank, shared_state.num_ranks
        self.is_first = self.rank == 0
        """Whether the others follow this rank's plan."""
        self._peers = peers
        self.link = link
        self.speeds = speeds
        self.stream = backend.new_stream()
        """For the ready events of slots: see [Note: A shared group]."""
        self._requests: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._models: dict[str, _Model] = {}
        self._offered: dict[str, tuple[ShardJob, Shared]] = {}
        self._on_way: deque[tuple[ShardJob, Shared]] = deque()
        """The groups of the log that have not arrived, in its order. They stay if sharing ends by an error: others may yet
        write to their memory."""
        self._num_sent = self._num_arrived = 0
        self._is_closing = False
        self._looked_at = 0.0
        self.alone: set[str] = set()
        """The models whose pass in progress is broken off. The thread adds them."""
        self.error: BaseException | None = None
        """Why nothing is shared any more."""
        self._thread = threading.Thread(target=self._run, name="group_offload sharing", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- other threads

    @property
    def residents(self) -> dict[str, list[str]]:
        """By model and place, the groups that the first rank puts there."""
        return self._shared_state.state.residents

    def post(self, request: str, content: Any) -> None:
        """Ask the thread for something. It answers by what it does with jobs."""
        self._requests.put((request, content))
        if self.error is not None:
            self._settle_all()

    def begin_pass(self, model: str, patience: float) -> None:
        """
        Args:
            patience: For how long the pass may wait for other ranks, in seconds.
        """
        # At once: the pass may be over before the thread comes to it, and had gone alone because the one before did.
        self.alone.discard(model)
        self.post("begin", (model, patience))

    def leave_all(self) -> None:
        """This process ends, as it should: the others go on without it."""
        self._requests.put(("close", None))
        self._thread.join(_JOIN_SECONDS)

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            if self._backend.has_streams and self._backend.device.index is not None:
                torch.accelerator.set_device_index(self._backend.device.index)
            while not (self._is_closing and not self._on_way and not self._shared_state.has_news):
                self._serve()
                self._offer()
                self._wait()
                self._follow()
                self._part()
                self._tell()
                self._note_arrivals()
        except BaseException as error:
            self.error = self._blame(error)
        finally:
            self.error = self.error or StateError("Sharing weights with other processes has ended. Restart all ranks.")
            self._settle_all()
            with suppress(StateError), self._shared_state.change() as state:
                state.reading.pop(str(self.rank), None)
            self._shared_state.close()

    def _settle_all(self) -> None:
        jobs = [job for model in [*self._models.values()] for job in [*model.jobs]]
        while True:
            try:
                _, content = self._requests.get_nowait()
            except queue.Empty:
                break
            jobs += [content] if isinstance(content, ShardJob) else []
        for job in jobs:
            job.settle(self.error)

    def _blame(self, error: BaseException) -> BaseException:
        """The error for the user: what ended, if that is why something failed."""
        if isinstance(error, StateError):
            return error
        limit = time.monotonic() + _END_SECONDS
        while time.monotonic() < limit:
            gone = [peer for peer in self._peers if not peer.is_there]
            if gone:
                return _have_ended(gone)
            time.sleep(_LOOK_SECONDS)  # its memory goes a moment before the process has ended
        found = StateError(
            f"Couldn't exchange weights with the other GPUs: {error}. Pass shard_transfers=False so that each loads its own."
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

    def _has_news(self) -> bool:
        """Whether there is anything to do.

        Most looks find nothing, and a thread that looks takes Python's time from the one that launches compute.
        """
        first = (next(filter(_waiting, model.jobs), None) for model in self._models.values())
        on_way = next(islice(self._on_way, self._num_sent - self._num_arrived, None), None)
        return (
            self._shared_state.has_news
            or (on_way is not None and _has_sent(on_way[1]))
            or (bool(self._on_way) and self._num_arrived < min(self._shared_state.sent))
            or any(map(_may_be_offered, filter(None, first)))
        )

    def _until_next_look(self) -> float | None:
        jobs = [job for model in self._models.values() for job in model.jobs]
        if not (jobs or self._on_way or self._is_closing):
            return None
        state = self._shared_state.state
        if any(job.wanted_at for job in jobs) or any(key in state.offers for key in state.awaited.values()):
            return _WAITED_FOR_SECONDS
        is_busy = self._on_way or self._is_closing or any(map(_waiting, jobs))
        return _BUSY_SECONDS if is_busy else _IDLE_SECONDS

    def _on_close(self, content: None) -> None:
        for name in [*self._models]:
            self._on_leave(name)
        self._is_closing = True

    def _on_join(self, name: str) -> None:
        self._model(name)  # known from now on, so that this rank leaves it if the process ends before a pass

    def _on_submit(self, job: ShardJob) -> None:
        self._model(job.model).jobs[job] = None

    def _on_want(self, job: ShardJob) -> None:
        job.wanted_at = time.monotonic()

    def _on_cancel(self, job: ShardJob) -> None:
        if any(each.progress is Progress.OFFERED for each in job.shared):
            self._on_break_off(job.model)
        self._bring_alone(job, _waiting(job))

    def _on_break_off(self, name: str) -> None:
        model = self._model(name)
        with self._shared_state.change() as state:
            if state.breaks.get(name, 0) == model.num_breaks:  # else the others are in their next pass, maybe
                state.break_off(name)

    def _on_begin(self, content: tuple[str, float]) -> None:
        name, patience = content
        model = self._model(name)
        model.misses = 0 if model.num_gathered else model.misses + (model.num_offered > 0)
        model.num_offered = model.num_gathered = 0
        share = 0.5 ** min(model.misses, _MOST_HALVINGS)
        model.patience, model.read_patience = patience * share, tuning().shard_read_timeout_seconds * share
        self._refuse_ended(name)
        self.link.forget_freed()
        with self._shared_state.change() as state:
            state.memories[str(self.rank)] = self.link.handles
        self._follow()
        self._part()  # what was offered before
        model.num_breaks = self._shared_state.state.breaks.get(name, 0)
        self.alone.discard(name)

    def _on_leave(self, name: str) -> None:
        self._model(name).has_left = True
        with self._shared_state.change() as state:
            state.leave(self.rank, name, self._shared_state.num_ranks)
        self._follow()
        self._part()
        self._forget_left(name)

    def _forget_left(self, name: str) -> None:
        """Forget a model that this rank has left, once nothing of it is on its way."""
        model = self._models.get(name)
        if model is not None and model.has_left and not model.jobs:
            del self._models[name]
            if not self._models:  # else memory that the others give back would stay taken
                self.link.look({})

    def _on_reside(self, content: tuple[str, list[str]]) -> None:
        with self._shared_state.change() as state:
            state.residents[content[0]] = content[1]

    def _model(self, name: str) -> _Model:
        return self._models.setdefault(name, _Model())

    def _offer(self) -> None:
        """Offer what has begun, in order, and say whether what comes next is being read."""
        found: list[tuple[ShardJob, Shared]] = []
        reading: list[str] = []
        for name, model in [*self._models.items()]:
            for job in model.jobs:
                waiting = _waiting(job)
                if waiting and not _may_be_offered(job):
                    if job.reads is not None and not job.reads.is_over:
                        reading.append(name)
                    elif job.reads is not None and not job.reads.is_whole:
                        self._on_break_off(name)  # the others shall not wait for what was not read
                    break
                found += [(job, each) for each in waiting]
        if not found and reading == self._shared_state.state.reading.get(str(self.rank), []):
            return
        places = [self.link.place_of(each.bytes.memory) for _, each in found]
        with self._shared_state.change() as state:
            state.memories[str(self.rank)] = self.link.handles
            state.reading[str(self.rank)] = reading
            for (job, each), place in zip(found, places, strict=True):
                model = self._models[job.model]
                if self._is_broken(state, job.model):
                    continue
                state.offer(self.rank, each.key, each.digest, place, self._shared_state.num_ranks)
                each.progress, each.since = Progress.OFFERED, time.monotonic()
                self._offered[each.key] = job, each
                model.num_offered += 1

    def _wait(self) -> None:
        """Break passes off that have waited for long enough, and let the others know what is waited for."""
        now = time.monotonic()
        for name, model in self._models.items():
            found = model.awaited()
            if found is None:
                continue
            each, since = found
            waited, model.counted_until = now - max(since, model.counted_until), now
            others = [names for rank, names in self._shared_state.state.reading.items() if rank != str(self.rank)]
            if model.read_patience > 0 and any(name in names for names in others):
                model.read_patience -= waited
            else:
                model.patience -= waited
            if model.patience < 0:
                self._on_break_off(name)
            elif self._shared_state.state.awaited.get(str(self.rank)) != each.key and now - since > _IDLE_SECONDS:
                with self._shared_state.change() as state:
                    if str(self.rank) in state.offers.get(each.key, ()):
                        state.wait_for(self.rank, each.key)
            if now - self._looked_at > _LOOK_SECONDS:
                self._refuse_ended(name)

    def _follow(self) -> None:
        """Send this rank's parts of what is in the log."""
        if self._shared_state.has_news:
            self._shared_state.read()
        state = self._shared_state.state
        self.link.look(state.memories)
        for key, places in state.log[self._num_arrived + len(self._on_way) - state.first :]:
            job, shared = self._offered.pop(key)
            shared.since = time.monotonic()
            self._on_way.append((job, shared))
            if places:
                shared.progress = Progress.AGREED
                self._model(job.model).num_gathered += 1
                shared.sent = job.send(shared, places)
            else:
                self._bring_alone(job, [shared])

    def _part(self) -> None:
        """Let jobs go on whose pass is broken off. The log has none of their groups."""
        for name, model in [*self._models.items()]:
            if self._is_broken(self._shared_state.state, name):
                self.alone.add(name)
                for job in [*model.jobs]:
                    open_ = (Progress.SENT, Progress.OFFERED)
                    self._bring_alone(job, [each for each in job.shared if each.progress in open_])

    def _is_broken(self, state: RankStates, name: str) -> bool:
        model = self._models[name]
        return model.has_left or name in state.left or state.breaks.get(name, 0) != model.num_breaks

    def _tell(self) -> None:
        """Tell the others how far this rank's parts have come."""
        number = self._num_sent
        for _, shared in islice(self._on_way, number - self._num_arrived, None):
            if not _has_sent(shared):
                break
            number += 1
        if number != self._num_sent:
            self._num_sent = number
            self._shared_state.has_sent(number)

    def _note_arrivals(self) -> None:
        """
        Raises:
            StateError: a rank that has to send its parts has ended, or takes too long.
        """
        while self._on_way and self._num_arrived < min(self._shared_state.sent):
            job, shared = self._on_way.popleft()
            self._num_arrived += 1
            if shared.progress is Progress.AGREED:
                self._model(job.model).read_patience = tuning().shard_read_timeout_seconds
                shared.progress = Progress.GATHERED
                self._settle(job)
        if not self._on_way:
            return
        waited, limit = time.monotonic() - self._on_way[0][1].since, tuning().shard_read_timeout_seconds
        if min(waited, time.monotonic() - self._looked_at) > _LOOK_SECONDS:
            self._refuse_ended()
        if waited > limit:
            sent = enumerate(self._shared_state.sent)
            late = " and ".join(str(self._peers[rank].rank) for rank, number in sent if number <= self._num_arrived)
            if late:
                raise StateError(
                    f"Timed out after {limit:g} s waiting for weights from rank {late} (stopped or hung?). Restart all ranks."
                )

    def _bring_alone(self, job: ShardJob, shared: Sequence[Shared]) -> None:
        for each in shared:
            each.progress = Progress.ALONE
            self._offered.pop(each.key, None)
        self._settle(job)

    def _settle(self, job: ShardJob) -> None:
        if job.is_settled:
            if job.model in self._models:
                self._models[job.model].jobs.pop(job, None)
                self._forget_left(job.model)
            job.settle()

    def _refuse_ended(self, *models: str) -> None:
        """
        Raises:
            StateError: a rank has ended that still runs one of these models, or has yet to send its parts.
        """
        self._looked_at = time.monotonic()
        gone = [rank for rank, peer in enumerate(self._peers) if not peer.is_there]
        if gone:
            # After that: what a rank has done is told before it ends.
            sent, left = self._shared_state.sent, self._shared_state.read().left
            unexpected = [
                self._peers[rank]
                for rank in gone
                if any(str(rank) not in left.get(name, ()) for name in models)
                or (self._on_way and sent[rank] <= self._num_arrived)
            ]
            if unexpected:
                raise _have_ended(unexpected)


def _waiting(job: ShardJob) -> list[Shared]:
    return [each for each in job.shared if each.progress is Progress.SENT]


def _may_be_offered(job: ShardJob) -> bool:
    """Whether the slot is free, so that other ranks may write to it, and what this rank reads is there."""
    return (job.reads is None or job.reads.is_whole) and job.begun.query()


def _has_sent(shared: Shared) -> bool:
    """Whether the parts of this rank are where they belong: it may change its slot."""
    return all(event.query() for event in shared.sent)


def _have_ended(gone: Sequence[Peer]) -> StateError:
    names = " and ".join(f"Rank {peer.rank} (process {peer.pid})" for peer in gone)
    return StateError(
        f"{names}, which shares weights of an offloaded model, ended without remove(). Restart all ranks; a rank that ends "
        f"before the others must call handle.remove() first."
    )
