"""Whole diffusers pipelines, and diffusers' own calls on this engine: the same bits as the resident pipeline."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import diffusers
import diffusers.hooks.group_offloading as stock
import pytest
import torch
import torch._dynamo.testing
from diffusers import AutoencoderTiny, FluxPipeline, FluxTransformer2DModel
from diffusers.hooks import apply_group_offloading as imported_before_patching
from diffusers.models.modeling_utils import ModelMixin
from safetensors import safe_open
from torch import nn

from group_offload import (
    ConfigError,
    ModuleError,
    OffloadHandle,
    StateError,
    apply_group_offloading,
    disable_group_offload,
    enable_group_offload,
    patch_diffusers,
    remove_group_offloading,
    unpatch_diffusers,
)

from ..support import tiny_models as tiny

PIPELINES = {"flux": tiny.flux_pipeline, "sd": tiny.sd_pipeline, "wan": tiny.wan_pipeline}

any_pipeline = pytest.mark.parametrize("kind", PIPELINES)
any_model = pytest.mark.parametrize("name", tiny.MODELS)
any_tier = pytest.mark.parametrize("tier", ["ram", "disk"])
any_level = pytest.mark.parametrize("level", ["block_level", "leaf_level"])


@pytest.fixture
def device() -> torch.device:
    return tiny.device()


@pytest.fixture
def patched() -> Iterator[None]:
    patch_diffusers()
    yield
    unpatch_diffusers()


@pytest.fixture(scope="module")
def resident_outputs() -> dict[str, torch.Tensor]:
    return {kind: tiny.run(make().to(tiny.device())) for kind, make in PIPELINES.items()}


@pytest.fixture(scope="module")
def resident_calls() -> dict[str, torch.Tensor]:
    return {name: tiny.call(make().to(tiny.device()), inputs()) for name, (make, inputs) in tiny.MODELS.items()}


def tier_options(tier: str, folder: Path) -> dict[str, Any]:
    return {} if tier == "ram" else {"offload_to_disk_path": folder}


def models_of(pipe: Any) -> dict[str, nn.Module]:
    return {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def assert_same_weights(module: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    found = weights_of(module)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].cpu(), tensor.cpu()), name


def traces(module: nn.Module) -> list[tuple[str, type, list[str], Any, int, int]]:
    """Everything about the modules of a model that offloading might leave behind."""
    return [
        (
            name,
            type(part),
            sorted(part.__dict__),
            part.__dict__.get("forward"),
            len(part._forward_hooks),
            len(part._forward_pre_hooks),
        )
        for name, part in module.named_modules()
    ]


# ------------------------------------------------------------------------------------------------ the function


@any_pipeline
@any_tier
@any_level
def test_pipeline_is_bit_equal(
    kind: str,
    tier: str,
    level: str,
    device: torch.device,
    tmp_path: Path,
    resident_outputs: dict[str, torch.Tensor],
) -> None:
    pipe = PIPELINES[kind]()
    handles = enable_group_offload(pipe, onload_device=device, offload_type=level, **tier_options(tier, tmp_path))
    assert handles.keys() == models_of(pipe).keys()
    for _ in range(3):
        assert torch.equal(tiny.run(pipe), resident_outputs[kind])
    for name, handle in handles.items():
        assert handle.module is getattr(pipe, name)
        assert handle.stats().onloads > 0, name
        assert (handle.stats().file_bytes > 0) == (tier == "disk"), name


@any_pipeline
def test_two_blocks_a_group(
    kind: str, device: torch.device, tmp_path: Path, resident_outputs: dict[str, torch.Tensor]
) -> None:
    pipe = PIPELINES[kind]()
    enable_group_offload(pipe, onload_device=device, num_blocks_per_group=2, offload_to_disk_path=tmp_path)
    for _ in range(2):
        assert torch.equal(tiny.run(pipe), resident_outputs[kind])


@any_pipeline
@pytest.mark.gpu
@any_level
@any_tier
@pytest.mark.parametrize("record_stream", [False, True])
def test_pipeline_with_streams(
    kind: str,
    level: str,
    tier: str,
    record_stream: bool,
    device: torch.device,
    tmp_path: Path,
    resident_outputs: dict[str, torch.Tensor],
) -> None:
    pipe = PIPELINES[kind]()
    enable_group_offload(
        pipe,
        onload_device=device,
        offload_type=level,
        use_stream=True,
        record_stream=record_stream,
        **tier_options(tier, tmp_path),
    )
    for _ in range(3):
        assert torch.equal(tiny.run(pipe), resident_outputs[kind])


@any_tier
def test_disable_gives_everything_back(
    tier: str, device: torch.device, tmp_path: Path, resident_outputs: dict[str, torch.Tensor]
) -> None:
    pipe = tiny.flux_pipeline()
    weights = {name: weights_of(model) for name, model in models_of(pipe).items()}
    before = {name: traces(model) for name, model in models_of(pipe).items()}
    handles = enable_group_offload(pipe, onload_device=device, **tier_options(tier, tmp_path))
    tiny.run(pipe)
    disable_group_offload(pipe)
    for name, model in models_of(pipe).items():
        assert not handles[name].is_active
        assert traces(model) == before[name], name
        assert_same_weights(model, weights[name])
        assert next(model.parameters()).device.type == "cpu"
        assert not stock._is_group_offload_enabled(model)
    assert torch.equal(tiny.run(pipe.to(device)), resident_outputs["flux"])
    disable_group_offload(pipe)  # and again does nothing


def test_disable_then_enable_uses_the_files_again(device: torch.device, tmp_path: Path) -> None:
    pipe = tiny.flux_pipeline()
    enable_group_offload(pipe, onload_device=device, offload_to_disk_path=tmp_path)
    expected = tiny.run(pipe)
    inodes = inodes_of(tmp_path)
    disable_group_offload(pipe)
    enable_group_offload(pipe, onload_device=device, offload_to_disk_path=tmp_path)
    assert inodes_of(tmp_path) == inodes
    assert torch.equal(tiny.run(pipe), expected)


def inodes_of(folder: Path) -> dict[str, tuple[int, int]]:
    return {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in folder.glob("*.safetensors")}


@pytest.mark.parametrize("excluded", ["vae", ["vae"], ["vae", "text_encoder"], ("text_encoder_2",)])
def test_excluded_modules_stay_whole(
    excluded: Any, device: torch.device, resident_outputs: dict[str, torch.Tensor]
) -> None:
    pipe = tiny.flux_pipeline()
    handles = enable_group_offload(pipe, onload_device=device, exclude_modules=excluded)
    names = {excluded} if isinstance(excluded, str) else set(excluded)
    assert handles.keys() == models_of(pipe).keys() - names
    for name in names:
        assert not stock._is_group_offload_enabled(getattr(pipe, name))
        assert {tensor.device for tensor in getattr(pipe, name).parameters()} == {device}
    assert torch.equal(tiny.run(pipe), resident_outputs["flux"])


@pytest.mark.parametrize("component", ["tokenizer", "image_encoder", "scheduler"])
def test_excluding_a_component_without_weights_is_no_error(component: str, device: torch.device) -> None:
    pipe = tiny.flux_pipeline()
    handles = enable_group_offload(pipe, onload_device=device, exclude_modules=component)
    assert handles.keys() == models_of(pipe).keys()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"model_options": {"vea": {}}}, "vea"),
        ({"model_options": {"tokenizer": {}}}, "tokenizer"),
        ({"model_options": {"vae": {"offload_typ": "leaf_level"}}}, "offload_typ"),
        ({"model_options": {"vae": {"identity": "x"}}}, "identity"),
        ({"model_options": {"vae": {}}, "exclude_modules": "vae"}, "vae"),
        ({"offload_type": "layer"}, "layer"),
        ({"num_blocks_per_group": 0}, "num_blocks_per_group"),
    ],
)
def test_wrong_names_and_values(options: dict[str, Any], named: str, device: torch.device) -> None:
    pipe = tiny.flux_pipeline()
    before = {name: traces(model) for name, model in models_of(pipe).items()}
    with pytest.raises(ConfigError, match=named):
        enable_group_offload(pipe, onload_device=device, **options)
    for name, model in models_of(pipe).items():
        assert traces(model) == before[name], name


def test_an_unknown_name_among_the_excluded_is_only_said(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """diffusers lets it pass, and code that was written for it has to run."""
    handles = enable_group_offload(tiny.flux_pipeline(), onload_device=device, exclude_modules=["vae", "vea"])
    assert "vae" not in handles
    assert "'vea'" in caplog.text


def test_something_else_than_a_pipeline(device: torch.device) -> None:
    with pytest.raises(ConfigError, match="apply_group_offloading"):
        enable_group_offload(nn.Linear(2, 2), onload_device=device)


def test_model_options(device: torch.device, tmp_path: Path, resident_outputs: dict[str, torch.Tensor]) -> None:
    pipe = tiny.flux_pipeline()
    handles = enable_group_offload(
        pipe,
        onload_device=device,
        num_blocks_per_group=2,
        model_options={
            "vae": {"offload_type": "leaf_level", "num_blocks_per_group": None},
            "transformer": {"offload_to_disk_path": tmp_path, "num_blocks_per_group": 1},
        },
    )
    assert handles["vae"].config.offload_type.value == "leaf_level"
    assert handles["transformer"].stats().file_bytes > 0
    assert handles["transformer"].config.num_blocks_per_group == 1
    assert handles["text_encoder_2"].config.num_blocks_per_group == 2
    assert handles["text_encoder_2"].stats().file_bytes == 0
    assert torch.equal(tiny.run(pipe), resident_outputs["flux"])


def test_model_options_take_block_modules(device: torch.device, resident_outputs: dict[str, torch.Tensor]) -> None:
    pipe = tiny.sd_pipeline()
    names = ["down_blocks", "mid_block", "up_blocks"]
    handles = enable_group_offload(pipe, onload_device=device, model_options={"unet": {"block_modules": names}})
    assert handles["unet"].config.block_modules == tuple(names)
    assert torch.equal(tiny.run(pipe), resident_outputs["sd"])


def test_a_leaf_level_model_beside_groups_of_two_blocks(device: torch.device) -> None:
    """A common option that has no meaning for one model is not that model's contradiction."""
    pipe = tiny.flux_pipeline()
    handles = enable_group_offload(
        pipe, onload_device=device, num_blocks_per_group=2, model_options={"vae": {"offload_type": "leaf_level"}}
    )
    assert handles["vae"].config.offload_type.value == "leaf_level"


