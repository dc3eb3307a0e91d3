# SPDX-License-Identifier: Apache-2.0
"""EdgeWeightNorm: divide edge weights by the weighted degrees of their ends."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from .. import function as fn
from ..graph import MessagePassingGraph

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
        >>> from graphshard.nn import EdgeWeightNorm
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
            positive = bool((edge_weight > 0).all())
            if not positive:
                raise ValueError(
                    "norm 'both' takes square roots of weighted degrees, so every edge weight must "
                    f"be positive (got {float(edge_weight.min())}); use norm='right' or drop edges"
                )
        with graph.local_scope():
            if self._norm == "right":
                graph.edata["w"] = edge_weight
                graph.update_all(fn.copy_e("w", "m"), fn.sum("m", "in"))
                graph.dstdata["scale"] = 1.0 / (graph.dstdata["in"] + self._eps)
                graph.apply_edges(fn.e_mul_v("w", "scale", "out"))
                result: Tensor = graph.edata["out"]
                return result
            in_weight, out_weight = weighted_degrees(graph, edge_weight)
            graph.srcdata["out_scale"] = (out_weight + self._eps).pow(-0.5)
            graph.dstdata["in_scale"] = (in_weight + self._eps).pow(-0.5)
            graph.apply_edges(fn.u_mul_v("out_scale", "in_scale", "scale"))
            return graph.edata["scale"] * edge_weight

    def extra_repr(self) -> str:
        return f"norm={self._norm!r}, eps={self._eps}"


def weighted_degrees(graph: MessagePassingGraph, edge_weight: Tensor) -> tuple[Tensor, Tensor]:
    """(weighted in-degrees ``[num_dst]``, weighted out-degrees ``[num_src]``).

    Messages flow from source to destination only, and on a sharded graph the out-edges of a node
    lie on other ranks. But the gradient of an aggregation flows the other way: with
    ``y_i = sum_j e_ji x_j``, the derivative of ``sum_i y_i`` by ``x_j`` is the weighted out-degree
    of ``j``. So one aggregation of ones and its backward give both.
    """
    keep_graph = torch.is_grad_enabled() and edge_weight.requires_grad
    with torch.inference_mode(False), torch.enable_grad(), graph.local_scope():
        weight = edge_weight if keep_graph else edge_weight.detach().clone()
        ones = weight.new_ones(graph.num_src_nodes()).requires_grad_()
        graph.srcdata["one"] = ones
        graph.edata["w"] = weight
        graph.update_all(fn.u_mul_e("one", "w", "m"), fn.sum("m", "in"))
        in_weight: Tensor = graph.dstdata["in"]
        (out_weight,) = torch.autograd.grad(in_weight.sum(), ones, create_graph=keep_graph)
    if not keep_graph:
        return in_weight.detach(), out_weight.detach()
    return in_weight, out_weight
