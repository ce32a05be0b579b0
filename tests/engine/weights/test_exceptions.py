"""After a forward that raised, all weights are at rest and the next forward is right."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from group_offload import StateError

from ...support.asserts import assert_at_rest, named_tensors
from ...support.changing import Around, Counting
from ...support.models import WIDTH, Model, inputs
from ...support.rigs import Offload, check, pair, run


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


def test_what_forward_changed_before_it_raised_is_kept(offload: Offload) -> None:
    class Failing(Around):
        fail = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            if self.fail:
                raise ValueError("on purpose")
            return x

    model, reference = pair(Failing, Counting)
    offload(model)
    x = inputs(0, 4, 3, WIDTH)
    for twin in (model, reference):
        twin.fail = True
        with pytest.raises(ValueError, match="on purpose"):
            run(twin, x)
        twin.fail = False
    check(model, reference, x)


def test_remove_in_the_middle_of_a_forward_is_refused(offload: Offload) -> None:
    model, reference = pair()
    handle = offload(model)
    hook = model.blocks[1].register_forward_hook(lambda *args: handle.remove())
    with pytest.raises(StateError, match="remove"):
        run(model, inputs())
    hook.remove()
    check(model, reference, inputs())
