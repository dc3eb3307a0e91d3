# SPDX-License-Identifier: Apache-2.0
"""Tables against pandas: rows, ids, edges and counts of messy tables that are made by a seed.

A table is written to files of any format, cut into any number of them and read in batches of any
size; what is read is what pandas makes of the frame. No process group.
"""

from __future__ import annotations

import gzip
import random
import uuid
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from graphshard._base.kernels import extension_available, force_extension
from graphshard.data import EdgeTable, NodeTable, Tables, _table_files
from graphshard.data._read_tables import TablesGraph, read_tables

FORMATS = ("csv", "csv.gz", "parquet", "feather", "jsonl", "memory")
IDS = ("integers", "sparse", "uint64", "negative", "names", "padded", "mixed", "uuids")


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
        names = ("ü", "a b", "x,y", 'say "hi"', "tab;semi", " lead", "1.5", "0x10")
        made = [f"{draw.choice(names)}-{i}" for i in range(count)]
    elif kind == "padded":
        made = [f"{i:05d}" for i in range(count)]
    elif kind == "mixed":
        made = [str(i) if i % 2 else f"n{i}" for i in range(count)]
    else:
        made = [str(uuid.UUID(int=draw.getrandbits(128))) for _ in range(count)]
    draw.shuffle(made)
    return made


def frame_of_ids(ids: list[Any], kind: str) -> Any:
    """A column of ids, some of them None, with the type that they have in typed files."""
    if kind == "uint64":
        return pd.array(ids, dtype="UInt64")
    if isinstance(next((i for i in ids if i is not None), ""), int):
        return pd.array(ids, dtype="Int64")
    return pd.array(ids, dtype="object")


def write(frame: pd.DataFrame, folder: Path, name: str, kind: str, draw: random.Random) -> Any:
    """Write a frame to one file or several; returns what `Tables` takes."""
    if kind == "memory":
        return frame if draw.random() < 0.5 else pa.Table.from_pandas(frame, preserve_index=False)
    number = draw.randint(1, 4)
    cuts = sorted(draw.choices(range(len(frame) + 1), k=number - 1))
    pieces = [frame.iloc[a:b] for a, b in zip([0, *cuts], [*cuts, len(frame)], strict=True)]
    schema = pa.Table.from_pandas(frame, preserve_index=False).schema
    target = folder / name
    target.mkdir()
    delimiter = draw.choice([",", ";", "\t", "|"])
    comment = draw.choice(["", "# made by a test\n# twice\n"])
    end = draw.choice(["\n", "\r\n"])
    for place, piece in enumerate(pieces):
        path = target / f"part-{place}.{kind}"
        if kind.startswith("csv"):
            text = piece.to_csv(index=False, sep=delimiter, lineterminator=end)
            data = (draw.choice(["", "\ufeff"]) + comment + text).encode()
            path.write_bytes(gzip.compress(data) if kind.endswith("gz") else data)
            continue
        table = pa.Table.from_pandas(piece, schema=schema, preserve_index=False)
        if kind == "parquet":
            parquet.write_table(table, path, row_group_size=draw.choice([3, 1000]))
        elif kind == "feather":
            feather.write_feather(table, path)
        else:
            lines = [
                piece.iloc[[i]].to_json(orient="records", lines=True) for i in range(len(piece))
            ]
            path.write_text("".join(lines), encoding="utf-8")
    if kind == "jsonl":
        for path in target.iterdir():
            if not path.stat().st_size:
                path.unlink()
    return draw.choice([str(target), f"{target}/*.{kind}", sorted(map(str, target.iterdir()))])


