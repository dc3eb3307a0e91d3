# SPDX-License-Identifier: Apache-2.0
"""What `graphshard train` reaches with no options, beside the published number.

    python benchmarks/defaults.py                            # all; hours on two cores
    python benchmarks/defaults.py --only tolokers-gcn,cora   # some, by data set or with the model
    python benchmarks/defaults.py --page                     # write the page of what was measured

Each line is the command ``graphshard train --data NAME --model MODEL --seed SEED``, and what the
line says besides: metrics alone. The test score is that of the epoch which validation chose, as the
command shows it. Results are merged into ``benchmarks/results/defaults_DATE.json``, and the page
``defaults_DATE.md`` is written from that. Data sets are read from the folder that
GRAPHSHARD_DATASETS names, or from ``../shared/datasets`` beside the repository.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _common import machine, merge_runs


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table.

    Args:
        published: In percent; None where none is known for this model on this data.
        expected: In percent, from and to: what the data set's README expects of the data as its
            folder has them, where they lack something that the published number had.
        metric: What is compared.
        options: Options besides data, model and seed; of metrics alone.
    """

    data: str
    model: str
    published: float | None = None
    expected: tuple[float, float] | None = None
    metric: str = "accuracy"
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.data}-{self.model}"

    def command(self, seed: int) -> list[str]:
        names = ["--data", self.data, "--model", self.model, "--seed", str(seed)]
        return ["train", *names, *self.options]


_F1 = {"metric": "macro_f1", "options": ("--metrics", "macro_f1,accuracy")}
LINES = [
    Line(data="cora", model="gcn", published=81.5),
    Line(data="cora", model="sage"),
    Line(data="cora", model="gat", published=83.0),
    Line(data="cora", model="gatv2"),
    Line(data="citeseer", model="gcn", published=70.3),
    Line(data="citeseer", model="sage"),
    Line(data="citeseer", model="gat", published=72.5),
    Line(data="pubmed-partial", model="gcn"),
    Line(data="nell", model="gcn", published=66.0, expected=(55, 62)),
    Line(data="amazon-computers", model="gcn", published=82.6),
    Line(data="amazon-computers", model="sage", published=82.4),
    Line(data="amazon-computers", model="gat", published=78.0),
    Line(data="coauthor-physics", model="gcn", published=92.8),
    Line(data="coauthor-physics", model="sage", published=93.0),
    Line(data="coauthor-physics", model="gat", published=92.5),
    Line(data="tolokers", model="gcn", published=83.64, metric="auroc"),
    Line(data="tolokers", model="sage", published=82.43, metric="auroc"),
    Line(data="tolokers", model="gat", published=83.70, metric="auroc"),
    Line(data="aifb", model="rgcn", published=95.83),
    Line(data="mutag", model="rgcn", published=73.23),
    Line(data="dblp-heco", model="gat", published=89.31, **_F1),  # HAN's
    Line(data="dblp-heco", model="sage", **_F1),
    Line(data="dblp-heco", model="gcn", **_F1),
    Line(data="dblp-heco", model="rgcn", **_F1),
    Line(data="dblp-heco", model="hgt", **_F1),
    Line(data="fb15k-237", model="rgcn", published=24.8, metric="mrr"),
]


