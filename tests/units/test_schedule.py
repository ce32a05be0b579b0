"""Guesses of a first forward that blocks alike lead to."""

from __future__ import annotations

import pytest

from group_offload.runtime.prefetch.schedule import Schedule


class Named:
    """Stands for a group of a layer."""

    def __init__(self, name: str) -> None:
        self.group_id, self.layers = name, (name,)


@pytest.mark.parametrize(
    ("names", "order"),
    [
        ([f"blocks.{i}.{each}" for i in range(300) for each in "ab"], ["a", "b", "a", "b", "a"]),
        (["skip", "conv-", "act", "conv-1"], None),
    ],
    ids=["around in circles", "odd names"],
)
def test_a_first_forward_guesses_by_other_blocks(names: list[str], order: list[str] | None) -> None:
    """Hazard: guesses that lead around are followed without end; names that differ in their indices raise in a forward."""
    groups = {name: Named(name) for name in names}
    schedule = Schedule([*groups.values()])  # type: ignore[list-item]
    schedule.begin(None, {*groups.values()})  # type: ignore[arg-type]
    called = names[::-1] if order is None else [f"blocks.{i}.{each}" for i in range(300) for each in order]
    for name in called:
        schedule.observe(groups[name])  # type: ignore[arg-type]
        assert len([*schedule.upcoming(wraps=True)]) <= 2 * len(groups)
    schedule.end(completed=True)
    assert [group.group_id for group in schedule.order] == called
