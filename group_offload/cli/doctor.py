"""The command `group-offload doctor`: what this machine allows, and which way the engine takes."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..base.device import Backend, backend_for
from ..base.publish import temporary_name
from ..base.system import advise, lock
from ..base.terminal import add_row, new_console, new_table, say
from ..base.tuning import tuning
from ..errors import GroupFileError
from ..plan.budgets import describe_bytes
from .arguments import chosen_device, path_of
from .probes import PROBES, Machine, Verdict, ask, ask_nvidia, in_one_line

_STYLES = {Verdict.SLOWER: "yellow", Verdict.MISSING: "red", Verdict.UNKNOWN: "magenta"}


def add_command(commands: Any) -> None:
    """Add the command to what `ArgumentParser.add_subparsers` returned."""
    text = "Try out what this machine allows, and say which way the engine takes. An issue report starts with this."
    command = commands.add_parser("doctor", help=text, description=text)
    command.add_argument(
        "folder",
        metavar="DIR",
        type=path_of,
        nargs="?",
        default=Path(),
        help="a folder on the drive of the models; a small file is written to it and removed (default: the current folder)",
    )
    command.add_argument("--device", help="such as cuda:0 or cpu (default: the current accelerator, else the CPU)")
    command.add_argument("--json", action="store_true", help="for programs")
    command.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    folder: Path = arguments.folder
    backend, problem = _backend(arguments.device)
    errors = new_console(stderr=True)
    if errors.is_terminal:
        say(errors, "Trying out what this machine allows takes some seconds ...")
    with _file_to_try(folder) as file:
        machine = Machine(folder, file, backend, problem, ask_nvidia(backend))
        rows = {name: ask(probe, machine) for name, probe in PROBES.items()}
    if arguments.json:
        shown = [{"name": name, **asdict(row)} for name, row in rows.items()]
        print(json.dumps({"folder": str(folder.absolute()), "device": str(backend.device), "rows": shown}, indent=2))
        return 0
    table = new_table(f"group-offload doctor {folder.absolute()}", "", "found", "verdict", "what to do")
    for name, row in rows.items():
        add_row(table, name.replace("_", " "), row.found, row.verdict.value, row.remedy, style=_STYLES.get(row.verdict))
    new_console().print(table)
    return 0


def _backend(name: str | None) -> tuple[Backend, str]:
    """The device, and what its driver said if it failed: then the device is the CPU.

    Raises:
        DeviceError: there is no device of the name that was given.
    """
    try:
        return backend_for(chosen_device(name)), ""
    except Exception as error:
        if name is not None:
            raise
        return backend_for(torch.device("cpu")), in_one_line(error)


@contextmanager
def _file_to_try(folder: Path) -> Iterator[Path]:
    """A file of random bytes that are on the drive and not in the page cache.

    It has the name of a temporary file of the engine: if this process is killed, the next set-up in the folder removes it.

    Raises:
        GroupFileError: the folder is none, or cannot be written to.
    """
    path, size = folder / temporary_name("probe"), tuning().tried_file_bytes
    with ExitStack() as stack:
        stack.callback(_remove, path)  # before the file is made: an interrupt leaves nothing behind
        try:
            file = stack.enter_context(open(path, "xb", buffering=0))
            with suppress(OSError):  # a file system without locks
                lock(file.fileno())
            left = memoryview(os.urandom(size))
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
            advise(file.fileno(), 0, 0, "DONTNEED")
        except OSError as error:
            raise GroupFileError(
                f"Cannot write to {folder}: {error.strerror or error}. Give a folder on the drive of the models that this user "
                f"can write to and that has {describe_bytes(size)} free."
            ) from error
        yield path


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
