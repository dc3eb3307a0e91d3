# SPDX-License-Identifier: Apache-2.0
"""The operators in plain torch where the compiled kernels are absent, or values are on a GPU.

`F.embedding_bag` over a CSC pointer is as fast as any kernel for the sums it can express. The rest
runs the reference a slice at a time, so that messages take a bounded amount of memory. No autograd.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import reference
from .._adjacency import Adjacency

MESSAGE_ELEMENTS = 1 << 24
"""Elements of the messages that may exist at a time."""

_BAG_DTYPES = (torch.float32, torch.float64)


def spmm(
    adj: Adjacency, op: str, reduce: str, lhs: Tensor | None, rhs: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Reduced messages, and for max and min the argmax."""
    if reduce in ("sum", "mean"):
        out = _bags(adj, op, reduce, lhs, rhs)
        if out is not None:
            return out, None
    slices = list(row_slices(adj, _row_elements(op, lhs, rhs)))
    if len(slices) == 1:
        return _spmm_slice(adj, op, reduce, lhs, rhs)
    indptr, indices, eids = adj.csc()
    outs, args = [], []
    for first, last in slices:
        begin, end = int(indptr[first]), int(indptr[last])
        ids = torch.arange(begin, end, device=adj.device) if eids is None else eids[begin:end]
        part = Adjacency.from_csc(
            indptr[first : last + 1] - begin,
            indices[begin:end],
            None,
            adj.num_src,
            last - first,
            check=False,
        )
        edge_rows = None if rhs is None or op == "copy_lhs" else rhs.index_select(0, ids)
        out, arg = _spmm_slice(part, op, reduce, lhs, edge_rows)
        outs.append(out)
        if arg is not None:
            known = ids[arg.clamp(min=0).long()].to(arg.dtype) if end > begin else arg
            args.append(torch.where(arg < 0, arg, known))
    return torch.cat(outs), torch.cat(args) if args else None


def _spmm_slice(
    adj: Adjacency, op: str, reduce: str, lhs: Tensor | None, rhs: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    if reduce in ("sum", "mean"):
        return reference.gspmm(adj, op, reduce, lhs, rhs), None
    return reference.gspmm_arg(adj, op, reduce, lhs, rhs)


def _bags(
    adj: Adjacency, op: str, reduce: str, lhs: Tensor | None, rhs: Tensor | None
) -> Tensor | None:
    """Sum or mean of source rows, weighted by one number per edge (and head); else None."""
    if op not in ("copy_lhs", "mul") or lhs is None or lhs.dtype not in _BAG_DTYPES:
        return None
    if min(lhs.numel(), adj.num_edges, adj.num_dst) == 0:
        return None
    indptr, indices, eids = adj.csc()
    if op == "copy_lhs":
        out = F.embedding_bag(
            indices, lhs.reshape(adj.num_src, -1), indptr, mode=reduce, include_last_offset=True
        )
        return out.reshape(adj.num_dst, *lhs.shape[1:])
    assert rhs is not None
    heads = _heads(lhs, rhs)
    if heads is None:
        return None
    weights = rhs.reshape(adj.num_edges, heads)
    if eids is not None:
        weights = weights.index_select(0, eids)
    rows = lhs.reshape(adj.num_src, heads, -1)
    out = rows.new_empty(adj.num_dst, heads, rows.shape[2])
    for head in range(heads):
        out[:, head] = F.embedding_bag(
            indices,
            rows[:, head].contiguous(),
            indptr,
            mode="sum",
            per_sample_weights=weights[:, head].contiguous(),
            include_last_offset=True,
        )
    if reduce == "mean":
        out /= adj.in_degrees().clamp(min=1).to(out.dtype).view(-1, 1, 1)
    return out.reshape(adj.num_dst, *lhs.shape[1:])


def _heads(lhs: Tensor, rhs: Tensor) -> int | None:
    """How many weights each edge has, if each scales a run of equal length in the source row."""
    row, weight = tuple(lhs.shape[1:]), tuple(rhs.shape[1:])
    weight = (1,) * (len(row) - len(weight)) + weight
    if len(weight) != len(row) or lhs.dtype != rhs.dtype:
        return None
    split = len(row)
    while split and weight[split - 1] == 1:
        split -= 1
    return math.prod(weight) if row[:split] == weight[:split] else None


def sddmm(
    adj: Adjacency, op: str, lhs: Tensor, rhs: Tensor, lhs_target: str, rhs_target: str
) -> Tensor:
    """One value per edge."""
    src, dst = adj.coo()
    step = max(1, MESSAGE_ELEMENTS // max(1, _row_elements("mul", lhs, rhs)))
    if adj.num_edges <= step:
        return reference.gsddmm(adj, op, lhs, rhs, lhs_target, rhs_target)
    outs = []
    for begin in range(0, adj.num_edges, step):
        rows = slice(begin, begin + step)
        part = Adjacency(src[rows], dst[rows], adj.num_src, adj.num_dst, check=False)
        outs.append(
            reference.gsddmm(
                part,
                op,
                lhs[rows] if lhs_target == "e" else lhs,
                rhs[rows] if rhs_target == "e" else rhs,
                lhs_target,
                rhs_target,
            )
        )
    return torch.cat(outs)


def edge_softmax(adj: Adjacency, logits: Tensor) -> Tensor:
    """Softmax over the in-edges of each destination."""
    return reference.edge_softmax(adj, logits)


def edge_softmax_backward(adj: Adjacency, out: Tensor, grad: Tensor) -> Tensor:
    """Gradient of the logits, given the softmax and its gradient."""
    product = (out * grad).float() if out.dtype in (torch.bfloat16, torch.float16) else out * grad
    total, _ = spmm(adj, "copy_rhs", "sum", None, product)
    return (product - out * total.index_select(0, adj.coo()[1])).to(out.dtype)


def _row_elements(op: str, lhs: Tensor | None, rhs: Tensor | None) -> int:
    if lhs is None or op == "copy_rhs":
        assert rhs is not None
        return math.prod(rhs.shape[1:])
    if rhs is None or op == "copy_lhs":
        return math.prod(lhs.shape[1:])
    return math.prod(torch.broadcast_shapes(lhs.shape[1:], rhs.shape[1:]))


def row_slices(adj: Adjacency, row_elements: int) -> Iterator[tuple[int, int]]:
    """Ranges of destinations whose messages fit; one destination is never split."""
    budget = max(1, MESSAGE_ELEMENTS // max(1, row_elements))
    if adj.num_edges <= budget:
        yield 0, adj.num_dst
        return
    indptr = adj.csc()[0]
    first = 0
    while first < adj.num_dst:
        limit = indptr[first] + budget
        last = int(torch.searchsorted(indptr, limit, right=True)) - 1
        last = min(max(last, first + 1), adj.num_dst)
        yield first, last
        first = last
