# SPDX-License-Identifier: Apache-2.0
"""HostGraph: the parts of a graph that one host has, as rows of its tables, and draws from them.

Nodes and edges of a host have consecutive ids, because its parts do. So everything that is known
of them is rows of a table: features, and the in-edges of each node as compressed rows.

========================  ======================  ===========================================
table                     a row for each          holds
========================  ======================  ===========================================
``node~T~NAME``           node of type T          a feature
``edge~S:R:D~NAME``       edge of a relation      a feature
``graph~src~S:R:D``       edge of a relation      its source
``graph~indptr~S:R:D``    destination, and one    where its in-edges begin among the host's
``graph~out~S:R:D``       source                  its out-degree
========================  ======================  ===========================================
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._ranges import RangeMap
from .._typing import CanonicalEType
from ..errors import MessageError
from ..fullbatch import PartitionData, load_dgl_partition_data
from ..partition import RangePartitionBook, load_partition
from ..partition.format import read_config
from ..sampling import DrawOptions, NeighborRequest
from ..sampling.graph_store import CheckedWeights, EdgeLists
from ..store import HostTables, TableInfo, WireMessage, parts_of_host, starts_of_hosts
from ..store.wire import Handler

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


def pointer_table(etype: CanonicalEType) -> str:
    """The table of where in-edges begin."""
    return f"graph~indptr~{etype_name(etype)}"


def out_degree_table(etype: CanonicalEType) -> str:
    """The table of out-degrees."""
    return f"graph~out~{etype_name(etype)}"


class GraphIds:
    """Types and ids of a partitioned graph on some hosts.

    Args:
        name: Of the graph.
        book: Its partition book.
        num_hosts: Number of hosts.
        features: Tables of the features that the graph was partitioned with.
    """

    def __init__(
        self,
        name: str,
        book: RangePartitionBook,
        num_hosts: int,
        features: Collection[str] = (),
    ) -> None:
        self.name, self.book, self.num_hosts = name, book, num_hosts
        self.features = set(features)
        nodes = {t: _sizes(blocks) for t, blocks in book.node_map().items()}
        edges = {t: _sizes(blocks) for t, blocks in book.edge_map().items()}
        self.parts: dict[str, RangeMap] = {node_policy(t): r for t, r in nodes.items()}
        self.parts |= {edge_policy(t): r for t, r in edges.items()}

    def starts(self, policy: str) -> tuple[int, ...]:
        """First id of each host, and the number of ids."""
        return starts_of_hosts(self.parts[policy].starts, self.num_hosts)

    def feature_names(self, policy: str) -> list[str]:
        """Features of one kind of rows."""
        prefix = f"{policy}~"
        return sorted(n[len(prefix) :] for n in self.features if n.startswith(prefix))

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
            "features": sorted(self.features),
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
        self._weights = CheckedWeights()

    def edge_lists(self, etype: CanonicalEType) -> EdgeLists | None:
        """In-edges by destination; None where this process cannot read them."""
        if etype not in self._lists:
            indptr, src = self._rows(pointer_table(etype)), self._rows(source_table(etype))
            if indptr is None or src is None:
                return None
            first = self.ids.starts(edge_policy(etype))[self.host]
            self._lists[etype] = EdgeLists(indptr, src, None, first)
        return self._lists[etype]

    def draw(
        self,
        request: NeighborRequest,
        rows: Tensor,
        options: DrawOptions,
        excluded: Tensor | None,
    ) -> list[Tensor]:
        """Counts, neighbours and, if wanted, edge ids, for some of the host's nodes.

        Args:
            request: Its relation, fanout and key.
            rows: The nodes, counted from the host's first.
            options: How to draw.
            excluded: Ids of edges that are treated as absent.

        Raises:
            ValueError: The weights are missing or no weights.
            NotImplementedError: A way of drawing that servers do not offer.
        """
        check_options(options)
        etype = request.etype
        lists, original = self.edge_lists(etype), self._rows(f"{node_policy(etype[2])}~orig_id")
        assert lists is not None and original is not None
        weights = None
        if options.weights is not None:
            found = self._rows(f"{edge_policy(etype)}~{options.weights}")
            data = {} if found is None else {options.weights: found}
            weights = self._weights.find(data, etype, options).checked
        counts, positions, neighbors = lists.draw(
            request,
            rows,
            original.index_select(0, rows),
            options,
            weights=weights,
            labor_ids=None,
            excluded=excluded,
        )
        drawn = [counts, neighbors]
        return [*drawn, lists.eids_at(positions)] if options.with_eids else drawn

    def destinations(self, etype: CanonicalEType, positions: Tensor) -> Tensor:
        """Global ids of the destinations of edges, counted from the host's first edge."""
        lists = self.edge_lists(etype)
        assert lists is not None
        rows = torch.searchsorted(lists.indptr, positions.to(lists.indptr.dtype), right=True) - 1
        return rows + self.ids.starts(node_policy(etype[2]))[self.host]


def check_options(options: DrawOptions) -> None:
    """Raise unless servers can draw so."""
    if options.edge_dir != "in" or options.labor:
        what = "LABOR sampling" if options.labor else "edge_dir='out'"
        raise NotImplementedError(
            f"{what} is not offered on a DistGraph; load the parts with load_dgl_partition_data "
            "and use graphshard.sampling.DataLoader"
        )


