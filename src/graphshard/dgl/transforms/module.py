# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.transforms.module``: what is called with a graph and returns a graph.

What is drawn at random comes from torch's generator. Graph diffusion is that of "Diffusion Improves
Graph Learning" (https://arxiv.org/abs/1911.05485): dense sums over walks of all lengths, made
sparse again, at the cost of dense matrices of ``num_nodes ** 2``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import function as fn
from ...comm import all_reduce
from ...errors import GraphUnsupportedError, GraphValueError
from ...fullbatch import GraphShardManager
from ...graph import Graph, add_self_loop, heterograph, remove_self_loop, to_simple
from ..graphs._encodings import lap_pe, random_walk_pe, svd_pe
from ..graphs._products import khop_graph, line_graph, metapath_reachable_graph

__all__ = [
    "GDC", "PPR", "SVDPE", "AddEdge", "AddMetaPaths", "AddReverse", "AddSelfLoop",
    "BaseTransform", "Compose", "DropEdge", "DropNode", "FeatMask", "GCNNorm", "HeatKernel",
    "KHopGraph", "LapPE", "LaplacianPE", "LineGraph", "NodeShuffle", "RandomWalkPE",
    "RemoveSelfLoop", "RowFeatNormalizer", "SIGNDiffusion", "ToLevi", "ToSimple",
]  # fmt: skip


class BaseTransform:
    """Base of all transforms: subclasses implement ``__call__``."""

    def __call__(self, g: Graph) -> Graph:
        """The changed graph."""
        raise NotImplementedError(f"{type(self).__name__} must implement __call__(g)")

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


@dataclass(repr=False, eq=False)
class Compose(BaseTransform):
    """Several transforms, one after another.

    Example:
        >>> from graphshard.graph import graph
        >>> from graphshard.dgl.transforms import AddReverse, AddSelfLoop, Compose
        >>> Compose([AddReverse(), AddSelfLoop()])(graph(([0], [1]))).num_edges()
        4
    """

    transforms: Sequence[Callable[[Graph], Graph]]

    def __call__(self, g: Graph) -> Graph:
        for transform in self.transforms:
            g = transform(g)
        return g

    def __repr__(self) -> str:
        inner = ",\n".join(f"  {transform}" for transform in self.transforms)
        return f"{type(self).__name__}([\n{inner}\n])"


def with_edges(g: Graph, edges: Mapping[Any, Any], copy_edata: bool = True) -> Graph:
    """A graph with the nodes of ``g`` and their features, and other relations."""
    counts = {ntype: g.num_nodes(ntype) for ntype in g.ntypes}
    new = heterograph(edges, counts, idtype=g.idtype, device=g.device)
    for ntype in g.ntypes:
        new.nodes[ntype].data.update(g.nodes[ntype].data)
    for etype in g.canonical_etypes if copy_edata else ():
        if etype in new.canonical_etypes:
            new.edges[etype].data.update(g.edges[etype].data)
    return new


def named_fields(
    g: Graph, node_names: Sequence[str] | None, edge_names: Sequence[str] | None
) -> Iterator[tuple[Any, str]]:
    """The feature dictionaries of all types that have a feature of these names, with the name."""
    nodes = [g.nodes[ntype].data for ntype in g.ntypes]
    edges = [g.edges[etype].data for etype in g.canonical_etypes]
    for what, spaces, names in (("nodes", nodes, node_names), ("edges", edges, edge_names)):
        for name in names or ():
            holders = [fields for fields in spaces if name in fields]
            if not holders:
                raise KeyError(f"no feature {name!r} on any type of {what}")
            yield from ((fields, name) for fields in holders)


