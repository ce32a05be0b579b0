"""The engines' own operations, out of sight of selective checkpoints.

[Note: Selective checkpoints]
`torch.utils.checkpoint.create_selective_checkpoint_contexts` counts the operations of a forward, keeps what some of them give,
and hands that out again to the same ones, by number, when the forward is repeated. Weights are brought at other moments
then. If it counted that too, the repeated forward would be refused, or get something else than it computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from .torch_internals import (
    CACHING_MODES,
    TorchDispatchMode,
    current_dispatch_mode,
    dispatch_stack_length,
    pop_mode,
    push_mode,
)


def hide() -> Sequence[TorchDispatchMode]:
    """No selective checkpoint sees what this thread does, until `show` gets what this returns. Call it unseen by compilers."""
    if not dispatch_stack_length():
        return ()
    modes: list[TorchDispatchMode] = []
    while isinstance(top := current_dispatch_mode(), CACHING_MODES):
        modes.append(top)
        pop_mode()
    return modes


def show(modes: Sequence[TorchDispatchMode]) -> None:
    for mode in reversed(modes):
        push_mode(mode)
