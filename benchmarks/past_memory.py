# SPDX-License-Identifier: Apache-2.0
"""Runs with features three times as large as the memory allowed, against in memory.

    python benchmarks/past_memory.py                     # 4.2 GB of features, 1.3 GiB of memory
    python benchmarks/past_memory.py --write             # and a file of results

A graph of communities is made and partitioned into one part. It is trained on samples, the model of
that run predicts, and it is trained in full batch: in turn with features in memory, without a
limit, and with ``memory=`` in a control group of that limit, in which the file cache counts, too;
where this machine lets nobody make one, under a limit of the process's own data (RLIMIT_DATA).
Before each run in a group the system is told to forget the files. ``--questions`` chooses.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import ROOT, Side, markdown_table, run_side, write_result

import graphshard
from graphshard.train import FullBatchConfig, FullBatchRun, SampledConfig, SampledRun, predict

CLASSES = 16
BLOCK = 50_000


def make(folder: Path, args: argparse.Namespace) -> None:
    """Partition a graph whose nodes mostly have neighbours nearby, and some far away."""
    random = torch.Generator().manual_seed(1)
    number = args.nodes * args.degree // 2
    dst = torch.randint(0, args.nodes, (number,), generator=random)
    near = dst + (torch.randn(number, generator=random) * args.nodes / 200).long()
    far = (torch.rand(number, generator=random) ** 3 * args.nodes).long()
    is_far = torch.rand(number, generator=random) < 0.2
    src = torch.where(is_far, far, near.remainder(args.nodes)).clamp(max=args.nodes - 1)
    graph = graphshard.graph((torch.cat([src, dst]), torch.cat([dst, src])), num_nodes=args.nodes)
    features = torch.empty(args.nodes, args.width)
    for start in range(0, args.nodes, BLOCK):
        # Numbers of few digits, which are made quickly.
        rows = features[start : start + BLOCK]
        rows.copy_(torch.randint(-99, 99, rows.shape, generator=random, dtype=torch.int8))
    graph.ndata["feat"] = features.div_(50)
    graph.ndata["label"] = torch.randint(0, CLASSES, (args.nodes,), generator=random)
    order = torch.randperm(args.nodes, generator=random)
    for split, start, stop in (("train", 0, 20_000), ("val", 20_000, 30_000)):
        mask = torch.zeros(args.nodes, dtype=torch.bool)
        mask[order[start:stop]] = True
        graph.ndata[f"{split}_mask"] = mask
    graphshard.partition_graph(graph, "g", 1, folder, part_method="multilevel", quiet=True)


def status() -> dict[str, int]:
    """What the system says of this process's memory, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    words = [line.split() for line in lines if line.startswith(("Vm", "Rss"))]
    return {word[0].rstrip(":"): int(word[1]) // 1024 for word in words}


def limit_process(args: argparse.Namespace) -> None:
    """Put this process under the limit that it is told."""
    if args.group:
        (Path(args.group) / "cgroup.procs").write_text(str(os.getpid()))
    if args.data_limit:
        resource.setrlimit(resource.RLIMIT_DATA, (args.data_limit, args.data_limit))
    torch.set_num_threads(args.threads)


def answer_with(args: argparse.Namespace, answer: dict[str, Any]) -> None:
    """Print what a run took, and the memory of this process."""
    found = status()
    answer |= {"peak": found["VmHWM"], "own": found["RssAnon"]}
    if args.group:
        for name in ("memory.max_usage_in_bytes", "memory.peak"):
            with contextlib.suppress(OSError):
                answer["group"] = int((Path(args.group) / name).read_text()) >> 20
    sys.stdout.write(json.dumps(answer) + "\n")


def ask(args: argparse.Namespace) -> None:
    """Predictions in this process; prints what they took."""
    limit_process(args)
    data, run = args.folder / "g.json", args.folder / "run"
    before, start = time.process_time(), time.perf_counter()
    table = predict(data, run, device="cpu", memory=args.memory or None)
    seconds = time.perf_counter() - start
    columns = np.stack([table[f"p_{number}"].to_numpy() for number in range(CLASSES)])
    # Digits that rounding leaves alone, and all.
    digest = float((columns * np.arange(1, CLASSES + 1)[:, None]).sum(dtype=np.float64))
    answer = {"seconds": seconds, "cpu": time.process_time() - before, "loss": digest}
    answer_with(args, answer)


def train_whole(args: argparse.Namespace) -> None:
    """A run in full batch in this process; prints what it took."""
    limit_process(args)
    config = FullBatchConfig(
        data=str(args.folder / "g.json"),
        model="sage",
        hidden=64,
        lr=0.01,
        dropout=0.0,
        epochs=args.epochs + 1,
        eval_every=args.epochs + 1,
        both_directions=False,
        encoder=False,
        norm=False,
        memory=args.memory or None,
    )
    start = time.perf_counter()
    notes: list[str] = []
    run = FullBatchRun(config, progress=lambda each: notes.append(each.note or ""))
    ready, before = time.perf_counter(), time.process_time()
    result = run.train()
    answer = {
        "loss": result.losses,
        "epoch": result.seconds_per_epoch,
        "evaluation": result.seconds_per_evaluation,
        "set up": ready - start,
        "cpu": time.process_time() - before,
        "notes": [note for note in notes if "plan" in note],
    }
    answer_with(args, answer)


def train(args: argparse.Namespace) -> None:
    """A sampled run in this process; prints what it took."""
    limit_process(args)
    if not args.memory:
        shutil.rmtree(args.folder / "run", ignore_errors=True)
    config = SampledConfig(
        data=str(args.folder / "g.json"),
        model="sage",
        hidden=64,
        lr=0.01,
        dropout=0.2,
        epochs=args.epochs,
        eval_every=args.epochs,
        fanouts=(10, 5),
        batch_size=256,
        both_directions=False,
        encoder=False,
        norm=False,
        memory=args.memory or None,
        run=None if args.memory else str(args.folder / "run"),
    )
    start = time.perf_counter()
    run = SampledRun(config)
    ready = time.perf_counter()
    before = time.process_time()
    result = run.train()
    sampling = result.sampling
    assert sampling is not None
    answer = {
        "loss": result.losses,
        "epoch": result.seconds_per_epoch,
        "waiting": sampling.seconds_waiting,
        "evaluation": result.seconds_per_evaluation,
        "set up": ready - start,
        "cpu": time.process_time() - before,
        "hits": sampling.cache_hit_rate or 0.0,
    }
    answer_with(args, answer)


ROLES = {"sample": train, "predict": ask, "full": train_whole}


@contextlib.contextmanager
def control_group(limit: int) -> Iterator[Path | None]:
    """A control group that limits memory; None where none can be made."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    folders = []
    for line in lines:
        _, names, path = line.split(":", 2)
        if names == "memory":
            folders.append((Path("/sys/fs/cgroup/memory" + path), "memory.limit_in_bytes"))
        elif not names:
            folders.append((Path("/sys/fs/cgroup" + path), "memory.max"))
    for parent, name in folders:
        group = parent / f"past-memory-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / name).write_text(str(limit))
        except OSError:
            group.rmdir()
            continue
        try:
            yield group
        finally:
            with contextlib.suppress(OSError):
                group.rmdir()
        return
    yield None


def forget(folder: Path) -> None:
    """Have the system forget what it keeps of files."""
    for path in folder.rglob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


WORDS = {
    "sample": "Sampled training, fanouts 10,5, batches of 256, 20,000 training nodes",
    "predict": "Predictions of all nodes",
    "full": "Training in full batch, without dropout",
}
HEADS = {
    "epoch": "s per epoch",
    "waiting": "of it waiting",
    "evaluation": "s per evaluation",
    "set up": "s to set up",
    "seconds": "s",
    "cpu": "CPU s",
}


def compared(
    args: argparse.Namespace, question: str, command: Sequence[str], folder: Path
) -> list[str]:
    """Runs in turn, features in memory and in files, and the table of what they took."""
    limit = (args.mib_full if question == "full" else args.mib) << 20
    found: dict[str, list[dict[str, Any]]] = {"in memory": [], "in files": []}
    how = ""
    for _ in range(args.rounds):
        found["in memory"].append(run_side(Side("run", [*command, f"--role={question}"])))
        forget(folder)
        with control_group(limit) as group:
            how = "a control group" if group else "RLIMIT_DATA"
            limited = [f"--group={group}"] if group else [f"--data-limit={limit}"]
            more = [f"--memory={limit}", *limited]
            found["in files"].append(run_side(Side("run", [*command, f"--role={question}", *more])))
    runs = [*found["in memory"], *found["in files"]]
    losses = np.array([each["loss"] for each in runs], dtype=np.float64).reshape(len(runs), -1)
    off = float(np.abs(losses / losses[0] - 1).max())
    keys = [key for key in HEADS if key in runs[0]]
    rows = []
    for side, of_side in found.items():
        cells = [side]
        cells += [f"{statistics.median(each[key] for each in of_side):.2f}" for key in keys]
        for key in ("peak", "own", "group"):
            most = max(each.get(key, 0) for each in of_side)
            cells.append(f"{most:,}" if most else "")
        rows.append(cells)
    shown = {"epoch": "An epoch", "evaluation": "an evaluation", "seconds": "All"}
    pairs = list(zip(found["in memory"], found["in files"], strict=True))
    ratios = [
        f"{word} takes {statistics.median(slow[key] / fast[key] for fast, slow in pairs):.2f} times"
        for key, word in shown.items()
        if key in keys
    ]
    what = "sums of predictions" if question == "predict" else "losses"
    equal = "are equal to the bit" if off == 0 else f"differ by {off:.1e} of themselves at most"
    head = ["features", *(HEADS[key] for key in keys), "MiB at most (VmHWM)"]
    head += ["of its own (RssAnon) at the end", "of the group"]
    size = args.nodes * args.width * 4 / limit
    notes = [f"In files: {note}." for each in found["in files"] for note in each.get("notes", [])]
    return [
        f"{WORDS[question]}; features are {size:.1f} times the {limit >> 20:,} MiB allowed, by "
        f"{how}:",
        "",
        *markdown_table(head, rows),
        "",
        f"{', '.join(ratios)} as long; {what} {equal}.",
        *notes,
        "",
    ]


def main() -> None:
    """Read the arguments, make the graph, train in turn."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=1050)
    parser.add_argument("--degree", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mib", type=int, default=1335, help="memory allowed")
    parser.add_argument("--mib-full", type=int, default=3072, help="and of full batch")
    parser.add_argument("--questions", default="sample,predict,full")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "past_memory")
    parser.add_argument("--role", choices=("make", *ROLES), help="what a child does")
    parser.add_argument("--memory", default="")
    parser.add_argument("--group", default="")
    parser.add_argument("--data-limit", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="write a file under results/")
    args = parser.parse_args()
    if args.role in ROLES:
        ROLES[args.role](args)
        return
    name = f"{args.nodes}-{args.width}-{args.degree}"
    folder = args.folder if args.role else args.folder / name
    if args.role == "make":
        make(folder, args)
        sys.stdout.write("{}\n")
        return
    sizes = [f"--{key}={getattr(args, key)}" for key in "nodes width degree epochs threads".split()]
    command = [sys.executable, __file__, *sizes, f"--folder={folder}"]
    if not (folder / "g.json").exists():
        run_side(Side("run", [*command, "--role=make"]))
    body = [
        f"{args.nodes:,} nodes, {args.degree} edges each, {args.width} features: "
        f"{args.nodes * args.width * 4 / 1e9:.1f} GB. SAGE of 2 layers, hidden 64, {args.threads} "
        "thread(s).",
        "",
    ]
    for question in args.questions.split(","):
        body += compared(args, question, command, folder)
    if args.write:
        write_result("past_memory", "Features larger than memory", body)
    else:
        sys.stdout.write("\n".join(body) + "\n")


if __name__ == "__main__":
    main()
