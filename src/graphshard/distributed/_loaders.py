# SPDX-License-Identifier: Apache-2.0
"""DistNodeDataLoader: batches of nodes of a `DistGraph`, under DGL's name."""

from __future__ import annotations

from typing import Any

import torch

from ..dataloading import NodeDataLoader
from ._dist_graph import DistGraph


class DistNodeDataLoader(NodeDataLoader):
    """A `graphshard.dataloading.NodeDataLoader` of a `DistGraph`.

    All trainers make it together, each with nodes of its own, and get the same number of batches:
    where one would need fewer than another, its batches are smaller.

    Args:
        g: The graph.
        nids: Ids of nodes, or type to ids, of this trainer; from `node_split`.
        graph_sampler: Draws blocks.
        device: Where batches shall be.
        **options: As for `graphshard.dataloading.DataLoader`.

    Raises:
        TypeError: ``g`` is no `DistGraph`.
    """

    def __init__(
        self,
        g: DistGraph,
        nids: Any,
        graph_sampler: Any,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(g, DistGraph):
            raise TypeError(
                f"g must be a DistGraph (got {type(g).__name__}); use graphshard.dataloading for "
                "a graph that is whole in this process"
            )
        super().__init__(g, nids, graph_sampler, device, **options)
