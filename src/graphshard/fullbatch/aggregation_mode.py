# SPDX-License-Identifier: Apache-2.0
"""AggregationMode: how a sharded graph fetches remote rows."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from .._base.config import Config
from .._base.memory import available_memory
from ..comm import agree
from ..comm.collectives import WIRE_DTYPES, all_reduce_alike
from ..plan import budget_of, fits_oneshot

ModeName = Literal["sequential", "oneshot", "auto"]

_CPU = torch.device("cpu")
_MODES = ("sequential", "oneshot", "auto")


@dataclass(frozen=True, kw_only=True)
class AggregationMode:
    """How a sharded graph fetches remote rows.

    Args:
        mode: ``"sequential"``: one remote shard at a time, the next one on its way (memory falls
            as 1/P). ``"oneshot"``: the whole halo in one exchange (fastest, any reduction).
            ``"auto"``: one-shot if its halo fits the budget on every rank.
        rematerialize: With sequential aggregation, fetch again in the backward; False keeps what
            was fetched: less communication, more memory. None is what `Config.disable_sr` says
            when a layer runs.
        memory_budget: Bytes that the halo rows of one rank may take, for ``"auto"``; None: a
            quarter of the memory that is left (see `available_memory`; of its GPU, for a graph on
            one), shared by the ranks on the machine (on the GPU).
        row_width: Columns of the widest float32 row that will be exchanged, for ``"auto"``.
        prefetch: With sequential aggregation, remote shards that are fetched while another one is
            computed (blocks of them, where wide rows are taken block by block): the memory of
            that many shards is added. 0 is none: each shard is waited for. With one-shot
            aggregation the halo is one; it is fetched while the own shard is computed, unless
            this is 0. Threads of the communication backend move the rows, not those that compute.
            None is what `Config.pipeline_depth` says when a layer runs.
        partial_sums: Send sums of rows in place of rows where that is fewer: of messages that are
            summed or averaged; and between hosts in one-shot mode, of attention, states of
            destinations. The result is the same up to the order of additions.
        halo_dtype: ``torch.bfloat16`` or ``torch.float16``: wider floating-point rows of remote
            nodes, and their gradients on the way back, travel in it and are rounded to it; a
            rank's own rows are not. ``torch.int8``: with a scale for each row, and rounded up or
            down at random, so that the expectation is exact. None sends them as they are.
    """

    mode: ModeName = "auto"
    rematerialize: bool | None = None
    memory_budget: int | None = None
    row_width: int = 256
    prefetch: int | None = None
    halo_dtype: torch.dtype | None = None
    partial_sums: bool = True

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise ValueError(f"mode must be one of {', '.join(_MODES)} (got {self.mode!r})")
        if self.memory_budget is not None and self.memory_budget < 0:
            raise ValueError(
                f"memory_budget must be a number of bytes, at least 0 (got {self.memory_budget})"
            )
        if self.row_width < 1:
            raise ValueError(f"row_width must be at least 1 (got {self.row_width})")
        if self.prefetch is not None and self.prefetch < 0:
            raise ValueError(f"prefetch must be at least 0 (got {self.prefetch})")
        if self.halo_dtype is not None and self.halo_dtype not in WIRE_DTYPES:
            raise ValueError(
                "halo_dtype must be None or one of "
                f"{', '.join(map(str, WIRE_DTYPES))} (got {self.halo_dtype})"
            )

    @property
    def rematerializes(self) -> bool:
        """Whether a layer that runs now fetches again in its backward."""
        return not Config.disable_sr if self.rematerialize is None else self.rematerialize

    @property
    def fetched_ahead(self) -> int:
        """Remote shards that a layer that runs now fetches while it computes another one."""
        return max(0, Config.pipeline_depth) if self.prefetch is None else self.prefetch

    def agree(self, group: dist.ProcessGroup | None) -> None:
        """Check that all ranks chose alike; collective. The budget may differ.

        Raises:
            ValueError: On every rank, if they did not.
        """
        value = f"mode={self.mode}, rematerialize={self.rematerializes}, "
        value += f"prefetch={self.fetched_ahead}, halo_dtype={self.halo_dtype}, "
        value += f"partial_sums={self.partial_sums}"
        agree(value, "how remote rows are fetched", group)

    def resolve(
        self, num_halo_rows: int, group: dist.ProcessGroup | None, device: torch.device = _CPU
    ) -> ModeName:
        """``"sequential"`` or ``"oneshot"``, the same on every rank; collective for ``"auto"``.

        Args:
            num_halo_rows: Rows that this rank would hold in one-shot mode.
        """
        if self.mode != "auto":
            return self.mode
        budget = self.memory_budget
        if budget is None:
            budget = budget_of(_memory_of_a_rank(device))
        is_too_large = not fits_oneshot(num_halo_rows, self.row_width, budget)
        too_large = all_reduce_alike(torch.tensor([int(is_too_large)]), group=group)
        return "sequential" if int(too_large[0]) else "oneshot"


def _memory_of_a_rank(device: torch.device) -> int:
    """Bytes that are left for this rank where its graph is."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1  # on this machine
    if "LOCAL_WORLD_SIZE" in os.environ:
        num_ranks = max(int(os.environ["LOCAL_WORLD_SIZE"]), 1)
    if device.type != "cuda":
        return available_memory() // num_ranks
    free, _ = torch.cuda.mem_get_info(device)
    # What torch has taken from the device and does not use now is left, too.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free // -(-num_ranks // torch.cuda.device_count())
