# SPDX-License-Identifier: Apache-2.0
"""What a run will need, for each number of ranks: seconds, bytes and memory, before it is paid for.

An epoch is simulated on paper (`_tape`, `_networks`, `_losses`) for what each rank has (`_graphs`),
and takes the time that its work takes at the `Rates` of a machine. Time that an exchange takes
beyond what is computed meanwhile is not hidden. What is not simulated is said in a plan's
``notes``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from .._base.file_rows import BLOCK_BYTES
from ._choices import budget_of, fits_oneshot, fits_replicated
from ._graphs import GraphSize, estimated_parts, sampled_parts
from ._losses import evaluate, loss_of, score_edges
from ._malloc import MALLOC_KEEPS
from ._rates import Rates
from ._sizes import Exchanges, Network, PartSize
from ._tape import Memory, Tape, TapeRows, Work

Mode = Literal[
    "full batch",
    "full batch, rematerialized",
    "full batch, features in files",
    "sampled",
    "sampled, features in files",
]

STRUCTURE_BYTES_PER_EDGE = 34.0
"""Of edges in a process: owner, source, destination, two groupings, and two ids of 8 bytes."""

_DROPPED_BYTES_PER_EDGE = 22.0
"""Of edges that attention drops out, above that: numbers over all ranks, and another grouping."""

EXTENDED_BYTES_PER_EDGE = 8.0
"""Of edges in files with others beside them: sources and ids by destination."""

NODE_BYTES = 60.0
"""Of a node in a process: ids, label, masks, degrees and pointers."""

SET_UP_BYTES_PER_EDGE = 50.0
"""While a part is read and its missing edges are found."""

EDGE_ROW_BYTES = 72.0
"""Of an edge of a task on edges: five ids, a label, its split, and places of its ends."""

EDGE_STEP_BYTES = 48.0
"""Of those among them that a step scores: their ids once more."""

FACT_BYTES = 16.0
"""Of an edge of a task on links, for each side that is ranked: what is known of its other end."""

ADAM = 4
"""Numbers for each parameter: itself, its gradient, two moments."""

_OVER_THE_LINK = 1.04
_OVER_THE_LINK_OF_MORE = 1.1
"""What an exchange takes of the time of its link, with two ranks (headers of frames) and with more,
by TCP's cubic: 1.09 and 1.12 with four and eight. With bbr it is 1.15 to 1.35."""

BATCHES_EVALUATED = (16, 4, 1)
"""Batches of training that may be one where an evaluation goes layer by layer: the more the fewer
rows are read twice, and the more memory it takes."""

_FILE_BYTES_PER_EDGE = 8.0
_FILE_BYTES_PER_CUT_EDGE = 6.4
_FILE_BYTES_PER_NODE = 20.0
"""Pointers to in-edges, original ids, a label and masks."""

_EPOCHS = 4
"""Epochs that are gone through for what malloc keeps: later ones add a hundredth or two."""

_PIECE_OF_EDGES = 1 << 20  # as in fullbatch/_partition_data.py
_KEPT_BY_LOADERS = 1 << 30  # as _LARGEST_BLOCK in _base/memory.py, which malloc is told

_BLOCKS_READ = 2
"""Blocks of features in files that are there at once: one that is used, and the next."""

_VALIDATED_RANKS, _VALIDATED_IN_TIME, _VALIDATED_BYTES = 16, 2, 2 << 30
_OFF_SAMPLED = 0.5
"""By which share the time of a sampled epoch may be off: none was measured."""

