# SPDX-License-Identifier: Apache-2.0
"""Attentions of every kind on a graph, and the formulas written out for each destination."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from graphshard.ops import Adjacency, Attention, EdgeMask, edge_keys


@dataclass(frozen=True)
class AttentionCase:
    """A kind of score and the optional operands that come with it.

    Attributes:
        score: As in `Attention`.
        heads: Number of heads.
        dim: Columns of a head.
        edge: Scores read edges.
        factor: Columns of the factor; 0 for none.
        dropout: Probability; 0 for none.
        keyed: The mask goes by keys instead of edge ids.
        score_dim: Columns of what dot products read; None for those of values.
        shared: Keys are the values themselves.
    """

    score: str
    heads: int = 2
    dim: int = 3
    edge: bool = False
    factor: int = 0
    dropout: float = 0.0
    keyed: bool = False
    score_dim: int | None = None
    shared: bool = False

    def __str__(self) -> str:
        words = [self.score, f"{self.heads}x{self.dim}"]
        words += ["edge"] * self.edge + [f"factor{self.factor}"] * bool(self.factor)
        words += ["dropout"] * bool(self.dropout) + ["keyed"] * self.keyed
        words += ["shared"] * self.shared
        return "-".join(words)

    def make(self, adj: Adjacency, dtype: torch.dtype = torch.float64, seed: int = 0) -> Attention:
        """The attention, its operands drawn from the seed and wanting gradients."""
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            rows = torch.randn(shape, generator=generator, dtype=torch.float64)
            return rows.to(dtype).requires_grad_()

        heads, dim = self.heads, self.dim
        count = {"u": adj.num_src, "v": adj.num_dst, "e": adj.num_edges}
        values = draw(count["u"], heads, dim)
        factor = draw(count["e"], self.factor) if self.factor else None
        keys = edge_keys(torch.arange(count["e"]) * 7919 + 2**33) if self.keyed else None
        mask = EdgeMask(self.dropout, 2**40 + 5, keys) if self.dropout else None
        if self.score == "additive":
            edge = draw(count["e"], heads) if self.edge else None
            terms = draw(count["u"], heads), draw(count["v"], heads)
            return Attention.additive(values, *terms, edge, slope=0.1, factor=factor, mask=mask)
        if self.score == "joint":
            edge = draw(count["e"], heads, dim) if self.edge else None
            dst, vector = draw(count["v"], heads, dim), draw(heads, dim)
            return Attention.joint(values, dst, vector, edge, factor=factor, mask=mask)
        width = dim if self.score_dim is None or self.shared else self.score_dim
        src = values if self.shared else draw(count["u"], heads, width)
        edge = draw(count["e"], heads) if self.edge else None
        dst = draw(count["v"], heads, width)
        return Attention.dot(values, src, dst, edge, scale=0.7, factor=factor, mask=mask)


OPTIONS = (
    {},
    {"edge": True},
    {"factor": 1},
    {"factor": 2, "dropout": 0.4},
    {"edge": True, "factor": 1, "dropout": 0.3, "keyed": True},
)
CASES = [AttentionCase(score, **o) for score in ("additive", "joint", "dot") for o in OPTIONS]
CASES += [AttentionCase("dot", score_dim=5), AttentionCase("dot", shared=True)]
WIDTHS = [(1, 1), (1, 32), (3, 8), (2, 17), (4, 64), (1, 70)]


def written_out(adj: Adjacency, a: Attention) -> Tensor:
    """The result by torch.softmax, one destination after the other, from the formulas alone."""
    src, dst = (ids.long() for ids in adj.coo())
    rows = []
    for v in range(adj.num_dst):
        edges = (dst == v).nonzero().view(-1)
        u = src[edges]
        if a.score == "dot":
            assert a.src is not None
            scores = a.scale * (a.src[u] * a.dst[v]).sum(-1)
            scores = scores if a.edge is None else scores + a.edge[edges]
        else:
            source = a.values if a.src is None else a.src
            joined = source[u] + a.dst[v]
            joined = joined if a.edge is None else joined + a.edge[edges]
            scores = torch.where(joined > 0, joined, joined * a.slope)
            if a.score == "joint":
                assert a.vector is not None
                scores = (scores * a.vector).sum(-1)
        weights = torch.softmax(scores, 0)
        weights = weights if a.factor is None else weights * a.factor[edges]
        if a.mask is not None:
            weights = weights * a.mask.multipliers(edges, a.heads).to(weights.dtype)
        rows.append((weights.unsqueeze(-1) * a.values[u]).sum(0))
    return torch.stack(rows) if rows else a.values.new_zeros(0, a.heads, a.dim)


def inputs_of(a: Attention) -> list[Tensor]:
    """The distinct operands."""
    return list({id(t): t for t in a.operands if t is not None}.values())


def shard_of(a: Attention, rows: Tensor, edges: Tensor) -> Attention:
    """What a shard sees: some of the sources and some of the edges."""
    mask = a.mask
    if mask is not None:
        keys = edge_keys(edges) if mask.keys is None else mask.keys[edges]
        mask = replace(mask, keys=keys)
    return replace(
        a,
        values=a.values[rows],
        src=None if a.src is None else a.src[rows],
        edge=None if a.edge is None else a.edge[edges],
        factor=None if a.factor is None else a.factor[edges],
        mask=mask,
    )


def random_adjacency(
    num_src: int, num_dst: int, num_edges: int, idtype: torch.dtype = torch.int64, hub: int = 0
) -> Adjacency:
    """Uniform edges, and ``hub`` more into destination 1 and out of source 2."""
    generator = torch.Generator().manual_seed(7)
    src = torch.randint(0, num_src, (num_edges + 2 * hub,), generator=generator)
    dst = torch.randint(0, num_dst, (num_edges + 2 * hub,), generator=generator)
    dst[num_edges : num_edges + hub] = 1
    src[num_edges + hub :] = 2
    return Adjacency(src.to(idtype), dst.to(idtype), num_src, num_dst)
