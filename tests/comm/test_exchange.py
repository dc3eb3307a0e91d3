# SPDX-License-Identifier: Apache-2.0
"""fetch_halo and return_halo against plain indexing; bytes, gradients, mistakes. 1 to 5 ranks."""

from __future__ import annotations

import pytest
import torch
from comm_cases import NUM_ROWS, make_exchange

from graphshard.comm import (
    ExchangePlan,
    anchor,
    fetch_halo,
    ragged_all_to_all,
    return_halo,
    trace,
)
from graphshard.comm.collectives import LONG_BYTES, start_all_to_all
from graphshard.comm.group import group_state
from graphshard.errors import RankError
from graphshard.testing import run_ranks

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
SIZES = [1, 2, 3, 5]


def check_values(rank, world_size):
    case = make_exchange(rank, world_size)
    shapes = [(), (3,), (2, 5), (0,), (1, 1, 7)]
    all_values = [case.values(*shape, dtype=dtype) for dtype in DTYPES for shape in shapes]
    # One at a time, then all of them, of every width and dtype, in one message.
    for values in all_values[::3]:
        (halo,) = fetch_halo([(case.plan, values[rank])])
        assert halo.dtype == values[rank].dtype
        assert torch.equal(halo, case.halo_of(rank, values))
    with trace() as counted:
        halos = fetch_halo([(case.plan, values[rank]) for values in all_values])
    for halo, values in zip(halos, all_values, strict=True):
        assert torch.equal(halo, case.halo_of(rank, values))
    row_bytes = sum(v[0][:1].numel() * v[0].element_size() for v in all_values)
    counted_bytes = counted.bytes_sent.get("all_to_all", 0)
    assert counted_bytes == case.plan.bytes_per_gather(row_bytes)
    assert counted.calls.get("all_to_all", 0) == (world_size > 1)
    # The same combination again costs the payload alone.
    with trace() as counted:
        fetch_halo([(case.plan, values[rank]) for values in all_values])
    assert counted.total_bytes == counted_bytes
    assert set(counted.calls) == ({"all_to_all"} if world_size > 1 else set())
    assert fetch_halo([]) == []


@pytest.mark.parametrize("world_size", SIZES)
def test_fetch_is_plain_indexing(world_size):
    run_ranks(check_values, world_size)


def check_layouts(rank, world_size):
    case = make_exchange(rank, world_size)
    values = case.values(4, 3)
    turned = [v.transpose(1, 2).contiguous().transpose(1, 2) for v in values]
    wide = [torch.cat([v, v], dim=1)[:, 4:] for v in values]
    halos = fetch_halo([(case.plan, turned[rank]), (case.plan, wide[rank])])
    for halo in halos:
        assert torch.equal(halo, case.halo_of(rank, values))


def test_any_memory_layout():
    run_ranks(check_layouts, 3)


def check_several_plans(rank, world_size):
    case, idle = make_exchange(rank, world_size), make_exchange(rank, world_size, idle=0)
    first, second = case.values(3), case.values(2, dtype=torch.int32, seed=2)
    one, two = fetch_halo([(case.plan, first[rank]), (idle.plan, second[rank])])
    assert torch.equal(one, case.halo_of(rank, first))
    assert torch.equal(two, idle.halo_of(rank, second))
    assert two.shape[0] or rank == 0 or world_size < 3


@pytest.mark.parametrize("world_size", SIZES)
def test_requests_on_several_plans(world_size):
    run_ranks(check_several_plans, world_size)


