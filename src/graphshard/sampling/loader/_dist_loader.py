# SPDX-License-Identifier: Apache-2.0
"""DataLoader: sampled mini-batches of a graph that spans ranks, as lists of blocks.

::

    caller's thread      sampling              features               device
    seeds of a step ──>  every rank draws ──>  rows come with ──>     where the model is
                         for every other       the blocks

Each stage has a thread, and each that communicates a process group of its own; see `Pipeline` for
how they stop, and `SeedOrder` for which seeds a step takes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..._base.device import device_of
from ..._base.memory import keep_freed_memory
from ...comm import ThreadGroups
from ...comm.collectives import all_gather, verify
from ...comm.group import GroupState, alone, group_state
from ...fullbatch import GraphShardManager
from ...graph import Graph
from .._ownership import Ownership
from ..feature_store import (
    CachedFeatureStore,
    CollectiveFeatureStore,
    FeatureStore,
    LocalFeatureStore,
    MappedFeatureStore,
)
from ..graph_store import GraphStore, SamplingTransport, graph_store_of
from ..sampler import DrawSeed, NeighborSampler, by_type
from ._batch_order import SeedOrder
from ._device_stream import DeviceStream
from ._mini_batch import (
    FEATURES,
    SAMPLING,
    BatchPosition,
    BatchStages,
    FeaturePlan,
    LoaderStats,
    MiniBatch,
    deliver,
)
from ._pipeline import Crew, Deliveries, Pipeline, Run


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
        seed_nodes: Any,
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
    ) -> None:
        state = _ranks_of(graph)
        self._ranks = state
        error, plan = None, None
        try:
            _check_options(graph, sampler, batch_size, seed, prefetch, cache_bytes, feature_store)
            flags = {"drop_last": drop_last, "shuffle": shuffle}
            flags["precompute_optimized_batches"] = precompute_optimized_batches
            _check_flags(flags)
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
            device = _device_of_batches(graph, store, sampler)
            seeds = by_type(store, _typed_seeds(graph, seed_nodes), "seed_nodes")
            sampler.fanouts_for(store)
        except (TypeError, ValueError) as caught:
            error = caught
        verify(state, "", "", error)
        sizes, self.seed = _share_sizes(state, sum(map(len, seeds.values())), seed)
        self.graph, self.sampler = graph, sampler
        self.batch_size, self.shuffle, self.drop_last = batch_size, shuffle, drop_last
        self.prefetch = prefetch
        self._seeds = SeedOrder(
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
        self._begin()
        stages, pipeline = self._stages, self._pipeline
        assert stages is not None and pipeline is not None
        epoch, self._epoch = self._epoch, self._epoch + 1
        self._stats = stages.stats = LoaderStats()
        order = self._seeds.of_epoch(epoch)
        positions = [BatchPosition(epoch, order, step) for step in range(len(self))]
        stages.fill_cache(positions)
        run = pipeline.run(positions)
        self._delivered = run.delivered
        self._resources.keep(run)
        return deliver(run, stages, self._stats, self)

    def _begin(self) -> None:
        """Wait for the threads of the last pass; find out whether all ranks are in step."""
        error = self._resources.end_of_pass(self._ranks.timeout.total_seconds())
        groups = self._resources.groups
        done = [] if groups is None else list(groups.num_operations)
        verify(
            self._ranks,
            f"epoch {self._epoch}, operations {done}",
            "where a DataLoader stands at the start of a pass (its epoch; and whether the last "
            "pass was left at the same batch)",
            error,
        )


@dataclass(eq=False)
class LoaderResources:
    """What a `DataLoader` gives back when it is closed, or dropped.

    Args:
        groups: Those of the threads, if they communicate.
        features: Feature stores that the loader has made.
    """

    groups: ThreadGroups | None
    features: list[FeatureStore]
    _crew: Crew | None = None
    _run: weakref.ref[Run[Any]] | None = None
    _failure: str | None = None
    _is_closed: bool = False

    def keep(self, run: Run[Any]) -> None:
        """A pass has begun."""
        self._run, self._crew = weakref.ref(run), run.crew

    def end_of_pass(self, seconds: float) -> RuntimeError | None:
        """End the latest pass.

        Args:
            seconds: How long its threads may take for what has been permitted.

        Returns:
            What speaks against another pass, if anything does.
        """
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
        if self._crew is not None and self._crew.failure is not None:
            self._failure = self._crew.failure
        if self._failure is not None:
            return RuntimeError(
                f"an earlier pass over this DataLoader failed ({self._failure}); make another one"
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
    """The ranks that iterate together.

    Raises:
        TypeError: Neither a graph nor a store.
    """
    if isinstance(graph, GraphShardManager):
        return group_state(graph.group)
    group = graph_store_of(graph).group
    return alone() if group is None else group_state(group)


def _device_of_batches(graph: Any, store: GraphStore, sampler: NeighborSampler) -> torch.device:
    """Where the sampler wants batches, else where the graph is.

    Raises:
        ValueError: Torch has no such device here.
    """
    wanted = sampler.output_device
    return device_of(getattr(graph, "device", store.device) if wanted is None else wanted)


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
    """Raise unless the arguments of a loader make sense by themselves.

    Raises:
        TypeError: Not a sampler that can draw from a sharded graph.
        ValueError: A message flow graph, a cache of a user's store, or a number out of range.
    """
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


def _check_flags(flags: dict[str, Any]) -> None:
    for name, value in flags.items():
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
