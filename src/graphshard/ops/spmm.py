# SPDX-License-Identifier: Apache-2.0
"""Sparse times dense and its relatives: gspmm, gsddmm, edge_softmax, their gradients, and add_rows.

The operators come first, with their checks. Below them are their gradients: each backward pass is
written in differentiable functions of this file, so a gradient of a gradient needs no code of its
own. The gradient of a sum over in-edges is a sum over out-edges (`_spmm` on the reversed adjacency)
or a value per edge (`_sddmm`), and the other way round: nothing of size [num_edges, features] is
made unless an operand or a result has that size.

Last come the functions that run one operator without autograd, ``_compute_...``: in the compiled
kernels where they can, else in plain torch. Arguments have been checked and have one dtype. The
kernels read contiguous rows and write into tensors that are allocated here. An array crosses to C++
detached: nanobind would take one that requires grad without a word. A view whose negation torch has
put off is negated where it crosses, and refused where it would be written to: see
csrc/bindings/arrays.h.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, float32, int64
from torch.autograd import Function

from .._base.kernels import empty, kernels_for, num_threads
from .._base.typing import INDEX_DTYPES
from . import _check, reference
from ._adjacency import Adjacency, HasAdjacency, as_adjacency
from ._attention_rule import wide
from ._broadcast import (
    RowLoop,
    Shape,
    align_rows,
    copy_loop,
    dot_loop,
    row_loop,
    row_places,
    sum_to_row,
)
from ._check import Operand
from ._dispatch import triton_for

SPMM_OPS = ("add", "sub", "mul", "div", "copy_lhs", "copy_rhs")
SDDMM_OPS = ("add", "sub", "mul", "div", "dot", "copy_lhs", "copy_rhs")
REDUCES = ("sum", "mean", "max", "min")
TARGETS = ("u", "v", "e")


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
    adj, lhs, rhs = _checked_messages("gspmm", adj, op, reduce, REDUCES, lhs, rhs)
    if torch.is_grad_enabled():
        return _spmm(adj, op, reduce, lhs, rhs)
    return _compute_spmm(adj, op, reduce, lhs, rhs)[0]


def gspmm_add(
    out: Tensor,
    adj: Adjacency | HasAdjacency,
    op: str,
    lhs: Tensor | None = None,
    rhs: Tensor | None = None,
) -> None:
    """Add the sums of `gspmm` to ``out``, in place; no gradient.

    Destinations without edges are not touched. That is how a sum over many edges is made of sums
    over some of them, without a tensor for each. Other arguments and errors are those of `gspmm`.

    Args:
        out: [num_dst, ...] of the shape and dtype that `gspmm` would return.

    Raises:
        ValueError: As in `gspmm`, and where ``out`` has another shape, dtype or device.
    """
    adj, lhs, rhs = _checked_messages("gspmm_add", adj, op, "sum", ("sum",), lhs, rhs)
    _check.check_tensor("out", out)
    _check.check_written("out", out)
    lhs = None if lhs is None else lhs.detach()
    rhs = None if rhs is None else rhs.detach()
    like = lhs if lhs is not None else rhs
    assert like is not None
    loop = _spmm_loop(lhs, rhs)
    shape, out = (adj.num_dst, *loop.shape), out.detach()
    if out.shape != shape or out.dtype != like.dtype or out.device != like.device:
        raise ValueError(
            "out must have the shape and dtype of the sums, and be on their device, "
            f"{shape}, {like.dtype} and {like.device} (got {tuple(out.shape)}, {out.dtype} and "
            f"{out.device})"
        )
    in_place = out.is_contiguous() and _check.is_plain(out)
    for operand in (lhs, rhs):
        in_place = in_place and (operand is None or not _check.share_memory(out, operand))
    kernels = kernels_for(like.device, like.dtype) if in_place else None
    if kernels is None:
        out += _compute_spmm(adj, op, "sum", lhs, rhs)[0]
    else:
        _run_spmm(kernels, out, None, adj, op, "add", lhs, rhs, loop)


def gspmm_arg(
    adj: Adjacency | HasAdjacency,
    op: str,
    reduce: str,
    lhs: Tensor | None = None,
    rhs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`gspmm` for ``max`` or ``min``, with the edge that each element came from; no gradient.

    Arguments and errors are those of `gspmm`.

    Returns:
        ``(out, arg)``, both [num_dst, ...]: the extremum, and of ``adj.idtype`` the id of its edge,
        -1 where a destination has none.
    """
    adj, lhs, rhs = _checked_messages("gspmm_arg", adj, op, reduce, ("max", "min"), lhs, rhs)
    out, arg = _compute_spmm(adj, op, reduce, lhs, rhs)
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
        grad: [num_dst, ...] gradient of the result.
        arg: As ``grad``, of ``adj.idtype``: the ids of the edges of the maxima, -1 for none.
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
    adj, lhs, rhs = _checked_messages("gspmm_arg_backward", adj, op, "max", ("max",), lhs, rhs)
    shapes = tuple(None if side is None else side.shape for side in (lhs, rhs))
    rows = [shape[1:] for shape in shapes if shape is not None]
    shape = (adj.num_dst, *torch.broadcast_shapes(*rows))
    dtype = next(side.dtype for side in (lhs, rhs) if side is not None)
    _check.check_tensor("grad", grad)
    grad = _check.check_result("grad", grad.to(dtype), shape, dtype, adj.device)
    _check.check_result("arg", arg, shape, adj.idtype, adj.device)
    asked = (wanted[0] and lhs is not None) or (wanted[1] and rhs is not None)
    looks = asked and kernels_for(grad.device, dtype) is not None
    if not looks:  # else the kernel looks at each
        _highest_edge(arg, adj.num_edges)
    scales = op in ("mul", "div")
    with torch.no_grad():
        grads = _argmax_backward(
            adj,
            op,
            grad.contiguous(),
            arg.contiguous(),
            (lhs if scales else None, rhs if scales else None),
            (shapes[0], shapes[1]),
            (wanted[0] and lhs is not None, wanted[1] and rhs is not None),
        )
    pairs = zip(grads, given, strict=True)
    lhs_grad, rhs_grad = (None if side is None else side.to(dtype) for side, dtype in pairs)
    return lhs_grad, rhs_grad


