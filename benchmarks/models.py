"""The models that benchmarks run, at their real sizes and tiny: how they are built, what goes in, how they are called.

Weights are random. Every process draws the same ones: on the device, each tensor from a seed of its own.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .machine import forget_device_peak, synchronize

SEED = 0
STAGING_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model and its inputs, as models.json has it."""

    name: str
    class_name: str
    config: Mapping[str, Any]
    """The arguments that its class takes, in the words of its library."""
    sizes: Mapping[str, int]
    """The sizes of the inputs."""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """Each is the name of a method of `Draw`, and its arguments: numbers, or the names of numbers of `shown`."""
    library: str = "diffusers"
    dtype_name: str = "bfloat16"
    method: str = "forward"
    """What is called: `decode` of an autoencoder is half of the model."""
    used: tuple[str, ...] = ("",)
    """How the names of weights begin that a call needs."""
    made_of: str = "{num_layers} blocks"
    """What the model is made of, for people. The names in braces are those of `shown`."""
    takes: str = "{tokens} tokens"
    """The size of the inputs, for people."""
    block_fields: tuple[str, ...] = ()
    """The arguments that count its blocks, if it has blocks that are all alike."""
    has_all_arms: bool = False
    """Whether the model is so large that files, checkpoints and slow ways say something."""
    first_number: int = 0
    """The number of its first weight. Weights are drawn by number: two models that differ in this have other weights."""

    def shown(self) -> dict[str, Any]:
        """All numbers by name: the config's, the sizes', and what follows from them for latents of an image or a video."""
        found: dict[str, Any] = {**self.config, "frames": 1, **self.sizes}
        if "size" in found:
            found["height"] = found["width"] = found["size"]
        if "height" in found:
            found["tokens"] = found["frames"] * (found["height"] // 2) * (found["width"] // 2)
            found |= {f"{side}_pixels": 8 * found[side] for side in ("height", "width")}
            found["all_frames"] = 4 * (found["frames"] - 1) + 1
        return found

    @property
    def what(self) -> str:
        return self.made_of.format_map(self.shown())

    @property
    def goes_in(self) -> str:
        return self.takes.format_map(self.shown())

    @property
    def num_tokens(self) -> int:
        return int(self.shown()["tokens"])

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype_name)  # type: ignore[no-any-return]

    @property
    def module_class(self) -> Any:
        return getattr(importlib.import_module(self.library), self.class_name)

    def facts(self) -> dict[str, Any]:
        """The model as a report has it."""
        facts = {"name": self.name, "config": self.config, "sizes": self.sizes, "first_number": self.first_number}
        return {**facts, "what": self.what, "goes_in": self.goes_in, "dtype": self.dtype_name}

    def resized(self, name: str | None = None, **changes: Any) -> Model:
        """The same model with other arguments or other sizes of the inputs."""
        sizes = {key: changes.pop(key, value) for key, value in self.sizes.items()}
        number = changes.pop("first_number", self.first_number)
        config = {**self.config, **changes}
        return replace(self, name=name or self.name, config=config, sizes=sizes, first_number=number)

    def thinned(self, fraction: float) -> Model:
        """The same model with so much of its blocks, and one of each kind at least: its forward runs the same kernels."""
        return self.resized(**{name: max(1, round(fraction * self.config[name])) for name in self.block_fields})

    def build(self) -> nn.Module:
        """The module: its weights are meta tensors, its buffers have their values."""
        from accelerate import init_empty_weights

        config, vision = dict(self.config), self.config.get("vision")
        if vision is not None:
            del config["vision"]
            config = {"text_config": config, "vision_config": dict(vision)}
        if self.library == "transformers":
            config = {"config": self.module_class.config_class(**config)}
        with init_empty_weights(include_buffers=False):
            module: Any = self.module_class(**config)
        if self.library == "transformers":
            module.tie_weights()
        return module  # type: ignore[no-any-return]

    def call(self, module: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        called = module if self.method == "forward" else getattr(module, self.method)
        output: torch.Tensor = called(**inputs, return_dict=False)[0]
        return output


class TinyLayers(nn.Module):
    """Blocks that compute next to nothing: the time beyond the plain model is an engine's own, for each of its groups."""

    def __init__(self, num_layers: int, num_features: int) -> None:
        super().__init__()
        n = num_features
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(n, n), nn.LayerNorm(n), nn.Linear(n, n), nn.Linear(n, n)) for _ in range(num_layers)
        )

    def forward(self, x: torch.Tensor, return_dict: bool) -> tuple[torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        return (x,)


class Draw:
    """Random inputs on a device, the same ones each time."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self._model = model
        self._to: dict[str, Any] = {"device": device, "dtype": model.dtype}
        self._generator = torch.Generator(device).manual_seed(SEED)

    def all(self) -> dict[str, torch.Tensor]:
        numbers = self._model.shown()
        return {
            name: getattr(self, how)(*(numbers.get(each, each) for each in arguments))
            for name, (how, *arguments) in self._model.inputs.items()
        }

    def normal(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self._generator, **self._to)

    def integers(self, end: int, *size: int) -> torch.Tensor:
        return torch.randint(end, size, generator=self._generator, device=self._to["device"])

    def full(self, value: float, *size: int) -> torch.Tensor:
        return torch.full(size, value, **(self._to if isinstance(value, float) else {"device": self._to["device"]}))

    def range(self, begin: int, end: int) -> torch.Tensor:
        return torch.arange(begin, end, device=self._to["device"])

    def positions(self, num_tokens: int) -> torch.Tensor:
        """Rows and columns of a square image."""
        side, tokens = int(num_tokens**0.5), torch.arange(num_tokens, device=self._to["device"])
        return torch.stack([torch.zeros_like(tokens), tokens // side, tokens % side], dim=1).to(self._model.dtype)


# ------------------------------------------------------------------------------------------------ by name


def _all() -> tuple[dict[str, Model], dict[str, Model]]:
    """The models of models.json at their sizes, and tiny. An entry says what it changes of the one that it is "like"."""
    large: dict[str, Model] = {}
    small: dict[str, Model] = {}
    entries: dict[str, dict[str, Any]] = {}
    for name, entry in json.loads(Path(__file__).with_suffix(".json").read_text()).items():
        like = entries.get(entry.pop("like", None), {})
        parts = {part: {**like.get(part, {}), **entry.get(part, {})} for part in ("config", "sizes", "small")}
        entries[name] = {**like, "name": name, **entry, **parts}
        merged = {**entries[name], "config": _with_tuples(parts["config"])}
        changes = {**merged.pop("small"), "name": entry.get("small", {}).get("name", f"small-{name}")}
        large[name] = Model(**_with_tuples(merged))
        small[name] = large[name].resized(**_with_tuples(changes))
    return large, small


def _with_tuples(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in config.items()}


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


def make_model(model: Model, device: torch.device, *, resident: bool) -> nn.Module:
    """The module with its weights, on the device or in ordinary RAM."""
    module = model.build().eval()
    _fill(module, model, device, resident=resident)
    for buffer in module.buffers() if resident else ():
        buffer.data = buffer.to(device)
    return module


def make_inputs(model: Model, device: torch.device) -> dict[str, torch.Tensor]:
    return Draw(model, device).all()


def warm_up(model: Model, device: torch.device) -> None:
    """Run the model with one block of each kind: kernels are loaded when they are first used. Leaves nothing else behind."""
    module, inputs = make_model(model.thinned(0), device, resident=True), make_inputs(model, device)
    for _ in range(2):
        model.call(module, inputs)
    synchronize(device)
    del module, inputs
    forget_device_peak(device)


def _fill(module: nn.Module, model: Model, device: torch.device, *, resident: bool) -> None:
    """Replace the meta weights of `module` by random ones: norms' scales close to 1, all others close to 0."""
    # Pinned memory is never given back to the system: who needs none takes none.
    staging = None if resident else torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=device.type != "cpu")
    owners: dict[nn.Parameter, list[str]] = {}  # tied weights have several names
    for name, weight in module.named_parameters(remove_duplicate=False):
        owners.setdefault(weight, []).append(name)
    # As `from_pretrained` leaves them.
    float32_names = set(getattr(module, "_keep_in_fp32_modules", None) or ()) if model.library == "diffusers" else set()
    for number, (weight, names) in enumerate(owners.items(), model.first_number):
        dtype = torch.float32 if set(names[0].split(".")) & float32_names else model.dtype
        values = torch.empty(weight.shape, dtype=dtype, device=device)
        is_scale = weight.ndim == 1 and names[0].endswith("weight")  # of a norm
        values.normal_(float(is_scale), 0.02, generator=torch.Generator(device).manual_seed(SEED + number))
        parameter = nn.Parameter(values if staging is None else _to_ram(values, staging), requires_grad=False)
        for name in names:
            owner, _, last = name.rpartition(".")
            module.get_submodule(owner).register_parameter(last, parameter)


def _to_ram(values: torch.Tensor, staging: torch.Tensor) -> torch.Tensor:
    """`values` in ordinary RAM. By way of a pinned buffer, which is three times as fast."""
    if values.device.type == "cpu":
        return values
    ram = torch.empty_like(values, device="cpu")
    sources, targets = (each.view(-1).view(torch.uint8).split(staging.numel()) for each in (values, ram))
    for source, target in zip(sources, targets, strict=True):
        target.copy_(staging[: source.numel()].copy_(source))
    return ram
