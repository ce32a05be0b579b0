"""A pipeline on a card that is really full: no error, the same bits, and a budget that pays from the first image on.

The pipeline has FLUX.1's shape: CLIP, T5-XXL, the transformer and the VAE, at 1024 x 1024. Weights, activations, times and the
sizes in torch's allocator are FLUX.1's on one H200, bytes divided by `SCALE`. The device is a `TimedDevice` with a clock for
the host. Sizes are in GiB of the full size. Each test is about one way in which that failed on a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from group_offload import enable_group_offload
from group_offload.base.device import Refused
from group_offload.base.tuning import Tuning
from group_offload.runtime.budget import memory_budget
from group_offload.runtime.budget.memory_budget import MemoryBudget

from ..support.allocator import CachingAllocator, Meter
from ..support.simulated import use_simulated_device
from ..support.speeds import use_speeds
from ..support.timed import TimedDevice
from ..support.tuning import tune

SCALE = 1024
MIB = (1 << 20) // SCALE
GIB = (1 << 30) // SCALE
LINK = 53e9 / SCALE
LOCKING = 8 * GIB
"""Bytes of files that are pinned a second."""
PIXELS = 64
"""The elements of what stands for an image of 1024 x 1024."""
LAUNCH_SECONDS = 0.5e-3
"""What the host takes for a block."""
KERNELS_MIB = 270
"""What the driver takes for kernels, cuBLAS and cuDNN once the text encoders have run for the first time."""
SCALED = [
    *("max_run_bytes", "resident_bytes", "device_margin_bytes", "give_way_bytes", "min_compressed_bytes"),
    *("min_window_bytes", "table_bytes", "segment_bytes", "chunk_bytes", "small_chunk_bytes"),
    *("max_read_run_bytes", "max_joined_bytes", "strip_bytes"),
]
"""The sizes of `Tuning` that are divided too."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """What a convolution of cuDNN asks for. If it gets none it takes another algorithm, and says nothing of it."""

    mib: float


Phase = tuple["float | Workspace", ...]
"""The MiB of activations that are held at the same time, in the order in which they are made."""

PHASES: dict[str, list[Phase]] = {
    "clip": [(2, 2)],
    "t5": [(4, 4, 4, 4, 32, 64, 64, 32), (4, 10, 10, 10)],
    "double": [(27, 24, 24, 24, 24, 24, 24), (27, 96, 96), (27, 12, 12)],
    "single": [(27, 108, 108), (27, 108, 27, 27, 27, 27, 27, 27), (27, 108, 27, 135, 27)],
    "unet": [(27, 320, 320), (27, 108, 320, 320), (27, 320, 640)],
    "rest": [(28, 28)],
}


def decoding(workspace_mib: float) -> list[Phase]:
    """The phases of the VAE. The convolution that needs most has a workspace of `workspace_mib`."""
    return [
        (16, 16, 16, Workspace(64)),
        (64, 64, 64, Workspace(128)),
        (256, 256, 256, Workspace(256)),
        (256, 128, 128, Workspace(256)),
        (512, 512, 512, Workspace(256)),
        (512, 256, 256, 256, Workspace(workspace_mib)),
    ]


_rig: _Rig = None  # type: ignore[assignment]


def take(mib: float, x: torch.Tensor) -> torch.Tensor:
    """Activations for an input `x`: `mib` if it has `PIXELS` elements."""
    return _rig.device.empty(int(mib * MIB * x.numel() / PIXELS))


class Layer(nn.Module):
    """What is one group: weights, activations that are made and freed, and the time of its kernels."""

    def __init__(self, weight_mib: float, seconds: float, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(int(weight_mib * MIB) // 2, dtype=torch.bfloat16), requires_grad=False)
        self.seconds, self.kind = seconds, kind

    def forward(self, x: torch.Tensor, mask: None) -> torch.Tensor:
        others = _rig.others.setdefault(self.kind, set())
        if not _rig.keeps_plans:
            others.clear()
        for number, phase in enumerate(_rig.phases[self.kind]):
            if self.kind == "vae":
                _rig.before(f"vae {number}")
            held = [_workspace(each, x, others) if isinstance(each, Workspace) else take(each, x) for each in phase]
            del held
        _rig.device.compute(self.seconds * x.numel() / PIXELS)
        return x


def _workspace(workspace: Workspace, x: torch.Tensor, others: set[float]) -> torch.Tensor | None:
    if workspace.mib not in others:
        try:
            return take(workspace.mib, x)
        except Refused:
            raise
        except torch.OutOfMemoryError:
            others.add(workspace.mib)
    return None


class Model(nn.Module):
    """Layers beside the blocks, then lists of blocks, with a hidden state of `hidden_mib` between all of them."""

    def __init__(self, hidden_mib: float, rest_mib: float, *blocks: tuple[int, Any]) -> None:
        super().__init__()
        self.hidden_mib = hidden_mib
        self.rest = Layer(rest_mib, 0.0005, "rest")
        self.lists = nn.ModuleList(nn.ModuleList(Layer(*each) for _ in range(number)) for number, each in blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.rest(x, None)
        hidden = take(self.hidden_mib, x)
        for blocks in self.lists:
            for block in blocks:  # type: ignore[attr-defined]
                x = block(x, None)
                hidden = take(self.hidden_mib, x)  # while the one before is there
        del hidden
        return x


class Pipeline:
    model_cpu_offload_seq = "text_encoder->text_encoder_2->transformer->vae"

    def __init__(self, *, is_unet: bool = False) -> None:
        """
        Args:
            is_unet: Whether it has the shape of SDXL: blocks of very different sizes. The largest one is half of the model.
        """
        self.components = {
            "text_encoder": Model(1, 70, (12, (13.5, 0.0002, "clip"))),
            "text_encoder_2": Model(4, 8, (24, (368, 0.0018, "t5"))),
            "transformer": Model(27, 120, (19, (648, 0.00334, "double")), (38, (270, 0.00289, "single"))),
            "vae": Model(64, 20, (1, (60, 0.04, "vae"))),
        }
        if is_unet:
            blocks = [(1, (mib, mib * 5e-6, "unet")) for mib in (20, 190, 1390, 790, 2350, 400, 40)]
            self.components["text_encoder_2"] = Model(1, 130, (32, (38, 0.0004, "clip")))
            self.components["transformer"] = Model(20, 60, *blocks)
        for model in self.components.values():
            model.eval()


@dataclass(slots=True, kw_only=True)
class Image:
    """What one image took. Bytes are GiB of the full size."""

    error: str = ""
    """The call that ran out of memory, and why. The image ends there."""
    seconds: float = 0.0
    step_seconds: list[float]
    """Of each step; the text encoders count to the first one."""
    step_sent: list[float]
    """Bytes that were sent in each step, as `step_seconds`."""
    compressed: list[float]
    """Compressed offloaded bytes, after each call."""
    peak_allocated: float = 0.0
    peak_reserved: float = 0.0
    pinned: int = 0
    """Bytes at this scale that were pinned since the image began, as `unpinned`."""
    unpinned: int = 0
    read: int = 0
    """Bytes from files that were read by threads, not copied from pinned pages."""
    fallbacks: int = 0
    """Convolutions whose last call had no workspace: the image has other bits."""
    refused: int = 0
    """Allocations that the allocator refused."""


def run(
    free: float,
    budget: float | str | None,
    *,
    sizes: Sequence[float] = (1, 1, 1),
    steps: int = 8,
    expandable: bool = False,
    folder: Path | None = None,
    workspace_mib: float = 256,
    is_unet: bool = False,
    keeps_plans: bool = False,
    before_call: Callable[[CachingAllocator, int, str], None] = lambda card, image, name: None,
    **options: Any,
) -> list[Image]:
    """Run a pipeline for some images, whatever errors come.

    Args:
        free: GiB that the card has for this process.
        budget: GiB, "auto", or None for no budget.
        sizes: Of each image, the pixels beside those of 1024 x 1024.
        folder: Where weights are stored in files; None for RAM.
        before_call: Told of each call of a model: the image, and "text_encoder", "text_encoder_2", "transformer 0" and so
            on, or "vae"; and, inside of that, of each phase of the decoder: "vae 0" and so on. Here another process may
            take memory.
        options: Others of `enable_group_offload`.
    """
    gc.collect()
    card = CachingAllocator(int(free * GIB), scale=SCALE, expandable=expandable)
    card.allocated.whole, card.reserved.whole = Meter(), Meter()  # the package resets the peaks of the card itself
    device = TimedDevice(LINK, card=card, launch_seconds=LAUNCH_SECONDS)
    device.lock_bytes_per_second = LOCKING
    phases = {**PHASES, "vae": decoding(workspace_mib)}
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        scaled = {name: getattr(Tuning(), name) // SCALE for name in SCALED}
        tune(patch, **scaled, pinned_share=Tuning().pinned_share)
        use_speeds(patch, h2d=int(LINK))
        stack.enter_context(use_simulated_device(device))  # type: ignore[arg-type]
        pipe = Pipeline(is_unet=is_unet)
        if folder is not None:
            for name, model in pipe.components.items():
                save_file(model.state_dict(), folder / f"{name}.safetensors")
                model.load_state_dict(load_file(folder / f"{name}.safetensors"), assign=True)
                model.requires_grad_(False)
        options["vram_budget"] = int(budget * GIB) if isinstance(budget, float | int) else budget
        handles = enable_group_offload(pipe, onload_device="cpu", **options)
        rig = _Rig(device, card, pipe, handles, phases, keeps_plans, before_call)
        patch.setattr(f"{__name__}._rig", rig, raising=False)
        for size in sizes:
            rig.make_image(torch.zeros(int(size * PIXELS)), steps)
        for handle in handles.values():
            handle.remove()
    return rig.images


@dataclass(slots=True)
class _Rig:
    """What layers use that is no state of theirs: a module that keeps such things could not be told to be unchanged."""

    device: TimedDevice
    card: CachingAllocator
    pipe: Pipeline
    handles: dict[str, Any]
    phases: dict[str, list[Phase]]
    """By the name of a layer's kind."""
    keeps_plans: bool
    """Whether a thread that had to take another algorithm for a shape takes it from then on, as cuDNN's plans are kept."""
    before_call: Callable[[CachingAllocator, int, str], None]
    others: dict[str, set[float]] = field(default_factory=dict)
    """By the name of a kind, the workspaces that were not had in the last call, or that the thread keeps plans without."""
    images: list[Image] = field(default_factory=list)

    def before(self, name: str) -> None:
        if (len(self.images), name) == (0, "transformer 0"):
            self.card.driver_takes(KERNELS_MIB * MIB)
        self.before_call(self.card, len(self.images), name)

    def make_image(self, x: torch.Tensor, steps: int) -> None:
        device, card = self.device, self.card
        device.synchronize()
        image = Image(step_seconds=[], step_sent=[], compressed=[])
        allocated, reserved = card.allocated.whole, card.reserved.whole
        assert allocated is not None and reserved is not None
        allocated.peak, reserved.peak = card.allocated.now, card.reserved.now
        before = self._counts()
        begun, at, sent = device.host, device.host, device.copied_bytes
        try:
            for name in ["text_encoder", "text_encoder_2", *(f"transformer {step}" for step in range(steps)), "vae"]:
                self.before(name)
                model, _, step = name.partition(" ")
                with torch.no_grad():
                    self.pipe.components[model](x)
                image.compressed.append(sum(handle.stats().compressed_bytes for handle in self.handles.values()) / GIB)
                if step:
                    device.synchronize()
                    image.step_seconds.append(device.host - at)
                    image.step_sent.append((device.copied_bytes - sent) / GIB)
                    at, sent = device.host, device.copied_bytes
        except torch.OutOfMemoryError as error:
            image.error = f"{name}: {error}"
        device.synchronize()
        image.pinned, image.unpinned, image.read, image.refused = (
            then - now for then, now in zip(self._counts(), before, strict=True)
        )
        image.seconds, image.fallbacks = device.host - begun, sum(map(len, self.others.values()))
        image.peak_allocated, image.peak_reserved = allocated.peak / GIB, reserved.peak / GIB
        self.images.append(image)

    def _counts(self) -> list[int]:
        stats = [handle.stats().bytes_read for handle in self.handles.values()]
        read = sum(each.get(way, 0) for each in stats for way in ("page cache", "direct"))
        return [self.device.locked_bytes, self.device.unpinned_bytes, read, self.card.num_refused]


