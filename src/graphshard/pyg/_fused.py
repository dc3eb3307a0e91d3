# SPDX-License-Identifier: Apache-2.0
"""Sums and attention by kernels, without a message per edge.

In one-shot mode one kernel sees own and fetched rows. In sequential mode the call is a pass of
`graphshard.fullbatch` over the shards of its edges: rows of one rank at a time, those of the next
on their way, and the same again in the backward where it needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .._base.typing import CanonicalEType
from ..fullbatch.execution import PairwiseTransport, ShardPass
from ..fullbatch.reductions import CopySource, EdgeRows, Reduction, Sum, Weighted
from ..fullbatch.softmax import AttentionSum
from ..fullbatch.topology import Shard, narrow
from ..ops import Adjacency, Attention, attend, gspmm
from ._source_halo import EdgeSet, SourceHalo


class _EdgeSetTransport(PairwiseTransport):
    """Rows of the shards of edges that a layer calls with, not of all of its relation's edges.

    Args:
        halo: The relation.
        edges: The edges; every source is one of the relation's extended rows.
    """

    def __init__(self, halo: SourceHalo, edges: EdgeSet) -> None:
        super().__init__(halo.halo, halo.mode.halo_dtype, not halo.mode.rematerializes)
        self._edges = edges

    def _find_shards(self, etype: CanonicalEType) -> tuple[Shard, ...]:
        src, dst = self._edges.edge_index
        num_dst, num_owned = self._edges.adjacency.num_dst, self.halo.num_owned
        if self.num_steps == 1:
            return (Shard(0, self._edges.adjacency, None),)
        found = []
        for step in range(self.num_steps):
            start, stop = 0, num_owned
            if step:
                first, last = self.plan.halo_range((self.plan.rank - step) % self.num_steps)
                start, stop = num_owned + first, num_owned + last
            eids = ((src >= start) & (src < stop)).nonzero().view(-1)
            largest = max(stop - start, num_dst)
            rows = narrow(src[eids] - start, largest), narrow(dst[eids], largest)
            adjacency = Adjacency(*rows, stop - start, num_dst, check=False)
            kept = narrow(eids, src.numel())
            found.append(Shard(step, adjacency, lambda kept=kept: kept))  # type: ignore[misc]
        return tuple(found)


@dataclass(frozen=True, eq=False)
class FusedCall:
    """One call of `propagate` that kernels compute.

    Args:
        halo: The relation.
        edges: The edges.
        sources: Tensors with a row per own source.
        others: Further tensors that the result depends on.
        compute: From own and fetched rows of the sources to the result.
        reduction: The same, to be merged shard by shard; made from own rows.
        name: Of what is computed, if it is a function of the tensors alone.
    """

    halo: SourceHalo
    edges: EdgeSet
    sources: Sequence[Tensor]
    others: Sequence[Tensor]
    compute: Callable[[Sequence[Tensor]], Tensor]
    reduction: Callable[[], Reduction]
    name: str | None = None

    def run(self) -> Tensor:
        """The result; collective."""
        if self.halo.mode.mode == "oneshot":
            return self.compute(self.halo.extended(*self.sources))
        constants, tensors = self.halo.structure.constants, [*self.sources, *self.others]
        is_constant = self.name is not None and constants.is_constant(tensors)
        if is_constant:
            known = constants.get_copy((self.name, self.edges.number), tensors)
            if known is not None:
                return known
        transport = self.edges.transport
        if transport is None:
            transport = self.edges.transport = _EdgeSetTransport(self.halo, self.edges)
        reductions = [(self.halo.etype, self.reduction())]
        device = self.edges.edge_index.device
        walk = ShardPass(transport, reductions, self.halo.mode.fetched_ahead, device)
        ((result,),) = walk.run()
        if is_constant:
            constants.put_copy((self.name, self.edges.number), tensors, result)
        return result


def weighted_sum(
    halo: SourceHalo, edges: EdgeSet, rows: Tensor, weight: Tensor | None, reduce: str
) -> FusedCall:
    """Sum or mean of source rows, each times the weight of its edge.

    Args:
        halo: The relation.
        edges: The edges.
        rows: ``[num_owned, ...]``.
        weight: ``[num_edges, ...]``, broadcast to a row; None is one.
        reduce: ``"sum"`` or ``"mean"``.
    """
    op = "copy_lhs" if weight is None else "mul"

    def compute(sources: Sequence[Tensor]) -> Tensor:
        return gspmm(edges.adjacency, op, reduce, sources[0], weight)

    def reduction() -> Reduction:
        message = CopySource(rows) if weight is None else Weighted("mul", rows, EdgeRows(weight))
        return Sum(message, edges.counts if reduce == "mean" else None)

    weights = [] if weight is None else [weight]
    return FusedCall(halo, edges, [rows], weights, compute, reduction, reduce)


def attention(
    halo: SourceHalo,
    edges: EdgeSet,
    sources: Sequence[Tensor],
    make: Callable[[Sequence[Tensor]], Attention],
) -> FusedCall:
    """Fused attention.

    Args:
        halo: The relation.
        edges: The edges.
        sources: Tensors with a row per own source.
        make: From their rows to the operands.
    """

    def compute(extended: Sequence[Tensor]) -> Tensor:
        return attend(edges.adjacency, make(extended))

    def reduction() -> Reduction:
        made = make(sources)
        if made.mask is not None:
            keys = torch.arange(edges.edge_index.shape[1], dtype=torch.int32)
            made = replace(made, mask=replace(made.mask, keys=keys.to(edges.edge_index.device)))
        return AttentionSum(made)

    return FusedCall(halo, edges, sources, [], compute, reduction)
