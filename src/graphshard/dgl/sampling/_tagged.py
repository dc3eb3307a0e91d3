# SPDX-License-Identifier: Apache-2.0
"""Draws whose numbers or weights go by a kind of edge within one relation: a type, or a tag."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import GraphTypeError, GraphValueError
from ...graph import Graph
from ...sampling.graph_store import LocalGraphStore, NeighborRequest, graph_store_of
from ...sampling.sampler import DrawSeed
from ._arguments import frontier_of, nodes_by_type, options_for
from ._draw import checked_weights_of, drawn_edges


def sample_etype_neighbors(
    g: Graph,
    nodes: Any,
    etype_offset: Sequence[int] | Tensor,
    fanout: Tensor,
    edge_dir: str = "in",
    prob: Sequence[Tensor | None] | str | None = None,
    replace: bool = False,
    copy_ndata: bool = True,
    copy_edata: bool = True,
    etype_sorted: bool = False,
    *,
    output_device: torch.device | str | None = None,
) -> Graph:
    """Draw edges of some nodes of a homogenised graph, a number of each edge type.

    Args:
        g: A graph of one relation whose edges come type by type, as `to_homogeneous` makes it.
        nodes: Ids.
        etype_offset: ``[num_types + 1]``, the first edge id of each type, and the number of edges.
        fanout: ``[num_types]``, edges of each type for a node, -1 for all.
        edge_dir: As for `sample_neighbors`.
        prob: Weights of the edges of each type, None for equal ones; or the name of a feature.
        replace: As for `sample_neighbors`.
        copy_ndata: As for `sample_neighbors`.
        copy_edata: As for `sample_neighbors`.
        etype_sorted: Accepted for DGL's scripts: edges of a node are found by type in any case.
        output_device: As for `sample_neighbors`.

    Returns:
        A graph of the same nodes, with the edges that were drawn, type by type.

    Raises:
        DGLError: Several relations, offsets that do not fit, or as for `sample_neighbors`.
    """
    if len(g.canonical_etypes) != 1:
        raise GraphValueError(
            f"sample_etype_neighbors takes a homogenised graph (got {g.canonical_etypes}); use "
            "sample_neighbors with a dictionary of fanouts"
        )
    if not isinstance(fanout, Tensor):
        raise GraphTypeError(f"fanout must be a tensor (got {type(fanout).__name__})")
    (etype,) = g.canonical_etypes
    bounds = [int(offset) for offset in etype_offset]
    rising = all(a <= b for a, b in zip(bounds, bounds[1:], strict=False))
    if len(bounds) != len(fanout) + 1 or not rising or bounds[0] != 0:
        raise GraphValueError(
            f"etype_offset must rise from 0 and have one entry more than fanout's {len(fanout)} "
            f"(got {bounds})"
        )
    if bounds[-1] != g.num_edges():
        raise GraphValueError(
            f"etype_offset must end with the number of edges, {g.num_edges()} (got {bounds[-1]})"
        )
    by_id = _weights(g, bounds, prob)
    near = nodes_by_type(g, nodes)
    options, draw_seed = options_for(edge_dir, replace), DrawSeed.fresh()
    found = []
    for number, (first, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        weights = torch.zeros_like(by_id)
        weights[first:stop] = by_id[first:stop]
        count = int(fanout[number])
        seed = DrawSeed(draw_seed.key(0, number))
        if count != 0 and stop > first:
            drawn = drawn_edges(g, near, count, {etype: weights}, options, None, seed)
            found.append(drawn[etype])
    none = torch.empty(0, dtype=g.idtype, device=g.device)
    eids = torch.cat([none, *found])
    return frontier_of(g, {etype: eids}, copy_ndata, copy_edata, output_device)


def _weights(g: Graph, bounds: Sequence[int], prob: Sequence[Tensor | None] | str | None) -> Tensor:
    """Weights of all edges by id."""
    (etype,) = g.canonical_etypes
    if prob is None:
        return torch.ones(g.num_edges(), device=g.device)
    if isinstance(prob, str):
        if prob not in g.edata:
            raise GraphValueError(f"the graph has no edge feature {prob!r} to draw by")
        return checked_weights_of(g, etype, g.edata[prob])
    sizes = [stop - first for first, stop in zip(bounds, bounds[1:], strict=False)]
    given = [None if p is None or len(p) == 0 else p for p in prob]
    if [n if p is None else len(p) for n, p in zip(sizes, given, strict=False)] != sizes:
        raise GraphValueError(
            f"prob must have one tensor per edge type, of {sizes} weights (got "
            f"{[None if p is None else len(p) for p in given]})"
        )
    columns = [
        torch.ones(n, dtype=torch.float64) if p is None else p.to(torch.float64)
        for n, p in zip(sizes, given, strict=True)
    ]
    return checked_weights_of(g, etype, torch.cat(columns))


def sample_neighbors_biased(
    g: Graph,
    nodes: Any,
    fanout: int,
    bias: Any,
    edge_dir: str = "in",
    tag_offset_name: str = "_TAG_OFFSET",
    replace: bool = False,
    copy_ndata: bool = True,
    copy_edata: bool = True,
    output_device: torch.device | str | None = None,
) -> Graph:
    """Draw edges of some nodes in proportion to a number for the tag of the node at the other end.

    Args:
        g: A graph of one relation whose edges are grouped by tag, as `sort_csc_by_tag` (for
            ``edge_dir="in"``) or `sort_csr_by_tag` makes it.
        nodes: Ids of nodes at the near end of edges.
        fanout: Edges for a node, -1 for all.
        bias: ``[num_tags]``, 0 or more: what the edges of a tag are drawn in proportion to.
        edge_dir: ``"in"`` or ``"out"``.
        tag_offset_name: Node feature ``[num_nodes, num_tags + 1]``, where the edges of each tag
            begin among those of the node.
        replace: As for `sample_neighbors`.
        copy_ndata: As for `sample_neighbors`.
        copy_edata: As for `sample_neighbors`.
        output_device: As for `sample_neighbors`.

    Returns:
        A graph of the same nodes, with the edges that were drawn, grouped by node.

    Raises:
        DGLError: Several relations, or offsets or numbers that do not fit.
    """
    if len(g.canonical_etypes) != 1:
        raise GraphValueError(
            f"sample_neighbors_biased takes a graph of one relation (got {g.canonical_etypes})"
        )
    (etype,) = g.canonical_etypes
    options = options_for(edge_dir, replace)
    data = g.dstdata if edge_dir == "in" else g.srcdata
    if tag_offset_name not in data:
        raise GraphValueError(
            f"nodes have no feature {tag_offset_name!r}; make the graph with "
            f"{'sort_csc_by_tag' if edge_dir == 'in' else 'sort_csr_by_tag'}"
        )
    offsets = data[tag_offset_name].long()
    numbers = torch.as_tensor(bias, device=g.device).double()
    if offsets.dim() != 2 or offsets.shape[1] != len(numbers) + 1:
        raise GraphValueError(
            f"bias must have one number for each of {offsets.shape[-1] - 1} tags (got "
            f"{len(numbers)})"
        )
    store = graph_store_of(g)
    assert isinstance(store, LocalGraphStore)
    lists = store.edge_lists(etype, options.edge_dir)
    counts = offsets.diff(dim=1).reshape(-1)
    if len(counts) and (int(counts.min()) < 0 or int(counts.sum()) != g.num_edges()):
        raise GraphValueError(
            f"{tag_offset_name!r} must split the {g.num_edges()} edges of the nodes by tag (got "
            f"{int(counts.sum())})"
        )
    placed = numbers.repeat(offsets.shape[0]).repeat_interleave(counts)
    eids = lists.eids_at(torch.arange(g.num_edges(), device=g.device))
    weights = torch.empty_like(placed)
    weights[eids.long()] = placed
    checked_weights_of(g, etype, weights)
    at = etype[2] if edge_dir == "in" else etype[0]
    near = nodes_by_type(g, nodes if isinstance(nodes, dict) else {at: nodes})[at]
    request = NeighborRequest(etype, near, int(fanout), DrawSeed.fresh().key(0, 0))
    found = store.draw(request, options, {}, weights).eids
    assert found is not None
    drawn = found if isinstance(found, Tensor) else found.gather()
    return frontier_of(g, {etype: drawn}, copy_ndata, copy_edata, output_device)
