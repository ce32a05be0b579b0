"""Processes that work together: `run` starts the ranks. The functions here are what ranks do that offload one model."""

from __future__ import annotations

import copy
import gc
import json
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint

from group_offload import ConfigError, ModuleError, OffloadHandle, OffloadStats, StateError, apply_group_offloading
from group_offload.activations import apply_activation_offloading
from group_offload.base.mapping import FileMappings
from group_offload.base.tuning import tune
from group_offload.runtime.multi_gpu import host_ranks, sharded_transfers
from group_offload.runtime.multi_gpu.rendezvous import Rendezvous

from .allocations import use_peer_links
from .asserts import assert_same, same_bits
from .processes import fork, run_code, status_of
from .training import DIM, TrainingBlock, TrainingModel
from .tuning import tune as tune_until_undone

connect = host_ranks._connect
KILLED = 9
DEVICE = torch.device("cpu")
"""Of this rank."""


def run(
    *cases: Callable[..., None] | tuple[Any, ...],
    num_ranks: int = 2,
    device: str = "cpu",
    expected: tuple[int, ...] = (),
) -> None:
    """Run these functions of modules, one after another, in each of `num_ranks` processes: `case(rank, *args)`.

    Args:
        expected: Exit statuses, if they are not all 0.
    """
    called = [(case,) if callable(case) else case for case in cases]
    listed = [[case.__module__, case.__name__, *map(str, args)] for case, *args in called]
    code = f"import sys; from {__name__} import _ranks; _ranks(*sys.argv[1:])"
    done = run_code(code, (json.dumps(listed), num_ranks, device), timeout=280)
    statuses = tuple(map(int, done.stdout.splitlines()[-1].split())) if done.stdout else ()
    assert statuses == (expected or (0,) * num_ranks), done.stdout + done.stderr[-6000:]


@contextmanager
def world_of_one() -> Iterator[Any]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def _ranks(cases: str, num_ranks: str, device: str) -> None:
    if device == "cpu":  # what has imported diffusers may have asked CUDA for something, and its forks cannot use CUDA
        for module, *_ in json.loads(cases):
            import_module(module)
    with tempfile.TemporaryDirectory() as folder:
        what = partial(_rank, json.loads(cases), int(num_ranks), device, Path(folder) / "meeting")
        pids = [fork(partial(what, rank)) for rank in range(int(num_ranks))]
        statuses = [status_of(pid) for pid in pids]
    print(*statuses, flush=True)


def _rank(cases: list[list[str]], num_ranks: int, device: str, meeting: Path, rank: int) -> None:
    global DEVICE
    warnings.simplefilter("error" if device == "cpu" else "ignore")
    signal.alarm(260)
    torch.set_num_threads(1)
    share_little()
    if device == "cpu":
        use_peer_links()
    else:
        DEVICE = torch.device(device, rank)
        torch.accelerator.set_device_index(rank)
    of_the_device = (trains.__name__, offloads_activations.__name__)
    needs_nccl = device != "cpu" and any(module != __name__ or name in of_the_device for module, name, *_ in cases)
    backend = f"cpu:gloo,{device}:nccl" if needs_nccl else "gloo"  # sharing asks for no collectives of the device
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=num_ranks)
    for module, name, *args in cases:
        try:
            getattr(import_module(module), name)(rank, *args)
            if name not in (is_killed.__name__, is_killed_as_it_sets_up.__name__):
                dist.barrier()
        except BaseException:
            print(f"rank {rank}, {name}: {traceback.format_exc()}", file=sys.stderr, flush=True)
            raise


# ------------------------------------------------------------------------------------------------ what ranks do


def share_little() -> None:
    """What is tiny is shared too."""
    tune(min_shared_bytes=1, shard_timeout_seconds=10.0, share_trial_bytes=1 << 20)


def model(num_blocks: int = 4) -> TrainingModel:
    torch.manual_seed(0)
    return TrainingModel(num_blocks).eval().requires_grad_(requires_grad=False)


def resident() -> TrainingModel:
    return model().to(DEVICE)


