"""Where the engine steps in: around the calls of the modules that need a group.

[Note: Gates and torch.compile]
A gate is put where `Module.__call__` looks for a compiled call (`_compiled_call_impl`). So the gate encloses everything:
the module's other hooks, its compiled code if it has any, and exceptions of every kind, Ctrl-C included. A graph that a
module compiles for itself (`block.compile()`) never contains its gate, which is why `fullgraph=True` holds and equal
blocks share their code.

A graph of something larger (`torch.compile(model)`) must not swallow a gate: nothing can be onloaded inside a graph.
Dynamo inlines `__call__`, gate included, if the module has forward hooks, and looks past it otherwise. So each module
with a gate also has a forward pre-hook, and whichever of the two is traced first gives the whole frame back to Python
(`torch._dynamo.skip_frame`). The frames below, the blocks' own forwards, are then compiled one by one, and shared.

`torch.compiler.is_compiling` is true in all threads while one of them compiles, but the forward of another thread must not
skip its gates meanwhile. So gates test `is_dynamo_compiling`, which is a constant in code that dynamo traces, and false in
code that runs. An export (`torch.export`) runs Python with fake tensors, for which no gate can onload a weight.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from ..base import selective
from ..base.compiled import HANDLE, Around, allow_trace, has_fake_tensors, innermost, is_compiled, is_ours, refuse_trace
from ..base.patching import around_once
from ..base.saved import hooks_in_force
from ..base.tensors import map_tensors
from ..base.torch_internals import (
    COMPILED_CALL,
    TorchDispatchMode,
    has_global_hooks,
    is_profiler_enabled,
    num_autograd_nodes,
    set_eval_frame,
    tracing_state,
)
from ..base.weak import Weak
from ..config import OffloadConfig
from ..partition import NEVER_CALLED, Method, holds_tensors
from .backward import Backward
from .cache_hooks import own_forward, preceded
from .embedding_lookup import GatheredRows
from .groups.group import Group
from .interleave.contract import DENOISERS
from .interleave.passes import InterleavedPasses
from .interleave.policy import InterleavePolicy
from .passes import Call, Entry, Passes
from .repeat import Repeater

logger = logging.getLogger("group_offload")


class Gate(Around, Entry):
    """Encloses one module's call: onloads the groups that the call needs before it, and releases them after it."""

    is_inner = False
    """Whether the gate is one inside of a group's module."""
    name = COMPILED_CALL
    """The attribute of the module in which the gate stands, in place of what was there (`compiled`)."""

    def __init__(self, gates: Gates, entry: nn.Module | Method) -> None:
        self.module = module = entry.module if isinstance(entry, Method) else entry
        self.is_root = entry is gates.root
        self._owner: Callable[[], Gates | None] = weakref.ref(gates)
        self.compiled = module.__dict__.get(self.name)

    def install(self) -> None:
        module = self.module
        if not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks, and no compiler looks into it
            is_compiled_alone = self.compiled is not None and not self.is_root
            module.register_forward_pre_hook(allow_trace if is_compiled_alone else refuse_trace)
        module.__dict__[COMPILED_CALL] = self  # `setattr` on a traced module would store it elsewhere

    @property
    def is_installed(self) -> bool:
        return self.module.__dict__.get(self.name) is self

    def open_for(self, groups: Iterable[Group], passes: Passes) -> None:
        """Take over the groups that a call needs. The group that is needed longest comes first."""
        # What was known of the module keeps weights that were replaced.
        self.repeater = Repeater(self.module, passes)
        groups = sorted(groups, key=lambda group: -group.nesting)
        self.groups = tuple(group for group in groups if not group.is_table)
        self.tables = tuple(group for group in groups if group.is_table)
        """The table of an embedding whose rows are looked up on the CPU."""
        self.only = groups[0] if len(self.groups) == len(groups) == 1 and not (self.is_root or self.is_inner) else None
        """The group that the call needs, if it needs nothing else."""

    def uninstall(self) -> None:
        """Undo `install`, also one that was interrupted. Repeated calls do nothing."""
        module = Gate.module.of(self)
        if module is None:
            return
        # Our hooks are known by their functions: an interrupt may come before their handles could be stored.
        for key in [key for key, hook in module._forward_pre_hooks.items() if is_ours(hook) and not self.is_inner]:
            del module._forward_pre_hooks[key]
        if self.is_installed:
            if self.compiled is None:
                del module.__dict__[self.name]
            else:
                module.__dict__[self.name] = self.compiled
        self.groups = self.tables = ()  # a call in progress needs none of them any more

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or (torch.compiler.is_compiling() and has_fake_tensors()):
            torch._dynamo.skip_frame("group_offload onloads weights between the calls in this frame")
            return self.module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        # Compilers and selective checkpoints that watch this thread must not see the engine's own Python.
        gates = self._owner()  # it stays for the length of the call
        if gates is not None:
            passes, module = gates.passes, self.module
            compiler = set_eval_frame(None)
            modes = selective.hide()
            try:
                group = passes.lingering
                if group is not None and group is self.only and not (compiler or modes) and passes.can_use_again(group):
                    args, kwargs = gates.move_inputs(args, kwargs)
                    return passes.use_again(module.forward if self._is_plain(module) else self._enclosed, args, kwargs)
                passes.wait_for_turn(module)
                with passes.lock:  # not acquire() and try: Ctrl-C may come between the two
                    if not passes.is_removed:
                        try:
                            return self._run(gates, module, compiler, modes, args, kwargs)
                        finally:
                            passes.end_interrupted_call(module)
            finally:
                if modes:
                    selective.show(modes)
                set_eval_frame(compiler)
        # The module was given back while this call waited for its turn, or before.
        call = self._enclosed if self.is_installed or self.method is not None else self.module
        return call(*args, **kwargs)

    @property
    def _enclosed(self) -> Callable[..., Any]:
        """What the gate stands around."""
        return self.module._call_impl if self.compiled is None else self.compiled

    def _run(
        self, gates: Gates, module: nn.Module, compiler: Any, modes: Sequence[TorchDispatchMode], args: Any, kwargs: Any
    ) -> Any:
        backward, passes = gates.backward, gates.passes
        this = Call(self, sys._getframe())
        try:
            own = None if compiler or modes or torch.is_grad_enabled() else self._own_forward()
            this.is_deferred = own is not None
            backward.begin_call(self.groups)
            passes.begin_call(this, args, kwargs)
            if gates.records_graphs:
                backward.keep_root()
            if not (self.is_inner and passes.is_inside_a_call):
                args, kwargs = gates.move_inputs(args, kwargs)
            call = module.forward if compiler is None and self._is_plain(module) else self._enclosed
            first = num_autograd_nodes()
            for table in self.tables:
                table.check()
            if self.tables:
                # Compiled code has the table in its place, so torch's own Python calls the module.
                compiler, call = None, GatheredRows(module, gates.backend).call
            elif self.groups and is_profiler_enabled():
                call = record_function(f"group_offload.compute {self.groups[-1].group_id}")(call)
            late = _NOTHING if own is None else preceded(own, partial(passes.acquire_late, this))
            with backward.hooks() or _NOTHING, late:
                output = self.repeater.call(call, args, kwargs, compiler, modes)
            if torch.is_grad_enabled():
                backward.check_graph(output)
                backward.keep_contexts(output, self.groups, first)
            output = gates.detach_from_slots(output, self.groups) if self.groups else output
            this.is_complete = True
            return output
        except torch.OutOfMemoryError as error:
            if passes.placer.has_budget and not passes.is_inside_a_call:
                raise passes.placer.too_little(error) from error
            raise
        finally:
            passes.end_call(this)

    def _is_plain(self, module: nn.Module) -> bool:
        """Whether torch would call `forward` and do nothing else, beside our hook: it takes long to find that out."""
        return (
            self.compiled is None
            and self.method is None
            and [*module._forward_pre_hooks.values()] == [refuse_trace]
            and not (
                module._forward_hooks or module._backward_hooks or module._backward_pre_hooks or has_global_hooks()
            )
            and getattr(module._call_impl, "__func__", None) is _CALL_IMPL
            and tracing_state() is None
        )

    def _own_forward(self) -> Any:
        """Where to onload the groups if hooks of diffusers may skip the module. Users' hooks may need the weights at once."""
        module = self.module
        if "_diffusers_hook" not in module.__dict__ or self.method is not None or self.compiled or not self.groups:
            return None
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        return own_forward(module) if all(map(is_ours, hooks)) else None

    def __bool__(self) -> bool:
        """Whether the module is compiled: other libraries (peft) test the attribute that holds the gate for that."""
        return bool(self.compiled)


