# SPDX-License-Identifier: Apache-2.0
"""A graph with features that is larger than the memory: made, partitioned, verified, trained.

    python benchmarks/beyond_memory.py --edges 4e7 --nodes 1e6 --limit 600 --memory 128
    python benchmarks/beyond_memory.py --folder DIR --write     # 400 million edges under 2 GiB

A data folder of communities is written in shuffled order, both directions of each edge, ids at
random, ``--width`` features of float32 a node that say something about its class. Then the commands
``graphshard partition``, ``verify`` and ``train`` run as a user runs them. No process may have more
than ``--limit`` MiB of memory of its own (``RLIMIT_DATA``: what is allocated or private; pages of
files, which the system takes back when it needs them, do not count). Of each command are reported
the CPU seconds, the most anonymous and shared memory that its processes had together, and that the
largest of them had, looked at ten times a second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from _common import markdown_table, write_result

CLASSES, BLOCK = 16, 1 << 22
#: Nodes of a community, and communities of a neighbourhood, as in partition_stream.py.
COMMUNITY, NEIGHBOURS = 2000, 16
MASK = {"train_idx": 0.01, "valid_idx": 0.002, "test_idx": 0.002}


@dataclass(frozen=True)
class Used:
    """What a command took.

    Args:
        cpu: Seconds of all its processes.
        together: Most bytes of anonymous and shared memory of all processes at once.
        largest: The same of one process.
    """

    cpu: float
    wall: float
    together: int
    largest: int


def edges_of(block: int, count: int, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Some edges in one direction: 75 % in a community, 20 % near it, 5 % anywhere."""
    generator = np.random.default_rng((1, block))
    src, anywhere = generator.integers(0, num_nodes, (2, count))
    inside = src // COMMUNITY * COMMUNITY + generator.integers(0, COMMUNITY, count)
    wide = COMMUNITY * NEIGHBOURS
    near = src // wide * wide + generator.integers(0, wide, count)
    draw = generator.random(count)
    dst = np.where(draw < 0.75, inside, np.where(draw < 0.95, near, anywhere))
    return src, np.minimum(dst, num_nodes - 1)


