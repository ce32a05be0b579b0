"""What the weights of a module are made of: the plain tensors inside of a tensor subclass, and beside it.

A weight of a quantized layer is a tensor subclass. Some have plain tensors inside, and tell which (`__tensor_flatten__`:
torchao, quanto). Others have memory of their own, and keep scales beside it as attributes (bitsandbytes). Plain tensors are
what moves. On the device another subclass around them stands in for the first kind (`WrappedHolder`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from .base.arena import moved, retried
from .base.layout import span_bytes
from .base.torch_internals import DisableTorchFunctionSubclass, is_traceable_wrapper_subclass
from .base.weak import Weak
from .errors import ModuleError


class ParamSlot:
    """`owner._parameters[name]` or `owner._buffers[name]`. It does not keep the owner alive."""

    owner = Weak[nn.Module]()

    def __init__(self, owner: nn.Module, name: str, is_buffer: bool) -> None:
        self.owner, self.name, self.is_buffer = owner, name, is_buffer

    @property
    def table(self) -> dict[str, torch.Tensor | None]:
        return self.owner._buffers if self.is_buffer else self.owner._parameters  # type: ignore[return-value]


@dataclass(frozen=True, slots=True, eq=False)
class TensorRef:
    """A plain tensor that moves, and every place in the module tree that holds it.

    `holder` is the parameter or buffer; `path` leads from there to the plain tensor inside a tensor subclass, or to one that
    it keeps as an attribute (see `kept_beside`). It is empty for all other tensors.
    """

    fqn: str
    tensor: torch.Tensor
    holder: torch.Tensor
    path: tuple[str, ...]
    places: tuple[ParamSlot, ...]
    is_wrapped: bool
    """Whether the tensor is inside of a tensor subclass that has no memory of its own."""

    @property
    def is_buffer(self) -> bool:
        return self.places[0].is_buffer

    def is_in_place(self) -> bool:
        """Whether the tensor is still the one that `path` leads to."""
        if not self.path:
            return True
        return (inner_of(self.holder, self.path) if self.is_wrapped else self._kept()) is self.tensor

    def _kept(self) -> Any:
        """What `kept_beside` has at `path`. It is asked for at each call."""
        if len(self.path) == 1:
            kept = getattr(_state_of(self.places[0].owner), self.path[0], None)
            if isinstance(kept, torch.Tensor):
                return kept
        found: Any = self.holder
        for name in self.path:
            found = getattr(found, "__dict__", {}).get(name)
        return found

    def kept_by(self) -> Any:
        """The object that keeps the tensor beside the holder; None if the holder does."""
        if len(self.path) > 1:
            return vars(self.holder).get(self.path[0])
        return _state_of(self.places[0].owner)


def plain_tensors(
    fqn: str, tensor: torch.Tensor, owner: nn.Module | None = None
) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """The plain tensors of `tensor`: itself, or those inside of a (quantized) tensor subclass, or also those beside it.

    Args:
        owner: The module that holds `tensor`.

    Raises:
        ModuleError: `tensor` cannot be moved.
    """
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            part = getattr(tensor, name)
            if isinstance(part, torch.Tensor):  # a DTensor names its mesh as well
                for path, plain in plain_tensors(fqn, part):
                    yield (name, *path), plain
        return
    if tensor.device.type == "meta":
        raise ModuleError(
            f"{fqn} is on the meta device, so it has no data. Load the weights first. (LoRA file incomplete? Call "
            f"pipe.delete_adapters(NAME). Taken by accelerate's cpu_offload? Call "
            f"accelerate.hooks.remove_hook_from_module(model, recurse=True).)"
        )
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        what = "is a nested tensor" if tensor.is_nested else f"has the layout {tensor.layout}"
        what = f"is quantized by torch.quantize_* ({tensor.dtype})" if tensor.is_quantized else what
        raise ModuleError(
            f"{fqn} {what}. Only dense (strided) tensors can be offloaded. Offload the siblings of its module instead, or name "
            f"a component of a pipeline in exclude_modules."
        )
    if not _has_memory(tensor):
        kind = type(tensor)
        raise ModuleError(
            f"{fqn} is a {kind.__module__}.{kind.__qualname__}, a tensor subclass without memory of its own that does not tell "
            f"what is inside: it has no __tensor_flatten__ and __tensor_unflatten__. Give the class these methods, or leave "
            f"the module out: name it in exclude_modules of a pipeline, or offload its other parts one by one."
        )
    if tensor.is_conj() or tensor.is_neg():
        raise ModuleError(
            f"{fqn} is a lazily conjugated or negated view. Replace it by the result of resolve_conj() or resolve_neg()."
        )
    yield (), tensor
    for path, kept in kept_beside(tensor, owner).items():
        for _, plain in plain_tensors(".".join((fqn, *path)), kept):
            yield path, plain


def kept_beside(holder: torch.Tensor, owner: nn.Module | None) -> dict[tuple[str, ...], torch.Tensor]:
    """The tensors that a weight of a tensor subclass keeps as attributes, by the way to them.

    bitsandbytes keeps scales there: `weight.quant_state.absmax`, `weight.SCB`. After the first forward `weight.CB` and
    `weight.SCB` are in the layer's `state`, and have the same names here.
    """
    if type(holder) in (torch.Tensor, nn.Parameter, nn.Buffer):
        return {}
    found = dict(_attributes(vars(holder), ()))
    state = None if owner is None else _state_of(owner)
    if state is not None:
        kept = ((name, getattr(state, name)) for name in ("CB", "SCB"))
        found |= {(name,): tensor for name, tensor in kept if isinstance(tensor, torch.Tensor)}
    return found


def _state_of(owner: nn.Module) -> Any:
    """What bitsandbytes' 8-bit layer keeps its weight in after the first forward."""
    state = vars(owner).get("state")
    return state if type(state).__name__ == "MatmulLtState" else None


