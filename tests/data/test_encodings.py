# SPDX-License-Identifier: Apache-2.0
"""Columns as features, against pandas and scikit-learn. No process group.

Tables are generated from seeds: a few in every run, 500 with ``--all``.
"""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from graphshard.data import _columns, encodings
from graphshard.data.encodings import EncodedCounts, Encoding, EncodingFit, choose
from graphshard.data.labels import TASKS, LabelFit

pandas = pytest.importorskip("pandas", reason="pandas is an oracle, and is not installed")
sklearn = pytest.importorskip("sklearn", reason="scikit-learn is an oracle, and is not installed")
preprocessing = pytest.importorskip("sklearn.preprocessing")


def fit(
    array: Any,
    asked: dict[str, Any] | None = None,
    is_training: np.ndarray | None = None,
    cuts: tuple[int, ...] = (),
    name: str = "x",
) -> Encoding:
    """The encoding of a column that comes in batches which end at ``cuts``."""
    array = array if isinstance(array, pa.Array | pa.ChunkedArray) else pa.array(array)
    fitted = EncodingFit(pa.field(name, array.type), asked)
    ends = [0, *cuts, len(array)]
    for start, stop in zip(ends, ends[1:], strict=False):
        mask = None if is_training is None else is_training[start:stop]
        fitted.update(array.slice(start, stop - start), mask)
    return fitted.finish()


def encode(array: Any, *arguments: Any, **named: Any) -> np.ndarray:
    array = array if isinstance(array, pa.Array | pa.ChunkedArray) else pa.array(array)
    return fit(array, *arguments, **named).encode(array)


def missing_column(values: Any) -> np.ndarray:
    """The indicator of a pandas series: a column, or none where nothing is missing."""
    missing = values.isna().to_numpy()
    return missing[:, None].astype(np.float32)[:, : int(missing.any())]


# -- generated tables --------------------------------------------------------------------------


def scaled(values: Any, train: Any) -> np.ndarray:
    """What scikit-learn makes of numbers, with the mean where they are missing."""
    if train.notna().sum() == 0:  # it has no mean of nothing
        return values.fillna(0.0).to_numpy(np.float64)[:, None]
    scaler = preprocessing.StandardScaler().fit(train.to_numpy(np.float64)[:, None])
    return np.nan_to_num(scaler.transform(values.to_numpy(np.float64)[:, None]))


def a_numbers(rng: np.random.Generator, n: int, missing: np.ndarray) -> tuple[Any, Any, Any]:
    kind = rng.choice(["int8", "uint16", "int64", "uint64", "float", "double", "halffloat"])
    values = rng.normal(rng.choice([0, 50]), 20, n)
    if "int" in kind:
        values = np.abs(np.round(values)).clip(0, 127)
    array = pa.array(values.astype(pa.type_for_alias(kind).to_pandas_dtype()), mask=missing)
    series = pandas.Series(array.to_pylist(), dtype="float64")
    way = rng.choice(["standardized", "number", "logarithm", "edges"])

    def oracle(train: Any) -> np.ndarray:
        if way == "standardized":
            return scaled(series, train)
        if way == "number":
            mean = train.mean() if train.notna().any() else 0.0
            return series.fillna(mean).to_numpy()[:, None]
        if way == "logarithm":
            log = lambda x: np.sign(x) * np.log1p(x.abs())  # noqa: E731
            return scaled(log(series), log(train))
        bounds = [-np.inf, 0, 10.5, 60, np.inf]
        return pandas.get_dummies(pandas.cut(series, bounds, right=False)).to_numpy()

    asked = {"encoding": str(way)}
    if way == "edges":
        asked = {"encoding": "bucketed", "edges": [0, 10.5, 60]}
    return array, asked, (series, oracle)


def a_quantiles(rng: np.random.Generator, n: int, missing: np.ndarray) -> tuple[Any, Any, Any]:
    array = pa.array(rng.normal(size=n), mask=missing)
    series = pandas.Series(array.to_pylist(), dtype="float64")
    buckets = int(rng.integers(2, 6))

    def oracle(train: Any) -> np.ndarray:
        known = train.dropna().to_numpy()[:, None]
        if len(known) < 2:
            return np.repeat(series.notna().to_numpy()[:, None].astype(float), 1, axis=1)
        binner = preprocessing.KBinsDiscretizer(
            buckets, encode="ordinal", quantile_method="linear", subsample=None
        ).fit(known)
        # its bins, of which the outer ones are open here, by pandas
        inner = binner.bin_edges_[0][1:-1]
        nearest = known[np.abs(known - inner).argmin(axis=0), 0]  # it rounds those that are numbers
        inner = np.where(np.isclose(nearest, inner, 1e-12, 1e-12), nearest, inner)
        edges = [-np.inf, *inner, np.inf]
        return pandas.get_dummies(pandas.cut(series, edges, right=False)).to_numpy()

    return array, {"encoding": "bucketed", "buckets": buckets}, (series, oracle)


