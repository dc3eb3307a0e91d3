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

A knowledge graph whose facts are to be predicted::

    train.npy valid.npy test.npy [num_facts, 3] integers: head, relation, tail
    entities.txt relations.txt   line e names entity e, line r names relation r

Everything but the edges may be absent, and of facts all but those for training. A file that does
not fit this layout, or another file, is a ValueError that names it. Not looked at are folders,
notes (README, LICENSE, ``*.md`` and the like, names that begin with ``.`` or ``_``), and what else
published folders hold of which a graph makes nothing: `_OF_PUBLISHERS`.
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .._base.files import read_text_regular
from .._base.typing import DEFAULT_CANONICAL_ETYPE, DEFAULT_NTYPE, CanonicalEType
from ._array_graph import Arrays, EndArrays, check_node_count
from .npy import SparseRows, is_there, plain_numbers, read_array, read_features

FILE_NAMES = {"train": "train", "val": "valid", "test": "test"}
"""Name of each set of nodes here, and in file names."""

_NOTES = re.compile(
    r"[._].*|(readme|licen[cs]e|copying|citation|notice|changelog|(sha|md5)\d*sums?)(\..*)?"
    r"|.*\.(md|rst|html?|pdf|bib)",
    re.IGNORECASE,
)
_OF_PUBLISHERS = set(
    "feat_known.npz feat_known_idx.npy node_kind.npy node_type.npy node_types.txt "
    "self_loop_nodes.npy valid_idx_nolabel.npy".split()
)
_OF_SOME_NODES = "feat_known.npz"
_NAMES_ELSEWHERE = {
    "feat": "x features feature feats node_feat node_feats node_features attr node_attr",
    "label": "y labels target targets node_label node_labels classes class",
    "edge_index": "edge edges edge_list edgelist adj adj_t",
    "train_idx": "train_mask train_ids train_nid train tr_mask",
    "valid_idx": "val_idx val_mask valid_mask val_ids val_nid val valid dev_idx va_mask",
    "test_idx": "test_mask test_ids test_nid test te_mask",
}
"""What others call a file of this layout, by its stem here."""
_LAYOUT = (
    "edge_index.npy, edge_type.npy, relation_ptr.npy, relations.txt, feat.npy or feat.npz, "
    "label.npy"
)
_TYPED_LAYOUT = (
    "edge_index__SRC__NAME__DST.npy, feat__TYPE.npy or .npz, label__TYPE.npy, node_types.txt"
)
_SPLIT_LAYOUT = (
    "classes.txt, and of train, valid and test train_idx.npy (of several splits train_idx_N.npy or "
    "train_masks.npy)"
)
_SHOWN = 20
_FREE_RELATIONS = 1 << 16
_FREE_CLASSES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class FolderArrays:
    """What a folder holds, checked but not yet a graph.

    Args:
        edges: Sources and destinations, [num_edges], for each relation.
        label: [num_nodes of the target] int64.
        masks: [num_nodes of the target] bool for ``train``, ``val`` and ``test``.
        edge_type: [num_edges] integers, or None.
        relation_names: Name of each value of ``edge_type``.
        edge_masks: [num_edges] bool for each split, where edges are to be predicted.
    """

    num_nodes: dict[str, int]
    edges: dict[CanonicalEType, EndArrays]
    features: dict[str, np.ndarray | SparseRows]
    target: str
    label: np.ndarray
    masks: dict[str, np.ndarray]
    edge_type: np.ndarray | None
    relation_names: tuple[str, ...]
    class_names: tuple[str, ...]
    edge_masks: dict[str, np.ndarray] | None = None


