"""What can be asked of a tensor that is bound to other memory again and again: its version, its form, who else keeps it."""

from __future__ import annotations

import torch

from ...base.layout import num_uses


def is_kept(view: torch.Tensor, num_ours: int) -> bool:
    """Whether somebody has a tensor of the storage of `view` beside ours. (A view holds what it is a view of.)"""
    return num_uses(view) > num_ours + view._is_view()


def fit_for(tensor: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """`view`, as what `tensor.data` can be set to: an inference tensor for one that was made in inference mode.

    Such a tensor has no version counter, ever. Bound to a normal one it would be neither, and of no use to most kernels.
    """
    if tracks_version(tensor):
        return view
    with torch.inference_mode():
        alias = torch.empty(0, dtype=view.dtype, device=view.device)
        return alias.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())


def tracks_version(tensor: torch.Tensor) -> bool:
    """False for a tensor that was made in inference mode. `is_inference` tells of what it is bound to now."""
    return version_of(tensor) >= 0


def version_of(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:
        return -1


def same_form(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    return tensor.dtype == view.dtype and tensor.shape == view.shape and tensor.stride() == view.stride()


def same_memory(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    return tensor.data_ptr() == view.data_ptr() and same_form(tensor, view)
