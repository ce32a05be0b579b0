"""The models that benchmarks run, at their real sizes and tiny: how they are built, what goes in, how they are called.

Weights are random. Every process draws the same ones: on the device, each tensor from a seed of its own.
"""

from __future__ import annotations

import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from .machine import forget_device_peak, synchronize

SEED = 0
STAGING_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(ABC):
    """A model and its inputs. Calls in this order: `make_model`, `make_inputs`, then `call` as often as wanted."""

    name: str
    config: Mapping[str, Any]
    """The arguments that its class takes, in the words of its library."""
    sizes: Mapping[str, int]
    """The sizes of the inputs."""
    first_number: int = 0
    """The number of its first weight. Weights are drawn by number: two models that differ in this have other weights."""
    library: ClassVar[str] = "diffusers"
    class_name: ClassVar[str]
    made_of: ClassVar[str] = "{num_layers} blocks"
    """What the model is made of, for people. The names in braces are those of `config` and `sizes`."""
    takes: ClassVar[str] = "{tokens} tokens"
    """The size of the inputs, for people."""
    dtype: ClassVar[torch.dtype] = torch.bfloat16
    block_fields: ClassVar[tuple[str, ...]] = ()
    """The arguments that count its blocks, if it has blocks that are all alike."""
    has_all_arms: ClassVar[bool] = False
    """Whether the model is so large that files, checkpoints and slow ways say something."""

    def shown(self) -> dict[str, Any]:
        """The numbers that `made_of` and `takes` name."""
        return {**self.config, **self.sizes}

    @property
    def what(self) -> str:
        return self.made_of.format_map(self.shown())

    @property
    def goes_in(self) -> str:
        return self.takes.format_map(self.shown())

    @property
    def num_tokens(self) -> int:
        return self.sizes["tokens"]

    def facts(self) -> dict[str, Any]:
        """The model as a report has it."""
        tokens = {"num_tokens": self.num_tokens} if "tokens" in self.shown() else {}
        dtype = str(self.dtype).removeprefix("torch.")
        return {**asdict(self), **tokens, "what": self.what, "goes_in": self.goes_in, "dtype": dtype}

    def resized(self, name: str | None = None, **changes: Any) -> Model:
        """The same model with other arguments or other sizes of the inputs."""
        sizes = {key: changes.pop(key, value) for key, value in self.sizes.items()}
        return replace(self, name=name or self.name, config={**self.config, **changes}, sizes=sizes)

    def shallow(self) -> Model:
        """The same model with one block of each kind: its forward runs the same kernels."""
        return self.resized(**dict.fromkeys(self.block_fields, 1))

    def build(self) -> nn.Module:
        """The module. It is called where new tensors are meta tensors."""
        module_class = getattr(importlib.import_module(self.library), self.class_name)
        if self.library == "transformers":
            return module_class(module_class.config_class(**self.config))  # type: ignore[no-any-return]
        return module_class(**self.config)  # type: ignore[no-any-return]

    @abstractmethod
    def inputs(self, draw: Draw) -> dict[str, torch.Tensor]: ...

    def call(self, model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        output: torch.Tensor = model(**inputs, return_dict=False)[0]
        return output

    def make_buffers(self, model: nn.Module) -> None:  # noqa: B027
        """Give buffers their values, on the CPU: those of `build` have none. Most models have no buffers."""

    def float32_names(self, model: nn.Module) -> tuple[str, ...]:
        """Parts whose weights stay in float32, as `from_pretrained` leaves them."""
        return ()

    def is_used(self, weight: str) -> bool:
        """Whether a call needs this weight."""
        return True


class Draw:
    """Random inputs on a device, the same ones each time."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(SEED)

    def normal(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self._generator, device=self.device, dtype=self.dtype)

    def integers(self, end: int, *size: int) -> torch.Tensor:
        return torch.randint(end, size, generator=self._generator, device=self.device)


# ------------------------------------------------------------------------------------------------ transformers


class Flux(Model):
    """FLUX.1's transformer, without guidance embeddings."""

    class_name = "FluxTransformer2DModel"
    made_of = "{num_layers} + {num_single_layers} blocks"
    takes = "{tokens} image tokens and {text_tokens} text tokens"
    block_fields = ("num_layers", "num_single_layers")
    has_all_arms = True

    def inputs(self, draw: Draw) -> dict[str, torch.Tensor]:
        tokens, text_tokens, config = self.sizes["tokens"], self.sizes["text_tokens"], self.config
        side = int(tokens**0.5)
        rows = torch.arange(tokens, device=draw.device)
        image_ids = torch.stack([torch.zeros_like(rows), rows // side, rows % side], dim=1)
        return {
            "hidden_states": draw.normal(1, tokens, 64),
            "encoder_hidden_states": draw.normal(1, text_tokens, config["joint_attention_dim"]),
            "pooled_projections": draw.normal(1, config["pooled_projection_dim"]),
            "timestep": torch.full((1,), 0.5, device=draw.device, dtype=draw.dtype),
            "img_ids": image_ids.to(draw.dtype),
            "txt_ids": torch.zeros(text_tokens, 3, device=draw.device, dtype=draw.dtype),
        }


class FluxControl(Flux):
    """A ControlNet for FLUX.1, with fewer blocks of the same kinds."""

    class_name = "FluxControlNetModel"
    has_all_arms = False

    def inputs(self, draw: Draw) -> dict[str, torch.Tensor]:
        return {**super().inputs(draw), "controlnet_cond": draw.normal(1, self.sizes["tokens"], 64)}

    def call(self, model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        output: torch.Tensor = model(**inputs, return_dict=False)[0][0]
        return output


class Wan(Model):
    """The transformer of Wan 2.1 14B, text to video. Latents of 21 x 60 x 104 are 81 frames of 480 x 832 pixels."""

    class_name = "WanTransformer3DModel"
    takes = "{tokens} video tokens (latents of {frames} x {height} x {width}) and {text_tokens} text tokens"
    block_fields = ("num_layers",)
    has_all_arms = True

    @property
    def num_tokens(self) -> int:
        return self.sizes["frames"] * (self.sizes["height"] // 2) * (self.sizes["width"] // 2)

    def shown(self) -> dict[str, Any]:
        return {**self.config, **self.sizes, "tokens": self.num_tokens}

    def make_buffers(self, model: nn.Module) -> None:
        model.rope = type(model.rope)(self.config["attention_head_dim"], (1, 2, 2), 1024)  # type: ignore[operator]

    def float32_names(self, model: nn.Module) -> tuple[str, ...]:
        return tuple(model._keep_in_fp32_modules)  # type: ignore[arg-type]

    def inputs(self, draw: Draw) -> dict[str, torch.Tensor]:
        sizes = self.sizes
        return {
            "hidden_states": draw.normal(1, 16, sizes["frames"], sizes["height"], sizes["width"]),
            "timestep": torch.full((1,), 500, device=draw.device),
            "encoder_hidden_states": draw.normal(1, sizes["text_tokens"], self.config["text_dim"]),
        }


class QwenImage(Model):
    """The transformer of Qwen-Image. 4096 tokens are an image of 1024 x 1024 pixels."""

    class_name = "QwenImageTransformer2DModel"
    takes = "{tokens} image tokens and {text_tokens} text tokens"
    block_fields = ("num_layers",)

    def make_buffers(self, model: nn.Module) -> None:
        axes = list(self.config["axes_dims_rope"])  # positions are no buffers
        model.pos_embed = type(model.pos_embed)(theta=10000, axes_dim=axes, scale_rope=True)  # type: ignore[operator]

    def inputs(self, draw: Draw) -> dict[str, torch.Tensor]:
        return {
            "hidden_states": draw.normal(1, self.sizes["tokens"], self.config["in_channels"]),
            "encoder_hidden_states": draw.normal(1, self.sizes["text_tokens"], self.config["joint_attention_dim"]),
            "timestep": torch.full((1,), 0.5, device=draw.device, dtype=draw.dtype),
        }

    def call(self, model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        side = int(self.sizes["tokens"] ** 0.5)
        output: torch.Tensor = model(**inputs, img_shapes=[[(1, side, side)]], return_dict=False)[0]
        return output


class TextEncoder(Model):
    """A text encoder of transformers."""

    library = "transformers"
    block_fields = ("num_layers",)

    def inputs(self, draw: Draw) -> dict[str, torch.Tensor]:
        return {"input_ids": draw.integers(self.config["vocab_size"], 1, self.num_tokens)}


class T5Encoder(TextEncoder):
    """The encoder of T5-XXL, which FLUX.1 and SD 3 use. Its token embedding goes by two names."""

    class_name = "T5EncoderModel"


class Umt5Encoder(TextEncoder):
    """The encoder of UMT5-XXL, which Wan uses: T5-XXL with eight times the words, and positions in every block."""

    class_name = "UMT5EncoderModel"


class ClipText(TextEncoder):
    """The text encoder of CLIP ViT-L/14, which FLUX.1 and Stable Diffusion use."""

    class_name = "CLIPTextModel"
    made_of = "{num_hidden_layers} blocks"
    block_fields = ("num_hidden_layers",)

    def make_buffers(self, model: nn.Module) -> None:
        for module in model.modules():
            if "position_ids" in module._buffers:
                module._buffers["position_ids"] = torch.arange(self.num_tokens).expand(1, -1)


class ClipTextProjected(ClipText):
    """The text encoder of OpenCLIP ViT-bigG/14, the second one of Stable Diffusion XL."""

    class_name = "CLIPTextModelWithProjection"


class QwenVl(TextEncoder):
    """Qwen2.5-VL 7B, the text encoder of Qwen-Image, with the part that sees, which nothing calls."""

    class_name = "Qwen2_5_VLForConditionalGeneration"
    made_of = "{num_hidden_layers} blocks"
    block_fields = ("num_hidden_layers",)

    def build(self) -> nn.Module:
        from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

        text = {key: value for key, value in self.config.items() if key != "vision"}
        config = Qwen2_5_VLConfig(text_config=text, vision_config=dict(self.config["vision"]))
        model: nn.Module = Qwen2_5_VLForConditionalGeneration(config)
        return model

    def make_buffers(self, model: nn.Module) -> None:
        for name, module in list(model.named_modules()):
            if "inv_freq" in module._buffers:  # positions are computed by what the class was made of
                made_of: Any = getattr(module, "config", 2 * module._buffers["inv_freq"].numel())  # type: ignore[union-attr]
                model.set_submodule(name, type(module)(made_of))

    def is_used(self, weight: str) -> bool:
        return ".visual." not in weight


# ------------------------------------------------------------------------------------------------ convolutions


class UNet(Model):
    """The UNet of Stable Diffusion 1.5. A batch of two is one image with classifier-free guidance."""

    class_name = "UNet2DConditionModel"
    made_of = "channels {block_out_channels}"
    takes = "batch {batch}, latents of {sample_size} x {sample_size} and 77 text tokens"
    dtype = torch.float16

    def inputs(self, draw: Draw) -> dict[str, torch.Tensor]:
        batch, size = self.sizes["batch"], self.config["sample_size"]
        return {
            "sample": draw.normal(batch, 4, size, size),
            "timestep": torch.tensor(500, device=draw.device),
            "encoder_hidden_states": draw.normal(batch, 77, self.config["cross_attention_dim"]),
        }


class UNetXl(UNet):
    """The UNet of Stable Diffusion XL, which is told the image's size and the pooled prompt as well."""

    dtype = torch.bfloat16

    def inputs(self, draw: Draw) -> dict[str, torch.Tensor]:
        batch = self.sizes["batch"]
        pooled = self.config["projection_class_embeddings_input_dim"] - 6 * self.config["addition_time_embed_dim"]
        sizes = torch.full((batch, 6), 1024, device=draw.device, dtype=draw.dtype)
        return {**super().inputs(draw), "text_embeds": draw.normal(batch, pooled), "time_ids": sizes}

    def call(self, model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        added = {name: inputs[name] for name in ("text_embeds", "time_ids")}
        others = {name: value for name, value in inputs.items() if name not in added}
        output: torch.Tensor = model(**others, added_cond_kwargs=added, return_dict=False)[0]
        return output


class Decoder(Model):
    """`vae.decode` of an autoencoder: half of the model, and not its `forward`."""

    def call(self, model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        output: torch.Tensor = model.decode(**inputs, return_dict=False)[0]  # type: ignore[operator]
        return output

    def is_used(self, weight: str) -> bool:
        return weight.startswith(("decoder.", "post_quant_conv."))


class VaeDecode(Decoder):
    """The decoder of Stable Diffusion XL's or FLUX.1's size."""

    class_name = "AutoencoderKL"
    made_of = "AutoencoderKL, channels {block_out_channels}"
    takes = "decoding one image of {pixels} x {pixels} pixels"

    def shown(self) -> dict[str, Any]:
        pixels = self.sizes["size"] * 2 ** (len(self.config["block_out_channels"]) - 1)
        return {**self.config, "pixels": pixels}

    def inputs(self, draw: Draw) -> dict[str, torch.Tensor]:
        return {"z": draw.normal(1, self.config["latent_channels"], self.sizes["size"], self.sizes["size"])}


class WanVaeDecode(Decoder):
    """The decoder of Wan 2.1's autoencoder, one latent frame after another."""

    class_name = "AutoencoderKLWan"
    made_of = "AutoencoderKLWan, {base_dim} channels"
    takes = "decoding {all_frames} frames of {pixels_high} x {pixels_wide} pixels"

    def shown(self) -> dict[str, Any]:
        sizes = self.sizes
        frames = 4 * (sizes["frames"] - 1) + 1
        high, wide = 8 * sizes["height"], 8 * sizes["width"]
        return {**self.config, "all_frames": frames, "pixels_high": high, "pixels_wide": wide}

    def inputs(self, draw: Draw) -> dict[str, torch.Tensor]:
        return {"z": draw.normal(1, 16, self.sizes["frames"], self.sizes["height"], self.sizes["width"])}


class QwenVaeDecode(VaeDecode):
    """The decoder of Qwen-Image's autoencoder, which takes an image as a video of one frame."""

    class_name = "AutoencoderKLQwenImage"
    made_of = "AutoencoderKLQwenImage, {base_dim} channels"

    def shown(self) -> dict[str, Any]:
        return {**self.config, "pixels": 8 * self.sizes["size"]}

    def inputs(self, draw: Draw) -> dict[str, torch.Tensor]:
        return {"z": draw.normal(1, 16, 1, self.sizes["size"], self.sizes["size"])}


# ------------------------------------------------------------------------------------------------ by name


def _all() -> tuple[dict[str, Model], dict[str, Model]]:
    """The models of models.json at their sizes, and tiny. An entry says what it changes of the one that it is "like"."""
    large: dict[str, Model] = {}
    small: dict[str, Model] = {}
    changes: dict[str, dict[str, Any]] = {}
    for name, entry in json.loads(Path(__file__).with_suffix(".json").read_text()).items():
        like = large.get(entry.get("like"))
        kind = globals()[entry["kind"]] if "kind" in entry else type(like)
        config, sizes = (
            {**(getattr(like, part) if like else {}), **entry.get(part, {})} for part in ("config", "sizes")
        )
        large[name] = kind(name=entry.get("name", name), config=_with_tuples(config), sizes=sizes)
        if entry.get("small") == entry.get("like", ""):
            small[name] = small[entry["like"]]
            continue
        changes[name] = {**changes.get(entry.get("like"), {}), "name": f"small-{name}", **entry.get("small", {})}
        small[name] = large[name].resized(**_with_tuples(changes[name]))
    return large, small


def _with_tuples(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in config.items()}


# Of flux-6gib and flux-4gib, for machines without an accelerator, there is much to read and little to compute.
MODELS, SMALL = _all()
NAMES = (*MODELS, "small")


def find(
    name: str,
    *,
    small: bool = False,
    blocks: list[int] | None = None,
    tokens: int | None = None,
    frames: int | None = None,
) -> Model:
    """The model of this name, with the sizes that are given instead of its own. "small" is the small "flux".

    Raises:
        ValueError: the model has no such size.
    """
    model = (SMALL if small or name == "small" else MODELS)["flux" if name == "small" else name]
    if blocks:
        if len(blocks) != len(model.block_fields):
            raise ValueError(f"{model.name} has {len(model.block_fields)} kinds of blocks, not {len(blocks)}.")
        counts = dict(zip(model.block_fields, blocks, strict=True))
        model = model.resized(f"{model.name}-{'+'.join(map(str, blocks))}", **counts)
    for size, value in (("tokens", tokens), ("frames", frames)):
        if value is not None:
            if size not in model.sizes:
                raise ValueError(f"The inputs of {model.name} have no {size} that could be set.")
            if value != model.sizes[size]:
                model = model.resized(f"{model.name}-{value}-{size}", **{size: value})
    return model


# ------------------------------------------------------------------------------------------------ weights and inputs


def make_model(model: Model, device: torch.device, *, resident: bool, dtype: torch.dtype | None = None) -> nn.Module:
    """The module with its weights, on the device or in ordinary RAM.

    Args:
        dtype: default: the model's own.
    """
    with torch.device("meta"):
        module = model.build()
    fill(module, model, device, resident=resident, dtype=dtype or model.dtype)
    model.make_buffers(module)
    module.eval()
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            raise RuntimeError(f"The buffer {name} of {type(module).__name__} would stay uninitialised.")
        if resident:
            owner, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner), last, buffer.to(device))
    return module


def make_inputs(model: Model, device: torch.device) -> dict[str, torch.Tensor]:
    return model.inputs(Draw(device, model.dtype))


def warm_up(model: Model, device: torch.device) -> None:
    """Run the model with one block of each kind: kernels are loaded when they are first used. Leaves nothing else behind."""
    module, inputs = make_model(model.shallow(), device, resident=True), make_inputs(model, device)
    for _ in range(2):
        model.call(module, inputs)
    synchronize(device)
    del module, inputs
    forget_device_peak(device)


def fill(module: nn.Module, model: Model, device: torch.device, *, resident: bool, dtype: torch.dtype) -> None:
    """Replace the meta weights of `module` by random ones: norms' scales close to 1, all others close to 0."""
    # Page-locked memory is never given back to the system: who needs none takes none.
    staging = None if resident else torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=device.type != "cpu")
    owners: dict[nn.Parameter, list[str]] = {}  # tied weights have several names
    for name, weight in module.named_parameters(remove_duplicate=False):
        owners.setdefault(weight, []).append(name)
    float32_names = set(model.float32_names(module))
    for number, (weight, names) in enumerate(owners.items(), model.first_number):
        own_dtype = torch.float32 if set(names[0].split(".")) & float32_names else dtype
        values = torch.empty(weight.shape, dtype=own_dtype, device=device)
        is_scale = weight.ndim == 1 and names[0].endswith("weight")  # of a norm
        values.normal_(float(is_scale), 0.02, generator=torch.Generator(device).manual_seed(SEED + number))
        parameter = nn.Parameter(values if staging is None else _to_ram(values, staging), requires_grad=False)
        for name in names:
            owner, _, last = name.rpartition(".")
            module.get_submodule(owner).register_parameter(last, parameter)


def _to_ram(values: torch.Tensor, staging: torch.Tensor) -> torch.Tensor:
    """`values` in ordinary RAM. By way of a page-locked buffer, which is three times as fast."""
    if values.device.type == "cpu":
        return values
    ram = torch.empty_like(values, device="cpu")
    sources, targets = (each.view(-1).view(torch.uint8).split(staging.numel()) for each in (values, ram))
    for source, target in zip(sources, targets, strict=True):
        target.copy_(staging[: source.numel()].copy_(source))
    return ram
