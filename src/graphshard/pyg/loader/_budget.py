# SPDX-License-Identifier: Apache-2.0
"""The sampling of Hu, Dong, Wang and Sun, "Heterogeneous Graph Transformer" (WWW 2020).

https://arxiv.org/abs/2003.01332, algorithm 1. A node that is not in the subgraph yet has a budget:
for each node of the subgraph that it has an edge to, one over the number of edges that were looked
at there. A hop takes a given number of nodes of each type, in proportion to the squares of their
budgets, without replacement. At the end all edges between the nodes are taken. As in the authors'
program and in PyG's, at most 50 edges of a node and a relation are looked at, drawn alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...ops.counter_random import key_state, states, unit, word
from ...sampling import DrawOptions, DrawSeed, NeighborRequest
from ...sampling.sampler import IdTables
from ._hops import FoundNodes, HopSample, induced_edges, relation_key
from ._sources import SamplingSource

_MOST_EDGES = 50
_DOMAIN = 0x1F83D9ABFB41BD6B
_TAKEN = 1 << 21
"""Stands in the key of a draw of nodes, besides the hop."""


def sample_budget(
    source: SamplingSource,
    num_samples: Mapping[str, Sequence[int]],
    seeds: Mapping[str, Tensor],
    draw_seed: DrawSeed,
) -> HopSample:
    """Draw a subgraph around some seeds; collective where the source is.

    Args:
        source: Where neighbours come from.
        num_samples: Node type to the nodes that each hop takes.
        seeds: Node type to int64 ids of the source.
        draw_seed: Which draw this is.
    """
    tables, none = IdTables.of(source.graph), torch.empty(0, dtype=torch.int64)
    nodes = {t: FoundNodes(tables, t, source.count(t), seeds.get(t, none)) for t in source.ntypes}
    budgets = {ntype: _Budget() for ntype in source.ntypes}
    begin = dict.fromkeys(source.ntypes, 0)
    for hop in range(max((len(each) for each in num_samples.values()), default=0)):
        requests = [
            NeighborRequest(
                etype,
                nodes[etype[2]].ids[begin[etype[2]] :],
                _MOST_EDGES,
                relation_key(draw_seed, hop, etype),
            )
            for etype in source.etypes
        ]
        drawn = source.graph.sample_neighbors(requests, DrawOptions(with_eids=False))
        for request, edges in zip(requests, drawn, strict=True):
            share = (1.0 / edges.counts.clamp(min=1).double()).repeat_interleave(edges.counts)
            budgets[request.etype[0]].add(edges.neighbors.to(torch.int64), share)
        begin = {ntype: len(found) for ntype, found in nodes.items()}
        candidates = {t: budget.left(nodes[t]) for t, budget in budgets.items()}
        originals = source.original({t: ids for t, (ids, _) in candidates.items()})
        for ntype, (ids, budget) in candidates.items():
            count = num_samples[ntype][hop] if hop < len(num_samples.get(ntype, ())) else 0
            key = relation_key(draw_seed, _TAKEN + hop, (ntype, "", ntype))
            nodes[ntype].add(ids[_taken(budget, originals[ntype], count, key)], None)
    edges_between = induced_edges(source, nodes, draw_seed)
    return HopSample(
        {ntype: found.ids for ntype, found in nodes.items()},
        {etype: src for etype, (src, _, _) in edges_between.items()},
        {etype: dst for etype, (_, dst, _) in edges_between.items()},
        {etype: eids for etype, (_, _, eids) in edges_between.items()},
        None,
        None,
        None,
    )


class _Budget:
    """The nodes of one type that have an edge to the subgraph, and their budgets."""

    def __init__(self) -> None:
        self._ids = torch.empty(0, dtype=torch.int64)
        self._sums = torch.empty(0, dtype=torch.float64)

    def add(self, ids: Tensor, share: Tensor) -> None:
        distinct, place = torch.unique(torch.cat([self._ids, ids]), return_inverse=True)
        sums = torch.zeros(distinct.numel(), dtype=torch.float64)
        self._sums = sums.index_add(0, place, torch.cat([self._sums, share]))
        self._ids = distinct

    def left(self, nodes: FoundNodes) -> tuple[Tensor, Tensor]:
        """Nodes that are not in the subgraph, and their budgets."""
        outside = nodes.find(self._ids) < 0
        self._ids, self._sums = self._ids[outside], self._sums[outside]
        return self._ids, self._sums


def _taken(budget: Tensor, original_ids: Tensor, count: int, key: int) -> Tensor:
    """Places of those that are drawn one after another, in proportion to squared budgets.

    That is what the largest ``u^(1/w)`` are (Efraimidis and Spirakis, Weighted random sampling with
    a reservoir, 2006), u uniform in (0, 1], here a function of the key and the original id.
    """
    count = min(count, budget.numel())
    uniform = 1.0 - unit(word(states(key_state(key, _DOMAIN), original_ids), 0))
    order = torch.argsort(original_ids)  # of equal numbers the same ones, however the graph is cut
    ranks = (uniform.log() / budget.square())[order]
    return order[torch.argsort(ranks, descending=True, stable=True)[:count]]
