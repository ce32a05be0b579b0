"""The page of a report: one HTML file that needs nothing else: no network, no other file, no script."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from pathlib import Path

import torch

from ..base.publish import check_path, publish
from ..base.text import printable
from ..errors import StorageError


def write_page(title: str, sentences: Sequence[str], sections: Mapping[str, str], path: str | os.PathLike[str]) -> Path:
    """Write the page, whole or not at all, and return its path.

    A link goes on to lead to its file, and a device or a pipe (/dev/stdout) gets the text.

    Args:
        sections: Headings, and the HTML below each.

    Raises:
        StorageError: the file cannot be written.
    """
    found = Path(path)
    check_path(found)
    content = _render(title, sentences, sections).encode("utf-8", "replace")
    try:
        if found.exists() and not found.is_file():
            found.write_bytes(content)
        else:
            publish(found.resolve() if found.is_symlink() else found, [content])
    except (OSError, RuntimeError) as error:  # links in a circle
        raise StorageError(f"Cannot write {found}: {getattr(error, 'strerror', None) or error}.") from error
    return found


def folded(summary: str, content: str) -> str:
    """HTML that a reader has to open."""
    return f"<details><summary>{_safe(summary)}</summary>{content}</details>"


def _render(title: str, sentences: Sequence[str], sections: Mapping[str, str]) -> str:
    css = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    made = f"Written {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, with torch {torch.__version__}."
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<title>{_safe(title)}</title><style>\n{css}</style></head><body><main>",
            f"<h1>{_safe(title)}</h1>",
            *(f'<p class="soft">{_safe(sentence)}</p>' for sentence in (*sentences, made)),
            *(f'<h2>{_safe(heading)}</h2><div class="card">{html}</div>' for heading, html in sections.items()),
            "</main></body></html>\n",
        ]
    )


def _safe(text: str) -> str:
    return escape(printable(text))
