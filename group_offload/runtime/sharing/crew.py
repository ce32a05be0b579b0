"""The ranks of one host that share models: who they are, how they reach each other, and whether sharing pays."""

from __future__ import annotations

import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

import torch

from ...base.arena import arena_for
from ...base.device import Backend, Event
from ...base.layout import ALIGNMENT
from ...base.peer_memory import PeerMemory
from ...base.system import (
    name_of_shared_file,
    new_shared_file,
    on_fork,
    open_shared_file,
    place_of_process,
    started_at,
)
from ...base.torch_internals import new_gloo_group
from ...base.tuning import tuning
from ...errors import ConfigError
from .board import BOARD_BYTES, Board
from .courier import Courier, Peer
from .cut import cut
from .links import CollectiveLink, Link, PeerLink, Place, SharedBytes
from .roll import Roll

logger = logging.getLogger("group_offload")

_LEAD_SECONDS = 0.03
_NUM_TRIES = 3
_NUM_GROUPS = 4
"""As many as there are slots that shared groups take turns in without a budget."""
_MIN_GAIN = 1.1
"""Weights have to arrive faster by this factor than without sharing."""


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
    """The ranks of this host that share models, as one of them sees it. It lives as long as the process group."""

    def __init__(self, backend: Backend, board: Board, peers: list[Peer], link: Link) -> None:
        self.backend = backend
        self.rank, self.num_ranks = board.rank, board.num_ranks
        self.is_first = self.rank == 0
        """Whether the others follow this rank's plan."""
        self.stream = backend.new_stream()
        """For the ready events of slots: see [Note: A shared group]."""
        self.link = link
        """Used by the courier's thread once this is there."""
        self.speeds: GatherSpeeds | None = None
        self.ranks = [peer.rank for peer in peers]
        """The ranks of the crew, as the process group numbers all of them."""
        self.courier = Courier(board, peers, link, self._enter)
        Finalize(
            None, _leave, (weakref.ref(self.courier),), exitpriority=100
        )  # `atexit` is not called in children of Python
        self.is_forked = False
        """Whether this process is a fork of the one that takes part."""

    def _enter(self) -> None:
        if self.backend.has_streams and self.backend.device.index is not None:
            torch.accelerator.set_device_index(self.backend.device.index)


def _leave(courier: weakref.ref[Courier]) -> None:
    """The process ends. If that is because of an error, the others shall know."""
    found = courier()
    if found is not None and getattr(sys, "last_value", None) is None and sys.exc_info()[0] is None:
        found.leave_all()


_crews: dict[tuple[object, ...], tuple[Any, Roll, Crew | None]] = {}
_of_parent: list[Any] = []
"""In a fork, what its parent had in `_crews`: to end a process group whose threads are not there crashes."""


def _forget_all() -> None:
    for _, _, crew in _crews.values():
        if crew is not None:
            crew.is_forked = True
    _of_parent.extend(_crews.values())
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
        ConfigError: two ranks compute on the same device. All ranks raise it.
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
    # Once: a rank that has a crew by the next model does not ask again, and one that is alone on its host must not wait.
    found = roll.members or dict(zip(roll.ranks, roll.exchange(f"{model}/who", mine, roll.ranks), strict=True))
    hosts: dict[str, list[int]] = {}
    owners: dict[tuple[str, str], int] = {}
    for rank, each in found.items():
        place = each["place"] or f"rank {rank}"
        hosts.setdefault(place, []).append(rank)
        owner = owners.setdefault((place, each["device"]), rank)
        if each["device"] and owner != rank:
            raise ConfigError(
                f"Ranks {owner} and {rank} of process_group compute on the same device. Call "
                f"torch.accelerator.set_device_index(local_rank) first, or pass onload_device=f'cuda:{{local_rank}}'."
            )
    roll.members = found
    here = next(ranks for ranks in hosts.values() if roll.rank in ranks)
    if len(here) == 1:
        return None, "no other rank of process_group is on this host"
    roll.processes = {rank: (found[rank]["pid"], found[rank]["started"]) for rank in here}
    board, problem = _open_board(roll, model, here)
    if board is None:
        return None, problem
    is_cpu = backend.device.type == "cpu"
    link, speeds, problem = (_gather if is_cpu else _connect)(backend, roll, model, here)
    if link is None:
        board.close()
        return None, problem
    peers = [Peer(rank, found[rank]["pid"], found[rank]["started"]) for rank in here]
    crew = Crew(backend, board, peers, link)
    crew.speeds = speeds
    _crews[key] = world, roll, crew
    return crew, ""


