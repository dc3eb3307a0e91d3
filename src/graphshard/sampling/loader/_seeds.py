# SPDX-License-Identifier: Apache-2.0
"""SeedOrder: which seeds a rank takes at each step, where every rank has seeds of its own.

All ranks take the same number of steps, which is what the rank with the most seeds needs. Ranks
that run out take empty batches. No seed is taken twice in an epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ..sampler import DrawSeed

_ORDER = -3
"""Stands in `DrawSeed.key` where draws of neighbours have the index of a layer."""


class SeedOrder:
    """The batches of one rank, the same for the same arguments.

    Args:
        seeds: Node type to this rank's ids of it. Types are cut together: a batch has some of each.
        batch_size: Seeds of a full batch.
        shuffle: Take another order every epoch.
        drop_last: Leave out what fills no batch, on each rank by itself.
        seed: Of the order.
        rank: This rank.
        sizes: Number of seeds of each rank, this one's included.
    """

    def __init__(
        self,
        seeds: Mapping[str, Tensor],
        batch_size: int,
        *,
        shuffle: bool,
        drop_last: bool,
        seed: int,
        rank: int,
        sizes: Sequence[int],
    ) -> None:
        self._seeds = dict(seeds)
        self._batch_size, self._shuffle, self._seed, self._rank = batch_size, shuffle, seed, rank
        # How many seeds of each rank are used.
        self._used = [n - n % batch_size if drop_last else n for n in sizes]
        self.num_steps = max(-(-n // batch_size) for n in self._used)
        self._starts = list(accumulate((ids.numel() for ids in seeds.values()), initial=0))
        assert self._starts[-1] == sizes[rank]

    def num_global(self, step: int) -> int:
        """Seeds of all ranks together at a step."""
        return sum(self._num(rank, step) for rank in range(len(self._used)))

    def order(self, epoch: int) -> Tensor | None:
        """The places of this rank's seeds in the order of an epoch; None for their own order."""
        if not self._shuffle:
            return None
        key = DrawSeed(self._seed, epoch).key(_ORDER, self._rank)
        return torch.randperm(self._starts[-1], generator=torch.Generator().manual_seed(key))

    def batch(self, order: Tensor | None, step: int) -> dict[str, Tensor]:
        """Node type to the seeds of a step; every type that has seeds at all has an entry.

        Args:
            order: From `order`.
            step: Which step of the epoch.
        """
        first = min(step * self._batch_size, self._used[self._rank])
        last = first + self._num(self._rank, step)
        if len(self._seeds) == 1:
            ((ntype, ids),) = self._seeds.items()
            return {ntype: ids[first:last] if order is None else _rows(ids, order[first:last])}
        places = torch.arange(first, last) if order is None else order[first:last]
        found = {}
        for (ntype, ids), start in zip(self._seeds.items(), self._starts, strict=False):
            here = places[(places >= start) & (places < start + ids.numel())]
            found[ntype] = _rows(ids, here - start)
        return found

    def _num(self, rank: int, step: int) -> int:
        return max(0, min(self._batch_size, self._used[rank] - step * self._batch_size))


def _rows(ids: Tensor, places: Tensor) -> Tensor:
    return ids.index_select(0, places.to(ids.device))
