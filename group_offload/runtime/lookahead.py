"""What is read from files before there is a slot for it."""

from __future__ import annotations

from .group import Group
from .reader import Job


class Walk:
    """What was found out so far on a walk through what comes next."""

    def __init__(self) -> None:
        self.soon: set[Group] = set()
        """What comes next, up to here."""
        self.full: set[int] = set()
        """The heights of groups for which there is no room."""
        self.met: set[Ahead] = set()
        """What is read already, and rightly so."""


class Ahead:
    """A run of groups that is read from files before there is a slot for it."""

    def __init__(self, run: list[Group], job: Job) -> None:
        self.run = run
        self.job = job
        self._states = _states_of(run)

    @property
    def is_good(self) -> bool:
        """Whether what was read is what would be read now."""
        return self._states == _states_of(self.run) and all(group.slot is None for group in self.run)


def _states_of(run: list[Group]) -> list[tuple[int, bool, int]]:
    """What is page-locked meanwhile is not read any more, but copied from where it is."""
    images = [part.image for group in run for part in group.parts]
    return [(image.generation, image.is_outdated, image.pinned_bytes) for image in images]
