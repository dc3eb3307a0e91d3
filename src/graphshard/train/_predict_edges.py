# SPDX-License-Identifier: Apache-2.0
"""Predictions about edges: of those of a relation, of given pairs, and the best new ones of nodes.

Ids of nodes stay where the nodes are: those of other ranks' nodes that a rank has to write are
fetched once, as Arrow bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._base.ranges import RangeMap
from .._base.typing import CanonicalEType
from ..comm import all_reduce, is_initialized, ragged_all_to_all, rank, world_size
from ..comm.collectives import gather_int, reduce_ints, shared_errors
from ._edges import NodeRows
from ._links import Facts, LinkPredictor, rows_of_all
from ._prediction_files import read_columns
from ._tasks import widened

if TYPE_CHECKING:
    import pyarrow as pa

DEFAULT_TOP = 10
_PAIRS_AT_ONCE = 1 << 18
_QUERIES, _CANDIDATES = 1024, 8192  # of all ranks, and of this one, that are scored at once


@dataclass(frozen=True)
class Ends:
    """The two ends of a relation's edges, as this rank has them.

    Args:
        ids: This rank's nodes' ids, of sources and of destinations.
        ranges: Global ids that each rank owns, of both.
    """

    relation: CanonicalEType
    ids: tuple[pa.Array, pa.Array]
    ranges: tuple[RangeMap, RangeMap]


def fetched_ids(wanted: Tensor, ranges: RangeMap, own: pa.Array) -> pa.Array:
    """The users' ids of nodes of any rank, by global id ``[n]``; collective.

    Args:
        own: Ids of this rank's nodes, by row.
    """
    import pyarrow as pa

    distinct, places = torch.unique(wanted.cpu(), return_inverse=True)
    owner = ranges.part_of(distinct)
    rows = ranges.local_of(distinct, owner).long()
    if world_size() == 1:
        return own.take(pa.array(rows.numpy())).take(pa.array(places.numpy()))
    size = world_size()
    # Distinct ids ascend, and so do their owners.
    send = torch.bincount(owner.long(), minlength=size).tolist()
    matrix = [0] * size * size
    matrix[rank() * size : (rank() + 1) * size] = send
    recv = reduce_ints(matrix)[rank() :: size]
    asked = torch.split(ragged_all_to_all(rows, send, recv), recv)
    answers = [_as_bytes(own.take(pa.array(piece.numpy()))) for piece in asked]
    lengths = torch.tensor([len(answer) for answer in answers])
    theirs = ragged_all_to_all(lengths, [1] * size, [1] * size).tolist()
    content = torch.frombuffer(bytearray(b"".join(answers)), dtype=torch.uint8)
    received = ragged_all_to_all(content, lengths.tolist(), theirs)
    pieces = [_of_bytes(piece.numpy().tobytes()) for piece in torch.split(received, theirs)]
    # A type of its own, such as UUIDs, has no function that concatenates.
    return pa.chunked_array(pieces, own.type).take(pa.array(places.numpy())).combine_chunks()


def _as_bytes(ids: pa.Array) -> bytes:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    batch = pa.RecordBatch.from_arrays([ids], names=["id"])
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _of_bytes(content: bytes) -> pa.Array:
    import pyarrow as pa

    with pa.ipc.open_stream(content) as reader:
        return reader.read_all().column(0).combine_chunks()


def numbers_of_ids(asked: pa.Array, own: pa.Array, ranges: RangeMap) -> Tensor:
    """int64 ``[n]``, the global ids of nodes of any rank, -1 for none; collective.

    Every rank asks for the same.
    """
    import pyarrow.compute as pc

    rows = pc.index_in(asked, value_set=own).fill_null(-1).to_numpy(zero_copy_only=False)
    found = torch.from_numpy(rows.astype("int64"))
    found = torch.where(found >= 0, found + ranges.starts[rank()] + 1, 0)
    if is_initialized():
        found = all_reduce(found, "sum")
    return found - 1


@dataclass(frozen=True)
class ScoredPairs:
    """Pairs that this rank has scored, with the numbers by which they are in order."""

    numbers: Tensor
    columns: Mapping[str, Any]  # name to a pyarrow array


def score_pairs(
    path: Path,
    ends: Ends,
    rows: Mapping[str, Tensor],
    predictor: LinkPredictor,
    num_relations: int,
) -> ScoredPairs:
    """Scores of the pairs of ids in a file; each rank computes a share of them. Collective.

    Args:
        path: A table with the columns ``source`` and ``target``, or whose first two are these; of a
            graph whose edges carry relation numbers also ``relation``.
        rows: Node type to this rank's rows, that the network gave.

    Raises:
        ValueError: The file is no such table, or names nodes that are none; on every rank.
    """
    import pyarrow as pa

    source, _, target = ends.relation
    names = ("source", "target") + (("relation",) if num_relations > 1 else ())
    with shared_errors():
        types = (ends.ids[0].type, ends.ids[1].type, pa.int64())
        table = read_columns(path, names, types[: len(names)])
    numbers, scores = [], []
    device = rows[target].device
    for start in range(0, table.num_rows, _PAIRS_AT_ONCE):
        piece = table.slice(start, _PAIRS_AT_ONCE)
        sides = [
            numbers_of_ids(piece.column(side).combine_chunks(), ends.ids[side], ends.ranges[side])
            for side in (0, 1)
        ]
        _check_pairs(path, piece, sides, ends.relation, start)
        share = torch.arange(piece.num_rows).tensor_split(world_size())[rank()]
        number = torch.zeros_like(share)
        if num_relations > 1:
            number = torch.from_numpy(piece.column(2).to_numpy().copy())[share]
            _check_relations(path, number, num_relations)
        both = [
            NodeRows(ids[share].to(device), ranges)(rows[ntype])
            for ids, ranges, ntype in zip(sides, ends.ranges, (source, target), strict=True)
        ]
        queries = widened(predictor.queries(both[0], number.to(device)))
        scores.append((queries * widened(both[1])).sum(1).cpu())
        numbers.append(start + share)
    mine = torch.cat(numbers) if numbers else torch.zeros(0, dtype=torch.int64)
    found = torch.cat(scores) if scores else widened(rows[target][:0, :0]).sum(1).cpu()
    taken = table.take(pa.array(mine.numpy()))
    columns = {name: taken.column(name).combine_chunks() for name in names}
    return ScoredPairs(mine, {**columns, "score": pa.array(found.numpy())})


def _check_pairs(
    path: Path, piece: pa.Table, sides: list[Tensor], relation: CanonicalEType, start: int
) -> None:
    for side, (ids, ntype) in enumerate(zip(sides, relation[::2], strict=True)):
        missing = (ids < 0).nonzero().view(-1).tolist()
        if missing:
            column = piece.column(side)
            few = ", ".join(f"{column[n].as_py()} in row {start + n + 1}" for n in missing[:10])
            raise ValueError(
                f"{path} names nodes that are not in the graph as {('source', 'target')[side]} of "
                f"type '{ntype}' ({len(missing)} of {len(ids)}: {few}"
                f"{', ...' if len(missing) > 10 else ''}); leave these pairs out"
            )


def _check_relations(path: Path, number: Tensor, num_relations: int) -> None:
    with shared_errors():
        if number.numel() and not 0 <= int(number.min()) <= int(number.max()) < num_relations:
            raise ValueError(
                f"{path} must have relation numbers from 0 to {num_relations - 1} (got "
                f"{int(number.min())} to {int(number.max())}); number them as in training"
            )


def best_links(
    top: int,
    chosen: Tensor,
    original: Tensor,
    ends: Ends,
    rows: Mapping[str, Tensor],
    predictor: LinkPredictor,
    facts: Facts,
) -> ScoredPairs:
    """For some of this rank's sources the destinations of the highest scores; collective.

    Edges that there are, of any split, are not among them, nor is the node itself.

    Args:
        chosen: int64 ``[n]``, rows of sources, in the order of their original numbers.
        original: Original numbers of this rank's sources, by row.
        facts: The edges that there are, by source, with this rank's destinations.
    """
    import pyarrow as pa

    source, _, target = ends.relation
    device = rows[source].device
    queries = widened(predictor.queries(rows[source][chosen.to(device)], chosen.to(device) * 0))
    ids = ends.ranges[0].starts[rank()] + chosen
    scores, found = _top_of_all(
        top, queries, ids.to(device), widened(rows[target]), facts, ends, source == target
    )
    is_there = scores.isfinite()
    places = torch.arange(top).expand(len(chosen), top)[is_there]
    query = torch.arange(len(chosen)).unsqueeze(1).expand(-1, top)[is_there]
    targets = fetched_ids(found[is_there], ends.ranges[1], ends.ids[1])
    columns = {
        "source": ends.ids[0].take(pa.array(chosen[query].numpy())),
        "target": targets,
        "rank": pa.array((places + 1).numpy()),
        "score": pa.array(scores[is_there].numpy()),
    }
    return ScoredPairs(original[chosen[query]].long() * top + places, columns)


def _top_of_all(
    top: int,
    queries: Tensor,
    ids: Tensor,
    candidates: Tensor,
    facts: Facts,
    ends: Ends,
    is_same_type: bool,
) -> tuple[Tensor, Tensor]:
    """``[n, top]`` scores, -inf where there are no more, and global ids of candidates; collective.

    The queries of all ranks go to each, a block at a time; each keeps the best of its own nodes,
    which come back to the rank of the query.
    """
    size = max(1, _QUERIES // world_size())
    counts = gather_int(len(queries))
    scores, found = [], []
    for start in range(0, max(counts), size):
        part = slice(start, start + size)
        of_all, ids_of_all = (rows_of_all(values[part], size) for values in (queries, ids))
        best, best_ids = _top_here(top, of_all, ids_of_all, candidates, facts, ends, is_same_type)
        if is_initialized():
            # [rank of the query, place] to [rank of the candidates, place]
            splits = [size] * world_size()
            best = ragged_all_to_all(best, splits, splits)
            best_ids = ragged_all_to_all(best_ids, splits, splits)
            best = best.view(world_size(), size, top).transpose(0, 1).flatten(1)
            best_ids = best_ids.view(world_size(), size, top).transpose(0, 1).flatten(1)
        # Of equal scores the node of the lower global id is the first.
        best, order = best.sort(dim=1, descending=True, stable=True)
        count = len(queries[part])
        scores.append(best[:count, :top].cpu())
        found.append(best_ids.gather(1, order)[:count, :top].cpu())
    if not scores:
        empty = queries.new_zeros((0, top)).cpu()
        return empty, empty.long()
    return torch.cat(scores), torch.cat(found)


def _top_here(
    top: int,
    queries: Tensor,
    ids: Tensor,
    candidates: Tensor,
    facts: Facts,
    ends: Ends,
    is_same_type: bool,
) -> tuple[Tensor, Tensor]:
    """The best of this rank's nodes for each query."""
    first = ends.ranges[1].starts[rank()]
    query, row = facts.of_queries(ids)
    best = queries.new_full((len(queries), top), float("-inf"))
    best_ids = torch.full((len(queries), top), -1, device=queries.device)
    for start in range(0, len(candidates), _CANDIDATES):
        block = candidates[start : start + _CANDIDATES]
        found = queries @ block.T
        is_here = (row >= start) & (row < start + len(block))
        found[query[is_here], row[is_here] - start] = float("-inf")
        if is_same_type:
            own = ids - first - start
            is_own = (own >= 0) & (own < len(block))
            found[is_own.nonzero().view(-1), own[is_own]] = float("-inf")
        numbers = torch.arange(first + start, first + start + len(block), device=queries.device)
        both = torch.cat([best, found], dim=1)
        both_ids = torch.cat([best_ids, numbers.expand(len(queries), -1)], dim=1)
        best, order = both.topk(top, dim=1)
        best_ids = both_ids.gather(1, order)
    return best, best_ids
