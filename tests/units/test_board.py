"""What ranks agree on: offers, the log, and who waits in vain."""

from __future__ import annotations

import os

import pytest

from group_offload.base.system import name_of_shared_file, new_shared_file, open_shared_file
from group_offload.runtime.sharing.board import BOARD_BYTES, Board, State, all_of
from group_offload.runtime.sharing.cut import cut


def test_the_last_offer_enters_the_log() -> None:
    found = State()
    for rank in (2, 0):
        found.offer(rank, "1/a", "same", (7, rank), 3)
        assert found.log == []
    found.offer(1, "1/a", "same", (7, 1), 3)
    assert found.log == [("1/a", {str(rank): (7, rank) for rank in range(3)})] and not found.offers
    assert not found.take_back(0, "1/a")


def test_other_bytes_are_never_gathered() -> None:
    found = State()
    found.offer(0, "1/a", "one", (), 2)
    found.offer(1, "1/a", "other", (), 2)
    assert found.log == []
    assert all(found.is_hopeless(rank, "1/a", 2, is_first=True) for rank in (0, 1))
    assert found.take_back(0, "1/a") and found.take_back(1, "1/a") and not found.offers


def test_the_log_keeps_what_a_rank_has_yet_to_send() -> None:
    found = State()
    for key in ("1/a", "1/b"):
        for rank in (0, 1):
            found.offer(rank, key, "", (), 2)
    found.forget(0)
    assert (found.first, [key for key, _ in found.log]) == (0, ["1/a", "1/b"])
    found.forget(1)
    assert (found.first, [key for key, _ in found.log]) == (1, ["1/b"])


def test_who_waits_in_vain() -> None:
    found = State()

    def is_hopeless(*, is_first: bool = False) -> bool:
        return found.is_hopeless(0, "1/a", 2, is_first=is_first)

    found.offer(0, "1/a", "", (), 2)
    assert not is_hopeless()
    found.decline(1, [all_of("1")])
    assert is_hopeless() and not is_hopeless(is_first=True)  # the other one's next pass may come soon
    found.begin_pass(1, "1", [])
    assert not is_hopeless()
    found.begin_pass(1, "1", ["1/a"])  # it is there
    assert is_hopeless(is_first=True)
    found.begin_pass(1, "1", [])
    found.offer(1, "1/b", "", (), 2)
    found.awaited["1"] = "1/b", False
    assert is_hopeless() and not is_hopeless(is_first=True)
    found.awaited["1"] = "1/b", True
    assert is_hopeless(is_first=True)
    found.awaited.clear()
    found.leave(1, "1", 2)
    assert is_hopeless(is_first=True) and "1/b" not in found.offers


def test_nothing_is_left_of_a_model_that_all_have_left() -> None:
    """Else the board is full after some hundred models."""
    found = State()
    for rank in (0, 1):
        found.begin_pass(rank, "1", ["1/a"])
        found.offer(rank, "1/b", str(rank), (), 2)
        found.decline(rank, [all_of("1")])
    found.residents = {"1/device": ["a"], "2/device": ["a"]}
    found.awaited = {"0": ("1/b", False), "1": ("1/b", True)}
    for rank in (0, 1):
        found.leave(rank, "1", 2)
    assert found == State(residents={"2/device": ["a"]})


def test_what_was_sent_is_said_without_a_turn() -> None:
    fd = new_shared_file(BOARD_BYTES)
    boards = [Board(open_shared_file(name_of_shared_file(fd)), rank, 3) for rank in range(3)]
    os.close(fd)
    with boards[0].change() as found:
        for rank in range(3):
            found.offer(rank, "1/a", "", (), 3)
    turn = boards[0].turn
    for number, board in enumerate(boards):
        board.has_sent(number + (1 << 32))
    assert [board.sent for board in boards] == [[1 << 32, (1 << 32) + 1, (1 << 32) + 2]] * 3 and boards[0].turn == turn
    assert len(boards[0].read()[0].log) == 1
    with boards[2].change() as found:
        assert not found.log
    for board in boards:
        board.close()


def test_a_change_that_breaks_off_leaves_the_state_before() -> None:
    fd = new_shared_file(BOARD_BYTES)
    boards = [Board(open_shared_file(name_of_shared_file(fd)), rank, 2) for rank in (0, 1)]
    os.close(fd)
    with boards[0].change() as found:
        found.offer(0, "1/a", "", (), 2)
    turn = boards[1].turn

    def break_off() -> None:
        with boards[1].change() as found:
            found.offer(1, "1/a", "", (), 2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        break_off()
    assert boards[0].turn == turn and boards[0].read()[0].offers == {"1/a": {"0": ("", ())}}
    for board in boards:
        board.close()


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("num_bytes", [0, 100, 256 * 7, 10_000, 1 << 20])
def test_parts_make_the_whole(num_bytes: int, num_ranks: int) -> None:
    found = cut(num_bytes, num_ranks)
    for rank in range(num_ranks):
        spans = sorted([*found.own(rank), *found.others(rank)])
        covered = [byte for start, end in spans for byte in (start, end) if start < end]
        assert covered[:1] in ([0], []) and covered[1:-1:2] == covered[2::2] and covered[-1:] in ([num_bytes], [])
    assert found.part_bytes % 256 == 0
    assert found.rest[1] - found.rest[0] < num_ranks * 256
