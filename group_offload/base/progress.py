"""The progress bar that is shown while group files are written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm.auto import tqdm  # type: ignore[import-untyped]

_enabled = os.environ.get("GROUP_OFFLOAD_PROGRESS_BAR", "1").lower() not in ("0", "false", "no", "off")


def enable_progress_bar() -> None:
    """Show a progress bar on the terminal while group files are written (the default)."""
    global _enabled
    _enabled = True


def disable_progress_bar() -> None:
    """Show no progress bar. The environment variable `GROUP_OFFLOAD_PROGRESS_BAR=0` does the same."""
    global _enabled
    _enabled = False


@contextmanager
def progress_bar(total_bytes: int, title: str) -> Iterator[Callable[[int], None]]:
    """A bar over `total_bytes`, and the function that moves it on by a number of bytes. Only a terminal shows it."""
    with tqdm(
        total=total_bytes, desc=title, unit="B", unit_scale=True, unit_divisor=1024, disable=None if _enabled else True
    ) as bar:
        yield lambda num_bytes: bar.update(num_bytes) and None
