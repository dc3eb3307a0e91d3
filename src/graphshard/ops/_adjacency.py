# SPDX-License-Identifier: Apache-2.0
"""Adjacency: the edges of one relation, in whichever format an operator asks for.

Three formats describe the same edges. The one given at construction is kept; the others are built
when first asked for and stay. A reversed adjacency is another view of the same store, so that a
backward pass finds what the forward pass built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from .._base.device import device_of
from .._base.kernels import kernels_for, num_threads
from .._base.typing import INDEX_DTYPES
from . import _check

Coo = tuple[Tensor, Tensor]
Compressed = tuple[Tensor, Tensor, Tensor | None]


@dataclass
class _Formats:
    """The arrays of one relation; what is None has not been asked for yet."""

    coo: Coo | None = None
    csc: Compressed | None = None
    csr: Compressed | None = None
    without_ids: set[str] = field(default_factory=set)  # "csc", "csr": of edges in another order
    given: str = "coo"  # what the edges were made from
    in_degrees: Tensor | None = None
    out_degrees: Tensor | None = None
    longest: dict[str, int] = field(default_factory=dict)  # most edges of a row of "csc", "csr"

    def arrays(self) -> list[Tensor]:
        groups = (self.coo, self.csc, self.csr, (self.in_degrees, self.out_degrees))
        return [array for group in groups if group for array in group if array is not None]


class Adjacency:
    """Edges from ``num_src`` source nodes to ``num_dst`` destination nodes; immutable.

    An edge's id is its position in ``src`` and ``dst``. Parallel edges, self loops, isolated nodes
    and empty node or edge sets are legal. The arrays are kept, not copied: do not write to them.

    Args:
        src: [num_edges] source of each edge, int32 or int64.
        dst: [num_edges] destination of each edge, same dtype and device.
        check: Look at every id; pass False only for arrays that are known to be right.

    Raises:
        TypeError: The arrays are not integer tensors of one dtype.
        ValueError: Shapes differ, devices differ, or an id is out of range.

    Example:
        >>> adj = Adjacency(torch.tensor([0, 1, 1]), torch.tensor([1, 0, 1]), 2, 2)
        >>> adj.in_degrees()
        tensor([1, 2])
    """

    __slots__ = ("_formats", "_transposed", "device", "idtype", "num_dst", "num_edges", "num_src")

    num_src: int
    num_dst: int
    num_edges: int
    idtype: torch.dtype
    device: torch.device

    def __init__(
        self, src: Tensor, dst: Tensor, num_src: int, num_dst: int, *, check: bool = True
    ) -> None:
        if check:
            _check.check_ids("src", src, "num_src", num_src)
            _check.check_ids("dst", dst, "num_dst", num_dst)
            _check.check_alike("src", src, "dst", dst)
            if src.shape != dst.shape:
                raise ValueError(
                    "src and dst must have one entry per edge each "
                    f"(got {src.shape[0]} and {dst.shape[0]}); pass arrays of equal length"
                )
        coo = _check.dense(src), _check.dense(dst)
        self._init(_Formats(coo=coo), src, num_src, num_dst)

    def _init(
        self,
        formats: _Formats,
        like: Tensor,
        num_src: int,
        num_dst: int,
        num_edges: int | None = None,
        transposed: bool = False,
    ) -> None:
        self._formats = formats
        self._transposed = transposed
        self.num_src = int(num_src)
        self.num_dst = int(num_dst)
        self.num_edges = int(like.shape[0]) if num_edges is None else num_edges
        self.idtype = like.dtype
        self.device = like.device

    @classmethod
    def from_csc(
        cls,
        indptr: Tensor,
        indices: Tensor,
        eids: Tensor | None,
        num_src: int,
        num_dst: int,
        *,
        check: bool = True,
    ) -> Adjacency:
        """Build from in-edges grouped by destination.

        Args:
            indptr: [num_dst + 1] where the in-edges of each destination begin and end.
            indices: [num_edges] source of each edge.
            eids: [num_edges] id of each edge, a permutation; None where position is the id.
            check: Look at every number; pass False only for arrays that are known to be right.

        Raises:
            TypeError: The arrays are not integer tensors of one dtype.
            ValueError: Shapes, devices, the pointer, or an id are wrong.
        """
        if check:
            _check.check_csc(indptr, indices, eids, num_src, num_dst)
            indptr, indices = indptr.resolve_neg(), indices.resolve_neg()
            eids = None if eids is None else eids.resolve_neg()
        indptr, indices = indptr.contiguous(), indices.contiguous()
        eids = None if eids is None else eids.contiguous()
        formats = _Formats(given="csc")
        if eids is None or _ascending_within_rows(indptr, eids):
            formats.csc = (indptr, indices, eids)
        else:  # csc() promises ascending ids within a destination, so it is built anew
            formats.coo = _coo_from_compressed((indptr, indices, eids))
        adj = cls.__new__(cls)
        adj._init(formats, indices, num_src, num_dst)
        return adj

    def __repr__(self) -> str:
        built = ", ".join(name for name, exists in self.formats().items() if exists)
        return (
            f"Adjacency(num_src={self.num_src}, num_dst={self.num_dst}, "
            f"num_edges={self.num_edges}, idtype={self.idtype}, device={self.device}, "
            f"formats=[{built}])"
        )

    def _single_adjacency(self) -> Adjacency:
        return self

    def coo(self) -> Coo:
        """Source and destination of each edge, both [num_edges], in edge id order."""
        src, dst = self._formats.coo = self._stored_coo()
        return (dst, src) if self._transposed else (src, dst)

    def csc(self, ids: bool = True) -> Compressed:
        """In-edges grouped by destination: ``(indptr, src, eids)``.

        ``indptr`` is [num_dst + 1], ``src`` and ``eids`` are [num_edges]. Within one destination
        edges come by ascending edge id. ``eids`` is None where every edge is at its own id.

        Args:
            ids: False if nothing is read or written by edge: they may then be None in any case,
                and take neither time nor memory.
        """
        return self._compressed("csr" if self._transposed else "csc", ids)

    def csr(self, ids: bool = True) -> Compressed:
        """Out-edges grouped by source: ``(indptr, dst, eids)``, ordered as in `csc`."""
        return self._compressed("csc" if self._transposed else "csr", ids)

    def longest_row(self, name: str) -> int | None:
        """The most edges of a destination (``csc``) or a source (``csr``), if the host knows.

        It does of formats that were built on the CPU and moved. To ask a GPU is to wait for it.
        """
        if self._transposed:
            name = "csr" if name == "csc" else "csc"
        return self._formats.longest.get(name)

    def _compressed(self, name: str, ids: bool) -> Compressed:
        """A format as the store has it, built if need be."""
        formats = self._formats
        arrays: Compressed | None = getattr(formats, name)
        if arrays is None or (ids and name in formats.without_ids):
            src, dst = self._stored_coo()
            keys, others = (dst, src) if name == "csc" else (src, dst)
            num_keys = self.num_dst if (name == "csc") != self._transposed else self.num_src
            other = formats.csr if name == "csc" else formats.csc
            # Edges that are sorted by one end are hardly ever by the other, too.
            can_be = other is None or other[2] is not None
            is_sorted = can_be and bool((keys[1:] >= keys[:-1]).all())
            if ids or is_sorted:
                formats.without_ids.discard(name)
            else:
                formats.without_ids.add(name)
            arrays = _compress(keys, others, num_keys, is_sorted, ids)
            setattr(formats, name, arrays)
        return arrays

    def _stored_coo(self) -> Coo:
        """As the store has it; what is made for it here is not kept."""
        formats = self._formats
        if formats.coo is not None:
            return formats.coo
        if formats.csc is not None and "csc" not in formats.without_ids:
            return _coo_from_compressed(formats.csc)
        assert formats.csr is not None and "csr" not in formats.without_ids
        dst, src = _coo_from_compressed(formats.csr)
        return src, dst

    def has_sequential_csc(self) -> bool:
        """Whether edges were given sorted by destination, so that position is the edge id."""
        name = "csr" if self._transposed else "csc"
        arrays: Compressed | None = getattr(self._formats, name)
        return arrays is not None and arrays[2] is None and name not in self._formats.without_ids

    def is_given_as(self, name: str) -> bool:
        """Whether the edges were made from ``coo``, ``csr`` or ``csc`` arrays."""
        given = self._formats.given
        if self._transposed:
            given = {"csc": "csr", "csr": "csc"}.get(given, given)
        return name == given

    def reverse(self) -> Adjacency:
        """The same edges in the other direction, with the same ids; shares every array."""
        adj = Adjacency.__new__(Adjacency)
        adj._formats = self._formats
        adj._transposed = not self._transposed
        adj.num_src, adj.num_dst = self.num_dst, self.num_src
        adj.num_edges, adj.idtype, adj.device = self.num_edges, self.idtype, self.device
        return adj

    def in_degrees(self) -> Tensor:
        """Number of edges into each destination: [num_dst], of ``idtype``."""
        return self._degrees(into_dst=not self._transposed, num_keys=self.num_dst)

    def out_degrees(self) -> Tensor:
        """Number of edges out of each source: [num_src], of ``idtype``."""
        return self._degrees(into_dst=self._transposed, num_keys=self.num_src)

    def _degrees(self, into_dst: bool, num_keys: int) -> Tensor:
        formats, name = self._formats, "in_degrees" if into_dst else "out_degrees"
        degrees: Tensor | None = getattr(formats, name)
        if degrees is None:
            compressed = formats.csc if into_dst else formats.csr
            if compressed is not None:
                degrees = compressed[0].diff()
            else:
                keys = self._stored_coo()[1 if into_dst else 0]
                degrees = torch.bincount(keys, minlength=num_keys).to(self.idtype)
            setattr(formats, name, degrees)
        return degrees

    def to(self, device: torch.device | str) -> Adjacency:
        """This adjacency, with every format it has, on ``device``; itself if already there."""
        target = device_of(device)
        return self if target == self.device else self.map(lambda array: array.to(target))

    def astype(self, idtype: torch.dtype) -> Adjacency:
        """This adjacency with ids of ``idtype`` (torch.int32 or torch.int64).

        Raises:
            TypeError: ``idtype`` is neither.
            ValueError: A count does not fit in 32 bits.
        """
        if idtype not in INDEX_DTYPES:
            raise TypeError(f"idtype must be torch.int32 or torch.int64 (got {idtype})")
        if idtype == self.idtype:
            return self
        if idtype == torch.int32:
            for name in ("num_src", "num_dst", "num_edges"):
                _check.check_fits_int32(name, getattr(self, name))
        return self.map(lambda array: array.to(idtype))

    def map(self, change: _ArrayChange) -> Adjacency:
        """This adjacency with every array of every format replaced by ``change(array)``."""
        changed: dict[int, Tensor] = {}  # two formats may share an array
        old = self._formats
        formats = _Formats(without_ids=set(old.without_ids), given=old.given)
        for name in ("coo", "csc", "csr"):
            arrays: tuple[Tensor | None, ...] | None = getattr(old, name)
            if arrays is None:
                continue
            for array in arrays:
                if array is not None and id(array) not in changed:
                    changed[id(array)] = change(array)
            setattr(formats, name, tuple(changed.get(id(array)) for array in arrays))
        like = formats.arrays()[0]
        if self.device.type == "cpu" != like.device.type:
            for name, arrays in (("csc", old.csc), ("csr", old.csr)):
                if arrays is not None and arrays[0].shape[0] > 1:
                    formats.longest[name] = int(np.diff(arrays[0].numpy()).max())
        adj = Adjacency.__new__(Adjacency)
        adj._init(formats, like, self.num_src, self.num_dst, self.num_edges, self._transposed)
        return adj

    def formats(self) -> dict[str, bool]:
        """Which of ``coo``, ``csc`` and ``csr`` have been built."""
        formats = self._formats
        csc, csr = formats.csc is not None, formats.csr is not None
        if self._transposed:
            csc, csr = csr, csc
        return {"coo": formats.coo is not None, "csc": csc, "csr": csr}

    def restricted(self, names: Sequence[str]) -> Adjacency:
        """These edges with no more formats than the named ones; at least one of them is built.

        Formats that are there are shared. Others can still be built when they are asked for.

        Args:
            names: Among ``coo``, ``csr`` and ``csc``; the first is built where none is there.
        """
        copy = self.map(lambda array: array)
        is_built = copy.formats()
        formats = _Formats(in_degrees=copy.in_degrees(), out_degrees=copy.out_degrees())
        for name in [name for name in names if is_built[name]] or [names[0]]:
            setattr(formats, name, getattr(copy, name)())
        adj = Adjacency.__new__(Adjacency)
        like = formats.arrays()[0]
        adj._init(formats, like, self.num_src, self.num_dst, self.num_edges)
        return adj

    def memory_bytes(self) -> int:
        """Bytes of the arrays held now; one that two formats share counts once."""
        arrays = {array.data_ptr(): array for array in self._formats.arrays()}
        return sum(array.numel() * array.element_size() for array in arrays.values())


class _ArrayChange(Protocol):
    def __call__(self, array: Tensor, /) -> Tensor: ...


@runtime_checkable
class HasAdjacency(Protocol):
    """Anything that stands for the edges of one relation, such as a graph with one edge type."""

    def _single_adjacency(self) -> Adjacency: ...


def as_adjacency(graph: Adjacency | HasAdjacency) -> Adjacency:
    """The adjacency of ``graph``.

    Raises:
        TypeError: ``graph`` has none.
    """
    if isinstance(graph, Adjacency):
        return graph
    if not isinstance(graph, HasAdjacency):
        raise TypeError(
            "the first argument must be an Adjacency or a graph with one relation "
            f"(got {type(graph).__name__}); build one with Adjacency(src, dst, num_src, num_dst)"
        )
    return graph._single_adjacency()


def _compress(
    keys: Tensor, others: Tensor, num_keys: int, sorted_already: bool, ids: bool
) -> Compressed:
    """Group edges by key, within one key by ascending position; positions only if wanted."""
    kernels = None if sorted_already else kernels_for(keys.device)
    if kernels is not None:
        indptr = torch.empty(num_keys + 1, dtype=keys.dtype, device=keys.device)
        grouped, eids = torch.empty_like(others), torch.empty_like(keys) if ids else None
        kernels.group_by_key(keys, others, indptr, grouped, eids, num_threads())
        return indptr, grouped, eids
    order = None
    if not sorted_already:
        keys, order = torch.sort(keys, stable=True)
    rows = torch.arange(num_keys + 1, dtype=keys.dtype, device=keys.device)
    indptr = torch.searchsorted(keys, rows, out_int32=keys.dtype == torch.int32)
    if order is None:
        return indptr, others, None
    return indptr, others.index_select(0, order), order.to(keys.dtype) if ids else None


def _coo_from_compressed(arrays: Compressed) -> Coo:
    """(indices, rows) of each edge, in edge id order."""
    indptr, indices, eids = arrays
    rows = expand_rows(indptr, indices.shape[0])
    if eids is None:
        return indices, rows
    places = eids.long()
    first = torch.empty_like(indices)
    second = torch.empty_like(rows)
    first[places] = indices
    second[places] = rows
    return first, second


def expand_rows(indptr: Tensor, num_edges: int) -> Tensor:
    """The row that each position of a compressed format belongs to: [num_edges]."""
    rows = torch.arange(indptr.shape[0] - 1, dtype=indptr.dtype, device=indptr.device)
    return torch.repeat_interleave(rows, indptr.diff(), output_size=num_edges)


def _ascending_within_rows(indptr: Tensor, eids: Tensor) -> bool:
    if eids.numel() < 2:
        return True
    falls = eids[1:] <= eids[:-1]
    inside = torch.ones_like(falls)
    starts = indptr[1:-1].long()
    starts = starts[(starts > 0) & (starts < eids.numel())]
    inside[starts - 1] = False
    return not bool((falls & inside).any())
