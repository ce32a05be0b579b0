"""Manifests: which group files a model needs, one small JSON file a model in the folder of its files."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..base.publish import boot, claim, mark_in_use, open_to_read, publish_anew
from ..base.reading import read_part
from ..base.strict_json import as_size, as_text, parse
from ..errors import GroupFileError
from .safetensors_file import CONTENT_KEY, printable_id, read_header

logger = logging.getLogger("group_offload")

GROUP_FILE = re.compile(r"group_[0-9a-f]{16}\.safetensors")
MANIFEST_FILE = re.compile(r"manifest_[A-Za-z0-9_]{0,64}_[0-9a-f]{16}\.json")
TEMPORARY_FILE = re.compile(
    rf"\.(?:{GROUP_FILE.pattern}|{MANIFEST_FILE.pattern}|probe)\.[0-9]+\.([0-9a-f]{{8}})?[0-9a-f]{{8}}\.tmp"
)
"""Its group is the boot of the machine that wrote it."""

_KIND = "group_offload.manifest"
_VERSION = 1
_MAX_BYTES = 100_000_000


@dataclass(frozen=True, slots=True, order=True)
class ManifestEntry:
    """One group file that a model needs."""

    group_id: str
    file: str
    """The file's name in the folder."""
    content: str
    """xxh3_128 of the data section, in hex."""
    num_bytes: int
    """Of the file."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one model needs. Equal models have equal manifests.

    [Note: Manifests of edited weights]
    What a model needs when it is set up stays needed: for whoever comes next. What it needs after an edit is needed for as
    long as it lives, so it holds a shared lock on such a manifest for that long. One without a lock is *abandoned*: it counts
    no more. `tidy` removes it at the end of the next set-up, if it is of this boot of the machine: else it may be another
    machine's, whose locks nobody sees here.
    """

    model_class: str
    entries: tuple[ManifestEntry, ...]
    """Sorted."""
    edited_in: str = field(default="", compare=False)
    """If the weights were edited after they were set up: the boot of the machine that the process runs on."""

    @property
    def file_name(self) -> str:
        """By the class and what the groups hold, not by where: so it stays when a file has to be written again."""
        identity = json.dumps(
            [self.model_class, [[printable_id(entry.group_id), entry.content] for entry in self.entries]]
        )
        readable = re.sub(r"[^A-Za-z0-9_]", "_", self.model_class)[:64]
        return f"manifest_{readable}_{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)

    def encode(self) -> bytes:
        """The bytes of the file."""
        groups = [asdict(entry) | {"group_id": printable_id(entry.group_id)} for entry in self.entries]
        content: dict[str, object] = {
            "kind": _KIND,
            "version": _VERSION,
            "model_class": self.model_class,
            "groups": groups,
        }
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


def read_manifest(name: str | Path, dir_fd: int | None = None) -> Manifest:
    """
    Raises:
        FileNotFoundError: it is not there.
        GroupFileError: it cannot be read, or is no manifest.
    """
    with open_manifest(name, dir_fd) as (_, manifest):
        return manifest


@contextmanager
def open_manifest(name: str | Path, dir_fd: int | None = None) -> Iterator[tuple[int, Manifest]]:
    """The same, and a descriptor of the file."""
    try:
        fd = open_to_read(name, dir_fd)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise GroupFileError(f"it cannot be read: {error.strerror or error}") from error
    try:
        yield fd, _read(fd)
    finally:
        os.close(fd)


def _read(fd: int) -> Manifest:
    try:
        size = os.fstat(fd).st_size
        if size > _MAX_BYTES:
            raise GroupFileError(f"it takes {size:,} bytes, which no manifest does")
        data = bytearray(size)
        return Manifest.decode(bytes(data[: read_part(fd, memoryview(data), 0)]))
    except GroupFileError:
        raise
    except OSError as error:
        raise GroupFileError(f"it cannot be read: {error.strerror or error}") from error


