"""Backward over offloaded weights: autograd saves a reference to each weight, and its bytes come on unpacking.

[Note: Backward]
While a forward records a graph, every gate pushes saved-tensor hooks over the hooks that are in force (a checkpoint's,
activation offloading's). Every view of a slot that autograd would save becomes a `SavedWeight`: a blob, and a place in it.
All other tensors go to the hooks below. So only the engine ever holds memory of a slot, and a slot that is filled again
cannot change the results of backward.

A backward pass of the engine lasts from the first time that autograd asks for a weight, or calls a module again for a
checkpoint, until the graph task is over. A group is onloaded when autograd asks for it, and held until autograd has come
to another node: all work of the node before is enqueued by then. Modules that a checkpoint calls again go through their
gates as in forward, and keep their groups until the next call or node, which mostly needs them. Modules inside of groups
have gates too (`InnerGate`), because a checkpoint may enclose a part of a block, and then calls that part alone. The
schedule learns the order as in any pass, and first guesses the reverse of the forward's order.

Autograd does not report that a backward breaks off. But it holds our callback for the end, and drops it either way.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks

from ..base.arena import arena_for
from ..base.device import Backend, Stream
from ..base.layout import span_of
from ..base.saved import (
    Kept,
    Pack,
    Passed,
    Unpack,
    check_version,
    first_of_two_runs,
    hooks_in_force,
    keep,
    unwatched,
    view_of,
)
from ..base.torch_internals import (
    are_saved_tensors_hooks_enabled,
    current_autograd_node,
    current_graph_task_id,
    is_traceable_wrapper_subclass,
    neg_view,
    tree_leaves,
)
from ..base.tuning import tuning
from ..errors import StateError
from .contexts import Context, nodes_with
from .groups.group import Group
from .groups.part import Part
from .passes import Passes

T = TypeVar("T")
R = TypeVar("R")
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class SavedWeight:
    """A view of a weight, held by autograd without its memory."""

    def __init__(self, backward: Backward, tensor: torch.Tensor, part: Part, index: int, offset: int) -> None:
        """
        Args:
            index: Index of the weight among the tensors of `part`.
            offset: Bytes from the beginning of the blob to the first byte of `tensor`.
        """
        self._backward = backward
        self.part, self.index, self.offset = part, index, offset
        self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()
        self._is_conj, self._is_neg = tensor.is_conj(), tensor.is_neg()
        self._version = part.version_of(index)
        self.pass_number = backward._passes.counters.passes

    def unpack(self) -> torch.Tensor:
        self._backward._passes.group_of(self.part)  # raises if it was given up
        check_version(self.part.version_of(self.index), self._version, f"the weight {self.fqn!r}")
        view = self._backward.bring(self)
        if self._is_conj:
            view = view.conj()
        return neg_view(view) if self._is_neg else view

    @property
    def fqn(self) -> str:
        return self.part.refs[self.index].fqn


class _BackwardPass:
    """One run of autograd, and the groups that its current node uses."""

    def __init__(self, end: Callable[[], None]) -> None:
        self.end = weakref.ref(end)
        """The callback for the end. It is gone once the run has ended or broken off."""
        self.node: Any = None
        self.uses: list[_GroupHold] = []


@dataclass(slots=True, eq=False)
class _GroupHold:
    """A reason to hold a group."""

    group: Group
    stream: Stream
    is_call: bool
    """Whether only a call that a checkpoint repeats needs the group so far. The nodes that follow most likely will too."""
    handed: list[tuple[SavedWeight, torch.Tensor, int]] = field(default_factory=list)
    """The views of the slot that autograd's nodes got, and their versions then."""


