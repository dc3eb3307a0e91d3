# SPDX-License-Identifier: Apache-2.0
"""What a run is expected to need, told at its start and held against what it took at its end.

Nothing is measured for it: the sizes are those of the parts that were read. Seconds are told where
the environment variable GRAPHSHARD_RATES names a file that ``graphshard plan --save-rates`` wrote;
without one only memory and bytes are, which need no rates.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from .._base.memory import PeakMemory, available_memory, own_memory, peak_own_memory
from .._base.typing import CanonicalEType
from ..comm import rank, world_size
from ..comm.collectives import gather_int, reduce_floats, reduce_ints
from ..errors import ModelError
from ..fullbatch import ExtendedEdges, StoredEdges
from ..plan import (
    BATCHES_EVALUATED,
    EXTENDED_BYTES_PER_EDGE,
    STRUCTURE_BYTES_PER_EDGE,
    EpochPlan,
    GraphSize,
    LearntColumns,
    Machines,
    Network,
    PartSize,
    Rates,
    budget_of,
    plan_full_batch,
    plan_sampled,
    read_rates,
)
from ._config import FullBatchConfig, ResolvedConfig
from ._learner import Learner
from ._plan_inputs import exchanges_of, learnt_columns, network_of, sampling_of
from ._result import TrainResult
from ._training_shard import TrainingShard

RATES_VARIABLE = "GRAPHSHARD_RATES"
_ROOMY = 0.75
"""Share of a budget up to which evaluations are made in larger batches."""

_BESIDE_IMPORTS = 2.1e7
_OWN_BESIDE_IMPORTS = 6e6
"""Bytes that a process which trains a tiny graph takes beside what it has imported: threads; and
how many of these are no pages of files."""
_SPREAD = 0.25
"""Of the memory that is planned for a sampled run: freed blocks that malloc keeps, and the rest."""


_EDGE_BYTES = {StoredEdges: 0.0, ExtendedEdges: EXTENDED_BYTES_PER_EDGE}


@dataclass(frozen=True)
class PlannedRun:
    """What a run will need.

    Args:
        memory: Bytes of the largest rank.
        needed: The same with what the plan may be off by, of what is planned and not measured.
        sent: Bytes that all ranks send in an epoch.
        seconds: Of an epoch; None without rates.
        resident: Bytes of this process when the run began.
        is_own: Whether memory is counted without pages of files.
        items: Bytes of this rank by what they are for.
        left: Bytes that processes of this host could still get when the plan was made.
        is_whole: Whether an epoch is one step on the whole graph.
    """

    memory: float
    needed: float
    sent: float
    seconds: float | None
    resident: float
    is_own: bool
    items: Mapping[str, float]
    left: float
    is_whole: bool

    def at_start(self) -> str:
        """A line before the first epoch."""
        text = f"planned: {_mebibytes(self.memory)} MiB a worker, Python and torch included"
        text += " and pages of files not" if self.is_own else ""
        if world_size() > 1:
            text += f", {self.sent / 1e6:,.1f} MB sent per epoch"
        text += "" if self.seconds is None else f", {self.seconds:.3g} s per epoch"
        beside = int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))
        left = self.left / beside + self.resident
        if self.memory <= left or not self.items.get("features"):
            return text
        return (
            f"{text}; {_mebibytes(left)} MiB are left for each: with memory "
            f"({'--memory, or --mode sample --memory' if self.is_whole else '--memory'}) features "
            "stay in files"
        )

    def at_end(self, result: TrainResult) -> str:
        """A line that compares; collective."""
        if self.is_own:
            took = float(max(gather_int(peak_own_memory() if self.is_whole else own_memory())))
            shown = f"{_mebibytes(took)} MiB {'at most' if self.is_whole else 'at the end'}"
        else:
            took = max(result.peak_memory) + self.resident
            shown = f"{_mebibytes(took)} MiB a worker"
        parts = [_compared("memory", self.memory, took, shown)]
        if self.sent:
            sent = sum(result.bytes_per_epoch)
            parts.append(_compared("bytes", self.sent, sent, f"{sent / 1e6:,.1f} MB"))
        if self.seconds is not None:
            seconds = result.seconds_per_epoch
            parts.append(_compared("time", self.seconds, seconds, f"{seconds:.3g} s"))
        return f"against the plan: {', '.join(parts)}"


def _mebibytes(count: float) -> str:
    return f"{count / 2**20:,.0f}"


def _compared(name: str, planned: float, took: float, shown: str) -> str:
    if not took:
        return f"{name} {shown}"
    return f"{name} {shown} ({100 * (took / planned - 1):+.0f} %)"


class RunPlanner:
    """Plans of one run, by which its mode, caches and evaluations are chosen, too.

    They are of one network, so that one of the user's own is rehearsed once for all of them.

    Args:
        memory: Made when the run began.
    """

    def __init__(
        self, learner: Learner, shard: TrainingShard, config: ResolvedConfig, memory: PeakMemory
    ) -> None:
        self._learner, self._shard, self._config = learner, shard, config
        self._memory = memory
        self._network: Network | None = None

    def run(
        self,
        cache_bytes: float = 0.0,
        batches_evaluated: int = 1,
        tell: Callable[[str], None] | None = None,
    ) -> PlannedRun | None:
        """The plan of the run as it has been set up; collective.

        Args:
            cache_bytes: What a cache of rows in files may take.
            batches_evaluated: Batches that are one in evaluations of features in files.
            tell: Called with the reason if a model of the user's own cannot be planned.

        Returns:
            What the largest and the slowest of all ranks need.
            None where there is no plan: of an own model that fails on small graphs, and on a GPU.
        """
        memory = self._memory
        if self._learner.device.type != "cpu":
            return None
        path = os.environ.get(RATES_VARIABLE)
        rates = Rates() if path is None else read_rates(path)
        # What was imported is known here; a program that did something else before has more.
        trains = memory.base + _BESIDE_IMPORTS
        rates = replace(
            rates,
            interpreter=trains if path is None else max(rates.interpreter, memory.base),
            own=max(rates.own, memory.base_own + _OWN_BESIDE_IMPORTS),
        )
        epoch, why = None, ""
        try:
            epoch = self._epoch(rates, cache_bytes, batches_evaluated)
        except ModelError as error:
            why = f": {error}"
        if reduce_ints([epoch is None], "max")[0] or epoch is None:
            if tell is not None:
                tell(f"there is no plan{why}")
            return None
        # Of each rank: memory, with a margin, bytes and seconds, which differ.
        memory_planned = epoch.memory.expected - epoch.items.get("interpreter", 0.0)
        figures = [0.0] * (4 * world_size())
        figures[4 * rank() : 4 * rank() + 4] = (
            epoch.memory.expected,
            epoch.memory.expected + _SPREAD * memory_planned,
            epoch.sent.expected,
            epoch.seconds.expected,
        )
        if world_size() > 1:
            figures = reduce_floats(figures)
        return PlannedRun(
            memory=max(figures[::4]),
            needed=max(figures[1::4]),
            sent=sum(figures[2::4]) if world_size() > 1 else 0.0,
            seconds=None if path is None else max(figures[3::4]),
            resident=memory.start,
            is_own=self._config.memory_bytes is not None,
            items=epoch.items,
            left=available_memory(),
            is_whole=isinstance(self._config, FullBatchConfig),
        )

    def evaluations(self) -> tuple[PlannedRun | None, int]:
        """A plan whose evaluations go layer by layer in batches as large as a budget takes.

        Collective.

        Returns:
            The plan, and how many batches of training are one.
        """
        budget = self._config.memory_bytes
        assert budget is not None
        for batches in BATCHES_EVALUATED:
            planned = self.run(batches_evaluated=batches)
            if planned is not None and planned.needed <= _ROOMY * budget:
                break
        return planned, batches

    def _epoch(self, rates: Rates, cache_bytes: float, batches_evaluated: int) -> EpochPlan:
        """An epoch of this rank, of which all others have as much."""
        learner, shard, config = self._learner, self._shard, self._config
        data, num_ranks = shard.data, world_size()
        halo: Mapping[str, float] = {}
        if num_ranks > 1:
            halo = {t: float(learner.graph.halo_rows(t)) for t in learner.graph.srctypes}
        edges = {etype: float(of_type.num_edges) for etype, of_type in data.edges.items()}
        cut = {etype: float(of_type.num_cut(data.rank)) for etype, of_type in data.edges.items()}
        part = PartSize(
            nodes={t: float(data.num_owned(t)) for t in data.node_type_names},
            edges=edges,
            halo=halo,
            sent=halo,  # over all ranks it is as much
            cut=cut,
            train=float(shard.rows["train"].numel()) if "train" in shard.rows else 0.0,
            **_sizes_on_edges(shard),
        )
        graph = GraphSize(
            name=data.graph_name,
            nodes={t: float(n) for t, n in shard.num_all.items()},
            edges={
                etype: float(data.partition_book.num_edges(etype))
                for etype in data.canonical_etypes
            },
            features=shard.feature_widths,
            learnt=_learnt_columns(shard),
            edge_widths=_edge_widths(shard),
            relations=() if shard.edges is None else shard.edges.relations,
            is_of_links=shard.links is not None,
            scored=part.scored,
            evaluated=part.evaluated,
            scored_width=_scored_width(shard),
            num_classes=shard.task.width,
            target=shard.target,
            train=float(shard.num_nodes.get("train", 0)),
            itemsize=max((rows.element_size() for rows in shard.features.values()), default=4),
            num_relations=shard.num_relations,
            parts=(part,) * num_ranks,
        )
        if self._network is None:
            self._network = network_of(config, graph, shard.task_info.kind)
        network = self._network
        if isinstance(config, FullBatchConfig):
            network = replace(network, in_files=config.memory_bytes is not None)
        machines = Machines(rates=rates)
        sampling = sampling_of(config, config)
        if sampling is not None:
            if sampling.in_files:
                in_memory = [
                    _EDGE_BYTES.get(type(of_type), STRUCTURE_BYTES_PER_EDGE)
                    for of_type in data.edges.values()
                ]
                sampling = replace(
                    sampling,
                    cache_bytes=cache_bytes,
                    edge_bytes=max(in_memory, default=0.0),
                    batches_evaluated=batches_evaluated,
                )
            return plan_sampled(graph, network, num_ranks, machines, sampling)
        how = replace(exchanges_of(config), num_ranks=num_ranks)
        if learner.graph.mode == "sequential":
            how = replace(how, mode="sequential")
        if halo and len(edges) == 1 and network.sums_rows:
            come = float(learner.graph.halo_rows(sums=True))
            part = replace(part, fewest=dict.fromkeys(halo, (come, come)))
            graph = replace(graph, parts=(part,) * num_ranks)
        return plan_full_batch(graph, network, machines, how)


def room_beside(planned: PlannedRun | None, memory: float, cure: str) -> int:
    """Bytes of a budget that a run leaves for rows of files that are read most.

    Args:
        cure: What helps beside more memory and more parts, "mode sample, " or nothing.

    Raises:
        ValueError: The run needs more than the budget by itself.
    """
    if planned is None:  # what it will need is not known
        return budget_of(max(0.0, memory - own_memory()))
    needed = planned.needed
    if needed > memory:
        largest = sorted(planned.items.items(), key=lambda item: -item[1])[:3]
        named = ", ".join(f"{name} {_mebibytes(size)}" for name, size in largest)
        raise ValueError(
            f"memory must be at least {_mebibytes(needed)} MiB for a worker of this run (got "
            f"{_mebibytes(memory)} MiB; most of it in MiB: {named}); give more, "
            f"{cure}or partition into more parts"
        )
    return int(memory - needed)


def _sizes_on_edges(shard: TrainingShard) -> dict[str, Any]:
    """Of this rank's part, the edges of the task, and the rows of their sources that come.

    A prediction has no splits.
    """
    edges, rows, come = shard.edges, shard.rows, 0
    if edges is None:
        return {}
    if "train" in rows:
        chosen = edges.at(rows["train"])
        for ntype, places in chosen.by_type(0):
            distinct = torch.unique(chosen.src[places])
            come += int((shard.data.node_map(ntype).part_of(distinct) != rank()).sum())
    evaluated = [rows[split].numel() for split in ("val", "test") if split in rows]
    return {
        "scored": float(len(edges)),
        "evaluated": float(max(evaluated, default=0)),
        "fetched": (float(come), float(come)),  # over all ranks as many are sent
    }


def _scored_width(shard: TrainingShard) -> int:
    """Columns of the features of edges that are scored."""
    if shard.edges is None or shard.links is not None:
        return 0
    return sum(shard.edge_feature_widths.get(etype, 0) for etype in shard.edges.relations)


def _learnt_columns(shard: TrainingShard) -> dict[str, LearntColumns]:
    learnt = {}
    for ntype in dict.fromkeys([*shard.category_counts, *shard.sparse_counts]):
        sparse = shard.sparse.get(ntype)
        learnt[ntype] = learnt_columns(
            shard.category_counts.get(ntype, ()),
            shard.sparse_counts.get(ntype, 0),
            None if sparse is None else sparse.columns,
        )
    return learnt


def _edge_widths(shard: TrainingShard) -> dict[CanonicalEType, dict[str, int]]:
    """Relation to the width of what its edges have, by name."""
    widths: dict[CanonicalEType, dict[str, int]] = {}
    for etype, width in shard.edge_feature_widths.items():
        widths.setdefault(etype, {})["feat"] = width
    for etype in shard.edge_weights:
        widths.setdefault(etype, {})["weight"] = 1
    return widths
