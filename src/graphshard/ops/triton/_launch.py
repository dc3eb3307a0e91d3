# SPDX-License-Identifier: Apache-2.0
"""What all kernels share: types of sums, sizes of blocks, and whether they are interpreted."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
"""Whether kernels run in Triton's interpreter, on any device; fixed when Triton is imported."""


Operator = TypeVar("Operator", bound=Callable[..., Any])

EXACT = {"enable_fp_fusion": False}
"""What kernels are launched with: a product is rounded before it is added, in every loop alike."""


def sum_type(dtype: torch.dtype) -> tl.dtype:
    """The type in which numbers of ``dtype`` are added up."""
    return tl.float64 if dtype == torch.float64 else tl.float32


# Triton's own `next_power_of_2` and `cdiv` take 5 to 10 microseconds a call on the host.


def next_power_of_2(size: int) -> int:
    """Of at least ``size``, and 1."""
    return 1 << (max(size, 1) - 1).bit_length()


def num_blocks(size: int, of: int) -> int:
    """That cover so many."""
    return -(-size // of)


def block(size: int, most: int) -> int:
    """A power of 2 of at least ``size``, or the most."""
    return min(most, next_power_of_2(size))


def warps(block_size: int) -> int:
    """For a program that works on so many numbers at a time."""
    return min(8, max(1, block_size // 256))


def width_class(width: int) -> tuple[int, bool]:
    """Rows of one class take about as long: a power of 2, and whether rows begin aligned."""
    return next_power_of_2(width), width % 16 == 0


def on_its_device(operator: Operator) -> Operator:
    """Launch on the GPU where the first argument lies: Triton itself takes the current one."""

    @wraps(operator)
    def call(first: Any, *others: Any, **options: Any) -> Any:
        if first.device.type != "cuda":
            return operator(first, *others, **options)
        with torch.cuda.device(first.device):
            return operator(first, *others, **options)

    return cast(Operator, call)
