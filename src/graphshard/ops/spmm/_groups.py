# SPDX-License-Identifier: Apache-2.0
"""group_by_range and ungroup: questions sorted by whom they go to, answers put back in order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from graphshard._typing import INDEX_DTYPES

from ..._kernel import kernels_for
from .. import _check

_MOST_RANGES = 65535


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
        TypeError: ``ids`` or ``dtype`` has another type.
        ValueError: An id is in no range, the ranges do not ascend from 0 or more, ``last`` is none
            of them, or one is too long for ``dtype``.
    """
    _check.check_index_array("ids", ids)
    _check_dtype(dtype)
    _check_ranges(starts, last, dtype)
    kernels = kernels_for(ids.device)
    order = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
    if kernels is None:
        bounds = torch.tensor(starts, dtype=torch.int64, device=ids.device)
        found = torch.bucketize(ids.long().contiguous(), bounds[1:-1].contiguous(), right=True)
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
        TypeError: An array or ``dtype`` has another type.
        ValueError: There are not as many values as counts say, order is no permutation, devices
            differ, or an element does not fit into ``dtype``.
    """
    _check_dtype(dtype)
    for name, array in (("order", order), ("counts", counts), ("values", values)):
        _check.check_index_array(name, array)
    for name, array in (("order", order), ("counts", counts)):
        _check.check_result(name, array, counts.shape, torch.int64, values.device)
    _check.check_narrows("values", values, dtype)
    # What torch indexes with must hold its numbers itself.
    order, counts, values = order.resolve_neg(), counts.resolve_neg(), values.resolve_neg()
    kernels = kernels_for(values.device)
    by_place = torch.empty(counts.shape, dtype=torch.int64, device=counts.device)
    if kernels is not None:
        moved = torch.empty(values.shape, dtype=dtype)
        fits = kernels.ungroup(
            order.contiguous(), counts.contiguous(), values.contiguous(), by_place, moved
        )
        if not fits:
            raise _misfit(counts, values)
        return by_place, moved
    places = torch.arange(order.numel(), device=order.device)
    fits = bool(((counts >= 0) & (counts <= values.numel())).all())
    if not fits or int(counts.sum()) != values.numel() or not order.sort().values.equal(places):
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
        f"{values.numel()} (they add up to {sum(counts.tolist())})"
    )


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in INDEX_DTYPES:
        raise TypeError(f"dtype must be torch.int32 or torch.int64 (got {dtype})")


def _check_ranges(starts: Sequence[int], last: int, dtype: torch.dtype) -> None:
    num_ranges = len(starts) - 1
    if not 0 < num_ranges <= _MOST_RANGES:
        raise ValueError(f"there must be 1 to {_MOST_RANGES} ranges (got {num_ranges})")
    if isinstance(last, bool) or not isinstance(last, int):
        raise TypeError(f"last must be an int (got {last!r})")
    if not 0 <= last < num_ranges:
        raise ValueError(f"last must be one of {num_ranges} ranges (got {last})")
    longest = max(end - begin for begin, end in pairwise(starts))
    ascends = all(begin <= end for begin, end in pairwise(starts))
    if not ascends or starts[0] < 0 or starts[-1] > _check.MOST:
        raise ValueError(
            "starts must ascend, from 0 or more to less than 2^63 (got "
            f"{list(starts[:4])} ... {list(starts[-4:])}); pass where each range begins"
        )
    if longest > torch.iinfo(dtype).max + 1:
        raise ValueError(
            f"{dtype} must tell the ids of each range apart (got a range of {longest}); ask for "
            "torch.int64"
        )
