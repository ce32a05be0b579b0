"""What one forward saved for backward, in the order of its groups."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .stash import Stash, StashState

Key = tuple[int, int, int, int]
"""A storage, the version of its content, and which part of it: first byte and number of bytes."""


@dataclass(eq=False)
class Tape:
    """One forward, until its last backward.

    Positions count the calls of groups: a group that is called twice has two. Autograd holds the stashes and, with them, the
    tape. The tape holds no stash.
    """

    expected: int
    """Calls of groups to expect in the forward: as many as in the last one."""
    names: list[str] = field(default_factory=list)
    """The group at each position."""
    stashes: list[list[weakref.ref[Stash]]] = field(default_factory=list)
    """The stashes that each position saved."""
    num_decided: int = 0
    """Positions before this one keep nothing on the device that could be offloaded."""
    known: dict[Key, tuple[StorageWeakRef, weakref.ref[Stash]]] = field(default_factory=dict)
    """The storages that this forward has saved. An address isn't used again as long as there is a weak reference to it."""
    reached: int | None = None
    """The position that backward has reached."""
    fetched: set[int] = field(default_factory=set)
    """The positions that backward has brought back."""

    @property
    def position(self) -> int:
        return len(self.stashes) - 1

    def begin_group(self, name: str) -> None:
        self.names.append(name)
        self.stashes.append([])

    def find(self, key: Key) -> Stash | None:
        """The stash of the same bytes, if this forward saved them before."""
        found = self.known.get(key)
        stash = None if found is None else found[1]()
        return None if stash is None or stash.state is StashState.LOST else stash

    def add(self, key: Key, storage: torch.UntypedStorage, stash: Stash) -> None:
        self.known[key] = StorageWeakRef(storage), weakref.ref(stash)  # type: ignore[no-untyped-call]

    def mark(self, stash: Stash) -> None:
        """Note that the current group saved `stash`."""
        if not stash.positions or stash.positions[-1] != self.position:
            stash.positions.append(self.position)
            self.stashes[-1].append(weakref.ref(stash))

    def at(self, position: int) -> Iterator[Stash]:
        """The stashes of a position that are alive and not lost, in the order in which backward needs them."""
        if 0 <= position < len(self.stashes):
            for reference in reversed(self.stashes[position]):
                stash = reference()
                if stash is not None and stash.state is not StashState.LOST:
                    yield stash

    def end(self) -> None:
        """The forward is over: nothing more is saved."""
        self.known.clear()

    def lose(self) -> None:
        """Let all stashes go of their bytes. See [Note: Interrupts of activation offloading]."""
        for position in range(len(self.stashes)):
            for stash in self.at(position):
                stash.lose()
