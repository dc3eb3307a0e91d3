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

_INTEGER = r"^(0|-?[1-9][0-9]{0,17})$"
"""An integer as a program writes it: text such as 007 or +1 stays text, or names would merge."""
_DIGITS = r"^\s*-?[0-9]{1,18}\s*$"
_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"


def integer_ids(
    path: Path, column: NamedColumn, num_nodes: int | None, idtype: torch.dtype
) -> Tensor:
    """[num_rows] int64 node ids of a column of integers.

    Args:
        path: File of the column, for errors.
        column: Name and values; text means that some cell could not be read as an integer.
        num_nodes: Ids must be below this, where it is known.
        idtype: Ids must fit this dtype.
    """
    import pyarrow
    from pyarrow import compute

    name, values = column
    _refuse_nulls(path, name, values, "a node id")
    cure = "pass relabel=True where the table holds names instead of ids"
    kind = values.type
    if pyarrow.types.is_large_string(kind) or pyarrow.types.is_string(kind):
        row = _first(compute.invert(compute.match_substring_regex(values, _DIGITS)))
        if row is not None:
            raise ValueError(
                f"{_where(path, name, row)} a node id must be an integer from 0 "
                f"(got {values[row].as_py()!r}); {cure}"
            )
        values, kind = compute.utf8_trim_whitespace(values).cast(pyarrow.int64()), pyarrow.int64()
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
            pieces += values.cast(kind).chunks
        assert first is not None
        self._type = first[2]
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

        names = self._names
        if pyarrow.types.is_large_string(self._type) and len(names):
            plain = compute.all(compute.match_substring_regex(names, _INTEGER)).as_py()
            names = names.cast(pyarrow.int64()) if plain else names
        return {name: i for i, name in enumerate(names.to_pylist())}


def _name_type(path: Path, name: str, values: Any) -> Any:
    import pyarrow

    kind = values.type.value_type if pyarrow.types.is_dictionary(values.type) else values.type
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
    return pyarrow.array(list(names)).take(pyarrow.array(ids.long().numpy()))


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
    if pyarrow.types.is_fixed_size_list(kind):
        inner = pyarrow.chunked_array([chunk.flatten() for chunk in values.chunks], kind.value_type)
        return tensor_column(path, name, inner, dtype).reshape(len(values), kind.list_size)
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
            f"one length (got {kind}); leave it out of edge_columns or convert it"
        )
    array = _numpy(values)
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        row = int(array.argmax())
        raise ValueError(f"{_where(path, name, row)} {array[row]} does not fit 64 bits with a sign")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int32 if array.dtype.itemsize == 2 else np.int64)
    tensor = torch.from_numpy(array)
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


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
