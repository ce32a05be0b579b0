"""The command `group-offload`: plan where weights are stored, measure and check this machine, compress models."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from .. import __version__
from ..errors import GroupOffloadError
from . import compress, doctor, plan
from .output import complain

OK, FAILED = 0, 2
"""The exit statuses. That of argparse for wrong arguments is 2 too."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv` (by default the arguments of the process), and return its exit status."""
    arguments = _parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names may have letters that the terminal cannot show
    try:
        status: int = arguments.run(arguments)
        print(end="", flush=True)  # here, where its error is handled, and not sys.stdout.flush(): stdout may be closed
    except GroupOffloadError as error:
        with suppress(OSError):
            complain(str(error))
        return FAILED
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        # Python flushes once more when it ends, and would fail again.
        with suppress(OSError, ValueError, AttributeError):  # stdout is not a file, or closed
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the program that reads the output has ended
            return OK
        with suppress(OSError):  # what complaints are written to may be full too
            complain(str(error))
        return FAILED
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="group-offload", description=__doc__)
    parser.add_argument("--version", action="version", version=f"group-offload {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (plan, compress, doctor):
        command.add_command(commands)
    return parser
