"""The files of a module that are pinned in the page cache, and how the others are read."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from ...base.ram import available_ram, pinned
from ...base.tuning import tuning
from ...config import OffloadConfig
from ...plan.budgets import describe_bytes
from ...stores.files import FileBlob
from ...stores.source import Piece, SourceFile

logger = logging.getLogger("group_offload")

MAX_LOCKING_SECONDS = 1.0
"""After this many seconds no more files are pinned before the next pass."""
MIN_FREE_RAM_BYTES = 256 << 20
"""With less available RAM than this, pinned files are unpinned."""
_NEARLY_ALL = 0.95
"""The share of its bytes that is read when a whole blob is read: blobs are padded."""
_RELIEF_PART = 4
"""When RAM runs short one in four pinned blobs is unpinned, and no more for `Tuning.relief_seconds`."""


class PageCachePins:
    """The blobs of a module that are stored in files. Used under the engine's lock, between passes.

    A file is pinned only once it is in the page cache: mostly after it was read in a pass.
    """

    def __init__(self, config: OffloadConfig, wait: Callable[[], None]) -> None:
        """
        Args:
            wait: A function that returns once no copy is on its way: pages stay pinned until then.
        """
        self._backend = config.backend
        self._wait = wait
        self._may_pin = config.may_pin_files
        self.blobs: list[FileBlob] = []
        self.are_read = False
        """Whether some of the blobs are not pinned, so that passes read them."""
        self._to_pin: dict[SourceFile, list[FileBlob]] = {}
        self._looked_at = 0.0

    def begin(self, blobs: Sequence[FileBlob]) -> None:
        """The module was partitioned."""
        self.blobs = [blob for blob in blobs if blob.layout.num_bytes]
        self._to_pin = {}

    def choose_ways(self) -> None:
        """Decide by the available RAM how each blob is read: see [Note: Ways to read a file].

        All are to be pinned, once they are in the page cache, if they fit into `Tuning.pinned_share` of the RAM; else none.
        """
        read = [blob for blob in self.blobs if blob.compressed is None]
        num_bytes, available = sum(blob.layout.num_bytes for blob in read), available_ram()
        if self._may_pin and num_bytes <= available * tuning().pinned_share:
            for blob in read:
                blob.is_direct = False
                self._to_pin.setdefault(blob.source, []).append(blob)
            return
        # The same share of blobs is cached in each pass. If all were to be cached, each would drive out the next, and none
        # would be found in the cache.
        share, credit = min(1.0, available / 2 / max(1, num_bytes)), 0.0
        for blob in read:
            credit += share * blob.layout.num_bytes
            blob.is_direct = credit < blob.layout.num_bytes * (1 - 1e-9)
            if blob.is_direct:
                blob.source.avoid_readahead()
            else:
                credit -= blob.layout.num_bytes

    def share_out(self, in_ram: Iterable[FileBlob]) -> None:
        """Pin the blobs `in_ram` once they are in the page cache. Read the others past the page cache."""
        chosen, by_source = set(in_ram), dict[SourceFile, list[FileBlob]]()
        for blob in self.blobs:
            by_source.setdefault(blob.source, []).append(blob)
        self._to_pin = {}
        for source, blobs in by_source.items():
            source.avoid_readahead()
            source.bytes_cached = 0
            wanted = [blob for blob in blobs if blob in chosen]
            there = [blob for blob in wanted if blob.is_pinned]
            if self._may_pin and len(there) < len(wanted):
                self._to_pin[source] = wanted
            if any(blob.is_pinned and blob not in chosen for blob in blobs):
                self._pin(source, there)
        for blob in self.blobs:
            blob.is_direct = blob not in chosen
        self.look()

    def lock_what_is_there(self, *, was_read: bool) -> None:
        """Pin the blobs that are in the page cache, for at most `MAX_LOCKING_SECONDS`.

        Args:
            was_read: Whether a pass should have brought the blobs there. If none is there, RAM is short: stop trying.
        """
        begun = time.perf_counter()
        for source, blobs in [*self._to_pin.items()]:
            missing = [blob for blob in blobs if not blob.is_pinned]
            if was_read and source.bytes_cached < sum(blob.layout.num_bytes for blob in missing) * _NEARLY_ALL:
                continue
            if time.perf_counter() - begun > MAX_LOCKING_SECONDS:
                break
            is_cached = source.is_cached
            there = {blob for blob in missing if all(is_cached(each.position, each.num_bytes) for each in blob.pieces)}
            if there:
                self._pin(source, [blob for blob in blobs if blob.is_pinned or blob in there])
            if len(there) == len(missing) or (was_read and not there):
                del self._to_pin[source]
            elif was_read:
                source.bytes_cached = 0  # the others are read once more
        self.look()

    def before_pass(self, name: str) -> None:
        """Give up RAM if the system runs short of it, and pin the files that were read."""
        self._relieve(name)
        if self._to_pin:
            self.lock_what_is_there(was_read=True)

    def _relieve(self, name: str) -> None:
        """If RAM runs short, unpin a part of the blobs, evenly spread. These are read in each pass from then on."""
        now = time.monotonic()
        if now - self._looked_at < tuning().relief_seconds or not pinned.num_bytes:
            return
        self._looked_at = now  # the kernel may take milliseconds to tell, so not in each pass
        if available_ram() >= MIN_FREE_RAM_BYTES:
            return
        there = [blob for blob in self.blobs if blob.is_pinned]
        unpinned = set(there[::_RELIEF_PART])
        if not unpinned:
            return
        for blob in unpinned:
            blob.is_direct = True
        for source in {blob.source for blob in unpinned}:
            self._pin(source, [blob for blob in there if blob.source is source and blob not in unpinned])
            self._to_pin.pop(source, None)
        self.look()
        logger.warning(
            "Low on RAM: unpinned %s of %s. These weights are now read from disk in every forward.",
            describe_bytes(sum(blob.layout.num_bytes for blob in unpinned)),
            name,
        )

    def _pin(self, source: SourceFile, blobs: Sequence[FileBlob]) -> None:
        pieces: list[Piece] = [piece for blob in blobs for piece in blob.pieces]
        source.lock(pieces, self._backend, self._wait)

    def look(self) -> None:
        """Find out whether some blobs are not pinned."""
        self.are_read = any(blob.is_read for blob in self.blobs)
