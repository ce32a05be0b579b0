"""Loading without casting: a weight that the library casts while it loads stays as it is in the file, until it is placed.

[Note: Postponed casts]
Weights that come from a file in the dtype that is asked for are views of that file, and take no RAM. A cast makes a copy in
RAM; a library that casts while it loads ends up with all weights there. So its casts of views of files are postponed while
it loads: `to` returns another view of the file, in the file's dtype, which reports the dtype that was asked for. Three kinds
of calls with such a view are known, in the three lists below:

- a cast is postponed in turn;
- a view of the view reports the dtype too (`_VIEWS`);
- a question about shape or memory is answered by the view (`_QUESTIONS`).

Every other call is computed with the cast weight, which is made for that moment: right, but it takes RAM. So a library that
calls new functions does not break anything. Only a write to such a view cannot be made right, and is a `refusal`: then the
model is loaded without postponing. In this way the library goes through its own code (names, `_keep_in_fp32_modules`,
variants, shards, ties, conversions), and the dtype that it asked for is known for each weight.

Torch makes parameters of tensors where no mode sees it, so parameters are recognized by the address of their memory. The
views that were handed out are recognized by identity: another view of the same memory, fresh from the file, was not cast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..base.arena import moved, retried
from ..base.torch_internals import has_compatible_shallow_copy_type, parse_to
from ..stores.files import FileMap

_T = torch.Tensor
_VIEWS = frozenset(
    {"detach", "reshape", "contiguous", "transpose", "permute", "t", "chunk", "split", "requires_grad_", "__get__"}
)
"""Functions of tensors and of torch that only move elements: it is the same to cast their argument or their result.