def test_one_model_under_two_names(device: torch.device, tmp_path: Path) -> None:
    def make() -> Any:
        pipe = tiny.wan_pipeline()
        pipe.register_modules(transformer_2=pipe.transformer)
        return pipe

    expected = tiny.run(make().to(device))
    pipe = make()
    handles = enable_group_offload(pipe, onload_device=device, offload_to_disk_path=tmp_path)
    assert handles["transformer"] is handles["transformer_2"]
    assert torch.equal(tiny.run(pipe), expected)
    disable_group_offload(pipe)
    assert torch.equal(tiny.run(pipe.to(device)), expected)


@any_level
@pytest.mark.parametrize("through", ["function", "pipeline", "models"])
def test_components_of_one_class_share_a_folder(
    level: str,
    through: str,
    device: torch.device,
    tmp_path: Path,
    patched: None,
    resident_outputs: dict[str, torch.Tensor],
) -> None:
    pipe = tiny.wan_pipeline()
    options = {"onload_device": device, "offload_type": level, "offload_to_disk_path": tmp_path}
    if through == "function":
        handles = enable_group_offload(pipe, **options)
    elif through == "pipeline":
        handles = pipe.enable_group_offload(**options)
    else:
        handles = {name: apply_group_offloading(model, **options) for name, model in models_of(pipe).items()}
    assert torch.equal(tiny.run(pipe), resident_outputs["wan"])
    files = [group.where for handle in handles.values() for group in handle.groups]
    # Where names do not tell the components apart, groups of one name whose bytes are the same may share a file.
    assert len(set(files)) == len(files) or through == "models"
    assert {file.name for file in tmp_path.glob("*.safetensors")} == set(files)
    for name in ("transformer", "transformer_2"):
        expected = weights_of(getattr(tiny.wan_pipeline(), name))
        found = {}
        for group in handles[name].groups:
            with safe_open(tmp_path / group.where, "pt") as file:
                found.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118
        for fqn, tensor in expected.items():
            assert torch.equal(found[fqn], tensor), fqn


