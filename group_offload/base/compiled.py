"""The seam at which calls enter a module: the attribute where torch keeps the call that a module has compiled for itself.

`Module.__call__` calls it in place of the module's forward and hooks. So gates stand there too, each around the call that was
there before. A forward pre-hook beside a gate keeps compilers from looking past it: see [Note: Gates and torch.compile].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .torch_internals import COMPILED_CALL, detect_fake_mode, not_compiled
from .weak import NotCopied

HANDLE = "_group_offload_handle"
"""The attribute of an offloaded module that leads to its handle."""


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


@not_compiled
def has_fake_tensors() -> bool:
    """Whether this thread runs an export.

    Callers test the compiler's flags in place first: one function for all would be compiled itself, and always return True.
    """
    return detect_fake_mode() is not None


# A library that makes a new module from another one may copy the hooks below. They do nothing in such a module.


def allow_trace(module: nn.Module, *args: Any) -> None:
    """Make dynamo look at the gate of a module that compiles itself: the hook only has to exist."""


def refuse_trace(module: nn.Module, *args: Any) -> None:
    is_ours = module.__dict__.get(HANDLE) is not None or module.__dict__.get(COMPILED_CALL) is not None
    if is_ours and (torch.compiler.is_dynamo_compiling() or (torch.compiler.is_compiling() and has_fake_tensors())):
        torch._dynamo.skip_frame("group_offload onloads weights between the calls in this frame")


def is_ours(hook: Any) -> bool:
    """Whether a forward pre-hook is one of these."""
    return hook is allow_trace or hook is refuse_trace
