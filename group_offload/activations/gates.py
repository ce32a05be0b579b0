"""Where activation offloading steps in: around the root's forward, and where the call of a group begins.

[Note: Activations and torch.compile]
Saved-tensor hooks cannot be part of a graph, so the root has to run in Python: a compiler that traces it is sent away
(`torch._dynamo.skip_frame`, which has to be called in the frame itself, with a literal, for its text to be shown), and
compiles the frames below. The graph of a group that is compiled by itself (`block.compile()`) never contains the group's
gate: the gate is put where `Module.__call__` looks for the compiled call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..base.compiled import Around, innermost
from ..base.saved import unwatched
from .session import Session

GROUP = "_group_offload_activation_group"
"""The attribute of a group's module that leads to its `GroupGate`."""


class GroupGate(Around):
    """Tells the session that the call of a group begins: from a hook, or where the module keeps its compiled call."""

    def __init__(self, session: Session, name: str, module: nn.Module) -> None:
        self.name = name
        self.compiled = None
        self._session = session
        self._module = module
        self._hook: RemovableHandle | None = None

    def place(self) -> None:
        """Put the gate outside of what the module compiles for itself; it may have been compiled since the last call."""
        around, call = innermost(self._module, self)
        if call is self:
            return
        if call is not None and hasattr(call, "_torchdynamo_orig_callable"):
            self._unhook()
            self.compiled = call
            _put(self._module, around, self)
        elif self._hook is None:
            self._hook = self._module.register_forward_pre_hook(partial(tell, GROUP, "enter"))

    def enter(self) -> None:
        self._session.enter(self.name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            torch._dynamo.skip_frame("group_offload offloads activations: use block.compile(), or drop fullgraph=True")
        unwatched(self.enter)()
        assert self.compiled is not None
        return self.compiled(*args, **kwargs)

    def remove(self) -> None:
        self._unhook()
        around, call = innermost(self._module, self)
        if call is self:
            _put(self._module, around, self.compiled)
        self._module.__dict__.pop(GROUP, None)

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _put(module: nn.Module, around: Around | None, call: Callable[..., Any] | None) -> None:
    if around is None:
        module._compiled_call_impl = call
    else:
        around.compiled = call


def tell(owner: str, event: str, module: nn.Module, *args: Any) -> None:
    """A hook of `module`, but for the first two arguments: calls the method `event` of what the module keeps as `owner`.

    A copy of the module, or one read back from a pickle, has the hook and keeps nothing there.
    """
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.skip_frame("group_offload offloads activations: use block.compile(), or drop fullgraph=True")
        return
    found = module.__dict__.get(owner)
    if found is not None:
        unwatched(getattr(found, event))()
