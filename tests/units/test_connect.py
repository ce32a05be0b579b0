"""Whether GPUs reach each other's memory: all ranks come to one answer, and none waits for another one in vain."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from group_offload.runtime.sharing import crew

TOPICS = ["1/memories", "1/reached", "1/arrived", "1/closed"]


class TwoRolls:
    """Both ranks go through one set-up: what the other rank says is given."""

    ranks, rank = [0, 1], 0

    def __init__(self, theirs: dict[str, Any]) -> None:
        self._theirs = theirs
        self.topics: list[str] = []

    def exchange(self, topic: str, mine: Any, here: list[int]) -> list[Any]:
        self.topics.append(topic)
        return [mine, self._theirs[topic]]


def connect(monkeypatch: pytest.MonkeyPatch, said: list[str], *, fails: str = "", device: str = "cuda:0") -> Any:
    """The answer of rank 0, and what it has exchanged. Rank 1 says `said`, the trial of rank 0 fails in `fails`."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    link = SimpleNamespace(handles={}, look=lambda memories: None)
    trial = SimpleNamespace(
        place=(1, 0),
        link=link,
        reach=lambda places: "no way there" * (fails == "reach"),
        compare=lambda: "other bytes arrived" * (fails == "compare"),
    )

    def open_memory(device: torch.device) -> None:
        if fails == "open":
            raise RuntimeError("cuIpcGetMemHandle: refused (801)")

    monkeypatch.setattr(crew, "PeerMemory", open_memory)
    monkeypatch.setattr(crew, "Trial", lambda *args: trial)
    monkeypatch.setattr(crew, "_measure", lambda *args: "speeds")
    roll: Any = TwoRolls(dict(zip(TOPICS, [(said[0], (1, 0), {}), *said[1:], 0], strict=True)))
    backend: Any = SimpleNamespace(device=torch.device(device))
    return (*crew._connect(backend, roll, "1", [0, 1]), roll.topics, link)


def test_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    found, speeds, problem, topics, link = connect(monkeypatch, ["", "", ""])
    assert found is link and speeds == "speeds" and not problem and topics == TOPICS


@pytest.mark.parametrize(
    ("said", "fails", "device", "why", "num_topics"),
    [
        (["", "", ""], "", "cpu", "needs CUDA", 1),
        (["", "", ""], "open", "cuda:0", "refused", 1),
        (["no driver", "", ""], "", "cuda:0", "no driver", 1),
        (["", "", ""], "reach", "cuda:0", "no way there", 2),
        (["", "cannot open", ""], "", "cuda:0", "cannot open", 2),
        (["", "", ""], "compare", "cuda:0", "other bytes", 3),
        (["", "", "other bytes"], "", "cuda:0", "other bytes", 3),
    ],
)
def test_a_fault_of_any_rank_leaves_all_alone(
    said: list[str], fails: str, device: str, why: str, num_topics: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that fails and one that is fine exchange the same topics, and both say why."""
    link, speeds, problem, topics, _ = connect(monkeypatch, said, fails=fails, device=device)
    assert link is None and speeds is None and why in problem and topics == TOPICS[:num_topics]
