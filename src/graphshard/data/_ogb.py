# SPDX-License-Identifier: Apache-2.0
"""OGB's node property prediction data sets, read from the files that OGB publishes.

The ``ogb`` package keeps what it has read as a pickle, so it is asked only to download. Read here
are the compressed CSV files (for the largest data set, plain ``.npz`` arrays) under ``raw`` and
``split``::

    ROOT/ogbn_arxiv/
        raw/edge.csv.gz  num-node-list.csv.gz  node-feat.csv.gz  node-label.csv.gz
        raw/node_year.csv.gz  edge-feat.csv.gz               more fields of nodes and edges
        split/time/train.csv.gz  valid.csv.gz  test.csv.gz   node ids
    ROOT/ogbn_papers100M/
        raw/data.npz  node-label.npz
    ROOT/ogbn_mag/
        raw/num-node-dict.csv.gz  triplet-type-list.csv.gz
        raw/relations/author___writes___paper/edge.csv.gz  edge_reltype.csv.gz
        raw/node-feat/paper/node-feat.csv.gz  node_year.csv.gz
        raw/node-label/paper/node-label.csv.gz
        split/time/paper/train.csv.gz
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .._base.files import open_regular
from .._base.typing import DEFAULT_CANONICAL_ETYPE, DEFAULT_NTYPE, CanonicalEType
from ..graph.convert import require
from ._array_graph import (
    ArrayGraph,
    Arrays,
    EndArrays,
    FieldArrays,
    check_ends,
    check_node_count,
)
from ._folder import FILE_NAMES, edges_of_array
from ._table_files import FileOptions, TableSource
from .dataset import DatasetArrays, NodeDataset
from .npy import is_there, plain_numbers, read_npz

_UNDIRECTED = ("ogbn-proteins", "ogbn-products")
"""Data sets whose files hold each edge once: OGB gives each its reverse, right behind it."""

_MAX_TEXT = 1 << 20
"""Bytes of a table of type names; the real ones have some hundred."""

_SPLIT_NAMES = ("time", "sales_ranking", "species")
_OPTIONS = FileOptions(format="csv", delimiter=",", header=False, comment="", quote="")
_ROWS_AT_ONCE = 1 << 16
_NO_FIELDS = ("node-label", "node-feat-indices")
"""Files that are named as fields are: labels, and what a list of features is of."""


def from_ogb(
    name: str, root: str | os.PathLike[str] = "dataset", idtype: torch.dtype = torch.int64
) -> NodeDataset:
    """Read an OGB node data set; download it first if ``root`` does not have it.

    Edges have the ids that OGB gives them. ``node-feat`` becomes ``feat``, ``node-label`` becomes
    ``label``, [num_nodes] int64 with -1 where unknown, or [num_nodes, num_tasks] of several tasks.
    Other fields keep their names. Reals of feature matrices are float32, as OGB gives them; those
    of other fields float64.

    Args:
        name: Such as ``'ogbn-arxiv'``.
        root: Folder that holds, or is to hold, ``ogbn_arxiv``.
        idtype: int32 or int64.

    Returns:
        The data set, on CPU.

    Raises:
        ImportError: The files are not there, and neither is ``ogb`` to download them (the extra
            ``graphshard[ogb]``).
        ValueError: ``name`` is no node data set of OGB, or a file does not fit the layout.

    Example:
        >>> arxiv = from_ogb('ogbn-arxiv', root='downloads')  # doctest: +SKIP
    """
    return read_ogb_arrays(name, root, Arrays()).dataset(idtype)


def ogb_name(folder: Path) -> str | None:
    """The name of the data set whose files a folder has; None if it has none of OGB's."""
    has_raw = (folder / "raw").is_dir()
    if has_raw and ((folder / "split").is_dir() or folder.name.startswith("ogbn")):
        return folder.name.replace("_", "-")
    return None


def read_ogb_arrays(name: str, root: str | os.PathLike[str], arrays: Arrays) -> DatasetArrays:
    """Read a data set as `from_ogb` does.

    Args:
        arrays: Where what has a row for each node or edge is. On disk, nothing of it is ever whole
            in memory.
    """
    if not name.startswith("ogbn-"):
        raise ValueError(f"name must be a node data set of OGB such as 'ogbn-arxiv' (got {name!r})")
    folder = Path(root) / name.replace("-", "_")
    if not (folder / "raw").is_dir():
        _download(name, folder)
    return read_ogb_folder(name, folder, arrays)