def _highest_edge(arg: Tensor, num_edges: int) -> int:
    """The highest id of an argmax, after checking that it is that of an edge; -1 without one."""
    highest = int(arg.max()) if arg.numel() else -1
    if highest >= num_edges:
        raise IndexError(
            f"an id in arg must be that of an edge, or -1 for none (got {highest} of {num_edges} "
            "edges)"
        )
    return highest


def _checked_messages(
    name: str,
    graph: Adjacency | HasAdjacency,
    op: str,
    reduce: str,
    reduces: tuple[str, ...],
    lhs: Tensor | None,
    rhs: Tensor | None,
) -> tuple[Adjacency, Tensor | None, Tensor | None]:
    adj = as_adjacency(graph)
    _check.check_choice(f"op of {name}", op, SPMM_OPS)
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
    _check.check_choice("op of gsddmm", op, SDDMM_OPS)
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
        return sides[0].clone() if target == "e" else _gather(adj, sides[0], target)
    left, right = sides
    _check.check_broadcast(f"gsddmm {op}", left, right)
    dtype = torch.promote_types(left.dtype, right.dtype)
    left, right = left.to(dtype), right.to(dtype)
    if op != "dot":
        return _sddmm(adj, op, left, right, lhs_target, rhs_target)
    flat = left.dim() == 1 and right.dim() == 1
    left, right = (side.unsqueeze(-1) if side.dim() == 1 else side for side in (left, right))
    if left.shape[-1] != right.shape[-1]:
        size = right.shape[-1] if left.shape[-1] == 1 else left.shape[-1]
        left, right = (side.expand(*side.shape[:-1], size) for side in (left, right))
    out = _sddmm(adj, op, left, right, lhs_target, rhs_target)
    return out.squeeze(-1) if flat else out


