"""What the tests of plain torch modules share: models, and what it means for an offloaded module to be right."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from group_offload import OffloadHandle, apply_group_offloading

TIERS = ("ram", "file")
LEVELS = ("block_level", "leaf_level")

WIDTH = 16


class Block(nn.Module):
    """Two linear layers and a parameter of its own."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """Embedding layers, a list of blocks, parameters of the root."""

    def __init__(self, num_blocks: int = 4, width: int = WIDTH) -> None:
        super().__init__()
        self.proj_in = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.gain = nn.Parameter(torch.rand(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.proj_in(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) * self.gain


def make(model: nn.Module | type[nn.Module] = Model, *args: Any, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return model(*args).eval()


def inputs(seed: int = 0, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (3, WIDTH)), generator=torch.Generator().manual_seed(seed))


def offload_to(folder: Path | None, module: nn.Module, level: str = "block_level", **options: Any) -> OffloadHandle:
    """Offload `module` on the CPU: in RAM, or in `folder`."""
    return apply_group_offloading(module, "cpu", offload_type=level, offload_to_disk_path=folder, **options)


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def plain_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters and buffers, tensor subclasses taken apart."""

    def take_apart(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if is_traceable_wrapper_subclass(tensor):
            for part in tensor.__tensor_flatten__()[0]:
                yield from take_apart(f"{name}.{part}", getattr(tensor, part))
        else:
            yield name, tensor

    for name, tensor in named_tensors(module):
        yield from take_apart(name, tensor)


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


_KEEPING = {
    getattr(torch.ops.aten, name)
    for name in ("copy_", "_to_copy", "clone", "equal", "_has_compatible_shallow_copy_type")
}
"""What the engine itself does with weights at rest."""


class OnloadedOnly(TorchDispatchMode):
    """Fails when a kernel reads a weight where it rests.

    On the CPU such a read would give the right value; on an accelerator it would be a crash or a wrong result.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        tensors = [(name, tensor) for name, tensor in plain_tensors(module) if tensor.numel()]
        self._at_rest = {tensor.untyped_storage().data_ptr(): name for name, tensor in tensors}
        self._held = [tensor.untyped_storage() for _, tensor in tensors]  # so that no address is used again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not is_view and func.overloadpacket not in _KEEPING:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, torch.Tensor) and not is_traceable_wrapper_subclass(value) and value.numel():
                    name = self._at_rest.get(value.untyped_storage().data_ptr())
                    assert name is None, f"{func} reads {name} where it rests"
        return func(*args, **(kwargs or {}))


def run_onloaded(module: nn.Module, *args: Any, call: nn.Module | None = None, **kwargs: Any) -> Any:
    """Call `module` (or a part of it), making sure that only onloaded weights are computed with."""
    with torch.no_grad(), OnloadedOnly(module):
        return (call or module)(*args, **kwargs)


def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        return module(*args, **kwargs)


def check(model: nn.Module, reference: nn.Module, *args: Any, passes: int = 3, **kwargs: Any) -> None:
    """Several passes of both give the same bits, and afterwards `model` is at rest with the weights of `reference`."""
    for _ in range(passes):
        # Each gets inputs of its own: a forward may write to them.
        expected = run(reference, *copy.deepcopy(args), **copy.deepcopy(kwargs))
        assert_same(run_onloaded(model, *copy.deepcopy(args), **copy.deepcopy(kwargs)), expected)
        assert_at_rest(model, reference)
