"""Fixtures of the tests that need an accelerator."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, torch.accelerator.current_device_index())
