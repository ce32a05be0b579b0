"""Reads of files that a test can watch, hold back, reorder and cut into small pieces."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils.hooks import RemovableHandle

from group_offload.runtime.transfers import reader
from group_offload.runtime.transfers.reader import Reader
from group_offload.stores.source import SourceFile

from .models import RoutedModel
from .simulated import SimulatedDevice
from .tuning import tune


@contextmanager
def watch_file_reads(device: SimulatedDevice) -> Iterator[None]:
    """Tell the device of what the file tier writes into host memory behind torch's back."""
    read = SourceFile.read

    def watched(self: SourceFile, area: memoryview, position: int, num_bytes: int, *, direct: bool) -> bool:
        assert area, "staging memory was given back before it was read into"
        device.host_access(torch.frombuffer(area, dtype=torch.uint8), write=True)
        return read(self, area, position, num_bytes, direct=direct)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SourceFile, "read", watched)
        yield


class HeldReads(threading.Event):
    """Some reads wait from `close` on until `open`."""

    open, close = threading.Event.set, threading.Event.clear


@contextmanager
def held_reads(*names: str) -> Iterator[HeldReads]:
    """Reads for groups whose names begin like this can be held; there are threads enough for the others."""
    held, read = HeldReads(), Reader._read
    threads = ThreadPoolExecutor(16)

    def reading(self: Reader, job: Any, chunk: Any) -> None:
        if any(each.label.startswith(names) for each in chunk.reads):
            assert held.wait(60)
        read(self, job, chunk)

    held.open()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "on_pool", threads.submit)
        patch.setattr(reader, "num_threads", lambda: 16)
        patch.setattr(Reader, "_read", reading)
        try:
            yield held
        finally:
            held.open()
            threads.shutdown()


def hold_what_the_next_pass_needs(model: RoutedModel, held: HeldReads) -> RemovableHandle:
    """Close when the first block is there, before its memory goes to others and it can be read for the next pass."""
    return model.blocks[0].down.register_forward_pre_hook(lambda *_: held.close())


@contextmanager
def many_frames() -> Iterator[None]:
    """The staging memory has room for all that is on its way, although the model is small."""
    with pytest.MonkeyPatch.context() as patch:
        tune(patch, chunk_bytes=4096, leaf_chunk_bytes=4096)
        yield


@contextmanager
def late_reads(rng: random.Random) -> Iterator[None]:
    """Files are read late and in any order, in small pieces with room for few of them, directly or not."""
    threads = ThreadPoolExecutor(4)

    def submit(task: Callable[..., Any], *args: Any) -> Any:
        delay = rng.choice([0, 0, 0.001, 0.004])

        def later() -> Any:
            time.sleep(delay)
            return task(*args)

        return threads.submit(later)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "on_pool", submit)
        patch.setattr(reader, "num_threads", lambda: rng.choice([1, 2, 3]))
        num_frames, chunk_bytes = rng.choice([1, 2, 5]), rng.choice([2 * 4096, 3 * 4096, 16 << 20])
        tune(patch, num_frames=num_frames, num_leaf_frames=num_frames)
        tune(patch, chunk_bytes=chunk_bytes, leaf_chunk_bytes=chunk_bytes)
        if rng.random() < 0.5:
            patch.setattr("group_offload.runtime.transfers.page_cache_pins.available_ram", lambda: 0)
            patch.setattr(SourceFile, "is_cached", lambda *args: rng.random() < 0.2)
        yield
    threads.shutdown()
