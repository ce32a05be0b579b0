"""Reads at the exit of the interpreter, in forked processes, and where no thread can be started."""

from __future__ import annotations

from pathlib import Path

import pytest

from ...support.processes import run_python

_IN_A_CHILD = """
from group_offload.base.tuning import tune
tune(pinned_share=0.0)
import group_offload.runtime.transfers.reader as reader, time, signal, threading
tune(chunk_bytes=8192)
import tests.support.reading as t
where, folder = sys.argv[1], pathlib.Path(sys.argv[2])
rig = t.Rig(where, "checkpoint", folder)
rig.__enter__()
rig.check(2)
real = os.preadv
def slow(fd, buffers, position):
    time.sleep(0.02)
    return real(fd, buffers, position)
"""


@pytest.mark.parametrize(
    ("where", "end"), [("cpu", "return"), ("simulated", "return"), ("simulated", "raise KeyboardInterrupt")]
)
def test_interpreter_exit_with_reads_in_flight(end: str, where: str, tmp_path: Path) -> None:
    """Hazard: the process hangs at exit, or Python ends a thread in the middle of C++."""
    ending = {"return": "pass"}.get(end, end)
    # Not a daemon: Python ends those inside of torch's C++, which ends the process.
    begin = (
        "rig.forward()" if where == "simulated" else "threading.Thread(target=rig.forward).start(); time.sleep(0.03)"
    )
    done = run_python(f"{_IN_A_CHILD}\nos.preadv = slow\n{begin}\n{ending}", where, tmp_path)
    assert done.returncode in ((0,) if "Keyboard" not in end else (1, 130, -2)), done.stderr[-2000:]
    assert done.stderr == "" or end != "return", done.stderr[-2000:]
    assert "Fatal" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr[-2000:]


_FORKED = """
import warnings; warnings.simplefilter("ignore")
os.preadv = slow
rig.forward()  # what the next pass needs first is being read
if which == "read":
    rig.settle()
    rig.device.synchronize()
child = os.fork()
os.preadv = real
if not child:
    try:
        if which != "removed":
            t.within(200, lambda: rig.check(3))
        t.within(200, rig.handle.remove)
        rig.check_at_rest()
    except BaseException:
        import traceback; traceback.print_exc()
        os._exit(4)
    os._exit(0)
status = os.waitpid(child, 0)[1]
rig.check(2)
sys.exit(0 if status == 0 else 5)
"""


@pytest.mark.parametrize("which", ["read", "being read", "removed"])
def test_what_was_read_ahead_before_a_fork(which: str, tmp_path: Path) -> None:
    """The child has other memory for what is read, and reads it again, or gives it up: nobody ends its parent's reads
    there. Hazard: the process hangs after a fork; a child sends what was read ahead before the fork, from memory that has
    other bytes now."""
    few_frames = _IN_A_CHILD.replace("chunk_bytes=8192", "chunk_bytes=8192, num_frames=4")
    done = run_python(f"{few_frames}\nwhich = {which!r}\n{_FORKED}", "simulated", tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
