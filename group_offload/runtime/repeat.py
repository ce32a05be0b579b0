"""Repeats a call that the device refused memory, where it can be told that this changes nothing else.

[Note: Refused calls]
A model's own allocations come past the arena (see [Note: Memory that gives way]). If one is refused while there are residents,
they give way, and the gate that is innermost repeats its call; if it may not, the gate around it tries. So nobody sees an error
for memory that the engine could do without.

A call is repeated only if it cannot have changed anything before it failed:

- no graph is recorded,
- its arguments are tensors, numbers, texts, None, and containers of these, and no tensor has another version now,
- no random number was drawn, from the host's generator or the device's,
- its weights and buffers are what was onloaded,
- nothing else about its modules has changed since a call of the same gate returned before (`Fingerprint`). With hooks of
  others, in training mode, or with attributes that hold tensors, no call is repeated. With containers or objects in
  attributes, only those of models are that keep [Note: The contract of shared passes].

An operator may catch the error: cuDNN then computes a convolution by another algorithm, with other bits, and takes that one
from then on. So where a call may be repeated, `Refused` is raised, which operators do not know. Only when nothing is left to
give way do they get the error that they catch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..base import selective
from ..base.arena import arena_for
from ..base.device import Refused
from ..base.torch_internals import TorchDispatchMode, set_eval_frame
from ..base.weak import Weak
from .interleave.fingerprint import SIMPLE, Fingerprint, examine
from .passes import Passes

logger = logging.getLogger("group_offload")

_UNKNOWN = object()
_MOST_REPEATS = 16
"""Each time twice as much gives way, so this is more than any device has. Models called inside may bring theirs back."""


class Repeater:
    """Calls one gate's module. The gate owns it."""

    _module = Weak[nn.Module]()
    _passes = Weak[Passes]()

    def __init__(self, module: nn.Module, passes: Passes) -> None:
        self._module = module
        self._passes, self.backend = passes, passes.backend
        self._arena = arena_for(self.backend)
        self._before: Fingerprint | None = None
        """The module's state as an earlier call returned."""
        self._is_opaque = False
        """Whether nothing can be told of the module's state. Gates are made anew when the module changes."""
        self._has_warned = False

    def call(
        self, call: Callable[..., Any], args: Any, kwargs: Any, compiler: Any, modes: Sequence[TorchDispatchMode]
    ) -> Any:
        """Call it, and again if the device refuses memory, as long as residents give way.

        Args:
            compiler: What watches the thread's frames in the call, and so do `modes` its operations.

        Raises:
            torch.OutOfMemoryError: No resident was left, or the call cannot be repeated.
        """
        passes, refusal = self._passes, self.backend.refusal
        if not passes.placer.has_budget or torch.is_grad_enabled():
            return _seen(call, args, kwargs, compiler, modes)
        before, around, num_repeats = self._now((args, kwargs)), refusal.must_fail, 0

        def may_repeat() -> bool:
            return num_repeats < _MOST_REPEATS and self._may_repeat((args, kwargs), before)

        def must_fail() -> bool:
            """Whether the call, or one around it, could be repeated if it failed now."""
            return may_repeat() or (around is not None and around())

        while True:
            refused: torch.OutOfMemoryError | None = None
            try:
                refusal.must_fail = must_fail
                output = _seen(call, args, kwargs, compiler, modes)
            except torch.OutOfMemoryError as error:
                if not may_repeat():
                    raise
                # The frames of the call hold what it has computed so far.
                refused = error.with_traceback(None)
                refused.__context__ = refused.__cause__ = None
            finally:
                refusal.must_fail = around
            if refused is None:
                if self._arena.has_refused and not passes.is_inside_a_call:
                    self._warn()
                self._look()
                return output
            if passes.give_way(1 << num_repeats):
                num_repeats += 1
            elif isinstance(refused, Refused):
                num_repeats = _MOST_REPEATS  # an operator may do without the memory
            else:
                try:
                    raise refused
                finally:
                    del refused  # the error holds this frame
            passes.begin_again()

    def _warn(self) -> None:
        """An operator was refused memory, and went on without."""
        self._arena.answer()
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Short of device memory, an operator of %s fell back to another algorithm, so the last bits of its output may "
                "differ. Lower vram_budget to leave it more memory.",
                type(self._module).__name__,
            )

    def _now(self, given: Any) -> tuple[list[Any], object, torch.Tensor]:
        """What a call is given, and the random states."""
        return [*_versions(given)], self.backend.generator_state(), torch.default_generator.get_state()

    def _may_repeat(self, given: Any, before: tuple[list[Any], object, torch.Tensor]) -> bool:
        """Whether residents are left, and nothing was changed since the call began."""
        if self._before is None or not self._arena.resident_bytes:
            return False
        if any(group.changed() for group in self._passes.memory.bound):
            return False
        now = self._now(given)
        if _UNKNOWN in now[0] or now[:2] != before[:2] or not torch.equal(now[2], before[2]):
            return False
        if self._before.holds():
            return True
        self._before = None  # the next call that returns looks again
        return False

    def _look(self) -> None:
        """Look at the module's state as a call returns, unless that is known, or was found to tell nothing."""
        if self._before is not None or self._is_opaque:
            return
        found = examine(self._module)
        # What a module keeps of its last call, beside numbers, would be kept from being freed.
        if isinstance(found, str) or found.has_tensors or (found.is_partial and not self._passes.is_function):
            self._is_opaque = True
        else:
            self._before = found


def _seen(call: Callable[..., Any], args: Any, kwargs: Any, compiler: Any, modes: Sequence[TorchDispatchMode]) -> Any:
    """A call that compilers and selective checkpoints see. They must see nothing of the engine's own Python."""
    selective.show(modes)
    set_eval_frame(compiler)
    try:
        return call(*args, **kwargs)
    finally:
        set_eval_frame(None)
        selective.hide()


def _versions(value: Any) -> Iterator[Any]:
    """Something for each thing that was given, which changes if the thing does; `_UNKNOWN` if that cannot be told."""
    if type(value) in (tuple, list):
        yield len(value)
        for each in value:
            yield from _versions(each)
    elif type(value) is dict:
        yield len(value)
        for name, each in value.items():
            yield name
            yield from _versions(each)
    elif isinstance(value, torch.Tensor):
        yield id(value)
        yield _UNKNOWN if value.is_inference() else value._version
    else:
        yield value if type(value) in SIMPLE else _UNKNOWN
