"""Runs the support matrix: `python -m tests.matrix [CLASS ...]`, and with `--write` its part of docs/compatibility.md.

It takes 15 minutes on 2 cores. It ends with 1 if a class gives other bits than resident, or raises what no user should see.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed

from . import page
from .arms import Row, prepare, run
from .cases import CASES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("classes", nargs="*", help="the classes to run; all if none is given")
    parser.add_argument("--write", action="store_true", help=f"write the table to {page.PATH.name}")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    given = parser.parse_args()
    if given.write and given.classes:
        parser.error("--write needs all classes.")
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    unknown = sorted(set(given.classes) - CASES.keys())
    if unknown:
        parser.error(f"no case of {', '.join(unknown)}.")
    rows: dict[str, Row] = {}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.jobs, spawn, initializer=prepare) as pool:
        for done in as_completed([pool.submit(run, name) for name in given.classes or CASES]):
            row = done.result()
            rows[row.name] = row
            print(f"[{len(rows)}/{len(given.classes or CASES)}] {row}", flush=True)
    if given.write:
        page.write(rows)
    failed = sorted(name for name, row in rows.items() if row.has_failed)
    print(f"{len(failed)} of {len(rows)} classes failed. {' '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
