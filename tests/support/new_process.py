"""Python in processes of its own, which may die: forked from one that has imported torch, which takes two seconds."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

_SERVER = """
import json, os, socket, sys
import torch, torch._dynamo, safetensors.torch
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
    """Of this process. It ends when this one does."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", _SERVER, str(its.fileno())]
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL
        )
    return ours, process


def run_code(code: str, arguments: Sequence[object] = (), timeout: float = 100) -> subprocess.CompletedProcess[str]:
    """Run code as `python -c` does, in the root of the repository, but that torch is there already."""
    (server, _), command = _server(), [sys.executable, "-c", code, *map(str, arguments)]
    request = json.dumps([textwrap.dedent(code), command[3:], {**os.environ, "OMP_NUM_THREADS": "1"}]).encode()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull) as nothing:
        socket.send_fds(server, [request], [nothing.fileno(), out.fileno(), err.fileno()])
        child = int(server.recv(100))
        server.settimeout(timeout)
        try:
            status = int(server.recv(100))
        except TimeoutError:
            os.kill(child, signal.SIGKILL)
            server.settimeout(None)
            server.recv(100)
            raise subprocess.TimeoutExpired(command, timeout) from None
        finally:
            server.settimeout(None)
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode())
    return subprocess.CompletedProcess(command, status, *said)
