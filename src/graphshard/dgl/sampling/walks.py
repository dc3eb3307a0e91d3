# SPDX-License-Identifier: Apache-2.0
"""Random walks, biased ones, and neighbours that walks visit often.

A step is one draw of one edge for every walk, by the kernel that draws neighbours: what a walk
draws depends on its place among the walks and on the step, so walks repeat from one seed, whatever
the number of threads.

node2vec: Grover and Leskovec, "node2vec: Scalable Feature Learning for Networks", KDD 2016,
https://arxiv.org/abs/1607.00653. After a step from u to v, the edge to x is drawn in proportion to
its weight times 1/p if x is u, 1 if x is a neighbour of u, and 1/q otherwise. Cost: of the order of
the degrees of the nodes that are passed, since all edges there are weighted.

PinSAGE: Ying et al., "Graph Convolutional Neural Networks for Web-Scale Recommender Systems", KDD
2018, https://arxiv.org/abs/1806.01973: how often walks visit a node says how important it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..._base.typing import CanonicalEType, EType
from ...errors import GraphTypeError, GraphValueError
from ...graph import Graph, heterograph
from ...graph.structure import as_integers, check_ids, row_positions
from ...ops import draw_neighbors
from ...ops.counter_random import key_state, states, unit, word
from ...sampling.graph_store import DrawOptions, NeighborRequest
from ...sampling.sampler import DrawSeed
from .frontiers import check_whole, first_of_rows, store_of_whole

__all__ = [
    "PinSAGESampler", "RandomWalkNeighborSampler", "node2vec_random_walk", "pack_traces",
    "random_walk",
]  # fmt: skip

ONE_OUT_EDGE = DrawOptions(replace=True, edge_dir="out")
"""What a step draws."""

_Moves: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Which walks have moved, bool ``[n]``; where these are, and the edges they took."""

_STOPS = -4
"""In the place of a layer's index in `DrawSeed.key`, besides those of loaders."""

_DOMAIN = 0x6A09E667F3BCC909


def random_walk(
    g: Graph,
    nodes: Any,
    *,
    metapath: Sequence[EType] | None = None,
    length: int | None = None,
    prob: str | None = None,
    restart_prob: float | Tensor | None = None,
    return_eids: bool = False,
) -> tuple[Tensor, ...]:
    """Walk from each node along out-edges.

    A walk ends before its time at a node that it cannot leave.

    Args:
        nodes: ``[n]`` ids of the nodes where walks begin, of the type that the first relation
            leaves; one may be there several times.
        prob: Name of an edge feature ``[num_edges]``; steps are drawn in proportion to it.
            Relations without it are drawn from uniformly.
        restart_prob: With what probability a walk ends before a step: a number for all steps, or
            ``[length]``.

    Returns:
        ``(traces, types)``, or with ``return_eids`` ``(traces, eids, types)``: ids of nodes
        ``[n, length + 1]`` and of edges ``[n, length]``, -1 where a walk has ended; and the index
        of the node type at each place, ``[length + 1]``. All have the graph's idtype.

    Raises:
        DGLError: Relations that do not follow each other, or neither these nor a length; ids out of
            range; weights that are none; or another number of probabilities.

    Example:
        >>> from graphshard.graph import graph
        >>> traces, types = random_walk(graph(([0, 1, 2], [1, 2, 3])), [0, 2], length=3)
        >>> traces
        tensor([[ 0,  1,  2,  3],
                [ 2,  3, -1, -1]])
    """
    path = _path(g, metapath, length)
    stops = _stops(restart_prob, len(path), g.device)
    options = {etype: step_options(g, etype, prob) for etype in path}
    if prob is not None and path and not any(how.weights for how in options.values()):
        raise GraphValueError(f"no relation of the walk has an edge feature {prob!r} to draw by")
    first = path[0][0] if path else g.ntypes[0]
    at = start_nodes(g, nodes, first)
    traces, eids = walks_along(g, at, path, options, stops, DrawSeed.fresh())
    ntypes = [first, *(etype[2] for etype in path)]
    types = torch.tensor([*map(g.get_ntype_id, ntypes)], dtype=g.idtype, device=g.device)
    return (traces, eids, types) if return_eids else (traces, types)


def walks_along(
    g: Graph,
    at: Tensor,
    path: Sequence[CanonicalEType],
    options: Mapping[CanonicalEType, DrawOptions],
    stops: Tensor | None,
    draw_seed: DrawSeed,
) -> tuple[Tensor, Tensor]:
    """What `random_walk` says, without its checks: nodes and edges of walks."""

    def take(step: int, walks: Tensor, at: Tensor, before: Tensor | None) -> _Moves:
        etype = path[step]
        return one_step(g, etype, walks, at, options[etype], draw_seed.key(step, 0))

    return _walk(g, at, len(path), take, stops, draw_seed)


