"""What it means for tensors, outputs and modules to be right: the same bits, in memory of their own once they are offloaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def plain_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters and buffers, tensor subclasses taken apart, and what libraries keep as attributes of them."""

    def take_apart(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if is_traceable_wrapper_subclass(tensor):
            for part in tensor.__tensor_flatten__()[0]:
                yield from take_apart(f"{name}.{part}", getattr(tensor, part))
        elif isinstance(tensor, torch.Tensor):  # a DTensor has a mesh as well
            yield name, tensor

    def beside(name: str, holder: object) -> Iterator[tuple[str, torch.Tensor]]:
        for key, value in getattr(holder, "__dict__", {}).items():
            if isinstance(value, torch.Tensor):
                yield f"{name}.{key}", value
            elif not isinstance(value, (nn.Module, type)):
                yield from beside(f"{name}.{key}", value)

    for name, tensor in named_tensors(module):
        yield from take_apart(name, tensor)
        if not is_traceable_wrapper_subclass(tensor):
            yield from beside(name, tensor)
        if isinstance(module, torch.jit.ScriptModule):
            continue
        state = module.get_submodule(name.rpartition(".")[0]).__dict__.get("state")  # of bitsandbytes' int8
        yield from ((f"{name}.state.{key}", value) for key, value in beside("", state) if key in (".CB", ".SCB"))


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal dtype, shape and bits: also for dtypes without `torch.equal`, and for NaN."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    left, right = (t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1) for t in (left, right))
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8)) if left.numel() else True


def assert_same(actual: Any, expected: Any) -> None:
    """Bitwise equality of outputs."""
    left, right = tree_leaves(actual), tree_leaves(expected)
    assert len(left) == len(right)
    for a, e in zip(left, right, strict=True):
        assert same_bits(a, e) if isinstance(e, torch.Tensor) else a == e


def assert_at_rest(module: nn.Module, reference: nn.Module) -> None:
    """Every weight is on the CPU and reads the value that it has in `reference`."""
    expected = dict(plain_tensors(reference))
    actual = dict(plain_tensors(module))
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert tensor.device.type == "cpu", name
        assert same_bits(tensor, expected[name]), name


def assert_own_memory(module: nn.Module) -> None:
    """No tensor's storage is larger than the tensor, so that whoever saves it saves no more."""
    for name, tensor in plain_tensors(module):
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), name


_HOOK_TABLES = [name for name in vars(nn.Module()) if "hooks" in name or "_with_kwargs" in name or "always" in name]


def snapshot(model: nn.Module) -> dict[str, Any]:
    """What offloading leaves as it was: modules, their classes and attributes, hooks, and which tensors are where."""
    return {
        name: (
            module,
            type(module),
            list(module.__dict__),
            module.__dict__.get("forward"),
            {table: dict(module.__dict__[table]) for table in _HOOK_TABLES},
            [
                (key, value is None or (id(value), value.device))
                for key, value in (*module._parameters.items(), *module._buffers.items())
            ],
        )
        for name, module in model.named_modules()
    }
