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
from torch import Tensor

from .._base.files import check_regular, open_regular
from ..graph import Graph, graph, heterograph
from ..graph.convert import require
from ._folder import FILE_NAMES, check_node_count
from .dataset import NodeDataset, count_classes
from .npy import is_there, plain_numbers, read_npz

_UNDIRECTED = ("ogbn-proteins", "ogbn-products")
"""Data sets whose files hold each edge once: OGB gives each its reverse, right behind it."""

_MAX_TEXT = 1 << 20
"""Bytes of a table of type names; the real ones have some hundred."""

_SPLIT_NAMES = ("time", "sales_ranking", "species")
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
    if not name.startswith("ogbn-"):
        raise ValueError(f"name must be a node data set of OGB such as 'ogbn-arxiv' (got {name!r})")
    folder = Path(root) / name.replace("-", "_")
    if not (folder / "raw").is_dir():
        _download(name, folder)
    try:
        return _read(name, folder, idtype)
    except (ValueError, TypeError, KeyError, IndexError) as error:
        text = str(error)
        if str(folder) in text:
            raise
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(
            f"{folder} is damaged or not laid out as OGB's {name} ({kind}{text}); download it again"
        ) from error


def _read(name: str, folder: Path, idtype: torch.dtype) -> NodeDataset:
    raw = folder / "raw"
    twice = name in _UNDIRECTED
    if is_there(raw / "triplet-type-list.csv.gz"):
        g, target = _read_typed(raw, idtype)
    elif is_there(raw / "data.npz"):
        g, target = _read_npz(raw, idtype), "_N"
    else:
        g, target = _read_csv(raw, twice, idtype), "_N"
    fields = g.nodes[target].data
    for split, mask in _read_masks(folder, target, g.num_nodes(target)).items():
        fields[f"{split}_mask"] = mask
    return NodeDataset(
        name=name, graph=g, num_classes=count_classes(fields["label"]), target=target
    )


def _download(name: str, folder: Path) -> None:
    ogb = require("ogb.nodeproppred", "graphshard[ogb]", f"{name}, which is not in {folder},")
    ogb.NodePropPredDataset(name=name, root=str(folder.parent))
    if not (folder / "raw").is_dir():
        raise ValueError(f"ogb was asked to download {name} but left no {folder / 'raw'}")


def _read_csv(raw: Path, twice: bool, idtype: torch.dtype) -> Graph:
    num_nodes = int(_table(raw / "num-node-list.csv.gz")[0, 0])
    src, dst = _edges(raw / "edge.csv.gz", idtype)
    check_node_count(raw, "_N", num_nodes, 2 * len(src))
    if twice:
        src, dst = torch.stack([src, dst], 1).reshape(-1), torch.stack([dst, src], 1).reshape(-1)
    g = graph((src, dst), num_nodes=num_nodes)
    g.ndata.update(_fields(raw, "node[-_]*") | _fields(raw, "species"))
    if is_there(raw / "node-label.csv.gz"):
        g.ndata["label"] = _labels(_table(raw / "node-label.csv.gz"))
    for name, values in _fields(raw, "edge[-_]*").items():
        g.edata[name] = values.repeat_interleave(2, 0) if twice else values
    return g


def _read_npz(raw: Path, idtype: torch.dtype) -> Graph:
    arrays = read_npz(raw / "data.npz", lambda field: field.startswith(("node_", "edge_", "num_")))
    ends = plain_numbers(raw / "data.npz", arrays.pop("edge_index"), "i")
    src, dst = (torch.from_numpy(side).to(idtype) for side in ends)
    num_nodes = int(arrays["num_nodes_list"][0])
    check_node_count(raw, "_N", num_nodes, 2 * len(src))
    g = graph((src, dst), num_nodes=num_nodes)
    for field, array in arrays.items():
        if field.startswith("num_"):
            continue
        kind = "i" if array.dtype.kind in "iu" else "f"
        values = _values(plain_numbers(raw / "data.npz", array, kind), field)
        (g.ndata if field.startswith("node_") else g.edata)[_field_name(field)] = values
    label = read_npz(raw / "node-label.npz", lambda field: field == "node_label")["node_label"]
    g.ndata["label"] = _labels(plain_numbers(raw / "node-label.npz", label, "f"))
    return g


