# SPDX-License-Identifier: Apache-2.0
"""HostGraph: the parts of a graph that one host has, as rows of its tables, and draws from them.

Nodes and edges of a host have consecutive ids, because its parts do. So everything that is known
of them is rows of a table: features, and the edges of each node as compressed rows.

==========================  ======================  ============================================
table                       a row for each          holds
==========================  ======================  ============================================
``node~T~NAME``             node of type T          a feature
``edge~S:R:D~NAME``         edge of a relation      a feature
``graph~src~S:R:D``         edge of a relation      its source
``graph~indptr~S:R:D``      destination, and one    where its in-edges begin among the host's
``graph~ineid~S:R:D``       edge of a relation      ids of the host's edges, by destination; only
                            of DGL's partitions     where edges need not come in that order
``graph~outptr~S:R:D``      source, and one         where its out-edges begin among the host's
``graph~outeid~S:R:D~HOST`` out-edge of a source    its id, grouped by source; one table a host,
                            on that host            for no other host knows how many there are
==========================  ======================  ============================================

The last two are there if the parts keep the edges that leave them (``num_hops`` of 1 or more).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._base.ranges import RangeMap
from .._base.typing import CanonicalEType
from ..graph.structure import row_positions
from ..partition import RangePartitionBook
from ..sampling import DrawOptions, NeighborRequest
from ..sampling.graph_store import EdgeLists, checked_weights
from ._ip_config import starts_of_hosts
from ._message_stream import Spec

DRAWN_BY = (torch.float32, torch.float64)
"""Weights that a host draws by as they are; of others it would have to keep a copy."""

_INT32_MAX = 2**31 - 1


def etype_name(etype: CanonicalEType) -> str:
    """A relation in the name of a table."""
    return ":".join(etype)


def node_policy(ntype: str) -> str:
    """How rows of nodes are spread."""
    return f"node~{ntype}"


def edge_policy(etype: CanonicalEType) -> str:
    """How rows of edges are spread."""
    return f"edge~{etype_name(etype)}"


def id_table(policy: str) -> str:
    """The table of the ids that rows had before partitioning."""
    return f"{policy}~orig_id"


def source_table(etype: CanonicalEType) -> str:
    """The table of the sources of edges."""
    return f"graph~src~{etype_name(etype)}"


def pointer_table(etype: CanonicalEType, edge_dir: str = "in") -> str:
    """The table of where in-edges, or out-edges, begin."""
    return f"graph~{'indptr' if edge_dir == 'in' else 'outptr'}~{etype_name(etype)}"


def pointer_table_of(policy: str) -> str:
    """The table of where in-edges begin, of the relation whose edges have this policy."""
    return f"graph~indptr~{policy.removeprefix('edge~')}"


def in_edge_table(etype: CanonicalEType) -> str:
    """The table of the ids of edges by destination, where ids do not ascend so."""
    return f"graph~ineid~{etype_name(etype)}"


def out_edge_table(etype: CanonicalEType, host: int) -> str:
    """The table of the ids of the edges that leave nodes of a host."""
    return f"graph~outeid~{etype_name(etype)}~{host}"


class GraphIds:
    """Types and ids of a partitioned graph on some hosts.

    Args:
        features: Names of the features that the graph was partitioned with, by policy.
    """

    def __init__(
        self,
        name: str,
        book: RangePartitionBook,
        num_hosts: int,
        features: Mapping[str, Collection[str]],
    ) -> None:
        self.name, self.book, self.num_hosts = name, book, num_hosts
        self.features = {policy: set(names) for policy, names in features.items()}
        self.parts = {node_policy(t): _sizes(blocks) for t, blocks in book.node_map().items()}
        self.parts |= {edge_policy(t): _sizes(blocks) for t, blocks in book.edge_map().items()}
        self.destinations = {edge_policy(t): node_policy(t[2]) for t in book.canonical_etypes}
        """How rows of edges are spread, to how those of their destinations are."""

    def starts(self, policy: str) -> tuple[int, ...]:
        """First id of each host, and the number of ids."""
        return starts_of_hosts(self.parts[policy].starts, self.num_hosts)

    def range_of(self, policy: str, host: int) -> tuple[int, int]:
        """``(start, stop)`` of the ids of a host."""
        starts = self.starts(policy)
        return starts[host], starts[host + 1]

    def hosts_of(self, policy: str, ids: Tensor) -> Tensor:
        """The host of each row of a kind, by id."""
        return torch.searchsorted(torch.tensor(self.starts(policy)[1:]), ids, right=True)

    def dtype(self, policy: str) -> torch.dtype:
        """Of ids of a kind of rows, in tables."""
        return torch.int32 if self.parts[policy].num_ids <= _INT32_MAX else torch.int64

    def feature_names(self, policy: str) -> list[str]:
        """Features of one kind of rows."""
        return sorted(self.features.get(policy, ()))

    def as_json(self) -> dict[str, Any]:
        """As a message has it."""
        book = self.book
        return {
            "name": self.name,
            "num_parts": book.num_partitions(),
            "num_hosts": self.num_hosts,
            "ntypes": book.ntypes,
            "etypes": [list(etype) for etype in book.canonical_etypes],
            "node_map": list(book.node_map().values()),
            "edge_map": list(book.edge_map().values()),
            "features": {policy: sorted(names) for policy, names in self.features.items()},
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], part: int) -> GraphIds:
        """From a message; ``part`` is that of this process."""
        etypes = [tuple(etype) for etype in fields["etypes"]]
        book = RangePartitionBook(
            part,
            fields["num_parts"],
            dict(zip(fields["ntypes"], fields["node_map"], strict=True)),
            dict(zip(etypes, fields["edge_map"], strict=True)),
            {t: i for i, t in enumerate(fields["ntypes"])},
            {t: i for i, t in enumerate(etypes)},
        )
        return cls(fields["name"], book, fields["num_hosts"], fields["features"])


def _sizes(blocks: Sequence[Sequence[int]]) -> RangeMap:
    return RangeMap.from_sizes([stop - start for start, stop in blocks])


class HostGraph:
    """Draws from the in-edges that one host has.

    Args:
        rows: The host's rows of a table, by name; None where this process cannot read them.
    """

    def __init__(self, ids: GraphIds, host: int, rows: Callable[[str], Tensor | None]) -> None:
        self.ids, self.host, self._rows = ids, host, rows
        self._lists: dict[CanonicalEType, EdgeLists] = {}

    def edge_lists(self, etype: CanonicalEType) -> EdgeLists | None:
        """In-edges by destination; None where this process cannot read them."""
        if etype not in self._lists:
            indptr, src = self._rows(pointer_table(etype)), self._rows(source_table(etype))
            if indptr is None or src is None:
                return None
            first = self.ids.starts(edge_policy(etype))[self.host]
            eids = self._rows(in_edge_table(etype))
            if eids is not None:
                src = src.index_select(0, eids - first)
            self._lists[etype] = EdgeLists(indptr, src, eids, first)
        return self._lists[etype]

    def draw(
        self,
        request: NeighborRequest,
        rows: Tensor,
        options: DrawOptions,
        excluded: Tensor | None,
        weights: str | None,
    ) -> list[Tensor]:
        """Counts, neighbours and, if wanted, edge ids, for some of the host's nodes.

        Args:
            rows: The nodes, counted from the host's first.
            options: How to draw; see `are_on_hosts`.
            excluded: Ids of edges that are treated as absent.
            weights: The table that draws are weighted by, where they are.
        """
        etype = request.etype
        lists, original = self.edge_lists(etype), self._rows(id_table(node_policy(etype[2])))
        assert lists is not None and original is not None
        values = None
        if options.weights is not None:
            values = self._checked(lists, rows, options, etype, weights)
        counts, positions, neighbors = lists.draw(
            request,
            rows,
            original.index_select(0, rows),
            options,
            weights=values,
            labor_ids=None,
            excluded=excluded,
        )
        drawn = [counts, neighbors]
        return [*drawn, lists.eids_at(positions)] if options.with_eids else drawn

    def most_drawn(
        self, request: NeighborRequest, rows: Tensor, options: DrawOptions
    ) -> list[Spec]:
        """What `draw` returns at most: all edges of the nodes, or so many of each."""
        lists = self.edge_lists(request.etype)
        assert lists is not None
        begin = lists.indptr.index_select(0, rows)
        degrees = lists.indptr.index_select(0, rows + 1) - begin
        if request.fanout >= 0 and options.replace:
            degrees = degrees.clamp(max=1) * request.fanout
        elif request.fanout >= 0:
            degrees = degrees.clamp(max=request.fanout)
        drawn = (int(degrees.sum()),)
        specs: list[Spec] = [(lists.indptr.dtype, (rows.numel(),)), (lists.neighbors.dtype, drawn)]
        return (
            [*specs, (self.ids.dtype(edge_policy(request.etype)), drawn)]
            if options.with_eids
            else specs
        )

    def _checked(
        self,
        lists: EdgeLists,
        rows: Tensor,
        options: DrawOptions,
        etype: CanonicalEType,
        table: str | None,
    ) -> Tensor:
        """Weights by position, checked at the edges of some rows.

        Any trainer may write to the table at any time, so that one check for all would not hold.
        """
        values = None if table is None else self._rows(table)
        if values is None or values.dtype not in DRAWN_BY:
            raise ValueError(f"host {self.host} has no table {table!r:.200} of weights to draw by")
        begin = lists.indptr.index_select(0, rows)
        positions = row_positions(begin, lists.indptr.index_select(0, rows + 1) - begin)
        eids = lists.eids_at(positions)
        if lists.eids is None:
            checked_weights(values.index_select(0, positions), options, etype, eids)
            return values.view(-1)
        some = values.index_select(0, eids - lists.first_eid)
        checked_weights(some, options, etype, eids)
        placed = torch.zeros(lists.neighbors.shape, dtype=values.dtype)
        placed[positions] = some.view(-1)
        return placed

    def ends_of(self, etype: CanonicalEType, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Global ids of the sources and destinations of edges, counted from the host's first."""
        lists = self.edge_lists(etype)
        assert lists is not None
        if lists.eids is not None:
            positions = lists.positions_of(positions + lists.first_eid)
        rows = torch.searchsorted(lists.indptr, positions.to(lists.indptr.dtype), right=True) - 1
        src = lists.neighbors[positions]
        return src, rows + self.ids.starts(node_policy(etype[2]))[self.host]


def are_on_hosts(options: DrawOptions) -> bool:
    """Whether the host of a node has all that a draw needs; see ``_served_stores`` for what not."""
    return options.edge_dir == "in" and not options.labor
