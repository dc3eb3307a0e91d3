# SPDX-License-Identifier: Apache-2.0
"""Each operator in plain torch: what it means, its fallback, and its oracle in tests.

The operators on edges come first, in their simplest form: every message is a row of its own,
[num_edges, ...], and everything is composed of differentiable torch functions, so gradients of any
order come from autograd. float16 and bfloat16 are computed in float32 and rounded once, at the end.

`spmm`, `sddmm`, `take` and the two backward passes are what runs where the compiled kernels are
absent, or values are on a GPU without Triton, whose module has the same names. They do the same
some edges at a time, so that what has a row per edge takes a bounded amount of memory; no autograd.
`F.embedding_bag` over a CSC pointer is as fast as any kernel for the sums that it can express.
Attention is the online softmax of csrc/attention/attention.h. Backward each chunk's share of the
gradient comes from autograd: with the gradient of the result and its statistics held constant, it
is that of ``sum over edges and heads of a (m c <grad, values> - delta)``.

`draw_neighbors` draws edges per row. Each row draws from the list of its edges without the excluded
ones; a draw is an offset into that list. The number of a word in a row's stream is the number of
the draw (uniform, or with replacement) or the offset of the edge (weighted without replacement).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ._adjacency import Adjacency, HasAdjacency, as_adjacency, expand_rows
from ._attention_rule import OPERANDS, Attention, wide
from ._broadcast import align_rows
from .counter_random import (
    ROW_DOMAIN,
    SOURCE_DOMAIN,
    below,
    exponential,
    key_state,
    states,
    unit,
    word,
)

MESSAGE_ELEMENTS = 1 << 24
"""Elements of the messages that may exist at a time."""
_BAG_DTYPES = (torch.float32, torch.float64)
_NO_LIMIT = 2**31 - 1
_EDGES_AT_ONCE = 1 << 20
"""Weights and shared numbers are looked at edge by edge; so many edges are held at a time."""


# ------------------------------------------------------------------ operators on edges


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
    assert left is not None and right is not None
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
    values = logits.to(wide(logits.dtype))
    if adj.num_edges == 0:
        return logits.clone()
    highest, _ = gspmm_arg(adj, "copy_rhs", "max", None, values)
    shifted = torch.exp(values - highest.index_select(0, dst))
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
        return only.to(wide(only.dtype)), only.dtype
    dtype = torch.promote_types(left.dtype, right.dtype)
    left, right = align_rows(left.to(wide(dtype)), right.to(wide(dtype)))
    if op == "add":
        return left + right, dtype
    if op == "sub":
        return left - right, dtype
    if op == "mul":
        return left * right, dtype
    assert op == "div", op
    return left / right, dtype


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


# ------------------------------------------------------------------ some edges at a time


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
            edge_ids = ids[arg.clamp(min=0).long()].to(arg.dtype) if end > begin else arg
            args.append(torch.where(arg < 0, arg, edge_ids))
    return torch.cat(outs), torch.cat(args) if args else None


def _spmm_slice(
    adj: Adjacency, op: str, reduce: str, lhs: Tensor | None, rhs: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    if reduce in ("sum", "mean"):
        return gspmm(adj, op, reduce, lhs, rhs), None
    return gspmm_arg(adj, op, reduce, lhs, rhs)


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
        return gsddmm(adj, op, lhs, rhs, lhs_target, rhs_target)
    outs = []
    for begin in range(0, adj.num_edges, step):
        rows = slice(begin, begin + step)
        part = Adjacency(src[rows], dst[rows], adj.num_src, adj.num_dst, check=False)
        outs.append(
            gsddmm(
                part,
                op,
                lhs[rows] if lhs_target == "e" else lhs,
                rhs[rows] if rhs_target == "e" else rhs,
                lhs_target,
                rhs_target,
            )
        )
    return torch.cat(outs)


def edge_softmax_backward(adj: Adjacency, out: Tensor, grad: Tensor) -> Tensor:
    """Gradient of the logits, given the softmax and its gradient."""
    product = (out * grad).to(wide(out.dtype))
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
    yield from _ranges(adj.csc()[0], budget)


def _ranges(indptr: Tensor, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows with so many entries at most, or one row that has more."""
    first, num_rows = 0, indptr.shape[0] - 1
    while first < num_rows:
        last = int(torch.searchsorted(indptr, indptr[first] + most, right=True)) - 1
        last = min(max(last, first + 1), num_rows)
        yield first, last
        first = last


