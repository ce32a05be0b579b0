"""Files that another user owns, whoever runs the tests."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from group_offload.base.ownership import Owners

HOW = ("chown", "told")
"""Files are given away, which only root can do; or `Owners` is told that they were."""
UID = 12345


def give_away(how: str, monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
    """Let another user own these files."""
    if how == "chown":
        if os.geteuid() != 0:
            pytest.skip("only root gives files away")
        for path in paths:
            os.chown(path, UID, UID)
        return
    inodes, check = {path.stat().st_ino for path in paths}, Owners.check

    def told(self: Owners, found: Any) -> None:
        check(self, SimpleNamespace(st_uid=UID, st_mode=found.st_mode) if found.st_ino in inodes else found)  # type: ignore[arg-type]

    monkeypatch.setattr(Owners, "check", told)
