# SPDX-License-Identifier: Apache-2.0
"""One aggregation whose remote rows and messages are not kept for the backward.

The forward fetches the halo, computes a piece of the destinations at a time, and keeps own rows
alone. The backward fetches again and computes each piece again, with its gradient. All in-edges of
a destination are in one piece, so any aggregation is exact; nothing is sent between pieces.

At most one layer's halo is in memory, fetched from one rank after the other, and the messages of
one piece. Any aggregation is taken so, also one that cannot be merged from parts of the in-edges;
what can be by a kernel is a pass over shards instead, of which one or two are in memory (`_fused`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..fullbatch.execution import RandomState
from ._source_halo import EdgeSet, SourceHalo

MOST_EDGES, FEWEST_EDGES = 1 << 15, 1 << 11
"""Bounds of the edges in a piece."""

Tensors: TypeAlias = Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class DestinationPiece:
    """Destinations ``[start, stop)`` and their in-edges.

    Args:
        start: First destination.
        stop: End of the destinations.
        edges: int64 ids of the edges.
        edge_index: int64 ``[2, num_edges]``: rows of ``sources``, and destinations from 0.
        sources: int64, the extended rows that they read, ascending.
    """

    start: int
    stop: int
    edges: Tensor
    edge_index: Tensor
    sources: Tensor


class DestinationPieces:
    """The edges of a set, cut by destination.

    Args:
        edges: The edges.
    """

    def __init__(self, edges: EdgeSet) -> None:
        self._edges = edges

    @cached_property
    def all(self) -> list[DestinationPiece]:
        indptr, sources, ids = (
            part if part is None else part.long() for part in self._edges.adjacency.csc()
        )
        assert indptr is not None
        assert sources is not None
        total, num_dst = sources.numel(), indptr.numel() - 1
        target = min(MOST_EDGES, max(FEWEST_EDGES, total // 16))
        count = max(1, -(-total // target))
        wanted = torch.arange(1, count, device=indptr.device) * total // count
        cuts = [0, *torch.searchsorted(indptr[:-1], wanted).tolist(), num_dst]
        found = []
        for start, stop in zip(cuts[:-1], cuts[1:], strict=True):
            if start == stop and num_dst:
                continue
            first, last = int(indptr[start]), int(indptr[stop])
            degrees = indptr[start : stop + 1].diff()
            numbers = torch.arange(stop - start, device=indptr.device)
            dst = torch.repeat_interleave(numbers, degrees)
            rows, src = torch.unique(sources[first:last], return_inverse=True)
            edges = torch.arange(first, last, device=indptr.device)
            edges = edges if ids is None else ids[first:last]
            found.append(DestinationPiece(start, stop, edges, torch.stack([src, dst]), rows))
        return found


@dataclass(frozen=True, eq=False)
class Aggregation:
    """What one call of `propagate` reads, and what it computes.

    Args:
        halo: The relation.
        pieces: What is computed at a time.
        compute: From a piece and its rows - of sources, destinations, edges - to the results of
            its destinations, ``[stop - start, ...]``. It may use ``parameters`` as they are.
        sources: Tensors with a row per own source.
        destinations: Tensors with a row per destination.
        edges: Tensors with a row per edge.
        parameters: Other tensors that ``compute`` uses and that may need a gradient.
    """

    halo: SourceHalo
    pieces: Callable[[], Sequence[DestinationPiece]]
    compute: Callable[[DestinationPiece, Tensors, Tensors, Tensors], Tensor]
    sources: Tensors
    destinations: Tensors
    edges: Tensors
    parameters: Tensors

    def recomputed(self) -> Tensor:
        """The result; the backward fetches and computes again. Collective."""
        groups = (self.sources, self.destinations, self.edges, self.parameters)
        result: Tensor = _Recomputed.apply(self, *(tensor for rows in groups for tensor in rows))
        return result

    def of_piece(
        self, piece: DestinationPiece, extended: Tensors, dst: Tensors, edges: Tensors
    ) -> list[list[Tensor]]:
        """The rows that a piece reads, of sources, destinations and edges."""
        return [
            [rows.index_select(0, piece.sources) for rows in extended],
            [rows[piece.start : piece.stop] for rows in dst],
            [rows[piece.edges] for rows in edges],
        ]


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, aggregation: Aggregation, *tensors: Tensor) -> Tensor:
        a = aggregation
        ctx.aggregation, ctx.random = a, []
        device = tensors[0].device if tensors else torch.device("cpu")
        ctx.autocast = (
            device.type,
            torch.get_autocast_dtype(device.type),
            torch.is_autocast_enabled(device.type),
        )
        extended = a.halo.fetched_again(a.sources)
        results = []
        for piece in a.pieces():
            ctx.random.append(RandomState.capture(device))
            results.append(a.compute(piece, *a.of_piece(piece, extended, a.destinations, a.edges)))
        return torch.cat(results) if len(results) != 1 else results[0].detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        a: Aggregation = ctx.aggregation
        needs = ctx.needs_input_grad[1:]
        num = len(a.sources), len(a.destinations), len(a.edges)
        extended = a.halo.fetched_again(a.sources)
        whole = [*extended, *(rows.detach() for rows in (*a.destinations, *a.edges))]
        totals = [
            torch.zeros_like(tensor) if needed else None
            for tensor, needed in zip([*whole, *a.parameters], needs, strict=True)
        ]
        kind, dtype, enabled = ctx.autocast
        now = RandomState.capture(grad.device)
        for piece, random in zip(a.pieces(), ctx.random, strict=True):
            groups = a.of_piece(
                piece, whole[: num[0]], whole[num[0] : num[0] + num[1]], whole[num[0] + num[1] :]
            )
            rows = [tensor.detach() for group in groups for tensor in group]
            for tensor, needed in zip(rows, needs, strict=False):
                tensor.requires_grad_(needed)
            inputs = [*rows, *a.parameters]
            random.restore(grad.device)
            with torch.enable_grad(), torch.autocast(kind, dtype, enabled):
                result = a.compute(
                    piece,
                    rows[: num[0]],
                    rows[num[0] : num[0] + num[1]],
                    rows[num[0] + num[1] :],
                )
            if not result.requires_grad:
                continue
            wanted = [i for i, needed in enumerate(needs) if needed]
            found = torch.autograd.grad(
                result,
                [inputs[i] for i in wanted],
                grad[piece.start : piece.stop],
                allow_unused=True,
            )
            for i, part in zip(wanted, found, strict=True):
                total = totals[i]
                if part is None or total is None:
                    continue
                if i >= sum(num):
                    total.add_(part)
                elif i < num[0]:
                    total.index_add_(0, piece.sources, part)
                elif i < num[0] + num[1]:
                    total[piece.start : piece.stop].add_(part)
                else:
                    total[piece.edges] = part
        now.restore(grad.device)
        remote = [i for i in range(num[0]) if needs[i]]
        returned = a.halo.returned([t for i in remote if (t := totals[i]) is not None])
        for i, summed in zip(remote, returned, strict=True):
            totals[i] = summed
        return None, *totals
