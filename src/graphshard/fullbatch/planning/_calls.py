# SPDX-License-Identifier: Apache-2.0
"""One call of message passing on a sharded graph: its fields, and the messages of its functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

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
    leaves_of,
)
from ..topology import ConstantCache, ShardStructure


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


def mean_counts(structure: ShardStructure, etype: CanonicalEType) -> Tensor:
    """What the sum of a relation's messages is divided by: ``[num_dst]``, at least 1."""
    return structure.in_degrees(etype).clamp(min=1)


def constant_key(
    etype: CanonicalEType, message: Any, reduce: ReduceFunction, found: Message
) -> tuple[Any, list[Tensor]] | None:
    """Under what a result may be kept for the run, or None if it depends on what changes.

    Only aggregates of stored tensors qualify: deferred values may hold dropout.
    """
    if not isinstance(message, MessageFunction):
        return None
    value = edge_value(found)
    if value is not None and not isinstance(value, EdgeRows | Endpoint):
        return None
    leaves = found.leaves() if value is None else [*found.leaves(), *leaves_of([value])]
    tensors = [leaf.tensor for leaf in leaves]
    if not ConstantCache.is_constant(tensors):
        return None
    targets = tuple(leaf.target for leaf in leaves)
    return ("aggregate", etype, message.name, reduce.op, targets), tensors


class _OfRelation(Protocol):
    @property
    def etype(self) -> CanonicalEType: ...


def by_source_type(planned: Mapping[int, _OfRelation]) -> list[list[int]]:
    """Numbers of the plans whose relations have one source type, type by type."""
    groups: dict[str, list[int]] = {}
    for index, plan in planned.items():
        groups.setdefault(plan.etype[0], []).append(index)
    return list(groups.values())
