"""`from_pretrained` with a quantization config: quantized weight by weight; and of a quantized checkpoint.

The reference is always the model that the library itself quantizes.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, FluxTransformer2DModel
from diffusers.quantizers import PipelineQuantizationConfig
from torch import nn

from group_offload.api import handle_of
from group_offload.integrations.loading import from_pretrained

from ..support import tiny_models as tiny
from ..support.asserts import assert_same, named_tensors, same_bits
from ..support.participants import in_threads
from ..support.pipelines import assert_same_model
from ..support.quantizer import RowsConfig, RowsQuantizer
from ..support.rigs import run

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _count_anew() -> None:
    RowsQuantizer.made.clear()


def open_(path: Any, folder: Path | None = None, model_class: Any = FluxTransformer2DModel, **options: Any) -> Any:
    options = {"quantization_config": RowsConfig(), "dtype": BF16, **options}
    return from_pretrained(model_class, path, onload_device=tiny.device(), offload_to_disk_path=folder, **options)


def load(path: Any, model_class: Any = FluxTransformer2DModel, **options: Any) -> Any:
    options = {"quantization_config": RowsConfig(), "dtype": BF16, **options}
    found = model_class.from_pretrained(path, **options)
    RowsQuantizer.made.clear()
    return found


def assert_is(opened: Any, reference: Any) -> None:
    assert_same_model(opened, reference)
    assert opened.config["_name_or_path"] == reference.config["_name_or_path"]
    assert opened.config["quantization_config"].quant_method == "rows"


# ------------------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_bits_are_those_of_the_librarys_own_quantized_model(dtype: torch.dtype, flux: Path, tmp_path: Path) -> None:
    reference = load(flux, dtype=dtype)
    inputs = tiny.flux_inputs() if dtype == FP32 else None
    for folder in (None, tmp_path / "files", tmp_path / "files"):
        opened = open_(flux, folder, dtype=dtype)
        assert_is(opened, reference)
        if inputs is not None:
            assert_same(run(opened, **inputs), run(reference.to(tiny.device()), **inputs))


def test_several_threads_at_once(flux: Path, tmp_path: Path) -> None:
    """One of them loads without this package. The libraries' methods are as before in the end."""
    from diffusers.quantizers.auto import DiffusersAutoQuantizer

    class Meddling(RowsConfig):
        def to_dict(self) -> dict[str, Any]:
            if len(made) == 1:
                thread = threading.Thread(target=lambda: made.append(load(flux)))
                made.append("on its way")
                thread.start()
                thread.join()
            return super().to_dict()

    before, reference = vars(DiffusersAutoQuantizer)["from_config"], load(flux)
    made: list[Any] = [reference]
    opened = [open_(flux, tmp_path / "files", quantization_config=Meddling())]
    opened.append(made.pop())
    assert isinstance(opened[-1], nn.Module)
    places = ("one", "two", None, "one")
    in_threads([lambda part=part: opened.append(open_(flux, part and tmp_path / part)) for part in places])
    assert len(opened) == 6 and vars(DiffusersAutoQuantizer)["from_config"] is before
    for model in opened:
        assert_is(model, reference)
        assert vars(model.hf_quantizer).keys() == vars(reference.hf_quantizer).keys()


def test_pipelines(tmp_path: Path) -> None:
    tiny.flux_pipeline().save_pretrained(tmp_path / "pipe")
    config = PipelineQuantizationConfig(quant_mapping={"transformer": RowsConfig()})
    reference = load(tmp_path / "pipe", DiffusionPipeline, quantization_config=config)
    opened = open_(tmp_path / "pipe", tmp_path / "files", DiffusionPipeline, quantization_config=config)
    assert_is(opened.transformer, reference.transformer)
    assert RowsQuantizer.made and handle_of(opened.text_encoder_2) is not None


def test_a_quantized_checkpoint_is_opened_in_place(flux: Path, tmp_path: Path) -> None:
    load(flux).save_pretrained(tmp_path / "quantized")
    opened = open_(tmp_path / "quantized", tmp_path / "files", quantization_config=None)
    assert handle_of(opened).stats().host_bytes == 0
    assert not RowsQuantizer.made
    reference = FluxTransformer2DModel.from_pretrained(tmp_path / "quantized", dtype=BF16)
    for name, tensor in named_tensors(reference):
        assert same_bits(opened.get_parameter(name), tensor)
