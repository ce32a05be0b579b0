"""diffusers' own test-suite, on diffusers' engine and on this one.

    python tests/support/diffusers_suite.py CHECKOUT        both, one after the other, test by test; CHECKOUT/tests is read only

As a pytest plugin (`PYTHONPATH=tests/support:. pytest -p diffusers_suite ...`) it calls `patch_diffusers()` before anything of
the suite is imported, if GROUP_OFFLOAD_PATCH=1, and says at the end how much the engine was used: a run in which it was
never called cannot pass for a success. The suite always tests the installed diffusers, not CHECKOUT/src.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
DEFAULT_TESTS = ["tests/hooks/test_group_offloading.py"]
IS_PATCHED = os.environ.get("GROUP_OFFLOAD_PATCH") == "1"
COUNTERS: list[Any] = []
"""Of every engine. The suite measures memory, so neither handles nor modules may be kept alive here."""

if __name__ != "__main__":  # pytest loads the plugin before it imports any test or conftest
    import diffusers  # before a conftest can put another one on the path

    import group_offload
    from group_offload.handle import Listener, add_listener

    class Counting(Listener):
        def applied(self, handle: Any) -> None:
            COUNTERS.append(handle._engine.counters)

    if IS_PATCHED:
        group_offload.patch_diffusers()
        add_listener(Counting())


def pytest_terminal_summary(terminalreporter: Any) -> None:
    onloads, passes = (sum(getattr(each, name) for each in COUNTERS) for name in ("onloads", "passes"))
    terminalreporter.write_line(
        f"group_offload: {len(COUNTERS)} modules offloaded, {onloads} onloads in {passes} forwards "
        f"(diffusers {diffusers.__version__}, {'patched' if IS_PATCHED else 'not patched'})"
    )


def run_suite(checkout: Path, tests: list[str], extra: list[str], *, patched: bool) -> tuple[dict[str, str], str]:
    """One run in a process of its own: how each test ended, and what the plugin said."""
    places = [str(ROOT / "tests" / "support"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(places), "GROUP_OFFLOAD_PATCH": "1" if patched else "0"}
    # No configuration but the suite's own, and its order: it measures memory, so an earlier test can matter.
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", ".", "-p", "diffusers_suite", "-v"]
    command += ["-p", "no:randomly", "-p", "no:cacheprovider", *extra, *tests]
    done = subprocess.run(command, cwd=checkout, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True)
    print(f"=== {'patched' if patched else 'unpatched'}\n{done.stdout}", flush=True)
    found = re.findall(r"^(\S+::.*) (PASSED|FAILED|SKIPPED|ERROR)\b", done.stdout, re.MULTILINE)
    said = re.search(r"^group_offload: .*$", done.stdout, re.MULTILINE)
    if said is None:
        raise SystemExit("pytest did not come to its end: see above.")
    return dict(found), said[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder of a diffusers checkout, with its tests/")
    parser.add_argument("tests", nargs="*", default=DEFAULT_TESTS, help=f"default: {DEFAULT_TESTS[0]}")
    options, extra = parser.parse_known_args()  # the rest goes to pytest
    theirs, _ = run_suite(options.checkout, options.tests, extra, patched=False)
    ours, said = run_suite(options.checkout, options.tests, extra, patched=True)
    print("=== compared")
    for name, result in (("unpatched", theirs), ("patched", ours)):
        found = list(result.values())
        print(f"{name:<10} " + ", ".join(f"{found.count(kind)} {kind.lower()}" for kind in sorted({*found})))
    lost = [test for test, outcome in theirs.items() if outcome == "PASSED" and ours.get(test) != "PASSED"]
    for test in lost:
        print(f"passes unpatched, not patched: {test}")
    if lost or " 0 onloads" in said:
        raise SystemExit(f"{len(lost)} tests are lost. {said}")


if __name__ == "__main__":
    main()
