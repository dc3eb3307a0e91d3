# SPDX-License-Identifier: Apache-2.0
"""Modules about whole graphs: a row per graph from rows per node, and graphs of points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...graph import Graph
from ..graphs._points import knn_graph, radius_graph, segmented_knn_graph
from ..graphs._readout import broadcast_nodes, readout_nodes, softmax_nodes, topk_nodes

__all__ = [
    "AvgPooling", "GlobalAttentionPooling", "KNNGraph", "MaxPooling", "RadiusGraph",
    "SegmentedKNNGraph", "Set2Set", "SortPooling", "SumPooling", "WeightAndSum",
]  # fmt: skip


class _Readout(nn.Module):
    """One reduction over the nodes of each graph."""

    op: str

    def forward(self, graph: Graph, feat: Tensor) -> Tensor:
        """Reduce rows per node, ``[num_nodes, dim]``, to rows per graph, ``[batch_size, dim]``."""
        with graph.local_scope():
            graph.ndata["h"] = feat
            return readout_nodes(graph, "h", op=self.op)


class SumPooling(_Readout):
    """The sum of the rows of each graph."""

    op = "sum"


class AvgPooling(_Readout):
    """The mean of the rows of each graph."""

    op = "mean"


class MaxPooling(_Readout):
    """The maximum of the rows of each graph, per column."""

    op = "max"


class SortPooling(nn.Module):
    """The ``k`` rows of each graph that are largest in their last value, each sorted.

    From "An End-to-End Deep Learning Architecture for Graph Classification" (AAAI 2018). Rows are
    sorted within themselves first.
    """

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(self, graph: Graph, feat: Tensor) -> Tensor:
        """Take ``[num_nodes, dim]`` to ``[batch_size, k * dim]``."""
        with graph.local_scope():
            graph.ndata["h"] = feat.sort(dim=-1).values
            rows, _ = topk_nodes(graph, "h", self.k, sortby=-1)
            return rows.reshape(-1, self.k * feat.shape[-1])


class GlobalAttentionPooling(nn.Module):
    """The rows of each graph, weighted by a softmax over the graph of what a gate gives.

    From "Gated Graph Sequence Neural Networks" (https://arxiv.org/abs/1511.05493).
    """

    def __init__(self, gate_nn: nn.Module, feat_nn: nn.Module | None = None) -> None:
        super().__init__()
        self.gate_nn = gate_nn
        self.feat_nn = feat_nn

    def forward(self, graph: Graph, feat: Tensor, get_attention: bool = False) -> Any:
        """Take ``[num_nodes, dim]`` to ``[batch_size, dim]``.

        With ``get_attention`` the weights, ``[num_nodes, 1]``, come as well.
        """
        with graph.local_scope():
            gate = self.gate_nn(feat)
            if gate.shape[-1] != 1:
                raise ValueError(
                    f"gate_nn must give one value per node (got shape {tuple(gate.shape)})"
                )
            graph.ndata["gate"] = gate
            gate = softmax_nodes(graph, "gate")
            graph.ndata["r"] = (feat if self.feat_nn is None else self.feat_nn(feat)) * gate
            pooled = readout_nodes(graph, "r", op="sum")
        return (pooled, gate) if get_attention else pooled


class Set2Set(nn.Module):
    """An LSTM that attends to the rows of each graph several times.

    From "Order Matters: Sequence to sequence for sets" (https://arxiv.org/abs/1511.06391).
    """

    def __init__(self, input_dim: int, n_iters: int, n_layers: int) -> None:
        super().__init__()
        self.input_dim, self.output_dim = input_dim, 2 * input_dim
        self.n_iters, self.n_layers = n_iters, n_layers
        self.lstm = nn.LSTM(self.output_dim, input_dim, n_layers)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew, as torch does."""
        self.lstm.reset_parameters()

    def forward(self, graph: Graph, feat: Tensor) -> Tensor:
        """Take ``[num_nodes, input_dim]`` to ``[batch_size, 2 * input_dim]``."""
        with graph.local_scope():
            size = graph.batch_size
            state = (feat.new_zeros((self.n_layers, size, self.input_dim)),) * 2
            both = feat.new_zeros(size, self.output_dim)
            for _ in range(self.n_iters):
                query, state = self.lstm(both.unsqueeze(0), state)
                query = query.view(size, self.input_dim)
                graph.ndata["e"] = (feat * broadcast_nodes(graph, query)).sum(-1, keepdim=True)
                graph.ndata["r"] = feat * softmax_nodes(graph, "e")
                both = torch.cat([query, readout_nodes(graph, "r", op="sum")], -1)
            return both

    def extra_repr(self) -> str:
        return f"n_iters={self.n_iters}"


class WeightAndSum(nn.Module):
    """The sum of the rows of each graph, each times a learnt weight between 0 and 1."""

    def __init__(self, in_feats: int) -> None:
        super().__init__()
        self.in_feats = in_feats
        self.atom_weighting = nn.Sequential(nn.Linear(in_feats, 1), nn.Sigmoid())

    def forward(self, g: Graph, feats: Tensor) -> Tensor:
        """Take ``[num_nodes, in_feats]`` to ``[batch_size, in_feats]``."""
        with g.local_scope():
            g.ndata["h"] = feats
            g.ndata["w"] = self.atom_weighting(feats)
            return readout_nodes(g, "h", "w", op="sum")


class _NearestNeighbors(nn.Module):
    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k


class KNNGraph(_NearestNeighbors):
    """`graphshard.dgl.knn_graph` with a fixed number of neighbours."""

    def forward(
        self,
        x: Tensor,
        algorithm: str = "bruteforce-blas",
        dist: str = "euclidean",
        exclude_self: bool = False,
    ) -> Graph:
        """The graph of ``[num_points, dim]`` or ``[num_sets, num_points, dim]`` points."""
        return knn_graph(x, self.k, algorithm, dist, exclude_self)


class SegmentedKNNGraph(_NearestNeighbors):
    """`graphshard.dgl.segmented_knn_graph` with a fixed number of neighbours."""

    def forward(
        self,
        x: Tensor,
        segs: Sequence[int],
        algorithm: str = "bruteforce-blas",
        dist: str = "euclidean",
        exclude_self: bool = False,
    ) -> Graph:
        """The graph of ``[num_points, dim]`` points, in sets of the sizes ``segs``."""
        return segmented_knn_graph(x, self.k, segs, algorithm, dist, exclude_self)


class RadiusGraph(nn.Module):
    """`graphshard.dgl.radius_graph` with a fixed radius."""

    def __init__(
        self,
        r: float,
        p: float = 2,
        self_loop: bool = False,
        compute_mode: str = "donot_use_mm_for_euclid_dist",
    ) -> None:
        super().__init__()
        self.r, self.p = r, p
        self.self_loop, self.compute_mode = self_loop, compute_mode

    def forward(self, x: Tensor, get_distances: bool = False) -> Any:
        """The graph of ``[num_points, dim]`` points; with ``get_distances`` a pair."""
        return radius_graph(x, self.r, self.p, self.self_loop, self.compute_mode, get_distances)
