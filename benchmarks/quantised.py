"""Quantised weights, kind by kind: on the device, under this package, under diffusers' group offloading.

Each kind is one model on the device: quantised there, timed, offloaded by this package and brought back, at both levels.
diffusers has no way back: its arms make the same model anew.
"""

from __future__ import annotations

import argparse
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import models
from . import report as reports
from .arms import apply_function
from .machine import (
    QUANTISERS,
    device_peak,
    fix_algorithms,
    forget_device_peak,
    measure_machine,
    say,
    sha256,
    synchronize,
    wait_for_output,
)
from .options import add, model_of
from .report import first_line


def _torchao(name: str, **options: Any) -> Callable[[nn.Module], None]:
    def quantise(model: nn.Module) -> None:
        import torchao.prototype.mx_formats as formats
        from torchao import quantization

        config = getattr(quantization, name, None) or getattr(formats, name)
        quantization.quantize_(model, config(**options))

    return quantise


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
            found: Any = getattr(bnb, name)(*_shape(layer), **options)
        weight = found.weight  # as diffusers makes it, on the device
        weight = type(weight)(layer.weight.data, requires_grad=False, **weight.__dict__)
        found.weight, found.bias = weight._quantize(layer.weight.device), layer.bias
        return found  # type: ignore[no-any-return]

    return lambda model: _replace(model, make)


def _shape(layer: nn.Linear) -> tuple[int, int, bool]:
    return layer.in_features, layer.out_features, layer.bias is not None


def _quanto(name: str) -> Callable[[nn.Module], None]:
    def quantise(model: nn.Module) -> None:
        from optimum import quanto

        quanto.quantize(model, weights=getattr(quanto, name))
        quanto.freeze(model)
        model.eval()  # quanto makes layers that train

    return quantise


def _gguf(name: str) -> Callable[[nn.Module], None]:
    """Weights with random numbers in the file's layout: the package quantises on the CPU, for minutes."""

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
        packed = torch.randint(256, shape, generator=generator, device=layer.weight.device, dtype=torch.uint8)
        scales = packed[..., : 4 if name.endswith("_K") else 2].view(torch.float16)
        scales.fill_(1e-4)
        with torch.device("meta"):
            found = GGUFLinear(*_shape(layer), compute_dtype=torch.bfloat16)
        found.weight, found.bias = GGUFParameter(packed.flatten(1), quant_type=kind), layer.bias
        return found  # type: ignore[no-any-return]

    return lambda model: _replace(model, make)


def _sdnq(dtype: str) -> Callable[[nn.Module], None]:
    def quantise(model: nn.Module) -> None:
        import sdnq

        sdnq.sdnq_post_load_quant(model, weights_dtype=dtype, add_skip_keys=False)

    return quantise


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
    "diffusers, block level": ("diffusers", {"offload_type": "block_level", "num_blocks_per_group": 1, **_PEER}),
    "diffusers, leaf level": ("diffusers", {"offload_type": "leaf_level", **_PEER}),
}


def run(options: argparse.Namespace) -> Path | None:
    """Measure each arm of each kind. Returns the file with the results."""
    warnings.simplefilter("ignore")  # of the packages, about each other
    fix_algorithms()
    device, model = torch.device(options.device), model_of(options)
    report = reports.new("quantised", options, model={**model.facts(), "what": f"{model.what}, {model.goes_in}"})
    report["machine"] = measure_machine(device)
    begun, path = time.monotonic(), None
    inputs = models.make_inputs(model, device)
    for kind in options.kinds:
        if time.monotonic() - begun > options.budget:
            say(f"{kind}: no time left")
            break
        module, reference = None, None
        for name, (engine, choice) in ARMS.items():
            say(f"{kind}, {name}", time.monotonic() - begun)
            try:
                if module is None or engine == "diffusers":
                    module = None
                    forget_device_peak(device)
                    module = _make(model, kind, device)
                with _limited(options.arm_budget):
                    handle = apply_function(engine)(module, device, choice)
                    arm = _measure(model, module, inputs, device, options.steps)
                reference = reference or arm["sha256"]
                arm["is_equal"] = arm["sha256"] == reference
                if handle is not None and hasattr(handle, "remove"):
                    arm["host_bytes"] = handle.stats().host_bytes
                    handle.remove()
            except Exception as error:
                arm, module = {"error": first_line(error)}, None
            report["arms"][f"{kind}, {name}"] = arm
            path = reports.write(report, options.output)  # at once: a run that is cut short leaves what it has
            if reference is None:
                break  # the kind does not run here
        del module
    return path


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise in the middle of what takes longer: some kinds are taken apart in Python, weight by weight."""

    def stop(*args: object) -> None:
        raise TimeoutError(f"not done after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _make(model: models.Model, kind: str, device: torch.device) -> nn.Module:
    module = models.make_model(model, device, resident=True).requires_grad_(False)
    KINDS[kind](module)
    return module


@torch.no_grad()
def _measure(
    model: models.Model, module: nn.Module, inputs: dict[str, torch.Tensor], device: torch.device, steps: int
) -> dict[str, Any]:
    for _ in range(2):
        model.call(module, inputs)
    synchronize(device)
    forget_device_peak(device)
    start = time.perf_counter()
    for _ in range(steps):
        output = model.call(module, inputs)
    wait_for_output(device)
    seconds = (time.perf_counter() - start) / steps
    facts = {"is_finite": bool(output.isfinite().all()), "sha256": sha256(output)}
    return {"step_s": seconds, "peak_bytes": device_peak(device), **facts}


def render(report: Mapping[str, Any]) -> str:
    """A report of this benchmark as Markdown: a row for each arm of each kind. A step is one of several in a row."""
    facts = f"{report['model']['what']}; {reports.machine_facts(report, 'diffusers', *QUANTISERS)}."
    columns = ("step_s", "peak_bytes", "is_equal", "is_finite")
    return "\n".join([facts, "", reports.table(report["arms"], columns, "step_s")])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS], help="only these, in this order")
    parser.add_argument("--arm-budget", type=float, default=60, help="seconds for one arm (default 60)")
    add(parser, "model", "blocks", "tokens", "small", "device", steps=4, budget=400)
