# SPDX-License-Identifier: Apache-2.0
"""MessagePassingGraph: what every kind of graph answers, and all that layers rely on.

A `Graph` is whole in this process, a `Block` is a sampled bipartite piece, a sharded graph is one
rank's part of something that spans all ranks. Layers are written against this class alone. It
holds types, counts and features, parses arguments, runs apply functions, combines relations and
stores results; the computation on one relation is left to a few hooks, which a subclass fills with
kernels or with communication::

    update_all ---------> _reduce(relation, message, reduce)      -> new destination fields
    multi_update_all ---> _reduce_many([(relation, m, r), ...])   -> the same, several at once
    apply_edges --------> _edge_values(relation, func)            -> new edge fields
    edge_softmax -------> _edge_softmax(relation, logits, norm)   -> weights per edge
    attend -------------> _attend(relation, attention)            -> rows per destination, or None
    g[etype] -----------> _relation_view(relations)               -> same class, shared frames

The names and their meaning are DGL's, so that its users, and its own layers, find what they know.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce as fold
from typing import Any, NoReturn, TypeAlias, TypeVar, overload

import torch
from torch import Tensor

from ..._base.typing import CanonicalEType, EdgesOrPairs, EType, Ids, NormBy
from ...errors import GraphTypeError, GraphUnsupportedError, GraphValueError
from ...function import MessageFunction, ReduceFunction, as_message, as_reduce
from ...ops import Adjacency, Attention
from ...ops import edge_softmax as adjacency_edge_softmax
from ..frame import (
    EdgeSpaceView,
    Frame,
    FrameView,
    Initializer,
    NodeSpaceView,
    OverlayView,
    RowsView,
    Scheme,
    TypedFrameView,
)
from ..structure import ALL, All, Schema, check_ids, id_tensor, is_all
from ._relation import EdgeBatch, NodeBatch, run_apply

ProtocolT = TypeVar("ProtocolT", bound="MessagePassingGraph")
ResultT = TypeVar("ResultT")
ApplyFunction = Callable[[NodeBatch], Mapping[str, Any]]
EdgeFunction: TypeAlias = MessageFunction | Callable[[EdgeBatch], Mapping[str, Any]]
NodeFunction: TypeAlias = ReduceFunction | ApplyFunction


@dataclass(frozen=True, eq=False)
class AggregationStep:
    """An ``update_all`` that a layer asks for, and waits for.

    Args:
        meanwhile: Work of the layer that does not need the result; a graph may do it while it
            waits for rows of other processes, or leave it to the layer.
    """

    graph: MessagePassingGraph
    message: Any
    reduce: Any
    meanwhile: Callable[[], None] | None = None


SumOverEdges: TypeAlias = Callable[[Tensor, Callable[[], Any]], Tensor]
"""Sums of rows over edges, and work that it may do, once, while it waits for other processes."""


Steps: TypeAlias = Generator[AggregationStep, None, ResultT]
"""A layer's forward as a generator: it goes on once what it asked for is stored on the graph."""


def run_steps(steps: Steps[ResultT]) -> ResultT:
    """The result of a layer whose aggregations run one by one."""

    def update(asked: Sequence[AggregationStep]) -> None:
        for step in asked:
            step.graph._aggregate(step)

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


