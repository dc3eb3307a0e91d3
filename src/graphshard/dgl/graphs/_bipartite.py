# SPDX-License-Identifier: Apache-2.0
"""Graphs of one relation between two node types, from SciPy, NetworkX and blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...errors import GraphTypeError, GraphValueError
from ...graph import Block, Graph, heterograph
from ...graph.convert import stack_attribute

if TYPE_CHECKING:
    import networkx
    import scipy.sparse

__all__ = ["bipartite_from_networkx", "bipartite_from_scipy", "block_to_graph"]


def bipartite_from_scipy(
    sp_mat: scipy.sparse.spmatrix,
    utype: str,
    etype: str,
    vtype: str,
    eweight_name: str | None = None,
    idtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Graph:
    """Graph of one relation, an edge for each stored entry of a matrix, rows as sources."""
    if not hasattr(sp_mat, "tocoo"):
        raise GraphTypeError(f"sp_mat must be a SciPy sparse matrix (got {type(sp_mat).__name__})")
    matrix = sp_mat.tocoo()
    ends = tuple(torch.from_numpy(side.astype(np.int64)) for side in (matrix.row, matrix.col))
    counts = {utype: int(matrix.shape[0]), vtype: int(matrix.shape[1])}
    g = heterograph({(utype, etype, vtype): ends}, counts, idtype or torch.int64, device)
    if eweight_name is not None:
        g.edata[eweight_name] = torch.from_numpy(np.array(matrix.data)).to(g.device)
    return g


def bipartite_from_networkx(
    nx_graph: networkx.DiGraph,
    utype: str,
    etype: str,
    vtype: str,
    u_attrs: Sequence[str] | None = None,
    e_attrs: Sequence[str] | None = None,
    v_attrs: Sequence[str] | None = None,
    edge_id_attr_name: str | None = None,
    idtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Graph:
    """Graph of one relation of a directed NetworkX graph whose nodes say on which side they are.

    Args:
        nx_graph: Directed graph. The node attribute ``bipartite`` is 0 for sources, 1 for
            destinations; each side is numbered in the sorted order of its labels.

    Raises:
        TypeError: the graph is not directed.
        ValueError: a node without side, an edge against the direction, or a missing attribute.
    """
    if not nx_graph.is_directed():
        raise GraphTypeError("nx_graph must be directed (got an undirected one)")
    sides: tuple[list[Any], list[Any]] = ([], [])
    for node, attributes in nx_graph.nodes(data=True):
        side = attributes.get("bipartite")
        if side not in (0, 1):
            raise GraphValueError(
                f"every node must have the attribute 'bipartite', 0 or 1 ({node!r} has {side!r})"
            )
        sides[side].append(node)
    number = [{node: i for i, node in enumerate(sorted(nodes))} for nodes in sides]
    edges = list(nx_graph.edges(data=True))
    if edge_id_attr_name is not None:
        keys = [((u, v), attributes) for u, v, attributes in edges]
        ids = stack_attribute(edge_id_attr_name, "edge", keys).reshape(-1).long()
        if sorted(ids.tolist()) != list(range(len(edges))):
            raise GraphValueError(
                f"edge attribute {edge_id_attr_name!r} must number the edges 0 to {len(edges) - 1}"
            )
        edges = [edges[i] for i in ids.argsort().tolist()]
    for u, v, _ in edges:
        if u not in number[0] or v not in number[1]:
            raise GraphValueError(
                f"edges must go from nodes with bipartite=0 to nodes with bipartite=1 (got {u!r} "
                f"to {v!r})"
            )
    src = torch.tensor([number[0][u] for u, _, _ in edges], dtype=torch.int64)
    dst = torch.tensor([number[1][v] for _, v, _ in edges], dtype=torch.int64)
    counts = {utype: len(number[0]), vtype: len(number[1])}
    g = heterograph({(utype, etype, vtype): (src, dst)}, counts, idtype or torch.int64, device)
    sources, destinations = ([(node, nx_graph.nodes[node]) for node in side] for side in number)
    joined = [((u, v), attributes) for u, v, attributes in edges]
    for names, what, owners, fields in (
        (u_attrs, "node", sources, g.nodes[utype].data),
        (v_attrs, "node", destinations, g.nodes[vtype].data),
        (e_attrs, "edge", joined, g.edata),
    ):
        for name in names or ():
            fields[name] = stack_attribute(name, what, owners).to(g.device)
    return g


def block_to_graph(block: Block) -> Graph:
    """The graph of a block: source types get the ending ``_src``, destination types ``_dst``."""
    if not isinstance(block, Block):
        raise GraphTypeError(f"block_to_graph takes a block (got {type(block).__name__})")
    counts = {f"{ntype}_src": block.num_src_nodes(ntype) for ntype in block.srctypes}
    counts |= {f"{ntype}_dst": block.num_dst_nodes(ntype) for ntype in block.dsttypes}
    names = {e: (f"{e[0]}_src", e[1], f"{e[2]}_dst") for e in block.canonical_etypes}
    new = Graph(counts, {names[etype]: block.adjacency(etype) for etype in names})
    for ntype in block.srctypes:
        new.nodes[f"{ntype}_src"].data.update(block.srcnodes[ntype].data)
    for ntype in block.dsttypes:
        new.nodes[f"{ntype}_dst"].data.update(block.dstnodes[ntype].data)
    for old, name in names.items():
        new.edges[name].data.update(block.edges[old].data)
    return new
