"""The release: what its archives contain, and that the wheel works where it is all that was installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import group_offload

ROOT = Path(__file__).resolve().parent.parent


def test_the_wheel_in_an_environment(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("build", reason="needs the packages of the extra dev")
    pytest.importorskip("twine", reason="needs the packages of the extra dev")
    from . import wheel

    wheel.main()
    assert "the README's 2 blocks ran" in capsys.readouterr().out


@pytest.mark.parametrize("file", ["CITATION.cff", "CHANGELOG.md"])
def test_files_name_this_version(file: str) -> None:
    assert re.search(
        rf"^(version: |## ){re.escape(group_offload.__version__)}\b", (ROOT / file).read_text(), re.MULTILINE
    )
