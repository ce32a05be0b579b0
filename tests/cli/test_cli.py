"""The command `group-offload`: what it shows, what it calls damaged, and what it removes and leaves alone."""

from __future__ import annotations

import io
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from group_offload.base import reading
from group_offload.base.layout import lay_out
from group_offload.base.publish import folder_lock
from group_offload.cli import main as cli
from group_offload.stores.folder import Folder, file_name

from ..support.terminal import Terminal

ROOT = Path(__file__).parents[2]
GROUPS = ("blocks_0", "blocks_1")
FILES = [file_name(group) for group in GROUPS]


def write(path: Path, seed: int = 0, model_class: str = "Model", groups: tuple[str, ...] = GROUPS) -> Path | None:
    """The group files and the manifest of a model."""
    path.mkdir(exist_ok=True)
    torch.manual_seed(seed)
    folder, entries = Folder(path, model_class), []
    for group in groups:
        weights = [torch.randn(3, 5), torch.randn(4)]
        layout = lay_out([f"{group}.weight", f"{group}.bias"], weights)
        found = folder.find_or_write(group, layout, weights, lambda num_bytes: None)
        os.close(found.fd)
        entries.append(found.entry)
    return folder.publish_manifest(entries)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "groups")
    return tmp_path / "groups"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(capsys)


def names(path: Path) -> set[str]:
    return {file.name for file in path.iterdir()}


def row(said: str, name: str) -> str:
    (line,) = [line for line in said.splitlines() if f" {name} " in line]
    return line


def foreign(path: Path) -> set[str]:
    """What is not ours and must be there afterwards: all kinds of files, some with names like ours."""
    before = names(path)
    (path / "notes.txt").write_text("hello")
    (path / ".group_x.tmp").write_text("hello")
    (path / f"{FILES[0]}.bak").write_text("hello")
    (path / f".{FILES[0]}.1.tmp").write_text("hello")
    (path / "manifest_Model.json").write_text("{}")
    save_file({"weight": torch.ones(5)}, path / file_name("diffusers"))  # of diffusers, which has the same names
    (path / file_name("folder")).mkdir()
    (path / file_name("folder") / FILES[0]).write_bytes((path / FILES[0]).read_bytes())
    outside = path.parent / "outside"
    outside.mkdir()
    (outside / FILES[0]).write_bytes((path / FILES[0]).read_bytes())
    (path / file_name("link")).symlink_to(outside / FILES[0])
    (path / file_name("dangling")).symlink_to(outside / "nothing")
    (path / f".{FILES[0]}.1.12345678.tmp").symlink_to(outside / FILES[0])
    (path / f"manifest_Model_{'0' * 16}.json").symlink_to(outside / "manifest")
    (path / "linked").symlink_to(outside)
    os.mkfifo(path / file_name("fifo"))
    os.mkfifo(path / f".{FILES[0]}.2.12345678.tmp")
    os.mknod(path / file_name("socket"), 0o600 | stat.S_IFSOCK)
    return names(path) - before


# ---------------------------------------------------------------- inspect


def test_inspect(folder: Path, run: Terminal) -> None:
    write(folder, seed=1)
    said = run("inspect", folder)
    for name, group in zip(FILES, GROUPS, strict=True):
        line = row(said, name)
        assert all(word in line for word in ("Model", group, "2", "KiB"))
    manifests = sorted(folder.glob("manifest_*"))
    assert len(manifests) == 2
    for path in manifests:
        assert path.name in said and said.count(path.stem[-16:][:8]) == 4  # its own row has both, and two files
    assert "4 group files" in said and "2 models" in said and "0 are damaged" in said


def test_inspect_tells_foreign_files(folder: Path, run: Terminal) -> None:
    others = foreign(folder)
    said = run("inspect", folder)
    for name in others:
        assert "foreign" in row(said, name), name
    found = json.loads(run("inspect", folder, "--json"))
    assert {file["file"] for file in found["files"] if file["kind"] == "foreign"} == others


