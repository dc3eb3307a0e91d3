# SPDX-License-Identifier: Apache-2.0
"""Layers whose messages are made with features, or types, of edges.

Names of parameters are DGL's, and so is what is computed; how often rows travel is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ... import function as fn
from ...graph import EdgeBatch, MessagePassingGraph
from ...nn.inputs import Features, Widths, split_features, split_widths
from ...nn.zero_in_degree import ZeroInDegreeCheck

__all__ = ["EdgeConv", "GINEConv", "GMMConv", "GatedGraphConv", "NNConv"]

_REDUCERS = {"sum": fn.sum, "mean": fn.mean, "max": fn.max}


class EdgeConv(ZeroInDegreeCheck):
    r"""The layer of dynamic graph CNNs: a maximum over differences to the neighbours.

    From `Dynamic Graph CNN for Learning on Point Clouds <https://arxiv.org/abs/1801.07829>`_:

    .. math::
        h'_i = \max_{j \in N(i)} \big(\Theta (h_i - h_j) + \Phi h_i\big)

    Without ``batch_norm`` the rows are multiplied before they are sent, :math:`\Theta h_j` once per
    node, and nothing is stored per edge.

    Args:
        batch_norm: Normalise the messages, all edges together. On a sharded graph the statistics
            are those of the rank's own edges, unless the layer went through
            `graphshard.pyg.convert_sync_norm`.

    Shape:
        ``feat`` ``[num_nodes, in_feat]``, or a pair; output ``[num_dst, out_feat]``.

    Raises:
        ValueError: Nodes without in-edges.
    """

    def __init__(
        self,
        in_feat: int,
        out_feat: int,
        batch_norm: bool = False,
        allow_zero_in_degree: bool = False,
    ) -> None:
        super().__init__(allow_zero_in_degree)
        self.batch_norm = batch_norm
        self.theta, self.phi = nn.Linear(in_feat, out_feat), nn.Linear(in_feat, out_feat)
        if batch_norm:
            self.bn = nn.BatchNorm1d(out_feat)

    def forward(self, g: MessagePassingGraph, feat: Features) -> Tensor:
        """Apply the layer; see the class for shapes."""
        self._check_in_degrees(g)
        with g.local_scope():
            source, destination = split_features(g, feat)
            g.srcdata["x"] = nn.functional.linear(source, -self.theta.weight)
            own = self.theta(destination) + self.phi(destination)
            if self.batch_norm:
                g.dstdata["own"] = own
                g.apply_edges(fn.u_add_v("x", "own", "e"))
                g.edata["e"] = self.bn(g.edata["e"])
                g.update_all(fn.copy_e("e", "m"), fn.max("m", "largest"))
                return g.dstdata["largest"]
            g.update_all(fn.copy_u("x", "m"), fn.max("m", "largest"))
            result = own + g.dstdata["largest"]
            if self._allow_zero_in_degree and g.any_zero_in_degree():
                result = result * (g.in_degrees() > 0).to(result).unsqueeze(-1)
            return result


class GatedGraphConv(nn.Module):
    r"""Steps of a gated recurrent unit, whose input is the sum over the neighbours.

    From `Gated Graph Sequence Neural Networks <https://arxiv.org/abs/1511.05493>`_:

    .. math::
        h^0_i = [h_i \| 0], \quad a^t_i = \sum_{j \in N(i)} (W_{e_{ij}} h^t_j + b_{e_{ij}}), \quad
        h^{t+1}_i = \mathrm{GRU}(a^t_i, h^t_i)

    The linear map of a sum is the sum of the mapped messages: rows are summed per type of edge and
    then mapped, so that they travel once, and every rank of a sharded graph makes the same calls
    whatever types its edges have.

    Shape:
        ``feat`` ``[num_nodes, in_feats]``; ``etypes`` ``[num_edges]``, needed if there are several
        types; output ``[num_nodes, out_feats]``.

    Raises:
        ValueError: ``out_feats`` is less than ``in_feats``; a type that the layer does not have.
    """

    def __init__(
        self, in_feats: int, out_feats: int, n_steps: int, n_etypes: int, bias: bool = True
    ) -> None:
        super().__init__()
        if in_feats > out_feats:
            raise ValueError(
                f"out_feats must be in_feats or more (got {out_feats}, and in_feats {in_feats})"
            )
        self._out_feats, self._n_steps, self._n_etypes = out_feats, n_steps, n_etypes
        self.linears = nn.ModuleList([nn.Linear(out_feats, out_feats) for _ in range(n_etypes)])
        self.gru = nn.GRUCell(out_feats, out_feats, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew (weights Xavier normal) and set the biases to zero."""
        self.gru.reset_parameters()
        for name, parameter in self.linears.named_parameters():
            if name.endswith("weight"):
                nn.init.xavier_normal_(parameter, gain=nn.init.calculate_gain("relu"))
            else:
                nn.init.zeros_(parameter)

    def forward(
        self, graph: MessagePassingGraph, feat: Tensor, etypes: Tensor | None = None
    ) -> Tensor:
        """Apply the layer; see the class for shapes."""
        return gated_graph_conv(self, graph, feat, etypes)


