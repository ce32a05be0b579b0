"""The command `group-offload doctor`: its rows on machines of several kinds, and that it leaves nothing behind."""

from __future__ import annotations

import errno
import json
import os
import platform
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import group_offload
from group_offload.base import pagemap
from group_offload.base.device import HostBackend
from group_offload.cli import doctor, probes
from group_offload.stores.folder import Folder
from group_offload.stores.source import SourceFile

from ..support.control_groups import GIB, Cgroups
from ..support.page_map import PageMap
from ..support.simulated import SimulatedDevice, use_simulated_device
from ..support.terminal import Terminal
from ..support.tuning import tune

ROWS = (
    "kernel",
    "page_map",
    "page_locking",
    "mapped_files",
    "direct_reads",
    "ram",
    "control_groups",
    "device",
    "link",
    "drive",
    "versions",
)
SEGMENT_BYTES = 16384
LOCK_BYTES = 4 * SEGMENT_BYTES
needs_page_map = pytest.mark.skipif(
    not pagemap.can_detect_writes(), reason="this system does not tell which pages were written"
)
NVIDIA = {
    "name": "NVIDIA H200",
    "driver_version": "570.1",
    "pcie.link.gen.max": "5",
    "pcie.link.width.max": "16",
}

Rows = dict[str, dict[str, Any]]
Ask = Callable[..., Rows]


