"""Memory that torch itself never frees, so that nobody looks for the cause here."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch


class Packed:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_torch_keeps_a_graph_whose_unpack_hook_raised() -> None:
    """Without this package. Once torch frees it, `tests/interrupts.py` can count that memory again."""
    alive: weakref.WeakSet[Packed] = weakref.WeakSet()

    def pack(tensor: torch.Tensor) -> Packed:
        packed = Packed(tensor)
        alive.add(packed)
        return packed

    def unpack(packed: Packed) -> torch.Tensor:
        raise KeyboardInterrupt

    x, weight = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
    with pytest.raises(KeyboardInterrupt), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        (x @ weight).relu().sum().backward()
    gc.collect()
    assert alive
