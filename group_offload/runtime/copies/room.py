"""The order of the streams that write to slots."""

from __future__ import annotations

from collections.abc import Iterable

from ...base.device import Backend, Event, Stream


class Room:
    """Lets what one stream has waited for, before it wrote to a slot, count for the others too.

    A slot may take a part of the place of a larger one, and a later slot the rest. Only the first of the two waits for the last
    use of what was there. Where blobs are unpacked, the second one may be filled on another stream.
    """

    def __init__(self, backend: Backend) -> None:
        self._waited = backend.new_event()
        self._stream: Stream | None = None

    def enter(self, stream: Stream, after: Iterable[Event]) -> None:
        """Let what is enqueued on `stream` from now on come after `after`, and after all that was waited for here before."""
        if self._stream is not None and self._stream != stream:
            stream.wait_event(self._waited)
        for event in after:
            stream.wait_event(event)
        self._waited.record(stream)
        self._stream = stream
