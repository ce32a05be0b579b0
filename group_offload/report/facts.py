"""What a report says of models: frozen data, in seconds and bytes, from a run or from a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from ..plan.placement import Placement
from ..plan.planner import Plan


class Place(Enum):
    """Where a group is stored between its uses."""

    DEVICE = "on the device"
    PACKED = "on the device, packed"
    LOCKED = "pinned RAM"
    RAM = "RAM"
    FILE = "file"
    PASS = "on the device during a forward"
    """A plan does not say where such a group is stored."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """One memory: what is in it, and what it may take."""

    name: str
    parts: Sequence[tuple[str, int, str]]
    """The label, the bytes, and the color: that of a place."""
    budget_bytes: int | None
    total_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    name: str
    """The name in its pipeline. Empty for a model by itself."""
    model_class: str
    groups: Sequence[GroupFacts]
    sentences: Sequence[str]
    """The verdict first."""
    figures: Mapping[str, Mapping[str, Any]]
    """Tables of numbers, by their titles."""

    @property
    def title(self) -> str:
        return f"{self.name} {self.model_class}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFacts:
    title: str
    models: Sequence[ModelFacts]
    memories: Sequence[MemoryFacts]
    sentences: Sequence[str]
    """What the numbers stand on."""


def figures_of(plan: Plan) -> dict[str, Any]:
    """The numbers of a plan."""
    prediction, speeds = plan.prediction, plan.problem.speeds
    return {
        **asdict(prediction),
        "predicted_seconds": prediction.step_seconds,
        "step_seconds": plan.step_seconds,
        "measured_seconds": plan.measured_seconds,
        "limit_seconds": prediction.limit_seconds,
        "bound": prediction.bound if prediction.limit_seconds else None,
        "device_bytes": plan.device_bytes,
        "slot_bytes": plan.slot_bytes,
        "ram_bytes": plan.ram_bytes,
        "h2d_bytes_per_s": speeds.h2d,
        "drive_bytes_per_s": speeds.drive,
    }
