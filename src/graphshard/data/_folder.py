# SPDX-License-Identifier: Apache-2.0
"""A data set as a folder of plain arrays.

One node type::

    edge_index.npy               [2, num_edges] integers, row 0 sources, row 1 destinations
    edge_type.npy                [num_edges] relation of each edge; only if there are several
    relation_ptr.npy             [num_relations + 1], where edges are sorted by relation
    relations.txt                line r names relation r
    feat.npy | feat.npz          [num_nodes, feat_dim], dense or CSR
    label.npy                    [num_nodes] integers, -1 where unknown
    train_idx.npy                node ids; likewise valid_idx.npy and test_idx.npy
    train_masks.npy              [num_splits, num_nodes] bool, where several splits are published
    classes.txt                  line c names class c

Several node types: ``edge_index__SRC__NAME__DST.npy`` per relation, ``feat__TYPE.npy`` or ``.npz``,
one ``label__TYPE.npy``, whose type is the target, ``train_idx.npy`` and its variants
``train_idx_20.npy``, and ``node_types.txt`` with lines of a type and its number of nodes.

Everything but the edges may be absent. A file that does not fit this layout, or another file, is a
ValueError that names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .._files import read_text_regular
from .._typing import DEFAULT_CANONICAL_ETYPE, DEFAULT_NTYPE, CanonicalEType
from ._arrays import SparseRows, is_there, read_array, read_features

FILE_NAMES = {"train": "train", "val": "valid", "test": "test"}
"""Name of each set of nodes here, and in file names."""

_FREE_NODES = 1 << 20
_NODES_PER_END = 64
_FREE_RELATIONS = 1 << 16
_FREE_CLASSES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class FolderArrays:
    """What a folder holds, checked but not yet a graph.

    Args:
        num_nodes: Number of nodes of each type.
        edges: [2, num_edges] int64 for each relation.
        features: Feature matrix of each type that has one.
        target: Node type with the labels.
        label: [num_nodes of the target] int64.
        masks: [num_nodes of the target] bool for ``train``, ``val`` and ``test``.
        edge_type: [num_edges] int64, or None.
        relation_names: Name of each value of ``edge_type``.
        class_names: Name of each class, or empty.
    """

    num_nodes: dict[str, int]
    edges: dict[CanonicalEType, np.ndarray]
    features: dict[str, np.ndarray | SparseRows]
    target: str
    label: np.ndarray
    masks: dict[str, np.ndarray]
    edge_type: np.ndarray | None
    relation_names: tuple[str, ...]
    class_names: tuple[str, ...]


def read_folder(folder: Path, split: int | None, features: bool) -> FolderArrays:
    """Read and check every array of a folder.

    Args:
        folder: The folder.
        split: Which of several published splits; None takes the files without a number.
        features: Whether to read feature matrices.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"no data set folder {folder}")
    edge_files = _edge_files(folder)
    edges = {etype: _read_edges(path) for etype, path in edge_files.items()}
    typed = DEFAULT_CANONICAL_ETYPE not in edges
    suffix: Callable[[str], str] = (lambda t: f"__{t}") if typed else (lambda t: "")
    label_type, labels = _read_labels(folder, edges, typed)

    counts = _read_counts(folder) if typed else {}
    ntypes = sorted({t for s, _, d in edges for t in (s, d)} | set(counts) | set(labels))
    matrices: dict[str, np.ndarray | SparseRows] = {}
    for ntype in ntypes if features else []:
        matrix = read_features(folder, f"feat{suffix(ntype)}")
        if matrix is not None:
            matrices[ntype] = matrix
    num_nodes = {
        ntype: _count_nodes(folder, ntype, counts, labels, matrices, edges) for ntype in ntypes
    }
    _check_labels(folder, labels)
    target = label_type if label_type is not None else _only(ntypes, folder)
    edge_type = None if typed else _read_edge_type(folder, edges[DEFAULT_CANONICAL_ETYPE].shape[1])
    names = _lines(folder / "relations.txt") if edge_type is not None else []
    num_relations = int(edge_type.max()) + 1 if edge_type is not None and edge_type.size else 0
    if len(names) < num_relations:
        names = [f"relation_{r}" for r in range(num_relations)]
    classes = [line.split("\t")[-1] for line in _lines(folder / "classes.txt")]
    return FolderArrays(
        num_nodes=num_nodes,
        edges=edges,
        features=matrices,
        target=target,
        label=labels.get(target, np.full(num_nodes[target], -1, dtype=np.int64)),
        masks=_read_masks(folder, num_nodes[target], split),
        edge_type=edge_type,
        relation_names=tuple(names),
        class_names=tuple(classes),
    )


