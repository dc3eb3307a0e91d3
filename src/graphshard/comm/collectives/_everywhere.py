# SPDX-License-Identifier: Apache-2.0
"""A few numbers, or an error, of all ranks put together in one collective; or of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ..group import group_state, is_initialized, rank, world_size
from ._agree import share_error
from ._operations import all_reduce, broadcast_


def reduce_ints(numbers: Sequence[int], how: Literal["sum", "max"] = "sum") -> list[int]:
    """Each number, summed or maximised over the ranks; collective."""
    return [int(n) for n in _reduced(torch.tensor(numbers, dtype=torch.int64), how).tolist()]


def reduce_floats(numbers: Sequence[float], how: Literal["sum", "max"] = "sum") -> list[float]:
    """Each number, summed or maximised over the ranks in float64; collective."""
    return [float(n) for n in _reduced(torch.tensor(numbers, dtype=torch.float64), how).tolist()]


def _reduced(numbers: Tensor, how: Literal["sum", "max"]) -> Tensor:
    return all_reduce(numbers, how) if is_initialized() else numbers


def gather_int(number: int) -> list[int]:
    """The number of every rank, by rank; collective."""
    mine = [0] * world_size()
    mine[rank()] = number
    return reduce_ints(mine)


def text_of_rank_0(text: str) -> str:
    """The text of rank 0, on every rank; collective."""
    if not is_initialized():
        return text
    data = text.encode(errors="surrogatepass") if rank() == 0 else b""
    size = reduce_ints([len(data)], "max")[0]
    payload = torch.frombuffer(bytearray(data.ljust(max(1, size), b" ")), dtype=torch.uint8)
    found = broadcast_(group_state(), payload, 0)
    return bytes(found.numpy())[:size].decode(errors="surrogatepass")


def raise_everywhere(error: Exception | None) -> None:
    """Raise on all ranks if any has an error; collective. See `graphshard.comm.share_error`."""
    if is_initialized():
        share_error(error)
    elif error is not None:
        raise error
