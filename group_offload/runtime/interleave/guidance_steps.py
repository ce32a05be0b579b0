"""The calls of a thread, step by step, and which of them are predicted: from the step before, or as they are announced.

A guider of Modular Diffusers prepares the inputs of all branches of a step (with the prompt, without it, ...). Then the model
is called once for each branch. What the first call was given of its branch, the others will be given of theirs.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from ...base.recent import Recent
from ...base.torch_internals import tree_flatten, tree_unflatten
from .arguments import Arguments
from .speculation import Speculation

MOST_CALLS = 4
"""The most calls of a step that are predicted."""
_MOST_MISSES = 2


class Branches:
    """The branches of one step of a thread. They are kept alive by who has prepared them."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        """Inputs that are kept to compare their values, for as long as the branches are there."""
        self.by_name: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()

    def calls_beside(self, args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
        """The arguments of the calls that follow this one, in order, as far as they can be told."""
        given = {id(each) for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)}
        branches = [*self.by_name.values()]
        while branches and given.isdisjoint(map(id, tree_flatten([*vars(branches[0]).values()])[0])):
            del branches[0]
        found: list[tuple[Any, Any]] = []
        for other in branches[1:]:
            call = _exchanged(args, kwargs, vars(branches[0]), vars(other))
            if call is None:
                break
            found.append(call)
        if found:
            weakref.finalize(branches[-1], self.kept.clear).atexit = False
        return found


_local = threading.local()


def begin_step() -> None:
    """Forget what this thread has announced."""
    _local.branches = Branches()


def announce(branch: Any, name: Any) -> None:
    """Note that this thread will call a model for a branch.

    Args:
        branch: An object whose attributes are inputs of the call, named as the model names them or otherwise.
        name: What tells the branch from others of the step. The first of a name counts.
    """
    if announced() is None:
        begin_step()
    _local.branches.by_name.setdefault(name, branch)


def announced() -> Branches | None:
    """What this thread has announced of the step in progress."""
    branches: Branches | None = getattr(_local, "branches", None)
    return branches if branches is not None and branches.by_name else None


def _exchanged(args: Any, kwargs: Any, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """Arguments with the inputs of another branch; None if it cannot be told which those are."""
    named: dict[str, Any] = {}
    tensors: dict[int, torch.Tensor | None] = {}
    for name, value in mine.items():
        other = theirs.get(name, value)
        if name in kwargs and kwargs[name] is value:
            named[name] = other
            continue
        (before, form), (after, other_form) = tree_flatten(value), tree_flatten(other)
        for one, another in zip(before, after if form == other_form else [None] * len(before), strict=True):
            if isinstance(one, torch.Tensor):
                is_new = tensors.setdefault(id(one), another) is another
                tensors[id(one)] = another if is_new else None  # one tensor here, two there
    leaves, form = tree_flatten((args, kwargs))
    exchanged = [tensors.get(id(each), each) if isinstance(each, torch.Tensor) else each for each in leaves]
    if any(each is None is not before for before, each in zip(leaves, exchanged, strict=True)):
        return None
    args, kwargs = tree_unflatten(exchanged, form)
    return args, {**kwargs, **named}


class Steps(threading.local):
    """The calls of each thread, step by step."""

    def __init__(self) -> None:
        self.found_in: Any = ()
        """What the modules, the weights and the thread were like when the forwards ran that are ahead."""
        self._kinds: Hashable = None
        """The kinds of all calls that are expected."""
        self._misses: Recent[Hashable, int] = Recent()
        """For calls of such kinds, how many steps in a row had one that was predicted wrongly."""
        self.forget()

    def forget(self) -> None:
        self.calls: list[Arguments] = []
        """The calls of the step in progress."""
        self.ahead: list[Speculation] = []
        """The forwards of these calls, as far as they were not called for yet."""
        self._announced: Branches | None = None
        """The branches of the step in progress, if its calls were announced."""

    def hit(self) -> None:
        """Note that the next call was predicted rightly."""
        self.calls.append(self.ahead.pop(0).arguments)
        if not self.ahead:
            self._misses.pop(self._kinds, None)

    def miss(self) -> bool:
        """Note that the next call was predicted wrongly. Whether such calls will not be predicted again."""
        self.ahead = []
        self._misses[self._kinds] = self._misses.get(self._kinds, 0) + 1
        return self._misses[self._kinds] == _MOST_MISSES

    def goes_on_with(self, now: Arguments) -> bool:
        """Whether a call belongs to the step in progress."""
        branches = announced()
        is_announced = branches is not None and branches is self._announced
        if not self.calls or not (is_announced or now.is_of_same_step(self.calls[0])):
            return False
        now.relate(self.calls[0])
        return True

    def begin(self, now: Arguments, args: Any, kwargs: Any) -> list[Arguments]:
        """A step begins with this call. What the others should be called with, if that is predicted."""
        if self._announced is not None:
            self._announced.kept.clear()  # somebody may keep the branches
        others, branches = self.calls[1:], announced()
        self.forget()
        beside = branches.calls_beside(args, kwargs) if branches is not None else []
        calls: list[Arguments | None] = [each.predict(now) for each in others]
        if branches is not None and 0 < len(beside) < MOST_CALLS:
            self._announced = branches
            now.keep(branches.kept)
            calls = [Arguments(*call).keep(branches.kept) for call in beside]
        predicted = [each for each in calls if each is not None]
        if not 0 < len(predicted) == len(calls) < MOST_CALLS:
            return []
        self._kinds = tuple(call.key for call in predicted)
        return predicted if self._misses.get(self._kinds, 0) < _MOST_MISSES else []
