"""Embedding tables that stay where they are stored: rows are gathered there, and only the rows go to the device."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..base.arena import arena_for, moved
from ..base.device import Backend, plain_empty
from ..base.layout import as_bytes
from ..base.tensors import map_tensors

_ORDER = {
    torch.nn.functional.embedding: tuple(signature(torch.nn.functional.embedding).parameters),
    torch.embedding: ("weight", "indices", "padding_idx", "scale_grad_by_freq", "sparse"),
}
"""The names of the arguments, in their order."""
_GETTERS = {getattr(torch.Tensor, name).__get__ for name in ("device", "is_cuda", "is_cpu", "is_xpu")}


class GatheredRows(TorchFunctionMode):
    """One call of an embedding, with indices and rows on the device and the table in RAM or in a mapped file.

    A class that is derived from `nn.Embedding` may do anything in its forward: only the lookup itself is replaced. Other
    functions that are given the table get a copy on the device.
    """

    def __init__(self, module: nn.Module, backend: Backend) -> None:
        super().__init__()
        self._module, self._backend = module, backend
        self._table = module._parameters["weight"]

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        with self:
            return self._module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ORDER:
            found = dict(zip(_ORDER[func], args, strict=False)) | kwargs
            if found["weight"] is self._table:
                return self._gather(func, found)
        if not any(each is self._table for each in (*args, *kwargs.values())):
            return func(*args, **kwargs)
        if func in _GETTERS:
            return func(plain_empty(0, self._backend.device))
        if getattr(func, "__name__", "") == "__get__":
            return func(*args, **kwargs)

        def brought(tensor: torch.Tensor) -> torch.Tensor:
            return self._brought(tensor) if tensor is self._table else tensor

        return func(*map_tensors(tuple(args), brought), **map_tensors(kwargs, brought))

    def _gather(self, func: Any, given: dict[str, Any]) -> torch.Tensor:
        indices = given["input" if "input" in given else "indices"]
        if self._backend.holds(indices):
            found = torch.empty(indices.shape, dtype=indices.dtype, device="cpu")  # a default device may be in force
            # The host waits for the work that makes the indices: mostly they were just sent.
            self._backend.copy(found, indices, self._backend.current_stream(), blocking=True)
            given = {**given, "input" if "input" in given else "indices": found}
        return self._brought(func(**given))

    def _brought(self, rows: torch.Tensor) -> torch.Tensor:
        backend = self._backend
        if not backend.has_streams:
            return rows
        if rows.requires_grad:
            return moved(rows, backend.device)
        rows = rows.contiguous()
        target = arena_for(backend).take(rows.nbytes).view(rows.dtype).view(rows.shape)
        backend.copy(as_bytes(target), as_bytes(rows), backend.current_stream(), blocking=True)
        return target
