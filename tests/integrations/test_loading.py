"""`from_pretrained`: every weight is the library's own, nothing is loaded, what is written is found again.

The reference is always the library's own `from_pretrained` with the same arguments.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, FluxPipeline, FluxTransformer2DModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import MixtralConfig, MixtralModel, PreTrainedTokenizerFast

from group_offload import ConfigError, ModuleError, apply_group_offloading, handle_of
from group_offload.integrations.loading import from_pretrained

from ..support import tiny_models as tiny
from ..support.asserts import assert_same
from ..support.folders import facts
from ..support.models import aligned
from ..support.pipelines import PIPELINES
from ..support.pipelines import assert_same_model as assert_is
from ..support.processes import in_new_process, ram_peak_of
from ..support.quantizer import RowsConfig
from ..support.rigs import run

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MODELS = {name: tiny.MODELS[name] for name in ("flux", "wan", "kl", "unet", "t5", "clip")}


def open_(model_class: Any, path: Any, folder: Path | None = None, **options: Any) -> Any:
    return from_pretrained(
        model_class, path, **{"onload_device": tiny.device(), "offload_to_disk_path": folder, **options}
    )


def load(model_class: Any, path: Any, **options: Any) -> Any:
    """The library's own `from_pretrained`. diffusers before 0.40 knows `torch_dtype` alone."""
    if "dtype" in options and tuple(map(int, version("diffusers").split(".")[:2])) < (0, 40):
        options["torch_dtype"] = options.pop("dtype")
    return model_class.from_pretrained(path, **options)


def mixed(model: nn.Module) -> nn.Module:
    """Every third weight in another dtype, as some checkpoints have it."""
    for number, weight in enumerate(model.parameters()):
        weight.data = weight.data.to((FP32, BF16, FP16)[number % 3])
    return model


# ------------------------------------------------------------------------------------------------ weights


def old_names(folder: Path, model: Any, *renamings: dict[str, str]) -> None:
    model.save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    for before, after in (pair for names in renamings for pair in names.items()):
        tensors = {name.replace(before, after): tensor for name, tensor in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})


