"""How most tests offload a module on the CPU, call it, and compare it with its resident twin."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from group_offload import OffloadHandle, apply_group_offloading
from group_offload.api import handle_of

from .asserts import assert_at_rest, assert_same, plain_tensors
from .models import Model, make

TIERS = ("ram", "disk")
LEVELS = ("block_level", "leaf_level")

Offload = Callable[..., OffloadHandle]


def offload_to(folder: Path | None, module: nn.Module, level: str = "block_level", **options: Any) -> OffloadHandle:
    """Offload `module` on the CPU: in RAM, or in `folder`."""
    return apply_group_offloading(module, "cpu", offload_type=level, offload_to_disk_path=folder, **options)


_KEEPING = {
    getattr(torch.ops.aten, name)
    for name in ("copy_", "_to_copy", "clone", "equal", "_has_compatible_shallow_copy_type")
}
"""What the engine itself does with offloaded weights."""


class OnloadedOnly(TorchDispatchMode):
    """Fails when a kernel reads a weight where it rests.

    On the CPU such a read would give the right value; on an accelerator it would be a crash or a wrong result. Weights in RAM
    are used in place on the CPU: only those in files are watched there.
    """

    supports_higher_order_operators = True  # flex attention

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._handle = handle_of(module)
        tensors = [(name, tensor) for name, tensor in plain_tensors(module) if tensor.numel()]
        self._at_rest = {tensor.untyped_storage().data_ptr(): name for name, tensor in tensors}
        self._held = [tensor.untyped_storage() for _, tensor in tensors]  # so that no address is used again

    def _is_in_place(self, address: int) -> bool:
        """Asked where a weight is read: the pass may have cut the module into other groups."""
        groups = () if self._handle is None else self._handle._live.groups
        views = (view for group in groups if group.is_in_place for part in group.parts for view in part.blob.rest)
        return any(view.untyped_storage().data_ptr() == address for view in views)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns if isinstance(func, torch._ops.OpOverload) else ()
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if not is_view and getattr(func, "overloadpacket", None) not in _KEEPING:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, torch.Tensor) and not is_traceable_wrapper_subclass(value) and value.numel():
                    address = value.untyped_storage().data_ptr()
                    name = self._at_rest.get(address)
                    assert name is None or self._is_in_place(address), f"{func} reads {name} where it rests"
        return func(*args, **(kwargs or {}))


def run_onloaded(module: nn.Module, *args: Any, call: nn.Module | None = None, **kwargs: Any) -> Any:
    """Call `module` (or a part of it), making sure that only onloaded weights are computed with."""
    with torch.no_grad(), OnloadedOnly(module):
        return (call or module)(*args, **kwargs)


def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        return module(*args, **kwargs)


def gradient_of_input(call: Callable[..., Any], x: torch.Tensor, *, is_checkpointing: bool = False) -> torch.Tensor:
    """What backward leaves in the input of a module or a method."""
    x = x.clone().requires_grad_()
    output = checkpoint(call, x, use_reentrant=False) if is_checkpointing else call(x)
    output.square().sum().backward()
    assert x.grad is not None
    return x.grad


def check(model: nn.Module, reference: nn.Module, *args: Any, passes: int = 3, **kwargs: Any) -> None:
    """Several passes of both give the same bits, and afterwards `model` is offloaded with the weights of `reference`."""
    for _ in range(passes):
        # Each gets inputs of its own: a forward may write to them.
        expected = run(reference, *copy.deepcopy(args), **copy.deepcopy(kwargs))
        assert_same(run_onloaded(model, *copy.deepcopy(args), **copy.deepcopy(kwargs)), expected)
        assert_at_rest(model, reference)


def pair(model: nn.Module | type[nn.Module] = Model, *args: Any, seed: int = 0) -> tuple[nn.Module, nn.Module]:
    """A model, made if a class is given, and its resident twin."""
    made = make(model, *args, seed=seed) if isinstance(model, type) else model
    return made, copy.deepcopy(made)
