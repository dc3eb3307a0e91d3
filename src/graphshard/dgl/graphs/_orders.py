# SPDX-License-Identifier: Apache-2.0
"""Orders in which a traversal meets nodes and edges, as lists of steps.

What is in one step can be computed at once. A traversal runs in Python, node by node; it is for
trees and small graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

import torch
from torch import Tensor

from ...errors import GraphValueError
from ...graph.local_graph import LocalGraph
from ...graph.structure import id_tensor
from . import SourceNodes

__all__ = [
    "bfs_edges_generator", "bfs_nodes_generator", "dfs_edges_generator",
    "dfs_labeled_edges_generator", "topological_nodes_generator",
]  # fmt: skip

FORWARD, REVERSE, NONTREE = 0, 1, 2


def bfs_nodes_generator(
    graph: LocalGraph, source: SourceNodes, reverse: bool = False
) -> tuple[Tensor, ...]:
    """Nodes by their distance from some nodes."""
    return tuple(nodes for nodes, _ in _breadth_first(graph, source, reverse))


def bfs_edges_generator(
    graph: LocalGraph, source: SourceNodes, reverse: bool = False
) -> tuple[Tensor, ...]:
    """The edges by which a breadth-first search reaches nodes; see `bfs_nodes_generator`."""
    return tuple(edges for _, edges in _breadth_first(graph, source, reverse))[1:]


def _breadth_first(
    g: LocalGraph, source: SourceNodes, reverse: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    neighbours = _steps_of(g, reverse)
    nodes = list(dict.fromkeys(_checked(g, source)))
    seen, edges = set(nodes), [0] * len(nodes)
    while nodes:
        yield _ids(g, nodes), _ids(g, edges)
        reached: dict[int, int] = {}
        for node in nodes:
            for other, edge in neighbours[node]:
                if other not in seen:
                    seen.add(other)
                    reached[other] = edge
        nodes, edges = list(reached), list(reached.values())


def topological_nodes_generator(graph: LocalGraph, reverse: bool = False) -> tuple[Tensor, ...]:
    """Nodes in steps such that every edge runs from one step to a later one.

    Raises:
        ValueError: the graph has a cycle.
    """
    neighbours = _steps_of(graph, reverse)
    waiting = (graph.out_degrees() if reverse else graph.in_degrees()).tolist()
    ready = [node for node, count in enumerate(waiting) if count == 0]
    steps, done = [], 0
    while ready:
        steps.append(_ids(graph, ready))
        done += len(ready)
        following = []
        for node in ready:
            for other, _ in neighbours[node]:
                waiting[other] -= 1
                if waiting[other] == 0:
                    following.append(other)
        ready = following
    if done < len(waiting):
        raise GraphValueError(
            f"a topological order needs a graph without cycles ({len(waiting) - done} nodes are on "
            "one, or behind one)"
        )
    return tuple(steps)


def dfs_edges_generator(
    graph: LocalGraph, source: SourceNodes, reverse: bool = False
) -> tuple[Tensor, ...]:
    """The edges of a depth-first search in the order of their steps.

    Args:
        source: The first nodes; searches from several run side by side, each on its own.
    """
    steps = _depth_first(graph, source, reverse, False, False)
    return tuple(edges for edges, _ in steps)


def dfs_labeled_edges_generator(
    graph: LocalGraph,
    source: SourceNodes,
    reverse: bool = False,
    has_reverse_edge: bool = False,
    has_nontree_edge: bool = False,
    return_labels: bool = True,
) -> tuple[tuple[Tensor, ...], ...]:
    """The edges of a depth-first search, with what each is; see `dfs_edges_generator`.

    Args:
        has_reverse_edge: Whether an edge comes again, with label 1, when the search goes back.
        has_nontree_edge: Whether edges to nodes that were reached before come, with label 2.

    Returns:
        Per step the edges; and, with ``return_labels``, per step their labels: 0 for an edge that
        the search goes forward on, 1 and 2 as above.
    """
    steps = _depth_first(graph, source, reverse, has_reverse_edge, has_nontree_edge)
    edges = tuple(each for each, _ in steps)
    return (edges, tuple(labels for _, labels in steps)) if return_labels else (edges,)


def _depth_first(
    g: LocalGraph, source: SourceNodes, reverse: bool, back: bool, others: bool
) -> list[tuple[Tensor, Tensor]]:
    neighbours = _steps_of(g, reverse)
    searches = [_search(neighbours, node, back, others) for node in _checked(g, source)]
    steps = []
    for row in zip_longest(*searches):
        met = [step for step in row if step is not None]
        edges, labels = _ids(g, [edge for edge, _ in met]), [label for _, label in met]
        steps.append((edges, torch.tensor(labels, dtype=torch.int64, device=g.device)))
    return steps


def _search(
    neighbours: list[list[tuple[int, int]]], source: int, back: bool, others: bool
) -> Iterator[tuple[int, int]]:
    seen = {source}
    stack: list[tuple[int | None, Iterator[tuple[int, int]]]] = [(None, iter(neighbours[source]))]
    while stack:
        came_by, rest = stack[-1]
        for other, edge in rest:
            if other not in seen:
                seen.add(other)
                yield edge, FORWARD
                stack.append((edge, iter(neighbours[other])))
                break
            if others:
                yield edge, NONTREE
        else:
            stack.pop()
            if back and came_by is not None:
                yield came_by, REVERSE


def _steps_of(g: LocalGraph, reverse: bool) -> list[list[tuple[int, int]]]:
    """Per node its (neighbour, edge) pairs, by edge id."""
    if not g.is_homogeneous or g.is_block:
        raise GraphValueError(
            f"a traversal takes a graph with one node type and one relation (got "
            f"{g.canonical_etypes}); slice it, or use to_homogeneous"
        )
    indptr, others, edges = g.adj_tensors("csc" if reverse else "csr")
    ids = edges.tolist() or range(g.num_edges())
    pairs = list(zip(others.tolist(), ids, strict=True))
    bounds = indptr.tolist()
    return [pairs[bounds[i] : bounds[i + 1]] for i in range(len(bounds) - 1)]


def _checked(g: LocalGraph, source: SourceNodes) -> list[int]:
    ids: list[int] = id_tensor(source, "source", g.idtype, g.device).tolist()
    for node in ids:
        if not 0 <= node < g.num_nodes():
            raise GraphValueError(f"a source must be in [0, {g.num_nodes()}) (got {node})")
    return ids


def _ids(g: LocalGraph, ids: list[int]) -> Tensor:
    return torch.tensor(ids, dtype=g.idtype, device=g.device)
