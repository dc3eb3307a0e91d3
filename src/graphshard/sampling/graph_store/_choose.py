# SPDX-License-Identifier: Apache-2.0
"""graph_store_of: the one store that everything draws from that is made for a graph."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch

from ..._base.memory import available_memory
from ...comm import all_reduce, share_error
from ...fullbatch import GraphShardManager
from ...graph import Graph
from .._ownership import Ownership
from ._collective import CollectiveGraphStore
from ._graph_store import GraphStore, is_graph_store
from ._local import LocalGraphStore
from ._replicated import ReplicatedGraphStore

SamplingTransport: TypeAlias = Literal["auto", "collective", "replicated"]

_TRANSPORTS = ("auto", "collective", "replicated")
_KEPT = "_graph_stores"


@dataclass
class _StoresOf:
    """Stores of one graph, kept with it: each may be as large as the graph."""

    graph: weakref.ref[Any]
    stores: dict[Any, GraphStore] = field(default_factory=dict)

    def __deepcopy__(self, memo: Any) -> None:
        return None  # the copied graph has stores of its own


def graph_store_of(
    graph: Any, transport: SamplingTransport = "collective", memory_budget: int | None = None
) -> GraphStore:
    """The store to draw from: the same one for the same arguments, made when first asked for.

    Args:
        graph: A `Graph`; a `GraphShardManager` (then collective); a `GraphStore` itself; or what
            has one, as ``graph_store``.
        transport: As for `choose_graph_store`, of a sharded graph.
        memory_budget: As for `choose_graph_store`.

    Raises:
        TypeError: Something else.
        ValueError: As for `choose_graph_store`.
    """
    if not isinstance(graph, Graph | GraphShardManager):
        graph = getattr(graph, "graph_store", graph)
        if is_graph_store(graph):
            store: GraphStore = graph
            return store
        raise TypeError(
            "graph must be a GraphShardManager, a Graph or a GraphStore (got "
            f"{type(graph).__name__})"
        )
    kept = vars(graph).get(_KEPT)
    if not isinstance(kept, _StoresOf) or kept.graph() is not graph:  # copied from another graph
        kept = vars(graph)[_KEPT] = _StoresOf(weakref.ref(graph))
    stores = kept.stores
    if isinstance(graph, Graph):
        local = stores.get("local")
        if not isinstance(local, LocalGraphStore) or not local.is_current:
            local = stores["local"] = LocalGraphStore(graph)
        return local
    if graph.world_size == 1:
        transport = "collective"  # which is to say: from its own memory
    if transport not in stores and (transport, memory_budget) not in stores:
        chosen = choose_graph_store(graph, transport, memory_budget)
        kind = "replicated" if isinstance(chosen, ReplicatedGraphStore) else "collective"
        stores[transport, memory_budget] = stores.setdefault(kind, chosen)
    return stores.get(transport) or stores[transport, memory_budget]


def choose_graph_store(
    manager: GraphShardManager,
    transport: SamplingTransport = "auto",
    memory_budget: int | None = None,
) -> CollectiveGraphStore | ReplicatedGraphStore:
    """A store that neighbours are drawn from; every rank must call and gets the same kind.

    Args:
        manager: This rank's part of a full graph.
        transport: ``"collective"``: every rank holds its own part, and draws travel.
            ``"replicated"``: every host holds the whole graph once, and draws send nothing.
            ``"auto"``: replicated if that fits the budget.
        memory_budget: For ``"auto"``: bytes that the whole graph may take on a host; of ranks that
            differ the smallest counts. None: a quarter of what is free on the fullest host.

    Raises:
        ValueError: An unknown transport, a negative budget, or a message flow graph; on all ranks.
    """
    error = None
    if transport not in _TRANSPORTS:
        error = ValueError(f"transport must be one of {', '.join(_TRANSPORTS)} (got {transport!r})")
    elif memory_budget is not None and memory_budget < 0:
        error = ValueError(
            f"memory_budget must be a number of bytes, at least 0 (got {memory_budget})"
        )
    share_error(error, manager.group)
    if transport == "auto":
        budget = available_memory() // 4 if memory_budget is None else memory_budget
        smallest = int(all_reduce(torch.tensor(budget), "min", group=manager.group))
        transport = "replicated" if replicated_bytes(manager) <= smallest else "collective"
    if transport == "replicated":
        return ReplicatedGraphStore.of(manager)
    return CollectiveGraphStore.of(manager)


def replicated_bytes(manager: GraphShardManager) -> int:
    """Bytes of the whole graph's in-edges and original ids; the same on all ranks. Collective.

    Raises:
        ValueError: The graph is a message flow graph.
    """
    ownership = Ownership.of(manager)
    width = ownership.wire_dtype.itemsize
    # Where edges are not sorted by destination, their ids are kept as well.
    ends = [manager._structure.edges[etype].dst for etype in manager.canonical_etypes]
    unordered = torch.tensor([int((dst[1:] < dst[:-1]).any()) for dst in ends])
    unordered = all_reduce(unordered, "max", group=manager.group)
    size = sum(8 * ownership.ranges[ntype].num_ids for ntype in manager.ntypes)
    for etype, has_eids in zip(manager.canonical_etypes, unordered.tolist(), strict=True):
        size += width * (ownership.ranges[etype[2]].num_ids + 1)
        size += width * (1 + has_eids) * ownership.ranges[etype].num_ids
    return size
