"""Models that the libraries quantize, where their packages are installed: opened, saved, dequantised, from GGUF files."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from torch import nn
from transformers import BitsAndBytesConfig, QuantoConfig, T5Config, T5EncoderModel

from group_offload import apply_group_offloading
from group_offload.api import handle_of
from group_offload.integrations.loading import from_pretrained

from ..support.asserts import assert_at_rest, assert_same, plain_tensors, same_bits
from ..support.quantized import is_there
from ..support.rigs import Offload, run

pytestmark = pytest.mark.filterwarnings("ignore")  # what the packages say about this machine

BF16 = torch.bfloat16
SIZES = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 64, "num_attention_heads": 4}
SIZES |= {"joint_attention_dim": 256, "pooled_projection_dim": 256, "axes_dims_rope": [16, 24, 24]}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[type[nn.Module], Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    FluxTransformer2DModel(**SIZES).save_pretrained(folder / "flux")
    config = T5Config(vocab_size=64, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
    T5EncoderModel(config).save_pretrained(folder / "t5")
    return {FluxTransformer2DModel: folder / "flux", T5EncoderModel: folder / "t5"}


def inputs_of(model_class: type[nn.Module]) -> dict[str, Any]:
    if model_class is T5EncoderModel:
        return {"input_ids": torch.arange(12).reshape(2, 6)}
    torch.manual_seed(1)
    sizes = {"hidden_states": (1, 16, 64), "encoder_hidden_states": (1, 8, 256), "pooled_projections": (1, 256)}
    found = {name: torch.randn(size, dtype=BF16) for name, size in sizes.items()}
    places = {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(8, 3)}
    return {**found, **places, "timestep": torch.tensor([0.5], dtype=BF16), "return_dict": False}


def output_of(model: nn.Module) -> Any:
    return run(model, **inputs_of(type(model)))[0]


def _torchao(library: str, name: str, where: str = "torchao.quantization", **options: Any) -> Callable[[], Any]:
    return lambda: _of(library, "TorchAoConfig")(getattr(import_module(where), name)(**options))


def _of(library: str, name: str) -> Any:
    return getattr(import_module(library), name)


FLUX, T5 = FluxTransformer2DModel, T5EncoderModel
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
INT8, FP8, INT4 = "Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig"
DYNAMIC, NVFP4 = "Int8DynamicActivationInt8WeightConfig", "NVFP4WeightOnlyConfig"
CONFIGS: dict[str, tuple[str, type[nn.Module], Callable[[], Any], bool]] = {
    "diffusers torchao int8": ("torchao", FLUX, _torchao("diffusers", INT8), True),
    "diffusers torchao int8 dynamic": ("torchao", FLUX, _torchao("diffusers", DYNAMIC), True),
    "diffusers torchao fp8": ("torchao", FLUX, _torchao("diffusers", FP8), True),
    "diffusers torchao int4": ("torchao", FLUX, _torchao("diffusers", INT4, weight_dtype=torch.int4), True),
    "diffusers torchao NVFP4": ("torchao", FLUX, _torchao("diffusers", NVFP4, "torchao.prototype.mx_formats"), True),
    "diffusers quanto int8": ("optimum", FLUX, lambda: _of("diffusers", "QuantoConfig")(weights_dtype="int8"), True),
    "diffusers quanto fp8": ("optimum", FLUX, lambda: _of("diffusers", "QuantoConfig")(weights_dtype="float8"), True),
    "diffusers quanto int4": ("optimum", FLUX, lambda: _of("diffusers", "QuantoConfig")(weights_dtype="int4"), False),
    "diffusers SDNQ uint4": ("sdnq", FLUX, lambda: _of("diffusers", "SDNQConfig")(weights_dtype="uint4"), True),
    "transformers torchao int8": ("torchao", T5, _torchao("transformers", INT8), True),
    "transformers bitsandbytes nf4": ("bitsandbytes", T5, lambda: BitsAndBytesConfig(**NF4), True),
    "transformers bitsandbytes fp4": ("bitsandbytes", T5, lambda: BitsAndBytesConfig(load_in_4bit=True), True),
    "transformers bitsandbytes int8": ("bitsandbytes", T5, lambda: BitsAndBytesConfig(load_in_8bit=True), True),
    "transformers quanto int8": ("optimum", T5, lambda: QuantoConfig(weights="int8"), False),
}
"""By name: the package, the class, the config, and whether the library opens what it saves."""


def needs(name: str) -> tuple[type[nn.Module], Callable[[], Any], bool]:
    package, *rest = CONFIGS[name]
    if not is_there(package):
        pytest.skip(f"needs {package}")
    return rest[0], rest[1], rest[2]  # type: ignore[return-value]


def load(model_class: Any, path: Path, config: Any) -> Any:
    torch.manual_seed(2)
    return model_class.from_pretrained(path, quantization_config=config, dtype=BF16)


def open_offloaded(model_class: Any, path: Path, config: Any, folder: Path | None) -> Any:
    return from_pretrained(
        model_class, path, quantization_config=config, dtype=BF16, onload_device="cpu", offload_to_disk_path=folder
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_opened(name: str, checkpoints: dict[Any, Path], tmp_path: Path) -> None:
    model_class, config, _ = needs(name)
    path = checkpoints[model_class]
    reference = load(model_class, path, config())
    expected = output_of(reference)
    for folder in (None, tmp_path / "files"):
        torch.manual_seed(2)
        opened = open_offloaded(model_class, path, config(), folder)
        # (bitsandbytes compresses 4-bit weights in the first forward on some CPUs: look at the weights first.)
        assert_at_rest(opened, load(model_class, path, config()))
        assert_same(output_of(opened), expected)
        handle = handle_of(opened)
        assert handle is not None and (handle.stats().host_bytes == 0) == (folder is not None)


@pytest.mark.parametrize("name", [name for name, (_, _, _, is_saved) in CONFIGS.items() if is_saved])
def test_a_lora_on_a_saved_model(name: str, checkpoints: dict[Any, Path], tmp_path: Path) -> None:
    """diffusers opens quanto's checkpoints with weights that name the meta device, and peft puts the LoRA there."""
    peft = pytest.importorskip("peft")
    model_class, config, _ = needs(name)
    path = checkpoints[model_class]
    lora = peft.LoraConfig(r=2, target_modules=["to_q"] if model_class is FLUX else ["q"], init_lora_weights=False)

    def adapted(model: Any) -> Any:
        torch.manual_seed(3)
        model.add_adapter(lora)
        return model

    model = load(model_class, path, config())
    model.save_pretrained(tmp_path / "saved")
    saved = adapted(load(model_class, tmp_path / "saved", None))
    try:
        expected = output_of(adapted(model) if any(weight.is_meta for weight in saved.parameters()) else saved)
    except Exception as error:
        pytest.skip(f"the library does not run it here: {error!s:.80}")
    assert_same(output_of(adapted(open_offloaded(model_class, tmp_path / "saved", None, tmp_path / "files"))), expected)


