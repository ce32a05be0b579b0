"""Quantised weights, kind by kind: on the device, under this package, under diffusers' group offloading.

Each kind is one model on the device: quantised there, timed, offloaded by this package and brought back, at both levels,
and last offloaded by diffusers, which has no way back.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import models
from . import report as reports
from .arms import apply_function
from .machine import (
    device_peak,
    fix_algorithms,
    forget_device_peak,
    measure_machine,
    sha256,
    synchronize,
    wait_for_output,
)
from .options import add, model_of
from .processes import say


def _torchao(name: str) -> Callable[[nn.Module], None]:
    def quantise(model: nn.Module) -> None:
        from torchao import quantization

        quantization.quantize_(model, getattr(quantization, name)())

    return quantise


def _bitsandbytes(make: Callable[[Any, nn.Linear], nn.Module]) -> Callable[[nn.Module], None]:
    def quantise(model: nn.Module) -> None:
        from bitsandbytes import nn as bnb

        for parent in list(model.modules()):
            for name, layer in list(parent.named_children()):
                if type(layer) is nn.Linear:
                    with torch.device("meta"):
                        found: Any = make(bnb, layer)
                    weight = found.weight  # as diffusers makes it, on the device
                    weight = type(weight)(layer.weight.data, requires_grad=False, **weight.__dict__)
                    found.weight, found.bias = weight._quantize(layer.weight.device), layer.bias
                    setattr(parent, name, found)

    return quantise


def _shape(layer: nn.Linear) -> tuple[int, int, bool]:
    return layer.in_features, layer.out_features, layer.bias is not None


def _layerwise(model: nn.Module) -> None:
    model.enable_layerwise_casting(torch.float8_e4m3fn, torch.bfloat16)  # type: ignore[operator]


KINDS: dict[str, Callable[[nn.Module], None]] = {
    "torchao-int8": _torchao("Int8WeightOnlyConfig"),
    "torchao-fp8": _torchao("Float8WeightOnlyConfig"),
    "torchao-fp8-dynamic": _torchao("Float8DynamicActivationFloat8WeightConfig"),
    "bnb-nf4": _bitsandbytes(
        lambda bnb, layer: bnb.Linear4bit(*_shape(layer), compute_dtype=torch.bfloat16, quant_type="nf4")
    ),
    "bnb-int8": _bitsandbytes(
        lambda bnb, layer: bnb.Linear8bitLt(*_shape(layer), has_fp16_weights=False, threshold=6.0)
    ),
    "layerwise": _layerwise,
}
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "on the device": ("resident", {}),
    "group_offload, block level": ("ours", {}),
    "group_offload, leaf level": ("ours", {"offload_type": "leaf_level"}),
    "diffusers, leaf level": (
        "diffusers",
        {
            "offload_type": "leaf_level",
            "use_stream": True,
            "record_stream": True,
            "offload_device": torch.device("cpu"),
        },
    ),
}


def run(options: argparse.Namespace) -> Path | None:
    """Measure each arm of each kind. Returns the file with the results."""
    warnings.simplefilter("ignore")  # of the packages, about each other
    fix_algorithms()
    device, model = torch.device(options.device), model_of(options)
    report = reports.new("quantised", options, model={**model.facts(), "what": f"{model.what}, {model.goes_in}"})
    report["machine"] = measure_machine(device)
    begun = time.monotonic()
    for kind in options.kinds:
        if time.monotonic() - begun > options.budget:
            say(f"{kind}: no time left")
            break
        forget_device_peak(device)
        module = models.make_model(model, device, resident=True).requires_grad_(False)
        try:
            KINDS[kind](module)
        except Exception as error:
            report["arms"][f"{kind}, on the device"] = {"error": _first_line(error)}
            continue
        inputs = models.make_inputs(model, device)
        reference = None
        for name, (engine, choice) in ARMS.items():
            say(f"{kind}, {name}", time.monotonic() - begun)
            try:
                handle = apply_function(engine)(module, device, choice)
                arm = _measure(model, module, inputs, device, options.steps)
                reference = reference or arm["sha256"]
                arm["is_equal"] = arm["sha256"] == reference
                if handle is not None and hasattr(handle, "remove"):
                    arm["host_bytes"] = handle.stats().host_bytes
                    handle.remove()
            except Exception as error:
                arm = {"error": _first_line(error)}
            report["arms"][f"{kind}, {name}"] = arm
        del module, inputs
    return reports.write(report, options.output)


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
    return {"step_s": seconds, "peak_bytes": device_peak(device), "sha256": sha256(output)}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]:.120}"


def render(report: Mapping[str, Any]) -> str:
    """A report of this benchmark as Markdown: a row for each arm of each kind."""
    packages = ("diffusers", "torchao", "bitsandbytes")
    facts = f"{report['model']['what']}; {reports.machine_facts(report, *packages)}."
    columns: reports.Columns = {
        "step, in a row": lambda arm: reports.seconds(arm["step_s"]),
        "device peak": lambda arm: reports.gib(arm["peak_bytes"]),
        "RAM of the weights": lambda arm: reports.gib(arm.get("host_bytes")),
        "outputs bit-equal": lambda arm: reports.verdict(arm["is_equal"]),
    }
    return "\n".join([facts, "", reports.table(report["arms"], columns, "step_s", head="kind, arm")])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS], help="only these, in this order")
    add(parser, "model", "blocks", "tokens", "small", "device", steps=4, budget=150)