def inputs(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 3, DIM, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def share(module: nn.Module, **options: Any) -> OffloadHandle:
    options = {"onload_device": DEVICE, "process_group": dist.group.WORLD, "shard_transfers": True, **options}
    return apply_group_offloading(module, **options)


def check(offloaded: nn.Module, reference: nn.Module, times: int = 2) -> None:
    for seed in range(times):
        with torch.no_grad():
            assert same_bits(offloaded(inputs(seed)), reference(inputs(seed)))


def shared_model(**options: Any) -> tuple[TrainingModel, TrainingModel, OffloadHandle]:
    """A model that ranks share, and its resident twin. Both have run."""
    offloaded, reference = model(), resident()
    handle = share(offloaded, **options)
    check(offloaded, reference)
    return offloaded, reference, handle


def assert_shared(
    handle: OffloadHandle, before: OffloadStats | None = None, num_ranks: int = 0, tolerance: float = 0.16
) -> None:
    """Each rank has sent its shard, and gathered the rest."""
    stats, num_ranks = handle.stats(), num_ranks or dist.get_world_size()
    gathered, missed, sent = stats.bytes_from_peers, stats.peer_transfers_missed, sum(stats.bytes_onloaded.values())
    if before is not None:
        gathered -= before.bytes_from_peers
        missed -= before.peer_transfers_missed
        sent -= sum(before.bytes_onloaded.values())
    assert gathered > 0
    if DEVICE.type == "cpu" and not missed:  # on a device some groups are sent ahead; a busy machine makes ranks late
        assert abs(gathered / (gathered + sent) - (1 - 1 / num_ranks)) < tolerance, (gathered, sent)


def assert_shared_again(handle: OffloadHandle, offloaded: nn.Module, reference: nn.Module) -> None:
    """Ranks that have gone apart come together again. How soon depends on how long another one keeps them waiting."""
    gathered, is_done = handle.stats().bytes_from_peers, torch.zeros(1)
    for _ in range(20):
        dist.all_reduce(is_done, dist.ReduceOp.MIN)
        if is_done:
            return
        check(offloaded, reference, times=1)
        is_done.fill_(handle.stats().bytes_from_peers > gathered)
    raise AssertionError("this rank has gathered nothing, or another one")


def fails_alike(fault: type[Exception], match: str, offloaded: nn.Module, **options: Any) -> None:
    """All ranks raise the same, and the model keeps its weights."""
    before = {name: value.clone() for name, value in offloaded.state_dict().items()}
    with pytest.raises(fault, match=match) as caught:
        share(offloaded, **options)
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, repr(caught.value))
    assert said == [said[0]] * len(said)
    assert all(same_bits(value, before[name]) for name, value in offloaded.state_dict().items())


def has_same_bits(rank: int, offload_type: str) -> None:
    offloaded, reference = model(), resident()
    handle = share(offloaded, offload_type=offload_type)
    check(offloaded, reference, times=3)
    assert_shared(handle)
    handle.remove()
    check(offloaded.to(DEVICE), reference)


def sends_compressed_weights(rank: int, folder: str = "") -> None:
    """Each rank sends and decompresses its part of compressed weights. One of them goes on with plain weights after an edit.

    Args:
        folder: Of compressed files, which the ranks have in common.
    """
    tune(min_compressed_bytes=4096)
    torch.manual_seed(0)
    offloaded = nn.Sequential(*(nn.Sequential(nn.Linear(1000, 1000), nn.GELU()) for _ in range(5)))
    offloaded.to(torch.bfloat16).requires_grad_(requires_grad=False)
    reference = copy.deepcopy(offloaded).to(DEVICE)
    handle = share(offloaded, compress=True, **({"offload_to_disk_path": folder} if folder else {}))

    def step() -> None:
        x = torch.randn(3, 1000, device=DEVICE).to(torch.bfloat16)
        with torch.no_grad():
            assert same_bits(offloaded(x), reference(x))

    for _ in range(6):
        step()
    stats = handle.stats()
    assert stats.bytes_from_peers > 0 and stats.bytes_decompressed > 0
    assert sum(stats.bytes_onloaded.values()) < 0.9 * stats.bytes_decompressed
    with torch.no_grad():
        for module in (offloaded, reference):
            module[rank][0].weight.data.mul_(2)  # the ranks have other weights from now on: nobody gathers these
    for _ in range(6):
        step()
    handle.remove()


def goes_its_own_way(rank: int) -> None:
    """The ranks run blocks in orders of their own: they skip, repeat and reverse."""
    offloaded, reference, handle = shared_model()
    for order in ([0, 2], [0, 0, 1, 3], [3, 2, 1, 0], [], [0, 1, 2, 3]):
        if rank == 1:
            offloaded.order = reference.order = order
        check(offloaded, reference, times=1)
    assert_shared_again(handle, offloaded, reference)


