# SPDX-License-Identifier: Apache-2.0
"""Small modules around layers: stacks, scores of edges, weights made of a few bases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..base import dgl_warning

__all__ = [
    "EdgePredictor", "Identity", "JumpingKnowledge", "Sequential", "TransE", "TransR",
    "WeightBasis",
]  # fmt: skip

_MODES = ("cat", "max", "lstm")


class Sequential(nn.Sequential):
    """Layers one after another, on one graph or on a graph each.

    What a layer returns, a tuple or one value, is what the next one gets after its graph.
    """

    def forward(self, graph: Any, *feats: Any) -> Any:
        """The last layer's result."""
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


_OPS = ("dot", "cos", "ele", "cat")


class EdgePredictor(nn.Module):
    r"""A score, or a row, for each pair of nodes.

    .. math:: \text{dot}: h_u \cdot h_v \quad \text{cos}: \frac{h_u \cdot h_v}{|h_u||h_v|}
        \quad \text{ele}: h_u \odot h_v \quad \text{cat}: h_u \| h_v
    """

    def __init__(
        self, op: str, in_feats: int | None = None, out_feats: int | None = None, bias: bool = False
    ) -> None:
        super().__init__()
        if op not in _OPS:
            raise ValueError(f"op must be one of {_OPS} (got {op!r})")
        self.op = op
        self.linear: nn.Linear | None = None
        if in_feats is not None and out_feats is not None:
            width = {"dot": 1, "cos": 1, "ele": in_feats, "cat": 2 * in_feats}[op]
            self.linear = nn.Linear(width, out_feats, bias=bias)

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        if self.linear is not None:
            self.linear.reset_parameters()

    def forward(self, h_src: Tensor, h_dst: Tensor) -> Tensor:
        """Scores of ``[num_pairs, in_feats]`` rows of either end: ``[num_pairs, width]``."""
        if self.op == "dot":
            score = (h_src * h_dst).sum(-1, keepdim=True)
        elif self.op == "cos":
            score = nn.functional.cosine_similarity(h_src, h_dst).unsqueeze(-1)
        elif self.op == "ele":
            score = h_src * h_dst
        else:
            score = torch.cat([h_src, h_dst], dim=-1)
        return score if self.linear is None else self.linear(score)


class TransE(nn.Module):
    r"""A relation as a translation: :math:`-\|h + r - t\|_p`.

    `Translating Embeddings for Modeling Multi-relational Data
    <https://papers.nips.cc/paper/2013/hash/1cecc7a77928ca8133fa24680a88d2f9-Abstract.html>`__
    """

    def __init__(self, num_rels: int, feats: int, p: float = 1) -> None:
        super().__init__()
        self.rel_emb = nn.Embedding(num_rels, feats)
        self.p = p

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        self.rel_emb.reset_parameters()

    def forward(self, h_head: Tensor, h_tail: Tensor, rels: Tensor) -> Tensor:
        """Scores of triples: ``[num_triples, feats]`` twice and relation numbers give as many."""
        return -torch.linalg.vector_norm(h_head + self.rel_emb(rels) - h_tail, ord=self.p, dim=-1)


class TransR(nn.Module):
    r"""A relation as a translation in a space of its own: :math:`-\|M_r h + r - M_r t\|_p`.

    `Learning Entity and Relation Embeddings for Knowledge Graph Completion
    <https://ojs.aaai.org/index.php/AAAI/article/view/9491>`__
    """

    def __init__(self, num_rels: int, rfeats: int, nfeats: int, p: float = 1) -> None:
        super().__init__()
        self.rel_emb = nn.Embedding(num_rels, rfeats)
        self.rel_project = nn.Embedding(num_rels, nfeats * rfeats)
        self.rfeats, self.nfeats, self.p = rfeats, nfeats, p

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        self.rel_emb.reset_parameters()
        self.rel_project.reset_parameters()

    def forward(self, h_head: Tensor, h_tail: Tensor, rels: Tensor) -> Tensor:
        """Scores of triples: ``[num_triples, nfeats]`` twice and relation numbers give as many."""
        into = self.rel_project(rels).reshape(-1, self.nfeats, self.rfeats)
        head, tail = ((h.unsqueeze(1) @ into).squeeze(1) for h in (h_head, h_tail))
        return -torch.linalg.vector_norm(head + self.rel_emb(rels) - tail, ord=self.p, dim=-1)


class WeightBasis(nn.Module):
    r"""Weights that are sums of a few bases, as in relational graph convolution.

    From `Modeling Relational Data with Graph Convolutional Networks
    <https://arxiv.org/abs/1703.06103>`_: :math:`W_o = \sum_b c_{ob} V_b`.
    """

    def __init__(self, shape: Sequence[int], num_bases: int, num_outputs: int) -> None:
        super().__init__()
        self.shape, self.num_bases, self.num_outputs = shape, num_bases, num_outputs
        if num_outputs <= num_bases:
            dgl_warning(
                f"num_outputs should be larger than num_bases (got {num_outputs} and {num_bases})"
            )
        self.weight = nn.Parameter(torch.empty(num_bases, *shape))
        self.w_comp = nn.Parameter(torch.empty(num_outputs, num_bases))
        for weight in (self.weight, self.w_comp):
            nn.init.xavier_uniform_(weight, gain=nn.init.calculate_gain("relu"))

    def forward(self) -> Tensor:
        """The weights, ``[num_outputs, *shape]``."""
        weights = self.w_comp @ self.weight.view(self.num_bases, -1)
        return weights.view(self.num_outputs, *self.shape)


class Identity(nn.Module):
    """Its input; one argument and no parameters, where `torch.nn.Identity` takes any."""

    def forward(self, x: Any) -> Any:
        """The argument."""
        return x