def _walk(
    g: Graph,
    at: Tensor,
    length: int,
    take: Callable[[int, Tensor, Tensor, Tensor | None], _Moves],
    stops: Tensor | None,
    draw_seed: DrawSeed,
) -> tuple[Tensor, Tensor]:
    """Nodes and edges of walks, by a step of all walks after another.

    ``take`` gets the number of the step, which walks go on, where they are, and where they were.
    """
    traces = torch.full((len(at), length + 1), -1, dtype=g.idtype, device=g.device)
    eids = torch.full((len(at), length), -1, dtype=g.idtype, device=g.device)
    traces[:, 0] = at
    walks = torch.arange(len(at), device=g.device)
    for step in range(length):
        if stops is not None:
            key = key_state(draw_seed.key(_STOPS, step), _DOMAIN)
            goes_on = unit(word(states(key, walks), 0)) >= stops[step]
            walks, at = walks[goes_on], at[goes_on]
        if len(walks) == 0:
            break
        before = traces[walks, step - 1] if step else None
        moved, at, along = take(step, walks, at, before)
        walks = walks[moved]
        traces[walks, step + 1] = at
        eids[walks, step] = along
    return traces, eids


def pack_traces(traces: Tensor, types: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Walks one after another, without what follows their ends.

    Args:
        traces: ``[n, length + 1]``, from `random_walk`.
        types: ``[length + 1]``, from `random_walk`.

    Returns:
        ``(nodes, their types, lengths, offsets)``: nodes and types of all walks together, how many
        each walk has and where they begin, int64 ``[n]``.
    """
    if not isinstance(traces, Tensor) or not isinstance(types, Tensor):
        raise GraphTypeError(
            f"traces and types must be tensors (got {type(traces).__name__} and "
            f"{type(types).__name__})"
        )
    if traces.dim() != 2 or types.shape != traces.shape[1:]:
        raise GraphValueError(
            f"types must have one entry for each place of a trace (got shapes "
            f"{tuple(types.shape)} and {tuple(traces.shape)})"
        )
    is_there = (traces >= 0).to(torch.int64).cumprod(1).bool()
    lengths = is_there.sum(1)
    offsets = lengths.cumsum(0) - lengths
    return traces[is_there], types.expand_as(traces)[is_there], lengths, offsets


def start_nodes(g: Graph, nodes: Any, ntype: str) -> Tensor:
    """Ids of nodes of a type, in the graph's idtype."""
    check_whole(g)
    ids = as_integers(nodes, "nodes")
    check_ids(ids, g.num_nodes(ntype), "a node id", f"nodes of type {ntype!r}")
    return ids.to(device=g.device, dtype=g.idtype)


def step_options(g: Graph, etype: CanonicalEType, prob: str | None) -> DrawOptions:
    """How a step along a relation is drawn: by a feature of its edges, if they have it."""
    if prob is None or prob not in g.edges[etype].data:
        return ONE_OUT_EDGE
    if g.edges[etype].data[prob].dim() != 1:
        raise GraphValueError(
            f"edge feature {prob!r} of {etype} must have one number per edge to walk by (got shape "
            f"{tuple(g.edges[etype].data[prob].shape)})"
        )
    return replace(ONE_OUT_EDGE, weights=prob)


def one_step(
    g: Graph, etype: CanonicalEType, walks: Tensor, at: Tensor, options: DrawOptions, key: int
) -> _Moves:
    """Draw an out-edge for each walk."""
    store = store_of_whole(g)
    lists = store.edge_lists(etype, "out")
    try:
        weights = store.weights(etype, options)
    except ValueError as error:
        raise GraphValueError(str(error)) from None
    request = NeighborRequest(etype, at, 1, key)
    counts, positions, picked = lists.draw(
        request,
        at,
        walks,
        options,
        weights=weights,
        weights_by_eid=True,
        labor_ids=None,
        excluded=None,
    )
    return counts > 0, picked, lists.eids_at(positions)


def _path(g: Graph, metapath: Sequence[EType] | None, length: int | None) -> list[CanonicalEType]:
    if metapath is None:
        if not g.is_homogeneous:
            raise GraphValueError(
                f"a walk needs a metapath, the relation of each step, since the graph has the "
                f"relations {g.canonical_etypes}"
            )
        if length is None:
            raise GraphValueError("give length, the number of steps, or metapath")
        if length < 0:
            raise GraphValueError(f"length must not be negative (got {length})")
        return [g.canonical_etypes[0]] * length
    path = [g.to_canonical_etype(etype) for etype in metapath]
    for here, then in zip(path, path[1:], strict=False):
        if here[2] != then[0]:
            raise GraphValueError(
                f"each relation of a metapath must begin where the one before ends (got {then} "
                f"after {here})"
            )
    return path


def _stops(restart_prob: float | Tensor | None, length: int, device: torch.device) -> Tensor | None:
    """The probability that a walk ends, before each step."""
    if restart_prob is None:
        return None
    is_number = isinstance(restart_prob, int | float) and not isinstance(restart_prob, bool)
    if not is_number and not isinstance(restart_prob, Tensor):
        raise GraphTypeError(
            f"restart_prob must be a number or a tensor (got {type(restart_prob).__name__})"
        )
    stops = torch.as_tensor(restart_prob, dtype=torch.float64, device=device)
    if stops.dim() == 0:
        stops = stops.expand(length)
    if stops.shape != (length,):
        raise GraphValueError(
            f"restart_prob must be a number, or one for each of the {length} steps (got shape "
            f"{tuple(stops.shape)})"
        )
    if not bool(((stops >= 0) & (stops <= 1)).all()):
        raise GraphValueError("restart_prob must be in [0, 1]")
    return stops


_EDGES_AT_ONCE = 1 << 22


def node2vec_random_walk(
    g: Graph,
    nodes: Any,
    p: float,
    q: float,
    walk_length: int,
    prob: str | None = None,
    return_eids: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Walk from each node, each step depending on the one before.

    Args:
        p: The greater, the less likely a walk goes back at once.
        q: The greater, the more likely it stays near; a node x is near the last one, u, if there
            is an edge from x to u.

    Returns:
        ``traces``, or ``(traces, eids)``: ids of nodes ``[n, walk_length + 1]`` and of edges
        ``[n, walk_length]``, -1 where a walk has ended.
    """
    if not g.is_homogeneous:
        raise GraphValueError(
            f"node2vec walks need a graph of one relation (got {g.canonical_etypes})"
        )
    if not p > 0 or not q > 0:
        raise GraphValueError(f"p and q must be positive (got {p} and {q})")
    if walk_length < 0:
        raise GraphValueError(f"walk_length must not be negative (got {walk_length})")
    (etype,) = g.canonical_etypes
    if prob is not None and prob not in g.edata:
        raise GraphValueError(f"the graph has no edge feature {prob!r} to walk by")
    at = start_nodes(g, nodes, g.ntypes[0])
    draw_seed, options = DrawSeed.fresh(), step_options(g, etype, prob)

    def take(step: int, walks: Tensor, at: Tensor, before: Tensor | None) -> _Moves:
        key = draw_seed.key(step, 0)
        if before is None:
            return one_step(g, etype, walks, at, options, key)
        return _biased_step(g, etype, walks, at, before, options, p, q, key)

    traces, eids = _walk(g, at, walk_length, take, None, draw_seed)
    return (traces, eids) if return_eids else traces


def _biased_step(
    g: Graph,
    etype: CanonicalEType,
    walks: Tensor,
    at: Tensor,
    before: Tensor,
    options: DrawOptions,
    p: float,
    q: float,
    key: int,
) -> _Moves:
    """As `one_step`, for walks that come from ``before``; some walks at a time."""
    store = store_of_whole(g)
    lists, weights = store.edge_lists(etype, "out"), store.weights(etype, options)
    begin, degree = lists.indptr[at].long(), lists.indptr.diff()[at].long()
    ends = degree.cumsum(0)
    none = torch.empty(0, dtype=g.idtype, device=g.device)
    moved, ats, alongs = [walks[:0].bool()], [none], [none]
    first = 0
    while first < len(walks):
        limit = int(ends[first] - degree[first]) + _EDGES_AT_ONCE
        last = max(first + 1, int(torch.searchsorted(ends, limit, right=True)))
        some = degree[first:last]
        indptr = torch.nn.functional.pad(some.cumsum(0), (1, 0))
        positions = row_positions(begin[first:last], some)
        to = lists.neighbors[positions]
        origin = before[first:last].repeat_interleave(some)
        is_near = g.has_edges_between(to, origin, etype=etype)
        bias = torch.where(is_near, 1.0, 1.0 / q).double()
        bias = torch.where(to == origin, 1.0 / p, bias)
        if weights is not None:
            bias = bias * weights[lists.eids_at(positions).long()]
        rows = torch.arange(len(some), device=g.device)
        counts, drawn, picked = draw_neighbors(
            indptr, rows, 1, key, walks[first:last], indices=to, replace=True, prob=bias
        )
        moved.append(counts > 0)
        ats.append(picked)
        alongs.append(lists.eids_at(positions[drawn]).to(g.idtype))
        first = last
    return torch.cat(moved), torch.cat(ats), torch.cat(alongs)


class RandomWalkNeighborSampler:
    """Finds neighbours by walks that follow a metapath again and again.

    Example:
        >>> from graphshard.graph import graph
        >>> sampler = RandomWalkNeighborSampler(graph(([0, 1, 2], [1, 2, 0])), 2, 0.0, 3, 2)
        >>> near = sampler(torch.tensor([0]))
        >>> near.edges(), near.edata["weights"]
        ((tensor([1, 2]), tensor([0, 0])), tensor([3, 3]))
    """

    def __init__(
        self,
        G: Graph,
        num_traversals: int,
        termination_prob: float,
        num_random_walks: int,
        num_neighbors: int,
        metapath: Sequence[EType] | None = None,
        weight_column: str = "weights",
    ) -> None:
        if metapath is None and not G.is_homogeneous:
            raise GraphValueError(
                f"give a metapath, since the graph has the relations {G.canonical_etypes}"
            )
        relations = G.canonical_etypes if metapath is None else metapath
        path = [G.to_canonical_etype(etype) for etype in relations]
        if not path or path[0][0] != path[-1][2]:
            raise GraphValueError(
                f"a metapath must end at the node type that it starts from (got {path})"
            )
        self.G, self.weight_column = G, weight_column
        self.num_random_walks, self.num_neighbors = num_random_walks, num_neighbors
        self.num_traversals = num_traversals
        self.ntype, self.metapath, self.metapath_hops = path[0][0], path, len(path)
        self.full_metapath = path * num_traversals
        self.restart_prob = torch.zeros(len(self.full_metapath))
        self.restart_prob[self.metapath_hops :: self.metapath_hops] = termination_prob

    def __call__(self, seed_nodes: Any) -> Graph:
        """The neighbours of some nodes.

        Returns:
            A graph of all nodes of that type, with an edge from each neighbour that was found to
            the node it was found from, those visited most first.
        """
        seeds = start_nodes(self.G, seed_nodes, self.ntype)
        paths, _ = random_walk(
            self.G,
            seeds.repeat_interleave(self.num_random_walks),
            metapath=self.full_metapath,
            restart_prob=self.restart_prob,
        )
        visited = paths[:, self.metapath_hops :: self.metapath_hops].reshape(-1)
        num_visits = self.num_random_walks * self.num_traversals
        seed_rows = torch.arange(len(seeds), device=seeds.device).repeat_interleave(num_visits)
        is_there, num_nodes = visited >= 0, self.G.num_nodes(self.ntype)
        codes, counts = torch.unique(
            seed_rows[is_there] * num_nodes + visited[is_there].long(), return_counts=True
        )
        row, node = codes // max(num_nodes, 1), codes % max(num_nodes, 1)
        sizes = torch.bincount(row, minlength=len(seeds))
        # of equally many visits the smaller id goes first
        order = first_of_rows(row, counts, sizes, max(self.num_neighbors, 0), descending=True)
        src, dst = node[order].to(seeds.dtype), seeds[row[order]]
        neighbors: Graph = heterograph(
            {(self.ntype, "_E", self.ntype): (src, dst)}, {self.ntype: num_nodes}
        )
        neighbors.edata[self.weight_column] = counts[order]
        return neighbors


class PinSAGESampler(RandomWalkNeighborSampler):
    """Neighbours of one type in a graph of two, by walks to the other type and back."""

    def __init__(
        self,
        G: Graph,
        ntype: str,
        other_type: str,
        num_traversals: int,
        termination_prob: float,
        num_random_walks: int,
        num_neighbors: int,
        weight_column: str = "weights",
    ) -> None:
        metapath = []
        for ends in ((ntype, other_type), (other_type, ntype)):
            between = [etype for etype in G.canonical_etypes if (etype[0], etype[2]) == ends]
            if not between:
                raise GraphValueError(
                    f"no relation from {ends[0]!r} to {ends[1]!r}; the graph has "
                    f"{G.canonical_etypes}"
                )
            metapath.append(between[0])
        numbers = num_traversals, termination_prob, num_random_walks, num_neighbors
        super().__init__(G, *numbers, metapath, weight_column)
