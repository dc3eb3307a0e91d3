# SPDX-License-Identifier: Apache-2.0
"""Predictions about edges: of those of a relation, of given pairs, and the best new ones of nodes.

Ids of nodes stay where the nodes are: those of other ranks' nodes that a rank has to write are
fetched once, as Arrow bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._base.ranges import RangeMap
from .._base.typing import CanonicalEType
from ..comm import is_initialized, rank, world_size
from ..comm.collectives import all_reduce_alike, gather_int, reduce_ints, shared_errors
from ..comm.transport import ragged_all_to_all_alike
from ..data.remote_files import shown
from ..partition.format import etype_key
from ._edges import NodeRows, TargetEdges, in_order
from ._links import Facts, LinkPredictor, rows_of_all
from ._prediction_files import plain_ids, read_columns
from ._tasks import widened
from ._training_shard import TrainingShard

if TYPE_CHECKING:
    import pyarrow as pa

DEFAULT_TOP = 10
_PAIRS_AT_ONCE = 1 << 18
_QUERIES, _CANDIDATES = 1024, 8192  # of all ranks, and of this one, that are scored at once


@dataclass(frozen=True)
class Ends:
    """The nodes at the ends of some relations, as this rank has them.

    Args:
        ids: Node type to this rank's nodes' ids.
        ranges: Node type to the global ids that each rank owns.
    """

    relations: tuple[CanonicalEType, ...]
    ids: Mapping[str, pa.Array]
    ranges: Mapping[str, RangeMap]

    def ids_of(self, edges: TargetEdges, side: int) -> pa.Array:
        """The users' ids of sources (side 0) or destinations (1), of any rank; collective."""
        kinds = edges.by_type(side)
        wanted = [edges.ends(side)[places] for _, places in kinds]
        found = [
            fetched_ids(ids, self.ranges[ntype], self.ids[ntype])
            for ids, (ntype, _) in zip(wanted, kinds, strict=True)
        ]
        return _ids_in_order(found, [places for _, places in kinds])

    def of_side(self, side: int) -> dict[str, pa.Array]:
        """Node type of sources or destinations to ids; as texts, where types differ."""
        ids = {etype[2 * side]: self.ids[etype[2 * side]] for etype in self.relations}
        return dict(zip(ids, alike(list(ids.values())), strict=True))


def alike(parts: Sequence[pa.Array]) -> list[pa.Array]:
    """Ids of one Arrow type, which is text where they are of several."""
    import pyarrow as pa

    if len({str(part.type) for part in parts}) == 1:
        return list(parts)
    return [
        pa.array(map(str, part.to_pylist()), pa.large_string())
        if isinstance(part.type, pa.BaseExtensionType)  # such as UUIDs
        else part.cast(pa.large_string())
        for part in parts
    ]


def joined_ids(parts: Sequence[pa.Array]) -> pa.Array:
    """One after another, of one Arrow type."""
    import pyarrow as pa

    parts = alike(parts)
    # A type of its own, such as UUIDs, has no function that concatenates.
    return pa.chunked_array(parts, parts[0].type).combine_chunks()


def _ids_in_order(parts: Sequence[pa.Array], places: Sequence[Tensor | slice]) -> pa.Array:
    """Ids that stand in parts, each put in its place."""
    import pyarrow as pa

    if len(parts) == 1:
        return parts[0]
    order = torch.cat([p for p in places if isinstance(p, Tensor)])
    return joined_ids(parts).take(pa.array(torch.argsort(order).cpu().numpy()))


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
    asked = torch.split(ragged_all_to_all_alike(rows, send, recv), recv)
    answers = [_as_bytes(own.take(pa.array(piece.numpy()))) for piece in asked]
    lengths = torch.tensor([len(answer) for answer in answers])
    theirs = ragged_all_to_all_alike(lengths, [1] * size, [1] * size).tolist()
    content = torch.frombuffer(bytearray(b"".join(answers)), dtype=torch.uint8)
    received = ragged_all_to_all_alike(content, lengths.tolist(), theirs)
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

    found = pc.index_in(plain_ids(asked), value_set=plain_ids(own))
    rows = found.fill_null(-1).to_numpy(zero_copy_only=False)
    numbers = torch.from_numpy(rows.astype("int64"))
    numbers = torch.where(numbers >= 0, numbers + ranges.starts[rank()] + 1, 0)
    if is_initialized():
        numbers = all_reduce_alike(numbers, "sum")
    return numbers - 1


@dataclass(frozen=True)
class ScoredPairs:
    """Pairs that this rank has scored, with the numbers by which they are in order."""

    numbers: Tensor
    columns: Mapping[str, Any]  # name to a pyarrow array


