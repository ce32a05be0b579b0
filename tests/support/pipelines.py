"""Tiny diffusers pipelines, and what offloading must not change in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.modular_pipelines.flux import FluxAutoBlocks
from torch import nn

from . import tiny_models as tiny
from .asserts import named_tensors, same_bits

PIPELINES = {"flux": tiny.flux_pipeline, "sd": tiny.sd_pipeline, "wan": tiny.wan_pipeline}


any_tier = pytest.mark.parametrize("tier", ["ram", "disk"])
any_case = pytest.mark.parametrize(("tier", "level"), [("ram", "block_level"), ("disk", "leaf_level")])
"""Two cases in place of four: each level and each tier comes once."""


def modular_pipeline(**components: Any) -> Any:
    pipe = FluxAutoBlocks().init_pipeline()
    found = {**tiny.flux_pipeline().components, **components}
    pipe.update_components(**{name: part for name, part in found.items() if name in pipe._component_specs})
    return pipe


def run_modular(pipe: Any) -> torch.Tensor:
    sizes = {"num_inference_steps": 2, "height": 16, "width": 16, "max_sequence_length": 16, "output_type": "pt"}
    images = pipe(prompt=tiny.PROMPT, generator=torch.Generator().manual_seed(0), output="images", **sizes)
    assert isinstance(images, torch.Tensor)
    return images.cpu()


def tier_options(tier: str, folder: Path) -> dict[str, Any]:
    return {} if tier == "ram" else {"offload_to_disk_path": folder}


def models_of(pipe: Any) -> dict[str, nn.Module]:
    return {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named_tensors(module)}


def assert_same_weights(module: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    found = dict(named_tensors(module))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same_bits(found[name].cpu(), tensor.cpu()), name


def assert_same_model(opened: Any, reference: Any) -> None:
    """Names, dtypes and bits of all parameters and buffers, and what else a loader decides."""
    expected, actual = dict(named_tensors(reference)), dict(named_tensors(opened))
    assert list(actual) == list(expected)
    for name, tensor in actual.items():
        assert same_bits(tensor, expected[name].cpu()), f"{name}: {tensor.dtype} for {expected[name].dtype}"
        assert tensor.requires_grad == expected[name].requires_grad, name
        assert isinstance(tensor, nn.Parameter) == isinstance(expected[name], nn.Parameter), name
    assert [type(part) for part in opened.modules()] == [type(part) for part in reference.modules()]
    assert (opened.training, opened.dtype) == (reference.training, reference.dtype)
