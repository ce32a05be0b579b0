"""A survey of a folder of group files: which files are there, which are damaged, and which are needed by no model.

It is for people, not for the engine. Nothing here follows a link, trusts what a file says about itself, or leaves the folder.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from ..base import system
from ..base.publish import opened_to_read
from ..base.tuning import tuning
from ..errors import GroupFileError
from .manifest import GROUP_FILE, MANIFEST_FILE, TEMPORARY_FILE, Manifest, describe_problem
from .safetensors_file import (
    FORMAT_VERSION,
    PACKED_VERSION,
    GroupHeader,
    check_group_header,
    content_of_file,
    read_header,
)

OUTDATED_VERSIONS = ("1",)
"""Formats that are not used any more. An unknown version may be that of a later release."""

_NUM_LOOKS = 5

_RESTORE = "The model's next set-up writes it again. If you do not need that model, delete its manifest."
_DELETE = "Delete it: the next set-up of its model writes it again."
_MOVE = "Move it elsewhere: the next set-up of the model writes its own."


class Kind(str, Enum):
    """The kind of a file in the folder, as far as its name, its mode and its header tell."""

    GROUP = "group"
    """A group file whose header is right."""
    DAMAGED = "damaged"
    """A file with the name of a group file that cannot be one, or a file that a manifest needs and that is missing or wrong."""
    OUTDATED = "outdated"
    """A group file of an earlier format, which is not used any more."""
    LATER = "later"
    """A group file of a later format, about which this version cannot tell more."""
    TEMPORARY = "temporary"
    """A file that is being written, or was when its process died."""
    ABANDONED = "abandoned"
    """A manifest of weights that were edited in a process that is gone."""
    FOREIGN = "foreign"
    """A file of another program."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A file of the folder, or a file that should be there."""

    name: str
    kind: Kind
    num_bytes: int
    group: GroupHeader | None = None
    version: str = ""
    is_ours: bool = False
    """Whether this package wrote it, even if it was damaged since."""
    manifests: tuple[str, ...] = ()
    """The names of the manifests that need it."""
    problem: str = ""
    """What is wrong with a damaged file."""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Survey:
    """The files of a folder."""

    findings: tuple[Finding, ...]
    """Sorted by name."""
    manifests: dict[str, Manifest]
    broken_manifests: dict[str, str]
    """The problem of each manifest that cannot be read."""

    @property
    def damaged(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.kind is Kind.DAMAGED)

    @property
    def is_whole(self) -> bool:
        return not self.damaged and not self.broken_manifests


@contextmanager
def open_folder(path: Path) -> Iterator[int | Path]:
    """A descriptor of the folder, so that all names are looked up in this very folder; its path where systems have none.

    Raises:
        GroupFileError: the folder does not exist, is no folder, or cannot be read.
    """
    fd = None
    try:
        try:
            fd = system.open_folder(path)
        except NotImplementedError:
            os.scandir(path).close()
    except OSError as error:
        is_file = isinstance(error, NotADirectoryError)
        problem = f"{path} is not a folder" if is_file else f"Cannot open {path}: {error.strerror}"
        raise GroupFileError(f"{problem}. Pass the folder that was given as offload_to_disk_path.") from error
    try:
        yield path if fd is None else fd
    finally:
        if fd is not None:
            os.close(fd)


def survey(folder: int | Path) -> Survey:
    """Look at the name and the header of every file, and read all manifests.

    Other processes may change the folder meanwhile. A file that they remove is not there. A folder that looks damaged is
    looked at again, since another process may be in the middle of a change.

    Raises:
        GroupFileError: the folder cannot be listed.
    """
    found = _survey_once(folder)
    for _ in range(_NUM_LOOKS - 1):
        if found.is_whole:
            break
        time.sleep(tuning().seconds_between_looks)
        before, found = found, _survey_once(folder)
        if found == before:
            break
    return found


def _survey_once(folder: int | Path) -> Survey:
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries)
    except OSError as error:
        raise GroupFileError(f"Cannot list the folder: {error.strerror}.") from error
    manifests, broken, findings = {}, {}, []
    for name in names:
        with suppress(FileNotFoundError):  # it has just gone
            status = system.status_of(name, folder)
            is_file = stat.S_ISREG(status.st_mode)
            if is_file and MANIFEST_FILE.fullmatch(name):
                try:
                    with opened_to_read(name, folder) as fd:
                        manifest = Manifest.read(fd)
                        if manifest.is_abandoned(fd):
                            findings.append(Finding(name, Kind.ABANDONED, status.st_size, is_ours=True))
                        else:
                            manifests[name] = manifest
                except FileNotFoundError:
                    pass
                except OSError as error:
                    broken[name] = describe_problem(error)
            elif is_file and GROUP_FILE.fullmatch(name):
                findings.append(_look_at(name, status.st_size, folder))
            elif is_file and TEMPORARY_FILE.fullmatch(name):
                findings.append(Finding(name, Kind.TEMPORARY, status.st_size, is_ours=True))
            else:
                findings.append(Finding(name, Kind.FOREIGN, status.st_size))
    return Survey(tuple(_with_manifests(findings, manifests)), manifests, broken)


