"""What is measured, what is left behind, and what is kept for the next time. No speed itself is asserted."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from group_offload import ConfigError, StorageError, apply_group_offloading
from group_offload.base.device import Backend
from group_offload.base.system import own_descriptor
from group_offload.cli.arguments import find_checkpoint
from group_offload.plan import speeds
from group_offload.plan.placement import ASSUMED_DECOMPRESS
from group_offload.plan.speeds import ASSUMED_DISK, known_speeds, measure_link, record, record_file, recorded

from ..support.files import failing
from ..support.simulated import SimulatedDevice, use_simulated_device
from ..support.speeds import MIB, measure_little


@pytest.fixture(autouse=True)
def kept_in(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    measure_little(monkeypatch)
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def measure_disk(path: Path) -> tuple[int | None, str]:
    return speeds.measure_disk(path, MIB)


def write(path: Path, num_bytes: int = 3 * MIB) -> Path:
    path.write_bytes(os.urandom(num_bytes))
    with path.open("rb") as file:
        os.fdatasync(file.fileno())
    return path


# ---------------------------------------------------------------- the link


@pytest.mark.parametrize("pins", ["in place", "its own", "not at all"])
def test_a_device_with_streams(pins: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All copies are ordered, and nothing stays allocated or pinned."""
    device = SimulatedDevice(0, laziness="eager")
    if pins != "in place":
        real = device.pin
        monkeypatch.setattr(device, "pin", lambda memory, undo, *, read_only=False: False)
        monkeypatch.setattr(
            device,
            "empty_pinned",
            lambda n: memory if pins == "its own" and real(memory := torch.empty(n, dtype=torch.uint8), []) else None,
        )
    with use_simulated_device(device):
        assert measure_link(device, 2 * MIB) > 0
    assert device.copied_bytes == 8 * MIB and device.allocated_bytes == 0
    assert device.peak_bytes == 2 * MIB
    assert device.pinned_bytes == (2 * MIB if pins == "its own" else 0)  # it goes with the memory


# ---------------------------------------------------------------- the disk


@pytest.mark.parametrize("where", ["the file", "a folder in it", "a small file beside it"])
def test_a_file_of_the_model(where: str, tmp_path: Path) -> None:
    """It is read, and nothing is written."""
    folder = tmp_path / "transformer"
    folder.mkdir()
    path, small = write(folder / "model.safetensors"), write(folder / "a.safetensors", 1000)
    content = path.read_bytes()
    given = {"the file": path, "a folder in it": tmp_path}.get(where, small)
    speed, problem = measure_disk(given)
    assert speed and not problem
    assert path.read_bytes() == content and len(list(folder.iterdir())) == 2


