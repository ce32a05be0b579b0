"""Parameters that are trained: they stay on the device, where their gradients and the optimizer's state are.

[Note: Gradients of offloaded parameters]
The gradient of an offloaded parameter would stay on the device, and an optimizer would find the two on different devices. So
such parameters get a hook that refuses gradients. (Autograd cannot be asked beforehand which parameters a backward reaches:
a parameter that is bound to memory of another device gets another node for its gradient each time.)
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ...base.arena import arena_for, moved
from ...base.device import Backend, plain_empty
from ...base.layout import as_bytes, overlapping, span_bytes
from ...base.saved import view_of
from ...errors import StateError
from ...weights import TensorRef

MAX_SHARE = 0.5
"""Above this share of a module's bytes, `requires_grad` is taken for the default of modules and not for a wish to train."""

MAX_FROZEN_PASSES = 8
"""The number of forwards with a graph for which a frozen parameter stays on the device. It may be frozen for only one of them
(an adapter that is switched off for a reference, a critic while its generator is trained), and an earlier graph may still
have to run."""


class Trained:
    """The parameters of a module that are trained. Owned by an engine.

    They require gradients, and most parameters of the module do not: see `MAX_SHARE`.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend, self._arena = backend, arena_for(backend)
        self._homes: dict[int, tuple[torch.Tensor, torch.device]] = {}
        """By id, the parameters that stay on the device, and the device where they were before."""
        self._asked: frozenset[int] = frozenset()
        self._num_frozen: dict[int, int] = {}
        """By id, the number of forwards with a graph in a row for which a parameter has required no gradient."""
        self._optimizers: RemovableHandle | None = None
        """The hook on the steps of all optimizers. See `_bring_state`."""
        self._guards: list[RemovableHandle] = []
        """The hooks on offloaded parameters that require gradients. See [Note: Gradients of offloaded parameters]."""

    @property
    def ids(self) -> frozenset[int]:
        return frozenset(self._homes)

    @property
    def num_bytes(self) -> int:
        return sum(span_bytes(parameter) for parameter, _ in self._homes.values())

    def take_up(self, refs: Sequence[TensorRef]) -> bool:
        """Decide which parameters stay on the device, because a graph is about to be recorded.

        Args:
            refs: The tensors that are in groups.

        Returns:
            Whether the set of these parameters changed. If so they are on the device now, and groups must be rebuilt.
        """
        known = {key: parameter for key, (parameter, _) in self._homes.items()}
        for parameter in known.values():
            if parameter.device != self._backend.device:
                self._move(parameter)  # the user has moved it
        self._num_frozen = {
            key: 0 if parameter.requires_grad else self._num_frozen.get(key, 0) + 1 for key, parameter in known.items()
        }
        wanted = {key: known[key] for key, number in self._num_frozen.items() if number <= MAX_FROZEN_PASSES}
        wanted |= {id(ref.holder): ref.holder for ref in refs if is_trainable(ref) and not ref.path}
        if wanted.keys() == self._asked:
            return False
        self._asked = frozenset(wanted)
        num_bytes = sum(ref.tensor.nbytes for ref in refs) + sum(parameter.nbytes for parameter in known.values())
        if not _is_small(wanted.values(), num_bytes):
            wanted = {key: parameter for key, parameter in wanted.items() if parameter.requires_grad}
        if not _is_small(wanted.values(), num_bytes):
            wanted = {}
        shared = _sharing(refs) if wanted else set()
        homes = self._homes
        self._homes = {
            key: homes.get(key, (parameter, parameter.device)) for key, parameter in wanted.items() if key not in shared
        }
        for key, (parameter, _) in self._homes.items():
            if key not in homes:
                self._move(parameter)
        if self._optimizers is None and self._homes:
            self._optimizers = register_optimizer_step_pre_hook(partial(_bring_state, weakref.ref(self)))
            weakref.finalize(self, self._optimizers.remove).atexit = False
        self.guard(refs)
        return self._homes.keys() != homes.keys()

    def forget_others(self, parameters: Iterable[torch.Tensor]) -> None:
        """Forget those that are none of these parameters: they were deleted, or FSDP2 has taken them."""
        present = {id(parameter) for parameter in parameters}
        self._homes = {key: home for key, home in self._homes.items() if key in present}
        self._asked &= present  # a new parameter may get the id of one that is gone

    def give_back(self) -> None:
        """Bring the parameters back to the devices where they were before."""
        homes, self._homes, self._asked = self._homes, {}, frozenset()
        self.guard(())
        if self._optimizers is not None:
            self._optimizers.remove()
            self._optimizers = None
        for parameter, home in homes.values():
            if home != self._backend.device or home.type == "cpu":
                self._move(parameter, home)

    def guard(self, refs: Iterable[TensorRef]) -> None:
        """Refuse gradients of these tensors, where they require gradients and do not stay on the device."""
        for guard in self._guards:
            guard.remove()
        offloaded = [ref for ref in refs if is_trainable(ref) and id(ref.holder) not in self._homes]
        holders = {id(ref.holder): (ref.fqn, ref.holder) for ref in offloaded}
        self._guards = []
        for fqn, holder in holders.values():
            refuse = partial(_refuse, fqn, holder.grad is not None)
            self._guards.append(holder.register_post_accumulate_grad_hook(refuse))  # type: ignore[no-untyped-call]

    def _move(self, parameter: torch.Tensor, home: torch.device | None = None) -> None:
        """Move a parameter, and its gradient, to the device where it was before; None: to the onload device."""
        backend = self._backend
        with torch.inference_mode(False), torch.no_grad():
            source = as_bytes(parameter)
            # Memory of the CPU's backend is aligned and so larger, and `torch.save` writes the whole storage.
            in_arena = home is None and backend.has_streams
            take = self._arena.take if in_arena else partial(plain_empty, device=torch.device("cpu"))
            memory = take(source.numel())
            backend.copy(memory, source, backend.current_stream(), blocking=True)
            value = view_of(memory, 0, parameter.dtype, parameter.shape, parameter.stride())
            parameter.data = value if home is None else moved(value, home)
            if parameter.grad is not None:
                parameter.grad = moved(parameter.grad, home or memory.device)


def _bring_state(trained: weakref.ref[Trained], optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Let an optimizer's state follow its parameters: it may have been loaded before they were brought to the device."""
    owner = trained()
    for parameter, home in () if owner is None else owner._homes.values():
        state = (optimizer.state.get(parameter) or {}) if home != parameter.device else {}
        for name, value in [*state.items()]:
            if isinstance(value, torch.Tensor) and value.dim() and value.device == home:  # a count of steps stays
                state[name] = moved(value, parameter.device)


