# SPDX-License-Identifier: Apache-2.0
"""What the other benchmarks measure of this tree, beside the same of another one.

    git worktree add --detach ../before COMMIT      # and install it there, in a .venv of its own
    python benchmarks/two_trees.py ../before
    python benchmarks/two_trees.py ../before --case full_batch:sage:sequential --rounds 5

Each case is a side of one of the scripts beside this one. Either tree's Python runs its own tree's
script, or this tree's where the other has none, in turn, the order changing from round to round,
with one thread for each process. A ratio is this tree over the other, of medians and of minima; the
spread is that of the other tree's rounds, largest over smallest. CPU seconds are those of all
processes, start included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import full_batch
from _common import ROOT, community_graph

import sampling

HERE = Path(__file__).resolve().parent
Figures: TypeAlias = dict[str, float]
#: What a worker prints, and in which unit a table has it.
UNITS = {"seconds": "s", "peak_mb": "MB", "peak": "bytes", "cpu": "CPU s"}


def torchrun(workers: int, script: str, *arguments: str) -> list[str]:
    """Arguments for Python: some workers of a script."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    return [*launch, str(HERE / script), *arguments]


def cases(
    graph: Path, folder: Path, args: argparse.Namespace
) -> dict[str, Callable[[], list[str]]]:
    """By name, what makes the arguments for Python; it prepares what they need."""
    found: dict[str, Callable[[], list[str]]] = {}
    epochs = str(args.epochs)

    def full(model: str, mode: str) -> Callable[[], list[str]]:
        return lambda: torchrun(
            2, "full_batch.py", "--work", full_batch.our_parts(graph, 2), "--model", model,
            "--mode", mode, "--epochs", epochs,
        )  # fmt: skip

    def memory(model: str, mode: str) -> Callable[[], list[str]]:
        def prepare() -> list[str]:
            parts = {"parts": 100_000, "tiny": 64}
            for name, nodes in parts.items():
                if not (folder / name / "g.json").exists():
                    options = ["--partition", str(folder / name), "--nodes", str(nodes)]
                    script = [sys.executable, str(HERE / "memory.py"), *options]
                    subprocess.run([*script, "--degree", "20", "--parts", "2"], check=True)
            where = [str(folder / name / "g.json") for name in parts]
            options = ["--work", where[0], "--tiny", where[1], "--model", model, "--mode", mode]
            return torchrun(2, "memory.py", *options, "--epochs", "2")

        return prepare

    def shared(transport: str, hidden: int) -> Callable[[], list[str]]:
        return lambda: torchrun(
            2, "sampling.py", "--work", sampling.our_parts(graph), "--hidden", str(hidden),
            "--transport", transport, "--epochs", epochs,
        )  # fmt: skip

    for model in ("sage", "gat"):
        for mode in ("sequential", "oneshot"):
            found[f"full_batch:{model}:{mode}"] = full(model, mode)
            found[f"memory:{model}:{mode}"] = memory(model, mode)
    found["sampling:draw"] = lambda: [
        str(HERE / "sampling.py"), "--work", str(graph), "--hidden", "0", "--epochs", epochs
    ]  # fmt: skip
    for transport in ("collective", "replicated"):
        found[f"sampling:fetch:{transport}"] = shared(transport, 0)
        found[f"sampling:epoch:{transport}"] = shared(transport, 128)
    found["start"] = lambda: torchrun(2, "start_and_reads.py", "start")
    found["reads"] = lambda: [str(HERE / "start_and_reads.py"), "reads", str(folder)]
    for layer in ("gat", "gatv2", "dotgat", "agnn"):
        command = [str(HERE / "attention.py"), "--work", str(graph), "--layer", layer]
        found[f"attention:{layer}"] = lambda command=command: command  # type: ignore[misc]
    for layer in ("sage", "gat", "gatv2"):
        command = [str(HERE / "blocks.py"), "--layer", layer]
        found[f"block:{layer}"] = lambda command=command: command  # type: ignore[misc]
    sizes = ["--nodes", str(args.nodes), "--edges", str(args.edges), "--graphs", str(graph.parent)]
    for dtype in ("float32", "bfloat16"):
        command = [str(HERE / "kernels.py"), "--own", "--dtypes", dtype, *sizes]
        found[f"kernels:{dtype}"] = lambda command=command: ordered(command)  # type: ignore[misc]
    return found


