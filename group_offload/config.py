"""The options of one offloaded module: as a caller gives them, then checked and frozen."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, fields
from enum import Enum
from functools import wraps
from numbers import Integral
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, cast

import torch

from .base.device import Backend, backend_for, default_device, is_cpu_build, say_that_the_cpu_computes
from .base.pagemap import can_detect_writes
from .base.text import did_you_mean
from .compression.codec import can_decompress
from .errors import ConfigError, DeviceError
from .plan.budgets import Budget, Default, is_budget, parse_budget, total_ram


class OffloadType(str, Enum):
    """How a module is split into groups."""

    __str__ = str.__str__

    BLOCK_LEVEL = "block_level"
    """Whole blocks: the elements of the module's ModuleLists and Sequentials."""
    LEAF_LEVEL = "leaf_level"
    """Single layers: least device memory, most groups."""


# ------------------------------------------------------------------------------------------------ as they are given


@dataclass(frozen=True, slots=True)
class OffloadOptions:
    """The options of a model and of a pipeline, unchecked: the names, types, defaults and order of all public calls.

    `apply_group_offloading` says what each option does.
    """

    onload_device: str | int | torch.device | None = None
    offload_device: str | torch.device = "cpu"
    offload_type: str | Enum = "block_level"
    num_blocks_per_group: int | None = None
    non_blocking: bool = False
    use_stream: bool | None = None
    record_stream: bool = False
    low_cpu_mem_usage: bool = False
    offload_to_disk_path: str | os.PathLike[str] | None = None
    _: KW_ONLY
    verify_checksums: bool = False
    vram_budget: int | str | None = None
    ram_budget: int | str | None = None
    embeddings_on_cpu: bool = True
    compress: bool = False
    interleave_forwards: bool | str = False
    process_group: Any = None
    shard_transfers: bool | str = "auto"


@dataclass(frozen=True, slots=True)
class ModelOptions(OffloadOptions):
    """The options of one model."""

    block_modules: list[str] | tuple[str, ...] | None = None
    exclude_kwargs: list[str] | tuple[str, ...] | None = None


_P = ParamSpec("_P")
_Target = TypeVar("_Target")
_Options = TypeVar("_Options")
_Result = TypeVar("_Result")


def takes_options(
    kind: Callable[_P, _Options],
) -> Callable[[Callable[[_Target, _Options, frozenset[str]], _Result]], Callable[Concatenate[_Target, _P], _Result]]:
    """Let callers of `function(target, options, given)` give the options one by one, in their order or by name.

    `given` has the names of the options that the caller gave.

    Type checkers, editors and `help()` see every option with its type and default.

    Args:
        kind: the dataclass of the options.
    """

    def decorate(
        function: Callable[[_Target, _Options, frozenset[str]], _Result],
    ) -> Callable[Concatenate[_Target, _P], _Result]:
        own = inspect.signature(function)
        target, *_ = own.parameters.values()
        signature = own.replace(parameters=[target, *inspect.signature(kind).parameters.values()])

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> _Result:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                unknown = next((name for name in kwargs if name not in signature.parameters), None)
                hint = "" if unknown is None else did_you_mean(unknown, signature.parameters)
                if "model_options" in signature.parameters and unknown in inspect.signature(ModelOptions).parameters:
                    hint = f" Give it for a single model: model_options={{NAME: {{{unknown!r}: ...}}}}."
                raise TypeError(f"{function.__name__}() {error}{hint and '.'}{hint}") from None
            make = cast(Callable[..., _Options], kind)
            given = frozenset(bound.arguments) - {target.name}
            return function(bound.args[0], make(*bound.args[1:], **bound.kwargs), given)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate


