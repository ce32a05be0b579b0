"""The command `plan`, and the groups that a checkpoint's models are cut into."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import diffusers
import huggingface_hub
import pytest
import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from group_offload import StorageError, apply_group_offloading
from group_offload.cli.arguments import find_checkpoint
from group_offload.cli.meta_model import find_models, meta_model_of
from group_offload.plan import speeds

from ..support import tiny_models
from ..support.pages import Page
from ..support.terminal import Terminal

MIB, GIB = 1 << 20, 1 << 30


class Block(nn.Module):
    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_bytes // 2, dtype=torch.bfloat16))

    def forward(self) -> None:
        """Blocks without a forward would count as parts of what uses them."""


class Model(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Blocks, and a weight that is needed around them."""

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(self, num_blocks: int, block_bytes: int, outer_bytes: int) -> None:
        super().__init__()
        self.proj_in = nn.Parameter(torch.empty(outer_bytes // 2, dtype=torch.bfloat16))
        self.blocks = nn.ModuleList(Block(block_bytes) for _ in range(num_blocks))


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffusers, "Model", Model, raising=False)


def write_model(folder: Path, num_blocks: int = 20, block_bytes: int = GIB // 2, outer_bytes: int = 64 * MIB) -> Path:
    """The folder of a `Model`, whose weights are holes, in files that any machine can map as loaders do."""
    folder.mkdir(parents=True)
    sizes = {"proj_in": outer_bytes} | {f"blocks.{number}.weight": block_bytes for number in range(num_blocks)}
    weight_map = {}
    for number, (name, size) in enumerate(sizes.items(), 1):
        weight_map[name] = f"diffusion_pytorch_model-{number:05}-of-{len(sizes):05}.safetensors"
        entry = {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}
        text = json.dumps({"__metadata__": {"format": "pt"}, name: entry}).encode()
        (folder / weight_map[name]).write_bytes(struct.pack("<Q", len(text)) + text)
        os.truncate(folder / weight_map[name], 8 + len(text) + size)
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    config = {"_class_name": "Model", "num_blocks": num_blocks, "block_bytes": block_bytes, "outer_bytes": outer_bytes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """10 GiB in 20 blocks, and 64 MiB around them."""
    return write_model(tmp_path / "transformer")


@pytest.fixture
def pipeline(tmp_path: Path, model: Path) -> Path:
    write_model(tmp_path / "text_encoder", num_blocks=8)
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "scheduler_config.json").write_text("{}")
    parts: dict[str, Any] = {name: ["diffusers", "Model"] for name in ("transformer", "text_encoder", "../outside")}
    parts |= {"_class_name": "Pipeline", "scheduler": ["diffusers", "S"], "extractor": [None, None], "zeros": True}
    (tmp_path / "model_index.json").write_text(json.dumps(parts))
    return tmp_path


def plan(run: Terminal, *arguments: object) -> dict[str, Any]:
    return as_json(run("plan", *arguments, "--json"))


def as_json(said: str) -> dict[str, Any]:
    """The object in an output: libraries may show progress behind it."""
    return json.loads(said[said.index("{") : said.rindex("}") + 1])


def bytes_at(model: Mapping[str, Any], place: str) -> int:
    return sum(group["num_bytes"] for group in model["groups"] if group["place"] == place)


# ---------------------------------------------------------------- the groups

MODELS: list[tuple[Callable[[], Any], torch.dtype | None]] = [
    (tiny_models.flux_transformer, None),
    (tiny_models.wan_transformer, torch.bfloat16),
    (tiny_models.unet, torch.bfloat16),
    (tiny_models.t5, torch.float16),
    (tiny_models.clip, None),
]


def groups_of(model: nn.Module) -> dict[str, tuple[int, bool]]:
    """The groups that the model is really cut into, their sizes, and whether they are needed around others."""
    handle = apply_group_offloading(model, "cpu")
    details = handle.plan.details
    in_turn = {group.name for group in details.problem.groups} if details is not None else set()
    sizes = {
        group.group_id: (group.num_bytes, group.group_id not in in_turn) for group in handle.groups if group.num_bytes
    }
    handle.remove()
    return sizes


@pytest.mark.parametrize(("make", "dtype"), MODELS)
def test_groups_are_those_of_the_model(
    make: Callable[[], Any], dtype: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of some classes the loaders keep weights in float32: those are told apart as the loaders do. Hazard: where no page map
    tells which weights are in files, all of them are cast in RAM."""
    model = make()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    expected = model if dtype is None else type(model).from_pretrained(tmp_path, torch_dtype=dtype)
    ((found,), _) = (each.values() for each in find_models(tmp_path))
    outline = meta_model_of(found, dtype)
    assert outline.model_class == type(model).__name__
    assert {each.name: (each.num_bytes, each.name in outline.outer) for each in outline.groups} == groups_of(expected)
    weights = {id(each): each for each in expected.state_dict(keep_vars=True).values()}
    assert outline.num_cast == sum(each.dtype == dtype for each in weights.values())
    monkeypatch.setattr("group_offload.stores.files.can_detect_writes", lambda: False)
    assert meta_model_of(found, dtype) == outline


def test_variants(tmp_path: Path, run: Terminal) -> None:
    """The files without a variant, as loaders take them; else those of a variant, which the call to copy names."""
    model = Model(1, 512, 512)
    model.save_pretrained(tmp_path, variant="fp16")
    found = plan(run, tmp_path)
    assert find_models(tmp_path)[0][""].variant == "fp16" and found["models"][0]["num_bytes"] == 1024
    assert 'dtype=torch.bfloat16, variant="fp16")' in found["call"]
    model.float().save_pretrained(tmp_path)
    found = plan(run, tmp_path)
    assert find_models(tmp_path)[0][""].variant is None and found["models"][0]["num_bytes"] == 2048
    assert "variant=" not in found["call"]
    named = tmp_path / "diffusion_pytorch_model.fp16.safetensors"
    assert f"{named} is a file. Pass the folder that it is in" in run("plan", named, status=2)


# ---------------------------------------------------------------- checkpoints that are none

CLASSES: dict[str, tuple[str, str]] = {
    "unknown": ('{"_class_name": "NoSuchModel"}', "'NoSuchModel'"),
    "no config for it": ('{"_class_name": "Model"}', "Model.from_pretrained cannot load"),
    "of another library": ('{"architectures": ["NoSuchModel"]}', "the installed 'transformers'"),
    "cut off": ("{", "not valid JSON"),
    "a list": ("[]", "not a JSON object"),
    "escape sequences": ('{"architectures": ["\\u001b[2J[red]\\u202e"]}', "[red]"),
}


@pytest.mark.parametrize(("config", "message"), CLASSES.values(), ids=CLASSES)
def test_configs_that_are_none(config: str, message: str, model: Path, run: Terminal) -> None:
    (model / "config.json").write_text(config)
    said = run("plan", model, status=2)
    assert str(model) in said and message in said and not any(c in said for c in "\x1b\u202e")


def test_what_is_missing(model: Path, run: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """And files of another model than the config's: what is planned would be neither of the two."""
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "diffusers", None)
        assert "pip install 'group-offload[diffusers]'" in run("plan", model, status=2)
    path = min(model.glob("*.safetensors"))
    os.truncate(path, path.stat().st_size - 1)
    said = run("plan", model, status=2)
    assert f"Model.from_pretrained cannot load {model}" in said and not re.search(r"\.\s*\.", said)
    (model / "diffusion_pytorch_model.safetensors.index.json").write_text('{"weight_map": {"a": "../../x"}}')
    assert str(model) in run("plan", model, status=2)
    (model / "config.json").unlink()
    assert "save_pretrained" in run("plan", model, status=2)
    path = model.with_name("another")
    tiny_models.flux_transformer().save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 4}))
    assert "FluxTransformer2DModel.from_pretrained cannot load" in run("plan", path, status=2)
    (path / "config.json").write_text(json.dumps({**config, "num_layers": 9}))
    assert "lacks weights of FluxTransformer2DModel" in run("plan", path, status=2)


