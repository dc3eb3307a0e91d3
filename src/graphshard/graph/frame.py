# SPDX-License-Identifier: Apache-2.0
"""Feature columns of nodes and edges, and the views that user code sees.

`Frame` holds the named feature columns of all nodes of one type, or of all edges of one relation.
It is a dictionary that checks what is put in: every column has ``num_rows`` rows and lives on the
frame's device. Columns are stored by reference and never copied. A column need not be a tensor: a
sharded graph stores edge values that are computed only when they are used; anything with ``.shape``
and ``.device`` is taken. A column of `LazyRows` is gathered when it is read, so that readers see a
tensor.

Beside the values a frame remembers, per field, through which view it was set, and which fields
were set since the innermost ``local_scope`` began. A sharded graph reads both when it decides
which fields to send together.

The views are the dictionary-like faces of a graph's frames: ``ndata``, ``nodes[T].data``,
``edges[E].data``. A view holds the graph and a place, never a frame: inside a ``local_scope`` the
graph's frames are others than outside, and a view made outside must follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .._base.device import device_of
from .._base.kernels import empty
from .._base.page_locked import gpu_view
from .._base.typing import EType
from ..errors import GraphTypeError, GraphValueError
from .structure import ALL, is_all, is_triple

if TYPE_CHECKING:
    from .message_passing import MessagePassingGraph

_CPU = torch.device("cpu")

Initializer: TypeAlias = Callable[[tuple[int, ...], torch.dtype, torch.device, Any], Tensor]
"""Makes rows that have not been set, from (shape, dtype, device, slice of their ids)."""
View: TypeAlias = Literal["src", "dst", "node", "edge"]
"""Through which view a field was set: ``srcdata``, ``dstdata``, ``ndata``, ``edata``."""


class Scheme(NamedTuple):
    """Shape of one row of a column, and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class LazyRows:
    """Rows of a tensor, not gathered yet.

    Rows that go from the CPU to a GPU pass through page-locked memory; the copy is ordered by the
    stream that is current where the column is read.

    What is gathered is what the tensor holds when the column is first read: a change in place that
    comes before is seen, one that comes later is not. From a tensor that needs a gradient rows are
    gathered at every read, as the reader may record operations or not.

    Args:
        source: ``[num_rows, ...]``; kept, not copied.
        index: ``[k]`` row numbers, int32 or int64, on the same device; they may be lazy too.
        device: Where the rows shall be; by default where ``source`` is.
    """

    __slots__ = ("_index", "_rows", "_source", "device", "dtype", "shape")

    def __init__(
        self, source: Tensor, index: Tensor | LazyRows, device: torch.device | None = None
    ) -> None:
        self._source = source
        self._index = index
        self._rows: Tensor | None = None
        num_rows: int = index.shape[0]
        self.shape: torch.Size = torch.Size((num_rows, *source.shape[1:]))
        self.dtype = source.dtype
        self.device = source.device if device is None else device

    def gather(self) -> Tensor:
        """The rows; the same tensor every time."""
        if self._rows is not None:
            return self._rows
        index = self._index.gather() if isinstance(self._index, LazyRows) else self._index
        source, device = self._source, self.device
        is_plain = source.layout is torch.strided and not source.requires_grad
        if device.type == "cuda" and source.device.type == "cpu" and is_plain:
            # Torch uses page-locked memory again only once the copies from it are done.
            rows = torch.empty(self.shape, dtype=self.dtype, device="cpu", pin_memory=True)
            torch.index_select(source, 0, index, out=rows)
            rows = rows.to(device, non_blocking=True)
        elif source.device == device == _CPU and is_plain:
            # What one batch frees fits the next; memory that the system gives anew takes longer.
            rows = torch.index_select(source, 0, index, out=empty(self.shape, self.dtype))
        else:
            rows = source.index_select(0, index).to(device)
        if not source.requires_grad:
            self._rows = rows
        return rows

    @property
    def gathered(self) -> Tensor | None:
        """The rows, if they have been gathered."""
        return self._rows

    def to(self, device: torch.device, non_blocking: bool = False) -> Tensor | LazyRows:
        """The rows on another device: copied if they have been gathered, else still lazy."""
        if self._rows is not None:
            return self._rows.to(device, non_blocking=non_blocking)
        return LazyRows(self._source, self._index, device)

    def read_there(self, device: torch.device, moved: Mapping[int, Tensor]) -> LazyRows:
        """These rows on another device, which gathers them if the source's pages are locked.

        Args:
            moved: By ``id`` of arrays here, the same arrays on ``device``.
        """
        index = moved.get(id(self._index))
        source = None if index is None else gpu_view(self._source, device)
        if source is None or index is None:
            return LazyRows(self._source, self._index, device)
        return LazyRows(source, index)

    def pin_memory(self) -> Tensor | LazyRows:
        """The rows in page-locked memory if they have been gathered, else as they are, lazy."""
        return self if self._rows is None else self._rows.contiguous().pin_memory()

    def record_stream(self, stream: torch.Stream) -> None:
        """Say that a stream of a GPU uses what has been gathered, or what is left to gather by."""
        if self._rows is not None:
            self._rows.record_stream(stream)
        elif self._source.device.type != "cpu":
            self._index.record_stream(stream)

    def __repr__(self) -> str:
        return f"LazyRows(shape={tuple(self.shape)}, dtype={self.dtype})"


