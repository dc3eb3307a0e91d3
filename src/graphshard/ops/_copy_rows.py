# SPDX-License-Identifier: Apache-2.0
"""copy_rows: rows of one table to places of another, without a tensor in between."""

from __future__ import annotations

import torch
from torch import Tensor

from .._kernel import kernels_for, num_threads
from . import _check


def copy_rows(out: Tensor, places: Tensor | None, table: Tensor, rows: Tensor | None) -> None:
    """``out[places] = table[rows]``, for tables of any dtype; no gradient is recorded.

    The compiled kernel asks for rows before it needs them, and writes large results past the
    caches.

    Args:
        out: ``[m, *]``, written to.
        places: int32 or int64 ``[n]``, distinct, in [0, m); None for the first n rows in order.
        table: ``[k, *]`` of the dtype and row shape of ``out``; copied first where they overlap.
        rows: int32 or int64 ``[n]``, in [0, k); None for the first n rows in order. At least one of
            ``places`` and ``rows`` is given, or n is k.

    Raises:
        TypeError: An argument is no tensor, or places or rows are not int32 or int64.
        IndexError: A place or row is out of range.
        ValueError: Dtypes, row shapes or the numbers of places and rows differ, or entries of
            ``out`` share memory.
    """
    out, table = (_check.check_tensor(n, t).detach() for n, t in (("out", out), ("table", table)))
    numbers = {"places": places, "rows": rows}
    for name, array in numbers.items():
        if array is not None:
            _check.check_index_array(name, array)
    if out.is_meta or table.is_meta:
        raise ValueError("out and table must hold numbers (got a tensor on the device meta)")
    if 0 in (out.dim(), table.dim()):
        raise ValueError("out and table must have rows (got a tensor without dimensions)")
    if out.dtype != table.dtype or out.shape[1:] != table.shape[1:]:
        raise ValueError(
            "out and table must have rows of one dtype and shape (got "
            f"{out.dtype} {tuple(out.shape[1:])} and {table.dtype} {tuple(table.shape[1:])})"
        )
    lengths = {name: array.shape[0] for name, array in numbers.items() if array is not None}
    count = next(iter(lengths.values()), table.shape[0])
    if any(length != count for length in lengths.values()):
        raise ValueError(f"places and rows must have one length (got {lengths})")
    limits = {"places": out.shape[0], "rows": table.shape[0]}
    for name, limit in limits.items():
        if numbers[name] is None and count > limit:
            raise IndexError(
                f"{count} rows must fit into a table of {limit}; pass {name}, or fewer rows"
            )
    _check.check_written("out", out)
    table = _check.apart(table.resolve_conj().resolve_neg(), out)
    writes = out.is_contiguous() and _check.is_plain(out)
    kernels = kernels_for(out.device) if writes else None
    if kernels is not None and table.device == out.device and out.numel() and table.numel():
        kernels.copy_rows(
            _as_bytes(out),
            None if places is None else places.cpu().contiguous(),
            _as_bytes(table.contiguous()),
            None if rows is None else rows.cpu().contiguous(),
            num_threads(),
        )
        return
    for name, limit in limits.items():
        number = numbers[name]
        if number is not None:
            _check.check_places(name, number, limit)
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
    return table.view(-1).view(torch.uint8).view(table.shape[0], -1)
