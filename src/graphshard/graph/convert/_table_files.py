# SPDX-License-Identifier: Apache-2.0
"""One edge list file: the columns that a graph is made of, read from CSV or Parquet.

Regular files only; what is damaged is a `ValueError` that names the file. A compressed file does
not say how large it becomes, and is read whole: only the machine's memory bounds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..._files import check_regular
from ..frame import NamedColumn


@dataclass(frozen=True, kw_only=True)
class EdgeTable:
    """The columns of one file that matter.

    Args:
        path: The file, for errors.
        src: Name and values (a pyarrow ``ChunkedArray``) of the source column.
        dst: The same of the destination column.
        fields: Values of each edge column.
    """

    path: Path
    src: NamedColumn
    dst: NamedColumn
    fields: dict[str, Any]


def read_csv_file(
    path: Path,
    src: str,
    dst: str,
    fields: list[str],
    delimiter: str,
    column_names: Sequence[str] | None,
    skip_rows: int,
    relabel: bool,
) -> EdgeTable:
    """Read the columns of one CSV file; arguments as for ``from_csv``.

    Node ids are read as integers, or as text where that fails or names are wanted.
    """
    import pyarrow
    from pyarrow import csv

    _check_regular(path)
    parsing = csv.ParseOptions(delimiter=delimiter)
    reading = csv.ReadOptions(
        skip_rows=skip_rows, column_names=None if column_names is None else list(column_names)
    )

    def read(columns: list[str], id_type: Any) -> Any:
        return csv.read_csv(
            path,
            read_options=reading,
            parse_options=parsing,
            convert_options=csv.ConvertOptions(
                include_columns=columns,
                column_types={src: id_type, dst: id_type},
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
            ),
        )

    wanted = list(dict.fromkeys([src, dst, *fields]))
    try:
        with csv.open_csv(path, read_options=reading, parse_options=parsing) as file:
            _check_header(path, file.schema.names, wanted)
        if relabel:
            table = read(wanted, pyarrow.large_string())
        else:
            try:
                table = read(wanted, pyarrow.int64())
            except pyarrow.ArrowInvalid:  # some cell is no integer: as text, it can be shown
                table = read(wanted, pyarrow.large_string())
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, "CSV", error) from error
    return _edge_table(path, table, src, dst, fields)


def read_parquet_file(path: Path, src: str, dst: str, fields: list[str]) -> EdgeTable:
    """Read the columns of one Parquet file."""
    import pyarrow
    from pyarrow import parquet

    _check_regular(path)
    wanted = list(dict.fromkeys([src, dst, *fields]))
    try:
        _check_header(path, parquet.read_schema(path).names, wanted)
        table = parquet.read_table(path, columns=wanted, partitioning=None)
        table.validate(full=True)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, "Parquet", error) from error
    return _edge_table(path, table, src, dst, fields)


def _check_regular(path: Path) -> None:
    try:
        check_regular(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} must be a regular file ({error.strerror})") from None


def _unreadable(path: Path, kind: str, error: Exception) -> ValueError:
    reason = " ".join(str(error).split())
    return ValueError(f"{path} cannot be read as {kind}: {reason}; write it again")


def _check_header(path: Path, there: Sequence[str], wanted: Sequence[str]) -> None:
    for name in wanted:
        if list(there).count(name) != 1:
            problem = "twice" if name in there else "missing"
            raise ValueError(
                f"{path}: column {name!r} is {problem}; the file has the columns {list(there)}"
            )


def _edge_table(path: Path, table: Any, src: str, dst: str, fields: list[str]) -> EdgeTable:
    return EdgeTable(
        path=path,
        src=(src, table.column(src)),
        dst=(dst, table.column(dst)),
        fields={name: table.column(name) for name in fields},
    )
