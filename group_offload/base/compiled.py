"""The seam at which calls enter a module: the attribute where torch keeps the call that a module has compiled for itself.

`Module.__call__` calls it in place of the module's forward and hooks. So gates stand there too, each around the call that was
there before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from .torch_internals import COMPILED_CALL
from .weak import NotCopied


class Around(NotCopied):
    """A gate at the seam of one module."""

    compiled: Callable[..., Any] | None
    """The call that stood there before: the module's compiled call, another gate, or None."""


def innermost(module: nn.Module, until: Around | None = None) -> tuple[Around | None, Any]:
    """The last gate that a call of `module` goes through, and what that gate calls: no gate, unless it is `until`."""
    around, call = None, module.__dict__.get(COMPILED_CALL)
    while call is not until and isinstance(call, Around):
        around, call = call, call.compiled
    return around, call


def is_compiled(module: nn.Module) -> bool:
    """Whether the module was compiled for itself, with `module.compile()`."""
    return innermost(module)[1] is not None
