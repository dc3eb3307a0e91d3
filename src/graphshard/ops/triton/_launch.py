# SPDX-License-Identifier: Apache-2.0
"""What all kernels share: types of sums, sizes of blocks, and whether they are interpreted."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
"""Whether kernels run in Triton's interpreter, on any device; fixed when Triton is imported."""


EXACT = {"enable_fp_fusion": False}
"""What kernels are launched with: a product is rounded before it is added, in every loop alike."""


def sum_type(dtype: torch.dtype) -> tl.dtype:
    """The type in which numbers of ``dtype`` are added up."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def block(size: int, most: int) -> int:
    """A power of 2 of at least ``size``, or the most."""
    return min(most, triton.next_power_of_2(max(size, 1)))


def warps(block_size: int) -> int:
    """For a program that works on so many numbers at a time."""
    return min(8, max(1, block_size // 256))


def width_class(width: int) -> tuple[int, bool]:
    """Rows of one class take about as long: a power of 2, and whether rows begin aligned."""
    return triton.next_power_of_2(max(width, 1)), width % 16 == 0