def a_categories(rng: np.random.Generator, n: int, missing: np.ndarray) -> tuple[Any, Any, Any]:
    pool: list[Any] = ["b", "a", "", "ü", "Z", "é", "a b", "10", "9"]
    if rng.random() < 0.4:
        pool = [5, -3, 2**40, 0]
    elif rng.random() < 0.3:
        pool = [2**64 - 1, 7, 2**63]
    chosen = [pool[i] for i in rng.integers(0, len(pool), n)]
    values = [None if absent else value for value, absent in zip(chosen, missing, strict=True)]
    text = isinstance(pool[0], str)
    array = pa.array(values, pa.string() if text else pa.uint64() if 7 in pool else pa.int64())
    if rng.random() < 0.5:
        array = array.dictionary_encode()
    series = pandas.Series(values, dtype="object")
    embedded = bool(rng.random() < 0.4)

    def oracle(train: Any) -> np.ndarray:
        categories = sorted(set(train.dropna()))
        if embedded:
            return pandas.Index(categories, dtype="object").get_indexer_for(series) + 1
        if not categories:
            return np.zeros((n, 0))
        table = np.array(train.dropna().tolist(), dtype=object)[:, None]
        encoder = preprocessing.OneHotEncoder(handle_unknown="ignore", sparse_output=False)
        encoder.fit(table)
        assert list(encoder.categories_[0]) == categories
        filler = "no category" if text else -(2**50)
        return encoder.transform(
            np.array([filler if v is None else v for v in values], dtype=object)[:, None]
        )

    return array, {"encoding": "embedding" if embedded else "category"}, (series, oracle)


def a_booleans(rng: np.random.Generator, n: int, missing: np.ndarray) -> tuple[Any, Any, Any]:
    array = pa.array(rng.random(n) < 0.3, mask=missing)
    series = pandas.Series(array.to_pylist(), dtype="float64")

    def oracle(train: Any) -> np.ndarray:
        return series.fillna(train.mean() if train.notna().any() else 0.0).to_numpy()[:, None]

    return array, None, (series, oracle)


def a_times(rng: np.random.Generator, n: int, missing: np.ndarray) -> tuple[Any, Any, Any]:
    seconds = rng.integers(-(10**9), 2 * 10**9, n)
    unit, zone = str(rng.choice(["s", "ms", "us", "ns"])), rng.choice([None, "Europe/Berlin"])
    per_second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    array = pa.array(seconds * per_second, pa.int64(), mask=missing).cast(pa.timestamp(unit, zone))
    series = pandas.Series(pandas.to_datetime(np.where(missing, None, seconds), unit="s", utc=True))
    local = series.dt.tz_convert(zone or "UTC").dt
    numbers = pandas.Series(np.where(missing, np.nan, seconds.astype(float)))

    def oracle(train: Any) -> np.ndarray:
        turns = [local.hour / 24, local.day_of_week / 7, (local.month - 1) / 12]
        turns.append((local.day_of_year - 1) / 366)
        circles = [f(2 * np.pi * turn).fillna(0) for turn in turns for f in (np.sin, np.cos)]
        return np.column_stack([scaled(numbers, numbers[train.index]), *circles])

    return array, {"parts": list(encodings.TIME_PARTS)}, (series, oracle)


def a_vectors(rng: np.random.Generator, n: int, missing: np.ndarray) -> tuple[Any, Any, Any]:
    width = int(rng.integers(1, 5))
    rows = rng.normal(3, 2, (n, width)).astype(np.float32)
    lists = [None if m else row.tolist() for row, m in zip(rows, missing, strict=True)]
    fixed = rng.random() < 0.5
    kind = pa.list_(pa.float32(), width) if fixed else pa.list_(pa.float32())
    standardize = bool(rng.random() < 0.5)
    table = pandas.DataFrame(rows.astype(np.float64))
    table[missing] = np.nan
    series = pandas.Series(np.where(missing, np.nan, 1.0))

    def oracle(train: Any) -> np.ndarray:
        if not fixed and missing.all():
            return np.zeros((n, 0))
        columns = [table[c] for c in table]
        if standardize:
            return np.column_stack([scaled(c, c[train.index]) for c in columns])
        means = [c[train.index].mean() for c in columns]
        filled = [c.fillna(0 if np.isnan(m) else m) for c, m in zip(columns, means, strict=True)]
        return np.column_stack(filled)

    return pa.array(lists, kind), {"standardize": standardize}, (series, oracle)


Column = Callable[[np.random.Generator, int, np.ndarray], tuple[Any, Any, Any]]
MAKERS: list[Column] = [a_numbers, a_quantiles, a_categories, a_booleans, a_times, a_vectors]


