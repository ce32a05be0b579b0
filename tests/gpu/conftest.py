"""Fixtures of the tests that need an accelerator."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from ..support.models import Model
from ..support.tuning import tune


@pytest.fixture(autouse=True)
def _little_is_left_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of tests are small beside what is left free for others."""
    tune(monkeypatch, device_margin_bytes=16 << 20)


@pytest.fixture(autouse=True)
def _earlier_tests_leave_no_memory() -> None:
    """A budget counts all memory of the process: what torch's compiler and cuBLAS keep of earlier tests is let go."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


@pytest.fixture
def device() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    device = torch.device(found.type, torch.accelerator.current_device_index())
    # Libraries take their workspaces now, and not where a test looks at memory: one for products, one for those with a bias.
    for dtype in (torch.float32, torch.bfloat16):
        square = torch.ones(64, 64, device=device, dtype=dtype)
        assert torch.nn.functional.linear(square, square).numel()
        assert torch.nn.functional.linear(square, square, square[0]).numel()
    return device


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Model(12, 1024).to(torch.bfloat16).eval()
