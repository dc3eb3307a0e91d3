# SPDX-License-Identifier: Apache-2.0
"""A sharded graph in homogenised ids, and its shards, as SAR has them.

SAR numbers the nodes of all types together, and keeps the in-edges of a rank as one shard for each
part that they come from. Both are made when first asked for; nothing else here uses them.

[Note: homogenised rows]
    The owned nodes of a part are its rows, types one after another, each in the order of its ids:
    the order of ``node_features[NTYPE]``, and of what `suffix_key_lookup` expands to all. Row ``r``
    of part ``p`` has the homogenised id ``node_ranges[p][0] + r``; see `RangePartitionBook`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._base.typing import DEFAULT_CANONICAL_ETYPE, DEFAULT_NTYPE, CanonicalEType
from ..graph import EID, ETYPE, NID, NTYPE, Block, Frame, Graph, create_block
from ..graph import graph as make_graph
from ..graph.structure import Schema
from .topology import LocalEdges, OriginalIds, ShardStructure, narrow

if TYPE_CHECKING:
    from ._graph_shard_manager import GraphShardManager


@dataclass(eq=False)
class GraphShard:
    """The in-edges of this rank's nodes whose sources one part owns.

    Attributes:
        graph: From the sources to the destinations, each distinct and by ascending id. Its
            ``edata`` has what the sharded graph's has, and `ETYPE` where there are several
            relations, whose edges then come one after another.
        unique_src_nodes: Homogenised ids of the sources, ``[graph.num_src_nodes()]``.
        unique_tgt_nodes: Homogenised ids of the destinations, ``[graph.num_dst_nodes()]``.
        src_range: Homogenised ids that the part owns, ``(start, end)``.
        tgt_range: Homogenised ids that this rank owns.
        edge_type_names: Names of the relations.
        edge_ids: Which edges of the sharded graph these are: rows of its ``edata``; where it has
            several relations, of that of `GraphShardManager.homogenised`.
    """

    graph: Block
    unique_src_nodes: Tensor
    unique_tgt_nodes: Tensor
    src_range: tuple[int, int]
    tgt_range: tuple[int, int]
    edge_type_names: list[str]
    edge_ids: Tensor


@dataclass(frozen=True)
class HomogenisedEdges:
    """All in-edges of this rank's nodes, between homogenised rows.

    Args:
        edges: Ordered by part, then relation, where there are several relations.
        relation: Number of the relation of each, int64.
        row: Its row in the ``edata`` of that relation.
    """

    edges: LocalEdges
    relation: Tensor
    row: Tensor


def homogenised_graph(graph: GraphShardManager) -> GraphShardManager:
    """A graph of one relation; see `GraphShardManager.homogenised`. Collective."""
    if not graph._has_edges_of_book:
        graph._unsupported(
            "a homogenised form once its self loops were changed",
            "change those of homogenised() instead",
        )
    book, rank, device = graph._book(), graph._structure.rank, graph.device
    homogenised = graph._homogenised_edges
    start, stop = graph.tgt_node_range
    rows = {DEFAULT_NTYPE: torch.arange(stop - start, device=device)}
    num = {DEFAULT_NTYPE: stop - start}
    structure = ShardStructure(
        {DEFAULT_CANONICAL_ETYPE: homogenised.edges}, num, num, device, graph._structure.group
    )
    nodes = Frame(stop - start, device, "nodes")
    nodes[NID] = torch.arange(start, stop, device=device)
    nodes[NTYPE] = book.map_to_per_ntype(nodes[NID])[0]
    node_frames = [nodes]
    edges = Frame(homogenised.edges.num_edges, device, "edges", "edge")
    edges[ETYPE] = homogenised.relation
    edge_ids = [
        book.map_to_homo_eid(book.partid2eids(rank, etype), etype).to(device)
        for etype in graph.canonical_etypes
    ]
    edges[EID] = _per_edge(homogenised, edge_ids)
    schema = Schema.of_graph([DEFAULT_NTYPE], [DEFAULT_CANONICAL_ETYPE])
    kind = structure, schema, graph._mode, (node_frames, node_frames, [edges]), False
    return graph._made(*kind, rows, rows, _original_ids(graph, homogenised))


def _original_ids(graph: GraphShardManager, homogenised: HomogenisedEdges) -> OriginalIds:
    """Ids before partitioning, those of each type after those of the types before."""
    book, original, etypes = graph._book(), graph._original, graph.canonical_etypes
    *first_nodes, _ = accumulate(map(book.num_nodes, book.ntypes), initial=0)
    *first_edges, _ = accumulate(map(book.num_edges, etypes), initial=0)
    starts = zip(book.ntypes, first_nodes, strict=True)
    nodes = [original.nodes[t] + first for t, first in starts if t in original.nodes]
    edges = [original.edges[t] + first for t, first in zip(etypes, first_edges, strict=True)]
    return OriginalIds(
        {DEFAULT_NTYPE: torch.cat(nodes)},
        {DEFAULT_CANONICAL_ETYPE: _per_edge(homogenised, edges)},
    )


def _per_edge(homogenised: HomogenisedEdges, by_relation: list[Tensor]) -> Tensor:
    """Values of all edges, from those of each relation."""
    starts = torch.tensor([0, *(len(rows) for rows in by_relation)]).cumsum(0)
    starts = starts.to(homogenised.row.device)
    return torch.cat(by_relation)[starts[homogenised.relation] + homogenised.row]


def homogenised_edges(graph: GraphShardManager) -> HomogenisedEdges:
    """All in-edges of this rank's nodes."""
    etypes = graph.canonical_etypes
    if graph.is_block and (len(graph._schema.ntypes) > 2 or len(etypes) > 1):
        graph._unsupported(
            "a homogenised form as a message flow graph of several relations",
            "use its relations one by one, or the full graph",
        )
    edges = [graph._structure.edges[etype] for etype in etypes]
    ends = [_ends(graph, etype) for etype in etypes]
    parts = torch.cat([e.src_part for e in edges])
    relation = torch.cat(
        [torch.full_like(e.src, r, dtype=torch.int64) for r, e in enumerate(edges)]
    )
    row = torch.cat([torch.arange(e.num_edges, device=graph.device) for e in edges])
    src, dst = (torch.cat([end[side] for end in ends]) for side in (0, 1))
    if len(etypes) > 1:  # edges of one relation keep their order, which is that of its ids
        order = torch.sort(parts, stable=True).indices
        parts, relation, row, src, dst = (x[order] for x in (parts, relation, row, src, dst))
    num_dst = graph.num_dst_nodes()
    if not graph.is_block:
        start, stop = graph.tgt_node_range
        num_dst = stop - start
    longest = max(stop - start for start, stop in graph.node_ranges)
    src, dst = narrow(src, longest), narrow(dst, num_dst)
    return HomogenisedEdges(LocalEdges(parts, src, dst, num_dst), relation, row)


