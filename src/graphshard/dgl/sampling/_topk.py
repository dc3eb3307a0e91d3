# SPDX-License-Identifier: Apache-2.0
"""select_topk: the edges of each node that weigh most, or least."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._base.typing import CanonicalEType
from ...errors import GraphValueError
from ...graph import Graph
from ...sampling.graph_store import ends
from ...sampling.sampler import LayerFanout
from ._arguments import checked_dir, frontier_of, nodes_by_type, number_by_relation


def select_topk(
    g: Graph,
    k: LayerFanout,
    weight: str,
    nodes: Any = None,
    edge_dir: str = "in",
    ascending: bool = False,
    copy_ndata: bool = True,
    copy_edata: bool = True,
    output_device: torch.device | str | None = None,
) -> Graph:
    """For each node, the ``k`` edges of each relation that weigh most.

    Of equal weights the smaller edge id goes first.

    Args:
        g: A graph of this process.
        k: Edges for a node, -1 for all; or relation to that, for all.
        weight: Name of an edge feature ``[num_edges]``, which every relation has.
        nodes: Ids, or type to ids; by default all.
        edge_dir: ``"in"`` for edges that enter the nodes, ``"out"`` for those that leave them.
        ascending: Take those that weigh least.
        copy_ndata: Whether the graph that is returned has the features of nodes.
        copy_edata: Whether it has those of its edges, and their ids as ``edata[EID]``.
        output_device: Where the graph that is returned shall be; by default where ``g`` is.

    Returns:
        A graph of the same nodes and relations, with the edges that were chosen, grouped by node.

    Raises:
        DGLError: A relation lacks the weights, unknown types, or ids out of range.

    Example:
        >>> from graphshard.graph import graph
        >>> g = graph(([0, 1, 2], [3, 3, 3]))
        >>> g.edata["w"] = torch.tensor([0.5, 2.0, 1.0])
        >>> select_topk(g, 2, "w").edges()
        (tensor([1, 2]), tensor([3, 3]))
    """
    side = checked_dir(edge_dir)
    if nodes is None:
        nodes = {t: torch.arange(g.num_nodes(t), device=g.device) for t in g.ntypes}
    near = nodes_by_type(g, nodes)
    numbers = number_by_relation(g, k, "k")
    chosen: dict[CanonicalEType, Tensor] = {}
    for etype in g.canonical_etypes:
        if weight not in g.edges[etype].data:
            raise GraphValueError(
                f"edges of {etype} have no feature {weight!r} to choose by (they have "
                f"{sorted(g.edges[etype].data)})"
            )
        weights = g.edges[etype].data[weight]
        if weights.dim() != 1:
            raise GraphValueError(
                f"edge feature {weight!r} of {etype} must have one number per edge (got shape "
                f"{tuple(weights.shape)})"
            )
        at = ends(etype, side)[0]
        if at in near and numbers[etype] != 0:
            chosen[etype] = _largest(
                g, etype, near[at], numbers[etype], weights, side == "in", ascending
            )
    return frontier_of(g, chosen, copy_ndata, copy_edata, output_device)


def _largest(
    g: Graph,
    etype: CanonicalEType,
    nodes: Tensor,
    k: int,
    weights: Tensor,
    along_in_edges: bool,
    ascending: bool,
) -> Tensor:
    """Ids of the edges that some nodes of a relation choose."""
    if along_in_edges:
        eids, degrees = g.in_edges(nodes, "eid", etype), g.in_degrees(nodes, etype)
    else:
        eids, degrees = g.out_edges(nodes, "eid", etype), g.out_degrees(nodes, etype)
    degrees = torch.as_tensor(degrees, device=eids.device).reshape(-1).long()
    rows = torch.arange(len(nodes), device=eids.device).repeat_interleave(degrees)
    order = torch.sort(weights.index_select(0, eids), descending=not ascending, stable=True).indices
    order = order[torch.sort(rows[order], stable=True).indices]
    if k >= 0:
        first = degrees.cumsum(0) - degrees
        rank = torch.arange(len(eids), device=eids.device) - first.repeat_interleave(degrees)
        order = order[rank < k]
    return eids[order]
