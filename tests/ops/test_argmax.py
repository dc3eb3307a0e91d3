# SPDX-License-Identifier: Apache-2.0
"""Max and min put together from sets of edges, and gradients by argmax: against all edges at once.

What all edges give comes from plain torch, or from `torch.amax` and `torch.amin`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from case_selection import sampled
from graphshard.ops import Adjacency, gspmm_arg, gspmm_arg_backward, merge_best

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
IDTYPES = [torch.int32, torch.int64]
NUM_SRC, NUM_DST, NUM_EDGES, WIDTH = 30, 12, 90, 5


def edges(idtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Sources and destinations; two destinations without edges."""
    generator = torch.Generator().manual_seed(0)
    src = torch.randint(NUM_SRC, (NUM_EDGES,), generator=generator)
    dst = torch.randint(NUM_DST - 2, (NUM_EDGES,), generator=generator)
    return src.to(idtype), dst.to(idtype)


def rows(dtype: torch.dtype, odd: bool) -> Tensor:
    """Few distinct values, so that there are ties; NaN and infinities among them if odd."""
    generator = torch.Generator().manual_seed(1)
    found = torch.randint(-3, 4, (NUM_SRC, WIDTH), generator=generator).to(dtype)
    if odd:
        place = torch.randint(12, (NUM_SRC, WIDTH), generator=generator)
        found[place == 0] = float("nan")
        found[place == 1] = float("inf")
        found[place == 2] = float("-inf")
    return found


@pytest.mark.parametrize(
    ("dtype", "idtype", "reduce", "odd", "num_sets"),
    sampled(DTYPES, IDTYPES, ["max", "min"], [False, True], [1, 2, 4]),
    ids=str,
)
def test_sets_of_edges_make_the_whole(
    dtype: torch.dtype, idtype: torch.dtype, reduce: str, odd: bool, num_sets: int, way: str
) -> None:
    src, dst = edges(idtype)
    x = rows(dtype, odd)
    whole, argmax = gspmm_arg(Adjacency(src, dst, NUM_SRC, NUM_DST), "copy_lhs", reduce, x)
    belongs = torch.randint(num_sets, (NUM_EDGES,), generator=torch.Generator().manual_seed(2))
    for strided in (False, True):
        best = torch.zeros(NUM_DST, 2 * WIDTH, dtype=dtype)[:, ::2] if strided else torch.zeros(
            NUM_DST, WIDTH, dtype=dtype
        )  # fmt: skip
        edge = torch.full((NUM_DST, WIDTH), NUM_EDGES, dtype=torch.int32)
        for number in [*range(1, num_sets), 0, num_sets]:  # the last has no edges
            ids = (belongs == number).nonzero().view(-1).to(torch.int32)
            some = Adjacency(src[ids.long()], dst[ids.long()], NUM_SRC, NUM_DST)
            value, arg = gspmm_arg(some, "copy_lhs", reduce, x)
            merge_best(best, edge, value, arg, None if num_sets == 1 else ids, NUM_EDGES, reduce)
            if num_sets == 1:
                break
        found = torch.where(edge == NUM_EDGES, -1, edge.long())
        torch.testing.assert_close(best, whole, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(found, argmax.long())


@pytest.mark.parametrize("op", ["copy_lhs", "copy_rhs", "add", "sub", "mul", "div"])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_gradients_by_argmax(op: str, dtype: torch.dtype, way: str) -> None:
    """Of two halves of the edges, each with the argmax among its own, are those of the whole."""
    src, dst = (ids.long() for ids in edges(torch.int64))
    generator = torch.Generator().manual_seed(3)
    lhs = (torch.rand(NUM_SRC, WIDTH, generator=generator) + 0.5).to(dtype).requires_grad_()
    rhs = (torch.rand(NUM_EDGES, 1, generator=generator) + 0.5).to(dtype).requires_grad_()
    made = {
        "copy_lhs": lambda: lhs[src],
        "copy_rhs": lambda: rhs,
        "add": lambda: lhs[src] + rhs,
        "sub": lambda: lhs[src] - rhs,
        "mul": lambda: lhs[src] * rhs,
        "div": lambda: lhs[src] / rhs,
    }[op]()
    adjacency = Adjacency(src, dst, NUM_SRC, NUM_DST)
    _, argmax = gspmm_arg(adjacency, op, "max", lhs.detach(), rhs.detach())
    grad = torch.randint(1, 5, argmax.shape, generator=generator).to(dtype)
    there = argmax >= 0
    columns = torch.arange(argmax.shape[1]).expand_as(argmax)
    won = made[argmax[there], columns[there]]
    wanted = torch.autograd.grad((won * grad[there]).sum(), [lhs, rhs], allow_unused=True)
    totals = [torch.zeros_like(lhs), torch.zeros_like(rhs)]
    for half in (0, 1):
        ids = (torch.arange(NUM_EDGES) % 2 == half).nonzero().view(-1)
        place = torch.full((NUM_EDGES + 1,), -1).index_copy(0, ids, torch.arange(len(ids)))
        some = Adjacency(src[ids], dst[ids], NUM_SRC, NUM_DST)
        arguments = some, op, grad, place[argmax], lhs.detach(), rhs.detach()[ids]
        found = gspmm_arg_backward(*arguments)
        assert [g is None for g in found] == [op == "copy_rhs", op == "copy_lhs"]
        only = gspmm_arg_backward(*arguments, wanted=(True, False))
        assert only[1] is None
        if found[0] is not None:
            assert torch.equal(only[0], found[0])
            totals[0] = totals[0] + found[0]
        if found[1] is not None:
            totals[1] = totals[1].index_add(0, ids, found[1])
    close = {"atol": 0.05, "rtol": 0.02} if dtype == torch.bfloat16 else {}
    for total, expected in zip(totals, wanted, strict=True):
        if expected is not None:
            torch.testing.assert_close(total, expected, **close)


def test_nothing_at_all(way: str) -> None:
    none = torch.empty(0, dtype=torch.int64)
    adjacency = Adjacency(none, none, 0, 2)
    lhs_grad, _ = gspmm_arg_backward(
        adjacency, "copy_lhs", torch.ones(2, 3), torch.full((2, 3), -1), torch.empty(0, 3)
    )
    assert lhs_grad is not None
    assert lhs_grad.shape == (0, 3)
