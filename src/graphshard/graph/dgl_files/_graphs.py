# SPDX-License-Identifier: Apache-2.0
"""Files of graphs, as ``dgl.save_graphs`` writes them.

::

    file       u64 0xDD2E4FF046B4A13F, u64 2 (version), u64 2 (typed graphs), u64 graphs, up to
               byte 4096; u64 where the first graph is, labels: a list of named tensors; the graphs;
               u64 bytes of what follows but the last number, list of u64: where each graph is, u64
               the same
    graph      u64 0xDD589FBE35224ABF, structure of types, list of relations, list of i64: nodes by
               type; list by node type of lists of named tensors; the same by relation; list of
               texts: node types; list of texts: names of relations
    types      u64 0xDD3c5FFE20046ABF, compressed rows: a node is a type, an edge a relation
    relation   u64 0xDD2E60F0F6B4A127, i64 2**32 + formats that are there (1 coo, 2 csr, 4 csc;
               older: 1, 2 or 3 for one of these), i64 the same of those allowed; and of each in
               that order: structure of types (one node, or two), the edges
    coo        u64 0xDD61FFD305DFF127, i64 destinations, i64 sources, tensors: sources,
               destinations, ids (none); u8 whether sources ascend, u8 the same of destinations
    rows       u64 0xDD6CD31205DFF127, i64 columns, i64 rows, tensors: pointer, indices, ids (none
               where an edge is at its id); u8 whether indices ascend. csc has destinations as rows

So say DGL's ``src/graph/serialize/graph_serialize.cc`` and ``heterograph_serialize.cc``, and what
they include.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._base.typing import INDEX_DTYPES, CanonicalEType, TensorDict
from ...ops import Adjacency
from .._graph import Graph
from ._tensors import (
    BinaryReader,
    BinaryWriter,
    DamagedFileError,
    StoredTensor,
    check_tensors,
    dgl_dtype,
    new_file,
    reading,
)

_GRAPH = 0xDD589FBE35224ABF
_TYPES = 0xDD3C5FFE20046ABF
_RELATION = 0xDD2E60F0F6B4A127
_COO = 0xDD61FFD305DFF127
_ROWS = 0xDD6CD31205DFF127

_SEVERAL_FORMATS = 1 << 32
FORMATS = {"coo": 1, "csr": 2, "csc": 4}
_OLD_FORMATS = {1: 1, 2: 2, 3: 4}
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class StoredRelation:
    """The edges of one relation in a file that is open.

    Args:
        arrays: By format that is there: sources and destinations of "coo"; pointer, indices and
            ids, or None where an edge is at its id, of "csr" and "csc".
    """

    num_src: int
    num_dst: int
    num_edges: int
    arrays: Mapping[str, tuple[StoredTensor, StoredTensor, StoredTensor | None]]

    def adjacency(self) -> Adjacency:
        """The edges, checked; from the format that costs least to make the others from."""
        try:
            if "coo" in self.arrays:
                src, dst, _ = self.arrays["coo"]
                return Adjacency(src.read(), dst.read(), self.num_src, self.num_dst)
            name = "csc" if "csc" in self.arrays else "csr"
            pointer, others, ids = self.arrays[name]
            indptr, indices = pointer.read(), others.read()
            eids = None if ids is None else ids.read()
            if name == "csc":
                return Adjacency.from_csc(indptr, indices, eids, self.num_src, self.num_dst)
            return Adjacency.from_csc(indptr, indices, eids, self.num_dst, self.num_src).reverse()
        except DamagedFileError:
            raise
        except (ValueError, TypeError) as error:
            raise DamagedFileError(f"its edges are none: {error}") from None


@dataclass(frozen=True)
class StoredGraph:
    """A graph in a file that is open."""

    ntypes: list[str]
    canonical_etypes: list[CanonicalEType]
    num_nodes: list[int]
    relations: list[StoredRelation]
    ndata: list[dict[str, StoredTensor]]
    edata: list[dict[str, StoredTensor]]

    def load(self) -> Graph:
        """The graph, whole in memory."""
        adjacencies = [relation.adjacency() for relation in self.relations]
        try:
            graph = Graph(
                dict(zip(self.ntypes, self.num_nodes, strict=True)),
                dict(zip(self.canonical_etypes, adjacencies, strict=True)),
            )
        except (ValueError, TypeError) as error:
            raise DamagedFileError(str(error)) from None
        for ntype, fields in zip(self.ntypes, self.ndata, strict=True):
            graph.nodes[ntype].data.update({n: field.read() for n, field in fields.items()})
        for etype, fields in zip(self.canonical_etypes, self.edata, strict=True):
            graph.edges[etype].data.update({n: field.read() for n, field in fields.items()})
        return graph


def read_graph(reader: BinaryReader) -> StoredGraph:
    """Walk through one graph and note where its tensors are."""
    reader.magic(_GRAPH, "a graph")
    ends = _read_types(reader)
    relations = reader.listing("relations", 24, lambda: _read_relation(reader))
    num_nodes = reader.listing("node types", 8, lambda: reader.size_of("nodes"))
    ndata = reader.listing("node types", 8, reader.named_tensors)
    edata = reader.listing("relations", 8, reader.named_tensors)
    ntypes = reader.listing("node types", 8, reader.text)
    names = reader.listing("relations", 8, reader.text)
    _check_lengths(ends[0], num_nodes, ndata, ntypes, what="node types")
    _check_lengths(len(ends[1]), relations, edata, names, what="relations")
    if not relations:
        raise DamagedFileError("it has a graph without relations, which is not supported")
    etypes = [
        (ntypes[src], name, ntypes[dst]) for (src, dst), name in zip(ends[1], names, strict=True)
    ]
    _check_names(ntypes, etypes)
    for etype, relation, fields, (src, dst) in zip(etypes, relations, edata, ends[1], strict=True):
        if (relation.num_src, relation.num_dst) != (num_nodes[src], num_nodes[dst]):
            raise DamagedFileError(f"the edges of {etype} are between other nodes")
        _check_rows(fields, relation.num_edges, f"edges of {etype}")
    for ntype, count, fields in zip(ntypes, num_nodes, ndata, strict=True):
        _check_rows(fields, count, f"nodes of type {ntype!r}")
    return StoredGraph(ntypes, etypes, num_nodes, relations, ndata, edata)


def write_graph(writer: BinaryWriter, graph: Graph, formats: Sequence[str]) -> None:
    """Write one graph."""
    ntypes, etypes = graph.ntypes, graph.canonical_etypes
    numbers = [(ntypes.index(src), ntypes.index(dst)) for src, _, dst in etypes]
    order = sorted(range(len(etypes)), key=lambda number: numbers[number][0])
    writer.u64(_GRAPH)
    _write_types(writer, len(ntypes), [numbers[n] for n in order], order)
    writer.u64(len(etypes))
    for etype in etypes:
        _write_relation(writer, graph.adjacency(etype), etype[0] == etype[2], formats)
    writer.u64(len(ntypes))
    writer.i64(*(graph.num_nodes(ntype) for ntype in ntypes))
    writer.u64(len(ntypes))
    for ntype in ntypes:
        writer.named_tensors(dict(graph.nodes[ntype].data))
    writer.u64(len(etypes))
    for etype in etypes:
        writer.named_tensors(dict(graph.edges[etype].data))
    for names in (ntypes, [name for _, name, _ in etypes]):
        writer.u64(len(names))
        for name in names:
            writer.text(name)


# ---------------------------------------------------------------------------- reading

_StoredRows = tuple[int, int, StoredTensor, StoredTensor, StoredTensor | None]


def _read_rows(reader: BinaryReader) -> _StoredRows:
    """Rows, columns, pointer, indices and ids."""
    reader.magic(_ROWS, "a compressed structure")
    num_cols, num_rows = reader.size_of("columns"), reader.size_of("rows")
    indptr, indices, ids = reader.tensor(), reader.tensor(), reader.tensor()
    reader.u8()
    _check_ids(indptr, indices, ids)
    if indptr.shape[0] != num_rows + 1:
        raise DamagedFileError(f"{num_rows} rows have a pointer of {indptr.shape[0]} entries")
    has_ids = ids.shape[0] > 0
    if has_ids and ids.shape != indices.shape:
        raise DamagedFileError(f"{indices.shape[0]} edges have {ids.shape[0]} ids")
    return num_rows, num_cols, indptr, indices, ids if has_ids else None


def _read_coo(reader: BinaryReader) -> tuple[int, int, StoredTensor, StoredTensor]:
    reader.magic(_COO, "a list of edges")
    num_dst, num_src = reader.size_of("destinations"), reader.size_of("sources")
    src, dst, ids = reader.tensor(), reader.tensor(), reader.tensor()
    reader.raw(2)
    _check_ids(src, dst, ids)
    if src.shape != dst.shape:
        raise DamagedFileError(f"edges have {src.shape[0]} sources, {dst.shape[0]} destinations")
    if ids.shape[0]:
        raise DamagedFileError("a list of edges has ids, which is not supported")
    return num_src, num_dst, src, dst


def _check_ids(first: StoredTensor, second: StoredTensor, ids: StoredTensor) -> None:
    alike = first.dtype == second.dtype and (ids.dtype == first.dtype or not ids.num_bytes)
    if not alike or first.dtype not in INDEX_DTYPES:
        raise DamagedFileError(f"edges are of {first.dtype}, {second.dtype} and {ids.dtype}")
    if any(len(stored.shape) != 1 for stored in (first, second, ids)):
        raise DamagedFileError("ids of edges have several dimensions, or none")


def _read_types(reader: BinaryReader) -> tuple[int, list[tuple[int, int]]]:
    """Number of node types, and the numbers of those that each relation joins."""
    reader.magic(_TYPES, "a structure of types")
    num_rows, num_cols, stored, *columns = _read_rows(reader)
    indptr = stored.read().tolist()
    indices = columns[0].read().tolist() if columns[0] is not None else []
    ids = range(len(indices)) if columns[1] is None else columns[1].read().tolist()
    ascends = all(a <= b for a, b in zip(indptr[:-1], indptr[1:], strict=True))
    if num_rows != num_cols or indptr[0] != 0 or indptr[-1] != len(indices) or not ascends:
        raise DamagedFileError("a structure of types contradicts itself")
    if sorted(ids) != list(range(len(indices))) or not all(0 <= n < num_rows for n in indices):
        raise DamagedFileError("a structure of types has a number that is none")
    ends = [(0, 0)] * len(indices)
    for row, (start, stop) in enumerate(zip(indptr[:-1], indptr[1:], strict=True)):
        for position in range(start, stop):
            ends[ids[position]] = (row, indices[position])
    return num_rows, ends


def _read_relation(reader: BinaryReader) -> StoredRelation:
    reader.magic(_RELATION, "a relation")
    code, _ = reader.i64(), reader.i64()
    mask = code - _SEVERAL_FORMATS if code >= _SEVERAL_FORMATS else _OLD_FORMATS.get(code, 0)
    if not 0 < mask < 8:
        raise DamagedFileError(f"a relation has the unknown formats {code:#x}")
    sizes, arrays = set(), {}
    for name in (name for name, bit in FORMATS.items() if mask & bit):
        num_types, ends = _read_types(reader)
        if num_types not in (1, 2) or ends != [(0, num_types - 1)]:
            raise DamagedFileError("a relation joins other types than one or two")
        if name == "coo":
            num_src, num_dst, first, second = _read_coo(reader)
            ids, count = None, first.shape[0]
        else:
            num_src, num_dst, first, second, ids = _read_rows(reader)
            count = second.shape[0]
            if name == "csc":
                num_src, num_dst = num_dst, num_src
        if num_types == 1 and num_src != num_dst:
            raise DamagedFileError(f"one type has {num_src} nodes and {num_dst} nodes")
        if first.dtype == torch.int32 and max(num_src, num_dst, count) > _INT32_MAX:
            raise DamagedFileError(f"{max(num_src, num_dst, count)} ids do not fit into int32")
        sizes.add((num_src, num_dst, count, first.dtype))
        arrays[name] = first, second, ids
    if len(sizes) != 1:
        raise DamagedFileError("the formats of a relation contradict each other")
    return StoredRelation(*sizes.pop()[:3], arrays)


def _check_lengths(expected: int, *lists: Sequence[object], what: str) -> None:
    if any(len(entries) != expected for entries in lists):
        raise DamagedFileError(f"its lists of {what} have {expected} and {[*map(len, lists)]}")


def _check_names(ntypes: list[str], etypes: list[CanonicalEType]) -> None:
    if len(set(ntypes)) != len(ntypes):
        raise DamagedFileError("it has a node type twice, as blocks do, which are not supported")
    if len(set(etypes)) != len(etypes):
        raise DamagedFileError("it has a relation twice")


def _check_rows(fields: Mapping[str, StoredTensor], count: int, what: str) -> None:
    for name, field in fields.items():
        if not field.shape or field.shape[0] != count:
            raise DamagedFileError(
                f"feature {name!r:.80} of {what} has shape {tuple(field.shape)}, not {count} rows"
            )


# ---------------------------------------------------------------------------- writing


def _write_types(
    writer: BinaryWriter, num_types: int, ends: Sequence[tuple[int, int]], ids: Sequence[int]
) -> None:
    """The structure of types; ``ends`` ascend by their first number."""
    writer.u64(_TYPES)
    counts = torch.bincount(_numbers([src for src, _ in ends]), minlength=num_types)
    indptr = torch.cat([_numbers([0]), counts.cumsum(0)])
    _write_rows(
        writer, num_types, num_types, indptr, _numbers([dst for _, dst in ends]), _numbers(ids)
    )


def _write_relation(
    writer: BinaryWriter, adjacency: Adjacency, is_square: bool, formats: Sequence[str]
) -> None:
    writer.u64(_RELATION)
    mask = sum(bit for name, bit in FORMATS.items() if name in formats)
    writer.i64(_SEVERAL_FORMATS + mask, _SEVERAL_FORMATS + sum(FORMATS.values()))
    num_src, num_dst = adjacency.num_src, adjacency.num_dst
    none = torch.empty(0, dtype=torch.int64)
    for name in (name for name in FORMATS if name in formats):
        num_types = 1 if is_square else 2
        _write_types(writer, num_types, [(0, num_types - 1)], [0])
        if name == "coo":
            writer.u64(_COO)
            writer.i64(num_dst, num_src)
            for column in (*adjacency.coo(), none):
                writer.whole_tensor(column)
            writer.u8(0, 0)
            continue
        sizes = (num_src, num_dst) if name == "csr" else (num_dst, num_src)
        indptr, indices, ids = adjacency.csr() if name == "csr" else adjacency.csc()
        _write_rows(writer, *sizes, indptr, indices, none if ids is None else ids)


def _write_rows(
    writer: BinaryWriter,
    num_rows: int,
    num_cols: int,
    indptr: Tensor,
    indices: Tensor,
    ids: Tensor,
) -> None:
    writer.u64(_ROWS)
    writer.i64(num_cols, num_rows)
    for column in (indptr, indices, ids):
        writer.whole_tensor(column)
    writer.u8(0)


def _numbers(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


_GRAPHS = 0xDD2E4FF046B4A13F
_VERSION = 2
_TYPED = 2
_HEAD_BYTES = 4096


def save_graphs(
    filename: str | os.PathLike[str],
    g_list: Graph | Sequence[Graph],
    labels: Mapping[str, Tensor] | None = None,
    formats: str | Sequence[str] | None = None,
) -> None:
    """Write graphs, features included, as ``dgl.save_graphs`` does, without DGL.

    Args:
        filename: File to write; one that is there is replaced, its folder is made if need be.
        g_list: A graph, or several; plain or typed, on any device.
        labels: Tensors that belong to the file as a whole.
        formats: Which of "coo", "csr" and "csc" to store; by default "coo".

    Raises:
        TypeError: ``g_list`` holds something else; or a tensor has a dtype that DGL's files cannot
            hold (bool becomes uint8 there).
        ValueError: An unknown format, or ``filename`` is a folder.
        OSError: The file cannot be written, such as on a full disk; names it.

    Example:
        >>> from graphshard import graph
        >>> save_graphs("path.dgl", graph(([0, 1], [1, 2])), {"label": torch.tensor([7])})
        >>> graphs, labels = load_graphs("path.dgl")
        >>> graphs[0].num_nodes(), labels["label"].item()
        (3, 7)
    """
    graphs = [g_list] if isinstance(g_list, Graph) else list(g_list)
    labels = {} if labels is None else labels
    chosen = ("coo",) if formats is None else formats
    chosen = (chosen,) if isinstance(chosen, str) else tuple(chosen)
    if not chosen or not set(chosen) <= set(FORMATS):
        raise ValueError(f"formats must be some of {tuple(FORMATS)}, or None (got {formats!r})")
    check_tensors(labels, "labels")
    for graph in graphs:
        if not isinstance(graph, Graph):
            raise TypeError(
                f"g_list must be a Graph or a list of them (got {type(graph).__name__})"
            )
        for ntype in graph.ntypes:
            check_tensors(dict(graph.nodes[ntype].data), f"data of nodes of type {ntype!r}")
        for etype in graph.canonical_etypes:
            check_tensors(dict(graph.edges[etype].data), f"data of edges of {etype}")
    with new_file(filename) as writer:
        writer.u64(_GRAPHS, _VERSION, _TYPED, len(graphs))
        writer.raw(bytes(_HEAD_BYTES - writer.offset))
        label_bytes = 8 + sum(
            8 + len(name.encode()) + 40 + 8 * t.dim() + t.numel() * dgl_dtype(t.dtype).itemsize
            for name, t in labels.items()
        )
        writer.u64(_HEAD_BYTES + 8 + label_bytes)
        writer.named_tensors(labels)
        offsets = []
        for graph in graphs:
            offsets.append(writer.offset)
            write_graph(writer, graph, chosen)
        writer.u64(8 + 8 * len(offsets), len(offsets), *offsets, 8 + 8 * len(offsets))


def load_graphs(
    filename: str | os.PathLike[str], idx_list: Sequence[int] | None = None
) -> tuple[list[Graph], TensorDict]:
    """Read graphs from a file that ``save_graphs``, DGL's or ours, wrote; without DGL.

    Args:
        idx_list: Which graphs; by default all.

    Returns:
        The graphs, and the labels of the file by name.

    Raises:
        FileNotFoundError: There is no such file.
        IndexError: There is no graph of a number.
        ValueError: It is damaged, no such file, or of a version that DGL before 0.5 wrote.
    """
    with reading(filename) as reader:
        labels, offsets = open_graphs(reader)
        num_graphs = len(offsets) - 1
        numbers = range(num_graphs) if idx_list is None else idx_list
        graphs = []
        for number in numbers:
            if not 0 <= number < num_graphs:
                raise IndexError(
                    f"idx_list must name graphs of {filename}, in [0, {num_graphs}) (got {number})"
                )
            graphs.append(stored_graph(reader, offsets, number).load())
        return graphs, {name: stored.read() for name, stored in labels.items()}


def load_labels(filename: str | os.PathLike[str]) -> TensorDict:
    """Read the labels alone of a file of graphs."""
    with reading(filename) as reader:
        return {name: stored.read() for name, stored in open_graphs(reader)[0].items()}


def open_graphs(reader: BinaryReader) -> tuple[dict[str, StoredTensor], list[int]]:
    """The labels of an open file, and where its graphs begin and the last one ends."""
    reader.magic(_GRAPHS, "a file of graphs")
    version, kind = reader.u64(), reader.u64()
    if (version, kind) != (_VERSION, _TYPED):
        raise DamagedFileError(
            f"it is of version {version} and kind {kind}, not {_VERSION} and {_TYPED}; read it "
            "with DGL 0.5 or later and save it anew"
        )
    num_graphs = reader.u64()
    index_bytes = 8 + 8 * num_graphs
    if _HEAD_BYTES + 16 + index_bytes + 16 > reader.size:
        raise DamagedFileError(f"its {reader.size} bytes cannot hold {num_graphs} graphs")
    reader.go_to(_HEAD_BYTES)
    start = reader.u64()
    labels = reader.named_tensors()
    if reader.offset != start:
        raise DamagedFileError(f"its labels end at {reader.offset} and its graphs begin at {start}")
    end = reader.size - index_bytes - 16
    reader.go_to(end)
    said = reader.u64(), reader.u64()
    offsets = [reader.u64() for _ in range(num_graphs)]
    if (*said, reader.u64()) != (index_bytes, num_graphs, index_bytes):
        raise DamagedFileError("its list of graphs contradicts itself")
    offsets.append(end)
    if offsets[0] != start or any(a >= b for a, b in zip(offsets[:-1], offsets[1:], strict=True)):
        raise DamagedFileError("its graphs overlap")
    return labels, offsets


def stored_graph(reader: BinaryReader, offsets: Sequence[int], number: int) -> StoredGraph:
    """One graph of an open file; ``offsets`` as `open_graphs` gives them."""
    reader.go_to(offsets[number])
    graph = read_graph(reader)
    if reader.offset != offsets[number + 1]:
        raise DamagedFileError(f"graph {number} ends at {reader.offset}")
    return graph
