# SPDX-License-Identifier: Apache-2.0
"""group_by_range and ungroup: questions sorted by whom they go to, answers put back in order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._kernel import kernels_for


def group_by_range(
    ids: Tensor, starts: Sequence[int], last: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[int]]:
    """Group ids by the range they are in.

    Args:
        ids: int32 or int64 ``[n]``.
        starts: ``num_ranges + 1`` ascending numbers, less than 65,536 ranges; range r is
            ``[starts[r], starts[r + 1])``.
        last: The range that comes after all others, which stay in order; so do ids in a range.
        dtype: int32 or int64, of the second result.

    Returns:
        int64 ``[n]``, where each grouped id stood; ``[n]``, its distance from the start of its
        range; and the size of each range, by its number.

    Raises:
        ValueError: An id is in no range.
    """
    kernels = kernels_for(ids.device)
    order = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
    if kernels is None:
        bounds = torch.tensor(starts, dtype=torch.int64, device=ids.device)
        found = torch.bucketize(ids.to(torch.int64), bounds[1:-1].contiguous(), right=True)
        is_last = (found == last).to(torch.int64)
        order = torch.argsort(found + is_last * len(starts), stable=True)
        rows = (ids.to(torch.int64) - bounds[found]).index_select(0, order).to(dtype)
        sizes = torch.bincount(found, minlength=len(starts) - 1)
        in_range = ids.numel() == 0 or bool(
            (ids.min() >= bounds[0]).logical_and(ids.max() < bounds[-1])
        )
    else:
        rows = torch.empty(ids.shape, dtype=dtype)
        sizes = torch.empty(len(starts) - 1, dtype=torch.int64)
        in_range = kernels.group_by_range(
            ids.contiguous(), torch.tensor(starts, dtype=torch.int64), last, order, rows, sizes
        )
    if not in_range:
        raise ValueError(
            f"every id must be in [{starts[0]}, {starts[-1]}) (got {int(ids.min())} to "
            f"{int(ids.max())})"
        )
    return order, rows, sizes.tolist()


def ungroup(
    order: Tensor, counts: Tensor, values: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Put lists, which lie one after another, into the places where they belong.

    Args:
        order: int64 ``[n]``, a permutation: the place of each list.
        counts: int64 ``[n]``, how many elements each has.
        values: int32 or int64 ``[sum(counts)]``, their elements.
        dtype: int32 or int64, of the elements in the result.

    Returns:
        Counts and elements, by place.

    Raises:
        ValueError: There are not as many values as counts say, or order is no permutation.
    """
    kernels = kernels_for(values.device)
    by_place = torch.empty_like(counts)
    if kernels is not None:
        moved = torch.empty(values.shape, dtype=dtype)
        fits = kernels.ungroup(
            order.contiguous(), counts.contiguous(), values.contiguous(), by_place, moved
        )
        if not fits:
            raise _misfit(counts, values)
        return by_place, moved
    if int(counts.sum()) != values.numel():
        raise _misfit(counts, values)
    by_place[order] = counts
    begins = counts.cumsum(0) - counts
    shift = torch.empty_like(begins)
    shift[order] = begins
    shift -= by_place.cumsum(0) - by_place
    source = torch.arange(values.numel(), device=values.device) + shift.repeat_interleave(by_place)
    return by_place, values.index_select(0, source).to(dtype)


def _misfit(counts: Tensor, values: Tensor) -> ValueError:
    return ValueError(
        f"order must be a permutation of {counts.numel()} lists, and counts must add up to "
        f"{values.numel()} (they add up to {int(counts.sum())})"
    )
