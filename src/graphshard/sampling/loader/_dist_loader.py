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
from typing import Any

import torch

from ...comm import Lanes
from ...comm.collectives import verify
from ...comm.group import alone, group_state
from ...fullbatch import GraphShardManager
from ...graph import Graph
from ..feature_store import FeaturePlan, keep_freed_memory
from ..graph_store import LocalStructure, Transport
from ..sampler import NeighborSampler, by_type, refuse_unnamed
from ._mini_batch import MiniBatch
from ._pipeline import Run
from ._resources import LoaderResources
from ._seeds import SeedOrder
from ._sources import check_options, describe, rows_for, share_sizes, structure_for
from ._stages import FEATURES, SAMPLING, LoaderStats, Place, Sampling
from ._work import Work


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
        graph: This rank's part of a sharded graph; or a `Graph`, for a process on its own.
        seed_nodes: Ids of this rank's seeds in the graph's global numbering, or node type to ids. A
            seed may be there several times (oversampling); in a batch each time has a row, with the
            same neighbours.
        sampler: How neighbours are drawn, and which features come with the blocks:
            ``input_node_features`` and ``output_node_features`` of a `DistNeighborSampler`; of any
            `NeighborSampler`, the features of the graph that its ``prefetch_node_feats``,
            ``prefetch_labels`` and ``prefetch_edge_feats`` name. Rows are taken as they are now.
        batch_size: Seeds of a batch, on each rank.
        *unnamed: None: everything else goes by name, for SAR and DGL have it in other orders.
        shuffle: Take the seeds in another order every epoch.
        drop_last: Leave out, on each rank, what fills no batch.
        seed: Of the order and the draws, equal on all ranks; by default rank 0's torch generator
            gives one.
        prefetch: How many finished batches may wait for the training loop. 0 makes each when it
            is asked for, in the caller's thread.
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

    Raises:
        TypeError: Not a graph, a sampler, or ids; on all ranks.
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
        graph: GraphShardManager | Graph,
        seed_nodes: Any,
        sampler: NeighborSampler,
        batch_size: int,
        *unnamed: Any,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int | None = None,
        prefetch: int = 2,
        transport: Transport = "auto",
        structure_budget: int | None = None,
        map_features: bool = True,
        cache_bytes: int = 0,
        edge_ids: bool = False,
    ) -> None:
        refuse_unnamed("DataLoader", unnamed, "drop_last", "shuffle")
        if not isinstance(graph, GraphShardManager | Graph):
            raise TypeError(
                f"graph must be a GraphShardManager or a Graph (got {type(graph).__name__})"
            )
        state = alone() if isinstance(graph, Graph) else group_state(graph.group)
        self._ranks = state
        error, plan = None, None
        try:
            check_options(graph, sampler, batch_size, seed, prefetch, cache_bytes)
            plan = FeaturePlan(graph, sampler)
        except (TypeError, ValueError) as caught:
            error = caught
        options = (
            f"sampler {describe(sampler)}, batch_size {batch_size}, shuffle {shuffle}, "
            f"drop_last {drop_last}, seed {seed}, prefetch {prefetch}, transport {transport!r}, "
            f"structure_budget {structure_budget}, map_features {map_features}, "
            f"cache_bytes {'> 0' if cache_bytes else 0}, edge_ids {edge_ids}, "
            f"features {'' if plan is None else plan.describe()}"
        )
        verify(state, options, "the arguments of DataLoader", error)
        assert plan is not None
        structure = structure_for(graph, transport, structure_budget)
        seeds: dict[str, torch.Tensor] = {}
        try:
            seeds = by_type(structure, seed_nodes, "seed_nodes")
            sampler.fanouts_for(structure)
        except (TypeError, ValueError) as caught:
            error = caught
        verify(state, "", "", error)
        num_seeds = sum(ids.numel() for ids in seeds.values())
        sizes, self.seed = share_sizes(state, num_seeds, seed)
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
        )
        rows = rows_for(graph, plan, map_features, cache_bytes)
        owned = [] if rows is None else [rows]
        lanes = None
        if prefetch and state.world_size > 1:
            lanes = Lanes([SAMPLING, FEATURES][: 1 + len(owned)], state.group)
            if not isinstance(structure, LocalStructure):
                structure = structure.on(lanes.group(SAMPLING))
            if rows is not None:
                rows = rows.on(lanes.group(FEATURES))
                owned.append(rows)
        self._resources = LoaderResources(lanes, owned)
        self._finalizer = weakref.finalize(self, self._resources.close)
        sampling = Sampling(structure, sampler, self._seeds, self.seed, edge_ids or plan.has_edges)
        self._work: Work | None = Work(sampling, rows, plan, prefetch, lanes)
        self._epoch = 0
        self._stats = LoaderStats()
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
        return self._stats

    def close(self) -> None:
        """Stop what still runs, and give back threads, process groups and memory.

        Dropping the loader does the same, and so does the end of the interpreter. Not collective.
        """
        self._finalizer()
        self._work = None  # what it holds refers to the groups

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[MiniBatch]:
        """One epoch. A pass that is still under way ends.

        Raises:
            RuntimeError: The loader is closed, or an earlier pass failed; on all ranks.
            ValueError: Ranks are not at the same epoch, or left the last pass at different
                batches; on all ranks.
            RankError: Another rank failed, or did not answer in time.
        """
        self._begin()
        work = self._work
        assert work is not None
        epoch, self._epoch = self._epoch, self._epoch + 1
        self._stats = work.begin(LoaderStats())
        places = [Place(epoch, self._seeds.order(epoch), step) for step in range(len(self))]
        work.fill_cache(places)
        run = work.pipeline.run(places)
        self._resources.keep(run)
        return self._batches(run, work, self._stats)

    def _batches(self, run: Run[MiniBatch], work: Work, stats: LoaderStats) -> Iterator[MiniBatch]:
        try:
            for batch in run:
                stats.num_steps, stats.wait_seconds = run.num_delivered, run.seconds_waited
                stats.cache_hit_rate = work.cache_hit_rate
                yield batch
                del batch
            if run.num_delivered < len(self):
                raise RuntimeError(
                    "another pass over this DataLoader has begun, or it was closed, which ended "
                    "this pass; make a loader for each"
                )
        except GeneratorExit:
            # The caller has left the loop. Close here, and not when `run` is dropped: this may
            # hold the last reference to the loader, whose end would cut short what the threads
            # have permission to finish.
            run.close()
            raise

    def _begin(self) -> None:
        """Wait for the threads of the last pass; find out whether all ranks are in step."""
        error = self._resources.end_of_pass(self._ranks.timeout.total_seconds())
        lanes = self._resources.lanes
        done = [] if lanes is None else list(lanes.num_operations)
        verify(
            self._ranks,
            f"epoch {self._epoch}, operations {done}",
            "where a DataLoader stands at the start of a pass (its epoch; and whether the last "
            "pass was left at the same batch)",
            error,
        )
