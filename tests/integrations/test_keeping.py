"""`from_pretrained` with a quantisation config: quantised weight by weight, and kept in the folder for the next start.

The reference is always the model that the library itself quantises.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, FluxTransformer2DModel
from diffusers.quantizers import PipelineQuantizationConfig
from torch import nn

import group_offload.integrations.keeping as keeping
from group_offload import ConfigError, GroupFileError
from group_offload.api import handle_of
from group_offload.integrations.opening import from_pretrained

from ..support import tiny_models as tiny
from ..support.asserts import assert_same, named_tensors, same_bits
from ..support.quantiser import RowsConfig, RowsLinear, RowsQuantiser
from ..support.rigs import run

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture
def flux(tmp_path: Path) -> Path:
    """A transformer, in float32."""
    tiny.flux_transformer().save_pretrained(tmp_path / "flux")
    return tmp_path / "flux"


@pytest.fixture(autouse=True)
def _count_anew() -> None:
    RowsQuantiser.made.clear()


def open_(path: Any, folder: Path | None = None, model_class: Any = FluxTransformer2DModel, **options: Any) -> Any:
    options = {"quantization_config": RowsConfig(), "dtype": BF16, **options}
    return from_pretrained(model_class, path, onload_device=tiny.device(), offload_to_disk_path=folder, **options)


def load(path: Any, model_class: Any = FluxTransformer2DModel, **options: Any) -> Any:
    options = {"quantization_config": RowsConfig(), "dtype": BF16, **options}
    found = model_class.from_pretrained(path, **options)
    RowsQuantiser.made.clear()
    return found


def assert_is(opened: nn.Module, reference: nn.Module) -> None:
    expected, actual = dict(named_tensors(reference)), dict(named_tensors(opened))
    assert list(actual) == list(expected)
    for name, tensor in actual.items():
        assert same_bits(tensor, expected[name].cpu()), f"{name}: {tensor.dtype} for {expected[name].dtype}"
        assert tensor.requires_grad == expected[name].requires_grad, name
    assert [type(part) for part in opened.modules()] == [type(part) for part in reference.modules()]
    assert opened.dtype == reference.dtype and opened.training == reference.training
    assert opened.config["_name_or_path"] == reference.config["_name_or_path"]  # type: ignore[index]
    assert opened.config["quantization_config"].quant_method == "rows"  # type: ignore[index]


def kept_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("quantised_*"))


def bytes_in(place: Path) -> dict[str, tuple[bytes, int]]:
    return {file.name: (file.read_bytes(), file.stat().st_ino) for file in place.iterdir()}


# ------------------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_bits_are_those_of_the_librarys_own_quantised_model(dtype: torch.dtype, flux: Path, tmp_path: Path) -> None:
    reference = load(flux, dtype=dtype)
    inputs = tiny.flux_inputs() if dtype == FP32 else None
    for folder in (None, tmp_path / "files", tmp_path / "files"):
        opened = open_(flux, folder, dtype=dtype)
        assert_is(opened, reference)
        if inputs is not None:
            assert_same(run(opened, **inputs), run(reference.to(tiny.device()), **inputs))


def test_the_second_start_quantises_nothing(flux: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "files"
    first = open_(flux, folder)
    num_made = len(RowsQuantiser.made)
    assert num_made == len(set(RowsQuantiser.made)) == sum(isinstance(part, RowsLinear) for part in first.modules())
    (place,) = kept_in(folder)
    before = bytes_in(place)
    with caplog.at_level(logging.INFO, logger="group_offload"):
        second = open_(flux, folder)
    assert len(RowsQuantiser.made) == num_made
    assert "was quantised before" in caplog.text
    assert bytes_in(place) == before
    assert_is(second, first)
    for model in (first, second):
        handle = handle_of(model)
        assert handle is not None and handle.stats().host_bytes == 0  # views of the kept checkpoint
        assert {group.where for group in handle.groups if group.num_bytes} == {"diffusion_pytorch_model.safetensors"}
    assert not list(folder.glob("group_*.safetensors"))


def test_what_is_kept_is_a_checkpoint_of_the_library(flux: Path, tmp_path: Path) -> None:
    open_(flux, tmp_path / "files")
    (place,) = kept_in(tmp_path / "files")
    loaded = FluxTransformer2DModel.from_pretrained(place, dtype=BF16)
    for name, tensor in named_tensors(load(flux)):  # diffusers rounds scales that it loads to the dtype
        expected = tensor.bfloat16().float() if name.endswith(".scale") else tensor
        assert same_bits(loaded.get_parameter(name), expected)


def test_loading_info(flux: Path, tmp_path: Path) -> None:
    for _ in range(2):
        opened, info = open_(flux, tmp_path / "files", output_loading_info=True)
        assert info["missing_keys"] == [] and handle_of(opened) is not None


def test_nothing_is_left_behind(flux: Path, tmp_path: Path) -> None:
    """The libraries' methods are as before, and other threads are not concerned."""
    from diffusers import ModelMixin
    from diffusers.quantizers.auto import DiffusersAutoQuantizer

    before = [
        ModelMixin.__dict__["from_pretrained"],
        DiffusersAutoQuantizer.__dict__["from_config"],
        RowsQuantiser.__dict__["create_quantized_param"],
        RowsQuantiser.__dict__.get("update_device_map"),
    ]
    there: list[Any] = []

    class Meddling(RowsConfig):
        def to_dict(self) -> dict[str, Any]:
            if not there:
                thread = threading.Thread(target=lambda: there.append(load(flux)))
                there.append("on its way")
                thread.start()
                thread.join()
            return super().to_dict()

    open_(flux, tmp_path / "files", quantization_config=Meddling())
    assert len(kept_in(tmp_path / "files")) == 1 and len(there) == 2
    assert_is(there[1], load(flux))
    assert before == [
        ModelMixin.__dict__["from_pretrained"],
        DiffusersAutoQuantizer.__dict__["from_config"],
        RowsQuantiser.__dict__["create_quantized_param"],
        RowsQuantiser.__dict__.get("update_device_map"),
    ]


