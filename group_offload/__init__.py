"""Run torch modules whose weights do not fit on the accelerator, or not even in RAM."""

from .activations import ActivationOffloadHandle, ActivationStats, apply_activation_offloading
from .api import apply_group_offloading, free_device_buffers, handle_of, remove_group_offloading
from .config import OffloadConfig, OffloadType
from .errors import ConfigError, DeviceError, GroupOffloadError, ModuleError, StateError, StorageError
from .handle import GroupInfo, OffloadHandle, OffloadStats
from .integrations.diffusers import (
    disable_group_offload,
    enable_group_offload,
    handles_of,
    patch_diffusers,
    unpatch_diffusers,
)
from .integrations.loading import from_pretrained
from .integrations.modular import GroupOffloadStrategy
from .integrations.reporting import write_report
from .integrations.training import ActivationOffloadCallback
from .plan.report import OffloadPlan

__all__ = [
    "ActivationOffloadCallback",
    "ActivationOffloadHandle",
    "ActivationStats",
    "ConfigError",
    "DeviceError",
    "GroupInfo",
    "GroupOffloadError",
    "GroupOffloadStrategy",
    "ModuleError",
    "OffloadConfig",
    "OffloadHandle",
    "OffloadPlan",
    "OffloadStats",
    "OffloadType",
    "StateError",
    "StorageError",
    "apply_activation_offloading",
    "apply_group_offloading",
    "disable_group_offload",
    "enable_group_offload",
    "free_device_buffers",
    "from_pretrained",
    "handle_of",
    "handles_of",
    "patch_diffusers",
    "remove_group_offloading",
    "unpatch_diffusers",
    "write_report",
]

__version__ = "0.1.0"
