"""The private names of torch that this package needs, and why. No other module imports one: `name as name` is for others.

Attributes of tensors and modules are used where they are. So is `torch._dynamo.skip_frame`: it works on the frame that calls
it, with a literal. tests/units/test_torch_internals.py says which of them a release has moved.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn
from torch.profiler import record_function
from torch.utils import checkpoint

F = TypeVar("F", bound=Callable[..., Any])


def check_version(version: str) -> None:
    """
    Raises:
        ImportError: The torch is too old. In 2.7 nothing tells which saved-tensor hooks are in force.
    """
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < (2, 8):
        raise ImportError(
            f"torch {version} is too old: group_offload needs torch 2.8 or newer. pip install 'torch>=2.8'"
        )


check_version(torch.__version__)

try:
    # The compiler must not trace the engine: a gate switches it off and on again within one call. The public
    # `torch.compiler.disable` does that for whole functions only, and imports the compiler.
    from torch._C._dynamo.eval_frame import set_eval_frame as set_eval_frame

    not_compiled: Callable[[F], F] = torch._disable_dynamo  # type: ignore[assignment, attr-defined]

    # All sizes and strides of a pass in one call.
    from torch._C._dynamo.guards import TensorGuards as TensorGuards

    # Export and fake tensors: a forward with them has no weights to bring.
    from torch._guards import detect_fake_mode as detect_fake_mode

    # Selective checkpoints see each operation of the thread, ours too, unless their modes are taken off meanwhile.
    from torch.utils import _python_dispatch
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

    current_dispatch_mode: Any = _python_dispatch._get_current_dispatch_mode
    pop_mode: Any = _python_dispatch._pop_mode
    push_mode: Any = _python_dispatch._push_mode
    CACHING_MODES: Any = checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode
    dispatch_stack_length: Any = torch._C._len_torch_dispatch_stack

    # A thread that calls a model in another one's place gets the modes that are in force there.
    from torch.utils._device import DeviceContext as DeviceContext

    dispatch_modes: Any = _python_dispatch._get_current_dispatch_mode_stack
    function_modes: Any = torch.overrides._get_current_function_mode_stack
    push_function_mode: Any = torch._C._push_on_torch_function_stack
    pop_function_mode: Any = torch._C._pop_torch_function_stack

    # Hooks for all modules of the process would see forwards that share a pass in another order.
    has_global_hooks: Any = nn.modules.module._has_any_global_hook

    # While torch.jit traces, torch calls more than a module's forward.
    tracing_state: Any = torch._C._get_tracing_state

    # Whether a tensor subclass can be taken apart into plain tensors (torchao).
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass

    # Such a tensor answers for each of its attributes in Python.
    DisableTorchFunctionSubclass: Any = torch._C.DisableTorchFunctionSubclass

    # Inputs and outputs may be nested, also in classes that somebody has registered there.
    from torch.utils._pytree import tree_flatten as tree_flatten
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_unflatten as tree_unflatten

    # Saved-tensor hooks: those of others have to be found, called, and left in their order. The public context manager only
    # pushes and pops its own.
    top_saved_tensors_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks
    are_saved_tensors_hooks_enabled: Any = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]

    # Which backward runs in this thread, and which of its nodes.
    current_graph_task_id: Any = torch._C._current_graph_task_id
    current_autograd_node: Any = torch._C._current_autograd_node
    # Two tensors were saved by one operation if no node was made in between.
    num_autograd_nodes: Any = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]

    # Transforms of torch.func refuse saved-tensor hooks.
    current_transform: Any = torch._C._functorch.peek_interpreter_stack

    # A range for a profiler is made only where one runs.
    is_profiler_enabled: Any = torch._C._autograd._profiler_enabled

    # Whether somebody else keeps a view of a slot.
    storage_use_count: Any = torch._C._storage_Use_Count

    # A weight that was saved as a negative view is given back as one. `torch.neg` would compute.
    neg_view: Any = torch._neg_view

    # Weights that are opened with another dtype: what `Module.to` is called with, and whether `data` can be exchanged.
    parse_to: Any = torch._C._nn._parse_to
    has_compatible_shallow_copy_type: Any = torch._has_compatible_shallow_copy_type
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"torch {torch.__version__} does not have a private name that group_offload needs ({error}). torch 2.8 to 2.15 have "
        f"all of them: install one of these, or a newer group_offload."
    ) from error

_UNPROFILED = nullcontext()


def in_profile(what: str, *names: str) -> AbstractContextManager[object]:
    """A range of torch's profiler, if it runs: what is done, and for which groups."""
    return record_function(f"group_offload.{what} {' '.join(names)}") if is_profiler_enabled() else _UNPROFILED


