"""A plan as text: a table, and one sentence about the bound."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from ..base.text import Shown, Table, describe_bytes, describe_seconds
from .placement import Placement, PlannedGroup
from .planner import Plan

_ALL_IN_RAM = "All weights are in RAM; nothing to load."


@dataclass(frozen=True, slots=True)
class OffloadPlan(Shown):
    """The plan for a module's budgets. `print` shows it as a table, with one sentence about what bounds a forward."""

    model: str
    """The class of the module."""
    details: Plan | None
    """The plan itself: placements, predicted times, stalls and bytes. None if no weights are streamed."""
    device_has_memory: bool = True
    """True if the device has memory of its own. The CPU uses weights in RAM in place, and only weights that are read from
    files move."""
    notes: Sequence[str] = ()
    """Why GPUs share transfers or don't, with the measured speeds, and what interleaved forwards have saved."""
    memory: Sequence[tuple[str, int]] = ()
    """Who holds device memory now, or has it kept free: labels and bytes. Empty for the CPU."""

    @property
    def step_seconds(self) -> float | None:
        """The time of a forward, as measured in the last ones; as predicted if none was measured with this plan."""
        return None if self.details is None else self.details.step_seconds

    @property
    def verdict(self) -> str:
        """What bounds a forward, how long each part of the machine is busy, and how much time more memory would save."""
        if self.details is None:
            return "No weights are streamed." if self.device_has_memory else _ALL_IN_RAM
        if self.device_has_memory:
            return " ".join(self.details.sentences())
        p = self.details.prediction
        if not p.disk_bytes:
            return _ALL_IN_RAM
        gain = self.details.gain_from(device_bytes=self.details.more_bytes)
        reading = f"Bottleneck: {p.bound}. Reading takes {describe_seconds(p.disk_seconds)} a forward."
        return f"{reading} {self.details.would_save('RAM', gain)}"

    def _shown(self) -> tuple[Sequence[Table], Sequence[str]]:
        return [*self._tables()], [*self._summary(), *self.notes]

    def _tables(self) -> Iterator[Table]:
        if self.details is not None:
            words = _WHERE if self.device_has_memory else _WHERE_ON_CPU
            yield [("groups", "number", "size", "stored on"), *_rows(self.details, words)]
        if self.memory:
            yield [("device memory now", "size"), *((label, describe_bytes(size)) for label, size in self.memory)]

    def _summary(self) -> list[str]:
        plan = self.details
        if plan is None:
            return [f"{self.model}: {self.verdict}"]
        p = plan.prediction
        if not self.device_has_memory:
            in_ram = sum(g.num_bytes for g, placement in _placed(plan) if placement is not Placement.FILE)
            told = f"{describe_bytes(p.disk_bytes)} from disk, into {describe_bytes(plan.slot_bytes)} of buffers"
            reads = f"; each forward reads {told}" if p.disk_bytes else ""
            return [f"{self.model}: {describe_bytes(in_ram)} in RAM{reads}.", self.verdict]
        moves = [f"transfers {describe_bytes(p.h2d_bytes)}"]
        moves += [f"reads {describe_bytes(p.disk_bytes)} from disk"] if p.disk_bytes else []
        moves += [f"decompresses {describe_bytes(p.decompress_bytes)}"] if p.decompress_bytes else []
        return [
            f"{self.model}: {describe_bytes(plan.device_bytes - plan.slot_bytes)} resident on the device and "
            f"{describe_bytes(plan.slot_bytes)} of buffers; {describe_bytes(plan.ram_bytes)} in RAM. Each forward "
            f"{' and '.join(moves)}.",
            self.verdict,
        ]


def _placed(plan: Plan) -> list[tuple[PlannedGroup, Placement]]:
    return [(g, placement) for g, placement in zip(plan.problem.groups, plan.placements, strict=True) if g.num_bytes]


def _rows(plan: Plan, words: Mapping[Placement, str]) -> Iterator[tuple[str, str, str, str]]:
    """Rows of the table. Neighbors that are stored alike are one row."""
    for where, run in groupby(_placed(plan), key=lambda each: _where(each[0], each[1], words)):
        mine = [group for group, _ in run]
        name = mine[0].name if len(mine) == 1 else f"{mine[0].name} to {mine[-1].name}"
        yield name, str(len(mine)), describe_bytes(sum(group.num_bytes for group in mine)), where


def _where(group: PlannedGroup, placement: Placement, words: Mapping[Placement, str]) -> str:
    is_compressed = group.compressed_bytes and (
        placement is Placement.RAM or (placement is Placement.FILE and group.reads_compressed)
    )
    return f"{words[placement]}, compressed" if is_compressed else words[placement]


_WHERE_ON_CPU = {Placement.DEVICE: "RAM", Placement.RAM: "RAM", Placement.FILE: "disk"}
_WHERE = {
    Placement.DEVICE: "device",
    Placement.COMPRESSED: "device, compressed",
    Placement.RAM: "RAM",
    Placement.FILE: "disk",
}
