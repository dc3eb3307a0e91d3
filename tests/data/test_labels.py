# SPDX-License-Identifier: Apache-2.0
"""Label columns: which classes there are, by number and back, against pandas. No process group."""

from __future__ import annotations

import decimal
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from graphshard.data.encodings import EncodedCounts
from graphshard.data.labels import LabelFit, Labels


def fit(columns: Any, task: str | None = None, cuts: tuple[int, ...] = (), **named: Any) -> Labels:
    """The labels of a column, or of several in a dictionary, in batches that end at ``cuts``."""
    if isinstance(columns, dict):
        fields: Any = [pa.field(name, column.type) for name, column in columns.items()]
        arrays = list(columns.values())
    else:
        arrays = [columns if isinstance(columns, pa.Array) else pa.array(columns)]
        fields = pa.field("y", arrays[0].type)
    fitted = LabelFit(fields, task, **named)
    ends = [0, *cuts, len(arrays[0])]
    for start, stop in zip(ends, ends[1:], strict=False):
        batch = [array.slice(start, stop - start) for array in arrays]
        fitted.update(batch if isinstance(columns, dict) else batch[0])
    return fitted.finish()


def round_trip(columns: Any, task: str | None = None) -> tuple[Labels, np.ndarray, list[Any]]:
    """Labels that came from JSON, the encoded rows, and what they are decoded to."""
    labels = Labels.of_json(json.loads(json.dumps(fit(columns, task).as_json())))
    arrays = list(columns.values()) if isinstance(columns, dict) else columns
    num_rows = len(arrays[0]) if isinstance(columns, dict) else len(arrays)
    for cuts in [(0, 1), (num_rows - 1,)]:
        assert fit(columns, task, cuts) == labels
    if not isinstance(columns, dict | pa.Array):
        arrays = pa.array(columns)
    found = labels.encode(arrays)
    return labels, found, labels.decode(found).to_pylist()


# -- one class a row ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("array", "classes"),
    [
        (pa.array(["b", "a", None, "Z", "b", "ä"]), ("Z", "a", "b", "ä")),
        (pa.array(["x", "", None], pa.large_string()), ("", "x")),
        (pa.array(["x", "w", None]).cast(pa.string_view()), ("w", "x")),
        (pa.array([10, 9, -1, None, 2], pa.int8()), (-1, 2, 9, 10)),
        (pa.array([2**64 - 1, 0, 2**63, None], pa.uint64()), (0, 2**63, 2**64 - 1)),
        (pa.array([-(2**63), 2**63 - 1, None]), (-(2**63), 2**63 - 1)),
        (pa.array([True, None, False]), (False, True)),
        (pa.array([3.0, None, -1.0, float("nan")]), (-1.0, 3.0)),
        (pa.array([2, 1, None], pa.float32()), (1.0, 2.0)),
        (pa.array([decimal.Decimal(2), None, decimal.Decimal(1)]), (1.0, 2.0)),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_classes_are_sorted_and_keep_their_type(array: Any, classes: tuple[Any, ...]) -> None:
    labels, found, back = round_trip(array)
    assert (labels.kind, labels.task) == ("classes", "classification")
    assert labels.classes == classes
    assert [type(value) for value in labels.classes] == [type(value) for value in classes]
    values = [None if value != value else value for value in array.to_pylist()]
    assert found.tolist() == [-1 if v is None else classes.index(v) for v in values]
    assert found.dtype == np.int64
    assert back == values
    if not (pa.types.is_decimal(array.type) or pa.types.is_string_view(array.type)):
        assert labels.decode(found).type == array.type
    assert labels.num_classes == len(classes)
    assert labels.is_labelled(found).tolist() == [value is not None for value in values]
    dictionary = array if pa.types.is_string_view(array.type) else array.dictionary_encode()
    assert fit(dictionary) == labels


def test_generated_labels_are_those_of_pandas(run_all: bool) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is the oracle, and is not installed")
    for seed in range(500 if run_all else 10):
        rng = np.random.default_rng(seed)
        n = int(rng.choice([1, 10, 500]))
        numbers = rng.integers(-5, 20, n)
        missing = rng.random(n) < 0.5
        missing[0] = False
        make = [int, lambda number: f"class {number}", float][rng.integers(3)]
        values = [None if m else make(v) for v, m in zip(numbers.tolist(), missing, strict=True)]
        codes, uniques = pandas.factorize(pandas.array(values), sort=True)
        cuts = tuple(np.sort(rng.integers(0, n + 1, 3)).tolist())
        labels = fit(values, cuts=cuts)
        assert labels.encode(pa.array(values)).tolist() == codes.tolist()
        assert list(labels.classes) == list(uniques)
        assert labels == fit(values)


def test_class_names() -> None:
    assert fit([True, False]).class_names == ("false", "true")
    assert fit([3, -1]).class_names == ("-1", "3")
    assert fit([1.5, 0.5], "regression").class_names == ()


def test_unknown_classes_are_counted() -> None:
    labels = fit(["a", "b"])
    counts = EncodedCounts()
    assert labels.encode(pa.array(["c", "b", None]), counts=counts).tolist() == [-1, 1, -1]
    assert counts == EncodedCounts(rows=3, missing=1, unknown=1, examples=["c"])
    assert fit([1, 2]).encode(pa.array([2**63, 2], pa.uint64())).tolist() == [-1, 1]
    assert fit([1, 2]).encode(pa.nulls(1)).tolist() == [-1]


# -- classes or regression ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "task", "kind"),
    [
        (list(range(100)), None, "classes"),
        (list(range(101)) * 2, None, "classes"),
        (list(range(3)), "regression", "reals"),
        ([1.0, 2.0, None], None, "classes"),
        ([1.0, 2.0], "regression", "reals"),
        ([1.0, 2.5], None, "reals"),
        ([2.5, 1.0], None, "reals"),
        ([1.0, 2.5], "classification", "classes"),
        ([float(i) for i in range(100)], None, "classes"),
        ([float(i) for i in range(101)], None, "reals"),
    ],
)
def test_the_rule_for_numbers(values: list[Any], task: str | None, kind: str) -> None:
    assert fit(values, task).kind == kind
    assert fit(values, task, cuts=(1, 2)).kind == kind


