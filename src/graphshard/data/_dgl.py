# SPDX-License-Identifier: Apache-2.0
"""Graphs from DGL's ``DGLGraph``, and back; features keep their names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..graph import Graph, graph, heterograph
from ..graph.convert import require

if TYPE_CHECKING:
    from dgl import DGLGraph


def from_dgl(g: DGLGraph) -> Graph:
    """Graph of a ``DGLGraph``: the same types, edge ids, id dtype, device and features.

    DGL need not be importable: the object is asked only for what every DGL release answers.

    Args:
        g: DGL graph; node and edge feature tensors are shared, not copied.

    Returns:
        The graph.

    Raises:
        ValueError: ``g`` is a block.
    """
    if g.is_block:
        raise ValueError(
            "from_dgl takes a graph, not a block; take dgl.block_to_graph(block) first"
        )
    edges = {etype: g.edges(etype=etype, order="eid") for etype in g.canonical_etypes}
    num_nodes = {ntype: g.num_nodes(ntype) for ntype in g.ntypes}
    if list(edges) == [("_N", "_E", "_N")]:
        ours = graph(edges["_N", "_E", "_N"], num_nodes["_N"], g.idtype, g.device)
    else:
        ours = heterograph(edges, num_nodes, g.idtype, g.device)
    _copy_fields(g, ours)
    return ours


def to_dgl(g: Graph) -> DGLGraph:
    """``DGLGraph`` with the same types, edge ids, id dtype, device and features.

    Args:
        g: Graph; feature tensors are shared, not copied.

    Returns:
        The DGL graph. DGL sorts node types and relations by name.

    Raises:
        ImportError: DGL is not installed (the extra ``graphshard[dgl]``).
    """
    dgl = require("dgl", "graphshard[dgl]", "to_dgl")
    edges = {etype: g.edges(etype=etype, order="eid") for etype in g.canonical_etypes}
    num_nodes = {ntype: g.num_nodes(ntype) for ntype in g.ntypes}
    if list(edges) == [("_N", "_E", "_N")]:
        pair = edges["_N", "_E", "_N"]
        theirs = dgl.graph(pair, num_nodes=num_nodes["_N"], idtype=g.idtype, device=g.device)
    else:
        theirs = dgl.heterograph(edges, num_nodes, idtype=g.idtype, device=g.device)
    _copy_fields(g, theirs)
    return theirs


def _copy_fields(source: Any, target: Any) -> None:
    for ntype in source.ntypes:
        for name, value in dict(source.nodes[ntype].data).items():
            target.nodes[ntype].data[name] = value
    for etype in source.canonical_etypes:
        for name, value in dict(source.edges[etype].data).items():
            target.edges[etype].data[name] = value
