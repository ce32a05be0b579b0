"""A headless Chromium, told what to do through the pipe of its DevTools: nothing but the browser has to be installed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
COMMAND = next((found for name in NAMES if (found := shutil.which(name))), None)
"""None if there is no such browser, or no bash to start it with."""
if shutil.which("bash") is None:
    COMMAND = None


class Browser:
    """One page. Commands and events are those of the DevTools protocol."""

    def __init__(self, requests: int, answers: int) -> None:
        self._requests = os.fdopen(requests, "wb", buffering=0)
        self._answers = os.fdopen(answers, "rb")
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []

    def send(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._requests.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        data = bytearray()
        while (letter := self._answers.read(1)) != b"\0":
            assert letter, "the browser has ended"
            data += letter
        found: dict[str, Any] = json.loads(data)
        return found

    def attach(self) -> None:
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the window, and which colours the user prefers."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def open(self, path: Path) -> None:
        """Open a file, and return once its scripts have run."""
        self.send("Page.navigate", url=path.resolve().as_uri())
        while self.ask("document.readyState") != "complete":
            pass

    def ask(self, expression: str) -> Any:
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def screenshot(self, path: Path) -> None:
        """The whole page, as a PNG."""
        found = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        self._session = None
        self.send("Browser.close")
        self._requests.close()
        self._answers.close()


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile in this folder."""
    assert COMMAND is not None
    ends = [*os.pipe(), *os.pipe()]
    to_read, requests, answers, to_write = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    arguments += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
    start = ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{to_write}', "bash", COMMAND]
    process = subprocess.Popen(
        [*start, *arguments],
        pass_fds=(to_read, to_write),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(to_write)
    found = Browser(requests, answers)
    try:
        try:
            found.attach()
        except (AssertionError, OSError):
            pytest.skip(f"{COMMAND} is there and does not start")
        yield found
        found.close()
        process.wait(10)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
