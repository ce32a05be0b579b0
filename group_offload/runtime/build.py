"""From a module to groups whose tensors are at rest, and back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import nn

from ..config import OffloadConfig
from ..device import Backend
from ..layout import ImageLayout, extent_bytes, lay_out, overlapping
from ..partition import GroupSpec, TensorRef, partition
from ..progress import progress_bar
from ..stores.base import Image
from ..stores.disk import FileImage
from ..stores.folder import Folder
from ..stores.mapping import trim_heap
from ..stores.page_cache import CachedFile, CachedImage, FileMap, Place
from ..stores.pinned import SEGMENT_BYTES, RamImage, Segment
from .group import Group, Part, fit_for

logger = logging.getLogger("group_offload")

RESIDENT_BYTES = 8 << 20
"""Groups that are needed around others are not worth taking turns below this size."""


def build_groups(
    root: nn.Module,
    config: OffloadConfig,
    folder: Folder | None,
    before: Sequence[Group],
    is_compiled: Callable[[nn.Module], bool],
    wait: Callable[[], None],
) -> tuple[Group, ...]:
    """Cut `root` into groups and bring every tensor to its place at rest. What has an image in `before` keeps it.

    If that fails the first time (`before` is empty), all tensors get memory of their own again.

    Args:
        wait: returns once no copy reads an image any more: page-locked memory is not given up before.

    Raises:
        ModuleError, ConfigError: the module cannot be cut: see `partition`.
        GroupFileError: files cannot be written, or were changed by somebody else.
    """
    for group in before:
        group.check()
    cut = partition(root, config, is_compiled)
    known = {id(ref.tensor): part for group in before for part in group.parts for ref in part.refs}
    empty = {group.group_id: list(group.parts) for group in before if not group.num_bytes}
    homes = {id(ref.holder): home for part in known.values() for ref, home in zip(part.refs, part.devices, strict=True)}
    plans = []
    for spec in cut.groups:
        kept, fresh = _reusable(spec, known)
        plans.append(_Plan(spec, kept if spec.tensors else empty.get(spec.group_id, []), fresh))
    made: list[Part] = []
    try:
        if folder is None:
            _rest_in_ram(plans, config, homes, made, wait)
        else:
            _rest_in_files(plans, folder, homes, made)
    except BaseException:
        if not before:
            for part in made:
                materialise(part)
                part.image.close(forget=True)
        raise
    return tuple(Group(plan.spec, height, plan.parts) for plan, height in zip(plans, cut.heights, strict=True))


@dataclass(slots=True)
class _Plan:
    """One group in the making."""

    spec: GroupSpec
    parts: list[Part]
    fresh: tuple[TensorRef, ...]
    """The tensors that have no image yet."""


def _rest_in_files(plans: Sequence[_Plan], folder: Folder, homes: dict[int, torch.device], made: list[Part]) -> None:
    num_bytes = sum(_lay_out(plan.fresh).num_bytes for plan in plans)
    folder.prepare(num_bytes)
    with progress_bar(num_bytes, "Writing group files") as advance:
        for plan in plans:
            if plan.fresh or not plan.parts:  # diffusers writes empty groups too
                kept = len(plan.parts)
                image_id = f"{plan.spec.group_id}+{kept}" if kept else plan.spec.group_id
                tensors = [ref.tensor.detach() for ref in plan.fresh]
                image = FileImage(_lay_out(plan.fresh), tensors, folder, image_id, advance)
                del tensors
                made.append(_bind(image, plan.fresh, homes))
                plan.parts.append(made[-1])
    trim_heap()
    folder.report()


def _rest_in_ram(
    plans: Sequence[_Plan],
    config: OffloadConfig,
    homes: dict[int, torch.device],
    made: list[Part],
    wait: Callable[[], None],
) -> None:
    backend = config.backend
    pins = not config.low_cpu_mem_usage
    if pins and backend.has_streams:
        _adopt_files(plans, backend, homes, made, wait)
    # Each segment is page-locked by another thread while the next one is filled.
    with ThreadPoolExecutor(1, thread_name_prefix="group_offload-lock") as thread:
        before: tuple[Segment, list[_Plan], list[ImageLayout], Future[None]] | None = None
        for run in (*_runs_of(plans), None):
            filled = None
            if run is not None:
                layouts = [_lay_out(plan.fresh) for plan in run]
                segment = Segment(sum(layout.num_bytes for layout in layouts), backend, pin=pins, wait=wait)
                tensors = [[ref.tensor.detach() for ref in plan.fresh] for plan in run]
                segment.fill(list(zip(layouts, tensors, strict=True)))
                del tensors
                filled = segment, run, layouts, thread.submit(segment.lock)
            if before is not None:
                _bind_run(*before, homes, made)
            before = filled


def _bind_run(
    segment: Segment,
    run: list[_Plan],
    layouts: list[ImageLayout],
    locked: Future[None],
    homes: dict[int, torch.device],
    made: list[Part],
) -> None:
    locked.result()
    start = 0
    for plan, layout in zip(run, layouts, strict=True):
        made.append(_bind(RamImage(layout, segment, start), plan.fresh, homes))
        plan.parts.append(made[-1])
        start += layout.num_bytes
    trim_heap()


def _runs_of(plans: Iterable[_Plan]) -> Iterator[list[_Plan]]:
    """The plans with something to place, in runs that share a segment."""
    run: list[_Plan] = []
    num_bytes = 0
    for plan in plans:
        if not plan.fresh:
            continue
        size = _lay_out(plan.fresh).num_bytes
        if run and num_bytes + size > SEGMENT_BYTES:
            yield run
            run, num_bytes = [], 0
        run.append(plan)
        num_bytes += size
    if run:
        yield run


def _adopt_files(
    plans: Sequence[_Plan],
    backend: Backend,
    homes: dict[int, torch.device],
    made: list[Part],
    wait: Callable[[], None],
) -> None:
    """Let weights that are views of a mapped file rest where they are, in the page cache."""
    file_map = FileMap()
    found: dict[str, list[tuple[_Plan, list[tuple[TensorRef, Place]]]]] = {}
    for plan in plans:
        by_path: dict[str, list[tuple[TensorRef, Place]]] = {}
        for cluster in overlapping([ref.tensor.detach() for ref in plan.fresh]):
            places = [(plan.fresh[i], file_map.find(plan.fresh[i].tensor.detach())) for i in cluster]
            for ref, place in places:
                if place is not None and all(other is not None for _, other in places):
                    by_path.setdefault(place.path, []).append((ref, place))
        for path, mine in by_path.items():
            found.setdefault(path, []).append((plan, mine))
    for users in found.values():
        try:
            file = CachedFile([place for _, mine in users for _, place in mine], backend, wait)
        except OSError as error:
            logger.info("Weights are copied to RAM of their own: %s.", error)
            continue
        for plan, mine in users:
            refs = tuple(ref for ref, _ in mine)
            tensors = [ref.tensor.detach() for ref in refs]
            image = CachedImage([ref.fqn for ref in refs], tensors, [place for _, place in mine], file)
            made.append(_bind(image, refs, homes))
            plan.parts.append(made[-1])
            plan.fresh = tuple(ref for ref in plan.fresh if ref not in refs)


def materialise(part: Part) -> None:
    """Give the tensors of `part` memory of their own, on the device where they were. Replaced ones have theirs already.

    Raises:
        GroupFileError: the file of the part was changed by somebody else.
    """
    part.image.check()
    layout = part.image.layout
    as_left = part.as_left()
    with torch.inference_mode(False), torch.no_grad():
        for extent in layout.extents:
            mine = [index for index in extent.tensors if as_left[index]]
            if not mine:
                continue
            home = part.devices[mine[0]]
            flat = extent_bytes(part.image.rest, extent)
            flat = flat.to(home) if home.type != "cpu" else flat.clone()
            for index in mine:
                tensor = part.refs[index].tensor
                tensor.data = fit_for(tensor, layout.specs[index].view(flat, extent.offset))


def size_rings(groups: Iterable[Group], config: OffloadConfig) -> dict[int, int]:
    """The memory that the groups of each height take turns in: room for the two largest, one where there is no stream.

    Groups that are needed for the length of others' calls and are small in all stay where they are.
    """
    sizes: dict[int, list[int]] = {}
    for group in groups:
        if group.num_bytes:
            sizes.setdefault(group.height, []).append(group.num_bytes)
    rings = {}
    for height, found in sorted(sizes.items()):
        largest = sorted(found, reverse=True)[: config.num_slots]
        # Room for all of them would save nothing. Unless it was asked for, overlap is not worth that.
        is_all = len(largest) == len(found) and not config.was_stream_asked_for
        rings[height] = sum(largest[:1] if is_all else largest)
        if height and config.use_stream:
            rings[height] = max(rings[height], min(sum(found), RESIDENT_BYTES))
    return rings


def first_guess(groups: Iterable[Group]) -> list[Group]:
    """The order of the first pass, foreseen: outer groups first, then each group once for each module that needs it."""
    order = [group for group in groups if group.num_bytes for _ in (group.modules if not group.height else (None,))]
    return sorted(order, key=lambda group: -group.height)


def _bind(image: Image, refs: tuple[TensorRef, ...], homes: dict[int, torch.device]) -> Part:
    """Let the tensors of `refs` rest in `image`: here their old memory goes."""
    # What was laid out again, or came later to a module that was on one device, belongs where it, or the module, was.
    usual = next(iter(homes.values())) if len(set(homes.values())) == 1 else None
    devices = [homes.get(id(ref.holder), usual or ref.tensor.device) for ref in refs]
    for ref, view in zip(refs, image.rest, strict=True):
        ref.tensor.data = fit_for(ref.tensor, view)
    return Part(image, refs, devices)


def _reusable(spec: GroupSpec, known: dict[int, Part]) -> tuple[list[Part], tuple[TensorRef, ...]]:
    """Parts of before whose tensors are all in `spec` and where they were left, and the tensors that need a new image."""
    mine = {id(ref.tensor): ref for ref in spec.tensors}
    kept = []
    taken: set[int] = set()
    candidates = dict.fromkeys(known[key] for key in mine if key in known)
    ties = overlapping([ref.tensor.detach() for ref in spec.tensors]) if candidates else []
    for part in candidates:
        keys = {id(ref.tensor): None for ref in part.refs}
        is_tied = any(len({id(spec.tensors[i].tensor) in keys for i in cluster}) == 2 for cluster in ties)
        is_left = all(part.as_left()) and not part.image.is_outdated
        if all(key in mine for key in keys) and is_left and not is_tied:
            part.refs = tuple(mine[key] for key in keys)  # under their new names
            kept.append(part)
            taken.update(keys)
    return kept, tuple(ref for ref in spec.tensors if id(ref.tensor) not in taken)


def _lay_out(refs: Sequence[TensorRef]) -> ImageLayout:
    return lay_out([ref.fqn for ref in refs], [ref.tensor.detach() for ref in refs])
