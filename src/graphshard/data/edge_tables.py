# SPDX-License-Identifier: Apache-2.0
"""Edge lists in tables as graphs, and back: one row per edge, in edge id order.

A typed graph is one table per relation. Node ids are taken as they are, or, with ``relabel``, made
from whatever names the table uses. Tables are read as `graphshard.data.Tables` reads them
(`_table_files.py`); but here every row must be an edge. What a table may get wrong (a missing
column, an empty cell, a fraction, a negative number, text where a number belongs) is reported with
file, column and row; rows count from 1 and leave the header out.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, overload

import numpy as np
import torch
from torch import Tensor

from .._base.files import check_path, check_text, writing
from .._base.typing import DEFAULT_CANONICAL_ETYPE, DEFAULT_NTYPE, INDEX_DTYPES, CanonicalEType
from ..graph import Graph, graph, heterograph
from ._array_graph import EdgeEnds
from ._kept_columns import KeptColumns
from ._row_ids import IdColumn, Int64Array, RowIds, integers_of_ids, of_one_type
from ._table_files import FileOptions, TableBatch, TableSource
from .tables import end_columns

FilePath: TypeAlias = str | os.PathLike[str]
Paths: TypeAlias = FilePath | Mapping[CanonicalEType, FilePath]
EdgeColumns: TypeAlias = Sequence[str] | Mapping[CanonicalEType, Sequence[str]]
NodeCounts: TypeAlias = int | Mapping[str, int] | None
NodeNames: TypeAlias = dict[Hashable, int] | dict[str, dict[Hashable, int]]
"""Id of each name, in the order of ids; for a typed graph one such table per node type."""

_DIGITS = r"^\s*-?[0-9]+\s*$"
_WHOLE = r"^\s*[+-]?[0-9]+\s*$"
_NUMBER = r"^\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*$"
_INTEGER = r"^(0|-?[1-9][0-9]{0,99})$"
"""An integer as a program writes it: text such as 007 or +1 stays text, or names would merge."""
_INT64_MAX = 2**63 - 1
_OF_NAMES = {
    "csv": "graphshard.from_csv(..., relabel=True)",
    "parquet": "graphshard.from_parquet(..., relabel=True)",
    **dict.fromkeys(("arrow", "json", "memory"), "graphshard partition --edges"),
}
"""What reads a table of names, by its format."""
_MOST_ROWS_AT_ONCE = 1 << 20


@overload
def from_csv(
    path: Paths,
    src: str | None = ...,
    dst: str | None = ...,
    edge_columns: EdgeColumns = ...,
    *,
    delimiter: str | None = ...,
    column_names: Sequence[str] | None = ...,
    skip_rows: int = ...,
    null_values: Sequence[str] | None = ...,
    relabel: Literal[False] = ...,
    num_nodes: NodeCounts = ...,
    dtype: torch.dtype | None = ...,
    idtype: torch.dtype = ...,
    device: torch.device | str | None = ...,
) -> Graph: ...


@overload
def from_csv(
    path: Paths,
    src: str | None = ...,
    dst: str | None = ...,
    edge_columns: EdgeColumns = ...,
    *,
    delimiter: str | None = ...,
    column_names: Sequence[str] | None = ...,
    skip_rows: int = ...,
    null_values: Sequence[str] | None = ...,
    relabel: Literal[True],
    dtype: torch.dtype | None = ...,
    idtype: torch.dtype = ...,
    device: torch.device | str | None = ...,
) -> tuple[Graph, NodeNames]: ...


def from_csv(
    path: Paths,
    src: str | None = None,
    dst: str | None = None,
    edge_columns: EdgeColumns = (),
    *,
    delimiter: str | None = None,
    column_names: Sequence[str] | None = None,
    skip_rows: int = 0,
    null_values: Sequence[str] | None = None,
    relabel: bool = False,
    num_nodes: NodeCounts = None,
    dtype: torch.dtype | None = None,
    idtype: torch.dtype = torch.int64,
    device: torch.device | str | None = None,
) -> Graph | tuple[Graph, NodeNames]:
    """Graph of a CSV edge list; a file name that ends in ``.gz`` or the like is decompressed.

    What is not given goes by the file: what separates cells, whether there is a header, comments
    at the top and a byte order mark.

    Args:
        path: The file, or a list, glob, folder or URI of several; for a typed graph one per
            relation.
        src: Column of sources; None is one called ``src``, ``source`` or the like, or the first. In
            a file without header a column is named by its place, "0".
        dst: Column of destinations; None is one called ``dst``, ``target`` or the like, or the
            second.
        edge_columns: Columns of numbers, true/false, or lists of numbers to keep in ``edata``; for
            a typed graph the same ones in every file, or a sequence per relation.
        delimiter: What separates cells, one character.
        column_names: Names of the columns of a file that has no header.
        skip_rows: Lines to skip at the top, before the header.
        null_values: Cells that are missing; None is those that pandas takes for missing, such as
            ``NA``. Pass ``[""]`` where those are names.
        relabel: Take names (text, integers or bytes) instead of node ids and number them by first
            appearance, row by row, the source before the destination.
        num_nodes: Number of nodes, per type for a typed graph; None takes the largest id plus one.
            With ``relabel`` the names say it.
        dtype: dtype of columns of real numbers; None is float64, in which nothing is rounded that
            a file tells apart. Integers become int64, true and false bool.
        idtype: int32 or int64.
        device: Where the graph is to live.

    Returns:
        The graph; with ``relabel`` also the id of each name, a dictionary in the order of ids (per
        node type for a typed graph).

    Raises:
        FileNotFoundError: No such file.
        ValueError: A column is missing, or a cell is not what its column must hold.
        TypeError: An argument is of the wrong kind.
        ImportError: pyarrow is missing.

    Example:
        >>> g = from_csv('follows.csv', edge_columns=['weight'])  # doctest: +SKIP
    """
    options = FileOptions(
        format="csv",
        delimiter=delimiter,
        columns=() if column_names is None else tuple(column_names),
        skip_rows=skip_rows,
        null_values=None if null_values is None else tuple(null_values),
    )
    return _load(path, options, (src, dst), edge_columns, relabel, num_nodes, dtype, idtype, device)


@overload
def from_parquet(
    path: Paths,
    src: str | None = ...,
    dst: str | None = ...,
    edge_columns: EdgeColumns = ...,
    *,
    relabel: Literal[False] = ...,
    num_nodes: NodeCounts = ...,
    idtype: torch.dtype = ...,
    device: torch.device | str | None = ...,
) -> Graph: ...


@overload
def from_parquet(
    path: Paths,
    src: str | None = ...,
    dst: str | None = ...,
    edge_columns: EdgeColumns = ...,
    *,
    relabel: Literal[True],
    idtype: torch.dtype = ...,
    device: torch.device | str | None = ...,
) -> tuple[Graph, NodeNames]: ...


def from_parquet(
    path: Paths,
    src: str | None = None,
    dst: str | None = None,
    edge_columns: EdgeColumns = (),
    *,
    relabel: bool = False,
    num_nodes: NodeCounts = None,
    idtype: torch.dtype = torch.int64,
    device: torch.device | str | None = None,
) -> Graph | tuple[Graph, NodeNames]:
    """Graph of a Parquet edge list; arguments, results and errors are those of `from_csv`.

    Columns keep their dtype, except that unsigned integers of 16 bits and more become signed. A
    column of lists of one length k becomes a [num_edges, k] field.
    """
    options = FileOptions(format="parquet")
    return _load(path, options, (src, dst), edge_columns, relabel, num_nodes, None, idtype, device)


def from_table(path: FilePath) -> Graph:
    """Graph of an edge list of any kind that `graphshard.data.Tables` reads, with its ids."""
    ends = (None, None)
    loaded = _load(path, FileOptions(), ends, (), False, None, None, torch.int64, None)
    assert isinstance(loaded, Graph)
    return loaded


def to_csv(
    g: Graph,
    path: Paths,
    src: str = "src",
    dst: str = "dst",
    edge_columns: EdgeColumns = (),
    *,
    delimiter: str = ",",
    names: NodeNames | None = None,
) -> None:
    """Write the edges of a graph as CSV, one row per edge in edge id order, with a header.

    A file name that ends in ``.gz`` or the like is compressed.

    Args:
        path: File to write, or for a graph with several relations a file for each.
        edge_columns: Fields of ``edata``, one number per edge, to write under their names; for a
            typed graph the same ones for every relation, or a sequence per relation.
        names: Write these names instead of ids: what ``from_csv(..., relabel=True)`` returned.

    Raises:
        ValueError: Relations and files do not match, or a field has several numbers per edge.
        KeyError: There is no such field.
        ImportError: pyarrow is missing.
    """
    import pyarrow
    from pyarrow import csv

    options = csv.WriteOptions(delimiter=delimiter)
    for file, table in _tables(g, path, src, dst, edge_columns, names, wide=False):
        with (
            _whole_or_nothing(file) as partial,
            pyarrow.output_stream(partial, compression="detect") as stream,
        ):
            csv.write_csv(table, stream, options)


def to_parquet(
    g: Graph,
    path: Paths,
    src: str = "src",
    dst: str = "dst",
    edge_columns: EdgeColumns = (),
    *,
    names: NodeNames | None = None,
) -> None:
    """Write the edges of a graph as Parquet, one row per edge in edge id order; see `to_csv`.

    Args:
        edge_columns: As in `to_csv`; a field [num_edges, k] becomes a column of lists of length k.

    Raises:
        ValueError: Relations and files do not match, or a field has more than two dimensions.
        TypeError: Parquet has no such dtype (bfloat16).
        KeyError: There is no such field.
        ImportError: pyarrow is missing.
    """
    from pyarrow import parquet

    for file, table in _tables(g, path, src, dst, edge_columns, names, wide=True):
        with _whole_or_nothing(file) as partial:
            parquet.write_table(table, partial)


# ---------------------------------------------------------------------- reading


@dataclass(frozen=True, kw_only=True)
class _ReadEdges:
    """One table, read.

    Args:
        ends: Node ids, or numbers of names.
        fields: A row per edge, by column.
    """

    ends: tuple[Int64Array, Int64Array]
    fields: dict[str, Tensor]


def _load(
    path: Paths,
    options: FileOptions,
    ends: tuple[str | None, str | None],
    edge_columns: EdgeColumns,
    relabel: bool,
    num_nodes: NodeCounts,
    dtype: torch.dtype | None,
    idtype: torch.dtype,
    device: torch.device | str | None,
) -> Graph | tuple[Graph, NodeNames]:
    """Read every table and build the graph."""
    if idtype not in INDEX_DTYPES:
        raise TypeError(f"idtype must be torch.int32 or torch.int64 (got {idtype})")
    if relabel and num_nodes is not None:
        raise ValueError("num_nodes cannot be given with relabel=True: the names say how many")
    typed = isinstance(path, Mapping)
    if num_nodes is not None and isinstance(num_nodes, Mapping) != typed:
        raise TypeError("num_nodes must be a dict of node types for a typed graph, else an integer")
    counts: Any = num_nodes if typed or num_nodes is None else {DEFAULT_NTYPE: num_nodes}
    names: dict[str, RowIds] = {}
    read: dict[CanonicalEType, _ReadEdges] = {}
    for etype, files in _files(path).items():
        limits = None
        if relabel:
            for ntype in (etype[0], etype[2]):
                names.setdefault(ntype, RowIds(ntype))
        else:
            limits = tuple((counts or {}).get(ntype) for ntype in (etype[0], etype[2]))
        fields = _columns_of(etype, edge_columns)
        for name in (*ends, *fields):
            if name is not None:
                check_text(name, "the name of a column")
        reader = TableSource(files, options, named=[n for n in (*ends, *fields) if n is not None])
        read[etype] = _read_edges(reader, ends, fields, etype, names, limits, dtype, idtype)
    if relabel:
        counts = {ntype: len(ids) for ntype, ids in names.items()}
    edges = {
        etype: tuple(torch.from_numpy(end).to(idtype) for end in of_table.ends)
        for etype, of_table in read.items()
    }
    if typed:
        g = heterograph(edges, num_nodes_dict=counts, idtype=idtype)
    else:
        count = None if counts is None else counts[DEFAULT_NTYPE]
        g = graph(edges[DEFAULT_CANONICAL_ETYPE], num_nodes=count, idtype=idtype)
    for etype, of_table in read.items():
        for name, field in of_table.fields.items():
            g.edges[etype].data[name] = field
    if device is not None:
        g = g.to(device)
    if not relabel:
        return g
    dicts = {ntype: _numbers_of_names(ids) for ntype, ids in names.items()}
    return g, (dicts if typed else dicts[DEFAULT_NTYPE])


def _read_edges(
    reader: TableSource,
    ends: tuple[str | None, str | None],
    fields: Sequence[str],
    etype: CanonicalEType,
    names: Mapping[str, RowIds],
    limits: Sequence[int | None] | None,
    dtype: torch.dtype | None,
    idtype: torch.dtype,
) -> _ReadEdges:
    """Read one table.

    Args:
        names: The names of each node type, which are added to, where ``limits`` is None.
        limits: Node ids must be below these, where they are known.
    """
    columns = end_columns(reader, *ends)
    of_fields = {name: reader.column(name) for name in fields}
    found = EdgeEnds(reader.known_num_rows())
    kept = KeptColumns()
    pieces: dict[str, list[Any]] = {column: [] for column in of_fields.values()}
    rows = _NumberedRows([])
    try:
        for batch in reader.batches(list(dict.fromkeys([*columns, *pieces])), _MOST_ROWS_AT_ONCE):
            numbers = found.room(len(batch.columns))
            values = [batch.columns.column(name) for name in columns]
            of_batch = _NumberedRows([batch])
            for name, column in zip(columns, values, strict=True):
                what = "a node name" if limits is None else "a node id"
                _refuse_nulls(of_batch, name, column, what)
            if limits is None:
                places = [
                    IdColumn(f"{batch.file}, column {n!r}", reader.is_untyped) for n in columns
                ]
                _number(values, (names[etype[0]], names[etype[2]]), places, numbers)
            else:
                for out, name, column, limit in zip(numbers, columns, values, limits, strict=True):
                    out[:] = _node_ids(of_batch, name, column, limit, idtype, reader.format)
            found.keep(None)
            rows.batches.append(batch._replace(columns=range(len(batch.columns))))
            for column, put in pieces.items():
                put.append(kept.put(batch.columns.column(column)))
        reader.check_cells("give each row as many cells, or say by what they are separated")
        tensors = {}
        for name, column in of_fields.items():
            whole = reader.whole_column(column, pieces[column], kept)
            if reader.is_untyped:
                kind = reader.schema.field(column).type
                _check_whole_numbers(rows, name, whole, kept.column(pieces[column], kind))
            tensors[name] = _tensor_column(rows, name, _plain(whole), dtype)
        return _ReadEdges(ends=found.arrays(), fields=tensors)
    finally:
        kept.close()


def _number(
    values: Sequence[Any],
    names: tuple[RowIds, RowIds],
    columns: Sequence[IdColumn],
    out: Sequence[Int64Array],
) -> None:
    """Number the names of some rows, row by row, the source before the destination."""
    import pyarrow

    if names[0] is not names[1]:
        for column, ids, place, numbers in zip(values, names, columns, out, strict=True):
            numbers[:] = ids.add(column, place)
        return
    both = pyarrow.concat_arrays(of_one_type(names[0], list(map(_plain, values)), columns))
    order = np.arange(len(both)).reshape(2, -1).T.reshape(-1)
    numbers = names[0].add(both.take(pyarrow.array(order)), columns[0])
    out[0][:], out[1][:] = numbers[::2], numbers[1::2]


def _numbers_of_names(ids: RowIds) -> dict[Hashable, int]:
    """Number of each name, in their order.

    Text that reads as an integer throughout gives integers, so that a CSV of integers has integer
    names.
    """
    import pyarrow
    from pyarrow import compute

    array = ids.arrow()
    names = array.to_pylist()
    is_text = pyarrow.types.is_string(array.type) or pyarrow.types.is_large_string(array.type)
    if is_text and compute.all(compute.match_substring_regex(array, _INTEGER)).as_py():
        names = [int(name) for name in names]
    return {name: number for number, name in enumerate(names)}


@dataclass(frozen=True)
class _NumberedRows:
    """Rows of a table, for messages: their batches, of which columns need only have a length."""

    batches: list[TableBatch]

    def where(self, name: str, row: int) -> str:
        """File, column and row of a row, counted from 0 over all files."""
        for batch in self.batches:
            if row < len(batch.columns):
                return f"{batch.file}, column {name!r}, row {batch.row_number(row)}:"
            row -= len(batch.columns)
        raise AssertionError(row)


def _node_ids(
    rows: _NumberedRows,
    name: str,
    values: Any,
    num_nodes: int | None,
    idtype: torch.dtype,
    table_format: str,
) -> Int64Array:
    """[num_rows] node ids of a column of integers, or of text that reads so."""
    import pyarrow
    from pyarrow import compute

    cure = f"where a table holds names instead of ids, read it with {_OF_NAMES[table_format]}"
    values = _plain(values)
    if pyarrow.types.is_large_string(values.type) or pyarrow.types.is_string(values.type):
        values, text = _integers(values), values
        if values is None:
            row = _first(compute.invert(compute.match_substring_regex(text, _DIGITS)))
            if row is not None:
                raise ValueError(
                    f"{rows.where(name, row)} a node id must be an integer from 0 (got "
                    f"{text[row].as_py()!r}); {cure}"
                )
            numbers = enumerate(map(int, text.to_pylist()))
            row, number = next((i, n) for i, n in numbers if not -(2**63) <= n < 2**63)
            fault = "must not be negative" if number < 0 else "does not fit 64 bits with a sign"
            raise ValueError(f"{rows.where(name, row)} node id {number} {fault}; {cure}")
    place = IdColumn(f"{rows.batches[0].file}, column {name!r}", False)
    ids, is_large = integers_of_ids(values, place, cure)
    top = np.iinfo(np.int32 if idtype == torch.int32 else np.int64).max
    limit = top if num_nodes is None else min(top, num_nodes - 1)
    if ids.min(initial=0) < 0 or ids.max(initial=-1) > limit:
        row = int(((ids < 0) | (ids > limit)).argmax())
        number = int(ids[row]) % 2**64 if is_large else int(ids[row])
        if number < 0:
            rule = f"must not be negative; {cure}"
        elif num_nodes is not None and number >= num_nodes:
            rule = f"must be below num_nodes={num_nodes}"
        elif number > _INT64_MAX:
            rule = f"does not fit 64 bits with a sign; {cure}"
        else:
            rule = f"does not fit {idtype}; pass idtype=torch.int64"
        raise ValueError(f"{rows.where(name, row)} node id {number} {rule}")
    return ids


def _integers(text: Any) -> Any:
    """The same as integers; None where some cell is none of 64 bits."""
    import pyarrow
    from pyarrow import compute

    for cells in (text, compute.utf8_trim_whitespace(text)):
        try:
            return cells.cast(pyarrow.int64())
        except pyarrow.ArrowInvalid:
            continue
    return None


def _check_whole_numbers(rows: _NumberedRows, name: str, values: Any, text: Any) -> None:
    """Raise if cells are real only because their whole numbers do not fit 64 bits: hashes."""
    import pyarrow
    from pyarrow import compute

    if not pyarrow.types.is_floating(values.type):
        return
    largest = compute.max(compute.abs(values)).as_py()
    if largest is None or not 2.0**63 <= largest < 2.0**200:
        return
    if compute.all(compute.match_substring_regex(text, _WHOLE)).as_py():
        cells = enumerate(text.to_pylist())
        row = next(i for i, cell in cells if cell is not None and abs(int(cell)) >= 2**63)
        raise ValueError(
            f"{rows.where(name, row)} {text[row]} does not fit 64 bits with a sign; leave it out "
            "of edge_columns, or store it in two columns"
        )


def _tensor_column(
    rows: _NumberedRows, name: str, values: Any, dtype: torch.dtype | None
) -> Tensor:
    """[num_rows] or [num_rows, k] tensor of a column of numbers, or of lists of k numbers.

    Args:
        dtype: dtype of real numbers; None keeps what the column has.
    """
    import pyarrow
    from pyarrow import compute

    kind = values.type
    if not len(values) and (pyarrow.types.is_null(kind) or pyarrow.types.is_string(kind)):
        return torch.zeros(0, dtype=dtype)
    _refuse_nulls(rows, name, values, "an edge column")
    is_list = pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)
    if is_list or pyarrow.types.is_fixed_size_list(kind):
        width = _width(rows, name, values) if is_list else kind.list_size
        inner = pyarrow.chunked_array([chunk.flatten() for chunk in values.chunks], kind.value_type)
        if inner.null_count:
            row = (_first(compute.is_null(inner)) or 0) // width
            raise ValueError(
                f"{rows.where(name, row)} a list must not hold an empty place; drop or fill it"
            )
        numbers = _tensor_column(rows, name, inner, dtype)
        return numbers.reshape(len(values), width, *numbers.shape[1:])
    if pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind):
        row = _first(compute.invert(compute.match_substring_regex(values, _NUMBER))) or 0
        raise ValueError(
            f"{rows.where(name, row)} an edge column must hold numbers (got "
            f"{values[row].as_py()!r}); leave it out of edge_columns or encode it"
        )
    number = pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind)
    if not (number or pyarrow.types.is_boolean(kind)):
        raise ValueError(
            f"{rows.where(name, 0)} an edge column must hold numbers, true/false, or lists of one "
            f"length (got {kind}, {str(values[0])!r:.60}); leave it out of edge_columns or store "
            "it as numbers"
        )
    array = np.asarray(values)
    array = array if array.flags.writeable else array.copy()
    if array.dtype == np.uint64 and array.size and array.max() > _INT64_MAX:
        row = int(array.argmax())
        raise ValueError(
            f"{rows.where(name, row)} {array[row]} does not fit 64 bits with a sign; leave it out "
            "of edge_columns, or store it in two columns"
        )
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int32 if array.dtype.itemsize == 2 else np.int64)
    tensor = torch.from_numpy(array)
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _width(rows: _NumberedRows, name: str, values: Any) -> int:
    """The one length of all lists of a column."""
    from pyarrow import compute

    lengths = np.asarray(compute.list_value_length(values))
    if not lengths.size:
        return 0
    if (lengths != lengths[0]).any():
        row = int((lengths != lengths[0]).argmax())
        raise ValueError(
            f"{rows.where(name, row)} the lists of an edge column must have one length (got "
            f"{lengths[row]}, and {lengths[0]} in row 1); leave it out of edge_columns or fill the "
            "lists up"
        )
    return int(lengths[0])


def _plain(values: Any) -> Any:
    """A column without a dictionary."""
    import pyarrow

    is_dictionary = pyarrow.types.is_dictionary(values.type)
    return values.cast(values.type.value_type) if is_dictionary else values


def _refuse_nulls(rows: _NumberedRows, name: str, values: Any, what: str) -> None:
    from pyarrow import compute

    if values.null_count:
        row = _first(compute.is_null(values)) or 0
        cure = "drop or fill it"
        if what == "a node name":
            cure += ", or pass null_values where it is a name such as NA"
        raise ValueError(f"{rows.where(name, row)} {what} must not be empty; {cure}")


def _first(flags: Any) -> int | None:
    """Position of the first true value."""
    positions = np.flatnonzero(np.asarray(flags))
    return int(positions[0]) if len(positions) else None


def _columns_of(etype: CanonicalEType, edge_columns: EdgeColumns) -> list[str]:
    if isinstance(edge_columns, str):
        raise TypeError(f"edge_columns must be a sequence of names; write [{edge_columns!r}]")
    if isinstance(edge_columns, Mapping):
        return list(edge_columns.get(etype, ()))
    return list(edge_columns)


# ---------------------------------------------------------------------- writing


def _files(path: Paths) -> dict[CanonicalEType, FilePath]:
    if not isinstance(path, Mapping):
        return {DEFAULT_CANONICAL_ETYPE: path}
    if not path:
        raise ValueError("path must name at least one relation and its file (got an empty dict)")
    for etype in path:
        if not (isinstance(etype, tuple) and len(etype) == 3):
            raise TypeError(
                f"a relation must be a triple (source, name, destination) (got {etype!r})"
            )
    return dict(path)


@contextmanager
def _whole_or_nothing(file: Path) -> Iterator[str]:
    """Where to write a file so that its own name never stands for half of it."""
    check_path(file)
    partial = file.with_name(f".partial-{file.name}")
    try:
        with writing(file):
            yield str(partial)
            partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def _tables(
    g: Graph,
    path: Paths,
    src: str,
    dst: str,
    edge_columns: EdgeColumns,
    names: NodeNames | None,
    wide: bool,
) -> list[tuple[Path, Any]]:
    """The pyarrow table of each file to write; made before the first file is touched."""
    import pyarrow

    files = _files(path)
    if not isinstance(path, Mapping):
        if len(g.canonical_etypes) != 1:
            raise ValueError(
                f"path must be a dict with a file for each relation of a typed graph, "
                f"{g.canonical_etypes} (got {str(path)!r})"
            )
        files = {g.canonical_etypes[0]: path}
    elif set(files) != set(g.canonical_etypes):
        raise ValueError(
            f"path must have a file for each relation {g.canonical_etypes} (got {list(files)})"
        )
    for name in (src, dst):
        check_text(name, "the name of a column")
    out = []
    for etype, file in files.items():
        ends = zip((src, dst), (etype[0], etype[2]), g.edges(etype=etype), strict=True)
        columns = {column: _names_column(_names_of(t, names), ids) for column, t, ids in ends}
        for name in _columns_of(etype, edge_columns):
            check_text(name, "the name of a column")
            if name in columns:
                raise ValueError(f"edge column {name!r} is also the name of a column of node ids")
            columns[name] = _arrow_column(name, g.edges[etype].data[name], wide)
        out.append((Path(file), pyarrow.table(columns)))
    return out


def _names_of(ntype: str, names: NodeNames | None) -> dict[Hashable, int] | None:
    if names is None:
        return None
    nested = names.get(ntype)
    return nested if isinstance(nested, dict) else names  # type: ignore[return-value]


def _names_column(names: Mapping[Hashable, int] | None, ids: Tensor) -> Any:
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


def _arrow_column(name: str, value: Tensor, wide: bool) -> Any:
    import pyarrow

    value = value.detach().cpu()
    if value.dtype == torch.bfloat16:
        raise TypeError(
            f"edge field {name!r} is bfloat16, which tables do not have; store .float()"
        )
    if value.ndim == 1:
        return pyarrow.array(value.numpy())
    if not wide or value.ndim != 2:
        raise ValueError(
            f"edge field {name!r} must have {'a number or a vector' if wide else 'one number'} per "
            f"edge (got shape {tuple(value.shape)}); {'flatten it' if wide else 'use to_parquet'}"
        )
    flat = pyarrow.array(value.reshape(-1).numpy())
    return pyarrow.FixedSizeListArray.from_arrays(flat, value.shape[1])
