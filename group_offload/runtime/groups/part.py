"""One blob of a group, and the tensors whose bytes it has: they are bound to other memory again and again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import attrgetter, eq
from typing import Any

import torch

from ...base.layout import num_uses, overlapping
from ...base.torch_internals import TensorGuards
from ...stores.base import Blob
from ...stores.moves import Tier
from ...weights import TensorRef, fit_for, version_of

_FORMS: tuple[Callable[[torch.Tensor], Any], ...] = (torch.Tensor.size, torch.Tensor.stride, attrgetter("dtype"))


class Part:
    """One blob of a group, and the tensors it holds."""

    def __init__(self, blob: Blob, refs: tuple[TensorRef, ...], devices: list[torch.device]) -> None:
        self.blob = blob
        self.may_compress = True
        """Whether compression may be worth it. Not if it saved too little, or if forwards change the tensors."""
        self.refs = refs
        self.devices = devices
        """Where each tensor was before it was offloaded."""
        self.offset = 0
        """The byte of the group that the blob begins at."""
        self.addresses = [view.data_ptr() for view in blob.rest]
        """The addresses of the offloaded tensors."""
        self.sent_generation = -1
        """The generation of the blob when it was sent to the group's slot."""
        self.num_replaced: Counter[int] = Counter()
        """By index, how often a tensor's value was replaced (`weight.data = ...`)."""
        self.starts = sorted((spec.offset, i) for i, spec in enumerate(blob.layout.specs) if 0 not in spec.shape)
        """The byte of the blob that each tensor begins at, and the tensor's index."""

    @property
    def is_read(self) -> bool:
        """Whether threads read the blob, from a file or from RAM that is not pinned, each time that it is sent."""
        compressed = self.blob.compressed
        return compressed.is_read if compressed is not None else self.blob.tier is not Tier.RAM

    def version_of(self, index: int) -> int:
        """How often a tensor was modified, as far as its version tells."""
        return version_of(self.refs[index].tensor) + self.num_replaced[index]

    def was_moved(self) -> bool:
        """Whether the blob's memory was exchanged below torch's tensors (`module.share_memory()`, a queue of processes)."""
        return [view.data_ptr() for view in self.blob.rest] != self.addresses

    @property
    def is_given_up(self) -> bool:
        return not self.blob.rest and bool(self.refs)

    def give_up(self) -> None:
        """Close the blob. The tensors have other memory by now."""
        self.blob.rest, self.addresses = [], []  # first, so that edits are not looked for in a blob that is closed
        self.blob.close()

    def is_alone(self, index: int) -> bool:
        """Whether no other tensor has bytes between the first and the last byte of this one."""
        return any(extent.tensors == (index,) for extent in self.blob.layout.extents)

    def as_left(self) -> list[bool]:
        """For each tensor, whether it is still the view of the blob that it was bound to."""
        if self.is_given_up:
            return [False] * len(self.refs)
        places = zip(self.refs, self.blob.rest, strict=True)
        return [same_memory(ref.tensor, view) and ref.is_in_place() for ref, view in places]

    def replaced(self) -> list[int] | None:
        """The tensors, by index, that are no longer bound to the blob (`weight.data = ...`).

        None if the group has to be laid out again: a tensor has another dtype, shape or strides than its view of the blob, or
        shares bytes of the blob with others, or has no place there any more, or its old value is kept elsewhere
        (`w.data, kept = kept, w.data`).
        """
        if self.is_given_up:
            return None
        found = [index for index, is_left in enumerate(self.as_left()) if not is_left]
        for index in found:
            ref, view = self.refs[index], self.blob.rest[index]
            # Tensors of the storage beside ours: a view keeps the tensor that it is a view of, which is one more.
            is_kept = num_uses(view) > 1 + view._is_view()
            if ref.path or not self.is_alone(index) or not same_form(ref.tensor, view) or is_kept:
                return None
        return found


def commit_replacements(parts: Sequence[Part], all_parts: Sequence[Part]) -> bool:
    """Commit values that replaced views of the blobs of `parts`. Returns False if groups have to be laid out again for that.

    Raises:
        StorageError: another program changed a file of the parts.
    """
    replaced: list[tuple[Part, int]] = []
    for part in parts:
        found = part.replaced()
        if found is None:
            return False
        if found:
            part.blob.check()
        replaced += [(part, index) for index in found]
    if replaced:
        # A tied or swapped value shares memory with another weight's view of a blob: a write there would change that weight.
        stored = [view for part in all_parts for view in part.blob.rest]
        values = [part.refs[index].tensor.detach() for part, index in replaced]
        clusters = overlapping(values + stored)
        if any(cluster[0] < len(values) and len(cluster) > 1 for cluster in clusters):
            return False
    for part, index in replaced:
        tensor, view = part.refs[index].tensor, part.blob.rest[index]
        part.num_replaced[index] += 1
        with torch.inference_mode(False), torch.no_grad():
            view.copy_(tensor.detach())
        tensor.data = fit_for(tensor, view)
    return True


def same_form(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and strides."""
    return tensor.dtype == view.dtype and tensor.shape == view.shape and tensor.stride() == view.stride()


def same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of the same form have the same bits. (As numbers, 0.0 is -0.0, and NaN is not NaN.)"""
    first, second = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (tensor, other))
    return torch.equal(first, second)


def same_memory(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether two tensors have the same form and begin at the same address."""
    return tensor.data_ptr() == view.data_ptr() and same_form(tensor, view)


class Forms:
    """Sizes, strides and dtypes of tensors.

    Every weight is checked when a pass begins, while the device has nothing to do. The guards of torch's compiler compare
    all of them in one call. Where they find another difference, each tensor is compared alone.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._known = [list(map(form, tensors)) for form in _FORMS]
        self._guards: Any = None

    def are_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether `tensors`, as many, have these forms."""
        if self._guards is not None and self._guards.check(*tensors):
            return True
        if not all(all(map(eq, map(form, tensors), known)) for form, known in zip(_FORMS, self._known, strict=True)):
            return False
        # Guards compare more, such as `requires_grad` and modes of torch. They are made again for the present state.
        self._guards = None
        if tensors:
            with suppress(TypeError, RuntimeError):  # another version of torch, or a tensor that guards do not support
                self._guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        return True
