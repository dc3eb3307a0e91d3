# SPDX-License-Identifier: Apache-2.0
"""Graphs of some edges of a `DistGraph`, under the names of ``dgl.distributed``.

All are Graphs of this process with the types of the whole graph, ids in ``edata[EID]`` and, where
nodes are renumbered, in ``ndata[NID]``. Features do not come along: read them by these ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from .._base.typing import CanonicalEType, EdgeIds, EType, Ids, NodeIds
from ..graph import EID, NID, Graph, graph, heterograph
from ..graph.structure import as_integers, by_first_occurrence
from ..sampling import DrawOptions, DrawSeed, NeighborRequest
from ..sampling.graph_store import ends
from ._host_graph import GraphIds, HostGraph, edge_policy, node_policy
from ._job import refuse_graphbolt
from ._served_stores import NO_IDS, GatheredEdges, check_range

if TYPE_CHECKING:
    from ._dist_graph import DistGraph

EdgesWithIds: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Sources, destinations and ids of some edges."""


def sample_neighbors(
    g: DistGraph,
    nodes: NodeIds,
    fanout: int,
    edge_dir: str = "in",
    prob: str | None = None,
    *,
    exclude_edges: EdgeIds | None = None,
    replace: bool = False,
    use_graphbolt: bool = False,
    seed: int | None = None,
) -> Graph:
    """Edges drawn for nodes, ``fanout`` for a node from all its relations together.

    `sample_etype_neighbors`, and the method `DistGraph.sample_neighbors`, draw that many of each
    relation. On a graph of one relation there is no difference.

    Args:
        fanout: Edges for a node, -1 for all.
        edge_dir: ``"in"`` for edges that enter the nodes, ``"out"`` for those that leave them.
        prob: Name of the edge feature to draw in proportion to; every relation at a node has it.
        use_graphbolt: Must be false.
        seed: Names the draw; by default one from torch's generator.

    Raises:
        IndexError: An id is out of range.
        TypeError: ``fanout`` is no number, or ids are none.
        ValueError: As for `DistGraph.sample_neighbors`.
    """
    refuse_graphbolt(use_graphbolt)
    if isinstance(fanout, Mapping):
        raise TypeError(
            "fanout must be one number for all relations of a node together (got a dictionary); "
            "use sample_etype_neighbors for numbers by relation"
        )
    if len(g.canonical_etypes) == 1:
        given: dict[str, Any] = {"exclude_edges": exclude_edges, "replace": replace, "seed": seed}
        return sample_etype_neighbors(g, nodes, fanout, edge_dir, prob, **given)
    options = _options(edge_dir, prob, replace)
    fanout = _checked_fanout(fanout, replace)
    draw_seed = DrawSeed.fresh() if seed is None else DrawSeed(seed)
    excluded = edges_by_relation(g, exclude_edges)
    drawn: dict[CanonicalEType, EdgesWithIds] = {}
    for ntype, near in nodes_by_type(g, nodes).items():
        etypes = [t for t in g.canonical_etypes if ends(t, options.edge_dir)[0] == ntype]
        if etypes:
            gathered = g.graph_store.gather([(etype, near) for etype in etypes], options)
            request = NeighborRequest(
                etypes[0], near, fanout, draw_seed.key(0, g.ntypes.index(ntype))
            )
            drawn |= _drawn_of_all(g, request, options, gathered, excluded)
    return graph_of_edges(g, drawn, relabel_nodes=False, store_ids=True)


def sample_etype_neighbors(
    g: DistGraph,
    nodes: NodeIds,
    fanout: int | Mapping[EType, int],
    edge_dir: str = "in",
    prob: str | None = None,
    *,
    exclude_edges: EdgeIds | None = None,
    replace: bool = False,
    etype_sorted: bool = True,
    use_graphbolt: bool = False,
    seed: int | None = None,
) -> Graph:
    """Edges drawn for nodes, ``fanout`` of each relation; see `DistGraph.sample_neighbors`.

    Args:
        etype_sorted: Accepted for DGL's scripts.
        use_graphbolt: Must be false.
    """
    refuse_graphbolt(use_graphbolt)
    options = _options(edge_dir, prob, replace)
    fanouts = _fanouts(g, fanout, replace)
    near = nodes_by_type(g, nodes)
    draw_seed = DrawSeed.fresh() if seed is None else DrawSeed(seed)
    requests = [
        NeighborRequest(etype, near[at], fanouts[etype], draw_seed.key(0, number))
        for number, etype in enumerate(g.canonical_etypes)
        if (at := ends(etype, options.edge_dir)[0]) in near
    ]
    drawn = _drawn(g, requests, options, edges_by_relation(g, exclude_edges))
    return graph_of_edges(g, drawn, relabel_nodes=False, store_ids=True)


