"""Which model of a pipeline should run next, learnt from which one ran after which.

[Note: Models of a pipeline]
The models of a pipeline run one after another. Passes of one model in a row are its *stint*: an encoder's mostly has one pass,
a denoiser's as many as there are steps. The *heir* is the model whose stint should come next. Two things are done for it:

- A pass that should be the last one of its stint begins no copy for another pass like it.
- At the end of that pass the heir takes over the slots. So its first groups are on their way before it is called.

What models leave on the device between passes, within a budget, is taken from them only for a model that gains by it. A
byte that one model gives up is sent once more in its next stint. It saves the model that takes the place one copy in each pass
up to then, but for the first. Fewer than `_WORTH_IT` passes gain nothing. So a ControlNet and a transformer that alternate
leave each other alone, and an encoder leaves a denoiser alone, also the room that it will want, but an expert that runs ten
steps displaces the one before it.

How many passes a stint has, and which model comes then, is what was seen the last times. Before that, encoders and decoders are
taken to run once, in the pipeline's own order; of a denoiser's stint only the end of a first one tells the length. A wrong
guess costs a stall, as in `Schedule`: an heir that is not called gives the slots back to the model that is.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Collection, Hashable, Sequence
from itertools import pairwise
from typing import Any

_NUM_SEEN = 3
"""The number of last times that count. Most of them decide: the last step of an image does not foretell the next first step."""
_MOST_PASSES = 4096
"""Longer stints are not learnt."""
_WORTH_IT = 3
"""So many passes make room that another model gives up worth what it costs."""


Model = Any
"""The `Passes` of one model of a pipeline. What is called here may be called in another model's pass, and raises no errors."""

Part = tuple[int, int]
"""The number of a model, and the hash of the module or method that its pass begins at: an autoencoder encodes, or decodes."""


class Succession:
    """Foresees which model of a pipeline runs next. The models' passes hold it, and it keeps none of them alive.

    `begin` is called in each forward. Threads that run two models of one pipeline at once only spoil the guesses.
    """

    def __init__(self, models: Sequence[Model], order: Sequence[Model], run_once: Collection[Model]) -> None:
        """
        Args:
            order: Those that are taken to run one after another, before any has run.
            run_once: Those that are taken to have one pass in a stint.
        """
        self._models = [weakref.ref(model) for model in models]
        self._numbers = weakref.WeakKeyDictionary({model: number for number, model in enumerate(models)})
        in_order = [self._numbers[model] for model in order]
        self._first_heirs = dict(pairwise(in_order))
        self._run_once = {self._numbers[model] for model in run_once}
        self._seen: dict[tuple[Part, int], deque[int]] = {}
        """After so many passes of a part in one stint: the models of the next passes, the last time last."""
        self._counts = [0] * len(self._models)
        """How many passes each model has had."""
        self._begun: dict[int, deque[list[int]]] = {}
        """For each model, these counts as its last two stints began."""
        self._stint: Counter[Part] = Counter()
        """The parts of the current stint, in order, and how many passes each has had in it."""
        self._last: Part | None = None
        """The part of the last pass."""

    def begin(self, model: Model, top: Hashable) -> Model | None:
        """A forward of `model` begins, at the module or method `top`.

        Returns:
            The model that should run next, if it is another one.
        """
        part, before = (self._numbers[model], hash(top)), self._last
        number = part[0]
        if before is not None and self._stint[before] <= _MOST_PASSES:
            self._seen.setdefault((before, self._stint[before]), deque(maxlen=_NUM_SEEN)).append(number)
        if before is None or before[0] != number:
            self._begun.setdefault(number, deque(maxlen=2)).append([*self._counts])
            self._stint = Counter()
        self._last = part
        self._stint[part] += 1
        self._counts[number] += 1
        heir = self._next(part)
        return None if heir is None or heir == number else self._models[heir]()

    @property
    def is_first_of_stint(self) -> bool:
        """Whether the pass in progress is the first one of its model in a row."""
        return self._stint.total() == 1

    def spared_by(self, model: Model) -> dict[Any, int]:
        """The memories of other models that `model` gains too little by displacing: it should run too few times before their
        next stint. Each with the bytes that are left free for it, because it would displace `model`."""
        mine = self._numbers[model]
        others = [(number, found()) for number, found in enumerate(self._models) if number != mine]
        return {
            other.memory: other.memory.wanted_bytes if self._displaces(number, mine) else 0
            for number, other in others
            if other is not None and not self._displaces(mine, number)
        }

    def _displaces(self, mine: int, other: int) -> bool:
        begun = self._begun.get(other)
        if begun is None:  # a denoiser will want what it can get
            return mine not in self._run_once or other in self._run_once
        since = self._counts[mine] - begun[-1][mine]
        if len(begun) == 1:  # of a stint of unknown length
            return since >= _WORTH_IT or mine not in self._run_once
        return max(since, begun[-1][mine] - begun[0][mine]) >= _WORTH_IT

    def _next(self, part: Part) -> int | None:
        seen = self._seen.get((part, self._stint[part]))
        if seen:
            return Counter(reversed(seen)).most_common(1)[0][0]
        return self._first_heirs.get(part[0]) if self.is_first_of_stint and part[0] in self._run_once else None
