# SPDX-License-Identifier: Apache-2.0
"""Sets of tables that are made by a seed, and the partition that pandas and scikit-learn expect.

A set is columns of plain Python values (`Column`), so that one set can be written in any format and
cut in any way. `expected` makes of them what a partition must hold; of graphshard it uses nothing.
Fractions are drawn at random, so only their counts are expected, and which rows were drawn is taken
from the partition (`masks`).
"""

from __future__ import annotations

import csv
import datetime
import gzip
import io
import json
import random
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import feather, parquet
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import LabelEncoder, MultiLabelBinarizer, OneHotEncoder, StandardScaler

SPLITS = ("train", "val", "test")
IDS = (
    *("integers", "sparse", "uint64", "negative", "names", "padded", "mixed", "uuids", "digits"),
    "bytes",
)
_ODD = ("ü", "a b", "x,y", 'say "hi"', "tab;semi", " lead", "1.5", "0x10", "line\nbreak", "🙂|::")
_NULLS = ("", "NA", "NULL", "\\N", "null", "nan")
_PERIODS = {"weekday": 7, "month": 12, "day_of_year": 366, "hour": 24}


@dataclass
class Column:
    """Values of a column, None where missing, and what is asked of it."""

    kind: str
    values: list[Any]
    asked: Any = None

    @property
    def is_list(self) -> bool:
        return self.kind in ("vector", "sets")

    def of(self, chosen: np.ndarray) -> list[Any]:
        """The values of some rows."""
        return [value for value, is_in in zip(self.values, chosen, strict=True) if is_in]

    def rows(self, places: Sequence[int | None]) -> Column:
        """The values at some places, None where there is no place."""
        return Column(
            self.kind, [None if p is None else self.values[p] for p in places], self.asked
        )


@dataclass
class TableOf:
    """A table: of nodes with an id, of edges with two ends."""

    columns: dict[str, Column]
    ends: tuple[str, ...]
    features: str = "all"  # "all", "list" or "mapping"
    label: Any = None
    split: Any = None
    weight: str | None = None
    time: str | None = None
    ignore: list[str] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return len(self.columns[self.ends[0]].values)

    def first_rows(self) -> list[int]:
        """Rows that can be read: of nodes the first with each id, of edges those with two ends."""
        ends = [self.columns[end].values for end in self.ends]
        keys = list(zip(*ends, strict=True))
        whole = [row for row, key in enumerate(keys) if None not in key]
        if len(ends) == 1:
            whole = list({keys[row]: row for row in reversed(whole)}.values())
        return whole

    def label_columns(self) -> list[str]:
        if self.label is None:
            return []
        if isinstance(self.label, str):
            return [self.label]
        return list(self.label.get("columns", [self.label.get("column")]))

    def split_columns(self) -> list[str]:
        if isinstance(self.split, str):
            return [self.split]
        if not isinstance(self.split, Mapping):
            return []
        named = [self.split[key] for key in ("column", "time") if key in self.split]
        return [*named, *self.split.get("masks", {}).values()]

    def feature_names(self) -> list[str]:
        roles = {*self.ends, *self.label_columns(), *self.split_columns(), *self.ignore}
        roles |= {self.weight, self.time}
        names = [name for name in self.columns if name not in roles]
        return names[::-1] if self.features != "all" else names


# ---------------------------------------------------------------------- what is drawn


def ids_of(kind: str, count: int, draw: random.Random) -> list[Any]:
    """Distinct ids of a kind, in no order."""
    if kind == "integers":
        made: list[Any] = list(range(5, 5 + count))
    elif kind == "sparse":
        made = draw.sample(range(10**12), count)
    elif kind == "uint64":
        made = [2**63 + i * 10**15 + draw.randrange(10**15) for i in range(count - 1)] + [7]
    elif kind == "negative":
        made = [-(2**63), *draw.sample(range(-(2**40), 2**40), count - 1)]
    elif kind == "names":
        made = [f"{draw.choice(_ODD)}-{i}" for i in range(count)]
    elif kind == "padded":
        made = [f"{i:05d}" for i in range(count)]
    elif kind == "mixed":
        made = [str(i) if i % 2 else f"n{i}" for i in range(count)]
    elif kind == "uuids":
        made = [str(uuid.UUID(int=draw.getrandbits(128))) for _ in range(count)]
    elif kind == "digits":
        made = [str(i * 37) for i in range(count)]
    else:
        made = [uuid.UUID(int=draw.getrandbits(128)).bytes for _ in range(count)]
    draw.shuffle(made)
    return made


def _with_gaps(values: list[Any], draw: random.Random, share: float | None = None) -> list[Any]:
    share = draw.choice([0, 0, 0.1, 0.5]) if share is None else share
    return [None if draw.random() < share else value for value in values]