_MEMORY_SPREAD, _MEMORY_SPREAD_ESTIMATED = 0.10, 0.15


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How batches are drawn; fields as those of `graphshard.train.SampledConfig`.

    Args:
        in_files: Features stay in files, and evaluations go layer by layer: ``memory`` there. What
            is planned is the memory of processes without pages of files.
        edge_bytes: Of an edge in a process, where features are in files. Edges are, too, unless
            some are added; None: as the graph says.
        batches_evaluated: Batches of training that are one in evaluations layer by layer.
    """

    fanouts: tuple[int, ...]
    batch_size: int = 1000
    prefetch: int = 2
    transport: str = "auto"
    map_features: bool = True
    cache_bytes: float = 0.0
    in_files: bool = False
    edge_bytes: float | None = None
    batches_evaluated: int = 4


@dataclass(frozen=True, kw_only=True)
class Machines:
    """What ranks run on.

    Args:
        memory: Bytes of a host; None: not known, everything fits.
        link: Bytes a second between hosts; None: all ranks are on one host.
        ranks_per_host: How many share a host's memory and link.
    """

    rates: Rates
    memory: float | None = None
    link: float | None = None
    ranks_per_host: int = 1

    def on_host(self, num_ranks: int) -> int:
        """How many of so many ranks are on one host."""
        return num_ranks if self.link is None else min(num_ranks, self.ranks_per_host)

    def rates_of(self, num_ranks: int) -> Rates:
        """What one of so many ranks does."""
        return self.rates.beside(self.on_host(num_ranks))


@dataclass(frozen=True)
class Range:
    """A figure and its spread."""

    low: float
    expected: float
    high: float

    @classmethod
    def around(cls, value: float, share: float) -> Range:
        return cls(value / (1 + share), value, value * (1 + share))


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """One epoch in one mode on one number of ranks, as the slowest and the largest rank have it.

    Args:
        seconds: Of the epoch.
        compute: Seconds of it that are computed.
        exchange: Seconds of it that wait for an exchange.
        memory: Bytes of the largest rank.
        items: Of these, by what they are for.
        sent: Bytes that the rank that sends most sends, with the zeros that links are spared.
        sent_in_all: Bytes that all ranks send.
        disk: Bytes of the partition.
        fits: Whether the ranks of a host fit its memory.
        bound_by: What takes most of the time, or of the memory if it does not fit.
        by_layer: Layer and direction to the bytes that the rank that sends most sends.
        is_counted: Whether the parts are there and were counted.
        steps: Of an epoch.
        not_validated: Which of the figures nothing was held against, on so many ranks.
    """

    ranks: int
    mode: Mode
    seconds: Range
    compute: float
    exchange: float
    memory: Range
    items: Mapping[str, float]
    sent: Range
    sent_in_all: float
    disk: float
    fits: bool
    bound_by: str
    by_layer: Mapping[str, float]
    is_counted: bool
    not_validated: tuple[str, ...]
    steps: int = 1

    def as_dict(self) -> dict[str, Any]:
        """Numbers, texts and dicts, as JSON has them."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class PartitioningPlan:
    """What it takes to make the parts, on one machine.

    Args:
        cpu_seconds: Of processors, all together.
        memory: Bytes above those of the process itself.
        disk: Bytes while it is made: parts, and the edges in the order of each stage.
    """

    method: str
    cpu_seconds: Range
    seconds: Range
    memory: Range
    disk: Range


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A row for each number of ranks, and what to take."""

    graph: str
    rows: tuple[EpochPlan, ...]
    partitioning: PartitioningPlan
    fewest: int | None
    notes: tuple[str, ...]
    rates: Rates

    def as_dict(self) -> dict[str, Any]:
        """Numbers, texts, lists and dicts, as JSON has them."""
        return {**asdict(self), "rows": [row.as_dict() for row in self.rows]}


@dataclass
class _Step:
    """What one rank does in one step."""

    memory: Memory
    tape: Tape

    @property
    def sent(self) -> float:
        return sum(e.sent for e in self.tape.exchanges)


def make_plan(
    graph: GraphSize,
    network: Network,
    ranks: Sequence[int],
    machines: Machines,
    *,
    exchanges: Exchanges | None = None,
    aggregation: str = "auto",
    sampling: Sampling | None = None,
    method: str = "multilevel",
) -> RunPlan:
    """The plan of a run on each of some numbers of ranks.

    Args:
        exchanges: How rows of others come; its mode and number of ranks are chosen here.
        aggregation: ``"auto"``, ``"oneshot"`` or ``"sequential"``.
        sampling: How batches are drawn. Given, that is the mode; None: full batch, and where that
            does not fit, the usual fanouts.
        method: How nodes are assigned, ``"random"`` or another.

    Raises:
        ValueError: A number of ranks is below 1, or there are more than nodes.
    """
    graph = graph.with_counted_share()
    rows = []
    for number in ranks:
        if number < 1 or number > max(1.0, graph.num_nodes):
            raise ValueError(
                f"ranks must be at least 1 and at most the {graph.num_nodes:,.0f} nodes (got "
                f"{number})"
            )
        rows.append(
            best_epoch(
                graph, network, number, machines, exchanges or Exchanges(mode="oneshot"),
                aggregation, sampling, method,
            )
        )  # fmt: skip
    fewest = next((row.ranks for row in sorted(rows, key=lambda r: r.ranks) if row.fits), None)
    most = max(ranks)
    return RunPlan(
        graph=graph.name,
        rows=tuple(rows),
        partitioning=plan_partitioning(graph, method, most),
        fewest=fewest,
        notes=_notes(graph, machines, most),
        rates=machines.rates,
    )


def best_epoch(
    graph: GraphSize,
    network: Network,
    num_ranks: int,
    machines: Machines,
    exchanges: Exchanges,
    aggregation: str = "auto",
    sampling: Sampling | None = None,
    method: str = "multilevel",
) -> EpochPlan:
    """The epoch on a number of ranks in the first mode that fits, else in the one that takes least.

    The order: all remote rows at once, one part's at a time, the same with features in files,
    sampled, sampled from files.
    """
    if sampling is not None:
        planned = plan_sampled(graph, network, num_ranks, machines, sampling, method)
        if planned.fits or sampling.in_files:
            return planned
        in_files = replace(sampling, in_files=True)
        other = plan_sampled(graph, network, num_ranks, machines, in_files, method)
        return other if other.fits else min(planned, other, key=lambda p: p.memory.expected)
    modes = ["oneshot", "sequential"] if aggregation == "auto" else [aggregation]
    tried = []
    for mode in modes:
        how = replace(exchanges, mode=mode, num_ranks=num_ranks)  # type: ignore[arg-type]
        planned = plan_full_batch(graph, network, machines, how, method)
        halo = max(sum(part.halo.values()) for part in parts_of(graph, num_ranks, method)[0])
        free = (machines.memory or math.inf) / machines.on_host(num_ranks)
        room = (
            math.inf if math.isinf(free) else budget_of(max(0.0, free - machines.rates.interpreter))
        )
        is_free = aggregation != "auto" or fits_oneshot(halo, _row_width(network), room)
        if planned.fits and (mode == "sequential" or is_free or num_ranks == 1):
            return planned
        tried.append(planned)
    fitting = [planned for planned in tried if planned.fits]
    if fitting:
        return fitting[-1]
    network_in_files = replace(network, in_files=True)
    for mode in modes:
        how = replace(exchanges, mode=mode, num_ranks=num_ranks)  # type: ignore[arg-type]
        planned = plan_full_batch(graph, network_in_files, machines, how, method)
        if planned.fits:
            return planned
        tried.append(planned)
    usual = Sampling(fanouts=(10,) * network.layers)
    sampled = best_epoch(graph, network, num_ranks, machines, exchanges, aggregation, usual, method)
    return sampled if sampled.fits else min([*tried, sampled], key=lambda p: p.memory.expected)


def _row_width(network: Network) -> int:
    """Columns of the widest row that is exchanged, nearly."""
    heads = network.heads if network.model in ("gat", "gatv2") else 1
    return max(network.hidden * heads, *network.features.values(), 1)


def parts_of(
    graph: GraphSize, num_ranks: int, method: str = "multilevel", which: int = 1
) -> tuple[tuple[PartSize, ...], bool]:
    """What ranks have, and whether that was counted.

    Args:
        which: Of the spread of halos: 0 for the least, 1 for what is expected, 2 for the most.
    """
    if len(graph.parts) == num_ranks:
        return graph.parts, True
    share = 1.0 if method == "random" else graph.share[which]
    return estimated_parts(graph, num_ranks, share), False


# -- full batch ------------------------------------------------------------------------------------


def fixed_items(
    graph: GraphSize,
    network: Network,
    part: PartSize,
    rates: Rates,
    sampling: Sampling | None = None,
) -> dict[str, float]:
    """What a rank has in memory all the time, but for the model."""
    features = sum(n * network.dense_width(t) for t, n in part.nodes.items())
    copies = _copies(graph, network)
    learnt_columns = sum(
        part.nodes[t] * (of.stored_bytes(network.itemsize) + of.stored_entries * of.converted_bytes)
        for t, of in network.learnt.items()
    )
    in_files = network.in_files or (sampling is not None and sampling.in_files)
    of_edges = (
        0.0
        if in_files
        else sum(n * sum(graph.edge_widths.get(t, {}).values()) for t, n in part.edges.items())
    )
    learnt = sum(n for t, n in part.nodes.items() if t not in network.features)
    wide = network.hidden * (network.heads if network.model in ("gat", "gatv2") else 1)
    reading = 0.0
    if network.in_files:
        reading, features = _block_bytes(graph, network, features), 0.0
    of_edge = STRUCTURE_BYTES_PER_EDGE
    if network.model in ("gat", "gatv2") and network.dropout and sampling is None:
        of_edge += _DROPPED_BYTES_PER_EDGE
    return {
        "interpreter": rates.own if network.in_files else rates.interpreter,
        "features": (features + of_edges) * copies + learnt_columns,
        "edges of the task": task_bytes(graph, network, part),
        "blocks of features": reading,
        "structure": sum(part.edges.values()) * of_edge
        + sum(part.nodes.values()) * NODE_BYTES
        + sum(part.halo.values()) * 16,
        "parameters and optimizer": learnt * wide * ADAM * network.itemsize,
    }


def _block_bytes(graph: GraphSize, network: Network, count: float) -> float:
    """Of the blocks in which so many numbers are read, as stored, as given and random factors."""
    stored = min(float(BLOCK_BYTES), count * graph.itemsize)
    given = stored * network.itemsize / graph.itemsize
    is_typed = len(graph.nodes) > 1 or len(graph.edges) > 1
    is_dropped = network.dropout > 0 and not network.encoder and not is_typed
    number = min(_BLOCKS_READ, max(1, math.ceil(count * graph.itemsize / BLOCK_BYTES)))
    is_converted = network.itemsize != graph.itemsize
    return number * given * (1 + is_dropped) + stored * is_converted


def _copies(graph: GraphSize, network: Network) -> int:
    """Bytes of a number of the features: as they are stored, and as they are computed with."""
    return graph.itemsize + (network.itemsize if graph.itemsize != network.itemsize else 0)


def task_bytes(graph: GraphSize, network: Network, part: PartSize) -> float:
    """Of the edges of a task on edges, and of what is known of links."""
    if network.edges is None:
        return 0.0
    size = part.scored * (EDGE_ROW_BYTES + network.edges.edge_width * network.itemsize)
    if not network.edges.out:
        size += part.scored * FACT_BYTES * len(network.edges.sides)
    return size


def full_batch_step(
    graph: GraphSize, network: Network, part: PartSize, how: Exchanges, rates: Rates
) -> _Step:
    """An epoch of one rank."""
    memory = Memory(
        fixed_items(graph, network, part, rates), _freed_in_set_up(graph, network, part)
    )
    set_up = sum(part.edges.values()) * (SET_UP_BYTES_PER_EDGE - STRUCTURE_BYTES_PER_EDGE)
    memory.take(set_up, "mapped", "setting up")
    memory.give_back(set_up, "mapped", "setting up")
    for ntype, learnt in network.learnt.items():
        memory.fixed["features"] += part.nodes[ntype] * learnt.edge_bytes(network.itemsize)
    parts = [part] * network.layers
    tapes = []
    for _ in range(_EPOCHS):
        tape = Tape(memory, network.itemsize)
        ids = _ids_of_edges(memory, network, part)
        tape.backward(loss_of(tape, network, parts, how, graph.target))
        tape.step()
        del ids
        without_backward = Tape(memory, network.itemsize, records=False)
        evaluate(without_backward, network, parts, how, graph.target)
        memory.end_epoch()
        tapes.append(tape)
    return _Step(memory, tapes[0])


def _freed_in_set_up(graph: GraphSize, network: Network, part: PartSize) -> float:
    """The largest block that malloc gives back before the first epoch, and would not map then.

    Ends of edges are looked at as numbers of 8 bytes: all at once where edges are added or scored,
    and a piece at a time otherwise. Places of non-zeros of sparse features are such numbers, too.
    """
    stored = graph.num_stored_edges
    has_changed = network.edges is not None or stored not in (None, graph.num_edges)
    most = math.inf if has_changed else _PIECE_OF_EDGES
    sizes = [8.0 * min(count, most) for count in part.edges.values()]
    for ntype, learnt in network.learnt.items():
        sizes.append(8.0 * learnt.entries * part.nodes[ntype])
    return max((size for size in sizes if size < MALLOC_KEEPS), default=0.0)


def _ids_of_edges(memory: Memory, network: Network, part: PartSize) -> TapeRows | None:
    """What a step on edges has for each of them, besides their rows."""
    if network.edges is None:
        return None
    width = EDGE_STEP_BYTES + network.edges.edge_width * network.itemsize
    return Tape(memory, 1).new(part.train, width)


def plan_full_batch(
    graph: GraphSize,
    network: Network,
    machines: Machines,
    how: Exchanges,
    method: str = "multilevel",
) -> EpochPlan:
    """An epoch of full batch on ``how.num_ranks`` ranks."""
    num_ranks, rates = how.num_ranks, machines.rates_of(how.num_ranks)
    how = replace(how, between_hosts=machines.on_host(num_ranks) < num_ranks)
    parts, is_counted = parts_of(graph, num_ranks, method)
    steps = [full_batch_step(graph, network, part, how, rates) for part in parts]
    model_bytes = model_numbers(steps[0].tape) * network.itemsize if num_ranks > 1 else 0.0
    tapes = [step.tape for step in steps]
    compute, exchange = slowest(tapes, machines, num_ranks, model_bytes)
    largest = max(steps, key=lambda step: step.memory.peak)
    most = max(steps, key=lambda step: step.sent)
    seconds, sent = [compute + exchange], [most.sent + model_bytes]
    peaks = [largest.memory.peak]
    for which in (0, 2) if num_ranks > 1 else ():
        of_spread = tapes
        if not is_counted:
            (part,), _ = parts_of(graph, num_ranks, method, which)
            other = full_batch_step(graph, network, part, how, rates)
            of_spread = [other.tape]
            sent.append(other.sent + model_bytes)
            peaks.append(other.memory.peak)
        # Few rows, with many zeros, take least.
        seconds.append(sum(slowest(of_spread, machines, num_ranks, model_bytes, 2 - which)))
    spread = rates.uncertainty
    memory_spread = _MEMORY_SPREAD if is_counted else _MEMORY_SPREAD_ESTIMATED
    repeated = 1 if is_counted else num_ranks
    in_all = sum(step.sent for step in steps) * repeated + num_ranks * model_bytes
    fits = _fits(largest.memory.peak, machines, num_ranks)
    by_layer: dict[str, float] = {}
    for each in most.tape.exchanges:
        key = f"{each.layer}|{each.direction}"
        by_layer[key] = by_layer.get(key, 0.0) + each.sent
    mode: Mode = "full batch"
    if how.mode == "sequential":
        mode = "full batch, rematerialized"
    if network.in_files:
        mode = "full batch, features in files"
    return EpochPlan(
        ranks=num_ranks,
        mode=mode,
        seconds=Range(min(seconds) / (1 + spread), seconds[0], max(seconds) * (1 + spread)),
        compute=compute,
        exchange=exchange,
        memory=Range(min(peaks) * (1 - memory_spread), peaks[0], max(peaks) * (1 + memory_spread)),
        items=_rounded(largest.memory.at_peak),
        sent=Range(min(sent) * 0.98, sent[0], max(sent) * 1.02),
        sent_in_all=in_all,
        disk=graph.disk if is_counted and graph.disk else disk_bytes(graph, parts, num_ranks),
        fits=fits,
        bound_by=_bound(fits, largest.memory, compute, exchange, most.tape, rates),
        by_layer=by_layer,
        is_counted=is_counted,
        not_validated=_not_validated(machines, num_ranks, is_counted, peaks[0]),
    )


def _not_validated(
    machines: Machines, num_ranks: int, is_counted: bool, peak: float
) -> tuple[str, ...]:
    """What no measurement stands behind; the rest is in benchmarks/results/plan_*.md."""
    words = []
    if not is_counted and num_ranks > 1:
        words.append("halo")
    if num_ranks > _VALIDATED_RANKS or peak > _VALIDATED_BYTES:
        words.append("memory")
    is_tried = machines.rates.network != 1.0 and num_ranks <= _VALIDATED_IN_TIME
    if not is_tried:
        words.append("time")
    if machines.link is not None and not is_tried and num_ranks > 1:
        words.append("link")
    return tuple(words)


def model_numbers(tape: Tape) -> float:
    """Gradients that are summed over ranks."""
    return tape.num_parameters - tape.num_unused


def _rounded(items: Mapping[str, float]) -> dict[str, float]:
    return {name: round(size) for name, size in items.items() if round(size)}


def _fits(peak: float, machines: Machines, num_ranks: int) -> bool:
    return machines.memory is None or peak * machines.on_host(num_ranks) <= machines.memory


def _bound(
    fits: bool, memory: Memory, compute: float, exchange: float, tape: Tape, rates: Rates
) -> str:
    if not fits:
        name = max(memory.at_peak, key=lambda item: memory.at_peak[item])
        return f"memory: {name}"
    if exchange > compute:
        return "exchange"
    spent = {kind: amount / _rate(kind, rates) for kind, amount in tape.work.items()}
    words = {
        "product": "matrix products",
        "weights": "matrix products",
        "edges": "sums over edges",
        "attention": "attention",
        "elements": "memory bandwidth",
        "random": "random numbers",
        "pages": "new memory",
        "start": "starting operations",
    }
    totals: dict[str, float] = {}
    for kind, seconds in spent.items():
        totals[words[kind]] = totals.get(words[kind], 0.0) + seconds
    return max(totals, key=lambda name: totals[name])


def _rate(kind: Work, rates: Rates) -> float:
    return 1 / rates.start if kind == "start" else float(getattr(rates, kind))


def compute_seconds(work: Mapping[Work, float], rates: Rates) -> float:
    """Seconds of work on one rank."""
    pages = work.get("pages", 0.0) / rates.pages
    others = sum(n / _rate(kind, rates) for kind, n in work.items() if kind != "pages")
    return rates.network * others + pages


def slowest(
    tapes: Sequence[Tape],
    machines: Machines,
    num_ranks: int,
    model_bytes: float,
    zeros: int = 1,
) -> tuple[float, float]:
    """`epoch_seconds` of the rank that takes longest."""
    times = [epoch_seconds(tape, machines, num_ranks, model_bytes, zeros) for tape in tapes]
    return max(times, key=sum)


def epoch_seconds(
    tape: Tape, machines: Machines, num_ranks: int, model_bytes: float, zeros: int = 1
) -> tuple[float, float]:
    """(seconds that are computed, seconds of exchanges beyond what is computed meanwhile).

    What travels between hosts goes through sockets, by the core that computes: what is computed
    meanwhile hides the link, and not that; nor the passes that leave zeros out of messages.

    Args:
        zeros: Of the spread of zeros in rows that travel: 0 for the fewest, 2 for the most.
    """
    rates = machines.rates_of(num_ranks)
    goes_by_link = machines.link is not None and machines.on_host(num_ranks) < num_ranks
    waits = 0.0
    for each in tape.exchanges:
        hidden = compute_seconds(each.overlaps, rates)
        travels = each.travels(num_ranks - 1, zeros)
        took = exchange_seconds(each.sent, each.received, machines, num_ranks, max(travels))
        moved = sum(travels) / 2 / rates.exchange if goes_by_link else 0.0
        if goes_by_link:  # zeros are left out of what is read, and put into what is written
            packed = zip((each.sent, each.received), travels, strict=True)
            moved += sum(size + left for size, left in packed if left < size) / rates.elements
        waits += max(moved, took + each.rounds * rates.latency - hidden)
    if num_ranks > 1:  # a ring: twice the parameters, less one part
        twice = 2 * model_bytes * (1 - 1 / num_ranks)
        waits += exchange_seconds(twice, twice, machines, num_ranks)
        waits += 2 * math.log2(num_ranks) * rates.latency
    return compute_seconds(tape.work, rates), waits


def exchange_seconds(
    sent: float,
    received: float,
    machines: Machines,
    num_ranks: int,
    on_link: float | None = None,
) -> float:
    """Seconds that rows of one rank travel, while all ranks exchange theirs.

    Args:
        on_link: Bytes that a link between hosts takes for them; None: all.
    """
    here = machines.on_host(num_ranks)
    copied = (sent + received) / 2 / machines.rates_of(num_ranks).exchange
    if machines.link is None or here >= num_ranks:
        return copied
    across = (num_ranks - here) / (num_ranks - 1)
    over = _OVER_THE_LINK if num_ranks == 2 else _OVER_THE_LINK_OF_MORE
    most = max(sent, received) if on_link is None else on_link
    return max(here * across * most * over / machines.link, copied)


def disk_bytes(graph: GraphSize, parts: Sequence[PartSize], num_ranks: int) -> float:
    """Bytes of a partition's files."""
    repeated = num_ranks / len(parts)
    cut = sum(sum(part.cut.values()) for part in parts) * repeated
    columns = sum(n * graph.features.get(t, 0) for t, n in graph.nodes.items())
    return (
        graph.num_edges * _FILE_BYTES_PER_EDGE
        + cut * _FILE_BYTES_PER_CUT_EDGE
        + columns * graph.itemsize
        + graph.num_nodes * _FILE_BYTES_PER_NODE
    )


