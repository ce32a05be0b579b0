"""Two GPUs that share every group, through NCCL. `NCCL_NVLS_ENABLE=0` where the machine has no multicast."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ..support import several
from ..support.several import run

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _two_gpus() -> None:
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two GPUs")


def test_two_gpus(tmp_path: Path) -> None:
    run(
        (several.has_same_bits, "block_level"),
        (several.has_same_bits, "leaf_level"),
        several.goes_its_own_way,
        several.raises_and_goes_on,
        several.edits_weights,
        (several.rests_in_files, tmp_path),
        several.trains,
        several.has_one_copy,
        (several.has_another_model, "weights"),
        several.leaves_early,
        several.is_dropped,
        device="cuda",
    )


def test_context_parallel() -> None:
    run(several.is_context_parallel, device="cuda")