def gated_graph_conv(
    layer: Any, graph: MessagePassingGraph, feat: Tensor, etypes: Tensor | None = None
) -> Tensor:
    """What `GatedGraphConv` computes, also for DGL's layer of that name."""
    num_types = layer._n_etypes
    if etypes is None:
        etypes = torch.zeros(graph.num_edges(), dtype=torch.int64, device=feat.device)
    if etypes.numel() and not (int(etypes.min()) >= 0 and int(etypes.max()) < num_types):
        raise ValueError(
            f"edge types must be from 0 to {num_types - 1}, the layer's n_etypes less 1 (got "
            f"{int(etypes.min())} to {int(etypes.max())})"
        )
    of_type = nn.functional.one_hot(etypes.long(), num_types).to(feat).unsqueeze(-1)
    feat = nn.functional.pad(feat, (0, layer._out_feats - feat.shape[1]))
    with graph.local_scope():
        graph.edata["of_type"] = of_type
        graph.update_all(fn.copy_e("of_type", "m"), fn.sum("m", "count"))
        count = graph.dstdata["count"]
        for _ in range(layer._n_steps):
            graph.srcdata["h"] = feat.unsqueeze(1)
            graph.update_all(fn.u_mul_e("h", "of_type", "m"), fn.sum("m", "a"))
            sums = graph.dstdata["a"]
            mapped = [
                sums[:, i] @ linear.weight.T + count[:, i] * linear.bias
                for i, linear in enumerate(layer.linears)
            ]
            feat = layer.gru(torch.stack(mapped).sum(0), feat)
    return feat


class GINEConv(nn.Module):
    r"""The graph isomorphism network with features of edges.

    From `Strategies for Pre-training Graph Neural Networks <https://arxiv.org/abs/1905.12265>`_:

    .. math::
        h'_i = f\Big((1 + \epsilon) h_i + \sum_{j \in N(i)} \mathrm{ReLU}(h_j + e_{ji})\Big)

    Shape:
        ``node_feat`` ``[num_nodes, dim]``, or a pair; ``edge_feat`` ``[num_edges, dim]``; output
        ``[num_dst, dim]`` after :math:`f`.
    """

    eps: Tensor

    def __init__(
        self,
        apply_func: Callable[[Tensor], Tensor] | None = None,
        init_eps: float = 0,
        learn_eps: bool = False,
    ) -> None:
        super().__init__()
        self.apply_func = apply_func
        eps = torch.tensor([float(init_eps)])
        self.eps = nn.Parameter(eps) if learn_eps else nn.Buffer(eps)

    def message(self, edges: EdgeBatch) -> dict[str, Tensor]:
        """The message of some edges; a subclass may have another."""
        return {"m": nn.functional.relu(edges.src["hn"] + edges.data["he"])}

    def forward(self, graph: MessagePassingGraph, node_feat: Features, edge_feat: Tensor) -> Tensor:
        """Apply the layer; see the class for shapes."""
        with graph.local_scope():
            source, destination = split_features(graph, node_feat)
            graph.srcdata["hn"], graph.edata["he"] = source, edge_feat
            graph.update_all(self.message, fn.sum("m", "neigh"))
            result = (1 + self.eps) * destination + graph.dstdata["neigh"]
            return result if self.apply_func is None else self.apply_func(result)