# -- sampled ---------------------------------------------------------------------------------------


def plan_sampled(
    graph: GraphSize,
    network: Network,
    num_ranks: int,
    machines: Machines,
    sampling: Sampling,
    method: str = "multilevel",
) -> EpochPlan:
    """An epoch on sampled blocks, and the memory that it and an evaluation of all nodes need."""
    rates = machines.rates_of(num_ranks)
    parts, is_counted = parts_of(graph, num_ranks, method)
    mine = graph.train / num_ranks
    batch = min(float(sampling.batch_size or mine), mine) or 1.0
    steps = max(1, math.ceil(mine / batch))
    blocks, drawn = sampled_parts(graph, sampling.fanouts, seeds_of(graph, network, batch), batch)
    part = max(parts, key=lambda p: sum(p.edges.values()))
    here = machines.on_host(num_ranks)
    items = fixed_items(graph, network, part, rates, sampling)
    whole = graph.num_edges * 4 + graph.num_nodes * 12
    if sampling.in_files:
        items["features"] -= sum(
            n * network.dense_width(t) for t, n in part.nodes.items()
        ) * _copies(graph, network)
        items["interpreter"] = rates.own
        edge_bytes = sampling.edge_bytes
        if edge_bytes is None:
            is_as_stored = graph.num_stored_edges in (None, graph.num_edges)
            edge_bytes = 0.0 if is_as_stored else EXTENDED_BYTES_PER_EDGE
        items["structure"] -= sum(part.edges.values()) * (STRUCTURE_BYTES_PER_EDGE - edge_bytes)
        whole += graph.num_edges * (min(EXTENDED_BYTES_PER_EDGE, edge_bytes) - 4)
    room = math.inf if machines.memory is None else budget_of(machines.memory)
    replicated = sampling.transport == "replicated" or (
        sampling.transport == "auto" and fits_replicated(whole, room)
    )
    if num_ranks > 1 and replicated:
        items["structure"] += whole / here
    inputs = blocks[0].sources or {}
    row_bytes = {t: network.dense_width(t) * float(graph.itemsize) for t in inputs}
    for ntype, learnt in network.learnt.items():
        row_bytes[ntype] = row_bytes.get(ntype, 0.0) + learnt.stored_bytes(network.itemsize)
    fetched = sum(n * row_bytes[t] for t, n in inputs.items())
    of_batch = fetched + drawn * 12
    # Rows of files are read before they go to their places, while another batch is computed.
    items["batches ahead"] = (sampling.prefetch + (3 if sampling.in_files else 1)) * of_batch
    cacheable = graph.nodes if sampling.in_files else part.halo
    cached = min(sampling.cache_bytes, sum(cacheable.get(t, 0.0) * b for t, b in row_bytes.items()))
    items["cache"] = cached
    is_layered = network.own is None or network.own.is_layered
    if sampling.in_files and is_layered:
        evaluation = _evaluation_in_files(graph, network, sampling, part, items)
    else:
        evaluation = _evaluation(graph, network, part, num_ranks, items)
    if not sampling.in_files and not _fits(evaluation.peak, machines, num_ranks):
        evaluation = _evaluation(graph, network, part, num_ranks, items, "sequential")
    memory = Memory(items, _KEPT_BY_LOADERS)
    tapes = []
    for _ in range(_EPOCHS):
        tape = Tape(memory, network.itemsize)
        ids = _ids_of_edges(memory, network, blocks[-1])
        tape.backward(loss_of(tape, network, blocks, Exchanges(mode="oneshot"), graph.target))
        tape.step()
        del ids
        memory.end_epoch()
        tapes.append(tape)
    tape = tapes[0]
    largest = max(memory, evaluation, key=lambda m: m.peak)
    remote = 1 - 1 / num_ranks
    is_mapped = (sampling.map_features or sampling.in_files) and here == num_ranks
    rows_sent = 0.0 if is_mapped else fetched * remote
    if cached and rows_sent:
        rows_sent *= max(
            0.0, 1 - cached / max(1.0, sum(graph.nodes[t] * b for t, b in row_bytes.items()))
        )
    draws_sent = 0.0 if replicated or num_ranks == 1 else drawn * 8 * remote * 2
    model_bytes = model_numbers(tape) * network.itemsize if num_ranks > 1 else 0.0
    tape.work.pop("pages", None)  # what one step frees is kept for the next
    computed = compute_seconds(tape.work, rates)
    prepared = drawn / rates.sampled + 3 * fetched / rates.elements
    travels = exchange_seconds(rows_sent + draws_sent, rows_sent + draws_sent, machines, num_ranks)
    twice = 2 * model_bytes * remote
    sums = exchange_seconds(twice, twice, machines, num_ranks)
    waits = travels if not sampling.prefetch else max(0.0, travels - computed)
    compute, exchange = steps * (computed + prepared), steps * (waits + sums)
    sent = steps * (rows_sent + draws_sent + model_bytes)
    fits = _fits(largest.peak, machines, num_ranks)
    bound = _bound(fits, largest, compute, exchange, tape, rates)
    if fits and prepared > computed and exchange < compute:
        bound = "drawing and fetching"
    spread = max(rates.uncertainty, _OFF_SAMPLED)
    return EpochPlan(
        ranks=num_ranks,
        mode="sampled, features in files" if sampling.in_files else "sampled",
        seconds=Range.around(compute + exchange, spread),
        compute=compute,
        exchange=exchange,
        memory=Range.around(largest.peak, 0.2),
        items=_rounded(largest.at_peak),
        sent=Range.around(sent, 0.3),
        sent_in_all=sent * num_ranks,
        disk=graph.disk if is_counted and graph.disk else disk_bytes(graph, parts, num_ranks),
        fits=fits,
        bound_by=bound,
        by_layer={},
        is_counted=is_counted,
        not_validated=_not_validated(machines, num_ranks, is_counted, largest.peak),
        steps=steps,
    )


