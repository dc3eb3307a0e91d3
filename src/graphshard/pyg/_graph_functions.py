# SPDX-License-Identifier: Apache-2.0
"""Functions of ``torch_geometric.utils`` that take a number of nodes, or a verdict over all edges.

What they are given as a number of nodes is mostly the number of rows of a tensor, which is one
rank's on a graph that spans ranks, and where nothing is given they look for the largest number
among this rank's edges. So with an ``edge_index`` that spans ranks they are the functions of this
module; with any other argument they are PyG's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import update_wrapper
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ..comm import all_reduce
from ..graph.convert import require
from ._edge_index import (
    DestinationIndex,
    NodeValues,
    ShardedEdgeIndex,
    check_matrix,
    largest_number,
    num_nodes_of,
    plain,
)
from ._numbering import PieceEnd
from ._source_halo import SourceHalo


def install_functions() -> None:
    """Have PyG's functions know edges that span ranks, wherever they have been imported to."""
    need = ("graphshard[pyg]", "graphshard.pyg")
    loop = require("torch_geometric.utils.loop", *need)
    num_nodes = require("torch_geometric.utils.num_nodes", *need)
    scatter = require("torch_geometric.utils._scatter", *need)
    sparse = require("torch_geometric.utils.sparse", *need)
    convert = require("torch_geometric.utils.convert", *need)
    dense = require("torch_geometric.utils._to_dense_batch", *need)
    negative = require("torch_geometric.utils._negative_sampling", *need)
    wrapped: dict[Any, Any] = {}
    for module, name, sharded in (
        (loop, "add_self_loops", _add_self_loops),
        (loop, "add_remaining_self_loops", _add_remaining_self_loops),
        (loop, "contains_self_loops", _contains_self_loops),
        (num_nodes, "maybe_num_nodes", _maybe_num_nodes),
        (scatter, "scatter", _scatter),
        (sparse, "to_torch_coo_tensor", _matrix),
        (sparse, "to_torch_csr_tensor", _matrix),
        (sparse, "to_torch_csc_tensor", _matrix),
        (convert, "to_scipy_sparse_matrix", _matrix),
        (dense, "to_dense_batch", _to_dense_batch),
        (negative, "structured_negative_sampling", _no_negatives),
    ):
        whole = getattr(module, name)
        wrapped[whole] = _either(whole, sharded)
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if type(value) is FunctionType and value in wrapped:
                setattr(module, name, wrapped[value])


def _either(whole: Callable[..., Any], sharded: Callable[..., Any]) -> Callable[..., Any]:
    is_sharded = _is_sharded

    def function(*args: Any, **kwargs: Any) -> Any:
        if is_sharded(args, kwargs):
            return sharded(whole, *args, **kwargs)
        return whole(*args, **kwargs)

    # torch.jit.script compiles PyG's function in its place, and looks for names where this one is.
    made = FunctionType(function.__code__, whole.__globals__, closure=function.__closure__)
    update_wrapper(made, whole)
    made.__script_if_tracing_wrapper = True  # type: ignore[attr-defined]
    made.__original_fn = whole  # type: ignore[attr-defined]
    return made


def _is_sharded(args: Any, kwargs: dict[str, Any]) -> bool:
    return any(
        isinstance(value, NodeValues)
        or (isinstance(value, tuple) and any(isinstance(item, NodeValues) for item in value))
        for value in (*args[:2], *kwargs.values())
    )


def _maybe_num_nodes(whole: Any, edge_index: Any, num_nodes: int | None = None) -> int:
    """PyG asks the largest number only of ranks that have an edge; here all ranks take part."""
    if num_nodes is not None:
        return num_nodes
    ends = edge_index if isinstance(edge_index, tuple) else (edge_index,)
    return max(num_nodes_of(end) for end in ends)


def _scatter(
    whole: Any,
    src: Tensor,
    index: Any,
    dim: int = 0,
    dim_size: int | None = None,
    reduce: str = "sum",
) -> Tensor:
    if dim_size is None and isinstance(index, NodeValues):
        dim_size = num_nodes_of(index)
    found: Tensor = whole(src, index, dim, dim_size, reduce)
    return found


def _to_dense_batch(
    whole: Any,
    x: Tensor,
    batch: Any = None,
    fill_value: float = 0.0,
    max_num_nodes: int | None = None,
    batch_size: int | None = None,
) -> Any:
    """The messages of each of this rank's destinations, as long as the longest list of any rank."""
    if isinstance(batch, DestinationIndex) and batch_size == batch.end.num_rows:
        rows, end = batch.local(), batch.end
        if max_num_nodes is None and not isinstance(end, PieceEnd):
            longest = torch.bincount(rows, minlength=1).max().view(1)
            max_num_nodes = int(all_reduce(longest, "max", group=end.group))
        batch = rows
    return whole(x, batch, fill_value, max_num_nodes, batch_size)


