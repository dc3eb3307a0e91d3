# SPDX-License-Identifier: Apache-2.0
"""GraphShardManager: one rank's part of a graph that spans all ranks, as a graph.

It answers the same protocol as a `Graph` or a `Block`, so the same layers run on it: rows are the
nodes that this rank owns, and messages come from everywhere. How they come is the mode's business;
see `AggregationMode`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .._base.typing import CanonicalEType, EType, Ids
from ..comm.collectives import all_reduce_alike, row_bytes
from ..comm.halo import are_messages, check_requests, needs_grad_now
from ..errors import GraphValueError
from ..function import MessageFunction
from ..graph import ALL, EID, NID, Frame, Graph
from ..graph.frame import NodeSpaceView
from ..graph.message_passing import (
    AggregationStep,
    EdgeFunction,
    NodeFunction,
    RelationData,
    SumOverEdges,
    checked_functions,
    edge_values,
    reduce_messages,
    run_together,
)
from ..graph.structure import All, Schema
from ..graph.transforms import loop_values
from ..ops import Attention, attend
from ..ops.attention import check_attention
from ..partition import RangePartitionBook
from ._compile import Call, Compiler, RelationFields, value_of
from ._homogenised import (
    GraphShard,
    HomogenisedEdges,
    graph_to_sample,
    homogenised_edges,
    homogenised_graph,
    shard_of,
)
from ._localized import EdgesOfAllRanks, ExtendedRows, LocalizedShards, picked
from ._partition_data import owned_ranges
from .aggregation_mode import AggregationMode
from .execution import Compiled, Runner
from .fewest_rows import find_fewest_rows
from .lazy import DeferredEdges, expression_of, materialized
from .reductions import CopySource, Expression, LazySoftmax, Sum
from .row_transport import LEAST_SAVED
from .softmax import softmax_over_in_edges, softmax_over_out_edges
from .topology import Halo, LocalEdges, OriginalIds, ShardStructure

T = TypeVar("T")


class GraphShardManager(EdgesOfAllRanks):
    """One rank's part of a sharded graph. Made by `construct_full_graph` and `construct_mfgs`.

    Node features have a row per owned node, edge features a row per in-edge of an owned node.
    Everything that reads source rows is collective: every rank must make the same calls.

    Args:
        structure: Rows, edges and halos of this rank.
        schema: Types, the same on all ranks.
        mode: How remote rows are fetched; ``"auto"`` is resolved already.
        frames: (source, destination, edge) frames; the first two are one list unless sources
            and destinations are separate rows.
        is_block: Whether sources and destinations are separate rows, as in an MFG.
        input_nodes: Source node type to the owned rows that the source frame stands for.
        seeds: Destination node type to the owned rows that the destination frame stands for.
        original: Ids in the graph that was partitioned.
        partition_book: Owner of every node and edge of the whole graph; None where no part of the
            graph was partitioned.
    """

    batch_size = 1
    #: Whether its edges are those that the book numbers; self loops may have been changed.
    _has_edges_of_book = True

    def __init__(
        self,
        structure: ShardStructure,
        schema: Schema,
        mode: AggregationMode,
        frames: tuple[list[Frame], list[Frame], list[Frame]],
        *,
        is_block: bool,
        input_nodes: dict[str, Tensor],
        seeds: dict[str, Tensor],
        original: OriginalIds,
        partition_book: RangePartitionBook | None = None,
    ) -> None:
        self._structure = structure
        self._original = original
        self.partition_book = self._partition_book = partition_book
        self._mode = mode
        if mode.halo_dtype == torch.int8:
            structure.number_rows(original.nodes)
        self._runner = Runner(structure, mode)
        self._compiler = Compiler(self._runner)
        self._input_nodes, self._seeds = input_nodes, seeds
        self._init_protocol(schema, *frames, is_block, structure.device, torch.int64)

    # ------------------------------------------------------------------ what it is

    @property
    def mode(self) -> str:
        """``"sequential"`` or ``"oneshot"``."""
        return self._mode.mode

    @property
    def rematerializes(self) -> bool:  # type: ignore[override]
        """Whether the backward computes again what it can: in sequential mode, unless told not."""
        return self.mode == "sequential" and self._mode.rematerializes

    @property
    def rank(self) -> int:
        """This process among those that share the graph."""
        return self._structure.rank

    @property
    def world_size(self) -> int:
        """Number of processes that share the graph."""
        return self._structure.world_size

    @property
    def input_nodes(self) -> Any:
        """Owned rows that the source frame stands for: a tensor, or one per source type."""
        return _only_value(self._input_nodes)

    @property
    def seeds(self) -> Any:
        """Owned rows that the destination frame stands for: a tensor, or one per type."""
        return _only_value(self._seeds)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that share the graph; None for the default group."""
        return self._structure.group

    @property
    def original_ids(self) -> dict[str, Tensor]:
        """Node type to the ids that this rank's rows had before partitioning, int64.

        Of a graph all types, of a block those of the sources.
        """
        ntypes = self.srctypes if self.is_block else self.ntypes
        return {t: self._original.nodes[t] for t in ntypes}

    @property
    def original_edge_ids(self) -> dict[CanonicalEType, Tensor]:
        """Relation to the ids that this rank's edges had before partitioning, int64."""
        return {t: self._original.edges[t] for t in self.canonical_etypes}

    def to(self, device: torch.device | str) -> GraphShardManager:
        """This graph, if it is on ``device`` already.

        Raises:
            NotImplementedError: It is elsewhere; the message says how to put it there.
        """
        target = torch.device(device)
        if target.type == self.device.type and target.index in (None, self.device.index):
            return self
        raise NotImplementedError(
            f"a sharded graph cannot move from {self.device} to {target}; load its part there: "
            f"load_dgl_partition_data(json, rank, device='{target}')"
        )

    def global_num_edges(self, etype: EType | None = None) -> int:
        """Edges of a relation, or of all, on all ranks together."""
        return sum(self._structure.global_num_edges(t) for t in self._etypes_of(etype))

    def halo_rows(self, ntype: str | None = None, *, sums: bool = False) -> int:
        """Rows of one source type, or of all, that this rank reads from others; collective.

        Args:
            ntype: The type; None for all.
            sums: Count the rows and partial sums that come where rows are summed.
        """
        ntypes = [ntype] if ntype is not None else self.srctypes
        halos = [self._structure.union_halo(t) for t in ntypes]
        plans = []
        for halo in halos:
            if halo is not None:
                fewest = halo.made_once(find_fewest_rows) if sums else None
                plans.append((halo if fewest is None else fewest).plan)
        return sum(plan.num_halo for plan in plans)

    def __repr__(self) -> str:
        return (
            f"GraphShardManager(rank={self.rank}, world_size={self.world_size}, "
            f"mode={self.mode!r}, num_src_nodes={self.num_src_nodes()}, "
            f"num_dst_nodes={self.num_dst_nodes()}, num_edges={self.num_edges()}, "
            f"etypes={self.canonical_etypes})"
        )

    def get_full_partition_graph(self, delete_shard_data: bool = False) -> GraphShardManager:
        """The same graph with one-shot aggregation, as SAR names it.

        Args:
            delete_shard_data: Accepted for SAR's scripts; shards are made when first needed, so
                there is nothing to delete.
        """
        return self.with_mode("oneshot")

    def with_mode(
        self,
        mode: str,
        *,
        rematerialize: bool | None = None,
        prefetch: int | None = None,
        halo_dtype: torch.dtype | None = None,
        partial_sums: bool = True,
    ) -> GraphShardManager:
        """The same graph and features with another `AggregationMode`, the same on all ranks."""
        if mode == "auto":
            raise ValueError("name 'sequential' or 'oneshot' (got 'auto'); 'auto' is resolved once")
        policy = AggregationMode(
            mode=mode,  # type: ignore[arg-type]
            rematerialize=rematerialize,
            prefetch=prefetch,
            halo_dtype=halo_dtype,
            partial_sums=partial_sums,
        )
        frames = self._src_frames, self._dst_frames, self._edge_frames
        return self._sibling(self._schema, policy, frames, self.is_block)

    def mark_constant(self, rows: Tensor) -> Tensor:
        """Promise that rows never change, so that what is computed from them alone is kept.

        Their remote rows, or their sum or mean, are then fetched once for the life of the graph, as
        those of the tensors in its `PartitionData` are. All ranks must mark alike. Later changes
        that torch counts (``rows.mul_(2)``) are seen; one through ``rows.data`` is not.

        Args:
            rows: A field to be, without a gradient: ``features[mfgs[0].input_nodes]``, features
                that were normalised or cast.

        Returns:
            The same tensor.
        """
        self._structure.constants.mark([rows])
        return rows

    def _sibling(
        self,
        schema: Schema,
        mode: AggregationMode,
        frames: tuple[list[Frame], list[Frame], list[Frame]],
        is_block: bool,
    ) -> GraphShardManager:
        ends = self._input_nodes, self._seeds
        new = self._made(self._structure, schema, mode, frames, is_block, *ends, self._original)
        if mode == self._mode:  # a view: what was fetched for the whole serves the part
            new._runner, new._compiler = self._runner, self._compiler
        new._has_edges_of_book = self._has_edges_of_book
        return new

    def _made(
        self,
        structure: ShardStructure,
        schema: Schema,
        mode: AggregationMode,
        frames: tuple[list[Frame], list[Frame], list[Frame]],
        is_block: bool,
        input_nodes: dict[str, Tensor],
        seeds: dict[str, Tensor],
        original: OriginalIds,
    ) -> GraphShardManager:
        """A graph of the same book."""
        return GraphShardManager(
            structure,
            schema,
            mode,
            frames,
            is_block=is_block,
            input_nodes={t: input_nodes[t] for t in schema.srctypes},
            seeds={t: seeds[t] for t in schema.dsttypes},
            original=original,
            partition_book=self.partition_book,
        )

    def _relation_view(self, relations: list[int]) -> GraphShardManager:
        if len(relations) == 1:
            schema = self._schema.single(relations[0])
        else:
            etypes = [self.canonical_etypes[r] for r in relations]
            used = {t for s, _, d in etypes for t in (s, d)}
            srctypes = [t for t in self.srctypes if t in used]
            if self._schema.split:
                dsttypes = [t for t in self.dsttypes if t in used]
                schema = Schema.of_block(srctypes, dsttypes, etypes)
            else:
                schema = Schema.of_graph(srctypes, etypes)
        src = [self._src_frames[self._schema.src_id(t)] for t in schema.srctypes]
        dst = [self._dst_frames[self._schema.dst_id(t)] for t in schema.dsttypes]
        edge = [self._edge_frames[r] for r in relations]
        frames = (src, dst if schema.split else src, edge)
        return self._sibling(schema, self._mode, frames, self.is_block)

    def __getattr__(self, name: str) -> Any:
        """What a `Graph` has and a part has not: the error says so, and what to do."""
        if hasattr(type(self), name):  # a property that failed: its own error
            return object.__getattribute__(self, name)
        kind = type(self).__name__
        of_graphs = hasattr(Graph, name) or name == "relations"
        if name.startswith("_") or not of_graphs:
            raise AttributeError(f"{kind!r} object has no attribute {name!r}")
        raise AttributeError(
            f"{kind} does not offer {name}: a rank has a part of a graph; change, search and save "
            "the whole Graph, before it is partitioned"
        )

    # ------------------------------------------------------------------ types and counts

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

    def num_edges_global(self, etype: EType | None = None) -> int:
        """Edges of a relation, or of all, of the whole graph, on all ranks."""
        if self._has_edges_of_book:
            return self._book().num_edges(etype)
        return self.global_num_edges(etype)

    number_of_nodes_global = num_nodes_global
    number_of_edges_global = num_edges_global

    def _book(self) -> RangePartitionBook:
        if self.partition_book is None:
            self._unsupported(
                "ids of all parts without a partition book",
                "make the graph with construct_full_graph or construct_mfgs",
            )
        return self.partition_book

    # ------------------------------------------------------------------ homogenised ids

    def homogenised(self) -> GraphShardManager:
        """The same graph with one node type and one relation; itself, if it has one relation.

        Rows are those of [Note: homogenised rows]. Edges come by the part of their source, then by
        relation: in the order of `graph_shards` one after another. ``ndata`` has `NTYPE` and
        `NID`, ``edata`` has `ETYPE` and `EID`, in homogenised ids. It is made once; making it is
        collective.

        Raises:
            NotImplementedError: A message flow graph of several relations.
        """
        return self if len(self.canonical_etypes) == 1 else self._made_homogenised

    @cached_property
    def _made_homogenised(self) -> GraphShardManager:
        return homogenised_graph(self)

    @cached_property
    def _homogenised_edges(self) -> HomogenisedEdges:
        return homogenised_edges(self)

    @cached_property
    def graph_shards(self) -> list[GraphShard]:
        """One `GraphShard` for each part that edges may come from. Made once.

        Their ``edata`` is a copy: what is set or deleted there changes nothing else.
        """
        return [shard_of(self, part) for part in range(self.world_size)]

    @property
    def graph_shard_managers(self) -> dict[int, GraphShardManager]:
        """The graph of each relation, by the relation's number."""
        return {r: self[etype] for r, etype in enumerate(self.canonical_etypes)}

    @cached_property
    def sampling_graph(self) -> Graph:
        """This rank's in-edges between homogenised ids, as a graph that has all nodes. Made once.

        It holds a number per node of the whole graph. `DataLoader` does not need it.

        Raises:
            NotImplementedError: A message flow graph.
        """
        return graph_to_sample(self)

    # ------------------------------------------------------------------ structure

    def add_self_loop(
        self,
        edge_feat_names: Sequence[str] | None = None,
        fill_data: float | str = 1.0,
        etype: EType | None = None,
    ) -> GraphShardManager:
        """The graph with one more self loop at every node, behind the edges of its rank.

        Collective. Node features are shared with this graph; the order of arguments is DGL's.

        Args:
            edge_feat_names: Edge features that ``fill_data`` is for; None means all. On the new
                edges the others are 0.
            fill_data: A number; or ``"sum"``, ``"mean"``, ``"max"`` or ``"min"`` of the feature
                over the in-edges of the node, 0 where it has none.
            etype: The relation, where there are several; from a node type to itself.

        Raises:
            ValueError: The relation joins two node types, or ``fill_data`` is an unknown reduction.
            KeyError: There is no such edge feature.
            TypeError: ``fill_data`` is neither a number nor a string.
            NotImplementedError: A message flow graph.
        """
        return self._changed_self_loops(etype, True, edge_feat_names, fill_data)

    def remove_self_loop(self, etype: EType | None = None) -> GraphShardManager:
        """The graph without edges from a node to itself; collective.

        Args:
            etype: The relation, where there are several; from a node type to itself.

        Raises:
            ValueError: The relation joins two node types.
            NotImplementedError: A message flow graph.
        """
        return self._changed_self_loops(etype, False)

    def _changed_self_loops(
        self,
        etype: EType | None,
        adds: bool,
        names: Sequence[str] | None = None,
        fill_data: float | str = 1.0,
    ) -> GraphShardManager:
        """The graph with a self loop added to every node, or with all of them dropped.

        A self loop begins and ends on one rank, so no edge travels. Which remote rows are needed
        may change, so making the graph is collective; the new structure is kept with the old one,
        for layers that change self loops whenever they run.
        """
        chosen = self._loop_relation(etype, "add_self_loop" if adds else "remove_self_loop")
        old = self._structure.edges[chosen]
        frame = self._edge_frames[self._schema.relation(chosen)]
        fields = {name: materialized(value) for name, value in frame.items()}
        ids = self._original.edges[chosen]
        if adds:
            num_nodes = self._structure.num_src[chosen[0]]
            adjacency = partial(self._structure.local_adjacency, chosen)
            added = loop_values(chosen, fields, names, fill_data, num_nodes, adjacency, EID)
            ids = torch.cat([ids, self._first_free_id(ids) + self._original.nodes[chosen[0]]])
            fields = {name: torch.cat([value, added[name]]) for name, value in fields.items()}
            nodes = self._src_frames[self._schema.src_id(chosen[0])]
            if EID in fields and NID in nodes:
                global_ids = nodes[NID]
                start = self._first_free_id(fields[EID][: old.num_edges])
                fields[EID] = torch.cat([fields[EID][: old.num_edges], start + global_ids])
            structure = self._kept_structure(chosen, "added", lambda: self._with_loops(chosen))
        else:
            is_loop = (old.src_part == self.rank) & (old.src == old.dst)
            others = (~is_loop).nonzero().view(-1)
            ids = ids[others]
            fields = {name: value.index_select(0, others) for name, value in fields.items()}
            rows = LocalEdges(old.src_part[others], old.src[others], old.dst[others], old.num_dst)
            structure = self._kept_structure(chosen, "dropped", lambda: rows)
        changed = Frame(structure.edges[chosen].num_edges, self.device, frame.what, "edge")
        for name, value in fields.items():
            changed.set(name, value, "edge")
        original = OriginalIds(self._original.nodes, {**self._original.edges, chosen: ids})
        frames = list(self._edge_frames)
        frames[self._schema.relation(chosen)] = changed
        all_frames = self._src_frames, self._dst_frames, frames
        kind = structure, self._schema, self._mode, all_frames, False
        new = self._made(*kind, self._input_nodes, self._seeds, original)
        new._has_edges_of_book = False
        return new

    def _loop_relation(self, etype: EType | None, name: str) -> CanonicalEType:
        if self.is_block:
            self._unsupported(f"{name} on a message flow graph", "make it of a graph that has them")
        chosen = self.to_canonical_etype(etype)
        if chosen[0] != chosen[2]:
            raise GraphValueError(
                f"{name} takes relations from a node type to itself (got {chosen}); name one "
                "that is"
            )
        return chosen

    def _with_loops(self, etype: CanonicalEType) -> LocalEdges:
        old = self._structure.edges[etype]
        rows = torch.arange(old.num_dst, device=old.src.device)
        return LocalEdges(
            torch.cat([old.src_part, torch.full_like(rows, self.rank).to(old.src_part.dtype)]),
            torch.cat([old.src, rows.to(old.src.dtype)]),
            torch.cat([old.dst, rows.to(old.dst.dtype)]),
            old.num_dst,
        )

    def _first_free_id(self, ids: Tensor) -> int:
        """One more than the largest id on any rank."""
        largest = torch.tensor([int(ids.max()) if ids.numel() else -1])
        return int(all_reduce_alike(largest, "max", group=self.group)) + 1

    def _kept_structure(
        self, etype: CanonicalEType, what: str, edges: Callable[[], LocalEdges]
    ) -> ShardStructure:
        old = self._structure
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

    # ------------------------------------------------------------------ degrees, of all ranks

    def out_degrees(self, u: Ids | All = ALL, etype: EType | None = None) -> Any:
        """Number of out-edges, on all ranks, of this rank's source rows; collective at first."""
        return picked(self._structure.out_degrees(self.to_canonical_etype(etype)), u)

    def localize(
        self,
        inputs: dict[str, Tensor],
        *,
        are_summed: bool = False,
        instead_of: int | None = None,
    ) -> tuple[Any, dict[str, Tensor]]:
        """In one-shot mode, fetch the halo rows of all source types in one exchange.

        Returns:
            A graph whose sources are own and halo rows, and the inputs with halo rows appended.
            Those of `instead_of` are `ExtendedRows`. This graph and the inputs as they are in
            sequential mode, and where inputs are summed and partial sums save rows of some type.
        """
        if self.mode != "oneshot":
            return self, inputs
        halos = {}
        for ntype in self.srctypes:
            etypes = [etype for etype in self.canonical_etypes if etype[0] == ntype]
            if ntype in inputs and etypes:
                halos[ntype] = self._structure.halo(etypes)
        makes_sums = are_summed and self._mode.partial_sums and self.world_size > 1
        if makes_sums and any(h.made_once(find_fewest_rows) is not None for h in halos.values()):
            return self, inputs
        requests = [(halo, inputs[t]) for t, halo in halos.items()]
        cache = self._runner.rows
        if instead_of is not None and self.world_size > 1:
            _agree(requests, [needs_grad_now(own) for _, own in requests])
        rows: Sequence[Any]
        if instead_of is None:
            rows = cache.extended(requests)
        elif cache.are_less(requests, instead_of):
            rows = [
                ExtendedRows(own, cache.start_fetch([(halo, own)]), halo.num_halo)
                for halo, own in requests
            ]
        else:
            return self, inputs
        extended = {**inputs, **dict(zip(halos, rows, strict=True))}
        return LocalizedShards(self, self._structure, halos), extended

    def together(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Run the calls; their aggregations share passes over the shards.

        Returns:
            Their results, in order.
        """
        if len(calls) < 2:
            return super().together(calls)
        return run_together([call() for call in calls], self._update_together)

    def _update_together(self, asked: Sequence[AggregationStep]) -> None:
        requests, views, works = [], [], []
        for step in asked:
            view = step.graph
            if isinstance(view, GraphShardManager) and len(view.canonical_etypes) == 1:
                requests.append((view._fields(0), *checked_functions(step.message, step.reduce)))
                views.append(view)
                works += [] if step.meanwhile is None else [step.meanwhile]
            else:
                view.update_all(step.message, step.reduce)

        def meanwhile() -> None:
            for work in works:
                work()

        for view, result in zip(views, self._results(requests, meanwhile), strict=True):
            view._store(0, result, None)

    # ------------------------------------------------------------------ message passing

    @contextmanager
    def local_scope(self) -> Iterator[None]:
        """As `MessagePassingGraph.local_scope`; rows fetched inside are dropped on leaving."""
        with self._runner.rows.scope(), super().local_scope():
            yield

    def _fields(self, relation: int) -> RelationFields:
        schema = self._schema
        return RelationFields(
            schema.canonical_etypes[relation],
            self._src_frames[schema.src_of[relation]],
            self._dst_frames[schema.dst_of[relation]],
            self._edge_frames[relation],
        )

    def sums_of_gradients(self, rows: Tensor, *, is_wanted: bool) -> SumOverEdges | None:
        """As `MessagePassingGraph.sums_of_gradients`, where every edge has its reverse.

        None where rows go through memory that the ranks share, since zeros weigh as much there; and
        for one of several relations, whose gradients travel together.
        """
        if len(self._structure.edges) != 1 or self.is_block or self.world_size == 1:
            return None
        if self._mode.halo_dtype == torch.int8:  # of which a backward pass draws no keys
            return None
        etype, runner = self.canonical_etypes[0], self._runner
        halo = self._structure.halo([etype])
        _agree([(halo, rows)], [is_wanted])
        if not is_wanted or not are_messages([(halo.plan, rows)], self._mode.halo_dtype):
            return None
        if halo.plan.most_rows * row_bytes(rows) < LEAST_SAVED:
            return None
        if not self._structure.is_symmetric(etype):
            return None

        def summed(rows: Tensor, meanwhile: Callable[[], Any]) -> Tensor:
            reduction = Sum(CopySource(rows))
            reduction.site = "sums of gradients", etype, rows.shape[1:], rows.dtype
            ((total,),) = runner.run([Compiled(etype, reduction)], meanwhile=meanwhile)
            return total

        return summed

    def _reduce(self, relation: int, message: EdgeFunction, reduce: NodeFunction) -> dict[str, Any]:
        return self._results([(self._fields(relation), message, reduce)])[0]

    def _aggregate(self, step: AggregationStep) -> None:
        if len(self.canonical_etypes) != 1:
            super()._aggregate(step)
            return
        call = (self._fields(0), *checked_functions(step.message, step.reduce))
        (result,) = self._results([call], step.meanwhile)
        self._store(0, result, None)

    def _reduce_many(self, calls: Sequence[tuple[int, Any, Any]]) -> list[dict[str, Any]]:
        return self._results([(self._fields(r), m, f) for r, m, f in calls])

    def _results(
        self, calls: Sequence[Call], meanwhile: Callable[[], None] | None = None
    ) -> list[dict[str, Any]]:
        """New destination fields of each call; calls of one source type share a pass."""
        runner, constants = self._runner, self._structure.constants
        results: list[dict[str, Any] | None] = [None] * len(calls)
        later: list[tuple[int, Compiled | None]] = []
        by_source: dict[str, list[tuple[int, Compiled]]] = {}
        for i, (fields, message, reduce) in enumerate(calls):
            call = self._compiler.aggregation(fields, message, reduce)
            constant = None
            if call is not None and call.constant is not None:
                constant = constants.get_copy(*call.constant)
            if call is not None and constant is not None:
                results[i] = {call.out_field: constant}
            elif call is None or (runner.is_oneshot and runner.is_here(call, fields.src)):
                later.append((i, call))
            else:
                by_source.setdefault(fields.etype[0], []).append((i, call))
        for group in by_source.values():
            reductions = [call for _, call in group]
            companions = None
            if runner.is_oneshot and len(calls) == 1:
                companions = runner.companions(reductions[0], calls[0][0].src)
            outputs = runner.run(reductions, companions, self._src_frames, meanwhile)
            meanwhile = None
            for (i, call), output in zip(group, outputs, strict=True):
                result = output[0] if call.finish is None else call.finish(output)
                results[i] = {call.out_field: result}
                if call.constant is not None:
                    constants.put_copy(*call.constant, result)
        for i, call in later:
            new_fields = results[i] = self._reduce_extended(*calls[i])
            if call is not None and call.constant is not None:
                constants.put_copy(*call.constant, new_fields[call.out_field])
        return [result for result in results if result is not None]

    def _reduce_extended(self, fields: RelationFields, message: Any, reduce: Any) -> dict[str, Any]:
        if isinstance(message, Attention):
            adjacency = self._structure.halo([fields.etype]).adjacency(fields.etype)
            return {reduce: attend(adjacency, message)}
        return reduce_messages(self._extended(fields), message, reduce)

    def _extended(self, fields: RelationFields) -> RelationData:
        """The edges of a relation between extended rows, which are fetched when read."""
        halo = self._structure.halo([fields.etype])
        sources = self._runner.rows.fields(halo, fields.src, self._src_frames)
        adjacency = halo.adjacency(fields.etype)
        return RelationData(adjacency, fields.etype, sources, fields.dst, fields.edge)

    def _attend(self, relation: int, attention: Attention) -> Tensor | None:
        fields = self._fields(relation)
        num_rows = (fields.src.num_rows, fields.dst.num_rows, fields.edge.num_rows)
        check_attention(*num_rows, self.device, attention)
        attention = self._original.keyed(fields.etype, attention)
        return self._results([(fields, attention, "out")])[0]["out"]

    def _edge_values(self, relation: int, func: Any) -> dict[str, Any]:
        """Tensors; in sequential mode deferred values for built-in functions."""
        fields, runner = self._fields(relation), self._runner
        if not isinstance(func, MessageFunction):
            if runner.is_oneshot:
                return edge_values(self._extended(fields), func)
            names, user_call = self._compiler.edge_values_of_user(fields, func)
            return dict(zip(names, runner.run([user_call])[0], strict=True))
        if not runner.is_oneshot:
            if func.rhs_target is None and func.lhs_target == "e":
                return {func.out_field: fields.edge[func.lhs_field]}
            value = value_of(fields, func)
            return {func.out_field: runner.deferred(fields.etype, fields.edge.num_rows, value)}
        call = self._compiler.edge_values(fields, func)
        if call is None or runner.is_here(call, fields.src):
            return edge_values(self._extended(fields), func)
        companions = runner.companions(call, fields.src)
        ((rows,),) = runner.run([call], companions, self._src_frames)
        return {func.out_field: rows}

    def _edge_ids(self, edges: Any, relation: int) -> Tensor:
        if isinstance(edges, tuple):
            self._unsupported(
                "naming edges by their ends", "give their ids, which are rows of edata"
            )
        return self._checked_edge_ids(edges, relation)

    def _edge_values_at(self, relation: int, func: Any, eids: Tensor) -> dict[str, Any]:
        # Of all edges first: a rank that asks for none must take part as well.
        frame, fields = self._edge_frames[relation], self._edge_values(relation, func)
        for name in fields:
            if name in frame and isinstance(frame[name], DeferredEdges):
                frame.set(name, frame[name].materialize(), "edge")
        return {name: materialized(value).index_select(0, eids) for name, value in fields.items()}

    def _edge_softmax(self, relation: int, logits: Any, norm_by: str) -> Any:
        return self._edge_softmax_joint([relation], [logits], norm_by)[0]

    def _edge_softmax_joint(
        self, relations: list[int], logits: list[Any], norm_by: str
    ) -> list[Any]:
        """Weights of the edges of relations that share an end type; deferred as logits are."""
        is_deferred = any(isinstance(rows, DeferredEdges) for rows in logits)
        if self._runner.is_oneshot or norm_by == "src" or not is_deferred:
            over = softmax_over_out_edges if norm_by == "src" else softmax_over_in_edges
            etypes = [self._schema.canonical_etypes[relation] for relation in relations]
            return list(over(self._structure, etypes, [materialized(rows) for rows in logits]))
        if len(logits) == 1:
            return [logits[0].softmax_over_in_edges()]
        fields = [self._fields(relation) for relation in relations]
        return self._joint_softmax(fields, [expression_of(rows) for rows in logits])

    def _joint_softmax(
        self, relations: Sequence[RelationFields], scores: Sequence[Expression]
    ) -> list[Any]:
        """Softmax over the in-edges of several relations; no row per edge is kept.

        A pass for each relation finds its peaks and totals; put together, they turn the scores
        into weights by plain arithmetic.
        """
        softmaxes, peaks, totals = [], [], []
        for fields, root in zip(relations, scores, strict=True):
            softmax = LazySoftmax(self._runner.resolve(fields.etype, root))
            peak, total = self._runner.statistics(fields.etype, softmax)
            has_edges = self._structure.in_degrees(fields.etype) > 0
            has_edges = has_edges.view(-1, *[1] * (total.dim() - 1))
            softmaxes.append(softmax)
            peaks.append(peak.masked_fill(~has_edges, float("-inf")))
            totals.append(total)
        peak = torch.stack(peaks).amax(0)
        peak = peak.masked_fill(peak == float("-inf"), 0.0)
        shifted = [t * (p - peak).exp().to(t.dtype) for t, p in zip(totals, peaks, strict=True)]
        total = torch.stack(shifted).sum(0)
        total = total.masked_fill(total == 0, 1.0)
        return [
            self._runner.deferred(fields.etype, fields.edge.num_rows, softmax.resolve(peak, total))
            for fields, softmax in zip(relations, softmaxes, strict=True)
        ]


DistributedBlock = GraphShardManager
"""SAR's name for a graph in one-shot mode, which is no class of its own here."""


def _agree(requests: Sequence[tuple[Halo, Tensor]], are_wanted: Sequence[bool]) -> None:
    """Check that all ranks will have gradients of the same rows; collective where that is new.

    Where it decides what is sent, ranks that disagree would meet in different collectives.
    """
    likes, sizes = [], []
    for halo, rows in requests:
        likes.append((halo.plan, rows.new_zeros(()).expand(halo.plan.num_rows, *rows.shape[1:])))
        sizes.append(halo.plan.num_rows)
    check_requests("a layer", likes, sizes, are_wanted)


def _only_value(by_type: dict[str, Tensor]) -> Any:
    return next(iter(by_type.values())) if len(by_type) == 1 else by_type


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