def test_the_cache_of_the_hub(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str, *, local_files_only: bool) -> str:
        assert local_files_only
        asked.append(name)
        if name != "owner/pipeline":
            raise huggingface_hub.errors.LocalEntryNotFoundError("not there")
        return str(model.parent)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(model)
    assert find_checkpoint("owner/pipeline") == model.parent
    assert find_checkpoint("owner/pipeline/transformer") == find_checkpoint(str(model)) == model
    for name in ("owner/other", "owner/pipeline/vae", "owner", "/nowhere/at/all", "../x", "a/../b", "x" * 300, "~no/x"):
        with pytest.raises(StorageError, match="There is no"):
            find_checkpoint(name)
    assert set(asked) == {"owner/pipeline", "owner/other"}
    with pytest.raises(StorageError, match="hf download owner/other"):
        find_checkpoint("owner/other/transformer")


class Hub(BaseHTTPRequestHandler):
    """Serves a folder as the model `owner/pipeline` of the hub."""

    folder: Path
    served: dict[str, int]

    def log_message(self, *args: object) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        files = {each.relative_to(self.folder).as_posix(): each for each in self.folder.rglob("*") if each.is_file()}
        if path.startswith("/api/models/owner/pipeline"):
            siblings = [{"rfilename": name} for name in [*files, "../outside.json", "transformer/flax_model.msgpack"]]
            return self.answer(json.dumps({"id": "owner/pipeline", "sha": "1" * 40, "siblings": siblings}).encode())
        file = files.get(path.removeprefix(f"/owner/pipeline/resolve/{'1' * 40}/"))
        if file is None:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        first, last = 0, file.stat().st_size - 1
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            first, last = int(wanted[1]), min(last, int(wanted[2]))
        with file.open("rb") as opened:
            opened.seek(first)
            content = opened.read(last + 1 - first) if self.command == "GET" else b""
        self.served[file.name] = self.served.get(file.name, 0) + len(content)
        return self.answer(content, last + 1 - first)

    def answer(self, content: bytes, length: int | None = None) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.send_header("ETag", '"1"')
        self.send_header("X-Repo-Commit", "1" * 40)
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def hub(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    served = type("Served", (Hub,), {"folder": pipeline, "served": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), served) as server:
        threading.Thread(target=server.serve_forever).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        template = huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", address)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        huggingface_hub.utils._http.close_session()
        yield served
        server.shutdown()
    huggingface_hub.utils._http.close_session()


@pytest.mark.parametrize("inside", ["", "/transformer"])
def test_before_the_download(inside: str, hub: type[Hub], pipeline: Path, run: Terminal) -> None:
    """The plan is that of the files, of which configs and headers are read."""
    found, expected = (plan(run, f"{path}{inside}", "--ram", "12GiB") for path in ("owner/pipeline", pipeline))
    assert sum(hub.served.values()) < 4 << 20 < sum(each["num_bytes"] for each in found["models"])
    assert ('"owner/pipeline", subfolder="transformer"' if inside else '"owner/pipeline"') in found["call"]
    for each in (found, expected):
        del each["title"], each["call"]
    assert found == expected


def test_what_the_hub_does_not_give(hub: type[Hub], run: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    said = run("plan", "owner/other", status=2)
    assert "no file or folder owner/other" in said and "hf download owner/other" in said
    assert "has no folder vae" in run("plan", "owner/pipeline/vae", status=2)
    assert "owner/pipeline/scheduler" in run("plan", "owner/pipeline/scheduler", status=2)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    huggingface_hub.utils._http.close_session()
    assert "hf download owner/pipeline" in run("plan", "owner/pipeline", status=2)


# ---------------------------------------------------------------- plan


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("", 'model = Model.from_pretrained(PATH); apply_group_offloading(model, vram_budget="auto")'),
        (
            "--vram 8GiB --compress",
            'model = Model.from_pretrained(PATH); apply_group_offloading(model, vram_budget="8 GiB", compress=True)',
        ),
        ("--ram 4GiB", 'model = from_pretrained(Model, PATH, ram_budget="4 GiB")'),
        (
            "--ram 4GiB --compress",
            'model = from_pretrained(Model, PATH, ram_budget="4 GiB", compress=True, offload_to_disk_path="offload")',
        ),
        (
            "--ram 4GiB --dtype float16",
            'model = from_pretrained(Model, PATH, ram_budget="4 GiB", offload_to_disk_path="offload")',
        ),
    ],
)
def test_the_call_to_copy(
    arguments: str, line: str, model: Path, run: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("group_offload.cli.plan.available_ram", lambda: 32 * GIB)
    call = plan(run, model, *arguments.split())["call"].splitlines()
    dtype = "torch.float16" if "--dtype" in arguments else "torch.bfloat16"  # diffusers would load float32
    assert "; ".join(call[3:]) == line.replace("PATH", f'"{model}", dtype={dtype}')
    model = model.rename(model.with_name('a "b"'))
    assert r'/a \"b\""' in plan(run, model, *arguments.split())["call"]
    assert call[:2] == ["import torch", "from diffusers import Model"]


def test_the_call_to_copy_of_a_pipeline(pipeline: Path, run: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("group_offload.cli.plan.available_ram", lambda: 32 * GIB)
    said = run("plan", pipeline)
    assert (
        f'    pipe = Pipeline.from_pretrained("{pipeline}", dtype=torch.bfloat16)\n    enable_group_offload(pipe)\n'
        in said
    )
    monkeypatch.setattr("group_offload.cli.plan.available_ram", lambda: 8 * GIB)
    assert f'    pipe = from_pretrained(Pipeline, "{pipeline}", dtype=torch.bfloat16)\n' in run("plan", pipeline)


def test_plan_as_json(model: Path, run: Terminal) -> None:
    given = "--vram", "4GiB", "--ram", "6GiB", "--step-seconds", "0.2", "--h2d-speed", "20GB", "--disk-speed", "2 GB/s"
    found = plan(run, model, *given)
    assert found["title"] == f"Plan of {model}" and "disk to RAM 2 GB/s (given)" in found["sentences"][-1]
    [part] = found["models"]
    assert (part["name"], part["model_class"], part["num_passes"], part["num_cast"]) == ("", "Model", 1, 0)
    assert part["num_bytes"] == 10 * GIB + 64 * MIB == sum(group["num_bytes"] for group in part["groups"])
    assert part["outer_bytes"] == bytes_at(part, "on the device during a forward") == 64 * MIB
    assert part["slot_bytes"] == GIB
    assert 4 * GIB > part["device_bytes"] == bytes_at(part, "on the device") + GIB > GIB
    assert 0 < bytes_at(part, "pinned RAM") <= part["ram_bytes"] <= part["ram_share_bytes"] < 4.5 * GIB
    assert part["step_seconds"] >= part["disk_seconds"] > part["h2d_seconds"] and part["bound"] == "disk"
    assert part["disk_seconds"] == part["disk_bytes"] / 2e9 and part["disk_bytes"] == bytes_at(part, "file") > 0
    assert [sentence.split(" would ")[0] for sentence in part["sentences"][1:]] == ["1 GiB more VRAM", "1 GiB more RAM"]
    assert found.keys() == {"title", "models", "sentences", "call"}
    assert part["groups"][0].keys() == {"name", "num_bytes", "place"}


def test_plan_for_people(model: Path, run: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """No device is asked."""

    def asked(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("asked")

    for module, name in ((torch.cuda, "_lazy_init"), (speeds, "measure_link")):
        monkeypatch.setattr(module, name, asked)
    said = run("plan", model, "--vram", "4GiB", "--ram", "6GiB")
    assert "Model: 10.1 GiB in 21 groups. 64 MiB around its blocks are on the device only during a forward." in said
    assert "Bottleneck: disk, predicted " in said
    assert "1 GiB more VRAM would save" in said and "1 GiB more RAM would save" in said
    assert (
        "Times cover weight transfers only" in said and said.count("(assumed)") == 2 and "group-offload doctor" in said
    )
    said = run(
        "plan", model, "--step-seconds", "0.5", "--dtype", "float32", "--h2d-speed", "1TB", "--disk-speed", "1GB"
    )
    assert "21 weights are cast to torch.float32" in said and "Compute is taken" not in said
    assert "Without --vram" in said and "Without --ram" in said and "1 GiB more" not in said
    assert "Bottleneck: compute, predicted 500 ms a forward (" in said and "assumed" not in said


def test_plan_of_a_pipeline(pipeline: Path, run: Terminal) -> None:
    """RAM goes to what runs most often first. Hazard: `plan` leaves out parts of an incomplete download, without which the
    pipeline does not open, and doesn't say so."""
    arguments = pipeline, "--vram", "2GiB", "--ram", "14GiB", "--step-seconds", "0.1"
    least = re.search(r"smallest that works is ([0-9.]+ \w+)", run("plan", pipeline, "--vram", "1MiB", status=2))
    assert least is not None
    run("plan", pipeline, "--vram", least[1].replace(" ", ""))
    denoiser, encoder = plan(run, *arguments)["models"]
    assert (denoiser["name"], denoiser["num_passes"]) == ("transformer", 28)
    assert (encoder["name"], encoder["num_passes"]) == ("text_encoder", 1)
    assert denoiser["ram_share_bytes"] == denoiser["num_bytes"] and bytes_at(denoiser, "file") == 0
    assert 0 < encoder["ram_share_bytes"] < encoder["num_bytes"] and bytes_at(encoder, "file") > 0
    assert denoiser["ram_share_bytes"] + encoder["ram_share_bytes"] < 12.5 * GIB
    assert denoiser["compute_seconds"] == pytest.approx(0.1) and encoder["compute_seconds"] == 0
    said = run("plan", *arguments, "--steps", "7")
    assert "transformer Model" in said and "7 forwards" in said and "text_encoder Model" in said
    assert "One image or video" in said and "Times of text_encoder cover weight transfers only" in said
    assert "Not planned" not in said
    shutil.rmtree(pipeline / "scheduler")
    assert "Not planned: scheduler. It is not there" in run("plan", pipeline)


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (["open_clip", "Tower"], "'open_clip' is neither diffusers nor transformers"),
        (["diffusers", "OfLaterVersions"], "the installed 'diffusers' has no such model"),
        (["diffusers", "Broken"], "cannot be imported: No module named 'flash'"),
    ],
    ids=lambda value: str(value[1]) if isinstance(value, list) else "",
)
def test_a_part_that_cannot_be_read(
    part: list[str], reason: str, pipeline: Path, run: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are planned, and it is named with the reason. A pipeline of such parts only is an error."""
    found = type(diffusers).__getattr__

    def importing(module: Any, name: str) -> Any:
        if name == "Broken":
            raise ImportError("No module named 'flash'")
        return found(module, name)

    monkeypatch.setattr(type(diffusers), "__getattr__", importing)
    write_model(pipeline / "tower", num_blocks=1)
    index = json.loads((pipeline / "model_index.json").read_text())
    (pipeline / "model_index.json").write_text(json.dumps(index | {"tower": part}))
    planned = plan(run, pipeline)
    assert [model["name"] for model in planned["models"]] == ["transformer", "text_encoder"]
    (sentence,) = (each for each in planned["sentences"] if each.startswith("Not planned: tower. "))
    assert reason in sentence
    assert sentence.split()[-1] in run("plan", pipeline)


ERRORS: dict[str, tuple[list[str], str]] = {
    "vram": (["--vram", "8G"], "argument --vram: SIZE='8G': it is ambiguous. Did you mean '8GiB' or '8GB'?"),
    "too little vram": (["--vram", "512MiB"], "The smallest that works is 1.19 GiB"),
    "too little for activations": (["--vram", "4GiB", "--activations", "3GiB"], "3 GiB of activations"),
    "too little ram": (["--ram", "1GiB"], "--host-overhead"),
    "dtype": (["--dtype", "bf17"], "argument --dtype: 'bf17' is no floating point dtype"),
    "seconds": (["--step-seconds", "-1"], "--step-seconds"),
    "steps": (["--steps", "0"], "--steps"),
    "no speed": (["--disk-speed", "0GB"], "--disk-speed"),
    "a page": (["--html", "/nowhere/x.html"], "/nowhere/x.html: /nowhere is not a folder"),
}


@pytest.mark.parametrize(("arguments", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(arguments: list[str], message: str, model: Path, run: Terminal) -> None:
    said = run("plan", model, *arguments, status=2)
    assert message in said.splitlines()[-1] and "Traceback" not in said


def test_page(pipeline: Path, tmp_path: Path, run: Terminal) -> None:
    """The page says what the JSON says, and needs nothing else."""
    path = tmp_path / "plan.html"
    budgets = ["--vram", "4GiB", "--ram", "12GiB", "--activations", "256MiB", "--step-seconds", "0.2"]
    found = as_json(run("plan", pipeline, *budgets, "--json", "--html", path))
    page = Page(path)
    assert "All times are predicted; nothing has run." in page.words and "(assumed)" in page.words
    for part in found["models"]:
        assert f"{part['name']} Model" in page.words and all(sentence in page.words for sentence in part["sentences"])
    assert "Wrote" in run("plan", pipeline / "transformer", "--html", path)  # without budgets
    assert "1 GiB more VRAM would save" in Page(path).words


def test_what_is_written_to_may_be_no_file(tmp_path: Path, run: Terminal) -> None:
    """A link goes on to lead to a file, a device stays what it is. Hazard: `plan --html /dev/full`, a pipe or a link is
    replaced by a regular file."""
    model = write_model(tmp_path / "model", 2, MIB, MIB)
    link, full = tmp_path / "link", tmp_path / "full"
    link.symlink_to(tmp_path / "file")
    run("plan", model, "--html", link)
    assert link.is_symlink() and (tmp_path / "file").read_text().startswith("<!DOCTYPE html>")
    full.symlink_to("/dev/full")
    assert "No space left" in run("plan", model, "--html", full, status=2) and not Path("/dev/full").is_file()


def test_speeds_that_were_measured(tmp_path: Path, run: Terminal) -> None:
    """The link's of the accelerator that was measured last, and decompression of the same one; the disk's of this file system
    alone."""
    model = write_model(tmp_path / "model", 2, MIB, MIB)

    def said() -> str:
        return next(line for line in plan(run, model, "--compress")["sentences"] if line.startswith("Speeds: "))

    assert said().count("(assumed)") == 3
    speeds.record("h2d", "RTX 4060", 12_000_000_000)
    speeds.record("h2d", "H200", 55_000_000_000)
    speeds.record("h2d", "CPU x", 3_000_000_000)
    speeds.record("disk", "elsewhere", 1_000_000_000)
    speeds.record("decompress", "RTX 4060", 1)
    assert (
        "RAM to device 55 GB/s (measured on H200), disk to RAM 3.5 GB/s (assumed), decompression 400 GB/s (a" in said()
    )
    speeds.record("h2d", "RTX 4060", 12_000_000_000)
    assert "RAM to device 12 GB/s (measured on RTX 4060)" in said() and said().count("(assumed)") == 1
    here = speeds.filesystem_of(model)
    speeds.record("disk", here, 2_000_000_000)
    assert f"disk to RAM 2 GB/s (measured on {here})" in said()
    assert "RAM to device 10 GB/s (given), disk to RAM 1 GB/s (given)." in run(
        "plan", model, "--h2d-speed", "10GB", "--disk-speed", "1GB"
    )
