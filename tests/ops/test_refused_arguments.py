# SPDX-License-Identifier: Apache-2.0
"""What once ended a process, or gave a wrong result without a word. No process.

The campaign in tests/campaigns/hostile_arguments.py looks for more of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ops_cases import adjacency, negated
from torch import Tensor

from graphshard import ops
from graphshard._base.kernels import _load, extension_available

ADJ = adjacency("odd")  # 7 sources, 6 destinations, 12 edges
X = torch.arange(21.0).view(7, 3) - 9
W = torch.arange(12.0).view(12, 1) / 4 - 1
MOST = 2**63 - 1


def backward(**changed: Any) -> Any:
    out, arg = ops.gspmm_arg(ADJ, "mul", "max", X, W)
    given = {"grad": out, "arg": arg, "lhs": X, "rhs": W} | changed
    return ops.gspmm_arg_backward(ADJ, "mul", **given)


def argmax(edge: int, dtype: torch.dtype = torch.int64) -> Tensor:
    arg = torch.full((6, 3), -1, dtype=dtype)
    arg[5, 2] = edge
    return arg


@pytest.mark.parametrize("edge", [12, 13, 2**31, MOST])
def test_an_argmax_that_is_no_edge(edge: int, way: str) -> None:
    with pytest.raises(IndexError, match="arg must be that of an edge, or -1 for none"):
        backward(arg=argmax(edge))


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"arg": argmax(0)[:5]}, ValueError, r"arg must have shape .6, 3. on cpu .got .5, 3."),
        ({"grad": torch.ones(6, 4)}, ValueError, r"grad must have shape .6, 3."),
        ({"arg": argmax(0, torch.int32)}, TypeError, "arg must be torch.int64 .got torch.int32"),
        ({"grad": 1.0}, TypeError, "grad must be a torch.Tensor .got float"),
    ],
)
def test_an_argmax_of_another_shape(
    changed: dict[str, Any], error: type[Exception], text: str, way: str
) -> None:
    with pytest.raises(error, match=text):
        backward(**changed)


def merge(**changed: Any) -> None:
    given: dict[str, Any] = {
        "best": torch.zeros(4), "edge": torch.full((4,), 9), "value": torch.ones(4),
        "arg": torch.tensor([0, 1, 2, -1]), "ids": torch.tensor([3, 4, 5]), "none": 9, "op": "max",
    } | changed  # fmt: skip
    ops.merge_best(**given)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"arg": torch.tensor([0, 1, 3, -1])}, IndexError, "or -1 for none"),
        ({"arg": torch.tensor([0, 1, MOST, -1])}, IndexError, "or -1 for none"),
        ({"ids": torch.zeros(0, dtype=torch.int64)}, IndexError, "or -1 for none"),
        ({"arg": torch.tensor([0, 1])}, ValueError, r"arg must have shape .4,. on cpu .got .2,."),
        ({"edge": torch.zeros(3, dtype=torch.int64)}, ValueError, "edge must have shape"),
        ({"value": torch.ones(4).double()}, TypeError, "value must be torch.float32"),
        ({"best": torch.zeros(1).expand(4)}, ValueError, "entries of best must not share memory"),
        ({"none": 2**63}, ValueError, "none must be an int of 64 bits"),
        ({"op": "sum"}, ValueError, "op of merge_best must be one of max, min"),
        (
            {"edge": torch.zeros(4, dtype=torch.int32), "ids": torch.tensor([1, 2, 2**31])},
            ValueError,
            "ids must fit in 32 bits",
        ),
    ],
)
def test_merge_best(changed: Any, error: type[Exception], text: str, way: str) -> None:
    with pytest.raises(error, match=text):
        merge(**changed)


@pytest.mark.parametrize(
    ("order", "counts", "values"),
    [
        ([0, 1, 2, 3], [2**62] * 4, []),  # adds up to 2^64
        ([0, 1, 2], [MOST, MOST, 2], []),  # likewise
        ([0, 1], [3, -1], [7, 8]),
        ([0, 0], [1, 1], [7, 8]),
        ([0, 2], [1, 1], [7, 8]),
        ([0, 1], [1, 2], [7, 8]),
    ],
)
def test_lists_that_do_not_fit(
    order: list[int], counts: list[int], values: list[int], way: str
) -> None:
    given = (torch.tensor(t, dtype=torch.int64) for t in (order, counts, values))
    with pytest.raises(ValueError, match="order must be a permutation .*and counts must add up"):
        ops.ungroup(*given, torch.int64)


def test_numbers_that_do_not_fit_their_type(way: str) -> None:
    one = torch.ones(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="values must fit in 32 bits .got 1099511627776"):
        ops.ungroup(one * 0, one, one * 2**40, torch.int32)
    with pytest.raises(ValueError, match="tell the ids of each range apart.*torch.int64"):
        ops.group_by_range(one * 2**40, [0, 2**41], 0, torch.int32)


@pytest.mark.parametrize(
    ("starts", "last", "text"),
    [
        ([0, 5, 3, 9], 0, "starts must ascend"),
        ([-(2**63), 9], 0, "starts must ascend, from 0"),
        ([0, 9], 1, "last must be one of 1 ranges .got 1"),
        ([0], 0, "there must be 1 to 65535 ranges .got 0"),
    ],
)
def test_ranges(starts: list[int], last: int, text: str, way: str) -> None:
    with pytest.raises(ValueError, match=text):
        ops.group_by_range(torch.tensor([1]), starts, last, torch.int64)


@pytest.mark.parametrize(
    "shape",
    [(7, 7905747460161236407), (2**32, 2**32), (2**62, 4), (-1, -(2**22)), (0, 2**70)],
    ids=str,
)
def test_sizes_that_overflow(shape: tuple[int, ...], way: str) -> None:
    """The first is one entry, to whoever counts modulo 2^64."""
    with pytest.raises(ValueError, match="less than 2.63 bytes|extents must be in"):
        ops.empty(shape, torch.float32)


def test_a_size_that_no_machine_has(way: str) -> None:
    with pytest.raises(MemoryError):
        ops.empty((2**50, 2), torch.float32)


def test_an_indptr_whose_falls_wrap_around() -> None:
    """From 2^63 - 1 to -2 is 2^63 - 1 up, to whoever counts modulo 2^64."""
    indptr = torch.tensor([0, MOST, -2, 1])
    with pytest.raises(ValueError, match="indptr must ascend"):
        ops.Adjacency.from_csc(indptr, torch.tensor([0]), None, 1, 3)


def test_rows_that_are_one_in_memory(way: str) -> None:
    """Sums of neighbours of the row that all rows stand for would be lost, or overwritten."""
    base = torch.zeros(10, 3)
    with pytest.raises(ValueError, match="entries of out must not share memory"):
        ops.add_rows(base[:1].expand(5, 3), torch.arange(5), torch.ones(5, 3))
    assert not base.any()


def test_what_is_written_may_be_what_is_read(way: str) -> None:
    rows = torch.arange(12.0).view(6, 2)
    held = rows.clone()
    ops.copy_rows(held, torch.arange(1, 6), held, torch.arange(5))
    assert torch.equal(held[1:], rows[:5])
    square = adjacency("square")
    x = torch.arange(10.0).view(5, 2)
    expected = x + ops.gspmm(square, "copy_lhs", "sum", x)
    ops.gspmm_add(x, square, "copy_lhs", x)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("num_ids", [9, 2**26], ids=["direct", "hashed"])
def test_a_new_table_without_first_ids(num_ids: int, way: str) -> None:
    """A hash table has no slots before its first call."""
    none = torch.zeros(0, dtype=torch.int64)
    ids, local = ops.IdTable(num_ids).renumber(none, torch.tensor([5, 3, 5]))
    assert (ids.tolist(), local.tolist()) == ([5, 3], [0, 1, 0])


def unaligned(values: Tensor) -> Tensor:
    held = bytearray(values.numel() * values.element_size() + 1)
    moved = torch.frombuffer(held, dtype=values.dtype, count=values.numel(), offset=1)
    return moved.copy_(values.reshape(-1)).view(values.shape)


def expanded(values: Tensor) -> Tensor:
    """All rows are the first, and lie where it does."""
    return values[:1].expand(values.shape)


E3 = torch.arange(24.0).view(12, 2) / 8 - 1
VALUES, TERMS = torch.arange(42.0).view(7, 2, 3) / 8 - 2, torch.arange(14.0).view(7, 2) / 8
BEST = torch.tensor([1.0, 5.0])
IDS = torch.tensor([3, 1])
Way = Callable[[Tensor], Tensor]


def filled(run: Callable[..., Any], out: Tensor, *others: Any) -> Tensor:
    run(out, *others)
    return out


def merged(of: Way) -> Tensor:
    best, edge = of(BEST.clone()), torch.tensor([7, 9])
    ops.merge_best(best, edge, of(torch.tensor([4.0, 2.0])), torch.tensor([0, 0]), None, 9, "max")
    return best


def gradient_through(of: Way) -> tuple[Tensor, ...]:
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    out = ops.gspmm(ADJ, "mul", "max", x, w)
    return torch.autograd.grad(out, (x, w), of(torch.arange(18.0).view(6, 3)))


OPERATORS: dict[str, Callable[[Way], Any]] = {
    "gspmm": lambda of: ops.gspmm(ADJ, "mul", "sum", of(X), of(W)),
    "gspmm max": lambda of: ops.gspmm_arg(ADJ, "copy_lhs", "max", of(X)),
    "gspmm_arg_backward": lambda of: backward(grad=of(torch.ones(6, 3)), lhs=of(X), rhs=of(W)),
    "a gradient": gradient_through,
    "gsddmm": lambda of: ops.gsddmm(ADJ, "dot", of(X), X[:6]),
    "gsddmm copy": lambda of: ops.gsddmm(ADJ, "copy_lhs", of(X)),
    "edge_softmax": lambda of: ops.edge_softmax(ADJ, of(E3)),
    "attend": lambda of: ops.attend(
        ADJ, ops.Attention.additive(of(VALUES), of(TERMS), of(TERMS[:6]), of(E3))
    ),
    "attend joint": lambda of: ops.attend(
        ADJ, ops.Attention.joint(of(VALUES), of(VALUES[:6]), of(VALUES[0]))
    ),
    "head_products": lambda of: ops.head_products(of(VALUES), of(VALUES[0]), of(VALUES[1])),
    "affine": lambda of: ops.affine([(of(X), of(X[:3]))], of(X[0]), relu=True),
    "draw_neighbors": lambda of: ops.draw_neighbors(
        of(torch.tensor([0, 2, 5])), of(torch.tensor([1, 0])), 1, 7, of(torch.tensor([1, 0])),
        indices=of(torch.tensor([1, 2, 0, 1, 2])), prob=of(torch.tensor([0.0, 1, 1, 0, 0])),
    ),
    "IdTable": lambda of: ops.IdTable(9).renumber(of(IDS), of(torch.tensor([1, 8]))),
    "group_by_range": lambda of: ops.group_by_range(of(IDS), [0, 2, 9], 0, torch.int64),
    "ungroup": lambda of: ops.ungroup(
        of(torch.tensor([1, 0])), of(torch.tensor([2, 0])), of(IDS), torch.int64
    ),
    "Adjacency": lambda of: ops.Adjacency(of(torch.tensor([2, 0])), of(IDS - 1), 3, 3).csc(),
    "edge_keys": lambda of: ops.edge_keys(of(IDS)),
}  # fmt: skip
WRITES: dict[str, Callable[[Way], Any]] = {
    "gspmm_add": lambda of: filled(ops.gspmm_add, of(X[:6].clone()), ADJ, "copy_lhs", of(X)),
    "add_rows": lambda of: filled(ops.add_rows, of(X.clone()), of(IDS), of(X[:2])),
    "copy_rows": lambda of: filled(ops.copy_rows, of(X.clone()), of(IDS), of(X), of(IDS)),
    "merge_best": merged,
}


def flattened(found: Any) -> list[Tensor]:
    if isinstance(found, (tuple, list)):
        return [t for part in found for t in flattened(part)]
    return [found] if isinstance(found, Tensor) else [torch.tensor(0 if found is None else found)]


@pytest.mark.parametrize("of", [negated, unaligned])
@pytest.mark.parametrize("name", [*OPERATORS, *WRITES])
def test_a_view_is_what_it_stands_for(name: str, of: Way, way: str) -> None:
    run = (OPERATORS | WRITES)[name]
    for found, expected in zip(flattened(run(of)), flattened(run(torch.clone)), strict=True):
        torch.testing.assert_close(found.resolve_neg(), expected)


#: Of these, ids or lists are distinct, or weights say what is drawn.
DISTINCT = ("draw_neighbors", "IdTable", "ungroup")


@pytest.mark.parametrize("name", [name for name in OPERATORS if name not in DISTINCT])
def test_rows_that_repeat_one(name: str, way: str) -> None:
    run = OPERATORS[name]
    copied = flattened(run(lambda values: expanded(values).contiguous()))
    for found, expected in zip(flattened(run(expanded)), copied, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.to_sparse(), "must be a dense tensor .got one of layout torch.sparse_coo"),
        (lambda t: t.to("meta"), "meta"),
        (lambda t: t.tolist(), "must be a torch.Tensor .got list"),
        (lambda t: t.numpy(), "must be a torch.Tensor .got ndarray"),
        (lambda t: t.to(torch.complex64), "got torch.complex64"),
        (lambda t: t.sum(), "got shape"),
    ],
)
def test_what_is_no_array_of_numbers(change: Callable[[Tensor], Any], text: str, way: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        ops.gspmm(ADJ, "mul", "sum", change(X), W)
    with pytest.raises((TypeError, ValueError), match=text):
        ops.edge_softmax(ADJ, change(W))
    with pytest.raises((TypeError, ValueError), match=text):
        ops.attend(ADJ, ops.Attention.additive(VALUES, TERMS, change(TERMS[:6])))


def test_keys_of_a_mask_that_lie_apart(way: str) -> None:
    keys = ops.edge_keys(torch.arange(24))[::2]
    found = [
        ops.attend(ADJ, ops.Attention.additive(VALUES, TERMS, TERMS[:6], mask=mask))
        for mask in (ops.EdgeMask(0.5, 3, keys), ops.EdgeMask(0.5, 3, keys.contiguous()))
    ]
    assert torch.equal(*found)


# -- the binding layer, whose callers are operators that have checked what they pass ---------------

needs_kernels = pytest.mark.skipif(not extension_available(), reason="there is no binding layer")
ZERO = torch.zeros(1, dtype=torch.int64)


def spmm(**changed: Any) -> None:
    indptr, indices, eids = ADJ.csc()
    given: dict[str, Any] = {
        "out": torch.zeros(6, 3), "indptr": indptr, "indices": indices, "eids": eids, "num_src": 7,
        "lhs": X, "rhs": W, "arg": None, "op": "mul", "reduce": "sum", "lhs_offsets": ZERO,
        "rhs_offsets": ZERO, "inner": 3, "lhs_step": 1, "rhs_step": 0, "num_threads": 1,
    } | changed  # fmt: skip
    kernels: Any = _load()
    kernels.spmm(*given.values())


@needs_kernels
@pytest.mark.parametrize(
    "changed",
    [
        {"out": torch.zeros(5, 3)},
        {"out": torch.zeros(7, 3)},
        {"lhs": X[:6]},
        {"rhs": W[:11]},
        {"rhs": torch.ones(12, 0)},
        {"lhs_offsets": ZERO + 1},
        {"rhs_offsets": ZERO - 1},
        {"lhs_offsets": ZERO + MOST},
        {"lhs_step": 2},
        {"inner": -3},
        {"inner": MOST, "out": torch.zeros(6, 0)},
        {"op": "dot"},
        {"op": "copy_lhs", "lhs": X[:, :2].contiguous()},
        {"reduce": "max", "arg": torch.zeros(5, 3, dtype=torch.int64)},
        {"indptr": ADJ.csc()[0].flip(0)},
        {"indptr": torch.tensor([0, MOST, -2, 12, 12, 12, 12])},
        {"indptr": ADJ.csc()[0] + 1},
    ],
    ids=str,
)
def test_arrays_of_wrong_lengths(changed: dict[str, Any]) -> None:
    spmm()
    with pytest.raises(ValueError, match="must|not"):
        spmm(**changed)


@needs_kernels
def test_gradients_of_what_an_attention_does_not_have() -> None:
    kernels: Any = _load()
    heads = (torch.zeros(6, 2), torch.ones(6, 2), torch.zeros(6, 2))
    bound = kernels.attention(
        "additive", 7, 6, 2, 3, 0, 0.2, 1.0, VALUES.view(7, 6), None, None, None, TERMS, TERMS[:6],
        None, None, None, 0, 0, 0, 1.0, None,
    )  # fmt: skip
    edges = ADJ.csr()
    for edge_terms, factor in ((torch.zeros(12, 2), None), (None, torch.zeros(12, 0))):
        with pytest.raises(ValueError, match="what has a gradient must be there"):
            bound.sources(
                *edges, *heads, torch.ones(6, 6), None, None, None, None, edge_terms, factor, 1
            )


@needs_kernels
def test_a_key_that_is_no_node() -> None:
    kernels: Any = _load()
    keys, indptr = torch.tensor([0, 5, 1]), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(IndexError, match="below the number of nodes"):
        kernels.group_by_key(keys, keys, indptr, torch.zeros_like(keys), None, 1)


@needs_kernels
def test_a_header_that_is_too_short() -> None:
    kernels: Any = _load()
    with pytest.raises(ValueError, match="a block must begin with a header"):
        kernels.begin_use(torch.zeros(100, dtype=torch.uint8), 1, 1)