def in_subgraph(g: DistGraph, nodes: NodeIds) -> Graph:
    """The graph of all edges that enter some nodes; see `DistGraph.in_subgraph`."""
    return in_subgraph_of(g, nodes, relabel_nodes=False, store_ids=True)


def find_edges(g: DistGraph, edge_ids: Ids) -> tuple[Tensor, Tensor]:
    """Sources and destinations of edges of a graph of one relation.

    Raises:
        IndexError: An id is out of range.
        ValueError: There are several relations; `DistGraph.find_edges` takes one.
    """
    return g.find_edges(edge_ids)


def in_subgraph_of(g: DistGraph, nodes: NodeIds, relabel_nodes: bool, store_ids: bool) -> Graph:
    """What `DistGraph.in_subgraph` says."""
    near = nodes_by_type(g, nodes)
    requests = [
        NeighborRequest(etype, near[etype[2]], -1, 0)
        for etype in g.canonical_etypes
        if etype[2] in near
    ]
    return graph_of_edges(g, _drawn(g, requests, DrawOptions()), relabel_nodes, store_ids)


def local_part(ids: GraphIds, host: int, rows: Callable[[str], Tensor | None]) -> Graph | None:
    """What `DistGraph.local_partition` says; ``rows`` are as for `HostGraph`."""
    here, book = HostGraph(ids, host, rows), ids.book
    inner = {ntype: torch.arange(*ids.range_of(node_policy(ntype), host)) for ntype in book.ntypes}
    sources: dict[str, list[Tensor]] = {ntype: [NO_IDS] for ntype in book.ntypes}
    for etype in book.canonical_etypes:
        lists = here.edge_lists(etype)
        if lists is None:
            return None
        sources[etype[0]].append(lists.neighbors[:].to(torch.int64))
    halo = {}
    for ntype, of_type in sources.items():
        start, stop = ids.range_of(node_policy(ntype), host)
        distinct = torch.unique(torch.cat(of_type))
        halo[ntype] = distinct[(distinct < start) | (distinct >= stop)]
    columns = [(t, nodes, True) for t, nodes in inner.items()]
    columns += [(t, nodes, False) for t, nodes in halo.items()]
    *firsts, num_nodes = accumulate((len(nodes) for _, nodes, _ in columns), initial=0)
    local = {(t, is_inner): at for (t, _, is_inner), at in zip(columns, firsts, strict=True)}
    src, dst, edge_ids, edge_types = [], [], [], []
    for number, etype in enumerate(book.canonical_etypes):
        lists = here.edge_lists(etype)
        assert lists is not None
        begin = ids.range_of(node_policy(etype[0]), host)[0]
        nodes = lists.neighbors[:].to(torch.int64)
        near = torch.arange(len(inner[etype[2]])).repeat_interleave(lists.indptr.diff().long())
        if lists.eids is not None:
            order = torch.argsort(lists.eids)
            nodes, near = nodes[order], near[order]
        is_here = (nodes >= begin) & (nodes < begin + len(inner[etype[0]]))
        outside = torch.searchsorted(halo[etype[0]], nodes) + local[etype[0], False]
        src.append(torch.where(is_here, nodes - begin + local[etype[0], True], outside))
        dst.append(near + local[etype[2], True])
        eids = torch.arange(*ids.range_of(edge_policy(etype), host))
        edge_ids.append(book.map_to_homo_eid(eids, etype))
        edge_types.append(torch.full_like(eids, number, dtype=torch.int32))
    part: Graph = graph((torch.cat(src), torch.cat(dst)), num_nodes=num_nodes)
    data = part.ndata
    data["_ID"] = torch.cat([book.map_to_homo_nid(nodes, t) for t, nodes, _ in columns])
    data["_TYPE"] = torch.cat(
        [torch.full_like(n, book.ntypes.index(t), dtype=torch.int32) for t, n, _ in columns]
    )
    data["part_id"] = torch.cat([book.nid2partid(nodes, t) for t, nodes, _ in columns])
    data["inner_node"] = torch.cat([torch.full_like(n, i, dtype=torch.bool) for _, n, i in columns])
    part.edata["_ID"] = torch.cat(edge_ids)
    part.edata["_TYPE"] = torch.cat(edge_types)
    part.edata["inner_edge"] = torch.ones(part.num_edges(), dtype=torch.bool)
    return part


