"""The ways in which each class is run, and what came out. Every one ends with the resident module's bits, or raises."""

from __future__ import annotations

import copy
import logging
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import nn
from torch.nn.attention import flex_attention

from group_offload import GroupOffloadError, apply_group_offloading, from_pretrained
from group_offload.api import handle_of
from group_offload.integrations.diffusers import refuse_unsupported

from ..support.asserts import assert_at_rest, named_tensors, same_bits
from ..support.rigs import OnloadedOnly
from ..support.simulated import Laziness, SimulatedDevice, use_simulated_device
from .case import Case
from .cases import CASES

NO_LORA = "takes no LoRA"


class Differs(AssertionError):
    """An output is not the resident module's."""


class NotApplicable(Exception):
    """The class has no such thing."""


@dataclass
class Subject:
    """A case, its resident module, and what that gives."""

    case: Case
    resident: nn.Module
    expected: list[torch.Tensor]
    _on_device: tuple[list[torch.Tensor], Laziness] | None = None

    @staticmethod
    def of(case: Case) -> Subject:
        """Raises: AssertionError: the class does not run as a reference has to."""
        resident = case.make()
        expected = case.run(resident)
        assert expected, "its output has no tensor"
        assert all(map(same_bits, expected, case.run(resident))), "two calls of the resident module differ"
        assert all(bool(torch.isfinite(tensor).all()) for tensor in expected if tensor.is_floating_point()), (
            "not finite"
        )
        return Subject(case, resident, expected)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in named_tensors(self.resident))

    def on_device(self) -> tuple[list[torch.Tensor], Laziness]:
        """What the resident module gives on the simulated device, and when work may run there.

        (Kernels find other strides there than on the CPU. A class that reads tensors through numpy needs all work to run at
        once, because the simulated device sees no such read.)
        """
        if self._on_device is None:
            try:
                early = self._run_on_device("eager")
            except Exception as error:
                raise NotApplicable(
                    f"the simulated device does not run the class resident: {_first_line(error)}"
                ) from error
            try:
                is_blind = not all(map(same_bits, self._run_on_device("lazy"), early))
            except Exception:
                is_blind = True
            self._on_device = early, "eager" if is_blind else "random"
        return self._on_device

    def _run_on_device(self, laziness: Laziness) -> list[torch.Tensor]:
        device = SimulatedDevice(0, laziness)
        model = copy.deepcopy(self.resident)
        with use_simulated_device(device):
            for _, tensor in named_tensors(model):
                tensor.data = device.put(tensor.data)
            with device.running():
                outputs = self.case.run(model, device.put)
            return [device.get(tensor) for tensor in outputs]


