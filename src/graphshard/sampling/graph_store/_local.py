# SPDX-License-Identifier: Apache-2.0
"""LocalGraphStore: neighbours in a graph that is whole in this process."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._typing import CanonicalEType
from ...graph import Graph
from ...graph.frame import LazyRows
from ...ops import Adjacency
from ._edges import CheckedWeights, EdgeLists, ListKey
from ._graph_store import DrawOptions, NeighborRequest, SampledNeighbors


class LocalGraphStore:
    """A graph that is whole in this process.

    Args:
        graph: Its node ids are taken as the original ones.
    """

    group = None

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.ntypes: Sequence[str] = graph.ntypes
        self.canonical_etypes: Sequence[CanonicalEType] = graph.canonical_etypes
        self.idtype, self.device = graph.idtype, graph.device
        self._lists: dict[ListKey, EdgeLists] = {}
        self._weights = CheckedWeights()

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalGraphStore:
        return LocalGraphStore(copy.deepcopy(self.graph, memo))

    def num_nodes(self, ntype: str) -> int:
        return self.graph.num_nodes(ntype)

    def num_edges(self, etype: CanonicalEType) -> int:
        return self.graph.num_edges(etype)

    def on(self, group: object) -> LocalGraphStore:
        return self

    def sample_neighbors(
        self,
        requests: Sequence[NeighborRequest],
        options: DrawOptions,
        excluded: Mapping[CanonicalEType, Tensor] | None = None,
    ) -> list[SampledNeighbors]:
        return [self._draw(request, options, (excluded or {})) for request in requests]

    def _draw(
        self,
        request: NeighborRequest,
        options: DrawOptions,
        excluded: Mapping[CanonicalEType, Tensor],
    ) -> SampledNeighbors:
        lists = self._edge_lists((request.etype, options.edge_dir))
        counts, positions, picked = lists.draw(
            request,
            request.nodes,
            request.nodes.to(torch.int64),
            options,
            weights=self._weights_of(request.etype, options, lists),
            labor_ids=lists.neighbors if options.labor else None,
            excluded=excluded.get(request.etype),
        )
        if not options.with_eids:
            return SampledNeighbors(counts, picked, None)
        eids: Tensor | LazyRows = positions.to(picked.dtype)
        if lists.eids is not None:
            eids = LazyRows(lists.eids, positions)  # gathered where a model reads them
        return SampledNeighbors(counts, picked, eids)

    def _edge_lists(self, key: ListKey) -> EdgeLists:
        if key not in self._lists:
            etype, edge_dir = key
            edges: Adjacency = self.graph.relations[self.graph.canonical_etypes.index(etype)]
            self._lists[key] = EdgeLists(*(edges.csc() if edge_dir == "in" else edges.csr()))
        return self._lists[key]

    def _weights_of(
        self, etype: CanonicalEType, options: DrawOptions, lists: EdgeLists
    ) -> Tensor | None:
        if options.weights is None:
            return None
        feature = self._weights.find(self.graph.edges[etype].data, etype, options)
        placed, by_id = feature.placed, feature.checked
        if options.edge_dir not in placed:
            placed[options.edge_dir] = by_id if lists.eids is None else by_id[lists.eids]
        return placed[options.edge_dir]