def feature_of(count: int, draw: random.Random, has_lists: bool) -> Column:
    """A column for features, with an encoding to ask for or none."""
    kinds = ["real", "real", "integer", "category", "boolean", "date", "timestamp", "text"]
    kinds += ["words", *(["vector", "vector", "sets"] if has_lists else [])]
    kind = draw.choice([*kinds, "empty"])
    asked: Any = None
    if kind == "real":
        scale = draw.choice([1.0, 1e-3, 1e6])
        values: list[Any] = [draw.gauss(0.5, 1) * scale for _ in range(count)]
        if draw.random() < 0.1:
            values = [2.5] * count
        choices: list[Any] = [None, "standardized", "number", "logarithm", {"encoding": "bucketed"}]
        choices += [{"encoding": "bucketed", "buckets": 3}]
        choices += [{"encoding": "bucketed", "edges": [-1.0, 0.0, 0.75]}]
        asked = draw.choice([*choices, {"encoding": "standardized", "statistics": "all"}])
    elif kind == "integer":
        values = [draw.randrange(-5, 40) for _ in range(count)]
        asked = draw.choice([None, "number", "category", {"encoding": "category"}])
    elif kind == "category":
        few = ["a", "b c", "D,e", "ü", " lead", "7up"][: draw.randint(1, 6)]
        many = [f"city {i:02d}" for i in range(40)]
        values = [draw.choice(few if draw.random() < 0.7 else many) for _ in range(count)]
        choices = [None, "embedding", {"encoding": "category", "one_hot_limit": 2}]
        asked = draw.choice([*choices, {"encoding": "category", "statistics": "all"}])
    elif kind == "boolean":
        values = [draw.random() < 0.3 for _ in range(count)]
        asked = draw.choice([None, None, "category"])
    elif kind == "date":
        first = datetime.date(2023, 1, 1)
        values = [first + datetime.timedelta(draw.randrange(900)) for _ in range(count)]
        asked = draw.choice([None, {"encoding": "time", "parts": ["weekday", "seconds"]}])
    elif kind == "timestamp":
        start = datetime.datetime(2023, 1, 1)
        values = [start + datetime.timedelta(0, draw.randrange(80_000_000)) for _ in range(count)]
        parts = draw.sample(["seconds", *_PERIODS], draw.randint(1, 5))
        asked = draw.choice([None, {"encoding": "time", "parts": parts}])
    elif kind in ("words", "sets"):
        words = ["Action", "Children's", "Sci-Fi", "e, f", "ü", "x y"][: draw.randint(1, 6)]
        least, limit = int(kind == "words"), min(3, len(words))
        values = [draw.sample(words, draw.randint(least, limit)) for _ in range(count)]
        values[0] = words[:1]
        if kind == "words":
            separator = draw.choice(["|", ";", "::"])
            values = [separator.join(of_row) for of_row in values]
            few = [None] * (len(set(values)) <= 32)  # others are texts where nothing is asked
            cut = {"separator": separator}
            asked = draw.choice([cut, {"encoding": "multi-hot", **cut}, *few])
        else:
            asked = draw.choice([None, "multi-hot", {"statistics": "all"}])
        return Column(kind, values[:1] + _with_gaps(values[1:], draw), asked)
    elif kind == "text":
        values = [f"text {i} {draw.random()}" for i in range(count)]
    elif kind == "vector":
        width = draw.randint(1, 4)
        values = [[draw.gauss(0, 3) for _ in range(width)] for _ in range(count)]
        if draw.random() < 0.3:
            values = [[None if draw.random() < 0.2 else x for x in value] for value in values]
        asked = draw.choice([None, {"encoding": "vector", "standardize": True}])
    else:
        values = [None] * count
    return Column(kind, _with_gaps(values, draw), asked)


def label_of(count: int, draw: random.Random, has_lists: bool) -> tuple[dict[str, Column], Any]:
    """Columns of labels, and how a table names them."""
    kinds = [
        "text",
        "integers",
        "booleans",
        "reals",
        "whole reals",
        "columns",
        "stars",
        "one class",
    ]
    kind = draw.choice([*kinds, *(["sets", "sets of integers", "one-hot"] if has_lists else [])])
    share = draw.choice([0, 0.2, 0.6])
    column: Column
    said: Any = "y"
    if kind in ("text", "one class"):
        names = ["gold", "basic", "Zed", "ünder", "7"] if kind == "text" else ["only"]
        column = Column("category", [draw.choice(names) for _ in range(count)])
    elif kind == "integers":
        column = Column("integer", [draw.choice([-3, 1, 10, 2, 2**40]) for _ in range(count)])
    elif kind == "booleans":
        column = Column("boolean", [draw.random() < 0.5 for _ in range(count)])
    elif kind == "reals":
        column = Column("real", [draw.gauss(10, 3) for _ in range(count)])
    elif kind == "whole reals":
        column = Column("real", [float(draw.randrange(1, 4)) for _ in range(count)])
    elif kind == "stars":
        column = Column("integer", [draw.randrange(1, 6) for _ in range(count)])
        said = {"column": "y", "task": "regression"}
    elif kind == "columns":
        several: list[list[Any]] = [
            [int(draw.random() < 0.5) for _ in range(3)] for _ in range(count)
        ]
        several[0] = [1, 1, 0]  # so that it cannot be one-hot
        several = [[None] * 3 if i and draw.random() < share else r for i, r in enumerate(several)]
        names = ["cat", "dog", "eel"]
        made = {n: Column("integer", [r[i] for r in several]) for i, n in enumerate(names)}
        return made, {"columns": names}
    elif kind == "one-hot":
        places = [draw.randrange(3) for _ in range(count)]
        column = Column("vector", [[float(i == p) for i in range(3)] for p in places])
    else:
        values: list[Any] = ["red", "blue", "green"] if kind == "sets" else [4, 17, 9]
        sets = [sorted(draw.sample(values, draw.randint(0, 3))) for _ in range(count)]
        sets[0], sets[1] = values[:1], values[:2]  # lists of several lengths
        column = Column("sets", sets)
    values = _with_gaps(column.values, draw, share)
    values[:2] = column.values[:2]
    return {"y": Column(column.kind, values)}, said


