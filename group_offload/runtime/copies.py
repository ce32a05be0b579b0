"""Whether all copies are done that read some host memory."""

from __future__ import annotations

from ..device import Backend, Event, Stream

_MAX_KNOWN = 4
"""Streams whose last copies are remembered without asking whether they are done."""


class LastCopies:
    """The last copy on each stream that has carried any: where there is no copy stream, those that compute."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._by_stream: list[tuple[Stream, Event]] = []

    def record(self, stream: Stream) -> None:
        """What was enqueued on `stream` so far was the last."""
        for known, event in self._by_stream:
            if known == stream:
                event.record(stream)
                return
        if len(self._by_stream) >= _MAX_KNOWN:
            self._by_stream = [each for each in self._by_stream if not each[1].query()]
        event = self._backend.new_event()
        event.record(stream)
        self._by_stream = [*self._by_stream, (stream, event)]

    def synchronize(self) -> None:
        """Wait for all of them."""
        for _, event in self._by_stream:
            event.synchronize()
