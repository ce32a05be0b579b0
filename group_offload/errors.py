"""The errors that users meet.

GroupOffloadError
├── ConfigError          (ValueError)    an option, or two that contradict each other
│   └── DeviceError                      a device that does not exist or cannot do what was asked
├── ModuleError          (ValueError)    a module that cannot be offloaded as it is
├── StateError           (RuntimeError)  a call that does not fit what the module is doing now
└── GroupFileError       (OSError)       a group file or its folder; names the file and the group
"""

from __future__ import annotations


class GroupOffloadError(Exception):
    """Base of every error that group_offload raises on purpose."""


class ConfigError(GroupOffloadError, ValueError):
    """An option has a value that is not understood, or contradicts another option."""


class DeviceError(ConfigError):
    """The device does not exist, or cannot do what was asked of it."""


class ModuleError(GroupOffloadError, ValueError):
    """The module cannot be offloaded as it is."""


class StateError(GroupOffloadError, RuntimeError):
    """The call does not fit the state that the module is in."""


class GroupFileError(GroupOffloadError, OSError):
    """A group file, or the folder of group files, cannot be written or read."""
