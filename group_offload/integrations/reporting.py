"""One page for the models of a pipeline, or for one model: what their handles print, and the memory of the process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..api import handle_of
from ..base.ram import ram_in_use
from ..base.text import describe_bytes, html_paragraph, html_table
from ..errors import ConfigError, StateError
from ..handle import OffloadHandle
from ..plan.budgets import total_ram
from ..report.page import folded, write_page
from ..stores.moves import Tier
from .diffusers import models_of


def write_report(models: Any, path: str | os.PathLike[str]) -> Path:
    """Write one HTML page about offloaded models, and return its path. The page needs no network and no other file.

    The page shows what bounds a forward, what more memory would save, where each group is stored, memory against the budgets,
    and the statistics. For a timeline use `torch.profiler`.

    Args:
        models: A pipeline, a handle, a module, or any dict from names to handles or modules, such as what
            `enable_group_offload` returned.
        path: The file. It is written whole or not at all; a file of that name is replaced.

    Raises:
        ConfigError: `models` is none of these.
        StorageError: the file cannot be written.
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
    sections = {
        f"{', '.join(mine)} {type(handle.module).__name__}".strip(): _section(handle) for handle, mine in names.items()
    }
    title = title or " and ".join(sections)
    return write_page(title, sentences, sections | {"RAM of this process": html_table(_ram([*names]))}, path)


def _section(handle: OffloadHandle) -> str:
    """What the page says of one model."""
    engine = handle._live
    with engine.lock:  # one at a time: a forward of one model may call another one
        plan, stats, groups = handle.plan, handle.stats(), handle._repr_html_()
        budget = engine.placer.vram_budget
    parts = [plan._repr_html_()]
    if engine.config.backend.has_streams:
        total = describe_bytes(engine.config.backend.total_bytes())
        limit = "without a budget" if budget is None else f"with a budget of {describe_bytes(budget)}"
        parts.append(html_paragraph(f"On {engine.config.onload_device}, which has {total}, {limit}."))
    if not stats.forward_passes:
        parts.append(html_paragraph("No forward has run yet."))
    return "".join([*parts, folded("Groups", groups), folded("Statistics", stats._repr_html_())])


def _ram(handles: Sequence[OffloadHandle]) -> list[tuple[str, str]]:
    """A table of what the process takes, and of what it may take."""
    stats = [handle.stats() for handle in handles]
    engines = [handle._live for handle in handles]
    pinned = sum(each.pinned_bytes for each in stats)
    pageable = sum(each.host_bytes for each in stats) - pinned
    staging = sum(each.staging_bytes for each in stats)
    blobs = [part.blob for engine in engines for group in engine.groups for part in group.parts]
    in_page_cache = sum(blob.pinned_bytes for blob in blobs if blob.tier is Tier.FILE)  # which isn't the process's RAM
    sizes = {
        "pinned weights": pinned,
        "pageable weights": pageable,
        "buffers for reads": staging,
        "everything else": max(0, ram_in_use() + in_page_cache - pinned - pageable - staging),
    }
    sizes["all"] = sum(sizes.values())
    given = [budget for engine in engines if isinstance(budget := engine.config.ram_budget, int)]
    sizes |= {"ram_budget": max(given)} if given else {}
    sizes["RAM of the system, or the container's limit"] = total_ram()
    return [("RAM", "size"), *((label, describe_bytes(size)) for label, size in sizes.items())]