@dataclass(repr=False, eq=False)
class AddSelfLoop(BaseTransform):
    """A self loop for each node, in every relation from a node type to itself.

    Args:
        new_etypes: Whether to add a relation ``(T, 'self', T)`` of loops for every node type too.
    """

    allow_duplicate: bool = False
    new_etypes: bool = False
    edge_feat_names: Sequence[str] | None = None
    fill_data: float | str = 1.0

    def __call__(self, g: Graph) -> Graph:
        for etype in g.canonical_etypes:
            if etype[0] == etype[2]:
                if not self.allow_duplicate:
                    g = remove_self_loop(g, etype)
                g = add_self_loop(g, self.edge_feat_names, self.fill_data, etype)
        if not self.new_etypes:
            return g
        edges = {(ntype, "self", ntype): (g.nodes(ntype), g.nodes(ntype)) for ntype in g.ntypes}
        return with_edges(g, edges | {e: g.edges(etype=e) for e in g.canonical_etypes})


class RemoveSelfLoop(BaseTransform):
    """No self loop, in any relation from a node type to itself."""

    def __call__(self, g: Graph) -> Graph:
        for etype in g.canonical_etypes:
            if etype[0] == etype[2]:
                g = remove_self_loop(g, etype)
        return g


@dataclass(repr=False, eq=False)
class AddReverse(BaseTransform):
    """The reverse of every edge: in its relation, or in a relation ``rev_...`` of its own.

    Relations between two node types always get a new one.

    Args:
        copy_edata: Whether reverse edges get the features of their edges; else 0, or none in a new
            relation.
    """

    copy_edata: bool = False
    sym_new_etype: bool = False

    def __call__(self, g: Graph) -> Graph:
        edges: dict[Any, Any] = {}
        turned: dict[Any, Any] = {}
        for etype in g.canonical_etypes:
            src, dst = g.edges(etype=etype)
            if etype[0] == etype[2] and not self.sym_new_etype:
                edges[etype] = torch.cat([src, dst]), torch.cat([dst, src])
            else:
                turned[etype] = (etype[2], f"rev_{etype[1]}", etype[0])
                edges[etype], edges[turned[etype]] = (src, dst), (dst, src)
        new = with_edges(g, edges, copy_edata=False)
        for etype in g.canonical_etypes:
            fields = g.edges[etype].data
            if etype not in turned:
                for name, value in fields.items():
                    second = value if self.copy_edata else torch.zeros_like(value)
                    new.edges[etype].data[name] = torch.cat([value, second])
                continue
            new.edges[etype].data.update(fields)
            if self.copy_edata:
                new.edges[turned[etype]].data.update(fields)
        return new


@dataclass(repr=False, eq=False)
class ToSimple(BaseTransform):
    """One edge for all parallel ones; see `graphshard.dgl.to_simple`."""

    return_counts: str = "count"
    aggregator: str = "arbitrary"

    def __call__(self, g: Graph) -> Graph:
        return to_simple(g, self.return_counts, copy_edata=True, aggregator=self.aggregator)


@dataclass(repr=False, eq=False)
class LineGraph(BaseTransform):
    """The graph of the edges, with their features; see `graphshard.dgl.line_graph`."""

    backtracking: bool = True

    def __call__(self, g: Graph) -> Graph:
        return line_graph(g, self.backtracking, shared=True)


@dataclass(repr=False, eq=False)
class KHopGraph(BaseTransform):
    """The graph of the walks of ``k`` edges; see `graphshard.dgl.khop_graph`."""

    k: int

    def __call__(self, g: Graph) -> Graph:
        return khop_graph(g, self.k)


@dataclass(repr=False, eq=False)
class AddMetaPaths(BaseTransform):
    """A relation for every pair of nodes that a walk along some relations joins."""

    metapaths: Mapping[str, Sequence[Any]]
    keep_orig_edges: bool = True

    def __call__(self, g: Graph) -> Graph:
        edges: dict[Any, Any] = {}
        for name, metapath in self.metapaths.items():
            reached = metapath_reachable_graph(g, metapath)
            edges[(metapath[0][0], name, metapath[-1][-1])] = reached.edges()
        if self.keep_orig_edges:
            edges |= {etype: g.edges(etype=etype) for etype in g.canonical_etypes}
        return with_edges(g, edges, self.keep_orig_edges)


