# SPDX-License-Identifier: Apache-2.0
"""One-shot aggregation: fetch the whole halo of a layer in one exchange, then work locally.

[Note: overlap]
    What built-in functions and fused attention do with source rows runs as a pass of two shards:
    the own one, computed while the exchange of all remote rows is under way, and one with all
    remote rows. Backward it is the other way round: gradients of remote rows are found first, and
    travel home while those of own rows are found. Fields that wait for the same exchange go with
    it. A function of the user is called once, with all edges, as on a graph in one process; it
    works on *extended rows*, which are a copy of the own rows with the remote ones after them. So
    does whatever reads rows that have come before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..._typing import CanonicalEType
from ...function import MessageFunction, ReduceFunction
from ...graph import Frame
from ...graph.message_passing import RelationData, edge_values, reduce_messages
from ...ops import Adjacency, Attention, attend
from .._config import AggregationMode
from ..execution import (
    CollectiveTransport,
    ExtendedFields,
    FetchedFields,
    ShardPass,
    extended,
    keep_rows,
    known_rows,
    remote_rows,
)
from ..lazy import LeafKey, PerEdge
from ..reductions import (
    TARGETS,
    AttentionSum,
    CompanionRows,
    EdgeValues,
    Extremum,
    Reduction,
    Sum,
    softmax_over_in_edges,
    softmax_over_out_edges,
)
from ..topology import Halo, ShardStructure
from ._calls import (
    RelationFields,
    by_source_type,
    constant_key,
    mean_counts,
    message_of,
    operands_of,
    value_of,
)

Seen: TypeAlias = Mapping[LeafKey, Tensor]
"""What all edges see of each leaf: extended rows of sources."""


@dataclass
class _Planned:
    """A reduction that waits for its pass.

    Args:
        etype: The relation.
        reduction: What to compute.
        again: The same by autograd alone, for gradients of gradients.
        source: The field whose rows travel, and its tensor; None for attention.
        constant: Under what the result is kept for the run, if it may be.
    """

    etype: CanonicalEType
    reduction: Reduction
    again: Callable[[Adjacency, Seen], Tensor]
    source: tuple[str, Tensor] | None = None
    constant: tuple[Any, list[Tensor]] | None = None


class OneShot:
    """Message passing over all in-edges at once; any reduction works.

    Args:
        structure: The rank's rows and edges.
        mode: How many exchanges are under way at a time, and in which dtype rows travel.
    """

    def __init__(self, structure: ShardStructure, mode: AggregationMode) -> None:
        self.structure, self.mode = structure, mode
        self.fetched = FetchedFields(structure, mode.halo_dtype)

    def extended_rows(self, requests: Sequence[tuple[Halo, Tensor]]) -> list[Tensor]:
        """Own and halo rows of some tensors, ``[num_extended, ...]`` each, in one exchange."""
        if self.structure.world_size == 1:
            return [own for _, own in requests]
        rows = remote_rows(self.structure.constants, requests, self.mode.halo_dtype)
        return [extended(*request, part) for request, part in zip(requests, rows, strict=True)]

    def reduce(
        self, fields: RelationFields, frames: Sequence[Frame], message: Any, reduce: Any
    ) -> dict[str, Any]:
        """New destination fields, as `graph._relation.reduce_messages`.

        Args:
            fields: The relation.
            frames: All source frames in use.
            message: A `MessageFunction`, or one of the user's.
            reduce: A `ReduceFunction`, or one of the user's.
        """
        plan = self._planned_reduction(fields, message, reduce)
        if plan is None:
            return reduce_messages(self._data(fields, frames), message, reduce)
        result = None if plan.constant is None else self.structure.constants.get(*plan.constant)
        if result is None:
            result = self._run_alone(plan, fields, frames)
            if result is None:
                found = reduce_messages(self._data(fields, frames), message, reduce)
                result = found[reduce.out_field]
            if plan.constant is not None:
                self.structure.constants.put(*plan.constant, result)
        return {reduce.out_field: result}

    def reduce_many(self, calls: Sequence[tuple[RelationFields, Any, Any]]) -> list[dict[str, Any]]:
        """Results of several relations; each source type is exchanged once for all it can be.

        A call is (fields, message function, reduce function), or (fields, attention, field).
        """
        results: list[dict[str, Any] | None] = [None] * len(calls)
        planned: dict[int, _Planned] = {}
        for index, (fields, message, reduce) in enumerate(calls):
            plan = self._planned(fields, message, reduce)
            if plan is None or self.structure.world_size == 1:
                continue
            kept = None if plan.constant is None else self.structure.constants.get(*plan.constant)
            if kept is None:
                planned[index] = plan
            else:
                results[index] = {_name(reduce): kept}
        for indices in by_source_type(planned):
            group = [planned[index] for index in indices]
            for index, plan, result in zip(indices, group, self._run(group)[0], strict=True):
                results[index] = {_name(calls[index][2]): result}
                if plan.constant is not None:
                    self.structure.constants.put(*plan.constant, result)
        frames = [fields.src for fields, _, _ in calls]
        return [
            self._alone(fields, frames, message, reduce) if result is None else result
            for (fields, message, reduce), result in zip(calls, results, strict=True)
        ]

    def edge_values(
        self, fields: RelationFields, frames: Sequence[Frame], func: Any
    ) -> dict[str, Any]:
        """New edge fields, as `graph._relation.edge_values`."""
        source = self._source(fields, func)
        if source is None:
            return edge_values(self._data(fields, frames), func)
        etype, operands = fields.etype, _operands(fields, func)

        def again(adjacency: Adjacency, seen: Seen) -> Tensor:
            data = _data_of(adjacency, etype, operands, seen)
            found: Tensor = edge_values(data, func)[func.out_field]
            return found

        reduction = EdgeValues([PerEdge(value_of(fields, func))], fields.num_edges)
        plan = _Planned(etype, reduction, again, source)
        result = self._run_alone(plan, fields, frames)
        if result is None:
            return edge_values(self._data(fields, frames), func)
        return {func.out_field: result}

    def attend(self, etype: CanonicalEType, attention: Attention) -> Tensor:
        """Fused attention; what it reads of sources comes in one exchange."""
        if self.structure.world_size == 1:
            return attend(self.structure.halo([etype]).adjacency(etype), attention)
        (result,), _ = self._run([self._planned_attention(etype, attention)])
        return result

    def edge_softmax(
        self, etypes: Sequence[CanonicalEType], logits: Sequence[Tensor], norm_by: str
    ) -> list[Tensor]:
        """Weights of the edges of some relations that share an end type, normalised together."""
        if norm_by == "src":
            return softmax_over_out_edges(self.structure, etypes, logits)
        return softmax_over_in_edges(self.structure, etypes, logits)

    def _data(self, fields: RelationFields, frames: Sequence[Frame]) -> RelationData:
        halo = self.structure.halo([fields.etype])
        source = ExtendedFields(self.fetched, halo, fields.src, frames)
        adjacency = halo.adjacency(fields.etype)
        return RelationData(adjacency, fields.etype, source, fields.dst, fields.edge)

    def _alone(
        self, fields: RelationFields, frames: Sequence[Frame], message: Any, reduce: Any
    ) -> dict[str, Any]:
        if isinstance(message, Attention):
            return {reduce: self.attend(fields.etype, message)}
        return self.reduce(fields, frames, message, reduce)

    # ------------------------------------------------------------------ what passes can take

    def _source(self, fields: RelationFields, function: Any) -> tuple[str, Tensor] | None:
        """The source field of a built-in function that a pass can take; None for any other."""
        if not isinstance(function, MessageFunction):
            return None
        values = [fields.frame(target)[name] for target, name in operands_of(function)]
        if not all(isinstance(value, Tensor) for value in values):
            return None
        if len(values) == 2 and not _broadcasts(function.op, *values):
            return None  # the kernel says what is wrong
        names = [name for target, name in operands_of(function) if target == "u"]
        return (names[0], fields.src[names[0]]) if len(names) == 1 else None

    def _planned(self, fields: RelationFields, message: Any, reduce: Any) -> _Planned | None:
        if isinstance(message, Attention):
            return self._planned_attention(fields.etype, message)
        return self._planned_reduction(fields, message, reduce)

    def _planned_reduction(
        self, fields: RelationFields, message: Any, reduce: Any
    ) -> _Planned | None:
        source = self._source(fields, message)
        if source is None or not isinstance(reduce, ReduceFunction):
            return None
        found, etype = message_of(fields, message), fields.etype
        constant = constant_key(etype, message, reduce, found)
        if reduce.op in ("max", "min"):
            best = Extremum(found, reduce.op, fields.num_edges)
            if not best.needs_sources:
                by_winners = _by_winners(best, ("u", id(source[1])))
                return _Planned(etype, best, by_winners, source, constant)
            reduction: Reduction = best
        else:
            counts = mean_counts(self.structure, etype) if reduce.op == "mean" else None
            reduction = Sum(found, counts)
        operands = _operands(fields, message)

        def again(adjacency: Adjacency, seen: Seen) -> Tensor:
            data = _data_of(adjacency, etype, operands, seen)
            result: Tensor = reduce_messages(data, message, reduce)[reduce.out_field]
            return result

        return _Planned(etype, reduction, again, source, constant)

    def _planned_attention(self, etype: CanonicalEType, attention: Attention) -> _Planned:
        keys = [
            None if tensor is None else (target, id(tensor))
            for target, tensor in zip(TARGETS, attention.operands, strict=True)
        ]
        bias_key = None if attention.bias is None else ("c", id(attention.bias))
        rule = attention.with_operands([None] * len(TARGETS)).finished(None, attention.relu)

        def again(adjacency: Adjacency, seen: Seen) -> Tensor:
            whole = rule.with_operands([None if key is None else seen[key] for key in keys])
            bias = None if bias_key is None else seen[bias_key]
            return attend(adjacency, whole.finished(bias, rule.relu))

        return _Planned(etype, AttentionSum(attention), again)

    # ------------------------------------------------------------------ passes

    def _run_alone(
        self, plan: _Planned, fields: RelationFields, frames: Sequence[Frame]
    ) -> Tensor | None:
        """The result of one reduction, with the fields that wait for the same exchange.

        None where its rows are here already, which extended rows serve better.
        """
        assert plan.source is not None
        name, own = plan.source
        halo = self.structure.halo([plan.etype])
        if self.structure.world_size == 1 or self.fetched.has(halo, own):
            return None
        others = self.fetched.companions(halo, fields.src, name)
        (result,), remote = self._run([plan], others)
        for tensor in [own, *others]:
            self.fetched.put(halo, tensor, remote["u", id(tensor)], frames)
        return result

    def _run(
        self, planned: Sequence[_Planned], others: Sequence[Tensor] = ()
    ) -> tuple[list[Tensor], dict[LeafKey, Tensor]]:
        """Results of a pass over own and remote rows, and the remote rows.

        Args:
            planned: What to compute; of relations with one source type.
            others: Tensors of the source type whose rows travel, too.
        """
        constants, wire = self.structure.constants, self.mode.halo_dtype
        halo = self.structure.halo([plan.etype for plan in planned])
        reductions = [(plan.etype, plan.reduction) for plan in planned]
        if others:
            reductions.append((planned[0].etype, CompanionRows(others)))
        leaves = {leaf.key: leaf for _, r in reductions for leaf in r.leaves()}
        tensors = {key: leaf.tensor for key, leaf in leaves.items() if leaf.target == "u"}
        found = {key: known_rows(constants, halo, own) for key, own in tensors.items()}
        known = {key: rows for key, rows in found.items() if rows is not None}
        needing = [key for key, own in tensors.items() if own.requires_grad]
        source_keys = list(tensors)
        # Not the plans, whose tensors the pass may let go before the backward.
        ways = [(plan.etype, plan.again) for plan in planned]

        def again(by_key: Mapping[LeafKey, Tensor]) -> Sequence[Tensor]:
            """By extended rows."""
            requests = [(halo, by_key[key]) for key in source_keys]
            remote = dict(zip(source_keys, remote_rows(constants, requests, wire), strict=True))
            seen = dict(by_key)
            for key in source_keys:
                seen[key] = extended(halo, by_key[key], remote[key])
            results = [way(halo.adjacency(etype), seen) for etype, way in ways]
            return [*results, *(remote[key] for key in needing)]

        walk = ShardPass(
            CollectiveTransport(halo, wire),
            reductions,
            True,
            self.mode.prefetch,
            self.structure.device,
            known,
            again,
        )
        results = [outputs[0] for outputs in walk.run()[: len(planned)]]
        remote = walk.take_remote()
        # Where all results of some rows are kept, nobody asks for the rows again.
        read_again = {("u", id(tensor)) for tensor in others}
        for plan in planned:
            if plan.constant is None:
                read_again |= {leaf.key for leaf in plan.reduction.leaves()}
        for key, own in tensors.items():
            if key in read_again and key not in known:
                keep_rows(constants, halo, own, remote[key])
        return results, remote


def _by_winners(best: Extremum, key: LeafKey) -> Callable[[Adjacency, Seen], Tensor]:
    """How to get at an extremum of copies again: not by their values, which nobody keeps."""
    return lambda adjacency, seen: best.of_winners(adjacency, seen[key])


def _name(reduce: ReduceFunction | str) -> str:
    return reduce if isinstance(reduce, str) else reduce.out_field


def _operands(fields: RelationFields, function: MessageFunction) -> list[tuple[str, str, LeafKey]]:
    """Side, name and leaf of what a built-in function reads."""
    return [
        (target, name, (target, id(fields.frame(target)[name])))
        for target, name in operands_of(function)
    ]


def _data_of(
    adjacency: Adjacency,
    etype: CanonicalEType,
    operands: Sequence[tuple[str, str, LeafKey]],
    seen: Seen,
) -> RelationData:
    """A relation with the fields of one function alone."""
    sides: dict[str, dict[str, Tensor]] = {"u": {}, "v": {}, "e": {}}
    for target, name, key in operands:
        sides[target][name] = seen[key]
    return RelationData(adjacency, etype, sides["u"], sides["v"], sides["e"])


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
