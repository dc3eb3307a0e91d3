# SPDX-License-Identifier: Apache-2.0
"""GraphConv: the graph convolution of Kipf and Welling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from .. import function as fn
from ..graph import MessagePassingGraph
from ..graph.message_passing import AggregationStep, Steps, run_steps
from ..ops import AffineInSteps, affine, is_relu
from .inputs import Features, degree_scale, multiplies_first, neighbour_message
from .symmetric_sums import SymmetricSum
from .zero_in_degree import ZeroInDegreeCheck

NORMS = ("none", "both", "right", "left")


class GraphConv(ZeroInDegreeCheck):
    r"""Graph convolution.

    From `Semi-Supervised Classification with Graph Convolutional Networks
    <https://arxiv.org/abs/1609.02907>`_:

    .. math::
        h'_i = \sigma\Big(b + \sum_{j \in N(i)} \frac{e_{ji}}{c_{ji}} h_j W\Big)

    where :math:`c_{ji}` is :math:`\sqrt{d^{out}_j d^{in}_i}` for norm ``both``,
    :math:`d^{in}_i` for ``right``, :math:`d^{out}_j` for ``left`` and 1 for ``none``; degrees
    count edges, whatever their weights. The product with :math:`W` comes before the sum when the
    output is narrower than the input.

    Args:
        norm: ``both``, ``right``, ``left`` or ``none``.
        weight: Own a matrix :math:`W`. ``False`` leaves it out, or takes it from ``forward``.
        bias: Learn :math:`b`.
        activation: :math:`\sigma`.
        allow_zero_in_degree: Accept nodes without in-edges (they get the bias alone).

    Shape:
        ``feat`` ``[num_src, in_feats]``, or a pair whose second item is not read;
        ``weight`` ``[in_feats, out_feats]``; ``edge_weight`` ``[num_edges]`` or
        ``[num_edges, 1]``; output ``[num_dst, out_feats]``.

    Raises:
        ValueError: Unknown norm; nodes without in-edges; ``weight`` given twice; wrong number of
            edge weights.

    Example:
        >>> import torch
        >>> from graphshard.graph import graph
        >>> from graphshard.nn import GraphConv
        >>> g = graph((torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0])))
        >>> GraphConv(4, 2)(g, torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """

    weight: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        in_feats: int,
        out_feats: int,
        norm: Literal["none", "both", "right", "left"] = "both",
        weight: bool = True,
        bias: bool = True,
        activation: Callable[[Tensor], Tensor] | None = None,
        allow_zero_in_degree: bool = False,
    ) -> None:
        super().__init__(allow_zero_in_degree)
        if norm not in NORMS:
            raise ValueError(f"norm must be one of {', '.join(NORMS)} (got {norm!r})")
        self._in_feats = in_feats
        self._out_feats = out_feats
        self._norm = norm
        self.register_parameter(
            "weight", nn.Parameter(torch.empty(in_feats, out_feats)) if weight else None
        )
        self.register_parameter("bias", nn.Parameter(torch.empty(out_feats)) if bias else None)
        self.reset_parameters()
        self._activation = activation

    def reset_parameters(self) -> None:
        """Draw the weight anew (Xavier uniform) and set the bias to zero."""
        if self.weight is not None:
            nn.init.xavier_uniform_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @property
    def sums_rows(self) -> bool:
        """Whether it reads source rows to add them up, as they are, and for nothing else."""
        return self._norm in ("right", "none") and self._in_feats <= self._out_feats

    def forward(
        self,
        graph: MessagePassingGraph,
        feat: Features,
        weight: Tensor | None = None,
        edge_weight: Tensor | None = None,
    ) -> Tensor:
        """Apply the layer; see the class for shapes."""
        return run_steps(self._steps(graph, feat, weight, edge_weight))

    def _steps(
        self,
        graph: MessagePassingGraph,
        feat: Features,
        weight: Tensor | None = None,
        edge_weight: Tensor | None = None,
    ) -> Steps[Tensor]:
        if weight is not None and self.weight is not None:
            raise ValueError(
                "the weight comes from the layer or from the call, not from both (got a weight of "
                f"shape {tuple(weight.shape)}); construct the layer with weight=False"
            )
        weight = self.weight if weight is None else weight
        self._check_in_degrees(graph)
        power = -0.5 if self._norm == "both" else -1.0
        relu = is_relu(self._activation)
        if weight is not None and edge_weight is None and not isinstance(feat, tuple):
            symmetric = SymmetricSum.of(graph, feat, weight, None, self.bias)
            if symmetric is not None:
                before = after = None
                if self._norm in ("left", "both"):
                    before = degree_scale(graph.out_degrees(), power, feat)
                if self._norm in ("right", "both"):
                    after = degree_scale(graph.in_degrees(), power, feat)
                result = yield from symmetric.steps(graph, feat, before, after, "sum", relu)
                return self._activated(result, relu)
        with graph.local_scope():
            source = feat[0] if isinstance(feat, tuple) else feat
            message = neighbour_message(graph, edge_weight, source.dim())
            if self._norm in ("left", "both"):
                source = source * degree_scale(graph.out_degrees(), power, source)

            transform_first = multiplies_first(source, self._in_feats, self._out_feats)
            if weight is not None and transform_first:
                source = affine([(source, weight)])
            graph.srcdata["h"] = source
            dense = None
            if weight is not None and not transform_first:
                dense = AffineInSteps([], [weight], self.bias)
            start = None if dense is None else dense.start
            yield AggregationStep(graph, message, fn.sum("m", "out"), start)
            result = graph.dstdata["out"]
            if self._norm in ("right", "both"):
                result = result * degree_scale(graph.in_degrees(), power, result)
        if dense is not None:
            result = dense.finish([result], relu=relu)
        else:
            result = result if self.bias is None else result + self.bias
            result = result.relu() if relu else result
        return self._activated(result, relu)

    def _activated(self, result: Tensor, relu: bool) -> Tensor:
        """The result of the layer, which is a ReLU's already where ``relu`` says so."""
        if self._activation is not None and not relu:
            result = self._activation(result)
        return result

    def extra_repr(self) -> str:
        text = f"in={self._in_feats}, out={self._out_feats}, normalization={self._norm}"
        return text if self.weight is not None else f"{text}, weight=False"
