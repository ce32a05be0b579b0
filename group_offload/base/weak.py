"""References that do not keep alive what they lead to, and objects that no copy of their owner gets."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, overload

from ..errors import StateError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Weak(Generic[T]):
    """An attribute of a class that refers to an object weakly. Reading it raises a StateError once the object is gone."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_weak_{name}"

    @overload
    def __get__(self, holder: None, owner: type) -> Weak[T]: ...
    @overload
    def __get__(self, holder: object, owner: type) -> T: ...
    def __get__(self, holder: Any, owner: type) -> Weak[T] | T:
        if holder is None:
            return self
        found: T | None = holder.__dict__[self._name]()  # as `of`: gates ask at each call
        if found is None:
            raise gone()
        return found

    def of(self, holder: Any) -> T | None:
        """The object; None once it is gone."""
        found: T | None = holder.__dict__[self._name]()
        return found

    def __set__(self, holder: Any, value: T) -> None:
        holder.__dict__[self._name] = weakref.ref(value)


class NotCopied:
    """An object that belongs to one module or pipeline: a copy of that, or one read back from a pickle, gets None instead."""

    __slots__ = ()

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


def weakly(method: Callable[P, R]) -> Callable[P, R]:
    """A bound method that does not keep its object alive. Calling it raises a StateError once the object is gone."""
    reference = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        found: Callable[P, R] | None = reference()
        if found is None:
            raise gone()
        return found(*args, **kwargs)

    return call


def gone() -> StateError:
    return StateError(
        "The offloaded model is gone: nothing refers to it any more. Keep a reference to the model while you use it, its "
        "parts or its handle."
    )
