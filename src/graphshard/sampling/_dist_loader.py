# SPDX-License-Identifier: Apache-2.0
"""DataLoader: sampled mini-batches of a graph that spans ranks, as lists of blocks.

::

    caller's thread      sampling              features               device
    seeds of a step ──>  every rank draws ──>  rows come with ──>     where the model is
                         for every other       the blocks

`SeedOrder` says which seeds a step takes, `FeaturePlan` which features come with the blocks, and
`BatchStages` does the work on a batch, from its place in the run to a `MiniBatch`. Each stage has a
thread, and each that communicates a process group of its own; see `Pipeline` for how they stop.
`global_mean` is the loss of a step.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from .._base.device import device_of
from .._base.memory import keep_freed_memory
from .._base.typing import CanonicalEType, EdgeIds, NodeIds
from ..comm import ThreadGroups, trace
from ..comm.collectives import all_gather, verify
from ..comm.group import GroupState, alone, group_state
from ..fullbatch import GraphShardManager
from ..graph import EID, NID, Block, Frame, Graph, MessagePassingGraph
from ..graph.message_passing import frames_of
from ._neighbor_sampler import DrawSeed, IdTables, NeighborSampler, by_type, per_kind
from ._pipeline import (
    Crew,
    Deliveries,
    DeviceStream,
    Pipeline,
    Run,
    Stage,
    group_by_source,
    moved,
)
from .feature_store import (
    CachedFeatureStore,
    CollectiveFeatureStore,
    FeatureRequest,
    FeatureStore,
    LocalFeatureStore,
    MappedFeatureStore,
    Ownership,
    RowKind,
    check_rows,
)
from .graph_store import GraphStore, SamplingTransport, ShardedGraphStore, graph_store_of
from .lazy_features import check_named, names_for

# In the place of a layer's index in `DrawSeed.key`.
SPLIT_KEY, SEEDS_KEY = -2, -3

SAMPLING, FEATURES, DEVICE = "sampling", "features", "device"
FetchedRows: TypeAlias = list[dict[str, Tensor]]


class BatchOrder:
    """Indices cut into the batches of an epoch; its kinds say where.

    Args:
        indices: Type to ``[n, ...]`` indices. Types are cut together: a batch has some of each.
        key: What tells orders of one seed apart, see `DrawSeed.key`.

    Attributes:
        num_steps: Steps of an epoch, the same on all ranks.
    """

    num_steps: int

    def __init__(
        self, indices: Mapping[Any, Tensor], shuffle: bool, seed: int, key: tuple[int, int]
    ) -> None:
        self._indices = dict(indices)
        self._shuffle, self._seed, self._key = shuffle, seed, key
        self.num_indices = sum(len(values) for values in self._indices.values())

    def __len__(self) -> int:
        return self.num_steps

    def of_epoch(self, epoch: int) -> Tensor | None:
        """The places of all indices in the order of an epoch; None for their own order."""
        if not self._shuffle:
            return None
        # A generator's seed is 64 bits with or without a sign; torch takes either.
        generator = torch.Generator().manual_seed(DrawSeed(self._seed, epoch).key(*self._key))
        return torch.randperm(self.num_indices, generator=generator)

    def _taken(self, order: Tensor | None, start: int, stop: int) -> dict[Any, Tensor]:
        """The indices at places ``[start, stop)`` of an order, by type."""
        if len(self._indices) == 1:
            ((key, values),) = self._indices.items()
            return {key: values[start:stop] if order is None else _rows(values, order[start:stop])}
        places = torch.arange(start, stop) if order is None else order[start:stop]
        taken, first = {}, 0
        for key, values in self._indices.items():
            here = places[(places >= first) & (places < first + len(values))]
            taken[key] = _rows(values, here - first)
            first += len(values)
        return taken


class StepSeeds(Protocol):
    """Which seeds each step takes; not the same on all ranks.

    Attributes:
        num_steps: Steps of an epoch, the same on all ranks.
    """

    num_steps: int

    def of_epoch(self, epoch: int) -> Any:
        """What `batch` takes for ``order`` in an epoch."""

    def num_global(self, step: int) -> int:
        """What the loss of a step is the mean over, on all ranks together."""

    def batch(self, order: Any, step: int) -> dict[str, Tensor]:
        """Node type to the seeds of a step; of the same types in every step, on every rank."""

    def excluded(self, order: Any, step: int) -> Mapping[CanonicalEType, Tensor] | None:
        """Relation to global ids of edges that are not drawn for this rank's seeds of a step."""


