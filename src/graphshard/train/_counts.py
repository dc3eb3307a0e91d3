# SPDX-License-Identifier: Apache-2.0
"""Numbers of all ranks put together: a few at a time, in one collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from ..comm import all_reduce, is_initialized, rank, world_size


def reduced(numbers: Sequence[int], how: Literal["sum", "max"] = "sum") -> list[int]:
    """Each number, summed or maximised over the ranks; collective."""
    if not is_initialized():
        return list(numbers)
    return [int(n) for n in all_reduce(torch.tensor(numbers, dtype=torch.int64), how).tolist()]


def summed(numbers: Sequence[float], how: Literal["sum", "max"] = "sum") -> list[float]:
    """Each number, put together over the ranks in float64; collective."""
    if not is_initialized():
        return list(numbers)
    total = all_reduce(torch.tensor(numbers, dtype=torch.float64), how)
    return [float(n) for n in total.tolist()]


def per_rank(number: int) -> list[int]:
    """The number of every rank, by rank; collective."""
    if not is_initialized():
        return [number]
    mine = [0] * world_size()
    mine[rank()] = number
    return reduced(mine)
