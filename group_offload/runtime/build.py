"""From a module to groups whose tensors are at rest, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import torch
from torch import nn

from ..config import OffloadConfig
from ..layout import ImageLayout, extent_bytes, lay_out, overlapping
from ..partition import GroupSpec, TensorRef, partition
from ..progress import progress_bar
from ..stores.base import Image
from ..stores.disk import FileImage, Folder
from ..stores.pinned import RamImage
from .group import Group, Part, fit_for


def build_groups(
    root: nn.Module,
    config: OffloadConfig,
    folder: Folder | None,
    before: Sequence[Group],
    is_compiled: Callable[[nn.Module], bool],
) -> tuple[Group, ...]:
    """Cut `root` into groups and bring every tensor to its place at rest. What has an image in `before` keeps it.

    If that fails the first time (`before` is empty), all tensors get memory of their own again.

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
        plans.append((spec, kept if spec.tensors else empty.get(spec.group_id, []), fresh))
    num_bytes = sum(_lay_out(fresh).num_bytes for _, _, fresh in plans)
    made: list[Part] = []
    groups = []
    try:
        if folder is not None:
            folder.prepare(num_bytes)
        with progress_bar(num_bytes, "Writing group files") if folder is not None else nullcontext(_ignore) as advance:
            for (spec, kept, fresh), height in zip(plans, cut.heights, strict=True):
                parts = kept
                if fresh or (folder is not None and not kept):  # diffusers writes empty groups too
                    image_id = f"{spec.group_id}+{len(kept)}" if kept else spec.group_id
                    made.append(_make_part(image_id, fresh, config, folder, homes, advance))
                    parts = [*kept, made[-1]]
                groups.append(Group(spec, height, parts))
        if folder is not None:
            folder.report()
    except BaseException:
        if not before:
            for part in made:
                materialise(part)
                part.image.close(forget=True)
        raise
    return tuple(groups)


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


def size_rings(groups: Iterable[Group], config: OffloadConfig) -> dict[int, tuple[int, ...]]:
    """The slots of each height: as large as its largest groups, so that each group has one that it fits into."""
    sizes: dict[int, list[int]] = {}
    for group in groups:
        if group.num_bytes:
            sizes.setdefault(group.height, []).append(group.num_bytes)
    rings = {}
    for height, found in sorted(sizes.items()):
        largest = sorted(found, reverse=True)[: config.num_slots]
        # Slots for all of them would save nothing. Unless it was asked for, overlap is not worth that.
        is_all = len(largest) == len(found) and not config.was_stream_asked_for
        rings[height] = tuple(largest[:1] if is_all else largest)
    return rings


def first_guess(groups: Iterable[Group]) -> list[Group]:
    """The order of the first pass, foreseen: outer groups first, then each group once for each module that needs it."""
    order = [group for group in groups if group.num_bytes for _ in (group.modules if not group.height else (None,))]
    return sorted(order, key=lambda group: -group.height)


def _make_part(
    image_id: str,
    refs: tuple[TensorRef, ...],
    config: OffloadConfig,
    folder: Folder | None,
    homes: dict[int, torch.device],
    advance: Callable[[int], None],
) -> Part:
    tensors = [ref.tensor.detach() for ref in refs]
    layout = _lay_out(refs)
    image: Image = (
        FileImage(layout, tensors, folder, image_id, advance)
        if folder is not None
        else RamImage(layout, tensors, config.backend, pin=not config.low_cpu_mem_usage)
    )
    # What was laid out again, or came later to a module that was on one device, belongs where it, or the module, was.
    usual = next(iter(homes.values())) if len(set(homes.values())) == 1 else None
    devices = [homes.get(id(ref.holder), usual or tensor.device) for ref, tensor in zip(refs, tensors, strict=True)]
    del tensors
    for ref, view in zip(refs, image.rest, strict=True):
        ref.tensor.data = fit_for(ref.tensor, view)  # here the old memory goes
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
        if all(key in mine for key in keys) and all(part.as_left()) and not is_tied:
            part.refs = tuple(mine[key] for key in keys)  # under their new names
            kept.append(part)
            taken.update(keys)
    return kept, tuple(ref for ref in spec.tensors if id(ref.tensor) not in taken)


def _lay_out(refs: Sequence[TensorRef]) -> ImageLayout:
    return lay_out([ref.fqn for ref in refs], [ref.tensor.detach() for ref in refs])


def _ignore(num_bytes: int) -> None:
    pass
