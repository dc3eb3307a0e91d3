# SPDX-License-Identifier: Apache-2.0
"""Link prediction: edges held out of the structure, negatives, and filtered ranks.

An edge ``(u, r, v)`` has the score ``sum(h_u * w_r * h_v)``, without ``w_r`` where there is one
relation. Relations are those of a typed graph that the task is on, or the numbers that edges of a
plain graph carry. In training an edge is told from pairs ``(u, r, v')`` whose ends ``v'`` are
drawn, the same for all edges of a step; in an evaluation, from those with all nodes ``v'`` of the
type that are not known to be right, in any split. Where edges carry relation numbers, ``(u', r,
v)`` too.

[Note: ranks]
    The ranks of an evaluation are exact. A rank of the process group sends its queries, ``h_u *
    w_r`` and the score of the right answer, to all others, a block at a time; each counts how many
    of its own nodes have a higher score, a block of nodes at a time, and the counts are summed. So
    memory does not grow with the graph. What is known of a query is looked up by the rank that owns
    the candidates: the edges into its nodes are its own, those out of them are sent to it once.
    Of nodes with the score of the right answer, up to rounding, half are ahead of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .._base.ranges import RangeMap
from .._base.typing import CanonicalEType
from ..comm import anchor, is_initialized, rank, world_size
from ..comm.collectives import all_gather, all_reduce_alike, gather_int, reduce_ints
from ..comm.group import group_state
from ..comm.transport import ragged_all_to_all_alike
from ..fullbatch import PartitionData
from ..ops.counter_random import key_state, states, unit, word
from ._edges import EndRows, RaggedIds, TargetEdges
from ._graph_edges import pair_codes, without_edges
from ._tasks import HITS, Links, widened

_QUERIES, _CANDIDATES = 1024, 8192  # of all ranks, and of this one, that are scored at once
_SCORES = 2**24  # of a block of edges with negatives, whose gradient is computed at once
_DOMAIN = 0x9D39247E33776D41


@dataclass(frozen=True)
class Facts:
    """Edges of the target relation, of all splits and of none, from the view of one of their ends.

    Args:
        code: int64 ``[n]``, ascending: the other end's id times the number of relations, plus the
            relation.
        row: int64 ``[n]``, the end's row on this rank.
    """

    code: Tensor
    row: Tensor

    @classmethod
    def of(cls, other: Tensor, relation: Tensor, num_relations: int, row: Tensor) -> Facts:
        code = other * num_relations + relation
        order = torch.argsort(code, stable=True)
        return cls(code[order], row[order])

    def to(self, device: torch.device) -> Facts:
        return Facts(self.code.to(device), self.row.to(device))

    def of_queries(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Number of the query, and row, of each answer that is known."""
        first = torch.searchsorted(self.code, codes)
        count = torch.searchsorted(self.code, codes, right=True) - first
        query = torch.repeat_interleave(torch.arange(len(codes), device=codes.device), count)
        within = torch.arange(len(query), device=codes.device)
        within -= (count.cumsum(0) - count)[query]
        return query, self.row[first[query] + within]


@dataclass(frozen=True)
class LinkFacts:
    """What is known of links; for ranks into the destinations, and into the sources.

    Args:
        tails: By source, whose rows are destinations.
        heads: By destination, whose rows are sources; None where sources are not ranked.
    """

    tails: Facts
    heads: Facts | None
    num_relations: int

    def to(self, device: torch.device) -> LinkFacts:
        heads = None if self.heads is None else self.heads.to(device)
        return replace(self, tails=self.tails.to(device), heads=heads)


