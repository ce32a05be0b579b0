"""One page for all models of a pipeline."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ..api import handle_of
from ..errors import ConfigError, StateError
from ..handle import OffloadHandle, report_of
from ..report.page import write_page
from .diffusers import models_of


def write_report(models: Any, path: str | os.PathLike[str]) -> Path:
    """Write one HTML page for several offloaded models, and return its path. See `OffloadHandle.report` for one model.

    Args:
        models: A pipeline, what `enable_group_offload` returned for it, or any dict from names to handles or modules.
        path: The file. A file of that name is replaced.

    Raises:
        ConfigError: `models` is none of these.
        GroupFileError: the file cannot be written.
        StateError: no model of them is offloaded.

    Example:
        >>> image = pipe("a lighthouse in the fog").images[0]
        >>> write_report(pipe, "run.html")
    """
    title = "" if isinstance(models, (Mapping, nn.Module, OffloadHandle)) else type(models).__name__
    if isinstance(models, (nn.Module, OffloadHandle)):
        models = {"": models}
    names: dict[OffloadHandle, list[str]] = {}
    others = []
    for name, model in (models if isinstance(models, Mapping) else models_of(models)).items():
        if not isinstance(model, (nn.Module, OffloadHandle)):
            raise ConfigError(f"Expected handles or modules, and {name!r} is {type(model).__name__}.")
        handle = model if isinstance(model, OffloadHandle) else handle_of(model)
        if handle is None or not handle.is_active:
            others.append(str(name) or type(model).__name__)
        else:
            names.setdefault(handle, []).append(str(name))
    if not names:
        raise StateError(
            f"No model is group-offloaded: {', '.join(others) or 'there is none'}. Call enable_group_offload() or "
            f"apply_group_offloading() first, and write the report before remove()."
        )
    sentences = [f"Not offloaded: {', '.join(others)}."] if others else []
    handles = {", ".join(mine): handle for handle, mine in names.items()}
    return write_page(report_of(handles, title, sentences), path)