def test_a_failure_leaves_the_pipeline_untouched(device: torch.device) -> None:
    pipe = tiny.flux_pipeline()
    pipe.transformer.proj_out.to("meta")
    before = {name: traces(model) for name, model in models_of(pipe).items()}
    with pytest.raises(ModuleError, match="proj_out"):
        enable_group_offload(pipe, onload_device=device)
    for name, model in models_of(pipe).items():
        assert traces(model) == before[name], name


def test_a_step_that_fails(device: torch.device, resident_outputs: dict[str, torch.Tensor]) -> None:
    pipe = tiny.flux_pipeline()
    weights = weights_of(pipe.transformer)
    enable_group_offload(pipe, onload_device=device)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = pipe.transformer.single_transformer_blocks[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        tiny.run(pipe)
    hook.remove()
    assert {tensor.device.type for tensor in pipe.transformer.parameters()} == {"cpu"}
    assert_same_weights(pipe.transformer, weights)
    assert torch.equal(tiny.run(pipe), resident_outputs["flux"])


# ------------------------------------------------------------------------------------------------ patched calls


@any_pipeline
def test_patched_pipeline_without_arguments(
    kind: str, patched: None, resident_outputs: dict[str, torch.Tensor]
) -> None:
    pipe = PIPELINES[kind]()
    handles = pipe.enable_group_offload()
    assert all(isinstance(handle, OffloadHandle) for handle in handles.values())
    assert torch.equal(tiny.run(pipe), resident_outputs[kind])
    assert all(handle.stats().onloads for handle in handles.values())
    pipe.disable_group_offload()
    assert not any(handle.is_active for handle in handles.values())
    assert torch.equal(tiny.run(pipe.to(tiny.device())), resident_outputs[kind])


@any_level
@any_tier
def test_patched_pipeline_with_diffusers_arguments(
    level: str,
    tier: str,
    device: torch.device,
    tmp_path: Path,
    patched: None,
    resident_outputs: dict[str, torch.Tensor],
) -> None:
    pipe = tiny.flux_pipeline()
    pipe.enable_group_offload(
        device,
        torch.device("cpu"),
        level,
        1 if level == "block_level" else None,
        False,
        False,
        False,
        False,
        str(tmp_path) if tier == "disk" else None,
        "vae",
    )
    assert not stock._is_group_offload_enabled(pipe.vae)
    for _ in range(2):
        assert torch.equal(tiny.run(pipe), resident_outputs["flux"])
    assert any(tmp_path.iterdir()) == (tier == "disk")


@any_model
def test_patched_model_without_arguments(
    name: str, patched: None, device: torch.device, resident_calls: dict[str, torch.Tensor]
) -> None:
    make, inputs = tiny.MODELS[name]
    model = make()
    handle = imported_before_patching(model) if name in ("clip", "t5") else model.enable_group_offload()
    assert isinstance(handle, OffloadHandle)
    assert handle.config.onload_device == device
    assert torch.equal(tiny.call(model, inputs()), resident_calls[name])
    assert handle.stats().onloads > 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"onload_device": "cpu"},
        {"onload_device": torch.device("cpu"), "offload_type": "leaf_level"},
        {
            "onload_device": torch.device("cpu"),
            "offload_device": torch.device("cpu"),
            "offload_type": stock.GroupOffloadingType.BLOCK_LEVEL,
            "num_blocks_per_group": 2,
            "block_modules": ["transformer_blocks"],
            "exclude_kwargs": ["joint_attention_kwargs"],
        },
    ],
    ids=["none", "device", "leaf", "all"],
)
def test_a_name_imported_before_patching(options: dict[str, Any], patched: None) -> None:
    on_cpu = options and tiny.device().type != "cpu"
    if on_cpu:
        pytest.skip("the inputs are on the accelerator")
    model = tiny.flux_transformer()
    expected = tiny.call(tiny.flux_transformer().to(tiny.device()), tiny.flux_inputs())
    handle = imported_before_patching(model, **options)
    assert isinstance(handle, OffloadHandle)
    assert diffusers.hooks.apply_group_offloading is imported_before_patching
    assert torch.equal(tiny.call(model, tiny.flux_inputs()), expected)
    assert handle.stats().onloads > 0


