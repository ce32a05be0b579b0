"""Reads the page of a report as a browser would, and refuses what needs the network or runs."""

from __future__ import annotations

from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

_VOID = {"meta"}


class Page(HTMLParser):
    """Its tags and words. Tags that do not pair, scripts, and what is fetched from elsewhere, are errors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self._open: list[str] = []
        self._said: list[str] = []
        text = path.read_text(encoding="utf-8")
        assert "url(" not in text and "@import" not in text
        self.feed(text)
        self.close()
        assert not self._open and not self.tags.keys() & {"script", "link", "a", "img"}
        self.words = " ".join(" ".join(self._said).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        assert not [name for name, _ in attrs if name in ("src", "srcset", "href") or name.startswith("on")], attrs
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self._said.append(data)
