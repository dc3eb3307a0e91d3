# SPDX-License-Identifier: Apache-2.0
"""What operators and Adjacency refuse: each message has the rule, the value and the cure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ops_cases import adjacency

from graphshard import ops

ADJ = adjacency("odd")  # 7 sources, 6 destinations, 12 edges
X, W = torch.ones(7, 3), torch.ones(12, 1)


def nothing_like_a_graph() -> Any:
    return ops.gspmm({"edges": 3}, "copy_lhs", "sum", X)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (nothing_like_a_graph, TypeError, "an Adjacency or a graph with one relation .got dict"),
        (lambda: ops.gspmm(ADJ, "u_mul_e", "sum", X, W), ValueError, "add, sub.*got 'u_mul_e'"),
        (lambda: ops.gspmm_arg(ADJ, "mul", "sum", X, W), ValueError, "max, min .got 'sum'"),
        (lambda: ops.gspmm(ADJ, "mul", "sum", X), ValueError, "needs rhs .got None.; pass"),
        (lambda: ops.gspmm(ADJ, "mul", "sum", [1.0], W), TypeError, "got list.; use torch"),
        (
            lambda: ops.gspmm(ADJ, "copy_lhs", "sum", X[:6]),
            ValueError,
            r"lhs of gspmm must have num_src = 7 rows .got shape .6, 3..; pass one row per node",
        ),
        (lambda: ops.gspmm(ADJ, "copy_rhs", "sum", None, X), ValueError, "num_edges = 12 rows"),
        (
            lambda: ops.gspmm(ADJ, "mul", "sum", X.long(), W),
            TypeError,
            r"lhs of gspmm must be float32.*got torch.int64.; convert it with .float",
        ),
        (lambda: ops.gsddmm(ADJ, "add", X, X[:6].bool()), TypeError, "got torch.bool"),
        (lambda: ops.edge_softmax(ADJ, W.int()), TypeError, "logits.*got torch.int32"),
        (
            lambda: ops.gspmm(ADJ, "copy_lhs", "sum", X.to("meta")),
            ValueError,
            "on the device of the adjacency, cpu .got meta.; move",
        ),
        (
            lambda: ops.gspmm(ADJ, "mul", "sum", X, torch.ones(12, 2)),
            ValueError,
            r"from the right.*got lhs .7, 3. and rhs .12, 2..; insert",
        ),
        (lambda: ops.gsddmm(ADJ, "dot", X, X[:6], "u", "d"), ValueError, "u, v, e .got 'd'"),
        (lambda: ops.gsddmm(ADJ, "mul", X, X), ValueError, "num_dst = 6 rows"),
    ],
)
def test_operators(call: Callable[[], Any], error: type[Exception], text: str, way: str) -> None:
    with pytest.raises(error, match=text):
        call()


def ids(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: ops.Adjacency([0], ids(0), 1, 1), TypeError, "got list.; use torch.as_tensor"),
        (lambda: ops.Adjacency(ids(0), ids(0, dtype=torch.int32), 1, 1), TypeError, "one dtype"),
        (lambda: ops.Adjacency(ids(0)[None], ids(0), 1, 1), ValueError, "one dimension.*flatten"),
        (lambda: ops.Adjacency(ids(), ids(), -1, 1), ValueError, "negative .got -1"),
        (
            lambda: ops.Adjacency(ids(0, dtype=torch.int32), ids(0, dtype=torch.int32), 2**31, 1),
            ValueError,
            "num_src must fit in 32 bits .got 2147483648.; use idtype torch.int64",
        ),
        (lambda: ops.Adjacency(ids(0), ids(0), 2**31, 1).astype(torch.int32), ValueError, "32 bit"),
        (lambda: ADJ.astype(torch.int16), TypeError, "got torch.int16"),
        (lambda: ops.Adjacency.from_csc(ids(0, 1), ids(0), None, 1, 2), ValueError, "= 3 entries"),
        (lambda: ops.Adjacency.from_csc(ids(0, 2), ids(0), None, 1, 1), ValueError, "from 0 to 2"),
        (lambda: ops.Adjacency.from_csc(ids(0, 2, 1), ids(0), None, 1, 2), ValueError, "ascend"),
        (
            lambda: ops.Adjacency.from_csc(ids(0, 2), ids(0, 0), ids(1, 1), 1, 1),
            ValueError,
            "every id from 0 to 1 once",
        ),
        (lambda: ops.Adjacency.from_csc(ids(0, 1), ids(4), None, 3, 1), ValueError, "got 4"),
    ],
)
def test_adjacency(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_anything_with_one_relation_stands_for_its_adjacency(way: str) -> None:
    class OneRelation:
        def _single_adjacency(self) -> ops.Adjacency:
            return ADJ

    found = ops.gspmm(OneRelation(), "copy_lhs", "sum", X)
    assert torch.equal(found, ops.gspmm(ADJ, "copy_lhs", "sum", X))
