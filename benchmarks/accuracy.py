# SPDX-License-Identifier: Apache-2.0
"""Accuracy on real data sets, with 2 and with 4 workers, over 10 seeds, beside the published one.

    python benchmarks/accuracy.py                         # all
    python benchmarks/accuracy.py --only cora --workers 2

Cora comes with the package. The others are read from the folder that GRAPHSHARD_DATASETS names, or
from ``../shared/datasets`` beside the repository. Workers are kept alive over the seeds of one
setting. Results are merged into ``benchmarks/results/accuracy_cpu_DATE.json``, and the page
``accuracy_cpu_DATE.md`` is written from that.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import graphshard
from graphshard.train import (
    FullBatchConfig,
    FullBatchRun,
    launch_workers,
    load_shard,
    run_as_worker,
    send_event,
)
from graphshard.train._prepare import DATASETS_VARIABLE, partition_dataset, read_dataset

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One line of the table.

    Args:
        data: Name of the data set.
        model: Name of the model.
        wanted: Mean test accuracy to reach, in percent.
        published: What is published, and where.
        overrides: Fields of `FullBatchConfig` that differ from the model's defaults.
    """

    data: str
    model: str
    wanted: float
    published: str
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.data}-{self.model}"

    def command(self, workers: int) -> str:
        """The command line that makes one of these runs."""
        flags = "".join(f" --{k.replace('_', '-')} {v}" for k, v in self.overrides.items())
        return (
            f"graphshard train --data {self.data} --model {self.model} --workers {workers}{flags} "
            "--seed SEED"
        )


SETTINGS = [
    Setting(data="cora", model="gcn", wanted=80.5, published="81.5 (Kipf and Welling 2017)"),
    Setting(data="cora", model="gat", wanted=81.5, published="83.0 (Velickovic et al. 2018)"),
    Setting(data="citeseer", model="gcn", wanted=69.5, published="70.3 (Kipf and Welling 2017)"),
    Setting(
        data="aifb",
        model="rgcn",
        wanted=92.0,
        published="95.83 (Schlichtkrull et al. 2018)",
        overrides={"weight_decay": 0.0},  # as in the paper
    ),
    Setting(data="mutag", model="rgcn", wanted=70.0, published="73.23 (Schlichtkrull et al. 2018)"),
    Setting(
        data="coauthor-physics",
        model="gcn",
        wanted=92.0,
        published="92.8 (Shchur et al. 2018, other splits)",
        overrides={"lr": 0.02, "epochs": 25, "eval_every": 5},
    ),
]


def main() -> None:
    """Run the settings that the command line chooses, or be one of the workers."""
    if len(sys.argv) == 3 and sys.argv[1] == "--rank":
        run_as_worker(lambda: rank_work(json.loads(sys.argv[2])))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="settings whose name has this in it")
    parser.add_argument("--workers", default="2,4", help="numbers of workers")
    parser.add_argument("--seeds", type=int, default=10, help="seeds 0, 1, ...")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    arguments = parser.parse_args()
    if DATASETS_VARIABLE not in os.environ:
        os.environ[DATASETS_VARIABLE] = str(ROOT.parent / "shared" / "datasets")
    chosen = [s for s in SETTINGS if arguments.only in s.name]
    if not chosen:
        parser.error(f"--only matches none of {', '.join(s.name for s in SETTINGS)}")
    for setting in chosen:
        for workers in [int(n) for n in arguments.workers.split(",")]:
            record = measure(setting, workers, arguments.seeds)
            write(arguments.results, setting, workers, record)


