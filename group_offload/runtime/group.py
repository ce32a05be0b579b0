"""A group: the tensors of a module that move together, at rest or onloaded."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..layout import as_bytes
from ..partition import GroupSpec, Place, TensorRef
from ..stores.base import Image
from .slots import Slot
from .transfer import Transfer


class Residence(Enum):
    """Where the tensors of a group are, as whoever reads them sees it."""

    AT_REST = 1
    """Views of the image on its tier."""
    ONLOADED = 2
    """Views of a slot."""


class Part:
    """One image of a group, and the tensors it holds."""

    __slots__ = ("devices", "image", "offset", "refs")

    def __init__(self, image: Image, refs: tuple[TensorRef, ...], devices: list[torch.device]) -> None:
        self.image = image
        self.refs = refs
        self.devices = devices
        """Where each tensor was before it was offloaded."""
        self.offset = 0
        """Where the image begins in the group's slot."""

    def as_left(self) -> list[bool]:
        """For each tensor, whether it is still the view at rest that it was bound to."""
        return [_same_memory(ref.tensor, view) for ref, view in zip(self.refs, self.image.rest, strict=True)]


class Group:
    """Tensors that move together. Owned by an engine, and touched only under its lock.

    A group has one image, and one more for tensors that were added to its modules later (a LoRA): what is there already
    is not laid out, or written to a file, again.
    """

    def __init__(self, spec: GroupSpec, height: int, parts: Sequence[Part]) -> None:
        self.group_id = spec.group_id
        self.modules = spec.modules
        self.height = height
        self.parts = tuple(parts)
        self.num_bytes = 0
        for part in self.parts:
            part.offset = self.num_bytes
            self.num_bytes += part.image.layout.num_bytes
        self.holds = 0
        """Calls in progress that need the group."""
        self.slot: Slot | None = None
        """Where its image is, or is on its way to."""
        self.residence = Residence.AT_REST
        self._tensors = [ref.tensor for part in self.parts for ref in part.refs]
        self._is_buffer = [ref.is_buffer for part in self.parts for ref in part.refs]
        self._volatile = [_keeps_statistics(ref) for part in self.parts for ref in part.refs]
        self._tracks_version = [_tracks_version(tensor) for tensor in self._tensors]
        self._wrapped = _wrapped_holders([ref for part in self.parts for ref in part.refs])
        self._versions: list[int] = []
        self._at_bind: list[torch.Tensor] = []
        self._has_edits = False
        """A forward changed tensors, and their images do not know yet."""

    def rest(self) -> None:
        """Bind the tensors to their place at rest."""
        rest = [view for part in self.parts for view in part.image.rest]
        for tensor, view in zip(self._tensors, rest, strict=True):
            tensor.data = view
        for wrapped in self._wrapped:
            wrapped.put_back()
        self.residence = Residence.AT_REST

    def onload_to(self, slot: Slot) -> None:
        """Bind the tensors to `slot`, which holds the image (or will, once its ready event is reached)."""
        views = self._views_of(slot)
        for tensor, view in zip(self._tensors, views, strict=True):
            tensor.data = view
        for wrapped in self._wrapped:
            wrapped.put_on_device(views)
        self._versions = [
            tensor._version if tracks else 0 for tensor, tracks in zip(self._tensors, self._tracks_version, strict=True)
        ]
        self._at_bind = views
        self.residence = Residence.ONLOADED

    def offload(self, transfer: Transfer) -> int:
        """Bind the tensors to their place at rest again. What the forward changed is brought back first.

        Returns:
            How many tensors were brought back.
        """
        slot = self.slot
        assert slot is not None
        num_changed = 0
        recast = []
        rest = (view for part in self.parts for view in part.image.rest)
        for index, (tensor, at_rest) in enumerate(zip(self._tensors, rest, strict=True)):
            if not self._was_changed(index):
                continue
            num_changed += 1
            if _same_form(tensor, at_rest):
                transfer.fetch(as_bytes(at_rest), as_bytes(tensor), slot.last_use)
            else:
                recast.append((tensor, tensor.detach().cpu()))
        if torch.is_grad_enabled():
            # Whatever autograd saved of these weights is about to be overwritten in the slot. Their version makes a
            # backward pass over it raise instead of being silently wrong.
            torch.autograd.graph.increment_version(
                [t for t, tracks in zip(self._tensors, self._tracks_version, strict=True) if tracks]
            )
        self._at_bind = []
        self._has_edits = bool(num_changed)
        self.rest()
        for tensor, value in recast:  # does not fit the image any more: the next pass lays the group out again
            tensor.data = value
        return num_changed

    def is_as_left(self) -> bool:
        return all(all(part.as_left()) for part in self.parts)

    def absorb_replacements(self) -> bool:
        """Take up values that were put in place of the views at rest (`weight.data = ...`).

        Returns:
            False if a tensor has another dtype, shape or strides now, so that the group has to be laid out again.
        """
        rest = [view for part in self.parts for view in part.image.rest]
        for tensor, view in zip(self._tensors, rest, strict=True):
            if not _same_form(tensor, view):
                return False
        for tensor, view in zip(self._tensors, rest, strict=True):
            if not _same_memory(tensor, view):
                with torch.inference_mode(False), torch.no_grad():
                    view.copy_(tensor.detach())
                tensor.data = view
        return True

    def send_to(self, slot: Slot, transfer: Transfer) -> None:
        """Enqueue the copies that bring the group to `slot`."""
        if self._has_edits:  # by a call earlier in this pass
            self.keep_edits()
        self.slot, slot.group = slot, self
        transfer.send(
            [(part.image, slot.memory[part.offset : part.offset + part.image.layout.num_bytes]) for part in self.parts],
            after=slot.last_use,
            ready=slot.ready,
        )

    def keep_edits(self) -> None:
        """Let images whose views at rest were written to send the new values from now on."""
        self._has_edits = False
        for part in self.parts:
            before = part.image.rest
            part.image.keep_edits()
            if part.image.rest is not before:
                self.rest()

    def _views_of(self, slot: Slot) -> list[torch.Tensor]:
        views = slot.views.get(self)
        if views is None:
            views = []
            for part in self.parts:
                end = part.offset + part.image.layout.num_bytes
                views += part.image.layout.views(slot.memory[part.offset : end])
            slot.views[self] = views
        return views

    def _was_changed(self, index: int) -> bool:
        tensor, bound = self._tensors[index], self._at_bind[index]
        if not _same_memory(tensor, bound):
            # Replaced in forward. Casting hooks do so with the same values, at every call.
            return not (_same_form(tensor, bound) and torch.equal(tensor.detach(), bound))
        if not self._tracks_version[index]:
            return self._is_buffer[index]
        if tensor._version != self._versions[index]:
            return True
        # Kernels of batch norm update their statistics without a trace in the version.
        owner = self._volatile[index]
        return owner is not None and owner.training


