# SPDX-License-Identifier: Apache-2.0
"""ArrayGraph: ends of edges and fields while a graph is made of tables, in memory or on disk.

[Note: arrays on disk]
What has a row for each node or edge is an array of NumPy in any case. If edges are to stay on disk
(``part_method="multilevel"``, or ``memory``), it is a ``.npy`` file in a folder that goes with the
process, mapped while it is filled, and read by `GraphFiles` afterwards. It is passed over in blocks
of rows, behind which the pages are given back (``madvise``), so that the process never has many of
them. Space is allocated when a file is made: on a full disk that is an error, and writing to mapped
pages would be a crash.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from .._base.files import TemporaryFolder, writing
from .._base.typing import CanonicalEType
from ..graph import Graph
from ..graph.structure import check_fits
from ..ops import Adjacency
from ..partition.checked_files import save_array
from ..partition.edge_lists import (
    EdgeList,
    find_lone_edges,
    in_both_directions,
    release_pages,
)
from ..partition.graph_files import ArrayFile, GraphFiles
from ..partition.save import keeps_edges_on_disk

EndArrays: TypeAlias = tuple[NDArray[Any], NDArray[Any]]
FieldArrays: TypeAlias = dict[str, Any]
"""Arrays, or in memory tensors, by name."""

_BLOCK_ROWS = 1 << 20
_FREE_NODES = 1 << 20
_NODES_PER_END = 64


class Arrays:
    """Makes arrays that have a row for each node or edge; see the note on the module.

    Args:
        folder: Where their files go; None: they are in memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._num_files = 0

    def new_path(self) -> Path:
        """A path where there is no file yet."""
        assert self.folder is not None
        self._num_files += 1
        return self.folder / f"{self._num_files}.npy"

    def zeros(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """An array of zeros.

        Raises:
            OSError: The disk is full.
        """
        shape = (shape,) if isinstance(shape, int) else shape
        if self.folder is None:
            return np.zeros(shape, dtype)
        made = np.dtype(dtype)
        path = self.new_path()
        with writing(path), open(path, "wb") as file:
            offset = _write_header(file, made, shape)
            size = int(np.prod(shape, dtype=np.int64)) * made.itemsize
            if size:
                allocate = getattr(os, "posix_fallocate", None)  # not where the system has none
                if allocate is None:
                    file.truncate(offset + size)
                else:
                    allocate(file.fileno(), offset, size)
        if not size:
            return np.zeros(shape, made)
        return np.memmap(path, made, "r+", offset, shape)

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """An array to be filled; as `zeros`."""
        return np.empty(shape, dtype) if self.folder is None else self.zeros(shape, dtype)

    def release(self, *arrays: NDArray[Any]) -> None:
        """Give back the pages of arrays on disk; what they hold stays."""
        if self.folder is not None:
            for array in arrays:
                release_pages(array)

    def blocks(self, *arrays: NDArray[Any]) -> Iterator[slice]:
        """Rows of arrays of one length, some at a time; their pages are given back behind each."""
        for start in range(0, len(arrays[0]), _BLOCK_ROWS):
            yield slice(start, start + _BLOCK_ROWS)
            self.release(*arrays)

    def largest(self, array: NDArray[Any], otherwise: int) -> int:
        """The largest of an array of integers, and of another one."""
        for rows in self.blocks(array):
            otherwise = max(otherwise, int(array[rows].max()))
        return otherwise

    def first_below(self, array: NDArray[Any], least: int) -> int | None:
        """Where the first number below another one is; None if none is."""
        for rows in self.blocks(array):
            is_below = array[rows] < least
            if is_below.any():
                return int(rows.start) + int(is_below.argmax())
        return None

    def chosen(self, array: NDArray[Any], is_chosen: NDArray[np.bool_]) -> NDArray[Any]:
        """Some rows of an array."""
        if self.folder is None:
            made: NDArray[Any] = array[is_chosen]
            return made
        count = sum(int(np.count_nonzero(is_chosen[rows])) for rows in self.blocks(is_chosen))
        made, done = self.empty((count, *array.shape[1:]), array.dtype), 0
        for rows in self.blocks(array, is_chosen):
            part = array[rows][is_chosen[rows]]
            made[done : done + len(part)] = part
            done += len(part)
            self.release(made)
        return made

    def joined(self, pieces: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Arrays behind each other."""
        if self.folder is None:
            return np.concatenate(pieces)
        shape = (sum(map(len, pieces)), *pieces[0].shape[1:])
        made, done = self.empty(shape, np.result_type(*pieces)), 0
        for piece in pieces:
            for rows in self.blocks(piece):
                part = piece[rows]
                made[done : done + len(part)] = part
                done += len(part)
                self.release(made)
        return made

    def ends(self, num_rows: int | None) -> EdgeEnds:
        """Two columns of numbers of nodes that grow.

        Args:
            num_rows: How many there will be; None: it is not known.
        """
        return EdgeEnds(num_rows) if self.folder is None else EdgeEndsOnDisk(self)

    def file(self, array: NDArray[Any]) -> ArrayFile:
        """The file of an array that is mapped as a whole, or a new one of another array."""
        if isinstance(array, np.memmap) and array.filename is not None:
            path, status = Path(array.filename), os.stat(array.filename)
            state = status.st_size, status.st_mtime_ns, status.st_ino
            return ArrayFile(path, array.dtype, array.shape, array.offset, state)
        path = self.new_path()
        save_array(path, array)
        return ArrayFile.open(path)


@contextlib.contextmanager
def folder_of_arrays(out: Path, arguments: Mapping[str, Any]) -> Iterator[Path | None]:
    """A folder for what has a row for each edge, where edges are to stay on disk; else None.

    Args:
        out: Where it is made, and the parts will be.
        arguments: Of `graphshard.partition.partition_graph`.
    """
    if not keeps_edges_on_disk(arguments.get("memory"), arguments.get("part_method", "metis")):
        yield None
        return
    is_new = not out.exists()
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    try:
        with TemporaryFolder(out) as folder:
            yield folder
    finally:
        if is_new:
            with contextlib.suppress(OSError):  # where there is something in it
                out.rmdir()


class EdgeEnds:
    """Two columns of numbers that grow, of int32 as long as that suffices.

    Memory of rows that never come is not touched.

    Args:
        num_rows: How many there will be; None: it is not known.
    """

    def __init__(self, num_rows: int | None) -> None:
        self._count = self._more = 0
        self._arrays: list[NDArray[Any]] = [np.empty(num_rows or 0, np.int32) for _ in range(2)]

    def room(self, num_rows: int, largest: int | None = None) -> list[NDArray[Any]]:
        """Where the next rows are to be written.

        Args:
            largest: No number of theirs is above it; None: it is not known.
        """
        if largest is None or largest > _MOST_INT32:
            self._arrays = [self._in_int64(array) for array in self._arrays]
        count = self._count + num_rows
        if count > len(self._arrays[0]):
            self._resize(count + count // 4 + (1 << 16))
        self._more = num_rows
        return [array[self._count : count] for array in self._arrays]

    def keep(self, is_kept: NDArray[np.bool_] | None) -> list[NDArray[Any]]:
        """Take the rows that were written, or these of them; both columns of what is taken."""
        rows = [array[self._count : self._count + self._more] for array in self._arrays]
        if is_kept is not None:
            self._more = int(np.count_nonzero(is_kept))
            for column in rows:
                column[: self._more] = column[is_kept]
        self._count += self._more
        return [column[: self._more] for column in rows]

    def arrays(self) -> EndArrays:
        """Both columns."""
        self._resize(self._count)
        first, second = self._arrays
        return first, second

    def _in_int64(self, array: NDArray[Any]) -> NDArray[np.int64]:
        if array.dtype == np.int64:
            return array
        wide = np.empty(len(array), np.int64)
        wide[: self._count] = array[: self._count]
        return wide

    def _resize(self, num_rows: int) -> None:
        for array in self._arrays:  # moves no bytes where the system can move pages
            array.resize(num_rows, refcheck=False)


class EdgeEndsOnDisk(EdgeEnds):
    """The same in two files."""

    def __init__(self, arrays: Arrays) -> None:
        super().__init__(None)
        self._made_by = arrays
        self._dtype: np.dtype[Any] = np.dtype(np.int32)
        self._num_written = 0
        self._paths = [arrays.new_path() for _ in range(2)]
        for path in self._paths:
            with writing(path), open(path, "wb") as file:
                _write_header(file, self._dtype, (_MOST_ROWS,))

    def keep(self, is_kept: NDArray[np.bool_] | None) -> list[NDArray[Any]]:
        """Write the rows, or these of them, to the files."""
        rows = super().keep(is_kept)
        self.append(rows)
        self._count = 0
        return rows

    def append(self, columns: Sequence[NDArray[Any]]) -> None:
        """Write rows to the files."""
        most = np.iinfo(self._dtype).max
        if any(
            column.dtype != self._dtype and int(column.max(initial=0)) > most for column in columns
        ):
            self._widen()
        for path, column in zip(self._paths, columns, strict=True):
            with writing(path), open(path, "ab") as file:
                file.write(np.ascontiguousarray(column, self._dtype).data)
        self._num_written += len(columns[0])

    def arrays(self) -> EndArrays:
        """Both columns, mapped."""
        made: list[NDArray[Any]] = []
        for path in self._paths:
            with writing(path), open(path, "r+b") as file:
                offset = _write_header(file, self._dtype, (self._num_written,))
            if self._num_written:
                column = np.memmap(path, self._dtype, "r+", offset, (self._num_written,))
                made.append(column)
            else:
                made.append(np.zeros(0, self._dtype))
        return made[0], made[1]

    def _widen(self) -> None:
        before, narrow = self.arrays(), self._paths
        self._dtype = np.dtype(np.int64)
        self._paths = [
            self._made_by.file(self._made_by.joined([column, column[:0].astype(np.int64)])).path
            for column in before
        ]
        for path in narrow:
            path.unlink()


_MOST_ROWS = 2**62  # has the longest header
_MOST_INT32 = np.iinfo(np.int32).max


def _write_header(file: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """Write what a .npy file begins with; where its numbers begin, the same for all lengths."""
    described = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, described)
    return int(file.tell())


@dataclass(frozen=True, kw_only=True)
class ArrayGraph:
    """A graph as arrays.

    Args:
        arrays: Makes more of them.
        ends: Numbers of the nodes where edges begin and end, which are not checked again.
        nodes: FieldArrays by node type.
        edges: FieldArrays by relation.
    """

    arrays: Arrays
    num_nodes: dict[str, int]
    ends: dict[CanonicalEType, EndArrays]
    nodes: dict[str, FieldArrays]
    edges: dict[CanonicalEType, FieldArrays]

    @property
    def ntypes(self) -> list[str]:
        return sorted(self.num_nodes)

    @property
    def etypes(self) -> list[CanonicalEType]:
        return sorted(self.ends)

    def num_edges(self, etype: CanonicalEType) -> int:
        """Edges of a relation."""
        return len(self.ends[etype][0])

    def edge_list(self, etype: CanonicalEType) -> EdgeList:
        """The edges of a relation, a batch at a time."""
        src, dst = self.ends[etype]
        return edge_list(
            self.arrays, src, dst, (self.num_nodes[etype[0]], self.num_nodes[etype[2]])
        )

    @property
    def least_idtype(self) -> torch.dtype:
        """int32 where it holds the ids of all nodes and edges; else int64."""
        counts = [*self.num_nodes.values(), *map(self.num_edges, self.ends)]
        return torch.int32 if max(counts, default=0) <= _MOST_INT32 else torch.int64

    def graph(self, idtype: torch.dtype = torch.int64) -> Graph:
        """The graph in memory; it shares the arrays, which first become of its idtype."""
        for ntype, count in self.num_nodes.items():
            check_fits(count, idtype, f"nodes of type '{ntype}'")
        for etype in self.etypes:
            check_fits(self.num_edges(etype), idtype, f"edges of {etype}")
        self._cast_ends(np.dtype(np.int32 if idtype == torch.int32 else np.int64))
        relations = {}
        for etype in self.etypes:
            src, dst = (torch.from_numpy(end) for end in self.ends[etype])
            num_src, num_dst = self.num_nodes[etype[0]], self.num_nodes[etype[2]]
            relations[etype] = Adjacency(src, dst, num_src, num_dst, check=False)
        made = Graph(dict(sorted(self.num_nodes.items())), relations)
        for ntype, fields in self.nodes.items():
            for name, rows in fields.items():
                made.nodes[ntype].data[name] = torch.as_tensor(rows)
        for etype, fields in self.edges.items():
            for name, rows in fields.items():
                made.edges[etype].data[name] = torch.as_tensor(rows)
        return made

    def _cast_ends(self, dtype: np.dtype[Any]) -> None:
        """Give ends another dtype, one after the other, so that only one is there twice."""
        places: dict[int, list[tuple[CanonicalEType, int]]] = {}
        for etype, ends in self.ends.items():
            for side, end in enumerate(ends):  # a relation and its inverse share theirs
                places.setdefault(id(end), []).append((etype, side))
        for shared in places.values():
            etype, side = shared[0]
            made = self.ends[etype][side].astype(dtype, copy=False)
            for etype, side in shared:
                first, second = self.ends[etype]
                self.ends[etype] = (made, second) if side == 0 else (first, made)

    def files(self) -> GraphFiles:
        """The graph in its files."""
        file = self.arrays.file

        def files(by_owner: dict[Any, FieldArrays]) -> dict[Any, dict[str, ArrayFile | Tensor]]:
            return {
                owner: {
                    name: rows if isinstance(rows, Tensor) else file(rows)  # of bfloat16
                    for name, rows in fields.items()
                }
                for owner, fields in by_owner.items()
            }

        return GraphFiles(
            num_nodes=self.num_nodes,
            edges={etype: (file(src), file(dst)) for etype, (src, dst) in self.ends.items()},
            node_features=files(self.nodes),
            edge_features=files(self.edges),
            by_content=True,
        )


def edge_list(
    arrays: Arrays, src: NDArray[Any], dst: NDArray[Any], num_nodes: tuple[int, int]
) -> EdgeList:
    """Edges, a batch at a time.

    Args:
        num_nodes: Of the types of sources and destinations.
    """

    def batches() -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        for rows in arrays.blocks(src, dst):
            yield np.asarray(src[rows]), np.asarray(dst[rows])

    return EdgeList(*num_nodes, len(src), batches)


def check_node_count(source: Path, ntype: str, count: int, num_ends: int) -> None:
    """Refuse a number of nodes that no file bears out: one damaged number can fill the memory.

    Args:
        source: File or folder, for the error.
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


def check_ends(graph: ArrayGraph, source: Path) -> None:
    """Raise unless all ends of edges are nodes.

    Args:
        source: What they were read from, for the error.
    """
    for etype, ends in graph.ends.items():
        for end, ntype in zip(ends, (etype[0], etype[2]), strict=True):
            count = graph.num_nodes[ntype]
            below = graph.arrays.first_below(end, 0)
            largest = graph.arrays.largest(end, -1)
            if below is not None or largest >= count:
                raise ValueError(
                    f"{source}: the edges {etype} must be between nodes of type {ntype!r} in "
                    f"[0, {count}) (got {largest if below is None else int(end[below])}); write it "
                    "again"
                )


# ---------------------------------------------------------------------- graphs of graphs


def both_directions(graph: ArrayGraph) -> ArrayGraph:
    """Every edge with its reverse, where that is not there; a reverse has the fields of its edge.

    A graph without fields of edges becomes a simple one, without parallel edges. Relations must be
    between nodes of one type.
    """
    arrays, has_fields = graph.arrays, any(graph.edges.values())
    ends: dict[CanonicalEType, EndArrays] = {}
    edges: dict[CanonicalEType, FieldArrays] = {}
    for etype in graph.etypes:
        src, dst = graph.ends[etype]
        size = max(graph.num_nodes[etype[0]], 1)
        if has_fields:
            is_lone = _lone_edges(graph, etype)
            ends[etype] = (
                arrays.joined([src, arrays.chosen(dst, is_lone)]),
                arrays.joined([dst, arrays.chosen(src, is_lone)]),
            )
            edges[etype] = {
                name: arrays.joined([rows, arrays.chosen(rows, is_lone)])
                for name, rows in graph.edges[etype].items()
            }
        elif arrays.folder is None:
            src, dst = (np.asarray(end, np.int64) for end in (src, dst))
            keys = np.unique(np.concatenate([src * size + dst, dst * size + src]))
            ends[etype] = keys // size, keys % size
        else:
            made = EdgeEndsOnDisk(arrays)
            for both in in_both_directions(graph.edge_list(etype), arrays.folder):
                made.append(both)
            ends[etype] = made.arrays()
    return replace(graph, ends=ends, edges=edges or {etype: {} for etype in ends})


def _lone_edges(graph: ArrayGraph, etype: CanonicalEType) -> NDArray[np.bool_]:
    """The edges of a relation between two nodes that have no reverse."""
    arrays, (src, dst) = graph.arrays, graph.ends[etype]
    if arrays.folder is None:
        size = max(graph.num_nodes[etype[0]], 1)
        src, dst = (np.asarray(end, np.int64) for end in (src, dst))
        is_lone: NDArray[np.bool_] = (src != dst) & ~np.isin(dst * size + src, src * size + dst)
        return is_lone
    is_lone = arrays.empty(len(src), bool)
    find_lone_edges(graph.edge_list(etype), arrays.folder, is_lone)
    arrays.release(is_lone)
    return is_lone


def with_inverses(
    graph: ArrayGraph, left_out: Sequence[str]
) -> tuple[ArrayGraph, dict[CanonicalEType, CanonicalEType]]:
    """Each relation with its inverse, which has the fields of its edges.

    Args:
        left_out: FieldArrays that inverses do not have.

    Returns:
        The graph, and the inverse of each relation.
    """
    ends, edges, inverses = dict(graph.ends), dict(graph.edges), {}
    for etype in graph.etypes:
        inverse = inverses[etype] = (etype[2], f"rev_{etype[1]}", etype[0])
        src, dst = graph.ends[etype]
        ends[inverse] = dst, src
        fields = graph.edges[etype]
        edges[inverse] = {name: rows for name, rows in fields.items() if name not in left_out}
    return replace(graph, ends=ends, edges=edges), inverses


def with_inverse_numbers(graph: ArrayGraph, num_relations: int) -> ArrayGraph:
    """Each edge with its inverse, whose relation number is further by the number of relations."""
    arrays, (etype,) = graph.arrays, graph.etypes
    src, dst = graph.ends[etype]
    fields: FieldArrays = {}
    for name, rows in graph.edges[etype].items():
        of_inverses = rows
        if name == "etype":
            of_inverses = arrays.empty(rows.shape, rows.dtype)
            for block in arrays.blocks(rows, of_inverses):
                of_inverses[block] = rows[block] + num_relations
        elif name == "label":
            of_inverses = _unknown_labels(arrays, len(rows), rows)
        elif name.endswith("_mask"):
            of_inverses = arrays.zeros(rows.shape, rows.dtype)
        fields[name] = arrays.joined([rows, of_inverses])
    ends = {etype: (arrays.joined([src, dst]), arrays.joined([dst, src]))}
    return replace(graph, ends=ends, edges={etype: fields})


def with_self_loops(graph: ArrayGraph) -> ArrayGraph:
    """Every node with one self loop in the only relation, behind its other edges."""
    arrays, (etype,) = graph.arrays, graph.etypes
    src, dst = graph.ends[etype]
    num_nodes = graph.num_nodes[etype[0]]
    is_edge = arrays.empty(len(src), bool)
    for block in arrays.blocks(src, dst, is_edge):
        is_edge[block] = src[block] != dst[block]
    loops = arrays.empty(num_nodes, src.dtype)
    for block in arrays.blocks(loops):
        loops[block] = np.arange(block.start, min(block.stop, num_nodes))
    fields: FieldArrays = {}
    for name, rows in graph.edges[etype].items():
        if name == "label":
            added = _unknown_labels(arrays, num_nodes, rows)
        else:
            added = arrays.zeros((num_nodes, *rows.shape[1:]), rows.dtype)
        if name == "weight":
            for block in arrays.blocks(added):
                added[block] = 1.0
        fields[name] = arrays.joined([arrays.chosen(rows, is_edge), added])
    ends = tuple(arrays.joined([arrays.chosen(end, is_edge), loops]) for end in (src, dst))
    return replace(graph, ends={etype: (ends[0], ends[1])}, edges={etype: fields})


def _unknown_labels(arrays: Arrays, num_rows: int, labels: NDArray[Any]) -> NDArray[Any]:
    """What rows without labels have, as other rows have those labels."""
    made = arrays.empty((num_rows, *labels.shape[1:]), labels.dtype)
    for block in arrays.blocks(made):
        made[block] = np.nan if labels.dtype.kind == "f" else -1
    return made
