"""Attributes of other libraries' classes that are replaced for a while."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any


def swap(undo: ExitStack, owner: type, name: str, value: Any) -> None:
    """Set an attribute of a class until `undo` is closed."""
    before = owner.__dict__.get(name)
    if before is None:
        undo.callback(delattr, owner, name)
    else:
        undo.callback(setattr, owner, name, before)
    setattr(owner, name, value)
