"""What the ranks of one host tell each other, in memory that all of them have mapped.

[Note: How ranks agree]
What a rank needs, and when, is not known to the others: caches skip blocks, and ranks are not equally fast. So nothing is
foretold. A rank *offers* a group once the copy of its share has begun: its slot is free, and nothing but the link stands
between. The offer says where the slot is. The rank whose offer is the last one that was missing enters the group in the *log*,
in the same step. All ranks send their parts of the groups in the log to the other slots, in the order of the log, and at once:
a thread does that which waits for nothing else. Each rank counts what the device has sent. A group has *arrived* once all
ranks have counted it.

No stream ever waits for another rank, and what is sent waits for this rank's own copies only, which have begun. So each group
in the log arrives, whatever else ranks compute and exchange, and a rank that dies leaves no GPU waiting. The host orders what
follows: it lets compute have the slot once the group has arrived, and nobody else before.

A rank that reads its share, from files say, says so before it offers the group. The others wait for it until it is done.

A rank takes an offer back as long as the group is not in the log. It does so when it has waited for longer than sharing can
save, when others have *declined* the group, and when the slot is needed for something else. It declines the group then, and
brings the rest of it by itself. So a rank that skips, repeats or reorders groups makes the others slower, and that is all.

An offer has a digest of the group's bytes. Groups whose digests differ are never gathered.
"""

from __future__ import annotations

import marshal
import mmap
import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ...base.system import lock, unlock
from ...errors import StateError

_TURN = struct.Struct("<Q")
_SIZE = struct.Struct("<I")
_COUNT = struct.Struct("Q")
"""A number of the machine's own form: it is written at once, and nobody reads half of it."""
_LINE_BYTES = 64
"""What a processor writes at once. Each number that one rank writes has a line of its own."""
_HEAD_BYTES = 1 << 16
_HALF_BYTES = 1 << 20
BOARD_BYTES = _HEAD_BYTES + 2 * _HALF_BYTES
_LOCK_SECONDS = 20.0


@dataclass(slots=True)
class State:
    """The content of the board. Ranks are numbered within the host, keys name a group of one model."""

    offers: dict[str, dict[str, tuple[str, Sequence[int]]]] = field(default_factory=dict)
    """By key and rank, the digests of groups that are offered and not in the log, and their places in the rank's memory."""
    log: list[tuple[str, dict[str, Sequence[int]]]] = field(default_factory=list)
    """The keys that are sent, in order, and their places by rank. Those that have arrived are left out, sooner or later."""
    first: int = 0
    """The number of the first key of `log`, counted from the beginning."""
    memories: dict[str, dict[str, str]] = field(default_factory=dict)
    """By rank and number, what the others open the memory with that the places are in."""
    absent: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """By model and rank, the keys of groups that were on the device when the rank's pass began."""
    declined: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """By model and rank, the keys that the rank does not offer in its pass any more."""
    reading: dict[str, list[str]] = field(default_factory=dict)
    """By rank, the keys whose shares it reads, to offer them."""
    awaited: dict[str, tuple[str, bool]] = field(default_factory=dict)
    """By rank, the key that its compute waits for, if that is not in the log, and whether it has gathered nothing yet in its
    pass."""
    left: dict[str, list[str]] = field(default_factory=dict)
    """By model, the ranks that do not run it any more."""
    residents: dict[str, list[str]] = field(default_factory=dict)
    """By model and place, the groups that the first rank puts there."""

    def offer(self, rank: int, key: str, digest: str, place: Sequence[int], num_ranks: int) -> None:
        """Offer a group. The last offer that was missing enters it in the log."""
        offers = self.offers.setdefault(key, {})
        offers[str(rank)] = digest, place
        self.forget_read(rank, [key])
        self._undecline(rank, key)
        if len(offers) == num_ranks and _are_equal(offers):
            del self.offers[key]
            self.log.append((key, {other: place for other, (_, place) in offers.items()}))

    def take_back(self, rank: int, key: str) -> bool:
        """Take an offer back. False if the group is in the log."""
        offers = self.offers.get(key, {})
        if offers.pop(str(rank), None) is None:
            return False
        if not offers:
            del self.offers[key]
        return True

    def decline(self, rank: int, keys: Sequence[str]) -> None:
        """Let the others not wait for these groups, until `begin_pass`, or an offer."""
        self.forget_read(rank, keys)
        for key in keys:
            of_model = self.declined.setdefault(model_of(key), {}).setdefault(str(rank), [])
            if key not in of_model:
                of_model.append(key)

    def read(self, rank: int, keys: Sequence[str]) -> None:
        """Let the others wait for these groups for as long as reading takes, until `forget_read`, an offer, or `decline`."""
        self.reading.setdefault(str(rank), []).extend(keys)

    def is_being_read(self, rank: int, key: str, num_ranks: int) -> bool:
        """Whether another rank reads its share of the group, and no rank has declined it."""
        declined = self.declined.get(model_of(key), {})
        others = [str(each) for each in range(num_ranks) if each != rank]
        has_declined = any(key in each or all_of(model_of(key)) in each for each in map(declined.get, others) if each)
        return not has_declined and any(key in self.reading.get(each, ()) for each in others)

    def forget_read(self, rank: int, keys: Sequence[str]) -> None:
        """These shares are read, or will not be."""
        reading = self.reading.get(str(rank))
        if reading:
            self.reading[str(rank)] = [key for key in reading if key not in keys]

    def _undecline(self, rank: int, key: str) -> None:
        of_model = self.declined.get(model_of(key), {}).get(str(rank), [])
        if key in of_model:
            of_model.remove(key)

    def begin_pass(self, rank: int, model: str, absent: Sequence[str]) -> None:
        """A pass begins, in which all groups may be offered but `absent`: they are on the device."""
        self.absent.setdefault(model, {})[str(rank)] = [*absent]
        self.declined.setdefault(model, {})[str(rank)] = []

    def leave(self, rank: int, model: str, num_ranks: int) -> None:
        """This rank does not run the model any more. Once none does, nothing of it is left."""
        left = self.left.setdefault(model, [])
        if str(rank) not in left:
            left.append(str(rank))
        for by_rank in (self.absent, self.declined):
            by_rank.get(model, {}).pop(str(rank), None)
        if len(left) == num_ranks:
            for by_model in (self.left, self.absent, self.declined):
                by_model.pop(model, None)
            self.residents = {key: names for key, names in self.residents.items() if model_of(key) != model}
        if model_of(self.awaited.get(str(rank), ("",))[0]) == model:
            del self.awaited[str(rank)]
        self.forget_read(rank, [key for key in self.reading.get(str(rank), ()) if model_of(key) == model])
        for key in [key for key in self.offers if model_of(key) == model]:
            self.take_back(rank, key)

    def forget(self, num_arrived: int) -> None:
        """So many groups, counted from the beginning, have arrived."""
        num_over = num_arrived - self.first
        if num_over > 0:
            del self.log[:num_over]
            self.first += num_over

    def is_hopeless(self, rank: int, key: str, num_ranks: int, *, is_first: bool) -> bool:
        """Whether another rank will not offer the group now.

        It has left, or has other bytes, or has the group on its device, or has declined it, or waits for another one.

        Args:
            is_first: Whether this rank has gathered nothing yet in its pass. The others may be in the middle of passes of their
                own then. It waits for their next ones: so the ranks get into step again.
        """
        offers, model = self.offers.get(key, {}), model_of(key)
        if not _are_equal(offers):
            return True
        for other in (str(each) for each in range(num_ranks) if each != rank):
            if other in self.left.get(model, ()) or key in self.absent.get(model, {}).get(other, ()):
                return True
            if other in offers:
                continue
            awaited, is_first_too = self.awaited.get(other, (key, False))
            if awaited != key and awaited in self.offers and (is_first_too or not is_first):
                return True
            declined = self.declined.get(model, {}).get(other, ())
            if not is_first and (key in declined or all_of(model) in declined):
                return True
        return False