class ToLevi(BaseTransform):
    """The Levi graph: edges become nodes of type ``edge`` between their ends, of type ``node``.

    Features of nodes and edges become features of the two node types.
    """

    def __call__(self, g: Graph) -> Graph:
        src, dst = g.edges()
        edges = g.edges("eid")
        pairs = {("node", "n2e", "edge"): (src, edges), ("edge", "e2n", "node"): (edges, dst)}
        counts = {"node": g.num_nodes(), "edge": g.num_edges()}
        new = heterograph(pairs, counts, idtype=g.idtype, device=g.device)
        new.nodes["node"].data.update(g.ndata)
        new.nodes["edge"].data.update(g.edata)
        return new


@dataclass(repr=False, eq=False)
class RowFeatNormalizer(BaseTransform):
    """Features divided by the sum of their row, where that is above 1."""

    subtract_min: bool = False
    node_feat_names: Sequence[str] | None = None
    edge_feat_names: Sequence[str] | None = None

    def __post_init__(self) -> None:
        self.node_feat_names = self.node_feat_names or []
        self.edge_feat_names = self.edge_feat_names or []

    def row_normalize(self, feat: Tensor) -> Tensor:
        """The normalized rows."""
        return self._normalized(feat, feat.min() if self.subtract_min else None)

    def __call__(self, g: Graph) -> Graph:
        for fields, name in named_fields(g, self.node_feat_names, self.edge_feat_names):
            feat = fields[name]
            least = least_of_all(g, feat) if self.subtract_min else None
            fields[name] = self._normalized(feat, least)
        return g

    def _normalized(self, feat: Tensor, least: Tensor | None) -> Tensor:
        if least is not None:
            feat = feat - least
        return feat / feat.sum(-1, keepdim=True).clamp(min=1.0)


def least_of_all(g: Graph | GraphShardManager, feat: Tensor) -> Tensor:
    """The least number of a feature; of a sharded graph, that of all ranks, some without rows."""
    if not isinstance(g, GraphShardManager):
        return feat.min()
    info = torch.finfo if feat.is_floating_point() else torch.iinfo
    worst = feat.new_full((), info(feat.dtype).max)
    return all_reduce(feat.detach().min() if feat.numel() else worst, "min", group=g.group)


@dataclass(repr=False, eq=False)
class RandomWalkPE(BaseTransform):
    """Return probabilities of walks as a node feature; see `graphshard.dgl.random_walk_pe`."""

    k: int
    feat_name: str = "PE"
    eweight_name: str | None = None

    def __call__(self, g: Graph) -> Graph:
        g.ndata[self.feat_name] = random_walk_pe(g, self.k, self.eweight_name).to(g.device)
        return g


@dataclass(repr=False, eq=False)
class LapPE(BaseTransform):
    """Eigenvectors of the Laplacian as a node feature; see `graphshard.dgl.lap_pe`."""

    k: int
    feat_name: str = "PE"
    eigval_name: str | None = None
    padding: bool = False

    def __call__(self, g: Graph) -> Graph:
        vectors, values = lap_pe(g, self.k, self.padding, return_eigval=True)
        g.ndata[self.feat_name] = vectors.to(g.device)
        if self.eigval_name:
            g.ndata[self.eigval_name] = values.repeat(g.num_nodes(), 1).to(g.device)
        return g


LaplacianPE = LapPE


@dataclass(repr=False, eq=False)
class SVDPE(BaseTransform):
    """Singular vectors of the adjacency matrix as a node feature; see `graphshard.dgl.svd_pe`."""

    k: int
    feat_name: str = "svd_pe"
    padding: bool = False
    random_flip: bool = True

    def __call__(self, g: Graph) -> Graph:
        g.ndata[self.feat_name] = svd_pe(g, self.k, self.padding, self.random_flip).to(g.device)
        return g


@dataclass(repr=False, eq=False)
class GCNNorm(BaseTransform):
    """Symmetric normalization as edge weights, in relations from a node type to itself.

    An edge from u to v gets ``w / sqrt(d_u d_v)``, where ``d`` sums the weights into a node; 0
    where that is infinite.

    Args:
        eweight_name: Edge feature with the weights ``w``, 1 where there is none; gets the result.
    """

    eweight_name: str = "w"

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
            scales: Tensor = g.edges[etype].data["scale"]
            return scales if weights is None else scales * weights


