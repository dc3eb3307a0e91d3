# SPDX-License-Identifier: Apache-2.0
"""NeighborLoader, LinkNeighborLoader, HGTLoader: PyG's loaders over any graph, without pyg-lib.

`SourceLoader` is how they pass over their seeds: threads, steps that ranks share, draws.
`PrefetchLoader` puts what a loader gives on a GPU.

::

    caller's thread        sample                features
    places of a batch ──>  neighbours are  ──>   rows come,        ──> caller
    (torch's sampler)      drawn                 transforms run

With ``num_workers`` each stage has a thread, and each that communicates a process group of its own.

Batches are of PyG's shape. What PyG's ``filter_data`` is for data in memory: rows of nodes and
edges are fetched, all kinds in one exchange, and put where a model expects them. Of whole graphs
PyG's own function is used.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch_geometric.loader as pyg
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import HeteroSamplerOutput, NegativeSampling, SamplerOutput

from ..._base.device import device_of
from ...comm import ThreadGroups
from ...comm.collectives import verify
from ...sampling import DrawSeed
from ...sampling.graph_store import ShardedGraphStore
from ...sampling.loader import DeviceStream, LoaderResources, Pipeline, Run, Stage, moved
from ._inputs import (
    RemoteFeatureStore,
    RemoteGraphStore,
    labels_on_all_ranks,
    link_input,
    named_ends,
    node_input,
    original_ends,
)
from ._samplers import HGTSampler, HopSampler, SourceSampler
from ._sources import ORIGINAL, Kind, SamplingSource, source_of

_SAMPLE, _FEATURES = "sample", "features"
_AHEAD = 2
_NO_PROCESSES = {
    "worker_init_fn": "what it sets up, set up before the loop",
    "multiprocessing_context": "leave it out",
    "timeout": "what other ranks are waited for has the timeout of the process group",
}


def batch_of(
    source: SamplingSource,
    given: Any,
    out: SamplerOutput | HeteroSamplerOutput,
    custom_cls: Any = None,
) -> Data | HeteroData:
    """The data of a sample: features, ``edge_index``, ``n_id``, ``e_id`` and counts of hops.

    Collective where the source is.

    Args:
        given: What the loader was given; other attributes of data go over as they are.
        custom_cls: A class to make, in the place of ``Data`` or ``HeteroData``, where there are no
            data to start from.
    """
    is_typed = isinstance(out, HeteroSamplerOutput)
    nodes: dict[Any, Tensor] = dict(out.node) if is_typed else {source.ntypes[0]: out.node}
    edges: dict[Any, Tensor | None] = (
        dict(out.edge or {}) if is_typed else {source.etypes[0]: out.edge}
    )
    requests: list[tuple[Kind, list[str], Tensor]] = [
        (ntype, source.columns(ntype), source.stored(ntype, ids)) for ntype, ids in nodes.items()
    ]
    for etype, eids in edges.items():
        if eids is not None:
            requests.append((etype, [*source.columns(etype), ORIGINAL], eids))
    fetched = source.fetch(requests)
    rows = {kind: columns for (kind, _, _), columns in zip(requests, fetched, strict=True)}

    if isinstance(given, Data | HeteroData):
        data = copy.copy(given)
    else:
        data = (custom_cls or (HeteroData if is_typed else Data))()
    for ntype, ids in nodes.items():
        store = data[ntype] if is_typed else data
        for name, column in zip(source.columns(ntype), rows[ntype], strict=True):
            store[name] = column
        store.n_id = ids
        store.num_nodes = ids.numel()
    for etype in edges:
        store = data[etype] if is_typed else data
        src, dst = (out.row[etype], out.col[etype]) if is_typed else (out.row, out.col)
        before = store.get("edge_index", None)
        store.edge_index = torch.stack([src, dst])
        if before is not None:
            store.edge_index = store.edge_index.to(before.device)
        columns = rows.get(etype)
        for number, name in enumerate(source.columns(etype)):
            store[name] = None if columns is None else columns[number]
        if columns is not None:
            store.e_id = columns[-1].cpu()
        elif "e_id" in store:
            del store["e_id"]
    return _with_counts(data, out, is_typed)


def _with_counts(data: Any, out: Any, is_typed: bool) -> Any:
    set_value = data.set_value_dict if is_typed else partial(setattr, data)
    for name in ("batch", "num_sampled_nodes", "num_sampled_edges"):
        set_value(name, getattr(out, name))
    if out.orig_row is not None and out.orig_col is not None:
        rows, cols = (ends if is_typed else {None: ends} for ends in (out.orig_row, out.orig_col))
        for etype, row in rows.items():
            store = data[etype] if is_typed else data
            store._orig_edge_index = torch.stack([row, cols[etype]])
    return data


def set_node_seeds(data: Any, out: Any, input_type: Any) -> None:
    """What a batch of nodes says of its seeds."""
    store = data if input_type is None else data[input_type]
    store.input_id, store.seed_time = out.metadata
    store.batch_size = store.input_id.shape[0]


def set_link_seeds(data: Any, out: Any, input_type: Any, neg_sampling: Any) -> None:
    """What a batch of edges says of them, and of the negatives."""
    if neg_sampling is None or neg_sampling.is_binary():
        store = data if input_type is None else data[input_type]
        store.input_id, store.edge_label_index, store.edge_label, store.edge_label_time = (
            out.metadata
        )
        return
    edges = sources = targets = data
    if input_type is not None:
        edges, sources, targets = (data[t] for t in (input_type, input_type[0], input_type[2]))
    edges.input_id, sources.src_index, targets.dst_pos_index, targets.dst_neg_index, seed_time = (
        out.metadata
    )
    sources.seed_time = targets.seed_time = seed_time


def check_options(options: dict[str, Any]) -> None:
    """Raise if options of torch's loader only concern worker processes, or make no batches."""
    for name, instead in _NO_PROCESSES.items():
        if options.get(name):
            raise NotImplementedError(
                f"{name}={options[name]!r} is for worker processes, and num_workers are threads "
                f"here, which share the graph; {instead}"
            )
    if options.get("batch_size", 1) is None and options.get("batch_sampler") is None:
        raise ValueError("batch_size must be a number of seeds (got None); give 1 for single ones")


