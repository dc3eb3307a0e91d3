# SPDX-License-Identifier: Apache-2.0
"""GraphServer: one host's parts of a graph, in memory that its trainers share.

`load_parts` fills the host's tables, `GraphHandlers` answers requests for what `HostGraph` draws.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._base.typing import CanonicalEType
from ..errors import MessageError
from ..fullbatch import PartitionData, load_dgl_partition_data
from ..graph import NTYPE
from ..partition import load_partition
from ..partition.format import read_config
from ..sampling import DrawOptions, NeighborRequest
from ..sampling.graph_store import EdgeDir, ends
from ._host_graph import (
    GraphIds,
    HostGraph,
    are_on_hosts,
    edge_policy,
    in_edge_table,
    node_policy,
    out_edge_table,
    pointer_table,
    source_table,
)
from ._host_tables import HostTables, TableInfo, TableServer
from ._ip_config import parts_of_host
from ._message_stream import Spec, WireMessage
from .rpc import Handler
from .saving import RestoredTables, restore_tables

_INT32_MAX = 2**31 - 1


class GraphServer(TableServer):
    """The server of one host. It answers, in threads, until `stop` is called.

    Args:
        num_hosts: Number of hosts; each has one server, and a run of the parts.
        part_config: The JSON of the partition.
        token: What trainers must know; at least 16 characters.
        port: 0 for a free one.
        directory: Where shared memory goes; by default ``/dev/shm``.
        restore: A folder of `save_checkpoint`, from whose newest checkpoint persistent tensors are
            taken, and features that were written to; it may have no checkpoint yet.
        **options: ``certificate`` and ``max_message``, as for `graphshard.servers.MessageServer`.

    Raises:
        PartitionFormatError: The partition is damaged.
        CheckpointError: What is to be restored is damaged, or of another graph.
        ValueError: There are more hosts than parts, or the token is too short.
        OSError: There is no room, or the address is in use.

    Attributes:
        restored: What was restored, a `RestoredTables`; None if nothing was.
    """

    def __init__(
        self,
        number: int,
        num_hosts: int,
        part_config: str | os.PathLike[str],
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        directory: str | os.PathLike[str] | None = None,
        *,
        restore: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        if not 0 <= number < num_hosts:
            raise ValueError(f"the number of a host must be in [0, {num_hosts}) (got {number})")
        super().__init__(number, token, host, port, directory, **options)
        try:
            ids = load_parts(self.tables, part_config, num_hosts)
            self._origin: dict[str, Any] = {}
            self.restored: RestoredTables | None = None
            if restore is not None:
                self.restored = restored = restore_tables(self.tables, ids, restore)
                if restored is not None:
                    self._origin = {"digest": restored.digest, "step": restored.step}
            self.handlers |= {"restored": self._on_restored, "loaded": self._on_loaded}
            self.handlers |= GraphHandlers(self.tables, ids).handlers()
            self.start()
        except BaseException:
            self.stop()
            raise

    def _on_restored(self, request: WireMessage) -> WireMessage:
        """From which checkpoint this host's rows are."""
        return WireMessage("restored", self._origin)

    def _on_loaded(self, request: WireMessage) -> WireMessage:
        """Trainers have loaded a checkpoint on all hosts."""
        digest, step = request.fields.get("digest"), request.fields.get("step")
        if not isinstance(digest, str) or len(digest) > 64 or type(step) is not int:
            raise MessageError("loaded takes the digest and the step of a checkpoint")
        self._origin = {"digest": digest, "step": step}
        return WireMessage("loaded")


class GraphHandlers:
    """What a server answers for its host's parts of a graph."""

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
            neighbor_request = self._request_of(entry, rows)
            _check_rows(excluded, None)
            specs += self._graph.most_drawn(neighbor_request, rows, options)
            request.check_answer(specs)
            absent = excluded if excluded.numel() else None
            answer += self._graph.draw(neighbor_request, rows, options, absent, entry[3])
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
    """Put the parts of a host into its tables."""
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
    pieces: dict[CanonicalEType, list[Tensor]],
) -> None:
    """Add the ids of the edges that leave a part's nodes, grouped by node, to those of others."""
    graph, _, _, book, _, ntypes, etypes = load_partition(part_config, part, load_feats=False)
    src, _ = graph.adjacency().coo()
    types, offsets = graph.edata["_TYPE"], book.local_ntype_offset
    for relation, etype in enumerate(etypes):
        chosen = ((types == relation) & (src < offsets[-1])).nonzero().view(-1)
        near = src[chosen].long() - offsets[ntypes.index(etype[0])]
        _, eids = book.map_to_per_etype(graph.edata["_ID"][chosen])
        order = torch.argsort(near, stable=True)
        pieces.setdefault(etype, []).append(eids[order].to(ids.edge_dtype(etype)))
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