def test_two_threads_at_once(flux: Path, tmp_path: Path) -> None:
    before = RowsQuantiser.__dict__["create_quantized_param"]
    reference, opened = load(flux), []
    threads = [
        threading.Thread(target=lambda part=part: opened.append(open_(flux, part and tmp_path / part)))
        for part in ("one", "two", None, "one")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 4 and RowsQuantiser.__dict__["create_quantized_param"] is before
    for model in opened:
        assert_is(model, reference)


def test_pipelines(tmp_path: Path) -> None:
    tiny.flux_pipeline().save_pretrained(tmp_path / "pipe")
    config = PipelineQuantizationConfig(quant_mapping={"transformer": RowsConfig()})
    reference = load(tmp_path / "pipe", DiffusionPipeline, quantization_config=config)
    for number in range(2):
        RowsQuantiser.made.clear()
        opened = open_(tmp_path / "pipe", tmp_path / "files", DiffusionPipeline, quantization_config=config)
        assert_is(opened.transformer, reference.transformer)
        assert bool(RowsQuantiser.made) == (number == 0)
        assert handle_of(opened.text_encoder_2) is not None
        assert len(kept_in(tmp_path / "files")) == 1


def test_a_folder_for_one_part(tmp_path: Path) -> None:
    tiny.flux_pipeline().save_pretrained(tmp_path / "pipe")
    options = {"model_options": {"transformer": {"offload_to_disk_path": tmp_path / "files"}}}
    config = PipelineQuantizationConfig(quant_mapping={"transformer": RowsConfig()})
    open_(tmp_path / "pipe", None, DiffusionPipeline, quantization_config=config, **options)
    assert len(kept_in(tmp_path / "files")) == 1


def test_a_quantised_checkpoint_is_opened_in_place(flux: Path, tmp_path: Path) -> None:
    load(flux).save_pretrained(tmp_path / "quantised")
    opened = open_(tmp_path / "quantised", tmp_path / "files", quantization_config=None)
    handle = handle_of(opened)
    assert handle is not None and handle.stats().host_bytes == 0
    assert not RowsQuantiser.made and not kept_in(tmp_path / "files")
    reference = FluxTransformer2DModel.from_pretrained(tmp_path / "quantised", dtype=BF16)
    for name, tensor in named_tensors(reference):
        assert same_bits(opened.get_parameter(name), tensor)


# ------------------------------------------------------------------------------------------------ whose it is


def _touch(flux: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    os.utime(flux / "diffusion_pytorch_model.safetensors")
    return {}


def _other_weights(flux: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    before = (flux / "diffusion_pytorch_model.safetensors").stat()
    tiny.flux_transformer(seed=9).save_pretrained(flux)
    os.utime(flux / "diffusion_pytorch_model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))
    return {}


def _other_version(flux: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    real = keeping.version
    patch.setattr(keeping, "version", lambda name: "999" if name == "torch" else real(name))
    return {}


CHANGES: dict[str, Callable[[Path, pytest.MonkeyPatch], dict[str, Any]]] = {
    "touched": _touch,
    "other weights": _other_weights,
    "another version": _other_version,
    "another config": lambda flux, patch: {"quantization_config": RowsConfig(levels=7)},
    "another dtype": lambda flux, patch: {"dtype": FP32},
}


@pytest.mark.parametrize("change", CHANGES)
def test_anything_else_is_quantised_anew(
    change: str, flux: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_(flux, tmp_path / "files")
    before = {name: tensor.clone() for name, tensor in named_tensors(first)}
    options = CHANGES[change](flux, monkeypatch)
    RowsQuantiser.made.clear()
    opened = open_(flux, tmp_path / "files", **options)
    assert RowsQuantiser.made
    assert_is(opened, load(flux, **options))
    # What was asked for differently is kept beside; a result that is out of date is replaced.
    assert len(kept_in(tmp_path / "files")) == (2 if options else 1)
    for name, tensor in named_tensors(first):  # the model that is open has its files still
        assert same_bits(tensor, before[name])
    RowsQuantiser.made.clear()
    assert_is(open_(flux, tmp_path / "files", **options), load(flux, **options))
    assert not RowsQuantiser.made


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (_cut, "diffusion_pytorch_model.safetensors"),
        (_flip, "diffusion_pytorch_model.safetensors"),
        (Path.unlink, "config.json"),
        (_cut, "quantised.json"),
    ],
)
def test_a_damaged_result_is_not_used(damage: Callable[[Path], None], name: str, flux: Path, tmp_path: Path) -> None:
    opened = open_(flux, tmp_path / "files")
    (place,) = kept_in(tmp_path / "files")
    del opened
    damage(place / name)
    RowsQuantiser.made.clear()
    opened = open_(flux, tmp_path / "files")
    assert RowsQuantiser.made
    assert_is(opened, load(flux))
    assert kept_in(tmp_path / "files") == [place]


def test_every_byte_is_compared_with_verify_files(flux: Path, tmp_path: Path) -> None:
    open_(flux, tmp_path / "files")
    (place,) = kept_in(tmp_path / "files")
    file = place / "diffusion_pytorch_model.safetensors"
    facts = file.stat()
    _flip(file)
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    RowsQuantiser.made.clear()
    assert_is(open_(flux, tmp_path / "files", verify_files=True), load(flux))
    assert len(kept_in(tmp_path / "files")) == 1


def test_a_copy_of_the_folder_is_as_good(flux: Path, tmp_path: Path) -> None:
    open_(flux, tmp_path / "files")
    shutil.copytree(tmp_path / "files", tmp_path / "moved", copy_function=shutil.copyfile)  # with other times
    RowsQuantiser.made.clear()
    assert_is(open_(flux, tmp_path / "moved"), load(flux))
    assert not RowsQuantiser.made


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_another_users_result_is_not_used(flux: Path, tmp_path: Path) -> None:
    open_(flux, tmp_path / "files")
    (place,) = kept_in(tmp_path / "files")
    os.chown(place / "diffusion_pytorch_model.safetensors", 12345, 12345)
    RowsQuantiser.made.clear()
    assert_is(open_(flux, tmp_path / "files", verify_files=True), load(flux))
    RowsQuantiser.made.clear()
    open_(flux, tmp_path / "files")
    assert RowsQuantiser.made


# ------------------------------------------------------------------------------------------------ faults


def test_an_option_that_cannot_be_compared(flux: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody knows whether it is the same in another process."""
    for _ in range(2):
        RowsQuantiser.made.clear()
        opened = open_(flux, tmp_path / "files", strange=object())
        assert RowsQuantiser.made
    assert not kept_in(tmp_path / "files") and "has no to_dict" in caplog.text
    handle = handle_of(opened)
    assert handle is not None and handle.stats().host_bytes == 0  # in group files, as any other model


@pytest.mark.parametrize("fault", ["cannot save", "raises", "saves something else", "cannot open"])
def test_what_the_library_cannot_keep(
    fault: str, flux: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reference = load(flux)
    real = FluxTransformer2DModel.save_pretrained
    if fault == "cannot save":
        monkeypatch.setattr(RowsQuantiser, "is_serializable", False)
    elif fault == "raises":

        def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
            raise ValueError("no format for that")

        monkeypatch.setattr(FluxTransformer2DModel, "save_pretrained", refuse)
    elif fault == "saves something else":

        def spoil(self: Any, place: Path, **kwargs: Any) -> None:
            real(self, place, **kwargs)
            _flip(place / "diffusion_pytorch_model.safetensors")

        monkeypatch.setattr(FluxTransformer2DModel, "save_pretrained", spoil)
    else:
        monkeypatch.setattr(
            FluxTransformer2DModel, "save_pretrained", lambda self, place: (place / "config.json").write_text("{}")
        )
    opened = open_(flux, tmp_path / "files")
    assert_is(opened, reference)
    assert not kept_in(tmp_path / "files")
    assert "cannot be kept quantised, and is quantised again at the next start" in caplog.text
    handle = handle_of(opened)
    assert handle is not None and handle.stats().host_bytes == 0


@pytest.mark.parametrize("moment", ["known before", "while it is written"])
def test_a_full_drive(moment: str, flux: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {file.name: file.read_bytes() for file in flux.iterdir()}
    with monkeypatch.context() as patch:
        if moment == "known before":
            usage = shutil.disk_usage(tmp_path)
            patch.setattr(keeping.shutil, "disk_usage", lambda path: usage._replace(free=1000))
        else:

            def fill(self: Any, place: Path) -> None:
                (place / "config.json").write_text("{}")
                raise OSError(errno.ENOSPC, "No space left on device")

            patch.setattr(FluxTransformer2DModel, "save_pretrained", fill)
        with pytest.raises(GroupFileError, match=r"Cannot keep the quantised model .* prune"):
            open_(flux, tmp_path / "files")
    assert not kept_in(tmp_path / "files")
    assert {file.name: file.read_bytes() for file in flux.iterdir()} == before
    assert_is(open_(flux, tmp_path / "files"), load(flux))


def test_a_checkpoint_that_changes_meanwhile(flux: Path, tmp_path: Path) -> None:
    class Changing(RowsConfig):
        num_asked = 0

        def to_dict(self) -> dict[str, Any]:
            Changing.num_asked += 1
            if Changing.num_asked == 2:
                os.utime(flux / "diffusion_pytorch_model.safetensors")
            return super().to_dict()

    with pytest.raises(GroupFileError, match=r"changed .* while it was being quantised"):
        open_(flux, tmp_path / "files", quantization_config=Changing())
    assert not kept_in(tmp_path / "files")
    assert_is(open_(flux, tmp_path / "files"), load(flux))


@pytest.mark.parametrize("place", ["create_quantized_param", "save_pretrained", "publish_anew"])
def test_an_interrupt(place: str, flux: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def strike(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    owner: Any = {"create_quantized_param": RowsQuantiser, "save_pretrained": FluxTransformer2DModel}.get(
        place, keeping
    )
    with monkeypatch.context() as patch:
        patch.setattr(owner, place, strike)
        with pytest.raises(KeyboardInterrupt):
            open_(flux, tmp_path / "files")
    assert not kept_in(tmp_path / "files")
    assert_is(open_(flux, tmp_path / "files"), load(flux))
    assert len(kept_in(tmp_path / "files")) == 1


def test_a_process_that_is_killed(flux: Path, tmp_path: Path) -> None:
    """What it left has no identity, and is written anew."""
    open_(flux, tmp_path / "files")
    (place,) = kept_in(tmp_path / "files")
    (place / "quantised.json").unlink()
    _cut(place / "diffusion_pytorch_model.safetensors")
    (place / "diffusion_pytorch_model-00001-of-00002.safetensors").write_bytes(b"half of it")
    RowsQuantiser.made.clear()
    assert_is(open_(flux, tmp_path / "files"), load(flux))
    assert not (place / "diffusion_pytorch_model-00001-of-00002.safetensors").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_to(flux: Path, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir(mode=0o555)
    with pytest.raises(GroupFileError, match="Cannot keep the quantised model"):
        open_(flux, tmp_path / "files")


def test_a_file_in_place_of_the_folder(flux: Path, tmp_path: Path) -> None:
    (tmp_path / "files").write_text("")
    with pytest.raises(GroupFileError, match="Cannot keep the quantised model"):
        open_(flux, tmp_path / "files")


def test_accelerate_may_not_place_weights(flux: Path) -> None:
    with pytest.raises(ConfigError, match="device_map"):
        open_(flux, device_map="auto")


# ------------------------------------------------------------------------------------------------ memory


MEASURE = """
import gc, json, os, sys, threading
from pathlib import Path
import torch
from diffusers import FluxTransformer2DModel
from group_offload.base.mapping import cached_bytes, flat_view, map_file
from group_offload.integrations.opening import from_pretrained
from tests.support.quantiser import RowsConfig, RowsQuantiser
torch.set_num_threads(1)
folder = Path(sys.argv[1])

def in_ram():
    lines = open("/proc/self/status").read().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon", "RssShmem")))

def peak_of(call):
    before = in_ram()
    peak, is_done = [before], threading.Event()
    def watch():
        while not is_done.wait(0.003):
            peak[0] = max(peak[0], in_ram())
    thread = threading.Thread(target=watch)
    thread.start()
    model = call()
    is_done.set()
    thread.join()
    return max(peak[0], in_ram()) - before

def in_page_cache(place):
    found = 0
    for file in place.rglob("*.safetensors"):
        fd, size = os.open(file, os.O_RDONLY), file.stat().st_size
        mapping = map_file(fd, size)
        found += cached_bytes(flat_view(mapping, 0, size).data_ptr(), size)
        os.close(fd)
    return found

def read_by_calls():
    return int(open("/proc/self/io").read().split()[1])

def header_bytes(place):
    return sum(8 + int.from_bytes(open(file, "rb").read(8), "little") for file in place.rglob("*.safetensors"))

def read_ahead_with_headers(place):
    # The system reads on behind a header, which is read first.
    found = 0
    for file in place.rglob("*.safetensors"):
        fd, size = os.open(file, os.O_RDONLY), file.stat().st_size
        mapping = map_file(fd, size)
        start = flat_view(mapping, 0, size).data_ptr()
        found += next((at for at in range(0, size, 4096) if not cached_bytes(start + at, 1)), size)
        os.close(fd)
    return found

def drop(place):
    gc.collect()  # so do pages that are mapped
    for file in place.rglob("*.safetensors"):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)  # pages that are still to be written stay
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)

def ours(where, name="model"):
    return from_pretrained(FluxTransformer2DModel, folder / name, onload_device="cpu", torch_dtype=torch.bfloat16,
                           quantization_config=RowsConfig(), offload_to_disk_path=where)

ours(folder / "first", "tiny")  # what is made once
peaks = {"first": peak_of(lambda: ours(folder / "files"))}
RowsQuantiser.made.clear()
model = []
drop(folder / "files")
unread, calls = in_page_cache(folder / "files"), read_by_calls()
model.append(ours(folder / "files"))
peaks["called"] = read_by_calls() - calls
peaks["read"], peaks["unread"] = in_page_cache(folder / "files") - unread, unread
peaks["ahead"] = read_ahead_with_headers(folder / "files")
peaks["headers"] = header_bytes(folder / "files") + header_bytes(folder / "model")
peaks["json"] = sum(file.stat().st_size for place in ("files", "model") for file in (folder / place).rglob("*.json"))
peaks["tensors"] = len(model[0].state_dict())
drop(folder / "files")
peaks["second"] = peak_of(lambda: model.append(ours(folder / "files")))
peaks["made"] = len(RowsQuantiser.made)
size = sum(weight.nbytes for weight in model[0].parameters())
group = max(sum(weight.nbytes for weight in block.parameters()) for block in model[0].transformer_blocks)
model.clear()
peaks["RAM"] = peak_of(lambda: ours(None))
print(json.dumps({**peaks, "size": size, "group": group}))
"""


def test_ram_is_the_quantised_size_and_two_groups(tmp_path: Path) -> None:
    options = {"attention_head_dim": 64, "num_attention_heads": 8, "joint_attention_dim": 512}
    options |= {"pooled_projection_dim": 64, "axes_dims_rope": [16, 24, 24]}
    model = FluxTransformer2DModel(num_layers=1, num_single_layers=8, **options)
    loaded = sum(weight.nbytes for weight in model.parameters())
    model.save_pretrained(tmp_path / "model", max_shard_size="100MB")
    FluxTransformer2DModel(num_layers=1, num_single_layers=1, **options).save_pretrained(tmp_path / "tiny")
    del model
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURE), str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert loaded > 140 << 20 and found["size"] < loaded // 3
    most = found["size"] + 2 * found["group"] + (30 << 20)  # the bytes that the process and the hash take
    assert found["first"] < most and found["RAM"] < most, found
    assert found["made"] == 0 and found["second"] < 16 << 20, found
    # The second start reads headers, and a page of each weight, which loaders touch.
    assert found["unread"] == 0, "the kept model was not dropped from the page cache"
    assert found["called"] < found["headers"] + found["json"] + (1 << 20), (
        found
    )  # with what the system says of the process
    assert found["read"] - found["ahead"] <= 4096 * found["tensors"] and found["ahead"] < found["size"] // 2, found