def read_folder(folder: Path, split: int | None, features: bool, arrays: Arrays) -> FolderArrays:
    """Read and check every array of a folder.

    Args:
        arrays: If they are on disk, edges and dense features are mapped.
        split: Which of several published splits; None takes the files without a number.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"no data set folder {folder}")
    if is_of_facts(folder):
        return _read_facts(folder, arrays)
    edge_files = _edge_files(folder)
    _check_file_names(folder, list(edge_files))
    edges = {etype: _read_edges(path, arrays) for etype, path in edge_files.items()}
    typed = DEFAULT_CANONICAL_ETYPE not in edges
    label_type, labels = _read_labels(folder, typed)

    counts = _read_counts(folder) if typed else {}
    ntypes = sorted({t for etype in edges for t in etype[::2]} | set(counts) | set(labels))
    matrices: dict[str, np.ndarray | SparseRows] = {}
    for ntype in ntypes if features else []:
        stem = f"feat__{ntype}" if typed else "feat"
        matrix = read_features(folder, stem, arrays)
        if matrix is not None:
            matrices[ntype] = matrix
    if features and not matrices and is_there(folder / _OF_SOME_NODES):
        warnings.warn(
            f"{folder} has features of some nodes alone, in {_OF_SOME_NODES}, which are not read: "
            "training learns a row for each node; write feat.npz with a row a node for others",
            stacklevel=3,
        )
    num_nodes = {
        ntype: _count_nodes(folder, ntype, counts, labels, matrices, edges, arrays)
        for ntype in ntypes
    }
    if label_type is None and len(ntypes) != 1:
        raise ValueError(f"{folder} must have label__TYPE.npy for one of its types {ntypes}")
    target = ntypes[0] if label_type is None else label_type
    edge_type = None
    if not typed:
        edge_type = _read_edge_type(folder, len(edges[DEFAULT_CANONICAL_ETYPE][0]), arrays)
    names = _lines(folder / "relations.txt") if edge_type is not None else []
    num_relations = 0 if edge_type is None else arrays.largest(edge_type, -1) + 1
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


def is_of_facts(folder: Path) -> bool:
    """Whether a folder holds the facts of a knowledge graph."""
    return is_there(folder / "train.npy") and not any(folder.glob("edge_index*.npy"))


def _read_facts(folder: Path, arrays: Arrays) -> FolderArrays:
    names = [f"{name}.npy" for name in FILE_NAMES.values()]
    _check_known({path.name for path in folder.iterdir() if not path.is_dir()}, folder)
    of_split: dict[str, np.ndarray] = {}
    for split, name in zip(FILE_NAMES, names, strict=True):
        path, facts = folder / name, np.zeros((0, 3), np.int64)
        if is_there(path):
            facts = read_array(path, 2, "i", is_mapped=arrays.folder is not None)
        least = min((int(facts[rows].min()) for rows in arrays.blocks(facts)), default=0)
        if facts.shape[1] != 3 or least < 0:
            raise ValueError(
                f"{path} must be [num_facts, 3], head, relation and tail, numbered from 0 (got "
                f"{list(facts.shape)}"
                + (f" and {least})" if facts.shape[1] == 3 else "); write three columns")
            )
        of_split[split] = facts
    num_facts = sum(map(len, of_split.values()))
    heads, relation, tails = (arrays.empty(num_facts, np.int64) for _ in range(3))
    masks = {split: arrays.zeros(num_facts, bool) for split in of_split}
    done = 0
    for split, facts in of_split.items():
        masks[split][done : done + len(facts)] = True
        for rows in arrays.blocks(facts):
            some = plain_numbers(folder / f"{FILE_NAMES[split]}.npy", np.asarray(facts[rows]), "i")
            for column, values in zip((heads, relation, tails), some.T, strict=True):
                column[done : done + len(some)] = values
            done += len(some)
            arrays.release(heads, relation, tails, *masks.values())
    num_relations = arrays.largest(relation, -1) + 1
    _check_relations(folder / names[0], num_relations - 1, num_facts)
    entities, relations = _lines(folder / "entities.txt"), _lines(folder / "relations.txt")
    named = max(arrays.largest(heads, -1), arrays.largest(tails, -1)) + 1
    num_nodes = max(named, len(entities))
    check_node_count(folder, DEFAULT_NTYPE, num_nodes, 2 * num_facts + len(entities))
    if len(relations) < num_relations:
        relations = [f"relation_{r}" for r in range(num_relations)]
    return FolderArrays(
        num_nodes={DEFAULT_NTYPE: num_nodes},
        edges={DEFAULT_CANONICAL_ETYPE: (heads, tails)},
        features={},
        target=DEFAULT_NTYPE,
        label=np.full(num_nodes, -1, dtype=np.int64),
        masks={split: np.zeros(num_nodes, bool) for split in of_split},
        edge_type=relation,
        relation_names=tuple(relations),
        class_names=(),
        edge_masks=masks,
    )


def _check_known(present: set[str], folder: Path) -> None:
    known = [f"{name}.npy" for name in FILE_NAMES.values()] + ["entities.txt", "relations.txt"]
    for name in sorted(present - set(known)):
        if not _NOTES.fullmatch(name):
            raise ValueError(
                f"{folder / name} is no file of a folder of facts, and would not be read; the "
                f"layout is {', '.join(known)}; rename the file, or move it out"
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
        files[parts[1], parts[2], parts[3]] = path
    if not files:
        raise ValueError(
            f"{folder} is no node data set: it has neither edge_index.npy nor "
            f"edge_index__SRC__NAME__DST.npy (it has {_shown_names(folder)}){how_to_read(folder)}"
        )
    return files


def _check_file_names(folder: Path, etypes: list[CanonicalEType]) -> None:
    """Raise if a file would not be read: of another name, or because of another file."""
    typed = etypes != [DEFAULT_CANONICAL_ETYPE]
    present = {path.name for path in folder.iterdir() if not path.is_dir()}
    splits = [f"{name}_{kind}.npy" for name in FILE_NAMES.values() for kind in ("idx", "masks")]
    if typed:
        ntypes = sorted({t for etype in etypes for t in etype[::2]} | set(_read_counts(folder)))
        names = [f"edge_index__{'__'.join(etype)}.npy" for etype in etypes]
        names += [f"feat__{t}{ending}" for t in ntypes for ending in (".npy", ".npz")]
        names += [f"label__{t}.npy" for t in ntypes] + ["node_types.txt"]
    else:
        names = ["edge_index.npy", "edge_type.npy", "relation_ptr.npy", "relations.txt"]
        names += ["feat.npy", "feat.npz", "label.npy"]
    names += [*splits, "classes.txt"]
    of_split = re.compile(rf"({'|'.join(FILE_NAMES.values())})_idx_[0-9]+\.npy")
    for name in sorted(present - set(names) - _OF_PUBLISHERS):
        if not (of_split.fullmatch(name) or _NOTES.fullmatch(name)):
            raise ValueError(
                f"{folder / name} is no file of a data set folder, and would not be read: "
                f"{_nearest(name, names)} The layout is {_TYPED_LAYOUT if typed else _LAYOUT}, "
                f"{_SPLIT_LAYOUT}; rename the file, or move it out"
            )
    for name in ("relation_ptr.npy", "relations.txt"):
        if not typed and name in present and "edge_type.npy" not in present:
            raise ValueError(
                f"{folder / name} belongs to edge_type.npy, the relation of each edge, which is "
                "missing; add it, or move the other out"
            )
    for name in names:
        twin = f"{Path(name).stem}.npz"
        if name.startswith("feat") and name.endswith(".npy") and {name, twin} <= present:
            raise ValueError(
                f"{folder / name} and {twin} are both there, and one would not be read; keep one"
            )


def _nearest(name: str, names: Iterable[str]) -> str:
    """What the file may have been meant to be."""
    stem = Path(name).stem.lower()
    if stem.startswith(("edge_weight", "edge_attr", "edge_feat", "weight")):
        return (
            "this layout has no features of edges (graphshard.graph makes a graph of edges, which "
            "then has them as edata, and partition_graph or save_graphs writes it)."
        )
    for here, elsewhere in _NAMES_ELSEWHERE.items():
        if stem in elsewhere.split():
            is_mask = stem.endswith("mask")
            how = ", which holds node ids: numpy.flatnonzero(mask)" if is_mask else ""
            meant = next((name for name in names if name.startswith(here)), f"{here}.npy")
            return f"did you mean {meant}{how}?"
    same = [candidate for candidate in names if Path(candidate).stem == stem]
    return f"did you mean {(same or difflib.get_close_matches(name, names, 1, 0.0))[0]}?"


def _shown_names(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return f"{names[:_SHOWN]}{f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''}"


def how_to_read(path: Path) -> str:
    """What reads something that is there and no data set folder, for the end of an error."""
    call = _reader_of_folder(path) if path.is_dir() else _reader_of_file(path)
    how = "and graphshard.save_graphs('graph.bin', graph) writes a graph that commands take"
    return "" if call is None else f"; {call} reads it, {how}"


def _reader_of_folder(folder: Path) -> str | None:
    names = sorted(path.name for path in folder.iterdir())
    if (folder / "raw").is_dir() and ((folder / "split").is_dir() or "ogbn" in folder.name):
        name = folder.name.replace("_", "-")
        return f"graphshard.data.from_ogb({name!r}, root={str(folder.parent)!r}).graph"
    planetoid = (re.fullmatch(r"ind\.(\w+)\.(x|allx|graph)", name) for name in names)
    titles = [match[1] for match in planetoid if match is not None]
    if titles:
        return (
            f"graphshard.dgl.data.CitationGraphDataset({titles[0]!r}, raw_dir={str(folder)!r})[0]"
        )
    if any(name.endswith(".parquet") for name in names):
        return f"graphshard.from_parquet({str(folder)!r})"
    tables = [name for name in names if re.search(r"\.(csv|tsv|mtx)(\.\w+)?$", name)]
    return _reader_of_file(folder / tables[0]) if tables else None


def _reader_of_file(path: Path) -> str | None:
    name = re.sub(r"\.(gz|bz2|xz|zst|lz4)$", "", path.name.lower())
    shown, ending = repr(str(path)), name.rpartition(".")[2]
    calls = {
        "csv tsv tab txt edges edgelist el": f"graphshard.from_csv({shown})",
        "parquet pq parq": f"graphshard.from_parquet({shown})",
        "mtx": f"graphshard.from_scipy(scipy.io.mmread({shown}))",
        "npz": f"graphshard.from_scipy(scipy.sparse.load_npz({shown}))",
        "npy": "graphshard.data.load_dataset of its folder",
        "gml": f"graphshard.from_networkx(networkx.read_gml({shown}))",
        "graphml": f"graphshard.from_networkx(networkx.read_graphml({shown}))",
        "gexf": f"graphshard.from_networkx(networkx.read_gexf({shown}))",
        "bin dgl": f"graphshard.load_graphs({shown})",
        "pt": "graphshard.data.from_pyg of what PyG loads from it",
    }
    return next((call for endings, call in calls.items() if ending in endings.split()), None)


def _read_edges(path: Path, arrays: Arrays) -> EndArrays:
    return edges_of_array(
        path, read_array(path, 2, "i", is_mapped=arrays.folder is not None), arrays
    )


def edges_of_array(path: Path, edges: np.ndarray, arrays: Arrays) -> EndArrays:
    """Sources and destinations of an array ``[2, num_edges]``, which are not below 0.

    Args:
        path: Where it is from, for errors.
    """
    if edges.ndim != 2 or edges.shape[0] != 2 or edges.dtype.kind not in "iu":
        raise ValueError(
            f"{path} must be [2, num_edges] integers (got {edges.dtype} {list(edges.shape)}); "
            "transpose it"
        )
    src, dst = edges
    if isinstance(edges, np.memmap):
        num_edges, row_bytes = edges.shape[1], edges.shape[1] * edges.itemsize
        src, dst = (
            np.memmap(
                edges.filename or path,
                edges.dtype,
                "r",
                edges.offset + row * row_bytes,
                (num_edges,),
            )
            for row in (0, 1)
        )
        src, dst = (_whole_numbers(path, side, arrays) for side in (src, dst))
    else:
        src, dst = (plain_numbers(path, side, "i") for side in (src, dst))
    first = [place for side in (src, dst) if (place := arrays.first_below(side, 0)) is not None]
    if first:
        edge = min(first)
        raise ValueError(
            f"{path} must hold node ids from 0 (edge {edge} is {np.array([src[edge], dst[edge]])})"
        )
    return src, dst


def _whole_numbers(
    path: Path, column: np.ndarray, arrays: Arrays, allowed: Sequence[Any] = (np.int32, np.int64)
) -> np.ndarray:
    """A column in one of some dtypes, the last of which is int64."""
    if not isinstance(column, np.memmap) or column.dtype in allowed:
        return column
    made = arrays.empty(len(column), np.int64)
    for rows in arrays.blocks(column, made):
        made[rows] = plain_numbers(path, np.asarray(column[rows]), "i")
    return made


def _read_labels(folder: Path, typed: bool) -> tuple[str | None, dict[str, np.ndarray]]:
    if not typed:
        path = folder / "label.npy"
        return DEFAULT_NTYPE, ({DEFAULT_NTYPE: _read_label(path)} if is_there(path) else {})
    paths = sorted(folder.glob("label__*.npy"))
    if len(paths) > 1:
        raise ValueError(
            f"{folder} must label one node type (it has {[path.name for path in paths]}); "
            "keep the file of the type to classify"
        )
    if not paths:
        return None, {}
    ntype = paths[0].stem.partition("__")[2]
    return ntype, {ntype: _read_label(paths[0])}


def _read_label(path: Path) -> np.ndarray:
    label = read_array(path, 1, "i")
    most = max(len(label), _FREE_CLASSES)
    if label.size and label.max() >= most:
        raise ValueError(
            f"{path.parent}: a label must be below {most} (got {label.max()}); number the classes "
            "without gaps"
        )
    return label


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
    edges: dict[CanonicalEType, EndArrays],
    arrays: Arrays,
) -> int:
    said = {"node_types.txt": counts[ntype]} if ntype in counts else {}
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
        if end == ntype
    ]
    needed = max((arrays.largest(side, -1) + 1 for side in ids), default=0)
    if said and next(iter(said.values())) < needed:
        raise ValueError(
            f"{folder}: an edge names node {needed - 1} of type {ntype!r}, but there are only as "
            f"many as {said}"
        )
    count = next(iter(said.values()), needed)
    if ntype not in labels and ntype not in matrices:
        check_node_count(folder, ntype, count, sum(len(side) for side in ids))
    return count


def _read_edge_type(folder: Path, num_edges: int, arrays: Arrays) -> np.ndarray | None:
    path = folder / "edge_type.npy"
    if not is_there(path):
        return None
    edge_type = read_array(path, 1, "i", is_mapped=arrays.folder is not None)
    edge_type = _whole_numbers(path, edge_type, arrays, (np.int64,))
    if len(edge_type) != num_edges or arrays.first_below(edge_type, 0) is not None:
        raise ValueError(f"{path} must hold a relation id from 0 for each of the {num_edges} edges")
    _check_relations(path, arrays.largest(edge_type, -1), num_edges)
    pointer_path = folder / "relation_ptr.npy"
    if is_there(pointer_path):
        pointer = read_array(pointer_path, 1, "i")
        fits = pointer.size > 0 and pointer[0] == 0 and pointer[-1] == num_edges
        fits = fits and bool((np.diff(pointer) >= 0).all())
        for rows in arrays.blocks(edge_type):
            numbers = np.arange(rows.start, rows.start + len(edge_type[rows]))
            of_rows = np.searchsorted(pointer, numbers, side="right") - 1
            fits = fits and np.array_equal(of_rows, edge_type[rows])
        if not fits:
            raise ValueError(
                f"{pointer_path} does not fit {path}: edges must be sorted by relation"
            )
    return edge_type


def _check_relations(path: Path, largest: int, num_edges: int) -> None:
    most = max(num_edges, _FREE_RELATIONS)
    if largest >= most:
        raise ValueError(
            f"{path} must hold relation ids below {most} (got {largest}); number the relations "
            "without gaps"
        )


def _read_masks(folder: Path, num_nodes: int, split: int | None) -> dict[str, np.ndarray]:
    masks = {}
    for name, in_file in FILE_NAMES.items():
        many = folder / f"{in_file}_masks.npy"
        number = "" if split is None else f"_{split}"
        single = folder / f"{in_file}_idx{number}.npy"
        if split is not None and is_there(many):
            masks[name] = _mask_of_split(many, num_nodes, split)
        elif is_there(single):
            ids = read_array(single, 1, "i")
            if ids.size and not 0 <= ids.min() <= ids.max() < num_nodes:
                raise ValueError(
                    f"{single} must hold node ids in [0, {num_nodes}) (got {ids.min()} to "
                    f"{ids.max()})"
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
    return masks[split]


def _lines(path: Path) -> list[str]:
    if not is_there(path):
        return []
    try:
        return read_text_regular(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{path} must be text in UTF-8 ({reason}); write it again") from None
