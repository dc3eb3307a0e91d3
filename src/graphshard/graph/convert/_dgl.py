# SPDX-License-Identifier: Apache-2.0
"""Graphs and blocks from DGL's, and back; features keep their names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._block import Block, create_block
from .._graph import Graph, graph, heterograph
from ..message_passing import LocalGraph
from ._optional import require

if TYPE_CHECKING:
    from dgl import DGLGraph

_PLAIN = [("_N", "_E", "_N")]


def from_dgl(g: DGLGraph) -> Any:
    """Graph of a ``DGLGraph``, or `Block` of a ``DGLBlock``.

    Types, edge ids, id dtype, device, features and, of a batched graph, the numbers of nodes and
    edges of each graph are the same. DGL need not be importable: the object is asked only for what
    every DGL release answers.

    Args:
        g: DGL graph; node and edge feature tensors are shared, not copied.

    Returns:
        The graph.
    """
    edges = {etype: g.edges(etype=etype, order="eid") for etype in g.canonical_etypes}
    ours: Any
    if g.is_block:
        num_src = {ntype: g.num_src_nodes(ntype) for ntype in g.srctypes}
        num_dst = {ntype: g.num_dst_nodes(ntype) for ntype in g.dsttypes}
        ours = create_block(edges, num_src, num_dst, g.idtype, g.device)
    elif list(edges) == _PLAIN:
        ours = graph(edges[_PLAIN[0]], g.num_nodes(), g.idtype, g.device)
    else:
        num_nodes = {ntype: g.num_nodes(ntype) for ntype in g.ntypes}
        ours = heterograph(edges, num_nodes, g.idtype, g.device)
    _copy_fields(g, ours)
    if not g.is_block and g.batch_size > 1:
        _copy_batch(g, ours)
    return ours


def to_dgl(g: Graph | Block) -> DGLGraph:
    """``DGLGraph`` of a graph, or ``DGLBlock`` of a block; the reverse of `from_dgl`.

    Args:
        g: Graph or block, whole in this process; feature tensors are shared, not copied.

    Returns:
        The DGL graph. DGL sorts node types and relations of a graph by name.

    Raises:
        ImportError: DGL is not installed (the extra ``graphshard[dgl]``).
        TypeError: A graph of several ranks, of which this one has a part.
    """
    if not isinstance(g, LocalGraph):
        raise TypeError(
            f"to_dgl takes a graph or a block that is whole in this process (got "
            f"{type(g).__name__}); DGL has no graph that spans ranks: write the parts for it with "
            "graphshard convert"
        )
    dgl = require("dgl", "graphshard[dgl]", "to_dgl")
    edges = {etype: g.edges(etype=etype, order="eid") for etype in g.canonical_etypes}
    kind = {"idtype": g.idtype, "device": g.device}
    if g.is_block:
        num_src = {ntype: g.num_src_nodes(ntype) for ntype in g.srctypes}
        num_dst = {ntype: g.num_dst_nodes(ntype) for ntype in g.dsttypes}
        theirs = dgl.create_block(edges, num_src, num_dst, **kind)
    elif list(edges) == _PLAIN:
        theirs = dgl.graph(edges[_PLAIN[0]], num_nodes=g.num_nodes(), **kind)
    else:
        num_nodes = {ntype: g.num_nodes(ntype) for ntype in g.ntypes}
        theirs = dgl.heterograph(edges, num_nodes, **kind)
    _copy_fields(g, theirs)
    if not g.is_block and g.batch_size > 1:
        _copy_batch(g, theirs)
    return theirs


def _copy_fields(source: Any, target: Any) -> None:
    if source.is_block:
        sides = [("srcnodes", source.srctypes), ("dstnodes", source.dsttypes)]
    else:
        sides = [("nodes", source.ntypes)]
    for view, ntypes in sides:
        for ntype in ntypes:
            for name, value in dict(getattr(source, view)[ntype].data).items():
                getattr(target, view)[ntype].data[name] = value
    for etype in source.canonical_etypes:
        for name, value in dict(source.edges[etype].data).items():
            target.edges[etype].data[name] = value


def _copy_batch(source: Any, target: Any) -> None:
    target.set_batch_num_nodes({t: source.batch_num_nodes(t) for t in source.ntypes})
    target.set_batch_num_edges({t: source.batch_num_edges(t) for t in source.canonical_etypes})
