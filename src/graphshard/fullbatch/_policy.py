# SPDX-License-Identifier: Apache-2.0
"""AggregationMode: how remote rows are fetched, and the choice of it from a memory budget."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from ..comm import all_reduce

ModeName = Literal["sequential", "oneshot", "auto"]

_MODES = ("sequential", "oneshot", "auto")
#: Layers whose halo rows are alive at once in a one-shot backward, a guess for the usual models.
_LAYERS_ALIVE = 3


@dataclass(frozen=True, kw_only=True)
class AggregationMode:
    """How a sharded graph fetches remote rows.

    Args:
        mode: ``"sequential"``: one remote shard at a time, the next one on its way (memory falls
            as 1/P). ``"oneshot"``: the whole halo in one exchange (fastest, any reduction).
            ``"auto"``: one-shot if its halo fits the budget on every rank.
        rematerialize: With sequential aggregation, fetch again in the backward; False keeps what
            was fetched: less communication, more memory.
        memory_budget: Bytes that the halo rows of one rank may take, for ``"auto"``; None: a
            quarter of the free memory of the machine, shared by the ranks on it.
        row_width: Columns of the widest float32 row that will be exchanged, for ``"auto"``.
    """

    mode: ModeName = "auto"
    rematerialize: bool = True
    memory_budget: int | None = None
    row_width: int = 256

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise ValueError(f"mode must be one of {', '.join(_MODES)} (got {self.mode!r})")
        if self.memory_budget is not None and self.memory_budget < 0:
            raise ValueError(
                f"memory_budget must be a number of bytes, at least 0 (got {self.memory_budget})"
            )
        if self.row_width < 1:
            raise ValueError(f"row_width must be at least 1 (got {self.row_width})")

    def resolve(self, num_halo_rows: int, group: dist.ProcessGroup | None) -> ModeName:
        """``"sequential"`` or ``"oneshot"``, the same on every rank; collective for ``"auto"``.

        Args:
            num_halo_rows: Rows that this rank would hold in one-shot mode.
            group: The ranks that share the graph.
        """
        if self.mode != "auto":
            return self.mode
        budget = self.memory_budget
        if budget is None:
            budget = _free_memory() // 4 // _ranks_on_this_machine()
        needed = num_halo_rows * self.row_width * 4 * _LAYERS_ALIVE
        too_large = all_reduce(torch.tensor([int(needed > budget)]), group=group)
        return "sequential" if int(too_large[0]) else "oneshot"


def _free_memory() -> int:
    """Bytes that this machine can still give to processes."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _ranks_on_this_machine() -> int:
    local = os.environ.get("LOCAL_WORLD_SIZE")
    if local is not None:
        return max(int(local), 1)
    return dist.get_world_size() if dist.is_initialized() else 1
