# SPDX-License-Identifier: Apache-2.0
"""Files of predictions: written by all ranks, merged by rank 0; and files of ids that are read.

`write_merged` writes one file in the order of numbers that rows have, whichever rank has them.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .._base.files import TemporaryFolder, check_path, sync_folder, writing
from ..comm import rank, world_size
from ..comm.collectives import shared_errors, text_of_rank_0
from ..data.id_files import read_id_table
from ..data.remote_files import read_file, shown, without_options

if TYPE_CHECKING:
    import pyarrow as pa

ROW = "graphshard row"
"""The column of numbers by which files are merged, which the result has not."""

_GROUP_ROWS = 1 << 17
_LINES = ("", ".txt", ".ids", ".list")
"""Endings of files with an id a line."""

_WITH_NAMES = {".parquet", ".arrow", ".feather", ".json", ".jsonl", ".ndjson"}


def read_ids(path: str, id_type: pa.DataType) -> tuple[pa.Array, bool]:
    """The distinct ids in a file, in the type that the graph's ids have.

    Returns:
        The ids, and whether the first of them may be the name of the column instead.

    Raises:
        ValueError: The file is no table with such a column, or a value is no such id.
    """
    import pyarrow as pa

    if without_options(path).suffix.lower() not in _LINES:
        table = read_id_table(path, ["id"])
        name = "id" if "id" in table.column_names else table.column_names[0]
        if name != "id" and len(table.column_names) > 1:
            raise ValueError(
                f"{shown(path)} must have a column 'id', or one column (got "
                f"{', '.join(table.column_names[:5])}); rename the column with the ids"
            )
        column = table.column(name)
        if name != "id" and _may_lack_names(path):
            with contextlib.suppress(ValueError):
                first = _as_ids(path, pa.chunked_array([pa.array([name])]), id_type)
                ids = _as_ids(path, column, id_type)
                return _distinct(pa.chunked_array([*first.chunks, *ids.chunks], id_type)), True
    else:
        lines = read_file(path).decode("utf-8-sig").splitlines()
        texts = pa.array([line for line in lines if line.strip()], pa.string())
        column = pa.chunked_array([texts])
    return _distinct(_as_ids(path, column, id_type)), False


def _may_lack_names(path: str) -> bool:
    """Whether a table may have rows alone, and no line with the names of columns."""
    return not {s.lower() for s in without_options(path).suffixes} & _WITH_NAMES


def read_columns(
    path: str, names: Sequence[str], types: Sequence[pa.DataType]
) -> tuple[pa.Table, bool]:
    """Some columns of a table, by name, or if it has not these names the first ones.

    Returns:
        The columns, and whether the first row may be the names of columns instead.

    Raises:
        ValueError: There are fewer columns, or values are not of these types.
    """
    import pyarrow as pa

    table, may_be_names = read_id_table(path, names), False
    if not set(names) <= set(table.column_names):
        if len(table.column_names) < len(names):
            raise ValueError(
                f"{shown(path)} must have the columns {', '.join(names)} (got "
                f"{', '.join(table.column_names[:5])})"
            )
        table = table.select(range(len(names)))
        may_be_names = _may_lack_names(path)
        if may_be_names:
            first = [pa.chunked_array([pa.array([name])]) for name in table.column_names]
            try:
                firsts = [_as_ids(path, n, t) for n, t in zip(first, types, strict=True)]
            except ValueError:  # names, as ids have another type
                may_be_names = False
        table = table.rename_columns(list(names))
    columns = [_as_ids(path, table.column(n), t) for n, t in zip(names, types, strict=True)]
    if may_be_names:
        columns = [
            pa.chunked_array([*first.chunks, *column.chunks])
            for first, column in zip(firsts, columns, strict=True)
        ]
    return pa.table(columns, names=list(names)), may_be_names


def _as_ids(path: str, column: pa.ChunkedArray, id_type: pa.DataType) -> pa.ChunkedArray:
    import pyarrow as pa

    try:
        if column.null_count:
            raise pa.ArrowInvalid(f"{column.null_count} are missing")
        if column.type == id_type:
            return column
        if isinstance(column.type, pa.BaseExtensionType):  # such as UUIDs
            column = pa.chunked_array([pa.array(map(str, column.to_pylist()), pa.string())])
        if not isinstance(id_type, pa.BaseExtensionType):
            return column.cast(id_type)
        is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
        if is_text and id_type.storage_type == pa.binary(16):
            column = pa.chunked_array([_uuids_of_text(column)])
        stored = column.cast(id_type.storage_type)
        return pa.chunked_array([id_type.wrap_array(chunk) for chunk in stored.chunks], id_type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ValueError(
            f"{shown(path)} must have ids of type {id_type}, as the graph has (got {column.type}: "
            f"{error})"
        ) from None


def _uuids_of_text(column: pa.ChunkedArray) -> pa.Array:
    """Bytes of UUIDs that are written as text, as the CSV of predictions has them."""
    import pyarrow as pa

    values = []
    for text in column.to_pylist():
        try:
            values.append(uuid.UUID(text).bytes)
        except ValueError:
            raise pa.ArrowInvalid(f"{text!r} is no UUID") from None
    return pa.array(values, pa.binary())


def plain_ids(ids: pa.Array) -> pa.Array:
    """The same to be looked up: what a type of its own, such as UUIDs, stores."""
    import pyarrow as pa

    return ids.storage if isinstance(ids, pa.ExtensionArray) else ids


def _distinct(ids: pa.ChunkedArray) -> pa.Array:
    """Each id once, in the order in which they first come."""
    import pyarrow as pa

    if not isinstance(ids.type, pa.BaseExtensionType):
        return ids.unique()
    stored = pa.chunked_array([chunk.storage for chunk in ids.chunks], ids.type.storage_type)
    return ids.type.wrap_array(stored.unique())


def write_merged(batches: Iterator[pa.RecordBatch], schema: pa.Schema, out: Path) -> None:
    """Write the rows of all ranks to one file, in the order of their numbers; collective.

    Each rank writes its batches, in which the numbers ascend, to a file beside ``out``; rank 0
    merges these. Nothing is left of them in the end, whatever happens.

    Args:
        batches: This rank's; with a column of numbers, which the file does not get.

    Raises:
        OSError: A rank could not write, or does not see the folder of rank 0; on every rank.
    """
    import pyarrow as pa

    folder: TemporaryFolder | None = None
    try:
        with shared_errors():
            if rank() == 0:
                check_path(out)
                if out.is_dir():
                    raise IsADirectoryError(f"{out} is a folder; name a file in it")
                out.parent.mkdir(parents=True, exist_ok=True)
                folder = TemporaryFolder(out.parent)
        parts = Path(text_of_rank_0("" if folder is None else str(folder.path.absolute())))
        with shared_errors():
            if not parts.is_dir():
                raise OSError(
                    f"{parts.parent}, where rank 0 writes, is not there for rank {rank()}; write "
                    "to a folder that all hosts share"
                )
            path = parts / f"part-{rank()}.arrow"
            with (
                writing(path),
                pa.OSFile(str(path), "wb") as sink,
                pa.ipc.new_file(sink, schema) as writer,
            ):
                for batch in batches:
                    writer.write_batch(batch)
        with shared_errors():
            if rank() == 0:
                paths = [parts / f"part-{number}.arrow" for number in range(world_size())]
                whole = parts / f"whole{''.join(out.suffixes[-2:])}"
                with writing(out):
                    writer_of(out)(whole, merged(paths), schema.remove(schema.get_field_index(ROW)))
                    with open(whole, "rb+") as file:
                        os.fsync(file.fileno())
                os.replace(whole, out)
                sync_folder(out.parent)
    finally:
        if folder is not None:
            folder.cleanup()


def merged(paths: Sequence[Path]) -> Iterator[pa.Table]:
    """The rows of several files in the order of their numbers, without these; some at a time."""
    import pyarrow as pa

    with contextlib.ExitStack() as stack:
        streams = []
        for path in paths:
            reader = pa.ipc.open_file(stack.enter_context(pa.memory_map(str(path))))
            streams.append(map(reader.get_batch, range(reader.num_record_batches)))
        heads = [next(stream, None) for stream in streams]
        pending: list[pa.Table] = []
        while any(head is not None for head in heads):
            # No later batch of a stream has a number below the last one of its head.
            bound = min(head[ROW][-1].as_py() for head in heads if head is not None)
            pieces = []
            for number, head in enumerate(heads):
                if head is None:
                    continue
                count = int(np.searchsorted(head[ROW].to_numpy(), bound, side="right"))
                pieces.append(head.slice(0, count))
                rest = head.slice(count)
                heads[number] = rest if rest.num_rows else next(streams[number], None)
            table = pa.Table.from_batches(pieces)
            pending.append(table.sort_by(ROW).drop_columns([ROW]))
            if sum(table.num_rows for table in pending) >= _GROUP_ROWS:
                yield pa.concat_tables(pending)
                pending = []
        if pending:
            yield pa.concat_tables(pending)


def writer_of(path: Path) -> Callable[[Path, Iterator[Any], Any], None]:
    """What writes a file of this ending."""
    name = path.name.lower()
    if name.endswith(".parquet"):
        return _write_parquet
    if name.endswith((".csv", ".csv.gz")):
        return _write_csv
    raise ValueError(f"out must end in .parquet, .csv or .csv.gz (got {str(path)!r})")


def _write_parquet(path: Path, tables: Iterator[pa.Table], schema: pa.Schema) -> None:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for table in tables:
            writer.write_table(table)


def _write_csv(path: Path, tables: Iterator[pa.Table], schema: pa.Schema) -> None:
    import pyarrow as pa
    import pyarrow.csv

    texts = {field.name: _text_of(field.type) for field in schema}
    fields = [f if texts[f.name] is None else pa.field(f.name, pa.string()) for f in schema]
    flat = pa.schema(fields)
    compression = "gzip" if path.name.lower().endswith(".gz") else None
    with (
        pa.output_stream(str(path), compression=compression) as sink,
        pyarrow.csv.CSVWriter(sink, flat) as writer,
    ):
        for table in tables:
            columns = [
                column if text is None else pa.array(map(text, column.to_pylist()), pa.string())
                for column, text in zip(table.columns, texts.values(), strict=True)
            ]
            writer.write_table(pa.table(columns, schema=flat))


def _text_of(kind: pa.DataType) -> Callable[[Any], str] | None:
    """What makes the text of a cell of a type that CSV has no cells for."""
    import pyarrow as pa

    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        return json.dumps
    if isinstance(kind, pa.BaseExtensionType):  # such as UUIDs
        return str
    is_bytes = pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary
    if any(is_kind(kind) for is_kind in is_bytes):
        return _text_of_bytes
    return None


def _text_of_bytes(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise ValueError(
            f"a CSV cannot hold ids that are bytes and no text (got {value!r}); let out end in "
            ".parquet"
        ) from None