# ------------------------------------------------------------------------------------------------ checked


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """The options of an offloaded module, checked, with every default filled in.

    Raises:
        ConfigError: a value isn't understood, or two options contradict each other.
        DeviceError: a device doesn't exist here.
    """

    onload_device: torch.device
    offload_type: OffloadType
    num_blocks_per_group: int
    non_blocking: bool
    use_stream: bool
    record_stream: bool
    low_cpu_mem_usage: bool
    is_stored_on_disk: bool
    """Weights stay in the files that they were loaded from, or are written to new ones."""
    offload_to_disk_path: Path | None
    """Folder for files that have to be written."""
    verify_checksums: bool
    vram_budget: Budget | None
    """VRAM for the whole process."""
    ram_budget: Budget | None
    """RAM for the whole process."""
    embeddings_on_cpu: bool
    """Look up large embedding tables on the CPU, and transfer only the rows that a call needs."""
    compress: bool
    """Compress weights."""
    interleave_forwards: bool | Literal["auto"]
    """Run forwards of several threads, or of a guidance step, block by block; "auto": those of diffusers' denoisers,
    where that saves time."""
    process_group: Any
    """The `torch.distributed.ProcessGroup` of the processes that offload the same module; None for this one alone."""
    shard_transfers: bool | Literal["auto"]
    """Each GPU of a host loads a shard of every group, and the others send the rest; "auto": where that is faster."""
    ram_quota_bytes: int | None
    """Bytes of RAM for weights in files, if several modules share a budget."""
    block_modules: tuple[str, ...] | None
    exclude_kwargs: tuple[str, ...]
    group_prefix: str
    """Prefix of the group IDs (diffusers' `module_prefix`). It tells two models of one pipeline apart in one folder."""

    @property
    def backend(self) -> Backend:
        """The calls of the device that computes. For the engine."""
        return backend_for(self.onload_device)

    @property
    def offload_device(self) -> str:
        """Where weights are stored: `"cpu"` or `"disk"`."""
        return "disk" if self.is_stored_on_disk else "cpu"

    @property
    def is_leaf_level(self) -> bool:
        """True if single layers move, not blocks."""
        return self.offload_type is OffloadType.LEAF_LEVEL

    @property
    def has_budgets(self) -> bool:
        """True if a plan decides where weights are stored."""
        return self.vram_budget is not None or self.ram_budget is not None

    @property
    def may_pin_files(self) -> bool:
        """True if files may be pinned in the page cache."""
        return self.backend.has_streams and not (self.low_cpu_mem_usage or self.verify_checksums)

    @property
    def num_slots(self) -> int:
        """Device buffers: compute uses one while the next is filled."""
        return 2 if self.use_stream else 1

    @classmethod
    def from_options(cls, options: ModelOptions, module: Any = None, *, group_prefix: str = "") -> OffloadConfig:
        """Check `options` and fill in their defaults, some of which the class of `module` gives."""
        given = options.onload_device
        if isinstance(given, str) and is_budget(given):  # the first argument by position
            raise DeviceError(f"onload_device={given!r} isn't a device. Did you mean vram_budget={given!r}?")
        backend = backend_for(default_device() if given is None else given)
        is_disk = options.offload_device == "disk"
        if not is_disk and not _is_cpu(options.offload_device):
            raise ConfigError(
                f"offload_device must be 'cpu' or 'disk', got {str(options.offload_device)!r}. To choose the directory, pass "
                f"offload_to_disk_path."
            )
        flags = {name: getattr(options, name) for name in _FLAGS}
        if flags["use_stream"] is None:
            flags["use_stream"] = backend.has_streams
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise ConfigError(f"{name}={value!r}: expected True or False.")
        if flags["use_stream"] and not backend.has_streams:
            raise DeviceError(
                f"use_stream=True needs a device with streams, and {str(backend.device)!r} has none. Pass use_stream=False."
            )
        if options.record_stream and not flags["use_stream"]:
            raise ConfigError(
                "record_stream=True contradicts use_stream=False: pass use_stream=True, or drop record_stream."
            )
        if options.compress:
            _check_compression(options, backend)
        kind, count = _as_offload_type(options.offload_type), options.num_blocks_per_group
        if kind is OffloadType.LEAF_LEVEL and (count not in (None, 1) or options.block_modules is not None):
            raise ConfigError(
                f"{'num_blocks_per_group' if count not in (None, 1) else 'block_modules'} contradicts offload_type="
                f"'leaf_level', where each layer is a group. Drop it, or pass offload_type='block_level'."
            )
        path, blocks, kwargs = options.offload_to_disk_path, options.block_modules, options.exclude_kwargs
        kwargs = getattr(module, "_skip_keys", None) if kwargs is None else kwargs
        config = cls(
            onload_device=backend.device,
            offload_type=kind,
            num_blocks_per_group=_as_count(1 if count is None else count),
            is_stored_on_disk=is_disk or path is not None,
            offload_to_disk_path=None if path is None else _as_path(path),
            vram_budget=parse_budget(_vram_of(options, backend), "vram_budget", backend.total_bytes()),
            ram_budget=parse_budget(options.ram_budget, "ram_budget", total_ram()),
            ram_quota_bytes=None,
            block_modules=None if blocks is None else _as_names(blocks, "block_modules"),
            exclude_kwargs=_as_names(kwargs or (), "exclude_kwargs"),
            group_prefix=group_prefix,
            process_group=None if options.process_group is None else _as_group(options.process_group),
            shard_transfers=_sharding_of(options, backend),
            interleave_forwards=_interleaving_of(options, backend),
            **flags,
        )
        if given is None and not backend.has_streams:
            say_that_the_cpu_computes()
        return config


_FLAGS = tuple(option.name for option in fields(OffloadOptions) if option.type in ("bool", "bool | None"))


def _vram_of(options: ModelOptions, backend: Backend) -> Any:
    """`vram_budget`, as it goes with other options. A pipeline's default that doesn't is no budget."""
    vram = options.vram_budget
    if isinstance(vram, Default) and (not backend.has_streams or options.low_cpu_mem_usage or options.process_group):
        return None
    if vram is not None and not backend.has_streams:
        raise ConfigError(
            f"vram_budget needs a GPU, but onload_device is {str(backend.device)!r}. Pass ram_budget instead."
            f"{' (torch sees no GPU here: this is a CPU build.)' if is_cpu_build() else ''}"
        )
    if vram is not None and options.low_cpu_mem_usage:
        raise ConfigError(
            "vram_budget can't be combined with low_cpu_mem_usage=True: edits to unpinned weights can't be detected, so "
            "none can stay on the GPU. Drop one."
        )
    return vram


