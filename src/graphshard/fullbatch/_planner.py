# SPDX-License-Identifier: Apache-2.0
"""Planner: calls of the message-passing protocol become plans, which passes over shards carry out.

[Note: what a pass takes]
    In sequential mode everything runs as a pass over the shards of all ranks, so reductions must be
    built in. In one-shot mode built-in functions that read one source field, and fused attention,
    run as a pass over two shards, own rows and all remote rows; fields that wait for the same
    exchange go with it. A function of the user is called once, with all edges, as on a graph in one
    process: it works on *extended rows*, which are own rows with the remote ones after them. So do
    calls whose remote rows are here already, and all calls where there is one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .._base.typing import CanonicalEType
from ..function import MessageFunction, ReduceFunction
from ..graph import Frame
from ..graph.message_passing import RelationData, edge_values, reduce_messages
from ..ops import Attention, attend
from .execution import (
    AggregationMode,
    CollectiveTransport,
    HaloRowCache,
    PairwiseTransport,
    RowTransport,
    ShardPass,
)
from .lazy import DeferredEdges, UserFunction, UserMessage, expression_of
from .reductions import (
    CompanionRows,
    CopySource,
    EdgeRows,
    EdgeValues,
    Endpoint,
    Expression,
    Extremum,
    LazySoftmax,
    LeafKey,
    Message,
    PerEdge,
    Reduction,
    Sddmm,
    Sum,
    Weighted,
    substitute,
    walk,
)
from .softmax import (
    AttentionSum,
    SoftmaxSum,
    holds_softmax,
    proportional_softmax,
    softmax_over_in_edges,
    softmax_over_out_edges,
)
from .topology import Shard, ShardStructure


@dataclass(frozen=True)
class RelationFields:
    """One relation and the frames at its ends."""

    etype: CanonicalEType
    src: Frame
    dst: Frame
    edge: Frame

    @property
    def num_edges(self) -> int:
        return self.edge.num_rows

    def frame(self, target: str) -> Frame:
        """The frame on side ``u``, ``v`` or ``e``."""
        return {"u": self.src, "v": self.dst, "e": self.edge}[target]

    def value(self, target: str, field: str) -> Expression:
        """What each edge sees of a field."""
        if target == "e":
            return expression_of(self.edge[field])
        frame = self.src if target == "u" else self.dst
        return Endpoint("u" if target == "u" else "v", frame[field], self.num_edges)


Call: TypeAlias = tuple[RelationFields, Any, Any]
"""Fields, message function and reduce function; or fields, attention and the field to write."""


@dataclass(frozen=True)
class AggregationPlan:
    """What one call site computes.

    Args:
        operands: Side and name of the fields that the message reads.
        bind: From the fields of a call to the reduction that a pass runs.
        source: The only source field among them; None where there is none, or several.
        constant: Under what the result is kept where all operands are constant, see
            [Note: what is kept between calls]; None where it depends on more than stored tensors.
    """

    operands: tuple[tuple[str, str], ...]
    bind: Callable[[RelationFields], Reduction]
    source: str | None
    constant: Hashable | None


@dataclass
class _BoundPlan:
    """A plan with the tensors of one call.

    Args:
        etype: The relation.
        reduction: What to compute.
        source: The field whose rows travel; None where others do not travel with it.
        constant: Under what the result is kept, and the constant tensors that it is of.
        finish: From the outputs of the reduction to the result; None for the only output.
    """

    etype: CanonicalEType
    reduction: Reduction
    source: str | None = None
    constant: tuple[Hashable, list[Tensor]] | None = None
    finish: Callable[[tuple[Tensor, ...]], Tensor] | None = None


class Planner:
    """Message passing on one rank's shards.

    Args:
        structure: The rank's rows and edges.
        config: How remote rows are fetched.
    """

    def __init__(self, structure: ShardStructure, config: AggregationMode) -> None:
        self.structure, self.config = structure, config
        self.rows = HaloRowCache(structure, config.halo_dtype)
        self._constants = structure.constants
        self._is_oneshot = config.mode == "oneshot"
        self._plans: dict[Hashable, AggregationPlan] = {}
        self._transports: dict[tuple[frozenset[CanonicalEType], bool], RowTransport] = {}

    # ------------------------------------------------------------------ aggregation

    def reduce_many(self, calls: Sequence[Call], frames: Sequence[Frame]) -> list[dict[str, Any]]:
        """New destination fields of each call; calls of one source type share a pass.

        Args:
            calls: What to compute.
            frames: All source frames in use.
        """
        results: list[dict[str, Any] | None] = [None] * len(calls)
        bound: dict[int, _BoundPlan] = {}
        by_source: dict[str, list[int]] = {}
        for i, (fields, message, reduce) in enumerate(calls):
            one = self._bind(fields, message, reduce)
            if one is None:
                continue
            bound[i] = one
            kept = None if one.constant is None else self._constants.get_copy(*one.constant)
            if kept is not None:
                results[i] = {_name(reduce): kept}
            elif not (self._is_oneshot and self._is_here(one, fields, len(calls))):
                by_source.setdefault(one.etype[0], []).append(i)
        for group in by_source.values():
            companions = self._companions(bound[0], calls[0][0]) if len(calls) == 1 else None
            outputs = self._run([bound[i] for i in group], companions, frames)
            for i, output in zip(group, outputs, strict=True):
                finish = bound[i].finish
                result = output[0] if finish is None else finish(output)
                results[i] = {_name(calls[i][2]): result}
                self._keep(bound[i], result)
        return [
            self._reduce_extended(bound.get(i), *calls[i], frames) if result is None else result
            for i, result in enumerate(results)
        ]

    def _bind(self, fields: RelationFields, message: Any, reduce: Any) -> _BoundPlan | None:
        """What a pass computes; None where extended rows serve. See [Note: what a pass takes]."""
        if isinstance(message, Attention):
            alone = self._is_oneshot and self.structure.world_size == 1
            return None if alone else _BoundPlan(fields.etype, AttentionSum(message))
        if not isinstance(reduce, ReduceFunction):
            if self._is_oneshot:
                return None
            name = getattr(reduce, "__qualname__", repr(reduce))
            raise NotImplementedError(
                f"sequential aggregation takes the reductions sum, mean, max and min (got the "
                f"user-defined {name!r}); with construct_full_graph(..., mode='oneshot') all "
                "in-edges of a node are here at once and any reduction works"
            )
        if not isinstance(message, MessageFunction):
            if self._is_oneshot:
                return None
            function = self._user_function(fields, message)
            function.discover(self._own_shard(fields.etype))
            return self._bind_message(fields, UserMessage(function, reduce.msg_field), reduce)
        plan = self._plan(fields, message, reduce)
        if plan is None:
            found = None if self._is_oneshot else _message_of(fields, message)
            return None if found is None else self._bind_message(fields, found, reduce)
        if self._is_oneshot and plan.source is None:
            return None
        one = _BoundPlan(fields.etype, plan.bind(fields), plan.source)
        if plan.constant is not None:
            tensors = [fields.frame(target)[name] for target, name in plan.operands]
            if self._constants.is_constant(tensors):
                one.constant = plan.constant, tensors
        return one

    def _plan(
        self, fields: RelationFields, message: MessageFunction, reduce: ReduceFunction
    ) -> AggregationPlan | None:
        """The plan of a call site; None where a field is no tensor, or one-shot cannot take it."""
        shapes = []
        for target, name in _operands_of(message):
            value = fields.frame(target)[name]
            if not isinstance(value, Tensor):
                return None
            shapes.append((value.shape[1:], value.dtype))
        site = (fields.etype, message, reduce, *shapes)
        plan = self._plans.get(site)
        if plan is None:
            values = [fields.frame(target)[name] for target, name in _operands_of(message)]
            if self._is_oneshot and len(values) == 2 and not _broadcasts(message.op, *values):
                return None  # the kernel says what is wrong
            counts = self._counts(fields, reduce)
            plan = self._plans[site] = _plan_of(fields, message, reduce, counts, site)
        return plan

    def _counts(self, fields: RelationFields, reduce: ReduceFunction) -> Tensor | None:
        """What a mean divides the sum by: ``[num_dst]``, at least 1."""
        if reduce.op != "mean":
            return None
        return self.structure.mean_counts(fields.etype)

    def _bind_message(
        self, fields: RelationFields, message: Message, reduce: ReduceFunction
    ) -> _BoundPlan:
        """A sequential pass over messages that are not made of stored tensors alone."""
        etype, counts = fields.etype, self._counts(fields, reduce)
        weights = _edge_value(message)
        is_product = not (isinstance(message, Weighted) and message.op != "mul")
        if reduce.op not in ("max", "min") and weights is not None and is_product:
            proportional = proportional_softmax(weights)
            if proportional is not None:
                softmax, reshapes = proportional
                softmax_sum = SoftmaxSum(softmax, message, reshapes)

                def finish(outputs: tuple[Tensor, ...]) -> Tensor:
                    return _scaled(softmax_sum.normalize(*outputs), counts)

                return _BoundPlan(etype, softmax_sum, finish=finish)
        if weights is not None and holds_softmax(weights):
            resolved = self._resolve(etype, weights)
            if isinstance(message, Weighted):
                message = Weighted(message.op, message.source.tensor, resolved)
            else:
                message = PerEdge(resolved)
        return _BoundPlan(etype, _reduction_of(message, reduce, fields.num_edges, counts))

    def _is_here(self, one: _BoundPlan, fields: RelationFields, num_calls: int) -> bool:
        """Whether nothing has to be fetched for a call in one-shot mode."""
        if self.structure.world_size == 1:
            return True
        if num_calls > 1 or one.source is None:
            return False
        return self.rows.has(self._transport([one.etype]).halo, fields.src[one.source])

    def _keep(self, one: _BoundPlan, result: Tensor) -> None:
        if one.constant is not None:
            self._constants.put_copy(*one.constant, result)

    # ------------------------------------------------------------------ passes

    def _run(
        self,
        group: Sequence[_BoundPlan],
        companions: Sequence[Tensor] | None = None,
        frames: Sequence[Frame] = (),
    ) -> list[tuple[Tensor, ...]]:
        """Outputs of one pass.

        Args:
            group: Plans of relations with one source type.
            companions: Tensors of the source type whose rows travel, too; None where remote rows
                are not kept for later calls.
            frames: All source frames in use.
        """
        transport = self._transport([one.etype for one in group])
        reductions = [(one.etype, one.reduction) for one in group]
        if companions:
            reductions.append((group[0].etype, CompanionRows(companions)))
        if not transport.returns_rows:
            return self._pass(transport, reductions).run()
        halo = transport.halo
        own = {leaf.key: leaf.tensor for _, r in reductions for leaf in r.leaves}
        own = {key: tensor for key, tensor in own.items() if key[0] == "u"}
        fixed = {key: tensor for key, tensor in own.items() if not tensor.requires_grad}
        found = {key: self.rows.known(halo, tensor) for key, tensor in fixed.items()}
        known = {key: rows for key, rows in found.items() if rows is not None}
        shard_pass = self._pass(transport, reductions, known)
        outputs = shard_pass.run()[: len(group)]
        remote = shard_pass.take_remote()
        # Where all results of some rows are kept, no call asks for the rows again.
        read_again = {("u", id(tensor)) for tensor in companions or ()}
        for one in group:
            if one.constant is None:
                read_again |= {leaf.key for leaf in one.reduction.leaves}
        for key in fixed.keys() & read_again - known.keys():
            self.rows.keep(halo, own[key], remote[key])
        if companions is not None:
            self.rows.put(halo, [(tensor, remote[key]) for key, tensor in own.items()], frames)
        return outputs

    def _pass(
        self,
        transport: RowTransport,
        reductions: Sequence[tuple[CanonicalEType, Reduction]],
        known: dict[LeafKey, Tensor] | None = None,
    ) -> ShardPass:
        return ShardPass(
            transport, reductions, self.config.fetched_ahead, self.structure.device, known
        )

    def _transport(self, etypes: Sequence[CanonicalEType]) -> RowTransport:
        """How rows of the halo of some relations travel; the only difference between the modes."""
        rematerializes = self.config.rematerializes
        key = frozenset(etypes), rematerializes
        if key not in self._transports:
            halo, wire = self.structure.halo(etypes), self.config.halo_dtype
            self._transports[key] = (
                CollectiveTransport(halo, wire)
                if self._is_oneshot
                else PairwiseTransport(halo, wire, keeps_rows=not rematerializes)
            )
        return self._transports[key]

    def _companions(self, one: _BoundPlan, fields: RelationFields) -> list[Tensor] | None:
        """Source fields that travel with that of a plan; None where no remote rows are kept."""
        if not self._is_oneshot or one.source is None or not self.rows.is_in_scope:
            return None
        return self.rows.companions(self._transport([one.etype]).halo, fields.src, one.source)

    def _own_shard(self, etype: CanonicalEType) -> Shard:
        return self._transport([etype]).shards(etype)[0]

    # ------------------------------------------------------------------ extended rows

    def _data(self, fields: RelationFields, frames: Sequence[Frame]) -> RelationData:
        halo = self.structure.halo([fields.etype])
        sources = self.rows.fields(halo, fields.src, frames)
        adjacency = halo.adjacency(fields.etype)
        return RelationData(adjacency, fields.etype, sources, fields.dst, fields.edge)

    def _reduce_extended(
        self,
        one: _BoundPlan | None,
        fields: RelationFields,
        message: Any,
        reduce: Any,
        frames: Sequence[Frame],
    ) -> dict[str, Any]:
        if isinstance(message, Attention):
            adjacency = self.structure.halo([fields.etype]).adjacency(fields.etype)
            return {reduce: attend(adjacency, message)}
        found = reduce_messages(self._data(fields, frames), message, reduce)
        if one is not None:
            self._keep(one, found[reduce.out_field])
        return found

    # ------------------------------------------------------------------ edge values

    def edge_values(
        self, fields: RelationFields, function: Any, frames: Sequence[Frame]
    ) -> dict[str, Any]:
        """New edge fields: tensors; in sequential mode deferred for built-in functions."""
        if not isinstance(function, MessageFunction):
            if self._is_oneshot:
                return edge_values(self._data(fields, frames), function)
            user = self._user_function(fields, function)
            names = list(user.discover(self._own_shard(fields.etype)))
            messages = [UserMessage(user, name) for name in names]
            one = _BoundPlan(fields.etype, EdgeValues(messages, fields.num_edges))
            return dict(zip(names, self._run([one])[0], strict=True))
        if not self._is_oneshot:
            if function.rhs_target is None and function.lhs_target == "e":
                return {function.out_field: fields.edge[function.lhs_field]}
            return {function.out_field: self._deferred(fields, _value_of(fields, function))}
        values = [fields.frame(target)[name] for target, name in _operands_of(function)]
        sources = [name for target, name in _operands_of(function) if target == "u"]
        takes = all(isinstance(value, Tensor) for value in values) and len(sources) == 1
        if takes and (len(values) == 1 or _broadcasts(function.op, *values)):
            reduction = EdgeValues([PerEdge(_value_of(fields, function))], fields.num_edges)
            one = _BoundPlan(fields.etype, reduction, sources[0])
            if not self._is_here(one, fields, 1):
                ((rows,),) = self._run([one], self._companions(one, fields), frames)
                return {function.out_field: rows}
        return edge_values(self._data(fields, frames), function)

    def _user_function(self, fields: RelationFields, function: Any) -> UserFunction:
        edge = dict(fields.edge)
        for name, value in edge.items():
            if isinstance(value, DeferredEdges) and holds_softmax(value.expression):
                resolved = self._resolve(fields.etype, value.expression)
                edge[name] = self._deferred(fields, resolved)
        return UserFunction(function, fields.etype, fields.src, fields.dst, edge)

    def _deferred(self, fields: RelationFields, value: Expression) -> DeferredEdges:
        # Not the frames: the value will be in one of them, and a cycle would keep all of their
        # tensors until the garbage collector comes by.
        etype, num_edges = fields.etype, fields.num_edges

        def materialize(expression: Expression) -> Tensor:
            if isinstance(expression, EdgeRows):
                return expression.leaf.tensor
            message = PerEdge(self._resolve(etype, expression))
            ((rows,),) = self._run([_BoundPlan(etype, EdgeValues([message], num_edges))])
            return rows

        return DeferredEdges(value, materialize, self.structure.device)

    # ------------------------------------------------------------------ softmax over edges

    def edge_softmax(
        self, relations: Sequence[RelationFields], logits: Sequence[Any], norm_by: str
    ) -> list[Any]:
        """Weights of the edges of relations that share an end type; deferred as logits are."""
        is_deferred = any(isinstance(rows, DeferredEdges) for rows in logits)
        if self._is_oneshot or norm_by == "src" or not is_deferred:
            whole = [r.materialize() if isinstance(r, DeferredEdges) else r for r in logits]
            over = softmax_over_out_edges if norm_by == "src" else softmax_over_in_edges
            return list(over(self.structure, [fields.etype for fields in relations], whole))
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
            peak, total = self._statistics(fields.etype, softmax)
            has_edges = self.structure.in_degrees(fields.etype) > 0
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
            self._deferred(fields, softmax.resolve(peak, total))
            for fields, softmax in zip(relations, softmaxes, strict=True)
        ]

    def _resolve(self, etype: CanonicalEType, root: Expression) -> Expression:
        """``root`` with each softmax turned into arithmetic, by a pass that finds its total."""
        while True:
            softmaxes = (node for node in walk(root) if isinstance(node, LazySoftmax))
            inner = next((node for node in softmaxes if not holds_softmax(node.child)), None)
            if inner is None:
                return root
            peak, total = self._statistics(etype, inner)
            plain = inner.resolve(peak, total.masked_fill(total == 0, 1.0))
            root = substitute(root, {id(inner): plain})

    def _statistics(self, etype: CanonicalEType, softmax: LazySoftmax) -> tuple[Tensor, Tensor]:
        """Peak and total of a softmax at each destination."""
        reduction = SoftmaxSum(softmax)
        ((total,),) = self._run([_BoundPlan(etype, reduction)])
        assert reduction.shifted.peak is not None
        return reduction.shifted.peak, total


def _plan_of(
    fields: RelationFields,
    message: MessageFunction,
    reduce: ReduceFunction,
    counts: Tensor | None,
    site: Hashable,
) -> AggregationPlan:
    """The plan of a call whose fields are tensors.

    Args:
        fields: The relation.
        message: What each edge carries.
        reduce: How messages that meet become one.
        counts: ``[num_dst]`` to divide sums by; None for other reductions than the mean.
        site: What tells call sites apart.
    """
    operands = tuple(_operands_of(message))
    sources = [name for target, name in operands if target == "u"]
    value = _edge_value(_message_of(fields, message))
    constant: Hashable | None = None
    if value is None or isinstance(
        value, EdgeRows | Endpoint
    ):  # values to be computed may drop out
        constant = ("aggregate", fields.etype, message.name, reduce.op)

    def bind(fields: RelationFields) -> Reduction:
        if message.rhs_target is None and message.lhs_target == "u":
            found: Message = CopySource(fields.src[message.lhs_field])
        else:
            found = _message_of(fields, message)
        reduction = _reduction_of(found, reduce, fields.edge.num_rows, counts)
        reduction.site = site
        return reduction

    return AggregationPlan(operands, bind, sources[0] if len(sources) == 1 else None, constant)


def _reduction_of(
    message: Message, reduce: ReduceFunction, num_edges: int, counts: Tensor | None
) -> Reduction:
    """How messages that meet become one."""
    if reduce.op in ("max", "min"):
        return Extremum(message, reduce.op, num_edges)
    return Sum(message, counts)


def _operands_of(function: MessageFunction) -> list[tuple[str, str]]:
    """Side and name of the fields that a built-in function reads."""
    found = [(function.lhs_target, function.lhs_field)]
    if function.rhs_target is not None and function.rhs_field is not None:
        found.append((function.rhs_target, function.rhs_field))
    return found


def _message_of(fields: RelationFields, function: MessageFunction) -> Message:
    """The message of a built-in function, in the form that costs least."""
    (left, name), *others = _operands_of(function)
    if not others:
        return CopySource(fields.src[name]) if left == "u" else PerEdge(fields.value(left, name))
    ((right, other),) = others
    if function.op != "dot" and {left, right} == {"u", "e"}:
        if left == "u":
            return Weighted(function.op, fields.src[name], fields.value("e", other))
        if function.op in ("add", "mul"):
            return Weighted(function.op, fields.src[other], fields.value("e", name))
    return PerEdge(_value_of(fields, function))


def _value_of(fields: RelationFields, function: MessageFunction) -> Expression:
    """The value that a built-in function gives each edge."""
    values = [fields.value(*operand) for operand in _operands_of(function)]
    return values[0] if len(values) == 1 else Sddmm(function.op, *values)


def _edge_value(message: Message) -> Expression | None:
    """The part of a message that has a row per edge, if any."""
    return message.value if isinstance(message, Weighted | PerEdge) else None


def _broadcasts(op: str, left: Tensor, right: Tensor) -> bool:
    """Whether the rows of two operands fit each other."""
    rows = left.shape[1:], right.shape[1:]
    if op == "dot" and (not all(rows) or rows[0][-1] != rows[1][-1]):
        return False
    try:
        torch.broadcast_shapes(*rows)
    except RuntimeError:
        return False
    return True


def _name(reduce: ReduceFunction | str) -> str:
    return reduce if isinstance(reduce, str) else reduce.out_field


def _scaled(total: Tensor, degrees: Tensor | None) -> Tensor:
    if degrees is None:
        return total
    return total / degrees.to(total.dtype).view(-1, *[1] * (total.dim() - 1))
