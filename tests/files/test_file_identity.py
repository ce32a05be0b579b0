"""Which file it is that weights are stored in: what other programs may do to it, and what must be noticed.

What may end in a SIGBUS runs in a process of its own.
"""

from __future__ import annotations

import copy
import errno
import os
import resource
import subprocess
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from group_offload import ConfigError, StorageError, apply_group_offloading

from ..support.asserts import assert_at_rest, assert_same
from ..support.files import failing, loaded
from ..support.models import Model, inputs, make
from ..support.processes import in_new_process
from ..support.rigs import check, offload_to, pair, run
from ..support.simulated import SimulatedDevice, use_simulated_device


def offloaded(tier: str, path: Path, **options: Any) -> tuple[Any, Any, Any, list[Path]]:
    """A model in files that has run once, its resident twin, its handle, and the files."""
    if tier == "groups":
        model: Any = make(Model, 3)
        reference: Any = copy.deepcopy(model)
        handle = offload_to(path, model, "block_level", **options)
    else:
        model, reference = loaded(path, num_files=2, num_blocks=3)
        handle = apply_group_offloading(model, "cpu", offload_device="disk", **options)
    assert_same(run(model, inputs()), run(reference, inputs()))
    return model, reference, handle, sorted(path.glob("*.safetensors"))


def change(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-64, 2)
        file.write(b"\1" * 64)


def change_and_put_the_time_back(path: Path) -> None:
    before = path.stat()
    change(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"x" * path.stat().st_size)
    other.rename(path)


def cut(path: Path) -> None:
    os.truncate(path, 0)


def rename(path: Path) -> None:
    path.rename(path.with_name(f"renamed-{path.name}"))


def put_a_link(path: Path) -> None:
    """To what blocks whoever opens it to read."""
    fifo = path.with_name("fifo")
    if not fifo.exists():
        os.mkfifo(fifo)
    path.unlink()
    path.symlink_to(fifo)


def move_the_folder(path: Path) -> None:
    if path.parent.exists():
        path.parent.rename(path.parent.with_name("moved"))


HARMFUL: dict[str, list[Any]] = {
    "change": [change],
    "change+rm": [change, Path.unlink],
    "change+mv": [change, replace],
    "appended to": [lambda path: os.truncate(path, path.stat().st_size + 1)],
    "touched": [os.utime],
    "cut": [cut],
    "cut+rm": [cut, Path.unlink],
    "cut+mv": [cut, replace],
    "shred": [lambda path: subprocess.run(["shred", "-u", path], check=True)],
    "change, time put back": [change_and_put_the_time_back],
}
HARMLESS: dict[str, list[Any]] = {
    "rm": [Path.unlink],
    "mv": [replace],
    "symlink": [put_a_link],
    "link": [lambda path: os.link(path, path.with_name(f"linked-{path.name}"))],
    "rename": [rename],
    "chmod": [lambda path: path.chmod(0o640)],
    "same mode": [lambda path: path.chmod(path.stat().st_mode & 0o777)],
    "folder moved": [move_the_folder],
}


def outcome(step: Any) -> str:
    try:
        step()
    except (StorageError, ConfigError) as error:
        return "told" if ".safetensors" in str(error) else str(error)
    return "right"


def go_through(tier: str, root: str, verify_checksums: str) -> None:
    """Every case, in this process."""
    os.fsync = os.fstat  # type: ignore[assignment]
    verifies, cases = verify_checksums == "True", {**HARMFUL, **HARMLESS}
    for number, (name, steps) in enumerate(cases.items()):
        print(name, flush=True)
        model, reference, handle, paths = offloaded(tier, Path(root, f"{number}"), verify_checksums=verifies)
        for step in steps:
            for path in paths:
                step(path)
        forward = lambda: assert_same(run(model, inputs()), run(reference, inputs()))  # noqa: B023, E731
        found = {outcome(step) for step in (forward, forward, handle.refresh)}
        if name == "rename":
            for path in paths:
                rename(path.with_name(f"renamed-{path.name}"))
            found |= {outcome(forward)}
        for twin in (model, reference):
            first = next(iter(twin.parameters()))
            first.data = torch.ones_like(first)  # its group is made again, from the file
        found |= {outcome(forward), outcome(handle.remove)}
        is_known = tier == "groups" or verifies  # what its bytes are
        if name in HARMFUL or (name == "same mode" and not is_known):
            assert found == {"told"}, (name, found)
        else:
            assert found == {"right"}, (name, found)
            assert_at_rest(model, reference)
    print("done", flush=True)


@pytest.mark.parametrize("verifies", [False, True], ids=["", "verify_checksums"])
@pytest.mark.parametrize("tier", ["groups", "checkpoint"])
def test_files_that_are_held(tier: str, verifies: bool, place: Path) -> None:
    """What changed is told, also of files that have no name any more; nothing else is, and no case is a SIGBUS. Tensors of
    one group lie in several files.

    Hazard: what's mapped changes with a file in place (SIGBUS), or a renamed file is taken for damage; a file is changed, its
    time is put back, and nobody notices; the tensors of one group lie in several shards.
    """
    assert "done\n" in in_new_process(go_through, tier, place, verifies)


