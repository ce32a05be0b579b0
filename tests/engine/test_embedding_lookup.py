"""Embedding tables whose rows are gathered where the table rests."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from group_offload import OffloadHandle, StateError, StorageError
from group_offload.base.mapping import cached_bytes, forget_writes

from ..support import tiny_models as tiny
from ..support.models import make as make_model
from ..support.on_device import offload, twin_on
from ..support.simulated import SimulatedDevice, use_simulated_device
from ..support.tuning import tune

NUM_ROWS, DIM = 4096, 64
TABLE_BYTES = NUM_ROWS * DIM * 4
TIERS = ["ram", "folder", "checkpoint"]


class Encoder(nn.Module):
    """Like a text encoder: a table, blocks, and a norm that is in no block."""

    def __init__(self, embedding: nn.Embedding | None = None) -> None:
        super().__init__()
        self.embed = embedding or nn.Embedding(NUM_ROWS, DIM)
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        x = self.embed(indices)
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)


class Centred(nn.Embedding):
    """Uses the table for more than the lookup, and has a scale, as Gemma's, which belongs on the device."""

    def __init__(self) -> None:
        super().__init__(NUM_ROWS, DIM)
        self.register_buffer("scale", torch.tensor([DIM**0.5]), persistent=False)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        assert self.weight.dtype is torch.float32 and self.weight.shape[0] == NUM_ROWS
        plain = F.embedding(indices, weight=self.weight) + torch.embedding(self.weight, indices)
        return super().forward(indices) * self.scale + plain - self.weight.mean(0)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevice]:
    tune(monkeypatch, table_bytes=TABLE_BYTES)
    with use_simulated_device(SimulatedDevice(0, "lazy")) as device:
        yield device


def make(embedding: nn.Embedding | None = None) -> Encoder:
    torch.manual_seed(0)
    return Encoder(embedding).requires_grad_(False)


def offloaded(resident: nn.Module, tier: str, folder: Path, **options: Any) -> tuple[nn.Module, OffloadHandle]:
    model, where = twin_on(tier, resident, folder)
    return model, offload(model, **where, **options)


def indices(seed: int = 0) -> torch.Tensor:
    return torch.randint(NUM_ROWS, (2, 7), generator=torch.Generator().manual_seed(seed))


