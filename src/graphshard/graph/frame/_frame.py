# SPDX-License-Identifier: Apache-2.0
"""Frame: the named feature columns of all nodes of one type, or of all edges of one relation.

A frame is a dictionary that checks what is put in: every column has ``num_rows`` rows and lives
on the frame's device. Columns are stored by reference and never copied. A column need not be a
tensor: a sharded graph stores edge values that are computed only when they are used; anything
with ``.shape`` and ``.device`` is taken. A column of `LazyRows` is gathered when it is read, so
that readers see a tensor.

Beside the values a frame remembers, per field, through which view it was set, and which fields
were set since the innermost ``local_scope`` began. A sharded graph reads both when it decides
which fields to send together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..._base.device import device_of
from ...errors import GraphTypeError, GraphValueError
from ._lazy import LazyRows

Initializer: TypeAlias = Callable[[tuple[int, ...], torch.dtype, torch.device, Any], Tensor]
"""Makes rows that have not been set, from (shape, dtype, device, slice of their ids)."""

View: TypeAlias = Literal["src", "dst", "node", "edge"]
"""Through which view a field was set: ``srcdata``, ``dstdata``, ``ndata``, ``edata``."""


def version_of(tensor: Tensor) -> int:
    """How often a column was changed in place; inference tensors do not say."""
    return 0 if tensor.is_inference() else tensor._version


class Scheme(NamedTuple):
    """Shape of one row of a column, and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Frame(MutableMapping[str, Any]):
    """Columns of equal height.

    Args:
        num_rows: Number of nodes or edges.
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
        self.device = device_of(device)
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
            name: Field name.
            value: ``[num_rows, ...]`` tensor (or deferred value) on the frame's device.
            view: The view it is set through.

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
            name: Field name.
            source: ``[any, ...]``.
            index: ``[num_rows]`` row numbers of ``source``, in range; see `unread`.

        Raises:
            TypeError: as for `set`.
            ValueError: as for `set`.
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
            name: Field name.
            rows: ``[k]`` distinct row numbers, in range.
            values: ``[k, ...]``, of the column's row shape and dtype where it exists.
            view: The view it is set through.

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

        Args:
            name: Field name.
            first: The first row.
            stop: The row after the last.
            like: Rows of the shape and dtype that the new ones are to have.

        Returns:
            ``[stop - first, ...]``: from the field's initializer, else 0.

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
        try:
            shape, device = value.shape, value.device
        except AttributeError:
            shape, device = None, None
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
            device: Where they are.

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

    def record_stream(self, stream: Any) -> None:
        """Say that a stream of a GPU uses the columns; see ``torch.Tensor.record_stream``."""
        for value in self._columns.values():
            if isinstance(value, Tensor | LazyRows):
                value.record_stream(stream)

    def extended(self, num_rows: int, fields: Mapping[str, Tensor]) -> Frame:
        """A frame with more rows behind those of this one.

        Args:
            num_rows: How many more.
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

    def selected(self, rows: Tensor) -> Frame:
        """A frame with some rows of this one, in the order given."""
        new = Frame(int(rows.shape[0]), self.device, self.what, self.default_view)
        new.initializers = self.initializers
        for name in self:
            new.set(name, self[name].index_select(0, rows), self._views[name])
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


class RowsView(Mapping[str, Any]):
    """Chosen rows of a mapping's columns, gathered on first use and kept.

    Args:
        source: The columns, each ``[num_rows, ...]``.
        index: ``[k]`` row numbers (int32 or int64), or None for all rows as they are.
    """

    __slots__ = ("_source", "_index", "_cache")

    def __init__(self, source: Mapping[str, Any], index: Tensor | None) -> None:
        self._source = source
        self._index = index
        self._cache: dict[str, Any] = {}

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


class OverlayView(Mapping[str, Any]):
    """One mapping laid over another: what ``apply_node_func`` sees, results before old fields."""

    __slots__ = ("_top", "_bottom")

    def __init__(self, top: Mapping[str, Any], bottom: Mapping[str, Any]) -> None:
        self._top = top
        self._bottom = bottom

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