def test_patched_signatures_accept_no_arguments(patched: None) -> None:
    for call in (
        imported_before_patching,
        ModelMixin.enable_group_offload,
        diffusers.DiffusionPipeline.enable_group_offload,
    ):
        first = [p for name, p in inspect.signature(call).parameters.items() if name == "onload_device"]
        assert first[0].default is None


def state_of_diffusers() -> dict[str, Any]:
    apply = imported_before_patching
    names = ("enable_group_offload", "disable_group_offload")
    return {
        "code": apply.__code__,
        "defaults": apply.__defaults__,
        "kwdefaults": apply.__kwdefaults__,
        "annotations": dict(apply.__annotations__),
        "doc": apply.__doc__,
        "name": (apply.__name__, apply.__qualname__, apply.__module__),
        "signature": inspect.signature(apply),
        "model": {name: ModelMixin.__dict__.get(name) for name in names},
        "pipeline": {name: diffusers.DiffusionPipeline.__dict__.get(name) for name in names},
        "has": [hasattr(owner, name) for owner in (ModelMixin, diffusers.DiffusionPipeline) for name in names],
    }


def test_unpatch_restores_diffusers(device: torch.device) -> None:
    before = state_of_diffusers()
    patch_diffusers()
    patch_diffusers()
    assert state_of_diffusers() != before
    unpatch_diffusers()
    assert state_of_diffusers() == before
    unpatch_diffusers()
    assert state_of_diffusers() == before

    with pytest.raises(TypeError):
        imported_before_patching(tiny.flux_transformer())
    with pytest.raises(TypeError):
        tiny.flux_transformer().enable_group_offload()
    with pytest.raises(TypeError):
        tiny.flux_pipeline().enable_group_offload()
    model = tiny.flux_transformer()
    assert model.enable_group_offload(device, num_blocks_per_group=1) is None
    assert isinstance(stock._get_top_level_group_offload_hook(model), stock.GroupOffloadingHook)
    expected = tiny.call(tiny.flux_transformer().to(device), tiny.flux_inputs())
    assert torch.equal(tiny.call(model, tiny.flux_inputs()), expected)
    pipe = tiny.flux_pipeline()
    pipe.enable_group_offload(device, num_blocks_per_group=1)
    assert isinstance(stock._get_top_level_group_offload_hook(pipe.vae), stock.GroupOffloadingHook)


def test_what_is_offloaded_stays_so_after_unpatching(
    device: torch.device, resident_outputs: dict[str, torch.Tensor]
) -> None:
    patch_diffusers()
    try:
        pipe = tiny.flux_pipeline()
        handles = pipe.enable_group_offload(device)
    finally:
        unpatch_diffusers()
    assert torch.equal(tiny.run(pipe), resident_outputs["flux"])
    assert handles["transformer"].stats().onloads > 0
    stock._maybe_remove_and_reapply_group_offloading(pipe.transformer)  # as LoRA loading does
    assert torch.equal(tiny.run(pipe), resident_outputs["flux"])
    assert handles["transformer"].is_active
    disable_group_offload(pipe)
    assert torch.equal(tiny.run(pipe.to(device)), resident_outputs["flux"])


