# SPDX-License-Identifier: Apache-2.0
"""Memory for large results: blocks that are used again, epoch after epoch.

[Note: memory of results]
    The C library gives a block of some 10 MB and more back to the system as soon as it is freed,
    and the next one of that size has all its pages mapped and cleared anew: 25 ms for 50 MB, where
    adding two such tensors takes 5. Results of this package therefore live in blocks that are kept
    when they are freed; on Linux they are cut and joined as later results need it. What waits and
    what is in use together never exceed what was in use at once before, so a peak does not rise.
    See csrc/memory.h.

    The environment variable GRAPHSHARD_KEEP_MEMORY=0 turns this off.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from ._kernel import kernels_for

LARGE_BYTES = 1 << 22
"""Results of this size and more live in blocks that are kept; smaller ones are malloc's."""

_CPU = torch.device("cpu")
_MOST_BYTES = 2**63
# DLPack's code and number of bits.
_TYPES = {
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.float16: (2, 16),
    torch.bfloat16: (4, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
}


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = _CPU) -> Tensor:
    """A tensor with any values, for a result.

    Args:
        shape: Its shape.
        dtype: Its type of entries.
        device: Where it is; blocks are kept on the CPU alone.

    Returns:
        A contiguous tensor; large ones take a block that waits to be used again, if one fits.

    Raises:
        TypeError: ``shape`` holds something else than ints.
        ValueError: An extent is negative, or there would be more bytes than addresses.
        MemoryError: There is not so much memory.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype (got {dtype!r})")
    size = dtype.itemsize
    for number in shape:
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"a shape must hold ints (got {shape!r})")
        if not 0 <= number < _MOST_BYTES:
            raise ValueError(f"extents must be in [0, 2^63) (got shape {tuple(shape)})")
        size *= number
    if size >= _MOST_BYTES:
        raise ValueError(
            f"a tensor must have less than 2^63 bytes (got shape {tuple(shape)} of {dtype})"
        )
    device = torch.device(device)
    kernels = _kernels() if size >= LARGE_BYTES and device.type == "cpu" else None
    if kernels is None or dtype not in _TYPES:
        try:
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        except RuntimeError as error:
            raise MemoryError(
                f"there is no memory for a tensor of shape {tuple(shape)} and {dtype} on {device}"
            ) from error
    found: Tensor = torch.from_dlpack(kernels.empty(list(shape), *_TYPES[dtype]))
    return found


def empty_like(tensor: Tensor) -> Tensor:
    """`empty` of the shape, dtype and device of ``tensor``."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"empty_like takes a torch.Tensor (got {type(tensor).__name__})")
    return empty(tensor.shape, tensor.dtype, tensor.device)


def release_memory() -> None:
    """Give blocks that wait to be used again back to the system."""
    kernels = kernels_for(_CPU)
    if kernels is not None:
        kernels.release_blocks()


def _kernels() -> ModuleType | None:
    if os.environ.get("GRAPHSHARD_KEEP_MEMORY", "1") == "0":
        return None
    return kernels_for(_CPU)
