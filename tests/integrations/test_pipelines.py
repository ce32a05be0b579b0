"""Whole diffusers pipelines, and diffusers' own calls on this engine: the same bits as the resident pipeline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import diffusers.hooks.group_offloading as stock
import pytest
import torch
from torch import nn

from group_offload import ConfigError, apply_group_offloading, disable_group_offload, enable_group_offload

from ..support import tiny_models as tiny
from ..support.asserts import snapshot
from ..support.folders import facts
from ..support.pipelines import PIPELINES, any_case, any_tier, assert_same_weights, models_of, tier_options, weights_of

# ---------------------------------------------------------------- the function


@pytest.mark.parametrize("kind", PIPELINES)
@any_case
def test_pipeline_is_bit_equal(
    kind: str, tier: str, level: str, device: torch.device, tmp_path: Path, resident_outputs: dict[str, torch.Tensor]
) -> None:
    """Hazard: files, leaf level and streams together give NaN (diffusers #14657); `transformer_2` of Wan runs with the files
    of `transformer`, because their names are equal."""
    pipe = PIPELINES[kind]()
    handles = enable_group_offload(pipe, onload_device=device, offload_type=level, **tier_options(tier, tmp_path))
    assert handles.keys() == models_of(pipe).keys()
    for _ in range(3):
        assert torch.equal(tiny.run(pipe), resident_outputs[kind])
    for name, handle in handles.items():
        assert handle.module is getattr(pipe, name)
        assert handle.stats().forward_passes > 0, name
        assert (handle.stats().file_bytes > 0) == (tier == "disk"), name


@any_tier
def test_disable_gives_everything_back(
    tier: str, device: torch.device, tmp_path: Path, resident_outputs: dict[str, torch.Tensor]
) -> None:
    """Files stay, and are used again. Hazard: there's no way to switch offloading off."""
    pipe = tiny.flux_pipeline()
    weights = {name: weights_of(model) for name, model in models_of(pipe).items()}
    before = {name: snapshot(model) for name, model in models_of(pipe).items()}
    handles = enable_group_offload(pipe, onload_device=device, **tier_options(tier, tmp_path))
    tiny.run(pipe)
    written = facts(tmp_path)
    disable_group_offload(pipe)
    for name, model in models_of(pipe).items():
        assert not handles[name].is_active
        assert snapshot(model) == before[name], name
        assert_same_weights(model, weights[name])
        assert next(model.parameters()).device.type == "cpu"
        assert not stock._is_group_offload_enabled(model)
    assert torch.equal(tiny.run(pipe.to(device)), resident_outputs["flux"])
    disable_group_offload(pipe)  # and again does nothing
    enable_group_offload(pipe.to("cpu"), onload_device=device, **tier_options(tier, tmp_path))
    assert facts(tmp_path) == written
    assert torch.equal(tiny.run(pipe), resident_outputs["flux"])


@pytest.mark.parametrize("excluded", ["vae", ["vae", "text_encoder"], ("text_encoder_2", "tokenizer", "transfomer")])
def test_excluded_modules_stay_whole(
    excluded: Any, device: torch.device, resident_outputs: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    """A name that the pipeline lacks is only said: diffusers lets it pass, and code that was written for it has to run."""
    pipe = tiny.flux_pipeline()
    given = excluded if isinstance(excluded, str) else iter(excluded)
    handles = enable_group_offload(pipe, onload_device=device, exclude_modules=given)
    assert ("'transfomer'" in caplog.text and "Did you mean 'transformer'" in caplog.text) == ("transfomer" in excluded)
    names = ({excluded} if isinstance(excluded, str) else set(excluded)) & models_of(pipe).keys()
    assert handles.keys() == models_of(pipe).keys() - names
    for name in names:
        assert not stock._is_group_offload_enabled(getattr(pipe, name))
        assert {tensor.device for tensor in getattr(pipe, name).parameters()} == {device}
    assert torch.equal(tiny.run(pipe), resident_outputs["flux"])


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
        ({"exclude_modules": tiny.clip()}, "exclude_modules=CLIPTextModel: expected names"),
        (
            {"model_options": {"transformer": {"ram_budget": 8}}},
            r"^model_options\['transformer'\]: ram_budget=8: .*'8GiB'",
        ),
        ({"model_options": {"vae": {"offload_type": "leaf_level"}}, "offload_device": "x"}, r"^offload_device must be"),
        ({"offload_type": "layer"}, "layer"),
        ({"num_blocks_per_group": 0}, "num_blocks_per_group"),
    ],
)
def test_wrong_names_and_values(options: dict[str, Any], named: str, device: torch.device) -> None:
    """What is said names the option, and the model if it is an option of one, in one line."""
    pipe = tiny.flux_pipeline()
    before = {name: snapshot(model) for name, model in models_of(pipe).items()}
    with pytest.raises(ConfigError, match=named) as caught:
        enable_group_offload(pipe, onload_device=device, **options)
    assert "\n" not in str(caught.value)
    for name, model in models_of(pipe).items():
        assert snapshot(model) == before[name], name


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (nn.Linear(2, 2), "got Linear.*use apply_group_offloading"),
        (tiny.kl(), "got AutoencoderKL. For a single model, use apply_group_offloading"),
        (None, "got None"),
        (diffusers.FluxPipeline, r"got the class FluxPipeline\. Load it first: from_pretrained"),
        ("owner/model", r"got 'owner/model'\. Load it first: from_pretrained"),
    ],
    ids=["layer", "model", "None", "class", "name"],
)
def test_something_else_than_a_pipeline(given: Any, said: str, device: torch.device) -> None:
    for call in (enable_group_offload, disable_group_offload):
        with pytest.raises(ConfigError, match=rf"^Expected a diffusers pipeline, {said}") as caught:
            call(given)
        assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- offloaded weights


