# SPDX-License-Identifier: Apache-2.0
"""MessagePassingGraph: what every kind of graph answers, and all that layers rely on.

A `Graph` is whole in this process, a `Block` is a sampled bipartite piece, a sharded graph is one
rank's part of something that spans all ranks. Layers are written against this class alone. It
parses arguments, runs apply functions, combines relations and stores results; the computation on
one relation is left to a few hooks, which a subclass fills with kernels or with communication::

    update_all ---------> _reduce(relation, message, reduce)      -> new destination fields
    multi_update_all ---> _reduce_many([(relation, m, r), ...])   -> the same, several at once
    apply_edges --------> _edge_values(relation, func)            -> new edge fields
    edge_softmax -------> _edge_softmax(relation, logits, norm)   -> weights per edge
    attend -------------> _attend(relation, attention)            -> rows per destination, or None
    g[etype] -----------> _relation_view(relations)               -> same class, shared frames

The names and their meaning are DGL's, so that its users, and its own layers, find what they know.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from ...errors import GraphUnsupportedError, GraphValueError
from ...function import MessageFunction, ReduceFunction, as_message, as_reduce
from ...ops import Attention
from ..frame import OverlayView, RowsView
from ..structure import ALL, is_all
from ._cross import cross_reduce
from ._typed import TypedGraph
from ._udf import NodeBatch, run_apply

ProtocolT = TypeVar("ProtocolT", bound="MessagePassingGraph")
ResultT = TypeVar("ResultT")
ApplyFunction = Callable[[NodeBatch], Mapping[str, Any]]


@dataclass(frozen=True, eq=False)
class AggregationStep:
    """An ``update_all`` that a layer asks for, and waits for.

    Args:
        graph: A graph of one relation.
        message: The message function.
        reduce: The reduce function.
    """

    graph: MessagePassingGraph
    message: Any
    reduce: Any


Steps: TypeAlias = Generator[AggregationStep, None, ResultT]
"""A layer's forward as a generator: it goes on once what it asked for is stored on the graph."""


def run_steps(steps: Steps[ResultT]) -> ResultT:
    """The result of a layer whose aggregations run one by one."""

    def update(asked: Sequence[AggregationStep]) -> None:
        for one in asked:
            one.graph.update_all(one.message, one.reduce)

    return run_together([steps], update)[0]


def run_together(
    started: Sequence[Any], update: Callable[[Sequence[AggregationStep]], None]
) -> list[Any]:
    """Results of several layers whose aggregations are answered together.

    Args:
        started: `Steps`, and results of layers that do not aggregate in steps.
        update: Stores the results of several aggregations, one of each layer at most.
    """
    results = list(started)
    waiting = {i: steps for i, steps in enumerate(started) if isinstance(steps, Generator)}
    try:
        while waiting:
            asked = {}
            for i, steps in waiting.items():
                try:
                    asked[i] = next(steps)
                except StopIteration as stop:
                    results[i] = stop.value
            waiting = {i: waiting[i] for i in asked}
            if asked:
                update(list(asked.values()))
    finally:  # after an error, every layer leaves the scopes that it is in
        for steps in waiting.values():
            steps.close()
    return results