def _name_of(backend: Backend) -> str:
    """The name of a device that only one rank can have; empty for the CPU."""
    if not backend.has_streams:
        return ""
    properties = getattr(torch, backend.device.type).get_device_properties(backend.device)
    return str(getattr(properties, "uuid", backend.device))


def _gather(
    backend: Backend, roll: Roll, model: str, here: list[int]
) -> tuple[CollectiveLink | None, GatherSpeeds | None, str]:
    """The way between ranks that compute on the CPU. None if a rank has none, and why."""
    link, problem, limit = None, "", timedelta(seconds=tuning().share_limit_seconds)
    try:
        # For nothing else: collectives of the user's groups are in an order of their own.
        index = here.index(roll.rank)
        group = new_gloo_group(f"{roll.prefix}/{model}/gloo {here[0]}", index, len(here), limit)
        link = CollectiveLink(backend, index, group)
    except (AttributeError, RuntimeError) as error:
        problem = f"the ranks of this host do not reach each other ({error})"
    problem = next(filter(None, roll.exchange(f"{model}/reached", problem, here)), "")
    return (None if problem else link), None, problem


def _open_board(roll: Roll, model: str, here: list[int]) -> tuple[Board | None, str]:
    """The board, which the first rank makes. None if a rank cannot open it, and why."""
    index, fd, name, problem = here.index(roll.rank), -1, "", ""
    try:
        if index == 0:
            fd = new_shared_file(BOARD_BYTES)
            name = name_of_shared_file(fd)
        name = roll.exchange(f"{model}/board", name, here)[0]
        own = open_shared_file(name) if name else -1
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


def _connect(
    backend: Backend, roll: Roll, model: str, here: list[int]
) -> tuple[PeerLink | None, GatherSpeeds | None, str]:
    """The way to the other GPUs' memory, and how fast it is. None if there is none, or if a rank has none, and why."""
    trial: Trial | None = None
    mine: tuple[str, Place, Mapping[str, str]]
    try:
        if backend.device.type != "cuda" or torch.version.cuda is None:
            raise RuntimeError("it needs CUDA")
        trial = Trial(backend, here.index(roll.rank), len(here), PeerMemory(backend.device))
        mine = "", trial.place, trial.link.handles
    except (AttributeError, OSError, RuntimeError) as error:
        mine = str(error), (), {}
    found = roll.exchange(f"{model}/memories", mine, here)
    problem = next((each[0] for each in found if each[0]), "")
    if trial is not None and not problem:
        trial.link.look({str(rank): each[2] for rank, each in enumerate(found)})
        places = {str(rank): each[1] for rank, each in enumerate(found)}
        problems = roll.exchange(f"{model}/reached", trial.reach(places), here)
        problem = next(filter(None, problems), "")
        if not problem:  # all ranks have sent
            problem = next(filter(None, roll.exchange(f"{model}/arrived", trial.compare(), here)), "")
    if trial is None or problem:
        if trial is not None:
            trial.link.look({})
        return None, None, f"the GPUs of this host cannot reach each other's memory ({problem})"
    speeds = _measure(trial, places, roll, model, here)
    trial.link.look({})
    roll.exchange(f"{model}/closed", 0, here)  # before, nobody gives the memory back
    return trial.link, speeds, ""