def raises_and_goes_on(rank: int) -> None:
    offloaded, reference, handle = shared_model()
    if rank == 1:

        def fail(*args: object) -> None:
            raise ValueError("of this test")

        hook = offloaded.blocks[1].register_forward_pre_hook(fail)
        try:
            offloaded(inputs())
        except ValueError:
            hook.remove()
    else:
        check(offloaded, reference, times=1)
    check(offloaded, reference)
    assert_shared_again(handle, offloaded, reference)


def is_killed(rank: int, where: str) -> None:
    """Rank 1 is killed. The others raise, and name it."""
    offloaded, reference, _ = shared_model()
    if rank == 1:

        def die(*args: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        if where == "in a forward":
            offloaded.blocks[1].register_forward_pre_hook(die)
            offloaded(inputs())
        die()
    with pytest.raises(StateError, match=r"Rank 1 .*ended"):
        check(offloaded, reference, times=1000)
    kept = []
    for _ in range(2):
        x = inputs()
        with pytest.raises(StateError, match=r"Rank 1 .*ended"), torch.no_grad():
            offloaded(x)
        kept.append(weakref.ref(x))
        del x
    gc.collect()
    assert not any(each() is not None for each in kept)  # the error keeps nothing of the calls that it was raised in


def needs_no_nccl(rank: int) -> None:
    """A process group of gloo alone: nothing of sharing runs through NCCL."""
    offloaded, reference = model(), resident()
    handle = share(offloaded)
    with torch.profiler.profile() as profile:
        check(offloaded, reference)
        torch.accelerator.synchronize()
    assert handle.stats().bytes_from_peers > 0 and "each loads 1/2" in str(handle.plan)
    assert not [event.name for event in profile.events() if "nccl" in event.name.lower()]


def edits_weights(rank: int) -> None:
    offloaded, reference, handle = shared_model()

    def edit(value: float) -> None:
        with torch.no_grad():
            for each in (offloaded, reference):
                next(each.blocks[2].parameters())[0] = value

    edit(3.0)  # on all ranks
    check(offloaded, reference, times=1)
    before = handle.stats()
    check(offloaded, reference)
    assert_shared(handle, before)
    if rank == 1:
        edit(5.0)
    missed = handle.stats().peer_transfers_missed
    check(offloaded, reference)
    assert handle.stats().peer_transfers_missed > missed


def has_another_model(rank: int, what: str) -> None:
    offloaded = model(3 if what == "blocks" and rank == 1 else 4)
    if what == "weights" and rank == 1:
        with torch.no_grad():
            next(offloaded.blocks[2].parameters())[0] += 1
    fails_alike(ModuleError, r"rank 1 has another one than rank 0: .*blocks", offloaded)


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(3))).requires_grad_(requires_grad=False)


def differs_in_one_number(rank: int, folder: str) -> None:
    """Nothing but the whole content tells, and that is read only where ranks have places of their own."""
    for has_own_file in (True, False):
        for differs in (False, True):
            offloaded, mine = wide(), Path(folder) / f"{differs} {rank if has_own_file else 'all'}"
            if rank == 0 or has_own_file:
                weights = {name: weight.clone() for name, weight in offloaded.state_dict().items()}
                weights["1.weight"][2, 0] += differs and rank == 1
                save_file(weights, mine)
            dist.barrier()
            offloaded.load_state_dict(load_file(mine), assign=True)
            if differs and rank == 1 and not has_own_file:
                offloaded[1].weight[2, 0] += 1
            options = {"offload_device": "disk"} if has_own_file else {}
            with mock.patch.object(sharded_transfers, "_hash_of", wraps=sharded_transfers._hash_of) as hashed:
                if differs:
                    why = "rank 1 has another one than rank 0: group '.*' has other"
                    with pytest.raises(ModuleError, match=why):
                        share(offloaded, **options)
                    continue
                handle = share(offloaded, **options)
            assert hashed.called == has_own_file
            x = torch.randn(2, 512)
            with torch.no_grad():
                assert same_bits(offloaded(x), wide()(x))
            handle.remove()


def meets_again(rank: int) -> None:
    """The store still has what ranks said when they met for the first time: another process group may use it again."""
    for is_again in (False, True):
        host_ranks._host_groups.clear()
        if is_again and rank == 0:
            time.sleep(0.3)  # rank 1 has asked by then, and has to wait for a new answer
        *_kept, handle = shared_model()
        assert_shared(handle)
        handle.remove()


