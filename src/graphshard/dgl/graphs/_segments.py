# SPDX-License-Identifier: Apache-2.0
"""Operators on rows that stand one group behind another, and products with one matrix per group."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops import Adjacency, edge_softmax, gspmm


def segment_reduce(seglen: Tensor, value: Tensor, reducer: str = "sum") -> Tensor:
    """Sum, mean, maximum or minimum of each group of rows.

    Args:
        seglen: ``[num_groups]`` integers, the number of rows of each group.
        value: ``[num_rows, ...]`` floating-point rows, group after group.
        reducer: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.

    Returns:
        ``[num_groups, ...]``; 0 for groups without rows.

    Raises:
        TypeError: values are no floating-point numbers.
        ValueError: numbers that do not add up to the rows, or an unknown reducer.

    Example:
        >>> segment_reduce(torch.tensor([2, 1]), torch.tensor([1.0, 2.0, 4.0]))
        tensor([3., 4.])
    """
    return gspmm(_groups(seglen, value), "copy_rhs", reducer, None, value)


def segment_softmax(seglen: Tensor, value: Tensor) -> Tensor:
    """Softmax over each group of rows, which are given as for `segment_reduce`.

    Returns:
        ``[num_rows, ...]``.
    """
    return edge_softmax(_groups(seglen, value), value)


def _groups(seglen: Tensor, value: Tensor) -> Adjacency:
    """Every row as an edge into its group, from one source."""
    sizes = _integers(seglen, "seglen").to(value.device)
    _check_sizes(sizes, "seglen", value, "value")
    indptr = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    sources = sizes.new_zeros(value.shape[0])
    return Adjacency.from_csc(indptr, sources, None, 1, sizes.shape[0], check=False)


def _check_sizes(sizes: Tensor, name: str, rows: Tensor, of: str) -> None:
    total = int(sizes.sum())
    if total != rows.shape[0] or bool((sizes < 0).any()):
        raise ValueError(
            f"{name} must add up to the {rows.shape[0]} rows of {of}, with no number below 0 "
            f"(got {total}, {sizes.tolist()[:8]})"
        )


def _integers(given: Tensor, name: str) -> Tensor:
    numbers = torch.as_tensor(given)
    if numbers.dim() != 1 or numbers.is_floating_point() or numbers.dtype == torch.bool:
        raise TypeError(
            f"{name} must be one row of integers (got {numbers.dtype}, shape "
            f"{tuple(numbers.shape)})"
        )
    return numbers.long()


def segment_mm(a: Tensor, b: Tensor, seglen_a: Tensor) -> Tensor:
    """Multiply each group of rows by a matrix of its own.

    Args:
        a: ``[num_rows, m]``, group after group.
        b: ``[num_groups, m, n]``.
        seglen_a: ``[num_groups]`` integers, the number of rows of each group.

    Returns:
        ``[num_rows, n]``; differentiable in ``a`` and ``b``.

    Raises:
        TypeError: numbers that are no integers.
        ValueError: shapes that do not fit, or numbers that do not add up to the rows.
    """
    sizes = _integers(seglen_a, "seglen_a")
    if a.dim() != 2 or b.dim() != 3 or len(sizes) != b.shape[0] or a.shape[1] != b.shape[1]:
        raise ValueError(
            f"segment_mm takes a [rows, m], b [groups, m, n] and seglen_a [groups] (got "
            f"{tuple(a.shape)}, {tuple(b.shape)} and {len(sizes)} numbers)"
        )
    _check_sizes(sizes, "seglen_a", a, "a")
    if not len(sizes):
        return a.new_zeros((0, b.shape[2]))
    groups = a.split(sizes.tolist())
    return torch.cat([rows @ matrix for rows, matrix in zip(groups, b, strict=True)])


def gather_mm(a: Tensor, b: Tensor, *, idx_b: Tensor) -> Tensor:
    """Multiply each row by the matrix that it names: ``out[i] = a[i] @ b[idx_b[i]]``.

    Args:
        a: ``[num_rows, m]``.
        b: ``[num_groups, m, n]``.
        idx_b: ``[num_rows]`` integers.

    Returns:
        ``[num_rows, n]``; differentiable in ``a`` and ``b``.

    Raises:
        TypeError: numbers that are no integers.
        ValueError: shapes that do not fit, or a number that names no matrix.
    """
    if idx_b.shape != a.shape[:1]:
        raise ValueError(
            f"idx_b must name a matrix for each of the {a.shape[0]} rows of a (got shape "
            f"{tuple(idx_b.shape)})"
        )
    index = _integers(idx_b, "idx_b")
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < b.shape[0]:
        raise ValueError(
            f"idx_b must be in [0, {b.shape[0]}) (got {int(index.min())} to {int(index.max())})"
        )
    order = torch.sort(index, stable=True).indices
    sizes = torch.bincount(index, minlength=b.shape[0])
    product = segment_mm(a.index_select(0, order), b, sizes)
    return product.new_empty(product.shape).index_copy(0, order, product)
