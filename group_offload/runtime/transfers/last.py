"""Waiting for all copies that read some host memory."""

from __future__ import annotations

from ...base.device import Backend, Event, Stream

_MAX_KNOWN = 4
"""How many streams are remembered before those are forgotten whose copies are done."""


class LastCopies:
    """The last copy on each stream that has carried any. Where there is no copy stream, these are the streams that compute."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._by_stream: dict[Stream, Event] = {}

    def expect(self, stream: Stream) -> None:
        """Copies, or reads of slots, are about to be enqueued on `stream`.

        `synchronize_streams` waits for them from now on, whether they are recorded or not.
        """
        if stream not in self._by_stream:
            kept = self._by_stream
            if len(kept) >= _MAX_KNOWN:
                kept = {known: event for known, event in kept.items() if not event.query()}
            self._by_stream = {**kept, stream: self._backend.new_event()}

    def record(self, stream: Stream) -> None:
        """The last copy on `stream` was enqueued."""
        self.expect(stream)
        self._by_stream[stream].record(stream)

    def synchronize_streams(self) -> None:
        """Wait for all work that was enqueued so far on the streams that copies, or reads of slots, were expected on."""
        for stream, event in self._by_stream.items():
            event.record(stream)
            event.synchronize()

    def synchronize(self) -> None:
        """Wait for the recorded copies."""
        for event in self._by_stream.values():
            event.synchronize()
