# SPDX-License-Identifier: Apache-2.0
"""Where a `DataLoader`'s neighbours and feature rows come from."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ...comm.collectives import all_gather
from ...comm.group import GroupState
from ...fullbatch import GraphShardManager
from ...graph import Graph
from .._ownership import Ownership
from ..feature_store import CachedRows, CollectiveRows, FeaturePlan, LocalRows, MappedRows, Rows
from ..graph_store import (
    CollectiveStructure,
    LocalStructure,
    ReplicatedStructure,
    Transport,
    choose_structure,
)
from ..sampler import DrawSeed, NeighborSampler

AnyStructure = LocalStructure | CollectiveStructure | ReplicatedStructure

# A structure can be as large as the graph, so the loaders of one graph share it.
_kept: weakref.WeakKeyDictionary[GraphShardManager, dict[tuple[str, int | None], AnyStructure]]
_kept = weakref.WeakKeyDictionary()


def structure_for(
    graph: GraphShardManager | Graph, transport: Transport, budget: int | None
) -> AnyStructure:
    """The structure of a graph, the same one for the same arguments; collective.

    Raises:
        ValueError: As `choose_structure`.
    """
    if isinstance(graph, Graph):
        return LocalStructure.of(graph)
    kept = _kept.setdefault(graph, {})
    if graph.world_size == 1:
        transport = "collective"  # which is to say: from its own memory
    if (transport, budget) not in kept:
        kept[transport, budget] = choose_structure(graph, transport, budget)
    return kept[transport, budget]


def rows_for(
    graph: GraphShardManager | Graph, plan: FeaturePlan, map_features: bool, cache_bytes: int
) -> Rows | None:
    """The source of the features, None where there are none; collective."""
    if not plan.tables:
        return None
    if isinstance(graph, Graph) or graph.world_size == 1:
        return LocalRows(plan.tables)
    rows: Rows = (MappedRows if map_features else CollectiveRows)(graph, plan.tables)
    if cache_bytes:
        rows = CachedRows(rows, Ownership.of(graph).ranges, cache_bytes, graph.group)
    return rows


def share_sizes(state: GroupState, num_seeds: int, seed: int | None) -> tuple[list[int], int]:
    """Every rank's number of seeds, and the random seed of all; collective."""
    if seed is None:
        seed = DrawSeed.fresh().seed if state.rank == 0 else 0
    both = all_gather(state, torch.tensor([num_seeds, seed]), "DataLoader")
    return [int(each[0]) for each in both], int(both[0][1])


def check_options(
    graph: GraphShardManager | Graph,
    sampler: NeighborSampler,
    batch_size: int,
    seed: int | None,
    prefetch: int,
    cache_bytes: int,
) -> None:
    """Raise unless the arguments of a loader make sense by themselves.

    Raises:
        TypeError: Not a sampler that can draw from a sharded graph.
        ValueError: A message flow graph, or a number out of range.
    """
    if not isinstance(sampler, NeighborSampler):
        raise TypeError(
            "sampler must be a DistNeighborSampler or another NeighborSampler (got "
            f"{type(sampler).__name__}); graphshard.dataloading.DataLoader takes any sampler, for "
            "a graph that is whole in this process"
        )
    if graph.is_block:
        raise ValueError(
            "graph must be a whole graph (got a message flow graph); make it with "
            "construct_full_graph"
        )
    for name, number, least in (
        ("batch_size", batch_size, 1),
        ("prefetch", prefetch, 0),
        ("cache_bytes", cache_bytes, 0),
    ):
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise ValueError(f"{name} must be an integer of at least {least} (got {number!r})")
    if seed is not None and not (isinstance(seed, int) and -(2**63) <= seed < 2**63):
        raise ValueError(f"seed must be a 64-bit integer, or None (got {seed!r})")


def describe(sampler: Any) -> str:
    """What must be equal on all ranks."""
    fields = "fanouts edge_dir prob mask replace layer_dependency batch_dependency".split()
    values = [f"{name}={getattr(sampler, name)!r}" for name in fields if hasattr(sampler, name)]
    return f"{type(sampler).__name__}({', '.join(values)})"
