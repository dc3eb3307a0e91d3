# SPDX-License-Identifier: Apache-2.0
"""EdgeMask: dropout of a number per edge and head, without storing which were dropped.

Whether an entry is dropped is a function of (seed, edge, head): a hash of 32 bits is compared with
the probability. So the backward pass, another rank or another number of threads finds the same
mask. csrc/attention/entries.cpp says the same in C++, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ..._base.typing import INDEX_DTYPES
from .. import _check

_MASK = 0xFFFFFFFF
_FIRST = 0x7FEB352D
_SECOND = 0x846CA68B
_HEAD_STEP = 0x9E3779B9

WordT = TypeVar("WordT", int, Tensor)


@dataclass(frozen=True)
class EdgeMask:
    """Which entries to drop.

    Args:
        probability: Of an entry to be dropped, in [0, 1].
        seed: Any integer; other seeds, other masks.
        keys: [num_edges] int32, what stands for each edge, by edge id; None: the edge's id.
        first_head: Number of the first head, where heads are some of more.
    """

    probability: float
    seed: int
    keys: Tensor | None = None
    first_head: int = 0

    def __post_init__(self) -> None:
        _check.check_number("dropout probability", self.probability)
        for name in ("seed", "first_head"):
            if not isinstance(getattr(self, name), int):
                raise TypeError(f"{name} of a mask must be an int (got {getattr(self, name)!r})")
        if self.keys is not None:
            _check.check_tensor("keys of a mask", self.keys)
        if not 0.0 <= self.probability <= 1.0:
            raise ValueError(f"dropout probability must be in [0, 1] (got {self.probability})")

    @property
    def threshold(self) -> int:
        """Hashes below it drop their entry; 0 for no dropout."""
        return int(self.probability * 2**32)

    @property
    def kept(self) -> float:
        """What entries that stay are multiplied by."""
        return 0.0 if self.probability >= 1.0 else 1.0 / (1.0 - self.probability)

    @property
    def edge_seed(self) -> int:
        """Added to the key of an edge."""
        low, high = self.seed & _MASK, self.seed >> 32 & _MASK
        return _mixed(low + _mixed(high))

    @property
    def head_seed(self) -> int:
        """Added to the number of a head."""
        low, high = self.seed & _MASK, self.seed >> 32 & _MASK
        return _mixed(high ^ _mixed(low + 0x6A09E667)) + self.first_head * _HEAD_STEP & _MASK

    def multipliers(self, edges: Tensor, num_heads: int) -> Tensor:
        """0 for entries that are dropped, else `kept`: float64 ``[len(edges), num_heads]``.

        Args:
            edges: Edge ids.
            num_heads: Number of heads.
        """
        _check.check_index_array("edges", edges)
        _check.check_count("num_heads", num_heads)
        if num_heads >= 2**31:
            raise ValueError(f"num_heads must be in [0, 2^31) (got {num_heads})")
        keys = edge_keys(edges) if self.keys is None else self.keys.index_select(0, edges.long())
        words = _mixed((keys.long() & _MASK) + self.edge_seed)
        heads = torch.arange(num_heads, device=edges.device) * _HEAD_STEP + self.head_seed
        hashes = _mixed(words.view(-1, 1) ^ _mixed(heads))
        return (hashes >= self.threshold).double() * self.kept


def random_seed() -> int:
    """A seed from torch's default generator."""
    return int(torch.randint(2**62, ()))


def edge_keys(ids: Tensor) -> Tensor:
    """Edge ids of any size as int32: distinct below 2^32, well mixed above.

    Args:
        ids: int32 or int64, of any shape.

    Raises:
        TypeError: ``ids`` is not a tensor of these.
    """
    if _check.check_tensor("ids", ids).dtype not in INDEX_DTYPES:
        raise TypeError(f"ids must be int32 or int64 (got {ids.dtype}); convert with .long()")
    ids = ids.long()
    keys = (ids & _MASK) ^ _mixed(ids >> 32 & _MASK)
    return (keys - (keys >> 31 << 32)).to(torch.int32)


def _mixed(word: WordT) -> WordT:
    """A bijection of 32-bit words that looks random; of int64 tensors the lower 32 bits count."""
    word = word & _MASK
    word = (word ^ word >> 16) * _FIRST & _MASK
    word = (word ^ word >> 15) * _SECOND & _MASK
    return word ^ word >> 16
