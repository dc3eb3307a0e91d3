# SPDX-License-Identifier: Apache-2.0
"""SAINTSampler: subgraphs of nodes that are drawn by themselves, by edges, or by walks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import GraphValueError
from ...graph import Graph
from ...sampling.lazy_features import FeatureNames
from ...sampling.sampler import DrawSeed
from ..sampling._random_walk import ONE_OUT_EDGE, walks_along
from ._induced import SubgraphSampler

# In the place of a layer's index in `DrawSeed.key`.
_SAINT_KEY = -5


class SAINTSampler(SubgraphSampler):
    """Draws the nodes of a subgraph; a batch is a `Graph`.

    Source: Zeng et al., "GraphSAINT: Graph Sampling Based Inductive Learning Method", ICLR 2020,
    https://arxiv.org/abs/1907.04931. Its corrections of loss and aggregation for how likely nodes
    and edges are drawn are the model's business.

    Args:
        mode: ``"node"`` draws nodes in proportion to their out-degrees; ``"edge"`` draws edges
            from u to v in proportion to 1 / deg(u) + 1 / deg(v), and takes their ends; ``"walk"``
            takes the nodes on random walks from nodes drawn uniformly.
        budget: How many nodes or edges are drawn, with replacement; for walks a pair, how many and
            how long.
        cache: Keep what depends on the graph alone from batch to batch.
        prefetch_ndata: As for `SubgraphSampler`.
        prefetch_edata: As for `SubgraphSampler`.
        output_device: As for `SubgraphSampler`.

    Raises:
        DGLError: Another mode, or a budget that does not fit it.

    Example:
        >>> from graphshard.data import load_dataset
        >>> sampler = SAINTSampler("walk", (20, 4))
        >>> subgraph = sampler.sample(load_dataset("cora").graph, None)
        >>> 5 < subgraph.num_nodes() <= 100
        True
    """

    def __init__(
        self,
        mode: str,
        budget: int | tuple[int, int],
        cache: bool = True,
        prefetch_ndata: FeatureNames = None,
        prefetch_edata: FeatureNames = None,
        output_device: torch.device | str | None = "cpu",
    ) -> None:
        super().__init__(prefetch_ndata, prefetch_edata, output_device)
        if mode not in ("node", "edge", "walk"):
            raise GraphValueError(f"mode must be 'node', 'edge' or 'walk' (got {mode!r})")
        numbers = list(budget) if isinstance(budget, tuple | list) else [budget]
        whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers)
        if len(numbers) != (2 if mode == "walk" else 1) or not whole:
            raise GraphValueError(
                f"budget must be {'(walks, steps)' if mode == 'walk' else 'a number'} for mode "
                f"{mode!r} (got {budget!r})"
            )
        self.mode, self.budget, self.cache = mode, budget, cache
        self._numbers = numbers
        self._kept: tuple[weakref.ref[Graph], Tensor] | None = None

    def sample(self, g: Graph, indices: Any = None, draw_seed: DrawSeed | None = None) -> Graph:
        """A subgraph of ``g``.

        Args:
            g: A graph of this process, of one node type and one relation.
            indices: Without effect: what a loader iterates over only counts batches.
            draw_seed: Which draw to make; by default one from torch's generator.

        Raises:
            DGLError: A graph of several types.
        """
        if len(g.ntypes) != 1 or len(g.canonical_etypes) != 1:
            raise GraphValueError(
                f"SAINTSampler takes a graph of one relation (got {g.canonical_etypes}); make one "
                "with to_homogeneous"
            )
        draw_seed = DrawSeed.fresh() if draw_seed is None else draw_seed
        generator = torch.Generator().manual_seed(draw_seed.key(_SAINT_KEY, 0))
        if self.mode == "node":
            nodes = self._drawn(g, _node_weights, generator)
        elif self.mode == "edge":
            edges = self._drawn(g, _edge_weights, generator).unique()
            src, dst = g.find_edges(edges.to(g.idtype))
            nodes = torch.cat([src, dst])
        else:
            num_roots, length = self._numbers if g.num_nodes() else (0, 0)
            roots = torch.randint(max(g.num_nodes(), 1), (num_roots,), generator=generator)
            path = [g.canonical_etypes[0]] * length
            options = dict.fromkeys(path, ONE_OUT_EDGE)
            roots = roots.to(device=g.device, dtype=g.idtype)
            traces, _ = walks_along(g, roots, path, options, None, draw_seed)
            nodes = traces[traces >= 0]
        found = self.induced(g, {g.ntypes[0]: nodes.unique().to(g.idtype)})
        return self.with_features(g, found)

    def _drawn(
        self, g: Graph, weights: Callable[[Graph], Tensor], generator: torch.Generator
    ) -> Tensor:
        """Places drawn in proportion to weights, with replacement."""
        kept = self._kept
        if kept is not None and kept[0]() is g:
            sums = kept[1]
        else:
            sums = weights(g).double().cumsum(0)
            if self.cache:
                self._kept = weakref.ref(g), sums
        if sums.numel() == 0:
            return sums.long()
        drawn = torch.rand(self._numbers[0], generator=generator, dtype=torch.float64)
        places = torch.searchsorted(sums, drawn.to(sums.device) * sums[-1], right=True)
        return places.clamp_(max=len(sums) - 1)


def _node_weights(g: Graph) -> Tensor:
    return g.out_degrees().clamp(min=1)


def _edge_weights(g: Graph) -> Tensor:
    src, dst = (side.long() for side in g.edges())
    arriving, leaving = (d.double().clamp(min=1) for d in (g.in_degrees(), g.out_degrees()))
    return 1 / arriving[dst] + 1 / leaving[src]
