# SPDX-License-Identifier: Apache-2.0
"""Exclusion: which edges must not be drawn, because a model is to predict edges of the batch.

They are excluded before neighbours are drawn, not removed afterwards, so that a node that has
enough other neighbours still gets as many as the fanout says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..._base.typing import CanonicalEType, EType
from ..graph_store import GraphStore, graph_store_of
from ._ids import by_relation, checked_ids, only_if_plain, per_kind, relation_named

Exclude: TypeAlias = str | Tensor | Mapping[EType, Tensor] | Callable[[Any], Any] | None
"""``None``, ``"self"``, ``"reverse_id"``, ``"reverse_types"``, edge ids, or a function of ids."""

MODES = ("self", "reverse_id", "reverse_types")


def check_exclude(
    exclude: Exclude,
    reverse_eids: Tensor | Mapping[EType, Tensor] | None,
    reverse_etypes: Mapping[EType, EType] | None,
) -> None:
    """Raise a ValueError where the arguments do not say what to exclude."""
    is_mode = isinstance(exclude, str)
    is_other = exclude is None or callable(exclude) or isinstance(exclude, Tensor | Mapping)
    if not (exclude in MODES if is_mode else is_other):
        raise (ValueError if is_mode else TypeError)(
            f"exclude must be None, one of {list(MODES)}, edge ids, or a function of the batch's "
            f"edge ids (got {repr(exclude) if is_mode else type(exclude).__name__})"
        )
    if is_mode and exclude == "reverse_id" and reverse_eids is None:
        raise ValueError(
            "exclude='reverse_id' needs reverse_eids: for every edge id that of its reverse, "
            "or relation to that"
        )
    if is_mode and exclude == "reverse_types" and reverse_etypes is None:
        raise ValueError(
            "exclude='reverse_types' needs reverse_etypes: from each relation to its reverse"
        )


def edges_to_exclude(
    g: Any,
    seeds: Mapping[CanonicalEType, Tensor],
    as_given: Any,
    exclude: Exclude,
    reverse_eids: Tensor | Mapping[EType, Tensor] | None = None,
    reverse_etypes: Mapping[EType, EType] | None = None,
) -> dict[CanonicalEType, Tensor] | None:
    """Ids of the edges that must not be drawn for a batch of edges.

    Args:
        g: The graph.
        seeds: Ids of the batch's edges.
        as_given: The same as a user's function sees them: a tensor where there is one relation.
        exclude: As for `EdgePredictionSampler`.
        reverse_eids: As for `EdgePredictionSampler`.
        reverse_etypes: As for `EdgePredictionSampler`.

    Raises:
        TypeError: Ids that are no integers, or without a relation on a graph of several.
        ValueError: An unknown relation, or ``reverse_eids`` that has too few ids.
    """
    store = graph_store_of(g)
    if exclude is None:
        return None
    if callable(exclude):
        return _edges_there(store, exclude(as_given), "what exclude returned")
    if not isinstance(exclude, str):
        return _edges_there(store, exclude, "exclude")
    if exclude == "self":
        return dict(seeds)
    if exclude == "reverse_id":
        assert reverse_eids is not None
        return {
            etype: torch.cat([eids, _reverse(g, etype, reverse_eids, eids)])
            for etype, eids in seeds.items()
        }
    assert reverse_etypes is not None
    reverse_of = {
        relation_named(store, there): relation_named(store, back)
        for there, back in reverse_etypes.items()
    }
    found: dict[CanonicalEType, list[Tensor]] = {}
    for etype, eids in seeds.items():
        found.setdefault(etype, []).append(eids)
        if etype in reverse_of:
            back = reverse_of[etype]
            if g.num_edges(back) != g.num_edges(etype):
                raise ValueError(
                    f"reverse_etypes needs relations of equal size, edge e of one being the "
                    f"reverse of edge e of the other (got {g.num_edges(etype)} edges of {etype} "
                    f"and {g.num_edges(back)} of {back})"
                )
            # Partitioning gives the edges of each relation ids of their own.
            reverse_edges = getattr(g, "reverse_edges", None)
            reverses = eids if reverse_edges is None else reverse_edges(eids, etype, back)
            found.setdefault(back, []).append(reverses)
    return {etype: torch.cat(ids) for etype, ids in found.items()}


def _edges_there(store: GraphStore, ids: Any, what: str) -> dict[CanonicalEType, Tensor] | None:
    """As `by_relation`, without ids of no edge: a map may be of a graph that had more edges."""
    if ids is None:
        return None
    found = {}
    for name, values in per_kind(ids, store.canonical_etypes, what, "relation to ids").items():
        etype = relation_named(store, name)
        bound = store.num_edges(etype)
        found[etype] = checked_ids(values, bound, f"{what} of {etype}", store, leave_out=True)
    return found


def find_exclude_eids(
    g: Any,
    seed_edges: Any,
    exclude: Exclude,
    reverse_eids: Tensor | Mapping[EType, Tensor] | None = None,
    reverse_etypes: Mapping[EType, EType] | None = None,
    output_device: torch.device | str | None = None,
) -> Any:
    """Ids of the edges that must not be drawn for some edges.

    Args:
        g: The graph.
        seed_edges: Edge ids, or relation to ids.
        exclude: As for `EdgePredictionSampler`.
        reverse_eids: As for `EdgePredictionSampler`.
        reverse_etypes: As for `EdgePredictionSampler`.
        output_device: Where they shall be; by default where the graph is.

    Returns:
        Ids as ``seed_edges`` are given, plain or by relation; None where ``exclude`` is.

    Raises:
        TypeError: As for `EdgePredictionSampler.sample`.
        ValueError: As for `EdgePredictionSampler.sample`.
    """
    check_exclude(exclude, reverse_eids, reverse_etypes)
    seeds = by_relation(graph_store_of(g), seed_edges, "seed_edges") or {}
    is_plain = not isinstance(seed_edges, Mapping)
    as_given = only_if_plain(seeds) if is_plain else dict(seeds)
    found = edges_to_exclude(g, seeds, as_given, exclude, reverse_eids, reverse_etypes)
    if found is None:
        return None
    if output_device is not None:
        found = {etype: ids.to(output_device) for etype, ids in found.items()}
    return only_if_plain(found) if is_plain else found


def _reverse(
    g: Any, etype: CanonicalEType, reverse_eids: Tensor | Mapping[EType, Tensor], eids: Tensor
) -> Tensor:
    """Ids of the reverses of some edges of a relation.

    What has one row for each edge may be a tensor that lies elsewhere, as a
    `graphshard.servers.DistTensor`, so it is asked for these rows alone.
    """
    store = graph_store_of(g)
    of_relation: Any = reverse_eids
    if isinstance(reverse_eids, Mapping):
        named = {relation_named(store, name): ids for name, ids in reverse_eids.items()}
        if etype not in named:
            raise ValueError(f"reverse_eids has no entry for {etype}; it has {list(named)}")
        of_relation = named[etype]
    if not hasattr(of_relation, "shape"):
        of_relation = torch.as_tensor(of_relation)
    num_edges = store.num_edges(etype)
    if len(of_relation.shape) != 1 or of_relation.shape[0] < num_edges:
        raise ValueError(
            f"reverse_eids must have one id for each of the {num_edges} edges of {etype} (got "
            f"shape {tuple(of_relation.shape)})"
        )
    at = eids.to(of_relation.device) if isinstance(of_relation, Tensor) else eids.cpu()
    found = torch.as_tensor(of_relation[at])
    return checked_ids(found, num_edges, f"reverse_eids of {etype}", store, leave_out=True)