def _edge_files(folder: Path) -> dict[CanonicalEType, Path]:
    plain = folder / "edge_index.npy"
    if is_there(plain):
        return {DEFAULT_CANONICAL_ETYPE: plain}
    files = {}
    for path in sorted(folder.glob("edge_index__*.npy")):
        parts = path.stem.split("__")
        if len(parts) != 4:
            raise ValueError(f"{path} must be named edge_index__SRC__NAME__DST.npy")
        files[(parts[1], parts[2], parts[3])] = path
    if not files:
        raise ValueError(
            f"{folder} is no node data set: it has neither edge_index.npy nor "
            f"edge_index__SRC__NAME__DST.npy (it has {sorted(p.name for p in folder.iterdir())})"
        )
    return files


def _read_edges(path: Path) -> np.ndarray:
    edges = read_array(path, 2, "i")
    if edges.shape[0] != 2:
        raise ValueError(f"{path} must be [2, num_edges] (got {list(edges.shape)}); transpose it")
    if edges.size and edges.min() < 0:
        edge = int((edges < 0).any(0).argmax())
        raise ValueError(f"{path} must hold node ids from 0 (edge {edge} is {edges[:, edge]})")
    return edges


def _read_labels(
    folder: Path, edges: dict[CanonicalEType, np.ndarray], typed: bool
) -> tuple[str | None, dict[str, np.ndarray]]:
    if not typed:
        path = folder / "label.npy"
        return DEFAULT_NTYPE, ({DEFAULT_NTYPE: read_array(path, 1, "i")} if is_there(path) else {})
    paths = sorted(folder.glob("label__*.npy"))
    if len(paths) > 1:
        raise ValueError(
            f"{folder} must label one node type (it has {[path.name for path in paths]}); "
            "keep the file of the type to classify"
        )
    if not paths:
        return None, {}
    ntype = paths[0].stem.partition("__")[2]
    return ntype, {ntype: read_array(paths[0], 1, "i")}


def _check_labels(folder: Path, labels: dict[str, np.ndarray]) -> None:
    for label in labels.values():
        most = max(len(label), _FREE_CLASSES)
        if label.size and label.max() >= most:
            raise ValueError(
                f"{folder}: a label must be below {most} (got {label.max()}); number the classes "
                "without gaps"
            )


def _read_counts(folder: Path) -> dict[str, int]:
    counts = {}
    for line in _lines(folder / "node_types.txt"):
        name, _, count = line.partition("\t")
        if not re.fullmatch("[0-9]{1,18}", count.strip()):
            raise ValueError(
                f"{folder / 'node_types.txt'}: a line must be a node type, a tab and a number of "
                f"nodes (got {line!r})"
            )
        counts[name] = int(count)
    return counts


def _count_nodes(
    folder: Path,
    ntype: str,
    counts: dict[str, int],
    labels: dict[str, np.ndarray],
    matrices: dict[str, np.ndarray | SparseRows],
    edges: dict[CanonicalEType, np.ndarray],
) -> int:
    said = {}
    if ntype in counts:
        said["node_types.txt"] = counts[ntype]
    if ntype in labels:
        said["the labels"] = len(labels[ntype])
    if ntype in matrices:
        said["the features"] = matrices[ntype].shape[0]
    if len(set(said.values())) > 1:
        raise ValueError(
            f"{folder}: the number of nodes of type {ntype!r} must be one (got {said})"
        )
    ids = [
        side
        for (source, _, destination), pair in edges.items()
        for side, end in zip(pair, (source, destination), strict=True)
        if end == ntype and side.size
    ]
    needed = max((int(side.max()) + 1 for side in ids), default=0)
    if said and next(iter(said.values())) < needed:
        raise ValueError(
            f"{folder}: an edge names node {needed - 1} of type {ntype!r}, but there are only as "
            f"many as {said}"
        )
    count = next(iter(said.values()), needed)
    if ntype not in labels and ntype not in matrices:
        check_node_count(folder, ntype, count, sum(len(side) for side in ids))
    return count