class SeedOrder(BatchOrder):
    """Batches of one rank, where every rank has seeds of its own.

    All ranks take the same number of steps, which is what the rank with the most seeds needs. Ranks
    that run out take empty batches.

    Args:
        drop_last: Leave out what fills no batch, on each rank by itself.
        sizes: Number of seeds of each rank, this one's included.
        by_id: Batches are runs of ascending ids, the same in every epoch; ``shuffle`` then shuffles
            full batches. Parts keep neighbours at near ids, so the batches of an epoch read fewer
            distinct nodes.
    """

    def __init__(
        self,
        seeds: Mapping[str, Tensor],
        batch_size: int,
        *,
        shuffle: bool,
        drop_last: bool,
        seed: int,
        rank: int,
        sizes: Sequence[int],
        by_id: bool = False,
    ) -> None:
        if by_id:
            seeds = {ntype: ids.sort().values for ntype, ids in seeds.items()}
        super().__init__(seeds, shuffle, seed, (SEEDS_KEY, rank))
        self._by_id = by_id
        assert self.num_indices == sizes[rank]
        self._batch_size, self._rank = batch_size, rank
        # How many seeds of each rank are used.
        self._used = [n - n % batch_size if drop_last else n for n in sizes]
        self.num_steps = max(-(-n // batch_size) for n in self._used)

    def of_epoch(self, epoch: int) -> Tensor | None:
        order = super().of_epoch(epoch)
        if order is None or not self._by_id:
            return order
        num_full = self.num_indices // self._batch_size * self._batch_size
        places = torch.arange(self.num_indices)
        batches = places[:num_full].view(-1, self._batch_size)
        # Batches are ordered as their first seeds are in a random order of all seeds.
        rank_of = torch.empty_like(places)
        rank_of[order] = places
        batches = batches[rank_of[batches[:, 0]].argsort()] if num_full else batches
        return torch.cat([batches.reshape(-1), places[num_full:]])

    def num_global(self, step: int) -> int:
        """Seeds of all ranks together at a step."""
        first, total = step * self._batch_size, 0
        for num_used in self._used:
            total += max(0, min(self._batch_size, num_used - first))
        return total

    def batch(self, order: Tensor | None, step: int) -> dict[str, Tensor]:
        """Node type to the seeds of a step; every type that has seeds at all has an entry."""
        num_used = self._used[self._rank]
        first = min(step * self._batch_size, num_used)
        return self._taken(order, first, min(first + self._batch_size, num_used))

    def excluded(self, order: Tensor | None, step: int) -> None:
        """None: seeds are nodes."""


def _rows(values: Tensor, places: Tensor) -> Tensor:
    return values.index_select(0, places.to(values.device))


class MiniBatch(list[Block]):
    """The blocks of one step: ``batch[0]`` takes the inputs, ``batch[-1]`` ends at the seeds.

    Args:
        num_seeds: Seeds on this rank, of all types; 0 where this rank has run out of them.
        num_global_seeds: Seeds on all ranks together.
    """

    def __init__(
        self,
        blocks: Iterable[Block],
        *,
        epoch: int = 0,
        step: int = 0,
        num_seeds: int = 0,
        num_global_seeds: int = 0,
    ) -> None:
        super().__init__(blocks)
        self.epoch, self.step = epoch, step
        self.num_seeds, self.num_global_seeds = num_seeds, num_global_seeds

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MiniBatch:
        """The same batch with its blocks, and what is attached to them, on a device.

        Args:
            non_blocking: As for tensors: from `pin_memory`, copies to a GPU are only begun, and
                come before what is launched later on the current stream. Copies to the CPU are
                waited for.
        """
        return MiniBatch((block.to(device, non_blocking) for block in self), **vars(self))

    @property
    def device(self) -> torch.device:
        """Where the blocks are; the CPU if there are none."""
        return self[0].device if self else torch.device("cpu")

    def pin_memory(self) -> MiniBatch:
        """The same batch in page-locked memory, for batches on the CPU."""
        return MiniBatch((block.pin_memory() for block in self), **vars(self))

    def record_stream(self, stream: torch.cuda.Stream) -> MiniBatch:
        """Say that a stream of a GPU uses the batch, which may have been made on another one."""
        for block in self:
            block.record_stream(stream)
        return self


def global_mean(values: Tensor, batch: MiniBatch | int, *, averaged_over: int = 1) -> Tensor:
    """This rank's share of the mean of ``values`` over the seeds of all ranks.

    The shares of all ranks add up to the mean, and so do their gradients: after
    `graphshard.gather_grads`, which adds them up, every rank has the gradient of what one process
    would compute from the union of the seeds. Nothing is communicated, because every rank knows in
    advance how many seeds the others have at each step. An empty batch weighs nothing.

    Args:
        values: ``[num_seeds, ...]``, a loss per seed of this rank (``reduction="none"``).
            Where a seed has several, their mean is taken.
        batch: What the loader gave; or the number of seeds on all ranks, for losses over some of
            them only.
        averaged_over: Number of ranks over which gradients will be averaged rather than added up:
            under DistributedDataParallel, ``torch.distributed.get_world_size()``.

    Returns:
        A scalar; 0 where there are no values.

    Raises:
        ValueError: Not one value per seed.

    Example:
        >>> import graphshard.sar as sar
        >>> from graphshard.data import load_dataset
        >>> from graphshard.sampling import DataLoader, DistNeighborSampler
        >>> cora = load_dataset("cora")
        >>> sampler = DistNeighborSampler(
        ...     [5],
        ...     input_node_features={"feat": cora.graph.ndata["feat"]},
        ...     output_node_features={"label": cora.graph.ndata["label"]},
        ... )
        >>> model = sar.nn.SAGEConv(1433, 7, "mean")
        >>> for batch in DataLoader(cora.graph, cora.node_ids("train"), sampler, 70):
        ...     logits = model(batch[0], batch[0].srcdata["feat"])
        ...     labels = batch[-1].dstdata["label"]
        ...     losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        ...     global_mean(losses, batch).backward()
        ...     sar.gather_grads(model)
    """
    if isinstance(batch, MiniBatch):
        if values.dim() == 0 or values.shape[0] != batch.num_seeds:
            raise ValueError(
                f"values must hold one row for each of the {batch.num_seeds} seeds of this rank "
                f"(got shape {tuple(values.shape)}); compute the loss with reduction='none', or "
                "pass the number of seeds that count, on all ranks together, in place of the batch"
            )
        batch = batch.num_global_seeds
    num_values = batch * math.prod(values.shape[1:])
    return values.sum() / (max(1, num_values) / averaged_over)


_counting = threading.Lock()


@dataclass
class LoaderStats:
    """What a pass over a `DataLoader` has done so far, on this rank.

    Args:
        num_steps: Batches given to the training loop.
        wait_seconds: How long the training loop has waited for them.
        num_edges: Edges drawn, also for batches that are still to come.
        num_input_nodes: Nodes whose input features were wanted, summed over batches.
        cache_hit_rate: Part of the accesses to remote rows that the cache answered.
        sampling_bytes: Bytes sent to other ranks to draw neighbours, for a cache included.
        feature_bytes: Bytes sent to other ranks to fetch features, for a cache included.
        device_wait_seconds: On a GPU, how long the loop's stream stood still for batches: from the
            end of what a step has launched to the arrival of the next batch, as far as the device
            has got. 0 on the CPU.
    """

    num_steps: int = 0
    wait_seconds: float = 0.0
    num_edges: int = 0
    num_input_nodes: int = 0
    cache_hit_rate: float = 0.0
    sampling_bytes: int = 0
    feature_bytes: int = 0
    device_wait_seconds: float = 0.0

    def set_waits(self, delivered: Deliveries) -> None:
        """Take over what a run has counted."""
        self.num_steps, self.wait_seconds = delivered.num_batches, delivered.seconds_waited
        arrivals = delivered.arrivals
        self.device_wait_seconds = 0.0 if arrivals is None else arrivals.seconds_waited

    def count_drawn(self, blocks: Sequence[Block]) -> None:
        """Add the edges and inputs of the blocks of a batch; from any thread."""
        num_edges = sum(adj.num_edges for block in blocks for adj in block.relations)
        num_inputs = sum(frame.num_rows for frame in frames_of(blocks[0])[0])
        with _counting:
            self.num_edges += num_edges
            self.num_input_nodes += num_inputs


@dataclass(frozen=True)
class _PlannedColumns:
    """Features of one kind on one side of a batch.

    Args:
        side: "input": sources of the first block; "output": destinations of the last; or "edge":
            edges of every block.
        names: What a feature is called in the batch, to what its table is called.
    """

    side: str
    kind: RowKind
    names: Mapping[str, str]


class FeaturePlan:
    """The features of batches of one graph.

    Args:
        graph: A `Graph`, this rank's part of one, or a `GraphStore`.
        sampler: Whose ``input_node_features`` and ``output_node_features`` are taken, if it has
            them, besides the features that its ``prefetch_node_feats``, ``prefetch_labels`` and
            ``prefetch_edge_feats`` name; and all features of edges, if its ``copy_edata`` is true.
        store: Has the features that are named; by default the graph has them.

    Attributes:
        tables: (node type or relation, name) to rows; empty if a store was given.
        pin: Whether rows go to a GPU through page-locked memory.

    Raises:
        TypeError: Rows that are no dense tensor, or not by type on a graph of several types; or
            rows besides a store.
        ValueError: An unknown type, another number of rows than the graph has nodes here, a
            tensor that requires a gradient, or a feature that the graph does not have.
    """

    def __init__(self, graph: Any, sampler: Any, store: FeatureStore | None = None) -> None:
        self.tables: dict[tuple[RowKind, str], Tensor] = {}
        self.pin = True
        self._columns: list[_PlannedColumns] = []
        self._graph, self._store = graph, store
        self._etypes = list(graph.canonical_etypes)
        ntypes: list[Any] = list(graph.ntypes)
        for side, given, named, kinds in (
            ("input", "input_node_features", "prefetch_node_feats", ntypes),
            ("output", "output_node_features", "prefetch_labels", ntypes),
            ("edge", "", "prefetch_edge_feats", self._etypes),
        ):
            names = getattr(sampler, named, ())
            if side == "edge" and getattr(sampler, "copy_edata", False) and store is None:
                names = {t: self._copied(t) for t in self._etypes}
            check_named(self._names_of, kinds, names, named)
            rows = _given_rows(graph, getattr(sampler, given, None) or {}, given)
            if rows and store is not None:
                raise TypeError(
                    f"features come from feature_store or from {given}, not from both; name those "
                    f"of the store in {named}"
                )
            for kind in kinds:
                present = [name for name in names_for(names, kind) if name in self._names_of(kind)]
                columns = dict(zip(present, present, strict=True))
                if store is None:
                    data = self._data_of(kind)
                    own = {name: data[name] for name in present} | rows.get(kind, {})
                    columns = {name: self._table(side, kind, name, own[name]) for name in own}
                if columns:
                    self._columns.append(_PlannedColumns(side, kind, columns))

    def _data_of(self, kind: RowKind) -> Mapping[str, Any]:
        """Features that the graph has itself."""
        if not isinstance(self._graph, MessagePassingGraph):  # a GraphStore
            return {}
        space = self._graph.nodes if isinstance(kind, str) else self._graph.edges
        return space[kind].data

    def _copied(self, etype: RowKind) -> list[str]:
        """Features of edges that are tensors, besides ids."""
        data = self._data_of(etype)
        return [n for n in data if n != EID and isinstance(data[n], Tensor)]

    def _names_of(self, kind: RowKind) -> Collection[str]:
        return self._data_of(kind) if self._store is None else self._store.feature_names(kind)

    def _table(self, side: str, kind: RowKind, name: str, rows: Tensor) -> str:
        """Keep a table; what it is called, for two of one name may differ."""
        rows = rows.detach() if rows.requires_grad else rows
        if self.tables.get((kind, name), rows) is not rows:
            name = f"{name} ({side})"
        self.tables[kind, name] = rows
        return name

    @property
    def has_edges(self) -> bool:
        """Whether features of edges are among them, so that edge ids must be known."""
        return any(columns.side == "edge" for columns in self._columns)

    def describe(self) -> str:
        """What must be equal on all ranks."""
        return "; ".join(f"{c.side} {c.kind}: {sorted(c.names)}" for c in self._columns)

    def requests(self, blocks: Sequence[Block]) -> list[FeatureRequest]:
        """The rows that a batch needs; the same kinds and names for every batch."""
        requests = []
        # Nodes of a block are distinct if seeds are; an edge may be drawn again.
        nodes_differ = True
        for frame in frames_of(blocks[-1])[1]:
            nodes_differ = nodes_differ and len(torch.unique(frame[NID])) == frame.num_rows
        for columns in self._columns:
            names = tuple(columns.names.values())
            for _, frame, id_field in self._frames(columns, blocks):
                is_distinct = id_field == NID and nodes_differ
                requests.append(
                    FeatureRequest(columns.kind, names, frame[id_field], distinct=is_distinct)
                )
        return requests

    def attach(self, blocks: Sequence[Block], fetched: Sequence[Mapping[str, Tensor]]) -> None:
        """Put rows, as asked for by `requests`, where they belong."""
        answers = iter(fetched)
        for columns in self._columns:
            for block, frame, _ in self._frames(columns, blocks):
                answer = next(answers)
                for name, key in columns.names.items():
                    rows = answer[key]
                    is_there = rows.device == block.device
                    frame[name] = rows if is_there else moved(rows, block.device, self.pin)

    def _frames(
        self, columns: _PlannedColumns, blocks: Sequence[Block]
    ) -> list[tuple[Block, Frame, str]]:
        """Blocks, their frames that the columns belong to, and the field with the ids."""
        if columns.side != "edge":
            block = blocks[0 if columns.side == "input" else -1]
            types: list[Any] = block.srctypes if columns.side == "input" else block.dsttypes
            frames = frames_of(block)[0 if columns.side == "input" else 1]
            return [(block, frames[types.index(columns.kind)], NID)]
        # Along out-edges names differ, and order does not.
        number = self._etypes.index(columns.kind)
        return [(block, frames_of(block)[2][number], EID) for block in blocks]


class BatchPosition(NamedTuple):
    """Where a batch is in a run."""

    epoch: int
    order: Any
    step: int


@dataclass(eq=False)
class BatchStages:
    """What a `DataLoader` does for a batch: draw blocks, fetch features, move both to a device."""

    store: GraphStore
    sampler: NeighborSampler
    seeds: StepSeeds
    seed: int
    with_eids: bool
    plan: FeaturePlan
    features: FeatureStore | None
    device: torch.device
    stats: LoaderStats = field(default_factory=LoaderStats)

    def __post_init__(self) -> None:
        self._tables = IdTables(self.store)

    def look_at_weights(self) -> None:
        """At the start of a pass, notice what was written to weights; collective."""
        if isinstance(self.store, ShardedGraphStore) and self.sampler.options.weights is not None:
            self.store.look_at_weights()

    def as_pipeline(self) -> list[Stage]:
        """The stages, each for a thread of its own."""
        stages = [Stage(SAMPLING, self.sample)]
        if self.features is not None:
            stages.append(Stage(FEATURES, self.fetch))
        if self.device != self.store.device:
            stages.append(Stage(DEVICE, self.move))
        return stages

    def sample(self, position: BatchPosition) -> MiniBatch:
        """Draw the blocks of a batch, and count what was drawn."""
        batch = self._drawn(position)
        self.stats.count_drawn(batch)
        return batch

    def _drawn(self, position: BatchPosition) -> MiniBatch:
        epoch, order, step = position
        seeds = self.seeds.batch(order, step)
        with trace(only_this_thread=True) as sent:
            blocks = self.sampler.draw(
                self.store,
                seeds,
                DrawSeed(self.seed, epoch, step),
                excluded=self.seeds.excluded(order, step),
                tables=self._tables,
                with_eids=self.with_eids,
            )
        self.stats.sampling_bytes += sent.total_bytes
        return MiniBatch(
            blocks,
            epoch=epoch,
            step=step,
            num_seeds=sum(map(len, seeds.values())),
            num_global_seeds=self.seeds.num_global(step),
        )

    def fetch(self, batch: MiniBatch) -> MiniBatch | tuple[MiniBatch, FetchedRows]:
        """Fetch the features of a batch; attach them, unless the batch is to move first."""
        assert self.features is not None
        with trace(only_this_thread=True) as sent:
            rows = self.features.fetch(self.plan.requests(batch))
        self.stats.feature_bytes += sent.total_bytes
        if self.device != self.store.device:
            return batch, rows
        self.plan.attach(batch, rows)
        return batch

    def move(self, fetched: MiniBatch | tuple[MiniBatch, FetchedRows]) -> MiniBatch:
        """Move a batch to its device, and attach what was fetched for it."""
        drawn, rows = fetched if isinstance(fetched, tuple) else (fetched, None)
        group_by_source(drawn, self.device)
        batch: MiniBatch = moved(drawn, self.device, pin=True)
        if rows is not None:
            self.plan.attach(batch, rows)
        return batch

    def fill_cache(self, positions: Sequence[BatchPosition]) -> None:
        """If there is a cache, draw a pass to count how often it reads each row; collective."""
        if not isinstance(self.features, CachedFeatureStore) or self.features.is_settled:
            return
        with torch.no_grad():
            drawn = (self.plan.requests(self._drawn(position)) for position in positions)
            counts = self.features.count(drawn)
            with trace(only_this_thread=True) as sent:
                self.features.prepare(counts)
        self.stats.feature_bytes += sent.total_bytes


def deliver(
    run: Run[MiniBatch], stages: BatchStages, stats: LoaderStats, loader: Sized
) -> Iterator[MiniBatch]:
    """Give the batches of a pass to the training loop, and count; meanwhile the loader lives."""
    try:
        for batch in run:
            stats.set_waits(run.delivered)
            if isinstance(stages.features, CachedFeatureStore):
                stats.cache_hit_rate = stages.features.hit_rate
            yield batch
            del batch
        if run.delivered.num_batches < len(loader):
            raise RuntimeError(
                "another pass over this DataLoader has begun, or it was closed, which ended "
                "this pass; make a loader for each"
            )
    except GeneratorExit:
        # The caller has left the loop. Close here, and not when `run` is dropped: this may hold
        # the last reference to the loader, whose end would cut short what the threads have
        # permission to finish.
        run.close()
        raise


def _given_rows(graph: Any, features: Any, what: str) -> dict[RowKind, dict[str, Tensor]]:
    """Node type to name to rows, for features that the user passed."""
    by_type: dict[RowKind, dict[str, Tensor]] = {}
    for name, given in features.items():
        label = f"{what}[{name!r}]"
        for ntype, rows in per_kind(given, graph.ntypes, label, "node type to rows").items():
            if ntype not in graph.ntypes:
                raise ValueError(
                    f"{label} names the node type {ntype!r}; the graph has {list(graph.ntypes)}"
                )
            of = f"nodes of type {ntype!r} that this process holds"
            check_rows(rows, graph.num_nodes(ntype), of, label)
            by_type.setdefault(ntype, {})[name] = rows
    return by_type


class DataLoader:
    """Iterates over mini-batches, each a list of blocks with features attached, as SAR's does.

    Every rank passes its own seeds, any number of them, also none. All ranks take the same number
    of steps; a rank that has run out takes empty batches, which are legal blocks without
    destinations, and weigh nothing in `global_mean`. Making a loader is collective, and so is
    iterating over it: all ranks must do so equally often, and leave a loop early at the same
    batch. A pass that another rank left by an error ends here with a `RankError` that names it.

    What is drawn depends on ``seed``, epoch, step and node alone: not on the number of ranks, the
    partition, ``transport`` or ``prefetch``.

    Args:
        graph: This rank's part of a sharded graph; a `Graph`, for a process on its own; or a
            `GraphStore` of your own.
        seed_nodes: Ids of this rank's seeds in the graph's global numbering, or node type to ids;
            of a sharded graph of several types also homogenised ids, see `construct_mfgs`. A
            seed may be there several times (oversampling); in a batch each time has a row, with the
            same neighbours.
        sampler: How neighbours are drawn; in its ``output_device``, where batches shall be, by
            default where the graph is; and which features come with the blocks:
            ``input_node_features`` and ``output_node_features`` of a `DistNeighborSampler`; of any
            `NeighborSampler`, the features of the graph that its ``prefetch_node_feats``,
            ``prefetch_labels`` and ``prefetch_edge_feats`` name. Rows are taken as they are now.
        batch_size: Seeds of a batch, on each rank.
        drop_last: Leave out, on each rank, what fills no batch.
        shuffle: Take the seeds in another order every epoch. It is sixth, after ``drop_last``, as
            in SAR's loader.
        precompute_optimized_batches: Put seeds into a batch whose neighbours overlap: runs of ids,
            which parts order for locality, the same in every epoch; ``shuffle`` then shuffles full
            batches.
        optimized_batches_cache: Accepted for SAR's scripts: there is nothing slow to keep.
        num_workers: Accepted for SAR's scripts: threads of this process make the batches; see
            ``prefetch``.
        batch_comm_overlap: Accepted for SAR's scripts: features are fetched while others are drawn.
        seed: Of the order and the draws, equal on all ranks; by default rank 0's torch generator
            gives one.
        prefetch: How many finished batches may wait for the training loop, on the device where
            they shall be. 0 makes each when it is asked for, in the caller's thread.
        transport: ``"collective"``: owners draw for everyone. ``"replicated"``: every host maps
            the whole structure once, and drawing needs no communication. ``"auto"``: replicated
            if it fits ``structure_budget``.
        structure_budget: Bytes that a replicated structure may take on a host; by default a
            quarter of the smallest host's free memory.
        map_features: Ranks on one host read each other's feature rows from memory that they share,
            which holds a copy of them.
        cache_bytes: Bytes for copies of those remote rows that the coming epoch reads most. They
            are known by drawing the epoch once ahead, so sampling costs twice as much.
        edge_ids: Give ``blocks[i].edata[EID]``; messages between ranks are then twice as long.
        feature_store: Where the features that the sampler names come from, by the ids of the
            graph; by default the graph has them.
        order: Which seeds a step takes, in the place of ``seed_nodes``, ``batch_size``,
            ``drop_last``, ``shuffle`` and ``precompute_optimized_batches``.

    Raises:
        TypeError: Not a graph, a sampler, or ids; or ``drop_last`` or ``shuffle`` is no bool; on
            all ranks.
        ValueError: An argument out of range, or not the same on all ranks; on all ranks.
        NotImplementedError: ``prefetch`` in a program that MPI started; on all ranks.
        RankError: Another rank failed, or did not answer in time.

    Example:
        >>> from graphshard.data import load_dataset
        >>> from graphshard.sampling import DistNeighborSampler
        >>> cora = load_dataset("cora")
        >>> features = {"feat": cora.graph.ndata["feat"]}
        >>> sampler = DistNeighborSampler([10, 5], input_node_features=features)
        >>> loader = DataLoader(cora.graph, cora.node_ids("train"), sampler, 64, seed=0)
        >>> for blocks in loader:
        ...     print(blocks[-1].num_dst_nodes(), blocks[0].srcdata["feat"].shape[1])
        64 1433
        64 1433
        12 1433
    """

    def __init__(
        self,
        graph: GraphShardManager | Graph | GraphStore,
        seed_nodes: NodeIds | EdgeIds,
        sampler: NeighborSampler,
        batch_size: int = 1,
        drop_last: bool = False,
        shuffle: bool = False,
        precompute_optimized_batches: bool = False,
        optimized_batches_cache: str | None = None,
        num_workers: int = 0,
        batch_comm_overlap: bool = False,
        *,
        seed: int | None = None,
        prefetch: int = 2,
        transport: SamplingTransport = "auto",
        structure_budget: int | None = None,
        map_features: bool = True,
        cache_bytes: int = 0,
        edge_ids: bool = False,
        feature_store: FeatureStore | None = None,
        order: StepSeeds | None = None,
    ) -> None:
        state = _ranks_of(graph)
        self._ranks = state
        error, plan = None, None
        try:
            _check_options(graph, sampler, batch_size, seed, prefetch, cache_bytes, feature_store)
            _check_flags(drop_last, shuffle, precompute_optimized_batches)
            plan = FeaturePlan(graph, sampler, feature_store)
        except (TypeError, ValueError) as caught:
            error = caught
        options = (
            f"sampler {_describe(sampler)}, batch_size {batch_size}, shuffle {shuffle}, "
            f"drop_last {drop_last}, by id {precompute_optimized_batches}, "
            f"seed {seed}, prefetch {prefetch}, transport {transport!r}, "
            f"structure_budget {structure_budget}, map_features {map_features}, "
            f"cache_bytes {'> 0' if cache_bytes else 0}, edge_ids {edge_ids}, "
            f"features {'' if plan is None else plan.describe()}"
        )
        verify(state, options, "the arguments of DataLoader", error)
        assert plan is not None
        if transport == "auto" and getattr(sampler, "use_hybrid_partitioning", False):
            transport = "replicated"
        store = graph_store_of(graph, transport, structure_budget)
        seeds: dict[str, torch.Tensor] = {}
        device = torch.device("cpu")
        try:
            output = sampler.output_device
            device = device_of(getattr(graph, "device", store.device) if output is None else output)
            seeds = by_type(store, _typed_seeds(graph, seed_nodes), "seed_nodes")
            sampler.fanouts_for(store)
        except (TypeError, ValueError) as caught:
            error = caught
        verify(state, "", "", error)
        sizes, self.seed = _share_sizes(state, sum(map(len, seeds.values())), seed)
        self.graph, self.sampler = graph, sampler
        self.batch_size, self.shuffle, self.drop_last = batch_size, shuffle, drop_last
        self.prefetch = prefetch
        self._seeds: StepSeeds = order or SeedOrder(
            seeds,
            batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=self.seed,
            rank=state.rank,
            sizes=sizes,
            by_id=precompute_optimized_batches,
        )
        stream = DeviceStream.of(device)
        features: FeatureStore | None = feature_store
        owned: list[FeatureStore] = []
        if features is None and plan.tables:
            features = _tables_of(graph, plan, map_features, cache_bytes)
            features.pin_memory = stream is not None
            owned = [features]
        groups = None
        if prefetch and state.world_size > 1:
            groups = ThreadGroups([SAMPLING, FEATURES][: 1 if features is None else 2], state.group)
            store = store.on(groups.group(SAMPLING))
            if features is not None:
                features = features.on(groups.group(FEATURES))
                if owned:
                    owned.append(features)
        self._resources = LoaderResources(groups, owned)
        self._finalizer = weakref.finalize(self, self._resources.close)
        self._stages: BatchStages | None = BatchStages(
            store,
            sampler,
            self._seeds,
            self.seed,
            edge_ids or plan.has_edges,
            plan,
            features,
            device,
        )
        self._pipeline: Pipeline | None = Pipeline(
            self._stages.as_pipeline(),
            prefetch,
            None if groups is None else groups.cancelled,
            stream,
        )
        self._epoch = 0
        self._stats = LoaderStats()
        self._delivered = Deliveries()
        keep_freed_memory()

    def __len__(self) -> int:
        """Steps of an epoch, the same on all ranks."""
        return self._seeds.num_steps

    @property
    def epoch(self) -> int:
        """Which epoch the next pass is; each pass counts one up by itself."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next pass is; the same on all ranks."""
        self._epoch = epoch

    @property
    def cache_hit_rate(self) -> float:
        """Part of the accesses to remote rows, in this pass, that the cache answered."""
        return self._stats.cache_hit_rate

    def stats(self) -> LoaderStats:
        """What the latest pass has done so far, on this rank."""
        self._stats.set_waits(self._delivered)
        return self._stats

    def close(self) -> None:
        """Stop what still runs, and give back threads, process groups and memory.

        Dropping the loader does the same, and so does the end of the interpreter. Not collective.
        """
        self._finalizer()
        self._stages = self._pipeline = None  # what they hold refers to the groups

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[MiniBatch]:
        """One epoch. A pass that has not ended does so now.

        Raises:
            RuntimeError: The loader is closed, or an earlier pass failed; on all ranks.
            ValueError: Ranks are not at the same epoch, or left the last pass at different
                batches; on all ranks.
            RankError: Another rank failed, or did not answer in time.
        """
        self._resources.begin_pass(self._ranks, self._epoch, "DataLoader")
        stages, pipeline = self._stages, self._pipeline
        assert stages is not None and pipeline is not None
        epoch, self._epoch = self._epoch, self._epoch + 1
        self._stats = stages.stats = LoaderStats()
        order = self._seeds.of_epoch(epoch)
        positions = [BatchPosition(epoch, order, step) for step in range(len(self))]
        stages.look_at_weights()
        stages.fill_cache(positions)
        run = pipeline.run(positions)
        self._delivered = run.delivered
        self._resources.keep(run)
        return deliver(run, stages, self._stats, self)


@dataclass(eq=False)
class LoaderResources:
    """What a loader gives back when it is closed, or dropped."""

    groups: ThreadGroups | None
    features: list[FeatureStore]
    _crew: Crew | None = None
    _run: weakref.ref[Run[Any]] | None = None
    _is_closed: bool = False

    def keep(self, run: Run[Any]) -> None:
        """A pass has begun."""
        self._run, self._crew = weakref.ref(run), run.crew

    def begin_pass(self, state: GroupState, epoch: int, loader: str) -> None:
        """Wait for the threads of the last pass; find out whether all ranks are in step."""
        error = self.end_of_pass(state.timeout.total_seconds())
        done = [] if self.groups is None else list(self.groups.num_operations)
        verify(
            state,
            f"epoch {epoch}, operations {done}",
            f"where a {loader} stands at the start of a pass (its epoch; and whether the last "
            "pass was left at the same batch)",
            error,
        )

    def end_of_pass(self, seconds: float) -> RuntimeError | None:
        """End the latest pass; what speaks against another one, if anything does."""
        if self._is_closed:
            return RuntimeError("this DataLoader is closed; make another one")
        run = None if self._run is None else self._run()
        if run is not None:
            run.close(0.0)
        if self._crew is not None and not self._crew.join(seconds):
            return RuntimeError(
                f"threads of the last pass over this DataLoader have not ended within "
                f"{seconds:g} s; make another one"
            )
        if self.groups is None:
            return None
        failure = None if self._crew is None else self._crew.failure
        if failure is not None:
            return RuntimeError(
                f"an earlier pass over this DataLoader failed ({failure}); make another one"
            )
        if self.groups.are_broken:
            return RuntimeError("a pass over this DataLoader was cut short; make another one")
        return None

    def close(self) -> None:
        """End the threads whatever they do, and give everything back; not collective."""
        self._is_closed = True
        if self._crew is not None:
            self._crew.cancel()
        if self.groups is not None:
            self.groups.close()
        for features in self.features:
            features.close()
        self.features = []


def _ranks_of(graph: Any) -> GroupState:
    """The ranks that iterate together; TypeError for neither a graph nor a store."""
    if isinstance(graph, GraphShardManager):
        return group_state(graph.group)
    group = graph_store_of(graph).group
    return alone() if group is None else group_state(group)


def _tables_of(
    graph: Any, plan: FeaturePlan, map_features: bool, cache_bytes: int
) -> LocalFeatureStore:
    """The store of features that the graph has, or the sampler was given; collective."""
    if not isinstance(graph, GraphShardManager) or graph.world_size == 1:
        return LocalFeatureStore(plan.tables)
    tables: LocalFeatureStore
    if map_features:
        tables = MappedFeatureStore(graph, plan.tables)
    else:
        tables = CollectiveFeatureStore.of(graph, plan.tables)
    if cache_bytes:
        ranges = Ownership.of(graph).ranges
        tables = CachedFeatureStore(tables, ranges, cache_bytes, graph.group)
    return tables


def _share_sizes(state: GroupState, num_seeds: int, seed: int | None) -> tuple[list[int], int]:
    """Every rank's number of seeds, and the random seed of all; collective."""
    if seed is None:
        seed = DrawSeed.fresh().seed if state.rank == 0 else 0
    both = all_gather(state, torch.tensor([num_seeds, seed]), "DataLoader")
    return [int(each[0]) for each in both], int(both[0][1])


def _check_options(
    graph: GraphShardManager | Graph | GraphStore,
    sampler: NeighborSampler,
    batch_size: int,
    seed: int | None,
    prefetch: int,
    cache_bytes: int,
    feature_store: FeatureStore | None,
) -> None:
    """Raise TypeError or ValueError unless the arguments make sense by themselves."""
    if not isinstance(sampler, NeighborSampler):
        raise TypeError(
            "sampler must be a DistNeighborSampler or another NeighborSampler (got "
            f"{type(sampler).__name__}); graphshard.dgl.dataloading.DataLoader takes any sampler, "
            "for a graph that is whole in this process"
        )
    if isinstance(graph, GraphShardManager | Graph) and graph.is_block:
        raise ValueError(
            "graph must be a whole graph (got a message flow graph); make it with "
            "construct_full_graph"
        )
    if cache_bytes and feature_store is not None:
        raise ValueError(
            "cache_bytes keeps remote rows of the graph's own features (got it with a "
            "feature_store); leave it out, and cache in the store"
        )
    for name, number, least in (
        ("batch_size", batch_size, 1),
        ("prefetch", prefetch, 0),
        ("cache_bytes", cache_bytes, 0),
    ):
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise ValueError(f"{name} must be an integer of at least {least} (got {number!r})")
    if seed is not None and not (isinstance(seed, int) and -(2**63) <= seed < 2**63):
        raise ValueError(f"seed must be a 64-bit integer, or None (got {seed!r})")


def _check_flags(*flags: Any) -> None:
    names = "drop_last shuffle precompute_optimized_batches".split()
    for name, value in zip(names, flags, strict=True):
        if not isinstance(value, bool):
            raise TypeError(
                f"{name} must be True or False (got {value!r}); by position DataLoader takes "
                "drop_last and shuffle after batch_size, in SAR's order"
            )


def _typed_seeds(graph: Any, seeds: Any) -> Any:
    """Node type to ids, from homogenised ids of a sharded graph of several types."""
    book = graph.partition_book if isinstance(graph, GraphShardManager) else None
    if book is None or not isinstance(seeds, torch.Tensor) or len(book.ntypes) == 1:
        return seeds
    if seeds.is_floating_point() or seeds.dtype == torch.bool:
        return seeds  # `by_type` says what is wrong
    try:
        of_type, ids = book.map_to_per_ntype(seeds.cpu())
    except IndexError as error:
        raise ValueError(f"seed_nodes are no homogenised ids of the graph: {error}") from None
    return {t: ids[of_type == number] for number, t in enumerate(book.ntypes)}


def _describe(sampler: Any) -> str:
    """What must be equal on all ranks."""
    fields = "fanouts edge_dir prob mask replace layer_dependency batch_dependency".split()
    values = [f"{name}={getattr(sampler, name)!r}" for name in fields if hasattr(sampler, name)]
    return f"{type(sampler).__name__}({', '.join(values)})"
