"""The page map of this process, which a test may refuse as a system does."""

from __future__ import annotations

import errno
import fcntl
import os
from typing import Any

import pytest

from group_offload.base import pagemap

from .files import failing


class PageMap:
    """Decides whether this process may open its page map."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._code = 0
        real = os.open

        def open_(path: Any, *args: Any, **kwargs: Any) -> int:
            if path == "/proc/self/pagemap" and self._code:
                raise OSError(self._code, os.strerror(self._code), path)
            return real(path, *args, **kwargs)

        patch.setattr(os, "open", open_)
        self._patch = patch

    def refuse_scans(self) -> None:
        """As before Linux 6.7: entries can be read, and there is no `PAGEMAP_SCAN`."""
        self._patch.setattr(fcntl, "ioctl", failing(errno.ENOTTY))
        pagemap._Known.forget()

    def refuse(self, code: int = errno.EACCES) -> None:
        """The next look fails, as it does in a forked child with fewer rights."""
        self._code = code
        pagemap._Known.forget()

    def allow(self, *, forgets: bool = True) -> None:
        self._code = 0
        if forgets:
            pagemap._Known.forget()