def check_gradients(rank, world_size):
    case = make_exchange(rank, world_size)
    leaves = [v.requires_grad_() for v in case.values(3)]
    narrow = [v.requires_grad_() for v in case.values(1, 2, seed=2)]
    constant = case.values(4, seed=3)
    weights = case.values(3, seed=4)

    def loss_of(asker, a, b, c):
        return (a.tanh() * (asker + 1)).sum() + (b[:, 0] * a[:, :2]).sum() + c.sum()

    total = sum(
        loss_of(r, case.halo_of(r, leaves), case.halo_of(r, narrow), case.halo_of(r, constant))
        + (leaves[r] * weights[r]).sum()
        for r in range(world_size)
    )
    expected = torch.autograd.grad(total, [leaves[rank], narrow[rank]], materialize_grads=True)

    x, y = leaves[rank].detach().requires_grad_(), narrow[rank].detach().requires_grad_()
    requests = [(case.plan, x), (case.plan, constant[rank]), (case.plan, y)]
    a, c, b = fetch_halo(requests)
    assert a.requires_grad
    assert b.requires_grad
    assert not c.requires_grad
    loss = loss_of(rank, a, b, c) + (x * weights[rank]).sum()
    with trace() as counted:
        got = torch.autograd.grad(loss, [x, y], materialize_grads=True)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert counted.calls == ({"all_to_all": 1} if world_size > 1 else {})
    # Gradients of a and b only: what is constant does not travel back.
    back = sum(case.plan.recv_splits) * (3 + 2) * 8
    assert counted.total_bytes == back


@pytest.mark.parametrize("world_size", SIZES)
def test_gradient_of_fetch(world_size):
    run_ranks(check_gradients, world_size)


def change_in_place(rank, world_size):
    """Rows that have come, and an anchored loss, are the caller's own."""
    case = make_exchange(rank, world_size)
    found = []
    for changes in (False, True):
        x, y = (v[rank].clone().requires_grad_() for v in (case.values(3), case.values(2, seed=2)))
        rows = list(fetch_halo([(case.plan, x), (case.plan, y)]))
        splits = [0] * world_size
        splits[rank] = x.shape[0]
        rows.append(ragged_all_to_all(x, splits, splits))
        if changes:
            rows = [part.mul_(3).add_(1) for part in rows]
            loss = anchor(sum(part.square().sum() for part in rows), x, y)
            loss /= 4
        else:
            loss = sum((part * 3 + 1).square().sum() for part in rows) / 4
        loss.backward()
        found.append([loss.detach(), x.grad, y.grad])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_has_come_may_be_changed_in_place(world_size):
    run_ranks(change_in_place, world_size)


def check_double_backward(rank, world_size):
    case = make_exchange(rank, world_size)
    leaves = [v.requires_grad_() for v in case.values(2)]

    def penalty(grads):
        return sum((g**2).sum() for g in grads)

    whole = sum((case.halo_of(r, leaves) ** 3).sum() + leaves[r].sum() for r in range(world_size))
    grads = torch.autograd.grad(whole, leaves, create_graph=True)
    (expected,) = torch.autograd.grad(penalty(grads), [leaves[rank]], materialize_grads=True)

    x = leaves[rank].detach().requires_grad_()
    (halo,) = fetch_halo([(case.plan, x)])
    (grad,) = torch.autograd.grad((halo**3).sum() + x.sum(), [x], create_graph=True)
    (got,) = torch.autograd.grad(penalty([grad]), [x], materialize_grads=True)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("world_size", [1, 3])
def test_gradient_of_the_gradient(world_size):
    run_ranks(check_double_backward, world_size)


def check_unused(rank, world_size):
    case = make_exchange(rank, world_size)
    x, y = (v[rank].requires_grad_() for v in (case.values(3), case.values(2, seed=2)))
    a, b = fetch_halo([(case.plan, x), (case.plan, y)])
    # Rank 0 uses nothing of what it fetched, rank 2 only one of two; all reach the backward pass.
    loss = torch.zeros((), dtype=torch.float64, requires_grad=True) + 1.0
    if rank == 1:
        loss = loss + a.sum() + 2 * b.sum()
    if rank == 2:
        loss = loss + a.sum()
    anchored = anchor(loss, a, b)
    assert torch.equal(anchored, loss)
    anchored.backward()
    readers = [1, 2]
    asked = [case.needed[r][rank] for r in readers]
    count = torch.bincount(torch.cat(asked), minlength=case.num_rows).double()
    assert torch.equal(x.grad, count[:, None].expand(-1, 3))
    count = torch.bincount(asked[0], minlength=case.num_rows).double()
    assert torch.equal(y.grad, 2 * count[:, None].expand(-1, 2))


