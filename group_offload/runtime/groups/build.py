"""Makes groups: brings their tensors into blobs, in RAM and in files; gives tensors their own memory back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from ...base.arena import moved
from ...base.layout import BlobLayout, extent_bytes, lay_out, overlapping, span_bytes
from ...base.mapping import trim_heap
from ...base.pagemap import can_detect_writes
from ...base.pinning import PinLimit
from ...base.pool import Task, on_pool
from ...base.progress import progress_bar
from ...base.ram import fits
from ...base.release import wait_for_releases
from ...base.tuning import tuning
from ...config import OffloadConfig
from ...errors import ConfigError, StorageError
from ...partition import GroupSpec, adapter_weights
from ...plan.budgets import describe_bytes
from ...stores.base import Blob
from ...stores.compressed import is_compressible
from ...stores.files import Checkpoint, FileBlob, FileMap, FileSpan, write_blob
from ...stores.folder import Folder
from ...stores.moves import Tier
from ...stores.pinned import HostAllocator, RamBlob, Segment
from ...weights import TensorRef, fit_for
from .group import Group
from .part import Part
from .trained import may_be_trained

logger = logging.getLogger("group_offload")

_MOST_SEGMENTS = 64
"""About the number of segments that a large model is stored in, if its groups are small."""


@dataclass(slots=True, eq=False)
class _BuildPlan:
    """One group in the making."""

    spec: GroupSpec
    parts: list[Part]
    fresh: tuple[TensorRef, ...]
    """The tensors that have no blob yet."""


_Views = dict[tuple[str, tuple[str, int]], list[tuple[_BuildPlan, list[tuple[TensorRef, FileSpan]]]]]
"""By file: the groups with tensors in the file, and for each group these tensors and their bytes of the file."""


@dataclass(slots=True, kw_only=True, eq=False)
class Builder:
    """Brings every tensor of a module to a blob. For one call of `build`."""

    root: nn.Module
    specs: Sequence[GroupSpec]
    config: OffloadConfig
    folder: Folder | None
    before: Sequence[Group]
    """The groups of the module until now. Their blobs are kept where the tensors are the same."""
    wait: Callable[[], None]
    """Returns once no copy reads a blob any more: pinned memory is kept until then."""
    casts: Mapping[int, torch.dtype]
    """By id, the tensors that get another dtype before they are placed, one group after another."""
    host: HostAllocator | None
    """RAM that other processes have in common with this one, for weights that are in no file."""
    _homes: dict[int, torch.device] = field(default_factory=dict)
    """By id, the devices of parameters and buffers before they were offloaded."""
    _groups_before: dict[int, Group] = field(default_factory=dict)
    """By id, the groups that tensors were in."""
    _made: list[Part] = field(default_factory=list)
    """The new parts."""

    def build(self) -> tuple[Group, ...]:
        """Build the groups. If that fails, all tensors that were brought to a blob get separate memory again.

        Raises:
            ConfigError: weights are to stay in the files that they were loaded from, are in no such file, and there is no
                folder for group files.
            StorageError: files cannot be written, or another program changed them.
        """
        config, before = self.config, self.before
        for group in before:
            group.check()
        known = {id(ref.tensor): part for group in before for part in group.parts for ref in part.refs}
        empty = {group.group_id: list(group.parts) for group in before if not group.num_bytes}
        self._groups_before = {id(ref.tensor): group for group in before for part in group.parts for ref in part.refs}
        self._homes = {
            id(ref.holder): home for part in known.values() for ref, home in zip(part.refs, part.devices, strict=True)
        }
        plans = []
        for spec in self.specs:
            kept, fresh = _reusable(spec, known)
            plans.append(_BuildPlan(spec, kept if spec.tensors else empty.get(spec.group_id, []), fresh))
        try:
            file_map = FileMap()
            self._leave_in_files(plans, _find_views(plans, self.casts, file_map))
            for plan in plans:
                for ref in plan.fresh:  # these are going to be read
                    file_map.check(ref.fqn, ref.tensor.detach())
            # Tensors that may be trained get blobs of their own, so that they can leave alone.
            trainable = may_be_trained([ref for spec in self.specs for ref in spec.tensors])
            fresh_of = {plan: plan.fresh for plan in plans}
            for is_trainable in (False, True):
                for plan, all_fresh in fresh_of.items():
                    plan.fresh = tuple(ref for ref in all_fresh if (id(ref.holder) in trainable) is is_trainable)
                if is_trainable and not any(plan.fresh for plan in plans):
                    break
                if self.folder is not None and not before:  # what changes later stays in RAM
                    self._store_in_files(plans, self.folder)
                self._store_in_ram(plans)
            # Tests share on the CPU too.
            in_place = not config.backend.has_streams and config.shard_transfers is not True
            return tuple(Group(plan.spec, plan.parts, may_compute_in_place=in_place) for plan in plans)
        except BaseException:
            with ExitStack() as undo:  # which goes on with the others if one part cannot be undone
                for part in self._made:
                    undo.callback(part.blob.close)
                    undo.callback(materialize, part)
            raise

    # ---------------------------------------------------------------- in the files that weights were loaded from

    def _leave_in_files(self, plans: Sequence[_BuildPlan], views: _Views) -> None:
        """Leave weights in the files that they are views of."""
        config = self.config
        if config.is_stored_on_disk or config.has_budgets:
            # Weights that are edited later go to RAM.
            is_promised = config.is_stored_on_disk and self.folder is None and not self.before
            if is_promised:
                _refuse_what_is_in_no_file(plans, views, adapter_weights(self.root))
            self._adopt(views, locks=False, is_promised=is_promised)
            return
        moving = _only(views, is_table=False)
        num_bytes = sum(span.num_bytes for users in moving.values() for _, mine in users for _, span in mine)
        may_lock, has_room = config.may_pin_files and not self.config.compress, fits(num_bytes)
        if num_bytes and may_lock and not has_room:
            logger.warning(
                "The checkpoint (%s) doesn't fit in available RAM; weights will be read from disk in every forward, at disk "
                "speed.",
                describe_bytes(num_bytes),
            )
        self._adopt(_only(views, is_table=True), locks=False)
        self._adopt(moving, locks=may_lock and has_room)

    def _adopt(self, views: _Views, *, locks: bool, is_promised: bool = False) -> None:
        """
        Args:
            locks: Whether the files are pinned in the page cache. Weights of one that cannot be are not left there.
            is_promised: Whether the user asked for weights to stay in files.

        Raises:
            ConfigError: `is_promised`, and a file is not there any more.
            StorageError: a file was cut off.
        """
        for users in views.values():
            try:
                checkpoint = Checkpoint.of([span for _, mine in users for _, span in mine], self.folder)
            except StorageError:
                raise
            except OSError as error:
                if is_promised:
                    raise ConfigError(
                        f"offload_device='disk' can't leave {users[0][1][0][0].fqn!r} in the file it was loaded from: {error}. "
                        f"Reload the model, or pass offload_to_disk_path to write another file, or offload_device='cpu'."
                    ) from error
                logger.info("Can't leave weights in the file they were loaded from: %s.", error)
                continue
            if locks and not checkpoint.lock(None, self.config.backend, self.wait):
                logger.info(
                    "Copying weights of %s to RAM: the file can't be pinned in the page cache.", checkpoint.path
                )
                continue
            if locks:
                logger.info("Weights stay in %s, pinned in the page cache.", checkpoint.path)
            for plan, mine in users:
                refs = tuple(ref for ref, _ in mine)
                tensors = [ref.tensor.detach() for ref in refs]
                blob = FileBlob.of([ref.fqn for ref in refs], tensors, [span for _, span in mine], checkpoint)
                if locks:
                    blob.tier = Tier.RAM
                plan.parts.append(self._bind(blob, refs))
                plan.fresh = tuple(ref for ref in plan.fresh if ref not in refs)

    # ---------------------------------------------------------------- in group files and in RAM

    def _store_in_files(self, plans: Sequence[_BuildPlan], folder: Folder) -> None:
        num_bytes = sum(_size_after(plan.fresh, self.casts) for plan in plans)
        with folder.hold(num_bytes), progress_bar(num_bytes, "Writing group files") as advance:
            for plan in plans:
                if plan.fresh or not plan.parts:  # diffusers writes empty groups too
                    kept = len(plan.parts)
                    blob_id = f"{plan.spec.group_id}+{kept}" if kept else plan.spec.group_id
                    _cast(plan.fresh, self.casts)
                    tensors = [ref.tensor.detach() for ref in plan.fresh]
                    blob = write_blob(_lay_out(plan.fresh), tensors, folder, blob_id, advance)
                    del tensors
                    plan.parts.append(self._bind(blob, plan.fresh))
                    plan.fresh = ()
                    if self.casts:
                        trim_heap()  # else what was cast would add up in it
        trim_heap()

    def _store_in_ram(self, plans: Sequence[_BuildPlan]) -> None:
        wait_for_releases()
        config, backend = self.config, self.config.backend
        limit, segments = PinLimit(backend), list[Segment]()
        before: tuple[Segment, list[_BuildPlan], list[BlobLayout], Task[None]] | None = None
        for run in (*_runs_of(plans, compresses=self.config.compress), None):
            filled = None
            if run is not None:
                for plan in run:
                    _cast(plan.fresh, self.casts)
                layouts = [_lay_out(plan.fresh) for plan in run]
                num_bytes = sum(layout.num_bytes for layout in layouts)
                pins = not config.low_cpu_mem_usage and not run[0].spec.is_table
                segment = Segment(num_bytes, backend, pin=pins, wait=self.wait, host=self.host)
                tensors = [[ref.tensor.detach() for ref in plan.fresh] for plan in run]
                segment.fill(list(zip(layouts, tensors, strict=True)))
                del tensors
                # It is pinned while the next one is filled.
                locking = partial(segment.lock, None if self.config.compress and is_compressible(layouts[0]) else limit)
                filled = segment, run, layouts, on_pool(locking)
                segments.append(segment)
            if before is not None:
                self._bind_run(*before)
            before = filled
        if limit.was_refused:
            # The buffers that the rest goes through need it more.
            chunk_bytes, num_frames = tuning().ring(is_scarce=False, is_of_leaves=config.is_leaf_level)
            num_bytes = sum(segment.bytes.numel() for segment in segments)
            room = chunk_bytes * min(num_frames, 1 - -num_bytes // chunk_bytes)
            while segments and room > 0:
                segment = segments.pop()
                room -= segment.bytes.numel() if segment.is_pinned else 0
                segment.unlock(limit)
        limit.report()

    def _bind_run(self, segment: Segment, run: list[_BuildPlan], layouts: list[BlobLayout], pinned: Task[None]) -> None:
        pinned.wait()
        pinned.result()
        was_on_device = segment.fetch()
        start = 0
        for plan, layout in zip(run, layouts, strict=True):
            plan.parts.append(self._bind(RamBlob(layout, segment, start), plan.fresh))
            start += layout.num_bytes
        if was_on_device:
            segment.backend.release_unused()  # nothing refers to it any more
        trim_heap()

    def _bind(self, blob: Blob, refs: tuple[TensorRef, ...]) -> Part:
        """Make the tensors of `refs` views of `blob`: here their old memory goes. The part is noted before."""
        # What was laid out again, or came later to a module that was on one device, belongs where it, or the module, was.
        homes = self._homes
        usual = next(iter(homes.values())) if len(set(homes.values())) == 1 else None
        part = Part(blob, refs, [homes.get(id(ref.holder), usual or ref.tensor.device) for ref in refs])
        self._made.append(part)
        for ref, view in zip(refs, blob.rest, strict=True):
            ref.tensor.data = fit_for(ref.tensor, view)
            if id(ref.tensor) in self._groups_before:
                self._groups_before[id(ref.tensor)].forget_rest(ref.tensor)
        return part


def _runs_of(plans: Sequence[_BuildPlan], *, compresses: bool) -> Iterator[list[_BuildPlan]]:
    """The plans with tensors to place, in runs that share a segment.

    Two segments at a time are there beside the memory that they are filled from. So none is larger than the largest group, or
    than a small part of all: each segment takes time in each pass.
    """
    run: list[_BuildPlan] = []
    num_bytes = 0
    layouts = [_lay_out(plan.fresh) for plan in plans]
    sizes = [layout.num_bytes for layout in layouts]
    are_compressed = [compresses and is_compressible(layout) for layout in layouts]
    kinds = [(plan.spec.is_table, each) for plan, each in zip(plans, are_compressed, strict=True)]
    before = None
    limit = min(tuning().segment_bytes, max(*sizes, sum(sizes) // _MOST_SEGMENTS, tuning().chunk_bytes, 0))
    for plan, size, kind in zip(plans, sizes, kinds, strict=True):
        if not plan.fresh:
            continue
        if run and (num_bytes + size > limit or plan.spec.is_table or kind != before):
            yield run
            run, num_bytes = [], 0
        run.append(plan)
        num_bytes += size
        before = kind
    if run:
        yield run


def _find_views(plans: Sequence[_BuildPlan], casts: Mapping[int, torch.dtype], file_map: FileMap) -> _Views:
    """The weights that are unchanged views of mapped files, and will not be cast."""
    found: _Views = {}
    for plan in plans:
        by_file: dict[tuple[str, tuple[str, int]], list[tuple[TensorRef, FileSpan]]] = {}
        for cluster in overlapping([ref.tensor.detach() for ref in plan.fresh]):
            mine = [plan.fresh[i] for i in cluster]
            spans = [(ref, None if id(ref.tensor) in casts else file_map.find(ref.tensor.detach())) for ref in mine]
            for ref, span in spans:
                if span is not None and all(other is not None for _, other in spans):
                    by_file.setdefault((span.path, span.identity), []).append((ref, span))
        for file, mine_there in by_file.items():
            found.setdefault(file, []).append((plan, mine_there))
    return found


def _only(views: _Views, *, is_table: bool) -> _Views:
    """The same for the tables, or for the groups that move."""
    found = {file: [each for each in users if each[0].spec.is_table is is_table] for file, users in views.items()}
    return {file: users for file, users in found.items() if users}


def _refuse_what_is_in_no_file(plans: Sequence[_BuildPlan], views: _Views, adapters: set[int]) -> None:
    """Buffers stay in RAM, and so do adapters, whose files are not mapped."""
    in_files = {id(ref.tensor) for users in views.values() for _, mine in users for ref, _ in mine}
    others = [
        ref
        for plan in plans
        for ref in plan.fresh
        if not ref.is_buffer and ref.tensor.numel() and not {id(ref.tensor), id(ref.holder)} & (in_files | adapters)
    ]
    if others and not can_detect_writes():
        raise ConfigError(
            "offload_device='disk' needs /proc/self/pagemap to detect edits of weights, and it isn't readable. Pass "
            "offload_to_disk_path to write files, or offload_device='cpu'."
        )
    if others:
        raise ConfigError(
            f"offload_device='disk' needs every parameter in a safetensors file, and {len(others)} "
            f"{'are' if len(others) > 1 else 'is'} in none (first: {others[0].fqn!r}): cast, modified or created in memory. "
            f"Pass offload_to_disk_path to write them, or offload_device='cpu'."
        )


def _cast(refs: Sequence[TensorRef], casts: Mapping[int, torch.dtype]) -> None:
    with torch.inference_mode(False), torch.no_grad():
        for ref in refs:
            if id(ref.tensor) in casts:
                ref.tensor.data = ref.tensor.detach().to(casts[id(ref.tensor)])


def _size_after(refs: Sequence[TensorRef], casts: Mapping[int, torch.dtype]) -> int:
    layout = _lay_out(refs)
    saved = sum(
        span_bytes(ref.tensor) - span_bytes(ref.tensor) // ref.tensor.dtype.itemsize * casts[id(ref.tensor)].itemsize
        for ref in refs
        if id(ref.tensor) in casts
    )
    return layout.num_bytes - saved


def materialize(part: Part) -> None:
    """Give the tensors of `part` separate memory, on the device where they were before. Replaced ones have it already.

    Views of a checkpoint stay as they are.

    Raises:
        StorageError: another program changed the file of the part, or it is damaged.
    """
    blob, as_left = part.blob, part.as_left()
    blob.check()
    layout = blob.layout
    is_view = isinstance(blob, FileBlob) and not blob.source.is_ours
    if isinstance(blob, FileBlob) and not is_view and blob.is_verified:
        blob.prove()
    pinned = blob.pinned_memory() if isinstance(blob, RamBlob) else None
    with torch.inference_mode(False), torch.no_grad():
        for extent in layout.extents:
            mine = [index for index in extent.tensors if as_left[index]]
            if not mine:
                continue
            home = part.devices[mine[0]]
            if is_view and home.type == "cpu":
                continue  # it is what it was before
            flat = extent_bytes(part.blob.rest, extent)
            if pinned is not None and home.type != "cpu":
                flat = pinned[extent.offset : extent.offset + extent.num_bytes]  # at the speed of the link
            flat = moved(flat, home) if home.type != "cpu" else flat.clone()
            for index in mine:
                tensor = part.refs[index].tensor
                tensor.data = fit_for(tensor, layout.specs[index].view(flat, extent.offset))


def _reusable(spec: GroupSpec, known: dict[int, Part]) -> tuple[list[Part], tuple[TensorRef, ...]]:
    """The known parts whose tensors are all in `spec` and unchanged, and the tensors of `spec` that need a new blob."""
    mine = {id(ref.tensor): ref for ref in spec.tensors}
    kept = []
    taken: set[int] = set()
    candidates = dict.fromkeys(known[key] for key in mine if key in known)
    ties = overlapping([ref.tensor.detach() for ref in spec.tensors]) if candidates else []
    for part in candidates:
        keys = {id(ref.tensor): None for ref in part.refs}
        is_tied = any(len({id(spec.tensors[i].tensor) in keys for i in cluster}) == 2 for cluster in ties)
        is_left = all(part.as_left()) and not part.was_moved() and not part.blob.is_outdated
        if all(key in mine for key in keys) and is_left and not is_tied:
            part.refs = tuple(mine[key] for key in keys)  # under their new names
            kept.append(part)
            taken.update(keys)
    return kept, tuple(ref for ref in spec.tensors if id(ref.tensor) not in taken)


def _lay_out(refs: Sequence[TensorRef]) -> BlobLayout:
    return lay_out([ref.fqn for ref in refs], [ref.tensor.detach() for ref in refs])
