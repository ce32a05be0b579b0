"""Offload one module: `apply_group_offloading`, and the way back."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from .base.arena import arenas
from .base.compiled import HANDLE
from .base.text import short
from .config import ModelOptions, OffloadConfig, takes_options
from .errors import ConfigError, ModuleError, StateError
from .handle import OffloadHandle, listeners
from .owners import add_owner, shared_handle
from .runtime.engine import Engine
from .runtime.gates import root_of
from .weights import pack_weights


@takes_options(ModelOptions)
def apply_group_offloading(module: nn.Module, options: ModelOptions, given: frozenset[str]) -> OffloadHandle:
    """Keep the weights of `module` in RAM or in files, and onload them group by group while it runs.

    Names, order and meaning of the arguments are those of `diffusers.hooks.apply_group_offloading` (0.42.1), but for
    `record_stream` and `low_cpu_mem_usage`, which say below what they do here. Outputs are bit-identical to those of the
    module on the device, as long as its kernels find memory for their workspaces. Between forwards every weight is a CPU
    tensor with its true value, which may be edited, replaced, saved or loaded; the next forward computes with the value that
    the weight has then.

    Backward onloads weights again as it needs them. Parameters that require gradients stay on the device while the module is
    trained, if they are less than half of its bytes (a LoRA); else `backward()` raises StateError.

    Args:
        module: The module to offload. A module that was passed through `torch.compile` is offloaded underneath.
        onload_device: Device that computes. Default: the current accelerator, else the CPU.
        offload_device: `"cpu"` keeps weights in RAM. `"disk"` leaves them in the files that they were loaded from;
            buffers that are in no file stay in RAM.
        offload_type: `"block_level"` moves whole blocks (the elements of ModuleLists and Sequentials), `"leaf_level"`
            single layers, which takes the least device memory. An `OffloadType`, or diffusers' own enum, works too.
        num_blocks_per_group: Blocks that move together. Block level only. Default: 1.
        non_blocking: Without a stream, let the host run ahead of weight copies; with a stream it always does. With or
            without one, copy pinned inputs from where they are: don't change them before the device has copied them.
        use_stream: Copy weights on a separate stream, ahead of the compute that needs them. Default: True on devices
            with streams.
        record_stream: Take memory for weights from torch's caching allocator, just in time, instead of from a fixed
            ring of buffers. At block level this takes slightly less memory. Leaf level always uses the allocator;
            with this option it prefetches four times as far, which takes more memory and is faster where compute sets
            the time. Needs `use_stream`.
        low_cpu_mem_usage: Don't pin host memory, so that it can be swapped out. Slower: threads copy each weight
            through a pinned staging buffer of 108 MiB, nothing is prefetched across forwards, and files are read
            instead of being pinned in the page cache.
        offload_to_disk_path: Folder for group files: all weights live on disk, and RAM holds none between forwards.
            Views of a file stay in that file; the folder gets one safetensors file for each group of other weights. A
            file there is reused only if its content is exactly that of the weights; no other file is touched. Weights
            that are edited or added later stay in RAM.
        block_modules: Names of children that are split into blocks of their own. Block level only. Default: the
            module class's `_group_offload_block_modules`.
        exclude_kwargs: Names of the forward's keyword arguments that aren't moved to the device. Default: the module
            class's `_skip_keys`.
        verify_checksums: Compare each read from a file, by hash, with the bytes that were written, or first read. Takes a
            core's time, and files aren't pinned in the page cache. By name only.
        vram_budget: VRAM for this process: bytes, `"8GiB"`, `"80%"` of the device's memory, or `"auto"` for what is
            free or reserved by this process already, asked in each forward. Keeps as many groups resident as fit
            beside activations, which the first forward measures. If the device runs out of memory, residents are
            evicted, and the call is repeated, or the error asks you to call again. By name only.
        ram_budget: RAM for this process, in the same forms. Weights in files are pinned in the page cache up to the
            budget; the rest is read from disk in every forward. Weights that are in no file stay in RAM, unless
            `offload_to_disk_path` is given. On the CPU the budget covers all RAM that offloading takes. By name only.
        embeddings_on_cpu: Look up embedding tables of 64 MiB or more on the CPU, and transfer only the rows that a
            call needs. A table moves like other weights if another module holds it too, if it is trained, or with
            `verify_checksums`. By name only.
        compress: Compress bfloat16 weights without loss to about 0.7 of their size, fp8 to 0.72 to 0.9: RAM holds a pinned
            compressed copy, which is sent in their place, and the device decompresses it. With
            `offload_to_disk_path` compressed bytes are in that folder too, and what doesn't fit in RAM is read from
            there. Weights that are in no file stay in RAM uncompressed too, so that they can be read. Tensors that
            barely shrink are left as they are. Needs Triton. By name only.
        interleave_forwards: Run forwards of several threads, or the calls of one guidance step, block by block, loading each
            block once. `"auto"` does so on a GPU where the plan says that it saves time, for the denoisers of diffusers
            that tests have tried, unless a class, a forward or an attention processor of yours is inside. With True you
            vouch, for any class, that a forward depends on its inputs and the weights alone. Forwards for which that is
            seen not to hold run separately, and the log says why. By name only.
        process_group: The processes that offload the same module, each on its own GPU: a
            `torch.distributed.ProcessGroup`, or a `DeviceMesh` of one dimension. The GPUs of one host each load a
            shard of every group and exchange them. All ranks make the same calls, in the same order. By name only.
        shard_transfers: True lets these GPUs share loads, False lets each process load everything, `"auto"` picks what is
            faster, which is measured during set-up. By name only.

    Returns:
        The handle: groups, statistics, and `remove()`. A module that is offloaded already keeps its handle.

    Raises:
        ConfigError: an option is not understood, or contradicts another one; or a parameter is in no file, with
            `offload_device="disk"` and no folder.
        DeviceError: the device does not exist, or has no streams.
        ModuleError: the module has no weights, has meta weights, or is offloaded by accelerate; or FSDP2 shards frozen
            weights of it; or another rank of `process_group` has another module.
        StateError: the module is offloaded with other options, or a part of it is offloaded already; or another rank of
            `process_group` is missing, or has failed.
        StorageError: the folder cannot be written, or is too small. The module is left as it was.
        TypeError: an option has no such name.

    Example:
        >>> handle = apply_group_offloading(pipe.transformer, offload_to_disk_path="/nvme/offload")
        >>> image = pipe("a beautiful sunset").images[0]
        >>> print(handle)
    """
    known = handle_of(module)
    config = OffloadConfig.from_options(options, module)
    handle = shared_handle(known, config, given, owner=known and known.module)
    if handle is None:
        return offload(module, config)
    add_owner(handle, handle.module)
    return handle


def offload(
    module: nn.Module,
    config: OffloadConfig,
    casts: Mapping[str, torch.dtype] = MappingProxyType({}),
    *,
    pipeline: Any = None,
) -> OffloadHandle:
    """`apply_group_offloading` with checked options. Meanwhile, weights named in `casts` are cast, one group after another.

    Args:
        pipeline: The owner of the handle. Default: the module itself. See [Note: Owners].
    """
    module = getattr(module, "_orig_mod", module)
    _refuse_offloaded(module)
    for listener in listeners:
        listener.applying(module)
    engine = Engine(module, config)
    handle = OffloadHandle(module, engine)
    add_owner(handle, module if pipeline is None else pipeline)  # first: an interrupt leaves no module without an owner
    try:
        pack_weights(module, config.onload_device)
        tensors = dict([*module.named_parameters(), *module.named_buffers()]) if casts else {}
        by_id = {id(tensors[name]): dtype for name, dtype in casts.items() if tensors[name].dtype != dtype}
        engine.start(by_id)
        module.__dict__[HANDLE] = handle
        for listener in listeners:
            listener.applied(handle)
        return handle
    except BaseException:
        handle.remove()
        raise


def remove_group_offloading(module: nn.Module) -> None:
    """Undo `apply_group_offloading(module, ...)`: see `OffloadHandle.remove`. Does nothing to any other module."""
    handle = handle_of(module)
    if handle is not None:
        handle.remove()


def free_device_buffers() -> None:
    """Return the device memory that offloaded modules keep for their next forward to the device's allocator.

    The memory is also returned when the last offloaded module is gone. Modules that are running keep their memory; the others
    take memory again when they run. Call `torch.cuda.empty_cache()` afterwards to free the memory for other processes.
    """
    for arena in arenas():
        arena.release_idle()


def handle_of(module: nn.Module) -> OffloadHandle | None:
    """The handle of a module that group offloading was applied to, by any call. None for any other module.

    Raises:
        ConfigError: `module` is no torch module.

    Example:
        >>> transformer = from_pretrained(FluxTransformer2DModel, "FLUX.1-dev", subfolder="transformer")
        >>> print(handle_of(transformer))
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"Expected a torch.nn.Module, got {short(module)}. For a pipeline, use enable_group_offload(), "
            f"disable_group_offload() or handles_of()."
        )
    handle: OffloadHandle | None = getattr(module, "_orig_mod", module).__dict__.get(HANDLE)
    return handle


