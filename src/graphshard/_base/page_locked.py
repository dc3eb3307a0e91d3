# SPDX-License-Identifier: Apache-2.0
"""Memory of the host that a GPU reads by itself: tables too large for the device.

`PageLock` locks a tensor's pages where they lie, without a copy. `gpu_view` is then a tensor of the
GPU over the same memory: an index on the GPU gathers its rows, over the bus, and no thread of the
host reads or copies any.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from typing import Any

import torch
from torch import Tensor

_TYPES = {
    torch.float64: "<f8",
    torch.float32: "<f4",
    torch.float16: "<f2",
    torch.bfloat16: "<i2",  # as which it is read: the interface has no name for it
    torch.int64: "<i8",
    torch.int32: "<i4",
    torch.int16: "<i2",
    torch.int8: "|i1",
    torch.uint8: "|u1",
    torch.bool: "|b1",
}
_LEAST_BYTES = 1 << 20
"""Smaller tables may share pages with other memory, and are read as fast by the host."""

_PORTABLE = 1
"""The flag of CUDA's driver for memory that every context may read."""

_locks: weakref.WeakValueDictionary[tuple[int, int], PageLock] = weakref.WeakValueDictionary()
_lock = threading.Lock()


class PageLock:
    """Pages of a tensor that are locked until nothing refers to this any more.

    Attributes:
        tensor: Kept for so long.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        weakref.finalize(self, _unlock, tensor, torch.cuda.current_device()).atexit = False

    @classmethod
    def of(cls, tensor: Tensor) -> PageLock | None:
        """Lock a tensor of the CPU; None if it is small or locked by others, or cannot be locked.

        Memory that is a file cannot, with most drivers.
        """
        if not _is_plain(tensor) or tensor.nbytes < _LEAST_BYTES:
            return None
        torch.cuda.init()
        place = tensor.data_ptr(), tensor.nbytes
        with _lock:
            found = _locks.get(place)
            if found is None and not tensor.is_pinned() and _driver_locks(*place):
                found = _locks[place] = cls(tensor)
        return found


def gpu_view(tensor: Tensor, device: torch.device) -> Tensor | None:
    """A tensor of a GPU over the memory of one of the CPU; None unless a `PageLock` holds it.

    The view holds the lock, which waits for kernels before it lets the memory go. Torch's own
    page-locked memory would be used again while a kernel still reads it.
    """
    if device.type != "cuda" or not _is_plain(tensor):
        return None
    lock = _locks.get((tensor.data_ptr(), tensor.nbytes))
    if lock is None:
        return None
    view: Tensor = torch.as_tensor(_GpuArray(tensor, lock))
    if view.device != device:  # locked for another GPU
        return None
    return view.view(tensor.dtype)


class _GpuArray:
    """What torch makes a tensor of the GPU of, which keeps it."""

    def __init__(self, tensor: Tensor, lock: PageLock) -> None:
        self._kept = tensor, lock
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": tuple(tensor.shape),
            "typestr": _TYPES[tensor.dtype],
            "data": (tensor.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and tensor.dtype in _TYPES
    )


def _driver_locks(place: int, num_bytes: int) -> bool:
    # Not by the runtime's function: an error of that is found by whatever torch does next.
    driver = ctypes.CDLL("libcuda.so.1")
    locked = driver.cuMemHostRegister_v2(
        ctypes.c_void_p(place), ctypes.c_size_t(num_bytes), ctypes.c_uint(_PORTABLE)
    )
    return bool(locked == 0)


def _unlock(tensor: Tensor, device: int) -> None:
    torch.cuda.synchronize(device)  # kernels may still read it
    ctypes.CDLL("libcuda.so.1").cuMemHostUnregister(ctypes.c_void_p(tensor.data_ptr()))
