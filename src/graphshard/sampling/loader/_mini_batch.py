# SPDX-License-Identifier: Apache-2.0
"""MiniBatch: the blocks of one step and how much they weigh; what is attached, and what makes one.

`global_mean` is the loss of a step, `FeaturePlan` says which features come with the blocks, and
`BatchStages` are the stages of a `DataLoader`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...comm import trace
from ...graph import EID, NID, Block, Frame, MessagePassingGraph
from ...graph.message_passing import frames_of
from .._ownership import RowKind
from ..feature_store import CachedFeatureStore, FeatureRequest, FeatureStore, check_rows
from ..graph_store import GraphStore
from ..lazy_features import check_named, names_for
from ..sampler import DrawSeed, IdTables, NeighborSampler, per_kind
from ._batch_order import SeedOrder
from ._device_stream import moved
from ._pipeline import Deliveries, Run, Stage

SAMPLING, FEATURES, DEVICE = "sampling", "features", "device"

FetchedRows: TypeAlias = list[dict[str, Tensor]]


class MiniBatch(list[Block]):
    """The blocks of one step: ``batch[0]`` takes the inputs, ``batch[-1]`` ends at the seeds.

    Args:
        blocks: In that order.
        epoch: Which epoch it belongs to.
        step: Which step of the epoch.
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
            device: Where to.
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
        total = batch.num_global_seeds
    else:
        total = batch
    num_values = total * math.prod(values.shape[1:])
    return values.sum() / (max(1, num_values) / averaged_over)


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
        self.device_wait_seconds = delivered.device_seconds_waited

    def count_drawn(self, blocks: Sequence[Block]) -> None:
        """Add the edges and inputs of the blocks of a batch."""
        self.num_edges += sum(adj.num_edges for block in blocks for adj in block.relations)
        self.num_input_nodes += sum(frame.num_rows for frame in frames_of(blocks[0])[0])


