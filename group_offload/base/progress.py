"""The progress bar that is shown while group files are written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm.auto import tqdm  # type: ignore[import-untyped]


@contextmanager
def progress_bar(total_bytes: int, title: str) -> Iterator[Callable[[int], None]]:
    """A bar over `total_bytes`, and the function that moves it on by a number of bytes. Only a terminal shows it."""
    is_hidden = os.environ.get("GROUP_OFFLOAD_PROGRESS_BAR", "1").lower() in ("0", "false", "no", "off")
    with tqdm(
        total=total_bytes, desc=title, unit="B", unit_scale=True, unit_divisor=1024, disable=is_hidden or None
    ) as bar:
        yield lambda num_bytes: bar.update(num_bytes) and None