def _evaluation(
    graph: GraphSize,
    network: Network,
    part: PartSize,
    num_ranks: int,
    items: Mapping[str, float],
    mode: Literal["oneshot", "sequential"] = "oneshot",
) -> Memory:
    """What an evaluation takes: a forward of the whole graph."""
    memory = Memory(dict(items), _KEPT_BY_LOADERS)
    tape = Tape(memory, network.itemsize, records=False)
    how = Exchanges(mode=mode, num_ranks=num_ranks)
    evaluate(tape, network, [part] * network.layers, how, graph.target)
    return memory


def _evaluation_in_files(
    graph: GraphSize,
    network: Network,
    sampling: Sampling,
    part: PartSize,
    items: Mapping[str, float],
) -> Memory:
    """What an evaluation takes that goes layer by layer, batch by batch."""
    memory = Memory(dict(items), _KEPT_BY_LOADERS)
    owned = max(1.0, sum(part.nodes.values()))
    batch = min(float(sampling.batches_evaluated * sampling.batch_size or owned), owned)
    (block,), drawn = sampled_parts(graph, (-1,), {graph.target: batch}, batch)
    wide = network.hidden * (network.heads if network.model in ("gat", "gatv2") else 1)
    ahead = sampling.prefetch + 2
    is_typed = len(graph.nodes) > 1 or len(graph.edges) > 1
    first = network.widths_read(graph.nodes, is_typed=is_typed)
    rows = sum(n * max(first.get(t, 0), wide) * ahead for t, n in (block.sources or {}).items())
    rows += 3 * sum(block.nodes.values()) * max(wide, network.out)
    size = rows * network.itemsize + drawn * 12 * ahead
    memory.take(size, "mapped", "evaluation")
    if network.edges is not None:
        memory.give_back(size, "mapped", "evaluation")
        tape = Tape(memory, network.itemsize, records=False)
        given = {t: tape.new(part.nodes[t], network.out) for t in network.edges.node_types}
        score_edges(tape, network, given, part, Exchanges(mode="oneshot"))
    return memory


