# SPDX-License-Identifier: Apache-2.0
"""NodeDataset: a graph with a task on its nodes, or on links. load_dataset: one from a folder."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._base.files import check_text
from .._base.typing import DEFAULT_CANONICAL_ETYPE, INDEX_DTYPES, CanonicalEType
from ..errors import GraphValueError
from ..graph import Graph
from ..graph.structure import check_type_name
from ..partition.edge_lists import count_alike
from ..partition.graph_files import GraphFiles
from ._array_graph import (
    ArrayGraph,
    Arrays,
    EndArrays,
    both_directions,
    edge_list,
    with_inverse_numbers,
    with_inverses,
    with_self_loops,
)
from ._folder import FolderArrays, how_to_read, read_folder
from .npy import (
    SparseRows,
    dense_features,
    feature_dtype,
    most_in_a_row,
    padded_features,
    plain_numbers,
)

_BLOCK_VALUES = 1 << 22  # of features that are made dense or real at a time

SPLITS = ("train", "val", "test")
"""The three sets of nodes; a set is the field ``{name}_mask`` of the target type."""

MASKS = ("train_mask", "val_mask", "test_mask")
"""Their fields."""


@dataclass(frozen=True, kw_only=True)
class NodeDataset:
    """A graph in which the nodes of one type are to be classified.

    The target type has the fields ``label`` ([num_nodes] int64 with -1 where unknown, or
    [num_nodes, num_classes] for a task with several labels per node), ``train_mask``, ``val_mask``
    and ``test_mask`` ([num_nodes] bool); usually every type has ``feat``.

    With ``links`` edges are to be predicted instead: those of these relations have the three masks
    ([num_edges] bool), and nodes need no labels.

    Args:
        num_classes: Number of classes; 0 where nothing is labelled.
        target: Node type that is classified.
        relation_names: Name of each value of ``edata['etype']``, where a homogeneous graph keeps
            its relations there; otherwise empty.
        links: Relations whose edges are to be predicted.
        reverse_of: For each of them the one with the reverses of its edges, or None; the same one,
            where it has both directions.

    Raises:
        ValueError: The target type does not exist or lacks a field, or a field has another shape.
        TypeError: A mask is not bool.
    """

    name: str
    graph: Graph
    num_classes: int
    target: str
    class_names: tuple[str, ...] = ()
    relation_names: tuple[str, ...] = ()
    links: tuple[CanonicalEType, ...] = ()
    reverse_of: tuple[CanonicalEType | None, ...] = ()

    def __post_init__(self) -> None:
        if self.target not in self.graph.ntypes:
            raise ValueError(
                f"target must be a node type of the graph (got {self.target!r}, "
                f"the graph has {self.graph.ntypes})"
            )
        for name in (*self.class_names, *self.relation_names):
            check_text(name, "the name of a class or relation")
        if self.num_classes < 0:
            raise ValueError(f"num_classes must not be negative (got {self.num_classes})")
        if self.links:
            return
        fields = self.graph.nodes[self.target].data
        names = ["label", *MASKS]
        if missing := [name for name in names if name not in fields]:
            raise ValueError(
                f"nodes of type {self.target!r} must have the fields {names} (missing: {missing});"
                " NodeDataset.from_graph fills in empty ones"
            )
        for name in MASKS:
            _check_mask(name, fields[name].dtype == torch.bool, fields[name])

    @classmethod
    def from_graph(
        cls,
        graph: Graph,
        *,
        name: str = "graph",
        target: str | None = None,
        num_classes: int | None = None,
    ) -> NodeDataset:
        """Make a data set of a graph, adding what it lacks to a copy that shares all tensors.

        Missing labels become -1 everywhere; missing masks become empty.

        Args:
            graph: Graph, usually with ``label`` and the masks on one node type.
            target: Node type to classify. None means the only type that has ``label``, or the only
                type there is.
            num_classes: None counts them: the largest label plus one, or the width of a label
                matrix.

        Raises:
            ValueError: ``target`` is None and the graph does not say which type it is.
        """
        if target is None:
            target = _find_target({ntype: graph.nodes[ntype].data for ntype in graph.ntypes})
        graph = graph.local_var()
        fields = graph.nodes[target].data
        num_nodes = graph.num_nodes(target)
        if "label" not in fields:
            fields["label"] = torch.full((num_nodes,), -1, device=graph.device)
        for mask in MASKS:
            if mask not in fields:
                fields[mask] = torch.zeros(num_nodes, dtype=torch.bool, device=graph.device)
        if num_classes is None:
            num_classes = count_classes(fields["label"])
        return cls(name=name, graph=graph, num_classes=num_classes, target=target)

    @property
    def num_relations(self) -> int:
        """Number of relation ids in ``edata['etype']``, or of relations of a typed graph."""
        return len(self.relation_names) or len(self.graph.canonical_etypes)

    @property
    def source(self) -> Graph:
        """What `graphshard.partition.partition_graph` takes."""
        return self.graph

    @property
    def node_counts(self) -> dict[str, int]:
        """Nodes of each type."""
        ntypes = self.graph.ntypes
        return dict(zip(ntypes, map(self.graph.num_nodes, ntypes), strict=True))

    @property
    def target_fields(self) -> Mapping[str, Tensor]:
        """Fields of the target's nodes."""
        return self.graph.nodes[self.target].data

    def node_ids(self, split: str) -> Tensor:
        """Ids of the target nodes in a set, ``'train'``, ``'val'`` or ``'test'``, ascending."""
        if split not in SPLITS:
            raise ValueError(f"split must be one of {SPLITS} (got {split!r})")
        mask = self.graph.nodes[self.target].data[f"{split}_mask"]
        return mask.nonzero().squeeze(1).to(self.graph.idtype)


