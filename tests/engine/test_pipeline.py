"""Models of a pipeline, which run one after another as a test says: what is done for the one that should run next while another
one runs, what stays on the device within one budget, and what gives way."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from group_offload import OffloadHandle, apply_group_offloading, enable_group_offload, remove_group_offloading
from group_offload.runtime.prefetch.prefetcher import Prefetcher

from ..support.inside import engine_of
from ..support.models import WIDTH, Model, make
from ..support.on_device import any_mode, forward, raise_interrupt
from ..support.rigs import run
from ..support.simulated import SimulatedDevice, use_simulated_device
from ..support.speeds import use_speeds
from ..support.tuning import tune

IMAGE = ("encoder", *["transformer"] * 3, "vae")
"""The models that an image takes, in order."""
WITH_EXPERTS = ("encoder", *["transformer"] * 4, *["transformer_2"] * 4, "vae")
WITH_CONTROLNET = ("encoder", *["controlnet", "transformer"] * 3, "vae")
EVERYTHING = 1 << 30


@dataclass(slots=True, kw_only=True)
class Passed:
    """What one pass of a model took."""

    name: str
    before: int
    """Onloads that were started before the model was called."""
    onloads: int
    """All of them since the model's last pass."""
    stalls: int
    num_bytes: int
    """Of those onloads."""


class PretendPipeline:
    """Order of use: make it, `offload`, then `image` as often as wanted. Each output is compared with the resident model's."""

    model_cpu_offload_seq = "encoder->transformer->vae"

    def __init__(self, device: SimulatedDevice, **blocks: int) -> None:
        """
        Args:
            blocks: The number of blocks of each model, by its name.
        """
        self.device = device
        blocks = {"encoder": 3, "transformer": 5, "vae": 4, "controlnet": 3, **blocks}
        self.resident: dict[str, nn.Module] = {
            name: make(Model, blocks[name], seed=number) for number, name in enumerate(blocks)
        }
        self.components = copy.deepcopy(self.resident)
        self.handles: dict[str, OffloadHandle] = {}
        self._seen: dict[str, tuple[int, int]] = {}

    def offload(self, **options: Any) -> PretendPipeline:
        self.handles = enable_group_offload(self, onload_device="cpu", **{"vram_budget": None, **options})
        return self

    def call(self, name: str, x: torch.Tensor | None = None) -> Passed:
        handle, model = self.handles[name], self.components[name]
        x = torch.randn(3, WIDTH) if x is None else x
        before, seen = handle.stats(), self._seen.get(name, (0, 0))
        assert torch.equal(self.device.get(forward(self.device, model, x)), run(self.resident[name], x)), name
        assert not self.device.errors
        now = handle.stats()
        self._seen[name] = now.onloads, sum(now.bytes_onloaded.values())
        return Passed(
            name=name,
            before=before.onloads - seen[0],
            onloads=now.onloads - seen[0],
            stalls=now.stalls - before.stalls,
            num_bytes=sum(now.bytes_onloaded.values()) - seen[1],
        )

    def image(self, names: tuple[str, ...] = IMAGE) -> list[Passed]:
        return [self.call(name) for name in names]

    def remove(self) -> None:
        for handle in self.handles.values():
            handle.remove()
        self.device.synchronize()
        assert self.device.allocated_bytes == 0 and self.device.pinned_bytes == 0


def settled(pipe: PretendPipeline, names: tuple[str, ...]) -> list[Passed]:
    """An image once all is learnt."""
    for _ in range(3):
        pipe.image(names)
    return pipe.image(names)


def peak_without_budget(device: SimulatedDevice) -> int:
    pipe = PretendPipeline(device).offload()
    device.reset_peak()
    for _ in range(2):
        pipe.image(WITH_CONTROLNET)
    peak = device.peak_bytes_in_use()
    pipe.remove()
    device.reset_peak()
    return peak


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevice]:
    gc.collect()
    tune(monkeypatch, device_margin_bytes=0)
    with use_simulated_device(SimulatedDevice(0, "random")) as device:
        yield device


# ---------------------------------------------------------------- slots


@any_mode
def test_the_next_model_is_on_its_way_before_its_call(options: dict[str, Any], device: SimulatedDevice) -> None:
    """Each model's first groups are, from the second image on: a decoder's too, which comes after the last of many steps. The
    device holds what the model with most slots takes alone."""
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
    first, second, third = pipe.image(), pipe.image(), pipe.image()
    assert first[1].before > 0  # the pipeline says what comes after its encoder
    assert all(passed.before > 0 for passed in second if passed.name != "transformer" and passed is not second[0])
    assert all(passed.before > 0 for passed in (third[0], third[1], third[-1]))
    assert all(passed.stalls == 0 for passed in second + third)
    assert device.memory.peak <= max(peaks)
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

        def hold() -> None:
            with engine_of(pipe.handles["vae"]).lock:
                held.set()
                assert done.wait(240)

        thread = threading.Thread(target=hold)
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

        def prepare(self: Prefetcher) -> None:
            raise error

        patch.setattr(Prefetcher, "prepare", prepare)
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                forward(device, pipe.components["transformer"], x)
        else:
            pipe.call("transformer", x)
    assert pipe.call("vae").before == 0
    pipe.image()
    pipe.remove()