def _attributes(table: dict[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    for name, value in table.items():
        if isinstance(value, torch.Tensor):
            yield (*path, name), value
        elif len(path) < 2 and not isinstance(value, (nn.Module, type)):  # a weight may know its layer
            yield from _attributes(getattr(value, "__dict__", {}), (*path, name))


def inner_of(tensor: Any, path: tuple[str, ...]) -> torch.Tensor:
    inner: torch.Tensor = reduce(getattr, path, tensor)
    return inner


def _has_memory(tensor: torch.Tensor) -> bool:
    if type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) or not tensor.numel():
        return True
    try:
        return tensor.untyped_storage().nbytes() >= span_bytes(tensor) and tensor.data_ptr() != 0
    except (RuntimeError, NotImplementedError, TypeError):
        return False


def rewrap(tensor: Any, inner: Mapping[tuple[str, ...], torch.Tensor], path: tuple[str, ...] = ()) -> torch.Tensor:
    """A tensor subclass made anew around its plain tensors, or around those that `inner` has in their place."""
    if path in inner or not is_traceable_wrapper_subclass(tensor):
        part: torch.Tensor = inner.get(path, tensor)  # a part that is no tensor stays
        return part
    names, context = tensor.__tensor_flatten__()
    parts = {name: rewrap(getattr(tensor, name), inner, (*path, name)) for name in names}
    wrapped: torch.Tensor = type(tensor).__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())
    return wrapped


def remake(model: nn.Module, make: Callable[[torch.Tensor], nn.Parameter | None]) -> None:
    """Replace each weight that is a wrapper by what `make` returns for it. None leaves it, and what was made before."""
    places: Any = WeakTensorKeyDictionary()  # what is replaced is freed at once
    tables = [module._parameters for module in model.modules()]
    for table in tables:
        for name, weight in table.items():
            if weight is not None and is_traceable_wrapper_subclass(weight):
                places.setdefault(weight, []).append((table, name))
    weights = (weight for table in tables for weight in table.values() if weight is not None)
    for weight in filter(places.__contains__, weights):
        with torch.inference_mode(False), torch.no_grad():
            made = make(weight)
        for table, name in places[weight] if made is not None else ():  # at once: an error parts no tied weight
            table[name] = made


def pack_weights(model: nn.Module, device: torch.device) -> None:
    """Pack weights anew that their library has packed for kernels of the CPU: quanto's int4. Those of `device` can't read them.

    One weight at a time is there. What is inside comes back to RAM as it is: `weight.to("cpu")` would undo it.
    """

    def pack(weight: Any) -> nn.Parameter | None:
        # quanto returns another object for weights that every kernel reads. (Packed by quanto, fp8 would lose its bias.)
        if weight.device.type != "cpu" or not hasattr(weight, "optimize") or weight.optimize() is not weight:
            return None
        before = weight.detach()
        there = moved(before, device)
        if there is before:
            return None
        packed = nn.Parameter(there, requires_grad=weight.requires_grad)
        for _, tensor in plain_tensors("", packed):  # the wrapper goes on to name the device
            tensor.data = tensor.to("cpu")
        return packed

    remake(model, pack)


def unpack_weights(model: nn.Module) -> None:
    """Undo `pack_weights`, once what is inside is back in RAM."""

    def unpack(weight: Any) -> nn.Parameter | None:
        if weight.device.type in ("cpu", "meta") or not hasattr(weight, "optimize"):
            return None
        inside = dict(plain_tensors("", weight))
        if any(tensor.device == weight.device for tensor in inside.values()):
            return None
        there = rewrap(weight, {path: moved(tensor, weight.device) for path, tensor in inside.items()})
        back = retried(weight.device, partial(there.to, "cpu"), weight.nbytes)
        return nn.Parameter(back, requires_grad=weight.requires_grad)

    remake(model, unpack)


def version_of(tensor: torch.Tensor) -> int:
    """The version of a tensor; -1 if it has none."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


def fit_for(tensor: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """A tensor like `view` that `tensor.data` can be set to: an inference tensor if `tensor` was made in inference mode.

    An inference tensor never has a version counter. Bound to a normal tensor it would be neither kind, and most kernels
    would refuse it.
    """
    if tracks_version(tensor):
        return view
    with torch.inference_mode():
        alias = torch.empty(0, dtype=view.dtype, device=view.device)
        return alias.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())


def tracks_version(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a version counter: not if it was made in inference mode.

    `is_inference` would tell about the memory that the tensor is bound to now.
    """
    return version_of(tensor) >= 0


class WrappedHolder:
    """A parameter that is a tensor subclass around plain tensors (a quantized weight).

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
        with DisableTorchFunctionSubclass():
            return self._stand_in is not None and version_of(self._stand_in) != self._version

    def put_on_device(self, views: list[torch.Tensor]) -> None:
        with DisableTorchFunctionSubclass():
            if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
                with torch.inference_mode(False), torch.no_grad():
                    stand_in = self._around(views)
            else:  # to enter and leave both takes longer than all the rest
                stand_in = self._around(views)
            self._version = version_of(stand_in)
        for place in self._places:
            place.table[place.name] = stand_in
        self._stand_in = stand_in

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
