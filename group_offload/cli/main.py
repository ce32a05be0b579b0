"""The command `group-offload`: plan what rests where, measure and examine this machine, pack models, look after group files."""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.prompt import Confirm
from rich.table import Table

from ..base.publish import folder_lock, remove_unused
from ..base.terminal import add_row, complain, new_console, new_table, say
from ..errors import GroupFileError, GroupOffloadError
from ..plan.budgets import describe_bytes
from ..stores.survey import Finding, Kind, Survey, open_folder, removable, survey, verify
from . import doctor, pack
from .arguments import path_of
from .plan import add_commands

OK, DAMAGED, FAILED = 0, 1, 2
"""The exit statuses. That of argparse for wrong arguments is 2 too."""

_STYLES = {
    Kind.DAMAGED: "red",
    Kind.FOREIGN: "dim",
    **dict.fromkeys((Kind.OUTDATED, Kind.TEMPORARY, Kind.ABANDONED), "yellow"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv` (by default the arguments of the process), and return its exit status."""
    _open_missing_streams()
    parser = _parser()
    arguments = parser.parse_args(argv)
    for name, value in vars(arguments).items():
        if value == []:  # argparse takes the "--" of `--ram=--` away
            parser.error(f"argument --{name.replace('_', '-')}: expected one argument")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names may have letters that the terminal cannot show
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()  # here, where its error is handled
    except GroupOffloadError as error:
        with suppress(OSError):
            complain(str(error))
        return FAILED
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the program that reads the output has ended
        _write_nothing_more()
        return OK
    except SystemExit:  # rich turns the same error into this
        return OK
    except OSError as error:
        is_output = error.errno == errno.ENOSPC and error.filename is None
        with suppress(OSError):  # what complaints are written to may be full too
            complain(f"The output cannot be written: {error.strerror}." if is_output else str(error))
        _write_nothing_more()
        return FAILED
    return status


def _open_missing_streams() -> None:
    """Let the streams that the process was started without (`2>&-`) lead nowhere.

    Else the next file that is opened has the number of one, and what libraries write there goes into that file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, io.TextIOWrapper(io.FileIO(os.devnull, mode), encoding="utf-8"))


def _write_nothing_more() -> None:
    """Send the output that is left nowhere: Python flushes once more when it ends, and would fail."""
    with suppress(OSError, ValueError):  # stdout is not a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="group-offload", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("folder", metavar="DIR", type=path_of, help="what was given as offload_to_disk_path")
        command.set_defaults(run=run)
        return command

    for name, run, text in (
        ("inspect", _inspect, "List the files of DIR: what they hold, and which models need them."),
        ("verify", _verify, "Read all group files of DIR and check them. Exit status 1 if one is damaged."),
    ):
        add(name, run, text).add_argument("--json", action="store_true", help="for programs")
    prune = add(
        "prune", _prune, "Remove the group files that no manifest needs, and the files that dead processes left."
    )
    prune.add_argument("--dry-run", action="store_true", help="list them, remove nothing")
    prune.add_argument("--yes", action="store_true", help="do not ask")
    add_commands(commands)
    pack.add_command(commands)
    doctor.add_command(commands)
    return parser


def _inspect(arguments: argparse.Namespace) -> int:
    with open_folder(arguments.folder) as fd:
        found = survey(fd)
    if arguments.json:
        _print_json(arguments.folder, found)
        return OK
    console = new_console()
    if found.findings:
        console.print(_table_of_files(found.findings))
    if found.manifests or found.broken_manifests:
        console.print(_table_of_manifests(found))
    say(console, _totals(found))
    return OK


def _verify(arguments: argparse.Namespace) -> int:
    with open_folder(arguments.folder) as fd:
        found = survey(fd)
        total = sum(finding.group.data_bytes for finding in found.findings if finding.group is not None)
        columns = TextColumn("Reading group files"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
        with Progress(
            *columns, console=new_console(stderr=True), disable=not sys.stderr.isatty(), transient=True
        ) as bar:
            task = bar.add_task("", total=total)
            found = verify(fd, found, lambda num_bytes: bar.update(task, advance=num_bytes))
    status = OK if found.is_whole else DAMAGED
    if arguments.json:
        _print_json(arguments.folder, found)
        return status
    console = new_console()
    if not found.is_whole:
        table = new_table("Damaged", "file", "what is wrong", "what to do")
        for finding in found.damaged:
            add_row(table, finding.name, finding.problem, finding.remedy)
        for name, problem in found.broken_manifests.items():
            add_row(table, name, problem, "Delete it: the next set-up of its model writes it again.")
        console.print(table)
    num_good = sum(finding.kind is Kind.GROUP for finding in found.findings)
    num_bad = len(found.damaged) + len(found.broken_manifests)
    say(console, f"{num_good} group files are whole, {num_bad} files are damaged.")
    return status


def _prune(arguments: argparse.Namespace) -> int:
    console = new_console()
    with open_folder(arguments.folder) as fd:
        with folder_lock(arguments.folder, or_raise=True):
            candidates = removable(survey(fd))
        if not candidates:
            say(console, "Nothing to remove.")
            return OK
        console.print(_table_of_files(candidates))
        total = describe_bytes(sum(finding.num_bytes for finding in candidates))
        if arguments.dry_run:
            say(console, f"{len(candidates)} files, {total}, would be removed. Those in use would be left.")
            return OK
        if not arguments.yes:
            if not sys.stdin.isatty():
                raise GroupFileError(
                    "This is not a terminal, so you cannot be asked. Pass --yes to remove these files."
                )
            if not Confirm.ask(f"Remove {len(candidates)} files, {total}?", console=console, default=False):
                return OK
        # The lock was not held while the question was open. So the folder is surveyed again.
        with folder_lock(arguments.folder, or_raise=True):
            agreed = {finding.name for finding in candidates}
            return _remove(console, [finding for finding in removable(survey(fd)) if finding.name in agreed], fd)


def _remove(console: Console, findings: Sequence[Finding], folder: int | Path) -> int:
    num_removed = num_bytes = num_in_use = num_failed = 0
    for finding in findings:
        try:
            if remove_unused(finding.name, folder):
                num_removed += 1
                num_bytes += finding.num_bytes
            else:
                num_in_use += 1
                say(console, f"{finding.name} is in use and was left.")
        except FileNotFoundError:
            pass  # another process was quicker
        except OSError as error:
            num_failed += 1
            complain(f"Cannot remove {finding.name}: {error.strerror or error}.")
    say(console, f"Removed {num_removed} files, {describe_bytes(num_bytes)}; {num_in_use} in use were left.")
    return FAILED if num_failed else OK


def _table_of_files(findings: Sequence[Finding]) -> Table:
    columns = ("file", "model", "group", "tensors", "size", "packed", "manifest", "format")
    table = new_table("Files", *columns, numbers=("tensors", "size", "packed"))
    for finding in findings:
        group = finding.group
        kind = "" if finding.kind is Kind.GROUP else finding.kind.value
        add_row(
            table,
            finding.name,
            group.model_class if group else kind,
            group.group_id if group else "",
            str(len(group.layout.specs)) if group else "",
            describe_bytes(finding.num_bytes),
            f"{group.data_bytes / group.layout.num_bytes:.3f}" if group and group.packed else "",
            ", ".join(map(_short, finding.manifests)),
            finding.version if group is None or not kind else f"{finding.version} ({kind})",
            style=_STYLES.get(finding.kind),
        )
    return table


def _table_of_manifests(found: Survey) -> Table:
    table = new_table("Manifests", "manifest", "short", "model", "groups", "size", numbers=("groups", "size"))
    for name, manifest in found.manifests.items():
        size, groups = describe_bytes(manifest.num_bytes), str(len(manifest.entries))
        is_outdated = any(entry.packed_from and entry.packed_from.is_outdated for entry in manifest.entries)
        model = f"{manifest.model_class} (its checkpoint changed since)" if is_outdated else manifest.model_class
        add_row(table, name, _short(name), model, groups, size)
    for name, problem in found.broken_manifests.items():
        add_row(table, name, _short(name), f"damaged: {problem}", "", "", style="red")
    return table


def _totals(found: Survey) -> str:
    groups = [finding for finding in found.findings if finding.kind is Kind.GROUP]
    unneeded = [finding for finding in found.findings if finding.is_ours and not finding.manifests]
    sizes = [describe_bytes(sum(finding.num_bytes for finding in findings)) for findings in (groups, unneeded)]
    return (
        f"{len(groups)} group files, {sizes[0]}, of {len(found.manifests)} models. {len(unneeded)} files, {sizes[1]}, are "
        f"needed by none. {len(found.damaged)} are damaged."
    )


def _print_json(folder: Path, found: Survey) -> None:
    files = [
        {
            "file": finding.name,
            "kind": finding.kind.value,
            "num_bytes": finding.num_bytes,
            "format_version": finding.version or None,
            "model_class": finding.group.model_class if finding.group else None,
            "group": finding.group.group_id if finding.group else None,
            "content": finding.group.content if finding.group else None,
            "packed_ratio": finding.group.data_bytes / finding.group.layout.num_bytes
            if finding.group and finding.group.packed
            else None,
            "num_tensors": len(finding.group.layout.specs) if finding.group else None,
            "manifests": list(finding.manifests),
            "problem": finding.problem or None,
            "remedy": finding.remedy or None,
        }
        for finding in found.findings
    ]
    manifests = [
        {"file": name, "model_class": manifest.model_class, "num_groups": len(manifest.entries), "problem": None}
        for name, manifest in found.manifests.items()
    ]
    manifests += [
        {"file": name, "model_class": None, "num_groups": None, "problem": problem}
        for name, problem in found.broken_manifests.items()
    ]
    print(json.dumps({"folder": str(folder), "files": files, "manifests": manifests}, indent=2))


def _short(manifest: str) -> str:
    return manifest.removesuffix(".json").rpartition("_")[2][:8]
