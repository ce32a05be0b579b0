"""Tables that do not grow with what a process is given: of all keys they keep those that were set last."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

MOST = 64
"""The number of input shapes, threads and other things without an end that a table knows of."""


class Recent(dict[K, V]):
    """A dict of at most so many keys. Setting a key makes it the last one; the first one is forgotten for it."""

    def __init__(self, most: int = MOST) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        self.pop(key, None)
        while len(self) >= self._most:
            del self[next(iter(self))]
        super().__setitem__(key, value)
