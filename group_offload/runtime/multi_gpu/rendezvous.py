"""How the ranks that set a model up meet, and what they tell each other, through the store of `torch.distributed`."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass
from typing import Any

from ...base.system import started_at
from ...base.torch_internals import store_of_processes
from ...base.tuning import tuning
from ...errors import ModuleError, StateError

_POLL_SECONDS = 5e-3


class OtherModel(ModuleError):
    """A rank has another model than the first one."""

    def __init__(self, rank: int, first: int, what: str) -> None:
        super().__init__(
            f"All ranks of process_group have to offload the same module, and rank {rank} has another one than rank {first}: "
            f"{what}."
        )
        self.args_of_all = rank, first, what


@dataclass(frozen=True, slots=True)
class Peer:
    """The process of a rank."""

    rank: int
    """Its number among all processes."""
    pid: int
    started: str | None

    @property
    def is_there(self) -> bool:
        return started_at(self.pid) == self.started


class Rendezvous:
    """Where the ranks of a process group tell each other something while they set up."""

    def __init__(self, process_group: Any) -> None:
        import torch.distributed as dist

        self.ranks: list[int] = dist.get_process_group_ranks(process_group)
        self.rank = dist.get_rank()
        self._store = store_of_processes()
        self.prefix = f"group_offload/{'-'.join(map(str, self.ranks))}"
        self._num_models = 0
        self.members: dict[int, Any] = {}
        """By rank, once it is known, what it is and where."""
        self.peers: dict[int, Peer] = {}
        """The ranks of this host, once they are known."""
        self.shares_ram = False
        """Whether they map memory of each other."""
        # The store may have what ranks of an earlier process group said: `torchrun` keeps it.
        self.prefix += f"/{self._meet()}"

    def _meet(self) -> str:
        """Wait for the other ranks. Returns a name of this meeting, which the first rank has made.

        Raises:
            StateError: a rank does not come.
        """
        mine, (first, *others) = uuid.uuid4().hex, self.ranks
        if self.rank != first:
            self.tell("asks", mine)
            name = self.hear(first, f"answers {mine}")
            self.tell(f"has heard {name}", mine)
            return str(name)
        limit = time.monotonic() + tuning().share_setup_seconds
        for rank in others:
            while self._said(rank, f"has heard {mine}") is None:  # it may have asked long ago, and asks again
                asked = self._said(rank, "asks")
                if asked is not None:
                    self.tell(f"answers {asked}", mine)
                if time.monotonic() > limit:
                    raise _did_not_come(rank)
                time.sleep(_POLL_SECONDS)
        return mine

    def next_model(self) -> str:
        """The name of the model that is set up next: the same one on all ranks, which set models up in the same order."""
        self._num_models += 1
        return str(self._num_models)

    def tell(self, topic: str, content: object) -> None:
        self._store.set(self._key(topic, self.rank), json.dumps(content))

    def fail(self, model: str, error: BaseException) -> None:
        """This rank could not set the model up: the others do not wait any longer, and raise."""
        what = error.args_of_all if isinstance(error, OtherModel) else f"{type(error).__name__}: {error}"
        self.tell(f"{model}/failed", what)

    def exchange(self, topic: str, content: object, among: list[int]) -> list[Any]:
        """What each of the ranks `among` has to say.

        Raises:
            StateError: a rank says nothing in time, or that it has failed.
        """
        self.tell(topic, content)
        return [content if rank == self.rank else self.hear(rank, topic) for rank in among]

    def hear(self, rank: int, *topics: str) -> Any:
        """What another rank says to the first of these topics that it says something to.

        Raises:
            StateError: it says nothing in time, or that it has failed.
        """
        failed, limit = f"{topics[0].partition('/')[0]}/failed", time.monotonic() + tuning().share_setup_seconds
        while True:
            peer = self.peers.get(rank)
            # Both are asked first: it may have said something before. What ranks compare reaches all of them so, and then
            # each raises the same error, whichever comes to it first.
            ended, error = peer if peer is not None and not peer.is_there else None, self._said(rank, failed)
            for topic in topics:
                found = self._said(rank, topic)
                if found is not None:
                    return found
            if error is not None:
                raise (
                    OtherModel(*error)
                    if isinstance(error, list)
                    else StateError(f"Rank {rank} could not offload its model: {error}")
                )
            if ended is not None:
                raise StateError(
                    f"Rank {rank} (process {ended.pid}) has ended before its model was offloaded. Restart all ranks."
                )
            if time.monotonic() > limit:  # after a look: this process may have been stopped meanwhile
                raise _did_not_come(rank)
            time.sleep(_POLL_SECONDS)

    def _said(self, rank: int, topic: str) -> Any:
        """What a rank says to a topic; None if it has said nothing yet."""
        key = self._key(topic, rank)
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _key(self, topic: str, rank: int) -> str:
        return f"{self.prefix}/{topic}/{rank}"


def _did_not_come(rank: int) -> StateError:
    return StateError(
        f"Rank {rank} did not offload a model with this process_group within {tuning().share_setup_seconds:g} s. All ranks "
        f"of it have to make the same calls, in the same order."
    )
