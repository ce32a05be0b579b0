"""LoRAs over an offloaded model on a real accelerator: hot swaps of compiled blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from group_offload import apply_group_offloading

from ..support import tiny_models as tiny

pytestmark = pytest.mark.gpu


def lora(seed: int, rank: int, alpha: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, layer in tiny.flux_transformer().named_modules():
        if isinstance(layer, nn.Linear) and name.endswith(("attn.to_q", "attn.to_k", "proj_mlp")):
            state[f"transformer.{name}.lora_A.weight"] = torch.randn(rank, layer.in_features, generator=generator) * 0.2
            state[f"transformer.{name}.lora_B.weight"] = (
                torch.randn(layer.out_features, rank, generator=generator) * 0.2
            )
            state[f"transformer.{name}.alpha"] = torch.tensor(alpha)
    return state


@pytest.mark.filterwarnings("ignore:TensorFloat32")  # torch's compiler has a wish
@pytest.mark.parametrize("how", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("tier", ["ram", "files"])
def test_hot_swaps(how: str, tier: str, device: torch.device, tmp_path: Path) -> None:
    """The bits of the resident model with the same swaps, no recompilation, and no more pinned memory or slots."""
    torch._dynamo.reset()
    counters.clear()
    resident, pipe = (tiny.flux_pipeline() for _ in range(2))
    resident.transformer.to(device)
    options: dict[str, Any] = {} if tier == "ram" else {"offload_to_disk_path": tmp_path}
    handle = apply_group_offloading(pipe.transformer, device, **options)
    for each in (resident, pipe):
        each.enable_lora_hotswap(target_rank=8)
        each.load_lora_weights(lora(0, 4, 4.0), adapter_name="one")
        if how != "eager":
            each.transformer.compile_repeated_blocks(fullgraph=True, backend=how)

    def check() -> None:
        output, expected = (tiny.call(each.transformer, tiny.flux_inputs()) for each in (pipe, resident))
        if how == "inductor":  # which chooses kernels for each model by how long they take
            torch.testing.assert_close(output, expected)
        else:
            assert torch.equal(output, expected)

    check()
    before = handle.stats()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(1, 21):
            rank = [2, 4, 8][seed % 3]
            for each in (resident, pipe):  # scales that every dtype has exactly
                each.load_lora_weights(lora(seed, rank, rank * [0.5, 1.0][seed % 2]), adapter_name="one", hotswap=True)
            check()
    after = handle.stats()
    for name in ("pinned_bytes", "host_bytes", "rebuilds"):
        assert getattr(after, name) == getattr(before, name), name
    assert not counters["graph_break"]
