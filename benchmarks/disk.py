"""Files: the plainest reader of them, which others are compared with, what the page cache holds, and checkpoints."""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn

from .machine import GIB, QUIET, say
from .models import Model, make_model

READ_BYTES = 16 << 20
DRIVE_BYTES = 4 << 30
"""How much of the files is read, at least, to tell the disk's speed."""
NUM_THREADS = 8
_BLOCK = 4096


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def size_of(files: Sequence[Path]) -> int:
    return sum(file.stat().st_size for file in files)


# ------------------------------------------------------------------------------------------------ reading


def read_all(files: Sequence[Path], *, direct: bool) -> float:
    """Seconds that it takes to read all of the files with 8 threads, 16 MiB at a time, each into the same memory.

    Args:
        direct: past the page cache.

    Raises:
        OSError: this file system has no direct reads, say.
    """
    # A mapping of its own for each thread: aligned to pages, as direct reads have it, and touched before time is taken.
    buffers: SimpleQueue[mmap.mmap] = SimpleQueue()
    for _ in range(NUM_THREADS):
        buffer = mmap.mmap(-1, READ_BYTES)
        buffer.write(bytes(READ_BYTES))
        buffers.put(buffer)
    fds = [os.open(file, os.O_RDONLY | (os.O_DIRECT if direct else 0)) for file in files]

    def read(part: tuple[int, int]) -> None:
        (fd, at), buffer = part, buffers.get()
        end = min(at + READ_BYTES, os.fstat(fd).st_size)
        try:
            with memoryview(buffer) as memory:
                while at < end:
                    count = os.preadv(fd, [memory[: -(-(end - at) // _BLOCK) * _BLOCK]], at)
                    # A direct read goes on at a block.
                    count = count if at + count >= end else count // _BLOCK * _BLOCK
                    if not count:
                        raise OSError(f"the file cannot be read beyond byte {at}")
                    at += count
        finally:
            buffers.put(buffer)

    try:
        start = time.perf_counter()
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            list(pool.map(read, [(fd, at) for fd in fds for at in range(0, os.fstat(fd).st_size, READ_BYTES)]))
        return time.perf_counter() - start
    finally:
        for fd in fds:
            os.close(fd)


def measure_drive(files: Sequence[Path], speeds: list[float], at_most: int = 2) -> None:
    """Add the bytes a second that a plain reader gets past the page cache to `speeds`, unless it has `at_most` already.

    The largest files are read. Nothing is added where the file system has no direct reads.
    """
    if len(speeds) >= at_most:
        return
    chosen: list[Path] = []
    for file in sorted(files, key=lambda file: file.stat().st_size, reverse=True):
        if size_of(chosen) < DRIVE_BYTES:
            chosen.append(file)
    try:
        speeds.append(size_of(chosen) / read_all(chosen, direct=True))
    except OSError as error:
        say(f"the disk's speed is not known: {error}")
    else:
        say(f"plain reader, {NUM_THREADS} threads: {speeds[-1] / 1e9:.2f} GB/s")


def drop_page_cache(files: Sequence[Path], *, may_drop_all: bool) -> None:
    """Let the page cache forget these files.

    Args:
        may_drop_all: let it forget everything (which only root may do), for what is left of them.
    """
    for file in files:
        with suppress(OSError), file.open("rb") as opened:
            os.fsync(opened.fileno())  # what is not on the disk yet cannot be dropped
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if may_drop_all:
        os.sync()
        with suppress(OSError):
            Path("/proc/sys/vm/drop_caches").write_text("3\n")


def transferred() -> dict[str, int]:
    """Bytes that this process has had read from disks, and written to them; {} where the kernel does not tell."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return {}
    fields = dict(line.split(": ") for line in lines)
    return {name: int(fields[name]) for name in ("read_bytes", "write_bytes") if name in fields}


# ------------------------------------------------------------------------------------------------ checkpoints


@contextmanager
def checkpoint_folder(options: argparse.Namespace) -> Iterator[Path]:
    """The folder of the checkpoint: the user's, which stays, or a temporary one."""
    if options.checkpoint is not None:
        yield options.checkpoint
        return
    with tempfile.TemporaryDirectory(prefix="group-offload-checkpoint-", dir=options.disk) as folder:
        yield Path(folder)


def make_checkpoints(models: Mapping[Path, Model], device: str, shard_bytes: int | None = 5 << 30) -> None:
    """Save those checkpoints that are not in their folders yet. The program ends if that fails.

    It happens in a process of its own, so that this one needs no memory of the device.

    Args:
        shard_bytes: the most that a file has; None: what `save_pretrained` takes.
    """
    if missing := {folder: model for folder, model in models.items() if not (folder / "config.json").exists()}:
        apart(save, missing, device, shard_bytes)


def apart(work: Callable[..., None], *args: Any) -> None:
    process = multiprocessing.get_context("spawn").Process(target=work, args=args)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit("The checkpoint could not be saved.")


def save(models: Mapping[Path, Model], device: str, shard_bytes: int | None) -> None:
    """Write the weights of `make_model`. They are on the disk, and in the page cache, afterwards."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    for folder, model in models.items():
        module: Any = make_model(model, torch.device(device), resident=False)
        module.save_pretrained(folder, **({} if shard_bytes is None else {"max_shard_size": shard_bytes}))
        for file in files_in(folder):
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        say(f"checkpoint of {model.name}: {size_of(files_in(folder)) / GIB:.2f} GiB")


def load(model: Model, folder: Path) -> nn.Module:
    """The model of a checkpoint: its weights are views of the files."""
    module: nn.Module = model.module_class.from_pretrained(folder, dtype=model.dtype)
    return module.eval().requires_grad_(False)