def edge_softmax(adj: Adjacency | HasAdjacency, logits: Any, norm_by: str = "dst") -> Any:
    """Normalize edge values over the edges into (or out of) each node.

    ``out[e] = exp(logits[e]) / sum of exp(logits[f]) over the edges f that share e's node``, for
    each feature apart, computed without overflow. Differentiable any number of times.

    Args:
        logits: [num_edges, ...] in edge id order. A graph with several relations takes relation ->
            values, which are normalized together, and gives that.
        norm_by: ``dst`` to normalize over edges with one destination, ``src`` with one source.

    Returns:
        [num_edges, ...], of the dtype of ``logits``.

    Raises:
        TypeError: ``logits`` is not a tensor of floating-point numbers.
        ValueError: An unknown ``norm_by``, a wrong number of rows, or another device.

    Example:
        >>> import torch
        >>> adj = Adjacency(torch.tensor([0, 1, 1]), torch.tensor([1, 0, 1]), 2, 2)
        >>> edge_softmax(adj, torch.zeros(3))
        tensor([0.5000, 1.0000, 0.5000])
    """
    if isinstance(logits, Mapping) and hasattr(adj, "_edge_softmax_typed"):
        return adj._edge_softmax_typed(logits, norm_by=norm_by)
    adj = as_adjacency(adj)
    _check.check_choice("norm_by of edge_softmax", norm_by, ("dst", "src"))
    _check.check_operand(
        "edge_softmax", "exp", "logits", logits, "num_edges", adj.num_edges, adj.device
    )
    return _edge_softmax(adj if norm_by == "dst" else adj.reverse(), logits)


def add_rows(out: Tensor, places: Tensor, rows: Tensor) -> None:
    """``out[places] += rows`` for distinct places; no gradient is recorded.

    Args:
        out: ``[m, *]`` of the dtype of ``rows``, or float32 for rows of 16 bits; may be a slice of
            the columns of a larger tensor.
        places: int32 or int64 ``[n]``, distinct, in [0, m).
        rows: ``[n, *]``.

    Raises:
        TypeError: An argument is no tensor, or places are not int32 or int64.
        IndexError: A place is out of range.
        ValueError: Row shapes or numbers of rows differ, or entries of ``out`` share memory.
    """
    out, rows = (
        _check.check_tensor(name, value).detach() for name, value in (("out", out), ("rows", rows))
    )
    _check.check_index_array("places", places)
    if out.dim() == 0 or out.shape[1:] != rows.shape[1:] or places.shape != rows.shape[:1]:
        raise ValueError(
            "out and rows must have rows of one shape, and places one entry per row (got "
            f"{tuple(out.shape[1:])}, {tuple(rows.shape)} and {tuple(places.shape)})"
        )
    if (out.device.type == "meta") != (rows.device.type == "meta"):
        raise ValueError(f"out and rows must hold numbers (on {out.device} and {rows.device})")
    _check.check_written("out", out)
    rows, places = (_check.apart(value, out) for value in (rows, places))
    if rows.numel() == 0:
        return
    kernels = kernels_for(out.device, rows.dtype) if rows.device == out.device else None
    sum_dtype = float32 if rows.dtype.itemsize == 2 else rows.dtype
    takes = out.dtype in (sum_dtype, rows.dtype) and _has_whole_rows(out)
    if kernels is None or not takes:
        _check.check_places("places", places, out.shape[0])
        alike = out.device == rows.device == places.device
        on_gpu = triton_for(out.device, rows.dtype) if alike and takes else None
        if on_gpu is not None:
            on_gpu.add_rows(out, places, rows)
            return
        out.index_add_(0, places.to(out.device, int64), rows.to(out.device, out.dtype))
        return
    width = math.prod(out.shape[1:])
    kernels.add_rows(
        out.as_strided((out.shape[0], width), (max(out.stride(0), 1), 1)),
        places.cpu().contiguous(),
        rows.contiguous().view(rows.shape[0], width),
        num_threads(),
    )


