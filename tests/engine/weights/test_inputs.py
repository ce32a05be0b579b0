"""Which inputs of a forward are moved, and which are left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ...support.asserts import assert_same
from ...support.models import Model, inputs
from ...support.rigs import Offload, offload_to, pair, run


class TakesAll(Model):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, dict[str, Any]]:  # type: ignore[override]
        return super().forward(x), kwargs


def test_inputs_that_are_there_already_keep_identity(offload: Offload) -> None:
    model, reference = pair(TakesAll)
    offload(model)
    values = {"a": [inputs(), 3], "b": {"c": (inputs(),)}, "d": inputs(), "e": None, "f": object()}
    output, received = run(model, inputs(), **values)
    assert_same(output, run(reference, inputs())[0])
    assert received.keys() == values.keys() and all(received[name] is values[name] for name in values)


def test_excluded_inputs_are_not_moved(offload: Offload) -> None:
    model, _ = pair(TakesAll)
    offload(model, exclude_kwargs=["cache"])
    elsewhere = [torch.empty(3, device="meta")]
    assert run(model, inputs(), cache=elsewhere)[1]["cache"] is elsewhere
    with pytest.raises(NotImplementedError):
        run(model, inputs(), other=elsewhere)


def test_skip_keys_of_the_class_are_not_moved(folder: Path | None) -> None:
    class Skips(TakesAll):
        _skip_keys = ["cache"]

    elsewhere = {"k": torch.empty(3, device="meta")}
    model, _ = pair(Skips)
    offload_to(folder, model)
    assert run(model, inputs(), cache=elsewhere)[1]["cache"] is elsewhere
    model, _ = pair(Skips)
    offload_to(folder, model, exclude_kwargs=[])
    with pytest.raises(NotImplementedError):
        run(model, inputs(), cache=elsewhere)
