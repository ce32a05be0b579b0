"""Fixtures of the tests of the engine: each level, each tier, and what the log says of shared passes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch

from ..support.fixtures import folder, level, offload, offload_either, tier

__all__ = ["folder", "level", "offload", "offload_either", "tier"]


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, "group_offload")
    return lambda: [r.getMessage() for r in caplog.records if "separately (interleave_forwards)" in r.getMessage()]
