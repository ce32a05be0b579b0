"""Quantizing while a model is opened: one weight after another, by the library's own quantizer.

[Note: Quantizers]
The loaders of diffusers and transformers make a quantizer for each model that is quantized, and ask it for each weight. The
work stays theirs. Their calls are only watched while the block of `Quantizing` runs, in its thread:

- A weight that is to be quantized gets its postponed cast first, and for its own quantization only (see `casts.py`).
- A quantizer that wants the whole model on an accelerator (bitsandbytes) gets one weight there at a time. The result goes to
  RAM at once. So neither the checkpoint nor the quantized model has to fit on the device, and kernels are the same as for a
  model that the library loads onto the device.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from ..base.arena import moved
from ..base.mapping import trim_heap
from ..base.patching import around, swap
from ..base.tensors import map_tensors
from ..weights import remake, rewrap
from .casts import PostponedCasts

_SEAMS = (("diffusers.quantizers.auto", "DiffusersAutoQuantizer"), ("transformers.quantizers.auto", "AutoHfQuantizer"))
"""The classes whose `from_config` makes quantizers."""
_TRIM_BYTES = 1 << 20
"""The bytes of quantized weights after which the C library is asked for what it keeps of freed memory."""


class Quantizing:
    """A context in which weights that this thread's loaders quantize come to RAM one by one. See [Note: Quantizers]."""

    def __init__(self, casts: PostponedCasts, onload_device: torch.device) -> None:
        self._casts = casts
        self._onload_device = onload_device
        """What a quantizer gets if it wants a device of the same kind."""
        self._thread = threading.get_ident()
        self._device = torch.device("cpu")
        """Where the quantizer of the model that is being loaded wants its weights."""
        self._num_bytes = 0
        self._undo = ExitStack()

    def __enter__(self) -> None:
        with self._undo:
            for module_name, class_name in _SEAMS:
                if module_name.partition(".")[0] in sys.modules:
                    with suppress(ImportError):
                        maker = getattr(importlib.import_module(module_name), class_name)
                        call = vars(maker)["from_config"].__func__
                        swap(self._undo, maker, "from_config", classmethod(around(call, self._from_config)))
            self._undo = self._undo.pop_all()

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def _from_config(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        quantizer = call(*args, **kwargs)
        if threading.get_ident() == self._thread:
            self._device = torch.device("cpu")
            self._watch(quantizer, "update_device_map", self._update_device_map)
            self._watch(quantizer, "create_quantized_param", partial(self._create, quantizer))  # diffusers
            self._watch(quantizer, "get_quantize_ops", self._get_quantize_ops)  # transformers
        return quantizer

    def _watch(self, owner: Any, name: str, instead: Callable[..., Any]) -> None:
        """Let calls of an object's method be `instead(method, ...)` until the end of the block."""
        if hasattr(owner, name):
            swap(self._undo, owner, name, partial(instead, getattr(owner, name)))

    def _update_device_map(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """The library's choice is noted. It is told of no device, so it moves nothing there."""
        chosen = call(*args, **kwargs)
        chosen = next(iter(chosen.values()), "cpu") if isinstance(chosen, Mapping) else chosen and self._onload_device
        device = torch.device("cuda", chosen) if isinstance(chosen, int) else torch.device(chosen or "cpu")
        self._device = self._onload_device if self._onload_device.type == device.type else device

    def _create(
        self,
        quantizer: Any,
        call: Callable[..., Any],
        model: nn.Module,
        value: Any,
        name: str,
        device: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        with self._casts.paused(), torch.no_grad():
            device = device if quantizer.pre_quantized else self._device
            result = call(model, self._casts.made(value), name, device, *args, **kwargs)
            self._to_ram(_owner_of(model, name))
        return result

    def _get_quantize_ops(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        operation = call(*args, **kwargs)
        self._watch(operation, "convert", self._convert)
        return operation

    def _convert(self, call: Callable[..., Any], values: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        with self._casts.paused(), torch.no_grad():
            made = map_tensors(dict(values), self._moved)
            values.clear()
            found = call(made, *args, **kwargs)
            name, model = kwargs.get("full_layer_name"), kwargs.get("model")
            if isinstance(model, nn.Module) and isinstance(name, str):
                self._to_ram(_owner_of(model, name))
            return map_tensors(found, _in_ram)

    def _moved(self, weight: torch.Tensor) -> torch.Tensor:
        return moved(self._casts.made(weight), self._device)

    def _to_ram(self, module: nn.Module) -> None:
        """Bring the weights of one layer to RAM."""
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = _in_ram(weight)
                self._num_bytes += weight.nbytes
        if self._num_bytes > _TRIM_BYTES:
            self._num_bytes = 0
            trim_heap()


def _in_ram(weight: torch.Tensor) -> Any:
    if weight.device.type in ("cpu", "meta"):
        return weight
    moved = weight.to("cpu")
    if isinstance(weight, nn.Parameter) and not isinstance(moved, nn.Parameter):
        moved = nn.Parameter(moved, requires_grad=weight.requires_grad)
    return moved


def take_off_meta(model: nn.Module) -> None:
    """Rebuild wrappers that name the meta device although the tensors inside have data: diffusers opens those of quanto so.

    A LoRA is put on the device that its layer's weight names.
    """
    remake(model, lambda w: nn.Parameter(rewrap(w, {}), requires_grad=w.requires_grad) if w.is_meta else None)


def _owner_of(model: nn.Module, name: str) -> nn.Module:
    """The module that holds a weight. (A name may lead on into a quantized tensor.)"""
    module = model
    for part in name.split(".")[:-1]:
        child = module._modules.get(part)
        if child is None:
            break
        module = child
    return module
