# SPDX-License-Identifier: Apache-2.0
"""Graphs of the edges that are drawn, or chosen, at some nodes.

What is drawn is named by a seed from torch's generator, which `graphshard.dgl.seed` sets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace as with_changes
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..._base.typing import CanonicalEType, EType
from ...errors import GraphTypeError, GraphValueError
from ...graph import EID, Block, Graph, edge_subgraph, to_block
from ...graph.structure import as_integers, check_ids
from ...sampling.graph_store import (
    DrawOptions,
    EdgeDir,
    LocalGraphStore,
    NeighborRequest,
    checked_weights,
    ends,
    graph_store_of,
)
from ...sampling.lazy_features import set_lazy, without_features
from ...sampling.sampler import DrawSeed, LayerFanout

__all__ = [
    "sample_etype_neighbors", "sample_labors", "sample_neighbors", "sample_neighbors_biased",
    "sample_neighbors_fused", "select_topk",
]  # fmt: skip


def check_whole(g: Graph) -> None:
    """Refuse what is no graph that is whole in this process."""
    if not isinstance(g, Graph):
        raise GraphTypeError(
            f"draws and walks of graphshard.dgl.sampling take a whole Graph (got "
            f"{type(g).__name__}); neighbours of a sharded one are drawn by the sampler of a loader"
        )


def store_of_whole(g: Graph) -> LocalGraphStore:
    """What to draw from, of a graph that is whole in this process."""
    check_whole(g)
    store = graph_store_of(g)
    assert isinstance(store, LocalGraphStore)
    return store


def ids_of(g: Graph, ids: Any, count: int, what: str) -> Tensor:
    """Ids in the graph's idtype, from a tensor, an array, a list or one number."""
    tensor = as_integers(ids, what)
    check_ids(tensor, count, "an id", what)
    return tensor.to(device=g.device, dtype=g.idtype)


def nodes_by_type(g: Graph, nodes: Any) -> dict[str, Tensor]:
    """Nodes by type, of the types that are given."""
    if not isinstance(nodes, Mapping):
        if len(g.ntypes) != 1:
            raise GraphTypeError(
                f"nodes must be a dictionary from type to ids, since the graph has {g.ntypes}"
            )
        nodes = {g.ntypes[0]: nodes}
    if not nodes:
        raise GraphValueError("nodes must name a type (got an empty dictionary); give it no ids")
    for ntype in nodes:
        if ntype not in g.ntypes:
            raise GraphValueError(f"no node type {ntype!r}; the graph has {g.ntypes}")
    return {t: ids_of(g, i, g.num_nodes(t), f"nodes of type {t!r}") for t, i in nodes.items()}


def edges_by_relation(g: Graph, edges: Any, what: str) -> dict[CanonicalEType, Tensor]:
    """Edge ids by relation; None is no edges. Errors as `nodes_by_type`."""
    if edges is None:
        return {}
    if not isinstance(edges, Mapping):
        if len(g.canonical_etypes) != 1:
            raise GraphTypeError(
                f"{what} must be a dictionary from relation to ids, since the graph has "
                f"{g.canonical_etypes}"
            )
        edges = {g.canonical_etypes[0]: edges}
    named = {g.to_canonical_etype(etype): ids for etype, ids in edges.items()}
    return {t: ids_of(g, i, g.num_edges(t), f"{what} of {t}") for t, i in named.items()}


def number_by_relation(g: Graph, number: Any, what: str) -> dict[CanonicalEType, int]:
    """A number per relation, at least -1, which means all."""
    given = number if isinstance(number, Mapping) else dict.fromkeys(g.canonical_etypes, number)
    numbers = {}
    for etype, count in given.items():
        if isinstance(count, bool) or not hasattr(count, "__index__") or int(count) < -1:
            raise GraphValueError(
                f"{what} must be an integer of at least -1, which means all (got {count!r})"
            )
        numbers[g.to_canonical_etype(etype)] = int(count)
    missing = [etype for etype in g.canonical_etypes if etype not in numbers]
    if missing:
        raise GraphValueError(
            f"a dictionary for {what} must name every relation (missing {missing}); give 0 for "
            "those that shall have no edges"
        )
    return numbers


def options_for(edge_dir: str, replace: bool = False) -> DrawOptions:
    """How to draw."""
    return DrawOptions(replace=bool(replace), edge_dir=checked_dir(edge_dir))


def checked_dir(edge_dir: str) -> EdgeDir:
    """A direction: ``in`` or ``out``."""
    if edge_dir not in ("in", "out"):
        raise GraphValueError(f"edge_dir must be 'in' or 'out' (got {edge_dir!r})")
    return "in" if edge_dir == "in" else "out"


