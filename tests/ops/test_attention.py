# SPDX-License-Identifier: Apache-2.0
"""attend against formulas written out, the reference, itself in shards, and other threads."""

from __future__ import annotations

import doctest
import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import (
    CASES,
    WIDTHS,
    AttentionCase,
    inputs_of,
    random_adjacency,
    shard_of,
    written_out,
)
from ops_cases import GRAPHS, adjacency
from torch import Tensor

from case_selection import sampled
from graphshard import ops
from graphshard.ops import Adjacency, Attention, EdgeMask, reference
from graphshard.ops._attention_rule import OPERANDS
from graphshard.ops.attention import compute
from graphshard.ops.attention.compute import begin_backward, finish, finish_

ANY = pytest.mark.parametrize("case", CASES, ids=str)


def results(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients of inputs under an uneven sum."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    grads = torch.autograd.grad((out * weights).sum(), inputs)
    return [out.detach(), *grads]


@pytest.mark.parametrize(
    ("case", "graph", "idtype"),
    sampled(CASES, list(GRAPHS), [torch.int32, torch.int64]),
    ids=str,
)
def test_against_formulas(case: AttentionCase, graph: str, idtype: torch.dtype, way: str) -> None:
    adj = adjacency(graph, idtype)
    attention = case.make(adj)
    inputs = inputs_of(attention)
    found = results(ops.attend(adj, attention), inputs)
    expected = results(written_out(adj, attention) + 0 * sum(t.sum() for t in inputs), inputs)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    again = results(reference.attend(adj, attention), inputs)
    torch.testing.assert_close(again, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("heads", "dim"), WIDTHS)
@pytest.mark.parametrize("score", ["additive", "joint", "dot"])
def test_widths(score: str, heads: int, dim: int, way: str) -> None:
    adj = random_adjacency(60, 50, 900, torch.int32)
    for options in ({}, {"edge": True, "factor": heads, "dropout": 0.5}):
        attention = AttentionCase(score, heads, dim, **options).make(adj)
        inputs = inputs_of(attention)
        expected = results(reference.attend(adj, attention), inputs)
        found = results(ops.attend(adj, attention), inputs)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@ANY
def test_other_dtypes(case: AttentionCase, dtype: torch.dtype, way: str) -> None:
    adj = random_adjacency(30, 20, 200)
    attention = case.make(adj, dtype)
    inputs = inputs_of(attention)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    twin = {id(t): w for t, w in zip(inputs, wide, strict=True)}
    exact = attention.with_operands([t if t is None else twin[id(t)] for t in attention.operands])
    expected = results(reference.attend(adj, exact), wide)
    found = results(ops.attend(adj, attention), inputs)
    assert all(t.dtype == dtype for t in found)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).abs().max()) <= tolerance * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("score", ["additive", "joint", "dot"])
def test_hubs_at_both_ends(score: str, way: str) -> None:
    """Nodes with more edges than one chunk, and than one slice, have."""
    # Triton kernels add pieces of 256 edges, 8 at once, and their interpreter is slow.
    adj = random_adjacency(300, 200, 2000, torch.int32, hub=3000 if way == "triton" else 9000)
    attention = AttentionCase(score, 2, 8, edge=True, dropout=0.2).make(adj)
    inputs = inputs_of(attention)
    expected = results(reference.attend(adj, attention), inputs)
    found = results(ops.attend(adj, attention), inputs)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("score", ["additive", "joint", "dot"])
def test_blocks_of_heads(score: str, way: str) -> None:
    """So many rows that the compiled kernels take the heads in several blocks."""
    # Blocks of a Triton kernel do not depend on rows, and its interpreter is slow.
    rows = 100 if way == "triton" else 12_000
    adj = random_adjacency(rows, rows, 4 * rows, torch.int32)
    attention = AttentionCase(score, 4, 32, dropout=0.1).make(adj)
    inputs = inputs_of(attention)
    expected = results(reference.attend(adj, attention), inputs)
    found = results(ops.attend(adj, attention), inputs)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


@ANY
def test_gradcheck(case: AttentionCase, way: str, run_all: bool) -> None:
    """Parallel edges, a self loop, a node without in-edges, one without out-edges.

    Second derivatives are projected on random directions, unless every entry is wanted.
    """
    adj = Adjacency(torch.tensor([0, 0, 1, 1, 0, 1]), torch.tensor([0, 0, 0, 1, 1, 3]), 3, 4)
    attention = case.make(adj)

    def run(*tensors: Tensor) -> Tensor:
        twin = {id(t): x for t, x in zip(inputs_of(attention), tensors, strict=True)}
        operands = [None if t is None else twin[id(t)] for t in attention.operands]
        return ops.attend(adj, attention.with_operands(operands))

    assert torch.autograd.gradcheck(run, inputs_of(attention))
    assert torch.autograd.gradgradcheck(run, inputs_of(attention), fast_mode=not run_all)


