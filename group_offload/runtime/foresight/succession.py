"""Which model of a pipeline should run next, learnt from which one ran after which.

[Note: Models of a pipeline]
The models of a pipeline run one after another. Passes of one model in a row are its *stint*: an encoder's mostly has one pass,
a denoiser's as many as there are steps. The *heir* is the model whose stint should come next. Three things are done for it:

- From the beginning of a stint on, while nobody reads, the heir's files are read into the page cache (`CacheReads`).
- A pass that should be the last one of its stint begins no copy for another pass like it. Once it has read all that it
  needs, the heir's first groups are read into the heir's staging memory.
- At the end of that pass the heir takes over the slots. So its first groups are on their way before it is called.

What models leave on the device between passes, within a budget, is taken from them only for a model that gains by it. A
byte that one model gives up is sent once more in its next stint. It saves the model that takes the place one copy in each pass
up to then, but for the first. Fewer than `_WORTH_IT` passes gain nothing. So a ControlNet and a transformer that alternate
leave each other alone, and an encoder leaves a denoiser alone, but an expert that runs ten steps displaces the one before it.

How many passes a stint has, and which model comes then, is what was seen the last times. Before that, encoders and decoders are
taken to run once, in the pipeline's own order; of a denoiser's stint only the end of a first one tells the length. A wrong
guess costs a stall, as in `Schedule`: an heir that is not called gives the slots back to the model that is.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any, Protocol

_NUM_SEEN = 3
"""The number of last times that count. Most of them decide: the last step of an image does not foretell the next first step."""
_MOST_PASSES = 4096
"""Longer stints are not learnt."""
_WORTH_IT = 3
"""So many passes make room that another model gives up worth what it costs."""


class Model(Protocol):
    """The passes of one model of a pipeline. All methods may be called in another model's pass, and never raise errors."""

    @property
    def staying(self) -> Any:
        """What the model has on the device between passes."""

    @property
    def is_reading(self) -> bool:
        """Whether threads read files for a pass, or will."""

    @property
    def cached_bytes(self) -> int:
        """The bytes of files that passes find in the page cache only as long as nothing drives them out."""

    def plan_cache_reads(self, beside_bytes: int) -> None:
        """Decide what to read into the page cache, which also has to hold `beside_bytes` of another model."""

    def read_cache(self, is_idle: Callable[[], bool]) -> bool:
        """Read on, as long as `is_idle()`. Returns whether there is more to read."""

    def stop_cache_reads(self) -> None:
        """Begin no more of these reads."""

    def read_first(self) -> None:
        """Begin to read the first groups, before there are slots for them."""

    def take_over(self) -> None:
        """Take the slots, and start the copies of the first groups."""


Part = tuple[int, int]
"""The number of a model, and the id of the module that its pass begins at: an autoencoder encodes, or decodes."""


class Succession:
    """Foresees which model of a pipeline runs next. The models' passes hold it, and it keeps none of them alive.

    Order of calls: `begin` in each forward, then any number of `look`. Threads that run two models of one pipeline at once
    only spoil the guesses.
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
        """After so many passes of a part in a row: the models of the next passes, the last time last."""
        self._heirs: dict[Part, int] = {}
        """The model of the stint that came after the last one of a part."""
        self._counts = [0] * len(self._models)
        """How many passes each model has had."""
        self._begun: dict[int, list[int]] = {}
        """For each model, these counts as its last stint began."""
        self._between: dict[int, list[int]] = {}
        """For each model, the passes of all between the beginnings of its last two stints."""
        self._now: tuple[Part, int] | None = None
        """The part of the last pass, and the number of its passes in a row."""
        self._reader: int | None = None
        """The number of the heir whose files are read into the page cache, or will be."""
        self._is_planned = False
        self._heir: int | None = None
        """The number of the model that should run after this pass, if its first groups are still to be read."""

    def begin(self, model: Model, top: object) -> Model | None:
        """A forward of `model` begins, at the module `top`. Returns the model that should run next, if it is another one."""
        part, before = (self._numbers[model], id(top)), self._now
        num_passes = before[1] + 1 if before is not None and before[0] == part else 1
        self._now = part, num_passes
        if before is not None and before[1] <= _MOST_PASSES:
            self._seen.setdefault(before, deque(maxlen=_NUM_SEEN)).append(part[0])
            if part[0] != before[0][0]:
                self._heirs[before[0]] = part[0]
        if before is None or before[0][0] != part[0]:
            begun, now = self._begun.get(part[0]), [*self._counts]
            if begun is not None:
                self._between[part[0]] = [after - then for after, then in zip(now, begun, strict=True)]
            self._begun[part[0]] = now
        self._counts[part[0]] += 1
        if num_passes == 1:
            reader = self._model(self._reader)
            if reader is not None:
                reader.stop_cache_reads()
            self._reader, self._is_planned = self._after(part), False
        self._heir = self._next(part, num_passes)
        if self._heir == part[0]:
            self._heir = None
        return self._model(self._heir)

    def spared_by(self, model: Model) -> list[Model]:
        """The other models that `model` gains too little by displacing: it should run too few times before their next stint."""
        mine = self._numbers[model]
        others = [self._model(number) for number in self._begun if number != mine and not self._displaces(mine, number)]
        return [other for other in others if other is not None]

    def _displaces(self, mine: int, other: int) -> bool:
        since = self._counts[mine] - self._begun[other][mine]
        between = self._between.get(other)
        if between is None:  # of a stint of unknown length
            return since >= _WORTH_IT or mine not in self._run_once
        return max(since, between[mine]) >= _WORTH_IT

    def look(self, model: Model) -> None:
        """A call in a pass of `model` begins: if nobody reads for it, read for its heir."""
        if (self._reader is None and self._heir is None) or model.is_reading:
            return
        reader, heir = self._model(self._reader), self._model(self._heir)
        self._heir = None
        if reader is not None and not self._is_planned:
            reader.plan_cache_reads(model.cached_bytes)
            self._is_planned = True
        if reader is None or not reader.read_cache(lambda: not model.is_reading):
            self._reader = None
        if heir is not None:
            heir.read_first()

    def _next(self, part: Part, num_passes: int) -> int | None:
        seen = self._seen.get((part, num_passes))
        if seen:
            return Counter(reversed(seen)).most_common(1)[0][0]
        is_new = num_passes == 1 and part[0] in self._run_once
        return self._first_heirs.get(part[0]) if is_new else None

    def _after(self, part: Part) -> int | None:
        return self._heirs.get(part, self._first_heirs.get(part[0]))

    def _model(self, number: int | None) -> Model | None:
        return None if number is None else self._models[number]()