def test_too_many_classes() -> None:
    reals = [i / 2 for i in range(101)]
    with pytest.raises(ValueError) as refused:
        fit(reals, "classification")
    assert str(refused.value) == (
        "labels in column 'y' must be of at most 100 classes (got more distinct values, of type "
        'double); use task = "regression" if it is a quantity, or raise max_classes'
    )
    assert fit(reals, "classification", max_classes=101).num_classes == 101
    with pytest.raises(ValueError, match="got 101 distinct values in 150 labelled rows.*quantity"):
        fit([*range(101)] + [0] * 49)
    assert fit([*range(101)], "classification").num_classes == 101
    with pytest.raises(ValueError, match="got 101 distinct values in 101 labelled rows.*name the"):
        fit([str(i) for i in range(101)] + [None] * 200)
    with pytest.raises(ValueError, match="at most 10 classes .got more"):
        fit([str(i) for i in range(11)], max_classes=10)
    assert fit([str(i) for i in range(10)], max_classes=10).num_classes == 10


def test_reals() -> None:
    labels, found, back = round_trip([0.5, None, -3.25, float("nan")])
    np.testing.assert_array_equal(found, np.array([0.5, np.nan, -3.25, np.nan], np.float32))
    assert found.dtype == np.float32
    assert (labels.task, labels.num_classes) == ("regression", None)
    assert back == [0.5, None, -3.25, None]
    assert labels.is_labelled(found).tolist() == [True, False, True, False]
    integers = fit([1, 2, None], "regression").encode(pa.array([1, 2, None]))
    np.testing.assert_array_equal(integers, np.array([1, 2, np.nan], np.float32))


# -- lists and several columns -----------------------------------------------------------------


