# SPDX-License-Identifier: Apache-2.0
"""Attention: the operands of an attention over in-edges, and what its scores and weights are.

One description serves a whole graph, a shard of one, the compiled kernels and plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .sampling import EdgeMask

SCORES = ("additive", "joint", "dot")
OPERANDS = ("values", "src", "dst", "edge", "vector", "factor")
_HALF = (torch.float16, torch.bfloat16)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which numbers of ``dtype`` are computed with and summed."""
    return torch.float32 if dtype in _HALF else dtype


@dataclass(frozen=True, eq=False)
class Attention:
    """``out[v] = sum over edges e from u to v of a[e] m[e] factor[e] values[u]``, per head.

    ``a`` is the softmax, over the in-edges of ``v``, of a score; ``m`` is 0 where ``mask`` drops
    the entry, else one over its keep probability. Made by `additive`, `joint` and `dot`.

    Args:
        score: ``additive``, ``joint`` or ``dot``.
        values: ``[num_src, heads, dim]``.
        src: What scores read of sources; None for joint ones, which read ``values``.
        dst: What scores read of destinations.
        edge: What scores read of edges, or None.
        vector: Of joint scores.
        factor: ``[num_edges, 1]`` or ``[num_edges, heads]``, or None.
        slope: Of the leaky ReLU.
        scale: Of dot products.
        mask: Dropout of the weights, or None.
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
            slope: Of the leaky ReLU below zero.
            factor: ``[num_edges]``, ``[num_edges, 1]`` or ``[num_edges, heads]``: multiplies the
                weights.
            mask: Dropout of the weights.
        """
        factor = _as_columns(factor)
        return cls("additive", values, src, dst, edge, None, factor, slope, 1.0, mask)

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
            slope: As for `additive`.
            factor: As for `additive`.
            mask: As for `additive`.
        """
        factor = _as_columns(factor)
        return cls("joint", values, None, dst, edge, vector, factor, slope, 1.0, mask)

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
            scale: Of the dot product.
            factor: As for `additive`.
            mask: As for `additive`.
        """
        factor = _as_columns(factor)
        return cls("dot", values, src, dst, edge, None, factor, 0.2, scale, mask)

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
        """The same attention, followed by a bias and a ReLU: ``relu(out + bias)``.

        Args:
            bias: ``[heads, dim]``, or None.
            relu: Whether there is a ReLU.
        """
        return replace(self, bias=bias, relu=relu)

    def scores_of(self, u: Tensor, v: Tensor, e: Tensor) -> Tensor:
        """The scores of some edges, in the type of sums: ``[num, heads]``.

        Args:
            u: Their sources.
            v: Their destinations.
            e: Their ids.
        """
        edge = None if self.edge is None else self._widened(self.edge, e)
        if self.score == "dot":
            assert self.src is not None
            found = (self._widened(self.src, u) * self._widened(self.dst, v)).sum(-1) * self.scale
            return found if edge is None else found + edge
        src = self.values if self.src is None else self.src
        joined = self._widened(src, u) + self._widened(self.dst, v)
        activated = F.leaky_relu(joined if edge is None else joined + edge, self.slope)
        if self.score == "additive":
            return activated
        assert self.vector is not None
        return (activated * self.vector.to(activated.dtype)).sum(-1)

    def multipliers_of(self, e: Tensor) -> Tensor | None:
        """What mask and factor make of a weight 1 on the edges ``e``: ``[num, heads or 1]``."""
        found = None if self.factor is None else self._widened(self.factor, e)
        if self.mask is None:
            return found
        kept = self.mask.multipliers(e, self.heads).to(wide(self.dtype))
        return kept if found is None else kept * found

    def _widened(self, rows: Tensor, index: Tensor) -> Tensor:
        return rows.index_select(0, index).to(wide(self.dtype))


def _as_columns(factor: Tensor | None) -> Tensor | None:
    is_flat = isinstance(factor, Tensor) and factor.dim() == 1
    return factor.unsqueeze(1) if factor is not None and is_flat else factor