def frontier_of(
    g: Graph,
    eids: Mapping[CanonicalEType, Tensor],
    copy_ndata: bool,
    copy_edata: bool,
    output_device: torch.device | str | None,
) -> Graph:
    """The graph of all nodes and some edges."""
    frontier: Graph = edge_subgraph(without_features(g), eids, relabel_nodes=False, store_ids=True)
    for ntype in g.ntypes if copy_ndata else ():
        frontier.nodes[ntype].data.update(g.nodes[ntype].data)
    for etype in g.canonical_etypes:
        if copy_edata:
            set_lazy(g.edges[etype].data, frontier.edges[etype].data, EID)
        else:
            frontier.edges[etype].data.clear()
    return frontier if output_device is None else frontier.to(output_device)


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
        nodes: Ids, or type to ids. A node that is given twice has the same edges twice.
        fanout: Edges for a node, -1 for all that have a weight; or relation to that, for all.
        prob: What edges are drawn in proportion to, never where it is 0: the name of an edge
            feature ``[num_edges]``, bool (a mask) or floating point, which relations without it do
            without; or the weights, or relation to weights.
        replace: Draw with replacement: nodes with any edge then have ``fanout`` of them.

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


def sample_neighbors_fused(
    g: Graph,
    nodes: Any,
    fanout: LayerFanout,
    edge_dir: str = "in",
    prob: EdgeWeights = None,
    replace: bool = False,
    copy_ndata: bool = True,
    copy_edata: bool = True,
    exclude_edges: Any = None,
    mapping: Any = None,
) -> Block:
    """What `sample_neighbors` draws, as a block whose destinations are the nodes.

    Args:
        g: A graph of this process.
        nodes: Ids, or type to ids, each once.
        fanout: Edges for a node, -1 for all that have a weight; or relation to that, for all.
        edge_dir: ``"in"``.
        prob: What edges are drawn in proportion to, as `sample_neighbors` takes it.
        replace: Draw with replacement.
        copy_ndata: Whether the block has the features of nodes beside their ids.
        copy_edata: Whether it has those of its edges, and their ids in ``g`` as ``edata[EID]``.
        exclude_edges: Ids of edges that are treated as absent, or relation to ids.
        mapping: Without effect; DGL keeps memory in it.

    Raises:
        DGLError: As `sample_neighbors` raises it.
        NotImplementedError: ``edge_dir="out"``.
    """
    if checked_dir(edge_dir) == "out":
        raise NotImplementedError(
            "a block has the edges that enter its nodes; reverse the graph, or take "
            "sample_neighbors with edge_dir='out'"
        )
    seeds = nodes_by_type(g, nodes)
    frontier = sample_neighbors(
        g, seeds, fanout, "in", prob, replace, copy_ndata, exclude_edges=exclude_edges
    )
    block = to_block(frontier, seeds)
    for etype in g.canonical_etypes:
        rows, data = block.edges[etype].data.pop(EID), block.edges[etype].data
        if copy_edata:
            data[EID] = frontier.edges[etype].data[EID][rows]
        else:
            data.clear()
    return block


