# SPDX-License-Identifier: Apache-2.0
"""Sequential aggregation behind the message-passing protocol: from functions to passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._typing import CanonicalEType
from ...function import MessageFunction, ReduceFunction
from ...ops import Attention
from .._config import AggregationMode
from ..execution import PairwiseTransport, ShardPass
from ..lazy import (
    DeferredEdges,
    EdgeRows,
    Expression,
    LazySoftmax,
    Message,
    PerEdge,
    UserFunction,
    UserMessage,
    Weighted,
    expression_of,
    substitute,
    walk,
)
from ..reductions import (
    AttentionSum,
    EdgeValues,
    Extremum,
    Reduction,
    SoftmaxSum,
    Sum,
    holds_softmax,
    proportional_softmax,
    softmax_over_in_edges,
    softmax_over_out_edges,
)
from ..topology import ShardStructure
from ._calls import (
    RelationFields,
    by_source_type,
    constant_key,
    edge_value,
    mean_counts,
    message_of,
    value_of,
)


@dataclass
class _Planned:
    """A reduction that waits for its pass, and what turns its outputs into the result."""

    etype: CanonicalEType
    reduction: Reduction
    finish: Callable[[tuple[Tensor, ...]], Tensor]
    constant: tuple[Any, list[Tensor]] | None = None


class Sequential:
    """Message passing one shard at a time.

    Args:
        structure: The rank's rows and edges.
        mode: Whether to keep fetched rows, how many shards are under way, and in which dtype.
    """

    def __init__(self, structure: ShardStructure, mode: AggregationMode) -> None:
        self.structure = structure
        self.mode = mode

    def reduce_many(
        self, calls: Sequence[tuple[RelationFields, Any, Any]]
    ) -> list[dict[str, Tensor]]:
        """Results of several relations; each source type is exchanged once for all of them.

        A call is (fields, message function, reduce function), or (fields, attention, field).
        """
        results: list[Tensor | None] = [None] * len(calls)
        planned: dict[int, _Planned] = {}
        for index, (fields, message, reduce) in enumerate(calls):
            if isinstance(message, Attention):
                planned[index] = _Planned(fields.etype, AttentionSum(message), _only)
                continue
            if not isinstance(reduce, ReduceFunction):
                name = getattr(reduce, "__qualname__", repr(reduce))
                raise NotImplementedError(
                    f"sequential aggregation takes the reductions sum, mean, max and min (got the "
                    f"user-defined {name!r}); with construct_full_graph(..., mode='oneshot') all "
                    "in-edges of a node are here at once and any reduction works"
                )
            plan = self._plan(fields, message, reduce)
            kept = self._kept_result(plan)
            if kept is None:
                planned[index] = plan
            else:
                results[index] = kept
        for indices in by_source_type(planned):
            group = [planned[i] for i in indices]
            outputs = self._run([(p.etype, p.reduction) for p in group])
            for i, plan, output in zip(indices, group, outputs, strict=True):
                results[i] = self._keep_result(plan, plan.finish(output))
        names = [r.out_field if isinstance(r, ReduceFunction) else r for _, _, r in calls]
        return [{name: r} for name, r in zip(names, results, strict=True) if r is not None]

    def _run(
        self, reductions: Sequence[tuple[CanonicalEType, Reduction]]
    ) -> list[tuple[Tensor, ...]]:
        halo = self.structure.halo([etype for etype, _ in reductions])
        return ShardPass(
            PairwiseTransport(halo, self.mode.halo_dtype),
            reductions,
            not self.mode.rematerialize,
            self.mode.prefetch,
            self.structure.device,
        ).run()

    def _plan(self, fields: RelationFields, message: Any, reduce: ReduceFunction) -> _Planned:
        etype = fields.etype
        found = self._message(fields, message, reduce)
        what = constant_key(etype, message, reduce, found)
        if reduce.op in ("max", "min"):
            resolved = self._without_softmax(fields, found)
            return _Planned(etype, Extremum(resolved, reduce.op, fields.num_edges), _only, what)
        counts = mean_counts(self.structure, etype) if reduce.op == "mean" else None
        weights = edge_value(found)
        proportional = None
        if weights is not None and not (isinstance(found, Weighted) and found.op != "mul"):
            proportional = proportional_softmax(weights)
        if proportional is None:
            resolved = self._without_softmax(fields, found)
            return _Planned(etype, Sum(resolved, counts), _only, what)
        softmax_sum = SoftmaxSum(proportional[0], found, proportional[1])
        return _Planned(
            etype, softmax_sum, lambda out: _scaled(softmax_sum.normalize(*out), counts)
        )

    def _message(self, fields: RelationFields, message: Any, reduce: ReduceFunction) -> Message:
        if not isinstance(message, MessageFunction):
            function = self._user_function(fields, message)
            function.discover(self._own_shard(fields.etype))
            return UserMessage(function, reduce.msg_field)
        return message_of(fields, message)

    def _user_function(self, fields: RelationFields, function: Any) -> UserFunction:
        edge = {name: self._resolved_value(fields, value) for name, value in fields.edge.items()}
        return UserFunction(function, fields.etype, fields.src, fields.dst, edge)

    def _resolved_value(self, fields: RelationFields, value: Any) -> Any:
        if isinstance(value, DeferredEdges) and holds_softmax(value.expression):
            return self._deferred(fields, self._resolve(fields.etype, value.expression))
        return value

    def _own_shard(self, etype: CanonicalEType) -> Any:
        return self.structure.halo([etype]).shards(etype)[0]

    # ------------------------------------------------------------------ softmax

    def _without_softmax(self, fields: RelationFields, message: Message) -> Message:
        value = edge_value(message)
        if value is None or not holds_softmax(value):
            return message
        resolved = self._resolve(fields.etype, value)
        if isinstance(message, Weighted):
            return Weighted(message.op, message.source.tensor, resolved)
        return PerEdge(resolved)

    def _resolve(self, etype: CanonicalEType, root: Expression) -> Expression:
        """``root`` with each softmax turned into arithmetic, by a pass that finds its total."""
        while True:
            inner = next(
                (
                    node
                    for node in walk(root)
                    if isinstance(node, LazySoftmax) and not holds_softmax(node.scores)
                ),
                None,
            )
            if inner is None:
                return root
            reduction = SoftmaxSum(inner)
            ((total,),) = self._run([(etype, reduction)])
            peak = reduction.shifted.peak
            assert peak is not None
            plain = inner.resolve(peak, total.masked_fill(total == 0, 1.0))
            root = substitute(root, {id(inner): plain})

    def edge_softmax(
        self, relations: Sequence[RelationFields], logits: Sequence[Any], norm_by: str
    ) -> list[Any]:
        """Weights of the edges of relations that share an end type; deferred as logits are."""
        etypes = [fields.etype for fields in relations]
        any_deferred = any(isinstance(rows, DeferredEdges) for rows in logits)
        if norm_by == "src":
            whole = [r.materialize() if isinstance(r, DeferredEdges) else r for r in logits]
            return list(softmax_over_out_edges(self.structure, etypes, whole))
        if not any_deferred:
            return list(softmax_over_in_edges(self.structure, etypes, logits))
        if len(logits) == 1:
            return [logits[0].softmax_over_in_edges()]
        return self._joint_softmax(relations, [expression_of(rows) for rows in logits])

    def _joint_softmax(
        self, relations: Sequence[RelationFields], scores: Sequence[Expression]
    ) -> list[Any]:
        """Softmax over the in-edges of several relations; no row per edge is kept.

        A pass for each relation finds its peaks and totals; put together, they turn the scores
        into weights by plain arithmetic.
        """
        softmaxes, peaks, totals = [], [], []
        for fields, root in zip(relations, scores, strict=True):
            softmax = LazySoftmax(self._resolve(fields.etype, root))
            reduction = SoftmaxSum(softmax)
            ((total,),) = self._run([(fields.etype, reduction)])
            assert reduction.shifted.peak is not None
            has_edges = self.structure.in_degrees(fields.etype) > 0
            has_edges = has_edges.view(-1, *[1] * (total.dim() - 1))
            softmaxes.append(softmax)
            peaks.append(reduction.shifted.peak.masked_fill(~has_edges, float("-inf")))
            totals.append(total)
        peak = torch.stack(peaks).amax(0)
        peak = peak.masked_fill(peak == float("-inf"), 0.0)
        shifted = [t * (p - peak).exp().to(t.dtype) for t, p in zip(totals, peaks, strict=True)]
        total = torch.stack(shifted).sum(0)
        total = total.masked_fill(total == 0, 1.0)
        return [
            self._deferred(fields, softmax.resolve(peak, total))
            for fields, softmax in zip(relations, softmaxes, strict=True)
        ]

    # ------------------------------------------------------------------ edge values

    def edge_values(self, fields: RelationFields, function: Any) -> dict[str, Any]:
        """New edge fields: deferred for built-in functions, whole for user-defined ones."""
        if not isinstance(function, MessageFunction):
            user = self._user_function(fields, function)
            names = list(user.discover(self._own_shard(fields.etype)))
            reduction = EdgeValues([UserMessage(user, name) for name in names], fields.num_edges)
            (rows,) = self._run([(fields.etype, reduction)])
            return dict(zip(names, rows, strict=True))
        if function.rhs_target is None and function.lhs_target == "e":
            return {function.out_field: fields.edge[function.lhs_field]}
        return {function.out_field: self._deferred(fields, value_of(fields, function))}

    def _deferred(self, fields: RelationFields, value: Expression) -> DeferredEdges:
        # Not the frames: the value will be in one of them, and a cycle would keep all of their
        # tensors until the garbage collector comes by.
        etype, num_edges = fields.etype, fields.num_edges

        def materialize(expression: Expression) -> Tensor:
            if isinstance(expression, EdgeRows):
                return expression.leaf.tensor
            message = PerEdge(self._resolve(etype, expression))
            ((rows,),) = self._run([(etype, EdgeValues([message], num_edges))])
            return rows

        return DeferredEdges(value, materialize, self.structure.device)

    # ------------------------------------------------------------------ constants

    def _kept_result(self, plan: _Planned) -> Tensor | None:
        return None if plan.constant is None else self.structure.constants.get(*plan.constant)

    def _keep_result(self, plan: _Planned, result: Tensor) -> Tensor:
        if plan.constant is not None:
            self.structure.constants.put(*plan.constant, result)
        return result


def _only(outputs: tuple[Tensor, ...]) -> Tensor:
    return outputs[0]


def _scaled(total: Tensor, degrees: Tensor | None) -> Tensor:
    if degrees is None:
        return total
    return total / degrees.to(total.dtype).view(-1, *[1] * (total.dim() - 1))