def test_models_that_do_not_support_it(device: torch.device, patched: None) -> None:
    class Whole(FluxTransformer2DModel):
        _supports_group_offloading = False

    model = Whole(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    with pytest.raises(ValueError, match="support group offloading"):
        model.enable_group_offload(device)
    pipe = tiny.flux_pipeline()
    pipe.register_modules(transformer=model)
    with pytest.raises(ModuleError, match="exclude_modules"):
        pipe.enable_group_offload(device)
    assert not any(stock._is_group_offload_enabled(part) for part in models_of(pipe).values())


# ------------------------------------------------------------------------------------------------ parts of a model


@pytest.fixture
def tiled() -> Any:
    def switch(vae: nn.Module) -> None:
        if isinstance(vae, diffusers.AutoencoderKLWan):
            vae.enable_tiling(16, 16, 8, 8)
        else:
            vae.enable_tiling()
            vae.tile_sample_min_size, vae.tile_latent_min_size = 8, 4

    return switch


@pytest.mark.parametrize("name", ["kl", "sd_kl", "wan_kl"])
@any_tier
@any_level
@pytest.mark.parametrize("mode", ["plain", "sliced", "tiled"])
def test_vae_without_its_forward(
    name: str, tier: str, level: str, mode: str, device: torch.device, tmp_path: Path, tiled: Any
) -> None:
    make, inputs = tiny.MODELS[name]
    sample = tiny.randn(1, 3, 5, 32, 24) if name == "wan_kl" else inputs()["sample"]
    reference, model = make().to(device), make()
    for vae in (reference, model):
        if mode == "sliced":
            vae.enable_slicing()
        if mode == "tiled":
            tiled(vae)
    handle = apply_group_offloading(model, device, offload_type=level, **tier_options(tier, tmp_path))
    with torch.no_grad():
        for _ in range(2):
            expected = reference.encode(sample).latent_dist.mean
            found = model.encode(sample).latent_dist.mean
            assert torch.equal(found, expected)
            assert torch.equal(model.decode(found).sample, reference.decode(expected).sample)
    assert handle.stats().onloads > 0
    assert {tensor.device.type for tensor in model.parameters()} == {"cpu"}


@pytest.mark.parametrize("name", ["kl", "sd_kl", "wan_kl"])
def test_decoding_alone_does_not_onload_the_encoder(name: str, device: torch.device) -> None:
    make, inputs = tiny.MODELS[name]
    reference, model = make().to(device), make()
    with torch.no_grad():
        latents = reference.encode(inputs()["sample"]).latent_dist.mean
        expected = reference.decode(latents).sample
        handle = apply_group_offloading(model, device)
        assert torch.equal(model.decode(latents).sample, expected)
    decoder = sum(t.numel() * t.element_size() for t in model.decoder.parameters())
    total = sum(t.numel() * t.element_size() for t in model.parameters())
    onloaded = sum(handle.stats().bytes_onloaded.values())
    assert 0 < onloaded < total * 2
    assert handle.stats().peak_device_bytes < total
    assert decoder < total


class PlainKL(diffusers.AutoencoderKL):
    """An autoencoder that does not say where its blocks are."""

    _group_offload_block_modules = None


def tiny_taesd() -> AutoencoderTiny:
    return tiny.seeded(
        0,
        lambda: AutoencoderTiny(
            in_channels=3,
            out_channels=3,
            encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            num_encoder_blocks=(1, 1),
            num_decoder_blocks=(1, 1),
            latent_channels=4,
        ),
    )


def plain_kl() -> PlainKL:
    model = tiny.sd_kl()
    model.__class__ = PlainKL
    return model


@pytest.mark.parametrize("make", [plain_kl, tiny_taesd])
@any_tier
@any_level
def test_vae_that_names_no_blocks(make: Any, tier: str, level: str, device: torch.device, tmp_path: Path) -> None:
    reference, model = make().to(device), make()
    sample = tiny.randn(1, 3, 16, 16)
    apply_group_offloading(model, device, offload_type=level, **tier_options(tier, tmp_path))
    with torch.no_grad():
        for _ in range(2):
            latents = [vae.encode(sample, return_dict=False)[0] for vae in (reference, model)]
            latents = [found if isinstance(found, torch.Tensor) else found.mode() for found in latents]
            assert torch.equal(*latents)
            images = [vae.decode(latents[0], return_dict=False)[0] for vae in (reference, model)]
            assert torch.equal(*images)


def test_vae_tiling_through_the_pipeline(device: torch.device, tmp_path: Path, tiled: Any) -> None:
    reference, pipe = tiny.sd_pipeline().to(device), tiny.sd_pipeline()
    tiled(reference.vae)
    expected = tiny.run(reference)
    enable_group_offload(pipe, onload_device=device, offload_to_disk_path=tmp_path)
    tiled(pipe.vae)
    assert torch.equal(tiny.run(pipe), expected)


# ------------------------------------------------------------------------------------------------ text encoders


@pytest.mark.parametrize("name", ["clip", "t5"])
@any_tier
def test_text_encoders_are_cut_into_blocks(
    name: str, tier: str, device: torch.device, tmp_path: Path, resident_calls: dict[str, torch.Tensor]
) -> None:
    make, inputs = tiny.MODELS[name]
    model = make()
    handle = apply_group_offloading(model, device, **tier_options(tier, tmp_path))
    for _ in range(2):
        assert torch.equal(tiny.call(model, inputs()), resident_calls[name])
    blocks = [group for group in handle.groups if group.num_bytes]
    total = sum(group.num_bytes for group in blocks)
    assert len(blocks) > 3
    assert handle.stats().peak_device_bytes < total * 0.75


@pytest.mark.parametrize("name", ["clip", "t5"])
def test_a_large_text_encoder_takes_a_fraction_of_its_size(name: str, device: torch.device) -> None:
    model = tiny.t5(num_layers=16) if name == "t5" else tiny.clip(num_hidden_layers=16)
    handle = apply_group_offloading(model, device)
    tiny.call(model, tiny.tokens())
    total = sum(group.num_bytes for group in handle.groups)
    assert handle.stats().peak_device_bytes < total / 4


# ------------------------------------------------------------------------------------------------ devices and guards


@any_level
@any_tier
def test_devices_that_diffusers_sees(level: str, tier: str, device: torch.device, tmp_path: Path) -> None:
    pipe = tiny.flux_pipeline()
    enable_group_offload(pipe, onload_device=device, offload_type=level, **tier_options(tier, tmp_path))
    assert pipe._execution_device == device
    assert pipe.transformer.device == device
    assert pipe.vae.device == device
    assert pipe.transformer.dtype == torch.float32
    assert {t.device.type for t in pipe.transformer.parameters()} == {"cpu"}
    for model in models_of(pipe).values():
        assert stock._is_group_offload_enabled(model)
        assert stock._get_group_onload_device(model) == device
    disable_group_offload(pipe)
    assert pipe.device.type == "cpu"
    assert pipe._execution_device.type == "cpu"


@any_tier
def test_every_registry_has_the_hook(tier: str, device: torch.device, tmp_path: Path) -> None:
    pipe = tiny.flux_pipeline()
    enable_group_offload(pipe, onload_device=device, **tier_options(tier, tmp_path))
    for model in models_of(pipe).values():
        registries = [part._diffusers_hook for part in model.modules() if hasattr(part, "_diffusers_hook")]
        assert registries
        assert all(registry.get_hook("group_offloading") is not None for registry in registries)


@any_tier
def test_moving_an_offloaded_pipeline(
    tier: str,
    device: torch.device,
    tmp_path: Path,
    resident_outputs: dict[str, torch.Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    pipe = tiny.flux_pipeline()
    weights = weights_of(pipe.transformer)
    enable_group_offload(pipe, onload_device=device, **tier_options(tier, tmp_path))
    logger = logging.getLogger("diffusers")
    logger.addHandler(caplog.handler)
    try:
        assert pipe.to("cpu") is pipe
        assert pipe.to(device) is pipe
        assert pipe.transformer.to(device) is pipe.transformer
    finally:
        logger.removeHandler(caplog.handler)
    assert "group offloaded" in caplog.text
    assert_same_weights(pipe.transformer, weights)
    assert {t.device.type for t in pipe.transformer.parameters()} == {"cpu"}
    assert torch.equal(tiny.run(pipe), resident_outputs["flux"])


def test_dtype_of_an_offloaded_pipeline(device: torch.device, resident_outputs: dict[str, torch.Tensor]) -> None:
    """diffusers leaves the dtype of offloaded models alone when it is asked through the pipeline."""
    pipe = tiny.flux_pipeline()
    enable_group_offload(pipe, onload_device=device)
    pipe.to(torch.bfloat16)
    assert pipe.transformer.dtype == torch.float32
    assert torch.equal(tiny.run(pipe), resident_outputs["flux"])


@any_tier
@pytest.mark.parametrize("call", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_other_offload_modes_are_refused(call: str, tier: str, device: torch.device, tmp_path: Path) -> None:
    pipe = tiny.flux_pipeline()
    enable_group_offload(pipe, onload_device=device, **tier_options(tier, tmp_path))
    with pytest.raises(ValueError, match="group offloading"):
        getattr(pipe, call)(device="cuda")
    pipe = tiny.flux_pipeline()
    apply_group_offloading(pipe.vae, device, **tier_options(tier, tmp_path))
    with pytest.raises(ValueError, match="group offloading"):
        getattr(pipe, call)(device="cuda")
    remove_group_offloading(pipe.vae)
    assert not pipe._maybe_raise_error_if_group_offload_active(raise_error=True)


@pytest.mark.parametrize("how", ["model", "sequential", "block", "chained"])
@pytest.mark.parametrize("through", ["function", "model", "pipeline"])
def test_modules_offloaded_by_accelerate_are_refused(
    how: str, through: str, device: torch.device, patched: None
) -> None:
    pipe = tiny.flux_pipeline()
    model = pipe.transformer
    if how == "model":
        accelerate.cpu_offload_with_hook(model, execution_device=torch.device("cpu"))
    elif how == "sequential":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    elif how == "block":
        accelerate.cpu_offload(model.transformer_blocks[0], execution_device=torch.device("cpu"))
    else:
        accelerate.hooks.add_hook_to_module(model, accelerate.hooks.ModelHook())
        accelerate.hooks.add_hook_to_module(model, accelerate.hooks.CpuOffload(torch.device("cpu")), append=True)
    before = {name: traces(part) for name, part in models_of(pipe).items()}
    with pytest.raises(ValueError, match="Cannot apply group offloading"):
        {
            "function": lambda: apply_group_offloading(model, device),
            "model": lambda: model.enable_group_offload(device),
            "pipeline": lambda: pipe.enable_group_offload(device),
        }[through]()
    for name, part in models_of(pipe).items():
        assert traces(part) == before[name], name


def test_a_tracing_hook_of_accelerate_is_no_offloading(device: torch.device) -> None:
    model = tiny.flux_transformer()
    accelerate.hooks.add_hook_to_module(model.proj_out, accelerate.hooks.ModelHook())
    expected = tiny.call(tiny.flux_transformer().to(device), tiny.flux_inputs())
    apply_group_offloading(model, device)
    assert torch.equal(tiny.call(model, tiny.flux_inputs()), expected)


@pytest.mark.parametrize("first", ["function", "model", "pipeline"])
@pytest.mark.parametrize("second", ["function", "model", "pipeline", "block"])
def test_applying_twice_is_refused(first: str, second: str, device: torch.device, patched: None) -> None:
    pipe = tiny.flux_pipeline()
    model = pipe.transformer
    ways = {
        "function": lambda: apply_group_offloading(model, device),
        "model": lambda: model.enable_group_offload(device),
        "pipeline": lambda: pipe.enable_group_offload(device),
        "block": lambda: apply_group_offloading(model.transformer_blocks[0], device),
    }
    ways[first]()
    expected = tiny.run(pipe)
    offloaded = {name for name, part in models_of(pipe).items() if stock._is_group_offload_enabled(part)}
    with pytest.raises(StateError, match="already"):
        ways[second]()
    assert {name for name, part in models_of(pipe).items() if stock._is_group_offload_enabled(part)} == offloaded
    assert torch.equal(tiny.run(pipe), expected)


@pytest.mark.parametrize("part", ["whole", "block"])
def test_modules_on_the_stock_engine_are_refused(part: str, device: torch.device) -> None:
    model = tiny.flux_transformer()
    target = model if part == "whole" else model.transformer_blocks
    imported_before_patching(target, device, num_blocks_per_group=1)
    with pytest.raises(StateError, match="own group offloading"):
        apply_group_offloading(model, device)
    expected = tiny.call(tiny.flux_transformer().to(device), tiny.flux_inputs())
    if part == "whole":
        assert torch.equal(tiny.call(model, tiny.flux_inputs()), expected)


def test_stock_call_on_an_offloaded_module_is_refused(device: torch.device) -> None:
    model = tiny.flux_transformer()
    apply_group_offloading(model, device)
    for target in (model, nn.Sequential(model), model.transformer_blocks[0]):  # else its weights at rest would be lost
        with pytest.raises(StateError, match="already"):
            imported_before_patching(target, device, num_blocks_per_group=1)


# ------------------------------------------------------------------------------------------------ truth at rest


@any_tier
@any_level
@any_model
def test_save_pretrained_of_an_offloaded_model(
    name: str, tier: str, level: str, device: torch.device, tmp_path: Path
) -> None:
    make, inputs = tiny.MODELS[name]
    model = make()
    weights = make().state_dict()
    apply_group_offloading(model, device, offload_type=level, **tier_options(tier, tmp_path / "groups"))
    tiny.call(model, inputs())
    model.save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved").state_dict()
    assert again.keys() == weights.keys()
    for key, value in again.items():
        assert torch.equal(value, weights[key]), key


@any_tier
def test_save_pretrained_of_an_offloaded_pipeline(
    tier: str, device: torch.device, tmp_path: Path, resident_outputs: dict[str, torch.Tensor]
) -> None:
    pipe = tiny.flux_pipeline()
    weights = {name: weights_of(model) for name, model in models_of(pipe).items()}
    enable_group_offload(pipe, onload_device=device, **tier_options(tier, tmp_path / "groups"))
    tiny.run(pipe)
    pipe.save_pretrained(tmp_path / "saved")
    again = FluxPipeline.from_pretrained(tmp_path / "saved")
    again.set_progress_bar_config(disable=True)
    for name, model in models_of(again).items():
        assert_same_weights(model, weights[name])


@pytest.fixture(scope="module")
def saved_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    tiny.flux_pipeline().save_pretrained(folder)
    return folder


def aligned(model: nn.Module) -> nn.Module:
    """The model, with weights in memory of their own: kernels may round differently for others."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model


@any_tier
@any_level
def test_weights_that_are_views_of_a_checkpoint(
    tier: str, level: str, device: torch.device, tmp_path: Path, saved_pipeline: Path
) -> None:
    def load() -> Any:
        pipe = FluxPipeline.from_pretrained(saved_pipeline)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    reference = load()
    for model in models_of(reference).values():
        aligned(model)
    expected = tiny.run(reference.to(device))
    pipe = load()
    enable_group_offload(pipe, onload_device=device, offload_type=level, **tier_options(tier, tmp_path))
    for _ in range(2):
        assert torch.equal(tiny.run(pipe), expected)
    for name, model in models_of(load()).items():
        assert_same_weights(getattr(pipe, name), weights_of(model))
    disable_group_offload(pipe)
    for name, model in models_of(load()).items():
        assert_same_weights(getattr(pipe, name), weights_of(model))
    assert torch.equal(tiny.run(pipe.to(device)), expected)


def test_a_checkpoint_is_never_written_to(device: torch.device, tmp_path: Path, saved_pipeline: Path) -> None:
    before = {file: file.read_bytes() for file in saved_pipeline.rglob("*.safetensors")}
    pipe = FluxPipeline.from_pretrained(saved_pipeline)
    pipe.set_progress_bar_config(disable=True)
    enable_group_offload(pipe, onload_device=device, offload_to_disk_path=tmp_path)
    with torch.no_grad():
        for parameter in pipe.transformer.parameters():
            parameter.mul_(2)
    tiny.run(pipe)
    assert {file: file.read_bytes() for file in saved_pipeline.rglob("*.safetensors")} == before


@any_tier
@any_level
def test_edits_reach_the_next_run(tier: str, level: str, device: torch.device, tmp_path: Path) -> None:
    def edit(pipe: Any) -> None:
        with torch.no_grad():
            pipe.transformer.transformer_blocks[1].attn.to_q.weight.mul_(1.5)
        pipe.transformer.proj_out.bias.data.add_(0.25)
        pipe.vae.decoder.conv_in.weight = nn.Parameter(pipe.vae.decoder.conv_in.weight.detach() * 0.5)
        state = {key: value.clone() + 0.125 for key, value in pipe.text_encoder.state_dict().items()}
        pipe.text_encoder.load_state_dict(state)

    reference, pipe = tiny.flux_pipeline().to(device), tiny.flux_pipeline()
    enable_group_offload(pipe, onload_device=device, offload_type=level, **tier_options(tier, tmp_path))
    tiny.run(pipe)
    edit(reference)
    edit(pipe)
    expected = tiny.run(reference)
    for _ in range(2):
        assert torch.equal(tiny.run(pipe), expected)
    for name, model in models_of(reference).items():
        assert_same_weights(getattr(pipe, name), weights_of(model))


@any_tier
@any_level
def test_deepcopy_is_a_resident_model(tier: str, level: str, device: torch.device, tmp_path: Path) -> None:
    model = tiny.flux_transformer()
    expected = tiny.call(tiny.flux_transformer().to(device), tiny.flux_inputs())
    apply_group_offloading(model, device, offload_type=level, **tier_options(tier, tmp_path))
    tiny.call(model, tiny.flux_inputs())
    copied = copy.deepcopy(model)
    assert not stock._is_group_offload_enabled(copied)
    assert torch.equal(tiny.call(aligned(copied).to(device), tiny.flux_inputs()), expected)
    with torch.no_grad():
        copied.proj_out.weight.zero_()
    assert torch.equal(tiny.call(model, tiny.flux_inputs()), expected)
    apply_group_offloading(copied, device)
    remove_group_offloading(copied)


@any_tier
def test_a_pickle_is_a_resident_model(tier: str, device: torch.device, tmp_path: Path) -> None:
    model = tiny.flux_transformer()
    expected = tiny.call(tiny.flux_transformer().to(device), tiny.flux_inputs())
    apply_group_offloading(model, device, **tier_options(tier, tmp_path))
    read = pickle.loads(pickle.dumps(model))
    assert not stock._is_group_offload_enabled(read)
    assert torch.equal(tiny.call(aligned(read).to(device), tiny.flux_inputs()), expected)
    remove_group_offloading(model)


# ------------------------------------------------------------------------------------------------ several pipelines


def test_from_pipe_shares_offloaded_models(device: torch.device, tmp_path: Path) -> None:
    image = tiny.randn(1, 3, 16, 16).cpu().clamp(0, 1)

    def run(pipe: Any) -> torch.Tensor:
        return tiny.run(pipe, image=image, strength=0.9, num_inference_steps=3)

    reference = diffusers.FluxImg2ImgPipeline.from_pipe(tiny.flux_pipeline().to(device))
    reference.set_progress_bar_config(disable=True)
    expected = run(reference)
    pipe = tiny.flux_pipeline()
    enable_group_offload(pipe, onload_device=device, offload_to_disk_path=tmp_path)
    other = diffusers.FluxImg2ImgPipeline.from_pipe(pipe)
    other.set_progress_bar_config(disable=True)
    assert torch.equal(run(other), expected)
    assert torch.equal(tiny.run(pipe), tiny.run(tiny.flux_pipeline().to(device)))


def test_a_dropped_pipeline_takes_its_memory_along(device: torch.device) -> None:
    import gc
    import weakref

    pipe = tiny.flux_pipeline()
    enable_group_offload(pipe, onload_device=device)
    tiny.run(pipe)
    models = [weakref.ref(model) for model in models_of(pipe).values()]
    del pipe
    gc.collect()
    assert not any(model() is not None for model in models)


# ------------------------------------------------------------------------------------------------ weights that others read


@any_tier
def test_statistics_that_a_pipeline_reads(tier: str, device: torch.device, tmp_path: Path) -> None:
    """As Flux.2's pipeline does with its VAE: `vae.bn.running_mean`, which no call of a module brings along."""

    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            self.bn = nn.BatchNorm1d(8, affine=False)
            self.prior = nn.Parameter(torch.randn(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.decoder(x)

        def decode(self, x: torch.Tensor) -> torch.Tensor:
            shift = self.bn.running_mean.to(x.device) + self.prior.to(x.device)  # a parameter used outside of forward
            return self.decoder(x + shift)

    torch.manual_seed(0)
    model = Vae().eval()
    model.bn.running_mean.normal_()
    reference = copy.deepcopy(model).to(device)
    x = tiny.randn(4, 8)
    apply_group_offloading(model, device, **tier_options(tier, tmp_path))
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model.decode(x), reference.decode(x))
            assert torch.equal(model(x), reference(x))
            assert torch.equal(model.bn.running_mean, reference.bn.running_mean.cpu())


@any_tier
@any_level
def test_control_branch(tier: str, level: str, device: torch.device, tmp_path: Path) -> None:
    """Two models in turns in each step, one of them with and without what the other one gives."""
    inputs = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in tiny.unet_inputs().items()
    }
    condition = tiny.randn(inputs["sample"].shape[0], 3, 8 * inputs["sample"].shape[2], 8 * inputs["sample"].shape[3])

    def step(unet: Any, control: Any) -> torch.Tensor:
        with torch.no_grad():
            down, mid = control(**inputs, controlnet_cond=condition)
            guided = unet(**inputs, down_block_additional_residuals=down, mid_block_additional_residual=mid)
            return guided[0] - unet(**inputs)[0]

    def make() -> tuple[Any, Any]:
        unet = tiny.unet()
        return unet, tiny.seeded(
            1, lambda: diffusers.ControlNetModel.from_unet(unet, load_weights_from_unet=False)
        ).eval()

    resident = [model.to(device) for model in make()]
    offloaded = make()
    for name, model in zip(("unet", "control"), offloaded, strict=True):
        apply_group_offloading(model, device, offload_type=level, **tier_options(tier, tmp_path / name))
    for _ in range(3):
        assert torch.equal(step(*offloaded), step(*resident))


# ------------------------------------------------------------------------------------------------ compiled


@functools.cache
def compiled_resident(device: torch.device) -> tuple[torch.Tensor, int]:
    """What it gives, and how many graphs it takes."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    model = tiny.flux_transformer().to(device)
    model.compile_repeated_blocks(fullgraph=True, backend=counter)
    return [tiny.call(model, tiny.flux_inputs()) for _ in range(3)][-1], counter.frame_count


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # importing torch's compiler
@any_tier
@any_level
@pytest.mark.parametrize("is_first", [True, False], ids=["compiled first", "offloaded first"])
def test_compile_repeated_blocks(tier: str, level: str, is_first: bool, device: torch.device, tmp_path: Path) -> None:
    """diffusers' regional compilation, in whole graphs: as many of them as for a resident model, however many blocks."""
    expected, num_graphs = compiled_resident(device)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    model = tiny.flux_transformer()
    if is_first:
        model.compile_repeated_blocks(fullgraph=True, backend=counter)
    handle = apply_group_offloading(model, device, offload_type=level, **tier_options(tier, tmp_path))
    if not is_first:
        model.compile_repeated_blocks(fullgraph=True, backend=counter)
    for _ in range(3):
        before = handle.stats().onloads
        assert torch.equal(tiny.call(model, tiny.flux_inputs()), expected)
        assert handle.stats().onloads >= before + len(model.transformer_blocks) + len(model.single_transformer_blocks)
    assert counter.frame_count == num_graphs
    torch._dynamo.reset()