@pytest.mark.parametrize(("tier", "level"), [("ram", "leaf_level"), ("disk", "block_level")])
@pytest.mark.parametrize("name", tiny.MODELS)
def test_save_pretrained_of_an_offloaded_model(
    name: str, tier: str, level: str, device: torch.device, tmp_path: Path
) -> None:
    """Hazard: `save_pretrained()` after offloading to files writes uninitialized memory."""
    make, inputs = tiny.MODELS[name]
    model = make()
    apply_group_offloading(model, device, offload_type=level, **tier_options(tier, tmp_path / "groups"))
    tiny.call(model, inputs())
    model.save_pretrained(tmp_path / "saved")
    assert_same_weights(type(model).from_pretrained(tmp_path / "saved"), weights_of(make()))


# ---------------------------------------------------------------- parts of a model


def tiled(vae: Any) -> None:
    if isinstance(vae, diffusers.AutoencoderKLWan):
        vae.enable_tiling(16, 16, 8, 8)
    else:
        vae.enable_tiling()
        vae.tile_sample_min_size, vae.tile_latent_min_size = 8, 4


VAES = {"kl": tiny.kl, "sd_kl": tiny.sd_kl, "wan_kl": tiny.wan_kl}


@pytest.mark.parametrize("name", VAES)
@any_case
def test_vae_without_its_forward(name: str, tier: str, level: str, device: torch.device, tmp_path: Path) -> None:
    """Tiles and slices come and go. Hazard: `vae.encode` and `vae.decode` never pass the root's `forward` (diffusers
    #12319)."""
    sample = tiny.randn(1, 3, 5, 32, 24) if name == "wan_kl" else tiny.kl_inputs()["sample"]
    reference, model = VAES[name]().to(device), VAES[name]()
    handle = apply_group_offloading(model, device, offload_type=level, **tier_options(tier, tmp_path))
    with torch.no_grad():
        for mode in ("plain", "sliced", "tiled", "plain"):
            for vae in (reference, model):
                vae.enable_slicing() if mode == "sliced" else vae.disable_slicing()
                tiled(vae) if mode == "tiled" else vae.disable_tiling()
            expected = reference.encode(sample).latent_dist.mean
            found = model.encode(sample).latent_dist.mean
            assert torch.equal(found, expected)
            before = sum(handle.stats().bytes_onloaded.values())
            assert torch.equal(model.decode(found).sample, reference.decode(expected).sample)
            decoded = sum(handle.stats().bytes_onloaded.values()) - before
    assert {tensor.device.type for tensor in model.parameters()} == {"cpu"}
    if tier == "disk" and name != "wan_kl":  # which decodes each frame: the encoder stays where it is
        assert 0 < decoded < sum(tensor.nbytes for tensor in model.parameters())


# ---------------------------------------------------------------- text encoders


@pytest.mark.parametrize("make", [lambda: tiny.clip(num_hidden_layers=16), lambda: tiny.t5(num_layers=16)])
@any_tier
def test_text_encoders_are_cut_into_blocks(
    make: Callable[[], nn.Module], tier: str, device: torch.device, tmp_path: Path
) -> None:
    """Hazard: T5-like text encoders land in one group at block level, and nothing is saved: a text encoder takes its whole
    size on the device, also after encoding (diffusers #10078)."""
    model, expected = make(), tiny.call(make().to(device), tiny.tokens())
    handle = apply_group_offloading(model, device, **tier_options(tier, tmp_path))
    for _ in range(2):
        assert torch.equal(tiny.call(model, tiny.tokens()), expected)
    num_bytes = sum(group.num_bytes for group in handle.groups)
    assert handle.stats().peak_device_bytes < num_bytes / 4
    assert max(group.num_bytes for group in handle.groups) < num_bytes / 4