# ---------------------------------------------------------------------------- ids as they are given


def nodes_by_type(g: DistGraph, nodes: NodeIds) -> dict[str, Tensor]:
    """Node ids, which may be given by type, as int64."""
    if not isinstance(nodes, Mapping):
        if len(g.ntypes) != 1:
            raise ValueError(
                f"ids without a type need a graph of one type (it has {g.ntypes}); give a "
                "dictionary from type to ids"
            )
        nodes = {g.ntypes[0]: nodes}
    return {
        checked_ntype(g, t): as_integers(ids, f"nodes of type {t!r}").to("cpu", torch.int64)
        for t, ids in nodes.items()
    }


def checked_ntype(g: DistGraph, ntype: str) -> str:
    """A node type, which must be one of the graph's."""
    if ntype not in g.ntypes:
        raise ValueError(f"no node type {ntype!r}; the graph has {g.ntypes}")
    return ntype


def edges_by_relation(
    g: DistGraph, edges: EdgeIds | Mapping[EType | None, Ids] | None
) -> dict[CanonicalEType, Tensor]:
    """Edge ids, which may be given by relation, as int64; None is no edges."""
    if edges is None:
        return {}
    given: Mapping[Any, Ids] = edges if isinstance(edges, Mapping) else {None: edges}
    by_relation = {}
    for name, eids in given.items():
        etype = g.to_canonical_etype(name)
        what = f"edges of {etype}"
        by_relation[etype] = as_integers(eids, what).to("cpu", torch.int64)
        check_range(by_relation[etype], g.num_edges(etype), what)
    return by_relation


def _options(edge_dir: str, prob: str | None, replace: bool) -> DrawOptions:
    if edge_dir not in ("in", "out"):
        raise ValueError(f"edge_dir must be 'in' or 'out' (got {edge_dir!r})")
    return DrawOptions(replace=replace, weights=prob, edge_dir=edge_dir)  # type: ignore[arg-type]


def _checked_fanout(fanout: object, replace: bool) -> int:
    if isinstance(fanout, bool) or not hasattr(fanout, "__index__") or int(fanout) < -1:
        raise ValueError(
            f"a fanout must be an integer of at least -1, which means all neighbours (got "
            f"{fanout!r})"
        )
    if int(fanout) == -1 and replace:
        raise ValueError("all neighbours (-1) cannot be drawn with replacement; give a number")
    return int(fanout)


def _fanouts(
    g: DistGraph, fanout: int | Mapping[EType, int], replace: bool
) -> dict[CanonicalEType, int]:
    if not isinstance(fanout, Mapping):
        return dict.fromkeys(g.canonical_etypes, _checked_fanout(fanout, replace))
    fanouts = {g.to_canonical_etype(t): _checked_fanout(n, replace) for t, n in fanout.items()}
    missing = [etype for etype in g.canonical_etypes if etype not in fanouts]
    if missing:
        raise ValueError(
            f"a dictionary of fanouts must name every relation (missing {missing}); give 0 for "
            "those that shall not be followed"
        )
    return fanouts


# ---------------------------------------------------------------------------- edges into graphs


def _drawn(
    g: DistGraph,
    requests: Sequence[NeighborRequest],
    options: DrawOptions,
    excluded: Mapping[CanonicalEType, Tensor] | None = None,
) -> dict[CanonicalEType, EdgesWithIds]:
    """Edges drawn for nodes, each request's on its own."""
    sampled = g.graph_store.sample_neighbors(requests, options, excluded)
    drawn = {}
    for request, neighbors in zip(requests, sampled, strict=True):
        assert isinstance(neighbors.eids, Tensor)
        near = request.nodes.repeat_interleave(neighbors.counts)
        sides = _sides(options, near, neighbors.neighbors)
        drawn[request.etype] = *sides, neighbors.eids
    return drawn


