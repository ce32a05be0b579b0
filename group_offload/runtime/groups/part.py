"""One blob of a group, and the tensors whose bytes it has."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from ...stores.base import Blob
from ...stores.moves import Tier
from ...weights import TensorRef
from .tensors import same_memory, version_of


@dataclass(slots=True, eq=False)
class SharedCounter:
    """The version counter of tensors that were made as views of one tensor, by `chunk` or `unbind` for instance."""

    num_increments: int
    """How often the engine raised it."""


class Part:
    """One blob of a group, and the tensors it holds."""

    def __init__(self, blob: Blob, refs: tuple[TensorRef, ...], devices: list[torch.device]) -> None:
        self.blob = blob
        self.may_pack = True
        """Whether packing may be worth it. Not if it saved too little, or if forwards change the tensors."""
        self.refs = refs
        self.devices = devices
        """Where each tensor was before it was offloaded."""
        self.offset = 0
        """The byte of the group that the blob begins at."""
        self.addresses = [view.data_ptr() for view in blob.rest]
        """Where the tensors are at rest."""
        self.sent_generation = -1
        """The generation of the blob when it was sent to the group's slot."""
        self.num_increments = 0
        """How often the engine raised the tensors' versions. Edits raise them too."""
        self.shared_counters: dict[int, SharedCounter] = {}
        """By index, the counters of tensors that share one."""
        self.num_replaced: Counter[int] = Counter()
        """By index, how often a tensor's value was replaced (`weight.data = ...`)."""
        self.starts = sorted((spec.offset, i) for i, spec in enumerate(blob.layout.specs) if 0 not in spec.shape)
        """The byte of the blob that each tensor begins at, and the tensor's index."""

    @property
    def is_read(self) -> bool:
        """Whether threads read the blob, from a file or from RAM that is not page-locked, each time that it is sent."""
        packed = self.blob.packed
        return packed.is_read if packed is not None else self.blob.tier is not Tier.RAM

    def version_of(self, index: int) -> int:
        """How often a tensor was modified other than by the engine, as far as its version tells."""
        version = version_of(self.refs[index].tensor)
        if version < 0:
            return 0
        counter = self.shared_counters.get(index)
        num_increments = self.num_increments if counter is None else counter.num_increments
        return version - num_increments + self.num_replaced[index]

    def was_moved(self) -> bool:
        """Whether the memory at rest was exchanged below torch's tensors (`module.share_memory()`, a queue of processes)."""
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
        """For each tensor, whether it is still the view at rest that it was bound to."""
        if self.is_given_up:
            return [False] * len(self.refs)
        places = zip(self.refs, self.blob.rest, strict=True)
        return [same_memory(ref.tensor, view) and ref.is_in_place() for ref, view in places]
