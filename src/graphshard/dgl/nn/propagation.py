# SPDX-License-Identifier: Apache-2.0
"""Layers that propagate features with fixed weights: powers and polynomials of the adjacency."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from ... import function as fn
from ...comm.collectives import all_reduce_alike
from ...fullbatch import GraphShardManager
from ...graph import MessagePassingGraph, edge_softmax
from ...graph.local_graph import LocalGraph
from ...nn.inputs import degree_scale, neighbour_message, prepare_edge_weight
from ...nn.zero_in_degree import ZeroInDegreeCheck
from ...ops import is_plain
from ..base import dgl_warning
from ..graphs._readout import broadcast_nodes

__all__ = ["APPNPConv", "ChebConv", "EdgeWeightNorm", "LabelPropagation", "SGConv", "TAGConv"]

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

    Shape:
        ``edge_weight`` ``[num_edges]``; output ``[num_edges]``.

    Raises:
        ValueError: Unknown norm; weights that are not one number per edge; a weight that is not
            positive with norm ``both``.

    Example:
        >>> from graphshard.graph import graph
        >>> g = graph(([0, 1, 1], [1, 0, 1]))
        >>> EdgeWeightNorm("right")(g, torch.tensor([1.0, 2.0, 3.0]))
        tensor([0.2500, 1.0000, 0.7500])
    """

    def __init__(self, norm: Literal["none", "both", "right"] = "both", eps: float = 0.0) -> None:
        super().__init__()
        if norm not in NORMS:
            raise ValueError(f"norm must be one of {', '.join(NORMS)} (got {norm!r})")
        self._norm, self._eps = norm, eps

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
            return graph.edata["out"]

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
    shares = [edge_softmax(graph, logits, norm_by=end) for end in ("src", "dst")]
    if eps:
        shares = [share / (1 + eps * share / edge_weight) for share in shares]
    return (shares[0].sqrt() * shares[1].sqrt()).to(edge_weight.dtype)


class APPNPConv(nn.Module):
    r"""Approximate personalised propagation.

    From `Predict then Propagate: Graph Neural Networks meet Personalized PageRank
    <https://arxiv.org/abs/1810.05997>`_:

    .. math::
        H^0 = X, \qquad H^{l+1} = (1 - \alpha) \, \hat A H^l + \alpha H^0

    with :math:`\hat A = D_{in}^{-1/2} A^T D_{out}^{-1/2}`, or edge weights normalised by
    :class:`EdgeWeightNorm`. Edge dropout draws anew in every step.

    Shape:
        ``feat`` ``[num_nodes, *]``; ``edge_weight`` ``[num_edges]``; output ``[num_nodes, *]``.
    """

    def __init__(self, k: int, alpha: float, edge_drop: float = 0.0) -> None:
        super().__init__()
        self._k, self._alpha = k, alpha
        self.edge_drop = nn.Dropout(edge_drop)

    def forward(
        self, graph: MessagePassingGraph, feat: Tensor, edge_weight: Tensor | None = None
    ) -> Tensor:
        """Apply the layer; see the class for shapes."""
        drop = self.edge_drop
        drops = not is_plain(drop, nn.Dropout) or (drop.training and drop.p > 0)
        with graph.local_scope():
            weight = scale_out = scale_in = None
            if edge_weight is not None:
                weight = EdgeWeightNorm("both")(graph, edge_weight)
            else:
                scale_out = degree_scale(graph.out_degrees(), -0.5, feat)
                scale_in = degree_scale(graph.in_degrees(), -0.5, feat)
                if drops:
                    weight = torch.ones(graph.num_edges(), dtype=feat.dtype, device=feat.device)
            if weight is not None:
                weight = prepare_edge_weight(graph, weight, feat.dim())
            start = feat
            for _ in range(self._k):
                graph.srcdata["h"] = feat if scale_out is None else feat * scale_out
                if weight is None:
                    graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "out"))
                else:
                    graph.edata["w"] = self.edge_drop(weight)
                    graph.update_all(fn.u_mul_e("h", "w", "m"), fn.sum("m", "out"))
                feat = graph.dstdata.pop("out")
                if scale_in is not None:
                    feat = feat * scale_in
                feat = (1 - self._alpha) * feat + self._alpha * start
        return feat

    def extra_repr(self) -> str:
        return f"k={self._k}, alpha={self._alpha}"