def _no_negatives(whole: Any, edge_index: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(edge_index, NodeValues) and edge_index.halo.world_size == 1:
        return whole(plain(edge_index), *args, **kwargs)
    raise NotImplementedError(
        f"{whole.__name__} of edges that span ranks would draw among the nodes of the whole graph, "
        "of which this rank has some rows; draw negative edges from the whole data object"
    )


def _matrix(whole: Any, edge_index: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(edge_index, NodeValues):
        check_matrix(whole.__name__, edge_index.halo)
    return whole(plain(edge_index), *args, **kwargs)


def _contains_self_loops(whole: Any, edge_index: Any) -> bool:
    mask = edge_index[0] == edge_index[1]
    if not isinstance(edge_index, ShardedEdgeIndex):
        return bool(mask.any())
    has_loops = torch.tensor([int(mask.any())])
    return bool(all_reduce(has_loops, "max", group=edge_index.halo.structure.group))


def _add_self_loops(
    whole: Any,
    edge_index: Any,
    edge_attr: Tensor | None = None,
    fill_value: Any = None,
    num_nodes: int | tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    if not isinstance(edge_index, ShardedEdgeIndex):
        return whole(edge_index, edge_attr, fill_value, num_nodes)
    limit = _loop_limit(edge_index, num_nodes)
    joined, rows = _with_loops(edge_index, limit)
    if edge_attr is not None:
        of_loops = _loop_attributes(edge_index, edge_attr, fill_value)
        edge_attr = torch.cat([edge_attr, of_loops[rows]])
    return joined, edge_attr


def _add_remaining_self_loops(
    whole: Any,
    edge_index: Any,
    edge_attr: Tensor | None = None,
    fill_value: Any = None,
    num_nodes: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    if not isinstance(edge_index, ShardedEdgeIndex):
        return whole(edge_index, edge_attr, fill_value, num_nodes)
    limit = _loop_limit(edge_index, num_nodes)
    mask = edge_index[0] != edge_index[1]
    joined, rows = _with_loops(edge_index[:, mask], limit)  # type: ignore[arg-type]
    if edge_attr is not None:
        of_loops = _loop_attributes(edge_index, edge_attr, fill_value)
        of_loops[edge_index.local()[1][~mask]] = edge_attr[~mask]
        edge_attr = torch.cat([edge_attr[mask], of_loops[rows]])
    return joined, edge_attr


def _loop_attributes(edge_index: ShardedEdgeIndex, edge_attr: Tensor, fill_value: Any) -> Tensor:
    """A row for a loop at each of this rank's destinations."""
    loop = require("torch_geometric.utils.loop", "graphshard[pyg]", "add_self_loops")
    size = edge_index.halo.num_dst
    found: Tensor = loop.compute_loop_attr(edge_index, edge_attr, size, False, fill_value)
    return found


def _loop_limit(edge_index: ShardedEdgeIndex, num_nodes: Any) -> int | None:
    """End of the numbers that get a loop, in the whole graph; None for all nodes of one type.

    A number of nodes is that of this rank's rows on each rank, or that of the whole graph on all.
    """
    halo = edge_index.halo
    if num_nodes is None:
        return largest_number(edge_index) + 1
    given = min(num_nodes) if isinstance(num_nodes, tuple | list) else int(num_nodes)
    sources, destinations = halo.sources.numbering, halo.destinations.numbering
    if halo.is_square:
        if halo.sources.owns(given):
            return None
        _check_limit(halo, given, sources.num_whole, halo.sources.largest)
        return given
    rows = [
        (min(halo.num_owned, halo.num_dst), min(sources.num_whole, destinations.num_whole)),
        (halo.num_owned, sources.num_whole),
        (halo.num_dst, destinations.num_whole),
    ]
    shares = torch.tensor([given, -given, *(-int(given == own) for own, _ in rows)])
    most, least, *others = all_reduce(shares, "max", group=halo.structure.group).tolist()
    largest = rows[0][1]  # a loop needs a node of each type
    for is_other, (_, whole) in zip(others, rows, strict=True):
        if is_other == -1 and whole <= largest:
            return whole
    if most != -least or most > largest:
        raise ValueError(
            f"self loops of {halo.etype} need a number of nodes that is the fewer of this rank's "
            f"sources and destinations on each rank ({rows[0][0]} here), or one number up to "
            f"{largest} on all (got {given} here, {-least} to {most} on all)"
        )
    return given


def _check_limit(halo: SourceHalo, given: int, num_whole: int, largest: int) -> None:
    if not largest < given <= num_whole:
        raise ValueError(
            f"self loops need a number of nodes that is this rank's ({halo.num_owned}), or that of "
            f"the whole graph, {num_whole} (got {given})"
        )


def _with_loops(edge_index: ShardedEdgeIndex, limit: int | None) -> tuple[ShardedEdgeIndex, Tensor]:
    """The edges and then the loops, and the destination of each loop."""
    halo, edges = edge_index.halo, edge_index.local()
    if halo.is_square:
        rows = torch.arange(halo.num_dst, device=edges.device)
        if limit is not None:
            rows = rows[halo.destinations.own_ids < limit]
        loops = rows.expand(2, -1)
        return ShardedEdgeIndex.make(torch.cat([edges, loops], 1), halo), rows
    assert limit is not None
    looped = halo.with_self_loops(limit)
    num_edges = halo.edge_index.shape[1]
    renumbered = edges.new_empty(halo.num_extended)
    renumbered[halo.edge_index[0]] = looped.edge_index[0, :num_edges]
    loops = looped.edge_index[:, num_edges:]
    joined = torch.stack([renumbered[edges[0]], edges[1]])
    return ShardedEdgeIndex.make(torch.cat([joined, loops], 1), looped), loops[1]
