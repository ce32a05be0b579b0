"""The engines' own operations, out of sight of selective checkpoints.

[Note: Selective checkpoints]
`torch.utils.checkpoint.create_selective_checkpoint_contexts` counts the operations of a forward, keeps the results of some of
them, and hands these out again to the same operations, by number, when the forward is repeated. In the repeated forward
weights are onloaded at other points. If the checkpoint counted the engine's operations too, it would refuse the repeated
forward, or hand out the result of another operation.
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
    """Hide this thread's operations from selective checkpoints, until `show` gets the modes that this returns.

    No compiler may see the call.
    """
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
