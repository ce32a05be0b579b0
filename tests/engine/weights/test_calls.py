"""How a model is called: blocks in any order, parts without the model, inputs that move or stay, forwards that raise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from group_offload import StateError

from ...support.asserts import assert_at_rest, assert_same, named_tensors
from ...support.models import WIDTH, Model, inputs
from ...support.rigs import Offload, check, offload_to, pair, run, run_onloaded


class AnyOrder(Model):
    def forward(self, x: torch.Tensor, order: tuple[int, ...] = (), extra: torch.Tensor | None = None) -> torch.Tensor:
        x = self.proj_in(x)
        for index in order:
            x = self.blocks[index](x)
        if extra is not None:
            x = x + self.blocks[0](extra)
        return self.norm(x) * self.gain


ORDERS = [
    [(0, 1, 2, 3)] * 2,
    [(0, 0, 1, 2, 3, 3)] * 3,
    [(3, 3)] * 3,
    [(3, 2, 1, 0), (0, 1, 2, 3), (3, 2, 1, 0)],
    [(0, 2), (0, 1, 2, 3), (1, 3), ()],
    [(), (0,), (), (3, 0, 3, 0)],
    [(1,) * 5, (2,) * 5, (0, 1) * 3],
]


@pytest.mark.parametrize("options", [{}, {"num_blocks_per_group": 3}, {"level": "leaf_level"}], ids=str)
@pytest.mark.parametrize("orders", ORDERS, ids=str)
def test_any_order_of_blocks(orders: list[tuple[int, ...]], options: dict[str, Any], folder: Path | None) -> None:
    """Blocks are called conditionally, or in another order than they were registered in (diffusers #11307, #11375, #13211)."""
    model, reference = pair(AnyOrder)
    offload_to(folder, model, **options)
    for order in orders:
        for extra in (None, inputs(1)):
            check(model, reference, inputs(), order, extra=extra, passes=2)


class Encoder(nn.Module):
    """As text encoders are: what is around the blocks lies two levels down."""

    def __init__(self) -> None:
        super().__init__()
        self.text_model = nn.Module()
        self.text_model.scale = nn.Parameter(torch.rand(()))
        self.text_model.embeddings = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.text_model.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.text_model.norm = nn.LayerNorm(WIDTH)
        self.text_model.forward = self.encode
        self.norms_itself = False

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        x = self.text_model.embeddings(x) * self.text_model.scale
        for layer in self.text_model.layers:
            x = layer(x)
        return x if self.norms_itself else self.text_model.norm(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.text_model(x)
        return self.text_model.norm(x) if self.norms_itself else x


def test_parts_of_parts_called_without_the_root(offload_either: Offload) -> None:
    """`text_encoder.text_model.final_layer_norm(x)`, as pipelines do that skip layers of CLIP."""
    model, reference = pair(Encoder)
    handle = offload_either(model)
    x = inputs()
    for part in (
        "text_model.norm",
        "text_model.embeddings",
        "text_model.embeddings.0",
        "text_model",
        "",
        "text_model.norm",
    ):
        for _ in range(2):
            before = handle.stats().passes
            expected = run(reference.get_submodule(part), x)
            assert_same(run_onloaded(model, x, call=model.get_submodule(part)), expected)
            assert handle.stats().passes == before + 1
            assert_at_rest(model, reference)
    for twin in (model, reference):
        twin.norms_itself = True  # outside of the call whose weights it uses, inside of a forward
    for _ in range(2):
        assert_same(run_onloaded(model, x), run(reference, x))


def test_a_block_of_another_offloaded_model_is_refused(offload_either: Offload, tmp_path: Path) -> None:
    """It would belong to two offloaded models."""
    (model, reference), (other, other_reference) = pair(), pair()
    handle = offload_either(model)
    other_handle = offload_to(None, other)
    x = inputs()
    mine, theirs = model.blocks[1], other.blocks[1]
    model.blocks[1] = theirs
    for _ in range(2):
        with pytest.raises(StateError, match=r"blocks\.1 of Model is group-offloaded as a part of another module"):
            run(model, x)
        assert_same(run_onloaded(other, x), run(other_reference, x))
    model.blocks[1] = mine
    assert_same(run_onloaded(model, x), run(reference, x))
    other_handle.remove()
    model.blocks[1], reference.blocks[1] = theirs, other_reference.blocks[1]
    assert_same(run_onloaded(model, x), run(reference, x))
    handle.remove()


def test_what_others_take_for_a_mark_of_compiling(offload_either: Offload) -> None:
    """peft looks whether `_compiled_call_impl` is true."""
    model, _ = pair(Encoder)
    offload_either(model)
    assert not any(getattr(module, "_compiled_call_impl", False) for module in model.modules())


# ---------------------------------------------------------------- inputs


class TakesAll(Model):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, dict[str, Any]]:  # type: ignore[override]
        return super().forward(x), kwargs


class Skips(TakesAll):
    _skip_keys = ["cache"]


@pytest.mark.parametrize(("kind", "options"), [(TakesAll, {"exclude_kwargs": ["cache"]}), (Skips, {})])
def test_inputs_stay_that_are_excluded_or_there_already(kind: Any, options: Any, offload_either: Offload) -> None:
    """By an option, or by the model's class."""
    model, reference = pair(kind)
    handle = offload_either(model, **options)
    elsewhere = [torch.empty(3, device="meta")]
    values = {"a": [inputs(), 3], "b": {"c": (inputs(),)}, "d": inputs(), "e": None, "f": object(), "cache": elsewhere}
    output, received = run(model, inputs(), **values)
    assert_same(output, run(reference, inputs())[0])
    assert received.keys() == values.keys() and all(received[name] is values[name] for name in values)
    with pytest.raises(NotImplementedError):
        run(model, inputs(), other=elsewhere)
    handle.remove()
    offload_either(model, exclude_kwargs=[])
    with pytest.raises(NotImplementedError):
        run(model, inputs(), cache=elsewhere)


# ---------------------------------------------------------------- forwards that raise


class Raising(Model):
    error: BaseException | None = None
    where = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.proj_in(x)
        for index, block in enumerate(self.blocks):
            if self.error is not None and index == self.where:
                raise self.error
            x = block(x)
        return self.norm(x) * self.gain


def _at_rest_pointers(model: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in named_tensors(model)}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("where", [0, 2])
def test_forward_that_raises(error: type[BaseException], where: int, offload_either: Offload) -> None:
    """Else groups are left on the device."""
    model, reference = pair(Raising)
    offload_either(model)
    run(model, inputs())
    places = _at_rest_pointers(model)
    model.error, model.where = error(), where
    for _ in range(2):
        with pytest.raises(error):
            run(model, inputs())
        assert _at_rest_pointers(model) == places
        assert_at_rest(model, reference)
    model.error = None
    check(model, reference, inputs())


def test_forward_that_raises_and_is_caught_inside(offload: Offload) -> None:
    """A block fails, the model goes on without it."""

    class Catching(Model):
        def forward(self, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
            x = self.proj_in(x)
            for index, block in enumerate(self.blocks):
                try:
                    x = block(x if not fail or index != 1 else x[:, :3])
                except RuntimeError:
                    x = x + 1
            return self.norm(x)

    model, reference = pair(Catching)
    offload(model)
    for fail in (False, True, True, False):
        check(model, reference, inputs(), fail=fail, passes=1)


def test_remove_in_the_middle_of_a_forward_is_refused(offload: Offload) -> None:
    model, reference = pair()
    handle = offload(model)
    hook = model.blocks[1].register_forward_hook(lambda *args: handle.remove())
    with pytest.raises(StateError, match="remove"):
        run(model, inputs())
    hook.remove()
    check(model, reference, inputs())
