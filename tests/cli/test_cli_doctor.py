"""The command `group-offload doctor`: its rows on machines of several kinds, and that it leaves nothing behind."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from group_offload.base import pagemap
from group_offload.cli import doctor
from group_offload.plan import speeds
from group_offload.plan.budgets import describe_bytes

from ..support.control_groups import GIB, Cgroups
from ..support.files import failing
from ..support.page_map import PageMap
from ..support.simulated import SimulatedDevice, use_simulated_device
from ..support.speeds import MIB, measure_little
from ..support.terminal import Terminal
from ..support.tuning import tune

ROWS = tuple(doctor.PROBES)
SEGMENT_BYTES = 16384

Ask = Callable[..., dict[str, dict[str, Any]]]


@pytest.fixture(autouse=True)
def _little_is_tried(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("gpu") is None:
        tune(monkeypatch, tried_file_bytes=1 << 20, tried_pin_bytes=4 * SEGMENT_BYTES, segment_bytes=SEGMENT_BYTES)
        tune(monkeypatch, tried_pin_seconds=60.0)
        monkeypatch.setattr(doctor, "nvidia_driver", str)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


@pytest.fixture
def ask(run: Terminal, folder: Path) -> Ask:
    """Asks for the rows as a program does. By default the device is the CPU, or the simulated device in its place."""

    def asked(device: str | None = "cpu") -> dict[str, dict[str, Any]]:
        named = () if device is None else ("--device", device)
        said = json.loads(run("doctor", folder, "--json", *named))
        rows = {row.pop("name"): row for row in said["rows"]}
        assert tuple(rows) == ROWS and said["folder"] == str(folder) and not list(folder.iterdir())
        for name, row in rows.items():
            assert row.keys() == {"found", "verdict", "remedy"} and row["found"], name
            assert bool(row["remedy"]) == (row["verdict"] in ("slower", "missing")), name
        return rows

    return asked


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    """What is pinned in place and what is allocated there is given back."""
    with use_simulated_device(SimulatedDevice(0, laziness="eager")) as found:
        yield found
        assert found.pinned_bytes == 0 and found.allocated_bytes == 0


def raises(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("out of\norder")


# ---------------------------------------------------------------- the command


def test_the_table(run: Terminal, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the current folder, by default."""
    monkeypatch.chdir(folder)
    said = run("doctor", "--device", "cpu")
    assert str(folder) in said and torch.__version__ in said
    for name in ROWS:
        assert re.search(rf"^{name.replace('_', ' ')} +(ok|slower|missing|unknown) ", said, re.MULTILINE)
    assert not list(folder.iterdir())