def seeds_of(graph: GraphSize, network: Network, batch: float) -> dict[str, float]:
    """Node type to the nodes whose rows a step of so many rows of the task reads."""
    if network.edges is None:
        return {graph.target: min(batch, graph.nodes[graph.target])}
    seeds = dict.fromkeys(network.edges.node_types, 0.0)
    for side, ntypes in enumerate(network.edges.ends):
        for ntype in ntypes:
            seeds[ntype] += batch / len(ntypes)
            if side in network.edges.sides:
                seeds[ntype] += network.edges.negatives
    # Ends are met again, the more, the fewer nodes there are.
    nodes = {t: max(1.0, graph.nodes[t]) for t in seeds}
    return {t: nodes[t] * -math.expm1(-n / nodes[t]) for t, n in seeds.items()}


# -- partitioning ----------------------------------------------------------------------------------

_CPU_SECONDS = {"multilevel": 45.0, "metis": 67.0, "random": 15.0}
"""Of 100 M edges, in benchmarks/results: partition_stream_cpu_2026-11-26.md, and of the multilevel
method, 36 of communities and 55 of a mesh, partition_meshes_cpu_2026-11-27.md."""

_WALL_ON_TWO_CORES = 0.6
_COPY_BYTES_PER_SECOND = 5e8