def test_ranks_that_use_nothing_take_part_in_the_backward_pass():
    run_ranks(check_unused, 3)


def check_two_layers(rank, world_size):
    """The halo of a layer is fetched from the output of another; the same rows twice."""
    case = make_exchange(rank, world_size)
    leaves = [v.requires_grad_() for v in case.values(3)]

    def layer(own, halo):
        return own.sin() + halo.sum(0)

    hidden = [layer(leaves[r], case.halo_of(r, leaves)) for r in range(world_size)]
    total = sum(layer(hidden[r], case.halo_of(r, hidden)).sum() for r in range(world_size))
    (expected,) = torch.autograd.grad(total, [leaves[rank]])
    x = leaves[rank].detach().requires_grad_()
    h = layer(x, fetch_halo([(case.plan, x)])[0])
    loss = layer(h, fetch_halo([(case.plan, h)])[0]).sum()
    loss.backward()
    torch.testing.assert_close(x.grad, expected, rtol=1e-11, atol=1e-11)


def test_two_layers():
    run_ranks(check_two_layers, 3)


def repeat(rank, world_size, dtype):
    case = make_exchange(rank, world_size)
    grads = []
    for _ in range(3):
        x = case.values(5, dtype=dtype)[rank].requires_grad_()
        (halo,) = fetch_halo([(case.plan, x)])
        (halo * halo.detach().sin()).sum().backward()
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])
    return grads[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_repeat_bit_for_bit(dtype):
    for one, two in zip(run_ranks(repeat, 3, dtype), run_ranks(repeat, 3, dtype), strict=True):
        assert torch.equal(one, two)


def sum_small(rank, world_size):
    """Rank 0 owns one row, which the others read 100 times each: 1 + 2**-8 is lost in bfloat16."""
    wanted = torch.zeros(100 if rank else 0, dtype=torch.int64)
    needed = [wanted, *[wanted[:0]] * (world_size - 1)]
    plan = ExchangePlan.build(needed, 1 if rank == 0 else 0)
    x = torch.ones(plan.num_rows, 1, dtype=torch.bfloat16, requires_grad=True)
    (halo,) = fetch_halo([(plan, x)])
    halo.backward(torch.full_like(halo, 1.0 + 2.0**-7))
    return x.grad


def test_bfloat16_is_summed_in_float32():
    owner = run_ranks(sum_small, 3)[0]
    assert owner.dtype == torch.bfloat16
    assert owner.item() == torch.tensor(200 * (1 + 2.0**-7)).bfloat16().item()


def check_return(rank, world_size):
    case = make_exchange(rank, world_size)
    for dtype in DTYPES:
        halos = []
        for asker in range(world_size):
            generator = torch.Generator().manual_seed(asker)
            size = sum(rows.numel() for rows in case.needed[asker])
            values = 8 * torch.randn(size, 3, generator=generator, dtype=torch.float64)
            halos.append(values > 0 if dtype == torch.bool else values.to(dtype))
        for reduce in ("sum", "max", "min"):
            if dtype == torch.bool and reduce == "sum":
                continue
            (got,) = return_halo([(case.plan, halos[rank])], reduce)
            assert got.dtype == dtype
            assert got.shape == (case.num_rows, 3)
            for row in range(case.num_rows):
                arrived = []
                for asker in range(world_size):
                    wanted = torch.cat(case.needed[asker])
                    owner = torch.cat(
                        [torch.full_like(w, o) for o, w in enumerate(case.needed[asker])]
                    )
                    arrived += list(halos[asker][(wanted == row) & (owner == rank)])
                torch.testing.assert_close(got[row], combine(arrived, reduce, dtype))


def combine(arrived, reduce, dtype):
    if reduce == "sum":
        wide = torch.float64 if dtype.is_floating_point else dtype
        return sum((row.to(wide) for row in arrived), torch.zeros(3, dtype=wide)).to(dtype)
    lowest = {True: float("-inf"), False: 0}[dtype.is_floating_point]
    if not dtype.is_floating_point and dtype != torch.bool:
        lowest = torch.iinfo(dtype).min
    highest = float("inf") if dtype.is_floating_point else 1
    if not dtype.is_floating_point and dtype != torch.bool:
        highest = torch.iinfo(dtype).max
    if not arrived:
        return torch.full((3,), lowest if reduce == "max" else highest, dtype=dtype)
    stacked = torch.stack(arrived).to(torch.int16 if dtype == torch.bool else dtype)
    return (stacked.amax(0) if reduce == "max" else stacked.amin(0)).to(dtype)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_return_combines_at_the_owner(world_size):
    run_ranks(check_return, world_size)


def return_badly(rank, world_size):
    case = make_exchange(rank, world_size)
    errors = []
    for call in (
        lambda: return_halo([], "mean"),
        lambda: return_halo([(case.plan, torch.ones(case.plan.num_halo, dtype=torch.bool))]),
        lambda: return_halo([(case.plan, torch.ones(case.plan.num_halo + 1))], "max"),
    ):
        try:
            call()
        except (ValueError, TypeError) as error:
            errors.append(str(error))
    return errors


def test_return_rules():
    for rank, (mean, boolean, rows) in enumerate(run_ranks(return_badly, 2)):
        assert mean == "reduce must be 'sum', 'max' or 'min' (got 'mean')"
        assert "return_halo cannot sum bool; use reduce='max' (any) or 'min' (all)" in boolean
        assert "rank 0: return_halo(max): the tensor of request 0 must have" in rows, rank


def call_with(rank, world_size, what):
    case = make_exchange(rank, world_size)
    other = make_exchange(rank, world_size)
    x = torch.ones(case.num_rows, 4)
    requests = [(case.plan, x)]
    if rank == 2:
        requests = {
            "width": [(case.plan, torch.ones(case.num_rows, 5))],
            "dtype": [(case.plan, x.double())],
            "gradient": [(case.plan, x.requires_grad_())],
            "plan": [(other.plan, x)],
            "number": [(case.plan, x), (case.plan, x)],
            "rows": [(case.plan, torch.ones(case.num_rows + 1, 4))],
            "complex": [(case.plan, x.to(torch.complex64))],
            "list": [(case.plan, [1.0])],
        }[what]
    try:
        fetch_halo(requests)
    except (ValueError, TypeError, RankError) as error:
        return type(error).__name__, str(error)
    return None


DIFFERS = (
    "what fetch_halo exchanges must be the same on all ranks, but rank 2 differs from rank 0: "
)


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("width", "ValueError", DIFFERS),
        ("dtype", "ValueError", DIFFERS),
        ("gradient", "ValueError", DIFFERS),
        ("plan", "ValueError", DIFFERS),
        ("number", "ValueError", DIFFERS),
        (
            "rows",
            "ValueError",
            "rank 2: fetch_halo: the tensor of request 0 must have 7 rows (got shape (8, 4))",
        ),
        (
            "complex",
            "TypeError",
            "rank 2: fetch_halo: the tensor of request 0 must be dense and real (got "
            "torch.strided, torch.complex64); exchange its parts",
        ),
        ("list", "TypeError", "rank 2: fetch_halo: request 0 must hold a tensor (got list)"),
    ],
)
def test_ranks_that_differ_all_raise(what, kind, text):
    assert NUM_ROWS[2] == 7
    for got_kind, got_text in run_ranks(call_with, 3, what):
        assert got_kind == kind
        assert got_text.startswith(text)