@ANY
def test_only_what_is_wanted(case: AttentionCase, way: str) -> None:
    """The gradient of each operand alone is the one that comes with the others."""
    adj = adjacency("odd")
    attention = case.make(adj)
    if attention.src is attention.values:
        attention = replace(attention, src=attention.values.detach().clone().requires_grad_())
    everything = torch.autograd.grad(
        ops.attend(adj, attention).square().sum(), inputs_of(attention)
    )
    expected = iter(everything)
    for place, operand in enumerate(attention.operands):
        if operand is None:
            continue
        alone = [t if t is None else t.detach() for t in attention.operands]
        alone[place] = operand
        out = ops.attend(adj, attention.with_operands(alone))
        (found,) = torch.autograd.grad(out.square().sum(), operand)
        torch.testing.assert_close(found, next(expected), msg=lambda m, p=place: OPERANDS[p] + m)


@ANY
def test_shards_add_up_to_the_whole(case: AttentionCase, way: str) -> None:
    """Edges come one shard after the other, each with sources of its own."""
    adj = random_adjacency(23, 11, 140)
    attention = case.make(adj)
    src, dst = adj.coo()
    state = compute.begin(adj, attention)
    shards = []
    for part in range(4):  # the last one is empty
        rows = (torch.arange(23) % 3 == part).nonzero().view(-1)
        edges = (src % 3 == part).nonzero().view(-1)
        own = Adjacency(torch.searchsorted(rows, src[edges]), dst[edges], len(rows), 11)
        seen = shard_of(attention, rows, edges)
        shards.append((own, seen, rows, edges))
        compute.take(own, seen, state)
    out, peak, total = compute.whole(adj, attention)
    torch.testing.assert_close((state.peak, state.total), (peak, total))
    torch.testing.assert_close(finish(state, out.dtype), out)

    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    statistics = (peak, total, begin_backward(grad, out)[1])
    wanted = [t is not None for t in attention.operands]
    expected = compute.gradients(adj, attention, statistics, grad, wanted)
    sums = [None if t is None else torch.zeros_like(t) for t in attention.operands]
    for own, seen, rows, edges in shards:
        found = compute.gradients(own, seen, statistics, grad, wanted, (sums[2], sums[4]))
        for place, where in ((0, rows), (1, rows), (3, edges), (5, edges)):
            if found[place] is not None:
                sums[place][where] += found[place]  # type: ignore[index]
    torch.testing.assert_close(sums, expected)


@ANY
def test_gradients_of_some_heads_of_more(case: AttentionCase, way: str) -> None:
    """A gradient whose rows lie apart gives what a copy of it does; so does one for all rows."""
    adj = random_adjacency(23, 11, 140)
    attention = case.make(adj)
    out, peak, total = compute.whole(adj, attention)
    wider = torch.randn(11, attention.heads + 2, attention.dim, dtype=out.dtype)
    wanted = [t is not None for t in attention.operands]
    for grad in (wider[:, 1:-1], wider[:1, 1:-1].expand(out.shape)):
        statistics = (peak, total, begin_backward(grad, out)[1])
        found, expected = (
            compute.gradients(adj, attention, statistics, g, wanted)
            for g in (grad, grad.contiguous())
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("shape", "biased", "relu", "dtype"),
    sampled(
        [(70, 4, 32), (33, 3, 5), (9, 1, 40), (0, 2, 3)],
        [False, True],
        [False, True],
        [torch.float32, torch.float64, torch.bfloat16],
    ),
    ids=str,
)
def test_what_follows_an_attention(
    shape: tuple[int, ...], biased: bool, relu: bool, dtype: torch.dtype, way: str
) -> None:
    """Against plain torch in float64: the division, the bias, the ReLU and its gradient."""
    generator = torch.Generator().manual_seed(3)

    def normal(*extents: int) -> torch.Tensor:
        return torch.randn(*extents, generator=generator, dtype=torch.float64)

    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    sums, total = normal(*shape).to(wide), normal(*shape[:2]).abs().add(0.5).to(wide)
    total[3:5], sums[3:5] = 0, 0  # no in-edges
    bias = normal(*shape[1:]).to(dtype) if biased else None
    grad = normal(*shape).to(dtype)

    whole = sums.double() / total.double().masked_fill(total == 0, 1).unsqueeze(-1)
    expected = whole if bias is None else whole + bias.double()
    expected = expected.relu() if relu else expected
    state = compute.AttentionState(total, total, sums.clone())
    out = finish(state, dtype, bias, relu)
    close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=close, atol=close)
    again = finish_(finish(compute.AttentionState(total, total, sums), dtype), bias, relu)
    torch.testing.assert_close(again.double(), expected, rtol=close, atol=2 * close)

    passed, delta = begin_backward(grad, out, bias, relu)
    leaf = out.double().requires_grad_()  # rounded: its sign may be another than that of `expected`
    (leaf.relu() if relu else leaf * 1).backward(grad.double())
    torch.testing.assert_close(passed.double(), leaf.grad, rtol=0, atol=0)
    inner = (passed.double() * whole).sum(-1)
    torch.testing.assert_close(delta.double(), inner, rtol=close, atol=40 * close)