def check_table(seed: int) -> None:
    """Each column of a table, in two ways of cutting it, is what the oracle makes of it."""
    rng = np.random.default_rng(seed)
    n = int(rng.choice([1, 2, 17, 120]))
    is_training = None if rng.random() < 0.3 else rng.random(n) < 0.5
    if is_training is not None:
        is_training[rng.integers(n)] = True
    rows = np.arange(n) if is_training is None else np.flatnonzero(is_training)
    for maker in MAKERS:
        missing = rng.random(n) < rng.choice([0, 0.2, 1], p=[0.4, 0.5, 0.1])
        array, asked, (series, oracle) = maker(rng, n, missing)
        expected = oracle(series.iloc[rows])
        cuts = tuple(np.sort(rng.integers(0, n + 1, 2)).tolist())
        encoding = fit(array, asked, is_training, cuts)
        assert encoding == fit(array, asked, is_training), (seed, maker.__name__)
        again = Encoding.of_json(json.loads(json.dumps(encoding.as_json())))
        assert again == encoding
        counts = EncodedCounts()
        found = again.encode(pa.chunked_array([array[: n // 2], array[n // 2 :]]), counts=counts)
        if encoding.kind != "embedding":
            expected = np.column_stack([expected, missing_column(series)])
            assert found.dtype == np.float32
            assert len(encoding.names) == encoding.width == found.shape[1]
        message = f"seed {seed}: {maker.__name__}, {asked}, {array.type}"
        np.testing.assert_allclose(found, expected, 2e-6, 2e-6, err_msg=message)
        assert counts.missing == int(series.isna().sum())
        assert counts.rows == n


def test_generated_tables_are_encoded_as_by_pandas_and_sklearn(run_all: bool) -> None:
    for seed in range(500 if run_all else 12):
        check_table(seed)


# -- statistics --------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["standardized", "number", "logarithm", "bucketed", "vector"])
def test_statistics_do_not_depend_on_batches(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, in numbers whose sum depends on the order, with training rows."""
    monkeypatch.setattr(encodings, "SAMPLE_ROWS", 500)
    monkeypatch.setattr(encodings, "_BLOCK_VALUES", 1000)
    rng = np.random.default_rng(0)
    array = pa.array(rng.lognormal(8, 4, 9000), mask=rng.random(9000) < 0.1)
    if encoding == "vector":
        absent = pa.array(np.arange(3000) < 700)
        lists = pa.FixedSizeListArray.from_arrays(pa.array(rng.lognormal(8, 4, 9000)), 3)
        array = pa.array(
            [None if a else r for a, r in zip(absent.tolist(), lists.to_pylist(), strict=True)]
        )
    is_training = rng.random(len(array)) < 0.7
    whole = fit(array, {"encoding": encoding}, is_training)
    for cuts in [(1, 2, 3), (999, 1001), (2500,), tuple(range(50, len(array), 77))]:
        assert fit(array, {"encoding": encoding}, is_training, cuts) == whole
    assert whole.num_rows == is_training.sum()


def test_statistics_are_of_training_rows() -> None:
    array = pa.array([0.0, 2.0, 1e9, None])
    encoding = fit(array, None, np.array([True, True, False, False]))
    assert encoding.mean == (1.0,)
    assert encoding.scale == (1.0,)
    assert encoding.num_rows == 2
    assert encoding.encode(array)[:, 0].tolist() == [-1, 1, 1e9, 0]
    chosen = np.array([True, False, True, False])
    whole = {"statistics": "all"}
    for asked in (None, {"encoding": "embedding"}):
        assert fit(["a", "b", None, "b"], asked, chosen).values == ("a",)
        assert fit([None, "b", None, "b"], asked, chosen).values == ()
        assert fit(["a", "b", None, "b"], {**(asked or {}), **whole}, chosen).values == ("a", "b")
    assert fit([1.0, 2.0, None, 6.0], whole, chosen) == fit([1.0, 2.0, None, 6.0])
    buckets = {"encoding": "bucketed", "buckets": 2}
    assert fit([1.0, 50.0, 3.0, 60.0], buckets, chosen).edges == (2.0,)


def test_training_rows_may_be_known_late() -> None:
    fitted = EncodingFit(pa.field("x", pa.string()))
    fitted.update(pa.array(["a"]))
    fitted.update(pa.array(["b", "c"]), np.array([True, False]))
    fitted.update(pa.array(["d"]))
    assert fitted.finish().values == ("a", "b", "d")


def test_without_training_rows_there_are_no_statistics() -> None:
    with pytest.raises(ValueError, match="must have training rows .* none among 2 rows"):
        fit([1.0, 2.0], None, np.zeros(2, bool))
    assert encode(pa.array([], pa.float64())).shape == (0, 1)
    assert encode(pa.array([], pa.string())).shape == (0, 0)


def test_numbers_that_are_all_equal_become_zero() -> None:
    encoding = fit([0.1] * 1001)
    assert encoding.mean == (0.1,)
    assert encoding.scale == (1.0,)
    assert encoding.encode(pa.array([0.1, 1.1])).ravel().tolist() == [0.0, 1.0]


def test_large_numbers_keep_their_variance() -> None:
    rng = np.random.default_rng(1)
    values = 1e12 + rng.normal(size=200_000)
    encoding = fit(values)
    assert encoding.mean[0] == pytest.approx(values.mean(), rel=1e-15)
    assert encoding.scale[0] == pytest.approx(values.std(), rel=1e-6)


def test_quantiles_of_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more rows than are kept, quantiles are off by half a row over the root of their number."""
    monkeypatch.setattr(encodings, "SAMPLE_ROWS", 10_000)
    values = np.sort(np.random.default_rng(2).normal(size=100_000))  # a prefix would be far off
    edges = np.array(fit(values, {"encoding": "bucketed", "buckets": 4}).edges)
    shares = np.searchsorted(values, edges) / len(values)
    assert np.abs(shares - [0.25, 0.5, 0.75]).max() < 4 * 0.5 / 100
    fitted = EncodingFit(pa.field("x", pa.float64()), {"encoding": "bucketed"})
    for start in range(0, len(values), 1000):
        fitted.update(pa.array(values[start : start + 1000]))
    sample = fitted._sample
    assert sample is not None
    assert sample._num_new + len(sample._values) <= 20_000


def test_a_logarithm_keeps_the_sign() -> None:
    values = np.array([-100.0, -0.5, 0.0, 0.5, 1e6])
    logs = np.array([-np.log(101), -np.log(1.5), 0, np.log(1.5), np.log(1e6 + 1)])
    found = encode(values, {"encoding": "logarithm"})[:, 0]
    np.testing.assert_allclose(found, (logs - logs.mean()) / logs.std(), 1e-6, 1e-6)


def test_equal_quantiles_are_one_edge() -> None:
    asked = {"encoding": "bucketed", "buckets": 7}
    edges = fit([0.0] * 5 + [0.1] * 20 + [7.0] * 5, asked).edges
    assert len(edges) == 3
    assert edges[1] == 0.1  # among equal numbers, not beside them
    assert edges == pytest.approx((0.1 / 7, 0.1, 0.1 + 6.9 * 6 / 7))
    for value in np.random.default_rng(5).random(50):  # sums of shares of it may differ from it
        edges = fit([0.0] * 5 + [value] * 20 + [7.0] * 5, asked).edges
        assert (len(edges), edges[1]) == (3, value)
    assert fit([3.0] * 9, asked).edges == ()
    assert encode([3.0, 3.0], asked).tolist() == [[1], [1]]


def test_pieces_have_few_values() -> None:
    """A million numbers in long lists are read in pieces that fit into the cache."""
    flat = pa.array(np.zeros(2**20, np.float32))
    offsets = pa.array(np.arange(0, 2**20 + 1, 1024, dtype=np.int32))
    for lists in (
        pa.FixedSizeListArray.from_arrays(flat, 1024),
        pa.ListArray.from_arrays(offsets, flat),
    ):
        assert {len(piece) for _, piece in _columns.pieces(lists)} == {64}


# -- missing and unknown values ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("array", "filled"),
    [
        (pa.array([1.0, 3.0]), [0.0]),
        (pa.array([True, True, False, False]), [0.5]),
        (pa.array(["a", "b"]), [0.0, 0.0]),
        (pa.array([[1.0, 2.0], [3.0, 6.0]]), [2.0, 4.0]),
        (pa.array([0, 86400], pa.timestamp("s")), [0.0]),
    ],
)
def test_an_indicator_is_there_where_a_value_was_missing(array: Any, filled: list[float]) -> None:
    with_missing = pa.concat_arrays([array, pa.nulls(1, array.type)])
    without = fit(array)
    counts = EncodedCounts()
    assert without.encode(with_missing, counts=counts)[-1].tolist() == filled
    assert counts == EncodedCounts(rows=len(array) + 1, missing=1)
    # one missing value outside the training rows is enough
    training = np.array([True] * len(array) + [False])
    indicated = fit(with_missing, None, training)
    assert indicated.encode(with_missing)[-1].tolist() == [*filled, 1.0]
    assert indicated.encode(array)[:, -1].tolist() == [0.0] * len(array)
    assert indicated.width == without.width + 1
    assert indicated.names[-1] == "x is missing"
    nothing = indicated.encode(pa.nulls(2))  # a CSV file in which the column is empty
    assert nothing.tolist() == [[*filled, 1.0]] * 2


def test_nan_is_missing() -> None:
    assert encode([1.0, float("nan"), 3.0]).tolist() == [[-1, 0], [0, 1], [1, 0]]


def test_an_element_that_is_missing_is_filled() -> None:
    found = encode(pa.array([[1.0, None], None, [3.0, 4.0], [5.0, float("nan")]]))
    assert found.tolist() == [[1, 4, 1], [3, 4, 1], [3, 4, 0], [5, 4, 1]]


def test_a_column_without_any_value() -> None:
    assert encode(pa.nulls(2)).tolist() == [[0, 1]] * 2
    assert encode(pa.nulls(2, pa.string())).tolist() == [[1]] * 2
    assert encode(pa.nulls(2, pa.list_(pa.int8()))).tolist() == [[1]] * 2
    assert encode(pa.nulls(2, pa.list_(pa.int8(), 2))).tolist() == [[0, 0, 1]] * 2
    late = pa.array([None, None, [1, 3]])
    assert encode(late, cuts=(1,)).tolist() == [[1, 3, 1], [1, 3, 1], [1, 3, 0]]
    later = fit(pa.nulls(2))
    assert later.encode(pa.array([5, 6])).tolist() == [[5, 0], [6, 0]]


def test_unknown_categories_are_counted() -> None:
    encoding = fit(["a", "b", "a", None])
    counts = EncodedCounts()
    found = encoding.encode(pa.array(["c", "b", None, "d", "c"]), counts=counts)
    assert found.tolist() == [[0, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0], [0, 0, 0]]
    assert counts == EncodedCounts(rows=5, missing=1, unknown=3, examples=["c", "d"])
    encoding.encode(pa.array(["z"]), counts=counts)
    assert (counts.rows, counts.unknown, counts.examples) == (6, 4, ["c", "d", "z"])
    numbers = EncodedCounts()
    fit([1, 2], {"encoding": "category"}).encode(pa.array([2.5, 3.0]), counts=numbers)
    assert numbers.examples == ["2.5", "3.0"]


@pytest.mark.parametrize(
    ("known", "later", "places"),
    [
        (pa.array([1, 2], pa.int8()), pa.array([2, 2**63, 1], pa.uint64()), [2, 0, 1]),
        (pa.array([1, 2**64 - 1], pa.uint64()), pa.array([-1, 1], pa.int64()), [0, 1]),
        (pa.array([1, 2]), pa.array([1.0, 1.5, None, 2.0, 1e30, -1e30]), [1, 0, 0, 2, 0, 0]),
        (pa.array([-(2**63), 2]), pa.array([2.0**63, -(2.0**63)]), [0, 1]),
        (pa.array([1, 2**64 - 1], pa.uint64()), pa.array([-1.0, 1.0]), [0, 1]),
        (pa.array([1, 2**63 - 1]), pa.array([2**63 - 1, 2**63], pa.uint64()), [2, 0]),
        (pa.array([0.5, -0.0]), pa.array([0, 1, 2**62]), [1, 0, 0]),
        (pa.array([True, False]), pa.array([False, None, True]), [1, 0, 2]),
        (pa.array(["a"]), pa.array(["a"], pa.large_string()), [1]),
    ],
)
def test_categories_are_compared_by_value(known: Any, later: Any, places: list[int]) -> None:
    encoding = fit(known, {"encoding": "embedding"})
    counts = EncodedCounts()
    found = encoding.encode(later, counts=counts)
    assert found.tolist() == places
    assert found.dtype == np.int64
    assert counts.missing == later.null_count
    assert counts.unknown == places.count(0) - later.null_count
    assert encoding.num_embeddings == len(known) + 1


# -- categories and text -----------------------------------------------------------------------


def test_above_a_number_of_values_a_category_is_an_embedding() -> None:
    def values(number: int) -> list[str]:
        return [f"{i:03}" for i in range(number)] * 3

    assert fit(values(32)).kind == "category"
    assert fit(values(32)).width == 32
    many = fit(values(33))
    assert (many.kind, many.width, many.names, many.num_embeddings) == ("embedding", 0, (), 34)
    assert many.encode(pa.array(["000", "032", None, "x"])).tolist() == [1, 33, 0, 0]
    assert fit(values(33), {"encoding": "category", "one_hot_limit": 33}).kind == "category"
    assert fit(values(3), {"one_hot_limit": 2}).kind == "embedding"
    assert fit(values(2), {"encoding": "embedding"}).kind == "embedding"


def test_text_is_refused_unless_asked_for() -> None:
    texts = [f"text {i}" for i in range(40)]
    with pytest.raises(ValueError) as refused:
        fit(texts, name="title")
    assert str(refused.value) == (
        "column 'title' must be a category, with values that rows share (got 40 distinct values in "
        "40 rows, as texts and ids have); give an embedding of it (a column with a list of numbers "
        'for each row), or leave it out, or ask for the encoding "embedding"'
    )
    fitted = EncodingFit(pa.field("title", pa.string()))
    fitted.update(pa.array(texts))
    assert fitted.refusal() == str(refused.value)
    assert fit(texts, {"encoding": "embedding"}).num_embeddings == 41
    assert fit(texts * 2).kind == "embedding"  # half as many values as rows
    assert fit(texts[:32]).kind == "category"
    few = np.arange(120) % 3 == 0  # of all rows, as few may be for training
    assert fit(texts * 3, None, few).kind == "embedding"
    with pytest.raises(ValueError, match="got 40 distinct values in 40 rows"):
        fit(texts, None, np.arange(40) < 5)
    with pytest.raises(ValueError, match="at most 39 distinct values .*got more, of type string"):
        fit(texts, {"encoding": "embedding", "max_categories": 39})


def test_distinct_values_are_bounded() -> None:
    fitted = EncodingFit(pa.field("x", pa.string()), {"max_categories": 10})
    for start in range(0, 1000, 100):
        fitted.update(pa.array([str(i) for i in range(start, start + 100)]))
    assert len(fitted._distinct) == 10


# -- types -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [getattr(pa, f"{sign}int{bits}")() for sign in ("", "u") for bits in (8, 16, 32, 64)]
    + [pa.float16(), pa.float32(), pa.float64(), pa.decimal128(9, 2), pa.decimal256(50, 1)],
    ids=str,
)
def test_numbers_of_every_type(kind: Any) -> None:
    values = [1, 5, None, 100]
    if pa.types.is_float16(kind):
        array = pa.array([None if v is None else np.float16(v) for v in values], kind)
    elif pa.types.is_decimal(kind):
        array = pa.array([None if v is None else decimal.Decimal(v) for v in values], kind)
    else:
        array = pa.array(values, kind)
    for asked in (None, {"encoding": "logarithm"}, {"encoding": "bucketed", "edges": [5.5]}):
        assert np.array_equal(encode(array, asked), encode(pa.array(values, "double"), asked))
    assert encode(array[1:], {"encoding": "number"})[0, 0] == 5  # at an offset
    assert fit(array).type == str(kind)


def test_physical_forms_of_one_column() -> None:
    values = ["b", "a", None, "b", "c"]
    plain = pa.array(values)
    forms = [
        plain.cast(pa.large_string()),
        plain.cast(pa.string_view()),
        plain.dictionary_encode(),
        pa.DictionaryArray.from_arrays(
            plain.dictionary_encode().indices, pa.array(["b", "a", "c"], pa.string_view())
        ),
        pa.array(["x", *values]).dictionary_encode()[1:],
        pa.array(["x", *values])[1:],
        pa.RunEndEncodedArray.from_arrays(pa.array([1, 2, 3, 4, 5], pa.int32()), plain),
        pa.chunked_array([plain[:2], plain[2:2], plain[2:].dictionary_encode().cast(pa.string())]),
    ]
    for form in forms:
        assert np.array_equal(encode(form), encode(plain))
        assert fit(form).values == ("a", "b", "c")
    numbers = pa.array([1.5, None, 2.5])
    for form in (
        pa.RunEndEncodedArray.from_arrays(pa.array([1, 2, 3], pa.int32()), numbers),
        pa.chunked_array([], pa.float64()) if False else pa.chunked_array([numbers]),
    ):
        assert np.array_equal(encode(form), encode(numbers))
    rows = pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2))
    tensors = pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.int64(), [2]), rows)
    for form in (tensors, rows.cast(pa.list_(pa.int8())), rows.cast(pa.large_list(pa.float16()))):
        assert np.array_equal(encode(form), [[1, 2], [3, 4]])


