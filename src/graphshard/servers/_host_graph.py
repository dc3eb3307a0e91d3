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

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .._base.ranges import RangeMap
from .._base.typing import CanonicalEType
from ..errors import MessageError
from ..fullbatch import PartitionData, load_dgl_partition_data
from ..graph import NTYPE
from ..partition import RangePartitionBook, load_partition
from ..partition.format import read_config
from ..sampling import DrawOptions, NeighborRequest
from ..sampling.graph_store import EdgeDir, EdgeLists, checked_weights, ends
from ._ip_config import parts_of_host, starts_of_hosts
from ._tables import HostTables, TableInfo
from .rpc import Handler, Spec
from .rpc._message import WireMessage

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
        name: Of the graph.
        book: Its partition book.
        num_hosts: Number of hosts.
        features: Names of the features that the graph was partitioned with, by policy.
    """

    def __init__(
        self,
        name: str,
        book: RangePartitionBook,
        num_hosts: int,
        features: Mapping[str, Collection[str]] = MappingProxyType({}),
    ) -> None:
        self.name, self.book, self.num_hosts = name, book, num_hosts
        self.features = {policy: set(names) for policy, names in features.items()}
        nodes = {t: _sizes(blocks) for t, blocks in book.node_map().items()}
        edges = {t: _sizes(blocks) for t, blocks in book.edge_map().items()}
        self.parts: dict[str, RangeMap] = {node_policy(t): r for t, r in nodes.items()}
        self.parts |= {edge_policy(t): r for t, r in edges.items()}
        self.destinations = {edge_policy(t): node_policy(t[2]) for t in edges}
        """How rows of edges are spread, to how those of their destinations are."""

    def starts(self, policy: str) -> tuple[int, ...]:
        """First id of each host, and the number of ids."""
        return starts_of_hosts(self.parts[policy].starts, self.num_hosts)

    def edge_dtype(self, etype: CanonicalEType) -> torch.dtype:
        """Of ids of a relation's edges, in tables."""
        few = self.parts[edge_policy(etype)].num_ids <= _INT32_MAX
        return torch.int32 if few else torch.int64

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
        ids: Of the graph.
        host: Number of the host.
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
            request: Its relation, fanout and key.
            rows: The nodes, counted from the host's first.
            options: How to draw; see `are_on_hosts`.
            excluded: Ids of edges that are treated as absent.
            weights: The table that draws are weighted by, where they are.

        Raises:
            ValueError: The weights are missing or no weights.
        """
        etype = request.etype
        lists, original = self.edge_lists(etype), self._rows(f"{node_policy(etype[2])}~orig_id")
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
        if request.fanout >= 0:
            degrees = (
                degrees.clamp(max=1) * request.fanout
                if options.replace
                else degrees.clamp(max=request.fanout)
            )
        drawn = (int(degrees.sum()),)
        specs: list[Spec] = [(lists.indptr.dtype, (rows.numel(),)), (lists.neighbors.dtype, drawn)]
        return [*specs, (self.ids.edge_dtype(request.etype), drawn)] if options.with_eids else specs

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
        src = lists.neighbors.index_select(0, positions)
        return src, rows + self.ids.starts(node_policy(etype[2]))[self.host]


def row_positions(begin: Tensor, counts: Tensor) -> Tensor:
    """int64: for rows that begin somewhere, the places of all that is in them, row by row."""
    before = counts.cumsum(0) - counts
    shift = (begin - before).to(torch.int64).repeat_interleave(counts)
    return torch.arange(len(shift)) + shift


def are_on_hosts(options: DrawOptions) -> bool:
    """Whether the host of a node has all that a draw needs.

    Of out-edges it does not have the order and the weights, which their destinations' hosts have;
    and of the neighbours that LABOR looks at not the original ids. A trainer then reads what it
    needs and draws itself; see `GatheredEdges`.
    """
    return options.edge_dir == "in" and not options.labor


class GraphHandlers:
    """What a server answers for its host's parts of a graph.

    Args:
        tables: Of the host, filled by `load_parts`.
        ids: Of the graph.
    """

    def __init__(self, tables: HostTables, ids: GraphIds) -> None:
        self._ids = ids

        def rows(name: str) -> Tensor | None:
            try:
                return tables.rows(name)
            except KeyError:
                return None

        self._graph = HostGraph(ids, tables.host, rows)

    def handlers(self) -> dict[str, Handler]:
        """By op."""
        return {"graph": self._on_graph, "draw": self._on_draw, "ends": self._on_ends}

    def _on_graph(self, request: WireMessage) -> WireMessage:
        name = request.fields.get("name")
        if name != self._ids.name:
            raise ValueError(
                f"the servers have the graph {self._ids.name!r} (asked for {name!r:.80})"
            )
        return WireMessage("graph", self._ids.as_json())

    def _on_draw(self, request: WireMessage) -> WireMessage:
        fields, tensors = request.fields, request.tensors
        listed = fields.get("requests")
        if not isinstance(listed, list) or len(tensors) != 2 * len(listed):
            raise MessageError("draw takes nodes and excluded edges for each request")
        options = _options_of(fields.get("options"))
        answer: list[Tensor] = []
        specs: list[Spec] = []
        for number, entry in enumerate(listed):
            rows, excluded = tensors[2 * number : 2 * number + 2]
            wanted = self._request_of(entry, rows)
            _check_rows(excluded, None)
            specs += self._graph.most_drawn(wanted, rows, options)
            request.check_answer(specs)
            absent = excluded if excluded.numel() else None
            answer += self._graph.draw(wanted, rows, options, absent, entry[3])
        return WireMessage("drawn", {}, answer)

    def _request_of(self, entry: Any, rows: Tensor) -> NeighborRequest:
        if not isinstance(entry, list) or len(entry) != 4:
            raise MessageError("a request has a relation, a fanout, a key and a table of weights")
        etype, fanout, key = self._etype(entry[0]), entry[1], entry[2]
        if entry[3] is not None and not str(entry[3]).startswith(f"{edge_policy(etype)}~"):
            raise MessageError(
                f"weights must be a table of edges of {etype} (got {entry[3]!r:.80})"
            )
        if type(fanout) is not int or not -1 <= fanout <= _INT32_MAX:
            raise MessageError(f"a fanout must be in [-1, 2^31) (got {fanout!r:.80})")
        if type(key) is not int or not 0 <= key < 2**64:
            raise MessageError("a key must have 64 bits")
        starts = self._ids.starts(node_policy(etype[2]))
        host = self._graph.host
        _check_rows(rows, starts[host + 1] - starts[host])
        return NeighborRequest(etype, rows, fanout, key)

    def _etype(self, value: Any) -> CanonicalEType:
        for etype in self._ids.book.canonical_etypes:
            if value == list(etype):
                return etype
        raise ValueError(f"unknown relation {value!r:.200}")

    def _on_ends(self, request: WireMessage) -> WireMessage:
        """Sources and destinations of edges of one relation."""
        etype = self._etype(request.fields.get("etype"))
        if len(request.tensors) != 1:
            raise MessageError("ends takes one tensor of edges")
        (positions,) = request.tensors
        lists = self._graph.edge_lists(etype)
        assert lists is not None
        _check_rows(positions, lists.neighbors.numel())
        request.check_answer([(torch.int64, (2, positions.numel()))])
        return WireMessage("ends", {}, list(self._graph.ends_of(etype, positions)))


def _check_rows(rows: Tensor, limit: int | None) -> None:
    if rows.dim() != 1 or rows.dtype not in (torch.int32, torch.int64):
        raise MessageError(f"ids must be int32 or int64 of one dimension (got {rows.dtype})")
    if limit is not None and rows.numel() and not (0 <= int(rows.min()) <= int(rows.max()) < limit):
        raise IndexError(f"rows on this host are in [0, {limit})")


def _options_of(value: Any) -> DrawOptions:
    expected = {"replace": bool, "weights_are_mask": bool, "labor": bool, "with_eids": bool}
    if not isinstance(value, dict) or value.keys() != {*expected, "weights", "edge_dir"}:
        raise MessageError("unknown options of a draw")
    if not all(type(value[name]) is kind for name, kind in expected.items()):
        raise MessageError("options of a draw must be true or false")
    if not isinstance(value["weights"], str | None) or value["edge_dir"] not in ("in", "out"):
        raise MessageError("weights must be a name, and edge_dir 'in' or 'out'")
    options = DrawOptions(**value)
    if not are_on_hosts(options):
        raise MessageError("servers draw from in-edges, and not as LABOR does")
    return options


# ---------------------------------------------------------------------------- loading


def load_parts(tables: HostTables, part_config: str | os.PathLike[str], num_hosts: int) -> GraphIds:
    """Put the parts of a host into its tables.

    Args:
        tables: Of the host, empty.
        part_config: The JSON of the partition.
        num_hosts: Number of hosts.

    Raises:
        PartitionFormatError: The partition is damaged.
        ValueError: There are more hosts than parts.
        OSError: There is no room.
    """
    config = read_config(part_config)
    config.check_format()
    ids = GraphIds(config.graph_name, config.book(0), num_hosts)
    parts = parts_of_host(tables.host, num_hosts, config.num_parts)
    has_out_edges = config.num_parts == 1 or (config.halo_hops or 0) >= 1
    out_edges: dict[CanonicalEType, list[Tensor]] = {}
    for part in parts:
        data = load_dgl_partition_data(Path(part_config), part)
        _fill_features(tables, ids, data)
        _fill_edges(tables, ids, data, config.edges_by_destination)
        del data
        if has_out_edges:
            _read_out_edges(tables, ids, part_config, part, out_edges)
    for etype, pieces in out_edges.items():
        _fill_out_edges(tables, ids, etype, pieces)
        pieces.clear()
    tables.mark_loaded()
    return ids


def _fill_features(tables: HostTables, ids: GraphIds, data: PartitionData) -> None:
    for features, is_node in ((data.node_features, True), (data.edge_features, False)):
        for key, rows in features.items():
            if key == NTYPE:  # which the partition book tells
                continue
            owner, name = key.rsplit("/", 1)
            policy = f"{'node' if is_node else 'edge'}~{owner}"
            table = f"{policy}~{name}"
            ids.features.setdefault(policy, set()).add(name)
            row_shape = rows.shape[1:]
            _part_of(tables, ids, table, policy, rows.dtype, row_shape, data.rank).copy_(rows)


def _part_of(
    tables: HostTables,
    ids: GraphIds,
    name: str,
    policy: str,
    dtype: torch.dtype,
    row_shape: Sequence[int],
    part: int,
) -> Tensor:
    """A part's rows of a table, which is made if it is new."""
    starts = ids.starts(policy)
    tables.create(TableInfo(name, dtype, tuple(row_shape), starts, policy, persistent=True))
    ranges = ids.parts[policy]
    first = starts[tables.host]
    return tables.rows(name)[ranges.starts[part] - first : ranges.starts[part + 1] - first]


