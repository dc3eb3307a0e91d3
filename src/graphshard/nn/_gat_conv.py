# SPDX-License-Identifier: Apache-2.0
"""GATConv: graph attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import function as fn
from ..graph import MessagePassingGraph
from ..ops import Attention, head_products
from .attention import LeakyAttentionConv
from .inputs import Features, Widths, are_leading_rows


class GATConv(LeakyAttentionConv):
    r"""Graph attention layer.

    From `Graph Attention Networks <https://arxiv.org/abs/1710.10903>`_:

    .. math::
        h'_i = b + \sum_{j \in N(i)} \alpha_{ji} W h_j, \qquad
        \alpha_{ji} = \mathrm{softmax}_{j \in N(i)}\big(
        \mathrm{leakyrelu}(a_l^T W h_j + a_r^T W h_i)\big)

    for each head. The score of an edge is the sum of a number of its source and a number of its
    destination, so nothing of size edges x features is built.

    Args:
        in_feats: Width of the input; a pair (source, destination) gives each side its own
            :math:`W`.
        out_feats: Width of the output of one head.
        residual: Add the input of the destination nodes, projected where widths differ.
        activation: Applied to the output.
        allow_zero_in_degree: Accept nodes without in-edges.
        bias: Learn :math:`b` (the bias of the residual projection where there is one).

    Shape:
        ``feat`` ``[num_nodes, *, in_feats]``, or a pair ``[num_src, *, in]``,
        ``[num_dst, *, in]``; ``edge_weight`` ``[num_edges]``, multiplied into :math:`\alpha`;
        output ``[num_dst, *, num_heads, out_feats]``, and with ``get_attention`` also
        :math:`\alpha` ``[num_edges, *, num_heads, 1]``.

    Raises:
        ValueError: Nodes without in-edges; wrong number of edge weights.

    Example:
        >>> import torch
        >>> from graphshard.graph import graph
        >>> from graphshard.nn import GATConv
        >>> g = graph((torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0])))
        >>> GATConv(4, 2, num_heads=3)(g, torch.ones(3, 4)).shape
        torch.Size([3, 3, 2])
    """

    bias: Tensor | None
    _scores_sent = 1

    def __init__(
        self,
        in_feats: Widths,
        out_feats: int,
        num_heads: int,
        feat_drop: float = 0.0,
        attn_drop: float = 0.0,
        negative_slope: float = 0.2,
        residual: bool = False,
        activation: Callable[[Tensor], Tensor] | None = None,
        allow_zero_in_degree: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__(in_feats, out_feats, num_heads, allow_zero_in_degree)
        self._add_projections()
        self.attn_l = nn.Parameter(torch.empty(1, num_heads, out_feats))
        self.attn_r = nn.Parameter(torch.empty(1, num_heads, out_feats))
        self._add_rest(feat_drop, attn_drop, negative_slope, residual, activation, bias)
        if bias and not isinstance(self.res_fc, nn.Linear):
            self.bias = nn.Parameter(torch.empty(num_heads * out_feats))
        else:
            self.register_buffer("bias", None)
        self.reset_parameters()

    def _vectors(self) -> tuple[Tensor, ...]:
        return self.attn_l, self.attn_r

    def _attention(
        self, source: Tensor, destination: Tensor, vectors: tuple[Tensor, ...], **options: Any
    ) -> Attention:
        rows, src, dst = head_products(source.flatten(1, -2), *vectors)
        if are_leading_rows(destination, source):
            dst = dst[: destination.shape[0]]
        else:
            _, _, dst = head_products(destination.flatten(1, -2), *vectors)
        return Attention.additive(rows, src, dst, **options)

    def _scores(self, graph: MessagePassingGraph, source: Tensor, destination: Tensor) -> Any:
        graph.srcdata["el"] = (source * self.attn_l).sum(-1, keepdim=True)
        graph.dstdata["er"] = (destination * self.attn_r).sum(-1, keepdim=True)
        graph.apply_edges(fn.u_add_v("el", "er", "e"))
        return self.leaky_relu(graph.edata.pop("e"))

    def forward(
        self,
        graph: MessagePassingGraph,
        feat: Features,
        edge_weight: Tensor | None = None,
        get_attention: bool = False,
    ) -> Any:
        """Apply the layer; see the class for shapes.

        Returns:
            The output, or (output, attention) with ``get_attention``; the attention is what
            multiplied the messages: after dropout and edge weights.
        """
        return self._attended(graph, feat, edge_weight, get_attention)
