"""Several processes of a host offload one model, and each sends its share of every group."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..support import several
from ..support.several import run


@pytest.mark.parametrize(("num_ranks", "offload_type"), [(2, "block_level"), (3, "leaf_level"), (4, "block_level")])
def test_outputs_have_the_same_bits(num_ranks: int, offload_type: str) -> None:
    run(several.has_same_bits, num_ranks, offload_type)


def test_a_rank_that_skips_repeats_and_reorders_blocks_is_slower_and_never_wrong() -> None:
    run(several.goes_its_own_way, 2)


def test_a_rank_that_raises_may_go_on() -> None:
    run(several.raises_and_goes_on, 2)


@pytest.mark.parametrize("where", ["in a forward", "between forwards"])
def test_a_rank_that_dies_is_named_by_the_others(where: str) -> None:
    run(several.is_killed, 3, where, expected=(0, -several.KILLED, 0))


def test_edits_are_shared_if_all_ranks_make_them() -> None:
    run(several.edits_weights, 2)


@pytest.mark.parametrize("what", ["blocks", "weights"])
def test_a_rank_with_another_model_is_named(what: str) -> None:
    run(several.has_another_model, 2, what)


@pytest.mark.parametrize("what", ["is missing", "fails"])
def test_a_rank_that_does_not_offload_is_named(what: str) -> None:
    run(several.is_missing, 2, what)


def test_a_rank_may_leave_early() -> None:
    run(several.leaves_early, 2)


def test_weights_in_files(tmp_path: Path) -> None:
    run(several.rests_in_files, 2, tmp_path)


def test_groups_and_meshes() -> None:
    run(several.is_in_groups, 4)


def test_hosts_share_for_themselves() -> None:
    run(several.is_on_two_hosts, 5)


def test_ram_has_one_copy() -> None:
    run(several.has_one_copy, 3)


def test_training_under_ddp() -> None:
    run(several.trains, 2)


def test_context_parallel() -> None:
    run(several.is_context_parallel, 2)


def test_a_pipeline() -> None:
    run(several.is_a_pipeline, 2)
