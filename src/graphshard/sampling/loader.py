# SPDX-License-Identifier: Apache-2.0
"""LocalDataLoader and its kin: mini-batches for one process, or for ranks that have all indices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._base.device import device_of
from .._base.memory import keep_freed_memory
from .._base.page_locked import PageLock
from .._base.typing import CanonicalEType, EdgeIds, EType, Ids, NodeIds
from ..comm import come_together, rank, world_size
from ..comm.collectives import shared_errors
from ..fullbatch import GraphShardManager
from ..graph import EID, Block, Graph
from ..graph.message_passing import frames_of
from ._dist_loader import SPLIT_KEY, BatchOrder, FeaturePlan, LoaderStats
from ._dist_loader import LoaderResources as LoaderResources
from ._pipeline import Deliveries, DeviceStream, Pipeline, Run, Stage, group_by_source, moved
from .feature_store import FeatureRequest, FeatureStore
from .graph_store import GraphStore, LocalGraphStore, graph_store_of
from .lazy_features import FeatureNames, check_named, names_for
from .sampler import (
    BlockSampler,
    DrawSeed,
    EdgePredictionSampler,
    Exclude,
    LaborSampler,
    MultiLayerFullNeighborSampler,
    NeighborSampler,
    refuse_unnamed,
    takes,
)

WITHOUT_EFFECT = frozenset(
    "multiprocessing_context persistent_workers pin_memory prefetch_factor timeout "
    "worker_init_fn".split()
)
"""Options of DGL's loader, and of torch's under it, that concern processes which are not used."""

_RULE = (
    "all trainers make a loader of a DistGraph together; make it on every rank, or pass "
    "collective=False for one that this trainer makes and iterates over alone"
)

SIDE_BY_SIDE = (NeighborSampler, MultiLayerFullNeighborSampler, LaborSampler)
"""Samplers that may be asked from several threads at a time, which a subclass may not bear."""


class SplitOrder(BatchOrder):
    """Batches of indices that are shared among ranks.

    On one rank batches are full, besides the last. On several, all batches of an epoch have the
    same size up to one: then the mean that data-parallel training takes over ranks is the mean over
    indices, and no rank is without any unless there are too few for all.

    Args:
        indices: ``[n, ...]`` indices, or type to indices; a batch has those types that it happens
            to have.
        batch_size: The most that a batch holds.
        drop_last: Leave out what fills no batch of ``batch_size`` on every rank.
        rank: Whose batches these are.

    Raises:
        TypeError: The indices are nothing that a tensor can be made of, or a bool mask.
        ValueError: ``batch_size`` is not positive.
    """

    def __init__(
        self,
        indices: NodeIds | EdgeIds,
        batch_size: int,
        shuffle: bool,
        drop_last: bool,
        seed: int,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
            raise ValueError(f"batch_size must be a positive number (got {batch_size!r})")
        self._typed = isinstance(indices, Mapping)
        by_type: Mapping[Any, Ids] = indices if isinstance(indices, Mapping) else {None: indices}
        tensors = {key: _tensor(values, key) for key, values in by_type.items()}
        super().__init__(tensors, shuffle, seed, (SPLIT_KEY, 0))
        self._rank, self._num_ranks, self._batch_size = rank, num_ranks, batch_size
        self._is_even = num_ranks > 1
        per_step = batch_size * num_ranks
        self.num_steps = self.num_indices // per_step
        self._used = self.num_steps * per_step
        if not drop_last and self._used < self.num_indices:
            self.num_steps, self._used = self.num_steps + 1, self.num_indices

    def cut_evenly(self, num_steps: int) -> None:
        """Take ``num_steps`` batches of one size, up to one, in the place of fewer full ones."""
        if num_steps > self.num_steps:
            self.num_steps, self._is_even = num_steps, True

    def batch(self, order: Tensor | None, step: int) -> Any:
        """The indices of one step: a tensor, or type to tensor, as they were given."""
        if not self._is_even:
            start = step * self._batch_size
            stop = min(start + self._batch_size, self._used)
        else:
            part, num_parts = step * self._num_ranks + self._rank, self.num_steps * self._num_ranks
            start, stop = (p * self._used // num_parts for p in (part, part + 1))
        taken = self._taken(order, start, stop)
        return {k: ids for k, ids in taken.items() if len(ids)} if self._typed else taken[None]


def _tensor(values: Any, key: Any) -> Tensor:
    of = "" if key is None else f" of {key!r}"
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"indices{of} must be a tensor or something that one can be made of (got "
            f"{type(values).__name__}: {error})"
        ) from None
    if tensor.dtype == torch.bool:
        raise TypeError(f"indices{of} must not be a mask of bools; use mask.nonzero().view(-1)")
    if tensor.dim() == 0:
        raise TypeError(f"indices{of} must have a dimension to cut into batches (got {values!r})")
    if tensor.numel() == 0 and tensor.is_floating_point():
        return tensor.to(torch.int64)  # what torch makes of an empty list
    return tensor


class LocalDataLoader:
    """Iterates over batches of indices, and yields what a sampler makes of each.

    For a `NeighborSampler` indices are node ids and a batch is ``(input_nodes, output_nodes,
    blocks)``; for an `EdgePredictionSampler` they are edge ids and a batch is ``(input_nodes,
    pair_graph, [negative_pair_graph,] blocks)``. Any object with a method ``sample(g, indices)``
    will do. The features that the sampler names are gathered ahead of time, all others when they
    are read; see [Note: lazy features].

    What is drawn depends on the seed, the epoch and the step alone: two loaders with the same
    arguments give the same batches, with any ``prefetch``. A user's own sampler is included if it
    takes an argument ``draw_seed`` or draws nothing.

    Args:
        graph: The graph; or, for a `NeighborSampler`, a `GraphStore`; or, for one or an
            `EdgePredictionSampler`, a `graphshard.servers.DistGraph`, whose trainers make a
            loader together and get as many batches each, unless ``collective`` is false.
        indices: ``[n]`` what to iterate over, or type to that; batches mix the types. An index may
            be there several times (oversampling): ``output_nodes``, and the rows of the last block,
            are a batch's indices as they are, and all times of a node have the same neighbours.
        device: Where batches shall be; by default the sampler's ``output_device``, else the
            graph's device. On a GPU blocks and the features that the sampler names arrive with
            their copies ordered before the work of the stream that is current in the loop; others
            are copied when they are read.
        *unnamed: None: everything else goes by name.
        use_ddp: Share the indices evenly among the ranks of the default process group, as
            `SplitOrder` says: without repetition, and with the same number of steps everywhere.
            All ranks must pass the same indices.
        ddp_seed: The seed where ``use_ddp`` is set and ``seed`` is not.
        drop_last: Leave out a last batch that is not full.
        shuffle: Take the indices in another order every epoch.
        seed: Of the order and the draws; by default one from torch's generator.
        prefetch: How many batches are made ahead of the training loop, in threads of their own; 0
            makes each when it is asked for. By default 2, but 0 for a sampler without an
            argument ``draw_seed``, which may share a generator with the training loop. So many
            and one more may be on the device at once, copied beside the work of earlier steps.
        num_workers: Accepted so that calls written for DGL run; has no effect, since the work is
            done by kernels in threads.
        use_uva: For batches on a GPU of a graph on the CPU, which draws them: the graph's features
            stay in host memory, but its pages are locked where they lie (0.8 s a GB), and the GPU
            gathers the rows of a batch from there. Without it, and for what cannot be locked, such
            as a file that is mapped, the CPU gathers them; the batches are the same either way. It
            makes the current GPU the default ``device``.
        gpu_cache: Must be None.
        use_prefetch_thread: False makes each batch when it is asked for, as ``prefetch=0`` does.
        pin_prefetcher: False has copies to a GPU waited for, from memory that is not page-locked.
        use_alternate_streams: False copies to a GPU on its default stream, and not on one beside
            it. On the CPU these three have no effect but that on ``prefetch``.
        feature_store: Where the features that the sampler names come from, by the ids of the
            graph; by default the graph has them. Blocks then have no others.
        collective: On a `DistGraph`: True has all trainers make the loader, and gives each as many
            batches as the others. False makes it for this trainer alone, as DGL does: others need
            none, and it has the batches that its own indices make. Elsewhere it has no effect.
        **options: Options of torch's loader that concern worker processes; without effect.

    Raises:
        TypeError: A graph that spans ranks, a sampler without ``sample``, unknown options,
            indices that are nothing that a tensor can be made of, or a ``feature_store`` with a
            sampler that is no `BlockSampler`.
        ValueError: ``batch_size`` is not positive, ``prefetch`` is negative, or not 0 without
            ``use_prefetch_thread``; ``use_uva`` without a GPU for batches, or with a graph on it;
            or a device that torch does not have.
        NotImplementedError: ``gpu_cache``.

    Example:
        >>> from graphshard.data import load_dataset
        >>> from graphshard.dgl.dataloading import DataLoader, NeighborSampler
        >>> cora = load_dataset("cora")
        >>> sampler = NeighborSampler([10, 5], prefetch_node_feats=["feat"])
        >>> loader = DataLoader(cora.graph, cora.node_ids("train"), sampler, batch_size=64)
        >>> for input_nodes, output_nodes, blocks in loader:
        ...     print(len(output_nodes), blocks[0].srcdata["feat"].shape[1])
        64 1433
        64 1433
        12 1433
    """

    def __init__(
        self,
        graph: Any,
        indices: NodeIds | EdgeIds,
        graph_sampler: Any,
        device: torch.device | str | None = None,
        *unnamed: object,
        use_ddp: bool = False,
        ddp_seed: int = 0,
        batch_size: int = 1,
        drop_last: bool = False,
        shuffle: bool = False,
        seed: int | None = None,
        prefetch: int | None = None,
        num_workers: int = 0,
        use_uva: bool = False,
        gpu_cache: object = None,
        feature_store: FeatureStore | None = None,
        use_prefetch_thread: bool | None = None,
        pin_prefetcher: bool | None = None,
        use_alternate_streams: bool | None = None,
        collective: bool = True,
        **options: Any,
    ) -> None:
        if not isinstance(collective, bool):
            raise TypeError(f"collective must be True or False (got {collective!r})")
        is_shared = collective and hasattr(graph, "most_steps")
        if is_shared:
            come_together(type(self).__name__.removeprefix("Local"), _RULE)
        with shared_errors() if is_shared else nullcontext():
            refuse_unnamed(type(self).__name__, unnamed, "use_ddp", "ddp_seed", "batch_size")
            _check_graph(graph, graph_sampler)
            _check_options(gpu_cache, options)
            self.graph = graph
            self._find_features(graph_sampler, feature_store)
            self._keyed = takes(graph_sampler.sample, "draw_seed")
            if prefetch is None:
                prefetch = 2 if self._keyed and use_prefetch_thread is not False else 0
            if prefetch < 0:
                raise ValueError(f"prefetch must be 0 or more batches (got {prefetch})")
            if prefetch and use_prefetch_thread is False:
                raise ValueError(
                    f"use_prefetch_thread=False makes no batch ahead (got prefetch={prefetch}); "
                    "leave either out"
                )
            if seed is None:
                seed = ddp_seed if use_ddp else DrawSeed.fresh().seed
            self.indices = indices
            self.graph_sampler = graph_sampler
            if device is None:
                device = getattr(graph_sampler, "output_device", None)
            graph_device = torch.device(getattr(self.graph, "device", "cpu"))
            if device is None:
                device = "cuda" if use_uva and torch.cuda.is_available() else graph_device
            self.device = device_of(device)
            self._stream = DeviceStream.of(self.device, own=use_alternate_streams is not False)
            self._pins = self._stream is not None and pin_prefetcher is not False
            if self._plan is not None:
                self._plan.pin = self._pins
            if use_uva and (self._stream is None or graph_device.type != "cpu"):
                raise ValueError(
                    "use_uva=True is for batches on a GPU of a graph on the CPU (batches would be "
                    f"on {self.device}, the graph is on {graph_device}); leave it out, or give "
                    "device"
                )
            # Features that the GPU reads by itself stay locked for as long as this loader is there.
            self._locks = [PageLock.of(column) for column in _columns(graph)] if use_uva else []
            self._stats, self._delivered = LoaderStats(), Deliveries()
            self.use_ddp, self.shuffle, self.drop_last = use_ddp, shuffle, drop_last
            self.batch_size, self.num_workers = batch_size, num_workers
            self.seed, self.prefetch = seed, prefetch
            self.epoch = 0
            sharing = (rank(), world_size()) if use_ddp else (0, 1)
            if graph_device.type == "cpu" and isinstance(indices, Tensor | Mapping):
                indices = moved(indices, graph_device)  # once, and not for each batch
            self._order = SplitOrder(indices, batch_size, shuffle, drop_last, seed, *sharing)
        if is_shared:
            self._order.cut_evenly(graph.most_steps(len(self._order)))
        keep_freed_memory()

    def _find_features(self, sampler: Any, store: FeatureStore | None) -> None:
        """Plan the features that come from a store: that of a `DistGraph`, or the one given."""
        graph = self.graph
        self._features, self._plan = store, None
        self._labels: _PairLabels | None = None
        if store is None and hasattr(graph, "feature_store"):
            draws = sampler
            if isinstance(draws, EdgePredictionSampler):
                self._features, draws = graph.feature_store, draws.sampler
                names = sampler.prefetch_labels
                self._labels = _PairLabels.of(names, graph_store_of(graph), graph.feature_store)
            if isinstance(draws, BlockSampler):
                self._features = graph.feature_store
                self._plan = FeaturePlan(graph_store_of(graph), draws, self._features)
            if isinstance(draws, NeighborSampler) and hasattr(graph, "check_draws"):
                graph.check_draws(draws.options)
        elif store is not None:
            if not isinstance(sampler, BlockSampler):
                raise TypeError(
                    "feature_store gives what a BlockSampler names in prefetch_node_feats, "
                    "prefetch_labels and prefetch_edge_feats (got a "
                    f"{type(sampler).__name__}); leave it out, and read the store in the loop"
                )
            # In the place of the graph, whose own features are then left out.
            self.graph = graph_store_of(graph)
            self._plan = FeaturePlan(self.graph, sampler, store)

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self._order)

    def set_epoch(self, epoch: int) -> None:
        """Which epoch the next iteration is; each iteration counts one up by itself."""
        self.epoch = epoch

    def __iter__(self) -> Run[Any]:
        """One epoch; each call begins the next."""
        epoch, self.epoch = self.epoch, self.epoch + 1
        order = self._order.of_epoch(epoch)
        items = (
            (self._order.batch(order, step), DrawSeed(self.seed, epoch, step))
            for step in range(len(self))
        )
        workers = 1
        own = isinstance(self.graph, Graph | LocalGraphStore)
        if own and type(self.graph_sampler) in SIDE_BY_SIDE:
            # Renumbering takes one thread, so two batches side by side are faster than one in two:
            # 161 M edges/s against 80 with one thread (benchmarks/results/sampling_cpu_2026-11-21).
            workers = max(1, min(torch.get_num_threads(), self.prefetch))
        self._stats = stats = LoaderStats()
        fetch = functools.partial(self._fetched, stats)
        # To a GPU a batch goes by many short calls, each of which may wait for the interpreter's
        # lock; from stores that communicate one batch is fetched at a time.
        fetchers = workers if self._stream is not None and self._features is None else 1
        stages = [Stage("sample", self._sampled, workers), Stage("fetch", fetch, fetchers)]
        run = Pipeline(stages, self.prefetch, stream=self._stream).run(items)
        self._delivered = run.delivered
        return run

    def stats(self) -> LoaderStats:
        """What the latest pass has done so far: steps, waiting, and edges and inputs of blocks."""
        self._stats.set_waits(self._delivered)
        return self._stats

    def enable_cpu_affinity(self, *args: object, **kwargs: object) -> AbstractContextManager[None]:
        """Accepted so that programs written for DGL run; does nothing."""
        return nullcontext()

    def _sampled(self, item: tuple[Any, DrawSeed]) -> Any:
        indices, draw_seed = item
        keyed = {"draw_seed": draw_seed} if self._keyed else {}
        return self.graph_sampler.sample(self.graph, indices, **keyed)

    def _fetched(self, stats: LoaderStats, batch: Any) -> Any:
        blocks = batch[-1] if isinstance(batch, tuple) and batch else None
        if isinstance(blocks, list) and blocks and isinstance(blocks[0], Block):
            stats.count_drawn(blocks)
            group_by_source(blocks, self.device)
        if self._features is not None:
            plan, labels = self._plan, self._labels
            of_blocks = [] if plan is None else plan.requests(batch[-1])
            of_pairs = [] if labels is None else labels.requests(batch[1])
            rows = self._features.fetch([*of_blocks, *of_pairs])
            batch = moved(batch, self.device, self._pins)
            if plan is not None:
                plan.attach(batch[-1], rows[: len(of_blocks)])
            if labels is not None:
                labels.attach(batch[1], rows[len(of_blocks) :], self._pins)
            return batch
        if self._pins:  # what is lazy is then gathered in page-locked memory
            batch = moved(batch, self.device, pin=True)
        if hasattr(self.graph_sampler, "prefetch"):
            self.graph_sampler.prefetch(batch)
        return batch if self._pins else moved(batch, self.device)


@dataclass(frozen=True)
class _PairLabels:
    """Features of a batch of edges, from a store."""

    names: Mapping[CanonicalEType, Sequence[str]]

    @classmethod
    def of(cls, names: FeatureNames, graph: GraphStore, features: FeatureStore) -> _PairLabels:
        """Those that are named, of the relations that have them."""
        etypes = list(graph.canonical_etypes)
        check_named(features.feature_names, etypes, names, "prefetch_labels")
        return cls(
            {t: [n for n in names_for(names, t) if n in features.feature_names(t)] for t in etypes}
        )

    def requests(self, pair_graph: Graph) -> list[FeatureRequest]:
        """The rows of a batch."""
        return [
            FeatureRequest(etype, tuple(names), pair_graph.edges[etype].data[EID])
            for etype, names in self.names.items()
            if names
        ]

    def attach(self, pair_graph: Graph, rows: Sequence[Mapping[str, Tensor]], pin: bool) -> None:
        """Put rows where they belong; to a GPU through page-locked memory with ``pin``."""
        answers = iter(rows)
        for etype, names in self.names.items():
            for name, column in next(answers).items() if names else ():
                pair_graph.edges[etype].data[name] = moved(column, pair_graph.device, pin)


class NodeDataLoader(LocalDataLoader):
    """A `DataLoader` over node ids, as older releases of DGL name it.

    Arguments that are not described here are those of `DataLoader`.
    """

    def __init__(
        self,
        g: Any,
        nids: NodeIds,
        graph_sampler: Any,
        device: torch.device | str | None = None,
        *unnamed: object,
        **options: Any,
    ) -> None:
        super().__init__(g, nids, graph_sampler, device, *unnamed, **options)


class EdgeDataLoader(LocalDataLoader):
    """A `DataLoader` over edge ids, whose sampler is made by `as_edge_prediction_sampler`.

    Arguments that are not described here are those of `DataLoader` and `EdgePredictionSampler`.

    Example:
        >>> from graphshard.data import load_dataset
        >>> from graphshard.dgl.dataloading import NeighborSampler
        >>> cora, sampler = load_dataset("cora").graph, NeighborSampler([10, 5])
        >>> loader = EdgeDataLoader(cora, torch.arange(100), sampler, exclude="self", batch_size=50)
        >>> [pair_graph.num_edges() for input_nodes, pair_graph, blocks in loader]
        [50, 50]
    """

    def __init__(
        self,
        g: Any,
        eids: EdgeIds,
        graph_sampler: Any,
        device: torch.device | str | None = None,
        *unnamed: object,
        exclude: Exclude = None,
        reverse_eids: Tensor | Mapping[EType, Tensor] | None = None,
        reverse_etypes: Mapping[EType, EType] | None = None,
        negative_sampler: Callable[..., Any] | None = None,
        prefetch_labels: FeatureNames = None,
        g_sampling: Any = None,
        **options: Any,
    ) -> None:
        sampler = EdgePredictionSampler(
            graph_sampler,
            exclude,
            reverse_eids,
            reverse_etypes,
            negative_sampler,
            prefetch_labels,
            g_sampling,
        )
        super().__init__(g, eids, sampler, device, *unnamed, **options)


def _check_graph(graph: Any, sampler: Any) -> None:
    if isinstance(graph, GraphShardManager):
        raise TypeError(
            "this loader takes a graph that is whole in this process (got a "
            "GraphShardManager); use graphshard.sampling.DataLoader for one that spans ranks"
        )
    if not callable(getattr(sampler, "sample", None)):
        raise TypeError(
            f"graph_sampler must have a method sample(g, indices) (got {type(sampler).__name__})"
        )


def _columns(graph: Any) -> Iterator[Tensor]:
    """Features that a graph holds; those of other stores are not lying here."""
    if not isinstance(graph, Graph):
        return
    src_frames, _, edge_frames = frames_of(graph)
    for frame in (*src_frames, *edge_frames):
        for name in frame:
            column = frame.unread(name)
            if isinstance(column, Tensor):
                yield column


def _check_options(gpu_cache: object, options: Mapping[str, Any]) -> None:
    if gpu_cache is not None:
        raise NotImplementedError(
            "gpu_cache is not offered; leave it out, or move graph and features to the device"
        )
    unknown = sorted(set(options) - WITHOUT_EFFECT)
    if unknown:
        raise TypeError(
            f"a loader has no option {unknown[0]!r} (without effect but accepted are "
            f"{sorted(WITHOUT_EFFECT)})"
        )
