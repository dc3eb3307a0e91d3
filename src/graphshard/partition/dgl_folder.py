# SPDX-License-Identifier: Apache-2.0
"""Partition folders as ``dgl.distributed.partition_graph`` writes them, read without DGL.

::

    out_path/
    ├── <graph_name>.json      paths relative to it
    ├── part0/
    │   ├── graph.dgl          one graph of one type, with local ids; inner nodes and edges first
    │   │     ndata  _ID, inner_node; part_id (several parts), _TYPE (several types), orig_id (old)
    │   │     edata  _ID, inner_edge; _TYPE (several relations), orig_id (old)
    │   ├── node_feat.dgl      "type/feature"             [inner nodes of the type, ...]
    │   └── edge_feat.dgl      "src:relation:dst/feature" [inner edges of the relation, ...]
    └── part1/ ...

What such a folder leaves out follows from the ids: types and owners. Since its version 1.0 DGL does
not keep the ids before partitioning; those of the partition then stand for them as ``orig_id``,
which says that nothing is known of a graph before. Older files have ``orig_id``, and older still
name features without their type.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from .._base.ranges import RangeMap
from .._base.typing import DEFAULT_NTYPE, CanonicalEType, TensorDict
from ..graph.dgl_files import (
    BinaryReader,
    StoredGraph,
    StoredTensor,
    open_graphs,
    open_tensors,
    reading,
    stored_graph,
)
from ._book import RangePartitionBook
from .checked_files import etype_key, reading_part, unusable

DGL_PART_FILES = {
    "part_graph": "graph.dgl",
    "node_feats": "node_feat.dgl",
    "edge_feats": "edge_feat.dgl",
}

_ORIGINAL = "orig_id"
_TROUBLE = "damaged or not of this partition"


@dataclass(frozen=True)
class DGLPartFile:
    """A file of a part that has been opened and found to be whole; as a `TensorFile` is."""

    path: Path
    kind: str
    book: RangePartitionBook
    graph_path: Path
    shapes: dict[str, tuple[int, ...]]
    bytes: int

    blake2b: ClassVar[None] = None

    @classmethod
    def open(cls, path: Path, kind: str, book: RangePartitionBook, graph_path: Path) -> DGLPartFile:
        """Walk through the file; its tensors are not read."""
        with _opened(path) as reader:
            if kind == "part_graph":
                _structure(reader)
                return cls(path, kind, book, graph_path, {}, reader.size)
            stored = _with_types(open_tensors(reader), kind, book)
            shapes = {name: tuple(rows.shape) for name, rows in stored.items()}
            for owner, count in owned_rows(kind, book).items():
                shapes.setdefault(f"{owner}/{_ORIGINAL}", (count,))
            return cls(path, kind, book, graph_path, shapes, reader.size)

    def check_digest(self) -> None:
        """Nothing: DGL's files carry no digest."""

    def read(self) -> TensorDict:
        """All tensors, in memory, under the names that they have in files of ours."""
        if self.kind == "part_graph":
            with _opened(self.path) as reader:
                graph = _structure(reader)
                tensors = _edges_of(graph)
                for what, fields in (("node", graph.ndata[0]), ("edge", graph.edata[0])):
                    tensors |= _columns(what, fields, self.book)
                return tensors
        with reading_part(self.path, _TROUBLE), self.rows() as features:
            return {
                name: rows if isinstance(rows, Tensor) else rows.read()
                for name, rows in features.items()
            }

    @contextmanager
    def rows(self) -> Iterator[dict[str, Tensor | StoredTensor]]:
        """What `read` gives of features, still in the file as far as it is there.

        Raises:
            PartitionFormatError: As for `read`; while rows are read, a ValueError.
        """
        with ExitStack() as stack:  # errors of what is done with the rows are not explained here
            with reading_part(self.path, _TROUBLE):
                reader = stack.enter_context(reading(self.path))
                stored: dict[str, Tensor | StoredTensor] = dict(
                    _with_types(open_tensors(reader), self.kind, self.book)
                )
                original_ids = self._original_ids(stored)
            yield stored | {name: ids for name, ids in original_ids.items() if name not in stored}

    def _original_ids(self, features: Mapping[str, object]) -> TensorDict:
        """The ids before partitioning, of the types whose features do not have them."""
        owned = owned_rows(self.kind, self.book)
        if all(f"{owner}/{_ORIGINAL}" in features for owner in owned):
            return {}
        is_node = self.kind == "node_feats"
        with _opened(self.graph_path) as reader:
            graph = _structure(reader)
            column = (graph.ndata if is_node else graph.edata)[0].get(_ORIGINAL)
            homogenised = None if column is None else column.read()
        ids_by_name, first, before = {}, 0, 0
        for (owner, count), (ids, total) in zip(owned.items(), self._ids_by_type(), strict=True):
            if homogenised is not None:
                ids = homogenised[first : first + count].to(torch.int64) - before
                if len(ids) != count or bool(((ids < 0) | (ids >= total)).any()):
                    raise unusable(self.graph_path, _TROUBLE, f"orig_id is none of {owner}")
            ids_by_name[f"{owner}/{_ORIGINAL}"] = ids
            first, before = first + count, before + total
        return ids_by_name

    def _ids_by_type(self) -> Iterator[tuple[Tensor, int]]:
        """The part's own ids of each type, and the number of all of the type."""
        book = self.book
        if self.kind == "node_feats":
            for ntype in book.ntypes:
                yield book.partid2nids(book.partid, ntype), book.num_nodes(ntype)
        else:
            for etype in book.canonical_etypes:
                yield book.partid2eids(book.partid, etype), book.num_edges(etype)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryReader]:
    with reading_part(path, _TROUBLE), reading(path) as reader:
        yield reader


