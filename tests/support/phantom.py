"""A second rank that is not there: it offers what the engine offers, or declines it, and its parts come to the slots."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from group_offload import config
from group_offload.base.layout import as_bytes
from group_offload.base.system import name_of_shared_file, new_shared_file, open_shared_file, started_at
from group_offload.runtime import engine
from group_offload.runtime.multi_gpu.host_group import HostGroup
from group_offload.runtime.multi_gpu.links import GatherSpeeds, PeerLink, Place, SharedBytes
from group_offload.runtime.multi_gpu.rendezvous import Peer
from group_offload.runtime.multi_gpu.shard_reads import ShardJob
from group_offload.runtime.multi_gpu.sharded_transfers import Shard, ShardedTransfers
from group_offload.runtime.multi_gpu.shared_state import SHARED_STATE_BYTES, RankStates, SharedState
from group_offload.stores.base import PlacedBlob

from .tuning import tune


class Reached:
    """An event that is waited for when somebody asks: a lazy device would never come to it."""

    def __init__(self, event: Any) -> None:
        self._event = event
        self.record = event.record
        self.synchronize = event.synchronize

    def query(self) -> bool:
        self._event.synchronize()
        return True


class PhantomMemory:
    """The memory of both ranks: each allocation of this one has its address as its number."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.expected: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By the address of a part, its bytes, and which of them weights have: nobody writes what aligns tensors."""
        self.is_over = False
        """Whether the model is no longer offloaded: memory of the other rank is given up then, and not before."""
        self.nothing = backend.empty(1, backend.current_stream())
        backend.copy(self.nothing, torch.zeros(1, dtype=torch.uint8), backend.current_stream(), blocking=True)

    def start_of(self, memory: torch.Tensor) -> int:
        return 0

    def number_at(self, address: int) -> int:
        return 1

    def handle_of(self, memory: torch.Tensor) -> str:
        return "all"

    def open(self, handle: str) -> int:
        return 0

    def close(self, address: int) -> None:
        assert self.is_over, "nothing is given up"

    def copy(self, address: int, source: torch.Tensor, stream: Any) -> None:
        """The part has come, and is written again: the slot of the other rank has the same place."""
        assert address == source.data_ptr()
        content, has_weights = self.expected[address]

        def send(nothing: torch.Tensor, target: torch.Tensor) -> None:
            assert torch.equal(target[has_weights], content[has_weights]), "a part is sent that has not come"
            target.copy_(content)

        self._backend.transform(send, source, self.nothing, stream)

    def write(self, part: torch.Tensor, stream: Any) -> None:
        content, _ = self.expected[part.data_ptr()]
        self._backend.transform(lambda source, target: target.copy_(content), part, self.nothing, stream)


class PhantomLink(PeerLink):
    """The other rank sends its parts at the same time, on a stream of its own GPU."""

    def __init__(self, backend: Any) -> None:
        self.memory = PhantomMemory(backend)
        super().__init__(backend, 0, 2, self.memory)
        self._its_stream = backend.new_stream()
        self.its_events: deque[Any] = deque()
        """They are behind its parts of each group."""

    def send(self, shared: SharedBytes, places: Mapping[str, Place]) -> list[Any]:
        self.memory.write(shared.part_of(1 - self._rank), self._its_stream)
        event = self._backend.new_event()
        event.record(self._its_stream)
        self.its_events.append(event)
        return [Reached(event) for event in super().send(shared, places)]


class PhantomState(SharedState):
    def __init__(self, rng: random.Random, link: PhantomLink) -> None:
        fd = new_shared_file(SHARED_STATE_BYTES)
        self.its = SharedState(open_shared_file(name_of_shared_file(fd)), rank=1, num_ranks=2)
        """The shared state as the other rank has it."""
        super().__init__(fd, rank=0, num_ranks=2)
        self._rng, self._link = rng, link
        self._agreed: list[bool] = []
        """Of each group in the log, whether it is gathered."""
        self._num_sent = 0
        self._is_locked = False

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with super()._locked():
            self._is_locked = True
            yield
        self._is_locked = False

    @contextmanager
    def change(self) -> Iterator[RankStates]:
        with super().change() as state:
            yield state
            for key, offers in [*state.offers.items()]:
                state.memories["1"] = state.memories["0"]
                number = self._rng.random()
                if number < 0.94:
                    digest, place = offers["0"]
                    state.offer(1, key, digest if number < 0.8 else "other bytes", place, 2)
                    self._agreed.append(number < 0.8)
                else:
                    state.break_off(key.partition("/")[0])
                    break

    @property
    def turn(self) -> int:
        """The other rank moves on now and then while this one looks."""
        if not self._is_locked and self._num_sent < len(self._agreed) and self._rng.random() < 0.3:
            is_gathered = self._agreed[self._num_sent]
            if self._link.its_events or not is_gathered:
                if is_gathered:
                    self._link.its_events.popleft().synchronize()
                self._num_sent += 1
                self.its.has_sent(self._num_sent)
        return super().turn


class PhantomTransfers(ShardedTransfers):
    def job_for(self, parts: Sequence[Shard], memory: torch.Tensor, *args: Any) -> ShardJob | None:
        job = super().job_for(parts, memory, *args)
        if job is not None:
            job.begun = Reached(job.begun)
            for part in parts:
                if part.part_bytes:
                    self._expect(part, memory)
        return job

    def join(self, owner: object) -> None:
        me, link = Peer(0, os.getpid(), started_at(os.getpid())), PhantomLink(self._backend)
        shared_state = PhantomState(random.Random(0), link)
        self.host_group = HostGroup(self._backend, shared_state, [me, me], link, GatherSpeeds(5e9, 5e9))
        self._model, self._memory = "1", link.memory

    def check(self, groups: Any) -> None:
        pass

    def _expect(self, part: Shard, memory: torch.Tensor) -> None:
        content, has_weights = torch.zeros(part.num_bytes, dtype=torch.uint8), torch.zeros(part.num_bytes).bool()
        for placed in part.blobs:
            assert isinstance(placed, PlacedBlob)
            for spec, tensor in zip(placed.blob.layout.specs, placed.blob.rest, strict=True):
                at, found = placed.at - part.at + spec.offset, as_bytes(tensor)
                content[at : at + found.numel()], has_weights[at : at + found.numel()] = found, True
        for at in (0, part.part_bytes):
            its_bytes = slice(at, at + part.part_bytes)
            self._memory.expected[memory.data_ptr() + part.at + at] = content[its_bytes], has_weights[its_bytes]

    def close(self) -> None:
        host_group = self.host_group
        if host_group is not None:
            self._memory.is_over = True
        super().close()
        if host_group is not None:
            host_group.leave_all()
            self._backend.free(self._memory.nothing)


@contextmanager
def phantom_rank() -> Iterator[None]:
    """Let whatever is offloaded with `process_group="phantom"` be shared with a rank that is not there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "_as_group", lambda value: value)
        patch.setattr(engine, "ShardedTransfers", PhantomTransfers)
        tune(patch, min_shared_bytes=900, shard_timeout_seconds=5.0)
        yield