class Trial:
    """Memory of a GPU that the other ranks may write to while they set up."""

    def __init__(self, backend: Backend, rank: int, num_ranks: int, memory: PeerMemory) -> None:
        """
        Raises:
            RuntimeError: other processes cannot open this GPU's memory, or it is full.
        """
        self.backend, self._rank = backend, rank
        num_bytes = tuning().share_trial_bytes
        self.link = PeerLink(backend, rank, num_ranks, memory)
        self.stream = backend.new_stream()
        self.memory = arena_for(backend).take(num_bytes, self.stream)
        self.place = self.link.place_of(self.memory)
        self.cut = cut(num_bytes // _NUM_GROUPS // ALIGNMENT * ALIGNMENT, num_ranks)
        self.starts = [number * self.cut.num_bytes for number in range(_NUM_GROUPS)]
        """Where the groups begin that are sent at once."""

    def own(self, start: int) -> tuple[int, int]:
        """This rank's part of the group that begins there."""
        first, last = self.cut.part_of(self._rank)
        return start + first, start + last

    def send(self, start: int, landed: Event, places: Mapping[str, Place]) -> list[Event]:
        memory = self.memory[start : start + self.cut.rest[0]]
        there = {rank: (number, at + start) for rank, (number, at) in places.items()}
        return self.link.send(SharedBytes(memory, self.cut.part_bytes, landed), there)

    def reach(self, places: Mapping[str, Place]) -> str:
        """Send something to all ranks. Returns why that is not possible, if so."""
        try:
            with self.backend.on_stream(self.stream):
                for start in self.starts:
                    first, last = self.own(start)
                    self.memory[first:last] = self._rank + 1
            landed = self.backend.new_event()
            landed.record(self.stream)
            _wait([event for start in self.starts for event in self.send(start, landed, places)])
        except RuntimeError as error:
            return str(error)
        return ""

    def compare(self) -> str:
        """What is wrong with what all ranks have sent here."""
        with self.backend.on_stream(self.stream):
            for start in self.starts:
                whole = self.memory[start : start + self.cut.rest[0]].view(self.cut.num_ranks, -1)
                expected = torch.arange(1, self.cut.num_ranks + 1, dtype=torch.uint8, device=whole.device)
                if not bool((whole == expected[:, None]).all()):
                    return "other bytes arrived"
        return ""


def _measure(trial: Trial, places: Mapping[str, Place], roll: Roll, model: str, here: list[int]) -> GatherSpeeds | None:
    """Send, on all ranks at once, and take the slowest rank's times of the best try."""
    backend = trial.backend
    num_bytes = trial.memory.numel()
    source = backend.empty_pinned(num_bytes)
    if not all(roll.exchange(f"{model}/locked", source is not None, here)) or source is None:
        return None

    def send(*, lands: bool) -> list[Event]:
        events = []
        for start in trial.starts:
            first, last = trial.own(start)
            landed = backend.new_event()
            if lands:
                backend.copy(trial.memory[first:last], source[first:last], trial.stream)
                landed.record(trial.stream)
            events += trial.send(start, landed, places)
        return events

    def alone() -> list[Event]:
        done = backend.new_event()
        backend.copy(trial.memory, source, trial.stream)
        done.record(trial.stream)
        return [done]

    works: list[Callable[[], list[Event]]] = [alone, partial(send, lands=False), partial(send, lands=True)]
    times = []
    for turn in range(_NUM_TRIES):
        mine = []
        for number, work in enumerate(works):
            # Processes of one host have one clock.
            started = max(roll.exchange(f"{model}/try{turn}-{number}", time.monotonic() + _LEAD_SECONDS, here))
            while time.monotonic() < started:
                pass
            _wait(work())
            mine.append(time.monotonic() - started)
        times.append(mine)
    best = [min(each) for each in zip(*times, strict=True)]
    found = roll.exchange(f"{model}/measured", best, here)
    speeds = [num_bytes / max(each) for each in zip(*found, strict=True)]
    return GatherSpeeds(*speeds)


def _wait(events: list[Event]) -> None:
    for event in events:
        event.synchronize()


def pays(speeds: GatherSpeeds | None) -> bool:
    """Whether weights arrive faster if each rank sends its share."""
    return speeds is not None and speeds.shared > _MIN_GAIN * speeds.alone
