# SPDX-License-Identifier: Apache-2.0
"""Transforms that draw at random, for augmentation; from torch's random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import GraphValueError
from ...graph import Graph
from ._base import BaseTransform, spaces_with


def _probability(p: float) -> float:
    if not 0.0 <= p <= 1.0:
        raise GraphValueError(f"p must be a probability, from 0 to 1 (got {p})")
    return p


def _drawn(count: int, p: float, g: Graph) -> Tensor:
    """``[count]`` bool, each true with probability ``p``."""
    return (torch.rand(count) < p).to(g.device)


class DropNode(BaseTransform):
    """Each node is dropped with a probability, with its edges.

    Args:
        p: The probability.
    """

    def __init__(self, p: float = 0.5) -> None:
        self.p = _probability(p)

    def __call__(self, g: Graph) -> Graph:
        g = g.clone()
        for ntype in g.ntypes if self.p else ():
            g.remove_nodes(g.nodes(ntype)[_drawn(g.num_nodes(ntype), self.p, g)], ntype)
        return g


class DropEdge(BaseTransform):
    """Each edge is dropped with a probability.

    Args:
        p: The probability.
    """

    def __init__(self, p: float = 0.5) -> None:
        self.p = _probability(p)

    def __call__(self, g: Graph) -> Graph:
        g = g.clone()
        for etype in g.canonical_etypes if self.p else ():
            drawn = _drawn(g.num_edges(etype), self.p, g)
            g.remove_edges(g.edges("eid", etype=etype)[drawn], etype)
        return g


class AddEdge(BaseTransform):
    """Edges between nodes drawn at random are added to every relation; their features are 0.

    Args:
        ratio: How many per edge that there is.
    """

    def __init__(self, ratio: float = 0.2) -> None:
        self.ratio = ratio

    def __call__(self, g: Graph) -> Graph:
        if not self.ratio:
            return g
        g = g.clone()
        for etype in g.canonical_etypes:
            count = int(g.num_edges(etype) * self.ratio)
            if count:
                ends = [
                    torch.randint(g.num_nodes(ntype), (count,)).to(g.device, g.idtype)
                    for ntype in (etype[0], etype[2])
                ]
                g.add_edges(ends[0], ends[1], etype=etype)
        return g


class NodeShuffle(BaseTransform):
    """Node features change places, in the same way for all features of a type; edges stay."""

    def __call__(self, g: Graph) -> Graph:
        g = g.clone()
        for ntype in g.ntypes:
            order = torch.randperm(g.num_nodes(ntype)).to(g.device)
            for name, value in list(g.nodes[ntype].data.items()):
                g.nodes[ntype].data[name] = value[order]
        return g


class FeatMask(BaseTransform):
    """Columns of features are set to 0 with a probability, the same ones for all rows.

    Args:
        p: The probability.
        node_feat_names: Node features; none by default.
        edge_feat_names: Edge features; none by default.
    """

    def __init__(
        self,
        p: float = 0.5,
        node_feat_names: Sequence[str] | None = None,
        edge_feat_names: Sequence[str] | None = None,
    ) -> None:
        self.p = _probability(p)
        self.node_feat_names = node_feat_names or []
        self.edge_feat_names = edge_feat_names or []

    def __call__(self, g: Graph) -> Graph:
        chosen = [("nodes", name) for name in self.node_feat_names]
        chosen += [("edges", name) for name in self.edge_feat_names]
        for what, name in chosen if self.p else ():
            for fields in spaces_with(g, name, what):
                value = fields[name]
                fields[name] = value.masked_fill(_drawn(value.shape[-1], self.p, g), 0)
        return g