class LazyNumbers(LazyRows):
    """Numbers that follow one another, which take memory when they are first read.

    Args:
        first: The first of them; they are int64.
    """

    __slots__ = ("_first",)

    def __init__(self, first: int, count: int, device: torch.device) -> None:
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        super().__init__(nothing, nothing)
        self._first, self.shape = first, torch.Size((count,))

    def gather(self) -> Tensor:
        if self._rows is None:
            last = self._first + self.shape[0]
            self._rows = torch.arange(self._first, last, device=self.device)
        return self._rows

    def to(self, device: torch.device, non_blocking: bool = False) -> Tensor | LazyRows:
        return LazyNumbers(self._first, self.shape[0], device)

    def read_there(self, device: torch.device, moved: Mapping[int, Tensor]) -> LazyRows:
        return LazyNumbers(self._first, self.shape[0], device)


def record_once(tensor: Tensor, stream: torch.Stream, recorded: dict[int, Tensor]) -> Tensor:
    """Say that a stream of a GPU uses a tensor, as ``torch.Tensor.record_stream``, and return it.

    Args:
        recorded: Memory of which this has been said: tensors may have it in common.
    """
    memory = tensor.untyped_storage()._cdata
    if memory not in recorded:
        recorded[memory] = tensor
        tensor.record_stream(stream)
    return tensor


def version_of(tensor: Tensor) -> int:
    """How often a column was changed in place; inference tensors do not say."""
    return 0 if tensor.is_inference() else tensor._version


