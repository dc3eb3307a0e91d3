# SPDX-License-Identifier: Apache-2.0
"""GATConv: graph attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ... import function as fn
from ...graph import MessagePassingGraph, attend, edge_softmax
from ...ops import Attention, head_products, is_relu
from .._attention import Unfused, attention_factor, attention_mask, slope_of, vector_of
from .._inputs import Features, Widths, prepare_edge_weight, split_features, split_widths
from .._recompute import Projections
from .._zero_in_degree import ZeroInDegreeCheck


class GATConv(ZeroInDegreeCheck):
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
        num_heads: Number of heads.
        feat_drop: Dropout on the input.
        attn_drop: Dropout on :math:`\alpha`.
        negative_slope: Slope of the leaky ReLU below zero.
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
    ) -> None:
        super().__init__(allow_zero_in_degree)
        self._num_heads = num_heads
        self._in_src_feats, self._in_dst_feats = split_widths(in_feats)
        self._out_feats = out_feats
        width = num_heads * out_feats
        self._separate = isinstance(in_feats, tuple)
        if self._separate:
            self.fc_src = nn.Linear(self._in_src_feats, width, bias=False)
            self.fc_dst = nn.Linear(self._in_dst_feats, width, bias=False)
        else:
            self.fc = nn.Linear(self._in_src_feats, width, bias=False)
        self.attn_l = nn.Parameter(torch.empty(1, num_heads, out_feats))
        self.attn_r = nn.Parameter(torch.empty(1, num_heads, out_feats))
        self.feat_drop = nn.Dropout(feat_drop)
        self.attn_drop = nn.Dropout(attn_drop)
        self.leaky_relu = nn.LeakyReLU(negative_slope)

        project = residual and self._in_dst_feats != width
        if project:
            self.res_fc = nn.Linear(self._in_dst_feats, width, bias=bias)
        elif residual:
            self.res_fc = nn.Identity()
        else:
            self.register_buffer("res_fc", None)
        if bias and not project:
            self.bias = nn.Parameter(torch.empty(width))
        else:
            self.register_buffer("bias", None)
        self.reset_parameters()
        self.activation = activation

    def reset_parameters(self) -> None:
        """Draw the weights anew (Xavier normal, gain of ReLU); biases become zero."""
        gain = nn.init.calculate_gain("relu")
        for layer in (self.fc_src, self.fc_dst) if self._separate else (self.fc,):
            nn.init.xavier_normal_(layer.weight, gain=gain)
        nn.init.xavier_normal_(self.attn_l, gain=gain)
        nn.init.xavier_normal_(self.attn_r, gain=gain)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if isinstance(self.res_fc, nn.Linear):
            nn.init.xavier_normal_(self.res_fc.weight, gain=gain)
            if self.res_fc.bias is not None:
                nn.init.zeros_(self.res_fc.bias)

    def _project(
        self, graph: MessagePassingGraph, feat: Features, projections: Projections
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(``W h`` of the sources, ``W h`` of the destinations, input of the destinations)."""
        heads = (self._num_heads, self._out_feats)
        if isinstance(feat, tuple):
            source, destination = split_features(graph, feat)
            source, destination = self.feat_drop(source), self.feat_drop(destination)
            fc_src, fc_dst = (self.fc_src, self.fc_dst) if self._separate else (self.fc, self.fc)
            return (
                projections.project(source, fc_src, heads),
                projections.project(destination, fc_dst, heads),
                destination,
            )
        if self._separate:
            raise ValueError(
                "a layer built with a pair of in_feats needs a pair of inputs, source and "
                f"destination (got one tensor of shape {tuple(feat.shape)})"
            )
        source, destination = split_features(graph, self.feat_drop(feat))
        rows = projections.project(source, self.fc, heads)
        projected, projected_dst = split_features(graph, rows)
        return projected, projected_dst, destination

    def _attend(
        self,
        graph: MessagePassingGraph,
        source: Tensor,
        destination: Tensor,
        edge_weight: Any,
    ) -> Tensor | None:
        """The result in one go, finished unless there is a residual; None if it cannot be done."""
        row = tuple(source.shape[1:-1])
        try:
            slope = slope_of(self.leaky_relu)
            factor = attention_factor(edge_weight, row)
            mask = attention_mask(self.attn_drop)
        except Unfused:
            return None
        left, right = vector_of(self.attn_l, row), vector_of(self.attn_r, row)
        same = source is destination
        source, src, dst = head_products(source.flatten(1, -2), left, right)
        if not same:
            _, _, dst = head_products(destination.flatten(1, -2), left, right)
        attention = Attention.additive(source, src, dst, slope=slope, factor=factor, mask=mask)
        if self.res_fc is None:  # else the residual comes between
            bias = self.bias
            if bias is not None:
                bias = vector_of(bias.view(1, self._num_heads, self._out_feats), row)
            attention = attention.finished(bias, is_relu(self.activation))
        result = attend(graph, attention)
        return None if result is None else result.unflatten(1, row)

    def _by_edges(
        self,
        graph: MessagePassingGraph,
        source: Tensor,
        destination: Tensor,
        edge_weight: Any,
    ) -> tuple[Tensor, Any]:
        """The same, and the attention, with a number per edge and head at every step."""
        with graph.local_scope():
            graph.srcdata["ft"] = source
            graph.srcdata["el"] = (source * self.attn_l).sum(-1, keepdim=True)
            graph.dstdata["er"] = (destination * self.attn_r).sum(-1, keepdim=True)
            graph.apply_edges(fn.u_add_v("el", "er", "e"))
            scores = self.leaky_relu(graph.edata.pop("e"))
            attention = self.attn_drop(edge_softmax(graph, scores))
            if edge_weight is not None:
                attention = attention * edge_weight
            graph.edata["a"] = attention
            graph.update_all(fn.u_mul_e("ft", "a", "m"), fn.sum("m", "out"))
            return graph.dstdata["out"], graph.edata["a"]

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
        self._check_in_degrees(graph)
        projections = Projections(graph)
        source, destination, inputs = self._project(graph, feat, projections)
        if edge_weight is not None:
            edge_weight = prepare_edge_weight(graph, edge_weight, source.dim())
        result = attention = None
        if not get_attention:
            with projections.recomputed():
                result = self._attend(graph, source, destination, edge_weight)
        # Without a residual in between, the bias and a ReLU are in it already.
        is_finished = result is not None and self.res_fc is None
        if result is None:
            result, attention = self._by_edges(graph, source, destination, edge_weight)

        if self.res_fc is not None:
            result = result + self.res_fc(inputs).unflatten(-1, (-1, self._out_feats))
        if self.bias is not None and not is_finished:
            result = result + self.bias.view(self._num_heads, self._out_feats)
        if self.activation is not None and not (is_finished and is_relu(self.activation)):
            result = self.activation(result)
        return (result, attention) if get_attention else result

    def extra_repr(self) -> str:
        return (
            f"in={self._in_src_feats, self._in_dst_feats}, out={self._out_feats}, "
            f"num_heads={self._num_heads}"
        )
