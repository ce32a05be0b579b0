"""The facts of a report, from engines that run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .base.ram import ram_in_use
from .base.text import describe_seconds
from .base.timeline import COMPUTE, COPIES, READS, STALLS, Slice
from .plan.budgets import describe_bytes, total_ram
from .plan.report import OffloadPlan
from .report.facts import (
    GroupFacts,
    MemoryFacts,
    ModelFacts,
    PassFacts,
    Place,
    figures_of,
    predicted_pass,
)
from .runtime.engine import Engine
from .runtime.groups.group import Group
from .stores.base import Tier
from .stores.files import FileBlob


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
    staying = engine.groups_staying
    groups = tuple(
        _group(group, is_staying=group in staying, is_packed=group.packed in staying) for group in engine.groups
    )
    outer = frozenset(group.name for group in groups if group.is_outer)
    passes = _recorded(engine)
    has_link = run.plan.device_has_memory
    sentences = plan.sentences() if plan is not None and has_link else [run.plan.verdict]
    if passes:
        forward = next((one for one in reversed(passes) if one.is_forward), passes[-1])
        sentences.insert(1 if has_link else 0, _what_was_busy(forward, outer))
    else:
        sentences.append("No forward has run yet." if not run.stats["passes"] else "No complete forward was recorded.")
        if plan is not None and plan.prediction.step_seconds:
            sentences[-1] += " The timeline is a prediction."
            if not plan.prediction.compute_seconds and has_link:
                sentences[-1] += " It covers weight transfers only: compute time isn't known yet."
            passes = [predicted_pass(plan)]
    figures = {"Statistics since the module was offloaded": run.stats}
    if plan is not None:
        figures["The plan in numbers"] = figures_of(plan)
    return ModelFacts(
        name=run.name,
        model_class=type(engine.root).__name__,
        device=str(engine.config.onload_device),
        groups=groups,
        passes=passes,
        sentences=sentences,
        figures=figures,
        memory=engine.device_memory,
    )


def memory_of(runs: Sequence[Run]) -> list[MemoryFacts]:
    """The memory of each device that the models compute on, and RAM."""
    by_device: dict[str, list[Run]] = {}
    for run in runs:
        by_device.setdefault(str(run.engine.config.onload_device), []).append(run)
    found = [
        _device(f"Device {name}", mine) for name, mine in by_device.items() if mine[0].engine.config.backend.has_streams
    ]
    return [*found, _ram(runs)]


def where_of(group: Group) -> str:
    """The names of the files or of the RAM that the weights are stored in, and what of them is packed."""
    in_ram, from_files = group.packed_ram_bytes, group.packed_bytes - group.packed_ram_bytes
    return (
        (", ".join(dict.fromkeys(part.blob.where for part in group.parts)) or "no weights")
        + (", rows are looked up there" if group.is_table else "")
        + (f", packed to {describe_bytes(in_ram)} in RAM" if in_ram else "")
        + (f", packed to {describe_bytes(from_files)} in files" if from_files else "")
    )


def _group(group: Group, *, is_staying: bool, is_packed: bool) -> GroupFacts:
    blobs = [part.blob for part in group.parts]
    if is_staying:
        place = Place.DEVICE
    elif is_packed:
        place = Place.PACKED
    elif any(isinstance(part.blob, FileBlob) and part.is_read and not part.blob.is_locked for part in group.parts):
        place = Place.FILE
    else:
        parts = [part for part in group.parts if part.blob.layout.num_bytes]
        is_locked = parts and all(part.packed is not None or part.blob.pinned_bytes for part in parts)
        place = Place.LOCKED if is_locked else Place.RAM
    ways = {blob.way for blob in blobs if isinstance(blob, FileBlob) and not blob.is_packed} - {"locked", ""}
    detail = [where_of(group), *(f"read: {way}" for way in sorted(ways))]
    detail += ["on the device while the groups inside it compute"] if group.height else []
    return GroupFacts(
        name=group.group_id,
        num_bytes=sum(blob.layout.num_bytes for blob in blobs),
        place=place,
        detail=", ".join(detail),
        is_outer=bool(group.height),
    )


def _recorded(engine: Engine) -> list[PassFacts]:
    found = []
    for each in engine.recorder.passes:
        part = "" if each.top == type(engine.root).__name__ else f" ({each.top})"
        took, slices = each.slices()
        if not engine.config.backend.has_streams:
            slices = [*_on_cpu(slices)]
        found.append(
            PassFacts(
                title=f"{each.what} {each.number}{part}", seconds=took, slices=slices, is_forward=each.what == "forward"
            )
        )
    return found


def _on_cpu(slices: Iterable[Slice]) -> Iterator[Slice]:
    """There is no link: compute waits while a group is read into a buffer."""
    for each in slices:
        if each.lane != STALLS:
            yield replace(each, lane=STALLS) if each.lane == COPIES else each


def _what_was_busy(one: PassFacts, outer: frozenset[str]) -> str:
    drive, link, compute, waited = (one.busy_seconds(lane, outer) for lane in (READS, COPIES, COMPUTE, STALLS))
    part = waited / one.seconds if one.seconds else 0.0
    busy = [("disk or page cache", drive), ("link", link), ("compute", compute)]
    told = ", ".join(f"{name} busy for {describe_seconds(took)}" for name, took in busy if took)
    return (
        f"In {one.title}, {describe_seconds(one.seconds)}: {told or 'nothing was busy'}; compute waited "
        f"{describe_seconds(waited)} ({part:.0%}) for weights."
    )


def _device(name: str, runs: Sequence[Run]) -> MemoryFacts:
    backend = runs[0].engine.config.backend
    budgets = [run.engine.placer.vram_budget for run in runs]
    given = [budget for budget in budgets if budget is not None]
    parts = [
        ("resident weights", sum(run.stats["resident_bytes"] for run in runs), "device"),
        # The models of a process run one after another, in the same slots.
        ("buffers for streamed weights", max(run.engine.placer.slot_bytes for run in runs), "locked"),
        ("trained parameters", sum(run.stats["trainable_bytes"] for run in runs), "decode"),
    ]
    peak = backend.peak_reserved_bytes()
    others = max(0, peak - sum(num_bytes for _, num_bytes, _ in parts))
    parts.append(("activations and everything else", others, "pass"))
    sentences = ["The last part is the rest of what torch reserved at its peak."] if others else []
    if not given:
        sentences.append("Without vram_budget, no weights stay on the device between forwards.")
    return MemoryFacts(
        name=name,
        parts=parts,
        budget_bytes=max(given, default=None),
        total_bytes=backend.total_bytes(),
        sentences=sentences,
    )


def _ram(runs: Sequence[Run]) -> MemoryFacts:
    locked = sum(run.stats["pinned_bytes"] for run in runs)
    other = sum(run.stats["host_bytes"] for run in runs) - locked
    staging = sum(run.stats["staging_bytes"] for run in runs)
    reads = [run for run in runs if run.stats["file_bytes"] and not run.engine.config.backend.has_streams]
    turns = max((run.engine.placer.slot_bytes for run in reads), default=0)
    in_page_cache = sum(
        part.blob.pinned_bytes
        for run in runs
        for group in run.engine.groups
        for part in group.parts
        if part.blob.tier is Tier.FILE
    )
    rest = max(0, ram_in_use() - (locked + other - in_page_cache) - staging - turns)
    given = [budget for run in runs if isinstance(budget := run.engine.config.ram_budget, int)]
    in_files = any(run.stats["file_bytes"] for run in runs)
    return MemoryFacts(
        name="RAM of this process",
        parts=[
            ("pinned weights", locked, "locked"),
            ("pageable weights", other, "ram"),
            ("buffers for reads", staging, "file"),
            ("buffers for streamed weights", turns, "device"),
            ("Python, torch and everything else", rest, "pass"),
        ],
        budget_bytes=max(given, default=None),
        total_bytes=total_ram(),
        sentences=["Weights in files count as far as they are pinned."] if in_files else [],
    )
