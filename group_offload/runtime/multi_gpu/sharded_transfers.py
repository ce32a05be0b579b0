"""One model of which several GPUs of the host bring their shares: what is shared, what each rank brings, and when it waits.

[Note: A shared group]
The bytes of a group in its slot are cut into one part for each rank. A rank copies its part to its place in the slot, on the
copy stream. Behind that it records an event. Once the other ranks have offered the group too (see [Note: How ranks agree]), the
thread of the host group copies the part to the slots of the other ranks, on streams of its own, behind that event. So a part
goes on to the other GPUs while those of the next groups come from RAM. The thread that computes waits, on the host, until the
parts of all ranks have arrived. Then it records the slot's ready event behind what else is copied to the slot.

Of compressed weights a rank sends the tiles that its part is in, and decompresses its part into its place. The event is behind
that, and what goes on to the other ranks is plain. So a rank that has compressed a group shares it with one that has not.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, zip_longest
from typing import Any

import torch
import xxhash

from ...base.device import Event
from ...base.layout import as_bytes, memory_of
from ...base.pool import run_all
from ...base.system import place_of_process
from ...base.tuning import tuning
from ...config import OffloadConfig
from ...errors import ConfigError
from ...stores.base import PlacedBlob, PlacedImage
from ...stores.moves import Move, joined, may_be_cut, moves_within
from .host_group import HostGroup
from .host_ranks import host_group_of, part_of, pays, rendezvous_of
from .links import GatherSpeeds, Place, SharedBytes
from .rendezvous import OtherModel, Rendezvous
from .shard_reads import ShardJob, Shared, again
from .shared_host_memory import SharedHostMemory

logger = logging.getLogger("group_offload")

_ALIKE = {
    "offload_type": "offload_type",
    "num_blocks_per_group": "num_blocks_per_group",
    "is_stored_on_disk": "offload_device='disk'",
    "low_cpu_mem_usage": "low_cpu_mem_usage",
    "embeddings_on_cpu": "embeddings_on_cpu",
    "verify_checksums": "verify_checksums",  # before share, which is False with it
    "shard_transfers": "shard_transfers",
}
"""The options that all ranks have to have in common, by the name in `OffloadConfig`, and what an error calls them. (Budgets are
not among them: those of the first rank count.)"""


@dataclass(frozen=True, slots=True)
class Shard:
    """What a rank sends of one group, or all of it if nobody else does."""

    at: int
    """The byte of the slot that the group begins at."""
    moves: list[Move]
    """All of the group."""
    blobs: list[PlacedBlob | PlacedImage]
    key: str
    digest: str
    num_bytes: int
    """All of the group's bytes in the slot."""
    part_bytes: int
    """The size of each rank's part: one after another, and then a rest that each rank loads. 0: the rank loads all."""

    def own(self, rank: int, num_ranks: int) -> list[tuple[int, int]]:
        """The bytes of the slot that a rank loads, as first and last byte, exclusive."""
        start = self.at + rank * self.part_bytes
        return [(self.at + num_ranks * self.part_bytes, self.at + self.num_bytes), (start, start + self.part_bytes)]

    def others(self, rank: int, num_ranks: int) -> list[tuple[int, int]]:
        """The bytes that the other ranks load."""
        start, end = self.at + rank * self.part_bytes, self.at + num_ranks * self.part_bytes
        return [(self.at, start), (start + self.part_bytes, end)]