@pytest.mark.parametrize(
    "make", [lambda path: path.write_bytes(b"0" * 1000), os.mkfifo, Path.mkdir], ids=["small", "a FIFO", "a folder"]
)
def test_files_that_tell_nothing(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    make(path)
    before = list(tmp_path.iterdir())
    speed, problem = measure_disk(path)
    assert speed is None and "no safetensors file of 1 MiB" in problem
    assert str(tmp_path) in problem and list(tmp_path.iterdir()) == before


@pytest.mark.parametrize("when", ["opened", "read"])
def test_without_direct_reads(when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is read through the page cache, but for what is in there: RAM would be measured."""
    real, direct = speeds.read_part, set[int]()

    def open_direct(fd: int) -> Any:
        opened = own_descriptor(os.dup(fd)) if when == "read" else None
        direct.update([] if opened is None else [opened.fileno()])
        return opened

    monkeypatch.setattr(speeds, "open_direct", open_direct)
    monkeypatch.setattr(
        speeds, "read_part", lambda fd, *rest: failing(errno.EINVAL)() if fd in direct else real(fd, *rest)
    )
    path = write(tmp_path / "model.safetensors")
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    speed, problem = measure_disk(path)
    assert "aren't possible" in problem and (speed or "it is in RAM" in problem)  # some file systems drop nothing
    path.read_bytes()
    speed, problem = measure_disk(path)
    assert speed is None and "it is in RAM" in problem


def test_a_drive_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "read_part", failing(errno.EIO))
    speed, problem = measure_disk(write(tmp_path / "model.safetensors"))
    assert speed is None and "Input/output error" in problem


# ---------------------------------------------------------------- what is kept


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Counts measurements of the link and of disks."""
    found = Mock(side_effect=lambda measure, *args, **kwargs: measure(*args, **kwargs))
    for name in ("measure_link", "measure_disk"):
        monkeypatch.setattr(speeds, name, partial(found, getattr(speeds, name)))
    return found


def test_measured_once(counted: Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "model.safetensors")
    first = known_speeds(Backend(), tmp_path)
    assert [[*speeds.values()] for speeds in recorded().values()] == [[first.h2d], [first.disk], []]
    assert first.decompress == ASSUMED_DECOMPRESS
    (tmp_path / "folder").mkdir()
    assert known_speeds(Backend(), tmp_path / "folder") == first and counted.call_count == 2
    assert [path.name for path in record_file().parent.iterdir()] == ["speeds.json"]
    assert known_speeds(Backend(), None) == replace(first, disk=ASSUMED_DISK) and counted.call_count == 2
    monkeypatch.setattr(speeds, "device_name", lambda backend: "another")
    assert known_speeds(Backend(), tmp_path).disk == first.disk and counted.call_count == 3
    assert len(recorded()["h2d"]) == 2


WHOLE = json.dumps({"h2d": {"Device": 10}, "disk": {}, "decompress": {}}).encode()
NONE: dict[str, Any] = {"h2d": {}, "disk": {}, "decompress": {}}
DAMAGES = {
    "cut off": WHOLE[:-5],
    "no JSON": b"\xff\x00",
    "another program's": b'{"hello": 1}',
    "an earlier version": b'{"version": 4, "speeds": [["h2d", "Device", 10, "2026-01-01T00:00:00+00:00"]]}',
    "no number": WHOLE.replace(b"10", b'"fast"'),
    "no speed": WHOLE.replace(b"10", b"Infinity"),
    "zero": WHOLE.replace(b"10", b"0"),
    "a list": WHOLE.replace(b'{"Device": 10}', b"[10]"),
}


@pytest.mark.parametrize("content", DAMAGES.values(), ids=DAMAGES)
def test_a_record_that_is_damaged(content: bytes, counted: Mock, tmp_path: Path) -> None:
    record_file().parent.mkdir(parents=True)
    record_file().write_bytes(content)
    assert recorded() == NONE
    write(tmp_path / "model.safetensors")
    first = known_speeds(Backend(), tmp_path)
    assert recorded() != NONE and known_speeds(Backend(), tmp_path) == first and counted.call_count == 2


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a container: nothing is made or believed in the current folder, whatever is called `~` there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "relative")
    assert record_file() is None
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # neither HOME nor an account
    assert record_file() is None and not record("h2d", "Device", 10)
    planted = tmp_path / "~" / ".cache" / "group_offload"
    planted.mkdir(parents=True)
    (planted / "speeds.json").write_bytes(WHOLE)
    (tmp_path / "~" / "model.safetensors").write_bytes(b"")
    assert recorded() == NONE
    with pytest.raises(StorageError, match="There is no"):
        find_checkpoint("~/model.safetensors")
    with pytest.raises(ConfigError, match="Pass a full path"):
        apply_group_offloading(torch.nn.Linear(2, 2), "cpu", offload_to_disk_path="~/groups")
    with pytest.raises(ConfigError, match="Pass a full path"):
        apply_group_offloading(torch.nn.Linear(2, 2), "cpu", offload_to_disk_path="~nobody-of-that-name/groups")
    assert [path.name for path in tmp_path.iterdir()] == ["~"]