def old_attention(folder: Path) -> Any:
    """diffusers' old attention blocks."""
    model = tiny.kl(block_out_channels=(8, 8), norm_num_groups=2, mid_block_add_attention=True)
    old_names(folder, model, {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"})
    return model


def old_prefix(folder: Path) -> Any:
    model = tiny.clip()
    old_names(folder, model, {"embeddings.": "text_model.embeddings."}, {"text_model.text_model": "text_model"})
    return model


def in_pickle(folder: Path, model: Any, name: str, **options: Any) -> Any:
    model.save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    file.unlink()
    torch.save(model.state_dict(), folder / name, **options)
    return model


def mixture(folder: Path) -> Any:
    """transformers stacks its experts, which are single weights in the file."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_local_experts": 3}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = saved(folder, tiny.seeded(0, lambda: MixtralModel(MixtralConfig(**sizes, **heads))))
    assert any("experts.2" in name for name in load_file(folder / "model.safetensors"))
    return model


def saved(folder: Path, model: Any, **options: Any) -> Any:
    model.save_pretrained(folder, **options)
    return model


SHARDS = {"max_shard_size": "20KB", "variant": "fp16"}
KL_PICKLE = "diffusion_pytorch_model.bin"
CHECKPOINTS: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    **{name: (lambda folder, name=name: saved(folder, MODELS[name][0]()), {}) for name in MODELS},
    **{f"mixed {name}": (lambda folder, name=name: saved(folder, mixed(MODELS[name][0]())), {}) for name in MODELS},
    "float16": (lambda folder: saved(folder, tiny.wan_transformer().half()), {}),
    "bfloat16": (lambda folder: saved(folder, tiny.t5().bfloat16()), {}),
    "shards of flux": (lambda folder: saved(folder, tiny.flux_transformer().half(), **SHARDS), {"variant": "fp16"}),
    "shards of t5": (lambda folder: saved(folder, tiny.t5().half(), **SHARDS), {"variant": "fp16"}),
    "pickled kl": (lambda folder: in_pickle(folder, tiny.kl(), KL_PICKLE), {"use_safetensors": False}),
    "pickled t5": (lambda folder: in_pickle(folder, tiny.t5(), "pytorch_model.bin"), {"use_safetensors": False}),
    "pickled long ago": (
        lambda folder: in_pickle(folder, tiny.kl(), KL_PICKLE, _use_new_zipfile_serialization=False),
        {"use_safetensors": False},
    ),
    "old attention": (old_attention, {}),
    "old prefix": (old_prefix, {}),
    "mixture": (mixture, {}),
}
"""What writes a checkpoint, and the options of its loader."""


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_weights_are_the_librarys(name: str, tmp_path: Path) -> None:
    write, given = CHECKPOINTS[name]
    model_class = type(write(tmp_path / "model"))
    for dtype, in_files in ((BF16, True), (BF16, False), (FP16, False), (FP32, True), (None, False)):
        options = {**given, "subfolder": "model"} if dtype is None else {**given, "subfolder": "model", "dtype": dtype}
        opened = open_(model_class, tmp_path, tmp_path / str(dtype) if in_files else None, **options)
        reference = load(model_class, tmp_path, **options)
        assert_is(opened, reference)
        if in_files:
            assert handle_of(opened).stats().host_bytes == 0
            assert name != "flux" or bool(facts(tmp_path / str(dtype))) == (dtype == BF16), "a cast is written, no more"
        if dtype == FP32 and name in MODELS:
            inputs = MODELS[name][1]
            assert_same(run(opened, **inputs()), run(aligned(reference).to(tiny.device()), **inputs()))


# ------------------------------------------------------------------------------------------------ where they rest


@pytest.mark.parametrize("name", ["flux", "wan"])
def test_a_cast_is_written_once(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Wan keeps some weights in float32: those stay in the checkpoint. A model that is loaded first has the same files."""
    folder, model_class = tmp_path / "files", type(saved(tmp_path / "model", MODELS[name][0]()))
    opened = open_(model_class, tmp_path / "model", folder, dtype=BF16)
    names = [group.group_id for group in handle_of(opened).groups]
    written = facts(folder)
    kept = {fqn for fqn, weight in opened.named_parameters() if weight.dtype == FP32}
    assert bool(kept) == (name == "wan") and (kept or len(written) == len(names))
    assert not any(kept & load_file(folder / file).keys() for file in written)
    del opened
    again = open_(model_class, tmp_path / "model", folder, dtype=BF16)
    assert facts(folder) == written and "other weights" not in caplog.text
    del again
    loaded = load(model_class, tmp_path / "model", dtype=BF16)
    handle = apply_group_offloading(loaded, onload_device=tiny.device(), offload_to_disk_path=folder)
    assert [group.group_id for group in handle.groups] == names and facts(folder) == written


# ------------------------------------------------------------------------------------------------ pipelines


def assert_same_pipeline(opened: Any, reference: Any) -> None:
    assert type(opened) is type(reference)
    assert opened.components.keys() == reference.components.keys()
    for name, part in reference.components.items():
        if isinstance(part, nn.Module):
            assert_is(getattr(opened, name), part)
            assert handle_of(getattr(opened, name)) is not None, name
        else:
            assert type(getattr(opened, name)) is type(part)


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pipelines")
    for name, make in PIPELINES.items():
        make().save_pretrained(folder / name)
    return {name: folder / name for name in PIPELINES}


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_pipelines(name: str, dtype: torch.dtype, pipelines: dict[str, Path], tmp_path: Path) -> None:
    """Wan's two transformers are of one class, with the same names, in one folder."""
    folder = tmp_path / "files"
    opened = open_(DiffusionPipeline, pipelines[name], folder, dtype=dtype)
    reference = load(DiffusionPipeline, pipelines[name], dtype=dtype)
    assert_same_pipeline(opened, reference)
    if dtype == FP32:
        for pipe in (opened, reference):
            pipe.set_progress_bar_config(disable=True)
        for part in reference.components.values():
            if isinstance(part, nn.Module):
                aligned(part).to(tiny.device())
        assert_same(tiny.run(opened), tiny.run(reference))
    before = facts(folder)
    assert_same_pipeline(open_(DiffusionPipeline, pipelines[name], folder, dtype=dtype), reference)
    assert facts(folder) == before


@pytest.mark.filterwarnings("ignore")  # of what other pipelines import
def test_options_for_parts(pipelines: dict[str, Path], tmp_path: Path) -> None:
    """A dtype of its own too."""
    from diffusers import AutoPipelineForText2Image

    dtypes = {"transformer": BF16, "vae": FP16, "default": FP32}
    special = {"transformer": {"offload_type": "leaf_level"}}
    given = {"dtype": dtypes, "exclude_modules": ["vae"], "model_options": special}
    opened = open_(AutoPipelineForText2Image, pipelines["flux"], tmp_path, **given)
    reference = load(DiffusionPipeline, pipelines["flux"], dtype=dtypes)
    assert handle_of(opened.vae) is None
    for name in ("transformer", "text_encoder", "vae"):
        assert_is(getattr(opened, name), getattr(reference, name))
    transformer, text = handle_of(opened.transformer), handle_of(opened.text_encoder)
    assert transformer.config.offload_type == "leaf_level" and text.config.offload_type == "block_level"


def test_parts_that_are_passed(pipelines: dict[str, Path], tmp_path: Path) -> None:
    """They keep their weights. What is offloaded already stays so, by its own options."""
    own = {"subfolder": "transformer", "dtype": BF16, "offload_type": "leaf_level"}
    offloaded, vae = open_(FluxTransformer2DModel, pipelines["flux"], tmp_path / "own", **own), tiny.kl(7)
    handle = handle_of(offloaded)
    parts = {"transformer": offloaded, "vae": vae, "text_encoder_2": None, "tokenizer_2": None}
    opened = open_(DiffusionPipeline, pipelines["flux"], tmp_path / "files", dtype=BF16, **parts)
    assert opened.transformer is offloaded and handle_of(offloaded) is handle
    assert opened.vae is vae and vae.dtype == FP32 and handle_of(vae) is not None
    assert opened.text_encoder_2 is None and opened.text_encoder.dtype == BF16


# ------------------------------------------------------------------------------------------------ errors


class Checkless(nn.Module):
    """No from_pretrained."""


@pytest.mark.parametrize(
    ("model_class", "options", "message"),
    [
        (FluxTransformer2DModel, {"offload_to_disk": "x"}, "Did you mean offload_to_disk_path"),
        (FluxTransformer2DModel, {"use_streams": True}, "Did you mean use_stream"),
        (FluxTransformer2DModel, {"pack": True, "dtype": BF16, "num_layers": 1}, "^pack: neither"),
        (FluxTransformer2DModel, {"device_map": "auto"}, "places weights by accelerate"),
        (FluxTransformer2DModel, {"offload_folder": "x"}, "places weights by accelerate"),
        (FluxTransformer2DModel, {"dtype": BF16, "torch_dtype": FP16}, "two names of one option"),
        (FluxTransformer2DModel, {"exclude_modules": ["vae"]}, "exclude_modules: FluxTransformer2DModel is a model"),
        (FluxTransformer2DModel, {"offload_type": "layer_level"}, "offload_type"),
        (FluxTransformer2DModel, {"num_blocks_per_group": 0}, "num_blocks_per_group"),
        (FluxPipeline, {"model_options": ["vae"]}, "model_options=.*expected"),
        (FluxPipeline, {"model_options": {"vae": None}}, "model_options=.*expected"),
        (FluxPipeline, {"exclude_modules": 3}, "exclude_modules=.*expected"),
        (Checkless, {}, "Checkless has no from_pretrained"),
        (Checkless(), {}, "Pass its class, or call apply_group_offloading"),
        ("FluxPipeline", {}, "Expected a class with from_pretrained"),
    ],
)
def test_options_that_are_wrong(model_class: Any, options: dict[str, Any], message: str) -> None:
    """They are noticed before anything is looked for."""
    with pytest.raises(ConfigError, match=message):
        from_pretrained(model_class, "/no/such/folder", **options)


def test_what_is_wrong_once_it_is_loaded(flux: Path, pipelines: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"block_modules: FluxPipeline is a pipeline: .* model_options"):
        open_(FluxPipeline, pipelines["flux"], dtype=FP32, block_modules=["transformer_blocks"])
    with pytest.raises(ConfigError, match="has no weights to offload"):
        from_pretrained(PreTrainedTokenizerFast, pipelines["flux"] / "tokenizer")
    with pytest.raises(ConfigError, match="offload_to_disk_path"):  # a cast has to be written
        open_(FluxTransformer2DModel, flux, offload_device="disk", dtype=BF16)
    own = type("Own", (FluxTransformer2DModel,), {"_supports_group_offloading": False})
    with pytest.raises(ModuleError, match=r"doesn.t support group offloading.*exclude_modules"):
        open_(own, flux, dtype=FP32)


def test_options_that_are_the_librarys_own(flux: Path, tmp_path: Path) -> None:
    options = {"use_safetensors": True, "disable_mmap": False, "force_download": False, "device_map": None}
    options |= {"token": None, "proxies": None, "output_loading_info": True}
    opened, info = open_(FluxTransformer2DModel, flux, tmp_path / "files", dtype=FP32, **options)
    assert handle_of(opened) is not None and not info["missing_keys"]


# ------------------------------------------------------------------------------------------------ postponed casts


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "mul_": lambda w: w.mul_(3),
    "normal_": lambda w: nn.init.normal_(w, generator=torch.Generator().manual_seed(0)),
    "add": lambda w: torch.add(w, 1, out=w),
    "zero_": lambda w: nn.Parameter(w.data, requires_grad=False).zero_(),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_loader_that_writes_to_weights(
    name: str, flux: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As no cast that was postponed can bear."""

    class Scaled(FluxTransformer2DModel):
        @classmethod
        def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
            model = FluxTransformer2DModel.from_pretrained(*args, **kwargs)
            with torch.no_grad():
                WRITES[name](model.x_embedder.weight)
            return model

    opened = open_(Scaled, flux, tmp_path / "files", dtype=BF16)
    assert f"is loaded as a whole before it is offloaded: {name} writes to a weight" in caplog.text
    assert_is(opened, load(Scaled, flux, dtype=BF16))


def test_the_environment_is_as_before(flux: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, "0"):
        monkeypatch.delenv("HF_DEACTIVATE_ASYNC_LOAD", raising=False)
        if value is not None:
            monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", value)
        open_(FluxTransformer2DModel, flux, dtype=FP32)
        assert os.environ.get("HF_DEACTIVATE_ASYNC_LOAD") == value


# ------------------------------------------------------------------------------------------------ memory


def measure(folder: str) -> None:
    root = Path(folder)
    torch.set_num_threads(1)

    def ours(name: str = "model", **options: Any) -> Any:
        return from_pretrained(FluxTransformer2DModel, root / name, onload_device="cpu", **options)

    def quantized(where: Path | None, name: str = "model") -> Any:
        return ours(name, torch_dtype=BF16, quantization_config=RowsConfig(), offload_to_disk_path=where)

    ours(torch_dtype=FP32)  # what is made once
    quantized(root / "first", "tiny")
    peaks = {
        "no cast": ram_peak_of(lambda: ours(torch_dtype=FP32)),
        "disk": ram_peak_of(lambda: ours(torch_dtype=FP32, offload_device="disk")),
        "cast": ram_peak_of(lambda: ours(torch_dtype=BF16, offload_to_disk_path=root / "files")),
        "found": ram_peak_of(lambda: ours(torch_dtype=BF16, offload_to_disk_path=root / "files")),
        "theirs": ram_peak_of(lambda: FluxTransformer2DModel.from_pretrained(root / "model", torch_dtype=BF16)),
        "quantized": ram_peak_of(lambda: quantized(None)),
        "quantized to files": ram_peak_of(lambda: quantized(root / "quantized")),
    }
    model = quantized(root / "quantized")
    peaks["quantized size"] = sum(weight.nbytes for weight in model.parameters())
    peaks["quantized group"] = max(sum(w.nbytes for w in block.parameters()) for block in model.transformer_blocks)
    print(json.dumps(peaks))


def test_one_group_is_in_ram(tmp_path: Path) -> None:
    """Or what is quantized, and two groups. Hazard: `from_pretrained` takes RAM for all weights before they are cast or
    quantized."""
    sizes = {"attention_head_dim": 64, "num_attention_heads": 8, "joint_attention_dim": 512}
    sizes |= {"pooled_projection_dim": 64, "axes_dims_rope": [16, 24, 24]}
    model = FluxTransformer2DModel(num_layers=4, num_single_layers=14, **sizes)
    size = sum(weight.nbytes for weight in model.parameters())
    largest = max(sum(weight.nbytes for weight in block.parameters()) for block in model.transformer_blocks)
    assert size > 300 << 20
    model.save_pretrained(tmp_path / "model", max_shard_size="100MB")
    FluxTransformer2DModel(num_layers=1, num_single_layers=1, **sizes).save_pretrained(tmp_path / "tiny")
    del model
    said = in_new_process(measure, tmp_path)
    peaks = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    assert peaks["no cast"] < 30 << 20 > peaks["disk"]
    assert peaks["cast"] < 2 * largest + (30 << 20) > peaks["found"]
    assert peaks["theirs"] > size // 2 - (30 << 20)  # the probe sees what is there
    assert peaks["quantized size"] < size // 3
    most = peaks["quantized size"] + 2 * peaks["quantized group"] + (30 << 20)
    assert peaks["quantized"] < most > peaks["quantized to files"], peaks
