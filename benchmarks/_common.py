# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: the graph, runs side by side, and files of results.

A benchmark compares *sides*. Each side is a command in a process of its own that prints one line
of JSON; the sides run in turn, several rounds of them, and ratios of medians are reported: on a
noisy machine nothing else means much.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PEERS = ROOT / "benchmarks" / "peers"
#: Python of an environment with DGL 1.1.3 and PyG, such as `make peer` makes.
PEER_PYTHON = os.environ.get("GRAPHSHARD_PEER_PYTHON", sys.executable)

NO_PYG = "PyG is left out: the peers' environment has none; `make peer` makes one that has."


@dataclass(frozen=True)
class Side:
    """One of the programs that are compared.

    Args:
        name: What tables call it.
        command: Program and arguments; its last line of JSON is the result.
        environment: Variables to set, besides the caller's.
        timeout: Seconds that it may take.
        may_fail: Whether a run that fails is a result too, ``{"failed": reason}``: that a program
            cannot do this on this machine is an answer.
        once: Whether it takes so long, or so much, that it runs in the last round alone.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 1200.0
    may_fail: bool = False
    once: bool = False


def peer_has(module: str) -> bool:
    """Whether the peers' environment has a module."""
    found = subprocess.run(
        [PEER_PYTHON, "-c", f"import {module}"], capture_output=True, check=False
    )
    return found.returncode == 0


def run_side(side: Side) -> dict[str, Any]:
    """Run a side once.

    Raises:
        RuntimeError: It failed or printed no result, and must not.
        subprocess.TimeoutExpired: It took too long, and must not.
    """
    try:
        done = subprocess.run(
            list(side.command),
            capture_output=True,
            text=True,
            timeout=side.timeout,
            env={**os.environ, **side.environment},
            check=False,
        )
    except subprocess.TimeoutExpired:
        if side.may_fail:
            return {"failed": f"took longer than {side.timeout:.0f} s"}
        raise
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        if side.may_fail:
            return {"failed": reason(done)}
        raise RuntimeError(
            f"{side.name} failed with {done.returncode}:\n"
            f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def reason(done: subprocess.CompletedProcess[str]) -> str:
    """Why a program failed, in one line."""
    if done.returncode < 0:
        return f"ended by {signal.Signals(-done.returncode).name}"
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return said[-1][:200] if said else f"exit status {done.returncode}, no result"


def run_in_turn(sides: Sequence[Side], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Results of ``rounds`` rounds, in each of which every side runs once.

    A side that failed, and may, has no further run: its only result says why. Nor has one that runs
    once.
    """
    results: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
    for number in range(rounds):
        for side in sides:
            runs = results[side.name]
            if any("failed" in run for run in runs) or (side.once and number + 1 < rounds):
                continue
            runs.append(run_side(side))
            if "failed" in runs[-1]:
                del runs[:-1]
            sys.stderr.write(f"round {number + 1}/{rounds} {side.name}: {runs[-1]}\n")
    return results


def split_failed(
    results: Mapping[str, list[dict[str, Any]]],
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Results of the sides that have numbers, and for each of the others the reason."""
    failed = {name: str(runs[0]["failed"]) for name, runs in results.items() if "failed" in runs[0]}
    return {name: runs for name, runs in results.items() if name not in failed}, failed


def median(results: Sequence[Mapping[str, Any]], key: str) -> float:
    """Median of one number over the rounds."""
    return statistics.median(float(r[key]) for r in results)


def write_result(name: str, title: str, body: Sequence[str]) -> Path:
    """Write ``results/<name>_cpu_<date>.md`` with command, versions and machine; print it too."""
    import torch

    text = "\n".join(
        [
            f"# {title}",
            "",
            *body,
            "",
            f"Command: `python benchmarks/{' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}`  ",
            f"{datetime.date.today()}, Python {platform.python_version()}, "
            f"torch {torch.__version__}, {os.cpu_count()} cores.",
            "",
        ]
    )
    sys.stdout.write(text)
    path = RESULTS / f"{name}_cpu_{datetime.date.today()}.md"
    path.write_text(text)
    return path


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "| " + " | ".join("---" for _ in header) + " |"]
    return lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]