def is_in_two_groups(rank: int) -> None:
    """Ranks are in different numbers of process groups."""
    first, second = dist.new_group([0, 1]), dist.new_group([1, 2])
    for group, ranks in ((first, (0, 1)), (second, (1, 2))):
        if rank in ranks:
            *_kept, handle = shared_model(process_group=group)
            assert_shared(handle, num_ranks=2)
            handle.remove()


def is_killed_as_it_sets_up(rank: int) -> None:
    """The others do not wait for a rank that has ended."""
    if rank == 1:
        sharded_transfers.ShardedTransfers.check = lambda *args: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    with pytest.raises(StateError, match=r"Rank 1 \(process \d+\) has ended before its model was offloaded"):
        share(model())


def has_other_options(rank: int) -> None:
    """All ranks say so at once, whoever is late, and can share afterwards. While the late one looks, the other fails."""
    said, tell = Rendezvous._said, Rendezvous.tell

    def looks_late(*args: Any) -> Any:
        found = said(*args)
        time.sleep(0.06 * (found is None))
        return found

    def tells_late(*args: Any) -> None:
        time.sleep(0.02)
        tell(*args)

    differing = {
        "offload_type": "leaf_level",
        "verify_checksums": True,
        "shard_transfers": "auto",
        "offload_device": "disk",
    }
    for late, (name, value) in product((0, 1), differing.items()):
        more = {"shard_transfers": "auto"} if name == "verify_checksums" else {}
        options = {name: value, **more} if rank == 1 else {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Rendezvous, *(("_said", looks_late) if rank == late else ("tell", tells_late)))
            fails_alike(ConfigError, rf"same options, but {name}.* in rank 1, and .* in rank 0", model(), **options)
    with pytest.MonkeyPatch.context() as same:
        host_ranks._host_groups.clear()
        same.setattr(host_ranks, "_name_of", lambda backend: f"GPU {min(rank, num_ranks - 2)}")
        num_ranks = dist.get_world_size()
        ranks = f"Ranks {num_ranks - 2} and {num_ranks - 1} of process_group compute on the same device"
        fails_alike(ConfigError, ranks, model())
    *_kept, handle = shared_model()
    assert_shared(handle)


def is_missing(rank: int, what: str) -> None:
    if rank == 1 and what == "is missing":
        return
    fault = ConfigError if rank == 1 else StateError
    match = "budget" if rank == 1 else "Rank 1 could not offload" if what == "fails" else "Rank 1 did not offload"
    with pytest.MonkeyPatch.context() as patch:
        if what == "is missing":
            tune_until_undone(patch, share_setup_seconds=1.0)
        with pytest.raises(fault, match=match):
            share(model(), ram_budget="1B" if rank == 1 else None)


def is_dropped(rank: int) -> None:
    """A model that is dropped without remove() leaves nothing behind, and the others do not wait for it."""
    offloaded, reference, handle = shared_model()
    dist.barrier()
    if rank == 1:
        gone = weakref.ref(handle)
        del offloaded, handle
        gc.collect()
        assert gone() is None
        return
    check(offloaded, reference)


def leaves_early(rank: int) -> None:
    """A rank that is done first takes the model back. The others go on."""
    offloaded, reference, handle = shared_model()
    if rank == 1:
        handle.remove()
        offloaded.to(DEVICE)
    check(offloaded, reference, times=4)


def is_stored_on_disk(rank: int, folder: str) -> None:
    """Weights that are views of one checkpoint: each rank reads its shard of the file."""
    reference, path = resident(), Path(folder) / "model.safetensors"
    if rank == 0:
        save_file(reference.state_dict(), path)
    dist.barrier()
    for options in (
        {"offload_device": "disk"},
        {"offload_device": "disk", "offload_type": "leaf_level"},
        {"ram_budget": "1GiB" if DEVICE.type == "cpu" else "8GiB"},  # a process that uses CUDA takes more than 1 GiB
        {},
    ):
        offloaded = model()
        offloaded.load_state_dict(load_file(path), assign=True)
        handle = share(offloaded, **options)
        check(offloaded, reference)
        # Without options a device's driver may lock the mapped file: it then counts as RAM.
        sent = handle.stats().bytes_onloaded
        assert sent["disk"] if options else sum(sent.values()), options
        assert_shared(handle)
        handle.remove()


