"""How fast a pass can be at best, by the budgets alone: a bound that tells whether a search is worth it."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest

from .pass_model import PassModel
from .placement import Placement, smallest_ram_bytes


def lower_bound(model: PassModel) -> float:
    """Seconds that no placement within the budgets is faster than.

    The budgets are filled to the last byte with parts of groups, those that are sent most often first. Compute, the link and
    the drive are each taken to be busy without a pause. The fastest placement may be far above this bound, for three reasons:

    - Groups rest on a tier as a whole. Of 9 equal groups, with room for 3.4 on the device and 0.9 in RAM, this bound reads
      4.7 and every placement at least 6: 28% more.
    - Compute of uneven groups does not cover all copies. In SD 1.5's UNet, 8 groups, a large group with little compute waits
      for the link: 26 to 43% over the bound where 14 to 16% or nothing is due to whole groups.
    - Copies are in order, and the drive is ahead of them by the staging memory at most. Of 60 equal groups (Qwen-Image) two
      are read, which takes 0.618 s. Between the two the link sends 15 groups from RAM, 0.184 s, and the drive stands still
      once it has read 256 MiB, 0.122 s at 2.2 GB/s. So the pass takes 0.742 s: 20% more.
    """
    room = model.device_budget - _least_slot_bytes(model) if model.has_residents else 0
    most = model.device_budget if model.has_residents else sum(nlargest(model.problem.num_slots, model.sizes))
    used = sum(model.sizes[index] for index in model.used)
    if used <= most:  # then all of them may fit on the device together, resident or in slots
        room = used
    sent = _least_sent(model, model.used, room, model.sent)
    in_file, file_room = [index for index in model.used if model.rests[index] is Placement.FILE], room
    ram = model.problem.budgets.ram_bytes
    if model.problem.rests is None and ram is not None:
        in_file = [index for index in model.used if model.groups[index].is_in_file]
        file_room += ram - smallest_ram_bytes(model.problem)
    read = _least_sent(model, in_file, file_room, model.read)
    return max(model.compute_seconds, sent / model.problem.speeds.h2d, read / model.problem.speeds.drive)


def _least_slot_bytes(model: PassModel) -> int:
    """The slots are no smaller than this if not all groups are resident.

    If the smallest group that the slots are made for has s bytes, all larger ones are resident or in the slots, so on the
    device. Hence s is no smaller than the last group that still fits there, taking groups by size.
    """
    smallest, total = 0, 0
    for size in sorted(model.sizes, reverse=True):
        total += size
        if total > model.device_budget:
            break
        smallest = size
    return smallest * min(model.problem.num_slots, len(model.sizes))


def _least_sent(model: PassModel, indices: Sequence[int], room: float, sizes: Sequence[int]) -> float:
    """The bytes of groups that are moved if those with most bytes for their room stay where there is `room`.

    Args:
        sizes: What each group moves. It takes the room of its packed bytes, if it has some.
    """
    moved = 0.0
    for index in sorted(indices, key=lambda i: -model.num_sent[i] * sizes[i] / max(1, model.sent[i])):
        kept = min(room, model.sent[index])
        room -= kept
        moved += sizes[index] * (1 - kept / max(1, model.sent[index])) * model.num_sent[index]
    return moved