def test_inspect_as_json(folder: Path, run: Terminal) -> None:
    found = json.loads(run("inspect", folder, "--json"))
    (manifest,) = found["manifests"]
    assert manifest["model_class"] == "Model" and manifest["num_groups"] == 2
    assert {file["file"]: file["group"] for file in found["files"]} == dict(zip(FILES, GROUPS, strict=True))
    for file in found["files"]:
        assert file["manifests"] == [manifest["file"]] and file["format_version"] == "2" and file["num_tensors"] == 2
        assert file["num_bytes"] == (folder / file["file"]).stat().st_size and file["problem"] is None


def test_names_cannot_speak_to_the_terminal(folder: Path, run: Terminal) -> None:
    write(folder, model_class="[bold]\x1b]0;x\x07\n\u202e", groups=("\x1b[2J[red]",))
    (folder / "\x1b[31mname\n[link]").touch()
    (folder / os.fsdecode(b"\xff\xfe")).touch()
    said = run("inspect", folder)
    assert not any(c in said for c in "\x1b\x07\u202e") and "[bold]" in said and "[red]" in said and "[link]" in said
    run("inspect", folder, "--json")


def test_empty_folder(tmp_path: Path, run: Terminal) -> None:
    assert "0 group files" in run("inspect", tmp_path)
    run("verify", tmp_path)
    assert "Nothing" in run("prune", tmp_path)


# ---------------------------------------------------------------- verify


