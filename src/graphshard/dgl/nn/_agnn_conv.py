# SPDX-License-Identifier: Apache-2.0
"""AGNNConv: attention by cosine similarity, with one learned number."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ... import function as fn
from ...graph import MessagePassingGraph, attend, edge_softmax
from ...nn.inputs import Features, split_features
from ...nn.zero_in_degree import ZeroInDegreeCheck
from ...ops import Attention


class AGNNConv(ZeroInDegreeCheck):
    r"""Propagation guided by cosine attention.

    From `Attention-based Graph Neural Network for Semi-supervised Learning
    <https://arxiv.org/abs/1803.03735>`_:

    .. math::
        h'_i = \sum_{j \in N(i)} \mathrm{softmax}_{j \in N(i)}\big(\beta \cos(h_j, h_i)\big) h_j

    Args:
        init_beta: First value of :math:`\beta`.
        learn_beta: Learn :math:`\beta`; otherwise it is a buffer.
        allow_zero_in_degree: Accept nodes without in-edges.

    Shape:
        ``feat`` ``[num_nodes, *, dim]``, or a pair ``[num_src, *, dim]``, ``[num_dst, *, dim]``;
        output ``[num_dst, *, dim]``.

    Raises:
        ValueError: Nodes without in-edges.

    Example:
        >>> import torch
        >>> from graphshard.graph import graph
        >>> from graphshard.dgl.nn import AGNNConv
        >>> g = graph((torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0])))
        >>> AGNNConv()(g, torch.ones(3, 4)).shape
        torch.Size([3, 4])
    """

    beta: Tensor

    def __init__(
        self, init_beta: float = 1.0, learn_beta: bool = True, allow_zero_in_degree: bool = False
    ) -> None:
        super().__init__(allow_zero_in_degree)
        beta = torch.tensor([float(init_beta)])
        if learn_beta:
            self.beta = nn.Parameter(beta)
        else:
            self.register_buffer("beta", beta)

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
            result: Tensor = graph.dstdata["out"]
            return result
