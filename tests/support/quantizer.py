"""A quantizer of diffusers' kind that needs no package: int8 weights, and a scale in float32 for each row."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers.quantizers import auto
from diffusers.quantizers.base import DiffusersQuantizer
from diffusers.quantizers.quantization_config import QuantizationConfigMixin
from torch import nn
from torch.nn import functional as F


class Method(str, Enum):
    ROWS = "rows"


class RowsConfig(QuantizationConfigMixin):
    def __init__(self, levels: int = 127, **_: Any) -> None:
        self.quant_method = Method.ROWS
        self.levels = levels

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": self.quant_method.value, "levels": self.levels}

    to_diff_dict = to_dict


class RowsLinear(nn.Module):
    def __init__(self, like: nn.Linear) -> None:
        super().__init__()
        shape = like.weight.shape
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(shape[0], 1), requires_grad=False)
        self.bias = like.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype), self.bias)


class RowsQuantizer(DiffusersQuantizer):
    made: list[str] = []
    """The weights that were quantized, by all quantizers of the process."""
    is_serializable = True
    is_trainable = False

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        with init_empty_weights():
            for parent in list(model.modules()):
                for name, child in list(parent.named_children()):
                    if type(child) is nn.Linear:
                        setattr(parent, name, RowsLinear(child))
        model.config.quantization_config = self.quantization_config  # type: ignore[union-attr]

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        return model

    def update_missing_keys(self, model: nn.Module, missing_keys: list[str], prefix: str) -> list[str]:
        return [key for key in missing_keys if not key.endswith(".scale")]

    def check_if_quantized_param(self, model: nn.Module, value: Any, name: str, *args: Any, **kwargs: Any) -> bool:
        owner, _, weight = name.rpartition(".")
        return weight in ("weight", "scale") and isinstance(model.get_submodule(owner), RowsLinear)

    def create_quantized_param(
        self, model: nn.Module, value: Any, name: str, device: Any, *args: Any, **kw: Any
    ) -> None:
        owner, _, weight = name.rpartition(".")
        module = model.get_submodule(owner)
        assert isinstance(module, RowsLinear)
        if self.pre_quantized:
            dtype = torch.float32 if weight == "scale" else torch.int8
            setattr(module, weight, nn.Parameter(value.to(device, dtype), requires_grad=False))
            return
        scale = (value.float().abs().amax(1, keepdim=True) / self.quantization_config.levels).clamp(min=1e-8)
        module.weight = nn.Parameter((value / scale).round().to(torch.int8).to(device), requires_grad=False)
        module.scale = nn.Parameter(scale.to(device), requires_grad=False)
        RowsQuantizer.made.append(name)


auto.AUTO_QUANTIZER_MAPPING["rows"] = RowsQuantizer
auto.AUTO_QUANTIZATION_CONFIG_MAPPING["rows"] = RowsConfig
