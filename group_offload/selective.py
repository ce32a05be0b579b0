"""The engines' own operations, out of sight of selective checkpoints.

[Note: Selective checkpoints]
`torch.utils.checkpoint.create_selective_checkpoint_contexts` counts the operations of a forward, keeps what some of them give,
and hands that out again to the same ones, by number, when the forward is repeated. Weights are brought at other moments
then. If it counted that too, the repeated forward would be refused, or get something else than it computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode, _push_mode

_MODES = checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode


def hide() -> Sequence[TorchDispatchMode]:
    """No selective checkpoint sees what this thread does, until `show` gets what this returns. Call it unseen by compilers."""
    if not torch._C._len_torch_dispatch_stack():
        return ()
    modes: list[TorchDispatchMode] = []
    while isinstance(top := _get_current_dispatch_mode(), _MODES):
        modes.append(top)
        _pop_mode()
    return modes


def show(modes: Sequence[TorchDispatchMode]) -> None:
    for mode in reversed(modes):
        _push_mode(mode)
