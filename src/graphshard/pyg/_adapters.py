# SPDX-License-Identifier: Apache-2.0
"""Layers of PyG that do more with ``edge_index`` than read sources and sum at destinations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..comm import all_reduce
from ..graph.convert import require
from ._edge_index import ShardedEdgeIndex


def call_on_extended_rows(
    layer: Any, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Any]
) -> dict[str, Any]:
    """``HGTConv``, which joins all relations to one graph: it gets own and halo rows of each type.

    So what it computes of each node it computes of the halo, too, and the results of the halo are
    dropped. Rows of all types come in one exchange each.

    Args:
        layer: The layer.
        x_dict: Node type to own rows.
        edge_index_dict: Relation to its edges.
    """
    rows = dict(x_dict)
    for etype, index in edge_index_dict.items():
        if isinstance(index, ShardedEdgeIndex) and rows[etype[0]] is x_dict[etype[0]]:
            (rows[etype[0]],) = index.halo.extended(x_dict[etype[0]])
    local = {
        etype: index.local() if isinstance(index, ShardedEdgeIndex) else index
        for etype, index in edge_index_dict.items()
    }
    out = nn.Module.__call__(layer, rows, local)
    return {
        ntype: value if value is None else value[: x_dict[ntype].shape[0]]
        for ntype, value in out.items()
    }


def with_largest_eigenvalue(layer: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``ChebConv`` with the bound of the Laplacian that it takes from all edges.

    PyG takes twice the largest weight of the Laplacian, of which this rank has some.

    Args:
        layer: The layer.
        args: Of its call.
        kwargs: Of its call; the result has ``lambda_max`` too, if it was not given.

    Raises:
        NotImplementedError: ``edge_weight`` needs a gradient.
    """
    names = ("x", "edge_index", "edge_weight", "batch", "lambda_max")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("lambda_max") is not None:
        return kwargs
    x, index, weight = given["x"], given["edge_index"], given.get("edge_weight")
    if weight is not None and weight.requires_grad:
        raise NotImplementedError(
            "ChebConv takes lambda_max from the weights of all edges, and this has no gradient on "
            "a graph that spans ranks; pass lambda_max"
        )
    utils = require("torch_geometric.utils", "graphshard[pyg]", "ChebConv")
    with torch.no_grad():
        _, found = utils.get_laplacian(index, weight, layer.normalization, x.dtype, x.shape[0])
        largest = found.max().view(1) if found.numel() else found.new_full((1,), float("-inf"))
        largest = all_reduce(largest, "max", group=index.halo.structure.group)
    return {**kwargs, "lambda_max": 2.0 * largest[0]}