def split_of(
    count: int, draw: random.Random, is_edges: bool, has_label: bool
) -> tuple[dict[str, Column], Any]:
    """Columns of a split, and how a table names it."""
    kinds = ["fractions", "fractions", "names", "masks", "time"]
    kinds += ["default"] if has_label else []
    kinds += ["files"] if not is_edges else []
    kind = draw.choice(kinds)
    fractions = draw.choice(
        [[0.6, 0.2, 0.2], [0.5, 0.5], [0.7, 0.1, 0.1], [1.0], [0.34, 0.33, 0.33]]
    )
    if kind == "names":
        words = ["train", "Training", "val", "valid", " test", None]
        values = ["train", *(draw.choice(words) for _ in range(count - 1))]
        return {"fold": Column("category", values)}, draw.choice(["fold", {"column": "fold"}])
    if kind == "masks":
        marks = [0, *(draw.choice([0, 0, 1, 2, 3]) for _ in range(count - 1))]
        made = {}
        for place, name in enumerate(("tr", "va", "te")):
            is_in = [mark == place for mark in marks]
            as_bool = draw.random() < 0.5
            made[name] = Column(
                "boolean" if as_bool else "integer", is_in if as_bool else list(map(int, is_in))
            )
        return made, {"masks": {"train": "tr", "val": "va", "test": "te"}}
    if kind == "time":
        start = datetime.datetime(2020, 1, 1)
        seconds = [draw.randrange(draw.choice([20, 10**7])) for _ in range(count)]
        values = _with_gaps([start + datetime.timedelta(0, s) for s in seconds], draw, 0.05)
        return {"day": Column("timestamp", values)}, {"fractions": fractions, "time": "day"}
    if kind == "files":
        return {}, {"files": dict.fromkeys(draw.choice([SPLITS, ("train", "test")]))}
    if kind == "fractions":
        return {}, draw.choice([fractions, {"fractions": fractions, "stratify": False}])
    return {}, None