def read_ogb_folder(name: str, folder: Path, arrays: Arrays) -> DatasetArrays:
    """Read what a folder of OGB's layout has; as `read_ogb_arrays`, and the name may be any."""
    try:
        return _read(name, folder, arrays)
    except (ValueError, TypeError, KeyError, IndexError) as error:
        text = str(error)
        if str(folder) in text:
            raise
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(
            f"{folder} is damaged or not laid out as OGB's {name} ({kind}{text}); download it again"
        ) from error


def _read(name: str, folder: Path, arrays: Arrays) -> DatasetArrays:
    raw = folder / "raw"
    if is_there(raw / "triplet-type-list.csv.gz"):
        content, target = _read_typed(raw, arrays)
    elif is_there(raw / "data.npz"):
        content, target = _read_npz(raw, arrays), DEFAULT_NTYPE
    else:
        content, target = _read_csv(raw, name in _UNDIRECTED, arrays), DEFAULT_NTYPE
    check_ends(content, raw)
    fields = content.nodes[target]
    for split, mask in _read_masks(folder, target, content.num_nodes[target], arrays).items():
        fields[f"{split}_mask"] = mask
    label = fields["label"]
    num_classes = label.shape[1] if label.ndim > 1 else arrays.largest(label, -1) + 1
    arrays.release(label)
    return DatasetArrays(name=name, content=content, num_classes=num_classes, target=target)


def _download(name: str, folder: Path) -> None:
    ogb = require("ogb.nodeproppred", "graphshard[ogb]", f"{name}, which is not in {folder},")
    ogb.NodePropPredDataset(name=name, root=str(folder.parent))
    if not (folder / "raw").is_dir():
        raise ValueError(f"ogb was asked to download {name} but left no {folder / 'raw'}")


def _plain_graph(
    arrays: Arrays, num_nodes: int, ends: EndArrays, nodes: FieldArrays, edges: FieldArrays
) -> ArrayGraph:
    return ArrayGraph(
        arrays=arrays,
        num_nodes={DEFAULT_NTYPE: num_nodes},
        ends={DEFAULT_CANONICAL_ETYPE: ends},
        nodes={DEFAULT_NTYPE: nodes},
        edges={DEFAULT_CANONICAL_ETYPE: edges},
    )


def _read_csv(raw: Path, twice: bool, arrays: Arrays) -> ArrayGraph:
    num_nodes = int(_table(raw / "num-node-list.csv.gz")[0, 0])
    ends = _edges(raw / "edge.csv.gz", arrays, twice)
    num_edges = len(ends[0])
    check_node_count(raw, "_N", num_nodes, 2 * num_edges)
    nodes = _fields(raw, "node[-_]*", arrays, num_nodes)
    nodes |= _fields(raw, "species", arrays, num_nodes)
    if is_there(raw / "node-label.csv.gz"):
        table = _table(raw / "node-label.csv.gz", np.float32, arrays, num_nodes)
        nodes["label"] = _labels(table, arrays)
    edges = _fields(raw, "edge[-_]*", arrays, num_edges, repeats=2 if twice else 1)
    return _plain_graph(arrays, num_nodes, ends, nodes, edges)


def _read_npz(raw: Path, arrays: Arrays) -> ArrayGraph:
    path = raw / "data.npz"
    new_path = None if arrays.folder is None else arrays.new_path
    found = read_npz(path, lambda field: field.startswith(("node_", "edge_", "num_")), new_path)
    ends = edges_of_array(path, found.pop("edge_index"), arrays)
    num_nodes = int(found["num_nodes_list"][0])
    check_node_count(raw, "_N", num_nodes, 2 * len(ends[0]))
    nodes: FieldArrays = {}
    edges: FieldArrays = {}
    for field, array in found.items():
        if field.startswith("num_"):
            continue
        kind = "i" if array.dtype.kind in "iu" else "f"
        values = _values(plain_numbers(path, array, kind), field)
        count, owner = (num_nodes, nodes) if field.startswith("node_") else (len(ends[0]), edges)
        _check_rows(path, field, len(values), count)
        owner[_field_name(field)] = values
    path = raw / "node-label.npz"
    label = read_npz(path, lambda field: field == "node_label", new_path)["node_label"]
    _check_rows(path, "label", len(label), num_nodes)
    nodes["label"] = _labels(plain_numbers(path, label, "f"), arrays)
    return _plain_graph(arrays, num_nodes, ends, nodes, edges)