@pytest.mark.parametrize(
    ("kind", "encoding"),
    [
        (pa.int16(), "standardized"),
        (pa.decimal128(5, 1), "standardized"),
        (pa.bool_(), "boolean"),
        (pa.large_string(), "category"),
        (pa.dictionary(pa.int8(), pa.string()), "category"),
        (pa.dictionary(pa.int8(), pa.int64()), "category"),
        (pa.dictionary(pa.int8(), pa.timestamp("s")), "time"),
        (pa.date32(), "time"),
        (pa.duration("ms"), "time"),
        (pa.time64("us"), "time"),
        (pa.list_(pa.float32()), "vector"),
        (pa.list_(pa.float32(), 3), "vector"),
        (pa.list_(pa.string()), "multi-hot"),
        (pa.large_list(pa.dictionary(pa.int8(), pa.string())), "multi-hot"),
        (pa.list_(pa.int64()), "vector"),
        (pa.null(), "number"),
    ],
    ids=str,
)
def test_the_default_follows_from_the_type(kind: Any, encoding: str) -> None:
    assert choose(pa.field("x", kind)) == encoding
    assert EncodingFit(pa.field("x", kind)).kind == encoding


@pytest.mark.parametrize(
    "kind", [pa.binary(), pa.binary(16), pa.struct([("a", pa.int8())]), pa.map_("int8", "int8")]
)
def test_other_types_are_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"column 'x' must hold numbers, .* convert it, or leave"):
        EncodingFit(pa.field("x", kind))