class SGConv(ZeroInDegreeCheck):
    r"""Simplified graph convolution.

    From `Simplifying Graph Convolutional Networks <https://arxiv.org/abs/1902.07153>`_:

    .. math::
        H = \big(D_{in}^{-1/2} A^T D_{in}^{-1/2}\big)^k X \Theta + b

    or :math:`\hat A^k X \Theta + b` with edge weights normalised by :class:`EdgeWeightNorm`.

    Args:
        cached: Keep the propagated features of the first call and use them in all later ones: for
            one graph whose input never changes. Later inputs and edge weights are not read.

    Shape:
        ``feat`` ``[num_nodes, in_feats]``; ``edge_weight`` ``[num_edges]``; output
        ``[num_nodes, out_feats]``.

    Raises:
        ValueError: Nodes without in-edges; edge weights not positive, or not one per edge.
    """

    def __init__(
        self,
        in_feats: int,
        out_feats: int,
        k: int = 1,
        cached: bool = False,
        bias: bool = True,
        norm: Callable[[Tensor], Tensor] | None = None,
        allow_zero_in_degree: bool = False,
    ) -> None:
        super().__init__(allow_zero_in_degree)
        self.fc = nn.Linear(in_feats, out_feats, bias=bias)
        self._k, self.norm, self._cached = k, norm, cached
        self._cached_h: Tensor | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight anew (Xavier uniform) and set the bias to zero."""
        nn.init.xavier_uniform_(self.fc.weight)
        if self.fc.bias is not None:
            nn.init.zeros_(self.fc.bias)

    def forward(
        self, graph: MessagePassingGraph, feat: Tensor, edge_weight: Tensor | None = None
    ) -> Tensor:
        """Apply the layer; see the class for shapes."""
        self._check_in_degrees(graph)
        propagated = self._cached_h
        if propagated is None:
            propagated = feat
            for rows in _propagated(graph, feat, edge_weight, self._k):
                propagated = rows
            if self.norm is not None:
                propagated = self.norm(propagated)
            if self._cached:
                self._cached_h = propagated
        return self.fc(propagated)

    def extra_repr(self) -> str:
        return f"k={self._k}, cached={self._cached}"


class TAGConv(nn.Module):
    r"""Topology adaptive graph convolution: one linear layer over the powers of the adjacency.

    From `Topology Adaptive Graph Convolutional Networks <https://arxiv.org/abs/1710.10370>`_:

    .. math::
        H' = \big[X \,\|\, \hat A X \,\|\, \dots \,\|\, \hat A^k X\big] \Theta + b

    with :math:`\hat A = D_{in}^{-1/2} A^T D_{in}^{-1/2}`, or edge weights normalised by
    :class:`EdgeWeightNorm`.

    Shape:
        ``feat`` ``[num_nodes, in_feats]``; ``edge_weight`` ``[num_edges]``; output
        ``[num_nodes, out_feats]``.
    """

    def __init__(
        self,
        in_feats: int,
        out_feats: int,
        k: int = 2,
        bias: bool = True,
        activation: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._k, self._activation = k, activation
        self.lin = nn.Linear(in_feats * (k + 1), out_feats, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight anew (Xavier normal)."""
        nn.init.xavier_normal_(self.lin.weight, gain=nn.init.calculate_gain("relu"))

    def forward(
        self, graph: MessagePassingGraph, feat: Tensor, edge_weight: Tensor | None = None
    ) -> Tensor:
        """Apply the layer; see the class for shapes."""
        powers = [feat, *_propagated(graph, feat, edge_weight, self._k)]
        out: Tensor = self.lin(torch.cat(powers, dim=-1))
        return out if self._activation is None else self._activation(out)


def _propagated(
    graph: MessagePassingGraph, feat: Tensor, edge_weight: Tensor | None, k: int
) -> Iterator[Tensor]:
    """The features after 1, 2, ..., ``k`` normalised sums over the neighbours."""
    with graph.local_scope():
        scale = None
        if edge_weight is None:
            scale = degree_scale(graph.in_degrees(), -0.5, feat)
        else:
            edge_weight = EdgeWeightNorm("both")(graph, edge_weight)
        message = neighbour_message(graph, edge_weight, feat.dim())
        for _ in range(k):
            graph.srcdata["h"] = feat if scale is None else feat * scale
            graph.update_all(message, fn.sum("m", "out"))
            feat = graph.dstdata.pop("out")
            if scale is not None:
                feat = feat * scale
            yield feat


