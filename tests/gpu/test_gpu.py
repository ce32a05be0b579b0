"""What only a real accelerator can show: real streams, real pinned memory, real peaks."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import group_offload
from group_offload import ModuleError, OffloadHandle, StateError, apply_group_offloading
from group_offload.base.device import AcceleratorBackend

from ..support.inside import engine_of, slow_down
from ..support.models import Blocks
from ..support.on_device import lay_in_file, twin_on
from ..support.rigs import run
from ..support.tuning import tune

pytestmark = pytest.mark.gpu

DIM = 1024
BLOCK_BYTES = 2 * (4 * DIM * DIM + 4 * DIM + 4 * DIM * DIM + DIM)  # two Linears in bf16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Model(Blocks):
    def __init__(self, num_blocks: int = 8) -> None:
        super().__init__(*(Block() for _ in range(num_blocks)))
        self.embed = nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(torch.randn(DIM))
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(super().forward(self.embed(x) * self.scale))


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().to(torch.bfloat16).eval()


@pytest.fixture
def x(device: torch.device) -> torch.Tensor:
    return torch.randn(256, DIM, dtype=torch.bfloat16, device=device, generator=torch.Generator(device).manual_seed(1))


MODES: list[dict[str, Any]] = [
    {},
    {"num_blocks_per_group": 3},
    {"offload_type": "leaf_level"},
    {"record_stream": True},
    {"offload_type": "leaf_level", "record_stream": True},
    {"use_stream": False},
    {"use_stream": False, "non_blocking": True},
    {"low_cpu_mem_usage": True},
    {"compress": True},
    {"compress": True, "record_stream": True},
    {"compress": True, "offload_type": "leaf_level"},
]


@pytest.mark.parametrize("in_files", [False, True], ids=["ram", "files"])
@pytest.mark.parametrize("options", MODES, ids=str)
def test_outputs_are_bit_identical(
    model: Model, x: torch.Tensor, device: torch.device, options: dict[str, Any], in_files: bool, tmp_path: Path
) -> None:
    """Hazard: compute doesn't wait for the copy stream, or NaN (diffusers #12673, #13502, #14657)."""
    resident = copy.deepcopy(model).to(device)
    expected = run(resident, x)
    handle = apply_group_offloading(model, offload_to_disk_path=tmp_path if in_files else None, **options)
    for _ in range(4):
        assert torch.equal(run(model, x), expected)
    assert torch.equal(run(model, x.cpu()), expected)
    for name, weight in model.state_dict().items():
        assert weight.device.type == "cpu"
        assert torch.equal(weight, resident.state_dict()[name].cpu())
    handle.remove()
    assert torch.equal(run(model.to(device), x), expected)


@pytest.mark.parametrize("slow", ["copies", "compute"])
@pytest.mark.parametrize("options", MODES, ids=str)
def test_slow_streams_change_nothing(
    model: Model, x: torch.Tensor, device: torch.device, options: dict[str, Any], slow: str
) -> None:
    expected = run(copy.deepcopy(model).to(device), x)
    handle = apply_group_offloading(model, **options)
    if slow == "copies":
        slow_down(handle, 20_000_000)
    else:
        for block in model.blocks:
            block.register_forward_hook(lambda *_: torch.cuda._sleep(20_000_000))
    for _ in range(2):
        assert torch.equal(run(model, x), expected)


def test_weights_are_pinned_in_their_exact_size(model: Model) -> None:
    """Hazard: pinned memory is rounded up to twice its size (diffusers #10847, #11106, #7970)."""
    handle = apply_group_offloading(model)
    stats = handle.stats()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    assert stats.pinned_bytes == stats.host_bytes
    assert weights <= stats.host_bytes <= weights * 1.01
    run(model, torch.zeros(1, DIM, dtype=torch.bfloat16))
    assert handle.stats().bytes_onloaded["pageable"] == 0
    # What is pinned is the other mapping of the same pages: an offloaded weight can be edited while it is copied.
    assert not any(parameter.is_pinned() for parameter in model.parameters())
    handle.remove()