def hold_many_files(root: str) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    twins = [loaded(Path(root) / str(number), num_files=100, num_blocks=30) for number in range(2)]
    for (model, reference), most in zip(twins, (hard, 64), strict=True):
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
        handle = None
        try:
            handle = apply_group_offloading(model, "cpu", offload_device="disk")
        except ConfigError as error:
            print(error)
        assert_same(run(model, inputs()), run(reference, inputs()))
        print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] == most)
        if handle is not None:
            handle.remove()


def test_more_files_than_descriptors(place: Path) -> None:
    """The limit of the process is raised, as far as the system allows; else set-up says what it lacks."""
    first, error, second = in_new_process(hold_many_files, place).splitlines()
    assert first == second == "True" and "Too many open files" in error


# ---------------------------------------------------------------- set-up


def set_up_with_what_was_cut_off(root: str) -> None:
    ways: list[dict[str, Any]] = [{}, {"offload_device": "disk"}, {"offload_to_disk_path": f"{root}/groups"}]
    for number, (options, case) in enumerate(product(ways, ("cut", "cut+rm", "cut+mv"))):
        print(options, case, flush=True)
        folder = Path(root) / str(number)
        model, _ = loaded(folder, num_files=2)
        for path, step in product(sorted(folder.glob("*.safetensors")), HARMFUL[case]):
            step(path)
        assert outcome(lambda options=options, model=model: apply_group_offloading(model, "cpu", **options)) == "told"
    print("done")


def test_set_up_with_files_that_were_cut_off(place: Path) -> None:
    """After the weights were loaded from them, and before they are offloaded; also if they have no name any more.
    Hazard: a checkpoint is truncated after loading, and set-up ends in a SIGBUS."""
    assert "done\n" in in_new_process(set_up_with_what_was_cut_off, place)


@pytest.mark.parametrize("what", ["rm", "mv", "in no file"])
def test_the_disk_is_a_promise(what: str, tmp_path: Path) -> None:
    """What cannot be stored in its file is not silently taken to RAM."""
    model, reference = loaded(tmp_path, num_files=2)
    if what == "in no file":
        for twin in (model, reference):
            twin.blocks[1].up.weight = torch.nn.Parameter(torch.ones_like(twin.blocks[1].up.weight))
    else:
        HARMLESS[what][0](tmp_path / "1.safetensors")
    with pytest.raises(ConfigError, match=r"offload_to_disk_path") as caught:
        apply_group_offloading(model, "cpu", offload_device="disk")
    said = "needs every parameter in a safetensors file, and 1 is in none (first: 'blocks.1.up.weight')"
    assert (said if what == "in no file" else "1.safetensors") in str(caught.value)
    assert_same(run(model, inputs()), run(reference, inputs()))
    handle = apply_group_offloading(model, "cpu", offload_device="disk", offload_to_disk_path=tmp_path / "groups")
    check(model, reference, inputs())
    assert {group.tier for group in handle.groups} == {"disk"}


@pytest.mark.parametrize("name", ["line\nbreak", "back\\012slash", "gone (deleted)", " spaces ", b"\xff\xfe"], ids=repr)
def test_names_that_few_files_have(name: str | bytes, tmp_path: Path) -> None:
    """Hazard: a path is in no encoding, has a newline, or looks deleted."""
    folder = tmp_path / os.fsdecode(name)
    model, reference = loaded(tmp_path / "first")
    folder.mkdir()
    (tmp_path / "first" / "0.safetensors").rename(folder / "0.safetensors")
    handle = apply_group_offloading(model, "cpu", offload_device="disk")
    assert {group.location for group in handle.groups} == {"0.safetensors"}
    check(model, reference, inputs())
    rename(folder / "0.safetensors")
    check(model, reference, inputs())


# ---------------------------------------------------------------- other users, limits


@pytest.mark.parametrize(
    ("where", "name", "error"),
    [
        ("files", "map_file", StorageError),
        ("source", "page_cache_of", ConfigError),
        ("pinned", "map_anonymous", MemoryError),
        ("pinned", "TwiceMapped", MemoryError),
    ],
)
def test_a_limit_of_address_space(
    where: str, name: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set-up says what to do, and the module is what it was. Hazard: address space runs out at set-up: a bare OSError."""
    model, reference = pair()
    options: dict[str, Any] = {}
    if where == "files":
        options["offload_to_disk_path"] = tmp_path / "groups"
    if where == "source":
        model, reference = loaded(tmp_path)
        options["offload_device"] = "disk"
    with use_simulated_device(SimulatedDevice(0)) if name == "TwiceMapped" else nullcontext():
        for each in {name, "map_anonymous"} if where == "pinned" else {name}:  # some systems map nothing twice
            monkeypatch.setattr(f"group_offload.stores.{where}.{each}", failing(errno.ENOMEM))
        with pytest.raises(error, match=r"offload_to_disk_path|ulimit -v"):
            apply_group_offloading(model, "cpu", **options)
    assert_same(run(model, inputs()), run(reference, inputs()))
    assert_at_rest(model, reference)
