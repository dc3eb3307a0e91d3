# SPDX-License-Identifier: Apache-2.0
"""Graphs from PyG's ``Data`` and ``HeteroData``, and back.

Structure and every tensor with a row per node or per edge go over, under their own names but two:
``x`` is ``feat`` here and ``y`` is ``label``. Anything else on the object (strings, graph-level
values) stays behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..graph import Graph, graph, heterograph
from ..graph.convert import require

if TYPE_CHECKING:
    from torch_geometric.data import Data, HeteroData

_TO_OURS = {"x": "feat", "y": "label"}
_TO_THEIRS = {ours: theirs for theirs, ours in _TO_OURS.items()}


def from_pyg(data: Data | HeteroData, idtype: torch.dtype = torch.int64) -> Graph:
    """Graph of a PyG ``Data`` or ``HeteroData``; edge ids are positions in ``edge_index``.

    Args:
        data: The PyG object, on any device.
        idtype: int32 or int64.

    Returns:
        A graph that shares the feature tensors, with PyG's order of edges.

    Raises:
        ValueError: An edge type has no ``edge_index``, or a type's number of nodes is unknown.
    """
    if hasattr(data, "edge_types"):
        return _from_hetero(data, idtype)
    ends = _ends(data, "data")
    g = graph(ends, num_nodes=_node_count(data, "data"), idtype=idtype, device=ends[0].device)
    for name, value in _columns(data):
        if data.is_node_attr(name):
            g.ndata[_TO_OURS.get(name, name)] = value
        elif data.is_edge_attr(name):
            g.edata[name] = value
    return g


def _from_hetero(data: Any, idtype: torch.dtype) -> Graph:
    num_nodes = {
        ntype: _node_count(data[ntype], f"node type {ntype!r}") for ntype in data.node_types
    }
    edges = {etype: _ends(data[etype], f"edge type {etype}") for etype in data.edge_types}
    for etype in edges:
        for ntype in etype[::2]:
            if ntype not in num_nodes:
                raise ValueError(
                    f"node type {ntype!r} of {etype} has no number of nodes; set "
                    f"data[{ntype!r}].num_nodes"
                )
    device = next((src.device for src, _ in edges.values()), None)
    g = heterograph(edges, num_nodes_dict=num_nodes, idtype=idtype, device=device)
    for ntype in data.node_types:
        for name, value in _columns(data[ntype]):
            if value.ndim and value.shape[0] == num_nodes[ntype]:
                g.nodes[ntype].data[_TO_OURS.get(name, name)] = value
    for etype in data.edge_types:
        for name, value in _columns(data[etype]):
            if value.ndim and value.shape[0] == edges[etype][0].shape[0]:
                g.edges[etype].data[name] = value
    return g


def to_pyg(g: Graph) -> Data | HeteroData:
    """``Data`` of a homogeneous graph, ``HeteroData`` of a typed one; tensors are shared.

    Args:
        g: Graph; ``edge_index`` is int64 whatever its id dtype, and in edge id order.

    Returns:
        The PyG object, with ``num_nodes`` set so that isolated nodes are kept.

    Raises:
        ImportError: torch_geometric is not installed (the extra ``graphshard[pyg]``).
    """
    pyg = require("torch_geometric.data", "graphshard[pyg]", "to_pyg")
    if g.is_homogeneous:
        data = pyg.Data()
        stores: Any = dict.fromkeys((*g.ntypes, *g.canonical_etypes), data)
    else:
        data = stores = pyg.HeteroData()
    for etype in g.canonical_etypes:
        src, dst = g.edges(etype=etype, order="eid")
        stores[etype].edge_index = torch.stack([src, dst]).long()
        for name, value in g.edges[etype].data.items():
            setattr(stores[etype], name, value)
    for ntype in g.ntypes:
        stores[ntype].num_nodes = g.num_nodes(ntype)
        for name, value in g.nodes[ntype].data.items():
            setattr(stores[ntype], _TO_THEIRS.get(name, name), value)
    return data


def _node_count(store: Any, what: str) -> int:
    count = store.num_nodes
    if count is None:
        raise ValueError(f"{what} has no number of nodes; set its num_nodes")
    return int(count)


def _ends(store: Any, what: str) -> tuple[Tensor, Tensor]:
    edge_index = store.get("edge_index", None) if hasattr(store, "get") else None
    if edge_index is None:
        raise ValueError(
            f"{what} has no edge_index; an adjacency in adj_t must be turned back into one first"
        )
    edge_index = edge_index.as_subclass(Tensor)
    return edge_index[0], edge_index[1]


def _columns(store: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a PyG store but its edge_index."""
    for name, value in store.to_dict().items():
        if isinstance(value, Tensor) and name not in {"edge_index", "adj_t"}:
            yield name, value