class Frame(MutableMapping[str, Any]):
    """Columns of equal height.

    Args:
        device: Where every column must live.
        what: What a row is ("nodes of type 'user'"), for error texts.
        default_view: The view that plain ``frame[name] = value`` records.

    Attributes:
        initializers: Field -> what makes its rows that have not been set; under None, for all
            other fields. Without one they are 0.
    """

    __slots__ = (
        "num_rows",
        "device",
        "what",
        "default_view",
        "initializers",
        "_columns",
        "_views",
        "_recent",
    )

    def __init__(
        self,
        num_rows: int,
        device: torch.device | str = "cpu",
        what: str = "rows",
        default_view: View = "node",
    ) -> None:
        self.num_rows = num_rows
        self.device = _CPU if device == _CPU else device_of(device)
        self.what = what
        self.default_view = default_view
        self.initializers: dict[str | None, Initializer] = {}
        self._columns: dict[str, Any] = {}
        self._views: dict[str, View] = {}
        self._recent: dict[str, None] = {}

    def __getitem__(self, name: str) -> Any:
        try:
            value = self._columns[name]
        except KeyError:
            raise KeyError(
                f"no field {name!r} on {self.what}; there are {sorted(self._columns)}"
            ) from None
        return value.gather() if isinstance(value, LazyRows) else value

    def __setitem__(self, name: str, value: Any) -> None:
        self.set(name, value, self.default_view)

    def __delitem__(self, name: str) -> None:
        if name not in self._columns:
            raise KeyError(f"no field {name!r} on {self.what}; there are {sorted(self._columns)}")
        del self._columns[name]
        self._views.pop(name, None)
        self._recent.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __repr__(self) -> str:
        return repr(self._columns)

    def set(self, name: str, value: Any, view: View) -> None:
        """Store a column.

        Args:
            value: ``[num_rows, ...]`` tensor (or deferred value) on the frame's device.

        Raises:
            TypeError: the name is not a string, or the value has no shape and device.
            ValueError: another number of rows, or another device.
        """
        self._check(name, value, self.num_rows)
        self._columns[name] = value
        self._views[name] = view
        self._recent[name] = None

    def set_lazy(self, name: str, source: Tensor, index: Tensor | LazyRows) -> None:
        """Store rows of a larger column, which are gathered when the field is first read.

        Args:
            source: ``[any, ...]``.
            index: ``[num_rows]`` row numbers of ``source``, in range; see `unread`.
        """
        self.set(name, LazyRows(source, index), self.default_view)

    def unread(self, name: str) -> Any:
        """The column as it is stored: `LazyRows` where it is lazy and may not be gathered yet."""
        return self._columns[name]

    def set_rows(self, name: str, rows: Tensor, values: Tensor, view: View) -> None:
        """Store values for some rows; the rest keep theirs, or are 0 where the field is new.

        The stored column is replaced, not written into, so that gradients flow and other holders
        of the old tensor see no change.

        Args:
            rows: ``[k]`` distinct row numbers, in range.
            values: ``[k, ...]``, of the column's row shape and dtype where it exists.

        Raises:
            TypeError: as for `set`.
            ValueError: as for `set`; or the column exists with another row shape or dtype.
        """
        self._check(name, values, rows.shape[0])
        old = self.get(name)
        if old is None:
            old = self.initial(name, 0, self.num_rows, values)
        elif old.shape[1:] != values.shape[1:] or old.dtype != values.dtype:
            raise GraphValueError(
                f"values for some rows of field {name!r} must match the column, rows of shape "
                f"{tuple(old.shape[1:])} and {old.dtype} (got {tuple(values.shape[1:])} and "
                f"{values.dtype}); delete the field first, or use another name"
            )
        self._columns[name] = old.index_copy(0, rows.long(), values)
        self._views[name] = view
        self._recent[name] = None

    def initial(self, name: str, first: int, stop: int, like: Tensor) -> Tensor:
        """Rows ``first`` to ``stop`` of a field that have not been set.

        Raises:
            ValueError: the initializer made rows of another shape.
        """
        shape = (stop - first, *like.shape[1:])
        make = self.initializers.get(name, self.initializers.get(None))
        if make is None:
            return torch.zeros(shape, dtype=like.dtype, device=self.device)
        rows = make(shape, like.dtype, self.device, slice(first, stop))
        if tuple(rows.shape) != shape:
            raise GraphValueError(
                f"the initializer of field {name!r} must make rows of the shape that it is given "
                f"(got {tuple(rows.shape)} instead of {shape})"
            )
        return rows

    def _set_all(self, fields: Mapping[str, Any], view: View, rows: Tensor | None = None) -> None:
        """Store several columns, or with ``rows`` values for those rows; see `set`, `set_rows`."""
        for name, value in fields.items():
            if rows is None:
                self.set(name, value, view)
            else:
                self.set_rows(name, rows, value, view)

    def _check(self, name: str, value: Any, num_rows: int) -> None:
        if not isinstance(name, str):
            raise GraphTypeError(f"a field name must be a string (got {name!r})")
        shape, device = getattr(value, "shape", None), getattr(value, "device", None)
        if shape is None or not isinstance(device, torch.device):
            raise GraphTypeError(
                f"field {name!r} on {self.what} must be a torch tensor (got "
                f"{type(value).__name__}); convert it with torch.as_tensor"
            )
        if len(shape) == 0 or shape[0] != num_rows:
            raise GraphValueError(
                f"field {name!r} must have one row for each of the {num_rows} {self.what} (got "
                f"shape {tuple(shape)})"
            )
        if device != self.device:
            raise GraphValueError(
                f"field {name!r} is on device {device}, but the graph is on {self.device}; move "
                f"either with .to(device)"
            )

    def view_of(self, name: str) -> View:
        """Through which view a field was last set.

        Raises:
            KeyError: there is no such field.
        """
        self[name]
        return self._views[name]

    def scope_fields(self) -> list[str]:
        """Fields set since the innermost local scope began, in the order of their first setting."""
        return list(self._recent)

    def scope(self) -> Frame:
        """A frame with the same columns, in which nothing is recent yet."""
        new = object.__new__(Frame)
        new.num_rows = self.num_rows
        new.device = self.device
        new.what = self.what
        new.default_view = self.default_view
        new.initializers = self.initializers
        new._columns = self._columns.copy()
        new._views = self._views.copy()
        new._recent = {}
        return new

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Frame:
        """A copy on ``device``; columns that are there already are shared.

        Raises:
            TypeError: a column is a deferred value, which cannot move.
        """
        target = device_of(device)
        return self.map(lambda column: column.to(target, non_blocking=non_blocking), target)

    def map(self, change: Callable[[Any], Any], device: torch.device) -> Frame:
        """A frame of the columns that a function makes of these.

        Args:
            change: From a tensor, or `LazyRows`, to another with as many rows, on ``device``.

        Raises:
            TypeError: a column is a deferred value, which cannot move.
        """
        new = self.scope()
        new.device = device
        for name, value in self._columns.items():
            if not isinstance(value, Tensor | LazyRows):
                raise GraphTypeError(
                    f"field {name!r} is not a tensor yet and cannot move to {device}"
                )
            changed = change(value)
            new._columns[name] = changed
            new.device = changed.device
        return new

    def record_stream(self, stream: torch.Stream, recorded: dict[int, Tensor]) -> None:
        """Say that a stream of a GPU uses the columns; see `record_once`."""
        for value in self._columns.values():
            if isinstance(value, Tensor | LazyRows):
                held = value if isinstance(value, Tensor) else value.gathered
                if held is None:
                    value.record_stream(stream)
                else:
                    record_once(held, stream, recorded)

    def extended(self, num_rows: int, fields: Mapping[str, Tensor]) -> Frame:
        """A frame with more rows behind those of this one.

        Args:
            fields: Field -> ``[num_rows, ...]`` values of the new rows. Fields that are not named
                get initial values there; new fields get initial values in the old rows.

        Raises:
            TypeError: as for `set`.
            ValueError: as for `set`; or a field exists with another row shape or dtype.
        """
        new = Frame(self.num_rows + num_rows, self.device, self.what, self.default_view)
        new.initializers = self.initializers
        for name in dict.fromkeys([*self, *fields]):
            added = fields.get(name)
            if added is not None:
                self._check(name, added, num_rows)
            old = self.get(name)
            if old is None:
                assert added is not None
                old = self.initial(name, 0, self.num_rows, added)
            elif added is None:
                added = self.initial(name, self.num_rows, new.num_rows, old)
            elif old.shape[1:] != added.shape[1:] or old.dtype != added.dtype:
                raise GraphValueError(
                    f"new rows of field {name!r} must match the column, rows of shape "
                    f"{tuple(old.shape[1:])} and {old.dtype} (got {tuple(added.shape[1:])} and "
                    f"{added.dtype}); convert them"
                )
            new.set(name, torch.cat([old, added]), self._views.get(name, self.default_view))
        return new

    def rows(self, index: Tensor) -> RowsView:
        """A mapping that gathers ``index`` from a column when the column is asked for."""
        return RowsView(self, index)

    @property
    def schemes(self) -> dict[str, Scheme]:
        """Row shape and dtype of each column."""
        return {
            name: Scheme(tuple(value.shape[1:]), value.dtype)
            for name, value in self._columns.items()
        }