def is_in_groups(rank: int) -> None:
    """Two groups of two ranks, each given as a mesh; a mesh of two dimensions; and a group that this rank is not in."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    offloaded, reference = model(), resident()
    with pytest.raises(ConfigError, match="one dimension"):
        share(offloaded, process_group=mesh)
    handle = share(offloaded, process_group=mesh["cp"])
    check(offloaded, reference)
    assert "2 GPUs share each group" in str(handle.plan)
    assert_shared(handle, num_ranks=2, tolerance=0.05)
    again = share(other := model(), process_group=mesh["cp"].get_group())
    check(other, reference)
    assert again.stats().bytes_from_peers > 0


def is_on_two_hosts(rank: int) -> None:
    """Ranks of several hosts: each host's share among themselves."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (host_ranks, sharded_transfers):
            patch.setattr(module, "place_of_process", lambda: f"host {rank // 2}" if rank < 4 else "")
        why = "shard_transfers=True, but rank 4 can't share: no other rank of process_group is on this host"
        fails_alike(ConfigError, why, model())
        offloaded = model()
        handle = share(offloaded, shard_transfers="auto")
        assert ("no other rank" if rank == 4 else "arrive faster") in str(handle.plan)
        several = dist.new_group([0, 1, 2, 3])
        if rank < 4:
            *_kept, handle = shared_model(process_group=several)
            assert_shared(handle, num_ranks=2, tolerance=0.05)


def has_one_copy(rank: int, *, arms: tuple[Any, ...] = (True, "auto")) -> None:
    """Weights that are in no file are in RAM once, and edits of one rank are not seen by the others.

    Where sharing does not pay, each loads from that copy; the CPU computes with it.
    """
    for shares in arms:
        offloaded, reference = model(), resident()
        handle = share(offloaded, shard_transfers=shares)
        mappings = [FileMappings().at(parameter.data_ptr()) for parameter in offloaded.parameters()]
        places = [None if mapping is None else (mapping.identity, mapping.is_private) for mapping in mappings]
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, places)
        assert all(each == found[0] for each in found) and None not in places
        if rank == 1:
            with torch.no_grad():
                for each in (offloaded, reference):
                    next(each.blocks[2].parameters())[0] = 3.0
        dist.barrier()
        check(offloaded, reference)
        if DEVICE.type == "cpu" and shares == "auto":
            assert not handle.stats().copies and "loads its own weights" in str(handle.plan)
        else:
            assert handle.stats().copies
        handle.remove()
        check(offloaded.to(DEVICE), reference)


