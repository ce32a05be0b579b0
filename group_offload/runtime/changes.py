"""Whether a module still is what it was when it was cut into groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress, repeat
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..base.torch_internals import COMPILED_CALL
from ..stores.base import Store
from .groups.forms import Forms
from .groups.group import Group

_values, _get, _address = dict.values, dict.get, torch.Tensor.data_ptr
_tables = itemgetter("_modules", "_parameters", "_buffers")


@dataclass(slots=True, eq=False)
class Seen:
    """What a module consisted of when it was cut into groups."""

    children: tuple[nn.Module, ...]
    members: tuple[tuple[Any, ...], ...]
    """What was in each of its tables."""
    names: dict[str, Any]
    call: Any

    @classmethod
    def of(cls, module: nn.Module) -> Seen:
        if isinstance(module, torch.jit.ScriptModule):  # torch does not let its tables be changed
            return cls(children=(), members=(), names={}, call=None)
        return cls(
            children=tuple(child for child in module._modules.values() if child is not None),
            members=tuple(tuple(table.values()) for table in _tables(module.__dict__)),
            names=module.__dict__,
            call=module.__dict__.get(COMPILED_CALL),
        )


class Watch:
    """What calls of one module and of those inside it can need, and whether modules and weights still are what they were.

    It is asked at the beginning of every pass, about every module and weight: so all that C code can loop over is flat.
    """

    def __init__(
        self,
        top: nn.Module,
        groups_of: Mapping[nn.Module, Sequence[Group]],
        seen: dict[nn.Module, Seen],
        *,
        is_cut_by_calls: bool,
    ) -> None:
        """
        Args:
            groups_of: what calls of modules with gates need.
            is_cut_by_calls: it counts for every module, not only for those with gates, whether it is compiled.
        """
        scope: dict[Group, None] = {}
        inside: dict[nn.Module, None] = {}
        pending = [top]
        while pending:
            module = pending.pop()
            if module in inside:
                continue
            inside[module] = None
            scope.update(dict.fromkeys(groups_of.get(module, ())))
            pending.extend(seen[module].children)
        before = [seen[module] for module in inside]
        self._modules = [each.names for each in before if each.members]
        members = [found for each in before for found in each.members]
        self._sizes = tuple(map(len, members))
        self._members = list(chain.from_iterable(members))
        self._lazy = [member for member in self._members if is_lazy(member)]
        called = [seen[module] for module in inside if is_cut_by_calls or module in groups_of]
        self._names = [each.names for each in called]
        self._calls = [each.call for each in called]
        self.scope = set(scope)
        self._groups = tuple(scope)
        self._parts = [part for group in scope for part in group.parts]
        self.stores: tuple[Store, ...] = tuple(dict.fromkeys(part.image.store for part in self._parts))
        self._tensors = [ref.tensor for part in self._parts for ref in part.refs]
        self._forms = Forms([view for part in self._parts for view in part.rest])
        self._wrapped = [part for part in self._parts if any(ref.path for ref in part.refs)]
        self.expect_tensors()

    def has_same_modules(self) -> bool:
        # The tables are looked up each time: somebody may put another one in the place of one of them.
        tables = [*chain.from_iterable(map(_tables, self._modules))]
        return (
            tuple(map(len, tables)) == self._sizes
            and all(map(is_, chain.from_iterable(map(_values, compress(tables, self._sizes))), self._members))
            and all(map(is_lazy, self._lazy))
            and all(map(is_, map(_get, self._names, repeat(COMPILED_CALL)), self._calls))
        )

    def has_same_tensors(self) -> bool:
        """Whether every tensor is the view that it was bound to."""
        return (
            list(map(_address, self._tensors)) == self._addresses
            and self._forms.are_of(self._tensors)
            and all(all(part.as_left()) for part in self._wrapped)
        )

    def expect_tensors(self) -> None:
        """Take the places where tensors rest now for those where they belong."""
        self._addresses = [address for group in self._groups for address in group.rest_addresses]