@pytest.mark.parametrize("kind", [pa.int64(), pa.bool_(), pa.float32(), pa.int8()], ids=str)
@pytest.mark.parametrize("fixed", [False, True])
def test_a_place_for_each_class(kind: Any, fixed: bool) -> None:
    list_type = pa.list_(kind, 3) if fixed else pa.list_(kind)
    one = pa.array([[0, 1, 0], None, [1, 0, 0], [1, 0, 0]], pa.list_(pa.int64())).cast(list_type)
    labels, found, back = round_trip(one)
    assert (labels.kind, labels.classes) == ("one-hot", (0, 1, 2))
    assert found.tolist() == [1, -1, 0, 0]
    assert back == [1, None, 0, 0]
    several = pa.array([[0, 1, 1], None, [0, 0, 0], [1, 0, 0]], pa.list_(pa.int64()))
    several = several.cast(list_type)
    labels, found, back = round_trip(several)
    assert (labels.kind, labels.is_multilabel) == ("multi-hot", True)
    assert found.tolist() == [[0, 1, 1], [-1, -1, -1], [0, 0, 0], [1, 0, 0]]
    assert back == [[1, 2], None, [], [0]]
    assert labels.is_labelled(found).tolist() == [True, False, True, True]
    assert fit(one, "multi-label classification").kind == "multi-hot"
    if not pa.types.is_boolean(kind):
        assert fit(one, "regression").kind == "reals"


def test_one_hot_rows_without_a_one_are_unknown() -> None:
    array = pa.array([[0, 1], [0, 0]])
    assert fit(array).kind == "multi-hot"
    assert fit(array, "classification").encode(array).tolist() == [1, -1]
    with pytest.raises(ValueError, match="must be 0 but for one 1 .got 1, 1 in row 8, from 0"):
        fit(array, "classification").encode(pa.array([[0, 1], [1, 1]]), first_row=7)
    with pytest.raises(ValueError, match=r"must be 0 or 1 .got 0, 2 in row 0, from 0"):
        fit(array).encode(pa.array([[0, 2]]))


@pytest.mark.parametrize(
    ("lists", "classes"),
    [
        ([["x"], ["y", "x"], [], None, ["x", "x"]], ("x", "y")),
        ([[7, -1], [7], [], None], (-1, 7)),
        ([[1, 0], [0, 1, 2]], (0, 1, 2)),
        ([[1], [0], [1]], (0, 1)),
    ],
)
def test_sets_of_classes(lists: list[Any], classes: tuple[Any, ...]) -> None:
    labels, found, back = round_trip(lists)
    assert (labels.kind, labels.task) == ("sets", "multi-label classification")
    assert labels.classes == classes
    sets = [None if row is None else sorted(set(row), key=classes.index) for row in lists]
    expected = [[-1] * len(classes) if s is None else [int(c in s) for c in classes] for s in sets]
    assert found.tolist() == expected
    assert found.dtype == np.int64
    assert back == sets
    inner = pa.array(lists).type.value_type
    for form in (pa.large_list(inner), pa.list_(pa.dictionary(pa.int32(), inner))):
        array = pa.array(lists, form)
        assert fit(array).encode(array).tolist() == expected


def test_unknown_elements_of_sets() -> None:
    labels = fit([["x"], ["y"]])
    counts = EncodedCounts()
    found = labels.encode(pa.array([["z", "y"], [None, "x"], ["z"]]), counts=counts)
    assert found.tolist() == [[0, 1], [-1, -1], [0, 0]]
    assert (counts.rows, counts.missing, counts.unknown) == (3, 1, 2)


def test_several_columns() -> None:
    columns = {"cat": pa.array([1, 0, None]), "dog": pa.array([False, True, True])}
    labels, found, back = round_trip(columns)
    assert (labels.kind, labels.classes) == ("one-hot", ("cat", "dog"))
    assert found.tolist() == [0, 1, -1]
    assert back == ["cat", "dog", None]
    columns["cat"] = pa.array([1, 0, 1])
    labels, found, back = round_trip(columns)
    assert found.tolist() == [[1, 0], [0, 1], [1, 1]]
    assert back == [["cat"], ["dog"], ["cat", "dog"]]
    columns["cat"] = pa.array([1.5, None, 1])
    labels, found, back = round_trip(columns)
    assert (labels.kind, labels.width) == ("reals", 2)
    nan = np.nan
    np.testing.assert_array_equal(found, [[1.5, 0], [nan, nan], [1, 1]])
    assert labels.is_labelled(found).tolist() == [True, False, True]


def test_lists_of_reals_are_several_targets() -> None:
    labels, found, _ = round_trip([[0.5, 1.0], None, [2.0, None]])
    nan = np.nan
    np.testing.assert_array_equal(found, [[0.5, 1.0], [nan, nan], [nan, nan]])
    assert (labels.task, labels.width) == ("regression", 2)


