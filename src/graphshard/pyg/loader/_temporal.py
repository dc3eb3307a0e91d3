# SPDX-License-Identifier: Apache-2.0
"""TimeLimit: neighbours that are not later than the seed of their subgraph.

A store knows no times, so it gives all in-edges of the nodes that draw; the times of their sources,
or of the edges, are fetched, and the draw is made here. It costs the edges that the nodes have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..._base.typing import CanonicalEType
from ...ops import draw_neighbors
from ...sampling import DrawOptions, NeighborRequest
from ._sources import ORIGINAL, Kind, SamplingSource


class TimedEdges(NamedTuple):
    """What one relation draws under a limit.

    Args:
        request: Nodes, fanout and key.
        options: Replacement and weights.
        until: ``[n]``, the latest time for each node.
    """

    request: NeighborRequest
    options: DrawOptions
    until: Tensor


@dataclass(frozen=True)
class TimeLimit:
    """Neighbours must be there in time.

    Args:
        name: What PyG calls the column of times.
        of_edges: Whether edges have times, and not nodes.
        strategy: ``"uniform"``: any of those in time; ``"last"``: the latest of them.
    """

    name: str
    of_edges: bool
    strategy: Literal["uniform", "last"]

    def holds_for(self, source: SamplingSource, etype: CanonicalEType) -> bool:
        """Whether a relation has times; all neighbours of one that has none are in time."""
        return self.name in source.names.get(self._kind(etype), {})

    def _kind(self, etype: CanonicalEType) -> Kind:
        return etype if self.of_edges else etype[0]

    def of_seeds(
        self,
        source: SamplingSource,
        seeds: Mapping[str, Tensor],
        given: Mapping[str, Tensor] | None,
    ) -> Tensor:
        """The time of each seed, type by type; collective where the source is, unless given.

        Raises:
            ValueError: It is neither given nor known.
        """
        if given is not None:
            return torch.cat([given[ntype].view(-1) for ntype in seeds])
        for ntype in seeds:
            if self.of_edges or self.name not in source.names.get(ntype, {}):
                raise ValueError(
                    f"the seeds need a time, and nodes of type {ntype!r} have no {self.name!r}; "
                    "pass input_time, or edge_label_time to a loader of links"
                )
        wanted = [(ntype, [self.name], ids) for ntype, ids in seeds.items()]
        return torch.cat([rows[0].cpu().view(-1) for rows in source.fetch(wanted)])

    def chosen(
        self,
        source: SamplingSource,
        timed: Sequence[TimedEdges],
        found: Mapping[CanonicalEType, tuple[Tensor, Tensor, Tensor]],
    ) -> dict[CanonicalEType, tuple[Tensor, Tensor, Tensor]]:
        """Counts, neighbours and edge ids of those that are drawn; collective as the source is.

        Args:
            source: Has the times.
            timed: What is drawn.
            found: The same of all in-edges of the nodes.
        """
        wanted: list[tuple[Kind, list[str], Tensor]] = []
        for request, options, _ in timed:
            _, neighbors, eids = found[request.etype]
            kind = self._kind(request.etype)
            wanted.append((kind, [self.name], eids if self.of_edges else neighbors))
            if options.weights is not None:
                names = source.names[request.etype]
                called = next(name for name in names if names[name] == options.weights)
                wanted.append((request.etype, [called], eids))
            if not source.is_whole:
                wanted.append((request.etype[2], [ORIGINAL], request.nodes))
        rows = (columns[0].cpu() for columns in source.fetch(wanted))
        result = {}
        for request, options, until in timed:
            counts, neighbors, eids = found[request.etype]
            times = next(rows).view(-1)
            weights = None if options.weights is None else next(rows).view(-1)
            ids = request.nodes if source.is_whole else next(rows)
            late = times > until.repeat_interleave(counts)
            pointer = torch.zeros(counts.numel() + 1, dtype=torch.int64)
            torch.cumsum(counts, 0, out=pointer[1:])
            if self.strategy == "last":
                picked, places = _last(counts, times, ~late, request.fanout)
            else:
                if weights is not None and weights.dtype != torch.float64:
                    weights = weights.to(torch.float32)
                picked, places, _ = draw_neighbors(
                    pointer,
                    torch.arange(counts.numel()),
                    request.fanout,
                    request.key,
                    ids,
                    indices=neighbors,
                    replace=options.replace,
                    prob=weights,
                    excluded=late,
                )
            result[request.etype] = picked, neighbors[places], eids[places]
        return result


def _last(counts: Tensor, times: Tensor, in_time: Tensor, fanout: int) -> tuple[Tensor, Tensor]:
    """The latest edges of each row, of equal ones the later in the row: counts and places."""
    row = torch.arange(counts.numel()).repeat_interleave(counts)
    places = in_time.nonzero().view(-1)
    places = places[torch.argsort(times[places], stable=True)]
    places = places[torch.argsort(row[places], stable=True)]
    left = torch.bincount(row[places], minlength=counts.numel())
    if fanout >= 0:
        from_end = left.cumsum(0)[row[places]] - torch.arange(places.numel())
        places = places[from_end <= fanout]
        left = left.clamp(max=fanout)
    return left, places