# -- times and vectors -------------------------------------------------------------------------


def test_times_of_other_types() -> None:
    dates = pa.array([datetime.date(2024, 2, 29), None, datetime.date(2023, 12, 31)])
    asked = {"parts": ["month", "day_of_year"]}
    series = pandas.Series(pandas.to_datetime(dates.to_pylist())).dt
    expected = []
    for turn in ((series.month - 1) / 12, (series.day_of_year - 1) / 366):
        expected += [np.sin(2 * np.pi * turn).fillna(0), np.cos(2 * np.pi * turn).fillna(0)]
    for kind in (pa.date32(), pa.date64()):
        found = encode(dates.cast(kind), asked)[:, :-1]
        np.testing.assert_allclose(found, np.column_stack(expected), atol=1e-6)
        assert fit(dates.cast(kind)).mean[0] == (1709164800 + 1703980800) / 2
    clock = pa.array([6 * 3600 * 10**6 + 1800 * 10**6, 18 * 3600 * 10**6], pa.time64("us"))
    found = encode(clock, {"parts": ["seconds", "hour"]})
    np.testing.assert_allclose(found, [[-1, 1, 0], [1, -1, 0]], atol=1e-6)
    assert fit(pa.array([1500, 2500], pa.duration("ms"))).mean == (2.0,)
    assert fit(pa.array([5, 7], pa.time32("s"))).mean == (6.0,)
    unix = encode([1.5e9, 1600000000.25], {"encoding": "time", "parts": ["seconds", "weekday"]})
    days = pandas.Series(pandas.to_datetime([1.5e9, 1600000000.25], unit="s")).dt.day_of_week
    np.testing.assert_allclose(unix[:, 1], np.sin(2 * np.pi * days / 7), atol=1e-6)