def count_classes(label: Tensor) -> int:
    """Number of classes that a label field speaks of."""
    if label.ndim > 1:
        return int(label.shape[1])
    return int(label.max()) + 1 if label.numel() else 0


def _find_target(fields: Mapping[str, Mapping[str, Any]]) -> str:
    """The only node type with labels, or the only one."""
    candidates = [ntype for ntype in fields if "label" in fields[ntype]] or list(fields)
    if len(candidates) != 1:
        raise ValueError(
            f"target must be given, since {len(candidates)} node types could be it: {candidates}"
        )
    return candidates[0]


def _check_mask(name: str, is_bool: bool, mask: Any) -> None:
    if not is_bool or mask.ndim != 1:
        raise TypeError(
            f"{name} must be a bool vector, one value per node (got {mask.dtype} of shape "
            f"{tuple(mask.shape)}); of a matrix of splits store one column"
        )


BUNDLED = ("cora",)
"""Data sets that come with the package."""

ENTITY = "entity"
"""The node type of a knowledge graph that is read as a typed graph."""


def load_dataset(
    name_or_path: str | os.PathLike[str],
    *,
    split: int | None = None,
    features: bool = True,
    row_normalize: bool | Collection[str] = False,
    to_bidirected: bool = False,
    add_inverse: bool = False,
    add_self_loop: bool = False,
    as_typed: bool = False,
    dtype: torch.dtype | None = None,
    idtype: torch.dtype = torch.int64,
    max_feature_bytes: int = 4 * 2**30,
    keep_sparse: bool = False,
) -> NodeDataset:
    """Load a node classification data set.

    The layout of a folder is drawn in ``graphshard/data/_folder.py``. A folder with
    ``edge_type.npy`` is a knowledge graph and has two views. By default it is one homogeneous graph
    whose edges carry ``etype`` ([num_edges] int64) and ``norm`` ([num_edges, 1], 1 over the number
    of edges of the same relation into the same destination), as RelGraphConv wants them. With
    ``as_typed`` it is a graph with one node type, ``entity``, and a relation for each relation.

    Args:
        name_or_path: ``'cora'``, which comes with the package, or a folder.
        split: Which of several published splits to take; None takes the main one.
        features: Whether to read features; without them the graph has no ``feat``.
        row_normalize: Divide each feature row by its sum, of all node types or of those named.
        to_bidirected: Make the graph simple with both directions of every edge. For a graph
            without relations only.
        add_inverse: Add the inverse of every relation: ``etype`` gets ``num_relations`` more
            values, relation ``r`` having the inverse ``r + num_relations``; a typed graph gets
            ``(DST, 'rev_NAME', SRC)`` for each ``(SRC, 'NAME', DST)``.
        add_self_loop: Give every node exactly one self loop. For a graph without relations only.
        as_typed: Read a knowledge graph as a typed graph.
        dtype: Floating point dtype of features and ``norm``. None: features as the files have them
            (integers of up to 16 bits become float32, longer ones float64, so that none changes),
            and ``norm`` in float32.
        idtype: int32 or int64, for node and edge ids.
        max_feature_bytes: Refuse to make sparse features dense, or wider, where that takes more.
        keep_sparse: Keep them sparse instead: in place of ``feat``, nodes have ``feat_columns``
            (int32) and ``feat_values``, ``[num_nodes, most non-zeros of a row]``, columns counted
            from 1, and 0 behind a row's last. Training by command reads these.

    Returns:
        The data set, on CPU.

    Raises:
        FileNotFoundError: There is neither a bundled data set nor a folder of that name.
        ValueError: The folder is damaged, or an option does not fit what it holds.
        TypeError: A dtype is of the wrong kind.

    Example:
        >>> cora = load_dataset('cora', row_normalize=True)
        >>> cora.graph.num_nodes(), cora.num_classes, len(cora.node_ids('train'))
        (2708, 7, 140)
    """
    if idtype not in INDEX_DTYPES:
        raise TypeError(f"idtype must be torch.int32 or torch.int64 (got {idtype})")
    read = read_dataset_arrays(
        name_or_path,
        Arrays(),
        split=split,
        features=features,
        row_normalize=row_normalize,
        to_bidirected=to_bidirected,
        add_inverse=add_inverse,
        add_self_loop=add_self_loop,
        as_typed=as_typed,
        dtype=dtype,
        max_feature_bytes=max_feature_bytes,
        keep_sparse=keep_sparse,
    )
    return read.dataset(idtype)


