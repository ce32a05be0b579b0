"""One FLUX-class pipeline, resident and with its weights in files, by diffusers and by this package: memory, time, same bits?

Builds a real diffusers `FluxPipeline` (random weights, about 1 GiB in bfloat16), saves it, and runs it in each
configuration in a process of its own, so that the peak of one isn't the peak of another. Run from the repository:

    python -m examples.demo
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ARMS = {
    "resident": "resident",
    "diffusers": "diffusers, files",
    "offloaded": "group_offload, files",
}
TEXT_TOKENS = 64
NO_TEXT_ENCODERS: dict[str, Any] = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
MIB = 1 << 20


# ------------------------------------------------------------------------------------------------ the pipeline


def build(folder: Path, **config: Any) -> None:
    """A FLUX pipeline with fewer and narrower blocks than the real one. Text embeddings are passed in, so it has no text
    encoders.

    Args:
        config: what differs in the transformer's config.
    """
    import torch
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    sizes = {"num_layers": 6, "num_single_layers": 20, "num_attention_heads": 8, "joint_attention_dim": 512}
    transformer = FluxTransformer2DModel(guidance_embeds=True, **{**sizes, **config})
    vae = AutoencoderKL(
        block_out_channels=(32, 64, 64, 64),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=16,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        transformer=transformer,
        **NO_TEXT_ENCODERS,
    )
    pipe.save_pretrained(folder)


# ------------------------------------------------------------------------------------------------ one arm


def run_arm(arm: str, folder: Path, steps: int, size: int) -> dict[str, Any]:
    """Load, place and run the pipeline in this process."""
    quiet()
    import torch
    from diffusers import FluxPipeline

    if arm == "offloaded":
        import group_offload

    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    marks = {"imported": time.monotonic()}
    baseline = rss_bytes()["VmRSS"]

    pipe = FluxPipeline.from_pretrained(folder / "pipeline", dtype=torch.bfloat16, **NO_TEXT_ENCODERS)
    pipe.set_progress_bar_config(disable=True)
    marks["loaded"] = time.monotonic()
    if arm == "offloaded":
        group_offload.enable_group_offload(pipe, offload_to_disk_path=folder / "offload")
    elif arm == "diffusers":
        pipe.enable_group_offload(
            onload_device=device,
            offload_type="block_level",
            num_blocks_per_group=1,
            use_stream=device.type != "cpu",
            offload_to_disk_path=str(folder / "offload-diffusers"),
        )
    elif device.type == "cpu":
        # from_pretrained leaves the weights in a mapping of the file; resident means that they are in memory.
        for model in (pipe.transformer, pipe.vae):
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.data = tensor.data.clone()
    else:
        pipe.to(device)
    marks["placed"] = time.monotonic()
    peak_while_placing = rss_bytes()["VmHWM"]

    reset_peaks(device)
    generator = torch.Generator().manual_seed(0)
    latents = torch.empty(0)
    ends: list[float] = []

    def on_step_end(pipe: Any, step: int, timestep: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        nonlocal latents
        latents = tensors["latents"].cpu()  # which waits for the device
        ends.append(time.monotonic())
        return tensors

    start = time.monotonic()
    image = pipe(
        prompt_embeds=torch.randn(1, TEXT_TOKENS, 512, generator=generator).to(device, torch.bfloat16),
        pooled_prompt_embeds=torch.randn(1, 768, generator=generator).to(device, torch.bfloat16),
        height=size,
        width=size,
        num_inference_steps=steps,
        generator=generator,
        callback_on_step_end=on_step_end,
        output_type="pt",
    ).images
    marks["done"] = time.monotonic()
    image = image.cpu()
    peak = rss_bytes()["VmHWM"]
    pipe.image_processor.postprocess(image * 2 - 1, output_type="pil")[0].save(folder / f"image-{arm}.png")
    durations = [end - begin for begin, end in zip([start, *ends], ends, strict=False)]
    weights = sum(t.nbytes for m in (pipe.transformer, pipe.vae) for t in m.state_dict().values())
    return {
        "arm": arm,
        "marks": marks,
        "device": str(device),
        "device_name": device_name(device),
        "torch": torch.__version__,
        "num_bytes_of_weights": weights,
        "baseline_rss": baseline,
        "peak_rss_while_placing": peak_while_placing,
        "peak_rss": peak,
        "peak_device": 0 if device.type == "cpu" else torch.accelerator.max_memory_allocated(),
        "seconds_a_step": sorted(durations[1:])[len(durations[1:]) // 2],
        "seconds_first_step": durations[0],
        "is_finite": bool(torch.isfinite(latents).all() and torch.isfinite(image).all()),
        "digest": digest(latents) + digest(image),
    }


def digest(tensor: Any) -> str:
    import torch

    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def rss_bytes() -> dict[str, int]:
    """This process's memory in RAM now (VmRSS), and the most there was (VmHWM)."""
    return read_status("self", ("VmRSS", "VmHWM"))


def read_status(pid: str | int, names: tuple[str, ...]) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) * 1024 for name in names}


def reset_peaks(device: Any) -> None:
    import torch

    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from VmRSS
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()


def device_name(device: Any) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name()
    if device.type != "cpu":
        return str(device)
    models = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    num_threads = torch.get_num_threads()
    return f"{models[0] if models else platform.processor()}, {num_threads} thread{'s' if num_threads > 1 else ''}"


def quiet() -> None:
    """diffusers and transformers speak of what this demo leaves out on purpose."""
    import diffusers
    import transformers

    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()


