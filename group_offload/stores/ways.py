"""The way in which each file is read, as the available RAM allows: page-locked, cached, or directly."""

from __future__ import annotations

from collections.abc import Sequence

from ..base.ram import available_ram
from ..base.tuning import tuning
from .files import FileBlob


def choose_ways(blobs: Sequence[FileBlob], *, may_lock: bool) -> list[FileBlob]:
    """Decide how each blob is read. See [Note: Ways to read a file].

    Returns:
        The blobs to lock once they are in the page cache: all of them if they fit into `Tuning.locked_share` of the available
        RAM, else none.
    """
    num_bytes = sum(blob.layout.num_bytes for blob in blobs)
    if not num_bytes:
        return []
    available = available_ram()
    to_lock = may_lock and num_bytes <= available * tuning().locked_share
    # The same share of blobs is cached in each pass. If all were to be cached, each would drive out the next, and none
    # would be found in the cache.
    share = min(1.0, available / 2 / num_bytes)
    credit = 0.0
    for blob in blobs:
        credit += share * blob.layout.num_bytes
        blob.is_direct = not to_lock and credit < blob.layout.num_bytes * (1 - 1e-9)
        if blob.is_direct:
            blob.source.avoid_readahead()
        else:
            credit -= blob.layout.num_bytes
    return [blob for blob in blobs if blob.layout.num_bytes] if to_lock else []