class _WrappedHolder:
    """A parameter that is a tensor subclass around plain tensors (a quantised weight).

    Its inner tensors cannot simply be rebound: the wrapper tells kernels its own device. While the group is onloaded
    another wrapper, around the views of the slot, stands in its places.
    """

    def __init__(self, holder: torch.Tensor, places: tuple[Place, ...], indices: dict[tuple[str, ...], int]) -> None:
        self._holder = holder
        self._places = places
        self._indices = indices

    def put_on_device(self, views: list[torch.Tensor]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            stand_in = _rewrap(self._holder, {path: views[i] for path, i in self._indices.items()}, ())
            if isinstance(self._holder, nn.Parameter):
                stand_in = nn.Parameter(stand_in, requires_grad=self._holder.requires_grad)
        for place in self._places:
            place.table[place.name] = stand_in

    def put_back(self) -> None:
        for place in self._places:
            place.table[place.name] = self._holder


def _wrapped_holders(refs: Sequence[TensorRef]) -> list[_WrappedHolder]:
    found: dict[int, tuple[TensorRef, dict[tuple[str, ...], int]]] = {}
    for index, ref in enumerate(refs):
        if ref.path:
            found.setdefault(id(ref.holder), (ref, {}))[1][ref.path] = index
    return [_WrappedHolder(ref.holder, ref.places, indices) for ref, indices in found.values()]


def _rewrap(tensor: Any, inner: dict[tuple[str, ...], torch.Tensor], path: tuple[str, ...]) -> torch.Tensor:
    if not is_traceable_wrapper_subclass(tensor):
        return inner[path]
    names, context = tensor.__tensor_flatten__()
    parts = {name: _rewrap(getattr(tensor, name), inner, (*path, name)) for name in names}
    wrapped: torch.Tensor = type(tensor).__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())
    return wrapped


def _tracks_version(tensor: torch.Tensor) -> bool:
    """False for a tensor that was made in inference mode. `is_inference` tells of what it is bound to now."""
    try:
        return tensor._version >= 0
    except RuntimeError:
        return False


def _same_form(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    return tensor.dtype == view.dtype and tensor.shape == view.shape and tensor.stride() == view.stride()


def _same_memory(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    return tensor.data_ptr() == view.data_ptr() and _same_form(tensor, view)


def _keeps_statistics(ref: TensorRef) -> nn.Module | None:
    """The module whose training mode decides whether a call changes this tensor behind the version counter's back."""
    owner = ref.places[0].owner
    return owner if ref.is_buffer and ref.places[0].name in ("running_mean", "running_var") else None