class ShardedTransfers:
    """The shares of one model. An engine owns it, and uses it under its lock.

    Order of calls: `join`, `check`; in each pass `begin_pass`, then any of the others; at last `close`.
    """

    def __init__(self, config: OffloadConfig, title: str) -> None:
        self._config = config
        self._backend = config.backend
        self._title = title
        self._rendezvous: Rendezvous | None = None
        self.host_group: HostGroup | None = None
        """The ranks of this host, if they share the model; None if each goes alone."""
        self.why_not = ""
        """Why each rank goes alone."""
        self.speeds: GatherSpeeds | None = None
        self.shared_host_memory: SharedHostMemory | None = None
        """RAM that the ranks of this host have in common, while the model is set up."""
        self._model = ""
        self._here: list[int] = []
        """The ranks of this host, if they can have memory in common."""
        self._digests: dict[str, tuple[tuple[Any, ...], str]] = {}
        """By group, the state of its blobs and the digest of them then."""
        self.bytes_from_peers = 0
        self.num_alone = 0
        """Groups that were shared out, and brought by this rank alone after all."""
        self._agreed: dict[str, list[str] | None] = {}
        """The groups of the first rank's plan, by the place where they are stored or stay, as `agree` has said."""
        self._leave: Callable[[], object] | None = None
        self._jobs: weakref.WeakSet[ShardJob] = weakref.WeakSet()
        """Those that may not be over."""

    # ---------------------------------------------------------------- set-up

    def join(self, owner: object) -> None:
        """Meet the other ranks. Each of them has to call this.

        Args:
            owner: The object that this rank leaves with, if nobody calls `close`.

        Raises:
            StateError: a rank does not call this in time, or has failed.
            ConfigError: sharing was asked for, and is not possible; or ranks have other options than others.
        """
        self._rendezvous, self._model = rendezvous_of(self._config.process_group, self._backend)
        self._compare_options()
        share = self._config.shard_transfers
        if share is False:
            self.why_not = "shard_transfers=False"
            return
        host_group, self.why_not = host_group_of(self._backend, self._rendezvous, self._model)
        self._here = [*self._rendezvous.peers] if self._rendezvous.shares_ram else []
        cannot = self.why_not if host_group is None and share is True else ""
        ranks = self._rendezvous.ranks
        for rank, problem in zip(ranks, self._exchange("cannot", cannot, ranks), strict=True):
            if problem:
                raise ConfigError(
                    f"shard_transfers=True, but rank {rank} can't share: {problem}. Pass shard_transfers='auto' to let such "
                    f"ranks load all weights themselves."
                )
        if host_group is not None:
            self.speeds = host_group.speeds
            if share is True or pays(host_group.speeds):  # all ranks of the host have measured the same
                self.host_group = host_group
                host_group.post("join", self._model)
                self._leave = weakref.finalize(owner, host_group.post, "leave", self._model)
                self._leave.atexit = False
            else:
                self.why_not = "sharing would not make weights arrive faster here"
        if self._here and not self._config.low_cpu_mem_usage:
            self.shared_host_memory = SharedHostMemory(self._rendezvous, self._model, self._here)
        if self.host_group is None:
            logger.info("Not sharing transfers of %s among GPUs: %s.", self._title, self.why_not)

    def _compare_options(self) -> None:
        """Make sure that ranks which cannot meet say so at once, and why.

        Raises:
            ConfigError: two ranks have different options of which all have to have the same.
        """
        assert self._rendezvous is not None
        mine, ranks = [str(getattr(self._config, name)) for name in _ALIKE], self._rendezvous.ranks
        found = self._exchange("options", mine, ranks)
        for rank, values in zip(ranks, found, strict=True):
            for what, value, first in zip(_ALIKE.values(), values, found[0], strict=True):
                if value != first:
                    raise ConfigError(
                        f"All ranks of process_group need the same options, but {what} is {value} in rank {rank}, and "
                        f"{first} in rank {ranks[0]}."
                    )

    def check(self, groups: Mapping[str, Sequence[PlacedBlob]]) -> None:
        """Make sure that all ranks have the same model.

        Args:
            groups: For the id of each group, its blobs, from byte 0 of a slot on.

        Raises:
            ModuleError: another rank has other groups, or groups with other bytes.
            StateError: a rank has failed, or is missing.
        """
        assert self._rendezvous is not None
        if self.shared_host_memory is not None:
            self.shared_host_memory.end()
            self.shared_host_memory = None
        all_blobs = [*groups.values()]
        names = [*map(_same_as, all_blobs)]
        sizes = [sum(placed.blob.layout.num_bytes for placed in blobs) for blobs in all_blobs]
        mine = [[*each] for each in zip(groups, sizes, names, strict=True)]
        ranks = self._rendezvous.ranks
        found = self._exchange("groups", [self._title, mine], ranks)
        first_title, firsts = found[0]
        for rank, (title, theirs) in zip(ranks, found, strict=True):
            problem = _difference(first_title, firsts, title, theirs)
            if problem:
                raise OtherModel(rank, ranks[0], problem)
        # Nothing is read of what the ranks have in common: files, and memory that was compared as it was set up.
        here = [] if self.host_group is None else self._here
        unsure = _unsure(
            [[name for *_, name in theirs] for rank, (_, theirs) in zip(ranks, found, strict=True) if rank in here]
        )
        other = None
        if unsure:
            logger.info("All bytes of %d groups are compared among ranks, which store them separately.", len(unsure))
            hashes = run_all(partial(_hash_of, all_blobs[at]) for at in unsure)
            of_all = self._exchange("hashes", hashes, here)
            for rank, theirs in zip(here, of_all, strict=True):
                differ = [at for at, its, first in zip(unsure, theirs, of_all[0], strict=True) if its != first]
                if differ and other is None:
                    other = rank, here[0], f"group {[*groups][differ[0]]!r} has other weights"
            for at, digest in zip(unsure, hashes, strict=True):
                names[at] = digest
        for found_there in filter(None, self._exchange("others", other or [], ranks)):  # hosts compare for themselves
            raise OtherModel(*found_there)
        for (group_id, blobs), name in zip(groups.items(), names, strict=True):
            self._digests[group_id] = _state_of(blobs), f"{_layout_of(blobs, 0)} {name}"

    def _exchange(self, topic: str, content: object, ranks: list[int]) -> list[Any]:
        assert self._rendezvous is not None
        return self._rendezvous.exchange(f"{self._model}/{topic}", content, ranks)

    def fail(self, error: BaseException) -> None:
        """Offloading has failed here: let the other ranks know, if they are still at it."""
        if self._rendezvous is not None:
            self._rendezvous.fail(self._model, error)

    def close(self) -> None:
        """The model is not offloaded any more, or never was."""
        if self._leave is not None:
            self._leave()
        self.host_group = self._leave = None

    # ---------------------------------------------------------------- a pass

    def begin_pass(self, missing_bytes: int) -> None:
        """
        Args:
            missing_bytes: What the pass can need, and is on the device in no slot.

        Raises:
            StateError: another rank has ended.
        """
        host_group = self.host_group
        if host_group is None:
            return
        if host_group.error is not None:
            raise again(host_group.error)
        gain = missing_bytes * (1 - 1 / host_group.num_ranks) / host_group.speeds.alone
        host_group.begin_pass(self._model, tuning().shard_timeout_seconds + gain)

    def recover(self) -> None:
        """A pass failed: gather no more, and return once nothing is on its way."""
        for job in [*self._jobs]:
            job.cancel()
        self._jobs.clear()
        if self.host_group is not None:
            self.host_group.post("break_off", self._model)
            done = self._backend.new_event()
            done.record(self.host_group.stream)
            done.synchronize()

    def agree(self, what: str, names: Sequence[str]) -> Sequence[str]:
        """The groups that stay at a place: those of the first rank's plan. All ranks then need the same ones from elsewhere.

        Args:
            what: The place.
            names: Those of this rank's plan.
        """
        assert self.host_group is not None
        host_group, key = self.host_group, f"{self._model}/{what}"
        found = [*names] if host_group.is_first else host_group.residents.get(key)
        if host_group.is_first and self._agreed.get(what) != found:
            host_group.post("reside", (key, found))
        self._agreed[what] = found
        return names if found is None else found

    @property
    def has_news(self) -> bool:
        """Whether the first rank's plan puts other groups somewhere than `agree` has said."""
        if self.host_group is None or self.host_group.is_first:
            return False
        residents = self.host_group.residents
        return any(residents.get(f"{self._model}/{what}") != names for what, names in self._agreed.items())

    def describe(self) -> str:
        """What the plan has to say of the other GPUs."""
        host_group, speeds = self.host_group, self.speeds
        figures = ""
        if speeds is not None:
            figures = (
                f" Measured with all ranks at once: {speeds.alone / 1e9:.3g} GB/s reach each over its own link, "
                f"and {speeds.shared / 1e9:.3g} GB/s reach each if they share."
            )
        if host_group is None:
            return f"Each rank loads its own weights: {self.why_not}.{figures}"
        size = host_group.num_ranks
        return f"{size} GPUs share each group: each loads 1/{size}, and the others send the rest.{figures}"

    # ---------------------------------------------------------------- what is sent

    def parts_of(self, blobs: Sequence[PlacedBlob | PlacedImage], *, alone: bool = False) -> list[Shard]:
        """What this rank sends of each group; all of it if `alone`, because the other ranks will not need it now."""
        host_group = self.host_group
        assert host_group is not None
        if host_group.error is not None:
            raise again(host_group.error)  # the slot may be one that another rank still writes to
        alone = alone or self._model in host_group.alone
        found = []
        for label, run in groupby(blobs, lambda placed: placed.label):
            mine = list(run)
            moves = joined(placed.moves() for placed in mine)
            at, key = mine[0].at, f"{self._model}/{label}"
            last = mine[-1]
            part_bytes, digest, num_bytes = 0, "", 0
            if not isinstance(last, PlacedImage):  # that stays on the device compressed, so it is sent once
                num_bytes = last.at + last.blob.layout.num_bytes - at
                is_outdated = any(placed.blob.is_outdated for placed in mine if isinstance(placed, PlacedBlob))
                if num_bytes >= tuning().min_shared_bytes and not alone and not is_outdated and may_be_cut(moves):
                    part_bytes = part_of(num_bytes, host_group.num_ranks)
            if part_bytes:
                digest = self._digest_of(label, mine, at)
            found.append(Shard(at, moves, mine, key, digest, num_bytes, part_bytes))
        return found

    def moves_of(self, parts: Sequence[Shard]) -> list[Move]:
        """What this rank sends of these groups."""
        assert self.host_group is not None
        found: list[Move] = []
        for part in parts:
            if not part.part_bytes:
                found += part.moves
                continue
            for first, last in part.own(self.host_group.rank, self.host_group.num_ranks):
                found += moves_within(part.moves, first, last)
        return joined([found])

    def rest_of(self, parts: Sequence[Shard], job: ShardJob) -> list[Move]:
        """What the other ranks did not bring."""
        assert self.host_group is not None
        keys = {shared.key for shared in job.alone}
        self.num_alone += len(keys)
        return [
            move
            for part in parts
            if part.key in keys
            for start, end in part.others(self.host_group.rank, self.host_group.num_ranks)
            for move in moves_within(part.moves, start, end)
        ]

    def job_for(
        self, parts: Sequence[Shard], memory: torch.Tensor, ready: Event, bring_rest: Callable[[ShardJob], None]
    ) -> ShardJob | None:
        """A job for groups that are about to be sent to a slot's memory. None if none of them is shared."""
        host_group, cut = self.host_group, [part for part in parts if part.part_bytes]
        assert host_group is not None
        if not cut:
            return None
        sent, shared = self._backend.new_event(), []
        for part in cut:
            target = memory[part.at : part.at + part.part_bytes * host_group.num_ranks]
            gathered = SharedBytes(target, part.part_bytes, sent)
            shared.append(Shared(part.key, part.digest, gathered))
        job = ShardJob(
            model=self._model,
            shared=shared,
            begun=self._backend.new_event(),
            sent=sent,
            rest=self._backend.new_event(),
            ready=ready,
            stream=host_group.stream,
            post=host_group.post,
            bring_rest=bring_rest,
            send=partial(self._send, host_group),
        )
        self._jobs.add(job)
        return job

    def _send(self, host_group: HostGroup, shared: Shared, places: Mapping[str, Place]) -> list[Event]:
        """Send this rank's part of a group to the other ranks: the thread of the host group does."""
        events = host_group.link.send(shared.bytes, places)
        self.bytes_from_peers += shared.bytes.memory.numel() - shared.bytes.part_bytes
        return events

    # ---------------------------------------------------------------- the same bytes

    def _digest_of(self, label: str, blobs: Sequence[PlacedBlob | PlacedImage], at: int) -> str:
        state = _state_of(blobs)
        known = self._digests.get(label)
        if known is not None and known[0] == state and state:
            return known[1]
        found = f"{_layout_of(blobs, at)} {_hash_of(blobs)}"
        self._digests[label] = state, found
        return found


