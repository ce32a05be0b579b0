"""Where the engine steps in: around the calls of the modules that need a group.

[Note: Gates and torch.compile]
A gate is put where `Module.__call__` looks for a compiled call (`_compiled_call_impl`). So it lies around everything:
the module's other hooks, its compiled code if it has any, and exceptions of every kind, Ctrl-C included. A graph that a
module compiles for itself (`block.compile()`) never contains its gate, which is why `fullgraph=True` holds and equal
blocks share their code.

A graph of something larger (`torch.compile(model)`) must not swallow a gate: nothing can be onloaded inside a graph.
Dynamo inlines `__call__`, gate included, if the module has forward hooks, and looks past it otherwise. So each module
with a gate also has a forward pre-hook, and whichever of the two is traced first gives the whole frame back to Python
(`torch._dynamo.skip_frame`). The frames below, the blocks' own forwards, are then compiled one by one, and shared.

`torch.compiler.is_compiling` is true in all threads while one of them compiles: another one's forward must not go past its
gates meanwhile. So dynamo is asked about itself (`is_dynamo_compiling` is a constant in what it traces, and false in what
runs). An export (`torch.export`) runs Python, with fake tensors, which no gate can bring anything for.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import record_function

from ..base import selective
from ..base.compiled import Around
from ..base.saved import hooks_in_force, pop_hooks
from ..base.torch_internals import (
    COMPILED_CALL,
    TorchDispatchMode,
    detect_fake_mode,
    is_profiler_enabled,
    not_compiled,
    set_eval_frame,
)
from .calls import Call

if TYPE_CHECKING:
    from .engine import Engine
    from .groups.group import Group

HANDLE = "_group_offload_handle"
"""The attribute of an offloaded module that leads to its handle."""


class Gate(Around):
    """Stands around one module's call: onloads the groups that it needs before, lets go of them after."""

    def __init__(self, engine: Engine, module: nn.Module, *, is_root: bool) -> None:
        self.module = module
        self.is_root = is_root
        self.groups: tuple[Group, ...] = ()
        """What the call needs; what is needed longest comes first."""
        self._engine = engine
        self.compiled = module.__dict__.get(COMPILED_CALL)
        self.was_bypassed = False
        """A call is in progress that went past the gate: a forward hook will end it."""
        self._bypassing: Call | None = None
        """That call."""
        self._pushed: saved_tensors_hooks | None = None
        """In such a call."""

    def install(self) -> None:
        module = self.module
        if isinstance(module, torch.jit.ScriptModule):
            pass  # it takes no hooks, and no compiler looks into it
        elif self.compiled is not None and not self.is_root:
            module.register_forward_pre_hook(_allow_trace)
        else:
            module.register_forward_pre_hook(_refuse_trace, with_kwargs=True)
        if self.is_root and not isinstance(module, torch.jit.ScriptModule):
            module.register_forward_hook(_leave_bypassed, always_call=True)
        module.__dict__[COMPILED_CALL] = self  # what a traced module is asked to set, it sets elsewhere

    def uninstall(self) -> None:
        """Take away what `install` has put there, however far it came. Repeated calls do nothing."""
        module = self.module
        for hooks, flags in (
            (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
            (module._forward_hooks, module._forward_hooks_always_called),
        ):
            # They are known by their functions: an interrupt may come before anybody could note their handles.
            for key in [key for key, hook in hooks.items() if any(hook is ours for ours in _OURS)]:
                del hooks[key]
                flags.pop(key, None)
        if module.__dict__.get(COMPILED_CALL) is self:
            if self.compiled is None:
                del module.__dict__[COMPILED_CALL]
            else:
                module.__dict__[COMPILED_CALL] = self.compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or (torch.compiler.is_compiling() and _has_fake_tensors()):
            torch._dynamo.skip_frame("group_offload onloads weights between the calls in this frame")
            return self.module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        # Whatever compiler watches this thread has no business in the engine's own Python, and no selective checkpoint.
        engine = self._engine
        compiler = set_eval_frame(None)
        modes = selective.hide()
        try:
            if engine.runs_elsewhere:
                engine.wait_for_turn(self.module)
            with engine.lock:  # and not by acquire() and release(): Ctrl-C may come between the two
                if not engine.is_removed:
                    try:
                        return self._run(compiler, modes, args, kwargs)
                    finally:
                        engine.settle(self.module)
        finally:
            selective.show(modes)
            set_eval_frame(compiler)
        # It waited for its turn, and the module is itself again.
        is_left = self.module.__dict__.get(COMPILED_CALL) is self
        return (self.compiled or self.module._call_impl)(*args, **kwargs) if is_left else self.module(*args, **kwargs)

    def _run(self, compiler: Any, modes: Sequence[TorchDispatchMode], args: Any, kwargs: Any) -> Any:
        engine = self._engine
        this = Call(self.module, sys._getframe())
        try:
            if self.was_bypassed:  # by this thread, and then interrupted
                self.leave_bypassed()
            engine.backward.come_in(self.groups)
            engine.begin_call(this, args, kwargs)
            args, kwargs = self._inputs(args, kwargs)
            call: Callable[..., Any] = self.module._call_impl if self.compiled is None else self.compiled
            if self.groups and is_profiler_enabled():
                call = partial(_call_in_range, call, self.groups[-1].group_id)
            with engine.backward.hooks() or nullcontext():
                selective.show(modes)
                set_eval_frame(compiler)
                try:
                    output = call(*args, **kwargs)
                finally:
                    set_eval_frame(None)
                    selective.hide()
            output = engine.own(output, self) if self.groups else output
            this.is_complete = True
            return output
        except torch.OutOfMemoryError as error:
            if engine.has_budget and not engine.is_inside_a_call:
                raise engine.too_little(error) from error
            raise
        finally:
            engine.end_call(this)

    def _inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return self._engine.move_inputs(args, kwargs)

    def __bool__(self) -> bool:
        """Whether the module is compiled: that is what others (peft) look for where the gate is."""
        return bool(self.compiled)

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()

    def enter_bypassed(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Step in from inside a call that went past the gate: the root was compiled (`model.compile()`) after applying.

        Args:
            module: the root, or a shallow copy of it, which shares its hooks and its weights.
        """
        if torch.compiler.is_dynamo_compiling():
            torch._dynamo.skip_frame("group_offload onloads weights here")
        compiler = set_eval_frame(None)
        modes = selective.hide()
        try:
            if module is self.module:
                self.compiled = module.__dict__.get(COMPILED_CALL)
                module._compiled_call_impl = self  # from the next call on the gate is around it again
            self._engine.lock.acquire()
            self._engine.backward.come_in(self.groups)
            self._bypassing = this = Call(self.module, sys._getframe(2))  # that of the call, two above a hook of it
            self.was_bypassed = True
            try:
                self._engine.begin_call(this, args, kwargs)
            finally:
                self.was_bypassed = False
                gate = self._engine.root_gate  # another one, if gates were put around all modules again
                gate.was_bypassed, gate._bypassing = True, this
            gate._pushed = self._engine.backward.hooks()
            if gate._pushed is not None:
                gate._pushed.__enter__()
            return self._engine.move_inputs(args, kwargs)
        finally:
            selective.show(modes)
            set_eval_frame(compiler)

    def leave_bypassed(self) -> None:
        if torch.compiler.is_dynamo_compiling():
            torch._dynamo.skip_frame("group_offload offloads weights here")
        compiler = set_eval_frame(None)
        modes = selective.hide()
        try:
            self.was_bypassed = False
            try:
                if self._pushed is not None:
                    pop_hooks(self._pushed)
                    self._pushed = None
                if self._bypassing is not None:
                    self._bypassing.is_complete = True
                    self._engine.end_call(self._bypassing)
            finally:
                self._engine.lock.release()
        finally:
            selective.show(modes)
            set_eval_frame(compiler)


class InnerGate(Gate):
    """Stands around the call of a module inside of a group's: what a checkpoint in between repeats begins here.

    In a forward the group is held by the gate around, and a call that is in none is a pass of its own. It is not in the way
    of a compiler, which never looks at it.
    """

    def install(self) -> None:
        self.module.__dict__[COMPILED_CALL] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.module._call_impl
        if torch.compiler.is_dynamo_compiling() or (torch.compiler.is_compiling() and _has_fake_tensors()):
            return call(*args, **kwargs)  # type: ignore[no-untyped-call]
        engine = self._engine
        if engine.records_graphs and torch.is_grad_enabled():
            is_inside = engine.backward.is_ours(hooks_in_force())
        else:
            is_inside = engine.runs_here
        if is_inside and all(group.is_ready for group in self.groups):
            return call(*args, **kwargs)  # type: ignore[no-untyped-call]
        return super().__call__(*args, **kwargs)

    def _inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return (args, kwargs) if self._engine.is_inside_a_call else super()._inputs(args, kwargs)


@not_compiled
def _has_fake_tensors() -> bool:
    """Whether this thread runs to be exported.

    It is asked in place, behind the compiler's two flags: a function for all three would be compiled for itself, and always
    say yes.
    """
    return detect_fake_mode() is not None


def _call_in_range(call: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
    with record_function(f"group_offload.compute {name}"):
        return call(*args, **kwargs)


# Whoever makes a module of another one may copy its hooks, and call them otherwise: there they do nothing.


def _allow_trace(module: nn.Module, *args: Any) -> None:
    """On a module that is compiled as one. It does nothing: that it exists makes dynamo look at the gate."""


def _refuse_trace(module: nn.Module, args: Any, kwargs: Any = None) -> tuple[Any, Any] | None:
    if torch.compiler.is_dynamo_compiling() or (torch.compiler.is_compiling() and _has_fake_tensors()):
        if module.__dict__.get(HANDLE) is None and module.__dict__.get(COMPILED_CALL) is None:
            return None
        torch._dynamo.skip_frame("group_offload onloads weights between the calls in this frame")
        return None
    handle = module.__dict__.get(HANDLE)
    if handle is None or isinstance(module.__dict__.get(COMPILED_CALL), Gate):
        return None
    gate: Gate = handle.root_gate
    return gate.enter_bypassed(module, args, kwargs)


def _leave_bypassed(module: nn.Module, *args: Any) -> None:
    if torch.compiler.is_dynamo_compiling() or (torch.compiler.is_compiling() and _has_fake_tensors()):
        if module.__dict__.get(HANDLE) is None:
            return
        torch._dynamo.skip_frame("group_offload offloads weights here")
        return
    handle = module.__dict__.get(HANDLE)
    if handle is not None and handle.root_gate.was_bypassed:
        handle.root_gate.leave_bypassed()


_OURS = (_allow_trace, _refuse_trace, _leave_bypassed)


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor], *, enters_dataclasses: bool = False) -> Any:
    """`value` with other tensors in it, in lists, tuples and mappings too; the same object if all stay the same.

    Args:
        enters_dataclasses: in these as well. (Of inputs no copies are made: a forward may keep its state in one.)
    """
    if isinstance(value, torch.Tensor):
        return change(value)

    def mapped(item: Any) -> Any:
        return map_tensors(item, change, enters_dataclasses=enters_dataclasses)

    if isinstance(value, (list, tuple)):
        items = [mapped(item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        entries = {key: mapped(item) for key, item in value.items()}
        changed = {key: new for key, new in entries.items() if new is not value[key]}
        if not changed:
            return value
        if not isinstance(value, MutableMapping):
            return type(value)(entries)  # type: ignore[call-arg]
        mapping = copy.copy(value)  # outputs of models are made from their fields, not from a mapping
        for key, new in changed.items():
            mapping[key] = new
        return mapping
    if enters_dataclasses and dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        changed = {name: new for name, item in fields.items() if (new := mapped(item)) is not item}
        if not changed:
            return value
        other = copy.copy(value)
        for name, new in changed.items():
            object.__setattr__(other, name, new)  # a frozen one as well
        return other
    return value