class InterleavedGate(Gate):
    """Encloses the root's call where forwards may share passes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        gates = self._owner()
        is_traced = torch.compiler.is_dynamo_compiling() or (torch.compiler.is_compiling() and has_fake_tensors())
        if gates is None or gates.sharing is None or is_traced:
            return super().__call__(*args, **kwargs)
        why_not = None
        if gates.records_graphs:
            why_not = "it has recorded a graph"
        elif self.compiled is not None:
            why_not = "it is compiled as a whole: compile its blocks instead"
        return gates.sharing.call(args, kwargs, why_not)


class InnerGate(Gate):
    """Encloses the call of a module inside a group's module: a checkpoint between the two repeats only this call.

    In a forward the outer gate holds the group, and this gate does nothing. A call outside of any pass is a pass itself.
    Compilers never look at this gate.
    """

    is_inner = True

    def install(self) -> None:
        self.module.__dict__[self.name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._enclosed
        if torch.compiler.is_dynamo_compiling() or (torch.compiler.is_compiling() and has_fake_tensors()):
            return call(*args, **kwargs)
        gates = self._owner()
        # A call between two others of a group must be learnt, and needs the group as long as it takes.
        if gates is not None and gates.passes.lingering not in self.groups:
            is_in_graph = gates.records_graphs and torch.is_grad_enabled()
            is_inside = gates.backward.is_ours(hooks_in_force()) if is_in_graph else gates.passes.runs_here
            # Backward holds groups whose weights are not bound.
            if is_inside and all(group.holds and group.is_bound for group in self.groups):
                if gates.records_graphs:
                    gates.backward.keep_root()
                return call(*args, **kwargs)
        return super().__call__(*args, **kwargs)


class MethodGate(InnerGate):
    """Encloses the calls of a method that computes with weights, in which nobody calls the module itself.

    The gate stands in the module's `__dict__`, where Python finds it before the class's method. A call without any tensor
    is let through, because it computes nothing: it reads stored weights, or changes them.
    """

    def __init__(self, gates: Gates, entry: Method) -> None:
        self.method, self.name = entry, entry.name
        super().__init__(gates, entry)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or (torch.compiler.is_compiling() and has_fake_tensors()):
            torch._dynamo.skip_frame("group_offload onloads weights between the calls in this frame")
            return self._enclosed(*args, **kwargs)
        values = (*args, *kwargs.values())
        lists = (value if isinstance(value, (list, tuple)) else (value,) for value in values)
        gates = self._owner()
        is_off = gates is None or gates.passes.is_removed
        if is_off or not any(isinstance(each, torch.Tensor) for each in chain(*lists)):
            return self._enclosed(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    @property
    def _enclosed(self) -> Callable[..., Any]:
        if self.compiled is not None:
            return self.compiled
        method: Callable[..., Any] = MethodType(getattr(type(self.module), self.name), self.module)
        return method

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The method, which `inspect.signature` looks at."""
        return self._enclosed

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__qualname__", "__func__", "__self__"):
            raise AttributeError(name)
        return getattr(self._enclosed, name)

    def __bool__(self) -> bool:
        return True

    # A copy of the module, which is being made, is not offloaded: its calls are let through. (The method itself would keep
    # the copy alive.)

    def __deepcopy__(self, memo: Any) -> Any:
        copied = memo.get(id(self.module))
        return None if copied is None else _let_through(copied, self.name)

    def __reduce__(self) -> tuple[Any, Any]:
        return _let_through, (self.module, self.name)


