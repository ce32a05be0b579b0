"""What the models of a pipeline share: one RAM budget, and the order in which they run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from ..api import handle_of
from ..base.tuning import tuning
from ..config import OffloadConfig
from ..plan.ram_split import ComponentLoad, ram_for_weights, share_ram
from ..runtime.interleave.contract import DENOISERS
from ..runtime.prefetch.phase_order import PhaseOrder
from ..stores.files import FileMap
from ..stores.safetensors_file import DATA_ALIGNMENT

NUM_STEPS = 28
"""Times that a denoiser is taken to run for one image or video. Encoders and decoders run once."""


def shares_of(models: Mapping[str, nn.Module], config: OffloadConfig, tables: Collection[int] = ()) -> dict[str, int]:
    """Bytes of RAM for each model's weights that are stored in files, by the model's name in the pipeline.

    Models run one after another, and each run reads from the disk the weights that are not in RAM. So RAM goes first to
    the models that run most often for their size.

    Args:
        models: The models by name, each once.
        config: The pipeline's budgets, folder and device. Weights that stay on the device need no RAM: half of `vram_budget`
            counts as room for them, because activations are not known yet. On a device without memory of its own slots are in
            RAM too, and the model that runs may use all the rest.
        tables: The ids of embedding tables that stay where they are stored. Those in files need no RAM.

    Raises:
        ConfigError: the budget is too small.
    """
    on_device = config.vram_budget // 2 if isinstance(config.vram_budget, int) else 0
    has_folder = config.offload_to_disk_path is not None
    loads, in_ram, num_readers = [], 0, 0
    for name, model in models.items():
        in_files, anonymous, num_tensors, tables_in_ram = _bytes_of(model, tables)
        in_ram += anonymous
        must = 0 if has_folder else anonymous
        wanted = in_files + anonymous - (tables_in_ram if has_folder else must)
        if wanted:
            num_readers += 1
            wanted += num_tensors * DATA_ALIGNMENT  # padding around each tensor
        if not must:
            wanted = max(0, wanted - on_device)
        uses = NUM_STEPS if name.startswith(DENOISERS) else 1
        loads.append(ComponentLoad(num_bytes=must + wanted, uses=uses, must_bytes=must))
    ram = ram_for_weights(config.ram_budget, in_ram, tuning().reading_bytes * num_readers, stay=not has_folder)
    rest = ram - sum(load.must_bytes for load in loads)
    shares = [share - load.must_bytes for load, share in zip(loads, share_ram(loads, ram), strict=True)]
    return dict(zip(models, shares if config.backend.has_streams else [rest] * len(loads), strict=True))


def put_in_order(pipeline: Any, models: Mapping[str, nn.Module]) -> None:
    """Let the offloaded models of a pipeline predict which of them runs next, at first as the pipeline's class says."""
    passes = {name: handle._live._passes for name, model in models.items() if (handle := handle_of(model)) is not None}
    order = getattr(pipeline, "model_cpu_offload_seq", None)
    names = order.split("->") if isinstance(order, str) else ()
    phase_order = PhaseOrder(
        [*dict.fromkeys(passes.values())],
        [*dict.fromkeys(passes[name] for name in names if name in passes)],
        [each for name, each in passes.items() if not name.startswith(DENOISERS)],
    )
    for each in passes.values():
        each.phase_order = phase_order


def _bytes_of(model: nn.Module, tables: Collection[int]) -> tuple[int, int, int, int]:
    """Bytes of weights, but not tables, that are views of files; bytes of all other weights; the number of tensors; bytes of
    the tables that are among the others."""
    files = FileMap()
    in_files = anonymous = tables_in_ram = 0
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers()) if not is_lazy(each)}
    for tensor in tensors.values():
        if tensor.device.type == "cpu" and files.find(tensor.detach()) is None:
            anonymous += tensor.nbytes
            tables_in_ram += tensor.nbytes if id(tensor) in tables else 0
        elif id(tensor) not in tables:
            in_files += tensor.nbytes
    return in_files, anonymous, len(tensors), tables_in_ram
