# SPDX-License-Identifier: Apache-2.0
"""The compiled kernels, found on first use and never at import; and memory for their results.

The extension ``graphshard._kernels`` is optional. Without it (or with the environment variable
``GRAPHSHARD_NO_EXTENSION=1``) every operator runs in plain torch, slower and with the same results.

[Note: memory of results]
    The C library gives a block of some 10 MB and more back to the system as soon as it is freed,
    and the next one of that size has all its pages mapped and cleared anew: 25 ms for 50 MB, where
    adding two such tensors takes 5. Results of this package therefore live in blocks that are kept
    when they are freed; on Linux they are cut and joined as later results need it. What waits and
    what is in use together never exceed what was in use at once before, so a peak does not rise.
    See csrc/runtime/large_blocks.h.

    The environment variable GRAPHSHARD_KEEP_MEMORY=0 turns this off.

[Note: instruction set]
    Kernels take the widest vector registers that torch's own take on this machine. So where
    ATEN_CPU_CAPABILITY holds torch back (to "avx2" or "default"), as on an older processor, it
    holds them back, too: one setting gives the sums of one processor on another, and a product
    that torch rounds before it adds is rounded here.
"""

from __future__ import annotations

import importlib
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

INTERFACE = 19
"""Goes up, here and in csrc/bindings/module.cpp, when a signature of the extension changes."""

_REGISTER_BYTES = {"NO AVX": 16, "DEFAULT": 16, "AVX2": 32}
"""Of the vector registers of torch's kernels, by their name in torch; others have no limit."""

_WIDEST_REGISTER = 64

_NATIVE_DTYPES = (torch.float32, torch.float64, torch.bfloat16)

_forced: bool | None = None
_limits = threading.local()


@lru_cache(maxsize=1)
def _load() -> ModuleType | None:
    if os.environ.get("GRAPHSHARD_NO_EXTENSION", "") not in ("", "0"):
        return None
    try:
        module = importlib.import_module("graphshard._kernels")
    except ImportError as error:
        reason = str(error)
    else:
        if module.interface == INTERFACE:
            capability = torch.backends.cpu.get_cpu_capability()
            module.limit_registers(_REGISTER_BYTES.get(capability, _WIDEST_REGISTER))
            return module
        reason = f"it has interface {module.interface}, this code needs {INTERFACE}"
    warnings.warn(
        f"the compiled kernels of graphshard are not in use ({reason}): operators run in plain "
        "torch, several times slower with the same results. Build them with `pip install .`, or "
        "set GRAPHSHARD_NO_EXTENSION=1 to run without them on purpose.",
        RuntimeWarning,
        stacklevel=4,
    )
    return None


def extension_available() -> bool:
    """Whether operators on CPU tensors run in the compiled kernels.

    The first call (or the first operator) looks for the extension and warns once, with a
    ``RuntimeWarning``, when it is absent or out of date; ``GRAPHSHARD_NO_EXTENSION=1`` is silent.
    """
    return _load() is not None if _forced is None else _forced


@contextmanager
def force_extension(enabled: bool) -> Iterator[None]:
    """Run the enclosed operators with (True) or without (False) the extension; meant for tests.

    Raises:
        RuntimeError: ``enabled`` is true and there is no extension.
    """
    global _forced
    if enabled and _load() is None:
        raise RuntimeError(
            "force_extension(True) needs the compiled kernels, which are absent; build them with "
            "`pip install .`"
        )
    before = _forced
    _forced = enabled
    try:
        yield
    finally:
        _forced = before


def kernels_for(device: torch.device, dtype: torch.dtype | None = None) -> ModuleType | None:
    """The extension where it can serve this device and value type, else None."""
    if device.type != "cpu" or (dtype is not None and dtype not in _NATIVE_DTYPES):
        return None
    return _load() if _forced is None or _forced else None


def limit_threads(num_threads: int) -> None:
    """Let kernels called from this thread use no more threads than these, from now on.

    Meant for threads that work beside each other on one task. (``torch.set_num_threads`` would
    change the number for threads of the user, too.)
    """
    _limits.num_threads = num_threads


def num_threads() -> int:
    """How many threads a kernel called from this thread may use."""
    number = torch.get_num_threads()
    return min(number, getattr(_limits, "num_threads", number))


# -- memory for results ---------------------------------------------------------------------------

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

    Returns:
        A contiguous tensor; large ones of the CPU take a block that waits, if one fits.

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
    return torch.from_dlpack(kernels.empty(list(shape), *_TYPES[dtype]))


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
    return None if os.environ.get("GRAPHSHARD_KEEP_MEMORY") == "0" else kernels_for(_CPU)