def merge_runs(
    name: str,
    cases: Sequence[Any],
    parser: argparse.ArgumentParser,
    measure: Callable[[Any, int, argparse.Namespace], tuple[dict[str, Any], str]],
    page: Callable[[dict[str, Any], str], str],
) -> None:
    """Run cases with seeds, and merge what comes out into ``results/NAME_DATE.json`` and ``.md``.

    Every run is written when it ends, so that a table comes from several calls, and goes on where
    one was stopped. Data sets are those of GRAPHSHARD_DATASETS, or of ``../shared/datasets``.

    Args:
        cases: Each has a ``name`` of its own and the ``data`` set; ``--only`` takes some by these.
        parser: Has the program's own options, and ``--seeds``.
        measure: Gives the values of a run, from case, seed and arguments, and what to print.
        page: Makes the page, from the results, ``{"runs": {name: {seed: values}}}``, and the date.
    """
    parser.add_argument("--only", default="", help="data sets, or lines of them, between commas")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds of a command")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--page", action="store_true", help="write the page alone")
    arguments = parser.parse_args()
    os.environ.setdefault("GRAPHSHARD_DATASETS", str(ROOT.parent / "shared" / "datasets"))
    path = RESULTS / f"{name}_{arguments.date}.json"
    results = json.loads(path.read_text()) if path.exists() else {"runs": {}}
    only = {part for part in arguments.only.split(",") if part}
    for case in [] if arguments.page else cases:
        if only and not {case.name, case.data} & only:
            continue
        for seed in arguments.seeds.split(","):
            values, said = measure(case, int(seed), arguments)
            results["runs"].setdefault(case.name, {})[seed] = values
            print(f"{case.name}, seed {seed}: {said}", flush=True)
            path.write_text(json.dumps(results, indent=1) + "\n")
    path.with_suffix(".md").write_text(page(results, arguments.date))


def machine() -> str:
    """Versions and machine, as a page of results says them."""
    import torch

    return (
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, "
        f"{os.cpu_count()} cores shared with other jobs"
    )


def card_of(name: str) -> str:
    """What files of results call a GPU: "h100" for "NVIDIA H100 80GB HBM3"."""
    found = re.search(r"\b[A-Z]{1,3} ?\d{2,4}", name)
    return found[0].replace(" ", "").lower() if found else "gpu"


def community_graph(folder: Path, nodes: int, edges: int) -> Path:
    """A degree-corrected graph of 200 communities with features and labels, as an npz file.

    ``edges`` pairs are drawn, made undirected and de-duplicated: of 2,100,000 pairs among 200,000
    nodes 4.07 million directed edges remain. Degrees follow a power law; seven edges in ten stay
    inside a community. 128 features, 40 classes; half of the nodes train.
    """
    path = folder / f"community-{nodes}-{edges}.npz"
    if path.exists():
        return path
    rng = np.random.default_rng(0)
    community = rng.integers(0, 200, nodes)
    members = np.argsort(community, kind="stable")
    begins = np.searchsorted(community[members], np.arange(201))
    weights = rng.permutation(np.arange(1, nodes + 1) ** -0.6)
    cumulative = np.cumsum(weights) / weights.sum()
    src = np.searchsorted(cumulative, rng.random(edges)).clip(0, nodes - 1)
    dst = np.searchsorted(cumulative, rng.random(edges)).clip(0, nodes - 1)
    low, high = begins[community[src]], begins[community[src] + 1]
    place = (low + (rng.random(edges) ** 2 * (high - low)).astype(np.int64)).clip(0, nodes - 1)
    dst = np.where(rng.random(edges) < 0.7, members[place], dst)
    src, dst = src[src != dst], dst[src != dst]
    pairs = np.unique(np.concatenate([src * nodes + dst, dst * nodes + src]))
    rng = np.random.default_rng(1)
    centers = rng.standard_normal((200, 128)).astype(np.float32)
    noise = rng.standard_normal((nodes, 128), dtype=np.float32)
    split = rng.random(nodes)
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(
        path,
        src=pairs // nodes,
        dst=pairs % nodes,
        x=(centers[community] * 0.3 + noise).astype(np.float32),
        y=(community % 40).astype(np.int64),
        train=split < 0.5,
    )
    return path
