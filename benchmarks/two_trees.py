# SPDX-License-Identifier: Apache-2.0
"""Full-batch training of this tree beside that of another one: time, memory, losses to the bit.

    git worktree add --detach ../before COMMIT      # and install it there, in a .venv of its own
    python benchmarks/two_trees.py ../before
    python benchmarks/two_trees.py ../before --case sage:sequential:2 --rounds 5

Each case (model, mode, workers) is run by `benchmarks/full_batch.py` of either tree, in turn, the
order changing from round to round, with one thread for each worker. A ratio is this tree over the
other, of medians and of minima; CPU seconds are those of all workers, start included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import full_batch
from _common import community_graph

ROOT = Path(__file__).resolve().parent.parent
CASES = ("sage:oneshot:2", "sage:sequential:2", "gat:oneshot:2", "gat:sequential:2")
FIGURES = {"cpu": "CPU s", "seconds": "s per epoch", "peak_mb": "peak MB per worker"}


def run(tree: Path, parts: str, model: str, mode: str, workers: str, epochs: int) -> dict[str, Any]:
    """What the workers of one tree report, and their CPU seconds."""
    python = tree / ".venv" / "bin" / "python"
    command = [str(python), "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={workers}", str(tree / "benchmarks" / "full_batch.py")]
    command += ["--work", parts, "--model", model, "--mode", mode, "--epochs", str(epochs)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    assert process.stdout is not None
    lines = [line for line in process.stdout if line.startswith("{")]
    _, status, usage = os.wait4(process.pid, 0)
    if status or not lines:
        raise SystemExit(f"{' '.join(command)} ended with {status}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found | {"cpu": usage.ru_utime + usage.ru_stime}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("before", type=Path, help="the other tree")
    parser.add_argument("--case", action="append", help="model:mode:workers")
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--edges", type=int, default=1_050_000, help="pairs drawn")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    trees = {"before": args.before.resolve(), "now": ROOT}
    graph = community_graph(args.folder, args.nodes, args.edges)
    print("| case | losses | " + " | ".join(FIGURES.values()) + " |")
    print("| --- | --- |" + " --- |" * len(FIGURES))
    for case in args.case or CASES:
        model, mode, workers = case.split(":")
        parts = full_batch.our_parts(graph, int(workers))
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
        for number in range(args.rounds):
            for name in sorted(trees, reverse=bool(number % 2)):
                found[name].append(run(trees[name], parts, model, mode, workers, args.epochs))
        same = all(r["losses"] == found["now"][0]["losses"] for f in found.values() for r in f)
        cells = []
        for figure in FIGURES:
            before, now = ([r[figure] for r in found[name]] for name in trees)
            middle = statistics.median(now) / statistics.median(before)
            cells.append(
                f"{statistics.median(before):.2f} to {statistics.median(now):.2f}: "
                f"{middle:.2f}x ({min(now) / min(before):.2f}x of minima)"
            )
        print(f"| {case} | {'equal' if same else 'differ'} | {' | '.join(cells)} |", flush=True)
    print(f"\nCommand: `python {' '.join(['benchmarks/two_trees.py', *sys.argv[1:]])}`")


if __name__ == "__main__":
    main()