class TableSet:
    """Tables of a seed."""

    def __init__(self, seed: int) -> None:
        draw = self.draw = random.Random(seed)
        self.is_typed = draw.random() < 0.5
        self.dangling = draw.choice(["drop", "drop", "add"])
        self.parallel = draw.choice(["keep", "keep", "drop"])
        self.split_seed = draw.choice([0, 0, 7])
        # CSV has no lists and no bytes; JSON no integers of 64 bits without a sign.
        has_lists = draw.random() < 0.5
        typed = ["parquet", "feather", "memory", "jsonl"] if has_lists else ["csv", "csv.gz", "tsv"]
        self.formats = typed if has_lists or draw.random() < 0.6 else ["csv", "parquet", "jsonl"]
        types = ["user", "item", "tag"][: draw.randint(2, 3)] if self.is_typed else ["user"]
        kinds = {ntype: draw.choice(IDS) for ntype in types}
        if "bytes" in kinds.values():
            self.formats = ["parquet", "feather", "memory"]
        if "uint64" in kinds.values() and "jsonl" in self.formats:
            self.formats = [f for f in self.formats if f != "jsonl"]
        self.kinds = kinds
        self.nodes: dict[str, TableOf] = {}
        self.edges: dict[tuple[str, str, str], TableOf] = {}
        known: dict[str, list[Any]] = {}
        every: dict[str, list[Any]] = {}
        for ntype in types:
            ids = ids_of(kinds[ntype], draw.randint(9, 60), draw)
            every[ntype], known[ntype] = ids, ids[:-4]
            if ntype == "user" or draw.random() < 0.6:
                self.nodes[ntype] = self._node_table(known[ntype], kinds[ntype], has_lists)
        relations = [("user", "follows", "user")]
        if self.is_typed:
            relations = [("user", "buys", "item"), ("user", "knows", "user")]
            relations += [("item", "has", "tag")] if "tag" in types else []
        for etype in relations:
            ends = [self._ends(known[t], every[t]) for t in (etype[0], etype[2])]
            count = min(map(len, ends))
            pair = [
                Column(f"id {kinds[t]}", e[:count]) for t, e in zip(etype[::2], ends, strict=True)
            ]
            pair[0].values[0], pair[1].values[0] = known[etype[0]][0], known[etype[2]][1]
            table = TableOf({"from": pair[0], "to": pair[1]}, ("from", "to"))
            for number in range(draw.randint(0, 2)):
                table.columns[f"e{number}"] = feature_of(count, draw, has_lists)
            if draw.random() < 0.4:
                values = [draw.choice([1.5, 2.0, 0.25]) for _ in range(count)]
                table.columns["w"] = Column("real", _with_gaps(values, draw))
                table.weight = "w"
            if draw.random() < 0.3:
                kind = draw.choice(["date", "timestamp", "integer"])
                stamps = [1_600_000_000 + draw.randrange(10**8) for _ in range(count)]
                moments = [datetime.datetime(1970, 1, 1) + datetime.timedelta(0, s) for s in stamps]
                values = {"date": [m.date() for m in moments], "timestamp": moments}.get(
                    kind, stamps
                )
                table.columns["t"] = Column(kind, _with_gaps(values, draw, 0.1))
                table.time = "t"
            self.edges[etype] = table
        self._choose_target(has_lists)
        for table in [*self.nodes.values(), *self.edges.values()]:
            if names := table.feature_names():
                table.ignore = draw.choice([[], [], [draw.choice(names)]])
            has_asked = any(table.columns[n].asked is not None for n in table.feature_names())
            table.features = "mapping" if has_asked else draw.choice(["all", "list"])
            if table.features != "all":
                for name in table.feature_names():  # what is asked for must be possible
                    column = table.columns[name]
                    values = [column.values[row] for row in table.first_rows()]
                    if column.kind in ("text", "empty") or not any(v is not None for v in values):
                        table.ignore.append(name)
        self.variants = 0

    def _node_table(self, known: list[Any], kind: str, has_lists: bool) -> TableOf:
        draw = self.draw
        rows: list[Any] = known + draw.choices(known, k=draw.randint(0, 5))
        rows += [None] * draw.choice([0, 0, 2])
        draw.shuffle(rows)
        first = next(i for i, row in enumerate(rows) if row is not None)
        rows[0], rows[first] = rows[first], rows[0]
        table = TableOf({"key": Column(f"id {kind}", rows)}, ("key",))
        for number in range(draw.randint(1, 4)):
            table.columns[f"x{number}"] = feature_of(len(rows), draw, has_lists)
        return table

    def _ends(self, known: list[Any], every: list[Any]) -> list[Any]:
        draw = self.draw
        made = [
            draw.choice(known if draw.random() < 0.9 else every)
            for _ in range(draw.randint(20, 150))
        ]
        for _ in range(draw.choice([0, 0, 3])):
            made[draw.randrange(1, len(made))] = None
        return made

    def _choose_target(self, has_lists: bool) -> None:
        draw = self.draw
        way = draw.choice(["nodes", "nodes", "nodes", "edges", "links", "nothing"])
        self.target: Any = None
        if way == "nothing":
            return
        self.target = draw.choice(list(self.nodes if way == "nodes" else self.edges))
        table = self.nodes[self.target] if way == "nodes" else self.edges[self.target]
        if way != "links":
            columns, table.label = label_of(table.num_rows, draw, has_lists)
            table.columns |= columns
        columns, table.split = split_of(table.num_rows, draw, way != "nodes", way != "links")
        table.columns |= columns
        if isinstance(table.split, dict) and "files" in table.split:
            ids = list(dict.fromkeys(i for i in table.columns["key"].values if i is not None))
            draw.shuffle(ids)
            names = list(table.split["files"])
            table.split["files"] = {
                name: ids[place * 2 : place * 2 + 2] for place, name in enumerate(names)
            }


# ---------------------------------------------------------------------- what is expected


