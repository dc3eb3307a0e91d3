# SPDX-License-Identifier: Apache-2.0
"""Layers of PyG that do more with ``edge_index`` than read sources and sum at destinations."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import all_reduce
from ..graph.convert import require
from ._edge_index import ShardedEdgeIndex


def call_on_extended_rows(
    layer: Any,
    run: Callable[..., Any],
    x_dict: dict[str, Tensor],
    edge_index_dict: dict[Any, Any],
) -> dict[str, Any]:
    """``HGTConv``, which joins all relations to one graph: it gets own and halo rows of each type.

    So what it computes of each node it computes of the halo, too, and the results of the halo are
    dropped. Rows of all types come in one exchange each.

    Args:
        layer: The layer.
        run: What is called, with the layer and its arguments.
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
    out = run(layer, rows, local)
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


def with_own_nodes(layer: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Arguments of ``RGCNConv`` for nodes without features: numbers of own and of halo nodes.

    PyG takes all numbers up to ``in_channels``. Every rank has all rows of the weights, so nothing
    but these numbers travels, and they do once.

    Args:
        layer: The layer.
        args: Of its call.
        kwargs: Of its call.

    Raises:
        ValueError: The layer has fewer rows of weights than the whole graph has nodes.
    """
    given = {**dict(zip(("x", "edge_index", "edge_type"), args, strict=False)), **kwargs}
    index = given.get("edge_index")
    if given.get("x") is not None or not isinstance(index, ShardedEdgeIndex):
        return args, kwargs
    ids = index.halo.own_ids
    if ids is None:
        raise ValueError(
            f"{type(layer).__name__} without features needs the numbers of the nodes in the whole "
            "graph, which this partition folder does not have; pass x"
        )
    largest = ids.max().view(1) if ids.numel() else ids.new_full((1,), -1)
    needed = int(all_reduce(largest, "max", group=index.halo.structure.group)) + 1
    if needed > layer.in_channels_l:
        raise ValueError(
            f"{type(layer).__name__} without features needs in_channels for the nodes of all "
            f"ranks, {needed} at least (got {layer.in_channels_l}); make it with the whole graph's "
            "number of nodes"
        )
    if type(layer).__name__ == "FastRGCNConv":  # reads edge_index as numbers
        return (), {**given, "x": (torch.arange(layer.in_channels_l, device=ids.device), ids)}
    (extended,) = index.halo.extended(ids)
    return (), {**given, "x": (extended, ids), "edge_index": index.local()}


def with_matrix_values(layer: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a layer that was given an adjacency matrix, with its values in their own place.

    Args:
        layer: The layer.
        args: Of its call.
        kwargs: Of its call; the result has ``edge_weight``, or ``edge_attr``, too.

    Raises:
        NotImplementedError: The layer takes no weights beside ``edge_index``, or adds self loops to
            those of the matrix.
    """
    forward = inspect.signature(type(layer).forward)
    given = forward.bind_partial(layer, *args, **kwargs).arguments
    matrices = [v for v in given.values() if isinstance(v, ShardedEdgeIndex)]
    values = matrices[0].matrix_values if matrices else None
    makes_loops = getattr(layer, "add_self_loops", False) and getattr(layer, "normalize", True)
    if makes_loops and any(m.is_matrix_with_loops for m in matrices):
        module = sys.modules[type(layer).__module__]
        if hasattr(module, "gcn_norm"):  # of a matrix it adds 1 to them, of edges it leaves them
            raise NotImplementedError(
                f"adj_t has self loops, to which {type(layer).__name__} adds others; pass "
                "edge_index, or have RemoveSelfLoops before ToSparseTensor"
            )
    if values is None:
        return kwargs
    name = "edge_weight" if values.dim() == 1 else "edge_attr"
    if name in forward.parameters:
        return kwargs if given.get(name) is not None else {**kwargs, name: values}
    if values.dim() == 1 and not layer.inspector.implements("message_and_aggregate"):
        return kwargs  # PyG hands them to messages alone, which do not ask
    raise NotImplementedError(
        f"{type(layer).__name__} takes no {name} besides edge_index, so that it cannot be given "
        "the values of an adjacency matrix on edges that span ranks; make adj_t without them "
        "(ToSparseTensor(attr=None)), or use GraphConv, which has edge_weight"
    )


def with_one_hot_labels(layer: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Arguments of ``LabelPropagation`` with a column for each class that any rank has.

    PyG takes as many as the largest label, of which this rank has some.

    Args:
        layer: The layer.
        args: Of its call.
        kwargs: Of its call.
    """
    given = {**dict(zip(("y", "edge_index"), args, strict=False)), **kwargs}
    y, index = given["y"], given["edge_index"]
    if y.dtype != torch.int64 or y.shape[0] != y.numel():
        return args, kwargs
    largest = y.max().view(1) if y.numel() else y.new_full((1,), -1)
    count = int(all_reduce(largest, "max", group=index.halo.structure.group)) + 1
    columns = nn.functional.one_hot(y.view(-1), count).to(torch.get_default_dtype())
    return ((columns, *args[1:]), kwargs) if args else (args, {**kwargs, "y": columns})


def corrected(
    model: Any,
    y_soft: Tensor,
    y_true: Tensor,
    mask: Tensor,
    edge_index: ShardedEdgeIndex,
    edge_weight: Tensor | None = None,
) -> Tensor:
    """``CorrectAndSmooth.correct`` with the mean error of the training nodes of all ranks.

    Args:
        model: A ``CorrectAndSmooth``.
        y_soft: ``[num_owned, classes]`` predictions.
        y_true: Classes, or rows, of this rank's training nodes.
        mask: This rank's training nodes.
        edge_index: The edges.
        edge_weight: ``[num_edges]``.

    Returns:
        ``[num_owned, classes]``. Source: https://arxiv.org/abs/2010.13993, equation 4.
    """
    if y_true.dtype == torch.int64 and y_true.shape[0] == y_true.numel():
        y_true = nn.functional.one_hot(y_true.view(-1), y_soft.shape[-1]).to(y_soft.dtype)
    error = torch.zeros_like(y_soft)
    error[mask] = y_true - y_soft[mask]
    if not model.autoscale:

        def fixed(x: Tensor) -> Tensor:
            x[mask] = error[mask]
            return x

        spread = model.prop1(error, edge_index, edge_weight=edge_weight, post_step=fixed)
        return y_soft + model.scale * spread
    spread = model.prop1(
        error, edge_index, edge_weight=edge_weight, post_step=lambda x: x.clamp_(-1.0, 1.0)
    )
    count = torch.tensor(y_true.shape[0], dtype=y_soft.dtype, device=y_soft.device)
    sums = torch.stack([error[mask].abs().sum(), count])
    total, count = all_reduce(sums, group=edge_index.halo.structure.group)
    scale = total / count / spread.abs().sum(dim=1, keepdim=True)
    scale[scale.isinf() | (scale > 1000)] = 1.0
    return y_soft + scale * spread


def own_embedding(
    model: Any, edge_index: ShardedEdgeIndex, edge_weight: Tensor | None = None
) -> Tensor:
    """``LightGCN.get_embedding`` of this rank's nodes, whose model has a row for all nodes.

    Args:
        model: A ``LightGCN``.
        edge_index: The edges.
        edge_weight: ``[num_edges]``.

    Returns:
        ``[num_owned, embedding_dim]``. Source: https://arxiv.org/abs/2002.02126, equation 8.
    """
    rows = edge_index.halo.own_rows(model.embedding.weight)
    total = rows * model.alpha[0]
    for place, conv in enumerate(model.convs):
        rows = conv(rows, edge_index, edge_weight)
        total = total + rows * model.alpha[place + 1]
    found: Tensor = total
    return found
