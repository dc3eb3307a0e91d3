# SPDX-License-Identifier: Apache-2.0
"""Folders of OGB's layout, with a few nodes."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any


def put(path: Path, rows: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(",".join(str(cell) for cell in row) for row in rows)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write(text + "\n")


def put_split(folder: Path, train: list[int], valid: list[int], test: list[int]) -> None:
    for name, ids in (("train", train), ("valid", valid), ("test", test)):
        put(folder / f"{name}.csv.gz", [[i] for i in ids])


def arxiv(root: Path) -> None:
    raw = root / "ogbn_arxiv" / "raw"
    put(raw / "edge.csv.gz", [(0, 1), (3, 1), (1, 2)])
    put(raw / "num-node-list.csv.gz", [[5]])
    put(raw / "num-edge-list.csv.gz", [[3]])
    put(raw / "node-feat.csv.gz", [(0.5 * i, -i) for i in range(5)])
    put(raw / "node_year.csv.gz", [[2010 + i] for i in range(5)])
    put(raw / "node-label.csv.gz", [[2], [0], [1], [0], [2]])
    put_split(root / "ogbn_arxiv" / "split" / "time", [0, 4], [1], [2, 3])


def mag(root: Path) -> None:
    raw = root / "ogbn_mag" / "raw"
    put(raw / "num-node-dict.csv.gz", [("author", "paper"), (3, 2)])
    put(
        raw / "triplet-type-list.csv.gz",
        [("author", "writes", "paper"), ("paper", "cites", "paper")],
    )
    put(raw / "relations" / "author___writes___paper" / "edge.csv.gz", [(0, 1), (2, 0)])
    put(raw / "relations" / "author___writes___paper" / "edge_reltype.csv.gz", [[0], [0]])
    put(raw / "relations" / "paper___cites___paper" / "edge.csv.gz", [(1, 0)])
    put(raw / "node-feat" / "paper" / "node-feat.csv.gz", [(1.5, 2.5), (0.5, 0.25)])
    put(raw / "node-feat" / "paper" / "node_year.csv.gz", [[2015], [2019]])
    put(raw / "node-label" / "paper" / "node-label.csv.gz", [[7], [3]])
    put_split(root / "ogbn_mag" / "split" / "time" / "paper", [0], [1], [1])
