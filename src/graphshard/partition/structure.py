# SPDX-License-Identifier: Apache-2.0
"""The structure of a part: what its file holds, and what follows from that.

``graph.safetensors`` in format 2::

    src                     [edges]       local id of each edge's source
    indptr                  [nodes + 1]   where the in-edges of each local node begin; or instead
    dst/gaps   dst/wide     [edges]       local id of each edge's destination
    halo/gaps  halo/wide    [halo nodes]  homogenised ids
    outer/gaps outer/wide   [outer edges] homogenised ids

Local ids are int32 up to 2^31, int64 beyond. Owners and types of nodes and edges, and the ids of
those that the part owns, follow from the partition book.

[Note: gaps]
Ids that mostly ascend are held as differences, the first from 0: a byte each in ``gaps``, where 255
says that the difference is the next number of ``wide`` (int64), because it is negative or at least
255. So any order can be held, and one that ascends costs little more than a byte an id, however
large the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .._base.typing import DEFAULT_CANONICAL_ETYPE, DEFAULT_NTYPE, INDEX_DTYPES
from ..graph import Graph
from ..ops import Adjacency
from ._book import RangePartitionBook
from .checked_files import RowSource, StreamedColumn

Pieces = Callable[[], Iterable[Tensor]]
"""Makes ids piece by piece, from the first on, whenever it is called."""

_WIDE = 255
_PIECE = 1 << 20


def id_dtype(num_ids: int) -> torch.dtype:
    """The dtype of ids below ``num_ids``."""
    return torch.int32 if num_ids <= 2**31 else torch.int64


def stored_dtype(num_ids: int) -> torch.dtype:
    """The dtype in which files hold original ids: 32 bits, without a sign, where these suffice."""
    return torch.int32 if num_ids <= 2**32 else torch.int64


def original_ids(stored: Tensor, num_ids: int) -> Tensor:
    """int64 ids of what a file holds in `stored_dtype`, or in int64."""
    if stored.dtype == torch.int64:
        return stored
    ids = stored.to(torch.int64)
    return ids if num_ids <= 2**31 else ids & 0xFFFFFFFF


def in_pieces(ids: Tensor) -> Iterable[Tensor]:
    """A tensor, some of it at a time."""
    return ids.split(_PIECE)


@dataclass(frozen=True)
class StructurePieces:
    """The structure of a part as a writer has it, some of it at a time.

    Args:
        by_destination: Whether local edges, inner and outer, ascend by destination.
        src: Local id of each local edge's source.
        dst: Local id of its destination.
        halo: Homogenised ids of halo nodes.
        outer: Homogenised ids of outer edges.
    """

    num_inner_nodes: int
    num_halo_nodes: int
    num_inner_edges: int
    num_outer_edges: int
    by_destination: bool
    src: Pieces
    dst: Pieces
    halo: Pieces
    outer: Pieces

    def columns(self) -> dict[str, Tensor | RowSource]:
        """What the file of the structure holds; destinations in the form that is smaller."""
        num_nodes = self.num_inner_nodes + self.num_halo_nodes
        num_edges = self.num_inner_edges + self.num_outer_edges
        local, pointer = id_dtype(num_nodes), id_dtype(num_edges)
        columns: dict[str, Tensor | RowSource] = {
            "src": StreamedColumn(local, num_edges, lambda: (ids.to(local) for ids in self.src())),
            **_gap_columns("halo", self.halo, self.num_halo_nodes),
            **_gap_columns("outer", self.outer, self.num_outer_edges),
        }
        if self.by_destination and (num_nodes + 1) * pointer.itemsize <= num_edges:
            pointers = partial(_pointers, self.dst, num_nodes, pointer)
            columns["indptr"] = StreamedColumn(pointer, num_nodes + 1, pointers)
            return columns
        return columns | _gap_columns("dst", self.dst, num_edges)


def _gap_columns(name: str, pieces: Pieces, count: int) -> dict[str, Tensor | RowSource]:
    """Ids as in [Note: gaps]."""
    wide = [steps[steps.view(np.uint64) >= _WIDE] for steps in _steps(pieces)]

    def gaps() -> Iterator[Tensor]:
        for steps in _steps(pieces):
            yield torch.from_numpy(np.minimum(steps.view(np.uint64), _WIDE).astype(np.uint8))

    joined = np.concatenate([np.zeros(0, dtype=np.int64), *wide])
    return {
        f"{name}/gaps": StreamedColumn(torch.uint8, count, gaps),
        f"{name}/wide": torch.from_numpy(joined),
    }


def _steps(pieces: Pieces) -> Iterator[npt.NDArray[np.int64]]:
    last = 0
    for piece in pieces():
        ids = piece.numpy()
        if len(ids):
            yield np.diff(ids, prepend=ids.dtype.type(last)).astype(np.int64, copy=False)
            last = int(ids[-1])


def _pointers(pieces: Pieces, num_rows: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Where each row begins, and the last ends, of the rows of edges that ascend by row."""
    yield torch.zeros(1, dtype=dtype)
    row, count = 0, 0  # rows whose end has been said; edges so far
    for piece in pieces():
        if len(piece) == 0:
            continue
        rows, last = piece.numpy(), int(piece[-1])
        while row < last:  # of the last row there may be more to come
            stop = min(last, row + _PIECE)
            ends = np.searchsorted(rows, np.arange(row, stop, dtype=rows.dtype), side="right")
            yield torch.from_numpy(ends + count).to(dtype)
            row = stop
        count += len(rows)
    for start in range(row, num_rows, _PIECE):
        yield torch.full((min(_PIECE, num_rows - start),), count, dtype=dtype)


