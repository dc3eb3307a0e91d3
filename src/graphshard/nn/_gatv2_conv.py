# SPDX-License-Identifier: Apache-2.0
"""GATv2Conv: graph attention whose scores depend on both ends jointly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import function as fn
from ..graph import MessagePassingGraph
from ..ops import Attention
from .attention import LeakyAttentionConv
from .inputs import Features, Widths, read_once, split_features
from .recompute import Projections


class GATv2Conv(LeakyAttentionConv):
    r"""Graph attention whose scores depend on both ends jointly.

    From `How Attentive are Graph Attention Networks? <https://arxiv.org/abs/2105.14491>`_:

    .. math::
        h'_i = \sum_{j \in N(i)} \alpha_{ji} (W_{src} h_j + b_{src}), \qquad
        \alpha_{ji} = \mathrm{softmax}_{j \in N(i)}\big(a^T \,
        \mathrm{leakyrelu}(W_{src} h_j + b_{src} + W_{dst} h_i + b_{dst})\big)

    for each head.

    Args:
        in_feats: Width of the input, or (source width, destination width).
        out_feats: Width of the output of one head.
        residual: Add the input of the destination nodes, projected where widths differ.
        activation: Applied to the output.
        allow_zero_in_degree: Accept nodes without in-edges.
        bias: Learn the biases, that of the residual projection too.
        share_weights: Use one projection for both ends; ignored when ``in_feats`` is a pair.

    Shape:
        ``feat`` ``[num_nodes, in_feats]``, or a pair ``[num_src, in]``, ``[num_dst, in]``; output
        ``[num_dst, num_heads, out_feats]``, and with ``get_attention`` also :math:`\alpha`
        ``[num_edges, num_heads, 1]``.

    Raises:
        ValueError: Nodes without in-edges.

    Example:
        >>> import torch
        >>> from graphshard.graph import graph
        >>> from graphshard.nn import GATv2Conv
        >>> g = graph((torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0])))
        >>> GATv2Conv(4, 2, num_heads=3)(g, torch.ones(3, 4)).shape
        torch.Size([3, 3, 2])
    """

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
        share_weights: bool = False,
    ) -> None:
        super().__init__(in_feats, out_feats, num_heads, allow_zero_in_degree)
        width = num_heads * out_feats
        self.share_weights = share_weights and not self._separate
        self.bias = bias
        self.fc_src = nn.Linear(self._in_src_feats, width, bias=bias)
        if self.share_weights:
            self.fc_dst = self.fc_src
        else:
            self.fc_dst = nn.Linear(self._in_dst_feats, width, bias=bias)
        self.attn = nn.Parameter(torch.empty(1, num_heads, out_feats))
        self._add_rest(feat_drop, attn_drop, negative_slope, residual, activation, bias)
        self.reset_parameters()

    def _layers(self) -> tuple[nn.Linear, ...]:
        return (self.fc_src,) if self.share_weights else (self.fc_src, self.fc_dst)

    def _project(
        self, graph: MessagePassingGraph, feat: Features, projections: Projections
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = (self._num_heads, self._out_feats)
        if isinstance(feat, tuple):
            source, inputs = split_features(graph, feat)
        else:
            layers = [self.fc_src] if self.share_weights else [self.fc_src, self.fc_dst]
            source, inputs = split_features(graph, read_once(feat, layers))
        projected = projections.project(source, self.fc_src, heads)
        if self.share_weights and not isinstance(feat, tuple):
            return *split_features(graph, projected), inputs
        return projected, projections.project(inputs, self.fc_dst, heads), inputs

    def _vectors(self) -> tuple[Tensor, ...]:
        return (self.attn,)

    def _attention(
        self, source: Tensor, destination: Tensor, vectors: tuple[Tensor, ...], **options: Any
    ) -> Attention:
        values, dst = source.flatten(1, -2), destination.flatten(1, -2)
        return Attention.joint(values, dst, *vectors, **options)

    def _scores(self, graph: MessagePassingGraph, source: Tensor, destination: Tensor) -> Any:
        graph.dstdata["er"] = destination
        graph.apply_edges(fn.u_add_v("ft", "er", "e"))
        return (self.leaky_relu(graph.edata.pop("e")) * self.attn).sum(-1, keepdim=True)

    def forward(
        self, graph: MessagePassingGraph, feat: Features, get_attention: bool = False
    ) -> Any:
        """Apply the layer; see the class for shapes.

        Returns:
            The output, or (output, attention after dropout) with ``get_attention``.
        """
        return self._attended(graph, feat, None, get_attention)
