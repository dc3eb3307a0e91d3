# SPDX-License-Identifier: Apache-2.0
"""Transforms that change edges by a rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...graph import Graph, add_self_loop, heterograph, remove_self_loop, to_simple
from ..graphs._products import khop_graph, line_graph, metapath_reachable_graph
from ._base import BaseTransform, with_edges


class AddSelfLoop(BaseTransform):
    """A self loop for each node, in every relation from a node type to itself.

    Args:
        allow_duplicate: Whether loops that are there stay as well.
        new_etypes: Whether to add a relation ``(T, 'self', T)`` of loops for every node type too.
        edge_feat_names: Edge features that ``fill_data`` is for; None for all.
        fill_data: Values on new edges; see `graphshard.add_self_loop`.
    """

    def __init__(
        self,
        allow_duplicate: bool = False,
        new_etypes: bool = False,
        edge_feat_names: Sequence[str] | None = None,
        fill_data: float | str = 1.0,
    ) -> None:
        self.allow_duplicate = allow_duplicate
        self.new_etypes = new_etypes
        self.edge_feat_names = edge_feat_names
        self.fill_data = fill_data

    def __call__(self, g: Graph) -> Graph:
        for etype in g.canonical_etypes:
            if etype[0] == etype[2]:
                if not self.allow_duplicate:
                    g = remove_self_loop(g, etype)
                g = add_self_loop(g, self.edge_feat_names, self.fill_data, etype)
        if not self.new_etypes:
            return g
        edges = {(ntype, "self", ntype): (g.nodes(ntype), g.nodes(ntype)) for ntype in g.ntypes}
        return with_edges(g, edges | {e: g.edges(etype=e) for e in g.canonical_etypes})


class RemoveSelfLoop(BaseTransform):
    """No self loop, in any relation from a node type to itself."""

    def __call__(self, g: Graph) -> Graph:
        for etype in g.canonical_etypes:
            if etype[0] == etype[2]:
                g = remove_self_loop(g, etype)
        return g


class AddReverse(BaseTransform):
    """The reverse of every edge: in its relation, or in a relation ``rev_...`` of its own.

    Relations between two node types always get a new one.

    Args:
        copy_edata: Whether reverse edges get the features of their edges; else 0, or none in a new
            relation.
        sym_new_etype: Whether relations from a node type to itself get a new relation as well.
    """

    def __init__(self, copy_edata: bool = False, sym_new_etype: bool = False) -> None:
        self.copy_edata = copy_edata
        self.sym_new_etype = sym_new_etype

    def __call__(self, g: Graph) -> Graph:
        edges: dict[Any, Any] = {}
        turned: dict[Any, Any] = {}
        for etype in g.canonical_etypes:
            src, dst = g.edges(etype=etype)
            if etype[0] == etype[2] and not self.sym_new_etype:
                edges[etype] = torch.cat([src, dst]), torch.cat([dst, src])
            else:
                turned[etype] = (etype[2], f"rev_{etype[1]}", etype[0])
                edges[etype], edges[turned[etype]] = (src, dst), (dst, src)
        new = with_edges(g, edges, copy_edata=False)
        for etype in g.canonical_etypes:
            for name, value in g.edges[etype].data.items():
                if etype in turned:
                    new.edges[etype].data[name] = value
                    if self.copy_edata:
                        new.edges[turned[etype]].data[name] = value
                else:
                    second = value if self.copy_edata else torch.zeros_like(value)
                    new.edges[etype].data[name] = torch.cat([value, second])
        return new


class ToSimple(BaseTransform):
    """One edge for all parallel ones; see `graphshard.dgl.to_simple`.

    Args:
        return_counts: Edge feature that gets the number of edges joined.
        aggregator: What becomes of their features.
    """

    def __init__(self, return_counts: str = "count", aggregator: str = "arbitrary") -> None:
        self.return_counts = return_counts
        self.aggregator = aggregator

    def __call__(self, g: Graph) -> Graph:
        new: Graph = to_simple(g, self.return_counts, copy_edata=True, aggregator=self.aggregator)
        return new


class LineGraph(BaseTransform):
    """The graph of the edges, with their features; see `graphshard.dgl.line_graph`.

    Args:
        backtracking: Whether an edge is joined to edges that go straight back.
    """

    def __init__(self, backtracking: bool = True) -> None:
        self.backtracking = backtracking

    def __call__(self, g: Graph) -> Graph:
        return line_graph(g, self.backtracking, shared=True)


class KHopGraph(BaseTransform):
    """The graph of the walks of ``k`` edges; see `graphshard.dgl.khop_graph`.

    Args:
        k: Number of steps.
    """

    def __init__(self, k: int) -> None:
        self.k = k

    def __call__(self, g: Graph) -> Graph:
        return khop_graph(g, self.k)


class AddMetaPaths(BaseTransform):
    """A relation for every pair of nodes that a walk along some relations joins.

    Args:
        metapaths: Name of the new relation -> the relations of its walk, as triples.
        keep_orig_edges: Whether the relations that are there stay.
    """

    def __init__(
        self, metapaths: Mapping[str, Sequence[Any]], keep_orig_edges: bool = True
    ) -> None:
        self.metapaths = metapaths
        self.keep_orig_edges = keep_orig_edges

    def __call__(self, g: Graph) -> Graph:
        edges: dict[Any, Any] = {}
        for name, metapath in self.metapaths.items():
            reached = metapath_reachable_graph(g, metapath)
            edges[(metapath[0][0], name, metapath[-1][-1])] = reached.edges()
        if self.keep_orig_edges:
            edges |= {etype: g.edges(etype=etype) for etype in g.canonical_etypes}
        return with_edges(g, edges, self.keep_orig_edges)


class ToLevi(BaseTransform):
    """The Levi graph: edges become nodes of type ``edge`` between their ends, of type ``node``.

    Features of nodes and edges become features of the two node types.
    """

    def __call__(self, g: Graph) -> Graph:
        src, dst = g.edges()
        edges = g.edges("eid")
        pairs = {("node", "n2e", "edge"): (src, edges), ("edge", "e2n", "node"): (edges, dst)}
        counts = {"node": g.num_nodes(), "edge": g.num_edges()}
        new = heterograph(pairs, counts, idtype=g.idtype, device=g.device)
        new.nodes["node"].data.update(g.ndata)
        new.nodes["edge"].data.update(g.edata)
        return new
