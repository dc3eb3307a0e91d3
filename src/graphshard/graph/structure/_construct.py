# SPDX-License-Identifier: Apache-2.0
"""Edges from a user's hands: every accepted form of one relation, checked, as an `Adjacency`.

Accepted are ``(sources, destinations)`` in tensors, arrays or lists; a list of pairs; a SciPy
sparse matrix; and ``(format, arrays)`` with format ``"coo"``, ``"csr"`` or ``"csc"``. Anything else
is a TypeError; arrays, names and counts that do not fit together are a ValueError.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..._base.typing import CanonicalEType
from ...errors import GraphTypeError, GraphValueError
from ...ops import Adjacency
from ._ids import as_integers, check_fits, check_ids, check_idtype
from ._schema import check_type_name


@dataclass(frozen=True)
class EdgeArrays:
    """One relation before its numbers of nodes are known.

    Attributes:
        form: ``"coo"``, ``"csr"`` or ``"csc"``.
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

    def to(self, device: Any) -> EdgeArrays:
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


def read_edges(data: Any, idtype: Any, device: Any, what: str = "the graph") -> EdgeArrays:
    """Read one relation in any accepted form.

    Args:
        data: See the module's docstring.
        idtype: dtype to convert ids to; None keeps that of tensors.
        device: Where to move them; None keeps them where they are.
        what: Whose edges these are, for error texts.
    """
    if idtype is not None:
        check_idtype(idtype)
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
    places = {tensor.device for tensor in given}
    place = device if len(places) > 1 else (places or {torch.device("cpu")}).pop()
    for tensor in tensors:
        if tensor.numel() and tensor.dtype == torch.int64:
            check_fits(int(tensor.max()) + 1, dtype, "nodes or edges")
    tensors = [tensor.to(device=place, dtype=dtype) for tensor in tensors]
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
            wanted = "(sources, destinations)" if count == 2 else "(indptr, indices, edge ids)"
            raise GraphValueError(f"format {form!r} takes the arrays {wanted} (got {arrays!r})")
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


def _check_alike(given: list[Tensor], idtype: Any, device: Any, what: str) -> None:
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
    if eids.shape[0] == 0:
        order = None
    else:
        if eids.shape[0] != num_edges:
            raise GraphValueError(
                f"edge ids of {what} must be none (an empty list) or one per index, {num_edges} "
                f"(got {eids.shape[0]})"
            )
        check_ids(eids, num_edges, f"an edge id of {what}", "edges")
        if int(torch.bincount(eids, minlength=num_edges).max()) > 1:
            raise GraphValueError(f"edge ids of {what} must differ (some occur twice)")
        order = eids
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
    data: Mapping[CanonicalEType, Any], idtype: Any, device: Any
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
