# SPDX-License-Identifier: Apache-2.0
"""Whether the compiled kernels are used: they are found on first use, never at import.

The extension ``graphshard._kernels`` is optional. Without it (or with the environment variable
``GRAPHSHARD_NO_EXTENSION=1``) every operator runs in plain torch, slower and with the same results.
"""

from __future__ import annotations

import importlib
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType

import torch

INTERFACE = 12
"""Goes up, here and in csrc/bindings/module.cpp, when a signature of the extension changes."""

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
    return _load() if extension_available() else None


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