def _has_whole_rows(out: Tensor) -> bool:
    """Whether the numbers of a row are side by side, as they are meant."""
    return out.shape[0] > 0 and out[0].is_contiguous() and _check.is_plain(out)


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
    best, edge, value, arg, ids = _checked_best(best, edge, value, arg, ids, none, op)
    kernels = kernels_for(best.device, best.dtype)
    looks = kernels is None or (ids is not None and ids.numel() == 0)
    if ids is not None and looks and _highest_edge(arg, ids.shape[0]) < 0:
        return  # where it does not look, the kernel does, at each
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
    positions = arg.clamp(min=0).long()
    ids_of_best = (positions if ids is None else ids[positions]).to(edge.dtype)
    is_tie = (value == best) | (value.isnan() & best.isnan())
    takes = (value > best if op == "max" else value < best) | (value.isnan() & ~best.isnan())
    takes |= is_tie & (ids_of_best < edge)
    takes |= edge == none
    takes &= arg >= 0
    best.copy_(torch.where(takes, value, best))
    edge.copy_(torch.where(takes, ids_of_best, edge))


def _checked_best(
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


# ------------------------------------------------------------------ gradients


def _tracked(*values: Operand) -> bool:
    return torch.is_grad_enabled() and any(v is not None and v.requires_grad for v in values)


def _spmm(adj: Adjacency, op: str, reduce: str, lhs: Operand, rhs: Operand) -> Tensor:
    """Differentiable `_compute_spmm`, without the argmax."""
    lhs = None if op == "copy_rhs" else lhs
    rhs = None if op == "copy_lhs" else rhs
    if not _tracked(lhs, rhs):
        return _compute_spmm(adj, op, reduce, lhs, rhs)[0]
    return _SpMM.apply(adj, op, reduce, lhs, rhs)


def _sddmm(
    adj: Adjacency, op: str, lhs: Tensor, rhs: Tensor, lhs_target: str, rhs_target: str
) -> Tensor:
    """Differentiable `_compute_sddmm`."""
    if not _tracked(lhs, rhs):
        return _compute_sddmm(adj, op, lhs, rhs, lhs_target, rhs_target)
    return _SDDMM.apply(adj, op, lhs, rhs, lhs_target, rhs_target)


def _gather(adj: Adjacency, values: Tensor, target: str) -> Tensor:
    """Rows of the target of each edge: differentiable `_compute_gather`, and `e` as it is."""
    if target == "e":
        return values
    if not _tracked(values):
        return _compute_gather(adj, values, target)
    return _Gather.apply(adj, values, target)


def _scatter(adj: Adjacency, values: Tensor, target: str) -> Tensor:
    """Sum of edge rows per target, the adjoint of `gather`."""
    if target == "e":
        return values
    return _spmm(adj.reverse() if target == "u" else adj, "copy_rhs", "sum", None, values)


def _edge_softmax(adj: Adjacency, logits: Tensor) -> Tensor:
    """Differentiable `_compute_edge_softmax`."""
    if not _tracked(logits):
        return _compute_edge_softmax(adj, logits)
    return _EdgeSoftmax.apply(adj, logits)


def _edge_softmax_backward(adj: Adjacency, out: Tensor, grad: Tensor) -> Tensor:
    if not _tracked(out, grad):
        return _compute_edge_softmax_backward(adj, out, grad)
    return _EdgeSoftmaxBackward.apply(adj, out, grad)


class _SpMM(Function):
    @staticmethod
    def forward(
        ctx: Any, adj: Adjacency, op: str, reduce: str, lhs: Operand, rhs: Operand
    ) -> Tensor:
        out, arg = _compute_spmm(adj, op, reduce, lhs, rhs)
        out = out.detach()  # a view of other memory could not be changed in place
        _, _, _, lhs_grad, rhs_grad = ctx.needs_input_grad
        ctx.adj, ctx.op, ctx.reduce = adj, op, reduce
        ctx.lhs_shape = None if lhs is None else lhs.shape
        ctx.rhs_shape = None if rhs is None else rhs.shape
        scales = op in ("mul", "div")
        ctx.save_for_backward(
            lhs if scales and rhs_grad else None,
            rhs if scales and (lhs_grad or op == "div") else None,
            arg,
        )
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Operand, ...]:
        adj, op = ctx.adj, ctx.op
        lhs, rhs, arg = ctx.saved_tensors
        _, _, _, lhs_wanted, rhs_wanted = ctx.needs_input_grad
        if arg is not None:
            shapes, wanted = (ctx.lhs_shape, ctx.rhs_shape), (lhs_wanted, rhs_wanted)
            grads = _argmax_backward(adj, op, grad, arg, (lhs, rhs), shapes, wanted)
            return (None, None, None, *grads)
        if ctx.reduce == "mean":
            degrees = adj.in_degrees().clamp(min=1).to(grad.dtype)
            grad = grad / degrees.view(-1, *[1] * (grad.dim() - 1))
        lhs_grad = rhs_grad = None
        if lhs_wanted:
            row = tuple(ctx.lhs_shape[1:])
            if op in ("mul", "div"):
                lhs_grad = sum_to_row(_spmm(adj.reverse(), op, "sum", grad, rhs), row)
            else:
                lhs_grad = _spmm(adj.reverse(), "copy_lhs", "sum", sum_to_row(grad, row), None)
        if rhs_wanted:
            row = tuple(ctx.rhs_shape[1:])
            if op in ("mul", "div"):
                rhs_grad = _product_onto_row(adj, lhs, "u", grad, "v", row)
                rhs_grad = -rhs_grad / (rhs * rhs) if op == "div" else rhs_grad
            else:
                rhs_grad = _gather(adj, sum_to_row(grad, row), "v")
                rhs_grad = -rhs_grad if op == "sub" else rhs_grad
        return None, None, None, lhs_grad, rhs_grad