def _sides(options: DrawOptions, near: Tensor, far: Tensor) -> tuple[Tensor, Tensor]:
    """Sources and destinations, of the nodes that draw and those that are drawn."""
    return (far, near) if options.edge_dir == "in" else (near, far)


def _drawn_of_all(
    g: DistGraph,
    request: NeighborRequest,
    options: DrawOptions,
    gathered: list[GatheredEdges],
    excluded: Mapping[CanonicalEType, Tensor],
) -> dict[CanonicalEType, EdgesWithIds]:
    """Draw from the edges of several relations at the same nodes as if they were of one.

    Within a node edges come by relation. While they are drawn, those of all relations are numbered
    on: an edge's number is its id and the number of edges of the relations before its own.
    """
    etypes = [edges.etype for edges in gathered]
    starts = list(accumulate(map(g.num_edges, etypes), initial=0))
    order = torch.argsort(torch.cat([edges.row_of_edge for edges in gathered]), stable=True)
    weights = None
    if options.weights is not None:
        # Weights of different precision are compared in the greater one.
        weights = torch.cat([e.weights for e in gathered if e.weights is not None])[order]
    numbered = [edges.eids + start for edges, start in zip(gathered, starts, strict=False)]
    merged = replace(
        gathered[0],
        indptr=torch.stack([edges.indptr for edges in gathered]).sum(0),
        eids=torch.cat(numbered)[order],
        neighbors=torch.cat([edges.neighbors for edges in gathered])[order],
        weights=weights,
    )
    pairs = zip(etypes, starts, strict=False)
    absent = torch.cat([excluded.get(etype, NO_IDS) + start for etype, start in pairs])
    counts, neighbors, numbers = merged.draw(request, options, absent if len(absent) else None)
    src, dst = _sides(options, request.nodes.repeat_interleave(counts), neighbors)
    drawn = {}
    for etype, start, stop in zip(etypes, starts, starts[1:], strict=False):
        chosen = (numbers >= start) & (numbers < stop)
        drawn[etype] = src[chosen], dst[chosen], numbers[chosen] - start
    return drawn


def graph_of_edges(
    g: DistGraph,
    edges: Mapping[CanonicalEType, EdgesWithIds],
    relabel_nodes: bool,
    store_ids: bool,
) -> Graph:
    """A Graph of some edges: of all nodes, or of their ends in order of first occurrence.

    In that order relations come one after another, and sources before destinations.
    """
    none = (NO_IDS, NO_IDS, NO_IDS)
    columns = {etype: edges.get(etype, none) for etype in g.canonical_etypes}
    counts = {ntype: g.num_nodes(ntype) for ntype in g.ntypes}
    nodes: dict[str, Tensor] = {}
    if relabel_nodes:
        sides: dict[str, list[Tensor]] = {ntype: [NO_IDS] for ntype in g.ntypes}
        for etype, (src, dst, _) in columns.items():
            sides[etype[0]].append(src)
            sides[etype[2]].append(dst)
        nodes = {ntype: by_first_occurrence(torch.cat(ids)) for ntype, ids in sides.items()}
        counts = {ntype: len(ids) for ntype, ids in nodes.items()}
    ascending = {ntype: torch.sort(ids) for ntype, ids in nodes.items()}

    def renumbered(ntype: str, ids: Tensor) -> Tensor:
        if not relabel_nodes:
            return ids
        values, places = ascending[ntype]
        return places[torch.searchsorted(values, ids)]

    ends_of = {
        etype: (renumbered(etype[0], src), renumbered(etype[2], dst))
        for etype, (src, dst, _) in columns.items()
    }
    result: Graph = heterograph(ends_of, counts)
    if store_ids:
        for etype, (_, _, eids) in columns.items():
            result.edges[etype].data[EID] = eids
        for ntype, ids in nodes.items():
            result.nodes[ntype].data[NID] = ids
    return result
