"""Where each tensor of a group lies in the group's flat blob.

A blob is one run of bytes that moves in one copy. Tensors keep their dtype, shape and strides. Tensors that share
memory keep sharing it: what overlaps becomes one *extent* of the blob, and extents start at multiples of 256 bytes, as
torch's CUDA allocator starts its tensors, so that kernels choose the same code as for a resident weight.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from .torch_internals import storage_use_count

ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor in a blob: `offset` is in bytes from the blob's start."""

    fqn: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def view(self, blob: torch.Tensor, base: int = 0) -> torch.Tensor:
        """The tensor, as a view of `blob`: flat uint8 that begins at byte `base` of the blob."""
        if 0 in self.shape:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=blob.device)
        start = self.offset - base
        end = start + span_of(self.shape, self.stride, self.dtype.itemsize)
        # as_strided counts from the start of the storage: it has to be told where this view begins.
        flat = blob[start:end].view(self.dtype)
        return flat.as_strided(self.shape, self.stride, flat.storage_offset())


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of bytes of a blob that one piece of memory fills; `tensors` are indices of the specs in it."""

    offset: int
    num_bytes: int
    tensors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlobLayout:
    """The specs of a group's tensors, in the order in which they were given, and the extents they fill."""

    specs: tuple[TensorSpec, ...]
    extents: tuple[Extent, ...]
    num_bytes: int

    def views_by_extent(self, memory: Callable[[Extent], torch.Tensor]) -> list[torch.Tensor]:
        """Like `TensorViews`, each extent in memory of its own (flat uint8, [Extent.num_bytes]).

        Whoever copies, pickles or saves one of these tensors then takes its own bytes along and no others.
        """
        with torch.inference_mode(False), torch.no_grad():
            views: dict[int, torch.Tensor] = {}
            for extent in self.extents:
                flat = memory(extent)
                views.update((i, self.specs[i].view(flat, extent.offset)) for i in extent.tensors)
            return [views[i] for i in range(len(self.specs))]


class TensorViews:
    """Views of blobs' tensors, in the order of their specs: prepared once, for any memory at whose bytes the blobs begin."""

    def __init__(self, placed: Iterable[tuple[int, BlobLayout]]) -> None:
        self._specs = [(start, spec) for start, layout in placed for spec in layout.specs]
        self._dtypes = [spec.dtype for _, spec in self._specs]
        self._shapes = [spec.shape for _, spec in self._specs]
        self._strides = [spec.stride for _, spec in self._specs]
        offsets = [divmod(start + spec.offset, spec.dtype.itemsize) for start, spec in self._specs]
        self._offsets = [offset for offset, _ in offsets]
        self._is_aligned = not any(left for _, left in offsets) and not any(0 in shape for shape in self._shapes)

    def of(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in `memory` (flat uint8)."""
        # A view made in inference mode would make the weight it is assigned to an inference tensor for good.
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.of(memory)
        if memory.storage_offset() or not self._is_aligned:
            return [spec.view(memory, -start) for start, spec in self._specs]
        flats = {dtype: memory.view(dtype) for dtype in {*self._dtypes}}
        of_dtypes = map(flats.__getitem__, self._dtypes)
        return [*map(torch.Tensor.as_strided, of_dtypes, self._shapes, self._strides, self._offsets)]


def lay_out(fqns: Sequence[str], tensors: Sequence[torch.Tensor]) -> BlobLayout:
    """Lay `tensors` (plain, strided) out in one blob, in the order given."""
    offsets, end = [0] * len(tensors), 0
    for members in overlapping(tensors):
        start = aligned(end)
        low, high = _address_range(tensors, members)
        for index in members:
            offsets[index] = start + (tensors[index].data_ptr() - low if tensors[index].numel() else 0)
        end = start + high - low
    return lay_out_at(fqns, tensors, offsets, aligned(end))


def lay_out_at(
    fqns: Sequence[str], tensors: Sequence[torch.Tensor], offsets: Sequence[int], num_bytes: int
) -> BlobLayout:
    """The layout of a blob that exists already, with tensor `i` at byte `offsets[i]`."""
    specs = tuple(
        TensorSpec(fqn=fqn, dtype=t.dtype, shape=tuple(t.shape), stride=tuple(t.stride()), offset=offset)
        for fqn, t, offset in zip(fqns, tensors, offsets, strict=True)
    )
    extents = []
    for members in overlapping(tensors):
        low, high = _address_range(tensors, members)
        extents.append(Extent(offset=min(offsets[i] for i in members), num_bytes=high - low, tensors=tuple(members)))
    return BlobLayout(specs=specs, extents=tuple(extents), num_bytes=num_bytes)


def overlapping(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Indices of `tensors`, in lists: those in one list share bytes. Lists and their members keep the given order."""
    ranges = []
    clusters = []
    for index, tensor in enumerate(tensors):
        if tensor.numel():
            start = tensor.data_ptr()
            ranges.append((str(tensor.device), start, start + span_bytes(tensor), index))
        else:
            clusters.append([index])
    device, reach = "", 0
    for where, start, end, index in sorted(ranges):
        if where == device and start < reach:
            clusters[-1].append(index)
            reach = max(reach, end)
        else:
            clusters.append([index])
            device, reach = where, end
    return sorted(sorted(cluster) for cluster in clusters)


def num_uses(tensor: torch.Tensor) -> int:
    """How many tensors (and arrays) have the storage of `tensor`, itself included."""
    storage = tensor.untyped_storage()
    return int(storage_use_count(storage._cdata)) - 1  # less `storage` itself


def span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element of `tensor`, the gaps of its strides included."""
    return span_of(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype.itemsize)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes that `tensor` spans, gaps included, as a flat uint8 view."""
    num_elements = span_bytes(tensor) // tensor.dtype.itemsize
    # Not detach(): that would share a version counter, which a tensor made in inference mode does not have.
    return tensor.data.as_strided((num_elements,), (1,), tensor.storage_offset()).view(torch.uint8)


def extent_bytes(tensors: Sequence[torch.Tensor], extent: Extent) -> torch.Tensor:
    """What fills `extent`: a flat uint8 view of the memory that its tensors share."""
    low, high = _address_range(tensors, extent.tensors)
    first = next(tensors[i] for i in extent.tensors if not tensors[i].numel() or tensors[i].data_ptr() == low)
    if high - low == span_bytes(first):
        return as_bytes(first)
    # Several tensors that overlap share a storage; the one that starts first may not reach the end.
    storage = first.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage)
    start = low - storage.data_ptr()
    return whole[start : start + high - low]


def _address_range(tensors: Sequence[torch.Tensor], members: Sequence[int]) -> tuple[int, int]:
    filled = [tensors[i] for i in members if tensors[i].numel()]
    if not filled:
        return 0, 0
    return min(t.data_ptr() for t in filled), max(t.data_ptr() + span_bytes(t) for t in filled)


def span_of(shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int) -> int:
    if 0 in shape:
        return 0
    return (sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1) * itemsize


def aligned(num_bytes: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a flat CPU uint8 tensor, for system calls that read or write it. It keeps the tensor alive."""
    if not tensor.numel():
        return memoryview(b"")
    memory = (ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")
