"""The tests that take long, in `tests/slow.txt`: `make quick` leaves them out.

The list is written by how long they took:

    make test ARGS=--junitxml=times.xml
    python -m tests.support.slow times.xml

Each line names a test function. A `*` behind it says that its first case is run nevertheless.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

SLOW = Path(__file__).parents[1] / "slow.txt"
MEAN_SECONDS = 0.25
LONGEST_SECONDS = 0.6
ALL_SECONDS = 3.0
"""A test is slow if its cases take longer than this on average, if one of them does, or if all of them together do."""
NUM_CASES = 3
FIRST_SECONDS = 0.4
"""A slow test of so many cases, which take no longer than this on average, stands for itself with its first case."""


def slow_lines(cases: Iterable[tuple[str, float]]) -> list[str]:
    """The lines for cases and their seconds; a case is `engine/test_x.py::test_y[z]`."""
    lasted: dict[str, list[float]] = defaultdict(list)
    for case, seconds in cases:
        lasted[case.partition("[")[0]].append(seconds)
    lines = []
    for test, seconds in sorted(lasted.items()):
        mean = sum(seconds) / len(seconds)
        if mean > MEAN_SECONDS or max(seconds) > LONGEST_SECONDS or sum(seconds) > ALL_SECONDS:
            lines.append(test + " *" * (len(seconds) >= NUM_CASES and mean <= FIRST_SECONDS))
    return lines


@cache
def slow_tests() -> dict[str, bool]:
    """The slow tests, and whether the first case of each is run nevertheless."""
    return {test: bool(star) for test, *star in [line.split() for line in SLOW.read_text().splitlines()]}


def _cases_of(report: Path) -> Iterable[tuple[str, float]]:
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.attrib["classname"].removeprefix("tests.").partition(".Test")[0].replace(".", "/")
        yield f"{file}.py::{case.attrib['name']}", float(case.attrib["time"])


if __name__ == "__main__":
    SLOW.write_text("".join(f"{line}\n" for line in slow_lines(_cases_of(Path(sys.argv[1])))))