def _compile_inside(plain: Callable[..., None], module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """In place of `nn.Module.compile`: a root has what it makes inside of its gate, and not in its place."""
    gate = None if module.__dict__.get(HANDLE) is None else innermost(module)[0]
    if gate is None:
        plain(module, *args, **kwargs)
    else:  # what torch does, in one step: no other thread, and no interrupt, finds the module without its gate
        gate.compiled = torch.compile(module._call_impl, *args, **kwargs)


def _let_through(module: nn.Module, name: str) -> MethodGate:
    gate = MethodGate.__new__(MethodGate)
    gate.module, gate.name, gate.compiled, gate._owner = module, name, None, lambda: None
    return gate


_NOTHING = nullcontext()
_CALL_IMPL: Any = nn.Module._call_impl  # a debug tool may replace it


_offloaded: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Gates]] = weakref.WeakKeyDictionary()


def root_of(module: nn.Module) -> nn.Module | None:
    """The offloaded module that this one is, or is a part of."""
    reference = _offloaded.get(module)
    gates = None if reference is None else reference()
    return None if gates is None else Gates.root.of(gates)


class Gates:
    """All gates of one offloaded module, and the parts that their calls share. An engine owns it."""

    root = Weak[nn.Module]()

    def __init__(self, config: OffloadConfig, passes: Passes, backward: Backward) -> None:
        self.root = passes.root
        self.backend = config.backend
        self._non_blocking = config.non_blocking
        self._skip_inputs = frozenset(config.exclude_kwargs)
        self.passes = passes
        self.backward = backward
        self.sharing: InterleavePolicy | None = None
        """Lets forwards of the root share passes, if an option asks for that."""
        asks_plan = config.interleave_forwards == "auto"
        if isinstance(passes, InterleavedPasses):
            self.sharing = InterleavePolicy(passes, asks_plan=asks_plan)
        elif asks_plan and (config.group_prefix or "unet").startswith(DENOISERS):
            logger.info(
                "Running forwards of %s separately (interleave_forwards='auto'): only diffusers' own denoisers are known to be "
                "safe. If a forward has no side effects, pass interleave_forwards=True.",
                passes.name,
            )
        self.records_graphs = False
        """Whether a forward has recorded a graph. A checkpoint may then call modules inside of groups alone."""
        self._gates: dict[weakref.ref[nn.Module] | Method, Gate] = {}
        """The gates of modules and methods. The root's comes first."""
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        around_once(nn.Module, "compile", _compile_inside)

    def __del__(self) -> None:
        """The model is gone, and so is the engine. Parts of the model that are still there become modules as any other."""
        if "_modules" in self.__dict__:  # else an interrupt came first
            self.remove()

    @property
    def groups_of(self) -> Mapping[nn.Module, tuple[Group, ...]]:
        """For each module with a gate, the groups that its calls need."""
        found: weakref.WeakKeyDictionary[nn.Module, tuple[Group, ...]] = weakref.WeakKeyDictionary()
        for gate in self._gates.values():
            found[gate.module] = (*found.get(gate.module, ()), *gate.groups, *gate.tables)
        return found

    # ---------------------------------------------------------------- around a module

    def install(self, groups: Sequence[Group]) -> None:
        """Put gates around all modules and methods that need one, and take others away. What serves already stays.

        If this is interrupted, the next call of the root installs the gates again.
        """
        needs: dict[nn.Module | Method, list[Group]] = {self.root: []}
        for group in groups:
            for opener in group.openers:
                needs.setdefault(opener, []).append(group)
        for child in self.root.children():
            if not isinstance(child, NEVER_CALLED):
                needs.setdefault(child, [])  # calls of a part of the model (`vae.decode`) are passes too
        of_methods = [(each, found) for each, found in needs.items() if isinstance(each, Method)]
        opened = [self._opened(Gate, each, found) for each, found in needs.items() if not isinstance(each, Method)]
        if self.sharing is not None:
            self.sharing.renew(partial(Gate.__call__, opened[0]))
        for module, held in self._needs_of_inner(opened).items():
            opened.append(self._opened(InnerGate, module, held))
        called = {*_modules_inside(self.root, ()), self.root}
        for method, found in of_methods:
            # Graphs that a module compiles for itself call methods too, and contain no gate.
            if method.module in called:
                opened.append(self._opened(MethodGate, method, found))
        serving = {*opened}
        for key, gate in [*self._gates.items()]:
            if gate not in serving:
                gate.uninstall()
                del self._gates[key]
        self._leave_modules()
        self._modules.update(self.root.modules())
        _offloaded.update(dict.fromkeys(self._modules, weakref.ref(self)))

    def _opened(self, kind: type[Gate], entry: nn.Module | Method, groups: Iterable[Group]) -> Gate:
        """The gate around a module or method, made if there is none of this kind in place, and opened for `groups`."""
        if entry is self.root and self.sharing is not None:
            kind = InterleavedGate
        key = entry if isinstance(entry, Method) else weakref.ref(entry)
        gate = self._gates.get(key)
        if gate is not None and type(gate) is kind and gate.is_installed:
            gate.open_for(groups, self.passes)
            return gate
        if gate is not None:
            gate.uninstall()
        self._gates[key] = gate = kind(self, entry)
        gate.open_for(groups, self.passes)
        gate.install()
        return gate

    def _needs_of_inner(self, gates: Sequence[Gate]) -> Mapping[nn.Module, Iterable[Group]]:
        """The modules inside of groups that may be called alone, and the groups that their calls need.

        A checkpoint may repeat any module's call. Without gradients only modules outside of blocks are called alone.
        """
        needs: dict[nn.Module, dict[Group, None]] = {}
        blocks = {block for each in self.root.modules() if isinstance(each, NEVER_CALLED) for block in each.children()}
        modules = {gate.module for gate in gates}
        for gate in gates:
            groups = [group for group in gate.groups if group.num_bytes]
            if (gate.module in blocks and not self.records_graphs) or not groups:
                continue
            if gate.compiled is None or gate.is_root:
                for inside in _modules_inside(gate.module, modules):
                    if self.records_graphs or any(map(holds_tensors, inside.modules())):
                        needs.setdefault(inside, {}).update(dict.fromkeys(groups))
        return needs

    def remove(self) -> None:
        """Take all gates away. The root's gate goes last: as long as it stands, the next forward repairs the others."""
        for gate in reversed([*self._gates.values()]):
            gate.uninstall()
        self.passes.is_removed = True
        self._leave_modules()
        self._gates.clear()

    def _leave_modules(self) -> None:
        for module in self._modules:
            _offloaded.pop(module, None)
        self._modules.clear()

    # ---------------------------------------------------------------- inputs and outputs

    def move_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The inputs of a call on the onload device. Inputs that the options exclude stay where they are.

        One tensor that is given twice stays one: attention asks whether queries are the keys.
        """
        there: dict[int, torch.Tensor] = {}

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device == self.backend.device:
                return tensor
            if id(tensor) not in there:
                bring = partial(self.backend.bring, tensor, non_blocking=self._non_blocking)
                there[id(tensor)] = self._made(bring, tensor.nbytes)
            return there[id(tensor)]

        args = tuple([moved(each) if isinstance(each, torch.Tensor) else map_tensors(each, moved) for each in args])
        if kwargs:
            skipped = self._skip_inputs
            kwargs = {n: value if n in skipped else map_tensors(value, moved) for n, value in kwargs.items()}
        return args, kwargs

    def _made(self, make: Callable[[], torch.Tensor], num_bytes: int) -> torch.Tensor:
        """A tensor that takes device memory in the pass in progress: its own residents give way too."""
        memory = self.passes.memory
        return memory.arena.retried(make, num_bytes, memory)

    def detach_from_slots(self, output: Any, groups: Sequence[Group]) -> Any:
        """The output of a call that needed `groups`, with clones in place of views of slots that other groups will use."""
        spans = [
            (group.slot.memory.data_ptr() + group.offset, group.num_bytes)
            for group in groups
            if group.slot is not None and group.slot.owner is None
        ]

        def apart(tensor: torch.Tensor) -> torch.Tensor:
            is_plain = type(tensor) in (torch.Tensor, nn.Parameter)
            is_inside = is_plain and any(0 <= tensor.data_ptr() - start < num_bytes for start, num_bytes in spans)
            return self._made(tensor.clone, tensor.nbytes) if is_inside else tensor

        return map_tensors(output, apart, enters_dataclasses=True) if spans else output


def _modules_inside(top: nn.Module, gates: Container[nn.Module]) -> list[nn.Module]:
    """Modules that are called inside of `top`'s call. Modules with gates or compiled calls, and their insides, are left out."""
    found: dict[nn.Module, None] = {}
    pending = [top]
    while pending:
        module = pending.pop()
        if isinstance(module, torch.jit.ScriptModule):
            continue  # torch's own interpreter calls the modules inside
        inside = [each for each in module.children() if not (each in found or each in gates or is_compiled(each))]
        found.update(dict.fromkeys(inside))
        pending += inside
    return [module for module in found if not isinstance(module, NEVER_CALLED)]
