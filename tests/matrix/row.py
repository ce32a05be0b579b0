"""What came out for one class."""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import diffusers
import torch
import transformers
from torch.nn.attention import flex_attention

from group_offload import GroupOffloadError
from group_offload.integrations.diffusers import refuse_unsupported

from .arms import ARMS, NotApplicable, Subject
from .cases import CASES


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
