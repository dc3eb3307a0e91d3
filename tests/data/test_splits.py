# SPDX-License-Identifier: Apache-2.0
"""Splits of the rows of a table, against pandas and scikit-learn. No process group."""

from __future__ import annotations

import datetime
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from graphshard.data import splits
from graphshard.data.splits import (
    SPLITS,
    split_by_fractions,
    split_by_masks,
    split_by_names,
    split_by_rows,
    split_by_time,
)


def mask_size(num_rows: int, fraction: float) -> int:
    """Rows of a set where fractions leave a tenth, for numbers of rows that are multiples of 10."""
    assert num_rows % 10 == 0
    return round(num_rows * fraction)


def rows_of(masks: dict[str, np.ndarray]) -> list[list[int]]:
    assert list(masks) == list(SPLITS)
    assert all(mask.dtype == bool for mask in masks.values())
    return [np.flatnonzero(mask).tolist() for mask in masks.values()]


def counts_of(masks: dict[str, np.ndarray]) -> list[int]:
    assert (sum(mask.astype(int) for mask in masks.values()) <= 1).all()  # disjoint
    return [int(mask.sum()) for mask in masks.values()]


# -- names, masks, rows ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [
        lambda names: pa.array(names),
        lambda names: pa.array(names).dictionary_encode(),
        lambda names: pa.chunked_array([names[:3], names[3:3], names[3:]]),
        lambda names: pa.array(["test", *names], pa.large_string())[1:],
    ],
)
def test_a_column_of_names(form: Any) -> None:
    names = ["train", "TEST", " valid", None, "Validation", "", "val", "Train", "testing", "dev"]
    masks = split_by_names(form(names))
    assert rows_of(masks) == [[0, 7], [2, 4, 6, 9], [1, 8]]


def test_another_name_is_an_error() -> None:
    with pytest.raises(ValueError) as refused:
        split_by_names(pa.array(["train", "tarin", "holdout", "tarin"]), "part")
    assert str(refused.value) == (
        "column 'part' must say train, val (valid, validation) or test (got 2 times 'tarin', "
        "1 times 'holdout'); rename them, or leave the cell empty for rows of no split"
    )
    with pytest.raises(ValueError, match=r"1 times 'name 9', \.\.\.\); rename"):
        split_by_names(pa.array([f"name {i}" for i in range(99)]))
    with pytest.raises(ValueError, match="must say train, val or test .got int64.; convert"):
        split_by_names(pa.array([1, 2]))
    with pytest.raises(ValueError, match="must have training rows .got none from column 'split'"):
        split_by_names(pa.array(["val", "test", None]))
    with pytest.raises(ValueError, match="must have training rows"):
        split_by_names(pa.nulls(3))


def test_columns_of_masks() -> None:
    columns = {
        "train": ("a", pa.array([True, None, False, True])),
        "test": ("b", pa.chunked_array([[0.0, 1.0], [None, 0.0]])),
    }
    assert rows_of(split_by_masks(columns)) == [[0, 3], [], [1]]
    columns["val"] = ("c", pa.array([0, 0, 1, 0], pa.uint8()))
    assert rows_of(split_by_masks(columns)) == [[0, 3], [2], [1]]
    columns["val"] = ("c", pa.array([0, 0, 2, 0]))
    with pytest.raises(ValueError, match="'c' must be true or false, .*got 2 in row 2, .*val set"):
        split_by_masks(columns)
    columns["val"] = ("c", pa.array(["a"] * 4))
    with pytest.raises(ValueError, match="'c' must be true or false, or 1 or 0 .got string"):
        split_by_masks(columns)
    columns["val"] = ("c", pa.array([1]))
    with pytest.raises(ValueError, match=r"must have one length .got .1, 4.."):
        split_by_masks(columns)
    with pytest.raises(ValueError, match="must be given for train, .* .got .'val'"):
        split_by_masks({"val": ("c", pa.array([1]))})
    with pytest.raises(ValueError, match=r"may be for val and test .got .'train', 'valid'"):
        split_by_masks({"train": ("c", pa.array([1])), "valid": ("c", pa.array([1]))})
    with pytest.raises(ValueError, match="must have training rows .got none from column 'c'"):
        split_by_masks({"train": ("c", pa.array([0, None]))})