def sample_labors(
    g: Graph,
    nodes: Any,
    fanout: LayerFanout,
    edge_dir: str = "in",
    prob: EdgeWeights = None,
    importance_sampling: int = 0,
    random_seed: int | Tensor | None = None,
    seed2_contribution: float = 0,
    copy_ndata: bool = True,
    copy_edata: bool = True,
    exclude_edges: Any = None,
    output_device: torch.device | str | None = None,
) -> tuple[Graph, list[Tensor]]:
    """Draw edges as `graphshard.dgl.dataloading.LaborSampler` does, about ``fanout`` for a node.

    Args:
        random_seed: A number, or a tensor that holds one: equal ones draw alike. By default one
            from torch's generator.

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
    store = store_of_whole(g)
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
        drawn[etype] = _drawn_ids(store, request, options, excluded, weights[etype])
    return drawn


def _drawn_ids(
    store: LocalGraphStore,
    request: NeighborRequest,
    options: DrawOptions,
    excluded: dict[CanonicalEType, Tensor],
    weights: str | Tensor | None,
) -> Tensor:
    if isinstance(weights, str):
        options, weights = with_changes(options, weights=weights), None
    try:
        eids = store.draw(request, options, excluded, weights).eids
    except ValueError as error:
        raise GraphValueError(str(error)) from None
    assert eids is not None
    return eids if isinstance(eids, Tensor) else eids.gather()


def weights_by_relation(g: Graph, prob: EdgeWeights) -> dict[CanonicalEType, str | Tensor | None]:
    """What the edges of each relation are weighted by: a feature of theirs, numbers, or nothing."""
    weights: dict[CanonicalEType, str | Tensor | None] = dict.fromkeys(g.canonical_etypes)
    if isinstance(prob, str):
        having = [etype for etype in g.canonical_etypes if prob in g.edges[etype].data]
        if not having:
            raise GraphValueError(
                f"no relation has an edge feature {prob!r} to draw by; set "
                f"g.edata[{prob!r}] to one number per edge"
            )
        return weights | dict.fromkeys(having, prob)
    if prob is not None:
        for name, values in (prob if isinstance(prob, Mapping) else {None: prob}).items():
            etype = g.to_canonical_etype(name)
            weights[etype] = checked_weights_of(g, etype, values)
    return weights


def checked_weights_of(g: Graph, etype: CanonicalEType, values: Any) -> Tensor:
    """Weights of the edges of a relation by id, as float32 or float64."""
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
        etype_offset: ``[num_types + 1]``, the first edge id of each type, and the number of edges.
        fanout: ``[num_types]``, edges of each type for a node, -1 for all.
        prob: Weights of the edges of each type, None for equal ones; or the name of a feature.
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
    sizes = [stop - first for first, stop in zip(bounds, bounds[1:], strict=False)]
    if len(bounds) != len(fanout) + 1 or min(sizes, default=0) < 0 or bounds[0] != 0:
        raise GraphValueError(
            f"etype_offset must rise from 0 and have one entry more than fanout's {len(fanout)} "
            f"(got {bounds})"
        )
    if bounds[-1] != g.num_edges():
        raise GraphValueError(
            f"etype_offset must end with the number of edges, {g.num_edges()} (got {bounds[-1]})"
        )
    by_id = _weights(g, sizes, prob)
    near = nodes_by_type(g, nodes)
    options, draw_seed = options_for(edge_dir, replace), DrawSeed.fresh()
    per_type = [torch.empty(0, dtype=g.idtype, device=g.device)]
    for number, (size, count) in enumerate(zip(sizes, fanout.tolist(), strict=True)):
        if int(count) != 0 and size > 0:
            weights = torch.zeros_like(by_id)
            of_type = slice(bounds[number], bounds[number + 1])
            weights[of_type] = by_id[of_type]
            seed = DrawSeed(draw_seed.key(0, number))
            drawn = drawn_edges(g, near, int(count), {etype: weights}, options, None, seed)
            per_type.append(drawn[etype])
    eids = torch.cat(per_type)
    return frontier_of(g, {etype: eids}, copy_ndata, copy_edata, output_device)


def _weights(g: Graph, sizes: Sequence[int], prob: Sequence[Tensor | None] | str | None) -> Tensor:
    """Weights of all edges by id."""
    (etype,) = g.canonical_etypes
    if prob is None:
        return torch.ones(g.num_edges(), device=g.device)
    if isinstance(prob, str):
        if prob not in g.edata:
            raise GraphValueError(f"the graph has no edge feature {prob!r} to draw by")
        return checked_weights_of(g, etype, g.edata[prob])
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
        bias: ``[num_tags]``, 0 or more: what the edges of a tag are drawn in proportion to.
        tag_offset_name: Node feature ``[num_nodes, num_tags + 1]``, where the edges of each tag
            begin among those of the node.
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
    store = store_of_whole(g)
    lists = store.edge_lists(etype, options.edge_dir)
    counts = offsets.diff(dim=1).reshape(-1)
    if len(counts) and (int(counts.min()) < 0 or int(counts.sum()) != g.num_edges()):
        raise GraphValueError(
            f"{tag_offset_name!r} must split the {g.num_edges()} edges of the nodes by tag (got "
            f"{int(counts.sum())})"
        )
    weights = torch.empty(g.num_edges(), dtype=torch.float64, device=g.device)
    eids = lists.eids_at(torch.arange(g.num_edges(), device=g.device))
    weights[eids.long()] = numbers.repeat(offsets.shape[0]).repeat_interleave(counts)
    checked_weights_of(g, etype, weights)
    at = etype[2] if edge_dir == "in" else etype[0]
    near = nodes_by_type(g, nodes if isinstance(nodes, dict) else {at: nodes})[at]
    request = NeighborRequest(etype, near, int(fanout), DrawSeed.fresh().key(0, 0))
    drawn = _drawn_ids(store, request, options, {}, weights)
    return frontier_of(g, {etype: drawn}, copy_ndata, copy_edata, output_device)


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
    """
    side = checked_dir(edge_dir)
    edges_of, degrees_of = (
        (g.in_edges, g.in_degrees) if side == "in" else (g.out_edges, g.out_degrees)
    )
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
            eids, degrees = edges_of(near[at], "eid", etype), degrees_of(near[at], etype).long()
            rows = torch.arange(len(near[at]), device=g.device).repeat_interleave(degrees)
            values = weights.index_select(0, eids)
            order = first_of_rows(rows, values, degrees, numbers[etype], descending=not ascending)
            chosen[etype] = eids[order]
    return frontier_of(g, chosen, copy_ndata, copy_edata, output_device)


def first_of_rows(rows: Tensor, values: Tensor, sizes: Tensor, k: int, descending: bool) -> Tensor:
    """Places of the first ``k`` values of each row, row by row; all of them where ``k`` is -1.

    Of equal values the first place goes first.

    Args:
        rows: ``[num_values]`` row of each value, ascending.
        values: ``[num_values]``.
        sizes: int64 ``[num_rows]``, how many values each row has.
    """
    order = torch.sort(values, descending=descending, stable=True).indices
    order = order[torch.sort(rows[order], stable=True).indices]
    if k < 0:
        return order
    first = sizes.cumsum(0) - sizes
    rank = torch.arange(len(order), device=order.device) - first.repeat_interleave(sizes)
    return order[rank < k]
