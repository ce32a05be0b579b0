"""Pinned memory, in frames of one size, that bytes of files pass through on their way to the device."""

from __future__ import annotations

from collections import deque

import torch

from ...base.device import Backend, Event, Stream
from ...base.layout import memory_of
from ...base.mapping import flat_view, map_anonymous
from ...base.pinning import PinnedPages

_LEAST_FRAMES = 2
"""One is copied from while the other is filled."""


class Staging:
    """Frames that are taken, filled and given back. `give_back_after` gives one back once a copy from it is done.

    The memory is allocated with the first frame. Used under its reader's lock.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.frame_bytes = 0
        self.num_frames = 0
        self.memory: torch.Tensor | None = None
        self.view = memoryview(b"")
        """The memory, as system calls take it."""
        self._free: list[int] = []
        """The bytes of `memory` that free frames begin at."""
        self._sent: deque[tuple[Event, int]] = deque()
        """Frames that copies read, in the order in which the copies end."""
        self._spare: list[Event] = []
        self._pinned: PinnedPages | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self.memory is None else self.memory.numel()

    @property
    def oldest_sent(self) -> Event | None:
        """The event to wait for if no frame is free; None if waiting would free none."""
        return self._sent[0][0] if self._sent else None

    def resize(self, num_frames: int, frame_bytes: int) -> None:
        """Change the number and the size of frames. No frame may be in use."""
        if (num_frames, frame_bytes) != (self.num_frames, self.frame_bytes):
            self.close()
            self.num_frames, self.frame_bytes = num_frames, frame_bytes

    @property
    def num_free(self) -> int:
        """The number of frames that can be taken now.

        The frame that was sent last is taken first: few frames stay in the processor's caches, where all would not fit.
        """
        if self.memory is None:
            return self.num_frames
        while self._sent and self._sent[0][0].query():
            event, start = self._sent.popleft()
            self._spare.append(event)
            self._free.append(start)
        return len(self._free)

    def take(self) -> int | None:
        """The byte of `memory` that a free frame begins at, which is taken now; None if no frame is free."""
        if self.memory is None:
            self._allocate()
        return self._free.pop() if self.num_free else None

    def give_back(self, start: int) -> None:
        """Free a frame that no copy and no thread uses."""
        self._free.append(start)

    def give_back_after(self, start: int, stream: Stream) -> None:
        """Free a frame once `stream` has come to this point."""
        event = self._spare.pop() if self._spare else self._backend.new_event()
        event.record(stream)
        self._sent.append((event, start))

    def reset_after_fork(self) -> None:
        """Take all frames for free, in a child process: none of the parent's threads reads there, and no copy ends."""
        self._sent.clear()
        if self.memory is not None:
            self._free = self._starts()

    def close(self) -> None:
        """Give the memory back. Copies that are on their way are waited for. Threads that use a frame keep the memory."""
        for sent, _ in self._sent:
            sent.synchronize()
        self._sent.clear()
        if self._pinned is not None:
            self._pinned.release()
        self._pinned, self.memory, self.view = None, None, memoryview(b"")
        self._free.clear()

    def _allocate(self) -> None:
        num_frames = self.num_frames
        while True:
            num_bytes = num_frames * self.frame_bytes
            memory = flat_view(map_anonymous(num_bytes), 0, num_bytes)
            self._pinned = PinnedPages.take(self._backend, memory, lambda: None)  # `close` has waited for copies
            if self._pinned is not None or num_frames <= _LEAST_FRAMES:
                break
            num_frames = max(_LEAST_FRAMES, num_frames // 2)  # few that are pinned are faster than many that are not
        self.memory, self.view = memory, memory_of(memory)
        self._free = self._starts()

    def _starts(self) -> list[int]:
        return [frame * self.frame_bytes for frame in reversed(range(self.num_bytes // self.frame_bytes))]