class Encoder(Model):
    """With a table that is larger than all of the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(150_000, DIM)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return super().forward(self.words(indices))


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("level", ["block_level", "leaf_level"])
@pytest.mark.parametrize("tier", ["ram", "folder", "checkpoint"])
def test_an_embedding_table_stays_where_it_rests(
    tier: str, level: str, is_compiled: bool, device: torch.device, tmp_path: Path
) -> None:
    """The indices are made on the device. Only rows go there."""
    torch.manual_seed(0)
    model = Encoder().to(torch.bfloat16).eval()
    table_bytes = model.words.weight.nbytes
    indices = [torch.randint(150_000, (2, 77), device=device) for _ in range(3)]
    resident = copy.deepcopy(model).to(device)
    expected = [run(resident, each) for each in indices]
    del resident
    model, home = twin_on(tier, model, tmp_path)
    handle = apply_group_offloading(model, offload_type=level, **home)
    call = torch.compile(model) if is_compiled else model
    forget_peak(device)
    before = torch.cuda.memory_allocated(device)
    for _ in range(2):
        for each, output in zip(indices, expected, strict=True):
            found = run(call, each)
            assert torch.equal(found, output) if not is_compiled else torch.allclose(found, output, atol=0.1)
    assert torch.cuda.max_memory_allocated(device) - before < table_bytes / 2
    with torch.inference_mode():
        assert torch.equal(model(indices[0].cpu()), expected[0])
    handle.remove()
    assert torch.equal(run(model.to(device), indices[0]), expected[0])


def peak_of(model: nn.Module, x: torch.Tensor, device: torch.device) -> int:
    forget_peak(device)
    before = torch.cuda.memory_allocated(device)
    run(model, x)
    torch.accelerator.synchronize()
    return torch.cuda.max_memory_allocated(device) - before


@pytest.mark.parametrize(
    ("options", "num_slots"), [({}, 2), ({"use_stream": False}, 1), ({"record_stream": True}, 2)], ids=str
)
def test_the_peak_is_the_formula(
    model: Model, x: torch.Tensor, device: torch.device, options: dict[str, Any], num_slots: int
) -> None:
    resident = copy.deepcopy(model).to(device)
    torch.accelerator.synchronize()
    run(resident, x)
    activations = peak_of(resident, x, device)
    del resident
    handle = apply_group_offloading(model, **options)
    rest = next(group.num_bytes for group in handle.groups if group.group_id == "Model_unmatched_group")
    block = max(group.num_bytes for group in handle.groups if group.group_id.startswith("blocks"))
    assert BLOCK_BYTES <= block <= BLOCK_BYTES + 1024
    assert peak_of(model, x, device) <= rest + num_slots * block + activations + (1 << 20)
    assert handle.stats().peak_device_bytes <= rest + num_slots * block
    handle.remove()
    del model
    gc.collect()


def test_memory_goes_back(model: Model, x: torch.Tensor, device: torch.device, tmp_path: Path) -> None:
    gc.collect()  # of tests before
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    for _ in range(3):
        handle = apply_group_offloading(model, offload_to_disk_path=tmp_path)
        run(model, x)
        handle.remove()
    gc.collect()
    assert torch.cuda.memory_allocated(device) == before
    apply_group_offloading(model)
    expected = run(model, x)
    assert torch.cuda.memory_allocated(device) > before + BLOCK_BYTES
    group_offload.free_device_buffers()
    assert torch.cuda.memory_allocated(device) <= before + expected.nbytes + 4096
    assert torch.equal(run(model, x), expected)


@pytest.mark.parametrize("share", [None, 0.5, 2.0])
@pytest.mark.parametrize("options", [{}, {"offload_type": "leaf_level"}], ids=str)
def test_models_of_a_pipeline(
    model: Model, x: torch.Tensor, device: torch.device, options: dict[str, Any], share: float | None
) -> None:
    """Each is predicted while another one runs. A budget holds, and with room for all of them next to nothing is sent."""
    torch.manual_seed(2)
    models = {"encoder": Model(3), "transformer": model, "controlnet": Model(4), "vae": Model(2)}
    models = {name: each.to(torch.bfloat16).eval() for name, each in models.items()}
    expected = {name: run(copy.deepcopy(each).to(device), x) for name, each in models.items()}
    num_bytes = sum(tensor.nbytes for each in models.values() for tensor in each.parameters())

    class Pipe:
        model_cpu_offload_seq = "encoder->transformer->vae"
        components = models

    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    budget = None if share is None else before + int(share * num_bytes) + (256 << 20)
    handles = group_offload.enable_group_offload(Pipe(), onload_device=device, vram_budget=budget, **options)
    torch.cuda.reset_peak_memory_stats(device)
    sent = 0
    for _ in range(5):
        sent = sum(sum(handle.stats().bytes_onloaded.values()) for handle in handles.values())
        for name in ("encoder", *["controlnet", "transformer"] * 3, *["vae"] * 4):
            assert torch.equal(run(models[name], x), expected[name]), name
    assert budget is None or torch.cuda.max_memory_allocated(device) <= budget
    if share == 2.0:
        sent = sum(sum(handle.stats().bytes_onloaded.values()) for handle in handles.values()) - sent
        assert sent < num_bytes
    for handle in handles.values():
        handle.remove()


def test_compute_on_another_stream(model: Model, x: torch.Tensor, device: torch.device) -> None:
    expected = run(copy.deepcopy(model).to(device), x)
    apply_group_offloading(model)
    torch.accelerator.synchronize()
    side = torch.Stream(device=device)
    for _ in range(3):
        with side:
            output = run(model, x)
        assert torch.equal(run(model, x), expected)
        side.synchronize()
        assert torch.equal(output, expected)


@pytest.mark.parametrize("options", [{}, {"offload_type": "leaf_level"}, {"compress": True}], ids=str)
@pytest.mark.parametrize("how", ["blocks before", "blocks after", "whole"])
def test_compiled(model: Model, x: torch.Tensor, device: torch.device, how: str, options: dict[str, Any]) -> None:
    """Hazard: compiling gains nothing beside group offloading, and recompiles (diffusers #11584)."""
    torch._dynamo.reset()
    resident = copy.deepcopy(model).to(device)
    for block in resident.blocks:
        block.compile(fullgraph=True)
    expected = run(resident, x)
    if how == "blocks before":
        for block in model.blocks:
            block.compile(fullgraph=True)
    handle = apply_group_offloading(model, **options)
    if how == "blocks after":
        for block in model.blocks:
            block.compile(fullgraph=True)
    called: Any = torch.compile(model) if how == "whole" else model
    for passes in range(1, 4):
        onloads = handle.stats().onloads
        assert (
            torch.allclose(run(called, x), expected, atol=2e-2, rtol=2e-2)
            if how == "whole"
            else torch.equal(run(called, x), expected)
        )
        assert handle.stats().onloads >= onloads + len(model.blocks), passes
    torch._dynamo.reset()


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two accelerators")
@pytest.mark.parametrize("in_files", [False, True], ids=["ram", "files"])
@pytest.mark.parametrize("options", MODES, ids=str)
def test_the_second_device_is_the_second_device(
    model: Model, x: torch.Tensor, device: torch.device, options: dict[str, Any], in_files: bool, tmp_path: Path
) -> None:
    """Hazard: `cuda:1` onloads to the current device."""
    second = torch.device(device.type, 1)
    gc.collect()  # what other tests have left goes
    first_before = torch.cuda.memory_allocated(0)
    expected = run(copy.deepcopy(model).to(second), x.to(second))
    handle = apply_group_offloading(model, "cuda:1", offload_to_disk_path=tmp_path if in_files else None, **options)
    assert torch.cuda.current_device() == 0
    for _ in range(3):
        output = run(model, x)  # the input is on the first device
        assert output.device == second
        assert torch.equal(output, expected)
    assert torch.cuda.memory_allocated(0) == first_before
    assert torch.cuda.current_device() == 0
    handle.remove()


@pytest.mark.parametrize("has_own_memory", [True, False])
def test_weights_that_cannot_be_pinned_in_place(
    model: Model,
    x: torch.Tensor,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    has_own_memory: bool,
) -> None:
    """A refused registration is said, changes nothing, and leaves no error behind for the next kernel."""
    expected = run(copy.deepcopy(model).to(device), x)
    register = torch.cuda.cudart().cudaHostRegister

    class Refusing:
        """Passes flags on that no driver knows, so that it is the driver itself that refuses."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch._C._cudart, name)

        def cudaHostRegister(self, address: int, size: int, flags: int) -> Any:
            return register(address, size, flags if size <= 1 << 20 else 0xFFFF)

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    if not has_own_memory:
        monkeypatch.setattr("group_offload.base.device.AcceleratorBackend.empty_pinned", lambda *_: None)
    handle = apply_group_offloading(model)
    monkeypatch.undo()
    assert "inned" in caplog.text or "pin " in caplog.text
    assert (handle.stats().pinned_bytes > 0) == has_own_memory
    for _ in range(2):
        assert torch.equal(run(model, x), expected)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert not run(model, x).any()
    handle.remove()


@pytest.mark.parametrize("share", [1, 2], ids=["all", "half"])
def test_weights_come_from_the_device_and_go_back(
    share: int, model: Model, x: torch.Tensor, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is given back meanwhile, and kernels that write to weights may be on their way. Hazard: device memory
    is freed before its copy is done; or offloading from the GPU fails (diffusers #14433)."""
    resident = copy.deepcopy(model).to(device)
    tune(monkeypatch, segment_bytes=BLOCK_BYTES)
    gc.collect()
    before = torch.cuda.memory_allocated(device)
    for block in model.blocks[::share]:
        block.to(device)
    homes = {name: parameter.device for name, parameter in model.named_parameters()}
    torch.cuda._sleep(50_000_000)
    for each in (model, resident):
        with torch.no_grad():
            for parameter in each.blocks.parameters():
                parameter.mul_(1.5)
    handle = apply_group_offloading(model)
    assert torch.cuda.memory_allocated(device) <= before + (1 << 20)
    for _ in range(2):
        assert torch.equal(run(model, x), run(resident, x))
    handle.remove()
    assert {name: parameter.device for name, parameter in model.named_parameters()} == homes
    for actual, expected in zip(model.parameters(), resident.parameters(), strict=True):
        assert torch.equal(actual.to(device), expected)


@pytest.mark.parametrize("options", [{}, {"record_stream": True}, {"offload_type": "leaf_level"}], ids=str)
def test_a_steady_step_neither_waits_nor_allocates(
    model: Model, x: torch.Tensor, device: torch.device, options: dict[str, Any]
) -> None:
    gc.collect()  # models of other tests, whose memory is unlocked after a wait
    apply_group_offloading(model, **options)
    for number in range(6):
        if number == 2:
            torch.cuda._sleep(100_000_000)  # passes that the device has not begun have memory of their own
        run(model, x)
    torch.accelerator.synchronize()
    before = torch.cuda.memory_stats(device)
    with torch.profiler.profile(acc_events=True) as profiler:
        run(model, x)  # the profiler's own start
        with torch.profiler.record_function("steady"):
            run(model, x)
            run(model, x)
    events = list(profiler.events() or ())
    steady = next(e.time_range for e in events if e.name == "steady")
    names = [e.name for e in events if steady.start <= e.time_range.start <= steady.end]
    assert any(name.startswith("cudaLaunchKernel") for name in names)
    assert [n for n in names if "Synchronize" in n or n.startswith(("cudaMalloc", "cudaFree", "cudaHost"))] == []
    assert torch.cuda.memory_stats(device)["num_device_alloc"] == before["num_device_alloc"]
    for what in ("onload", "wait", "compute"):
        assert any(name.startswith(f"group_offload.{what} blocks") for name in names)


# ---------------------------------------------------------------- budgets


def forget_peak(device: torch.device) -> None:
    torch.accelerator.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)


