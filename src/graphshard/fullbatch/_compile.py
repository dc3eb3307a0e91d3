# SPDX-License-Identifier: Apache-2.0
"""From calls of the message-passing protocol to reductions, which `Runner` makes tensors of.

[Note: what a pass takes]
    In sequential mode everything runs as a pass over the shards of all ranks, so reductions must be
    built in. In one-shot mode built-in functions that read one source field, and fused attention,
    run as a pass over two shards, own rows and all remote rows; fields that wait for the same
    exchange go with it. A function of the user is called once, with all edges, as on a graph in one
    process: it works on *extended rows*, which are own rows with the remote ones after them. So do
    calls whose remote rows are here already, and all calls where there is one rank.

What a call site computes is found once and kept: a *plan*, by relation, functions, shapes and
dtypes; bound to the tensors of a call it is a `Compiled` reduction. Nothing runs here, with two
exceptions that have no other way: a function of the user is tried on a few own edges, to see what
it reads, and a softmax that cannot be carried along needs its totals first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .._base.typing import CanonicalEType
from ..function import MessageFunction, ReduceFunction
from ..graph import Frame
from ..ops import Attention
from .execution import Compiled, Runner
from .lazy import DeferredEdges, UserFunction, UserMessage, expression_of
from .reductions import (
    CopySource,
    EdgeRows,
    EdgeValues,
    Endpoint,
    Expression,
    Extremum,
    Message,
    PerEdge,
    Reduction,
    Sddmm,
    Sum,
    Weighted,
    divided,
)
from .softmax import AttentionSum, SoftmaxSum, holds_softmax, proportional_softmax


@dataclass(frozen=True)
class RelationFields:
    """One relation and the frames at its ends."""

    etype: CanonicalEType
    src: Frame
    dst: Frame
    edge: Frame

    def value(self, target: str, field: str) -> Expression:
        """What each edge sees of a field."""
        if target == "e":
            return expression_of(self.edge[field])
        frame = self.src if target == "u" else self.dst
        return Endpoint("u" if target == "u" else "v", frame[field], self.edge.num_rows)


Call: TypeAlias = tuple[RelationFields, Any, Any]
"""Fields, message function and reduce function; or fields, attention and the field to write."""


@dataclass(frozen=True)
class AggregationPlan:
    """What one call site computes.

    Args:
        bind: From the fields of a call to the reduction that a pass runs.
        source: The only source field that messages read; None where there is none, or several.
        constant: Under what the result is kept where all operands are constant, see
            [Note: what is kept between calls]; None where it depends on more than stored tensors.
    """

    bind: Callable[[RelationFields], Reduction]
    source: str | None
    constant: Hashable | None


class Compiler:
    """What calls on one rank's shards compute."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._structure = runner, runner.structure
        self._plans: dict[Hashable, AggregationPlan] = {}

    # ------------------------------------------------------------------ aggregation

    def aggregation(self, fields: RelationFields, message: Any, reduce: Any) -> Compiled | None:
        """What a pass computes; None where extended rows serve. See [Note: what a pass takes]."""
        is_oneshot = self._runner.is_oneshot
        if isinstance(message, Attention):
            alone = is_oneshot and self._structure.world_size == 1
            return (
                None if alone else Compiled(fields.etype, AttentionSum(message), out_field=reduce)
            )
        if not isinstance(reduce, ReduceFunction):
            if is_oneshot:
                return None
            name = getattr(reduce, "__qualname__", repr(reduce))
            raise NotImplementedError(
                f"sequential aggregation takes the reductions sum, mean, max and min (got the "
                f"user-defined {name!r}); with construct_full_graph(..., mode='oneshot') all "
                "in-edges of a node are here at once and any reduction works"
            )
        if not isinstance(message, MessageFunction):
            if is_oneshot:
                return None
            function = self._user_function(fields, message)
            function.discover(self._runner.own_shard(fields.etype))
            return self._of_message(fields, UserMessage(function, reduce.msg_field), reduce)
        return self._built_in(fields, message, reduce)

    def _built_in(
        self, fields: RelationFields, message: MessageFunction, reduce: ReduceFunction
    ) -> Compiled | None:
        """Of built-in functions, by the plan of the call site."""
        is_oneshot, values = self._runner.is_oneshot, []
        site: list[Hashable] = [fields.etype, message, reduce]
        for target, name in operands_of(message):
            frame = fields.src if target == "u" else fields.dst if target == "v" else fields.edge
            value = frame[name]
            if not isinstance(value, Tensor):
                if is_oneshot:
                    return None
                return self._of_message(fields, _message_of(fields, message), reduce)
            values.append(value)
            site += (value.shape[1:], value.dtype)
        plan = self._plans.get(tuple(site))
        if plan is None:
            if is_oneshot and len(values) == 2 and not _broadcasts(message.op, *values):
                return None  # the kernel says what is wrong
            counts = self._structure.mean_counts(fields.etype) if reduce.op == "mean" else None
            plan = _plan_of(fields, message, reduce, counts, tuple(site))
            self._plans[tuple(site)] = plan
        if is_oneshot and plan.source is None:
            return None
        constant = None
        if plan.constant is not None and not values[0].requires_grad:
            constants = self._structure.constants
            constant = (plan.constant, values) if constants.is_constant(values) else None
        reduction = plan.bind(fields)
        return Compiled(fields.etype, reduction, plan.source, constant, out_field=reduce.out_field)

    def _of_message(
        self, fields: RelationFields, message: Message, reduce: ReduceFunction
    ) -> Compiled:
        """A sequential pass over messages that are not made of stored tensors alone."""
        etype = fields.etype
        counts = self._structure.mean_counts(etype) if reduce.op == "mean" else None
        if isinstance(message, Weighted | PerEdge) and holds_softmax(message.value):
            is_product = isinstance(message, PerEdge) or message.op == "mul"
            proportional = proportional_softmax(message.value)
            if proportional is not None and is_product and reduce.op in ("sum", "mean"):
                softmax, reshapes = proportional
                softmax_sum = SoftmaxSum(softmax, message, reshapes)

                def finish(outputs: tuple[Tensor, ...]) -> Tensor:
                    result = softmax_sum.normalize(*outputs)
                    if counts is None:
                        return result
                    return divided(result, counts)

                return Compiled(etype, softmax_sum, finish=finish, out_field=reduce.out_field)
            message = message.with_value(self._runner.resolve(etype, message.value))
        reduction = _reduction_of(message, reduce, fields.edge.num_rows, counts)
        return Compiled(etype, reduction, out_field=reduce.out_field)

    # ------------------------------------------------------------------ values of edges

    def edge_values(self, fields: RelationFields, function: MessageFunction) -> Compiled | None:
        """What a pass in one-shot mode computes; None where extended rows serve."""
        operands = operands_of(function)
        frames = {"u": fields.src, "v": fields.dst, "e": fields.edge}
        values = [frames[target][name] for target, name in operands]
        sources = [name for target, name in operands if target == "u"]
        takes = all(isinstance(value, Tensor) for value in values) and len(sources) == 1
        if not takes or (len(values) == 2 and not _broadcasts(function.op, *values)):
            return None
        reduction = EdgeValues([PerEdge(value_of(fields, function))], fields.edge.num_rows)
        return Compiled(fields.etype, reduction, sources[0])

    def edge_values_of_user(
        self, fields: RelationFields, function: Any
    ) -> tuple[list[str], Compiled]:
        """Names of what a function of the user gives each edge, and the pass that finds it."""
        user = self._user_function(fields, function)
        names = list(user.discover(self._runner.own_shard(fields.etype)))
        messages = [UserMessage(user, name) for name in names]
        return names, Compiled(fields.etype, EdgeValues(messages, fields.edge.num_rows))

    def _user_function(self, fields: RelationFields, function: Any) -> UserFunction:
        edge, runner = dict(fields.edge), self._runner
        for name, value in edge.items():
            if isinstance(value, DeferredEdges) and holds_softmax(value.expression):
                resolved = runner.resolve(fields.etype, value.expression)
                edge[name] = runner.deferred(fields.etype, fields.edge.num_rows, resolved)
        return UserFunction(function, fields.etype, fields.src, fields.dst, edge)


