# SPDX-License-Identifier: Apache-2.0
"""GINConv: the graph isomorphism network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from .. import function as fn
from ..graph import MessagePassingGraph
from ..graph.message_passing import AggregationStep, Steps, run_steps
from .inputs import Features, neighbour_message, split_features

REDUCERS = {"sum": fn.sum, "max": fn.max, "mean": fn.mean}


class GINConv(nn.Module):
    r"""Graph isomorphism layer.

    From `How Powerful are Graph Neural Networks? <https://arxiv.org/abs/1810.00826>`_:

    .. math::
        h'_i = f\Big((1 + \epsilon) h_i + \mathrm{aggregate}_{j \in N(i)} \; e_{ji} h_j\Big)

    with :math:`e_{ji} = 1` unless ``edge_weight`` is given.

    Args:
        apply_func: :math:`f`, usually a small network; ``None`` for the identity.
        init_eps: First value of :math:`\epsilon`.
        learn_eps: Learn :math:`\epsilon`; otherwise it is a buffer.

    Shape:
        ``feat`` ``[num_nodes, *]``, or a pair ``[num_src, *]``, ``[num_dst, *]``;
        ``edge_weight`` ``[num_edges]`` or ``[num_edges, 1]``; output ``[num_dst, *]`` after
        :math:`f`.

    Raises:
        ValueError: Unknown aggregator; wrong number of edge weights.

    Example:
        >>> import torch
        >>> from graphshard.graph import graph
        >>> from graphshard.nn import GINConv
        >>> g = graph((torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0])))
        >>> GINConv(torch.nn.Linear(4, 2))(g, torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """

    eps: Tensor

    def __init__(
        self,
        apply_func: Callable[[Tensor], Tensor] | None = None,
        aggregator_type: Literal["sum", "max", "mean"] = "sum",
        init_eps: float = 0.0,
        learn_eps: bool = False,
        activation: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        if aggregator_type not in REDUCERS:
            raise ValueError(
                f"aggregator_type must be one of {', '.join(REDUCERS)} (got {aggregator_type!r})"
            )
        self.apply_func = apply_func
        self._aggregator_type = aggregator_type
        self.activation = activation
        eps = torch.tensor([float(init_eps)])
        if learn_eps:
            self.eps = nn.Parameter(eps)
        else:
            self.register_buffer("eps", eps)

    @property
    def sums_rows(self) -> bool:
        """Whether it reads source rows to add them up, as they are, and for nothing else."""
        return self._aggregator_type in ("sum", "mean")

    def forward(
        self, graph: MessagePassingGraph, feat: Features, edge_weight: Tensor | None = None
    ) -> Tensor:
        """Apply the layer; see the class for shapes."""
        return run_steps(self._steps(graph, feat, edge_weight))

    def _steps(
        self, graph: MessagePassingGraph, feat: Features, edge_weight: Tensor | None = None
    ) -> Steps[Tensor]:
        with graph.local_scope():
            source, destination = split_features(graph, feat)
            message = neighbour_message(graph, edge_weight, source.dim())
            graph.srcdata["h"] = source
            yield AggregationStep(graph, message, REDUCERS[self._aggregator_type]("m", "neigh"))
            result = (1 + self.eps) * destination + graph.dstdata["neigh"]
        if self.apply_func is not None:
            result = self.apply_func(result)
        if self.activation is not None:
            result = self.activation(result)
        return result

    def extra_repr(self) -> str:
        return f"aggregator_type={self._aggregator_type!r}"
