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

import group_offload
from group_offload.base import pagemap
from group_offload.cli import doctor
from group_offload.plan.budgets import describe_bytes
from group_offload.stores.source import SourceFile

from ..support.control_groups import GIB, Cgroups
from ..support.files import failing
from ..support.page_map import PageMap
from ..support.simulated import SimulatedDevice, use_simulated_device
from ..support.terminal import Terminal
from ..support.tuning import tune

ROWS = tuple(doctor.PROBES)
SEGMENT_BYTES = 16384

Ask = Callable[..., dict[str, dict[str, Any]]]


@pytest.fixture(autouse=True)
def _little_is_tried(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("gpu") is None:
        tune(monkeypatch, tried_file_bytes=1 << 20, tried_lock_bytes=4 * SEGMENT_BYTES, segment_bytes=SEGMENT_BYTES)
        tune(monkeypatch, tried_lock_seconds=60.0)
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
    """What is locked in place and what is allocated there is given back."""
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

    # No test fills a drive: the last step of writing fails in its place.
    monkeypatch.setattr(os, "fsync", failing(errno.ENOSPC))
    said = run("doctor", folder, status=2)
    assert str(folder) in said and "No space left" in said and "1 MiB free" in said
    assert [path.name for path in folder.iterdir()] == ["file"]


@pytest.mark.parametrize("place", [(os, "fsync"), (doctor, "measure_drive")])
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
    "page_locking": (doctor, "LockLimit"),
    "mapped_files": (SourceFile, "lock"),
    "direct_reads": (doctor, "read_part"),
    "ram": (doctor, "auto_ram"),
    "device": (SimulatedDevice, "free_bytes"),
    "link": (doctor, "measure_link"),
    "drive": (psutil, "disk_partitions"),
    "versions": (doctor, "version"),
}