def _refuse(fqn: str, had_gradient: bool, parameter: torch.Tensor) -> None:
    if not had_gradient:
        parameter.grad = None
    raise StateError(
        f"backward() reached the offloaded weight {fqn!r}. Freeze the base model (model.requires_grad_(False)) and train an "
        f"adapter. Trained parameters stay on the GPU only if they are under half of the model's bytes. (Forward ran without "
        f"gradients? Call the model once with gradients enabled first.)"
    )


def is_trainable(ref: TensorRef) -> bool:
    """Whether a backward may leave a gradient in a tensor. (A buffer that a forward computes has a graph, no gradient.)"""
    return ref.holder.requires_grad and ref.holder.is_leaf


def may_be_trained(refs: Sequence[TensorRef]) -> set[int]:
    """By id, the parameters that require gradients and share memory with no other tensor; none if most require gradients."""
    wanted = {id(ref.holder): ref.holder for ref in refs if is_trainable(ref) and not ref.path}
    if not wanted or not _is_small(wanted.values(), sum(ref.tensor.nbytes for ref in refs)):
        return set()
    return wanted.keys() - _sharing(refs)


def _is_small(parameters: Iterable[torch.Tensor], num_bytes: int) -> bool:
    return sum(parameter.nbytes for parameter in parameters) <= MAX_SHARE * num_bytes


def _sharing(refs: Sequence[TensorRef]) -> set[int]:
    """By id, the tensors that share memory with others: one of them cannot go elsewhere alone."""
    clusters = overlapping([ref.tensor for ref in refs])
    return {id(refs[index].holder) for cluster in clusters if len(cluster) > 1 for index in cluster}
