"""Beside context parallelism (Ulysses, ring) and tensor parallelism of diffusers: two processes, each with its own weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ..support import several

parallel_inference = pytest.importorskip("tests.support.parallel_inference", exc_type=ImportError)
"""diffusers has tensor parallelism from 0.42 on."""


def test_two_processes(tmp_path: Path) -> None:
    """Switched on before offloading and after it, with a LoRA in between, and off again; and where processes share
    groups. Hazard: context parallelism breaks offloading, before or after it (diffusers #12533)."""
    several.run((parallel_inference.is_parallel, tmp_path), several.is_a_pipeline)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus(tmp_path: Path) -> None:
    several.run((parallel_inference.is_parallel, tmp_path), device="cuda")
