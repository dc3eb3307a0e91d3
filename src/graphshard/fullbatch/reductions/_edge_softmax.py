# SPDX-License-Identifier: Apache-2.0
"""Edge softmax of values that are whole, one row per local edge; over one or several relations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._base.typing import CanonicalEType
from ...comm import fetch_halo, return_halo
from ...ops import Adjacency, edge_softmax, gspmm, gspmm_arg
from ..topology import Halo, ShardStructure


def softmax_over_in_edges(
    structure: ShardStructure, etypes: Sequence[CanonicalEType], logits: Sequence[Tensor]
) -> list[Tensor]:
    """Softmax over the in-edges of each destination, all of which are on its own rank.

    Args:
        structure: This rank's edges.
        etypes: Relations into one node type.
        logits: ``[num_edges, ...]`` for each.

    Returns:
        Weights like ``logits``; those of one destination add up to 1 over all relations.
    """
    if len(etypes) == 1:
        adjacency = structure.halo(etypes).adjacency(etypes[0])
        return [edge_softmax(adjacency, logits[0], "dst")]
    edges = [structure.edges[etype] for etype in etypes]
    dst = torch.cat([e.dst for e in edges])
    joint = Adjacency(torch.zeros_like(dst), dst, 1, edges[0].num_dst, check=False)
    weights = edge_softmax(joint, torch.cat(list(logits)), "dst")
    return list(weights.split([e.num_edges for e in edges]))


def softmax_over_out_edges(
    structure: ShardStructure, etypes: Sequence[CanonicalEType], logits: Sequence[Tensor]
) -> list[Tensor]:
    """Softmax over the out-edges of each source, which are spread over the ranks.

    The peak and the total of each source are put together at its owner and fetched back.

    Args:
        structure: This rank's edges.
        etypes: Relations out of one node type.
        logits: ``[num_edges, ...]`` for each.

    Returns:
        Weights like ``logits``; those of one source add up to 1 over all relations and ranks.
    """
    halo = structure.halo(etypes)
    outgoing = [halo.adjacency(etype).reverse() for etype in etypes]
    sources = [halo.extended_src(etype) for etype in etypes]
    with torch.no_grad():
        peak = _peak(outgoing, logits)
        own, remote = peak[: halo.num_owned], peak[halo.num_owned :]
        own = torch.maximum(own, return_halo([(halo.plan, remote)], "max")[0])
        peak = torch.cat([own, fetch_halo([(halo.plan, own)])[0]])
        peak = peak.masked_fill(peak == float("-inf"), 0.0)
    weights = [
        (rows - peak.index_select(0, src)).exp() for rows, src in zip(logits, sources, strict=True)
    ]
    totals = [
        gspmm(adjacency, "copy_rhs", "sum", None, rows)
        for adjacency, rows in zip(outgoing, weights, strict=True)
    ]
    total = torch.stack(totals).sum(0) if len(totals) > 1 else totals[0]
    own_total = total[: halo.num_owned] + _ReturnSum.apply(total[halo.num_owned :], halo)
    total = torch.cat([own_total, fetch_halo([(halo.plan, own_total)])[0]])
    return [rows / total.index_select(0, src) for rows, src in zip(weights, sources, strict=True)]


def _peak(adjacencies: Sequence[Adjacency], logits: Sequence[Tensor]) -> Tensor:
    """Largest value at each end over all relations; -inf where there is no edge."""
    peaks = []
    for adjacency, rows in zip(adjacencies, logits, strict=True):
        peak, argmax = gspmm_arg(adjacency, "copy_rhs", "max", None, rows)
        peaks.append(peak.masked_fill(argmax < 0, float("-inf")))
    return torch.stack(peaks).amax(0)


class _ReturnSum(torch.autograd.Function):
    """Halo rows added up at their owners; the gradient is fetched back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, halo: Halo) -> Tensor:
        ctx.halo = halo
        return return_halo([(halo.plan, rows)], "sum")[0].detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return fetch_halo([(ctx.halo.plan, grad.contiguous())])[0], None
