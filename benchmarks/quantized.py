"""Quantized weights, kind by kind: on the device, under this package, under diffusers' group offloading.

Each kind is one model on the device: quantized there, timed, offloaded by this package and brought back, at both levels.
diffusers has no way back: its arms make the same model anew.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import machine, models
from . import report as reports
from .arms import apply
from .options import add, model_of, sizes_of
from .processes import Job, Relay, tell


def _torchao(name: str, **options: Any) -> Callable[[nn.Module], None]:
    def quantize(model: nn.Module) -> None:
        import torchao.prototype.mx_formats as formats
        from torchao import quantization

        config = getattr(quantization, name, None) or getattr(formats, name)
        quantization.quantize_(model, config(**options))

    return quantize


def _replace(model: nn.Module, make: Callable[[nn.Linear], nn.Module | None]) -> None:
    """Put what `make` returns in the place of each linear layer. None leaves the layer."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear and (found := make(layer)) is not None:
                setattr(parent, name, found)


def _bitsandbytes(name: str, **options: Any) -> Callable[[nn.Module], None]:
    def make(layer: nn.Linear) -> nn.Module:
        from bitsandbytes import nn as bnb

        with torch.device("meta"):
            found: Any = getattr(bnb, name)(layer.in_features, layer.out_features, layer.bias is not None, **options)
        weight = found.weight  # as diffusers makes it, on the device
        weight = type(weight)(layer.weight.data, requires_grad=False, **weight.__dict__)
        found.weight, found.bias = weight._quantize(layer.weight.device), layer.bias
        return found  # type: ignore[no-any-return]

    return lambda model: _replace(model, make)


def _quanto(name: str) -> Callable[[nn.Module], None]:
    def quantize(model: nn.Module) -> None:
        from optimum import quanto

        quanto.quantize(model, weights=getattr(quanto, name))
        quanto.freeze(model)
        model.eval()  # quanto makes layers that train

    return quantize


def _gguf(name: str) -> Callable[[nn.Module], None]:
    """Weights with random numbers in the file's layout: the package quantizes on the CPU, for minutes."""

    def make(layer: nn.Linear) -> nn.Module | None:
        import gguf
        from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

        kind = gguf.GGMLQuantizationType[name]
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        rows, columns = layer.weight.shape
        if columns % block:
            return None  # files leave such layers in bf16
        generator = torch.Generator(layer.weight.device).manual_seed(models.SEED)
        shape = (rows, columns // block, block_bytes)
        compressed = torch.randint(256, shape, generator=generator, device=layer.weight.device, dtype=torch.uint8)
        scales = compressed[..., : 4 if name.endswith("_K") else 2].view(torch.float16)
        scales.fill_(1e-4)
        with torch.device("meta"):
            found = GGUFLinear(columns, rows, layer.bias is not None, compute_dtype=torch.bfloat16)
        found.weight, found.bias = GGUFParameter(compressed.flatten(1), quant_type=kind), layer.bias
        return found  # type: ignore[no-any-return]

    return lambda model: _replace(model, make)


def _sdnq(dtype: str) -> Callable[[nn.Module], None]:
    def quantize(model: nn.Module) -> None:
        import sdnq

        sdnq.sdnq_post_load_quant(model, weights_dtype=dtype, add_skip_keys=False)

    return quantize


def _layerwise(model: nn.Module) -> None:
    model.enable_layerwise_casting(torch.float8_e4m3fn, torch.bfloat16)  # type: ignore[operator]


# Those that people use most first: a run that is cut short has them.
KINDS: dict[str, Callable[[nn.Module], None]] = {
    "torchao-int8": _torchao("Int8WeightOnlyConfig"),
    "torchao-fp8": _torchao("Float8WeightOnlyConfig"),
    "torchao-int4": _torchao("Int4WeightOnlyConfig", group_size=32, int4_packing_format="tile_packed_to_4d"),
    "bnb-nf4": _bitsandbytes("Linear4bit", compute_dtype=torch.bfloat16, quant_type="nf4"),
    "bnb-fp4": _bitsandbytes("Linear4bit", compute_dtype=torch.bfloat16, quant_type="fp4"),
    "bnb-int8": _bitsandbytes("Linear8bitLt", has_fp16_weights=False, threshold=6.0),
    "gguf-Q8_0": _gguf("Q8_0"),
    "gguf-Q4_0": _gguf("Q4_0"),
    "gguf-Q4_K": _gguf("Q4_K"),
    "quanto-int8": _quanto("qint8"),
    "quanto-int4": _quanto("qint4"),
    "quanto-fp8": _quanto("qfloat8"),
    "layerwise": _layerwise,
    "torchao-int8-dynamic": _torchao("Int8DynamicActivationInt8WeightConfig"),
    "torchao-fp8-dynamic": _torchao("Float8DynamicActivationFloat8WeightConfig"),
    "torchao-nvfp4": _torchao("NVFP4WeightOnlyConfig"),
    "sdnq-int8": _sdnq("int8"),
    "sdnq-uint4": _sdnq("uint4"),
}
_PEER: dict[str, Any] = {"use_stream": True, "record_stream": True, "offload_device": torch.device("cpu")}
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "on the device": ("resident", {}),
    "group_offload, block level": ("ours", {}),
    "group_offload, leaf level": ("ours", {"offload_type": "leaf_level"}),
    "group_offload, compressed": ("ours", {"compress": True}),
    "group_offload, compressed, 6 GiB": ("ours", {"compress": True, "vram_budget": "6GiB"}),
    "diffusers, block level": ("diffusers", {"offload_type": "block_level", "num_blocks_per_group": 1, **_PEER}),
    "diffusers, leaf level": ("diffusers", {"offload_type": "leaf_level", **_PEER}),
}