def test_lists_of_rows() -> None:
    rows = {"train": np.array([3, 0, 3]), "test": np.array([], np.int64)}
    assert rows_of(split_by_rows(4, rows)) == [[0, 3], [], []]
    for wrong in (-1, 4):
        with pytest.raises(ValueError, match=f"test set must be from 0 to 3 .got {wrong}."):
            split_by_rows(4, rows | {"test": np.array([1, wrong])})
    with pytest.raises(ValueError, match="must have training rows .got none from the list"):
        split_by_rows(4, {"train": np.array([], np.int64)})


# -- fractions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_rows", "fractions", "counts"),
    [
        (10, (0.6, 0.2, 0.2), [6, 2, 2]),
        (10, (0.1, 0.1), [1, 1, 0]),  # 0.1 in binary is above a tenth
        (10, (0.7, 0.1, 0.2), [7, 1, 2]),
        (10, (1,), [10, 0, 0]),
        (7, (0.5, 0.25, 0.25), [3, 2, 2]),  # 3.5, 1.75, 1.75
        (3, (0.5, 0.5), [2, 1, 0]),  # the first of equal remainders
        (10, (0.25, 0.25), [3, 2, 0]),  # 2.5, 2.5, and 5 that are left
        (1000, (0.333, 0.333, 0.334), [333, 333, 334]),
        (5, (0.3, 0.3), [2, 1, 0]),  # 1.5, 1.5, and 2 left
        (5, (0.3, 0.1), [2, 0, 0]),  # 1.5 and 0.5, of which the first is less in binary
    ],
)
def test_counts_are_exact(num_rows: int, fractions: Any, counts: list[int]) -> None:
    assert counts_of(split_by_fractions(num_rows, fractions)) == counts


def test_generated_splits_have_the_counts_of_sklearn(run_all: bool) -> None:
    selection = pytest.importorskip("sklearn.model_selection", reason="the oracle is not installed")
    for seed in range(500 if run_all else 25):
        rng = np.random.default_rng(seed)
        n, num_classes = int(rng.integers(30, 400)), int(rng.integers(1, 6))
        classes = rng.choice(num_classes, n, p=rng.dirichlet(np.ones(num_classes) * 3))
        classes[: 4 * num_classes] = np.repeat(np.arange(num_classes), 4)
        takes_part = rng.random(n) < 0.9
        takes_part[: 4 * num_classes] = True
        is_labelled = takes_part.copy()
        known = np.where(rng.random(n) < 0.2, -1, classes)
        known[: 4 * num_classes] = classes[: 4 * num_classes]
        is_labelled &= known >= 0
        total = int(is_labelled.sum())
        share = int(rng.integers(20, 80))
        masks = split_by_fractions(
            n, (share / 100, 1 - share / 100), seed=seed, takes_part=takes_part, classes=known
        )
        counts = counts_of(masks)
        assert sum(counts) == total
        assert not (masks["train"] & ~is_labelled).any()
        assert abs(counts[0] - Fraction(share, 100) * total) <= Fraction(1, 2)
        # scikit-learn's counts of each class, for the same number of training rows
        train, _ = selection.train_test_split(
            np.flatnonzero(is_labelled),
            train_size=counts[0],
            stratify=known[is_labelled],
            random_state=seed,
        )
        ours = np.bincount(known[masks["train"]], minlength=num_classes)
        theirs = np.bincount(known[train], minlength=num_classes)
        exact = counts[0] * np.bincount(known[is_labelled], minlength=num_classes) / total
        assert (np.floor(exact - 1e-9) <= ours).all()
        assert (ours <= np.ceil(exact + 1e-9)).all()
        assert np.sort(np.abs(ours - exact)) == pytest.approx(np.sort(np.abs(theirs - exact)))


def test_three_sets_are_stratified() -> None:
    classes = np.repeat([0, 1, 2, -1], [50, 30, 21, 10])
    masks = split_by_fractions(111, (0.6, 0.2, 0.2), classes=classes)
    assert counts_of(masks) == [61, 20, 20]
    for split, share in zip(SPLITS, (0.6, 0.2, 0.2), strict=True):
        found = np.bincount(classes[masks[split]], minlength=3)
        assert np.abs(found - share * np.array([50, 30, 21])).max() <= 1


