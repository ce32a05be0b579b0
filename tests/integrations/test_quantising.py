"""`from_pretrained` with a quantization config: quantized weight by weight; and of a quantized checkpoint.

The reference is always the model that the library itself quantises.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, FluxTransformer2DModel
from diffusers.quantizers import PipelineQuantizationConfig
from torch import nn

from group_offload import ConfigError
from group_offload.api import handle_of
from group_offload.integrations.opening import from_pretrained

from ..support import tiny_models as tiny
from ..support.asserts import assert_same, named_tensors, same_bits
from ..support.quantiser import RowsConfig, RowsQuantiser
from ..support.rigs import run

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture
def flux(tmp_path: Path) -> Path:
    """A transformer, in float32."""
    tiny.flux_transformer().save_pretrained(tmp_path / "flux")
    return tmp_path / "flux"


@pytest.fixture(autouse=True)
def _count_anew() -> None:
    RowsQuantiser.made.clear()


def open_(path: Any, folder: Path | None = None, model_class: Any = FluxTransformer2DModel, **options: Any) -> Any:
    options = {"quantization_config": RowsConfig(), "dtype": BF16, **options}
    return from_pretrained(model_class, path, onload_device=tiny.device(), offload_to_disk_path=folder, **options)


def load(path: Any, model_class: Any = FluxTransformer2DModel, **options: Any) -> Any:
    options = {"quantization_config": RowsConfig(), "dtype": BF16, **options}
    found = model_class.from_pretrained(path, **options)
    RowsQuantiser.made.clear()
    return found


def assert_is(opened: nn.Module, reference: nn.Module) -> None:
    expected, actual = dict(named_tensors(reference)), dict(named_tensors(opened))
    assert list(actual) == list(expected)
    for name, tensor in actual.items():
        assert same_bits(tensor, expected[name].cpu()), f"{name}: {tensor.dtype} for {expected[name].dtype}"
        assert tensor.requires_grad == expected[name].requires_grad, name
    assert [type(part) for part in opened.modules()] == [type(part) for part in reference.modules()]
    assert opened.dtype == reference.dtype and opened.training == reference.training
    assert opened.config["_name_or_path"] == reference.config["_name_or_path"]  # type: ignore[index]
    assert opened.config["quantization_config"].quant_method == "rows"  # type: ignore[index]


# ------------------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_bits_are_those_of_the_librarys_own_quantised_model(dtype: torch.dtype, flux: Path, tmp_path: Path) -> None:
    reference = load(flux, dtype=dtype)
    inputs = tiny.flux_inputs() if dtype == FP32 else None
    for folder in (None, tmp_path / "files", tmp_path / "files"):
        opened = open_(flux, folder, dtype=dtype)
        assert_is(opened, reference)
        if inputs is not None:
            assert_same(run(opened, **inputs), run(reference.to(tiny.device()), **inputs))


def test_nothing_is_left_behind(flux: Path, tmp_path: Path) -> None:
    """The libraries' methods are as before, and other threads are not concerned."""
    from diffusers.quantizers.auto import DiffusersAutoQuantizer

    before = [
        DiffusersAutoQuantizer.__dict__["from_config"],
        RowsQuantiser.__dict__["create_quantized_param"],
        RowsQuantiser.__dict__.get("update_device_map"),
    ]
    there: list[Any] = []

    class Meddling(RowsConfig):
        def to_dict(self) -> dict[str, Any]:
            if not there:
                thread = threading.Thread(target=lambda: there.append(load(flux)))
                there.append("on its way")
                thread.start()
                thread.join()
            return super().to_dict()

    open_(flux, tmp_path / "files", quantization_config=Meddling())
    assert len(there) == 2
    assert_is(there[1], load(flux))
    assert before == [
        DiffusersAutoQuantizer.__dict__["from_config"],
        RowsQuantiser.__dict__["create_quantized_param"],
        RowsQuantiser.__dict__.get("update_device_map"),
    ]


