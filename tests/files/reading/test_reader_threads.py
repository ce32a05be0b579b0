"""Exceptions in the middle of reads, and several threads that read."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from group_offload import apply_group_offloading

from ...support.on_device import from_file
from ...support.reading import Preadv, Rig, Slow, every_device
from ...support.travellers import in_threads


def test_an_interrupt_while_compute_waits_for_the_drive(tmp_path: Path, preadv: Preadv) -> None:
    """A real Ctrl-C, which comes in the main thread as it waits for a read that takes long."""
    import _thread

    with Rig("simulated", "checkpoint", tmp_path) as rig:
        slow = Slow(preadv)

        def interrupt() -> None:
            slow.waiting.wait(60)
            time.sleep(0.05)
            _thread.interrupt_main()
            time.sleep(0.2)
            slow.go.set()

        thread = threading.Thread(target=interrupt)
        # A shell lets what it runs in the background ignore Ctrl-C.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                rig.check(2)
            thread.join()
        finally:
            signal.signal(signal.SIGINT, before)
        preadv.arm(-1, -1)
        rig.check(3)


@every_device
@pytest.mark.parametrize("num_models", [1, 2])
def test_several_threads(num_models: int, where: str, tmp_path: Path) -> None:
    """Passes of threads that run one model take turns; two models share the threads that read, of which there are few."""
    with Rig(where, "checkpoint", tmp_path) as rig:
        other = from_file(rig.resident, tmp_path / "model.safetensors")
        handle = apply_group_offloading(other, "cpu", offload_device="disk")
        models = [rig.model, other] if num_models == 2 else [rig.model] * 3
        expected, lock = rig.expected(), threading.Lock()

        def task(model: Any) -> None:
            for _ in range(5):
                with torch.no_grad():
                    if rig.device is None:
                        output = model(rig.x)
                    else:
                        with lock if num_models == 1 else nullcontext(), rig.device.running():
                            output = rig.device.get(model(rig.device.put(rig.x)))
                assert torch.equal(output, expected)

        for model in models:
            model.alive = Nothing()
        in_threads([partial(task, model) for model in models])
        handle.remove()


class Nothing(list[torch.Tensor]):
    def append(self, value: torch.Tensor) -> None:
        pass
