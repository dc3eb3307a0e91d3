# SPDX-License-Identifier: Apache-2.0
"""Attention by similarity: AGNNConv by cosine, DotGatConv by scaled dot products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ... import function as fn
from ...graph import MessagePassingGraph, attend, edge_softmax
from ...nn.attention import AttentionConv
from ...nn.inputs import Features, Widths, split_features
from ...nn.recompute import Projections
from ...nn.zero_in_degree import ZeroInDegreeCheck
from ...ops import Attention

__all__ = ["AGNNConv", "DotGatConv"]


class AGNNConv(ZeroInDegreeCheck):
    r"""Propagation guided by cosine attention.

    From `Attention-based Graph Neural Network for Semi-supervised Learning
    <https://arxiv.org/abs/1803.03735>`_:

    .. math::
        h'_i = \sum_{j \in N(i)} \mathrm{softmax}_{j \in N(i)}\big(\beta \cos(h_j, h_i)\big) h_j

    Shape:
        ``feat`` ``[num_nodes, *, dim]``, or a pair ``[num_src, *, dim]``, ``[num_dst, *, dim]``;
        output ``[num_dst, *, dim]``.

    Raises:
        ValueError: Nodes without in-edges.
    """

    beta: Tensor

    def __init__(
        self, init_beta: float = 1.0, learn_beta: bool = True, allow_zero_in_degree: bool = False
    ) -> None:
        super().__init__(allow_zero_in_degree)
        beta = torch.tensor([float(init_beta)])
        self.beta = nn.Parameter(beta) if learn_beta else nn.Buffer(beta)

    def forward(self, graph: MessagePassingGraph, feat: Features) -> Tensor:
        """Apply the layer; see the class for shapes."""
        self._check_in_degrees(graph)
        source, destination = split_features(graph, feat)
        unit_src, unit_dst = (F.normalize(rows, dim=-1) for rows in (source, destination))
        if source.dim() > 1:
            row = (*source.shape[1:-1], 1)
            values, keys, queries = (
                rows.unsqueeze(-2).flatten(1, -2)
                for rows in (source, unit_src, unit_dst * self.beta)
            )
            fused = attend(graph, Attention.dot(values, keys, queries))
            if fused is not None:
                return fused.unflatten(1, row).squeeze(-2)
        with graph.local_scope():
            graph.srcdata["h"] = source
            graph.srcdata["unit_src"], graph.dstdata["unit_dst"] = unit_src, unit_dst
            graph.apply_edges(fn.u_dot_v("unit_src", "unit_dst", "cos"))
            graph.edata["p"] = edge_softmax(graph, graph.edata.pop("cos") * self.beta)
            graph.update_all(fn.u_mul_e("h", "p", "m"), fn.sum("m", "out"))
            return graph.dstdata["out"]


class DotGatConv(AttentionConv):
    r"""Graph attention with scaled dot-product scores.

    `Graph Attention Networks <https://arxiv.org/abs/1710.10903>`_ with the score of `Attention Is
    All You Need <https://arxiv.org/abs/1706.03762>`_:

    .. math::
        h'_i = \sum_{j \in N(i)} \alpha_{ji} W h_j, \qquad
        \alpha_{ji} = \mathrm{softmax}_{j \in N(i)}\Big(\frac{(W h_j)^T W h_i}{\sqrt{d}}\Big)

    for each head, with :math:`d` the width of one head.

    Shape:
        ``feat`` ``[num_nodes, in_feats]``, or a pair ``[num_src, in]``, ``[num_dst, in]``; output
        ``[num_dst, num_heads, out_feats]``, and with ``get_attention`` also :math:`\alpha`
        ``[num_edges, num_heads, 1]``.

    Raises:
        ValueError: Nodes without in-edges; one tensor where a pair is needed.
    """

    def __init__(
        self, in_feats: Widths, out_feats: int, num_heads: int, allow_zero_in_degree: bool = False
    ) -> None:
        super().__init__(in_feats, out_feats, num_heads, allow_zero_in_degree)
        self._add_projections()

    def forward(
        self, graph: MessagePassingGraph, feat: Features, get_attention: bool = False
    ) -> Any:
        """Apply the layer; see the class for shapes."""
        self._check_in_degrees(graph)
        graph, feat = self._with_remote_rows(graph, feat)
        projections = Projections(graph)
        source, destination, _ = self._projected(graph, feat, projections)
        scale = self._out_feats**-0.5
        if not get_attention:
            row = tuple(source.shape[1:-1])
            values, query = source.flatten(1, -2), destination.flatten(1, -2)
            with projections.recomputed():
                result = attend(graph, Attention.dot(values, values, query, scale=scale))
            if result is not None:
                return result.unflatten(1, row)
        with graph.local_scope():
            graph.srcdata["ft"], graph.dstdata["query"] = source, destination
            graph.apply_edges(fn.u_dot_v("ft", "query", "e"))
            graph.edata["a"] = edge_softmax(graph, graph.edata.pop("e") * scale)
            graph.update_all(fn.u_mul_e("ft", "a", "m"), fn.sum("m", "out"))
            result = graph.dstdata["out"]
            return (result, graph.edata["a"]) if get_attention else result