@dataclass(repr=False, eq=False)
class SIGNDiffusion(BaseTransform):
    """Features of neighbours 1, 2, ..., ``k`` steps away, as node features.

    From "SIGN: Scalable Inception Graph Neural Networks" (https://arxiv.org/abs/2004.11198).
    Feature ``out_feat_name_i`` is the input after ``i`` steps.

    Args:
        diffuse_op: A step: ``"raw"`` sums; ``"rw"`` takes the (weighted) mean; ``"gcn"`` sums with
            the weights of `GCNNorm`; ``"ppr"`` does, and mixes with the input.
    """

    k: int
    in_feat_name: str = "feat"
    out_feat_name: str = "out_feat"
    eweight_name: str | None = None
    diffuse_op: str = "raw"
    alpha: float = 0.2

    def __post_init__(self) -> None:
        if self.diffuse_op not in ("raw", "rw", "gcn", "ppr"):
            raise GraphValueError(
                f"diffuse_op must be 'raw', 'rw', 'gcn' or 'ppr' (got {self.diffuse_op!r})"
            )

    def __call__(self, g: Graph) -> Graph:
        diffused = []
        with g.local_scope():
            inputs = g.ndata[self.in_feat_name]
            message = self._message(g)
            total = None
            if self.diffuse_op == "rw" and message.rhs_field is not None:
                g.update_all(fn.copy_e(message.rhs_field, "m"), fn.sum("m", "total"))
                total = g.ndata["total"].reshape(-1, 1)
            mean = self.diffuse_op == "rw" and total is None
            g.ndata["h"] = inputs
            for _ in range(self.k):
                g.update_all(message, fn.mean("m", "h") if mean else fn.sum("m", "h"))
                if total is not None:
                    g.ndata["h"] = g.ndata["h"] / total
                if self.diffuse_op == "ppr":
                    g.ndata["h"] = (1 - self.alpha) * g.ndata["h"] + self.alpha * inputs
                diffused.append(g.ndata["h"])
        for i, value in enumerate(diffused, 1):
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


def _identity(like: Tensor) -> Tensor:
    return torch.eye(like.shape[0], dtype=like.dtype, device=like.device)


def _drawn(count: int, p: float, g: Graph) -> Tensor:
    """``[count]`` bool, each true with probability ``p``."""
    return (torch.rand(count) < p).to(g.device)


@dataclass(repr=False, eq=False)
class _AtRandom(BaseTransform):
    """Base of those that drop or mask with a probability."""

    p: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 <= self.p <= 1.0:
            raise GraphValueError(f"p must be a probability, from 0 to 1 (got {self.p})")


class DropNode(_AtRandom):
    """Each node is dropped with a probability, with its edges."""

    def __call__(self, g: Graph) -> Graph:
        g = g.clone()
        for ntype in g.ntypes if self.p else ():
            g.remove_nodes(g.nodes(ntype)[_drawn(g.num_nodes(ntype), self.p, g)], ntype)
        return g


class DropEdge(_AtRandom):
    """Each edge is dropped with a probability."""

    def __call__(self, g: Graph) -> Graph:
        g = g.clone()
        for etype in g.canonical_etypes if self.p else ():
            drawn = _drawn(g.num_edges(etype), self.p, g)
            g.remove_edges(g.edges("eid", etype=etype)[drawn], etype)
        return g


@dataclass(repr=False, eq=False)
class AddEdge(BaseTransform):
    """Edges between nodes drawn at random are added to every relation; their features are 0."""

    ratio: float = 0.2

    def __call__(self, g: Graph) -> Graph:
        if not self.ratio:
            return g
        g = g.clone()
        for etype in g.canonical_etypes:
            count = int(g.num_edges(etype) * self.ratio)
            if count:
                drawn = (torch.randint(g.num_nodes(ntype), (count,)) for ntype in etype[::2])
                src, dst = (ends.to(g.device, g.idtype) for ends in drawn)
                g.add_edges(src, dst, etype=etype)
        return g


