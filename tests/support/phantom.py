"""A second rank that is not there: it offers what the engine offers, or declines it, and gathers bring its shares."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from group_offload import config
from group_offload.base.layout import memory_of
from group_offload.base.system import new_shared_file, started_at
from group_offload.runtime import engine
from group_offload.runtime.sharing.board import BOARD_BYTES, Board, State
from group_offload.runtime.sharing.courier import Peer
from group_offload.runtime.sharing.crew import Crew
from group_offload.runtime.sharing.jobs import ShareJob
from group_offload.runtime.sharing.sharing import Part, Shareable, Sharing
from group_offload.stores.moves import Copy, Gather, PageableMemory, Read

from .tuning import tune


class PhantomBoard(Board):
    def __init__(self, rng: random.Random) -> None:
        super().__init__(new_shared_file(BOARD_BYTES), rank=0, num_ranks=2)
        self._rng = rng

    @contextmanager
    def change(self) -> Iterator[State]:
        with super().change() as state:
            yield state
            state.enqueued[1] = state.enqueued[0]
            for key, offers in [*state.offers.items()]:
                if self._rng.random() < 0.7:
                    state.offer(1, key, offers["0"], 2)
                else:
                    state.absent.setdefault(key.partition("/")[0], {}).setdefault("1", []).append(key)


class PhantomCrew(Crew):
    """Gathers bring the bytes that `expect` was told of."""

    def __init__(self, backend: Any, rng: random.Random) -> None:
        me = Peer(0, os.getpid(), started_at(os.getpid()))
        super().__init__(backend, PhantomBoard(rng), [me, me], group=None)
        self._expected: dict[int, torch.Tensor] = {}
        self._nothing = backend.empty(1, self.stream)
        backend.copy(self._nothing, torch.zeros(1, dtype=torch.uint8), self.stream)

    def expect(self, whole: torch.Tensor, content: torch.Tensor) -> None:
        self._expected[whole.data_ptr()] = content

    def gather(self, whole: torch.Tensor, part_bytes: int, landed: Any) -> None:
        content = self._expected[whole.data_ptr()]
        self.stream.wait_event(landed)
        # It writes this rank's part too. (It does not read it: what aligns tensors is in no file, and nobody has written it.)
        self.backend.transform(lambda source, target: target.copy_(content), whole, self._nothing, self.stream)


class Reached:
    """An event that is waited for when somebody asks: a lazy device would never come to it."""

    def __init__(self, event: Any) -> None:
        self._event = event
        self.record = event.record
        self.synchronize = event.synchronize

    def query(self) -> bool:
        self._event.synchronize()
        return True


class PhantomSharing(Sharing):
    def job_for(self, *args: Any) -> ShareJob | None:
        job = super().job_for(*args)
        if job is not None:
            job.begun = Reached(job.begun)
        return job

    def join(self, owner: object) -> None:
        self.crew, self._model = PhantomCrew(self._backend, random.Random(0)), "1"

    def check(self, groups: Sequence[Shareable]) -> None:
        pass

    def moves_of(self, parts: Sequence[Part]) -> list[Any]:
        self._parts = {part.key: part for part in parts}
        return super().moves_of(parts)

    def has_landed(self, job: ShareJob, move: Gather, memory: torch.Tensor, event: Any) -> None:
        part = self._parts[move.key]
        size = move.part_bytes * 2
        content = torch.zeros(size, dtype=torch.uint8)
        for each in part.moves:
            start, end = max(each.at, move.at), min(each.at + each.num_bytes, move.at + size)  # type: ignore[union-attr]
            if start >= end:
                continue
            into = content[start - move.at : end - move.at]
            if isinstance(each, Copy):
                into.copy_(each.memory[each.start + start - each.at :][: end - start])
            elif isinstance(each, Read):
                into.copy_(torch.frombuffer(_bytes_of(each, start, end), dtype=torch.uint8))
        crew = self.crew
        assert isinstance(crew, PhantomCrew)
        crew.expect(memory[move.at : move.at + size], content)
        super().has_landed(job, move, memory, event)

    def close(self) -> None:
        crew = self.crew
        super().close()
        if isinstance(crew, PhantomCrew):
            crew.courier.leave_all()
            self._backend.free(crew._nothing)


def _bytes_of(read: Read, start: int, end: int) -> bytearray:
    position = read.position + start - read.at
    if isinstance(read.source, PageableMemory):
        return bytearray(memory_of(read.source.bytes)[position : position + end - start])
    return bytearray(read.source.path.read_bytes()[position : position + end - start])


@contextmanager
def phantom_rank() -> Iterator[None]:
    """Let whatever is offloaded with `process_group="phantom"` be shared with a rank that is not there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "_as_group", lambda value: value)
        patch.setattr(engine, "Sharing", PhantomSharing)
        tune(patch, min_shared_bytes=900, share_part_bytes=512, share_patience_seconds=5.0)
        yield
