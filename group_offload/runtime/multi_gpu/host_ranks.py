"""The ranks of one host that share models: who they are, how they reach each other, and whether sharing pays."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

import torch

from ...base.arena import arena_for
from ...base.device import Backend, Event
from ...base.layout import ALIGNMENT
from ...base.peer_memory import PeerMemory
from ...base.system import name_of_shared_file, new_shared_file, open_shared_file, place_of_process, started_at
from ...base.text import describe_bytes
from ...base.tuning import tuning
from ...errors import ConfigError
from .host_group import HostGroup
from .links import GatherSpeeds, PeerLink, Place, SharedBytes
from .rendezvous import Peer, Rendezvous
from .shared_state import SHARED_STATE_BYTES, SharedState

_LEAD_SECONDS = 0.03
_NUM_TRIES = 3
_NUM_GROUPS = 4
"""As many as there are slots that shared groups take turns in without a budget."""
_MIN_GAIN = 1.1
"""Weights have to arrive faster by this factor than without sharing."""


def _leave(host_group: weakref.ref[HostGroup]) -> None:
    """The process ends. If that is because of an error, the others shall know."""
    found = host_group()
    if found is not None and getattr(sys, "last_value", None) is None and sys.exc_info()[0] is None:
        found.leave_all()


_host_groups: dict[tuple[object, ...], tuple[Any, Rendezvous, HostGroup | None]] = {}


def rendezvous_of(process_group: Any, backend: Backend) -> tuple[Rendezvous, str]:
    """Where the ranks of the group meet, and the name of the model that is set up now."""
    import torch.distributed as dist

    key = (*dist.get_process_group_ranks(process_group), backend.device)
    known = _host_groups.get(key)
    if known is None or known[0] is not dist.group.WORLD:
        known = _host_groups[key] = dist.group.WORLD, Rendezvous(process_group), None
    return known[1], known[1].next_model()


def host_group_of(backend: Backend, rendezvous: Rendezvous, model: str) -> tuple[HostGroup | None, str]:
    """The ranks of this host that share models, for all models of a process group and device. All ranks of it call this.

    Returns:
        The host group; None if nothing can be shared here, and why.

    Raises:
        StateError: another rank failed, or is missing.
        ConfigError: two ranks compute on the same device. All ranks raise it.
    """
    key = (*rendezvous.ranks, backend.device)
    world, _, host_group = _host_groups[key]
    if host_group is not None:
        return host_group, ""
    mine = {
        "place": place_of_process(),
        "device": _name_of(backend),
        "pid": os.getpid(),
        "started": started_at(os.getpid()),
    }
    # Once: a rank that has a host group by the next model does not ask again, and one that is alone on its host must not wait.
    found = rendezvous.members or dict(
        zip(rendezvous.ranks, rendezvous.exchange(f"{model}/who", mine, rendezvous.ranks), strict=True)
    )
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
    rendezvous.members = found
    here = next(ranks for ranks in hosts.values() if rendezvous.rank in ranks)
    if len(here) == 1:
        return None, "no other rank of process_group is on this host"
    rendezvous.peers = {rank: Peer(rank, found[rank]["pid"], found[rank]["started"]) for rank in here}
    try:
        shared_state = _open_shared_state(rendezvous, model, here)
        rendezvous.shares_ram = True
        try:
            link, speeds = _connect(backend, rendezvous, model, here)
        except _CannotShare:
            shared_state.close()
            raise
    except _CannotShare as error:
        return None, str(error)
    host_group = HostGroup(backend, shared_state, [*rendezvous.peers.values()], link, speeds)
    # `atexit` is not called in children of Python.
    Finalize(None, _leave, (weakref.ref(host_group),), exitpriority=100)
    _host_groups[key] = world, rendezvous, host_group
    return host_group, ""


class _CannotShare(Exception):
    """Why the ranks of this host share nothing."""


@contextmanager
def _on_all(rendezvous: Rendezvous, topic: str, here: list[int], why: str) -> Iterator[None]:
    """Do something on each rank of this host.

    Raises:
        _CannotShare: one of them failed. All raise it.
    """
    problem = ""
    try:
        yield
    except (AttributeError, OSError, RuntimeError) as error:
        problem = str(error)
    problem = next(filter(None, rendezvous.exchange(topic, problem, here)), "")
    if problem:
        raise _CannotShare(f"{why} ({problem})")


def _name_of(backend: Backend) -> str:
    """The name of a device that only one rank can have; empty for the CPU."""
    if not backend.has_streams:
        return ""
    properties = getattr(torch, backend.device.type).get_device_properties(backend.device)
    return str(getattr(properties, "uuid", backend.device))


def _open_shared_state(rendezvous: Rendezvous, model: str, here: list[int]) -> SharedState:
    """The shared state, which the first rank makes."""
    index, fd, why = here.index(rendezvous.rank), -1, "processes of this system cannot share memory"
    try:
        with _on_all(rendezvous, f"{model}/shared state", here, why):
            fd = new_shared_file(SHARED_STATE_BYTES) if index == 0 else -1
            name = name_of_shared_file(fd) if index == 0 else ""
        name = rendezvous.exchange(f"{model}/name", name, here)[0]
        with _on_all(rendezvous, f"{model}/opened", here, why):
            fd = fd if index == 0 else open_shared_file(name)
        return SharedState(fd, index, len(here))
    except BaseException:
        if fd >= 0:
            os.close(fd)
        raise


def _connect(backend: Backend, rendezvous: Rendezvous, model: str, here: list[int]) -> tuple[PeerLink, GatherSpeeds]:
    """The way to the other GPUs' memory, and how fast it is."""
    if backend.device.type == "cpu":
        raise _CannotShare("the CPU uses weights in RAM in place")
    trial, why = None, "the GPUs of this host cannot reach each other's memory"
    try:
        with _on_all(rendezvous, f"{model}/memory", here, why):
            if backend.device.type != "cuda" or torch.version.cuda is None:
                raise RuntimeError("it needs CUDA")
            trial = Trial(backend, here.index(rendezvous.rank), len(here), PeerMemory(backend.device))
        assert trial is not None
        found = rendezvous.exchange(f"{model}/places", (trial.place, trial.link.handles), here)
        trial.link.look({str(rank): handles for rank, (_, handles) in enumerate(found)})
        places = {str(rank): place for rank, (place, _) in enumerate(found)}
        with _on_all(rendezvous, f"{model}/reached", here, why):
            trial.share(places)
        with _on_all(rendezvous, f"{model}/arrived", here, why):  # all ranks have sent
            trial.compare()
        speeds = _measure(trial, places, rendezvous, model, here)
    finally:
        if trial is not None:
            trial.link.look({})
    rendezvous.exchange(f"{model}/closed", 0, here)  # before, nobody gives the memory back
    return trial.link, speeds


