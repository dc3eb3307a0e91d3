# SPDX-License-Identifier: Apache-2.0
"""Graphs whose edges are walks, pairs of edges, or weighted sums and products of adjacencies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..._base.typing import CanonicalEType, EType
from ...errors import GraphValueError
from ...graph import Graph, graph, heterograph
from ...graph.convert import require
from ...graph.transforms import check_plain
from ...ops import Adjacency
from ._matrices import adj_external

if TYPE_CHECKING:
    import scipy.sparse

__all__ = [
    "adj_product_graph", "adj_sum_graph", "khop_adj", "khop_graph", "line_graph",
    "metapath_reachable_graph", "norm_by_dst",
]  # fmt: skip


def line_graph(g: Graph, backtracking: bool = True, shared: bool = False) -> Graph:
    """The graph whose nodes are the edges of ``g``, joined where one ends as the other begins.

    Node ``e`` points to node ``f`` where edge ``e`` enters the node that edge ``f`` leaves; a self
    loop does not point to itself. Edges come by ``e``, then ``f``.
    """
    check_one_relation(g, "line_graph")
    src, dst = g.edges()
    count = g.out_degrees(dst)
    first = torch.arange(g.num_edges(), dtype=g.idtype, device=g.device).repeat_interleave(count)
    second = g.out_edges(dst, "eid")
    is_edge = first != second
    if not backtracking:
        is_edge &= dst[second.long()] != src[first.long()]
    first, second = first[is_edge], second[is_edge]
    new = graph((first, second), num_nodes=g.num_edges(), idtype=g.idtype, device=g.device)
    if shared:
        new.ndata.update(g.edata)
    return new


def khop_adj(g: Graph, k: int) -> Tensor:
    """Number of walks of ``k`` edges for all pairs of nodes: float32 ``[num_nodes, num_nodes]``."""
    return torch.from_numpy(_walks(g, k, "khop_adj").toarray().astype(np.float32))


def khop_graph(g: Graph, k: int, copy_ndata: bool = True) -> Graph:
    """The graph with an edge for every walk of ``k`` edges."""
    walks = _walks(g, k, "khop_graph").tocoo()
    times = walks.data.astype(np.int64)
    ends = tuple(torch.from_numpy(np.repeat(side, times)) for side in (walks.row, walks.col))
    new = graph(ends, num_nodes=g.num_nodes(), idtype=g.idtype, device=g.device)
    if copy_ndata:
        new.ndata.update(g.ndata)
    return new


def _walks(g: Graph, k: int, name: str) -> scipy.sparse.csr_matrix:
    check_one_relation(g, name)
    if k < 0:
        raise GraphValueError(f"k of {name} must not be negative (got {k})")
    sparse = require("scipy.sparse", "scipy", name)
    step = adj_external(g, scipy_fmt="csr").astype(np.int64)
    walks = sparse.identity(g.num_nodes(), dtype=np.int64, format="csr")
    for _ in range(k):
        walks = walks @ step
    return walks.tocsr()


def metapath_reachable_graph(g: Graph, metapath: Sequence[Any]) -> Graph:
    """The graph of the pairs of nodes that a walk along some relations joins.

    Returns:
        A graph of one relation, ``_E``, one edge per pair, with the node features of its types.

    Raises:
        ValueError: an unknown relation, or relations that do not follow each other.
    """
    check_plain(g, "metapath_reachable_graph")
    etypes = [g.to_canonical_etype(etype) for etype in metapath]
    if not etypes or any(a[2] != b[0] for a, b in zip(etypes, etypes[1:], strict=False)):
        raise GraphValueError(
            f"each relation of a metapath must begin where the one before ends (got {etypes})"
        )
    reached = adj_external(g, scipy_fmt="csr", etype=etypes[0]).astype(np.float32)
    for etype in etypes[1:]:
        reached = reached @ adj_external(g, scipy_fmt="csr", etype=etype)
    pairs = (reached != 0).tocsr().nonzero()
    source, destination = etypes[0][0], etypes[-1][2]
    ends = tuple(torch.from_numpy(side.astype(np.int64)) for side in pairs)
    counts = {source: g.num_nodes(source), destination: g.num_nodes(destination)}
    new = heterograph({(source, "_E", destination): ends}, counts, g.idtype, g.device)
    for ntype in counts:
        new.nodes[ntype].data.update(g.nodes[ntype].data)
    return new


def adj_product_graph(A: Graph, B: Graph, weight_name: str, etype: str = "_E") -> Graph:
    """The graph of the product of two weighted adjacency matrices, differentiable in the weights.

    An edge joins i to j where some k is joined from i in A and to j in B; its weight is the sum of
    products over all such k. Zero sums stay edges.

    Args:
        weight_name: Edge feature with the weights, ``[num_edges]``; of the result as well.
    """
    (first,), (second,) = _one_each("adj_product_graph", A, B)
    if first[2] != second[0] or A.num_dst_nodes(first[2]) != B.num_src_nodes(second[0]):
        raise GraphValueError(
            f"the edges of B must begin at the nodes where those of A end (got {first} with "
            f"{A.num_dst_nodes(first[2])} nodes, then {second} with {B.num_src_nodes(second[0])})"
        )
    a, b = A.adjacency(first), B.adjacency(second)
    src, mid = a.coo()
    count = b.out_degrees().index_select(0, mid)
    left = torch.arange(a.num_edges, device=A.device).repeat_interleave(count.long())
    right = B.out_edges(mid, "eid", etype=second).long()
    products = A.edges[first].data[weight_name][left] * B.edges[second].data[weight_name][right]
    keys = src[left].long() * max(b.num_dst, 1) + b.coo()[1][right].long()
    ends, values = _summed(keys, products, max(b.num_dst, 1), A.idtype)
    counts = {first[0]: a.num_src, second[2]: b.num_dst}
    relation = Adjacency(*ends, a.num_src, b.num_dst, check=False)
    new = Graph(dict(sorted(counts.items())), {(first[0], etype, second[2]): relation})
    new.edata[weight_name] = values
    return new


def adj_sum_graph(graphs: Sequence[Graph], weight_name: str) -> Graph:
    """The graph of the sum of weighted adjacency matrices, differentiable in the weights."""
    if not graphs:
        raise GraphValueError("adj_sum_graph needs at least one graph (got none)")
    etypes = [etype for (etype,) in _one_each("adj_sum_graph", *graphs)]
    relations = [g.adjacency() for g in graphs]
    shapes = {(r.num_src, r.num_dst, e) for r, e in zip(relations, etypes, strict=True)}
    if len(shapes) > 1:
        raise GraphValueError(f"graphs to add must have one relation and size (got {shapes})")
    some, num_src, num_dst = graphs[0], relations[0].num_src, relations[0].num_dst
    width = max(num_dst, 1)
    pairs = [relation.coo() for relation in relations]
    keys = torch.cat([src.long() * width + dst.long() for src, dst in pairs])
    weights = torch.cat([g.edata[weight_name] for g in graphs])
    ends, values = _summed(keys, weights, width, some.idtype)
    counts = {ntype: some.num_nodes(ntype) for ntype in some.ntypes}
    new = Graph(counts, {etypes[0]: Adjacency(*ends, num_src, num_dst, check=False)})
    new.edata[weight_name] = values
    return new


def _summed(
    keys: Tensor, values: Tensor, width: int, idtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Ends of the distinct keys ``source * width + destination``, and the sum at each."""
    distinct, row = torch.unique(keys, return_inverse=True)
    total = values.new_zeros((distinct.shape[0], *values.shape[1:])).index_add(0, row, values)
    return ((distinct // width).to(idtype), (distinct % width).to(idtype)), total


def _one_each(name: str, *graphs: Graph) -> list[list[CanonicalEType]]:
    for g in graphs:
        if g.is_block or len(g.canonical_etypes) != 1:
            raise GraphValueError(
                f"{name} takes graphs of one relation each (got {g.canonical_etypes})"
            )
    return [g.canonical_etypes for g in graphs]


def check_one_relation(g: Graph, name: str) -> None:
    """Raise ValueError unless a graph has one node type and one relation."""
    check_plain(g, name)
    if not g.is_homogeneous:
        raise GraphValueError(
            f"{name} takes a graph with one node type and one relation (got {g.canonical_etypes}); "
            "slice it, or use to_homogeneous"
        )


def norm_by_dst(g: Graph, etype: EType | None = None) -> Tensor:
    """One over the in-degree of each edge's destination: float32 ``[num_edges]``."""
    _, dst = g.edges(etype=etype)
    return g.in_degrees(dst, etype=etype).float().reciprocal()
