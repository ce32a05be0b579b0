"""The calls of a thread, step by step, and which of them are foreseen from the step before."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ...base.recent import Recent
from .arguments import Arguments
from .speculation import Speculation

MOST_CALLS = 4
"""The most calls of a step that are foreseen."""
_MOST_MISSES = 2
_MOST_COMPARED = 8
"""How often latents of a kind of calls are compared by value before one is foreseen rightly: each time waits for the device."""


class Steps:
    """The calls of one thread, step by step.

    The calls of a step have the same latents, their first tensor: one object, or a copy for each call (a cast), told by its
    values. So where copies may come, the tensors of the first call are kept until the others have come, or to the next step.
    """

    def __init__(self) -> None:
        self.found_in: Any = ()
        """What the modules, the weights and the thread were like when the forwards ran that are ahead."""
        self._kinds: Hashable = None
        """The kinds of all calls that are expected."""
        self._misses: Recent[Hashable, int] = Recent()
        """For calls of such kinds, how many steps in a row had one that was foreseen wrongly."""
        self._compared: Recent[Hashable, int] = Recent()
        """For the kind of a step's first call, how often latents were compared by value since a step was foreseen rightly."""
        self.forget()

    def forget(self) -> None:
        self.calls: list[Arguments] = []
        """The calls of the step in progress."""
        self.ahead: list[Speculation] = []
        """The forwards of these calls, as far as they were not called for yet."""
        self._kept: list[Any] = []
        """The tensors of the step's first call, if copies of them may come."""

    def hit(self, found: Speculation) -> None:
        """Note that a call was foreseen rightly."""
        self.calls.append(found.arguments)
        if not self.ahead:
            self._misses.pop(self._kinds, None)
            if self._kept:
                self._compared.pop(self.calls[0].key, None)
                self._kept = []

    def miss(self) -> bool:
        """Note that the next call was foreseen wrongly. Whether such calls will not be foreseen again."""
        self.ahead = []
        self._misses[self._kinds] = self._misses.get(self._kinds, 0) + 1
        return self._misses[self._kinds] == _MOST_MISSES

    def goes_on_with(self, now: Arguments) -> bool:
        """Whether a call belongs to the step in progress."""
        if not self.calls:
            return False
        first = self.calls[0]
        if now.is_of_same_step(first):
            self._compared[first.key] = _MOST_COMPARED  # nobody copies these latents
        elif not self._kept:
            return False
        else:
            self._compared[first.key] = self._compared.get(first.key, 0) + 1
            if not now.is_of_same_step(first, by_value=True):
                return False
        now.relate(first)
        return True

    def begin(self, now: Arguments) -> list[Arguments]:
        """A step begins with this call. What the others should be called with, if that is foreseen."""
        others = self.calls[1:]
        self.forget()
        if self._compared.get(now.key, 0) < _MOST_COMPARED:
            now.keep(self._kept)
        foreseen = [call for each in others if (call := each.foresee(now)) is not None]
        if not 0 < len(foreseen) == len(others) < MOST_CALLS:
            return []
        self._kinds = tuple(call.key for call in foreseen)
        return foreseen if self._misses.get(self._kinds, 0) < _MOST_MISSES else []
