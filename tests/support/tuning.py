"""Other sizes and times than the package was tuned with, for one test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from group_offload.base import tuning as tuning_module
from group_offload.base.tuning import tuning


def tune(patch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Change values of `Tuning` until `patch` is undone."""
    patch.setattr(tuning_module, "_now", replace(tuning(), **changes))
