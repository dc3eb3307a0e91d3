# SPDX-License-Identifier: Apache-2.0
"""Rows of several tensors, of any dtypes and widths, as one stream of bytes per peer.

A message holds, for each tensor in turn, its rows back to back: no header, no padding. Both ends
know dtypes, widths and row counts, so the number of bytes is exactly ``rows * row_bytes``. Only
bytes are copied, so alignment does not matter, and dtypes that a backend refuses travel too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ..._memory import empty
from .._trace import Kind
from ..group import GroupState
from ._shared_blocks import SharedBlocks
from ._shared_memory import Allocate, allocator, exchange


def row_bytes(tensor: Tensor) -> int:
    """Bytes in one row of ``[rows, *]``."""
    size = tensor.element_size()
    for extent in tensor.shape[1:]:
        size *= extent
    return size


def as_bytes(tensor: Tensor) -> Tensor:
    """One-dimensional uint8 view of a tensor (of a copy, where it is not contiguous)."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def pack(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """The bytes of all parts, one after another, on ``device``; fresh memory or a view of one."""
    pieces = [as_bytes(part).to(device) for part in parts]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def unpack(stream: Tensor, likes: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
    """Undo `pack`: tensors shaped like ``likes`` but with ``rows[i]`` rows, on their devices.

    One tensor alone is a view of the stream, which must start its own memory.
    """
    if len(likes) == 1:
        return [_from_bytes(stream, likes[0], rows[0])]
    out = []
    start = 0
    for like, num_rows in zip(likes, rows, strict=True):
        part = torch.empty((num_rows, *like.shape[1:]), dtype=like.dtype, device=like.device)
        stop = start + num_rows * row_bytes(like)
        part.view(-1).view(torch.uint8).copy_(stream[start:stop])
        out.append(part)
        start = stop
    return out


def exchange_rows(
    state: GroupState,
    tensors: Sequence[Tensor],
    send_splits: Sequence[Sequence[int]],
    recv_splits: Sequence[Sequence[int]],
    name: str,
    kind: Kind = "all_to_all",
    meanwhile: Callable[[], None] | None = None,
    blocks: SharedBlocks | None = None,
) -> list[Tensor]:
    """Exchange rows of several tensors in one ``all_to_all_single``.

    Args:
        state: The group; every rank must call with the same dtypes and trailing shapes.
        tensors: ``tensors[i]`` is ``[sum(send_splits[i]), *]``, its rows grouped by destination.
        send_splits: Rows of tensor ``i`` for each rank.
        recv_splits: Rows of tensor ``i`` from each rank.
        name: What error messages call the operation.
        kind: How a trace counts it.
        meanwhile: Called while the rows are on their way.
        blocks: Through which memory, see `shared_blocks`; None leaves it to the backend.

    Returns:
        For each tensor ``[sum(recv_splits[i]), *]``, rows grouped by source.
    """
    sizes = [row_bytes(tensor) for tensor in tensors]
    num_ranks = range(state.world_size)
    send_bytes = [
        sum(rows[r] * size for rows, size in zip(send_splits, sizes, strict=True))
        for r in num_ranks
    ]
    recv_bytes = [
        sum(rows[r] * size for rows, size in zip(recv_splits, sizes, strict=True))
        for r in num_ranks
    ]
    if len(tensors) == 1:
        outgoing = as_bytes(tensors[0])
    else:
        device = state.payload_device(tensors[0].device)
        staged = [tensor.to(device) for tensor in tensors]
        outgoing = joined(staged, send_splits, allocator(blocks))
        del staged
    stream = exchange(state, blocks, outgoing, send_bytes, recv_bytes, name, kind, meanwhile)
    return parted(stream, tensors, recv_splits)


def joined(
    tensors: Sequence[Tensor], splits: Sequence[Sequence[int]], allocate: Allocate = empty
) -> Tensor:
    """The bytes of tensors that are grouped by rank, by rank and then by tensor."""
    sizes = [row_bytes(tensor) for tensor in tensors]
    return _regroup([as_bytes(tensor) for tensor in tensors], splits, sizes, allocate)


def parted(
    stream: Tensor, likes: Sequence[Tensor], splits: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Undo `joined`: tensors shaped like ``likes`` but with ``sum(splits[i])`` rows.

    Args:
        stream: Bytes that start their own memory; a result may be a view of it.
        likes: Their shapes without the first extent, dtypes and devices.
        splits: Rows of tensor ``i`` from each rank.
    """
    sizes = [row_bytes(like) for like in likes]
    streams = [stream] if len(likes) == 1 else _split_by_tensor(stream, splits, sizes)
    return [
        _from_bytes(part, like, sum(rows))
        for part, like, rows in zip(streams, likes, splits, strict=True)
    ]


def _from_bytes(stream: Tensor, like: Tensor, num_rows: int) -> Tensor:
    """A stream of bytes, seen as ``num_rows`` rows like ``like``'s; copied if it is not aligned."""
    shape = (num_rows, *like.shape[1:])
    if stream.numel() == 0:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    stream = stream.to(like.device)
    if stream.storage_offset() % like.element_size():
        stream = stream.clone()
    return stream.view(like.dtype).view(shape)


def _regroup(
    streams: Sequence[Tensor],
    splits: Sequence[Sequence[int]],
    sizes: Sequence[int],
    allocate: Allocate,
) -> Tensor:
    """[tensor, rank] order of the byte runs -> [rank, tensor] order."""
    runs = [
        stream.split([rows * size for rows in per_rank])
        for stream, per_rank, size in zip(streams, splits, sizes, strict=True)
    ]
    return _joined([run for by_rank in zip(*runs, strict=True) for run in by_rank], allocate)


def _split_by_tensor(
    stream: Tensor, splits: Sequence[Sequence[int]], sizes: Sequence[int]
) -> list[Tensor]:
    """[rank, tensor] order of the byte runs -> one stream per tensor, in rank order."""
    num_ranks = len(splits[0])
    lengths = [
        rows[r] * size for r in range(num_ranks) for rows, size in zip(splits, sizes, strict=True)
    ]
    starts = [0, *accumulate(lengths)]
    count = len(splits)
    return [
        _joined_runs(
            [stream[starts[r * count + i] : starts[r * count + i + 1]] for r in range(num_ranks)]
        )
        for i in range(count)
    ]


def _joined_runs(runs: Sequence[Tensor]) -> Tensor:
    """One run alone, as where there are two ranks, stays where it is."""
    filled = [run for run in runs if run.numel()]
    return filled[0] if len(filled) == 1 else _joined(runs)


def _joined(runs: Sequence[Tensor], allocate: Allocate = empty) -> Tensor:
    """Bytes one after the other."""
    whole = allocate((sum(run.numel() for run in runs),), torch.uint8, runs[0].device)
    return torch.cat(list(runs), out=whole)
