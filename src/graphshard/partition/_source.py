# SPDX-License-Identifier: Apache-2.0
"""What partitioning reads from a graph: counts, edge lists and features, by type number."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from .._base.typing import DEFAULT_ETYPE, DEFAULT_NTYPE, CanonicalEType
from ..graph import Graph
from .files import etype_key

STRUCTURE_FIELDS = frozenset({"_ID", "_TYPE", "inner_node", "inner_edge"})
"""Fields that describe where a graph came from; as DGL does, they are not taken for features."""


class GraphSource:
    """A graph to be partitioned; nothing is copied and the graph is never written to.

    Args:
        graph: Any `Graph`, typed or plain, on any device.

    Raises:
        TypeError: It is not a `Graph`.
        ValueError: A type cannot be named in files.
    """

    def __init__(self, graph: Graph) -> None:
        if not isinstance(graph, Graph):
            raise TypeError(
                f"g must be a graphshard Graph (got {type(graph).__name__}); build one with "
                "graphshard.graph or graphshard.heterograph"
            )
        self.graph = graph
        self.ntypes: list[str] = list(graph.ntypes)
        self.canonical_etypes: list[CanonicalEType] = list(graph.canonical_etypes)
        _check_names(self.ntypes, self.canonical_etypes)
        self.node_counts = [graph.num_nodes(ntype) for ntype in self.ntypes]
        self.edge_counts = [graph.num_edges(etype) for etype in self.canonical_etypes]
        self.src_type = [self.ntypes.index(src) for src, _, _ in self.canonical_etypes]
        self.dst_type = [self.ntypes.index(dst) for _, _, dst in self.canonical_etypes]
        self.idtype: torch.dtype = graph.idtype

    @property
    def num_nodes(self) -> int:
        return sum(self.node_counts)

    @property
    def num_edges(self) -> int:
        return sum(self.edge_counts)

    @cached_property
    def offsets(self) -> list[int]:
        """First homogenised id of each node type, and the number of nodes at the end."""
        starts = [0]
        for count in self.node_counts:
            starts.append(starts[-1] + count)
        return starts

    def edges(self, relation: int) -> tuple[Tensor, Tensor]:
        """(source, destination) of each edge, per-type ids, on the CPU, in edge id order."""
        src, dst = self.graph.adjacency(self.canonical_etypes[relation]).coo()
        return src.cpu(), dst.cpu()

    def homogenised_edges(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The same for every relation, with ids that count all nodes, type after type."""
        for relation in range(len(self.canonical_etypes)):
            src, dst = self.edges(relation)
            yield (
                _shifted(src, self.offsets[self.src_type[relation]]),
                _shifted(dst, self.offsets[self.dst_type[relation]]),
            )

    def in_degrees(self) -> Tensor:
        """Number of edges, of any relation, into each node: int64, in homogenised order."""
        degrees = torch.zeros(self.num_nodes, dtype=torch.int64)
        for relation, type_id in enumerate(self.dst_type):
            _, dst = self.edges(relation)
            counts = torch.bincount(dst, minlength=self.node_counts[type_id])
            degrees[self.offsets[type_id] : self.offsets[type_id + 1]] += counts
        return degrees

    def node_features(self, type_id: int) -> dict[str, Tensor]:
        data = self.graph.nodes[self.ntypes[type_id]].data
        return {name: data[name] for name in data.keys() if name not in STRUCTURE_FIELDS}  # noqa: SIM118

    def edge_features(self, relation: int) -> dict[str, Tensor]:
        data = self.graph.edges[self.canonical_etypes[relation]].data
        return {name: data[name] for name in data.keys() if name not in STRUCTURE_FIELDS}  # noqa: SIM118


def _shifted(ids: Tensor, offset: int) -> Tensor:
    return ids.long() + offset if offset else ids


def _check_names(ntypes: list[str], canonical_etypes: list[CanonicalEType]) -> None:
    by_key: dict[str, CanonicalEType] = {}
    for etype in canonical_etypes:
        other = by_key.setdefault(etype_key(etype), etype)
        if other != etype:
            raise ValueError(
                f"two relations must differ in source:relation:destination, as files name them "
                f"(got {other} and {etype}); rename one"
            )
    if len(ntypes) > 1 and DEFAULT_NTYPE in ntypes:
        raise ValueError(
            f"'{DEFAULT_NTYPE}' is reserved for the only node type of a graph, because partition "
            f"books take it for all types at once (got {ntypes}); rename it"
        )
    if len(canonical_etypes) > 1 and DEFAULT_ETYPE in (name for _, name, _ in canonical_etypes):
        raise ValueError(
            f"'{DEFAULT_ETYPE}' is reserved for the only relation of a graph, because partition "
            f"books take it for all relations at once (got {canonical_etypes}); rename it"
        )
