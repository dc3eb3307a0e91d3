# SPDX-License-Identifier: Apache-2.0
"""The dictionary-like faces of a graph's frames: ``ndata``, ``nodes[T].data``, ``edges[E].data``.

A view holds the graph and a place, never a frame: inside a ``local_scope`` the graph's frames are
others than outside, and a view made outside must follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...errors import GraphTypeError, GraphValueError
from ..structure import ALL, is_all
from ._frame import Frame, View

if TYPE_CHECKING:
    from ..message_passing import TypedGraph


class DataSpace(NamedTuple):
    """What ``g.nodes[T]`` returns: its ``data`` holds the features."""

    data: MutableMapping[str, Any]


class FrameView(MutableMapping[str, Any]):
    """Features of one node type or one relation.

    Args:
        graph: The graph.
        view: The view that settings are recorded under; ``"edge"`` chooses the edge frames.
        side: ``"src"``, ``"dst"`` or ``"edge"``: the list of frames.
        index: Place in that list.
    """

    __slots__ = ("_graph", "_view", "_side", "_index")

    def __init__(self, graph: TypedGraph, view: View, side: str, index: int) -> None:
        self._graph = graph
        self._view = view
        self._side = side
        self._index = index

    @property
    def frame(self) -> Frame:
        """The frame as it is now."""
        return self._graph._frames(self._side)[self._index]

    def __getitem__(self, name: str) -> Any:
        return self.frame[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.frame.set(name, value, self._view)

    def __delitem__(self, name: str) -> None:
        del self.frame[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.frame)

    def __len__(self) -> int:
        return len(self.frame)

    def __contains__(self, name: object) -> bool:
        return name in self.frame

    def __repr__(self) -> str:
        return repr(self.frame)


class FrameRowsView(FrameView):
    """Features of some nodes or edges: reading gathers rows, setting replaces rows.

    Args:
        graph: The graph.
        view: As for `FrameView`.
        side: As for `FrameView`.
        index: As for `FrameView`.
        rows: ``[k]`` row numbers, in range and, for setting, distinct.
    """

    __slots__ = ("_rows",)

    def __init__(self, graph: TypedGraph, view: View, side: str, index: int, rows: Tensor) -> None:
        super().__init__(graph, view, side, index)
        self._rows = rows

    def __getitem__(self, name: str) -> Any:
        return self.frame[name].index_select(0, self._rows)

    def __setitem__(self, name: str, value: Any) -> None:
        self.frame.set_rows(name, self._rows, value, self._view)

    def __delitem__(self, name: str) -> None:
        raise GraphValueError(
            f"a field can be deleted only for all rows (got {name!r} on some rows)"
        )

    def __repr__(self) -> str:
        return repr(dict(self))


class TypedFrameView(MutableMapping[str, dict[Any, Any]]):
    """Features of several types at once: field -> {type: values}; types without it are left out.

    Args:
        graph: The graph.
        view: As for `FrameView`.
        keys: The types.
        find: Turns a type, or what a user calls it, into (side, index).
    """

    __slots__ = ("_graph", "_view", "_keys", "_find")

    def __init__(
        self,
        graph: TypedGraph,
        view: View,
        keys: list[Any],
        find: Callable[[Any], tuple[str, int]],
    ) -> None:
        self._graph = graph
        self._view = view
        self._keys = keys
        self._find = find

    def _frame(self, key: Any) -> Frame:
        side, index = self._find(key)
        return self._graph._frames(side)[index]

    def _typed_frames(self) -> Iterator[tuple[Any, Frame]]:
        for key in self._keys:
            yield key, self._frame(key)

    def __getitem__(self, name: str) -> dict[Any, Any]:
        return {key: frame[name] for key, frame in self._typed_frames() if name in frame}

    def __setitem__(self, name: str, value: Mapping[Any, Any]) -> None:
        if not isinstance(value, Mapping):
            raise GraphTypeError(
                f"field {name!r} must be set with a dictionary from type to tensor because there "
                f"are several types {self._keys} (got {type(value).__name__}); to set one type, "
                f"use .nodes[type].data or .edges[etype].data"
            )
        for key, values in value.items():
            self._frame(key).set(name, values, self._view)

    def __delitem__(self, name: str) -> None:
        frames = [frame for _, frame in self._typed_frames() if name in frame]
        if not frames:
            raise KeyError(f"no field {name!r} on any type")
        for frame in frames:
            frame.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return any(name in frame for _, frame in self._typed_frames())

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for _, frame in self._typed_frames() for name in frame))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self))


class NodeSpaceView:
    """``g.nodes``, ``g.srcnodes``, ``g.dstnodes``: call for ids, index by type for features.

    Args:
        graph: The graph.
        view: ``"node"``, ``"src"`` or ``"dst"``.
    """

    __slots__ = ("_graph", "_view")

    def __init__(self, graph: TypedGraph, view: View) -> None:
        self._graph = graph
        self._view: View = view

    def _place(self, ntype: str | None) -> tuple[str, int]:
        schema = self._graph._schema
        if self._view == "src":
            return "src", schema.src_id(ntype)
        if self._view == "dst":
            return "dst", schema.dst_id(ntype)
        return schema.node_id(ntype)

    def __call__(self, ntype: str | None = None) -> Tensor:
        """All node ids of a type, ascending, of the graph's idtype."""
        side, index = self._place(ntype)
        graph = self._graph
        return torch.arange(
            graph._frames(side)[index].num_rows, dtype=graph.idtype, device=graph.device
        )

    def __getitem__(self, key: Any) -> DataSpace:
        ids: Any = ALL
        if key is None or isinstance(key, str):
            ntype = key
        elif isinstance(key, slice):
            _check_full_slice(key)
            ntype = None
        elif (
            isinstance(key, tuple) and len(key) == 2 and (key[1] is None or isinstance(key[1], str))
        ):
            ids, ntype = key
            if isinstance(ids, slice):
                _check_full_slice(ids)
                ids = ALL
        else:
            ids, ntype = key, None
        side, index = self._place(ntype)
        if is_all(ids):
            return DataSpace(FrameView(self._graph, self._view, side, index))
        rows = self._graph._node_ids(ids, side, index)
        return DataSpace(FrameRowsView(self._graph, self._view, side, index, rows))


class EdgeSpaceView:
    """``g.edges``: call for end points, index by relation for features.

    Args:
        graph: The graph.
    """

    __slots__ = ("_graph",)

    def __init__(self, graph: TypedGraph) -> None:
        self._graph = graph

    def __call__(self, form: str = "uv", order: str = "eid", etype: Any = None) -> Any:
        """See `Graph.all_edges`."""
        return self._graph.all_edges(form, order, etype)

    def __getitem__(self, key: Any) -> DataSpace:
        graph = self._graph
        if isinstance(key, slice):
            _check_full_slice(key)
            key = None
        if key is None or isinstance(key, str) or _is_type_triple(key):
            return DataSpace(FrameView(graph, "edge", "edge", graph._schema.relation(key)))
        relation = graph._schema.relation(None)
        rows = graph._edge_ids(key, relation)
        return DataSpace(FrameRowsView(graph, "edge", "edge", relation, rows))


def _is_type_triple(key: Any) -> bool:
    return isinstance(key, tuple) and len(key) == 3 and all(isinstance(name, str) for name in key)


def _check_full_slice(key: slice) -> None:
    if key != slice(None, None, None):
        raise GraphValueError(
            f"only the full slice ':' can be used here (got {key}); give a list of ids"
        )
