"""Loading without casting: a weight that the library casts while it loads stays as it is in the file, until it is placed.

[Note: Postponed casts]
Weights that come from a file in the dtype that is asked for are views of that file, and take no RAM. A cast makes a copy in
RAM; a library that casts while it loads ends up with all weights there. So its casts of views of files are postponed while
it loads: what `to` returns is a `Postponed`, a tensor of the dtype that was asked for, around the view. A view of it is one
too. Every other operation is computed with the cast weight, which is made for that moment: right, but it takes RAM. Only a
write to one cannot be made right, and is a `refusal`: then the model is loaded without postponing. In this way the library
goes through its own code (names, `_keep_in_fp32_modules`, variants, shards, ties, conversions), and the dtype that it asked
for is known for each weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..base.arena import moved, retried
from ..base.tensors import map_tensors, tensors_in
from ..base.torch_internals import TorchDispatchMode, disabled_torch_function
from ..stores.files import FileMap


class Postponed(torch.Tensor):
    """A tensor that stands for the cast of `source` to its dtype. See [Note: Postponed casts]."""

    source: torch.Tensor
    casts: PostponedCasts

    @staticmethod
    def __new__(cls: type, source: torch.Tensor, dtype: torch.dtype, casts: PostponedCasts) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, source.size(), source.stride(), source.storage_offset(), dtype=dtype, device=source.device
        )

    def __init__(self, source: torch.Tensor, dtype: torch.dtype, casts: PostponedCasts) -> None:
        self.source, self.casts = source, casts

    @cached_property
    def weight(self) -> Any:
        """`source` as a module has it. A tied weight stays one."""
        return nn.Parameter(self.source, self.requires_grad) if isinstance(self, nn.Parameter) else self.source

    def data_ptr(self) -> int:
        return self.source.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.source.untyped_storage()

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        mine = next(tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, cls))
        casts, source = mine.casts, mine.source
        if func.is_view:
            result = func(source, *args[1:], **kwargs)
            if all(tensor.dtype == source.dtype for tensor in tensors_in(result)):
                return map_tensors(result, lambda tensor: cls(tensor, mine.dtype, casts))
        arguments = func._schema.arguments
        given = {**dict(zip((each.name for each in arguments), args, strict=False)), **kwargs}
        written = [given.get(each.name) for each in arguments if each.alias_info and each.alias_info.is_write]
        if any(isinstance(tensor, cls) for tensor in tensors_in(written)):
            casts.refusal = f"{func._schema.name.removeprefix('aten::')} writes to a weight"
        return func(*casts.made(args), **casts.made(kwargs))


class _ExchangedData(TorchFunctionMode):
    """Sees `tensor.data = value`, which is no operation to torch's dispatcher."""

    def __init__(self, casts: PostponedCasts) -> None:
        super().__init__()
        self._casts = casts

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            if isinstance(args[0], Postponed):
                self._casts.refusal = "data= writes to a weight"
            args = self._casts.made(args)
        return func(*args, **(kwargs or {}))


class PostponedCasts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which this thread's casts of views of files are postponed. See [Note: Postponed casts].

    Use it around the call that loads. Then ask `casts_of` which weights are to be cast.
    """

    def __init__(self, *, of_files_only: bool = True) -> None:
        """
        Args:
            of_files_only: whether casts of weights that are in no file, or may have been edited since, are made at once.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._of_files_only = of_files_only
        self.refusal: str | None = None
        """The reason why the loaded weights are wrong: something was written to a weight that only seemed to be cast."""
        self._files = FileMap()
        self._asked: dict[torch.Tensor, torch.dtype] = {}
        """The dtypes of the weights that modules have by now. Two modules may have a part in common."""
        self._is_paused = False
        self._exchanged = _ExchangedData(self)

    def __enter__(self) -> PostponedCasts:
        self._exchanged.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._exchanged.__exit__(*error)  # type: ignore[no-untyped-call]

    def casts_of(self, module: nn.Module) -> dict[str, torch.dtype]:
        """Let `module` have the views of files themselves.

        Returns:
            The dtypes that these parameters and buffers are to be cast to, by name.
        """
        for part in module.modules():
            for table in (part._parameters, part._buffers):
                for name, tensor in table.items():
                    if isinstance(tensor, Postponed):
                        table[name] = tensor.weight
                        self._asked[tensor.weight] = tensor.dtype
        tensors = (*module.named_parameters(), *module.named_buffers())
        return {name: self._asked[tensor] for name, tensor in tensors if tensor in self._asked}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the block cast as always."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and not self._is_paused and self._is_postponed(args[0], kwargs):
            return Postponed(args[0].detach(), kwargs["dtype"], self)
        return func(*args, **kwargs)

    def _is_postponed(self, source: torch.Tensor, options: Mapping[str, Any]) -> bool:
        """Whether to postpone a copy of `source`: a cast of a view of a file, and nothing else."""
        dtype, device = options.get("dtype"), options.get("device")
        return (
            type(source) in (torch.Tensor, nn.Parameter)
            and source.device.type == "cpu"
            and not source.requires_grad
            and source.is_floating_point()
            and bool(source.numel())
            and dtype is not None
            and dtype.is_floating_point
            and (device is None or device.type == "cpu")
            and options.get("memory_format") in (None, torch.preserve_format)
            and not options.get("pin_memory")
            and self._is_in_file(source)
        )

    def made(self, value: Any) -> Any:
        """`value`, with the casts themselves in place of what stands for them."""

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.source.to(tensor.dtype) if isinstance(tensor, Postponed) else tensor

        with self.paused():
            return map_tensors(value, cast)

    def _is_in_file(self, tensor: torch.Tensor) -> bool:
        if self._of_files_only and self._files.find(tensor.detach()) is None:
            self._files = FileMap()  # it may have been mapped since
            return self._files.find(tensor.detach()) is not None
        return True


def cast_now(module: nn.Module, casts: Mapping[str, torch.dtype], device: torch.device | None = None) -> None:
    """Make the casts of `module`, one weight after another, and move the module to `device`."""
    tensors = dict((*module.named_parameters(), *module.named_buffers()))
    for name, dtype in casts.items():
        with torch.inference_mode(False), torch.no_grad():
            value = tensors[name].detach().to(dtype)
            tensors[name].data = moved(value, device or value.device)
    if device is not None:
        retried(device, partial(module.to, device), sum(tensor.nbytes for tensor in tensors.values()))
