# SPDX-License-Identifier: Apache-2.0
"""From tables of four types, with ids of their own, to predictions by these ids.

    python examples/own_tables.py --data ../shared/datasets/dblp-heco

DBLP: authors write papers, papers have terms and appear at conferences; which of four areas an
author works in is to be learnt from 80 authors. The script writes the data set as such data lie
about: Parquet and CSV, ids that are text, rows in no order, conferences that no table lists. From
there on there is one TOML file and three commands, each of which could be typed in a shell. At the
end the predictions are joined with the table of authors, by pandas.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd

TOML = """
[nodes.author]
files = "authors.parquet"
id = "author"
label = "area"
split = "part"                  # a column that says train, val or test

[nodes.paper]
files = "papers-*.csv"          # papers have an id and nothing else
id = "paper"

[edges.writes]
files = "wrote.csv.gz"
source = "author"
source_type = "author"
target = "paper"
target_type = "paper"

[edges.at]
files = "appeared.csv"
source = "paper"
source_type = "paper"
target = "conference"           # no table: the conferences that papers name
target_type = "conference"

[edges.has]
files = "terms.parquet"
source = "paper"
source_type = "paper"
target = "term"
target_type = "term"
"""
AREAS = np.array(["area A", "area B", "area C", "area D"])


def write_tables(data: Path, out: Path) -> None:
    """The arrays of the data set as tables, with ids that say nothing and rows in no order."""
    rng = np.random.default_rng(0)
    counts = dict(line.split() for line in (data / "node_types.txt").read_text().splitlines())
    names = {
        ntype: np.array([f"{ntype[0]}{i:05x}" for i in rng.permutation(int(count))])
        for ntype, count in counts.items()
    }
    kept = np.load(data / "feat__author.npz")  # keywords of each author, as a sparse matrix
    keywords = np.zeros(kept["shape"], np.float32)
    rows = np.repeat(np.arange(len(keywords)), np.diff(kept["indptr"]))
    keywords[rows, kept["indices"]] = kept["data"]
    part = np.full(len(keywords), None, object)
    for name, file in (("train", "train"), ("val", "valid"), ("test", "test")):
        part[np.load(data / f"{file}_idx.npy")] = name
    authors = pd.DataFrame({"author": names["author"], "keywords": list(keywords)})
    authors["area"] = AREAS[np.load(data / "label__author.npy")]
    authors["part"] = part
    authors.sample(frac=1, random_state=0).to_parquet(out / "authors.parquet", index=False)
    for number, rows in enumerate(np.array_split(names["paper"], 3)):
        pd.DataFrame({"paper": rows}).to_csv(out / f"papers-{number}.csv", index=False)
    for relation, columns, file in (
        ("paper__pa__author", ["paper", "author"], "wrote.csv.gz"),
        ("paper__pc__conf", ["paper", "conference"], "appeared.csv"),
        ("paper__pt__term", ["paper", "term"], "terms.parquet"),
    ):
        paper, other = np.load(data / f"edge_index__{relation}.npy")
        ends = {
            columns[0]: names["paper"][paper],
            columns[1]: names[relation.split("__")[2]][other],
        }
        edges = pd.DataFrame(ends).sample(frac=1, random_state=0)
        if file.endswith("parquet"):
            edges.to_parquet(out / file, index=False)
        else:
            edges.to_csv(out / file, index=False)
    (out / "graph.toml").write_text(TOML)


def graphshard(command: str) -> None:
    """Run a command of graphshard, and show it."""
    print(f"$ graphshard {command}", flush=True)
    subprocess.run([sys.executable, "-m", "graphshard", *command.split()], check=True)


def main() -> None:
    """Write the tables, run the three commands, and look at the predictions."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/datasets/dblp-heco"))
    parser.add_argument("--out", type=Path, default=Path("build/examples/own_tables"))
    parser.add_argument("--epochs", type=int, default=60)
    options = parser.parse_args()
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    write_tables(options.data, out)

    graphshard(f"partition --tables {out}/graph.toml --parts 2 --out {out}/parts")
    graphshard(
        f"train --data {out}/parts/graph.json --run {out}/run --epochs {options.epochs} --quiet"
    )
    graphshard(f"predict --data {out}/parts/graph.json --run {out}/run --out {out}/predictions.csv")

    predictions = pd.read_csv(out / "predictions.csv")
    authors = pd.read_parquet(out / "authors.parquet").merge(
        predictions, left_on="author", right_on="id"
    )
    test = authors[authors["part"] == "test"]
    right = 100 * (test["area"] == test["prediction"]).mean()
    print(predictions.head(3).to_string(index=False))
    print(f"test accuracy {right:.1f} % on {len(test)} authors")


if __name__ == "__main__":
    main()
