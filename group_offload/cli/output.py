"""What the commands print: plain text, in which no name speaks to the terminal."""

from __future__ import annotations

import sys

from ..base.text import printable


def say(*lines: str) -> None:
    for line in lines:
        print(printable(line))


def say_meanwhile(line: str) -> None:
    """Say what takes time now, if a terminal shows it."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(printable(line), file=sys.stderr)


def complain(message: str) -> None:
    print(f"group-offload: {printable(message)}", file=sys.stderr)