class ChebConv(nn.Module):
    r"""Chebyshev polynomials of the scaled Laplacian.

    From `Convolutional Neural Networks on Graphs with Fast Localized Spectral Filtering
    <https://arxiv.org/abs/1606.09375>`_:

    .. math::
        H' = \sigma\Big(\sum_{i<k} Z^i W^i\Big), \quad Z^0 = X, \quad Z^1 = \tilde L X, \quad
        Z^i = 2 \tilde L Z^{i-1} - Z^{i-2}, \quad
        \tilde L = \frac{2}{\lambda_{max}} (I - D^{-1/2} A D^{-1/2}) - I

    Shape:
        ``feat`` ``[num_nodes, in_feats]``; ``lambda_max`` a list or tensor of one number for each
        graph of a batch, with 2 and a warning where it is not given; output
        ``[num_nodes, out_feats]``. A sharded graph is one graph.
    """

    def __init__(
        self,
        in_feats: int,
        out_feats: int,
        k: int,
        activation: Callable[[Tensor], Tensor] | None = nn.functional.relu,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self._k, self.activation = k, activation
        self.linear = nn.Linear(k * in_feats, out_feats, bias)

    def forward(
        self,
        graph: MessagePassingGraph,
        feat: Tensor,
        lambda_max: Sequence[float] | Tensor | None = None,
    ) -> Tensor:
        """Apply the layer; see the class for shapes."""
        if lambda_max is None:
            dgl_warning(
                "lambda_max is not provided, so 2 is used; laplacian_lambda_max(graph) computes it"
            )
            lambda_max = [2.0]
        largest = torch.as_tensor(lambda_max).to(feat).reshape(-1, 1)
        if len(largest) != 1:
            if not isinstance(graph, LocalGraph):
                raise ValueError(
                    f"a sharded graph is one graph: lambda_max is one number (got {len(largest)})"
                )
            largest = broadcast_nodes(graph, largest)
        factor = 2.0 / largest
        with graph.local_scope():
            scale = degree_scale(graph.in_degrees(), -0.5, feat)

            def shifted(rows: Tensor) -> Tensor:
                """The scaled Laplacian times rows."""
                graph.srcdata["h"] = rows * scale
                graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "out"))
                return -factor * (graph.dstdata.pop("out") * scale) + rows * (factor - 1)

            terms = [feat]
            if self._k > 1:
                terms.append(shifted(feat))
            for _ in range(2, self._k):
                terms.append(2 * shifted(terms[-1]) - terms[-2])
        out: Tensor = self.linear(torch.cat(terms, dim=1))
        return out if self.activation is None else self.activation(out)


class LabelPropagation(nn.Module):
    r"""Labels of some nodes, passed on to the others.

    From `Learning from Labeled and Unlabeled Data with Label Propagation
    <http://mlg.eng.cam.ac.uk/zoubin/papers/CMU-CALD-02-107.pdf>`_:

    .. math::
        Y^{t+1} = \alpha \hat A Y^t + (1 - \alpha) Y^0

    with :math:`\hat A = D_{in}^{-1/2} A^T D_{out}^{-1/2}`, or :math:`D_{in}^{-1} A^T`.

    Shape:
        ``labels`` ``[num_nodes]`` or ``[num_nodes, 1]`` classes, or ``[num_nodes, num_classes]``
        ones and zeros; ``mask`` the known nodes, as a mask or ids of this process; output
        ``[num_nodes, num_classes]`` float32. On a sharded graph classes are counted over all ranks.

    Example:
        >>> from graphshard.graph import graph
        >>> g = graph(([0, 1, 2], [1, 2, 0]))
        >>> mask = torch.tensor([True, True, False])
        >>> LabelPropagation(1, 0.4)(g, torch.tensor([0, 1, 0]), mask).argmax(1)
        tensor([0, 1, 1])
    """

    def __init__(
        self,
        k: int,
        alpha: float,
        norm_type: Literal["sym", "row"] = "sym",
        clamp: bool = True,
        normalize: bool = False,
        reset: bool = False,
    ) -> None:
        super().__init__()
        if norm_type not in ("sym", "row"):
            raise ValueError(f"norm_type must be 'sym' or 'row' (got {norm_type!r})")
        self.k, self.alpha, self.norm_type = k, alpha, norm_type
        self.clamp, self.normalize, self.reset = clamp, normalize, reset

    @torch.no_grad()
    def forward(self, g: MessagePassingGraph, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        """Propagate; see the class for shapes."""
        if self.reset and mask is None:
            raise ValueError("reset needs a mask of the nodes whose labels are known")
        if labels.dim() > 1 and labels.shape[1] > 1:
            labels = labels.to(torch.float32)
        else:
            num_classes = labels.max() + 1 if labels.numel() else labels.new_zeros(())
            if isinstance(g, GraphShardManager):
                num_classes = all_reduce_alike(num_classes, "max", group=g.group)
            one_hot = nn.functional.one_hot(labels.reshape(-1).long(), int(num_classes))
            labels = one_hot.to(torch.float32)
        values = labels
        if mask is not None:
            values = torch.zeros_like(labels)
            values[mask] = labels[mask]
        start = (1 - self.alpha) * values
        power = -0.5 if self.norm_type == "sym" else -1.0
        scale_in = degree_scale(g.in_degrees(), power, labels)
        scale_out = degree_scale(g.out_degrees(), -0.5, labels) if power == -0.5 else None
        with g.local_scope():
            for _ in range(self.k):
                g.srcdata["h"] = values if scale_out is None else values * scale_out
                g.update_all(fn.copy_u("h", "m"), fn.sum("m", "out"))
                values = start + self.alpha * g.dstdata.pop("out") * scale_in
                if self.clamp:
                    values = values.clamp(0.0, 1.0)
                if self.normalize:
                    values = nn.functional.normalize(values, p=1.0)
                if self.reset:
                    values[mask] = labels[mask]
        return values