@pytest.mark.parametrize("options", [{}, {"offload_type": "leaf_level"}, {"record_stream": True}], ids=str)
@pytest.mark.parametrize("share", [0.3, 0.6, 1.1])
@pytest.mark.parametrize("tier", ["ram", "folder", "checkpoint"])
def test_budgets(
    tier: str, share: float, options: dict[str, Any], x: torch.Tensor, device: torch.device, tmp_path: Path
) -> None:
    """The measured peak stays within the budget, what stays on the device is not sent, and the bits are the same."""
    torch.manual_seed(0)
    model = Model(24).to(torch.bfloat16).eval()
    resident = copy.deepcopy(model).to(device)
    expected = run(resident, x).cpu()
    del resident
    model, home = twin_on(tier, model, tmp_path)
    options = {**options, **home, **({"ram_budget": "auto"} if home else {})}
    forget_peak(device)
    others = torch.cuda.memory_allocated(device)
    budget = others + int(share * 24 * BLOCK_BYTES) + (64 << 20)
    handle = apply_group_offloading(model, vram_budget=budget, **options)
    sent = []
    for _ in range(8):
        before = sum(handle.stats().bytes_onloaded.values())
        assert torch.equal(run(model, x).cpu(), expected)
        sent.append(sum(handle.stats().bytes_onloaded.values()) - before)
    assert torch.cuda.max_memory_allocated(device) <= budget
    assert handle.stats().resident_bytes > 0 and sent[-1] < sent[0]
    assert "easured " in str(handle.plan) and " a forward" in str(handle.plan)
    handle.remove()
    assert torch.equal(run(model.to(device), x).cpu(), expected)


