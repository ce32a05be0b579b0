"""Activation offloading in training: what forward saves for backward moves to host memory and back."""

from .api import ActivationOffloadHandle, apply_activation_offloading
from .stats import ActivationStats

__all__ = ["ActivationOffloadHandle", "ActivationStats", "apply_activation_offloading"]