@dataclass(frozen=True)
class PartStructure:
    """The local graph of a part; ids are local: inner nodes and edges first.

    Args:
        book: Seen from the part.
        adjacency: The edges, in the order of their local ids.
        halo: int64, homogenised ids of the nodes of others.
        outer: int64, homogenised ids of the edges of others.
        idtype: Of the graph that was partitioned.
    """

    book: RangePartitionBook
    adjacency: Adjacency
    halo: Tensor
    outer: Tensor
    idtype: torch.dtype

    @property
    def num_inner_nodes(self) -> int:
        return self.book.local_ntype_offset[-1]

    @property
    def num_inner_edges(self) -> int:
        return self.book.local_etype_offset[-1]

    def node_ids(self) -> Tensor:
        """int64 [nodes], homogenised."""
        return torch.cat([self.book.partid2nids(self.book.partid), self.halo])

    def edge_ids(self) -> Tensor:
        """int64 [edges], homogenised."""
        return torch.cat([self.book.partid2eids(self.book.partid), self.outer])

    def node_types(self) -> Tensor:
        """int32 [nodes]."""
        halo, _ = self.book.map_to_per_ntype(self.halo)
        return torch.cat([_numbers(self.book.local_ntype_offset), halo.to(torch.int32)])

    def edge_types(self) -> Tensor:
        """int32 [edges]."""
        outer, _ = self.book.map_to_per_etype(self.outer)
        return torch.cat([_numbers(self.book.local_etype_offset), outer.to(torch.int32)])

    def node_parts(self) -> Tensor:
        """int64 [nodes], the owner of each."""
        own = torch.full((self.num_inner_nodes,), self.book.partid)
        return torch.cat([own, self.book.nid2partid(self.halo)])

    def graph(self) -> Graph:
        """The graph that `load_partition` returns, of one type, with types and owners as data."""
        adjacency = self.adjacency.astype(self.idtype)
        graph = Graph({DEFAULT_NTYPE: adjacency.num_dst}, {DEFAULT_CANONICAL_ETYPE: adjacency})
        graph.ndata["_ID"], graph.ndata["_TYPE"] = self.node_ids(), self.node_types()
        graph.ndata["part_id"] = self.node_parts()
        graph.ndata["inner_node"] = _first(self.num_inner_nodes, adjacency.num_dst)
        graph.edata["_ID"], graph.edata["_TYPE"] = self.edge_ids(), self.edge_types()
        graph.edata["inner_edge"] = _first(self.num_inner_edges, adjacency.num_edges)
        return graph

    def pieces(self, by_destination: bool) -> StructurePieces:
        """What is written of it; ``by_destination`` as there."""
        src, dst = self.adjacency.coo()
        return StructurePieces(
            num_inner_nodes=self.num_inner_nodes,
            num_halo_nodes=len(self.halo),
            num_inner_edges=self.num_inner_edges,
            num_outer_edges=len(self.outer),
            by_destination=by_destination,
            src=partial(in_pieces, src),
            dst=partial(in_pieces, dst),
            halo=partial(in_pieces, self.halo),
            outer=partial(in_pieces, self.outer),
        )


def _numbers(offsets: list[int]) -> Tensor:
    """The type of each id, where types lie between offsets."""
    sizes = torch.tensor(offsets).diff()
    return torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(sizes)


def _first(count: int, total: int) -> Tensor:
    mask = torch.zeros(total, dtype=torch.bool)
    mask[:count] = True
    return mask


