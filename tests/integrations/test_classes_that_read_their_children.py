"""Models that diffusers says cannot be group-offloaded, Mamba, and others: modules that read or call parts of others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import MambaConfig, MambaModel

from group_offload import apply_group_offloading

from ..matrix.arms import run_on_cpu
from ..matrix.case import Case
from ..matrix.cases import CASES
from ..support.rigs import LEVELS

NAMES = (
    "VQModel",
    "DiTTransformer2DModel",
    "HunyuanDiT2DModel",
    "AutoencoderSAME",  # the others have methods that compute with weights of modules that nobody calls
    "ConsistencyDecoderVAE",
    "MMAudioVAE",
)


def mamba() -> nn.Module:
    return MambaModel(MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=32, state_size=4))


MAMBA = Case("MambaModel", {}, lambda: {"input_ids": torch.arange(6)[None]}, build=mamba)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(("level", "tier"), [(LEVELS[0], "ram"), (LEVELS[1], "file")])
@pytest.mark.parametrize("case", [*(CASES[name] for name in NAMES), MAMBA], ids=lambda case: case.name)
def test_bits(case: Case, level: str, tier: str, tmp_path: Path, patched: None) -> None:
    """Nothing is read where it rests: a device could not read it there. A class may say that diffusers does not support
    it. Hazard: a module reads a child's weight without calling it (diffusers #14551): `VQModel`, Mamba."""
    expected, model = case.run(case.make()), case.make()
    enable = getattr(model, "enable_group_offload", None) or (
        lambda *args, **options: apply_group_offloading(model, *args, **options)
    )
    handle = enable("cpu", offload_type=level, offload_to_disk_path=tmp_path if tier == "file" else None)
    run_on_cpu(case, model, expected, passes=3)
    handle.remove()