def test_a_probe_that_fails_is_a_row(ask: Ask, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ROWS:
        with monkeypatch.context() as patch:
            patch.setattr(*FAILURES[name], raises)
            rows = ask()
        assert "RuntimeError: out of" in rows[name]["found"] and "order" not in rows[name]["found"]
        assert [other for other, row in rows.items() if row["verdict"] == "unknown"] == [name]


# ---------------------------------------------------------------- rows


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


def test_the_cpu_needs_no_link_and_no_page_locking(ask: Ask) -> None:
    rows = ask()
    assert all(rows[name]["verdict"] == "ok" for name in ("page_locking", "mapped_files", "link", "device"))
    assert "not needed" in rows["page_locking"]["found"] and "ulimit -l: " in rows["page_locking"]["found"]


@pytest.mark.parametrize(("num_locked", "verdict"), [(4, "ok"), (2, "slower"), (0, "missing")])
def test_page_locking(
    num_locked: int, verdict: str, ask: Ask, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first refusal the device is asked no more."""
    real, asked = device.pin, list[int]()

    def pin(memory: torch.Tensor, undo: list[Callable[[], None]], *, read_only: bool = False) -> bool:
        if not read_only:
            asked.append(memory.numel())
        return len(asked) <= num_locked and real(memory, undo, read_only=read_only)

    monkeypatch.setattr(device, "pin", pin)
    monkeypatch.setattr(device, "empty_pinned", lambda num_bytes: None)
    monkeypatch.setattr(doctor, "measure_link", lambda *args: 1)  # it locks too
    row = ask()["page_locking"]
    assert row["verdict"] == verdict and ("--ulimit memlock=-1" in row["remedy"]) == (verdict != "ok")
    assert sum(asked) == min(num_locked + 1, 4) * SEGMENT_BYTES
    locked, tried = describe_bytes(num_locked * SEGMENT_BYTES), describe_bytes(sum(asked))
    assert f"pinned {locked} of {tried}" in row["found"]


@pytest.mark.parametrize(("release", "size"), [("6.8.0-generic", "48 KiB"), ("6.6.87-microsoft-WSL2", "16 KiB")])
def test_no_more_is_locked_than_is_left(
    release: str, size: str, ask: Ask, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of what is available, and under WSL2 half of the RAM at most."""
    monkeypatch.setattr(platform, "release", lambda: release)
    memory = SimpleNamespace(total=2 * SEGMENT_BYTES, available=12 * SEGMENT_BYTES)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    rows = ask()
    assert release in rows["versions"]["found"]
    assert f"pinned {size} of {size}" in rows["page_locking"]["found"]
    assert (".wslconfig" in rows["page_locking"]["remedy"]) == ("microsoft" in release)


@pytest.mark.parametrize("when", ["opened", "read"])
def test_direct_reads(when: str, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ask()
    if rows["drive"]["found"].partition(",")[0] in ("ext4", "xfs", "btrfs"):
        assert rows["direct_reads"]["verdict"] == "ok" and "O_DIRECT works" in rows["direct_reads"]["found"]
    monkeypatch.setattr(doctor, "open_direct", os.dup if when == "read" else lambda fd: None)
    monkeypatch.setattr(doctor, "read_part", failing(errno.EINVAL))
    row = ask()["direct_reads"]
    assert row["verdict"] == "slower" and "no O_DIRECT" in row["found"]


@pytest.mark.parametrize(("speed", "verdict"), [(10**9, "ok"), (10**9 - 1, "slower"), (None, "unknown")])
def test_drive(speed: int | None, verdict: str, ask: Ask, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the folder."""
    mounts = [("/", "zfs"), (str(folder.parent), "xfs"), (str(folder)[:-1], "nfs"), (str(folder / "in"), "vfat")]
    found = [SimpleNamespace(mountpoint=path, fstype=kind) for path, kind in mounts]
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: found)
    monkeypatch.setattr(doctor, "measure_drive", lambda *args: (speed, "" if speed else "it is asleep"))
    row = ask()["drive"]
    said = "1.00 GB/s from disk to RAM" if speed else "it is asleep"
    assert row["verdict"] == verdict and re.fullmatch(rf"xfs, [0-9.]+ \w+ free.* {said}", row["found"])


def test_ram_and_the_limit_of_a_container(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Cgroups(tmp_path, monkeypatch)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=40 * GIB))
    groups.say("0::/docker")
    row = ask()["ram"]
    assert row["verdict"] == "ok" and row["found"] == '64 GiB, 40 GiB available; ram_budget="auto" is 36 GiB now'
    groups.write("/docker", memory__max=8 * GIB)
    row = ask()["ram"]
    assert row["verdict"] == "slower" and "limit is 8 GiB" in row["found"] and "--memory" in row["remedy"]
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=GIB // 2))
    assert ask()["ram"]["verdict"] == "missing"


def test_a_driver_that_raises(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", raises)
    rows = ask(device=None)
    assert rows["device"]["verdict"] == "missing" and "out of" in rows["device"]["found"]
    assert rows["drive"]["verdict"] in ("ok", "slower")


def test_a_torch_for_the_cpu_beside_a_driver(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--device cpu` on a machine where all is well nothing is missing."""
    monkeypatch.setattr(doctor, "nvidia_driver", lambda: "570.1")
    for sees_it, verdict in ((False, "missing"), (True, "ok")):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda sees_it=sees_it: sees_it)
        rows = ask()
        assert rows["device"]["verdict"] == verdict and "driver 570.1" in rows["versions"]["found"]


def test_device_and_link(ask: Ask, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    for speed, verdict in ((10, "ok"), (6, "slower")):
        monkeypatch.setattr(doctor, "measure_link", lambda *args, speed=speed: speed * 10**9)
        rows = ask()
        assert rows["link"]["verdict"] == verdict
        assert rows["link"]["found"] == f"{speed}.0 GB/s from RAM to the device"
    size = describe_bytes(device.capacity)
    assert rows["device"]["verdict"] == "ok" and rows["device"]["found"].endswith(f"{size}, {size} free")


def test_versions(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "peft":
            raise doctor.PackageNotFoundError(name)
        return "0.20"

    monkeypatch.setattr(doctor, "version", version)
    row = ask()["versions"]
    assert row["verdict"] == "missing" and "pip install 'group-offload[diffusers]'" in row["remedy"]
    assert "transformers -" in row["found"] and "peft 0.20" in row["found"]
    assert f"group_offload {group_offload.__version__}" in row["found"] and f"torch {torch.__version__}" in row["found"]


@pytest.mark.gpu
def test_the_rows_of_an_accelerator(run: Terminal, folder: Path) -> None:
    rows = {row["name"]: row for row in json.loads(run("doctor", folder, "--json"))["rows"]}
    device = torch.accelerator.current_accelerator()
    assert device is not None and not list(folder.iterdir())
    for name in ("page_locking", "mapped_files", "device", "link"):
        assert rows[name]["verdict"] != "unknown", rows[name]
    assert "GB/s from RAM to the device" in rows["link"]["found"]
    if device.type == "cuda":
        assert torch.cuda.get_device_name() in rows["device"]["found"]
        assert f"cuda {torch.version.cuda}" in rows["versions"]["found"]
