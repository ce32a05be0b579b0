"""A pipeline on a card that is really full: no error, the same bits, and a budget that pays from the first image on.

Each test is about one way in which that failed on a GPU.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from group_offload.runtime.budget import budgeter
from group_offload.runtime.budget.budgeter import Budgeter

from ..support.allocator import CachingAllocator
from ..support.card import GIB, MIB, Image, run

FULL = [(7.79, "auto"), (7.79, 7), (7.79, 6), (11.79, "auto"), (11.79, 11), (11.79, 10)]
"""GiB that are free, and budgets for them."""
AMPLE = 200
"""GiB of a card that has more than a budget."""
ALL_WEIGHTS = 31.1
"""GiB of weights that an image needs once."""

any_segments = pytest.mark.parametrize("expandable", [False, True], ids=["segments", "expandable"])


def assert_no_errors(images: list[Image]) -> None:
    assert [image.error for image in images] == [""] * len(images)


def assert_whole(images: list[Image]) -> None:
    """Each image is there, with the bits that it should have."""
    assert_no_errors(images)
    assert [image.fallbacks for image in images] == [0] * len(images)


@any_segments
@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize(("free", "budget"), FULL)
def test_no_image_runs_out_of_memory(free: float, budget: float | str, pack: bool, expandable: bool) -> None:
    """What stays, or what is free in fragments, would be in the way of activations, buffers or a larger image."""
    assert_no_errors(run(free, budget, steps=4, pack=pack, expandable=expandable))


def test_packed_images_are_there_where_plain_ones_are() -> None:
    """One block is half of the model. Packing takes berths for a few strips of it, and not for all of it."""
    plain, packed = (run(AMPLE, None, sizes=(1, 1), steps=4, pack=pack, is_unet=True) for pack in (False, True))
    most = max(image.peak_allocated for image in plain) + 0.25
    assert all(image.packed[-1] and image.peak_allocated <= most for image in packed)
    for pack in (False, True):
        assert_whole(run(6, "auto", sizes=(1, 1), steps=4, pack=pack, expandable=True, is_unet=True))


def test_single_layers_are_streamed_where_blocks_leave_no_room() -> None:
    """Unless you asked for blocks. Layer by layer, a card is enough that runs out of memory with two blocks."""
    assert_no_errors(run(2, "auto", sizes=(1,), steps=3, expandable=True))
    for options in ({"offload_type": "block_level"}, {"num_blocks_per_group": 1}):
        assert [image.error != "" for image in run(2, "auto", sizes=(1,), steps=3, expandable=True, **options)] == [
            True
        ]


@pytest.mark.parametrize("free", [3.1, 3.3, 3.6])
def test_the_last_model_holds_nothing_that_the_next_one_needs(free: float) -> None:
    """Not until Python's collector runs either: the slots of packed weights are exchanged for those of another model."""
    gc.collect()
    gc.disable()
    try:
        assert_no_errors(run(free, "auto", steps=4, pack=True, expandable=True))
    finally:
        gc.enable()


