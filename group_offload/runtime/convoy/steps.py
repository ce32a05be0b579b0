"""The calls of a thread, step by step, and which of them are foreseen."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import torch

from ...base.recent import Recent
from ...base.tensors import map_tensors
from .ahead import Ahead, drop
from .announced import Step, announced
from .arguments import Arguments
from .caller import Caller
from .watch import Survey

MOST_CALLS = 4
"""The most calls of a step that are foreseen."""
_MOST_MISSES = 2


class Steps:
    """The calls of one thread, step by step."""

    def __init__(self) -> None:
        self.calls: list[Arguments] = []
        """The calls of the step in progress."""
        self.outputs: list[Output] = []
        self.foreseen: list[Arguments] = []
        """What the rest of this step should be called with, as far as `most` says."""
        self.kinds: Hashable = None
        """The kinds of all calls that are expected."""
        self.ahead: list[Ahead] = []
        """The forwards that were run for these calls, as far as they were not called for yet."""
        self.state: Survey | None = None
        """The state of the modules that they ran with."""
        self.edits = 0
        """The number of edits of weights before they ran."""
        self.caller: Caller | None = None
        """The state of the thread that they ran in place of."""
        self.announced: Step | None = None
        """The step in progress, if its calls were announced."""
        self.misses: Recent[Hashable, int] = Recent()
        """For calls of such kinds, how often in a row one came that was foreseen wrongly, or has to go alone."""
        self.most: Recent[Hashable, int] = Recent()
        """How many of them are foreseen, if two misses in a row have shown that not all should be."""
        self._dropper: Any = None

    def forget(self) -> None:
        self.calls, self.outputs, self.foreseen, self.ahead, self.state = [], [], [], [], None
        self.announced = None

    def drop_with(self, latents: Any) -> None:
        """Let the results go with the latents: nobody can call for them any more then."""
        if self._dropper is not None:
            self._dropper.detach()  # a pipeline may change its latents in place: they are the same in all steps
        self._dropper = None
        if latents is not None:
            self._dropper = weakref.finalize(latents, drop, [weakref.ref(each) for each in self.ahead])
            self._dropper.atexit = False

    def miss(self) -> bool:
        """Note that the next call was foreseen wrongly. Whether neither it nor those after it will be foreseen again."""
        self.misses[self.kinds] = self.misses.get(self.kinds, 0) + 1
        if self.misses[self.kinds] < _MOST_MISSES:
            return False
        del self.misses[self.kinds]
        self.most[self.kinds] = len(self.calls) - 1
        return True

    def goes_on_with(self, now: Arguments) -> bool:
        """Whether a call belongs to the step in progress."""
        step = announced()
        is_announced = step is not None and step is self.announced
        if not self.calls or not (is_announced or now.is_of_same_step(self.calls[0])):
            return False
        now.relate(self.calls[0])
        if step is not None and is_announced:
            now.keep(step.kept)  # it may be made once more, after the last call
        return True

    def begin(self, now: Arguments, args: Any, kwargs: Any) -> None:
        """A step begins with this call: foresee the others."""
        if self.announced is not None:
            self.announced.kept.clear()  # somebody may keep the branches
        others, self.calls, self.outputs, self.announced = self.calls[1:], [], [], None
        step = announced()
        beside = step.calls_beside(args, kwargs) if step is not None else []
        if step is not None and 0 < len(beside) < MOST_CALLS:
            self.announced = step
            now.keep(step.kept)
            self._foresee([Arguments(*call).keep(step.kept) for call in beside])
        elif 0 < len(others) < MOST_CALLS:
            foreseen = [each.foresee(now) for each in others]
            if all(each is not None for each in foreseen):
                self._foresee([each for each in foreseen if each is not None])

    def _foresee(self, calls: list[Arguments]) -> None:
        self.kinds = tuple(call.key for call in calls)
        self.foreseen = calls[: self.most.get(self.kinds, len(calls))]


class Output:
    """What a call has returned, for as long as somebody else keeps it."""

    def __init__(self, output: Any) -> None:
        tensors = tensors_of(output)
        self._versions = [None if tensor.is_inference() else tensor._version for tensor in tensors]
        self._references = [weakref.ref(tensor) for tensor in tensors]

    def tensors(self) -> list[torch.Tensor] | None:
        """The tensors, unless one of them is gone or was changed in place."""
        found = []
        for reference, version in zip(self._references, self._versions, strict=True):
            tensor = reference()
            if tensor is None or version is None or tensor._version != version:
                return None
            found.append(tensor)
        return found


def tensors_of(output: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(output, note, enters_dataclasses=True)
    return found
