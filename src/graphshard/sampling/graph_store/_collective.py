# SPDX-License-Identifier: Apache-2.0
"""CollectiveGraphStore: every rank draws for the nodes that it owns, for the rank that asks.

::

    sizes      of what follows                           4 (2 + 2 R) bytes to each other rank
    requests   nodes, and edges that must not be drawn   w bytes each
    counts     edges drawn for each node                 1, 2, 4 or 8 bytes each
    answers    neighbours, and edge ids if asked for     w bytes each

One round for a whole layer, whatever the number of relations R; w is 4 unless some type or relation
has 2^31 ids or more. Nodes that a rank owns itself do not leave it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..._base.typing import CanonicalEType
from ...comm.transport import exchange_rows
from ...fullbatch import GraphShardManager
from ...ops import ungroup
from .._ownership import IdsByOwner, exchange_sizes, same_ranks
from ._edges import DrawnEdges, OwnEdges, ends, sampled
from ._graph_store import DrawOptions, NeighborRequest, SampledNeighbors

S = TypeVar("S", bound="ShardedGraphStore")


class ShardedGraphStore:
    """What stores of a graph have in common of which each rank owns a part.

    Args:
        edges: Edges of this rank's nodes.
        idtype: Type of the ids that it takes and gives.
    """

    device = torch.device("cpu")  # wherever features are

    def __init__(self, edges: OwnEdges, idtype: torch.dtype) -> None:
        self._edges, self._state = edges, edges.state
        self.ownership, self.idtype = edges.ownership, idtype
        kinds = list(edges.ownership.ranges)
        self.ntypes = [kind for kind in kinds if isinstance(kind, str)]
        self.canonical_etypes = [kind for kind in kinds if not isinstance(kind, str)]

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self._state.group

    def num_nodes(self, ntype: str) -> int:
        return self.ownership.ranges[ntype].num_ids

    def num_edges(self, etype: CanonicalEType) -> int:
        return self.ownership.ranges[etype].num_ids

    def on(self: S, group: dist.ProcessGroup | None) -> S:
        """The same store; what it exchanges goes over another group of the same ranks.

        Raises:
            ValueError: The group has other ranks.
        """
        new = copy.copy(self)
        new._state = same_ranks(self._state, group)
        new._edges = self._edges.on(new._state)
        return new


class CollectiveGraphStore(ShardedGraphStore):
    """A graph whose nodes draw where they are owned; made by `of`.

    `sample_neighbors` sends, from a rank to all others together, with P ranks and R relations,
    ``4 (2 + 2 R) (P - 1) + w (nodes asked of others + edge ids excluded elsewhere) +
    c (nodes that others asked of it) + w (1 or, with edge ids, 2) (edges drawn for others)`` bytes.
    Here w is 4 (8 if a type or relation has 2^31 ids or more), and c the bytes of the smallest
    integer (1, 2, 4) that holds as many edges as can be drawn for a node.
    """

    @classmethod
    def of(cls, manager: GraphShardManager) -> CollectiveGraphStore:
        """The store of a sharded graph; every rank must call.

        Raises:
            ValueError: The graph is a message flow graph.
        """
        return cls(OwnEdges(manager), manager.idtype)

    def sample_neighbors(
        self,
        requests: Sequence[NeighborRequest],
        options: DrawOptions,
        excluded: Mapping[CanonicalEType, Tensor] | None = None,
    ) -> list[SampledNeighbors]:
        """Draw for each request; every rank must call. See `GraphStore.sample_neighbors`.

        Edges are excluded for the rank that says so, not for the others.

        Raises:
            ValueError: On all ranks: weights that are missing or no weights on some rank, or
                ranks that draw differently.
        """
        if not requests:
            return []
        etypes = [request.etype for request in requests]
        lacking, error = self._edges.lacking(etypes, options)
        drawn = [
            f"{r.etype} fanout {r.fanout} key {r.key:#x} weights "
            f"{self._edges.weights.dtype(r.etype, options)}"
            for r in requests
        ]
        drawing = _LayerDraw(self._edges, requests, options, excluded or {}, self.idtype)
        asked, lacking = exchange_sizes(
            self._state,
            "what neighbours are drawn",
            f"{options}: {'; '.join(drawn)}",
            error,
            drawing.sizes(),
            lacking,
        )
        self._edges.prepare(etypes, options, lacking)
        return drawing.run(asked)


class _LayerDraw:
    """One round in which ranks ask owners for neighbours, and owners draw and answer."""

    def __init__(
        self,
        edges: OwnEdges,
        requests: Sequence[NeighborRequest],
        options: DrawOptions,
        excluded: Mapping[CanonicalEType, Tensor],
        idtype: torch.dtype,
    ) -> None:
        self._edges, self._state = edges, edges.state
        self._requests, self._options, self._idtype = requests, options, idtype
        self._rows = [
            # Where nothing is drawn, nothing need be asked.
            edges.ownership.by_owner(
                ends(r.etype, options.edge_dir)[0], r.nodes if r.fanout else r.nodes[:0]
            )
            for r in requests
        ]
        self._excluded = [self._excluded_by_owner(r, excluded) for r in requests]

    def _excluded_by_owner(
        self, request: NeighborRequest, excluded: Mapping[CanonicalEType, Tensor]
    ) -> IdsByOwner:
        """Edges that are not to be drawn; ``rows`` are their ids."""
        ownership, ranks = self._edges.ownership, self._state.world_size
        eids = excluded.get(request.etype)
        if eids is None or eids.numel() == 0 or request.fanout == 0:
            return IdsByOwner(None, torch.empty(0, dtype=ownership.wire_dtype), [0] * ranks)
        eids = eids.to("cpu", torch.int64)
        if self._options.edge_dir == "out":
            # Who owns the source of an edge is not to be seen from its id.
            splits = [eids.numel()] * ranks
            splits[self._state.rank] = 0
            return IdsByOwner(None, eids.to(ownership.wire_dtype).repeat(ranks), splits)
        by_owner = ownership.by_owner(request.etype, eids)
        if by_owner.order is not None:
            eids = eids.index_select(0, by_owner.order)
        return replace(by_owner, rows=eids.to(ownership.wire_dtype))

    def sizes(self) -> Tensor:
        """int64 ``[world_size, 2 R]``: per request nodes, then excluded edges, for each rank."""
        splits = [ids.splits for ids in (*self._rows, *self._excluded)]
        return torch.tensor(splits, dtype=torch.int64).t()

    def run(self, asked: Tensor) -> list[SampledNeighbors]:
        """Exchange requests and answers.

        Args:
            asked: int64 ``[world_size, 2 R]``, the sizes of what each rank asks of this one.
        """
        own: list[DrawnEdges] = []
        if self._state.world_size == 1:
            self._draw_own(own)
            return [self._arranged(number, drawn) for number, drawn in enumerate(own)]
        num = len(self._requests)
        recv = asked.t().tolist()
        asks = [*self._rows, *self._excluded]
        of_others = exchange_rows(
            self._state,
            [ids.remote_rows for ids in asks],
            [ids.splits for ids in asks],
            recv,
            "rows to draw for",
            meanwhile=lambda: self._draw_own(own),
        )
        drawn = [
            self._draw_for_others(
                number,
                of_others[number].split(recv[number]),
                of_others[num + number].split(recv[num + number]),
            )
            for number in range(num)
        ]
        answers = self._answer(drawn, recv[:num])
        return [
            self._arranged(number, _joined(both))
            for number, both in enumerate(zip(answers, own, strict=True))
        ]

    def _draw_own(self, found: list[DrawnEdges]) -> None:
        """Add what is drawn for the nodes that this rank has itself, for each request."""
        for number, (rows, excluded) in enumerate(zip(self._rows, self._excluded, strict=True)):
            found.append(self._draw(number, rows.own_rows, excluded.own_rows))

    def _draw_for_others(
        self, number: int, rows: Sequence[Tensor], excluded: Sequence[Tensor]
    ) -> DrawnEdges:
        """Draw for groups of own rows, each group with its own excluded edges."""
        if all(eids.numel() == 0 for eids in excluded):
            return self._draw(number, torch.cat(list(rows)), excluded[0])
        return _joined([self._draw(number, r, e) for r, e in zip(rows, excluded, strict=True)])

    def _draw(self, number: int, rows: Tensor, excluded: Tensor) -> DrawnEdges:
        absent = excluded if excluded.numel() else None
        return self._edges.draw(self._requests[number], rows, self._options, absent)

    def _answer(
        self, drawn: Sequence[DrawnEdges], asked: Sequence[Sequence[int]]
    ) -> list[DrawnEdges]:
        """Send what was drawn for others; what others drew for this rank, by rank.

        Args:
            drawn: For each request, what was drawn for the nodes of each other rank.
            asked: For each request, nodes that each rank asked for.
        """
        wanted = [rows.splits for rows in self._rows]
        counts = exchange_rows(
            self._state,
            [c.to(self._count_dtype(r)) for (c, _), r in zip(drawn, self._requests, strict=True)],
            asked,
            wanted,
            "numbers of neighbours",
        )
        width = 2 if self._options.with_eids else 1
        send = [_sums(c, splits) for (c, _), splits in zip(drawn, asked, strict=True)]
        recv = [_sums(c, splits) for c, splits in zip(counts, wanted, strict=True)]
        arrived = exchange_rows(
            self._state,
            [column for _, columns in drawn for column in columns],
            [sums for sums in send for _ in range(width)],
            [sums for sums in recv for _ in range(width)],
            "neighbours",
        )
        return [
            (count.to(torch.int64), arrived[number * width : (number + 1) * width])
            for number, count in enumerate(counts)
        ]

    def _arranged(self, number: int, drawn: DrawnEdges) -> SampledNeighbors:
        """What was drawn for nodes grouped by owner, in the order in which they were given."""
        request, order = self._requests[number], self._rows[number].order
        counts, columns = drawn
        if request.fanout == 0:
            counts = torch.zeros(request.nodes.numel(), dtype=torch.int64)
        elif order is not None:
            ordered = [ungroup(order, counts, column, self._idtype) for column in columns]
            counts, columns = ordered[0][0], [column for _, column in ordered]
        return sampled((counts, columns), self._idtype)

    def _count_dtype(self, request: NeighborRequest) -> torch.dtype:
        """The smallest integer that holds a count; the same on all ranks."""
        most = self._edges.lists[request.etype, self._options.edge_dir].max_degree
        if self._options.replace:
            most = request.fanout
        elif request.fanout >= 0 and not self._options.labor:
            most = min(most, request.fanout)
        for dtype in (torch.uint8, torch.int16, torch.int32):
            if most <= torch.iinfo(dtype).max:
                return dtype
        return torch.int64


def _sums(counts: Tensor, splits: Sequence[int]) -> list[int]:
    """Sum of each group of counts."""
    return [int(group.sum(dtype=torch.int64)) for group in counts[: sum(splits)].split(splits)]


def _joined(groups: Sequence[DrawnEdges]) -> DrawnEdges:
    """What was drawn for several groups of nodes, as if it had been drawn at once."""
    by_column = zip(*(columns for _, columns in groups), strict=True)
    return torch.cat([counts for counts, _ in groups]), [torch.cat(c) for c in by_column]
