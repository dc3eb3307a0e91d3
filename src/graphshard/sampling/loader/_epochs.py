# SPDX-License-Identifier: Apache-2.0
"""EpochOrder: which indices each step of an epoch takes, on each of several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..sampler import DrawSeed

ORDER = -2
"""Stands in `DrawSeed.key` where draws of neighbours have the index of a layer."""


class EpochOrder:
    """Cuts indices into batches; the same for the same arguments, wherever it runs.

    On one rank batches are full, besides the last. On several, all batches of an epoch have the
    same size up to one: then the mean that data-parallel training takes over ranks is the mean over
    indices, and no rank is without any unless there are too few for all. No index is repeated.

    Args:
        indices: ``[n, ...]`` indices, or type to indices, which are cut together: a batch has those
            types that it happens to have.
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
        self._indices = {key: _tensor(values, key) for key, values in by_type.items()}
        self._shuffle, self._seed = shuffle, seed
        self._rank, self._num_ranks, self._batch_size = rank, num_ranks, batch_size
        self.num_indices = sum(len(values) for values in self._indices.values())
        per_step = batch_size * num_ranks
        self._num_steps = self.num_indices // per_step
        self._cut = self._num_steps * per_step  # how many indices are used
        if not drop_last and self._cut < self.num_indices:
            self._num_steps, self._cut = self._num_steps + 1, self.num_indices

    def __len__(self) -> int:
        """Steps of an epoch, the same on all ranks."""
        return self._num_steps

    def of_epoch(self, epoch: int) -> Tensor | None:
        """The places of all indices in the order of an epoch; None for their own order."""
        if not self._shuffle:
            return None
        # A generator's seed is 64 bits with or without a sign; torch takes either.
        generator = torch.Generator().manual_seed(DrawSeed(self._seed, epoch).key(ORDER, 0))
        return torch.randperm(self.num_indices, generator=generator)

    def batch(self, order: Tensor | None, step: int) -> Any:
        """The indices of one step: a tensor, or type to tensor, as they were given.

        Args:
            order: From `of_epoch`.
            step: Which step of the epoch.
        """
        start, stop = self._bounds(step)
        places = torch.arange(start, stop) if order is None else order[start:stop]
        if not self._typed:
            values = self._indices[None]
            return values[start:stop] if order is None else _rows(values, places)
        found, first = {}, 0
        for key, values in self._indices.items():
            here = places[(places >= first) & (places < first + len(values))]
            if here.numel():
                found[key] = _rows(values, here - first)
            first += len(values)
        return found

    def _bounds(self, step: int) -> tuple[int, int]:
        if self._num_ranks == 1:
            return step * self._batch_size, min((step + 1) * self._batch_size, self._cut)
        part, num_parts = step * self._num_ranks + self._rank, self._num_steps * self._num_ranks
        return part * self._cut // num_parts, (part + 1) * self._cut // num_parts


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