class NodeShuffle(BaseTransform):
    """Node features change places, in the same way for all features of a type; edges stay."""

    def __call__(self, g: Graph) -> Graph:
        if isinstance(g, GraphShardManager):
            raise GraphUnsupportedError(
                "NodeShuffle does not take a GraphShardManager, whose rows lie on all ranks; "
                "shuffle the whole Graph, before it is partitioned"
            )
        g = g.clone()
        for ntype in g.ntypes:
            order = torch.randperm(g.num_nodes(ntype)).to(g.device)
            for name, value in list(g.nodes[ntype].data.items()):
                g.nodes[ntype].data[name] = value[order]
        return g


@dataclass(repr=False, eq=False)
class FeatMask(_AtRandom):
    """Columns of features are set to 0 with a probability, the same ones for all rows."""

    node_feat_names: Sequence[str] | None = None
    edge_feat_names: Sequence[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.node_feat_names = self.node_feat_names or []
        self.edge_feat_names = self.edge_feat_names or []

    def __call__(self, g: Graph) -> Graph:
        if not self.p:
            return g
        for fields, name in named_fields(g, self.node_feat_names, self.edge_feat_names):
            value = fields[name]
            drawn = _drawn(value.shape[-1], self.p, g)
            if isinstance(g, GraphShardManager):  # the columns that the first rank drew
                drawn &= g.rank == 0
                drawn = all_reduce(drawn.to(torch.uint8), "max", group=g.group).bool()
            fields[name] = value.masked_fill(drawn, 0)
        return g


@dataclass(repr=False, eq=False)
class GDC(BaseTransform):
    """Generalized diffusion: ``sum over k of coefs[k] * A ** k``.

    Args:
        eps: Least weight that stays; None for what leaves ``avg_degree`` edges per node.
    """

    coefs: Sequence[float]
    eweight_name: str = "w"
    eps: float | None = None
    avg_degree: int = 5

    def __call__(self, g: Graph) -> Graph:
        weights = self._diffused(dense_weights(g, self.eweight_name))
        dst, src = (weights >= self._least(weights)).nonzero(as_tuple=True)
        ends = src.to(g.idtype), dst.to(g.idtype)
        new = with_edges(g, {g.canonical_etypes[0]: ends}, copy_edata=False)
        new.edata[self.eweight_name] = weights[dst, src]
        return new

    def _diffused(self, adjacency: Tensor) -> Tensor:
        power = _identity(adjacency)
        total = self.coefs[0] * power
        for coefficient in self.coefs[1:]:
            power = power @ adjacency
            total = total + coefficient * power
        return total

    def _least(self, weights: Tensor) -> float:
        if self.eps is not None:
            return self.eps
        num_nodes = weights.shape[0]
        if self.avg_degree > num_nodes:
            return float("-inf")
        ordered = weights.flatten().sort(descending=True).values
        return float(ordered[self.avg_degree * num_nodes - 1])


class PPR(GDC):
    """Diffusion by personalized PageRank: ``alpha * (I - (1 - alpha) A) ** -1``."""

    def __init__(
        self,
        alpha: float = 0.15,
        eweight_name: str = "w",
        eps: float | None = None,
        avg_degree: int = 5,
    ) -> None:
        super().__init__((), eweight_name, eps, avg_degree)
        self.alpha = alpha

    def _diffused(self, adjacency: Tensor) -> Tensor:
        inner = _identity(adjacency) - (1 - self.alpha) * adjacency
        return self.alpha * torch.linalg.inv(inner)


class HeatKernel(GDC):
    """Diffusion by the heat kernel: ``exp(t (A - I))``."""

    def __init__(
        self, t: float = 2.0, eweight_name: str = "w", eps: float | None = None, avg_degree: int = 5
    ) -> None:
        super().__init__((), eweight_name, eps, avg_degree)
        self.t = t

    def _diffused(self, adjacency: Tensor) -> Tensor:
        return torch.linalg.matrix_exp(self.t * (adjacency - _identity(adjacency)))
