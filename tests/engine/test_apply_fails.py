"""Applying that fails, or is interrupted: the module is what it was, and can be offloaded as if nothing had been."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from group_offload import (
    ConfigError,
    GroupFileError,
    ModuleError,
    OffloadHandle,
    apply_group_offloading,
    enable_group_offload,
    remove_group_offloading,
)
from group_offload.api import handle_of

from ..interrupts import Strike, contained
from ..support.asserts import assert_at_rest, assert_same, named_tensors
from ..support.models import Model, inputs, make
from ..support.on_device import lay_in_file
from ..support.rigs import run
from ..support.simulated import SimulatedDevice, use_simulated_device


def attributes(module: nn.Module) -> dict[str, set[str]]:
    return {name: {*part.__dict__} for name, part in module.named_modules()}


def hooks(module: nn.Module) -> list[Any]:
    return [
        table
        for part in module.modules()
        for name, table in part.__dict__.items()
        if name.endswith(("_hooks", "_with_kwargs", "_always_called")) and table
    ]


def assert_as_before(module: nn.Module, reference: nn.Module) -> None:
    assert attributes(module) == attributes(reference)
    assert hooks(module) == hooks(reference)
    assert handle_of(module) is None
    for (name, tensor), (_, other) in zip(named_tensors(module), named_tensors(reference), strict=True):
        assert type(tensor) is type(other), name
        assert not tensor._post_accumulate_grad_hooks if hasattr(tensor, "_post_accumulate_grad_hooks") else True, name
    assert_at_rest(module, reference)
    assert_same(run(module, inputs()), run(reference, inputs()))


def small(folder: Path | None = None) -> nn.Module:
    """Two blocks that share a bias; with a folder, as views of a file there."""
    model = make(Model, 2) if folder is None else lay_in_file(make(Model, 2), folder / "model.safetensors")
    model.blocks[1].up.bias = model.blocks[0].up.bias
    return model.requires_grad_(False)


LEAVES = {"offload_type": "leaf_level"}
KINDS: dict[str, dict[str, Any]] = {
    "ram": {},
    "ram, trained": LEAVES,
    "file": {"offload_to_disk_path": "groups"},
    "checkpoint": {},
    "checkpoint, leaves": LEAVES,
    "checkpoint, folder": {"offload_to_disk_path": "groups"},
}


class Case:
    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder, self.options = kind, folder, dict(KINDS[kind])
        if "offload_to_disk_path" in self.options:
            self.options["offload_to_disk_path"] = folder / "groups"

    def make(self) -> nn.Module:
        model = small(self.folder if self.kind.startswith("checkpoint") else None)
        if self.kind == "ram, trained":
            model.norm.requires_grad_(True)
        return model

    def apply(self, model: nn.Module) -> OffloadHandle:
        return apply_group_offloading(model, "cpu", **self.options)


def strike_everywhere(attempt: Callable[[int, Strike], object]) -> None:
    """Interrupt one line after another. The lines of loops over groups come again and again."""
    at, strike = 1, Strike(1)
    while at == 1 or strike.where:
        strike = Strike(at)
        try:
            attempt(at, strike)
        except BaseException as error:
            error.add_note(f"after an interrupt at {strike.where}")
            raise
        at += 1 + at // 6
    assert at > 500


@pytest.mark.parametrize("kind", [*KINDS][:5])
@pytest.mark.parametrize("is_simulated", [False, True])
def test_an_interrupt_at_any_line(kind: str, is_simulated: bool, tmp_path: Path) -> None:
    """Also one between a hook and what torch notes of it. Nothing is left half offloaded."""
    case = Case(kind, tmp_path)
    reference = copy.deepcopy(small())
    device = SimulatedDevice(0) if is_simulated else None

    def attempt(at: int, strike: Strike) -> None:
        model = case.make()
        with use_simulated_device(device) if device is not None else nullcontext():
            try:
                with strike:
                    handle = contained(partial(case.apply, model))
            except KeyboardInterrupt:
                pass
            else:
                assert strike.is_lost or not strike.where, "nobody was told of the interrupt"
                handle.remove()
        assert_as_before(model, reference)
        if at % 3 == 0:  # it can be offloaded, run and brought back
            with use_simulated_device(device) if device is not None else nullcontext():
                handle = case.apply(model)
                if device is None:
                    assert_same(run(model, inputs()), run(reference, inputs()))
                handle.remove()
            assert_as_before(model, reference)

    strike_everywhere(attempt)


@pytest.mark.parametrize("kind", ["checkpoint", "checkpoint, folder"])
def test_an_interrupt_while_weights_return_to_their_checkpoint(kind: str, tmp_path: Path) -> None:
    """They were edited, and have its bytes again. What is edited after the interrupt is not lost."""
    case = Case(kind, tmp_path)

    def attempt(at: int, strike: Strike) -> None:
        model, reference = case.make(), copy.deepcopy(small())
        handle = case.apply(model)
        first = [group.where for group in handle.groups]
        for each in (model, reference):
            each.blocks[0].up.weight.data.mul_(2)
        handle.refresh()
        for each in (model, reference):
            each.blocks[0].up.weight.data.mul_(0.5)
            each.blocks[1].extra = nn.Identity()  # nothing tells of edits of RAM without streams: this does
        with suppress(KeyboardInterrupt), strike:
            contained(handle.refresh)
        assert_at_rest(model, reference)
        if at % 2:
            assert_same(run(model, inputs()), run(reference, inputs()))
            assert [group.where for group in handle.groups] == first
        for each in (model, reference):
            each.blocks[0].up.weight.data.mul_(3)
        assert_same(run(model, inputs()), run(reference, inputs()))
        handle.remove()
        assert_at_rest(model, reference)

    strike_everywhere(attempt)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("when", ["in the middle", "at the end", "while it is excluded", "one is offloaded already"])
def test_a_pipeline_of_which_one_model_fails(when: str) -> None:
    """The others would stay offloaded. What was offloaded before stays so."""

    class Fails(Model):
        def to(self, *args: Any, **options: Any) -> Any:
            super().to(*args, **options)
            raise MemoryError

    models = {"one": make(Model, 1), "two": make(Fails, 2), "three": make(Model, 3)}
    references = copy.deepcopy(models)
    handle = apply_group_offloading(models["three"], "cpu") if when == "one is offloaded already" else None
    if when != "while it is excluded":
        failing = models["three" if when == "at the end" else "two"]
        failing.empty = nn.Parameter(torch.empty(2, device="meta"))
    excluded = ["two"] if when == "while it is excluded" else []
    with pytest.raises((ModuleError, MemoryError)):
        enable_group_offload(SimpleNamespace(components=models), "cpu", exclude_modules=excluded)
    for name, model in models.items():
        if "empty" in model._parameters:
            del model.empty
        if handle is not None and name == "three":
            assert handle.is_active and handle_of(model) is handle
        else:
            assert_as_before(model, references[name])


@pytest.mark.parametrize(
    ("options", "error"),
    [({"ram_budget": "1KiB"}, ConfigError), ({"offload_to_disk_path": "/proc/nowhere"}, GroupFileError)],
)
def test_an_error_of_options(options: dict[str, Any], error: type[Exception]) -> None:
    model, reference = small(), small()
    with pytest.raises(error):
        apply_group_offloading(model, "cpu", **options)
    assert_as_before(model, reference)
    remove_group_offloading(model)
    apply_group_offloading(model, "cpu")
    assert_same(run(model, inputs()), run(reference, inputs()))
