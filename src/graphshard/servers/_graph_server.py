# SPDX-License-Identifier: Apache-2.0
"""GraphServer: one host's parts of a graph, in memory that its trainers share.

`load_parts` fills the host's tables, `GraphHandlers` answers requests for what `HostGraph` draws.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from ._host_tables import HostTables, TableInfo, TableServer, check_is_ids
from ._ip_config import parts_of_host
from ._message_stream import Spec, WireMessage
from .rpc import Handler
from .saving import restore_tables

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
            self.restored = None if restore is None else restore_tables(self.tables, ids, restore)
            if self.restored is not None:
                self._origin = {"digest": self.restored.digest, "step": self.restored.step}
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
            check_is_ids(excluded)
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
        first, end = self._ids.range_of(node_policy(etype[2]), self._graph.host)
        _check_rows(rows, end - first)
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


def _check_rows(rows: Tensor, limit: int) -> None:
    check_is_ids(rows)
    if rows.numel() and not (0 <= int(rows.min()) <= int(rows.max()) < limit):
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
    ids = GraphIds(config.graph_name, config.book(0), num_hosts, {})
    loader = _PartLoader(tables, ids, Path(part_config))
    has_out_edges = config.num_parts == 1 or (config.halo_hops or 0) >= 1
    for part in parts_of_host(tables.host, num_hosts, config.num_parts):
        data = load_dgl_partition_data(loader.part_config, part)
        loader.fill_features(data)
        loader.fill_edges(data, config.edges_by_destination)
        del data
        if has_out_edges:
            loader.read_out_edges(part)
    for etype, pieces in loader.out_edges.items():
        loader.fill_out_edges(etype, pieces)
        pieces.clear()
    tables.mark_loaded()
    return ids


@dataclass(frozen=True)
class _PartLoader:
    """Puts parts of a graph into the tables of their host."""

    tables: HostTables
    ids: GraphIds
    part_config: Path
    out_edges: dict[CanonicalEType, list[Tensor]] = field(default_factory=dict)

    def fill_features(self, data: PartitionData) -> None:
        for features, is_node in ((data.node_features, True), (data.edge_features, False)):
            for key, rows in features.items():
                if key == NTYPE:  # which the partition book tells
                    continue
                owner, name = key.rsplit("/", 1)
                policy = f"{'node' if is_node else 'edge'}~{owner}"
                self.ids.features.setdefault(policy, set()).add(name)
                like = rows.dtype, tuple(rows.shape[1:])
                self._rows(f"{policy}~{name}", policy, *like, data.rank).copy_(rows)

    def fill_edges(self, data: PartitionData, by_destination: bool) -> None:
        part = data.rank
        for etype, edges in data.edges.items():
            if by_destination and bool((edges.dst[1:] < edges.dst[:-1]).any()):
                raise ValueError(f"edges of {etype} are not sorted by destination; partition again")
            policy, nodes = edge_policy(etype), node_policy(etype[0])
            if not by_destination:
                eids = torch.argsort(edges.dst, stable=True)
                eids += self.ids.parts[policy].starts[part]
                dtype = self.ids.dtype(policy)
                self._rows(in_edge_table(etype), policy, dtype, (), part).copy_(eids)
            dtype = self.ids.dtype(nodes)
            begins = torch.tensor(self.ids.parts[nodes].starts[:-1], dtype=dtype)
            rows = self._rows(source_table(etype), policy, dtype, (), part)
            torch.add(edges.src.to(dtype), begins[edges.src_part.long()], out=rows)
            self._fill_pointer(etype, "in", part, edges.dst)

    def read_out_edges(self, part: int) -> None:
        """Add the ids of the edges that leave a part's nodes, by node, to those of others."""
        graph, _, _, book, _, ntypes, etypes = load_partition(
            self.part_config, part, load_feats=False
        )
        src, _ = graph.adjacency().coo()
        types, offsets = graph.edata["_TYPE"], book.local_ntype_offset
        for relation, etype in enumerate(etypes):
            chosen = ((types == relation) & (src < offsets[-1])).nonzero().view(-1)
            near = src[chosen].long() - offsets[ntypes.index(etype[0])]
            _, eids = book.map_to_per_etype(graph.edata["_ID"][chosen])
            eids = eids[torch.argsort(near, stable=True)]
            eids = eids.to(self.ids.dtype(edge_policy(etype)))
            self.out_edges.setdefault(etype, []).append(eids)
            self._fill_pointer(etype, "out", part, near)

    def fill_out_edges(self, etype: CanonicalEType, pieces: Sequence[Tensor]) -> None:
        host, count = self.tables.host, sum(piece.numel() for piece in pieces)
        starts = tuple(count if h > host else 0 for h in range(self.ids.num_hosts + 1))
        dtype = self.ids.dtype(edge_policy(etype))
        name = out_edge_table(etype, host)
        out = self._made(TableInfo(name, dtype, (), starts, "graph~outeid", persistent=True))
        torch.cat(list(pieces), out=out)

    def _fill_pointer(
        self, etype: CanonicalEType, edge_dir: EdgeDir, part: int, near: Tensor
    ) -> None:
        """Where the edges of each node of a part begin, after those of the part before it.

        Args:
            near: The node of the part that each edge is at, counted from the part's first.
        """
        nodes, dtype = node_policy(ends(etype, edge_dir)[0]), self.ids.dtype(edge_policy(etype))
        # One row more than nodes on each host; the first is 0, as new tables are.
        starts = tuple(start + host for host, start in enumerate(self.ids.starts(nodes)))
        name, policy = pointer_table(etype, edge_dir), f"graph~{edge_dir}ptr"
        pointer = self._made(TableInfo(name, dtype, (), starts, policy, persistent=True))
        low, high = self._place(nodes, part)
        degrees = torch.bincount(near, minlength=high - low)
        pointer[low + 1 : high + 1] = pointer[low] + degrees.cumsum(0)

    def _rows(
        self, name: str, policy: str, dtype: torch.dtype, row_shape: tuple[int, ...], part: int
    ) -> Tensor:
        """A part's rows of a table, which is made if it is new."""
        rows = self._made(TableInfo(name, dtype, row_shape, self.ids.starts(policy), policy, True))
        return rows[slice(*self._place(policy, part))]

    def _place(self, policy: str, part: int) -> tuple[int, int]:
        """``(start, stop)`` of a part's rows among the host's."""
        first = self.ids.starts(policy)[self.tables.host]
        start, stop = self.ids.parts[policy].starts[part : part + 2]
        return start - first, stop - first

    def _made(self, info: TableInfo) -> Tensor:
        self.tables.create(info)
        return self.tables.rows(info.name)
