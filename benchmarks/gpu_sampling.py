# SPDX-License-Identifier: Apache-2.0
"""Sampled training on a GPU: how long a step takes, and how much of it waits for its batch.

    python benchmarks/gpu_sampling.py --write                          # 200 k nodes, 4.07 M edges
    python benchmarks/gpu_sampling.py --nodes 1000000 --edges 12700000

GraphSAGE with as many layers as there are fanouts; the graph and its features are in host memory,
and the CPU draws. Rows: how batches come to the device. The first, "one batch", trains on the same
batch again and again, which is there already: what a step takes where nothing waits. "Waits" is the
part of an epoch in which the device stood still for batches, by events on its own clock
(`LoaderStats.device_wait_seconds`), and "the loop waits" the part in which the program did, which
counts only where the device had nothing left to do. The aim is that less than 10 % of a step waits.
Losses of the rows that train on the same batches must be equal. ``--device cpu`` with small numbers
tries the program where there is no GPU: then nothing is copied, and only the loop's waiting counts.
``--alone`` has no step: how long batches take, which GRAPHSHARD_KEEP_MEMORY=0 has gathered into
memory that the system gives anew.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import platform
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from _common import RESULTS, ROOT, card_of, community_graph, markdown_table
from torch import Tensor, nn

import graphshard
from graphshard import nn as gnn
from graphshard.dgl.dataloading import DataLoader, NeighborSampler

WAYS: dict[str, dict[str, Any]] = {
    "2 batches ahead": {},
    "rows read by the GPU": {"use_uva": True},
    "1 batch ahead": {"prefetch": 1},
    "no page-locked memory": {"pin_prefetcher": False},
    "no stream beside": {"use_alternate_streams": False},
    "nothing ahead": {"prefetch": 0},
}


class Sage(nn.Module):
    """Mean aggregation, as many layers as there are blocks."""

    def __init__(self, width: int, hidden: int, classes: int, num_layers: int) -> None:
        super().__init__()
        sizes = [width, *[hidden] * (num_layers - 1), classes]
        self.layers = nn.ModuleList(
            gnn.SAGEConv(one, other, "mean") for one, other in itertools.pairwise(sizes)
        )

    def forward(self, blocks: list[Any], h: Tensor) -> Tensor:
        for layer, block in zip(self.layers, blocks, strict=True):
            h = layer(block, h)
            h = h if layer is self.layers[-1] else F.relu(h)
        return h


class Measured:
    """Trains over batches, and measures.

    Args:
        args: Sizes.
        data: The graph's arrays.
        device: Where to train.
    """

    def __init__(self, args: argparse.Namespace, data: Any, device: torch.device) -> None:
        self.args, self.device = args, device
        ends = tuple(torch.from_numpy(data[name]).int() for name in ("src", "dst"))
        self.graph = graphshard.graph(ends, num_nodes=args.nodes)
        x = torch.from_numpy(data["x"]).float()
        self.graph.ndata["x"] = x.repeat(1, -(-args.width // x.shape[1]))[:, : args.width]
        self.graph.ndata["y"] = torch.from_numpy(data["y"]).long()
        self.train = torch.from_numpy(data["train"]).nonzero().view(-1)
        self.classes = int(data["y"].max()) + 1

    def loader(self, options: dict[str, Any]) -> Any:
        """Batches of the same draws, however they come."""
        sampler = NeighborSampler(
            self.args.fanouts, prefetch_node_feats=["x"], prefetch_labels=["y"]
        )
        return DataLoader(
            self.graph,
            self.train,
            sampler,
            self.device,
            batch_size=self.args.batch,
            shuffle=True,
            drop_last=True,
            seed=0,
            **options,
        )

    def row(self, way: str, options: dict[str, Any]) -> tuple[list[str], float]:
        """A row of the table, and the loss of the last step."""
        args = self.args
        torch.manual_seed(0)
        model = Sage(args.width, args.hidden, self.classes, len(args.fanouts)).to(self.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        loader = self.loader(options)
        again = next(iter(loader)) if way == "one batch" else None
        loader.set_epoch(0)
        seconds, waits, shares = [], [], []
        loss = torch.tensor(0.0)
        for _ in range(1 + args.epochs):  # the first compiles, and fills caches
            batches: Iterable[Any] = (
                loader if again is None else itertools.repeat(again, args.steps)
            )
            num_steps = 0
            self._wait()
            start = time.perf_counter()
            run = iter(batches)  # dropped after the clock is read: that ends threads
            for _, _, blocks in itertools.islice(run, args.steps):
                num_steps += 1
                if args.alone:
                    continue
                out = model(blocks, blocks[0].srcdata["x"])
                loss = F.cross_entropy(out, blocks[-1].dstdata["y"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            self._wait()
            took = time.perf_counter() - start
            stats = loader.stats()
            seconds.append(took / num_steps)
            waits.append(stats.device_wait_seconds / took)
            shares.append(stats.wait_seconds / took)
            del run
        none = again is not None or self.device.type != "cuda"
        row = [
            way,
            f"{statistics.median(seconds[1:]) * 1e3:.2f}",
            "" if none else f"{statistics.median(waits[1:]):.1%}",
            "" if again is not None else f"{statistics.median(shares[1:]):.1%}",
        ]
        return row, float(loss.detach())

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    """Read the arguments, measure, and print or write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--edges", type=int, default=2_100_000, help="pairs drawn")
    parser.add_argument("--width", type=int, default=128, help="features of a node")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--fanouts", type=int, nargs="+", default=[15, 10, 5])
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=60, help="of an epoch, at most")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of the CPU; by default all")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument("--alone", action="store_true", help="batches without steps")
    parser.add_argument("--write", action="store_true", help="write a file under results/")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    measured = Measured(args, np.load(community_graph(args.folder, args.nodes, args.edges)), device)
    table = [] if args.alone else [measured.row("one batch", {})[0]]
    losses = {}
    for way, options in WAYS.items():
        if "use_uva" in options and device.type == "cpu":
            continue
        row, losses[way] = measured.row(way, options)
        sys.stderr.write(f"{row}\n")
        table.append(row)
    first, *others = losses.values()
    for way, loss in losses.items():
        assert abs(loss - first) <= 1e-2 * abs(first), f"{way}: loss {loss}, not {first}"
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    g = measured.graph
    lines = [
        f"# Sampled training on {name}: time of a step, and what of it waits",
        "",
        f"{g.num_nodes():,} nodes, {g.num_edges():,} edges, {args.width} features, in host memory; "
        f"GraphSAGE, hidden {args.hidden}, fanouts {args.fanouts}, batches of {args.batch}, "
        f"{torch.get_num_threads()} threads of the CPU. Losses of the last step agree to "
        f"{max(abs(loss - first) for loss in others):.1e}.",
        "",
        *markdown_table(["batches", "ms per step", "waits", "the loop waits"], table),
        "",
        f"Command: `python benchmarks/{' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}`  ",
        f"{datetime.date.today()}, Python {platform.python_version()}, torch {torch.__version__}.",
        "",
    ]
    text = "\n".join(lines)
    sys.stdout.write(text)
    if args.write:
        (RESULTS / f"gpu_sampling_{card_of(name)}_{datetime.date.today()}.md").write_text(text)


if __name__ == "__main__":
    main()
