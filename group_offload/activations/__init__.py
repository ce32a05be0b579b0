"""Training: tensors that are saved for backward rest in RAM, or in a file, between forward and backward."""

from .api import ActivationOffloadHandle, ActivationStats, activation_offloading, apply_activation_offloading
from .session import no_activation_offloading

__all__ = [
    "ActivationOffloadHandle",
    "ActivationStats",
    "activation_offloading",
    "apply_activation_offloading",
    "no_activation_offloading",
]