def _fill_edges(
    tables: HostTables, ids: GraphIds, data: PartitionData, by_destination: bool
) -> None:
    for etype, edges in data.edges.items():
        if by_destination and bool((edges.dst[1:] < edges.dst[:-1]).any()):
            raise ValueError(f"edges of {etype} are not sorted by destination; partition again")
        if not by_destination:
            policy, eids = edge_policy(etype), torch.argsort(edges.dst, stable=True)
            eids += ids.parts[policy].starts[data.rank]
            table, dtype = in_edge_table(etype), ids.edge_dtype(etype)
            _part_of(tables, ids, table, policy, dtype, (), data.rank).copy_(eids)
        sources = ids.parts[node_policy(etype[0])]
        dtype = torch.int32 if sources.num_ids <= _INT32_MAX else torch.int64
        begins = torch.tensor(sources.starts[:-1], dtype=dtype)
        rows = _part_of(tables, ids, source_table(etype), edge_policy(etype), dtype, (), data.rank)
        torch.add(edges.src.to(dtype), begins[edges.src_part.long()], out=rows)
        _fill_pointer(tables, ids, etype, "in", data.rank, edges.dst)


def _fill_pointer(
    tables: HostTables,
    ids: GraphIds,
    etype: CanonicalEType,
    edge_dir: EdgeDir,
    part: int,
    near: Tensor,
) -> None:
    """Where the edges of each node of a part begin, after those of the part before it.

    Args:
        tables: Of the host.
        ids: Of the graph.
        etype: The relation.
        edge_dir: Which edges.
        part: The part.
        near: The node of the part that each edge is at, counted from the part's first.
    """
    policy, name = node_policy(ends(etype, edge_dir)[0]), pointer_table(etype, edge_dir)
    starts, nodes = ids.starts(policy), ids.parts[policy]
    # One row more than nodes on each host; the first is 0, as new tables are.
    shifted = tuple(start + host for host, start in enumerate(starts))
    dtype = ids.edge_dtype(etype)
    tables.create(TableInfo(name, dtype, (), shifted, f"graph~{edge_dir}ptr", persistent=True))
    pointer = tables.rows(name)
    low = nodes.starts[part] - starts[tables.host]
    high = nodes.starts[part + 1] - starts[tables.host]
    degrees = torch.bincount(near, minlength=high - low)
    pointer[low + 1 : high + 1] = pointer[low] + degrees.cumsum(0)


