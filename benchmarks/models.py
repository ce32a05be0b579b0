"""The models that benchmarks run, at their real sizes and tiny: how they are built, what goes in, how they are called.

Weights are random. Every process draws the same ones: on the device, each tensor from a seed of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from machine import forget_device_peak, synchronize
from torch import nn

SEED = 0
STAGING_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(ABC):
    """A model and its inputs. Calls in this order: `make_model`, `inputs`, then `call` as often as wanted."""

    name: str
    first_number: int = 0
    """Of its weights, which are drawn by number: two models that differ in this have other weights."""
    dtype: ClassVar[torch.dtype] = torch.bfloat16
    block_fields: ClassVar[tuple[str, ...]] = ()
    """The fields that count its blocks, if it has blocks that are all alike."""
    needs_transformers: ClassVar[bool] = False
    has_all_arms: ClassVar[bool] = False
    """Large enough for files, checkpoints and slow ways to say something."""

    @property
    @abstractmethod
    def what(self) -> str:
        """What it is made of, for people."""

    @property
    @abstractmethod
    def goes_in(self) -> str:
        """The size of the inputs, for people."""

    @abstractmethod
    def build(self) -> nn.Module:
        """The module. It is called where new tensors are meta tensors."""

    @abstractmethod
    def inputs(self, draw: Draw) -> dict[str, torch.Tensor]: ...

    def call(self, model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        output: torch.Tensor = model(**inputs, return_dict=False)[0]
        return output

    def shallow(self) -> Model:
        """The same with one block of each kind: its forward runs the same kernels."""
        return replace(self, **dict.fromkeys(self.block_fields, 1))

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Flux(Model):
    """FLUX.1's transformer, without guidance embeddings."""

    name: str = "flux1"
    num_double: int = 19
    num_single: int = 38
    num_heads: int = 24
    head_dim: int = 128
    rope_dims: tuple[int, int, int] = (16, 56, 56)
    text_dim: int = 4096
    pooled_dim: int = 768
    num_tokens: int = 4096
    num_text_tokens: int = 512
    block_fields: ClassVar[tuple[str, ...]] = ("num_double", "num_single")
    has_all_arms: ClassVar[bool] = True

    @property
    def what(self) -> str:
        return f"{self.num_double} + {self.num_single} blocks"

    @property
    def goes_in(self) -> str:
        return f"{self.num_tokens} image tokens and {self.num_text_tokens} text tokens"

    def build(self) -> nn.Module:
        from diffusers import FluxTransformer2DModel

        model: nn.Module = FluxTransformer2DModel(
            num_layers=self.num_double,
            num_single_layers=self.num_single,
            num_attention_heads=self.num_heads,
            attention_head_dim=self.head_dim,
            axes_dims_rope=self.rope_dims,
            joint_attention_dim=self.text_dim,
            pooled_projection_dim=self.pooled_dim,
            in_channels=64,
            guidance_embeds=False,
        )
        return model

    def inputs(self, draw: Draw) -> dict[str, torch.Tensor]:
        side = int(self.num_tokens**0.5)
        rows = torch.arange(self.num_tokens, device=draw.device)
        image_ids = torch.stack([torch.zeros_like(rows), rows // side, rows % side], dim=1)
        return {
            "hidden_states": draw.normal(1, self.num_tokens, 64),
            "encoder_hidden_states": draw.normal(1, self.num_text_tokens, self.text_dim),
            "pooled_projections": draw.normal(1, self.pooled_dim),
            "timestep": torch.full((1,), 0.5, device=draw.device, dtype=draw.dtype),
            "img_ids": image_ids.to(draw.dtype),
            "txt_ids": torch.zeros(self.num_text_tokens, 3, device=draw.device, dtype=draw.dtype),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Wan(Model):
    """The transformer of Wan 2.1 14B, text to video. Latents of 21 x 60 x 104 are 81 frames of 480 x 832 pixels."""

    name: str = "wan14b"
    num_layers: int = 40
    num_heads: int = 40
    head_dim: int = 128
    ffn_dim: int = 13824
    text_dim: int = 4096
    freq_dim: int = 256
    num_frames: int = 21
    height: int = 60
    width: int = 104
    num_text_tokens: int = 512
    block_fields: ClassVar[tuple[str, ...]] = ("num_layers",)
    has_all_arms: ClassVar[bool] = True

    @property
    def num_tokens(self) -> int:
        return self.num_frames * (self.height // 2) * (self.width // 2)

    @property
    def what(self) -> str:
        return f"{self.num_layers} blocks"

    @property
    def goes_in(self) -> str:
        size = f"{self.num_frames} x {self.height} x {self.width}"
        return f"{self.num_tokens} video tokens (latents of {size}) and {self.num_text_tokens} text tokens"

    def build(self) -> nn.Module:
        from diffusers import WanTransformer3DModel

        model: nn.Module = WanTransformer3DModel(
            num_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            attention_head_dim=self.head_dim,
            ffn_dim=self.ffn_dim,
            text_dim=self.text_dim,
            freq_dim=self.freq_dim,
        )
        return model

    def make_buffers(self, model: nn.Module) -> None:
        model.rope = type(model.rope)(self.head_dim, (1, 2, 2), 1024)  # type: ignore[operator]

    def float32_names(self, model: nn.Module) -> tuple[str, ...]:
        return tuple(model._keep_in_fp32_modules)  # type: ignore[arg-type]

    def inputs(self, draw: Draw) -> dict[str, torch.Tensor]:
        return {
            "hidden_states": draw.normal(1, 16, self.num_frames, self.height, self.width),
            "timestep": torch.full((1,), 500, device=draw.device),
            "encoder_hidden_states": draw.normal(1, self.num_text_tokens, self.text_dim),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Encoder(Model):
    """The encoder of T5-XXL, which FLUX.1 and SD 3 use. Its token embedding goes by two names."""

    name: str = "t5-xxl"
    num_layers: int = 24
    d_model: int = 4096
    d_ff: int = 10240
    num_heads: int = 64
    d_kv: int = 64
    vocab_size: int = 32128
    num_tokens: int = 512
    block_fields: ClassVar[tuple[str, ...]] = ("num_layers",)
    needs_transformers: ClassVar[bool] = True

    @property
    def what(self) -> str:
        return f"{self.num_layers} blocks"

    @property
    def goes_in(self) -> str:
        return f"{self.num_tokens} tokens"

    def build(self) -> nn.Module:
        from transformers import T5Config, T5EncoderModel

        return T5EncoderModel(T5Config(**self.config()))

    def config(self) -> dict[str, Any]:
        names = ("num_layers", "d_model", "d_ff", "num_heads", "d_kv", "vocab_size")
        return {name: getattr(self, name) for name in names} | {"feed_forward_proj": "gated-gelu", "use_cache": False}

    def inputs(self, draw: Draw) -> dict[str, torch.Tensor]:
        return {"input_ids": draw.integers(self.vocab_size, 1, self.num_tokens)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Umt5Encoder(T5Encoder):
    """The encoder of UMT5-XXL, which Wan uses: T5-XXL with eight times the words, and positions in every block."""

    name: str = "umt5-xxl"
    vocab_size: int = 256384

    def build(self) -> nn.Module:
        from transformers import UMT5Config, UMT5EncoderModel

        return UMT5EncoderModel(UMT5Config(**self.config()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipText(Model):
    """The text encoder of CLIP ViT-L/14, which FLUX.1 and Stable Diffusion use."""

    name: str = "clip-l"
    num_layers: int = 12
    hidden_size: int = 768
    num_heads: int = 12
    vocab_size: int = 49408
    num_tokens: int = 77
    block_fields: ClassVar[tuple[str, ...]] = ("num_layers",)
    needs_transformers: ClassVar[bool] = True

    @property
    def what(self) -> str:
        return f"{self.num_layers} blocks"

    @property
    def goes_in(self) -> str:
        return f"{self.num_tokens} tokens"

    def build(self) -> nn.Module:
        from transformers import CLIPTextConfig, CLIPTextModel

        return CLIPTextModel(
            CLIPTextConfig(
                num_hidden_layers=self.num_layers,
                hidden_size=self.hidden_size,
                intermediate_size=4 * self.hidden_size,
                num_attention_heads=self.num_heads,
                vocab_size=self.vocab_size,
                max_position_embeddings=self.num_tokens,
                eos_token_id=self.vocab_size - 1,
                bos_token_id=self.vocab_size - 2,
                pad_token_id=1,
            )
        )

    def make_buffers(self, model: nn.Module) -> None:
        for module in model.modules():
            if "position_ids" in module._buffers:
                module._buffers["position_ids"] = torch.arange(self.num_tokens).expand(1, -1)

    def inputs(self, draw: Draw) -> dict[str, torch.Tensor]:
        return {"input_ids": draw.integers(self.vocab_size, 1, self.num_tokens)}


# ------------------------------------------------------------------------------------------------ convolutions


@dataclass(frozen=True, slots=True, kw_only=True)
class UNet(Model):
    """The UNet of Stable Diffusion 1.5. A batch of two is one image with classifier-free guidance."""

    name: str = "unet-sd15"
    channels: tuple[int, ...] = (320, 640, 1280, 1280)
    text_dim: int = 768
    num_heads: int = 8
    batch: int = 2
    size: int = 64
    dtype: ClassVar[torch.dtype] = torch.float16

    @property
    def what(self) -> str:
        return f"channels {self.channels}"

    @property
    def goes_in(self) -> str:
        return f"batch {self.batch}, latents of {self.size} x {self.size} and 77 text tokens"

    def build(self) -> nn.Module:
        from diffusers import UNet2DConditionModel

        model: nn.Module = UNet2DConditionModel(
            sample_size=self.size,
            block_out_channels=self.channels,
            cross_attention_dim=self.text_dim,
            attention_head_dim=self.num_heads,  # the number of heads, by diffusers' name for it
        )
        return model

    def inputs(self, draw: Draw) -> dict[str, torch.Tensor]:
        return {
            "sample": draw.normal(self.batch, 4, self.size, self.size),
            "timestep": torch.tensor(500, device=draw.device),
            "encoder_hidden_states": draw.normal(self.batch, 77, self.text_dim),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class VaeDecode(Model):
    """`vae.decode` of an autoencoder of Stable Diffusion XL's or FLUX.1's size: half of the model, not its `forward`."""

    name: str = "vae-decode"
    channels: tuple[int, ...] = (128, 256, 512, 512)
    latent_channels: int = 4
    has_quant_conv: bool = True
    size: int = 128

    @property
    def what(self) -> str:
        return f"AutoencoderKL, channels {self.channels}"

    @property
    def goes_in(self) -> str:
        pixels = self.size * 2 ** (len(self.channels) - 1)
        return f"decoding one image of {pixels} x {pixels} pixels"

    def build(self) -> nn.Module:
        from diffusers import AutoencoderKL

        model: nn.Module = AutoencoderKL(
            block_out_channels=self.channels,
            down_block_types=("DownEncoderBlock2D",) * len(self.channels),
            up_block_types=("UpDecoderBlock2D",) * len(self.channels),
            layers_per_block=2,
            latent_channels=self.latent_channels,
            use_quant_conv=self.has_quant_conv,
            use_post_quant_conv=self.has_quant_conv,
            scaling_factor=0.3611,
            shift_factor=0.1159,
        )
        return model

    def inputs(self, draw: Draw) -> dict[str, torch.Tensor]:
        return {"z": draw.normal(1, self.latent_channels, self.size, self.size)}

    def call(self, model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        output: torch.Tensor = model.decode(**inputs, return_dict=False)[0]  # type: ignore[operator]
        return output

    def is_used(self, weight: str) -> bool:
        return weight.startswith(("decoder.", "post_quant_conv."))


@dataclass(frozen=True, slots=True, kw_only=True)
class WanVaeDecode(Model):
    """`vae.decode` of Wan 2.1's autoencoder, one latent frame after another: half of the model, not its `forward`."""

    name: str = "wan-vae-decode"
    base_channels: int = 96
    num_frames: int = 21
    height: int = 60
    width: int = 104

    @property
    def what(self) -> str:
        return f"AutoencoderKLWan, {self.base_channels} channels"

    @property
    def goes_in(self) -> str:
        frames = 4 * (self.num_frames - 1) + 1
        return f"decoding {frames} frames of {8 * self.height} x {8 * self.width} pixels"

    def build(self) -> nn.Module:
        from diffusers import AutoencoderKLWan

        model: nn.Module = AutoencoderKLWan(base_dim=self.base_channels)
        return model

    def inputs(self, draw: Draw) -> dict[str, torch.Tensor]:
        return {"z": draw.normal(1, 16, self.num_frames, self.height, self.width)}

    def call(self, model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        output: torch.Tensor = model.decode(**inputs, return_dict=False)[0]  # type: ignore[operator]
        return output

    def is_used(self, weight: str) -> bool:
        return weight.startswith(("decoder.", "post_quant_conv."))


# ------------------------------------------------------------------------------------------------ by name


MODELS: dict[str, Model] = {
    "flux": Flux(),
    "wan14b": Wan(),
    "unet-sd15": UNet(),
    "vae-decode": VaeDecode(),
    "t5-xxl": T5Encoder(),
    "umt5-xxl": Umt5Encoder(),
    "wan-vae-decode": WanVaeDecode(),
    # For machines without an accelerator: large to read, little to compute.
    "flux-6gib": Flux(name="flux-6gib", num_double=12, num_single=62, num_heads=12, num_tokens=16, num_text_tokens=16),
}
SMALL: dict[str, Model] = {
    "flux": Flux(
        name="small",
        num_double=3,
        num_single=6,
        num_heads=4,
        head_dim=32,
        rope_dims=(8, 12, 12),
        text_dim=64,
        pooled_dim=32,
        num_tokens=64,
        num_text_tokens=16,
    ),
    "wan14b": Wan(
        name="small-wan14b",
        num_layers=4,
        num_heads=4,
        head_dim=32,
        ffn_dim=256,
        text_dim=64,
        freq_dim=32,
        num_frames=3,
        height=8,
        width=8,
        num_text_tokens=16,
    ),
    "unet-sd15": UNet(name="small-unet-sd15", channels=(32, 32, 64, 64), text_dim=32, num_heads=2, size=16),
    "vae-decode": VaeDecode(name="small-vae-decode", channels=(32, 32, 64, 64), size=8),
    "t5-xxl": T5Encoder(
        name="small-t5-xxl", num_layers=3, d_model=64, d_ff=128, num_heads=4, d_kv=16, vocab_size=100, num_tokens=16
    ),
    "umt5-xxl": Umt5Encoder(
        name="small-umt5-xxl", num_layers=3, d_model=64, d_ff=128, num_heads=4, d_kv=16, vocab_size=100, num_tokens=16
    ),
    "wan-vae-decode": WanVaeDecode(name="small-wan-vae-decode", base_channels=8, num_frames=3, height=8, width=8),
}
SMALL["flux-6gib"] = SMALL["flux"]
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
    changes: dict[str, Any] = {}
    if blocks:
        if len(blocks) != len(model.block_fields):
            raise ValueError(f"{model.name} has {len(model.block_fields)} kinds of blocks, not {len(blocks)}.")
        changes |= dict(zip(model.block_fields, blocks, strict=True))
        changes["name"] = f"{model.name}-{'+'.join(map(str, blocks))}"
    for field, value in (("num_tokens", tokens), ("num_frames", frames)):
        if value is not None:
            if field not in model.__dataclass_fields__:
                raise ValueError(f"{model.name} has no {field} that could be set.")
            changes[field] = value
            base = changes.get("name", model.name)
            if value != getattr(model, field):
                changes["name"] = f"{base}-{value}-{field.removeprefix('num_')}"
    return replace(model, **changes)


# ------------------------------------------------------------------------------------------------ weights and inputs


def make_model(model: Model, device: torch.device, *, resident: bool) -> nn.Module:
    """The module with its weights, on the device or in ordinary RAM."""
    with torch.device("meta"):
        module = model.build().eval()
    fill(
        module,
        device,
        model.dtype,
        resident=resident,
        float32_names=model.float32_names(module),
        first_number=model.first_number,
    )
    model.make_buffers(module)
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


def fill(
    module: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    *,
    resident: bool,
    float32_names: tuple[str, ...] = (),
    first_number: int = 0,
) -> None:
    """Replace the meta weights of `module` by random ones: norms' scales close to 1, all others close to 0."""
    # Page-locked memory is never given back to the system: who needs none takes none.
    staging = None if resident else torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=device.type != "cpu")
    owners: dict[nn.Parameter, list[str]] = {}  # tied weights have several names
    for name, weight in module.named_parameters(remove_duplicate=False):
        owners.setdefault(weight, []).append(name)
    for number, (weight, names) in enumerate(owners.items(), first_number):
        values = random_values(weight.shape, own_dtype(names[0], dtype, float32_names), names[0], number, device)
        parameter = nn.Parameter(values if staging is None else _to_ram(values, staging), requires_grad=False)
        for name in names:
            owner, _, last = name.rpartition(".")
            module.get_submodule(owner).register_parameter(last, parameter)


def random_values(shape: torch.Size, dtype: torch.dtype, name: str, number: int, device: torch.device) -> torch.Tensor:
    """The values of one weight. `number` is its place among those of its model: each has a seed of its own."""
    values = torch.empty(shape, dtype=dtype, device=device)
    is_scale = len(shape) == 1 and name.endswith("weight")  # of a norm
    generator = torch.Generator(device).manual_seed(SEED + number)
    return values.normal_(float(is_scale), 0.02, generator=generator)


def own_dtype(name: str, dtype: torch.dtype, float32_names: tuple[str, ...]) -> torch.dtype:
    """The dtype of a weight in a model that is asked for in `dtype`."""
    return torch.float32 if set(name.split(".")) & set(float32_names) else dtype


def _to_ram(values: torch.Tensor, staging: torch.Tensor) -> torch.Tensor:
    """`values` in ordinary RAM. By way of a page-locked buffer, which is three times as fast."""
    if values.device.type == "cpu":
        return values
    ram = torch.empty_like(values, device="cpu")
    sources, targets = (each.view(-1).view(torch.uint8).split(staging.numel()) for each in (values, ram))
    for source, target in zip(sources, targets, strict=True):
        target.copy_(staging[: source.numel()].copy_(source))
    return ram
