# SPDX-License-Identifier: Apache-2.0
"""attend: attention over in-edges in one go, on any graph that speaks the protocol."""

from __future__ import annotations

from torch import Tensor

from ...errors import GraphTypeError
from ...ops import Attention
from ._protocol import MessagePassingGraph


def attend(graph: MessagePassingGraph, attention: Attention) -> Tensor | None:
    """Weighted mean of source values by a softmax over in-edges, with nothing stored per edge.

    What `edge_softmax`, dropout and ``update_all`` compute one after the other. On a sharded graph
    every rank must call it.

    Args:
        graph: A graph of one relation.
        attention: Operands, score and mask. Rows of ``values`` and ``src`` are source nodes, rows
            of ``dst`` destination nodes, rows of ``edge`` and ``factor`` edges.

    Returns:
        ``[num_dst, heads, dim]``, 0 for nodes without in-edges; or None, on every rank alike, if
        this graph or these operands have no such kernel: then go by edges.

    Raises:
        TypeError: The graph has several relations, or an operand is no floating-point tensor.
        ValueError: An operand has the wrong shape.

    Example:
        >>> import torch
        >>> from graphshard.graph import graph
        >>> g = graph(([0, 1, 2], [1, 2, 2]))
        >>> values, scores = torch.eye(3).unsqueeze(1), torch.zeros(3, 1)
        >>> attend(g, Attention.additive(values, scores, scores))[2]
        tensor([[0.0000, 0.5000, 0.5000]])
    """
    if len(graph.canonical_etypes) != 1:
        raise GraphTypeError(
            "attend works on one relation at a time (the graph has the relations "
            f"{graph.canonical_etypes}); slice it: graph[etype]"
        )
    return graph._attend(0, attention)
