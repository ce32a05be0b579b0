"""Whole diffusers pipelines, and diffusers' own calls on this engine: the same bits as the resident pipeline."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import diffusers.hooks.group_offloading as stock
import pytest
import torch
from safetensors import safe_open
from torch import nn

from group_offload import (
    ConfigError,
    ModuleError,
    StateError,
    apply_group_offloading,
    disable_group_offload,
    enable_group_offload,
    handle_of,
)

from ..support import tiny_models as tiny
from ..support.pipelines import (
    PIPELINES,
    any_level,
    any_pipeline,
    any_tier,
    assert_same_weights,
    models_of,
    tier_options,
    traces,
    weights_of,
)

# ---------------------------------------------------------------- the function


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
        assert handle.stats().passes > 0, name
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


def test_disable_finds_a_model_that_was_put_into_another_one() -> None:
    """As a ControlNet is put into a `MultiControlNetModel`."""
    pipe: Any = SimpleNamespace(components={"controlnet": nn.Linear(2, 2)})
    enable_group_offload(pipe, onload_device="cpu")
    first = pipe.components["controlnet"]
    pipe.components["controlnet"] = nn.ModuleList([first, nn.Linear(2, 2)])
    disable_group_offload(pipe)
    assert handle_of(first) is None
    enable_group_offload(pipe, onload_device="cpu")["controlnet"].remove()


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
        ({"model_options": {"transfomer": {}}}, "Did you mean 'transformer'"),
        ({"model_options": {"vae": {1: 2}}}, "no such option: 1"),
        *(({"model_options": given}, "model_options=.*expected options") for given in (["vae"], "vae", {"vae": None})),
        *(
            ({"exclude_modules": given}, "exclude_modules=.*expected names")
            for given in (3, True, [3], nn.Linear(2, 2))
        ),
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
    handles = enable_group_offload(tiny.flux_pipeline(), onload_device=device, exclude_modules=["vae", "transfomer"])
    assert "vae" not in handles
    assert "'transfomer'" in caplog.text and "Did you mean 'transformer'" in caplog.text


def test_names_of_an_iterator_are_excluded(device: torch.device) -> None:
    handles = enable_group_offload(
        tiny.flux_pipeline(), onload_device=device, exclude_modules=iter(["vae", "transformer"])
    )
    assert handles.keys() == {"text_encoder", "text_encoder_2"}


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


@pytest.mark.parametrize(("excluded", "other"), [("transformer", "transformer_2"), ("transformer_2", "transformer")])
def test_an_excluded_name_of_a_model_with_two_names(excluded: str, other: str, device: torch.device) -> None:
    pipe = tiny.wan_pipeline()
    pipe.register_modules(transformer_2=pipe.transformer)
    handles = enable_group_offload(pipe, onload_device=device, exclude_modules=excluded)
    assert handles.keys().isdisjoint({excluded, other}) and handle_of(pipe.transformer) is None
    assert next(pipe.transformer.parameters()).device == device
    with pytest.raises(
        ConfigError, match=r"^\['transformer', 'transformer_2'\] are in exclude_modules and in model_opt"
    ):
        enable_group_offload(pipe, exclude_modules=excluded, model_options={other: {"offload_type": "leaf_level"}})
    assert handle_of(pipe.transformer) is None
    assert enable_group_offload(pipe, exclude_modules=None).keys() >= {excluded, other}
    with pytest.raises(StateError, match=rf"^{excluded} .* leave it out of exclude_modules"):
        enable_group_offload(pipe, exclude_modules=excluded)


def test_options_of_a_model_with_two_names(device: torch.device) -> None:
    """Either name gives them. What the two say of one option has to be the same."""
    pipe = tiny.wan_pipeline()
    pipe.register_modules(transformer_2=pipe.transformer)
    leaves, verified = {"offload_type": "leaf_level"}, {"verify_files": True}
    for first, second in ((leaves, verified), ({}, leaves | verified)):
        handles = enable_group_offload(
            pipe, onload_device=device, model_options={"transformer": first, "transformer_2": second}
        )
        config = handles["transformer"].config
        assert handles["transformer_2"].config is config
        assert config.offload_type == "leaf_level" and config.verify_files
        disable_group_offload(pipe)
    with pytest.raises(ConfigError, match=r"transformer and transformer_2 are names of one model.*verify_files=False"):
        enable_group_offload(
            pipe,
            onload_device=device,
            model_options={"transformer": verified, "transformer_2": {"verify_files": False}},
        )
    assert handle_of(pipe.transformer) is None


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


# ---------------------------------------------------------------- several pipelines


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
