# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.transforms.module``: what is called with a graph and returns a graph.

What is drawn at random comes from torch's generator. Graph diffusion is that of "Diffusion Improves
Graph Learning" (https://arxiv.org/abs/1911.05485): dense sums over walks of all lengths, made
sparse again, at the cost of dense matrices of ``num_nodes ** 2``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import function as fn
from ...errors import GraphValueError
from ...graph import Graph, add_self_loop, heterograph, remove_self_loop, to_simple
from ..graphs._encodings import lap_pe, random_walk_pe, svd_pe
from ..graphs._products import khop_graph, line_graph, metapath_reachable_graph


class BaseTransform:
    """Base of all transforms: subclasses implement ``__call__``."""

    def __call__(self, g: Graph) -> Graph:
        """The changed graph."""
        raise NotImplementedError(f"{type(self).__name__} must implement __call__(g)")

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Compose(BaseTransform):
    """Several transforms, one after another.

    Example:
        >>> from graphshard.graph import graph
        >>> from graphshard.dgl.transforms import AddReverse, AddSelfLoop, Compose
        >>> Compose([AddReverse(), AddSelfLoop()])(graph(([0], [1]))).num_edges()
        4
    """

    def __init__(self, transforms: Sequence[Callable[[Graph], Graph]]) -> None:
        self.transforms = transforms

    def __call__(self, g: Graph) -> Graph:
        for transform in self.transforms:
            g = transform(g)
        return g

    def __repr__(self) -> str:
        inner = ",\n".join(f"  {transform}" for transform in self.transforms)
        return f"{type(self).__name__}([\n{inner}\n])"


def with_edges(g: Graph, edges: Mapping[Any, Any], copy_edata: bool = True) -> Graph:
    """A graph with the nodes of ``g`` and their features, and other relations.

    Args:
        edges: Relation -> (sources, destinations).
        copy_edata: Whether to carry over the edge features of relations that ``g`` has too.
    """
    counts = {ntype: g.num_nodes(ntype) for ntype in g.ntypes}
    new = heterograph(edges, counts, idtype=g.idtype, device=g.device)
    for ntype in g.ntypes:
        new.nodes[ntype].data.update(g.nodes[ntype].data)
    for etype in g.canonical_etypes if copy_edata else ():
        if etype in new.canonical_etypes:
            new.edges[etype].data.update(g.edges[etype].data)
    return new


def spaces_with(g: Graph, name: str, what: str) -> list[Any]:
    """The feature dictionaries of the types that have a feature; ``what`` is nodes or edges.

    Raises:
        KeyError: no type has it.
    """
    if what == "nodes":
        spaces = [g.nodes[ntype].data for ntype in g.ntypes]
    else:
        spaces = [g.edges[etype].data for etype in g.canonical_etypes]
    found = [fields for fields in spaces if name in fields]
    if not found:
        raise KeyError(f"no feature {name!r} on any type of {what}")
    return found


class AddSelfLoop(BaseTransform):
    """A self loop for each node, in every relation from a node type to itself.

    Args:
        allow_duplicate: Whether loops that are there stay as well.
        new_etypes: Whether to add a relation ``(T, 'self', T)`` of loops for every node type too.
        edge_feat_names: Edge features that ``fill_data`` is for; None for all.
        fill_data: Values on new edges; see `graphshard.add_self_loop`.
    """

    def __init__(
        self,
        allow_duplicate: bool = False,
        new_etypes: bool = False,
        edge_feat_names: Sequence[str] | None = None,
        fill_data: float | str = 1.0,
    ) -> None:
        self.allow_duplicate = allow_duplicate
        self.new_etypes = new_etypes
        self.edge_feat_names = edge_feat_names
        self.fill_data = fill_data

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


class AddReverse(BaseTransform):
    """The reverse of every edge: in its relation, or in a relation ``rev_...`` of its own.

    Relations between two node types always get a new one.

    Args:
        copy_edata: Whether reverse edges get the features of their edges; else 0, or none in a new
            relation.
        sym_new_etype: Whether relations from a node type to itself get a new relation as well.
    """

    def __init__(self, copy_edata: bool = False, sym_new_etype: bool = False) -> None:
        self.copy_edata = copy_edata
        self.sym_new_etype = sym_new_etype

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
            for name, value in g.edges[etype].data.items():
                if etype in turned:
                    new.edges[etype].data[name] = value
                    if self.copy_edata:
                        new.edges[turned[etype]].data[name] = value
                else:
                    second = value if self.copy_edata else torch.zeros_like(value)
                    new.edges[etype].data[name] = torch.cat([value, second])
        return new


