"""The private names of torch that the package uses: which of them this torch has."""

from __future__ import annotations

import re
import sys
import weakref
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from group_offload.base import torch_internals
from group_offload.runtime.groups.part import Forms

from ..support.processes import run_code
from ..support.several import world_of_one

LATER = [
    "torch._dynamo.skip_frame",
    "torch.cuda.memory._set_allocator_settings",
    "torch.cuda.memory._snapshot",
    "torch.distributed._composable_state._module_state_mapping",
    "torch.distributed.distributed_c10d._get_default_store",
]
"""Those that are looked for once they are needed; the package does not import without the others."""


@pytest.mark.parametrize("name", LATER)
def test_torch_has_the_name(name: str) -> None:
    """If this fails, a release of torch has moved it: see the reason beside it for what has to take its place."""
    assert resolve_name(name) is not None


def test_torch_tells_where_fsdp2_exchanges_parameters() -> None:
    """Tied ones too, whether they are shared out or gathered; and of a state of older releases, which has one group at most."""
    with world_of_one():
        mesh = init_device_mesh("cpu", (1,))
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        model[0].bias.requires_grad_(requires_grad=False)
        found: Any = fully_shard(model, mesh=mesh, ignored_params={*model[2].parameters()})
        expected = {(model[0], "weight", True), (model[0], "bias", False), (model[1], "weight", True)}
        for exchange, is_shared_out in ((found.reshard, True), (found.unshard, False)):
            exchange()
            assert isinstance(model[0].weight, DTensor) == is_shared_out
            assert {place for place in torch_internals.places_of_fsdp() if place[0] in {*model}} == expected
        states = sys.modules["torch.distributed._composable_state"]._module_state_mapping
        state = states[model]()

        class OldState:
            _fsdp_param_group = (
                state._fsdp_param_groups[0] if hasattr(state, "_fsdp_param_groups") else state._fsdp_param_group
            )

        old = OldState()
        states[model] = weakref.ref(old)
        assert {place for place in torch_internals.places_of_fsdp() if place[0] in {*model}} == expected


def test_torch_has_guards_that_tell_forms() -> None:
    """If not, all works, slower. Then this tells."""
    tensors = [nn.Parameter(torch.randn(6, 6)), torch.empty(0, 3), torch.randn(3, 4).bfloat16(), torch.tensor(1)]
    seen = Forms(tensors)
    for _ in range(2):
        tensors[0].requires_grad_(not tensors[0].requires_grad)
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                assert seen.are_of(tensors)
    assert seen._guards is not None
    for tensor, change in zip(tensors, ("t", "t", "half", "int"), strict=True):
        before, tensor.data = tensor.data, getattr(tensor.data, change)()
        assert not seen.are_of(tensors) and not seen.are_of(tensors)
        tensor.data = before
    assert Forms([]).are_of([])


def test_a_torch_without_one_of_them_is_refused_by_name() -> None:
    code = """
        import torch
        del torch._C._storage_Use_Count
        try:
            import group_offload
        except ImportError as error:
            print(error)
    """
    said = run_code(code).stdout
    assert f"torch {torch.__version__} " in said and "_storage_Use_Count" in said and "torch 2.8" in said


@pytest.mark.parametrize("version", ["2.7.1+cu126", "1.13.0", "2.0"])
def test_a_torch_that_is_too_old_is_refused(version: str) -> None:
    with pytest.raises(ImportError, match=rf"torch {re.escape(version)} is too old.*pip install 'torch>=2.8'"):
        torch_internals.check_version(version)
