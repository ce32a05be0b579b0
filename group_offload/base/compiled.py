"""The seam at which modules are entered: the attribute where torch keeps what a module has compiled for itself.

`Module.__call__` calls what stands there in place of the module's forward and hooks. So gates stand there too, each around
what was there before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from .torch_internals import COMPILED_CALL


class Around:
    """A gate at the seam of one module."""

    compiled: Callable[..., Any] | None
    """What stood there before: what the module has compiled for itself, another gate, or nothing."""


def innermost(module: nn.Module, until: Around | None = None) -> tuple[Around | None, Any]:
    """The last gate that a call of `module` goes through, and what that gate calls: no gate, unless it is `until`."""
    around, call = None, module.__dict__.get(COMPILED_CALL)
    while call is not until and isinstance(call, Around):
        around, call = call, call.compiled
    return around, call


def is_compiled(module: nn.Module) -> bool:
    """Whether the module was compiled for itself, with `module.compile()`."""
    return innermost(module)[1] is not None
