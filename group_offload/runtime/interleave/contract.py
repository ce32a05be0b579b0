"""Whose forwards may share passes: what they have to be, and which classes are known to be that.

[Note: The contract of shared passes]
Forwards of a model share passes if each is a function of its inputs and the weights, in `eval` mode, under `torch.no_grad()`:

- its outputs depend on nothing else that may change between two calls: no state that it keeps, no random numbers, no clock;
- it leaves inputs, buffers, attributes and context variables as they are, and returns tensors of its own;
- it waits for no other thread, and holds no lock beyond the call of a module inside of it.

The classes below were tried with that by the matrix of tests. For others the user says so, with `interleave_forwards=True`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ...config import OffloadConfig

_DENOISERS = """
AceStepTransformer1DModel AllegroTransformer3DModel AnyFlowFARTransformer3DModel AnyFlowTransformer3DModel
AuraFlowTransformer2DModel BriaFibo2Transformer2DModel BriaFiboTransformer2DModel BriaTransformer2DModel
ChromaTransformer2DModel ChronoEditTransformer3DModel CogVideoXTransformer3DModel CogView3PlusTransformer2DModel
CogView4Transformer2DModel ConsisIDTransformer3DModel CosmosTransformer3DModel DiTTransformer2DModel
DreamLiteTransformer2DModel DreamLiteUNetModel EasyAnimateTransformer3DModel ErnieImageTransformer2DModel
Flux2Transformer2DModel Flux3Transformer2DModel FluxTransformer2DModel GlmImageTransformer2DModel HeliosTransformer3DModel
HiDreamImageTransformer2DModel HunyuanDiT2DModel HunyuanImageTransformer2DModel HunyuanVideo15Transformer3DModel
HunyuanVideoFramepackTransformer3DModel HunyuanVideoTransformer3DModel I2VGenXLUNet Ideogram4Transformer2DModel
JoyImageEditPlusTransformer3DModel JoyImageEditTransformer3DModel Kandinsky3UNet Kandinsky5Transformer3DModel
Kandinsky6SRTransformer3DModel Kandinsky6Transformer3DModel Krea2Transformer2DModel LTX2VideoTransformer3DModel
LTXVideoTransformer3DModel LatteTransformer3DModel LongCatAudioDiTTransformer LongCatImageTransformer2DModel
Lumina2Transformer2DModel LuminaNextDiT2DModel MiniMaxH3Transformer3DModel MiniMaxMusic3Transformer1DModel
MochiTransformer3DModel MotifVideoTransformer3DModel NucleusMoEImageTransformer2DModel OvisImageTransformer2DModel
PRXTransformer2DModel PixArtTransformer2DModel PriorTransformer QwenImage21Transformer2DModel QwenImageTransformer2DModel
SD3Transformer2DModel SanaTransformer2DModel SanaVideoTransformer3DModel SanaWMTransformer3DModel SkyReelsV2Transformer3DModel
StableAudio3DiTModel StableAudioDiTModel StableCascadeUNet UNet1DModel UNet2DConditionModel UNet2DModel UNet3DConditionModel
UNetMotionModel UNetSpatioTemporalConditionModel WanAnimateTransformer3DModel WanTransformer3DModel WanVACETransformer3DModel
ZImageTransformer2DModel
"""
_LIBRARIES = frozenset(["diffusers", "peft", "torch", "transformers"])
DENOISERS = ("transformer", "unet", "controlnet", "prior", "decoder_unet")
"""How the names of those models in a pipeline begin that run in each step."""
LISTED = frozenset(f"diffusers.{name}" for name in _DENOISERS.split())
"""Classes, by their package and name. A subclass may do anything, so it is no such class."""


def is_function(config: OffloadConfig, root: nn.Module) -> bool:
    """Whether forwards of a module are known, or said, to be functions of their inputs and the weights."""
    name = f"{type(root).__module__.partition('.')[0]}.{type(root).__qualname__}"
    return config.interleave_forwards is True or (name in LISTED and _is_whole(root))


def _modules_of(forward: Any) -> Iterator[str]:
    """Where a function, and what it wraps, were written. `functools.wraps` copies `__module__`, but no globals."""
    while forward is not None:
        yield forward.__module__
        yield getattr(forward, "__globals__", {}).get("__name__", forward.__module__)
        forward = getattr(forward, "__wrapped__", None)


def _is_whole(root: nn.Module) -> bool:
    """Whether all code that a forward of a listed class runs is of the libraries: no class of yours is inside of it, no forward
    was replaced, and no attention processor is yours."""
    kinds = {type(module) for module in root.modules()}
    parts = [type(each) for module in root.modules() if (each := module.__dict__.get("processor")) is not None]
    modules = [part.__module__ for part in (*kinds, *parts)]
    modules += [name for kind in kinds for name in _modules_of(kind.forward)]
    return all(name.partition(".")[0] in _LIBRARIES for name in modules)
