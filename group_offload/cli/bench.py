"""The command `group-offload bench`: how fast weights move on this machine."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ..base.text import table
from ..errors import GroupFileError
from ..plan import speeds
from .arguments import add_device, add_folder, chosen_backend, new_command
from .output import say, say_meanwhile


def add_command(commands: Any) -> None:
    """Add the command to what `ArgumentParser.add_subparsers` returned."""
    text = "Measure how fast weights move: RAM to the device, and the disk of DIR to RAM. Later plans use it."
    command = new_command(commands, "bench", text)
    add_device(command)
    add_folder(command, "the folder of a model or a pipeline, to read from")
    command.set_defaults(run=_bench)


def _bench(arguments: argparse.Namespace) -> int:
    folder: Path = arguments.folder
    if not folder.is_dir():
        raise GroupFileError(f"{folder} is not a folder. Pass one on the disk to measure.")
    backend = chosen_backend(arguments.device)
    say_meanwhile("Measuring takes some seconds ...")
    device, where = speeds.device_name(backend), speeds.filesystem_of(folder)
    h2d = speeds.measure_link(backend, speeds.LINK_BYTES)
    drive, problem = speeds.measure_drive(folder, speeds.MIN_DRIVE_BYTES)
    is_kept = speeds.record({("h2d", device): h2d, ("drive", where): drive})
    if arguments.json:
        found = {"device": device, "h2d": h2d, "filesystem": where, "drive": drive, "problem": problem}
        print(json.dumps(found, indent=2))
        return 0
    link = "pinned RAM to the device" if backend.has_streams else "RAM to RAM (the device is the CPU)"
    ways = ((link, h2d), (f"the disk of {where} to RAM", drive))
    rows = [(way, f"{speed / 1e9:.2f} GB/s" if speed else "not measured") for way, speed in ways]
    say(device, *table([("from", "speed"), *rows]))
    if problem:
        say(problem)
    unsaved = "Couldn't save this, so plans won't use it. Set XDG_CACHE_HOME to a folder that you can write to."
    say(f"Saved to {speeds.record_file()}." if is_kept else unsaved)
    return 0
