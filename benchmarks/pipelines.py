"""The pipelines that benchmarks run, with random weights: their models, how they are put together and called."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from .models import MODELS, SMALL, Draw, Model, make_model

PROMPT = "a lighthouse in the fog"
SECOND_EXPERT = 1000
"""The number of the second transformer's first weight: the two are told apart by what they compute."""


class Pipeline(ABC):
    """A pipeline, and what it is asked for."""

    product: ClassVar[str]
    """What a call makes, for people."""
    denoisers: ClassVar[tuple[str, ...]]
    """The models that run in denoising steps, in the order in which they take turns."""
    decodes_tiles: ClassVar[bool] = False
    """Whether the decoding of a larger image, tile by tile, is measured after the images."""
    is_measured_alone: ClassVar[bool]
    """Whether each of its models is measured in a process of its own, too."""
    models: Mapping[str, Model]
    """By their names in it, with the inputs that the pipeline gives them."""

    @property
    def min_steps(self) -> int:
        """Each denoiser's first step is not among those that are timed."""
        return 2 * len(self.denoisers)

    def make(self, device: torch.device) -> Any:
        """The pipeline, its weights in ordinary RAM."""
        modules = {name: make_model(model, device, resident=False) for name, model in self.models.items()}
        pipe = self.assemble(modules)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    @abstractmethod
    def assemble(self, modules: Mapping[str, Any]) -> Any: ...

    def ask_for(self, size: int) -> None:
        """Let the next images be `size` pixels wide and high."""
        self.models = {**self.models, "vae": self.models["vae"].resized(size=size // 8)}

    def thin_out(self, fraction: float) -> None:
        """Leave so much of the blocks of each model that has blocks which are all alike."""

        def thinned(model: Model) -> Model:
            counts: dict[str, Any] = {
                field: max(1, round(fraction * model.config[field])) for field in model.block_fields
            }
            return model.resized(**counts)

        self.models = {name: thinned(model) for name, model in self.models.items()}

    @abstractmethod
    def call(self, pipe: Any, num_steps: int, on_step_end: Callable[..., Any]) -> torch.Tensor:
        """One image or video."""


class Image(Pipeline):
    """One that is called with a prompt and gives an image."""

    product = "image"

    def call(self, pipe: Any, num_steps: int, on_step_end: Callable[..., Any]) -> torch.Tensor:
        size = 8 * self.models["vae"].sizes["size"]
        images: torch.Tensor = pipe(
            prompt=PROMPT,
            height=size,
            width=size,
            num_inference_steps=num_steps,
            generator=torch.Generator().manual_seed(0),
            callback_on_step_end=on_step_end,
            output_type="pt",
            **self.arguments(size),
        ).images
        return images

    def arguments(self, size: int) -> dict[str, Any]:
        """What the pipeline is told beside."""
        return {}


class FluxImage(Image):
    """diffusers' `FluxPipeline`: CLIP-L, T5-XXL with half of its blocks, 4 + 8 of the transformer's 19 + 38, and the VAE."""

    denoisers = ("transformer",)
    is_measured_alone = True

    is_whole: ClassVar[bool] = False
    """Whether no block is left out."""

    def __init__(self, *, small: bool) -> None:
        found = SMALL if small else MODELS
        vae = {"latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False}
        is_cut = not (small or self.is_whole)
        blocks = {"num_layers": 4, "num_single_layers": 8} if is_cut else {}
        if small:
            blocks = {"num_layers": 2, "num_single_layers": 3, "tokens": 16}
        self.models: dict[str, Model] = {
            "text_encoder": found["clip-l"],
            "text_encoder_2": found["t5-xxl"].resized(num_layers=12) if is_cut else found["t5-xxl"],
            "transformer": found["flux"].resized("flux1", **blocks),
            "vae": found["vae-decode"].resized(**vae),
        }

    def assemble(self, modules: Mapping[str, Any]) -> Any:
        from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

        return FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(),
            tokenizer=_tokenizer(self.models["text_encoder"]),
            tokenizer_2=_tokenizer(self.models["text_encoder_2"]),
            **modules,
        )

    def arguments(self, size: int) -> dict[str, Any]:
        return {"max_sequence_length": self.models["text_encoder_2"].num_tokens}


class WholeFluxImage(FluxImage):
    """The same with all blocks: 24 of T5-XXL, 19 + 38 of the transformer."""

    is_whole = True


class ControlledFluxImage(WholeFluxImage):
    """diffusers' `FluxControlNetPipeline`: a ControlNet of 5 + 10 blocks runs before the transformer, 19 + 38, in each step.

    T5-XXL has half of its blocks. After the images the VAE decodes one of 2048 x 2048 pixels, tile by tile.
    """

    decodes_tiles = True
    is_measured_alone = False

    def __init__(self, *, small: bool) -> None:
        super().__init__(small=small)
        found = SMALL if small else MODELS
        tokens = {"tokens": self.models["transformer"].sizes["tokens"]}
        self.models = {**self.models, "controlnet": found["flux-control"].resized(**tokens)}
        if not small:
            self.models["text_encoder_2"] = found["t5-xxl"].resized(num_layers=12)

    def assemble(self, modules: Mapping[str, Any]) -> Any:
        from diffusers import FlowMatchEulerDiscreteScheduler, FluxControlNetPipeline

        return FluxControlNetPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(),
            tokenizer=_tokenizer(self.models["text_encoder"]),
            tokenizer_2=_tokenizer(self.models["text_encoder_2"]),
            **modules,
        )

    def arguments(self, size: int) -> dict[str, Any]:
        image = torch.rand(1, 3, size, size, generator=torch.Generator().manual_seed(1))
        return {**super().arguments(size), "control_image": image}


class WanVideo(Pipeline):
    """diffusers' `WanPipeline` as Wan 2.2 uses it: one transformer for the first half of the noise, another for the rest.

    UMT5-XXL with half of its blocks, 10 of the 40 blocks of each transformer, and the VAE; 17 frames of 480 x 832 pixels.
    """

    product = "video"
    denoisers = ("transformer", "transformer_2")
    is_measured_alone = False
    num_blocks: ClassVar[int] = 10
    frames: ClassVar[int] = 5
    """Of latents."""
    guidance: ClassVar[float] = 1.0

    def __init__(self, *, small: bool) -> None:
        found, frames = (SMALL, 2) if small else (MODELS, self.frames)
        expert = found["wan14b"].resized("wan14b", frames=frames, num_layers=3 if small else self.num_blocks)
        self.models = {
            "text_encoder": found["umt5-xxl"] if small else found["umt5-xxl"].resized(num_layers=12),
            "transformer": expert,
            "transformer_2": replace(expert, first_number=SECOND_EXPERT),
            "vae": found["wan-vae-decode"].resized(frames=frames),
        }

    def assemble(self, modules: Mapping[str, Any]) -> Any:
        from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline

        return WanPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(),
            tokenizer=_tokenizer(self.models["text_encoder"]),
            boundary_ratio=0.5,
            **modules,
        )

    def call(self, pipe: Any, num_steps: int, on_step_end: Callable[..., Any]) -> torch.Tensor:
        sizes = self.models["vae"].sizes
        frames: torch.Tensor = pipe(
            prompt=PROMPT,
            negative_prompt=PROMPT.split()[-1],
            height=8 * sizes["height"],
            width=8 * sizes["width"],
            num_frames=4 * (sizes["frames"] - 1) + 1,
            num_inference_steps=num_steps,
            guidance_scale=self.guidance,
            max_sequence_length=pipe.tokenizer.model_max_length,
            generator=torch.Generator().manual_seed(0),
            callback_on_step_end=on_step_end,
            output_type="pt",
        ).frames
        return frames


