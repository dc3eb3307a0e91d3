# SPDX-License-Identifier: Apache-2.0
"""TypedGraph: the types, counts and features of a graph, and the scopes in which features change.

The half of the protocol that needs no edges: whatever holds frames per type has it, whether the
graph is whole here or spans ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from ..._base.typing import CanonicalEType
from ...errors import GraphTypeError, GraphUnsupportedError
from ..frame import (
    EdgeSpaceView,
    Frame,
    FrameView,
    Initializer,
    NodeSpaceView,
    Scheme,
    TypedFrameView,
)
from ..structure import Schema

GraphT = TypeVar("GraphT", bound="TypedGraph")


class TypedGraph:
    """Base of `MessagePassingGraph`."""

    _schema: Schema
    _src_frames: list[Frame]
    _dst_frames: list[Frame]
    _edge_frames: list[Frame]
    is_block: bool
    device: torch.device
    idtype: torch.dtype

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
            schema: The types.
            src_frames: One frame per source type.
            dst_frames: One per destination type; the same list object as ``src_frames`` where
                the two sides are one set of nodes.
            edge_frames: One per relation.
            is_block: What ``is_block`` answers.
            device: Where all frames live.
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

    # ------------------------------------------------------------------ left to subclasses

    def _relation_view(self: GraphT, relations: list[int]) -> GraphT:
        """A graph of the same class with these relations, sharing their frames."""
        self._unsupported("slicing by relation")

    def _node_ids(self, ids: Any, side: str, index: int) -> Tensor:
        """Checked ids of nodes of one type, ``[k]``, int64 or int32."""
        self._unsupported("naming single nodes", "use all nodes")

    def _edge_ids(self, edges: Any, relation: int) -> Tensor:
        """Checked ids of edges given by ids or by a pair of end points."""
        self._unsupported("naming single edges", "use all edges")

    def all_edges(self, form: str = "uv", order: str = "eid", etype: Any = None) -> Any:
        """End points or ids of all edges of a relation.

        Args:
            form: ``"uv"`` for (sources, destinations), ``"eid"`` for ids, ``"all"`` for all three.
            order: ``"eid"`` (or None) by edge id, ``"srcdst"`` by source, then destination.
            etype: The relation, where there are several.

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

    def to_canonical_etype(self, etype: Any) -> CanonicalEType:
        """The triple of a relation given by name or triple (or None, where there is only one).

        Raises:
            ValueError: unknown or ambiguous.
        """
        return self._schema.canonical_etypes[self._schema.relation(etype)]

    def get_etype_id(self, etype: Any) -> int:
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

    def num_edges(self, etype: Any = None) -> int:
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

    def edge_attr_schemes(self, etype: Any = None) -> dict[str, Scheme]:
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

    def _enter_scope(self) -> None:
        shared = self._dst_frames is self._src_frames
        self._src_frames = [frame.scope() for frame in self._src_frames]
        self._dst_frames = (
            self._src_frames if shared else [frame.scope() for frame in self._dst_frames]
        )
        self._edge_frames = [frame.scope() for frame in self._edge_frames]

    def local_var(self: GraphT) -> GraphT:
        """The same graph with its own dictionaries of features: what is set there stays there."""
        new = copy.copy(self)
        new._enter_scope()
        return new

    def clone(self: GraphT) -> GraphT:
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
            ntype: The node type, where there are several.
        """
        side, index = self._schema.node_id(ntype)
        _add_initializer(self._frames(side)[index], initializer, field)

    def set_e_initializer(
        self, initializer: Initializer, field: str | None = None, etype: Any = None
    ) -> None:
        """Say what new rows of an edge feature are; the counterpart of `set_n_initializer`."""
        _add_initializer(self._edge_frames[self._schema.relation(etype)], initializer, field)

    def __copy__(self: GraphT) -> GraphT:
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def __deepcopy__(self: GraphT, memo: dict[int, Any]) -> GraphT:
        new = object.__new__(type(self))
        memo[id(self)] = new
        for name, value in self.__dict__.items():
            new.__dict__[name] = copy.deepcopy(value, memo)
        return new

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise GraphTypeError(
            f"a {type(self).__name__} cannot be pickled, because graphshard reads and writes no "
            f"pickle; save it with to_parquet or partition_graph. To another process a Graph or "
            f"Block goes through the queues and arguments of torch.multiprocessing"
        )

    def __getitem__(self: GraphT, key: Any) -> GraphT:
        """The relation that ``key`` names, as a graph that shares the features.

        Args:
            key: A name or a triple; ``:`` stands for any, as in ``g["user", :, "item"]``.

        Raises:
            ValueError: nothing matches.
            TypeError: the key has another form.
        """
        return self._relation_view(self._schema.find(key))


def _add_initializer(frame: Frame, initializer: Initializer, field: str | None) -> None:
    if not callable(initializer):
        raise GraphTypeError(
            f"an initializer must be a function of shape, dtype, device and ids (got {initializer})"
        )
    frame.initializers = {**frame.initializers, field: initializer}


def frames_of(graph: TypedGraph) -> tuple[list[Frame], list[Frame], list[Frame]]:
    """Frames of sources, destinations and edges, in the order of the types.

    For what fills the frames of many graphs; ``graph.nodes[T].data`` looks types up by name.
    """
    return graph._src_frames, graph._dst_frames, graph._edge_frames
