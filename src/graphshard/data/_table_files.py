# SPDX-License-Identifier: Apache-2.0
"""Files of tables, read batch by batch: CSV, Parquet, Arrow and JSON lines; and tables in memory.

A table is one file or many: a path, a list, a glob, a folder, on this machine or where `pyarrow.fs`
finds it. Files come in the order of their paths, rows in the order of each file, whatever reads
them. `pyarrow.dataset` reads Parquet and Arrow; CSV is read by `pyarrow.csv`, on which the former
stands, because each file may begin with other comments, and because rows that are none are counted.

[Note: cells of CSV are text first]
A type that is guessed from the first megabyte is wrong for a column whose first fraction, or first
name, comes later, and then what is read depends on where files were cut. So every cell is read as
text, and a column is given a type when all of it is there (`typed_column`). That costs a fifth more
than guessing. Ids stay text for longer: 007 and 7 are two ids (see `_row_ids.py`).
"""

from __future__ import annotations

import csv as python_csv
import fnmatch
import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from urllib.parse import unquote

import numpy as np

from .._base.files import check_text
from ._kept_columns import KeptColumns
from .remote_files import in_folder, is_uri, name_of, open_uri, remote_errors, shown
from .settings import TableFormat

NULL_VALUES = (
    *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN"),
    *("<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null", "\\N"),
)
"""Cells of CSV that are missing: those of pandas, and what databases write."""