def _plan_of(
    fields: RelationFields,
    message: MessageFunction,
    reduce: ReduceFunction,
    counts: Tensor | None,
    site: Hashable,
) -> AggregationPlan:
    """The plan of a call whose fields are tensors."""
    operands = operands_of(message)
    sources = [name for target, name in operands if target == "u"]
    template = _message_of(fields, message)
    value = template.value if isinstance(template, Weighted | PerEdge) else None
    constant: Hashable | None = None
    if value is None or isinstance(value, EdgeRows | Endpoint):  # what is computed may drop out
        constant = ("aggregate", fields.etype, message.name, reduce.op)
    copies_sources = message.rhs_target is None and message.lhs_target == "u"

    def bind(fields: RelationFields) -> Reduction:
        made: Message
        if copies_sources:
            made = CopySource(fields.src[message.lhs_field])
        else:
            made = _message_of(fields, message)
        reduction = _reduction_of(made, reduce, fields.edge.num_rows, counts)
        reduction.site = site
        return reduction

    return AggregationPlan(bind, sources[0] if len(sources) == 1 else None, constant)


def _reduction_of(
    message: Message, reduce: ReduceFunction, num_edges: int, counts: Tensor | None
) -> Reduction:
    """How messages that meet become one."""
    if reduce.op in ("max", "min"):
        return Extremum(message, reduce.op, num_edges)
    return Sum(message, counts)


def operands_of(function: MessageFunction) -> list[tuple[str, str]]:
    """Side and name of the fields that a built-in function reads."""
    left = function.lhs_target, function.lhs_field
    if function.rhs_target is None or function.rhs_field is None:
        return [left]
    return [left, (function.rhs_target, function.rhs_field)]


def _message_of(fields: RelationFields, function: MessageFunction) -> Message:
    """The message of a built-in function, in the form that costs least."""
    (left, name), *others = operands_of(function)
    if not others:
        return CopySource(fields.src[name]) if left == "u" else PerEdge(fields.value(left, name))
    ((right, other),) = others
    if function.op != "dot" and {left, right} == {"u", "e"}:
        if left == "u":
            return Weighted(function.op, fields.src[name], fields.value("e", other))
        if function.op in ("add", "mul"):
            return Weighted(function.op, fields.src[other], fields.value("e", name))
    return PerEdge(value_of(fields, function))


def value_of(fields: RelationFields, function: MessageFunction) -> Expression:
    """The value that a built-in function gives each edge."""
    values = [fields.value(*operand) for operand in operands_of(function)]
    return values[0] if len(values) == 1 else Sddmm(function.op, *values)


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
