"""Autograd functions that keep weights in their contexts, and not with `save_for_backward`: those of bitsandbytes.

[Note: Contexts that keep weights]
`ctx.tensors` of bitsandbytes has a view of the packed weight, and `ctx.state` is the very object that the layer keeps its
scales in. Autograd's hooks see neither. So nodes that have such an object are looked for in the graph that a call has recorded.
The views that a node keeps become references, as what autograd saves does. Right before the node runs its group is onloaded,
and its weights are bound to the slot: so the object has the scales on the device, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch.autograd.function import BackwardCFunction

from ..base.tensors import tensors_in

T = TypeVar("T")
Change = Callable[[Any], Any]
"""What stands in the place of a value; None: the value stays."""


def nodes_with(part_of: Mapping[int, T], output: Any, first: int) -> Iterator[tuple[BackwardCFunction, list[T]]]:
    """The nodes of autograd functions in the graph of `output` that keep certain objects, also in lists and tuples.

    Args:
        part_of: By id of such an object, what is returned for it.
        first: The number of nodes that the thread had made before. Older ones are left out.
    """
    pending: list[Any] = [tensor.grad_fn for tensor in tensors_in(output)]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen or node._sequence_nr() < first:
            continue
        seen.add(node)
        pending += [each for each, _ in node.next_functions]
        if isinstance(node, BackwardCFunction):
            found = dict.fromkeys(part_of[id(each)] for each in _items(vars(node).values()) if id(each) in part_of)
            if found:
                yield node, [*found]


def _items(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        yield value
        if type(value) in (list, tuple):
            yield from _items(value)


class Context:
    """What one node keeps of weights."""

    def __init__(self, node: BackwardCFunction, pack: Change, begin: Callable[[Any], Change]) -> None:
        """
        Args:
            pack: Makes a reference of a view of a slot.
            begin: Onloads the weights for the node, which is about to run. It returns what makes a view of such a reference.
        """
        self._begin = begin
        self._node = weakref.ref(node)  # it owns the hooks, and these own this
        self._packed: dict[str, Any] = {}
        for name, value in vars(node).items():
            packed = _mapped(value, pack)
            if packed is not value:
                self._packed[name] = packed
        self._put(self._packed)
        node.register_prehook(self._before)
        node.register_hook(self._after)

    def _before(self, gradients: Any) -> None:
        view = self._begin(self._node())
        self._put({name: _mapped(value, view) for name, value in self._packed.items()})

    def _after(self, gradients: Any, of_outputs: Any) -> None:
        self._put(self._packed)  # a graph that is retained must not keep views of the slot

    def _put(self, values: dict[str, Any]) -> None:
        node = self._node()
        for name, value in values.items():
            setattr(node, name, value)


def _mapped(value: Any, change: Change) -> Any:
    """`value`, or a list or tuple of the same, with what `change` returns in the place of what it knows."""
    if type(value) not in (list, tuple):
        changed = change(value)
        return value if changed is None else changed
    items = [_mapped(item, change) for item in value]
    return value if all(new is old for new, old in zip(items, value, strict=True)) else type(value)(items)