_FORMATS: dict[str, TableFormat] = {
    **dict.fromkeys((".csv", ".tsv", ".tab", ".txt", ".dat", ".data"), "csv"),
    **dict.fromkeys((".edges", ".edgelist", ".psv", ".mtx"), "csv"),
    **dict.fromkeys((".parquet", ".pq", ".parq"), "parquet"),
    **dict.fromkeys((".arrow", ".feather", ".ipc", ".arrows"), "arrow"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
}
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4", ".br": "brotli"}
TABLE_ENDINGS = re.compile(
    rf".*({'|'.join(map(re.escape, _FORMATS))})({'|'.join(map(re.escape, _COMPRESSIONS))})?"
    r"(\?\w+=.*)?",
    re.IGNORECASE | re.DOTALL,
)
"""How paths, globs and URIs of tables end."""
_DELIMITERS = (",", "\t", ";", "|", "::", " ")
_COMMENTS = ("#", "%")
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_LOOKED_AT = 1 << 16
_LINES_LOOKED_AT = 50
_NUMBER = re.compile(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?\s*", re.IGNORECASE)
_UNIT_SEPARATOR = b"\x1f"
_NO_TABLES = {
    "<!doctype html": ("a web page", "download the file itself"),
    "<html": ("a web page", "download the file itself"),
    "<?xml": ("XML", "write a line an edge, as networkx.to_pandas_edgelist does"),
    "version https://git-lfs": ("a pointer of Git LFS", "fetch the file by git lfs pull"),
    "*vertices": ("a graph of Pajek", "write a line an edge, as networkx.to_pandas_edgelist does"),
    "graph [": ("a graph in GML", "write a line an edge, as networkx.to_pandas_edgelist does"),
}
"""How files begin that look like CSV and are none."""
_OTHER_BYTES: tuple[tuple[bytes, str, str], ...] = (
    (rb"\x1f\x8b", "what gzip has compressed", "give its name the ending .gz"),
    (rb"\x28\xb5\x2f\xfd", "what zstd has compressed", "give its name the ending .zst"),
    (rb"\x04\x22\x4d\x18", "what lz4 has compressed", "give its name the ending .lz4"),
    (rb"BZh[1-9]1AY&SY", "what bzip2 has compressed", "give its name the ending .bz2"),
    (rb"PK\x03\x04", "an archive, or a workbook", "unpack it; of a workbook, save a sheet as CSV"),
    (rb"PAR1.*\0", "Parquet", "say format = parquet, or give its name that ending"),
    (rb"ARROW1.*\0", "Arrow", "say format = arrow, or give its name that ending"),
    (rb"FEA1.*\0", "Feather of version 1", "read it by pandas.read_feather and write it again"),
    (rb"SQLite format 3\0", "a database of SQLite", "write its tables as CSV"),
    (rb"\x89HDF", "HDF5", "read it by pandas.read_hdf and write Parquet"),
)
"""How files begin that are no text, what they are, and what to do."""

_USUAL_NAMES = {"id", "node_id", "source", "src", "target", "dst", "from", "to"}
_BLOCK = 1 << 20
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
_JSON_BLOCK = 8 << 20
_ROWS_OF_MEMORY = 1 << 17


class TableBatch(NamedTuple):
    """Some rows of one file.

    Args:
        file: Where they are from, for messages.
        first_row: Number of the first of them in the file, from 1, header and comments left out.
        columns: A pyarrow ``RecordBatch``.
        skipped: Numbers of rows of the file that are none and left out here, ascending.
    """

    file: str
    first_row: int
    columns: Any
    skipped: Sequence[int] = ()

    def row_number(self, index: int) -> int:
        """The number in the file of a row of the batch."""
        number = self.first_row + index
        for skipped in self.skipped:
            if skipped <= number:
                number += 1
        return number


class MalformedRow(NamedTuple):
    """A line of CSV with more or fewer cells than the file has columns."""

    file: str
    row: int
    num_cells: int
    num_columns: int
    text: str


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """How files are read; None: as they look.

    Args:
        format: "csv", "parquet", "arrow" or "json" (one object a line); None: by the ending.
        delimiter: What separates cells of CSV.
        header: Whether the first line of CSV names the columns.
        columns: Names of the columns of CSV, instead of those of a header.
        skip_rows: Lines of CSV to skip, besides comments at the top.
        comment: What begins a line of CSV that is no row; None: ``#`` or ``%``.
        quote: What quotes cells of CSV; "" for nothing.
        encoding: Of CSV; None is UTF-8.
        null_values: Cells of CSV that are missing; None: those that pandas takes for missing.
        more_null_values: Cells that are missing besides those, such as "unknown".
    """

    format: TableFormat | None = None
    delimiter: str | None = None
    header: bool | None = None
    columns: tuple[str, ...] = ()
    skip_rows: int = 0
    comment: str | None = None
    quote: str = '"'
    encoding: str | None = None
    null_values: tuple[str, ...] | None = None
    more_null_values: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.format not in (None, "csv", "parquet", "arrow", "json"):
            raise ValueError(
                f"format must be csv, parquet, arrow or json (got {self.format!r}); leave it out "
                "to go by the ending of the file"
            )
        if self.delimiter is not None and self.delimiter != "::" and len(self.delimiter) != 1:
            raise ValueError(
                f"delimiter must be one character, or :: (got {self.delimiter!r}); a tab is '\\t'"
            )
        if self.header and self.columns:
            raise ValueError("columns names the columns of files without a header; drop one of two")


AS_IT_LOOKS = FileOptions()


class TableSource:
    """One table, to be read several times if need be.

    Args:
        source: A path, URI, glob or folder, a list of those, or a table in memory: of pyarrow,
            pandas, Polars or whatever has ``__arrow_c_stream__``.
        base: Folder, a path or URI, that relative paths are seen from; None: the current one.
        named: Names of columns that will be asked for; they tell which line is the header, and by
            what cells are separated.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The files are of no known kind, or not of one kind.
    """

    def __init__(
        self,
        source: Any,
        options: FileOptions = AS_IT_LOOKS,
        *,
        base: str | Path | None = None,
        named: Sequence[str] = (),
    ) -> None:
        self.options = options
        self.malformed: list[MalformedRow] = []
        self.num_malformed = 0
        self._named = tuple(named)
        self._table: Any = None
        self._dialects: dict[str, _Dialect] = {}
        self._dataset: Any = None
        self._names_in_json: dict[str, list[str]] = {}
        self._path_of: dict[str, str] = {}
        self._index_names: tuple[Any, ...] = ()  # of a DataFrame of pandas
        self.files: list[str] = []
        if is_in_memory(source):
            self.format: str = "memory"
            self._table = _table_of(source)
            self._index_names = tuple(getattr(getattr(source, "index", None), "names", ()))
            self.files = ["the table"]
            self.schema = self._table.schema
        else:
            self._filesystem, found, self._root = find_files(source, base)
            self.files = [file.name for file in found]
            self._path_of = {file.name: file.path for file in found}
            self.format = options.format or _format_of(self._filesystem, found)
            self.schema = _schema_without_views(self._read_schema(), is_small=True)
        names = list(self.schema.names)
        for name in names:
            check_text(name, "the name of a column")
        if repeated := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise ValueError(f"{self.name}: column {repeated[0]!r} is there twice; rename one")

    @property
    def name(self) -> str:
        """The table in messages."""
        return self.files[0] if len(self.files) == 1 else f"{self.files[0]} and others"

    @property
    def has_decimal_comma(self) -> bool:
        """Whether cells such as 1,5 are numbers: as semicolons are between them."""
        return any(dialect.delimiter == ";" for dialect in self._dialects.values())

    def whole_column(self, name: str, pieces: Sequence[Any], kept: KeptColumns) -> Any:
        """A column of all batches, with a type.

        Args:
            pieces: Arrays that were put away in ``kept``, in order.
        """
        values = kept.column(pieces, self.schema.field(name).type)
        return typed_column(values, kept, self.has_decimal_comma) if self.is_untyped else values

    def is_index(self, name: str) -> bool:
        """Whether a column is the number of the row that pandas has written."""
        return name not in self.telling_names

    @property
    def telling_names(self) -> list[str]:
        """The columns that can be ids: not the number of a row that pandas writes first."""
        names = [n for n in self.schema.names if not re.fullmatch(r"__index_level_\d+__", n)]
        if self._dialects and next(iter(self._dialects.values())).has_index:
            del names[0]
        return names

    @property
    def is_untyped(self) -> bool:
        """Whether columns come as text that only looks like something."""
        return self.format == "csv"

    def column(self, name: str) -> str:
        """The name of a column; a whole number is the place of one that has no name.

        Raises:
            ValueError: There is none.
        """
        called, names = self.spellings, self.schema.names
        if name in called:
            return called[name]
        close = next((known for known in names if known.casefold() == name.casefold()), None)
        cure = f"; did you mean {close!r}?" if close else "; name one of them"
        if name in self._index_names:
            cure = "; it is the index: pass what reset_index() gives"
        if len(called) > len(names):
            cure = "; the file has no header: name columns by their place, from 0"
        raise ValueError(
            f"{self.name}: column {name!r} is missing; there are {', '.join(map(repr, names))}"
            f"{cure}"
        )

    @property
    def spellings(self) -> dict[str, str]:
        """Columns by all that they are called: their names and, without a header, their places."""
        called = {name: name for name in self.schema.names}
        if self.format == "csv" and not next(iter(self._dialects.values())).has_header:
            for place, name in enumerate(self.schema.names):
                called.setdefault(str(place), name)
        return called

    def known_num_rows(self) -> int | None:
        """How many rows there are, where that can be said without reading them."""
        if self._table is not None:
            return len(self._table)
        return int(self._dataset.count_rows()) if self._dataset is not None else None

    def batches(self, columns: Sequence[str], least_rows: int = 1 << 20) -> Iterator[TableBatch]:
        """Rows of all files in order, with these columns alone.

        Args:
            least_rows: Smaller batches of one file are put together to have so many.
        """
        import pyarrow

        waiting: list[TableBatch] = []
        for read in _read_ahead(self._batches(list(columns))):
            batch = read._replace(columns=without_views(read.columns, is_small=True))
            is_same = not waiting or waiting[-1].file == batch.file
            num_rows = sum(len(b.columns) for b in waiting)
            if is_same and num_rows < least_rows and _num_bytes(waiting) < _MOST_BYTES:
                waiting.append(batch)
                continue
            yield _joined(waiting, pyarrow)
            waiting = [batch]
        if waiting:
            yield _joined(waiting, pyarrow)

    # ------------------------------------------------------------------ schema

    def _read_schema(self) -> Any:
        import pyarrow

        try:
            if self.format == "csv":
                return self._csv_schema()
            if self.format == "json":
                return self._json_schema()
            if self.format == "arrow":
                schemas = [self._arrow_reader(file).schema for file in self.files]
                return pyarrow.unify_schemas(schemas, promote_options="permissive")
            return self._parquet_schema()
        except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
            self._raise_of(error)

    def _csv_schema(self) -> Any:
        import pyarrow

        names: list[str] | None = None
        for file in self.files:
            dialect = self._dialect(file, names)
            if dialect is None:  # nothing in it
                continue
            self._dialects[file] = dialect
            if names is None:
                names = dialect.names
            elif sorted(dialect.names) != sorted(names):
                raise ValueError(
                    f"{file}: the columns must be those of {next(iter(self._dialects))}, {names} "
                    f"(got {dialect.names}); give one kind of files to a table"
                )
        if names is None:
            raise ValueError(f"{self.name} is empty; give a file with at least a header")
        names = [*names, *(n for n in self._values_of_folders(self.files[0]) if n not in names)]
        return pyarrow.schema([(name, pyarrow.string()) for name in names])

    def _values_of_folders(self, file: str) -> dict[str, str | None]:
        """What the names of folders say of all rows of a file, as Spark and Hive write it."""
        values: dict[str, str | None] = {}
        for folder in os.path.relpath(self._path_of[file], self._root).split("/")[:-1]:
            name, equals, value = folder.partition("=")
            if equals:
                values[name] = None if value == _HIVE_NULL else unquote(value)
        return values

    def _parquet_schema(self) -> Any:
        import pyarrow
        from pyarrow import dataset, fs

        paths = [self._path_of[file] for file in self.files]
        keys = os.path.relpath(paths[0], self._root).split("/")[:-1]
        partitioning = None
        if any("=" in key for key in keys):
            partitioning = dataset.HivePartitioning.discover()
        # Whole row groups in advance are for what is far: here they take twice the time and memory.
        is_far = not isinstance(self._filesystem, fs.LocalFileSystem)
        settings = {
            "filesystem": self._filesystem,
            "format": dataset.ParquetFileFormat(
                default_fragment_scan_options=dataset.ParquetFragmentScanOptions(pre_buffer=is_far)
            ),
            "partitioning": partitioning,
            "partition_base_dir": self._root,
        }
        first = dataset.dataset(paths[:1], **settings).schema
        of_folders = [name for name in first.names if f"{name}=" in "/".join(keys)]
        unified = first
        for file in self.files[1:]:
            schema = dataset.ParquetFileFormat().inspect(self._path_of[file], self._filesystem)
            _check_there(file, [n for n in first.names if n not in of_folders], schema.names)
            try:
                unified = pyarrow.unify_schemas([unified, schema], promote_options="permissive")
            except pyarrow.ArrowException as error:
                raise ValueError(
                    f"{file}: the columns must have types that become one with those of "
                    f"{self.files[0]} ({error}); write the files alike"
                ) from None
        self._dataset = dataset.dataset(paths, schema=unified, **settings)
        return unified

    # ------------------------------------------------------------------ rows

    def _batches(self, columns: list[str]) -> Iterator[TableBatch]:
        import pyarrow

        self.malformed, self.num_malformed = [], 0
        try:
            if self._table is not None:
                pieces = self._table.select(columns).to_batches(_ROWS_OF_MEMORY)
                yield from self._numbered("the table", pieces)
            elif self.format == "csv":
                for file in self._dialects:
                    yield from self._csv_batches(file, columns)
            elif self.format == "parquet":
                yield from self._parquet_batches(columns)
            else:
                for file in self.files:
                    if self.format == "json":
                        _check_there(file, columns, self._names_in_json[file])
                        yield from self._numbered(file, self._json_batches(file, columns))
                    else:
                        yield from self._arrow_batches(file, columns)
        except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
            self._raise_of(error)

    def _raise_of(self, error: Exception) -> NoReturn:
        """Raise what went wrong while files were read, with the name of one.

        What the system says of a file says enough; what pyarrow finds in one has no number.
        """
        is_of_system = isinstance(error, OSError) and error.errno is not None
        if is_of_system and any(
            name == path and path in str(error) for name, path in self._path_of.items()
        ):
            raise error
        raise _unreadable(self.name, self.format, error) from error

    def _numbered(self, file: str, batches: Any) -> Iterator[TableBatch]:
        row = 1
        for batch in batches:
            yield TableBatch(file, row, batch)
            row += len(batch)

    def _parquet_batches(self, columns: list[str]) -> Iterator[TableBatch]:
        names = {path: name for name, path in self._path_of.items()}
        path, row = "", 1
        scanner = self._dataset.scanner(columns=columns, batch_readahead=4, fragment_readahead=2)
        for tagged in scanner.scan_batches():
            if tagged.fragment.path != path:
                path, row = tagged.fragment.path, 1
            yield TableBatch(names[path], row, tagged.record_batch)
            row += len(tagged.record_batch)

    def _arrow_reader(self, file: str) -> Any:
        """What reads the record batches of an Arrow file, or of a stream in a file."""
        import pyarrow
        from pyarrow import ipc

        try:
            return ipc.open_file(self._filesystem.open_input_file(self._path_of[file]))
        except pyarrow.ArrowInvalid:
            with self._filesystem.open_input_stream(self._path_of[file]) as stream:
                _check_no_other_bytes(file, stream.read(1 << 12), "Arrow")
            return ipc.open_stream(self._filesystem.open_input_stream(self._path_of[file]))

    def _arrow_batches(self, file: str, columns: list[str]) -> Iterator[TableBatch]:
        reader = self._arrow_reader(file)
        _check_there(file, columns, reader.schema.names)
        if hasattr(reader, "num_record_batches"):
            read = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            read = iter(reader)
        yield from self._numbered(file, (batch.select(columns) for batch in read))

    def _json_schema(self) -> Any:
        """The types of the fields of all objects of all files."""
        import pyarrow

        unified: Any = None
        large: dict[str, None] = {}
        for file in self.files:
            names: dict[str, None] = {}
            for table in self._json_blocks(file):
                names |= dict.fromkeys(table.schema.names)
                large |= dict.fromkeys(name for name in names if _is_past_int64(table, name))
                unified = table.schema if unified is None else _unified(unified, table.schema)
            self._names_in_json[file] = list(names)
        for name in large:
            if self._is_uint64_in_json(name):
                place = unified.get_field_index(name)
                unified = unified.set(place, pyarrow.field(name, pyarrow.uint64()))
        return pyarrow.schema([]) if unified is None else unified

    def _is_uint64_in_json(self, name: str) -> bool:
        """Whether a field, of which pyarrow makes reals where int64 is too small, has hashes."""
        import pyarrow

        asked = pyarrow.schema([(name, pyarrow.uint64())])
        try:
            for file in self.files:
                for _ in self._json_blocks(file, asked):
                    pass
        except pyarrow.ArrowInvalid:
            return False
        return True

    def _json_batches(self, file: str, columns: Sequence[str]) -> Iterator[Any]:
        import pyarrow

        asked = pyarrow.schema([self.schema.field(name) for name in columns])
        for table in self._json_blocks(file, asked):
            yield from table.select(list(columns)).to_batches()

    def _json_blocks(self, file: str, schema: Any = None) -> Iterator[Any]:
        """Tables of whole lines of a file, of some megabytes each.

        Args:
            schema: Fields to read, and their types; None: all, by their values.
        """
        from pyarrow import json

        # Where a list begins with a null, pyarrow 26 drops it and shifts what follows, unless the
        # type is given.
        parse = json.ParseOptions(
            explicit_schema=schema,
            unexpected_field_behavior="infer" if schema is None else "ignore",
        )
        rest = b""
        with self._stream(file) as stream:
            while True:
                data = stream.read(_JSON_BLOCK)
                whole = rest + data
                end = whole.rfind(b"\n") + 1 if data else len(whole)
                lines, rest = whole[:end], whole[end:]
                if lines.strip():
                    reading = json.ReadOptions(block_size=max(len(lines), 1))
                    yield json.read_json(io.BytesIO(lines), reading, parse)
                if not data:
                    return

    def _stream(self, file: str) -> Any:
        path = self._path_of[file]
        compression = _COMPRESSIONS.get(os.path.splitext(path)[1].lower())
        return self._filesystem.open_input_stream(path, compression=compression)

    # ------------------------------------------------------------------ CSV

    def _dialect(self, file: str, names: list[str] | None) -> _Dialect | None:
        with self._stream(file) as stream:
            top = b""
            while len(top) < _LOOKED_AT and (more := stream.read(_LOOKED_AT - len(top))):
                top += more
        is_whole = len(top) < _LOOKED_AT
        return _look_at(file, top, is_whole, self.options, self._named, names)

    def _csv_batches(self, file: str, columns: list[str]) -> Iterator[TableBatch]:
        import pyarrow

        # In several threads, rows that are none have no numbers; few columns gain nothing by them.
        is_numbered = len(columns) <= _FEW_COLUMNS
        in_file = set(self._dialects[file].names)
        of_folders = {n: v for n, v in self._values_of_folders(file).items() if n not in in_file}
        of_folders = {name: value for name, value in of_folders.items() if name in columns}
        if missing := [name for name in columns if name not in in_file and name not in of_folders]:
            _check_there(file, missing, sorted(in_file))
        columns = [name for name in columns if name in in_file] or self._dialects[file].names[:1]
        skipped: list[int] = []
        malformed: list[MalformedRow] = []
        all_are_known = False

        def note(row: Any) -> str:
            if all_are_known:
                return "skip"
            number = (row.number or 0) - self._dialects[file].skip_lines
            skipped.append(number)
            if not (row.text or "").lstrip().startswith(self._dialects[file].comments):
                cells = (row.actual_columns, row.expected_columns)
                malformed.append(MalformedRow(file, number, *cells, row.text or ""))
            return "skip"

        row = 1
        for batch in self._csv_reader(file, columns, note, not is_numbered):
            if skipped and not is_numbered:
                skipped.clear()
                malformed.clear()
                for _ in self._csv_reader(file, columns[:1], note, False):
                    pass
                is_numbered = all_are_known = True
            for name, value in of_folders.items():
                whole = pyarrow.array([value], pyarrow.string()).take(
                    pyarrow.array(np.zeros(len(batch), np.int64))
                )
                batch = batch.append_column(name, whole)
            yield TableBatch(file, row, batch, skipped)
            row += len(batch)
        for bad in malformed[-1:]:
            if "\n" in bad.text and self.options.quote and bad.text.count(self.options.quote) % 2:
                raise ValueError(
                    f"{file}, row {bad.row}: a quote must be closed (got {bad.text[:40]!r}, and "
                    f'{bad.text.count(chr(10))} lines more); close it, or say quote = "" where '
                    "quotes are letters"
                )
        self.num_malformed += len(malformed)
        self.malformed += malformed[: _MOST_SHOWN - len(self.malformed)]

    def check_cells(self, cure: str) -> None:
        """Refuse rows that had other numbers of cells, where none may be left out.

        Raises:
            ValueError: There was one; says where, and the cure.
        """
        if self.malformed:
            bad = self.malformed[0]
            raise ValueError(
                f"{bad.file}: each row must have as many cells as the first (got {bad.num_cells} "
                f"of {bad.num_columns} in row {bad.row}: {bad.text[:60]!r}); {cure}"
            )

    def _csv_reader(self, file: str, columns: list[str], note: Any, use_threads: bool) -> Any:
        """What reads the batches of a file of CSV, and tells of each line that is no row."""
        import pyarrow
        from pyarrow import csv

        dialect = self._dialects[file]
        text = pyarrow.string()
        nulls = NULL_VALUES if self.options.null_values is None else self.options.null_values
        return csv.open_csv(
            dialect.transformed(self._stream(file)),
            read_options=csv.ReadOptions(
                column_names=dialect.names,
                skip_rows=dialect.skip_lines,
                encoding=dialect.encoding or "utf8",
                block_size=_BLOCK,
                use_threads=use_threads,
            ),
            parse_options=csv.ParseOptions(
                delimiter=dialect.delimiter,
                quote_char=self.options.quote or False,
                newlines_in_values=dialect.has_quotes,
                invalid_row_handler=note,
            ),
            convert_options=csv.ConvertOptions(
                include_columns=columns,
                column_types=dict.fromkeys(dialect.names, text),
                null_values=[*nulls, *self.options.more_null_values],
                strings_can_be_null=True,
                quoted_strings_can_be_null=True,
            ),
        )


_MOST_SHOWN = 10
_FEW_COLUMNS = 8
_MOST_BYTES = 1 << 28  # of batches that are put together; text of 2 GiB has no offsets of 32 bits


def _num_bytes(batches: Sequence[TableBatch]) -> int:
    return sum(batch.columns.nbytes for batch in batches)


def _read_ahead(batches: Iterator[TableBatch]) -> Iterator[TableBatch]:
    """The same, the next of which is read while one is worked on."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = pool.submit(next, batches, None)
            yield batch


def _joined(batches: list[TableBatch], pyarrow: Any) -> TableBatch:
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    table = pyarrow.Table.from_batches([batch.columns for batch in batches])
    (columns,) = table.combine_chunks().to_batches(max_chunksize=None) or [first.columns]
    return first._replace(columns=columns)


# ---------------------------------------------------------------------- where files are


def is_in_memory(source: Any) -> bool:
    """Whether a source is a table, and no path."""
    kind = type(source)  # to ask a LazyFrame of Polars itself would be to plan what it does
    return hasattr(kind, "__arrow_c_stream__") or hasattr(kind, "columns")


def _table_of(source: Any) -> Any:
    """A pyarrow table of whatever knows how to become one."""
    import pyarrow

    try:
        if isinstance(source, pyarrow.Table):
            table = source
        elif type(source).__module__.split(".")[0] == "pandas":
            table = pyarrow.Table.from_pandas(source, preserve_index=False)
        else:
            table = pyarrow.table(source)
        return without_views(table, table.nbytes < 2**31)
    except (pyarrow.ArrowException, TypeError, ValueError, OverflowError) as error:
        reason = " ".join(str(error).split())
        is_plan = hasattr(source, "collect")  # of Polars
        cure = "pass what its collect() gives" if is_plan else "give each column values of one kind"
        if "_pli128" in reason or "_plu128" in reason:
            reason, cure = "Arrow has no integers of 128 bits", "cast them to Int64 or String"
        if isinstance(error, OverflowError):
            reason, cure = "a whole number is larger than 64 bits hold", "make text of its column"
        if "Duplicate column names" in reason:
            cure = "rename one of them"
        raise ValueError(
            f"the {type(source).__name__} cannot become an Arrow table: {reason}; {cure}"
        ) from error


def without_views(table: Any, is_small: bool = False) -> Any:
    """A table or batch with text and bytes in one piece: few kernels of pyarrow take views.

    Args:
        is_small: Offsets of 32 bits suffice.
    """
    schema = _schema_without_views(table.schema, is_small)
    if schema is table.schema:
        return table
    columns = [column.cast(field.type) for column, field in zip(table.columns, schema, strict=True)]
    return type(table).from_arrays(columns, schema=schema)


def _schema_without_views(schema: Any, is_small: bool = False) -> Any:
    for place, column in enumerate(schema):
        kind = _type_without_views(column.type, is_small)
        if kind != column.type:
            schema = schema.set(place, column.with_type(kind))
    return schema


def _type_without_views(kind: Any, is_small: bool) -> Any:
    import pyarrow

    types = pyarrow.types
    if types.is_string_view(kind):
        return pyarrow.string() if is_small else pyarrow.large_string()
    if types.is_binary_view(kind):
        return pyarrow.binary() if is_small else pyarrow.large_binary()
    if types.is_dictionary(kind):
        value_type = _type_without_views(kind.value_type, is_small)
        return pyarrow.dictionary(kind.index_type, value_type, kind.ordered)
    if types.is_list(kind) or types.is_large_list(kind):
        make = pyarrow.list_ if types.is_list(kind) else pyarrow.large_list
        value = kind.value_field
        return make(value.with_type(_type_without_views(value.type, is_small)))
    return kind


class FoundFile(NamedTuple):
    """A file of a table.

    Args:
        name: What it is called in messages: as the user gave it, with the scheme of a URI.
        path: Where it is on its file system.
    """

    name: str
    path: str


def find_files(source: Any, base: str | Path | None = None) -> tuple[Any, list[FoundFile], str]:
    """The files that a path, list, glob or folder means, sorted within each.

    Returns:
        ``(filesystem, files, root)``: the `pyarrow.fs` file system they are on, and the folder
        there that they are all in.

    Raises:
        FileNotFoundError: There is none.
        ValueError: They are on several file systems.
    """
    items: list[Any] = [source]
    if isinstance(source, Iterable) and not isinstance(source, str | os.PathLike | Mapping):
        items = list(source)
    for item in items:
        if not isinstance(item, str | os.PathLike):
            raise TypeError(
                "files must be paths, or one table of pandas, Polars or pyarrow (got "
                f"{type(source).__name__}); make one table of it, as "
                "pyarrow.table, pandas.DataFrame and pandas.concat do"
            )
    if not items:
        raise ValueError("files must name at least one file (got an empty list)")
    filesystem: Any = None
    found: list[FoundFile] = []
    for item in items:
        said = check_text(os.fspath(item), "the path of a table")
        text = _located(said, base)
        called = shown(text if is_uri(text) else said)
        system, place = _filesystem_of(text)
        if filesystem is not None and not system.equals(filesystem):
            raise ValueError(f"the files of one table must be on one file system (got {called!r})")
        filesystem = system
        with remote_errors(text):
            paths = _expanded(system, place, called)
        found += [FoundFile(name_of(text, place, path), path) for path in paths]
    roots = {os.path.dirname(file.path) for file in found}
    root = roots.pop() if len(roots) == 1 else os.path.commonpath([*roots, next(iter(roots))])
    if len(items) == 1 and not any(mark in place for mark in "*?[") and [place] != paths:
        root = place  # the folder itself: names such as day=1 are below it
    return filesystem, found, root


def _located(text: str, base: str | Path | None) -> str:
    """A path or URI as it is seen from a folder."""
    path = text if is_uri(text) else os.path.expanduser(text)
    return path if base is None else in_folder(base, path)


def _filesystem_of(text: str) -> tuple[Any, str]:
    from pyarrow import fs

    return open_uri(text) if is_uri(text) else (fs.LocalFileSystem(), text)


def _expanded(filesystem: Any, path: str, text: str) -> list[str]:
    from pyarrow import fs

    if any(mark in path for mark in "*?[") and (
        filesystem.get_file_info(path).type == fs.FileType.NotFound
    ):
        parts = path.split("/")
        first = next(i for i, part in enumerate(parts) if set(part) & set("*?["))
        folder = "/".join(parts[:first]) or ("/" if path.startswith("/") else ".")
        is_deep = "**" in path
        recursive = is_deep or first < len(parts) - 1
        selector = fs.FileSelector(folder, recursive=recursive, allow_not_found=True)
        prefix = "" if folder == "." and not path.startswith("./") else None
        names = []
        for info in filesystem.get_file_info(selector):
            name = info.path if prefix is None else info.path.removeprefix("./")
            is_match = fnmatch.fnmatchcase(name, path) and not _is_note(name, folder)
            if is_match and (is_deep or name.count("/") == path.count("/")):
                names.append((name, info.type))
        files = sorted(name for name, kind in names if kind == fs.FileType.File)
        for name, kind in sorted(names):
            if kind == fs.FileType.Directory and not is_deep:
                files += _expanded(filesystem, name, name)
        if not files:
            raise FileNotFoundError(f"no file fits {text}; check the path")
        return files
    info = filesystem.get_file_info(path)
    if info.type == fs.FileType.NotFound:
        raise FileNotFoundError(f"there is no file or folder {text}")
    if info.type == fs.FileType.File:
        return [path]
    if info.type != fs.FileType.Directory:
        raise ValueError(f"{text} must be a regular file or a folder of them")
    inside = filesystem.get_file_info(fs.FileSelector(path, recursive=True))
    files = []
    for entry in inside:
        if entry.type == fs.FileType.File and not _is_note(entry.path, path):
            files.append(entry.path)
    if not files:
        raise FileNotFoundError(f"{text} holds no file; give a file, or a folder of files")
    return sorted(files)


def _is_note(path: str, folder: str) -> bool:
    """Whether a name below a folder is that of a note of a writer: _SUCCESS, .part-0.crc."""
    return any(name[:1] in ("_", ".") for name in os.path.relpath(path, folder).split("/"))


def _format_of(filesystem: Any, files: Sequence[FoundFile]) -> TableFormat:
    """The format of files by their endings or, where these say nothing, by how they begin."""
    formats: dict[TableFormat, str] = {}
    for found in files:
        file, path = found
        stem, ending = os.path.splitext(path.lower())
        if ending in _COMPRESSIONS:
            ending = os.path.splitext(stem)[1]
        known = _FORMATS.get(ending) or _format_of_beginning(filesystem, found)
        if known is None:
            raise ValueError(
                f"{file}: neither the ending {ending!r} nor its first bytes tell of what format it "
                "is; write CSV, Parquet, Arrow or JSON lines"
            )
        formats.setdefault(known, file)
    if len(formats) > 1:
        raise ValueError(
            f"the files of a table must be of one format (got {' and '.join(formats.values())})"
        )
    return next(iter(formats))


def _check_no_other_bytes(file: str, top: bytes, kind: str) -> None:
    """Raise if the first bytes of a file say that it is something else, whatever its ending."""
    for beginning, what, cure in _OTHER_BYTES:
        if re.match(beginning, top, re.DOTALL):
            raise ValueError(f"{file} must be {kind} (got {what}); {cure}")


def _format_of_beginning(filesystem: Any, file: FoundFile) -> TableFormat | None:
    name, path = file
    compression = _COMPRESSIONS.get(os.path.splitext(path)[1].lower())
    with filesystem.open_input_stream(path, compression=compression) as stream:
        top = stream.read(1 << 12)
    if top.startswith(b"PAR1"):
        return "parquet"
    if top.startswith(b"ARROW1"):
        return "arrow"
    _check_no_other_bytes(name, top, "a table")
    is_text = top.startswith(_UTF_16) or b"\0" not in top
    if not is_text or top.startswith((b"PK", b"\x80")):
        return None
    return "json" if top.lstrip().startswith(b"{") else "csv"


def _unified(first: Any, second: Any) -> Any:
    """One schema of two; text where one has times, as cells of some block looked like them."""
    import pyarrow

    fields = []
    for field in second:
        place = first.get_field_index(field.name)
        kinds = [field.type, first.field(place).type] if place >= 0 else []
        if any(map(pyarrow.types.is_timestamp, kinds)) and pyarrow.string() in kinds:
            first = first.set(place, field.with_type(pyarrow.string()))
            field = field.with_type(pyarrow.string())
        fields.append(field)
    return pyarrow.unify_schemas([first, pyarrow.schema(fields)], promote_options="permissive")


def _is_past_int64(table: Any, name: str) -> bool:
    """Whether a column of reals has some that are larger than any int64."""
    from pyarrow import compute, types

    if name not in table.schema.names or not types.is_floating(table.schema.field(name).type):
        return False
    largest = compute.max(table.column(name)).as_py()
    return largest is not None and largest >= 2**63


def _check_there(file: str, columns: Sequence[str], names: Sequence[str]) -> None:
    for name in columns:
        if name not in names:
            raise ValueError(f"{file}: column {name!r} is missing; it has {list(names)}")


def _unreadable(name: str, kind: str, error: Exception) -> ValueError:
    reason = " ".join(str(error).split()).rstrip(".")
    cure = "write it again"
    if isinstance(error, UnicodeDecodeError) or "UTF8" in reason:
        cure = "name its encoding, such as encoding = latin-1"
    elif "straddling" in reason:
        reason = "a row is larger than a megabyte, as where a quote is never closed"
        cure = 'close it, or say quote = "" where quotes are letters'
    elif "from object to array" in reason:
        reason = "it is one list, and not an object a line"
        cure = "write JSON lines, as pandas does by to_json(path, orient='records', lines=True)"
    elif "JSON parse error: Column(" in reason and "changed from" in reason:
        cure = "give the column values of one kind"
    elif kind == "json":
        cure = "mend the line; rows count from 0"
    return ValueError(f"{name} cannot be read as {kind}: {reason}; {cure}")


# ---------------------------------------------------------------------- what a CSV file looks like


@dataclass(frozen=True, kw_only=True)
class _Dialect:
    """How one CSV file is written.

    Args:
        skip_lines: Lines before the first row.
        spaces: Whether cells are separated by runs of spaces.
    """

    names: list[str]
    delimiter: str
    has_header: bool
    skip_lines: int
    has_quotes: bool
    comments: tuple[str, ...]
    marks: str
    spaces: bool
    encoding: str | None
    has_index: bool

    def transformed(self, stream: Any) -> Any:
        """The stream with cells separated by one character."""
        if self.marks == "::":
            return _Replaced(stream, lambda data: data.replace(b"::", _UNIT_SEPARATOR), b":")
        if self.spaces:
            return _Replaced(stream, _spaces_joined, b" \t")
        return stream


def _spaces_joined(data: bytes) -> bytes:
    data = re.sub(rb"[ \t]+", b" ", data)
    data = re.sub(rb" ?(\r?\n) ?", rb"\1", data)
    return data


class _Replaced(io.RawIOBase):
    """A stream of bytes in which something is replaced; no match spans two reads.

    Args:
        open_ends: Bytes that a match may begin or end with.
    """

    def __init__(self, stream: Any, replace: Any, open_ends: bytes) -> None:
        self._stream, self._replace, self._open_ends = stream, replace, open_ends
        self._ready, self._rest, self._is_first = b"", b"", True

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._stream.read(_BLOCK)
            if not data and not self._rest:
                return 0
            whole = self._rest + data
            # Up to the last end of line: nothing that is replaced goes beyond.
            end = whole.rfind(b"\n") + 1 if data else len(whole)
            self._rest = whole[end:]
            self._ready = self._replace(whole[:end])
            if self._is_first and self._ready:
                self._ready, self._is_first = self._ready.lstrip(b" "), False
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def _look_at(
    file: str,
    top: bytes,
    is_whole: bool,
    options: FileOptions,
    named: Sequence[str],
    names_before: list[str] | None,
) -> _Dialect | None:
    """What the first lines of a file tell; None if there is no line at all."""
    _check_no_other_bytes(file, top, "CSV")
    encoding = options.encoding
    if encoding is None and top.startswith(_UTF_16):
        encoding = "utf-16"
    try:
        text = top.decode(encoding or "utf-8-sig", "strict" if is_whole else "ignore")
        if not is_whole and encoding != "utf-16":
            top[: top.rfind(b"\n") + 1].decode(encoding or "utf-8")
    except (UnicodeDecodeError, LookupError) as error:
        raise _unreadable(file, "CSV", error) from None
    text = text.removeprefix("\ufeff")
    said = _COMMENTS if options.comment is None else (options.comment,)
    comments = tuple(mark for mark in said if mark)
    lines = text.splitlines(keepends=True)
    if not is_whole and len(lines) > 1:
        lines.pop()  # cut off
    for beginning, (what, cure) in _NO_TABLES.items():
        if text[:200].lstrip().casefold().startswith(beginning):
            raise ValueError(f"{file} must be a table (got {what}); {cure}")
    marks = options.delimiter
    first = options.skip_rows
    said_by_excel = re.match(r"sep=(.)\r?\n", text)
    if said_by_excel:
        first = max(first, 1)
        marks = marks or said_by_excel[1]
    while first < len(lines) and (
        not lines[first].strip() or (comments and lines[first].startswith(comments))
    ):
        first += 1
    is_matrix = text.casefold().startswith("%%matrixmarket matrix coordinate")
    first += is_matrix  # the sizes
    if first >= len(lines):
        return None
    sample = [line for line in lines[first:] if line.strip()][:_LINES_LOOKED_AT]
    marks = marks or _delimiter_of(sample, options.quote, named)
    cells = _cells(sample[0], marks, options.quote)
    width = len(cells)
    note = lines[first - 1].lstrip("".join(comments)).strip() if first > 0 and comments else ""
    noted = [cell.strip() for cell in _cells(note, marks, options.quote)] if note else []
    if len(noted) != width or not all(noted) or is_matrix:
        noted = []
    telling = _USUAL_NAMES | {name.casefold() for name in named}
    is_noted = _tells(noted, telling) and not _tells(cells, telling)
    has_header = options.header
    if has_header is None:
        # A small number is the place of a column that has no name.
        names_asked = {name for name in named if not (name.isdecimal() and int(name) < width)}
        has_header = not (options.columns or is_noted) and (
            bool(names_asked & {cell.strip() for cell in cells})
            or not any(_NUMBER.fullmatch(cell) for cell in cells)
        )
        if names_before is not None and not options.columns and not named:
            has_header = cells == names_before
    names = [f"column_{i}" for i in range(width)]
    if options.columns:
        names = list(options.columns)
        if len(names) != width:
            raise ValueError(
                f"{file} has {width} columns, and columns names {len(names)}: {names}; name each, "
                "or say by what cells are separated"
            )
    elif has_header:
        names = _distinct([cell.strip() for cell in cells])
    elif names_before is not None and len(names_before) == width:
        names = names_before
    elif noted:  # SNAP: the last comment has the names
        names = _distinct(noted)
    header_lines = 0
    if has_header:
        rows_of_cells = [_cells(line, marks, options.quote) for line in sample[1:]]
        if rows_of_cells and all(len(r) == width + 1 and not r[-1] for r in rows_of_cells):
            names.append(f"column_{width}")  # a delimiter ends each row, and not the header
        quote = options.quote or None
        delimiter = _UNIT_SEPARATOR.decode() if marks == "::" else marks
        rows = python_csv.reader(
            lines[first:], delimiter=delimiter, quotechar=quote, quoting=_quoting(options.quote)
        )
        next(rows)
        header_lines = rows.line_num
    is_spaced = marks == " " and any(re.search(r"^ |  |\t| \r?\n?$", line) for line in sample)
    return _Dialect(
        names=names,
        delimiter=_UNIT_SEPARATOR.decode() if marks == "::" else marks,
        has_header=has_header,
        skip_lines=first + header_lines,
        has_quotes=bool(options.quote) and options.quote in text,
        comments=comments,
        marks=marks,
        spaces=is_spaced,
        encoding=encoding,
        has_index=has_header and _is_index(cells[0], sample[1:], marks, options.quote),
    )


def _is_index(name: str, lines: Sequence[str], marks: str, quote: str) -> bool:
    """Whether the first column is the number of the row, to which pandas and R give no name."""
    if name.strip() not in ("", "Unnamed: 0"):
        return False
    first = [_cells(line, marks, quote)[0].strip() for line in lines]
    return any(first == [str(start + i) for i in range(len(first))] for start in (0, 1))


def _tells(cells: Sequence[str], names: set[str]) -> bool:
    """Whether cells are names of columns, one of them a usual one or one that is asked for."""
    return any(cell.strip().casefold() in names for cell in cells)


def _delimiter_of(sample: Sequence[str], quote: str, named: Sequence[str]) -> str:
    """What separates cells: what makes the most columns of which all lines have as many."""
    best, best_score = ",", (False, 0.0, 0)
    for marks in _DELIMITERS:
        widths = [len(_cells(line, marks, quote)) for line in sample]
        if widths[0] < 2:
            continue
        has_named = bool(set(named) & {c.strip() for c in _cells(sample[0], marks, quote)})
        agreeing = sum(width == widths[0] for width in widths) / len(widths)
        score = (has_named, agreeing if agreeing > 0.5 else 0.0, 0 if marks == " " else 1)
        if score > best_score and (agreeing > 0.5 or has_named):
            best, best_score = marks, score
    return best


def _cells(line: str, marks: str, quote: str) -> list[str]:
    line = line.rstrip("\r\n")
    if marks == "::":
        return line.split("::")
    if marks == " ":
        line = re.sub(r"[ \t]+", " ", line.strip())
    try:
        rows = python_csv.reader(
            [line], delimiter=marks, quotechar=quote or None, quoting=_quoting(quote)
        )
        return next(iter(rows), [""])
    except python_csv.Error:
        return line.split(marks)


def _quoting(quote: str) -> Any:
    return python_csv.QUOTE_MINIMAL if quote else python_csv.QUOTE_NONE


def _distinct(names: Sequence[str]) -> list[str]:
    """Names told apart as pandas does: a, a.1; and ``column_2`` for one that is empty."""
    made: list[str] = []
    for place, name in enumerate(names):
        name = name or f"column_{place}"
        candidate, number = name, 1
        while candidate in made:
            candidate, number = f"{name}.{number}", number + 1
        made.append(candidate)
    return made


# ---------------------------------------------------------------------- types


_TRUTH = {"true", "false"}


_DECIMAL_COMMA = r"^[+-]?([0-9]+|[0-9]{1,3}(\.[0-9]{3})+)(,[0-9]*)?$"
_REAL = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"
_LIST_OF_REALS = (
    rf"^\s*(\[\s*{_REAL}(\s*[,;\s]\s*{_REAL})*\s*\]|{_REAL}([,;]\s+{_REAL}|[,;]{_REAL}[,;]{_REAL})"
    rf"([,;]\s*{_REAL})*)\s*$"
)
_WORD = r"""('[^'\\]*'|"[^"\\]*")"""
_LIST_OF_WORDS = rf"^\s*\[\s*({_WORD}(\s*,\s*{_WORD})*\s*)?\]\s*$"
_LIST_OF_WHOLE = r"^\s*\[\s*([+-]?[0-9]+(\s*,\s*[+-]?[0-9]+)*\s*)?\]\s*$"
_THOUSANDS = r"^\s*[+-]?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]*)?\s*$"


def typed_column(values: Any, kept: KeptColumns, has_decimal_comma: bool = False) -> Any:
    """A column of text with the type that all of its cells have.

    Whole numbers, then reals, true and false, dates and times, lists of reals of one length
    (``[0.1, 0.2]``, ``0.1, 0.2`` or ``1,2,3``), lists of words or of whole numbers as Python and
    JSON write them (``['a', 'b']``, ``[3, 14]``), and text where none of these fits.

    Args:
        values: A pyarrow ``ChunkedArray`` of strings.
        kept: Where the cells are put away as soon as they have their type.
        has_decimal_comma: Whether 1,5 is a number, too, and 1.234,5: as where cells are separated
            by semicolons.
    """
    import pyarrow
    from pyarrow import compute

    if values.null_count == len(values):
        return pyarrow.chunked_array([pyarrow.nulls(len(values))])
    sample = values.slice(0, 1000).drop_null()

    def cast(kind: Any, prepared: Any = None) -> Any:
        """The column in a type; None where a cell has another."""

        def in_type(cells: Any) -> Any:
            return (cells if prepared is None else prepared(cells)).cast(kind)

        try:
            in_type(sample)
            pieces = [kept.put(in_type(chunk)) for chunk in values.chunks]
        except pyarrow.ArrowInvalid:
            return None
        return kept.column(pieces, kind)

    for kind in (pyarrow.int64(), pyarrow.uint64(), pyarrow.float64()):
        for prepared in (None, compute.utf8_trim_whitespace):
            if (typed := cast(kind, prepared)) is not None:
                return typed
    words = compute.unique(compute.utf8_lower(sample)).to_pylist()
    if words and set(words) <= _TRUTH and (typed := cast(pyarrow.bool_())) is not None:
        everything: set[str] = set()
        for chunk in values.chunks:
            everything |= set(compute.unique(compute.utf8_lower(chunk.drop_null())).to_pylist())
        if everything <= _TRUTH:
            return typed
    cells = [sample, *values.chunks]
    if has_decimal_comma and all(_all_match(part, _DECIMAL_COMMA) for part in cells):
        return cast(pyarrow.float64(), _with_point)
    times = [pyarrow.date32()]
    times += [pyarrow.timestamp(unit, zone) for unit in ("ns", "us") for zone in (None, "UTC")]
    for kind in times:
        if (typed := cast(kind)) is not None:
            return typed
    if _are_lists(cells):
        return cast(pyarrow.list_(pyarrow.float64()), _cut_lists)
    for pattern, kind, cut in (
        (_LIST_OF_WORDS, pyarrow.string(), _cut_words),
        (_LIST_OF_WHOLE, pyarrow.int64(), _cut_whole),
    ):
        if all(_all_match(part, pattern) for part in cells) and any(
            compute.any(compute.match_substring_regex(part, r"[^\s\[\]]")).as_py() for part in cells
        ):
            return cast(pyarrow.list_(kind), cut)
    return values


def _all_match(values: Any, pattern: str) -> bool:
    from pyarrow import compute

    does_match = compute.match_substring_regex(values, pattern)
    return bool(compute.all(does_match, min_count=0).as_py())


def _with_point(cells: Any) -> Any:
    """Numbers such as 1.234,5 as 1234.5."""
    from pyarrow import compute

    return compute.replace_substring(compute.replace_substring(cells, ".", ""), ",", ".")


def _cut_lists(cells: Any) -> Any:
    """Cells such as [0.1, 0.2] as lists of text."""
    from pyarrow import compute

    bare = compute.utf8_trim(cells, " \t\r\n[]")
    return compute.split_pattern_regex(bare, r"\s*[,;\s]\s*")


def _cut_words(cells: Any) -> Any:
    """Cells such as ['a', 'b'] as lists of text."""
    return _cut_at(cells, r"""['"]\s*,\s*['"]""", "'\"")


def _cut_whole(cells: Any) -> Any:
    """Cells such as [3, 14] as lists of text."""
    return _cut_at(cells, r"\s*,\s*", "")


def _cut_at(cells: Any, pattern: str, quotes: str) -> Any:
    """Cells in brackets as lists of text; those without anything in them as empty ones."""
    import pyarrow
    from pyarrow import compute

    bare = compute.utf8_trim(cells, " \t\r\n[]")
    is_empty = compute.equal(bare, "")
    if quotes:
        bare = compute.utf8_slice_codeunits(bare, 1, -1)
    lists = compute.split_pattern_regex(bare, pattern)
    none = pyarrow.scalar([], lists.type)
    return compute.if_else(is_empty, none, lists)


def _are_lists(parts: Sequence[Any]) -> bool:
    """Whether all cells are lists of reals of one length, and not numbers such as 1,234."""
    from pyarrow import compute

    lengths: set[int] = set()
    for cells in parts:
        if not _all_match(cells, _LIST_OF_REALS):
            return False
        of_cells = compute.unique(compute.list_value_length(_cut_lists(cells)).drop_null())
        lengths |= set(of_cells.to_pylist())
        if len(lengths) > 1:
            return False
    return bool(lengths) and not all(_all_match(cells, _THOUSANDS) for cells in parts)


def options_of(values: Mapping[str, Any]) -> FileOptions:
    """Options from TOML, in which lists stand for tuples."""
    made: dict[str, Any] = {}
    for key, value in values.items():
        made[key] = tuple(value) if isinstance(value, list) else value
    return FileOptions(**made)
