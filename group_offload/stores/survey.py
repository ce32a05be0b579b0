"""What is in a folder of group files, whether it is whole, and what nobody needs: for people, not for the engine.

Nothing here follows a link, trusts what a file says of itself, or reaches out of the folder.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from ..base.publish import claim, open_to_read
from ..errors import GroupFileError
from .manifest import GROUP_FILE, MANIFEST_FILE, TEMPORARY_FILE, Manifest, open_manifest
from .safetensors_file import FORMAT_VERSION, GroupHeader, Header, check_group_header, content_of_file, read_header

OUTDATED_VERSIONS = ("1",)
"""No longer used. A version that is not known may be in use by a later release."""

_NUM_LOOKS, _SECONDS_BETWEEN_LOOKS = 5, 0.1

_RESTORE = "The model's next set-up writes it again; if nobody needs that model, delete its manifest."
_DELETE = "Delete it: the next set-up of its model writes it again."
_MOVE = "Move it elsewhere: the next set-up of the model writes its own."


class Kind(StrEnum):
    """What a file in the folder is, as far as its name, its kind and its header tell."""

    GROUP = "group"
    """A group file whose header is right."""
    DAMAGED = "damaged"
    """It has the name of a group file, and cannot be one; or a manifest names it, and it is not there or another."""
    OUTDATED = "outdated"
    """A group file of an earlier format: nobody uses it."""
    LATER = "later"
    """A group file of a later format: this version cannot tell more."""
    TEMPORARY = "temporary"
    """A file that is being written, or was when its process died."""
    ABANDONED = "abandoned"
    """A manifest of weights that were edited in a process that is no more."""
    FOREIGN = "foreign"
    """Somebody else's."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One file of the folder, or one that should be there."""

    name: str
    kind: Kind
    num_bytes: int
    group: GroupHeader | None = None
    version: str = ""
    is_ours: bool = False
    """We wrote it, whatever has become of it."""
    manifests: tuple[str, ...] = ()
    """Names of the manifests that need it."""
    problem: str = ""
    """What is wrong with a damaged one."""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Survey:
    """All that is in a folder."""

    findings: tuple[Finding, ...]
    """By name."""
    manifests: dict[str, Manifest]
    broken_manifests: dict[str, str]
    """What is wrong with each."""

    @property
    def damaged(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.kind is Kind.DAMAGED)