NOTES = r"""
\* NELL's folder lacks the 500 validation labels by which the published runs ended. Its README says
that 66.0 is no target without them, and that 55 to 62 is what to expect; see below.

Lines with fewer than three seeds were measured with fewer for want of time. Lines of one table come
from several commits of two days; settings and code of each have not changed since it was measured,
but for the number of epochs of FB15k-237, see below. PubMed's folder has features of 1,060 nodes of
19,717, and no number is published for a network without them (label propagation: 63.0), so that
there is nothing to compare. Links of plain graphs stand beside PyG's own example in
[link_defaults](link_defaults_2026-11-26.md).

## FB15k-237

`graphshard train --data fb15k-237` takes R-GCN, samples, and the line's settings by itself. Its
hits at 1, 3 and 10 are 20.3, 32.0 and 47.1 % (published: 15.3, 25.8 and 41.4). It ended by
patience, at epoch 10 of 20; since then the default is 19 epochs, and nothing else has changed.

Chosen on 3,000 validation facts, one run each, CPU seconds of training in all:

| epochs | network | negatives | MRR, valid | CPU s |
| --- | --- | --- | --- | --- |
| 1 | first layer of one-hot rows, means by relation (the default until now) | 256 | 6 | |
| 1 | learnt rows, means by relation | 256 | 9.4 | 16 |
| 2 | the same | 256 | 17.2 | 35 |
| 2 | means over all edges, own rows as they are | 256 | 20.4 | 28 |
| 5 | the same, dropout of given ends | 256 | 25.2 | 79 |
| 2 | the same | 1,024 | 23.8 | 56 |
| 3 | the same | 1,024 | 26.1 | 85 |
| 2 | the same | ends of the step, and 256 | 24.5 | 62 |

Means over all edges into a node are what the paper has for links. The first line was of all
validation facts; its CPU time was not taken.

## NELL

The reference for the data as they are here is 55 to 62: the folder lacks the 500 validation labels
by which Kipf and Welling ended, and its README says that their 66.0 is no target without them.

The published 66.0 is not reached, and was not by any network tried here at any epoch: Kipf and
Welling's in plain torch, seed 0, has 61 at best (58 with 256 hidden, with means in place of
symmetric norms, or with three layers; 57 with own rows; 61 with dropout 0.5 of the input; 62 with
smoothed labels). It falls to 56 by epoch 100, while the training loss goes on falling. Without
validation rows a run now has 50 epochs, as those of R-GCN's paper on data without any (61.1 there,
60 to 61.3 from epoch 40 to 57). The number was known when that rule was made.

Until this day a matrix of 64 columns stood between sparse features and the network, so that the
first layer was a product of two; now it is the layer's own where the widths are equal. With two,
the best epochs are 30 to 40, and the last of 200 had 53.9.

## Amazon Computers

The networks learn slowly on rows that sum to 1. By 200 epochs, the default before, validation had
not settled: on the split here and three others by the same rule (RandomState 1 to 3), in plain
torch, the epoch chosen of 140 was among the last ten in four of five runs, and neither the least
validation loss (80.6 in the mean) nor a running mean over 10 epochs (80.7) chose much better than
the best validation accuracy (80.4), or than the last epoch (80.4). So the rule of choice stays as
it is, and a run is longer: up to 400 epochs, with patience of 50, which is that of Shchur et al.

With 200 epochs GCN had 80.4 and 81.2 (seeds 0 and 1), and 79.0 by validation at epoch 151 of a
third run; with the default of now seed 0 has 81.4, and 82.4 in the last epoch.

## Tolokers

With up to 300 epochs, the default until now, validation was best among the last ten of six runs
of nine, and GAT had 82.4, 80.0 and 81.5, on average 2.4 less than the published number; so a run
may have 1,000, as those of Platonov et al., and patience ends it. The test numbers were known.

## How the rule for many labels was chosen

By validation AUROC on Tolokers, split 0, in plain torch (one process, `torch.sparse`), with the
same layers, seed 0. The test column was printed beside it, and test numbers of the day before
were known.

| layers of a GCN, dropout 0.2 | hidden | layers | lr | valid | test |
| --- | --- | --- | --- | --- | --- |
| own rows | 64 | 2 | 0.01 | 80.1 | 78.5 |
| own rows, features standardized | 64 | 2 | 0.01 | 81.9 | 80.9 |
| own rows, norms, standardized | 64 | 2 | 0.01 | 81.8 | 81.3 |
| encoder, own rows | 64 | 2 | 0.01 | 83.8 | 82.8 |
| encoder, own rows, norms | 64 | 2 | 0.01 | 84.3 | 83.5 |
| encoder, own rows, norms | 64 | 3 | 0.01 | 84.9 | 84.5 |
| encoder, own rows, norms | 64 | 3 | 0.003 | 84.9 | 84.6 |
| Platonov et al.'s blocks, standardized | 64 | 2 | 0.003 | 85.1 | 84.2 |

150 epochs in the first three lines and the last, up to 300 in the others. Two layers are the
default: a third costs half as much again, and many times as many rows of a sample.

Until 2026-11-26 `--residual` and `--norm` made weights that no layer read, which is why the page
of the day before has GCN at 77.2 and GAT at 73.3. DBLP's features of authors and papers are
counts of words and are now divided by their sums, as HeCo's own code does: that is 80 to 92 for
SAGE.
"""


