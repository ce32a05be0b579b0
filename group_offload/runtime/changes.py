"""Changes of a module since its last pass: modules and weights that were edited, replaced, added or taken away."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import chain, repeat, starmap
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn

from ..base.torch_internals import COMPILED_CALL, DisableTorchFunctionSubclass
from ..errors import StateError
from ..partition import PlacesOfFsdp, adapter_layers
from ..stores.base import Store
from .groups.group import Group
from .groups.part import Forms, Part, commit_replacements
from .transfers.transfer import Transfer

_values, _get, _address = dict.values, dict.get, torch.Tensor.data_ptr
_tables = itemgetter("_modules", "_parameters", "_buffers")


class ModuleSnapshot:
    """A module as it was when it was cut into groups, and tests whether modules and weights are still the same.

    Every pass begins with these tests of every module and weight: so the data is flat, for loops in C code.
    """

    def __init__(
        self, root: nn.Module, groups: Sequence[Group], called: Container[nn.Module] | None, left: PlacesOfFsdp
    ) -> None:
        """
        Args:
            called: The modules on which a compiled call counts as a change; None for all.
            left: Parameters that FSDP2 exchanges, which is no change.
        """
        self._all_tables = [*_tables_of(root)]
        self._tables: list[dict[str, Any]] = []
        self._members: list[Any] = []
        """The values of all these tables, one after another."""
        self._of_fsdp: list[tuple[dict[str, Any], dict[str, Any], frozenset[str]]] = []
        """The tables in which FSDP2 exchanges parameters, what was in them, and the names of these parameters."""
        exchanged = {id(module._parameters): names for module, names in left.items()}
        for table in self._all_tables:
            names = exchanged.get(id(table))
            if names is None:
                self._tables.append(table)
                self._members += table.values()
            else:  # nothing here keeps alive what FSDP2 has replaced since
                before = {name: None if name in names else value for name, value in table.items()}
                self._of_fsdp.append((table, before, names))
        self._sizes = [*map(len, self._tables)]
        modules = [*root.modules()]
        adapters = adapter_layers()
        self.adapted: list[Any] = [module for module in modules if isinstance(module, adapters)]
        """The layers of peft."""
        self._call = root.__dict__.get(COMPILED_CALL)
        self._names = [each.__dict__ for each in modules[1:] if called is None or each in called]
        self._calls = [*map(_get, self._names, repeat(COMPILED_CALL))]
        parts = _parts_of(groups)
        stores = dict.fromkeys(part.blob.store for part in parts)
        self.late = [store for store in stores if store.commits_late]
        """The stores whose edits may be committed in the middle of a pass."""
        self.early = [store for store in stores if not store.commits_late]
        self._tensors = [ref.tensor for part in parts for ref in part.refs]
        self._forms = Forms([view for part in parts for view in part.blob.rest])
        self._inner = [ref for part in parts for ref in part.refs if ref.path]
        self._addresses = [address for part in parts for address in part.addresses]

    def has_same_modules(self, root: nn.Module) -> bool:
        """Whether the module has the modules inside that it had. (A watch does not keep it alive.)"""
        # Modules are not looked at, only their tables: the device has nothing to do meanwhile. See `Changes.recover`.
        return (
            root.__dict__.get(COMPILED_CALL) is self._call
            and [*map(len, self._tables)] == self._sizes
            and all(map(is_, chain.from_iterable(map(_values, self._tables)), self._members))
            and all(starmap(_holds_the_same, self._of_fsdp))
            and all(map(is_, map(_get, self._names, repeat(COMPILED_CALL)), self._calls))
        )

    def has_same_tables(self, root: nn.Module) -> bool:
        """Whether no module has another table (`module._parameters = {...}`)."""
        return [*map(id, _tables_of(root))] == [*map(id, self._all_tables)]

    def has_same_tensors(self) -> bool:
        """Whether every tensor is the view that it was bound to."""
        with DisableTorchFunctionSubclass():
            are_in_place = list(map(_address, self._tensors)) == self._addresses and self._forms.are_of(self._tensors)
        return are_in_place and all(ref.is_in_place() for ref in self._inner)


def _tables_of(root: nn.Module) -> Iterator[dict[str, Any]]:
    for module in root.modules():
        if not isinstance(module, torch.jit.ScriptModule):  # torch forbids changes of its tables
            yield from _tables(module.__dict__)


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
        self._watch: ModuleSnapshot | None = None
        """None if groups and gates may not fit the module: after an exception on the way there, for instance."""
        self._parts = weakref.WeakKeyDictionary[nn.Module, tuple[ModuleSnapshot, set[Group]]]()
        """For each module that passes begin at, what is inside of it, and the groups that calls there can need."""
        self._called: Container[nn.Module] | None = None
        self._left: PlacesOfFsdp = {}
        self._late: dict[Store, None] = {}
        """The stores whose edits are committed before their first use in the pass in progress."""

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
        self._called, self._left = None if checks_all_calls else groups_of, left
        self._parts.clear()
        self._watch = ModuleSnapshot(root, groups, self._called, left)

    def invalidate(self) -> None:
        """Let `notice` find that the module has to be cut again, until the next `expect`."""
        self._watch = None

    def clear(self) -> None:
        """Forget the module and its groups."""
        self.invalidate()
        self._groups, self._groups_of, self._called, self._left = (), {}, None, {}
        self._parts.clear()

    def recover(self, root: nn.Module | None) -> None:
        """Look again after a pass that failed. A graph may outlive the module: then `root` is None.

        A module that has another table may be what it failed for: the new weights are where torch looks for them.
        """
        self.end_pass()
        if self._watch is not None and (root is None or not self._watch.has_same_tables(root)):
            self.invalidate()

    def notice(self, root: nn.Module, top: nn.Module, *, all_edits: bool) -> set[Group] | None:
        """Commit changes of the weights since they were offloaded.

        Args:
            all_edits: Whether edits are committed now wherever they are. If not, those of stores that can wait are committed by
                `commit_late`, in the pass that begins: the device has nothing to do before that.

        Returns:
            The groups that calls under `top` can need; None if the module has to be partitioned again.

        Raises:
            StorageError: A file was changed by another program. No weight is lost.
        """
        if self._watch is None:
            return None
        found = self._parts.get(top)
        if found is None:  # made before the whole module is found to be as it was
            scope = set(chain.from_iterable(self._groups_of.get(module, ()) for module in top.modules()))
            found = (self._watch if top is root else ModuleSnapshot(top, [*scope], self._called, self._left)), scope
            watch, at, groups = self._watch, root, self._groups
        else:
            watch, at, groups = found[0], top, (*found[1],)
        if not watch.has_same_modules(at):
            return None
        if not watch.has_same_tensors():
            if any(part.was_moved() for part in _parts_of(groups)):
                return None
            if not commit_replacements(_parts_of(groups), _parts_of(self._groups)):
                return None
        late, now = ([], [*watch.early, *watch.late]) if all_edits else (watch.late, watch.early)
        self._late = dict.fromkeys(late)
        edited = [store.commit_edits(self._transfer.wait_for_copies) for store in now]
        if any(edited) and any(group.is_outdated for group in groups):
            return None
        self._parts[top] = found
        return found[1]

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
                        self.invalidate()  # this pass sends them from where they are stored
                    del self._late[store]

    def end_pass(self) -> None:
        """The pass is over. The next forward looks for edits again, also of weights that this one has not used."""
        self._late = {}

    def undo_merges(self) -> bool:
        """Take adapters that are switched off out of the weights that they are merged into. Returns whether there were any.

        peft does so in the next forward of the layer, through `weight.data`: an edit in a slot that leaves no trace. Call this
        before a forward that `notice` has returned the groups of.
        """
        assert self._watch is not None
        switched_off = [layer for layer in self._watch.adapted if layer.disable_adapters and layer.merged]
        for layer in switched_off:
            layer.unmerge()
        return bool(switched_off)

    def commit_group(self, group: Group, *, binds: bool) -> None:
        """Commit changes of one group's offloaded weights in the middle of a pass.

        Args:
            binds: Whether a module's call needs the group. (Backward computes with the values of its forward, which the
                blob still holds after a weight was replaced.)

        Raises:
            StateError: A weight was replaced by a value that does not fit into its place.
        """
        if self._late:
            self.commit_late((group,))
        was_replaced = group.was_replaced()
        if was_replaced and binds and not commit_replacements(group.parts, _parts_of(self._groups)):
            raise StateError(
                f"A weight of {group.group_id!r} was given another dtype, shape or memory in the middle of a forward. Do that "
                f"between forwards."
            )
        if (was_replaced or group.was_touched()) and (binds or not was_replaced):
            group.commit_edits(self._transfer)


def _parts_of(groups: Sequence[Group]) -> list[Part]:
    return [part for group in groups for part in group.parts]
