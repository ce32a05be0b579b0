"""A driver that page-locks nothing, for tests without one."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch


class LockingDriver:
    """What of CUDA's runtime page-locks memory."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(torch.cuda, "cudart", lambda: self)
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())
        self.locked: set[int] = set()
        self.errors: list[int] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.locked.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        if address not in self.locked:
            self.errors.append(address)  # it would wait for the next kernel launch
        self.locked.discard(address)
        return 0