class Backward:
    """The engine's side of autograd. Any thread may use it; all methods but the hooks run under the engine's lock."""

    def __init__(self, passes: Passes, backend: Backend) -> None:
        self._owner: Passes | None = passes
        self._backend = backend
        self._over = threading.Condition(passes.lock)
        self._tasks: dict[int, _BackwardPass] = passes.tasks
        """The runs of autograd in the pass in progress. There are several if a checkpoint runs autograd inside."""
        self._thread = 0
        self._has_failed = False
        self._edited: SavedWeight | None = None
        """A weight that a node has changed in place."""

    @property
    def _passes(self) -> Passes:
        """The passes of the module.

        Raises:
            StateError: The module is not offloaded any more.
        """
        if self._owner is None:
            raise StateError(
                "Backward needs weights that are not offloaded any more: remove() was called between forward and backward. "
                "Call it after backward()."
            )
        return self._owner

    def close(self) -> None:
        """End offloading. Graphs that ask for weights later get an error."""
        self._owner = None

    # ---------------------------------------------------------------- saving

    def hooks(self) -> saved_tensors_hooks | None:
        """Hooks to push around a call that records a graph. None if it records none, or our hooks are in force."""
        if not torch.is_grad_enabled() or not are_saved_tensors_hooks_enabled():
            return None
        below = hooks_in_force()
        if self.is_ours(below):
            return None
        pack = unwatched(lambda tensor: self._packed(tensor) or self._recast(tensor, below) or keep(tensor, below))
        pack.backward, pack.below = self, None if below is None else below[0]  # type: ignore[attr-defined]
        # From torch 2.15 on selective checkpoints show what they keep to a user's hooks, or warn that they do not. These are
        # no user's: the checkpoint has to look below them, as it does for its own.
        pack._checkpoint_internal, pack._user_hooks = True, below  # type: ignore[attr-defined]
        unpack = unwatched(lambda packed: packed.unpack())
        if below is not None:  # a checkpoint calls modules again, whose gates are there as long as the model is
            unpack.root = self._passes.root  # type: ignore[attr-defined]
        return saved_tensors_hooks(pack, unpack)

    def keep_root(self) -> None:
        """Keep the model as long as the graph, if a reentrant checkpoint makes the call in progress, and will make it again."""
        kind = self._passes.kind
        if kind is not None and kind.with_grad and not torch.is_grad_enabled():
            node = first_of_two_runs()
            if node is not None:
                node.group_offload_root = self._passes.root

    def check_graph(self, output: Any) -> None:
        """Refuse a graph that was recorded where saved-tensor hooks are forbidden: its backward would find other weights.

        Raises:
            StateError: `output`, what a module returned, has such a graph.
        """
        if are_saved_tensors_hooks_enabled():
            return
        if any(isinstance(each, torch.Tensor) and each.requires_grad for each in tree_leaves(output)):
            raise StateError(
                f"{self._passes.name} is group-offloaded and was called with gradients enabled where "
                f"saved-tensor hooks are forbidden (torch.autograd.graph.disable_saved_tensors_hooks). Backward gets offloaded "
                f"weights through these hooks. Call the module outside of that context, or inside of torch.no_grad()."
            )

    def keep_contexts(self, output: Any, groups: Sequence[Group], first: int) -> None:
        """Take over what autograd functions that a call has recorded keep of `groups`. See [Note: Contexts that keep weights].

        Args:
            output: What the call returned.
            first: The number of autograd nodes before the call.
        """
        part_of = {id(owner): part for group in groups for owner, part in group.objects_beside()}
        for node, parts in nodes_with(part_of, output, first) if part_of else ():
            Context(node, self._reference, partial(self._begin_node, parts))

    def _reference(self, value: Any) -> SavedWeight | None:
        if not isinstance(value, torch.Tensor) or self._in_bound(Group.place_of, value) is not None:
            return None  # a weight itself is bound when the node runs
        return self._saved(value)

    def _saved(self, tensor: torch.Tensor) -> SavedWeight | None:
        if tensor.device != self._backend.device:
            return None
        found = self._in_bound(Group.find, tensor.data_ptr())
        return None if found is None else SavedWeight(self, tensor, *found)

    def _in_bound(self, find: Callable[[Group, T], R | None], what: T) -> R | None:
        """What the method `find` of a bound group returns, of the group that was bound last; None if each returns None."""
        bound = reversed(self._passes.memory.bound)
        return next((found for group in bound if (found := find(group, what)) is not None), None)

    def _begin_node(self, parts: Sequence[Part], node: Any) -> Callable[[Any], torch.Tensor | None]:
        """Bind the weights of the groups of `parts` for a node that is about to run, until autograd has come to another one.

        Returns:
            What makes a tensor of a `SavedWeight` of these parts, and returns None for all else.
        """
        passes = self._passes
        with self._locked():
            if not self.join(current_graph_task_id()):
                raise StateError(
                    f"A backward inside of a forward of {passes.name} needs weights that bitsandbytes keeps out "
                    f"of autograd's sight. Call backward() after the forward."
                )
            groups = [passes.group_of(part) for part in parts]
            now = self._tasks[current_graph_task_id()]
            self._advance(now, groups, node)
            uses = {group: self._use(now, group, is_call=False, binds=True) for group in groups}
            return lambda value: (
                self._hand(value, uses[passes.group_of(value.part)]) if isinstance(value, SavedWeight) else None
            )

    def is_ours(self, hooks: tuple[Pack, Unpack] | None) -> bool:
        return hooks is not None and getattr(hooks[0], "backward", None) is self

    def _packed(self, tensor: Any) -> SavedWeight | Passed | None:
        if type(tensor) in _PLAIN:
            return self._saved(tensor) if tensor.layout is torch.strided else None
        if not is_traceable_wrapper_subclass(tensor):
            return None
        names, context = tensor.__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in names}
        parts: dict[str, Any] = {name: self._packed(part) for name, part in inner.items()}
        if not any(parts.values()):
            return None
        for name, part in inner.items():
            if parts[name] is None:  # what is no tensor stays: the mesh of a DTensor
                parts[name] = keep(part, None) if isinstance(part, torch.Tensor) else part
        kind, size, stride = type(tensor), tensor.size(), tensor.stride()

        def unpack(parts: dict[str, Any]) -> torch.Tensor:  # `tensor` is around views of slots, and is not kept
            found = {
                name: part.unpack() if isinstance(part, (SavedWeight, Passed, Kept)) else part
                for name, part in parts.items()
            }
            whole: torch.Tensor = kind.__tensor_unflatten__(found, context, size, stride)
            return whole

        return Passed(parts, unpack)

    def _recast(self, tensor: torch.Tensor, below: tuple[Pack, Unpack] | None) -> Passed | None:
        """The object to hold for (a view of) a weight that a hook has bound to other memory (layerwise casting)."""
        weight = tensor if tensor._base is None else tensor._base
        if type(weight) not in _PLAIN:
            return None
        found = self._in_bound(Group.place_of, weight) or self._in_bound(Group.place_of_alias, weight)
        if found is None:
            return None
        part, index = found
        version = part.version_of(index)

        def unpack(kept: Kept | Passed) -> torch.Tensor:
            check_version(part.version_of(index), version, f"the weight {part.refs[index].fqn!r}")
            return kept.unpack()

        return Passed(keep(tensor.data, below), unpack)  # the weight itself is bound to other memory by then

    # ---------------------------------------------------------------- bringing back

    def bring(self, saved: SavedWeight) -> torch.Tensor:
        """The weight on the device, for autograd's current node."""
        passes = self._passes
        task = current_graph_task_id()
        is_in_forward = passes.is_running and not self._tasks and passes.counters.passes == saved.pass_number
        if task == -1 or is_in_forward:
            # A caller inspects the graph, or runs it inside of the forward that records it.
            return self.copy_of(saved)
        with self._locked():
            if not self.join(task):
                return self.copy_of(saved)
            group = passes.group_of(saved.part)  # a forward that held the lock may have cut the groups again
            now = self._tasks[task]
            self._advance(now, (group,))
            self._note_edits(now.uses)
            self._refuse_edit()
            return self._hand(saved, self._use(now, group, is_call=False))

    def _hand(self, saved: SavedWeight, use: _GroupHold) -> torch.Tensor:
        """The weight, for a node that uses its group."""
        if torch.is_grad_enabled():
            return self.copy_of(saved)  # the graph of this backward may outlive the slot's bytes
        group = use.group
        assert group.slot is not None
        start = group.offset + saved.part.offset + saved.offset
        view = view_of(group.slot.memory, start, saved.dtype, saved.size, saved.stride)
        use.handed.append((saved, view, view._version))
        return view

    def copy_of(self, saved: SavedWeight) -> torch.Tensor:
        """A copy of a saved weight in new memory on the device."""
        blob = saved.part.blob
        rest, spec = blob.rest[saved.index], blob.layout.specs[saved.index]
        whole = torch.empty(0, dtype=torch.uint8, device=rest.device).set_(rest.untyped_storage())
        start = saved.offset - spec.offset + int(rest.storage_offset()) * rest.itemsize
        source = whole[start : start + span_of(saved.size, saved.stride, saved.dtype.itemsize)]
        memory = arena_for(self._backend).take(source.numel())
        self._backend.copy(memory, source, self._backend.current_stream(), blocking=True)
        return view_of(memory, 0, saved.dtype, saved.size, saved.stride)

    def begin_call(self, groups: Sequence[Group]) -> None:
        """Begin a gate's call. Inside a run of autograd it joins the backward pass; else it waits until that is over."""
        task = current_graph_task_id()
        if task == -1:
            if self._tasks:
                self._wait_until_over()
        elif self.join(task):
            now = self._tasks[task]
            self._advance(now, groups)
            self._release(now, groups, of_calls_only=True)
            self._refuse_edit()
            for group in groups:
                if group.num_bytes:
                    self._use(now, group, is_call=True)

    def wait_for_others(self) -> None:
        """Wait for a backward in another thread to end, and end a backward that broke off."""
        if current_graph_task_id() == -1:
            self._wait_until_over()

    def join(self, task: int) -> bool:
        """Make a run of autograd part of the backward pass. The first run begins that pass.

        Returns:
            Whether the run is part of a backward pass. False in the middle of a forward, whose pass goes on.
        """
        if task in self._tasks:
            return True
        if self._thread != threading.get_ident():
            self._wait_until_over()
        if not self._tasks and self._passes.is_running:
            return False
        is_first = not self._tasks

        def end() -> None:
            self.leave(task, completed=True)

        # Autograd drops the callback in any case, also when the run breaks off.
        weakref.finalize(end, self.leave, task, completed=False).atexit = False
        Variable._execution_engine.queue_callback(end)
        self._tasks[task] = _BackwardPass(end)
        if is_first:
            self._thread = threading.get_ident()
            self._has_failed = False
            self._passes.begin_backward()
        return True

    def leave(self, task: int, *, completed: bool) -> None:
        """End a run of autograd. The last run ends the backward pass."""
        if task not in self._tasks:
            return
        with self._passes.lock:
            found = self._tasks.get(task)
            if found is None:
                return
            self._has_failed |= not completed
            if completed:
                self._release(found, ())
            else:
                self._note_edits(found.uses)
            if len(self._tasks) == 1:
                self._passes.end_backward(completed=not self._has_failed)
                self._thread = 0
            del self._tasks[task]
            self._over.notify_all()
            if completed:
                self._refuse_edit()
            self._edited = None

    def _advance(self, now: _BackwardPass, groups: Sequence[Group], node: Any = None) -> None:
        """Release the groups of the previous node once autograd is at another, except `groups`, which are needed next.

        Args:
            node: The node that is about to run. Default: the one that runs.
        """
        node = current_autograd_node() if node is None else node
        if node is not now.node:
            now.node = node
            self._release(now, groups)
            self._refuse_edit()

    def _use(self, now: _BackwardPass, group: Group, *, is_call: bool, binds: bool = False) -> _GroupHold:
        """Onload a group, and hold it until `_release`."""
        passes = self._passes
        stream = self._backend.current_stream()
        for use in now.uses:
            if use.group is group and use.stream == stream and (group.is_bound or not binds):
                use.is_call &= is_call
                return use
        passes.acquire(group, binds=binds)
        now.uses.append(_GroupHold(group, stream, is_call))
        passes.prefetcher.before_call()
        return now.uses[-1]

    def _release(self, now: _BackwardPass, needed: Sequence[Group], *, of_calls_only: bool = False) -> None:
        ended = [use for use in now.uses if use.group not in needed and (use.is_call or not of_calls_only)]
        now.uses = [use for use in now.uses if use not in ended]
        self._note_edits(ended)
        for use in ended:
            self._passes.release(use.group, use.stream)

    def _note_edits(self, uses: Sequence[_GroupHold]) -> None:
        """Find the weights that nodes have changed in place: the slot has the edit, and the blob has not."""
        for saved, view, version in (each for use in uses for each in use.handed):
            if view._version != version:
                saved.part.sent_generation = -1
                self._edited = saved

    def _refuse_edit(self) -> None:
        edited, self._edited = self._edited, None
        if edited is not None:
            raise StateError(
                f"A backward changed the weight {edited.fqn!r} in place. The weight is offloaded, and backward gets a view of "
                f"the device's copy, so the change is lost. Change it before the forward or after the backward."
            )

    def _wait_until_over(self) -> None:
        """Wait for another thread's backward to end. A backward that broke off is ended here."""
        patience = tuning().backward_timeout_seconds
        deadline = time.monotonic() + patience
        while self._tasks:
            for task, each in [*self._tasks.items()]:
                if each.end() is None or self._thread == threading.get_ident():
                    self.leave(task, completed=False)
            if self._tasks and time.monotonic() > deadline:
                raise StateError(
                    f"A forward of {self._passes.name} waited {patience:.0f} s for a backward in another thread. Don't let a "
                    f"backward wait for a thread that calls the module."
                )
            if self._tasks:
                self._over.wait(min(1.0, patience))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        patience = tuning().backward_timeout_seconds
        if not self._passes.lock.acquire(timeout=patience):
            raise StateError(
                f"backward() waited {patience:.0f} s for a forward of {self._passes.name} in another "
                f"thread. If that forward waits for this backward, call torch.autograd.grad() after it instead."
            )
        try:
            yield
        finally:
            self._passes.lock.release()
