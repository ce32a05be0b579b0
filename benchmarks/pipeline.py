"""A whole FLUX pipeline: is the device's peak the need of its largest model, or the sum of all of them?

    python benchmarks/pipeline.py                     all arms, results in benchmarks/results/
    python benchmarks/pipeline.py --small             tiny models, on the CPU too: does it run?
    python benchmarks/pipeline.py --table FILE.json   a result as Markdown tables

diffusers' `FluxPipeline`, from two text encoders to the decoded image, with random weights: CLIP-L, T5-XXL with half of
its blocks, the transformer with 4 + 8 of its 19 + 38 blocks, and a VAE of FLUX.1's size. Each arm is a process of its
own, as in weights.py, and makes two images: the first while the engine learns, the second as all later ones. Then each
model runs alone in a process of its own, under this package: that is what it needs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from arms import ROOT, apply_function
from machine import (
    default_device,
    device_peak,
    device_reserved,
    fix_algorithms,
    forget_device_peak,
    measure_machine,
    process_memory,
    sha256,
    synchronize,
)
from models import ClipText, Flux, Model, T5Encoder, VaeDecode, make_inputs, make_model, warm_up
from processes import Relay, say, serve
from tables import gib, markdown, seconds

PROMPT = "a lighthouse in the fog"
BLOCK: dict[str, Any] = {"offload_type": "block_level", "num_blocks_per_group": 1}
LEAF: dict[str, Any] = {"offload_type": "leaf_level"}
STREAM = {"use_stream": True}
RECORDED = {"use_stream": True, "record_stream": True}

ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "resident": ("resident", {}),
    "diffusers block+stream": ("diffusers", {**BLOCK, **STREAM}),
    "diffusers leaf+stream": ("diffusers", {**LEAF, **STREAM}),
    "diffusers leaf+stream+record_stream": ("diffusers", {**LEAF, **RECORDED}),
    "ours block": ("ours", BLOCK),
    "ours block+record_stream": ("ours", {**BLOCK, **RECORDED}),
    "ours leaf": ("ours", LEAF),
    "diffusers model_cpu_offload": ("model_cpu_offload", {}),
    "diffusers block, no stream": ("diffusers", BLOCK),
}
ALONE = "ours block"
"""The arm that each model is measured alone under."""


def components(*, small: bool) -> dict[str, Model]:
    """The pipeline's models, by their names in it, with the inputs that the pipeline gives them."""
    if small:
        return {
            "text_encoder": ClipText(num_layers=2, hidden_size=32, num_heads=2, vocab_size=100, num_tokens=16),
            "text_encoder_2": T5Encoder(
                num_layers=3, d_model=64, d_ff=128, num_heads=4, d_kv=16, vocab_size=100, num_tokens=16
            ),
            "transformer": Flux(
                num_double=2,
                num_single=3,
                num_heads=4,
                head_dim=32,
                rope_dims=(8, 12, 12),
                text_dim=64,
                pooled_dim=32,
                num_tokens=16,
                num_text_tokens=16,
            ),
            "vae": VaeDecode(channels=(32, 32, 64, 64), latent_channels=16, has_quant_conv=False, size=8),
        }
    return {
        "text_encoder": ClipText(),
        "text_encoder_2": T5Encoder(num_layers=12),
        "transformer": Flux(num_double=4, num_single=8),
        "vae": VaeDecode(latent_channels=16, has_quant_conv=False),
    }


# ------------------------------------------------------------------------------------------------ the child


