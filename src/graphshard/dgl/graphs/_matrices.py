# SPDX-License-Identifier: Apache-2.0
"""Matrices of a graph, and the graph of its types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..._base.typing import Device, EType
from ...errors import GraphValueError
from ...graph.convert import require, to_scipy
from ...graph.local_graph import LocalGraph

if TYPE_CHECKING:
    import networkx


def metagraph(g: LocalGraph) -> networkx.MultiDiGraph:
    """The graph of the types: a node per node type, an edge per relation, with its name as key."""
    out = require("networkx", "networkx", "metagraph").MultiDiGraph()
    for source, name, destination in g.canonical_etypes:
        out.add_edge(source, destination, key=name)
    out.add_nodes_from(g.ntypes)
    return out


def adj(g: LocalGraph, etype: EType | None = None, eweight_name: str | None = None) -> Tensor:
    """The edges of a relation as a sparse tensor.

    Returns:
        ``[num_src_nodes, num_dst_nodes]`` COO tensor, a row per source. It has an entry for each
        edge, by id, and so is not coalesced; DGL 1.1 gives its SparseMatrix of the same entries.
    """
    relation = g.adjacency(etype)
    src, dst = relation.coo()
    values = torch.ones(relation.num_edges, device=g.device)
    if eweight_name is not None:
        values = g.edges[g.to_canonical_etype(etype)].data[eweight_name]
    size = (relation.num_src, relation.num_dst, *values.shape[1:])
    indices = torch.stack([src.long(), dst.long()])
    return torch.sparse_coo_tensor(indices, values, size, check_invariants=False)


def adj_external(
    g: LocalGraph,
    transpose: bool = False,
    ctx: Device = "cpu",
    scipy_fmt: str | None = None,
    etype: EType | None = None,
) -> Any:
    """The edges of a relation as a sparse matrix of ones, of torch or of SciPy.

    Args:
        scipy_fmt: ``"coo"`` or ``"csr"`` for a SciPy matrix of the graph's idtype, which has
            parallel edges as entries of their own, in each row by edge id; None for a torch COO
            tensor.
    """
    if scipy_fmt is None:
        matrix = adj(g, etype).to(ctx)
        return matrix.transpose(0, 1) if transpose else matrix
    if scipy_fmt not in ("coo", "csr"):
        raise GraphValueError(f"scipy_fmt must be 'coo' or 'csr' (got {scipy_fmt!r})")
    relation = g.adjacency(etype)
    ones = torch.ones(relation.num_edges, dtype=g.idtype).numpy()
    if scipy_fmt == "coo":
        matrix = to_scipy(g, None, etype)
        matrix.data = ones
        return matrix.transpose() if transpose else matrix
    sparse = require("scipy.sparse", "scipy", "adj_external")
    indptr, indices, _ = relation.csc(ids=False) if transpose else relation.csr(ids=False)
    shape = (relation.num_src, relation.num_dst)
    arrays = (ones, indices.cpu().numpy(), indptr.cpu().numpy())
    return sparse.csr_matrix(arrays, shape=shape[::-1] if transpose else shape)


def inc(g: LocalGraph, typestr: str, ctx: Device = "cpu", etype: EType | None = None) -> Tensor:
    """The incidence matrix of a relation: sparse ``[num_nodes, num_edges]``.

    Args:
        typestr: ``"in"``: 1 where the edge enters the node. ``"out"``: 1 where it leaves it.
            ``"both"``: 1 where it enters, -1 where it leaves, 0 for self loops.
    """
    relation = g.adjacency(etype)
    src, dst = (end.long() for end in relation.coo())
    edges = torch.arange(relation.num_edges, device=g.device)
    values = torch.ones(relation.num_edges, device=g.device)
    if typestr not in ("in", "out", "both"):
        raise GraphValueError(f"typestr must be 'in', 'out' or 'both' (got {typestr!r})")
    nodes, num_nodes = (src, relation.num_src) if typestr == "out" else (dst, relation.num_dst)
    if typestr == "both":
        source, _, destination = g.to_canonical_etype(etype)
        if source != destination:
            raise GraphValueError(
                f"typestr 'both' needs a relation from a node type to itself (got {source!r} to "
                f"{destination!r}); use 'in' or 'out'"
            )
        proper = src != dst
        nodes, edges = torch.cat([dst[proper], src[proper]]), edges[proper].repeat(2)
        values = torch.cat([values[proper], -values[proper]])
    size = (num_nodes, relation.num_edges)
    cells = torch.stack([nodes, edges])
    return torch.sparse_coo_tensor(cells, values, size, check_invariants=False).to(ctx)