@contextmanager
def open_folder(path: Path) -> Iterator[int]:
    """A descriptor of the folder, so that all names are looked up in this very one.

    Raises:
        GroupFileError: it does not exist, is no folder, or cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except NotADirectoryError as error:
        raise GroupFileError(
            f"{path} is not a folder. Pass the folder that was given as offload_to_disk_path."
        ) from error
    except OSError as error:
        raise GroupFileError(
            f"Cannot open {path}: {error.strerror}. Pass the folder that was given as offload_to_disk_path."
        ) from error
    try:
        yield fd
    finally:
        os.close(fd)


def survey(folder_fd: int) -> Survey:
    """Look at every file: names, headers and manifests, no data.

    Other processes may change the folder meanwhile: a file that goes is not there, and what looks damaged is looked at
    again, since it may be half of a change.

    Raises:
        GroupFileError: the folder cannot be listed.
    """
    found = _survey_once(folder_fd)
    for _ in range(_NUM_LOOKS - 1):
        if not found.damaged and not found.broken_manifests:
            break
        time.sleep(_SECONDS_BETWEEN_LOOKS)
        before, found = found, _survey_once(folder_fd)
        if found == before:
            break
    return found


def _survey_once(folder_fd: int) -> Survey:
    try:
        with os.scandir(folder_fd) as entries:
            names = sorted(entry.name for entry in entries)
    except OSError as error:
        raise GroupFileError(f"Cannot list the folder: {error.strerror}.") from error
    manifests, broken, findings = {}, {}, []
    for name in names:
        with suppress(FileNotFoundError):  # it has just gone
            status = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
            is_file = stat.S_ISREG(status.st_mode)
            if is_file and MANIFEST_FILE.fullmatch(name):
                try:
                    with open_manifest(name, folder_fd) as (fd, manifest):
                        if manifest.edited_in and claim(fd, strictly=True):
                            findings.append(Finding(name, Kind.ABANDONED, status.st_size, is_ours=True))
                        else:
                            manifests[name] = manifest
                except GroupFileError as error:
                    broken[name] = str(error)
            elif is_file and GROUP_FILE.fullmatch(name):
                findings.append(_look_at(name, folder_fd, status.st_size))
            elif is_file and TEMPORARY_FILE.fullmatch(name):
                findings.append(Finding(name, Kind.TEMPORARY, status.st_size, is_ours=True))
            else:
                findings.append(Finding(name, Kind.FOREIGN, status.st_size))
    return Survey(tuple(_with_manifests(findings, manifests)), manifests, broken)


def verify(folder_fd: int, found: Survey, on_read: Callable[[int], None]) -> Survey:
    """Read the data of every group file, and find those whose content is not what their header says."""
    findings = (_verify_one(finding, folder_fd, on_read) for finding in found.findings)
    return replace(found, findings=tuple(finding for finding in findings if finding is not None))


def removable(found: Survey) -> tuple[Finding, ...]:
    """What no manifest needs: group files that we wrote, and temporary files. They may be in use.

    Raises:
        GroupFileError: a manifest cannot be read, so that nobody knows what it needs.
    """
    for name, problem in found.broken_manifests.items():
        raise GroupFileError(
            f"Cannot tell which files {name!r} needs: {problem}. Upgrade group-offload if a later one wrote it, or delete it "
            f"if nobody needs its model."
        )
    return tuple(
        finding
        for finding in found.findings
        if finding.is_ours and not finding.manifests and finding.kind is not Kind.LATER
    )


def remove(finding: Finding, folder_fd: int) -> bool:
    """Delete a file that `removable` gave, under the folder's lock.

    Returns:
        Whether it was: not if a process of this machine uses or writes it.

    Raises:
        OSError: the system said no.
    """
    fd = open_to_read(finding.name, folder_fd)
    try:
        if not claim(fd):
            return False
        os.unlink(finding.name, dir_fd=folder_fd)
        return True
    finally:
        os.close(fd)


def _look_at(name: str, folder_fd: int, num_bytes: int) -> Finding:
    """
    Raises:
        FileNotFoundError: it is not there any more.
    """
    header: Header | None = None
    try:
        fd = open_to_read(name, folder_fd)
        try:
            num_bytes = os.fstat(fd).st_size
            header = read_header(fd)
        finally:
            os.close(fd)
        if not header.is_ours:  # diffusers has such names too
            return Finding(name, Kind.FOREIGN, num_bytes)
        if header.version != FORMAT_VERSION:
            kind = Kind.OUTDATED if header.version in OUTDATED_VERSIONS else Kind.LATER
            return Finding(name, kind, num_bytes, version=header.version, is_ours=True)
        group = check_group_header(header, num_bytes)
        return Finding(name, Kind.GROUP, num_bytes, group, FORMAT_VERSION, is_ours=True)
    except GroupFileError as error:
        return _damaged(Finding(name, Kind.DAMAGED, num_bytes, is_ours=header is not None), str(error))
    except FileNotFoundError:
        raise
    except OSError as error:
        return _damaged(Finding(name, Kind.DAMAGED, num_bytes), f"it cannot be read: {error.strerror or error}")


def _verify_one(finding: Finding, folder_fd: int, on_read: Callable[[int], None]) -> Finding | None:
    """None if the file is not there any more, and no manifest needs it."""
    if finding.group is None:
        return finding
    try:
        fd = open_to_read(finding.name, folder_fd)
        try:
            num_bytes = os.fstat(fd).st_size
            group = check_group_header(read_header(fd), num_bytes)  # another one may have its name by now
            content = content_of_file(fd, num_bytes - group.layout.num_bytes, on_read)
        finally:
            os.close(fd)
    except FileNotFoundError:  # its process has just put another one in its place
        return finding if finding.manifests else None
    except GroupFileError as error:
        return _damaged(finding, str(error))
    except OSError as error:
        return _damaged(finding, f"it cannot be read: {error.strerror or error}")
    if content != group.content:
        return _damaged(finding, f"its data is not what was written: its hash is {content}, not {group.content}")
    return finding


def _with_manifests(findings: list[Finding], manifests: dict[str, Manifest]) -> Iterator[Finding]:
    """The findings, and what manifests need that is not there, with the manifests that need them."""
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
