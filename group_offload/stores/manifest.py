"""Manifests: which group files a model needs, one small JSON file a model in the folder of its files."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import GroupFileError
from .publish import open_to_read, publish_anew
from .reading import read_part
from .strict_json import as_size, as_text, parse

logger = logging.getLogger("group_offload")

GROUP_FILE = re.compile(r"group_[0-9a-f]{16}\.safetensors")
MANIFEST_FILE = re.compile(r"manifest_[A-Za-z0-9_]{0,64}_[0-9a-f]{16}\.json")
TEMPORARY_FILE = re.compile(rf"\.(?:{GROUP_FILE.pattern}|{MANIFEST_FILE.pattern}|probe)\.[0-9]+\.[0-9a-f]{{8}}\.tmp")

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
    """What one model needs. Equal models have equal manifests."""

    model_class: str
    entries: tuple[ManifestEntry, ...]
    """Sorted."""

    @property
    def file_name(self) -> str:
        """By the class and what the groups hold, not by where: so it stays when a file has to be written again."""
        identity = json.dumps([self.model_class, [[entry.group_id, entry.content] for entry in self.entries]])
        readable = re.sub(r"[^A-Za-z0-9_]", "_", self.model_class)[:64]
        return f"manifest_{readable}_{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)

    def encode(self) -> bytes:
        """The bytes of the file."""
        content = {
            "kind": _KIND,
            "version": _VERSION,
            "model_class": self.model_class,
            "groups": [asdict(entry) for entry in self.entries],
        }
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
        return cls(as_text(content.get("model_class")), tuple(sorted(_entry(group) for group in groups)))


def read_manifest(name: str | Path, dir_fd: int | None = None) -> Manifest:
    """
    Raises:
        GroupFileError: it cannot be read, or is no manifest.
    """
    try:
        fd = open_to_read(name, dir_fd)
        try:
            size = os.fstat(fd).st_size
            if size > _MAX_BYTES:
                raise GroupFileError(f"it takes {size:,} bytes, which no manifest does")
            data = bytearray(size)
            return Manifest.decode(bytes(data[: read_part(fd, memoryview(data), 0)]))
        finally:
            os.close(fd)
    except GroupFileError:
        raise
    except OSError as error:
        raise GroupFileError(f"it cannot be read: {error.strerror or error}") from error


def publish_manifest(folder: Path, manifest: Manifest) -> tuple[Path, bool] | None:
    """Make sure that the folder has the manifest.

    Returns:
        Its path and whether it was written now, or None if it cannot be written or its name is somebody else's: then
        the log says so.
    """
    path = folder / manifest.file_name
    is_new = True
    if os.path.lexists(path):
        is_new = False
        try:
            if read_manifest(path) == manifest:
                return path, False
        except GroupFileError as error:
            logger.warning("%s is in the way of a manifest: %s. It was left alone.", path, error)
            return None
    try:
        publish_anew(path, manifest.encode())
    except OSError as error:
        logger.warning(
            "Cannot write %s: %s. The model works all the same; `group-offload prune` would take its files for unneeded.",
            path,
            error.strerror,
        )
        return None
    return path, is_new


def _entry(group: object) -> ManifestEntry:
    if not isinstance(group, dict):
        raise GroupFileError("one of its groups is not an object")
    file, content = as_text(group.get("file")), as_text(group.get("content"))
    if not GROUP_FILE.fullmatch(file):  # nothing that leads out of the folder
        raise GroupFileError(f"it names {file!r:.80}, which is no name of a group file")
    return ManifestEntry(as_text(group.get("group_id")), file, content, as_size(group.get("num_bytes")))
