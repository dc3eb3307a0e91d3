# SPDX-License-Identifier: Apache-2.0
"""MiniGCDataset, KarateClubDataset: small graphs that need no files."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import GraphValueError
from ...graph import Graph, add_self_loop, graph, to_bidirected
from ._base import DGLDataset, only_graph

_NodePairs = list[tuple[int, int]]


class MiniGCDataset(DGLDataset):
    """Graphs of eight kinds, to tell the kind of a graph from its structure.

    The kinds are 0 cycle, 1 star, 2 wheel, 3 lollipop, 4 hypercube, 5 grid, 6 clique and 7
    circular ladder: an eighth of the graphs each, in this order, and of the last kind what
    remains. Every edge is there in both directions, and every node has a self loop.

    Args:
        num_graphs: Number of graphs.
        min_num_v: Fewest nodes that are asked for.
        max_num_v: One more than the most. Hypercubes, grids and ladders have the next lower
            number of nodes that they can have.
        seed: Decides the sizes; None takes one of NumPy's.
        save_graph: Accepted for DGL's scripts: graphs are made anew, which costs no more.
        force_reload: Accepted for DGL's scripts.
        verbose: As for `DGLDataset`.
        transform: As for `DGLDataset`.

    Raises:
        DGLError: Fewer than 6 nodes, or no number between the two.

    Example:
        >>> dataset = MiniGCDataset(16, 10, 20)
        >>> dataset.labels[:4], dataset[0][0].num_nodes() >= 10
        (tensor([0, 0, 1, 1]), True)
    """

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
        self.labels: Tensor = torch.empty(0, dtype=torch.int64)
        super().__init__(
            name="minigc",
            hash_key=(num_graphs, min_num_v, max_num_v, seed),
            force_reload=force_reload,
            verbose=verbose,
            transform=transform,
        )

    def process(self) -> None:
        """Make the graphs."""
        rng = np.random.RandomState(self.seed)
        labels = [kind for kind in range(7) for _ in range(self.num_graphs // 8)]
        labels += [7] * (self.num_graphs - len(labels))
        for kind in labels:
            size = int(rng.randint(self.min_num_v, self.max_num_v))
            num_nodes, edges = _KINDS[kind](size, rng)
            src, dst = zip(*edges, strict=True)
            one_way = graph((list(src), list(dst)), num_nodes=num_nodes)
            self.graphs.append(add_self_loop(to_bidirected(one_way)))
        self.labels = torch.tensor(labels, dtype=torch.int64)

    @property
    def num_classes(self) -> int:
        """Number of kinds."""
        return 8

    def __getitem__(self, idx: int) -> tuple[Any, Tensor]:
        """A graph and its kind."""
        return self._transformed(self.graphs[idx]), self.labels[idx]

    def __len__(self) -> int:
        """Number of graphs."""
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


class KarateClubDataset(DGLDataset):
    """Zachary's karate club: 34 members, who met whom, and which half they were in afterwards.

    Source: Zachary, "An information flow model for conflict and fission in small groups", Journal
    of Anthropological Research 33, 1977. Edges are there in both directions; ``ndata["label"]``
    is 1 for the officer's half.

    Args:
        transform: As for `DGLDataset`.

    Example:
        >>> g = KarateClubDataset()[0]
        >>> g.num_nodes(), g.num_edges(), g.ndata["label"].sum()
        (34, 156, tensor(17))
    """

    def __init__(self, transform: Callable[[Graph], Any] | None = None) -> None:
        super().__init__(name="karate_club", transform=transform)

    def process(self) -> None:
        """Make the graph."""
        both = [(i, j) for i, others in enumerate(_MET) for j in others]
        both = sorted(both + [(j, i) for i, j in both])
        src, dst = zip(*both, strict=True)
        self._graph = graph((list(src), list(dst)), num_nodes=len(_MET))
        officers = torch.tensor(_OFFICERS)
        self._graph.ndata["label"] = torch.zeros(len(_MET), dtype=torch.int64)
        self._graph.ndata["label"][officers] = 1

    @property
    def num_classes(self) -> int:
        """Number of halves."""
        return 2

    def __getitem__(self, idx: int) -> Any:
        """The graph."""
        only_graph(idx)
        return self._transformed(self._graph)

    def __len__(self) -> int:
        """1."""
        return 1


# For each member, whom it met that come after it.
_MET: list[list[int]] = [
    [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 17, 19, 21, 31],
    [2, 3, 7, 13, 17, 19, 21, 30],
    [3, 7, 8, 9, 13, 27, 28, 32],
    [7, 12, 13],
    [6, 10],
    [6, 10, 16],
    [16],
    [],
    [30, 32, 33],
    [33],
    [],
    [],
    [],
    [33],
    [32, 33],
    [32, 33],
    [],
    [],
    [32, 33],
    [33],
    [32, 33],
    [],
    [32, 33],
    [25, 27, 29, 32, 33],
    [25, 27, 31],
    [31],
    [29, 33],
    [33],
    [31, 33],
    [32, 33],
    [32, 33],
    [32, 33],
    [33],
    [],
]

_OFFICERS = [9, 14, 15, 18, 20, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33]
