# SPDX-License-Identifier: Apache-2.0
"""Ownership: which rank owns which nodes and edges; splitting ids by owner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from .._ranges import RangeMap
from .._typing import CanonicalEType
from ..comm import share_error
from ..comm.collectives import all_gather
from ..comm.group import group_state
from ..fullbatch import GraphShardManager
from ..ops import group_by_range

Kind: TypeAlias = str | CanonicalEType
"""What rows stand for: nodes of a type, or edges of a relation."""

_INT32_MAX = 2**31 - 1
_FEW_RANKS = 8


@dataclass(frozen=True)
class Ownership:
    """Who owns what of a sharded graph.

    Args:
        rank: This process.
        world_size: Number of processes.
        ranges: Per node type and per relation, the ids that each rank owns.
    """

    rank: int
    world_size: int
    ranges: Mapping[Kind, RangeMap]

    @classmethod
    def of(cls, manager: GraphShardManager, group: dist.ProcessGroup | None = None) -> Ownership:
        """Collective: every rank tells how many nodes and edges it owns.

        Args:
            manager: This rank's part of a full graph.
            group: Who takes part; by default the ranks that share the graph.

        Raises:
            ValueError: The graph is a message flow graph, which holds a selection of rows.
        """
        group = manager.group if group is None else group
        error = None
        if manager.is_block:
            error = ValueError(
                "neighbours and features come from a whole graph (got a message flow graph); make "
                "it with construct_full_graph"
            )
        share_error(error, group)
        sizes: dict[Kind, int] = {t: manager.num_nodes(t) for t in manager.ntypes}
        sizes.update((t, manager.num_edges(t)) for t in manager.canonical_etypes)
        state = group_state(group)
        gathered = all_gather(state, torch.tensor(list(sizes.values()), dtype=torch.int64))
        per_kind = torch.stack(gathered, 1).tolist()
        ranges = {
            kind: RangeMap.from_sizes(owned) for kind, owned in zip(sizes, per_kind, strict=True)
        }
        return cls(state.rank, state.world_size, ranges)

    @property
    def wire_dtype(self) -> torch.dtype:
        """What ids travel as: int32 if no type and no relation has 2^31 or more."""
        fits = all(r.num_ids <= _INT32_MAX for r in self.ranges.values())
        return torch.int32 if fits else torch.int64

    def first(self, kind: Kind) -> int:
        """The smallest id that this rank owns, if it owns any."""
        return self.ranges[kind].starts[self.rank]

    def num_owned(self, kind: Kind) -> int:
        return self.ranges[kind].size(self.rank)

    def by_owner(self, kind: Kind, ids: Tensor) -> ByOwner:
        """Group ids, on the CPU, by the rank that owns them: this rank's own ones last."""
        if self.world_size == 1:
            return ByOwner(None, ids, [0])
        starts = self.ranges[kind].starts
        order, rows, splits = group_by_range(ids, starts, self.rank, self.wire_dtype)
        splits[self.rank] = 0
        return ByOwner(order, rows, splits)


@dataclass(frozen=True)
class ByOwner:
    """Ids grouped by owner: first those of others, in rank order, then this rank's own.

    Args:
        order: int64 ``[n]``, the place that each grouped id had; None where nothing moved.
        rows: ``[n]``, row of each grouped id among those of its owner.
        splits: Number of ids of each rank; 0 in the own slot.
    """

    order: Tensor | None
    rows: Tensor
    splits: list[int]

    @property
    def num_remote(self) -> int:
        return sum(self.splits)

    @property
    def remote_rows(self) -> Tensor:
        """``[num_remote]``: row of each id of others among those of its owner."""
        return self.rows[: self.num_remote]

    @property
    def own_rows(self) -> Tensor:
        """Row of each own id among this rank's."""
        return self.rows[self.num_remote :]

    def places(self) -> tuple[Tensor | None, Tensor | None]:
        """Where the ids of others, and the own ones, stood; None for everywhere."""
        if self.order is None:
            return None, None
        return self.order[: self.num_remote], self.order[self.num_remote :]


def owners(ranges: RangeMap, ids: Tensor) -> Tensor:
    """Owner of each id: uint8 or int16, or wider where there are more ranks."""
    dtype = torch.uint8 if ranges.num_parts < 255 else torch.int32
    if ranges.num_parts > _FEW_RANKS:
        return ranges.part_of(ids).to(dtype)
    owner = torch.zeros(ids.shape, dtype=dtype, device=ids.device)
    for start in ranges.starts[1:-1]:
        owner += ids >= start
    return owner
