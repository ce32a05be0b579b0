"""What every test of the command gets."""

from __future__ import annotations

import pytest

from ..support.terminal import Terminal


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(capsys)
