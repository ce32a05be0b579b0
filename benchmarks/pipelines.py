"""The pipelines that benchmarks run, with random weights: their models, how they are put together and called."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from .models import MODELS, SMALL, Draw, Model, make_model

PROMPT = "a lighthouse in the fog"
SECOND_EXPERT = 1000
"""The number of the second transformer's first weight: the two are told apart by what they compute."""


class Pipeline(ABC):
    """A pipeline, and what it is asked for."""

    product: ClassVar[str] = "image"
    """What a call makes, for people."""
    denoisers: ClassVar[tuple[str, ...]] = ("transformer",)
    """The models that run in denoising steps, in the order in which they take turns."""
    decodes_tiles: ClassVar[bool] = False
    """Whether the decoding of a larger image, tile by tile, is measured after the images."""

    def __init__(self, *, small: bool) -> None:
        self.models: dict[str, Model] = self.chosen(SMALL if small else MODELS, small)
        """By their names in it, with the inputs that the pipeline gives them."""

    @abstractmethod
    def chosen(self, found: Mapping[str, Model], small: bool) -> dict[str, Model]:
        """Its models, of the large or the small ones."""

    @property
    def min_steps(self) -> int:
        """Each denoiser's first step is not among those that are timed."""
        return 2 * len(self.denoisers)

    def make(self, device: torch.device) -> Any:
        """The pipeline, its weights in ordinary RAM."""
        return self._quiet({name: make_model(model, device, resident=False) for name, model in self.models.items()})

    def open(self, folder: Path) -> Any:
        """The pipeline, its weights views of files."""
        from .weights import load

        return self._quiet({name: load(model, folder / name) for name, model in self.models.items()})

    def _quiet(self, modules: dict[str, Any]) -> Any:
        pipe = self.assemble(modules)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    @abstractmethod
    def assemble(self, modules: dict[str, Any]) -> Any: ...

    def tokenizers(self) -> dict[str, Any]:
        """Those of its text encoders, by their names in the pipeline."""
        return {
            name.replace("text_encoder", "tokenizer"): _tokenizer(model)
            for name, model in self.models.items()
            if name.startswith("text_encoder")
        }

    def ask_for(self, size: int) -> None:
        """Let the next images be `size` pixels wide and high."""
        self.models["vae"] = self.models["vae"].resized(size=size // 8)

    def thin_out(self, fraction: float) -> None:
        """Leave so much of the blocks of each model that has blocks which are all alike."""
        for name, model in self.models.items():
            counts: dict[str, Any] = {
                field: max(1, round(fraction * model.config[field])) for field in model.block_fields
            }
            self.models[name] = model.resized(**counts)

    def call(self, pipe: Any, num_steps: int, on_step_end: Callable[..., Any]) -> torch.Tensor:
        """One image or video."""
        output: torch.Tensor = pipe(
            num_inference_steps=num_steps,
            generator=torch.Generator().manual_seed(0),
            callback_on_step_end=on_step_end,
            **{"output_type": "pt", **self.arguments(pipe)},
        )[0]
        return output

    def arguments(self, pipe: Any) -> dict[str, Any]:
        """What the pipeline is told beside."""
        size = 8 * self.models["vae"].sizes["size"]
        return {"prompt": PROMPT, "height": size, "width": size}


class FluxImage(Pipeline):
    """diffusers' `FluxPipeline`: CLIP-L, T5-XXL with half of its blocks, 4 + 8 of the transformer's 19 + 38, and the VAE."""

    is_whole: ClassVar[bool] = False
    """Whether no block is left out."""

    def chosen(self, found: Mapping[str, Model], small: bool) -> dict[str, Model]:
        is_cut = not (small or self.is_whole)
        blocks = {"num_layers": 4, "num_single_layers": 8} if is_cut else {}
        if small:
            blocks = {"num_layers": 2, "num_single_layers": 3, "tokens": 16}
        return {
            "text_encoder": found["clip-l"],
            "text_encoder_2": found["t5-xxl"].resized(num_layers=12) if is_cut else found["t5-xxl"],
            "transformer": found["flux"].resized("flux1", **blocks),
            "vae": found["vae-decode"].resized(latent_channels=16, use_quant_conv=False, use_post_quant_conv=False),
        }

    def assemble(self, modules: dict[str, Any]) -> Any:
        from diffusers import FlowMatchEulerDiscreteScheduler, FluxControlNetPipeline, FluxPipeline

        kind = FluxControlNetPipeline if "controlnet" in modules else FluxPipeline
        return kind(scheduler=FlowMatchEulerDiscreteScheduler(), **self.tokenizers(), **modules)

    def arguments(self, pipe: Any) -> dict[str, Any]:
        return {**super().arguments(pipe), "max_sequence_length": self.models["text_encoder_2"].num_tokens}


class WholeFluxImage(FluxImage):
    """The same with all blocks: 24 of T5-XXL, 19 + 38 of the transformer."""

    is_whole = True


class ControlledFluxImage(WholeFluxImage):
    """diffusers' `FluxControlNetPipeline`: a ControlNet of 5 + 10 blocks runs before the transformer, 19 + 38, in each step.

    T5-XXL has half of its blocks. After the images the VAE decodes one of 2048 x 2048 pixels, tile by tile.
    """

    decodes_tiles = True

    def chosen(self, found: Mapping[str, Model], small: bool) -> dict[str, Model]:
        models = super().chosen(found, small)
        models["controlnet"] = found["flux-control"].resized(tokens=models["transformer"].sizes["tokens"])
        if not small:
            models["text_encoder_2"] = found["t5-xxl"].resized(num_layers=12)
        return models

    def arguments(self, pipe: Any) -> dict[str, Any]:
        found = super().arguments(pipe)
        shape = (1, 3, found["height"], found["width"])
        return {**found, "control_image": torch.rand(shape, generator=torch.Generator().manual_seed(1))}


class WanVideo(Pipeline):
    """diffusers' `WanPipeline` as Wan 2.2 uses it: one transformer for the first half of the noise, another for the rest.

    UMT5-XXL with half of its blocks, 10 of the 40 blocks of each transformer, and the VAE; 17 frames of 480 x 832 pixels.
    """

    product = "video"
    denoisers = ("transformer", "transformer_2")
    num_blocks: ClassVar[int] = 10
    num_text_blocks: ClassVar[int] = 12
    frames: ClassVar[int] = 5
    """Of latents."""
    guidance: ClassVar[float] = 1.0

    def chosen(self, found: Mapping[str, Model], small: bool) -> dict[str, Model]:
        frames = 2 if small else self.frames
        expert = found["wan14b"].resized("wan14b", frames=frames, num_layers=3 if small else self.num_blocks)
        text = found["umt5-xxl"] if small else found["umt5-xxl"].resized(num_layers=self.num_text_blocks)
        return {
            "text_encoder": text,
            "transformer": expert,
            "transformer_2": replace(expert, first_number=SECOND_EXPERT),
            "vae": found["wan-vae-decode"].resized(frames=frames),
        }

    def assemble(self, modules: dict[str, Any]) -> Any:
        from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline

        scheduler = FlowMatchEulerDiscreteScheduler()
        return WanPipeline(scheduler=scheduler, boundary_ratio=0.5, **self.tokenizers(), **modules)

    def ask_for(self, size: int) -> None:
        """`size` is that of the shorter side."""
        high, wide = 2 * (size // 16), 2 * (size * 26 // 15 // 16)
        self.models["vae"] = self.models["vae"].resized(height=high, width=wide)

    def arguments(self, pipe: Any) -> dict[str, Any]:
        sizes = self.models["vae"].sizes
        return {
            "prompt": PROMPT,
            "negative_prompt": PROMPT.split()[-1],
            "height": 8 * sizes["height"],
            "width": 8 * sizes["width"],
            "num_frames": 4 * (sizes["frames"] - 1) + 1,
            "guidance_scale": self.guidance,
            "max_sequence_length": pipe.tokenizer.model_max_length,
        }


class GuidedWanVideo(WanVideo):
    """The same with guidance and all 40 blocks of each transformer; 5 frames, for which the link bounds a step."""

    num_blocks = 40
    frames = 2
    guidance = 4.0


class WholeWanVideo(GuidedWanVideo):
    """The same with all of UMT5-XXL's blocks, and 9 frames."""

    num_text_blocks = 24
    frames = 3


class SdxlImage(Pipeline):
    """diffusers' `StableDiffusionXLPipeline` with guidance: CLIP-L, CLIP-G, the UNet and the VAE."""

    denoisers = ("unet",)

    def chosen(self, found: Mapping[str, Model], small: bool) -> dict[str, Model]:
        return {
            "text_encoder": found["clip-l"],
            "text_encoder_2": found["clip-g"],
            "unet": found["unet-sdxl"],
            "vae": found["vae-decode"].resized(scaling_factor=0.13025, shift_factor=None),
        }

    def assemble(self, modules: dict[str, Any]) -> Any:
        from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline

        betas = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
        scheduler = EulerDiscreteScheduler(**betas, timestep_spacing="leading", steps_offset=1)
        return StableDiffusionXLPipeline(scheduler=scheduler, add_watermarker=False, **self.tokenizers(), **modules)


class QwenImage(Pipeline):
    """diffusers' `QwenImagePipeline` with true guidance: Qwen2.5-VL, the transformer and the VAE."""

    def chosen(self, found: Mapping[str, Model], small: bool) -> dict[str, Model]:
        names = {"text_encoder": "qwen-vl", "transformer": "qwen-image", "vae": "qwen-vae-decode"}
        return {name: found[model] for name, model in names.items()}

    def assemble(self, modules: dict[str, Any]) -> Any:
        from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline

        # They have to be named, even if there are none.
        parts = {"vae": None, "text_encoder": None, "tokenizer": None, **self.tokenizers(), **modules}
        return QwenImagePipeline(scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), **parts)

    def arguments(self, pipe: Any) -> dict[str, Any]:
        return {**super().arguments(pipe), "negative_prompt": PROMPT.split()[-1], "true_cfg_scale": 4.0}


class GuidedQwenImage(QwenImage):
    """Its transformer alone, from embeddings of two prompts to latents."""

    def chosen(self, found: Mapping[str, Model], small: bool) -> dict[str, Model]:
        return {"transformer": found["qwen-image"]}

    def arguments(self, pipe: Any) -> dict[str, Any]:
        model = self.models["transformer"]
        size = 16 * int(model.num_tokens**0.5)
        draw = Draw(torch.device("cpu"), model.dtype)
        shape = (1, model.sizes["text_tokens"], model.config["joint_attention_dim"])
        prompts = [draw.normal(*shape).to(pipe._execution_device) for _ in range(2)]
        names = dict(zip(("prompt_embeds", "negative_prompt_embeds"), prompts, strict=True))
        return {**names, "true_cfg_scale": 4.0, "height": size, "width": size, "output_type": "latent"}


PIPELINES: dict[str, type[Pipeline]] = {
    "flux": FluxImage,
    "flux-control": ControlledFluxImage,
    "flux-whole": WholeFluxImage,
    "wan": WanVideo,
    "wan-guided": GuidedWanVideo,
    "wan-whole": WholeWanVideo,
    "sdxl": SdxlImage,
    "qwen": QwenImage,
    "qwen-guided": GuidedQwenImage,
}
GUIDED = {"wan": "wan-guided", "qwen": "qwen-guided"}
"""Those that call a denoiser two times in each step."""
WHOLE = {"flux": "flux-whole", "sdxl": "sdxl", "wan": "wan-whole", "qwen": "qwen"}
"""Those with all of their models and all blocks."""


def _tokenizer(model: Model) -> Any:
    """One that knows the prompt's words only: what the tokens are does not matter here."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<pad>"]
    vocabulary = {word: index for index, word in enumerate([*special, *PROMPT.split()])}
    # CLIP's pooled embedding is that of the end token, its last one. diffusers does not look for it in T5.
    vocabulary["<end>"] = model.config["vocab_size"] - 1
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="<end>",
        model_max_length=model.num_tokens,
    )