def test_no_pass_waits_for_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans take milliseconds. They are made as a pass ends, while the device still computes."""
    before_pass, made = Budgeter.before_pass, []

    def passing(*args: Any) -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(budgeter, "make_plan", None)
            made.append(before_pass(*args))
        return made[-1]

    monkeypatch.setattr(Budgeter, "before_pass", passing)
    assert_whole(run(7.79, "auto", sizes=(1, 1, 1), steps=4))
    assert any(made)


@any_segments
@pytest.mark.parametrize("sizes", [(1, 1, 1.5, 1), (0.5, 1, 0.5, 1)], ids=str)
def test_what_stays_gives_way_to_a_larger_image(sizes: tuple[float, ...], expandable: bool) -> None:
    assert_whole(run(7.79, "auto", sizes=sizes, steps=4, expandable=expandable))


@pytest.mark.parametrize(("free", "budget"), [(AMPLE, 7), (7.79, "auto")])
def test_no_page_is_locked_again_because_of_what_stays(free: float, budget: float | str, tmp_path: Path) -> None:
    """There is RAM for all weights: what stays on the device comes back from locked pages, not from a file."""
    images = run(free, budget, sizes=(1, 1), steps=4, expandable=True, folder=tmp_path)
    assert [(image.locked, image.unlocked, image.read) for image in images] == [(0, 0, 0)] * 2


def test_nothing_is_packed_twice(tmp_path: Path) -> None:
    """What is packed at rest does not follow what stays on the device."""
    images = run(AMPLE, 11.2, steps=4, pack=True, folder=tmp_path)
    assert len({num_bytes for image in images for num_bytes in image.packed}) == 1


@any_segments
@pytest.mark.parametrize(("free", "budget"), FULL)
def test_a_model_whose_turn_comes_keeps_what_stays(free: float, budget: float | str, expandable: bool) -> None:
    """The step that it begins with sends no group twice, but for the first ones of the next step; later ones send the rest."""
    images = run(free, budget, expandable=expandable)
    assert_no_errors(images)
    for image in images[1:]:
        assert image.step_sent[0] <= ALL_WEIGHTS + 2.5
        assert max(image.step_sent[1:]) <= 1.1 * images[-1].step_sent[-2]


@any_segments
@pytest.mark.parametrize("keeps_plans", [False, True], ids=["", "plans are kept"])
@pytest.mark.parametrize(
    ("free", "budget", "workspace_mib"), [(7.79, "auto", 1100), (7.79, 7, 1100), (15.79, "auto", 2000)]
)
def test_convolutions_get_their_workspaces(
    free: float, budget: float | str, workspace_mib: float, keeps_plans: bool, expandable: bool
) -> None:
    """cuDNN takes another algorithm without, which gives other bits and no error. It may take that for good."""
    options: dict[str, Any] = {"workspace_mib": workspace_mib, "keeps_plans": keeps_plans, "expandable": expandable}
    assert_whole(run(free, budget, steps=4, **options))


@any_segments
def test_a_convolution_that_got_no_workspace_is_repeated(expandable: bool) -> None:
    """After the call has begun another process takes what was left for it, but for what the activations need."""
    refused = 0

    def before_call(card: CachingAllocator, image: int, name: str) -> None:
        nonlocal refused
        if (image, name) == (1, "vae 5") and not refused:
            card.release_cached()
            card.other_takes(card.free_bytes - 900 * MIB)
            refused += 1

    images = run(
        7.79, "auto", sizes=(1, 1), steps=4, workspace_mib=1100, before_call=before_call, expandable=expandable
    )
    assert refused and images[1].refused
    assert_whole(images)


@pytest.mark.parametrize("in_files", [False, True])
def test_a_budget_pays_from_the_first_image_on(in_files: bool, tmp_path: Path) -> None:
    folder = tmp_path if in_files else None
    without = run(7.79, None, sizes=(1, 1), folder=folder)
    images = run(7.79, "auto", sizes=(1, 1), folder=folder, expandable=True)
    assert images[0].seconds <= 1.05 * without[0].seconds
    step = images[1].step_seconds[-2]
    assert images[0].step_seconds[2] <= 1.05 * step
    assert images[1].seconds <= without[1].step_seconds[0] + 7 * step + 0.15


@any_segments
@pytest.mark.parametrize("first", ["text_encoder", "transformer 0", "transformer 2"])
def test_another_process_takes_and_gives_memory(first: str, expandable: bool) -> None:
    """It takes 2 GiB in one image and gives them back in the next; later ones are as if it had not been there."""
    taken = 0

    def before_call(card: CachingAllocator, image: int, name: str) -> None:
        nonlocal taken
        if (image, name) == (0, first):
            taken = card.other_takes(2 * GIB)
        if (image, name) == (1, first):
            card.other_gives(taken)

    alone = run(7.79, "auto", sizes=(1, 1, 1, 1), steps=4, expandable=expandable)
    images = run(7.79, "auto", sizes=(1, 1, 1, 1), steps=4, before_call=before_call, expandable=expandable)
    assert taken
    assert_whole(images)
    assert sum(images[-1].step_sent) <= 1.05 * sum(alone[-1].step_sent)


@any_segments
def test_another_process_takes_whatever_is_free(expandable: bool) -> None:
    """Before each call, until a pipeline without a budget would have what it needs, kernels and half a GiB."""
    taken = 0
    least = max(image.peak_reserved for image in run(7.79, None, sizes=(1, 1), steps=4)) + 0.8

    def before_call(card: CachingAllocator, image: int, name: str) -> None:
        nonlocal taken
        if image:
            taken += card.other_takes(max(0, int((7.79 - least) * GIB) - taken))

    assert_whole(run(7.79, "auto", steps=4, before_call=before_call, expandable=expandable))


@pytest.mark.parametrize(("free", "budget"), [*FULL, (AMPLE, 7)])
def test_little_is_reserved_and_not_allocated(free: float, budget: float | str) -> None:
    """Else much is free, in fragments that no block fits in."""
    images = run(free, budget, sizes=(1,) * 5, steps=4, expandable=True)
    reserved = max(image.peak_reserved for image in images)
    assert reserved - max(image.peak_allocated for image in images) <= 0.05 * min(free, 16)
