# SPDX-License-Identifier: Apache-2.0
"""Graphs divided into parts in memory, and in an order that keeps parts together.

These are the functions of ``dgl.transforms``; `graphshard.partition` divides graphs on disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ...errors import GraphValueError
from ...graph import EID, NID, Graph, graph
from ...partition import UndirectedGraph
from ...partition import metis_partition as assign_parts
from ..graphs._order import reorder_graph as reorder_by_permutation
from ..graphs._products import check_one_relation

__all__ = [
    "metis_partition", "metis_partition_assignment", "partition_graph_with_halo", "reorder_graph",
]  # fmt: skip

_MODES: dict[str, Literal["kway", "recursive"]] = {"k-way": "kway", "recursive": "recursive"}


def metis_partition_assignment(
    g: Graph,
    k: int,
    balance_ntypes: Tensor | Sequence[int] | None = None,
    balance_edges: bool = False,
    mode: str = "k-way",
    objtype: Literal["cut", "vol"] = "cut",
) -> Tensor:
    """The part that METIS puts each node in.

    Args:
        balance_ntypes: ``[num_nodes]`` kinds of nodes; every part gets its share of each.
        objtype: ``"cut"``: few edges between parts. ``"vol"``: few rows to exchange.

    Raises:
        ValueError: a typed graph, ids of another dtype, or an unknown ``mode``.
        MetisError: METIS is not there, or failed.
    """
    check_one_relation(g, "metis_partition_assignment")
    if g.idtype != torch.int64:
        raise GraphValueError(f"METIS takes graphs of int64 ids (got {g.idtype}); use g.long()")
    if mode not in _MODES:
        raise GraphValueError(f"mode must be 'k-way' or 'recursive' (got {mode!r})")
    kinds, weights = [torch.ones(g.num_nodes(), dtype=torch.int64)], []
    if balance_ntypes is not None:
        ntypes = torch.as_tensor(balance_ntypes).cpu()
        kinds = weights = [(ntypes == kind).long() for kind in torch.unique(ntypes)]
    if balance_edges:
        weights = weights + [kind * g.in_degrees().cpu() for kind in kinds]
    src, dst = (ends.cpu() for ends in g.edges(order="eid"))
    parts = assign_parts(
        UndirectedGraph.from_edges([(src, dst)], g.num_nodes()),
        k,
        node_weights=torch.stack(weights, 1).numpy() if weights else None,
        objective=objtype,
        method=_MODES[mode],
    )
    return torch.from_numpy(parts)


def partition_graph_with_halo(
    g: Graph, node_part: Any, extra_cached_hops: int, reshuffle: bool = False
) -> tuple[dict[int, Graph], Tensor | None, Tensor | None]:
    """The graph of each part, with the nodes of other parts around it.

    With ``extra_cached_hops`` 0 a part has the edges between its nodes; from 1 up all edges that
    enter or leave them; and from 2 up the in-edges of the foreign nodes that edges come from,
    ``extra_cached_hops - 1`` times.

    Args:
        reshuffle: Whether nodes and edges are numbered anew, nodes part after part, edges by
            destination.

    Returns:
        Part -> graph, with ``ndata`` ``inner_node``, ``part_id`` and `NID`, ``edata``
        ``inner_edge`` and `EID`, and with ``reshuffle`` ``orig_id`` of both; and with ``reshuffle``
        the old id of each node and edge.
    """
    check_one_relation(g, "partition_graph_with_halo")
    part = torch.as_tensor(np.asarray(node_part)).long().to(g.device)
    if part.shape != (g.num_nodes(),):
        raise GraphValueError(
            f"node_part must have one part for each of {g.num_nodes()} nodes (got shape "
            f"{tuple(part.shape)})"
        )
    old_nodes = old_edges = None
    src, dst = (ends.long() for ends in g.edges(order="eid"))
    if reshuffle:
        old_nodes = torch.sort(part, stable=True).indices
        new_nodes = torch.empty_like(old_nodes)
        new_nodes[old_nodes] = torch.arange(len(part), device=g.device)
        old_edges = torch.sort(new_nodes[dst], stable=True).indices
        src, dst, part = new_nodes[src][old_edges], new_nodes[dst][old_edges], part[old_nodes]
    parts = {}
    for number in range(int(part.max()) + 1 if len(part) else 0):
        sub = _with_halo(g, src, dst, part == number, extra_cached_hops)
        sub.ndata["part_id"] = part[sub.ndata[NID].long()]
        if old_nodes is not None and old_edges is not None:
            sub.ndata["orig_id"] = old_nodes[sub.ndata[NID].long()].to(g.idtype)
            sub.edata["orig_id"] = old_edges[sub.edata[EID].long()].to(g.idtype)
        parts[number] = sub
    return parts, old_nodes, old_edges


def _with_halo(g: Graph, src: Tensor, dst: Tensor, inner: Tensor, num_hops: int) -> Graph:
    """The graph of the inner nodes, in new ids; inner nodes and edges stand first."""
    in_part = inner[src] & inner[dst]
    near = inner.clone()
    for _ in range(num_hops):
        in_part = near[dst]
        near[src[in_part]] = True
    if num_hops >= 1:
        in_part = in_part | inner[src]
    near = torch.zeros_like(inner)
    near[src[in_part]] = near[dst[in_part]] = True
    nodes = torch.cat([inner.nonzero(), (near & ~inner).nonzero()]).squeeze(1)
    inner_edges = in_part & inner[dst]
    edges = torch.cat([inner_edges.nonzero(), (in_part & ~inner_edges).nonzero()]).squeeze(1)
    new_ids = torch.empty_like(inner, dtype=torch.int64)
    new_ids[nodes] = torch.arange(len(nodes), device=nodes.device)
    ends = (new_ids[src[edges]], new_ids[dst[edges]])
    sub = graph(ends, num_nodes=len(nodes), idtype=g.idtype, device=g.device)
    sub.ndata[NID], sub.edata[EID] = nodes.to(g.idtype), edges.to(g.idtype)
    sub.ndata["inner_node"] = inner[nodes].to(torch.int32)
    sub.edata["inner_edge"] = inner[dst[edges]].to(torch.int8)
    return sub


def metis_partition(
    g: Graph,
    k: int,
    extra_cached_hops: int = 0,
    reshuffle: bool = False,
    balance_ntypes: Tensor | Sequence[int] | None = None,
    balance_edges: bool = False,
    mode: str = "k-way",
) -> dict[int, Graph]:
    """`partition_graph_with_halo` of the parts of `metis_partition_assignment`."""
    parts = metis_partition_assignment(g, k, balance_ntypes, balance_edges, mode)
    return partition_graph_with_halo(g, parts, extra_cached_hops, reshuffle)[0]


def reorder_nodes(g: Graph, new_node_ids: Any) -> Graph:
    """The graph with new ids, ``[num_nodes]``; its one feature is ``orig_id``, the old ids."""
    check_one_relation(g, "reorder_nodes")
    new = torch.as_tensor(np.asarray(new_node_ids)).long().to(g.device)
    order = torch.sort(new)
    if not torch.equal(order.values, torch.arange(g.num_nodes(), device=g.device)):
        raise GraphValueError(f"new ids must be each of 0 to {g.num_nodes() - 1} once")
    src, dst = g.edges(order="eid")
    ends = (new[src.long()], new[dst.long()])
    new_graph = graph(ends, num_nodes=g.num_nodes(), idtype=g.idtype, device=g.device)
    new_graph.ndata["orig_id"] = order.indices.to(g.idtype)
    return new_graph


def reorder_graph(
    g: Graph,
    node_permute_algo: str | None = None,
    edge_permute_algo: str = "src",
    store_ids: bool = True,
    permute_config: Mapping[str, Any] | None = None,
) -> Graph:
    """`graphshard.dgl.reorder_graph`, which also puts the nodes of one METIS part together.

    Args:
        node_permute_algo: As there; or ``"metis"``, with ``permute_config["k"]`` parts.
    """
    config = dict(permute_config or {})
    if node_permute_algo == "metis":
        if "k" not in config:
            raise GraphValueError("permute_config must hold the number of parts 'k' for 'metis'")
        parts = metis_partition_assignment(g.long(), config["k"])
        node_permute_algo = "custom"
        config["nodes_perm"] = torch.sort(parts, stable=True).indices
    return reorder_by_permutation(g, node_permute_algo, edge_permute_algo, store_ids, config)
