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
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import report as reports
from .machine import QUIET, fix_algorithms, measure_machine, say

Work = Callable[[dict[str, Any], Callable[[], None]], dict[str, Any]]
"""What a child process does with a job; the function that it is given is to be called before anything is measured."""
MIN_SECONDS = 15
"""Less time than this is not enough to start an arm."""
GRACE_SECONDS = 5
"""How long other ranks have, once one of them has failed."""


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
    """Say that this process has come to a state that the parent waits for.

    "so far" has what is known already, which is not lost if this process is stopped.
    """
    print(json.dumps({"state": state, "facts": facts}), flush=True)


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
        self._so_far: dict[str, Any] = {}
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
                    self._so_far |= message["facts"]
                if message["state"] == "asks":
                    self.send(self.answer(message["facts"]))
                if message["state"] in (state, "done"):
                    return message
        raise EOFError(f"the process ended with status {self._process.wait()} and no result")

    def send(self, message: Any) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: `wait_for` says so
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def run(
        self,
        job: Mapping[str, Any],
        limit: float,
        next_child: Child | None = None,
        before: Callable[[], object] = lambda: None,
    ) -> dict[str, Any]:
        """The result of `job`, or {"error": ...} and what was known; stopped after `limit` seconds.

        Args:
            before: called when nothing else runs any more, and measuring begins after it.
        """
        started = time.monotonic()
        timer = threading.Timer(limit, self.kill)
        timer.start()
        try:
            self.send(job)
            message = self.wait_for("made")
            if message["state"] == "made":
                if next_child is not None:
                    with suppress(EOFError):  # it is told when its turn comes
                        next_child.wait_for("imported")
                before()
                self.send("go")
                message = self.wait_for("done")
            result: dict[str, Any] = message["facts"]
        except EOFError as error:
            text = f"stopped after {limit:.0f} s" if time.monotonic() - started >= limit else str(error)
            result = {"error": text}
        finally:
            timer.cancel()
        usage = {} if self.group is None else self.group.usage()
        return {**(self._so_far if "error" in result else {}), **usage, **result}

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        """Wait until it is gone, with its memory and what limits it."""
        self._process.communicate()
        if self.group is not None:
            self.group.remove()


class Team:
    """Several processes that do one job together, each with its rank. Once one of them fails, all end."""

    def __init__(self, ranks: Sequence[Child]) -> None:
        self._ranks = ranks

    def wait_for(self, state: str) -> None:
        for each in self._ranks:
            each.wait_for(state)

    def run(self, job: Mapping[str, Any], limit: float, *rest: Any) -> dict[str, Any]:
        """The "arms" of the job, each with the "ranks" that measured it, or with an "error"."""
        with ThreadPoolExecutor(len(self._ranks)) as pool:
            # The first one begins when nothing else runs, and measures the machine at the end: the others meet it.
            first, *others = self._ranks
            begun = [pool.submit(first.run, {**job, "rank": 0}, limit, *rest)]
            job = {**job, "measures_machine": False}
            begun += [pool.submit(each.run, {**job, "rank": rank}, limit) for rank, each in enumerate(others, 1)]
            open_: set[Any] = set(begun)
            while open_:
                done, open_ = wait(open_, return_when=FIRST_COMPLETED)
                if open_ and any("error" in each.result() for each in done):
                    wait(open_, GRACE_SECONDS)  # for what the others say, who would wait for the one that failed
                    for rank in self._ranks:
                        rank.kill()
            results = [each.result() for each in begun]
        errors = dict.fromkeys(result["error"] for result in results if "error" in result)
        arms = {}
        for name, facts in job["arms"].items():
            ranks = [result["arms"][name] for result in results if name in result.get("arms", ())]
            is_whole = len(ranks) == facts["num_measured"]
            arms[name] = {**facts, **({"ranks": ranks} if is_whole else {"error": "; ".join(errors)})}
        kept = {key: value for key, value in results[0].items() if key == "machine" or key.startswith("group")}
        return {**kept, "arms": arms}

    def end(self) -> None:
        for each in self._ranks:
            each.kill()
        for each in self._ranks:
            each.end()


# ------------------------------------------------------------------------------------------------ their RAM


_ENTER = (
    "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
)


