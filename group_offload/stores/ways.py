"""The way in which each file is read, as the available RAM allows: page-locked, cached, or directly."""

from __future__ import annotations

from collections.abc import Sequence

from ..base.ram import available_ram
from .files import FileImage

LOCKED_SHARE = 0.5
"""Share of the available RAM that may be page-locked when no ram_budget is given."""


def choose_ways(images: Sequence[FileImage], *, may_lock: bool) -> list[FileImage]:
    """Decide how each image is read. See [Note: Ways to read a file].

    Returns:
        The images to lock once they are in the page cache: all of them if they fit into `LOCKED_SHARE` of the available
        RAM, else none.
    """
    num_bytes = sum(image.layout.num_bytes for image in images)
    if not num_bytes:
        return []
    available = available_ram()
    to_lock = may_lock and num_bytes <= available * LOCKED_SHARE
    # The same share of images is cached in each pass. If all were to be cached, each would drive out the next, and none
    # would be found in the cache.
    share = min(1.0, available / 2 / num_bytes)
    credit = 0.0
    for image in images:
        credit += share * image.layout.num_bytes
        image.is_direct = not to_lock and credit < image.layout.num_bytes * (1 - 1e-9)
        if image.is_direct:
            image.source.avoid_readahead()
        else:
            credit -= image.layout.num_bytes
    return [image for image in images if image.layout.num_bytes] if to_lock else []
