"""Models of a pipeline: what is done for the one that should run next, while another one runs."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from group_offload import disable_group_offload, enable_group_offload, remove_group_offloading
from group_offload.base import pool
from group_offload.runtime.copies import cache_reads
from group_offload.runtime.copies.reader import Reader
from group_offload.runtime.foresight.lookahead import LookAhead
from group_offload.stores.source import SourceFile

from ..support.inside import engine_of
from ..support.models import WIDTH, Model
from ..support.on_device import any_mode, forward
from ..support.pretend import IMAGE, WITH_CONTROLNET, PretendPipeline
from ..support.reads import watch_file_reads
from ..support.rigs import run
from ..support.simulated import SimulatedDevice, use_simulated_device
from ..support.tuning import tune


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    gc.collect()
    with use_simulated_device(SimulatedDevice(0, "random")) as device, watch_file_reads(device):
        yield device


# ---------------------------------------------------------------- slots


@any_mode
def test_the_next_model_is_on_its_way_before_its_call(options: dict[str, Any], device: SimulatedDevice) -> None:
    """Each model's first groups are, from the second image on: a decoder's too, which comes after the last of many steps."""
    pipe = PretendPipeline(device).offload(**options)
    first, second, third = pipe.image(), pipe.image(), pipe.image()
    assert first[1].before > 0  # the pipeline says what comes after its encoder
    assert all(passed.before > 0 for passed in second if passed.name != "transformer" and passed is not second[0])
    assert all(passed.before > 0 for passed in (third[0], third[1], third[-1]))
    assert all(passed.stalls == 0 for passed in first + second + third)
    pipe.remove()


def test_a_model_that_others_follow_is_not_sent_in_vain(device: SimulatedDevice) -> None:
    """Three steps send each block three times and the outer group once; nothing is sent that another model then drops."""
    pipe = PretendPipeline(device).offload()
    pipe.image(), pipe.image()
    image = pipe.image()
    for name, handle in pipe.handles.items():
        num_steps = IMAGE.count(name)
        outer, *blocks = sorted(handle.groups, key=lambda group: group.group_id.count("blocks"))
        expected = num_steps * len(blocks) + 1 if num_steps else 0
        assert sum(passed.onloads for passed in image if passed.name == name) == expected, name
        assert outer.num_bytes
    pipe.remove()


@any_mode
def test_the_next_model_takes_no_memory_beside_the_last(options: dict[str, Any], device: SimulatedDevice) -> None:
    """The device holds what the model with most slots takes alone."""
    peaks = []
    for name in ("encoder", "transformer", "vae"):
        alone = PretendPipeline(device).offload(**options)
        device.synchronize()
        device.memory.peak = device.memory.now
        for _ in range(3):
            alone.call(name)
        alone.remove()
        peaks.append(device.memory.peak)
    device.memory.peak = device.memory.now
    pipe = PretendPipeline(device).offload(**options)
    for _ in range(3):
        pipe.image()
    assert device.memory.peak <= max(peaks)
    pipe.remove()


def test_models_that_alternate_send_each_group_once_a_step(device: SimulatedDevice) -> None:
    pipe = PretendPipeline(device).offload()
    pipe.image(WITH_CONTROLNET)
    image = pipe.image(WITH_CONTROLNET)
    first = WITH_CONTROLNET.index("transformer")
    # The last step is taken for one more, so the control net's first groups are sent once in vain.
    for passed in image[first:-1]:
        assert passed.onloads == len(pipe.handles[passed.name].groups) and passed.before > 0, passed
    pipe.remove()


@any_mode
def test_a_wrong_guess_costs_no_bits(options: dict[str, Any], device: SimulatedDevice) -> None:
    """Images of other steps, models that are left out, and models that are called twice."""
    pipe = PretendPipeline(device).offload(**options)
    pipe.image(), pipe.image()
    for image in (
        ("encoder", *["transformer"] * 4, "vae"),
        ("transformer", "vae", "encoder", "encoder"),
    ):
        pipe.image(image)
    pipe.remove()


def test_weights_that_change_after_they_were_sent_ahead(device: SimulatedDevice) -> None:
    pipe = PretendPipeline(device).offload()
    pipe.image(), pipe.image()
    for name in ("encoder", "transformer", "transformer", "transformer"):
        pipe.call(name)
    for model in (pipe.components["vae"], pipe.resident["vae"]):
        assert isinstance(model, Model)
        with torch.no_grad(), device.running():
            model.blocks[0].up.weight.data.mul_(2)
    assert pipe.call("vae").onloads > 0
    pipe.remove()


@pytest.mark.parametrize("how", ["removed", "gone", "running", "interrupted"])
def test_a_model_that_cannot_take_over(how: str, device: SimulatedDevice) -> None:
    pipe = PretendPipeline(device).offload()
    pipe.image(), pipe.image()
    for name in ("encoder", "transformer", "transformer"):
        pipe.call(name)
    if how == "removed":
        remove_group_offloading(pipe.components["vae"])
    if how == "gone":
        vae = weakref.ref(pipe.components.pop("vae"))
        del pipe.handles["vae"]
        gc.collect()
        assert vae() is None
    if how == "interrupted":
        handle = pipe.components["vae"].register_forward_hook(_interrupt)
        with pytest.raises(KeyboardInterrupt):
            pipe.call("vae")
        handle.remove()
    held = threading.Event()
    if how == "running":
        lock, done = engine_of(pipe.handles["vae"]).lock, threading.Event()
        thread = threading.Thread(target=lambda: _hold(lock, held, done))
        thread.start()
        assert held.wait(60)
    pipe.call("transformer")
    if how == "running":
        done.set()
        thread.join()
    for name in ("encoder", "transformer"):
        pipe.call(name)
    if how in ("running", "interrupted"):
        pipe.call("vae")
    for name, handle in pipe.handles.items():
        if how != "removed" or name != "vae":
            handle.remove()


def _hold(lock: Any, held: threading.Event, done: threading.Event) -> None:
    with lock:
        held.set()
        assert done.wait(60)


def _interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError, KeyboardInterrupt])
def test_what_is_raised_for_the_next_model(
    error: type[BaseException], device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error is for that model's own pass to raise, if it comes again; an interrupt is the user's, and ends here."""
    pipe = PretendPipeline(device).offload()
    pipe.image(), pipe.image()
    pipe.call("encoder")
    for _ in range(2):
        pipe.call("transformer")
    x = torch.randn(3, WIDTH)
    with monkeypatch.context() as patch:

        def prepare(self: LookAhead, *, has_slots: bool) -> None:
            raise error

        patch.setattr(LookAhead, "prepare", prepare)
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                forward(device, pipe.components["transformer"], x)
        else:
            pipe.call("transformer", x)
    assert pipe.call("vae").before == 0
    pipe.image()
    pipe.remove()


