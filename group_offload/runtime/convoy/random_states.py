"""Whether a forward draws random numbers."""

from __future__ import annotations

import pickle
import random
import sys
import threading
from typing import Any

import torch


class RandomStates:
    """The states of the generators that are used where none is given: Python's, torch's, NumPy's, and the device's."""

    def __init__(self, device: torch.device) -> None:
        numpy = sys.modules.get("numpy")
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._device = device
        self._host: Any = random.getstate(), None if numpy is None else numpy.random.get_state(legacy=False)
        self._torch = [torch.get_rng_state()]
        if self._module is not None:
            self._torch.append(self._module.get_rng_state(device))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RandomStates):
            return NotImplemented
        return all(map(torch.equal, self._torch, other._torch)) and pickle.dumps(self._host) == pickle.dumps(
            other._host
        )

    __hash__ = None  # type: ignore[assignment]

    def restore(self) -> None:
        """Let the generators go on from here again."""
        random.setstate(self._host[0])
        torch.set_rng_state(self._torch[0])
        if self._module is not None:
            self._module.set_rng_state(self._torch[1], self._device)
        if self._host[1] is not None:
            sys.modules["numpy"].random.set_state(self._host[1])


def others_may_draw() -> bool:
    """Whether there are threads, besides this one and those that are known, which may draw random numbers meanwhile."""
    here = threading.current_thread()
    others = [each for each in threading.enumerate() if each is not here and not each.name.startswith("group_offload")]
    return any(type(each).__name__ != "TMonitor" for each in others)  # that of tqdm draws none