class _SDDMM(Function):
    @staticmethod
    def forward(
        ctx: Any,
        adj: Adjacency,
        op: str,
        lhs: Tensor,
        rhs: Tensor,
        lhs_target: str,
        rhs_target: str,
    ) -> Tensor:
        _, _, lhs_grad, rhs_grad, _, _ = ctx.needs_input_grad
        ctx.adj, ctx.op, ctx.targets = adj, op, (lhs_target, rhs_target)
        ctx.rows = tuple(lhs.shape[1:]), tuple(rhs.shape[1:])
        scales = op in ("mul", "div", "dot")
        ctx.save_for_backward(
            lhs if scales and rhs_grad else None,
            rhs if scales and (lhs_grad or op == "div") else None,
        )
        return _compute_sddmm(adj, op, lhs, rhs, lhs_target, rhs_target).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Operand, ...]:
        adj, op = ctx.adj, ctx.op
        lhs, rhs = ctx.saved_tensors
        lhs_target, rhs_target = ctx.targets
        lhs_row, rhs_row = ctx.rows
        _, _, lhs_wanted, rhs_wanted, _, _ = ctx.needs_input_grad
        lhs_grad = rhs_grad = None
        if lhs_wanted:
            if op in ("mul", "div", "dot"):
                factor = 1 / rhs if op == "div" else rhs
                lhs_grad = _product_onto_target(adj, grad, factor, rhs_target, lhs_target, lhs_row)
            else:
                lhs_grad = _scatter(adj, sum_to_row(grad, lhs_row), lhs_target)
        if rhs_wanted:
            if op in ("mul", "div", "dot"):
                rhs_grad = _product_onto_target(adj, grad, lhs, lhs_target, rhs_target, rhs_row)
                rhs_grad = -rhs_grad / (rhs * rhs) if op == "div" else rhs_grad
            else:
                rhs_grad = _scatter(adj, sum_to_row(grad, rhs_row), rhs_target)
                rhs_grad = -rhs_grad if op == "sub" else rhs_grad
        return None, None, lhs_grad, rhs_grad, None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, adj: Adjacency, values: Tensor, target: str) -> Tensor:
        ctx.adj, ctx.target = adj, target
        return _compute_gather(adj, values, target).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Operand, ...]:
        return None, _scatter(ctx.adj, grad, ctx.target), None


class _EdgeSoftmax(Function):
    @staticmethod
    def forward(ctx: Any, adj: Adjacency, logits: Tensor) -> Tensor:
        out = _compute_edge_softmax(adj, logits).detach()
        ctx.adj = adj
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Operand, ...]:
        (out,) = ctx.saved_tensors
        return None, _edge_softmax_backward(ctx.adj, out, grad)


