"""Functions and methods of other libraries that are replaced: for a while, or once for the process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from inspect import getattr_static
from typing import Any


def swap(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute of a class, or of an object, until `undo` is closed."""
    before = owner.__dict__.get(name)
    if before is None:
        undo.callback(delattr, owner, name)
    else:
        undo.callback(setattr, owner, name, before)
    setattr(owner, name, value)


def around(call: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    """A method that does `instead(call, ...)`, with the name and the signature of `call`."""

    @wraps(call)
    def method(*args: Any, **kwargs: Any) -> Any:
        return instead(call, *args, **kwargs)

    return method


def around_once(owner: Any, name: str, instead: Callable[..., Any]) -> None:
    """Let calls of a function that `owner` (a class or a module) has be `instead(call, ...)` from now on.

    Repeated calls do nothing.
    """
    before = getattr_static(owner, name)
    call = getattr(before, "__func__", before)
    if hasattr(call, "group_offload_before"):
        return
    mine = around(call, instead)
    mine.group_offload_before = call  # type: ignore[attr-defined]
    setattr(owner, name, classmethod(mine) if isinstance(before, classmethod) else mine)