def make(folder: Path, num_nodes: int, num_edges: int, width: int) -> None:
    """Write a data folder; a batch of edges and of rows at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    numbers = generator.permutation(num_nodes).astype(np.int32)
    half = num_edges // 2
    sizes = [min(BLOCK, half - first) for first in range(0, half, BLOCK)]
    # Behind each block of edges come the reverses of another one of the same size.
    others = [*generator.permutation(len(sizes) - 1).tolist(), len(sizes) - 1]
    header = {"descr": "<i4", "fortran_order": False, "shape": (2, 2 * half)}
    with open(folder / "edge_index.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        start, done = file.tell(), 0
        for block, (size, other) in enumerate(zip(sizes, others, strict=True)):
            src, dst = edges_of(block, size, num_nodes)
            back_dst, back_src = edges_of(other, size, num_nodes)
            order = generator.permutation(2 * size)
            for row, pair in enumerate(((src, back_src), (dst, back_dst))):
                file.seek(start + 4 * (row * 2 * half + done))
                file.write(numbers[np.concatenate(pair)][order].data)
            done += 2 * size
    labels = np.empty(num_nodes, dtype=np.int64)
    labels[numbers] = np.arange(num_nodes) // (COMMUNITY * NEIGHBOURS) % CLASSES
    np.save(folder / "label.npy", labels)
    centres = generator.standard_normal((CLASSES, width), dtype=np.float32)
    header = {"descr": "<f4", "fortran_order": False, "shape": (num_nodes, width)}
    with open(folder / "feat.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for first in range(0, num_nodes, 1 << 18):
            some = labels[first : first + (1 << 18)]
            noise = generator.standard_normal((len(some), width), dtype=np.float32)
            file.write((centres[some] + 3 * noise).data)
    order = generator.permutation(num_nodes)
    for name, share in MASK.items():
        taken, order = np.split(order, [int(share * num_nodes)])
        np.save(folder / f"{name}.npy", np.sort(taken))


def processes_of(root: int) -> Iterator[int]:
    """A process and all that it has started."""
    yield root
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{root}/task"):
            children = Path(f"/proc/{root}/task/{task}/children").read_text()
            for child in children.split():
                yield from processes_of(int(child))


def own_memory(process: int) -> int:
    """Bytes of anonymous memory of a process; its pages of files do not count."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def run(words: Sequence[str], limit: int) -> Used:
    """Run a command under a limit; it must succeed."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    shared = shared_memory()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, preexec_fn=limited, env=environment)
    together = largest = 0
    while process.poll() is None:
        sizes = []
        for number in list(processes_of(process.pid)):
            with contextlib.suppress(OSError):
                sizes.append(own_memory(number))
        together = max(together, sum(sizes) + shared_memory() - shared)
        largest = max(largest, *sizes, 0)
        time.sleep(0.1)
    if process.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = sum(getattr(after, n) - getattr(before, n) for n in ("ru_utime", "ru_stime"))
    return Used(cpu, time.monotonic() - start, together, largest)


def shared_memory() -> int:
    """Bytes in files of shared memory, of all processes of the machine."""
    status = os.statvfs("/dev/shm")
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def measure(args: argparse.Namespace, folder: Path) -> list[str]:
    """All commands, and a table of what they took."""
    num_nodes, num_edges = int(args.nodes), int(args.edges)
    data, out = folder / "data", folder / "parts"
    if not (data / "test_idx.npy").exists():
        make(data, num_nodes, num_edges, args.width)
    program = [sys.executable, "-m", "graphshard"]
    partition = f"--parts {args.parts} --method multilevel --memory {args.memory}".split()
    train = f"--mode sample --epochs 1 --model sage --fanouts {args.fanouts}".split()
    # The limit holds stacks of threads and what malloc has in reserve, too.
    train += ["--memory", f"{3 * args.limit // 4}MiB"]
    commands = {
        "partition": ["--data", str(data), "--out", str(out), *partition],
        "verify": [str(out / "data.json")],
        "train": ["--data", str(out / "data.json"), *train, *args.train.split()],
    }
    rows = []
    for name, words in commands.items():
        if name not in args.commands.split(","):
            continue
        used = run([*program, name, *words], args.limit << 20)
        sys.stderr.write(f"{name}: {used}\n")
        cells = [f"{used.cpu:.0f}", f"{used.cpu / num_edges * 1e8:.1f}", f"{used.wall:.0f}"]
        cells += [f"{used.largest / 2**20:.0f}", f"{used.together / 2**20:.0f}"]
        rows.append([f"`{name} {' '.join(words)}`".replace(str(folder), "DIR"), *cells])
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    structure = sum(size for path, size in sizes.items() if path.name == "graph.safetensors")
    structure += 4 * num_edges + 4 * num_nodes
    features = sum(size for path, size in sizes.items() if path.name == "feat.npy")
    head = ["command", "CPU s", "CPU s per 100 M edges", "wall s beside other work"]
    head += ["MiB of the largest process", "MiB of all processes"]
    content = json.loads((out / "data.json").read_text())
    return [
        f"{num_edges:,} edges of {num_nodes:,} nodes, shuffled, {args.width} features of float32 "
        f"({features / 2**30:.2f} GiB), {args.parts} parts; no process may have more than "
        f"{args.limit} MiB of its own (`RLIMIT_DATA`).",
        "",
        *markdown_table(head, rows),
        "",
        f"Cut {100 * content['stats']['edge_cut_fraction']:.2f} %. Structure, original ids "
        f"included: {structure / num_edges:.2f} bytes an edge.",
    ]


def main() -> None:
    """Measure, and print or write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--edges", type=float, default=4e8)
    parser.add_argument("--nodes", type=float, default=1e7)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--memory", type=int, default=512, help="MiB, of partition")
    parser.add_argument("--limit", type=int, default=2048, help="MiB, of each process")
    parser.add_argument("--fanouts", default="10,10")
    parser.add_argument("--train", default="", help="more options of train")
    parser.add_argument("--commands", default="partition,verify,train")
    parser.add_argument("--folder", help="where everything goes, 70 bytes an edge; kept")
    parser.add_argument("--write", action="store_true", help="write a file of results")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory()
        if args.folder is None
        else contextlib.nullcontext(args.folder) as folder
    ):
        body = measure(args, Path(folder))
    if args.write:
        write_result("beyond_memory", "A graph larger than the memory that it may take", body)
    else:
        sys.stdout.write("\n".join(body) + "\n")


if __name__ == "__main__":
    main()
