"""One forward of the root in one thread: the hooks that are pushed for it, and which tensors are its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ..base.device import Stream
from ..base.saved import Pack, Unpack, hooks_in_force, unwatched
from .stash import Stash
from .tape import Tape

_PLAIN = (torch.Tensor, nn.Parameter)


class Forward:
    """The saved-tensor hooks are in force as long as it is open. See [Note: Hooks of activation offloading]."""

    def __init__(
        self,
        tape: Tape,
        weights: Sequence[torch.Tensor],
        hooks: tuple[Pack, Unpack],
        outer: tuple[Pack, Unpack] | None,
        home: Stream | None,
    ) -> None:
        self.tape = tape
        self.outer = outer
        """The hooks of others that ours are pushed over."""
        self.home = home
        """The stream that the forward began on; None if its device isn't known yet."""
        self.unfilled: list[Stash] = []
        """Stashes that the operation that saved them may be about to fill."""
        self.unfilled_by = -1
        """The number of autograd nodes that this thread had made then."""
        self._weights = {weight.untyped_storage()._cdata for weight in weights}
        self._hooks = saved_tensors_hooks(*map(unwatched, hooks))

    def open(self) -> None:
        self._hooks.__enter__()

    def close(self) -> None:
        top = hooks_in_force()
        if top is not None and top[0] is self._hooks.pack_hook:  # else an interrupt left others behind
            self._hooks.__exit__()
        self.tape.end()

    def take_unfilled(self) -> list[Stash]:
        found, self.unfilled = self.unfilled, []
        return found

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


def weights_of(root: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers that are plain tensors. For each forward: `Module.parameters()` takes longer."""
    found: list[torch.Tensor] = []
    seen = {root}
    modules = [root]
    while modules:
        module = modules.pop()
        tensors = (*module._parameters.values(), *module._buffers.values())
        found += [tensor for tensor in tensors if tensor is not None and type(tensor) in _PLAIN]
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                modules.append(child)
    return found


def lowest(pack: Callable[..., Any]) -> Callable[..., Any]:
    """The hook that finally gets every tensor that `pack` and the hooks below it leave alone."""
    while getattr(pack, "below", None) is not None:
        pack = pack.below  # type: ignore[attr-defined]
    return pack
