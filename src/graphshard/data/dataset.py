# SPDX-License-Identifier: Apache-2.0
"""NodeDataset: a graph with a task on its nodes, or on links. load_dataset: one from a folder."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .._base.files import check_text
from .._base.typing import DEFAULT_CANONICAL_ETYPE, INDEX_DTYPES, CanonicalEType
from ..errors import GraphValueError
from ..graph import Graph, graph, heterograph
from ..graph import add_self_loop as with_self_loops
from ..graph import remove_self_loop as without_self_loops
from ..graph import to_bidirected as in_both_directions
from ._folder import FolderArrays, how_to_read, read_folder
from .npy import SparseRows, dense_features, feature_dtype, padded_features

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
            if fields[name].dtype != torch.bool or fields[name].ndim != 1:
                raise TypeError(
                    f"{name} must be a bool vector, one value per node (got "
                    f"{fields[name].dtype} of shape {tuple(fields[name].shape)}); of a matrix of "
                    "splits store one column"
                )

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
        target = _find_target(graph) if target is None else target
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


def _find_target(graph: Graph) -> str:
    labelled = [t for t in graph.ntypes if "label" in graph.nodes[t].data]
    candidates = labelled or graph.ntypes
    if len(candidates) != 1:
        raise ValueError(
            f"target must be given, since {len(candidates)} node types could be it: {candidates}"
        )
    return candidates[0]


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
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating point dtype (got {dtype})")
    folder = _folder_of(name_or_path)
    arrays = read_folder(folder, split, features)
    _check_options(arrays, folder, to_bidirected or add_self_loop, add_inverse, as_typed)
    dtypes = {t: dtype or feature_dtype(folder, m) for t, m in arrays.features.items()}
    sparse = {
        ntype: matrix
        for ntype, matrix in arrays.features.items()
        if keep_sparse
        and isinstance(matrix, SparseRows)
        and math.prod(matrix.shape) * dtypes[ntype].itemsize > max_feature_bytes
    }
    dense = {t: matrix for t, matrix in arrays.features.items() if t not in sparse}
    _check_feature_size(dense, folder, dtypes, max_feature_bytes)

    relation_names: Sequence[str] = ()
    target = arrays.target
    if arrays.edge_type is not None and as_typed:
        g, target = _typed_knowledge_graph(arrays, add_inverse, idtype), ENTITY
    elif arrays.edge_type is not None:
        g, relation_names = _knowledge_graph(arrays, add_inverse, dtype or torch.float32, idtype)
    elif DEFAULT_CANONICAL_ETYPE in arrays.edges:
        g = _plain_graph(arrays, to_bidirected, add_self_loop, idtype)
    else:
        try:
            g = _typed_graph(arrays.edges, arrays.num_nodes, add_inverse, idtype)
        except GraphValueError as error:  # a name that is none
            raise ValueError(f"{folder}: {error}") from None

    for ntype, matrix in arrays.features.items():
        is_normalized = row_normalize if isinstance(row_normalize, bool) else ntype in row_normalize
        of_type = g.nodes[target if ntype == arrays.target else ntype].data
        if ntype in sparse:
            columns, values = padded_features(sparse[ntype], dtypes[ntype], is_normalized)
            of_type["feat_columns"], of_type["feat_values"] = columns, values
        else:
            of_type["feat"] = dense_features(matrix, dtypes[ntype], is_normalized)
    links: dict[CanonicalEType, CanonicalEType | None] = {}
    if arrays.edge_masks is not None:
        links = _with_masks_of_facts(g, arrays, as_typed, add_inverse)
    else:
        fields = g.nodes[target].data
        fields["label"] = torch.from_numpy(arrays.label)
        for name in SPLITS:
            fields[f"{name}_mask"] = torch.from_numpy(arrays.masks[name])
    return NodeDataset(
        name=folder.name,
        graph=g,
        num_classes=max(int(arrays.label.max(initial=-1)) + 1, len(arrays.class_names)),
        target=target,
        class_names=arrays.class_names,
        relation_names=tuple(relation_names),
        links=tuple(links),
        reverse_of=tuple(links.values()),
    )


def _with_masks_of_facts(
    g: Graph, arrays: FolderArrays, as_typed: bool, has_inverse: bool
) -> dict[CanonicalEType, CanonicalEType | None]:
    """Set the masks of facts; the relations to predict, each with that of its inverses.

    Inverses are in no split where they are edges of the same relation.
    """
    assert arrays.edge_type is not None and arrays.edge_masks is not None
    chosen = {DEFAULT_CANONICAL_ETYPE: np.ones(len(arrays.edge_type), bool)}
    if as_typed:
        names = enumerate(_short_names(arrays.relation_names))
        chosen = {(ENTITY, name, ENTITY): arrays.edge_type == number for number, name in names}
    links: dict[CanonicalEType, CanonicalEType | None] = {}
    for etype, is_of_relation in chosen.items():
        for name, mask in arrays.edge_masks.items():
            rows = torch.zeros(g.num_edges(etype), dtype=torch.bool)
            rows[: is_of_relation.sum()] = torch.from_numpy(mask[is_of_relation])
            g.edges[etype].data[f"{name}_mask"] = rows
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


def _plain_graph(arrays: FolderArrays, both: bool, self_loops: bool, idtype: torch.dtype) -> Graph:
    edges = _tensors(arrays.edges[DEFAULT_CANONICAL_ETYPE], idtype)
    g = graph(edges, num_nodes=arrays.num_nodes[arrays.target])
    if both:
        g = in_both_directions(g)
    return with_self_loops(without_self_loops(g)) if self_loops else g


def _knowledge_graph(
    arrays: FolderArrays, add_inverse: bool, dtype: torch.dtype, idtype: torch.dtype
) -> tuple[Graph, list[str]]:
    assert arrays.edge_type is not None
    edges, etype = arrays.edges[DEFAULT_CANONICAL_ETYPE], arrays.edge_type
    names = list(arrays.relation_names)
    if add_inverse:
        edges = np.concatenate([edges, edges[::-1]], axis=1)
        etype = np.concatenate([etype, etype + len(names)])
        names += [f"rev_{name}" for name in names]
    g = graph(_tensors(edges, idtype), num_nodes=arrays.num_nodes[arrays.target])
    g.edata["etype"] = torch.from_numpy(etype)
    _, group, count = np.unique(
        edges[1] * max(len(names), 1) + etype, return_inverse=True, return_counts=True
    )
    g.edata["norm"] = torch.from_numpy(1.0 / count[group.reshape(-1)]).to(dtype).unsqueeze(1)
    return g, names


def _typed_knowledge_graph(arrays: FolderArrays, add_inverse: bool, idtype: torch.dtype) -> Graph:
    assert arrays.edge_type is not None
    edges = arrays.edges[DEFAULT_CANONICAL_ETYPE]
    relations = {
        (ENTITY, name, ENTITY): edges[:, arrays.edge_type == r]
        for r, name in enumerate(_short_names(arrays.relation_names))
    }
    num_nodes = {ENTITY: arrays.num_nodes[arrays.target]}
    return _typed_graph(relations, num_nodes, add_inverse, idtype)


def _typed_graph(
    relations: dict[CanonicalEType, np.ndarray],
    num_nodes: dict[str, int],
    add_inverse: bool,
    idtype: torch.dtype,
) -> Graph:
    if add_inverse:
        inverse = {(d, f"rev_{name}", s): pair[::-1] for (s, name, d), pair in relations.items()}
        relations = relations | inverse
    data = {etype: _tensors(pair, idtype) for etype, pair in relations.items()}
    return heterograph(data, num_nodes_dict=num_nodes, idtype=idtype)


def _tensors(edges: np.ndarray, idtype: torch.dtype) -> tuple[Tensor, Tensor]:
    src, dst = (torch.from_numpy(np.ascontiguousarray(side)).to(idtype) for side in edges)
    return src, dst


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
