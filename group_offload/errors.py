"""The errors that users see.

GroupOffloadError
├── ConfigError          (ValueError)    an option is not understood, or two contradict each other
│   └── DeviceError                      a device does not exist, or lacks something that was asked for
├── ModuleError          (ValueError)    a module cannot be offloaded as it is
├── StateError           (RuntimeError)  a call does not fit the state of the module
└── StorageError         (OSError)       a group file, checkpoint or folder cannot be read or written
"""

from __future__ import annotations

import torch


class GroupOffloadError(Exception):
    """Base of every error that group_offload raises on purpose."""


class ConfigError(GroupOffloadError, ValueError):
    """An option has a value that isn't understood, or contradicts another option."""


class DeviceError(ConfigError):
    """The device doesn't exist, or lacks something that you asked for, such as streams."""


class ModuleError(GroupOffloadError, ValueError):
    """The module can't be offloaded as it is."""


class StateError(GroupOffloadError, RuntimeError):
    """The call doesn't fit the state that the module is in."""


class StorageError(GroupOffloadError, OSError):
    """A group file, a checkpoint or the folder of group files can't be written or read."""


EXPECTED = (GroupOffloadError, torch.OutOfMemoryError)
"""What the engine raises on purpose, in an orderly state: a forward may catch it, and go on."""
