"""Each model class, tiny: what it is built from, and what one call takes."""

from __future__ import annotations

from ..case import Case
from . import autoencoders, controlnets, encoders, of_transformers, transformers, unets

FAMILIES: dict[str, list[Case]] = {
    "Transformers": transformers.CASES,
    "UNets": unets.CASES,
    "Autoencoders and vocoders": autoencoders.CASES,
    "ControlNets and adapters": controlnets.CASES,
    "diffusers' own encoders": encoders.CASES,
    "Encoders and language models of transformers": of_transformers.CASES,
}

CASES = {case.name: case for cases in FAMILIES.values() for case in cases}

NOT_RUN = {"ModelMixin": "the base class of all models"}