class Trial:
    """Memory of a GPU that the other ranks may write to while they set up."""

    def __init__(self, backend: Backend, rank: int, num_ranks: int, memory: PeerMemory) -> None:
        """
        Raises:
            RuntimeError: other processes cannot open this GPU's memory, or memory is full.
        """
        self._backend, self._rank, self._num_ranks = backend, rank, num_ranks
        self.num_bytes = tuning().share_trial_bytes
        self._part_bytes = part_of(self.num_bytes // _NUM_GROUPS, num_ranks)
        group_bytes = num_ranks * self._part_bytes
        self.starts = range(0, _NUM_GROUPS * group_bytes, group_bytes)
        """Where the groups begin that are sent at once."""
        self.link = PeerLink(backend, rank, num_ranks, memory)
        self._stream = backend.new_stream()
        self.memory = arena_for(backend).take(self.num_bytes, self._stream)
        self.place = self.link.place_of(self.memory)
        source = backend.empty_pinned(self.num_bytes)
        if source is None:
            raise RuntimeError(f"{describe_bytes(self.num_bytes)} of RAM can't be pinned")
        self._source = source.fill_(rank + 1)

    def load_alone(self) -> None:
        self._load(0, self.num_bytes).synchronize()

    def share(self, places: Mapping[str, Place]) -> None:
        """Load this rank's part of each group, and send it to all ranks."""
        sent = []
        for start, group in self._groups():
            first = start + self._rank * self._part_bytes
            shared = SharedBytes(group, self._part_bytes, self._load(first, first + self._part_bytes))
            sent += self.link.send(shared, {rank: (number, at + start) for rank, (number, at) in places.items()})
        for event in sent:
            event.synchronize()

    def compare(self) -> None:
        """
        Raises:
            RuntimeError: something else is here than what all ranks have sent.
        """
        with self._backend.on_stream(self._stream):
            for _, group in self._groups():
                expected = torch.arange(1, self._num_ranks + 1, dtype=torch.uint8, device=group.device)
                if not bool((group.view(self._num_ranks, -1) == expected[:, None]).all()):
                    raise RuntimeError("other bytes arrived")

    def _groups(self) -> list[tuple[int, torch.Tensor]]:
        return [(start, self.memory[start : start + self.starts.step]) for start in self.starts]

    def _load(self, first: int, last: int) -> Event:
        landed = self._backend.new_event()
        self._backend.copy(self.memory[first:last], self._source[first:last], self._stream)
        landed.record(self._stream)
        return landed


def _measure(
    trial: Trial, places: Mapping[str, Place], rendezvous: Rendezvous, model: str, here: list[int]
) -> GatherSpeeds:
    """Send, on all ranks at once, and take the slowest rank's times of the best try."""
    works: list[Callable[[], None]] = [trial.load_alone, partial(trial.share, places)]
    best = [float("inf")] * len(works)
    for turn in range(_NUM_TRIES):
        for number, work in enumerate(works):
            # Processes of one host have one clock.
            started = max(rendezvous.exchange(f"{model}/try{turn}-{number}", time.monotonic() + _LEAD_SECONDS, here))
            while time.monotonic() < started:
                pass
            work()
            best[number] = min(best[number], time.monotonic() - started)
    found = rendezvous.exchange(f"{model}/measured", best, here)
    return GatherSpeeds(*(trial.num_bytes / max(each) for each in zip(*found, strict=True)))


def part_of(num_bytes: int, num_ranks: int) -> int:
    """The size of each rank's part of a group: aligned.

    Each part is one copy from RAM and one to each other GPU: more of them took more of the host's time than they saved
    (docs/multi-gpu.md). While a part goes on to the others, those of the next groups cross the link.
    """
    return num_bytes // num_ranks // ALIGNMENT * ALIGNMENT


def pays(speeds: GatherSpeeds) -> bool:
    """Whether weights arrive faster if each rank sends its shard."""
    return speeds.shared > _MIN_GAIN * speeds.alone
