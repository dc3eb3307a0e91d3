# SPDX-License-Identifier: Apache-2.0
"""Kinds of `NeighborSampler`: all neighbours, LABOR, and one that names what comes with blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..graph_store import DrawOptions
from ..lazy_features import FeatureNames
from ._neighbor_sampler import DrawSeed, LayerFanout, NeighborSampler

GivenFeatures: TypeAlias = Mapping[str, Tensor | Mapping[str, Tensor]]
"""Feature name to rows, or to node type to rows."""


class MultiLayerFullNeighborSampler(NeighborSampler):
    """Takes every neighbour, layer by layer.

    Args:
        num_layers: Number of blocks.
        **kwargs: As for `NeighborSampler`, besides ``fanouts`` and ``replace``.
    """

    def __init__(self, num_layers: int, **kwargs: Any) -> None:
        if num_layers < 1:
            raise ValueError(f"num_layers must be at least 1 (got {num_layers})")
        super().__init__([-1] * num_layers, **kwargs)


class LaborSampler(NeighborSampler):
    """Layer-neighbour sampling: the variance of neighbour sampling with fewer distinct inputs.

    One random number per source node is shared by all nodes that might draw it, so that their
    samples overlap. An edge is drawn with probability ``fanout / degree`` (or in proportion to
    ``prob``), so the number drawn for a node varies around the fanout.

    Source: Balin and Catalyurek, "Layer-Neighbor Sampling: Defusing Neighborhood Explosion in
    GNNs", NeurIPS 2023, https://arxiv.org/abs/2210.13339; its variant LABOR-0.

    Args:
        fanouts: As for `NeighborSampler`; mean numbers of neighbours.
        edge_dir: As for `NeighborSampler`.
        prob: As for `NeighborSampler`.
        importance_sampling: 0; the paper's iterated variants are not offered.
        layer_dependency: Use the same random numbers in all layers, for still fewer inputs.
        batch_dependency: Use the same random numbers for this many batches in a row.
        prefetch_node_feats: As for `BlockSampler`.
        prefetch_labels: As for `BlockSampler`.
        prefetch_edge_feats: As for `BlockSampler`.
        output_device: As for `BlockSampler`.

    Raises:
        ValueError: As for `NeighborSampler`, or ``batch_dependency`` below 1.
        NotImplementedError: ``importance_sampling`` other than 0.
    """

    def __init__(
        self,
        fanouts: Sequence[LayerFanout],
        edge_dir: str = "in",
        prob: str | None = None,
        importance_sampling: int = 0,
        layer_dependency: bool = False,
        batch_dependency: int = 1,
        prefetch_node_feats: FeatureNames = None,
        prefetch_labels: FeatureNames = None,
        prefetch_edge_feats: FeatureNames = None,
        output_device: torch.device | str | None = None,
    ) -> None:
        if importance_sampling != 0:
            raise NotImplementedError(
                f"importance_sampling must be 0, the variant LABOR-0 (got {importance_sampling}); "
                "layer_dependency=True also lowers the number of inputs"
            )
        if batch_dependency < 1:
            raise ValueError(f"batch_dependency must be at least 1 (got {batch_dependency})")
        super().__init__(
            fanouts,
            edge_dir,
            prob,
            prefetch_node_feats=prefetch_node_feats,
            prefetch_labels=prefetch_labels,
            prefetch_edge_feats=prefetch_edge_feats,
            output_device=output_device,
        )
        self.layer_dependency, self.batch_dependency = layer_dependency, batch_dependency

    @property
    def options(self) -> DrawOptions:
        return replace(super().options, labor=True)

    def draw_seed_for(self, draw_seed: DrawSeed) -> DrawSeed:
        draw_seed = draw_seed.at(step=draw_seed.step // self.batch_dependency)
        return _SameForAllLayers(**vars(draw_seed)) if self.layer_dependency else draw_seed


class _SameForAllLayers(DrawSeed):
    """A `DrawSeed` whose keys, as LABOR shares them, depend neither on layer nor on relation."""

    def key(self, layer: int, relation: int) -> int:
        return super().key(0, 0)


class DistNeighborSampler(NeighborSampler):
    """Draws neighbours for a `DataLoader` over a sharded graph, as SAR names it.

    Args:
        fanouts: Neighbours per node and relation; ``fanouts[i]`` belongs to ``blocks[i]``, so the
            last one is for the seeds. A number (-1 for all), or relation to number.
        prob: Name of an edge feature; neighbours are drawn in proportion to it.
        replace: Draw with replacement.
        copy_edata: The blocks have every feature that the graph's ``edata`` has when the loader is
            made, besides its ids.
        input_node_features: Name to the rows of this rank's nodes, ``[num_owned, *]``; on a typed
            graph name to node type to rows. They come as ``blocks[0].srcdata[name]``.
        output_node_features: The same; they come as ``blocks[-1].dstdata[name]``.
        output_device: Where a loader puts the blocks; by default where the graph is.
        use_hybrid_partitioning: Every host has the structure of the whole graph, so drawing needs
            no communication: ``transport="replicated"`` of a `DataLoader`, which by itself chooses
            so where the structure fits.
        batch_comm_overlap: Accepted for SAR's scripts: a `DataLoader` fetches features while it
            draws, and while the caller computes.
        edge_dir: As for `NeighborSampler`.
        mask: As for `NeighborSampler`.

    Raises:
        TypeError: ``copy_edata`` is no bool.
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
        copy_edata: bool = True,
        input_node_features: GivenFeatures | None = None,
        output_node_features: GivenFeatures | None = None,
        output_device: torch.device | str | None = None,
        use_hybrid_partitioning: bool = False,
        batch_comm_overlap: bool = False,
        *,
        edge_dir: str = "in",
        mask: str | None = None,
    ) -> None:
        if not isinstance(copy_edata, bool):
            raise TypeError(
                "the fourth argument of DistNeighborSampler is copy_edata, True or False (got "
                f"{copy_edata!r}); name input_node_features=..."
            )
        super().__init__(fanouts, edge_dir, prob, mask, replace, output_device=output_device)
        self.input_node_features = dict(input_node_features or {})
        self.output_node_features = dict(output_node_features or {})
        self.copy_edata = copy_edata
        self.use_hybrid_partitioning = use_hybrid_partitioning
