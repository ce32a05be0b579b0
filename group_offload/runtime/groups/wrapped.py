"""Parameters that are tensor subclasses around plain tensors: quantised weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ...weights import ParamSlot, TensorRef, inner_of, rewrap
from .tensors import version_of


class WrappedHolder:
    """A parameter that is a tensor subclass around plain tensors (a quantised weight).

    It is not enough to bind the inner tensors to a slot, because kernels ask the wrapper for its device. While the group is
    onloaded, another wrapper around the views of the slot stands in for the parameter in its modules.
    """

    def __init__(
        self, holder: torch.Tensor, places: tuple[ParamSlot, ...], indices: dict[tuple[str, ...], int]
    ) -> None:
        self._holder = holder
        self._places = places
        self._indices = indices
        self.indices = [*indices.values()]
        """The indices of the group's tensors that are inside."""
        self._stand_in: torch.Tensor | None = None
        self._version = 0

    @property
    def was_edited(self) -> bool:
        """Whether an in-place operation changed the stand-in."""
        return self._stand_in is not None and version_of(self._stand_in) != self._version

    def put_on_device(self, views: list[torch.Tensor]) -> None:
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                stand_in = self._around(views)
        else:  # to enter and leave both takes longer than all the rest
            stand_in = self._around(views)
        for place in self._places:
            place.table[place.name] = stand_in
        self._stand_in = stand_in
        self._version = version_of(stand_in)

    def _around(self, views: list[torch.Tensor]) -> torch.Tensor:
        # Tensors of its own: a forward that replaces the data of one inside must not replace that of the view.
        stand_in = rewrap(self._holder, {path: views[i].detach() for path, i in self._indices.items()})
        if isinstance(self._holder, nn.Parameter):
            # What nn.Parameter() makes of a tensor subclass, but for a copy of the wrapper.
            stand_in.requires_grad_(self._holder.requires_grad)
            stand_in._is_param = True
        return stand_in

    def replace_inner(self, tensors: list[torch.Tensor]) -> None:
        """Replace this holder's tensors in the list by those that are inside the stand-in now."""
        if self._stand_in is not None:
            for path, index in self._indices.items():
                tensors[index] = inner_of(self._stand_in, path)

    def put_back(self) -> None:
        for place in self._places:
            if self._stand_in is not None and place.table.get(place.name) is self._stand_in:
                place.table[place.name] = self._holder
        self._stand_in = None


def wrapped_holders(refs: Sequence[TensorRef]) -> list[WrappedHolder]:
    found: dict[int, tuple[TensorRef, dict[tuple[str, ...], int]]] = {}
    for index, ref in enumerate(refs):
        if ref.is_wrapped:
            found.setdefault(id(ref.holder), (ref, {}))[1][ref.path] = index
    return [WrappedHolder(ref.holder, ref.places, indices) for ref, indices in found.values()]
