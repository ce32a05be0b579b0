"""The command `group-offload`, run in this process."""

from __future__ import annotations

import pytest

from group_offload.cli import main as cli


class Terminal:
    """Runs the command in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object, status: int = 0) -> str:
        try:
            actual = cli.main([str(argument) for argument in arguments])
        except SystemExit as error:  # of argparse
            actual = int(error.code or 0)
        said = self._capsys.readouterr()
        assert actual == status, said
        return said.out + said.err