@pytest.mark.parametrize("zone", ["Europe/Berlin", "UTC", None])
@pytest.mark.parametrize("later", ["America/New_York", "UTC", None])
def test_hours_are_those_of_the_zone_of_the_statistics(zone: str | None, later: str | None) -> None:
    instants = pa.array(np.arange(0, 10**8, 7 * 3600), pa.timestamp("s"))
    times = instants.cast(pa.timestamp("s", zone))
    encoding = fit(times, {"parts": ["seconds", "hour", "weekday", "day_of_year"]})
    expected = encoding.encode(times)
    np.testing.assert_array_equal(
        encoding.encode(instants.cast(pa.timestamp("ms", later))), expected
    )
    hours = pandas.DatetimeIndex(instants.to_numpy(), tz="UTC").tz_convert(zone or "UTC").hour
    np.testing.assert_allclose(expected[:, 1], np.sin(2 * np.pi * hours / 24), atol=1e-6)


def test_parts_are_in_one_order() -> None:
    encoding = fit(pa.array([0], pa.timestamp("s")), {"parts": ["hour", "seconds"]}, name="t")
    assert encoding.names == ("t: seconds", "t: hour, sine", "t: hour, cosine")
    assert fit(pa.array([0], pa.timestamp("s")), {"parts": "weekday"}).width == 2


