# SPDX-License-Identifier: Apache-2.0
"""sample_neighbors, sample_labors: the graph of some edges that nodes of a graph drew.

What is drawn is named by a seed from torch's generator, which `graphshard.dgl.seed` sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace as with_changes
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..._base.typing import CanonicalEType, EType
from ...errors import GraphValueError
from ...graph import Graph
from ...sampling.graph_store import (
    DrawOptions,
    LocalGraphStore,
    NeighborRequest,
    checked_weights,
    ends,
    graph_store_of,
)
from ...sampling.sampler import DrawSeed, LayerFanout
from ._arguments import (
    edges_by_relation,
    frontier_of,
    nodes_by_type,
    number_by_relation,
    options_for,
)

EdgeWeights: TypeAlias = str | Tensor | Mapping[EType, Tensor] | None
"""Name of an edge feature, or weights by edge id, or relation to that."""


def sample_neighbors(
    g: Graph,
    nodes: Any,
    fanout: LayerFanout,
    edge_dir: str = "in",
    prob: EdgeWeights = None,
    replace: bool = False,
    copy_ndata: bool = True,
    copy_edata: bool = True,
    *,
    exclude_edges: Any = None,
    output_device: torch.device | str | None = None,
) -> Graph:
    """Draw edges of some nodes, ``fanout`` of each relation.

    Source: as `graphshard.dgl.dataloading.NeighborSampler`, of which this is one layer; `to_block`
    makes a block of what is returned.

    Args:
        g: A graph of this process.
        nodes: Ids, or type to ids. A node that is given twice has the same edges twice.
        fanout: Edges for a node, -1 for all that have a weight; or relation to that, for all.
        edge_dir: ``"in"`` for edges that enter the nodes, ``"out"`` for those that leave them.
        prob: What edges are drawn in proportion to, never where it is 0: the name of an edge
            feature ``[num_edges]``, bool (a mask) or floating point, which relations without it do
            without; or the weights, or relation to weights.
        replace: Draw with replacement: nodes with any edge then have ``fanout`` of them.
        copy_ndata: Whether the graph that is returned has the features of nodes.
        copy_edata: Whether it has those of its edges, and their ids as ``edata[EID]``.
        exclude_edges: Ids of edges that are treated as absent, or relation to ids.
        output_device: Where the graph that is returned shall be; by default where ``g`` is.

    Returns:
        A graph of the same nodes and relations, with the edges that were drawn, grouped by node.

    Raises:
        DGLError: Unknown types, ids out of range, a fanout below -1 or not for all relations, or
            weights that are none.

    Example:
        >>> from graphshard.graph import EID, graph
        >>> g = graph(([0, 1, 2, 3], [3, 3, 3, 0]))
        >>> frontier = sample_neighbors(g, [3, 0], 2)
        >>> frontier.num_nodes(), frontier.in_degrees([3, 0]), len(frontier.edata[EID])
        (4, tensor([2, 1]), 3)
    """
    options = options_for(edge_dir, replace)
    drawn = drawn_edges(g, nodes, fanout, prob, options, exclude_edges, DrawSeed.fresh())
    return frontier_of(g, drawn, copy_ndata, copy_edata, output_device)


def sample_labors(
    g: Graph,
    nodes: Any,
    fanout: LayerFanout,
    edge_dir: str = "in",
    prob: EdgeWeights = None,
    importance_sampling: int = 0,
    random_seed: Any = None,
    seed2_contribution: float = 0,
    copy_ndata: bool = True,
    copy_edata: bool = True,
    exclude_edges: Any = None,
    output_device: torch.device | str | None = None,
) -> tuple[Graph, list[Tensor]]:
    """Draw edges as `graphshard.dgl.dataloading.LaborSampler` does, about ``fanout`` for a node.

    Args:
        g: A graph of this process.
        nodes: As for `sample_neighbors`.
        fanout: As for `sample_neighbors`; a mean.
        edge_dir: As for `sample_neighbors`.
        prob: As for `sample_neighbors`.
        importance_sampling: 0, the paper's LABOR-0.
        random_seed: A number, or a tensor that holds one: equal ones draw alike. By default one
            from torch's generator.
        seed2_contribution: 0.
        copy_ndata: As for `sample_neighbors`.
        copy_edata: As for `sample_neighbors`.
        exclude_edges: As for `sample_neighbors`.
        output_device: As for `sample_neighbors`.

    Returns:
        The graph, and an empty tensor per relation in the place of importances, which LABOR-0
        without weights has none of.

    Raises:
        DGLError: As for `sample_neighbors`.
        NotImplementedError: Another ``importance_sampling`` or ``seed2_contribution``.
    """
    if importance_sampling != 0 or seed2_contribution != 0:
        raise NotImplementedError(
            "importance_sampling and seed2_contribution must be 0, the variant LABOR-0 (got "
            f"{importance_sampling} and {seed2_contribution})"
        )
    if random_seed is None:
        draw_seed = DrawSeed.fresh()
    else:
        draw_seed = DrawSeed(int(torch.as_tensor(random_seed).reshape(-1)[0]))
    options = with_changes(options_for(edge_dir), labor=True)
    drawn = drawn_edges(g, nodes, fanout, prob, options, exclude_edges, draw_seed)
    frontier = frontier_of(g, drawn, copy_ndata, copy_edata, output_device)
    none = torch.empty(0, dtype=torch.int64, device=frontier.device)
    return frontier, [none for _ in g.canonical_etypes]


def drawn_edges(
    g: Graph,
    nodes: Any,
    fanout: LayerFanout,
    prob: EdgeWeights,
    options: DrawOptions,
    exclude_edges: Any,
    draw_seed: DrawSeed,
) -> dict[CanonicalEType, Tensor]:
    """Relation to ids of the edges that some nodes drew; arguments as for `sample_neighbors`."""
    store = graph_store_of(g)
    assert isinstance(store, LocalGraphStore)
    near = nodes_by_type(g, nodes)
    fanouts = number_by_relation(g, fanout, "fanout")
    excluded = edges_by_relation(g, exclude_edges, "exclude_edges")
    weights = weights_by_relation(g, prob)
    drawn: dict[CanonicalEType, Tensor] = {}
    for number, etype in enumerate(g.canonical_etypes):
        at = ends(etype, options.edge_dir)[0]
        if at not in near or fanouts[etype] == 0:
            continue
        request = NeighborRequest(etype, near[at], fanouts[etype], draw_seed.key(0, number))
        given = weights[etype]
        how = with_changes(options, weights=given) if isinstance(given, str) else options
        by_id = given if isinstance(given, Tensor) else None
        try:
            found = store.draw(request, how, excluded, by_id)
        except ValueError as error:
            raise GraphValueError(str(error)) from None
        eids = found.eids
        assert eids is not None
        drawn[etype] = eids if isinstance(eids, Tensor) else eids.gather()
    return drawn


def weights_by_relation(g: Graph, prob: EdgeWeights) -> dict[CanonicalEType, str | Tensor | None]:
    """What the edges of each relation are weighted by: a feature of theirs, numbers, or nothing.

    Raises:
        DGLError: No relation has the feature, or the numbers are no weights.
    """
    found: dict[CanonicalEType, str | Tensor | None] = dict.fromkeys(g.canonical_etypes)
    if isinstance(prob, str):
        for etype in g.canonical_etypes:
            found[etype] = prob if prob in g.edges[etype].data else None
        if not any(found.values()):
            raise GraphValueError(
                f"no relation has an edge feature {prob!r} to draw by; set "
                f"g.edata[{prob!r}] to one number per edge"
            )
    elif prob is not None:
        given = prob if isinstance(prob, Mapping) else {None: prob}
        for name, values in given.items():
            etype = g.to_canonical_etype(name)
            found[etype] = checked_weights_of(g, etype, values)
    return found


def checked_weights_of(g: Graph, etype: CanonicalEType, values: Any) -> Tensor:
    """Weights of the edges of a relation by id, as float32 or float64.

    Raises:
        DGLError: They are no weights, or another number of them.
    """
    weights = torch.as_tensor(values, device=g.device)
    if weights.shape[:1] != (g.num_edges(etype),):
        raise GraphValueError(
            f"weights of {etype} must be one for each of {g.num_edges(etype)} edges (got shape "
            f"{tuple(weights.shape)})"
        )
    try:
        return checked_weights(weights.detach(), DrawOptions(weights="prob"), etype)
    except ValueError as error:
        raise GraphValueError(str(error)) from None
