"""Models of a pipeline: what is done for the one that should run next, while another one runs."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from group_offload import remove_group_offloading
from group_offload.runtime.foresight.lookahead import LookAhead

from ..support.inside import engine_of
from ..support.models import WIDTH
from ..support.on_device import any_mode, forward, raise_interrupt
from ..support.pretend import IMAGE, PretendPipeline
from ..support.reads import watch_file_reads
from ..support.simulated import SimulatedDevice, use_simulated_device


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    gc.collect()
    with use_simulated_device(SimulatedDevice(0, "random")) as device, watch_file_reads(device):
        yield device


# ---------------------------------------------------------------- slots


@any_mode
def test_the_next_model_is_on_its_way_before_its_call(options: dict[str, Any], device: SimulatedDevice) -> None:
    """Each model's first groups are, from the second image on: a decoder's too, which comes after the last of many steps."""
    pipe = PretendPipeline(device).offload(**options)
    first, second, third = pipe.image(), pipe.image(), pipe.image()
    assert first[1].before > 0  # the pipeline says what comes after its encoder
    assert all(passed.before > 0 for passed in second if passed.name != "transformer" and passed is not second[0])
    assert all(passed.before > 0 for passed in (third[0], third[1], third[-1]))
    assert all(passed.stalls == 0 for passed in second + third)
    pipe.remove()


def test_a_model_that_others_follow_is_not_sent_in_vain(device: SimulatedDevice) -> None:
    """Three steps send each block three times and the outer group once; nothing is sent that another model then drops."""
    pipe = PretendPipeline(device).offload()
    pipe.image(), pipe.image()
    image = pipe.image()
    for name, handle in pipe.handles.items():
        num_steps = IMAGE.count(name)
        outer, *blocks = sorted(handle.groups, key=lambda group: group.group_id.count("blocks"))
        expected = num_steps * len(blocks) + 1 if num_steps else 0
        assert sum(passed.onloads for passed in image if passed.name == name) == expected, name
        assert outer.num_bytes
    pipe.remove()


@any_mode
def test_the_next_model_takes_no_memory_beside_the_last(options: dict[str, Any], device: SimulatedDevice) -> None:
    """The device holds what the model with most slots takes alone."""
    peaks = []
    for name in ("encoder", "transformer", "vae"):
        alone = PretendPipeline(device).offload(**options)
        device.synchronize()
        device.memory.peak = device.memory.now
        for _ in range(3):
            alone.call(name)
        alone.remove()
        peaks.append(device.memory.peak)
    device.memory.peak = device.memory.now
    pipe = PretendPipeline(device).offload(**options)
    for _ in range(3):
        pipe.image()
    assert device.memory.peak <= max(peaks)
    pipe.remove()


@any_mode
def test_a_wrong_guess_costs_no_bits(options: dict[str, Any], device: SimulatedDevice) -> None:
    """Images of other steps, models that are left out or called twice, and weights that change after they were sent ahead."""
    pipe = PretendPipeline(device).offload(**options)
    pipe.image(), pipe.image()
    pipe.image(("encoder", *["transformer"] * 4, "vae"))
    pipe.image(("transformer", "vae", "encoder", "encoder"))
    pipe.image(("encoder", *["transformer"] * 3))
    for model in (pipe.components["vae"], pipe.resident["vae"]):
        with torch.no_grad(), device.running():
            model.get_parameter("blocks.0.up.weight").data.mul_(2)
    pipe.call("vae")
    pipe.remove()


@pytest.mark.parametrize("how", ["removed", "gone", "running", "interrupted"])
def test_a_model_that_cannot_take_over(how: str, device: SimulatedDevice) -> None:
    pipe = PretendPipeline(device).offload()
    pipe.image(), pipe.image()
    for name in ("encoder", "transformer", "transformer"):
        pipe.call(name)
    held, done = threading.Event(), threading.Event()
    if how == "removed":
        remove_group_offloading(pipe.components["vae"])
    elif how == "gone":
        vae = weakref.ref(pipe.components.pop("vae"))
        del pipe.handles["vae"]
        gc.collect()
        assert vae() is None
    elif how == "interrupted":
        handle = pipe.components["vae"].register_forward_hook(raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            pipe.call("vae")
        handle.remove()
    else:
        thread = threading.Thread(target=_hold, args=(engine_of(pipe.handles["vae"]).lock, held, done))
        thread.start()
        assert held.wait(240)
    pipe.call("transformer")
    done.set()
    if how == "running":
        thread.join()
    for name in ("encoder", "transformer"):
        pipe.call(name)
    if how in ("running", "interrupted"):
        pipe.call("vae")
    for name, handle in pipe.handles.items():
        if how != "removed" or name != "vae":
            handle.remove()


def _hold(lock: Any, held: threading.Event, done: threading.Event) -> None:
    with lock:
        held.set()
        assert done.wait(240)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError, KeyboardInterrupt])
def test_what_is_raised_for_the_next_model(
    error: type[BaseException], device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error is for that model's own pass to raise, if it comes again; an interrupt is the user's, and ends here."""
    pipe = PretendPipeline(device).offload()
    pipe.image(), pipe.image()
    pipe.call("encoder")
    for _ in range(2):
        pipe.call("transformer")
    x = torch.randn(3, WIDTH)
    with monkeypatch.context() as patch:

        def prepare(self: LookAhead) -> None:
            raise error

        patch.setattr(LookAhead, "prepare", prepare)
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                forward(device, pipe.components["transformer"], x)
        else:
            pipe.call("transformer", x)
    assert pipe.call("vae").before == 0
    pipe.image()
    pipe.remove()