def _structure(reader: BinaryReader) -> StoredGraph:
    """The one graph that an open file holds."""
    _, places = open_graphs(reader)
    if len(places) != 2:
        raise ValueError(f"it holds {len(places) - 1} graphs, and the structure of a part is one")
    graph = stored_graph(reader, places, 0)
    if (len(graph.ntypes), len(graph.relations)) != (1, 1):
        raise ValueError("it is of several types, and the structure of a part is of one")
    return graph


def owned_rows(kind: str, book: RangePartitionBook) -> dict[str, int]:
    """How many nodes or edges the book's part owns, by the names of types in files."""
    is_node = kind == "node_feats"
    names = book.ntypes if is_node else list(map(etype_key, book.canonical_etypes))
    offsets = book.local_ntype_offset if is_node else book.local_etype_offset
    return dict(zip(names, torch.tensor(offsets).diff().tolist(), strict=True))


def _with_types(
    stored: Mapping[str, StoredTensor], kind: str, book: RangePartitionBook
) -> dict[str, StoredTensor]:
    """Features by the names of today: old ones lack the type, or name a relation alone."""
    owners = list(owned_rows(kind, book))
    by_relation: dict[str, list[str]] = {}
    for owner, name in zip(owners, book.etypes if kind == "edge_feats" else owners, strict=True):
        by_relation.setdefault(name, []).append(owner)
    by_name = {}
    for name, tensor in stored.items():
        owner, _, feature = name.rpartition("/")
        if not owner and len(owners) == 1:
            owner = owners[0]
        elif owner not in owners and len(by_relation.get(owner, ())) == 1:
            (owner,) = by_relation[owner]
        by_name[f"{owner or DEFAULT_NTYPE}/{feature}"] = tensor
    if len(by_name) != len(stored):
        raise ValueError("it has a feature twice, with and without its type")
    return by_name


def _edges_of(graph: StoredGraph) -> TensorDict:
    (relation,) = graph.relations
    name = next(name for name in ("coo", "csc", "csr") if name in relation.arrays)
    labels = ("src", "dst", "eids") if name == "coo" else ("indptr", "indices", "eids")
    arrays = zip(labels, relation.arrays[name], strict=True)
    return {f"{name}/{label}": array.read() for label, array in arrays if array is not None}


