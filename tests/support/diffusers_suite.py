"""diffusers' own test-suite, on diffusers' engine and on this one.

    python tests/support/diffusers_suite.py CHECKOUT        both, one after the other, test by test; CHECKOUT/tests is read only

As a pytest plugin (`PYTHONPATH=tests:. pytest -p diffusers_suite ...`) it calls `patch_diffusers()` before anything of
the suite is imported, if GROUP_OFFLOAD_PATCH=1, and says at the end how much the engine was used: a run in which it was
never called cannot pass for a success. The suite always tests the installed diffusers, not CHECKOUT/src.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
DEFAULT_TESTS = ["tests/hooks/test_group_offloading.py"]


# ------------------------------------------------------------------------------------------------ the plugin


class Usage:
    """Counts what the engine does, and notes how each test ended."""

    def __init__(self) -> None:
        self.num_modules = 0
        self.outcomes: dict[str, str] = {}
        # Of every engine. The suite measures memory, so neither handles nor modules may be kept alive here.
        self._counters: list[Any] = []

    def applied(self, handle: Any) -> None:
        self.num_modules += 1
        self._counters.append(handle._engine.counters)

    @property
    def num_onloads(self) -> int:
        return sum(counters.onloads for counters in self._counters)

    @property
    def num_passes(self) -> int:
        return sum(counters.passes for counters in self._counters)

    def pytest_runtest_logreport(self, report: Any) -> None:
        is_telling = report.when == "call" or report.outcome != "passed"
        if is_telling and self.outcomes.get(report.nodeid) != "failed":
            self.outcomes[report.nodeid] = report.outcome

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        import diffusers
        import torch

        engine = "patched" if _is_asked_for() else "not patched"
        terminalreporter.write_line(
            f"group_offload: {self.num_modules} modules offloaded, {self.num_onloads} onloads in {self.num_passes} "
            f"forwards (diffusers {diffusers.__version__}, {engine}; torch {torch.__version__})"
        )
        path = os.environ.get("GROUP_OFFLOAD_REPORT")
        if path:
            Path(path).write_text(json.dumps({"outcomes": self.outcomes, "num_onloads": self.num_onloads}))


def _is_asked_for() -> bool:
    return os.environ.get("GROUP_OFFLOAD_PATCH") == "1"


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(_usage, "group_offload_usage")


def _start() -> Usage:
    """Runs when pytest loads the plugin, which is before it imports any test or conftest."""
    import diffusers  # noqa: F401  before a conftest can put another one on the path

    usage = Usage()
    if _is_asked_for():
        import group_offload
        from group_offload.handle import Listener, add_listener

        class Counting(Listener):
            def applied(self, handle: Any) -> None:
                usage.applied(handle)

        group_offload.patch_diffusers()
        add_listener(Counting())
    return usage


# ------------------------------------------------------------------------------------------------ both runs


def run_suite(checkout: Path, tests: list[str], extra: list[str], *, patched: bool) -> dict[str, Any]:
    """One run in a process of its own: how each test ended, and how many onloads there were."""
    print(f"=== {'patched' if patched else 'unpatched'}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        places = [str(ROOT / "tests"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(places),
            "GROUP_OFFLOAD_PATCH": "1" if patched else "0",
            "GROUP_OFFLOAD_REPORT": str(report),
        }
        # No configuration but the suite's own, and its order: it measures memory, so an earlier test can matter.
        command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", ".", "-p", "diffusers_suite"]
        command += ["-p", "no:randomly", "-p", "no:cacheprovider", "-q", *extra, *tests]
        subprocess.run(command, cwd=checkout, env=environment, check=False)
        if not report.exists():
            raise SystemExit("pytest did not come to its end: see above.")
        result: dict[str, Any] = json.loads(report.read_text())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder of a diffusers checkout, with its tests/")
    parser.add_argument("tests", nargs="*", default=DEFAULT_TESTS, help=f"default: {DEFAULT_TESTS[0]}")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write both runs' outcomes")
    options, extra = parser.parse_known_args()  # the rest goes to pytest
    theirs = run_suite(options.checkout, options.tests, extra, patched=False)
    ours = run_suite(options.checkout, options.tests, extra, patched=True)
    if options.output:
        options.output.write_text(json.dumps({"unpatched": theirs, "patched": ours}, indent=1) + "\n")
    print("=== compared")
    for name, result in (("unpatched", theirs), ("patched", ours)):
        found = list(result["outcomes"].values())
        counts = ", ".join(f"{found.count(kind)} {kind}" for kind in ("passed", "failed", "skipped"))
        print(f"{name:<10} {counts}; {result['num_onloads']} onloads by this engine")
    lost = [
        test
        for test, outcome in theirs["outcomes"].items()
        if outcome == "passed" and ours["outcomes"].get(test) != "passed"
    ]
    for test in lost:
        print(f"passes unpatched, not patched: {test}")
    if lost:
        raise SystemExit(1)
    if not ours["num_onloads"]:
        raise SystemExit("Nothing was compared: the engine was never called. Most of the suite needs an accelerator.")


if __name__ == "__main__":
    main()
else:
    _usage = _start()
