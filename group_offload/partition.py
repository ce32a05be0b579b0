"""Partition a module into groups: which tensors move together, and which modules need them when they are called.

Block level and leaf level follow diffusers: the same groups, and so the same file names. Where diffusers' groups give wrong
results these differ: lists inside lists, weights that are read without a call of the module that holds them, weights that
two groups share, modules whose blocks lie deeper than their children.

Once it is known in which order layers are called, those of a block that follow one another are joined to larger groups.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from types import MappingProxyType

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .base.compiled import is_compiled
from .base.forward_source import methods_of, parts_used
from .base.layout import ALIGNMENT, overlapping, span_bytes
from .base.torch_internals import TENSOR_PARALLEL, is_traceable_wrapper_subclass, places_of_fsdp
from .base.tuning import tuning
from .base.weak import gone
from .config import OffloadConfig
from .errors import ConfigError, ModuleError
from .weights import ParamSlot, TensorRef, plain_tensors

LEAF_TYPES = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
    nn.Embedding,
)
"""Layers that diffusers' leaf level makes groups (`_GO_LC_SUPPORTED_PYTORCH_LAYERS`). Other weights go with their owner."""

READS_ITS_CHILDREN = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    torch.jit.ScriptModule,
)
"""Modules that read their children's weights without calling the children, so no gate of a child would open."""

NEVER_CALLED = (
    nn.ModuleList,
    nn.ModuleDict,
    nn.ParameterList,
    nn.ParameterDict,
    nn.utils.parametrize.ParametrizationList,
)
"""Containers: the module around them reads or calls their contents."""

_LISTS = (nn.ModuleList, nn.Sequential)
"""What has blocks as its elements."""


@dataclass(frozen=True)
class Method:
    """A method of a module, beside its forward, that computes with weights of the module or below it."""

    owner: weakref.ref[nn.Module]
    """The module, which an engine does not keep alive."""
    name: str

    @property
    def module(self) -> nn.Module:
        found = self.owner()
        if found is None:
            raise gone()
        return found


@dataclass(frozen=True, slots=True, eq=False)
class GroupSpec:
    """Tensors that move together, and the modules and methods that need them when they are called."""

    group_id: str
    tensors: tuple[TensorRef, ...]
    openers: tuple[nn.Module | Method, ...]
    is_table: bool = False
    """Whether this is the weight of one embedding, whose rows are looked up on the CPU. It never moves."""
    joined: tuple[str, ...] = ()
    """The ids of the groups that were joined to this one."""
    nesting: int = 0
    """0 if the modules need no other group inside, else one more than the highest group that they need there. Groups of one
    nesting level share memory, one after another; groups of different nesting levels are needed at the same time."""


@dataclass(slots=True, eq=False)
class _Unit:
    """A group that is being made. It takes the tensors below its `paths`, but those below longer paths of other units."""

    group_id: str
    openers: list[nn.Module | Method]
    paths: list[str] = field(default_factory=list)
    table: int = 0
    """The id of the one parameter that the unit takes, if it is an embedding's table."""


