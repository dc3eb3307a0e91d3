# SPDX-License-Identifier: Apache-2.0
"""One edge list: the columns that a graph is made of, read from CSV or Parquet, each cell checked.

Regular files only, or for Parquet a folder of them; what is damaged is a `ValueError` that names
the file. A compressed file does not say how large it becomes, and is read whole: only the machine's
memory bounds it.

A column is a pyarrow ``ChunkedArray`` here; with its name it is a pair, so that an error (always a
ValueError) can say where it stands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..._base.files import check_regular, check_text

NamedColumn: TypeAlias = tuple[str, Any]
_COMMENT = "#"
_DELIMITERS = "\t;,| "
_LOOKED_AT = 1 << 16
"""Bytes at the top of a CSV file that tell what it is, once it could not be read."""
_REAL = re.compile(r"[+-]?[0-9.]+(e[+-]?[0-9]+)?", re.IGNORECASE)
_WHOLE = r"^\s*[+-]?[0-9]+\s*$"
_INTEGER = r"^(0|-?[1-9][0-9]{0,99})$"
"""An integer as a program writes it: text such as 007 or +1 stays text, or names would merge."""
_DIGITS = r"^\s*-?[0-9]+\s*$"
_INT64_MAX = 2**63 - 1
_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"


# ------------------------------------------------------------------ files


@dataclass(frozen=True, kw_only=True)
class EdgeColumnsInFile:
    """The columns of one table that matter; none is encoded by a dictionary.

    Args:
        reader: Name of the function that reads such a table, for errors.
        src: Name and values (a pyarrow ``ChunkedArray``) of the source column.
        dst: The same of the destination column.
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
) -> EdgeColumnsInFile:
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

    needed_columns = list(dict.fromkeys([src, dst, *fields]))
    text = pyarrow.large_string()
    try:
        with csv.open_csv(path, read_options=reading, parse_options=parsing) as file:
            _check_header(path, file.schema.names, needed_columns, advice)
        if relabel:
            table = read(needed_columns, {src: text, dst: text})
        else:
            try:
                table = read(needed_columns, {src: pyarrow.int64(), dst: pyarrow.int64()})
            except pyarrow.ArrowInvalid:  # some cell is no integer: as text, it can be shown
                table = read(needed_columns, {src: text, dst: text})
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


def read_parquet_file(path: Path, src: str, dst: str, fields: list[str]) -> EdgeColumnsInFile:
    """Read the columns of one Parquet file, or of a folder of them in the order of their names."""
    import pyarrow

    _check_texts(src, dst, *fields)
    needed_columns = list(dict.fromkeys([src, dst, *fields]))
    tables: list[Any] = []
    for file in _parquet_files(path):
        table = _read_parquet(file, needed_columns)
        if tables and table.schema.types != tables[0].schema.types:
            raise ValueError(
                f"{file}: the columns {needed_columns} must have the types that they have in the "
                f"first file of the folder, {tables[0].schema.types} (got {table.schema.types}); "
                "write the folder again"
            )
        tables.append(table)
    table = tables[0] if len(tables) == 1 else pyarrow.concat_tables(tables)
    return _edge_table(path, "from_parquet", table, src, dst, fields)


def _read_parquet(path: Path, columns: list[str]) -> Any:
    """The columns of one file, each as it would be without a dictionary."""
    import pyarrow
    from pyarrow import parquet

    _check_regular(path)
    try:
        _check_header(path, parquet.read_schema(path).names, columns)
        table = parquet.read_table(path, columns=columns, partitioning=None)
        table.validate(full=True)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, "Parquet", error) from error
    for number, field in enumerate(table.schema):
        if pyarrow.types.is_dictionary(field.type):
            column = table.column(number).cast(field.type.value_type)
            table = table.set_column(number, field.name, column)
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
    names: Sequence[str],
    needed: Sequence[str],
    advice: Callable[[], str] = lambda: "",
) -> None:
    for name in needed:
        if list(names).count(name) != 1:
            problem = "twice" if name in names else "missing"
            cure = advice()
            raise ValueError(
                f"{path}: column {name!r} is {problem}; the file has the columns {list(names)}"
                f"{'; ' if cure else ''}{cure}"
            )


def _edge_table(
    path: Path, reader: str, table: Any, src: str, dst: str, fields: list[str]
) -> EdgeColumnsInFile:
    return EdgeColumnsInFile(
        path=path,
        reader=reader,
        src=(src, table.column(src)),
        dst=(dst, table.column(dst)),
        fields={name: table.column(name) for name in fields},
    )


# ------------------------------------------------------------------ columns


def integer_ids(
    path: Path, column: NamedColumn, num_nodes: int | None, idtype: torch.dtype, reader: str
) -> Tensor:
    """[num_rows] int64 node ids of a column of integers.

    Args:
        column: Name and values; text means that some cell could not be read as an integer.
        num_nodes: Ids must be below this, where it is known.
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

        kinds = []
        for path, (name, values) in columns:
            _refuse_nulls(path, name, values, "a node name")
            kinds.append(_name_type(path, name, values))
            if kinds[-1] != kinds[0]:
                first_path, (first_name, _) = columns[0]
                raise ValueError(
                    f"{path}, column {name!r}: names of one node type must be all text or all "
                    f"integers (got {kinds[-1]}, but column {first_name!r} of {first_path} is "
                    f"{kinds[0]}); store both as text"
                )
        needs_text = any(_needs_text(values) for _, (_, values) in columns)
        self._type = pyarrow.large_string() if needs_text else kinds[0]
        pieces = [chunk for _, (_, values) in columns for chunk in values.cast(self._type).chunks]
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

    is_unsigned = pyarrow.types.is_uint64(values.type)
    return is_unsigned and (compute.max(values).as_py() or 0) > _INT64_MAX


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
    positions = np.flatnonzero(_numpy(flags))
    return int(positions[0]) if len(positions) else None


def _where(path: Path, name: str, row: int) -> str:
    return f"{path}, column {name!r}, row {row + 1}:"


def _numpy(values: Any) -> np.ndarray:
    """A column as an array that may be written to; there are no nulls in it."""
    array = np.asarray(values)
    return array if array.flags.writeable else array.copy()
