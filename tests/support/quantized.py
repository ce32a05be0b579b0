"""Quantized weights of every kind that can be made here. Tests skip those whose packages are not installed."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils.checkpoint import checkpoint

from .models import Block

WIDTH = 256
"""Kernels want multiples of 16 to 128; at 256, quanto packs int4 for the device that it is on."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.out = nn.LayerNorm(WIDTH)
        self.is_checkpointed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.out(x)


class Quantized(torch.Tensor):
    """An int8 weight with a scale for each row, as quantization libraries wrap them."""

    qdata: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls: type, qdata: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, qdata.shape, strides=qdata.stride(), dtype=scale.dtype, device=qdata.device, requires_grad=False
        )

    def __init__(self, qdata: torch.Tensor, scale: torch.Tensor) -> None:
        self.qdata, self.scale = qdata, scale

    @classmethod
    def of(cls, weight: torch.Tensor) -> Quantized:
        scale = weight.detach().abs().amax(1, keepdim=True) / 127
        return cls((weight.detach() / scale).round().to(torch.int8), scale)

    def dequantised(self) -> torch.Tensor:
        return self.qdata.to(self.scale.dtype) * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["qdata", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> Quantized:
        return cls(inner["qdata"], inner["scale"])

    def __repr__(self, **_: Any) -> str:
        return f"Quantized({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten, kwargs = torch.ops.aten, kwargs or {}
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            return return_and_correct_aliasing(
                func, args, kwargs, cls(func(args[0].qdata, **kwargs), func(args[0].scale, **kwargs))
            )
        if func is aten._to_copy.default:
            dtype, device = kwargs.get("dtype") or args[0].dtype, kwargs.get("device")
            return cls(args[0].qdata.to(device, copy=True), args[0].scale.to(device, dtype, copy=True))
        if func is aten.copy_.default and isinstance(args[1], cls):
            args[0].qdata.copy_(args[1].qdata)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        if func is aten.mul_.Tensor:
            args[0].scale.mul_(args[1])
            return args[0]
        plain = torch.utils._pytree.tree_map_only(cls, cls.dequantised, (args, kwargs))
        return func(*plain[0], **plain[1])


class Dequantising(nn.Module):
    """Computes with a weight that kernels of this machine do not take."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.dequantize().to(x.dtype), self.bias)


def inputs(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


def replace(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    for name, child in list(model.named_children()):
        if type(child) is nn.Linear:
            setattr(model, name, make(child))
        else:
            replace(child, make)
    return model


def _torchao(name: str, *, dequantises: bool = False, **options: Any) -> Callable[[nn.Module], nn.Module]:
    def quantize(model: nn.Module) -> nn.Module:
        import torchao.prototype.mx_formats as formats
        from torchao import quantization

        config = getattr(quantization, name, None) or getattr(formats, name)
        quantization.quantize_(model, config(**options))
        return replace(model, Dequantising) if dequantises else model

    return quantize


def _quanto(name: str) -> Callable[[nn.Module], nn.Module]:
    def quantize(model: nn.Module) -> nn.Module:
        from optimum import quanto

        quanto.quantize(model, weights=getattr(quanto, name))
        quanto.freeze(model)
        return model

    return quantize


def _bitsandbytes(kind: str, **options: Any) -> Callable[[nn.Module], nn.Module]:
    def make(layer: nn.Linear) -> nn.Module:
        from bitsandbytes import nn as bnb

        device = layer.weight.device
        shape = layer.in_features, layer.out_features, layer.bias is not None
        if kind == "int8":
            found = bnb.Linear8bitLt(*shape, has_fp16_weights=False, threshold=6.0)
        else:
            found = bnb.Linear4bit(*shape, compute_dtype=torch.bfloat16, quant_type=kind, **options)
        found.load_state_dict(layer.cpu().state_dict())
        found.requires_grad_(False)
        found.bias = nn.Parameter(layer.bias.detach().clone(), requires_grad=False)  # else the first forward casts it
        return found.to(device)

    return lambda model: replace(model, make)


def _gguf(name: str) -> Callable[[nn.Module], nn.Module]:
    def quantize(model: nn.Module) -> nn.Module:
        import gguf
        from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

        kind = gguf.GGMLQuantizationType[name]

        def make(layer: nn.Linear) -> nn.Module:
            found = GGUFLinear(layer.in_features, layer.out_features, True, compute_dtype=torch.bfloat16)
            packed = torch.from_numpy(gguf.quants.quantize(layer.weight.detach().float().cpu().numpy(), kind))
            found.weight = GGUFParameter(packed.to(layer.weight.device), quant_type=kind)
            found.bias = layer.bias
            return found

        return replace(model, make)

    return quantize


def _sdnq(dtype: str) -> Callable[[nn.Module], nn.Module]:
    def quantize(model: nn.Module) -> nn.Module:
        import sdnq

        return sdnq.sdnq_post_load_quant(model, weights_dtype=dtype, minimum_allowed_numel=1, add_skip_keys=False)

    return quantize


def _cast_by_layer(model: nn.Module) -> nn.Module:
    from diffusers.hooks import apply_layerwise_casting

    apply_layerwise_casting(model, torch.float8_e4m3fn, torch.bfloat16, skip_modules_pattern=())
    return model


KINDS: dict[str, tuple[str, Callable[[nn.Module], nn.Module]]] = {
    "torchao int8 weight only": ("torchao", _torchao("Int8WeightOnlyConfig")),
    "torchao int8 dynamic": ("torchao", _torchao("Int8DynamicActivationInt8WeightConfig")),
    "torchao int4 weight only": ("torchao", _torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4)),
    "torchao int4 dynamic": ("torchao", _torchao("Int8DynamicActivationIntxWeightConfig", weight_dtype=torch.int4)),
    "torchao fp8 weight only": ("torchao", _torchao("Float8WeightOnlyConfig")),
    "torchao NVFP4": ("torchao", _torchao("NVFP4WeightOnlyConfig")),
    "torchao MX": ("torchao", _torchao("MXDynamicActivationMXWeightConfig", dequantises=True)),
    "quanto int8": ("optimum", _quanto("qint8")),
    "quanto int4": ("optimum", _quanto("qint4")),
    "quanto fp8": ("optimum", _quanto("qfloat8")),
    "bitsandbytes nf4": ("bitsandbytes", _bitsandbytes("nf4", compress_statistics=True)),
    "bitsandbytes fp4": ("bitsandbytes", _bitsandbytes("fp4", compress_statistics=False)),
    "bitsandbytes int8": ("bitsandbytes", _bitsandbytes("int8")),
    "GGUF Q8_0": ("gguf", _gguf("Q8_0")),
    "GGUF Q4_0": ("gguf", _gguf("Q4_0")),
    "SDNQ int8": ("sdnq", _sdnq("int8")),
    "SDNQ uint4": ("sdnq", _sdnq("uint4")),
    "layerwise casting": ("diffusers", _cast_by_layer),
}
"""By name: the package that is needed, and a function that quantizes a model's linear layers."""
ON_ACCELERATORS: dict[str, tuple[str, Callable[[nn.Module], nn.Module]]] = {
    "torchao fp8 dynamic": ("torchao", _torchao("Float8DynamicActivationFloat8WeightConfig")),
    "torchao int4": (
        "torchao",
        _torchao("Int4WeightOnlyConfig", group_size=32, int4_packing_format="tile_packed_to_4d"),
    ),
    "torchao NVFP4 dynamic": ("torchao", _torchao("NVFP4DynamicActivationNVFP4WeightConfig")),
}
"""Kinds that are made on an accelerator only."""


def is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def quantized(kind: str, seed: int = 0, device: torch.device | None = None) -> nn.Module:
    """A model in bfloat16 with weights of this kind, the same each time."""
    torch.manual_seed(seed)
    model = Model().eval().to(torch.bfloat16).requires_grad_(False).to(device)
    with warnings.catch_warnings():  # of the packages, about what this machine lacks
        warnings.simplefilter("ignore")
        return {**KINDS, **ON_ACCELERATORS}[kind][1](model).eval()  # quanto makes layers that train
