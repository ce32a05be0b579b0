"""A system that has nothing but what every system has, as the package sees it: `make portable`.

The package runs on Linux here, and is shown less than Linux has: names of `os` and other modules, keywords of calls, files of
the kernel. Everything else in the process (torch, pytest, psutil, the standard library) sees the system as it is.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib.util
import mmap
import os
import select
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

IS_PORTABLE = os.environ.get("GROUP_OFFLOAD_PORTABLE") == "1"

PACKAGE = "group_offload"

PORTABLE_OS = {
    *("O_BINARY", "O_CREAT", "O_EXCL", "O_RDONLY", "O_RDWR", "O_WRONLY", "PathLike", "SEEK_SET", "W_OK"),
    *("access", "close", "cpu_count", "devnull", "dup", "dup2", "environ", "fsdecode", "fstat", "fsync"),
    *("ftruncate", "getpid", "link", "listdir", "lseek", "lstat", "name", "open", "path", "read"),
    *("readlink", "replace", "stat", "stat_result", "strerror", "unlink", "urandom", "utime", "write"),
}
"""The names of `os` that the package may see: Linux, macOS and Windows have them. (Windows alone has O_BINARY.)"""
PORTABLE_MMAP = {"ACCESS_COPY", "ACCESS_READ", "ACCESS_WRITE", "ALLOCATIONGRANULARITY", "PAGESIZE", "mmap"}
PORTABLE_SELECT = {"select"}
ABSENT = {"fcntl", "grp", "posix", "pwd", "resource", "termios"}
"""Modules that Windows lacks."""

ABOUT_LINUX = {
    "engine/test_several.py": "memory that processes share, and /proc",
    "engine/test_several_streams.py": "memory that processes share",
    "test_examples.py::test_tiny_in_processes": "memory that processes share",
    "units/test_shared_state.py": "memory that processes share",
    "files/reading/test_direct_reads.py": "reads past the page cache",
    "files/test_page_cache.py": "weights in the page cache, pinned there",
    "files/test_checkpoint.py": "weights that are stored in their checkpoint, whose edits the page map tells",
    "files/test_without_page_map.py": "a page map that goes",
    "files/reading/test_reader_processes.py": "processes that fork",
    "engine/test_processes.py": "processes that fork",
    "integrations/test_modular.py::test_resident_weights_give_way_to_a_whole_model": "weights that stay on the device",
    "integrations/test_loading.py": "casts that are postponed, because the page map tells which weights are views of files",
    "integrations/test_quantizing.py": "models opened in place, as the page map tells which weights are views of files",
    "files/test_files_of_others.py": "owners and modes of files",
    "files/test_folder.py::test_a_set_up_that_gets_no_lock": "locks of files",
    "files/test_file_identity.py::test_the_disk_is_a_promise": "weights that are stored in their checkpoint",
    "engine/test_changes.py::test_a_swap_an_edit_and_a_new_module": "weights that are stored in their checkpoint, as one case",
    "files/test_files.py::test_small_weights_share_a_mapping": "the kernel's list of mappings",
    "files/test_folder.py::test_name_is_given_to_durable_bytes": "folders that are synced",
    "files/reading/test_reader.py::test_a_file_that_is_cut_off_while_it_is_read": "reads that nothing comes before",
    "engine/test_streams.py::test_the_host_never_waits": "copies across passes",
    "engine/test_streams.py::test_what_rests_in_ram_does_not_overtake_what_is_read": "weights in their checkpoint",
    "engine/test_streams.py::test_compressed_weights_stay_on_the_device": "compressed weights, whose edits the page map tells",
    "engine/weights/test_quantized.py::test_copies_never_wait_on_the_host": "copies across passes",
    "engine/weights/test_kinds.py::test_attributes_of_a_weight_land_in_slots": "copies across passes",
}
"""The tests that are about what Linux alone has, and what that is. They are skipped.

*Copies across passes*: without a page map the host waits for all copies at the end of a pass. *Reads that nothing comes
before*: without one a pass begins with a comparison of files and weights, which meets the disk's error first."""


def about_linux(file: str, test: str) -> str | None:
    """What Linux alone has that a test is about."""
    return ABOUT_LINUX.get(file, ABOUT_LINUX.get(f"{file}::{test}"))


def is_refused(error: Exception) -> bool:
    """Whether an error says that weights cannot be left in their checkpoint, because the system has no page map."""
    return str(error).startswith("offload_device='disk' needs /proc/self/pagemap")


def _refuse(path: object, dir_fd: int | None = None) -> None:
    if dir_fd is not None:
        raise NotImplementedError("dir_fd unavailable on this platform")
    if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(("/proc", "/sys")):
        raise FileNotFoundError(2, os.strerror(2), path)


def _open_fd(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    _refuse(path, dir_fd)
    if os.path.isdir(path):
        raise PermissionError(13, os.strerror(13), path)
    return os.open(path, flags, mode)


def _open(file: Any, *args: Any, **kwargs: Any) -> Any:
    _refuse(file)
    return builtins.open(file, *args, **kwargs)


def _without_dir_fd(call: Callable[..., Any]) -> Callable[..., Any]:
    def refused(path: Any, *, dir_fd: int | None = None, **options: Any) -> Any:
        _refuse(path, dir_fd)
        return call(path, **options)

    return refused


def _mmap(
    fileno: int, length: int, tagname: str | None = None, access: int = mmap.ACCESS_WRITE, offset: int = 0
) -> Any:
    return mmap.mmap(fileno, length, access=access, offset=offset)


def _cdll(name: str | None, *args: Any, **kwargs: Any) -> Any:
    if name is None:
        raise TypeError("argument of type 'NoneType' is not iterable")  # as Windows says it
    return ctypes.CDLL(name, *args, **kwargs)


class _Shown(ModuleType):
    """A module of which the package sees a part. What a test puts into the module is seen."""

    def __init__(self, real: ModuleType, names: set[str] | None, **others: Any) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(_real=real, _names=names, **others)

    def __getattr__(self, name: str) -> Any:
        names = self.__dict__["_names"]
        if names is not None and name not in names:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} here")
        return getattr(self.__dict__["_real"], name)


_CALLS = {"open": _open_fd, "stat": _without_dir_fd(os.stat), "unlink": _without_dir_fd(os.unlink)}
_SHOWN = {
    "os": _Shown(os, PORTABLE_OS, name="nt", **_CALLS),
    "sys": _Shown(sys, None, platform="win32"),
    "mmap": _Shown(mmap, PORTABLE_MMAP, mmap=_mmap),
    "select": _Shown(select, PORTABLE_SELECT),
    "ctypes": _Shown(ctypes, None, CDLL=_cdll),
}


def _import(name: str, globals_: Any = None, locals_: Any = None, fromlist: Any = (), level: int = 0) -> Any:
    if level == 0 and name in ABSENT:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    if level == 0 and name in _SHOWN:
        return _SHOWN[name]
    return builtins.__import__(name, globals_, locals_, fromlist, level)


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _import, "open": _open}
        super().exec_module(module)


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != PACKAGE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.origin is None:
            return spec
        places = spec.submodule_search_locations
        loader = _Loader(name, spec.origin)
        return importlib.util.spec_from_file_location(
            name, spec.origin, loader=loader, submodule_search_locations=places
        )


def show_less() -> None:
    """Show the package less from now on. It is not imported yet."""
    assert PACKAGE not in sys.modules
    sys.meta_path.insert(0, _Finder)
