# SPDX-License-Identifier: Apache-2.0
"""What draw_neighbors and IdTable refuse: each message has the rule, the value and the cure."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphshard.ops import IdTable, draw_neighbors

INDPTR = torch.tensor([0, 2, 5])
INDICES = torch.tensor([1, 2, 0, 1, 2])
ROWS = torch.tensor([1, 0])


def draw(**changed: Any) -> Any:
    given: dict[str, Any] = {
        "indptr": INDPTR, "rows": ROWS, "fanout": 2, "key": 7, "row_ids": ROWS, "indices": INDICES
    } | changed  # fmt: skip
    first = [given.pop(name) for name in ("indptr", "rows", "fanout", "key", "row_ids")]
    return draw_neighbors(*first, **given)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"indptr": [0, 2, 5]}, TypeError, "indptr must be a torch.Tensor .got list"),
        ({"indptr": INDPTR.float()}, TypeError, "indptr must be int32 or int64"),
        ({"indptr": INDPTR[:0]}, ValueError, "len.indices. = 5 .got no entries"),
        ({"indptr": INDPTR[:2]}, ValueError, "end with len.indices. = 5 .got 2.*cumsum"),
        ({"indices": INDICES.to("meta")}, ValueError, "indices must hold numbers.*meta"),
        ({"rows": ROWS[None]}, ValueError, "rows must have one dimension"),
        ({"rows": torch.tensor([0, 2])}, ValueError, r"in .0, len.indptr. - 1 = 2. .got 2.; pass"),
        ({"rows": torch.tensor([-1, 2])}, ValueError, "got -1"),
        ({"row_ids": ROWS[:1]}, ValueError, "one entry per row .got 1 for 2 rows"),
        ({"row_ids": ROWS.double()}, TypeError, "row_ids must be int32 or int64"),
        ({"fanout": -2}, ValueError, "below -1 .got -2.; -1 draws all"),
        ({"fanout": 2.0}, TypeError, "fanout must be an int .got 2.0"),
        ({"fanout": True}, TypeError, "fanout must be an int .got True"),
        ({"key": 2**64}, ValueError, "64 bits .got 18446744073709551616.; take it modulo"),
        ({"key": ROWS[0]}, TypeError, "key must be an int .got Tensor"),
        ({"prob": INDICES}, TypeError, "prob must be torch.float32 or torch.float64"),
        ({"prob": torch.ones(4)}, ValueError, r"prob must have one entry per edge, shape .5,.* .4"),
        ({"prob": [1.0] * 5}, TypeError, "prob must be a torch.Tensor"),
        ({"prob_ids": INDICES}, ValueError, "prob_ids say which weight.*give prob"),
        (
            {"prob": torch.ones(2), "prob_ids": INDICES},
            ValueError,
            r"prob_ids must be in .0, len.prob. = 2. .got 2.",
        ),
        (
            {"prob": torch.ones(3), "prob_ids": INDICES[:4]},
            ValueError,
            r"prob_ids must have one entry per edge, shape .5,",
        ),
        (
            {"prob": torch.ones(3, 1), "prob_ids": INDICES},
            ValueError,
            r"prob must have one entry per edge, shape .3,.* .got .3, 1",
        ),
        (
            {"labor_ids": INDICES.double()},
            TypeError,
            "labor_ids must be torch.int32 or torch.int64",
        ),
        ({"labor_ids": INDICES, "replace": True}, ValueError, "cannot come with replace=True"),
        ({"eids": INDICES.int()}, TypeError, "eids must be torch.int64 .got torch.int32"),
        ({"excluded": torch.tensor([2, 1])}, ValueError, "must ascend.*use torch.unique"),
        ({"excluded": torch.tensor([1, 1])}, ValueError, "each given once"),
        ({"excluded": torch.tensor([1, 5])}, ValueError, "len.indices. = 5. .got 5"),
        ({"excluded": torch.tensor([-1, 3])}, ValueError, "got -1"),
        ({"excluded": torch.zeros(4, dtype=torch.bool)}, ValueError, "shape .5,"),
        ({"excluded": torch.zeros(5)}, TypeError, "excluded must be torch.bool or torch.uint8"),
    ],
)
def test_draw_neighbors(changed: Any, error: type[Exception], text: str, way: str) -> None:
    with pytest.raises(error, match=text):
        draw(**changed)


def test_rows_that_do_not_ascend(way: str) -> None:
    with pytest.raises(ValueError, match="indptr must ascend.*row 1 has edges from 7 to 5"):
        draw(indptr=torch.tensor([0, 7, 5]))


ids = torch.tensor


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: IdTable(2.5), TypeError, "num_ids must be an int .got 2.5"),  # type: ignore[arg-type]
        (lambda: IdTable(-1), ValueError, "must not be negative .got -1"),
        (lambda: IdTable(9).renumber([1], ids([1])), TypeError, "first must be a torch.Tensor"),  # type: ignore[arg-type]
        (lambda: IdTable(9).renumber(ids([1]), ids([1]).int()), TypeError, "one dtype"),
        (lambda: IdTable(9).renumber(ids([[1]]), ids([1])), ValueError, "one dimension"),
        (lambda: IdTable(9).renumber(ids([9]), ids([1])), ValueError, r"first.*=9. .got 9"),
        (lambda: IdTable(9).renumber(ids([1]), ids([0, -4])), ValueError, "others.*got -4"),
        (lambda: IdTable(9).renumber(ids([1, 2, 1]), ids([0])), ValueError, "once .got 1 several"),
        (lambda: IdTable(2**40).renumber(ids([1, 1]), ids([0])), ValueError, "once .got 1 several"),
        (lambda: IdTable(2**40).renumber(ids([1]), ids([2**40])), ValueError, "others.*got 1099"),
    ],
)
def test_id_table(call: Any, error: type[Exception], text: str, way: str) -> None:
    with pytest.raises(error, match=text):
        call()