class Case:
    """Frames of nodes and edges, and the graph that pandas says they make."""

    def __init__(self, seed: int) -> None:
        draw = self.draw = random.Random(seed)
        self.kind = IDS[seed % len(IDS)]
        count = draw.randint(3, 60)
        ids = ids_of(self.kind, count, draw)
        known, strange = ids[: max(2, count - 5)], ids[max(2, count - 5) :]
        rows: list[Any] = known + draw.choices(known, k=draw.randint(0, 5))
        rows += [None] * draw.choice([0, 0, 2])
        draw.shuffle(rows)
        number = len(rows)
        self.nodes = pd.DataFrame(
            {
                "key": frame_of_ids(rows, self.kind),
                "score": [draw.choice([None, 0.5, 2.0, draw.random()]) for _ in range(number)],
                "label": [draw.choice(["a", "b", None, "c d"]) for _ in range(number)],
            }
        )
        self.nodes.loc[0, "label"] = "a"
        ends: list[list[Any]] = [[], []]
        for _ in range(draw.randint(1, 200)):
            for end in ends:
                end.append(draw.choice(known if draw.random() < 0.9 or not strange else strange))
        for end in ends:
            for _ in range(draw.choice([0, 0, 3])):
                end[draw.randrange(len(end))] = None
        self.edges = pd.DataFrame(
            {
                "a": frame_of_ids(ends[0], self.kind),
                "b": frame_of_ids(ends[1], self.kind),
                "w": [draw.choice([1.5, 2.0, 0.25, None]) for _ in ends[0]],
            }
        )

    def written(self, folder: Path) -> tuple[Any, Any]:
        kinds = [kind for kind in FORMATS if self.kind != "uint64" or kind != "jsonl"]
        made = []
        for name, frame in (("nodes", self.nodes), ("edges", self.edges)):
            made.append(write(frame, folder, name, self.draw.choice(kinds), self.draw))
        return made[0], made[1]

    def expected(self, dangling: str, parallel: str) -> dict[str, Any]:
        nodes = self.nodes.dropna(subset=["key"])
        first = nodes.drop_duplicates("key")
        ids = first["key"].tolist()
        edges = self.edges.dropna(subset=["a", "b"])
        if dangling == "add":
            ends = edges[["a", "b"]].to_numpy(dtype=object).reshape(-1).tolist()
            ids = list(dict.fromkeys(ids + ends))
        number = {key: place for place, key in enumerate(ids)}
        kept = edges[edges["a"].isin(number) & edges["b"].isin(number)]
        num_parallel = int(kept.duplicated(["a", "b"]).sum())
        if parallel == "drop":
            kept = kept.drop_duplicates(["a", "b"])
        return {
            "ids": ids,
            "edges": [(number[a], number[b]) for a, b in zip(kept["a"], kept["b"], strict=True)],
            "weights": kept["w"].fillna(1.0).tolist(),
            "duplicates": len(nodes) - len(first),
            "parallel": num_parallel,
            "loops": sum(a == b for a, b in zip(kept["a"], kept["b"], strict=True)),
            "refused": len(self.nodes) - len(nodes),
            "dangling": {c: n for c in "ab" if (n := int((~edges[c].isin(number)).sum()))},
            "labels": first["label"].tolist(),
        }


def check(read: TablesGraph, expected: dict[str, Any]) -> None:
    graph, report = read.graph, read.report
    ids = read.ids["person"].to_pylist()
    assert [str(i) for i in ids] == [str(i) for i in expected["ids"]]
    src, dst = graph.edges()
    assert list(zip(src.tolist(), dst.tolist(), strict=True)) == expected["edges"]
    assert graph.edata["weight"].tolist() == pytest.approx(expected["weights"])
    nodes, edges = report.nodes["person"], report.edges["person", "knows", "person"]
    assert nodes.num_duplicates == expected["duplicates"]
    assert sum(nodes.refused.values()) == expected["refused"]
    assert edges.num_parallel == expected["parallel"]
    assert edges.num_self_loops == expected["loops"]
    assert edges.dangling == expected["dangling"]
    classes = sorted({label for label in expected["labels"] if isinstance(label, str)})
    numbers = [classes.index(x) if isinstance(x, str) else -1 for x in expected["labels"]]
    label = graph.ndata["label"].tolist()
    assert label[: len(numbers)] == numbers
    assert set(label[len(numbers) :]) <= {-1}
    assert read.task.class_names == tuple(classes)


def tables_of(nodes: Any, edges: Any, dangling: str, parallel: str) -> Tables:
    return Tables(
        nodes={"person": NodeTable(files=nodes, id="key", label="label", split=[1.0])},
        edges={
            ("person", "knows", "person"): EdgeTable(
                files=edges, source="a", target="b", weight="w"
            )
        },
        dangling=dangling,  # type: ignore[arg-type]
        parallel=parallel,  # type: ignore[arg-type]
    )


NUM_SEEDS = 500


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=[] if seed < 40 else pytest.mark.exhaustive)
        for seed in range(NUM_SEEDS)
    ],
)
def test_what_is_read_is_what_pandas_reads(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(seed)
    monkeypatch.setattr(_table_files, "_BLOCK", case.draw.choice([1 << 20, 700]))
    nodes, edges = case.written(tmp_path)
    dangling, parallel = case.draw.choice(["drop", "add"]), case.draw.choice(["keep", "drop"])
    expected = case.expected(dangling, parallel)
    with force_extension(extension_available() and seed % 3 != 0):
        tables = tables_of(nodes, edges, dangling, parallel)
        if expected["dangling"] and not expected["edges"]:
            with pytest.raises(ValueError, match="has both ends among the nodes"):
                read_tables(tables)
        else:
            check(read_tables(tables), expected)
