# SPDX-License-Identifier: Apache-2.0
"""Accuracy through tables alone: data sets written out as tables with ids of text, in any order.

    python benchmarks/accuracy_from_tables.py                   # all; an hour on two cores
    python benchmarks/accuracy_from_tables.py --only cora
    python benchmarks/accuracy_from_tables.py --page            # write the page alone

A data set of arrays is written as files, with ids that are text, in an order drawn at random, as
are the rows of all tables; classes are words. Then commands alone are run: ``graphshard partition``
of the tables, ``graphshard train``, ``graphshard predict``. Predictions are joined with the labels
of the arrays by id, by pandas, and scikit-learn says how good they are on the published test rows.
Beside it stands what ``graphshard train --data NAME`` reaches from the arrays with the same options
and seed.

Needs pandas, pyarrow and scikit-learn. Results are merged into
``benchmarks/results/accuracy_from_tables_DATE.json``, and the page from that.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from _common import machine, merge_runs
from sklearn.metrics import accuracy_score, f1_score, roc_auc_score

from graphshard.data.prepare import Preparation, read_dataset

SPLITS = ("train", "val", "test")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A data set, how it is written out, and what is trained on it.

    Args:
        write: Writes the tables into a folder, and gives the options of ``graphshard partition``.
        metric: ``accuracy``, ``macro_f1`` or ``auroc``, as is published.
        options: Of ``graphshard train``, on arrays and tables alike.
        variant: What tells apart cases of one data set and model.
    """

    data: str
    model: str
    form: str
    write: Callable[[Tables, Path], str]
    metric: str
    published: str
    options: str = ""
    variant: str = ""

    @property
    def name(self) -> str:
        return f"{self.data}-{self.model}{self.variant}"


