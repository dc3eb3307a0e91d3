# SPDX-License-Identifier: Apache-2.0
"""gspmm: messages along edges, reduced at their destinations, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._base.kernels import kernels_for
from .. import _check
from .._adjacency import Adjacency, HasAdjacency, as_adjacency
from . import _autograd, _compute
from ._argmax import argmax_backward

OPS = ("add", "sub", "mul", "div", "copy_lhs", "copy_rhs")
REDUCES = ("sum", "mean", "max", "min")


def gspmm(
    adj: Adjacency | HasAdjacency,
    op: str,
    reduce: str,
    lhs: Tensor | None = None,
    rhs: Tensor | None = None,
) -> Tensor:
    """Combine each edge's source row with its own, and reduce the results by destination.

    ``out[v] = reduce over edges e into v of op(lhs[source of e], rhs[e])``. Rows broadcast from the
    right, as in numpy. No message is stored. A destination without edges gets zeros. Differentiable
    in ``lhs`` and ``rhs``, any number of times; the gradient of max and min goes to the argmax
    alone, which among equals is the edge with the smallest id (a NaN is taken before any number).
    bfloat16 and float16 are summed in float32.

    Args:
        adj: The edges, or a graph with one relation.
        op: ``add``, ``sub``, ``mul``, ``div``, ``copy_lhs`` or ``copy_rhs``.
        reduce: ``sum``, ``mean``, ``max`` or ``min``.
        lhs: [num_src, ...] source rows; not looked at by ``copy_rhs``.
        rhs: [num_edges, ...] edge rows, in edge id order; not looked at by ``copy_lhs``.

    Returns:
        [num_dst, ...] with the broadcast shape of a row, of the operands' common dtype.

    Raises:
        TypeError: An operand is not a tensor of floating-point numbers.
        ValueError: An unknown ``op`` or ``reduce``, a missing operand, a wrong number of rows,
            another device, or rows that do not broadcast.

    Example:
        >>> adj = Adjacency(torch.tensor([0, 1, 1]), torch.tensor([1, 0, 1]), 2, 2)
        >>> gspmm(adj, "copy_lhs", "sum", torch.tensor([1.0, 10.0]))
        tensor([10., 11.])
    """
    adj, lhs, rhs = _checked("gspmm", adj, op, reduce, REDUCES, lhs, rhs)
    if torch.is_grad_enabled():
        return _autograd.spmm(adj, op, reduce, lhs, rhs)
    return _compute.spmm(adj, op, reduce, lhs, rhs)[0]


def gspmm_add(
    out: Tensor,
    adj: Adjacency | HasAdjacency,
    op: str,
    lhs: Tensor | None = None,
    rhs: Tensor | None = None,
) -> None:
    """Add the sums of `gspmm` to ``out``, in place; no gradient.

    Destinations without edges are not touched. That is how a sum over many edges is made of sums
    over some of them, without a tensor for each.

    Args:
        out: [num_dst, ...] of the shape and dtype that `gspmm` would return.
        adj: The edges, or a graph with one relation.
        op: As in `gspmm`.
        lhs: [num_src, ...] source rows.
        rhs: [num_edges, ...] edge rows.

    Raises:
        TypeError: As in `gspmm`.
        ValueError: As in `gspmm`, and where ``out`` has another shape, dtype or device.
    """
    adj, lhs, rhs = _checked("gspmm_add", adj, op, "sum", ("sum",), lhs, rhs)
    _check.check_tensor("out", out)
    _check.check_written("out", out)
    _compute.spmm_add(out, adj, op, lhs, rhs)


def gspmm_arg(
    adj: Adjacency | HasAdjacency,
    op: str,
    reduce: str,
    lhs: Tensor | None = None,
    rhs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`gspmm` for max and min, with the edge that each element came from; no gradient.

    Args:
        adj: The edges, or a graph with one relation.
        op: As in `gspmm`.
        reduce: ``max`` or ``min``.
        lhs: [num_src, ...] source rows.
        rhs: [num_edges, ...] edge rows.

    Returns:
        ``(out, arg)``, both [num_dst, ...]: the extremum, and of ``adj.idtype`` the id of its edge,
        -1 where a destination has none.

    Raises:
        TypeError: As in `gspmm`.
        ValueError: As in `gspmm`, and for sum and mean.
    """
    adj, lhs, rhs = _checked("gspmm_arg", adj, op, reduce, ("max", "min"), lhs, rhs)
    out, arg = _compute.spmm(adj, op, reduce, lhs, rhs)
    assert arg is not None
    return out, arg