def measure(setting: Setting, workers: int, num_seeds: int) -> dict[str, Any]:
    """Run one setting over its seeds; returns what the page needs."""
    start = time.perf_counter()
    runs: list[dict[str, Any]] = []

    def on_event(event: dict[str, Any]) -> None:
        runs.append(event)
        print(
            f"{setting.name} on {workers}: seed {event['seed']} test {100 * event['test']:.2f} "
            f"(epoch {event['epoch']}; last {100 * event['last']:.2f}), "
            f"{event['seconds_per_epoch']:.3f} s/epoch",
            flush=True,
        )

    with tempfile.TemporaryDirectory() as folder:
        parts = partition_dataset(read_dataset(setting.data), workers, folder)
        job = {"data": str(parts), "model": setting.model, "seeds": num_seeds, **setting.overrides}
        outcome = launch_workers(
            [sys.executable, __file__, "--rank", json.dumps(job)],
            workers,
            timeout=120,
            on_event=on_event,
        )
    if outcome.exit_code:
        sys.exit(outcome.report())
    return {"runs": runs, "seconds": time.perf_counter() - start}


def rank_work(job: dict[str, Any]) -> Callable[[], None]:
    """Set up one worker; returns its work: a run for each seed."""
    num_seeds = job.pop("seeds")
    first = FullBatchConfig(**job)
    graphshard.initialize_comms(timeout=120)
    shard = load_shard(first.resolved())

    def work() -> None:
        for seed in range(num_seeds):
            run = FullBatchRun(FullBatchConfig(**job, seed=seed), shard=shard)
            result = run.train()
            send_event(
                {
                    "seed": seed,
                    "test": result.best.accuracy["test"],
                    "last": result.last.accuracy["test"],
                    "epoch": result.best.epoch,
                    "seconds_per_epoch": result.seconds_per_epoch,
                    "peak_memory": max(result.peak_memory),
                    "bytes_per_epoch": sum(result.bytes_per_epoch),
                }
            )
        graphshard.shutdown_comms()

    return work


def write(folder: Path, setting: Setting, workers: int, record: dict[str, Any]) -> None:
    """Merge a result into today's file and write the page anew."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"accuracy_cpu_{datetime.date.today().isoformat()}"
    raw = folder / f"{stem}.json"
    content = json.loads(raw.read_text()) if raw.exists() else {}
    content[f"{setting.name}/{workers}"] = {
        "wanted": setting.wanted,
        "published": setting.published,
        "command": setting.command(workers),
        **record,
    }
    raw.write_text(json.dumps(content, indent=1) + "\n")
    (folder / f"{stem}.md").write_text(page(content))


def page(content: dict[str, Any]) -> str:
    """The Markdown page of all results so far."""
    lines = [
        f"# Accuracy, CPU, {datetime.date.today().isoformat()}",
        "",
        f"graphshard {graphshard.__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores, "
        f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'cores / workers')}.",
        "",
        "Command: `python benchmarks/accuracy.py`. Test accuracy in percent, mean and standard "
        "deviation over the seeds,",
        "of the epoch with the best validation accuracy (where there are no validation nodes: the "
        "last epoch), and of the last epoch.",
        "METIS partitions, row-normalised features and self loops for citation graphs, inverse "
        "relations for AIFB and MUTAG.",
        "",
        "| setting | workers | seeds | test accuracy | last epoch | wanted | published | s/epoch "
        "| bytes/epoch |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for key in sorted(content):
        entry, (name, workers) = content[key], key.split("/")
        runs = entry["runs"]
        seconds = statistics.mean(run["seconds_per_epoch"] for run in runs)
        lines.append(
            f"| {name} | {workers} | {len(runs)} | {spread(runs, 'test')} | "
            f"{spread(runs, 'last')} | {entry['wanted']} | {entry['published']} | {seconds:.3f} | "
            f"{runs[0]['bytes_per_epoch']:,} |"
        )
    lines += ["", "One run of each setting, for SEED from 0:", "", "```sh"]
    lines += [content[key]["command"] for key in sorted(content)]
    lines += ["```", ""]
    return "\n".join(lines)


def spread(runs: list[dict[str, Any]], what: str) -> str:
    """Mean and standard deviation, in percent."""
    values = [100 * run[what] for run in runs]
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.2f} ± {deviation:.2f}"


if __name__ == "__main__":
    main()
