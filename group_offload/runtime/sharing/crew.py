"""The ranks of one host that share models: how they meet, and all that they ask of torch.distributed."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Any

import torch

from ...base.device import Backend, Event, Stream
from ...base.system import name_of_shared_file, new_shared_file, on_fork, place_of_process, started_at
from ...base.torch_internals import store_of_processes
from ...base.tuning import tuning
from ...errors import ConfigError, ModuleError, StateError
from .board import BOARD_BYTES, Board
from .courier import Courier, Peer
from .cut import cut

logger = logging.getLogger("group_offload")

_POLL_SECONDS = 5e-3
_LEAD_SECONDS = 0.03
_NUM_TRIES = 3
_MIN_GAIN = 1.1
"""Weights have to arrive faster by this factor than without sharing."""


class OtherModel(ModuleError):
    """A rank has another model than the first one."""

    def __init__(self, rank: int, first: int, what: str) -> None:
        super().__init__(
            f"All ranks of process_group have to offload the same module, and rank {rank} has another one than rank {first}: "
            f"{what}."
        )
        self.args_of_all = rank, first, what


class Roll:
    """Where the ranks of a process group tell each other something while they set up."""

    def __init__(self, process_group: Any) -> None:
        import torch.distributed as dist

        self.ranks: list[int] = dist.get_process_group_ranks(process_group)
        self.rank = dist.get_rank()
        self._store = store_of_processes()
        self._prefix = f"group_offload/{'-'.join(map(str, self.ranks))}"
        self._num_models = 0

    def next_model(self) -> str:
        """The name of the model that is set up next: the same one on all ranks, which set models up in the same order."""
        self._num_models += 1
        return str(self._num_models)

    def tell(self, topic: str, content: object) -> None:
        self._store.set(self._key(topic, self.rank), json.dumps(content))

    def fail(self, model: str, error: BaseException) -> None:
        """This rank could not set the model up: the others do not wait any longer, and raise."""
        what = error.args_of_all if isinstance(error, OtherModel) else f"{type(error).__name__}: {error}"
        self.tell(f"{model}/failed", what)

    def exchange(self, topic: str, content: object, among: list[int]) -> list[Any]:
        """What each of the ranks `among` has to say.

        Raises:
            StateError: a rank says nothing in time, or that it has failed.
        """
        self.tell(topic, content)
        return [content if rank == self.rank else self.hear(rank, topic) for rank in among]

    def hear(self, rank: int, *topics: str) -> Any:
        """What another rank says to the first of these topics that it says something to.

        Raises:
            StateError: it says nothing in time, or that it has failed.
        """
        failed, limit = f"{topics[0].partition('/')[0]}/failed", time.monotonic() + tuning().share_setup_seconds
        while time.monotonic() < limit:
            for topic in (*topics, failed):
                if self._store.check([self._key(topic, rank)]):
                    found = json.loads(self._store.get(self._key(topic, rank)))
                    if topic == failed:
                        raise (
                            OtherModel(*found)
                            if isinstance(found, list)
                            else StateError(f"Rank {rank} could not offload its model: {found}")
                        )
                    return found
            time.sleep(_POLL_SECONDS)
        raise StateError(
            f"Rank {rank} did not offload a model with this process_group within {tuning().share_setup_seconds:g} s. All ranks "
            f"of it have to make the same calls, in the same order."
        )

    def _key(self, topic: str, rank: int) -> str:
        return f"{self._prefix}/{topic}/{rank}"


@dataclass(frozen=True, slots=True)
class GatherSpeeds:
    """Bytes per second, as the slowest rank measured them while all were at it."""

    alone: float
    """Weights that reach each GPU if each sends all of them over its own link."""
    gather: float
    """What the GPUs gather from one another."""
    shared: float
    """Weights that reach each GPU if each sends its share."""


class Crew:
    """The ranks of this host that share models, as one of them sees it. It lives as long as the process group.

    `gather` is called by the courier's thread only.
    """

    def __init__(self, backend: Backend, board: Board, peers: list[Peer], group: Any) -> None:
        """
        Args:
            group: The process group of the ranks of this host, for nothing else.
        """
        self.backend = backend
        self.rank, self.num_ranks = board.rank, board.num_ranks
        self.stream = backend.new_stream()
        """Gathers have a stream of their own, so that they overlap with copies and with compute."""
        self._group = group
        self.speeds: GatherSpeeds | None = None
        self.ranks = [peer.rank for peer in peers]
        """The ranks of the crew, as the process group numbers all of them."""
        self.courier = Courier(board, peers, self._enter)
        Finalize(
            None, _leave, (weakref.ref(self.courier),), exitpriority=100
        )  # `atexit` is not called in children of Python
        self.is_forked = False
        """Whether this process is a fork of the one that takes part."""

    def gather(self, whole: torch.Tensor, part_bytes: int, landed: Event) -> None:
        """Enqueue a gather behind `landed`: the others' parts of `whole`, which are as large as this rank's."""
        own = whole[self.rank * part_bytes : (self.rank + 1) * part_bytes]
        self.stream.wait_event(landed)
        self.backend.transform(self._all_gather, whole, own, self.stream)

    def _all_gather(self, source: torch.Tensor, target: torch.Tensor) -> None:
        import torch.distributed as dist

        # The newer name of the same call, where torch has it.
        all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        all_gather(target, source, group=self._group)

    def _enter(self) -> None:
        if self.backend.has_streams and self.backend.device.index is not None:
            torch.accelerator.set_device_index(self.backend.device.index)


def _leave(courier: weakref.ref[Courier]) -> None:
    """The process ends. If that is because of an error, the others shall know."""
    found = courier()
    if found is not None and getattr(sys, "last_value", None) is None and sys.exc_info()[0] is None:
        found.leave_all()


_crews: dict[tuple[object, ...], tuple[Any, Roll, Crew | None]] = {}


def _forget_all() -> None:
    for _, _, crew in _crews.values():
        if crew is not None:
            crew.is_forked = True
    _crews.clear()


on_fork(after_in_child=_forget_all)


def roll_of(process_group: Any, backend: Backend) -> tuple[Roll, str]:
    """Where the ranks of the group meet, and the name of the model that is set up now."""
    import torch.distributed as dist

    key = (*dist.get_process_group_ranks(process_group), backend.device)
    known = _crews.get(key)
    if known is None or known[0] is not dist.group.WORLD:
        known = _crews[key] = dist.group.WORLD, Roll(process_group), None
    return known[1], known[1].next_model()


def crew_of(process_group: Any, backend: Backend, roll: Roll, model: str) -> tuple[Crew | None, str]:
    """The ranks of this host that share models, for all models of this group and device. All ranks of the group call it.

    Returns:
        The crew; None if nothing can be shared here, and why.

    Raises:
        StateError: another rank failed, or is missing.
        ConfigError: two ranks compute on the same device.
    """
    key = (*roll.ranks, backend.device)
    world, _, crew = _crews[key]
    if crew is not None:
        return crew, ""
    mine = {
        "place": place_of_process(),
        "device": _name_of(backend),
        "pid": os.getpid(),
        "started": started_at(os.getpid()),
    }
    found = dict(zip(roll.ranks, roll.exchange(f"{model}/who", mine, roll.ranks), strict=True))
    hosts: dict[str, list[int]] = {}
    for rank, each in found.items():
        hosts.setdefault(each["place"] or f"rank {rank}", []).append(rank)
    here = next(ranks for ranks in hosts.values() if roll.rank in ranks)
    if backend.has_streams:
        for rank in here:
            if rank != roll.rank and found[rank]["device"] == mine["device"]:
                raise ConfigError(
                    f"Ranks {min(rank, roll.rank)} and {max(rank, roll.rank)} of process_group compute on the same device. "
                    f"Call torch.accelerator.set_device_index(local_rank) before, or pass onload_device=f'cuda:{{local_rank}}'."
                )
    group = _new_group([ranks for ranks in hosts.values() if len(ranks) > 1], here, backend, len(roll.ranks))
    if len(here) == 1:
        return None, "no other rank of process_group is on this host"
    board, problem = _open_board(roll, model, here)
    if board is None:
        return None, problem
    peers = [Peer(rank, found[rank]["pid"], found[rank]["started"]) for rank in here]
    crew = Crew(backend, board, peers, group)
    crew.speeds = _measure(crew, roll, model, here) if backend.has_streams else None
    _crews[key] = world, roll, crew
    return crew, ""


def _name_of(backend: Backend) -> str:
    if not backend.has_streams:
        return str(backend.device)
    properties = getattr(torch, backend.device.type).get_device_properties(backend.device)
    return str(getattr(properties, "uuid", backend.device))


def _new_group(hosts: list[list[int]], here: list[int], backend: Backend, num_ranks: int) -> Any:
    import torch.distributed as dist

    options: dict[str, Any] = {
        "backend": "gloo" if backend.device.type == "cpu" else dist.get_default_backend_for_device(backend.device),
        "timeout": timedelta(seconds=tuning().share_limit_seconds),
    }
    if num_ranks < dist.get_world_size():  # the other processes do not know of this
        return dist.new_group(here, use_local_synchronization=True, **options) if len(here) > 1 else None
    made = {tuple(ranks): dist.new_group(ranks, **options) for ranks in hosts}
    return made.get(tuple(here))


def _open_board(roll: Roll, model: str, here: list[int]) -> tuple[Board | None, str]:
    """The board, which the first rank makes. None if a rank cannot open it, and why."""
    index, fd, name, problem = here.index(roll.rank), -1, "", ""
    try:
        if index == 0:
            fd = new_shared_file(BOARD_BYTES)
            name = name_of_shared_file(fd)
        name = roll.exchange(f"{model}/board", name, here)[0]
        own = os.open(name, os.O_RDWR) if name else -1
    except OSError as error:
        own, problem = -1, f"processes of this system cannot share memory ({error})"
        if index == 0:
            roll.tell(f"{model}/board", "")
    problems = roll.exchange(
        f"{model}/opened", problem or ("" if own >= 0 else "the first rank has no shared memory"), here
    )
    if fd >= 0:
        os.close(fd)
    if any(problems):
        if own >= 0:
            os.close(own)
        return None, next(filter(None, problems))
    return Board(own, index, len(here)), ""


def _measure(crew: Crew, roll: Roll, model: str, here: list[int]) -> GatherSpeeds | None:
    """Send and gather, on all ranks at once, and take the slowest rank's times of the best try."""
    backend, num_bytes = crew.backend, tuning().share_trial_bytes
    source = backend.empty_pinned(num_bytes)
    if not all(roll.exchange(f"{model}/locked", source is not None, here)) or source is None:
        return None
    copies, shares = backend.new_stream(), cut(num_bytes, crew.num_ranks, tuning().share_part_bytes)
    target = backend.empty(num_bytes, copies)

    def alone() -> None:
        backend.copy(target, source, copies)

    def gather() -> None:
        for piece in shares.pieces:
            crew.gather(target[piece.start : piece.start + piece.num_bytes], piece.part_bytes, backend.new_event())

    def shared() -> None:
        for piece in shares.pieces:
            start, end = piece.part_of(crew.rank)
            backend.copy(target[start:end], source[start:end], copies)
            landed = backend.new_event()
            landed.record(copies)
            crew.gather(target[piece.start : piece.start + piece.num_bytes], piece.part_bytes, landed)

    gather()  # the first one connects the ranks
    _finish(crew.backend, crew.stream)
    times = []
    for turn in range(_NUM_TRIES):
        mine = []
        for number, (work, stream) in enumerate(((alone, copies), (gather, crew.stream), (shared, crew.stream))):
            # Processes of one host have one clock.
            started = max(roll.exchange(f"{model}/try{turn}-{number}", time.monotonic() + _LEAD_SECONDS, here))
            while time.monotonic() < started:
                pass
            work()
            _finish(backend, stream)
            mine.append(time.monotonic() - started)
        times.append(mine)
    best = [min(each) for each in zip(*times, strict=True)]
    found = roll.exchange(f"{model}/measured", best, here)
    speeds = [num_bytes / max(each) for each in zip(*found, strict=True)]
    return GatherSpeeds(*speeds)


def _finish(backend: Backend, stream: Stream) -> None:
    done = backend.new_event()
    done.record(stream)
    done.synchronize()


def pays(speeds: GatherSpeeds | None) -> bool:
    """Whether weights arrive faster if each rank sends its share."""
    return speeds is not None and speeds.shared > _MIN_GAIN * speeds.alone
