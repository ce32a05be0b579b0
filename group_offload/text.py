"""Text that came from outside, for people to read."""

from __future__ import annotations


def printable(value: str) -> str:
    """Names and headers may hold anything, escape sequences for terminals too."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in value)
