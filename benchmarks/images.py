"""Images of a whole pipeline in one process: how long each part of each one takes, what moves for it, and its bits."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .arms import plan_facts
from .disk import transferred
from .machine import (
    PeakWatch,
    forget_device_peak,
    process_memory,
    say,
    sha256,
    start_device,
    synchronize,
    wait_for_output,
)
from .models import warm_up
from .pipelines import PIPELINES, Pipeline
from .processes import tell_so_far

LORA_RANK = 16


class Card:
    """The device. `card` has one that another process takes memory of."""

    def leave(self, num_bytes: int | None) -> None:
        """Let this process have so much of it. None: all."""

    def look(self) -> None:
        """Note what this process has taken of it. Called after each step."""

    def facts(self) -> dict[str, Any]:
        """What is left of it for this process, and the most that was taken since the last time."""
        return {}


class Stages:
    """How long each part of an image takes, waits for its weights included: the prompt, each step, the decoding."""

    def __init__(
        self, pipe: Any, whole: Pipeline, device: torch.device, handles: Mapping[str, Any], card: Card
    ) -> None:
        self._device, self._handles, self._card = device, handles, card
        self._model, self._start = whole.denoisers[0], 0.0
        for name in whole.denoisers:
            getattr(pipe, name).register_forward_pre_hook(partial(self._note_model, name))
        for owner, name in ((pipe, "encode_prompt"), (pipe.vae, "decode")):
            setattr(owner, name, partial(self._timed, name, getattr(owner, name)))
        # Hooks of a model run when its first weights are on their way already. The loop begins with its progress bar.
        self._progress_bar, pipe.progress_bar = pipe.progress_bar, self._begin_steps
        self.begin()

    def begin(self) -> None:
        """Of an image."""
        self.seconds: dict[str, float] = {}
        self.steps: list[dict[str, Any]] = []
        self.sent_bytes: list[int] = []
        """To the device, by each step and, last, by the decoding. The first step's is that of the text encoders, too."""
        self.outputs: dict[str, torch.Tensor] = {}
        self._sent, self._drive = self._sent_so_far(), transferred().get("read_bytes", 0)

    def end(self) -> dict[str, Any]:
        self._look()
        return {
            **self.seconds,
            "steps": [step["s"] for step in self.steps],
            "sent_bytes": self.sent_bytes,
            "drive_bytes": transferred().get("read_bytes", 0) - self._drive,
        }

    def end_step(self, pipe: Any, number: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        """The pipeline's `callback_on_step_end`."""
        step: dict[str, Any] = {"model": self._model, "s": self._now() - self._start}
        handle, before = self._handles.get(self._model), self._stats.get(self._model)
        if handle is not None:
            stats = handle.stats()
            step |= {
                "stalls": stats.stalls - before.stalls,
                "stalled_s": stats.stalled_seconds - before.stalled_seconds,
                "sent_bytes": sum(stats.bytes_onloaded.values()) - sum(before.bytes_onloaded.values()),
                "resident_bytes": stats.resident_bytes,
            }
        self.steps.append(step)
        self.outputs["latents"] = tensors["latents"]
        self._look()
        self._begin_step()
        return tensors

    def _begin_steps(self, *args: Any, **kwargs: Any) -> Any:
        bar = self._progress_bar(*args, **kwargs)
        self._begin_step()
        return bar

    def _begin_step(self) -> None:
        self._stats = {name: handle.stats() for name, handle in self._handles.items()}
        self._start = self._now()

    def _note_model(self, name: str, module: torch.nn.Module, args: Any) -> None:
        self._model = name

    def _timed(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = self._now()
        result = call(*args, **kwargs)
        self.seconds[name] = self.seconds.get(name, 0.0) + self._now() - start
        if name == "decode":
            self.outputs["image"] = result[0]  # what comes of it has few bits: random weights make a grey image
        return result

    def _now(self) -> float:
        wait_for_output(self._device)
        return time.perf_counter()

    def _look(self) -> None:
        before, self._sent = self._sent, self._sent_so_far()
        self.sent_bytes.append(self._sent - before)
        self._card.look()

    def _sent_so_far(self) -> int:
        return sum(sum(handle.stats().bytes_onloaded.values()) for handle in self._handles.values())


def pipeline_of(job: Mapping[str, Any]) -> Pipeline:
    whole = PIPELINES[job["pipeline"]](small=job["small"])
    if job.get("layers", 1) != 1:
        whole.thin_out(job["layers"])
    return whole


def place(pipe: Any, engine: str, options: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Returns this package's handles, by the names of models."""
    if engine == "resident":
        pipe.to(device)
    elif engine == "model":
        pipe.enable_model_cpu_offload(device=device)
    elif engine == "sequential":
        pipe.enable_sequential_cpu_offload(device=device)
    elif engine == "diffusers":
        pipe.enable_group_offload(onload_device=device, **options)
    else:
        from group_offload import enable_group_offload

        return dict(enable_group_offload(pipe, onload_device=device, **{"vram_budget": None, **options}))
    return {}


def make_images(job: Mapping[str, Any], begin: Callable[[], None], card: Card) -> dict[str, Any]:
    """Times are seconds, sizes are bytes. What fails is in the image's "error": the next one may come out all the same.

    Args:
        job: "pipeline", "small", "layers": the pipeline; "folder": that of its models, or None; "engine", "options": how it
            is placed; "num_steps", "num_images"; "sizes", "lora_after", "free_bytes", "breathes_bytes": what changes between
            images; "is_warmed_up": whether kernels are loaded before.
    """
    device, whole = torch.device(job["device"]), pipeline_of(job)
    start_device(device)
    if job["is_warmed_up"]:
        # Experts are alike but for the numbers of their weights.
        for model in {(type(model), model.what): model for model in whole.models.values()}.values():
            warm_up(model, device)
    pipe = whole.make(device) if job["folder"] is None else None
    forget_device_peak(device)
    begin()
    card.leave(job["free_bytes"])
    with PeakWatch(device) as setting_up:
        start = time.perf_counter()
        pipe = pipe or whole.open(Path(job["folder"]))
        handles = place(pipe, job["engine"], job["options"], device)
        synchronize(device)
        result: dict[str, Any] = {"setup_s": time.perf_counter() - start, **card.facts(), "images": []}
    say(f"set up in {result['setup_s']:.1f} s")
    stages = Stages(pipe, whole, device, handles, card)
    # From files, and on a full card, nothing comes between the set-up and a user's first image.
    with PeakWatch(device, forgets=job["is_warmed_up"] and job["folder"] is None) as running:
        for number in range(job["num_images"]):
            if job["breathes_bytes"] and number in (2, 4):
                card.leave(job["free_bytes"] + (job["breathes_bytes"] if number == 2 else 0))
            if job["sizes"]:
                whole.ask_for(job["sizes"][number % len(job["sizes"])])
            image = _make_image(pipe, whole, stages, job["num_steps"], number == job["lora_after"], device)
            image |= {**card.facts(), **allocator(device, "num_ooms", "num_alloc_retries")}
            image["resident_bytes"] = {name: handle.stats().resident_bytes for name, handle in handles.items()}
            result["images"].append(image)
            say(f"{image['s']:.2f} s{' ' * ('error' in image)}{image.get('error', {}).get('message', '')}")
            tell_so_far({**result, **process_memory()})
    result |= {
        "images_s": [image["s"] for image in result["images"]],
        "steps": stages.steps,
        "device_peak_bytes": running.allocated,
        "device_reserved_bytes": running.reserved,
        "device_peak_setup_bytes": setting_up.allocated,
        **process_memory(),
        "weight_bytes": {
            name: sum(each.numel() * each.element_size() for each in getattr(pipe, name).parameters())
            for name in whole.models
        },
        "plans": {name: _plan(handle) for name, handle in handles.items()},
    }
    hashes = [image.get("image_sha256") for image in result["images"]]
    result |= {"output_sha256": hashes[-1], "is_same_every_image": len(set(hashes)) == 1}
    if whole.decodes_tiles:
        result["tiled"] = _decode_tiles(pipe, whole, handles.get("vae"), device)
    card.leave(None)  # whoever measures the machine then needs buffers
    return result


def _make_image(
    pipe: Any, whole: Pipeline, stages: Stages, num_steps: int, has_new_lora: bool, device: torch.device
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    stages.begin()
    start = time.perf_counter()
    try:
        if has_new_lora:
            pipe.load_lora_weights(_make_lora(pipe, whole.denoisers[0]), adapter_name="one")
            found["lora_s"] = time.perf_counter() - start
            start = time.perf_counter()
        whole.call(pipe, num_steps, stages.end_step)
        synchronize(device)
        found["s"] = time.perf_counter() - start
        found |= stages.end()
        outputs = {name: output.cpu() for name, output in stages.outputs.items()}
        stages.outputs.clear()
        found |= {f"{name}_sha256": sha256(output) for name, output in outputs.items()}
        found |= {"is_finite": bool(outputs["image"].isfinite().all()), "shape": list(outputs["image"].shape)}
    except Exception as error:
        stages.outputs.clear()
        frames = traceback.extract_tb(error.__traceback__)[-14:]
        found["error"] = {
            "type": type(error).__name__,
            "message": " ".join(str(error).split())[:400],
            "where": [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames],
            **allocator(device, *(f"{name}_bytes.all.current" for name in ("allocated", "reserved", "inactive_split"))),
        }
        found = {"s": time.perf_counter() - start, **found, **stages.end()}
    return found


def allocator(device: torch.device, *names: str) -> dict[str, int]:
    """Numbers of torch's allocator. How often an allocation failed counts those that somebody caught, as cuDNN does."""
    stats = {} if device.type == "cpu" else getattr(torch, device.type).memory_stats(device)
    return {name.partition(".")[0]: stats.get(name, 0) for name in names}


def _make_lora(pipe: Any, denoiser: str) -> dict[str, torch.Tensor]:
    """A random LoRA of the attention's projections, as `load_lora_weights` takes it."""
    generator = torch.Generator().manual_seed(1)
    lora: dict[str, torch.Tensor] = {}
    for name, layer in getattr(pipe, denoiser).named_modules():
        if name.endswith(("to_q", "to_k", "to_v")):
            for side, shape in (("A", (LORA_RANK, layer.in_features)), ("B", (layer.out_features, LORA_RANK))):
                values = torch.randn(shape, generator=generator) / 20
                lora[f"{denoiser}.{name}.lora_{side}.weight"] = values.to(torch.bfloat16)
    return lora


def _plan(handle: Any) -> dict[str, Any]:
    """What a model's plan says of one forward. On the CPU compute is not measured, and nothing is foreseen."""
    details = None if handle.plan is None else handle.plan.details
    return plan_facts(handle.plan) if details is not None and details.prediction.compute_seconds else {}


def _decode_tiles(pipe: Any, whole: Pipeline, handle: Any, device: torch.device) -> dict[str, Any]:
    """Decode an image of twice the size, tile by tile, twice; the second time is measured."""
    size = 2 * whole.models["vae"].sizes["size"]
    shape = (1, whole.models["vae"].config["latent_channels"], size, size)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(device, pipe.vae.dtype)
    pipe.vae.enable_tiling()
    pipe.vae.tile_latent_min_size, pipe.vae.tile_sample_min_size = size // 4, 8 * (size // 4)
    for _ in range(2):
        before = None if handle is None else handle.stats()
        start = time.perf_counter()
        image = pipe.vae.decode(latents, return_dict=False)[0]
        synchronize(device)
        took = time.perf_counter() - start
    found: dict[str, Any] = {"s": took, "pixels": image.shape[-1], "output_sha256": sha256(image)}
    if before is not None:
        after = handle.stats()
        sent = sum(after.bytes_onloaded.values()) - sum(before.bytes_onloaded.values())
        found |= {"passes": after.passes - before.passes, "onloads": after.onloads - before.onloads, "sent_bytes": sent}
    return found
