# SPDX-License-Identifier: Apache-2.0
"""GAT and GATv2 whose scores read features of edges, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..graph import MessagePassingGraph, attend
from ._gat_conv import GATConv
from ._gatv2_conv import GATv2Conv
from .attention import LeakyAttentionConv, attention_mask, slope_of, vector_of
from .inputs import Features
from .recompute import Projections


class EdgeScoredGATConv(GATConv):
    r"""`GATConv` with a further term in the scores.

    .. math::
        \mathrm{leakyrelu}(a_l^T W h_j + a_r^T W h_i + a_e^T W_e e_{ji})

    as PyG's ``GATConv(edge_dim=...)`` has it; messages are without it.

    Args:
        arguments: Of `GATConv`.
        edge_feats: Width of the features of edges.
    """

    def __init__(self, *arguments: Any, edge_feats: int) -> None:
        super().__init__(*arguments)
        self.fc_edge = _linear_of_edges(self, edge_feats)
        self.attn_e = nn.Parameter(torch.empty(1, self._num_heads, self._out_feats))
        nn.init.xavier_normal_(self.attn_e, gain=nn.init.calculate_gain("relu"))

    def forward(  # type: ignore[override]
        self, graph: MessagePassingGraph, feat: Features, edge_feat: Tensor
    ) -> Tensor:
        """Apply the layer: ``edge_feat`` is ``[num_edges, edge_feats]``."""
        heads = self._num_heads, self._out_feats
        # One product with (a_e W_e): nothing of size edges x heads x width.
        matrix = (self.fc_edge.weight.view(*heads, -1) * self.attn_e.view(*heads, 1)).sum(1)
        return _attended(self, graph, feat, edge_feat @ matrix.T)


class EdgeScoredGATv2Conv(GATv2Conv):
    r"""`GATv2Conv` with a further term inside the scores.

    .. math::
        a^T \mathrm{leakyrelu}(W_{src} h_j + b_{src} + W_{dst} h_i + b_{dst} + W_e e_{ji})

    as PyG's ``GATv2Conv(edge_dim=...)`` has it; messages are without it.

    Args:
        arguments: Of `GATv2Conv`.
        edge_feats: Width of the features of edges.
    """

    def __init__(self, *arguments: Any, edge_feats: int) -> None:
        super().__init__(*arguments)
        self.fc_edge = _linear_of_edges(self, edge_feats)

    def forward(  # type: ignore[override]
        self, graph: MessagePassingGraph, feat: Features, edge_feat: Tensor
    ) -> Tensor:
        """Apply the layer: ``edge_feat`` is ``[num_edges, edge_feats]``."""
        rows = self.fc_edge(edge_feat).unflatten(1, (self._num_heads, self._out_feats))
        return _attended(self, graph, feat, rows)


def _linear_of_edges(layer: LeakyAttentionConv, edge_feats: int) -> nn.Linear:
    """What makes rows of features of edges, all heads side by side."""
    linear = nn.Linear(edge_feats, layer._num_heads * layer._out_feats, bias=False)
    nn.init.xavier_normal_(linear.weight, gain=nn.init.calculate_gain("relu"))
    return linear


def _attended(
    layer: LeakyAttentionConv, graph: MessagePassingGraph, feat: Features, edge: Tensor
) -> Tensor:
    """The layer's output, with what its scores read of edges."""
    layer._check_in_degrees(graph)
    graph, feat = layer._dropped(graph, feat)
    projections = Projections(graph)
    source, destination, _ = layer._project(graph, feat, projections)
    row = tuple(source.shape[1:-1])
    attention = layer._attention(
        source,
        destination,
        tuple(vector_of(vector, row) for vector in layer._vectors()),
        slope=slope_of(layer.leaky_relu),
        mask=attention_mask(layer.attn_drop),
        edge=edge,
    )
    with projections.recomputed():
        result = attend(graph, attention)
    if result is None:
        raise NotImplementedError(
            f"attention with features of edges has no kernel for {type(graph).__name__}; use a "
            "model that reads none"
        )
    if isinstance(layer.bias, Tensor):
        result = result + layer.bias.view(layer._num_heads, layer._out_feats)
    return result