def expected(made: TableSet, masks: Mapping[str, np.ndarray] | None) -> dict[str, Any]:
    """Nodes by type and edges by relation, in order, with ids and fields; what the report counts.

    Args:
        masks: Of the target, where fractions are drawn at random.
    """
    ids: dict[str, list[Any]] = {}
    places: dict[Any, list[int | None]] = {}
    types = [t for etype in made.edges for t in (etype[0], etype[2])]
    for ntype in dict.fromkeys([*made.nodes, *types]):
        ids[ntype], places[ntype] = [], []
        if ntype in made.nodes:
            keys = pd.Series(made.nodes[ntype].columns["key"].values, dtype=object).dropna()
            keys = keys.drop_duplicates()
            ids[ntype], places[ntype] = keys.tolist(), keys.index.tolist()
    num_of_tables = {ntype: len(of_type) for ntype, of_type in ids.items()}
    pairs: dict[Any, pd.DataFrame] = {}
    counts: dict[str, Any] = {"nodes": {}, "edges": {}}
    for etype, table in made.edges.items():
        frame = pd.DataFrame(
            {end: pd.Series(table.columns[end].values, dtype=object) for end in table.ends}
        )
        refused = {f"empty {end}": int(frame[end].isna().sum()) for end in table.ends}
        frame = frame.dropna()
        grows = [t not in made.nodes or made.dangling == "add" for t in (etype[0], etype[2])]
        for row in frame.itertuples(index=False):
            for is_growing, ntype, key in zip(grows, (etype[0], etype[2]), row, strict=True):
                if is_growing and key not in ids[ntype]:
                    ids[ntype].append(key)
        known = [set(ids[etype[0]]), set(ids[etype[2]])]  # isin takes off zeros that end bytes
        is_known = [
            frame[end].map(ids_of_end.__contains__).astype(bool)
            for end, ids_of_end in zip(table.ends, known, strict=True)
        ]
        frame = frame[is_known[0] & is_known[1]]
        of_edges = {
            "num_rows": table.num_rows,
            "refused": {reason: number for reason, number in refused.items() if number},
            "dangling": {e: n for e, k in zip(table.ends, is_known, strict=True) if (n := sum(~k))},
            "num_parallel": int(frame.duplicated().sum()),
        }
        if made.parallel == "drop":
            frame = frame.drop_duplicates()
        of_edges["num_edges"] = len(frame)
        is_loop = (frame["from"] == frame["to"]) & (etype[0] == etype[2])
        of_edges["num_self_loops"] = int(is_loop.sum())
        counts["edges"][":".join(etype)] = of_edges
        pairs[etype], places[etype] = frame, frame.index.tolist()
    result: dict[str, Any] = {"nodes": {}, "edges": {}, "counts": counts}
    for ntype, of_type in ids.items():
        count = len(of_type)
        rows_of_type = made.nodes[ntype].columns["key"].values if ntype in made.nodes else []
        num_empty = rows_of_type.count(None)
        counts["nodes"][ntype] = {
            "num_nodes": count,
            "num_rows": len(rows_of_type),
            "refused": {"empty key": num_empty} if num_empty else {},
            "num_duplicates": len(rows_of_type) - num_empty - num_of_tables[ntype],
            "num_from_edges": count - num_of_tables[ntype],
        }
        rows = [*places[ntype], *[None] * (count - len(places[ntype]))]
        fields = _fields(made, ntype, made.nodes.get(ntype), rows, masks, of_type, None)
        result["nodes"][ntype] = {"ids": of_type, **fields}
    for etype, table in made.edges.items():
        frame = pairs[etype]
        fields = _fields(made, etype, table, places[etype], masks, None, frame)
        if table.weight:
            weights = table.columns[table.weight].rows(places[etype]).values
            fields["weight"] = pd.Series(weights, dtype=float).fillna(1.0).to_numpy()
        if table.time:
            fields["time"] = _times(table.columns[table.time].rows(places[etype]))
        both = list(frame.itertuples(index=False, name=None))
        result["edges"][etype] = {"pairs": both, **fields}
    return result


def _times(column: Column) -> np.ndarray:
    """Nanoseconds, or the numbers there are; the earliest where missing."""
    numbers = pd.Series(column.values, dtype=object)
    if column.kind != "integer":
        stamps = pd.to_datetime(numbers)
        numbers = pd.Series([None if pd.isna(s) else s.value for s in stamps], dtype=object)
    known = numbers.dropna()
    return numbers.where(numbers.notna(), known.min() if len(known) else 0).to_numpy(np.int64)


def _fields(
    made: TableSet,
    owner: Any,
    table: TableOf | None,
    rows: Sequence[int | None],
    masks: Mapping[str, np.ndarray] | None,
    ids: list[Any] | None,
    frame: pd.DataFrame | None,
) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    is_training = np.ones(len(rows), bool)
    if table is None:
        return fields
    if made.target == owner:
        label = None
        if table.label is not None:
            label, fields["classes"] = _labels(table, rows)
            fields["label"] = label
        found = _masks(made, table, rows, label, masks, ids, frame)
        fields |= {f"{split}_mask": mask for split, mask in found.items()}
        if found["train"].any():
            is_training = found["train"]
    wide, embedded = [], []
    for name in table.feature_names():
        column = table.columns[name].rows(rows)
        if table.features == "all" and all(map(_is_unknown, column.of(is_training))):
            continue
        made_of = encoded(column, is_training)
        if made_of is None:
            continue
        (embedded if made_of.dtype == np.int64 else wide).append(made_of)
    wide = [block for block in wide if block.shape[1]]
    if wide:
        fields["feat"] = np.concatenate(wide, axis=1)
    if embedded:
        fields["categories"] = np.stack(embedded, axis=1)
    return fields


def _is_unknown(value: Any) -> bool:
    return value is None or (isinstance(value, float) and np.isnan(value))


