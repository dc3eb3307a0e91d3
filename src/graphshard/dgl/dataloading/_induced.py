# SPDX-License-Identifier: Apache-2.0
"""SubgraphSampler: what the samplers of this folder share: induced subgraphs with lazy features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...graph import EID, NID, Graph, node_subgraph
from ...sampling.lazy_features import (
    FeatureNames,
    check_named,
    read_named,
    set_lazy,
    without_features,
)
from ...sampling.sampler import Sampler


class SubgraphSampler(Sampler):
    """Base of samplers that give the graph of some nodes and of all edges between them.

    It has every feature of the graph that it is drawn from, gathered when read; see [Note: lazy
    features]. Ids are in ``ndata[NID]`` and ``edata[EID]``.

    Args:
        prefetch_ndata: Names of node features that a loader gathers ahead of the training loop; on
            a typed graph also node type to names.
        prefetch_edata: The same for edge features.
        output_device: Where the subgraph shall be; by default where the graph is.
    """

    def __init__(
        self,
        prefetch_ndata: FeatureNames = None,
        prefetch_edata: FeatureNames = None,
        output_device: torch.device | str | None = None,
    ) -> None:
        self.prefetch_ndata = prefetch_ndata or ()
        self.prefetch_edata = prefetch_edata or ()
        self.output_device = output_device

    def induced(self, g: Graph, nodes: dict[str, Tensor]) -> Graph:
        """The subgraph of some nodes, each of them once, with ids and without features.

        Args:
            g: The graph.
            nodes: Node type to ids.

        Raises:
            ValueError: Features are named that the graph does not have.
        """
        named = self.prefetch_ndata, self.prefetch_edata
        check_named(lambda t: g.nodes[t].data, g.ntypes, named[0], "prefetch_ndata")
        check_named(lambda t: g.edges[t].data, g.canonical_etypes, named[1], "prefetch_edata")
        found: Graph = node_subgraph(without_features(g), nodes)
        return found

    def with_features(self, g: Graph, found: Graph) -> Graph:
        """A subgraph that has ids, with the features of the graph, where batches shall be."""
        for ntype in g.ntypes:
            set_lazy(g.nodes[ntype].data, found.nodes[ntype].data, NID)
        for etype in g.canonical_etypes:
            set_lazy(g.edges[etype].data, found.edges[etype].data, EID)
        return found if self.output_device is None else found.to(self.output_device)

    def prefetch(self, batch: Any) -> None:
        """Gather the features that were named, for a batch that ``sample`` returned."""
        subgraph = batch[-1] if isinstance(batch, tuple) else batch
        read_named(subgraph.nodes, subgraph.ntypes, self.prefetch_ndata)
        read_named(subgraph.edges, subgraph.canonical_etypes, self.prefetch_edata)
