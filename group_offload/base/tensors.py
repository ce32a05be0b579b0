"""Tensors inside of what calls are given and return: lists, tuples, mappings, dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor], *, enters_dataclasses: bool = False) -> Any:
    """`value` with other tensors in it, in lists, tuples and mappings too; the same object if all stay the same.

    Args:
        enters_dataclasses: in these as well. (Of inputs no copies are made: a forward may keep its state in one.)
    """
    if isinstance(value, torch.Tensor):
        return change(value)

    def mapped(item: Any) -> Any:
        return map_tensors(item, change, enters_dataclasses=enters_dataclasses)

    if isinstance(value, (list, tuple)):
        lengths = value.batch_sizes if isinstance(value, PackedSequence) else None  # torch wants them on the CPU
        items: list[Any] = [item if item is lengths else mapped(item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        entries = {key: mapped(item) for key, item in value.items()}
        changed = {key: new for key, new in entries.items() if new is not value[key]}
        if not changed:
            return value
        if not isinstance(value, MutableMapping):
            return type(value)(entries)  # type: ignore[call-arg]
        mapping = copy.copy(value)  # outputs of models are made from their fields, not from a mapping
        for key, new in changed.items():
            mapping[key] = new
        return mapping
    if enters_dataclasses and dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        changed = {name: new for name, item in fields.items() if (new := mapped(item)) is not item}
        if not changed:
            return value
        other = copy.copy(value)
        for name, new in changed.items():
            object.__setattr__(other, name, new)  # a frozen one as well
        return other
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in what a call returned."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note, enters_dataclasses=True)
    return found