def _check_compression(options: ModelOptions, backend: Backend) -> None:
    """Refuse `compress=True` where other options, or the device, leave nothing to compress or to decompress with."""
    if not backend.has_streams:
        raise ConfigError(
            f"compress=True needs a GPU, but onload_device is {str(backend.device)!r}, which uses weights in RAM in place. "
            f"Drop it."
        )
    if not can_decompress(backend.device):
        raise DeviceError(f"compress=True needs Triton on '{backend.device}'. Run `pip install triton`, or drop it.")
    if options.low_cpu_mem_usage:
        raise ConfigError(
            "compress=True contradicts low_cpu_mem_usage=True: edits to unpinned weights can't be detected. Drop one."
        )


def _interleaving_of(options: ModelOptions, backend: Backend) -> bool | Literal["auto"]:
    interleave_forwards = _as_bool_or_auto(options.interleave_forwards, "interleave_forwards")
    has_ranks = options.process_group is not None and options.shard_transfers is not False
    if interleave_forwards is True and has_ranks:
        raise ConfigError(
            "interleave_forwards=True can't be combined with process_group. Drop one, or pass shard_transfers=False so that "
            "each process loads its own weights."
        )
    # On the CPU there is little to gain.
    return False if interleave_forwards == "auto" and (has_ranks or not backend.has_streams) else interleave_forwards


def _sharding_of(options: ModelOptions, backend: Backend) -> bool | Literal["auto"]:
    """`shard_transfers`, as it goes with other options and with the system."""
    shard = _as_bool_or_auto(options.shard_transfers, "shard_transfers")
    if shard is True and options.process_group is None:
        raise ConfigError("shard_transfers=True needs process_group: the processes whose GPUs share the weights.")
    if options.process_group is None or shard is False:
        return shard
    is_blind = backend.has_streams and not can_detect_writes()
    if shard is True and options.verify_checksums:
        raise ConfigError(
            "verify_checksums=True contradicts shard_transfers=True, with which each process reads only a part of each file. "
            "Drop one, or pass shard_transfers=False so that each process loads its own weights."
        )
    if shard is True and is_blind:
        raise ConfigError(
            "shard_transfers=True needs /proc/self/pagemap to detect edits of weights, and it isn't readable. Pass "
            "shard_transfers='auto'."
        )
    return False if options.verify_checksums or is_blind else shard


def _is_cpu(value: Any) -> bool:
    try:
        return torch.device(value).type == "cpu"
    except (TypeError, RuntimeError):
        return False


def _as_offload_type(value: Any) -> OffloadType:
    try:
        return OffloadType(value.value if isinstance(value, Enum) else value)
    except ValueError:
        raise ConfigError(f"offload_type={value!r}: expected one of {[kind.value for kind in OffloadType]}.") from None


def _as_bool_or_auto(value: Any, name: str) -> bool | Literal["auto"]:
    if isinstance(value, bool):
        return value
    if value == "auto":
        return "auto"
    raise ConfigError(f"{name}={value!r}: expected True, False or 'auto'.")


def _as_group(value: Any) -> Any:
    """The process group that was given, or that a device mesh of one dimension stands for."""
    expected = "expected a torch.distributed.ProcessGroup, or a DeviceMesh of one dimension"
    if type(value).__name__ == "DeviceMesh":
        if value.ndim != 1:
            name = (value.mesh_dim_names or ["dp"])[-1]
            raise ConfigError(
                f"process_group: {expected}, got a mesh of {value.ndim} dimensions. Pass one of them: mesh[{name!r}]."
            )
        value = value.get_group()
    import torch.distributed as dist

    if not dist.is_available() or not isinstance(value, dist.ProcessGroup):
        raise ConfigError(f"process_group={value!r}: {expected}. dist.group.WORLD stands for all processes.")
    try:
        rank, ranks = dist.get_rank(), dist.get_process_group_ranks(value)
    except (KeyError, ValueError):
        raise ConfigError(
            "process_group was destroyed. Pass one that is in use: dist.group.WORLD, once set up."
        ) from None
    if rank not in ranks:
        raise ConfigError(f"rank {rank} (this process) isn't in process_group.")
    return value


def _as_count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ConfigError(f"num_blocks_per_group={value!r}: expected a whole number of 1 or more.")
    return int(value)


def _as_names(value: Any, option: str) -> tuple[str, ...]:
    is_list = isinstance(value, (list, tuple, set, frozenset))
    if not is_list or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{option}={value!r}: expected a list of names.")
    return tuple(value)


def _as_path(value: Any) -> Path:
    try:
        path = os.fsdecode(value)
        if path and "\0" not in path:
            return Path(path).expanduser().absolute()
    except TypeError:
        pass
    except (RuntimeError, OSError) as error:  # there is no such user; the current directory was deleted
        raise ConfigError(f"offload_to_disk_path={value!r}: {error}. Pass a full path.") from error
    raise ConfigError(f"offload_to_disk_path={value!r}: expected the path of a folder.")