@dataclass(frozen=True, kw_only=True)
class DatasetArrays:
    """A data set whose graph is arrays, in memory or on disk; for the rest see `NodeDataset`."""

    name: str
    content: ArrayGraph
    num_classes: int
    target: str
    class_names: tuple[str, ...] = ()
    relation_names: tuple[str, ...] = ()
    links: tuple[CanonicalEType, ...] = ()
    reverse_of: tuple[CanonicalEType | None, ...] = ()

    @classmethod
    def of_content(cls, content: ArrayGraph, name: str) -> DatasetArrays:
        """A data set of a graph, to which labels and masks are added where it lacks them.

        Raises:
            ValueError: The graph does not say which node type is to be classified.
            TypeError: A mask is not bool.
        """
        target = _find_target(content.nodes)
        fields, count = content.nodes[target], content.num_nodes[target]
        fields.setdefault("label", np.full(count, -1, np.int64))
        for mask in MASKS:
            fields.setdefault(mask, np.zeros(count, bool))
        num_classes = count_classes(torch.as_tensor(np.asarray(fields["label"])))
        return cls(name=name, content=content, num_classes=num_classes, target=target)

    def dataset(self, idtype: torch.dtype = torch.int64) -> NodeDataset:
        """The data set with its graph in memory."""
        others = dict(vars(self))
        return NodeDataset(graph=others.pop("content").graph(idtype), **others)

    @property
    def source(self) -> GraphFiles:
        """What `graphshard.partition.partition_graph` takes."""
        for name in MASKS if not self.links else ():
            mask = self.content.nodes[self.target][name]
            _check_mask(name, mask.dtype == np.bool_, mask)
        return self.content.files()

    @property
    def node_counts(self) -> dict[str, int]:
        """Nodes of each type."""
        return self.content.num_nodes

    @property
    def target_fields(self) -> dict[str, Any]:
        """Fields of the target's nodes; label and masks are tensors."""
        of_nodes = self.content.nodes[self.target]
        names = [name for name in ("label", *MASKS) if name in of_nodes]
        return of_nodes | {name: torch.as_tensor(of_nodes[name]) for name in names}