class _EdgeSoftmaxBackward(Function):
    """``out * (grad - S(out * grad))``, where S sums over a destination and hands back to edges."""

    @staticmethod
    def forward(ctx: Any, adj: Adjacency, out: Tensor, grad: Tensor) -> Tensor:
        ctx.adj = adj
        ctx.save_for_backward(out, grad)
        return _compute_edge_softmax_backward(adj, out, grad)

    @staticmethod
    def backward(ctx: Any, upper: Tensor) -> tuple[Operand, ...]:
        adj = ctx.adj
        out, grad = ctx.saved_tensors
        _, out_wanted, grad_wanted = ctx.needs_input_grad
        out_grad = None
        if out_wanted:
            shift = _gather(adj, _scatter(adj, out * grad, "v"), "v")
            other = _gather(adj, _scatter(adj, out * upper, "v"), "v")
            out_grad = upper * (grad - shift) - grad * other
        return None, out_grad, _edge_softmax_backward(adj, out, upper) if grad_wanted else None


def _product_onto_row(
    adj: Adjacency,
    lhs: Tensor,
    lhs_target: str,
    rhs: Tensor,
    rhs_target: str,
    row: tuple[int, ...],
) -> Tensor:
    """Product of two operands per edge, summed down to rows of shape ``row``.

    The dimensions to sum over go last and become a dot product, so that only [num_edges, *row] is
    ever made.
    """
    shape = torch.broadcast_shapes(lhs.shape[1:], rhs.shape[1:])
    padded = (1,) * (len(shape) - len(row)) + row
    summed = [dim for dim, size in enumerate(padded) if size == 1 and shape[dim] != 1]
    if summed:
        size = tuple(shape[dim] for dim in summed)
        others = [dim for dim in range(len(shape)) if dim not in summed]
        lhs, rhs = (_move_last(side, others, summed, size) for side in (lhs, rhs))
    out = _sddmm(adj, "dot" if summed else "mul", lhs, rhs, lhs_target, rhs_target)
    return out.reshape(adj.num_edges, *row)


def _move_last(
    values: Tensor, others: list[int], summed: list[int], size: tuple[int, ...]
) -> Tensor:
    """[rows, *shape] to [rows, *others, product of summed], broadcast over ``summed`` only."""
    rows = values.shape[0]
    missing = len(others) + len(summed) + 1 - values.dim()
    values = values.reshape(rows, *[1] * missing, *values.shape[1:])
    values = values.permute(0, *(dim + 1 for dim in others), *(dim + 1 for dim in summed))
    shape = values.shape[1 : 1 + len(others)]
    return values.expand(rows, *shape, *size).reshape(rows, *shape, math.prod(size))


def _product_onto_target(
    adj: Adjacency,
    edge_values: Tensor,
    factor: Tensor,
    factor_target: str,
    target: str,
    row: tuple[int, ...],
) -> Tensor:
    """Sum of ``edge_values * factor`` over the edges of each target, as rows of shape ``row``."""
    if target == "e" or factor_target == "e":
        products = _product_onto_row(adj, edge_values, "e", factor, factor_target, row)
        return _scatter(adj, products, target)
    if factor_target == target:
        total = _scatter(adj, edge_values, target)
        return sum_to_row(torch.mul(*align_rows(total, factor)), row)
    view = adj.reverse() if target == "u" else adj
    return sum_to_row(_spmm(view, "mul", "sum", factor, edge_values), row)