def check_node_count(source: Path, ntype: str, count: int, num_ends: int) -> None:
    """Refuse a number of nodes that no file bears out: one damaged number can fill the memory.

    Args:
        source: File or folder, for the error.
        ntype: Node type.
        count: Number of nodes that an id or a line of text calls for.
        num_ends: Ends of edges at nodes of this type.
    """
    most = max(_FREE_NODES, _NODES_PER_END * num_ends)
    if count > most:
        raise ValueError(
            f"{source} calls for {count} nodes of type {ntype!r}, more than the {most} that its "
            f"edges ({num_ends} ends at such nodes) bear out; correct the number, number the nodes "
            "without gaps, or store their labels or features"
        )


def _read_edge_type(folder: Path, num_edges: int) -> np.ndarray | None:
    path = folder / "edge_type.npy"
    if not is_there(path):
        return None
    edge_type = read_array(path, 1, "i")
    if len(edge_type) != num_edges or (edge_type.size and edge_type.min() < 0):
        raise ValueError(f"{path} must hold a relation id from 0 for each of the {num_edges} edges")
    most = max(num_edges, _FREE_RELATIONS)
    if edge_type.size and edge_type.max() >= most:
        raise ValueError(
            f"{path} must hold relation ids below {most} (got {edge_type.max()}); number the "
            "relations without gaps"
        )
    pointer_path = folder / "relation_ptr.npy"
    if is_there(pointer_path):
        pointer = read_array(pointer_path, 1, "i")
        edges = np.arange(num_edges)
        sizes_fit = pointer.size > 0 and pointer[0] == 0 and pointer[-1] == num_edges
        ascending = bool((pointer[1:] >= pointer[:-1]).all())
        if (
            not (sizes_fit and ascending)
            or not (np.searchsorted(pointer, edges, side="right") - 1 == edge_type).all()
        ):
            raise ValueError(
                f"{pointer_path} does not fit {path}: edges must be sorted by relation"
            )
    return edge_type


def _read_masks(folder: Path, num_nodes: int, split: int | None) -> dict[str, np.ndarray]:
    masks = {}
    for name, in_file in FILE_NAMES.items():
        many = folder / f"{in_file}_masks.npy"
        number = "" if split is None else f"_{split}"
        one = folder / f"{in_file}_idx{number}.npy"
        if split is not None and is_there(many):
            masks[name] = _mask_of_split(many, num_nodes, split)
        elif is_there(one):
            ids = read_array(one, 1, "i")
            if ids.size and not 0 <= ids.min() <= ids.max() < num_nodes:
                raise ValueError(
                    f"{one} must hold node ids in [0, {num_nodes}) (got {ids.min()} to {ids.max()})"
                )
            masks[name] = np.zeros(num_nodes, dtype=bool)
            masks[name][ids] = True
    if split is not None and not masks:
        there = sorted(p.stem[10:] for p in folder.glob("train_idx_*.npy"))
        raise ValueError(
            f"{folder} has no split {split}; it has {there or 'one split only: leave split out'}"
        )
    return {name: masks.get(name, np.zeros(num_nodes, dtype=bool)) for name in FILE_NAMES}


def _mask_of_split(path: Path, num_nodes: int, split: int) -> np.ndarray:
    masks = read_array(path, 2, "b")
    if masks.shape[1] != num_nodes:
        raise ValueError(f"{path} must be [num_splits, {num_nodes}] (got {list(masks.shape)})")
    if not 0 <= split < len(masks):
        raise ValueError(f"split must be in [0, {len(masks)}) for {path.parent} (got {split})")
    mask: np.ndarray = masks[split]
    return mask


def _only(ntypes: list[str], folder: Path) -> str:
    if len(ntypes) != 1:
        raise ValueError(f"{folder} must have label__TYPE.npy for one of its types {ntypes}")
    return ntypes[0]


def _lines(path: Path) -> list[str]:
    if not is_there(path):
        return []
    try:
        return read_text_regular(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{path} must be text in UTF-8 ({reason}); write it again") from None
