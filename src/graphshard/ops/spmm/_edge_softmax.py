# SPDX-License-Identifier: Apache-2.0
"""edge_softmax: softmax of edge values over the edges that share a node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import _check
from .._adjacency import Adjacency, HasAdjacency, as_adjacency
from . import _autograd


def edge_softmax(adj: Adjacency | HasAdjacency, logits: Any, norm_by: str = "dst") -> Any:
    """Normalize edge values over the edges into (or out of) each node.

    ``out[e] = exp(logits[e]) / sum of exp(logits[f]) over the edges f that share e's node``, for
    each feature apart, computed without overflow. Differentiable any number of times.

    Args:
        adj: The edges, or a graph with one relation.
        logits: [num_edges, ...] in edge id order. A graph with several relations takes relation ->
            values, which are normalized together, and gives that.
        norm_by: ``dst`` to normalize over edges with one destination, ``src`` with one source.

    Returns:
        [num_edges, ...], of the dtype of ``logits``.

    Raises:
        TypeError: ``logits`` is not a tensor of floating-point numbers.
        ValueError: An unknown ``norm_by``, a wrong number of rows, or another device.

    Example:
        >>> import torch
        >>> adj = Adjacency(torch.tensor([0, 1, 1]), torch.tensor([1, 0, 1]), 2, 2)
        >>> edge_softmax(adj, torch.zeros(3))
        tensor([0.5000, 1.0000, 0.5000])
    """
    if isinstance(logits, Mapping) and hasattr(adj, "_edge_softmax_typed"):
        return adj._edge_softmax_typed(logits, norm_by=norm_by)
    adj = as_adjacency(adj)
    _check.check_choice("norm_by of edge_softmax", norm_by, ("dst", "src"))
    _check.check_operand(
        "edge_softmax", "exp", "logits", logits, "num_edges", adj.num_edges, adj.device
    )
    return _autograd.edge_softmax(adj if norm_by == "dst" else adj.reverse(), logits)