class GraphHandlers:
    """What a server answers for its host's parts of a graph.

    Args:
        tables: Of the host, filled by `load_parts`.
        ids: Of the graph.
    """

    def __init__(self, tables: HostTables, ids: GraphIds) -> None:
        self._ids = ids
        known = {info.name for info in tables.infos()}
        self._graph = HostGraph(
            ids, tables.host, lambda name: tables.rows(name) if name in known else None
        )

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
        for number, entry in enumerate(listed):
            rows, excluded = tensors[2 * number : 2 * number + 2]
            wanted = self._request_of(entry, rows)
            _check_rows(excluded, None)
            absent = excluded if excluded.numel() else None
            answer += self._graph.draw(wanted, rows, options, absent)
        return WireMessage("drawn", {}, answer)

    def _request_of(self, entry: Any, rows: Tensor) -> NeighborRequest:
        if not isinstance(entry, list) or len(entry) != 3:
            raise MessageError("a request has a relation, a fanout and a key")
        etype, fanout, key = self._etype(entry[0]), entry[1], entry[2]
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
        src = lists.neighbors.index_select(0, positions)
        return WireMessage("ends", {}, [src, self._graph.destinations(etype, positions)])


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
    return DrawOptions(**value)


# ---------------------------------------------------------------------------- loading


def load_parts(tables: HostTables, part_config: str | os.PathLike[str], num_hosts: int) -> GraphIds:
    """Put the parts of a host into its tables.

    Args:
        tables: Of the host, empty.
        part_config: The JSON of the partition.
        num_hosts: Number of hosts.

    Raises:
        PartitionFormatError: The partition is damaged, or not ours.
        ValueError: There are more hosts than parts.
        OSError: There is no room.
    """
    config = read_config(part_config)
    config.check_format()
    ids = GraphIds(config.graph_name, config.book(0), num_hosts)
    parts = parts_of_host(tables.host, num_hosts, config.num_parts)
    for place, part in enumerate(parts):
        data = load_dgl_partition_data(Path(part_config), part)
        _fill_features(tables, ids, data)
        _fill_edges(tables, ids, data, is_first=place == 0)
        del data
        _fill_out_degrees(tables, ids, part_config, part)
    tables.mark_loaded()
    return ids


def _fill_features(tables: HostTables, ids: GraphIds, data: PartitionData) -> None:
    for features, is_node in ((data.node_features, True), (data.edge_features, False)):
        for key, rows in features.items():
            owner, name = key.rsplit("/", 1)
            policy = f"{'node' if is_node else 'edge'}~{owner}"
            table = f"{policy}~{name}"
            ids.features.add(table)
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


def _fill_edges(tables: HostTables, ids: GraphIds, data: PartitionData, is_first: bool) -> None:
    for etype, edges in data.edges.items():
        if bool((edges.dst[1:] < edges.dst[:-1]).any()):
            raise ValueError(f"edges of {etype} are not sorted by destination; partition again")
        sources, nodes = ids.parts[node_policy(etype[0])], ids.parts[node_policy(etype[2])]
        dtype = torch.int32 if sources.num_ids <= _INT32_MAX else torch.int64
        begins = torch.tensor(sources.starts[:-1], dtype=dtype)
        rows = _part_of(tables, ids, source_table(etype), edge_policy(etype), dtype, (), data.rank)
        torch.add(edges.src.to(dtype), begins[edges.src_part.long()], out=rows)
        # One row more than destinations on each host.
        starts = ids.starts(node_policy(etype[2]))
        shifted = tuple(start + host for host, start in enumerate(starts))
        edge_starts = ids.starts(edge_policy(etype))
        wide = torch.int32 if edge_starts[-1] <= _INT32_MAX else torch.int64
        tables.create(
            TableInfo(pointer_table(etype), wide, (), shifted, "graph~indptr", persistent=True)
        )
        pointer = tables.rows(pointer_table(etype))
        if is_first:
            pointer[0] = 0
        low = nodes.starts[data.rank] - starts[tables.host]
        high = nodes.starts[data.rank + 1] - starts[tables.host]
        degrees = torch.bincount(edges.dst, minlength=high - low)
        pointer[low + 1 : high + 1] = pointer[low] + degrees.cumsum(0)


def _fill_out_degrees(
    tables: HostTables, ids: GraphIds, part_config: str | os.PathLike[str], part: int
) -> None:
    """Out-degrees, where the part has all out-edges of its nodes."""
    config = read_config(part_config)
    if config.content.get("halo_hops", 0) < 1 and config.num_parts > 1:
        return
    graph, _, _, book, _, ntypes, etypes = load_partition(part_config, part, load_feats=False)
    src, _ = graph.adjacency().coo()
    types = graph.edata["_TYPE"]
    offsets = book.local_ntype_offset
    num_inner = offsets[-1]
    for relation, etype in enumerate(etypes):
        chosen = src[types == relation]
        counts = torch.bincount(chosen[chosen < num_inner], minlength=num_inner)
        place = ntypes.index(etype[0])
        rows = _part_of(
            tables, ids, out_degree_table(etype), node_policy(etype[0]), torch.int64, (), part
        )
        rows.copy_(counts[offsets[place] : offsets[place + 1]])