def _read_typed(raw: Path, arrays: Arrays) -> tuple[ArrayGraph, str]:
    names, counts = _text_table(raw / "num-node-dict.csv.gz")
    num_nodes = {name: int(count) for name, count in zip(names, counts, strict=True)}
    etypes = [(s, relation, d) for s, relation, d in _text_table(raw / "triplet-type-list.csv.gz")]
    folders = {etype: raw / "relations" / "___".join(etype) for etype in etypes}
    ends: dict[CanonicalEType, EndArrays] = {
        etype: _edges(folders[etype] / "edge.csv.gz", arrays) for etype in etypes
    }
    for ntype, count in num_nodes.items():
        of_type = [pair[i] for e, pair in ends.items() for i in (0, 1) if e[2 * i] == ntype]
        check_node_count(raw, ntype, count, sum(map(len, of_type)))
    edges = {
        etype: _fields(folder, "edge[-_]*", arrays, len(ends[etype][0]))
        for etype, folder in folders.items()
    }
    nodes = {
        ntype: _fields(raw / "node-feat" / ntype, "node[-_]*", arrays, count)
        for ntype, count in num_nodes.items()
    }
    labelled = sorted((raw / "node-label").glob("*/node-label.csv.gz"))
    if len(labelled) != 1:
        raise ValueError(f"{raw / 'node-label'} must label one node type (it has {labelled})")
    target = labelled[0].parent.name
    table = _table(labelled[0], np.float32, arrays, num_nodes[target])
    nodes[target]["label"] = _labels(table, arrays)
    content = ArrayGraph(arrays=arrays, num_nodes=num_nodes, ends=ends, nodes=nodes, edges=edges)
    return content, target


def _read_masks(folder: Path, target: str, num_nodes: int, arrays: Arrays) -> dict[str, np.ndarray]:
    there = [path for name in _SPLIT_NAMES if (path := folder / "split" / name).is_dir()]
    if len(there) != 1:
        raise ValueError(f"{folder / 'split'} must hold one of the splits {_SPLIT_NAMES}")
    base = there[0] / target if (there[0] / target).is_dir() else there[0]
    masks = {}
    for split, in_file in FILE_NAMES.items():
        path = base / f"{in_file}.csv.gz"
        source, mask = _source(path), arrays.zeros(num_nodes, bool)
        for batch in source.batches(source.schema.names, _ROWS_AT_ONCE):
            ids = _numbers(path, batch.columns, np.float32)[:, 0]
            if ids.dtype.kind not in "iu":
                raise ValueError(f"split must hold node ids (got {ids.dtype})")
            mask[ids] = True
            arrays.release(mask)
        source.check_cells("download it again")
        masks[split] = mask
    return masks