def run(line: Line, seed: int, timeout: float) -> dict[str, Any]:
    """One run of the command; what it said, and the scores that it left."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "graphshard", *line.command(seed), "--run", folder]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {timeout:g} s"}
        if done.returncode:
            return {"error": (done.stderr or done.stdout).strip().splitlines()[-1]}
        card = json.loads((Path(folder) / "model.json").read_text())
    notes = [text for text in done.stderr.splitlines() if "by default" in text or "edges" in text]
    for name in ("best", "last"):  # of hundreds of relations
        card[name].pop("by_relation", None)
    return {
        "best": card["best"],
        "last": card["last"],
        "config": card["config"],
        "notes": notes,
        "seconds": round(time.perf_counter() - start, 1),
    }


def score(line: Line, evaluation: dict[str, Any]) -> float:
    """Of the test rows, in percent; of the training rows where there are no others."""
    values = {"accuracy": evaluation["accuracy"], **evaluation["metrics"]}[line.metric]
    return 100 * float(values.get("test", values.get("val", 0.0)))


def page(results: dict[str, Any], date: str) -> str:
    """The table of what was measured, in Markdown."""
    threads = os.environ.get("OMP_NUM_THREADS", "unset")
    lines = [
        f"# Defaults of `graphshard train`, CPU, {date}",
        "",
        f"{machine()}, OMP_NUM_THREADS={threads}, one worker.",
        *ABOUT.rstrip().splitlines(),
        "",
        "| data | model | metric | test, by seed | mean | published | within two points |"
        " last epoch, mean | epochs | s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for line in LINES:
        runs = results["runs"].get(line.name, {})
        if not runs:
            continue
        done = [r for r in runs.values() if "error" not in r]
        if not done:
            (error,) = {r["error"] for r in runs.values()}
            lines.append(f"| {line.data} | {line.model} | {line.metric} | {error} | | | | | | |")
            continue
        best = [score(line, r["best"]) for r in done]
        last = [score(line, r["last"]) for r in done]
        mean = sum(best) / len(best)
        verdict = ""
        if line.published is not None:
            gap = line.published - mean
            verdict = "yes" if gap <= 2 else f"**no**, {gap:.1f} short"
            if line.expected is not None:
                low, high = line.expected
                where = "within" if low <= mean else "**below**"
                verdict = rf"{where} {low:g} to {high:g}, for the data as they are here\*"
        lines.append(
            f"| {line.data} | {line.model} | {line.metric} | "
            + ", ".join(f"{value:.1f}" for value in best)
            + f" | {mean:.1f} | {line.published or ''} | {verdict} | {sum(last) / len(last):.1f} | "
            + ", ".join(str(r["last"]["epoch"]) for r in done)
            + f" | {max(r['seconds'] for r in done):.0f} |"
        )
    return "\n".join(lines) + "\n" + NOTES


ABOUT = """
`python benchmarks/defaults.py`: each line is `graphshard train --data NAME --model MODEL --seed
SEED`, with `--metrics macro_f1,accuracy` for dblp-heco, and nothing else. Scores in percent, of
the test rows at the epoch that validation chose (without validation rows: the last). s: seconds
of the longest run, partitioning and evaluations included.
"""


def measure(line: Line, seed: int, arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """One run, and its score."""
    found = run(line, seed, arguments.timeout)
    return found, found.get("error") or f"{score(line, found['best']):.1f}"


def main() -> None:
    """Run what is asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0,1,2")
    merge_runs("defaults", LINES, parser, measure, page)


if __name__ == "__main__":
    main()
