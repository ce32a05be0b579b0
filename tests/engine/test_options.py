"""Every option: its default, what it does, and what is said where it cannot be honoured."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from docs.generated import documented, options
from group_offload import (
    ConfigError,
    DeviceError,
    GroupOffloadError,
    ModuleError,
    apply_group_offloading,
    enable_group_offload,
    remove_group_offloading,
)
from group_offload.base.device import say_that_the_cpu_computes

from ..support.asserts import assert_at_rest, assert_same, named_tensors, snapshot
from ..support.models import WIDTH, Block, Blocks, Model, RoutedModel, inputs, make
from ..support.on_device import Twins, options_for
from ..support.rigs import check, offload_to, run
from ..support.simulated import SimulatedDevice, use_simulated_device
from ..support.tuning import tune


def blob_bytes(*modules: nn.Module | torch.Tensor) -> int:
    """Each tensor takes a multiple of 256 bytes."""
    tensors = [t for m in modules for t in ([m] if isinstance(m, torch.Tensor) else [t for _, t in named_tensors(m)])]
    return sum(-(-tensor.nbytes // 256) * 256 for tensor in tensors)


# ---------------------------------------------------------------- what is refused


SIMULATED = torch.device("cpu")
"""What the simulated device stands for."""


def refused(name: str, *values: Any, **others: Any) -> list[tuple[dict[str, Any], type[Exception], str]]:
    return [({name: value, **others}, ConfigError, name) for value in values]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"use_stream": True}, DeviceError, "use_stream"),
        ({"record_stream": True}, ConfigError, "record_stream"),
        ({"record_stream": True, "use_stream": False}, ConfigError, "record_stream"),
        ({"offload_device": "nvme"}, ConfigError, "got 'nvme'. To choose the directory, pass offload_to"),
        ({"vram_budget": 8}, ConfigError, "needs a GPU, but onload_device is 'cpu'. Pass ram_budget instead."),
        ({"ram_budget": 8}, ConfigError, "ram_budget=8: that is 8 bytes. Did you mean '8GiB'?"),
        ({"onload_device": "auto"}, DeviceError, "isn't a device. Did you mean vram_budget='auto'?"),
        ({"onload_device": "8GiB"}, DeviceError, "Did you mean vram_budget='8GiB'?"),
        ({"onload_device": "mps"}, DeviceError, "onload_device='mps' isn't supported. Use 'cuda', 'xpu' or 'cpu'."),
        ({"onload_device": 3.5}, DeviceError, "onload_device=3.5 isn't a device. Use 'cuda'"),
        *(({"onload_device": name}, DeviceError, name) for name in ("nonsense", "meta", "vulkan", "cuda:99", "cpu:7")),
        *refused("offload_device", "cuda", "meta", "nonsense", None),
        *refused("offload_type", "nonsense", None, 3, ["block_level"]),
        *refused("num_blocks_per_group", 0, -1, True, "2", 1.0, 2.5),
        *refused("num_blocks_per_group", 2, True, offload_type="leaf_level"),
        *refused("block_modules", ["blocks"], offload_type="leaf_level"),
        *refused("block_modules", "blocks", [3], 3, ["nonsense"]),
        ({"block_modules": ["blocks", "blocks.1"]}, ConfigError, "blocks.1"),
        *refused("exclude_kwargs", "mask", [None], 3),
        *refused("offload_to_disk_path", 3, ["folder"], "", "a\0b"),
        *(each for name in ("non_blocking", "use_stream") for each in refused(name, 1, "yes")),
        *refused("record_stream", 1),
        *refused("low_cpu_mem_usage", "yes", None),
        *refused("interleave_forwards", 1, "yes", None),
        ({"compress": True}, ConfigError, "compress=True needs a GPU, but onload_device is 'cpu'"),
        ({"compress": "auto"}, ConfigError, "compress='auto': expected True or False"),
        ({"shard_transfers": True}, ConfigError, "needs process_group"),
        ({"shard_transfers": "yes"}, ConfigError, "expected True, False or 'auto'"),
        ({"process_group": "world"}, ConfigError, "expected a torch.distributed.ProcessGroup"),
        ({"ram_budget": "1KiB"}, ConfigError, "for Python, torch and the driver"),
        *(
            ({"onload_device": SIMULATED, **options}, ConfigError, said)
            for options, said in (
                ({"vram_budget": "1000B"}, "vram_budget=1000 B is too small for Model: its device buffers alone need"),
                ({"vram_budget": "lots"}, "'lots': it isn't an amount of memory. Use bytes, '8GiB'"),
                ({"vram_budget": "1GiB", "low_cpu_mem_usage": True}, "be combined with low_cpu_mem_usage=True"),
                ({"compress": True, "low_cpu_mem_usage": True}, "compress=True contradicts low_cpu_mem_usage=True"),
            )
        ),
    ],
    ids=str,
)
def test_option_that_cannot_be_honoured(
    options: dict[str, Any], error: type[Exception], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, device = make(Model), SimulatedDevice()
    before = snapshot(model)
    simulated = use_simulated_device(device) if options.get("onload_device") is SIMULATED else nullcontext()
    with simulated, pytest.raises(error) as caught:
        apply_group_offloading(model, **{"onload_device": "cpu", **options})
    assert said in str(caught.value)
    assert isinstance(caught.value, (GroupOffloadError, ValueError))
    assert snapshot(model) == before and not device.pinned_bytes
    assert not list(tmp_path.iterdir())
    assert_same(run(model, inputs()), run(make(Model), inputs()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
@pytest.mark.parametrize(
    ("version", "remedy"),
    [(None, "This build has no CUDA support: install one that has"), ("13.0", "Check that the driver")],
)
@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda")])
def test_device_that_is_not_there(device: Any, version: Any, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot(model := make(Model))
    monkeypatch.setattr(torch.version, "cuda", version)
    said = rf"No 'cuda(:0)?' device is available to torch .*\. {remedy}.*or pass onload_device='cpu'"
    with pytest.raises(DeviceError, match=said):
        apply_group_offloading(model, device)
    assert snapshot(model) == before


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without an accelerator")
def test_a_cpu_that_nobody_asked_for_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Hazard: torch sees no GPU, and forwards take minutes on the CPU without a word."""
    say_that_the_cpu_computes.cache_clear()
    apply_group_offloading(make(Model), "cpu")
    assert not caplog.messages
    for _ in range(2):
        apply_group_offloading(make(Model))
    (said,) = caplog.messages
    assert said.startswith("No GPU is available to torch") and said.endswith("or pass onload_device='cpu'.")