class Tables:
    """A data set with ids of text: a node's number to its id and back, and rows in any order."""

    def __init__(self, name: str, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        dataset = read_dataset(name, Preparation(self_loops=False, inverse=False))
        self.graph, self.target = dataset.graph, dataset.target
        self.ids = {t: self._ids(t, self.graph.num_nodes(t)) for t in self.graph.ntypes}
        fields = self.graph.nodes[self.target].data
        label = fields["label"].numpy()
        words = np.array([f"class {c}" for c in range(dataset.num_classes)], dtype=object)
        self.label = np.where(label >= 0, words[label], None)
        self.part = np.full(len(label), None, dtype=object)
        for split in SPLITS:
            self.part[fields[f"{split}_mask"].numpy()] = split

    def _ids(self, ntype: str, count: int) -> np.ndarray:
        numbers = self.random.permutation(count * 7)[:count]
        return np.array([f"{ntype.strip('_')}-{number:06x}" for number in numbers], dtype=object)

    def nodes(self, ntype: str) -> dict[str, Any]:
        """Columns of the table of a type but for its features, in the order of the graph."""
        columns: dict[str, Any] = {"id": self.ids[ntype]}
        if ntype == self.target:
            columns |= {"label": self.label, "part": self.part}
        return columns

    def features(self, ntype: str) -> np.ndarray:
        rows: np.ndarray = self.graph.nodes[ntype].data["feat"].numpy()
        return rows

    def edges(self, etype: Any, relation: int | None = None) -> pd.DataFrame:
        """Ids of the ends of all edges, or of those of a relation by number, in any order."""
        src, dst = (ends.numpy() for ends in self.graph.edges(etype=etype))
        order = self.random.permutation(len(src))
        if relation is not None:
            order = order[self.graph.edata["etype"].numpy()[order] == relation]
        sources, targets = self.ids[etype[0]], self.ids[etype[2]]
        return pd.DataFrame({"source": sources[src[order]], "target": targets[dst[order]]})

    def as_parquet(self, ntype: str, path: Path, with_features: bool = True) -> None:
        """Write the table of a type, with its features as a column of lists."""
        columns = {
            name: pa.array(values, pa.string()) for name, values in self.nodes(ntype).items()
        }
        if with_features:
            rows = self.features(ntype)
            flat = pa.array(rows.reshape(-1))
            columns["feat"] = pa.FixedSizeListArray.from_arrays(flat, rows.shape[1])
        order = self.random.permutation(len(self.ids[ntype]))
        pq.write_table(pa.table(columns).take(pa.array(order)), path, compression="zstd")


def write_plain_parquet(tables: Tables, folder: Path) -> str:
    """One file of nodes, with a column of lists, and one of edges."""
    (etype,) = tables.graph.canonical_etypes
    tables.as_parquet(tables.target, folder / "nodes.parquet")
    tables.edges(etype).to_parquet(folder / "edges.parquet")
    return "--nodes nodes.parquet --node-id id --edges edges.parquet --label label --split part"


def write_plain_csv(tables: Tables, folder: Path) -> str:
    """Nodes with a column for each feature, and edges in three files, compressed."""
    rows = tables.features(tables.target)
    names = [f"feature {column}" for column in range(rows.shape[1])]
    frame = pd.DataFrame(tables.nodes(tables.target))
    frame = pd.concat([frame, pd.DataFrame(rows, columns=names)], axis=1)
    order = tables.random.permutation(len(frame))
    frame.iloc[order].to_csv(folder / "nodes.csv", index=False)
    (etype,) = tables.graph.canonical_etypes
    edges = tables.edges(etype)
    for part, start in enumerate(range(0, len(edges), -(-len(edges) // 3))):
        stop = start + -(-len(edges) // 3)
        edges.iloc[start:stop].to_csv(folder / f"edges{part}.csv.gz", index=False)
    return "--nodes nodes.csv --node-id id --edges edges*.csv.gz --label label --split part"


def write_typed(tables: Tables, folder: Path) -> str:
    """A file a node type that has features, and one a relation, and the TOML that says so."""
    lines = []
    for ntype in tables.graph.ntypes:
        if "feat" not in tables.graph.nodes[ntype].data and ntype != tables.target:
            continue  # nodes come from the edges
        tables.as_parquet(ntype, folder / f"{ntype}.parquet")
        lines += [f"[nodes.{ntype}]", f'files = "{ntype}.parquet"', 'id = "id"']
        lines += ['label = "label"', 'split = "part"'] if ntype == tables.target else []
    for etype in tables.graph.canonical_etypes:
        source, name, target = etype
        file = f"{source}_{name}_{target}.csv"
        tables.edges(etype).to_csv(folder / file, index=False)
        lines += [f"[edges.{name}]", f'files = "{file}"', 'source = "source"', 'target = "target"']
        lines += [f'source_type = "{source}"', f'target_type = "{target}"']
    (folder / "graph.toml").write_text("\n".join(lines) + "\n")
    return "--tables graph.toml --inverse"


def write_relations(tables: Tables, folder: Path) -> str:
    """One file of nodes, which have ids and labels alone, and one a relation."""
    (etype,) = tables.graph.canonical_etypes
    frame = pd.DataFrame(tables.nodes(tables.target))
    frame.iloc[tables.random.permutation(len(frame))].to_csv(folder / "node.csv", index=False)
    lines = ["[nodes.node]", 'files = "node.csv"', 'id = "id"', 'label = "label"', 'split = "part"']
    for number in range(int(tables.graph.edata["etype"].max()) + 1):
        file = f"relation{number}.csv"
        tables.edges(etype, number).to_csv(folder / file, index=False)
        lines += [f"[edges.relation{number}]", f'files = "{file}"']
        lines += ['source = "source"', 'target = "target"']
        lines += ['source_type = "node"', 'target_type = "node"']
    (folder / "graph.toml").write_text("\n".join(lines) + "\n")
    return "--tables graph.toml --inverse"


def write_triples(tables: Tables, folder: Path) -> str:
    """One file of nodes, which have ids and labels alone, and one of all edges with relations."""
    (etype,) = tables.graph.canonical_etypes
    frame = pd.DataFrame(tables.nodes(tables.target))
    frame.iloc[tables.random.permutation(len(frame))].to_csv(folder / "node.csv", index=False)
    frames = [
        tables.edges(etype, number).assign(relation=f"relation {number}")
        for number in range(int(tables.graph.edata["etype"].max()) + 1)
    ]
    triples = pd.concat(frames)
    triples = triples.iloc[tables.random.permutation(len(triples))]
    triples.to_csv(folder / "triples.csv", index=False)
    return (
        "--nodes node.csv --node-id id --edges triples.csv --relation-column relation "
        "--label label --split part --inverse"
    )


CASES = [
    Case(
        data="cora",
        model="gcn",
        form="Parquet, features as lists",
        write=write_plain_parquet,
        metric="accuracy",
        published="81.5 (Kipf and Welling 2017)",
    ),
    Case(
        data="tolokers",
        model="gcn",
        form="CSV, edges in three .csv.gz",
        write=write_plain_csv,
        metric="auroc",
        published="83.6 (Platonov et al. 2023)",
    ),
    Case(
        data="citeseer",
        model="gcn",
        form="CSV of 3,706 columns, edges in three .csv.gz",
        write=write_plain_csv,
        metric="accuracy",
        published="70.3 (Kipf and Welling 2017)",
    ),
    Case(
        data="aifb",
        model="rgcn",
        form="CSV, one of triples",
        write=write_triples,
        metric="accuracy",
        published="95.8 (Schlichtkrull et al. 2018)",
    ),
    Case(
        data="aifb",
        model="rgcn",
        variant="-typed",
        form="CSV, one a relation, 45, TOML",
        write=write_relations,
        metric="accuracy",
        published="95.8 (Schlichtkrull et al. 2018)",
    ),
    Case(
        data="dblp-heco",
        model="gcn",
        form="Parquet of three types, CSV of three relations, TOML; one type from edges alone",
        write=write_typed,
        metric="macro_f1",
        published="89.3 (HAN, Wang et al. 2021)",
        options="--metrics macro_f1,accuracy",
    ),
]


NOTES = """
AIFB's nodes have no features. As one table of triples, `--relation-column`, it is what the arrays
are: edges with relation numbers, and the R-GCN of the paper, whose first layer has a row for each
node and relation. As a table a relation it is a typed graph of 45 relations, in which the first
layer learns a row a node; of 36 test nodes (2.8 points each) fewer are right. Initial values depend
on the numbers of nodes, which are others in tables, so that runs of one seed differ as those of two
seeds do. Word counts in CSV columns would be standardized column by column without a TOML that asks
for `number`; a column of lists is taken as it is.
"""


def command(folder: Path, text: str, timeout: float) -> None:
    """Run ``graphshard ...`` in a folder; a failure ends the program with what it said."""
    arguments = [sys.executable, "-m", "graphshard", *shlex.split(text), "--quiet"]
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise SystemExit(f"graphshard {text}:\n{done.stdout}{done.stderr}")


def scores(tables: Tables, predictions: pd.DataFrame) -> dict[str, float]:
    """What scikit-learn says of the predictions of the published test rows, in percent."""
    rows = pd.DataFrame(tables.nodes(tables.target))
    joined = rows[rows["part"] == "test"].merge(predictions, on="id", how="left", validate="1:1")
    assert joined["prediction"].notna().all(), "every test row must have a prediction"
    values = {
        "accuracy": accuracy_score(joined["label"], joined["prediction"]),
        "macro_f1": f1_score(joined["label"], joined["prediction"], average="macro"),
    }
    if joined["label"].nunique() == 2:
        values["auroc"] = roc_auc_score(joined["label"] == "class 1", joined["p_class 1"])
    return {name: 100 * float(value) for name, value in values.items()}


def measure(case: Case, seed: int, workers: int, timeout: float) -> dict[str, Any]:
    """One run from tables and one from arrays."""
    start = time.perf_counter()
    train = f"--model {case.model} --seed {seed} {case.options}".strip()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tables = Tables(case.data, seed)
        options = case.write(tables, folder)
        steps = [
            f"partition {options} --parts {workers} --out parts --name g",
            f"train --data parts/g.json {train} --run runs/1",
            "predict --data parts/g.json --run runs/1 --out predictions.parquet",
        ]
        for text in steps:
            command(folder, text, timeout)
        found = scores(tables, pd.read_parquet(folder / "predictions.parquet"))
        said = json.loads((folder / "runs/1/model.json").read_text())["best"]
        command(folder, f"train --data {case.data} {train} --workers 1 --run runs/2", timeout)
        arrays = json.loads((folder / "runs/2/model.json").read_text())["best"]
    both = [
        100 * {"accuracy": best["accuracy"], **best["metrics"]}[case.metric]["test"]
        for best in (said, arrays)
    ]
    return {
        "steps": [f"graphshard {text}" for text in steps],
        "scores": found,
        "said_by_training": both[0],
        "from_arrays": both[1],
        "seconds": round(time.perf_counter() - start, 1),
    }


def page(results: dict[str, Any], date: str) -> str:
    """The table of what was measured, in Markdown."""
    lines = [
        f"# Accuracy through tables alone, CPU, {date}",
        "",
        f"{machine()}; one worker from arrays, from tables as below.",
        *ABOUT.rstrip().splitlines(),
        "",
        "| data | written as | model | metric | from tables, by seed | training said | arrays |"
        " published |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case in CASES:
        runs = list(results["runs"].get(case.name, {}).values())
        if not runs:
            continue
        columns = [
            ", ".join(f"{value:.1f}" for value in values)
            for values in (
                [r["scores"][case.metric] for r in runs],
                [r["said_by_training"] for r in runs],
                [r["from_arrays"] for r in runs],
            )
        ]
        names = [case.data, case.form, case.model, case.metric]
        lines.append("| " + " | ".join([*names, *columns, case.published]) + " |")
    lines += ["", *NOTES.strip().splitlines()]
    lines += ["", "The commands, of the first seed:", ""]
    for case in CASES:
        for run in list(results["runs"].get(case.name, {}).values())[:1]:
            lines += [f"{case.data}:", "", "```sh", *run["steps"], "```", ""]
    return "\n".join(lines).rstrip() + "\n"


ABOUT = """
`python benchmarks/accuracy_from_tables.py`: ids are text, rows of all tables in an order drawn at
random, classes are words. Scores in percent, of the published test rows: scikit-learn's of the
predictions joined by id, what `train` said of the same model, and the same command on the arrays.
Feature rows of word counts are written normalised, as `--data` reads them.
"""


def measured(case: Case, seed: int, arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """One run, and its scores."""
    found = measure(case, seed, arguments.workers, arguments.timeout)
    score, arrays = found["scores"][case.metric], found["from_arrays"]
    return found, f"{score:.1f} from tables, {arrays:.1f} from arrays"


def main() -> None:
    """Run what is asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--workers", type=int, default=2)
    merge_runs("accuracy_from_tables", CASES, parser, measured, page)


if __name__ == "__main__":
    main()