class GMMConv(ZeroInDegreeCheck):
    r"""Mixtures of Gaussians over pseudo-coordinates of edges (MoNet).

    From `Geometric Deep Learning on Graphs and Manifolds using Mixture Model CNNs
    <https://arxiv.org/abs/1611.08402>`_:

    .. math::
        h'_i = \mathrm{aggregate}_{j \in N(i)} \sum_k w_k(u_{ij}) W_k h_j, \qquad
        w_k(u) = \exp\Big(-\frac12 \sum_d (u_d - \mu_{kd})^2 \sigma_{kd}^{-2}\Big)

    Args:
        aggregator_type: ``sum``, ``mean`` or ``max``; of each Gaussian's messages, before the sum
            over them.

    Shape:
        ``feat`` ``[num_nodes, in_feats]``, or a pair; ``pseudo`` ``[num_edges, dim]``; output
        ``[num_dst, out_feats]``.

    Raises:
        KeyError: An unknown aggregator.
        ValueError: Nodes without in-edges.
    """

    def __init__(
        self,
        in_feats: Widths,
        out_feats: int,
        dim: int,
        n_kernels: int,
        aggregator_type: Literal["sum", "mean", "max"] = "sum",
        residual: bool = False,
        bias: bool = True,
        allow_zero_in_degree: bool = False,
    ) -> None:
        super().__init__(allow_zero_in_degree)
        source_width, destination_width = split_widths(in_feats)
        self._out_feats, self._dim, self._n_kernels = out_feats, dim, n_kernels
        self._reducer = _reducer(aggregator_type)
        self.mu = nn.Parameter(torch.empty(n_kernels, dim))
        self.inv_sigma = nn.Parameter(torch.empty(n_kernels, dim))
        self.fc = nn.Linear(source_width, n_kernels * out_feats, bias=False)
        self.res_fc = _residual(residual, destination_width, out_feats)
        self.bias = nn.Parameter(torch.empty(out_feats)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as DGL does."""
        for layer in (self.fc, self.res_fc):
            if isinstance(layer, nn.Linear):
                nn.init.xavier_normal_(layer.weight, gain=nn.init.calculate_gain("relu"))
        nn.init.normal_(self.mu, 0, 0.1)
        nn.init.ones_(self.inv_sigma)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, graph: MessagePassingGraph, feat: Features, pseudo: Tensor) -> Tensor:
        """Apply the layer; see the class for shapes."""
        self._check_in_degrees(graph)
        with graph.local_scope():
            source, destination = split_features(graph, feat)
            rows = self.fc(source).view(-1, self._n_kernels, self._out_feats)
            graph.srcdata["h"] = rows
            distance = (pseudo.view(-1, 1, self._dim) - self.mu) * self.inv_sigma
            graph.edata["w"] = (-0.5 * distance**2).sum(-1, keepdim=True).exp()
            graph.update_all(fn.u_mul_e("h", "w", "m"), self._reducer("m", "neigh"))
            return _completed(self, graph.dstdata["neigh"].sum(1), destination)


class NNConv(nn.Module):
    r"""A matrix for each edge, which a network makes of the edge's features.

    From `Neural Message Passing for Quantum Chemistry <https://arxiv.org/abs/1704.01212>`_:

    .. math::
        h'_i = h_i + \mathrm{aggregate}_{j \in N(i)} f_\Theta(e_{ij}) h_j

    with :math:`h_i` only where ``residual`` is set. The matrices take
    ``num_edges * in_feats * out_feats`` numbers.

    Args:
        edge_func: :math:`f_\Theta`, from edge features to ``in_feats * out_feats`` numbers.
        aggregator_type: ``sum``, ``mean`` or ``max``; of the products, before they are summed over
            ``in_feats``.

    Shape:
        ``feat`` ``[num_nodes, in_feats]``, or a pair; ``efeat`` ``[num_edges, *]``; output
        ``[num_dst, out_feats]``.

    Raises:
        KeyError: An unknown aggregator.
    """

    def __init__(
        self,
        in_feats: Widths,
        out_feats: int,
        edge_func: Callable[[Tensor], Tensor],
        aggregator_type: Literal["sum", "mean", "max"] = "mean",
        residual: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self._in_src_feats, destination_width = split_widths(in_feats)
        self._out_feats = out_feats
        self.edge_func = edge_func
        self.reducer = _reducer(aggregator_type)
        self.res_fc = _residual(residual, destination_width, out_feats)
        self.bias = nn.Parameter(torch.empty(out_feats)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight of the residual anew (Xavier normal) and set the bias to zero."""
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if isinstance(self.res_fc, nn.Linear):
            nn.init.xavier_normal_(self.res_fc.weight, gain=nn.init.calculate_gain("relu"))

    def forward(self, graph: MessagePassingGraph, feat: Features, efeat: Tensor) -> Tensor:
        """Apply the layer; see the class for shapes."""
        with graph.local_scope():
            source, destination = split_features(graph, feat)
            graph.srcdata["h"] = source.unsqueeze(-1)
            graph.edata["w"] = self.edge_func(efeat).view(-1, self._in_src_feats, self._out_feats)
            graph.update_all(fn.u_mul_e("h", "w", "m"), self.reducer("m", "neigh"))
            return _completed(self, graph.dstdata["neigh"].sum(1), destination)


def _reducer(aggregator_type: str) -> Callable[[str, str], fn.ReduceFunction]:
    if aggregator_type not in _REDUCERS:
        raise KeyError(
            f"aggregator_type must be one of {', '.join(_REDUCERS)} (got {aggregator_type!r})"
        )
    return _REDUCERS[aggregator_type]


def _residual(residual: bool, width: int, out_feats: int) -> nn.Module | None:
    if not residual:
        return None
    return nn.Identity() if width == out_feats else nn.Linear(width, out_feats, bias=False)


def _completed(layer: GMMConv | NNConv, result: Tensor, destination: Tensor) -> Tensor:
    """With the residual and the bias, where the layer has them."""
    if layer.res_fc is not None:
        result = result + layer.res_fc(destination)
    return result if layer.bias is None else result + layer.bias
