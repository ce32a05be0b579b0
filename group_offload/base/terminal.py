"""The output of the commands. All of it is plain text: no name in it is taken for markup, or speaks to the terminal."""

from __future__ import annotations

from collections.abc import Collection

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .text import printable


def new_console(*, stderr: bool = False) -> Console:
    """A console that breaks lines for a terminal alone: files and pipes get them whole."""
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=240)


def say(console: Console, message: str) -> None:
    console.print(_plain(message), soft_wrap=True)


def complain(message: str) -> None:
    say(new_console(stderr=True), f"group-offload: {message}")


def new_table(title: str, *columns: str, numbers: Collection[str] = ()) -> Table:
    """An empty table, to be filled with `add_row`. `numbers` are the columns of numbers."""
    table = Table(title=_plain(title), title_justify="left")
    for column in columns:
        table.add_column(_plain(column), overflow="fold", justify="right" if column in numbers else "left")
    return table


def add_row(table: Table, *cells: str, style: str | None = None) -> None:
    table.add_row(*map(_plain, cells), style=style)


def _plain(value: str) -> Text:
    return Text(printable(value))