# ---------------------------------------------------------------- tests


FULL = [(7.79, "auto"), (7.79, 7), (7.79, 6), (11.79, "auto"), (11.79, 11), (11.79, 10)]
"""GiB that are free, and budgets for them."""
AMPLE = 200
"""GiB of a card that has more than a budget."""
ALL_WEIGHTS = 31.1
"""GiB of weights that an image needs once."""

any_segments = pytest.mark.parametrize("expandable", [False, True], ids=["segments", "expandable"])


def assert_no_errors(images: list[Image]) -> None:
    assert [image.error for image in images] == [""] * len(images)


def assert_whole(images: list[Image]) -> None:
    """Each image is there, with the bits that it should have."""
    assert_no_errors(images)
    assert [image.fallbacks for image in images] == [0] * len(images)


@any_segments
@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize(("free", "budget"), FULL)
def test_no_image_runs_out_of_memory(free: float, budget: float | str, compress: bool, expandable: bool) -> None:
    """What stays, or what is free in fragments, would be in the way of activations, buffers or a larger image."""
    assert_no_errors(run(free, budget, steps=4, compress=compress, expandable=expandable))


def test_compressed_images_are_there_where_plain_ones_are() -> None:
    """One block is half of the model. Compression takes compressed buffers for a few strips of it, and not for all of it."""
    plain, compressed = (
        run(AMPLE, None, sizes=(1, 1), steps=4, compress=compress, is_unet=True) for compress in (False, True)
    )
    most = max(image.peak_allocated for image in plain) + 0.25
    assert all(image.compressed[-1] and image.peak_allocated <= most for image in compressed)
    for compress in (False, True):
        assert_whole(run(6, "auto", sizes=(1, 1), steps=4, compress=compress, expandable=True, is_unet=True))