@pytest.mark.parametrize("module", [None, "model", [nn.Linear(2, 2)], nn.Linear])
def test_not_a_module(module: Any) -> None:
    for call in (apply_group_offloading, remove_group_offloading):
        with pytest.raises(
            ConfigError, match=r"torch\.nn\.Module, got .* For a pipeline, use .*, disable_group_offload\(\)"
        ):
            call(module)


@pytest.mark.parametrize("model", [nn.Identity(), nn.ModuleList([nn.ReLU()])])
def test_module_without_weights(model: nn.Module, level: str) -> None:
    before = snapshot(model)
    with pytest.raises(ModuleError, match=type(model).__name__):
        apply_group_offloading(model, "cpu", offload_type=level)
    assert snapshot(model) == before


def _quantized(*, by_channel: bool) -> torch.Tensor:
    if by_channel:
        return torch.quantize_per_channel(torch.eye(4), torch.full((4,), 0.1), torch.zeros(4), 0, torch.qint8)
    return torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint8)


UNFIT: dict[str, Callable[[], torch.Tensor]] = {
    "meta": lambda: torch.ones(3, device="meta"),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "sparse csr": lambda: torch.eye(4).to_sparse_csr(),
    "quantized": lambda: _quantized(by_channel=False),
    "by channel": lambda: _quantized(by_channel=True),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.filterwarnings("ignore:.*(quantize|Quantize|nested)")
@pytest.mark.parametrize("is_parameter", [True, False])
@pytest.mark.parametrize("kind", UNFIT)
def test_weights_that_cannot_be_offloaded(kind: str, is_parameter: bool, tmp_path: Path) -> None:
    model, tensor = make(Model), UNFIT[kind]()
    if is_parameter:
        model.blocks[2].weight = nn.Parameter(tensor, requires_grad=False)
    else:
        model.blocks[2].register_buffer("mask", tensor)
    before = snapshot(model)
    for folder, level in ((None, "leaf_level"), (tmp_path / "groups", "block_level")):
        with pytest.raises(ModuleError, match=r"blocks\.2\."):
            offload_to(folder, model, level)
        assert snapshot(model) == before
    assert not list(tmp_path.rglob("*.safetensors"))


# ---------------------------------------------------------------- defaults and signature


def test_signature_is_that_of_diffusers() -> None:
    """Hazard: a program's arguments by position become other options here, or docs promise that all mean the same."""
    hooks = pytest.importorskip("diffusers.hooks")
    theirs = inspect.signature(hooks.apply_group_offloading).parameters
    ours = inspect.signature(apply_group_offloading).parameters
    added = [name for name, parameter in ours.items() if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    assert [*ours] == [*theirs, *added]
    assert all(ours[name].kind == parameter.kind for name, parameter in theirs.items())
    for name, parameter in theirs.items():
        if parameter.default is not inspect.Parameter.empty and name not in ("offload_device", "use_stream"):
            default = parameter.default.value if isinstance(parameter.default, Enum) else parameter.default
            assert ours[name].default == default, name
    assert torch.device(ours["offload_device"].default) == torch.device(theirs["offload_device"].default)
    api = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    assert re.search(r"Two options differ from diffusers\.\s`record_stream` [^.]+\s`low_cpu_mem_usage` ", api)


def test_signatures_of_one_definition() -> None:
    """Every call takes the options of the others, with the same types and defaults."""
    model = inspect.signature(apply_group_offloading).parameters
    pipeline = inspect.signature(enable_group_offload).parameters
    assert [*pipeline][1:] == [*[*model][1:10], "exclude_modules", "model_options", *[*model][-8:]]
    for name in pipeline.keys() & model.keys():
        # A pipeline fills the device by itself, and shares passes where that pays.
        default = "auto" if name in ("vram_budget", "interleave_forwards") else model[name].default
        assert pipeline[name] == model[name].replace(default=default), name


@pytest.mark.parametrize("call", [apply_group_offloading, enable_group_offload])
def test_unknown_options(call: Any) -> None:
    before = snapshot(model := make(Model))
    with pytest.raises(TypeError, match=rf"{call.__name__}\(\) got an unexpected keyword argument 'use_streams'"):
        call(model, use_streams=True)
    with pytest.raises(TypeError, match=r"argument 'vram_budjet'\. Did you mean 'vram_budget'\?"):
        call(model, vram_budjet="8GiB")
    with pytest.raises(TypeError, match=rf"{call.__name__}\(\) missing a required argument"):
        call()
    with pytest.raises(TypeError, match=rf"{call.__name__}\(\) multiple values for argument 'onload_device'"):
        call(model, "cpu", onload_device="cpu")
    assert snapshot(model) == before


def test_every_option_is_documented() -> None:
    """And so it is in the table of docs/api.md, which is made of the docstring (tests/test_docs.py compares the two)."""
    parameters = inspect.signature(apply_group_offloading).parameters
    assert documented(apply_group_offloading).keys() == parameters.keys()
    listed = re.findall(r"^\| `(\w+)` \| .+ \| .+ \|$", options(apply_group_offloading), re.MULTILINE)
    assert {*listed} == {*parameters} - {"module"}


def test_spellings_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("a", Path("a"), str(tmp_path / "a"), "~/a"):
        model = make(Model)
        handle = apply_group_offloading(model, "cpu", offload_to_disk_path=value)
        assert handle.config.offload_to_disk_path == tmp_path / "a"
        monkeypatch.chdir("/")
        check(model, make(Model), inputs(), passes=1)
        monkeypatch.chdir(tmp_path)
    assert len(list((tmp_path / "a").glob("*.safetensors"))) == 5


# ---------------------------------------------------------------- groups


@pytest.mark.parametrize(
    ("count", "expected"), [(2, ["down_0_1", "down_2_2", "up_0_1", "up_2_3", "up_4_4"]), (100, ["down_0_2", "up_0_4"])]
)
def test_blocks_per_group(count: int, expected: list[str], tmp_path: Path) -> None:
    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = (nn.ModuleList(Block() for _ in range(number)) for number in (3, 5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in (*self.down, *self.up):
                x = block(x)
            return x

    model, reference = make(Uneven), make(Uneven)
    handle = offload_to(tmp_path, model, num_blocks_per_group=count)
    assert [group.group_id for group in handle.groups if group.num_bytes] == expected
    check(model, reference, inputs())
    assert handle.stats().onloads == 3 * len(expected)


class Coder(Blocks):
    def __init__(self) -> None:
        super().__init__(Block(), Block())
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.stem(x) * self.scale)


class Nested(nn.Module):
    """Blocks below children, as an autoencoder has them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Coder(), Coder()
        self.layers = nn.ModuleList([Block()])
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layers[0](self.decoder(self.encoder(x))))


@pytest.mark.parametrize("by", ["the call", "the class"])
@pytest.mark.parametrize("blocks", [["encoder", "decoder"], ["decoder"], ["encoder", "blocks"], []])
def test_block_modules(blocks: list[str], by: str, tmp_path: Path) -> None:
    model = make(
        type("Named", (Nested,), {"_group_offload_block_modules": blocks if by == "the class" else ["layers"]})
    )
    reference = copy.deepcopy(model)
    given = {} if by == "the class" else {"block_modules": blocks}
    ids = {group.group_id for group in offload_to(tmp_path, model, **given).groups if group.num_bytes}
    for name in ("encoder", "decoder"):
        assert (f"{name}.blocks_0_0" in ids) == (name in blocks) or "blocks" in blocks
    assert "layers_0_0" in ids
    check(model, reference, inputs())
    assert_same(run(model.decoder, inputs()), run(reference.decoder, inputs()))
    assert_at_rest(model, reference)


def test_a_large_part_around_blocks_is_cut_into_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all of it stays on the device for the length of a forward, as MiniMax-H3's token refiner did."""
    for largest, is_cut in ((1 << 20, False), (1 << 10, True)):
        tune(monkeypatch, largest_rest_bytes=largest)
        model = make(Nested)
        ids = {group.group_id for group in apply_group_offloading(model, "cpu").groups}
        assert ("encoder.blocks_0_0" in ids) == ("decoder.blocks_0_0" in ids) == is_cut and "layers_0_0" in ids
        check(model, make(Nested), inputs())


# ---------------------------------------------------------------- what the handle tells


def test_table_names_every_group(tier: str, level: str, folder: Path | None) -> None:
    """A summary of groups, bytes and devices (diffusers #14702)."""
    before = snapshot(model := make(Model))
    handle = offload_to(folder, model, level)
    assert sum(group.num_tensors for group in handle.groups) == len(list(model.parameters()))
    assert sum(group.num_bytes for group in handle.groups) == blob_bytes(model)
    assert {group.tier for group in handle.groups} == {tier} and handle.module is model
    lines = str(handle).splitlines()
    assert lines[0].split() == ["group", "tensors", "size", "stored", "in"]
    for line, group in zip(lines[2:-2], handle.groups, strict=True):
        assert line.startswith(group.group_id) and line.rstrip().endswith(group.location)
    assert "Model: " in lines[-1] and "computed on cpu" in lines[-1] and "Model" in repr(handle)
    handle.remove()
    assert "removed" in str(handle) and not handle.is_active
    remove_group_offloading(model)  # does nothing to other modules
    assert snapshot(model) == before
    del model, before
    assert "its model is gone" in repr(handle)


def test_layers_are_in_the_order_of_registration() -> None:
    """Hazard: norms come after all linear layers, and the first forward, which guesses by this order, stalls at each."""
    model = nn.Sequential(*[each for _ in range(3) for each in (nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))])
    handle = apply_group_offloading(model, offload_type="leaf_level")
    assert [group.group_id for group in handle.groups] == ["0", "1", "2", "3", "4", "5"]
    handle.remove()


def test_statistics_of_blocks(tier: str, folder: Path | None) -> None:
    model = make(Model)
    handle = offload_to(folder, model)
    block = blob_bytes(model.blocks[0])
    rest = blob_bytes(model.proj_in, model.norm, model.gain)
    empty = handle.stats()
    assert (empty.forward_passes, empty.onloads, empty.copies, empty.stalls, empty.peak_device_bytes) == (0, 0, 0, 0, 0)
    for passes in range(1, 4):
        run(model, inputs())
        stats = handle.stats()
        # The blocks take turns. Nothing takes the slot of what the root holds: it is read once. In RAM nothing moves.
        is_read = int(tier == "disk")
        assert stats.forward_passes == passes and stats.onloads == stats.copies == is_read * (4 * passes + 1)
        assert stats.stalls == stats.onloads  # nothing is predicted without a stream
        num_bytes = is_read * (passes * 4 * block + rest)
        assert stats.bytes_onloaded[tier] == num_bytes == sum(stats.bytes_onloaded.values())
        # One slot for blocks, one for what the root holds meanwhile.
        assert stats.peak_device_bytes == is_read * (block + rest)
        assert (stats.tensors_copied_back, stats.rebuilds, stats.pinned_bytes, stats.staging_bytes) == (0, 0, 0, 0)
        assert (stats.host_bytes, stats.file_bytes)[:: 1 if tier == "ram" else -1] == (4 * block + rest, 0)
    assert len(str(stats).splitlines()) == 2 + len(fields(stats))
    assert re.search(r"^(host|peak_device)_bytes +\d.*iB \(\d+ B\)$", str(stats), re.MULTILINE)
    assert all(f"<td>{field.name}</td>" in stats._repr_html_() for field in fields(stats))


def test_weights_in_ram_are_used_in_place_on_the_cpu() -> None:
    """Also those that a hook casts for each call: what it casts back is let go again, and the weight reads its place."""
    hooks = pytest.importorskip("diffusers.hooks")
    model, reference = (
        make(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU()) for _ in range(3))))
        for _ in "ab"
    )
    for each in (model, reference):
        hooks.apply_layerwise_casting(each, torch.bfloat16, torch.float32, skip_modules_pattern=())
    handle = offload_to(None, model, "leaf_level")
    at_rest = [tensor.data_ptr() for tensor in model.parameters()]
    used = []
    model[2][1].register_forward_hook(lambda *_: used.extend(tensor.data_ptr() for tensor in model[0].parameters()))
    for number in range(3):
        assert torch.equal(run(model, inputs(number)), run(reference, inputs(number)))
        assert [tensor.data_ptr() for tensor in model.parameters()] == at_rest
    assert used == 3 * at_rest[:2]
    stats = handle.stats()
    assert (stats.copies, stats.onloads, stats.peak_device_bytes, stats.rebuilds) == (0, 0, 0, 0)
    handle.remove()


@pytest.mark.parametrize(
    "options", [{}, {"in_files": True}, {"offload_type": "leaf_level"}, {"use_stream": False}], ids=str
)
def test_a_profile_names_the_groups(options: dict[str, Any]) -> None:
    """Hazard: nobody can tell which block compute waits for (diffusers #14702)."""
    with (
        use_simulated_device(SimulatedDevice(0, "lazy")) as device,
        options_for(options) as options,
        Twins(device, RoutedModel([16, 24, 16, 16]), **options) as twins,
    ):
        twins.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
            twins.step()
            twins.step()  # the first one began to load what it needs first before
        # What is in no block is small here, and stays on the device.
        groups = {group.group_id for group in twins.handle.groups if group.num_bytes}
        found = [event.name for event in profile.events() or () if event.name.startswith("group_offload.")]
        ranges = [name.removeprefix("group_offload.").split(" ") for name in found]
        for what in ("onload", "wait", "compute"):
            names = {name for kind, *names in ranges if kind == what for name in names}
            stays = {name for name in groups if "unmatched" in name and what != "compute"}
            assert groups - stays <= names <= groups, what