def _fields(
    folder: Path, pattern: str, arrays: Arrays, num_rows: int, repeats: int = 1
) -> FieldArrays:
    """Fields of nodes or edges: features in float32, as OGB has them, others as they are.

    Args:
        num_rows: Nodes or edges.
        repeats: How many edges each row is of.
    """
    fields = {}
    for path in sorted(folder.glob(f"{pattern}.csv.gz")):
        field = path.name.removesuffix(".csv.gz")
        if field not in _NO_FIELDS and field != "edge":
            real = np.float32 if "feat" in field else np.float64
            values = _table(path, real, arrays, num_rows // repeats, repeats)
            fields[_field_name(field)] = _values(values, field)
    return fields


def _table(
    path: Path,
    real: type[np.floating[Any]] = np.float32,
    arrays: Arrays | None = None,
    num_rows: int | None = None,
    repeats: int = 1,
) -> np.ndarray:
    """[num_rows, num_columns] numbers of a CSV file without header: int64, or some ``real``.

    Args:
        arrays: Where they go; None: to memory.
        num_rows: How many there must be; None: it is not known, and all go to memory.
        repeats: How often each row is there, one behind the other.
    """
    source = _source(path)
    if num_rows is None:
        blocks = [
            _numbers(path, batch.columns, real) for batch in source.batches(source.schema.names)
        ]
        source.check_cells("download it again")
        blocks = blocks or [np.zeros((0, len(source.schema.names)), np.int64)]
        return np.concatenate(blocks).astype(_common_dtype(blocks, real), copy=False)
    assert arrays is not None
    made, done = arrays.empty((num_rows * repeats, len(source.schema.names)), np.int64), 0
    for batch in source.batches(source.schema.names, _ROWS_AT_ONCE):
        block = np.repeat(_numbers(path, batch.columns, real), repeats, axis=0)
        if block.dtype != made.dtype and made.dtype == np.int64:  # the first that is not whole
            whole, made = made, arrays.empty(made.shape, real)
            made[:done] = whole[:done]
        _check_rows(path, "", min(done + len(block), len(made) + 1), done + len(block))
        made[done : done + len(block)] = block
        done += len(block)
        arrays.release(made)
    source.check_cells("download it again")
    _check_rows(path, "", done // repeats, num_rows)
    return made


def _source(path: Path) -> TableSource:
    if not is_there(path):
        raise ValueError(f"{path} is missing from this OGB data set; download it again")
    try:
        return TableSource(path, _OPTIONS)
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path} cannot be read ({error}); download the data set again") from error


def _numbers(path: Path, cells: Any, real: type[np.floating[Any]]) -> np.ndarray:
    """Rows of text as numbers: int64 if all of them are whole, else reals."""
    import pyarrow

    for kind in (pyarrow.int64(), pyarrow.float64()):
        try:
            columns = [column.cast(kind) for column in cells.columns]
        except pyarrow.ArrowInvalid:
            continue
        if kind == pyarrow.int64() and any(column.null_count for column in columns):
            continue
        made = np.empty((len(cells), len(columns)), np.int64 if kind == pyarrow.int64() else real)
        for place, column in enumerate(columns):
            made[:, place] = column.to_numpy(zero_copy_only=False)
        return made
    raise ValueError(f"{path} must hold numbers (got {[str(c[0]) for c in cells.columns[:4]]}...)")


def _common_dtype(blocks: list[np.ndarray], real: type[np.floating[Any]]) -> Any:
    return np.int64 if all(block.dtype == np.int64 for block in blocks) else real


def _check_rows(path: Path, field: str, num_rows: int, expected: int) -> None:
    if num_rows != expected:
        what = f"{field} must have" if field else "there must be"
        raise ValueError(
            f"{path}: {what} a row for each node or edge, {expected} (got {num_rows}); download "
            "it again"
        )


def _text_table(path: Path) -> list[list[str]]:
    import gzip

    try:
        with open_regular(path) as compressed, gzip.open(compressed, "rb") as file:
            text = file.read(_MAX_TEXT + 1)
        if len(text) > _MAX_TEXT:
            raise ValueError(f"more than {_MAX_TEXT} bytes of text")
        lines = [line for line in text.decode("utf-8").splitlines() if line.strip()]
        if not lines:  # to gzip an empty file is no damage
            raise ValueError("it is empty")
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise _unreadable(path, error) from None
    return [line.strip().split(",") for line in lines]


def _unreadable(path: Path, error: Exception) -> ValueError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return ValueError(f"{path} cannot be read ({reason}); download the data set again")


def _edges(path: Path, arrays: Arrays, twice: bool = False) -> EndArrays:
    """The two ends of edges.

    Args:
        twice: Whether the reverse of each edge comes right behind it.
    """
    source = _source(path)
    if len(source.schema.names) != 2:
        raise ValueError(f"{path} must have two columns (got {len(source.schema.names)})")
    ends = arrays.ends(None)
    for batch in source.batches(source.schema.names, _ROWS_AT_ONCE):
        block = _numbers(path, batch.columns, np.float32)
        if block.dtype != np.int64:
            raise ValueError(f"{path} must hold node ids (got {block.dtype})")
        step = 2 if twice else 1
        src, dst = ends.room(step * len(block))
        src[::step], dst[::step] = block.T
        if twice:
            dst[1::2], src[1::2] = block.T
        ends.keep(None)
    source.check_cells("download it again")
    return ends.arrays()


def _field_name(field: str) -> str:
    return "feat" if field in {"node-feat", "node_feat"} else field.replace("-", "_")


def _values(values: np.ndarray, field: str) -> np.ndarray:
    single = values.ndim == 2 and values.shape[1] == 1 and "feat" not in field
    return values.reshape(-1) if single else values


def _labels(label: np.ndarray, arrays: Arrays) -> np.ndarray:
    """[N] int64 with -1 for unknown where there is one task; otherwise the matrix as it is."""
    if label.ndim == 2 and label.shape[1] > 1:
        return label
    flat = label.reshape(-1)
    if flat.dtype == np.int64:
        return flat
    made = arrays.empty(len(flat), np.int64)
    for rows in arrays.blocks(flat, made):
        made[rows] = np.where(np.isfinite(flat[rows]), flat[rows], -1)
    return made