def _read_out_edges(
    tables: HostTables,
    ids: GraphIds,
    part_config: str | os.PathLike[str],
    part: int,
    found: dict[CanonicalEType, list[Tensor]],
) -> None:
    """Add the ids of the edges that leave a part's nodes, grouped by node, to those found."""
    graph, _, _, book, _, ntypes, etypes = load_partition(part_config, part, load_feats=False)
    src, _ = graph.adjacency().coo()
    types, offsets = graph.edata["_TYPE"], book.local_ntype_offset
    for relation, etype in enumerate(etypes):
        place = ntypes.index(etype[0])
        chosen = ((types == relation) & (src < offsets[-1])).nonzero().view(-1)
        near = src[chosen].long() - offsets[place]
        _, eids = book.map_to_per_etype(graph.edata["_ID"][chosen])
        order = torch.argsort(near, stable=True)
        found.setdefault(etype, []).append(eids[order].to(ids.edge_dtype(etype)))
        _fill_pointer(tables, ids, etype, "out", part, near)


def _fill_out_edges(
    tables: HostTables, ids: GraphIds, etype: CanonicalEType, pieces: Sequence[Tensor]
) -> None:
    name, count = out_edge_table(etype, tables.host), sum(piece.numel() for piece in pieces)
    starts = tuple(count if host > tables.host else 0 for host in range(ids.num_hosts + 1))
    tables.create(
        TableInfo(name, ids.edge_dtype(etype), (), starts, "graph~outeid", persistent=True)
    )
    torch.cat(list(pieces), out=tables.rows(name))