def take(adj: Adjacency, a: Attention, peak: Tensor, total: Tensor, sums: Tensor) -> None:
    """Take the edges into the state of their destinations, in place."""
    indptr, indices, eids = adj.csc()
    for first, last in row_slices(adj, _attention_elements(a)):
        begin, end = int(indptr[first]), int(indptr[last])
        if begin == end:
            continue
        row = expand_rows(indptr[first : last + 1] - begin, end - begin).long()
        u = indices[begin:end]
        e = torch.arange(begin, end, device=adj.device) if eids is None else eids[begin:end]
        scores = a.scores_of(u, row + first, e)
        columns = row.view(-1, 1).expand_as(scores)
        old = peak[first:last].clone()
        new = old.scatter_reduce(0, columns, scores, "amax")
        shift = new.masked_fill(new == -torch.inf, 0.0)  # rows without an edge so far
        weights = (scores - shift.index_select(0, row)).exp()
        scale = (old - shift).exp()
        total[first:last].mul_(scale).index_add_(0, row, weights)
        multipliers = a.multipliers_of(e)
        weights = weights if multipliers is None else weights * multipliers
        messages = weights.unsqueeze(-1) * a.values.index_select(0, u)
        sums[first:last].mul_(scale.unsqueeze(-1)).index_add_(0, row, messages)
        peak[first:last] = new