class MessagePassingGraph(TypedGraph):
    """Base of all graphs. Subclasses call `_init_protocol` and implement the hooks."""

    #: Whether layers should compute again in the backward what they can, instead of keeping it.
    rematerializes: bool = False

    def homogenised(self) -> MessagePassingGraph:
        """This graph as one of a single relation, for layers that take edge types as numbers.

        It is that already, or has a form of its own for it, as a sharded graph does.

        Raises:
            NotImplementedError: Neither.
        """
        if len(self.canonical_etypes) != 1:
            self._unsupported("a homogenised form", "make one with to_homogeneous")
        return self

    # ------------------------------------------------------------------ hooks

    def _reduce(self, relation: int, message_func: Any, reduce_func: Any) -> dict[str, Any]:
        """Messages and reduction over one relation.

        Args:
            relation: Index into ``canonical_etypes``.
            message_func: A `MessageFunction`, or a user-defined callable.
            reduce_func: A `ReduceFunction`, or a user-defined callable.

        Returns:
            New fields of the destination type, each with a row per destination node; rows without
            in-edges are 0. Nothing is stored.
        """
        self._unsupported("update_all")

    def _reduce_many(self, calls: Sequence[tuple[int, Any, Any]]) -> list[dict[str, Any]]:
        """Several `_reduce` at once, ``(relation, message_func, reduce_func)`` each, in order."""
        return [self._reduce(*call) for call in calls]

    def _edge_values(self, relation: int, func: Any) -> dict[str, Any]:
        """New fields of all edges of a relation, from a `MessageFunction` or a callable."""
        self._unsupported("apply_edges")

    def _edge_values_at(self, relation: int, func: Any, eids: Tensor) -> dict[str, Any]:
        """The same for the edges ``eids`` alone."""
        self._unsupported("apply_edges on some edges", "apply it to all edges")

    def _edge_softmax(self, relation: int, logits: Any, norm_by: str) -> Any:
        """Softmax of ``logits`` over the edges that share a destination, or a source."""
        self._unsupported("edge_softmax")

    def _edge_softmax_joint(
        self, relations: list[int], logits: list[Any], norm_by: str
    ) -> list[Any]:
        """Softmax over the edges of several relations that end at one node type together."""
        self._unsupported(
            "edge_softmax over several relations that share a node type",
            "normalise each relation alone with edge_softmax(graph[etype], logits)",
        )

    def _attend(self, relation: int, attention: Attention) -> Tensor | None:
        """Attention in one go: ``[num_dst, heads, dim]``, or None where there is no such kernel."""
        return None

    def any_zero_in_degree(self, etype: Any = None) -> bool:
        """Whether some destination has no in-edge; with no ``etype``, in any relation."""
        self._unsupported("any_zero_in_degree")

    def has_edges(self, etype: Any = None) -> bool:
        """Whether there is an edge; with no ``etype``, in any relation."""
        self._unsupported("has_edges")

    def in_degrees(self, v: Any = ALL, etype: Any = None) -> Any:
        """Number of in-edges of destination nodes.

        Args:
            v: A node id, several, or all.
            etype: The relation, where there are several.

        Returns:
            A number for a number, else a tensor of the graph's idtype.
        """
        self._unsupported("in_degrees")

    def out_degrees(self, u: Any = ALL, etype: Any = None) -> Any:
        """Number of out-edges of source nodes; the counterpart of `in_degrees`."""
        self._unsupported("out_degrees")

    def localize(self: ProtocolT, inputs: dict[str, Tensor]) -> tuple[ProtocolT, dict[str, Tensor]]:
        """A graph in which all sources are local, and the inputs that belong to it.

        Args:
            inputs: Source node type -> ``[num_src_nodes, ...]``.

        Returns:
            This graph and the inputs, unless a subclass has something to fetch.
        """
        return self, inputs

    def together(self, calls: Sequence[Callable[[], ResultT]]) -> list[ResultT]:
        """Run several calls that each aggregate over this graph, or over slices of it.

        Args:
            calls: Run in order. A call may return its forward as a generator that yields each
                `AggregationStep`; a subclass may let those of several calls share what they fetch.

        Returns:
            Their results, in order.
        """
        found = (call() for call in calls)
        return [run_steps(one) if isinstance(one, Generator) else one for one in found]

    def _update_some(
        self,
        caller: str,
        chosen: Any,
        message_func: Any,
        reduce_func: Any,
        apply_node_func: ApplyFunction | None,
        etype: Any,
    ) -> None:
        """What ``send_and_recv``, ``pull`` and ``push`` do; ``caller`` is which of them."""
        every = "edges" if caller == "send_and_recv" else "nodes"
        self._unsupported(caller, f"use update_all, which takes all {every}")

    # ------------------------------------------------------------------ message passing

    def update_all(
        self,
        message_func: Any,
        reduce_func: Any,
        apply_node_func: ApplyFunction | None = None,
        etype: Any = None,
    ) -> None:
        """Send messages along all edges, reduce them, and store the result on destinations.

        Args:
            message_func: Built-in, or a callable from `EdgeBatch` to a dictionary of messages.
            reduce_func: Built-in, or a callable from `NodeBatch` to a dictionary of fields.
            apply_node_func: Called with the reduced fields laid over the old ones; what it
                returns is stored instead of the reduced fields.
            etype: The relation. None on a graph of several relations means all of them at once,
                for built-in functions: ``sum``, ``max`` and ``min`` then run across relations.

        Raises:
            TypeError: a function is neither built in nor callable.
            ValueError: the message and the reduce function name different messages.
            KeyError: a field is missing.
            NotImplementedError: ``mean`` over several relations at once.
        """
        message, reduce = checked_functions(message_func, reduce_func)
        if etype is None and len(self._edge_frames) > 1:
            self._update_all_relations(message, reduce, apply_node_func)
            return
        relation = 0 if etype is None and self._edge_frames else self._schema.relation(etype)
        result = self._reduce(relation, message, reduce)
        self._store(self._schema.dst_of[relation], result, apply_node_func)

    def send_and_recv(
        self,
        edges: Any,
        message_func: Any,
        reduce_func: Any,
        apply_node_func: ApplyFunction | None = None,
        etype: Any = None,
    ) -> None:
        """Send messages along some edges, reduce and store them where they arrive.

        Args:
            edges: Edge ids, or a pair (source ids, destination ids).
            message_func: As for `update_all`.
            reduce_func: As for `update_all`.
            apply_node_func: As for `update_all`.
            etype: The relation, where there are several.
        """
        self._update_some("send_and_recv", edges, message_func, reduce_func, apply_node_func, etype)

    def pull(
        self,
        v: Any,
        message_func: Any,
        reduce_func: Any,
        apply_node_func: ApplyFunction | None = None,
        etype: Any = None,
    ) -> None:
        """Receive messages along all in-edges of some nodes; nodes without any get 0.

        Where none of the nodes has an in-edge and the reduce function is user-defined, nothing is
        reduced: the apply function alone is called.

        Args:
            v: Destination node ids.
            message_func: As for `update_all`.
            reduce_func: As for `update_all`.
            apply_node_func: As for `update_all`.
            etype: The relation, where there are several.
        """
        self._update_some("pull", v, message_func, reduce_func, apply_node_func, etype)

    def push(
        self,
        u: Any,
        message_func: Any,
        reduce_func: Any,
        apply_node_func: ApplyFunction | None = None,
        etype: Any = None,
    ) -> None:
        """Send messages along all out-edges of some nodes; the nodes they reach are updated.

        Args:
            u: Source node ids.
            message_func: As for `update_all`.
            reduce_func: As for `update_all`.
            apply_node_func: As for `update_all`.
            etype: The relation, where there are several.
        """
        self._update_some("push", u, message_func, reduce_func, apply_node_func, etype)

    def _update_all_relations(
        self, message: Any, reduce: Any, apply_node_func: ApplyFunction | None
    ) -> None:
        if not (isinstance(message, MessageFunction) and isinstance(reduce, ReduceFunction)):
            raise GraphUnsupportedError(
                f"update_all over several relations at once takes built-in functions only (the "
                f"graph has {self.canonical_etypes}); give etype, or use multi_update_all"
            )
        if reduce.op == "mean":
            raise GraphUnsupportedError(
                "update_all cannot take 'mean' over several relations at once, because the mean "
                "of means is not the mean; give etype, or use multi_update_all with a cross reducer"
            )
        calls = [(relation, message, reduce) for relation in range(len(self._edge_frames))]
        for index, result in self._cross(calls, [None] * len(calls), reduce.op):
            self._store(index, result, apply_node_func)

    def multi_update_all(
        self,
        etype_dict: Mapping[Any, Any],
        cross_reducer: str | Callable[[list[Tensor]], Tensor],
        apply_node_func: ApplyFunction | None = None,
    ) -> None:
        """`update_all` over several relations, whose results are combined per destination type.

        Args:
            etype_dict: Relation -> ``(message_func, reduce_func)`` or ``(message_func,
                reduce_func, apply_node_func)``; that apply function sees one relation's result.
            cross_reducer: ``"sum"``, ``"mean"``, ``"max"``, ``"min"``, ``"stack"`` (a new
                dimension 1, in the order of ``canonical_etypes``), or a callable from a list of
                tensors to a tensor. ``max`` and ``min`` of relations that were reduced by max or
                min themselves pass over relations in which a node has no in-edge; otherwise such
                a relation counts as 0.
            apply_node_func: Called for each destination type with the combined result; what it
                returns is stored beside that result.

        Raises:
            TypeError: as for `update_all`.
            ValueError: as for `update_all`; or an unknown cross reducer.
        """
        calls, applies = [], []
        for etype, functions in etype_dict.items():
            parts = functions if isinstance(functions, tuple | list) else (functions,)
            if not 2 <= len(parts) <= 3:
                raise GraphValueError(
                    f"each relation needs (message_func, reduce_func) or (message_func, "
                    f"reduce_func, apply_node_func) (got {len(parts)} entries for {etype!r})"
                )
            message, reduce = checked_functions(parts[0], parts[1])
            calls.append((self._schema.relation(etype), message, reduce))
            applies.append(parts[2] if len(parts) == 3 else None)
        for index, result in self._cross(calls, applies, cross_reducer):
            applied = {}
            if apply_node_func is not None:
                applied = self._applied(index, result, apply_node_func)
            self._store(index, {**result, **applied}, None)

    def _cross(
        self,
        calls: list[tuple[int, Any, Any]],
        applies: Sequence[ApplyFunction | None],
        cross_reducer: str | Callable[[list[Tensor]], Tensor],
    ) -> list[tuple[int, dict[str, Any]]]:
        """Combined result per destination type: (index of the type, new fields)."""
        results = self._reduce_many(calls)
        by_type: dict[int, list[tuple[int, str | None, dict[str, Any]]]] = {}
        for (relation, _, reduce), apply, result in zip(calls, applies, results, strict=True):
            index = self._schema.dst_of[relation]
            if apply is not None:
                result = self._applied(index, result, apply)
            op = reduce.op if isinstance(reduce, ReduceFunction) and apply is None else None
            by_type.setdefault(index, []).append((relation, op, result))
        return [
            (index, cross_reduce(parts, cross_reducer, self._relation_in_degrees))
            for index, parts in by_type.items()
        ]

    def _relation_in_degrees(self, relation: int) -> Tensor:
        degrees = self.in_degrees(etype=self._schema.canonical_etypes[relation])
        assert isinstance(degrees, Tensor)
        return degrees

    def _store(
        self, index: int, result: Mapping[str, Any], apply_node_func: ApplyFunction | None
    ) -> None:
        if apply_node_func is not None:
            result = self._applied(index, result, apply_node_func)
        self._dst_frames[index]._set_all(result, "dst")

    def _applied(
        self, index: int, result: Mapping[str, Any], func: ApplyFunction
    ) -> dict[str, Any]:
        frame = self._dst_frames[index]
        nodes = torch.arange(frame.num_rows, dtype=self.idtype, device=self.device)
        return run_apply(func, OverlayView(result, frame), nodes, self._schema.dsttypes[index])

    def apply_nodes(self, func: ApplyFunction, v: Any = ALL, ntype: str | None = None) -> None:
        """Set node fields to what ``func`` returns for a `NodeBatch` of the nodes.

        Args:
            func: From `NodeBatch` to a dictionary of fields.
            v: Node ids, or all.
            ntype: The node type, where there are several.
        """
        side, index = self._schema.node_id(ntype)
        frame = self._frames(side)[index]
        name = (self._schema.dsttypes if side == "dst" else self._schema.srctypes)[index]
        if is_all(v):
            nodes = torch.arange(frame.num_rows, dtype=self.idtype, device=self.device)
            frame._set_all(run_apply(func, RowsView(frame, None), nodes, name), "node")
            return
        rows = self._node_ids(v, side, index)
        frame._set_all(run_apply(func, frame.rows(rows), rows, name), "node", rows)

    def apply_edges(self, func: Any, edges: Any = ALL, etype: Any = None) -> None:
        """Set edge fields to what ``func`` gives for each edge.

        Args:
            func: A built-in message function, or a callable from `EdgeBatch` to a dictionary.
            edges: Edge ids, a pair of end points, or all. Other edges keep their values, or get 0
                where the field is new.
            etype: The relation. None on a graph of several relations means all of them, for
                built-in functions.

        Raises:
            TypeError: as for `update_all`.
            KeyError: a field is missing.
            NotImplementedError: a user-defined function over several relations at once.
        """
        builtin = as_message(func)
        func = func if builtin is None else builtin
        if etype is None and len(self._edge_frames) > 1:
            if builtin is None or not is_all(edges):
                raise GraphUnsupportedError(
                    f"apply_edges over several relations at once takes built-in functions and all "
                    f"edges only (the graph has {self.canonical_etypes}); give etype"
                )
            values = [self._edge_values(r, func) for r in range(len(self._edge_frames))]
            for frame, fields in zip(self._edge_frames, values, strict=True):
                frame._set_all(fields, "edge")
            return
        relation = self._schema.relation(etype)
        frame = self._edge_frames[relation]
        if is_all(edges):
            frame._set_all(self._edge_values(relation, func), "edge")
            return
        rows = self._edge_ids(edges, relation)
        frame._set_all(self._edge_values_at(relation, func, rows), "edge", rows)


def checked_functions(message_func: Any, reduce_func: Any) -> tuple[Any, Any]:
    """The pair with built-ins read; raises where the two name different messages."""
    message, reduce = message_func, reduce_func
    if not isinstance(message, MessageFunction):
        message = as_message(message_func)
    if not isinstance(reduce, ReduceFunction):
        reduce = as_reduce(reduce_func)
    if message is not None and reduce is not None and message.out_field != reduce.msg_field:
        raise GraphValueError(
            f"the reduce function must read the message that the message function writes (got "
            f"{message.name}(..., {message.out_field!r}) with {reduce.name}({reduce.msg_field!r}, "
            f"{reduce.out_field!r})); use one name"
        )
    return message_func if message is None else message, reduce_func if reduce is None else reduce