class GuidedWanVideo(WanVideo):
    """The same with guidance and all 40 blocks of each transformer; 5 frames, for which the link bounds a step."""

    num_blocks = 40
    frames = 2
    guidance = 4.0


class WholeWanVideo(GuidedWanVideo):
    """The same with all of UMT5-XXL's blocks, and 9 frames. A size is that of the shorter side."""

    frames = 3

    def __init__(self, *, small: bool) -> None:
        super().__init__(small=small)
        if not small:
            self.models = {**self.models, "text_encoder": MODELS["umt5-xxl"]}

    def ask_for(self, size: int) -> None:
        high, wide = 2 * (size // 16), 2 * (size * 26 // 15 // 16)
        self.models = {**self.models, "vae": self.models["vae"].resized(height=high, width=wide)}


class SdxlImage(Image):
    """diffusers' `StableDiffusionXLPipeline` with guidance: CLIP-L, CLIP-G, the UNet and the VAE."""

    denoisers = ("unet",)
    is_measured_alone = False

    def __init__(self, *, small: bool) -> None:
        found = SMALL if small else MODELS
        self.models = {
            "text_encoder": found["clip-l"],
            "text_encoder_2": found["clip-g"],
            "unet": found["unet-sdxl"],
            "vae": found["vae-decode"].resized(scaling_factor=0.13025, shift_factor=None),
        }

    def assemble(self, modules: Mapping[str, Any]) -> Any:
        from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline

        return StableDiffusionXLPipeline(
            scheduler=EulerDiscreteScheduler(
                beta_start=0.00085,
                beta_end=0.012,
                beta_schedule="scaled_linear",
                timestep_spacing="leading",
                steps_offset=1,
            ),
            tokenizer=_tokenizer(self.models["text_encoder"]),
            tokenizer_2=_tokenizer(self.models["text_encoder_2"]),
            add_watermarker=False,
            **modules,
        )


class GuidedQwenImage(Pipeline):
    """diffusers' `QwenImagePipeline` with true guidance: its transformer, from embeddings of two prompts to latents."""

    product = "image"
    denoisers = ("transformer",)
    is_measured_alone = False

    def __init__(self, *, small: bool) -> None:
        self.models = {"transformer": (SMALL if small else MODELS)["qwen-image"]}

    def assemble(self, modules: Mapping[str, Any]) -> Any:
        from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline

        scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
        return QwenImagePipeline(scheduler=scheduler, vae=None, text_encoder=None, tokenizer=None, **modules)

    def call(self, pipe: Any, num_steps: int, on_step_end: Callable[..., Any]) -> torch.Tensor:
        model = self.models["transformer"]
        size = 16 * int(model.num_tokens**0.5)
        draw = Draw(torch.device("cpu"), model.dtype)
        prompts = [draw.normal(1, model.sizes["text_tokens"], model.config["joint_attention_dim"]) for _ in range(2)]
        latents: torch.Tensor = pipe(
            prompt_embeds=prompts[0].to(pipe._execution_device),
            negative_prompt_embeds=prompts[1].to(pipe._execution_device),
            true_cfg_scale=4.0,
            height=size,
            width=size,
            num_inference_steps=num_steps,
            generator=torch.Generator().manual_seed(0),
            callback_on_step_end=on_step_end,
            output_type="latent",
        ).images
        return latents


class WholeQwenImage(Image):
    """The same from the prompts to the image: Qwen2.5-VL, the transformer and the VAE."""

    denoisers = ("transformer",)
    is_measured_alone = False

    def __init__(self, *, small: bool) -> None:
        found = SMALL if small else MODELS
        self.models = {
            "text_encoder": found["qwen-vl"],
            "transformer": found["qwen-image"],
            "vae": found["qwen-vae-decode"],
        }

    def assemble(self, modules: Mapping[str, Any]) -> Any:
        from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline

        scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
        return QwenImagePipeline(scheduler=scheduler, tokenizer=_tokenizer(self.models["text_encoder"]), **modules)

    def arguments(self, size: int) -> dict[str, Any]:
        return {"negative_prompt": PROMPT.split()[-1], "true_cfg_scale": 4.0}


PIPELINES: dict[str, type[FluxImage] | type[WanVideo]] = {
    "flux": FluxImage,
    "flux-control": ControlledFluxImage,
    "flux-whole": WholeFluxImage,
    "wan": WanVideo,
}
GUIDED: dict[str, type[GuidedWanVideo] | type[GuidedQwenImage]] = {"wan": GuidedWanVideo, "qwen": GuidedQwenImage}
"""Those that call a denoiser two times in each step."""
WHOLE: dict[str, Callable[..., Pipeline]] = {
    "flux": WholeFluxImage,
    "sdxl": SdxlImage,
    "wan": WholeWanVideo,
    "qwen": WholeQwenImage,
}
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