def run_pipeline(
    arm: str, models: Mapping[str, Model], *, device: torch.device, num_steps: int, begin: Callable[[], None]
) -> dict[str, Any]:
    """Two images. Times are seconds, sizes are bytes."""
    for model in models.values():
        warm_up(model, device)
    pipe = _make_pipeline(models, device)
    num_bytes = {
        name: sum(each.numel() * each.element_size() for each in getattr(pipe, name).parameters()) for name in models
    }
    forget_device_peak(device)
    begin()
    start = time.perf_counter()
    _place(pipe, arm, device)
    synchronize(device)
    setup = time.perf_counter() - start
    say(f"set up in {setup:.1f} s")
    forget_device_peak(device)

    ends: list[float] = []

    def on_step_end(pipe: Any, step: int, timestep: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        synchronize(device)
        ends.append(time.perf_counter())
        return tensors

    images: list[torch.Tensor] = []
    images_s: list[float] = []
    vae = models["vae"]
    assert isinstance(vae, VaeDecode)
    for _ in range(2):
        start = time.perf_counter()
        output = pipe(
            prompt=PROMPT,
            height=8 * vae.size,
            width=8 * vae.size,
            num_inference_steps=num_steps,
            max_sequence_length=pipe.tokenizer_2.model_max_length,
            generator=torch.Generator().manual_seed(0),
            callback_on_step_end=on_step_end,
            output_type="pt",
        ).images
        synchronize(device)
        images_s.append(time.perf_counter() - start)
        images.append(output)
    durations = [end - before for before, end in pairwise(ends)]
    later = durations[num_steps:]  # of the second image, without its first step, which waits for the text encoders
    peak = device_peak(device)
    result = {
        "setup_s": setup,
        "images_s": images_s,
        "step_s": statistics.median(later),
        "step_min_s": min(later),
        "step_max_s": max(later),
        "device_peak_bytes": peak,
        "device_reserved_bytes": device_reserved(device),
        **process_memory(),
        "weight_bytes": num_bytes,
    }
    say(f"images in {images_s[0]:.2f} s and {images_s[1]:.2f} s")
    if not all(bool(torch.isfinite(image).all()) for image in images):
        raise RuntimeError("The image is not finite: its hash would show nothing.")
    hashes = [sha256(image) for image in images]
    return {**result, "output_sha256": hashes[-1], "is_same_every_image": len(set(hashes)) == 1}


def run_alone(model: Model, *, device: torch.device, begin: Callable[[], None]) -> dict[str, Any]:
    """What one model needs by itself: its slots and its activations."""
    apply = apply_function("ours")
    warm_up(model, device)
    module, inputs = make_model(model, device, resident=False), make_inputs(model, device)
    num_bytes = sum(weight.numel() * weight.element_size() for weight in module.parameters())
    forget_device_peak(device)
    begin()
    handle = apply(module, device, ARMS[ALONE][1])
    for _ in range(3):
        output = model.call(module, inputs)
        synchronize(device)
    del output
    return {
        "weight_bytes": num_bytes,
        "device_peak_bytes": device_peak(device),
        "device_reserved_bytes": device_reserved(device),
        "stats": asdict(handle.stats()),
    }


def _make_pipeline(models: Mapping[str, Model], device: torch.device) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    modules = {name: make_model(model, device, resident=False) for name, model in models.items()}
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        tokenizer=_tokenizer(models["text_encoder"]),
        tokenizer_2=_tokenizer(models["text_encoder_2"]),
        **modules,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _tokenizer(model: Model) -> Any:
    """One that knows the prompt's words only: what the tokens are does not matter here."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    assert isinstance(model, ClipText | T5Encoder)
    special = ["<unk>", "<pad>"]
    vocabulary = {word: index for index, word in enumerate([*special, *PROMPT.split()])}
    # CLIP's pooled embedding is that of the end token, its last one. diffusers does not look for it in T5.
    vocabulary["<end>"] = model.vocab_size - 1
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="<end>",
        model_max_length=model.num_tokens,
    )


def _place(pipe: Any, arm: str, device: torch.device) -> None:
    engine, options = ARMS[arm]
    if engine == "resident":
        pipe.to(device)
    elif engine == "diffusers":
        pipe.enable_group_offload(onload_device=device, **options)
    elif engine == "model_cpu_offload":
        pipe.enable_model_cpu_offload(device=device)
    else:
        sys.path.insert(0, str(ROOT))
        from group_offload import enable_group_offload

        enable_group_offload(pipe, onload_device=device, **options)


@torch.no_grad()
def work(job: dict[str, Any], begin: Callable[[], None]) -> dict[str, Any]:
    """What a child process does with its job."""
    fix_algorithms()
    device, models = torch.device(job["device"]), components(small=job["small"])
    if job["component"] is not None:
        return run_alone(models[job["component"]], device=device, begin=begin)
    result = run_pipeline(job["arm"], models, device=device, num_steps=job["num_steps"], begin=begin)
    if job["measures_machine"]:
        result["machine"] = measure_machine(device)
    return result


def child_main() -> None:
    import diffusers
    import transformers
    from diffusers import FluxPipeline  # noqa: F401

    diffusers.utils.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    serve(work)


# ------------------------------------------------------------------------------------------------ the parent


def run(names: Sequence[str], options: argparse.Namespace) -> Path | None:
    """Run the arms, then each model alone. Returns the file with the results, if there are any."""
    models = components(small=options.small)
    report: dict[str, Any] = {
        "benchmark": "pipeline",
        "date": datetime.date.today().isoformat(),
        "name": "small-pipeline" if options.small else "pipeline",
        "num_steps": options.steps,
        "models": {
            name: {**asdict(model), "what": model.what, "goes_in": model.goes_in} for name, model in models.items()
        },
        "machine": None,
        "arms": {},
        "alone": {},
        "alone_arm": ALONE,
    }
    if options.device == "cpu":
        names = [name for name in names if not ARMS[name][1].get("use_stream") and "cpu_offload" not in name]
    jobs: list[tuple[str, str]] = [*(("arms", name) for name in names), *(("alone", name) for name in models)]
    path: Path | None = None
    relay = Relay(__file__, timeout=options.timeout, budget=options.budget)
    for number, (kind, name) in enumerate(jobs, 1):
        say(f"{number}/{len(jobs)} {name}{', alone' if kind == 'alone' else ''}", relay.elapsed)
        job = {
            "arm": name if kind == "arms" else None,
            "component": name if kind == "alone" else None,
            "small": options.small,
            "device": options.device,
            "num_steps": options.steps,
            "measures_machine": kind == "arms" and report["machine"] is None,
        }
        result = relay.run(job, is_last=number == len(jobs))
        report["machine"] = result.pop("machine", None) or report["machine"]
        report[kind][name] = result
        if "error" in result:
            say(result["error"])
        if report["machine"] is not None:
            path = _write(report, options.output)
    relay.end()
    say("done", relay.elapsed)
    return path


def _write(report: dict[str, Any], folder: Path) -> Path:
    device = report["machine"]["device"].lower().replace("nvidia ", "").replace(" ", "-")
    path = folder / f"{report['name']}-{device}-{report['date']}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    return path


def render_tables(report: Mapping[str, Any]) -> str:
    """A report as Markdown: the arms, then the models alone beside the pipeline."""
    return "\n\n".join(
        [" ".join(_facts(report)), markdown(list(_arm_rows(report))), markdown(list(_alone_rows(report)))]
    )


def _facts(report: Mapping[str, Any]) -> Iterator[str]:
    machine = report["machine"]
    packages = [f"{name} {machine[name]}" for name in ("torch", "diffusers", "transformers") if machine.get(name)]
    models = "; ".join(f"{name}: {model['what']}, {model['goes_in']}" for name, model in report["models"].items())
    yield f"{models}; {report['num_steps']} steps an image; one {machine['device']}, {', '.join(packages)}, {report['date']}."


def _arm_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    columns = ("step", "(min to max)", "first image", "second", "set-up", "device peak", "reserved", "RSS", "RSS peak")
    reference = report["arms"].get("resident", {}).get("output_sha256")
    yield ("", *columns, "bit-equal")
    for name, arm in report["arms"].items():
        if "step_s" not in arm:
            yield (name, arm["error"], *[""] * len(columns))
            continue
        is_equal = arm["output_sha256"] == reference and arm["is_same_every_image"]
        yield (
            name,
            f"{seconds(arm['step_s'])} s",
            f"{seconds(arm['step_min_s'])} to {seconds(arm['step_max_s'])}",
            *(f"{seconds(image)} s" for image in arm["images_s"]),
            f"{arm['setup_s']:.1f} s",
            *(gib(arm[f"{key}_bytes"]) for key in ("device_peak", "device_reserved", "rss", "rss_peak")),
            "not compared" if reference is None else "yes" if is_equal else "**no**",
        )


def _alone_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Reserved memory has no sum: one pool serves all models."""
    yield (report["alone_arm"], "weights", "device peak", "reserved")
    done = {name: alone for name, alone in report["alone"].items() if "weight_bytes" in alone}
    for name, alone in report["alone"].items():
        if name in done:
            keys = ("weight_bytes", "device_peak_bytes", "device_reserved_bytes")
            yield (f"{name} alone", *(gib(alone[key]) for key in keys))
        else:
            yield (f"{name} alone", alone["error"], "", "")
    peaks = [alone["device_peak_bytes"] or 0 for alone in done.values()]
    if peaks and any(peaks):
        yield ("the largest of them", "", gib(max(peaks)), "")
        yield ("their sum", "", gib(sum(peaks)), "")
    whole = report["arms"].get(report["alone_arm"], {})
    if "step_s" in whole:
        peaks_of_it = (gib(whole["device_peak_bytes"]), gib(whole["device_reserved_bytes"]))
        yield ("the pipeline", gib(sum(whole["weight_bytes"].values())), *peaks_of_it)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", metavar="ARM", choices=ARMS, default=list(ARMS), help="only these")
    parser.add_argument("--list", action="store_true", help="print the names of the arms")
    parser.add_argument("--small", action="store_true", help="tiny models")
    parser.add_argument("--steps", type=int, default=10, help="denoising steps an image (default 10)")
    parser.add_argument("--device", default=default_device(), help="default: the accelerator, else cpu")
    parser.add_argument("--timeout", type=float, default=150, help="seconds for each process (default 150)")
    parser.add_argument("--budget", type=float, default=1800, help="seconds for all of them (default 1800)")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--table", type=Path, metavar="FILE.json", help="print a result as Markdown; run nothing")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.steps < 2:
        parser.error("--steps: at least 2, because the first step is not timed")
    if options.child:
        child_main()
    elif options.table:
        print(render_tables(json.loads(options.table.read_text())))
    elif options.list:
        print("\n".join(ARMS))
    else:
        path = run(options.arms, options)
        if path is None:
            raise SystemExit("No arm gave a result.")
        print(render_tables(json.loads(path.read_text())))
        print(f"\n{path}", file=sys.stderr)


if __name__ == "__main__":
    main()
