"""A pytest plugin that runs diffusers' own tests on this engine. In a clone of diffusers, with and without `-p`:

    PYTHONPATH=GROUP_OFFLOAD/tests/support python -m pytest -p diffusers_suite tests/hooks/test_group_offloading.py

It calls `patch_diffusers()` before anything of the suite is imported, and fails a run in which the engine was never called.
The installed diffusers is tested, not the clone's.
"""

from __future__ import annotations

from typing import Any

import diffusers  # before a conftest can put another one on the path
import pytest

import group_offload
from group_offload.handle import Listener, listeners

COUNTERS: list[Any] = []
"""Of every engine. The suite measures memory, so neither handles nor modules may be kept alive here."""


class Counting(Listener):
    def applied(self, handle: Any) -> None:
        COUNTERS.append(handle._engine.counters)


group_offload.patch_diffusers()
listeners.append(Counting())


def pytest_sessionfinish(session: pytest.Session) -> None:
    onloads = sum(each.onloads for each in COUNTERS)
    print(f"\ngroup_offload: {len(COUNTERS)} modules offloaded, {onloads} onloads (diffusers {diffusers.__version__})")
    session.exitstatus = session.exitstatus or int(not onloads)
