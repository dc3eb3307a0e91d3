# SPDX-License-Identifier: Apache-2.0
"""A random exchange that every rank can work out for all ranks, for use as an oracle."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graphshard.comm import ExchangePlan

NUM_ROWS = [4, 0, 7, 1, 5]
"""Rows that each rank owns; rank 1 owns none, so nobody can want any of it."""


@dataclass
class Exchange:
    """What every rank owns and wants; ``needed[asker][owner]`` are row numbers at the owner."""

    rank: int
    world_size: int
    needed: list[list[Tensor]]
    plan: ExchangePlan

    @property
    def num_rows(self) -> int:
        return NUM_ROWS[self.rank]

    def values(self, *shape: int, dtype: torch.dtype = torch.float64, seed: int = 1):
        """The same random rows of all ranks, on every rank."""
        generator = torch.Generator().manual_seed(seed)
        whole = 8 * torch.randn(sum(NUM_ROWS), *shape, generator=generator, dtype=torch.float64)
        whole = whole > 0 if dtype == torch.bool else whole.to(dtype)
        return list(whole.split(NUM_ROWS))[: self.world_size]

    def halo_of(self, asker: int, values: list[Tensor]) -> Tensor:
        """What a rank should fetch: plain indexing."""
        parts = [values[o][self.needed[asker][o]] for o in range(self.world_size) if o != asker]
        return torch.cat(parts) if parts else values[0][:0]


def make_exchange(rank: int, world_size: int, idle: int = -1) -> Exchange:
    """Rank ``idle`` wants nothing. The others want some rows of others, in any order, repeated."""
    generator = torch.Generator().manual_seed(7)
    nothing = torch.empty(0, dtype=torch.int64)
    needed = []
    for asker in range(world_size):
        row = []
        for owner in range(world_size):
            count = 0 if owner == asker or NUM_ROWS[owner] == 0 else 3 + (asker + owner) % 3
            wanted = torch.randint(0, max(NUM_ROWS[owner], 1), (count,), generator=generator)
            row.append(nothing if asker == idle else wanted)
        needed.append(row)
    plan = ExchangePlan.build(needed[rank], NUM_ROWS[rank])
    return Exchange(rank, world_size, needed, plan)
