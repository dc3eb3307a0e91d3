# SPDX-License-Identifier: Apache-2.0
"""choose_structure: partitioned or replicated, by argument or by what memory allows."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist

from ..._memory import available_memory
from ...comm import all_reduce, share_error
from ...fullbatch import GraphShardManager
from .._ownership import Ownership
from ._collective import CollectiveStructure
from ._replicated import ReplicatedStructure

Transport = Literal["auto", "collective", "replicated"]

_TRANSPORTS = ("auto", "collective", "replicated")


def choose_structure(
    manager: GraphShardManager,
    transport: Transport = "auto",
    memory_budget: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> CollectiveStructure | ReplicatedStructure:
    """The structure that neighbours are drawn from; every rank must call and gets the same kind.

    Args:
        manager: This rank's part of a full graph.
        transport: ``"collective"``: every rank holds its own part, and draws travel.
            ``"replicated"``: every host holds the whole graph once, and draws send nothing.
            ``"auto"``: replicated if that fits the budget.
        memory_budget: For ``"auto"``: bytes that the whole graph may take on a host; of ranks that
            differ the smallest counts. None: a quarter of what is free on the fullest host.
        group: Who takes part; by default the ranks that share the graph.

    Raises:
        ValueError: An unknown transport, a negative budget, or a message flow graph; on all ranks.
    """
    group = manager.group if group is None else group
    error = None
    if transport not in _TRANSPORTS:
        error = ValueError(f"transport must be one of {', '.join(_TRANSPORTS)} (got {transport!r})")
    elif memory_budget is not None and memory_budget < 0:
        error = ValueError(
            f"memory_budget must be a number of bytes, at least 0 (got {memory_budget})"
        )
    share_error(error, group)
    if transport == "auto":
        budget = available_memory() // 4 if memory_budget is None else memory_budget
        smallest = int(all_reduce(torch.tensor(budget), "min", group))
        transport = "replicated" if replicated_bytes(manager, group) <= smallest else "collective"
    if transport == "replicated":
        return ReplicatedStructure.of(manager, group)
    return CollectiveStructure.of(manager, group)


def replicated_bytes(manager: GraphShardManager, group: dist.ProcessGroup | None = None) -> int:
    """Bytes of the whole graph's in-edges and original ids; the same on all ranks. Collective.

    Raises:
        ValueError: The graph is a message flow graph.
    """
    group = manager.group if group is None else group
    ownership = Ownership.of(manager, group)
    width = ownership.wire_dtype.itemsize
    etypes = manager.canonical_etypes
    # Where edges do not lie in the order of their destinations, their ids are kept as well.
    unordered = torch.tensor([int(_is_unordered(manager, etype)) for etype in etypes])
    unordered = all_reduce(unordered, "max", group)
    size = sum(8 * ownership.ranges[ntype].num_ids for ntype in manager.ntypes)
    for etype, has_eids in zip(etypes, unordered.tolist(), strict=True):
        size += width * (ownership.ranges[etype[2]].num_ids + 1)
        size += width * (1 + has_eids) * ownership.ranges[etype].num_ids
    return size


def _is_unordered(manager: GraphShardManager, etype: tuple[str, str, str]) -> bool:
    dst = manager._structure.edges[etype].dst
    return bool((dst[1:] < dst[:-1]).any())
