"""The pipelines that benchmarks run, with random weights: their models, how they are put together and called."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .disk import load
from .models import MODELS, SMALL, Model, make_model

PROMPT = "a lighthouse in the fog"
PIPELINES: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
"""By name: diffusers' class and scheduler, the models and what is changed of them, and what the pipeline is told beside.

Of Wan there are 9 frames, for which the link bounds a step: its second transformer takes the second half of the noise, and
is told from the first one by what it computes. A ControlNet of 5 + 10 blocks runs before the transformer in each step.
"""


class Pipeline:
    """A pipeline, and what it is asked for."""

    def __init__(self, name: str, *, small: bool, layers: float = 1.0) -> None:
        """
        Args:
            layers: so much of the blocks of each model is left that has blocks which are all alike.
        """
        spec = PIPELINES[name]
        like = PIPELINES.get(spec.get("like"), {})
        self._spec: dict[str, Any] = {**like, **spec}
        self.models: dict[str, Model] = {}
        """By their names in it, with the inputs that the pipeline gives them."""
        for part, (model, changes) in {**like.get("models", {}), **spec["models"]}.items():
            found = (SMALL if small else MODELS)[model].resized(**changes)
            if small:
                found = found.resized(**{**like.get("small", {}), **spec.get("small", {})}.get(part, {}))
            self.models[part] = found if layers == 1 else found.thinned(layers)
        self.denoiser = "unet" if "unet" in self.models else "transformer"

    def make(self, device: torch.device, folder: Path | None) -> Any:
        """The pipeline, its weights in ordinary RAM, or views of the files of a folder."""
        import diffusers

        parts: dict[str, Any] = {}
        for name, model in self.models.items():
            parts[name] = make_model(model, device, resident=False) if folder is None else load(model, folder / name)
            if name.startswith("text_encoder"):
                parts[name.replace("text_encoder", "tokenizer")] = _tokenizer(model)
        scheduler, options = self._spec["scheduler"]
        parts["scheduler"] = getattr(diffusers, scheduler)(**options)
        pipe = getattr(diffusers, self._spec["class"])(**parts, **self._spec.get("arguments", {}))
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def ask_for(self, size: int) -> None:
        """Let the next images be `size` pixels wide and high, or videos on their shorter side."""
        if "size" in self.models["vae"].sizes:
            changes = {"size": size // 8}
        else:
            changes = {"height": 2 * (size // 16), "width": 2 * (size * 26 // 15 // 16)}
        self.models["vae"] = self.models["vae"].resized(**changes)

    def call(self, pipe: Any, num_steps: int, on_step_end: Callable[..., Any]) -> torch.Tensor:
        """One image or video."""
        sizes, told = self.models["vae"].shown(), dict(self._spec.get("told", {}))
        height, width = sizes["height_pixels"], sizes["width_pixels"]
        if "frames" in self.models["vae"].sizes:
            told["num_frames"] = sizes["all_frames"]
        if "longest_text" in self._spec:
            told["max_sequence_length"] = self.models[self._spec["longest_text"]].num_tokens
        if "controlnet" in self.models:
            told["control_image"] = torch.rand((1, 3, height, width), generator=torch.Generator().manual_seed(1))
        output: torch.Tensor = pipe(
            prompt=PROMPT,
            height=height,
            width=width,
            num_inference_steps=num_steps,
            generator=torch.Generator().manual_seed(0),
            callback_on_step_end=on_step_end,
            output_type="pt",
            **told,
        )[0]
        return output


def preload(*, pipelines: bool) -> None:
    """Import what processes need, which takes long, and let it say little."""
    import diffusers.hooks
    from diffusers import FluxTransformer2DModel  # noqa: F401

    import group_offload  # noqa: F401

    diffusers.utils.logging.set_verbosity_error()
    for spec in PIPELINES.values() if pipelines else ():
        getattr(diffusers, spec["class"])


def _tokenizer(model: Model) -> Any:
    """One that knows the prompt's words only: what the tokens are does not matter here."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(["<unk>", "<pad>", *PROMPT.split()])}
    # CLIP's pooled embedding is that of the end token, its last one. diffusers does not look for it in T5.
    vocabulary["<end>"] = model.config["vocab_size"] - 1
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "<end>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=model.num_tokens, **special)
