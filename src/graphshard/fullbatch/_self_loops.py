# SPDX-License-Identifier: Apache-2.0
"""Self loops of a sharded graph, added or dropped where their nodes are.

A self loop begins and ends on one rank, so no edge travels. Which remote rows are needed may
change, so making the graph is collective; the new structure is kept with the old one, for layers
that change self loops whenever they run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._base.typing import CanonicalEType
from ..comm import all_reduce
from ..errors import GraphTypeError, GraphValueError
from ..graph import EID, NID, Frame
from ..ops import gspmm
from .lazy import DeferredEdges
from .topology import LocalEdges, OriginalIds, ShardStructure

if TYPE_CHECKING:
    from ._graph import GraphShardManager

REDUCES = ("sum", "mean", "max", "min")


def changed_self_loops(
    graph: GraphShardManager, etype: Any, adds: bool, names: Any = None, fill_data: Any = 1.0
) -> tuple[ShardStructure, CanonicalEType, Frame, OriginalIds]:
    """What a graph with other self loops is made of.

    Args:
        graph: The graph.
        etype: The relation, where there are several.
        adds: Add a self loop to every node; otherwise drop all.
        names: As ``edge_feat_names`` of `GraphShardManager.add_self_loop`.
        fill_data: As there.

    Returns:
        Structure, the relation, its edge frame, and the ids before partitioning.
    """
    chosen = _checked_relation(graph, etype, "add_self_loop" if adds else "remove_self_loop")
    old = graph._structure.edges[chosen]
    frame = graph._edge_frames[graph._schema.relation(chosen)]
    fields = {
        name: value.materialize() if isinstance(value, DeferredEdges) else value
        for name, value in ((name, frame[name]) for name in frame)
    }
    ids = graph._original.edges[chosen]
    if adds:
        added = _filled(graph, chosen, fields, names, fill_data)
        first = _first_free_id(graph, ids)
        own = graph._original.nodes[chosen[0]]
        ids = torch.cat([ids, first + own])
        fields = {name: torch.cat([value, added[name]]) for name, value in fields.items()}
        if EID in fields and NID in graph._src_frames[graph._schema.src_id(chosen[0])]:
            global_ids = graph._src_frames[graph._schema.src_id(chosen[0])][NID]
            start = _first_free_id(graph, fields[EID][: old.num_edges])
            fields[EID] = torch.cat([fields[EID][: old.num_edges], start + global_ids])
        structure = _kept(graph, chosen, "added", lambda: _with_loops(graph, chosen))
    else:
        kept = (~_is_loop(graph, old)).nonzero().view(-1)
        ids = ids[kept]
        fields = {name: value.index_select(0, kept) for name, value in fields.items()}
        rows = LocalEdges(old.src_part[kept], old.src[kept], old.dst[kept], old.num_dst)
        structure = _kept(graph, chosen, "dropped", lambda: rows)
    changed = Frame(structure.edges[chosen].num_edges, graph.device, frame.what, "edge")
    for name, value in fields.items():
        changed.set(name, value, "edge")
    original = OriginalIds(graph._original.nodes, {**graph._original.edges, chosen: ids})
    return structure, chosen, changed, original


def _checked_relation(graph: GraphShardManager, etype: Any, name: str) -> CanonicalEType:
    if graph.is_block:
        graph._unsupported(f"{name} on a message flow graph", "make it of a graph that has them")
    chosen = graph.to_canonical_etype(etype)
    if chosen[0] != chosen[2]:
        raise GraphValueError(
            f"{name} takes relations from a node type to itself (got {chosen}); name one that is"
        )
    return chosen


def _filled(
    graph: GraphShardManager,
    etype: CanonicalEType,
    fields: dict[str, Tensor],
    names: Any,
    fill: Any,
) -> dict[str, Tensor]:
    """Values of new self loops, one per node."""
    if isinstance(fill, str) and fill not in REDUCES:
        raise GraphValueError(f"fill_data must be a number or one of {REDUCES} (got {fill!r})")
    if not isinstance(fill, int | float | str):
        raise GraphTypeError(f"fill_data must be a number or one of {REDUCES} (got {type(fill)})")
    filled = set(fields) if names is None else set(names)
    for name in sorted(filled - set(fields)):
        raise KeyError(f"no edge feature {name!r} on {etype}; there are {sorted(fields)}")
    num_nodes, values = graph._structure.num_src[etype[0]], {}
    for name, old in fields.items():
        added = old.new_zeros((num_nodes, *old.shape[1:]))
        if name in filled and isinstance(fill, str) and name != EID:
            adjacency = graph._structure.local_adjacency(etype)
            added = gspmm(adjacency, "copy_rhs", fill, None, old)
        elif name in filled and not isinstance(fill, str):
            added = torch.full_like(added, fill)
        values[name] = added
    return values


def _is_loop(graph: GraphShardManager, edges: LocalEdges) -> Tensor:
    return (edges.src_part == graph.rank) & (edges.src == edges.dst)


def _with_loops(graph: GraphShardManager, etype: CanonicalEType) -> LocalEdges:
    old = graph._structure.edges[etype]
    rows = torch.arange(old.num_dst, device=old.src.device)
    return LocalEdges(
        torch.cat([old.src_part, torch.full_like(rows, graph.rank).to(old.src_part.dtype)]),
        torch.cat([old.src, rows.to(old.src.dtype)]),
        torch.cat([old.dst, rows.to(old.dst.dtype)]),
        old.num_dst,
    )


def _first_free_id(graph: GraphShardManager, ids: Tensor) -> int:
    """One more than the largest id on any rank."""
    largest = torch.tensor([int(ids.max()) if ids.numel() else -1])
    return int(all_reduce(largest, "max", group=graph.group)) + 1


def _kept(graph: GraphShardManager, etype: CanonicalEType, what: str, edges: Any) -> ShardStructure:
    old = graph._structure
    if (what, etype) not in old.changed:
        old.changed[what, etype] = ShardStructure(
            {**old.edges, etype: edges()},
            old.num_src,
            old.num_dst,
            old.device,
            old.group,
            old.constants,
        )
    return old.changed[what, etype]
