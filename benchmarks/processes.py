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
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from limits import MemoryGroup

MIN_SECONDS = 15
"""Less time than this is not enough to start an arm."""

SAMPLE_SECONDS = 0.02

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


def tell_so_far(result: dict[str, Any]) -> None:
    """What is known already: it is not lost if this process is stopped."""
    _tell({"state": "so far", "result": result})


def tell_measured() -> None:
    """All that counts is done; checks follow. The most anonymous memory is that between `begin` and here."""
    _tell({"state": "measured"})


def anonymous_bytes(pid: int | str = "self") -> int:
    """Memory of a process that is in no file: RssAnon, and RssShmem, in which page-locked memory of torch is counted."""
    with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
        status = file.read(1 << 12)
    found = (status.partition(name)[2].split(maxsplit=1)[:1] for name in (b"RssAnon:", b"RssShmem:"))
    return sum(int(value[0]) << 10 for value in found if value)


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
    """A process that does one job: `script --child`, which calls `serve`."""

    def __init__(self, script: str, group: MemoryGroup | None = None) -> None:
        """
        Args:
            group: what limits its RAM, from its beginning.
        """
        self.group = group
        self.so_far: dict[str, Any] = {}
        arguments = [str(Path(script).resolve()), "--child"]
        self._process = subprocess.Popen(
            [sys.executable, *arguments] if group is None else group.command(arguments),
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
                if message["state"] == "so far":
                    self.so_far |= message["result"]
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


class Relay:
    """Runs jobs, each in a process that was started while the one before it made its weights."""

    def __init__(self, script: str, *, timeout: float, budget: float, group: MemoryGroup | None = None) -> None:
        """
        Args:
            group: what limits the RAM of the first process.
        """
        self._script, self._timeout, self._budget = script, timeout, budget
        self._started = time.monotonic()
        self._waiting: Child | None = Child(script, group)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def run(
        self,
        job: dict[str, Any],
        *,
        is_last: bool,
        next_group: MemoryGroup | None = None,
        before: Callable[[], object] | None = None,
    ) -> dict[str, Any]:
        """The result of `job`, or {"error": ...}. No process is started beside the last one.

        Args:
            next_group: what limits the RAM of the process after this one.
            before: called when nothing else runs any more, before anything is measured.
        """
        left = self._budget - self.elapsed
        if left < MIN_SECONDS:
            return {"error": f"not run: the {self._budget:.0f} s for all arms were over"}
        assert self._waiting is not None
        child, self._waiting = self._waiting, None if is_last else Child(self._script, next_group)
        result = child.run(job, min(self._timeout, left), self._waiting, before)
        child.end()
        return result

    def end(self) -> None:
        if self._waiting is not None:
            self._waiting.end()