@pytest.fixture(autouse=True)
def _little_is_tried(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("gpu") is None:
        tune(monkeypatch, tried_file_bytes=1 << 20, tried_lock_bytes=LOCK_BYTES, segment_bytes=SEGMENT_BYTES)
        tune(monkeypatch, tried_lock_seconds=60.0)
        monkeypatch.setattr(doctor, "ask_nvidia", lambda backend: {})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(capsys)


@pytest.fixture
def ask(run: Terminal, folder: Path) -> Ask:
    """Asks for the rows as a program does. By default the device is the CPU, or the simulated device in its place."""

    def asked(device: str | None = "cpu") -> Rows:
        named = () if device is None else ("--device", device)
        said = json.loads(run("doctor", folder, "--json", *named))
        rows = {row.pop("name"): row for row in said["rows"]}
        assert tuple(rows) == ROWS and said["folder"] == str(folder) and not list(folder.iterdir())
        for name, row in rows.items():
            assert row.keys() == {"found", "verdict", "remedy", "values"} and row["found"], name
            assert row["verdict"] in ("ok", "slower", "missing", "unknown"), name
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


def test_the_table(run: Terminal, folder: Path) -> None:
    said = run("doctor", folder, "--device", "cpu")
    assert str(folder) in said and "what to do" in said and torch.__version__ in said
    for name in ROWS:
        assert f" {name.replace('_', ' ')} " in said
    assert not list(folder.iterdir())


def test_the_folder_is_the_current_one_by_default(run: Terminal, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert json.loads(run("doctor", "--device", "cpu", "--json"))["folder"] == str(folder)
    assert not list(folder.iterdir())


def test_folders_that_are_none(run: Terminal, folder: Path) -> None:
    (folder / "file").touch()
    for path, why in ((folder / "nothing", "No such file"), (folder / "file", "Not a directory")):
        said = run("doctor", path, status=2)
        assert str(path) in said and why in said and "Give a folder" in said
    assert [path.name for path in folder.iterdir()] == ["file"]


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_folders_that_cannot_be_written_to(
    code: int, run: Terminal, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*args: Any) -> None:
        raise OSError(code, os.strerror(code))

    # The superuser may write everywhere, and no test fills a drive: the last step of writing fails in their place.
    monkeypatch.setattr(os, "fsync", refuses)
    said = run("doctor", folder, status=2)
    assert str(folder) in said and os.strerror(code) in said and "Give a folder" in said and "1 MiB free" in said
    assert not list(folder.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_folder_of_somebody_else(run: Terminal, folder: Path) -> None:
    folder.chmod(0o500)
    said = run("doctor", folder, status=2)
    assert str(folder) in said and "Permission denied" in said and "Give a folder" in said


@pytest.mark.parametrize("name", ["cuda:999", "no device"])
def test_a_device_that_does_not_exist(name: str, run: Terminal, folder: Path) -> None:
    assert name.partition(":")[0] in run("doctor", folder, "--device", name, status=2)


@pytest.mark.parametrize("where", ["the file", "a probe"])
def test_an_interrupt_leaves_nothing_behind(
    where: str, run: Terminal, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        assert len(list(folder.iterdir())) == 1
        raise KeyboardInterrupt

    if where == "the file":
        monkeypatch.setattr(os, "fsync", interrupted)
    else:
        monkeypatch.setattr(probes, "measure_drive", interrupted)
    run("doctor", folder, "--device", "cpu", status=130)
    assert not list(folder.iterdir())


def test_what_a_kill_leaves_is_removed_by_the_next_set_up(
    run: Terminal, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_remove", lambda path: None)
    run("doctor", folder, "--device", "cpu")
    assert len(list(folder.iterdir())) == 1
    Folder(folder).prepare(0)
    assert not list(folder.iterdir())


FAILURES: dict[str, tuple[Any, str]] = {
    "kernel": (probes, "is_wsl2"),
    "page_map": (probes, "detection"),
    "page_locking": (probes, "LockLimit"),
    "mapped_files": (SourceFile, "lock"),
    "direct_reads": (SourceFile, "read"),
    "ram": (probes, "auto_ram"),
    "control_groups": (probes, "memory_limits"),
    "device": (SimulatedDevice, "free_bytes"),
    "link": (probes, "measure_link"),
    "drive": (psutil, "disk_partitions"),
    "versions": (probes, "version"),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_probe_that_fails_is_a_row(
    name: str, ask: Ask, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*FAILURES[name], raises)
    rows = ask()
    assert "RuntimeError: out of" in rows[name]["found"] and "order" not in rows[name]["found"]
    assert [other for other, row in rows.items() if row["verdict"] == "unknown"] == [name]


# ---------------------------------------------------------------- kernel, page map


def test_kernel(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "release", lambda: "6.8.0-generic")
    row = ask()["kernel"]
    assert row["verdict"] == "ok" and row["values"] == {"release": "6.8.0-generic", "is_wsl2": False}
    monkeypatch.setattr(platform, "release", lambda: "6.6.87-microsoft-standard-WSL2")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=16 * GIB, available=12 * GIB))
    row = ask()["kernel"]
    assert row["verdict"] == "slower" and row["values"]["is_wsl2"]
    assert "WSL2" in row["found"] and "8 GiB" in row["found"] and ".wslconfig" in row["remedy"]


@needs_page_map
def test_page_map(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        page_map = PageMap(monkeypatch)
        monkeypatch.setattr(pagemap._Known, "lacks_scan", True)
        row = ask()["page_map"]
        assert row["verdict"] == "slower" and row["values"] == {"way": "/proc/self/pagemap"} and "6.7" in row["remedy"]
        page_map.refuse()
        row = ask()["page_map"]
        assert row["verdict"] == "missing" and row["values"] == {"way": "none"} and "sandbox" in row["remedy"]
        page_map.allow()
        monkeypatch.setattr(pagemap.PageScan, "_scan", lambda self, fd: pagemap._read_entries(fd, *span(self)))
        row = ask()["page_map"]
        assert row["verdict"] == "ok" and row["values"] == {"way": "PAGEMAP_SCAN"}
    finally:
        monkeypatch.undo()
        pagemap._Known.forget()


def span(scan: pagemap.PageScan) -> tuple[int, int]:
    return scan._address, scan._length


@needs_page_map
def test_a_kernel_without_scans(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        PageMap(monkeypatch).refuse_scans()
        assert ask()["page_map"]["verdict"] == "slower"
    finally:
        monkeypatch.undo()
        pagemap._Known.forget()


# ---------------------------------------------------------------- page-locking


def test_the_cpu_locks_nothing(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (8 << 20, 16 << 20))
    rows = ask()
    assert all(rows[name]["verdict"] == "ok" for name in ("page_locking", "mapped_files", "link"))
    assert "not needed" in rows["page_locking"]["found"] and "ulimit -l: 8 MiB" in rows["page_locking"]["found"]
    assert rows["page_locking"]["values"] == {"memlock_limit_bytes": 8 << 20}


def test_all_is_locked(ask: Ask, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    infinity = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (infinity, infinity))
    rows = ask()
    assert rows["page_locking"]["verdict"] == rows["mapped_files"]["verdict"] == "ok"
    assert "64 KiB were tried, and none refused (ulimit -l: unlimited)" in rows["page_locking"]["found"]
    assert rows["page_locking"]["values"] == {
        "memlock_limit_bytes": None,
        "tried_bytes": LOCK_BYTES,
        "locked_bytes": LOCK_BYTES,
        "driver_bytes": 0,
        "is_refused": False,
    }
    assert rows["mapped_files"]["values"] == {"is_locked": True}


@pytest.mark.parametrize(("num_locked", "verdict"), [(2, "slower"), (0, "missing")])
def test_little_is_locked(
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
    monkeypatch.setattr(probes, "measure_link", lambda *args: 1)  # it locks too
    row = ask()["page_locking"]
    assert row["verdict"] == verdict and row["values"]["is_refused"] and "--ulimit memlock=-1" in row["remedy"]
    assert row["values"]["locked_bytes"] == num_locked * SEGMENT_BYTES
    assert row["values"]["tried_bytes"] == sum(asked) == (num_locked + 1) * SEGMENT_BYTES


def test_memory_of_the_drivers_own(ask: Ask, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "pin", lambda memory, undo, *, read_only=False: False)
    monkeypatch.setattr(device, "empty_pinned", lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    row = ask()["page_locking"]
    assert row["verdict"] == "slower" and "driver" in row["found"] and not row["values"]["is_refused"]
    assert row["values"]["driver_bytes"] == LOCK_BYTES and row["values"]["locked_bytes"] == 0


@pytest.mark.parametrize("release", ["6.8.0-generic", "6.6.87-microsoft-standard-WSL2"])
def test_no_more_is_locked_than_is_left(
    release: str, ask: Ask, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of what is available, and under WSL2 half of the RAM at most."""
    monkeypatch.setattr(platform, "release", lambda: release)
    memory = SimpleNamespace(total=2 * SEGMENT_BYTES, available=12 * SEGMENT_BYTES)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    values = ask()["page_locking"]["values"]
    most = SEGMENT_BYTES if "microsoft" in release else 3 * SEGMENT_BYTES
    assert values["tried_bytes"] == values["locked_bytes"] == most and not values["is_refused"]


def test_mapped_files_that_the_driver_does_not_lock(
    ask: Ask, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = device.pin
    monkeypatch.setattr(device, "pin", lambda memory, undo, *, read_only=False: not read_only and real(memory, undo))
    rows = ask()
    assert rows["mapped_files"]["verdict"] == "slower" and rows["mapped_files"]["values"] == {"is_locked": False}
    assert "staging" in rows["mapped_files"]["found"] and rows["page_locking"]["verdict"] == "ok"


# ---------------------------------------------------------------- files


def test_direct_reads(ask: Ask, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locking the file before has read it into the page cache, as a driver does."""
    real = device.pin

    def pin(memory: torch.Tensor, undo: list[Callable[[], None]], *, read_only: bool = False) -> bool:
        memory.sum()
        return real(memory, undo, read_only=read_only)

    monkeypatch.setattr(device, "pin", pin)
    rows = ask()
    assert rows["direct_reads"]["verdict"] == ("ok" if rows["direct_reads"]["values"]["is_direct"] else "slower")
    if rows["drive"]["values"]["filesystem"] in ("ext4", "xfs", "btrfs"):
        assert rows["direct_reads"]["values"] == {"is_direct": True, "stays_cached": False}


def test_a_page_that_is_dropped_only_when_asked_again(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel drops no page that it works on itself at that moment."""
    answers = [True, True, False]
    monkeypatch.setattr(SourceFile, "is_cached", lambda *args: answers.pop(0) if answers else False)
    values = ask()["direct_reads"]["values"]
    assert not values["stays_cached"] and not answers


def test_no_direct_reads(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(SourceFile, "is_cached", lambda *args: False)
    row = ask()["direct_reads"]
    assert row["verdict"] == "slower" and "no O_DIRECT" in row["found"]
    assert row["values"] == {"is_direct": False, "stays_cached": False}
    monkeypatch.setattr(SourceFile, "is_cached", lambda *args: True)
    row = ask()["direct_reads"]
    assert row["verdict"] == "slower" and "stay in the page cache" in row["found"] and row["values"]["stays_cached"]


@pytest.mark.parametrize(("speed", "verdict"), [(10**9, "ok"), (10**9 - 1, "slower"), (None, "unknown")])
def test_drive(speed: int | None, verdict: str, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "measure_drive", lambda *args: (speed, "" if speed else "it is asleep"))
    row = ask()["drive"]
    assert row["verdict"] == verdict and row["values"]["read"] == speed and row["values"]["free_bytes"] > 0
    assert ("NVMe" in row["remedy"]) == (verdict == "slower") and ("it is asleep" in row["found"]) == (speed is None)


def test_the_drive_is_that_of_the_folder(ask: Ask, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = [("/", "zfs"), (str(folder.parent), "xfs"), (str(folder)[:-1], "nfs"), (str(folder / "in"), "vfat")]
    found = [SimpleNamespace(mountpoint=path, fstype=kind) for path, kind in mounts]
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: found)
    row = ask()["drive"]
    assert row["values"]["filesystem"] == "xfs" and row["values"]["read"] > 0


# ---------------------------------------------------------------- RAM


def test_ram_and_control_groups(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Cgroups(tmp_path, monkeypatch)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=40 * GIB))
    groups.say("0::/docker")
    rows = ask()
    assert rows["ram"]["verdict"] == rows["control_groups"]["verdict"] == "ok"
    assert rows["ram"]["values"] == {
        "total_bytes": 64 * GIB,
        "available_bytes": 40 * GIB,
        "auto_budget_bytes": 36 * GIB,
    }
    assert rows["control_groups"]["values"] == {"limit_bytes": None}
    groups.write("/docker", memory__max=8 * GIB)
    row = ask()["control_groups"]
    assert row["verdict"] == "slower" and row["values"] == {"limit_bytes": 8 * GIB} and "--memory" in row["remedy"]
    assert "8 GiB of 64 GiB" in row["found"]
    groups.say("4:memory:/old")
    groups.write("/old", version=1, memory__limit_in_bytes=(1 << 63) - 4096)  # no limit
    assert ask()["control_groups"]["verdict"] == "ok"
    groups.write("/old", version=1, memory__limit_in_bytes=4 * GIB)
    assert ask()["control_groups"]["values"] == {"limit_bytes": 4 * GIB}


def test_no_ram_is_left(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=GIB // 2))
    row = ask()["ram"]
    assert row["verdict"] == "missing" and row["values"]["auto_budget_bytes"] == 0


# ---------------------------------------------------------------- devices


def test_a_driver_that_raises(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", raises)
    rows = ask(device=None)
    assert rows["device"]["verdict"] == "missing" and "out of" in rows["device"]["found"]
    assert rows["drive"]["verdict"] in ("ok", "slower")


@pytest.mark.parametrize("sees_it", [False, True])
def test_a_torch_for_the_cpu_beside_a_driver(sees_it: bool, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--device cpu` on a machine where all is well nothing is missing."""
    monkeypatch.setattr(doctor, "ask_nvidia", lambda backend: NVIDIA)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: sees_it)
    rows = ask()
    assert rows["device"]["verdict"] == ("ok" if sees_it else "missing")
    assert ("NVIDIA H200" in rows["device"]["found"]) != sees_it
    assert rows["versions"]["values"]["driver"] == "570.1"


def test_a_device(ask: Ask, device: SimulatedDevice) -> None:
    rows = ask()
    assert rows["device"]["verdict"] == rows["link"]["verdict"] == "ok"
    assert rows["device"]["values"]["total_bytes"] == rows["device"]["values"]["free_bytes"] == device.capacity
    assert rows["link"]["values"]["h2d"] > 0 and rows["link"]["values"]["pcie_width"] is None


@pytest.mark.parametrize(
    ("speed", "lanes", "verdict"),
    [(55, "16", "ok"), (25, "16", "slower"), (25, "8", "ok"), (25, "[N/A]", "ok")],
)
def test_link(
    speed: int, lanes: str, verdict: str, ask: Ask, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PCIe 5 x16 could carry 63 GB/s."""
    monkeypatch.setattr(doctor, "ask_nvidia", lambda backend: {**NVIDIA, "pcie.link.width.max": lanes})
    monkeypatch.setattr(probes, "measure_link", lambda *args: speed * 10**9)
    row = ask()["link"]
    assert row["verdict"] == verdict and row["values"]["h2d"] == speed * 10**9
    assert row["values"]["pcie_width"] == (int(lanes) if lanes.isdecimal() else None)


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("echo 'NVIDIA H200, 570.1, 5, 16'; echo 'NVIDIA H200, 570.1, 5, 8'", NVIDIA),
        (r"printf 'NV\377IDIA, 1'", {"name": "NV\ufffdIDIA", "driver_version": "1"}),
        ("echo 'No devices were found'; exit 6", {}),
        (None, {}),
    ],
)
def test_what_nvidia_smi_says(
    script: str | None, found: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o700)
    assert probes.ask_nvidia(HostBackend()) == found


def test_versions(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"diffusers": "0.42.1", "peft": "0.20"}

    def version(name: str) -> str:
        if name not in found:
            raise probes.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(probes, "version", version)
    row = ask()["versions"]
    assert row["verdict"] == "ok" and "transformers -" in row["found"]
    assert row["values"]["group_offload"] == group_offload.__version__ and row["values"]["torch"] == torch.__version__
    assert row["values"]["peft"] == "0.20" and row["values"]["transformers"] is None
    del found["diffusers"]
    row = ask()["versions"]
    assert row["verdict"] == "missing" and "pip install 'group-offload[diffusers]'" in row["remedy"]


# ---------------------------------------------------------------- an accelerator


@pytest.mark.gpu
def test_the_rows_of_an_accelerator(run: Terminal, folder: Path) -> None:
    rows = {row["name"]: row for row in json.loads(run("doctor", folder, "--json"))["rows"]}
    device = torch.accelerator.current_accelerator()
    assert device is not None and not list(folder.iterdir())
    for name in ("page_locking", "mapped_files", "device", "link"):
        assert rows[name]["verdict"] != "unknown", rows[name]
    locked = rows["page_locking"]["values"]
    assert locked["tried_bytes"] >= locked["locked_bytes"] + locked["driver_bytes"] > 0
    assert locked["is_refused"] == (locked["tried_bytes"] > locked["locked_bytes"] + locked["driver_bytes"])
    assert isinstance(rows["mapped_files"]["values"]["is_locked"], bool)
    assert 0 < rows["device"]["values"]["free_bytes"] <= rows["device"]["values"]["total_bytes"]
    assert rows["link"]["values"]["h2d"] > 10**9
    if device.type == "cuda":
        assert rows["device"]["values"]["name"] == torch.cuda.get_device_name()
        assert rows["versions"]["values"]["cuda"] == torch.version.cuda