class MessagePassingGraph:
    """Base of all graphs. Subclasses call `_init_protocol` and implement the hooks.

    An argument ``ntype`` names a node type, ``etype`` a relation, by its name or its triple; None
    stands for the only one. What else None means, a method says.
    """

    _schema: Schema
    _src_frames: list[Frame]
    _dst_frames: list[Frame]
    _edge_frames: list[Frame]
    is_block: bool
    device: torch.device
    idtype: torch.dtype

    #: Whether layers should compute again in the backward what they can, instead of keeping it.
    rematerializes: bool = False

    def _init_protocol(
        self,
        schema: Schema,
        src_frames: list[Frame],
        dst_frames: list[Frame],
        edge_frames: list[Frame],
        is_block: bool,
        device: torch.device,
        idtype: torch.dtype,
    ) -> None:
        """Set what the protocol reads.

        Args:
            dst_frames: One per destination type; the same list object as ``src_frames`` where
                the two sides are one set of nodes.
            idtype: dtype of ids that the graph returns.
        """
        assert len(src_frames) == len(schema.srctypes)
        assert len(dst_frames) == len(schema.dsttypes)
        assert len(edge_frames) == len(schema.etypes)
        assert schema.split or dst_frames is src_frames
        self._schema = schema
        self._src_frames = src_frames
        self._dst_frames = dst_frames
        self._edge_frames = edge_frames
        self.is_block = is_block
        self.device = device
        self.idtype = idtype

    # ------------------------------------------------------------------ hooks

    def _reduce(self, relation: int, message: EdgeFunction, reduce: NodeFunction) -> dict[str, Any]:
        """Messages and reduction over one relation.

        Args:
            message: A `MessageFunction`, or a user-defined callable.
            reduce: A `ReduceFunction`, or a user-defined callable.

        Returns:
            New fields of the destination type, each with a row per destination node; rows without
            in-edges are 0. Nothing is stored.
        """
        self._unsupported("update_all")

    def _reduce_many(self, calls: Sequence[tuple[int, Any, Any]]) -> list[dict[str, Any]]:
        """Several `_reduce` at once, ``(relation, message_func, reduce_func)`` each, in order."""
        return [self._reduce(*call) for call in calls]

    def _aggregate(self, step: AggregationStep) -> None:
        """An ``update_all`` over the only relation, and perhaps the work of the layer with it."""
        self.update_all(step.message, step.reduce)

    def sums_of_gradients(self, rows: Tensor, *, is_wanted: bool) -> SumOverEdges | None:
        """What finds gradients of sums over in-edges, by sending gradients of destinations.

        Args:
            rows: ``[num_nodes, *]``, like those that would be sent. No value is read.
            is_wanted: Whether there will be gradients. Ranks that share a graph must all ask, and
                agree.

        Returns:
            Sums of given rows over the out-edges of each node; None where a layer has to leave
            that to autograd.
        """
        return None

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

    def any_zero_in_degree(self, etype: EType | None = None) -> bool:
        """Whether some destination has no in-edge; with no ``etype``, in any relation."""
        self._unsupported("any_zero_in_degree")

    def has_edges(self, etype: EType | None = None) -> bool:
        """Whether there is an edge; with no ``etype``, in any relation."""
        self._unsupported("has_edges")

    def in_degrees(self, v: Ids | All = ALL, etype: EType | None = None) -> Any:
        """Number of in-edges of destination nodes.

        Returns:
            A number for a number, else a tensor of the graph's idtype.
        """
        self._unsupported("in_degrees")

    def out_degrees(self, u: Ids | All = ALL, etype: EType | None = None) -> Any:
        """Number of out-edges of source nodes; the counterpart of `in_degrees`."""
        self._unsupported("out_degrees")

    def localize(
        self: ProtocolT,
        inputs: dict[str, Tensor],
        *,
        are_summed: bool = False,
        instead_of: int | None = None,
    ) -> tuple[ProtocolT, dict[str, Tensor]]:
        """A graph in which all sources are local, and the inputs that belong to it.

        Args:
            inputs: Source node type -> ``[num_src_nodes, ...]``.
            are_summed: Whether they are read to be added up as they are, and for nothing else, by
                calls that run `together`.
            instead_of: Width of what the layer makes of each row with one matrix, and sends
                otherwise; then it is done only where it is less. None: in any case.

        Returns:
            This graph and the inputs, unless a subclass has something to fetch.
        """
        return self, inputs

    def together(self, calls: Sequence[Callable[[], ResultT]]) -> list[ResultT]:
        """Run several calls that each aggregate over this graph, or over slices of it.

        Args:
            calls: Run in order. A call may return its forward as a generator that yields each
                `AggregationStep`; a subclass may let those of several calls share what they fetch.
        """
        results = (call() for call in calls)
        return [run_steps(r) if isinstance(r, Generator) else r for r in results]

    def _update_some(
        self,
        caller: str,
        chosen: Any,
        message_func: EdgeFunction,
        reduce_func: NodeFunction,
        apply_node_func: ApplyFunction | None,
        etype: EType | None,
    ) -> None:
        """What ``send_and_recv``, ``pull`` and ``push`` do; ``caller`` is which of them."""
        every = "edges" if caller == "send_and_recv" else "nodes"
        self._unsupported(caller, f"use update_all, which takes all {every}")

    def _relation_view(self: ProtocolT, relations: list[int]) -> ProtocolT:
        """A graph of the same class with these relations, sharing their frames."""
        self._unsupported("slicing by relation")

    def _node_ids(self, ids: Any, side: str, index: int) -> Tensor:
        """Checked ids of nodes of one type, ``[k]``, int64 or int32."""
        self._unsupported("naming single nodes", "use all nodes")

    def _edge_ids(self, edges: Any, relation: int) -> Tensor:
        """Checked ids of edges given by ids or by a pair of end points."""
        self._unsupported("naming single edges", "use all edges")

    def _checked_edge_ids(self, ids: Any, relation: int) -> Tensor:
        """``ids`` as a tensor, if they are those of edges."""
        frame = self._edge_frames[relation]
        edge_ids = id_tensor(ids, "edge ids", self.idtype, self.device)
        check_ids(edge_ids, frame.num_rows, "an edge id", frame.what)
        return edge_ids

    def all_edges(self, form: str = "uv", order: str = "eid", etype: EType | None = None) -> Any:
        """End points or ids of all edges of a relation.

        Args:
            form: ``"uv"`` for (sources, destinations), ``"eid"`` for ids, ``"all"`` for all three.
            order: ``"eid"`` (or None) by edge id, ``"srcdst"`` by source, then destination.

        Raises:
            ValueError: unknown form or order.
        """
        self._unsupported("all_edges")

    def _unsupported(self, what: str, cure: str | None = None) -> NoReturn:
        name = type(self).__name__
        advice = cure or "use a Graph, or Block, which is whole in this process"
        raise GraphUnsupportedError(f"{name} does not offer {what}; {advice}")

    # ------------------------------------------------------------------ types and counts

    @property
    def ntypes(self) -> list[str]:
        """Node types; on a block the source types, then the destination types."""
        return self._schema.ntypes

    @property
    def srctypes(self) -> list[str]:
        """Types of nodes that edges may leave."""
        return self._schema.srctypes

    @property
    def dsttypes(self) -> list[str]:
        """Types of nodes that edges may enter."""
        return self._schema.dsttypes

    @property
    def etypes(self) -> list[str]:
        """Names of the relations, in the order of ``canonical_etypes``."""
        return self._schema.etypes

    @property
    def canonical_etypes(self) -> list[CanonicalEType]:
        """Relations as (source type, name, destination type)."""
        return self._schema.canonical_etypes

    @property
    def is_homogeneous(self) -> bool:
        """Whether there is one node type and one relation."""
        return len(self._schema.ntypes) == 1 and len(self._schema.etypes) == 1

    @property
    def is_unibipartite(self) -> bool:
        """Whether sources and destinations are separate sets of nodes."""
        return self._schema.split

    def to_canonical_etype(self, etype: EType | None) -> CanonicalEType:
        """The triple of a relation given by name or triple (or None, where there is only one).

        Raises:
            ValueError: unknown or ambiguous.
        """
        return self._schema.canonical_etypes[self._schema.relation(etype)]

    def get_etype_id(self, etype: EType | None) -> int:
        """Index of a relation in ``canonical_etypes``."""
        return self._schema.relation(etype)

    def get_ntype_id(self, ntype: str | None) -> int:
        """Index of a node type in ``ntypes``."""
        side, index = self._schema.node_id(ntype)
        name = (self._schema.dsttypes if side == "dst" else self._schema.srctypes)[index]
        return self._schema.ntypes.index(name)

    def num_nodes(self, ntype: str | None = None) -> int:
        """Number of nodes of a type, or of all types together."""
        if ntype is None:
            dst = self._dst_frames if self._schema.split else []
            return sum(frame.num_rows for frame in (*self._src_frames, *dst))
        side, index = self._schema.node_id(ntype)
        return self._frames(side)[index].num_rows

    def num_src_nodes(self, ntype: str | None = None) -> int:
        """Number of source nodes of a type, or of all types together."""
        if ntype is None:
            return sum(frame.num_rows for frame in self._src_frames)
        return self._src_frames[self._schema.src_id(ntype)].num_rows

    def num_dst_nodes(self, ntype: str | None = None) -> int:
        """Number of destination nodes of a type, or of all types together."""
        if ntype is None:
            return sum(frame.num_rows for frame in self._dst_frames)
        return self._dst_frames[self._schema.dst_id(ntype)].num_rows

    def num_edges(self, etype: EType | None = None) -> int:
        """Number of edges of a relation, or of all relations together."""
        if etype is None:
            return sum(frame.num_rows for frame in self._edge_frames)
        return self._edge_frames[self._schema.relation(etype)].num_rows

    number_of_nodes = num_nodes
    number_of_src_nodes = num_src_nodes
    number_of_dst_nodes = num_dst_nodes
    number_of_edges = num_edges

    # ------------------------------------------------------------------ data

    def _frames(self, side: str) -> list[Frame]:
        if side == "edge":
            return self._edge_frames
        return self._dst_frames if side == "dst" else self._src_frames

    @property
    def nodes(self) -> NodeSpaceView:
        """``nodes(T)``: ids. ``nodes[T].data``: features."""
        return NodeSpaceView(self, "node")

    @property
    def srcnodes(self) -> NodeSpaceView:
        """``srcnodes(T)``: ids of source nodes. ``srcnodes[T].data``: their features."""
        return NodeSpaceView(self, "src")

    @property
    def dstnodes(self) -> NodeSpaceView:
        """``dstnodes(T)``: ids of destination nodes. ``dstnodes[T].data``: their features."""
        return NodeSpaceView(self, "dst")

    @property
    def edges(self) -> EdgeSpaceView:
        """``edges(form, order, etype)``: end points and ids. ``edges[E].data``: features."""
        return EdgeSpaceView(self)

    @property
    def srcdata(self) -> Any:
        """Features of source nodes; with several types, field -> {type: values}."""
        if len(self._src_frames) == 1:
            return FrameView(self, "src", "src", 0)
        schema = self._schema
        return TypedFrameView(self, "src", schema.srctypes, lambda t: ("src", schema.src_id(t)))

    @property
    def dstdata(self) -> Any:
        """Features of destination nodes; with several types, field -> {type: values}."""
        if len(self._dst_frames) == 1:
            return FrameView(self, "dst", "dst", 0)
        schema = self._schema
        return TypedFrameView(self, "dst", schema.dsttypes, lambda t: ("dst", schema.dst_id(t)))

    @property
    def ndata(self) -> Any:
        """Features of nodes; with several types, field -> {type: values}.

        As in DGL, a block has several types, whatever their names: a name means its source nodes,
        unless only destinations have it, and the destinations of others are in ``dstdata``.
        """
        schema = self._schema
        if not schema.split and len(self._src_frames) == 1:
            return FrameView(self, "node", "src", 0)
        return TypedFrameView(self, "node", list(dict.fromkeys(schema.ntypes)), schema.node_id)

    @property
    def edata(self) -> Any:
        """Features of edges; with several relations, field -> {triple: values}."""
        if len(self._edge_frames) == 1:
            return FrameView(self, "edge", "edge", 0)
        schema, etypes = self._schema, self._schema.canonical_etypes
        return TypedFrameView(self, "edge", etypes, lambda t: ("edge", schema.relation(t)))

    def node_attr_schemes(self, ntype: str | None = None) -> dict[str, Scheme]:
        """Row shape and dtype of each feature of a node type."""
        side, index = self._schema.node_id(ntype)
        return self._frames(side)[index].schemes

    def edge_attr_schemes(self, etype: EType | None = None) -> dict[str, Scheme]:
        """Row shape and dtype of each feature of a relation."""
        return self._edge_frames[self._schema.relation(etype)].schemes

    @contextmanager
    def local_scope(self) -> Iterator[None]:
        """A block in which fields may be set and deleted without a trace outside.

        On leaving it, by an error too, every field is what it was, and so are the edges where a
        graph's edges can change. Values are shared, not copied: a change *inside* a tensor stays.

        Example:
            >>> from graphshard.graph import graph
            >>> g = graph(([0, 1], [1, 2]))
            >>> g.ndata["x"] = torch.ones(3)
            >>> with g.local_scope():
            ...     g.ndata["h"] = g.ndata["x"] * 2
            >>> "h" in g.ndata
            False
        """
        saved = self._scope_state()
        self._enter_scope()
        try:
            yield
        finally:
            self.__dict__.update(saved)

    def _scope_state(self) -> dict[str, Any]:
        """What a scope puts back when it is left."""
        return {
            name: self.__dict__[name] for name in ("_src_frames", "_dst_frames", "_edge_frames")
        }

    def _enter_scope(self, changed: Callable[[Frame], Frame] = Frame.scope) -> None:
        """Have other frames from now on, each made of the one that was there."""
        old_src, old_dst = self._src_frames, self._dst_frames
        self._src_frames = [changed(frame) for frame in old_src]
        self._dst_frames = self._src_frames
        if old_dst is not old_src:
            self._dst_frames = [changed(frame) for frame in old_dst]
        self._edge_frames = [changed(frame) for frame in self._edge_frames]

    def local_var(self: ProtocolT) -> ProtocolT:
        """The same graph with its own dictionaries of features: what is set there stays there."""
        new = copy.copy(self)
        new._enter_scope()
        return new

    def clone(self: ProtocolT) -> ProtocolT:
        """A graph of its own with the same edges and features; feature values are shared."""
        return self.local_var()

    def set_n_initializer(
        self, initializer: Initializer, field: str | None = None, ntype: str | None = None
    ) -> None:
        """Say what new rows of a node feature are, where a call gives values for some rows only.

        Args:
            initializer: Called as ``initializer(shape, dtype, device, slice of ids)``; returns a
                tensor of that shape. `graphshard.dgl.init.zero_initializer` is the default.
            field: The feature; None for every feature without an initializer of its own.
        """
        side, index = self._schema.node_id(ntype)
        _add_initializer(self._frames(side)[index], initializer, field)

    def set_e_initializer(
        self, initializer: Initializer, field: str | None = None, etype: EType | None = None
    ) -> None:
        """Say what new rows of an edge feature are; the counterpart of `set_n_initializer`."""
        _add_initializer(self._edge_frames[self._schema.relation(etype)], initializer, field)

    def __copy__(self: ProtocolT) -> ProtocolT:
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def __deepcopy__(self: ProtocolT, memo: dict[int, Any]) -> ProtocolT:
        new = object.__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise GraphTypeError(
            f"a {type(self).__name__} cannot be pickled, because graphshard reads and writes no "
            f"pickle; save it with to_parquet or partition_graph. To another process a Graph or "
            f"Block goes through the queues and arguments of torch.multiprocessing"
        )

    def __getitem__(self: ProtocolT, key: Any) -> ProtocolT:
        """The relation that ``key`` names, as a graph that shares the features.

        Args:
            key: A name or a triple; ``:`` stands for any, as in ``g["user", :, "item"]``.

        Raises:
            ValueError: nothing matches.
            TypeError: the key has another form.
        """
        return self._relation_view(self._schema.find(key))

    def homogenised(self) -> MessagePassingGraph:
        """This graph as one of a single relation, for layers that take edge types as numbers.

        It is that already, or has a form of its own for it, as a sharded graph does.

        Raises:
            NotImplementedError: Neither.
        """
        if len(self.canonical_etypes) != 1:
            self._unsupported("a homogenised form", "make one with to_homogeneous")
        return self

    # ------------------------------------------------------------------ message passing

    def update_all(
        self,
        message_func: EdgeFunction,
        reduce_func: NodeFunction,
        apply_node_func: ApplyFunction | None = None,
        etype: EType | None = None,
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
        edges: EdgesOrPairs,
        message_func: EdgeFunction,
        reduce_func: NodeFunction,
        apply_node_func: ApplyFunction | None = None,
        etype: EType | None = None,
    ) -> None:
        """Send messages along some edges, reduce and store them where they arrive.

        The functions are those of `update_all`.

        Args:
            edges: Edge ids, or a pair (source ids, destination ids).
        """
        self._update_some("send_and_recv", edges, message_func, reduce_func, apply_node_func, etype)

    def pull(
        self,
        v: Ids,
        message_func: EdgeFunction,
        reduce_func: NodeFunction,
        apply_node_func: ApplyFunction | None = None,
        etype: EType | None = None,
    ) -> None:
        """Receive messages along all in-edges of some nodes; nodes without any get 0.

        The functions are those of `update_all`. Where none of the nodes has an in-edge and the
        reduce function is user-defined, nothing is reduced: the apply function alone is called.
        """
        self._update_some("pull", v, message_func, reduce_func, apply_node_func, etype)

    def push(
        self,
        u: Ids,
        message_func: EdgeFunction,
        reduce_func: NodeFunction,
        apply_node_func: ApplyFunction | None = None,
        etype: EType | None = None,
    ) -> None:
        """Send messages along all out-edges of some nodes; the nodes they reach are updated.

        The functions are those of `update_all`.
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
            if apply_node_func is not None:
                result = result | self._applied(index, result, apply_node_func)
            self._store(index, result, None)

    def _cross(
        self,
        calls: list[tuple[int, Any, Any]],
        applies: Sequence[ApplyFunction | None],
        cross_reducer: str | Callable[[list[Tensor]], Tensor],
    ) -> list[tuple[int, dict[str, Any]]]:
        """Combined result per destination type: (index of the type, new fields)."""
        results = self._reduce_many(calls)
        by_type: dict[int, list[_Part]] = {}
        for (relation, _, reduce), apply, result in zip(calls, applies, results, strict=True):
            index = self._schema.dst_of[relation]
            if apply is not None:
                result = self._applied(index, result, apply)
            op = reduce.op if isinstance(reduce, ReduceFunction) and apply is None else None
            by_type.setdefault(index, []).append((relation, op, result))

        def in_degrees(relation: int) -> Any:
            return self.in_degrees(etype=self._schema.canonical_etypes[relation])

        return [
            (index, _cross_reduce(parts, cross_reducer, in_degrees))
            for index, parts in by_type.items()
        ]

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

    def apply_nodes(
        self, func: ApplyFunction, v: Ids | All = ALL, ntype: str | None = None
    ) -> None:
        """Set node fields to what ``func`` returns for a `NodeBatch` of the nodes."""
        side, index = self._schema.node_id(ntype)
        frame = self._frames(side)[index]
        name = (self._schema.dsttypes if side == "dst" else self._schema.srctypes)[index]
        if is_all(v):
            nodes = torch.arange(frame.num_rows, dtype=self.idtype, device=self.device)
            frame._set_all(run_apply(func, RowsView(frame, None), nodes, name), "node")
            return
        rows = self._node_ids(v, side, index)
        frame._set_all(run_apply(func, frame.rows(rows), rows, name), "node", rows)

    def apply_edges(
        self,
        func: EdgeFunction,
        edges: EdgesOrPairs | All = ALL,
        etype: EType | None = None,
    ) -> None:
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


def _add_initializer(frame: Frame, initializer: Initializer, field: str | None) -> None:
    if not callable(initializer):
        raise GraphTypeError(
            f"an initializer must be a function of shape, dtype, device and ids (got {initializer})"
        )
    frame.initializers = {**frame.initializers, field: initializer}


def frames_of(graph: MessagePassingGraph) -> tuple[list[Frame], list[Frame], list[Frame]]:
    """Frames of sources, destinations and edges, in the order of the types.

    For what fills the frames of many graphs; ``graph.nodes[T].data`` looks types up by name.
    """
    return graph._src_frames, graph._dst_frames, graph._edge_frames


def checked_functions(
    message_func: EdgeFunction, reduce_func: NodeFunction
) -> tuple[EdgeFunction, NodeFunction]:
    """The pair with built-ins read; raises where the two name different messages."""
    message = (
        message_func if isinstance(message_func, MessageFunction) else as_message(message_func)
    )
    reduce = reduce_func if isinstance(reduce_func, ReduceFunction) else as_reduce(reduce_func)
    if message is not None and reduce is not None and message.out_field != reduce.msg_field:
        raise GraphValueError(
            f"the reduce function must read the message that the message function writes (got "
            f"{message.name}(..., {message.out_field!r}) with {reduce.name}({reduce.msg_field!r}, "
            f"{reduce.out_field!r})); use one name"
        )
    return message_func if message is None else message, reduce_func if reduce is None else reduce


_Part = tuple[int, str | None, dict[str, Any]]
"""(relation, built-in reduce operator or None, the relation's result)."""


def _cross_reduce(
    parts: Sequence[_Part],
    reducer: str | Callable[[list[Tensor]], Tensor],
    in_degrees: Callable[[int], Tensor],
) -> dict[str, Any]:
    """Combine the results of relations that end at one node type.

    A relation that does not hold a field takes no part in it. A relation in which a node has no
    in-edge gave it 0; where maxima (or minima) are compared with maxima or minima that 0 is not a
    message, and is passed over.
    """
    if not callable(reducer) and reducer not in ("sum", "mean", "max", "min", "stack"):
        raise GraphValueError(
            f"cross_reducer must be 'sum', 'mean', 'max', 'min', 'stack' or a callable (got "
            f"{reducer!r})"
        )
    if len(parts) == 1 and reducer != "stack":
        return parts[0][2]
    if reducer == "stack":
        parts = sorted(parts, key=lambda part: part[0])
    combined: dict[str, Any] = {}
    for name in dict.fromkeys(name for _, _, result in parts for name in result):
        having = [part for part in parts if name in part[2]]
        values = [result[name] for _, _, result in having]
        if callable(reducer):
            combined[name] = reducer(values)
        elif reducer == "stack":
            combined[name] = torch.stack(values, 1)
        elif len(values) == 1:
            combined[name] = values[0]
        elif reducer in ("max", "min"):
            combined[name] = _extreme(having, values, reducer, in_degrees)
        else:
            total = fold(torch.add, values)
            combined[name] = total / len(values) if reducer == "mean" else total
    return combined


def _extreme(
    parts: Sequence[_Part],
    values: list[Tensor],
    reducer: str,
    in_degrees: Callable[[int], Tensor],
) -> Tensor:
    """Maximum or minimum over relations; where no relation holds a message the result is 0."""
    worst = _limit(values[0].dtype, lowest=reducer == "max")
    filled, masks = [], []
    for (relation, op, _), value in zip(parts, values, strict=True):
        if op in ("max", "min"):
            is_empty = in_degrees(relation) == 0
            masks.append(is_empty.view(-1, *[1] * (value.dim() - 1)))
            value = value.masked_fill(masks[-1], worst)
        filled.append(value)
    stacked = torch.stack(filled, 0)
    best = (stacked.max(0) if reducer == "max" else stacked.min(0)).values
    return best if len(masks) < len(values) else best.masked_fill(torch.stack(masks).all(0), 0)


def _limit(dtype: torch.dtype, lowest: bool) -> float | int:
    if dtype.is_floating_point:
        return float("-inf") if lowest else float("inf")
    info = torch.iinfo(dtype)
    return int(info.min if lowest else info.max)


@overload
def edge_softmax(
    graph: MessagePassingGraph, logits: Tensor, eids: Ids | All = ..., norm_by: NormBy = ...
) -> Tensor: ...


@overload
def edge_softmax(
    graph: MessagePassingGraph,
    logits: Mapping[Any, Any],
    eids: Ids | All = ...,
    norm_by: NormBy = ...,
) -> dict[CanonicalEType, Any]: ...


def edge_softmax(
    graph: MessagePassingGraph, logits: Any, eids: Ids | All = ALL, norm_by: NormBy = "dst"
) -> Any:
    r"""Softmax over the edges that share an end.

    .. math:: a_{uv} = \frac{\exp(z_{uv})}{\sum_{w \in N(v)} \exp(z_{wv})}

    Args:
        logits: ``[num_edges, ...]`` values of the only relation; or relation -> values, and then
            edges of all given relations that share a node are normalised together.
        eids: Edge ids that ``logits`` is about; other edges do not exist for the softmax. All by
            default.
        norm_by: ``"dst"``: over the in-edges of a node. ``"src"``: over its out-edges.

    Returns:
        Weights in the form and shape of ``logits``; on a sharded graph they may be deferred.

    Raises:
        ValueError: unknown ``norm_by``, relation or edge, or a wrong number of rows.
        TypeError: single logits on a graph of several relations.
        NotImplementedError: ``eids`` with several relations, or where the graph lacks it.

    Example:
        >>> import torch
        >>> from graphshard.graph import graph
        >>> g = graph(([0, 1, 2], [1, 2, 2]))
        >>> edge_softmax(g, torch.tensor([5.0, 0.0, 0.0]))
        tensor([1.0000, 0.5000, 0.5000])
    """
    if norm_by not in ("dst", "src"):
        raise GraphValueError(f"norm_by must be 'dst' or 'src' (got {norm_by!r})")
    if isinstance(logits, Mapping):
        if not is_all(eids):
            raise GraphUnsupportedError(
                "edge_softmax takes eids on a single relation only; slice the graph by relation"
            )
        return _softmax_by_type(graph, logits, norm_by)
    if len(graph.canonical_etypes) != 1:
        raise GraphTypeError(
            f"logits must be a dictionary from relation to values because the graph has the "
            f"relations {graph.canonical_etypes} (got {type(logits).__name__})"
        )
    if is_all(eids):
        _check_rows(logits, graph.num_edges(), graph.canonical_etypes[0])
        return graph._edge_softmax(0, logits, norm_by)
    if isinstance(eids, Tensor) and eids.is_floating_point() and bool((eids == eids.floor()).all()):
        eids = eids.long()  # torch.Tensor([0, 1]), as DGL's documentation has it
    rows = graph._edge_ids(eids, 0)
    _check_rows(logits, int(rows.shape[0]), graph.canonical_etypes[0])
    src, dst = (end.index_select(0, rows) for end in graph.all_edges("uv"))
    chosen = Adjacency(src, dst, graph.num_src_nodes(), graph.num_dst_nodes(), check=False)
    return adjacency_edge_softmax(chosen, logits, norm_by)


def _softmax_by_type(
    graph: MessagePassingGraph, logits: Mapping[Any, Any], norm_by: NormBy
) -> dict[CanonicalEType, Any]:
    schema = graph._schema
    by_relation = {schema.relation(etype): values for etype, values in logits.items()}
    ends = schema.dst_of if norm_by == "dst" else schema.src_of
    groups: dict[int, list[int]] = {}
    for relation, values in by_relation.items():
        etype = schema.canonical_etypes[relation]
        _check_rows(values, graph.num_edges(etype), etype)
        groups.setdefault(ends[relation], []).append(relation)
    weights: dict[int, Any] = {}
    for relations in groups.values():
        if len(relations) == 1:
            (relation,) = relations
            weights[relation] = graph._edge_softmax(relation, by_relation[relation], norm_by)
            continue
        values = [by_relation[relation] for relation in relations]
        joint = graph._edge_softmax_joint(relations, values, norm_by)
        weights.update(zip(relations, joint, strict=True))
    return {schema.canonical_etypes[relation]: weights[relation] for relation in by_relation}


def _check_rows(logits: Any, num_edges: int, etype: CanonicalEType) -> None:
    shape = getattr(logits, "shape", None)
    if shape is None:
        raise GraphTypeError(f"logits must be a tensor (got {type(logits).__name__})")
    if len(shape) == 0 or shape[0] != num_edges:
        raise GraphValueError(
            f"logits must have one row for each of the {num_edges} edges of relation {etype} (got "
            f"shape {tuple(shape)})"
        )


def attend(graph: MessagePassingGraph, attention: Attention) -> Tensor | None:
    """Weighted mean of source values by a softmax over in-edges, with nothing stored per edge.

    What `edge_softmax`, dropout and ``update_all`` compute one after the other. On a sharded graph
    every rank must call it.

    Args:
        graph: A graph of one relation.
        attention: Operands, score and mask. Rows of ``values`` and ``src`` are source nodes, rows
            of ``dst`` destination nodes, rows of ``edge`` and ``factor`` edges.

    Returns:
        ``[num_dst, heads, dim]``, 0 for nodes without in-edges; or None, on every rank alike, if
        this graph or these operands have no such kernel: then go by edges.

    Raises:
        TypeError: The graph has several relations, or an operand is no floating-point tensor.
        ValueError: An operand has the wrong shape.

    Example:
        >>> import torch
        >>> from graphshard.graph import graph
        >>> g = graph(([0, 1, 2], [1, 2, 2]))
        >>> values, scores = torch.eye(3).unsqueeze(1), torch.zeros(3, 1)
        >>> attend(g, Attention.additive(values, scores, scores))[2]
        tensor([[0.0000, 0.5000, 0.5000]])
    """
    if len(graph.canonical_etypes) != 1:
        raise GraphTypeError(
            "attend works on one relation at a time (the graph has the relations "
            f"{graph.canonical_etypes}); slice it: graph[etype]"
        )
    return graph._attend(0, attention)