def _labels(table: TableOf, rows: Sequence[int | None]) -> tuple[np.ndarray, list[Any] | None]:
    """Labels, and the classes."""
    names = table.label_columns()
    columns = [table.columns[name].rows(rows) for name in names]
    if len(columns) > 1:
        values = np.array(
            [[np.nan if v is None else v for v in c.values] for c in columns], float
        ).T
        unknown = np.isnan(values).any(axis=1)
        return np.where(unknown[:, None], -1, values).astype(np.int64), names
    (column,) = columns
    known = np.array([not _is_unknown(value) for value in column.values])
    values = [value for value in column.values if not _is_unknown(value)]
    if column.kind == "sets":
        binarizer = MultiLabelBinarizer()
        made = binarizer.fit_transform(values)
        out = np.full((len(rows), made.shape[1]), -1, np.int64)
        out[known] = made
        return out, list(binarizer.classes_)
    if column.kind == "vector":
        out = np.full(len(rows), -1, np.int64)
        out[known] = np.array(values).argmax(axis=1)
        return out, [0, 1, 2]
    task = table.label.get("task") if isinstance(table.label, dict) else None
    is_real = column.kind == "real" and any(value != int(value) for value in values)
    if task == "regression" or is_real:
        reals = np.full(len(rows), np.nan)
        reals[known] = values
        return reals, None
    encoder = LabelEncoder()
    out = np.full(len(rows), -1, np.int64)
    out[known] = encoder.fit_transform(np.array(values, dtype=object))
    return out, list(encoder.classes_)


def shares(count: int, fractions: Sequence[float]) -> list[int]:
    """Largest remainders: how many of ``count`` rows each set gets."""
    parts = [Decimal(str(f)) for f in fractions] + [Decimal(0)] * (3 - len(fractions))
    parts.append(1 - sum(parts))
    exact = [part * count for part in parts]
    counts = [int(number) for number in exact]
    by_rest = sorted(range(4), key=lambda i: (counts[i] - exact[i], i))
    for place in by_rest[: count - sum(counts)]:
        counts[place] += 1
    return counts[:3]


def _is_labelled(label: np.ndarray) -> np.ndarray:
    unknown = np.isnan(label) if label.dtype.kind == "f" else label < 0
    return ~(unknown if label.ndim == 1 else unknown.any(axis=1))


def _masks(
    made: TableSet,
    table: TableOf,
    rows: Sequence[int | None],
    label: np.ndarray | None,
    masks: Mapping[str, np.ndarray] | None,
    ids: list[Any] | None,
    frame: pd.DataFrame | None,
) -> dict[str, np.ndarray]:
    split, count = table.split, len(rows)
    if split is None:
        split = {"fractions": [0.8, 0.1, 0.1]}
    elif isinstance(split, str):
        split = {"column": split}
    elif isinstance(split, list):
        split = {"fractions": split}
    takes_part = np.ones(count, bool) if label is None else _is_labelled(label)
    if "column" in split:
        words = table.columns[split["column"]].rows(rows).values
        spoken = [(word or "").strip().lower()[:3] for word in words]
        return {name: np.array([s == name[:3] for s in spoken], bool) for name in SPLITS}
    if "masks" in split:
        columns = {s: table.columns[c].rows(rows).values for s, c in split["masks"].items()}
        return {s: np.array([bool(v) for v in values], bool) for s, values in columns.items()}
    if "files" in split:
        assert ids is not None
        named = split["files"]
        return {s: np.array([i in named.get(s, []) for i in ids], bool) for s in SPLITS}
    fractions = split["fractions"]
    if "time" in split:
        times = pd.Series(table.columns[split["time"]].rows(rows).values, dtype="datetime64[ns]")
        ordered = times[takes_part].dropna().sort_values(kind="stable")
        counts = shares(len(ordered), fractions)
        number = pd.Series(
            np.repeat(range(4), [*counts, len(ordered) - sum(counts)]), ordered.index
        )
        number = number.groupby(ordered).transform("first")
        out = {}
        for place, name in enumerate(SPLITS):
            out[name] = np.zeros(count, bool)
            out[name][number.index[number == place]] = True
            if counts[place] and not out[name].any():
                raise ValueError("enough different times")
        return out
    assert masks is not None
    numbers = np.stack([masks[name] for name in SPLITS])
    assert (numbers.sum(0) <= takes_part).all()
    if label is None:  # edges between the same two nodes stay together
        assert frame is not None
        ends = (
            frame
            if made.target[0] != made.target[2]
            else frame.apply(lambda row: pd.Series(sorted(row, key=str)), axis=1)
        )
        drawn = pd.Series(numbers.argmax(0) + 4 * (numbers.sum(0) == 0), frame.index)
        groups = drawn.groupby([ends.iloc[:, 0], ends.iloc[:, 1]])
        assert (groups.nunique() == 1).all()
        of_pair = groups.first()
        assert [int((of_pair == p).sum()) for p in range(3)] == shares(len(of_pair), fractions)
        return dict(masks)
    is_stratified = label.ndim == 1 and label.dtype.kind != "f" and split.get("stratify", True)
    strata = label[takes_part] if is_stratified else np.zeros(takes_part.sum(), int)
    left = pd.Series(strata).value_counts().sort_index()
    drawn_rows = numbers[:, takes_part]
    for place, total in enumerate(shares(len(strata), fractions)):
        exact = [Decimal(total) * int(size) / int(left.sum() or 1) for size in left]
        taken = [int(number) for number in exact]
        order = sorted(range(len(taken)), key=lambda i: (taken[i] - exact[i], i))
        for stratum in order[: total - sum(taken)]:
            taken[stratum] += 1
        of_class = pd.Series(strata[drawn_rows[place]]).value_counts()
        assert [int(of_class.get(c, 0)) for c in left.index] == taken
        left = left - taken
    return dict(masks)


