# SPDX-License-Identifier: Apache-2.0
"""RelGraphConv: graph convolution with one matrix per relation (R-GCN).

Two ways to the same sum. In general a message is its source row times the matrix of its relation
(:class:`TypedLinear`), which holds two rows per edge. With few bases the sum over edges is taken
first, once per basis, with the coefficients as edge weights:

    sum_e norm_e sum_b a_{t(e) b} x_e V_b  =  sum_b (sum_e norm_e a_{t(e) b} x_e) V_b

which holds ``num_bases`` numbers per edge and sends the untransformed row once. A subclass with
a ``message`` of its own goes the general way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from .. import function as fn
from ..graph import MessagePassingGraph
from ..graph.message_passing import EdgeBatch
from ..ops import affine, is_plain, leading_rows
from ._typed import TypedLinear, check_types

MAX_AGGREGATED_BASES = 8
"""Up to this many bases the edges are summed before the matrix product. A constant, because every
rank of a sharded graph must choose alike."""


class RelGraphConv(nn.Module):
    r"""Relational graph convolution.

    From `Modeling Relational Data with Graph Convolutional Networks
    <https://arxiv.org/abs/1703.06103>`_:

    .. math::
        h'_i = \sigma\Big(\sum_{(j, t) \in N(i)} e_{ji} \, h_j W_t + b + h_i W_0\Big)

    where an edge is of type :math:`t` and has the normaliser :math:`e_{ji}`, 1 unless ``norm`` is
    given. Layer normalisation, where asked for, comes before the bias; dropout comes last.

    Args:
        regularizer: ``None``, ``basis`` or ``bdd``; see :class:`TypedLinear`.
        num_bases: For the regularizers; ``None`` means ``num_rels``.
        bias: Learn :math:`b`.
        activation: :math:`\sigma`.
        self_loop: Learn :math:`W_0`, the part of the node itself.
        layer_norm: Normalise the sum over the neighbours.

    Shape:
        ``feat`` ``[num_src, in_feat]`` (destination nodes first, on a block); ``etypes``
        ``[num_edges]``, integers; ``norm`` ``[num_edges]`` or ``[num_edges, 1]``; output
        ``[num_dst, out_feat]``.

    Raises:
        ValueError: As :class:`TypedLinear`; ``etypes`` or ``norm`` not one per edge.

    Example:
        >>> import torch
        >>> from graphshard.graph import graph
        >>> from graphshard.nn import RelGraphConv
        >>> g = graph((torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0])))
        >>> layer = RelGraphConv(4, 2, num_rels=2, regularizer="basis")
        >>> layer(g, torch.ones(3, 4), torch.tensor([0, 1, 1])).shape
        torch.Size([3, 2])
    """

    def __init__(
        self,
        in_feat: int,
        out_feat: int,
        num_rels: int,
        regularizer: Literal["basis", "bdd"] | None = None,
        num_bases: int | None = None,
        bias: bool = True,
        activation: Callable[[Tensor], Tensor] | None = None,
        self_loop: bool = True,
        dropout: float = 0.0,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        if regularizer is not None and num_bases is None:
            num_bases = num_rels
        self.linear_r = TypedLinear(in_feat, out_feat, num_rels, regularizer, num_bases)
        self.bias = bias
        self.activation = activation
        self.self_loop = self_loop
        self.layer_norm = layer_norm
        if bias:
            self.h_bias = nn.Parameter(torch.zeros(out_feat))
        if layer_norm:
            self.layer_norm_weight = nn.LayerNorm(out_feat, elementwise_affine=True)
        if self_loop:
            self.loop_weight = nn.Parameter(torch.empty(in_feat, out_feat))
            nn.init.xavier_uniform_(self.loop_weight, gain=nn.init.calculate_gain("relu"))
        self.dropout = nn.Dropout(dropout)

    def message(self, edges: EdgeBatch) -> dict[str, Tensor]:
        """Message of a batch of edges: the source row times its relation's matrix, times norm."""
        message = self.linear_r(edges.src["h"], edges.data["etype"])
        if "norm" in edges.data:
            message = message * edges.data["norm"]
        return {"m": message}

    def forward(
        self,
        g: MessagePassingGraph,
        feat: Tensor,
        etypes: Tensor | Sequence[int],
        norm: Tensor | None = None,
        *,
        presorted: bool = False,
    ) -> Tensor:
        """Apply the layer; see the class for shapes.

        Args:
            g: The graph. Of a sharded graph of several relations its homogenised form is taken,
                see `GraphShardManager.homogenised`.
            presorted: Accepted so that calls written for DGL run; has no effect. Edges that
                arrive in order of type are recognised, and then not sorted.
        """
        g = g.homogenised()
        etypes = torch.as_tensor(etypes, device=feat.device)
        for name, value in (("etypes", etypes), ("norm", norm)):
            if value is not None and value.shape[0] != g.num_edges():
                raise ValueError(
                    f"{name} needs one entry per edge: the graph has {g.num_edges()} edges (got "
                    f"shape {tuple(value.shape)})"
                )
        if norm is not None and norm.dim() == 1:
            norm = norm.unsqueeze(-1)
        with g.local_scope():
            if self._sums_first():
                h = self._sum_by_basis(g, feat, etypes, norm)
            else:
                g.srcdata["h"] = feat
                g.edata["etype"] = etypes
                if norm is not None:
                    g.edata["norm"] = norm
                g.update_all(self.message, fn.sum("m", "out"))
                h = g.dstdata["out"]
        if self.layer_norm:
            h = self.layer_norm_weight(h)
        if self.bias:
            h = h + self.h_bias
        if self.self_loop:
            h = affine([(leading_rows(feat, g.num_dst_nodes()), self.loop_weight)], plus=h)
        if self.activation is not None:
            h = self.activation(h)
        return self.dropout(h)

    def _sums_first(self) -> bool:
        """Whether sums over edges come before the matrices: not if messages are made otherwise."""
        linear = self.linear_r
        own = type(self).message is RelGraphConv.message and "message" not in vars(self)
        if not own or not is_plain(linear, TypedLinear):
            return False
        return linear.regularizer == "basis" and linear.W.shape[0] <= MAX_AGGREGATED_BASES

    def _sum_by_basis(
        self, g: MessagePassingGraph, feat: Tensor, etypes: Tensor, norm: Tensor | None
    ) -> Tensor:
        """Sum the edges once per basis, then multiply: ``[num_dst, out_feat]``."""
        linear = self.linear_r
        check_types(etypes, linear.num_types)
        weight = linear.coeff.index_select(0, etypes)
        if norm is not None:
            weight = weight * norm
        g.srcdata["h"] = feat.unsqueeze(1)
        g.edata["coeff"] = weight.unsqueeze(-1)
        g.update_all(fn.u_mul_e("h", "coeff", "m"), fn.sum("m", "out"))
        sums: Tensor = g.dstdata["out"]
        return affine([(sums.flatten(1), linear.W.flatten(0, 1))])