@dataclass(slots=True, eq=False, repr=False)
class RowsView(Mapping[str, Any]):
    """Chosen rows of a mapping's columns, gathered on first use and kept."""

    _source: Mapping[str, Any]  # each column [num_rows, ...]
    _index: Tensor | None  # [k] row numbers, int32 or int64; None for all rows as they are
    _cache: dict[str, Any] = field(default_factory=dict, init=False)

    def __getitem__(self, name: str) -> Any:
        value = self._cache.get(name)
        if value is None:
            value = self._source[name]
            if self._index is not None:
                value = value.index_select(0, self._index)
            self._cache[name] = value
        return value

    def initial(self, name: str, first: int, stop: int, like: Tensor) -> Tensor:
        """Rows of a field that have not been set; see `Frame.initial`."""
        source = self._source
        if isinstance(source, Frame | RowsView):
            return source.initial(name, first, stop, like)
        return like.new_zeros((stop - first, *like.shape[1:]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._source)

    def __contains__(self, name: object) -> bool:
        return name in self._source

    def __repr__(self) -> str:
        return repr({name: self[name] for name in self})


@dataclass(slots=True, eq=False, repr=False)
class OverlayView(Mapping[str, Any]):
    """One mapping laid over another: what ``apply_node_func`` sees, results before old fields."""

    _top: Mapping[str, Any]
    _bottom: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self._top[name] if name in self._top else self._bottom[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._top
        yield from (name for name in self._bottom if name not in self._top)

    def __len__(self) -> int:
        return len(set(self._top) | set(self._bottom))

    def __contains__(self, name: object) -> bool:
        return name in self._top or name in self._bottom

    def __repr__(self) -> str:
        return repr({name: self[name] for name in self})


# ------------------------------------------------------------------ views of a graph


class DataSpace(NamedTuple):
    """What ``g.nodes[T]`` returns: its ``data`` holds the features."""

    data: MutableMapping[str, Any]


@dataclass(slots=True, eq=False, repr=False)
class FrameView(MutableMapping[str, Any]):
    """Features of one node type or one relation."""

    _graph: MessagePassingGraph
    _view: View  # that settings are recorded under
    _side: str  # the list of frames: "src", "dst" or "edge"
    _index: int  # place in that list

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


@dataclass(slots=True, eq=False, repr=False)
class FrameRowsView(FrameView):
    """Features of some nodes or edges: reading gathers rows, setting replaces rows."""

    _rows: Tensor  # [k] row numbers, in range and, for setting, distinct

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


@dataclass(slots=True, eq=False, repr=False)
class TypedFrameView(MutableMapping[str, dict[Any, Any]]):
    """Features of several types at once: field -> {type: values}; types without it are left out."""

    _graph: MessagePassingGraph
    _view: View
    _keys: list[Any]
    _find: Callable[[Any], tuple[str, int]]  # from a type, or what a user calls it, to its frame

    def _frame(self, key: Any) -> Frame:
        side, index = self._find(key)
        return self._graph._frames(side)[index]

    @property
    def _frames(self) -> dict[Any, Frame]:
        return {key: self._frame(key) for key in self._keys}

    def __getitem__(self, name: str) -> dict[Any, Any]:
        return {key: frame[name] for key, frame in self._frames.items() if name in frame}

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
        if name not in self:
            raise KeyError(f"no field {name!r} on any type")
        for frame in self._frames.values():
            frame.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return any(name in frame for frame in self._frames.values())

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for frame in self._frames.values() for name in frame))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self))


