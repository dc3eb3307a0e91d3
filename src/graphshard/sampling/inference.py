# SPDX-License-Identifier: Apache-2.0
"""inference: a model's outputs for all nodes, exact, layer by layer, in bounded memory.

A model runs on graphs that pass messages a batch of destinations at a time. A layer computes on one
of these what it would compute on the graph itself, but nothing with a row per edge exists for more
edges than one batch has: `update_all` goes through the batches and fills in the destinations' rows,
and what `apply_edges` and `edge_softmax` would store on edges is deferred
(`graphshard.fullbatch.lazy`) until a batch needs it. Tensors with a row per node are whole. Without
gradients.

A `Batch` is what a bounded number of destinations needs: the edges into them, and a way to get the
source rows that those edges read. On a graph that is whole in this process the source rows are
there already; on a sharded one the batch's remote rows are fetched, so every rank must go through
the batches of a relation in the same order.

[Note: complete batches]
    A batch has all in-edges of its destinations. So unlike a shard, which has those from one rank,
    it can take any reduction, a softmax over in-edges included, by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from .._base.typing import CanonicalEType
from ..comm import ExchangePlan, fetch_halo
from ..comm.collectives import all_reduce_alike, shared_errors
from ..fullbatch import AggregationMode, DeferredEdges, GraphShardManager
from ..fullbatch.lazy import FieldsOnRead, expression_of
from ..fullbatch.reductions import Endpoint, Expression, Leaf, Sddmm, ShardEvaluation
from ..fullbatch.topology import Shard, ShardStructure, narrow
from ..function import MessageFunction, ReduceFunction
from ..graph import Frame, Graph, MessagePassingGraph
from ..graph.local_graph import flattened
from ..graph.message_passing import (
    AggregationStep,
    EdgeFunction,
    NodeFunction,
    RelationData,
    edge_values,
    reduce_messages,
)
from ..graph.structure import Schema
from ..ops import Adjacency, edge_softmax
from ._pipeline import mapped

T = TypeVar("T")
_MOST_LAYERS = 1000


@dataclass(frozen=True, eq=False)
class Batch:
    """Some destinations of one relation, and the edges into them.

    Args:
        start: First destination row.
        stop: One past the last.
        indptr: ``[num_dst + 1]`` where the edges of each destination begin.
        src: ``[num_edges]`` place of each edge's source among the rows that ``source_rows`` gives.
        eids: Ids of the edges in the graph, ``[num_edges]``; or the range that they are.
        source_rows: From a column of the source frame to the rows that the batch reads.
    """

    etype: CanonicalEType
    index: int
    start: int
    stop: int
    indptr: Tensor
    src: Tensor
    num_src: int
    eids: Tensor | slice
    source_rows: Callable[[Tensor], Tensor]

    def adjacency(self) -> Adjacency:
        """The edges by place, made anew: batches are kept, and formats that are derived are not."""
        num_dst = self.stop - self.start
        return Adjacency.from_csc(self.indptr, self.src, None, self.num_src, num_dst, check=False)

    def edge_rows(self, values: Tensor) -> Tensor:
        """The rows of a column of the edge frame that belong to the batch's edges."""
        if isinstance(self.eids, slice):
            return values[self.eids]
        return values.index_select(0, self.eids)

    def edge_ids(self) -> Tensor:
        """Ids of the edges in the graph."""
        if isinstance(self.eids, Tensor):
            return self.eids
        src = self.src
        return torch.arange(self.eids.start, self.eids.stop, dtype=src.dtype, device=src.device)


