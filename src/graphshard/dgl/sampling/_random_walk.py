# SPDX-License-Identifier: Apache-2.0
"""random_walk: from each node along relations, one edge after another; pack_traces.

A step is one draw of one edge for every walk, by the kernel that draws neighbours: what a walk
draws depends on its place among the walks and on the step, so walks repeat from one seed, whatever
the number of threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..._base.typing import CanonicalEType, EType
from ...errors import GraphTypeError, GraphValueError
from ...graph import Graph
from ...graph.structure import as_integers, check_ids
from ...ops.counter_random import key_state, states, unit, word
from ...sampling.graph_store import DrawOptions, LocalGraphStore, NeighborRequest, graph_store_of
from ...sampling.sampler import DrawSeed

ONE_OUT_EDGE = DrawOptions(replace=True, edge_dir="out")
"""What a step draws."""

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
        g: A graph of this process.
        nodes: ``[n]`` ids of the nodes where walks begin, of the type that the first relation
            leaves; one may be there several times.
        metapath: The relation of each step. It may be left out on a graph of one relation.
        length: Number of steps, where there is no ``metapath``.
        prob: Name of an edge feature ``[num_edges]``; steps are drawn in proportion to it.
            Relations without it are drawn from uniformly.
        restart_prob: With what probability a walk ends before a step: a number for all steps, or
            ``[length]``.
        return_eids: Whether ids of edges are wanted.

    Returns:
        ``(traces, types)``, or with ``return_eids`` ``(traces, eids, types)``: ids of nodes
        ``[n, length + 1]`` and of edges ``[n, length]``, -1 where a walk has ended; and the index
        of the node type at each place, ``[length + 1]``. All have the graph's idtype.

    Raises:
        DGLError: A metapath whose relations do not follow each other, or none where one is needed;
            ids out of range; weights that are none; or another number of probabilities.
        ValueError: Neither ``metapath`` nor ``length``.
        TypeError: ``restart_prob`` is neither a number nor a tensor.

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
    types = torch.tensor(
        [g.get_ntype_id(ntype) for ntype in ntypes], dtype=g.idtype, device=g.device
    )
    return (traces, eids, types) if return_eids else (traces, types)


def walks_along(
    g: Graph,
    at: Tensor,
    path: Sequence[CanonicalEType],
    options: Mapping[CanonicalEType, DrawOptions],
    stops: Tensor | None,
    draw_seed: DrawSeed,
) -> tuple[Tensor, Tensor]:
    """What `random_walk` says, without its checks: nodes and edges of walks.

    Args:
        g: The graph.
        at: ``[n]``, where walks begin, of its idtype.
        path: The relation of each step.
        options: How steps along each relation are drawn, from `step_options`.
        stops: ``[length]``, the probability that a walk ends before each step.
        draw_seed: Which draw to make.
    """
    traces = torch.full((len(at), len(path) + 1), -1, dtype=g.idtype, device=g.device)
    eids = torch.full((len(at), len(path)), -1, dtype=g.idtype, device=g.device)
    traces[:, 0] = at
    walks = torch.arange(len(at), device=g.device)
    for step, etype in enumerate(path):
        if stops is not None:
            key = key_state(draw_seed.key(_STOPS, step), _DOMAIN)
            goes_on = unit(word(states(key, walks), 0)) >= stops[step]
            walks, at = walks[goes_on], at[goes_on]
        if len(walks) == 0:
            break
        moved, at, along = one_step(g, etype, walks, at, options[etype], draw_seed.key(step, 0))
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

    Raises:
        DGLError: They are no tensors, or their shapes do not fit together.

    Example:
        >>> pack_traces(torch.tensor([[0, 1, -1], [2, 0, 1]]), torch.tensor([0, 0, 0]))[2:]
        (tensor([2, 3]), tensor([0, 2]))
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
    """Ids of nodes of a type, in the graph's idtype.

    Raises:
        DGLError: They are no integers, or out of range.
    """
    ids = as_integers(nodes, "nodes")
    check_ids(ids, g.num_nodes(ntype), "a node id", f"nodes of type {ntype!r}")
    return ids.to(device=g.device, dtype=g.idtype)


def step_options(g: Graph, etype: CanonicalEType, prob: str | None) -> DrawOptions:
    """How a step along a relation is drawn: by a feature of its edges, if they have it.

    Raises:
        DGLError: The feature does not have one number per edge.
    """
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw an out-edge for each walk.

    Args:
        g: The graph.
        etype: The relation.
        walks: int64 ``[n]``, the number of each walk, which names its draw.
        at: ``[n]``, where they are.
        options: From `step_options`.
        key: 64 bits that name the step.

    Returns:
        Which walks have moved, bool ``[n]``; where these are, and the edges they took.

    Raises:
        DGLError: The feature holds no weights.
    """
    store = graph_store_of(g)
    assert isinstance(store, LocalGraphStore)
    lists = store.edge_lists(etype, "out")
    try:
        weights = store.placed_weights(etype, options)
    except ValueError as error:
        raise GraphValueError(str(error)) from None
    request = NeighborRequest(etype, at, 1, key)
    counts, positions, picked = lists.draw(
        request, at, walks, options, weights=weights, labor_ids=None, excluded=None
    )
    return counts > 0, picked, lists.eids_at(positions)


def _path(g: Graph, metapath: Sequence[EType] | None, length: int | None) -> list[CanonicalEType]:
    if metapath is None:
        if len(g.canonical_etypes) != 1 or len(g.ntypes) != 1:
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


def _stops(restart_prob: Any, length: int, device: torch.device) -> Tensor | None:
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