def test_a_result_that_is_not_a_number_stays_so(way: str) -> None:
    out = torch.tensor([[[torch.nan, -1.0, 2.0]]])
    passed, delta = begin_backward(torch.ones(1, 1, 3), out, None, True)
    assert passed.flatten().tolist() == [1, 0, 1]  # as torch's relu
    assert delta.isnan().all()
    assert finish_(out, torch.zeros(1, 3), True).flatten()[0].isnan()


@pytest.mark.parametrize("keyed", [False, True])
def test_which_entries_drop_is_the_same_everywhere(keyed: bool, way: str) -> None:
    """Each source's value is a column of its own: what is not dropped is not 0."""
    src, dst = torch.arange(40).repeat_interleave(30), torch.arange(30).repeat(40)
    order = torch.randperm(1200, generator=torch.Generator().manual_seed(0))
    adj = Adjacency(src[order], dst[order], 40, 30)
    keys = ops.edge_keys(torch.arange(1200) * 2**31) if keyed else None
    mask = EdgeMask(0.3, 12345678901, keys)
    values = torch.eye(40).unsqueeze(1).expand(-1, 3, -1)
    attention = Attention.additive(values, torch.zeros(40, 3), torch.zeros(30, 3), mask=mask)
    out = ops.attend(adj, attention)
    multipliers = mask.multipliers(torch.arange(1200), 3).float()
    expected = torch.zeros(30, 3, 40)
    expected[dst[order], :, src[order]] = multipliers / 40
    torch.testing.assert_close(out, expected)
    assert torch.equal(out == 0, expected == 0)


def test_dropout_drops_its_share() -> None:
    edges = torch.arange(200_000)
    for probability in (0.0, 0.1, 0.5, 0.9, 1.0):
        kept = EdgeMask(probability, 1).multipliers(edges, 4)
        share = (kept == 0).double().mean(0)
        assert float((share - probability).abs().max()) < 0.006
        if probability < 1:
            assert set(kept.unique().tolist()) <= {0.0, 1 / (1 - probability)}
    one, other, third = (EdgeMask(0.5, s).multipliers(edges, 2) > 0 for s in (1, 2, 1 + 2**32))
    for a, b in ((one[:, 0], one[:, 1]), (one, other), (one, third), (one[1:], one[:-1])):
        assert abs(float((a == b).double().mean()) - 0.5) < 0.006
    with pytest.raises(ValueError, match=r"in \[0, 1\] \(got 1.5\)"):
        EdgeMask(1.5, 0)


def test_edge_keys_are_distinct_and_do_not_depend_on_the_id_type() -> None:
    ids = torch.arange(1000)
    assert torch.equal(ops.edge_keys(ids), ops.edge_keys(ids.int()))
    far = ops.edge_keys(ids + 2**40)
    assert far.unique().numel() == 1000
    assert not torch.equal(far, ops.edge_keys(ids))
    mask, keyed = EdgeMask(0.5, 3), EdgeMask(0.5, 3, ops.edge_keys(ids))
    assert torch.equal(mask.multipliers(ids, 2), keyed.multipliers(ids, 2))


def test_everything_dropped_is_zero(way: str) -> None:
    adj = adjacency("odd")
    attention = AttentionCase("additive").make(adj)
    out = ops.attend(adj, replace(attention, mask=EdgeMask(1.0, 1)))
    assert not out.any()
    out.sum().backward()
    assert not any(t.grad.any() for t in inputs_of(attention) if t.grad is not None)


