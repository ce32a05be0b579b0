"""Budgets as users write them, and what the machine has."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from group_offload import ConfigError
from group_offload.plan.budgets import _warn_of_less, auto_ram, describe_bytes, parse_budget, parse_bytes, total_ram

from ..support.control_groups import Cgroups, stat

GIB = 1 << 30


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1024, 1024),
        (None, None),
        (" Auto ", "auto"),
        (numpy.float32(2.0**33), 8 * GIB),
        (" 8gib ", 8 * GIB),
        (".5 kB", 500),
        ("3mb", 3 * 10**6),
        ("80%", int(24 * GIB * 0.8)),
        ("12.5 %", 3 * GIB),
        ("0.0000000001%", 1),
    ],
)
def test_what_is_understood(value: Any, expected: int) -> None:
    assert parse_budget(value, "vram_budget", 24 * GIB) == expected


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (0, "more than 0"),
        ("0.1B", "more than 0"),
        ("-3GiB", "isn't an amount"),
        (1.5, "whole number"),
        (0.8, "'80%'"),
        (float("nan"), "whole number"),
        ("nan", "isn't an amount"),
        ("\u0661GiB", "isn't an amount"),
        ("9" * 5000, "isn't an amount"),
        ("120%", "at most 100%"),
        ("8 apples", "isn't a unit"),
        ("8G", "it is ambiguous. Did you mean '8GiB' or '8GB'?"),
        (8, "8 bytes. Did you mean '8GiB'?"),
        ("24", "Did you mean '24GiB'?"),
        (True, "bool"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_is_refused(value: Any, why: str) -> None:
    """The message says what is wrong, and what to type."""
    with pytest.raises(ConfigError) as caught:
        parse_budget(value, "ram_budget", GIB)
    said = str(caught.value)
    assert said.startswith(f"ram_budget={repr(value)[:80]}") and why in said
    assert "'8GiB'" in said and "'80%'" in said and "'auto'" in said and len(said) < 350


@pytest.mark.parametrize("value", [9 * GIB, "9GiB", 1e30, 10**30])
def test_more_than_there_is(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    _warn_of_less.cache_clear()
    with caplog.at_level(logging.WARNING, "group_offload"):
        assert parse_budget(value, "vram_budget", 8 * GIB) == 8 * GIB
        assert parse_budget(value, "vram_budget", 8 * GIB) == 8 * GIB  # the next model of a pipeline
    assert caplog.messages == [f"vram_budget={value!r} exceeds the device's 8 GiB; using 8 GiB."]
    caplog.clear()
    assert parse_budget("8GiB", "vram_budget", 8 * GIB) == 8 * GIB and not caplog.messages


@settings(deadline=None)
@given(st.integers(1, 1 << 50))
def test_what_is_described_is_understood(num_bytes: int) -> None:
    assert [describe_bytes(each) for each in (0, 1023, 3 * GIB // 2)] == ["0 B", "1023 B", "1.5 GiB"]
    found = parse_budget(describe_bytes(num_bytes), "x", 1 << 60)
    assert isinstance(found, int) and abs(found - num_bytes) <= num_bytes * 0.005 + 1
    enough = parse_budget(describe_bytes(num_bytes, round_up=True), "x", 1 << 60)
    assert isinstance(enough, int) and num_bytes <= enough <= num_bytes * 1.01 + 1


@settings(deadline=None)
@given(st.text(max_size=12))
def test_any_text_is_an_amount_or_an_error(text: str) -> None:
    try:
        found = parse_budget(text, "x", GIB)
    except ConfigError:
        return
    assert found == "auto" or (isinstance(found, int) and 1 <= found <= GIB)


def test_amounts_that_are_no_budgets() -> None:
    assert parse_bytes("0", "--activations") == 0 and parse_bytes("1.5GiB", "x") == 3 * GIB // 2
    for text in ("80%", "auto", "-1", "2G"):
        with pytest.raises(ConfigError, match=r"^--activations="):
            parse_bytes(text, "--activations")


# ---------------------------------------------------------------- what there is


def test_what_there_is_in_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's limit counts, of either version of control groups, and "auto" leaves a tenth or 1 GiB of the rest."""
    assert 0 < auto_ram() < total_ram() < 1 << 50  # of the system itself
    cgroups = Cgroups(tmp_path, monkeypatch)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=100 * GIB, available=60 * GIB))
    assert (total_ram(), auto_ram()) == (100 * GIB, 54 * GIB)
    cgroups.say("0::/a/b", "nonsense", "5:memory:/c", "4:cpu:/d")
    for path, version, limit, expected in (("a/b", 2, "max", 100), ("a", 2, 20 * GIB, 20), ("c", 1, 5 * GIB, 5)):
        name = "memory__max" if version == 2 else "memory__limit_in_bytes"
        cgroups.write(path, version, **{name: limit})
        assert total_ram() == expected * GIB
    cgroups.say("0::/a")
    cgroups.write("a", memory__max=5 * GIB, memory__current=2 * GIB, memory__stat=stat(GIB, 0))
    assert auto_ram() == 3 * GIB  # 1 GiB of the 4 that are available
    cgroups.write("a", memory__max=2 * GIB)
    assert auto_ram() == 0
