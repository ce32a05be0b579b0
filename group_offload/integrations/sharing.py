"""One RAM budget for all models of a pipeline."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from torch import nn
from torch.nn.parameter import is_lazy

from ..plan.budgets import Budget, parse_budget, total_ram
from ..plan.planner import ComponentLoad, share_ram
from ..runtime.budget.budgeter import ram_for_weights
from ..runtime.copies.reader import STAGING_BYTES
from ..stores.checkpoint import FileMap
from ..stores.safetensors_file import DATA_ALIGNMENT

NUM_STEPS = 28
"""How often a denoiser runs for one image or video, while encoders and decoders run once."""
DENOISERS = ("transformer", "unet", "controlnet", "prior", "decoder_unet")
"""Parts of a pipeline that run in each step: what their names begin with."""


def shares_of(
    models: Mapping[str, nn.Module],
    budget: int | str | None,
    vram: int | str | None,
    *,
    has_folder: bool,
    has_device: bool,
) -> dict[str, int]:
    """RAM for the weights of each model that rest in files, by its name in the pipeline.

    Models run one after another, and what is read from the drive is read each time one runs: so RAM goes first to those
    that run most often for their size.

    Args:
        budget: for the whole process, as the user gave it.
        vram: the same for the device. What stays there needs no RAM; half of it is taken for that, as activations are not
            known yet.
        has_folder: weights that are in no file get one.
        has_device: the device has memory of its own. Else what weights take turns in is RAM, and all of the rest is for the
            model that runs.

    Raises:
        ConfigError: it is not understood, or too small.
    """
    parsed: Budget | None = parse_budget(budget, "ram_budget", total_ram())
    device = parse_budget(vram, "vram_budget", sys.maxsize)
    on_device = device // 2 if isinstance(device, int) else 0
    distinct: dict[int, str] = {}
    for name, model in models.items():
        distinct.setdefault(id(model), name)
    loads, in_ram, num_readers = [], 0, 0
    for name in distinct.values():
        in_files, anonymous, num_tensors = _bytes_of(models[name])
        in_ram += anonymous
        must = 0 if has_folder else anonymous
        wanted = in_files + anonymous - must
        if wanted:
            num_readers += 1
            wanted += num_tensors * DATA_ALIGNMENT  # the room around each of them
        if not must:
            wanted = max(0, wanted - on_device)
        uses = NUM_STEPS if name.startswith(DENOISERS) else 1
        loads.append(ComponentLoad(num_bytes=must + wanted, uses=uses, must_bytes=must))
    ram = ram_for_weights(parsed, in_ram, STAGING_BYTES * num_readers, stay=not has_folder)
    rest = ram - sum(load.must_bytes for load in loads)
    shares = [share - load.must_bytes for load, share in zip(loads, share_ram(loads, ram), strict=True)]
    by_model = dict(zip(distinct, shares if has_device else [rest] * len(loads), strict=True))
    return {name: by_model[id(model)] for name, model in models.items()}


def _bytes_of(model: nn.Module) -> tuple[int, int, int]:
    """Weights that are views of files, those that are not, and how many tensors that is."""
    files = FileMap()
    in_files = anonymous = 0
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers()) if not is_lazy(each)}
    for tensor in tensors.values():
        if tensor.device.type == "cpu" and files.find(tensor.detach()) is None:
            anonymous += tensor.nbytes
        else:
            in_files += tensor.nbytes
    return in_files, anonymous, len(tensors)
