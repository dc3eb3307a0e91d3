# SPDX-License-Identifier: Apache-2.0
"""What attention layers have in common: their heads, and the way to the fused kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .. import function as fn
from ..graph import MessagePassingGraph, attend, edge_softmax
from ..ops import Attention, EdgeMask, is_plain, is_relu, random_seed
from .inputs import (
    Features,
    Widths,
    prepare_edge_weight,
    split_features,
    split_widths,
    with_remote_rows,
)
from .recompute import Projections
from .zero_in_degree import ZeroInDegreeCheck


class AttentionConv(ZeroInDegreeCheck):
    """A layer of several attention heads; arguments as for its subclasses."""

    #: Numbers that are sent of each head beside its row.
    _scores_sent = 0

    def __init__(
        self, in_feats: Widths, out_feats: int, num_heads: int, allow_zero_in_degree: bool
    ) -> None:
        super().__init__(allow_zero_in_degree)
        self._num_heads = num_heads
        self._in_src_feats, self._in_dst_feats = split_widths(in_feats)
        self._out_feats = out_feats
        self._separate = isinstance(in_feats, tuple)

    def _add_projections(self) -> None:
        """``fc``, or for a pair of widths ``fc_src`` and ``fc_dst``, without biases."""
        width = self._num_heads * self._out_feats
        if self._separate:
            self.fc_src = nn.Linear(self._in_src_feats, width, bias=False)
            self.fc_dst = nn.Linear(self._in_dst_feats, width, bias=False)
        else:
            self.fc = nn.Linear(self._in_src_feats, width, bias=False)

    def _layers(self) -> tuple[nn.Linear, ...]:
        """The projections, each once, that of the sources first."""
        return (self.fc_src, self.fc_dst) if self._separate else (self.fc,)

    def _with_remote_rows(
        self, graph: MessagePassingGraph, feat: Features
    ) -> tuple[MessagePassingGraph, Features]:
        """Inputs, dropped out already, and the graph that they are of; see `with_remote_rows`."""
        width = self._num_heads * (self._out_feats + self._scores_sent)
        return with_remote_rows(graph, feat, self._layers()[0], width)

    def _projected(
        self,
        graph: MessagePassingGraph,
        feat: Features,
        projections: Projections,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(``W h`` of the sources, ``W h`` of the destinations, input of the destinations)."""
        heads = (self._num_heads, self._out_feats)
        if isinstance(feat, tuple):
            source, destination = split_features(graph, feat)
            fc_src, fc_dst = (self.fc_src, self.fc_dst) if self._separate else (self.fc, self.fc)
            return (
                projections.project(source, fc_src, heads),
                projections.project(destination, fc_dst, heads),
                destination,
            )
        if self._separate:
            raise ValueError(
                "a layer built with a pair of in_feats needs a pair of inputs, source and "
                f"destination (got one tensor of shape {tuple(feat.shape)})"
            )
        source, destination = split_features(graph, feat)
        rows = projections.project(source, self.fc, heads)
        return *split_features(graph, rows), destination

    def extra_repr(self) -> str:
        return (
            f"in={self._in_src_feats, self._in_dst_feats}, out={self._out_feats}, "
            f"num_heads={self._num_heads}"
        )