class SourceLoader:
    """What the loaders have in common; it comes before PyG's class among their bases."""

    _source: SamplingSource

    def _open(self, sampler: SourceSampler, seed: int | None) -> None:
        """Agree with the other ranks; the last thing that making a loader does."""
        loader: Any = self
        source = self._source
        options = f"num_workers {loader.num_workers}, prefetch_factor {loader.prefetch_factor}"
        verify(source.state, options, "the options of a loader", None)
        self.epoch, self.seed = 0, sampler.seed if seed is None else seed
        self._most = None if source.is_whole else source.most_steps(len(loader.batch_sampler))
        ahead = loader.num_workers * (loader.prefetch_factor or _AHEAD)
        groups = None
        self._drawing = self._fetching = source
        if ahead and source.is_collective:
            groups = ThreadGroups([_SAMPLE, _FEATURES], source.group)
            self._drawing = source.on(groups.group(_SAMPLE))
            self._fetching = source.on(groups.group(_FEATURES))
        for ntype in source.ntypes if not source.is_whole else ():
            source.prepare(ntype)  # here, and not in two threads
        self._resources = LoaderResources(groups, [])
        self._finalizer = weakref.finalize(self, self._resources.close)
        # One thread draws where the order of messages counts.
        workers = min(loader.num_workers, torch.get_num_threads()) if source.is_whole else 1
        stages = [Stage(_SAMPLE, self._sampled, max(1, workers))]
        if loader.filter_per_worker:
            stages.append(Stage(_FEATURES, self._finished))
        self._pipeline = Pipeline(stages, ahead, None if groups is None else groups.cancelled)

    def _keep_data(self, data: Any) -> None:
        """What users find in ``loader.data``; PyG has been given types alone."""
        if not isinstance(data, Data | HeteroData | tuple | list):
            data = RemoteFeatureStore(self._source), RemoteGraphStore(self._source)
        self.data = data

    def _batch(self, out: Any, set_seeds: Callable[[Any, Any, Any], None]) -> Any:
        """The batch of a sample, transformed; PyG's own of a whole graph."""
        loader: Any = self
        if loader.transform_sampler_output:
            out = loader.transform_sampler_output(out)
        data = batch_of(self._fetching, self.data, out, loader.custom_cls)
        set_seeds(data, out, loader.input_data.input_type if self._source.is_typed else None)
        return data if loader.transform is None else loader.transform(data)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next pass is; each pass counts one up by itself."""
        self.epoch = epoch

    def close(self) -> None:
        """End what still runs; dropping the loader does the same. Not collective."""
        self._finalizer()

    def enable_cpu_affinity(self, *args: object, **kwargs: object) -> AbstractContextManager[None]:
        """Accepted for scripts of PyG's; there are no worker processes to bind to processors."""
        return nullcontext()

    def enable_multithreading(
        self, *args: object, **kwargs: object
    ) -> AbstractContextManager[None]:
        """Accepted for scripts of PyG's; threads draw already."""
        return nullcontext()

    def __len__(self) -> int:
        """Batches of a pass, the same on all ranks."""
        loader: Any = self
        return len(loader.batch_sampler) if self._most is None else self._most

    def __iter__(self) -> Iterator[Any]:
        """One pass; every rank of a graph that spans ranks must make it, and leave at one batch."""
        loader: Any = self
        if self._source.is_collective:
            self._resources.begin_pass(self._source.state, self.epoch, "loader")
        if isinstance(self._drawing.graph, ShardedGraphStore):
            self._drawing.graph.look_at_weights()
        epoch, self.epoch = self.epoch, self.epoch + 1
        batches: Any = loader.batch_sampler
        if self._most is not None:
            batches = cut([list(batch) for batch in batches], self._most)
        items = (
            (list(index), DrawSeed(self.seed, epoch, step)) for step, index in enumerate(batches)
        )
        run = self._pipeline.run(items)
        if self._source.is_collective:
            self._resources.keep(run)
        try:
            for batch in run:
                yield batch if loader.filter_per_worker else self._finished(batch)
                del batch
            if self._most is not None and run.delivered.num_batches < self._most:
                raise RuntimeError(
                    "another pass over this loader has begun, or it was closed, which ended this "
                    "pass; make a loader for each"
                )
        except GeneratorExit:
            run.close()
            raise

    def _sampled(self, item: tuple[list[int], DrawSeed]) -> Any:
        raise NotImplementedError

    def _finished(self, out: Any) -> Any:
        loader: Any = self
        data = loader.filter_fn(out)
        if loader.pin_memory and torch.cuda.is_available():
            data = data.pin_memory()
        return data


