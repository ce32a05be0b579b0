"""The facts of a report, from engines that run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .base.ram import ram_in_use
from .base.text import describe_bytes, describe_seconds
from .base.timeline import COMPUTE, COPIES, READS, STALLS, Slice
from .plan.budgets import total_ram
from .plan.report import OffloadPlan
from .report.facts import GroupFacts, MemoryFacts, ModelFacts, PassFacts, Place, figures_of
from .runtime.engine import Engine
from .runtime.groups.group import Group
from .stores.base import Tier
from .stores.files import FileBlob

_COLORS = ("locked", "device", "decode", "pass", "file", "ram")
"""Of the parts of device memory, as `Engine.device_memory` has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One offloaded model, as far as its handle knows it."""

    name: str
    engine: Engine
    plan: OffloadPlan
    stats: Mapping[str, Any]


def wait_for_work(engine: Engine) -> None:
    """Wait for reads that are under way, and for the device: then statistics and timelines are complete."""
    engine.transfer.reader.wait_until_enqueued()
    backend = engine.config.backend
    reached = backend.new_event()
    reached.record(backend.current_stream())
    reached.synchronize()


def facts_of(run: Run) -> ModelFacts:
    """What a report says of one model, after `wait_for_work`. The caller has the engine's lock."""
    engine, plan = run.engine, run.plan.details
    groups = tuple(_group(group, engine) for group in engine.groups)
    passes = [*_recorded(engine)]
    if passes:
        forward = next((one for one in reversed(passes) if one.is_forward), passes[-1])
        said = _what_was_busy(forward, frozenset(group.name for group in groups if group.is_outer))
    else:
        said = "No complete forward was recorded." if run.stats["passes"] else "No forward has run yet."
    figures = {"Statistics since the module was offloaded": run.stats}
    if plan is not None:
        figures["The plan in numbers"] = figures_of(plan)
    return ModelFacts(
        name=run.name,
        model_class=type(engine.root).__name__,
        groups=groups,
        passes=passes,
        sentences=[run.plan.verdict, said],
        figures=figures,
    )


def memory_of(runs: Sequence[Run]) -> list[MemoryFacts]:
    """The memory of each device that the models compute on, and RAM."""
    by_device = {run.engine.config.onload_device: run.engine for run in runs if run.engine.config.backend.has_streams}
    return [*(_device(engine) for engine in by_device.values()), _ram(runs)]


def where_of(group: Group) -> str:
    """The names of the files or of the RAM that the weights are stored in, and what of them is packed."""
    in_ram, from_files = group.packed_ram_bytes, group.packed_bytes - group.packed_ram_bytes
    return (
        (", ".join(dict.fromkeys(part.blob.where for part in group.parts)) or "no weights")
        + (", rows are looked up there" if group.is_table else "")
        + (f", packed to {describe_bytes(in_ram)} in RAM" if in_ram else "")
        + (f", packed to {describe_bytes(from_files)} in files" if from_files else "")
    )


def _group(group: Group, engine: Engine) -> GroupFacts:
    blobs = [part.blob for part in group.parts]
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
    ways = {blob.way for blob in blobs if isinstance(blob, FileBlob) and blob.packed is None} - {"locked", ""}
    detail = [where_of(group), *(f"read: {way}" for way in sorted(ways))]
    detail += ["on the device while the groups inside it compute"] if group.height else []
    return GroupFacts(
        name=group.group_id,
        num_bytes=sum(blob.layout.num_bytes for blob in blobs),
        place=place,
        detail=", ".join(detail),
        is_outer=bool(group.height),
    )


def _recorded(engine: Engine) -> Iterator[PassFacts]:
    for each in engine.recorder.passes:
        part = "" if each.top == type(engine.root).__name__ else f" ({each.top})"
        took, slices = each.slices()
        if not engine.config.backend.has_streams:
            slices = [*_on_cpu(slices)]
        title = f"{each.what} {each.number}{part}"
        yield PassFacts(title=title, seconds=took, slices=slices, is_forward=each.what == "forward")


def _on_cpu(slices: Sequence[Slice]) -> Iterator[Slice]:
    """There is no link: compute waits while a group is read into a buffer."""
    for each in slices:
        if each.lane != STALLS:
            yield replace(each, lane=STALLS) if each.lane == COPIES else each


def _what_was_busy(one: PassFacts, outer: frozenset[str]) -> str:
    drive, link, compute, waited = (one.busy_seconds(lane, outer) for lane in (READS, COPIES, COMPUTE, STALLS))
    busy = [("disk or page cache", drive), ("link", link), ("compute", compute)]
    told = ", ".join(f"{name} busy for {describe_seconds(took)}" for name, took in busy if took)
    return (
        f"In {one.title}, {describe_seconds(one.seconds)}: {told or 'nothing was busy'}; compute waited "
        f"{describe_seconds(waited)} ({waited / (one.seconds or 1):.0%}) for weights."
    )


def _device(engine: Engine) -> MemoryFacts:
    return MemoryFacts(
        name=f"Device {engine.config.onload_device} now",
        parts=[(*part, color) for part, color in zip(engine.device_memory, _COLORS, strict=True)],
        budget_bytes=engine.placer.vram_budget,
        total_bytes=engine.config.backend.total_bytes(),
    )


def _ram(runs: Sequence[Run]) -> MemoryFacts:
    pinned = sum(run.stats["pinned_bytes"] for run in runs)
    pageable = sum(run.stats["host_bytes"] for run in runs) - pinned
    staging = sum(run.stats["staging_bytes"] for run in runs)
    blobs = [part.blob for run in runs for group in run.engine.groups for part in group.parts]
    in_page_cache = sum(blob.pinned_bytes for blob in blobs if blob.tier is Tier.FILE)  # which isn't the process's RAM
    given = [budget for run in runs if isinstance(budget := run.engine.config.ram_budget, int)]
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
