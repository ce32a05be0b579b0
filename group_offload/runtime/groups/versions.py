"""Tensors that share a version counter, because they were made as views of one (`chunk`, `unbind`, a stacked checkpoint).

When the engine raises the counter for one of them the versions of all rise, even of tensors in other groups. Autograd's
counters can be read and raised, but not compared: so one is raised, to see which versions rise with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .group import Group
from .part import Part, SharedCounter
from .tensors import tracks_version


def share_counters(groups: Sequence[Group]) -> None:
    """Find the tensors of `groups` that share a version counter. The increments that this takes are counted as the engine's."""
    parts = dict.fromkeys(part for group in groups for part in group.parts)
    places = [(part, i) for part in parts for i, ref in enumerate(part.refs) if tracks_version(ref.tensor)]
    tensors = [part.refs[index].tensor for part, index in places]
    with torch.inference_mode(False):
        before = [tensor._version for tensor in tensors]
        torch.autograd.graph.increment_version(tensors)
        left = [
            i
            for i, (tensor, (part, index)) in enumerate(zip(tensors, places, strict=True))
            if tensor._version > before[i] + 1 or index in part.shared_counters
        ]
        while left:
            now = [tensors[i]._version for i in left]
            torch.autograd.graph.increment_version(tensors[left[0]])
            alike = [i for i, version in zip(left, now, strict=True) if tensors[i]._version != version]
            left = [i for i in left if i not in alike]
            _share([places[i] for i in alike], tensors[alike[0]]._version - before[alike[0]])
    for part in parts:
        part.num_increments += 1
    for group in groups:
        group.note_shared_counters()


def _share(places: Sequence[tuple[Part, int]], num_increments: int) -> None:
    known = [part.shared_counters[index] for part, index in places if index in part.shared_counters]
    # A tensor whose version may have been noted keeps its count of increments. New tensors may count from anywhere.
    counter = known[0] if known else SharedCounter(max(part.num_increments for part, _ in places))
    counter.num_increments += num_increments
    for part, index in places:
        part.shared_counters[index] = counter
