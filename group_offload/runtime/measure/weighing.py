"""Weighing measures the device memory that a pass takes besides weights."""

from __future__ import annotations

from torch import nn

_NUM_WEIGHED = 64
"""The number of calls of a first pass at which device memory is looked at: each look takes 0.1 ms."""


class Weighing:
    """The device memory that a kind of pass takes besides weights, between the calls of modules.

    A look takes time: the first pass is looked at in some calls, and later ones in the call that took most.
    """

    def __init__(self) -> None:
        self.most = 0
        self._before = 0
        self._where: nn.Module | None = None
        self._now = 0
        self._num_calls = 0

    def begin(self, other_bytes: int) -> None:
        """A pass begins, and `other_bytes` in use are not the pass's."""
        if self._now:
            self.most = self._now
        self._before, self._now, self._num_calls = other_bytes, 0, 0

    def is_due(self, module: nn.Module, is_learning: bool, num_modules: int) -> bool:
        if not is_learning:
            return module is self._where
        self._num_calls += 1
        return self._num_calls % (1 + num_modules // _NUM_WEIGHED) == 0

    def note(self, module: nn.Module, other_bytes: int) -> None:
        if other_bytes - self._before > self._now:
            self._now, self._where = other_bytes - self._before, module
