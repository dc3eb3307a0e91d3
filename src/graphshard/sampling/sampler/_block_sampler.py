# SPDX-License-Identifier: Apache-2.0
"""Sampler and BlockSampler: what loaders ask of a sampler, ours or a user's own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ...graph import EID, NID, Block, Graph
from ..lazy_features import FeatureNames, check_named, names_for, read_named, set_lazy

if TYPE_CHECKING:
    from ._neighbor_sampler import DrawSeed


class Sampler:
    """Base of everything that turns the indices of a batch into what a training step sees.

    A loader calls `sample` for each batch. Subclasses may return anything; one that has a parameter
    ``draw_seed`` is told which draw to make, see `DrawSeed`.
    """

    def sample(self, g: Any, indices: Any) -> Any:
        """What a loader yields for ``indices`` of ``g``; a subclass says what."""
        raise NotImplementedError(f"{type(self).__name__} must define sample(self, g, indices)")


class BlockSampler(Sampler):
    """Base of samplers that make one block per layer.

    A subclass says in `sample_blocks` how. The features that were named are attached to what it
    returns; see [Note: lazy features].

    Args:
        prefetch_node_feats: Names of node features that a loader puts into ``blocks[0].srcdata``;
            on a typed graph also node type to names.
        prefetch_labels: Names of node features that it puts into ``blocks[-1].dstdata``.
        prefetch_edge_feats: Names of edge features that it puts into every block's ``edata``.
        output_device: Where a loader puts the blocks; by default where the graph is.
    """

    def __init__(
        self,
        prefetch_node_feats: FeatureNames = None,
        prefetch_labels: FeatureNames = None,
        prefetch_edge_feats: FeatureNames = None,
        output_device: torch.device | str | None = None,
    ) -> None:
        self.prefetch_node_feats = prefetch_node_feats or ()
        self.prefetch_labels = prefetch_labels or ()
        self.prefetch_edge_feats = prefetch_edge_feats or ()
        self.output_device = output_device

    def sample_blocks(
        self, g: Any, seed_nodes: Any, exclude_eids: Any = None
    ) -> tuple[Any, Any, list[Block]]:
        """Blocks for seed nodes; an override may take ``draw_seed`` (a `DrawSeed` or None) too.

        Args:
            g: The graph.
            seed_nodes: Node ids, or node type to ids.
            exclude_eids: Ids of edges that must not be drawn, or relation to ids.

        Returns:
            ``(input_nodes, output_nodes, blocks)``.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define sample_blocks(self, g, seed_nodes, "
            "exclude_eids=None), or sample"
        )

    def sample(
        self,
        g: Any,
        seed_nodes: Any,
        exclude_eids: Any = None,
        draw_seed: DrawSeed | None = None,
    ) -> tuple[Any, Any, list[Block]]:
        """Blocks for seed nodes of a graph, or of the graph that a manager is a part of.

        Args:
            g: A `Graph`, or a `GraphShardManager` (then collective, and without features).
            seed_nodes: Ids, or node type to ids; the last block has a destination for each, in
                their order, also for one that is there several times.
            exclude_eids: Ids of edges that must not be drawn, or relation to ids.
            draw_seed: Which draw to make; by default one from torch's generator.

        Returns:
            ``(input_nodes, output_nodes, blocks)``; nodes by type where there are several types.

        Raises:
            ValueError: Seeds that are out of range, fanouts or weights that do not
                fit the graph, or features that it does not have.
        """
        keyed = {"draw_seed": draw_seed} if _is_keyed(type(self).sample_blocks) else {}
        result = self.sample_blocks(g, seed_nodes, exclude_eids=exclude_eids, **keyed)
        if isinstance(g, Graph):
            self._attach_named(g, result[2])
        return result

    def assign_lazy_features(self, result: Any) -> Any:
        """``result`` as it is: DGL's samplers call this to attach features, which `sample` does.

        Args:
            result: What `sample_blocks` returned.
        """
        return result

    def prefetch(self, batch: Any) -> None:
        """Gather the features that were named, for a batch that `sample` returned.

        A loader does so ahead of the training loop, in its own thread.
        """
        blocks = batch[-1]
        read_named(blocks[0].srcnodes, blocks[0].srctypes, self.prefetch_node_feats)
        read_named(blocks[-1].dstnodes, blocks[-1].dsttypes, self.prefetch_labels)
        for block in blocks:
            read_named(block.edges, block.canonical_etypes, self.prefetch_edge_feats)

    def _attach_named(self, g: Graph, blocks: list[Block]) -> None:
        node_feats, labels = self.prefetch_node_feats, self.prefetch_labels
        check_named(lambda t: g.nodes[t].data, g.ntypes, node_feats, "prefetch_node_feats")
        check_named(lambda t: g.nodes[t].data, g.ntypes, labels, "prefetch_labels")
        edge_feats = self.prefetch_edge_feats
        check_named(
            lambda t: g.edges[t].data, g.canonical_etypes, edge_feats, "prefetch_edge_feats"
        )
        for ntype in g.ntypes:
            data = g.nodes[ntype].data
            if ntype in blocks[0].srctypes:
                set_lazy(data, blocks[0].srcnodes[ntype].data, NID, names_for(node_feats, ntype))
            if ntype in blocks[-1].dsttypes:
                set_lazy(data, blocks[-1].dstnodes[ntype].data, NID, names_for(labels, ntype))
        for etype in g.canonical_etypes:
            for block in blocks:
                if etype in block.canonical_etypes:
                    data, names = g.edges[etype].data, names_for(edge_feats, etype)
                    set_lazy(data, block.edges[etype].data, EID, names)


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function can be called with an argument of that name."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a function that is not written in Python
        return False
    return name in parameters or any(p.kind == p.VAR_KEYWORD for p in parameters.values())


@functools.lru_cache(maxsize=64)
def _is_keyed(sample_blocks: Callable[..., Any]) -> bool:
    """Whether a method ``sample_blocks`` of some class takes the draw; asked for every batch."""
    return takes(sample_blocks, "draw_seed")
