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
from safetensors.torch import load_file, save_file
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


def small() -> nn.Module:
    model = make(Model, 2)
    model.blocks[1].up.bias = model.blocks[0].up.bias
    return model.requires_grad_(False)


class Case:
    def __init__(self, kind: str, folder: Path) -> None:
        self.folder = folder
        self.is_checkpoint = kind.startswith("checkpoint")
        self.options: dict[str, Any] = {}
        if kind == "file":
            self.options["offload_to_disk_path"] = folder / "groups"
        if kind == "checkpoint, leaves":
            self.options["offload_type"] = "leaf_level"
        if kind == "ram, trained":
            self.options["offload_type"] = "leaf_level"
        self.is_trained = kind == "ram, trained"

    def make(self) -> nn.Module:
        model = small()
        if self.is_checkpoint:
            path = self.folder / "model.safetensors"
            if not path.exists():
                save_file({name: value.clone() for name, value in model.state_dict().items()}, path)
            model.load_state_dict(load_file(path), assign=True)
            model.blocks[1].up.bias = model.blocks[0].up.bias
            model.requires_grad_(False)
        if self.is_trained:
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


@pytest.mark.parametrize("kind", ["ram", "ram, trained", "file", "checkpoint", "checkpoint, leaves"])
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


@pytest.mark.parametrize("has_folder", [False, True])
def test_an_interrupt_while_weights_return_to_their_checkpoint(has_folder: bool, tmp_path: Path) -> None:
    """They were edited, and have its bytes again. What is edited after the interrupt is not lost."""
    case = Case("checkpoint", tmp_path)
    if has_folder:
        case.options["offload_to_disk_path"] = tmp_path / "groups"

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


@pytest.mark.parametrize("when", ["in the middle", "at the end", "while it is excluded"])
def test_a_pipeline_of_which_one_model_fails(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would stay offloaded."""

    class Fails(Model):
        def to(self, *args: Any, **options: Any) -> Any:
            super().to(*args, **options)
            raise MemoryError

    models = {"one": make(Model, 1), "two": make(Fails, 2), "three": make(Model, 3)}
    references = copy.deepcopy(models)
    if when == "in the middle":
        models["two"].empty = nn.Parameter(torch.empty(2, device="meta"))
    elif when == "at the end":
        models["three"].empty = nn.Parameter(torch.empty(2, device="meta"))
    excluded = ["two"] if when == "while it is excluded" else []
    pipeline = SimpleNamespace(components=models)
    with pytest.raises((ModuleError, MemoryError)):
        enable_group_offload(pipeline, "cpu", exclude_modules=excluded)
    for name, model in models.items():
        if "empty" in model._parameters:
            del model.empty
        assert_as_before(model, references[name])


def test_a_pipeline_that_was_offloaded_in_part() -> None:
    """What was offloaded before stays so, if the rest fails."""
    models = {"one": make(Model, 1), "two": make(Model, 2)}
    reference = copy.deepcopy(models["one"])
    handle = apply_group_offloading(models["two"], "cpu")
    models["one"].empty = nn.Parameter(torch.empty(2, device="meta"))
    with pytest.raises(ModuleError):
        enable_group_offload(SimpleNamespace(components=models), "cpu")
    del models["one"].empty
    assert handle.is_active and handle_of(models["two"]) is handle
    assert_as_before(models["one"], reference)


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
