# SPDX-License-Identifier: Apache-2.0
"""SGConv: simplified graph convolution, k propagations and one linear layer."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ... import function as fn
from ...graph import MessagePassingGraph
from ...nn.inputs import degree_scale, neighbour_message
from ...nn.zero_in_degree import ZeroInDegreeCheck
from ._edge_weight_norm import EdgeWeightNorm


class SGConv(ZeroInDegreeCheck):
    r"""Simplified graph convolution.

    From `Simplifying Graph Convolutional Networks <https://arxiv.org/abs/1902.07153>`_:

    .. math::
        H = \big(D_{in}^{-1/2} A^T D_{in}^{-1/2}\big)^k X \Theta + b

    or :math:`\hat A^k X \Theta + b` with edge weights normalised by :class:`EdgeWeightNorm`.

    Args:
        in_feats: Width of the input.
        out_feats: Width of the output.
        k: Number of propagations.
        cached: Keep the propagated features of the first call and use them in all later ones: for
            one graph whose input never changes. Later inputs and edge weights are not read.
        bias: Learn :math:`b`.
        norm: Applied to the propagated features, before the linear layer.
        allow_zero_in_degree: Accept nodes without in-edges.

    Shape:
        ``feat`` ``[num_nodes, in_feats]``; ``edge_weight`` ``[num_edges]``; output
        ``[num_nodes, out_feats]``.

    Raises:
        ValueError: Nodes without in-edges; edge weights not positive, or not one per edge.

    Example:
        >>> import torch
        >>> from graphshard.graph import graph
        >>> from graphshard.dgl.nn import SGConv
        >>> g = graph((torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0])))
        >>> SGConv(4, 2, k=2)(g, torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """

    def __init__(
        self,
        in_feats: int,
        out_feats: int,
        k: int = 1,
        cached: bool = False,
        bias: bool = True,
        norm: Callable[[Tensor], Tensor] | None = None,
        allow_zero_in_degree: bool = False,
    ) -> None:
        super().__init__(allow_zero_in_degree)
        self.fc = nn.Linear(in_feats, out_feats, bias=bias)
        self._cached = cached
        self._cached_h: Tensor | None = None
        self._k = k
        self.norm = norm
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight anew (Xavier uniform) and set the bias to zero."""
        nn.init.xavier_uniform_(self.fc.weight)
        if self.fc.bias is not None:
            nn.init.zeros_(self.fc.bias)

    def forward(
        self, graph: MessagePassingGraph, feat: Tensor, edge_weight: Tensor | None = None
    ) -> Tensor:
        """Apply the layer; see the class for shapes."""
        self._check_in_degrees(graph)
        propagated = self._cached_h
        if propagated is None:
            propagated = self._propagate(graph, feat, edge_weight)
            if self.norm is not None:
                propagated = self.norm(propagated)
            if self._cached:
                self._cached_h = propagated
        result: Tensor = self.fc(propagated)
        return result

    def _propagate(
        self, graph: MessagePassingGraph, feat: Tensor, edge_weight: Tensor | None
    ) -> Tensor:
        """``k`` normalised sums over the neighbours."""
        with graph.local_scope():
            scale = None
            if edge_weight is None:
                scale = degree_scale(graph.in_degrees(), -0.5, feat)
            else:
                edge_weight = EdgeWeightNorm("both")(graph, edge_weight)
            message = neighbour_message(graph, edge_weight, feat.dim())
            for _ in range(self._k):
                graph.srcdata["h"] = feat if scale is None else feat * scale
                graph.update_all(message, fn.sum("m", "out"))
                feat = graph.dstdata.pop("out")
                if scale is not None:
                    feat = feat * scale
        return feat

    def extra_repr(self) -> str:
        return f"k={self._k}, cached={self._cached}"
