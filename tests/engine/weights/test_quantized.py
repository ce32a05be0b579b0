"""Quantized weights, kind by kind, on every tier: with the resident model's bits. docs/quantization.md has the table."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from group_offload import apply_group_offloading

from ...support.asserts import assert_at_rest, assert_same, plain_tensors
from ...support.on_device import forward
from ...support.quantized import KINDS, WIDTH, Model, inputs, is_there, quantized
from ...support.rigs import Offload, check, run
from ...support.simulated import SimulatedDevice, use_simulated_device

pytestmark = pytest.mark.filterwarnings("ignore")  # what the packages say about this machine


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    package = KINDS[request.param][0]
    if not is_there(package):
        pytest.skip(f"needs {package}")
    return request.param


def test_on_every_tier(kind: str, offload: Offload) -> None:
    """quanto (diffusers #12610), torchao with streams and in files (#13281, #13713), bitsandbytes, which keeps scales beside a
    weight and in a layer's `state` (#10653)."""
    model, reference = quantized(kind), quantized(kind)
    handle = offload(model)
    compare(kind, model, reference)
    # CPUs with AVX512 pack 4-bit weights of bitsandbytes in a forward.
    assert handle.stats().rebuilds <= kind.startswith("bitsandbytes")
    for twin in (model, reference):
        with torch.no_grad():
            twin.blocks[1].up.bias.data.copy_(torch.arange(2 * WIDTH))
            twin.blocks[2].down = twin.blocks[0].down
    compare(kind, model, reference)
    handle.remove()
    assert_at_rest(model, reference)
    assert_same(run(model, inputs()), run(reference, inputs()))


def compare(kind: str, model: nn.Module, reference: nn.Module) -> None:
    if not kind.startswith("SDNQ"):
        check(model, reference, inputs())
        return
    for _ in range(3):  # SDNQ compiles its kernels, which no mode may watch
        assert_same(run(model, inputs()), run(reference, inputs()))
        assert_at_rest(model, reference)


def test_saved_and_loaded(kind: str, offload_either: Offload) -> None:
    model, reference = quantized(kind), quantized(kind)
    offload_either(model)
    run(model, inputs())
    run(reference, inputs())
    states = [twin.state_dict() for twin in (model, reference)]
    assert states[0].keys() == states[1].keys()
    others = [quantized(kind, seed=1), quantized(kind, seed=1)]
    files = [io.BytesIO(), io.BytesIO()]
    try:  # the resident model first: not every library can
        torch.save(states[1], files[1])
        files[1].seek(0)
        others[1].load_state_dict(torch.load(files[1], weights_only=False))
    except (RuntimeError, RecursionError):
        pytest.skip("the library does not load its own state dict into a quantized model")
    offload_either(others[0])
    torch.save(states[0], files[0])
    files[0].seek(0)
    others[0].load_state_dict(torch.load(files[0], weights_only=False))
    compare(kind, others[0], others[1])


def test_with_a_lora_on_top(kind: str, offload_either: Offload) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    def adapt(model: nn.Module) -> nn.Module:
        torch.manual_seed(3)
        config = LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False)
        return inject_adapter_in_model(config, model).to(torch.bfloat16).eval()

    for is_late in (False, True):
        try:
            reference = adapt(quantized(kind))
            run(reference, inputs())
        except Exception as error:
            pytest.skip(f"peft does not allow it: {error!s:.80}")
        model = quantized(kind)
        model = model if is_late else adapt(model)
        handle = offload_either(model)
        if is_late:
            run(model, inputs())
            adapt(model)
        compare(kind, model, reference)
        handle.remove()
        assert_same(run(model, inputs()), run(reference, inputs()))


def test_compiled_blocks(kind: str, offload_either: Offload) -> None:
    model, reference = quantized(kind), quantized(kind)
    for twin in (model, reference):
        for block in twin.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
    try:
        expected = run(reference, inputs())
    except Exception as error:
        pytest.skip(f"it does not compile without this package: {error!s:.80}")
    offload_either(model)
    for _ in range(2):
        assert_same(run(model, inputs()), expected)
    assert_at_rest(model, reference)


def test_copies_never_wait_on_the_host(kind: str) -> None:
    """All bytes of quantized weights are stored in pinned memory, and no copy of a steady pass waits."""
    model = quantized(kind)
    with use_simulated_device(SimulatedDevice(1)) as device:
        handle = apply_group_offloading(model, "cpu")
        stats = handle.stats()
        size = sum(extent for extent in {t.data_ptr(): t.nbytes for _, t in plain_tensors(model)}.values())
        assert stats.pinned_bytes == stats.host_bytes >= size
        try:
            for _ in range(2):  # bitsandbytes packs 4-bit weights anew in the first forward on some CPUs
                forward(device, model, inputs())
        except Exception as error:
            pytest.skip(f"the simulated device does not run these kernels: {error!s:.80}")
        device.synchronize()
        before = device.num_host_waits
        for _ in range(2):
            forward(device, model, inputs())
        assert device.num_host_waits == before
        handle.remove()


class Editing(nn.Linear):
    """Edits its bias in each forward, in the dtype that it was cast to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.bias.add_(0.5)
        return super().forward(x)


def test_an_edit_under_layerwise_casting(offload_either: Offload) -> None:
    """The hook replaces each weight at each call, and the engine does not compare what it put back."""

    torch.manual_seed(0)
    model = Model().eval().bfloat16()
    model.blocks[1].up = Editing(WIDTH, 2 * WIDTH).bfloat16()
    reference = copy.deepcopy(model)
    for twin in (model, reference):
        KINDS["layerwise casting"][1](twin.requires_grad_(False))
    offload_either(model)
    check(model, reference, inputs())
