# SPDX-License-Identifier: Apache-2.0
"""Data sets that need no files: MiniGC, the karate club, graphs with motifs, block models.

They are made anew each time, by the draws that DGL makes, and nothing is saved: ``raw_dir``,
``save_graph`` and ``force_reload`` are accepted and change nothing.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import GraphValueError
from ...graph import Graph, add_self_loop, from_scipy, graph, to_bidirected
from ..graphs._batch import batch
from ..graphs._order import by_destination
from ..graphs._products import line_graph
from .dgl_dataset import DGLDataset, OneGraph

__all__ = [
    "BACommunityDataset", "BAShapeDataset", "KarateClub", "KarateClubDataset", "MiniGCDataset",
    "SBMMixture", "SBMMixtureDataset", "TreeCycleDataset", "TreeGridDataset",
]  # fmt: skip

_NodePairs = list[tuple[int, int]]


class MiniGCDataset(DGLDataset):
    """Graphs of eight kinds, to tell the kind of a graph from its structure.

    The kinds are 0 cycle, 1 star, 2 wheel, 3 lollipop, 4 hypercube, 5 grid, 6 clique and 7
    circular ladder: an eighth of the graphs each, in this order, and of the last kind what
    remains. Every edge is there in both directions, and every node has a self loop.
    """

    num_classes = 8

    def __init__(
        self,
        num_graphs: int,
        min_num_v: int,
        max_num_v: int,
        seed: int | None = 0,
        save_graph: bool = True,
        force_reload: bool = False,
        verbose: bool = False,
        transform: Callable[[Graph], Any] | None = None,
    ) -> None:
        if min_num_v < 6 or max_num_v <= min_num_v:
            raise GraphValueError(
                "min_num_v must be 6 or more, and max_num_v greater (got "
                f"{min_num_v} and {max_num_v})"
            )
        self.num_graphs, self.min_num_v, self.max_num_v = num_graphs, min_num_v, max_num_v
        self.seed, self.save_graph = seed, save_graph
        self.graphs: list[Graph] = []

        key = (num_graphs, min_num_v, max_num_v, seed)
        super().__init__("minigc", None, None, None, key, force_reload, verbose, transform)

    def process(self) -> None:
        rng = np.random.RandomState(self.seed)
        labels = [kind for kind in range(7) for _ in range(self.num_graphs // 8)]
        labels += [7] * (self.num_graphs - len(labels))
        for kind in labels:
            size = int(rng.randint(self.min_num_v, self.max_num_v))
            num_nodes, edges = _KINDS[kind](size, rng)
            self.graphs.append(add_self_loop(to_bidirected(graph(edges, num_nodes=num_nodes))))
        self.labels = torch.tensor(labels, dtype=torch.int64)

    def __getitem__(self, idx: int) -> tuple[Any, Tensor]:
        return self._transformed(self.graphs[idx]), self.labels[idx]

    def __len__(self) -> int:
        return len(self.graphs)


def _cycle(first: int, stop: int) -> _NodePairs:
    return [*((i, i + 1) for i in range(first, stop - 1)), (stop - 1, first)]


def _clique(n: int) -> _NodePairs:
    return [(i, j) for i in range(n) for j in range(i + 1, n)]


def _lollipop(n: int, rng: np.random.RandomState) -> tuple[int, _NodePairs]:
    clique = n - int(rng.randint(2, n // 2))
    return n, _clique(clique) + [(i, i + 1) for i in range(clique - 1, n - 1)]


def _hypercube(n: int, rng: np.random.RandomState) -> tuple[int, _NodePairs]:
    bits = int(math.log2(n))
    return 2**bits, [(i, i | 1 << b) for i in range(2**bits) for b in range(bits) if not i >> b & 1]


def _grid(n: int, rng: np.random.RandomState) -> tuple[int, _NodePairs]:
    rows = int(rng.randint(2, n // 2))
    columns = n // rows
    edges = [
        (r * columns + c, r * columns + c + 1) for r in range(rows) for c in range(columns - 1)
    ]
    down = [(i, i + columns) for i in range((rows - 1) * columns)]
    return rows * columns, edges + down


def _ladder(n: int, rng: np.random.RandomState) -> tuple[int, _NodePairs]:
    half = n // 2
    rungs = [(i, i + half) for i in range(half)]
    return 2 * half, _cycle(0, half) + _cycle(half, 2 * half) + rungs


_KINDS: list[Callable[[int, np.random.RandomState], tuple[int, _NodePairs]]] = [
    lambda n, rng: (n, _cycle(0, n)),
    lambda n, rng: (n, [(0, i) for i in range(1, n)]),
    lambda n, rng: (n, [(0, i) for i in range(1, n)] + _cycle(1, n)),
    _lollipop,
    _hypercube,
    _grid,
    lambda n, rng: (n, _clique(n)),
    _ladder,
]


class KarateClubDataset(OneGraph):
    """Zachary's karate club: 34 members, who met whom, and which half they were in afterwards.

    Source: Zachary, "An information flow model for conflict and fission in small groups", Journal
    of Anthropological Research 33, 1977. Edges are there in both directions; ``ndata["label"]``
    is 1 for the officer's half.
    """

    num_classes = 2

    def __init__(self, transform: Callable[[Graph], Any] | None = None) -> None:
        super().__init__(name="karate_club", transform=transform)

    def process(self) -> None:
        met = [[int(member) for member in row.split()] for row in _MET.split("/")]
        both = [(i, j) for i, others in enumerate(met) for j in others]
        self._g = graph(sorted(both + [(j, i) for i, j in both]), num_nodes=len(met))
        self._g.ndata["label"] = torch.zeros(len(met), dtype=torch.int64)
        self._g.ndata["label"][torch.tensor(_OFFICERS)] = 1


# For each member, up to the next /, whom it met that come after it.
_MET = """
    1 2 3 4 5 6 7 8 10 11 12 13 17 19 21 31 / 2 3 7 13 17 19 21 30 / 3 7 8 9 13 27 28 32 / 7 12 13
    / 6 10 / 6 10 16 / 16 / / 30 32 33 / 33 / / / / 33 / 32 33 / 32 33 / / / 32 33 / 33 / 32 33 /
    / 32 33 / 25 27 29 32 33 / 25 27 31 / 31 / 29 33 / 33 / 31 33 / 32 33 / 32 33 / 32 33 / 33 /
