# SPDX-License-Identifier: Apache-2.0
"""Many columns as one vector, its rows normalized, against scikit-learn. No process group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import StandardScaler, normalize

from graphshard.data import EdgeTable, JoinedTable, NodeTable, Tables, _columns
from graphshard.data._read_tables import TablesGraph, read_tables

NUM_ROWS, NUM_WORDS = 60, 12
WORDS = [f"w{i}" for i in range(NUM_WORDS)]


def papers(seed: int, has_gaps: bool = True) -> pd.DataFrame:
    """Counts of words, some of them missing, some rows without any word; a split and a label."""
    draw = np.random.default_rng(seed)
    counts = draw.poisson(0.7, (NUM_ROWS, NUM_WORDS)).astype(float)
    counts[3] = 0
    if has_gaps:
        counts[draw.random(counts.shape) < 0.05] = np.nan
        counts[5] = np.nan
    frame = pd.DataFrame(counts, columns=WORDS).astype("Int64")
    frame.insert(0, "id", [f"p{i}" for i in draw.permutation(NUM_ROWS)])
    frame["year"] = draw.integers(1990, 2024, NUM_ROWS)
    frame["part"] = draw.choice(["train", "val", "test"], NUM_ROWS)
    frame["field"] = draw.choice(["a", "b"], NUM_ROWS)
    return frame


def read(files: Any, features: Any, **more: Any) -> TablesGraph:
    cites = pd.DataFrame({"from": ["p1", "p2"], "to": ["p3", "p1"]})
    options: dict[str, Any] = {"label": "field", "split": "part"} | more.pop("nodes", {})
    nodes = NodeTable(files=files, id="id", features=features, **options)
    edges = EdgeTable(files=cites, source="from", target="to")
    tables = Tables(nodes={"paper": nodes}, edges={("paper", "cites", "paper"): edges})
    return read_tables(tables, **more)


def wanted(frame: pd.DataFrame, fitted_on: pd.DataFrame, standardize: bool) -> np.ndarray:
    """By scikit-learn, with an indicator where some count is missing."""

    def shares(of: pd.DataFrame) -> np.ndarray:
        counts = of[WORDS].astype(float).to_numpy()
        made = normalize(np.nan_to_num(counts), norm="l1")
        return np.where(np.isnan(counts), np.nan, made)

    training = shares(fitted_on[fitted_on["part"] == "train"])
    made = shares(frame)
    is_missing = np.isnan(made).any(axis=1, keepdims=True)
    imputer = SimpleImputer().fit(training)
    rows = imputer.transform(made)
    if standardize:
        rows = StandardScaler().fit(training).transform(rows)
    has_indicator = np.isnan(shares(fitted_on)).any()
    return np.hstack([rows, is_missing]) if has_indicator else rows


@pytest.mark.parametrize("standardize", [False, True])
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_pattern_is_one_vector_of_row_shares(
    ending: str, standardize: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_columns, "_VECTOR_VALUES", 100)
    frame, path = papers(0), tmp_path / f"papers.{ending}"
    frame.to_csv(path, index=False) if ending == "csv" else frame.to_parquet(path)
    way = {"encoding": "vector", "row_normalize": True, "standardize": standardize}
    made = read(path, {"w*": way, "year": "number"})
    feat = made.graph.ndata["feat"].numpy()
    expected = wanted(frame, frame, standardize)
    np.testing.assert_allclose(feat[:, :-1], expected, rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(feat[:, -1], frame["year"])
    first, second = made.report.nodes["paper"].features
    assert (first.column, first.type, first.width) == ("w*", "12 columns", 13)
    assert first.num_missing == int(frame[WORDS].isna().any(axis=1).sum())
    assert second.column == "year"
    # New papers, whose columns stand in another order among others, in the encodings of these.
    other = papers(1, has_gaps=False)
    shuffled = other[["part", *WORDS[::-1], "year", "id"]].assign(w99=7)
    new = read(shuffled, None, nodes={"label": None, "split": None}, encodings_from=made.task)
    found = new.graph.ndata["feat"].numpy()[:, :-1]
    np.testing.assert_allclose(found, wanted(other, frame, standardize), rtol=2e-6, atol=2e-6)


def test_elements_of_a_vector_keep_their_names() -> None:
    joined = papers(0, has_gaps=False)
    left = joined[["id", "year", "part", "field", "w0", "w1"]]
    right = joined[["id", *WORDS[2:]]]
    join = [JoinedTable(files=right, id="id")]
    features = {"w?": "vector", "w*": {"encoding": "number"}}
    made = read(left, features, nodes={"join": join})
    schema = made.task.schema
    assert schema is not None
    content = schema["nodes"]["paper"]["features"]
    assert content[0]["columns"] == WORDS[:10]
    assert [(f["column"], f["encoding"]) for f in content[1:]] == [
        ("w10", "number"),
        ("w11", "number"),
    ]
    np.testing.assert_array_equal(made.graph.ndata["feat"].numpy(), joined[WORDS].astype(float))


def test_patterns_in_toml(tmp_path: Path) -> None:
    papers(0).to_csv(tmp_path / "papers.csv", index=False)
    (tmp_path / "cites.csv").write_text("from,to\np1,p2\n")
    (tmp_path / "graph.toml").write_text(
        '[nodes.paper]\nfiles = "papers.csv"\nid = "id"\nlabel = "field"\nsplit = "part"\n'
        '[nodes.paper.features]\n"w*" = {encoding = "vector", row_normalize = true}\n'
        '[edges.cites]\nfiles = "cites.csv"\nsource = "from"\ntarget = "to"\n'
    )
    tables = Tables.from_toml(tmp_path / "graph.toml")
    (tmp_path / "again.toml").write_text(tables.to_toml())
    made = [read_tables(Tables.from_toml(tmp_path / f"{n}.toml")) for n in ("graph", "again")]
    assert made[0].task == made[1].task
    assert made[0].graph.ndata["feat"].shape == (NUM_ROWS, NUM_WORDS + 1)


def test_many_counts_that_are_standardized_one_by_one_are_noted() -> None:
    frame = papers(0)[["id", "part", "field"]]
    words = pd.DataFrame({f"c{i}": np.arange(NUM_ROWS) % (i + 2) for i in range(100)})
    notes = read(pd.concat([frame, words], axis=1), None).report.notes
    assert notes == [
        "100 columns of whole numbers of paper were standardized one by one; where they count "
        'words, name them in features as "*" = {encoding = "vector", row_normalize = true}'
    ]
    assert not read(papers(0), None).report.notes


def test_what_cannot_be_one_vector_is_one_line() -> None:
    frame = papers(0)
    with pytest.raises(ValueError, match=r"'v\*' must match a column without another role"):
        read(frame, {"v*": "vector"})
    with pytest.raises(ValueError, match=r"must hold numbers, as they become one vector \(got 't'"):
        read(frame.assign(t="x"), {"*": "vector"})
    with pytest.raises(ValueError, match=r"got inf in row 2"):
        endless = frame[WORDS].astype(float).assign(id=frame["id"], part="train", field="a")
        endless.loc[2, "w1"] = np.inf
        read(endless, {"w*": {"encoding": "vector", "row_normalize": True}})
    with pytest.raises(ValueError, match="encoding number takes statistics"):
        read(frame, {"w*": {"encoding": "number", "row_normalize": True}})