_ALLOCATOR_VARIABLES = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"
_set_allocator: list[str] = []
"""The settings of the device's allocator that this package made last. Torch tells what is set, not by whom."""


def allocator_settings() -> str:
    """How torch's allocator of device memory works, as the user or `set_allocator` has said it."""
    by_user = next(filter(None, map(os.environ.get, _ALLOCATOR_VARIABLES)), "")
    get: Any = getattr(torch._C, "_accelerator_getAllocatorSettings", None)  # not in torch 2.11
    if get is not None:
        return get() or by_user
    now = torch.cuda.memory._snapshot().get("allocator_settings", {})
    return next((value for name, value in now.items() if name.endswith("ALLOC_CONF")), "") or by_user


def set_allocator(settings: str) -> None:
    """Set how torch's allocator of device memory works (`"expandable_segments:True"`), unless the user has decided on it.

    What was allocated before stays as it is. No public call sets this once torch was imported.
    """
    native = torch.cuda.is_available() and torch.cuda.get_allocator_backend() == "native"
    if not native or sys.platform != "linux" or any(map(os.environ.get, _ALLOCATOR_VARIABLES)):
        return
    given = allocator_settings()
    if given in ("", *_set_allocator[-1:]) and settings != given:
        change: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # torch 2.8 has it elsewhere
        (change or torch.cuda.memory._set_allocator_settings)(settings)
        _set_allocator.append(settings)


def watch_refusals(listener: Callable[[int, int], None]) -> None:
    """Call `listener(device_index, num_bytes)` whenever torch's CUDA allocator cannot have memory, if this torch tells.

    Operators may catch that error: cuDNN then computes a convolution in another way, with other bits, and nobody hears of it.
    What `listener` raises takes the error's place, and they do not catch that.
    """
    attach: Any = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None:
        attach(lambda device, num_bytes, total, free: listener(device, num_bytes))


def store_of_processes() -> Any:
    """Where the processes of `torch.distributed` meet: ranks find each other there, and say which one is missing."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def places_of_fsdp() -> Iterator[tuple[nn.Module, str, bool]]:
    """The places whose parameters FSDP2 exchanges around forwards and backwards: the module, the parameter's name in it, and
    whether the parameter requires gradients.

    The public API shows them only while a place holds a DTensor, and not while the gathered parameter is there.
    """
    composable: Any = sys.modules.get("torch.distributed._composable_state")
    if composable is None:
        return  # nobody has imported FSDP2
    states = (reference() for reference in [*composable._module_state_mapping.values()])
    for state in dict.fromkeys(states):
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # in older releases a state has one group at most
            group = getattr(state, "_fsdp_param_group", None)
            groups = () if group is None else (group,)
        for parameter in (each for group in groups for each in group.fsdp_params):
            info = parameter._module_info
            owners, names = (info.module, *info.shared_modules), (info.param_name, *info.shared_param_names)
            for owner, name in zip(owners, names, strict=True):
                yield owner, name, parameter.sharded_param.requires_grad


COMPILED_CALL = "_compiled_call_impl"
"""The attribute of a module where torch looks for what to call in place of its forward: there gates stand."""

TENSOR_PARALLEL = "_distribute_module_applied"
"""The attribute of a module whose weights `distribute_module` has shared out: for tensor parallelism, and not for FSDP."""
