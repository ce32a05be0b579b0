"""Methods of other libraries' classes that are replaced, some for a while."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any


def swap(undo: ExitStack, owner: type, name: str, value: Any) -> None:
    """Set an attribute of a class until `undo` is closed."""
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
