"""Memory of a GPU that other processes write to, with CUDA's own calls.

torch hands tensors to other processes, and for that gives their memory another owner: `record_stream` does nothing for it from
then on, and it is kept until the other process drops it. Here the allocation that a tensor lies in is mapped, whatever torch
does with it. Allocations are few: torch cuts tensors out of them, and uses them again.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from .device import Stream

_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID
_LAZY_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_ADDRESS, _SIZE, _POINTER = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


_CALLS: dict[str, tuple[Any, ...]] = {
    "cuDeviceGet": (_POINTER, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (_POINTER, ctypes.c_int),
    "cuCtxPushCurrent_v2": (_POINTER,),
    "cuCtxPopCurrent_v2": (_POINTER,),
    "cuMemGetAddressRange_v2": (_POINTER, _POINTER, _ADDRESS),
    "cuPointerGetAttribute": (_POINTER, ctypes.c_int, _ADDRESS),
    "cuIpcGetMemHandle": (_POINTER, _ADDRESS),
    "cuIpcOpenMemHandle_v2": (_POINTER, _Handle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_ADDRESS,),
    "cuMemcpyDtoDAsync_v2": (_ADDRESS, _ADDRESS, _SIZE, _POINTER),
    "cuGetErrorString": (ctypes.c_int, _POINTER),
}


class PeerMemory:
    """What one process asks of CUDA to write to memory of others, and to let them write to its own. Thread-safe."""

    def __init__(self, device: torch.device) -> None:
        """
        Raises:
            OSError, AttributeError: there is no driver, or it is too old.
            RuntimeError: the driver refuses.
        """
        driver = ctypes.CDLL("libcuda.so.1")
        for name, arguments in _CALLS.items():
            getattr(driver, name).argtypes = arguments
        self._driver = driver
        number, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._check("cuDeviceGet", driver.cuDeviceGet(ctypes.byref(number), device.index))
        retained = driver.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), number)  # torch's own one, for good
        self._check("cuDevicePrimaryCtxRetain", retained)

    def start_of(self, memory: torch.Tensor) -> int:
        """The address of the allocation that device memory lies in."""
        start, size = _ADDRESS(), _SIZE()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(size), memory.data_ptr())
        return start.value

    def number_at(self, address: int) -> int:
        """The number of the allocation that is at an address now, which no other one ever has.

        Raises:
            RuntimeError: there is none.
        """
        number = ctypes.c_uint64()
        self._call("cuPointerGetAttribute", ctypes.byref(number), _BUFFER_ID, address)
        return number.value

    def handle_of(self, memory: torch.Tensor) -> str:
        """What another process opens the allocation with.

        Raises:
            RuntimeError: other processes cannot.
        """
        handle = _Handle()
        try:
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), self.start_of(memory))
        except RuntimeError as error:
            how = "expandable_segments:True or backend:cudaMallocAsync in PYTORCH_CUDA_ALLOC_CONF"
            raise RuntimeError(f"{error}: no other process opens memory that torch takes with {how}") from None
        return bytes(handle).hex()

    def open(self, handle: str) -> int:
        """The address of another process' allocation here."""
        address, found = _ADDRESS(), _Handle.from_buffer_copy(bytes.fromhex(handle))
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), found, _LAZY_ENABLE_PEER_ACCESS)
        return address.value

    def close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", address)

    def copy(self, address: int, source: torch.Tensor, stream: Stream) -> None:
        """Enqueue a copy of own device memory to an address that `open` has given, or one behind it."""
        self._call("cuMemcpyDtoDAsync_v2", address, source.data_ptr(), source.numel(), _handle_of(stream))

    def _call(self, name: str, *arguments: Any) -> None:
        # A thread may have no context yet, and torch makes it one of another device.
        self._check(name, self._driver.cuCtxPushCurrent_v2(self._context))
        try:
            self._check(name, getattr(self._driver, name)(*arguments))
        finally:
            self._driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def _check(self, name: str, status: int) -> None:
        if status:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'error').decode()} ({status})")


def _handle_of(stream: Any) -> int:
    ids = {"stream_id": stream.stream_id, "device_index": stream.device_index, "device_type": stream.device_type}
    found = torch.cuda.Stream(**ids)  # type: ignore[no-untyped-call]
    return int(found.cuda_stream)
