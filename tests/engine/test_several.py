"""Several processes of a host offload one model, and each sends its share of every group, to memory that stands for GPUs'.

To start processes takes longer than what they do: so one test runs several of the functions of `several`.
`integrations/test_parallel.py` runs those with models and pipelines of diffusers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from group_offload import ConfigError, apply_group_offloading

from ..support import several
from ..support.several import run


def test_two_ranks(tmp_path: Path) -> None:
    """Bits, edits, files, training; ranks that go their own way, raise, or leave early."""
    run(
        (several.has_same_bits, "block_level"),
        several.goes_its_own_way,
        several.raises_and_goes_on,
        several.edits_weights,
        (several.is_stored_on_disk, tmp_path),
        several.trains,
        (several.has_another_model, "blocks"),
        (several.has_another_model, "weights"),
        (several.differs_in_one_number, tmp_path),
        several.has_other_options,
        (several.is_missing, "fails"),
        several.leaves_early,
        several.is_dropped,
        several.meets_again,
        (several.is_missing, "is missing"),
    )


def test_three_ranks() -> None:
    """Ranks may be in different numbers of process groups; making one more would wait for ever."""
    run(
        several.is_on_the_cpu,
        (several.has_same_bits, "leaf_level"),
        several.has_one_copy,
        several.is_in_two_groups,
        several.goes_its_own_way,
        num_ranks=3,
    )


@pytest.mark.parametrize(
    ("case", "num_ranks"),
    [
        ((several.is_killed, "in a forward"), 3),
        ((several.is_killed, "between forwards"), 3),
        (several.is_killed_as_it_sets_up, 2),
    ],
)
def test_a_rank_that_dies_is_named_by_the_others(case: Any, num_ranks: int) -> None:
    """They would wait for minutes."""
    run(case, num_ranks=num_ranks, expected=(0, -several.KILLED, 0)[:num_ranks])


def test_four_ranks_in_groups_and_meshes() -> None:
    run((several.has_same_bits, "block_level"), several.is_in_groups, num_ranks=4)


def test_hosts_share_for_themselves() -> None:
    run(several.is_on_two_hosts, num_ranks=5)


@pytest.fixture
def group() -> Any:
    with several.world_of_one() as group:
        yield group


def test_a_rank_alone_shares_with_nobody(group: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, why = nn.Linear(2, 2), "no other rank of process_group is on this host"
    with caplog.at_level("INFO", "group_offload"):
        handle = apply_group_offloading(model, "cpu", process_group=group)
    assert why in str(handle.plan) and f"Not sharing transfers of Linear among GPUs: {why}." in caplog.messages
    handle.remove()


def test_groups_and_options_that_are_refused(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def assert_refused(why: str, **options: Any) -> None:
        with pytest.raises(ConfigError, match=why):
            apply_group_offloading(nn.Linear(2, 2), "cpu", **{"process_group": group, **options})

    assert_refused("interleave_forwards=True can't be combined with process_group", interleave_forwards=True)
    assert_refused(
        "verify_checksums=True contradicts shard_transfers=True", verify_checksums=True, shard_transfers=True
    )
    destroyed = dist.new_group([0])
    dist.destroy_process_group(destroyed)
    assert_refused("process_group was destroyed", process_group=destroyed)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [1])
    assert_refused(r"rank 0 \(this process\) isn't in process_group")