def run(device: SimulatedDevice, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The indices are made on the device, by work that is not done yet."""
    with torch.no_grad(), device.running(strict=True):
        return device.get(model(device.put(x - 1) + 1))


def check(device: SimulatedDevice, model: nn.Module, resident: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        assert torch.equal(run(device, model, x), resident(x))


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("kind", [None, Centred])
def test_only_rows_move(kind: Any, tier: str, level: str, device: SimulatedDevice, tmp_path: Path) -> None:
    """Else a table of 2 GiB moves for a few rows. Edits of it are seen."""
    resident = make(None if kind is None else kind())
    model, handle = offloaded(resident, tier, tmp_path, offload_type=level)
    others = sum(tensor.nbytes for name, tensor in resident.named_parameters() if name != "embed.weight")
    for number in range(4):
        before = device.copied_bytes
        check(device, model, resident, indices(number))
        if kind is not Centred:
            assert device.copied_bytes - before < 2 * others < TABLE_BYTES
        assert torch.equal(run(device, model.embed, indices(number)), resident.embed(indices(number)))  # as trainers do
    assert any(group.group_id == "embed.weight" and "looked up" in group.location for group in handle.groups)
    x = indices()
    edits = (
        lambda each: each.embed.weight.data.mul_(2),
        lambda each: setattr(each.embed.weight, "data", each.embed.weight.data + 1),
        lambda each: each.embed.weight.data[int(x[0, 0])].zero_(),
        lambda each: setattr(each.embed, "weight", nn.Parameter(each.embed.weight.data * 3, requires_grad=False)),
    )
    for number, edit in enumerate(edits):
        for each in (model, resident):
            edit(each)
        place = model.get_parameter("embed.weight").data_ptr()
        for _ in range(2):
            check(device, model, resident, x)
        if tier == "folder" and not number:  # it is stored in RAM then: pages that were written to would stay there too
            assert model.get_parameter("embed.weight").data_ptr() != place
    handle.remove()
    assert torch.equal(model.embed.weight, resident.embed.weight)
    with torch.no_grad():
        assert torch.equal(model(x), resident(x))


@pytest.mark.parametrize("tier", ["ram", "folder"])
@pytest.mark.parametrize("kind", [tiny.t5, tiny.clip])
def test_text_encoders(kind: Any, tier: str, level: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their own forwards, with tied names, positions and masks."""
    resident = kind().eval()
    table = resident.get_input_embeddings().weight
    tune(monkeypatch, table_bytes=table.nbytes)
    model, handle = offloaded(resident, tier, tmp_path, offload_type=level)
    assert sum("looked up" in group.location for group in handle.groups) == 1
    x = torch.randint(table.shape[0], (2, 8), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        with torch.no_grad():
            for output, expected in zip(model(x).values(), resident(x).values(), strict=True):
                assert torch.equal(output, expected)
    handle.remove()


class Variant(Encoder):
    """A table that other modules hold too, or that is used for more than lookups."""

    def __init__(self, kind: str) -> None:
        super().__init__(
            {"max norm": nn.Embedding(NUM_ROWS, DIM, max_norm=1.0), "small": nn.Embedding(NUM_ROWS - 1, DIM)}.get(kind)
        )
        self.head: nn.Module = nn.Identity()
        table = self.embed.weight
        if kind in ("tied", "overlapping"):
            self.head = nn.Linear(DIM, 8, bias=False)
            self.head.weight = table if kind == "tied" else nn.Parameter(table.data[:8])
        elif kind == "shared, as in T5":
            self.inner = nn.ModuleDict({"embed": self.embed})
        elif kind == "tied tables, as in T5 with transformers 5":
            self.head = nn.Embedding(NUM_ROWS, DIM)
            self.head.weight = table

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        x = super().forward(indices)
        if isinstance(self.head, nn.Embedding):
            return x + self.head(indices)
        return self.head(x)


class Reading(Encoder):
    """The head is the table, and nobody else holds it."""

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return F.linear(super().forward(indices), self.embed.weight)


@pytest.mark.parametrize(
    ("kind", "is_table"),
    [
        ("tied", False),
        ("shared, as in T5", True),
        ("tied tables, as in T5 with transformers 5", True),
        ("read", False),
        ("overlapping", False),
        ("max norm", False),
        ("small", False),
        ("switched off", False),
        ("verified", False),
    ],
)
def test_what_is_a_table(kind: str, is_table: bool, level: str, device: SimulatedDevice, tmp_path: Path) -> None:
    """One that a head holds too has to move. It can be switched off, and files that are verified are read whole."""
    options: dict[str, Any] = {"embeddings_on_cpu": kind != "switched off"}
    if kind == "verified":
        options |= {"verify_checksums": True, "offload_to_disk_path": tmp_path}
    made = (Reading,) if kind == "read" else (Variant, kind)
    model, resident = (make_model(*made).requires_grad_(False) for _ in range(2))  # a deep copy shares no memory
    handle = offload(model, offload_type=level, **options)
    assert any("looked up" in group.location for group in handle.groups) == is_table
    for _ in range(2):
        check(device, model, resident, indices() % (NUM_ROWS - 1))
    handle.remove()


def test_a_file_that_is_cut_off(device: SimulatedDevice, tmp_path: Path) -> None:
    """An error that names the group: a read behind the end of a mapped file would end the process."""
    model, handle = offloaded(make(), "checkpoint", tmp_path)
    x = indices()
    run(device, model, x)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    os.truncate(path, 4096)
    for module in (model, model.get_submodule("embed")):
        with pytest.raises(StorageError, match=r"model\.safetensors"):
            run(device, module, x)
    path.write_bytes(whole)
    del model, handle


def test_indices_out_of_range(device: SimulatedDevice, tmp_path: Path) -> None:
    """An error of the host, where a device would stop for good."""
    model, handle = offloaded(make(), "ram", tmp_path)
    with pytest.raises(IndexError, match="out of range"):
        run(device, model, indices() + NUM_ROWS)
    check(device, model, make(), indices())
    handle.remove()


def test_a_budget_knows_that_the_table_stays(
    device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All other weights fit into less than the table takes."""
    tune(monkeypatch, device_margin_bytes=0)
    resident = make()
    model, handle = offloaded(resident, "ram", tmp_path, vram_budget=TABLE_BYTES)
    for number in range(6):
        check(device, model, resident, indices(number))
    stats = handle.stats()
    assert stats.resident_bytes > 0 and stats.host_bytes > TABLE_BYTES and stats.pinned_bytes < TABLE_BYTES
    handle.remove()


def test_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that requires gradients refuses them as all offloaded weights do, and stays on the device if it is trained."""
    tune(monkeypatch, table_bytes=TABLE_BYTES)
    model, resident = make(), make()
    for each in (model, resident):
        each.embed.register_forward_hook(lambda module, args, output: output.requires_grad_(True))
        each.norm.weight.requires_grad_(True)
    handle = offload(model)
    for each in (model, resident):
        each(indices()).sum().backward()
    assert model.norm.weight.grad is not None and resident.norm.weight.grad is not None
    assert torch.equal(model.norm.weight.grad, resident.norm.weight.grad)
    handle.remove()
    model = make()
    model.embed.weight.requires_grad_(True)
    handle = offload(model)
    with pytest.raises(StateError, match="gradient"):
        model(indices()).sum().backward()
    handle.remove()


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="needs a system that forgets cached pages")
@pytest.mark.parametrize("tier", ["folder", "checkpoint"])
def test_only_some_pages_of_a_file_are_read(tier: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tune(monkeypatch, table_bytes=TABLE_BYTES)
    resident = make()
    model, handle = offloaded(resident, tier, tmp_path)
    view = model.embed.weight
    start = -(-view.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (view.data_ptr() + view.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    forget_writes(start, size)  # a page that is mapped stays cached
    for path in tmp_path.rglob("*.safetensors"):
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_bytes(start, size):
        pytest.skip("the file system keeps what it is told to forget")
    x = torch.tensor([[5, 2000, 4000]])
    with torch.no_grad():
        assert torch.equal(model(x), resident(x))
    assert 0 < cached_bytes(start, size) <= 3 * 2 * mmap.PAGESIZE
    handle.remove()
    assert torch.equal(model.embed.weight, resident.embed.weight)
