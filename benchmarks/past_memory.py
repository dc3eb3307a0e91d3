# SPDX-License-Identifier: Apache-2.0
"""Sampled epochs with features three times as large as the memory allowed, against in memory.

    python benchmarks/past_memory.py                     # 4.2 GB of features, 1.3 GiB of memory
    python benchmarks/past_memory.py --write             # and a file of results

A graph of communities is made and partitioned into one part. It is trained in turn with features in
memory, without a limit, and with ``memory=`` in a control group of that limit, in which the file
cache counts, too; where this machine lets nobody make one, under a limit of the process's own data
(RLIMIT_DATA). Before each run in a group the system is told to forget the files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from _common import ROOT, Side, markdown_table, run_side, write_result

import graphshard
from graphshard.train import SampledConfig, SampledRun

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


def train(args: argparse.Namespace) -> None:
    """A run in this process; prints what it took."""
    if args.group:
        (Path(args.group) / "cgroup.procs").write_text(str(os.getpid()))
    if args.data_limit:
        resource.setrlimit(resource.RLIMIT_DATA, (args.data_limit, args.data_limit))
    torch.set_num_threads(args.threads)
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
    )
    start = time.perf_counter()
    run = SampledRun(config)
    ready = time.perf_counter()
    before = time.process_time()
    result = run.train()
    found = status()
    sampling = result.sampling
    assert sampling is not None
    answer = {
        "loss": result.losses,
        "epoch": result.seconds_per_epoch,
        "waiting": sampling.seconds_waiting,
        "evaluation": result.seconds_per_evaluation,
        "set up": ready - start,
        "cpu": time.process_time() - before,
        "peak": found["VmHWM"],
        "own": found["RssAnon"],
        "hits": sampling.cache_hit_rate or 0.0,
    }
    if args.group:
        for name in ("memory.max_usage_in_bytes", "memory.peak"):
            with contextlib.suppress(OSError):
                answer["group"] = int((Path(args.group) / name).read_text()) >> 20
    sys.stdout.write(json.dumps(answer) + "\n")


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
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "past_memory")
    parser.add_argument("--role", choices=("train", "make"), help="what a child does")
    parser.add_argument("--memory", default="")
    parser.add_argument("--group", default="")
    parser.add_argument("--data-limit", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="write a file under results/")
    args = parser.parse_args()
    if args.role == "train":
        train(args)
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
    limit = args.mib << 20
    found: dict[str, list[dict]] = {"in memory": [], "in files": []}
    how = ""
    for _ in range(args.rounds):
        found["in memory"].append(run_side(Side("run", [*command, "--role=train"])))
        forget(folder)
        with control_group(limit) as group:
            how = "a control group" if group else "RLIMIT_DATA"
            limited = [f"--group={group}"] if group else [f"--data-limit={limit}"]
            more = [f"--memory={limit}", *limited]
            found["in files"].append(run_side(Side("run", [*command, "--role=train", *more])))
    losses = {json.dumps(each["loss"]) for runs in found.values() for each in runs}
    assert len(losses) == 1, losses
    rows = []
    for side, runs in found.items():
        cells = [side]
        for key in ("epoch", "waiting", "evaluation", "set up", "cpu"):
            cells.append(f"{statistics.median(each[key] for each in runs):.2f}")
        for key in ("peak", "own", "group"):
            most = max(each.get(key, 0) for each in runs)
            cells.append(f"{most:,}" if most else "")
        cells.append(f"{100 * runs[-1]['hits']:.0f} %")
        rows.append(cells)
    ratio = [
        slow["epoch"] / fast["epoch"]
        for fast, slow in zip(found["in memory"], found["in files"], strict=True)
    ]
    size = args.nodes * args.width * 4
    header = "features,s per epoch,of it waiting,s per evaluation,s to set up,CPU s of training,"
    header += "MiB at most (VmHWM),of its own (RssAnon) at the end,of the group,rows from the cache"
    body = [
        f"{args.nodes:,} nodes, {args.degree} edges each, {args.width} features: {size / 1e9:.1f} "
        f"GB, {size / limit:.1f} times the {args.mib:,} MiB allowed, by {how}. SAGE of 2 layers, "
        f"hidden 64, fanouts 10,5, batches of 256, 20,000 training nodes, {args.epochs} epochs, "
        f"{args.threads} thread(s).",
        "",
        *markdown_table(header.split(","), rows),
        "",
        f"An epoch takes {statistics.median(ratio):.2f} times as long "
        f"({', '.join(f'{each:.2f}' for each in ratio)}); the losses are equal to the bit.",
        "",
    ]
    if args.write:
        write_result("past_memory", "Features larger than memory", body)
    else:
        sys.stdout.write("\n".join(body) + "\n")


if __name__ == "__main__":
    main()
