"""The state of torch in a thread that calls a model, for another thread that calls it in the first one's place.

What torch has once for the process (the default dtype, kinds of attention, TF32), and whether the processor takes tiny numbers
for 0, is left to [Note: The contract of shared passes].
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import ExitStack
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
from .fingerprint import are_alike


class Caller:
    """Inference mode, autocast, the device and stream in use, context variables, function and dispatch modes. (No gradients.)

    And the number of threads of a kernel on the CPU: it is each thread's own, and bits depend on it.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        kinds = dict.fromkeys(("cpu", backend.device.type))
        self._autocast = [(each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in kinds]
        self._caches_casts = torch.is_autocast_cache_enabled()
        self._infers = torch.is_inference_mode_enabled()
        self._stream = backend.current_stream()
        self._index = torch.accelerator.current_device_index() if backend.device.type != "cpu" else None
        self._num_threads = torch.get_num_threads()
        self._settings = [self._autocast, self._caches_casts, self._infers, self._stream, self._index]
        self._function_modes, self._dispatch_modes = function_modes(), dispatch_modes()
        # `with torch.device(...)` may be entered anew for each call.
        self._settings += [each.device if isinstance(each, DeviceContext) else each for each in self._function_modes]
        self._settings += [self._num_threads, *self._dispatch_modes]
        self._context = contextvars.copy_context()

    def is_like(self, other: Caller) -> bool:
        """Whether a call from there has the bits of one from here."""
        mine, theirs = self._context, other._context
        are_same = self._settings == other._settings and len(mine) == len(theirs)
        return are_same and all(each in theirs and are_alike(value, theirs[each]) for each, value in mine.items())

    def run(self, function: Callable[[], Any]) -> Any:
        """Call a function in this thread, which runs nothing else, as if the caller's thread called it."""
        return self._context.copy().run(self._run, function)

    def _run(self, function: Callable[[], Any]) -> Any:
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        with ExitStack() as stack:
            stack.enter_context(self._backend.on_stream(self._stream))
            if self._index is not None:
                torch.accelerator.set_device_index(self._index)
            stack.enter_context(torch.inference_mode(self._infers))
            stack.enter_context(torch.no_grad())
            for kind, is_enabled, dtype in self._autocast:  # a forward may switch on what is off, with the dtype it has
                autocast = torch.autocast(kind, dtype=dtype, enabled=is_enabled, cache_enabled=self._caches_casts)
                stack.enter_context(autocast)
            for function_mode in self._function_modes:
                push_function_mode(function_mode)
                stack.callback(pop_function_mode)
            for dispatch_mode in self._dispatch_modes:
                push_mode(dispatch_mode)
                stack.callback(pop_mode)
            return function()
