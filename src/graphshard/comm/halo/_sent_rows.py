# SPDX-License-Identifier: Apache-2.0
"""SentRows: the rows that one rank reads of another, as the owner finds them in its tensors.

Partitioning puts the nodes that others read side by side, so that most often these are one run of
rows, or few: a run is sent as it lies, without a copy, few are copied one after the other, and
what is scattered is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from ..._memory import empty

Allocate = Callable[[Sequence[int], torch.dtype, torch.device | str], Tensor]

LONG_RUN = 1024
"""Rows of a run, on average, from which on copying runs is faster than gathering rows."""


class SentRows:
    """Rows of a tensor by number, in a fixed order.

    Args:
        index: int64 ``[n]``, on the CPU.
    """

    def __init__(self, index: Tensor) -> None:
        self._index = index
        self._indices = {index.device: index}

    def __len__(self) -> int:
        return self._index.numel()

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """First row and end of each run; empty where there are too many for their length."""
        if len(self) == 0:
            return []
        breaks = (self._index.diff() != 1).nonzero().view(-1) + 1
        if breaks.numel() and len(self) < LONG_RUN * (breaks.numel() + 1):
            return []
        places = [0, *breaks.tolist(), len(self)]
        firsts = self._index[places[:-1]].tolist()
        return [
            (first, first + stop - start)
            for first, (start, stop) in zip(firsts, pairwise(places), strict=True)
        ]

    @property
    def is_slice(self) -> bool:
        """Whether they lie one after the other."""
        return len(self.runs) == 1

    def index_on(self, device: torch.device) -> Tensor:
        """Their numbers on a device; the copy is kept."""
        if device not in self._indices:
            self._indices[device] = self._index.to(device)
        return self._indices[device]

    def of(self, tensor: Tensor, allocate: Allocate | None = None) -> Tensor:
        """``tensor[index]``: a view where that is one piece of memory and no other is asked for.

        Args:
            tensor: ``[num_rows, *]``.
            allocate: Makes the memory for a copy; None leaves it to us.
        """
        if self.is_slice and allocate is None:
            rows = tensor[slice(*self.runs[0])]
            if rows.is_contiguous():
                return rows
        shape = (len(self), *tensor.shape[1:])
        out = (allocate or empty)(shape, tensor.dtype, tensor.device)
        self.copy_to(out, tensor)
        return out

    def copy_to(self, out: Tensor, tensor: Tensor) -> None:
        """Write ``tensor[index]`` to ``out``, which has its shape and dtype."""
        if self.is_slice:
            out.copy_(tensor[slice(*self.runs[0])])
        elif self.runs:
            torch.cat([tensor[start:stop] for start, stop in self.runs], out=out)
        else:
            torch.index_select(tensor, 0, self.index_on(tensor.device), out=out)