COLUMNS = ("step_s", "step_min_s", "peak_bytes", "is_equal", "is_finite")
"""A step is one of several in a row, in the middle one of seven rows, and in the fastest one."""


def work(job: dict[str, Any], begin: Callable[[], None]) -> dict[str, Any]:
    """What a child process does with its job: all arms of a kind."""
    warnings.simplefilter("ignore")  # of the packages, about each other
    device, model, kind = torch.device(job["device"]), models.find(**job["model"]), job["kind"]
    inputs = models.make_inputs(model, device)
    begin()
    arms: dict[str, Any] = {}
    module = reference = None
    for name, (engine, choice) in ARMS.items():
        machine.say(f"{kind}, {name}")
        try:
            if module is None or engine == "diffusers":
                module = None
                machine.forget_device_peak(device)
                module = models.make_model(model, device, resident=True).requires_grad_(False)
                KINDS[kind](module)
            handle = apply(engine, module, device, choice)
            for _ in range(2):
                model.call(module, inputs)
            machine.synchronize(device)
            machine.forget_device_peak(device)
            rows = [machine.timed(partial(model.call, module, inputs), device, job["num_steps"]) for _ in range(7)]
            times, output = [took for took, _ in rows], rows[-1][1]
            arm = {
                "step_s": statistics.median(times),  # the host may be busy with other work for a while
                "step_min_s": min(times),
                "peak_bytes": machine.allocator(device, machine.PEAK),
                "sha256": machine.sha256(output),
            }
            reference = reference or arm["sha256"]
            arm |= {"is_equal": arm["sha256"] == reference, "is_finite": bool(output.isfinite().all())}
            if handle is not None:
                stats = handle.stats()
                arm |= {"host_bytes": stats.host_bytes, "compressed_bytes": stats.compressed_bytes}
                arm["weight_bytes"] = sum(group.num_bytes for group in handle.groups)
                handle.remove()
        except Exception as error:
            arm, module = {"error": f"{type(error).__name__}: {error}"[:160]}, None
        arms[f"{kind}, {name}"] = arm
        tell("so far", {"arms": arms})  # some kinds are taken apart in Python, weight by weight, and are stopped
        if reference is None:
            break  # the kind does not run here
    return {"arms": arms}


def run(options: argparse.Namespace) -> Path | None:
    """Measure each arm of each kind. Returns the file with the results."""
    report = reports.new("quantized", options, model=model_of(options).facts())
    task = {"model": sizes_of(options), "num_steps": options.steps}
    return Relay(report, options, [Job(name=kind, task={**task, "kind": kind}) for kind in options.kinds]).run()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS], help="only these, in this order")
    add(parser, "model", "blocks", "tokens", "small", "device", "budget", steps=4, timeout=300)
