# SPDX-License-Identifier: Apache-2.0
"""gsddmm: one value per edge, from its source, its destination or the edge itself."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _check
from .._adjacency import Adjacency, HasAdjacency, as_adjacency
from . import _autograd

OPS = ("add", "sub", "mul", "div", "dot", "copy_lhs", "copy_rhs")
TARGETS = ("u", "v", "e")


def gsddmm(
    adj: Adjacency | HasAdjacency,
    op: str,
    lhs: Tensor | None,
    rhs: Tensor | None = None,
    lhs_target: str = "u",
    rhs_target: str = "v",
) -> Tensor:
    """Combine two rows per edge: ``out[e] = op(lhs[target of e], rhs[target of e])``.

    Rows broadcast from the right, as in numpy. ``dot`` multiplies and sums over the last dimension,
    which stays with size 1 (two operands without feature dimensions give [num_edges]). The two
    copies take values of any dtype. Differentiable in both operands, any number of times.

    Args:
        adj: The edges, or a graph with one relation.
        op: ``add``, ``sub``, ``mul``, ``div``, ``dot``, ``copy_lhs`` or ``copy_rhs``.
        lhs: [num_src, ...], [num_dst, ...] or [num_edges, ...], as ``lhs_target`` says.
        rhs: Likewise for ``rhs_target``.
        lhs_target: ``u`` for the source, ``v`` for the destination, ``e`` for the edge itself.
        rhs_target: Likewise.

    Returns:
        [num_edges, ...] in edge id order, of the operands' common dtype.

    Raises:
        TypeError: An operand is not a tensor, or does not hold floating-point numbers.
        ValueError: An unknown ``op`` or target, a missing operand, a wrong number of rows, another
            device, or rows that do not broadcast.

    Example:
        >>> adj = Adjacency(torch.tensor([0, 1, 1]), torch.tensor([1, 0, 1]), 2, 2)
        >>> x = torch.tensor([1.0, 10.0])
        >>> gsddmm(adj, "sub", x, x)
        tensor([-9.,  9.,  0.])
    """
    adj = as_adjacency(adj)
    _check.check_choice("op of gsddmm", op, OPS)
    sides = []
    for name, value, target in (("lhs", lhs, lhs_target), ("rhs", rhs, rhs_target)):
        if op == ("copy_rhs" if name == "lhs" else "copy_lhs"):
            continue
        _check.check_choice(f"{name}_target of gsddmm", target, TARGETS)
        count = {"u": "num_src", "v": "num_dst", "e": "num_edges"}[target]
        sides.append(
            _check.check_operand("gsddmm", op, name, value, count, getattr(adj, count), adj.device)
        )
    if op in ("copy_lhs", "copy_rhs"):
        target = lhs_target if op == "copy_lhs" else rhs_target
        return sides[0].clone() if target == "e" else _autograd.gather(adj, sides[0], target)
    left, right = sides
    _check.check_broadcast(f"gsddmm {op}", left, right)
    dtype = torch.promote_types(left.dtype, right.dtype)
    left, right = left.to(dtype), right.to(dtype)
    if op != "dot":
        return _autograd.sddmm(adj, op, left, right, lhs_target, rhs_target)
    flat = left.dim() == 1 and right.dim() == 1
    left, right = (side.unsqueeze(-1) if side.dim() == 1 else side for side in (left, right))
    if left.shape[-1] != right.shape[-1]:
        size = right.shape[-1] if left.shape[-1] == 1 else left.shape[-1]
        left, right = (side.expand(*side.shape[:-1], size) for side in (left, right))
    out = _autograd.sddmm(adj, op, left, right, lhs_target, rhs_target)
    return out.squeeze(-1) if flat else out
