# SPDX-License-Identifier: Apache-2.0
"""Hop: one round in which ranks ask owners for neighbours, and owners draw and answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._typing import CanonicalEType
from ...comm.wire import exchange_rows
from ...ops import draw_neighbors, ungroup
from ._own_edges import OwnEdges, Side
from ._structure import Drawn, DrawOptions, HopRequest


class Hop:
    """One round of questions and answers.

    Args:
        edges: Edges of this rank's nodes.
        requests: What this rank wants.
        options: How to draw.
        excluded: Edges that this rank does not want.
        idtype: Of the ids in the answers.
    """

    def __init__(
        self,
        edges: OwnEdges,
        requests: Sequence[HopRequest],
        options: DrawOptions,
        excluded: Mapping[CanonicalEType, Tensor],
        idtype: torch.dtype,
    ) -> None:
        self._edges, self._state = edges, edges.state
        self._requests, self._options, self._idtype = requests, options, idtype
        self._wire = edges.ownership.wire_dtype
        self._near = [r.etype[2] if options.edge_dir == "in" else r.etype[0] for r in requests]
        self._rows = [
            # Where nothing is drawn, nothing need be asked.
            edges.ownership.by_owner(near, r.rows if r.fanout else r.rows[:0])
            for near, r in zip(self._near, requests, strict=True)
        ]
        self._excluded = [self._excluded_by_owner(r, excluded) for r in requests]

    def _excluded_by_owner(
        self, request: HopRequest, excluded: Mapping[CanonicalEType, Tensor]
    ) -> _Excluded:
        eids = excluded.get(request.etype)
        ranks = self._state.world_size
        if eids is None or eids.numel() == 0 or request.fanout == 0:
            return _Excluded(torch.empty(0, dtype=self._wire), [0] * ranks, None)
        eids = eids.to("cpu", torch.int64)
        if self._options.edge_dir == "out":
            # Who owns the source of an edge is not to be seen from its id.
            splits = [eids.numel()] * ranks
            splits[self._state.rank] = 0
            return _Excluded(eids.to(self._wire).repeat(ranks - 1), splits, eids)
        by_owner = self._edges.ownership.by_owner(request.etype, eids)
        remote, own = by_owner.places()
        here = eids if own is None else eids.index_select(0, own)
        there = eids[:0] if remote is None else eids.index_select(0, remote)
        return _Excluded(there.to(self._wire), by_owner.splits, here)

    def sizes(self) -> Tensor:
        """int64 ``[world_size, 2 R]``: per request rows, then excluded edges, for each rank."""
        splits = [rows.splits for rows in self._rows] + [e.splits for e in self._excluded]
        return torch.tensor(splits, dtype=torch.int64).t()

    def run(self, asked: Tensor) -> list[Drawn]:
        """Exchange questions and answers.

        Args:
            asked: int64 ``[world_size, 2 R]``, the sizes that each rank announced.
        """
        own: list[Drawn] = []
        if self._state.world_size == 1:
            self._draw_own(own)
            return [self._arranged(i, d) for i, d in enumerate(own)]
        num = len(self._requests)
        recv = asked.t().tolist()
        questions = exchange_rows(
            self._state,
            [rows.remote_rows for rows in self._rows] + [e.remote for e in self._excluded],
            [rows.splits for rows in self._rows] + [e.splits for e in self._excluded],
            recv,
            "rows to draw for",
            meanwhile=lambda: self._draw_own(own),
        )
        drawn = [
            self._draw(request, rows.split(recv[i]), absent.split(recv[num + i]))
            for i, (request, rows, absent) in enumerate(
                zip(self._requests, questions[:num], questions[num:], strict=True)
            )
        ]
        answers = self._answer(drawn, recv[:num])
        return [
            self._arranged(i, _joined([answer, here], self._options))
            for i, (answer, here) in enumerate(zip(answers, own, strict=True))
        ]

    def _draw_own(self, found: list[Drawn]) -> None:
        """Add what is drawn for the rows that this rank has itself, for each request."""
        found += [
            self._draw_group(request, rows.own_rows, excluded.own)
            for request, rows, excluded in zip(
                self._requests, self._rows, self._excluded, strict=True
            )
        ]

    def _draw(self, request: HopRequest, rows: Sequence[Tensor], absent: Sequence[Tensor]) -> Drawn:
        """Draw for groups of own rows, each group with its own excluded edges."""
        if all(eids.numel() == 0 for eids in absent):
            return self._draw_group(request, torch.cat(list(rows)), None)
        groups = [self._draw_group(request, r, a) for r, a in zip(rows, absent, strict=True)]
        return _joined(groups, self._options)

    def _draw_group(self, request: HopRequest, rows: Tensor, absent: Tensor | None) -> Drawn:
        etype, options = request.etype, self._options
        side: Side = self._edges.side(etype, options.edge_dir)
        near = etype[2] if options.edge_dir == "in" else etype[0]
        counts, positions, picked = draw_neighbors(
            side.indptr,
            rows,
            request.fanout,
            request.key,
            self._edges.original_ids[near].index_select(0, rows),
            indices=side.neighbors,
            replace=options.replace,
            prob=self._edges.weights(etype, options),
            labor_ids=self._edges.labor_ids(etype, options),
            excluded=None if absent is None else side.positions_of(absent),
        )
        return Drawn(counts, picked, side.eids_at(positions) if options.with_eids else None)

    def _answer(self, drawn: Sequence[Drawn], asked: Sequence[Sequence[int]]) -> list[Drawn]:
        """Send what was drawn for others; what others drew for this rank, by rank.

        Args:
            drawn: For each request, what was drawn for the rows of each other rank.
            asked: For each request, rows that each rank asked for.
        """
        counts = exchange_rows(
            self._state,
            [
                d.counts.to(self._count_dtype(request))
                for d, request in zip(drawn, self._requests, strict=True)
            ],
            asked,
            [rows.splits for rows in self._rows],
            "numbers of neighbours",
        )
        send = [_sums(d.counts, splits) for d, splits in zip(drawn, asked, strict=True)]
        recv = [_sums(c, rows.splits) for c, rows in zip(counts, self._rows, strict=True)]
        columns = [d.neighbors for d in drawn]
        if self._options.with_eids:
            columns += [d.eids for d in drawn if d.eids is not None]
            send, recv = send * 2, recv * 2
        arrived = exchange_rows(self._state, columns, send, recv, "neighbours")
        num = len(drawn)
        with_eids = self._options.with_eids
        return [
            Drawn(count.to(torch.int64), neighbors, arrived[num + i] if with_eids else None)
            for i, (count, neighbors) in enumerate(zip(counts, arrived[:num], strict=True))
        ]

    def _arranged(self, number: int, drawn: Drawn) -> Drawn:
        """What was drawn for rows grouped by owner, in the order in which they were given."""
        request, order = self._requests[number], self._rows[number].order
        counts, neighbors, eids = drawn.counts, drawn.neighbors, drawn.eids
        if request.fanout == 0:
            counts = torch.zeros(request.rows.numel(), dtype=torch.int64)
        elif order is not None:
            if eids is not None:
                _, eids = ungroup(order, counts, eids, self._idtype)
            counts, neighbors = ungroup(order, counts, neighbors, self._idtype)
        if eids is not None:
            eids = eids.to(self._idtype)
        return Drawn(counts, neighbors.to(self._idtype), eids)

    def _count_dtype(self, request: HopRequest) -> torch.dtype:
        """The smallest integer that holds a count; the same on all ranks."""
        most = self._edges.side(request.etype, self._options.edge_dir).max_degree
        if self._options.replace:
            most = request.fanout
        elif request.fanout >= 0 and not self._options.labor:
            most = min(most, request.fanout)
        for dtype in (torch.uint8, torch.int16, torch.int32):
            if most <= torch.iinfo(dtype).max:
                return dtype
        return torch.int64


@dataclass(frozen=True)
class _Excluded:
    """Edges that are not to be drawn under one relation.

    Args:
        remote: Their ids as they travel, by rank.
        splits: Number of them for each rank; 0 in the own slot.
        own: Ids of those that may be this rank's.
    """

    remote: Tensor
    splits: list[int]
    own: Tensor | None


def _sums(counts: Tensor, splits: Sequence[int]) -> list[int]:
    """Sum of each group of counts."""
    return [int(group.sum(dtype=torch.int64)) for group in counts[: sum(splits)].split(splits)]


def _joined(groups: Sequence[Drawn], options: DrawOptions) -> Drawn:
    """What was drawn for several groups of rows, as if it had been drawn at once."""
    return Drawn(
        torch.cat([g.counts for g in groups]),
        torch.cat([g.neighbors for g in groups]),
        torch.cat([g.eids for g in groups if g.eids is not None]) if options.with_eids else None,
    )