def test_what_cannot_be_tried(run: Terminal, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").touch()
    for path, why in ((folder / "nothing", "No such file"), (folder / "file", "Not a directory")):
        said = run("doctor", path, status=2)
        assert str(path) in said and why in said and "Pass a folder" in said
    missing = run("doctor", folder, "--device", "cuda:99", status=2)
    assert "'cuda:99'" in missing and "--device" in missing and "onload_device" not in missing

    # No test fills a disk: the last step of writing fails in its place.
    monkeypatch.setattr(os, "fsync", failing(errno.ENOSPC))
    said = run("doctor", folder, status=2)
    assert str(folder) in said and "No space left" in said and "1 MiB free" in said
    assert [path.name for path in folder.iterdir()] == ["file"]


@pytest.mark.parametrize("place", [(os, "fsync"), (speeds, "_measure_file")])
def test_an_interrupt_leaves_nothing_behind(
    place: tuple[Any, str], run: Terminal, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        assert len(list(folder.iterdir())) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(*place, interrupted)
    run("doctor", folder, "--device", "cpu", status=130)
    assert not list(folder.iterdir())


FAILURES: dict[str, tuple[Any, str]] = {
    "page_map": (doctor, "scans_quickly"),
    "pinning": (doctor, "PinLimit"),
    "ram": (doctor, "auto_ram"),
    "device": (SimulatedDevice, "free_bytes"),
    "link": (doctor, "measure_link"),
    "disk": (psutil, "disk_partitions"),
    "versions": (doctor, "version"),
}


def test_a_probe_that_fails_is_a_row(ask: Ask, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ROWS:
        with monkeypatch.context() as patch:
            patch.setattr(*FAILURES[name], raises)
            rows = ask()
        assert "RuntimeError: out of" in rows[name]["found"] and "order" not in rows[name]["found"]
        assert [other for other, row in rows.items() if row["verdict"] == "unknown"] == [name]


def test_speeds_are_kept_for_plans(
    run: Terminal, folder: Path, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the disk is told by a model's file, if there is one. Rows say what could not be kept."""
    measure_little(monkeypatch)
    sizes: list[int] = []

    def measured(fd: int) -> tuple[int, bool]:
        sizes.append(os.fstat(fd).st_size)
        return 2 * 10**9, True

    monkeypatch.setattr(speeds, "_measure_file", measured)
    run("doctor", folder, "--device", "cpu")
    assert sizes == [MIB]  # the file that is written for it
    assert speeds.recorded()["disk"] == {speeds.filesystem_of(folder): 2 * 10**9}
    assert speeds.recorded()["h2d"][speeds.device_name(device)] > 0
    (folder / "vae").mkdir()
    (folder / "vae" / "model.safetensors").write_bytes(bytes(2 * MIB))
    monkeypatch.setattr(speeds, "record_file", lambda: None)
    assert run("doctor", folder, "--device", "cpu").count("set XDG_CACHE_HOME") == 2
    assert sizes == [MIB, 2 * MIB]


# ---------------------------------------------------------------- rows


def memory(total: float, available: float) -> Callable[[pytest.MonkeyPatch], None]:
    found = SimpleNamespace(total=int(total * GIB), available=int(available * GIB))
    return lambda patch: patch.setattr(psutil, "virtual_memory", lambda: found)


def answers(place: Any, name: str, *answer: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """A call that gives this, or raises if no answer is given."""
    return lambda patch: patch.setattr(place, name, (lambda *_, **__: answer[0]) if answer else raises)


def no_diffusers(patch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "peft":
            raise doctor.PackageNotFoundError(name)
        return "0.20"

    patch.setattr(doctor, "version", version)


def a_small_container(patch: pytest.MonkeyPatch) -> None:
    memory(64, 0.5)(patch)
    answers(doctor, "total_ram", GIB)(patch)


def a_driver_beside_a_torch_for_the_cpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(doctor, "nvidia_driver", lambda: "570.1")
    patch.setattr(torch.accelerator, "is_available", lambda: False)


Change = Callable[[pytest.MonkeyPatch], None]
INSTALL = "pip install 'group-offload[diffusers]'"
ROWS_OF: list[tuple[str, Change, str, str, str]] = [
    ("ram", memory(64, 40), "ok", '64 GiB, 40 GiB available; ram_budget="auto" is 36 GiB now', ""),
    ("ram", memory(64, 0.5), "missing", "", ""),
    ("ram", a_small_container, "missing", "the container's limit is 1 GiB", "--memory"),
    ("disk", answers(doctor, "measure_disk", (10**9, "")), "ok", "xfs, ", ""),
    ("disk", answers(doctor, "measure_disk", (10**9 - 1, "")), "slower", "1.00 GB/s from disk to RAM", ""),
    ("disk", answers(doctor, "measure_disk", (10**9, "It has no O_DIRECT.")), "slower", "no O_DIRECT", "ext4"),
    ("disk", answers(doctor, "measure_disk", (10**8, "It has no O_DIRECT.")), "slower", "no O_DIRECT", "btrfs"),
    ("disk", answers(doctor, "measure_disk", (None, "it is asleep")), "unknown", "it is asleep", ""),
    ("device", answers(torch.accelerator, "current_accelerator"), "missing", "out of", ""),
    ("device", a_driver_beside_a_torch_for_the_cpu, "missing", "", ""),
    ("versions", no_diffusers, "missing", "peft 0.20", INSTALL),
    ("pinning", lambda patch: None, "ok", "not needed", ""),
]
"""A row, what changes on the machine, and what the row says then: its verdict, words of it, and words of the remedy."""


@pytest.mark.parametrize(("name", "change", "verdict", "found", "remedy"), ROWS_OF)
def test_rows(
    name: str,
    change: Change,
    verdict: str,
    found: str,
    remedy: str,
    ask: Ask,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mounts = [("/", "zfs"), (str(folder.parent), "xfs"), (str(folder)[:-1], "nfs"), (str(folder / "in"), "vfat")]
    disks = [SimpleNamespace(mountpoint=path, fstype=kind) for path, kind in mounts]
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: disks)
    Cgroups(tmp_path, monkeypatch).say("0::/docker")
    change(monkeypatch)
    row = ask(device=None if found == "out of" else "cpu")[name]
    assert row["verdict"] == verdict and found in row["found"] and remedy in row["remedy"]


@pytest.mark.skipif(not pagemap.can_detect_writes(), reason="this system does not tell which pages were written")
def test_page_map(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        page_map = PageMap(monkeypatch)
        page_map.refuse_scans()
        row = ask()["page_map"]
        assert row["verdict"] == "slower" and "6.7" in row["remedy"]
        page_map.refuse()
        row = ask()["page_map"]
        assert row["verdict"] == "missing" and "sandbox" in row["remedy"]
    finally:
        monkeypatch.undo()
        pagemap._Known.forget()


@pytest.mark.parametrize(("num_pinned", "verdict"), [(4, "ok"), (2, "slower"), (0, "missing")])
def test_pinning(
    num_pinned: int, verdict: str, ask: Ask, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first refusal the device is asked no more."""
    real, asked = device.pin, list[int]()

    def pin(memory: torch.Tensor, undo: list[Callable[[], None]], *, read_only: bool = False) -> bool:
        asked.append(memory.numel())
        return len(asked) <= num_pinned and real(memory, undo)

    monkeypatch.setattr(device, "pin", pin)
    monkeypatch.setattr(device, "empty_pinned", lambda num_bytes: None)
    monkeypatch.setattr(doctor, "measure_link", lambda *args: 6 * 10**9)  # it locks too
    rows = ask()
    row = rows["pinning"]
    assert row["verdict"] == verdict and ("--ulimit memlock=-1" in row["remedy"]) == (verdict != "ok")
    assert sum(asked) == min(num_pinned + 1, 4) * SEGMENT_BYTES
    pinned, tried = describe_bytes(num_pinned * SEGMENT_BYTES), describe_bytes(sum(asked))
    assert f"pinned {pinned} of {tried}" in row["found"]
    assert (rows["link"]["verdict"], rows["link"]["found"]) == ("slower", "6.0 GB/s from RAM to the device")


def test_half_of_the_ram_under_wsl2(ask: Ask, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "release", lambda: "6.6.87-microsoft-WSL2")
    memory = SimpleNamespace(total=2 * SEGMENT_BYTES, available=12 * SEGMENT_BYTES)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(doctor, "measure_link", lambda *args: 10**10)  # it locks too
    row = ask()["pinning"]
    assert "pinned 16 KiB of 16 KiB" in row["found"] and ".wslconfig" in row["remedy"]


@pytest.mark.gpu
def test_the_rows_of_an_accelerator(run: Terminal, folder: Path) -> None:
    rows = {row["name"]: row for row in json.loads(run("doctor", folder, "--json"))["rows"]}
    device = torch.accelerator.current_accelerator()
    assert device is not None and not list(folder.iterdir())
    for name in ("pinning", "device", "link"):
        assert rows[name]["verdict"] != "unknown", rows[name]
    assert "GB/s from RAM to the device" in rows["link"]["found"]
    if device.type == "cuda":
        assert torch.cuda.get_device_name() in rows["device"]["found"]
        assert f"cuda {torch.version.cuda}" in rows["versions"]["found"]
