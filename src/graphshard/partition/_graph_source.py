# SPDX-License-Identifier: Apache-2.0
"""GraphSource: a graph in memory as partitioning takes it, with edges that come in batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .._base.kernels import num_threads
from .._base.typing import DEFAULT_ETYPE, DEFAULT_NTYPE, CanonicalEType
from ..graph import Graph
from ._edge_files import kernels
from .checked_files import PiecewiseRows, Rows, RowSource, etype_key, identity_of

STRUCTURE_FIELDS = frozenset({"_ID", "_TYPE", "inner_node", "inner_edge"})
"""Fields that describe where a graph came from; as DGL does, they are not taken for features."""


IdArray = npt.NDArray[np.int64]

BATCH_EDGES = 1 << 21


class GraphSource:
    """A graph to be partitioned; nothing is copied and the graph is never written to.

    Args:
        idtype: Of the local ids of parts that are loaded; None: that of the graph.
    """

    def __init__(self, graph: Graph, idtype: torch.dtype | None = None) -> None:
        if not isinstance(graph, Graph):
            raise TypeError(
                f"g must be a graphshard Graph (got {type(graph).__name__}); build one with "
                "graphshard.graph or graphshard.heterograph"
            )
        self.graph = graph
        self.ntypes: list[str] = list(graph.ntypes)
        self.canonical_etypes: list[CanonicalEType] = list(graph.canonical_etypes)
        check_type_names(self.ntypes, self.canonical_etypes)
        self.node_counts = [graph.num_nodes(ntype) for ntype in self.ntypes]
        self.edge_counts = [graph.num_edges(etype) for etype in self.canonical_etypes]
        self.src_type = [self.ntypes.index(src) for src, _, _ in self.canonical_etypes]
        self.dst_type = [self.ntypes.index(dst) for _, _, dst in self.canonical_etypes]
        self.idtype: torch.dtype = graph.idtype if idtype is None else idtype
        self.num_nodes, self.num_edges = sum(self.node_counts), sum(self.edge_counts)
        #: First homogenised id of each node type, and the number of nodes at the end.
        self.offsets = list(itertools.accumulate(self.node_counts, initial=0))

    def edges(self, relation: int) -> tuple[Tensor, Tensor]:
        """(source, destination) of each edge, per-type ids, on the CPU, in edge id order."""
        src, dst = self.graph.adjacency(self.canonical_etypes[relation]).coo()
        return src.cpu(), dst.cpu()

    def edge_batches(self, relation: int) -> Iterator[tuple[IdArray, IdArray]]:
        """The same as arrays, some edges at a time."""
        src, dst = self.edges(relation)
        for first in range(0, len(src), BATCH_EDGES):
            some = slice(first, first + BATCH_EDGES)
            yield src[some].numpy(), dst[some].numpy()

    def identity(self) -> dict[str, Any]:
        """Numbers that depend on every edge, in order, and on features."""
        numbers = []
        for relation in range(len(self.canonical_etypes)):
            done, total = 0, 0
            for src, dst in self.edge_batches(relation):
                total += kernels().hash_edges(dst, src, 0, 0, done, num_threads())[0]
                done += len(src)
            numbers.append(total % 2**64)
        frames = [self.node_features(type_id) for type_id in range(len(self.ntypes))]
        frames += [self.edge_features(relation) for relation in range(len(self.canonical_etypes))]
        features = [[name, *identity_of(frame[name])] for frame in frames for name in sorted(frame)]
        return {"edges": numbers, "features": features}

    def homogenised_edges(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The same for every relation, with ids that count all nodes, type after type."""
        for relation, types in enumerate(zip(self.src_type, self.dst_type, strict=True)):
            src, dst = self.edges(relation)
            first, second = self.offsets[types[0]], self.offsets[types[1]]
            yield (src.long() + first if first else src, dst.long() + second if second else dst)

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

    def node_feature_rows(self, type_id: int, ids: Tensor) -> Mapping[str, RowSource]:
        """Features of some nodes of a type, gathered when they are written."""
        return {name: Rows(item, ids) for name, item in self.node_features(type_id).items()}

    def edge_feature_rows(
        self, relation: int, ids: Callable[[], Iterator[Tensor]], count: int
    ) -> Mapping[str, RowSource]:
        """Likewise of some edges of a relation, whose ids come piece by piece."""
        features = self.edge_features(relation)
        return {name: PiecewiseRows(item, ids, count) for name, item in features.items()}


def check_type_names(ntypes: list[str], canonical_etypes: list[CanonicalEType]) -> None:
    """Raise unless files can name the types apart."""
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
