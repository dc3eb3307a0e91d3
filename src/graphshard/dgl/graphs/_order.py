# SPDX-License-Identifier: Apache-2.0
"""Graphs with their nodes or edges in another order, or their features in another dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import GraphUnsupportedError, GraphValueError
from ...graph import Graph, edge_subgraph, node_subgraph
from ...graph.convert import require
from ...graph.structure import EID, NID, id_tensor
from ._matrices import adj_external
from ._products import check_one_relation

__all__ = ["to_bfloat16", "to_double", "to_float", "to_half"]


def reorder_graph(
    g: Graph,
    node_permute_algo: str | None = None,
    edge_permute_algo: str = "src",
    store_ids: bool = True,
    permute_config: Mapping[str, Any] | None = None,
) -> Graph:
    """The graph with its nodes and edges in an order that is better for memory.

    Args:
        node_permute_algo: None leaves nodes where they are; ``"rcmk"`` is the reverse
            Cuthill-McKee order; ``"custom"`` takes ``permute_config["nodes_perm"]``, the old id of
            each new node.
        edge_permute_algo: ``"src"`` or ``"dst"``: by that end; ``"custom"`` takes
            ``permute_config["edges_perm"]``, the old id of each new edge.

    Raises:
        ValueError: an unknown order, a missing or wrong permutation, or a typed graph.
        NotImplementedError: ``"metis"``, which `graphshard.dgl.reorder_graph` offers.
    """
    check_one_relation(g, "reorder_graph")
    if node_permute_algo == "metis":
        raise GraphUnsupportedError(
            "node_permute_algo 'metis' is not offered by this function nor the graph's method; "
            "call graphshard.dgl.reorder_graph(g, 'metis', permute_config={'k': number of parts})"
        )
    if node_permute_algo not in (None, "rcmk", "custom"):
        raise GraphValueError(
            f"node_permute_algo must be None, 'rcmk' or 'custom' (got {node_permute_algo!r})"
        )
    if edge_permute_algo not in ("src", "dst", "custom"):
        raise GraphValueError(
            f"edge_permute_algo must be 'src', 'dst' or 'custom' (got {edge_permute_algo!r})"
        )
    config = permute_config or {}
    nodes, old_edges, new = g.nodes(), g.edges("eid"), g.local_var()
    if node_permute_algo == "rcmk":
        csgraph = require("scipy.sparse.csgraph", "scipy", "reorder_graph")
        order = csgraph.reverse_cuthill_mckee(adj_external(g, scipy_fmt="csr"))
        nodes = torch.from_numpy(order.astype(np.int64)).to(g.device, g.idtype)
    elif node_permute_algo == "custom":
        nodes = _permutation(g, config, "nodes_perm", g.num_nodes())
    if node_permute_algo is not None:
        new = node_subgraph(g, nodes)
        old_edges = new.edata.pop(EID)
        del new.ndata[NID]
    if edge_permute_algo == "custom":
        order = _permutation(g, config, "edges_perm", g.num_edges())
        new_ids = torch.empty_like(old_edges)
        new_ids[old_edges.long()] = new.edges("eid")
        edges = new_ids.index_select(0, order)
    else:
        ends = new.edges()[0 if edge_permute_algo == "src" else 1]
        edges = torch.sort(ends, stable=True).indices.to(g.idtype)
    new = edge_subgraph(new, edges, relabel_nodes=False, store_ids=False)
    if store_ids:
        new.ndata[NID] = nodes
        new.edata[EID] = old_edges.index_select(0, edges)
    return new


def by_destination(g: Graph) -> Graph:
    """As DGL stores its data sets: nodes by reverse Cuthill-McKee, edges by destination; no ids."""
    return reorder_graph(g, node_permute_algo="rcmk", edge_permute_algo="dst", store_ids=False)


def _permutation(g: Graph, config: Mapping[str, Any], name: str, count: int) -> Tensor:
    if name not in config:
        raise GraphValueError(f"permute_config must hold {name!r} for the order 'custom'")
    order = config[name]
    order = id_tensor(order if isinstance(order, Tensor) else list(order), name, g.idtype, g.device)
    if sorted(order.tolist()) != list(range(count)):
        raise GraphValueError(f"{name} must have every id from 0 to {count - 1} once")
    return order


def to_bfloat16(g: Graph) -> Graph:
    """The graph with all floating-point features as bfloat16."""
    return _cast(g, torch.bfloat16)


def to_half(g: Graph) -> Graph:
    """The graph with all floating-point features as float16."""
    return _cast(g, torch.float16)


def to_float(g: Graph) -> Graph:
    """The graph with all floating-point features as float32."""
    return _cast(g, torch.float32)


def to_double(g: Graph) -> Graph:
    """The graph with all floating-point features as float64."""
    return _cast(g, torch.float64)


def _cast(g: Graph, dtype: torch.dtype) -> Graph:
    new = g.local_var()
    spaces = [new.srcnodes[ntype].data for ntype in g.srctypes]
    spaces += [new.dstnodes[ntype].data for ntype in g.dsttypes]
    spaces += [new.edges[etype].data for etype in g.canonical_etypes]
    for fields in spaces:
        for name, value in list(fields.items()):
            if value.is_floating_point() and value.dtype != dtype:
                fields[name] = value.to(dtype)
    return new
