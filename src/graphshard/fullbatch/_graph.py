# SPDX-License-Identifier: Apache-2.0
"""GraphShardManager: one rank's part of a graph that spans all ranks, as a graph.

It answers the same protocol as a `Graph` or a `Block`, so the same layers run on it: rows are the
nodes that this rank owns, and messages come from everywhere. How they come is the mode's business;
see `AggregationMode`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .._base.typing import CanonicalEType
from ..graph import ALL, Frame
from ..graph.message_passing import AggregationStep, checked_functions, run_together
from ..graph.structure import Schema, check_ids, id_tensor
from ..ops import Attention
from ..ops.attention import check_attention
from ..partition import RangePartitionBook
from ._homogenised import HomogenisedIds
from ._localized import LocalizedShards, picked
from ._planner import Planner, RelationFields
from ._self_loops import changed_self_loops
from .execution import AggregationMode
from .lazy import DeferredEdges
from .topology import OriginalIds, ShardStructure

T = TypeVar("T")


class GraphShardManager(HomogenisedIds):
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
        self._planner = Planner(structure, mode)
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
        wanted = torch.device(device)
        if wanted.type == self.device.type and wanted.index in (None, self.device.index):
            return self
        raise NotImplementedError(
            f"a sharded graph cannot move from {self.device} to {wanted}; load its part there: "
            f"load_dgl_partition_data(json, rank, device='{wanted}')"
        )

    def global_num_edges(self, etype: Any = None) -> int:
        """Edges of a relation, or of all, on all ranks together."""
        return sum(self._structure.global_num_edges(t) for t in self._etypes_of(etype))

    def halo_rows(self, ntype: str | None = None) -> int:
        """Rows of one source type, or of all, that this rank reads from others; collective."""
        wanted = [ntype] if ntype is not None else self.srctypes
        halos = [self._structure.union_halo(t) for t in wanted]
        return sum(halo.num_halo for halo in halos if halo is not None)

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
    ) -> GraphShardManager:
        """The same graph and features with another way of fetching rows, the same on all ranks.

        Args:
            mode: ``"sequential"`` or ``"oneshot"``.
            rematerialize: As for `AggregationMode`.
            prefetch: As for `AggregationMode`.
            halo_dtype: As for `AggregationMode`.
        """
        if mode == "auto":
            raise ValueError("name 'sequential' or 'oneshot' (got 'auto'); 'auto' is resolved once")
        policy = AggregationMode(
            mode=mode,  # type: ignore[arg-type]
            rematerialize=rematerialize,
            prefetch=prefetch,
            halo_dtype=halo_dtype,
        )
        return self._sibling(self._schema, policy, self._all_frames(), self.is_block)

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

    def _all_frames(self) -> tuple[list[Frame], list[Frame], list[Frame]]:
        return self._src_frames, self._dst_frames, self._edge_frames

    def _sibling(
        self,
        schema: Schema,
        mode: AggregationMode,
        frames: tuple[list[Frame], list[Frame], list[Frame]],
        is_block: bool,
    ) -> GraphShardManager:
        new = GraphShardManager(
            self._structure,
            schema,
            mode,
            frames,
            is_block=is_block,
            input_nodes={t: self._input_nodes[t] for t in schema.srctypes},
            seeds={t: self._seeds[t] for t in schema.dsttypes},
            original=self._original,
            partition_book=self.partition_book,
        )
        if mode == self._mode:  # a view: what was fetched for the whole serves the part
            new._planner = self._planner
        new._has_edges_of_book = self._has_edges_of_book
        return new

    def _relation_view(self, relations: list[int]) -> GraphShardManager:
        if len(relations) == 1:
            schema = self._schema.single(relations[0])
        else:
            etypes = [self.canonical_etypes[r] for r in relations]
            used = {t for s, _, d in etypes for t in (s, d)}
            schema = (
                Schema.of_block(
                    [t for t in self.srctypes if t in used],
                    [t for t in self.dsttypes if t in used],
                    etypes,
                )
                if self._schema.split
                else Schema.of_graph([t for t in self.ntypes if t in used], etypes)
            )
        src = [self._src_frames[self._schema.src_id(t)] for t in schema.srctypes]
        dst = [self._dst_frames[self._schema.dst_id(t)] for t in schema.dsttypes]
        edge = [self._edge_frames[r] for r in relations]
        frames = (src, dst if schema.split else src, edge)
        return self._sibling(schema, self._mode, frames, self.is_block)

    # ------------------------------------------------------------------ structure

    def add_self_loop(
        self,
        edge_feat_names: Sequence[str] | None = None,
        fill_data: float | str = 1.0,
        etype: Any = None,
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
        return self._changed(*changed_self_loops(self, etype, True, edge_feat_names, fill_data))

    def remove_self_loop(self, etype: Any = None) -> GraphShardManager:
        """The graph without edges from a node to itself; collective.

        Args:
            etype: The relation, where there are several; from a node type to itself.

        Raises:
            ValueError: The relation joins two node types.
            NotImplementedError: A message flow graph.
        """
        return self._changed(*changed_self_loops(self, etype, False))

    def _changed(
        self, structure: ShardStructure, etype: CanonicalEType, edges: Frame, original: OriginalIds
    ) -> GraphShardManager:
        frames = list(self._edge_frames)
        frames[self._schema.relation(etype)] = edges
        new = GraphShardManager(
            structure,
            self._schema,
            self._mode,
            (self._src_frames, self._dst_frames, frames),
            is_block=False,
            input_nodes=self._input_nodes,
            seeds=self._seeds,
            original=original,
            partition_book=self.partition_book,
        )
        new._has_edges_of_book = False
        return new

    def out_degrees(self, u: Any = ALL, etype: Any = None) -> Any:
        """Number of out-edges, on all ranks, of this rank's source rows; collective at first."""
        return picked(self._structure.out_degrees(self.to_canonical_etype(etype)), u)

    def localize(self, inputs: dict[str, Tensor]) -> tuple[Any, Any]:
        """In one-shot mode, fetch the halo rows of all source types in one exchange.

        Args:
            inputs: Source type to ``[num_src_nodes, ...]``.

        Returns:
            A graph whose sources are own and halo rows, and the inputs with halo rows appended. In
            sequential mode this graph and the inputs as they are.
        """
        if self.mode != "oneshot":
            return self, inputs
        found = {t: self._structure.union_halo(t) for t in self.srctypes if t in inputs}
        halos = {t: halo for t, halo in found.items() if halo is not None}
        rows = self._planner.rows.extended([(halo, inputs[t]) for t, halo in halos.items()])
        extended = {**inputs, **dict(zip(halos, rows, strict=True))}
        return LocalizedShards(self, self._structure, extended), extended

    def together(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Run the calls; in sequential mode their aggregations share passes over the shards.

        Args:
            calls: As for `MessagePassingGraph.together`, on this graph or on slices of it. Those
                that are generators share passes.

        Returns:
            Their results, in order.
        """
        if self.mode == "oneshot" or len(calls) < 2:
            return super().together(calls)
        return run_together([call() for call in calls], self._update_together)

    def _update_together(self, asked: Sequence[AggregationStep]) -> None:
        requests, views = [], []
        for one in asked:
            view = one.graph
            if isinstance(view, GraphShardManager) and len(view.canonical_etypes) == 1:
                requests.append((view._fields(0), *checked_functions(one.message, one.reduce)))
                views.append(view)
            else:
                view.update_all(one.message, one.reduce)
        for view, result in zip(views, self._results(requests), strict=True):
            view._store(0, result, None)

    # ------------------------------------------------------------------ message passing

    @contextmanager
    def local_scope(self) -> Iterator[None]:
        """As `MessagePassingGraph.local_scope`; rows fetched inside are dropped on leaving."""
        with self._planner.rows.scope(), super().local_scope():
            yield

    def _fields(self, relation: int) -> RelationFields:
        schema = self._schema
        return RelationFields(
            schema.canonical_etypes[relation],
            self._src_frames[schema.src_of[relation]],
            self._dst_frames[schema.dst_of[relation]],
            self._edge_frames[relation],
        )

    def _reduce(self, relation: int, message_func: Any, reduce_func: Any) -> dict[str, Any]:
        return self._reduce_many([(relation, message_func, reduce_func)])[0]

    def _reduce_many(self, calls: Sequence[tuple[int, Any, Any]]) -> list[dict[str, Any]]:
        return self._results([(self._fields(r), m, f) for r, m, f in calls])

    def _results(self, calls: Sequence[tuple[RelationFields, Any, Any]]) -> list[dict[str, Any]]:
        return self._planner.reduce_many(calls, self._src_frames)

    def _attend(self, relation: int, attention: Attention) -> Tensor | None:
        fields = self._fields(relation)
        rows = (fields.src.num_rows, fields.dst.num_rows, fields.num_edges)
        check_attention(*rows, self.device, attention)
        attention = self._original.keyed(fields.etype, attention)
        found: Tensor = self._results([(fields, attention, "out")])[0]["out"]
        return found

    def _edge_values(self, relation: int, func: Any) -> dict[str, Any]:
        return self._planner.edge_values(self._fields(relation), func, self._src_frames)

    def _edge_ids(self, edges: Any, relation: int) -> Tensor:
        if isinstance(edges, tuple):
            self._unsupported(
                "naming edges by their ends", "give their ids, which are rows of edata"
            )
        frame = self._edge_frames[relation]
        ids = id_tensor(edges, "edge ids", self.idtype, self.device)
        check_ids(ids, frame.num_rows, "an edge id", frame.what)
        return ids

    def _edge_values_at(self, relation: int, func: Any, eids: Tensor) -> dict[str, Any]:
        # Of all edges first: a rank that asks for none must take part as well.
        frame, found = self._edge_frames[relation], self._edge_values(relation, func)
        for name in found:
            if name in frame and isinstance(frame[name], DeferredEdges):
                frame.set(name, frame[name].materialize(), "edge")
        rows = {n: v.materialize() if isinstance(v, DeferredEdges) else v for n, v in found.items()}
        return {name: value.index_select(0, eids) for name, value in rows.items()}

    def _edge_softmax(self, relation: int, logits: Any, norm_by: str) -> Any:
        return self._edge_softmax_joint([relation], [logits], norm_by)[0]

    def _edge_softmax_joint(
        self, relations: list[int], logits: list[Any], norm_by: str
    ) -> list[Any]:
        fields = [self._fields(relation) for relation in relations]
        return self._planner.edge_softmax(fields, logits, norm_by)


DistributedBlock = GraphShardManager
"""SAR's name for a graph in one-shot mode, which is no class of its own here."""


def _only_value(by_type: dict[str, Tensor]) -> Any:
    return next(iter(by_type.values())) if len(by_type) == 1 else by_type
