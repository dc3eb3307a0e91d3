# SPDX-License-Identifier: Apache-2.0
"""Graphs that pass messages a batch of destinations at a time.

A layer that runs on one of these computes what it would compute on the graph itself, but nothing
with a row per edge exists for more edges than one batch has: `update_all` goes through the
batches and fills in the destinations' rows, and what `apply_edges` and `edge_softmax` would store
on edges is deferred (`graphshard.fullbatch.lazy`) until a batch needs it. Tensors with a row
per node are whole. Without gradients.

[Note: complete batches]
    A batch has all in-edges of its destinations. So unlike a shard, which has those from one rank,
    it can take any reduction, a softmax over in-edges included, by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..._base.typing import CanonicalEType
from ...fullbatch import AggregationMode, DeferredEdges, GraphShardManager
from ...fullbatch.lazy import expression_of
from ...fullbatch.reductions import Endpoint, Expression, Leaf, Sddmm, ShardEvaluation
from ...fullbatch.topology import Shard
from ...function import MessageFunction, ReduceFunction
from ...graph import Frame, Graph, MessagePassingGraph
from ...graph.message_passing import RelationData, edge_values, flattened, reduce_messages
from ...graph.structure import Schema
from ...ops import Adjacency, edge_softmax
from ._batches import Batch, Cut, LocalCut, ShardCut

T = TypeVar("T")


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


class _Columns(Mapping[str, Any]):
    """A batch's rows of stored columns, made when one is asked for."""

    def __init__(self, columns: Mapping[str, Any], rows: Callable[[Any], Tensor]) -> None:
        self._columns, self._rows = columns, rows

    def __getitem__(self, name: str) -> Tensor:
        return self._rows(self._columns[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


class _BatchEvaluation(ShardEvaluation):
    """What one batch sees, each thing made once.

    Args:
        cut: Where the batches of other relations are.
        batch: The batch.
    """

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
        found: _BatchEvaluation = self.memo[key]
        return found

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
        """The batch as message passing over one relation takes it.

        Args:
            fields: The relation and what is stored at its ends.
            functions: What will be called; only user-defined ones get ids.
        """
        batch, adj = self.batch, self.shard.adjacency
        nodes, ids = None, None
        if not all(isinstance(f, MessageFunction | ReduceFunction) for f in functions):
            nodes = torch.arange(batch.start, batch.stop, dtype=adj.idtype, device=adj.device)
            src, dst = adj.coo()
            ids = src, dst + batch.start, batch.edge_ids()
        return RelationData(
            adj,
            fields.relation,
            _Columns(fields.src, self.source_rows),
            _Columns(fields.dst, self.destination_rows),
            _Columns(fields.edge, self.edge_rows),
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
        rows: Tensor = evaluation.memo[key][self.name]
        return rows


class _Softmax(Expression):
    """Softmax over the in-edges of each destination. See [Note: complete batches].

    Args:
        scores: Relation to its edges' scores; edges of all of them are normalised together.
        wanted: The relation whose weights these are.
    """

    def __init__(self, scores: Mapping[CanonicalEType, Expression], wanted: CanonicalEType) -> None:
        self.scores, self.wanted = dict(scores), wanted
        self.like(scores[wanted])

    def compute(self, evaluation: ShardEvaluation) -> Tensor:
        assert isinstance(evaluation, _BatchEvaluation)
        if len(self.scores) == 1:
            scores = self.scores[self.wanted].evaluate(evaluation)
            return edge_softmax(evaluation.shard.adjacency, scores, "dst")
        seen = {etype: evaluation.of_relation(etype) for etype in self.scores}
        rows = [self.scores[etype].evaluate(seen[etype]) for etype in self.scores]
        ends = torch.cat([one.shard.adjacency.coo()[1].long() for one in seen.values()])
        num_dst = evaluation.shard.adjacency.num_dst
        joint = Adjacency(torch.zeros_like(ends), ends, 1, num_dst, check=False)
        weights = edge_softmax(joint, torch.cat(rows), "dst").split([r.shape[0] for r in rows])
        return weights[list(self.scores).index(self.wanted)]


class _BatchedEdges(DeferredEdges):
    """Deferred edge values, of which an in-place function changes what is deferred."""

    def _record(
        self, name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Expression | None:
        in_place = name.endswith("_") and not name.endswith("__")
        if not in_place or args[0] is not self:
            return super()._record(name, func, args, kwargs)
        elsewhere = getattr(torch.Tensor, name[:-1], None)
        found = elsewhere and super()._record(name[:-1], elsewhere, args, kwargs)
        if found is None:
            raise NotImplementedError(
                f"'{name}' cannot change edge values in place where messages are passed in "
                f"batches; use a function that returns a new tensor"
            )
        self.expression, self._tensor = found, None
        return found

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

    def _reduce(self, relation: int, message_func: Any, reduce_func: Any) -> dict[str, Any]:
        fields = self._seen(relation)
        num_dst = self._dst_frames[self._schema.dst_of[relation]].num_rows
        whole: dict[str, Tensor] = {}
        for evaluation in self._evaluations(fields.relation):
            data = evaluation.data(fields, message_func, reduce_func)
            found = reduce_messages(data, message_func, reduce_func)
            for name, rows in found.items():
                if name not in whole:
                    whole[name] = rows.new_empty((num_dst, *rows.shape[1:]))
                evaluation.destination_rows(whole[name]).copy_(rows)
        return whole

    def _reduce_many(self, calls: Sequence[tuple[int, Any, Any]]) -> list[dict[str, Any]]:
        return [self._reduce(*call) for call in calls]

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
    """A `Graph` that passes messages in batches. What is stored on it is not seen by the graph.

    Args:
        graph: The graph.
        batch_size: Destinations in a batch.
    """

    def __init__(self, graph: Graph, batch_size: int) -> None:
        self.__dict__.update(graph.__dict__)
        self._enter_scope()
        self._batch_size = batch_size
        self._cut = self._new_cut()

    def _new_cut(self) -> LocalCut:
        pairs = zip(self.canonical_etypes, self.relations, strict=True)
        return LocalCut(dict(pairs), self._batch_size)

    def _relation_view(self, relations: list[int]) -> BatchedGraph:
        if len(relations) > 1:
            view = flattened(self, relations, BatchedGraph)
        else:
            view = object.__new__(BatchedGraph)
            plain = Graph._relation_view(self, relations)
            view.__dict__.update(plain.__dict__)
        view._batch_size = self._batch_size
        view._cut = view._new_cut()
        return view


class BatchedShards(BatchedPassing, GraphShardManager):
    """A `GraphShardManager` that passes messages in batches; making one is collective.

    A batch's remote rows are fetched when it is worked on, and dropped.

    Args:
        graph: The sharded graph; what is stored on this one is not seen by it.
        batch_size: Destinations in a batch.
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
