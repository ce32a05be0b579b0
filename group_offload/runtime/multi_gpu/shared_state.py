"""What the ranks of one host tell each other, in memory that all of them have mapped.

[Note: How ranks agree]
What a rank needs, and when, is not known to the others: caches skip blocks, and ranks are not equally fast. So nothing is
foretold. A rank *offers* a group once the copy of its shard has begun: its slot is free, and nothing but the link stands
between. The offer says where the slot is, and has a digest of the group's bytes. The rank whose offer is the last one that was
missing enters the group in the *log*, in the same step. All ranks send their parts of the groups in the log to the other slots,
in the order of the log, and at once: a thread does that which waits for nothing else. Each rank counts what the device has
sent. A group has *arrived* once all ranks have counted it. A group whose digests differ is in the log without places: each rank
loads it alone.

No stream ever waits for another rank, and what is sent waits for this rank's own copies only, which have begun. So each group
in the log arrives, whatever else ranks compute and exchange, and a rank that dies leaves no GPU waiting. The host orders what
follows: it lets compute have the slot once the group has arrived, and nobody else before.

A rank that does not do what the others do *breaks off* the pass of a model: one that has failed, has given up what it offered,
or has waited for longer than sharing can save, and two that wait for each other's offers, because they run blocks in other
orders. All offers that are not in the log are gone then, and each rank loads the rest of its pass alone. It offers again from
its next pass on. A rank that reads its shard from files says so: the others have more patience with it.
"""

from __future__ import annotations

import marshal
import mmap
import os
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ...base.system import lock, unlock
from ...errors import StateError

_NUMBER = struct.Struct("Q")
"""A number of the machine's own form: it is written at once, and nobody reads half of it."""
_HEAD_BYTES = 1 << 16
"""For the turn, and how many groups each rank has sent."""
_HALF_BYTES = 1 << 20
SHARED_STATE_BYTES = _HEAD_BYTES + 2 * _HALF_BYTES
_LOCK_SECONDS = 20.0


@dataclass(slots=True)
class RankStates:
    """The content of the shared state. Ranks are numbered within the host, keys name a group of one model."""

    offers: dict[str, dict[str, tuple[str, Sequence[int]]]] = field(default_factory=dict)
    """By key and rank, the digests of groups that are offered and not in the log, and their places in the rank's memory."""
    log: list[tuple[str, dict[str, Sequence[int]]]] = field(default_factory=list)
    """The keys that are sent, in order, and their places by rank. Those that have arrived are left out, sooner or later."""
    first: int = 0
    """The number of the first key of `log`, counted from the beginning."""
    memories: dict[str, dict[str, str]] = field(default_factory=dict)
    """By rank and number, what the others open the memory with that the places are in."""
    breaks: dict[str, int] = field(default_factory=dict)
    """By model, how many passes were broken off."""
    awaited: dict[str, str] = field(default_factory=dict)
    """By rank, the key that its compute waited for last. It waits no more if the rank does not offer that."""
    reading: dict[str, list[str]] = field(default_factory=dict)
    """By rank, the models of which it reads the shard that it offers next."""
    left: dict[str, list[str]] = field(default_factory=dict)
    """By model, the ranks that do not run it any more."""
    residents: dict[str, list[str]] = field(default_factory=dict)
    """By model and place, the groups that the first rank puts there."""

    def offer(self, rank: int, key: str, digest: str, place: Sequence[int], num_ranks: int) -> None:
        """Offer a group. The last offer that was missing enters it in the log."""
        offers = self.offers.setdefault(key, {})
        offers[str(rank)] = digest, place
        if len(offers) == num_ranks:
            del self.offers[key]
            are_equal = len({digest for digest, _ in offers.values()}) == 1
            self.log.append((key, {other: place for other, (_, place) in offers.items()} if are_equal else {}))

    def break_off(self, model: str) -> None:
        """All ranks load what is not in the log alone, each until its next pass."""
        self.breaks[model] = self.breaks.get(model, 0) + 1
        self.offers = {key: offers for key, offers in self.offers.items() if model_of(key) != model}

    def wait_for(self, rank: int, key: str) -> None:
        """The rank's compute waits for a group that it offers. Ranks that wait for each other break off."""
        mine, me = self.offers.get(key, {}), str(rank)
        self.awaited[me] = key
        for other, awaited in self.awaited.items():
            its = self.offers.get(awaited, {})
            if other in its and me not in its and other not in mine:
                self.break_off(model_of(key))
                return

    def leave(self, rank: int, model: str, num_ranks: int) -> None:
        """This rank does not run the model any more. Once none does, nothing of it is left."""
        self.break_off(model)
        left = self.left.setdefault(model, [])
        if str(rank) not in left:
            left.append(str(rank))
        if len(left) == num_ranks:
            del self.left[model], self.breaks[model]
            self.residents = {key: names for key, names in self.residents.items() if model_of(key) != model}