def test_a_pipeline_that_is_restored_and_offloaded_again(device: SimulatedDevice) -> None:
    pipe = PretendPipeline(device).offload()
    pipe.image()
    disable_group_offload(pipe)
    again = PretendPipeline(device)
    again.components, again.resident = pipe.components, pipe.resident
    again.offload()
    again.image()
    assert [passed.before > 0 for passed in again.image()] == [False, True, False, False, True]
    again.remove()


def test_training_foresees_nothing(device: SimulatedDevice) -> None:
    """A backward comes after a forward that records a graph, whatever came after it before."""
    pipe = PretendPipeline(device)
    pipe.components["transformer"].requires_grad_(False)
    pipe.offload()
    pipe.image(), pipe.image()
    pipe.call("encoder")
    with device.running():
        for _ in range(3):
            x = device.put(torch.randn(3, WIDTH)).requires_grad_()
            pipe.components["transformer"](x).sum().backward()
    assert pipe.call("vae").before == 0
    pipe.remove()


# ---------------------------------------------------------------- files


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The files whose bytes were asked for, which none of them has in the page cache. Tests may read the names."""
    names: set[str] = set()
    bring = SourceFile.bring_to_cache

    def watched(self: SourceFile, buffer: memoryview, position: int) -> None:
        names.add(self.path.stem)
        bring(self, buffer, position)

    monkeypatch.setattr(SourceFile, "bring_to_cache", watched)
    monkeypatch.setattr(SourceFile, "is_cached", lambda *args: False)
    return names


def wait_for_cache_reads() -> None:
    for reads in [each for each in gc.get_objects() if isinstance(each, cache_reads.CacheReads)]:
        for task in reads._tasks:
            task.wait()


@pytest.mark.parametrize("where", ["cpu", "simulated"])
def test_the_next_models_files_are_read_in_a_pass(where: str, tmp_path: Path, cached: set[str]) -> None:
    """Also where the CPU computes, which copies nothing ahead."""
    device = SimulatedDevice(0)
    pipe = PretendPipeline(device, folder=tmp_path)
    with use_simulated_device(device) if where == "simulated" else _nothing():
        handles = enable_group_offload(pipe, onload_device="cpu", offload_device="disk", low_cpu_mem_usage=True)
        x = torch.randn(3, WIDTH)
        for name, reads in (("encoder", {"transformer"}), ("transformer", {"vae"}), ("vae", set())):
            cached.clear()
            before = {each: _bytes_cached(handle) for each, handle in handles.items()}
            for _ in range(2):  # in the first pass the model itself may read all the time
                if where == "simulated":
                    device.get(forward(device, pipe.components[name], x))
                else:
                    assert torch.equal(run(pipe.components[name], x), run(pipe.resident[name], x))
            wait_for_cache_reads()
            assert cached == reads, name
            for each in reads:
                assert _bytes_cached(handles[each]) - before[each] >= handles[each].stats().file_bytes
        for handle in handles.values():
            handle.remove()


def _nothing() -> Any:
    return torch.no_grad()


def _bytes_cached(handle: Any) -> int:
    blobs = [part.blob for group in engine_of(handle).groups for part in group.parts]
    return sum(source.bytes_cached for source in {blob.source for blob in blobs})


@pytest.mark.parametrize("why", ["direct", "no room", "reads"])
def test_files_that_are_not_read_into_the_page_cache(
    why: str, tmp_path: Path, cached: set[str], device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that passes read past it, those for which there is no RAM, and all while the running model reads."""
    if why == "direct":
        monkeypatch.setattr("group_offload.stores.ways.available_ram", lambda: 0)
    if why == "no room":
        monkeypatch.setattr(cache_reads, "available_ram", lambda: 1 << 30)
    if why == "reads":
        monkeypatch.setattr(Reader, "is_reading", True)
    pipe = PretendPipeline(device, folder=tmp_path).offload(offload_device="disk", low_cpu_mem_usage=True)
    pipe.call("encoder")
    wait_for_cache_reads()
    assert not cached
    pipe.remove()