def test_two_threads_at_once(flux: Path, tmp_path: Path) -> None:
    before = RowsQuantiser.__dict__["create_quantized_param"]
    reference, opened = load(flux), []
    threads = [
        threading.Thread(target=lambda part=part: opened.append(open_(flux, part and tmp_path / part)))
        for part in ("one", "two", None, "one")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 4 and RowsQuantiser.__dict__["create_quantized_param"] is before
    for model in opened:
        assert_is(model, reference)


def test_pipelines(tmp_path: Path) -> None:
    tiny.flux_pipeline().save_pretrained(tmp_path / "pipe")
    config = PipelineQuantizationConfig(quant_mapping={"transformer": RowsConfig()})
    reference = load(tmp_path / "pipe", DiffusionPipeline, quantization_config=config)
    opened = open_(tmp_path / "pipe", tmp_path / "files", DiffusionPipeline, quantization_config=config)
    assert_is(opened.transformer, reference.transformer)
    assert RowsQuantiser.made and handle_of(opened.text_encoder_2) is not None


def test_a_quantised_checkpoint_is_opened_in_place(flux: Path, tmp_path: Path) -> None:
    load(flux).save_pretrained(tmp_path / "quantised")
    opened = open_(tmp_path / "quantised", tmp_path / "files", quantization_config=None)
    handle = handle_of(opened)
    assert handle is not None and handle.stats().host_bytes == 0
    assert not RowsQuantiser.made
    reference = FluxTransformer2DModel.from_pretrained(tmp_path / "quantised", dtype=BF16)
    for name, tensor in named_tensors(reference):
        assert same_bits(opened.get_parameter(name), tensor)


def test_accelerate_may_not_place_weights(flux: Path) -> None:
    with pytest.raises(ConfigError, match="device_map"):
        open_(flux, device_map="auto")


# ------------------------------------------------------------------------------------------------ memory


MEASURE = """
import json, sys, threading
from pathlib import Path
import torch
from diffusers import FluxTransformer2DModel
from group_offload.integrations.opening import from_pretrained
from tests.support.quantiser import RowsConfig
torch.set_num_threads(1)
folder = Path(sys.argv[1])

def in_ram():
    lines = open("/proc/self/status").read().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon", "RssShmem")))

def peak_of(call):
    before = in_ram()
    peak, is_done = [before], threading.Event()
    def watch():
        while not is_done.wait(0.003):
            peak[0] = max(peak[0], in_ram())
    thread = threading.Thread(target=watch)
    thread.start()
    model = call()
    is_done.set()
    thread.join()
    return max(peak[0], in_ram()) - before

def ours(where, name="model"):
    return from_pretrained(FluxTransformer2DModel, folder / name, onload_device="cpu", torch_dtype=torch.bfloat16,
                           quantization_config=RowsConfig(), offload_to_disk_path=where)

ours(folder / "first", "tiny")  # what is made once
peaks = {"first": peak_of(lambda: ours(folder / "files"))}
model = [ours(folder / "files")]
size = sum(weight.nbytes for weight in model[0].parameters())
group = max(sum(weight.nbytes for weight in block.parameters()) for block in model[0].transformer_blocks)
model.clear()
peaks["RAM"] = peak_of(lambda: ours(None))
print(json.dumps({**peaks, "size": size, "group": group}))
"""


def test_ram_is_the_quantised_size_and_two_groups(tmp_path: Path) -> None:
    options = {"attention_head_dim": 64, "num_attention_heads": 8, "joint_attention_dim": 512}
    options |= {"pooled_projection_dim": 64, "axes_dims_rope": [16, 24, 24]}
    model = FluxTransformer2DModel(num_layers=1, num_single_layers=8, **options)
    loaded = sum(weight.nbytes for weight in model.parameters())
    model.save_pretrained(tmp_path / "model", max_shard_size="100MB")
    FluxTransformer2DModel(num_layers=1, num_single_layers=1, **options).save_pretrained(tmp_path / "tiny")
    del model
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURE), str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert loaded > 140 << 20 and found["size"] < loaded // 3
    most = found["size"] + 2 * found["group"] + (30 << 20)  # the bytes that the process and the hash take
    assert found["first"] < most and found["RAM"] < most, found