class LeakyAttentionConv(AttentionConv):
    """GAT and GATv2: a leaky ReLU in the scores, dropout, a residual and an activation.

    A subclass makes its projections and its vectors, and then calls `_add_rest`.
    """

    bias: Any
    res_fc: nn.Module | None

    def _add_rest(
        self,
        feat_drop: float,
        attn_drop: float,
        negative_slope: float,
        residual: bool,
        activation: Callable[[Tensor], Tensor] | None,
        bias: bool,
    ) -> None:
        width = self._num_heads * self._out_feats
        self.feat_drop = nn.Dropout(feat_drop)
        self.attn_drop = nn.Dropout(attn_drop)
        self.leaky_relu = nn.LeakyReLU(negative_slope)
        if not residual:
            self.register_buffer("res_fc", None)
        elif self._in_dst_feats != width:
            self.res_fc = nn.Linear(self._in_dst_feats, width, bias=bias)
        else:
            self.res_fc = nn.Identity()
        self.activation = activation

    def _project(
        self, graph: MessagePassingGraph, feat: Features, projections: Projections
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._projected(graph, feat, projections)

    def _dropped(
        self, graph: MessagePassingGraph, feat: Features
    ) -> tuple[MessagePassingGraph, Features]:
        """The inputs, dropped out, and the graph that they are of."""
        if isinstance(feat, tuple):
            source, destination = split_features(graph, feat)
            feat = self.feat_drop(source), self.feat_drop(destination)
        else:
            feat = self.feat_drop(feat)
        return self._with_remote_rows(graph, feat)

    def _vectors(self) -> tuple[Tensor, ...]:
        """The vectors of the scores, ``[1, num_heads, out_feats]`` each."""
        raise NotImplementedError

    def _attention(
        self, source: Tensor, destination: Tensor, vectors: tuple[Tensor, ...], **options: Any
    ) -> Attention:
        """The attention of projected rows, heads flattened with what stands before them."""
        raise NotImplementedError

    def _scores(self, graph: MessagePassingGraph, source: Tensor, destination: Tensor) -> Any:
        """Scores of the edges, ``[num_edges, *, num_heads, 1]``; ``srcdata["ft"]`` is set."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Draw the weights anew (Xavier normal, gain of ReLU); biases become zero."""
        gain = nn.init.calculate_gain("relu")
        layers = list(self._layers())
        weights = [layer.weight for layer in layers] + list(self._vectors())
        if isinstance(self.res_fc, nn.Linear):
            layers.append(self.res_fc)
            weights.append(self.res_fc.weight)
        for weight in weights:
            nn.init.xavier_normal_(weight, gain=gain)
        for bias in (self.bias, *(layer.bias for layer in layers)):
            if isinstance(bias, Tensor):
                nn.init.zeros_(bias)

    def _fused(
        self, graph: MessagePassingGraph, source: Tensor, destination: Tensor, edge_weight: Any
    ) -> Tensor | None:
        """The result in one go, finished unless there is a residual; None if it cannot be done."""
        row = tuple(source.shape[1:-1])
        try:
            slope = slope_of(self.leaky_relu)
            factor = attention_factor(edge_weight, row)
            mask = attention_mask(self.attn_drop)
        except Unfused:
            return None
        vectors = tuple(vector_of(vector, row) for vector in self._vectors())
        attention = self._attention(
            source, destination, vectors, slope=slope, factor=factor, mask=mask
        )
        if self.res_fc is None:  # else the residual comes between
            bias = None
            if isinstance(self.bias, Tensor):
                bias = vector_of(self.bias.view(1, self._num_heads, self._out_feats), row)
            attention = attention.finished(bias, is_relu(self.activation))
        result = attend(graph, attention)
        return None if result is None else result.unflatten(1, row)

    def _by_edges(
        self, graph: MessagePassingGraph, source: Tensor, destination: Tensor, edge_weight: Any
    ) -> tuple[Tensor, Any]:
        """The same, and the attention, with numbers per edge at every step."""
        with graph.local_scope():
            graph.srcdata["ft"] = source
            scores = self._scores(graph, source, destination)
            attention = self.attn_drop(edge_softmax(graph, scores))
            if edge_weight is not None:
                attention = attention * edge_weight
            graph.edata["a"] = attention
            graph.update_all(fn.u_mul_e("ft", "a", "m"), fn.sum("m", "out"))
            return graph.dstdata["out"], graph.edata["a"]

    def _attended(
        self,
        graph: MessagePassingGraph,
        feat: Features,
        edge_weight: Tensor | None,
        get_attention: bool,
    ) -> Any:
        """The layer's output, and the attention if that is asked for."""
        self._check_in_degrees(graph)
        graph, feat = self._dropped(graph, feat)
        projections = Projections(graph)
        source, destination, inputs = self._project(graph, feat, projections)
        if edge_weight is not None:
            edge_weight = prepare_edge_weight(graph, edge_weight, source.dim())
        result = attention = None
        if not get_attention:
            with projections.recomputed():
                result = self._fused(graph, source, destination, edge_weight)
        # Without a residual in between, the bias and a ReLU are in it already.
        is_finished = result is not None and self.res_fc is None
        if result is None:
            result, attention = self._by_edges(graph, source, destination, edge_weight)

        if self.res_fc is not None:
            result = result + self.res_fc(inputs).unflatten(-1, (-1, self._out_feats))
        if isinstance(self.bias, Tensor) and not is_finished:
            result = result + self.bias.view(self._num_heads, self._out_feats)
        if self.activation is not None and not (is_finished and is_relu(self.activation)):
            result = self.activation(result)
        return (result, attention) if get_attention else result


def attention_mask(dropout: nn.Module) -> EdgeMask | None:
    """The mask that a dropout module would draw now; None where it would drop nothing."""
    if is_plain(dropout, nn.Identity):
        return None
    if not isinstance(dropout, nn.Dropout) or not is_plain(dropout, nn.Dropout):
        raise Unfused
    if not dropout.training or dropout.p == 0.0:
        return None
    return EdgeMask(dropout.p, random_seed())


def slope_of(activation: nn.Module) -> float:
    """The slope below zero of a leaky ReLU."""
    if not isinstance(activation, nn.LeakyReLU) or not is_plain(activation, nn.LeakyReLU):
        raise Unfused
    return activation.negative_slope


def vector_of(parameter: Tensor, row: tuple[int, ...]) -> Tensor:
    """A parameter ``[1, num_heads, dim]`` for heads flattened with what stands before them.

    Args:
        parameter: One vector per head.
        row: Dimensions between nodes and the columns of a head, the heads last.

    Returns:
        ``[prod(row), dim]``.
    """
    dim = parameter.shape[-1]
    return parameter[0].expand(*row, dim).reshape(-1, dim)


def attention_factor(edge_weight: Any, row: tuple[int, ...]) -> Tensor | None:
    """Edge weights that multiply attention, as ``[num_edges, 1]`` or ``[num_edges, heads]``.

    Args:
        edge_weight: As broadcast against ``[num_edges, *row, 1]``, or None.
        row: Dimensions between nodes and the columns of a head; flattened they are the heads.
    """
    if edge_weight is None:
        return None
    if not isinstance(edge_weight, Tensor) or not edge_weight.is_floating_point():
        raise Unfused
    if math.prod(edge_weight.shape[1:]) == 1:
        return edge_weight.reshape(-1, 1)
    if edge_weight.dim() != len(row) + 2 or edge_weight.shape[-1] != 1:
        raise Unfused
    expanded = edge_weight.expand(-1, *row, 1)
    return expanded.reshape(edge_weight.shape[0], math.prod(row))


class Unfused(Exception):
    """A layer has to go by edges: something in it (a module, a weight) is not for the kernel."""
