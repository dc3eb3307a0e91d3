# SPDX-License-Identifier: Apache-2.0
"""Calibration: how fast this machine does what an epoch is made of, with ranks beside each other.

As many ranks are started as will run at once. At first they train a tiny graph, by which it is
known what a process takes for itself. Then each does every kind of work for a part of a second, in
rounds, all ranks the same at the same time; a rate is the middle of its rounds on the slowest rank.
At last they train the network that is to be planned on a small graph. What its epoch computed for,
over what the rates say of its work, is a factor of all times: see `Rates.network`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._base.files import TemporaryFolder
from .._base.memory import own_memory, peak_memory
from ..comm import barrier, ragged_all_to_all, rank, shutdown_comms, world_size
from ..comm.collectives import gather_texts
from ..comm.group import group_state
from ..data import community_graph, random_graph
from ..graph import graph as make_graph
from ..nn import GATConv
from ..ops import affine, draw_neighbors, gspmm
from ..partition import partition_graph
from ..plan import GraphSize, Machines, Rates, plan_full_batch
from ._config import FullBatchConfig, ResolvedConfig, config_from_json
from ._plan_inputs import exchanges_of, facts_of, network_of, size_of_partition
from ._run import FullBatchRun

SECONDS = 5.0
_ROWS, _WIDTH, _DEGREE, _HEADS = 40_000, 128, 12, 4
_ROUNDS = 3
_TINY = 500

_TRIED = ("gcn", "sage", "gat", "gatv2")
_TRIAL_NUMBERS, _TRIAL_OVER, _MOST_TRIAL_NODES = 4e8, 20.0, 100_000
_LEAST_FACTOR = 0.25


@dataclass(frozen=True)
class CalibrationRequest:
    """What the ranks of a calibration are told."""

    data: str
    seconds: float = SECONDS
    trial: str | None = None  # a configuration

    def to_json(self) -> str:
        """For a worker; the mode says what it is."""
        return json.dumps({"mode": "calibrate", **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> CalibrationRequest:
        """Inverse of `to_json`."""
        values = json.loads(text)
        return cls(values["data"], float(values["seconds"]), values["trial"])


@dataclass(frozen=True)
class TrialNetwork:
    """The network that is to be planned, and a small graph like that it is for.

    Args:
        settings: Fields of a `FullBatchConfig`.
        features: Their width.
        degree: Edges of a node.
        nodes: Of a rank.
    """

    settings: Mapping[str, Any]
    features: int
    classes: int
    degree: float
    nodes: int

    @classmethod
    def of(cls, config: ResolvedConfig, graph: GraphSize, ranks: int) -> TrialNetwork | None:
        """None for graphs of several types, and networks that are made for them."""
        width = graph.features.get(graph.target, 0)
        if len(graph.nodes) > 1 or len(graph.edges) > 1 or config.model not in _TRIED or not width:
            return None
        names = ["model", "hidden", "layers", "dropout", "residual", "norm", "encoder", "dtype"]
        names += ["heads"] * config.model.startswith("gat") + ["aggregator"] * (
            config.model == "sage"
        )
        heads = config.heads if config.model.startswith("gat") else 1
        wide = max(width, config.hidden * heads)
        degree = graph.num_edges / max(1.0, graph.num_nodes)
        # As large that tables pass caches, and as small that an epoch takes a second or so.
        nodes = int(_TRIAL_NUMBERS / (wide * config.layers * (degree + _TRIAL_OVER)))
        return cls(
            {name: getattr(config, name) for name in names},
            width,
            graph.num_classes,
            degree,
            max(1000, min(nodes, int(graph.num_nodes / ranks), _MOST_TRIAL_NODES)),
        )


def calibrate(
    most_ranks: int, seconds: float = SECONDS, network: TrialNetwork | None = None
) -> Rates:
    """Measure the rates of this machine with as many ranks as it has processors, and are asked for.

    Args:
        network: What is to be planned with them; tried besides, for some more seconds.

    Raises:
        RankError: A worker failed.
    """
    from .launch import launch_workers

    num_ranks = max(1, min(most_ranks, len(os.sched_getaffinity(0))))
    found: list[dict[str, Any]] = []
    with TemporaryFolder() as folder:
        graph = random_graph(_TINY, 4 * _TINY, seed=0, feat_dim=8, num_classes=2)
        parts = os.path.join(folder, "parts")
        partition_graph(
            graph, "tiny", num_ranks, parts, part_method="random", reorder=False, quiet=True
        )
        trial = None if network is None else _trial(network, num_ranks, folder)
        request = CalibrationRequest(
            os.path.join(parts, "tiny.json"), seconds, None if trial is None else trial.to_json()
        )
        outcome = launch_workers(
            [sys.executable, "-m", "graphshard.train.launch", request.to_json()],
            num_ranks,
            timeout=120.0,
            on_event=lambda event: found.extend(event.get("rates", ())),
        )
        outcome.check()
        rates = rates_of(found, num_ranks)
        if trial is None:
            return rates
        took = max(each["epoch"] for each in found)
        return replace(rates, network=_factor(trial, rates, num_ranks, found[0]["how"], took))


def _trial(network: TrialNetwork, num_ranks: int, folder: Path) -> FullBatchConfig:
    """The run of a trial, on a graph that is partitioned for it."""
    nodes = network.nodes * num_ranks
    graph = community_graph(
        nodes,
        int(nodes * network.degree / 2),
        feat_dim=network.features,
        num_classes=max(2, network.classes),
    )
    parts = os.path.join(folder, "trial")
    partition_graph(graph, "trial", num_ranks, parts, part_method="multilevel", quiet=True)
    data = os.path.join(parts, "trial.json")
    return FullBatchConfig(data=data, epochs=2, eval_every=2, **network.settings)


def _factor(trial: FullBatchConfig, rates: Rates, num_ranks: int, how: str, took: float) -> float:
    """What computing took, over what the rates say."""
    size, kind = size_of_partition(Path(trial.data), trial)
    network = network_of(trial.resolved(facts_of(size)), size, kind)
    exchanges = replace(exchanges_of(trial), mode=how, num_ranks=num_ranks)  # type: ignore[arg-type]
    planned = plan_full_batch(size, network, Machines(rates=rates), exchanges)
    return max(_LEAST_FACTOR, (took - planned.exchange) / planned.compute)


def rates_of(found: list[dict[str, Any]], num_ranks: int) -> Rates:
    """Rates from what each rank measured: name to its rounds, and its memory."""
    values: dict[str, float] = {}
    spread: dict[str, float] = {}
    for name in found[0]["rounds"]:
        slowest = min((each["rounds"][name] for each in found), key=statistics.median)
        middle = statistics.median(slowest)
        values[name] = middle
        spread[name] = max(abs(value / middle - 1) for value in slowest)
    return Rates(
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
            "rounds": measured_rounds(request.seconds),
            "interpreter": interpreter,
            "own": own,
            "threads": torch.get_num_threads(),
        }
        if request.trial is not None:
            trial = config_from_json(request.trial)
            assert isinstance(trial, FullBatchConfig)
            result = FullBatchRun(trial).train()
            mine |= {"epoch": result.seconds_per_epoch, "how": result.aggregation}
        texts = gather_texts(group_state(), json.dumps(mine))
        if rank() == 0:
            send_event({"rates": [json.loads(text) for text in texts]})
        barrier()
        shutdown_comms()

    return work


def measured_rounds(seconds: float) -> dict[str, list[float]]:
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

    kinds: dict[str, tuple[Callable[[], Any], float]] = {
        "product": (lambda: affine([(rows, matrix)]), products),
        "weights": (lambda: rows.t() @ other, products),
        "edges": (lambda: gspmm(adjacency, "copy_lhs", "sum", rows, None), edges * numbers),
        "attention": (attend, 3.5 * edges * numbers),
        "elements": (lambda: rows + other, 3 * _ROWS * numbers),
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    each = seconds / (len(kinds) + 3) / _ROUNDS
    tiny, seeds = torch.randn(64, 8), torch.randint(0, _ROWS, (2000,))
    for _ in range(_ROUNDS):
        for name, (run, amount) in kinds.items():
            found[name].append(_rate(run, amount, each))
        if num_ranks > 1:
            exchanged = other[:sent]

            def exchange(rows: Tensor = exchanged) -> None:
                ragged_all_to_all(rows, splits, splits)

            found.setdefault("exchange", []).append(_rate(exchange, sent * numbers, each, times=3))
        found.setdefault("start", []).append(1 / _rate(lambda: tiny + tiny, 1.0, each / 4))
        found.setdefault("sampled", []).append(
            _rate(lambda: draw_neighbors(indptr, seeds, 10, 1, seeds, indices=indices), 2e4, each)
        )
    return found


def _rate(run: Callable[[], Any], amount: float, seconds: float, times: int = 0) -> float:
    """Amount a second, of runs during some time, or of a number of runs, the same on all ranks."""
    run()
    barrier()
    start, count = time.perf_counter(), 0
    while count < times or (not times and (count == 0 or time.perf_counter() - start < seconds)):
        run()
        count += 1
    return amount * count / (time.perf_counter() - start)
