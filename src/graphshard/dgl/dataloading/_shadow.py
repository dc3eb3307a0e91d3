# SPDX-License-Identifier: Apache-2.0
"""ShaDowKHopSampler: the subgraph around some nodes, on which a model of any depth runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._base.typing import CanonicalEType
from ...graph import EID, NID, Graph
from ...graph.structure import by_first_occurrence
from ...ops import Adjacency
from ...sampling.graph_store import graph_store_of
from ...sampling.lazy_features import FeatureNames
from ...sampling.sampler import (
    DrawSeed,
    LayerFanout,
    NeighborSampler,
    by_relation,
    by_type,
    only_if_plain,
)
from ._induced import SubgraphSampler


class ShaDowKHopSampler(SubgraphSampler):
    """Draws neighbours hop by hop, and gives the graph of all nodes found and all edges between.

    Source: Zeng et al., "Decoupling the Depth and Scope of Graph Neural Networks", NeurIPS 2021,
    https://arxiv.org/abs/2201.07858.

    Args:
        fanouts: Neighbours per node, one number (or relation to number) per hop, the last for the
            seeds; -1 for all.
        replace: Draw with replacement.
        prob: Name of an edge feature; neighbours are drawn in proportion to it.
        prefetch_node_feats: As ``prefetch_ndata`` of `SubgraphSampler`.
        prefetch_edge_feats: As ``prefetch_edata`` of `SubgraphSampler`.
        output_device: As for `SubgraphSampler`.

    Example:
        >>> from graphshard.data import load_dataset
        >>> cora, sampler = load_dataset("cora").graph, ShaDowKHopSampler([5, 10])
        >>> input_nodes, output_nodes, subgraph = sampler.sample(cora, torch.tensor([3, 8]))
        >>> subgraph.ndata["_ID"][:2], len(input_nodes) == subgraph.num_nodes()
        (tensor([3, 8]), True)
    """

    def __init__(
        self,
        fanouts: Sequence[LayerFanout],
        replace: bool = False,
        prob: str | None = None,
        prefetch_node_feats: FeatureNames = None,
        prefetch_edge_feats: FeatureNames = None,
        output_device: torch.device | str | None = None,
    ) -> None:
        super().__init__(prefetch_node_feats, prefetch_edge_feats, output_device)
        self._sampler = NeighborSampler(fanouts, prob=prob, replace=replace)
        self.fanouts, self.replace, self.prob = self._sampler.fanouts, replace, prob

    def sample(
        self,
        g: Graph,
        seed_nodes: Any,
        exclude_eids: Any = None,
        draw_seed: DrawSeed | None = None,
    ) -> tuple[Any, Any, Graph]:
        """The subgraph around some nodes.

        A seed that is given several times has a node for each, in the order given: all of them
        have the same in-edges, and out-edges leave from the first.

        Args:
            g: A graph of this process.
            seed_nodes: Node ids, or node type to ids.
            exclude_eids: Ids of edges that must neither be drawn nor be in the subgraph, or
                relation to ids.
            draw_seed: Which draw to make; by default one from torch's generator.

        Returns:
            ``(input_nodes, output_nodes, subgraph)``: the subgraph's nodes, which begin with the
            seeds; the seeds; and the subgraph.

        Raises:
            TypeError: Ids without a type on a graph of several types.
            ValueError: Ids that are out of range.
        """
        store = graph_store_of(g)
        seeds = by_type(store, seed_nodes, "seed_nodes")
        excluded = by_relation(store, exclude_eids, "exclude_eids")
        draw_seed = DrawSeed.fresh() if draw_seed is None else draw_seed
        blocks = self._sampler.draw(store, seeds, draw_seed, excluded=excluded, with_eids=False)
        found = {t: blocks[0].srcnodes[t].data[NID] for t in g.ntypes}
        distinct = {t: by_first_occurrence(ids) for t, ids in found.items()}
        subgraph = self.induced(g, distinct)
        if any(len(ids) < len(found[t]) for t, ids in distinct.items()):
            subgraph = _repeated(subgraph, found, distinct)
        subgraph = _without(subgraph, excluded or {})
        is_plain = len(g.ntypes) == 1 and not isinstance(seed_nodes, dict)
        given = only_if_plain(seeds) if is_plain else seeds
        return only_if_plain(found), given, self.with_features(g, subgraph)


def _repeated(subgraph: Graph, found: dict[str, Tensor], distinct: dict[str, Tensor]) -> Graph:
    """A subgraph of distinct nodes with a node for each time that one was found."""
    rows, first = {}, {}
    for ntype, ids in found.items():
        ascending, places = torch.sort(distinct[ntype])
        rows[ntype] = places[torch.searchsorted(ascending, ids)]
        at = torch.arange(len(ids), device=ids.device)
        none = torch.full_like(distinct[ntype], len(ids), dtype=torch.int64)
        first[ntype] = none.scatter_reduce(0, rows[ntype], at, "amin").to(ids.dtype)
    relations, eids = {}, {}
    for etype in subgraph.canonical_etypes:
        near = rows[etype[2]].to(subgraph.idtype)
        src, _, edges = subgraph.in_edges(near, "all", etype)
        degrees = subgraph.in_degrees(near, etype)
        dst = torch.arange(len(near), device=near.device).repeat_interleave(degrees.long())
        relations[etype] = Adjacency(
            first[etype[0]][src.long()],
            dst.to(subgraph.idtype),
            len(found[etype[0]]),
            len(near),
            check=False,
        )
        eids[etype] = subgraph.edges[etype].data[EID][edges.long()]
    new = Graph({ntype: len(ids) for ntype, ids in found.items()}, relations)
    for ntype, ids in found.items():
        new.nodes[ntype].data[NID] = ids
    for etype, ids in eids.items():
        new.edges[etype].data[EID] = ids
    return new


def _without(subgraph: Graph, excluded: dict[CanonicalEType, Tensor]) -> Graph:
    """A subgraph without edges of some ids of the graph that it is from."""
    kept = {
        etype: ~torch.isin(subgraph.edges[etype].data[EID], ids) for etype, ids in excluded.items()
    }
    if all(bool(mask.all()) for mask in kept.values()):
        return subgraph
    relations = {}
    for etype, adjacency in zip(subgraph.canonical_etypes, subgraph.relations, strict=True):
        relations[etype] = adjacency
        if etype in kept:
            src, dst = (side[kept[etype]] for side in adjacency.coo())
            num_src, num_dst = subgraph.num_nodes(etype[0]), subgraph.num_nodes(etype[2])
            relations[etype] = Adjacency(src, dst, num_src, num_dst, check=False)
    new = Graph({t: subgraph.num_nodes(t) for t in subgraph.ntypes}, relations)
    for ntype in subgraph.ntypes:
        new.nodes[ntype].data[NID] = subgraph.nodes[ntype].data[NID]
    for etype in subgraph.canonical_etypes:
        ids = subgraph.edges[etype].data[EID]
        new.edges[etype].data[EID] = ids[kept[etype]] if etype in kept else ids
    return new