def encoded(column: Column, is_training: np.ndarray) -> np.ndarray | None:
    """Features of a column: float [n, width], or int64 [n] for an embedding; None: left out."""
    asked = (
        {"encoding": column.asked} if isinstance(column.asked, str) else dict(column.asked or {})
    )
    values = column.values
    is_missing = np.array([_is_unknown(value) for value in values])
    if column.kind == "empty" or is_missing.all():
        return None
    if asked.get("statistics") == "all":
        is_training = np.ones(len(values), bool)
    way = asked.get("encoding")
    if column.kind == "sets" or "separator" in asked:
        cut = asked.get("separator")
        rows = [[] if v is None else v.split(cut) if cut else v for v in values]
        words = {w for row, chosen in zip(rows, is_training, strict=True) if chosen for w in row}
        binarizer = MultiLabelBinarizer(classes=sorted(words)).fit([])
        made = binarizer.transform([[w for w in row if w in words] for row in rows]).astype(float)
        return np.hstack([made, is_missing[:, None]]) if is_missing.any() else made
    if column.kind in ("category", "text", "words") or way in ("category", "embedding"):
        return _of_categories(values, is_missing, is_training, way, asked)
    marks = is_missing[:, None].astype(float)
    if column.kind in ("real", "integer", "boolean"):
        numbers = np.array(
            [np.nan if m else float(v) for v, m in zip(values, is_missing, strict=True)]
        )
        if way == "bucketed":
            made = _buckets(numbers, is_training, asked)
            return np.hstack([made, marks]) if is_missing.any() else made
        if way == "logarithm":
            numbers = np.sign(numbers) * np.log1p(abs(numbers))
        is_scaled = column.kind != "boolean" and way != "number"
        made = _filled(numbers[:, None], is_training, is_scaled)
        return np.hstack([made, marks]) if is_missing.any() else made
    if column.kind == "vector":
        width = next(len(v) for v in values if v is not None)
        rows = [[np.nan] * width if v is None else v for v in values]
        matrix = np.array([[np.nan if x is None else x for x in row] for row in rows], float)
        made = _filled(matrix, is_training, bool(asked.get("standardize")))
        marks = np.isnan(matrix).any(axis=1)[:, None].astype(float)
        return np.hstack([made, marks]) if marks.any() else made
    stamps = pd.Series(pd.to_datetime(pd.Series(values, dtype=object)))
    parts = asked.get("parts", ["seconds"])
    blocks = []
    for part in ("seconds", "hour", "weekday", "month", "day_of_year"):
        if part not in parts:
            continue
        if part == "seconds":
            seconds = ((stamps - pd.Timestamp(0)) / pd.Timedelta(1, "s")).to_numpy(float)
            blocks.append(_filled(seconds[:, None], is_training, True))
            continue
        number = getattr(stamps.dt, {"weekday": "day_of_week"}.get(part, part)).to_numpy(float)
        first = 1 if part in ("month", "day_of_year") else 0
        angle = 2 * np.pi * (number - first) / _PERIODS[part]
        circle = np.stack([np.sin(angle), np.cos(angle)], axis=1)
        blocks.append(np.where(np.isnan(circle), 0.0, circle))
    made = np.hstack(blocks)
    return np.hstack([made, marks]) if is_missing.any() else made


def _filled(numbers: np.ndarray, is_training: np.ndarray, is_scaled: bool) -> np.ndarray:
    """Column by column: one without a value to train on stays as it is, with 0 for what lacks."""
    imputer = SimpleImputer(keep_empty_features=True).fit(numbers[is_training])
    if not is_scaled:
        return np.asarray(imputer.transform(numbers))
    columns = []
    for column in numbers.T:
        if not np.isnan(column[is_training]).all():
            scaler = StandardScaler().fit(column[is_training, None])
            column = scaler.transform(column[:, None])[:, 0]
        columns.append(np.nan_to_num(column))
    return np.stack(columns, axis=1)


def _buckets(numbers: np.ndarray, is_training: np.ndarray, asked: dict[str, Any]) -> np.ndarray:
    edges = asked.get("edges")
    if edges is None:
        known = numbers[is_training & ~np.isnan(numbers)]
        if not len(known):
            edges = []
        else:
            number = asked.get("buckets", 10)
            quantiles = pd.Series(known).quantile(np.arange(1, number) / number)
            edges = sorted({q for q in quantiles if q > known.min()})
    bins = pd.cut(numbers, [-np.inf, *edges, np.inf], right=False, labels=False)
    return np.array([[float(b == i) for i in range(len(edges) + 1)] for b in bins])


