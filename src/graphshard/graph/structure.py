# SPDX-License-Identifier: Apache-2.0
"""Types, ids and edges of a graph, before it has any features.

`Schema` holds the node types and relations of a graph, and every way of naming one of them. A
relation is ``(source type, name, destination type)``; inside the package it is an index into
``canonical_etypes``. Node types have two sides: the types that edges leave (``srctypes``) and
those they enter (``dsttypes``). On an ordinary graph both lists are all the types and share their
data; on a block, and on a graph in which no type has both incoming and outgoing edges, they are
separate. A name that is unknown or ambiguous is a ValueError; so is None where there are several.

The functions below it take ids and edges from a user's hands, and return checked tensors or raise
an error that says what is wrong. What is no integer, or no id type, is a TypeError; what does not
fit the graph is a ValueError. Edges are accepted as ``(sources, destinations)`` in tensors, arrays
or lists; as a list of pairs; as a SciPy sparse matrix; and as ``(format, arrays)`` with format
``"coo"``, ``"csr"`` or ``"csc"``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeVar

import torch
from torch import Tensor

from .._base.files import check_text
from .._base.typing import INDEX_DTYPES, CanonicalEType, Device, EType, Ids
from ..errors import GraphTypeError, GraphValueError
from ..ops import Adjacency

NID: Final = "_ID"
EID: Final = "_ID"
NTYPE: Final = "_TYPE"
ETYPE: Final = "_TYPE"
_MAX_BYTES = 1024
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_FULL = slice(None, None, None)
Key = TypeVar("Key")


class All:
    """The type of `ALL`."""

    def __repr__(self) -> str:
        return "ALL"

    def __reduce__(self) -> str:
        return "ALL"


ALL: Final = All()
"""Stands for every node or every edge."""


def is_all(ids: object) -> bool:
    """Whether ``ids`` is `ALL` (DGL's own marker, the string ``__ALL__``, counts too)."""
    return ids is ALL or (isinstance(ids, str) and ids == "__ALL__")


def check_type_name(name: object, what: str) -> str:
    """Return ``name`` if it can name a type, in files and messages too: any line of text can.

    A relation between two types needs no name of its own, as in DGL: its name may be empty.
    """
    if not isinstance(name, str):
        raise GraphTypeError(f"{what} must be a string (got {name!r}); for example 'user'")
    try:
        size = len(check_text(name, what).encode())
    except ValueError as error:
        raise GraphValueError(str(error)) from None
    is_too_short = not size and what != "a relation name"
    if is_too_short or size > _MAX_BYTES or _CONTROL.search(name):
        raise GraphValueError(
            f"{what} must be a non-empty line of text of up to {_MAX_BYTES} bytes, without control "
            f"characters (got {name!r:.80}, {size} bytes); rename it"
        )
    return name


class Schema:
    """The types of one graph; immutable, shared by all views and copies of it.

    Args:
        ntypes: All node types, in the order that ``ntypes`` reports.
        srctypes: The source side. Equal to ``dsttypes`` when the sides are one.
        split: Whether source and destination sides are separate sets of nodes.
    """

    def __init__(
        self,
        ntypes: Sequence[str],
        srctypes: Sequence[str],
        dsttypes: Sequence[str],
        canonical_etypes: Sequence[CanonicalEType],
        split: bool,
    ) -> None:
        self.ntypes = list(ntypes)
        self.srctypes = list(srctypes)
        self.dsttypes = list(dsttypes)
        self.canonical_etypes = [(s, e, d) for s, e, d in canonical_etypes]
        self.etypes = [name for _, name, _ in self.canonical_etypes]
        self.split = split
        self._src_index = {name: i for i, name in enumerate(self.srctypes)}
        self._dst_index = {name: i for i, name in enumerate(self.dsttypes)}
        self._relation_index = {etype: i for i, etype in enumerate(self.canonical_etypes)}
        self._by_name: dict[str, list[int]] = {}
        for i, name in enumerate(self.etypes):
            self._by_name.setdefault(name, []).append(i)
        self.src_of = [self._src_index[s] for s, _, _ in self.canonical_etypes]
        self.dst_of = [self._dst_index[d] for _, _, d in self.canonical_etypes]
        self._single: dict[int, Schema] = {}

    @classmethod
    def of_graph(cls, ntypes: Sequence[str], canonical_etypes: Sequence[CanonicalEType]) -> Schema:
        """Schema of a graph that is not a block; the sides split where no type is on both."""
        sources = {s for s, _, _ in canonical_etypes}
        destinations = {d for _, _, d in canonical_etypes}
        if len(ntypes) < 2 or sources & destinations:
            return cls(ntypes, ntypes, ntypes, canonical_etypes, split=False)
        srctypes = sorted(name for name in ntypes if name not in destinations)
        return cls(ntypes, srctypes, sorted(destinations), canonical_etypes, split=True)

    @classmethod
    def of_block(
        cls,
        srctypes: Sequence[str],
        dsttypes: Sequence[str],
        canonical_etypes: Sequence[CanonicalEType],
    ) -> Schema:
        """Schema of a block: the sides are separate even where a type is on both."""
        ntypes = [*srctypes, *dsttypes]
        return cls(ntypes, srctypes, dsttypes, canonical_etypes, split=True)

    @classmethod
    def of_relation(cls, etype: CanonicalEType, split: bool) -> Schema:
        """Schema of one relation alone."""
        source, _, destination = etype
        if split:
            return cls.of_block([source], [destination], [etype])
        return cls([source], [source], [source], [etype], split=False)

    def single(self, relation: int) -> Schema:
        """Schema of the view that holds one relation alone."""
        schema = self._single.get(relation)
        if schema is None:
            etype = self.canonical_etypes[relation]
            schema = self._single[relation] = Schema.of_relation(
                etype, self.split or etype[0] != etype[2]
            )
        return schema

    def relation(self, etype: EType | None) -> int:
        """Index of a relation given by name, by triple, or by None when there is only one."""
        if etype is None:
            if len(self.canonical_etypes) != 1:
                raise GraphValueError(
                    f"etype must be given because the graph has {len(self.etypes)} relations: "
                    f"one of {self.canonical_etypes}"
                )
            return 0
        if isinstance(etype, str):
            indices = self._by_name.get(etype, ())
            if len(indices) == 1:
                return indices[0]
            if indices:
                triples = [self.canonical_etypes[i] for i in indices]
                raise GraphValueError(
                    f"etype {etype!r} is ambiguous, {len(indices)} relations have that name; "
                    f"give one of the triples {triples}"
                )
        else:
            triple = (etype[0], etype[1], etype[2]) if is_triple(etype) else None
            if triple in self._relation_index:
                return self._relation_index[triple]
        raise GraphValueError(f"no relation {etype!r}; the graph has {self.canonical_etypes}")

    def find(self, key: Any) -> list[int]:
        """Indices of the relations that match ``g[key]``.

        Args:
            key: A relation's name, ``"_"`` or ``:`` for all of them, or a triple in which each
                place is a name, ``:`` or ``"_"``.
        """
        pattern = key if isinstance(key, tuple) else (_FULL, key, _FULL)
        if len(pattern) != 3 or not all(isinstance(x, str) or x == _FULL for x in pattern):
            raise GraphTypeError(
                f"a graph is sliced as g['etype'] or g['srctype', 'etype', 'dsttype'], with ':' "
                f"for any (got {key!r})"
            )
        exact = self._relation_index.get(pattern) if is_triple(pattern) else None
        if exact is not None:
            return [exact]
        places = [set(self.srctypes), set(self.etypes), set(self.dsttypes)]
        free = [
            x == _FULL or (x == "_" and x not in p) for x, p in zip(pattern, places, strict=True)
        ]
        matches = [
            i
            for i, etype in enumerate(self.canonical_etypes)
            if all(f or x == y for f, x, y in zip(free, pattern, etype, strict=True))
        ]
        if not matches:
            raise GraphValueError(
                f"no relation matches {key!r}; the graph has {self.canonical_etypes}"
            )
        return matches

    def src_id(self, ntype: str | None) -> int:
        """Index into ``srctypes``; None means the only one."""
        return self._side(self._src_index, self.srctypes, ntype, "source node type")

    def dst_id(self, ntype: str | None) -> int:
        """Index into ``dsttypes``; None means the only one."""
        return self._side(self._dst_index, self.dsttypes, ntype, "destination node type")

    def node_id(self, ntype: str | None) -> tuple[str, int]:
        """Where the nodes of a type are: ("src" or "dst", index on that side).

        On a block a name means its source nodes, unless only destinations have it; the prefixes
        ``SRC/`` and ``DST/`` choose a side.
        """
        if ntype is None:
            if self.split or len(self.ntypes) != 1:
                raise GraphValueError(
                    f"ntype must be given because the graph has several node types: one of "
                    f"{sorted(set(self.ntypes))}"
                )
            return "src", 0
        if isinstance(ntype, str):
            if ntype in self._src_index:
                return "src", self._src_index[ntype]
            if ntype in self._dst_index:
                return "dst", self._dst_index[ntype]
            if self.split and ntype.startswith("SRC/"):
                return "src", self.src_id(ntype[4:])
            if self.split and ntype.startswith("DST/"):
                return "dst", self.dst_id(ntype[4:])
        raise GraphValueError(f"no node type {ntype!r}; the graph has {sorted(set(self.ntypes))}")

    @staticmethod
    def _side(index: dict[str, int], names: list[str], ntype: str | None, what: str) -> int:
        if ntype is None:
            if len(names) != 1:
                raise GraphValueError(
                    f"the {what} must be given because there are several: {names}"
                )
            return 0
        number = index.get(ntype)
        if number is None:
            raise GraphValueError(f"no {what} {ntype!r}; the graph has {names}")
        return number


def is_triple(etype: object) -> bool:
    """Whether this could be a relation, as three names."""
    if not isinstance(etype, tuple | list):
        return False
    return len(etype) == 3 and all(isinstance(name, str) for name in etype)


def joined_name(names: Iterable[str]) -> str:
    """Name of a type that stands for several, as in DGL: sorted and joined by '+'."""
    return "+".join(sorted(names))


_MAX_INT32 = 2**31 - 1


# ------------------------------------------------------------------ ids


def as_integers(ids: Any, what: str) -> Tensor:
    """A one-dimensional integer tensor from a tensor, an array, a sequence or one number.

    Tensors keep dtype and device if they are int32 or int64; other integers become int64.
    """
    if isinstance(ids, Tensor):
        tensor = ids
    else:
        if not hasattr(ids, "__array__") and hasattr(ids, "__iter__"):
            ids = list(ids)
        try:
            # A copy, so that a graph never changes with an array that a caller reuses.
            tensor = torch.tensor(ids)
        except (TypeError, ValueError, RuntimeError) as error:
            raise GraphTypeError(
                f"{what} must be integers in a tensor, an array or a flat list (got "
                f"{type(ids).__name__}: {error})"
            ) from None
        if tensor.numel() == 0 and isinstance(ids, list):
            tensor = torch.empty(0, dtype=torch.int64)
    if tensor.dtype == torch.bool:
        raise GraphTypeError(
            f"{what} must be integers, not a mask of bools; give mask.nonzero().squeeze(1)"
        )
    if tensor.is_floating_point() or tensor.is_complex():
        raise GraphTypeError(f"{what} must be integers (got {tensor.dtype}); convert with .long()")
    if tensor.dim() > 1:
        raise GraphValueError(f"{what} must have one dimension (got shape {tuple(tensor.shape)})")
    tensor = tensor.reshape(-1)
    return tensor if tensor.dtype in INDEX_DTYPES else tensor.long()


def id_tensor(ids: Ids, what: str, idtype: torch.dtype, device: torch.device) -> Tensor:
    """Ids as a graph of ``idtype`` on ``device`` uses them; a tensor must match already."""
    tensor = as_integers(ids, what)
    if not isinstance(ids, Tensor):
        return tensor.to(device=device, dtype=idtype)
    if tensor.dtype != idtype:
        raise GraphValueError(
            f"{what} must have the graph's idtype {idtype} (got {tensor.dtype}); convert them "
            f"with .to({idtype}), or the graph with .int() or .long()"
        )
    if tensor.device != device:
        raise GraphValueError(
            f"{what} must be on the graph's device {device} (got {tensor.device}); move either "
            f"with .to(device)"
        )
    return tensor


def check_ids(ids: Tensor, stop: int, what: str, of: str) -> None:
    """Raise unless every id is in ``[0, stop)``.

    Args:
        what: An id of what ("a node id").
        of: What there are ``stop`` of ("nodes of type 'user'").
    """
    if ids.numel() == 0:
        return
    low, high = (int(bound) for bound in ids.aminmax())
    if low < 0 or high >= stop:
        raise GraphValueError(
            f"{what} must be in [0, {stop}) because there are {stop} {of} (got "
            f"{low if low < 0 else high})"
        )


def paired(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Both ends of some edges at equal length, where one of the two may be one id for all."""
    if u.shape != v.shape:
        if 1 not in (u.shape[0], v.shape[0]):
            raise GraphValueError(
                f"u and v must have equal lengths, or one of them length 1 (got {u.shape[0]} and "
                f"{v.shape[0]})"
            )
        size = u.shape[0] if v.shape[0] == 1 else v.shape[0]
        u, v = u.expand(size), v.expand(size)
    return u, v


def by_first_occurrence(ids: Tensor) -> Tensor:
    """The distinct ids, in the order in which they first occur."""
    distinct, group = torch.unique(ids, return_inverse=True)
    return distinct[places_of(group, distinct.shape[0]).argsort()]


def places_of(ids: Tensor, count: int, which: Literal["first", "last"] = "first") -> Tensor:
    """``[count]`` place of each id in ``ids``, the first or the last of several; -1 if none."""
    positions = torch.arange(ids.shape[0], dtype=ids.dtype, device=ids.device)
    places = torch.full((count,), -1, dtype=ids.dtype, device=ids.device)
    reduce = "amin" if which == "first" else "amax"
    return places.scatter_reduce_(0, ids.long(), positions, reduce, include_self=False)


def row_positions(begin: Tensor, counts: Tensor) -> Tensor:
    """int64: for rows that begin somewhere, the places of all that is in them, row by row."""
    before = counts.cumsum(0) - counts
    shift = (begin - before).to(torch.int64).repeat_interleave(counts)
    return torch.arange(len(shift), device=shift.device) + shift


def check_fits(count: int, idtype: torch.dtype, what: str) -> None:
    """Raise where ids of ``count`` things do not fit in ``idtype``."""
    if idtype == torch.int32 and count > _MAX_INT32:
        raise GraphValueError(
            f"int32 ids reach {_MAX_INT32} (got {count} {what}); use idtype=torch.int64"
        )


# ------------------------------------------------------------------ numbers of batches


def read_batch_counts(given: Any, names: Sequence[Key], what: str) -> dict[Key, Tensor]:
    """Counts per graph from a user's hands.

    Args:
        given: A tensor, where there is one type; or type -> tensor, for every type.

    Returns:
        Type -> ``[batch_size]`` int64.
    """
    if not isinstance(given, Mapping):
        if len(names) != 1:
            raise GraphTypeError(
                f"numbers of {what} must be a dictionary from type to tensor because there are "
                f"several types {list(names)} (got {type(given).__name__})"
            )
        given = {names[0]: given}
    missing = [name for name in names if name not in given]
    if missing:
        raise GraphValueError(f"numbers of {what} must be given for every type (missing {missing})")
    counts = {}
    for name in names:
        value = torch.as_tensor(given[name])
        if value.dim() != 1 or (value.numel() and int(value.min()) < 0):
            raise GraphValueError(
                f"numbers of {what} per graph must be one row of numbers from 0 (got {value} for "
                f"{name!r})"
            )
        counts[name] = value.long()
    if len({count.shape for count in counts.values()}) > 1:
        lengths = {name: count.shape[0] for name, count in counts.items()}
        raise GraphValueError(f"every type must have as many graphs as the others (got {lengths})")
    return counts


def kept_counts(counts: Tensor, stays: Tensor) -> Tensor:
    """Counts per graph after some rows are dropped.

    Args:
        counts: ``[batch_size]`` rows of each graph, one after another.
        stays: ``[num_rows]`` bool, which of them stay.
    """
    ends = torch.cat([stays.new_zeros(1, dtype=torch.int64), stays.long().cumsum(0)])
    counts = counts.to(stays.device)
    stops = counts.cumsum(0)
    return ends[stops] - ends[stops - counts]


# ------------------------------------------------------------------ edges


@dataclass(frozen=True)
class EdgeArrays:
    """One relation before its numbers of nodes are known.

    Attributes:
        arrays: (sources, destinations); or (indptr, indices, edge ids or None).
        min_src: Number of source nodes that the edges ask for at least.
        min_dst: The same for destinations.
    """

    form: str
    arrays: tuple[Tensor, Tensor, Tensor | None]
    min_src: int
    min_dst: int

    @property
    def idtype(self) -> torch.dtype:
        return self.arrays[0].dtype

    @property
    def device(self) -> torch.device:
        return self.arrays[0].device

    def to(self, device: Device) -> EdgeArrays:
        first, second, eids = self.arrays
        moved = first.to(device), second.to(device), None if eids is None else eids.to(device)
        return replace(self, arrays=moved)

    def adjacency(self, num_src: int, num_dst: int) -> Adjacency:
        """The edges between ``num_src`` and ``num_dst`` nodes; both are large enough."""
        first, second, eids = self.arrays
        if self.form == "coo":
            return Adjacency(first, second, num_src, num_dst, check=False)
        num_keys, num_others = (num_dst, num_src) if self.form == "csc" else (num_src, num_dst)
        padding = num_keys + 1 - first.shape[0]
        indptr = torch.cat([first, first[-1:].expand(padding)]) if padding else first
        grouped = Adjacency.from_csc(indptr, second, eids, num_others, num_keys, check=False)
        return grouped if self.form == "csc" else grouped.reverse()


def read_edges(
    data: Any, idtype: torch.dtype | None, device: Device | None, what: str = "the graph"
) -> EdgeArrays:
    """Read one relation in any accepted form.

    Args:
        idtype: dtype to convert ids to; None keeps that of tensors.
    """
    if idtype is not None and idtype not in INDEX_DTYPES:
        raise GraphTypeError(f"idtype must be torch.int32 or torch.int64 (got {idtype!r})")
    form, parts, shape = _split(data, what)
    names = ("sources", "destinations") if form == "coo" else ("indptr", "indices", "edge ids")
    tensors = [
        as_integers(part, f"{name} of {what}") for name, part in zip(names, parts, strict=True)
    ]
    given = [
        tensor for tensor, part in zip(tensors, parts, strict=True) if isinstance(part, Tensor)
    ]
    _check_alike(given, idtype, device, what)
    dtype = idtype or (given[0].dtype if given else torch.int64)
    # Checks read values, so they run where the ids are; then the ids move, if they have to.
    devices = {tensor.device for tensor in given}
    shared_device = device if len(devices) > 1 else (devices or {torch.device("cpu")}).pop()
    for tensor in tensors:
        if tensor.numel() and tensor.dtype == torch.int64:
            check_fits(int(tensor.max()) + 1, dtype, "nodes or edges")
    tensors = [tensor.to(device=shared_device, dtype=dtype) for tensor in tensors]
    if form == "coo":
        edges = _read_coo(tensors[0], tensors[1], shape, what)
    else:
        edges = _read_compressed(form, tensors, what)
    return edges if device is None else edges.to(device)


def _split(data: Any, what: str) -> tuple[str, list[Any], tuple[int, int]]:
    """(format, arrays, least (source, destination) counts)."""
    if hasattr(data, "tocoo"):
        matrix = data.tocoo()
        shape = (int(matrix.shape[0]), int(matrix.shape[1]))
        return "coo", [matrix.row, matrix.col], shape
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], str):
        form, arrays = data
        count = {"coo": 2, "csr": 3, "csc": 3}.get(form)
        if count is None:
            raise GraphValueError(
                f"the format of {what}'s edges must be 'coo', 'csr' or 'csc' (got {form!r})"
            )
        if not isinstance(arrays, tuple | list) or len(arrays) != count:
            expected = "(sources, destinations)" if count == 2 else "(indptr, indices, edge ids)"
            raise GraphValueError(f"format {form!r} takes the arrays {expected} (got {arrays!r})")
        return form, list(arrays), (0, 0)
    if isinstance(data, tuple):
        if len(data) != 2:
            raise GraphValueError(
                f"edges of {what} must be (sources, destinations) (got {len(data)} entries)"
            )
        return "coo", list(data), (0, 0)
    if isinstance(data, list) and all(isinstance(pair, tuple | list) for pair in data):
        if any(len(pair) != 2 for pair in data):
            raise GraphValueError(
                f"edges of {what} in a list must be pairs (source, destination); to give two lists "
                f"of ids, put them in a tuple"
            )
        return "coo", [[pair[0] for pair in data], [pair[1] for pair in data]], (0, 0)
    if isinstance(data, Tensor):
        raise GraphTypeError(
            f"edges of {what} must be two tensors (got one of shape {tuple(data.shape)}); give "
            f"(edge_index[0], edge_index[1]), or use from_edge_index"
        )
    raise GraphTypeError(
        f"edges of {what} must be (sources, destinations), a list of pairs, a SciPy sparse matrix "
        f"or (format, arrays) (got {type(data).__name__})"
    )


def _check_alike(
    given: list[Tensor], idtype: torch.dtype | None, device: Device | None, what: str
) -> None:
    if device is None and len({tensor.device for tensor in given}) > 1:
        raise GraphValueError(
            f"ids of {what} must be on one device (got {[str(t.device) for t in given]}); move "
            f"them, or give device"
        )
    if idtype is None and len({tensor.dtype for tensor in given}) > 1:
        raise GraphValueError(
            f"ids of {what} must have one dtype (got {[t.dtype for t in given]}); convert them, or "
            f"give idtype"
        )


def _read_coo(src: Tensor, dst: Tensor, shape: tuple[int, int], what: str) -> EdgeArrays:
    if src.shape != dst.shape:
        raise GraphValueError(
            f"edges of {what} must have as many sources as destinations (got {src.shape[0]} and "
            f"{dst.shape[0]})"
        )
    counts = [
        max(least, _least_count(ids, f"{name} of {what}"))
        for least, name, ids in zip(shape, ("sources", "destinations"), (src, dst), strict=True)
    ]
    return EdgeArrays("coo", (src, dst, None), counts[0], counts[1])


def _read_compressed(form: str, tensors: list[Tensor], what: str) -> EdgeArrays:
    indptr, indices, eids = tensors
    num_edges = int(indices.shape[0])
    if (
        indptr.shape[0] == 0
        or int(indptr[0]) != 0
        or int(indptr[-1]) != num_edges
        or bool((indptr[1:] < indptr[:-1]).any())
    ):
        raise GraphValueError(
            f"indptr of {what} must ascend from 0 to the number of indices, {num_edges} (got "
            f"{indptr[:8].tolist()}{'...' if indptr.shape[0] > 8 else ''})"
        )
    order = eids if eids.shape[0] else None
    if order is not None:
        if eids.shape[0] != num_edges:
            raise GraphValueError(
                f"edge ids of {what} must be none (an empty list) or one per index, {num_edges} "
                f"(got {eids.shape[0]})"
            )
        check_ids(eids, num_edges, f"an edge id of {what}", "edges")
        if int(torch.bincount(eids, minlength=num_edges).max()) > 1:
            raise GraphValueError(f"edge ids of {what} must differ (some occur twice)")
    num_keys = int(indptr.shape[0]) - 1
    num_others = _least_count(indices, f"indices of {what}")
    least = (num_others, num_keys) if form == "csc" else (num_keys, num_others)
    return EdgeArrays(form, (indptr, indices, order), *least)


def _least_count(ids: Tensor, what: str) -> int:
    if ids.numel() == 0:
        return 0
    low, high = (int(bound) for bound in ids.aminmax())
    if low < 0:
        raise GraphValueError(f"{what} must not be negative (got {low})")
    return high + 1


def check_count(count: Any, least: int, idtype: torch.dtype, what: str) -> int:
    """Return a user's number of nodes if the edges fit in it."""
    if isinstance(count, bool) or not hasattr(count, "__index__"):
        raise GraphTypeError(f"the number of {what} must be an integer (got {count!r})")
    number = int(count)
    if number < 0:
        raise GraphValueError(f"the number of {what} must not be negative (got {number})")
    if number < least:
        raise GraphValueError(
            f"the number of {what} must be larger than every id (got {number}, and an edge with id "
            f"{least - 1}); give at least {least}"
        )
    check_fits(number, idtype, what)
    return number


def read_relations(
    data: Mapping[CanonicalEType, Any], idtype: torch.dtype | None, device: Device | None
) -> dict[CanonicalEType, EdgeArrays]:
    """Read all relations of a typed graph, in sorted order."""
    if not isinstance(data, Mapping):
        raise GraphTypeError(
            f"relations must be a dictionary from (source type, name, destination type) to edges "
            f"(got {type(data).__name__})"
        )
    if not data:
        raise GraphValueError(
            "a graph needs at least one relation (got none); it may have no edges"
        )
    for key in data:
        if not isinstance(key, tuple) or len(key) != 3:
            raise GraphTypeError(
                f"a relation must be named by (source type, name, destination type) (got {key!r})"
            )
        for name, what in zip(key, ("a node type", "a relation name", "a node type"), strict=True):
            check_type_name(name, what)
    read = {key: read_edges(data[key], idtype, device, f"relation {key}") for key in sorted(data)}
    idtypes = {key: edges.idtype for key, edges in read.items()}
    if len(set(idtypes.values())) > 1:
        raise GraphValueError(f"all relations must have one idtype (got {idtypes}); give idtype")
    devices = {key: str(edges.device) for key, edges in read.items()}
    if len(set(devices.values())) > 1:
        raise GraphValueError(f"all relations must be on one device (got {devices}); give device")
    return read


def least_counts(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Largest count per type, types sorted."""
    counts: dict[str, int] = {}
    for ntype, count in pairs:
        counts[ntype] = max(count, counts.get(ntype, 0))
    return dict(sorted(counts.items()))


def checked_counts(
    given: Mapping[str, Any] | None,
    least: Mapping[str, int],
    idtype: torch.dtype,
    what: str,
) -> dict[str, int]:
    """Number of nodes per type: the given numbers, checked, or what the edges ask for."""
    if given is None:
        return dict(least)
    if not isinstance(given, Mapping):
        raise GraphTypeError(
            f"numbers of {what} must be a dictionary from type to number (got {given!r})"
        )
    missing = [ntype for ntype in least if ntype not in given]
    if missing:
        raise GraphValueError(
            f"numbers of {what} must name every type in the relations (missing {missing}); add "
            f"them, or leave the whole dictionary out"
        )
    return {
        check_type_name(ntype, "a node type"): check_count(
            given[ntype], least.get(ntype, 0), idtype, f"{what} of type {ntype!r}"
        )
        for ntype in sorted(given)
    }
