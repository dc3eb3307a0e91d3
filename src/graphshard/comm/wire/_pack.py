# SPDX-License-Identifier: Apache-2.0
"""Rows of several tensors, of any dtypes and widths, as one stream of bytes per peer.

A message holds, for each tensor in turn, its rows back to back: no header, no padding. Both ends
know dtypes, widths and row counts, so the number of bytes is exactly ``rows * row_bytes``. Only
bytes are copied, so alignment does not matter, and dtypes that a backend refuses travel too.

Floating-point rows may travel in fewer bits than they are computed in: the sender rounds them to
the wire dtype, the receiver widens them. What is no wider than the wire dtype travels as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..._memory import empty

Splits = Sequence[Sequence[int]]
"""``splits[i][r]``: rows of tensor ``i`` for, or from, rank ``r``."""

WIRE_DTYPES = (torch.bfloat16, torch.float16)
"""What rows may be rounded to."""


def wire_dtype(dtype: torch.dtype, wire: torch.dtype | None) -> torch.dtype:
    """The dtype in which rows of ``dtype`` travel; ``wire`` None is as they are."""
    if wire is None or not dtype.is_floating_point or dtype.itemsize <= wire.itemsize:
        return dtype
    return wire


def narrowed(tensor: Tensor, wire: torch.dtype | None) -> Tensor:
    """Rows as they travel; the same tensor where nothing changes."""
    return tensor.to(wire_dtype(tensor.dtype, wire))


def row_bytes(tensor: Tensor) -> int:
    """Bytes in one row of ``[rows, *]``."""
    size = tensor.element_size()
    for extent in tensor.shape[1:]:
        size *= extent
    return size


def as_bytes(tensor: Tensor) -> Tensor:
    """One-dimensional uint8 view of a tensor (of a copy, where it is not contiguous)."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def bytes_by_rank(likes: Sequence[Tensor], splits: Splits) -> list[int]:
    """Bytes in the message for, or from, each rank."""
    sizes = [row_bytes(like) for like in likes]
    return [
        sum(rows * size for rows, size in zip(by_tensor, sizes, strict=True))
        for by_tensor in zip(*splits, strict=True)
    ]


def joined(parts: Sequence[Sequence[Tensor]], device: torch.device) -> Tensor:
    """The bytes of ``parts[i][r]``, rows of tensor ``i`` for rank ``r``, by rank and tensor."""
    runs = [
        as_bytes(part).to(device) for by_tensor in zip(*parts, strict=True) for part in by_tensor
    ]
    return _concatenated(runs)


def parted(stream: Tensor, likes: Sequence[Tensor], splits: Splits) -> list[Tensor]:
    """Undo `joined`: tensors like ``likes``, with ``sum(splits[i])`` rows, grouped by rank.

    The stream must start its own memory; a result may be a view of it.
    """
    if len(likes) == 1:
        return [_as_rows(stream, likes[0], sum(splits[0]))]
    sizes = [row_bytes(like) for like in likes]
    lengths = [
        rows * size
        for by_tensor in zip(*splits, strict=True)
        for rows, size in zip(by_tensor, sizes, strict=True)
    ]
    runs = stream.split(lengths)
    return [
        _as_rows(_concatenated(runs[i :: len(likes)]), like, sum(splits[i]))
        for i, like in enumerate(likes)
    ]


def _concatenated(runs: Sequence[Tensor]) -> Tensor:
    """Bytes one after the other. One run alone, as where there are two ranks, is not copied."""
    filled = [run for run in runs if run.numel()]
    if len(filled) == 1:
        return filled[0]
    return torch.cat(
        filled or list(runs),
        out=empty((sum(run.numel() for run in filled),), torch.uint8, runs[0].device),
    )


def _as_rows(stream: Tensor, like: Tensor, num_rows: int) -> Tensor:
    """A stream of bytes, seen as ``num_rows`` rows like ``like``'s; copied if it is not aligned."""
    shape = (num_rows, *like.shape[1:])
    if stream.numel() == 0:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    stream = stream.to(like.device)
    if stream.storage_offset() % like.element_size():
        stream = stream.clone()
    return stream.view(like.dtype).view(shape)