"""

_OFFICERS = [9, 14, 15, 18, 20, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33]


class _Motifs(OneGraph):
    """Base of graphs with small parts hung on, whose nodes are told from the others.

    Source: Ying et al., "GNNExplainer: Generating Explanations for Graph Neural Networks", NeurIPS
    2019, https://arxiv.org/abs/1903.03894. Nodes have ``feat`` and ``label``, and are numbered by
    reverse Cuthill-McKee. ``perturb_ratio`` is how many random edges come for each other edge.
    """

    num_classes = 2

    def __init__(
        self, name: str, seed: int | None, transform: Callable[[Graph], Any] | None, verbose: bool
    ) -> None:
        self.seed = seed
        super().__init__(name, verbose=verbose, transform=transform)

    def _load(self) -> None:
        if self.seed is not None:
            np.random.seed(self.seed)
        super()._load()

    def _finished(self, edges: _NodePairs, labels: list[int], share: float) -> Graph:
        """With random edges, features and labels."""
        count = len(labels)
        most = (count * (count - 1) - len(edges)) / len(edges)
        if share > most:
            raise GraphValueError(f"perturb_ratio cannot exceed {most:.4f} (got {share})")
        joined = set(edges)
        for _ in range(int(len(edges) * share)):
            pair = -1, -1
            while pair[0] == pair[1] or pair in joined:
                pair = int(np.random.randint(0, count)), int(np.random.randint(0, count))
            joined.add(pair)
            edges.append(pair)
        g = graph(edges, num_nodes=count)
        g.ndata["label"] = torch.tensor(labels, dtype=torch.int64)
        g.ndata["feat"] = torch.ones(count, 1)
        return by_destination(g)


class BAShapeDataset(_Motifs):
    """A Barabási-Albert graph with houses of five nodes: roof, middle, ground and others."""

    num_classes = 4

    def __init__(
        self,
        num_base_nodes: int = 300,
        num_base_edges_per_node: int = 5,
        num_motifs: int = 80,
        perturb_ratio: float = 0.01,
        seed: int | None = None,
        raw_dir: str | os.PathLike[str] | None = None,
        force_reload: bool = False,
        verbose: bool = True,
        transform: Callable[[Graph], Any] | None = None,
    ) -> None:
        self.num_base_nodes, self.num_motifs = num_base_nodes, num_motifs
        self.num_base_edges_per_node = num_base_edges_per_node
        self.perturb_ratio = perturb_ratio
        super().__init__("BA-SHAPES", seed, transform, verbose)

    def process(self) -> None:
        import networkx

        n = self.num_base_nodes
        base = networkx.barabasi_albert_graph(n, self.num_base_edges_per_node, self.seed)
        edges, labels = list(base.edges()), [0] * n
        spacing = n // self.num_motifs
        for motif in range(self.num_motifs):
            house = [(0, 1), (1, 2), (2, 3), (3, 0), (4, 0), (4, 1)]
            edges += [(n + a, n + b) for a, b in house] + [(n, motif * spacing)]
            labels += [1, 1, 2, 2, 3]
            n += 5
        self._g = self._finished(edges, labels, self.perturb_ratio)


class BACommunityDataset(_Motifs):
    """Two of `BAShapeDataset` with random edges between; labels are of shape and of half."""

    num_classes = 8

    def __init__(
        self,
        num_base_nodes: int = 300,
        num_base_edges_per_node: int = 4,
        num_motifs: int = 80,
        perturb_ratio: float = 0.01,
        num_inter_edges: int = 350,
        seed: int | None = None,
        raw_dir: str | os.PathLike[str] | None = None,
        force_reload: bool = False,
        verbose: bool = True,
        transform: Callable[[Graph], Any] | None = None,
    ) -> None:
        self._half = (num_base_nodes, num_base_edges_per_node, num_motifs, perturb_ratio)
        self.num_inter_edges = num_inter_edges
        super().__init__("BA-COMMUNITY", seed, transform, verbose)

    def process(self) -> None:
        if self.seed is not None:
            random.seed(self.seed)
        halves = [BAShapeDataset(*self._half)[0] for _ in range(2)]
        count = halves[0].num_nodes()
        across = [
            torch.from_numpy(np.random.randint(low, low + count, self.num_inter_edges))
            for low in (0, count)
        ]
        first, second = (half.edges() for half in halves)
        ends = tuple(torch.cat([first[i], second[i] + count, across[i]]) for i in (0, 1))
        g = graph(ends, num_nodes=2 * count)
        g.ndata["label"] = torch.cat([half.ndata["label"] + 4 * i for i, half in enumerate(halves)])
        variance = np.diag([0.5] * 2 + [1.0] * 8)
        rows = [
            np.random.multivariate_normal(np.array([mean] * 2 + [0.0] * 8), variance, count)
            for mean in (-1.0, 1.0)
        ]
        g.ndata["feat"] = torch.from_numpy(np.concatenate(rows))
        self._g = by_destination(g)


class TreeCycleDataset(_Motifs):
    """A binary tree on which cycles of six nodes hang, whatever ``cycle_size`` they count for."""

    def __init__(
        self,
        tree_height: int = 8,
        num_motifs: int = 60,
        cycle_size: int = 6,
        perturb_ratio: float = 0.01,
        seed: int | None = None,
        raw_dir: str | os.PathLike[str] | None = None,
        force_reload: bool = False,
        verbose: bool = True,
        transform: Callable[[Graph], Any] | None = None,
    ) -> None:
        self.tree_height, self.num_motifs, self.cycle_size = tree_height, num_motifs, cycle_size
        self.perturb_ratio = perturb_ratio
        super().__init__("TREE-CYCLES", seed, transform, verbose)

    def process(self) -> None:
        edges, n = _binary_tree(self.tree_height)
        labels, spacing = [0] * n, n // self.num_motifs
        for motif in range(self.num_motifs):
            anchor = motif * spacing
            edges += [*((n + i, n + i + 1) for i in range(5)), (n + 5, n), (n, anchor)]
            labels += [1] * self.cycle_size
            if np.random.random() > 0.5:
                a, b = (int(np.random.randint(1, 4)) for _ in range(2))
                edges.append((n + a, anchor + b))
            n += self.cycle_size
        self._g = self._finished(edges, labels, self.perturb_ratio)


class TreeGridDataset(_Motifs):
    """A binary tree on which grids hang."""

    def __init__(
        self,
        tree_height: int = 8,
        num_motifs: int = 80,
        grid_size: int = 3,
        perturb_ratio: float = 0.1,
        seed: int | None = None,
        raw_dir: str | os.PathLike[str] | None = None,
        force_reload: bool = False,
        verbose: bool = True,
        transform: Callable[[Graph], Any] | None = None,
    ) -> None:
        self.tree_height, self.num_motifs, self.grid_size = tree_height, num_motifs, grid_size
        self.perturb_ratio = perturb_ratio
        super().__init__("TREE-GRIDS", seed, transform, verbose)

    def process(self) -> None:
        import networkx

        edges, n = _binary_tree(self.tree_height)
        labels, spacing = [0] * n, n // self.num_motifs
        grid = networkx.convert_node_labels_to_integers(
            networkx.grid_graph([self.grid_size, self.grid_size])
        )
        for motif in range(self.num_motifs):
            edges += [(n + a, n + b) for a, b in grid.edges()] + [(n, motif * spacing)]
            labels += [1] * len(grid)
            n += len(grid)
        self._g = self._finished(edges, labels, self.perturb_ratio)


def _binary_tree(height: int) -> tuple[_NodePairs, int]:
    """Edges in the order of NetworkX, and the number of nodes."""
    count = 2 ** (height + 1) - 1
    return [(i, j) for i in range(count) for j in (2 * i + 1, 2 * i + 2) if j < count], count


class SBMMixtureDataset(DGLDataset):
    """Graphs of a symmetric stochastic block model, each with its line graph, to find communities.

    Source: Chen, Li and Bruna, "Supervised Community Detection with Line Graph Neural Networks",
    ICLR 2019, https://arxiv.org/abs/1705.08415.

    Args:
        pq: A pair (p, q) for each graph: inside and between communities there is an edge with
            probability ``p / n_nodes`` and ``q / n_nodes``. ``"Appendix_C"`` draws them.
        rng: A ``numpy.random.RandomState``; where there is none, as in DGL, a new one for each
            graph, which nothing repeats.
    """

    def __init__(
        self,
        n_graphs: int,
        n_nodes: int,
        n_communities: int,
        k: int = 2,
        avg_deg: int = 3,
        pq: str | Sequence[tuple[float, float]] = "Appendix_C",
        rng: np.random.RandomState | None = None,
    ) -> None:
        if n_nodes % n_communities:
            raise GraphValueError(
                f"n_communities must divide n_nodes (got {n_communities} and {n_nodes})"
            )
        if isinstance(pq, str) and pq != "Appendix_C":
            raise GraphValueError(f"pq must be 'Appendix_C' or a list of pairs (got {pq!r})")
        if not isinstance(pq, str) and len(pq) != n_graphs:
            raise GraphValueError(
                f"pq must have {n_graphs} pairs, one for each graph (got {len(pq)})"
            )
        self._n_graphs, self._n_nodes, self._n_communities = n_graphs, n_nodes, n_communities
        self._k, self._avg_deg, self._pq, self._rng = k, avg_deg, pq, rng
        key = (n_graphs, n_nodes, n_communities, k, avg_deg, pq, rng)
        super().__init__("sbmmixture", hash_key=key)

    def process(self) -> None:
        pairs = self._pq
        if isinstance(pairs, str):
            pairs = [self._appendix_c() for _ in range(self._n_graphs)]
        self._graphs = [from_scipy(self._adjacency(*pair)) for pair in pairs]
        self._line_graphs = [line_graph(g, backtracking=False) for g in self._graphs]

    def _appendix_c(self) -> tuple[float, float]:
        q = np.random.uniform(0, self._avg_deg - math.sqrt(self._avg_deg))
        p = self._k * self._avg_deg - q
        return (p, q) if random.random() < 0.5 else (q, p)

    def _adjacency(self, p: float, q: float) -> Any:
        import scipy.sparse

        size = self._n_nodes // self._n_communities
        rng = np.random.RandomState() if self._rng is None else self._rng
        rows, columns = [], []
        for i in range(self._n_communities):
            for j in range(i, self._n_communities):
                density = (p if i == j else q) / self._n_nodes
                block = scipy.sparse.random(
                    size, size, density, random_state=rng, data_rvs=lambda n: np.ones(n)
                )
                rows.append(block.row + i * size)
                columns.append(block.col + j * size)
        ends = np.hstack(rows), np.hstack(columns)
        shape = (self._n_nodes, self._n_nodes)
        one_way = scipy.sparse.coo_matrix((np.ones(len(ends[0])), ends), shape=shape)
        return scipy.sparse.triu(one_way) + scipy.sparse.triu(one_way, 1).transpose()

    def __getitem__(self, idx: int) -> tuple[Graph, Graph, Tensor, Tensor, Tensor]:
        """A graph, its line graph, in-degrees of both, and the sources of the graph's edges."""
        g, lg = self._graphs[idx], self._line_graphs[idx]
        return g, lg, g.in_degrees().float(), lg.in_degrees().float(), g.edges()[0]

    def __len__(self) -> int:
        return len(self._graphs)

    def collate_fn(self, x: Any) -> tuple[Graph, Graph, np.ndarray, np.ndarray, np.ndarray]:
        """Items as one: batched graphs, and the rest as arrays one after another."""
        graphs, line_graphs, degrees, of_lines, sources = zip(*x, strict=True)
        shifted = [rows + i * self._n_nodes for i, rows in enumerate(sources)]
        a, b, c = (np.concatenate(rows) for rows in (degrees, of_lines, shifted))
        return batch(list(graphs)), batch(list(line_graphs)), a, b, c


KarateClub = KarateClubDataset
SBMMixture = SBMMixtureDataset
