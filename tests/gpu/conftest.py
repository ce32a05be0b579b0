"""Fixtures of the tests that need an accelerator."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    device = torch.device(found.type, torch.accelerator.current_device_index())
    square = torch.ones(64, 64, device=device)
    assert (square @ square).numel()  # libraries take their workspaces now, and not where a test looks at memory
    return device
