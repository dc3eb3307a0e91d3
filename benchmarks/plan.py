# SPDX-License-Identifier: Apache-2.0
"""Plans beside what was planned: memory at 1 to 16 ranks, and time with a core a rank.

    python benchmarks/plan.py --question memory --write
    python benchmarks/plan.py --question time --write
    python benchmarks/plan.py --question link --write    # Linux, root and iproute2, see wire.py
    python benchmarks/plan.py --question sample          # beside other work

write benchmarks/results/plan_<question>_cpu_<date>.md. Memory is the high-water mark of the largest
worker; it is as well measured on a busy machine. Time is not: the second question wants a quiet
one, or ``--clock cpu``, with which rates and epochs are seconds of a processor. Each network is
planned from the counted partition, and then trained; rates are measured before, with as many ranks
as there are processors; for time with each network. An epoch's time is the middle of those after
the first, evaluations apart. With ``--turns`` all that is done so many times in turn, and a row has
the middle of the plans, of what was measured, and of how far each plan was off. For links two ranks
are on hosts of their own (network namespaces), on links shaped to ``--rates``, in Mbit/s; the hosts
are all this machine, so the rates are those of as many ranks beside each other, as far as there are
processors. ``sample`` is what a
busy machine can say of time: one process, epochs of the sample that a calibration takes and of the
whole in turn, the least CPU seconds of each, and the plan of the whole from those of the sample.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from _common import RESULTS

NETWORKS: dict[str, dict[str, Any]] = {
    "sage": {"model": "sage", "layers": 3, "hidden": 128},
    "gcn": {"model": "gcn", "layers": 2, "hidden": 64},
    "gat": {"model": "gat", "layers": 2, "hidden": 16, "heads": 8},
    "edges": {"model": "sage", "layers": 2, "hidden": 64, "task": "edge classification"},
    "links": {"model": "sage", "layers": 2, "hidden": 64, "task": "link prediction"},
    "sparse": {"model": "sage", "layers": 2, "hidden": 64},
    "own": {"model": "plan:OwnNetwork", "layers": 3, "hidden": 64},
    "categories": {"model": "gcn", "layers": 2, "hidden": 32},
    "typed": {"model": "sage", "layers": 2, "hidden": 64},
    "typed values": {"model": "sage", "layers": 2, "hidden": 32, "task": "edge regression"},
    "typed own": {"model": "plan:OwnNetwork", "layers": 2, "hidden": 64},
}
EPOCHS, TIMED_EPOCHS = 4, 9
_SPARSE_COLUMNS, _MOST_NON_ZEROS = 5000, 40


class OwnNetwork(torch.nn.Module):
    """A network as a user writes one: an encoder, and sums of neighbours with a normalisation."""

    def __init__(self, schema: Any, hidden: int, layers: int, dropout: float, out: int) -> None:
        from graphshard.nn import HeteroGraphConv, SAGEConv

        super().__init__()
        self.target = schema.target if schema.is_typed else None
        widths = [hidden] * layers + [out]
        self.encoders = torch.nn.ModuleDict(
            {t: torch.nn.Linear(width, hidden) for t, width in schema.node_widths.items()}
        )
        self.layers = torch.nn.ModuleList(
            HeteroGraphConv({e: SAGEConv(*pair, "mean") for e in schema.canonical_etypes})
            if schema.is_typed
            else SAGEConv(*pair, "mean")
            for pair in pairwise(widths)
        )
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(hidden) for _ in range(layers))
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, graphs: Any, features: Any) -> Any:
        if self.target is None:
            (encoder,) = self.encoders.values()
            rows: Any = encoder(features)
        else:
            rows = {t: self.encoders[t](x) for t, x in features.items()}
        for layer, norm, graph in zip(self.layers, self.norms, graphs, strict=True):
            if self.target is None:
                rows = layer(graph, self._between(norm, rows))
            else:
                rows = layer(graph, {t: self._between(norm, x) for t, x in rows.items()})
        return rows if self.target is None else rows[self.target]

    def _between(self, norm: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
        between: torch.Tensor = self.dropout(torch.nn.functional.silu(norm(rows)))
        return between


def partitioned(nodes: int, degree: int, num_parts: int, folder: Path, name: str) -> Path:
    """A graph of communities in parts, with what a network's task needs; the path of the JSON."""
    from graphshard.data import community_graph
    from graphshard.partition import partition_graph

    alone = ("edges", "links", "sparse", "categories", "typed values")
    kind = name if name in alone else "typed" if name.startswith("typed") else "nodes"
    out = folder / f"{kind}{num_parts}"
    if (out / "g.json").exists():
        return out / "g.json"
    if kind.startswith("typed"):
        partition_graph(_typed_graph(nodes, degree, kind), "g", num_parts, str(out), quiet=True)
        return out / "g.json"
    graph = community_graph(nodes, nodes * degree, seed=0, feat_dim=128, num_classes=40)
    if kind == "sparse":
        del graph.ndata["feat"]
        size = nodes, _MOST_NON_ZEROS
        columns = torch.randint(1, _SPARSE_COLUMNS, size).masked_fill_(torch.rand(size) < 0.3, 0)
        columns = columns.sort(1, descending=True).values
        graph.ndata["feat_columns"], graph.ndata["feat_values"] = columns.int(), torch.rand(size)
    elif kind == "categories":
        graph.ndata["categories"] = torch.stack(
            [torch.randint(count, (nodes,)) for count in (1000, 50, 7)], dim=1
        )
    elif kind != "nodes":
        for column in ("label", "train_mask", "val_mask", "test_mask"):
            del graph.ndata[column]
        count, chosen = graph.num_edges(), torch.rand(graph.num_edges())
        held_out = 0.0005 if kind == "links" else 0.02  # links are ranked among all nodes
        for number, split in enumerate(("train", "val", "test")):
            low, high = (0.0, 0.1) if not number else (0.1 + (number - 1) * held_out, 0.0)
            high = high or low + held_out
            graph.edata[f"{split}_mask"] = (chosen >= low) & (chosen < high)
        if kind == "edges":
            graph.edata["label"] = torch.randint(5, (count,))
    partition_graph(graph, "g", num_parts, str(out), quiet=True)
    return out / "g.json"


