"""cache-dit's cache beside offloaded models: the bits of the resident pipeline that has the same cache."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from group_offload import enable_group_offload

from ..support import tiny_models as tiny
from ..support.pipelines import any_case, tier_options

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    cache_dit = pytest.importorskip("cache_dit")


def cached(pipe: Any) -> None:
    config = cache_dit.DBCacheConfig(
        Fn_compute_blocks=1, Bn_compute_blocks=0, max_warmup_steps=2, residual_diff_threshold=0.9
    )
    cache_dit.enable_cache(pipe, cache_config=config)


def run(pipe: Any) -> torch.Tensor:
    return tiny.run(pipe, num_inference_steps=6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("order", ["before", "after"])
@any_case
def test_bits_beside_a_cache(tier: str, level: str, order: str, tmp_path: Path) -> None:
    """The cache is enabled before the models are offloaded, or after."""
    resident = tiny.flux_pipeline()
    plain = run(resident)
    cached(resident)
    expected = run(resident)
    assert not torch.equal(expected, plain)
    pipe = tiny.flux_pipeline()
    if order == "before":
        cached(pipe)
    handles = enable_group_offload(pipe, offload_type=level, **tier_options(tier, tmp_path))
    if order == "after":
        cached(pipe)
    for _ in range(2):
        assert torch.equal(run(pipe), expected)
    assert handles["transformer"].stats().onloads
