# SPDX-License-Identifier: Apache-2.0
"""Values per graph of a batch, from the features of its nodes or edges, and back.

A graph that is no batch is a batch of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._base.typing import EType
from ...errors import GraphValueError
from ...graph.local_graph import LocalGraph
from ._segments import segment_reduce, segment_softmax

__all__ = [
    "broadcast_edges", "broadcast_nodes", "max_edges", "max_nodes", "mean_edges", "mean_nodes",
    "readout_edges", "readout_nodes", "softmax_edges", "softmax_nodes", "sum_edges", "sum_nodes",
    "topk_edges", "topk_nodes",
]  # fmt: skip

_OPS = ("sum", "mean", "max", "min")


def readout_nodes(
    graph: LocalGraph,
    feat: str,
    weight: str | None = None,
    *,
    op: str = "sum",
    ntype: str | None = None,
) -> Tensor:
    """Sum, mean, maximum or minimum of a node feature over each graph of a batch.

    Args:
        feat: Name of the feature, ``[num_nodes, ...]``.
        weight: Name of a feature to multiply by first, ``[num_nodes, 1]``; None for 1.
        op: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``. With weights a mean is the sum divided
            by the number of nodes.

    Returns:
        ``[batch_size, ...]``; 0 for graphs without nodes of the type.
    """
    return _reduced(graph.nodes[ntype].data, graph.batch_num_nodes(ntype), feat, weight, op)


def readout_edges(
    graph: LocalGraph,
    feat: str,
    weight: str | None = None,
    *,
    op: str = "sum",
    etype: EType | None = None,
) -> Tensor:
    """The counterpart of `readout_nodes` for an edge feature of the relation ``etype``."""
    return _reduced(graph.edges[etype].data, graph.batch_num_edges(etype), feat, weight, op)


def _reduced(data: Any, counts: Tensor, feat: str, weight: str | None, op: str) -> Tensor:
    if op not in _OPS:
        raise GraphValueError(f"op must be one of {_OPS} (got {op!r})")
    value = data[feat] if weight is None else data[feat] * data[weight]
    return segment_reduce(counts, value, reducer=op)


def _named(op: str, what: str) -> Callable[..., Tensor]:
    def over_nodes(
        graph: LocalGraph, feat: str, weight: str | None = None, *, ntype: str | None = None
    ) -> Tensor:
        return readout_nodes(graph, feat, weight, op=op, ntype=ntype)

    def over_edges(
        graph: LocalGraph, feat: str, weight: str | None = None, *, etype: EType | None = None
    ) -> Tensor:
        return readout_edges(graph, feat, weight, op=op, etype=etype)

    reduce: Callable[..., Tensor] = over_nodes if what == "nodes" else over_edges
    reduce.__name__ = reduce.__qualname__ = f"{op}_{what}"
    reduce.__doc__ = f"`readout_{what}` with ``op={op!r}``."
    return reduce


sum_nodes, sum_edges = _named("sum", "nodes"), _named("sum", "edges")
mean_nodes, mean_edges = _named("mean", "nodes"), _named("mean", "edges")
max_nodes, max_edges = _named("max", "nodes"), _named("max", "edges")


def softmax_nodes(graph: LocalGraph, feat: str, *, ntype: str | None = None) -> Tensor:
    """Softmax of a node feature over the nodes of each graph: ``[num_nodes, ...]``."""
    return segment_softmax(graph.batch_num_nodes(ntype), graph.nodes[ntype].data[feat])


def softmax_edges(graph: LocalGraph, feat: str, *, etype: EType | None = None) -> Tensor:
    """Softmax of an edge feature over the edges of each graph: ``[num_edges, ...]``."""
    return segment_softmax(graph.batch_num_edges(etype), graph.edges[etype].data[feat])


def broadcast_nodes(graph: LocalGraph, graph_feat: Tensor, *, ntype: str | None = None) -> Tensor:
    """The row of its graph for each node.

    Args:
        graph_feat: ``[batch_size, ...]``; for a single graph ``[...]`` will do.
    """
    return _spread(graph.batch_num_nodes(ntype), graph_feat)


def broadcast_edges(graph: LocalGraph, graph_feat: Tensor, *, etype: EType | None = None) -> Tensor:
    """The row of its graph for each edge; the counterpart of `broadcast_nodes`."""
    return _spread(graph.batch_num_edges(etype), graph_feat)


def _spread(counts: Tensor, rows: Tensor) -> Tensor:
    size = counts.shape[0]
    if size == 1 and rows.shape[:1] != (1,):
        rows = rows.unsqueeze(0)
    if rows.shape[:1] != (size,):
        raise GraphValueError(
            f"graph_feat must have one row for each of the {size} graphs (got shape "
            f"{tuple(rows.shape)})"
        )
    return rows.repeat_interleave(counts, 0)


def topk_nodes(
    graph: LocalGraph,
    feat: str,
    k: int,
    *,
    descending: bool = True,
    sortby: int | None = None,
    ntype: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The ``k`` nodes of each graph that come first by a feature.

    Returns:
        Values ``[batch_size, k, dim]``, 0 where a graph has fewer nodes; and ids within the graph,
        ``[batch_size, k]``, or ``[batch_size, k, dim]`` without ``sortby``, without meaning there.
    """
    counts = graph.batch_num_nodes(ntype)
    return _first(graph.nodes[ntype].data[feat], counts, feat, k, descending, sortby)


def topk_edges(
    graph: LocalGraph,
    feat: str,
    k: int,
    *,
    descending: bool = True,
    sortby: int | None = None,
    etype: EType | None = None,
) -> tuple[Tensor, Tensor]:
    """The counterpart of `topk_nodes` for an edge feature of the relation ``etype``."""
    counts = graph.batch_num_edges(etype)
    return _first(graph.edges[etype].data[feat], counts, feat, k, descending, sortby)


def _first(
    value: Tensor, counts: Tensor, name: str, k: int, descending: bool, sortby: int | None
) -> tuple[Tensor, Tensor]:
    if value.dim() > 2:
        raise GraphValueError(
            f"feature {name!r} must have at most two dimensions (got shape {tuple(value.shape)})"
        )
    if k < 0:
        raise GraphValueError(f"k must not be negative (got {k})")
    rows = value if value.dim() == 2 else value.unsqueeze(-1)
    size = counts.shape[0]
    longest = max(int(counts.max()) if size else 0, k)
    graph_of = torch.arange(size, device=value.device).repeat_interleave(counts)
    begin = (counts.cumsum(0) - counts).index_select(0, graph_of)
    rank = torch.arange(rows.shape[0], device=value.device) - begin
    worst = float("-inf") if descending else float("inf")
    padded = rows.new_full((size, longest, rows.shape[1]), worst)
    padded = padded.index_put((graph_of, rank), rows)
    if sortby is None:
        order = padded.detach().argsort(1, descending=descending)[:, :k]
        values = padded.gather(1, order)
        chosen = order if value.dim() == 2 else order.squeeze(-1)
    else:
        chosen = padded.detach()[..., sortby].topk(k, -1, largest=descending).indices
        values = padded.gather(1, chosen.unsqueeze(-1).expand(-1, -1, rows.shape[1]))
    return values.masked_fill(values.isinf(), 0), chosen
