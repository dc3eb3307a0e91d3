# SPDX-License-Identifier: Apache-2.0
"""Several layers as one: one after another, and the outputs of all of them put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_MODES = ("cat", "max", "lstm")


class Sequential(nn.Sequential):
    """Layers one after another, on one graph or on a graph each.

    What a layer returns, a tuple or one value, is what the next one gets after its graph.

    Args:
        *args: The layers.

    Example:
        >>> from graphshard.graph import graph
        >>> from graphshard.nn import GraphConv
        >>> stack = Sequential(GraphConv(4, 8), GraphConv(8, 2))
        >>> stack(graph(([0, 1], [1, 0])), torch.ones(2, 4)).shape
        torch.Size([2, 2])
    """

    def forward(self, graph: Any, *feats: Any) -> Any:
        """The last layer's result.

        Args:
            graph: Any graph of the protocol; or a list of graphs, one per layer.
            *feats: What the first layer gets after the graph.
        """
        values: Any = feats
        graphs = graph if isinstance(graph, list) else [graph] * len(self)
        for layer, own in zip(self, graphs, strict=True):
            values = layer(own, *(values if isinstance(values, tuple) else (values,)))
        return values


class JumpingKnowledge(nn.Module):
    """The outputs of several layers as one row per node.

    `Representation Learning on Graphs with Jumping Knowledge Networks
    <https://arxiv.org/abs/1806.03536>`__

    Args:
        mode: ``"cat"`` puts them side by side, ``"max"`` takes the largest of each column, and
            ``"lstm"`` weighs them per node, by a bidirectional LSTM over the layers.
        in_feats: Width of every output, for ``"lstm"``.
        num_layers: Number of outputs, for ``"lstm"``.

    Raises:
        ValueError: an unknown ``mode``, or ``"lstm"`` without its numbers.
    """

    def __init__(
        self, mode: str = "cat", in_feats: int | None = None, num_layers: int | None = None
    ) -> None:
        super().__init__()
        if mode not in _MODES:
            raise ValueError(f"mode must be one of {_MODES} (got {mode!r})")
        self.mode = mode
        if mode == "lstm":
            if in_feats is None or num_layers is None:
                raise ValueError(
                    f"mode 'lstm' needs in_feats and num_layers (got {in_feats} and {num_layers})"
                )
            width = num_layers * in_feats // 2
            self.lstm = nn.LSTM(in_feats, width, bidirectional=True, batch_first=True)
            self.att = nn.Linear(2 * width, 1)

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        if self.mode == "lstm":
            self.lstm.reset_parameters()
            self.att.reset_parameters()

    def forward(self, feat_list: Sequence[Tensor]) -> Tensor:
        """One row per node of the ``[num_nodes, in_feats]`` outputs, first layer first."""
        if self.mode == "cat":
            return torch.cat(list(feat_list), dim=-1)
        if self.mode == "max":
            return torch.stack(list(feat_list)).max(0).values
        stacked = torch.stack(list(feat_list), dim=1)
        weights = self.att(self.lstm(stacked)[0]).softmax(1)
        return (stacked * weights).sum(1)
