"""The options of one offloaded module, checked once and frozen."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum, StrEnum
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from .base.device import Backend, backend_for, default_device
from .errors import ConfigError, DeviceError
from .plan.budgets import Budget, parse_budget, total_ram


class OffloadType(StrEnum):
    """How a module is cut into groups."""

    BLOCK_LEVEL = "block_level"
    """Whole blocks: the elements of the module's ModuleLists and Sequentials."""
    LEAF_LEVEL = "leaf_level"
    """Single layers: least device memory, most groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """What `apply_group_offloading` was asked for, with every default filled in.

    Raises:
        ConfigError: a value that is not understood, or two options that contradict each other.
        DeviceError: a device that does not exist here.
    """

    onload_device: torch.device
    offload_type: OffloadType
    num_blocks_per_group: int
    non_blocking: bool
    use_stream: bool
    record_stream: bool
    low_cpu_mem_usage: bool
    rests_in_files: bool
    """Weights stay in the files that they were loaded from, or are written to new ones."""
    offload_to_disk_path: Path | None
    """For files that have to be written."""
    verify_files: bool
    vram_budget: Budget | None
    """Device memory for the whole process."""
    ram_budget: Budget | None
    """RAM for the whole process."""
    ram_share: int | None
    """RAM for weights that rest in files, where several modules share a budget."""
    block_modules: tuple[str, ...] | None
    exclude_kwargs: tuple[str, ...]
    identity: str
    """Prefix of the group ids: tells two components of one pipeline apart in one folder."""

    @property
    def backend(self) -> Backend:
        return backend_for(self.onload_device)

    was_stream_asked_for: bool
    """`use_stream=True` was given: copies overlap with compute even where the module then fits on the device as a whole."""

    @property
    def has_budgets(self) -> bool:
        return self.vram_budget is not None or self.ram_budget is not None

    @property
    def num_slots(self) -> int:
        """Slots that take turns: one is computed with while the next is filled."""
        return 2 if self.use_stream else 1

    @classmethod
    def from_options(
        cls,
        *,
        onload_device: str | int | torch.device | None = None,
        offload_device: str | torch.device = "cpu",
        offload_type: str | Enum = "block_level",
        num_blocks_per_group: int | None = None,
        non_blocking: bool = False,
        use_stream: bool | None = None,
        record_stream: bool = False,
        low_cpu_mem_usage: bool = False,
        offload_to_disk_path: str | os.PathLike[str] | None = None,
        verify_files: bool = False,
        vram_budget: int | str | None = None,
        ram_budget: int | str | None = None,
        ram_share: int | None = None,
        block_modules: list[str] | tuple[str, ...] | None = None,
        exclude_kwargs: list[str] | tuple[str, ...] | None = None,
        identity: str = "",
    ) -> OffloadConfig:
        device = default_device() if onload_device is None else _as_device(onload_device, "onload_device")
        backend = backend_for(device)
        is_disk = offload_device == "disk"
        if not is_disk and _as_device(offload_device, "offload_device").type != "cpu":
            raise ConfigError(
                f"offload_device={str(offload_device)!r}: weights rest in RAM or in files. Pass 'cpu' or 'disk', with "
                f"offload_to_disk_path for files that have to be written."
            )
        flags = {
            "non_blocking": non_blocking,
            "use_stream": backend.has_streams if use_stream is None else use_stream,
            "record_stream": record_stream,
            "low_cpu_mem_usage": low_cpu_mem_usage,
            "verify_files": verify_files,
        }
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise ConfigError(f"{name}={value!r}: expected True or False.")
        if flags["use_stream"] and not backend.has_streams:
            raise DeviceError(
                f"use_stream=True needs a device with streams, and {str(device)!r} has none. Pass use_stream=False."
            )
        if record_stream and not flags["use_stream"]:
            raise ConfigError(
                "record_stream=True contradicts use_stream=False: pass use_stream=True, or drop record_stream."
            )
        if vram_budget is not None and not backend.has_streams:
            raise ConfigError(
                f"vram_budget={vram_budget!r}: {str(device)!r} has no memory of its own. Pass ram_budget, or another "
                f"onload_device."
            )
        if vram_budget is not None and low_cpu_mem_usage:
            raise ConfigError(
                f"vram_budget={vram_budget!r} contradicts low_cpu_mem_usage=True: nothing tells of edits of weights in RAM "
                f"that is not page-locked, so none could stay on the device. Drop one of the two."
            )
        kind = _as_offload_type(offload_type)
        if kind is OffloadType.LEAF_LEVEL:
            if num_blocks_per_group not in (None, 1):
                raise ConfigError(
                    f"num_blocks_per_group={num_blocks_per_group!r} contradicts offload_type='leaf_level', where each "
                    f"layer is a group. Drop it, or pass offload_type='block_level'."
                )
            if block_modules is not None:
                raise ConfigError(
                    "block_modules contradicts offload_type='leaf_level'. Drop it, or pass offload_type='block_level'."
                )
        return cls(
            onload_device=backend.device,
            offload_type=kind,
            num_blocks_per_group=_as_count(1 if num_blocks_per_group is None else num_blocks_per_group),
            rests_in_files=is_disk or offload_to_disk_path is not None,
            offload_to_disk_path=None if offload_to_disk_path is None else _as_path(offload_to_disk_path),
            vram_budget=parse_budget(vram_budget, "vram_budget", backend.total_bytes()),
            ram_budget=parse_budget(ram_budget, "ram_budget", total_ram()),
            ram_share=ram_share,
            block_modules=None if block_modules is None else _as_names(block_modules, "block_modules"),
            exclude_kwargs=_as_names(exclude_kwargs or (), "exclude_kwargs"),
            identity=identity,
            was_stream_asked_for=use_stream is True,
            **flags,
        )


def _as_device(value: Any, name: str) -> torch.device:
    try:
        return torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(f"{name}={value!r} is not a device: {str(error).splitlines()[0]}") from error


def _as_offload_type(value: Any) -> OffloadType:
    try:
        return OffloadType(value.value if isinstance(value, Enum) else value)
    except ValueError:
        raise ConfigError(f"offload_type={value!r}: expected one of {[kind.value for kind in OffloadType]}.") from None


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
    except TypeError:
        path = ""
    if not path or "\0" in path:
        raise ConfigError(f"offload_to_disk_path={value!r}: expected the path of a folder.")
    path = os.path.expanduser(path)  # Path's own raises if there is no such user
    if path == "~" or path.startswith("~/"):
        raise ConfigError(f"offload_to_disk_path={value!r}: this user has no home. Pass a full path.")
    try:
        return Path(path).absolute()
    except OSError as error:
        raise ConfigError(
            f"offload_to_disk_path={value!r}: the current directory was deleted. Pass a full path."
        ) from error
