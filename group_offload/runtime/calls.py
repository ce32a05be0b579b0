"""The calls of gates that are in progress.

[Note: Interrupts]
Ctrl-C raises between any two steps of the engine's own code, also where a call ends and is taken off the list of calls.
So no list and no flag is trusted to say that a call goes on. A call goes on as long as its frame is on the stack. The rest
follows the same rule: `Engine._is_whole` is false wherever the engine is in the middle of something, and becomes true only
at its end. A pass that ends while it is false, or in which anything was raised, ends with `Engine._recover`. That method
trusts nothing but the weights and their blobs: what is on the device or on its way there is given up. If it is interrupted
itself, whoever comes next begins it again.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from ..errors import GroupOffloadError

if TYPE_CHECKING:
    from types import FrameType

    from torch import nn

    from .groups.group import Group


EXPECTED = (GroupOffloadError, torch.OutOfMemoryError)
"""What is raised on purpose, where everything is in order: a forward may catch it, and go on."""


class Call:
    """One call of a gate."""

    __slots__ = ("_frame", "groups", "is_complete", "module")

    def __init__(self, module: nn.Module, frame: FrameType) -> None:
        """
        Args:
            frame: is on the stack for as long as the call lasts.
        """
        self.module = module
        self.groups: list[Group] = []
        """Those that it holds."""
        self.is_complete = False
        """Nothing was raised in it."""
        self._frame = id(frame)  # the frame itself would keep all that the call was given

    def is_on_stack(self) -> bool:
        """Whether it is in progress. The thread that began it asks."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if id(frame) == self._frame:
                return True
            frame = frame.f_back
        return False