def _columns(what: str, fields: Mapping[str, StoredTensor], book: RangePartitionBook) -> TensorDict:
    """What a part says of its nodes or edges, and what it leaves out because it follows."""
    ids = _column(fields, "_ID", torch.int64)
    columns = {f"{what}/_ID": ids}
    flags = _column(fields, f"inner_{what}", None)
    if bool(((flags != 0) & (flags != 1)).any()):
        raise ValueError(f"an inner_{what} is neither 0 nor 1")
    columns[f"{what}/inner_{what}"] = flags.to(torch.bool)
    per_type = book.map_to_per_ntype if what == "node" else book.map_to_per_etype
    types = _column(fields, "_TYPE", None) if "_TYPE" in fields else per_type(ids)[0]
    columns[f"{what}/_TYPE"] = types.to(torch.int32)
    if what == "node":
        has_owners = "part_id" in fields
        owners = _column(fields, "part_id", None) if has_owners else book.nid2partid(ids)
        columns["node/part_id"] = owners.to(torch.int64)
    return columns


def _column(fields: Mapping[str, StoredTensor], name: str, dtype: torch.dtype | None) -> Tensor:
    if name not in fields:
        raise ValueError(f"{name} is missing")
    column = fields[name]
    is_integer = not column.dtype.is_floating_point
    if len(column.shape) != 1 or not is_integer or dtype not in (None, column.dtype):
        raise ValueError(f"{name} is {column.dtype} of shape {tuple(column.shape)}")
    return column.read()


def find_relations(
    names: Mapping[str, int],
    ntypes: Mapping[str, int],
    node_map: Mapping[str, Sequence[Sequence[int]]],
    graph_paths: Iterable[Path],
) -> dict[str, CanonicalEType]:
    """The relations that an old JSON means, by the node types that any edge of each joins.

    DGL before 1.0 named relations alone, "writes" and not "author:writes:paper". Its own tool for
    such files is ``tools/change_etype_to_canonical_etype.py``.

    Args:
        node_map: Per node type, the block of each part.
        graph_paths: The structure of each part, in order; read until all is known.

    Raises:
        PartitionFormatError: A file is missing or damaged.
        ValueError: A relation has no edge, or edges between several types.
    """
    if len(ntypes) == 1:
        (ntype,) = ntypes
        return {name: (ntype, name, ntype) for name in names}
    types = sorted(ntypes, key=lambda name: ntypes[name])
    sizes = [
        [stop - start for start, stop in of_part]
        for of_part in zip(*(node_map[ntype] for ntype in types), strict=True)
    ]
    blocks = RangeMap.from_sizes([size for row in sizes for size in row])
    triples: dict[str, CanonicalEType] = {}
    for path in graph_paths:
        with _opened(path) as reader:
            graph = _structure(reader)
            src, dst = graph.relations[0].adjacency().coo()
            numbers = _column(graph.edata[0], "_TYPE", None)
            ids = _column(graph.ndata[0], "_ID", torch.int64)
            for name, number in names.items():
                chosen = (numbers == number).nonzero().view(-1)
                if not chosen.numel():
                    continue
                ends = []
                for side in (src, dst):
                    nodes = ids[side[chosen].long()]
                    blocks.check(nodes, "node id")
                    kinds = torch.unique(blocks.part_of(nodes) % len(types)).tolist()
                    if len(kinds) != 1:
                        raise ValueError(f"edges of {name!r:.80} join several types of nodes")
                    ends.append(types[kinds[0]])
                triple = (ends[0], name, ends[1])
                if triples.setdefault(name, triple) != triple:
                    raise ValueError(f"edges of {name!r:.80} join other types in {path}")
        if len(triples) == len(names):
            return triples
    missing = min(set(names) - set(triples))
    raise ValueError(
        f"no edge tells which node types the relation {missing!r:.80} joins; name it "
        "'source:relation:destination' in the JSON"
    )
