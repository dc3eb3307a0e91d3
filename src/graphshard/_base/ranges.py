# SPDX-License-Identifier: Apache-2.0
"""RangeMap: contiguous id ranges, one per part.

Ids are relabelled so that part ``p`` owns ``[starts[p], starts[p + 1])``; finding the owner of an
id is then a binary search in ``num_parts + 1`` numbers, whatever the number of nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class RangeMap:
    """Maps a global id to (part, local id) and back.

    Args:
        starts: ``num_parts + 1`` ascending numbers, the first of them 0; part ``p`` owns the ids
            from ``starts[p]`` up to but not including ``starts[p + 1]``. Parts may be empty.
    """

    starts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.starts or self.starts[0] != 0:
            raise ValueError(f"starts must begin with 0 (got {self.starts[:3]})")
        if list(self.starts) != sorted(self.starts):
            raise ValueError(f"starts must ascend (got {self.starts})")

    @classmethod
    def from_sizes(cls, sizes: Sequence[int]) -> RangeMap:
        """Build from the number of ids that each part owns."""
        return cls(tuple(accumulate(map(int, sizes), initial=0)))

    @property
    def num_parts(self) -> int:
        return len(self.starts) - 1

    @property
    def num_ids(self) -> int:
        return self.starts[-1]

    def size(self, part: int) -> int:
        return self.starts[part + 1] - self.starts[part]

    @cached_property
    def _ends(self) -> Tensor:
        return torch.tensor(self.starts[1:], dtype=torch.int64)

    @cached_property
    def _begins(self) -> Tensor:
        return torch.tensor(self.starts[:-1], dtype=torch.int64)

    def check(self, ids: Tensor, what: str = "id") -> None:
        """Raise IndexError, naming the first bad value, unless every id is in range."""
        bad = (ids < 0) | (ids >= self.num_ids)
        if bool(bad.any()):
            value = int(ids[bad][0])
            raise IndexError(f"{what} must be in [0, {self.num_ids}) (got {value})")

    def part_of(self, ids: Tensor) -> Tensor:
        """Owner of each id: int64, same shape as ``ids``; ids must be in range."""
        return torch.searchsorted(self._ends.to(ids.device), ids.contiguous(), right=True)

    def local_of(self, ids: Tensor, parts: Tensor | None = None) -> Tensor:
        """Position of each id inside its part."""
        parts = self.part_of(ids) if parts is None else parts
        return ids - self._begins.to(ids.device)[parts]

    def ids_of(self, part: int) -> Tensor:
        """All ids that ``part`` owns, ascending."""
        return torch.arange(self.starts[part], self.starts[part + 1])