class LocalCut:
    """Cuts a graph that is whole in this process."""

    def __init__(self, graph: Graph, batch_size: int) -> None:
        self._relations = dict(zip(graph.canonical_etypes, graph.relations, strict=True))
        self._batch_size = batch_size

    def num_batches(self, etype: CanonicalEType) -> int:
        """At least 1, and the same for all relations into one node type."""
        return max(1, -(-self._relations[etype].num_dst // self._batch_size))

    def batch(self, etype: CanonicalEType, index: int) -> Batch:
        adj = self._relations[etype]
        start = index * self._batch_size
        stop = min(start + self._batch_size, adj.num_dst)
        indptr, src, order = adj.csc()
        pointer, eids = _edges_into(indptr, order, start, stop)
        src = src[int(indptr[start]) : int(indptr[stop])]
        return Batch(
            etype, index, start, stop, pointer, src, adj.num_src, eids, lambda column: column
        )


class ShardCut:
    """Cuts this rank's destinations of a sharded graph; making one is collective.

    Which rows a batch reads of other ranks is planned once, when the batch is first used.
    """

    def __init__(self, structure: ShardStructure, batch_size: int) -> None:
        self._structure, self._batch_size = structure, batch_size
        self._by_destination: dict[CanonicalEType, tuple[Tensor, Tensor | None]] = {}
        self._kept: dict[tuple[CanonicalEType, int], Batch] = {}
        counts = [max(1, -(-count // batch_size)) for count in structure.num_dst.values()]
        most = all_reduce_alike(
            torch.tensor(counts, dtype=torch.int64), "max", group=structure.group
        )
        self._counts = dict(zip(structure.num_dst, most.tolist(), strict=True))

    def num_batches(self, etype: CanonicalEType) -> int:
        """At least 1, and the same on all ranks and for all relations into one node type."""
        return int(self._counts[etype[2]])

    def batch(self, etype: CanonicalEType, index: int) -> Batch:
        """One batch of a relation; collective the first time."""
        if (etype, index) not in self._kept:
            self._kept[etype, index] = self._make(etype, index)
        return self._kept[etype, index]

    def _make(self, etype: CanonicalEType, index: int) -> Batch:
        structure, edges = self._structure, self._structure.edges[etype]
        if etype not in self._by_destination:
            ends = Adjacency(torch.zeros_like(edges.dst), edges.dst, 1, edges.num_dst, check=False)
            indptr, _, order = ends.csc()
            self._by_destination[etype] = indptr, None if order is None else order.to(torch.int64)
        start = min(index * self._batch_size, edges.num_dst)
        stop = min(start + self._batch_size, edges.num_dst)
        pointer, eids = _edges_into(*self._by_destination[etype], start, stop)
        owner, rows = edges.src_part[eids], edges.src[eids]
        none = torch.empty(0, dtype=torch.int64, device=structure.device)
        places = torch.empty_like(rows, dtype=torch.int64)
        read = [none] * structure.world_size  # rows of each part
        others = [part for part in range(structure.world_size) if part != structure.rank]
        num_src = 0
        for part in (structure.rank, *others):
            of_part = owner == part
            distinct, numbers = torch.unique(rows[of_part], return_inverse=True)
            places[of_part] = numbers + num_src
            read[part] = distinct.to(torch.int64)
            num_src += distinct.numel()
        own, read[structure.rank] = read[structure.rank], none
        plan = ExchangePlan.build(
            read, structure.num_src[etype[0]], group=structure.group, device=structure.device
        )
        src = narrow(places, num_src)
        source_rows = partial(_own_and_remote, own, plan)
        return Batch(
            etype, index, start, stop, pointer.to(src.dtype), src, num_src, eids, source_rows
        )


Cut: TypeAlias = LocalCut | ShardCut


def _edges_into(
    indptr: Tensor, order: Tensor | None, start: int, stop: int
) -> tuple[Tensor, Tensor | slice]:
    """Where the edges of each of some destinations begin among theirs, and ids of the edges.

    ``indptr`` and ``order`` are those of `Adjacency.csc`, of all destinations.
    """
    first, last = int(indptr[start]), int(indptr[stop])
    eids = slice(first, last) if order is None else order[first:last]
    return indptr[start : stop + 1] - first, eids


def _own_and_remote(own: Tensor, plan: ExchangePlan, column: Tensor) -> Tensor:
    """The own rows of a column that a batch reads, then the remote ones; collective."""
    return torch.cat([column.index_select(0, own), *fetch_halo([(plan, column)])])


@dataclass(frozen=True, eq=False)
class _Fields:
    """One relation and what was stored at its ends when a function was called."""

    relation: CanonicalEType
    src: dict[str, Any]
    dst: dict[str, Any]
    edge: dict[str, Any]
    num_edges: int

    def operand(self, target: str, field: str) -> Expression:
        if target == "e":
            return expression_of(self.edge[field])
        column = (self.src if target == "u" else self.dst)[field]
        return Endpoint("u" if target == "u" else "v", column, self.num_edges)


def _rows_on_read(columns: Mapping[str, Any], rows: Callable[[Any], Tensor]) -> FieldsOnRead:
    return FieldsOnRead(columns, lambda name: rows(columns[name]))


class _BatchEvaluation(ShardEvaluation):
    """What one batch sees, each thing made once."""

    def __init__(self, cut: Cut, batch: Batch) -> None:
        eids = batch.eids if isinstance(batch.eids, Tensor) else None
        find_eids = None if eids is None else (lambda: eids)
        self.cut, self.batch = cut, batch
        super().__init__(Shard(batch.index, batch.adjacency(), find_eids), {})
        self._sources: dict[int, tuple[Tensor, Tensor]] = {}  # the column, so that it lives on

    def of_relation(self, etype: CanonicalEType) -> _BatchEvaluation:
        """The same destinations, seen by another relation into their type."""
        if etype == self.batch.etype:
            return self
        key = ("relation", etype)
        if key not in self.memo:
            self.memo[key] = _BatchEvaluation(self.cut, self.cut.batch(etype, self.batch.index))
        return self.memo[key]

    def leaf(self, leaf: Leaf) -> Tensor:
        if leaf.target == "u":
            return self.source_rows(leaf.tensor)
        if leaf.target == "v":
            return self.destination_rows(leaf.tensor)
        return self.edge_rows(leaf.tensor) if leaf.target == "e" else leaf.tensor

    def source_rows(self, column: Tensor) -> Tensor:
        if id(column) not in self._sources:
            self._sources[id(column)] = column, self.batch.source_rows(column)
        return self._sources[id(column)][1]

    def destination_rows(self, column: Tensor) -> Tensor:
        return column[self.batch.start : self.batch.stop]

    def edge_rows(self, column: Any) -> Tensor:
        if isinstance(column, DeferredEdges):
            return column.expression.evaluate(self)
        return self.batch.edge_rows(column)

    def data(self, fields: _Fields, *functions: Any) -> RelationData:
        """The batch as message passing over one relation takes it."""
        batch, adj = self.batch, self.shard.adjacency
        nodes, ids = None, None
        if not all(isinstance(f, MessageFunction | ReduceFunction) for f in functions):
            nodes = torch.arange(batch.start, batch.stop, dtype=adj.idtype, device=adj.device)
            src, dst = adj.coo()
            ids = src, dst + batch.start, batch.edge_ids()
        return RelationData(
            adj,
            fields.relation,
            _rows_on_read(fields.src, self.source_rows),
            _rows_on_read(fields.dst, self.destination_rows),
            _rows_on_read(fields.edge, self.edge_rows),
            nodes,
            ids,
        )


class _UserValues(Expression):
    """One of the fields that a user-defined function gives each edge."""

    def __init__(self, function: Any, fields: _Fields, name: str, probe: Tensor) -> None:
        self.function, self.fields, self.name = function, fields, name
        self.shape = torch.Size((fields.num_edges, *probe.shape[1:]))
        self.dtype, self.device = probe.dtype, probe.device

    def compute(self, evaluation: ShardEvaluation) -> Tensor:
        assert isinstance(evaluation, _BatchEvaluation)
        key = ("call", id(self.fields))  # one call, however many of its fields are wanted
        if key not in evaluation.memo:
            evaluation.memo[key] = edge_values(
                evaluation.data(self.fields, self.function), self.function
            )
        return evaluation.memo[key][self.name]


class _Softmax(Expression):
    """Softmax over the in-edges, of all relations together. See [Note: complete batches]."""

    def __init__(self, scores: Mapping[CanonicalEType, Expression], etype: CanonicalEType) -> None:
        self.scores, self.etype = dict(scores), etype
        self.like(scores[etype])

    def compute(self, evaluation: ShardEvaluation) -> Tensor:
        assert isinstance(evaluation, _BatchEvaluation)
        if len(self.scores) == 1:
            scores = self.scores[self.etype].evaluate(evaluation)
            return edge_softmax(evaluation.shard.adjacency, scores, "dst")
        seen = {etype: evaluation.of_relation(etype) for etype in self.scores}
        rows = [self.scores[etype].evaluate(seen[etype]) for etype in self.scores]
        ends = torch.cat([e.shard.adjacency.coo()[1].long() for e in seen.values()])
        num_dst = evaluation.shard.adjacency.num_dst
        joint = Adjacency(torch.zeros_like(ends), ends, 1, num_dst, check=False)
        weights = edge_softmax(joint, torch.cat(rows), "dst").split([r.shape[0] for r in rows])
        return weights[list(self.scores).index(self.etype)]


class _BatchedEdges(DeferredEdges):
    """Deferred edge values, of which an in-place function changes what is deferred."""

    def _record(
        self, name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Expression | None:
        in_place = name.endswith("_") and not name.endswith("__")
        if not in_place or args[0] is not self:
            return super()._record(name, func, args, kwargs)
        elsewhere = getattr(torch.Tensor, name[:-1], None)
        changed = elsewhere and super()._record(name[:-1], elsewhere, args, kwargs)
        if changed is None:
            raise NotImplementedError(
                f"'{name}' cannot change edge values in place where messages are passed in "
                f"batches; use a function that returns a new tensor"
            )
        self.change(changed)
        return changed

    def _wrap(self, expression: Expression) -> DeferredEdges:
        return _BatchedEdges(expression, self._materializer, self.device)


class BatchedPassing(MessagePassingGraph):
    """The hooks of the protocol, by batches of destinations."""

    _cut: Cut

    def _seen(self, relation: int) -> _Fields:
        schema = self._schema
        edge = self._edge_frames[relation]
        return _Fields(
            schema.canonical_etypes[relation],
            dict(self._src_frames[schema.src_of[relation]]),
            dict(self._dst_frames[schema.dst_of[relation]]),
            dict(edge),
            edge.num_rows,
        )

    def _evaluations(self, etype: CanonicalEType) -> Iterator[_BatchEvaluation]:
        for index in range(self._cut.num_batches(etype)):
            yield _BatchEvaluation(self._cut, self._cut.batch(etype, index))

    def _reduce(self, relation: int, message: EdgeFunction, reduce: NodeFunction) -> dict[str, Any]:
        fields = self._seen(relation)
        num_dst = self._dst_frames[self._schema.dst_of[relation]].num_rows
        whole: dict[str, Tensor] = {}
        for evaluation in self._evaluations(fields.relation):
            data = evaluation.data(fields, message, reduce)
            reduced = reduce_messages(data, message, reduce)
            for name, rows in reduced.items():
                if name not in whole:
                    whole[name] = rows.new_empty((num_dst, *rows.shape[1:]))
                evaluation.destination_rows(whole[name]).copy_(rows)
        return whole

    def _reduce_many(self, calls: Sequence[tuple[int, Any, Any]]) -> list[dict[str, Any]]:
        return [self._reduce(*call) for call in calls]

    def _aggregate(self, step: AggregationStep) -> None:
        step.graph.update_all(step.message, step.reduce)

    def _edge_values(self, relation: int, func: Any) -> dict[str, Any]:
        fields = self._seen(relation)
        if not isinstance(func, MessageFunction):
            first = _BatchEvaluation(self._cut, self._cut.batch(fields.relation, 0))
            probe = edge_values(first.data(fields, func), func)
            return {
                name: self._deferred(fields.relation, _UserValues(func, fields, name, rows))
                for name, rows in probe.items()
            }
        if func.rhs_target is None or func.rhs_field is None:
            if func.lhs_target == "e":
                return {func.out_field: fields.edge[func.lhs_field]}
            value = fields.operand(func.lhs_target, func.lhs_field)
        else:
            left = fields.operand(func.lhs_target, func.lhs_field)
            value = Sddmm(func.op, left, fields.operand(func.rhs_target, func.rhs_field))
        return {func.out_field: self._deferred(fields.relation, value)}

    def _edge_softmax(self, relation: int, logits: Any, norm_by: str) -> Any:
        if isinstance(logits, DeferredEdges):
            if norm_by == "dst":
                etype = self.canonical_etypes[relation]
                return self._deferred(etype, _Softmax({etype: logits.expression}, etype))
            logits = logits.materialize()  # a source's out-edges are in many batches
        return super()._edge_softmax(relation, logits, norm_by)

    def _edge_softmax_joint(
        self, relations: list[int], logits: list[Any], norm_by: str
    ) -> list[Any]:
        if norm_by != "dst":
            whole = [v.materialize() if isinstance(v, DeferredEdges) else v for v in logits]
            return super()._edge_softmax_joint(relations, whole, norm_by)
        etypes = [self.canonical_etypes[relation] for relation in relations]
        scores = {t: expression_of(v) for t, v in zip(etypes, logits, strict=True)}
        return [self._deferred(etype, _Softmax(scores, etype)) for etype in etypes]

    def _deferred(self, etype: CanonicalEType, value: Expression) -> DeferredEdges:
        def materialize(expression: Expression) -> Tensor:
            whole = torch.empty(expression.shape, dtype=expression.dtype, device=self.device)
            for evaluation in self._evaluations(etype):
                whole[evaluation.batch.eids] = expression.evaluate(evaluation)
            return whole

        return _BatchedEdges(value, materialize, self.device)


class BatchedGraph(BatchedPassing, Graph):
    """A `Graph` that passes messages in batches. What is stored on it is not seen by the graph."""

    def __init__(self, graph: Graph, batch_size: int) -> None:
        self.__dict__.update(graph.__dict__)
        self._enter_scope()
        self._batch_size = batch_size
        self._cut = LocalCut(self, batch_size)

    def _relation_view(self, relations: list[int]) -> BatchedGraph:
        if len(relations) > 1:
            view = flattened(self, relations, BatchedGraph)
        else:
            view = object.__new__(BatchedGraph)
            plain = Graph._relation_view(self, relations)
            view.__dict__.update(plain.__dict__)
        view._batch_size = self._batch_size
        view._cut = LocalCut(view, self._batch_size)
        return view


class BatchedShards(BatchedPassing, GraphShardManager):
    """A `GraphShardManager` that passes messages in batches; making one is collective.

    A batch's remote rows are fetched when it is worked on, and dropped. What is stored on this one
    is not seen by the graph.
    """

    def __init__(self, graph: GraphShardManager, batch_size: int) -> None:
        # Sequential, for that is where edge values may be deferred; no shard is ever made.
        self.__dict__.update(graph.with_mode("sequential").__dict__)
        self._enter_scope()
        self._cut = ShardCut(graph._structure, batch_size)

    def _sibling(
        self,
        schema: Schema,
        mode: AggregationMode,
        frames: tuple[list[Frame], list[Frame], list[Frame]],
        is_block: bool,
    ) -> BatchedShards:
        new = object.__new__(BatchedShards)
        new.__dict__.update(super()._sibling(schema, mode, frames, is_block).__dict__)
        new._cut = self._cut
        return new

    def together(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """One after the other: each aggregation fetches what its batches need."""
        return MessagePassingGraph.together(self, calls)


def inference(
    model: Callable[..., Any],
    graph: Graph | GraphShardManager,
    features: Any,
    batch_size: int,
    *,
    num_layers: int | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """Run a model on all nodes of a graph: what ``model([graph] * num_layers, features)`` gives.

    Each layer is computed for all nodes before the next one begins, so no neighbour is computed
    twice. Inside a layer messages are passed to ``batch_size`` nodes at a time, over all of their
    in-edges: tensors with a row per node are whole, but nothing with a row per edge exists for
    more edges than a batch has. (Exceptions: edge tensors that are passed in, and a softmax over
    the *out*-edges of nodes of scores that the model computes.) No gradients; the model is in
    evaluation mode meanwhile, and then in the mode that it was in.

    On a sharded graph this is collective: every rank must call it and gets the rows of its own
    nodes. A batch fetches the rows that it reads of other ranks, so memory is bounded there too,
    whatever the graph's mode; ``batch_size`` counts each rank's own nodes.

    Args:
        model: Called with a sequence of graphs, one for each layer, and ``features``. A layer may
            be any that runs on a graph: of `graphshard.nn`, of DGL, with user-defined messages.
        graph: The graph, plain or typed; its features can be read by the model.
        features: Passed on to the model: a tensor ``[num_nodes, ...]``, or node type to tensor.
        batch_size: Nodes whose in-edges are worked on at once.
        num_layers: Length of the sequence of graphs. None: the model gets as many graphs as it
            asks for by index or by zipping; it cannot ask for ``len``.
        device: Where to compute; the model must be there. By default where the graph is.

    Returns:
        What the model returns, on the device of ``features``.

    Raises:
        TypeError: ``graph`` is neither a `Graph` nor a `GraphShardManager`.
        ValueError: ``batch_size`` or ``num_layers`` is below 1, or ``graph`` is a block.
        NotImplementedError: ``device`` is not where a sharded graph is.

    Example:
        >>> from graphshard.data import load_dataset
        >>> from graphshard.nn import SAGEConv
        >>> class Model(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.convs = nn.ModuleList([SAGEConv(1433, 8, "mean"), SAGEConv(8, 7, "mean")])
        ...     def forward(self, blocks, features):
        ...         for i, conv in enumerate(self.convs):
        ...             features = conv(blocks[i], features)
        ...         return features
        >>> graph = load_dataset("cora").graph
        >>> inference(Model(), graph, graph.ndata["feat"], batch_size=500).shape
        torch.Size([2708, 7])
    """
    _check(graph, batch_size, num_layers)
    origin = _first_device(features)
    if device is not None:
        graph, features = graph.to(device), _moved(features, torch.device(device))
    batched: MessagePassingGraph
    if isinstance(graph, GraphShardManager):
        batched = BatchedShards(graph, batch_size)
    else:
        batched = BatchedGraph(graph, batch_size)
    layers = SameGraph(batched) if num_layers is None else [batched] * num_layers
    with torch.no_grad(), _evaluating(model):
        result = mapped(
            model(layers, features),
            lambda v: v.materialize() if isinstance(v, DeferredEdges) else v,
        )
    return result if origin is None else _moved(result, origin)


class SameGraph(Sequence[MessagePassingGraph]):
    """One graph for as many layers as a model asks for."""

    def __init__(self, graph: MessagePassingGraph) -> None:
        self._graph = graph

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            if index.stop is None or index.stop < 0 or (index.start or 0) < 0:
                len(self)
            return [self._graph] * len(range(*index.indices(index.stop)))
        return self._graph

    def __len__(self) -> int:
        raise TypeError(
            "the model asks how many graphs there are, and it can have as many as it wants; give "
            "inference(..., num_layers=...)"
        )

    def __iter__(self) -> Iterator[MessagePassingGraph]:
        for _ in range(_MOST_LAYERS):
            yield self._graph
        raise RuntimeError(
            f"the model has gone through {_MOST_LAYERS} graphs and asks for more; give "
            "inference(..., num_layers=...)"
        )


def _check(graph: Any, batch_size: int, num_layers: int | None) -> None:
    """Raise what is wrong with the arguments; on every rank, if the graph is sharded."""
    if not isinstance(graph, Graph | GraphShardManager):
        raise TypeError(
            f"inference runs on a Graph or a GraphShardManager (got {type(graph).__name__})"
        )
    with shared_errors(graph.group) if isinstance(graph, GraphShardManager) else nullcontext():
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1 (got {batch_size})")
        if num_layers is not None and num_layers < 1:
            raise ValueError(f"num_layers must be at least 1 (got {num_layers})")
        if graph.is_block:
            raise ValueError(
                "inference is for all nodes of a graph, and this is one layer of a message flow "
                "graph; pass the graph of construct_full_graph, or call the model on the list of "
                "MFGs"
            )


@contextmanager
def _evaluating(model: Callable[..., Any]) -> Iterator[None]:
    """Evaluation mode for all modules of the model; afterwards each is as it was."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    before = [module.training for module in modules]
    try:
        if isinstance(model, nn.Module):
            model.eval()
        yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.training = training


def _moved(values: Any, device: torch.device) -> Any:
    return mapped(values, lambda v: v.to(device) if isinstance(v, Tensor) else v)


def _first_device(values: Any) -> torch.device | None:
    devices: list[torch.device] = []
    mapped(values, lambda v: devices.append(v.device) if isinstance(v, Tensor) else None)
    return devices[0] if devices else None
