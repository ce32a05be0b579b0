"""Which tensors share a version counter: those that were made as views of one tensor (`chunk`, `unbind`, a stacked checkpoint).

Each of them sees it rise when the engine raises it for another one, of another group even. Autograd's counters can be read
and raised, but not compared: so one is raised, to see which versions rise with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .group import Group
from .part import Part, SharedCounter


def share_counters(groups: Sequence[Group]) -> None:
    """Let tensors of `groups` that share a version counter know of it. Nobody is to see that versions have risen."""
    places = [
        (part, i) for group in groups for part in group.parts for i in range(len(part.refs)) if part.has_version(i)
    ]
    tensors = [part.refs[index].tensor for part, index in places]
    with torch.inference_mode(False):
        before = _versions_of(tensors)
        torch.autograd.graph.increment_version(tensors)
        left = [
            i
            for i, (version, (part, index)) in enumerate(zip(_versions_of(tensors), places, strict=True))
            if version > before[i] + 1 or index in part.shared_counters
        ]
        while left:
            now = _versions_of([tensors[i] for i in left])
            torch.autograd.graph.increment_version(tensors[left[0]])
            alike = [i for i, version in zip(left, now, strict=True) if tensors[i]._version != version]
            left = [i for i in left if i not in alike]
            _share([places[i] for i in alike], tensors[alike[0]]._version - before[alike[0]])
    for part in {part for part, _ in places}:
        part.num_increments += 1
    for group in groups:
        group.note_shared_counters()


def _share(places: Sequence[tuple[Part, int]], num_increments: int) -> None:
    known = [part.shared_counters[index] for part, index in places if index in part.shared_counters]
    # Whose versions somebody may have noted has had increments: those of new tensors count from anywhere.
    counter = known[0] if known else SharedCounter(max(part.num_increments for part, _ in places))
    counter.num_increments += num_increments
    for part, index in places:
        part.shared_counters[index] = counter


def _versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]
