"""Which torch the tests run with, where torch itself does a thing differently from one release on."""

from __future__ import annotations

import torch

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
"""Two numbers, to compare with: as strings, "2.9" comes after "2.12"."""
