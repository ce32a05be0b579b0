"""What the commands say, and how."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text


def printable(value: str) -> str:
    """Names and headers may hold anything, escape sequences for terminals too."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in value)


def new_console() -> Console:
    """What is not a terminal gets lines as long as they are."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=240)


def say(console: Console, message: str) -> None:
    console.print(Text(message), soft_wrap=True)


def complain(message: str) -> None:
    Console(stderr=True).print(Text(f"group-offload: {printable(message)}"), soft_wrap=True)
