"""The one window into a running engine, for what no public call shows: threads, slots, what is on its way."""

from __future__ import annotations

from group_offload import OffloadHandle
from group_offload.runtime.engine import Engine


def engine_of(handle: OffloadHandle) -> Engine:
    assert handle._engine is not None
    return handle._engine


def wait_until_enqueued(handle: OffloadHandle) -> None:
    """Return once all copies are enqueued whose bytes threads still read from files."""
    engine_of(handle).transfer.reader.wait_until_enqueued()
