# SPDX-License-Identifier: Apache-2.0
"""BatchOrder: which indices each step of an epoch takes; the same for the same arguments.

`SplitOrder` shares indices that all ranks have among them. In `SeedOrder` every rank has indices of
its own. No index is repeated in either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..sampler import DrawSeed

# In the place of a layer's index in `DrawSeed.key`.
_SPLIT_KEY, _SEEDS_KEY = -2, -3


class BatchOrder:
    """Base of both.

    Args:
        indices: Type to ``[n, ...]`` indices. Types are cut together: a batch has some of each.
        shuffle: Take another order every epoch.
        seed: Of the order.
        key: What tells orders of one seed apart, see `DrawSeed.key`.

    Attributes:
        num_steps: Steps of an epoch, the same on all ranks.
        num_indices: Of all types.
    """

    num_steps: int

    def __init__(
        self, indices: Mapping[Any, Tensor], shuffle: bool, seed: int, key: tuple[int, int]
    ) -> None:
        self._indices = dict(indices)
        self._shuffle, self._seed, self._key = shuffle, seed, key
        self.num_indices = sum(len(values) for values in self._indices.values())

    def __len__(self) -> int:
        return self.num_steps

    def of_epoch(self, epoch: int) -> Tensor | None:
        """The places of all indices in the order of an epoch; None for their own order."""
        if not self._shuffle:
            return None
        # A generator's seed is 64 bits with or without a sign; torch takes either.
        generator = torch.Generator().manual_seed(DrawSeed(self._seed, epoch).key(*self._key))
        return torch.randperm(self.num_indices, generator=generator)

    def _taken(self, order: Tensor | None, start: int, stop: int) -> dict[Any, Tensor]:
        """The indices at places ``[start, stop)`` of an order, by type."""
        if len(self._indices) == 1:
            ((key, values),) = self._indices.items()
            return {key: values[start:stop] if order is None else _rows(values, order[start:stop])}
        places = torch.arange(start, stop) if order is None else order[start:stop]
        found, first = {}, 0
        for key, values in self._indices.items():
            here = places[(places >= first) & (places < first + len(values))]
            found[key] = _rows(values, here - first)
            first += len(values)
        return found


class SplitOrder(BatchOrder):
    """Batches of indices that are shared among ranks.

    On one rank batches are full, besides the last. On several, all batches of an epoch have the
    same size up to one: then the mean that data-parallel training takes over ranks is the mean over
    indices, and no rank is without any unless there are too few for all.

    Args:
        indices: ``[n, ...]`` indices, or type to indices; a batch has those types that it happens
            to have.
        batch_size: The most that a batch holds.
        shuffle: Take another order every epoch.
        drop_last: Leave out what fills no batch of ``batch_size`` on every rank.
        seed: Of the order.
        rank: Whose batches these are.
        num_ranks: Among how many ranks the indices are shared.

    Raises:
        TypeError: The indices are nothing that a tensor can be made of, or a bool mask.
        ValueError: ``batch_size`` is not positive.
    """

    def __init__(
        self,
        indices: Any,
        batch_size: int,
        shuffle: bool,
        drop_last: bool,
        seed: int,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
            raise ValueError(f"batch_size must be a positive number (got {batch_size!r})")
        self._typed = isinstance(indices, Mapping)
        by_type = indices if self._typed else {None: indices}
        tensors = {key: _tensor(values, key) for key, values in by_type.items()}
        super().__init__(tensors, shuffle, seed, (_SPLIT_KEY, 0))
        self._rank, self._num_ranks, self._batch_size = rank, num_ranks, batch_size
        self._is_even = num_ranks > 1
        per_step = batch_size * num_ranks
        self.num_steps = self.num_indices // per_step
        self._used = self.num_steps * per_step
        if not drop_last and self._used < self.num_indices:
            self.num_steps, self._used = self.num_steps + 1, self.num_indices

    def cut_evenly(self, num_steps: int) -> None:
        """Take ``num_steps`` batches of one size, up to one, in the place of fewer full ones."""
        if num_steps > self.num_steps:
            self.num_steps, self._is_even = num_steps, True

    def batch(self, order: Tensor | None, step: int) -> Any:
        """The indices of one step: a tensor, or type to tensor, as they were given.

        Args:
            order: From `of_epoch`.
            step: Which step of the epoch.
        """
        if not self._is_even:
            start = step * self._batch_size
            stop = min(start + self._batch_size, self._used)
        else:
            part, num_parts = step * self._num_ranks + self._rank, self.num_steps * self._num_ranks
            start, stop = (p * self._used // num_parts for p in (part, part + 1))
        found = self._taken(order, start, stop)
        return {k: ids for k, ids in found.items() if len(ids)} if self._typed else found[None]


class SeedOrder(BatchOrder):
    """Batches of one rank, where every rank has seeds of its own.

    All ranks take the same number of steps, which is what the rank with the most seeds needs. Ranks
    that run out take empty batches.

    Args:
        seeds: Node type to this rank's ids of it.
        batch_size: Seeds of a full batch.
        shuffle: Take another order every epoch.
        drop_last: Leave out what fills no batch, on each rank by itself.
        seed: Of the order.
        rank: This rank.
        sizes: Number of seeds of each rank, this one's included.
        by_id: Batches are runs of ascending ids, the same in every epoch; ``shuffle`` then shuffles
            full batches. Parts keep neighbours at near ids, so the batches of an epoch read fewer
            distinct nodes.
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
        by_id: bool = False,
    ) -> None:
        if by_id:
            seeds = {ntype: ids.sort().values for ntype, ids in seeds.items()}
        super().__init__(seeds, shuffle, seed, (_SEEDS_KEY, rank))
        self._by_id = by_id
        assert self.num_indices == sizes[rank]
        self._batch_size, self._rank = batch_size, rank
        # How many seeds of each rank are used.
        self._used = [n - n % batch_size if drop_last else n for n in sizes]
        self.num_steps = max(-(-n // batch_size) for n in self._used)

    def of_epoch(self, epoch: int) -> Tensor | None:
        order = super().of_epoch(epoch)
        if order is None or not self._by_id:
            return order
        num_full = self.num_indices // self._batch_size * self._batch_size
        places = torch.arange(self.num_indices)
        batches = places[:num_full].view(-1, self._batch_size)
        # Batches are ordered as their first seeds are in a random order of all seeds.
        rank_of = torch.empty_like(places)
        rank_of[order] = places
        batches = batches[rank_of[batches[:, 0]].argsort()] if num_full else batches
        return torch.cat([batches.reshape(-1), places[num_full:]])

    def num_global(self, step: int) -> int:
        """Seeds of all ranks together at a step."""
        return sum(self._num(rank, step) for rank in range(len(self._used)))

    def batch(self, order: Tensor | None, step: int) -> dict[str, Tensor]:
        """Node type to the seeds of a step; every type that has seeds at all has an entry.

        Args:
            order: From `of_epoch`.
            step: Which step of the epoch.
        """
        first = min(step * self._batch_size, self._used[self._rank])
        return self._taken(order, first, first + self._num(self._rank, step))

    def _num(self, rank: int, step: int) -> int:
        return max(0, min(self._batch_size, self._used[rank] - step * self._batch_size))


def _rows(values: Tensor, places: Tensor) -> Tensor:
    return values.index_select(0, places.to(values.device))


def _tensor(values: Any, key: Any) -> Tensor:
    of = "" if key is None else f" of {key!r}"
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"indices{of} must be a tensor or something that one can be made of (got "
            f"{type(values).__name__}: {error})"
        ) from None
    if tensor.dtype == torch.bool:
        raise TypeError(f"indices{of} must not be a mask of bools; use mask.nonzero().view(-1)")
    if tensor.dim() == 0:
        raise TypeError(f"indices{of} must have a dimension to cut into batches (got {values!r})")
    if tensor.numel() == 0 and tensor.is_floating_point():
        return tensor.to(torch.int64)  # what torch makes of an empty list
    return tensor