def test_what_differs_is_shown():
    text = run_ranks(call_with, 3, "width")[0][1]
    assert text.endswith(
        "ranks [0, 1] have 'fetch_halo: plan 0 float32[rows, 4]', "
        "rank 2 has 'fetch_halo: plan 0 float32[rows, 5]'"
    )


def check_ragged(rank, world_size):
    # Rank s sends s + 2 r rows to rank r, itself included; every value names both and its place.
    def rows(source, target):
        count = source + 2 * target if source != 1 else 0
        return torch.stack(
            [torch.tensor([source, target, i], dtype=torch.float64) for i in range(count)]
        ) if count else torch.empty(0, 3, dtype=torch.float64)  # fmt: skip

    sends = [rows(rank, target) for target in range(world_size)]
    recvs = [rows(source, rank) for source in range(world_size)]
    x = torch.cat(sends).requires_grad_()
    send_splits, recv_splits = [len(s) for s in sends], [len(r) for r in recvs]
    with trace() as counted:
        out = ragged_all_to_all(x, send_splits, recv_splits)
    assert torch.equal(out, torch.cat(recvs))
    sent = (sum(send_splits) - send_splits[rank]) * 24
    compared = (2 + 2 * world_size) * 8 * (world_size - 1)
    assert counted.total_bytes == sent + compared
    (out * out.detach()).sum().backward()
    assert torch.equal(x.grad, x.detach())