def _of_categories(
    values: list[Any],
    is_missing: np.ndarray,
    is_training: np.ndarray,
    way: str | None,
    asked: dict[str, Any],
) -> np.ndarray | None:
    known = [v for v, m in zip(values, is_missing, strict=True) if not m]
    limit = asked.get("one_hot_limit", 32)
    if way is None and len(set(known)) > limit and 2 * len(set(known)) > len(known):
        return None
    of_training = sorted(
        {v for v, m, t in zip(values, is_missing, is_training, strict=True) if t and not m}
    )
    if way == "embedding" or len(of_training) > limit:
        place = {value: number + 1 for number, value in enumerate(of_training)}
        return np.array(
            [0 if m else place.get(v, 0) for v, m in zip(values, is_missing, strict=True)]
        )
    made = np.zeros((len(values), 0))
    if of_training:
        encoder = OneHotEncoder(
            categories=[np.array(of_training, dtype=object)],
            handle_unknown="ignore",
            sparse_output=False,
        )
        column = np.array(values, dtype=object)[:, None]
        encoder.fit(np.array(of_training, dtype=object)[:, None])
        made = encoder.transform(column)
    marks = is_missing[:, None].astype(float)
    return np.hstack([made, marks]) if is_missing.any() else made


# ---------------------------------------------------------------------- files


def _arrow_type(column: Column, draw: random.Random) -> Any:
    kind = column.kind
    if kind == "id uint64":
        return pa.uint64()
    if kind == "id bytes":
        return pa.binary(16)
    if kind.startswith("id "):
        is_integer = kind in ("id integers", "id sparse", "id negative")
        if kind == "id integers" and draw.random() < 0.5:
            return pa.int16()
        return pa.int64() if is_integer else draw.choice([pa.string(), pa.large_string()])
    if kind in ("category", "text", "words"):
        return draw.choice([pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
    if kind == "vector":
        return pa.list_(pa.float64())
    if kind == "sets":
        flat = [x for v in column.values if v for x in v]
        return pa.list_(pa.string() if isinstance(flat[0], str) else pa.int64())
    return {
        "real": pa.float64(),
        "integer": pa.int64(),
        "boolean": pa.bool_(),
        "date": pa.date32(),
        "timestamp": pa.timestamp("us"),
        "empty": pa.null(),
    }[kind]


def _cell(value: Any, null: str) -> str:
    if value is None:
        return null
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, datetime.datetime):
        return value.isoformat(sep=" ")
    return repr(value) if isinstance(value, float) else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime.datetime):
        return value.isoformat(sep=" ")
    return value.isoformat() if isinstance(value, datetime.date) else value


def write(
    columns: Mapping[str, Column], target: Path, kind: str, num_files: int, draw: random.Random
) -> Any:
    """Write a table into a folder, or make one in memory; returns what names its files."""
    names = list(columns)
    count = len(columns[names[0]].values)
    types = {name: _arrow_type(columns[name], draw) for name in names}
    arrays = {n: pa.array(columns[n].values, types[n]) for n in names}
    table = pa.table(arrays)
    if kind == "memory":
        is_plain = not any(pa.types.is_nested(t) or pa.types.is_integer(t) for t in types.values())
        return table.to_pandas() if is_plain and draw.random() < 0.3 else table
    cuts = sorted(draw.choices(range(count + 1), k=num_files - 1))
    bounds = list(zip([0, *cuts], [*cuts, count], strict=True))
    target.mkdir(parents=True)
    null = draw.choice(_NULLS)
    delimiter = "\t" if kind == "tsv" else draw.choice([",", ";", "|", "\t"])
    if len(names) == 1:  # of which nothing shows the delimiter: others would need no quotes
        delimiter = ","
    top = draw.choice(["", "# made by a test\n# twice\n"])
    end = draw.choice(["\n", "\r\n"])
    for place, (low, high) in enumerate(bounds):
        path = target / f"part-{place}.{kind}"
        if kind in ("csv", "csv.gz", "tsv"):
            text = io.StringIO()
            quoting = draw.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
            writer = csv.writer(text, delimiter=delimiter, lineterminator=end, quoting=quoting)
            writer.writerow(names)
            for row in range(low, high):
                writer.writerow([_cell(columns[n].values[row], null) for n in names])
            data = (draw.choice(["", "\ufeff"]) + top + text.getvalue()).encode()
            path.write_bytes(gzip.compress(data) if kind == "csv.gz" else data)
        elif kind == "jsonl":
            lines = []
            for row in range(low, high):
                of_row = {n: _plain(columns[n].values[row]) for n in names}
                lines.append(json.dumps(of_row, ensure_ascii=draw.random() < 0.5))
            if lines:
                path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        elif kind == "parquet":
            piece = table.slice(low, high - low)
            parquet.write_table(piece, path, row_group_size=draw.choice([3, 1000]))
        else:
            feather.write_feather(table.slice(low, high - low), path)
    files = sorted(map(str, target.iterdir()))
    if len(files) == 1 and draw.random() < 0.5:
        return files[0]
    return draw.choice([str(target), f"{target}/*.{kind}", files])
