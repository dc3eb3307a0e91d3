# SPDX-License-Identifier: Apache-2.0
"""Calibration: how fast this machine does what an epoch is made of, with ranks beside each other.

As many ranks are started as will run at once, with the threads that a run gives them. At first they
train a tiny graph, by which it is known what a process takes for itself. Then each does every kind
of work for a part of a second, in rounds, all ranks the same at the same time; a rate is the middle
of its rounds on the slowest rank. At last they train the network that is to be planned, on its own
graph, or on a sample of it: of each part the first nodes, in the order that they have there, and
the edges between these. What an epoch computed for, over what the rates say of it, is a factor of
all times: see `Rates.network`. That of numbers is a graph of communities.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from .._base.files import TemporaryFolder
from .._base.memory import own_memory, peak_memory
from .._base.typing import CanonicalEType
from ..comm import barrier, rank, shutdown_comms, world_size
from ..comm.collectives import gather_texts
from ..comm.group import group_state
from ..comm.transport import ragged_all_to_all_alike
from ..data import community_graph, random_graph
from ..fullbatch import load_dgl_partition_data
from ..graph import Graph, heterograph
from ..graph import graph as make_graph
from ..nn import GATConv
from ..ops import affine, draw_neighbors, gspmm, multiply_transposed
from ..partition import partition_graph
from ..plan import GraphSize, Machines, Rates, plan_full_batch
from ._config import FullBatchConfig, ResolvedConfig, config_from_json
from ._plan_inputs import exchanges_of, facts_of, network_of, size_of_partition
from ._run import FullBatchRun

SECONDS = 5.0
_LEAST_SECONDS = 1.0
_ROWS, _WIDTH, _DEGREE, _HEADS = 40_000, 128, 12, 4
_ROUNDS = 3
_TINY = 500
_NEW_NUMBERS = 1 << 24  # of 4 bytes: malloc keeps no block of that size

_TRIAL_EPOCHS = 5  # after some that the C library still asks for memory in
_EPOCHS_BEFORE = 2
_TRIAL_NUMBERS, _TRIAL_OVER, _FEWEST_TRIAL_NODES = 1e9, 20.0, 1000
_FACTORS = 0.1, 20.0

Clock = Literal["wall", "cpu"]
_CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class CalibrationRequest:
    """What the ranks of a calibration are told."""

    data: str
    seconds: float
    trial: str | None = None  # a configuration
    clock: Clock = "wall"

    def to_json(self) -> str:
        """For a worker; the mode says what it is."""
        return json.dumps({"mode": "calibrate", **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> CalibrationRequest:
        """Inverse of `to_json`."""
        values = json.loads(text)
        return cls(values["data"], float(values["seconds"]), values["trial"], values["clock"])


@dataclass(frozen=True)
class TrialNetwork:
    """The network that is to be planned, and what it is tried on.

    Args:
        settings: Fields of a `FullBatchConfig`.
        graph: Sizes of the whole.
        data: The JSON of its partition, of which a sample is taken; None where there is none.
    """

    settings: Mapping[str, Any]
    graph: GraphSize
    data: Path | None = None

    @classmethod
    def of(
        cls, config: ResolvedConfig, graph: GraphSize, kind: str, data: Path | None = None
    ) -> TrialNetwork | None:
        """None for tasks on edges, own models that read edges, and typed graphs that are sizes.

        Args:
            kind: Of the task.
        """
        is_typed = len(graph.nodes) > 1 or len(graph.edges) > 1
        is_lacking = (is_typed and data is None) or (":" in config.model and graph.edge_widths)
        if not kind.startswith("node") or is_lacking or graph.num_relations:
            return None
        names = ["model", "hidden", "layers", "dropout", "residual", "norm", "encoder", "dtype"]
        names += ["self_loops", "both_directions"]
        names += ["model_args"] * (":" in config.model)
        names += ["heads"] * (config.model in ("gat", "gatv2", "hgt"))
        names += ["aggregator"] * (config.model == "sage")
        names += ["num_bases"] * (config.model == "rgcn")
        if isinstance(config, FullBatchConfig):
            names += ["aggregation", "rematerialize", "prefetch", "halo_dtype"]
        return cls({name: getattr(config, name) for name in names}, graph, data)

    def partitioned(self, num_ranks: int, folder: Path) -> FullBatchConfig:
        """The run of a trial: the partition itself, or a sample in as many parts as ranks."""
        graph, config = self.graph, FullBatchConfig(data="", **self.settings)
        heads = config.heads or 1 if config.model in ("gat", "gatv2") else 1
        wide = max((*graph.features.values(), (config.hidden or 1) * heads))
        numbers = wide * (config.layers or 1) * (graph.num_edges + _TRIAL_OVER * graph.num_nodes)
        # As large that tables pass caches, and as small that an epoch takes a second or so.
        share = min(1.0, _TRIAL_NUMBERS * num_ranks / numbers)
        share = min(1.0, max(share, _FEWEST_TRIAL_NODES * num_ranks / graph.num_nodes))
        if share == 1.0 and self.data is not None and len(graph.parts) == num_ranks:
            return replace(config, data=str(self.data))
        method: Any = "multilevel"
        if self.data is None:
            nodes = int(share * graph.num_nodes)
            sample = community_graph(
                nodes,
                int(share * graph.num_edges / 2),
                feat_dim=graph.features.get(graph.target, 0),
                num_classes=max(2, graph.num_classes),
            )
        else:
            sample, parts = _sample(self.data, graph, share)
            if len(graph.parts) == num_ranks:
                method = parts if len(parts) > 1 else parts[graph.target]
        out = os.path.join(folder, f"trial{num_ranks}")
        partition_graph(
            sample,
            "trial",
            num_ranks,
            out,
            part_method=method,
            reorder=None if isinstance(method, str) else False,
            quiet=True,
        )
        return replace(config, data=os.path.join(out, "trial.json"))


def _sample(data: Path, graph: GraphSize, share: float) -> tuple[Graph, dict[str, Tensor]]:
    """The first nodes of each part and the edges between them, and the part of each node."""
    first = load_dgl_partition_data(data, 0)
    num_parts = first.num_parts
    kept = {
        t: torch.tensor([math.ceil(share * first.node_map(t).size(p)) for p in range(num_parts)])
        for t in first.node_type_names
    }
    starts = {t: torch.cumsum(sizes, 0) - sizes for t, sizes in kept.items()}
    pieces: dict[CanonicalEType, list[Tensor]] = {e: [] for e in first.canonical_etypes}
    for part in range(num_parts):
        structure = first if part == 0 else load_dgl_partition_data(data, part)
        for etype, edges in structure.edges.items():
            owner, src, dst = edges.src_part.long(), edges.src.long(), edges.dst.long()
            inside = (src < kept[etype[0]][owner]) & (dst < kept[etype[2]][part])
            ids = starts[etype[0]][owner] + src, starts[etype[2]][part] + dst
            pieces[etype].append(torch.stack(ids)[:, inside])
    sizes = {t: int(number.sum()) for t, number in kept.items()}
    sample = heterograph({e: tuple(torch.cat(some, 1)) for e, some in pieces.items()}, sizes)
    for ntype, width in graph.features.items():
        sample.nodes[ntype].data["feat"] = torch.randn(sizes[ntype], width)
    columns, number = sample.nodes[graph.target].data, sizes[graph.target]
    columns["label"] = torch.randint(max(2, graph.num_classes), (number,))
    columns["label"][0] = max(2, graph.num_classes) - 1
    is_train = torch.rand(number) < max(graph.train, 1.0) / graph.nodes[graph.target]
    is_train[0] = True
    is_even = torch.arange(number) % 2 == 0
    columns["train_mask"] = is_train
    columns["val_mask"], columns["test_mask"] = ~is_train & is_even, ~is_train & ~is_even
    part_of = {t: torch.arange(num_parts).repeat_interleave(number) for t, number in kept.items()}
    return sample, part_of


def calibrate(
    numbers: Sequence[int],
    seconds: float = SECONDS,
    network: TrialNetwork | None = None,
    clock: Clock = "wall",
) -> Rates:
    """Measure the rates of this machine, for each number of ranks up to that of its processors.

    Args:
        numbers: Of ranks that run on one host; more than there are processors are as many as these.
        seconds: In all, besides the start of processes.
        network: What is to be planned with them; tried besides, for some more seconds.
        clock: ``"cpu"`` to count seconds of processors, on a machine that has other work.

    Raises:
        RankError: A worker failed.
    """
    cores = len(os.sched_getaffinity(0))
    counts = sorted({max(1, min(number, cores)) for number in numbers})
    each = max(_LEAST_SECONDS, seconds / len(counts))
    *fewer, most = (_calibrated(count, each, network, clock) for count in counts)
    return replace(most, fewer=tuple(fewer))


def _calibrated(
    num_ranks: int, seconds: float, network: TrialNetwork | None, clock: Clock
) -> Rates:
    """The rates of one number of ranks."""
    from .launch import launch_workers

    found: list[dict[str, Any]] = []
    with TemporaryFolder() as folder:
        graph = random_graph(_TINY, 4 * _TINY, seed=0, feat_dim=8, num_classes=2)
        parts = os.path.join(folder, "parts")
        partition_graph(
            graph, "tiny", num_ranks, parts, part_method="random", reorder=False, quiet=True
        )
        trial = None if network is None else network.partitioned(num_ranks, folder)
        data, text = os.path.join(parts, "tiny.json"), None if trial is None else trial.to_json()
        outcome = launch_workers(
            [
                *(sys.executable, "-m", "graphshard.train.launch"),
                CalibrationRequest(data, seconds, text, clock).to_json(),
            ],
            num_ranks,
            timeout=300.0,
            on_event=lambda event: found.extend(event.get("rates", ())),
        )
        outcome.check()
        rates = rates_of(found, num_ranks)
        if trial is None:
            return rates
        took = max(each["epoch"] for each in found)
        return replace(rates, network=_factor(trial, rates, num_ranks, found[0]["how"], took))


def _factor(trial: FullBatchConfig, rates: Rates, num_ranks: int, how: str, took: float) -> float:
    """By what computing must be multiplied for an epoch of ``took`` seconds."""
    size, kind = size_of_partition(Path(trial.data), trial)
    network = network_of(trial.resolved(facts_of(size)), size, kind)
    exchanges = replace(exchanges_of(trial), mode=how, num_ranks=num_ranks)  # type: ignore[arg-type]
    low, high = _FACTORS
    for _ in range(20):
        middle = math.sqrt(low * high)
        machines = Machines(rates=replace(rates, network=middle))
        planned = plan_full_batch(size, network, machines, exchanges).seconds.expected
        low, high = (middle, high) if planned < took else (low, middle)
    return math.sqrt(low * high)


def rates_of(found: list[dict[str, Any]], num_ranks: int) -> Rates:
    """Rates from what each rank measured: name to its rounds, and its memory."""
    values: dict[str, Any] = {}
    spread: dict[str, float] = {}
    for name in found[0]["rounds"]:
        slowest = min((each["rounds"][name] for each in found), key=statistics.median)
        middle = statistics.median(slowest)
        values[name] = middle
        spread[name] = max(abs(value / middle - 1) for value in slowest)
    return replace(
        Rates(),
        **values,
        interpreter=max(each["interpreter"] for each in found),
        own=max(each["own"] for each in found),
        num_ranks=num_ranks,
        threads=found[0]["threads"],
        spread={name: round(share, 3) for name, share in spread.items()},
        source=f"measured on {os.uname().nodename} at {time.strftime('%Y-%m-%d %H:%M')}",
    )


def calibration_work(request: CalibrationRequest) -> Callable[[], None]:
    """Set up this process, one rank of a calibration, and return its work."""
    from .launch import join_ranks, send_event

    join_ranks("cpu", 60.0)

    def work() -> None:
        config = FullBatchConfig(data=request.data, model="sage", epochs=2, layers=2, hidden=8)
        FullBatchRun(config).train()
        interpreter, own = peak_memory(), own_memory()
        mine = {
            "rounds": measured_rounds(request.seconds, _CLOCKS[request.clock]),
            "interpreter": interpreter,
            "own": own,
            "threads": torch.get_num_threads(),
        }
        if request.trial is not None:
            trial = config_from_json(request.trial)
            assert isinstance(trial, FullBatchConfig)
            mine |= _tried(trial, _CLOCKS[request.clock])
        texts = gather_texts(group_state(), json.dumps(mine))
        if rank() == 0:
            send_event({"rates": [json.loads(text) for text in texts]})
        barrier()
        shutdown_comms()

    return work


def _tried(trial: FullBatchConfig, now: Callable[[], float]) -> dict[str, Any]:
    """Seconds of an epoch that is not one of the first, and how remote rows came; collective."""
    run = FullBatchRun(trial)
    run._learner.descent.start_at(0, 1)
    took = []
    for epoch in range(_EPOCHS_BEFORE + _TRIAL_EPOCHS):
        barrier()
        start = now()
        run._train_epoch(epoch)
        took.append(now() - start)
    return {"epoch": statistics.median(took[_EPOCHS_BEFORE:]), "how": run._learner.graph.mode}


def measured_rounds(seconds: float, now: Callable[[], float]) -> dict[str, list[float]]:
    """Name of a rate to its value in each round; collective."""
    torch.manual_seed(rank())
    rows = torch.randn(_ROWS, _WIDTH)
    other, matrix = torch.randn(_ROWS, _WIDTH), torch.randn(_WIDTH, _WIDTH)
    src = torch.randint(0, _ROWS, (_ROWS * _DEGREE,))
    dst = torch.arange(_ROWS).repeat_interleave(_DEGREE)
    graph = make_graph((src, dst), num_nodes=_ROWS)
    adjacency = graph.adjacency()
    indptr, indices, _ = adjacency.csc()
    attention = GATConv(_WIDTH, _WIDTH // _HEADS, _HEADS, allow_zero_in_degree=True)
    fused = rows.clone().requires_grad_()
    num_ranks = world_size()
    splits = [_ROWS // num_ranks] * num_ranks
    splits[rank()] = 0
    sent = sum(splits)
    edges = _ROWS * _DEGREE
    numbers = 4.0 * _WIDTH
    products = 2.0 * _ROWS * _WIDTH * _WIDTH

    def attend() -> None:
        attention(graph, fused).sum().backward()

    @torch.no_grad()
    def weights() -> Tensor:
        return multiply_transposed(rows, other)

    drawn = torch.empty(_ROWS, _WIDTH)
    kinds: dict[str, tuple[Callable[[], Any], float]] = {
        "product": (lambda: affine([(rows, matrix)]), products),
        "weights": (weights, products),
        "edges": (lambda: gspmm(adjacency, "copy_lhs", "sum", rows, None), edges * numbers),
        "attention": (attend, 3.5 * edges * numbers),
        "elements": (lambda: rows + other, 3 * _ROWS * numbers),
        "random": (lambda: drawn.bernoulli_(0.5), 1.0 * _ROWS * _WIDTH),
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    each = seconds / (len(kinds) + 3) / _ROUNDS
    tiny, seeds = torch.randn(64, 8), torch.randint(0, _ROWS, (2000,))

    def draw() -> object:
        return draw_neighbors(indptr, seeds, 10, 1, seeds, indices=indices)

    for _ in range(_ROUNDS):
        for name, (run, amount) in kinds.items():
            found[name].append(_rate(run, amount, each, now))
        if num_ranks > 1:
            exchanged = other[:sent]

            def exchange(rows: Tensor = exchanged) -> None:
                ragged_all_to_all_alike(rows, splits, splits)

            found.setdefault("exchange", []).append(
                _rate(exchange, sent * numbers, each, now, times=3)
            )
        found.setdefault("pages", []).append(_rate_of_pages(now))
        found.setdefault("start", []).append(1 / _rate(lambda: tiny + tiny, 1.0, each / 4, now))
        found.setdefault("sampled", []).append(_rate(draw, 2e4, each, now))
    return found


def _rate_of_pages(now: Callable[[], float]) -> float:
    """Bytes that the system hands out in a second: what a first pass takes beyond a second one.

    The least of some in a row, as an epoch takes again what it has just given back. Memory that has
    been free for long may cost many times as much: the host of a virtual machine may have it.
    """
    barrier()
    firsts, seconds = list[float](), list[float]()
    for _ in range(_ROUNDS):
        new = torch.empty(_NEW_NUMBERS)
        for found in firsts, seconds:
            start = now()
            new.fill_(1.0)
            found.append(now() - start)
        del new
    return 4 * _NEW_NUMBERS / max(1e-9, min(firsts) - min(seconds))


def _rate(
    run: Callable[[], Any], amount: float, seconds: float, now: Callable[[], float], times: int = 0
) -> float:
    """Amount a second, of runs during some time, or of a number of runs, the same on all ranks."""
    run()
    barrier()
    start, count = now(), 0
    while count < times or (not times and (count == 0 or now() - start < seconds)):
        run()
        count += 1
    return amount * count / max(1e-9, now() - start)
