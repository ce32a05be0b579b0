"""What the process does to its memory: a page map that it may not read, locked memory, forks."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from group_offload import ConfigError, StorageError, apply_group_offloading
from group_offload.base.pagemap import can_detect_writes
from group_offload.stores import files

from ..support.files import as_root, flip_a_bit, loaded
from ..support.models import Model, inputs, make
from ..support.page_map import PageMap
from ..support.processes import run_python
from ..support.reading import Rig
from ..support.rigs import check, offload_to, pair, run
from ..support.tuning import tune

pytestmark = pytest.mark.skipif(not can_detect_writes(), reason="this system does not tell which pages were written")


@pytest.fixture
def page_map(monkeypatch: pytest.MonkeyPatch) -> Iterator[PageMap]:
    found = PageMap(monkeypatch)
    yield found
    found.allow()


# ---------------------------------------------------------------- the page map


def test_a_moment_in_which_it_cannot_be_opened(page_map: PageMap, tmp_path: Path) -> None:
    """Is over, and forgotten."""
    page_map.refuse(errno.EMFILE)
    model, reference = loaded(tmp_path)
    with pytest.raises(ConfigError):
        apply_group_offloading(model, "cpu", offload_device="disk")
    page_map.allow(forgets=False)
    handle = apply_group_offloading(model, "cpu", offload_device="disk")
    assert {group.tier for group in handle.groups} == {"disk"}
    check(model, reference, inputs())


@pytest.mark.parametrize("tier", ["groups", "checkpoint"])
def test_damage_is_not_an_edit(tier: str, page_map: PageMap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit flips in what is read, and nothing tells of it: neither times nor pages. Offloaded weights show it too."""
    if tier == "groups":
        model, reference = pair()
        handle = offload_to(tmp_path, model, verify_checksums=True)
    else:
        model, reference = loaded(tmp_path)
        handle = apply_group_offloading(model, "cpu", offload_device="disk", verify_checksums=True)
    check(model, reference, inputs(), passes=2)
    page_map.refuse()
    paths = sorted(tmp_path.glob("*.safetensors"))
    before = {path: path.stat() for path in paths}
    kept = {path: path.read_bytes() for path in paths}
    for path in paths:
        for position in range(path.stat().st_size // 3, path.stat().st_size, 500):
            flip_a_bit(path, position)
    real, stats = os.fstat, {(stat.st_dev, stat.st_ino): stat for stat in before.values()}
    monkeypatch.setattr(os, "fstat", lambda fd: stats.get(((now := real(fd)).st_dev, now.st_ino), now))
    for _ in range(2):
        with pytest.raises(StorageError, match="XXH3"):
            run(model, inputs())
    for twin in (model, reference):
        for parameter in twin.parameters():
            parameter.data.add_(1)
    with pytest.raises(StorageError, match="XXH3"):
        run(model, inputs())
    with pytest.raises(StorageError, match="XXH3"):
        handle.refresh()
    if tier == "groups":  # weights that stay views of a checkpoint are what they were
        with pytest.raises(StorageError, match="XXH3"):
            handle.remove()
    assert {path for path in tmp_path.glob("*.safetensors") if path not in kept} == set()


def test_edits_beside_weights_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that were read are given back. Somebody else edits, at that moment, what lies in the same page."""
    from safetensors.torch import load_file, save_file

    model = make(Model)
    reference = make(Model)
    state = model.state_dict()
    save_file({**state, "zz": torch.zeros(100), "a": torch.zeros(100)}, tmp_path / "model.safetensors")
    found = load_file(tmp_path / "model.safetensors")
    model.load_state_dict({name: found[name] for name in state}, assign=True)
    others = [found["zz"], found["a"]]
    apply_group_offloading(model, "cpu", offload_device="disk")
    tune(monkeypatch, slow_scan_seconds=-1.0)
    scan = files.written_pages

    def written_pages(*args: Any) -> Any:
        pages = scan(*args)
        for other in others:
            other.add_(1)
        return pages

    monkeypatch.setattr(files, "written_pages", written_pages)
    check(model, reference, inputs(), passes=1)
    assert all(int(other.min()) == int(other.max()) > 0 for other in others)


# ---------------------------------------------------------------- locked memory


_FORKS = """
import warnings; warnings.simplefilter("ignore")
def in_child(body):
    child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)  # OpenMP's threads are not there
            body()
        except BaseException:
            import traceback; traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child
def wait_for(child):
    assert os.waitpid(child, 0)[1] == 0
"""
_MADE = """
import ctypes
import tests.engine.test_processes as t
from group_offload.base.tuning import tune
tune(pinned_share=0.0)
tier, root = sys.argv[1], pathlib.Path(sys.argv[2])
os.fsync = os.fstat
os.environ["GROUP_OFFLOAD_PROGRESS_BAR"] = "0"
rig = t.OnTier(tier, root)
"""
TIERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ram": ("simulated", "folder", {"offload_to_disk_path": None}),
    "groups": ("cpu", "folder", {}),
    "checkpoint": ("cpu", "checkpoint", {}),
    "page cache": ("simulated", "checkpoint", {"offload_device": "cpu"}),
}
every_tier = pytest.mark.parametrize("tier", TIERS)


class OnTier(Rig):
    """An offloaded model, on the simulated device where that is what makes the tier."""

    def __init__(self, tier: str, root: Path) -> None:
        where, kind, options = TIERS[tier]
        root.mkdir(parents=True, exist_ok=True)
        super().__init__(where, kind, root, [16] * 3, **options)
        self.__enter__()

    def close(self) -> None:
        self.__exit__(None, None, None)

    def check(self, passes: int = 2) -> None:
        super().check(passes)
        self.check_at_rest()

    def edit(self, value: float) -> None:
        for twin in (self.model, self.resident):
            twin.blocks[1].up.weight.data.add_(value)
            twin.shift.data.add_(value)


def run_on(tier: str, root: Path, code: str, made: str = _MADE) -> None:
    """Run code in a process of its own, with a `rig` on a tier."""
    done = run_python(_FORKS + made + code, tier, root)
    if done.returncode == 77:
        pytest.skip("needs the right to lock memory")
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])


@every_tier
def test_a_process_that_locks_its_memory(tier: str, tmp_path: Path) -> None:
    """Private pages of locked memory all look written, and locked memory is not simply forgotten."""
    run_on(
        tier,
        tmp_path,
        """