def verify(folder: int | Path, found: Survey, on_read: Callable[[int], None]) -> Survey:
    """Read the data of every group file as well, and find the files whose content is not what their header says."""
    findings = []
    for finding in found.findings:
        if finding.group is not None:
            try:
                now = _look_at(finding.name, finding.num_bytes, folder, on_read)
            except FileNotFoundError:  # an edit has just put another file in its place
                if not finding.manifests:
                    continue
            else:  # held against its own header: another file may have the name by now
                if now.kind is not Kind.GROUP:
                    finding = replace(now, manifests=finding.manifests)
        findings.append(finding)
    return replace(found, findings=tuple(findings))


def removable(found: Survey) -> tuple[Finding, ...]:
    """The files of this package that no manifest needs. They may be in use.

    Raises:
        GroupFileError: a manifest cannot be read, so the files that it needs are not known.
    """
    for name, problem in found.broken_manifests.items():
        raise GroupFileError(
            f"Cannot tell which files {name!r} needs: {problem}. Upgrade group-offload if a later version wrote it, or "
            f"delete it if you do not need its model."
        )
    return tuple(
        finding
        for finding in found.findings
        if finding.is_ours and not finding.manifests and finding.kind is not Kind.LATER
    )


def _look_at(name: str, num_bytes: int, folder: int | Path, on_read: Callable[[int], None] | None = None) -> Finding:
    """Check the header of a file with the name of a group file and, with `on_read`, its data.

    Raises:
        FileNotFoundError: it is not there any more.
    """
    finding = Finding(name, Kind.DAMAGED, num_bytes)
    try:
        with opened_to_read(name, folder) as fd:
            num_bytes = os.fstat(fd).st_size
            finding = replace(finding, num_bytes=num_bytes)
            header = read_header(fd)
            if header.version is None:  # diffusers has such names too
                return replace(finding, kind=Kind.FOREIGN)
            finding = replace(finding, is_ours=True)
            if header.version not in (FORMAT_VERSION, PACKED_VERSION):
                kind = Kind.OUTDATED if header.version in OUTDATED_VERSIONS else Kind.LATER
                return replace(finding, kind=kind, version=header.version)
            group = check_group_header(header, num_bytes)
            finding = replace(finding, kind=Kind.GROUP, group=group, version=header.version)
            if on_read is not None:
                content = content_of_file(fd, len(header.raw), on_read)
                if content != group.content:
                    raise GroupFileError(
                        f"its data is not what was written: its hash is {content}, not {group.content}"
                    )
            return finding
    except FileNotFoundError:
        raise
    except OSError as error:
        return _damaged(finding, describe_problem(error))


def _with_manifests(findings: list[Finding], manifests: dict[str, Manifest]) -> Iterator[Finding]:
    """The findings with the manifests that need them, and one for each file that a manifest needs and that is missing."""
    needed: dict[str, list[str]] = {}
    by_name = {finding.name: finding for finding in findings}
    for manifest_name, manifest in manifests.items():
        for entry in manifest.entries:
            needed.setdefault(entry.file, []).append(manifest_name)
            finding = by_name.get(entry.file)
            if finding is None:
                by_name[entry.file] = _damaged(Finding(entry.file, Kind.DAMAGED, 0), "it is not there", _RESTORE)
            elif finding.kind is Kind.FOREIGN:
                by_name[entry.file] = _damaged(finding, "another program has put a file of its own there", _MOVE)
            elif finding.group is not None and (finding.group.group_id, finding.group.content) != (
                entry.group_id,
                entry.content,
            ):
                by_name[entry.file] = _damaged(finding, f"it holds other weights than {manifest_name} needs there")
    for name in sorted(by_name):
        yield replace(by_name[name], manifests=tuple(sorted(set(needed.get(name, ())))))


def _damaged(finding: Finding, problem: str, remedy: str = _DELETE) -> Finding:
    return replace(finding, kind=Kind.DAMAGED, problem=problem, remedy=remedy)
