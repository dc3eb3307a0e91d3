# SPDX-License-Identifier: Apache-2.0
"""Columns of a table as tensors: node ids, node names and edge fields, each cell checked.

A column is a pyarrow ``ChunkedArray`` here; with its name it is a pair, so that an error (always a
ValueError) can say where it stands.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

NamedColumn: TypeAlias = tuple[str, Any]

_INTEGER = r"^(0|-?[1-9][0-9]{0,99})$"
"""An integer as a program writes it: text such as 007 or +1 stays text, or names would merge."""
_DIGITS = r"^\s*-?[0-9]+\s*$"
_INT64_MAX = 2**63 - 1
_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"


def integer_ids(
    path: Path, column: NamedColumn, num_nodes: int | None, idtype: torch.dtype, reader: str
) -> Tensor:
    """[num_rows] int64 node ids of a column of integers.

    Args:
        path: File of the column, for errors.
        column: Name and values; text means that some cell could not be read as an integer.
        num_nodes: Ids must be below this, where it is known.
        idtype: Ids must fit this dtype.
        reader: Name of the function that takes names instead of ids, for errors.
    """
    import pyarrow
    from pyarrow import compute

    name, values = column
    _refuse_nulls(path, name, values, "a node id")
    cure = (
        f"where a table holds names instead of ids, read it with graphshard.{reader}(..., "
        "relabel=True)"
    )
    kind = values.type
    if pyarrow.types.is_large_string(kind) or pyarrow.types.is_string(kind):
        row = _first(compute.invert(compute.match_substring_regex(values, _DIGITS)))
        if row is not None:
            raise ValueError(
                f"{_where(path, name, row)} a node id must be an integer from 0 "
                f"(got {values[row].as_py()!r}); {cure}"
            )
        trimmed = compute.utf8_trim_whitespace(values)
        try:
            values, kind = trimmed.cast(pyarrow.int64()), pyarrow.int64()
        except pyarrow.ArrowInvalid:
            row = next(i for i, text in enumerate(trimmed.to_pylist()) if int(text) > _INT64_MAX)
            raise ValueError(
                f"{_where(path, name, row)} node id {trimmed[row]} does not fit 64 bits with a "
                f"sign; {cure}"
            ) from None
    if not pyarrow.types.is_integer(kind):
        got = f", {values[0].as_py()!r} in row 1" if len(values) else ""
        raise ValueError(
            f"{path}, column {name!r}: node ids must be integers (got {kind}{got}); {cure}"
        )
    ids = _numpy(values)
    top = np.iinfo(np.int32 if idtype == torch.int32 else np.int64).max
    limit = top if num_nodes is None else min(top, num_nodes - 1)
    bad = (ids < 0) | (ids > limit)
    if bad.any():
        row = int(bad.argmax())
        if ids[row] < 0:
            rule = f"must not be negative; {cure}"
        elif num_nodes is not None and ids[row] >= num_nodes:
            rule = f"must be below num_nodes={num_nodes}"
        elif ids[row] > _INT64_MAX:
            rule = f"does not fit 64 bits with a sign; {cure}"
        else:
            rule = f"does not fit {idtype}; pass idtype=torch.int64"
        raise ValueError(f"{_where(path, name, row)} node id {ids[row]} {rule}")
    return torch.from_numpy(ids.astype(np.int64))


class NameTable:
    """Numbers the names of one node type by first appearance.

    Args:
        columns: Every column that names nodes of the type, with its file.
    """

    def __init__(self, columns: Sequence[tuple[Path, NamedColumn]]) -> None:
        import pyarrow
        from pyarrow import compute

        first: tuple[Path, str, Any] | None = None
        pieces = []
        self._as_text = any(_needs_text(values) for _, (_, values) in columns)
        for path, (name, values) in columns:
            _refuse_nulls(path, name, values, "a node name")
            kind = _name_type(path, name, values)
            if first is not None and kind != first[2]:
                raise ValueError(
                    f"{path}, column {name!r}: names of one node type must be all text or all "
                    f"integers (got {kind}, but column {first[1]!r} of {first[0]} is {first[2]}); "
                    "store both as text"
                )
            first = first or (path, name, kind)
        assert first is not None
        self._type = pyarrow.large_string() if self._as_text else first[2]
        for _, (_, values) in columns:
            pieces += values.cast(self._type).chunks
        self._names = compute.unique(pyarrow.chunked_array(pieces, self._type))

    def __len__(self) -> int:
        return len(self._names)

    def ids(self, column: NamedColumn) -> Tensor:
        """[num_rows] int64 ids of a column's names."""
        from pyarrow import compute

        index = compute.index_in(column[1].cast(self._type), value_set=self._names)
        return torch.from_numpy(_numpy(index).astype(np.int64))

    def to_dict(self) -> dict[Hashable, int]:
        """Id of each name, in the order of ids.

        Text that reads as an integer throughout gives integers, so that a CSV of integers has
        integer names.
        """
        import pyarrow
        from pyarrow import compute

        names = self._names.to_pylist()
        is_text = pyarrow.types.is_large_string(self._type)
        if is_text and compute.all(compute.match_substring_regex(self._names, _INTEGER)).as_py():
            names = [int(name) for name in names]
        return {name: i for i, name in enumerate(names)}


