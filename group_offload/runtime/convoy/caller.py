"""The state of torch in a thread that calls a model, for another thread that calls it in the first one's place."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from operator import is_
from typing import Any

import torch

from ...base.device import Backend
from ...base.torch_internals import (
    DeviceContext,
    dispatch_modes,
    function_modes,
    pop_function_mode,
    pop_mode,
    push_function_mode,
    push_mode,
)
from .contents import are_alike

_FLAGS: tuple[Callable[[], Any], ...] = (
    torch.get_default_dtype,
    torch.are_deterministic_algorithms_enabled,
    torch.get_float32_matmul_precision,
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    getattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: None),
    lambda: torch.backends.cuda.matmul.allow_tf32,
    lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    lambda: torch.backends.cudnn.enabled,
    lambda: torch.backends.cudnn.benchmark,
    lambda: torch.backends.cudnn.deterministic,
    lambda: torch.backends.cudnn.allow_tf32,
    lambda: torch.backends.mkldnn.enabled,
)
"""What bits depend on, in the whole process."""
_TINY, _ONE = 1e-310, 1.0
_WITHOUT_EFFECT = ("numpy.ufunc.extobj",)
"""Context variables that say what is warned of."""


class Caller:
    """Grad mode, inference mode, autocast, the device and stream in use, context variables, function and dispatch modes.

    And the number of threads of a kernel on the CPU: it is each thread's own, and bits depend on it.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._has_grad = torch.is_grad_enabled()
        self._is_inference = torch.is_inference_mode_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys(("cpu", backend.device.type))
        ]
        self._caches_casts = torch.is_autocast_cache_enabled()
        self.stream = backend.current_stream()
        self._index = torch.accelerator.current_device_index() if backend.device.type != "cpu" else None
        self._context = contextvars.copy_context()
        self._num_threads = torch.get_num_threads()
        self._flushes_denormals = _flushes_denormals()
        self._function_modes = function_modes()
        self._dispatch_modes = dispatch_modes()
        self.has_set_variables = False
        """Whether the function that was run has set context variables, which nobody sees."""
        self._flags = [*map(_value_of, _FLAGS)]

    def is_like(self, other: Caller) -> bool:
        """Whether a call from there has the bits of one from here."""
        return self._settings == other._settings and all(
            len(mine) == len(theirs) and all(map(_are_alike, mine, theirs))
            for mine, theirs in zip(self._objects, other._objects, strict=True)
        )

    @property
    def _settings(self) -> Any:
        one_by_one = self._has_grad, self._is_inference, self._caches_casts, self._num_threads, self._flushes_denormals
        return one_by_one, self._autocast, self.stream, self._index, self._flags

    @property
    def _objects(self) -> list[list[Any]]:
        return [_variables_of(self._context), [*self._function_modes], [*self._dispatch_modes]]

    def run(self, function: Callable[[], Any]) -> Any:
        """Call a function in this thread as if the caller's thread called it."""

        def call() -> Any:
            with self._restored():
                return function()

        context = self._context.copy()
        try:
            return context.run(call)
        finally:
            self.has_set_variables = not has_same_variables(self._context, context)

    @contextmanager
    def _restored(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self._backend.on_stream(self.stream))
            if self._index is not None:
                torch.accelerator.set_device_index(self._index)
            if torch.get_num_threads() != self._num_threads:
                torch.set_num_threads(self._num_threads)
            if _flushes_denormals() != self._flushes_denormals:
                torch.set_flush_denormal(self._flushes_denormals)
            stack.enter_context(torch.inference_mode(self._is_inference))
            stack.enter_context(torch.set_grad_enabled(self._has_grad))
            for kind, is_enabled, dtype in self._autocast:  # a forward may switch on what is off, with the dtype it has
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, enabled=is_enabled, cache_enabled=self._caches_casts)
                )
            for function_mode in self._function_modes:
                push_function_mode(function_mode)
                stack.callback(pop_function_mode)
            for dispatch_mode in self._dispatch_modes:
                push_mode(dispatch_mode)
                stack.callback(pop_mode)
            yield


def _are_alike(one: Any, other: Any) -> bool:
    """Whether two context values or modes do the same. They may be made anew for each call."""
    if type(one) is type(other) and isinstance(one, DeviceContext):
        return bool(one.device == other.device)
    return are_alike(one, other)


def has_same_variables(one: contextvars.Context, other: contextvars.Context) -> bool:
    """Whether context variables have the same values: the very same objects."""
    mine, theirs = _variables_of(one), _variables_of(other)
    return len(mine) == len(theirs) and all(map(is_, mine, theirs))


def _variables_of(context: contextvars.Context) -> list[Any]:
    """Context variables, each with its value behind it, in an order that does not depend on when they were set."""
    found = sorted(context.items(), key=lambda item: id(item[0]))
    return [each for item in found if item[0].name not in _WITHOUT_EFFECT for each in item]


def _flushes_denormals() -> bool:
    """Whether this thread takes tiny numbers for 0. The processor does that, for Python's numbers too."""
    return _TINY * _ONE == 0.0


def _value_of(flag: Callable[[], Any]) -> Any:
    try:
        return flag()
    except (AttributeError, RuntimeError):  # a torch without it, or one whose newer names of the same were used
        return None
