"""The commands `plan` and `bench`, and the groups that a checkpoint's class is cut into."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import socket
import stat
import struct
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from group_offload import ConfigError, GroupFileError, apply_group_offloading
from group_offload.cli import arguments as cli_arguments
from group_offload.cli import bench as cli_bench
from group_offload.cli import main as cli
from group_offload.cli.arguments import find_checkpoint
from group_offload.cli.outline import Entry, _entries_in, outline
from group_offload.plan import speeds

from ..support import tiny_models
from ..support.pages import Page
from ..support.speeds import SIZES, SPEEDS
from ..support.terminal import Terminal

MIB, GIB = 1 << 20, 1 << 30


class Model(nn.Module):
    """A class of a library, whose config has the names and the bytes of its weights."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> nn.Module:
        return cls.tree(config["sizes"])

    @classmethod
    def tree(cls, sizes: Mapping[str, int]) -> nn.Module:
        below: dict[str, dict[str, int]] = {}
        for fqn, size in sizes.items():
            name, _, rest = fqn.partition(".")
            below.setdefault(name, {})[rest] = size
        module = nn.ModuleList() if all(map(str.isdigit, below)) else cls()
        for name, inside in below.items():
            if "" in inside:
                module.register_parameter(name, nn.Parameter(torch.empty(inside[""] // 2, dtype=torch.bfloat16)))
            else:
                module.add_module(name, cls.tree(inside))
        return module

    def forward(self) -> None:
        """Blocks without a forward would count as parts of what uses them."""


class T5EncoderModel(Model):
    pass


@pytest.fixture(autouse=True)
def _classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffusers, "Model", Model, raising=False)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(capsys)


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def write(path: Path, sizes: Mapping[str, int], dtype: str = "BF16") -> Path:
    """A safetensors file with tensors of so many bytes, which are a hole."""
    entries, end = {}, 0
    for name, size in sizes.items():
        entries[name] = {"dtype": dtype, "shape": [size // SIZES_OF_DTYPES[dtype]], "data_offsets": [end, end + size]}
        end += size
    return write_header(path, entries, end)


def write_header(path: Path, entries: object, num_bytes: int) -> Path:
    text = json.dumps(entries).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + num_bytes)
    return path


def write_model(folder: Path, sizes: Mapping[str, int], dtype: str = "BF16", **config: object) -> Path:
    """The folder of a `Model`, whose weights are a hole."""
    write(folder / "diffusion_pytorch_model.safetensors", sizes, dtype)
    (folder / "config.json").write_text(json.dumps({"_class_name": "Model", "sizes": sizes, **config}))
    return folder


def blocks(name: str, num: int, num_bytes: int) -> dict[str, int]:
    return {f"{name}.{number}.linear.weight": num_bytes for number in range(num)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """10 GiB in 20 blocks, and 64 MiB around them."""
    sizes = {"proj_in.weight": 64 * MIB, **blocks("blocks", 20, GIB // 2)}
    return write_model(tmp_path / "transformer", sizes, rope=0.5)


@pytest.fixture
def pipeline(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(diffusers, "T5EncoderModel", T5EncoderModel, raising=False)
    encoder = tmp_path / "text_encoder"
    sizes = {"shared.weight": 64 * MIB, **blocks("encoder.block", 8, GIB // 2)}
    write(encoder / "model.safetensors", sizes)
    (encoder / "config.json").write_text(json.dumps({"architectures": ["T5Model"], "sizes": sizes}))
    (tmp_path / "scheduler").mkdir()
    parts = {
        "_class_name": "Pipeline",
        "transformer": ["diffusers", "Model"],
        "text_encoder": ["diffusers", "T5EncoderModel"],
        "scheduler": ["diffusers", "Scheduler"],
        "feature_extractor": [None, None],
        "force_zeros": True,
    }
    (tmp_path / "model_index.json").write_text(json.dumps(parts))
    return tmp_path


@pytest.mark.parametrize("where", ["[/x]", "\x1b[31mX", "[red]a[/red]", ":smile:"])
def test_names_of_mounts_cannot_speak_to_the_terminal(
    where: str, tmp_path: Path, run: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The label of a USB drive is enough."""
    measured = replace(SPEEDS, filesystem=where, device=where, problem=where, measured_at=where)
    monkeypatch.setattr(cli_bench, "measure", lambda *args, **kwargs: measured)
    said = run("bench", tmp_path)
    assert said.count(where.replace("\x1b", "\N{REPLACEMENT CHARACTER}")) == 3


def test_nothing_that_is_printed_can_be_markup() -> None:
    """All that commands print goes through `terminal`, which takes it for plain text."""
    for module in ("main", "plan", "bench"):
        tree = ast.parse(Path(cli.__file__).with_name(f"{module}.py").read_text())
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            assert not isinstance(call.func, ast.Name) or call.func.id not in ("Console", "Table", "Text")
            if isinstance(call.func, ast.Attribute) and call.func.attr in ("print", "add_row", "add_column", "ask"):
                texts = [node for node in call.args if not isinstance(node, ast.Name | ast.Call)]
                assert not texts or call.func.attr == "ask", ast.unparse(call)


# ---------------------------------------------------------------- groups from names

MODELS: dict[str, Callable[[], Any]] = {
    "flux": tiny_models.flux_transformer,
    "wan": tiny_models.wan_transformer,
    "sd3": tiny_models.sd3_transformer,
    "unet": tiny_models.unet,
    "autoencoder": tiny_models.kl,
    "autoencoder of sd": tiny_models.sd_kl,
    "autoencoder of wan": tiny_models.wan_kl,
    "t5": tiny_models.t5,
    "clip": tiny_models.clip,
}


def groups_of(model: nn.Module) -> dict[str, tuple[int, bool]]:
    """The groups that the model is really cut into, their sizes, and whether they are needed around others."""
    handle = apply_group_offloading(model, "cpu")
    plan = handle.plan.details
    in_turn = {group.name for group in plan.problem.groups} if plan is not None else set()
    sizes = {
        group.group_id: (group.num_bytes, group.group_id not in in_turn) for group in handle.groups if group.num_bytes
    }
    handle.remove()
    return sizes


def outlined(path: Path, dtype: torch.dtype | None = None) -> dict[str, tuple[int, bool]]:
    (found,) = outline(path, dtype).values()
    return {group.name: (group.num_bytes, group.is_outer) for group in found.groups}


@pytest.mark.parametrize("shards", ["one file", "several"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_groups_are_those_of_the_model(make: Callable[[], Any], shards: str, tmp_path: Path) -> None:
    model = make()
    model.save_pretrained(tmp_path, **({"max_shard_size": "20KB"} if shards == "several" else {}))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shards == "several")
    (found,) = outline(tmp_path).values()
    assert found.model_class == type(model).__name__ and found.num_cast == 0
    assert outlined(tmp_path) == groups_of(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_groups_of_a_cast(make: Callable[[], Any], dtype: torch.dtype, tmp_path: Path) -> None:
    """Of some classes the loaders keep weights in float32: those are told apart as the loaders do."""
    model = make()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, torch_dtype=dtype)
    (found,) = outline(tmp_path, dtype).values()
    assert found.num_cast == len(
        {id(each) for each in loaded.state_dict(keep_vars=True).values() if each.dtype == dtype}
    )
    assert outlined(tmp_path, dtype) == groups_of(loaded)


def test_a_model_without_blocks(tmp_path: Path) -> None:
    (found,) = outline(write_model(tmp_path, {"a.b.weight": 512, "c": 512})).values()
    assert [(group.name, group.num_bytes, group.is_outer) for group in found.groups] == [
        ("Model_unmatched_group", 1024, False)
    ]


def test_weights_that_the_files_do_not_have(tmp_path: Path) -> None:
    """They have the dtype that most of the others have. What the class does not have is not loaded."""
    write_model(tmp_path, {"blocks.0.w": 512, "blocks.1.w": 512, "norm": 512})
    entries = {"blocks.0.w": entry(0, 1024, [256], "F32"), "else.b": entry(1024, 5120, [1024], "F32")}
    write_header(tmp_path / "diffusion_pytorch_model.safetensors", entries, 5120)
    assert outlined(tmp_path) == {
        "Model_unmatched_group": (1024, True),
        "blocks_0_0": (1024, False),
        "blocks_1_1": (1024, False),
    }
    assert outline(tmp_path, torch.float16)[""].num_cast == 3


def test_a_file_beside_its_config(model: Path) -> None:
    assert outline(model / "diffusion_pytorch_model.safetensors") == outline(model)


def test_no_memory_is_taken(tmp_path: Path) -> None:
    """However large the model is: this one has 8 TiB."""
    size = 1 << 40
    try:
        write_model(tmp_path, {f"blocks.{number}.w": size for number in range(8)})
    except OSError:
        pytest.skip("the file system has no files of that size")
    assert outline(tmp_path)[""].num_bytes == 8 * size


CLASSES: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({}, "no such model"),
    "unknown": ({"_class_name": "NoSuchModel"}, "'NoSuchModel'"),
    "no model": ({"_class_name": "DDIMScheduler"}, "'DDIMScheduler'"),
    "no class": ({"_class_name": "models"}, "'models'"),
    "no text": ({"_class_name": 5}, "'5'"),
    "half a character": ({"_class_name": "\ud800"}, "no such model"),
    "no config for it": ({"_class_name": "Model"}, "Model cannot be built"),
    "of another library": ({"architectures": ["NoSuchModel"]}, "'transformers' that is installed"),
    "a config that is wrong": ({"architectures": ["T5EncoderModel"], "d_model": "x"}, "T5EncoderModel cannot be built"),
}


@pytest.mark.parametrize(("config", "message"), CLASSES.values(), ids=CLASSES)
def test_classes_that_cannot_be_built(config: dict[str, Any], message: str, model: Path, run: Terminal) -> None:
    (model / "config.json").write_text(json.dumps(config))
    said = run("plan", model, status=2)
    assert str(model / "config.json") in said and message in said


def test_a_folder_without_a_config(model: Path, run: Terminal) -> None:
    (model / "config.json").unlink()
    assert "save_pretrained" in run("plan", model, status=2)


@pytest.mark.parametrize("config", ['{"_class_name": "Model"}', '{"architectures": ["T5EncoderModel"]}'])
def test_a_library_that_is_not_installed(
    config: str, model: Path, run: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / "config.json").write_text(config)
    for library in ("diffusers", "transformers"):
        monkeypatch.setitem(sys.modules, library, None)
    assert "pip install 'group-offload[diffusers]'" in run("plan", model, status=2)


# ---------------------------------------------------------------- files


def test_a_pipeline(pipeline: Path) -> None:
    found = outline(pipeline)
    assert {name: each.model_class for name, each in found.items()} == {
        "transformer": "Model",
        "text_encoder": "T5EncoderModel",
    }
    assert [len(each.groups) for each in found.values()] == [21, 9]


def test_variants(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"_class_name": "Model", "sizes": {"a": 512, "b": 0}}')
    write(tmp_path / "model.fp16.safetensors", {"a": 512})
    assert outline(tmp_path)[""].num_bytes == 512
    write(tmp_path / "model.safetensors", {"a": 1024}, "F32")
    write(tmp_path / "consolidated.safetensors", {"a": 2048}, "F64")
    assert outline(tmp_path)[""].num_bytes == 1024
    assert outline(tmp_path / "consolidated.safetensors")[""].num_bytes == 2048


def entry(
    start: int = 0, end: int = 4, shape: object = (2,), dtype: object = "BF16", **more: object
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end], **more}


BAD_HEADERS: dict[str, tuple[object, int, str]] = {
    "cut off": ({"a": entry()}, 3, "not fully covered"),
    "too long": ({"a": entry()}, 5, "not fully covered"),
    "overlap": ({"a": entry(), "b": entry(2, 6)}, 6, "invalid offset"),
    "shape": ({"a": entry(shape=[3])}, 4, "invalid shape"),
    "huge": ({"a": entry(shape=[1 << 62] * 1000)}, 4, "overflow"),
    "no entry": ({"a": 5}, 4, "invalid type"),
    "an unknown dtype": ({"a": entry(dtype="F5")}, 4, "unknown variant"),
    "a list": ([1], 0, "invalid type"),
}


@pytest.mark.parametrize(("header", "num_bytes", "message"), BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_headers_that_lie(header: object, num_bytes: int, message: str, tmp_path: Path, run: Terminal) -> None:
    path = write_header(tmp_path / "model.safetensors", header, num_bytes)
    said = run("plan", tmp_path, status=2)
    assert said.count("\n") == 1 and str(path) in said and message in said and len(said) < 500


@pytest.mark.parametrize("kind", ["FIFO", "socket", "device", "folder"])
@pytest.mark.parametrize(
    "name", ["config.json", "model_index.json", "diffusion_pytorch_model.safetensors", "config.json behind a link"]
)
def test_what_is_no_file_is_not_waited_for(name: str, kind: str, model: Path, run: Terminal) -> None:
    path = model / name.removesuffix(" behind a link")
    path.unlink(missing_ok=True)
    if path.name != name:
        path.symlink_to("elsewhere")
        path = model / "elsewhere"
    with socket.socket(socket.AF_UNIX) as made:
        if kind == "FIFO":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "socket":
            here = os.getcwd()
            os.chdir(model)  # the names of sockets are short
            made.bind(path.name)
            os.chdir(here)
        else:
            try:
                os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))
            except PermissionError:
                pytest.skip("needs the right to make devices")
        said = run("plan", model, status=2)
    assert "Cannot read" in said and path.parent.name in said


def test_a_step_that_takes_for_ever(model: Path, run: Terminal) -> None:
    for seconds in ("1e300", "inf", "nan", "0", "-1"):
        assert "expected a number of seconds" in run("plan", model, "--step-seconds", seconds, status=2)
    for seconds in ("1e6", "1e-320"):
        run("plan", model, "--step-seconds", seconds, "--html", model / "plan.html", "--vram", "4GiB")


SIZES_OF_DTYPES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 2),
    **dict.fromkeys(("U8", "I8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
}


@pytest.mark.parametrize(("dtype", "size"), [*SIZES_OF_DTYPES.items(), ("F4", 0.5), ("F6_E2M3", 0.75)])
def test_tensors_of_all_dtypes(dtype: str, size: float, tmp_path: Path) -> None:
    num_bytes = int(8 * size)
    header = {"a": {"dtype": dtype, "shape": [2, 4], "data_offsets": [0, num_bytes]}}
    path = write_header(tmp_path / "file", header, num_bytes)
    assert _entries_in(path) == {"a": Entry(dtype, 8, num_bytes)}


def test_folders_that_are_none(tmp_path: Path, model: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for name in ("m-00001-of-00003.safetensors", "m-00003-of-00003.safetensors"):
        write(tmp_path / "shards" / name, {"a": 512})
    write(tmp_path / "twice" / "m-00001-of-00002.safetensors", {"a": 512})
    write(tmp_path / "twice" / "m-00002-of-00002.safetensors", {"a": 512})
    write(tmp_path / "two" / "a.safetensors", {"a": 512})
    write(tmp_path / "two" / "b.safetensors", {"a": 512})
    write(tmp_path / "none" / "model.safetensors", {})
    (tmp_path / "text.safetensors").write_text("hello")
    cases = (
        (empty, "no safetensors files"),
        (tmp_path / "shards", "2 of 3 files: number 2"),
        (tmp_path / "twice", "'a' is in another file too"),
        (tmp_path / "two", "several sets of weights: a, b"),
        (tmp_path / "none", "no weights"),
        (tmp_path / "text.safetensors", "header"),
    )
    for path, message in cases:
        with pytest.raises(GroupFileError, match=message) as caught:
            outline(path)
        assert str(path) in str(caught.value)
    for text in ("{", "[]", "[" * 100_000, "\xff"):
        (model / "config.json").write_text(text, encoding="latin1")
        with pytest.raises(GroupFileError, match=r"config\.json"):
            outline(model)


def test_pipelines_that_are_none(tmp_path: Path) -> None:
    write(tmp_path / "outside" / "model.safetensors", {"a": 512})
    folder = tmp_path / "pipeline"
    folder.mkdir()
    for name in ("../outside", "", "vae", "a/b"):
        (folder / "model_index.json").write_text(json.dumps({name: ["diffusers", "X"]}))
        with pytest.raises(GroupFileError, match="without safetensors"):
            outline(folder)


def test_files_of_another_model(tmp_path: Path, run: Terminal) -> None:
    """from_pretrained would refuse them. What is planned would be neither of the two."""
    transformer = diffusers.FluxTransformer2DModel(
        num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=2, axes_dims_rope=(2, 2, 4)
    )
    transformer.save_pretrained(tmp_path)
    run("plan", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 4}))
    assert "is that of another model than the files" in run("plan", tmp_path, status=2)


def test_dtypes(model: Path) -> None:
    with pytest.raises(ConfigError, match="floating point"):
        outline(model, torch.int8)
    assert outline(model, torch.bfloat16)[""].num_cast == 0
    wide = outline(model, torch.float32)[""]
    assert wide.num_cast == 21 and wide.num_bytes == 2 * outline(model)[""].num_bytes


def test_quantised_weights_are_not_cast(tmp_path: Path) -> None:
    """They count as they lie in the file, with the tensors beside them that the class does not have."""
    write_model(tmp_path, {"blocks.0.w": 2048, "blocks.1.w": 512}, quantization_config={})
    entries = {"blocks.0.w": entry(0, 512, [512], "U8"), "blocks.0.w.absmax": entry(512, 520, [2], "F32")}
    entries |= {"blocks.0.odd": entry(520, 523, [4], "F6_E2M3"), "." * 100_000: entry(523, 524, [1], "I8")}
    write_header(tmp_path / "diffusion_pytorch_model.safetensors", entries, 524)
    (found,) = outline(tmp_path, torch.bfloat16).values()
    assert {group.name: group.num_bytes for group in found.groups} == {
        "Model_unmatched_group": 256,
        "blocks_0_0": 512 + 256 + 256,
        "blocks_1_1": 512,
    }
    assert found.num_cast == 2  # the scales, and what is not in the file


def test_the_cache_of_the_hub(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str, *, local_files_only: bool) -> str:
        assert local_files_only
        asked.append(name)
        if name != "owner/pipeline":
            raise huggingface_hub.errors.LocalEntryNotFoundError("not there")
        return str(model.parent)

    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(model)
    assert find_checkpoint("owner/pipeline") == model.parent
    assert find_checkpoint("owner/pipeline/transformer") == model
    for name in ("owner/other", "owner/pipeline/vae", "owner", "/nowhere/at/all", "../x", "a/../b"):
        with pytest.raises(GroupFileError, match="There is no"):
            find_checkpoint(name)
    assert set(asked) == {"owner/pipeline", "owner/other"}
    assert find_checkpoint(str(model)) == model


# ---------------------------------------------------------------- plan


def plan(run: Terminal, *arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("plan", *arguments, "--json"))
    return found


KEYS = {
    "name", "model_class", "passes", "num_bytes", "num_cast", "ram_share_bytes", "bytes_by_place", "slot_bytes", "outer_bytes",
    "device_bytes", "ram_bytes", "is_compute_known", "step_seconds", "stall_seconds", "h2d_seconds", "drive_seconds", "bound",
    "verdict", "gain_from_vram", "gain_from_ram", "groups",
}  # fmt: skip


def test_packed(tmp_path: Path, run: Terminal) -> None:
    """Weights in bf16 are assumed to take 0.72 of their bytes on the link, in RAM and where they stay on the device."""
    for dtype in (torch.bfloat16, torch.float32):
        tiny_models.flux_transformer().to(dtype).save_pretrained(tmp_path / str(dtype))
    model = tmp_path / "torch.bfloat16"
    plain, packed = plan(run, model), plan(run, model, "--pack")
    (before,), (after,) = plain["components"], packed["components"]
    assert after["bytes_by_place"]["ram"] == pytest.approx(0.72 * before["bytes_by_place"]["ram"], rel=0.02)
    assert after["h2d_seconds"] == pytest.approx(0.72 * before["h2d_seconds"], rel=0.02)
    assert packed["speeds"]["unpack_source"] == "assumed"
    least = before["num_bytes"] + (64 << 20)
    (kept,) = plan(run, model, "--pack", "--vram", str(least + (1 << 30)))["components"]
    assert kept["h2d_seconds"] == 0 and kept["step_seconds"] == 0  # all of it stays as it is
    (other,) = plan(run, tmp_path / "torch.float32", "--pack")["components"]
    assert other["bytes_by_place"]["ram"] == sum(group["num_bytes"] for group in other["groups"] if group["place"])
    text = run("plan", model, "--pack")
    assert "P stays on the device packed" in text and "Unpacking 400 GB/s (assumed)." in text


def test_plan_as_json(model: Path, run: Terminal) -> None:
    given = "--vram", "4GiB", "--ram", "6GiB", "--step-seconds", "0.2", "--h2d", "20GB", "--drive", "2 GB/s"
    found = plan(run, model, *given)
    assert found.keys() == {"model", "dtype", "budgets", "speeds", "components"}
    assert found["model"] == str(model) and found["dtype"] is None
    assert found["budgets"] == {
        "vram_bytes": 4 * GIB,
        "ram_bytes": 6 * GIB,
        "activation_bytes": 0,
        "process_ram_bytes": 3 * GIB // 2,
    }
    given_speeds = {"h2d": 20e9, "h2d_source": "given", "drive": 2e9, "drive_source": "given"}
    assert found["speeds"] == {**given_speeds, "unpack": 400e9, "unpack_source": "assumed"}
    (part,) = found["components"]
    assert part.keys() == KEYS and part["name"] == "" and part["model_class"] == "Model" and part["passes"] == 1
    assert part["num_bytes"] == 10 * GIB + 64 * MIB == sum(group["num_bytes"] for group in part["groups"])
    places = part["bytes_by_place"]
    for place in ("device", "ram", "file"):
        assert places[place] == sum(group["num_bytes"] for group in part["groups"] if group["place"] == place) > 0
    assert places["packed"] == 0
    assert part["outer_bytes"] == 64 * MIB and part["slot_bytes"] == GIB
    assert [group["name"] for group in part["groups"] if group["place"] is None] == ["Model_unmatched_group"]
    assert part["device_bytes"] == places["device"] + part["slot_bytes"] + part["outer_bytes"] <= 4 * GIB
    assert part["ram_bytes"] == places["ram"] <= part["ram_share_bytes"] < 4.5 * GIB
    assert part["is_compute_known"] and part["bound"] == "drive"
    assert part["step_seconds"] >= part["drive_seconds"] == places["file"] / 2e9 > part["h2d_seconds"]
    assert part["gain_from_vram"] > 0 and part["gain_from_ram"] > 0


def test_plan_for_people(model: Path, run: Terminal) -> None:
    said = run("plan", model, "--vram", "4GiB", "--ram", "6GiB")
    assert (
        "Model: 10.1 GiB in 21 groups" in said
        and "blocks_0_0 to blocks_19_19" in said
        and "drive bounds a pass" in said
    )
    (line,) = [line for line in said.splitlines() if "blocks_0_0 to blocks_19_19" in line]
    places = line.split()[-2]
    assert len(places) == 20 and set(places) == {"D", "R", "f"} and "20" in line and "512 MiB" in line
    assert "1 GiB more VRAM makes a pass" in said and "1 GiB more RAM makes a pass" in said
    assert "Compute is taken as nothing" in said and said.count("assumed") == 3 and "group-offload bench" in said
    said = run("plan", model, "--step-seconds", "0.5", "--dtype", "float32", "--h2d", "1TB")
    assert "21 weights are cast to float32" in said and "Compute is taken" not in said
    assert "Without --vram" in said and "Without --ram" in said and "1 GiB more" not in said
    assert "compute bounds a pass: it takes 0.5 s" in said


def test_a_model_that_fits(model: Path, run: Terminal) -> None:
    (part,) = plan(run, model, "--vram", "12GiB")["components"]
    assert part["step_seconds"] == 0 and part["bound"] is None and part["bytes_by_place"]["ram"] == 0
    said = run("plan", model, "--vram", "12GiB")
    assert "D" * 20 in said and "1 GiB more" not in said


def command(*arguments: object) -> tuple[int, str]:
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        status = cli.main([str(argument) for argument in arguments])
    return status, said.getvalue()


@settings(max_examples=24, deadline=None)
@example(vram=(2 << 30) + (192 << 20) - 1, ram=2 << 30, activations=0)
@example(vram=(2 << 30) + (192 << 20), ram=2 << 30, activations=0)
@given(
    vram=st.integers(1 << 30, 14 << 30),
    ram=st.integers(2 << 30, 14 << 30),
    activations=st.just(0) | st.integers(1 << 20, 1 << 30),
)
def test_budgets_are_kept(vram: int, ram: int, activations: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Or the error says the smallest that works, and that works."""
    path = tmp_path_factory.getbasetemp() / "budgets"
    if not path.exists():
        write_model(path, {"proj_in.weight": 64 * MIB, **blocks("blocks", 10, GIB), **blocks("more", 3, 100 * MIB)})
    others = "--ram", ram, "--activations", activations, "--json"
    status, said = command("plan", path, "--vram", vram, *others)
    if status:
        assert vram < 2 * GIB + activations + (64 + 128) * MIB  # what is needed around them, and to spare
        least = said.partition("smallest that works is ")[2].partition(":")[0]
        status, said = command("plan", path, "--vram", least, *others)
        assert status == 0
        vram = json.loads(said)["budgets"]["vram_bytes"]
    found = json.loads(said)
    (part,) = found["components"]
    assert part["device_bytes"] + activations <= vram
    assert part["ram_bytes"] + found["budgets"]["process_ram_bytes"] <= ram


def test_plan_of_a_pipeline(pipeline: Path, run: Terminal) -> None:
    """RAM goes to what runs most often first."""
    arguments = pipeline, "--vram", "2GiB", "--ram", "14GiB", "--step-seconds", "0.1"
    denoiser, encoder = plan(run, *arguments)["components"]
    assert (denoiser["name"], denoiser["passes"]) == ("transformer", 28)
    assert (encoder["name"], encoder["passes"]) == ("text_encoder", 1)
    assert denoiser["ram_share_bytes"] == denoiser["num_bytes"] and denoiser["bytes_by_place"]["file"] == 0
    assert 0 < encoder["ram_share_bytes"] < encoder["num_bytes"] and encoder["bytes_by_place"]["file"] > 0
    assert denoiser["ram_share_bytes"] + encoder["ram_share_bytes"] < 12.5 * GIB
    assert denoiser["is_compute_known"] and not encoder["is_compute_known"]
    assert denoiser["gain_from_ram"] == 0 and encoder["gain_from_ram"] > 0
    said = run("plan", *arguments, "--steps", "7")
    assert "transformer Model" in said and "7 passes" in said and "text_encoder T5EncoderModel" in said
    assert "One image or video" in said and "taken as nothing for text_encoder" in said


def test_a_part_that_is_not_there(pipeline: Path, run: Terminal) -> None:
    """Of a download that was broken off, say: without it the pipeline does not open."""
    assert "Not planned" not in run("plan", pipeline)
    (pipeline / "scheduler").rmdir()
    assert f"Not planned, because {pipeline} does not have it: scheduler." in run("plan", pipeline)


ERRORS: dict[str, tuple[list[str], str]] = {
    "vram": (["--vram", "8G"], "8GiB"),
    "vram in GB": (["--vram", "8"], "--vram='8': that is 8 bytes. Did you mean '8GiB'?"),
    "vram of nothing": (["--vram", "0"], "more than 0"),
    "a share": (["--vram", "80%"], "--vram='80%'"),
    "too little vram": (["--vram", "512MiB"], "the smallest that works is 1.19 GiB"),
    "too little for activations": (["--vram", "4GiB", "--activations", "3GiB"], "3 GiB of activations"),
    "too little ram": (["--ram", "1GiB"], "--process-ram"),
    "ram": (["--ram", "much"], "--ram='much'"),
    "dtype": (["--dtype", "bf17"], "--dtype bf17"),
    "no dtype": (["--dtype", "nn"], "--dtype nn"),
    "an integer": (["--dtype", "int8"], "floating point"),
    "scales": (["--dtype", "float8_e8m0fnu"], "floating point"),
    "two in one": (["--dtype", "float4_e2m1fn_x2"], "floating point"),
    "seconds": (["--step-seconds", "-1"], "--step-seconds"),
    "not a number": (["--step-seconds", "nan"], "--step-seconds"),
    "steps": (["--steps", "0"], "--steps"),
    "speed": (["--h2d", "fast"], "--h2d"),
    "no speed": (["--drive", "0GB"], "--drive"),
    "a page": (["--html", "/nowhere/x.html"], "/nowhere/x.html: /nowhere is not a folder"),
    "a page that is a folder": (["--html", "/"], "it is a folder"),
}


@pytest.mark.parametrize(("arguments", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(arguments: list[str], message: str, model: Path, run: Terminal) -> None:
    said = run("plan", model, *arguments, status=2)
    assert said.startswith("group-offload: ") and said.count("\n") == 1 and message in said


def test_too_little_vram_of_a_pipeline_is_told_for_all_of_it(pipeline: Path, run: Terminal) -> None:
    said = run("plan", pipeline, "--vram", "1MiB", status=2)
    least = re.search(r"smallest that works is ([0-9.]+ \w+)", said)
    assert least is not None
    run("plan", pipeline, "--vram", least[1].replace(" ", ""))


def test_no_model(tmp_path: Path, run: Terminal) -> None:
    for name in (tmp_path / "nothing", "x" * 300, "~no-such-user/model"):
        assert "There is no" in run("plan", name, status=2)
    assert run("plan", "owner/model-1/transformer", status=2) == (
        "group-offload: There is no owner/model-1/transformer: no such file or folder, and no downloaded model. A model of "
        "the hub: hf download owner/model-1\n"
    )
    with pytest.raises(SystemExit):
        cli.main(["plan"])


def test_names_cannot_speak_to_the_terminal(tmp_path: Path, run: Terminal) -> None:
    evil = "\x1b[2J[red]\u202e"
    write(tmp_path / "model.safetensors", {f"{evil}.0.w": 512, f"{evil}.1.w": 512})
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [evil]}))
    said = run("plan", tmp_path, "--vram", "1GiB", status=2)
    assert not any(c in said for c in "\x1b\u202e") and "[red]" in said


def test_page(pipeline: Path, tmp_path: Path, run: Terminal) -> None:
    """The page has the numbers of the JSON, needs nothing else, and draws a pass of each model as it is predicted."""
    path = tmp_path / "plan.html"
    budgets = ["--vram", "4GiB", "--ram", "12GiB", "--activations", "256MiB", "--step-seconds", "0.2"]
    plain = json.loads(run("plan", pipeline, *budgets, "--json", "--html", path))
    page = Page(path)
    assert "Nothing has run: all times are predicted." in page.words and "(assumed)" in page.words
    for found, component in zip(page.facts["models"], plain["components"], strict=True):
        assert (found["name"], found["model_class"]) == (component["name"], component["model_class"])
        places, expected = found["bytes_by_place"], component["bytes_by_place"]
        assert [places[name] for name in ("device", "locked", "file")] == [
            expected[n] for n in ("device", "ram", "file")
        ]
        assert places["pass"] == component["outer_bytes"] and sum(places.values()) == component["num_bytes"]
        assert found["plan"]["predicted_seconds"] == component["step_seconds"] and found["stats"] is None
        gains = [component["gain_from_vram"], component["gain_from_ram"]]
        assert [found["gains"]["VRAM"], found["gains"]["RAM"]] == gains
        assert component["verdict"] in page.words
        [one] = found["passes"]
        assert one["title"] == "predicted" and one["seconds"] == component["step_seconds"]
    denoiser, _, ram = page.facts["memories"]
    assert denoiser["budget_bytes"] == 4 * GIB and ram["budget_bytes"] == 12 * GIB
    assert sum(denoiser["parts"].values()) <= 4 * GIB and sum(ram["parts"].values()) <= 12 * GIB
    assert "Wrote" in run("plan", pipeline / "transformer", "--html", path)  # without budgets
    [found] = Page(path).facts["models"]
    assert found["gains"]["VRAM"] > 0 and found["gains"]["RAM"] == 0


def test_what_is_written_to_may_be_no_file(tmp_path: Path, run: Terminal) -> None:
    """A link goes on to lead to a file, a pipe and a device stay what they are."""
    model = write_model(tmp_path / "model", blocks("blocks", 2, MIB))
    file, link, pipe = tmp_path / "file", tmp_path / "link", tmp_path / "pipe"
    file.write_text("old")
    link.symlink_to(file)
    os.mkfifo(pipe)
    run("plan", model, "--html", link)
    assert link.is_symlink() and file.read_text().startswith("<!DOCTYPE html>")
    read: list[str] = []
    thread = threading.Thread(target=lambda: read.append(pipe.read_text()))
    thread.start()
    run("plan", model, "--html", pipe)
    thread.join(10)
    assert read == [file.read_text()] and pipe.is_fifo()
    full, loop = tmp_path / "full", tmp_path / "loop"
    full.symlink_to("/dev/full")
    loop.symlink_to(loop)
    assert "No space left" in run("plan", model, "--html", full, status=2)
    assert str(loop) in run("plan", model, "--html", loop, status=2)


def test_speeds_that_were_measured(model: Path, run: Terminal) -> None:
    """The link's of any accelerator, and unpacking of the same one; the drive's of this file system alone."""
    here, unpacking = speeds.filesystem_of(model), {"unpack": 400e9, "unpack_source": "assumed"}
    assert plan(run, model)["speeds"]["h2d_source"] == "assumed"
    speeds.record(replace(SPEEDS, device="CPU x", h2d=3_000_000_000, drive=1_000_000_000, filesystem="elsewhere"))
    assert plan(run, model)["speeds"]["drive_source"] == plan(run, model)["speeds"]["h2d_source"] == "assumed"
    speeds.record(replace(SPEEDS, device="RTX 4060", h2d=12_000_000_000, drive=None, unpack=1))
    speeds.record(replace(SPEEDS, device="H200", h2d=55_000_000_000, drive=None))
    assert plan(run, model)["speeds"] == {
        "h2d": 55e9,
        "h2d_source": "measured",
        "drive": 3.5e9,
        "drive_source": "assumed",
        **unpacking,
    }
    speeds.record(replace(SPEEDS, device="CPU x", drive=2_000_000_000, filesystem=here))
    assert plan(run, model)["speeds"]["drive"] == 2e9
    said = run("plan", model)
    assert "55 GB/s (measured), drive 2 GB/s (measured)" in said and "H200" in said and "assumed" not in said
    assert plan(run, model, "--h2d", "10GB", "--drive", "1GB")["speeds"] == {
        "h2d": 10e9,
        "h2d_source": "given",
        "drive": 1e9,
        "drive_source": "given",
        **unpacking,
    }


def test_no_device_is_asked(model: Path, run: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("asked")

    for module, name in (
        (torch.cuda, "_lazy_init"),
        (torch.cuda, "is_available"),
        (torch.accelerator, "current_accelerator"),
        (cli_bench, "backend_for"),
        (speeds, "measure"),
    ):
        monkeypatch.setattr(module, name, asked)
    run("plan", model, "--vram", "4GiB", "--ram", "8GiB")


# ---------------------------------------------------------------- bench


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = speeds.measure
    monkeypatch.setattr(cli_bench, "measure", lambda *args, **options: measure(*args, **{**options, **SIZES}))


@pytest.mark.usefixtures("_small")
def test_bench(tmp_path: Path, run: Terminal) -> None:
    (tmp_path / "model.safetensors").write_bytes(os.urandom(3 * MIB))
    os.sync()
    found = json.loads(run("bench", tmp_path, "--device", "cpu", "--json"))
    assert found.keys() == speeds.MachineSpeeds.__dataclass_fields__.keys()
    assert found["h2d"] > 0 and found["drive"] > 0
    assert speeds.recorded() == [speeds.MachineSpeeds(**found)]
    said = run("bench", tmp_path, "--device", "cpu")
    assert said.count("GB/s") == 2 and "Kept in" in said and str(speeds.record_file()) in said.replace("\n", "")
    assert len(speeds.recorded()) == 1 and len(list(tmp_path.iterdir())) == 1


@pytest.mark.usefixtures("_small")
def test_bench_where_there_is_no_file_to_read(tmp_path: Path, run: Terminal) -> None:
    said = run("bench", tmp_path, "--device", "cpu")
    assert said.count("not measured") == 2 and "no safetensors file" in said and "Kept in" in said
    (kept,) = speeds.recorded()
    assert kept.drive is None and kept.filesystem == "" and kept.h2d > 0 and not list(tmp_path.iterdir())


@pytest.mark.usefixtures("_small")
def test_bench_in_the_current_folder(tmp_path: Path, run: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli_arguments, "default_device", lambda: torch.device("cpu"))
    assert json.loads(run("bench", "--json"))["filesystem"] == speeds.filesystem_of(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "nothing is not a folder"),
        (["--device", "abacus"], "--device abacus"),
        (["--device", "meta"], "meta"),
        (["--device", "cpu:3"], "one CPU"),
    ],
)
def test_errors_of_bench(arguments: list[str], message: str, run: Terminal) -> None:
    said = run("bench", *arguments, status=2)
    assert said.startswith("group-offload: ") and said.count("\n") == 1 and message in said
