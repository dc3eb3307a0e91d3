# SPDX-License-Identifier: Apache-2.0
"""RandomWalkNeighborSampler: the nodes that short walks from a node come upon most often.

Source: Ying et al., "Graph Convolutional Neural Networks for Web-Scale Recommender Systems", KDD
2018, https://arxiv.org/abs/1806.01973: how often walks visit a node says how important it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._base.typing import EType
from ...errors import GraphValueError
from ...graph import Graph, heterograph
from ._random_walk import random_walk, start_nodes


class RandomWalkNeighborSampler:
    """Finds neighbours by walks that follow a metapath again and again.

    Args:
        G: A graph of this process.
        num_traversals: How often a walk follows the metapath, at most.
        termination_prob: With what probability it ends after each time.
        num_random_walks: Walks from each node.
        num_neighbors: How many of the nodes that walks came upon are taken.
        metapath: Relations that lead from a node type back to it; it may be left out on a graph of
            one relation.
        weight_column: Name of the edge feature with the numbers of visits.

    Raises:
        DGLError: No metapath where one is needed, or one that does not lead back.

    Example:
        >>> from graphshard.graph import graph
        >>> sampler = RandomWalkNeighborSampler(graph(([0, 1, 2], [1, 2, 0])), 2, 0.0, 3, 2)
        >>> found = sampler(torch.tensor([0]))
        >>> found.edges(), found.edata["weights"]
        ((tensor([1, 2]), tensor([0, 0])), tensor([3, 3]))
    """

    def __init__(
        self,
        G: Graph,
        num_traversals: int,
        termination_prob: float,
        num_random_walks: int,
        num_neighbors: int,
        metapath: Sequence[EType] | None = None,
        weight_column: str = "weights",
    ) -> None:
        if metapath is None:
            if len(G.ntypes) != 1 or len(G.canonical_etypes) != 1:
                raise GraphValueError(
                    f"give a metapath, since the graph has the relations {G.canonical_etypes}"
                )
            metapath = [G.canonical_etypes[0]]
        path = [G.to_canonical_etype(etype) for etype in metapath]
        if not path or path[0][0] != path[-1][2]:
            raise GraphValueError(
                f"a metapath must end at the node type that it starts from (got {path})"
            )
        self.G, self.weight_column = G, weight_column
        self.num_random_walks, self.num_neighbors = num_random_walks, num_neighbors
        self.num_traversals = num_traversals
        self.ntype, self.metapath, self.metapath_hops = path[0][0], path, len(path)
        self.full_metapath = path * num_traversals
        self.restart_prob = torch.zeros(len(self.full_metapath))
        self.restart_prob[self.metapath_hops :: self.metapath_hops] = termination_prob

    def __call__(self, seed_nodes: Any) -> Graph:
        """The neighbours of some nodes.

        Args:
            seed_nodes: Ids of nodes of the type that the metapath starts from.

        Returns:
            A graph of all nodes of that type, with an edge from each neighbour that was found to
            the node it was found from, those visited most first.

        Raises:
            DGLError: Ids that are none, or out of range.
        """
        seeds = start_nodes(self.G, seed_nodes, self.ntype)
        paths, _ = random_walk(
            self.G,
            seeds.repeat_interleave(self.num_random_walks),
            metapath=self.full_metapath,
            restart_prob=self.restart_prob,
        )
        visited = paths[:, self.metapath_hops :: self.metapath_hops].reshape(-1)
        num_visits = self.num_random_walks * self.num_traversals
        src, dst, counts = self._most_visited(visited, seeds, num_visits)
        found: Graph = heterograph(
            {(self.ntype, "_E", self.ntype): (src, dst)},
            {self.ntype: self.G.num_nodes(self.ntype)},
        )
        found.edata[self.weight_column] = counts
        return found

    def _most_visited(
        self, visited: Tensor, seeds: Tensor, num_visits: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of equally many visits the smaller id goes first."""
        place = torch.arange(len(seeds), device=seeds.device).repeat_interleave(num_visits)
        is_there = visited >= 0
        num_nodes = self.G.num_nodes(self.ntype)
        codes, counts = torch.unique(
            place[is_there] * num_nodes + visited[is_there].long(), return_counts=True
        )
        row, node = codes // max(num_nodes, 1), codes % max(num_nodes, 1)
        order = torch.sort(counts, descending=True, stable=True).indices
        order = order[torch.sort(row[order], stable=True).indices]
        sizes = torch.bincount(row, minlength=len(seeds))
        first = sizes.cumsum(0) - sizes
        rank = torch.arange(len(order), device=seeds.device) - first.repeat_interleave(sizes)
        order = order[rank < self.num_neighbors]
        return node[order].to(seeds.dtype), seeds[row[order]], counts[order]


class PinSAGESampler(RandomWalkNeighborSampler):
    """Neighbours of one type in a graph of two, by walks to the other type and back.

    Args:
        G: A graph of this process, with a relation from each of the two types to the other.
        ntype: The type whose nodes get neighbours.
        other_type: The other one.
        num_traversals: As for `RandomWalkNeighborSampler`.
        termination_prob: As for `RandomWalkNeighborSampler`.
        num_random_walks: As for `RandomWalkNeighborSampler`.
        num_neighbors: As for `RandomWalkNeighborSampler`.
        weight_column: As for `RandomWalkNeighborSampler`.

    Raises:
        DGLError: There is no such relation.
    """

    def __init__(
        self,
        G: Graph,
        ntype: str,
        other_type: str,
        num_traversals: int,
        termination_prob: float,
        num_random_walks: int,
        num_neighbors: int,
        weight_column: str = "weights",
    ) -> None:
        metapath = []
        for ends in ((ntype, other_type), (other_type, ntype)):
            between = [etype for etype in G.canonical_etypes if (etype[0], etype[2]) == ends]
            if not between:
                raise GraphValueError(
                    f"no relation from {ends[0]!r} to {ends[1]!r}; the graph has "
                    f"{G.canonical_etypes}"
                )
            metapath.append(between[0])
        super().__init__(
            G,
            num_traversals,
            termination_prob,
            num_random_walks,
            num_neighbors,
            metapath,
            weight_column,
        )
