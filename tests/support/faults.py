"""Calls that fail where a test wants them to."""

from __future__ import annotations

import itertools
from typing import Any

import pytest


def raise_at(
    patch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    number: int = 1,
    error: Any = KeyboardInterrupt,
    *,
    ever_after: bool = False,
) -> None:
    """Let the call of that number, counted from 1, raise before it has done anything; and all later ones, if so wanted."""
    real, calls = getattr(owner, name), itertools.count(1)

    def struck(*args: Any, **kwargs: Any) -> Any:
        at = next(calls)
        if at == number or (ever_after and at > number):
            raise error
        return real(*args, **kwargs)

    patch.setattr(owner, name, struck)
