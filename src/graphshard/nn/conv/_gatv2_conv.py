# SPDX-License-Identifier: Apache-2.0
"""GATv2Conv: graph attention whose scores depend on both ends jointly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ... import function as fn
from ...graph import MessagePassingGraph, attend, edge_softmax
from ...ops import Attention, is_relu
from .._attention import Unfused, attention_mask, slope_of, vector_of
from .._inputs import Features, Widths, split_features, split_widths
from .._recompute import Projections
from .._zero_in_degree import ZeroInDegreeCheck


class GATv2Conv(ZeroInDegreeCheck):
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
        num_heads: Number of heads.
        feat_drop: Dropout on the input.
        attn_drop: Dropout on :math:`\alpha`.
        negative_slope: Slope of the leaky ReLU below zero.
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

    res_fc: nn.Module | None

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
        super().__init__(allow_zero_in_degree)
        self._num_heads = num_heads
        self._in_src_feats, self._in_dst_feats = split_widths(in_feats)
        self._out_feats = out_feats
        width = num_heads * out_feats
        self.share_weights = share_weights and not isinstance(in_feats, tuple)
        self.bias = bias
        self.fc_src = nn.Linear(self._in_src_feats, width, bias=bias)
        if self.share_weights:
            self.fc_dst = self.fc_src
        else:
            self.fc_dst = nn.Linear(self._in_dst_feats, width, bias=bias)
        self.attn = nn.Parameter(torch.empty(1, num_heads, out_feats))
        self.feat_drop = nn.Dropout(feat_drop)
        self.attn_drop = nn.Dropout(attn_drop)
        self.leaky_relu = nn.LeakyReLU(negative_slope)
        if not residual:
            self.register_buffer("res_fc", None)
        elif self._in_dst_feats != width:
            self.res_fc = nn.Linear(self._in_dst_feats, width, bias=bias)
        else:
            self.res_fc = nn.Identity()
        self.activation = activation
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew (Xavier normal, gain of ReLU); biases become zero."""
        gain = nn.init.calculate_gain("relu")
        nn.init.xavier_normal_(self.fc_src.weight, gain=gain)
        if not self.share_weights:
            nn.init.xavier_normal_(self.fc_dst.weight, gain=gain)
        nn.init.xavier_normal_(self.attn, gain=gain)
        if isinstance(self.res_fc, nn.Linear):
            nn.init.xavier_normal_(self.res_fc.weight, gain=gain)
        for layer in (self.fc_src, self.fc_dst, self.res_fc):
            if isinstance(layer, nn.Linear) and layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def _project(
        self, graph: MessagePassingGraph, feat: Features, projections: Projections
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(projected sources, projected destinations, input of the destinations)."""
        heads = (self._num_heads, self._out_feats)
        if isinstance(feat, tuple):
            source, destination = split_features(graph, feat)
            source, destination = self.feat_drop(source), self.feat_drop(destination)
        else:
            source, destination = split_features(graph, self.feat_drop(feat))
        projected = projections.project(source, self.fc_src, heads)
        if self.share_weights and not isinstance(feat, tuple):
            _, projected_dst = split_features(graph, projected)
        else:
            projected_dst = projections.project(destination, self.fc_dst, heads)
        return projected, projected_dst, destination

    def _attend(
        self, graph: MessagePassingGraph, source: Tensor, destination: Tensor
    ) -> Tensor | None:
        """The result in one go, activated unless there is a residual; None if it cannot be done."""
        row = tuple(source.shape[1:-1])
        try:
            slope = slope_of(self.leaky_relu)
            mask = attention_mask(self.attn_drop)
        except Unfused:
            return None
        vector = vector_of(self.attn, row)
        values, dst = source.flatten(1, -2), destination.flatten(1, -2)
        attention = Attention.joint(values, dst, vector, slope=slope, mask=mask)
        if self.res_fc is None:  # else the residual comes between
            attention = attention.finished(None, is_relu(self.activation))
        result = attend(graph, attention)
        return None if result is None else result.unflatten(1, row)

    def _by_edges(
        self, graph: MessagePassingGraph, source: Tensor, destination: Tensor
    ) -> tuple[Tensor, Any]:
        """The same, and the attention, with numbers per edge at every step."""
        with graph.local_scope():
            graph.srcdata["el"] = source
            graph.dstdata["er"] = destination
            graph.apply_edges(fn.u_add_v("el", "er", "e"))
            activated = self.leaky_relu(graph.edata.pop("e"))
            scores = (activated * self.attn).sum(-1, keepdim=True)
            graph.edata["a"] = self.attn_drop(edge_softmax(graph, scores))
            graph.update_all(fn.u_mul_e("el", "a", "m"), fn.sum("m", "out"))
            return graph.dstdata["out"], graph.edata["a"]

    def forward(
        self, graph: MessagePassingGraph, feat: Features, get_attention: bool = False
    ) -> Any:
        """Apply the layer; see the class for shapes.

        Returns:
            The output, or (output, attention after dropout) with ``get_attention``.
        """
        self._check_in_degrees(graph)
        projections = Projections(graph)
        source, projected_dst, destination = self._project(graph, feat, projections)
        result = attention = None
        if not get_attention:
            with projections.recomputed():
                result = self._attend(graph, source, projected_dst)
        is_finished = result is not None and self.res_fc is None and is_relu(self.activation)
        if result is None:
            result, attention = self._by_edges(graph, source, projected_dst)

        if self.res_fc is not None:
            result = result + self.res_fc(destination).unflatten(-1, (-1, self._out_feats))
        if self.activation is not None and not is_finished:
            result = self.activation(result)
        return (result, attention) if get_attention else result

    def extra_repr(self) -> str:
        return (
            f"in={self._in_src_feats, self._in_dst_feats}, out={self._out_feats}, "
            f"num_heads={self._num_heads}"
        )
