# SPDX-License-Identifier: Apache-2.0
"""Max and min over the edges of several graphs, and their gradient by the argmax."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..._base.kernels import kernels_for, num_threads
from ..._base.typing import INDEX_DTYPES
from .. import _check
from .._adjacency import Adjacency
from .._broadcast import row_places, sum_to_row
from .._check import Operand
from .._dispatch import triton_for
from . import _compute

_HALF = (torch.float16, torch.bfloat16)


def argmax_backward(
    adj: Adjacency,
    op: str,
    grad: Tensor,
    arg: Tensor,
    operands: tuple[Operand, Operand],
    shapes: tuple[torch.Size | None, torch.Size | None],
    wanted: tuple[bool, bool],
) -> tuple[Operand, Operand]:
    """Gradients of max or min: each element goes to the edge that it came from, and to no other.

    Differentiable in ``grad`` and the operands.

    Args:
        adj: The edges.
        op: The operator that made the messages.
        grad: [num_dst, ...] gradient of the result.
        arg: Ids of the edges that have the maximum, same shape; -1 for none.
        operands: Source rows and edge rows, each where ``op`` scales by it.
        shapes: Those of the source rows and the edge rows; None where ``op`` does not look at them.
        wanted: Whether to compute the gradient of each.

    Returns:
        Gradients of the source rows and the edge rows, where wanted.
    """
    on_gpu = None
    if not torch.is_grad_enabled():  # the gradient will not be differentiated
        rows = tuple(None if shape is None else tuple(shape[1:]) for shape in shapes)
        grads = _compute.argmax_backward(adj, op, grad, arg, operands, (rows[0], rows[1]), wanted)
        if grads is not None:
            return grads
        on_gpu = triton_for(grad.device, grad.dtype)
    lhs_shape, rhs_shape = shapes
    if adj.num_edges == 0:
        lhs_grad = grad.new_zeros(lhs_shape) if wanted[0] and lhs_shape is not None else None
        rhs_grad = grad.new_zeros(rhs_shape) if wanted[1] and rhs_shape is not None else None
        return lhs_grad, rhs_grad
    lhs_grad = None
    if wanted[0] and on_gpu is not None:
        assert lhs_shape is not None
        lhs_grad = _sum_by_source(on_gpu, adj, op, grad, arg, operands[1], tuple(lhs_shape[1:]))
        if not wanted[1]:
            return lhs_grad, None
    present = arg >= 0
    edge = arg.clamp(min=0).long()
    grad = torch.where(present, grad, 0.0)
    shape = tuple(arg.shape[1:])

    def places(row: tuple[int, ...], owner: Tensor) -> Tensor:
        return owner * math.prod(row) + row_places(row, shape, arg.device)

    lhs_places = rhs_places = edge
    if lhs_shape is not None:
        lhs_places = places(tuple(lhs_shape[1:]), adj.coo()[0].long()[edge])
    if rhs_shape is not None:
        rhs_places = places(tuple(rhs_shape[1:]), edge)
    # Where there is no edge, 1: whatever is stored there must not turn 0 into NaN.
    lhs, rhs = operands
    lhs_taken = None if lhs is None else torch.where(present, lhs.reshape(-1)[lhs_places], 1.0)
    rhs_taken = None if rhs is None else torch.where(present, rhs.reshape(-1)[rhs_places], 1.0)
    rhs_grad = None
    if wanted[0] and lhs_grad is None:
        assert lhs_shape is not None
        share = grad
        if rhs_taken is not None:
            share = grad * rhs_taken if op == "mul" else grad / rhs_taken
        lhs_grad = _put(share, lhs_places, lhs_shape)
    if wanted[1]:
        assert rhs_shape is not None
        share = -grad if op == "sub" else grad
        if op == "mul":
            assert lhs_taken is not None
            share = grad * lhs_taken
        elif op == "div":
            assert lhs_taken is not None
            assert rhs_taken is not None
            share = -grad * lhs_taken / (rhs_taken * rhs_taken)
        rhs_grad = _put(share, rhs_places, rhs_shape)
    return lhs_grad, rhs_grad


def _sum_by_source(
    on_gpu: Any,
    adj: Adjacency,
    op: str,
    grad: Tensor,
    arg: Tensor,
    rhs: Operand,
    row: tuple[int, ...],
) -> Tensor:
    """The gradient of source rows as a sum over out-edges, each for the maxima that it gave."""
    wide = grad.float() if grad.dtype in _HALF and row != tuple(grad.shape[1:]) else grad
    op = op if op in ("mul", "div") else "copy_lhs"
    rhs = None if rhs is None else rhs.detach().to(wide.dtype)
    share, _ = on_gpu.spmm(adj.reverse(), op, "sum", wide, rhs, arg)
    return sum_to_row(share, row).to(grad.dtype)


def _put(values: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    """Sum ``values`` into zeros of ``shape`` at flat ``places``, in order."""
    wide = values.float() if values.dtype in _HALF else values
    zeros, where, flat = wide.new_zeros(math.prod(shape)), places.reshape(-1), wide.reshape(-1)
    if values.is_cuda:  # sorts; scatter_add would add by atomics, in no fixed order
        out = zeros.index_put((where,), flat, accumulate=True)
    else:
        out = zeros.scatter_add(0, where, flat)
    return out.reshape(shape).to(values.dtype)


def merge_best(
    best: Tensor, edge: Tensor, value: Tensor, arg: Tensor, ids: Tensor | None, none: int, op: str
) -> None:
    """Take over what some edges contribute to a maximum or minimum over more edges, in place.

    NaN is better than any number, as in `gspmm`; a tie goes to the smaller id.

    Args:
        best: ``[...]``, the best of the edges before.
        edge: As ``best``, int32 or int64: their ids; ``none`` where there was no edge.
        value: As ``best``: from `gspmm_arg` over the edges that come in.
        arg: As ``best``, int32 or int64, likewise: which of these edges has it, -1 for none.
        ids: ``[num_edges]`` ids of these edges; None where they are their places.
        none: More than all ids.
        op: ``max`` or ``min``.

    Raises:
        TypeError: An argument is no tensor, or not of the dtypes above.
        ValueError: Shapes or devices differ, an id does not fit into ``edge``, or an unknown
            ``op``.
        IndexError: ``arg`` names an edge that is not among ``ids``. Some elements may have been
            taken over then.
    """
    best, edge, value, arg, ids = _checked(best, edge, value, arg, ids, none, op)
    kernels = kernels_for(best.device, best.dtype)
    looks = kernels is None or (ids is not None and ids.numel() == 0)
    if ids is not None and arg.numel() and looks:  # else the kernel looks at each
        highest = int(arg.max())
        if highest >= ids.shape[0]:
            raise IndexError(
                f"an id in arg must be that of an edge, or -1 for none (got {highest} of "
                f"{ids.shape[0]} edges)"
            )
        if highest < 0:
            return
    if kernels is not None:
        held = tuple(
            whole.contiguous()
            if _check.is_plain(whole)
            else whole.resolve_neg().clone(memory_format=torch.contiguous_format)
            for whole in (best, edge)
        )
        kernels.merge_best(
            *(part.view(-1) for part in held),
            value.contiguous().view(-1),
            arg.contiguous().view(-1),
            None if ids is None else ids.contiguous(),
            none,
            op == "min",
            num_threads(),
        )
        for whole, part in zip((best, edge), held, strict=True):
            if part.data_ptr() != whole.data_ptr():
                whole.copy_(part)
        return
    place = arg.clamp(min=0).long()
    found = (place if ids is None else ids[place]).to(edge.dtype)
    is_tie = (value == best) | (value.isnan() & best.isnan())
    takes = (value > best if op == "max" else value < best) | (value.isnan() & ~best.isnan())
    takes |= is_tie & (found < edge)
    takes |= edge == none
    takes &= arg >= 0
    best.copy_(torch.where(takes, value, best))
    edge.copy_(torch.where(takes, found, edge))


def _checked(
    best: Tensor, edge: Tensor, value: Tensor, arg: Tensor, ids: Operand, none: int, op: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Operand]:
    _check.check_choice("op of merge_best", op, ("max", "min"))
    best = _check.check_tensor("best", best).detach()
    if best.dtype not in _check.VALUE_DTYPES:
        raise TypeError(
            f"best must be float32, float64, bfloat16 or float16 (got {best.dtype}); convert it"
        )
    for name, array in (("edge", edge), ("arg", arg)):
        _check.check_tensor(name, array)
        dtype = array.dtype if array.dtype in INDEX_DTYPES else torch.int64
        _check.check_result(name, array, best.shape, dtype, best.device)
    value = _check.check_result("value", value, best.shape, best.dtype, best.device).detach()
    for name, array in (("best", best), ("edge", edge)):
        _check.check_written(name, array)
    limits = torch.iinfo(edge.dtype)
    if not isinstance(none, int) or not limits.min <= none <= limits.max:
        raise ValueError(f"none must be an int of {limits.bits} bits, as edge holds (got {none!r})")
    if ids is not None:
        _check.check_index_array("ids", ids)
        if ids.device != best.device:
            raise ValueError(f"ids must be on the device of best, {best.device} (got {ids.device})")
        _check.check_narrows("ids", ids, edge.dtype)
        ids = _check.apart(ids.to(edge.dtype), best, edge)
    else:
        _check.check_narrows("arg", arg, edge.dtype)
    return best, edge, _check.apart(value, best, edge), _check.apart(arg, best, edge), ids
