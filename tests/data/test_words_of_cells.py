# SPDX-License-Identifier: Apache-2.0
"""Cells of several words, as features and labels, against pandas and scikit-learn. No processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from sklearn.preprocessing import MultiLabelBinarizer

from graphshard.data import EdgeTable, NodeTable, Tables, partition_tables
from graphshard.data._columns import evident_separator
from graphshard.data._read_tables import TablesGraph, read_tables
from graphshard.data.encodings import EncodedCounts, Encoding, EncodingFit
from graphshard.data.labels import LabelFit, Labels
from graphshard.data.task import read_task
from graphshard.partition import load_partition_feats
from graphshard.train.commands import run

GENRES = ["Action", "Children's", "Drama", "Film Noir", "Sci-Fi", "éa"]
RATED = ("user", "rated", "movie")


def sets(count: int, seed: int, words: list[str] = GENRES) -> list[list[str] | None]:
    """Some words of each row, or None."""
    rng = np.random.default_rng(seed)
    chosen: list[list[str] | None] = []
    for _ in range(count):
        row = rng.choice(words, rng.integers(0, 4), replace=False).tolist()
        chosen.append(row if rng.random() > 0.1 else None)
    return chosen


def cells(rows: list[list[str] | None], separator: str) -> list[str | None]:
    return [None if row is None else separator.join(row) for row in rows]


def one_hot(rows: list[list[str] | None], classes: list[str]) -> np.ndarray:
    """What scikit-learn makes of lists; nothing where there is none."""
    binarizer = MultiLabelBinarizer(classes=classes)
    known = [[word for word in row or [] if word in classes] for row in rows]
    return np.asarray(binarizer.fit_transform(known))


def fitted(column: Any, is_training: Any = None, **asked: Any) -> Encoding:
    fit = EncodingFit(pa.field("x", column.type), asked)
    fit.update(column, is_training)
    return fit.finish()


@pytest.mark.parametrize("separator", ["|", "::", ", "])
def test_text_is_what_pandas_makes_dummies_of(separator: str) -> None:
    text = cells(sets(300, 0), separator)
    text[:3] = [f"  Drama {separator}Action ", f"{separator}Drama{separator}{separator}Drama", ""]
    expected = pd.Series(text).str.get_dummies(separator.strip())
    expected = expected.T.groupby(expected.columns.str.strip()).max().T
    expected = expected[[word for word in expected.columns if word]]
    plain = pa.array(text)
    for column in (
        plain,
        plain.dictionary_encode(),
        pa.chunked_array([plain[:7], plain[7:7], plain[7:]]),
    ):
        encoding = fitted(column, separator=separator)
        counts = EncodedCounts()
        found = encoding.encode(column, counts=counts)
        assert encoding.values == tuple(expected.columns)
        assert encoding.names[0] == f"x has {expected.columns[0]}"
        assert np.array_equal(found[:, :-1], expected)
        assert np.array_equal(found[:, -1], pd.Series(text).isna())
        assert (counts.unknown, counts.missing) == (0, pd.Series(text).isna().sum())
        assert Encoding.of_json(json.loads(json.dumps(encoding.as_json()))) == encoding


@pytest.mark.parametrize("limit", [2, 32])
@pytest.mark.parametrize("kind", ["text", "integers"])
def test_lists_are_what_scikit_learn_makes_of_them(kind: str, limit: int) -> None:
    rows = sets(400, 1)
    is_training = np.arange(400) < 4
    column = pa.array(rows, pa.list_(pa.string()))
    values: Any = sorted({word for row in rows[:4] for word in row or []})
    assert 2 < len(values) < len(GENRES)
    all_known = [[word in values for word in row or []] for row in rows]
    if kind == "integers":
        number = {word: 2**63 + 10 * i for i, word in enumerate(GENRES)}
        lists = [None if row is None else [number[word] for word in row] for row in rows]
        column = pa.array(lists, pa.large_list(pa.uint64()))
    chunked = pa.chunked_array([column[:150], column[150:]])
    encoding = fitted(chunked, is_training, encoding="multi-hot", one_hot_limit=limit)
    counts = EncodedCounts()
    found = encoding.encode(chunked, counts=counts)
    expected = one_hot(rows, values)
    if limit == 2:
        assert encoding.kind == "embedding-bag"
        assert (encoding.width, encoding.num_embeddings) == (0, len(values) + 1)
        assert found.shape[1] == encoding.longest(chunked) == 3
        for numbers, ones in zip(found, expected, strict=True):
            assert numbers[numbers > 0].tolist() == (np.flatnonzero(ones) + 1).tolist()
            assert not numbers[np.count_nonzero(numbers) :].any()
    else:
        assert np.array_equal(found[:, :-1], expected)
    assert counts.unknown == sum(not is_known for row in all_known for is_known in row)
    assert counts.missing == sum(row is None for row in rows)
    assert len(counts.examples) <= 3


def test_a_word_is_one_of_the_row_and_a_missing_one_is_told() -> None:
    column = pa.array([["b", "a", "b"], ["a", None], [], None])
    found = fitted(column).encode(column)
    assert found.tolist() == [[1, 1, 0], [1, 0, 1], [0, 0, 0], [0, 0, 1]]
    bag = fitted(column, encoding="embedding-bag").encode(column)
    assert bag.tolist() == [[1, 2, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]]
    fixed = pa.array([["b", "a"], None, ["a", "c"]], pa.list_(pa.string(), 2))
    assert fitted(fixed).encode(fixed).tolist() == [[1, 1, 0, 0], [0, 0, 0, 1], [1, 0, 1, 0]]


@pytest.mark.parametrize(
    ("column", "asked", "message"),
    [
        (["a|b"], {"encoding": "multi-hot"}, r"multi-hot of column 'x' needs the text between w"),
        ([1], {"separator": "|"}, r"column 'x' must be text to be cut at '|' .got int64.; leave"),
        ([["a"]], {"separator": "|"}, r"must be text to be cut at '|' .got list"),
        (["a"], {"separator": ""}, "separator of column 'x' must be the text between the words"),
        (["a"], {"separator": 3}, "separator of column 'x' must be the text .*got 3"),
        (["a"], {"encoding": "category", "separator": "|"}, "can be encoded as multi-hot, embed"),
        ([[0.5]], {"encoding": "multi-hot"}, "can be encoded as vector .got 'multi-hot'"),
        (
            [[f"w{i}"] for i in range(40)],
            {},
            "values that rows share .got 40 .* in 40 words, .*-bag",
        ),
    ],
)
def test_what_is_no_words(column: Any, asked: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fitted(pa.array(column), **asked)


def test_labels_and_features_are_cut_alike() -> None:
    text = pa.array([*cells(sets(200, 2), "|"), " Drama | Action", "", "||", None])
    fit = LabelFit(pa.field("x", text.type), separator="|")
    fit.update(text)
    labels = fit.finish()
    ones = fitted(text, separator="|").encode(text)[:, :-1]
    made = labels.encode(text)
    is_missing = text.is_null().to_numpy(zero_copy_only=False)
    assert np.array_equal(made[~is_missing], ones[~is_missing])
    assert (made[is_missing] == -1).all()
    again = Labels.of_json(json.loads(json.dumps(labels.as_json())))
    assert again == labels
    assert again.decode(made)[-4:].to_pylist() == [["Action", "Drama"], [], [], None]
    assert str(labels.decode(made).type.value_type) == "string"


def test_a_separator_is_evident_where_few_words_make_many_cells() -> None:
    many = cells(sets(300, 3), "|")
    separator, why = evident_separator(pa.chunked_array([many[:100], many[100:]]), "x") or ("", "")
    different = {cell for cell in many if cell is not None}
    assert separator == "|"
    assert why == f"{len(different)} different cells are made of 6 words between '|'"
    rng = np.random.default_rng(0)
    towns = [f"town {i}, {rng.choice(['DE', 'FR'])}" for i in range(300)]
    names = [f"{rng.choice(GENRES)} {i}, {rng.choice(GENRES)}" for i in range(300)]
    for others in (towns, names, ["a", "b"] * 50, ["a|b", "a", "b"], [None] * 4, ["", ""]):
        assert evident_separator(pa.chunked_array([pa.array(others, pa.string())]), "x") is None
    assert evident_separator(pa.chunked_array([[1, 2]]), "x") is None


@pytest.mark.parametrize("write", [str, json.dumps])
def test_lists_in_cells_of_csv_are_read_as_python_and_json_write_them(
    write: Any, tmp_path: Path
) -> None:
    rows = sets(60, 4, ["Children's", "a, b", "[c]", "d"])
    numbers = [None if row is None else [1000 + ord(word[-1]) for word in row] for row in rows]
    table = pd.DataFrame({"id": range(60), "words": rows, "numbers": numbers})
    for name in ("words", "numbers"):
        table[name] = [None if row is None else write(row) for row in table[name]]
    table.to_csv(tmp_path / "n.csv", index=False)
    edges = EdgeTable(files=pa.table({"s": [0, 1], "t": [1, 2]}), source="s", target="t")
    ways = {"words": "by type", "numbers": "multi-hot"}
    node = NodeTable(files=str(tmp_path / "n.csv"), id="id", features=ways)
    read = read_tables(Tables(nodes={"user": node}, edges={("user", "e", "user"): edges}))
    values = sorted({word for row in rows for word in row or []})
    expected = one_hot(rows, values), pd.Series(rows).isna().to_numpy()[:, None]
    texts = [None if row is None else list(map(str, row)) for row in numbers]  # of four digits
    ones = one_hot(texts, sorted({word for row in texts for word in row or []}))
    feat = read.graph.ndata["feat"].numpy()
    assert np.array_equal(feat, np.hstack([*expected, ones, expected[1]]))
    types = [feature.type for feature in read.report.nodes["user"].features]
    assert types == ["list<item: string>", "list<item: int64>"]


# -- tables ------------------------------------------------------------------------------------


def written(folder: Path, seed: int, count: int = 120) -> Path:
    """Movies with genres and many tags, and who rated them with which moods, as files."""
    rng = np.random.default_rng(seed)
    tags = [f"tag {i}" for i in range(60)]
    movies = pd.DataFrame(
        {
            "movieId": np.arange(count) * 3,
            "genres": cells(sets(count, seed), "|"),
            "tags": cells(sets(count, seed + 1, tags), ";"),
            "year": rng.integers(1950, 2000, count),
        }
    )
    folder.mkdir(exist_ok=True)
    movies.to_csv(folder / "movies.csv", index=False)
    moods = cells(sets(400, seed + 2, ["sad", "glad", "mad"]), "/")
    ratings = pd.DataFrame(
        {"userId": rng.integers(0, 30, 400), "movieId": rng.integers(0, count, 400) * 3}
    )
    ratings.assign(moods=moods).to_csv(folder / "ratings.csv", index=False)
    return folder


TOML = """
[nodes.movie]
files = "movies.csv"
id = "movieId"
label = {column = "year", task = "regression"}
split = [0.5, 0.2, 0.3]
[nodes.movie.features]
genres = {separator = "|"}
tags = {encoding = "multi-hot", separator = ";"}
[edges.rated]
files = "ratings.csv"
source = "userId"
source_type = "user"
target = "movieId"
target_type = "movie"
[edges.rated.features]
moods = {encoding = "multi-hot", separator = "/"}
"""


def test_tables_keep_words_and_encode_others_alike(tmp_path: Path) -> None:
    first, other = written(tmp_path / "a", 5), written(tmp_path / "b", 50)
    for folder in (first, other):
        (folder / "g.toml").write_text(TOML)
    tables = Tables.from_toml(first / "g.toml")
    path = partition_tables(tables, 2, tmp_path / "p", part_method="random")
    streamed = partition_tables(
        tables, 2, tmp_path / "s", part_method="random", memory=1 << 24, name="rated"
    )
    for part in range(2):
        for one, two in zip(
            load_partition_feats(path, part), load_partition_feats(streamed, part), strict=True
        ):
            assert one.keys() == two.keys()
            assert all((one[key] == two[key]).all() or one[key].isnan().any() for key in one)
    task = read_task(path)
    for folder, given in ((first, None), (other, task)):
        read = read_tables(Tables.from_toml(folder / "g.toml"), encodings_from=given)
        check_words(read, folder, task.schema or {})


def check_words(read: TablesGraph, folder: Path, schema: Any) -> None:
    """Features are what pandas makes, with the words of the training rows of a schema."""
    fields, movies = read.graph.nodes["movie"].data, pd.read_csv(folder / "movies.csv")
    genres, tags = (Encoding.of_json(e) for e in schema["nodes"]["movie"]["features"])
    dummies = movies["genres"].str.get_dummies("|")
    expected = dummies.reindex(columns=list(genres.values), fill_value=0)
    assert np.array_equal(fields["feat"][:, : len(genres.values)], expected)
    assert fields["feat"].shape[1] == genres.width
    assert tags.kind == "embedding-bag"
    assert schema["nodes"]["movie"]["features"][1]["separator"] == ";"
    dense = np.zeros((len(movies), tags.num_embeddings))
    np.add.at(
        dense,
        (np.arange(len(movies))[:, None], fields["feat_columns"].numpy()),
        fields["feat_values"].numpy(),
    )
    dummies = movies["tags"].str.get_dummies(";")
    assert np.array_equal(dense[:, 1:], dummies.reindex(columns=list(tags.values), fill_value=0))
    assert not dense[:, 0].any()
    moods = pd.read_csv(folder / "ratings.csv")["moods"]
    assert np.array_equal(
        read.graph.edges["rated"].data["feat"][:, :-1], moods.str.get_dummies("/")
    )
    of_tags = read.report.nodes["movie"].features[1]
    known = movies["tags"].dropna().str.split(";").explode()
    unknown = (~known[known != ""].isin(tags.values)).sum()
    assert (of_tags.num_unknown, of_tags.num_missing) == (unknown, movies["tags"].isna().sum())
    assert of_tags.type == "string, cut at ;"


def test_two_columns_of_many_words_share_a_matrix() -> None:
    rows = sets(50, 7, [f"a{i}" for i in range(9)]), sets(50, 8, [f"b{i}" for i in range(8)])
    nodes = pa.table({"id": list(range(50)), "a": rows[0], "b": rows[1]})
    bag = {"encoding": "embedding-bag"}
    edges = EdgeTable(files=pa.table({"s": [0, 1], "t": [1, 2]}), source="s", target="t")
    table = NodeTable(files=nodes, id="id", features={"a": bag, "b": bag})
    read = read_tables(Tables(nodes={"user": table}, edges={("user", "e", "user"): edges}))
    columns = read.graph.ndata["feat_columns"].numpy()
    assert "feat" not in read.graph.ndata
    words = [[f"a{i}" for i in range(9)], [f"b{i}" for i in range(8)]]
    expected = np.hstack([one_hot(of, names) for of, names in zip(rows, words, strict=True)])
    found = np.zeros((50, 18))
    np.add.at(found, (np.arange(50)[:, None], columns), columns > 0)
    assert np.array_equal(found[:, 1:], expected)


def test_many_words_of_edges_are_refused_where_they_are_asked_for() -> None:
    words = pa.table({"s": [0] * 80, "t": [1] * 80, "w": [[f"w{i % 40}"] for i in range(80)]})
    for features in (None, {"w": "multi-hot"}, {"w": {"one_hot_limit": 40}}):
        edge = EdgeTable(files=words, source="s", target="t", features=features)
        tables = Tables(edges={("n", "e", "n"): edge})
        if features == {"w": "multi-hot"}:
            with pytest.raises(ValueError, match="must have at most 32 different words .got 40"):
                read_tables(tables)
            continue
        read = read_tables(tables)
        if features is None:
            assert "raise one_hot_limit" in read.report.edges["n", "e", "n"].unused["w"]
        else:
            assert read.graph.edata["feat"].sum(1).tolist() == [1] * 80


def test_the_first_description_cuts_what_is_evident(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(written(tmp_path, 9))
    words = ["--nodes", "movie=movies.csv", "--edges", "user:rated:movie=ratings.csv"]
    assert run(["tables", *words, "--label", "genres"]) == 0
    said = capsys.readouterr().out
    assert "# genres of movie is cut: " in said
    assert 'label = {column = "genres", separator = "|"}' in said
    (tmp_path / "g.toml").write_text(said)
    read = read_tables(Tables.from_toml("g.toml"))
    assert read.task.class_names == tuple(sorted(GENRES))
    schema = read.task.schema or {}
    kinds = {e["column"]: e["encoding"] for e in schema["nodes"]["movie"]["features"]}
    assert kinds == {"year": "standardized"}  # tags are too many for so few rows
    assert run(["partition", *words, "--parts", "1", "--out", "p", "--name", "g"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "column 'moods' of user:rated:movie became one category for each cell, though" in shown
    assert "made of 6 words between '|': --separator 'genres=|' takes each word for" in shown
    assert run(["partition", *words, "--parts", "1", "--out", "q", "--label", "genres"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "each cell of 'genres' became a class, though 51 different cells are made of" in shown


def test_separators_by_command_are_those_of_a_description(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(written(tmp_path, 5))
    (tmp_path / "g.toml").write_text(
        TOML.replace('tags = {encoding = "multi-hot", ', "tags = {")
        .replace('moods = {encoding = "multi-hot", ', "moods = {")
        .replace('label = {column = "year", task = "regression"}', 'label = "year"')
    )
    words = ["--nodes", "movie=movies.csv", "--edges", "user:rated:movie=ratings.csv"]
    words += ["--label", "year", "--split", "0.5,0.2,0.3"]
    for separator in ("movie=genres=|", "tags=;", "rated=moods=/"):
        words += ["--separator", separator]
    common = ["--parts", "1", "--name", "g", "--method", "random", "--quiet"]
    assert run(["partition", *words, "--out", "flags", *common]) == 0
    assert run(["partition", "--tables", "g.toml", "--out", "said", *common]) == 0
    for one, two in zip(
        load_partition_feats("flags/g.json", 0), load_partition_feats("said/g.json", 0), strict=True
    ):
        assert one.keys() == two.keys()
        for key, rows in one.items():
            np.testing.assert_array_equal(rows, two[key], err_msg=key)
    # The label may be of several words; what is not said is still looked for.
    assert run(["tables", *words[:4], "--separator", "genres=|", "--label", "genres"]) == 0
    assert 'label = {column = "genres", separator = "|"}' in capsys.readouterr().out
    assert run(["tables", *words[:4], "--separator", "tags=;"]) == 0
    said = capsys.readouterr().out
    assert "# genres of movie is cut: " in said
    assert 'tags = {separator = ";"}' in said
    assert said.index("tags = {") < said.index('"*" = "by type"')
    for separators, message in (
        (["genres"], "separator must be COLUMN=TEXT"),
        (["tags=;", "tags=|"], "once for each column (got 'tags=|')"),
        (["moodz=/"], "separators must name columns of the tables (got 'moodz')"),
        (["movieId=|"], "(got 'movieId', which has another role); leave it out"),
        (["genres="], "must be the text between the words of a cell (got '')"),
    ):
        flags = [word for separator in separators for word in ("--separator", separator)]
        assert run(["partition", *words[:4], *flags, "--out", "wrong", "--parts", "1"]) == 2
        assert message in capsys.readouterr().err
