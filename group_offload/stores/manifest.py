"""Manifests: one small JSON file for each model, which lists the group files that the model needs."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from ..base.mapping import map_file
from ..base.ownership import ForeignFileError, Owners
from ..base.publish import boot, claim, mark_in_use, publish_anew, remove_unused
from ..base.reading import read_part
from ..base.strict_json import as_size, as_text, parse
from ..errors import GroupFileError
from .safetensors_file import printable_id, read_header

logger = logging.getLogger("group_offload")

GROUP_FILE = re.compile(r"group_[0-9a-f]{16}\.safetensors")
MANIFEST_FILE = re.compile(r"manifest_[A-Za-z0-9_]{0,64}_[0-9a-f]{16}\.json")
TEMPORARY_FILE = re.compile(
    rf"\.(?:{GROUP_FILE.pattern}|{MANIFEST_FILE.pattern}|probe)\.[0-9]+\.([0-9a-f]{{8}})?[0-9a-f]{{8}}\.tmp"
)
"""The group of the expression is the boot of the machine that wrote the file."""

_KIND = "group_offload.manifest"
_VERSION = 1
_MAX_BYTES = 100_000_000


@dataclass(frozen=True, slots=True, order=True)
class ManifestEntry:
    """One group file that a model needs."""

    group_id: str
    file: str
    """The name of the file in the folder."""
    content: str
    """xxh3_128 of the data section, in hex."""
    num_bytes: int
    """The size of the file."""
    packed_from: PackedFrom | None = field(default=None, compare=False)
    """What a packed group file was made from, if that is in a file too."""


@dataclass(frozen=True, slots=True)
class PackedFrom:
    """The bytes that a packed group file was made from. See [Note: Whose a packed file is] in `packed_files`."""

    path: str
    """The checkpoint, or the plain group file."""
    source: str
    """Its facts, as `facts_of` gives them."""
    place: str
    """A hash of where the weights lie in it, and of where they go."""
    file: str
    """The facts of the packed group file."""

    @property
    def is_outdated(self) -> bool:
        """Whether the file that was packed is another one by now. (If it is not there, its drive may not be either.)"""
        try:
            return facts_of(os.stat(self.path)) != self.source
        except (OSError, ValueError):
            return False


def facts_of(found: os.stat_result) -> str:
    """What changes if a byte of the file does. See [Note: Which file it is] in `source`."""
    return f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}:{found.st_ctime_ns}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """The group files that one model needs. Equal models have equal manifests.

    [Note: Manifests of edited weights]
    The files that a model needs when it is set up stay needed, by whoever comes next. The files that it needs after an edit
    are needed for as long as the model lives, so it holds a shared lock on such a manifest for that long. A manifest of edited
    weights without a lock is *abandoned* and does not count any more. `tidy` removes it at the end of the next set-up if it is
    of this boot of the machine. Otherwise it may be another machine's, whose locks cannot be seen here.
    """

    model_class: str
    entries: tuple[ManifestEntry, ...]
    """Sorted."""
    edited_in: str = field(default="", compare=False)
    """The boot of the machine on which the weights were edited after their set-up. Empty if they were not edited."""

    @property
    def file_name(self) -> str:
        """The name follows from the class and the content of the groups. So it stays when a file has to be written again."""
        identity = json.dumps(
            [self.model_class, [[printable_id(entry.group_id), entry.content] for entry in self.entries]]
        )
        readable = re.sub(r"[^A-Za-z0-9_]", "_", self.model_class)[:64]
        return f"manifest_{readable}_{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"

    def encode(self) -> bytes:
        """The bytes of the file."""
        groups = [asdict(entry) | {"group_id": printable_id(entry.group_id)} for entry in self.entries]
        for group in groups:
            if group["packed_from"] is None:
                del group["packed_from"]
        content = {"kind": _KIND, "version": _VERSION, "model_class": self.model_class, "groups": groups}
        if self.edited_in:
            content["edited_in"] = self.edited_in
        return json.dumps(content, indent=1).encode() + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """
        Raises:
            GroupFileError: `data` is no manifest that this version can read.
        """
        content = parse(data)
        if not isinstance(content, dict) or content.get("kind") != _KIND:
            raise GroupFileError("it is not a manifest of group files")
        if content.get("version") != _VERSION:
            raise GroupFileError(f"another version wrote it: this one reads version {_VERSION}")
        groups = content.get("groups")
        if not isinstance(groups, list):
            raise GroupFileError("it lists no groups")
        entries = tuple(sorted(_entry(group) for group in groups))
        return cls(as_text(content.get("model_class")), entries, as_text(content.get("edited_in", "")))

    @classmethod
    def read(cls, fd: int) -> Manifest:
        """
        Raises:
            GroupFileError: the file is no manifest that this version can read. The message does not name the file.
            OSError: it cannot be read.
        """
        size = os.fstat(fd).st_size
        if size > _MAX_BYTES:
            raise GroupFileError(f"it takes {size:,} bytes, which no manifest does")
        data = bytearray(size)
        return cls.decode(bytes(data[: read_part(fd, memoryview(data), 0)]))

    def is_abandoned(self, fd: int) -> bool:
        """Whether the process that needed the manifest behind `fd` is gone. See [Note: Manifests of edited weights]."""
        return self.edited_in != "" and claim(fd, needs_locks=True)


def describe_problem(error: OSError) -> str:
    """Why a file of the folder is not a right one, for people."""
    return str(error) if isinstance(error, GroupFileError) else f"it cannot be read: {error.strerror or error}"


@dataclass(frozen=True, slots=True)
class PublishedManifest:
    """A manifest that is in the folder."""

    path: Path
    is_new: bool = False
    """Whether no file had its name before."""
    stamp: os.stat_result | None = None
    """What `fstat` says of the file, if it was written now."""
    lock: object = None
    """Holds the lock on a manifest of edited weights for as long as this object lives."""


def publish_manifest(folder: Path, manifest: Manifest, owners: Owners) -> PublishedManifest | None:
    """Make sure that the folder has the manifest.

    Returns:
        None if it cannot be written, or if another program's file has its name. The log says so.
    """
    path = folder / manifest.file_name
    is_new = True
    try:
        with owners.opened(path) as fd:
            found = Manifest.read(fd)
            is_new = False
            is_same = found == manifest and _facts(found) == _facts(manifest)
            if is_same and not found.edited_in:
                return PublishedManifest(path)
            if is_same and found.edited_in == manifest.edited_in:
                with suppress(OSError):  # another process removes it
                    mark_in_use(fd)
                    return PublishedManifest(path, lock=_lock_of(fd))
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("%s is in the way of a manifest: %s. It was left alone.", path, describe_problem(error))
        return None
    try:
        fd = publish_anew(path, manifest.encode())
    except OSError as error:
        logger.warning(
            "Cannot write %s: %s. The model works all the same, and packs its weights again next time.",
            path,
            error.strerror,
        )
        return None
    try:
        stamp = None
        with suppress(OSError):  # without it, the manifest is never deleted
            stamp = os.fstat(fd)
        return PublishedManifest(path, is_new, stamp, _lock_of(fd) if manifest.edited_in else None)
    finally:
        os.close(fd)


def _facts(manifest: Manifest) -> list[PackedFrom | None]:
    return [entry.packed_from for entry in manifest.entries]


def _lock_of(fd: int) -> object:
    """Keeps the lock that the descriptor has. It takes no descriptor."""
    with suppress(OSError):  # without it, the group files themselves are locked all the same
        return map_file(fd, 1)
    return None


def manifests_in(folder: Path, owners: Owners) -> dict[str, Manifest]:
    """The manifests of a folder that can be read and believed, by their names."""
    found = {}
    with suppress(OSError):
        for name in _files_in(folder, MANIFEST_FILE):
            with suppress(OSError), owners.opened(folder / name) as fd:
                found[name] = Manifest.read(fd)
    return found


def tidy_manifests(folder: Path, model_class: str, owners: Owners) -> None:
    """Remove the abandoned manifests of a class, and the group files that only they name and that are not in use.

    Call this when a model of that class has all its files: those that it shares with an abandoned manifest are in use by now.
    """
    needed: set[str] = set()
    abandoned: dict[str, Manifest] = {}
    with suppress(OSError):  # GroupFileError too: the files that such a manifest needs are not known
        for name in _files_in(folder, MANIFEST_FILE):
            with suppress(FileNotFoundError, ForeignFileError), owners.opened(folder / name) as fd:
                manifest = Manifest.read(fd)
                is_ours = (manifest.edited_in, manifest.model_class) == (boot(), model_class)
                if is_ours and manifest.is_abandoned(fd):
                    abandoned[name] = manifest
                else:
                    needed.update(entry.file for entry in manifest.entries)
        for name, manifest in abandoned.items():
            for entry in manifest.entries:
                if entry.file not in needed:
                    _remove_group_file(folder, entry, owners)
            # Last: if this process dies before, the next set-up finds the rest. A process that has come to the same weights
            # meanwhile has locked its files before it locked the manifest, so it keeps both.
            with suppress(FileNotFoundError):
                remove_unused(folder / name, owners, needs_locks=True)


def tidy_temporary_files(folder: Path, owners: Owners) -> None:
    """Remove the files that processes were writing, on this boot of the machine, when they died."""
    with suppress(OSError):
        for name, found in _files_in(folder, TEMPORARY_FILE).items():
            if found[1] and found[1] == boot():
                with suppress(OSError):
                    remove_unused(folder / name, owners, needs_locks=True)


def _files_in(folder: Path, pattern: re.Pattern[str]) -> dict[str, re.Match[str]]:
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    return {name: found for name in names if (found := pattern.fullmatch(name)) is not None}


def _remove_group_file(folder: Path, entry: ManifestEntry, owners: Owners) -> None:
    with suppress(OSError):
        remove_unused(
            folder / entry.file, owners, needs_locks=True, is_right=lambda fd: read_header(fd).content == entry.content
        )


def _entry(group: object) -> ManifestEntry:
    if not isinstance(group, dict):
        raise GroupFileError("one of its groups is not an object")
    file, content = as_text(group.get("file")), as_text(group.get("content"))
    if not GROUP_FILE.fullmatch(file):  # nothing that leads out of the folder
        raise GroupFileError(f"it names {file!r:.80}, which is no name of a group file")
    packed_from, facts = None, group.get("packed_from")
    if isinstance(facts, dict):
        packed_from = PackedFrom(*(as_text(facts.get(each.name)) for each in fields(PackedFrom)))
    return ManifestEntry(as_text(group.get("group_id")), file, content, as_size(group.get("num_bytes")), packed_from)
