# SPDX-License-Identifier: Apache-2.0
"""IdTable: new, consecutive ids for the nodes of a sample, in the order in which they appear."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._kernel import kernels_for
from .. import _check


class IdTable:
    """Renumbers ids from [0, num_ids), again and again, with memory that it keeps between calls.

    The compiled table is an array with an entry per id while that is moderate (up to 2^24), and a
    hash table beyond; neither is cleared between calls, so a call costs what it renumbers. In plain
    torch ids are sorted. Use one table per thread.

    Args:
        num_ids: Ids are below this number.

    Raises:
        TypeError: ``num_ids`` is not an int.
        ValueError: ``num_ids`` is negative, or needs more than 63 bits.

    Example:
        >>> table = IdTable(100)
        >>> ids, local = table.renumber(torch.tensor([40, 7]), torch.tensor([7, 93, 40, 93]))
        >>> ids, local
        (tensor([40,  7, 93]), tensor([1, 2, 0, 2]))
    """

    __slots__ = ("_table", "num_ids")

    num_ids: int

    def __init__(self, num_ids: int) -> None:
        if isinstance(num_ids, bool) or not isinstance(num_ids, int):
            raise TypeError(f"num_ids must be an int (got {num_ids!r}); pass the number of nodes")
        if num_ids < 0:
            raise ValueError(f"num_ids must not be negative (got {num_ids})")
        if num_ids > _check.MOST:
            raise ValueError(f"num_ids must be below 2^63 (got {num_ids})")
        self.num_ids = num_ids
        self._table: Any = None

    def __repr__(self) -> str:
        return f"IdTable(num_ids={self.num_ids})"

    def renumber(self, first: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        """Number ``first`` from 0 on, then each new id of ``others`` where it first appears.

        Args:
            first: [n] distinct ids, int32 or int64.
            others: [m] ids, of the same dtype and device.

        Returns:
            ``(ids, local)``: the id behind each number, [n + new], ``first`` and then the new ones;
            and the number of each of ``others``, [m]. Both of the dtype of the inputs.

        Raises:
            TypeError: The ids are not tensors of one integer dtype.
            ValueError: Devices differ, an id is out of range, or ``first`` repeats one.
            RuntimeError: Another thread is using this table.
        """
        _check.check_index_array("first", first)
        _check.check_index_array("others", others)
        _check.check_alike("first", first, "others", others)
        kernels = kernels_for(first.device)
        if kernels is None:
            self._check_range(first, others)
            return _renumber(first, others)
        if self._table is None:
            self._table = kernels.IdTable(self.num_ids)
        first, others = first.contiguous(), others.contiguous()
        local = torch.empty_like(others)
        ids = torch.empty(first.shape[0] + others.shape[0], dtype=first.dtype)
        count = self._table.renumber(first, others, ids, local)
        if count < 0:
            self._check_range(first, others)
            raise _repeated(first)
        return ids[:count].clone(), local

    def _check_range(self, first: Tensor, others: Tensor) -> None:
        for name, array in (("first", first), ("others", others)):
            if array.numel() == 0:
                continue
            low, high = (int(bound) for bound in torch.aminmax(array))
            if low < 0 or high >= self.num_ids:
                raise ValueError(
                    f"every id in {name} must be in [0, num_ids={self.num_ids}) "
                    f"(got {low if low < 0 else high}); make the table with the number of nodes"
                )


def _renumber(first: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """In plain torch: equal ids side by side, each group led by where the id first stood."""
    ids = torch.cat([first, others])
    sorted_ids, order = torch.sort(ids, stable=True)
    starts = torch.ones_like(sorted_ids, dtype=torch.bool)
    starts[1:] = sorted_ids[1:] != sorted_ids[:-1]
    group = starts.cumsum(0) - 1
    appeared = order[starts]
    by_appearance = torch.sort(appeared).indices
    if not torch.equal(
        appeared[by_appearance[: first.shape[0]]],
        torch.arange(first.shape[0], device=first.device),
    ):
        raise _repeated(first)
    number = torch.empty_like(by_appearance)
    number[by_appearance] = torch.arange(number.shape[0], device=ids.device)
    local = torch.empty_like(order)
    local[order] = number[group]
    return ids[appeared[by_appearance]], local[first.shape[0] :].to(ids.dtype)


def _repeated(first: Tensor) -> ValueError:
    values, counts = torch.unique(first, return_counts=True)
    return ValueError(
        f"first must hold each id once (got {int(values[counts > 1][0])} several times); use "
        "torch.unique, or pass the rest in others"
    )
