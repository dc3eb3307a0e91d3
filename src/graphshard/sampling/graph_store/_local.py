# SPDX-License-Identifier: Apache-2.0
"""LocalGraphStore: neighbours in a graph that is whole in this process."""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._base.typing import CanonicalEType
from ...graph import Graph
from ...graph.frame import LazyRows
from ...ops import Adjacency
from ._edges import CheckedWeights, EdgeLists, ListKey
from ._graph_store import DrawOptions, EdgeDir, NeighborRequest, SampledNeighbors


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
        self._relations = tuple(graph.relations)
        self._lists: dict[ListKey, EdgeLists] = {}
        self._weights = CheckedWeights()

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalGraphStore:
        return LocalGraphStore(copy.deepcopy(self.graph, memo))

    @property
    def is_current(self) -> bool:
        """Whether the graph still has the edges that it had; it can be changed in place."""
        now = self.graph.relations
        return len(now) == len(self._relations) and all(map(operator.is_, now, self._relations))

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
        return [self.draw(request, options, (excluded or {})) for request in requests]

    def draw(
        self,
        request: NeighborRequest,
        options: DrawOptions,
        excluded: Mapping[CanonicalEType, Tensor],
        weights: Tensor | None = None,
    ) -> SampledNeighbors:
        """Draw for one request; ``weights`` by edge id go before the feature that options name.

        Args:
            request: Which nodes.
            options: How to draw.
            excluded: As for `sample_neighbors`.
            weights: float32 or float64 ``[num_edges]``, 0 or more.
        """
        lists = self.edge_lists(request.etype, options.edge_dir)
        counts, positions, picked = lists.draw(
            request,
            request.nodes,
            request.nodes.to(torch.int64),
            options,
            weights=self.placed_weights(request.etype, options)
            if weights is None
            else lists.by_position(weights),
            labor_ids=lists.neighbors if options.labor else None,
            excluded=excluded.get(request.etype),
        )
        if not options.with_eids:
            return SampledNeighbors(counts, picked, None)
        eids: Tensor | LazyRows = positions.to(picked.dtype)
        if lists.eids is not None:
            eids = LazyRows(lists.eids, positions)  # gathered where a model reads them
        return SampledNeighbors(counts, picked, eids)

    def edge_lists(self, etype: CanonicalEType, edge_dir: EdgeDir) -> EdgeLists:
        """The edges of a relation as compressed rows."""
        key = etype, edge_dir
        if key not in self._lists:
            edges: Adjacency = self.graph.relations[self.graph.canonical_etypes.index(etype)]
            self._lists[key] = EdgeLists(*(edges.csc() if edge_dir == "in" else edges.csr()))
        return self._lists[key]

    def placed_weights(self, etype: CanonicalEType, options: DrawOptions) -> Tensor | None:
        """The weights that options name, by position in `edge_lists`; None where they name none."""
        if options.weights is None:
            return None
        feature = self._weights.find(self.graph.edges[etype].data, etype, options)
        if options.edge_dir not in feature.placed:
            lists = self.edge_lists(etype, options.edge_dir)
            feature.placed[options.edge_dir] = lists.by_position(feature.checked)
        return feature.placed[options.edge_dir]
