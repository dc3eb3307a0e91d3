# SPDX-License-Identifier: Apache-2.0
"""APPNPConv: propagation by personalised PageRank."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ... import function as fn
from ...graph import MessagePassingGraph
from ...nn.inputs import degree_scale, prepare_edge_weight
from ...ops import is_plain
from ._edge_weight_norm import EdgeWeightNorm


class APPNPConv(nn.Module):
    r"""Approximate personalised propagation.

    From `Predict then Propagate: Graph Neural Networks meet Personalized PageRank
    <https://arxiv.org/abs/1810.05997>`_:

    .. math::
        H^0 = X, \qquad H^{l+1} = (1 - \alpha) \, \hat A H^l + \alpha H^0

    with :math:`\hat A = D_{in}^{-1/2} A^T D_{out}^{-1/2}`, or edge weights normalised by
    :class:`EdgeWeightNorm`. Edge dropout draws anew in every step.

    Args:
        k: Number of steps.
        alpha: Probability of going back to the start.
        edge_drop: Dropout on the edges.

    Shape:
        ``feat`` ``[num_nodes, *]``; ``edge_weight`` ``[num_edges]``; output ``[num_nodes, *]``.

    Raises:
        ValueError: The edge weights are not positive, or not one per edge.

    Example:
        >>> import torch
        >>> from graphshard.graph import graph
        >>> from graphshard.dgl.nn import APPNPConv
        >>> g = graph((torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0])))
        >>> APPNPConv(k=3, alpha=0.5)(g, torch.ones(3, 4)).shape
        torch.Size([3, 4])
    """

    def __init__(self, k: int, alpha: float, edge_drop: float = 0.0) -> None:
        super().__init__()
        self._k = k
        self._alpha = alpha
        self.edge_drop = nn.Dropout(edge_drop)

    def forward(
        self, graph: MessagePassingGraph, feat: Tensor, edge_weight: Tensor | None = None
    ) -> Tensor:
        """Apply the layer; see the class for shapes."""
        drop = self.edge_drop
        drops = not is_plain(drop, nn.Dropout) or (drop.training and drop.p > 0)
        with graph.local_scope():
            weight = None
            scale_out = scale_in = None
            if edge_weight is not None:
                weight = EdgeWeightNorm("both")(graph, edge_weight)
                weight = prepare_edge_weight(graph, weight, feat.dim())
            else:
                scale_out = degree_scale(graph.out_degrees(), -0.5, feat)
                scale_in = degree_scale(graph.in_degrees(), -0.5, feat)
                if drops:
                    ones = torch.ones(graph.num_edges(), dtype=feat.dtype, device=feat.device)
                    weight = prepare_edge_weight(graph, ones, feat.dim())
            start = feat
            for _ in range(self._k):
                graph.srcdata["h"] = feat if scale_out is None else feat * scale_out
                if weight is None:
                    graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "out"))
                else:
                    graph.edata["w"] = self.edge_drop(weight)
                    graph.update_all(fn.u_mul_e("h", "w", "m"), fn.sum("m", "out"))
                feat = graph.dstdata.pop("out")
                if scale_in is not None:
                    feat = feat * scale_in
                feat = (1 - self._alpha) * feat + self._alpha * start
        return feat

    def extra_repr(self) -> str:
        return f"k={self._k}, alpha={self._alpha}"