@pytest.mark.parametrize("world_size", SIZES)
def test_ragged_all_to_all(world_size):
    run_ranks(check_ragged, world_size)


def check_long_slices(rank, world_size):
    # What rank s sends to rank r: short, just long enough to be a message of its own, longer, none;
    # with two exchanges in flight at once, waited for in turn.
    lengths = [LONG_BYTES // 4 - 1, LONG_BYTES // 4, 50_000, 0, 3]

    def of(source, target):
        length = lengths[(source * world_size + 2 * target + source * target) % len(lengths)]
        return torch.full((length,), 100 * source + target, dtype=torch.int32)

    state, started = group_state(), []
    for sign in (1, -1):
        sends = [sign * of(rank, target) for target in range(world_size)]
        recvs = [sign * of(source, rank) for source in range(world_size)]
        splits = [list(map(len, parts)) for parts in (sends, recvs)]
        payload = torch.cat(sends)
        started.append((payload, start_all_to_all(state, payload, *splits), torch.cat(recvs)))
    for payload, pending, expected in started:
        version = payload._version
        (out,) = pending.wait()
        assert torch.equal(out, expected)
        assert payload._version == version  # autograd may have saved it


@pytest.mark.parametrize("world_size", [2, 5])
def test_long_slices_are_messages_of_their_own(world_size):
    run_ranks(check_long_slices, world_size)


def ragged_badly(rank, world_size):
    errors = []
    for rows, sends, recvs in (
        (2, [1, 0], [1, 0]),
        (1, [1], [1]),
        (1, [1, 0] if rank == 0 else [0, 1], [0, 0]),
        (0, [1, -1], [0, 0]),
    ):
        try:
            ragged_all_to_all(torch.ones(rows), sends, recvs)
        except ValueError as error:
            errors.append(str(error))
    other = torch.float64 if rank else torch.float32
    for x, sends, recvs in (
        (torch.ones(2, dtype=other), [1, 1], [1, 1]),
        (torch.ones(2, 2 + rank), [1, 1], [1, 1]),
        (torch.ones(2), [1, 1], [1 + 3 * rank, 1]),
        (torch.ones(2 - rank), [1, 1] if rank == 0 else [1], [1, 1]),
    ):
        with pytest.raises(ValueError) as caught:
            ragged_all_to_all(x, sends, recvs)
        errors.append(str(caught.value))
    return errors


def test_ragged_rules():
    for rows, splits, own, negative, dtype, shape, expected, alone in run_ranks(ragged_badly, 2):
        assert "x must have sum(send_splits) = 1 rows (got shape (2,))" in rows
        assert "send_splits must hold 2 numbers of rows, one per rank (got [1])" in splits
        assert "must receive from itself what it sends to itself (got 1 sent, 0 received)" in own
        assert "send_splits must hold 2 numbers of rows" in negative
        assert "rank 0 has 'float32[]', rank 1 has 'float64[]'" in dtype
        assert "rank 0 has 'float32[2]', rank 1 has 'float32[3]'" in shape
        assert expected == (
            "recv_splits must be what the others send: rank 1 expects 4 rows from rank 0, which "
            "sends 1"
        )
        assert alone.startswith("rank 1: send_splits must hold 2 numbers of rows")