@dataclass(slots=True, eq=False, repr=False)
class NodeSpaceView:
    """``g.nodes``, ``g.srcnodes``, ``g.dstnodes``: call for ids, index by type for features."""

    _graph: MessagePassingGraph
    _view: View

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
        ids: Any
        match key:
            case None | str():
                ids, ntype = ALL, key
            case (ids, None | str() as ntype) if isinstance(key, tuple):
                pass
            case _:
                ids, ntype = key, None
        if isinstance(ids, slice):
            _check_full_slice(ids)
            ids = ALL
        side, index = self._place(ntype)
        if is_all(ids):
            return DataSpace(FrameView(self._graph, self._view, side, index))
        rows = self._graph._node_ids(ids, side, index)
        return DataSpace(FrameRowsView(self._graph, self._view, side, index, rows))


@dataclass(slots=True, eq=False, repr=False)
class EdgeSpaceView:
    """``g.edges``: call for end points, index by relation for features."""

    _graph: MessagePassingGraph

    def __call__(self, form: str = "uv", order: str = "eid", etype: EType | None = None) -> Any:
        """See `Graph.all_edges`."""
        return self._graph.all_edges(form, order, etype)

    def __getitem__(self, key: Any) -> DataSpace:
        graph = self._graph
        if isinstance(key, slice):
            _check_full_slice(key)
            key = None
        if key is None or isinstance(key, str) or (isinstance(key, tuple) and is_triple(key)):
            return DataSpace(FrameView(graph, "edge", "edge", graph._schema.relation(key)))
        relation = graph._schema.relation(None)
        rows = graph._edge_ids(key, relation)
        return DataSpace(FrameRowsView(graph, "edge", "edge", relation, rows))


def _check_full_slice(key: slice) -> None:
    if key != slice(None):
        raise GraphValueError(
            f"only the full slice ':' can be used here (got {key}); give a list of ids"
        )
