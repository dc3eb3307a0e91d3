# SPDX-License-Identifier: Apache-2.0
"""Each operator in plain torch: what it means, its fallback, and its oracle in tests.

Nothing here is fast: every message is a row of its own, [num_edges, ...]. Everything is composed of
differentiable torch functions, so gradients of any order come from autograd. float16 and bfloat16
are computed in float32 and rounded once, at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._adjacency import Adjacency, HasAdjacency, as_adjacency
from ._attention_rule import Attention

_HALF = (torch.float16, torch.bfloat16)


def gspmm(
    adj: Adjacency | HasAdjacency,
    op: str,
    reduce: str,
    lhs: Tensor | None = None,
    rhs: Tensor | None = None,
) -> Tensor:
    """Messages ``op(lhs[src], rhs)`` reduced by destination; see `graphshard.ops.gspmm`."""
    adj = as_adjacency(adj)
    src, dst = adj.coo()
    messages, dtype = _messages(op, _gather(lhs, src, op != "copy_rhs"), rhs)
    if reduce in ("sum", "mean") or adj.num_edges == 0:
        out = messages.new_zeros(adj.num_dst, *messages.shape[1:])
        out = out.index_add(0, dst, messages)
        if reduce == "mean":
            degrees = adj.in_degrees().clamp(min=1).to(out.dtype)
            out = out / degrees.view(-1, *[1] * (out.dim() - 1))
        return out.to(dtype)
    arg = _argmax(adj, messages.detach(), reduce)
    return _take_argmax(messages, arg).to(dtype)


def gspmm_arg(
    adj: Adjacency | HasAdjacency,
    op: str,
    reduce: str,
    lhs: Tensor | None = None,
    rhs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Extremum and the edge it came from; see `graphshard.ops.gspmm_arg`."""
    adj = as_adjacency(adj)
    with torch.no_grad():
        messages, dtype = _messages(op, _gather(lhs, adj.coo()[0], op != "copy_rhs"), rhs)
        arg = _argmax(adj, messages, reduce)
        return _take_argmax(messages, arg).to(dtype), arg.to(adj.idtype)


def gsddmm(
    adj: Adjacency | HasAdjacency,
    op: str,
    lhs: Tensor | None,
    rhs: Tensor | None = None,
    lhs_target: str = "u",
    rhs_target: str = "v",
) -> Tensor:
    """One value per edge from its ends or itself; see `graphshard.ops.gsddmm`."""
    adj = as_adjacency(adj)
    left = _at_target(adj, lhs, lhs_target, op != "copy_rhs")
    right = _at_target(adj, rhs, rhs_target, op != "copy_lhs")
    if op != "dot":
        messages, dtype = _messages(op, left, right)
        return messages.to(dtype)
    assert left is not None
    assert right is not None
    flat = left.dim() == 1 and right.dim() == 1
    left, right = (side.unsqueeze(-1) if side.dim() == 1 else side for side in (left, right))
    products, dtype = _messages("mul", left, right)
    out = products.sum(-1, keepdim=True).to(dtype)
    return out.squeeze(-1) if flat else out


def edge_softmax(adj: Adjacency | HasAdjacency, logits: Tensor, norm_by: str = "dst") -> Tensor:
    """Softmax over the edges that share an end; see `graphshard.ops.edge_softmax`."""
    adj = as_adjacency(adj)
    if norm_by == "src":
        adj = adj.reverse()
    dst = adj.coo()[1]
    wide = logits.float() if logits.dtype in _HALF else logits
    if adj.num_edges == 0:
        return logits.clone()
    highest, _ = gspmm_arg(adj, "copy_rhs", "max", None, wide)
    shifted = torch.exp(wide - highest.index_select(0, dst))
    total = gspmm(adj, "copy_rhs", "sum", None, shifted)
    return (shifted / total.index_select(0, dst)).to(logits.dtype)


def attend(adj: Adjacency | HasAdjacency, attention: Attention) -> Tensor:
    """Attention over in-edges; see `graphshard.ops.attend`."""
    adj = as_adjacency(adj)
    src, dst = adj.coo()
    edges = torch.arange(adj.num_edges, device=adj.device, dtype=adj.idtype)
    weights = edge_softmax(adj, attention.scores_of(src, dst, edges))
    multipliers = attention.multipliers_of(edges)
    weights = weights if multipliers is None else weights * multipliers
    messages = weights.unsqueeze(-1) * attention.values.index_select(0, src)
    out = messages.new_zeros(adj.num_dst, *messages.shape[1:]).index_add(0, dst, messages)
    out = out.to(attention.dtype)
    if attention.bias is not None:
        out = out + attention.bias.to(out.dtype)
    return out.relu() if attention.relu else out


def _gather(values: Tensor | None, index: Tensor, used: bool) -> Tensor | None:
    if not used:
        return None
    assert values is not None
    return values.index_select(0, index)


def _at_target(adj: Adjacency, values: Tensor | None, target: str, used: bool) -> Tensor | None:
    if target == "e":
        return values if used else None
    src, dst = adj.coo()
    return _gather(values, src if target == "u" else dst, used)


def _messages(op: str, left: Tensor | None, right: Tensor | None) -> tuple[Tensor, torch.dtype]:
    """(messages in the dtype that accumulates, dtype of the result)."""
    if left is None or right is None or op in ("copy_lhs", "copy_rhs"):
        only = left if op == "copy_lhs" else right
        assert only is not None
        return (only.float() if only.dtype in _HALF else only), only.dtype
    dtype = torch.promote_types(left.dtype, right.dtype)
    wide = torch.float32 if dtype in _HALF else dtype
    left, right = _align(left.to(wide), right.to(wide))
    if op == "add":
        return left + right, dtype
    if op == "sub":
        return left - right, dtype
    if op == "mul":
        return left * right, dtype
    assert op == "div", op
    return left / right, dtype


def _align(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Insert dimensions after the first, so that rows broadcast from the right."""
    dim = max(left.dim(), right.dim())
    return tuple(  # type: ignore[return-value]
        side.reshape(side.shape[0], *[1] * (dim - side.dim()), *side.shape[1:])
        for side in (left, right)
    )


def _argmax(adj: Adjacency, messages: Tensor, reduce: str) -> Tensor:
    """Edge id of each extremum, int64: the smallest among equals, a NaN before any number."""
    dst = adj.coo()[1]
    if reduce == "min":
        messages = -messages
    shape = (adj.num_dst, *messages.shape[1:])
    rows = dst.long().view(-1, *[1] * (messages.dim() - 1)).expand_as(messages)
    best = messages.new_full(shape, -torch.inf).scatter_reduce(0, rows, messages, "amax")
    best = best.index_select(0, dst)
    is_best = (messages == best) | (messages.isnan() & best.isnan())
    ids = torch.arange(adj.num_edges, device=messages.device)
    ids = ids.view(-1, *[1] * (messages.dim() - 1)).expand_as(messages)
    ids = torch.where(is_best, ids, adj.num_edges)
    arg = ids.new_full(shape, adj.num_edges).scatter_reduce(0, rows, ids, "amin")
    return torch.where(arg == adj.num_edges, -1, arg)


def _take_argmax(messages: Tensor, arg: Tensor) -> Tensor:
    if messages.shape[0] == 0:
        return messages.new_zeros(arg.shape)
    return torch.where(arg < 0, 0.0, messages.gather(0, arg.clamp(min=0)))
