# SPDX-License-Identifier: Apache-2.0
"""How one row of the left operand and one row of the right broadcast against each other.

Rows follow numpy's rule, aligned from the right. Neighbouring dimensions that broadcast alike are
merged, so that nearly every pair becomes one of four loops: full by full, full by scalar, heads of
full by scalar, or the mirror of one of these. The kernels read the result as `outer` offsets into
each operand's row and `inner` steps, in which an operand either advances or stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class RowLoop:
    """The two loops that run over one row.

    Args:
        shape: Shape of one row of the result.
        inner: Steps of the inner loop.
        lhs_offsets: int64 [outer] where in a row of lhs each inner loop begins.
        rhs_offsets: int64 [outer] likewise for rhs.
        lhs_step: 1 if lhs advances with the inner loop, 0 if it stays where it began.
        rhs_step: Likewise for rhs.
    """

    shape: Shape
    inner: int
    lhs_offsets: Tensor
    rhs_offsets: Tensor
    lhs_step: int
    rhs_step: int


@lru_cache(maxsize=512)
def row_loop(lhs: Shape, rhs: Shape) -> RowLoop:
    """Loops of an elementwise operator on rows of shapes ``lhs`` and ``rhs``, which broadcast."""
    shape = tuple(torch.broadcast_shapes(lhs, rhs))
    groups = _merge(lhs, rhs, shape) or [(1, 1, 1)]
    inner, lhs_step, rhs_step = groups[-1]
    offsets = _offsets(groups)
    return RowLoop(shape, inner, *offsets, lhs_step, rhs_step)


@lru_cache(maxsize=512)
def dot_loop(lhs: Shape, rhs: Shape) -> RowLoop:
    """Loops of a dot product over the last dimension, which must be equal; kept, with size 1."""
    shape = tuple(torch.broadcast_shapes(lhs[:-1], rhs[:-1]))
    groups = [*_merge(lhs[:-1], rhs[:-1], shape), (lhs[-1], 1, 1)]
    return RowLoop((*shape, 1), lhs[-1], *_offsets(groups), 1, 1)


@lru_cache(maxsize=512)
def copy_loop(shape: Shape) -> RowLoop:
    """The loop that copies a whole row."""
    zero = torch.zeros(1, dtype=torch.int64, device="cpu")
    return RowLoop(shape, math.prod(shape), zero, zero, 1, 1)


def row_places(row: Shape, shape: Shape, device: torch.device) -> Tensor:
    """Where in a row each element of the broadcast ``shape`` comes from: int64, of that shape."""
    return torch.arange(math.prod(row), device=device).reshape(row).expand(shape)


def align_rows(lhs: Tensor, rhs: Tensor) -> tuple[Tensor, Tensor]:
    """Insert dimensions after the first, so that rows broadcast from the right."""
    dim = max(lhs.dim(), rhs.dim())
    lhs = lhs.reshape(lhs.shape[0], *[1] * (dim - lhs.dim()), *lhs.shape[1:])
    return lhs, rhs.reshape(rhs.shape[0], *[1] * (dim - rhs.dim()), *rhs.shape[1:])


def sum_to_row(values: Tensor, row: Shape) -> Tensor:
    """Undo broadcasting: sum [rows, *shape] down to [rows, *row]."""
    if values.shape[1:] == row:
        return values
    padded = (1,) * (values.dim() - 1 - len(row)) + row
    dims = [dim for dim, size in enumerate(padded, start=1) if size == 1 and values.shape[dim] != 1]
    if dims:
        values = values.sum(dims, keepdim=True)
    return values.reshape(values.shape[0], *row)


_Group = tuple[int, int, int]


def _merge(lhs: Shape, rhs: Shape, shape: Shape) -> list[_Group]:
    """Dimensions as (size, step of lhs, step of rhs), neighbours of one kind made one."""
    lhs = (1,) * (len(shape) - len(lhs)) + lhs
    rhs = (1,) * (len(shape) - len(rhs)) + rhs
    groups: list[_Group] = []
    for left, right, size in zip(lhs, rhs, shape, strict=True):
        if size == 1:
            continue
        kind = (int(left != 1), int(right != 1))
        if groups and groups[-1][1:] == kind:
            groups[-1] = (groups[-1][0] * size, *kind)
        else:
            groups.append((size, *kind))
    return groups


def _offsets(groups: list[_Group]) -> tuple[Tensor, Tensor]:
    """Start of each inner loop in a row of lhs and of rhs; the last group is the inner loop."""
    offsets_of = []
    for side in (1, 2):
        sizes = [group[0] if group[side] else 1 for group in groups]
        offsets = torch.zeros(1, dtype=torch.int64, device="cpu")
        for number, group in enumerate(groups[:-1]):
            step = math.prod(sizes[number + 1 :]) if group[side] else 0
            offsets = (offsets[:, None] + torch.arange(group[0], device="cpu") * step).flatten()
        offsets_of.append(offsets)
    return offsets_of[0], offsets_of[1]