def _argmax_backward(
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
        arg: Ids of the edges that have the maximum, same shape; -1 for none.
        operands: Source rows and edge rows, each where ``op`` scales by it.
        shapes: Those of the source rows and the edge rows; None where ``op`` does not look at them.
    """
    on_gpu = None
    if not torch.is_grad_enabled():  # the gradient will not be differentiated
        rows = tuple(None if shape is None else tuple(shape[1:]) for shape in shapes)
        grads = _compute_argmax_backward(adj, op, grad, arg, operands, (rows[0], rows[1]), wanted)
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
            assert lhs_taken is not None and rhs_taken is not None
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
    is_summed = row != tuple(grad.shape[1:])
    grads = grad.to(wide(grad.dtype)) if is_summed else grad
    op = op if op in ("mul", "div") else "copy_lhs"
    rhs = None if rhs is None else rhs.detach().to(grads.dtype)
    share, _ = on_gpu.spmm(adj.reverse(), op, "sum", grads, rhs, arg)
    return sum_to_row(share, row).to(grad.dtype)


def _put(values: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    """Sum ``values`` into zeros of ``shape`` at flat ``places``, in order."""
    flat, where = values.to(wide(values.dtype)).reshape(-1), places.reshape(-1)
    zeros = flat.new_zeros(math.prod(shape))
    if values.is_cuda:  # sorts; scatter_add would add by atomics, in no fixed order
        out = zeros.index_put((where,), flat, accumulate=True)
    else:
        out = zeros.scatter_add(0, where, flat)
    return out.reshape(shape).to(values.dtype)


# ------------------------------------------------------------------ without autograd


def _compute_spmm(
    adj: Adjacency, op: str, reduce: str, lhs: Operand, rhs: Operand
) -> tuple[Tensor, Tensor | None]:
    """Reduced messages [num_dst, ...]; for max and min also the argmax, same shape."""
    lhs = None if lhs is None or op == "copy_rhs" else lhs.detach()
    rhs = None if rhs is None or op == "copy_lhs" else rhs.detach()
    like = lhs if lhs is not None else rhs
    assert like is not None
    kernels = kernels_for(like.device, like.dtype)
    if kernels is None:
        return _without_extension(like).spmm(adj, op, reduce, lhs, rhs)
    loop = _spmm_loop(lhs, rhs)
    out = empty((adj.num_dst, *loop.shape), like.dtype)
    has_arg = reduce in ("max", "min")
    arg = empty(out.shape, adj.idtype) if has_arg else None
    _run_spmm(kernels, out, arg, adj, op, reduce, lhs, rhs, loop)
    return out, arg


def _run_spmm(
    kernels: ModuleType,
    out: Tensor,
    arg: Operand,
    adj: Adjacency,
    op: str,
    reduce: str,
    lhs: Operand,
    rhs: Operand,
    loop: RowLoop,
) -> None:
    if out.numel() == 0:
        return
    edges = adj.csc(ids=op != "copy_lhs" or reduce in ("max", "min"))
    rows = flat_rows(lhs), flat_rows(rhs), flat_rows(arg)
    steps = loop.lhs_offsets, loop.rhs_offsets, loop.inner, loop.lhs_step, loop.rhs_step
    kernels.spmm(flat_rows(out), *edges, adj.num_src, *rows, op, reduce, *steps, num_threads())


def _compute_sddmm(
    adj: Adjacency, op: str, lhs: Tensor, rhs: Tensor, lhs_target: str, rhs_target: str
) -> Tensor:
    """``op`` of two operands per edge: [num_edges, ...]; for dot the last dimensions are equal."""
    lhs, rhs = lhs.detach(), rhs.detach()
    kernels = kernels_for(lhs.device, lhs.dtype)
    if kernels is None:
        return _without_extension(lhs).sddmm(adj, op, lhs, rhs, lhs_target, rhs_target)
    make_loop = dot_loop if op == "dot" else row_loop
    loop = make_loop(tuple(lhs.shape[1:]), tuple(rhs.shape[1:]))
    out = empty((adj.num_edges, *loop.shape), lhs.dtype)
    if not out.numel():
        return out
    if loop.inner == 0:
        return out.zero_()
    arguments = (
        *(flat_rows(lhs), flat_rows(rhs), lhs_target, rhs_target, op),
        *(loop.lhs_offsets, loop.rhs_offsets, loop.inner, loop.lhs_step, loop.rhs_step),
    )
    if op == "dot" or adj.has_sequential_csc():
        # Rows of the destination are read once, and stay in the cache for all of its edges.
        indptr, indices, eids = adj.csc()
        edges = (indptr, indices, eids, adj.num_src)
        kernels.sddmm_csc(flat_rows(out), *edges, *arguments, num_threads())
    else:
        src, dst = adj.coo()
        edges_in_order = (src, dst, adj.num_src, adj.num_dst)
        kernels.sddmm_coo(flat_rows(out), *edges_in_order, *arguments, num_threads())
    return out


def _compute_gather(adj: Adjacency, values: Tensor, target: str) -> Tensor:
    """The row of each edge's source or destination, any dtype: [num_edges, ...]."""
    index = adj.coo()[0 if target == "u" else 1]
    values = values.detach()
    kernels = kernels_for(values.device)
    if kernels is None:
        return values.index_select(0, index)
    out = empty((adj.num_edges, *values.shape[1:]), values.dtype)
    return torch.index_select(values, 0, index, out=out)


def _compute_edge_softmax(adj: Adjacency, logits: Tensor) -> Tensor:
    """Softmax over the in-edges of each destination: [num_edges, ...]."""
    logits = logits.detach()
    kernels = kernels_for(logits.device, logits.dtype)
    if kernels is None:
        return _without_extension(logits).edge_softmax(adj, logits)
    out = empty(logits.shape, logits.dtype)
    if out.numel():
        indptr, _, eids = adj.csc()
        kernels.edge_softmax(flat_rows(out), indptr, eids, flat_rows(logits), num_threads())
    return out


def _compute_edge_softmax_backward(adj: Adjacency, out: Tensor, grad: Tensor) -> Tensor:
    """``out * (grad - sum of out * grad over the destination)``: [num_edges, ...]."""
    out, grad = out.detach(), grad.detach()
    kernels = kernels_for(out.device, out.dtype)
    if kernels is None:
        return _without_extension(out).edge_softmax_backward(adj, out, grad)
    result = empty(out.shape, out.dtype)
    if out.numel():
        indptr, _, eids = adj.csc()
        kernels.edge_softmax_backward(
            flat_rows(result), indptr, eids, flat_rows(out), flat_rows(grad), num_threads()
        )
    return result


def _compute_argmax_backward(
    adj: Adjacency,
    op: str,
    grad: Tensor,
    arg: Tensor,
    operands: tuple[Operand, Operand],
    rows: tuple[Shape | None, Shape | None],
    wanted: tuple[bool, bool],
) -> tuple[Operand, Operand] | None:
    """Gradients of max or min, given the argmax; None where no kernel can do it."""
    kernels = kernels_for(grad.device, grad.dtype)
    if kernels is None:
        return None
    shape = tuple(grad.shape[1:])
    dtype = wide(grad.dtype)
    lhs, rhs = (None if side is None else flat_rows(side.detach()) for side in operands)
    lhs_places, rhs_places = (
        row_places(shape if row is None else row, shape, grad.device).contiguous().view(-1)
        for row in rows
    )
    lhs_grad = rhs_grad = None
    if wanted[0]:
        lhs_grad = empty((adj.num_src, *shape), dtype).zero_()
    if wanted[1]:
        assert rows[1] is not None
        rhs_grad = empty((adj.num_edges, *rows[1]), dtype).zero_()
    if arg.numel():
        results = flat_rows(grad.detach()), flat_rows(arg)
        read = adj.coo()[0], adj.num_src, lhs, rhs, lhs_places, rhs_places, op
        sums = flat_rows(lhs_grad), flat_rows(rhs_grad)
        kernels.argmax_backward(*results, *read, *sums, num_threads())
    if lhs_grad is not None:
        assert rows[0] is not None
        lhs_grad = sum_to_row(lhs_grad, rows[0]).to(grad.dtype)
    return lhs_grad, None if rhs_grad is None else rhs_grad.to(grad.dtype)


def _without_extension(like: Tensor) -> Any:
    return triton_for(like.device, like.dtype) or reference


def _spmm_loop(lhs: Operand, rhs: Operand) -> RowLoop:
    if lhs is None or rhs is None:
        only = rhs if lhs is None else lhs
        assert only is not None
        return copy_loop(tuple(only.shape[1:]))
    return row_loop(tuple(lhs.shape[1:]), tuple(rhs.shape[1:]))


def flat_rows(values: Operand) -> Operand:
    """Two-dimensional, contiguous: a view wherever one exists."""
    if values is None:
        return None
    return values.detach().contiguous().view(values.shape[0], math.prod(values.shape[1:]))