class MemoryGroup:
    """A control group (version 2) below the root, which alone may have both processes and groups with limits in it."""

    def __init__(self, limit_bytes: int) -> None:
        """
        Raises:
            OSError: none can be made here.
        """
        self.limit_bytes = limit_bytes
        root = Path("/sys/fs/cgroup")
        if "memory" not in (root / "cgroup.controllers").read_text().split():
            raise OSError(f"{root} has no controller of memory")
        enabled = root / "cgroup.subtree_control"
        if "memory" not in enabled.read_text().split():
            enabled.write_text("+memory")
        self.folder = Path(tempfile.mkdtemp(prefix="group-offload-", dir=root))
        try:
            (self.folder / "memory.max").write_text(str(self.limit_bytes))
            with suppress(OSError):  # most machines have no swap
                (self.folder / "memory.swap.max").write_text("0")
            done = subprocess.run(self.command(["-S", "-c", ""]), capture_output=True, text=True, timeout=20)
            if done.returncode:
                raise OSError(f"no process gets in: {done.stderr.strip().splitlines()[-1:]}")
        except BaseException:
            self.remove()
            raise

    def command(self, arguments: Sequence[str]) -> list[str]:
        """What runs Python with these arguments, in the group from its beginning."""
        return [sys.executable, "-S", "-c", _ENTER, str(self.folder / "cgroup.procs"), *arguments]

    def usage(self) -> dict[str, Any]:
        """What it allows, the most that was charged to it, and processes that were killed. None: this kernel does not tell."""
        return {
            "group_limit_bytes": self.limit_bytes,
            "group_peak_bytes": self._numbers("memory.peak").get(""),
            "group_oom_kills": self._numbers("memory.events").get("oom_kill"),
        }

    def remove(self) -> None:
        """Its process has ended: a few moments later the group can go."""
        for _ in range(50):
            try:
                self.folder.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.1)
            else:
                return

    def _numbers(self, name: str) -> dict[str, int]:
        """The numbers in a file, by the word before each; {} if there is no such file."""
        try:
            lines = (self.folder / name).read_text().splitlines()
        except OSError:
            return {}
        return {key: int(value) for key, _, value in (line.rpartition(" ") for line in lines) if value.isdecimal()}


# ------------------------------------------------------------------------------------------------ one after another


@dataclass(kw_only=True)
class Job:
    """What one process is to do."""

    name: str
    task: dict[str, Any]
    """What it is sent."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What else the report says of this job."""
    num_ranks: int = 0
    """So many processes do it together, see `Team`."""
    ram_limit_bytes: int | None = None
    """They get so much RAM, if that can be limited here; else `facts` says why not."""
    environment: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[], object] = lambda: None
    """Called before the process gets its task."""
    before: Callable[[], object] = lambda: None
    """Called when nothing else runs any more, before anything is measured."""
    answer: Callable[[Any], Any] = lambda question: None
    """What the process gets when it `ask`s."""


@dataclass
class Relay:
    """Runs jobs, each in a process that was started while the one before it made its weights, and writes the report."""

    report: dict[str, Any]
    options: argparse.Namespace
    jobs: Sequence[Job]
    path: Path | None = None
    """The file with the report, once there is a result."""

    def run(self, judge: Callable[[dict[str, Any]], object] = lambda report: None) -> Path | None:
        """Run all jobs, and let `judge` compare after each. Returns the file with the report, if there is any result."""
        for _ in self:
            judge(self.report)
        return self.path

    def __iter__(self) -> Iterator[tuple[Job, dict[str, Any]]]:
        """Each job and its result, or {"error": ...}, once it stands in the report, which is written after each one.

        A result may have several "arms". The rest of it then stands among the report's "kinds", by the job's name.
        """
        started, waiting = time.monotonic(), self._start(self.jobs[0]) if self.jobs else None
        try:
            for number, job in enumerate(self.jobs, 1):
                assert waiting is not None
                elapsed = time.monotonic() - started
                say(f"{number}/{len(self.jobs)} {job.name}", elapsed)
                result = {"error": f"not run: the {self.options.budget:.0f} s for all arms were over"}
                if self.options.budget - elapsed >= MIN_SECONDS:
                    job.prepare()
                    child, waiting = waiting, None
                    if number < len(self.jobs):
                        waiting = self._start(self.jobs[number])
                    measures_machine = self.report["machine"] is None
                    task = {"device": self.options.device, "measures_machine": measures_machine, **job.task}
                    limit = min(self.options.timeout, self.options.budget - elapsed)
                    result = child.run(task, limit, waiting, job.before)
                    child.end()
                self.report["machine"] = result.pop("machine", None) or self.report["machine"]
                arms = result.pop("arms", None)
                result = {**job.facts, **result}
                if arms is None:
                    self.report["arms"][job.name] = result
                else:
                    self.report["arms"] |= arms
                    self.report.setdefault("kinds", {})[job.name] = result
                if "error" in result:
                    say(result["error"])
                yield job, result
                if self.report["machine"] is not None:  # an interrupted run keeps what it has
                    self.path = reports.write(self.report, self.options.output)
        finally:
            if waiting is not None:
                waiting.end()
        say("done", time.monotonic() - started)

    def _start(self, job: Job) -> Any:
        group = None
        if job.ram_limit_bytes is not None:
            try:
                group = MemoryGroup(job.ram_limit_bytes)
            except OSError as error:
                job.facts["group_error"] = str(error)
                say(f"no limit of RAM: {error}")
        children = [Child(self.report["benchmark"], group, job.environment) for _ in range(job.num_ranks or 1)]
        if job.num_ranks:
            return Team(children)
        children[0].answer = job.answer
        return children[0]
