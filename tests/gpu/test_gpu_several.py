"""Two GPUs that share every group: they copy into each other's memory.

Three cases use NCCL beside that: `NCCL_NVLS_ENABLE=0` where the machine has no multicast.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ..support import several
from ..support.several import run

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _two_gpus() -> None:
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two GPUs")


@pytest.mark.parametrize(
    "case",
    [
        (several.needs_no_nccl,),
        (several.has_same_bits, "block_level"),
        (several.has_same_bits, "leaf_level"),
        (several.sends_compressed_weights,),
        (several.sends_compressed_weights, "FOLDER"),
        (several.goes_its_own_way,),
        (several.raises_and_goes_on,),
        (several.edits_weights,),
        (several.is_stored_on_disk, "FOLDER"),
        (several.trains,),
        (several.has_one_copy,),
        (several.has_another_model, "weights"),
        (several.leaves_early,),
        (several.is_dropped,),
    ],
    ids=lambda case: " ".join([case[0].__name__, *case[1:]]),
)
def test_two_gpus(case: tuple[Any, ...], tmp_path: Path) -> None:
    run(tuple(tmp_path if each == "FOLDER" else each for each in case), device="cuda")


@pytest.mark.parametrize("where", ["in a forward", "between forwards"])
def test_a_rank_that_dies_is_named_by_the_other(where: str) -> None:
    run((several.is_killed, where), device="cuda", expected=(0, -several.KILLED))
