"""What is installed: the model classes that diffusers exports, and those of transformers that its pipelines use."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import diffusers
import transformers
from torch import nn

_IMPORTS = re.compile(r"^\s*from transformers import (\([^)]*\)|[^(\n]*)$", re.MULTILINE)


def of_diffusers() -> list[str]:
    """The names of all modules that `diffusers` exports, in alphabetical order."""
    return [name for name in sorted(dir(diffusers)) if _is_module(getattr(diffusers, name))]


def of_transformers() -> list[str]:
    """The names of all models that a pipeline of diffusers imports from `transformers`, in alphabetical order.

    Classes that a pipeline only derives another class from (`CLIPPreTrainedModel`) are none.
    """
    names: set[str] = set()
    for folder in ("pipelines", "modular_pipelines"):
        for path in (Path(diffusers.__file__).parent / folder).rglob("*.py"):
            for imported in _IMPORTS.findall(path.read_text()):
                names.update(re.findall(r"\w+", imported))
    return [
        name
        for name in sorted(names)
        if _is_module(getattr(transformers, name, None)) and not name.endswith("PreTrainedModel")
    ]


def _is_module(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, nn.Module)
