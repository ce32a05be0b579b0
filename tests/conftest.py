"""What every test gets: fixed seeds, one thread, no network, and no GPU tests where there is no GPU."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ["GROUP_OFFLOAD_PROGRESS_BAR"] = "0"
os.environ["OMP_NUM_THREADS"] = "1"  # of child processes; here it is said below

import pytest
import torch

# Failing assertions in these show both sides, as those in test files do. The simulated device is not among them: it asserts
# in every operation, and pytest makes that slower.
WITH_ASSERTS = ("activations", "asserts", "backward", "folders", "on_device", "pipelines", "reading", "terminal")
pytest.register_assert_rewrite(*(f"tests.support.{name}" for name in WITH_ASSERTS))

from .support.portable import IS_PORTABLE, about_linux, is_refused, show_less

if IS_PORTABLE:
    show_less()

from group_offload import ConfigError

from .support.fixtures import place  # noqa: F401
from .support.slow import slow_tests
from .support.speeds import KNOWN_SPEEDS
from .support.tuning import tune

# Sums round by the number of threads, and threads that read files may run what the simulated device has queued: theirs is
# that of the moment they were made. It is also faster for small tensors, most of all on a busy machine.
torch.set_num_threads(1)


TESTS = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that `make quick` leaves out, and skips those that need a GPU where there is none."""
    slow: dict[str, list[pytest.Item]] = {}
    for item in items:
        test = f"{item.path.relative_to(TESTS)}::{getattr(item, 'originalname', item.name)}"
        if test in slow_tests():
            slow.setdefault(test, []).append(item)
    for test, cases in slow.items():
        runs_first = slow_tests()[test]
        for item in cases[1:] if runs_first else cases:
            item.add_marker("slow")
    for item in items if IS_PORTABLE else ():
        what = about_linux(str(item.path.relative_to(TESTS)), getattr(item, "originalname", item.name))
        if what is not None:
            item.add_marker(pytest.mark.skip(reason=f"is about Linux: {what}"))
    if torch.accelerator.is_available():
        return
    skip = pytest.mark.skip(reason="needs an accelerator, and torch sees none")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


@contextmanager
def _skipped_if_refused() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        if IS_PORTABLE and is_refused(error):
            pytest.skip("weights cannot be left in their checkpoint on such a system, which set-up said")
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    with _skipped_if_refused():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[Any]:
    with _skipped_if_refused():
        return (yield)


def pytest_collection_finish() -> None:
    """Many tests collect garbage. The libraries are a million objects, which it need not look at each time (0.2 s)."""
    _set_aside()


_num_run = 0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Libraries go on to import, and torch.compile to keep what it made: half a million objects by the end."""
    global _num_run
    yield
    _num_run += 1
    if _num_run % 10 == 0:
        _set_aside()


def _set_aside() -> None:
    gc.collect()  # what a test left behind is not to stay
    gc.freeze()


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _patches_of_all_tests() -> Iterator[None]:
    """What holds in every test. The fixture `monkeypatch` is the test's own: it may undo that."""
    with pytest.MonkeyPatch.context() as patch:
        # Some thousand files are written; on many a disk each would take milliseconds. A closed file is an error still.
        patch.setattr("os.fsync", os.fstat)
        # Nothing is measured behind a test's back, and nothing written to the user's folders.
        patch.setattr("group_offload.runtime.budget.memory_budget.known_speeds", lambda *args, **options: KNOWN_SPEEDS)
        # The models of most tests are smaller than what is worth taking in turns: here it is worth it all the same.
        # Their files are small enough to be pinned in the page cache: then nothing would ever be read.
        tune(patch, min_window_bytes=0, pinned_share=0.0)
        yield