def _ends(graph: GraphShardManager, etype: CanonicalEType) -> tuple[Tensor, Tensor]:
    """Homogenised rows of the sources, on their parts, and of the destinations here."""
    edges = graph._structure.edges[etype]
    src, dst = edges.src.long(), edges.dst.long()
    if graph.is_block:
        return src, dst
    book = graph._book()
    first = torch.tensor([start for start, _ in graph.node_ranges])
    blocks = {t: torch.tensor(book.node_map()[t])[:, 0] - first for t in (etype[0], etype[2])}
    src = src + blocks[etype[0]].to(graph.device)[edges.src_part.long()]
    return src, dst + int(blocks[etype[2]][graph._structure.rank])


def shard_of(graph: GraphShardManager, part: int) -> GraphShard:
    """The edges that come from one part."""
    homogenised, ranges = graph._homogenised_edges, graph.node_ranges
    here = (homogenised.edges.src_part == part).nonzero().view(-1)
    src, src_positions = torch.unique(homogenised.edges.src[here], return_inverse=True)
    dst, dst_positions = torch.unique(homogenised.edges.dst[here], return_inverse=True)
    block = create_block((src_positions, dst_positions), src.numel(), dst.numel())
    if len(graph.canonical_etypes) > 1:
        block.edata[ETYPE] = homogenised.relation[here]
    else:
        for name, values in graph._edge_frames[0].items():
            block.edata[name] = values[here]
    return GraphShard(
        block,
        src.long() + ranges[part][0],
        dst.long() + graph.tgt_node_range[0],
        ranges[part],
        graph.tgt_node_range,
        list(graph.etypes),
        here,
    )


def graph_to_sample(graph: GraphShardManager) -> Graph:
    """This rank's in-edges between homogenised ids, as a graph that has all nodes."""
    if graph.is_block:
        graph._unsupported("a graph to sample from as a message flow graph", "use the full one")
    homogenised, ranges = graph._homogenised_edges, graph.node_ranges
    first = torch.tensor([start for start, _ in ranges], device=graph.device)
    ends = (
        homogenised.edges.src + first[homogenised.edges.src_part.long()],
        homogenised.edges.dst.long() + graph.tgt_node_range[0],
    )
    whole: Graph = make_graph(ends, num_nodes=ranges[-1][1])
    if len(graph.canonical_etypes) > 1:
        whole.edata[ETYPE] = homogenised.relation
    else:
        whole.edata.update(graph._edge_frames[0])
    return whole
