# SPDX-License-Identifier: Apache-2.0
"""How likely two nodes are joined: from their rows, and from a relation that is learned."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_OPS = ("dot", "cos", "ele", "cat")


class EdgePredictor(nn.Module):
    r"""A score, or a row, for each pair of nodes.

    .. math:: \text{dot}: h_u \cdot h_v \quad \text{cos}: \frac{h_u \cdot h_v}{|h_u||h_v|}
        \quad \text{ele}: h_u \odot h_v \quad \text{cat}: h_u \| h_v

    Args:
        op: ``"dot"``, ``"cos"``, ``"ele"`` or ``"cat"``.
        in_feats: Width of a node's row, if the result goes through a linear layer.
        out_feats: Width of the result of that layer.
        bias: Whether that layer has a bias.

    Raises:
        ValueError: an unknown ``op``.

    Example:
        >>> EdgePredictor("dot")(torch.ones(2, 3), torch.ones(2, 3))
        tensor([[3.],
                [3.]])
    """

    def __init__(
        self,
        op: str,
        in_feats: int | None = None,
        out_feats: int | None = None,
        bias: bool = False,
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

    Args:
        num_rels: Number of relations.
        feats: Width of a node's row.
        p: Which norm.
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

    Args:
        num_rels: Number of relations.
        rfeats: Width of a relation's space.
        nfeats: Width of a node's row.
        p: Which norm.
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