def test_a_vector_is_standardized_by_element() -> None:
    rows = np.random.default_rng(3).normal(5, [1, 10], (50, 2))
    array = pa.array(rows.tolist())
    expected = preprocessing.StandardScaler().fit_transform(rows)
    found = encode(array, {"standardize": True})
    np.testing.assert_allclose(found, expected, 1e-5, 1e-6)
    assert np.array_equal(encode(array), rows.astype(np.float32))


# -- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "encoding", ["standardized", "number", "logarithm", "bucketed", "category"]
)
def test_an_infinity_is_refused_with_its_row(encoding: str) -> None:
    values = pa.array([0.0] * 70_000 + [-np.inf, 0.0])
    message = "numbers of column 'x' must be finite .got -inf in row 70000, from 0.; leave the cell"
    with pytest.raises(ValueError, match=message):
        fit(values, {"encoding": encoding}, np.zeros(70_002, bool), (3, 65_000))
    known = fit([0.0, 1.0], {"encoding": encoding})
    with pytest.raises(ValueError, match="got -inf in row 70100"):
        known.encode(values, first_row=100)


def test_an_infinity_in_a_vector_is_refused() -> None:
    with pytest.raises(ValueError, match="got inf in row 1, from 0"):
        fit([[1.0, 2.0], [1.0, np.inf]])


def test_numbers_too_large() -> None:
    with pytest.raises(ValueError, match=r"column 'x' must be small enough for a variance"):
        fit([1e300, -1e300, 0.0])
    assert np.isfinite(encode([1e300, -1e300, 0.0], {"encoding": "logarithm"})).all()
    with pytest.raises(ValueError, match=r"must fit float32 .* \(got 1e\+39 in row 1, from 0\)"):
        encode([1.0, 1e39], {"encoding": "number"})
    with pytest.raises(ValueError, match=r"must fit float32 .* in row 0, from 0"):
        fit([0.0, 1e-30]).encode(pa.array([1e30]))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        ([[1], None, [1, 2]], "must all have one length, 1 .got 2 in row 2, from 0.; pad or cut"),
        ([[], [1]], "must have elements .got an empty one in row 0"),
        (
            [[["a"]], [["b"]]],
            "lists of column 'x' must hold numbers, or words for the encoding multi-hot .got list",
        ),
    ],
)
def test_lists_that_are_no_vectors(array: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(array)


@pytest.mark.parametrize(
    ("known", "later", "message"),
    [
        ([1.0], ["a"], r"must be one that can be encoded as standardized, .* \(got string\)"),
        (["a"], [1], r"must hold text, .* \(got int64\); convert the column, or make new"),
        ([True], [1], r"encoded as boolean, .* from bool \(got int64\)"),
        ([[1, 2]], [[1]], r"one length, 2 \(got 1 in row 0"),
        ([[1, 2]], [1], r"encoded as vector, .* \(got int64\)"),
        (pa.array([1], pa.timestamp("s")), pa.array([1], pa.duration("s")), "encoded as time"),
        (pa.array([1], pa.time32("s")), pa.array([1], pa.timestamp("s")), "encoded as time"),
    ],
)
def test_other_values_than_where_statistics_were_taken(
    known: Any, later: Any, message: str
) -> None:
    later = later if isinstance(later, pa.Array) else pa.array(later)
    with pytest.raises(ValueError, match=message):
        fit(known).encode(later)


@pytest.mark.parametrize(
    ("kind", "asked", "message"),
    [
        (pa.int8(), {"encoding": "scaled"}, "must be one of standardized, number, .*got .scaled"),
        (pa.string(), {"encoding": "number"}, "encoded as category, embedding .got 'number' for"),
        (pa.int8(), {"buckets": 3}, "encoding standardized takes statistics .got 'buckets' for"),
        (
            pa.int8(),
            {"encoding": "bucketed", "parts": 3},
            "bucketed takes buckets, edges, .* .got 'pa",
        ),
        (pa.int8(), {"encoding": "bucketed", "buckets": 0}, "whole number from 1 .got 0."),
        (pa.int8(), {"encoding": "bucketed", "buckets": True}, "whole number from 1 .got True."),
        (pa.int8(), {"encoding": "bucketed", "edges": [2, 1]}, "finite numbers, ascending"),
        (pa.int8(), {"encoding": "bucketed", "edges": []}, "finite numbers, ascending"),
        (pa.int8(), {"encoding": "bucketed", "edges": "12"}, "finite numbers, ascending"),
        (pa.int8(), {"encoding": "bucketed", "edges": [float("inf")]}, "finite numbers, ascending"),
        (pa.int8(), {"encoding": "bucketed", "edges": [1], "buckets": 2}, "buckets or edges"),
        (pa.int8(), {"statistics": "test"}, "must be of .training. rows or of .all. .got 'test'"),
        (pa.string(), {"one_hot_limit": "many"}, "one_hot_limit of column 'x' must be a whole"),
        (pa.timestamp("s"), {"parts": ["minute"]}, "parts of column 'x' must be of seconds, hour"),
        (pa.timestamp("s"), {"parts": []}, "parts of column 'x' must be of seconds, hour"),
        (pa.duration("s"), {"parts": ["hour"]}, r"type duration\[s\] must be of seconds .got"),
        (pa.date32(), {"parts": ["hour"]}, "must be of seconds, weekday, month, day_of_year .got"),
        (pa.time32("s"), {"parts": ["month"]}, "must be of seconds, hour .got"),
    ],
)
def test_what_is_asked_must_fit(kind: Any, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EncodingFit(pa.field("x", kind), asked)


# -- kept --------------------------------------------------------------------------------------


def test_names_say_what_a_column_is() -> None:
    assert fit([1, 2], name="age").names == ("age",)
    assert fit([1, None], {"encoding": "logarithm"}, name="age").names == (
        "log1p(age)",
        "age is missing",
    )
    bucketed = fit([1, 2], {"encoding": "bucketed", "edges": [0, 1.5]}, name="age")
    assert bucketed.names == ("age < 0", "0 <= age < 1.5", "age >= 1.5")
    assert fit(["b", "a"], name="c").names == ("c = a", "c = b")
    assert fit([True], {"encoding": "category"}, name="c").names == ("c = true",)
    assert fit([[1, 2]], name="v").names == ("v[0]", "v[1]")


def test_json_reads_back_exactly() -> None:
    encoding = fit(np.random.default_rng(4).normal(size=100) / 3)
    content = json.loads(json.dumps(encoding.as_json(), allow_nan=False))
    assert Encoding.of_json(content) == encoding
    assert content["mean"] == list(encoding.mean)
    assert content["width"] == 1
    whole = fit(pa.array([1, 2**63], pa.uint64()), {"encoding": "category"})
    assert Encoding.of_json(json.loads(json.dumps(whole.as_json()))).values == (1, 2**63)
    reals = fit([1.0, 2.5], {"encoding": "category"})
    assert Encoding.of_json(json.loads(json.dumps(reals.as_json()))) == reals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoding": "scaled"}, "there is no encoding 'scaled'"),
        ({"mean": [float("nan")]}, "mean of column 'x' must be finite"),
        ({"scale": [0.0]}, "scale of column 'x' must be positive"),
        ({"scale": [1.0, 1.0]}, "scale of column 'x' must be positive, one for each mean"),
        ({"mean": [], "scale": []}, "must have a mean"),
        ({"mean": ["a"]}, "could not convert"),
        ({"mean": 3}, "must be as encodings are written"),
        ({"width": 5}, "its width is 1 and not 5"),
        ({"column": None}, "must say its 'column'"),
        ({"values": [1], "value_type": "string"}, "must be distinct and of type string"),
        ({"values": [True], "value_type": "int64"}, "must be distinct and of type int64"),
        ({"values": ["a", "a"], "value_type": "string"}, "must be distinct"),
        ({"value_type": "object"}, "there is no type of values 'object'"),
        ({"parts": ["minute"]}, "parts must be of"),
    ],
)
def test_a_damaged_description_is_refused(change: dict[str, Any], message: str) -> None:
    content = fit([1.0, 2.0]).as_json() | change
    if change == {"column": None}:
        del content["column"]
    with pytest.raises(ValueError, match=message):
        Encoding.of_json(content)


