# SPDX-License-Identifier: Apache-2.0
"""HomogenisedIds: a sharded graph in homogenised ids, and its shards, as SAR has them.

SAR numbers the nodes of all types together, and keeps the in-edges of a rank as one shard for each
part that they come from. Both are made when first asked for; nothing else here uses them.

[Note: homogenised rows]
    The owned nodes of a part are its rows, types one after another, each in the order of its ids:
    the order of ``node_features[NTYPE]``, and of what `suffix_key_lookup` expands to all. Row ``r``
    of part ``p`` has the homogenised id ``node_ranges[p][0] + r``; see `RangePartitionBook`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._base.typing import DEFAULT_CANONICAL_ETYPE, DEFAULT_NTYPE, CanonicalEType
from ..graph import EID, ETYPE, NID, NTYPE, Block, Frame, Graph, create_block
from ..graph import graph as make_graph
from ..graph.frame import NodeSpaceView
from ..graph.structure import Schema
from ..partition import RangePartitionBook
from ._localized import GlobalFacts
from ._partition_data import owned_ranges
from .topology import LocalEdges, OriginalIds, ShardStructure, narrow

if TYPE_CHECKING:
    from ._graph import GraphShardManager
    from .execution import AggregationMode


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
class _Edges:
    """All in-edges of this rank's nodes, between homogenised rows.

    Args:
        edges: Ordered by part, then relation, where there are several relations.
        relation: Number of the relation of each, int64.
        row: Its row in the ``edata`` of that relation.
    """

    edges: LocalEdges
    relation: Tensor
    row: Tensor


class HomogenisedIds(GlobalFacts):
    """What a `GraphShardManager` says in homogenised ids, and of its shards, under SAR's names."""

    _input_nodes: dict[str, Tensor]
    _seeds: dict[str, Tensor]
    _original: OriginalIds
    _mode: AggregationMode
    partition_book: RangePartitionBook | None
    #: Whether its edges are those that the book numbers; self loops may have been changed.
    _has_edges_of_book = True

    # ------------------------------------------------------------------ types and counts

    batch_size = 1

    def batch_num_nodes(self, ntype: str | None = None) -> Tensor:
        """Not offered: a rank has some nodes of one graph, not all nodes of some graphs."""
        self._unsupported(
            "batch_num_nodes",
            "num_nodes() is how many nodes are here, num_nodes_global() how many there are; layers "
            "of DGL that ask for it run after patch_dgl()",
        )

    @property
    def ntypes(self) -> list[str]:
        """Node types, each once."""
        return list(dict.fromkeys(self._schema.ntypes))

    def num_nodes(self, ntype: str | None = None) -> int:
        """Nodes of a type, or of all, that this rank has rows of.

        On a message flow graph a node that is a source and a destination counts once.
        """
        if not self.is_block:
            return super().num_nodes(ntype)
        if ntype is None:
            return sum(self.num_nodes(t) for t in self.ntypes)
        sides = [rows[ntype] for rows in (self._input_nodes, self._seeds) if ntype in rows]
        return torch.unique(torch.cat(sides)).numel() if sides else super().num_nodes(ntype)

    number_of_nodes = num_nodes

    @property
    def nodes(self) -> NodeSpaceView:
        """``nodes(T)``: rows among this rank's nodes of a type. ``nodes[T].data``: features."""
        return OwnedRowsView(self, "node")

    @property
    def srcnodes(self) -> NodeSpaceView:
        """As `nodes`; on a message flow graph the rows whose features are its inputs."""
        return OwnedRowsView(self, "src")

    @property
    def dstnodes(self) -> NodeSpaceView:
        """As `nodes`; on a message flow graph the rows that its outputs belong to."""
        return OwnedRowsView(self, "dst")

    @property
    def src_is_tgt(self) -> bool:
        """Whether sources and destinations are the same rows."""
        return not self.is_block

    @property
    def tgt_in_src(self) -> bool:
        """Whether every destination is a source too, and comes first among them."""
        pairs = [(self._input_nodes.get(t), rows) for t, rows in self._seeds.items()]
        return all(
            inputs is not None and torch.equal(inputs[: rows.numel()], rows)
            for inputs, rows in pairs
        )

    @property
    def node_ranges(self) -> list[tuple[int, int]]:
        """Homogenised ids that each part owns, ``[start, end)``."""
        return owned_ranges(self._book())

    @property
    def tgt_node_range(self) -> tuple[int, int]:
        """Homogenised ids that this rank owns."""
        return self.node_ranges[self._structure.rank]

    @property
    def ntypes_global(self) -> list[str]:
        """Node types of the whole graph."""
        return self._book().ntypes

    @property
    def etypes_global(self) -> list[str]:
        """Relation names of the whole graph."""
        return self._book().etypes

    @property
    def canonical_etypes_global(self) -> list[CanonicalEType]:
        """Relations of the whole graph."""
        return self._book().canonical_etypes

    def num_nodes_global(self, ntype: str | None = None) -> int:
        """Nodes of a type, or of all, of the whole graph, on all ranks."""
        return self._book().num_nodes(ntype)

    def num_edges_global(self, etype: Any = None) -> int:
        """Edges of a relation, or of all, of the whole graph, on all ranks."""
        if self._has_edges_of_book:
            return self._book().num_edges(etype)
        return sum(self._structure.global_num_edges(t) for t in self._etypes_of(etype))

    number_of_nodes_global = num_nodes_global
    number_of_edges_global = num_edges_global

    def _book(self) -> RangePartitionBook:
        if self.partition_book is None:
            self._unsupported(
                "ids of all parts without a partition book",
                "make the graph with construct_full_graph or construct_mfgs",
            )
        return self.partition_book

    # ------------------------------------------------------------------ one type

    def homogenised(self) -> GraphShardManager:
        """The same graph with one node type and one relation; itself, if it has one relation.

        Rows are those of [Note: homogenised rows]. Edges come by the part of their source, then by
        relation: in the order of `graph_shards` one after another. ``ndata`` has `NTYPE` and
        `NID`, ``edata`` has `ETYPE` and `EID`, in homogenised ids. It is made once; making it is
        collective.

        Raises:
            NotImplementedError: A message flow graph of several relations.
        """
        if len(self.canonical_etypes) == 1:
            return self  # type: ignore[return-value]
        return self._made_homogenised

    @cached_property
    def _made_homogenised(self) -> GraphShardManager:
        if not self._has_edges_of_book:
            self._unsupported(
                "a homogenised form once its self loops were changed",
                "change those of homogenised() instead",
            )
        book, rank, device = self._book(), self._structure.rank, self.device
        found = self._homogenised_edges
        start, stop = self.tgt_node_range
        rows = {DEFAULT_NTYPE: torch.arange(stop - start, device=device)}
        num = {DEFAULT_NTYPE: stop - start}
        structure = ShardStructure(
            {DEFAULT_CANONICAL_ETYPE: found.edges}, num, num, device, self._structure.group
        )
        nodes = Frame(stop - start, device, "nodes", "node")
        ids = torch.arange(start, stop, device=device)
        nodes.set(NID, ids, "node")
        nodes.set(NTYPE, book.map_to_per_ntype(ids)[0], "node")
        node_frames = [nodes]
        edges = Frame(found.edges.num_edges, device, "edges", "edge")
        edges.set(ETYPE, found.relation, "edge")
        edge_ids = [
            book.map_to_homo_eid(book.partid2eids(rank, etype), etype).to(device)
            for etype in self.canonical_etypes
        ]
        edges.set(EID, self._per_edge(found, edge_ids), "edge")
        return type(self)(  # type: ignore[call-arg, return-value]
            structure,
            Schema.of_graph([DEFAULT_NTYPE], [DEFAULT_CANONICAL_ETYPE]),
            replace(self._mode),
            (node_frames, node_frames, [edges]),
            is_block=False,
            input_nodes=rows,
            seeds=rows,
            original=self._homogenised_original(found),
            partition_book=self.partition_book,
        )

    def _homogenised_original(self, found: _Edges) -> OriginalIds:
        """Ids before partitioning, those of each type after those of the types before."""
        book, nodes, edges = self._book(), [], []
        first = 0
        for ntype in book.ntypes:
            known = self._original.nodes.get(ntype)
            nodes.append(torch.empty(0, dtype=torch.int64) if known is None else known + first)
            first += book.num_nodes(ntype)
        first = 0
        for etype in self.canonical_etypes:
            edges.append(self._original.edges[etype] + first)
            first += book.num_edges(etype)
        return OriginalIds(
            {DEFAULT_NTYPE: torch.cat([ids.to(self.device) for ids in nodes])},
            {DEFAULT_CANONICAL_ETYPE: self._per_edge(found, edges)},
        )

    @staticmethod
    def _per_edge(found: _Edges, by_relation: list[Tensor]) -> Tensor:
        """Values of all edges, from those of each relation."""
        starts = torch.tensor([0, *(len(rows) for rows in by_relation)]).cumsum(0)
        starts = starts.to(found.row.device)
        return torch.cat(by_relation)[starts[found.relation] + found.row]

    @cached_property
    def _homogenised_edges(self) -> _Edges:
        etypes = self.canonical_etypes
        if (self.is_block and len(self._schema.ntypes) > 2) or (self.is_block and len(etypes) > 1):
            self._unsupported(
                "a homogenised form as a message flow graph of several relations",
                "use its relations one by one, or the full graph",
            )
        edges = [self._structure.edges[etype] for etype in etypes]
        ends = [self._homogenised_ends(etype) for etype in etypes]
        parts = torch.cat([e.src_part for e in edges])
        relation = torch.cat(
            [torch.full_like(e.src, r, dtype=torch.int64) for r, e in enumerate(edges)]
        )
        row = torch.cat([torch.arange(e.num_edges, device=self.device) for e in edges])
        src, dst = (torch.cat([end[side] for end in ends]) for side in (0, 1))
        if len(etypes) > 1:  # edges of one relation keep their order, which is that of its ids
            order = torch.sort(parts, stable=True).indices
            parts, relation, row, src, dst = (x[order] for x in (parts, relation, row, src, dst))
        num_dst = self.num_dst_nodes()
        if not self.is_block:
            start, stop = self.tgt_node_range
            num_dst = stop - start
        longest = max(stop - start for start, stop in self.node_ranges)
        src, dst = narrow(src, longest), narrow(dst, num_dst)
        return _Edges(LocalEdges(parts, src, dst, num_dst), relation, row)

    def _homogenised_ends(self, etype: CanonicalEType) -> tuple[Tensor, Tensor]:
        """Homogenised rows of the sources, on their parts, and of the destinations here."""
        edges = self._structure.edges[etype]
        src, dst = edges.src.long(), edges.dst.long()
        if self.is_block:
            return src, dst
        book = self._book()
        first = torch.tensor([start for start, _ in self.node_ranges])
        blocks = {t: torch.tensor(book.node_map()[t])[:, 0] - first for t in (etype[0], etype[2])}
        src = src + blocks[etype[0]].to(self.device)[edges.src_part.long()]
        return src, dst + int(blocks[etype[2]][self._structure.rank])

    # ------------------------------------------------------------------ shards

    @cached_property
    def graph_shards(self) -> list[GraphShard]:
        """One `GraphShard` for each part that edges may come from. Made once.

        Their ``edata`` is a copy: what is set or deleted there changes nothing else.
        """
        return [self._shard(part) for part in range(self._structure.world_size)]

    @property
    def graph_shard_managers(self) -> dict[int, GraphShardManager]:
        """The graph of each relation, by the relation's number."""
        return {r: self[etype] for r, etype in enumerate(self.canonical_etypes)}  # type: ignore[misc]

    def _shard(self, part: int) -> GraphShard:
        found, ranges = self._homogenised_edges, self.node_ranges
        here = (found.edges.src_part == part).nonzero().view(-1)
        src, src_places = torch.unique(found.edges.src[here], return_inverse=True)
        dst, dst_places = torch.unique(found.edges.dst[here], return_inverse=True)
        block = create_block((src_places, dst_places), src.numel(), dst.numel())
        if len(self.canonical_etypes) > 1:
            block.edata[ETYPE] = found.relation[here]
        else:
            for name, values in self._edge_frames[0].items():
                block.edata[name] = values[here]
        return GraphShard(
            block,
            src.long() + ranges[part][0],
            dst.long() + self.tgt_node_range[0],
            ranges[part],
            self.tgt_node_range,
            list(self.etypes),
            here,
        )

    @cached_property
    def sampling_graph(self) -> Graph:
        """This rank's in-edges between homogenised ids, as a graph that has all nodes. Made once.

        It holds a number per node of the whole graph. `DataLoader` does not need it.

        Raises:
            NotImplementedError: A message flow graph.
        """
        if self.is_block:
            self._unsupported("a graph to sample from as a message flow graph", "use the full one")
        found, ranges = self._homogenised_edges, self.node_ranges
        first = torch.tensor([start for start, _ in ranges], device=self.device)
        ends = (
            found.edges.src + first[found.edges.src_part.long()],
            found.edges.dst.long() + self.tgt_node_range[0],
        )
        whole: Graph = make_graph(ends, num_nodes=ranges[-1][1])
        if len(self.canonical_etypes) > 1:
            whole.edata[ETYPE] = found.relation
        else:
            whole.edata.update(self._edge_frames[0])
        return whole


class OwnedRowsView(NodeSpaceView):
    """As its base; the ids are rows among the nodes of a type that this rank owns."""

    __slots__ = ()

    def __call__(self, ntype: str | None = None) -> Tensor:
        """Rows of a type: of the sources, of the destinations, or, distinct, of both."""
        graph: Any = self._graph
        if ntype is None and len(graph.ntypes) == 1:
            (ntype,) = graph.ntypes
        side, index = self._place(ntype)
        types = graph._schema.dsttypes if side == "dst" else graph._schema.srctypes
        rows: Tensor = (graph._seeds if side == "dst" else graph._input_nodes)[types[index]]
        if self._view == "node" and graph.is_block and types[index] in graph._seeds:
            rows = torch.unique(torch.cat([rows, graph._seeds[types[index]]]))
        return rows