def test_single_layers_are_streamed_where_blocks_leave_no_room() -> None:
    """Unless you asked for blocks. Layer by layer, a card is enough that runs out of memory with two blocks."""
    assert_no_errors(run(2, "auto", sizes=(1,), steps=3, expandable=True))
    for options in ({"offload_type": "block_level"}, {"num_blocks_per_group": 1}):
        (image,) = run(2, "auto", sizes=(1,), steps=3, expandable=True, **options)
        assert image.error


@pytest.mark.parametrize("free", [3.1, 3.3, 3.6])
def test_the_last_model_holds_nothing_that_the_next_one_needs(free: float) -> None:
    """Not until Python's collector runs either: the slots of compressed weights are exchanged for those of another model."""
    gc.collect()
    gc.disable()
    try:
        assert_no_errors(run(free, "auto", steps=4, compress=True, expandable=True))
    finally:
        gc.enable()


def test_no_pass_waits_for_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans take milliseconds. They are made as a pass ends, while the device still computes."""
    before_pass, made = MemoryBudget.before_pass, []

    def passing(*args: Any) -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(memory_budget, "make_plan", None)
            made.append(before_pass(*args))
        return made[-1]

    monkeypatch.setattr(MemoryBudget, "before_pass", passing)
    assert_whole(run(7.79, "auto", sizes=(1, 1, 1), steps=4))
    assert any(made)


@any_segments
@pytest.mark.parametrize("sizes", [(1, 1, 1.5, 1), (0.5, 1, 0.5, 1)], ids=str)
def test_what_stays_gives_way_to_a_larger_image(sizes: tuple[float, ...], expandable: bool) -> None:
    assert_whole(run(7.79, "auto", sizes=sizes, steps=4, expandable=expandable))


@pytest.mark.parametrize(("free", "budget"), [(AMPLE, 7), (7.79, "auto")])
def test_no_page_is_locked_again_because_of_what_stays(free: float, budget: float | str, tmp_path: Path) -> None:
    """There is RAM for all weights: what stays on the device comes back from pinned pages, not from a file."""
    images = run(free, budget, sizes=(1, 1), steps=4, expandable=True, folder=tmp_path)
    assert [(image.pinned, image.unpinned, image.read) for image in images] == [(0, 0, 0)] * 2


def test_nothing_is_compressed_twice(tmp_path: Path) -> None:
    """What is compressed while offloaded does not follow what stays on the device."""
    images = run(AMPLE, 11.2, steps=4, compress=True, folder=tmp_path)
    assert len({num_bytes for image in images for num_bytes in image.compressed}) == 1


@any_segments
@pytest.mark.parametrize(("free", "budget"), FULL)
def test_a_model_whose_turn_comes_keeps_what_stays(free: float, budget: float | str, expandable: bool) -> None:
    """The step that it begins with sends no group twice, but for the first ones of the next step; later ones send the rest."""
    images = run(free, budget, expandable=expandable)
    assert_no_errors(images)
    for image in images[1:]:
        assert image.step_sent[0] <= ALL_WEIGHTS + 2.5
        assert max(image.step_sent[1:]) <= 1.1 * images[-1].step_sent[-2]


@any_segments
@pytest.mark.parametrize("keeps_plans", [False, True], ids=["", "plans are kept"])
@pytest.mark.parametrize(
    ("free", "budget", "workspace_mib"), [(7.79, "auto", 1100), (7.79, 7, 1100), (15.79, "auto", 2000)]
)
def test_convolutions_get_their_workspaces(
    free: float, budget: float | str, workspace_mib: float, keeps_plans: bool, expandable: bool
) -> None:
    """cuDNN takes another algorithm without, which gives other bits and no error. It may take that for good."""
    options: dict[str, Any] = {"workspace_mib": workspace_mib, "keeps_plans": keeps_plans, "expandable": expandable}
    assert_whole(run(free, budget, steps=4, **options))


@any_segments
def test_a_convolution_that_got_no_workspace_is_repeated(expandable: bool) -> None:
    """After the call has begun another process takes what was left for it, but for what the activations need."""
    refused = 0

    def before_call(card: CachingAllocator, image: int, name: str) -> None:
        nonlocal refused
        if (image, name) == (1, "vae 5") and not refused:
            card.release_cached()
            card.other_takes(card.free_bytes - 900 * MIB)
            refused += 1

    images = run(
        7.79, "auto", sizes=(1, 1), steps=4, workspace_mib=1100, before_call=before_call, expandable=expandable
    )
    assert refused and images[1].refused
    assert_whole(images)


@pytest.mark.parametrize("in_files", [False, True])
def test_a_budget_pays_from_the_first_image_on(in_files: bool, tmp_path: Path) -> None:
    folder = tmp_path if in_files else None
    without = run(7.79, None, sizes=(1, 1), folder=folder)
    images = run(7.79, "auto", sizes=(1, 1), folder=folder, expandable=True)
    assert images[0].seconds <= 1.05 * without[0].seconds
    step = images[1].step_seconds[-2]
    assert images[0].step_seconds[2] <= 1.05 * step
    assert images[1].seconds <= without[1].step_seconds[0] + 7 * step + 0.15


@any_segments
@pytest.mark.parametrize("first", ["set-up", "text_encoder", "transformer 0", "transformer 2"])
def test_another_process_takes_and_gives_memory(first: str, expandable: bool) -> None:
    """It takes 2 GiB in one image and gives them back in the next; later ones are as if it had not been there."""
    taken = 2 * GIB if first == "set-up" else 0

    def before_call(card: CachingAllocator, image: int, name: str) -> None:
        nonlocal taken
        if (image, name) == (0, first):
            taken = card.other_takes(2 * GIB)
        if (image, name) == (1, "text_encoder" if first == "set-up" else first):
            card.other_gives(taken)

    alone = run(7.79, "auto", sizes=(1, 1, 1, 1), steps=4, expandable=expandable)
    free = 7.79 - taken / GIB
    images = run(free, "auto", sizes=(1, 1, 1, 1), steps=4, before_call=before_call, expandable=expandable)
    assert taken
    assert_whole(images)
    assert sum(images[-1].step_sent) <= 1.05 * sum(alone[-1].step_sent)


@any_segments
def test_another_process_takes_whatever_is_free(expandable: bool) -> None:
    """Before each call, until a pipeline without a budget would have what it needs, kernels and half a GiB."""
    taken = 0
    least = max(image.peak_reserved for image in run(7.79, None, sizes=(1, 1), steps=4)) + 0.8

    def before_call(card: CachingAllocator, image: int, name: str) -> None:
        nonlocal taken
        if image:
            taken += card.other_takes(max(0, int((7.79 - least) * GIB) - taken))

    assert_whole(run(7.79, "auto", steps=4, before_call=before_call, expandable=expandable))


@pytest.mark.parametrize(("free", "budget"), [*FULL, (AMPLE, 7)])
def test_little_is_reserved_and_not_allocated(free: float, budget: float | str) -> None:
    """Else much is free, in fragments that no block fits in."""
    images = run(free, budget, sizes=(1,) * 5, steps=4, expandable=True)
    reserved = max(image.peak_reserved for image in images)
    assert reserved - max(image.peak_allocated for image in images) <= 0.05 * min(free, 16)