class PrefetchLoader:
    """PyG's ``PrefetchLoader``: the batches of a loader on a GPU, each copied beside the last step.

    Batches pass through page-locked memory, and the stream that is current in the loop waits for
    the copy of a batch. What the loop drops is not used again before the device is done with it,
    which PyG's class, that takes these loaders too, does not see to.

    Args:
        loader: A loader of this package, of PyG or of torch.
        device: Where batches shall be; by default the current GPU, or the CPU if there is none,
            where batches are given as they are.

    Raises:
        ValueError: Torch has no such device here.

    Example:
        >>> from torch_geometric.data import Data
        >>> from graphshard.pyg import NeighborLoader, PrefetchLoader
        >>> data = Data(x=torch.ones(3, 2), edge_index=torch.tensor([[0, 1], [1, 2]]))
        >>> for batch in PrefetchLoader(NeighborLoader(data, [2], batch_size=2), "cpu"):
        ...     print(batch.batch_size)
        2
        1
    """

    def __init__(self, loader: Any, device: torch.device | str | None = None) -> None:
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.loader, self.device = loader, device_of(device)
        self._stream = DeviceStream.of(self.device)
        ahead = 0 if self._stream is None else 1
        stage = Stage("device", partial(moved, device=self.device, pin=True))
        self._pipeline = Pipeline([stage], ahead, stream=self._stream)

    def __iter__(self) -> Run[Any]:
        """One pass over the loader."""
        return self._pipeline.run(self.loader)

    def __len__(self) -> int:
        """Batches of a pass."""
        return len(self.loader)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.loader})"


