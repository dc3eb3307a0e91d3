# SPDX-License-Identifier: Apache-2.0
"""DistNeighborSampler: a neighbour sampler that says which features come with the blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ._ids import refuse_unnamed
from ._samplers import LayerFanout, NeighborSampler

Features: TypeAlias = Mapping[str, Tensor | Mapping[str, Tensor]]
"""Feature name to rows, or to node type to rows."""


class DistNeighborSampler(NeighborSampler):
    """Draws neighbours for a `DataLoader` over a sharded graph, as SAR names it.

    Args:
        fanouts: Neighbours per node and relation; ``fanouts[i]`` belongs to ``blocks[i]``, so the
            last one is for the seeds. A number (-1 for all), or relation to number.
        prob: Name of an edge feature; neighbours are drawn in proportion to it.
        replace: Draw with replacement.
        *unnamed: None: everything else goes by name.
        input_node_features: Name to the rows of this rank's nodes, ``[num_owned, *]``; on a typed
            graph name to node type to rows. They come as ``blocks[0].srcdata[name]``.
        output_node_features: The same; they come as ``blocks[-1].dstdata[name]``.
        output_device: Where a loader puts the blocks; by default where the graph is.
        edge_dir: As for `NeighborSampler`.
        mask: As for `NeighborSampler`.

    Raises:
        ValueError: As for `NeighborSampler`.

    Example:
        >>> labels = torch.tensor([0, 1, 1])
        >>> DistNeighborSampler([10, 5], output_node_features={"labels": labels}).num_layers
        2
    """

    def __init__(
        self,
        fanouts: Sequence[LayerFanout],
        prob: str | None = None,
        replace: bool = False,
        *unnamed: Any,
        input_node_features: Features | None = None,
        output_node_features: Features | None = None,
        output_device: torch.device | str | None = None,
        edge_dir: str = "in",
        mask: str | None = None,
    ) -> None:
        names = "input_node_features", "output_node_features", "output_device"
        refuse_unnamed("DistNeighborSampler", unnamed, *names)
        super().__init__(fanouts, edge_dir, prob, mask, replace, output_device=output_device)
        self.input_node_features = dict(input_node_features or {})
        self.output_node_features = dict(output_node_features or {})