class LinkScores:
    """What a model of links says of pairs that are no edges; every call is collective.

    Args:
        rows: Node type to this rank's rows, that the network gave.
    """

    def __init__(
        self,
        ends: Ends,
        rows: Mapping[str, Tensor],
        predictor: LinkPredictor,
        shard: TrainingShard,
    ) -> None:
        assert shard.links is not None
        self.ends, self._rows, self._predictor = ends, rows, predictor
        self._facts, self._num_relations = shard.links.tails, shard.links.num_relations
        self._names = shard.relation_names
        self._original = {t: ids.cpu().long() for t, ids in shard.original_ids.items()}
        self._has_numbers = len(ends.relations) == 1 and predictor.has_relations
        back = shard.task_info.reverses[0]
        has_reverses = self._has_numbers and back == ends.relations[0]
        #: Relations in which new links are looked for: reverses say the same once more.
        self._usual = list(range(self._num_relations // 2 if has_reverses else self._num_relations))
        if len(ends.relations) == 1 and not self._has_numbers:
            self._usual, self._names = [0], (etype_key(ends.relations[0]),)

    @property
    def _is_of_several(self) -> bool:
        return len(self._names) > 1

    def _etype(self, number: int) -> CanonicalEType:
        return self.ends.relations[number if len(self.ends.relations) > 1 else 0]

    def _numbers_of(self, names: Sequence[str], what: str) -> list[int]:
        """Relations by what they are called, in full or by a name that only one has, or numbers."""
        numbers: dict[str, list[int]] = {}
        for number, name in enumerate(self._names):
            numbers.setdefault(name, []).append(number)
            if not self._has_numbers:
                numbers.setdefault(self.ends.relations[number][1], []).append(number)
            elif name != str(number) and str(number) not in self._names:
                numbers.setdefault(str(number), []).append(number)
        for name in names:
            if len(numbers.get(name, ())) != 1:
                few = ", ".join(self._names[:5]) + (", ..." if len(self._names) > 5 else "")
                raise ValueError(
                    f"{what} must be relations that the model was trained on, {few} (got {name!r}, "
                    f"which {len(numbers.get(name, ()))} of {len(self._names)} are); name them as "
                    "in training"
                )
        return [numbers[name][0] for name in names]

    def of_pairs(self, path: str) -> ScoredPairs:
        """Scores of the pairs of ids in a file; each rank computes a share of them.

        Args:
            path: A table with the columns ``source`` and ``target``, or whose first two are these;
                of several relations also ``relation``, names or numbers.

        Raises:
            ValueError: The file is no such table, or names nodes that are none; on every rank.
        """
        import pyarrow as pa

        names = ("source", "target") + ("relation",) * self._is_of_several
        sides = [self.ends.of_side(side) for side in (0, 1)]
        with shared_errors():
            types = [next(iter(ids.values())).type for ids in sides]
            table, may_be_names = read_columns(path, names, [*types, pa.string()][: len(names)])
            if may_be_names and self._is_of_several:
                raise ValueError(
                    f"{shown(path)} must have the columns {', '.join(names)}; name them in its "
                    "first line"
                )
            number = torch.zeros(table.num_rows, dtype=torch.int64)
            if self._is_of_several:
                coded = table.column(2).combine_chunks().dictionary_encode()
                found = self._numbers_of(
                    coded.dictionary.to_pylist(), f"relations in {shown(path)}"
                )
                places = torch.from_numpy(coded.indices.to_numpy(zero_copy_only=False).copy())
                number = torch.tensor(found, dtype=torch.int64)[places.long()]
        if may_be_names:
            first = self._pairs(table.slice(0, 1), number[:1], sides)
            if first.src.max() < 0 and first.dst.max() < 0:  # no ids
                table, number = table.slice(1), number[1:]
        numbers, scores = [], []
        for start in range(0, table.num_rows, _PAIRS_AT_ONCE):
            piece = table.slice(start, _PAIRS_AT_ONCE)
            pairs = self._pairs(piece, number[start : start + piece.num_rows], sides)
            with shared_errors():
                _check_pairs(path, piece, pairs, start)
            share = torch.arange(piece.num_rows).tensor_split(world_size())[rank()]
            scores.append(self._scores(pairs.at(share)))
            numbers.append(start + share)
        mine = torch.cat(numbers) if numbers else torch.zeros(0, dtype=torch.int64)
        like = widened(next(iter(self._rows.values()))[:0, :0]).sum(1).cpu()
        taken = table.take(pa.array(mine.numpy()))
        columns = {name: taken.column(name).combine_chunks() for name in names}
        score = torch.cat(scores) if scores else like
        return ScoredPairs(mine, {**columns, "score": pa.array(score.numpy())})

    def _pairs(
        self, piece: pa.Table, number: Tensor, sides: Sequence[Mapping[str, pa.Array]]
    ) -> TargetEdges:
        """The pairs of ids in a table, with -1 for nodes that are none."""
        import pyarrow as pa

        several = len(self.ends.relations) > 1
        none = torch.full_like(number, -1)
        pairs = TargetEdges(
            relations=self.ends.relations,
            number=number if several else torch.zeros_like(number),
            index=none,
            src=none.clone(),
            dst=none.clone(),
            feat=None,
            categories=None,
            etype=number,
        )
        for side in (0, 1):
            ids = piece.column(side).combine_chunks()
            for ntype, places in pairs.by_type(side):
                rows = torch.arange(len(number))[places]
                asked = ids.take(pa.array(rows.numpy()))
                found = numbers_of_ids(asked, sides[side][ntype], self.ends.ranges[ntype])
                pairs.ends(side)[rows] = found
        return pairs

    def _scores(self, pairs: TargetEdges) -> Tensor:
        """``[n]``, of pairs of global ids, of any rank."""
        device = next(iter(self._rows.values())).device
        pairs = pairs.to(device)
        both = []
        for side in (0, 1):
            kinds = pairs.by_type(side)
            parts = [
                NodeRows(pairs.ends(side)[places], self.ends.ranges[ntype])(self._rows[ntype])
                for ntype, places in kinds
            ]
            both.append(in_order(parts, [places for _, places in kinds]))
        queries = widened(self._predictor.queries(both[0], pairs.etype))
        return (queries * widened(both[1])).sum(1).cpu()

    def best(self, top: int, chosen: Mapping[str, Tensor], relations: str | None) -> ScoredPairs:
        """For some of this rank's nodes the edges of the highest scores that there are not.

        Edges that there are, of any split, are not among them, nor are those of a node to itself.

        Args:
            chosen: Node type to rows of sources, int64 ``[n]``, in the order of their original
                numbers.
            relations: Names of those that count, between commas; None: all but reverses. Of each
                relation of a typed graph there are so many, of relation numbers of all together.

        Raises:
            ValueError: A name is of no relation, or of several; on every rank.
        """
        with shared_errors():
            asked = self._usual
            if relations is not None:
                asked = self._numbers_of(relations.split(","), "relations")
        # Numbers of a knowledge graph are many: the best of all together. Relations of a typed
        # graph lead to nodes of types of their own: the best of each.
        groups = [asked] if self._has_numbers else [[number] for number in asked]
        sizes = [sum(self.ends.ranges[self._etype(n)[2]].num_ids for n in some) for some in groups]
        top = min(top, max(sizes))
        parts, before = [], 0
        for ntype, rows in chosen.items():
            of_type = [some for some in groups if self._etype(some[0])[0] == ntype]
            for place, some in enumerate(of_type):
                number = before + self._original[ntype][rows] * len(of_type) + place
                parts.append(self._best_of_type(top, ntype, rows, some, number))
            before += self.ends.ranges[ntype].num_ids * len(of_type)
        return _joined(parts)

    def _best_of_type(
        self, top: int, ntype: str, rows: Tensor, asked: Sequence[int], number_of_row: Tensor
    ) -> ScoredPairs:
        """The best of some relations together, for some rows of a type."""
        import pyarrow as pa

        own = self._rows[ntype]
        ids = self.ends.ranges[ntype].starts[rank()] + rows
        given = own[rows.to(own.device)]
        best, found, of_relation = None, None, None
        for number in asked:
            _, _, target = self._etype(number)
            relation = torch.full_like(ids, number).to(own.device)
            queries = widened(self._predictor.queries(given, relation))
            codes = ids * self._num_relations + number
            scores, targets = _top_of_all(
                top,
                queries,
                codes.to(own.device),
                widened(self._rows[target]),
                self._facts,
                self.ends.ranges[target].starts[rank()],
                self._num_relations if ntype == target else None,
            )
            numbers = torch.full_like(targets, number)
            if best is None or found is None or of_relation is None:
                best, found, of_relation = scores, targets, numbers
                continue
            # Of equal scores the relation and the node that come first are the first.
            best, order = torch.cat([best, scores], 1).sort(dim=1, descending=True, stable=True)
            best, order = best[:, :top], order[:, :top]
            found = torch.cat([found, targets], 1).gather(1, order)
            of_relation = torch.cat([of_relation, numbers], 1).gather(1, order)
        assert best is not None and found is not None and of_relation is not None
        is_there = best.isfinite()
        places = torch.arange(top).expand(len(rows), top)[is_there]
        query = torch.arange(len(rows)).unsqueeze(1).expand(-1, top)[is_there]
        relation = of_relation[is_there]
        pairs = TargetEdges(
            relations=self.ends.relations,
            number=relation if len(self.ends.relations) > 1 else torch.zeros_like(relation),
            index=query,
            src=ids[query],
            dst=found[is_there],
            feat=None,
            categories=None,
            etype=relation,
        )
        columns = {
            "source": self.ends.ids[ntype].take(pa.array(rows[query].numpy())),
            "target": self.ends.ids_of(pairs, 1),
            "rank": pa.array((places + 1).numpy()),
            "score": pa.array(best[is_there].numpy()),
        }
        if self._is_of_several:
            names = pa.array(list(self._names)).take(pa.array(relation.numpy()))
            columns = {"source": columns["source"], "relation": names, **columns}
        return ScoredPairs(number_of_row[query] * top + places, columns)


def _joined(parts: Sequence[ScoredPairs]) -> ScoredPairs:
    """All of them, in the order of their numbers."""
    import pyarrow as pa

    if len(parts) == 1:
        return parts[0]
    numbers, order = torch.cat([part.numbers for part in parts]).sort()
    places = pa.array(order.numpy())
    columns = {
        name: joined_ids([part.columns[name] for part in parts]).take(places)
        for name in parts[0].columns
    }
    return ScoredPairs(numbers, columns)


def _check_pairs(path: str, piece: pa.Table, pairs: TargetEdges, start: int) -> None:
    for side in (0, 1):
        for ntype, places in pairs.by_type(side):
            rows = torch.arange(len(pairs))[places]
            missing = rows[pairs.ends(side)[rows] < 0].tolist()
            if missing:
                column = piece.column(side)
                few = ", ".join(f"{column[n].as_py()} in row {start + n + 1}" for n in missing[:10])
                raise ValueError(
                    f"{shown(path)} names nodes that are not in the graph as "
                    f"{('source', 'target')[side]} "
                    f"of type '{ntype}' ({len(missing)} of {len(rows)}: {few}"
                    f"{', ...' if len(missing) > 10 else ''}); leave these pairs out"
                )


def _top_of_all(
    top: int,
    queries: Tensor,
    codes: Tensor,
    candidates: Tensor,
    facts: Facts,
    first: int,
    num_codes: int | None,
) -> tuple[Tensor, Tensor]:
    """``[n, top]`` scores, -inf where there are no more, and global ids of candidates; collective.

    The queries of all ranks go to each, a block at a time; each keeps the best of its own nodes,
    which come back to the rank of the query.

    Args:
        codes: Of the queries, as in `Facts`.
        candidates: Rows of this rank's nodes.
        first: Global id of the first of these.
        num_codes: Codes of a node, where candidates are of the type of the queries; else None.
    """
    size = max(1, _QUERIES // world_size())
    counts = gather_int(len(queries))
    scores, found = [], []
    for start in range(0, max(counts), size):
        part = slice(start, start + size)
        of_all, codes_of_all = (rows_of_all(values[part], size) for values in (queries, codes))
        best, best_ids = _top_here(top, of_all, codes_of_all, candidates, facts, first, num_codes)
        if is_initialized():
            # [rank of the query, place] to [rank of the candidates, place]
            splits = [size] * world_size()
            best = ragged_all_to_all_alike(best, splits, splits)
            best_ids = ragged_all_to_all_alike(best_ids, splits, splits)
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
    codes: Tensor,
    candidates: Tensor,
    facts: Facts,
    first: int,
    num_codes: int | None,
) -> tuple[Tensor, Tensor]:
    """The best of this rank's nodes for each query."""
    query, row = facts.of_queries(codes)
    best = queries.new_full((len(queries), top), float("-inf"))
    best_ids = torch.full((len(queries), top), -1, device=queries.device)
    for start in range(0, len(candidates), _CANDIDATES):
        block = candidates[start : start + _CANDIDATES]
        found = queries @ block.T
        is_here = (row >= start) & (row < start + len(block))
        found[query[is_here], row[is_here] - start] = float("-inf")
        if num_codes is not None:
            own = codes // num_codes - first - start
            is_own = (own >= 0) & (own < len(block))
            found[is_own.nonzero().view(-1), own[is_own]] = float("-inf")
        numbers = torch.arange(first + start, first + start + len(block), device=queries.device)
        both = torch.cat([best, found], dim=1)
        both_ids = torch.cat([best_ids, numbers.expand(len(queries), -1)], dim=1)
        best, order = both.topk(top, dim=1)
        best_ids = both_ids.gather(1, order)
    return best, best_ids
