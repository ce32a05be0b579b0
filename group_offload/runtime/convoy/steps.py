"""The calls of a thread, step by step, and which of them are foreseen."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ...base.recent import Recent
from .announced import Step, announced
from .arguments import Arguments
from .speculation import Result

MOST_CALLS = 4
"""The most calls of a step that are foreseen."""
_MOST_MISSES = 2


class Steps:
    """The calls of one thread, step by step."""

    def __init__(self) -> None:
        self.calls: list[Arguments] = []
        """The calls of the step in progress."""
        self.foreseen: list[Arguments] = []
        """What the rest of this step should be called with, as far as that is foreseen."""
        self.ahead: list[Result] = []
        """What these calls would return, as far as they were not made yet."""
        self.found_in: Any = ()
        """What the modules, the weights and the thread were like when these forwards ran."""
        self._announced: Step | None = None
        """The step in progress, if its calls were announced."""
        self._kinds: Hashable = None
        """The kinds of all calls that are expected."""
        self._misses: Recent[Hashable, int] = Recent()
        """For calls of such kinds, and a call's place among them, how often in a row it was foreseen wrongly."""

    def forget(self) -> None:
        self.calls, self.foreseen, self.ahead, self._announced = [], [], [], None

    def hit(self, now: Arguments, found: Result) -> None:
        """Note that a call was foreseen rightly."""
        now.shared = found.arguments.shared
        self._misses.pop((self._kinds, len(self.calls)), None)
        self.calls.append(now)

    def miss(self) -> bool:
        """Note that the next call was foreseen wrongly. Whether neither it nor those after it will be foreseen again."""
        self.ahead, self.foreseen = [], []
        place = self._kinds, len(self.calls)
        self._misses[place] = self._misses.get(place, 0) + 1
        return self._misses[place] == _MOST_MISSES

    def goes_on_with(self, now: Arguments) -> bool:
        """Whether a call belongs to the step in progress."""
        step = announced()
        is_announced = step is not None and step is self._announced
        if not self.calls or not (is_announced or now.is_of_same_step(self.calls[0])):
            return False
        now.relate(self.calls[0])
        return True

    def begin(self, now: Arguments, args: Any, kwargs: Any) -> None:
        """A step begins with this call: foresee the others."""
        if self._announced is not None:
            self._announced.kept.clear()  # somebody may keep the branches
        others, step = self.calls[1:], announced()
        self.forget()
        beside = step.calls_beside(args, kwargs) if step is not None else []
        if step is not None and 0 < len(beside) < MOST_CALLS:
            self._announced = step
            now.keep(step.kept)
            self._foresee([Arguments(*call).keep(step.kept) for call in beside])
        elif 0 < len(others) < MOST_CALLS:
            foreseen = [each.foresee(now) for each in others]
            if all(each is not None for each in foreseen):
                self._foresee([each for each in foreseen if each is not None])

    def _foresee(self, calls: list[Arguments]) -> None:
        self._kinds = tuple(call.key for call in calls)
        missed = (at for at in range(len(calls)) if self._misses.get((self._kinds, at + 1), 0) >= _MOST_MISSES)
        self.foreseen = calls[: next(missed, None)]