Loaders call these. Any other function is right too, and costs RAM.
"""
_QUESTIONS = frozenset(
    {
        "size",
        "dim",
        "numel",
        "stride",
        "storage_offset",
        "data_ptr",
        "untyped_storage",
        "is_contiguous",
        "is_floating_point",
        "__len__",
        "__hash__",
        has_compatible_shallow_copy_type.__name__,
    }
)
"""Functions whose result does not depend on the elements or their dtype."""
_SETS = (_T.data.__set__, _T.requires_grad.__set__)  # type: ignore[attr-defined]
_IN_PLACE = frozenset(
    {
        "__setitem__",
        "__set__",
        *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")),
    }
)


class PostponedCasts(TorchFunctionMode):
    """A context in which this thread's casts of views of files are postponed. See [Note: Postponed casts].

    Use it around the call that loads. Then ask `casts_of` which weights are to be cast.
    """

    def __init__(self, *, of_files_only: bool = True) -> None:
        """
        Args:
            of_files_only: whether casts of weights that are in no file, or may have been edited since, are made at once. A
                system may be unable to tell.
        """
        super().__init__()
        self._of_files_only = of_files_only
        self.refusal: str | None = None
        """The reason why the loaded weights are wrong: something was written to a weight that only seemed to be cast."""
        self._files = FileMap()
        self._handed_out: dict[int, tuple[torch.Tensor, torch.dtype]] = {}
        """The views that seem to be cast, by id. They are held so that neither ids nor addresses are used again."""
        self._asked: dict[int, tuple[torch.dtype, torch.dtype]] = {}
        """The dtype in the file and the dtype that was asked for, by address. They may be the same."""
        self._is_paused = False

    def casts_of(self, module: nn.Module) -> dict[str, torch.dtype]:
        """The dtypes that parameters and buffers of `module` are to be cast to, by name.

        Call this before a loaded weight is placed or dropped: weights are recognized by their address.
        """
        tensors = (*module.named_parameters(), *module.named_buffers())
        return {name: dtype for name, tensor in tensors if (dtype := self._asked_at(tensor)) is not None}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the block compute with tensors as they are. Weights whose casts are postponed have to be `made` before."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._handed_out.clear()  # from now on only the loaded weights hold their files

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        is_plain, dtype = _asked_by(func, args, kwargs)
        if is_plain:
            source: torch.Tensor = args[0]
            before = self._seems(source)
            if before is not None and dtype in (None, before):
                return source
            if before is None and dtype is not None:
                postponed = self._postpone(source, dtype)
                if postponed is not None:
                    return postponed
        mine = [tensor for tensor in _tensors_in((*args, *kwargs.values())) if self._seems(tensor) is not None]
        return self._call_with(mine[0], func, args, kwargs) if mine else func(*args, **kwargs)

    def _call_with(
        self, first: torch.Tensor, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """A call with views that seem to be cast, of which `first` is one."""
        dtype = self._seems(first)
        assert dtype is not None
        if func == _T.dtype.__get__:  # type: ignore[attr-defined]
            return dtype
        if func in (_T.itemsize.__get__, _T.element_size):  # type: ignore[attr-defined]
            return dtype.itemsize
        if func == _T.nbytes.__get__:  # type: ignore[attr-defined]
            return first.numel() * dtype.itemsize
        name = getattr(func, "__name__", "")
        if name in _QUESTIONS or func in _SETS:
            return func(*args, **kwargs)
        if name in _VIEWS or _is_view_call(func, args, kwargs):
            result = func(*args, **kwargs)
            for tensor in _tensors_in((result,)):
                self._hand_out(tensor, dtype)
            return result
        is_in_place = name in _IN_PLACE if name.startswith("__") else name.endswith("_")
        writes = is_in_place and (not args or args[0] is first)  # those of nn.init get keywords only
        if writes or isinstance(kwargs.get("out"), torch.Tensor):
            self.refusal = f"{name} writes to a weight"
        return func(*(self.made(arg) for arg in args), **{key: self.made(value) for key, value in kwargs.items()})

    def _postpone(self, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """A view that stands for the cast of `source`; None if the cast is to be made at once."""
        if (
            type(source) not in (torch.Tensor, nn.Parameter)
            or source.device.type != "cpu"
            or source.requires_grad
            or not source.is_floating_point()
            or not dtype.is_floating_point
            or not source.numel()
            or not self._is_in_file(source)
        ):
            return None
        if self._asked.setdefault(source.data_ptr(), (source.dtype, dtype)) != (source.dtype, dtype):
            return source.to(dtype, copy=True)  # the same weight for two places that want different dtypes
        if dtype == source.dtype:
            return source
        view = source.detach()
        self._hand_out(view, dtype)
        return view

    def _hand_out(self, view: torch.Tensor, dtype: torch.dtype) -> None:
        if not view.numel():
            return
        if self._asked.setdefault(view.data_ptr(), (view.dtype, dtype)) != (view.dtype, dtype):
            self.refusal = "one weight was asked for in several dtypes"
        self._handed_out[id(view)] = (view, dtype)

    def _seems(self, tensor: Any) -> torch.dtype | None:
        """The dtype that a view reports in place of its real one; None for any other tensor."""
        found = self._handed_out.get(id(tensor))
        if found is not None:
            return found[1]
        return self._asked_at(tensor) if type(tensor) is nn.Parameter else None

    def _asked_at(self, tensor: torch.Tensor) -> torch.dtype | None:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.device.type != "cpu":
            return None
        own, asked = self._asked.get(tensor.data_ptr(), (None, None))
        return asked if own == tensor.dtype != asked else None

    def made(self, value: Any) -> Any:
        """`value`, with views replaced by the casts that they stand for."""
        if isinstance(value, torch.Tensor):
            dtype = self._seems(value)
            return value if dtype is None else value.to(dtype)
        return type(value)(self.made(item) for item in value) if type(value) in (list, tuple) else value

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


def _asked_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, torch.dtype | None]:
    """Whether a call only casts a CPU tensor, as loaders do, and to which dtype. None: the call keeps the dtype."""
    if func is not _T.to or kwargs.get("copy") or "other" in kwargs or not args or len(args) > 3:
        return False, None
    if len(args) > 1 and isinstance(args[1], torch.Tensor):
        return False, None
    rest = {key: value for key, value in kwargs.items() if key != "copy"}
    device, dtype, _, memory_format = parse_to(*args[1:], **rest)
    return (device is None or device.type == "cpu") and memory_format is None, dtype


def _is_view_call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the arguments of `view` or `[]` only move elements: both can do more."""
    if func is _T.view:
        return not any(isinstance(arg, torch.dtype) for arg in (*args, *kwargs.values()))
    if func is _T.__getitem__:
        keys = args[1] if isinstance(args[1], tuple) else (args[1],)
        return all(key is None or key is Ellipsis or isinstance(key, (int, slice)) for key in keys)
    return False


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif type(value) in (list, tuple):
            yield from _tensors_in(value)
