"""Activation offloading in trainers: a callback for transformers' Trainer and trainers with its protocol."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from ..activations import ActivationOffloadHandle, ActivationStats, apply_activation_offloading

_applied: weakref.WeakSet[ActivationOffloadHandle] = weakref.WeakSet()
"""Handles that callbacks made. A training that was broken off leaves its handle behind: `on_train_end` is not called."""


class ActivationOffloadCallback:
    """Applies activation offloading when training begins, removes it when training ends, and adds figures to the logs.

    The callback works on models that the trainer has wrapped (DDP, FSDP, FSDP2, activation checkpointing of an FSDP
    configuration), and needs no import of the trainer's package.

    Args:
        options: The options of `apply_activation_offloading`.

    Example:
        >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[ActivationOffloadCallback(keep_last=2)])
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.handle: ActivationOffloadHandle | None = None
        """The handle of the latest training; None before the first one."""
        self._reported = ActivationStats()

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **kwargs: Any) -> None:
        """Offload the activations of the model, as the trainer wrapped it."""
        for left in [*_applied]:
            if left.is_active and not set(left.module.modules()).isdisjoint(model.modules()):
                left.remove()
        self.handle = apply_activation_offloading(model, **self._options)
        _applied.add(self.handle)
        self._reported = ActivationStats()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Undo the offloading."""
        if self.handle is not None:
            self.handle.remove()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add offloaded GiB and stalls since the last logs, and the peak of host memory since the beginning of the training."""
        if self.handle is None or not self.handle.is_active or logs is None or "loss" not in logs:
            return
        now, before = self.handle.stats(), self._reported
        self._reported = now
        figures = {
            "activations_offloaded_gib": (now.offloaded_bytes - before.offloaded_bytes) / 2**30,
            "activations_host_peak_gib": now.peak_used_host_bytes / 2**30,
            "activations_stalls": now.stalls - before.stalls,
        }
        logs.update(figures)
        history = getattr(state, "log_history", None)
        if history and history[-1].get("loss") == logs["loss"]:  # the trainer writes it before it calls callbacks
            history[-1].update(figures)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("on_"):  # any other event of the protocol, later ones included
            return lambda *args, **kwargs: None
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