# -- every type with every encoding, then every other type -----------------------------------------

SAMPLES: list[Any] = [
    *(pa.array([1, None, 0], kind) for kind in (pa.int8(), pa.uint64(), pa.float32())),
    pa.array([np.float16(1), None]),
    pa.array([decimal.Decimal("1.5"), None]),
    pa.array([True, None]),
    *(pa.array(["a", None, ""], kind) for kind in (pa.string(), pa.large_string())),
    pa.array(["a", None, ""]).cast(pa.string_view()),
    pa.array(["a", None]).dictionary_encode(),
    pa.array([3, None]).dictionary_encode(),
    *(pa.array([86_400, None], pa.int32()).cast(kind) for kind in (pa.date32(), pa.time32("s"))),
    pa.array([86_400_000, None], pa.date64()),
    *(pa.array([1, None], kind) for kind in (pa.time64("ns"), pa.duration("us"))),
    *(pa.array([1, None], pa.timestamp(*of)) for of in (("s",), ("ns", "Asia/Tokyo"))),
    pa.nulls(3),
    pa.array([[1, 2], None]),
    pa.array([[True, False], None]),
    pa.array([[1.5, 0], None, [None, 3]], pa.list_(pa.float16(), 2)),
    pa.array([["a"], None, ["b", None]]),
    pa.array([[], None], pa.large_list(pa.int8())),
    pa.array([b"a", None]),
    pa.array([{"a": 1}, None]),
    pa.array([1, None], pa.float64())[:0],
]


@pytest.mark.parametrize("known", SAMPLES, ids=lambda array: str(array.type))
def test_other_types_work_or_are_refused_in_words(known: Any) -> None:
    """Nothing but a ValueError with a rule, a value and a cure; and no warning."""
    for kind in (None, *encodings.KINDS):
        try:
            encoding = fit(known, {"encoding": kind} if kind else None)
        except ValueError as error:
            assert "(got" in str(error)
            continue
        for later in (known, *SAMPLES):
            try:
                found = encoding.encode(later)
            except ValueError as error:
                assert "(got" in str(error)
                assert later is not known
                continue
            assert len(found) == len(later)
            assert np.isfinite(found).all()
    for task in (None, *TASKS):
        try:
            fitted = LabelFit(pa.field("y", known.type), task)
            fitted.update(known)
            labels = fitted.finish()
        except ValueError as error:
            assert "(got" in str(error)
            continue
        assert len(labels.decode(labels.encode(known))) == len(known)
        for later in SAMPLES:
            try:
                assert len(labels.encode(later)) == len(later)
            except ValueError as error:
                assert "(got" in str(error)