@dataclass(frozen=True)
class _PlannedColumns:
    """Features of one kind on one side of a batch.

    Args:
        side: "input": sources of the first block; "output": destinations of the last; or "edge":
            edges of every block.
        kind: Node type or relation.
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
                wanted = [name for name in names_for(names, kind) if name in self._names_of(kind)]
                columns = dict(zip(wanted, wanted, strict=True))
                if store is None:
                    data = self._data_of(kind)
                    own = {name: data[name] for name in wanted} | rows.get(kind, {})
                    columns = {name: self._table(side, kind, name, own[name]) for name in own}
                if columns:
                    self._columns.append(_PlannedColumns(side, kind, columns))

    def _data_of(self, kind: RowKind) -> Mapping[str, Any]:
        """Features that the graph has itself."""
        if not isinstance(self._graph, MessagePassingGraph):  # a GraphStore
            return {}
        space = self._graph.nodes if isinstance(kind, str) else self._graph.edges
        data: Mapping[str, Any] = space[kind].data
        return data

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
        found = []
        # Nodes of a block are distinct if seeds are; an edge may be drawn again.
        nodes_differ = all(
            len(torch.unique(ids)) == len(ids)
            for ids in (frame[NID] for frame in frames_of(blocks[-1])[1])
        )
        for columns in self._columns:
            names = tuple(columns.names.values())
            for _, frame, id_field in self._frames(columns, blocks):
                is_distinct = id_field == NID and nodes_differ
                found.append(
                    FeatureRequest(columns.kind, names, frame[id_field], distinct=is_distinct)
                )
        return found

    def attach(self, blocks: Sequence[Block], rows: Sequence[Mapping[str, Tensor]]) -> None:
        """Put rows, as asked for by `requests`, where they belong."""
        answers = iter(rows)
        for columns in self._columns:
            for block, frame, _ in self._frames(columns, blocks):
                answer = next(answers)
                for name, key in columns.names.items():
                    frame[name] = moved(answer[key], block.device, self.pin)

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
    """Where a batch is in a run.

    Args:
        epoch: Which epoch.
        order: Of the epoch's seeds, from `SeedOrder.of_epoch`.
        step: Which step of the epoch.
    """

    epoch: int
    order: Tensor | None
    step: int


@dataclass(eq=False)
class BatchStages:
    """What a `DataLoader` does for a batch: draw blocks, fetch features, move both to a device.

    Args:
        store: Where neighbours come from, for the thread that samples.
        sampler: How they are drawn.
        seeds: This rank's batches of seeds.
        seed: Of the draws.
        with_eids: Whether edge ids are wanted.
        plan: Which features.
        features: Where they come from, for the thread that fetches; None if there are none.
        device: Where batches shall be.
        stats: What the pass has done.
    """

    store: GraphStore
    sampler: NeighborSampler
    seeds: SeedOrder
    seed: int
    with_eids: bool
    plan: FeaturePlan
    features: FeatureStore | None
    device: torch.device
    stats: LoaderStats = field(default_factory=LoaderStats)

    def __post_init__(self) -> None:
        self._tables = IdTables(self.store)

    def as_pipeline(self) -> list[Stage]:
        """The stages, each for a thread of its own."""
        stages = [Stage(SAMPLING, self.sample)]
        if self.device != self.store.device:
            if self.features is None:
                return [*stages, Stage(DEVICE, self._moved)]
            return [*stages, Stage(FEATURES, self.fetch), Stage(DEVICE, self.finish)]
        if self.features is not None:  # attaching is not worth a thread
            stages.append(Stage(FEATURES, lambda batch: self.finish(self.fetch(batch))))
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
                tables=self._tables,
                with_eids=self.with_eids,
            )
        self.stats.sampling_bytes += sent.total_bytes
        return MiniBatch(
            blocks,
            epoch=epoch,
            step=step,
            num_seeds=sum(ids.numel() for ids in seeds.values()),
            num_global_seeds=self.seeds.num_global(step),
        )

    def fetch(self, batch: MiniBatch) -> tuple[MiniBatch, FetchedRows]:
        """Fetch the features of a batch."""
        assert self.features is not None
        with trace(only_this_thread=True) as sent:
            rows = self.features.fetch(self.plan.requests(batch))
        self.stats.feature_bytes += sent.total_bytes
        return batch, rows

    def finish(self, fetched: tuple[MiniBatch, FetchedRows]) -> MiniBatch:
        """Move a batch to its device and attach the features."""
        batch = self._moved(fetched[0])
        self.plan.attach(batch, fetched[1])
        return batch

    def _moved(self, batch: MiniBatch) -> MiniBatch:
        return batch if self.device == batch.device else moved(batch, self.device, pin=True)

    @property
    def cache_hit_rate(self) -> float:
        """Part of the accesses to remote rows that the cache answered, since it was filled."""
        features = self.features
        return features.hit_rate if isinstance(features, CachedFeatureStore) else 0.0

    def fill_cache(self, positions: Sequence[BatchPosition]) -> None:
        """If there is a cache, draw a pass to count how often it reads each row; collective."""
        if not isinstance(self.features, CachedFeatureStore):
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
            stats.cache_hit_rate = stages.cache_hit_rate
            yield batch
            del batch
        if run.num_delivered < len(loader):
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
    found: dict[RowKind, dict[str, Tensor]] = {}
    for name, given in features.items():
        label = f"{what}[{name!r}]"
        for ntype, rows in per_kind(given, graph.ntypes, label, "node type to rows").items():
            if ntype not in graph.ntypes:
                raise ValueError(
                    f"{label} names the node type {ntype!r}; the graph has {list(graph.ntypes)}"
                )
            of = f"nodes of type {ntype!r} that this process holds"
            check_rows(rows, graph.num_nodes(ntype), of, label)
            found.setdefault(ntype, {})[name] = rows
    return found
