# SPDX-License-Identifier: Apache-2.0
"""node2vec_random_walk: walks that tend to stay near, or to go far, from where they came.

Source: Grover and Leskovec, "node2vec: Scalable Feature Learning for Networks", KDD 2016,
https://arxiv.org/abs/1607.00653. After a step from u to v, the edge to x is drawn in proportion to
its weight times 1/p if x is u, 1 if x is a neighbour of u, and 1/q otherwise. Cost: of the order of
the degrees of the nodes that are passed, since all edges there are weighted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._base.typing import CanonicalEType
from ...errors import GraphValueError
from ...graph import Graph
from ...ops import draw_neighbors
from ...sampling.graph_store import LocalGraphStore, graph_store_of
from ...sampling.sampler import DrawSeed
from ._random_walk import one_step, start_nodes, step_options

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
        g: A graph of this process, of one node type and one relation.
        nodes: ``[n]`` ids of the nodes where walks begin.
        p: The greater, the less likely a walk goes back at once.
        q: The greater, the more likely it stays near; a node x is near the last one, u, if there
            is an edge from x to u.
        walk_length: Number of steps.
        prob: Name of an edge feature ``[num_edges]`` with weights.
        return_eids: Whether ids of edges are wanted.

    Returns:
        ``traces``, or ``(traces, eids)``: ids of nodes ``[n, walk_length + 1]`` and of edges
        ``[n, walk_length]``, -1 where a walk has ended.

    Raises:
        DGLError: Several types, ids out of range, ``p`` or ``q`` not positive, or weights that are
            missing or none.

    Example:
        >>> from graphshard.graph import graph
        >>> node2vec_random_walk(graph(([0, 1, 2], [1, 2, 0])), [0, 1], 1.0, 2.0, 3)
        tensor([[0, 1, 2, 0],
                [1, 2, 0, 1]])
    """
    if len(g.ntypes) != 1 or len(g.canonical_etypes) != 1:
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
    traces = torch.full((len(at), walk_length + 1), -1, dtype=g.idtype, device=g.device)
    eids = torch.full((len(at), walk_length), -1, dtype=g.idtype, device=g.device)
    traces[:, 0] = at
    walks, draw_seed, options = (
        torch.arange(len(at), device=g.device),
        DrawSeed.fresh(),
        step_options(g, etype, prob),
    )
    for step in range(walk_length):
        if len(walks) == 0:
            break
        key = draw_seed.key(step, 0)
        if step == 0:
            moved, at, along = one_step(g, etype, walks, at, options, key)
        else:
            store = graph_store_of(g)
            assert isinstance(store, LocalGraphStore)
            weights = store.placed_weights(etype, options)
            before = traces[walks, step - 1]
            moved, at, along = _biased_step(g, etype, walks, at, before, weights, p, q, key)
        walks = walks[moved]
        traces[walks, step + 1] = at
        eids[walks, step] = along
    return (traces, eids) if return_eids else traces


def _biased_step(
    g: Graph,
    etype: CanonicalEType,
    walks: Tensor,
    at: Tensor,
    before: Tensor,
    weights: Tensor | None,
    p: float,
    q: float,
    key: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `one_step`, for walks that come from ``before``; some walks at a time."""
    store = graph_store_of(g)
    assert isinstance(store, LocalGraphStore)
    lists = store.edge_lists(etype, "out")
    begin, degree = lists.indptr[at].long(), lists.indptr.diff()[at].long()
    ends = degree.cumsum(0)
    none = torch.empty(0, dtype=g.idtype, device=g.device)
    moved, ats, alongs = [walks[:0].bool()], [none], [none]
    first = 0
    while first < len(walks):
        limit = int(ends[first] - degree[first]) + _EDGES_AT_ONCE
        last = max(first + 1, int(torch.searchsorted(ends, limit, right=True)))
        some = degree[first:last]
        indptr = torch.zeros(len(some) + 1, dtype=torch.int64, device=g.device)
        torch.cumsum(some, 0, out=indptr[1:])
        shift = (begin[first:last] - indptr[:-1]).repeat_interleave(some)
        positions = shift + torch.arange(len(shift), device=g.device)
        to = lists.neighbors[positions]
        origin = before[first:last].repeat_interleave(some)
        is_near = g.has_edges_between(to, origin, etype=etype)
        bias = torch.where(is_near, 1.0, 1.0 / q).double()
        bias = torch.where(to == origin, 1.0 / p, bias)
        if weights is not None:
            bias = bias * weights[positions]
        counts, drawn, picked = draw_neighbors(
            indptr,
            torch.arange(len(some), device=g.device),
            1,
            key,
            walks[first:last],
            indices=to,
            replace=True,
            prob=bias,
        )
        moved.append(counts > 0)
        ats.append(picked)
        alongs.append(lists.eids_at(positions[drawn]).to(g.idtype))
        first = last
    return torch.cat(moved), torch.cat(ats), torch.cat(alongs)
