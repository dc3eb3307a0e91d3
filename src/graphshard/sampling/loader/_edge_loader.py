# SPDX-License-Identifier: Apache-2.0
"""EdgeDataLoader: mini-batches of edges, with the arguments that older releases of DGL have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..._typing import EType
from ..sampler import Exclude, as_edge_prediction_sampler
from ._node_loader import LocalDataLoader


class EdgeDataLoader(LocalDataLoader):
    """A `DataLoader` over edge ids, whose sampler is made by `as_edge_prediction_sampler`.

    Args:
        g: The graph.
        eids: Edge ids, or relation to ids.
        graph_sampler: Draws blocks for nodes.
        device: As for `DataLoader`.
        *unnamed: As for `DataLoader`.
        exclude: As for `EdgePredictionSampler`.
        reverse_eids: As for `EdgePredictionSampler`.
        reverse_etypes: As for `EdgePredictionSampler`.
        negative_sampler: As for `EdgePredictionSampler`.
        prefetch_labels: As for `EdgePredictionSampler`.
        **options: As for `DataLoader`.

    Example:
        >>> from graphshard.data import load_dataset
        >>> from graphshard.dataloading import NeighborSampler
        >>> cora, sampler = load_dataset("cora").graph, NeighborSampler([10, 5])
        >>> loader = EdgeDataLoader(cora, torch.arange(100), sampler, exclude="self", batch_size=50)
        >>> [pair_graph.num_edges() for input_nodes, pair_graph, blocks in loader]
        [50, 50]
    """

    def __init__(
        self,
        g: Any,
        eids: Any,
        graph_sampler: Any,
        device: torch.device | str | None = None,
        *unnamed: Any,
        exclude: Exclude = None,
        reverse_eids: Tensor | Mapping[EType, Tensor] | None = None,
        reverse_etypes: Mapping[EType, EType] | None = None,
        negative_sampler: Any = None,
        prefetch_labels: Any = None,
        **options: Any,
    ) -> None:
        sampler = as_edge_prediction_sampler(
            graph_sampler,
            exclude,
            reverse_eids,
            reverse_etypes,
            negative_sampler,
            prefetch_labels,
        )
        super().__init__(g, eids, sampler, device, *unnamed, **options)