# ------------------------------------------------------------------------------------------------ all arms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("demo-output"), help="where everything is written")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--size", type=int, default=256, help="width and height of the image, in pixels")
    parser.add_argument("--arms", default=",".join(ARMS), help=f"of {', '.join(ARMS)}")
    parser.add_argument("--trace", type=Path, help="write the memory of each arm over time to this file (CPU only)")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps < 2:
        parser.error("--steps: at least 2, because the first step is not like the others")
    arms = args.arms.split(",")
    if unknown := set(arms) - set(ARMS):
        parser.error(f"--arms: {sorted(unknown)} not known")

    if args.part == "build":
        quiet()
        build(args.folder / "pipeline")
        return 0
    if args.part:
        result = run_arm(args.part, args.folder, args.steps, args.size)
        (args.folder / f"{args.part}.json").write_text(json.dumps(result))
        return 0

    args.folder.mkdir(parents=True, exist_ok=True)
    for name in ("offload", "offload-diffusers"):
        shutil.rmtree(args.folder / name, ignore_errors=True)
    say(f"Building a FLUX pipeline with random weights in {args.folder / 'pipeline'} ...")
    in_child(args, "build")
    results, traces = [], {}
    for arm in arms:
        say(f"Running it: {ARMS[arm]} ...")
        traces[arm] = in_child(args, arm)
        results.append(json.loads((args.folder / f"{arm}.json").read_text()))
    print()
    print(table(results))
    if args.trace is not None:
        write_trace(args.trace, results, traces, args)
    is_equal = all(result["digest"] == results[0]["digest"] for result in results)
    return 0 if is_equal and all(result["is_finite"] for result in results) else 1


def in_child(args: argparse.Namespace, part: str) -> list[tuple[float, int]]:
    """Run one part in a process of its own. Returns its memory over time: (seconds, bytes)."""
    command = [sys.executable, str(Path(__file__).resolve()), "--part", part, "--folder", str(args.folder)]
    command += ["--steps", str(args.steps), "--size", str(args.size)]
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", **os.environ, "PYTHONPATH": path}
    child = subprocess.Popen(command, env=environment)
    samples: list[tuple[float, int]] = []
    done = threading.Event()
    sampler = threading.Thread(target=sample, args=(child.pid, samples, done.wait))
    sampler.start()
    try:
        code = child.wait()
    except BaseException:
        child.terminate()
        child.wait()
        raise
    finally:
        done.set()
        sampler.join()
    if code:
        raise SystemExit(f"{' '.join(command)} ended with exit code {code}")
    return samples


def sample(pid: int, samples: list[tuple[float, int]], wait: Callable[[float], bool]) -> None:
    while not wait(0.05):
        try:
            rss = read_status(pid, ("VmRSS",))["VmRSS"]
        except (OSError, KeyError):  # it has ended
            return
        samples.append((time.monotonic(), rss))


def table(results: list[dict[str, Any]]) -> str:
    on_cpu = results[0]["device"] == "cpu"
    rows = [("", "peak memory", "setting up", "time a step", "bit-equal")]
    if not on_cpu:
        rows = [("", "peak device", "peak RAM", "time a step", "bit-equal")]
    for result in results:
        first = result["peak_rss"] if on_cpu else result["peak_device"]
        second = (
            result["peak_rss_while_placing"] if on_cpu else max(result["peak_rss"], result["peak_rss_while_placing"])
        )
        is_equal = result["digest"] == results[0]["digest"]
        rows.append(
            (
                ARMS[result["arm"]],
                f"{first / MIB:,.0f} MiB",
                f"{second / MIB:,.0f} MiB",
                f"{result['seconds_a_step']:.3f} s",
                "-" if result is results[0] else "yes" if is_equal else "NO",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for first, *rest in rows:
        cells = [f"{first:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True))]
        lines.append("  ".join(cells))
    lines.insert(1, "-" * len(lines[0]))
    baseline = max(result["baseline_rss"] for result in results)
    lines += [
        "",
        f"{results[0]['device_name']}, torch {results[0]['torch']}, weights of {weights(results[0])} in bfloat16.",
    ]
    if on_cpu:
        lines += [
            f"Memory is the process's peak in RAM while it makes the image; {baseline / MIB:,.0f} MiB of it are Python, torch",
            "and diffusers. Setting up is the peak before that: pages of the checkpoint count until they are let go.",
            "No accelerator was used, so the times say nothing about one: docs/benchmarks.md has those.",
        ]
    lines.append("Bit-equal: the final latents and the image, compared by SHA-256.")
    if not all(result["is_finite"] for result in results):
        lines.append("The output is not finite.")
    return "\n".join(lines)


def weights(result: dict[str, Any]) -> str:
    return f"{result['num_bytes_of_weights'] / MIB:,.0f} MiB"


def write_trace(path: Path, results: list[dict[str, Any]], traces: dict[str, Any], args: argparse.Namespace) -> None:
    arms = {}
    for result in results:
        start, end = result["marks"]["imported"], result["marks"]["done"]
        samples = [(at, rss) for at, rss in traces[result["arm"]] if start <= at <= end]
        arms[result["arm"]] = {
            "label": ARMS[result["arm"]],
            "marks": {name: round(at - start, 3) for name, at in result["marks"].items()},
            "seconds": [round(at - start, 2) for at, _ in samples],
            "mib": [rss // MIB for _, rss in samples],
            "result": {key: value for key, value in result.items() if key not in ("marks", "arm")},
        }
    about = {"date": time.strftime("%Y-%m-%d"), "steps": args.steps, "size": args.size, "arms": arms}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(about) + "\n")


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
