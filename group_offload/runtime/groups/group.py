"""A group: the tensors of a module that are onloaded and offloaded together."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ...base.layout import TensorViews, as_bytes, num_uses
from ...base.mapping import expect_single_pages
from ...partition import GroupSpec, Method
from ...stores.base import PlacedBlob
from ...stores.compressed import CompressedImage
from ...stores.files import FileBlob
from ...stores.moves import Move, Tier, joined
from ...weights import fit_for, tracks_version, version_of, wrapped_holders
from ..slots.slot import Slot, Views
from ..transfers.transfer import Transfer
from .compressed import CompressedGroup
from .part import Forms, Part, same_bits, same_form, same_memory

_version = attrgetter("_version")


class Group:
    """Tensors that move together. Owned by an engine, and used only under its lock.

    A group has one blob, and one more for each time that tensors were added to its modules (a LoRA). So the tensors that
    were there before are not laid out, or written to a file, again.
    """

    def __init__(self, spec: GroupSpec, parts: Sequence[Part], *, may_compute_in_place: bool) -> None:
        """
        Args:
            may_compute_in_place: Whether modules may compute with weights in RAM where they are: on the CPU.
        """
        self.group_id = spec.group_id
        self._openers = [each if isinstance(each, Method) else weakref.ref(each) for each in spec.openers]
        self.num_modules = sum(isinstance(each, nn.Module) for each in spec.openers)
        self.is_table = spec.is_table
        """Whether rows are gathered where the weight is stored. Such a group is never acquired."""
        self.layers = spec.joined or (spec.group_id,)
        """The ids of the groups that were joined to this one."""
        self.may_join = bool(spec.joined) or not (spec.nesting or len(spec.openers) > 1)
        """Whether one layer alone needs the group, or did before."""
        self.nesting = spec.nesting
        self.parts = tuple(parts)
        self.is_in_place = may_compute_in_place and not self.is_in_file
        """Whether the group is used where it is stored. It never has a slot, and its bytes never move."""
        self.num_bytes = 0
        for part in self.parts:
            part.offset = self.num_bytes
            self.num_bytes += part.blob.layout.num_bytes
        self._views = TensorViews([(part.offset, part.blob.layout) for part in self.parts])
        self._copies: tuple[list[Any], list[Move]] = [], []
        """The states of the blobs as `copies` was asked last, and what it returned."""
        self.compressed = CompressedGroup(self.group_id, self.parts)
        """What stays on the device if the group stays there compressed."""
        self.holds = 0
        """The number of calls in progress that need the group."""
        self.slot: Slot[Group] | None = None
        """The slot that the blobs are in, or on their way to. They stay good between calls, until the slot is taken."""
        self.offset = 0
        """The byte of the slot that the group begins at."""
        self.is_bound = False
        """Whether the tensors are views of a slot, or used where they are stored (`is_in_place`), not views of blobs."""
        refs = [ref for part in self.parts for ref in part.refs]
        self._tensors = [ref.tensor for ref in refs]
        self._index_of = {id(tensor): index for index, tensor in enumerate(self._tensors)}
        self._places = [(part, index) for part in self.parts for index in range(len(part.refs))]
        self._beside = [(part, i) for part, i in self._places if part.refs[i].path and not part.refs[i].is_wrapped]
        """The tensors that objects keep which autograd functions may keep too, by part and index."""
        self._buffers = {i: ref.places[0] for i, ref in enumerate(refs) if ref.is_buffer}
        self._tracks_version = [tracks_version(tensor) for tensor in self._tensors]
        self._tracked = [t for t, tracks in zip(self._tensors, self._tracks_version, strict=True) if tracks]
        self._wrapped = wrapped_holders(refs)
        self._rest_version = self._version_sum()
        self._rest_views = [view for part in self.parts for view in part.blob.rest]
        self._rest_addresses = [address for part in self.parts for address in part.addresses]
        self._rest_forms, self._bound_forms = Forms(self._rest_views), Forms(self._rest_views)
        self._versions: list[int] = []
        self._bound: list[torch.Tensor] = []
        """The view that each tensor was bound to, while the whole group is onloaded."""
        self._recast: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By index, values that a forward assigned and that do not fit the blob: where it left them, and a copy on the CPU. The
        next pass lays the group out again, unless the tensor has got another value that fits: `_forget_replaced_recasts`."""
        self._needs_commit = False
        """Whether tensors were changed and their blobs do not have the edits yet."""

    @property
    def openers(self) -> tuple[nn.Module | Method, ...]:
        """The modules and methods that need the group when they are called."""
        found = (each if isinstance(each, Method) else each() for each in self._openers)
        return tuple(opener for opener in found if opener is not None)

    @property
    def is_in_file(self) -> bool:
        """Whether a part of the group is read from a file."""
        return any(isinstance(part.blob, FileBlob) for part in self.parts)

    def expect_single_pages(self, *, expected: bool) -> None:
        """Say how a table that is stored in a file is read: a few rows here and there, or all of it."""
        if self.is_table and self.is_in_file:
            for view in self._rest_views:
                expect_single_pages(view, expected=expected)

    @property
    def images(self) -> list[CompressedImage]:
        """What is compressed of the group."""
        return [part.blob.compressed for part in self.parts if part.blob.compressed is not None]

    @property
    def compressed_bytes(self) -> int:
        return sum(image.num_bytes for image in self.images)

    @property
    def compressed_ram_bytes(self) -> int:
        """The part of `compressed_bytes` that is in RAM."""
        return sum(image.ram_bytes for image in self.images)

    def largest_strip(self, *, is_read: bool) -> int:
        """What a compressed buffer has to hold of what is read from files, or of what is in RAM; 0 if there is none."""
        return max((image.layout.largest_strip for image in self.images if image.is_read is is_read), default=0)

    @property
    def detects_edits(self) -> bool:
        """Whether a slot may be used again after users could edit the weights. See `Blob.detects_edits`."""
        return all(part.blob.detects_edits for part in self.parts)

    def rest(self) -> None:
        """Bind the tensors to their blobs."""
        for tensor, view in zip(self._tensors, self._fit(self._rest_views), strict=True):
            tensor.data = view
        for wrapped in self._wrapped:
            wrapped.put_back()
        for index, (_, on_cpu) in self._recast.items():
            self._tensors[index].data = on_cpu
        self.is_bound = False
        self._rest_version = self._version_sum()

    def onload(self) -> None:
        """Bind the tensors to the slot, which has the blobs from when its ready event is reached, or use them in place."""
        slot = self.slot
        assert slot is not None or self.is_in_place
        bound = self._fit(self._rest_views) if slot is None else self._views_of(slot)
        if self._recast:
            self._forget_replaced_recasts()
            bound = [self._recast.get(index, (view,))[0] for index, view in enumerate(bound)]
        # Before the first tensor is bound: an interrupt may leave only some of them bound.
        self.is_bound = True
        if bound is not self._rest_views:  # else they are bound to these
            for tensor, view in zip(self._tensors, bound, strict=True):
                tensor.data = view
        for wrapped in self._wrapped:
            wrapped.put_on_device(bound)
        self._versions = self._versions_of(self._in_use())
        self._bound = bound

    def offload(self, transfer: Transfer) -> int:
        """Bind the tensors to their blobs again. Values that the forward changed are copied back first.

        Returns:
            The number of tensors that the forward changed.
        """
        is_in_use = self._bound is self._rest_views and not (self._buffers or self._wrapped)
        if is_in_use and not (self.was_touched() or self.was_replaced()):  # nothing has to be bound or copied
            self._bound, self.is_bound = [], False
            return 0
        slot = self.slot
        num_changed = 0
        for index in self.changed():
            tensor = self._in_use()[index]
            part, place = self._places[index]
            stored = part.blob.rest[place]
            fits = same_form(tensor, stored)
            if not same_memory(tensor, self._bound[index]):
                part.sent_generation = -1  # the slot still has the value that the forward replaced
                fits = fits and part.is_alone(place)  # else the bytes between its elements may be another tensor's
            if not fits:
                self._recast[index] = (tensor.detach(), tensor.detach().cpu())
                continue
            self._recast.pop(index, None)  # of an earlier call in the pass
            if slot is None and same_memory(tensor, self._bound[index]):
                num_changed += 1  # in the blob itself
                continue
            value, kept = as_bytes(tensor), as_bytes(stored)
            if slot is not None:
                value = transfer.fetch(value, slot.last_use())
            part.blob.check()  # writing to a weight that is stored in a file that was cut off would be a SIGBUS
            with torch.inference_mode(False), torch.no_grad():
                if not torch.equal(value, kept):
                    part.may_compress = False  # the next forward changes it again
                    part.blob.write(place, value)
                    num_changed += 1
        self._bound = []
        self.rest()
        return num_changed

    def _forget_replaced_recasts(self) -> None:
        """In an offloaded group, whoever bound a tensor to other memory since the forward recast it meant that value."""
        self._recast = {
            index: recast for index, recast in self._recast.items() if same_memory(self._tensors[index], recast[1])
        }

    def recover(self, transfer: Transfer) -> None:
        """A pass failed, or was interrupted: bind the tensors to their blobs, whatever state they are in.

        Values that a forward changed are copied back if the whole group was onloaded.
        """
        has_bytes = self.slot is not None or self.is_in_place
        if self.is_bound and has_bytes and len(self._bound) == len(self._tensors):
            with suppress(Exception):
                if self.slot is not None:
                    self.slot.note_use(transfer.compute_stream)
                self.offload(transfer)
        if self.is_bound:
            self._bound = []
            self.rest()
        self.holds = 0
        self.slot = None

    def find(self, address: int) -> tuple[Part, int, int] | None:
        """The part that this address of the slot belongs to, the index of its tensor, and the byte of its blob."""
        if self.slot is None:
            return None
        at = address - self.slot.memory.data_ptr() - self.offset
        for part in self.parts:
            if 0 <= at - part.offset < part.blob.layout.num_bytes:
                start = at - part.offset
                return part, part.starts[bisect_right(part.starts, (start, len(part.refs))) - 1][1], start
        return None

    def place_of(self, tensor: torch.Tensor) -> tuple[Part, int] | None:
        """The part that this tensor belongs to, and its index there; None if it is of another group."""
        index = self._index_of.get(id(tensor))
        return None if index is None else self._places[index]

    def place_of_alias(self, tensor: torch.Tensor) -> tuple[Part, int] | None:
        """The same for a tensor in no slot that `detach()` has made of one of the group: it shares the version counter."""
        address = tensor.data_ptr() if tensor.grad_fn is None else 0
        shared = (at for at, each in enumerate(self._tensors) if address and each.data_ptr() == address)
        index = next(shared, None)
        return None if index is None else self._places[index]

    def objects_beside(self) -> list[tuple[Any, Part]]:
        """The objects that are no tensors and keep tensors of the group (`weight.quant_state`), and the part of each."""
        return [(owner, part) for part, index in self._beside if (owner := part.refs[index].kept_by()) is not None]

    def was_touched(self) -> bool:
        """Whether an in-place operation changed an offloaded tensor, since it was bound there."""
        return self._needs_commit or self._rest_version != self._version_sum()

    def was_replaced(self) -> bool:
        """Whether a tensor was bound to other memory (`weight.data = ...`) since it was offloaded."""
        if self._recast and not self.is_bound:
            self._forget_replaced_recasts()
        is_elsewhere = list(map(torch.Tensor.data_ptr, self._tensors)) != self._rest_addresses
        return not self._recast and (is_elsewhere or not self._rest_forms.are_of(self._tensors))

    def commit_edits(self, transfer: Transfer) -> None:
        """Make edits of offloaded tensors a part of the bytes that are sent from now on."""
        self._needs_commit = True  # until the last part is done: an error, or an interrupt, may come in between
        for part in self.parts:
            part.blob.store.commit_edits(transfer.wait_for_copies)
            if not part.blob.detects_edits:
                part.sent_generation = -1  # the edit was made in the blob itself, which does not know of it
        self._needs_commit = False
        self._rest_version = self._version_sum()

    @property
    def is_current(self) -> bool:
        """Whether the bytes in the slot are those of the blobs."""
        # Each use of the group asks twice, and a generator would take longer than a list.
        return False not in [p.sent_generation == p.blob.generation and not p.blob.is_outdated for p in self.parts]

    @property
    def is_outdated(self) -> bool:
        return any(part.blob.is_outdated for part in self.parts)

    def check(self) -> None:
        """
        Raises:
            StorageError: another program changed a file of the group, so that reading its tensors is not safe.
        """
        for part in self.parts:
            if not part.is_given_up:
                part.blob.check()

    def give_up(self) -> None:
        for part in self.parts:
            part.give_up()
        self._rest_views, self._rest_addresses = [], []

    def forget_rest(self, tensor: torch.Tensor) -> None:
        """The tensor is stored elsewhere from now on. Else edited pages of files would be in RAM beside its new memory."""
        place = self._index_of[id(tensor)]
        part, index = self._places[place]
        for views, at in ((part.blob.rest, index), (self._rest_views, place)):
            if views:  # else the part, or the group, was given up
                views[at] = torch.empty(0)

    def copies(self) -> list[Move]:
        """Copies to the start of a slot, made once, if all is sent from RAM as it is; else none. (Files are pinned anew.)"""
        states = [(part.blob.tier, part.blob.is_outdated, part.blob.compressed) for part in self.parts]
        if states != self._copies[0]:
            is_plain = all(tier is Tier.RAM and not (outdated or image) for tier, outdated, image in states)
            self._copies = states, joined(placed.moves() for placed in self.blobs_at(0)) if is_plain else []
        return self._copies[1]

    def forget_copies(self) -> None:
        """Blobs are about to be closed: see `release_later`."""
        self._copies = [], []

    def blobs_at(self, offset: int) -> list[PlacedBlob]:
        """The blobs, placed in a slot so that the group's bytes begin at `offset`."""
        on_device = self.compressed.on_device()
        return [
            PlacedBlob(offset + part.offset, self.group_id, part.blob, part.blob.good_image, there)
            for part, there in zip(self.parts, on_device, strict=True)
        ]

    def was_sent(self, slot: Slot[Group], offset: int) -> None:
        """Note that the blobs, as they are now, are on their way to byte `offset` of `slot`."""
        self.slot, self.offset = slot, offset
        for part in self.parts:
            part.sent_generation = part.blob.generation

    def _views_of(self, slot: Slot[Group]) -> list[torch.Tensor]:
        known = slot.views.get(self)
        if known is None or known.offset != self.offset:
            memory = slot.alias(self.offset, self.num_bytes)
            # Views that `_fit` replaces would count as uses.
            views = self._fit(self._views.of(memory))
            known = slot.views[self] = Views(self.offset, memory, views, num_uses(memory))
        slot.handed[known] = self
        return known.tensors

    def _fit(self, views: list[torch.Tensor]) -> list[torch.Tensor]:
        if len(self._tracked) == len(self._tensors):
            return views
        return [fit_for(tensor, view) for tensor, view in zip(self._tensors, views, strict=True)]

    def _version_sum(self) -> int:
        return sum(map(_version, self._tracked))

    def _in_use(self) -> list[torch.Tensor]:
        """The tensors that a forward uses: those inside the stand-in for a tensor subclass."""
        if not self._wrapped:
            return self._tensors
        tensors = list(self._tensors)
        for wrapped in self._wrapped:
            wrapped.replace_inner(tensors)
        return tensors

    def _is_cast_back(self, index: int) -> bool:
        """Whether diffusers' layerwise casting replaces the tensor at each call, and nobody else changes it.

        To compare values makes the host wait for the device.
        """
        part, place = self._places[index]
        ref = part.refs[place]
        registry = ref.places[0].owner.__dict__.get("_diffusers_hook")
        is_changed_by_kernels = ref.is_buffer and ref.places[0].owner.training
        return "layerwise_casting" in getattr(registry, "hooks", ()) and not is_changed_by_kernels

    def changed(self) -> list[int]:
        """The tensors that the forward may have left with other values than it found."""
        # Kernels of batch norm, and codebooks that are updated through `.data`, do not raise the version.
        silent = [i for i, place in self._buffers.items() if place.owner.training or not self._tracks_version[i]]
        tensors = self._in_use()
        if self._is_untouched(tensors):
            return silent
        # An edit of a wrapper changes the tensors inside below autograd: only the wrapper's version rises.
        edited = {index for wrapped in self._wrapped if wrapped.was_edited for index in wrapped.indices}
        found = []
        for index, (tensor, bound) in enumerate(zip(tensors, self._bound, strict=True)):
            has_risen = self._tracks_version[index] and version_of(tensor) != self._versions[index]
            was_touched = has_risen or index in edited or index in silent
            if same_memory(tensor, bound):
                if was_touched:
                    found.append(index)
                continue
            if has_risen:  # what was edited was this memory, or that of another tensor of the group
                return list(range(len(tensors)))
            # The forward replaced the value. Casting hooks do so at every call, and put the same value back.
            is_same = tensor.device == bound.device and same_form(tensor, bound)
            is_cast = is_same and self._tracks_version[index] and self._is_cast_back(index)
            if not is_cast and (was_touched or not is_same or not same_bits(tensor, bound)):
                found.append(index)
        return found

    def _is_untouched(self, tensors: list[torch.Tensor]) -> bool:
        """Whether tensors in use are as they were bound, with the versions that they had then. It is told for all at once."""
        return (
            self._versions_of(tensors) == self._versions
            and list(map(torch.Tensor.data_ptr, tensors)) == list(map(torch.Tensor.data_ptr, self._bound))
            and self._bound_forms.are_of(tensors)
            and not (self._wrapped and any(wrapped.was_edited for wrapped in self._wrapped))
        )

    def _versions_of(self, tensors: list[torch.Tensor]) -> list[int]:
        """The versions of tensors in use, of those that had one before."""
        try:
            if len(self._tracked) == len(tensors):
                return [*map(_version, tensors)]
            return [t._version if tracks else 0 for t, tracks in zip(tensors, self._tracks_version, strict=True)]
        except RuntimeError:  # one has none by now
            return [version_of(t) if tracks else 0 for t, tracks in zip(tensors, self._tracks_version, strict=True)]
