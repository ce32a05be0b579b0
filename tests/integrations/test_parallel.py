"""Beside context parallelism (Ulysses, ring) and tensor parallelism of diffusers: two processes, each with its own weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ..support.processes import in_new_process

parallel_inference = pytest.importorskip("tests.support.parallel_inference", exc_type=ImportError)
"""diffusers has tensor parallelism from 0.42 on."""


def run_two_processes(device: str, folder: Path) -> None:
    seconds = 100 if device == "cpu" else 280  # each mesh makes communicators of its own
    done = in_new_process(parallel_inference.main, folder / "rendezvous", device, timeout=seconds)
    assert done.count("equal") == 2 * len(parallel_inference.CROSS), done
    assert done.count("shared") == (2 if device == "cpu" else 0), done


def test_two_processes(tmp_path: Path) -> None:
    """Switched on before offloading and after it, with a LoRA in between, and off again; and where processes share
    groups. Hazard: context parallelism breaks offloading, before or after it (diffusers #12533)."""
    run_two_processes("cpu", tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus(tmp_path: Path) -> None:
    run_two_processes("cuda", tmp_path)
