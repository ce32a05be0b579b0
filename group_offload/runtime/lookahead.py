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
        self._generations = _generations_of(run)

    @property
    def is_good(self) -> bool:
        """Whether what was read is what would be read now."""
        return self._generations == _generations_of(self.run) and all(group.slot is None for group in self.run)


def _generations_of(run: list[Group]) -> list[tuple[int, bool]]:
    return [(part.image.generation, part.image.is_outdated) for group in run for part in group.parts]
