# SPDX-License-Identifier: Apache-2.0
"""ServedGraphStore and ServedFeatureStore: neighbours and rows of a `DistGraph`, for loaders.

Neither is collective: a trainer asks the hosts that have what it wants, all of them at the same
time, and reads what its own host has from memory that it shares with the server.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from .._typing import CanonicalEType
from ..errors import MessageError
from ..ops import group_by_range, ungroup
from ..sampling import DrawOptions, FeatureRequest, NeighborRequest, SampledNeighbors
from ..store import Cluster, RowsRequest, WireMessage
from ._host_graph import GraphIds, HostGraph, check_options, edge_policy, node_policy


class ServedGraphStore:
    """Neighbours of a graph that hosts have in parts. A `graphshard.sampling.GraphStore`.

    Args:
        cluster: The hosts.
        ids: Types and ids.
    """

    idtype, device, group = torch.int64, torch.device("cpu"), None

    def __init__(self, cluster: Cluster, ids: GraphIds) -> None:
        self._cluster, self._ids = cluster, ids
        self.ntypes, self.canonical_etypes = ids.book.ntypes, ids.book.canonical_etypes
        here = cluster.hosts[cluster.here]

        def rows(name: str) -> Tensor | None:
            return here.rows(name) if name in cluster.names() else None

        self._local = HostGraph(ids, cluster.here, rows)

    def num_nodes(self, ntype: str) -> int:
        return self._ids.parts[node_policy(ntype)].num_ids

    def num_edges(self, etype: CanonicalEType) -> int:
        return self._ids.parts[edge_policy(etype)].num_ids

    def on(self, group: object) -> ServedGraphStore:
        return self

    def sample_neighbors(
        self,
        requests: Sequence[NeighborRequest],
        options: DrawOptions,
        excluded: Mapping[CanonicalEType, Tensor] | None = None,
    ) -> list[SampledNeighbors]:
        """Draw for each request; see `GraphStore.sample_neighbors`.

        Raises:
            IndexError: An id is out of range.
            NotImplementedError: LABOR, or out-edges.
            ServerError: A server is gone.
            ValueError: The weights are missing or no weights.
        """
        check_options(options)
        grouped = [_by_host(self._ids, request) for request in requests]
        asked = {
            host: self._cluster.hosts[host].start(
                self._message(
                    requests, [rows[host] for _, rows in grouped], options, excluded, host
                )
            )
            for host in range(self._cluster.num_hosts)
            if not self._is_local(requests, host) and any(r[host].numel() for _, r in grouped)
        }
        found: list[list[list[Tensor]]] = [[] for _ in requests]  # by request, by host
        width = 3 if options.with_eids else 2
        empty = [torch.empty(0, dtype=torch.int64)] * width
        for host in range(self._cluster.num_hosts):
            if host in asked:
                columns = list(asked[host].result().tensors)
                if len(columns) != width * len(requests):
                    raise MessageError("a server answered with other draws than were asked for")
                for number, drawn in enumerate(found):
                    drawn.append(columns[number * width : (number + 1) * width])
                continue
            for request, (_, rows), drawn in zip(requests, grouped, found, strict=True):
                absent = None if excluded is None else excluded.get(request.etype)
                is_empty = rows[host].numel() == 0
                drawn.append(
                    empty
                    if is_empty
                    else self._local.draw(request, rows[host], options, _some(absent))
                )
        return [
            self._joined(order, by_host) for (order, _), by_host in zip(grouped, found, strict=True)
        ]

    def _is_local(self, requests: Sequence[NeighborRequest], host: int) -> bool:
        """Whether this process can draw for a host's nodes itself."""
        if host != self._cluster.here:
            return False
        return all(self._local.edge_lists(request.etype) is not None for request in requests)

    def _message(
        self,
        requests: Sequence[NeighborRequest],
        rows: Sequence[Tensor],
        options: DrawOptions,
        excluded: Mapping[CanonicalEType, Tensor] | None,
        host: int,
    ) -> WireMessage:
        tensors = []
        for request, nodes in zip(requests, rows, strict=True):
            absent = None if excluded is None else _some(excluded.get(request.etype))
            if absent is None:
                absent = torch.empty(0, dtype=torch.int64)
            else:
                starts = self._ids.starts(edge_policy(request.etype))
                absent = absent[(absent >= starts[host]) & (absent < starts[host + 1])]
            tensors += [nodes, absent]
        listed = [[list(r.etype), int(r.fanout), r.key] for r in requests]
        return WireMessage("draw", {"requests": listed, "options": asdict(options)}, tensors)

    def _joined(
        self, order: Tensor | None, by_host: Sequence[Sequence[Tensor]]
    ) -> SampledNeighbors:
        """What hosts have drawn, in the order of the nodes."""
        columns = [
            torch.cat([c.to(torch.int64) for c in column]) for column in zip(*by_host, strict=True)
        ]
        counts, lists = columns[0], columns[1:]
        if order is not None:
            arranged = [ungroup(order, counts, column, torch.int64) for column in lists]
            counts, lists = arranged[0][0], [column for _, column in arranged]
        return SampledNeighbors(counts, lists[0], lists[1] if len(lists) > 1 else None)


def _some(ids: Tensor | None) -> Tensor | None:
    return None if ids is None or ids.numel() == 0 else ids.to("cpu", torch.int64)


def _by_host(ids: GraphIds, request: NeighborRequest) -> tuple[Tensor | None, list[Tensor]]:
    """Where the nodes stood that are grouped by host, and their rows there."""
    nodes = request.nodes.cpu()
    starts = ids.starts(node_policy(request.etype[2]))
    if nodes.numel() and not (0 <= int(nodes.min()) <= int(nodes.max()) < starts[-1]):
        bad = nodes[(nodes < 0) | (nodes >= starts[-1])]
        raise IndexError(
            f"nodes of type {request.etype[2]!r} must be in [0, {starts[-1]}) (got {int(bad[0])})"
        )
    if len(starts) == 2:
        return None, [nodes.to(torch.int64)]
    order, rows, sizes = group_by_range(nodes, starts, len(starts) - 2, torch.int64)
    return order, list(rows.split(sizes))


class ServedFeatureStore:
    """Feature rows of a `DistGraph`. A `graphshard.sampling.FeatureStore`.

    Args:
        cluster: The hosts.
        ids: Types and ids.
    """

    def __init__(self, cluster: Cluster, ids: GraphIds) -> None:
        self._cluster, self._ids = cluster, ids

    def feature_names(self, kind: str | CanonicalEType) -> Collection[str]:
        """Features of nodes of a type, or of edges of a relation."""
        return self._ids.feature_names(_policy(kind))

    def fetch(self, requests: Sequence[FeatureRequest]) -> list[dict[str, Tensor]]:
        """The rows of each request; see `FeatureStore.fetch`.

        Raises:
            KeyError: There is no such feature.
            ServerError: A server is gone.
        """
        wanted = []
        for request in requests:
            names = [f"{_policy(request.kind)}~{name}" for name in request.names]
            wanted.append(RowsRequest(names, request.ids.cpu()))
        rows = iter(self._cluster.start_read(wanted).wait())
        return [{name: next(rows) for name in request.names} for request in requests]

    def on(self, group: object) -> ServedFeatureStore:
        return self

    def close(self) -> None:
        """Nothing: the cluster stays."""


def _policy(kind: str | CanonicalEType) -> str:
    return node_policy(kind) if isinstance(kind, str) else edge_policy(kind)
