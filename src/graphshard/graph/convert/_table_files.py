# SPDX-License-Identifier: Apache-2.0
"""One edge list: the columns that a graph is made of, read from CSV or Parquet.

Regular files only, or for Parquet a folder of them; what is damaged is a `ValueError` that names
the file. A compressed file does not say how large it becomes, and is read whole: only the machine's
memory bounds it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..._base.files import check_regular, check_text
from ..frame import NamedColumn

_COMMENT = "#"
_DELIMITERS = "\t;,| "
_LOOKED_AT = 1 << 16
"""Bytes at the top of a CSV file that tell what it is, once it could not be read."""
_REAL = re.compile(r"[+-]?[0-9.]+(e[+-]?[0-9]+)?", re.IGNORECASE)
_WHOLE = r"^\s*[+-]?[0-9]+\s*$"


@dataclass(frozen=True, kw_only=True)
class EdgeTable:
    """The columns of one table that matter; none is encoded by a dictionary.

    Args:
        path: The file or folder, for errors.
        reader: Name of the function that reads such a table, for errors.
        src: Name and values (a pyarrow ``ChunkedArray``) of the source column.
        dst: The same of the destination column.
        fields: Values of each edge column.
    """

    path: Path
    reader: str
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

    _check_texts(src, dst, *fields, *(column_names or ()))
    _check_regular(path)
    parsing = csv.ParseOptions(delimiter=delimiter)
    reading = csv.ReadOptions(
        skip_rows=skip_rows, column_names=None if column_names is None else list(column_names)
    )

    def read(columns: list[str], types: dict[str, Any]) -> Any:
        return csv.read_csv(
            path,
            read_options=reading,
            parse_options=parsing,
            convert_options=csv.ConvertOptions(
                include_columns=columns,
                column_types=types,
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
            ),
        )

    def advice() -> str:
        return _csv_advice(path, delimiter, skip_rows, column_names is not None)

    wanted = list(dict.fromkeys([src, dst, *fields]))
    text = pyarrow.large_string()
    try:
        with csv.open_csv(path, read_options=reading, parse_options=parsing) as file:
            _check_header(path, file.schema.names, wanted, advice)
        if relabel:
            table = read(wanted, {src: text, dst: text})
        else:
            try:
                table = read(wanted, {src: pyarrow.int64(), dst: pyarrow.int64()})
            except pyarrow.ArrowInvalid:  # some cell is no integer: as text, it can be shown
                table = read(wanted, {src: text, dst: text})
        for name in fields:
            if pyarrow.types.is_floating(table.schema.field(name).type):
                _check_whole_numbers(path, name, table.column(name), lambda n: read([n], {n: text}))
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise _unreadable(path, "CSV", error, advice()) from error
    except OSError as error:
        raise _unreadable(path, "CSV", error) from error
    return _edge_table(path, "from_csv", table, src, dst, fields)


def _check_whole_numbers(
    path: Path, name: str, values: Any, read_as_text: Callable[[str], Any]
) -> None:
    """Raise if a column is real only because its whole numbers do not fit 64 bits: ids, hashes."""
    from pyarrow import compute

    largest = compute.max(compute.abs(values)).as_py()
    if largest is None or not 2.0**63 <= largest < 2.0**200:
        return
    texts = read_as_text(name).column(name)
    if compute.all(compute.match_substring_regex(texts, _WHOLE)).as_py():
        row = next(
            i for i, cell in enumerate(texts.to_pylist()) if cell and abs(int(cell)) >= 2**63
        )
        raise ValueError(
            f"{path}, column {name!r}, row {row + 1}: {texts[row]} does not fit 64 bits with a "
            "sign; leave it out of edge_columns, or store it in two columns"
        )


def _csv_advice(path: Path, delimiter: str, skip_rows: int, is_headless: bool) -> str:
    """The call that would read a CSV file of another form, as far as its first lines tell."""
    import pyarrow

    try:
        with pyarrow.input_stream(path, compression="detect") as stream:
            top = stream.read(_LOOKED_AT).decode("utf-8", "replace")
    except (pyarrow.ArrowException, OSError):
        return ""
    lines = top.splitlines()[skip_rows:]
    comments = next((i for i, line in enumerate(lines) if not line.startswith(_COMMENT)), 0)
    cells, said = lines[comments:][:1], []
    if comments:
        said.append(f"skip_rows={skip_rows + comments}")
    if cells and delimiter not in cells[0]:
        other = next((mark for mark in _DELIMITERS if mark in cells[0].strip()), delimiter)
        if other != delimiter:
            said.append(f"delimiter={other!r}")
            delimiter = other
    if cells and not is_headless:
        numbers = [bool(_REAL.fullmatch(cell.strip())) for cell in cells[0].split(delimiter)]
        if all(numbers):
            names = ["src", "dst", *(f"column_{i}" for i in range(2, len(numbers)))]
            said.append(f"column_names={names[: len(numbers)]}")
    if not said:
        return ""
    why = f"{comments} comment line(s) come first: " if comments else ""
    return f"{why}read it with graphshard.from_csv(..., {', '.join(said)})"


def read_parquet_file(path: Path, src: str, dst: str, fields: list[str]) -> EdgeTable:
    """Read the columns of one Parquet file, or of a folder of them in the order of their names."""
    import pyarrow

    _check_texts(src, dst, *fields)
    wanted = list(dict.fromkeys([src, dst, *fields]))
    tables: list[Any] = []
    for file in _parquet_files(path):
        table = _plain(_read_parquet(file, wanted))
        if tables and table.schema.types != tables[0].schema.types:
            raise ValueError(
                f"{file}: the columns {wanted} must have the types that they have in the first "
                f"file of the folder, {tables[0].schema.types} (got {table.schema.types}); write "
                "the folder again"
            )
        tables.append(table)
    table = tables[0] if len(tables) == 1 else pyarrow.concat_tables(tables)
    return _edge_table(path, "from_parquet", table, src, dst, fields)


def _read_parquet(path: Path, wanted: list[str]) -> Any:
    import pyarrow
    from pyarrow import parquet

    _check_regular(path)
    try:
        _check_header(path, parquet.read_schema(path).names, wanted)
        table = parquet.read_table(path, columns=wanted, partitioning=None)
        table.validate(full=True)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, "Parquet", error) from error
    return table


def _parquet_files(path: Path) -> list[Path]:
    """The files of a table; in a folder, names that begin with _ or . are notes of its writer."""
    if not path.is_dir():
        return [path]
    inside = sorted(p for p in path.iterdir() if not p.name.startswith(("_", ".")))
    for file in inside:
        if file.is_dir() or file.suffix != ".parquet":
            raise ValueError(
                f"{path} must hold Parquet files and nothing else (it has {file.name}"
                f"{', a folder' if file.is_dir() else ''}); move it out, or write one file"
            )
    if not inside:
        raise ValueError(f"{path} holds no Parquet file; give a file, or a folder of files")
    return inside


def _check_texts(*names: str) -> None:
    for name in names:
        check_text(name, "the name of a column")


def _check_regular(path: Path) -> None:
    try:
        check_regular(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} must be a regular file ({error.strerror})") from None


def _unreadable(path: Path, kind: str, error: Exception, advice: str = "") -> ValueError:
    reason = " ".join(str(error).split())
    return ValueError(f"{path} cannot be read as {kind}: {reason}; {advice or 'write it again'}")


def _check_header(
    path: Path,
    there: Sequence[str],
    wanted: Sequence[str],
    advice: Callable[[], str] = lambda: "",
) -> None:
    for name in wanted:
        if list(there).count(name) != 1:
            problem = "twice" if name in there else "missing"
            cure = advice()
            raise ValueError(
                f"{path}: column {name!r} is {problem}; the file has the columns {list(there)}"
                f"{'; ' if cure else ''}{cure}"
            )


def _plain(table: Any) -> Any:
    """The same table with every column as it would be without a dictionary."""
    import pyarrow

    for place, field in enumerate(table.schema):
        if pyarrow.types.is_dictionary(field.type):
            column = table.column(place).cast(field.type.value_type)
            table = table.set_column(place, field.name, column)
    return table


def _edge_table(
    path: Path, reader: str, table: Any, src: str, dst: str, fields: list[str]
) -> EdgeTable:
    return EdgeTable(
        path=path,
        reader=reader,
        src=(src, table.column(src)),
        dst=(dst, table.column(dst)),
        fields={name: table.column(name) for name in fields},
    )
