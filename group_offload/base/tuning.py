"""Sizes and times that the package was tuned with. Tests change them; a user has no need to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Tuning:
    # RAM and files
    segment_bytes: int = 256 << 20
    """The size of a segment that blobs are put into. A larger blob has a segment alone. A segment is pinned while
    the next one is filled."""
    pinned_share: float = 0.5
    """Share of the available RAM that may be pinned when no ram_budget is given."""
    relief_seconds: float = 1.0
    """The time between two steps in which pinned files are given up because RAM runs short."""
    min_mapped_piece_bytes: int = 32 << 20
    """The least size of the pieces that memory is filled in when it is mapped twice."""
    touched_bytes: int = 32 << 20
    """What one thread gives pages to before memory is pinned."""
    table_bytes: int = 64 << 20
    """The least size of an embedding table whose rows are gathered where it is stored. The host waits for the indices in
    each call, which takes as long as a smaller table takes on the link."""
    slow_scan_seconds: float = 1e-3
    """A look into the page map takes longer than this only if the mapped bytes were read: the kernel looks at the pages that
    are present."""

    min_compressed_bytes: int = 1 << 20
    """The least size of a blob that is compressed: a smaller one saves less time on the link than two launches take."""
    strip_bytes: int = 63 << 20
    """The size of a strip of an image that is compressed, at most. What does not compress takes a little more than its own
    bytes, and may take 64 MiB. A smaller strip takes less memory of the device, and more launches."""

    # Copies and reads
    max_run_bytes: int = 8 << 20
    """Groups that follow one another are sent together up to this size: small groups cost the host more than the link."""
    max_joined_bytes: int = 44 << 20
    """Layers of a block that follow one another are one group up to this size, at leaf level."""
    max_read_run_bytes: int = 64 << 20
    """The same where threads read the bytes of groups: the host waits for each run then."""
    chunk_bytes: int = 16 << 20
    """The size of a chunk of a file: large enough for Python's share of the time to be small, small enough for all threads
    to be busy with one group."""
    leaf_chunk_bytes: int = 32 << 20
    """The size of a chunk of RAM that is not pinned, at leaf level, where many groups take Python's time besides."""
    small_chunk_bytes: int = 6 << 20
    """The size of a chunk where RAM is scarce. The disk takes so long then that Python's share does not matter."""
    num_frames: int = 18
    """Chunks in RAM: two more than threads, so that all threads can read while some chunks are copied from."""
    num_leaf_frames: int = 15
    """The number of these chunks. Together they fit into 512 MiB of pinned memory."""

    # Device memory
    min_window_bytes: int = 44 << 20
    """Smallest window just in time, however small the groups are; an eighth of all weights if that is less. In a smaller
    one the device waits for the host."""
    resident_bytes: int = 8 << 20
    """The size below which groups that are needed around others all stay: turns would save too little."""
    largest_rest_bytes: int = 256 << 20
    """The size above which a part of a model that is no block is cut into its own: else it stays for a whole forward."""
    device_margin_bytes: int = 128 << 20
    """The reserve: device memory that a budget leaves free, for allocations outside of all calls and for what the allocator
    loses. In an expandable segment that is up to two pages of 20 MiB at each end of free memory."""
    give_way_bytes: int = 64 << 20
    """What is evicted at once, at least, where a call was refused memory: each refusal waits for the device."""
    ram_margin_bytes: int = 64 << 20
    """The part of a RAM budget that Python and torch will still take."""

    # Activations
    activation_segment_bytes: int = 256 << 20
    """The least size of a segment. Later ones are a quarter of all before, if that is more."""
    activation_batch_bytes: int = 32 << 20
    """Small activations are copied in batches of this size."""

    # Several GPUs
    min_shared_bytes: int = 2 << 20
    """The least size of a group that is shared: agreeing on a smaller one takes longer than sending it."""
    share_trial_bytes: int = 256 << 20
    """What is sent and gathered to find out whether sharing pays."""

    # Patience
    shard_timeout_seconds: float = 0.02
    """How long a pass waits for other ranks in all, beside what sharing saves: they are a little apart."""
    share_setup_seconds: float = 300.0
    """How long a set-up waits for the other ranks. They may load the model at different speeds."""
    shard_read_timeout_seconds: float = 60.0
    """How long the parts of a group may be on their way from all ranks, of which each has begun, before sharing ends."""
    pin_timeout_seconds: float = 30.0
    """The time that a driver may take to pin a file that is in the page cache. It takes a second for 8 GiB."""
    turn_timeout_seconds: float = 30.0
    """The time to wait for a forward that is itself waiting for a thread before a deadlock is reported."""
    interleave_wait_seconds: float = 0.1
    """How long forwards that share passes wait for those that took part last time. A pass of a large model takes longer."""
    participant_timeout_seconds: float = 10.0
    """How long forwards that share passes let others go first that came before them, or may take part."""
    backward_timeout_seconds: float = 3600.0
    """The time that a pass waits for a pass of another thread. Two passes that wait for each other would never end."""
    setup_timeout_seconds: float = 600.0
    """How long a set-up waits for the lock on the folder. Writing a large model takes minutes."""
    seconds_until_said: float = 1.0
    """After this time of waiting for a lock the log says so."""

    # The command `doctor`
    tried_file_bytes: int = 64 << 20
    """The size of the file that is written, pinned and read. A smaller one takes too little time to tell a speed."""
    tried_pin_bytes: int = 8 << 30
    """The RAM that is pinned to see where the system refuses, at most: also at most a quarter of what is available."""
    tried_pin_seconds: float = 3.0
    """The time after which no more of it is pinned."""

    def ring(self, *, is_scarce: bool, is_of_leaves: bool) -> tuple[int, int]:
        """The size of a chunk, and the number of chunks that are in staging memory at once.

        Args:
            is_scarce: Whether RAM is scarce.
            is_of_leaves: Whether groups of leaf level are read, from RAM alone.
        """
        if is_scarce:
            return min(self.chunk_bytes, self.small_chunk_bytes), self.num_frames
        return (self.leaf_chunk_bytes, self.num_leaf_frames) if is_of_leaves else (self.chunk_bytes, self.num_frames)

    @property
    def reading_bytes(self) -> int:
        """The RAM that reading files takes besides weights, at most, where RAM is scarce."""
        return self.num_frames * self.small_chunk_bytes


_now = Tuning()


def tuning() -> Tuning:
    """The values in force."""
    return _now


def tune(**changes: Any) -> None:
    """Change values for the whole process, before anything is offloaded."""
    global _now
    _now = replace(_now, **changes)
