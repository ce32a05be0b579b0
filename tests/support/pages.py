"""Reads the page of a report as a browser would, and refuses what needs the network."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

_VOID = {"meta"}


class Page(HTMLParser):
    """Its tags, its words and the JSON in it. Tags that do not pair, and what is fetched from elsewhere, are errors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.facts: Any = None
        self._open: list[str] = []
        self._said: list[str] = []
        text = path.read_text(encoding="utf-8")
        assert (
            "url(" not in text and "@import" not in text and not re.search(r"\b(fetch|XMLHttpRequest|import)\(", text)
        )
        self.feed(text)
        self.close()
        assert not self._open
        self.words = " ".join(" ".join(self._said).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for name, value in attrs:
            assert name not in ("src", "srcset") and not name.startswith("on"), (tag, attrs)
            assert name != "href" or (value or "").startswith("#"), (tag, attrs)
        if tag not in _VOID:
            self._open.append("facts" if ("id", "facts") in attrs else tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() in (tag, "facts"), tag

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        if inside == "facts":
            self.facts = json.loads(data)
        elif inside not in ("script", "style"):
            self._said.append(data)
