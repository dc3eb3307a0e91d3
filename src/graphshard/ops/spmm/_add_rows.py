# SPDX-License-Identifier: Apache-2.0
"""add_rows: rows added to distinct rows of another table, in place."""

from __future__ import annotations

import math

from torch import Tensor, float32, int64

from ..._base.kernels import kernels_for, num_threads
from .. import _check
from .._dispatch import triton_for


def add_rows(out: Tensor, places: Tensor, rows: Tensor) -> None:
    """``out[places] += rows`` for distinct places; no gradient is recorded.

    Args:
        out: ``[m, *]`` of the dtype of ``rows``, or float32 for rows of 16 bits; may be a slice of
            the columns of a larger tensor.
        places: int32 or int64 ``[n]``, distinct, in [0, m).
        rows: ``[n, *]``.

    Raises:
        TypeError: An argument is no tensor, or places are not int32 or int64.
        IndexError: A place is out of range.
        ValueError: Row shapes or numbers of rows differ, or entries of ``out`` share memory.
    """
    out, rows = (
        _check.check_tensor(name, value).detach() for name, value in (("out", out), ("rows", rows))
    )
    _check.check_index_array("places", places)
    if out.dim() == 0 or out.shape[1:] != rows.shape[1:] or places.shape != rows.shape[:1]:
        raise ValueError(
            "out and rows must have rows of one shape, and places one entry per row (got "
            f"{tuple(out.shape[1:])}, {tuple(rows.shape)} and {tuple(places.shape)})"
        )
    if (out.device.type == "meta") != (rows.device.type == "meta"):
        raise ValueError(f"out and rows must hold numbers (on {out.device} and {rows.device})")
    _check.check_written("out", out)
    rows, places = (_check.apart(value, out) for value in (rows, places))
    if rows.numel() == 0:
        return
    kernels = kernels_for(out.device, rows.dtype) if rows.device == out.device else None
    wide = float32 if rows.dtype.itemsize == 2 else rows.dtype
    takes = out.dtype in (wide, rows.dtype) and _has_whole_rows(out)
    if kernels is None or not takes:
        _check.check_places("places", places, out.shape[0])
        alike = out.device == rows.device == places.device
        on_gpu = triton_for(out.device, rows.dtype) if alike and takes else None
        if on_gpu is not None:
            on_gpu.add_rows(out, places, rows)
            return
        out.index_add_(0, places.to(out.device, int64), rows.to(out.device, out.dtype))
        return
    width = math.prod(out.shape[1:])
    kernels.add_rows(
        out.as_strided((out.shape[0], width), (max(out.stride(0), 1), 1)),
        places.cpu().contiguous(),
        rows.contiguous().view(rows.shape[0], width),
        num_threads(),
    )


def _has_whole_rows(out: Tensor) -> bool:
    """Whether the numbers of a row are side by side, as they are meant."""
    return out.shape[0] > 0 and out[0].is_contiguous() and _check.is_plain(out)
