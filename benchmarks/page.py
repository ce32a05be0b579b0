"""The tables of docs/benchmarks.md: which figures of which results they show. `make pages` writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from .report import RESULTS, figure, markdown

H100 = "h100-80gb-hbm3"
LEAF = "diffusers leaf+stream+record_stream"
Cell = str
"""A figure as "FILE: ARM: KEY", for the folder of results; or a text."""


@cache
def _arms(file: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{file}.json").read_text())
    if "sizes" in found:  # a table of arms for each length
        return {f"{arm} {size['num_tokens']}": row for size in found["sizes"] for arm, row in size["arms"].items()}
    return found["arms"]


def _shown(cell: Cell) -> str:
    if cell.count(": ") != 2:
        return cell
    file, arm, key = cell.split(": ")
    return figure(_arms(file)[arm], key)


def _table(head: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """With links to the files of the figures: in a column, or below the table if it is one file."""
    cells = [*map(list, rows)]
    files = [[*dict.fromkeys(cell.split(": ")[0] for cell in row if cell.count(": ") == 2)] for row in cells]
    lines = [[*head], *([_shown(cell) for cell in row] for row in cells)]
    if all(found == files[0] for found in files):
        return f"{markdown(lines, max_width=0)}\n\nResults: {_links(files[0])}."
    links = ["results", *map(_links, files)]
    return markdown([[*line, link] for line, link in zip(lines, links, strict=True)], max_width=0)


def _links(files: Sequence[str]) -> str:
    return ", ".join(f"[{number}](../benchmarks/results/{file}.json)" for number, file in enumerate(files, 1))


def _row(label: str, file: str, arm: str, *keys: str) -> list[Cell]:
    return [label, *(f"{file}: {arm}: {key}" for key in keys)]


# ------------------------------------------------------------------------------------------------ cards and pipelines


def _cards() -> Iterable[Sequence[Cell]]:
    """The last image of each way to run FLUX.1, by free memory."""
    other = "card/flux1-4-12-16gib-h200"
    files = {4: other, 8: "card/flux1-8gib-h200", 12: other, 16: other}
    peers = {4: "card/flux1-4gib-diffusers-h200", 8: "card/flux1-8gib-diffusers-h200"}
    for free, file in files.items():
        arm = f"flux, {free} GiB,"
        first, last, reserved = (f"{file}: {arm} ours+auto: {key}" for key in ("images.0.s", "images.-1.s", RESERVED))
        packed = f"{file}: {arm} ours+auto+pack: images.-1.s"
        least = f"{file}: {arm} ours: images.-1.s"
        peer = f"{peers[free]}: {arm} diffusers: images.-1.s" if free in peers else "-"
        yield [f"{free} GiB", first, last, reserved, packed, least, peer]


RESERVED = "device_reserved_bytes"


def _pipelines() -> Iterable[Sequence[Cell]]:
    for label, name, has_all in (("Qwen-Image, 54 GiB", "qwen", True), ("Wan 2.2, two experts, 64 GiB", "wan", False)):
        file, arm = f"card/{name}-8gib-h200", f"{name}, 8 GiB,"
        auto, least = f"{file}: {arm} ours+auto: images.-1.s", f"{file}: {arm} ours: images.-1.s"
        packed = f"{file}: {arm} ours+auto+pack: images.-1.s" if has_all else "-"
        peer = f"{file}: {arm} diffusers: images.-1.s" if has_all else "-"
        yield [label, auto, packed, least, peer, f"{file}: {name} resident: images.-1.s"]


def _first_images() -> Iterable[Sequence[Cell]]:
    file, keys = f"pipeline/flux-first-image-28-steps-{H100}", ("setup_s", "images.0.s", "images.-1.s")
    yield _row("resident", file, "resident, warm, 28 steps", *keys)
    yield _row("group_offload", file, "ours, warm, 28 steps", *keys)
    yield _row("diffusers, group offloading", file, "group offload, warm, 28 steps", *keys)
    yield _row("diffusers, model offloading", file, "model offload, warm, 28 steps", *keys)
    yield [*_row("group_offload, files not in the page cache", file, "ours, cold, 28 steps", *keys[:2]), "-"]


def _control() -> Iterable[Sequence[Cell]]:
    file, keys = f"pipeline/flux-control-{H100}", ("step_s", "images_s.-1", "device_peak_bytes", "rss_bytes")
    for label, arm in (("resident", "resident"), ("group_offload", "ours block"), ("diffusers, leaf level", LEAF)):
        yield _row(label, file, arm, *keys)


# ------------------------------------------------------------------------------------------------ one model


def _models() -> Iterable[Sequence[Cell]]:
    for label, name, arm, peer in (
        ("FLUX.1, 22 GiB, 4096 tokens", "flux1", "ours block+record_stream", LEAF),
        ("the same, leaf level", "flux1", "ours leaf", LEAF),
        ("FLUX.1, 16384 tokens", "flux1-16384-tokens", "ours block", LEAF),
        ("Wan 14B, 27 GiB, 32760 tokens", "wan14b", "ours leaf+record_stream", LEAF),
        ("UNet of SD 1.5, 1.6 GiB", "unet-sd15", "ours block+record_stream", "diffusers leaf+stream"),
        ("VAE, decoding 1024 x 1024", "vae-decode", "ours block+record_stream", LEAF),
        ("T5-XXL, 8.9 GiB", "t5-xxl", "ours block+record_stream", LEAF),
    ):
        cells = [f"weights/{name}-h200: {each}: {key}" for each in (arm, peer, "resident") for key in STEP]
        yield [label, *cells]


STEP = ("step_s", "device_peak_bytes")


def _budgets() -> Iterable[Sequence[Cell]]:
    file = "weights/flux1-budgets-h200"
    yield _row("none: two blocks at a time", file, "ours block", "in_a_row_s", *STEP[1:])
    for share in (10, 25, 50, 75, 100):
        yield _row(f"{share}% of the weights", file, f"ours block vram={share}%", "in_a_row_s", *STEP[1:])
    yield _row("resident", file, "resident", "in_a_row_s", *STEP[1:])


def _files() -> Iterable[Sequence[Cell]]:
    file, peer = "weights/flux1-files-h200", "diffusers block+stream, disk"
    yield [*_row("all of it in the page cache", file, "ours block, checkpoint", *STEP), f"{file}: {peer}: step_s"]
    yield [*_row("12 GiB of RAM", file, "ours block, checkpoint @12GiB", *STEP), f"{file}: {peer} @12GiB: step_s"]
    for vram in (2, 6, 12):
        arm = f"ours block, checkpoint @12GiB vram={vram}GiB ram=auto"
        yield [
            *_row(f"12 GiB of RAM, {vram} GiB of VRAM", f"weights/flux1-budgets-12gib-vram{vram}-h200", arm, *STEP),
            "-",
        ]


def _packed() -> Iterable[Sequence[Cell]]:
    file = "weights/flux1-packed-budgets-h200"
    for label, arm, key in (
        ("RAM, two blocks at a time", "", "in_a_row_s"),
        ('RAM, `vram_budget="8GiB"`', " vram=8GiB", "in_a_row_s"),
        ('RAM, `vram_budget="12GiB"`', " vram=12GiB", "in_a_row_s"),
    ):
        yield [label, f"{file}: ours block{arm}: {key}", f"{file}: ours block packed{arm}: {key}"]
    file, arm = f"weights/flux1-packed-files-12gib-{H100}", "disk @12GiB vram=6GiB ram=auto"
    yield [
        "disk, 12 GiB of RAM, 6 GiB of VRAM (H100)",
        f"{file}: ours block, {arm}: step_s",
        f"{file}: ours block packed, {arm}: step_s",
    ]


def _pinned() -> Iterable[Sequence[Cell]]:
    for label, name in (("H200", "little-locked-h200"), ("H200, another host", "first-kernel-h200")):
        file = f"weights/flux1-{name}"
        yield [label, f"{file}: ours block: in_a_row_s", f"{file}: ours block, 512 MiB locked: in_a_row_s"]
    file = f"weights/flux1-little-locked-{H100}"
    yield ["H100", f"{file}: ours block: in_a_row_s", f"{file}: ours block, 512 MiB locked: in_a_row_s"]


KINDS = {
    "flux1-h200": {
        "torchao-int8": "torchao int8, weight only",
        "torchao-fp8": "torchao fp8, weight only",
        "torchao-int4": "torchao int4, weight only",
        "bnb-nf4": "bitsandbytes nf4",
        "bnb-fp4": "bitsandbytes fp4",
        "bnb-int8": "bitsandbytes int8",
        "gguf-Q8_0": "GGUF Q8_0",
        "gguf-Q4_0": "GGUF Q4_0",
        "gguf-Q4_K": "GGUF Q4_K",
        "quanto-int8": "quanto int8",
    },
    "flux1-quanto-fp8-h200": {"quanto-fp8": "quanto fp8"},
    "flux1-quanto-int4-nvfp4-h200": {"quanto-int4": "quanto int4", "torchao-nvfp4": "torchao NVFP4, weight only"},
    "flux1-more-kinds-h200": {
        "torchao-int8-dynamic": "torchao int8, dynamic",
        "torchao-fp8-dynamic": "torchao fp8, dynamic",
        "sdnq-int8": "SDNQ int8",
        "sdnq-uint4": "SDNQ uint4",
        "layerwise": "layerwise casting to fp8",
    },
}


def _quantized() -> Iterable[Sequence[Cell]]:
    for name, kinds in KINDS.items():
        file = f"quantised/{name}"
        for kind, label in kinds.items():
            ours, theirs = f"{file}: {kind}, group_offload,", f"{file}: {kind}, diffusers,"
            block = [f"{ours} block level: step_s", f"{ours} block level: peak_bytes"]
            resident = [f"{file}: {kind}, on the device: {key}" for key in ("step_s", "peak_bytes")]
            levels = ("block level", "leaf level")
            peers = [
                f"{theirs} {level}: step_s" if f"{kind}, diffusers, {level}" in _arms(file) else "-" for level in levels
            ]
            yield [label, *resident, *block, f"{ours} leaf level: step_s", *peers]


# ------------------------------------------------------------------------------------------------ training and GPUs


def _training() -> Iterable[Sequence[Cell]]:
    file, keys = "training/flux1-peers-h200", ("step_s", "peak_bytes")
    for label, arm in (
        ("resident", "resident"),
        ("resident, checkpointing", "resident + checkpointing"),
        ("group_offload", "ours block"),
        ("group_offload, checkpointing", "ours block + checkpointing"),
        ("group_offload from files, checkpointing", "ours files + checkpointing"),
        ("group_offload, leaf level, checkpointing", "ours leaf + checkpointing"),
        ("group_offload, activations offloaded", "ours block + activations"),
        ("group_offload, both", "ours block + checkpointing + activations"),
        ("FSDP2 with `CPUOffloadPolicy`, checkpointing", "fsdp2 + checkpointing"),
        ("diffusers, block level, checkpointing (other gradients)", "diffusers block + checkpointing"),
    ):
        yield _row(label, file, arm, *keys)


def _large_training() -> Iterable[Sequence[Cell]]:
    for label, name, arm in (
        ("126 GiB in RAM", "126gib-in-8gib", "ours block + checkpointing"),
        ("66 GiB in RAM", "66gib-in-8gib", "ours block + checkpointing"),
        ("105 GiB in files, in the page cache", "105gib-files-in-8gib", "ours files + checkpointing"),
        ("50 GiB in files, in the page cache", "50gib-files-in-8gib", "ours files + checkpointing"),
        ("22 GiB from disk, 8 GiB of RAM", "22gib-drive-in-8gib", "ours files ram=8GiB + checkpointing"),
    ):
        file = f"training/flux1-{name}-h200"
        resident = [f"{file}: resident + checkpointing: {key}" for key in ("step_s", "peak_bytes")]
        yield [*_row(label, file, arm, "step_s", "peak_bytes"), *resident]


def _activations() -> Iterable[Sequence[Cell]]:
    for label, arm in (
        ("all on the GPU", "none"),
        ("checkpointing", "checkpointing"),
        ("torch's `save_on_cpu`", "save_on_cpu"),
        ("torchtune's way", "torchtune"),
        ("group_offload", "ours"),
        ("group_offload, checkpointing", "ours + checkpointing"),
    ):
        sizes = [
            f"activations/flux1-h200: {arm} {size}: {key}" for size in (4096, 16384) for key in ("step_s", "peak_bytes")
        ]
        yield [label, *sizes]


def _gpus() -> Iterable[Sequence[Cell]]:
    file, key = "several/flux1-everything-h200", "ranks.max.in_a_row_s"
    one = f"{file}: one GPU: {key}"
    yield ["one GPU", one, one]
    for label, arm in (
        ("each GPU loads a share", "shared"),
        ("each GPU loads everything", "each alone"),
        ("context parallel, each loads a share", "context parallel, shared"),
        ("context parallel, each loads everything", "context parallel, each alone"),
        ("resident on each GPU", "resident"),
    ):
        yield [label, *(f"{file}: {arm} ({ranks} GPUs): {key}" for ranks in (2, 4))]
    for label, arm in (
        ("a LoRA's step, one GPU", "LoRA, one GPU"),
        ("a LoRA's step, DDP, each loads a share", "LoRA, shared"),
        ("a LoRA's step, DDP, each loads everything", "LoRA, each alone"),
    ):
        yield [label, *(f"{file}: {arm} ({ranks} GPUs): ranks.max.step_s" for ranks in (2, 4))]


def _interleaved() -> Iterable[Sequence[Cell]]:
    many = "shared/flux1-files-and-pipelines-h200"
    for label, file, kind, has_resident in (
        ("FLUX.1, the two calls of guidance", "shared/flux1-h200", "guidance", True),
        ("FLUX.1, four threads with a request each", "shared/flux1-h200", "threads", True),
        ("FLUX.1, guidance, from files with 12 GiB of RAM", many, "files", False),
        ("`WanPipeline`, two experts of 40 blocks", many, "wan", False),
        ("`QwenImagePipeline`, 60 blocks", many, "qwen", False),
        ("FLUX.1, guidance, 16384 tokens", "shared/flux1-16384-tokens-h200", "guidance", False),
    ):
        resident = f"{file}: {kind}, resident: step_s" if has_resident else "-"
        yield [label, f"{file}: {kind}, alone: step_s", f"{file}: {kind}, shared: step_s", resident]


def tables() -> dict[str, str]:
    """The generated parts of the page, by name."""
    ours, peer, resident = "group_offload", "diffusers", "resident"
    pairs = [f"{who}, {what}" for who in (ours, peer, resident) for what in ("step", "VRAM")]
    ways = ["default, last image", "`pack=True`", "`vram_budget=None`", "diffusers"]
    phases = ["set-up", "first image", "second image"]
    sizes = [f"{size} tokens, {what}" for size in (4096, 16384) for what in ("step", "VRAM")]
    kinds = ["resident, step", "resident, VRAM", "block level, step", "block level, VRAM", "leaf level, step"]
    peers = ["diffusers, block level", "diffusers, leaf level"]
    return {
        "cards": _table(["free VRAM", "default, first image", ways[0], "default, VRAM reserved", *ways[1:]], _cards()),
        "pipelines": _table(["pipeline", *ways, resident], _pipelines()),
        "first images": _table(["FLUX.1", *phases], _first_images()),
        "control": _table(["FLUX.1 and a ControlNet", "step", "second image", "VRAM", "RAM"], _control()),
        "models": _table(["model", *pairs], _models()),
        "budgets": _table(["`vram_budget`", "step", "VRAM"], _budgets()),
        "files": _table(["weights in the checkpoint", "step", "VRAM", "diffusers, step"], _files()),
        "packed": _table(["weights in", "step", "step, packed"], _packed()),
        "pinned": _table(["host", "step", "step, 512 MiB pinned"], _pinned()),
        "quantized": _table(["kind", *kinds, *peers], _quantized()),
        "training": _table(["a LoRA's step", "step", "VRAM"], _training()),
        "large training": _table(["weights", "step", "VRAM", "resident, step", "resident, VRAM"], _large_training()),
        "activations": _table(["activations", *sizes], _activations()),
        "gpus": _table(["FLUX.1, 22 GiB", "two GPUs", "four GPUs"], _gpus()),
        "interleaved": _table(["a step of", "one by one", "`share_passes`", resident], _interleaved()),
    }
