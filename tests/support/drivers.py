"""A driver that pins nothing, for tests without one."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch


class PinningDriver:
    """What of CUDA's runtime pins memory."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(torch.cuda, "cudart", lambda: self)
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())
        self.pinned: set[int] = set()
        self.errors: list[int] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.pinned.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        if address not in self.pinned:
            self.errors.append(address)  # it would wait for the next kernel launch
        self.pinned.discard(address)
        return 0