def _line_of(rank: int) -> int:
    return (1 + rank) * _LINE_BYTES


def _are_equal(offers: Mapping[str, Sequence[Any]]) -> bool:
    return len({digest for digest, _ in offers.values()}) <= 1


def key_of(model: str, group: str) -> str:
    return f"{model}/{group}"


def all_of(model: str) -> str:
    """The key that stands for all groups of a model, where they are declined."""
    return key_of(model, "*")


def model_of(key: str) -> str:
    return key.partition("/")[0]


class Board:
    """The board, as one rank sees it. Used by one thread of the rank.

    Each change is written beside the state before, and counts once the number at the beginning has changed: a rank that dies in
    the middle leaves the state before. Its lock goes with its descriptor.
    """

    def __init__(self, fd: int, rank: int, num_ranks: int) -> None:
        """
        Args:
            fd: A descriptor of its own, of a file of `BOARD_BYTES` bytes. The board closes it.
        """
        self.rank, self.num_ranks = rank, num_ranks
        self._fd: int | None = fd
        self._memory = mmap.mmap(fd, BOARD_BYTES)
        self.written = 0
        """The turn of the last change of this rank."""
        if (1 + num_ranks) * _LINE_BYTES > _HEAD_BYTES:
            raise StateError(f"{num_ranks} ranks of one host share a model, which is too many. Pass share=False.")

    @property
    def turn(self) -> int:
        """A number that goes up with each change."""
        found: tuple[int] = _TURN.unpack_from(self._memory, 0)
        return found[0]

    @property
    def sent(self) -> list[int]:
        """How many groups of the log, counted from the beginning, each rank has sent: its parts are in the others' memory."""
        return [found for rank in range(self.num_ranks) for found in _COUNT.unpack_from(self._memory, _line_of(rank))]

    def has_sent(self, number: int) -> None:
        """This rank's parts of all groups before `number` are where they belong."""
        # No lock, and no turn: this is said for each group, and only this rank writes here.
        _COUNT.pack_into(self._memory, _line_of(self.rank), number)

    def read(self) -> tuple[State, int]:
        """The state, and its turn."""
        with self._locked():
            return self._load(), self.turn

    @contextmanager
    def change(self) -> Iterator[State]:
        """The state, which is written at the end of the block."""
        with self._locked():
            state = self._load()
            state.forget(min(self.sent))
            yield state
            turn = self.written = self.turn + 1
            content = marshal.dumps([getattr(state, name) for name in State.__slots__])
            if len(content) > _HALF_BYTES - _SIZE.size:
                raise StateError("Too many groups are offered at once by GPUs that share a model. Pass share=False.")
            start = _HEAD_BYTES + turn % 2 * _HALF_BYTES
            self._memory[start + _SIZE.size : start + _SIZE.size + len(content)] = content
            _SIZE.pack_into(self._memory, start, len(content))
            _TURN.pack_into(self._memory, 0, turn)

    def close(self) -> None:
        if self._fd is not None:
            self._memory.close()
            os.close(self._fd)
            self._fd = None

    def _load(self) -> State:
        turn = self.turn
        if not turn:
            return State()
        start = _HEAD_BYTES + turn % 2 * _HALF_BYTES
        (size,) = _SIZE.unpack_from(self._memory, start)
        return State(*marshal.loads(self._memory[start + _SIZE.size : start + _SIZE.size + size]))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        assert self._fd is not None
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
