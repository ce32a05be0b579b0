"""Headers of group files: any reader of safetensors files opens them, whatever tensors are called and look like."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from group_offload.base.layout import BlobLayout, lay_out
from group_offload.stores.safetensors_file import content_of, data_pieces, encode_header


def group_file(path: Path, named: dict[str, torch.Tensor]) -> BlobLayout:
    layout = lay_out(list(named), list(named.values()))
    data = list(data_pieces(layout, list(named.values())))
    header = encode_header(layout, "group\ud800", "Model", content_of(data))
    assert len(header) % 4096 == 0
    path.write_bytes(header + b"".join(piece.numpy().tobytes() for piece in data))
    return layout


def test_all_that_a_layout_can_hold(tmp_path: Path) -> None:
    """Strides, scalars, nothing, tied and overlapping tensors, and dtypes that the format lacks."""
    base = torch.arange(100.0)
    named = {
        "plain": torch.randn(3, 5),
        "transposed": torch.randn(4, 4).t(),
        "nothing": torch.zeros(0, 3),
        "scalar": torch.zeros(()),
        "half": torch.randn(3).half(),
        "complex": torch.randn(2).to(torch.complex64),
        "left": base[10:50],
        "right": base[20:80],
        "tied": base[20:80],
        "expanded": torch.ones(1).expand(7),
    }
    group_file(tmp_path / "file.safetensors", named)
    loaded = load_file(tmp_path / "file.safetensors")
    assert all(torch.equal(loaded[name], named[name]) for name in ("plain", "nothing", "scalar", "half"))
    assert loaded["complex"].dtype == torch.uint8


def test_empty_group(tmp_path: Path) -> None:
    group_file(tmp_path / "file.safetensors", {})
    assert load_file(tmp_path / "file.safetensors") == {}


NAMES = [
    "__metadata__",
    "__padding_0",
    "__padding_1",
    "__tensor_0",
    "__tensor_x",
    "\ud800",
    "\\ud800",
    "a\udfff.b",
    "\n",
]


def test_names_that_the_format_cannot_have(tmp_path: Path) -> None:
    """All names are there. Hazard: a weight is named `__metadata__`, or has half a character, and no reader opens its
    file."""
    named = {name: torch.full((3,), number) for number, name in enumerate(NAMES)}
    path = tmp_path / "file.safetensors"
    group_file(path, named)
    loaded = {name: value for name, value in load_file(path).items() if not name.startswith("__padding_")}
    assert sorted(value[0].item() for value in loaded.values()) == list(range(len(NAMES)))
    assert loaded["\\ud800"][0] == NAMES.index("\\ud800")
    header = json.loads(path.read_bytes()[8:4096])
    assert [spec[0] for spec in json.loads(header["__metadata__"]["group_offload.tensors"])] == NAMES