class ToSimple(BaseTransform):
    """One edge for all parallel ones; see `graphshard.dgl.to_simple`.

    Args:
        return_counts: Edge feature that gets the number of edges joined.
    """

    def __init__(self, return_counts: str = "count", aggregator: str = "arbitrary") -> None:
        self.return_counts = return_counts
        self.aggregator = aggregator

    def __call__(self, g: Graph) -> Graph:
        new: Graph = to_simple(g, self.return_counts, copy_edata=True, aggregator=self.aggregator)
        return new


class LineGraph(BaseTransform):
    """The graph of the edges, with their features; see `graphshard.dgl.line_graph`."""

    def __init__(self, backtracking: bool = True) -> None:
        self.backtracking = backtracking

    def __call__(self, g: Graph) -> Graph:
        return line_graph(g, self.backtracking, shared=True)


class KHopGraph(BaseTransform):
    """The graph of the walks of ``k`` edges; see `graphshard.dgl.khop_graph`."""

    def __init__(self, k: int) -> None:
        self.k = k

    def __call__(self, g: Graph) -> Graph:
        return khop_graph(g, self.k)


class AddMetaPaths(BaseTransform):
    """A relation for every pair of nodes that a walk along some relations joins.

    Args:
        metapaths: Name of the new relation -> the relations of its walk, as triples.
    """

    def __init__(
        self, metapaths: Mapping[str, Sequence[Any]], keep_orig_edges: bool = True
    ) -> None:
        self.metapaths = metapaths
        self.keep_orig_edges = keep_orig_edges

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


class RowFeatNormalizer(BaseTransform):
    """Features divided by the sum of their row, where that is above 1.

    Args:
        subtract_min: Whether the least value of all is subtracted first.
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
        eigval_name: Node feature that gets the eigenvalues, the same for all nodes; None for none.
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
    """Singular vectors of the adjacency matrix as a node feature; see `graphshard.dgl.svd_pe`."""

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
        in_feat_name: The input, ``[num_nodes, dim]``.
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


def _probability(p: float) -> float:
    if not 0.0 <= p <= 1.0:
        raise GraphValueError(f"p must be a probability, from 0 to 1 (got {p})")
    return p


def _drawn(count: int, p: float, g: Graph) -> Tensor:
    """``[count]`` bool, each true with probability ``p``."""
    return (torch.rand(count) < p).to(g.device)


class DropNode(BaseTransform):
    """Each node is dropped with a probability, with its edges."""

    def __init__(self, p: float = 0.5) -> None:
        self.p = _probability(p)

    def __call__(self, g: Graph) -> Graph:
        g = g.clone()
        for ntype in g.ntypes if self.p else ():
            g.remove_nodes(g.nodes(ntype)[_drawn(g.num_nodes(ntype), self.p, g)], ntype)
        return g


class DropEdge(BaseTransform):
    """Each edge is dropped with a probability."""

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
    """Columns of features are set to 0 with a probability, the same ones for all rows."""

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


class GDC(BaseTransform):
    """Generalized diffusion: ``sum over k of coefs[k] * A ** k``.

    Args:
        eweight_name: Edge feature with the weights A, 1 where there is none; of the result too.
        eps: Least weight that stays; None for what leaves ``avg_degree`` edges per node.
    """

    def __init__(
        self,
        coefs: Sequence[float],
        eweight_name: str = "w",
        eps: float | None = None,
        avg_degree: int = 5,
    ) -> None:
        self.coefs = coefs
        self.eweight_name = eweight_name
        self.eps = eps
        self.avg_degree = avg_degree

    def __call__(self, g: Graph) -> Graph:
        weights = self._diffused(dense_weights(g, self.eweight_name))
        dst, src = (weights >= self._least(weights)).nonzero(as_tuple=True)
        ends = src.to(g.idtype), dst.to(g.idtype)
        new = with_edges(g, {g.canonical_etypes[0]: ends}, copy_edata=False)
        new.edata[self.eweight_name] = weights[dst, src]
        return new

    def _diffused(self, adjacency: Tensor) -> Tensor:
        power = torch.eye(adjacency.shape[0], dtype=adjacency.dtype, device=adjacency.device)
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
        own = torch.eye(adjacency.shape[0], dtype=adjacency.dtype, device=adjacency.device)
        return self.alpha * torch.linalg.inv(own - (1 - self.alpha) * adjacency)


class HeatKernel(GDC):
    """Diffusion by the heat kernel: ``exp(t (A - I))``."""

    def __init__(
        self,
        t: float = 2.0,
        eweight_name: str = "w",
        eps: float | None = None,
        avg_degree: int = 5,
    ) -> None:
        super().__init__((), eweight_name, eps, avg_degree)
        self.t = t

    def _diffused(self, adjacency: Tensor) -> Tensor:
        own = torch.eye(adjacency.shape[0], dtype=adjacency.dtype, device=adjacency.device)
        return torch.linalg.matrix_exp(self.t * (adjacency - own))