def read_dataset_arrays(
    name_or_path: str | os.PathLike[str],
    arrays: Arrays,
    *,
    split: int | None = None,
    features: bool = True,
    row_normalize: bool | Collection[str] = False,
    to_bidirected: bool = False,
    add_inverse: bool = False,
    add_self_loop: bool = False,
    as_typed: bool = False,
    dtype: torch.dtype | None = None,
    max_feature_bytes: int = 4 * 2**30,
    keep_sparse: bool = False,
) -> DatasetArrays:
    """Read a data set as `load_dataset` does.

    Args:
        arrays: Where what has a row for each node or edge is. On disk, arrays of the folder are
            mapped, and edges and dense features are never whole in memory.

    Raises:
        FileNotFoundError: There is neither a bundled data set nor a folder of that name.
        ValueError: The folder is damaged, or an option does not fit what it holds.
        TypeError: A dtype is of the wrong kind.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating point dtype (got {dtype})")
    folder = _folder_of(name_or_path)
    read = read_folder(folder, split, features, arrays)
    _check_options(read, folder, to_bidirected or add_self_loop, add_inverse, as_typed)
    dtypes = {t: dtype or feature_dtype(folder, m) for t, m in read.features.items()}
    sparse = {
        ntype: matrix
        for ntype, matrix in read.features.items()
        if keep_sparse
        and isinstance(matrix, SparseRows)
        and math.prod(matrix.shape) * dtypes[ntype].itemsize > max_feature_bytes
    }
    dense = {t: matrix for t, matrix in read.features.items() if t not in sparse}
    if arrays.folder is None:
        _check_feature_size(dense, folder, dtypes, max_feature_bytes)

    graph = ArrayGraph(
        arrays=arrays,
        num_nodes=dict(read.num_nodes),
        ends=dict(read.edges),
        nodes={ntype: {} for ntype in read.num_nodes},
        edges={etype: {} for etype in read.edges},
    )
    relation_names: Sequence[str] = ()
    target = read.target
    if read.edge_type is not None and as_typed:
        graph, target = _typed_knowledge_graph(graph, read), ENTITY
    elif read.edge_type is not None:
        graph, relation_names = _knowledge_graph(graph, read, add_inverse, dtype or torch.float32)
    if add_inverse and not relation_names:
        graph, _ = with_inverses(graph, ())
    if to_bidirected:
        graph = both_directions(graph)
    if add_self_loop:
        graph = with_self_loops(graph)
    try:
        for etype in graph.ends:
            for name, what in zip(
                etype, ("a node type", "a relation name", "a node type"), strict=True
            ):
                check_type_name(name, what)
        for ntype in graph.num_nodes:
            check_type_name(ntype, "a node type")
    except GraphValueError as error:
        raise ValueError(f"{folder}: {error}") from None

    for ntype, matrix in read.features.items():
        is_normalized = row_normalize if isinstance(row_normalize, bool) else ntype in row_normalize
        fields = graph.nodes[target if ntype == read.target else ntype]
        if ntype in sparse:
            most = most_in_a_row(sparse[ntype])
            make: Any = partial(padded_features, num_places=most)
            names = ["feat_columns", "feat_values"]
        else:
            make, names = _dense, ["feat"]
        is_ready = isinstance(matrix, np.memmap) and matrix.dtype == _numpy_dtype(dtypes[ntype])
        if is_ready and not is_normalized:
            fields["feat"] = matrix
            continue
        made = _made(
            arrays, matrix, partial(make, dtype=dtypes[ntype], row_normalize=is_normalized)
        )
        fields |= zip(names, made, strict=True)
    links: dict[CanonicalEType, CanonicalEType | None] = {}
    if read.edge_masks is not None:
        links = _with_masks_of_facts(graph, read, as_typed, add_inverse)
    else:
        fields = graph.nodes[target]
        fields["label"] = read.label
        for name in SPLITS:
            fields[f"{name}_mask"] = read.masks[name]
    return DatasetArrays(
        name=folder.name,
        content=graph,
        num_classes=max(int(read.label.max(initial=-1)) + 1, len(read.class_names)),
        target=target,
        class_names=read.class_names,
        relation_names=tuple(relation_names),
        links=tuple(links),
        reverse_of=tuple(links.values()),
    )


def _with_masks_of_facts(
    graph: ArrayGraph, read: FolderArrays, as_typed: bool, has_inverse: bool
) -> dict[CanonicalEType, CanonicalEType | None]:
    """Set the masks of facts; the relations to predict, each with that of its inverses.

    Inverses are in no split where they are edges of the same relation.
    """
    assert read.edge_type is not None
    assert read.edge_masks is not None
    arrays = graph.arrays
    names = _short_names(read.relation_names) if as_typed else []
    relations = [(ENTITY, name, ENTITY) for name in names] or [DEFAULT_CANONICAL_ETYPE]
    links: dict[CanonicalEType, CanonicalEType | None] = {}
    for relation, etype in enumerate(relations):
        for name, mask in read.edge_masks.items():
            chosen = mask
            if as_typed:
                chosen = arrays.chosen(mask, _is_of_relation(arrays, read.edge_type, relation))
            inverses = np.zeros(graph.num_edges(etype) - len(chosen), bool)
            graph.edges[etype][f"{name}_mask"] = arrays.joined([chosen, inverses])
        inverse = (ENTITY, f"rev_{etype[1]}", ENTITY) if as_typed else etype
        links[etype] = inverse if has_inverse else None
    return links


def _folder_of(name_or_path: str | os.PathLike[str]) -> Path:
    if name_or_path in BUNDLED:
        return Path(__file__).parent / str(name_or_path)
    path = Path(name_or_path)
    if path.exists() and not path.is_dir():
        raise ValueError(
            f"{path} is a file, and no folder of arrays{how_to_read(path)}; a data set is one of "
            f"{list(BUNDLED)}, a folder of arrays (edge_index.npy and others), or to commands also "
            "a file that ends in .csv, .parquet, .bin or .dgl"
        )
    if not path.is_dir():
        raise FileNotFoundError(
            f"no data set {str(name_or_path)!r}: give one of {list(BUNDLED)}, which come with the "
            "package, or the path of a folder of arrays"
        )
    return path.resolve()


def _check_options(
    arrays: FolderArrays, folder: Path, simple: bool, add_inverse: bool, as_typed: bool
) -> None:
    plain = arrays.edge_type is None and DEFAULT_CANONICAL_ETYPE in arrays.edges
    if simple and not plain:
        raise ValueError(
            f"to_bidirected and add_self_loop are for graphs without relations, and {folder.name} "
            "has relations; use add_inverse=True, or the transforms on the graph"
        )
    if (add_inverse or as_typed) and plain:
        raise ValueError(
            f"add_inverse and as_typed are for graphs with relations, and {folder.name} has none; "
            "use to_bidirected=True for both directions"
        )


def _check_feature_size(
    features: dict[str, np.ndarray | SparseRows],
    folder: Path,
    dtypes: dict[str, torch.dtype],
    max_feature_bytes: int,
) -> None:
    size = sum(
        matrix.shape[0] * matrix.shape[1] * dtypes[ntype].itemsize
        for ntype, matrix in features.items()
        if isinstance(matrix, SparseRows) or matrix.dtype.itemsize < dtypes[ntype].itemsize
    )
    if size > max_feature_bytes:
        kinds = " and ".join(sorted({str(dtype) for dtype in dtypes.values()}))
        raise ValueError(
            f"the features of {folder.name} would take {size / 1e9:.1f} GB as dense {kinds}, more "
            f"than max_feature_bytes={max_feature_bytes}; pass features=False, a smaller dtype, or "
            "a larger limit to load_dataset"
        )


def _knowledge_graph(
    graph: ArrayGraph, read: FolderArrays, add_inverse: bool, dtype: torch.dtype
) -> tuple[ArrayGraph, list[str]]:
    assert read.edge_type is not None
    names = list(read.relation_names)
    graph = replace(graph, edges={DEFAULT_CANONICAL_ETYPE: {"etype": read.edge_type}})
    if add_inverse:
        graph = with_inverse_numbers(graph, len(names))
        names += [f"rev_{name}" for name in names]
    fields = graph.edges[DEFAULT_CANONICAL_ETYPE]
    fields["norm"] = _norm(graph, fields["etype"], max(len(names), 1), dtype)
    return graph, names


def _norm(
    graph: ArrayGraph, etype: np.ndarray, num_relations: int, dtype: torch.dtype
) -> Tensor | np.ndarray:
    """1 over the number of edges of the same relation into the same node, ``[num_edges, 1]``."""
    arrays, (_, dst) = graph.arrays, graph.ends[DEFAULT_CANONICAL_ETYPE]
    if arrays.folder is None:
        _, group, count = np.unique(
            dst.astype(np.int64) * num_relations + etype, return_inverse=True, return_counts=True
        )
        return torch.from_numpy(1.0 / count[group.reshape(-1)]).to(dtype).unsqueeze(1)
    counts = arrays.empty(len(dst), np.int64)
    num_nodes = graph.num_nodes[DEFAULT_CANONICAL_ETYPE[2]]
    count_alike(edge_list(arrays, dst, etype, (num_nodes, num_relations)), arrays.folder, counts)
    norm = arrays.empty((len(dst), 1), _numpy_dtype(dtype))
    for rows in arrays.blocks(counts, norm):
        norm[rows, 0] = 1.0 / counts[rows]
    return norm


def _typed_knowledge_graph(graph: ArrayGraph, read: FolderArrays) -> ArrayGraph:
    assert read.edge_type is not None
    arrays, (src, dst) = graph.arrays, graph.ends[DEFAULT_CANONICAL_ETYPE]
    ends: dict[CanonicalEType, EndArrays] = {}
    for relation, name in enumerate(_short_names(read.relation_names)):
        is_in = _is_of_relation(arrays, read.edge_type, relation)
        ends[ENTITY, name, ENTITY] = arrays.chosen(src, is_in), arrays.chosen(dst, is_in)
    return ArrayGraph(
        arrays=arrays,
        num_nodes={ENTITY: read.num_nodes[read.target]},
        ends=ends,
        nodes={ENTITY: {}},
        edges={etype: {} for etype in ends},
    )


def _is_of_relation(arrays: Arrays, edge_type: np.ndarray, relation: int) -> np.ndarray:
    is_in = arrays.empty(len(edge_type), bool)
    for rows in arrays.blocks(edge_type, is_in):
        is_in[rows] = edge_type[rows] == relation
    return is_in


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.empty(0, dtype=dtype).numpy().dtype


def _dense(
    features: np.ndarray | SparseRows, dtype: torch.dtype, row_normalize: bool
) -> tuple[Tensor, ...]:
    if isinstance(features, np.memmap):
        path = Path(features.filename or "")
        features = plain_numbers(path, np.array(features), "f")
    return (dense_features(features, dtype, row_normalize),)


def _made(
    arrays: Arrays,
    matrix: np.ndarray | SparseRows,
    make: Callable[[np.ndarray | SparseRows], tuple[Tensor, ...]],
) -> list[Any]:
    """What is made of the rows of a matrix: on disk block by block."""
    if arrays.folder is None:
        return list(make(matrix))
    num_rows, num_columns = matrix.shape
    at_once = max(_BLOCK_VALUES // max(num_columns, 1), 1)
    made: list[np.ndarray] = []
    for first in range(0, max(num_rows, 1), at_once):
        last = min(first + at_once, num_rows)
        if isinstance(matrix, SparseRows):
            pieces = make(matrix.rows(first, last))
            arrays.release(matrix.data, matrix.indices)
        else:
            pieces = make(matrix[first:last])
            arrays.release(matrix)
        made = made or [
            arrays.empty((num_rows, *piece.shape[1:]), piece.numpy().dtype) for piece in pieces
        ]
        for rows, piece in zip(made, pieces, strict=True):
            rows[first:last] = piece.numpy()
        arrays.release(*made)
    return made


def _short_names(names: Sequence[str]) -> list[str]:
    """Names that can be relation names and module names, and are still told apart.

    An IRI such as ``http://host/ns#member`` gives ``ns-member``, from its last two words; what is
    then still equal to another gets a number.
    """
    short: list[str] = []
    for name in names:
        words = [re.sub(r"\W+", "_", word) for word in re.split(r"[/#]", name) if word]
        base = candidate = "-".join(words[-2:]) or "relation"
        number = 2
        while candidate in short:
            candidate, number = f"{base}_{number}", number + 1
        short.append(candidate)
    return short