class LinkPredictor(nn.Module):
    """Scores pairs by their rows: a dot product, or with a factor for each column and relation.

    Dropout falls on the rows of the ends that are given. With factors it is DistMult, of Yang et
    al., `Embedding Entities and Relations for Learning and Inference in Knowledge Bases
    <https://arxiv.org/abs/1412.6575>`_.
    """

    def __init__(self, width: int, num_relations: int | None, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        if num_relations is not None:
            self.relations = nn.Parameter(torch.empty(num_relations, width))
            nn.init.normal_(self.relations, 1.0, 0.1)
        self.has_relations = num_relations is not None

    def queries(self, rows: Tensor, relation: Tensor) -> Tensor:
        """``[n, width]``, whose products with the rows of other ends are the scores."""
        rows = self.dropout(rows)
        return rows * self.relations.index_select(0, relation) if self.has_relations else rows


# ----------------------------------------------------------------------------- structure


def held_out(
    data: PartitionData,
    is_evaluated: Mapping[CanonicalEType, Tensor],
    reverse_of: Mapping[CanonicalEType, CanonicalEType | None],
    etype: Tensor | None,
    num_relations: int,
) -> tuple[PartitionData, dict[CanonicalEType, Tensor]]:
    """The part without the edges that are evaluated, and their reverses; collective.

    Args:
        is_evaluated: Relation to ``[num_edges]`` bool.
        reverse_of: The relation of the reverses; where it is the same, and edges have relation
            numbers, that of a reverse is further by half of their number.
        etype: Relation numbers of the edges of the only relation, or None.

    Returns:
        The part, and for each relation that lost edges, which of them are left.
    """
    kept = {relation: ~lost for relation, lost in is_evaluated.items()}
    for relation, lost in is_evaluated.items():
        back = reverse_of[relation]
        if back is None:
            continue
        chosen = lost.nonzero().view(-1)
        number = None if etype is None else (etype[chosen] + num_relations // 2) % num_relations
        src, dst = global_ends(data, relation)
        pairs, _ = sent_to_sources(data, relation, src[chosen], dst[chosen], number)
        wanted = _wanted(data, back, pairs, etype, num_relations)
        is_left = ~torch.isin(_pair_codes(data, back, etype, num_relations), wanted)
        kept[back] = kept.get(back, torch.ones_like(is_left)) & is_left
    return without_edges(data, kept), kept


def _pair_codes(
    data: PartitionData, etype: CanonicalEType, number: Tensor | None, num_relations: int
) -> Tensor:
    """A number for the ends of each edge, and its relation number where there are any."""
    codes = pair_codes(data, etype)
    return codes if number is None else codes * num_relations + number


def _wanted(
    data: PartitionData,
    etype: CanonicalEType,
    pairs: Tensor,
    number: Tensor | None,
    num_relations: int,
) -> Tensor:
    """The same of pairs ``[n, 3]``: global id of a source, row of a destination, number."""
    codes = pairs[:, 0] * max(1, data.num_owned(etype[2])) + pairs[:, 1]
    return codes if number is None else codes * num_relations + pairs[:, 2]


class Route(NamedTuple):
    """How rows have been sent, by which answers come back."""

    order: Tensor  # of the rows by receiver
    send: list[int]
    recv: list[int]

    def answered(self, answers: Tensor) -> Tensor:
        """Answers for the rows that came, as those who sent them had them; collective."""
        back = (
            ragged_all_to_all_alike(answers, self.recv, self.send) if world_size() > 1 else answers
        )
        return back.index_select(0, torch.argsort(self.order))


def global_ends(data: PartitionData, relation: CanonicalEType) -> tuple[Tensor, Tensor]:
    """Global ids of the sources and destinations of this rank's edges."""
    edges = data.edges[relation]
    starts = torch.tensor(data.node_map(relation[0]).starts[:-1], dtype=torch.int64)
    first = data.node_map(relation[2]).starts[data.rank]
    return starts[edges.src_part.long()] + edges.src, edges.dst.long() + first


def sent_to_sources(
    data: PartitionData, relation: CanonicalEType, src: Tensor, dst: Tensor, number: Tensor | None
) -> tuple[Tensor, Route]:
    """``[n, 3]``: global id of the destination, row of the source, and number, of pairs of ids.

    Each is sent to the rank that owns the source; collective.
    """
    ranges = data.node_map(relation[0])
    owner = ranges.part_of(src)
    order = torch.argsort(owner, stable=True)
    number = torch.zeros_like(dst) if number is None else number
    columns = (dst, ranges.local_of(src, owner).long(), number)
    rows = torch.stack(columns, dim=1)[order]
    if world_size() == 1:
        return rows, Route(order, [len(rows)], [len(rows)])
    size = world_size()
    sent = torch.zeros(size, size, dtype=torch.int64)
    sent[rank()] = torch.bincount(owner.long(), minlength=size)
    matrix = torch.tensor(reduce_ints(sent.flatten().tolist())).view(size, size)
    route = Route(order, matrix[rank()].tolist(), matrix[:, rank()].tolist())
    return ragged_all_to_all_alike(rows, route.send, route.recv), route


def link_facts(
    data: PartitionData,
    relations: Sequence[CanonicalEType],
    etype: Tensor | None,
    num_relations: int,
) -> LinkFacts:
    """What is known, of a part that has all edges; collective.

    Args:
        etype: Relation numbers of the edges of the only relation; None: relations are numbered.
    """
    sources, numbers, rows = [], [], []
    for number, relation in enumerate(relations):
        sources.append(global_ends(data, relation)[0])
        numbers.append(torch.full_like(sources[-1], number) if etype is None else etype)
        rows.append(data.edges[relation].dst.long())
    tails = Facts.of(torch.cat(sources), torch.cat(numbers), num_relations, torch.cat(rows))
    heads = None
    if etype is not None:
        (relation,) = relations
        pairs, _ = sent_to_sources(data, relation, *global_ends(data, relation), etype)
        heads = Facts.of(pairs[:, 0], pairs[:, 2], num_relations, pairs[:, 1])
    return LinkFacts(tails, heads, num_relations)


def edges_of_pairs(
    data: PartitionData,
    edges: TargetEdges,
    reverses: Mapping[CanonicalEType, Sequence[tuple[CanonicalEType, int]]],
    etype: Tensor | None,
    num_relations: int,
) -> dict[CanonicalEType, RaggedIds]:
    """Of each edge all edges between its two ends, in its relation and back; collective.

    Args:
        data: This rank's part.
        edges: Into this rank's nodes.
        reverses: Relation to those that hold reverses of its edges, each with how much further
            their relation numbers are.
        etype: Relation numbers of the edges of the only relation, or None.

    Returns:
        Relation to the global ids of such edges, for each of ``edges``.
    """
    found: dict[CanonicalEType, list[tuple[Tensor, Tensor]]] = {}
    for relation, rows in edges.by_relation():
        own = edges.dst[rows] - data.node_map(relation[2]).starts[data.rank]
        pairs = torch.stack((edges.src[rows], own, edges.etype[rows]), dim=1)
        query, ids = _ids_of_pairs(data, relation, pairs, etype, num_relations)
        found.setdefault(relation, []).append((rows[query], ids))
        for back, shift in reverses[relation]:
            number = (edges.etype[rows] + shift) % num_relations
            pairs, route = sent_to_sources(data, relation, edges.src[rows], edges.dst[rows], number)
            query, ids = _ids_of_pairs(data, back, pairs, etype, num_relations)
            theirs = RaggedIds.of_pairs(query, ids, len(pairs))
            counts = route.answered(theirs.counts)
            sums = [int(part.sum()) for part in theirs.counts.split(route.recv)]
            mine = counts[route.order]
            to_come = [int(part.sum()) for part in mine.split(route.send)]
            if world_size() > 1:
                ids = ragged_all_to_all_alike(theirs.ids, sums, to_come)
            else:
                ids = theirs.ids
            of_rows = torch.repeat_interleave(rows[route.order], mine)
            found.setdefault(back, []).append((of_rows, ids))
    return {
        relation: RaggedIds.of_pairs(
            torch.cat([rows for rows, _ in parts]), torch.cat([ids for _, ids in parts]), len(edges)
        )
        for relation, parts in found.items()
    }


def _ids_of_pairs(
    data: PartitionData,
    relation: CanonicalEType,
    pairs: Tensor,
    etype: Tensor | None,
    num_relations: int,
) -> tuple[Tensor, Tensor]:
    """Number of the pair, and global id, of each edge of this rank that is of one of the pairs."""
    codes = _pair_codes(data, relation, etype, num_relations)
    known = Facts.of(codes, torch.zeros_like(codes), 1, torch.arange(codes.numel()))
    query, position = known.of_queries(_wanted(data, relation, pairs, etype, num_relations))
    return query, position + sum(gather_int(codes.numel())[: data.rank])


# ----------------------------------------------------------------------------- negatives


class Negatives:
    """Nodes that are drawn as wrong ends: by seed, epoch, step, type and original id alone.

    Args:
        ids: This rank's original ids of the nodes of the type, by row.
        ranges: Global ids that each rank owns.
    """

    def __init__(self, ids: Tensor, ranges: RangeMap, count: int, seed: int, side: int) -> None:
        self._sorted, self._rows = ids.cpu().long().sort()
        self._ranges, self._count = ranges, count
        self._key = key_state(seed * 2 + side, _DOMAIN)

    def drawn(self, epoch: int, num_steps: int = 1) -> Tensor:
        """int64 ``[num_steps, count]``, global ids, the same on all ranks; collective."""
        number = torch.arange(num_steps * self._count)
        state = states(self._key, torch.full_like(number, epoch))
        share = unit(word(state, number))
        total = self._ranges.num_ids
        original = (share * total).long().clamp(max=total - 1)
        place = torch.searchsorted(self._sorted, original).clamp(max=max(0, len(self._sorted) - 1))
        ids = torch.zeros_like(original)
        if len(self._sorted):
            is_own = self._sorted[place] == original
            ids[is_own] = self._rows[place[is_own]] + self._ranges.starts[rank()]
        if is_initialized():
            ids = all_reduce_alike(ids, "sum")
        return ids.view(num_steps, self._count)

    def rows(self, ids: Tensor, own: Tensor) -> Tensor:
        """Rows of some ids, ``[count, width]``, on every rank, from each rank's own; collective."""
        if world_size() == 1:
            return own.index_select(0, ids)
        local = ids - self._ranges.starts[rank()]
        is_own = (local >= 0) & (local < own.shape[0])
        places = is_own.nonzero().view(-1)
        mine = own.new_zeros((len(ids), own.shape[1]))
        mine = mine.index_copy(0, places, own.index_select(0, local[places]))
        return all_reduce_alike(mine, "sum")


def link_loss(
    kind: str, queries: Tensor, right: Tensor, answers: Tensor, wrong: Tensor, ids: Tensor
) -> Tensor:
    """Of edges against drawn ends, summed over the edges.

    ``"softmax"`` is the cross entropy of the right end among it and the drawn ones; ``"bce"`` the
    binary cross entropy of the right end, plus the mean of that of the drawn ones. A drawn end that
    is the right one does not count.

    Args:
        queries: ``[n, width]``.
        right: ``[n, width]``, the rows of the right ends.
        answers: ``[n]``, their ids.
        wrong: ``[count, width]``, the rows of drawn ends.
        ids: ``[count]``, their ids.
    """
    size = max(1, _SCORES // max(1, len(ids)))
    total = widened(queries[:0]).sum() + widened(wrong[:0]).sum() + widened(right[:0]).sum()
    for start in range(0, len(queries), size):
        part = slice(start, start + size)
        block = queries[part], right[part], answers[part], wrong, ids
        if len(queries) <= size or not torch.is_grad_enabled():
            total = total + _block_loss(kind, *block)
        else:
            total = total + checkpoint(_block_loss, kind, *block, use_reentrant=False)
    return total


def _block_loss(
    kind: str, queries: Tensor, right: Tensor, answers: Tensor, wrong: Tensor, ids: Tensor
) -> Tensor:
    positive = (widened(queries) * widened(right)).sum(1)
    negative = widened(queries @ wrong.T)
    is_right = answers.unsqueeze(1) == ids
    if kind == "softmax":
        negative = negative.masked_fill(is_right, float("-inf"))
        both = torch.cat([positive.unsqueeze(1), negative], dim=1)
        return (both.logsumexp(1) - positive).sum()
    counted = (~is_right).to(negative.dtype)
    of_wrong = (F.softplus(negative) * counted).sum(1) / counted.sum(1).clamp(min=1)
    return (F.softplus(-positive) + of_wrong).sum()


# ----------------------------------------------------------------------------- ranks


@torch.no_grad()
def ranks_of(
    queries: Tensor, scores: Tensor, codes: Tensor, candidates: Tensor, facts: Facts
) -> Tensor:
    """float64 ``[n]``, the filtered ranks of the right answers, from 1; collective.

    See [Note: ranks].

    Args:
        queries: ``[n, width]``, of this rank.
        scores: ``[n]``, of the right answers.
        codes: ``[n]``, of the queries, as in `Facts`.
        candidates: ``[num_owned, width]``, rows of this rank's nodes.
        facts: What is known of this rank's nodes.
    """
    size = max(1, _QUERIES // world_size())
    counts = gather_int(len(queries))
    ranks = []
    for start in range(0, max(counts), size):
        part = slice(start, start + size)
        of_all, scores_of_all, codes_of_all = (
            rows_of_all(rows[part], size) for rows in (queries, scores, codes)
        )
        ahead = _num_ahead(of_all, scores_of_all, codes_of_all, candidates, facts)
        if is_initialized():
            ahead = all_reduce_alike(ahead, "sum")
        mine = ahead[rank() * size : rank() * size + len(queries[part])]
        ranks.append(1 + mine[:, 0] + mine[:, 1] / 2)
    return torch.cat(ranks) if ranks else queries.new_zeros(0, dtype=torch.float64)


def rows_of_all(rows: Tensor, size: int) -> Tensor:
    """``[world_size * size, ...]``, the rows of all ranks, with zeros after each rank's."""
    padded = rows.new_zeros((size, *rows.shape[1:]))
    padded[: len(rows)] = rows
    return torch.cat(all_gather(group_state(), padded, "ranks")) if is_initialized() else padded


def _num_ahead(
    queries: Tensor, scores: Tensor, codes: Tensor, candidates: Tensor, facts: Facts
) -> Tensor:
    """float64 ``[n, 2]``: this rank's nodes with a higher score, and those with the same."""
    query, row = facts.of_queries(codes)
    near = 1e-9 if scores.dtype == torch.float64 else 1e-5
    margin = near * scores.abs().clamp(min=1).unsqueeze(1)
    low, high = scores.unsqueeze(1) - margin, scores.unsqueeze(1) + margin
    counts = torch.zeros(len(queries), 2, dtype=torch.float64, device=queries.device)
    for start in range(0, len(candidates), _CANDIDATES):
        block = candidates[start : start + _CANDIDATES]
        found = queries @ block.T
        is_here = (row >= start) & (row < start + len(block))
        found[query[is_here], row[is_here] - start] = float("-inf")
        higher = (found > high).sum(1)
        counts[:, 0] += higher
        counts[:, 1] += (found >= low).sum(1) - higher
    return counts


def rank_sums(ranks: Tensor, relation: Tensor, num_relations: int) -> Tensor:
    """float64 ``[num_relations, 2 + len(HITS)]``: number, sum of 1 / rank, number up to each."""
    columns = [torch.ones_like(ranks), 1 / ranks, *((ranks <= k).double() for k in HITS)]
    sums = torch.zeros(num_relations, len(columns), dtype=torch.float64, device=ranks.device)
    return sums.index_add_(0, relation, torch.stack(columns, dim=1))


KindOfEnd: TypeAlias = tuple[int, str]
"""A side of edges, 0 of sources and 1 of destinations, and a node type that is there."""


class LinkScorer:
    """Losses and ranks of a rank's links, from the rows that a network gives to its nodes.

    Args:
        rows: Split to the edges in it.
        original_ids: Node type to this rank's original ids.
    """

    def __init__(
        self,
        task: Links,
        predictor: LinkPredictor,
        edges: TargetEdges,
        rows: Mapping[str, Tensor],
        facts: LinkFacts,
        data: PartitionData,
        original_ids: Mapping[str, Tensor],
        num_negatives: int,
        seed: int,
    ) -> None:
        self._task, self._predictor, self._facts = task, predictor, facts
        self._edges, self._rows = edges, rows
        self._ranges = {t: data.node_map(t) for t in data.node_type_names}
        self._of_split: dict[str, EndRows] = {}
        # Destinations are drawn, and sources where these are ranked.
        ends = [(1, t) for t, _ in edges.by_type(1)]
        if facts.heads is not None:
            ends += [(0, t) for t, _ in edges.by_type(0)]
        self._negatives = {
            (side, t): Negatives(original_ids[t], self._ranges[t], num_negatives, seed, 1 - side)
            for side, t in ends
        }

    def wrong(self, epoch: int, num_steps: int) -> dict[KindOfEnd, Tensor]:
        """For each kind of ends ``[num_steps, count]`` ids; collective."""
        return {end: drawn.drawn(epoch, num_steps) for end, drawn in self._negatives.items()}

    def loss(self, rows: Mapping[str, Tensor], split: str, epoch: int) -> Tensor:
        """Summed over this rank's edges of a split; collective."""
        sources, destinations, edges = self._ends(rows, split)
        drawn = {}
        for end, negatives in self._negatives.items():
            ids = negatives.drawn(epoch)[0].to(sources.device)
            drawn[end] = negatives.rows(ids, rows[end[1]]), ids
        total = self.loss_of(sources, destinations, edges, drawn)
        return anchor(total, sources, *(wrong for wrong, _ in drawn.values()))

    def loss_of(
        self,
        sources: Tensor,
        destinations: Tensor,
        edges: TargetEdges,
        drawn: Mapping[KindOfEnd, tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Summed over edges, with rows and ids of what is drawn for each kind of ends."""
        total = self._loss_of_side(1, sources, destinations, edges, drawn)
        if self._facts.heads is not None:
            total = (total + self._loss_of_side(0, destinations, sources, edges, drawn)) / 2
        return total

    def _loss_of_side(
        self,
        side: int,
        given: Tensor,
        right: Tensor,
        edges: TargetEdges,
        drawn: Mapping[KindOfEnd, tuple[Tensor, Tensor]],
    ) -> Tensor:
        queries, answers = self._predictor.queries(given, edges.etype), edges.ends(side)
        losses = [
            link_loss(
                self._task.kind,
                queries[places],
                right[places],
                answers[places],
                *drawn[side, ntype],
            )
            for ntype, places in edges.by_type(side)
        ]
        return torch.stack(losses).sum()

    @torch.no_grad()
    def numbers(self, rows: Mapping[str, Tensor], split: str) -> list[float]:
        """What the metrics of a split are summed from, by relation; collective."""
        sources, destinations, edges = self._ends(rows, split)
        num_relations, facts = self._facts.num_relations, self._facts
        directions = [(1, sources, destinations, facts.tails)]
        if facts.heads is not None:
            directions.append((0, destinations, sources, facts.heads))
        sums = torch.zeros(num_relations, 2 + len(HITS), dtype=torch.float64)
        for side, given, right, known in directions:
            queries = widened(self._predictor.queries(given, edges.etype))
            scores = (queries * widened(right)).sum(1)
            codes = edges.ends(1 - side) * num_relations + edges.etype
            for ntype, places in edges.by_type(side):
                ranks = ranks_of(
                    queries[places], scores[places], codes[places], widened(rows[ntype]), known
                )
                sums += rank_sums(ranks, edges.etype[places], num_relations).cpu()
        return sums.flatten().tolist()

    def _ends(self, rows: Mapping[str, Tensor], split: str) -> tuple[Tensor, Tensor, TargetEdges]:
        """Rows of sources and of destinations of a split's edges; collective."""
        edges = self._edges.at(self._rows[split])
        if split not in self._of_split:
            self._of_split[split] = EndRows(edges, self._ranges)
        return *self._of_split[split](rows), edges