def gradients(
    adj: Adjacency,
    a: Attention,
    statistics: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of the operands, in the type of sums; see `graphshard.ops.attention.compute`."""
    peak, total, delta = statistics
    indptr, indices, eids = adj.csc()
    step = max(1, MESSAGE_ELEMENTS // max(1, _attention_elements(a)))
    sums = [
        torch.zeros_like(t, dtype=wide(a.dtype)) if w and t is not None else None
        for t, w in zip(a.operands, wanted, strict=True)
    ]
    rows = expand_rows(indptr, adj.num_edges)
    for begin in range(0, adj.num_edges, step):
        u, v = indices[begin : begin + step], rows[begin : begin + step]
        e = torch.arange(begin, begin + u.shape[0], device=adj.device, dtype=adj.idtype)
        e = e if eids is None else eids[begin : begin + step]
        with torch.enable_grad():
            leaves = [
                t if t is None or not w else t.detach().requires_grad_()
                for t, w in zip(a.operands, wanted, strict=True)
            ]
            part = a.with_operands(leaves)
            shifted = part.scores_of(u, v, e) - peak.index_select(0, v)
            weights = shifted.exp() / total.index_select(0, v)
            values = part.values.index_select(0, u).to(peak.dtype)
            g = (values * grad.index_select(0, v).to(peak.dtype)).sum(-1)
            multipliers = part.multipliers_of(e)
            g = g if multipliers is None else g * multipliers
            surrogate = (weights * (g - delta.index_select(0, v))).sum()
        inputs = [t for t, w in zip(leaves, wanted, strict=True) if t is not None and w]
        shares = torch.autograd.grad(surrogate, inputs, allow_unused=True)
        for total_share, share in zip((s for s in sums if s is not None), shares, strict=True):
            if share is not None:
                total_share += share
    assert len(sums) == len(OPERANDS)
    return sums


def _attention_elements(a: Attention) -> int:
    return a.heads * max(a.dim, a.score_dim, 1)


# ------------------------------------------------------------------ draws


@dataclass(frozen=True)
class _Lists:
    """For each row drawn, its edges without the excluded ones."""

    begin: Tensor  # [n] int64, where the row begins, excluded edges included
    degree: Tensor  # [n] int64, without them
    excluded: Tensor | None  # all excluded positions, ascending
    first: Tensor | None  # [n], how many of them lie before the row
    last: Tensor | None  # [n], how many lie before its end

    @classmethod
    def of(cls, indptr: Tensor, rows: Tensor, excluded: Tensor | None) -> _Lists:
        rows = rows.long()
        begin = indptr[rows].long()
        end = indptr[rows + 1].long()
        if excluded is None or excluded.numel() == 0:
            return cls(begin, end - begin, None, None, None)
        first = torch.searchsorted(excluded, begin)
        last = torch.searchsorted(excluded, end)
        return cls(begin, end - begin - (last - first), excluded, first, last)

    def slice(self, first: int, last: int) -> _Lists:
        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[first:last]

        return _Lists(
            self.begin[first:last],
            self.degree[first:last],
            self.excluded,
            cut(self.first),
            cut(self.last),
        )

    def positions(self, which: Tensor, offsets: Tensor) -> Tensor:
        """Position of each edge, given as the number of its row and its offset in that list."""
        positions = self.begin[which] + offsets
        if self.excluded is None or self.first is None or self.last is None:
            return positions
        # An excluded edge is skipped if no more than `offset` kept edges of the row precede it;
        # `kept_before` counts kept edges from the very first row on.
        kept_before = self.excluded - torch.arange(
            self.excluded.numel(), device=self.excluded.device
        )
        first = self.first[which]
        skipped = torch.searchsorted(kept_before, positions - first, right=True)
        return positions + torch.minimum(skipped, self.last[which]) - first


class SourceIds(Protocol):
    """The source of each edge, in a tensor or not."""

    def __getitem__(self, positions: Tensor, /) -> Tensor: ...


def draw_neighbors(
    indptr: Tensor,
    rows: Tensor,
    fanout: int,
    key: int,
    row_ids: Tensor,
    *,
    indices: SourceIds,
    replace: bool = False,
    prob: Tensor | None = None,
    prob_ids: Tensor | None = None,
    labor_ids: Tensor | None = None,
    excluded: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `graphshard.ops.draw_neighbors`, without its checks; excluded are positions, ascending."""
    lists = _Lists.of(indptr, rows, excluded)
    row_states = states(key_state(key, ROW_DOMAIN), row_ids.long())
    if fanout < 0:
        fanout, replace = _NO_LIMIT, False
    if prob is None and (labor_ids is None or fanout == _NO_LIMIT):
        counts, offsets = (_repeated if replace else _uniform)(lists.degree, fanout, row_states)
    else:
        numbers = None
        if labor_ids is not None:
            numbers = _SharedNumbers(key_state(key, SOURCE_DOMAIN), labor_ids)
        weights = None if prob is None else _ProbOfEdges(prob, prob_ids)
        counts, offsets = _by_edge(lists, fanout, row_states, replace, weights, numbers)
    which = torch.repeat_interleave(
        torch.arange(rows.shape[0], device=rows.device), counts, output_size=offsets.shape[0]
    )
    positions = lists.positions(which, offsets)
    return counts, positions.to(indptr.dtype), indices[positions]


def _uniform(degree: Tensor, fanout: int, row_states: Tensor) -> tuple[Tensor, Tensor]:
    """Floyd's algorithm: of d edges, draw k without replacement in k steps.

    Step i draws t from [0, d - k + i]; if t was drawn before, d - k + i is taken in its place.
    """
    counts = degree.clamp(max=fanout)
    which, offsets = _places(counts)
    (limited,) = torch.nonzero(degree > fanout, as_tuple=True)
    if limited.numel() == 0 or fanout == 0:
        return counts, offsets
    chosen = torch.empty(limited.shape[0], fanout, dtype=torch.int64, device=degree.device)
    first = degree[limited] - fanout
    for i in range(fanout):
        drawn = below(word(row_states[limited], i), first + (i + 1))
        is_drawn = (chosen[:, :i] == drawn[:, None]).any(1)
        chosen[:, i] = torch.where(is_drawn, first + i, drawn)
    offsets[(degree > fanout)[which]] = chosen.sort(1).values.flatten()
    return counts, offsets


def _repeated(degree: Tensor, fanout: int, row_states: Tensor) -> tuple[Tensor, Tensor]:
    counts = torch.where(degree > 0, fanout, 0)
    which, numbers = _places(counts)
    return counts, below(word(row_states[which], numbers), degree[which])


@dataclass(frozen=True)
class _SharedNumbers:
    """A number in [0, 1) per source node, the same for every row that has it as a neighbour."""

    start: int
    ids: Tensor  # [E] which source an edge has

    def at(self, positions: Tensor) -> Tensor:
        return unit(states(self.start, self.ids[positions].long()))


@dataclass(frozen=True)
class _ProbOfEdges:
    prob: Tensor
    ids: Tensor | None  # [E] which of them an edge has; None where they are by position

    def at(self, positions: Tensor) -> Tensor:
        return self.prob[positions if self.ids is None else self.ids[positions].long()].double()


def _by_edge(
    lists: _Lists,
    fanout: int,
    row_states: Tensor,
    replace: bool,
    prob: _ProbOfEdges | None,
    numbers: _SharedNumbers | None,
) -> tuple[Tensor, Tensor]:
    """Draws that look at every edge of a row, for some rows at a time."""
    all_counts = [lists.degree.new_empty(0)]
    all_offsets = [lists.degree.new_empty(0)]
    for first, last in _ranges(F.pad(lists.degree.cumsum(0), (1, 0)), _EDGES_AT_ONCE):
        part = lists.slice(first, last)
        which, offsets = _places(part.degree)
        positions = part.positions(which, offsets)
        if prob is None:
            weights = torch.ones_like(positions, dtype=torch.float64)
        else:
            weights = prob.at(positions)
        positive = (weights > 0) & (weights < torch.inf)
        if fanout == _NO_LIMIT:
            chosen = positive
        elif numbers is not None:
            chosen = _shared(part.degree, which, weights, positive, fanout, numbers.at(positions))
        elif replace:
            part_states = row_states[first:last]
            counts, drawn = _weighted_repeated(
                part.degree, which, weights, positive, fanout, part_states
            )
            all_counts.append(counts)
            all_offsets.append(drawn)
            continue
        else:
            words = word(row_states[first:last][which], offsets)
            chosen = _race(which, weights, positive, fanout, words, last - first)
        all_counts.append(torch.bincount(which[chosen], minlength=last - first))
        all_offsets.append(offsets[chosen])
    return torch.cat(all_counts), torch.cat(all_offsets)


def _race(
    which: Tensor, weights: Tensor, positive: Tensor, fanout: int, words: Tensor, num_rows: int
) -> Tensor:
    """Edges arrive after exponential times of rate weight; the first ones in a row are drawn.

    That is drawing one after another, each time by weight among those left (Efraimidis and
    Spirakis, Weighted random sampling with a reservoir, 2006). Of equal times the smaller offset is
    first.
    """
    (runners,) = torch.nonzero(positive, as_tuple=True)
    times = exponential(words[runners]) / weights[runners]
    times = times.clamp(max=torch.finfo(torch.float64).max)
    runners = runners[torch.sort(times, stable=True).indices]
    runners = runners[torch.sort(which[runners], stable=True).indices]
    _, rank = _places(torch.bincount(which[runners], minlength=num_rows))
    chosen = torch.zeros_like(positive)
    chosen[runners[rank < fanout]] = True
    return chosen


def _shares(
    degree: Tensor, which: Tensor, weights: Tensor, positive: Tensor
) -> tuple[Tensor, Tensor]:
    """Weights as integers, ceil(w / max * 2^s), and their sums per row, which are below 2^62."""
    weights = torch.where(positive, weights, 0.0)
    largest = torch.zeros(degree.shape[0], dtype=torch.float64, device=degree.device)
    largest.scatter_reduce_(0, which, weights, "amax")
    places = (62 - torch.frexp(degree.double()).exponent.long()).clamp(max=52)
    scale = torch.bitwise_left_shift(torch.ones_like(degree), places).double()
    shares = torch.ceil(weights / largest[which] * scale[which])
    shares = torch.where(positive, shares, 0.0).long()
    return shares, _sums(shares, which, degree.shape[0])


def _weighted_repeated(
    degree: Tensor,
    which: Tensor,
    weights: Tensor,
    positive: Tensor,
    fanout: int,
    row_states: Tensor,
) -> tuple[Tensor, Tensor]:
    shares, totals = _shares(degree, which, weights, positive)
    counts = torch.where(totals > 0, fanout, 0)
    row, number = _places(counts)
    drawn = unit(word(row_states[row], number))
    targets = torch.floor(drawn * totals[row].double()).long()
    targets = torch.minimum(targets, totals[row] - 1)
    # The drawn edge is the first whose running sum is above the target; rows are halved together.
    starts = degree.cumsum(0) - degree
    running = _running_sums(shares, degree)
    low, high = torch.zeros_like(targets), degree[row] - 1
    while bool((low < high).any()):
        middle = (low + high) >> 1
        above = running[starts[row] + middle] > targets
        high = torch.where(above, middle, high)
        low = torch.where(above, low, middle + 1)
    return counts, low


def _shared(
    degree: Tensor,
    which: Tensor,
    weights: Tensor,
    positive: Tensor,
    fanout: int,
    numbers: Tensor,
) -> Tensor:
    """Keep an edge if its source's number is below min(1, c * weight); see `draw_neighbors`.

    c is the row's own, such that ``fanout`` edges are expected, or all if there are no more. An
    edge with c * weight > 1 is certain; c for the others grows with each that is, so the certain
    ones are found by asking again until there are no more of them.
    """
    num_rows = degree.shape[0]
    shares, totals = _shares(degree, which, weights, positive)
    few = _sums(positive.long(), which, num_rows) <= fanout
    expected, sums = torch.full_like(totals, fanout), totals  # of the edges that are not certain
    while True:
        certain = shares * expected[which] > sums[which]
        now = fanout - _sums(certain.long(), which, num_rows)
        now = torch.where(few, expected, now)
        if bool((now == expected).all()):
            break
        expected, sums = now, totals - _sums(torch.where(certain, shares, 0), which, num_rows)
    likely = numbers * sums[which].double() < (shares * expected[which]).double()
    return positive & (few[which] | likely)


def _sums(values: Tensor, which: Tensor, num_rows: int) -> Tensor:
    return torch.zeros(num_rows, dtype=torch.int64, device=values.device).index_add_(
        0, which, values
    )


def _running_sums(values: Tensor, counts: Tensor) -> Tensor:
    """Sums of the values of a row up to and with each; that the whole may wrap cancels out."""
    running = values.cumsum(0)
    starts = counts.cumsum(0) - counts
    before = torch.cat([running.new_zeros(1), running])[starts]
    return running - torch.repeat_interleave(before, counts, output_size=values.shape[0])


def _places(counts: Tensor) -> tuple[Tensor, Tensor]:
    """For counts.sum() places in row order: the number of the row, and the place within it."""
    ends = counts.cumsum(0)
    total = int(ends[-1]) if counts.numel() else 0
    numbers = torch.arange(counts.shape[0], device=counts.device)
    which = torch.repeat_interleave(numbers, counts, output_size=total)
    return which, torch.arange(total, device=counts.device) - (ends - counts)[which]