def flip(position: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[position] ^= 1
        path.write_bytes(data)

    return change


def replace_by_link(path: Path) -> None:
    path.rename(path.parent / "moved")
    path.symlink_to("moved")


def other_weights(path: Path) -> None:
    """A right group file, of the same group."""
    other = path.parent.parent / "other"
    write(other, seed=5)
    path.write_bytes((other / path.name).read_bytes())


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "the first byte of data": (flip(4096), "its data is not what was written"),
    "the last byte": (flip(-1), "its data is not what was written"),
    "the header's length": (flip(7), "its header does not end"),
    "the header": (flip(9), "its JSON|contradict"),
    "cut off": (lambda path: os.truncate(path, path.stat().st_size - 1), "was cut off"),
    "longer": (lambda path: os.truncate(path, path.stat().st_size + 1), "is too long"),
    "empty": (lambda path: os.truncate(path, 0), "its header does not end"),
    "gone": (lambda path: path.unlink(), "it is not there"),
    "another program's": (lambda path: save_file({"a": torch.ones(1)}, path), "another program"),
    "a link to itself, moved": (replace_by_link, "another program"),
    "other weights": (other_weights, "it holds other weights"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_verify_names_damaged_files(
    damage: Callable[[Path], object], message: str, folder: Path, run: Terminal
) -> None:
    assert "2 group files are whole, 0 files are damaged" in run("verify", folder)
    damage(folder / FILES[0])
    said = run("verify", folder, status=1)
    assert any(part in said for part in message.split("|")) and FILES[0] in said and FILES[1] not in said
    assert "writes" in said and "1 group files are whole, 1 files are damaged" in said
    found = json.loads(run("verify", folder, "--json", status=1))
    assert [file["file"] for file in found["files"] if file["problem"]] == [FILES[0]]
    (folder / FILES[0]).unlink(missing_ok=True)
    write(folder)
    run("verify", folder)  # the remedy works


def test_verify_of_a_damaged_manifest(folder: Path, run: Terminal) -> None:
    (manifest,) = folder.glob("manifest_*")
    manifest.write_text("{")
    assert manifest.name in run("verify", folder, status=1)
    assert manifest.name in run("inspect", folder)


def test_file_that_cannot_be_read(folder: Path, run: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    read_at = reading.read_at

    def fails(fd: int, target: memoryview, position: int) -> int:
        if position >= 4096:
            raise OSError(5, "Input/output error")
        return read_at(fd, target, position)

    monkeypatch.setattr(reading, "read_at", fails)
    said = run("verify", folder, status=1)
    assert all(name in said for name in FILES) and "Input/output error" in said


def test_earlier_and_later_formats(folder: Path, run: Terminal) -> None:
    """The earlier one is not used any more; what a later one needs is not known here."""
    for version, group in (("1", "old"), ("4", "new")):
        save_file({"a": torch.ones(1)}, folder / file_name(group), {"group_offload.version": version})
    run("verify", folder)
    said = run("inspect", folder)
    assert "outdated" in row(said, file_name("old")) and "later" in row(said, file_name("new"))
    run("prune", folder, "--yes")
    assert file_name("old") not in names(folder) and file_name("new") in names(folder)


# ---------------------------------------------------------------- prune


def unneeded(folder: Path) -> set[str]:
    """Group files without a manifest, and what a process that died left."""
    before = names(folder)
    manifest = write(folder, seed=1)
    assert manifest is not None
    manifest.unlink()
    for name in (FILES[0], manifest.name):
        (folder / f".{name}.1234.0123abcd.tmp").write_bytes(b"half")
    (folder / ".probe.1234.0123abcd.tmp").touch()
    return names(folder) - before


def test_prune(folder: Path, run: Terminal) -> None:
    others = foreign(folder)
    needed = names(folder)
    removed = unneeded(folder)
    assert len(removed) == 5
    said = run("prune", folder, "--dry-run")
    assert (
        all(name in said for name in removed) and "5 files" in said and FILES[0] not in said.replace(f".{FILES[0]}", "")
    )
    assert names(folder) == needed | removed
    said = run("prune", folder, "--yes")
    assert names(folder) == needed and others < needed and "Removed 5 files" in said
    assert (folder.parent / "outside" / FILES[0]).exists() and names(folder / file_name("folder")) == {FILES[0]}
    assert "Nothing" in run("prune", folder)
    next(path for path in folder.glob("manifest_Model_*") if not path.is_symlink()).unlink()
    run("prune", folder, "--yes")
    assert names(folder) == others  # the way to give up a model


def test_prune_does_not_remove_unasked(folder: Path, run: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    removed = unneeded(folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert "--yes" in run("prune", folder, status=2)
    assert removed <= names(folder)


@pytest.mark.parametrize(("answer", "is_agreed"), [("y\n", True), ("n\n", False), ("\n", False)])
def test_prune_asks(answer: str, is_agreed: bool, folder: Path, run: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    removed = unneeded(folder)
    terminal = io.StringIO(answer)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    assert "Remove 5 files" in run("prune", folder)
    assert removed.isdisjoint(names(folder)) == is_agreed


def test_prune_looks_again_after_it_asked(folder: Path, run: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile somebody needs them, and something new is unneeded, which was not agreed to."""
    removed = unneeded(folder)

    def answer(*args: Any, **kwargs: Any) -> bool:
        write(folder, seed=1)
        write(folder, seed=2).unlink()  # type: ignore[union-attr]
        return True

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(cli.Confirm, "ask", answer)
    assert "Removed 3 files" in run("prune", folder)
    assert {name for name in removed if name.startswith("group_")} <= names(folder)
    assert len([name for name in names(folder) if name.startswith("group_")]) == 6


def test_prune_refuses_if_a_manifest_cannot_be_read(folder: Path, run: Terminal) -> None:
    removed = unneeded(folder)
    (manifest,) = folder.glob("manifest_*")
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 2'))
    assert manifest.name in run("prune", folder, "--yes", status=2)
    assert removed <= names(folder)


def test_prune_removes_damaged_files_of_ours(folder: Path, run: Terminal) -> None:
    """As far as it can be told that they are."""
    for path in folder.glob("manifest_*"):
        path.unlink()
    os.truncate(folder / FILES[0], 4100)
    os.truncate(folder / FILES[1], 10)
    run("prune", folder, "--yes")
    assert names(folder) == {FILES[1]}


def test_prune_waits_for_a_set_up(folder: Path) -> None:
    unneeded(folder)
    command = [sys.executable, "-m", "group_offload", "prune", str(folder), "--yes"]
    with folder_lock(folder):
        before = names(folder)
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        assert "Waiting" in process.stderr.readline()
        assert names(folder) == before
    said, _ = process.communicate(timeout=100)
    assert process.returncode == 0 and "Removed 5 files" in said


def test_prune_says_what_it_cannot_remove(folder: Path, run: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    removed = unneeded(folder)

    def refuses(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "unlink", refuses)
    said = run("prune", folder, "--yes", status=2)
    assert said.count("Permission denied") == 5 and removed <= names(folder)


# ---------------------------------------------------------------- the command itself


@pytest.mark.parametrize("command", ["inspect", "verify", "prune"])
def test_folders_that_are_none(command: str, tmp_path: Path, run: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert "No such file" in run(command, tmp_path / "nothing", status=2)
    assert "is not a folder" in run(command, tmp_path / "file", status=2)
    opened = os.open

    def refuses(path: Any, *args: Any, **kwargs: Any) -> int:
        if path == tmp_path:
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuses)
    said = run(command, tmp_path, status=2)
    assert "Permission denied" in said and str(tmp_path) in said and names(tmp_path) == {"file"}


@pytest.mark.parametrize("command", ["inspect", "verify", "prune", "doctor", "bench"])
def test_an_empty_path_is_not_the_current_folder(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A variable of the shell that is not set."""
    with pytest.raises(SystemExit) as caught:
        cli.main([command, ""])
    assert caught.value.code == 2 and "argument DIR: it is empty" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["plan", ""], ["pack", "", "folder"]])
def test_an_empty_name_of_a_model(arguments: list[str], run: Terminal) -> None:
    assert "MODEL is empty" in run(*arguments, status=2)


@pytest.mark.parametrize("arguments", [[], ["inspect"], ["remove", "."], ["verify", ".", "--yes"]])
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2 and "usage: group-offload" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["vram", "dtype", "html", "steps", "step-seconds"])
def test_an_option_whose_value_argparse_takes_away(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is a list then, in versions of Python before 3.13."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan", ".", f"--{option}=--"])
    assert caught.value.code == 2 and f"argument --{option}: " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["stdin", "stdout", "stderr"])
def test_a_process_without_a_stream(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`verify` says by its status alone whether files are damaged."""
    removed = unneeded(folder)
    for arguments, status in ((["verify"], cli.OK), (["verify", "--json"], cli.OK), (["prune"], cli.FAILED)):
        monkeypatch.setattr(cli.sys, name, None)
        assert cli.main([*arguments, str(folder)]) == status
        getattr(cli.sys, name).close()
    assert removed <= names(folder)


def test_interrupt(folder: Path, run: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "survey", interrupted)
    run("inspect", folder, status=130)


def test_as_a_program(folder: Path) -> None:
    command = [sys.executable, "-m", "group_offload", "verify", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "2 group files are whole" in done.stdout
    scripts = pytest.importorskip("tomllib", reason="came with Python 3.11").loads(
        (ROOT / "pyproject.toml").read_text()
    )["project"]["scripts"]
    assert scripts == {"group-offload": "group_offload.cli.main:main"}


def test_the_package_does_not_import_the_command() -> None:
    code = "import sys, group_offload; print({'rich', 'group_offload.cli', 'group_offload.stores.survey'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_whoever_reads_the_output_may_stop(tmp_path: Path) -> None:
    """`group-offload inspect DIR --json | head -1`: no traceback, and no error."""
    write(tmp_path / "groups")
    code = (
        "import sys\nfrom group_offload.cli import main\n"
        "assert sys.stdin.readline()\n"  # once nobody reads any more
        f"sys.exit(main.main(['inspect', {str(tmp_path / 'groups')!r}, '--json']))"
    )
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=writing, stderr=subprocess.PIPE
    )
    os.close(writing)
    os.close(reading)
    _, errors = process.communicate(b"go\n", timeout=100)
    assert (process.returncode, errors) == (0, b"")


def test_output_that_cannot_be_written(folder: Path) -> None:
    """The drive is full; there is none at all; the terminal has no letters for a name. No traceback."""
    command = f"{sys.executable} -m group_offload"
    (folder / "mödel").touch()
    for more, status in (("> /dev/full", 2), ("--json >&-", 0), ("", 0)):
        done = subprocess.run(
            f"{command} inspect {folder} {more}",
            shell=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
            timeout=100,
        )
        assert done.returncode == status and "Traceback" not in done.stderr, done.stderr