def _read_typed(raw: Path, idtype: torch.dtype) -> tuple[Graph, str]:
    names, counts = _text_table(raw / "num-node-dict.csv.gz")
    num_nodes = {name: int(count) for name, count in zip(names, counts, strict=True)}
    etypes = [(s, relation, d) for s, relation, d in _text_table(raw / "triplet-type-list.csv.gz")]
    folders = {etype: raw / "relations" / "___".join(etype) for etype in etypes}
    edges = {etype: _edges(folders[etype] / "edge.csv.gz", idtype) for etype in etypes}
    for ntype, count in num_nodes.items():
        ends = [pair[i] for e, pair in edges.items() for i in (0, 1) if e[2 * i] == ntype]
        check_node_count(raw, ntype, count, sum(map(len, ends)))
    g = heterograph(edges, num_nodes_dict=num_nodes, idtype=idtype)
    for etype, folder in folders.items():
        g.edges[etype].data.update(_fields(folder, "edge[-_]*"))
    for ntype in num_nodes:
        g.nodes[ntype].data.update(_fields(raw / "node-feat" / ntype, "node[-_]*"))
    labelled = sorted((raw / "node-label").glob("*/node-label.csv.gz"))
    if len(labelled) != 1:
        raise ValueError(f"{raw / 'node-label'} must label one node type (it has {labelled})")
    target = labelled[0].parent.name
    g.nodes[target].data["label"] = _labels(_table(labelled[0]))
    return g, target


def _read_masks(folder: Path, target: str, num_nodes: int) -> dict[str, Tensor]:
    there = [path for name in _SPLIT_NAMES if (path := folder / "split" / name).is_dir()]
    if len(there) != 1:
        raise ValueError(f"{folder / 'split'} must hold one of the splits {_SPLIT_NAMES}")
    base = there[0] / target if (there[0] / target).is_dir() else there[0]
    masks = {}
    for split, in_file in FILE_NAMES.items():
        ids = _table(base / f"{in_file}.csv.gz")[:, 0]
        if ids.dtype.kind not in "iu":
            raise ValueError(f"split must hold node ids (got {ids.dtype})")
        masks[split] = torch.zeros(num_nodes, dtype=torch.bool)
        masks[split][torch.from_numpy(ids.copy())] = True
    return masks


def _fields(folder: Path, pattern: str) -> dict[str, Tensor]:
    """Fields of nodes or edges: features in float32, as OGB has them, others as they are."""
    fields = {}
    for path in sorted(folder.glob(f"{pattern}.csv.gz")):
        field = path.name.removesuffix(".csv.gz")
        if field not in _NO_FIELDS:
            values = _table(path, np.float32 if "feat" in field else np.float64)
            fields[_field_name(field)] = _values(values, field)
    return fields


def _table(path: Path, real: type[np.floating[Any]] = np.float32) -> np.ndarray:
    """[num_rows, num_columns] numbers of a CSV file without header: int64, or some ``real``."""
    import pyarrow
    from pyarrow import csv

    if not is_there(path):
        raise ValueError(f"{path} is missing from this OGB data set; download it again")
    try:
        check_regular(path)
        table = csv.read_csv(path, csv.ReadOptions(autogenerate_column_names=True))
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error
    columns = [column.to_numpy() for column in table.columns]
    integral = all(column.dtype.kind in "iu" for column in columns)
    if not integral and any(column.dtype.kind not in "iuf" for column in columns):
        raise ValueError(f"{path} must hold numbers (its columns are {table.schema.types[:4]}...)")
    out = np.empty((table.num_rows, len(columns)), dtype=np.int64 if integral else real)
    for i, column in enumerate(columns):
        out[:, i] = column
    return out


def _text_table(path: Path) -> list[list[str]]:
    import gzip

    try:
        with open_regular(path) as compressed, gzip.open(compressed, "rb") as file:
            text = file.read(_MAX_TEXT + 1)
        if len(text) > _MAX_TEXT:
            raise ValueError(f"more than {_MAX_TEXT} bytes of text")
        lines = text.decode("utf-8").splitlines()
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise _unreadable(path, error) from None
    return [line.strip().split(",") for line in lines if line.strip()]


def _unreadable(path: Path, error: Exception) -> ValueError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return ValueError(f"{path} cannot be read ({reason}); download the data set again")


def _edges(path: Path, idtype: torch.dtype) -> tuple[Tensor, Tensor]:
    src, dst = (torch.from_numpy(side.copy()).to(idtype) for side in _table(path).T)
    return src, dst


def _field_name(field: str) -> str:
    return "feat" if field in {"node-feat", "node_feat"} else field.replace("-", "_")


def _values(values: np.ndarray, field: str) -> Tensor:
    tensor = torch.from_numpy(values)
    single = tensor.ndim == 2 and tensor.shape[1] == 1 and "feat" not in field
    return tensor.squeeze(1) if single else tensor


def _labels(label: np.ndarray) -> Tensor:
    """[N] int64 with -1 for unknown where there is one task; otherwise the matrix as it is."""
    if label.ndim == 2 and label.shape[1] > 1:
        return torch.from_numpy(label)
    flat = label.reshape(-1)
    return torch.from_numpy(np.where(np.isfinite(flat), flat, -1).astype(np.int64))
