"""The frames that bytes pass through on their way to the device: which of the free ones is taken."""

from __future__ import annotations

import torch

from group_offload.base.device import backend_for
from group_offload.runtime.copies.staging import Staging


def test_the_frame_that_was_sent_last_is_taken_first() -> None:
    backend = backend_for(torch.device("cpu"))
    staging = Staging(backend)
    staging.resize(4, 4096)
    first = staging.take()
    assert first is not None
    staging.give_back_after(first, backend.current_stream())
    assert staging.num_free == staging.num_bytes // 4096
    assert staging.take() == first  # it may still be in the processor's caches, and the others never were
    staging.close()