def test_classes_of_one_row() -> None:
    masks = split_by_fractions(30, (0.6, 0.2, 0.2), classes=np.arange(30))
    assert counts_of(masks) == [18, 6, 6]


def test_a_split_is_a_function_of_seed_and_rows() -> None:
    """These numbers must not move: a split of the same table is the same years later."""
    expected = [[0, 3, 4, 5, 8], [2, 6], []]
    assert rows_of(split_by_fractions(10, (0.5, 0.2), seed=3)) == expected
    first, again, other = (split_by_fractions(1000, (0.5,), seed=s)["train"] for s in (1, 1, 2))
    assert np.array_equal(first, again)
    assert 150 < (first & other).sum() < 350
    # a class has the same rows whatever the numbers of the classes are
    classes = np.arange(1000) % 3
    ours = split_by_fractions(1000, (0.5,), classes=classes)["train"]
    assert np.array_equal(ours, split_by_fractions(1000, (0.5,), classes=classes * 5 + 2)["train"])
    assert split_by_fractions(5, (1.0,), seed=-(2**70))["train"].all()


def test_random_rows_are_spread() -> None:
    """Each row is as likely as any other, over seeds."""
    times = sum(split_by_fractions(20, (0.5,), seed=s)["train"].astype(int) for s in range(400))
    assert np.abs(times - 200).max() < 5 * 10


@pytest.mark.parametrize(
    ("fractions", "message"),
    [
        ((0.6, 0.5), "sum to at most 1 .got 0.6, 0.5, which sum to 1.1.; make one smaller"),
        ((0, 1), "got 0, 1.; training needs a fraction above 0"),
        ((-0.1, 0.5), "numbers from 0, .* .got -0.1, 0.5.; write for example 0.6,0.2,0.2"),
        ((float("nan"),), "got nan.; write for example"),
        (("many",), "got many.; write for example"),
        ((), "must be one to three numbers"),
        ((0.1,) * 4, "must be one to three numbers"),
    ],
)
def test_fractions_that_cannot_be(fractions: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_by_fractions(10, fractions)
    with pytest.raises(ValueError, match=message):
        split_by_time(pa.array([1, 2]), fractions)


def test_no_training_row() -> None:
    with pytest.raises(
        ValueError, match="training rows .got none from fractions 0.1, 0.9 of 2 row"
    ):
        split_by_fractions(2, (0.1, 0.9))
    with pytest.raises(ValueError, match="of 0 rows that take part"):
        split_by_fractions(2, (0.5,), classes=np.array([-1, -1]))
    assert rows_of(split_by_fractions(0, (0.5,))) == [[], [], []]
    assert split_by_fractions(4, (0.7, 0.3 + 1e-12))["train"].sum() == 3


# -- time --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [pa.timestamp("ns"), pa.timestamp("s", "UTC"), pa.date32(), pa.date64(), pa.uint64(),
     pa.float32(), pa.int8(), pa.time32("s")],
    ids=str,
)  # fmt: skip
def test_the_oldest_rows_are_for_training(kind: Any) -> None:
    order = [5, 1, 3, None, 9, 7, 2, 8, 4, 6, 10]
    day = 86_400_000 if kind == pa.date64() else 1
    integer = pa.int32() if kind in (pa.date32(), pa.time32("s")) else pa.int64()
    times = pa.array([None if v is None else v * day for v in order], integer).cast(kind)
    found = rows_of(split_by_time(times, (0.5, 0.3, 0.2)))
    split_of = {v: i for i, low in enumerate((0, 5, 8)) for v in range(low + 1, 11) if v > low}
    expected = [[row for row, v in enumerate(order) if v and split_of[v] == i] for i in range(3)]
    assert found == expected


