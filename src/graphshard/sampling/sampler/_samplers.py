# SPDX-License-Identifier: Apache-2.0
"""NeighborSampler and its kin: how neighbours are chosen, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..._typing import CanonicalEType, EType
from ...graph import NID, Block, Graph
from .._lazy_features import FeatureNames, set_all_lazy
from ..graph_store import DrawOptions, GraphStore, graph_store_of
from ._block_sampler import BlockSampler
from ._blocks import DrawSeed, IdTables, RelationFanouts, sample_blocks
from ._ids import by_relation, by_type, only_if_plain, refuse_unnamed

LayerFanout: TypeAlias = int | Mapping[EType, int]

GivenFeatures: TypeAlias = Mapping[str, Tensor | Mapping[str, Tensor]]
"""Feature name to rows, or to node type to rows."""


class NeighborSampler(BlockSampler):
    """Draws up to a fixed number of neighbours for every node, layer by layer.

    Source: Hamilton, Ying and Leskovec, "Inductive Representation Learning on Large Graphs",
    NeurIPS 2017, https://arxiv.org/abs/1706.02216.

    Args:
        fanouts: Neighbours per node and relation; ``fanouts[i]`` belongs to ``blocks[i]``, so the
            last one is for the seeds. A number (-1 for all), or relation to number.
        edge_dir: ``"in"`` follows in-edges; ``"out"`` follows out-edges, and the blocks' edges run
            from the neighbours found to the nodes that looked for them.
        prob: Name of an edge feature; neighbours are drawn in proportion to it, and those with 0
            never.
        mask: Name of a bool edge feature; edges where it is false are never drawn.
        replace: Draw with replacement: nodes with any neighbour then have exactly the fanout.
        prefetch_node_feats: As for `BlockSampler`.
        prefetch_labels: As for `BlockSampler`.
        prefetch_edge_feats: As for `BlockSampler`.
        output_device: As for `BlockSampler`.

    Raises:
        ValueError: No fanouts, a fanout below -1, an unknown direction, both ``prob`` and
            ``mask``, or -1 together with ``replace``.

    Example:
        >>> from graphshard.data import load_dataset
        >>> cora, sampler = load_dataset("cora").graph, NeighborSampler([10, 5])
        >>> inputs, outputs, blocks = sampler.sample(cora, torch.tensor([3, 8]))
        >>> outputs, len(blocks), blocks[-1].num_dst_nodes()
        (tensor([3, 8]), 2, 2)
    """

    def __init__(
        self,
        fanouts: Sequence[LayerFanout],
        edge_dir: str = "in",
        prob: str | None = None,
        mask: str | None = None,
        replace: bool = False,
        prefetch_node_feats: FeatureNames = None,
        prefetch_labels: FeatureNames = None,
        prefetch_edge_feats: FeatureNames = None,
        output_device: torch.device | str | None = None,
    ) -> None:
        self.fanouts = list(fanouts)
        _check_fanouts(self.fanouts, replace)
        if edge_dir not in ("in", "out"):
            raise ValueError(f"edge_dir must be 'in' or 'out' (got {edge_dir!r})")
        if prob is not None and mask is not None:
            raise ValueError(
                f"give prob or mask, not both (got {prob!r} and {mask!r}); a weight of 0 masks"
            )
        super().__init__(prefetch_node_feats, prefetch_labels, prefetch_edge_feats, output_device)
        self.num_layers = len(self.fanouts)
        self.edge_dir, self.prob, self.mask, self.replace = edge_dir, prob, mask, replace

    @property
    def options(self) -> DrawOptions:
        """How neighbours are drawn."""
        return DrawOptions(
            replace=self.replace,
            weights=self.prob if self.mask is None else self.mask,
            weights_are_mask=self.mask is not None,
            edge_dir=self.edge_dir,  # type: ignore[arg-type]
        )

    def fanouts_for(self, structure: GraphStore) -> list[RelationFanouts]:
        """Fanout of every relation, per block.

        Raises:
            ValueError: The fanouts do not fit the graph's relations.
        """
        return [_per_relation(layer, structure.canonical_etypes) for layer in self.fanouts]

    def draw_seed_for(self, draw_seed: DrawSeed) -> DrawSeed:
        """Which draw a batch takes; samplers that couple batches change it."""
        return draw_seed

    def draw(
        self,
        structure: GraphStore,
        seeds: Mapping[str, Tensor],
        draw_seed: DrawSeed,
        *,
        excluded: Mapping[CanonicalEType, Tensor] | None = None,
        tables: IdTables | None = None,
        with_eids: bool = True,
    ) -> list[Block]:
        """The blocks of one batch, without features."""
        options = self.options
        if not with_eids:
            options = DrawOptions(**{**vars(options), "with_eids": False})
        return sample_blocks(
            structure,
            self.fanouts_for(structure),
            options,
            seeds,
            self.draw_seed_for(draw_seed),
            excluded=excluded,
            tables=tables,
        )

    def sample_blocks(
        self,
        g: Any,
        seed_nodes: Any,
        exclude_eids: Any = None,
        draw_seed: DrawSeed | None = None,
    ) -> tuple[Any, Any, list[Block]]:
        """As `BlockSampler.sample`, which calls it; every feature is attached, named or not."""
        store = graph_store_of(g)
        blocks = self.draw(
            store,
            by_type(store, seed_nodes, "indices"),
            DrawSeed.fresh() if draw_seed is None else draw_seed,
            excluded=by_relation(store, exclude_eids, "exclude_eids"),
        )
        if isinstance(g, Graph):
            set_all_lazy(g, blocks)
        inputs = {t: blocks[0].srcnodes[t].data[NID] for t in store.ntypes}
        outputs = {t: blocks[-1].dstnodes[t].data[NID] for t in store.ntypes}
        return only_if_plain(inputs), only_if_plain(outputs), blocks


MultiLayerNeighborSampler = NeighborSampler


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
        return DrawOptions(**{**vars(super().options), "labor": True})

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
        input_node_features: GivenFeatures | None = None,
        output_node_features: GivenFeatures | None = None,
        output_device: torch.device | str | None = None,
        edge_dir: str = "in",
        mask: str | None = None,
    ) -> None:
        names = "input_node_features", "output_node_features", "output_device"
        refuse_unnamed("DistNeighborSampler", unnamed, *names)
        super().__init__(fanouts, edge_dir, prob, mask, replace, output_device=output_device)
        self.input_node_features = dict(input_node_features or {})
        self.output_node_features = dict(output_node_features or {})


def _check_fanouts(fanouts: Sequence[LayerFanout], replace: bool) -> None:
    if not fanouts:
        raise ValueError("fanouts must hold one entry per layer (got none)")
    for layer, fanout in enumerate(fanouts):
        numbers = list(fanout.values()) if isinstance(fanout, Mapping) else [fanout]
        for number in numbers:
            if not isinstance(number, int) or isinstance(number, bool) or number < -1:
                raise ValueError(
                    f"a fanout must be an integer of at least -1, which means all neighbours (got "
                    f"{number!r} for layer {layer})"
                )
            if number == -1 and replace:
                raise ValueError(
                    f"all neighbours (-1, layer {layer}) cannot be drawn with replacement; leave "
                    "replace out, or give a number"
                )


def _per_relation(fanout: LayerFanout, etypes: Sequence[CanonicalEType]) -> RelationFanouts:
    if not isinstance(fanout, Mapping):
        return dict.fromkeys(etypes, fanout)
    found: dict[CanonicalEType, int] = {}
    for name, number in fanout.items():
        matching = [t for t in etypes if name in (t, t[1])]
        if len(matching) != 1:
            raise ValueError(
                f"a fanout must name one relation (got {name!r}, which {len(matching)} of "
                f"{list(etypes)} match); use (source type, name, destination type)"
            )
        found[matching[0]] = number
    missing = [t for t in etypes if t not in found]
    if missing:
        raise ValueError(
            f"a dictionary of fanouts must name every relation (missing {missing}); give 0 for "
            "those that shall not be followed"
        )
    return found
