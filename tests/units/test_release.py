"""Memory that other threads give back."""

from __future__ import annotations

import os
import threading
import weakref

import pytest

from group_offload.base.ram import available_ram
from group_offload.base.release import release_later, wait_for_releases


class Memory:
    """It notes the thread that drops it, once it may be dropped."""

    def __init__(self, may_go: threading.Event, went: list[int]) -> None:
        weakref.finalize(self, lambda: (may_go.wait(60), went.append(threading.get_ident())))


@pytest.mark.parametrize("waits", [wait_for_releases, available_ram])
def test_the_caller_goes_on_meanwhile(waits: object) -> None:
    may_go, went = threading.Event(), list[int]()
    memory: list[object] = [Memory(may_go, went)]
    release_later(memory)
    assert not went
    may_go.set()
    waits()  # type: ignore[operator]
    assert went and went != [threading.get_ident()] and not memory
    wait_for_releases()


def test_a_child_does_not_wait_for_threads_of_its_parent() -> None:
    may_go, went = threading.Event(), list[int]()
    release_later([Memory(may_go, went)])
    child = os.fork()
    if not child:
        wait_for_releases()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not went
    may_go.set()
    wait_for_releases()
    assert went
