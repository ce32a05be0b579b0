"""Where activation offloading steps in: around the root's forward, and where the call of a group begins.

Hooks are functions of this file, which find what they need in the module that they are called for: a copy of the module,
or one read back from a pickle, has the hooks, and finds nothing.

[Note: Activations and torch.compile]
Saved-tensor hooks cannot be part of a graph, so the root has to run in Python: a compiler that traces it is sent away
(`torch._dynamo.skip_frame`, which has to be called in the frame itself, with a literal, for its text to be shown), and
compiles the frames below. A group that is compiled by itself (`block.compile()`) never
contains its mark: that is put where `Module.__call__` looks for the compiled call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..base import selective
from ..base.compiled import Around, innermost
from ..base.torch_internals import set_eval_frame
from .session import Session

ROOT = "_group_offload_activations"
"""The attribute of a root module that leads to its `RootHooks`."""
GROUP = "_group_offload_activation_group"
"""The attribute of a group's module that leads to its `Mark`."""


class _NotCopied:
    """Something that belongs to one module: a copy of the module gets none."""

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


class Mark(_NotCopied):
    """Tells the session that the call of a group begins."""

    def __init__(self, session: Session, name: str, module: nn.Module) -> None:
        self.session = session
        self.name = name
        self._module = module
        self._hook: RemovableHandle | None = None
        self._gate: _Gate | None = None
        module.__dict__[GROUP] = self
        self.place()

    def place(self) -> None:
        """Put the mark where it is outside of what the module compiles for itself; it may have been compiled since."""
        around, call = innermost(self._module, self._gate)
        if call is self._gate is not None:
            return
        self._gate = None
        if call is not None and hasattr(call, "_torchdynamo_orig_callable"):
            self._unhook()
            self._gate = _Gate(self, call)
            _put(self._module, around, self._gate)
        elif self._hook is None:
            self._hook = self._module.register_forward_pre_hook(_enter_group)

    def remove(self) -> None:
        self._unhook()
        gate, self._gate = self._gate, None
        around, call = innermost(self._module, gate)
        if gate is not None and call is gate:
            _put(self._module, around, gate.compiled)
        self._module.__dict__.pop(GROUP, None)

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


class _Gate(_NotCopied, Around):
    """Stands where a module keeps its compiled call."""

    compiled: Callable[..., Any]

    def __init__(self, mark: Mark, compiled: Callable[..., Any]) -> None:
        self.compiled = compiled
        self._mark = mark

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            torch._dynamo.skip_frame("group_offload offloads activations: use block.compile(), or drop fullgraph=True")
        _unwatched(self._mark.session.enter, self._mark.name)
        return self.compiled(*args, **kwargs)


def _put(module: nn.Module, around: Around | None, call: Callable[..., Any] | None) -> None:
    if around is None:
        module._compiled_call_impl = call
    else:
        around.compiled = call


class RootHooks(_NotCopied):
    """The hooks of a root and its groups, from `apply` to `remove`."""

    def __init__(self, root: nn.Module, groups: Mapping[str, nn.Module], session: Session) -> None:
        self.session = session
        self._root = root
        self._handles = [
            root.register_forward_pre_hook(_enter_root),
            root.register_forward_hook(_leave_root, always_call=True),
        ]
        root.__dict__[ROOT] = self
        self._marks = [Mark(session, name, module) for name, module in groups.items()]

    def place_marks(self) -> None:
        for mark in self._marks:
            mark.place()

    def remove(self) -> None:
        for mark in self._marks:
            mark.remove()
        for handle in self._handles:
            handle.remove()
        self._root.__dict__.pop(ROOT, None)


def _enter_root(module: nn.Module, args: Any) -> None:
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.skip_frame("group_offload offloads activations: use block.compile(), or drop fullgraph=True")
        return
    hooks: RootHooks | None = module.__dict__.get(ROOT)
    if hooks is not None:
        _unwatched(hooks.place_marks)
        _unwatched(hooks.session.begin, module)


def _leave_root(module: nn.Module, args: Any, output: Any) -> None:
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.skip_frame("group_offload offloads activations: use block.compile(), or drop fullgraph=True")
        return
    hooks: RootHooks | None = module.__dict__.get(ROOT)
    if hooks is not None:
        _unwatched(hooks.session.end)


def _enter_group(module: nn.Module, args: Any) -> None:
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.skip_frame("group_offload offloads activations: use block.compile(), or drop fullgraph=True")
        return
    mark: Mark | None = module.__dict__.get(GROUP)
    if mark is not None:
        _unwatched(mark.session.enter, mark.name)


def _unwatched(call: Callable[..., object], *args: Any) -> None:
    """Call without a compiler that looks into it, or a selective checkpoint. See [Note: Selective checkpoints]."""
    compiler = set_eval_frame(None)
    modes = selective.hide()
    try:
        call(*args)
    finally:
        selective.show(modes)
        set_eval_frame(compiler)
