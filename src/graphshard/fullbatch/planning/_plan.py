# SPDX-License-Identifier: Apache-2.0
"""AggregationPlan: what one call of built-in functions computes, found once per call site."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._typing import CanonicalEType
from ...function import MessageFunction, ReduceFunction
from ...graph import Frame
from ..lazy import (
    CopySource,
    EdgeRows,
    Endpoint,
    Expression,
    Message,
    PerEdge,
    Sddmm,
    Weighted,
    expression_of,
)
from ..reductions import Extremum, Reduction, Sum


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


@dataclass(frozen=True)
class AggregationPlan:
    """What one call site computes.

    Args:
        operands: Side and name of the fields that the message reads.
        bind: From the fields of a call to the reduction that a pass runs.
        source: The only source field among them; None where there is none, or several.
        constant: Under what the result is kept for the run where no operand changes; None where it
            depends on more than stored tensors.
    """

    operands: tuple[tuple[str, str], ...]
    bind: Callable[[RelationFields], Reduction]
    source: str | None
    constant: Hashable | None


def plan_of(
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
    operands = tuple(operands_of(message))
    sources = [name for target, name in operands if target == "u"]
    value = edge_value(message_of(fields, message))
    constant: Hashable | None = None
    if value is None or isinstance(
        value, EdgeRows | Endpoint
    ):  # values to be computed may drop out
        constant = ("aggregate", fields.etype, message.name, reduce.op)

    def bind(fields: RelationFields) -> Reduction:
        if message.rhs_target is None and message.lhs_target == "u":
            found: Message = CopySource(fields.src[message.lhs_field])
        else:
            found = message_of(fields, message)
        reduction = reduction_of(found, reduce, fields.edge.num_rows, counts)
        reduction.site = site
        return reduction

    return AggregationPlan(operands, bind, sources[0] if len(sources) == 1 else None, constant)


def reduction_of(
    message: Message, reduce: ReduceFunction, num_edges: int, counts: Tensor | None
) -> Reduction:
    """How messages that meet become one."""
    if reduce.op in ("max", "min"):
        return Extremum(message, reduce.op, num_edges)
    return Sum(message, counts)


def operands_of(function: MessageFunction) -> list[tuple[str, str]]:
    """Side and name of the fields that a built-in function reads."""
    found = [(function.lhs_target, function.lhs_field)]
    if function.rhs_target is not None and function.rhs_field is not None:
        found.append((function.rhs_target, function.rhs_field))
    return found


def message_of(fields: RelationFields, function: MessageFunction) -> Message:
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


def edge_value(message: Message) -> Expression | None:
    """The part of a message that has a row per edge, if any."""
    return message.value if isinstance(message, Weighted | PerEdge) else None


def broadcasts(op: str, left: Tensor, right: Tensor) -> bool:
    """Whether the rows of two operands fit each other."""
    rows = left.shape[1:], right.shape[1:]
    if op == "dot" and (not all(rows) or rows[0][-1] != rows[1][-1]):
        return False
    try:
        torch.broadcast_shapes(*rows)
    except RuntimeError:
        return False
    return True