def test_large_scores_and_edges_ruled_out(way: str) -> None:
    """No overflow; a term of minus infinity is an edge that is not there."""
    adj = random_adjacency(50, 3, 600)
    attention = AttentionCase("dot").make(adj)
    big = replace(attention, scale=1e4)
    torch.testing.assert_close(ops.attend(adj, big), reference.attend(adj, big))
    gone = torch.arange(600) < 590
    terms = torch.zeros(600, 2, dtype=torch.float64).masked_fill(gone.unsqueeze(1), -torch.inf)
    src, dst = adj.coo()
    rest = Adjacency(src[~gone], dst[~gone], 50, 3)
    inputs = inputs_of(attention)
    found = results(ops.attend(adj, replace(attention, edge=terms)), inputs)
    torch.testing.assert_close(found, results(ops.attend(rest, attention), inputs))


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    adj = random_adjacency(5000, 4000, 150_000, torch.int32, hub=9000)
    before = torch.get_num_threads()
    for score in ("additive", "joint", "dot"):
        case = AttentionCase(score, 3, 16, edge=True, factor=1, dropout=0.2)
        attention = case.make(adj, torch.float32)
        found = []
        try:
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                found.append(results(ops.attend(adj, attention), inputs_of(attention)))
        finally:
            torch.set_num_threads(before)
        if ops.extension_available():
            for other in found[1:]:
                assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_operands_in_odd_memory(way: str) -> None:
    adj = random_adjacency(20, 15, 100)
    attention = AttentionCase("dot", 2, 4, edge=True, factor=2).make(adj)
    odd = [
        t if t is None else t.detach().transpose(0, -1).contiguous().transpose(0, -1)
        for t in attention.operands
    ]
    found = attention.with_operands([t if t is None else t.requires_grad_() for t in odd])
    expected = results(reference.attend(adj, attention), inputs_of(attention))
    torch.testing.assert_close(results(ops.attend(adj, found), inputs_of(found)), expected)
    broadcast = torch.ones((), dtype=torch.float64, requires_grad=True)
    out = ops.attend(adj, replace(attention, factor=None))
    torch.autograd.grad(out, attention.values, broadcast.expand_as(out).detach())


def test_mixed_dtypes(way: str) -> None:
    """Terms may be wider than values: the result has the dtype of rows that are gathered."""
    adj = random_adjacency(20, 15, 100)
    attention = AttentionCase("additive").make(adj, torch.float32)
    mixed = replace(attention, values=attention.values.detach().bfloat16().requires_grad_())
    out = ops.attend(adj, mixed)
    assert out.dtype == torch.bfloat16
    grads = torch.autograd.grad(out.float().sum(), inputs_of(mixed))
    assert [g.dtype for g in grads] == [t.dtype for t in inputs_of(mixed)]
    torch.testing.assert_close(out.float(), ops.attend(adj, attention), atol=0.03, rtol=0.03)


HEAD_CASES: list[tuple[Any, str]] = [
    (lambda a: replace(a, values=a.values[:-1]), r"values.*num_src"),
    (lambda a: replace(a, values=a.values[:, :, 0]), r"values of an attention.*heads come second"),
    (lambda a: replace(a, src=a.src[:, :1]), r"src of an attention with additive scores"),
    (lambda a: replace(a, factor=torch.ones(12, 3)), r"one column or one per head, 2"),
    (lambda a: replace(a, vector=torch.ones(2, 3)), r"Attention.joint"),
    (lambda a: replace(a, score="cosine"), r"cosine"),
    (lambda a: replace(a, mask=EdgeMask(0.5, 1, torch.ones(12))), r"edge_keys"),
]


@pytest.mark.parametrize(("change", "text"), HEAD_CASES)
def test_wrong_operands(change: Any, text: str) -> None:
    adj = adjacency("odd")
    attention = AttentionCase("additive").make(adj)
    with pytest.raises(ValueError, match=text):
        ops.attend(adj, change(attention))
    with pytest.raises(TypeError, match="values"):
        ops.attend(adj, replace(attention, values=attention.values.long()))


def test_head_products(way: str) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for rows in (0, 1, 50):
            tensors = [
                torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(dtype)
                for i, shape in enumerate([(rows, 3, 9), (3, 9), (3, 9)])
            ]
            x, one, two = (t.requires_grad_() for t in tensors)
            same, first, second = ops.head_products(x, one, two)
            loss = (same.square().sum(-1) * first + second.sin()).sum()
            wide = (x * one).float().sum(-1), (x * two).float().sum(-1)
            expected = (x.square().sum(-1) * wide[0] + wide[1].sin()).sum()
            close = {"rtol": 0.06, "atol": 0.3} if dtype == torch.bfloat16 else {}
            torch.testing.assert_close(first.float(), wide[0], **close)
            torch.testing.assert_close(
                torch.autograd.grad(loss, tensors),
                torch.autograd.grad(expected, tensors),
                **(close if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}),
            )
    tensors = [t.detach().double().requires_grad_() for t in tensors]
    tensors[0] = tensors[0].detach()[:4].requires_grad_()
    assert torch.autograd.gradcheck(ops.head_products, tensors)
    assert torch.autograd.gradgradcheck(ops.head_products, tensors)
    with pytest.raises(ValueError, match="flatten"):
        ops.head_products(torch.ones(2, 3), torch.ones(3), torch.ones(3))


@pytest.mark.parametrize("module", ["attention._attention", "_attention_rule", "sampling", "spmm"])
def test_examples_in_the_docs_run(module: str) -> None:
    assert doctest.testmod(importlib.import_module(f"graphshard.ops.{module}")).failed == 0
