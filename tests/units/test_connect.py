"""Whether GPUs reach each other's memory: all ranks come to one answer, and none waits for another one in vain."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from group_offload.base.device import Backend
from group_offload.runtime.multi_gpu import host_ranks
from group_offload.runtime.multi_gpu.links import PeerLink

from ..support.allocations import SharedFiles
from ..support.tuning import tune

TOPICS = ["1/memory", "1/places", "1/reached", "1/arrived", "1/closed"]


class TwoRendezvous:
    """Both ranks go through one set-up: what the other rank says is given."""

    ranks, rank = [0, 1], 0

    def __init__(self, theirs: dict[str, Any]) -> None:
        self.theirs = theirs
        self.topics: list[str] = []

    def exchange(self, topic: str, mine: Any, here: list[int]) -> list[Any]:
        self.topics.append(topic)
        return [mine, self.theirs[topic]]


def connect(monkeypatch: pytest.MonkeyPatch, *, fails: str = "", device: str = "cuda:0", said: str = "") -> Any:
    """The answer of rank 0, and what it has exchanged. Its trial fails in `fails`, rank 1 fails in the topic `said`."""

    def fail(name: str) -> None:
        if name == fails:
            raise RuntimeError(f"{name} failed")

    link = SimpleNamespace(handles={}, look=lambda memories: None)
    trial = SimpleNamespace(
        place=(1, 0), link=link, share=lambda places: fail("share"), compare=lambda: fail("compare")
    )
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(host_ranks, "PeerMemory", lambda device: fail("open"))
    monkeypatch.setattr(host_ranks, "Trial", lambda *args: trial)
    monkeypatch.setattr(host_ranks, "_measure", lambda *args: "speeds")
    rendezvous: Any = TwoRendezvous({topic: "rank 1 failed" if topic == said else "" for topic in TOPICS})
    rendezvous.theirs["1/places"] = (1, 0), {}
    backend: Any = SimpleNamespace(device=torch.device(device))
    try:
        return host_ranks._connect(backend, rendezvous, "1", [0, 1]), rendezvous.topics, link
    except host_ranks._CannotShare as error:
        return str(error), rendezvous.topics, link


@pytest.mark.parametrize(
    ("fault", "why", "num_topics"),
    [
        ({"device": "xpu:0"}, "needs CUDA", 1),
        ({"fails": "open"}, "open failed", 1),
        ({"said": "1/memory"}, "rank 1 failed", 1),
        ({"fails": "share"}, "share failed", 3),
        ({"said": "1/reached"}, "rank 1 failed", 3),
        ({"fails": "compare"}, "compare failed", 4),
        ({"said": "1/arrived"}, "rank 1 failed", 4),
    ],
    ids=str,
)
def test_a_fault_of_any_rank_leaves_all_alone(
    fault: dict[str, str], why: str, num_topics: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that fails and one that is fine exchange the same topics, and both say why."""
    problem, topics, _ = connect(monkeypatch, **fault)
    assert why in problem and topics == TOPICS[:num_topics]
    found, topics, link = connect(monkeypatch)
    assert found == (link, "speeds") and topics == TOPICS


class Ranks:
    """The trials of all ranks, in one process."""

    def __init__(self, num_ranks: int) -> None:
        memory, self.trials = SharedFiles(), list[host_ranks.Trial]()
        self.backends = [Backend() for _ in range(num_ranks)]
        for rank, backend in enumerate(self.backends):
            backend.empty = memory.empty  # type: ignore[method-assign]
            backend.empty_pinned = memory.empty  # type: ignore[method-assign]
            self.trials.append(host_ranks.Trial(backend, rank, num_ranks, memory))  # type: ignore[arg-type]
        self.places = {str(rank): trial.place for rank, trial in enumerate(self.trials)}
        for trial in self.trials:
            trial.link.look({str(rank): each.link.handles for rank, each in enumerate(self.trials)})


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_what_all_ranks_send_arrives(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(monkeypatch, share_trial_bytes=1 << 16)
    ranks = Ranks(num_ranks)
    for trial in ranks.trials:
        trial.share(ranks.places)
    for trial in ranks.trials:
        trial.compare()
        trial.memory[trial.starts[-1] + trial.starts.step - 1] += 1
        with pytest.raises(RuntimeError, match="other bytes arrived"):
            trial.compare()


def test_an_address_that_is_used_again_has_another_number() -> None:
    memory = SharedFiles()
    mine = memory.empty(100)
    link = PeerLink(Backend(), 1, 3, memory)  # type: ignore[arg-type]
    first, _ = link.place_of(mine)
    start, (_, fd, size) = next(iter(memory.files.items()))
    memory.files[start] = first + 1, fd, size  # freed, and handed out once more
    link.forget_freed()
    assert link.handles == {}
    for _ in range(2):
        assert link.place_of(mine)[0] == first + 1 and [*link.handles] == [str(first + 1)]
        link.forget_freed()
    memory.files.clear()
    link.forget_freed()
    assert link.handles == {}