def gspmm_arg_backward(
    adj: Adjacency | HasAdjacency,
    op: str,
    grad: Tensor,
    arg: Tensor,
    lhs: Tensor | None = None,
    rhs: Tensor | None = None,
    wanted: tuple[bool, bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of max and min, each element's to the edge in ``arg``; no gradient is recorded.

    The argmax need not be that of `gspmm_arg` over these edges: where an element came from none of
    them, ``arg`` is -1.

    Args:
        adj: The edges, or a graph with one relation.
        op: As in `gspmm`.
        grad: [num_dst, ...] gradient of the result.
        arg: As ``grad``, of ``adj.idtype``: the ids of the edges of the maxima, -1 for none.
        lhs: [num_src, ...] source rows.
        rhs: [num_edges, ...] edge rows.
        wanted: Whether to compute the gradient of ``lhs``, and of ``rhs``.

    Returns:
        The gradients of ``lhs`` and ``rhs`` in their shapes and dtypes; None for what ``op`` does
        not look at, or that is not wanted.

    Raises:
        TypeError: As in `gspmm`, and where ``arg`` is not of ``adj.idtype``.
        ValueError: As in `gspmm`, and where ``grad`` or ``arg`` has another shape or device.
        IndexError: An id in ``arg`` is that of no edge.
    """
    given = [side.dtype if isinstance(side, Tensor) else None for side in (lhs, rhs)]
    adj, lhs, rhs = _checked("gspmm_arg_backward", adj, op, "max", ("max",), lhs, rhs)
    shapes = tuple(None if side is None else side.shape for side in (lhs, rhs))
    rows = [shape[1:] for shape in shapes if shape is not None]
    shape = (adj.num_dst, *torch.broadcast_shapes(*rows))
    dtype = next(side.dtype for side in (lhs, rhs) if side is not None)
    _check.check_tensor("grad", grad)
    grad = _check.check_result("grad", grad.to(dtype), shape, dtype, adj.device)
    _check.check_result("arg", arg, shape, adj.idtype, adj.device)
    asked = (wanted[0] and lhs is not None) or (wanted[1] and rhs is not None)
    looks = asked and kernels_for(grad.device, dtype) is not None
    if not looks and arg.numel():  # else the kernel looks at each
        highest = int(arg.max())
        if highest >= adj.num_edges:
            raise IndexError(
                "an id in arg must be that of an edge, or -1 for none (got "
                f"{highest} of {adj.num_edges} edges)"
            )
    scales = op in ("mul", "div")
    with torch.no_grad():
        found = argmax_backward(
            adj,
            op,
            grad.contiguous(),
            arg.contiguous(),
            (lhs if scales else None, rhs if scales else None),
            (shapes[0], shapes[1]),
            (wanted[0] and lhs is not None, wanted[1] and rhs is not None),
        )
    pairs = zip(found, given, strict=True)
    lhs_grad, rhs_grad = (None if side is None else side.to(dtype) for side, dtype in pairs)
    return lhs_grad, rhs_grad


def _checked(
    name: str,
    graph: Adjacency | HasAdjacency,
    op: str,
    reduce: str,
    reduces: tuple[str, ...],
    lhs: Tensor | None,
    rhs: Tensor | None,
) -> tuple[Adjacency, Tensor | None, Tensor | None]:
    adj = as_adjacency(graph)
    _check.check_choice(f"op of {name}", op, OPS)
    _check.check_choice(f"reduce of {name}", reduce, reduces)
    if op == "copy_rhs":
        lhs = None
    else:
        lhs = _check.check_operand(name, op, "lhs", lhs, "num_src", adj.num_src, adj.device)
    if op == "copy_lhs":
        rhs = None
    else:
        rhs = _check.check_operand(name, op, "rhs", rhs, "num_edges", adj.num_edges, adj.device)
    if lhs is not None and rhs is not None:
        _check.check_broadcast(f"{name} {op}", lhs, rhs)
        dtype = torch.promote_types(lhs.dtype, rhs.dtype)
        lhs, rhs = lhs.to(dtype), rhs.to(dtype)
    return adj, lhs, rhs