for flags in (1, 3):  # what is there; and what comes
    rig.check()
    before = sorted(root.iterdir())
    if ctypes.CDLL(None).mlockall(flags):
        sys.exit(77)
    rig.check()
    assert rig.handle.stats().rebuilds <= 2 * (flags == 3) and sorted(root.iterdir()) == before
    for number in range(2):
        rig.edit(0.5 + number)
        rig.check()
rig.close()
""",
    )


# ---------------------------------------------------------------- forks


@every_tier
def test_neither_side_of_a_fork_sees_the_edits_of_the_other(tier: str, tmp_path: Path) -> None:
    """Memory that is mapped twice is shared with forked children."""
    run_on(
        tier,
        tmp_path,
        """
rig.close()
parent = os.getpid()
def change(how, value):
    if how == "edit":
        rig.edit(value)
    elif how == "replace":
        for twin in (rig.model, rig.resident):
            twin.shift.data = twin.shift.data + value
    else:  # in a forward
        def grow(block, args):
            with torch.no_grad():
                block.up.bias.add_(value)
        handles = [twin.blocks[1].register_forward_pre_hook(grow) for twin in (rig.model, rig.resident)]
        rig.forward(), rig.expected()
        for handle in handles:
            handle.remove()
def has(expected):
    return all(torch.equal(value, expected[name]) for name, value in rig.model.state_dict().items())
def take_up():
    if os.getpid() == parent or rig.device is None:
        rig.check()
    else:
        rig.handle.refresh()
    assert has(rig.resident.state_dict())
for how in ("edit", "replace", "write"):
    for is_run_before in (False, True):
        print(how, is_run_before, file=sys.stderr)
        rig = t.OnTier(tier, root / how / str(is_run_before))
        if is_run_before:
            rig.check()
        at_rest = {name: value.clone() for name, value in rig.resident.state_dict().items()}
        reads, writes = os.pipe()
        def watch_and_edit():
            os.close(writes)
            os.read(reads, 1)  # the parent has taken its edits up
            assert has(at_rest)
            if how != "write":
                change(how, 3.0)
                take_up()
        child = in_child(watch_and_edit)
        os.close(reads)
        change(how, 0.5)
        take_up()
        os.close(writes)
        wait_for(child)
        take_up()
        if how != "write":
            wait_for(in_child(lambda: (change(how, 7.0), take_up())))
        take_up()
        change(how, 0.25)
        take_up()
        rig.close()
""",
    )


@as_root
@every_tier
def test_a_child_that_may_not_read_its_page_map(tier: str, place: Path) -> None:
    """Forked from a process that could: a server that loads a model and gives its workers fewer rights."""
    run_on(
        tier,
        place,
        """
import torch._dynamo
rig.check()
def body():
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    try:
        open("/proc/self/pagemap", "rb")
    except OSError:
        pass
    else:
        sys.exit(0)
    for number in range(3):
        rig.edit(0.5 + number)
        if rig.device is None:
            rig.check()
        else:
            rig.handle.refresh()
for path in (root, *root.iterdir()):
    os.chown(path, 65534, 65534)
wait_for(in_child(body))
rig.check()
""",
    )


@pytest.mark.parametrize(("tier", "shares"), [("ram", False), ("groups", False), ("ram", True)])
def test_a_child_that_is_forked_while_another_thread_is_in_a_forward(tier: str, shares: bool, tmp_path: Path) -> None:
    """Its lock belongs to a thread that the child lacks."""
    run_on(
        tier,
        tmp_path,
        f"""
import signal, threading
tier, root = sys.argv[1], pathlib.Path(sys.argv[2])
model, reference = make(Model), make(Model)
handle = offload_to(root / "groups" if tier == "groups" else None, model, "block_level", interleave_forwards={shares})
run(model, inputs())
begun, may_end = threading.Event(), threading.Event()
def wait(*_):
    if threading.current_thread() is not threading.main_thread():
        begun.set()
        may_end.wait()
model.blocks[1].register_forward_pre_hook(wait)
thread = threading.Thread(target=run, args=(model, inputs()), daemon=True)
thread.start()
begun.wait()
def compute():
    signal.alarm(200)
    for _ in range(2):
        assert torch.equal(run(model, inputs()), run(reference, inputs()))
    handle.remove()
    assert torch.equal(run(model, inputs()), run(reference, inputs()))
child = in_child(compute)
wait_for(child)
may_end.set()
thread.join()
assert torch.equal(run(model, inputs()), run(reference, inputs()))
""",
        made="",
    )
