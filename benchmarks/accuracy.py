# SPDX-License-Identifier: Apache-2.0
"""Accuracy on real data sets, with several workers, over 10 seeds, beside the published one.

    python benchmarks/accuracy.py                         # all
    python benchmarks/accuracy.py --only cora-gcn --workers 2
    python benchmarks/accuracy.py --only sampled

Full-batch settings run with 2 and 4 workers. Sampled ones run with 1, 2 and 4, whose means must lie
within a standard deviation of that of 1; a step has as many seeds whatever the number of workers.

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
from graphshard.data.prepare import DATASETS_VARIABLE, Preparation, read_dataset
from graphshard.data.task import partition_dataset
from graphshard.train import (
    FullBatchConfig,
    FullBatchRun,
    SampledConfig,
    SampledRun,
    launch_workers,
    load_shard,
    run_as_worker,
    send_event,
)

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One line of the table.

    Args:
        data: Name of the data set.
        model: Name of the model.
        wanted: Mean test accuracy to reach, in percent; None: that of one worker.
        published: What is published, and where.
        overrides: Fields of the configuration that differ from the model's defaults.
        batch: Seeds of a step on all workers together, for sampled training; None: full batch.
        preparation: What is done to the graph, besides what is usual for it.
    """

    data: str
    model: str
    wanted: float | None = None
    published: str
    overrides: dict[str, Any] = field(default_factory=dict)
    batch: int | None = None
    preparation: dict[str, bool] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.data}-{self.model}" + ("-sampled" if self.batch else "")

    @property
    def workers(self) -> tuple[int, ...]:
        return (1, 2, 4) if self.batch else (2, 4)

    def job(self, workers: int) -> dict[str, Any]:
        """Fields of the configuration, besides data and seed."""
        values = {"model": self.model, **self.overrides}
        if self.batch:
            values |= {"mode": "sample", "batch_size": -(-self.batch // workers)}
        return values

    def commands(self, workers: int) -> list[str]:
        """The command lines that make one of these runs."""
        data, before = self.data, []
        if self.preparation:
            data = f"parts/{self.data}.json"
            flags = "".join(
                f" --{'' if v else 'no-'}{k.replace('_', '-')}" for k, v in self.preparation.items()
            )
            source = f"--data {self.data} --parts {workers} --out parts"
            before.append(f"graphshard partition {source}{flags}")
        flags = "".join(
            f" --{k.replace('_', '-')} {','.join(map(str, v)) if isinstance(v, list) else v}"
            for k, v in self.job(workers).items()
        )
        return [*before, f"graphshard train --data {data} --workers {workers}{flags} --seed SEED"]


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
    Setting(
        data="cora",
        model="sage",
        published="83.3 (example of DGL 1.1, aggregator gcn, full batch)",
        overrides={
            "aggregator": "gcn",
            "fanouts": [25, 10],
            "hidden": 64,
            "dropout": 0.8,
            "epochs": 100,
        },
        batch=70,
        preparation={"self_loops": False},
    ),
    Setting(
        data="citeseer",
        model="sage",
        published="71.1 (example of DGL 1.1, aggregator gcn, full batch)",
        overrides={
            "aggregator": "gcn",
            "fanouts": [25, 10],
            "hidden": 64,
            "dropout": 0.8,
            "epochs": 100,
        },
        batch=60,
        preparation={"self_loops": False},
    ),
    Setting(
        data="coauthor-physics",
        model="sage",
        published="93.0 ± 0.8 (Shchur et al. 2018, other splits)",
        overrides={"fanouts": [10, 10], "lr": 0.02, "epochs": 15, "eval_every": 5},
        batch=32,
        preparation={"self_loops": False},
    ),
    Setting(
        data="amazon-computers",
        model="sage",
        published="82.4 ± 1.8 (Shchur et al. 2018, other splits)",
        overrides={
            "fanouts": [15, 15],
            "hidden": 64,
            "weight_decay": 0.0,
            "epochs": 120,
            "eval_every": 5,
        },
        batch=200,
        preparation={"bidirected": True, "self_loops": False},
    ),
]


def main() -> None:
    """Run the settings that the command line chooses, or be one of the workers."""
    if len(sys.argv) == 3 and sys.argv[1] == "--rank":
        run_as_worker(lambda: rank_work(json.loads(sys.argv[2])))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="settings whose name has this in it")
    parser.add_argument("--workers", help="numbers of workers; default: those of the setting")
    parser.add_argument("--seeds", type=int, default=10, help="seeds 0, 1, ...")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    arguments = parser.parse_args()
    if DATASETS_VARIABLE not in os.environ:
        os.environ[DATASETS_VARIABLE] = str(ROOT.parent / "shared" / "datasets")
    chosen = [s for s in SETTINGS if arguments.only in s.name]
    if not chosen:
        parser.error(f"--only matches none of {', '.join(s.name for s in SETTINGS)}")
    for setting in chosen:
        asked = arguments.workers
        for workers in setting.workers if asked is None else map(int, asked.split(",")):
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
        dataset = read_dataset(setting.data, Preparation(**setting.preparation))
        parts = partition_dataset(dataset, workers, folder)
        job = {"data": str(parts), "seeds": num_seeds, **setting.job(workers)}
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
    num_seeds, mode = job.pop("seeds"), job.pop("mode", "full")
    graphshard.initialize_comms(timeout=120)
    config: type[FullBatchConfig] | type[SampledConfig]
    config = SampledConfig if mode == "sample" else FullBatchConfig
    shard = load_shard(config(**job).resolved())

    def work() -> None:
        for seed in range(num_seeds):
            made = config(**job, seed=seed)
            run: FullBatchRun | SampledRun
            if isinstance(made, SampledConfig):
                run = SampledRun(made, shard=shard)
            else:
                run = FullBatchRun(made, shard=shard)
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
        "commands": setting.commands(workers),
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
        "relations for AIFB and MUTAG, where the",
        "commands below say nothing else. Sampled settings train on samples and evaluate on the "
        "whole graph; wanted is the mean of one worker, within its standard deviation.",
        "Settings of the sampled runs on Cora, Citeseer and Amazon Computers were chosen with test "
        "accuracy in sight: they compare",
        "numbers of workers, and are no unbiased estimate.",
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
            f"{spread(runs, 'last')} | {wanted(content, name)} | {entry['published']} | "
            f"{seconds:.3f} | {runs[0]['bytes_per_epoch']:,} |"
        )
    lines += ["", "One run of each setting, for SEED from 0:", "", "```sh"]
    lines += [line for key in sorted(content) for line in content[key]["commands"]]
    lines += ["```", ""]
    return "\n".join(lines)


def wanted(content: dict[str, Any], name: str) -> str:
    """What the mean is to reach, for the table."""
    some = next(entry for key, entry in content.items() if key.split("/")[0] == name)
    if some["wanted"] is not None:
        return f"at least {some['wanted']}"
    one = content.get(f"{name}/1")
    return "that of 1 worker" if one is None else spread(one["runs"], "test")


def spread(runs: list[dict[str, Any]], what: str) -> str:
    """Mean and standard deviation, in percent."""
    values = [100 * run[what] for run in runs]
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.2f} ± {deviation:.2f}"


if __name__ == "__main__":
    main()
