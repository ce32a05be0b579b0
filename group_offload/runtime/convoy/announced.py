"""Calls of a step that are announced before the first of them is made.

A guider of Modular Diffusers prepares the inputs of all branches of a step (with the prompt, without it, ...). Then the model
is called once for each branch. What the first call was given of its branch, the others will be given of theirs.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from ...base.torch_internals import tree_flatten, tree_unflatten


class Step:
    """The branches of one step of a thread. They are kept alive by who has prepared them."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        """Inputs that are kept to compare their values, for as long as the branches are there."""
        self._branches: dict[Any, weakref.ref[Any]] = {}

    def add(self, branch: Any, name: Any) -> None:
        known = self._branches.get(name)
        if known is None or known() is None:
            self._branches[name] = weakref.ref(branch)

    @property
    def branches(self) -> list[Any]:
        return [branch for each in [*self._branches.values()] if (branch := each()) is not None]

    def calls_beside(self, args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
        """The arguments of the calls that follow this one, in order, as far as they can be told."""
        given, _ = tree_flatten((args, kwargs))
        tensors = {id(each) for each in given if isinstance(each, torch.Tensor)}
        branches = self.branches
        while branches and tensors.isdisjoint(map(id, _tensors_in(vars(branches[0])))):
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


class _Local(threading.local):
    step: Step | None = None


_local = _Local()


def begin_step() -> None:
    """Forget what this thread has announced."""
    _local.step = None


def announce(branch: Any, name: Any) -> None:
    """Note that this thread will call a model for a branch.

    Args:
        branch: An object whose attributes are inputs of the call, named as the model names them or otherwise.
        name: What tells the branch from others of the step. The first of a name counts.
    """
    step = _local.step
    if step is None or not step.branches:
        step = _local.step = Step()
    step.add(branch, name)


def announced() -> Step | None:
    """The step in progress of this thread."""
    step = _local.step
    return step if step is not None and step.branches else None


def _tensors_in(fields: Mapping[str, Any]) -> list[torch.Tensor]:
    return [each for each in tree_flatten(list(fields.values()))[0] if isinstance(each, torch.Tensor)]


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
    args, kwargs = tree_unflatten(exchanged, form)
    if any(each is None is not before for before, each in zip(leaves, exchanged, strict=True)):
        return None
    return args, {**kwargs, **named}