def publish_manifest(folder: Path, manifest: Manifest) -> tuple[Path, bool, int | None] | None:
    """Make sure that the folder has the manifest.

    Returns:
        Its path, whether it was written now, and, of a manifest of edited weights, a descriptor to hold for as long as the
        model lives; or None if it cannot be written or its name is somebody else's: then the log says so.
    """
    path = folder / manifest.file_name
    is_new = True
    try:
        with open_manifest(path) as (fd, found):
            is_new = False
            if found == manifest and not found.edited_in:
                return path, False, None
            if found == manifest and manifest.edited_in == found.edited_in:
                with suppress(OSError):  # somebody takes it away
                    mark_in_use(fd)
                    return path, False, os.dup(fd)
    except FileNotFoundError:
        pass
    except GroupFileError as error:
        logger.warning("%s is in the way of a manifest: %s. It was left alone.", path, error)
        return None
    try:
        held = publish_anew(path, manifest.encode())
    except OSError as error:
        logger.warning(
            "Cannot write %s: %s. The model works all the same; `group-offload prune` would take its files for unneeded.",
            path,
            error.strerror,
        )
        return None
    if not manifest.edited_in:
        os.close(held)
        return path, is_new, None
    return path, is_new, held


def tidy_manifests(folder: Path, model_class: str) -> None:
    """Remove what models of a class needed that were edited and have died, and that no other model needs or uses.

    Call it when a model of that class has all its files: what it has in common with them it uses by now.
    """
    needed: set[str] = set()
    abandoned: list[tuple[int, str, Manifest]] = []
    with ExitStack() as opened, suppress(OSError):  # GroupFileError too: nobody knows what that manifest needs
        for name in _files_in(folder, MANIFEST_FILE):
            with suppress(FileNotFoundError), ExitStack() as kept:
                fd, manifest = kept.enter_context(open_manifest(folder / name))
                is_ours = manifest.edited_in and (manifest.edited_in, manifest.model_class) == (boot(), model_class)
                if is_ours and claim(fd, strictly=True):
                    abandoned.append((fd, name, manifest))
                    opened.enter_context(kept.pop_all())
                else:
                    needed.update(entry.file for entry in manifest.entries)
        for fd, name, manifest in abandoned:
            for entry in manifest.entries:
                if entry.file not in needed:
                    _remove_unused(folder / entry.file, entry)
            if os.fstat(fd).st_nlink:  # nobody has put another one in its place
                os.unlink(folder / name)


def tidy_temporary_files(folder: Path) -> None:
    """Remove what processes were writing, on this boot of the machine, when they died."""
    with suppress(OSError):
        for name, found in _files_in(folder, TEMPORARY_FILE).items():
            if found[1] and found[1] == boot():
                _remove_unused(folder / name)


def _files_in(folder: Path, pattern: re.Pattern[str]) -> dict[str, re.Match[str]]:
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    return {name: found for name in names if (found := pattern.fullmatch(name)) is not None}


def _remove_unused(path: Path, entry: ManifestEntry | None = None) -> None:
    """Remove a file that nobody uses or writes, if it is what `entry` says: a name alone may be somebody else's."""
    with suppress(OSError):
        fd = open_to_read(path)
        try:
            is_ours = entry is None or read_header(fd).metadata.get(CONTENT_KEY) == entry.content
            if is_ours and claim(fd, strictly=True) and os.fstat(fd).st_nlink:
                os.unlink(path)
        finally:
            os.close(fd)


def _entry(group: object) -> ManifestEntry:
    if not isinstance(group, dict):
        raise GroupFileError("one of its groups is not an object")
    file, content = as_text(group.get("file")), as_text(group.get("content"))
    if not GROUP_FILE.fullmatch(file):  # nothing that leads out of the folder
        raise GroupFileError(f"it names {file!r:.80}, which is no name of a group file")
    return ManifestEntry(as_text(group.get("group_id")), file, content, as_size(group.get("num_bytes")))
