# SPDX-License-Identifier: Apache-2.0
"""Attention: the operands of an attention over in-edges, and what its scores and weights are.

One description serves a whole graph, a shard of one, the compiled kernels and plain torch.

`EdgeMask` is dropout of a number per edge and head, without storing which were dropped: whether an
entry is dropped is a function of (seed, edge, head): a hash of 32 bits is compared with the
probability. So the backward pass, another rank or another number of threads finds the same mask.
csrc/attention/entries.cpp says the same in C++, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from .._base.typing import INDEX_DTYPES
from . import _check

_MASK = 0xFFFFFFFF
_FIRST = 0x7FEB352D
_SECOND = 0x846CA68B
_HEAD_STEP = 0x9E3779B9
SCORES = ("additive", "joint", "dot")
OPERANDS = ("values", "src", "dst", "edge", "vector", "factor")
_HALF = (torch.float16, torch.bfloat16)
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
        """0 for entries that are dropped, else `kept`: float64 ``[len(edges), num_heads]``."""
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


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which numbers of ``dtype`` are computed with and summed."""
    return torch.float32 if dtype in _HALF else dtype


@dataclass(frozen=True, eq=False)
class Attention:
    """``out[v] = sum over edges e from u to v of a[e] m[e] factor[e] values[u]``, per head.

    ``a`` is the softmax, over the in-edges of ``v``, of a score; ``m`` is 0 where ``mask`` drops
    the entry, else one over its keep probability. Made by `additive`, `joint` and `dot`.

    Args:
        values: ``[num_src, heads, dim]``.
        src: What scores read of sources; None for joint ones, which read ``values``.
        dst: What scores read of destinations.
        edge: What scores read of edges, or None.
        factor: ``[num_edges, 1]`` or ``[num_edges, heads]``, or None.
        bias: ``[heads, dim]``, added to the result; or None. See `finished`.
        relu: Whether the result is activated, last.
    """

    score: str
    values: Tensor
    src: Tensor | None
    dst: Tensor
    edge: Tensor | None = None
    vector: Tensor | None = None
    factor: Tensor | None = None
    slope: float = 0.2
    scale: float = 1.0
    mask: EdgeMask | None = None
    bias: Tensor | None = None
    relu: bool = False

    @classmethod
    def additive(
        cls,
        values: Tensor,
        src: Tensor,
        dst: Tensor,
        edge: Tensor | None = None,
        *,
        slope: float = 0.2,
        factor: Tensor | None = None,
        mask: EdgeMask | None = None,
    ) -> Attention:
        """Scores ``leaky_relu(src[u] + dst[v] + edge[e])``, as in GAT.

        Args:
            values: ``[num_src, heads, dim]``.
            src: ``[num_src, heads]``.
            dst: ``[num_dst, heads]``.
            edge: ``[num_edges, heads]``, or None.
            factor: ``[num_edges]``, ``[num_edges, 1]`` or ``[num_edges, heads]``: multiplies the
                weights.
        """
        return cls("additive", values, src, dst, edge, None, _as_columns(factor), slope, 1.0, mask)

    @classmethod
    def joint(
        cls,
        values: Tensor,
        dst: Tensor,
        vector: Tensor,
        edge: Tensor | None = None,
        *,
        slope: float = 0.2,
        factor: Tensor | None = None,
        mask: EdgeMask | None = None,
    ) -> Attention:
        """Scores ``<vector, leaky_relu(values[u] + dst[v] + edge[e])>``, as in GATv2.

        Args:
            values: ``[num_src, heads, dim]``.
            dst: ``[num_dst, heads, dim]``.
            vector: ``[heads, dim]``.
            edge: ``[num_edges, heads, dim]``, or None.
        """
        return cls("joint", values, None, dst, edge, vector, _as_columns(factor), slope, 1.0, mask)

    @classmethod
    def dot(
        cls,
        values: Tensor,
        src: Tensor,
        dst: Tensor,
        edge: Tensor | None = None,
        *,
        scale: float = 1.0,
        factor: Tensor | None = None,
        mask: EdgeMask | None = None,
    ) -> Attention:
        """Scores ``scale * <src[u], dst[v]> + edge[e]``, as in a transformer.

        Args:
            values: ``[num_src, heads, dim]``.
            src: ``[num_src, heads, score_dim]``: keys. May be ``values``.
            dst: ``[num_dst, heads, score_dim]``: queries.
            edge: ``[num_edges, heads]``, or None.
        """
        return cls("dot", values, src, dst, edge, None, _as_columns(factor), 0.2, scale, mask)

    @property
    def heads(self) -> int:
        return self.values.shape[1]

    @property
    def dim(self) -> int:
        return self.values.shape[2]

    @property
    def score_dim(self) -> int:
        """Columns of a head in what scores read; 0 where it is a number per head."""
        return 0 if self.score == "additive" else self.dst.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """Of the result: that of rows that are gathered, promoted."""
        dtype = self.values.dtype
        if self.score == "additive":
            return dtype
        for rows in (self.src, self.dst, self.edge if self.score == "joint" else None):
            dtype = dtype if rows is None else torch.promote_types(dtype, rows.dtype)
        return dtype

    @property
    def operands(self) -> tuple[Tensor | None, ...]:
        """The tensors that a gradient may be wanted of, in the order of `OPERANDS`."""
        return self.values, self.src, self.dst, self.edge, self.vector, self.factor

    def with_operands(self, operands: Sequence[Tensor | None]) -> Attention:
        """The same attention with other tensors, in the order of `OPERANDS`."""
        changes: dict[str, Any] = dict(zip(OPERANDS, operands, strict=True))
        return replace(self, **changes)

    def finished(self, bias: Tensor | None, relu: bool) -> Attention:
        """The same attention, followed by a bias and a ReLU: ``relu(out + bias)``."""
        return replace(self, bias=bias, relu=relu)

    def scores_of(self, u: Tensor, v: Tensor, e: Tensor) -> Tensor:
        """The scores of some edges, in the type of sums: ``[num, heads]``."""
        edge = None if self.edge is None else self._widened(self.edge, e)
        if self.score == "dot":
            assert self.src is not None
            scores = (self._widened(self.src, u) * self._widened(self.dst, v)).sum(-1) * self.scale
            return scores if edge is None else scores + edge
        src = self.values if self.src is None else self.src
        joined = self._widened(src, u) + self._widened(self.dst, v)
        activated = F.leaky_relu(joined if edge is None else joined + edge, self.slope)
        if self.score == "additive":
            return activated
        assert self.vector is not None
        return (activated * self.vector.to(activated.dtype)).sum(-1)

    def multipliers_of(self, e: Tensor) -> Tensor | None:
        """What mask and factor make of a weight 1 on the edges ``e``: ``[num, heads or 1]``."""
        factors = None if self.factor is None else self._widened(self.factor, e)
        if self.mask is None:
            return factors
        mask = self.mask.multipliers(e, self.heads).to(wide(self.dtype))
        return mask if factors is None else mask * factors

    def _widened(self, rows: Tensor, index: Tensor) -> Tensor:
        return rows.index_select(0, index).to(wide(self.dtype))


def _as_columns(factor: Tensor | None) -> Tensor | None:
    is_flat = isinstance(factor, Tensor) and factor.dim() == 1
    return factor.unsqueeze(1) if factor is not None and is_flat else factor
