"""Python in processes of its own, which may die: forked from one that has imported torch, which takes seconds."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


_SERVER = """
import json, os, socket, sys
import torch, torch._dynamo, safetensors.torch, psutil, pytest, tqdm, xxhash
import gc
gc.collect()
gc.freeze()
server = socket.socket(fileno=int(sys.argv[1]))
while True:
    request, files, _, _ = socket.recv_fds(server, 1 << 20, 3)
    if not request:
        os._exit(0)
    child = os.fork()
    if not child:
        break
    for file in files:
        os.close(file)
    server.send(str(child).encode())
    server.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
server.close()
for number, file in enumerate(files):
    os.dup2(file, number)
    os.close(file)
code, arguments, environment = json.loads(request)
os.environ.clear()
os.environ.update(environment)
sys.argv = ["-c", *arguments]
for name in ("json", "os", "socket", "server", "request", "files", "file", "number", "child", "arguments", "environment", "_"):
    globals().pop(name, None)
exec(compile(code, "<string>", "exec"))
"""


@cache
def _server() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """The server of this process, which ends with it, and the socket to it."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", _SERVER, str(its.fileno())]
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL
        )
    return ours, process


def run_code(code: str, arguments: Sequence[object] = (), timeout: float = 280) -> subprocess.CompletedProcess[str]:
    """Run code as `python -c` does, in the root of the repository, but that torch is there already."""
    (server, _), command = _server(), [sys.executable, "-c", code, *map(str, arguments)]
    request = json.dumps([textwrap.dedent(code), command[3:], {**os.environ, "OMP_NUM_THREADS": "1"}]).encode()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull) as nothing:
        socket.send_fds(server, [request], [nothing.fileno(), out.fileno(), err.fileno()])
        child = int(server.recv(100))
        server.settimeout(timeout)
        status = None
        try:
            status = int(server.recv(100))
        except TimeoutError:
            raise subprocess.TimeoutExpired(command, timeout) from None
        finally:  # also if somebody is tired of waiting
            server.settimeout(None)
            if status is None:
                os.kill(child, signal.SIGKILL)
                server.recv(100)
            said = []
            for file in (out, err):
                file.seek(0)
                said.append(file.read().decode())
            if status is None:
                print(*said)  # how far it came
    return subprocess.CompletedProcess(command, status, *said)


def run_python(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new process, which may die. It has the models, the asserts, the rigs and the public names."""
    prelude = "import copy, os, sys, pathlib, torch\nfrom torch import nn\n"
    for module in ("tests.support.asserts", "tests.support.models", "tests.support.rigs", "group_offload"):
        prelude += f"from {module} import *\n"
    return run_code(prelude + textwrap.dedent(code), args)


def in_new_process(function: Callable[..., None], *args: object, preexec_fn: Callable[[], None] | None = None) -> str:
    """Run a function in a new process, which may fork because it has no threads. Returns all that it printed."""
    code = f"import sys; from {function.__module__} import {function.__name__} as f; f(*sys.argv[1:])"
    if preexec_fn is None:
        done = run_code(code, args)
    else:
        command = [sys.executable, "-c", code, *map(str, args)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, preexec_fn=preexec_fn)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def fork(body: Callable[[], object]) -> int:
    """Run `body` in a child; returns its pid."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            body()
            status = 0
        finally:
            os._exit(status)
    return pid


def status_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def ram_peak_of(call: Callable[[], object]) -> int:
    """How far the RAM that belongs to no file rises while `call` runs."""

    def in_ram() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon", "RssShmem")))

    def watch() -> None:
        while not is_done.wait(0.001):
            seen.append(in_ram())

    seen, is_done = [in_ram()], threading.Event()
    thread = threading.Thread(target=watch)
    thread.start()
    kept = call()
    is_done.set()
    thread.join()
    peak = max(*seen, in_ram()) - seen[0]
    del kept
    return peak