def plan_partitioning(graph: GraphSize, method: str, num_parts: int) -> PartitioningPlan:
    """What it takes to divide the graph on one machine, from edges on its disk."""
    in_memory = method not in ("multilevel", "random")
    cpu = graph.num_edges / 1e8 * _CPU_SECONDS.get(method, 45.0)
    columns = sum(n * graph.features.get(t, 0) for t, n in graph.nodes.items()) * graph.itemsize
    cpu += 2 * columns / _COPY_BYTES_PER_SECOND
    memory = min(2.0**30, 200 * graph.num_edges) + 20 * graph.num_nodes
    if in_memory:
        memory = max(memory, 119 * graph.num_edges)
    parts, _ = parts_of(graph, num_parts, method)
    files = disk_bytes(graph, parts, num_parts)
    return PartitioningPlan(
        method=method,
        cpu_seconds=Range(0.7 * cpu, cpu, 1.6 * cpu),
        seconds=Range(0.5 * cpu, _WALL_ON_TWO_CORES * cpu, 1.6 * cpu),
        memory=Range(0.2 * memory, memory, memory),
        disk=Range(files, files + 16 * graph.num_edges, files + 24 * graph.num_edges),
    )


def _notes(graph: GraphSize, machines: Machines, most: int) -> tuple[str, ...]:
    rates = machines.rates
    notes = [
        f"rates: {rates.source}; {rates.num_ranks} rank(s) beside each other, off by "
        f"{100 * rates.uncertainty:.0f} %"
    ]
    if rates.network != 1.0:
        notes.append(
            f"an epoch of the network on a sample computed {rates.network:.2f} times as long as "
            "its work does by itself, and so are all times taken"
        )
    if len(graph.parts) != most > 1:
        low, expected, high = graph.share
        notes.append(
            f"halos of parts that do not exist are taken as {expected:.2f} ({low:.2f} to "
            f"{high:.2f}) of those of random parts"
        )
    if most > rates.num_ranks:
        notes.append(f"of more than {rates.num_ranks} rank(s) on a host no time was measured")
    if machines.link is not None:
        notes.append("the link is taken as idle otherwise, and its latency as that of this host")
        notes.append(
            "bytes sent are of rows as they are; seconds of the link are without the zeros of rows "
            "behind a ReLU or dropout, which long messages leave out"
        )
    return tuple(notes)
