# SPDX-License-Identifier: Apache-2.0
"""Values per edge of a graph, and how often edges join nodes of one class."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..._base.typing import EType
from ...errors import GraphValueError
from ...graph.local_graph import LocalGraph
from ...ops import gsddmm, gspmm

__all__ = [
    "copy_u", "copy_v", "edge_homophily", "linkx_homophily", "node_homophily", "u_add_v",
    "u_div_v", "u_dot_v", "u_mul_v", "u_sub_v",
]  # fmt: skip


def _of_ends(op: str) -> Callable[..., Tensor]:
    def combine(
        g: LocalGraph, x_node: Tensor, y_node: Tensor, etype: EType | None = None
    ) -> Tensor:
        return gsddmm(g.adjacency(etype), op, x_node, y_node, "u", "v")

    combine.__name__ = combine.__qualname__ = f"u_{op}_v"
    what = "Dot product over the last dimension" if op == "dot" else f"Elementwise {op}"
    combine.__doc__ = f"""{what} of source rows and destination rows, per edge.

    Args:
        x_node: ``[num_src_nodes, ...]``.
        y_node: ``[num_dst_nodes, ...]``; rows broadcast.

    Returns:
        ``[num_edges, ...]``, differentiable in both.
    """
    return combine


u_add_v, u_sub_v, u_mul_v = _of_ends("add"), _of_ends("sub"), _of_ends("mul")
u_div_v, u_dot_v = _of_ends("div"), _of_ends("dot")


def copy_u(g: LocalGraph, x_node: Tensor, etype: EType | None = None) -> Tensor:
    """The row of its source for each edge of a relation: ``[num_edges, ...]``."""
    return gsddmm(g.adjacency(etype), "copy_lhs", x_node, None, "u")


def copy_v(g: LocalGraph, x_node: Tensor, etype: EType | None = None) -> Tensor:
    """The row of its destination for each edge of a relation: ``[num_edges, ...]``."""
    return gsddmm(g.adjacency(etype), "copy_lhs", x_node, None, "v")


def edge_homophily(graph: LocalGraph, y: Tensor) -> float:
    """Share of the edges that join nodes of one class."""
    return float(_same_class(graph, y).mean())


def node_homophily(graph: LocalGraph, y: Tensor) -> float:
    """Share of a node's in-edges that come from its own class, averaged over the nodes.

    A node without in-edges counts as 0.
    """
    shares = gspmm(graph.adjacency(), "copy_rhs", "mean", None, _same_class(graph, y))
    return float(shares.mean())


def linkx_homophily(graph: LocalGraph, y: Tensor) -> float:
    """How much more often than by chance edges come from a node's own class, averaged over classes.

    From "Large Scale Learning on Non-Homophilous Graphs" (https://arxiv.org/abs/2110.14446).
    """
    same = gspmm(graph.adjacency(), "copy_rhs", "sum", None, _same_class(graph, y))
    num_classes = int(y.max()) + 1
    if num_classes < 2:
        raise GraphValueError(f"linkx_homophily needs at least two classes (got {num_classes})")
    degrees = graph.in_degrees().float()

    def per_class(values: Tensor) -> Tensor:
        return values.new_zeros(num_classes).index_add(0, y.long(), values)

    share = per_class(same) / per_class(degrees)
    chance = per_class(torch.ones_like(degrees)) / y.shape[0]
    return float((share - chance).clamp(min=0).nan_to_num(0).sum()) / (num_classes - 1)


def _same_class(graph: LocalGraph, y: Tensor) -> Tensor:
    src, dst = graph.adjacency().coo()
    return (y[src.long()] == y[dst.long()]).float()
