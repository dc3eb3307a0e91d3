# SPDX-License-Identifier: Apache-2.0
"""Transforms that make or change features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import function as fn
from ...errors import GraphValueError
from ...graph import Graph
from ..graphs._encodings import lap_pe, random_walk_pe, svd_pe
from ._base import BaseTransform, spaces_with


class RowFeatNormalizer(BaseTransform):
    """Features divided by the sum of their row, where that is above 1.

    Args:
        subtract_min: Whether the least value of all is subtracted first.
        node_feat_names: Node features; none by default.
        edge_feat_names: Edge features; none by default.
    """

    def __init__(
        self,
        subtract_min: bool = False,
        node_feat_names: Sequence[str] | None = None,
        edge_feat_names: Sequence[str] | None = None,
    ) -> None:
        self.subtract_min = subtract_min
        self.node_feat_names = node_feat_names or []
        self.edge_feat_names = edge_feat_names or []

    def row_normalize(self, feat: Tensor) -> Tensor:
        """The normalized rows."""
        if self.subtract_min:
            feat = feat - feat.min()
        return feat / feat.sum(-1, keepdim=True).clamp(min=1.0)

    def __call__(self, g: Graph) -> Graph:
        chosen = [("nodes", name) for name in self.node_feat_names]
        chosen += [("edges", name) for name in self.edge_feat_names]
        for what, name in chosen:
            for fields in spaces_with(g, name, what):
                fields[name] = self.row_normalize(fields[name])
        return g


class RandomWalkPE(BaseTransform):
    """Return probabilities of random walks as a node feature; see `graphshard.dgl.random_walk_pe`.

    Args:
        k: Number of steps.
        feat_name: Name of the feature.
        eweight_name: Edge feature with weights; None for equal ones.
    """

    def __init__(self, k: int, feat_name: str = "PE", eweight_name: str | None = None) -> None:
        self.k = k
        self.feat_name = feat_name
        self.eweight_name = eweight_name

    def __call__(self, g: Graph) -> Graph:
        g.ndata[self.feat_name] = random_walk_pe(g, self.k, self.eweight_name).to(g.device)
        return g


class LapPE(BaseTransform):
    """Eigenvectors of the Laplacian as a node feature; see `graphshard.dgl.lap_pe`.

    Args:
        k: Number of eigenvectors.
        feat_name: Name of the feature.
        eigval_name: Node feature that gets the eigenvalues, the same for all nodes; None for none.
        padding: Whether to fill up with zeros where there are fewer than ``k``.
    """

    def __init__(
        self,
        k: int,
        feat_name: str = "PE",
        eigval_name: str | None = None,
        padding: bool = False,
    ) -> None:
        self.k = k
        self.feat_name = feat_name
        self.eigval_name = eigval_name
        self.padding = padding

    def __call__(self, g: Graph) -> Graph:
        vectors, values = lap_pe(g, self.k, self.padding, return_eigval=True)
        g.ndata[self.feat_name] = vectors.to(g.device)
        if self.eigval_name:
            rows = values.unsqueeze(0).repeat(g.num_nodes(), 1)
            g.ndata[self.eigval_name] = rows.to(g.device)
        return g


LaplacianPE = LapPE


class SVDPE(BaseTransform):
    """Singular vectors of the adjacency matrix as a node feature; see `graphshard.dgl.svd_pe`.

    Args:
        k: Number of singular values.
        feat_name: Name of the feature.
        padding: Whether to fill up with zeros where there are fewer than ``k`` nodes.
        random_flip: Whether to draw the sign of each row at random.
    """

    def __init__(
        self,
        k: int,
        feat_name: str = "svd_pe",
        padding: bool = False,
        random_flip: bool = True,
    ) -> None:
        self.k = k
        self.feat_name = feat_name
        self.padding = padding
        self.random_flip = random_flip

    def __call__(self, g: Graph) -> Graph:
        g.ndata[self.feat_name] = svd_pe(g, self.k, self.padding, self.random_flip).to(g.device)
        return g


class GCNNorm(BaseTransform):
    """Symmetric normalization as edge weights, in relations from a node type to itself.

    An edge from u to v gets ``w / sqrt(d_u d_v)``, where ``d`` sums the weights into a node; 0
    where that is infinite.

    Args:
        eweight_name: Edge feature with the weights ``w``, 1 where there is none; gets the result.
    """

    def __init__(self, eweight_name: str = "w") -> None:
        self.eweight_name = eweight_name

    def __call__(self, g: Graph) -> Graph:
        for etype in g.canonical_etypes:
            if etype[0] == etype[2]:
                g.edges[etype].data[self.eweight_name] = self._weights(g, etype)
        return g

    def _weights(self, g: Graph, etype: Any) -> Tensor:
        name, ntype = self.eweight_name, etype[0]
        weights = g.edges[etype].data.get(name)
        with g.local_scope():
            if weights is None:
                degrees = g.in_degrees(etype=etype).float()
            else:
                g.update_all(fn.copy_e(name, "m"), fn.sum("m", "deg"), etype=etype)
                degrees = g.nodes[ntype].data["deg"]
            scale = degrees.rsqrt()
            g.nodes[ntype].data["scale"] = scale.masked_fill(scale.isinf(), 0)
            g.apply_edges(fn.u_mul_v("scale", "scale", "scale"), etype=etype)
            found: Tensor = g.edges[etype].data["scale"]
            return found if weights is None else found * weights


class SIGNDiffusion(BaseTransform):
    """Features of neighbours 1, 2, ..., ``k`` steps away, as node features.

    From "SIGN: Scalable Inception Graph Neural Networks" (https://arxiv.org/abs/2004.11198).
    Feature ``out_feat_name_i`` is the input after ``i`` steps.

    Args:
        k: Number of steps.
        in_feat_name: The input, ``[num_nodes, dim]``.
        out_feat_name: How names of results begin.
        eweight_name: Edge feature with weights; None for 1.
        diffuse_op: A step: ``"raw"`` sums; ``"rw"`` takes the (weighted) mean; ``"gcn"`` sums with
            the weights of `GCNNorm`; ``"ppr"`` does, and mixes with the input.
        alpha: Share of the input in ``"ppr"``.

    Raises:
        ValueError: an unknown step.
    """

    def __init__(
        self,
        k: int,
        in_feat_name: str = "feat",
        out_feat_name: str = "out_feat",
        eweight_name: str | None = None,
        diffuse_op: str = "raw",
        alpha: float = 0.2,
    ) -> None:
        if diffuse_op not in ("raw", "rw", "gcn", "ppr"):
            raise GraphValueError(
                f"diffuse_op must be 'raw', 'rw', 'gcn' or 'ppr' (got {diffuse_op!r})"
            )
        self.k = k
        self.in_feat_name = in_feat_name
        self.out_feat_name = out_feat_name
        self.eweight_name = eweight_name
        self.diffuse_op = diffuse_op
        self.alpha = alpha

    def __call__(self, g: Graph) -> Graph:
        found = []
        with g.local_scope():
            given = g.ndata[self.in_feat_name]
            message = self._message(g)
            total = None
            if self.diffuse_op == "rw" and message.rhs_field is not None:
                g.update_all(fn.copy_e(message.rhs_field, "m"), fn.sum("m", "total"))
                total = g.ndata["total"].reshape(-1, 1)
            mean = self.diffuse_op == "rw" and total is None
            g.ndata["h"] = given
            for _ in range(self.k):
                g.update_all(message, fn.mean("m", "h") if mean else fn.sum("m", "h"))
                if total is not None:
                    g.ndata["h"] = g.ndata["h"] / total
                if self.diffuse_op == "ppr":
                    g.ndata["h"] = (1 - self.alpha) * g.ndata["h"] + self.alpha * given
                found.append(g.ndata["h"])
        for i, value in enumerate(found, 1):
            g.ndata[f"{self.out_feat_name}_{i}"] = value
        return g

    def _message(self, g: Graph) -> fn.MessageFunction:
        name = self.eweight_name
        if self.diffuse_op in ("gcn", "ppr"):
            if name is None:
                name = "w"
                g.edata.pop(name, None)
            GCNNorm(name)(g)
        if name is None or name not in g.edata:
            return fn.copy_u("h", "m")
        if g.edata[name].dim() < g.ndata[self.in_feat_name].dim():
            g.edata[name] = g.edata[name].unsqueeze(-1)
        return fn.u_mul_e("h", name, "m")


def dense_weights(g: Graph, eweight_name: str) -> Tensor:
    """Dense ``[num_nodes, num_nodes]`` weights, a row per destination; 1 where there is none."""
    weights = g.edata.get(eweight_name)
    if weights is None:
        weights = torch.ones(g.num_edges(), device=g.device)
    src, dst = (end.long() for end in g.edges())
    dense = torch.zeros(g.num_nodes(), g.num_nodes(), dtype=weights.dtype, device=g.device)
    dense[dst, src] = weights
    return dense
