"""What users did to a module since its last pass: modules and weights that were edited, replaced, added or taken away."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress, repeat
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..base.layout import overlapping
from ..base.torch_internals import COMPILED_CALL
from ..errors import StateError
from ..stores.base import Store
from .copies.transfer import Transfer
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
        self.stores: tuple[Store, ...] = tuple(dict.fromkeys(part.blob.store for part in self._parts))
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


class Changes:
    """Finds out what was changed about a module between passes, and commits it. Owned by an engine, used under its lock.

    Order of calls: `expect` once the module was cut into groups; `notice` before each forward, `settle` before each use of
    weights that are at rest; `invalidate` before the module is cut again.
    """

    def __init__(self, transfer: Transfer, publish: Callable[[], None]) -> None:
        """
        Args:
            publish: is called once weights in group files were edited, and rest in other files.
        """
        self._transfer = transfer
        self._publish = publish
        self._groups: tuple[Group, ...] = ()
        self._groups_of: Mapping[nn.Module, Sequence[Group]] = {}
        self._seen: dict[nn.Module, Seen] = {}
        self._watches: dict[nn.Module, Watch] = {}
        self._checks_all_calls = False
        self._is_known = False
        """Whether groups and gates are what the module was last found to need: nothing broke in between."""

    def expect(
        self,
        root: nn.Module,
        groups: Sequence[Group],
        groups_of: Mapping[nn.Module, Sequence[Group]],
        *,
        checks_all_calls: bool,
    ) -> None:
        """The module is what it was cut into groups for.

        Args:
            groups_of: the groups that calls of modules with gates need.
            checks_all_calls: whether it counts for every module if it is compiled, and not only for those with gates.
        """
        self._groups, self._groups_of, self._watches = tuple(groups), groups_of, {}
        self._seen = {module: Seen.of(module) for module in root.modules()}
        self._checks_all_calls = checks_all_calls
        self._is_known = True

    def invalidate(self) -> None:
        """What the module consists of is not known until `expect`."""
        self._is_known = False

    def clear(self) -> None:
        """The groups are given up."""
        self.invalidate()
        self._groups, self._groups_of, self._seen, self._watches = (), {}, {}, {}

    def recover(self) -> None:
        """A pass failed: weights may be bound to other places at rest than before."""
        self._watches = {}

    def notice(self, top: nn.Module) -> set[Group] | None:
        """Commit what happened to the weights under `top` since they were left at rest.

        Returns:
            The groups that calls under `top` can need; None if the module has to be cut into groups again.

        Raises:
            GroupFileError: a file was changed by another program, or a new one cannot be written. No weight is lost.
        """
        if not self._is_known:
            return None
        watch = self._watches.get(top)
        if watch is None:
            watch = Watch(top, self._groups_of, self._seen, is_cut_by_calls=self._checks_all_calls)
            self._watches[top] = watch
        if not watch.has_same_modules():
            return None
        if not watch.has_same_tensors():
            if any(group.was_moved() for group in watch.scope):
                return None
            if not self._commit_replacements([group for group in watch.scope if not group.is_as_left()]):
                return None
            watch.expect_tensors()
        was_edited = True
        try:
            found = [store.commit_edits(self._transfer.wait_for_copies) for store in watch.stores]
            was_edited = any(found)
        finally:
            if was_edited:  # or one could not take them up: others before it may rest in other files by now
                for group in watch.scope:
                    group.rebind_moved()
                watch.expect_tensors()
        if was_edited:
            self._publish()
            if any(group.is_outdated for group in watch.scope):
                return None
        return watch.scope

    def settle(self, group: Group, *, binds: bool) -> None:
        """Commit what happened to one group's weights at rest in the middle of a pass.

        Args:
            binds: whether a module's call needs the group. (Backward computes with what its forward had, which the blob
                holds still, also if a weight was replaced since.)

        Raises:
            StateError: a weight was replaced by a value that does not fit into its place.
        """
        was_replaced = group.was_replaced()
        if was_replaced and binds and not self._commit_replacements([group]):
            raise StateError(
                f"A weight of {group.group_id!r} was given another dtype, shape or memory that others share, or what it "
                f"was before is kept, in the middle of a forward. Do that between forwards."
            )
        if group.was_touched() and (binds or not was_replaced):
            group.commit_edits(self._transfer)

    def _commit_replacements(self, groups: list[Group]) -> bool:
        """Commit values that were put in place of views at rest. False if groups have to be laid out again for that."""
        replaced: list[torch.Tensor] = []
        for group in groups:
            group.check()
            found = group.replaced()
            if found is None:
                return False
            replaced += found
        if replaced:
            # A value that was tied, or swapped, shares memory with a place at rest: writing there would change that weight.
            at_rest = [view for group in self._groups for part in group.parts for view in part.blob.rest]
            clusters = overlapping([tensor.detach() for tensor in replaced] + at_rest)
            if any(cluster[0] < len(replaced) and len(cluster) > 1 for cluster in clusters):
                return False
            for group in groups:
                group.commit_replacements()
        return True
