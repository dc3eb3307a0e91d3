# SPDX-License-Identifier: Apache-2.0
"""Layers of DGL whose own code asks a graph of several ranks what one rank cannot answer.

Each function is the ``forward`` of such a layer, with the layer's own modules and parameters, in
terms of the protocol. `patch_dgl` calls them for graphs of this package; DGL's code goes on
serving DGL's graphs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import nn as layers
from ..function import copy_e, sum, u_mul_e
from ..graph import from_dgl


def edge_weight_norm(layer: Any, graph: Any, edge_weight: Tensor) -> Tensor:
    """``EdgeWeightNorm``: weighted out-degrees without a reversed graph.

    Args:
        layer: The layer of DGL.
        graph: A graph of this package.
        edge_weight: ``[num_edges]``.
    """
    return layers.EdgeWeightNorm(layer._norm, layer._eps)(graph, edge_weight)


def gated_graph_conv(layer: Any, graph: Any, feat: Tensor, etypes: Any = None) -> Tensor:
    """``GatedGraphConv``: DGL applies edges type by type, and skips a type that has none here.

    Linear maps of the sums over each type's edges are the sums of the mapped messages. So the rows
    travel once, and every rank makes the same calls whatever types its edges have.

    Args:
        layer: The layer of DGL.
        graph: A graph of this package with one relation.
        feat: ``[num_nodes, in]``.
        etypes: ``[num_edges]`` type of each edge; None where there is one type.

    Raises:
        ValueError: A type that the layer does not have.
    """
    num_types = layer._n_etypes
    if etypes is None:
        etypes = torch.zeros(graph.num_edges(), dtype=torch.int64, device=feat.device)
    if etypes.numel() and not (int(etypes.min()) >= 0 and int(etypes.max()) < num_types):
        raise ValueError(
            f"edge types must be from 0 to {num_types - 1}, the layer's n_etypes less 1 (got "
            f"{int(etypes.min())} to {int(etypes.max())})"
        )
    of_type = torch.nn.functional.one_hot(etypes.long(), num_types).to(feat).unsqueeze(-1)
    feat = torch.nn.functional.pad(feat, (0, layer._out_feats - feat.shape[1]))
    with graph.local_scope():
        graph.edata["of_type"] = of_type
        graph.update_all(copy_e("of_type", "m"), sum("m", "count"))
        count = graph.dstdata["count"]
        for _ in range(layer._n_steps):
            graph.srcdata["h"] = feat.unsqueeze(1)
            graph.update_all(u_mul_e("h", "of_type", "m"), sum("m", "a"))
            sums = graph.dstdata["a"]
            mapped = [
                sums[:, i] @ linear.weight.T + count[:, i] * linear.bias
                for i, linear in enumerate(layer.linears)
            ]
            feat = layer.gru(torch.stack(mapped).sum(0), feat)
    return feat


def pna_tower(layer: Any, graph: Any, node_feat: Tensor, edge_feat: Tensor | None = None) -> Tensor:
    """A tower of ``PNAConv`` and ``DGNConv``: divided by the root of the number of all nodes.

    Args:
        layer: The tower.
        graph: A sharded graph of one relation.
        node_feat: ``[num_nodes, in]``.
        edge_feat: ``[num_edges, edge_feat_size]``.

    Raises:
        ValueError: Edge features are missing.
        NotImplementedError: Sequential aggregation, which has no reduce functions of the user.
    """
    if layer.edge_feat_size > 0 and edge_feat is None:
        raise ValueError("the layer was made with edge_feat_size, so it needs edge features")
    with graph.local_scope():
        graph.ndata["h"] = node_feat
        if layer.edge_feat_size > 0:
            graph.edata["a"] = edge_feat
        graph.update_all(layer.message, layer.reduce_func)
        out = layer.U(torch.cat([node_feat, graph.ndata["h_neigh"]], dim=-1))
    normalized: Tensor = layer.dropout(layer.batchnorm(out / graph.num_nodes_global() ** 0.5))
    return normalized


def broadcast_nodes(graph: Any, graph_feat: Tensor, *, ntype: str | None = None) -> Tensor:
    """A row of a sharded graph, which is one graph, for each node of this rank.

    Args:
        graph: The graph.
        graph_feat: ``[1, ...]``.
        ntype: The node type, where there are several.
    """
    return graph_feat.repeat_interleave(graph.num_nodes(ntype), 0)


def rel_graph_conv(layer: Any, g: Any, *args: Any, **kwargs: Any) -> Tensor:
    """`RelGraphConv` of this package on a graph of DGL.

    SAR puts a class of its own in the place of DGL's, and so does `patch_dgl`.

    Args:
        layer: The layer of this package.
        g: A graph of DGL.
        *args: As for the layer.
        **kwargs: The same.
    """
    return layers.RelGraphConv.forward(layer, from_dgl(g), *args, **kwargs)
