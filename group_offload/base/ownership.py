"""Which files in a folder of ours may be believed.

[Note: Files of others]
What a group file or a compressed file says decides what is computed. So each of them is opened by `Owners.open`, and
believed only if no other user can have written it, and none can write to it:

- It is a regular file, under its own name: links are not followed.
- It belongs to root or to the user of this process, and nobody else may write to it.
- Others may not write to its folder, or may not replace files there (the sticky bit). In a folder where they may, a folder that
  belongs to the user alone is used (`own_folder`).

A network file system may give new files another owner, and a file system without modes lets everybody write. `learn` finds that
out from a file that this process has just made.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from .system import IS_WINDOWS, open_to_read, user


class ForeignFileError(OSError):
    """A file that another user could have written."""


class Owners:
    """The users whose files in a folder are believed. See [Note: Files of others]."""

    def __init__(self) -> None:
        self._users = {0, user()}
        self._others = 0 if IS_WINDOWS else stat.S_IWGRP | stat.S_IWOTH
        """The bits of a mode that let others write."""

    def learn(self, made: os.stat_result) -> None:
        """
        Args:
            made: what `fstat` says of a file that this process has just made, for itself alone.
        """
        self._users.add(made.st_uid)
        self._others &= ~made.st_mode

    def check_folder(self, path: Path) -> None:
        """
        Raises:
            ForeignFileError: others can replace files in the folder, or lead its name elsewhere.
        """
        self._check_link(path)
        if self.is_open_to_all(path):
            raise ForeignFileError("every user can replace files in it")

    def is_open_to_all(self, path: Path) -> bool:
        """Whether every user can replace files in a folder."""
        mode = os.stat(path).st_mode
        return bool(mode & self._others & stat.S_IWOTH) and not mode & stat.S_ISVTX

    def own_folder(self, path: Path) -> Path:
        """A folder for this user alone, in one that is open to all. It is made if it is not there.

        Raises:
            ForeignFileError: another user has taken its name, or could write to it.
        """
        self._check_link(path)
        own = path / f"group_offload_{user()}"
        own.mkdir(0o700, exist_ok=True)
        try:
            self.check(os.lstat(own))  # the mode of a link lets everybody write
        except ForeignFileError as error:
            raise ForeignFileError(
                f"every user can replace files in it, and {own.name} there can't be used: {error}"
            ) from None
        return own

    def _check_link(self, path: Path) -> None:
        name = os.lstat(path)
        if stat.S_ISLNK(name.st_mode) and name.st_uid not in self._users:
            raise ForeignFileError(f"it is a link of another user (uid {name.st_uid})")

    def check(self, found: os.stat_result) -> None:
        """
        Args:
            found: what `fstat` says of a file.

        Raises:
            ForeignFileError: another user could have written it.
        """
        if found.st_uid not in self._users:
            raise ForeignFileError(f"it belongs to another user (uid {found.st_uid})")
        if found.st_mode & self._others:
            raise ForeignFileError(f"others can write to it (its mode is {stat.S_IMODE(found.st_mode):o})")

    def open(self, path: Path) -> Any:
        """Open a file that may be believed: see `open_to_read`.

        Raises:
            ForeignFileError: another user could have written it.
            OSError: it cannot be opened, or is not a regular file.
        """
        opened = open_to_read(path)
        self.check_folder(path.parent)
        self.check(os.fstat(opened.fileno()))
        return opened