def is_on_the_cpu(rank: int) -> None:
    """Which shares one copy in RAM, and sends nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_ranks, "_connect", connect)
        why = "shard_transfers=True, but rank 0 can't share: the CPU uses weights in RAM in place"
        fails_alike(ConfigError, why, model())
        has_one_copy(rank, arms=("auto",))


def local(tensor: torch.Tensor) -> torch.Tensor:
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach().cpu().clone()


def under_ddp(module: TrainingModel) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module)


def under_fsdp(module: TrainingModel, *, is_around: bool = False, **options: Any) -> nn.Module:
    """FSDP2 around what is trained, or around the blocks and the model beside what is frozen in them."""
    options["mesh"] = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    if is_around:
        options["ignored_params"] = {parameter for parameter in module.parameters() if not parameter.requires_grad}
    for each in (*module.blocks, module) if is_around else (module.blocks[-1], module.head):
        fully_shard(each, **options)
    return module


def trained(
    rank: int, kind: str, wrap: Callable[[TrainingModel], nn.Module], *, is_first: bool, is_checkpointed: bool
) -> list[torch.Tensor]:
    """Gradients, and all weights, of some steps: offloaded, after an edit, and given back.

    Args:
        wrap: Puts DDP or FSDP2 around the module, before it is offloaded if `is_first`.
    """
    module = model().train()
    # Of the other blocks half of what their norms hold themselves.
    for each in (module.head, module.blocks[-1], *(block.norm.weight for block in module.blocks)):
        each.requires_grad_(requires_grad=True)
    if kind == "resident":
        module.to(DEVICE)
    if is_checkpointed:
        module.run_block = lambda block, *args: checkpoint(block, *args, use_reentrant=False)
    called = wrap(module) if is_first else None
    handle = None if kind == "resident" else share(module, shard_transfers=kind == "shared")
    called = called or wrap(module)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    # One by one, as on the CPU: on a GPU torch steps all at once, and fails where FSDP2 has some of them and not others.
    optimizer, bits, rebuilds = torch.optim.AdamW(parameters, lr=1e-2, foreach=False), [], []
    torch.manual_seed(rank)
    for seed in range(5):
        if seed == 3:
            with torch.no_grad():
                module.blocks[1].up.weight.mul_(2)
            module.blocks[0].norm.bias = nn.Parameter(module.blocks[0].norm.bias.detach() + 1, requires_grad=False)
        if seed == 4:
            bits += [local(value) for value in module.state_dict().values()]
            if handle is not None:
                assert rebuilds[:3] == [rebuilds[0]] * 3
                assert bool(handle.stats().bytes_from_peers) == (kind == "shared")
                handle.remove()
                module.to(DEVICE)
                handle = None
        x = inputs(seed + 10 * rank).requires_grad_()
        called(x).float().square().mean().backward()
        bits += [local(each.grad) for each in (*module.parameters(), x) if each.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            bits.append(local(called(inputs(rank))))
        if handle is not None:
            rebuilds.append(handle.stats().rebuilds)
    return bits + [local(value) for value in module.state_dict().values()]


def trains(rank: int) -> None:
    """Under DDP and FSDP2: the bits of training with resident frozen weights.

    On a GPU, with frozen weights that are offloaded too, and not shared: nothing but sharing differs.
    """
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # a linear layer does
    kinds = ("resident", "alone", "shared") if DEVICE.type == "cpu" else ("alone", "shared")
    mixed = partial(under_fsdp, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    for wrap, is_first, is_checkpointed in (
        (under_ddp, False, False),
        (under_ddp, False, True),
        (mixed, False, False),  # not with checkpoints: torch 2.8 fails at that with resident weights
        (partial(under_fsdp, is_around=True, reshard_after_forward=False), True, True),
    ):
        expected, *others = (
            trained(rank, kind, wrap, is_first=is_first, is_checkpointed=is_checkpointed) for kind in kinds
        )
        for bits in others:
            assert_same(bits, expected)


def offloads_activations(rank: int) -> None:
    """Under DDP, FSDP and FSDP2 training is the same bits with activations offloaded, and no parameter is."""
    warnings.simplefilter("ignore")
    num_samples, num_tokens = (3, 7) if DEVICE.type == "cpu" else (48, 112)  # so many that copies take their time
    if DEVICE.type != "cpu":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)

    def train(wrap: Callable[..., nn.Module], *, is_checkpointed: bool, is_offloaded: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = TrainingModel(3).to(DEVICE)
        if is_checkpointed:
            module.run_block = lambda block, *args: checkpoint(block, *args, use_reentrant=False)
        wrapped, seen, bits = wrap(module), set[int](), list[torch.Tensor]()
        if is_offloaded:
            handle = apply_activation_offloading(
                wrapped, device=DEVICE, min_bytes=0, skip=lambda tensor, _: seen.add(tensor.shape[0]) is not None
            )
        torch.manual_seed(rank)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
        for _ in range(3):
            loss = wrapped(torch.randn(num_samples, num_tokens, DIM, device=DEVICE)).float().square().mean()
            loss.backward()
            bits += [local(loss), *(local(each.grad) for each in wrapped.parameters() if each.grad is not None)]
            optimizer.step()
            optimizer.zero_grad()
        if is_offloaded:
            stats = handle.stats()
            assert stats.offloads > 0 and stats.passes == 3 and stats.used_host_bytes == 0, stats
            assert seen <= {num_samples, num_samples * num_tokens}, seen  # of batches and tokens: no weights
            handle.remove()
        return bits + [local(parameter) for parameter in wrapped.parameters()]

    policy = ModuleWrapPolicy({TrainingBlock})
    fsdp = partial(FullyShardedDataParallel, auto_wrap_policy=policy, device_id=DEVICE, use_orig_params=True)
    fsdp2 = partial(under_fsdp, is_around=True)
    mixed = partial(fsdp2, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    for wrap, is_checkpointed in [*product((under_ddp, fsdp, fsdp2), (False, True)), (mixed, False)]:
        expected, actual = (
            train(wrap, is_checkpointed=is_checkpointed, is_offloaded=is_offloaded) for is_offloaded in (False, True)
        )
        assert_same(actual, expected)


def is_a_pipeline(rank: int) -> None:
    from group_offload import disable_group_offload, enable_group_offload

    from . import tiny_models as tiny

    expected = tiny.run(tiny.flux_pipeline())
    pipe = tiny.flux_pipeline()
    handles = enable_group_offload(pipe, onload_device=DEVICE, process_group=dist.group.WORLD, shard_transfers=True)
    for _ in range(2):
        assert_same(tiny.run(pipe), expected)
    assert handles["transformer"].stats().bytes_from_peers > 0
    disable_group_offload(pipe)
    assert_same(tiny.run(pipe), expected)
