# SPDX-License-Identifier: Apache-2.0
"""DotGatConv: graph attention with scaled dot products."""

from __future__ import annotations

from typing import Any

from ... import function as fn
from ...graph import MessagePassingGraph, attend, edge_softmax
from ...nn.attention import AttentionConv
from ...nn.inputs import Features, Widths
from ...nn.recompute import Projections
from ...ops import Attention


class DotGatConv(AttentionConv):
    r"""Graph attention with scaled dot-product scores.

    `Graph Attention Networks <https://arxiv.org/abs/1710.10903>`_ with the score of `Attention Is
    All You Need <https://arxiv.org/abs/1706.03762>`_:

    .. math::
        h'_i = \sum_{j \in N(i)} \alpha_{ji} W h_j, \qquad
        \alpha_{ji} = \mathrm{softmax}_{j \in N(i)}\Big(\frac{(W h_j)^T W h_i}{\sqrt{d}}\Big)

    for each head, with :math:`d` the width of one head.

    Args:
        in_feats: Width of the input; a pair (source, destination) gives each side its own
            :math:`W`.
        out_feats: Width of the output of one head.
        num_heads: Number of heads.
        allow_zero_in_degree: Accept nodes without in-edges.

    Shape:
        ``feat`` ``[num_nodes, in_feats]``, or a pair ``[num_src, in]``, ``[num_dst, in]``; output
        ``[num_dst, num_heads, out_feats]``, and with ``get_attention`` also :math:`\alpha`
        ``[num_edges, num_heads, 1]``.

    Raises:
        ValueError: Nodes without in-edges; one tensor where a pair is needed.

    Example:
        >>> import torch
        >>> from graphshard.graph import graph
        >>> from graphshard.dgl.nn import DotGatConv
        >>> g = graph((torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0])))
        >>> DotGatConv(4, 2, num_heads=3)(g, torch.ones(3, 4)).shape
        torch.Size([3, 3, 2])
    """

    def __init__(
        self,
        in_feats: Widths,
        out_feats: int,
        num_heads: int,
        allow_zero_in_degree: bool = False,
    ) -> None:
        super().__init__(in_feats, out_feats, num_heads, allow_zero_in_degree)
        self._add_projections()

    def forward(
        self, graph: MessagePassingGraph, feat: Features, get_attention: bool = False
    ) -> Any:
        """Apply the layer; see the class for shapes.

        Returns:
            The output, or (output, attention) with ``get_attention``.
        """
        self._check_in_degrees(graph)
        projections = Projections(graph)
        source, destination, _ = self._projected(graph, feat, projections, lambda rows: rows)
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