def model_of(key: str) -> str:
    return key.partition("/")[0]


class SharedState:
    """The shared state, as one rank sees it. Used by one thread of the rank.

    Each change is written beside the state before, and counts once the number at the beginning has changed: a rank that dies in
    the middle leaves the state before. Its lock goes with its descriptor.
    """

    def __init__(self, fd: int, rank: int, num_ranks: int) -> None:
        """
        Args:
            fd: A descriptor of its own, of a file of `SHARED_STATE_BYTES` bytes. The shared state closes it.
        """
        self.rank, self.num_ranks = rank, num_ranks
        self._fd = fd
        self._memory = mmap.mmap(fd, SHARED_STATE_BYTES)
        self.state = RankStates()
        """The state as this rank has read or written it last."""
        self._seen = 0
        """Its turn."""

    @property
    def turn(self) -> int:
        """A number that goes up with each change."""
        return self._number_at(0)

    @property
    def has_news(self) -> bool:
        """Whether another rank has changed the state since."""
        return self.turn != self._seen

    @property
    def sent(self) -> list[int]:
        """How many groups of the log, counted from the beginning, each rank has sent: its parts are in the others' memory."""
        return [self._number_at((1 + rank) * _NUMBER.size) for rank in range(self.num_ranks)]

    def has_sent(self, number: int) -> None:
        """This rank's parts of all groups before `number` are where they belong."""
        # No lock, and no turn: this is said for each group, and only this rank writes here.
        _NUMBER.pack_into(self._memory, (1 + self.rank) * _NUMBER.size, number)

    def read(self) -> RankStates:
        """The state as it is now."""
        with self._locked():
            self.state, self._seen = self._load(), self.turn
        return self.state

    @contextmanager
    def change(self) -> Iterator[RankStates]:
        """The state, which is written at the end of the block."""
        with self._locked():
            state = self._load()
            num_arrived = min(self.sent) - state.first
            assert num_arrived >= 0
            del state.log[:num_arrived]
            state.first += num_arrived
            yield state
            turn = self.turn + 1
            content = marshal.dumps([getattr(state, name) for name in RankStates.__slots__])
            if len(content) > _HALF_BYTES - _NUMBER.size:
                raise StateError(
                    "Too many groups are published at once by GPUs that share a model. Pass shard_transfers=False."
                )
            start = _HEAD_BYTES + turn % 2 * _HALF_BYTES
            self._memory[start + _NUMBER.size : start + _NUMBER.size + len(content)] = content
            _NUMBER.pack_into(self._memory, start, len(content))
            _NUMBER.pack_into(self._memory, 0, turn)
            self.state, self._seen = state, turn

    def close(self) -> None:
        self._memory.close()
        os.close(self._fd)

    def _load(self) -> RankStates:
        turn = self.turn
        if not turn:
            return RankStates()
        start = _HEAD_BYTES + turn % 2 * _HALF_BYTES
        size = self._number_at(start)
        return RankStates(*marshal.loads(self._memory[start + _NUMBER.size : start + _NUMBER.size + size]))

    def _number_at(self, position: int) -> int:
        found: tuple[int] = _NUMBER.unpack_from(self._memory, position)
        return found[0]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        limit = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                lock(self._fd)
                break
            except BlockingIOError:
                if time.monotonic() > limit:
                    raise StateError(
                        f"Timed out after {_LOCK_SECONDS:g} s waiting for the lock that the ranks of this host share: one of "
                        f"them was stopped, or hangs. Restart all ranks."
                    ) from None
                time.sleep(1e-5)
        try:
            yield
        finally:
            unlock(self._fd)
