# SPDX-License-Identifier: Apache-2.0
"""EdgeWeightNorm: divide edge weights by the weighted degrees of their ends."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from ... import function as fn
from ...graph import MessagePassingGraph, edge_softmax

NORMS = ("none", "both", "right")


class EdgeWeightNorm(nn.Module):
    r"""Normalises positive scalar edge weights, as a graph convolution with edge weights needs.

    .. math::
        \hat e_{ji} = \frac{e_{ji}}{c_{ji}}, \qquad
        c_{ji} = \sqrt{\Big(\epsilon + \sum_k e_{jk}\Big)\Big(\epsilon + \sum_k e_{ki}\Big)}

    for norm ``both``: the weighted out-degree of the source and the weighted in-degree of the
    destination. ``right`` divides by the weighted in-degree alone; ``none`` changes nothing. See
    `Semi-Supervised Classification with Graph Convolutional Networks
    <https://arxiv.org/abs/1609.02907>`_. Give the result to a layer with ``norm="none"``.

    Args:
        norm: ``both``, ``right`` or ``none``.
        eps: Added to the weighted degrees.

    Shape:
        ``edge_weight`` ``[num_edges]``; output ``[num_edges]``.

    Raises:
        ValueError: Unknown norm; weights that are not one number per edge; a weight that is not
            positive with norm ``both``.

    Example:
        >>> import torch
        >>> from graphshard.graph import graph
        >>> from graphshard.dgl.nn import EdgeWeightNorm
        >>> g = graph((torch.tensor([0, 1, 1]), torch.tensor([1, 0, 1])))
        >>> EdgeWeightNorm("right")(g, torch.tensor([1.0, 2.0, 3.0]))
        tensor([0.2500, 1.0000, 0.7500])
    """

    def __init__(self, norm: Literal["none", "both", "right"] = "both", eps: float = 0.0) -> None:
        super().__init__()
        if norm not in NORMS:
            raise ValueError(f"norm must be one of {', '.join(NORMS)} (got {norm!r})")
        self._norm = norm
        self._eps = eps

    def forward(self, graph: MessagePassingGraph, edge_weight: Tensor) -> Tensor:
        """Normalised weights; see the class for shapes."""
        if edge_weight.dim() != 1 or edge_weight.shape[0] != graph.num_edges():
            raise ValueError(
                f"edge_weight must hold one number per edge, shape ({graph.num_edges()},) (got "
                f"{tuple(edge_weight.shape)}); normalise wider weights column by column"
            )
        if self._norm == "none":
            return edge_weight
        if self._norm == "both":
            if not bool((edge_weight > 0).all()):
                raise ValueError(
                    "norm 'both' takes square roots of weighted degrees, so every edge weight must "
                    f"be positive (got {float(edge_weight.min())}); use norm='right' or drop edges"
                )
            return normalize_both(graph, edge_weight, self._eps)
        with graph.local_scope():
            graph.edata["w"] = edge_weight
            graph.update_all(fn.copy_e("w", "m"), fn.sum("m", "in"))
            graph.dstdata["scale"] = 1.0 / (graph.dstdata["in"] + self._eps)
            graph.apply_edges(fn.e_mul_v("w", "scale", "out"))
            result: Tensor = graph.edata["out"]
            return result

    def extra_repr(self) -> str:
        return f"norm={self._norm!r}, eps={self._eps}"


def normalize_both(graph: MessagePassingGraph, edge_weight: Tensor, eps: float) -> Tensor:
    """Divide by the roots of the weighted degrees of both ends.

    Messages sum over in-edges; sums over out-edges are not messages, and on a sharded graph those
    edges lie on several ranks. A softmax of logarithms goes both ways: an edge's share in the
    weight at one end is ``s = e / sum(e)``, there ``e / (eps + sum(e)) = s / (1 + eps * s / e)``,
    and the result is the geometric mean of this for both ends.
    """
    dtype = torch.promote_types(edge_weight.dtype, torch.float32)
    logits = edge_weight.to(dtype).log()
    from_source = edge_softmax(graph, logits, norm_by="src")
    into_destination = edge_softmax(graph, logits, norm_by="dst")
    if eps:
        from_source = from_source / (1 + eps * from_source / edge_weight)
        into_destination = into_destination / (1 + eps * into_destination / edge_weight)
    return (from_source.sqrt() * into_destination.sqrt()).to(edge_weight.dtype)