def cut(batches: Sequence[list[int]], num_steps: int) -> list[list[int]]:
    """The same seeds in ``num_steps`` batches, of sizes that differ by 1 at most.

    ``num_steps`` is what the rank with the most batches has; torch's sampler may not make more.
    """
    if len(batches) > num_steps:
        raise ValueError(
            f"the sampler made {len(batches)} batches, and said {num_steps} when the loader was "
            "made; a sampler of a graph that spans ranks makes as many in each pass"
        )
    if len(batches) == num_steps:
        return list(batches)
    seeds = [seed for batch in batches for seed in batch]
    bounds = [step * len(seeds) // num_steps for step in range(num_steps + 1)]
    return [seeds[begin:end] for begin, end in zip(bounds, bounds[1:], strict=False)]


class _NodeSeeds(SourceLoader):
    """What loaders of nodes have in common."""

    def _set_up(
        self,
        data: Any,
        sampler: Any,
        make: Callable[[SamplingSource], SourceSampler],
        input_nodes: Any,
        seed: int | None,
        options: dict[str, Any],
    ) -> None:
        """Make PyG's part of a loader, and agree with the other ranks."""
        self._source = source = source_of(data)
        own = _checked(source, sampler, options, make)
        with source.shared_errors():
            given, input_nodes, input_id = node_input(data, source, input_nodes, options)
            if input_id is not None:
                options["input_id"] = input_id
            pyg.NodeLoader.__init__(
                self, data=given, node_sampler=own, input_nodes=input_nodes, **options
            )
            self._keep_data(data)
        self._open(own, seed)

    def _sampled(self, item: Any) -> Any:
        loader: Any = self
        index, draw_seed = item
        sampler = _over(loader.node_sampler, self._drawing)
        return sampler.sample_from_nodes(loader.input_data[index], draw_seed=draw_seed)

    def filter_fn(self, out: Any) -> Any:
        """The batch of a sample, transformed; collective where the graph spans ranks."""
        if self._source.is_whole:
            return super().filter_fn(out)  # type: ignore[misc]
        return self._batch(out, set_node_seeds)


class NeighborLoader(_NodeSeeds, pyg.NeighborLoader):
    """PyG's ``NeighborLoader`` over a graph here, in parts on ranks, or on graph servers.

    Batches are PyG's: seeds first, then nodes by the hop that found them; ``n_id``, ``e_id`` and
    ``input_id``, ``batch_size``, ``num_sampled_nodes`` and ``num_sampled_edges``. Needs neither
    pyg-lib nor torch-sparse. Source: Hamilton, Ying and Leskovec, "Inductive Representation
    Learning on Large Graphs", NeurIPS 2017, https://arxiv.org/abs/1706.02216.

    What is drawn depends on the seed, the epoch, the step, the hop, the relation and the node; not
    on the number of ranks, the partition or ``num_workers``.

    Over data that `graphshard.pyg.shard` gave, every rank makes the loader and passes over it; all
    have as many batches, and a rank that would need fewer has smaller ones. One that has fewer
    seeds than there are batches has some without seeds.

    Arguments that are not described here are those of `HopSampler`.

    Args:
        data: ``Data`` or ``HeteroData``; the same from `graphshard.pyg.shard`; a
            `graphshard.servers.DistGraph`; or PyG's pair of a feature store and a graph store.
        input_nodes: Seeds, as PyG takes them: None for all; a mask, ids, a type, or a type with
            those. Of sharded data they are rows of it, this rank's own; None is all that it has. Of
            a `DistGraph` they are ids before partitioning, or a `DistTensor` that masks nodes,
            which the trainers share evenly.
        input_time: Times of the seeds, by default those in ``time_attr``.
        transform: Called with each batch.
        transform_sampler_output: Called with each sample.
        is_sorted: Accepted: edges are sorted once, whatever it says.
        filter_per_worker: Whether features are gathered ahead, in a thread, too. True unless given.
        neighbor_sampler: A `HopSampler` of the same graph, in place of the arguments for one.
        directed: PyG's old name of ``subgraph_type="induced"``, where it is false.
        seed: Of the draws, by default from torch's generator. The order of the seeds is torch's.
        **kwargs: Options of ``torch.utils.data.DataLoader``. ``num_workers`` are threads of this
            process, which make that many batches ahead, times ``prefetch_factor``.

    Raises:
        TypeError: ``data`` or ``neighbor_sampler`` is nothing of the above; on all ranks.
        ValueError: Arguments that do not fit the graph or each other; on all ranks.
        NotImplementedError: Options for worker processes, which there are none of; on all ranks.
    """

    def __init__(
        self,
        data: Any,
        num_neighbors: Any,
        input_nodes: Any = None,
        input_time: Tensor | None = None,
        replace: bool = False,
        subgraph_type: Any = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: str | None = None,
        weight_attr: str | None = None,
        transform: Callable[[Any], Any] | None = None,
        transform_sampler_output: Callable[[Any], Any] | None = None,
        is_sorted: bool = False,
        filter_per_worker: bool | None = None,
        neighbor_sampler: HopSampler | None = None,
        directed: bool = True,
        *,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        kind = subgraph_type if directed else "induced"
        draws = (num_neighbors, kind, replace, disjoint, temporal_strategy, time_attr, weight_attr)
        options = {
            "given_times": {"input_time": (input_time, time_attr, False)},
            "input_time": input_time,
            "transform": transform,
            "transform_sampler_output": transform_sampler_output,
            "filter_per_worker": filter_per_worker,
            **kwargs,
        }
        make = partial(_hop_sampler, draws, seed)
        self._set_up(data, neighbor_sampler, make, input_nodes, seed, options)


class HGTLoader(_NodeSeeds, pyg.HGTLoader):
    """PyG's ``HGTLoader`` over a typed graph, here, in parts on ranks, or on graph servers.

    Arguments and errors are those of `HGTSampler` and `NeighborLoader`.
    """

    def __init__(
        self,
        data: Any,
        num_samples: Sequence[int] | Mapping[str, Sequence[int]],
        input_nodes: Any,
        is_sorted: bool = False,
        transform: Callable[[Any], Any] | None = None,
        transform_sampler_output: Callable[[Any], Any] | None = None,
        filter_per_worker: bool | None = None,
        *,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        options = {
            "transform": transform,
            "transform_sampler_output": transform_sampler_output,
            "filter_per_worker": filter_per_worker,
            **kwargs,
        }
        make = partial(HGTSampler, num_samples=num_samples, seed=seed)
        self._set_up(data, None, make, input_nodes, seed, options)


class LinkNeighborLoader(SourceLoader, pyg.LinkNeighborLoader):
    """PyG's ``LinkNeighborLoader`` over a graph here, in parts on ranks, or on graph servers.

    See `NeighborLoader`. Negatives are drawn alike from all nodes, so that some may be edges; they
    depend on the draw and on the edges of the batch.

    Errors, and arguments that are not described here, are those of `NeighborLoader` and
    `HopSampler`.

    Args:
        edge_label_index: Edges to start from, ``[2, n]``; a relation; or both; None for all. Of
            sharded data: its ``edge_index`` or some columns of it, None for all that this rank has;
            or a plain tensor of ids of nodes before partitioning, as of a `DistGraph`.
        edge_label: A label for each edge.
        edge_label_time: A time for each edge; neighbours are not later.
        neg_sampling: PyG's ``NegativeSampling``, ``"binary"`` or ``"triplet"``.
        neg_sampling_ratio: PyG's old name of binary negatives, this many for each edge.
    """

    def __init__(
        self,
        data: Any,
        num_neighbors: Any,
        edge_label_index: Any = None,
        edge_label: Tensor | None = None,
        edge_label_time: Tensor | None = None,
        replace: bool = False,
        subgraph_type: Any = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        neg_sampling: Any = None,
        neg_sampling_ratio: float | None = None,
        time_attr: str | None = None,
        weight_attr: str | None = None,
        transform: Callable[[Any], Any] | None = None,
        transform_sampler_output: Callable[[Any], Any] | None = None,
        is_sorted: bool = False,
        filter_per_worker: bool | None = None,
        neighbor_sampler: HopSampler | None = None,
        directed: bool = True,
        *,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._source = source = source_of(data)
        kind = subgraph_type if directed else "induced"
        draws = (num_neighbors, kind, replace, disjoint, temporal_strategy, time_attr, weight_attr)
        kwargs["given_times"] = {"edge_label_time": (edge_label_time, time_attr, True)}
        own = _checked(source, neighbor_sampler, kwargs, partial(_hop_sampler, draws, seed))
        with source.shared_errors():
            neg_sampling = NegativeSampling.cast(neg_sampling)
            if neg_sampling_ratio:
                neg_sampling = NegativeSampling("binary", neg_sampling_ratio)
            etype, ends = named_ends(data, source, edge_label_index)
        ends = original_ends(data, source, etype, ends)
        label = edge_label
        if neg_sampling is not None and neg_sampling.is_binary() and edge_label is not None:
            label = labels_on_all_ranks(source, edge_label)
        with source.shared_errors():
            given, ends = link_input(source, etype, ends, label, kwargs)
            pyg.LinkLoader.__init__(
                self,
                data=given,
                link_sampler=own,
                edge_label_index=ends,
                edge_label=label if label is None or label.numel() else None,
                edge_label_time=edge_label_time,
                neg_sampling=neg_sampling,
                transform=transform,
                transform_sampler_output=transform_sampler_output,
                filter_per_worker=filter_per_worker,
                **kwargs,
            )
            if label is not None and label.numel() == 0:  # of which PyG takes the smallest
                self.input_data.label = label
            self._keep_data(data)
        self._open(own, seed)

    def _sampled(self, item: Any) -> Any:
        index, draw_seed = item
        sampler = _over(self.link_sampler, self._drawing)
        return sampler.sample_from_edges(
            self.input_data[index], neg_sampling=self.neg_sampling, draw_seed=draw_seed
        )

    def filter_fn(self, out: Any) -> Any:
        """The batch of a sample, transformed; collective where the graph spans ranks."""
        if self._source.is_whole:
            return super().filter_fn(out)
        return self._batch(out, partial(set_link_seeds, neg_sampling=self.neg_sampling))


def _checked(
    source: SamplingSource,
    sampler: HopSampler | None,
    options: dict[str, Any],
    make: Callable[[SamplingSource], SourceSampler],
) -> Any:
    """The sampler of a loader, the user's or one that is made; collective where the source is.

    ``options`` of torch's loader, and times that need others, are checked first.
    """
    with source.shared_errors():
        check_options(options)
        _check_sampler(sampler, source)
        _check_times(options.pop("given_times", {}))
    if sampler is not None:
        return sampler
    with source.shared_errors():
        return make(source)


def _hop_sampler(arguments: Sequence[Any], seed: int | None, source: SamplingSource) -> HopSampler:
    return HopSampler(source, *arguments, seed=seed)


def _check_times(given: Mapping[str, Any]) -> None:
    """Raise unless times of seeds and the name of those of neighbours are given together."""
    for name, (times, time_attr, is_needed) in given.items():
        if (times is not None and time_attr is None) or (
            is_needed and times is None and time_attr is not None
        ):
            raise ValueError(
                f"{name} are times of seeds, and time_attr names those of neighbours; give both"
                + (" or neither" if is_needed else "")
            )


def _check_sampler(given: object, source: SamplingSource) -> None:
    if given is None:
        return
    if not isinstance(given, HopSampler):
        raise TypeError(
            f"neighbor_sampler must be a graphshard.pyg.HopSampler (got {type(given).__name__}); a "
            "sampler of PyG or of your own goes to torch_geometric.loader.NodeLoader"
        )
    if given.source is not source and not (given.source.is_whole and source.is_whole):
        raise ValueError("neighbor_sampler is of another graph; make it of the loader's data")


def _over(sampler: Any, source: SamplingSource) -> Any:
    """The sampler as the thread of a loader uses it, which has checked the seeds."""
    own = getattr(sampler, "_of_thread", None)
    if own is None or own.source is not source:
        own = sampler._of_thread = copy.copy(sampler)
        own.source, own.are_checked = source, True
    return own
