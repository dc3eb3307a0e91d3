# SPDX-License-Identifier: Apache-2.0
"""DotGatConv: graph attention with scaled dot products."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ... import function as fn
from ...graph import MessagePassingGraph, attend, edge_softmax
from ...ops import Attention
from .._inputs import Features, Widths, split_features, split_widths
from .._recompute import Projections
from .._zero_in_degree import ZeroInDegreeCheck


class DotGatConv(ZeroInDegreeCheck):
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
        >>> from graphshard.nn import DotGatConv
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
        super().__init__(allow_zero_in_degree)
        self._in_src_feats, self._in_dst_feats = split_widths(in_feats)
        self._out_feats = out_feats
        self._num_heads = num_heads
        width = num_heads * out_feats
        self._separate = isinstance(in_feats, tuple)
        if self._separate:
            self.fc_src = nn.Linear(self._in_src_feats, width, bias=False)
            self.fc_dst = nn.Linear(self._in_dst_feats, width, bias=False)
        else:
            self.fc = nn.Linear(self._in_src_feats, width, bias=False)

    def _project(
        self, graph: MessagePassingGraph, feat: Features, projections: Projections
    ) -> tuple[Tensor, Tensor]:
        """(``W h`` of the sources, ``W h`` of the destinations), ``[rows, heads, out_feats]``."""
        heads = (self._num_heads, self._out_feats)
        if isinstance(feat, tuple):
            source, destination = split_features(graph, feat)
            fc_src, fc_dst = (self.fc_src, self.fc_dst) if self._separate else (self.fc, self.fc)
            return (
                projections.project(source, fc_src, heads),
                projections.project(destination, fc_dst, heads),
            )
        if self._separate:
            raise ValueError(
                "a layer built with a pair of in_feats needs a pair of inputs, source and "
                f"destination (got one tensor of shape {tuple(feat.shape)})"
            )
        return split_features(graph, projections.project(feat, self.fc, heads))

    def forward(
        self, graph: MessagePassingGraph, feat: Features, get_attention: bool = False
    ) -> Any:
        """Apply the layer; see the class for shapes.

        Returns:
            The output, or (output, attention) with ``get_attention``.
        """
        self._check_in_degrees(graph)
        projections = Projections(graph)
        source, destination = self._project(graph, feat, projections)
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

    def extra_repr(self) -> str:
        return (
            f"in={self._in_src_feats, self._in_dst_feats}, out={self._out_feats}, "
            f"num_heads={self._num_heads}"
        )
