# SPDX-License-Identifier: Apache-2.0
"""Edge lists as CSV or Parquet files: one row per edge, in edge id order.

A typed graph is one file per relation. Node ids are taken as they are, or, with ``relabel``, made
from whatever names the table uses. What a table may get wrong (a missing column, an empty cell, a
fraction, a negative number, text where a number belongs) is reported with file, column and row;
rows count from 1 and leave the header out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias, overload

import torch
from torch import Tensor

from ..._base.files import check_path, check_text, writing
from ..._base.typing import DEFAULT_CANONICAL_ETYPE, DEFAULT_NTYPE, INDEX_DTYPES, CanonicalEType
from .._graph import Graph, graph, heterograph
from ._table_files import (
    EdgeColumnsInFile,
    NamedColumn,
    NameTable,
    integer_ids,
    names_column,
    read_csv_file,
    read_parquet_file,
    tensor_column,
)

FilePath: TypeAlias = str | os.PathLike[str]
Paths: TypeAlias = FilePath | Mapping[CanonicalEType, FilePath]
EdgeColumns: TypeAlias = Sequence[str] | Mapping[CanonicalEType, Sequence[str]]
NodeCounts: TypeAlias = int | Mapping[str, int] | None
NodeNames: TypeAlias = dict[Hashable, int] | dict[str, dict[Hashable, int]]
"""Id of each name, in the order of ids; for a typed graph one such table per node type."""


_TableReader: TypeAlias = Callable[[Path, list[str]], EdgeColumnsInFile]


@overload
def from_csv(
    path: Paths,
    src: str = ...,
    dst: str = ...,
    edge_columns: EdgeColumns = ...,
    *,
    delimiter: str = ...,
    column_names: Sequence[str] | None = ...,
    skip_rows: int = ...,
    relabel: Literal[False] = ...,
    num_nodes: NodeCounts = ...,
    dtype: torch.dtype | None = ...,
    idtype: torch.dtype = ...,
    device: torch.device | str | None = ...,
) -> Graph: ...


@overload
def from_csv(
    path: Paths,
    src: str = ...,
    dst: str = ...,
    edge_columns: EdgeColumns = ...,
    *,
    delimiter: str = ...,
    column_names: Sequence[str] | None = ...,
    skip_rows: int = ...,
    relabel: Literal[True],
    dtype: torch.dtype | None = ...,
    idtype: torch.dtype = ...,
    device: torch.device | str | None = ...,
) -> tuple[Graph, NodeNames]: ...


def from_csv(
    path: Paths,
    src: str = "src",
    dst: str = "dst",
    edge_columns: EdgeColumns = (),
    *,
    delimiter: str = ",",
    column_names: Sequence[str] | None = None,
    skip_rows: int = 0,
    relabel: bool = False,
    num_nodes: NodeCounts = None,
    dtype: torch.dtype | None = None,
    idtype: torch.dtype = torch.int64,
    device: torch.device | str | None = None,
) -> Graph | tuple[Graph, NodeNames]:
    """Graph of a CSV edge list; a file name that ends in ``.gz`` or the like is decompressed.

    Args:
        path: The file, or for a typed graph a file per relation.
        edge_columns: Columns of numbers or of true/false to keep in ``edata``; for a typed graph
            the same ones in every file, or a sequence per relation.
        delimiter: What separates cells, one character.
        column_names: Names of the columns of a file that has no header.
        skip_rows: Lines to skip at the top, before the header.
        relabel: Take names (text or integers) instead of node ids and number them by first
            appearance, the source column before the destination column.
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
    if len(delimiter) != 1:
        raise ValueError(f"delimiter must be one character (got {delimiter!r}); a tab is '\\t'")

    def read(file: Path, fields: list[str]) -> EdgeColumnsInFile:
        return read_csv_file(file, src, dst, fields, delimiter, column_names, skip_rows, relabel)

    return _load(path, read, edge_columns, relabel, num_nodes, dtype, idtype, device)


@overload
def from_parquet(
    path: Paths,
    src: str = ...,
    dst: str = ...,
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
    src: str = ...,
    dst: str = ...,
    edge_columns: EdgeColumns = ...,
    *,
    relabel: Literal[True],
    idtype: torch.dtype = ...,
    device: torch.device | str | None = ...,
) -> tuple[Graph, NodeNames]: ...


