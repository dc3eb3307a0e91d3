# SPDX-License-Identifier: Apache-2.0
"""Parts of a graph chosen by hops from some nodes, or by type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..._base.typing import Device
from ...errors import GraphValueError
from ...graph import Graph, node_subgraph
from ...graph.structure import id_tensor
from ...graph.transforms import check_plain
from ...sampling.graph_store import EdgeDir, ends

__all__ = ["edge_type_subgraph", "khop_in_subgraph", "khop_out_subgraph", "node_type_subgraph"]


def khop_in_subgraph(
    graph: Graph,
    nodes: Any,
    k: int,
    *,
    relabel_nodes: bool = True,
    store_ids: bool = True,
    output_device: Device | None = None,
) -> Any:
    """The graph of all nodes from which some nodes are reached in at most ``k`` steps.

    Args:
        relabel_nodes: Whether to keep only those nodes, by ascending id; if not, all nodes stay
            and only edges are left out.

    Returns:
        The subgraph; with ``relabel_nodes`` a pair of it and the ids in it of ``nodes``, in the
        form of ``nodes``.
    """
    return _within_hops(graph, nodes, k, "in", relabel_nodes, store_ids, output_device)


def khop_out_subgraph(
    graph: Graph,
    nodes: Any,
    k: int,
    *,
    relabel_nodes: bool = True,
    store_ids: bool = True,
    output_device: Device | None = None,
) -> Any:
    """The graph of all nodes reached in at most ``k`` steps; see `khop_in_subgraph`."""
    return _within_hops(graph, nodes, k, "out", relabel_nodes, store_ids, output_device)


def _within_hops(
    g: Graph,
    nodes: Any,
    k: int,
    direction: EdgeDir,
    relabel_nodes: bool,
    store_ids: bool,
    output_device: Device | None,
) -> Any:
    name = f"khop_{direction}_subgraph"
    check_plain(g, name)
    if k < 0:
        raise GraphValueError(f"k of {name} must not be negative (got {k})")
    typed = isinstance(nodes, Mapping)
    given = nodes if typed else {g.ntypes[0]: nodes}
    if not typed and len(g.ntypes) > 1:
        raise GraphValueError(f"nodes must be a dict of node types, since the graph has {g.ntypes}")
    seeds = {
        ntype: id_tensor(ids, f"nodes of type {ntype!r}", g.idtype, g.device)
        for ntype, ids in given.items()
    }
    reached_ids = {ntype: [ids] for ntype, ids in seeds.items()}
    frontier = seeds
    edges, end = (g.in_edges, 0) if direction == "in" else (g.out_edges, 1)
    for _ in range(k):
        reached: dict[str, list[Tensor]] = {}
        for etype in g.canonical_etypes:
            near, far = ends(etype, direction)
            if near in frontier:
                neighbors = edges(frontier[near], etype=etype)[end]
                reached.setdefault(far, []).append(neighbors)
        frontier = {ntype: torch.unique(torch.cat(ids)) for ntype, ids in reached.items()}
        for ntype, ids in frontier.items():
            reached_ids.setdefault(ntype, []).append(ids)
    node_ids, new_ids = {}, {}
    for ntype, parts in reached_ids.items():
        node_ids[ntype], new_ids[ntype] = torch.unique(torch.cat(parts), return_inverse=True)
    sub = node_subgraph(
        g, node_ids, relabel_nodes=relabel_nodes, store_ids=store_ids, output_device=output_device
    )
    if not relabel_nodes:
        return sub
    where = {t: new_ids[t][: len(ids)].to(g.idtype).to(sub.device) for t, ids in seeds.items()}
    return sub, where if typed else where[g.ntypes[0]]


def node_type_subgraph(
    graph: Graph, ntypes: Iterable[str], output_device: Device | None = None
) -> Graph:
    """The graph of some node types, and of all relations between them.

    Features are shared: what is set on one graph is seen on the other.
    """
    check_plain(graph, "node_type_subgraph")
    chosen = {graph.ntypes[graph.get_ntype_id(ntype)] for ntype in ntypes}
    etypes = [e for e in graph.canonical_etypes if {e[0], e[2]} <= chosen]
    return _of_types(graph, chosen, etypes).to(output_device)


def edge_type_subgraph(
    graph: Graph, etypes: Iterable[Any], output_device: Device | None = None
) -> Graph:
    """The graph of some relations, and of the node types that they join.

    Features are shared as by `node_type_subgraph`.
    """
    check_plain(graph, "edge_type_subgraph")
    chosen = list(dict.fromkeys(graph.to_canonical_etype(etype) for etype in etypes))
    ntypes = {ntype for source, _, destination in chosen for ntype in (source, destination)}
    return _of_types(graph, ntypes, chosen).to(output_device)


def _of_types(g: Graph, ntypes: set[str], etypes: list[Any]) -> Graph:
    if not etypes:
        raise GraphValueError(
            f"a graph needs at least one relation, and there is none between the node types "
            f"{sorted(ntypes)}; the graph has {g.canonical_etypes}"
        )
    counts = {ntype: g.num_nodes(ntype) for ntype in g.ntypes if ntype in ntypes}
    new = Graph(counts, {etype: g.adjacency(etype) for etype in etypes})
    new._share_frames(g)
    return new
