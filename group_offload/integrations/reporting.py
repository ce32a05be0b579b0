"""One page for the models of a pipeline, or for one model: the facts of a run, from its handles."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from ..api import handle_of
from ..base.ram import ram_in_use
from ..errors import ConfigError, StateError
from ..handle import GroupInfo, OffloadHandle, OffloadStats
from ..plan.budgets import total_ram
from ..report.facts import GroupFacts, MemoryFacts, ModelFacts, Place, ReportFacts, figures_of
from ..report.page import write_page
from ..runtime.engine import Engine
from ..runtime.groups.group import Group
from ..stores.files import FileBlob
from ..stores.moves import Tier
from .diffusers import models_of

_COLORS = ("locked", "device", "packed", "pass", "file", "ram")
"""Of the parts of device memory, as `Engine.device_memory` has them."""


def write_report(models: Any, path: str | os.PathLike[str]) -> Path:
    """Write one HTML page about offloaded models, and return its path. The page needs no network and no other file.

    The page shows what bounds a forward, what more memory would save, where each group is stored, memory against the budgets,
    and the statistics. For a timeline use `OffloadHandle.trace`.

    Args:
        models: A pipeline, a handle, a module, or any dict from names to handles or modules, such as what
            `enable_group_offload` returned.
        path: The file. It is written whole or not at all; a file of that name is replaced.

    Raises:
        ConfigError: `models` is none of these.
        GroupFileError: the file cannot be written.
        StateError: no model of them is offloaded.

    Example:
        >>> image = pipe("a lighthouse in the fog").images[0]
        >>> write_report(pipe, "run.html")
    """
    title = "" if isinstance(models, (Mapping, nn.Module, OffloadHandle)) else type(models).__name__
    if isinstance(models, (nn.Module, OffloadHandle)):
        models = {"": models}
    names: dict[OffloadHandle, list[str]] = {}
    others = []
    for name, model in (models if isinstance(models, Mapping) else models_of(models)).items():
        if not isinstance(model, (nn.Module, OffloadHandle)):
            raise ConfigError(f"Expected handles or modules, and {name!r} is {type(model).__name__}.")
        handle = model if isinstance(model, OffloadHandle) else handle_of(model)
        if handle is None or not handle.is_active:
            others.append(str(name) or type(model).__name__)
        else:
            names.setdefault(handle, []).append(str(name))
    if not names:
        raise StateError(
            f"No model is group-offloaded: {', '.join(others) or 'there is none'}. Call enable_group_offload() or "
            f"apply_group_offloading() first, and write the report before remove()."
        )
    sentences = [f"Not offloaded: {', '.join(others)}."] if others else []
    return write_page(report_of({", ".join(mine): handle for handle, mine in names.items()}, title, sentences), path)


def report_of(handles: Mapping[str, OffloadHandle], title: str = "", sentences: Sequence[str] = ()) -> ReportFacts:
    """What a page says of several models, which go by their names."""
    models, stats = [], []
    for name, handle in handles.items():
        with handle._live.lock:  # one at a time: a forward of one model may call another one
            stats.append(handle.stats())
            models.append(_model(name, handle, stats[-1]))
    engines = [handle._live for handle in handles.values()]
    by_device = {engine.config.onload_device: engine for engine in engines if engine.config.backend.has_streams}
    return ReportFacts(
        title=title or " and ".join(model.title for model in models),
        models=models,
        memories=[*map(_device, by_device.values()), _ram(engines, stats)],
        sentences=sentences,
    )


def _model(name: str, handle: OffloadHandle, stats: OffloadStats) -> ModelFacts:
    engine, plan = handle._live, handle.plan
    figures = {"Statistics since the module was offloaded": asdict(stats)}
    if plan.details is not None:
        figures["The plan in numbers"] = figures_of(plan.details)
    return ModelFacts(
        name=name,
        model_class=type(engine.root).__name__,
        groups=[_group(group, info, engine) for group, info in zip(engine.groups, handle.groups, strict=True)],
        sentences=[plan.verdict] if stats.passes else [plan.verdict, "No forward has run yet."],
        figures=figures,
    )


def _group(group: Group, info: GroupInfo, engine: Engine) -> GroupFacts:
    if group in engine.groups_staying:
        place = Place.DEVICE
    elif group.packed in engine.groups_staying:
        place = Place.PACKED
    elif any(isinstance(part.blob, FileBlob) and part.is_read and not part.blob.is_locked for part in group.parts):
        place = Place.FILE
    else:
        parts = [part for part in group.parts if part.blob.layout.num_bytes]
        is_locked = parts and all(part.blob.packed is not None or part.blob.pinned_bytes for part in parts)
        place = Place.LOCKED if is_locked else Place.RAM
    detail = [info.where, f"read: {info.way}" if place is Place.FILE else ""]
    detail += ["on the device while the groups inside it compute"] if group.height else []
    return GroupFacts(name=info.group_id, num_bytes=info.num_bytes, place=place, detail=", ".join(filter(None, detail)))


def _device(engine: Engine) -> MemoryFacts:
    return MemoryFacts(
        name=f"Device {engine.config.onload_device} now",
        parts=[(*part, color) for part, color in zip(engine.device_memory, _COLORS, strict=True)],
        budget_bytes=engine.placer.vram_budget,
        total_bytes=engine.config.backend.total_bytes(),
    )


def _ram(engines: Sequence[Engine], stats: Sequence[OffloadStats]) -> MemoryFacts:
    pinned = sum(each.pinned_bytes for each in stats)
    pageable = sum(each.host_bytes for each in stats) - pinned
    staging = sum(each.staging_bytes for each in stats)
    blobs = [part.blob for engine in engines for group in engine.groups for part in group.parts]
    in_page_cache = sum(blob.pinned_bytes for blob in blobs if blob.tier is Tier.FILE)  # which isn't the process's RAM
    given = [budget for engine in engines if isinstance(budget := engine.config.ram_budget, int)]
    return MemoryFacts(
        name="RAM of this process",
        parts=[
            ("pinned weights", pinned, "locked"),
            ("pageable weights", pageable, "ram"),
            ("buffers for reads", staging, "file"),
            ("everything else", max(0, ram_in_use() + in_page_cache - pinned - pageable - staging), "pass"),
        ],
        budget_bytes=max(given, default=None),
        total_bytes=total_ram(),
    )
