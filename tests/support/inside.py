"""The one window into a running engine, for what no public call shows: threads, slots, what is on its way."""

from __future__ import annotations

from typing import Any

import torch

from group_offload import OffloadHandle
from group_offload.runtime.engine import Engine


def engine_of(handle: OffloadHandle) -> Engine:
    assert handle._engine is not None
    return handle._engine


def wait_until_enqueued(handle: OffloadHandle) -> None:
    """Return once all copies are enqueued whose bytes threads still read from files."""
    engine_of(handle).transfer.reader.wait_until_enqueued()


def slow_down(handle: OffloadHandle, cycles: int) -> None:
    """Let each copy to a real device begin late: a million cycles are about half a millisecond."""
    transfer = engine_of(handle).transfer
    send = transfer.send

    def slow_send(*args: Any, **kwargs: Any) -> Any:
        with transfer.stream:  # type: ignore[attr-defined]
            torch.cuda._sleep(cycles)
        return send(*args, **kwargs)

    transfer.send = slow_send  # type: ignore[method-assign]
