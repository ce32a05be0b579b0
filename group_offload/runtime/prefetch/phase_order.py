"""Which model of a pipeline should run next, learned from which one ran after which.

[Note: Models of a pipeline]
The models of a pipeline run one after another. Consecutive passes of one model are its *phase*: an encoder's mostly has one
pass, a denoiser's as many as there are steps. Two things are done for the model whose phase should come next:

- A pass that should be the last one of its phase begins no copy for another pass like it.
- At the end of that pass the next model takes over the slots. So its first groups are on their way before it is called.

What models leave on the device between passes, within a budget, is taken from them only for a model that gains by it. A
byte that one model loses is sent once more in its next phase. It saves the model that takes the place one copy in each pass
up to then, but for the first. Fewer than `_WORTH_IT` passes gain nothing. So a ControlNet and a transformer that alternate
leave each other alone, and an encoder leaves a denoiser alone, also the space that it will want, but an expert that runs ten
steps displaces the one before it.

How many passes a phase has, and which model comes then, is what was seen the last times. Before that, encoders and decoders are
taken to run once, in the pipeline's own order; of a denoiser's phase only the end of a first one tells the length. A wrong
guess costs a stall, as in `Schedule`: a next model that is not called gives the slots back to the one that is.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Collection, Hashable, Sequence
from itertools import pairwise
from typing import Any

_NUM_SEEN = 3
"""The number of last times that count. Most of them decide: the last step of an image does not predict the next first step."""
_MOST_PASSES = 4096
"""Longer phases are not learned."""
_WORTH_IT = 3
"""So many passes make room that another model gives up worth what it costs."""


Model = Any
"""The `Passes` of one model of a pipeline. What is called here may be called in another model's pass, and raises no errors."""

Part = tuple[int, int]
"""The number of a model, and the hash of the module or method that its pass begins at: an autoencoder encodes, or decodes."""


class PhaseOrder:
    """Predicts which model of a pipeline runs next. The models' passes hold it, and it keeps none of them alive.

    `begin` is called in each forward. Threads that run two models of one pipeline at once only spoil the guesses.
    """

    def __init__(self, models: Sequence[Model], order: Sequence[Model], run_once: Collection[Model]) -> None:
        self._models = [weakref.ref(model) for model in models]
        self._numbers = weakref.WeakKeyDictionary({model: number for number, model in enumerate(models)})
        self._in_order = dict(pairwise(self._numbers[model] for model in order))
        """For each model, the one that is taken to run after it, before any has run: as in the pipeline's own order."""
        self._run_once = {self._numbers[model] for model in run_once}
        """The models that are taken to have one pass in a phase."""
        self._seen: dict[tuple[Part, int], deque[int]] = {}
        """After so many passes of a part in one phase: the models of the next passes, the last time last."""
        self._counts = [0] * len(self._models)
        """How many passes each model has had."""
        self._begun: dict[int, deque[list[int]]] = {}
        """For each model, these counts of all models as its last two phases began."""
        self._phase: Counter[Part] = Counter()
        """How many passes each part of the current model has had in its phase."""
        self._last: Part | None = None
        """The part of the last pass."""

    def begin(self, model: Model, top: Hashable) -> Model | None:
        """A forward of `model` begins, at the module or method `top`. Returns the model that runs next, if another should."""
        part, before = (self._numbers[model], hash(top)), self._last
        number = part[0]
        if before is not None and self._phase[before] <= _MOST_PASSES:
            self._seen.setdefault((before, self._phase[before]), deque(maxlen=_NUM_SEEN)).append(number)
        if before is None or before[0] != number:
            self._begun.setdefault(number, deque(maxlen=2)).append([*self._counts])
            self._phase = Counter()
        self._last = part
        self._phase[part] += 1
        self._counts[number] += 1
        following = self._next(part)
        return None if following is None or following == number else self._models[following]()

    @property
    def is_first_of_phase(self) -> bool:
        """Whether the pass in progress is the first one of its model in a row."""
        return self._phase.total() == 1

    def protected_from(self, model: Model) -> weakref.WeakKeyDictionary[Any, int]:
        """The memories of other models that `model` does not displace: it should run too few times before their next phase.

        Each with the bytes that are left free for it, because it would displace `model`.
        """
        mine = self._numbers[model]
        others = [(number, found()) for number, found in enumerate(self._models) if number != mine]
        protected = {
            other.memory: other.memory.wanted_bytes if self._displaces(number, mine) else 0
            for number, other in others
            if other is not None and not self._displaces(mine, number)
        }
        return weakref.WeakKeyDictionary(protected)

    def _displaces(self, mine: int, other: int) -> bool:
        """Whether a model runs often enough between two phases of the other one."""
        begun: list[list[int]] = [*self._begun.get(other, ())]  # a copy: another thread may add to it
        if not begun:  # a denoiser will want what it can get
            return mine not in self._run_once or other in self._run_once
        *earlier, last = (counts[mine] for counts in begun)
        since = self._counts[mine] - last
        if not earlier:  # how many passes follow is not known
            return since >= _WORTH_IT or mine not in self._run_once
        return max(since, last - earlier[0]) >= _WORTH_IT

    def _next(self, part: Part) -> int | None:
        seen = self._seen.get((part, self._phase[part]))
        if seen:
            return Counter(reversed([*seen])).most_common(1)[0][0]
        return self._in_order.get(part[0]) if self.is_first_of_phase and part[0] in self._run_once else None