def _needs_text(values: Any) -> bool:
    """Whether there are integers that no signed type holds: hashes, in tables of uint64."""
    import pyarrow
    from pyarrow import compute

    if not pyarrow.types.is_uint64(values.type):
        return False
    return (compute.max(values).as_py() or 0) > _INT64_MAX


def _name_type(path: Path, name: str, values: Any) -> Any:
    import pyarrow

    kind = values.type
    if pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind):
        return pyarrow.large_string()
    if pyarrow.types.is_integer(kind):
        return pyarrow.int64()
    raise ValueError(
        f"{path}, column {name!r}: node names must be text or integers (got {kind}); store them as "
        "text"
    )


def names_column(names: Mapping[Hashable, int] | None, ids: Tensor) -> Any:
    """Column of node ids, or of the names that belong to them."""
    import pyarrow

    ids = ids.detach().cpu()
    if names is None:
        return pyarrow.array(ids.numpy())
    if list(names.values()) != list(range(len(names))):
        raise ValueError("names must number its names 0, 1, 2, ... in that order")
    if ids.numel() and int(ids.max()) >= len(names):
        raise ValueError(f"names must name every node ({len(names)} names, node {int(ids.max())})")
    return _names_array(list(names)).take(pyarrow.array(ids.long().numpy()))


def _names_array(names: list[Hashable]) -> Any:
    """Names as a column; integers that no 64 bits hold become text."""
    import pyarrow

    try:
        return pyarrow.array(names)
    except UnicodeEncodeError as error:
        raise ValueError(f"a name must be text that UTF-8 can hold ({error})") from None
    except OverflowError:
        try:
            return pyarrow.array(names, pyarrow.uint64())
        except (OverflowError, pyarrow.ArrowException):
            return pyarrow.array([str(name) for name in names])


def tensor_column(path: Path, name: str, values: Any, dtype: torch.dtype | None) -> Tensor:
    """[num_rows] or [num_rows, k] tensor of a column of numbers, or of lists of k numbers.

    Args:
        path: File of the column, for errors.
        name: Name of the column.
        values: The column.
        dtype: dtype of real numbers; None keeps what the column has.
    """
    import pyarrow
    from pyarrow import compute

    kind = values.type
    if pyarrow.types.is_null(kind) and not len(values):
        return torch.zeros(0, dtype=dtype)
    _refuse_nulls(path, name, values, "an edge column")
    is_list = pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)
    if is_list or pyarrow.types.is_fixed_size_list(kind):
        width = _width(path, name, values) if is_list else kind.list_size
        inner = pyarrow.chunked_array([chunk.flatten() for chunk in values.chunks], kind.value_type)
        if inner.null_count:
            row = (_first(compute.is_null(inner)) or 0) // width
            raise ValueError(
                f"{_where(path, name, row)} a list must not hold an empty place; drop or fill it"
            )
        numbers = tensor_column(path, name, inner, dtype)
        return numbers.reshape(len(values), width, *numbers.shape[1:])
    if pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind):
        row = _first(compute.invert(compute.match_substring_regex(values, _NUMBER))) or 0
        raise ValueError(
            f"{_where(path, name, row)} an edge column must hold numbers (got "
            f"{values[row].as_py()!r}); leave it out of edge_columns or encode it"
        )
    number = pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind)
    if not (number or pyarrow.types.is_boolean(kind)):
        raise ValueError(
            f"{path}, column {name!r}: an edge column must hold numbers, true/false, or lists of "
            f"one length (got {kind}{_example(values)}); leave it out of edge_columns or store it "
            "as numbers"
        )
    array = _numpy(values)
    if array.dtype == np.uint64 and array.size and array.max() > _INT64_MAX:
        row = int(array.argmax())
        raise ValueError(f"{_where(path, name, row)} {array[row]} does not fit 64 bits with a sign")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int32 if array.dtype.itemsize == 2 else np.int64)
    tensor = torch.from_numpy(array)
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _width(path: Path, name: str, values: Any) -> int:
    """The one length of all lists of a column."""
    from pyarrow import compute

    lengths = _numpy(compute.list_value_length(values))
    if not lengths.size:
        return 0
    if (lengths != lengths[0]).any():
        row = int((lengths != lengths[0]).argmax())
        raise ValueError(
            f"{_where(path, name, row)} the lists of an edge column must have one length (got "
            f"{lengths[row]}, and {lengths[0]} in row 1); leave it out of edge_columns or fill the "
            "lists up"
        )
    return int(lengths[0])


def _example(values: Any) -> str:
    return f", {str(values[0])!r:.60} in row 1" if len(values) else ""


def _refuse_nulls(path: Path, name: str, values: Any, what: str) -> None:
    from pyarrow import compute

    if values.null_count:
        row = _first(compute.is_null(values))
        raise ValueError(
            f"{_where(path, name, row or 0)} {what} must not be empty; drop or fill it"
        )


def _first(flags: Any) -> int | None:
    """Position of the first true value."""
    found = np.flatnonzero(_numpy(flags))
    return int(found[0]) if len(found) else None


def _where(path: Path, name: str, row: int) -> str:
    return f"{path}, column {name!r}, row {row + 1}:"


def _numpy(values: Any) -> np.ndarray:
    """A column as an array that may be written to; there are no nulls in it."""
    array = np.asarray(values)
    return array if array.flags.writeable else array.copy()
