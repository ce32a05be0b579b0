"""One forward of the root: hooks that are in force meanwhile, and what it saved for backward, in the order of its groups."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from ..base.device import Stream
from ..base.saved import Pack, Unpack, hooks_in_force, unwatched
from .offloader import Stash, StashState

Key = tuple[int, int, int, int]
"""A storage, the version of its content, and which part of it: first byte and number of bytes."""
_PLAIN = (torch.Tensor, nn.Parameter)


@dataclass(eq=False)
class Tape:
    """One forward, until its last backward. The hooks are in force from `open` to `close`.

    Positions count the calls of groups: a group that is called twice has two. Autograd holds the stashes and, with them, the
    tape. The tape holds no stash, once it is closed.
    """

    outer: tuple[Pack, Unpack] | None
    """The hooks of others that ours are pushed over."""
    home: Stream | None = None
    """The stream that the forward began on; None if its device isn't known yet."""
    name: str = ""
    """The group at the current position."""
    stashes: list[list[weakref.ref[Stash]]] = field(default_factory=list)
    """The stashes that each position saved."""
    num_left: int = 0
    """What positions before this one saved has left the device, if it could."""
    known: dict[Key, tuple[StorageWeakRef, weakref.ref[Stash]]] = field(default_factory=dict)
    """The storages that this forward has saved. An address isn't used again as long as there is a weak reference to it."""
    reached: int | None = None
    """The position that backward has reached."""
    _hooks: saved_tensors_hooks | None = None
    _weights: set[int] = field(default_factory=set)

    @property
    def position(self) -> int:
        return len(self.stashes) - 1

    def open(self, weights: Sequence[torch.Tensor], pack: Pack, unpack: Unpack) -> None:
        self._weights = {weight.untyped_storage()._cdata for weight in weights}
        self._hooks = saved_tensors_hooks(unwatched(pack), unwatched(unpack))
        self._hooks.__enter__()

    def close(self) -> None:
        """The forward is over: nothing more is saved."""
        top = hooks_in_force()
        if self._hooks is not None and top is not None and top[0] is self._hooks.pack_hook:
            self._hooks.__exit__()  # else an interrupt left others behind
        self.outer = self._hooks = None
        self.known.clear()
        self._weights.clear()

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a parameter or buffer, a view of one, or autocast's copy of one: these stay anyway.

        FSDP2 frees the memory of gathered parameters and gathers them again, in the same storage.
        """
        base = tensor if tensor._base is None else tensor._base
        if type(base) is not torch.Tensor and isinstance(base, nn.Parameter):
            return True
        if base.untyped_storage()._cdata in self._weights:
            return True
        made_by = base.grad_fn
        if made_by is None or made_by.name() != "ToCopyBackward0":
            return False
        return isinstance(getattr(made_by.next_functions[0][0], "variable", None), nn.Parameter)

    def find(self, key: Key) -> Stash | None:
        """The stash of the same bytes, if this forward saved them before."""
        found = self.known.get(key)
        stash = None if found is None else found[1]()
        return None if stash is None or stash.state is StashState.LOST else stash

    def add(self, key: Key, storage: torch.UntypedStorage, stash: Stash) -> None:
        self.known[key] = StorageWeakRef(storage), weakref.ref(stash)  # type: ignore[no-untyped-call]

    def mark(self, stash: Stash) -> None:
        """Note that the current group saved `stash`."""
        if stash.position != self.position:
            stash.position = self.position
            self.stashes[-1].append(weakref.ref(stash))

    def at(self, position: int) -> Iterator[Stash]:
        """The stashes of a position that are alive and not lost, in the order in which backward needs them."""
        if 0 <= position < len(self.stashes):
            for reference in reversed(self.stashes[position]):
                stash = reference()
                if stash is not None and stash.state is not StashState.LOST:
                    yield stash

    def lose(self) -> None:
        """Let all stashes go of their bytes. See [Note: Interrupts of activation offloading]."""
        for position in range(len(self.stashes)):
            for stash in self.at(position):
                stash.lose()


def weights_of(root: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers that are plain tensors. For each forward: `Module.parameters()` takes longer."""
    found: list[torch.Tensor] = []
    for module in root.modules():
        tensors = (*module._parameters.values(), *module._buffers.values())
        found += [tensor for tensor in tensors if tensor is not None and type(tensor) in _PLAIN]
    return found


def lowest(pack: Callable[..., Any]) -> Callable[..., Any]:
    """The hook that finally gets every tensor that `pack` and the hooks below it leave alone."""
    while getattr(pack, "below", None) is not None:
        pack = pack.below  # type: ignore[attr-defined]
    return pack