def ordered(command: list[str]) -> list[str]:
    """The same, after this tree has written the order of nodes that either tree measures."""
    brief = ["--ops", "dot", "--widths", "64", "--passes", "forward", "--orders", "locality"]
    subprocess.run(
        [sys.executable, *command, *brief, "--rounds", "1"], check=True, stdout=subprocess.DEVNULL
    )
    return command


def run(tree: Path, command: list[str]) -> tuple[Figures, Any]:
    """Figures of one run in a tree, and its losses if it trains."""
    python, own = tree / ".venv" / "bin" / "python", tree / "benchmarks"
    for i, word in enumerate(command):
        script = own / Path(word).name
        if Path(word).parent == HERE and script.exists():
            command = [*command[:i], str(script), *command[i + 1 :]]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [str(python), *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    with tempfile.TemporaryFile("w+") as errors:
        lines = [line for line in process.stdout if line.startswith("{")]
        errors.write(process.stderr.read()[-4000:])
        _, status, usage = os.wait4(process.pid, 0)
        if status or not lines:
            errors.seek(0)
            raise SystemExit(f"{' '.join(command)} ended with {status}: {errors.read()}")
    printed: list[dict[str, Any]] = [json.loads(line) for line in lines]
    figures: Figures = {"cpu": usage.ru_utime + usage.ru_stime}
    losses = printed[-1].get("losses")
    for one in printed:
        for key, value in one.items():
            if key in UNITS or " " in key:
                figures[key] = max(value, figures.get(key, value))
    return figures, losses


def compared(before: list[float], now: list[float]) -> str:
    """Both medians, ratios of medians and minima, and the spread of the rounds before."""
    middles = statistics.median(before), statistics.median(now)
    return (
        f"{middles[0]:.4g} | {middles[1]:.4g} | {middles[1] / middles[0]:.3f} | "
        f"{min(now) / min(before):.3f} | {max(before) / min(before):.3f}"
    )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("before", type=Path, help="the other tree")
    parser.add_argument("--case", action="append", help="only cases that begin so")
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--edges", type=int, default=1_050_000, help="pairs drawn")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    trees: Mapping[str, Path] = {"before": args.before.resolve(), "now": ROOT}
    graph = community_graph(args.folder, args.nodes, args.edges)
    wanted = tuple(args.case or [""])
    print("| case | figure | before | now | now / before | of minima | spread before |")
    print("| --- |" + " --- |" * 6)
    for case, prepare in cases(graph, args.folder, args).items():
        if not case.startswith(wanted):
            continue
        command = prepare()
        found: dict[str, list[Figures]] = {name: [] for name in trees}
        losses = []
        for number in range(args.rounds):
            for name in sorted(trees, reverse=bool(number % 2)):
                figures, loss = run(trees[name], command)
                found[name].append(figures)
                losses.append(loss)
        if losses[0] is not None:
            same = all(loss == losses[0] for loss in losses)
            print(f"| {case} | losses | | | {'equal to the bit' if same else 'differ'} | | |")
        for key in found["now"][0]:
            both = ([figures[key] for figures in found[name]] for name in ("before", "now"))
            print(f"| {case} | {UNITS.get(key, key)} | {compared(*both)} |", flush=True)
    print(f"\nCommand: `python {' '.join(['benchmarks/two_trees.py', *sys.argv[1:]])}`")


if __name__ == "__main__":
    main()
