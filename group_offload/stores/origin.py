"""The place in a file that edited weights come from, and return to once they have its bytes again (a LoRA unfused)."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from ..base.layout import BlobLayout, as_bytes, span_bytes
from ..base.mapping import flat_view, map_file
from ..base.system import open_to_read
from .source import SourceFile


class Place(NamedTuple):
    """Bytes of a checkpoint."""

    path: Path
    content: tuple[int, int, int, int]
    """That of its `SourceFile`: another file under the same name is not trusted."""
    position: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Origin:
    """The bytes of checkpoints that tensors of a blob were views of, before they were edited."""

    places: Mapping[int, Place]
    """By the index of the tensor in the blob."""

    def views(self, layout: BlobLayout, rest: Sequence[torch.Tensor]) -> dict[int, torch.Tensor] | None:
        """New views of the checkpoints for these tensors, if the bytes of all of them are there now."""
        found: dict[int, torch.Tensor] = {}
        for path in dict.fromkeys(place.path for place in self.places.values()):
            mine = {index: place for index, place in self.places.items() if place.path == path}
            start = min(place.position for place in mine.values())
            start -= start % mmap.ALLOCATIONGRANULARITY
            end = max(place.position + place.num_bytes for place in mine.values())
            with ExitStack() as stack:
                try:
                    stack.callback(os.close, fd := open_to_read(path))
                    source = SourceFile(path, fd, start, end)
                    # The largest first: a LoRA is not for norms, and one difference is enough.
                    for index, place in sorted(mine.items(), key=lambda item: -item[1].num_bytes):
                        if place.content != source.content or place.num_bytes != span_bytes(rest[index]):
                            return None
                        if not source.holds(place.position, as_bytes(rest[index])):
                            return None
                    mapping = map_file(fd, end - start, start)
                    source.check()
                except OSError:  # GroupFileError too: it is gone, or somebody changes it
                    return None
            with torch.inference_mode(False), torch.no_grad():
                for index, place in mine.items():
                    spec = layout.specs[index]
                    found[index] = spec.view(flat_view(mapping, place.position - start, place.num_bytes), spec.offset)
        return found
