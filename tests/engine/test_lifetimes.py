"""When memory comes back: reference counting alone frees a model that is removed or dropped, with all that it took."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ..support.inside import engine_of
from ..support.models import Model, inputs, make
from ..support.on_device import forward
from ..support.rigs import offload_to
from ..support.simulated import SimulatedDevice, use_simulated_device


@contextmanager
def counted() -> Iterator[None]:
    """Python's collector finds no cycle inside of this."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _lora(model: nn.Module, x: Any, call: Callable[..., Any]) -> None:
    """An adapter that is trained over frozen weights."""
    model.requires_grad_(False)
    model.blocks[1].adapter = nn.Linear(4, 4)
    with torch.enable_grad():
        output = model(x)
        (
            output[0] if isinstance(output, tuple) else output
        ).square().mean().backward() if output.requires_grad else None


USES: dict[str, Callable[..., Any]] = {
    "never called": lambda model, x, call: None,
    "called": lambda model, x, call: [call(model, x) for _ in range(2)],
    "part called": lambda model, x, call: [call(model, x), model.blocks[0]],
    "with a graph": _lora,
    "with hooks": lambda model, x, call: [
        [part.register_forward_hook(lambda *_: None) for part in model.modules()],
        call(model, x),
    ],
    "compiled": lambda model, x, call: [
        [block.compile(backend="eager") for block in model.blocks],
        call(model, x),
    ],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "ram": {},
    "file": {},
    "leaves": {"offload_type": "leaf_level"},
    "just in time": {"record_stream": True},
    "budget": {"vram_budget": 1 << 20},
    "shared passes": {"share_passes": True},
}


@pytest.mark.parametrize("is_removed", [True, False], ids=["removed", "dropped"])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("options", OPTIONS)
def test_memory_comes_back_at_once(options: str, use: str, is_removed: bool, tmp_path: Path) -> None:
    with use_simulated_device(SimulatedDevice(0, "random")) as device:
        level = OPTIONS[options].get("offload_type", "block_level")
        rest = {name: value for name, value in OPTIONS[options].items() if name != "offload_type"}
        model = make(Model)
        with counted():
            pinned = device.pinned_bytes
            handle = offload_to(tmp_path if options == "file" else None, model, level, **rest)
            USES[use](model, inputs(), lambda model, x: forward(device, model, x))
            gone = [weakref.ref(each) for each in (model, model.gain, model.blocks[0], engine_of(handle))]
            if is_removed:
                handle.remove()
                device.synchronize()
                assert not device.memory.now and device.pinned_bytes == pinned
            del model, handle
            device.synchronize()
            assert [each() is None for each in gone] == [True] * len(gone)
            assert not device.memory.now and device.pinned_bytes == pinned