def check(outputs: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    if len(outputs) != len(expected) or not all(map(same_bits, outputs, expected)):
        raise Differs("the output differs from the resident module's")


def run_on_cpu(case: Case, model: nn.Module, expected: list[torch.Tensor], passes: int = 2) -> None:
    """Passes on the CPU, in which no kernel may read a weight where it rests."""
    for _ in range(passes):
        with OnloadedOnly(model):
            outputs = case.run(model)
        check(outputs, expected)


def run_on_device(subject: Subject, **options: Any) -> int:
    """Passes on the simulated device, with streams. Returns the peak of its memory in bytes."""
    expected, laziness = subject.on_device()
    device = SimulatedDevice(0, laziness)
    model = copy.deepcopy(subject.resident)
    with use_simulated_device(device):
        handle = apply_group_offloading(model, "cpu", **options)
        for _ in range(3):
            with device.running(), OnloadedOnly(model):
                outputs = subject.case.run(model, device.put)
            check([device.get(tensor) for tensor in outputs], expected)
        peak = device.peak_bytes_in_use()
        device.synchronize()
        del outputs
        handle.remove()
    assert_at_rest(model, subject.resident)
    return peak


def in_ram(level: str) -> Callable[[Subject, Path], None]:
    """Weights in RAM: on the CPU, and with streams on the simulated device."""

    def run(subject: Subject, folder: Path) -> None:
        model = copy.deepcopy(subject.resident)
        handle = apply_group_offloading(model, "cpu", offload_type=level)
        run_on_cpu(subject.case, model, subject.expected)
        assert_at_rest(model, subject.resident)
        handle.remove()
        assert_at_rest(model, subject.resident)
        with suppress(NotApplicable):
            run_on_device(subject, offload_type=level)

    return run


def in_files(subject: Subject, folder: Path) -> None:
    """Weights in group files, at both levels."""
    for level in ("block_level", "leaf_level"):
        model = copy.deepcopy(subject.resident)
        handle = apply_group_offloading(model, "cpu", offload_type=level, offload_to_disk_path=folder / level)
        run_on_cpu(subject.case, model, subject.expected)
        assert {group.tier for group in handle.groups} == {"disk"}
        handle.remove()
        assert_at_rest(model, subject.resident)


def in_checkpoint(subject: Subject, folder: Path) -> None:
    """Weights stay in the file that `save_pretrained` wrote."""
    saved, cls = str(folder / "saved"), subject.case.cls
    try:
        subject.resident.save_pretrained(saved)  # type: ignore[operator]
        subject.case.run(cls.from_pretrained(saved))
    except Exception as error:
        raise NotApplicable(f"its own save_pretrained or from_pretrained fails: {_first_line(error)}") from error
    model = from_pretrained(cls, saved, onload_device="cpu", offload_to_disk_path=folder / "groups").eval()
    groups = handle_of(model).groups
    assert any("model" in group.location for group in groups), f"nothing is stored in the checkpoint: {groups}"
    run_on_cpu(subject.case, model, subject.expected)


def with_budget(subject: Subject, folder: Path) -> None:
    """Half of the weights may stay on the simulated device."""
    budget = run_on_device(subject) + subject.num_bytes // 2
    used = run_on_device(subject, vram_budget=budget)
    assert used <= budget, f"{used} bytes of device memory, with a vram_budget of {budget}"


def with_lora(subject: Subject, folder: Path) -> None:
    """An adapter that comes while the model is offloaded, is switched off, and is deleted."""
    if not hasattr(subject.case.cls, "add_adapter"):
        raise NotApplicable(NO_LORA)
    case, reference = subject.case, copy.deepcopy(subject.resident)
    if not _linear_layers(reference):
        raise NotApplicable("no linear layer")
    _adapt(reference)
    adapted = case.run(reference)
    assert not all(map(same_bits, adapted, subject.expected)), "the LoRA changes nothing"
    _delete_adapter(reference)
    unadapted = case.run(reference)
    for level in ("block_level", "leaf_level"):
        model = copy.deepcopy(subject.resident)
        handle = apply_group_offloading(model, "cpu", offload_type=level)
        run_on_cpu(case, model, subject.expected, passes=1)
        _adapt(model)
        run_on_cpu(case, model, adapted)
        _delete_adapter(model)
        run_on_cpu(case, model, unadapted, passes=1)
        handle.remove()


def _linear_layers(model: nn.Module) -> list[str]:
    """The linear layers of attentions, which a LoRA usually adapts; all of them where there are none."""
    layers = [name for name, part in model.named_modules() if type(part) is nn.Linear]
    return [name for name in layers if "to_q" in name or "q_proj" in name or "to_v" in name] or layers


def _adapt(model: nn.Module) -> None:
    from peft import LoraConfig

    torch.manual_seed(3)
    model.add_adapter(LoraConfig(r=2, target_modules=_linear_layers(model), init_lora_weights=False))  # type: ignore[operator]
    model.eval()


def _delete_adapter(model: Any) -> None:
    (model.delete_adapters if hasattr(model, "delete_adapters") else model.delete_adapter)("default")


def _first_line(error: Exception) -> str:
    if "HigherOrderOperator" in str(error):
        return "it has no flex attention"
    return re.sub(r"\(?0x[0-9a-f]+.*", "", str(error).strip().splitlines()[0])[:160]


ARMS: Mapping[str, Callable[[Subject, Path], None]] = {
    "RAM, blocks": in_ram("block_level"),
    "RAM, layers": in_ram("leaf_level"),
    "group files": in_files,
    "checkpoint": in_checkpoint,
    "budget": with_budget,
    "LoRA": with_lora,
}


@dataclass(frozen=True)
class Cell:
    """One arm of one class: the resident module's bits ("yes"), nothing to run ("no"), "refused" with a remedy, or "FAILS"."""

    outcome: str
    reason: str = ""


@dataclass(frozen=True)
class Row:
    """A class, and its cells by arm."""

    name: str
    seconds: float
    cells: dict[str, Cell]

    @property
    def has_failed(self) -> bool:
        return any(cell.outcome == "FAILS" for cell in self.cells.values())

    @property
    def is_refused(self) -> bool:
        return any(cell.outcome == "refused" for cell in self.cells.values())

    def __str__(self) -> str:
        reasons = [f"\n    {arm}: {cell.outcome}: {cell.reason}" for arm, cell in self.cells.items() if cell.reason]
        outcomes = " ".join(cell.outcome for cell in self.cells.values())
        return f"{self.name} {self.seconds:.1f} s: {outcomes}{''.join(reasons)}"


def prepare() -> None:
    """Make a process quiet and single-threaded: it runs one case at a time."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for library in (diffusers, transformers):
        library.logging.set_verbosity_error()
        library.logging.disable_progress_bar()
    torch.set_num_threads(1)
    flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True  # no compiler runs beside a mode that watches kernels


def run(name: str) -> Row:
    """Run all arms of a class."""
    case = CASES[name]
    start = time.perf_counter()
    cells = {}
    try:
        subject = Subject.of(case)
    except Exception as error:
        return Row(name, time.perf_counter() - start, dict.fromkeys(ARMS, Cell("FAILS", _describe(error))))
    try:
        refuse_unsupported(subject.resident)
    except GroupOffloadError as error:
        return Row(name, time.perf_counter() - start, dict.fromkeys(ARMS, Cell("refused", str(error))))
    for arm, run_arm in ARMS.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                run_arm(subject, Path(folder))
                cells[arm] = Cell("yes")
            except NotApplicable as error:
                cells[arm] = Cell("no", str(error))
            except GroupOffloadError as error:
                cells[arm] = Cell("refused", str(error))
            except Exception as error:
                cells[arm] = Cell("FAILS", _describe(error))
    return Row(name, time.perf_counter() - start, cells)


def _describe(error: BaseException) -> str:
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return text if error.__cause__ is None else f"{text} (from {_describe(error.__cause__)})"
