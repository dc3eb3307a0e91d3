# SPDX-License-Identifier: Apache-2.0
"""SAGEConv: GraphSAGE with the mean, gcn, pool and lstm aggregators."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import function as fn
from ..graph import MessagePassingGraph
from ..graph.message_passing import AggregationStep, NodeBatch, Steps, run_steps
from ..ops import AffineInSteps, affine, is_plain, is_relu, linear
from .inputs import (
    Features,
    Widths,
    degree_scale,
    multiplies_first,
    neighbour_message,
    read_once,
    split_features,
    split_widths,
    with_remote_rows,
)
from .symmetric_sums import SymmetricSum

AGGREGATORS = ("mean", "gcn", "pool", "lstm")


class SAGEConv(nn.Module):
    r"""GraphSAGE layer.

    From `Inductive Representation Learning on Large Graphs <https://arxiv.org/abs/1706.02216>`_:

    .. math::
        h'_i = W_{self} h_i + b + W_{neigh} \, \mathrm{aggregate}_{j \in N(i)} \; e_{ji} h_j

    with :math:`e_{ji} = 1` unless ``edge_weight`` is given. ``mean`` is the mean; ``gcn`` the sum
    over the neighbours and the node itself divided by in-degree + 1, without :math:`W_{self}`;
    ``pool`` the maximum of :math:`\mathrm{relu}(W_{pool} h_j + b_{pool})`; ``lstm`` the last state
    of an LSTM that reads the neighbours by ascending edge id. When the output is narrower than the
    input, ``mean`` and ``gcn`` multiply by :math:`W_{neigh}` before they aggregate, so that less
    is read and sent.

    Args:
        in_feats: Width of the input, or (source width, destination width). ``gcn`` needs both
            equal.
        aggregator_type: ``mean``, ``gcn``, ``pool`` or ``lstm``. On a sharded graph ``lstm``
            needs one-shot mode.
        bias: Learn :math:`b`.
        norm: Applied to the output, last.
        activation: Applied to the output, before ``norm``.

    Shape:
        ``feat`` ``[num_nodes, in_feats]``, or a pair ``[num_src, in]``, ``[num_dst, in]``;
        ``edge_weight`` ``[num_edges]`` or ``[num_edges, 1]``; output ``[num_dst, out_feats]``.

    Raises:
        ValueError: Unknown aggregator; wrong number of edge weights; ``gcn`` with source and
            destination features of different width.

    Example:
        >>> import torch
        >>> from graphshard.graph import graph
        >>> from graphshard.nn import SAGEConv
        >>> g = graph((torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0])))
        >>> SAGEConv(4, 2, "mean")(g, torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """

    bias: Tensor | None

    def __init__(
        self,
        in_feats: Widths,
        out_feats: int,
        aggregator_type: Literal["mean", "gcn", "pool", "lstm"],
        feat_drop: float = 0.0,
        bias: bool = True,
        norm: Callable[[Tensor], Tensor] | None = None,
        activation: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        if aggregator_type not in AGGREGATORS:
            raise ValueError(
                f"aggregator_type must be one of {', '.join(AGGREGATORS)} (got {aggregator_type!r})"
            )
        self._in_src_feats, self._in_dst_feats = split_widths(in_feats)
        self._out_feats = out_feats
        self._aggre_type = aggregator_type
        self.norm = norm
        self.feat_drop = nn.Dropout(feat_drop)
        self.activation = activation
        if aggregator_type == "pool":
            self.fc_pool = nn.Linear(self._in_src_feats, self._in_src_feats)
        if aggregator_type == "lstm":
            self.lstm = nn.LSTM(self._in_src_feats, self._in_src_feats, batch_first=True)
        self.fc_neigh = nn.Linear(self._in_src_feats, out_feats, bias=False)
        if aggregator_type != "gcn":
            self.fc_self = nn.Linear(self._in_dst_feats, out_feats, bias=bias)
        elif bias:
            self.bias = nn.Parameter(torch.zeros(out_feats))
        else:
            self.register_buffer("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew: Xavier uniform with the gain of ReLU; LSTM as torch does."""
        gain = nn.init.calculate_gain("relu")
        if self._aggre_type == "pool":
            nn.init.xavier_uniform_(self.fc_pool.weight, gain=gain)
        if self._aggre_type == "lstm":
            self.lstm.reset_parameters()
        if self._aggre_type != "gcn":
            nn.init.xavier_uniform_(self.fc_self.weight, gain=gain)
        nn.init.xavier_uniform_(self.fc_neigh.weight, gain=gain)

    @property
    def sums_rows(self) -> bool:
        """Whether it reads source rows to add them up, as they are, and for nothing else."""
        adds = self._aggre_type in ("mean", "gcn") and self._in_src_feats <= self._out_feats
        drops = not is_plain(self.feat_drop, nn.Dropout) or (self.training and self.feat_drop.p > 0)
        return adds and not drops

    def _lstm_reducer(self, nodes: NodeBatch) -> dict[str, Tensor]:
        """Last hidden state of the LSTM over the mailbox ``[num_nodes, degree, in_feats]``."""
        _, (last, _) = self.lstm(nodes.mailbox["m"])
        return {"neigh": last.squeeze(0)}

    def forward(
        self, graph: MessagePassingGraph, feat: Features, edge_weight: Tensor | None = None
    ) -> Tensor:
        """Apply the layer; see the class for shapes."""
        return run_steps(self._steps(graph, feat, edge_weight))

    def _steps(
        self, graph: MessagePassingGraph, feat: Features, edge_weight: Tensor | None = None
    ) -> Steps[Tensor]:
        if isinstance(feat, tuple):
            source, destination = split_features(graph, feat)
            feat = self.feat_drop(source), self.feat_drop(destination)
        else:
            feat = self.feat_drop(feat)
        if self._aggre_type == "mean" and edge_weight is None and not isinstance(feat, tuple):
            symmetric = SymmetricSum.of(graph, feat, self.fc_neigh, self.fc_self)
            if symmetric is not None:
                relu = is_relu(self.activation)
                wide = torch.promote_types(feat.dtype, torch.float32)
                after = degree_scale(graph.in_degrees(), -1.0, feat.new_empty((0, 1), dtype=wide))
                result = yield from symmetric.steps(graph, feat, None, after, "mean", relu)
                return self._activated(result, relu)
        if self._aggre_type == "pool":
            graph, feat = with_remote_rows(graph, feat, self.fc_pool, self._in_src_feats)
        with graph.local_scope():
            if self._aggre_type == "mean" and not isinstance(feat, tuple):
                feat = read_once(feat, [self.fc_neigh, self.fc_self])
            source, destination = split_features(graph, feat)
            if self._aggre_type == "gcn" and source.shape[1:] != destination.shape[1:]:
                raise ValueError(
                    "aggregator_type 'gcn' averages a node with its neighbours, so source and "
                    f"destination features need one width (got {tuple(source.shape)} and "
                    f"{tuple(destination.shape)})"
                )
            message = neighbour_message(graph, edge_weight, source.dim())

            # Multiplied by W_neigh already, or still to be.
            is_done = self._aggre_type in ("mean", "gcn") and multiplies_first(
                source, self._in_src_feats, self._out_feats
            )
            dense = self._dense(destination, is_done)
            start = None if dense is None else dense.start
            if self._aggre_type in ("mean", "gcn"):
                neigh = yield from self._average(
                    graph, message, source, destination, is_done, start
                )
            elif self._aggre_type == "pool":
                graph.srcdata["h"] = self._pooled(source)
                yield AggregationStep(graph, message, fn.max("m", "neigh"), start)
                neigh = graph.dstdata["neigh"]
            else:
                graph.srcdata["h"] = source
                yield AggregationStep(graph, message, self._lstm_reducer)
                neigh = graph.dstdata["neigh"]
        return self._finish(neigh, destination, is_done, dense)

    def _pooled(self, source: Tensor) -> Tensor:
        """What the maximum is taken of."""
        fc = self.fc_pool
        if is_plain(fc, nn.Linear):
            return affine([(source, fc.weight.t())], fc.bias, relu=True)
        return F.relu(fc(source))

    def _average(
        self,
        graph: MessagePassingGraph,
        message: Any,
        source: Tensor,
        destination: Tensor,
        transform_first: bool,
        meanwhile: Callable[[], None] | None,
    ) -> Steps[Tensor]:
        """The mean of the neighbours, and for ``gcn`` of the node itself too."""
        graph.srcdata["h"] = linear(source, self.fc_neigh) if transform_first else source
        if self._aggre_type == "mean":
            yield AggregationStep(graph, message, fn.mean("m", "neigh"), meanwhile)
            return graph.dstdata["neigh"]
        own = linear(destination, self.fc_neigh) if transform_first else destination
        yield AggregationStep(graph, message, fn.sum("m", "neigh"), meanwhile)
        degrees = graph.in_degrees().to(own.device) + 1
        return (graph.dstdata["neigh"] + own) / degrees.to(own.dtype).unsqueeze(-1)

    def _dense(self, destination: Tensor, is_done: bool) -> AffineInSteps | None:
        """The products and the bias of the result; None where they are not added up in one go."""
        layers = [] if self._aggre_type == "gcn" else [self.fc_self]
        late = [] if is_done else [self.fc_neigh]
        if not (layers or late) or not all(is_plain(fc, nn.Linear) for fc in (*layers, *late)):
            return None
        bias = self.bias if self._aggre_type == "gcn" else None
        biases = [b for b in (bias, *(fc.bias for fc in (*layers, *late))) if b is not None]
        if len(biases) > 1:
            return None
        products = [(destination, fc.weight.t()) for fc in layers]
        return AffineInSteps(products, [fc.weight.t() for fc in late], *biases)

    def _finish(
        self, neigh: Tensor, destination: Tensor, is_done: bool, dense: AffineInSteps | None
    ) -> Tensor:
        """The sum of both terms and the bias, activated."""
        relu = is_relu(self.activation)
        if dense is not None:
            late, plus = ([], neigh) if is_done else ([neigh], None)
            result = dense.finish(late, plus, relu)
        else:
            terms = [] if self._aggre_type == "gcn" else [self.fc_self(destination)]
            bias = self.bias if self._aggre_type == "gcn" else None
            terms += [neigh if is_done else self.fc_neigh(neigh)]
            result = reduce(torch.add, [part for part in (*terms, bias) if part is not None])
            result = result.relu() if relu else result
        return self._activated(result, relu)

    def _activated(self, result: Tensor, relu: bool) -> Tensor:
        """The result of the layer, which is a ReLU's already where ``relu`` says so."""
        if self.activation is not None and not relu:
            result = self.activation(result)
        return result if self.norm is None else self.norm(result)

    def extra_repr(self) -> str:
        return (
            f"in={self._in_src_feats, self._in_dst_feats}, out={self._out_feats}, "
            f"aggregator_type={self._aggre_type!r}"
        )
