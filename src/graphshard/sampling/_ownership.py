# SPDX-License-Identifier: Apache-2.0
"""Ownership: which rank owns which nodes and edges; ids by owner, and the sizes of requests.

Every request of the stores begins alike: ids are grouped by the rank that owns them, and each rank
tells each other one how many follow.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from .._base.ranges import RangeMap
from .._base.typing import CanonicalEType
from ..comm import share_error
from ..comm.collectives import all_gather, all_to_all, verify
from ..comm.group import GroupState, group_state
from ..fullbatch import GraphShardManager
from ..ops import group_by_range

RowKind: TypeAlias = str | CanonicalEType
"""What rows stand for: nodes of a type, or edges of a relation."""

_INT32_MAX = 2**31 - 1

_FAILED = 1
_HEAD = 2
_MOST_SIGNATURES = 2**31


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
    ranges: Mapping[RowKind, RangeMap]

    @classmethod
    def of(cls, manager: GraphShardManager) -> Ownership:
        """Of a full graph; collective: every rank says how many nodes and edges it owns.

        Raises:
            ValueError: The graph is a message flow graph, which holds a selection of rows.
        """
        error = None
        if manager.is_block:
            error = ValueError(
                "neighbours and features come from a whole graph (got a message flow graph); make "
                "it with construct_full_graph"
            )
        share_error(error, manager.group)
        sizes: dict[RowKind, int] = {t: manager.num_nodes(t) for t in manager.ntypes}
        sizes.update((t, manager.num_edges(t)) for t in manager.canonical_etypes)
        state = group_state(manager.group)
        gathered = all_gather(state, torch.tensor(list(sizes.values()), dtype=torch.int64))
        per_kind = torch.stack(gathered, 1).tolist()
        ranges = {
            kind: RangeMap.from_sizes(owned) for kind, owned in zip(sizes, per_kind, strict=True)
        }
        return cls(state.rank, state.world_size, ranges)

    @cached_property
    def wire_dtype(self) -> torch.dtype:
        """What ids travel as: int32 if no type and no relation has 2^31 or more."""
        fits = all(r.num_ids <= _INT32_MAX for r in self.ranges.values())
        return torch.int32 if fits else torch.int64

    def first(self, kind: RowKind) -> int:
        """The smallest id that this rank owns, if it owns any."""
        return self.ranges[kind].starts[self.rank]

    def num_owned(self, kind: RowKind) -> int:
        return self.ranges[kind].size(self.rank)

    def by_owner(self, kind: RowKind, ids: Tensor) -> IdsByOwner:
        """Group ids, on the CPU, by the rank that owns them: this rank's own ones last."""
        if self.world_size == 1:
            return IdsByOwner(None, ids, [0])
        starts = self.ranges[kind].starts
        order, rows, splits = group_by_range(ids, starts, self.rank, self.wire_dtype)
        splits[self.rank] = 0
        return IdsByOwner(order, rows, splits)


@dataclass(frozen=True)
class IdsByOwner:
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

    @property
    def remote_places(self) -> Tensor:
        """The place that each id of others had."""
        assert self.order is not None
        return self.order[: self.num_remote]

    @property
    def own_places(self) -> Tensor | None:
        """The place that each own id had; None where nothing moved."""
        return None if self.order is None else self.order[self.num_remote :]


def exchange_sizes(
    state: GroupState,
    what: str,
    signature: str,
    error: Exception | None,
    sizes: Tensor,
    lacking: int = 0,
) -> tuple[Tensor, int]:
    """Exchange the sizes of what follows; every rank must call.

    It carries besides what would else cost a collective of its own: that a rank's check has
    failed, that ranks ask for different things, and that some rank lacks something which only all
    ranks together can make. A rank sends ``4 (2 + k)`` bytes to each other one.

    Args:
        state: The group.
        what: What the round is, for errors: "what neighbours are drawn".
        signature: What must be equal on all ranks.
        error: What this rank's check found, or None.
        sizes: int64 ``[world_size, k]``, for each rank k numbers below 2^31.
        lacking: Bits that say what this rank lacks.

    Returns:
        int64 ``[world_size, k]``, what each rank has for this one; and the bits that any rank has
        set, this one included.

    Raises:
        Exception: On every rank, what a rank's check found; see `graphshard.comm.share_error`.
        ValueError: On every rank, if the signatures differ.
    """
    if state.world_size == 1:
        if error is not None:
            raise error
        return sizes, lacking
    check = zlib.crc32(signature.encode(errors="surrogatepass")) % _MOST_SIGNATURES
    words = torch.empty((state.world_size, _HEAD + sizes.shape[1]), dtype=torch.int32)
    words[:, 0] = lacking * 2 + (_FAILED if error is not None else 0)
    words[:, 1] = check
    words[:, _HEAD:] = sizes
    splits = [words.shape[1]] * state.world_size
    arrived = all_to_all(state, words.view(-1), splits, splits, what).view_as(words)
    flags = 0
    for word in arrived[:, 0].tolist():
        flags |= word
    if flags & _FAILED or bool((arrived[:, 1] != check).any()):
        verify(state, signature, what, error)
    return arrived[:, _HEAD:].to(torch.int64), flags // 2


def same_ranks(state: GroupState, group: dist.ProcessGroup | None) -> GroupState:
    """The state of a group that must have the ranks of another one, in the same order.

    Raises:
        ValueError: It has not.
    """
    new = group_state(group)
    if new.members != state.members:
        raise ValueError(
            f"the group must have the ranks {list(state.members)} in this order (got "
            f"{list(new.members)}); make it with torch.distributed.new_group of all of them"
        )
    return new