def test_generated_splits_by_time(run_all: bool) -> None:
    """A set holds the rows whose rank, by pandas, is in its interval."""
    pandas = pytest.importorskip("pandas", reason="pandas is the oracle, and is not installed")
    for seed in range(500 if run_all else 25):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(20, 300))
        days = rng.integers(0, rng.choice([30, 10_000]), n)
        missing, takes_part = rng.random(n) < 0.1, rng.random(n) < 0.8
        stamp = [None if m else datetime.date(1965, 1, 1) + datetime.timedelta(int(d))
                 for d, m in zip(days, missing, strict=True)]  # fmt: skip
        masks = split_by_time(pa.array(stamp), (0.5, 0.2, 0.2), takes_part=takes_part)
        chosen = pandas.Series(np.where(missing | ~takes_part, np.nan, days))
        first = chosen.rank(method="min") - 1  # the place of the first row of equal time
        total = int(chosen.notna().sum())
        ends = np.cumsum([0, *(np.array([0.5, 0.2, 0.2]) * total)])
        for split, low, high in zip(SPLITS, ends, ends[1:], strict=False):
            certain = (first >= low + 1) & (first < high - 1)
            possible = (first >= low - 1) & (first < high + 1)
            assert masks[split][certain].all()
            assert not masks[split][~possible.to_numpy()].any()
        newest = [chosen[masks[split]].max() for split in SPLITS]
        oldest = [chosen[masks[split]].min() for split in SPLITS]
        assert newest[0] < oldest[1] <= newest[1] < oldest[2]


@pytest.mark.parametrize("num_classes", [0, 1, 7])
def test_rows_beyond_memory_are_split_as_sorted_keys_say(
    num_classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passed over in blocks, with few keys kept: the sets are those of all rows in order."""
    monkeypatch.setattr(splits, "_BLOCK_ROWS", 40)
    monkeypatch.setattr(splits, "_MOST_BITS", 5)
    for seed in range(6):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(100, 900))
        days, takes_part = rng.integers(-20, rng.choice([20, 10**6]), n), rng.random(n) < 0.8
        takes_part[np.flatnonzero(takes_part)[: takes_part.sum() % 10]] = False
        for values in (pa.array(days), pa.array(days * 0.37), pa.array(days.astype(np.uint64))):
            masks = split_by_time(values, (0.5, 0.2, 0.2), takes_part=takes_part)
            ordered = np.sort(values.to_numpy()[takes_part])
            place = np.searchsorted(ordered, values.to_numpy(), side="left")
            ends = np.cumsum([0, *(mask_size(len(ordered), f) for f in (0.5, 0.2, 0.2))])
            for mask, low, high in zip(masks.values(), ends, ends[1:], strict=False):
                assert np.array_equal(mask, takes_part & (low <= place) & (place < high))
        classes = rng.integers(-1, num_classes, n) if num_classes else None
        arguments: Any = {"seed": seed, "takes_part": takes_part, "classes": classes}
        found = split_by_fractions(n, (0.6, 0.2), **arguments)
        monkeypatch.setattr(splits, "_BLOCK_ROWS", 1 << 20)
        for split, mask in split_by_fractions(n, (0.6, 0.2), **arguments).items():
            assert np.array_equal(mask, found[split])
        monkeypatch.setattr(splits, "_BLOCK_ROWS", 40)


def test_equal_times_stay_together() -> None:
    assert rows_of(split_by_time(pa.array([1, 2, 2, 2, 3, 4]), (0.5, 0.5))) == [
        [0, 1, 2, 3],
        [4, 5],
        [],
    ]
    with pytest.raises(ValueError) as refused:
        split_by_time(pa.array([1, 2, 2, 2]), (0.5, 0.25, 0.25), name="date")
    assert str(refused.value) == (
        "column 'date' must have enough different times for the val set (got 2 among 4 rows, and "
        "rows of one time stay together); choose other fractions, or a split at random"
    )
    near = pa.array([2**62 + 1, 2**62])  # equal as floats
    assert rows_of(split_by_time(near, (0.5, 0.5))) == [[1], [0], []]


def test_rows_left_out_by_time() -> None:
    times = pa.array([4, 3, 2, 1, None, float("nan")])
    assert rows_of(split_by_time(times, (0.5, 0.25))) == [[2, 3], [1], []]
    takes_part = np.array([True, True, False, False, True, True])
    assert rows_of(split_by_time(times, (0.5, 0.5), takes_part=takes_part)) == [[1], [0], []]
    with pytest.raises(ValueError, match="none from fractions 0.5 of 0 rows that take part"):
        split_by_time(pa.nulls(3), (0.5,))
    with pytest.raises(ValueError, match="must hold dates, timestamps or numbers .* .got string"):
        split_by_time(pa.array(["2020"]), (0.5,))
