"""How much device memory passes need besides weights, as the device sees it."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...base.arena import Holding
from ...base.device import Backend
from ...base.recent import Recent
from ...base.torch_internals import tree_leaves

_NUM_RECENT = 7
"""The number of passes before one whose need is kept free with its own: two sizes of inputs may take turns."""
_TRIED_AGAIN = 8
"""After so many passes half of what was refused is taken to be there again."""
_NUM_LOOKS = 64
"""So many calls of a pass are looked at, and then ever fewer: each look takes 0.1 ms."""
_SLACK = 1.1
"""Inputs that are larger than known ones by no more than this share get so much more in proportion, and are not measured."""


@dataclass(frozen=True, slots=True)
class InputSignature:
    """A kind of passes: all of them need the same memory, and take the same time."""

    top: Hashable
    """What the pass begins at: a weak reference to the module, or the method; a name for a backward."""
    shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    with_grad: bool
    together: tuple[InputSignature, ...] = ()
    """The kinds of the forwards, if several share the pass."""

    @classmethod
    def of(cls, top: Hashable, args: Any, kwargs: Any) -> InputSignature:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        return cls(weakref.ref(top) if isinstance(top, nn.Module) else top, shapes, torch.is_grad_enabled())

    @classmethod
    def of_all(cls, kinds: Sequence[InputSignature]) -> InputSignature:
        """The kind of a pass that forwards of these kinds share: its activations are those of all."""
        if len(kinds) == 1:
            return kinds[0]
        shapes = sorted((shape for each in kinds for shape in each.shapes), key=repr)
        return cls(kinds[0].top, tuple(shapes), kinds[0].with_grad, tuple(sorted(kinds, key=repr)))

    @property
    def is_backward(self) -> bool:
        return isinstance(self.top, str)

    def growth_from(self, other: InputSignature) -> float | None:
        """The factor by which the input that has grown most is larger than that of `other`; None if they cannot be compared."""
        mine, theirs = ((each.top, each.with_grad, len(each.together), len(each.shapes)) for each in (self, other))
        if mine != theirs or any(a[1] != b[1] for a, b in zip(self.shapes, other.shapes, strict=True)):
            return None
        sizes = zip(self.shapes, other.shapes, strict=True)
        return max((torch.Size(a).numel() / max(1, torch.Size(b).numel()) for (a, _), (b, _) in sizes), default=1.0)


class Needs:
    """The needs of one module's passes, learned from the first pass of each kind. Used under the engine's lock.

    [Note: What a pass needs]
    The first pass of a kind runs with nothing resident in its way, whatever that costs, and with no fragments of what ran
    before. If smaller inputs were measured, `at_most` says what may be in its way; else all residents are evicted. What the
    allocator reserves in it, beyond weights and what was there before, is the kind's need: activations, workspaces of
    libraries, and what rounding adds. In later passes so much is kept free. So a convolution chooses the algorithm that it
    chooses on an empty device. To evict in steps, as memory is refused, would not do: cuDNN leaves out algorithms whose
    workspaces are larger than what is free, without asking for memory, and nobody would see that the bits are others.

    Without a budget the need is what activations take, at leaf level (`Placer._window`). It is looked at as calls begin: the
    peak that users may read is not set back.

    Inputs that are smaller than measured ones in every dimension count as those. A pass that was refused memory all the same
    (fragments, another process) needs more from then on, by what was refused; half of that is tried again after some passes.
    """

    def __init__(self, backend: Backend, memory: Holding) -> None:
        self._backend, self._memory = backend, memory
        self._known: Recent[InputSignature, int] = Recent()
        self._recent: deque[InputSignature] = deque(maxlen=_NUM_RECENT)
        self._more = 0
        """What passes were refused, beyond what was measured."""
        self._num_good = 0
        """The passes since, or since half of it was tried again."""
        self._measuring: tuple[InputSignature, int] | None = None
        """The kind that is being measured, and the bytes in use that are not its need."""
        self._most_seen: int | None = None
        """Without a budget: the most that was in use as calls began. With one (None) the device's peak tells."""
        self._num_looks = 0

    def of(self, kind: InputSignature) -> int | None:
        """What to keep free for a pass of this kind, and recent ones that it alternates with; None if it was not measured."""
        found = self.measured(kind) if self._backend.has_streams else 0
        if found is None:
            return None
        # Else two kinds that alternate would evict groups and bring them back again and again.
        return max(found + self._more, self.kept_bytes if kind in self._recent else 0)

    def measured(self, kind: InputSignature) -> int | None:
        """The need of a pass of this kind alone, as it was measured or as smaller and hardly larger inputs tell it."""
        if kind in self._known:
            return self._known[kind]
        fitting = [(growth, need) for growth, need in self._alike(kind) if growth <= _SLACK]
        return min((int(need * growth * _SLACK) if growth > 1 else need for growth, need in fitting), default=None)

    def at_most(self, kind: InputSignature) -> int | None:
        """The most that a kind may need that was not measured, by what smaller inputs needed: attention takes the square.

        Several forwards need no more than each by itself in sum. None if no known kind tells.
        """
        apart = [self.measured(each) for each in kind.together]
        if apart and None not in apart:
            return sum(filter(None, apart))
        return min((int(need * growth**2 * _SLACK) for growth, need in self._alike(kind)), default=None)

    def _alike(self, kind: InputSignature) -> list[tuple[float, int]]:
        """For known kinds: how much larger the inputs are than theirs, and what they need."""
        growths = [(kind.growth_from(other), need) for other, need in self._known.items()]
        return [(growth, need) for growth, need in growths if growth is not None]

    @property
    def kept_bytes(self) -> int:
        """What is kept free for the passes that ran last."""
        return max((self.measured(kind) or 0 for kind in {*self._recent}), default=0) + self._more

    def begin(self, kind: InputSignature, *, has_budget: bool) -> None:
        """A pass computes from here on."""
        self._recent.append(kind)
        self._measuring, self._most_seen, self._num_looks = None, None if has_budget else 0, 0
        if self.measured(kind) is None:
            self._measuring = kind, self._backend.bytes_in_use() if has_budget else self._beside_weights()
            if has_budget:
                self._backend.reset_peak()
        elif kind in self._known:
            self._known[kind] = self._known[kind]  # the kind that came last is forgotten last

    def look(self) -> None:
        """A call in the pass begins: see what is in use beside weights, unless there is a budget."""
        if self._measuring is not None and self._most_seen is not None:
            self._num_looks += 1
            if self._num_looks % (1 + self._num_looks // _NUM_LOOKS) == 0:
                self._most_seen = max(self._most_seen, self._beside_weights())

    def _beside_weights(self) -> int:
        return self._backend.bytes_in_use() - self._memory.num_bytes

    def end(self, *, completed: bool) -> tuple[int, int] | None:
        """The pass is over. Returns the need and the peak of all memory, if the pass was the first of its kind."""
        self._num_good += completed
        if self._num_good == _TRIED_AGAIN:
            self._more, self._num_good = self._more // 2, 0
        measuring, self._measuring = self._measuring, None
        if measuring is None or not completed:
            return None
        kind, beside = measuring
        peak = self._backend.peak_reserved_bytes() if self._most_seen is None else self._most_seen
        self._known[kind] = max(0, peak - beside)
        return self._known[kind], peak

    def add(self, num_bytes: int) -> None:
        """A pass was refused so much memory."""
        self._more += num_bytes
        self._num_good = 0

    def begin_phase(self) -> None:
        """Another model ran since: what was refused may be there again."""
        if self._recent:
            self._more, self._num_good = self._more // 2, 0
        self._recent.clear()

    def clear(self) -> None:
        """Forget what was measured: the module has changed."""
        self._known.clear()
        self._recent.clear()
        self._more, self._measuring = 0, None
