"""Each arm of a benchmark in a process of its own, one after another.

[Note: The next process]
Importing takes about as long as the measured steps of an arm. So the process of the next arm is started early, and
imports while the current one makes its weights. The current one starts to measure only once the next one is done with
that and waits for its turn: nothing else runs beside a measurement.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import report as reports
from .limits import MemoryGroup, limit_ram
from .machine import anonymous_bytes, fix_algorithms, measure_machine, say

Work = Callable[[dict[str, Any], Callable[[], None]], dict[str, Any]]
"""What a child process does with a job; the function that it is given is to be called before anything is measured."""
MIN_SECONDS = 15
"""Less time than this is not enough to start an arm."""
SAMPLE_SECONDS = 0.02
QUIET = {"GROUP_OFFLOAD_PROGRESS_BAR": "0", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


# ------------------------------------------------------------------------------------------------ the child


def do(work: Work, job: dict[str, Any], begin: Callable[[], None]) -> dict[str, Any]:
    """`work(job, begin)`, and facts about the machine if the job asks for them."""
    fix_algorithms()
    with torch.no_grad():
        result = work(job, begin)
    if job.get("measures_machine"):
        gc.collect()
        result["machine"] = measure_machine(torch.device(job["device"]))
    return result


def serve(work: Work) -> None:
    """Wait for a job and answer with what it comes to, see `do`; `begin` is to be called before anything is measured.

    Whatever takes long to import has been imported. See [Note: The next process].
    """
    tell("imported")
    line = sys.stdin.readline()
    if not line:
        return  # nobody needs this process

    def begin() -> None:
        tell("made")
        sys.stdin.readline()

    try:
        result = do(work, json.loads(line), begin)
    except Exception as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
    tell("done", result)
    os._exit(0)  # gigabytes are not worth being freed one tensor at a time


def tell(state: str, facts: Any = None) -> None:
    """Say that this process has come to a state that the parent waits for."""
    print(json.dumps({"state": state, "facts": facts}), flush=True)


def tell_so_far(result: dict[str, Any]) -> None:
    """What is known already: it is not lost if this process is stopped."""
    tell("so far", result)


def tell_measured() -> None:
    """All that counts is done; checks follow. The most anonymous memory is that between `begin` and here."""
    tell("measured")


def ask(question: Any) -> Any:
    """What the function `answer` of the parent's `Child` returns for it."""
    tell("asks", question)
    return json.loads(sys.stdin.readline())


# ------------------------------------------------------------------------------------------------ the parent


