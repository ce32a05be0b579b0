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
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from . import report as reports
from .limits import MemoryGroup
from .machine import fix_algorithms, measure_machine

Work = Callable[[dict[str, Any], Callable[[], None]], dict[str, Any]]
"""What a child process does with a job; the function that it is given is to be called before anything is measured."""
MIN_SECONDS = 15
"""Less time than this is not enough to start an arm."""

SAMPLE_SECONDS = 0.02

QUIET = {"GROUP_OFFLOAD_PROGRESS_BAR": "0", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


def say(text: str, elapsed: float | None = None) -> None:
    # One write: several processes may say something at once.
    print(
        f"{f'[{elapsed:4.0f} s]' if elapsed is not None else '        '} {text}\n", end="", file=sys.stderr, flush=True
    )


@contextmanager
def said(what: str) -> Iterator[None]:
    """Say how long the block took."""
    start = time.perf_counter()
    yield
    say(f"{what}: {time.perf_counter() - start:.1f} s")


def limit_ram(num_bytes: int, stack: ExitStack, facts: dict[str, Any]) -> MemoryGroup | None:
    """What limits the RAM of processes, until `stack` ends. None if no limit can be set here: `facts` says why."""
    try:
        group = MemoryGroup(num_bytes)
    except OSError as error:
        facts["group_error"] = str(error)
        say(f"no limit of RAM: {error}")
        return None
    stack.callback(group.remove)
    return group


# ------------------------------------------------------------------------------------------------ the child


def do(work: Work, job: dict[str, Any], begin: Callable[[], None]) -> dict[str, Any]:
    """`work(job, begin)`, and facts about the machine if the job asks for them."""
    fix_algorithms()
    with torch.no_grad():
        result = work(job, begin)
    if job["measures_machine"]:
        gc.collect()
        result["machine"] = measure_machine(torch.device(job["device"]))
    return result


def serve(work: Work) -> None:
    """Wait for a job and answer with what it comes to, see `do`; `begin` is to be called before anything is measured.

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
        result = do(work, json.loads(line), begin)
    except Exception as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
    _tell({"state": "done", "result": result})
    os._exit(0)  # gigabytes are not worth being freed one tensor at a time


def tell_so_far(result: dict[str, Any]) -> None:
    """What is known already: it is not lost if this process is stopped."""
    _tell({"state": "so far", "result": result})


def tell_measured() -> None:
    """All that counts is done; checks follow. The most anonymous memory is that between `begin` and here."""
    _tell({"state": "measured"})


def tell(state: str, facts: Any) -> None:
    """Say that this process has come to a state that the parent waits for."""
    _tell({"state": state, "facts": facts})


def ask(question: Any) -> Any:
    """What the function `answer` of the parent's `Child` returns for it."""
    tell("asks", question)
    return json.loads(sys.stdin.readline())


def anonymous_bytes(pid: int | str = "self") -> int:
    """Memory of a process that is in no file: RssAnon, and RssShmem, in which page-locked memory of torch is counted."""
    with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
        status = file.read(1 << 12)
    found = (status.partition(name)[2].split(maxsplit=1)[:1] for name in (b"RssAnon:", b"RssShmem:"))
    return sum(int(value[0]) << 10 for value in found if value)


def share_of_anonymous_bytes() -> int:
    """The same for this process, where memory that N processes have mapped counts 1/N in each."""
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in rollup if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def _tell(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


# ------------------------------------------------------------------------------------------------ the parent


class Watch:
    """Looks at how much anonymous memory a process has, from outside: it takes none of the process's time."""

    def __init__(self, pid: int) -> None:
        self.peak: int | None = None
        self._pid = pid
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> int | None:
        self._is_over.set()
        self._thread.join()
        return self.peak

    def _look(self) -> None:
        with suppress(OSError):  # it has ended
            while not self._is_over.wait(SAMPLE_SECONDS):
                self.peak = max(self.peak or 0, anonymous_bytes(self._pid))


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
                    self.so_far |= message["result"]
                if message["state"] == "asks":
                    self.send(json.dumps(self.answer(message["facts"])))
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

    def watch(self) -> Watch:
        return Watch(self._process.pid)

    def run(
        self,
        job: dict[str, Any],
        limit: float,
        next_child: Child | None = None,
        before: Callable[[], object] | None = None,
    ) -> dict[str, Any]:
        """The result of `job`, or {"error": ...} and what was known; stopped after `limit` seconds.

        Args:
            before: called when nothing else runs any more, and measuring begins after it.
        """
        started = time.monotonic()
        timer = threading.Timer(limit, self._process.kill)
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
                watch = self.watch()
                self.send("go")
                try:
                    message = self.wait_for("measured")
                finally:
                    found["anonymous_peak_bytes"] = watch.stop()
                    if self.group is not None:
                        found |= self.group.usage()
                if message["state"] == "measured":
                    message = self.wait_for("done")
            result: dict[str, Any] = message["result"]
        except EOFError as error:
            text = f"stopped after {limit:.0f} s" if time.monotonic() - started >= limit else str(error)
            return {**self.so_far, **found, "error": text}
        finally:
            timer.cancel()
        return {**(self.so_far if "error" in result else {}), **found, **result}

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


class Relay:
    """Runs jobs, each in a process that was started while the one before it made its weights, and writes the report."""

    def __init__(
        self,
        report: dict[str, Any],
        options: argparse.Namespace,
        num_jobs: int,
        group: MemoryGroup | None = None,
        *,
        environments: Sequence[Mapping[str, str]] = (),
        answer: Callable[[Any], Any] | None = None,
    ) -> None:
        """
        Args:
            group: what limits the RAM of the first process.
            environments: the variables of each job's process beside those of this one.
            answer: what processes get that `ask`.
        """
        self.path: Path | None = None
        """The file with the report, once there is a result."""
        self._report, self._options = report, options
        self._num_jobs, self._number = num_jobs, 0
        self._environments, self._answer = environments, answer
        self._budget = Budget(options.budget)
        self._waiting: Child | None = self._start(group) if num_jobs else None

    def run(
        self,
        name: str,
        job: dict[str, Any],
        *,
        into: str = "arms",
        facts: Mapping[str, Any] | None = None,
        next_group: MemoryGroup | None = None,
        before: Callable[[], object] | None = None,
    ) -> dict[str, Any]:
        """The result of `job`, or {"error": ...}; it stands in `report[into][name]`. No process is started beside the last.

        Args:
            facts: what else the report says of this job.
            next_group: what limits the RAM of the process after this one.
            before: called when nothing else runs any more, before anything is measured.
        """
        self._number += 1
        say(f"{self._number}/{self._num_jobs} {name}", self._budget.elapsed)
        job = {**job, "device": self._options.device, "measures_machine": self._report["machine"] is None}
        result = self._budget.refusal(MIN_SECONDS)
        if result is None:
            assert self._waiting is not None
            child, is_last = self._waiting, self._number == self._num_jobs
            self._waiting = None if is_last else self._start(next_group)
            left = self._budget.seconds - self._budget.elapsed
            result = child.run(job, min(self._options.timeout, left), self._waiting, before)
            child.end()
            if child.group is not None:
                child.group.remove()
        self._report["machine"] = result.pop("machine", None) or self._report["machine"]
        self._report[into][name] = {**(facts or {}), **result}
        if "error" in result:
            say(result["error"])
        self.write()
        return result

    def _start(self, group: MemoryGroup | None) -> Child:
        """The process of the job after this one."""
        environment = self._environments[self._number] if self._environments else None
        child = Child(self._report["benchmark"], group, environment)
        if self._answer is not None:
            child.answer = self._answer
        return child

    def write(self) -> None:
        """Write the report. It is done after each job, so that an interrupted run keeps what it has."""
        if self._report["machine"] is not None:
            self.path = reports.write(self._report, self._options.output)

    def end(self) -> Path | None:
        """Returns the file with the report, if there is any result."""
        if self._waiting is not None:
            self._waiting.end()
        say("done", self._budget.elapsed)
        return self.path
