"""The calls of gates that are in progress.

[Note: Interrupts]
Ctrl-C raises between any two steps of the engine's own code, also where a call ends and is taken off the list of calls.
So no list and no flag is trusted to say that a call goes on: a call goes on as long as its frame is on the stack. Likewise
the state of `Passes` is UNKNOWN during each step of the engine, and becomes another only at the end of the step. A pass that
ends in that state, or in which an exception was raised, ends with `Passes.recover`. That method trusts only the weights and
their blobs: bytes on the device or on their way there are given up. If it is interrupted, the next pass begins it again.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from ..errors import GroupOffloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from torch import nn

    from ..partition import Method
    from .groups.group import Group


EXPECTED = (GroupOffloadError, torch.OutOfMemoryError)
"""Exceptions that the engine raises on purpose, in an orderly state: a forward may catch them, and go on."""


class Call:
    """One call of a gate."""

    __slots__ = ("_frame", "entry", "groups", "is_complete", "is_deferred", "module", "needs")

    def __init__(
        self,
        module: nn.Module,
        entry: nn.Module | Method,
        frame: FrameType,
        needs: Callable[[nn.Module | Method], Sequence[Group]],
    ) -> None:
        """
        Args:
            entry: What is called: the module, or one of its methods.
            frame: Frame that is on the stack for as long as the call lasts.
            needs: Function that returns the groups that a call of `entry` needs. They may be others once a pass has begun.
        """
        self.module = module
        self.entry = entry
        self.needs = needs
        self.groups: list[Group] = []
        """The groups that the call holds."""
        self.is_deferred = False
        """Whether the call may do without its groups: they are onloaded once its module's own forward is called."""
        self.is_complete = False
        """Whether the call returned and raised no exception."""
        self._frame = id(frame)  # the frame itself would keep the call's arguments alive

    def is_on_stack(self) -> bool:
        """Whether the call is in progress. Only the thread that began the call may ask."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if id(frame) == self._frame:
                return True
            frame = frame.f_back
        return False
