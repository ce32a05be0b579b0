"""The processor's caches.

What a module consists of is looked at before each forward, and has left the caches since the last one. The loops that look at
it wait for memory then, object by object.
"""

from __future__ import annotations

from typing import Any


def touch(*lists: list[Any]) -> None:
    """Bring the objects of some lists into the caches.

    A copy of a list counts a reference to each object. That loop is so short that the processor waits for many objects at a
    time.
    """
    for each in lists:
        each.copy()
