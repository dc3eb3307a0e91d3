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


def ids_of(g: Graph, ids: Any, count: int, what: str) -> Tensor:
    """Ids in the graph's idtype, from a tensor, an array, a list or one number.

    Raises:
        DGLError: They are no integers, or out of range.
    """
    found = as_integers(ids, what)
    check_ids(found, count, "an id", what)
    return found.to(device=g.device, dtype=g.idtype)


def nodes_by_type(g: Graph, nodes: Any) -> dict[str, Tensor]:
    """Nodes by type, of the types that are given.

    Raises:
        DGLError: Ids without a type on a graph of several, an unknown type, or ids that are none.
        ValueError: An empty dictionary.
    """
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
    """A number per relation, at least -1, which means all.

    Raises:
        DGLError: Another number, or a dictionary that leaves a relation out.
    """
    given = number
    if not isinstance(number, Mapping):
        given = dict.fromkeys(g.canonical_etypes, number)
    found = {}
    for etype, one in given.items():
        if isinstance(one, bool) or not hasattr(one, "__index__") or int(one) < -1:
            raise GraphValueError(
                f"{what} must be an integer of at least -1, which means all (got {one!r})"
            )
        found[g.to_canonical_etype(etype)] = int(one)
    missing = [etype for etype in g.canonical_etypes if etype not in found]
    if missing:
        raise GraphValueError(
            f"a dictionary for {what} must name every relation (missing {missing}); give 0 for "
            "those that shall have no edges"
        )
    return found


def options_for(edge_dir: str, replace: bool = False) -> DrawOptions:
    """How to draw.

    Raises:
        DGLError: An unknown direction.
    """
    return DrawOptions(replace=bool(replace), edge_dir=checked_dir(edge_dir))


def checked_dir(edge_dir: str) -> EdgeDir:
    """A direction, ``"in"`` or ``"out"``.

    Raises:
        DGLError: It is none.
    """
    if edge_dir == "in":
        return "in"
    if edge_dir == "out":
        return "out"
    raise GraphValueError(f"edge_dir must be 'in' or 'out' (got {edge_dir!r})")


def frontier_of(
    g: Graph,
    eids: Mapping[CanonicalEType, Tensor],
    copy_ndata: bool,
    copy_edata: bool,
    output_device: torch.device | str | None,
) -> Graph:
    """The graph of all nodes and some edges.

    Args:
        g: The graph.
        eids: Relation to ids of edges; none of the relations that are left out.
        copy_ndata: Whether it has the features of nodes.
        copy_edata: Whether it has the features of edges, and their ids as ``edata[EID]``.
        output_device: Where it shall be; None: where ``g`` is.
    """
    found: Graph = edge_subgraph(without_features(g), eids, relabel_nodes=False, store_ids=True)
    for ntype in g.ntypes if copy_ndata else ():
        found.nodes[ntype].data.update(g.nodes[ntype].data)
    for etype in g.canonical_etypes:
        if copy_edata:
            set_lazy(g.edges[etype].data, found.edges[etype].data, EID)
        else:
            found.edges[etype].data.clear()
    return found if output_device is None else found.to(output_device)


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
