# SPDX-License-Identifier: Apache-2.0
"""Where kernels have special paths: hubs cut into slices, block lengths, threads, large results.

Oracles: SciPy's sparse product, torch's stable sort, and the reference. No process but one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import scipy.sparse
import torch
from ops_cases import adjacency, in_each_way
from torch import Tensor

from forked_programs import run_program
from graphshard import ops
from graphshard._base.kernels import LARGE_BYTES
from graphshard.ops import reference

HUB = 3
NUM_SRC, NUM_DST = 300, 40


def hub_adjacency(idtype: torch.dtype = torch.int64) -> ops.Adjacency:
    """9,000 of 10,000 edges go to one destination: more than two slices of it."""
    src = torch.randint(0, NUM_SRC, (10_000,))
    dst = torch.randint(0, NUM_DST, (10_000,))
    dst[torch.randperm(10_000)[:9_000]] = HUB
    return ops.Adjacency(src.to(idtype), dst.to(idtype), NUM_SRC, NUM_DST)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_hubs(reduce: str, idtype: torch.dtype, way: str) -> None:
    """Few distinct values, so that a maximum is tied within a slice and between slices."""
    adj = hub_adjacency(idtype)
    lhs = torch.randint(-9, 9, (NUM_SRC, 2, 3)).double().requires_grad_()
    rhs = torch.randint(1, 4, (adj.num_edges, 2, 1)).double().requires_grad_()
    ours = ops.gspmm(adj, "mul", reduce, lhs, rhs)
    expected = reference.gspmm(adj, "mul", reduce, lhs, rhs)
    torch.testing.assert_close(ours, expected)
    if reduce in ("max", "min"):
        _, found = ops.gspmm_arg(adj, "mul", reduce, lhs, rhs)
        _, wanted = reference.gspmm_arg(adj, "mul", reduce, lhs, rhs)
        assert torch.equal(found, wanted)
    weights = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad(ours, (lhs, rhs), weights),
        torch.autograd.grad(expected, (lhs, rhs), weights),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("features", [(), (1,), (4, 1), (8,), (5,)], ids=str)
def test_softmax_over_hubs(features: tuple[int, ...], dtype: torch.dtype, way: str) -> None:
    """Against the reference in float64: 9,000 terms in float32 have errors of their own."""
    adj = hub_adjacency()
    logits = (torch.randn(adj.num_edges, *features) * 4).to(dtype).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    ours, expected = ops.edge_softmax(adj, logits), reference.edge_softmax(adj, exact)
    eps = torch.finfo(dtype).eps
    rtol = (4 if dtype == torch.bfloat16 else 512) * eps
    torch.testing.assert_close(ours.double(), expected, rtol=rtol, atol=8 * eps)
    weights = torch.randn_like(ours)
    (found,) = torch.autograd.grad(ours, logits, weights)
    (wanted,) = torch.autograd.grad(expected, exact, weights.double())
    torch.testing.assert_close(found.double(), wanted, rtol=rtol, atol=rtol)  # terms cancel


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_every_block_length_against_scipy(dtype: torch.dtype, way: str) -> None:
    adj = hub_adjacency()
    src, dst = adj.coo()
    close = {"atol": 0.5, "rtol": 1e-2} if dtype == torch.bfloat16 else {"atol": 1e-3, "rtol": 1e-5}
    weights = torch.randint(1, 3, (adj.num_edges,)).to(dtype)
    for matrix_values, op, rhs in (
        (torch.ones(adj.num_edges), "copy_lhs", None),
        (weights.float(), "mul", weights),
    ):
        matrix = scipy.sparse.coo_array(
            (matrix_values.numpy(), (dst.numpy(), src.numpy())), shape=(NUM_DST, NUM_SRC)
        ).tocsr()
        for width in (1, 2, 3, 4, 7, 8, 15, 16, 31, 33, 63, 64, 100, 127, 129, 255, 256):
            lhs = torch.randint(-4, 5, (NUM_SRC, width)).to(dtype)
            expected = torch.from_numpy(matrix @ lhs.float().numpy())
            found = ops.gspmm(adj, op, "sum", lhs, rhs)
            torch.testing.assert_close(found.float(), expected.float(), **close)


@pytest.mark.parametrize("width", [1, 3, 5, 17, 21, 70, 129])
def test_every_block_length_of_the_other_operators(width: int, way: str) -> None:
    adj = adjacency("odd")
    lhs, rhs = torch.rand(adj.num_src, width) + 1, torch.rand(adj.num_edges, width) + 1
    at_dst = torch.rand(adj.num_dst, width) + 1
    for op in ("add", "sub", "mul", "div"):
        for left, right in ((lhs, rhs), (lhs[:, :1], rhs), (lhs, rhs[:, :1])):
            for reduce in ("sum", "max", "min"):
                torch.testing.assert_close(
                    ops.gspmm(adj, op, reduce, left, right),
                    reference.gspmm(adj, op, reduce, left, right),
                )
        for left, right in ((lhs, at_dst), (lhs[:, :1], at_dst), (lhs, at_dst[:, :1])):
            torch.testing.assert_close(
                ops.gsddmm(adj, op, left, right), reference.gsddmm(adj, op, left, right)
            )
    torch.testing.assert_close(
        ops.gsddmm(adj, "dot", lhs, at_dst), reference.gsddmm(adj, "dot", lhs, at_dst)
    )


def gradients(run: Callable[[], Tensor], inputs: list[Tensor]) -> list[Tensor]:
    out = run()
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    return [out, *torch.autograd.grad(out, inputs, weights)]


@in_each_way(
    "targets,width,grouped",
    ["uv", "vu", "ue", "ve", "eu", "uu", "vv"],
    [1, 3, 4, 8],
    [True, False],
)
def test_narrow_rows_per_edge(width: int, targets: str, grouped: bool, way: str) -> None:
    """Some destinations have no edge, one has many; ids of both widths; whole blocks and a rest."""
    src, dst = hub_adjacency().coo()
    dst = (dst.sort().values if grouped else dst) * 3
    adj = ops.Adjacency(src, dst, NUM_SRC, 3 * NUM_DST)
    count = {"u": NUM_SRC, "v": 3 * NUM_DST, "e": adj.num_edges}
    lhs, rhs = (torch.randn(count[target], width) for target in targets)
    for op in ("add", "sub", "mul", "div"):
        expected = reference.gsddmm(adj, op, lhs, rhs, *targets)
        for idtype in (torch.int32, torch.int64):
            found = ops.gsddmm(adj.astype(idtype), op, lhs, rhs, *targets)
            assert torch.equal(found, expected)
            with threads(2):
                assert torch.equal(ops.gsddmm(adj.astype(idtype), op, lhs, rhs, *targets), found)


@pytest.mark.compiled
def test_two_threads_add_in_the_order_of_one() -> None:
    """Bit for bit, forward and backward, on hubs; in the kernels only."""
    adj = hub_adjacency()
    lhs = torch.randn(NUM_SRC, 2, 33).requires_grad_()
    rhs = torch.randn(adj.num_edges, 2, 1).requires_grad_()
    at_dst = torch.randn(NUM_DST, 2, 33).requires_grad_()
    runs: list[tuple[Callable[[], Tensor], list[Tensor]]] = [
        (lambda: ops.gspmm(adj, "mul", "sum", lhs, rhs), [lhs, rhs]),
        (lambda: ops.gspmm(adj, "mul", "max", lhs, rhs), [lhs, rhs]),
        (lambda: ops.gspmm(adj, "copy_lhs", "mean", lhs), [lhs]),
        (lambda: ops.gsddmm(adj, "dot", lhs, at_dst), [lhs, at_dst]),
        (lambda: ops.gsddmm(adj, "add", lhs, at_dst), [lhs, at_dst]),
        (lambda: ops.edge_softmax(adj, rhs), [rhs]),
    ]
    for run, inputs in runs:
        with threads(1):
            one = gradients(run, inputs)
        with threads(3):
            several = gradients(run, inputs)
        assert all(torch.equal(a, b) for a, b in zip(one, several, strict=True))


@pytest.mark.parametrize("count", [1, 3])
def test_grouping_is_torchs_stable_sort(count: int, way: str) -> None:
    src, dst = torch.randint(0, 7, (60_000,)), torch.randint(0, 9, (60_000,))
    with threads(count):
        indptr, indices, eids = ops.Adjacency(src, dst, 7, 11).csc()
    order = torch.sort(dst, stable=True).indices
    assert eids is not None
    assert torch.equal(eids, order)
    assert torch.equal(indices, src[order])
    assert torch.equal(indptr.diff(), torch.bincount(dst, minlength=11))


def test_edges_that_are_grouped_already(way: str) -> None:
    """Position is the edge id: no operator needs a permutation."""
    indptr = torch.tensor([0, 3, 3, 4, 9])
    adj = ops.Adjacency.from_csc(indptr, torch.randint(0, 5, (9,)), None, 5, 4)
    lhs, at_dst, rhs = torch.randn(5, 3), torch.randn(4, 3), torch.randn(9, 3)
    assert adj.csc()[2] is None
    assert adj.formats() == {"coo": False, "csc": True, "csr": False}
    for op in ("add", "dot"):
        torch.testing.assert_close(
            ops.gsddmm(adj, op, lhs, at_dst), reference.gsddmm(adj, op, lhs, at_dst)
        )
    torch.testing.assert_close(
        ops.gsddmm(adj, "mul", rhs, lhs, "e", "u"), reference.gsddmm(adj, "mul", rhs, lhs, "e", "u")
    )
    torch.testing.assert_close(
        ops.gspmm(adj, "sub", "sum", lhs, rhs), reference.gspmm(adj, "sub", "sum", lhs, rhs)
    )
    torch.testing.assert_close(ops.edge_softmax(adj, rhs), reference.edge_softmax(adj, rhs))


SPECIAL = [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1.0, 3e38, -3e38]


# NumPy says so in Triton's interpreter.
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_special_numbers_as_in_the_reference(dtype: torch.dtype, way: str) -> None:
    adj = hub_adjacency()
    lhs = torch.tensor(SPECIAL)[torch.randint(0, len(SPECIAL), (NUM_SRC, 5))].to(dtype)
    lhs[:, 4] = -torch.inf  # nothing but -infinity is still a maximum with an argmax
    rhs = torch.tensor(SPECIAL[3:])[torch.randint(0, 5, (adj.num_edges, 1))].to(dtype)
    close = {"rtol": 0.02, "atol": 0.0} if dtype == torch.bfloat16 else {}
    # A finite sum may overflow or not, depending on the order: compare with infinities alone.
    tame = torch.where(lhs.float().abs() > 1e38, 0.0, lhs.float()).to(dtype)
    tame = torch.where(lhs.isinf(), lhs, tame)
    torch.testing.assert_close(
        ops.gspmm(adj, "copy_lhs", "sum", tame),
        reference.gspmm(adj, "copy_lhs", "sum", tame),
        equal_nan=True,
        **close,
    )
    for op in ("mul", "add", "copy_lhs"):
        for reduce in ("max", "min"):
            found, found_arg = ops.gspmm_arg(adj, op, reduce, lhs, rhs)
            wanted, wanted_arg = reference.gspmm_arg(adj, op, reduce, lhs, rhs)
            torch.testing.assert_close(found, wanted, equal_nan=True, **close)
            assert torch.equal(found_arg, wanted_arg)
    logits = torch.tensor([0.0, -1e4, -torch.inf, 80.0, 1.0, torch.nan, torch.inf]).to(dtype)
    for kinds in (4, 5, 6, 7):
        few = logits[:kinds][torch.randint(0, kinds, (adj.num_edges, 2))]
        torch.testing.assert_close(
            ops.edge_softmax(adj, few), reference.edge_softmax(adj, few), equal_nan=True, **close
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_softmax_is_accurate_to_a_few_units_in_the_last_place(dtype: torch.dtype, way: str) -> None:
    """Against torch.softmax in float64, over the whole range of exponents."""
    logits = torch.linspace(-80, 0, 4001, dtype=dtype)
    adj = ops.Adjacency(torch.zeros(4001).long(), torch.zeros(4001).long(), 1, 1)
    exact = torch.softmax(logits.double(), 0)
    found = ops.edge_softmax(adj, logits).double()
    assert float(((found - exact) / exact).abs().max()) < 16 * torch.finfo(dtype).eps


def test_a_result_large_enough_for_large_pages(way: str) -> None:
    if way == "triton":
        pytest.skip("large pages are of the host's memory; on a GPU there are none to ask for")
    count = LARGE_BYTES // 16 + 5
    ids = torch.arange(count)
    adj = ops.Adjacency(ids, ids.flip(0), count, count)
    rows = torch.randn(count, 4)
    assert torch.equal(ops.gspmm(adj, "copy_lhs", "sum", rows), rows.flip(0))
    assert torch.equal(ops.gsddmm(adj, "copy_rhs", None, rows), rows.flip(0))
    assert torch.equal(ops.edge_softmax(adj, rows), torch.ones(count, 4))


def test_copies_to_edges_take_any_dtype(way: str) -> None:
    adj = adjacency("odd")
    src, dst = adj.coo()
    for rows in (torch.arange(7), torch.arange(7) > 3, torch.rand(7, 2).half(), torch.rand(7, 0)):
        assert torch.equal(ops.gsddmm(adj, "copy_lhs", rows, None), rows[src])
        assert torch.equal(ops.gsddmm(adj, "copy_rhs", None, rows[:6]), rows[:6][dst])
    on_edges = torch.arange(adj.num_edges)
    copied = ops.gsddmm(adj, "copy_lhs", on_edges, None, "e")
    assert torch.equal(copied, on_edges)
    assert copied.data_ptr() != on_edges.data_ptr()


def test_float16_and_mixed_dtypes(way: str) -> None:
    adj = adjacency("odd")
    lhs, rhs = torch.rand(7, 3).half(), torch.rand(12, 1)
    assert ops.gspmm(adj, "copy_lhs", "sum", lhs).dtype == torch.float16
    mixed = ops.gspmm(adj, "mul", "sum", lhs.bfloat16(), rhs)
    assert mixed.dtype == torch.float32
    expected = reference.gspmm(adj, "mul", "sum", lhs.bfloat16().float(), rhs)
    torch.testing.assert_close(mixed, expected)


def test_bfloat16_is_summed_in_float32(way: str) -> None:
    """1 + 1 + ... in bfloat16 would stop at 256."""
    adj = ops.Adjacency(torch.zeros(1000).long(), torch.zeros(1000).long(), 1, 1)
    one = torch.ones(1, 1, dtype=torch.bfloat16).requires_grad_()
    out = ops.gspmm(adj, "copy_lhs", "sum", one)
    assert out.item() == 1000
    (grad,) = torch.autograd.grad(out, one, torch.ones_like(out))
    assert grad.item() == 1000


def test_slices_of_the_fallback_give_one_result(monkeypatch: pytest.MonkeyPatch) -> None:
    adj = hub_adjacency()
    lhs = torch.randn(NUM_SRC, 2, 3, dtype=torch.float64)
    rhs = torch.randn(adj.num_edges, 1, 3, dtype=torch.float64)
    at_dst = torch.randn(NUM_DST, 2, 3, dtype=torch.float64)

    def results() -> list[Tensor]:
        found = [
            reference.sddmm(adj, "dot", lhs, at_dst, "u", "v"),
            reference.sddmm(adj, "mul", rhs, lhs, "e", "u"),
        ]
        for op in ("mul", "copy_rhs"):
            for reduce in ("sum", "mean", "max", "min"):
                out, arg = reference.spmm(adj, op, reduce, lhs, rhs)
                found += [out] if arg is None else [out, arg]
        return found

    whole = results()
    monkeypatch.setattr(reference, "MESSAGE_ELEMENTS", 600)
    for a, b in zip(whole, results(), strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_of_chosen_operands_only(way: str) -> None:
    """A frozen operand costs nothing and breaks nothing."""
    adj = adjacency("odd")
    for reduce in ("sum", "mean", "max"):
        for op in ("add", "sub", "mul", "div"):
            for wanted in (0, 1):
                lhs = torch.rand(7, 2, 3, dtype=torch.float64) + 0.5
                rhs = torch.rand(12, 2, 1, dtype=torch.float64) + 0.5
                chosen = (lhs, rhs)[wanted].requires_grad_()
                ours = ops.gspmm(adj, op, reduce, lhs, rhs)
                expected = reference.gspmm(adj, op, reduce, lhs, rhs)
                weights = torch.randn_like(ours)
                torch.testing.assert_close(
                    torch.autograd.grad(ours, chosen, weights),
                    torch.autograd.grad(expected, chosen, weights),
                )


def test_no_gradient_is_recorded_where_none_is_wanted(way: str) -> None:
    adj = adjacency("odd")
    rows = torch.rand(7, 2, requires_grad=True)
    with torch.no_grad():
        assert not ops.gspmm(adj, "copy_lhs", "sum", rows).requires_grad
    with torch.inference_mode():
        assert ops.gsddmm(adj, "copy_lhs", rows, None).is_inference()
    assert not ops.gspmm_arg(adj, "copy_lhs", "max", rows)[0].requires_grad


def test_the_environment_turns_the_kernels_off_in_silence() -> None:
    script = (
        "import warnings; warnings.simplefilter('error')\n"
        "from graphshard import ops\n"
        "assert not ops.extension_available()\n"
    )
    run_program(script, GRAPHSHARD_NO_EXTENSION="1")