# ------------------------------------------------------------------------------------------------ GGUF


@pytest.mark.skipif(not is_there("gguf"), reason="needs gguf")
@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_a_gguf_file(name: str, checkpoints: dict[Any, Path], tmp_path: Path, offload_either: Offload) -> None:
    """Hazard: GGUF's parameters don't tell what's inside, and fail when offloaded (diffusers #12002, #14691,
    #14698)."""
    import gguf
    from diffusers import GGUFQuantizationConfig

    torch.manual_seed(0)
    kind = gguf.GGMLQuantizationType[name]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "flux")
    for key, weight in FluxTransformer2DModel(**SIZES).state_dict().items():
        if weight.dim() == 2 and weight.shape[1] % 256 == 0:
            writer.add_tensor(key, gguf.quants.quantize(weight.numpy(), kind), raw_dtype=kind)
        else:
            writer.add_tensor(key, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    def from_file() -> Any:
        return FluxTransformer2DModel.from_single_file(
            str(tmp_path / "model.gguf"),
            config=str(checkpoints[FLUX]),
            quantization_config=GGUFQuantizationConfig(compute_dtype=BF16),
            torch_dtype=BF16,
        )

    model, reference = from_file(), from_file()
    assert sum(weight.dtype is torch.uint8 for _, weight in plain_tensors(reference)) > 20
    handle = offload_either(model)
    for _ in range(2):
        assert_same(output_of(model), output_of(reference))
        assert_at_rest(model, reference)
    handle.remove()
    assert_same(output_of(model), output_of(reference))
    apply_group_offloading(model, "cpu")
    for twin in (model, reference):
        from diffusers.quantizers.gguf.utils import _dequantize_gguf_and_restore_linear

        _dequantize_gguf_and_restore_linear(twin, [])  # `dequantize` itself wants an accelerator
    assert_same(output_of(model), output_of(reference))
    assert all(
        same_bits(one, two) for (_, one), (_, two) in zip(plain_tensors(model), plain_tensors(reference), strict=True)
    )
