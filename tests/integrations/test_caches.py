"""Beside the caches of diffusers, which skip parts of a model: the bits of the resident model with the same cache.

A cache is switched on before offloading, with steps behind it, or after it; a LoRA comes and goes in between; the cache is
switched off again. Several contexts take turns, as with guidance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from group_offload import apply_group_offloading

from ..support import tiny_models as tiny
from ..support.asserts import assert_same
from ..support.caches import CACHES, NUM_STEPS, CacheCase, Clock
from ..support.rigs import LEVELS, TIERS, run, run_onloaded

pytestmark = pytest.mark.filterwarnings("ignore:torch.meshgrid:UserWarning")  # FasterCache

before_or_after = pytest.mark.parametrize("order", ["before", "after"])
TARGETS = ("to_q", "proj_out")


class Counted:
    """A model of a case, with a count of the calls of a module that the cache skips."""

    def __init__(self, case: CacheCase) -> None:
        self.case, self.clock, self.calls = case, Clock(), 0
        self.model = case.make().to(tiny.device())
        self.model.get_submodule(case.skipped).register_forward_hook(self._count)
        self.call: Callable[..., Any] = run

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def steps(self, start: int = 0, end: int = NUM_STEPS) -> list[Any]:
        before = self.calls
        outputs = list(self.case.denoise(self.model, self.clock, self.call, range(start, end)))
        return [outputs, self.calls - before]

    def enable(self) -> None:
        self.model.enable_cache(self.case.config(self.clock))


def life(counted: Counted, offload: Callable[[str], None]) -> Iterator[tuple[str, Any]]:
    """What a user does with a cache and a LoRA; `offload` is told how far things are."""
    model = counted.model
    offload("before the cache")
    yield "plain", counted.steps(0, 1)
    counted.enable()
    yield "first steps", counted.steps(0, 2)
    offload("with warm caches")
    yield "later steps", counted.steps(2)
    model._reset_stateful_cache()
    yield "another image", counted.steps(0, 2)
    model.load_lora_adapter(tiny.lora_of(model, TARGETS), prefix=None, adapter_name="one")
    yield "a LoRA between two steps", counted.steps(2)
    model._reset_stateful_cache()
    model.delete_adapters("one")
    yield "the LoRA is gone", counted.steps(0, 2)
    model.disable_cache()
    yield "without the cache", counted.steps(0, 1)
    counted.enable()
    yield "with a new cache", counted.steps()


@cache
def expected(name: str) -> list[tuple[str, Any]]:
    return list(life(Counted(CACHES[name]), lambda when: None))


@pytest.mark.parametrize("name", CACHES)
def test_the_cache_skips(name: str) -> None:
    """The other tests of this file show something only if it does."""
    of = dict(expected(name))
    assert 0 < of["with a new cache"][1] < NUM_STEPS * len(CACHES[name].contexts)
    assert of["without the cache"][1] == len(CACHES[name].contexts)
    with_lora, without = of["a LoRA between two steps"][0], of["later steps"][0]
    assert not torch.equal(tree_leaves(with_lora)[0], tree_leaves(without)[0])


@before_or_after
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", CACHES)
def test_bits(name: str, tier: str, level: str, order: str, tmp_path: Path) -> None:
    counted = Counted(CACHES[name])
    options = {"offload_to_disk_path": tmp_path} if tier == "file" else {}

    def offload(when: str) -> None:
        if (when == "before the cache") == (order == "after"):
            apply_group_offloading(counted.model, tiny.device(), offload_type=level, **options)
            counted.call = run_onloaded if (tier, order) == ("ram", "after") else run

    for (stage, actual), (_, wanted) in zip(life(counted, offload), expected(name), strict=True):
        assert_same(actual, wanted), stage
