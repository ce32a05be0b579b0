"""Changes of a module since its last pass: modules and weights that were edited, replaced, added or taken away."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat, starmap
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..base.layout import overlapping
from ..base.torch_internals import COMPILED_CALL
from ..errors import StateError
from ..partition import PlacesOfFsdp, adapter_layers
from ..stores.base import Store
from .copies.transfer import Transfer
from .groups.group import Group
from .groups.part import Part
from .groups.tensors import Forms

_values, _get, _address = dict.values, dict.get, torch.Tensor.data_ptr
_tables = itemgetter("_modules", "_parameters", "_buffers")


@dataclass(slots=True, eq=False)
class Seen:
    """The contents of a module when it was cut into groups."""

    children: tuple[nn.Module, ...]
    tables: tuple[dict[str, Any], ...]
    members: tuple[tuple[Any, ...], ...]
    """The values of each table; None for a parameter that FSDP2 exchanges."""
    call: Any
    """The module's compiled call, or its gate."""
    left: frozenset[str] = frozenset()
    """The names of parameters that FSDP2 exchanges."""

    @classmethod
    def of(cls, module: nn.Module, left: frozenset[str] = frozenset()) -> Seen:
        call = module.__dict__.get(COMPILED_CALL)
        if isinstance(module, torch.jit.ScriptModule):  # torch forbids changes of its tables
            return cls((), (), (), call)
        tables = _tables(module.__dict__)
        members = [tuple(table.values()) for table in tables]
        if left:  # nothing here keeps alive what FSDP2 has replaced since
            members[1] = tuple(None if name in left else value for name, value in tables[1].items())
        return cls(
            tuple(child for child in module._modules.values() if child is not None), tables, tuple(members), call, left
        )


class Watch:
    """The groups that calls under one module can need, and tests whether modules and weights are still the same.

    Every pass begins with these tests of every module and weight: so the data is flat, for loops in C code.
    """

    def __init__(
        self,
        top: nn.Module,
        groups_of: Mapping[nn.Module, Sequence[Group]],
        seen: Mapping[nn.Module, Seen],
        *,
        checks_all_calls: bool,
    ) -> None:
        """Arguments as those of `Changes.expect`."""
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
        self._tables: list[dict[str, Any]] = []
        self._members: list[Any] = []
        """The values of all these tables, one after another."""
        self._of_fsdp: list[tuple[dict[str, Any], dict[str, Any], frozenset[str]]] = []
        """The tables in which FSDP2 exchanges parameters, what was in them, and the names of these parameters."""
        for each in map(seen.__getitem__, inside):
            for table, values in zip(each.tables, each.members, strict=True):
                if each.left and table is each.tables[1]:
                    self._of_fsdp.append((table, dict(zip(table, values, strict=True)), each.left))
                else:
                    self._tables.append(table)
                    self._members += values
        self._sizes = [*map(len, self._tables)]
        self._lazy = [member for member in self._members if is_lazy(member)]
        adapters = adapter_layers()
        self.adapted: list[Any] = [module for module in inside if isinstance(module, adapters)]
        """The layers of peft."""
        self._call = seen[top].call
        called = [each for each in inside if each is not top and (checks_all_calls or each in groups_of)]
        self._names = [each.__dict__ for each in called]
        self._calls = [seen[each].call for each in called]
        self.scope = set(scope)
        parts = [part for group in scope for part in group.parts]
        stores = dict.fromkeys(part.blob.store for part in parts)
        self.late = [store for store in stores if store.commits_late]
        """The stores whose edits may be committed in the middle of a pass."""
        self.early = [store for store in stores if not store.commits_late]
        self._tensors = [ref.tensor for part in parts for ref in part.refs]
        self._forms = Forms([view for part in parts for view in part.blob.rest])
        self._wrapped = [part for part in parts if any(ref.path for ref in part.refs)]
        self._addresses = [address for part in parts for address in part.addresses]

    def has_same_modules(self, top: nn.Module) -> bool:
        """Whether `top`, which the watch was made for, has the modules inside that it had. (A watch keeps no `top` alive.)"""
        # Modules are not looked at, only their tables: the device has nothing to do meanwhile. See `Changes.recover`.
        return (
            top.__dict__.get(COMPILED_CALL) is self._call
            and [*map(len, self._tables)] == self._sizes
            and all(map(is_, chain.from_iterable(map(_values, self._tables)), self._members))
            and all(map(is_lazy, self._lazy))
            and all(starmap(_holds_the_same, self._of_fsdp))
            and all(map(is_, map(_get, self._names, repeat(COMPILED_CALL)), self._calls))
        )

    def has_same_tensors(self) -> bool:
        """Whether every tensor is the view that it was bound to."""
        return (
            list(map(_address, self._tensors)) == self._addresses
            and self._forms.are_of(self._tensors)
            and all(all(part.as_left()) for part in self._wrapped)
        )