def test_reads_into_the_page_cache_end_with_the_model(
    tmp_path: Path, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is restored waits for the read that is under way, and no other one begins."""
    begun, go_on, over = threading.Event(), threading.Event(), []

    def slow(self: SourceFile, buffer: memoryview, position: int) -> None:
        begun.set()
        assert go_on.wait(60)
        over.append(position)

    monkeypatch.setattr(SourceFile, "bring_to_cache", slow)
    tune(monkeypatch, cache_read_bytes=512)
    pipe = PretendPipeline(device, folder=tmp_path).offload(offload_device="disk", low_cpu_mem_usage=True)
    pipe.call("encoder")
    assert begun.wait(60)
    threading.Timer(0.05, go_on.set).start()
    remove_group_offloading(pipe.components["transformer"])
    num_over = len(over)
    assert 0 < num_over <= pool.num_threads()
    pipe.call("encoder")
    wait_for_cache_reads()
    assert len(over) == num_over
    for handle in pipe.handles.values():
        if handle.is_active:
            handle.remove()


def test_a_file_that_is_lost_meanwhile(tmp_path: Path, device: SimulatedDevice) -> None:
    """The model that runs is not told; the one that needs the file is."""
    pipe = PretendPipeline(device, folder=tmp_path).offload(offload_device="disk", low_cpu_mem_usage=True)
    with open(tmp_path / "transformer.safetensors", "r+b") as file:
        file.truncate(64)
    pipe.call("encoder")
    wait_for_cache_reads()
    with pytest.raises(Exception, match=r"transformer\.safetensors"):
        pipe.call("transformer")
    for handle in pipe.handles.values():
        if handle is not pipe.handles["transformer"]:
            handle.remove()


def test_the_next_models_first_groups_are_read_into_staging_memory(
    tmp_path: Path, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where RAM is scarce and files are read past the page cache: in the last pass, once the running model has read all."""
    monkeypatch.setattr("group_offload.stores.ways.available_ram", lambda: 0)
    monkeypatch.setattr(SourceFile, "is_cached", lambda *args: False)
    tune(monkeypatch, chunk_bytes=4096, small_chunk_bytes=4096)
    pipe = PretendPipeline(device, folder=tmp_path).offload(offload_device="disk")
    pipe.image(), pipe.image()
    transformer, vae = (engine_of(pipe.handles[name]) for name in ("transformer", "vae"))
    *_, before, last = pipe.components["transformer"].get_submodule("blocks").children()
    before.register_forward_hook(lambda *_: transformer.transfer.reader.wait_until_enqueued())
    num_ahead: list[int] = []
    last.register_forward_hook(lambda *_: num_ahead.append(len(vae._lookahead._ahead)))
    for name in IMAGE[:-1]:
        pipe.call(name)
    assert num_ahead[:-1] == [0, 0] and num_ahead[-1] > 0
    assert pipe.call("vae").stalls == 0
    pipe.remove()