def _refuse_offloaded(module: nn.Module) -> None:
    hooks = sys.modules.get("accelerate.hooks")
    for name, part in module.named_modules():
        if root_of(part) is not None:
            part_of = "" if handle_of(part) is not None else " as a part of another module"
            where = f"its submodule {name!r}" if name else "it"
            raise StateError(
                f"Cannot apply group offloading to {type(module).__name__}: {where} is already offloaded{part_of}. Call "
                f"remove_group_offloading() on {'that module' if part_of else f'model.{name}'} first."
            )
        if getattr(part.__dict__.get("forward"), "__module__", "") == "torch.cuda.graphs":
            raise ModuleError(
                f"Cannot apply group offloading to {type(module).__name__}: the forward of {name or 'the module itself'} is a "
                f"CUDA graph (torch.cuda.make_graphed_callables), which would go on reading device memory that its weights "
                f"have left. Offload a module that no graph was made of."
            )
        hook = part.__dict__.get("_hf_hook")
        chain = (hook, *getattr(hook, "hooks", ()))
        if hooks is not None and any(isinstance(each, (hooks.AlignDevicesHook, hooks.CpuOffload)) for each in chain):
            raise ModuleError(
                f"{name or 'The module'} ({type(part).__name__}) is already offloaded by accelerate. Call "
                f"pipe.remove_all_hooks() (or accelerate.hooks.remove_hook_from_module(model, recurse=True)) first."
            )
