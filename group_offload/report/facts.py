"""What a report says of models: frozen data, in seconds and bytes, from a run or from a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..base.timeline import COMPUTE, COPIES, DECODE, GATHERS, READS, STALLS, Slice
from ..plan.pass_model import foresee
from ..plan.placement import Placement
from ..plan.planner import Plan

LANES = {
    READS: "drive",
    COPIES: "link",
    GATHERS: "gather",
    DECODE: "decode",
    COMPUTE: "compute",
    STALLS: "stalls",
}
"""The lanes of a timeline, from the top, and what the page calls them."""


class Place(Enum):
    """Where a group rests between its uses."""

    DEVICE = "on the device"
    PACKED = "on the device, packed"
    LOCKED = "page-locked RAM"
    RAM = "RAM"
    FILE = "file"
    PASS = "on the device during a pass"
    """A plan does not say where such a group rests."""


PLACES = {
    Placement.DEVICE: Place.DEVICE,
    Placement.PACKED: Place.PACKED,
    Placement.RAM: Place.LOCKED,
    Placement.FILE: Place.FILE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    name: str
    num_bytes: int
    place: Place
    detail: str = ""
    """The file, or what else there is to say."""
    is_outer: bool = False
    """Whether the group is needed around others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassFacts:
    title: str
    seconds: float
    slices: Sequence[Slice]
    """Times count from the beginning of the pass. Some begin before it, or end after it."""
    how: str
    """"recorded" or "predicted"."""
    is_forward: bool = True

    def busy_seconds(self, lane: str, outer: Iterable[str] = ()) -> float:
        """How long at least one slice of the lane was under way, within the pass. Groups in `outer` do not count."""
        left_out = frozenset(outer)
        spans = sorted(
            (max(0.0, each.start), min(self.seconds, each.end))
            for each in self.slices
            if each.lane == lane and each.name not in left_out
        )
        busy, until = 0.0, 0.0
        for start, end in spans:
            busy += max(0.0, end - max(start, until))
            until = max(until, end)
        return busy


@dataclass(frozen=True, slots=True, kw_only=True)
class GainFacts:
    """What more of a memory would save in each pass: 1 GiB, or one more group."""

    memory: str
    num_bytes: int
    seconds: float
    step_seconds: float

    @property
    def sentence(self) -> str:
        if self.seconds <= self.step_seconds / 1000:
            return "would change nothing"
        return f"would save {self.seconds:.3g} s of {self.step_seconds:.3g} s a pass ({self.seconds / self.step_seconds:.0%})"


@dataclass(frozen=True, slots=True)
class PartFacts:
    """A part of a memory. Its colour is that of a place or of a lane."""

    label: str
    num_bytes: int
    colour: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """One memory: what is in it, and what it may take."""

    name: str
    parts: Sequence[PartFacts]
    budget_bytes: int | None
    total_bytes: int | None
    sentences: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    name: str
    """The name in its pipeline. Empty for a model by itself."""
    model_class: str
    device: str
    device_has_memory: bool = True
    """Whether bytes are sent to the device. If not, it is the CPU, which computes with weights in RAM where they are."""
    groups: Sequence[GroupFacts]
    passes: Sequence[PassFacts]
    """The last ones, the latest last."""
    sentences: Sequence[str]
    """The verdict first."""
    gains: Sequence[GainFacts]
    plan: Mapping[str, Any] | None
    stats: Mapping[str, Any] | None
    """`OffloadStats` as a dict. None before a run."""
    memory: Sequence[tuple[str, int]] = ()
    """Who holds device memory now."""

    @property
    def title(self) -> str:
        return " ".join(part for part in (self.name, self.model_class) if part) or "model"

    @property
    def step(self) -> tuple[float, str] | None:
        """The seconds of a pass, and whether these were measured, recorded or predicted. None if nothing is known."""
        measured = (self.plan or {}).get("measured_seconds")
        if measured is not None:
            return measured, "measured"
        return next(((one.seconds, one.how) for one in reversed(self.passes) if one.is_forward), None)

    @property
    def outer(self) -> frozenset[str]:
        return frozenset(group.name for group in self.groups if group.is_outer)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFacts:
    title: str
    models: Sequence[ModelFacts]
    memories: Sequence[MemoryFacts]
    sentences: Sequence[str]
    """What the numbers stand on."""


def predicted_pass(plan: Plan) -> PassFacts:
    """A pass as the plan foresees it."""
    return PassFacts(
        title="predicted",
        seconds=plan.prediction.step_seconds,
        slices=foresee(plan.problem, plan.placements),
        how="predicted",
    )


def gains_of(plan: Plan) -> list[GainFacts]:
    """What more memory would save. Nothing is said if a pass takes no time that is known."""
    step = plan.prediction.step_seconds
    more = plan.more_bytes
    gains = {"VRAM": plan.gain_from(device_bytes=more), "RAM": plan.gain_from(ram_bytes=more)}
    return [
        GainFacts(memory=name, num_bytes=more, seconds=gain, step_seconds=step) for name, gain in gains.items() if step
    ]


def plan_as_dict(plan: Plan) -> dict[str, Any]:
    """The numbers of a plan, as the page shows them."""
    prediction = plan.prediction
    return {
        "step_seconds": plan.step_seconds,
        "measured_seconds": plan.measured_seconds,
        "predicted_seconds": prediction.step_seconds,
        "limit_seconds": prediction.limit_seconds,
        "bound": prediction.bound if prediction.limit_seconds else None,
        "stall_seconds": prediction.stall_seconds,
        "compute_seconds": prediction.compute_seconds,
        "h2d_seconds": prediction.h2d_seconds,
        "drive_seconds": prediction.drive_seconds,
        "h2d_bytes": prediction.h2d_bytes,
        "drive_bytes": prediction.drive_bytes,
        "device_bytes": plan.device_bytes,
        "slot_bytes": plan.slot_bytes,
        "ram_bytes": plan.ram_bytes,
        "h2d_bytes_per_s": plan.problem.speeds.h2d,
        "drive_bytes_per_s": plan.problem.speeds.drive,
    }
