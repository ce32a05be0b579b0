"""Fixtures of the tests of the engine: each level and each tier."""

from __future__ import annotations

from ..support.fixtures import folder, level, offload, offload_either, tier

__all__ = ["folder", "level", "offload", "offload_either", "tier"]
