"""Run torch modules whose weights do not fit on the accelerator, or not even in RAM."""

from .activations import (
    ActivationOffloadHandle,
    ActivationStats,
    apply_activation_offloading,
)
from .api import apply_group_offloading, free_slots, handle_of, remove_group_offloading
from .config import OffloadConfig, OffloadType
from .errors import ConfigError, DeviceError, GroupFileError, GroupOffloadError, ModuleError, StateError
from .handle import GroupInfo, OffloadHandle, OffloadStats
from .integrations.diffusers import (
    disable_group_offload,
    enable_group_offload,
    handles_of,
    patch_diffusers,
    unpatch_diffusers,
)
from .integrations.modular import GroupOffloadStrategy
from .integrations.opening import from_pretrained
from .integrations.reporting import write_report
from .integrations.training import ActivationOffloadCallback
from .plan.report import OffloadPlan

__all__ = [
    "ActivationOffloadCallback",
    "ActivationOffloadHandle",
    "ActivationStats",
    "ConfigError",
    "DeviceError",
    "GroupFileError",
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
    "apply_activation_offloading",
    "apply_group_offloading",
    "disable_group_offload",
    "enable_group_offload",
    "free_slots",
    "from_pretrained",
    "handle_of",
    "handles_of",
    "patch_diffusers",
    "remove_group_offloading",
    "unpatch_diffusers",
    "write_report",
]

__version__ = "0.1.0"
