"""Each arm of a benchmark in a process of its own, one after another.

[Note: The next process]
Importing takes about as long as the measured steps of an arm. So the process of the next arm is started early, and
imports while the current one makes its weights. The current one starts to measure only once the next one is done with
that and waits for its turn: nothing else runs beside a measurement.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIN_SECONDS = 15
"""Less time than this is not enough to start an arm."""

QUIET = {"GROUP_OFFLOAD_PROGRESS_BAR": "0", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


def say(text: str, elapsed: float | None = None) -> None:
    print(f"{f'[{elapsed:4.0f} s]' if elapsed is not None else '        '} {text}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------ the child


def serve(work: Callable[[dict[str, Any], Callable[[], None]], dict[str, Any]]) -> None:
    """Wait for a job and answer with `work(job, begin)`; `begin` is to be called before anything is measured.

    Whatever takes long to import has been imported. See [Note: The next process].
    """
    _tell({"state": "imported"})
    line = sys.stdin.readline()
    if not line:
        return  # nobody needs this process

    def begin() -> None:
        _tell({"state": "made"})
        sys.stdin.readline()

    try:
        result = work(json.loads(line), begin)
    except Exception as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
    _tell({"state": "done", "result": result})
    os._exit(0)  # gigabytes are not worth being freed one tensor at a time


def _tell(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


# ------------------------------------------------------------------------------------------------ the parent


class Child:
    """A process that does one job: `script --child`, which calls `serve`."""

    def __init__(self, script: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(script).resolve()), "--child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**QUIET, **os.environ},
        )

    def wait_for(self, state: str) -> dict[str, Any]:
        """The message that it has come to `state` or to its end.

        Raises:
            EOFError: the process ended without one.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"state"'):
                message: dict[str, Any] = json.loads(line)
                if message["state"] in (state, "done"):
                    return message
        raise EOFError(f"the process ended with status {self._process.wait()} and no result")

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: `wait_for` says so

    def run(self, job: dict[str, Any], limit: float, next_child: Child | None = None) -> dict[str, Any]:
        """The result of `job`, or {"error": ...}; stopped after `limit` seconds."""
        started = time.monotonic()
        timer = threading.Timer(limit, self._process.kill)
        timer.start()
        try:
            self.send(json.dumps(job))
            message = self.wait_for("made")
            if message["state"] == "made":
                if next_child is not None:
                    next_child.wait_for("imported")
                self.send("go")
                message = self.wait_for("done")
            result: dict[str, Any] = message["result"]
            return result
        except EOFError as error:
            return {"error": f"stopped after {limit:.0f} s" if time.monotonic() - started >= limit else str(error)}
        finally:
            timer.cancel()

    def end(self) -> None:
        """Wait until it is gone, with its memory."""
        self._process.communicate()


class Relay:
    """Runs jobs, each in a process that was started while the one before it made its weights."""

    def __init__(self, script: str, *, timeout: float, budget: float) -> None:
        self._script, self._timeout, self._budget = script, timeout, budget
        self._started = time.monotonic()
        self._waiting: Child | None = Child(script)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def run(self, job: dict[str, Any], *, is_last: bool) -> dict[str, Any]:
        """The result of `job`, or {"error": ...}. No process is started beside the last one."""
        left = self._budget - self.elapsed
        if left < MIN_SECONDS:
            return {"error": f"not run: the {self._budget:.0f} s for all arms were over"}
        child = self._waiting or Child(self._script)
        self._waiting = None if is_last else Child(self._script)
        result = child.run(job, min(self._timeout, left), self._waiting)
        child.end()
        return result

    def end(self) -> None:
        if self._waiting is not None:
            self._waiting.end()