def _state_of(blobs: Sequence[PlacedBlob | PlacedImage]) -> tuple[Any, ...]:
    """What changes with the bytes of the blobs; empty if nothing does."""
    found = [placed.blob for placed in blobs if isinstance(placed, PlacedBlob)]
    if not all(blob.detects_edits for blob in found):
        return ()
    return tuple((weakref.ref(blob), blob.generation) for blob in found)


def _layout_of(blobs: Sequence[PlacedBlob | PlacedImage], at: int) -> str:
    """A digest of where the bytes lie in the slot."""
    digest = xxhash.xxh3_64()
    for placed in blobs:
        assert isinstance(placed, PlacedBlob)
        specs = [
            (spec.offset, tuple(spec.shape), tuple(spec.stride), str(spec.dtype)) for spec in placed.blob.layout.specs
        ]
        digest.update(repr((placed.at - at, placed.blob.layout.num_bytes, specs)).encode())
    return str(digest.hexdigest())


def _hash_of(blobs: Sequence[PlacedBlob | PlacedImage]) -> str:
    digest = xxhash.xxh3_64()
    for placed in blobs:
        assert isinstance(placed, PlacedBlob)
        for tensor in placed.blob.rest:
            digest.update(memory_of(as_bytes(tensor)))
    return str(digest.hexdigest())


def _same_as(blobs: Sequence[PlacedBlob]) -> str:
    """A text that groups of other ranks have only if they have the same bytes; empty if there is none."""
    place, found = place_of_process(), [placed.blob.same_as for placed in blobs]
    return str(xxhash.xxh3_128_hexdigest(repr((place, found)).encode())) if place and all(found) else ""


def _unsure(names: Sequence[Sequence[str]]) -> list[int]:
    """Which groups may have other bytes in one rank than in another.

    Args:
        names: For each rank, what `_same_as` says of each group.
    """
    return [at for at, each in enumerate(zip(*names, strict=True)) if "" in each or len({*each}) > 1]


def _difference(title: str, groups: list[Any], other_title: str, others: list[Any]) -> str:
    """What the groups of two ranks differ in; empty if they do not."""
    if title != other_title:
        return f"{other_title} instead of {title}"
    for mine, its in zip_longest(groups, others):
        if mine is None or its is None:
            return f"{len(others)} groups instead of {len(groups)}, {(mine or its)[0]!r} is in one of the two only"
        if mine[:2] != its[:2]:
            return f"group {its[0]!r} of {its[1]} bytes instead of {mine[0]!r} of {mine[1]}"
    return ""