def _typed_graph(nodes: int, degree: int, kind: str) -> Any:
    """Two types, of three fifths and two fifths of the nodes, and three relations of them."""
    from graphshard import heterograph

    sizes = {"user": nodes * 3 // 5, "item": nodes * 2 // 5}
    counts = {
        ("user", "buys", "item"): nodes * degree // 4,
        ("item", "bought", "user"): nodes * degree // 4,
        ("user", "knows", "user"): nodes * degree // 4,
    }
    random = torch.Generator().manual_seed(0)
    ends = {
        etype: tuple(torch.randint(sizes[t], (n,), generator=random) for t in etype[::2])
        for etype, n in counts.items()
    }
    graph = heterograph(ends, sizes)
    graph.nodes["user"].data["feat"] = torch.rand(sizes["user"], 32)
    graph.nodes["item"].data["feat"] = torch.rand(sizes["item"], 100)
    if kind == "typed":
        columns, number = graph.nodes["user"].data, torch.rand(sizes["user"])
        columns["label"] = torch.randint(40, (sizes["user"],))
        shares = (0.0, 0.6), (0.6, 0.8), (0.8, 1.0)
    else:
        etype = next(iter(counts))
        columns, number = graph.edges[etype].data, torch.rand(counts[etype])
        columns["label"] = torch.rand(counts[etype])
        shares = (0.0, 0.6), (0.6, 0.65), (0.65, 0.7)
    for split, (low, high) in zip(("train", "val", "test"), shares, strict=True):
        columns[f"{split}_mask"] = (number >= low) & (number < high)
    return graph


def worker(data: str, settings: str) -> None:
    """One rank: trains, and prints a line of JSON with its peak and its epochs."""
    from graphshard._base.memory import peak_memory
    from graphshard.comm import barrier, initialize_comms, rank, shutdown_comms
    from graphshard.comm.collectives import reduce_floats
    from graphshard.train import FullBatchConfig
    from graphshard.train._run import FullBatchRun

    torch.set_num_threads(1)
    initialize_comms()
    clocks: list[tuple[float, float]] = []

    class TimedRun(FullBatchRun):
        def _train_epoch(self, epoch: int) -> float:
            barrier()
            start, cpu = time.perf_counter(), time.process_time()
            share = super()._train_epoch(epoch)
            clocks.append((time.perf_counter() - start, time.process_time() - cpu))
            return share

    run = TimedRun(FullBatchConfig(data=data, **json.loads(settings)))
    result = run.train()
    wall, cpu = (statistics.median(times) for times in zip(*clocks[1:], strict=True))
    mine = {
        "rank": rank(),
        "peak": peak_memory(),
        "wall": wall,
        "cpu": cpu,
        "mode": result.aggregation,
        "bytes": result.bytes_per_epoch,
    }
    if os.environ.get("HOST"):  # what rank 0 says is all that is heard
        mine |= {"wall": reduce_floats([wall], "max")[0]}
    sys.stdout.write(json.dumps(mine) + "\n")
    sys.stdout.flush()
    barrier()
    shutdown_comms()


def measured(data: Path, num_ranks: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """What the workers of a run print, by rank."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(num_ranks), __file__, "--worker", str(data), json.dumps(settings),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=1800, env=environment, check=False
    )
    lines = [json.loads(s) for s in done.stdout.splitlines() if s.startswith('{"rank"')]
    if done.returncode or len(lines) != num_ranks:
        raise RuntimeError(f"workers failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return sorted(lines, key=lambda line: line["rank"])


def measured_on_hosts(
    data: Path, num_ranks: int, settings: dict[str, Any], rate: int
) -> list[dict[str, Any]]:
    """The same of a rank on each host, on links of ``rate`` Mbit/s; what rank 0 prints."""
    from wire import on_hosts

    work = ["--worker", str(data), json.dumps(settings)]
    return [on_hosts(num_ranks, rate, work, (sys.executable, str(Path(__file__).resolve())))]


def planned(
    data: Path, num_ranks: int, settings: dict[str, Any], mode: str, rates: Any, rate: int = 0
) -> Any:
    """The plan of the same run."""
    from dataclasses import replace

    from graphshard.plan import Machines, plan_full_batch
    from graphshard.train import FullBatchConfig
    from graphshard.train._plan_inputs import (
        exchanges_of,
        facts_of,
        network_of,
        size_of_partition,
    )

    config = FullBatchConfig(data=str(data), **settings)
    graph, kind = size_of_partition(data, config)
    network = network_of(config.resolved(facts_of(graph)), graph, kind)
    how = replace(exchanges_of(config), mode=mode, num_ranks=num_ranks)
    link = rate * 1e6 / 8 if rate else None
    return plan_full_batch(graph, network, Machines(rates=rates, link=link), how)


def from_sample(data: Path, names: list[str], folder: Path) -> None:
    """Plans of the whole from its sample, by the least CPU seconds; prints a row for each."""
    from dataclasses import replace

    from graphshard.plan import Rates
    from graphshard.train import FullBatchConfig
    from graphshard.train import _calibrate as calibration
    from graphshard.train._plan_inputs import facts_of, size_of_partition
    from graphshard.train._run import FullBatchRun

    torch.set_num_threads(1)
    rounds = calibration.measured_rounds(3.0, time.process_time)
    best = {name: (min if name == "start" else max)(found) for name, found in rounds.items()}
    rates = replace(Rates(), **best)  # type: ignore[arg-type]
    for name in names:
        whole = FullBatchConfig(data=str(data), epochs=EPOCHS, **NETWORKS[name])
        size, kind = size_of_partition(data, whole)
        trial = calibration.TrialNetwork.of(whole.resolved(facts_of(size)), size, kind, data)
        assert trial is not None
        runs = [FullBatchRun(c) for c in (trial.partitioned(1, folder / name), whole)]
        seconds: list[list[float]] = [[], []]
        for run in runs:
            run._learner.descent.start_at(0, 1)
        for epoch in range(1 + EPOCHS):
            for run, of_run in zip(runs, seconds, strict=True):
                start = time.process_time()
                run._train_epoch(epoch)
                of_run.append(time.process_time() - start)
        sample, took = (min(of_run[1:]) for of_run in seconds)
        config = trial.partitioned(1, folder / f"{name}-again")
        factor = calibration._factor(config, rates, 1, "oneshot", sample)
        plan = planned(data, 1, NETWORKS[name], "oneshot", replace(rates, network=factor))
        expected = plan.seconds.expected
        sys.stdout.write(
            f"{name}: sample {sample:.3f} CPU s, factor {factor:.2f}; whole planned "
            f"{expected:.3f}, measured {took:.3f}: {100 * (expected / took - 1):+.1f} %\n"
        )


@dataclass(frozen=True)
class Turn:
    """A plan and the run after it: seconds or MiB, and the factor of the trial."""

    planned: float
    measured: float
    factor: float

    def off(self) -> float:
        """Per cent."""
        return 100 * (self.planned / self.measured - 1)


def row_of(turns: list[Turn]) -> str:
    """Cells of a table: middles of all turns; of several the least and the most, too."""
    columns = zip(*((t.planned, t.measured, t.factor, t.off()) for t in turns), strict=True)
    expected, took, factor, off = map(statistics.median, columns)
    among = sorted(turn.off() for turn in turns)
    spread = f" ({among[0]:+.1f} to {among[-1]:+.1f})" if len(among) > 1 else ""
    return f"{expected:,.4g} | {took:,.4g} | {factor:.2f} | {off:+.1f} %{spread}"


def main() -> None:
    """Plan, measure and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    questions = ("memory", "time", "link", "sample")
    parser.add_argument("--question", choices=questions, default="memory")
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--degree", type=int, default=16)
    parser.add_argument("--ranks", help="numbers between commas")
    parser.add_argument("--rates", default="200,400,1000,2000", help="of links, in Mbit/s")
    parser.add_argument("--networks", default="sage,gcn,gat", help=f"of {', '.join(NETWORKS)}")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--write", action="store_true", help="write the file of results")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(*arguments.worker)
        return
    from graphshard.train import FullBatchConfig
    from graphshard.train._calibrate import TrialNetwork, calibrate
    from graphshard.train._plan_inputs import facts_of, size_of_partition

    os.environ["OMP_NUM_THREADS"] = "1"  # of ranks that calibrate, too
    if arguments.question == "sample":
        with tempfile.TemporaryDirectory() as folder:
            data = partitioned(arguments.nodes, arguments.degree, 1, Path(folder), "sage")
            from_sample(data, arguments.networks.split(","), Path(folder))
        return
    cores = len(os.sched_getaffinity(0))
    usual = {"memory": "1,2,4,8,16", "time": f"1,{cores}", "link": "2"}[arguments.question]
    links = [int(r) for r in arguments.rates.split(",")] if arguments.question == "link" else [0]
    numbers = [int(number) for number in (arguments.ranks or usual).split(",")]
    is_time = arguments.question != "memory"
    epochs = TIMED_EPOCHS if is_time else EPOCHS
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number in numbers:
            rates = calibrate([number], 0.5)
            for name in arguments.networks.split(","):
                size = arguments.nodes, arguments.degree, number
                data = partitioned(*size, Path(folder), name)
                settings = {"epochs": epochs, **NETWORKS[name]}
                turns: dict[int, list[Turn]] = {rate: [] for rate in links}
                for _ in range(arguments.turns):
                    if is_time:
                        config = FullBatchConfig(data=str(data), **settings)
                        sizes, kind = size_of_partition(data, config)
                        resolved = config.resolved(facts_of(sizes))
                        trial = TrialNetwork.of(resolved, sizes, kind, data)
                        rates = calibrate([number], 5.0, trial, arguments.clock)
                    for rate in links:
                        if rate:
                            found = measured_on_hosts(data, number, settings, rate)
                        else:
                            found = measured(data, number, settings)
                        plan = planned(data, number, settings, found[0]["mode"], rates, rate)
                        if is_time:
                            took = max(each[arguments.clock] for each in found)
                            turn = Turn(plan.seconds.expected, took, rates.network)
                        else:
                            took = max(each["peak"] for each in found) / 2**20
                            turn = Turn(plan.memory.expected / 2**20, took, rates.network)
                        turns[rate].append(turn)
                        sys.stderr.write(f"{name}, {number}, {rate}: {turn}\n")
                        if len(turns[rate]) < arguments.turns:
                            continue
                        on_link = f"{number} on {rate} Mbit/s" if rate else str(number)
                        sent = sum(found[0]["bytes"])
                        of_bytes = f"{100 * (plan.sent_in_all / sent - 1):+.2f} %" if sent else ""
                        rows.append(
                            f"| {name} | {on_link} | {found[0]['mode']} | {row_of(turns[rate])} | "
                            f"{of_bytes} |"
                        )
                        sys.stdout.write(rows[-1] + "\n")
                        sys.stdout.flush()
    what = "MiB of the largest rank"
    if is_time:
        clock = "" if arguments.clock == "wall" else "CPU "
        what = f"{clock}seconds per epoch of the slowest rank"
    text = "\n".join(
        [
            f"# Plan and measurement: {what}",
            "",
            f"Community graph, {arguments.nodes:,} nodes, {arguments.degree} edges a node, 128 "
            f"features, 40 classes; {epochs} epochs, one thread a rank. The interpreter is measured"
            " by the calibration, on a tiny graph.",
            "",
            "| network | ranks | mode | planned | measured | factor of the trial | "
            "planned / measured - 1 | bytes |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
            *rows,
            "",
            f"Command: `python benchmarks/plan.py {' '.join(sys.argv[1:])}`  ",
            f"{datetime.date.today()}, Python {platform.python_version()}, {cores} cores.",
            "",
        ]
    )
    if arguments.write:
        path = RESULTS / f"plan_{arguments.question}_cpu_{datetime.date.today()}.md"
        path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"wrote {path}\n")


if __name__ == "__main__":
    main()