# -- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "task", "message"),
    [
        (["a"], "ranking", "task must be one of classification, multi-label"),
        (["a"], "regression", r"for regression in column 'y' must be null, number .got string."),
        ([True], "regression", r"must be null, number .got bool."),
        (pa.array([0], pa.date32()), None, r"must be boolean, null, number, text .got date32"),
        (["a|b"], "multi-label classification", "must be lists, or several .*say the separator"),
        ([["a"]], "classification", "must be 0 or 1 for each class .*multi-label classification"),
        ([[5, 6]], "classification", "must be 0 or 1 for each class .*multi-label classification"),
        ([[0.5, 1.0]], "classification", 'must be 0 or 1 .*task = "regression"'),
        ([[0.5, 1.0], [0.5]], None, "must all have one length, 2 .got 1 in row 1"),
        ([[True], [True, False]], None, "must be 0 or 1 for each class"),
        ([None, None], None, "must have a label in some row .got none in 2 rows"),
        ([float("nan")], None, "must have a label in some row .got none in 1 rows"),
        (pa.nulls(3, pa.list_(pa.int8())), "regression", "must have a label in .* none in 3 rows"),
        (pa.array([[], []], pa.list_(pa.int8())), "regression", "must have elements .got empty"),
        ([1.0, float("inf")], None, "must be finite .got inf in row 1"),
        ([1.0, float("inf")], "regression", "must be finite .got inf in row 1"),
        ([[1.0, float("inf")]], None, "must be finite .got inf in row 0"),
    ],
)
def test_labels_that_cannot_be(columns: Any, task: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(columns, task)


def test_several_columns_that_cannot_be() -> None:
    columns = {"a": pa.array([1, 2]), "b": pa.array(["x", "y"])}
    with pytest.raises(ValueError, match="columns 'a', 'b' must be boolean, null, number .got int"):
        fit(columns)
    columns = {"a": pa.array([1, 2]), "b": pa.array([1, 0])}
    with pytest.raises(ValueError, match="must be 0 or 1 for each class .*regression"):
        fit(columns, "classification")
    labels = fit(columns)
    with pytest.raises(ValueError, match=r"must come as 2 columns of one length .got .2, 1."):
        labels.encode([pa.array([1, 2]), pa.array([1])])
    with pytest.raises(ValueError, match="must come as 2 columns of one length"):
        labels.encode(pa.array([1]))


@pytest.mark.parametrize(
    ("known", "later", "message"),
    [
        (["a"], pa.array([1]), "must hold text, .* .got int64"),
        ([1, 2], pa.array(["a"]), "must hold numbers, .* .got string"),
        ([["a"]], pa.array(["a"]), "must be lists, .* .got string"),
        ([0.5], pa.array(["a"]), "must be numbers, .* .got string"),
        ([0.5], pa.array([1e300]), r"must fit float32 .got .1e\+300. in row 0"),
        ([0.5], pa.array([-np.inf]), r"must be finite .got -inf in row 0"),
    ],
)
def test_other_labels_than_where_classes_were_found(known: Any, later: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(known).encode(later)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": "scores"}, "there are no labels 'scores'"),
        ({"value_type": "object"}, "there are no labels 'classes' of 'object'"),
        ({"classes": [1]}, "must be distinct and of type string"),
        ({"classes": 5}, "must be as labels are written"),
        ({"type": "strange"}, "strange"),
        ({"width": None}, "must say their 'width'"),
    ],
)
def test_a_damaged_description_is_refused(change: dict[str, Any], message: str) -> None:
    content = fit(["a", "b"]).as_json() | change
    if change == {"width": None}:
        del content["width"]
    with pytest.raises(ValueError, match=message):
        Labels.of_json(content)


def test_many_rows_are_encoded_in_pieces() -> None:
    numbers = np.random.default_rng(0).integers(0, 300, 120_000)
    array = pa.chunked_array([numbers[:70_001], numbers[70_001:]])
    assert np.array_equal(fit(array.combine_chunks()).encode(array), numbers)
    lists = pa.ListArray.from_arrays(
        pa.array(np.arange(0, 120_001, 4, dtype=np.int32)), pa.array(numbers)
    )
    found = fit(lists).encode(lists)
    expected = np.zeros((30_000, 300), np.int64)
    expected[np.repeat(np.arange(30_000), 4), numbers] = 1
    assert np.array_equal(found, expected)
