"""Stream order where each of several GPUs brings a share: copies, gathers and compute, on a simulated device."""

from __future__ import annotations

import inspect
import sys
import textwrap
from typing import Any

import pytest

from group_offload import StateError
from group_offload.runtime.copies.transfer import Transfer
from group_offload.runtime.sharing.jobs import ShareJob
from group_offload.runtime.sharing.sharing import Sharing

from ..support.on_device import exercise
from ..support.phantom import PhantomCrew, phantom_rank

OPTIONS: list[dict[str, Any]] = [
    {},
    {"record_stream": True, "offload_type": "leaf_level"},
    {"use_stream": False},
    {"in_checkpoint": True},
    {"low_cpu_mem_usage": True},
]


@pytest.mark.parametrize("laziness", ["random", "lazy"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_random_models_match_the_resident_one(options: dict[str, Any], laziness: str) -> None:
    with phantom_rank():
        exercise(9, laziness, {**options, "process_group": "phantom", "share": True})


def run_all() -> None:
    for laziness in ("random", "lazy"):
        for options in OPTIONS:
            test_random_models_match_the_resident_one(options, laziness)


WAITS: list[tuple[type, str, str]] = [
    (PhantomCrew, "gather", "self.stream.wait_event(landed)"),
    (ShareJob, "finish", "self.stream.wait_event(self.sent)"),
    (ShareJob, "finish", "self.stream.wait_event(self.rest)"),
    (ShareJob, "finish", "self.ready.record(self.stream)"),
    (Sharing, "record", "landed.record(stream)"),
    (Transfer, "_bring_rest", "reads.wait()"),
]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("owner", "name", "wait"), WAITS, ids=[wait for _, _, wait in WAITS])
def test_every_wait_is_needed(owner: type, name: str, wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = textwrap.dedent(inspect.getsource(getattr(owner, name)))
    assert wait in text
    scope: dict[str, Any] = {}
    code = "from __future__ import annotations\n" + text.replace(wait, "pass")
    exec(compile(code, "<mutant>", "exec"), vars(sys.modules[owner.__module__]), scope)
    monkeypatch.setattr(owner, name, scope[name])
    with pytest.raises((AssertionError, StateError)):
        run_all()