def _holds_the_same(table: dict[str, Any], before: dict[str, Any], left: frozenset[str]) -> bool:
    return [*table] == [*before] and all(table[name] is value for name, value in before.items() if name not in left)


class Changes:
    """Finds and commits changes of a module between passes. An engine owns it, and uses it under its lock.

    Order of calls: `expect` once groups were built; `notice` before each forward, `commit_group` before each use of weights
    that no slot has; `invalidate` before groups are built again.
    """

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._groups: tuple[Group, ...] = ()
        self._groups_of: Mapping[nn.Module, Sequence[Group]] = {}
        self._seen: weakref.WeakKeyDictionary[nn.Module, Seen] = weakref.WeakKeyDictionary()
        self._watches: weakref.WeakKeyDictionary[nn.Module, Watch] = weakref.WeakKeyDictionary()
        self._checks_all_calls = False
        self._late: dict[Store, None] = {}
        """The stores whose edits are committed before their first use in the pass in progress."""
        self._is_known = False
        """Whether groups and gates fit the module as last seen. False after an exception on the way there."""

    def expect(
        self,
        root: nn.Module,
        groups: Sequence[Group],
        groups_of: Mapping[nn.Module, Sequence[Group]],
        left: PlacesOfFsdp,
        *,
        checks_all_calls: bool,
    ) -> None:
        """Take the module as it is now for the one that the groups were cut from.

        Args:
            groups_of: Groups that calls of modules with gates need.
            left: Parameters that FSDP2 exchanges, which is no change.
            checks_all_calls: Whether a compiled call counts as a change on every module, not only on those with gates.
        """
        self._groups, self._groups_of = tuple(groups), groups_of
        self._watches.clear()
        self._seen.clear()
        self._seen.update((module, Seen.of(module, left.get(module, frozenset()))) for module in root.modules())
        self._checks_all_calls = checks_all_calls
        self._is_known = True

    def invalidate(self) -> None:
        """Let `notice` find that the module has to be cut again, until the next `expect`."""
        self._is_known = False

    def clear(self) -> None:
        """Forget the module and its groups."""
        self.invalidate()
        self._groups, self._groups_of = (), {}
        self._seen.clear()
        self._watches.clear()

    def recover(self) -> None:
        """Look again after a pass that failed.

        The expected addresses are forgotten: weights may be bound to other places at rest. A module that has another table
        (`module._parameters = {...}`) may be what it failed for: the new weights are at rest where torch looks for them.
        """
        self.end_pass()
        self._watches.clear()
        self._is_known = self._is_known and self._has_same_tables()

    def _has_same_tables(self) -> bool:
        seen = ((module, each.tables) for module, each in self._seen.items() if each.tables)
        return all(all(map(is_, _tables(module.__dict__), tables)) for module, tables in seen)

    def notice(self, top: nn.Module, *, all_edits: bool) -> set[Group] | None:
        """Commit changes of the weights under `top` since they were left at rest.

        Args:
            all_edits: Whether edits are committed now wherever they are. If not, those of stores that can wait are committed by
                `commit_late`, in the pass that begins: the device has nothing to do before that.

        Returns:
            The groups that calls under `top` can need; None if the module has to be cut into groups again.

        Raises:
            GroupFileError: A file was changed by another program. No weight is lost.
        """
        if not self._is_known:
            return None
        watch = self._watches.get(top)
        if watch is None:
            watch = self._watches[top] = Watch(
                top, self._groups_of, self._seen, checks_all_calls=self._checks_all_calls
            )
        if not watch.has_same_modules(top):
            return None
        if not watch.has_same_tensors():
            if any(part.was_moved() for group in watch.scope for part in group.parts):
                return None
            replaced = [group for group in watch.scope if not all(all(part.as_left()) for part in group.parts)]
            if not self._commit_replacements(replaced):
                return None
        late, now = ([], [*watch.early, *watch.late]) if all_edits else (watch.late, watch.early)
        self._late = dict.fromkeys(late)
        found = [store.commit_edits(self._transfer.wait_for_copies) for store in now]
        if any(found) and any(group.is_outdated for group in watch.scope):
            return None
        return watch.scope

    def commit_late(self, groups: Sequence[Group]) -> None:
        """Commit edits from before the pass, if that was left for now: these groups are about to be sent, or used."""
        if not self._late:
            return
        for group in groups:
            for part in group.parts:
                store = part.blob.store
                if store in self._late:
                    was_edited = store.commit_edits(self._transfer.wait_for_copies)
                    if was_edited and any(each.is_outdated for each in self._groups):
                        self.invalidate()  # this pass sends them from where they rest
                    del self._late[store]

    def end_pass(self) -> None:
        """The pass is over. The next forward looks for edits again, also of weights that this one has not used."""
        self._late = {}

    def undo_merges(self, top: nn.Module) -> bool:
        """Take adapters that are switched off out of the weights that they are merged into. Returns whether there were any.

        peft does so in the next forward of the layer, through `weight.data`: an edit in a slot that leaves no trace. Call this
        before a forward that `notice` has returned the groups of.
        """
        switched_off = [layer for layer in self._watches[top].adapted if layer.disable_adapters and layer.merged]
        for layer in switched_off:
            layer.unmerge()
        return bool(switched_off)

    def commit_group(self, group: Group, *, binds: bool) -> None:
        """Commit changes of one group's weights at rest in the middle of a pass.

        Args:
            binds: Whether a module's call needs the group. (Backward computes with the values of its forward, which the
                blob still holds after a weight was replaced.)

        Raises:
            StateError: A weight was replaced by a value that does not fit into its place.
        """
        if self._late:
            self.commit_late((group,))
        was_replaced = group.was_replaced()
        if was_replaced and binds and not self._commit_replacements([group]):
            raise StateError(
                f"A weight of {group.group_id!r} was given another dtype, shape or memory in the middle of a forward. Do that "
                f"between forwards."
            )
        if group.was_touched() and (binds or not was_replaced):
            group.commit_edits(self._transfer)

    def _commit_replacements(self, groups: list[Group]) -> bool:
        """Commit values that replaced views at rest. Returns False if groups have to be laid out again for that."""
        replaced: list[tuple[Group, Part, int]] = []
        for group in groups:
            group.check()
            found = group.replaced()
            if found is None:
                return False
            replaced += [(group, *place) for place in found]
        if replaced:
            # A tied or swapped value shares memory with another weight's place at rest: a write there would change that weight.
            at_rest = [view for group in self._groups for part in group.parts for view in part.blob.rest]
            values = [part.refs[index].tensor.detach() for _, part, index in replaced]
            clusters = overlapping(values + at_rest)
            if any(cluster[0] < len(values) and len(cluster) > 1 for cluster in clusters):
                return False
        for group, part, index in replaced:
            group.commit_replacement(part, index)
        return True