def from_parquet(
    path: Paths,
    src: str = "src",
    dst: str = "dst",
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

    Args:
        path: The file, or a folder of files that are read one after another in the order of their
            names; for a typed graph one per relation.
    """

    def read(file: Path, fields: list[str]) -> EdgeColumnsInFile:
        return read_parquet_file(file, src, dst, fields)

    return _load(path, read, edge_columns, relabel, num_nodes, None, idtype, device)


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


def _load(
    path: Paths,
    read: _TableReader,
    edge_columns: EdgeColumns,
    relabel: bool,
    num_nodes: NodeCounts,
    dtype: torch.dtype | None,
    idtype: torch.dtype,
    device: torch.device | str | None,
) -> Graph | tuple[Graph, NodeNames]:
    """Read every file, turn names into ids, and build the graph."""
    if idtype not in INDEX_DTYPES:
        raise TypeError(f"idtype must be torch.int32 or torch.int64 (got {idtype})")
    if relabel and num_nodes is not None:
        raise ValueError("num_nodes cannot be given with relabel=True: the names say how many")
    files = _files(path)
    typed = isinstance(path, Mapping)
    if num_nodes is not None and isinstance(num_nodes, Mapping) != typed:
        raise TypeError("num_nodes must be a dict of node types for a typed graph, else an integer")
    tables = {etype: read(file, _columns_of(etype, edge_columns)) for etype, file in files.items()}
    counts: Any = num_nodes if typed or num_nodes is None else {DEFAULT_NTYPE: num_nodes}
    limits = dict(counts) if isinstance(num_nodes, int | Mapping) else {}
    ends = {
        etype: ((etype[0], table.src), (etype[2], table.dst)) for etype, table in tables.items()
    }
    naming: dict[str, NameTable] = {}
    if relabel:
        columns: dict[str, list[tuple[Path, NamedColumn]]] = {}
        for etype, pair in ends.items():
            for ntype, column in pair:
                columns.setdefault(ntype, []).append((tables[etype].path, column))
        naming = {ntype: NameTable(of_type) for ntype, of_type in columns.items()}
        counts = {ntype: len(table) for ntype, table in naming.items()}

    def ids_of(table: EdgeColumnsInFile, ntype: str, column: NamedColumn) -> Tensor:
        if relabel:
            return naming[ntype].ids(column).to(idtype)
        return integer_ids(table.path, column, limits.get(ntype), idtype, table.reader).to(idtype)

    edges = {t: tuple(ids_of(tables[t], *end) for end in pair) for t, pair in ends.items()}
    if typed:
        g = heterograph(edges, num_nodes_dict=counts, idtype=idtype)
    else:
        count = None if counts is None else counts[DEFAULT_NTYPE]
        g = graph(edges[DEFAULT_CANONICAL_ETYPE], num_nodes=count, idtype=idtype)
    for etype, table in tables.items():
        for name, column in table.fields.items():
            g.edges[etype].data[name] = tensor_column(table.path, name, column, dtype)
    if device is not None:
        g = g.to(device)
    if not relabel:
        return g
    dicts = {ntype: table.to_dict() for ntype, table in naming.items()}
    return g, (dicts if typed else dicts[DEFAULT_NTYPE])


def _files(path: Paths) -> dict[CanonicalEType, Path]:
    if not isinstance(path, Mapping):
        return {DEFAULT_CANONICAL_ETYPE: Path(path)}
    if not path:
        raise ValueError("path must name at least one relation and its file (got an empty dict)")
    for etype in path:
        if not (isinstance(etype, tuple) and len(etype) == 3):
            raise TypeError(
                f"a relation must be a triple (source, name, destination) (got {etype!r})"
            )
    return {etype: Path(file) for etype, file in path.items()}


def _columns_of(etype: CanonicalEType, edge_columns: EdgeColumns) -> list[str]:
    if isinstance(edge_columns, str):
        raise TypeError(f"edge_columns must be a sequence of names; write [{edge_columns!r}]")
    if isinstance(edge_columns, Mapping):
        return list(edge_columns.get(etype, ()))
    return list(edge_columns)


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
        files = {g.canonical_etypes[0]: Path(path)}
    elif set(files) != set(g.canonical_etypes):
        raise ValueError(
            f"path must have a file for each relation {g.canonical_etypes} (got {list(files)})"
        )
    for name in (src, dst):
        check_text(name, "the name of a column")
    out = []
    for etype, file in files.items():
        ends = zip((src, dst), (etype[0], etype[2]), g.edges(etype=etype), strict=True)
        columns = {column: names_column(_names_of(t, names), ids) for column, t, ids in ends}
        for name in _columns_of(etype, edge_columns):
            check_text(name, "the name of a column")
            if name in columns:
                raise ValueError(f"edge column {name!r} is also the name of a column of node ids")
            columns[name] = _arrow_column(name, g.edges[etype].data[name], wide)
        out.append((file, pyarrow.table(columns)))
    return out


def _names_of(ntype: str, names: NodeNames | None) -> dict[Hashable, int] | None:
    if names is None:
        return None
    nested = names.get(ntype)
    return nested if isinstance(nested, dict) else names  # type: ignore[return-value]


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
