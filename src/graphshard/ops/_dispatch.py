# SPDX-License-Identifier: Apache-2.0
"""Which implementation of an operator over edges runs.

| device | |
| --- | --- |
| CPU | the extension, see `graphshard._base.kernels.kernels_for`; without it plain torch |
| CUDA | Triton kernels; without Triton plain torch |
| others | plain torch |
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType

import torch

from .._base.kernels import force_extension

_TRITON_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

_triton_forced = False


@lru_cache(maxsize=1)
def _load_triton() -> ModuleType | None:
    try:
        from . import triton
    except ImportError as error:
        warnings.warn(
            f"Triton cannot be imported ({error}): on this device operators run in plain torch, "
            "several times slower and with a row per edge, with the same results. It comes with "
            "torch's wheels for CUDA: pip install triton",
            RuntimeWarning,
            stacklevel=6,
        )
        return None
    return triton


def triton_for(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """The Triton kernels where they can serve this device and value type, else None.

    The first call that finds no Triton on a GPU warns once, with a ``RuntimeWarning``.
    """
    if dtype not in _TRITON_DTYPES or not (device.type == "cuda" or _triton_forced):
        return None
    return _load_triton()


@contextmanager
def force_triton() -> Iterator[None]:
    """Run the enclosed operators in the Triton kernels, on any device; meant for tests.

    On a CPU that takes its interpreter: ``TRITON_INTERPRET=1`` before Triton is imported.
    """
    global _triton_forced
    before = _triton_forced
    _triton_forced = True
    try:
        with force_extension(False):
            yield
    finally:
        _triton_forced = before