# ---------------------------------------------------------------- budgets


@pytest.mark.parametrize("wrong", ["another step", "another model", "an error"])
def test_experts_displace_each_other(wrong: str, device: SimulatedDevice) -> None:
    """Each runs four steps in a row: with room for one of the two, the later steps of both send nothing. A wrong guess of who
    leaves costs transfers: at most once what was given up, and once what came in its place. The budget holds for all models
    together (diffusers #10790)."""
    pipe = PretendPipeline(device, transformer_2=5)
    budget = peak_without_budget(device)
    budget += sum(tensor.nbytes for tensor in pipe.resident["transformer"].parameters())
    pipe.offload(vram_budget=budget)
    for at, passed in enumerate(settled(pipe, WITH_EXPERTS)):
        if passed.name.startswith("transformer") and WITH_EXPERTS[at - 1] == passed.name:
            assert not passed.num_bytes, passed
    one = sum(group.num_bytes for group in pipe.handles["transformer"].groups)
    device.reset_peak()
    for name in ("encoder", *["transformer"] * 3):
        pipe.call(name)
    if wrong == "an error":
        model = pipe.components["transformer"]
        assert isinstance(model, Model)
        handle = model.blocks[3].register_forward_pre_hook(_fail)
        with pytest.raises(ValueError, match="stop"):
            pipe.call("transformer")
        handle.remove()
    pipe.call("transformer")
    before = sum(sum(handle.stats().bytes_onloaded.values()) for handle in pipe.handles.values())
    pipe.call("vae" if wrong == "another model" else "transformer")
    if wrong == "another step":
        sent = sum(sum(handle.stats().bytes_onloaded.values()) for handle in pipe.handles.values()) - before
        assert sent <= 2 * one
    for name in ("transformer_2", "vae", "transformer"):
        pipe.call(name)
    assert device.peak_bytes_in_use() <= budget
    pipe.remove()


def _fail(*args: Any) -> None:
    raise ValueError("stop")


def test_a_model_that_runs_is_not_displaced(device: SimulatedDevice) -> None:
    """One that is called inside of another one's forward takes what is left."""
    pipe = PretendPipeline(device).offload(vram_budget=EVERYTHING)
    settled(pipe, IMAGE)
    other = make(Model)
    handle = apply_group_offloading(other, "cpu")
    x = torch.randn(3, WIDTH)
    held: list[int] = []

    def call_other(*args: Any) -> None:
        other(device.put(x))
        held.append(pipe.handles["transformer"].stats().resident_bytes)

    hook = pipe.components["transformer"].get_submodule("blocks.1").register_forward_pre_hook(call_other)
    pipe.call("transformer")
    hook.remove()
    groups = pipe.handles["transformer"].groups
    assert held == [sum(group.num_bytes for group in groups if "blocks" in group.group_id)]  # the others take turns
    assert engine_of(pipe.handles["vae"]).memory.residents == []
    pipe.image()
    handle.remove()
    pipe.remove()


def test_a_backward_takes_what_its_forward_left(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that is trained runs once before others run again, so it gives its own residents up first. No model waits for
    its backward, which takes theirs."""
    use_speeds(monkeypatch, h2d=2)  # so that what fits stays, however long compute takes
    pipe = PretendPipeline(device)
    model = pipe.components["transformer"].requires_grad_(False)
    model.get_parameter("proj_in.bias").requires_grad_(True)
    pipe.offload(vram_budget=EVERYTHING)
    memory, handle = engine_of(pipe.handles["transformer"]).memory, pipe.handles["transformer"]
    own_gave_way: list[bool] = []

    def give_way(*_: Any) -> None:
        before, before_of_all = handle.stats().resident_bytes, memory.arena.resident_bytes
        memory.arena.give_way(1, memory)
        assert 0 < before < before_of_all and memory.arena.resident_bytes < before_of_all
        own_gave_way.append(handle.stats().resident_bytes < before)

    def look(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        give_way()
        output.register_hook(give_way)

    for step in range(4):
        pipe.image(("encoder", "vae"))
        hook = model.get_submodule("blocks.1").register_forward_hook(look) if step == 3 else None
        with device.running():
            model(device.put(torch.randn(3, WIDTH))).square().mean().backward()
    assert hook is not None
    hook.remove()
    assert own_gave_way == [True, False]
    pipe.remove()