class Child:
    """A process that does one job: `python -m benchmarks NAME --child`, which calls `serve`."""

    def __init__(
        self, name: str, group: MemoryGroup | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        """
        Args:
            group: what limits its RAM, from its beginning.
            environment: variables beside those of this process.
        """
        self.group = group
        self.answer: Callable[[Any], Any] = lambda question: None
        """What it gets for an `ask`."""
        self.so_far: dict[str, Any] = {}
        arguments = ["-m", "benchmarks", name, "--child"]
        self._process = subprocess.Popen(
            [sys.executable, *arguments] if group is None else group.command(arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**QUIET, **os.environ, **(environment or {})},
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
                if message["state"] == "so far":
                    self.so_far |= message["facts"]
                if message["state"] == "asks":
                    self.send(json.dumps(self.answer(message["facts"])))
                if message["state"] in (state, "done"):
                    return message
        raise EOFError(f"the process ended with status {self._process.wait()} and no result")

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: `wait_for` says so
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def run(
        self,
        job: Mapping[str, Any],
        limit: float,
        next_child: Child | None = None,
        before: Callable[[], object] | None = None,
    ) -> dict[str, Any]:
        """The result of `job`, or {"error": ...} and what was known; stopped after `limit` seconds.

        Args:
            before: called when nothing else runs any more, and measuring begins after it.
        """
        started = time.monotonic()
        timer = threading.Timer(limit, self.kill)
        timer.start()
        found: dict[str, Any] = {}
        try:
            self.send(json.dumps(job))
            message = self.wait_for("made")
            if message["state"] == "made":
                if next_child is not None:
                    with suppress(EOFError):  # it is told when its turn comes
                        next_child.wait_for("imported")
                if before is not None:
                    before()
                with self._watched(found):
                    self.send("go")
                    message = self.wait_for("measured")
                if message["state"] == "measured":
                    message = self.wait_for("done")
            result: dict[str, Any] = message["facts"]
        except EOFError as error:
            text = f"stopped after {limit:.0f} s" if time.monotonic() - started >= limit else str(error)
            return {**self.so_far, **found, "error": text}
        finally:
            timer.cancel()
        return {**(self.so_far if "error" in result else {}), **found, **result}

    @contextmanager
    def _watched(self, found: dict[str, Any]) -> Iterator[None]:
        """Look at its anonymous memory, from outside: that takes none of its time. `found` gets the peak."""
        is_over, peak = threading.Event(), [0]

        def look() -> None:
            with suppress(OSError):  # it has ended
                while not is_over.wait(SAMPLE_SECONDS):
                    peak[0] = max(peak[0], anonymous_bytes(self._process.pid))

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
            found["anonymous_peak_bytes"] = peak[0] or None
            if self.group is not None:
                found |= self.group.usage()

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        """Wait until it is gone, with its memory."""
        self._process.communicate()


class Budget:
    """The time that all arms share. An arm begins only if there is some left."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._started = time.monotonic()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def refusal(self, needed: float = 0) -> dict[str, Any] | None:
        """The result of an arm that cannot begin, because less time is left than it needs."""
        if self.seconds - self.elapsed >= max(needed, 1e-9):
            return None
        return {"error": f"not run: the {self.seconds:.0f} s for all arms were over"}


@dataclass(kw_only=True)
class Job:
    """What one process is to do."""

    name: str
    task: Mapping[str, Any]
    """What it is sent."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What else the report says of this job."""
    into: str = "arms"
    """The part of the report that has its result."""
    ram_limit_bytes: int | None = None
    """The process gets so much RAM, if that can be limited here; else `facts` says why not."""
    environment: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[], object] = lambda: None
    """Called before the process gets its task."""
    before: Callable[[], object] = lambda: None
    """Called when nothing else runs any more, before anything is measured."""


class Relay:
    """Runs jobs, each in a process that was started while the one before it made its weights, and writes the report."""

    def __init__(
        self,
        report: dict[str, Any],
        options: argparse.Namespace,
        jobs: Sequence[Job],
        answer: Callable[[Any], Any] | None = None,
    ) -> None:
        """
        Args:
            answer: what processes get that `ask`.
        """
        self.path: Path | None = None
        """The file with the report, once there is a result."""
        self._report, self._options, self._jobs, self._answer = report, options, list(jobs), answer
        self._budget = Budget(options.budget)

    def run(self) -> Path | None:
        """Run all jobs. Returns the file with the report, if there is any result."""
        for _ in self:
            pass
        return self.path

    def __iter__(self) -> Iterator[tuple[Job, dict[str, Any]]]:
        """Each job and its result, or {"error": ...}, once it stands in the report, which is written after each one."""
        waiting = self._start(self._jobs[0]) if self._jobs else None
        try:
            for number, job in enumerate(self._jobs, 1):
                assert waiting is not None
                say(f"{number}/{len(self._jobs)} {job.name}", self._budget.elapsed)
                result = self._budget.refusal(MIN_SECONDS)
                if result is None:
                    job.prepare()
                    child, waiting = waiting, None
                    if number < len(self._jobs):
                        waiting = self._start(self._jobs[number])
                    task = {"device": self._options.device, **job.task}
                    task["measures_machine"] = self._report["machine"] is None
                    left = self._budget.seconds - self._budget.elapsed
                    result = child.run(task, min(self._options.timeout, left), waiting, job.before)
                    child.end()
                    if child.group is not None:
                        child.group.remove()
                self._report["machine"] = result.pop("machine", None) or self._report["machine"]
                self._report[job.into][job.name] = result = {**job.facts, **result}
                if "error" in result:
                    say(result["error"])
                yield job, result
                if self._report["machine"] is not None:  # an interrupted run keeps what it has
                    self.path = reports.write(self._report, self._options.output)
        finally:
            if waiting is not None:
                waiting.end()
                if waiting.group is not None:
                    waiting.group.remove()
        say("done", self._budget.elapsed)

    def _start(self, job: Job) -> Child:
        group = None if job.ram_limit_bytes is None else limit_ram(job.ram_limit_bytes, job.facts)
        child = Child(self._report["benchmark"], group, job.environment)
        if self._answer is not None:
            child.answer = self._answer
        return child