def read_structure(
    tensors: Mapping[str, Tensor], book: RangePartitionBook, idtype: torch.dtype
) -> PartStructure:
    """The structure in the tensors of a file, all of it checked.

    Raises:
        ValueError: It contradicts the book or itself.
        TypeError: A tensor has another dtype.
    """
    halo = _read_gaps(tensors, "halo", book.num_nodes())
    outer = _read_gaps(tensors, "outer", book.num_edges())
    check_foreign(halo, book, "node")
    check_foreign(outer, book, "edge")
    num_nodes = book.local_ntype_offset[-1] + len(halo)
    num_edges = book.local_etype_offset[-1] + len(outer)
    src = _tensor(tensors, "src", INDEX_DTYPES)
    if len(src) != num_edges:
        raise ValueError(f"it holds {len(src)} sources of edges, and {num_edges} edges")
    if "indptr" in tensors:
        indptr = _tensor(tensors, "indptr", INDEX_DTYPES)
        if indptr.dtype != src.dtype:
            indptr, src = indptr.to(torch.int64), src.to(torch.int64)
        adjacency = Adjacency.from_csc(indptr, src, None, num_nodes, num_nodes)
    else:
        if not is_within(src, num_nodes):
            raise ValueError("an edge ends outside the part")
        dst = _read_gaps(tensors, "dst", num_nodes, src.dtype)
        if len(dst) != num_edges:
            raise ValueError(f"it holds {len(dst)} destinations of edges, and {num_edges} edges")
        adjacency = Adjacency(src, dst, num_nodes, num_nodes, check=False)
    return PartStructure(book, adjacency, halo, outer, idtype)


def _tensor(tensors: Mapping[str, Tensor], name: str, dtypes: Iterable[torch.dtype]) -> Tensor:
    if name not in tensors:
        raise ValueError(f"'{name}' is missing")
    tensor = tensors[name]
    if tensor.dtype not in dtypes or tensor.dim() != 1:
        raise ValueError(
            f"'{name}' must be {' or '.join(map(str, dtypes))} with one dimension (got "
            f"{tensor.dtype} of shape {tuple(tensor.shape)})"
        )
    return tensor


def _read_gaps(
    tensors: Mapping[str, Tensor], name: str, bound: int, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Ids as in [Note: gaps], after checking that they are in ``[0, bound)``."""
    gaps = _tensor(tensors, f"{name}/gaps", (torch.uint8,)).numpy()
    wide = _tensor(tensors, f"{name}/wide", (torch.int64,)).numpy()
    ids = torch.empty(len(gaps), dtype=dtype)
    last, num_read = 0, 0
    for start in range(0, len(gaps), _PIECE):
        piece = gaps[start : start + _PIECE]
        steps = piece.astype(np.int64)
        places = np.flatnonzero(piece == _WIDE)
        if num_read + len(places) > len(wide):
            raise ValueError(f"'{name}/wide' has {len(wide)} numbers, fewer than its gaps ask for")
        steps[places] = wide[num_read : num_read + len(places)]
        num_read += len(places)
        steps[:1] += last
        np.cumsum(steps, out=steps)
        if steps.min() < 0 or steps.max() >= bound:
            raise ValueError(f"an id of '{name}' is not in [0, {bound})")
        last = int(steps[-1])
        ids[start : start + _PIECE] = torch.from_numpy(steps)
    if num_read != len(wide):
        raise ValueError(f"'{name}/wide' has {len(wide)} numbers, more than its gaps ask for")
    return ids


def check_foreign(ids: Tensor, book: RangePartitionBook, what: str) -> None:
    """Raise unless homogenised ids are of nodes or edges of other parts, each there once."""
    num_ids = book.num_nodes() if what == "node" else book.num_edges()
    if not is_within(ids, num_ids):
        raise ValueError(f"a global {what} id is not in [0, {num_ids})")
    ascends = bool((ids[1:] > ids[:-1]).all())
    if not ascends and torch.unique(ids).numel() != ids.numel():
        raise ValueError(f"a foreign {what} is there twice")
    sizes = [part[f"num_{what}s"] for part in book.metadata()]
    start = sum(sizes[: book.partid])
    if bool(((ids >= start) & (ids < start + sizes[book.partid])).any()):
        raise ValueError(f"a halo {what} belongs to the part")


def is_within(ids: Tensor, end: int) -> bool:
    """Whether all ids are in ``[0, end)``."""
    low, high = torch.aminmax(ids) if ids.numel() else (0, -1)
    return int(low) >= 0 and int(high) < end
