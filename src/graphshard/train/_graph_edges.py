# SPDX-License-Identifier: Apache-2.0
"""Edges that a network needs and a graph lacks: self loops, and the other direction.

They are added to each rank's part when it has been read, which changes no file. What a rank adds
depends on the graph alone, not on how it was cut: a node gets a self loop from its owner, and the
reverse of an edge is sent to the owner of its source. Added edges come after those that were
there. A reverse has the features of its edge, a self loop has ``weight`` 1 and the mean of the
``feat`` of the edges into its node; fields that say what an edge is for (labels, masks) are empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from .._base.lazy_columns import LazyColumns, maker_of
from .._base.typing import CanonicalEType
from ..comm import is_initialized, rank
from ..comm.collectives import gather_int, reduce_ints
from ..comm.transport import ragged_all_to_all_alike
from ..fullbatch import ExtendedEdges, PartitionData, RelationEdges, StoredEdges
from ..partition import RangePartitionBook
from ..partition.format import etype_key

_PURPOSES = ("label", "train_mask", "val_mask", "test_mask")
"""Fields that are of one edge, not of its reverse."""

_MIX = (
    0x9E3779B97F4A7C15 - (1 << 64),
    0xBF58476D1CE4E5B9 - (1 << 64),
    0x94D049BB133111EB - (1 << 64),
)
"""Numbers of splitmix64 (https://prng.di.unimi.it/splitmix64.c), with a sign."""


def with_self_loops(data: PartitionData) -> tuple[PartitionData, int]:
    """A plain graph in which every node has a self loop; collective.

    Returns:
        The part, and how many edges were added on all ranks.
    """
    (etype,) = data.canonical_etypes
    edges, num_nodes = data.edges[etype], data.num_owned()
    lacks = torch.ones(num_nodes, dtype=torch.bool)
    for _, src_part, src, dst in edges.pieces():
        lacks[dst[(src_part == data.rank) & (src == dst)].long()] = False
    nodes = lacks.nonzero().view(-1)
    (count,) = reduce_ints([nodes.numel()])
    if not count:
        return data, 0
    here = torch.full_like(nodes, data.rank)
    fields = {}
    for name, rows in _fields(data, etype).items():
        shape = (nodes.numel(), *rows.shape[1:])
        if name == "orig_id":  # new ones, that do not depend on the parts
            fields[name] = _first_free(rows) + data.node_features[_own_ids(data)][nodes]
        elif name == "weight" and rows.is_floating_point():
            fields[name] = rows.new_ones(shape)
        elif name == "feat" and rows.is_floating_point():
            sums = torch.zeros(num_nodes, *rows.shape[1:], dtype=torch.float64)
            sums.index_add_(0, edges.dst.long(), rows.double())
            degree = torch.bincount(edges.dst.long(), minlength=num_nodes).clamp(min=1)
            means = sums / degree.view(-1, *[1] * (rows.dim() - 1))
            fields[name] = means[nodes].to(rows.dtype)
        else:
            fields[name] = _nothing(name, rows, shape)
    return _with_edges(data, {etype: (here, nodes, nodes, fields)}), count


def with_both_directions(data: PartitionData) -> tuple[PartitionData, dict[CanonicalEType, int]]:
    """A graph in which messages go both ways; collective.

    In a graph of one node type and one relation, each edge gets its reverse, if there is none. In
    others, each relation without an answer gets one, a relation ``rev_...``: where a relation goes
    from one type to another, that is any relation back; where it stays in a type, the one that is
    called so, or itself if it has the reverse of each of its edges.

    Returns:
        The part, and the relations that got edges, with their number on all ranks.
    """
    is_plain = len(data.node_type_names) == 1 and len(data.canonical_etypes) == 1
    added, counts = {}, {}
    for etype in data.canonical_etypes:
        source, name, target = etype
        if not is_plain and is_answered(etype, data.canonical_etypes):
            continue
        chosen, count = None, data.partition_book.num_edges(etype)
        if source == target:
            chosen, count = _without_reverse(data, etype)
        if not count:
            continue
        counts[etype] = count
        if is_plain:
            added[etype] = _reversed_edges(data, etype, chosen, is_same=True)
        else:
            reverses = _reversed_edges(data, etype, None, is_same=False)
            added[target, f"rev_{name}", source] = reverses
    return (_with_edges(data, added) if added else data), counts


def is_answered(etype: CanonicalEType, etypes: tuple[CanonicalEType, ...]) -> bool:
    source, name, target = etype
    if source != target:
        return any((s, t) == (target, source) for s, _, t in etypes)
    others = {n for s, n, t in etypes if (s, t) == (source, target)}
    words = ("rev", "inv", "reverse", "inverse")
    answers = {f"{w}_{name}" for w in words} | {f"{name}_{w}" for w in words}
    answers |= {name.removeprefix(f"{w}_") for w in words} | {
        name.removesuffix(f"_{w}") for w in words
    }
    return bool((answers - {name}) & others)


def _fields(data: PartitionData, etype: CanonicalEType) -> dict[str, Tensor]:
    """The features of a relation's edges, by name; those that are made for it are not kept."""
    prefix, columns = f"{etype_key(etype)}/", data.edge_features
    read = columns.passing if isinstance(columns, LazyColumns) else columns.__getitem__
    return {key.removeprefix(prefix): read(key) for key in columns if key.startswith(prefix)}


def _nothing(name: str, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Rows of a field of edges that were not there."""
    if name == "label" and rows.dtype != torch.bool:
        unknown = float("nan") if rows.is_floating_point() else -1
        return torch.full(shape, unknown).to(rows.dtype)
    return rows.new_zeros(shape)


def _first_free(ids: Tensor) -> int:
    """An id above those of all ranks; collective."""
    return reduce_ints([int(ids.max()) + 1 if ids.numel() else 0], "max")[0]


def _own_ids(data: PartitionData) -> str:
    return f"{data.node_type_names[0]}/orig_id"


def _without_reverse(data: PartitionData, etype: CanonicalEType) -> tuple[Tensor, int]:
    """The edges of a relation within a type that it lacks the reverses of; collective.

    Where what goes out of a node goes to those that what comes into it comes from, no edge of its
    lacks one. That is told by sums of hashes, of numbers for each node; edges are compared with
    each other where the sums differ alone.

    Returns:
        Their ids, ascending, and how many they are on all ranks.
    """
    edges, own = data.edges[etype], data.num_owned(etype[2])
    starts = torch.tensor(data.node_map(etype[0]).starts)
    hashes = _hashes(torch.arange(own) + starts[data.rank])
    comes = torch.zeros(own, dtype=torch.int64)
    for _, src_part, src, dst in edges.pieces():
        comes.index_add_(0, dst.long(), _hashes(starts[src_part.long()] + src))
    goes, others = edges.sum_by_source(hashes, own, data.num_parts, data.rank)
    rows, sums = _sent_to_owners(others)
    goes.index_add_(0, rows, sums)
    differs = comes != goes
    if not reduce_ints([int(differs.any())], "max")[0]:
        return torch.empty(0, dtype=torch.int64), 0
    found = [
        some.start + differs[dst.long()].nonzero().view(-1) for some, *_, dst in edges.pieces()
    ]
    ids = torch.cat([torch.empty(0, dtype=torch.int64), *found])
    # Ask the owners of the sources.
    order = torch.argsort(edges.src_part[ids], stable=True)
    asked = ids[order]
    send = torch.bincount(edges.src_part[asked].long(), minlength=data.num_parts).tolist()
    recv = _counts_from_others(send)
    dst = _exchanged(edges.src[asked].long(), send, recv)
    src = _exchanged(edges.dst[asked].long(), send, recv)
    part = torch.repeat_interleave(torch.arange(data.num_parts), torch.tensor(recv))
    is_asked = torch.zeros(own, dtype=torch.bool)
    is_asked[dst] = True
    codes = [
        _codes(data, etype, *(column[at] for column in columns))
        for _, *columns in edges.pieces()
        for at in (is_asked[columns[2].long()],)
    ]
    there = torch.cat([torch.empty(0, dtype=torch.int64), *codes])  # a part may have no edges
    lacks = ~torch.isin(_codes(data, etype, part, src, dst), there)
    answers = _exchanged(lacks.to(torch.uint8), recv, send).bool()
    lacking = asked[answers].sort().values
    return lacking, reduce_ints([lacking.numel()])[0]


def _hashes(ids: Tensor) -> Tensor:
    """A number of 64 bits for each id, any of them as likely (the end of splitmix64)."""
    mixed = ids + _MIX[0]
    for shift, factor in ((30, _MIX[1]), (27, _MIX[2])):
        mixed = (mixed ^ (mixed >> shift & ((1 << 64 - shift) - 1))) * factor
    return mixed ^ (mixed >> 31 & ((1 << 33) - 1))


def _sent_to_owners(by_part: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Rows and numbers of theirs, which each rank has for each part; collective."""
    send = [rows.numel() for rows, _ in by_part]
    recv = _counts_from_others(send)
    rows, numbers = (torch.cat(columns) for columns in zip(*by_part, strict=True))
    return _exchanged(rows, send, recv), _exchanged(numbers, send, recv)


def _exchanged(rows: Tensor, send: list[int], recv: list[int]) -> Tensor:
    return ragged_all_to_all_alike(rows, send, recv) if is_initialized() else rows


def _reversed_edges(
    data: PartitionData, etype: CanonicalEType, ids: Tensor | None, *, is_same: bool
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """The reverse of some edges, or of all, at the owners of their sources; collective.

    Args:
        ids: Ascending.
        is_same: Whether they are to be of the relation ``etype``, too.
    """
    edges = data.edges[etype]
    if ids is None:
        chosen = torch.argsort(edges.src_part, stable=True)
    else:
        chosen = ids[torch.argsort(edges.src_part[ids], stable=True)]
    send = torch.bincount(edges.src_part[chosen].long(), minlength=data.num_parts).tolist()
    recv = _counts_from_others(send)

    # What is a source becomes a destination, and the other way round.
    dst = _exchanged(edges.src[chosen].long(), send, recv)
    src = _exchanged(edges.dst[chosen].long(), send, recv)
    src_part = torch.repeat_interleave(torch.arange(data.num_parts), torch.tensor(recv))
    fields = _fields(data, etype)
    # Ids of new edges, those that dropout goes by, must be of no other edge of the relation.
    first_id = _first_free(fields["orig_id"]) if is_same and "orig_id" in fields else 0
    for name, rows in fields.items():
        if name == "orig_id":
            fields[name] = _exchanged(rows[chosen], send, recv) + first_id
        elif name in _PURPOSES:
            fields[name] = _nothing(name, rows, (src.numel(), *rows.shape[1:]))
        elif rows.dtype == torch.bool:
            fields[name] = _exchanged(rows[chosen].to(torch.uint8), send, recv).bool()
        else:
            fields[name] = _exchanged(rows[chosen].contiguous(), send, recv)
    return src_part, src, dst, fields


def _counts_from_others(send: list[int]) -> list[int]:
    if not is_initialized():
        return send
    size = len(send)
    matrix = [0] * size * size
    matrix[rank() * size : (rank() + 1) * size] = send
    return reduce_ints(matrix)[rank() :: size]


def _codes(
    data: PartitionData, etype: CanonicalEType, src_part: Tensor, src: Tensor, dst: Tensor
) -> Tensor:
    """A number for each pair of ends: source's global id, then row of the destination, here."""
    starts = torch.tensor(data.node_map(etype[0]).starts[:-1], dtype=torch.int64)
    source = starts[src_part.long()] + src
    return source * max(1, data.num_owned(etype[2])) + dst


def pair_codes(data: PartitionData, etype: CanonicalEType) -> Tensor:
    """A number for the ends of each edge.

    It is the source's global id times the number of owned destinations (1 of none), plus the row
    of the destination.
    """
    edges = data.edges[etype]
    return _codes(data, etype, edges.src_part, edges.src.long(), edges.dst.long())


def _with_edges(
    data: PartitionData,
    added: Mapping[CanonicalEType, tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]],
) -> PartitionData:
    """The part with further edges, of relations that it has or of new ones; collective."""
    etypes = (*data.canonical_etypes, *(e for e in added if e not in data.canonical_etypes))
    edges, features = dict(data.edges), data.edge_features
    made: dict[str, Callable[[], Tensor]] = {}
    for etype, (src_part, src, dst, fields) in added.items():
        before, key = edges.get(etype), etype_key(etype)
        if before is None:
            order = torch.argsort(dst, stable=True)
            edges[etype] = RelationEdges(
                src_part[order].to(torch.int32), _narrow(src[order]), _narrow(dst[order])
            )
            made |= {f"{key}/{name}": partial(_rows, rows, order) for name, rows in fields.items()}
            continue
        edges[etype] = _extended(before, RelationEdges(src_part, src, dst))
        for name, rows in fields.items():
            old = maker_of(features, f"{key}/{name}")
            made[f"{key}/{name}"] = partial(_joined, old, rows)
    columns = features if isinstance(features, LazyColumns) else LazyColumns(features, {})
    return _with_relations(data, etypes, edges, columns.with_makers(made))


def _extended(before: RelationEdges, added: RelationEdges) -> RelationEdges:
    """Edges and further ones; those in a file stay there."""
    if isinstance(before, ExtendedEdges):
        return ExtendedEdges(before.base, _extended(before.added, added))
    if isinstance(before, StoredEdges):
        return ExtendedEdges(before, added)
    return RelationEdges(
        torch.cat([before.src_part, added.src_part.to(before.src_part.dtype)]),
        torch.cat([before.src, added.src.to(before.src.dtype)]),
        torch.cat([before.dst, added.dst.to(before.dst.dtype)]),
    )


def _rows(column: Tensor, rows: Tensor) -> Tensor:
    return column[rows]


def _joined(before: Callable[[], Tensor], added: Tensor) -> Tensor:
    return torch.cat([before(), added])


def without_edges(data: PartitionData, kept: Mapping[CanonicalEType, Tensor]) -> PartitionData:
    """The part with some of the edges of some relations; collective.

    Args:
        kept: Relation to which of its edges stay, ``[num_edges]`` bool.
    """
    edges, features = dict(data.edges), dict(data.edge_features)
    for etype, is_kept in kept.items():
        of_type = edges[etype]
        edges[etype] = RelationEdges(
            of_type.src_part[is_kept], of_type.src[is_kept], of_type.dst[is_kept]
        )
        rows = _fields(data, etype).items()
        features |= {f"{etype_key(etype)}/{name}": column[is_kept] for name, column in rows}
    return _with_relations(data, tuple(data.canonical_etypes), edges, features)


def _with_relations(
    data: PartitionData,
    etypes: tuple[CanonicalEType, ...],
    edges: dict[CanonicalEType, RelationEdges],
    features: Mapping[str, Tensor],
) -> PartitionData:
    """The part with other edges, which are counted on all ranks; collective."""
    parts = range(data.num_parts)
    edge_counts = [gather_int(edges[etype].num_edges) for etype in etypes]
    edge_sizes = [[counts[part] for counts in edge_counts] for part in parts]
    node_sizes = [[data.node_map(t).size(part) for t in data.node_type_names] for part in parts]
    names = data.node_type_names, etypes
    book = RangePartitionBook.of_sizes(data.rank, *names, node_sizes, edge_sizes)
    return replace(
        data,
        partition_book=book,
        canonical_etypes=etypes,
        edge_features=features,
        edges=edges,
    )


def _narrow(rows: Tensor) -> Tensor:
    """Row numbers as int32, where they fit."""
    is_small = not rows.numel() or int(rows.max()) < 2**31
    return rows.to(torch.int32) if is_small else rows