def partition(
    root: nn.Module,
    config: OffloadConfig,
    without: frozenset[int] = frozenset(),
    followers: Mapping[str, str] = MappingProxyType({}),
) -> tuple[GroupSpec, ...]:
    """The groups of `root`, in registration order.

    Args:
        without: ids of parameters that are to be in no group.
        followers: for ids of groups, the id of the group that is always needed next. Those are joined, as long as buffers
            stay as large.

    Raises:
        ModuleError: the module holds no tensor, or one that cannot be offloaded or has no shape yet (lazy modules).
        ConfigError: `block_modules` names a child that does not exist.
    """
    modules = dict(root.named_modules(remove_duplicate=False))
    for fqn, tensor in (*root.named_parameters(), *root.named_buffers()):
        if is_lazy(tensor):
            raise ModuleError(f"{fqn} has no shape yet (a lazy module). Run the model once before offloading it.")
    units = [*(_leaf_units(root, config, modules) if config.is_leaf_level else _block_units(root, config))]
    homes = {path: unit for unit in units for path in unit.paths}
    _open_for_parts_used(modules, units, homes)
    for weight, holders in _tables(config, modules, without):
        first = next(path for path, module in modules.items() if module is holders[0])
        units.append(_Unit(f"{config.group_prefix}{first}.weight", openers=[*holders], table=id(weight)))
    refs, users = _assign(modules, units, homes, without)
    if not refs:
        name = type(root).__name__
        if [*root.parameters()]:
            raise ModuleError(
                f"All weights of {name} are left to FSDP2, or trained: there is nothing to offload. {_AROUND}"
            )
        raise ModuleError(f"{name} has no parameters and no buffers: there is nothing to offload.")
    groups = _specs(units, refs, users)
    if followers:
        layers = [
            each
            for each in groups
            if not (each.is_table or any([*_module_of(opener).children()] for opener in each.openers))
        ]
        sizes = sorted(map(_size, layers), reverse=True)
        least = min(tuning().min_window_bytes, sum(sizes) // 8)
        largest = min([tuning().max_joined_bytes, *sizes[: config.num_slots][-1:]])
        groups = _join(groups, followers, max(least, largest))
    return _with_nesting(groups, modules)


def _block_units(root: nn.Module, config: OffloadConfig) -> Iterator[_Unit]:
    blocks, count, found = config.block_modules, config.num_blocks_per_group, set[str]()
    if blocks is None:
        blocks = getattr(root, "_group_offload_block_modules", None) or ()

    def units_of(module: nn.Module, path: str) -> Iterator[_Unit]:
        """The groups of a module, and of its children in `blocks` likewise."""
        prefix = f"{config.group_prefix}{path}." if path else config.group_prefix
        rest = _Unit(f"{prefix}{type(module).__name__}_unmatched_group", openers=[module], paths=[path])
        if isinstance(module, _LISTS):  # the root
            found.update(module._modules)
            yield from _list_units(module, module, path, prefix, count)
            yield rest
            return
        descend = _lists_lie_deeper(module)
        for name, child in _children(module):
            found.add(name)
            child_path = f"{path}.{name}" if path else name
            is_list = isinstance(child, _LISTS)
            if name in blocks or (
                not blocks and _holds_lists(child) and (descend or (not is_list and _is_large(child)))
            ):
                yield from units_of(child, child_path)
            elif is_list:
                yield from _list_units(child, module, child_path, f"{prefix}{name}", count)
            else:
                rest.paths.append(child_path)
                # The child can be called without the root (vae.decode), and then has to onload the rest itself.
                rest.openers.extend(_callable_parts(child))
        if len(rest.paths) > 1 or holds_tensors(module):
            yield rest

    yield from units_of(root, "")
    missing = [name for name in config.block_modules or () if name not in found]
    if missing:
        known = sorted(name for name, _ in root.named_children())
        raise ConfigError(
            f"block_modules names {missing[0]!r}, which is no child of {type(root).__name__}. Its children: {known}."
        )


def _list_units(blocks: nn.Module, reader: nn.Module, path: str, name: str, count: int) -> Iterator[_Unit]:
    """Groups of `count` elements of a list that `reader` goes through.

    An element that is a list is never called, so the elements of that list are blocks.
    """
    elements = [(index, key, block) for index, (key, block) in enumerate(_children(blocks))]
    for is_list, run in groupby(elements, key=lambda each: isinstance(each[2], (nn.ModuleList, nn.ModuleDict))):
        mine = [*run]
        for _, key, inner in mine if is_list else ():
            yield from _list_units(inner, reader, f"{path}.{key}".strip("."), f"{name}.{key}", count)
        for start in range(0, 0 if is_list else len(mine), count):
            part = mine[start : start + count]
            yield _Unit(
                f"{name}_{part[0][0]}_{part[-1][0]}",
                # The reader goes through a list of parameters, too: nothing in that is called.
                openers=[called for *_, block in part for called in [*_callable_parts(block)] or [reader]],
                paths=[f"{path}.{key}".strip(".") for _, key, _ in part],
            )


def _leaf_units(root: nn.Module, config: OffloadConfig, modules: dict[str, nn.Module]) -> Iterator[_Unit]:
    taken: set[str] = set()
    units: dict[nn.Module, _Unit] = {}
    for path, module in modules.items():
        if any(part in taken for part in _ancestors(path)):
            continue
        if isinstance(module, torch.jit.ScriptModule) or (
            path and (isinstance(module, LEAF_TYPES) or _moves_whole(module))
        ):
            taken.add(path)
            unit = units.setdefault(module, _Unit(f"{config.group_prefix}{path}", openers=[module]))
            unit.paths.append(path)
        elif holds_tensors(module):
            above = (part for part in (path, *_ancestors(path)) if not isinstance(modules[part], NEVER_CALLED))
            called = next(above, "")
            unit = units.setdefault(modules[called], _Unit(f"{config.group_prefix}{called}", openers=[modules[called]]))
            unit.paths.append(path)
    yield from units.values()


def _home(path: str, homes: Mapping[str, _Unit]) -> _Unit | None:
    """The unit that takes the tensors of the module at `path`."""
    return next((homes[part] for part in (path, *_ancestors(path)) if part in homes), None)


def _open_for_parts_used(modules: dict[str, nn.Module], units: list[_Unit], homes: Mapping[str, _Unit]) -> None:
    """Add the modules and methods that compute with weights of a unit without a call of the unit's own modules.

    A forward that reads in a loop what is most of the module is left alone: all of that would be on the device for the length
    of its call. It mostly looks at weights, or edits them. (Where it computes with them, torch raises.)
    """
    lists = [each for each in modules.values() if isinstance(each, NEVER_CALLED)]
    blocks = {block for each in lists for block in each.children() if not isinstance(block, NEVER_CALLED)}
    # The methods of what is inside of a block are called in the block's call.
    outside = {*modules.values()} - {part for block in blocks for part in block.modules() if part is not block}
    home_of = {module: home for path, module in modules.items() if (home := _home(path, homes)) is not None}
    opening = {unit: frozenset(unit.openers) for unit in units}

    @cache
    def size_of(unit: _Unit) -> int:
        weights = [each for part, home in home_of.items() if home is unit for each in part.parameters(recurse=False)]
        return sum(weight.nbytes for weight in weights)

    for path, module in modules.items():
        above = {modules[part] for part in (path, *_ancestors(path))}
        for name in ("forward", *(methods_of(module) if module in outside else ())):
            used = parts_used(module, name, () if name == "forward" else outside)
            read, called = (
                {part: unit for part in parts if (unit := home_of.get(part)) is not None}
                for parts in (used.read, used.called)
            )
            if name == "forward":
                read = {part: unit for part, unit in read.items() if above.isdisjoint(opening[unit])}
            in_loops = {unit for part, unit in read.items() if used.read[part]}
            if len(in_loops) > 1 and sum(map(size_of, in_loops)) * 2 > sum(map(size_of, units)):
                read = {part: unit for part, unit in read.items() if not used.read[part]}
            opener = module if name == "forward" else Method(weakref.ref(module), name)
            opens = [(unit, opener) for unit in read.values()]
            if name != "forward" and module in blocks:
                # Nobody calls a module whose method is called. Around the parts of a block there are no gates, either.
                opens += [(unit, opener) for unit in called.values() if module in opening[unit]]
            opens += [(unit, part) for part, unit in called.items() if above.isdisjoint(opening[unit])]
            for unit, each in opens:
                if each not in unit.openers:
                    unit.openers.append(each)


def tables_of(root: nn.Module, config: OffloadConfig) -> set[int]:
    """The ids of the embedding tables under `root` whose rows would be looked up on the CPU."""
    modules = dict(root.named_modules(remove_duplicate=False))
    return {id(weight) for weight, _ in _tables(config, modules, frozenset())}


def _tables(
    config: OffloadConfig, modules: dict[str, nn.Module], without: frozenset[int]
) -> Iterator[tuple[nn.Parameter, list[nn.Module]]]:
    """Large embedding tables that only embeddings hold, and that no module around these reads or compiles.

    (With `max_norm` a call changes the table, and the device computes norms in another order.)
    """
    if not config.embeddings_on_cpu or config.verify_checksums:  # a hash is that of a whole table
        return
    methods = ((module, name) for module in modules.values() for name in ("forward", *methods_of(module)))
    read = cache(
        lambda: {part for module, name in methods for part in parts_used(module, name).read if part is not module}
    )
    holders: dict[nn.Parameter, dict[nn.Module, list[str]]] = {}
    for path, module in modules.items():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(parameter, {}).setdefault(module, []).append(path)
    if len(holders) < 2:
        return  # the module is a table, and nothing else
    for weight, mine in holders.items():
        if (
            type(weight) is nn.Parameter
            and id(weight) not in without
            and weight.layout is torch.strided
            and weight.nbytes >= tuning().table_bytes
            and all(
                isinstance(module, nn.Embedding)
                and module._parameters.get("weight") is weight
                and module.max_norm is None
                for module in mine
            )
            and not any(
                _moves_whole(modules[part])
                for paths in mine.values()
                for path in paths
                for part in (path, *_ancestors(path))
                if part
            )
            and read().isdisjoint(mine)
        ):
            yield weight, [*mine]


def _assign(
    modules: dict[str, nn.Module], units: list[_Unit], homes: Mapping[str, _Unit], without: frozenset[int]
) -> tuple[list[TensorRef], list[set[int]]]:
    """Every tensor under `modules` once, and for each the indices of the units that need it."""
    indices = {unit: i for i, unit in enumerate(units)}
    by_table = {unit.table: i for i, unit in enumerate(units) if unit.table}
    found: dict[int, tuple[str, torch.Tensor, dict[tuple[int, str], ParamSlot], set[int]]] = {}
    for path, owner in modules.items():
        home = _home(path, homes)
        for table, is_buffer in ((owner._parameters, False), (owner._buffers, True)):
            for name, tensor in table.items():
                if tensor is None or id(tensor) in without:
                    continue
                assert home is not None, path
                fqn = f"{path}.{name}" if path else name
                _, _, places, used_by = found.setdefault(id(tensor), (fqn, tensor, {}, set()))
                places[id(owner), name] = ParamSlot(owner, name, is_buffer)
                used_by.add(by_table.get(id(tensor), indices[home]))
    refs: list[TensorRef] = []
    users: list[set[int]] = []
    dtensor = sys.modules.get("torch.distributed.tensor")  # not every build of torch has it
    for fqn, holder, places, used_by in found.values():
        is_distributed = dtensor is not None and isinstance(holder, dtensor.DTensor)
        # Tensor parallelism leaves each process its share of a weight, and never moves it.
        if is_distributed and not all(hasattr(place.owner, TENSOR_PARALLEL) for place in places.values()):
            raise ModuleError(
                f"{fqn} is a DTensor that no tensor parallelism has made (parallelize_module, diffusers' "
                f"TensorParallelConfig), and FSDP2 does not know it. Shard weights with one of these."
            )
        for inner_path, plain in plain_tensors(fqn, holder, next(iter(places.values())).owner):
            full = ".".join((fqn, *inner_path))
            is_wrapped = bool(inner_path) and is_traceable_wrapper_subclass(holder)
            refs.append(TensorRef(full, plain, holder, inner_path, tuple(places.values()), is_wrapped))
            users.append(used_by)
    return refs, users


_AROUND = (
    "With FSDP2, wrap only what is trained (fully_shard(model.head)), or name the frozen weights in ignored_params: "
    "fully_shard(model, ignored_params={each for each in model.parameters() if not each.requires_grad}). If FSDP2 shall "
    "move frozen weights too, do not offload the model: fully_shard has a CPUOffloadPolicy."
)

PlacesOfFsdp = Mapping[nn.Module, frozenset[str]]
"""The modules that have parameters of FSDP2, and these parameters' names in them."""


def left_to_fsdp(root: nn.Module, before: PlacesOfFsdp) -> PlacesOfFsdp:
    """The places under `root` whose parameters FSDP2 shares out, gathers and frees itself. They are trained.

    In turns a place holds a DTensor and a gathered parameter, so that the place tells what the parameter cannot.

    Args:
        before: The places that were left to FSDP2 until now. Their parameters may be frozen by now, for a while.

    Raises:
        ModuleError: FSDP2 shares out a frozen weight.
    """
    found: weakref.WeakKeyDictionary[nn.Module, frozenset[str]] = weakref.WeakKeyDictionary()
    places = [*places_of_fsdp()]
    names = {module: path for path, module in root.named_modules()} if places else {}
    for owner, name, is_trained in places:
        if owner not in names:
            continue
        if not is_trained and name not in before.get(owner, ()):
            fqn = f"{names[owner]}.{name}".removeprefix(".")
            raise ModuleError(f"{fqn} is a DTensor that FSDP2 moves itself, and it is frozen. {_AROUND}")
        found[owner] = found.get(owner, frozenset()) | {name}
    return found


def _specs(units: list[_Unit], refs: list[TensorRef], users: list[set[int]]) -> tuple[GroupSpec, ...]:
    """Make groups of units and their tensors. Tensors that two units share become a group that the modules of both need."""
    members: list[list[int]] = [[] for _ in units]
    shared: dict[tuple[int, ...], list[int]] = {}
    for cluster in overlapping([ref.tensor for ref in refs]):
        needed_by = tuple(sorted(set().union(*(users[i] for i in cluster))))
        target = members[needed_by[0]] if len(needed_by) == 1 else shared.setdefault(needed_by, [])
        target.extend(cluster)
    groups = [
        GroupSpec(unit.group_id, tuple(refs[i] for i in sorted(mine)), tuple(unit.openers), is_table=bool(unit.table))
        for unit, mine in zip(units, members, strict=True)
        if mine or not unit.table  # a table that shares memory with another weight moves with it
    ]
    for needed_by, mine in shared.items():
        openers = dict.fromkeys(opener for i in needed_by for opener in units[i].openers)
        first = refs[min(mine)].fqn
        groups.append(GroupSpec(f"shared:{first}", tuple(refs[i] for i in sorted(mine)), tuple(openers)))
    return tuple(groups)


def _module_of(opener: nn.Module | Method) -> nn.Module:
    return opener.module if isinstance(opener, Method) else opener


def _size(group: GroupSpec) -> int:
    return sum(-(-span_bytes(ref.tensor) // ALIGNMENT) * ALIGNMENT for ref in group.tensors)


def _join(groups: tuple[GroupSpec, ...], followers: Mapping[str, str], limit_bytes: int) -> tuple[GroupSpec, ...]:
    """Join groups that follow one another, as long as they have at most `limit_bytes` together."""
    by_id = {group.group_id: group for group in groups}
    runs: dict[GroupSpec, list[GroupSpec]] = {group: [group] for group in groups}
    for name in by_id.keys() - followers.values():
        run, room = runs[by_id[name]], limit_bytes - _size(by_id[name])
        while name in followers and (group := by_id.get(followers[name])) is not None:
            name, size = group.group_id, _size(group)
            if size <= room:
                run.append(group)
                runs[group] = run
            else:
                run, room = runs[group], limit_bytes
            room -= size
    return tuple(
        group
        if len(run) == 1
        else GroupSpec(
            f"{group.group_id} to {run[-1].group_id}",
            # In the order that they have in RAM: what adjoins there is one copy.
            tuple(ref for each in sorted(run, key=groups.index) for ref in each.tensors),
            tuple(opener for each in run for opener in each.openers),
            joined=tuple(each.group_id for each in run),
        )
        for group, run in runs.items()
        if group is run[0]
    )


def _with_nesting(groups: tuple[GroupSpec, ...], modules: dict[str, nn.Module]) -> tuple[GroupSpec, ...]:
    needs: dict[nn.Module, list[int]] = {}
    for index, group in enumerate(groups):
        for module in dict.fromkeys(map(_module_of, group.openers)):
            needs.setdefault(module, []).append(index)
    inside: list[set[int]] = [set() for _ in groups]
    for path, module in modules.items():
        here = needs.get(module, ())
        # Of the groups of one module, the later one (a shared group) is acquired first and kept longest.
        for outer in here:
            inside[outer].update(index for index in here if index < outer)
        for part in _ancestors(path) if here else ():
            for outer in needs.get(modules[part], ()):
                inside[outer].update(index for index in here if index != outer)
    nestings: dict[int, int] = {}

    def nesting(index: int) -> int:
        if index not in nestings:
            nestings[index] = 0  # ends the walk at a module that contains itself
            nestings[index] = max((1 + nesting(other) for other in inside[index]), default=0)
        return nestings[index]

    return tuple(replace(group, nesting=nesting(index)) for index, group in enumerate(groups))


def holds_tensors(module: nn.Module) -> bool:
    return any(tensor is not None for table in (module._parameters, module._buffers) for tensor in table.values())


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Like `named_children`, but a module with two names comes twice."""
    return ((name, child) for name, child in module._modules.items() if child is not None)


def _ancestors(path: str) -> Iterator[str]:
    """The paths above `path`, nearest first, the root's "" last."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def _callable_parts(module: nn.Module) -> Iterator[nn.Module]:
    """`module`, or if it is a container or has no forward, the modules in it that are called."""
    has_forward = getattr(type(module), "forward", None) is not nn.Module.forward or "forward" in vars(module)
    if isinstance(module, NEVER_CALLED) or not has_forward:
        for child in module.children():
            yield from _callable_parts(child)
    else:
        yield module


def _lists_lie_deeper(module: nn.Module) -> bool:
    """Whether the blocks of a module lie below its children, as those of text encoders do (`model.encoder.layers`).

    The blocks of a diffusers model are where diffusers' conventions say, and in large children (`_is_large`).
    """
    if hasattr(type(module), "_supports_group_offloading"):
        return False
    return not any(isinstance(child, _LISTS) for child in module.children())


def _holds_lists(module: nn.Module) -> bool:
    return not isinstance(module, READS_ITS_CHILDREN) and any(
        isinstance(part, _LISTS) for part in module.modules() if part is not module
    )


def _is_large(module: nn.Module) -> bool:
    """Whether it would take too much of the device for the length of a forward, as the rest around blocks does."""
    return sum(parameter.nbytes for parameter in module.parameters()) > tuning().largest_rest_bytes


def _moves_whole(module: nn.Module) -> bool:
    """Whether its parts cannot move by themselves: it reads their weights without calling them, or is a compiled graph."""
    return isinstance(module, (*READS_ITS_CHILDREN, *adapter_layers())) or is_compiled(module)


def adapter_layers() -> tuple[type, ...]:
    """peft's layers, which read the weight of the layer that they wrap (DoRA, merging) without calling that layer."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    return () if tuners is None else (tuners.BaseTunerLayer,)


def adapter_weights(root: nn.Module) -> set[int]:
    """The ids of the parameters that peft's layers have beside the layers that they wrap."""
    return {
        id(parameter)
        for module in root.modules()
        if isinstance(module, adapter_layers())
        for name, child in module.named_children()
        if name != "base_layer"
        for parameter in child.parameters()
    }
