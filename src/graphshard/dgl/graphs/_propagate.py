# SPDX-License-Identifier: Apache-2.0
"""Message passing step by step, along an order of nodes or of edges."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..._base.typing import EType
from ...graph.local_graph import LocalGraph
from . import SourceNodes
from ._orders import bfs_nodes_generator, dfs_labeled_edges_generator, topological_nodes_generator

__all__ = ["prop_edges", "prop_edges_dfs", "prop_nodes", "prop_nodes_bfs", "prop_nodes_topo"]


def prop_nodes(
    graph: LocalGraph,
    nodes_generator: Iterable[Any],
    message_func: Any,
    reduce_func: Any,
    apply_node_func: Any = None,
    etype: EType | None = None,
) -> None:
    """`pull` on one set of nodes after another."""
    for nodes in nodes_generator:
        graph.pull(nodes, message_func, reduce_func, apply_node_func, etype)


def prop_edges(
    graph: LocalGraph,
    edges_generator: Iterable[Any],
    message_func: Any,
    reduce_func: Any,
    apply_node_func: Any = None,
    etype: EType | None = None,
) -> None:
    """`send_and_recv` on one set of edges after another; see `prop_nodes`."""
    for edges in edges_generator:
        graph.send_and_recv(edges, message_func, reduce_func, apply_node_func, etype)


def prop_nodes_bfs(
    graph: LocalGraph,
    source: SourceNodes,
    message_func: Any,
    reduce_func: Any,
    reverse: bool = False,
    apply_node_func: Any = None,
) -> None:
    """`prop_nodes` by distance from some nodes; see `bfs_nodes_generator`."""
    steps = bfs_nodes_generator(graph, source, reverse)
    prop_nodes(graph, steps, message_func, reduce_func, apply_node_func)


def prop_nodes_topo(
    graph: LocalGraph,
    message_func: Any,
    reduce_func: Any,
    reverse: bool = False,
    apply_node_func: Any = None,
) -> None:
    """`prop_nodes` in topological order; see `topological_nodes_generator`."""
    steps = topological_nodes_generator(graph, reverse)
    prop_nodes(graph, steps, message_func, reduce_func, apply_node_func)


def prop_edges_dfs(
    graph: LocalGraph,
    source: SourceNodes,
    message_func: Any,
    reduce_func: Any,
    reverse: bool = False,
    has_reverse_edge: bool = False,
    has_nontree_edge: bool = False,
    apply_node_func: Any = None,
) -> None:
    """`prop_edges` along a depth-first search; see `dfs_labeled_edges_generator`."""
    steps = dfs_labeled_edges_generator(
        graph, source, reverse, has_reverse_edge, has_nontree_edge, return_labels=False
    )[0]
    prop_edges(graph, steps, message_func, reduce_func, apply_node_func)
