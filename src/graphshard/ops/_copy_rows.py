# SPDX-License-Identifier: Apache-2.0
"""copy_rows: rows of one table to places of another, without a tensor in between."""

from __future__ import annotations

import torch
from torch import Tensor

from .._kernel import kernels_for, num_threads


def copy_rows(out: Tensor, places: Tensor | None, table: Tensor, rows: Tensor | None) -> None:
    """``out[places] = table[rows]``, for tables of any dtype; no gradient is recorded.

    The compiled kernel asks for rows before it needs them, and writes large results past the
    caches.

    Args:
        out: ``[m, *]``, written to.
        places: int32 or int64 ``[n]``, distinct, in [0, m); None for the first n rows in order.
        table: ``[k, *]`` of the dtype and row shape of ``out``, which it may not overlap.
        rows: int32 or int64 ``[n]``, in [0, k); None for the first n rows in order. At least one of
            ``places`` and ``rows`` is given, or n is k.

    Raises:
        IndexError: A place or row is out of range.
        ValueError: Dtypes or row shapes differ.
    """
    if out.dtype != table.dtype or out.shape[1:] != table.shape[1:]:
        raise ValueError(
            "out and table must have rows of one dtype and shape (got "
            f"{out.dtype} {tuple(out.shape[1:])} and {table.dtype} {tuple(table.shape[1:])})"
        )
    kernels = kernels_for(out.device) if out.is_contiguous() else None
    if kernels is not None and table.device == out.device and out.numel() and table.numel():
        kernels.copy_rows(
            _as_bytes(out),
            None if places is None else places.cpu().contiguous(),
            _as_bytes(table.contiguous()),
            None if rows is None else rows.cpu().contiguous(),
            num_threads(),
        )
        return
    if rows is not None:
        picked = table.index_select(0, rows.to(table.device))
    else:
        picked = table if places is None else table[: places.numel()]
    picked = picked.detach().to(out.device)
    if places is None:
        out[: picked.shape[0]] = picked
    else:
        out.index_copy_(0, places.to(out.device, torch.int64), picked)


def _as_bytes(table: Tensor) -> Tensor:
    return table.detach().view(-1).view(torch.uint8).view(table.shape[0], -1)
