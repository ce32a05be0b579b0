"""The support matrix of docs/compatibility.md is about what is installed, and some classes of the matrix run each time."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import diffusers
import pytest
import torch
import transformers
from torch import nn

from . import page
from .arms import ARMS, NotApplicable, Subject
from .case import Case
from .cases import CASES, FAMILIES, NOT_RUN

QUICK = [
    "DiTTransformer2DModel",  # calls a part of a block
    "AutoencoderKLMiniMaxH3Audio",  # a processor reads the weight of a layer
    "T2IAdapter",
    "UNet2DConditionModel",
    "WanTransformer3DModel",
    "CLIPTextModel",
]

READERS = [
    "VQModel",
    "HunyuanDiT2DModel",
    "AutoencoderSAME",  # the others have methods that compute with weights of modules that nobody calls
    "ConsistencyDecoderVAE",
    "MMAudioVAE",
]

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


of_that_version = pytest.mark.skipif(
    diffusers.__version__ != page.version(), reason="the page is about another version"
)


@of_that_version
def test_no_class_is_forgotten() -> None:
    installed = {*of_diffusers(), *of_transformers()}
    assert CASES.keys() | NOT_RUN.keys() == installed
    assert page.classes() == installed


@of_that_version
def test_nothing_on_the_page_fails() -> None:
    assert "FAILS" not in page.shown().partition("### ")[2]


def test_classes_have_one_case() -> None:
    assert len(CASES) == sum(map(len, FAMILIES.values()))
    assert not CASES.keys() & NOT_RUN.keys()


@of_that_version
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("name", QUICK)
def test_class(name: str, tmp_path: Path) -> None:
    """Hazard: a class of diffusers reads weights in its own way (`AutoencoderKLMiniMaxH3Audio`'s processor)."""
    subject = Subject.of(CASES[name])
    for arm, run in ARMS.items():
        (tmp_path / arm).mkdir()
        if arm == "LoRA" and not hasattr(subject.resident, "add_adapter"):
            with pytest.raises(NotApplicable, match="takes no LoRA"):
                run(subject, tmp_path / arm)
        else:
            run(subject, tmp_path / arm)


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32, "state_size": 4}
MAMBA = Case("MambaModel", SIZES, lambda: {"input_ids": torch.arange(6)[None]}, library="transformers")


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("case", [*(CASES[name] for name in READERS), MAMBA], ids=lambda case: case.name)
def test_a_class_that_reads_its_children(case: Case, tmp_path: Path) -> None:
    """Nothing is read where it rests: a device could not read it there. Hazard: a module reads a child's weight without
    calling it (diffusers #14551): `VQModel`, Mamba."""
    subject = Subject.of(case)
    for arm in ("RAM, blocks", "RAM, layers", "group files"):
        ARMS[arm](subject, tmp_path)


def test_an_arm_sees_other_bits(tmp_path: Path) -> None:
    subject = Subject.of(CASES["T2IAdapter"])
    with torch.no_grad():
        next(subject.resident.parameters()).mul_(1.5)
    for arm, run in ARMS.items():
        if arm in ("RAM, blocks", "RAM, layers", "group files"):
            with pytest.raises(AssertionError, match="differs"):
                run(subject, tmp_path)
