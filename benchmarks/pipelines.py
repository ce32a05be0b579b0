"""The pipelines that benchmarks run, with random weights: their models, how they are put together and called."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from models import (
    SMALL,
    ClipText,
    Flux,
    Model,
    T5Encoder,
    Umt5Encoder,
    VaeDecode,
    Wan,
    WanVaeDecode,
    make_model,
)

PROMPT = "a lighthouse in the fog"
SECOND_EXPERT = 1000
"""The number of the second transformer's first weight: the two are told apart by what they compute."""


class Pipeline(ABC):
    """A pipeline, and what it is asked for."""

    product: ClassVar[str]
    """What a call makes, for people."""
    denoisers: ClassVar[tuple[str, ...]]
    """The models that run in denoising steps, in the order in which they take turns."""
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

    @abstractmethod
    def call(self, pipe: Any, num_steps: int, on_step_end: Callable[..., Any]) -> torch.Tensor:
        """One image or video."""


class FluxImage(Pipeline):
    """diffusers' `FluxPipeline`: CLIP-L, T5-XXL with half of its blocks, 4 + 8 of the transformer's 19 + 38, and the VAE."""

    product = "image"
    denoisers = ("transformer",)
    is_measured_alone = True

    def __init__(self, *, small: bool) -> None:
        if small:
            self.models = {
                "text_encoder": ClipText(num_layers=2, hidden_size=32, num_heads=2, vocab_size=100, num_tokens=16),
                "text_encoder_2": SMALL["t5-xxl"],
                "transformer": replace(SMALL["flux"], name="flux1", num_double=2, num_single=3, num_tokens=16),
                "vae": VaeDecode(channels=(32, 32, 64, 64), latent_channels=16, has_quant_conv=False, size=8),
            }
            return
        self.models = {
            "text_encoder": ClipText(),
            "text_encoder_2": T5Encoder(num_layers=12),
            "transformer": Flux(num_double=4, num_single=8),
            "vae": VaeDecode(latent_channels=16, has_quant_conv=False),
        }

    def assemble(self, modules: Mapping[str, Any]) -> Any:
        from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

        return FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(),
            tokenizer=_tokenizer(self.models["text_encoder"]),
            tokenizer_2=_tokenizer(self.models["text_encoder_2"]),
            **modules,
        )

    def call(self, pipe: Any, num_steps: int, on_step_end: Callable[..., Any]) -> torch.Tensor:
        vae = self.models["vae"]
        assert isinstance(vae, VaeDecode)
        images: torch.Tensor = pipe(
            prompt=PROMPT,
            height=8 * vae.size,
            width=8 * vae.size,
            num_inference_steps=num_steps,
            max_sequence_length=pipe.tokenizer_2.model_max_length,
            generator=torch.Generator().manual_seed(0),
            callback_on_step_end=on_step_end,
            output_type="pt",
        ).images
        return images


class WanVideo(Pipeline):
    """diffusers' `WanPipeline` as Wan 2.2 uses it: one transformer for the first half of the noise, another for the rest.

    UMT5-XXL with half of its blocks, 10 of the 40 blocks of each transformer, and the VAE; 17 frames of 480 x 832 pixels.
    """

    product = "video"
    denoisers = ("transformer", "transformer_2")
    is_measured_alone = False

    def __init__(self, *, small: bool) -> None:
        if small:
            sizes: dict[str, Any] = {"num_frames": 2, "height": 8, "width": 8}
            expert: dict[str, Any] = {"num_layers": 3, "num_heads": 4, "head_dim": 32, "ffn_dim": 256, "text_dim": 64}
            expert |= {"freq_dim": 32, "num_text_tokens": 16}
            encoder = SMALL["umt5-xxl"]
            vae = WanVaeDecode(base_channels=8, **sizes)
        else:
            sizes = {"num_frames": 5}
            expert = {"num_layers": 10}
            encoder = Umt5Encoder(num_layers=12)
            vae = WanVaeDecode(**sizes)
        self.models = {
            "text_encoder": encoder,
            "transformer": Wan(**expert, **sizes),
            "transformer_2": Wan(**expert, **sizes, first_number=SECOND_EXPERT),
            "vae": vae,
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
        vae = self.models["vae"]
        assert isinstance(vae, WanVaeDecode)
        frames: torch.Tensor = pipe(
            prompt=PROMPT,
            height=8 * vae.height,
            width=8 * vae.width,
            num_frames=4 * (vae.num_frames - 1) + 1,
            num_inference_steps=num_steps,
            guidance_scale=1.0,
            max_sequence_length=pipe.tokenizer.model_max_length,
            generator=torch.Generator().manual_seed(0),
            callback_on_step_end=on_step_end,
            output_type="pt",
        ).frames
        return frames


PIPELINES: dict[str, type[FluxImage] | type[WanVideo]] = {"flux": FluxImage, "wan": WanVideo}


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