@pytest.mark.parametrize("level", ["block_level", "leaf_level"])
def test_a_checkpoint_is_pinned_in_pieces(
    level: str, model: Model, x: torch.Tensor, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces end inside of weights. The driver copies from one piece at a time."""
    expected = run(copy.deepcopy(model).to(device), x)
    lay_in_file(model, tmp_path / "model.safetensors")
    pin, pieces = AcceleratorBackend.pin, []

    def counted(self: Any, memory: torch.Tensor, undo: list[Any], *, read_only: bool = False) -> bool:
        found = pin(self, memory, undo, read_only=read_only)
        if read_only:
            pieces.append((memory.numel(), found))
        return found

    monkeypatch.setattr(AcceleratorBackend, "pin", counted)
    tune(monkeypatch, segment_bytes=5 << 20)
    handle = apply_group_offloading(model, offload_type=level)
    for _ in range(3):
        assert torch.equal(run(model, x), expected)
    assert pieces
    if all(found for _, found in pieces):  # some drivers lock no files
        assert len(pieces) > 8 * BLOCK_BYTES // (5 << 20) and max(pieces)[0] <= 5 << 20
        assert handle.stats().pinned_bytes > 8 * BLOCK_BYTES
    handle.remove()


@pytest.mark.parametrize("is_predicted", [True, False])
def test_device_memory_runs_out(
    is_predicted: bool, x: torch.Tensor, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For real: the process gets no more memory. Residents give way, before the pass or as a call is refused memory."""
    torch.manual_seed(0)
    model = Model(24).to(torch.bfloat16).eval()
    resident = copy.deepcopy(model).to(device)
    large = x.repeat(64, 1)
    expected, expected_large = run(resident, x).cpu(), run(resident, large).cpu()
    del resident
    forget_peak(device)
    handle = apply_group_offloading(model, vram_budget="80%")
    for _ in range(4):
        assert torch.equal(run(model, x).cpu(), expected)
    before = handle.stats().resident_bytes
    assert before > 0
    torch.cuda.empty_cache()
    # Room for the larger activations only without what stays: nobody told the budget.
    with no_more_than(torch.cuda.memory_reserved(device) + (32 << 20), device), monkeypatch.context() as patch:
        if not is_predicted:
            nothing_is_predicted(handle, patch)
        assert torch.equal(run(model, large).cpu(), expected_large)
        assert handle.stats().resident_bytes < before
    for _ in range(40):
        assert torch.equal(run(model, x).cpu(), expected)
    assert handle.stats().resident_bytes == before
    handle.remove()


class Convolution(nn.Module):
    """A convolution for which cuDNN wants twice as much memory as its output takes, beside a large weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(256, 256, 3, padding=1)
        self.shift = nn.Linear(256, 1 << 20, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x) + self.shift(x[:, :, 0, 0])[0, 0]


def test_a_convolution_that_got_no_workspace(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN takes another algorithm, says nothing, and remembers it: the call is repeated with what is left of residents."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Convolution() for _ in range(4))).to(torch.bfloat16).eval()
    x = torch.randn(1, 256, 512, 512, device=device, dtype=torch.bfloat16)
    expected = run(copy.deepcopy(model).to(device), x).cpu()
    forget_peak(device)
    handle = apply_group_offloading(model, vram_budget="80%")
    for _ in range(3):
        assert torch.equal(run(model, x).cpu(), expected)
    before, backend = handle.stats().resident_bytes, engine_of(handle).config.backend
    assert before > 1 << 30
    torch.cuda.empty_cache()
    refused = backend.refusals()[0]
    with no_more_than(torch.cuda.memory_reserved(device) + (400 << 20), device), monkeypatch.context() as patch:
        nothing_is_predicted(handle, patch)
        assert torch.equal(run(model, x).cpu(), expected)
        assert backend.refusals()[0] > refused and handle.stats().resident_bytes < before
    assert torch.equal(run(model, x).cpu(), expected)
    handle.remove()


def nothing_is_predicted(handle: OffloadHandle, patch: pytest.MonkeyPatch) -> None:
    """Else residents are evicted before the device refuses anything."""
    for name in ("replan", "make_room"):
        patch.setattr(engine_of(handle).placer, name, lambda kind, **_: None)


@contextmanager
def no_more_than(num_bytes: int, device: torch.device) -> Iterator[None]:
    """torch gets no more device memory than that."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(num_bytes / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


# ---------------------------------------------------------------- inputs


@pytest.mark.parametrize("pinned", [True, False], ids=["page-locked", "pageable"])
@pytest.mark.parametrize("options", [*MODES[:6], {"vram_budget": "80%"}], ids=str)
def test_an_input_that_is_filled_again(device: torch.device, options: dict[str, Any], pinned: bool) -> None:
    """A loop that uses its buffers again, and never waits for the device: each output is of what was in them then.
    Hazard: a pinned input is refilled before the device has come to its copy."""
    torch.manual_seed(0)
    model = Model(12).to(torch.bfloat16).eval()
    resident = copy.deepcopy(model).to(device)
    data = [torch.randn(8192, DIM, dtype=torch.bfloat16) for _ in range(6)]
    expected = [run(resident, each.to(device)) for each in data]
    handle = apply_group_offloading(model, **options)
    buffer = torch.empty(8192, DIM, dtype=torch.bfloat16, pin_memory=pinned)
    for _ in range(3):
        outputs = []
        for each in data:
            buffer.copy_(each)
            outputs.append(run(model, buffer))
        buffer.zero_()
        for output, wanted in zip(outputs, expected, strict=True):
            assert torch.equal(output, wanted)
    handle.remove()


@pytest.mark.parametrize("pinned", [True, False], ids=["page-locked", "pageable"])
@pytest.mark.parametrize("non_blocking", [False, True])
def test_no_forward_waits_for_compute(device: torch.device, non_blocking: bool, pinned: bool) -> None:
    """Whatever its inputs: compute that was enqueued before is still at work when all forwards are. Hazard: to keep
    inputs safe, the host waits for the device in each call."""
    if non_blocking and not pinned:
        pytest.skip("the driver waits for compute where it copies from pageable memory")
    torch.manual_seed(0)
    model = Model(4).to(torch.bfloat16).eval()
    handle = apply_group_offloading(model, non_blocking=non_blocking)
    buffer = torch.randn(4096, DIM, dtype=torch.bfloat16)
    buffer = buffer.pin_memory() if pinned else buffer
    for _ in range(4):
        run(model, buffer)
    torch.accelerator.synchronize()
    torch.cuda._sleep(4_000_000_000)  # about two seconds
    before = torch.cuda.Event()
    before.record()
    for _ in range(3):
        run(model, buffer)
    assert not before.query()
    torch.accelerator.synchronize()
    handle.remove()


# ---------------------------------------------------------------- CUDA graphs


@pytest.mark.parametrize("options", [{}, {"offload_type": "leaf_level"}, {"vram_budget": "80%"}], ids=str)
def test_a_capture_is_refused(model: Model, x: torch.Tensor, device: torch.device, options: dict[str, Any]) -> None:
    """At once, with the remedy; what was captured beside it works, and the module too. Hazard: a CUDA graph replays
    with addresses that hold other weights by then."""
    model.requires_grad_(False)
    expected = run(copy.deepcopy(model).to(device), x)
    handle = apply_group_offloading(model, **options)
    for _ in range(5):
        assert torch.equal(run(model, x), expected)
    other = nn.Linear(DIM, DIM).to(device, torch.bfloat16).requires_grad_(False)
    wanted = run(other, x)

    def capture(part: nn.Module) -> None:
        with torch.no_grad(), torch.cuda.graph(torch.cuda.CUDAGraph()):
            other(x)
            part(x)

    for part in (model, model.blocks[0]):
        with pytest.raises(StateError, match=r"captured in a CUDA graph.*remove\(\)"):
            capture(part)
        with pytest.raises(StateError, match=r"captured in a CUDA graph.*remove\(\)"):
            torch.cuda.make_graphed_callables(lambda each, part=part: part(other(each)), (x.clone(),))
        assert torch.equal(run(model, x), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = other(x)
    for _ in range(3):
        graph.replay()
        assert torch.equal(run(model, x), expected)
        assert torch.equal(captured, wanted)
    handle.remove()
    assert torch.equal(run(torch.cuda.make_graphed_callables(model.to(device), (x,)), x), expected)
    with pytest.raises(ModuleError, match="make_graphed_callables"):
        apply_group_offloading(model)
