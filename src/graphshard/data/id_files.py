# SPDX-License-Identifier: Apache-2.0
"""The ids by which users name nodes, beside the parts of a partition that was made from tables.

::

    part0/ids-0.arrow        Arrow IPC file: the column "id" of the part's own nodes of node type 0,
    part0/ids-1.arrow        in their order, in the type that the user's table had
    NAME.dataset.json        "id_files": each file's size and BLAKE2b digest

They are written behind the parts and before the description of the task that lists them, which
names the build of the partition: so what is half written belongs to nothing.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from .._base.files import check_regular, sync_folder
from ..errors import PartitionFormatError
from ..partition.checked_files import mapping, text, whole_number
from ..partition.format import PartitionConfig, read_config
from ..partition.load import load_partition_feats
from ._table_files import FileOptions, TableSource
from .task import read_task_content, task_path

COLUMN = "id"


def write_id_files(
    partition_json: str | os.PathLike[str], ids: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Write the ids of the nodes of each part beside it.

    Args:
        ids: Node type to a pyarrow array, by the number of a node in the graph that was
            partitioned.

    Returns:
        Path of each file, relative to the JSON, to its size and digest.
    """
    import pyarrow
    from pyarrow import ipc

    config = read_config(partition_json)
    folder = config.path.parent
    written: dict[str, dict[str, Any]] = {}
    for part in range(config.num_parts):
        features, _ = load_partition_feats(config.path, part, load_edges=False)
        assert features is not None
        inside = _folder_of(config, part)
        for ntype, array in ids.items():
            numbers = pyarrow.array(features[f"{ntype}/orig_id"].numpy())
            table = pyarrow.table({COLUMN: array.take(numbers)})
            name = f"{inside}/ids-{config.ntypes[ntype]}.arrow"
            with ipc.new_file(os.fspath(folder / name), table.schema) as writer:
                writer.write_table(table, max_chunksize=1 << 20)
            written[name] = _described(folder / name)
        sync_folder(folder / inside)
    return written


def user_ids(partition_json: str | os.PathLike[str], part: int) -> dict[str, Any]:
    """The ids by which the user named the nodes of a part.

    Returns:
        Node type to a pyarrow array in the type that the user's table had, in the order of the
        part's own nodes. Empty where the partition was not made from tables.

    Raises:
        PartitionFormatError: A file is missing or damaged, or belongs to another partition.
        ValueError: There is no such part.
    """
    import pyarrow
    from pyarrow import ipc

    config = read_config(partition_json)
    book = config.book(part)
    files = id_files(partition_json, config)
    found = {}
    for ntype, number in config.ntypes.items():
        name = f"{_folder_of(config, part)}/ids-{number}.arrow"
        if name not in files:
            continue
        path = config.path.parent / name
        check_id_file(path, files[name])
        try:
            with pyarrow.memory_map(os.fspath(path)) as file:
                column = ipc.open_file(file).read_all().column(COLUMN)
            ids = column.combine_chunks()
            if isinstance(ids, pyarrow.ChunkedArray):
                ids = ids.chunk(0) if ids.num_chunks else pyarrow.array([], ids.type)
            ids.validate(full=True)
        except (pyarrow.ArrowException, KeyError, OSError) as error:
            raise _damaged(path, str(error)) from None
        count = book.partid2nids(part, ntype).numel()
        if len(ids) != count:
            raise _damaged(path, f"it has {len(ids)} ids for {count} nodes")
        found[ntype] = ids
    return found


def read_id_table(path: str | Path, columns: Sequence[str]) -> Any:
    """A table of ids that a user wrote, of any format that tables of nodes may have.

    Args:
        columns: Names that tell which line of CSV is a header.

    Returns:
        A pyarrow ``Table`` of all columns; cells of CSV are text, and none is missing.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It cannot be read.
    """
    import pyarrow

    source = TableSource(path, FileOptions(null_values=()), named=columns)
    batches = [batch.columns for batch in source.batches(source.schema.names)]
    source.check_cells("put ids with such letters in quotes")
    return pyarrow.Table.from_batches(batches, None if batches else source.schema)


def id_files(
    partition_json: str | os.PathLike[str], config: PartitionConfig | None = None
) -> dict[str, Mapping[str, Any]]:
    """Files of ids of a partition, relative to its JSON, to their sizes and digests.

    Raises:
        PartitionFormatError: The description of the task is damaged.
    """
    content = read_task_content(partition_json)
    if content is None:
        return {}
    config = read_config(partition_json) if config is None else config
    inside = {_folder_of(config, part) for part in range(config.num_parts)}
    try:
        files = mapping(content.get("id_files", {}), "id_files")
        for name, record in files.items():
            path = PurePosixPath(name)
            if str(path.parent) not in inside or not path.name.startswith("ids-"):
                raise ValueError(f"{name!r} is no file of ids of a part")
            whole_number(mapping(record, name).get("bytes"), "bytes")
            text(record.get("blake2b"), "blake2b")
    except ValueError as error:
        raise _damaged(task_path(partition_json), str(error)) from None
    return files


def copy_id_files(
    source: str | os.PathLike[str], target: str | os.PathLike[str]
) -> dict[str, dict[str, Any]]:
    """Copy the files of ids to a partition of the same nodes in the same order.

    Returns:
        As `write_id_files`.
    """
    of_source, of_target = read_config(source), read_config(target)
    written = {}
    for name, record in id_files(source, of_source).items():
        for part in range(of_source.num_parts):
            folder = _folder_of(of_source, part)
            if str(PurePosixPath(name).parent) != folder:
                continue
            path = of_source.path.parent / name
            check_id_file(path, record)
            new_name = f"{_folder_of(of_target, part)}/{PurePosixPath(name).name}"
            shutil.copyfile(path, of_target.path.parent / new_name)
            written[new_name] = dict(record)
    return written


def check_id_file(path: Path, record: Mapping[str, Any]) -> None:
    """Raise a PartitionFormatError unless a file is the one that was written."""
    try:
        check_regular(path)
        described = _described(path)
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from None
    if described != dict(record):
        raise _damaged(path, "its size or digest differs from what was written")


def _folder_of(config: PartitionConfig, part: int) -> str:
    return str(PurePosixPath(config.files[part]["part_graph"].name).parent)


def _described(path: Path) -> dict[str, Any]:
    digest = hashlib.blake2b(digest_size=16)
    size = 0
    with open(path, "rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
            size += len(data)
    return {"bytes": size, "blake2b": digest.hexdigest()}


def _damaged(path: Path, why: str) -> PartitionFormatError:
    return PartitionFormatError(
        f"{path} does not hold the ids of the part's nodes ({why}); copy the partition again, or "
        "partition the tables again"
    )
