# SPDX-License-Identifier: Apache-2.0
"""NeighborLoader, LinkNeighborLoader, HGTLoader: PyG's loaders over any graph, without pyg-lib."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch_geometric.loader as pyg
from torch import Tensor
from torch_geometric.sampler import NegativeSampling

from ._batches import batch_of, set_link_seeds, set_node_seeds
from ._graphs import source_of
from ._inputs import (
    data_of_loader,
    labels_on_all_ranks,
    link_input,
    named_ends,
    node_input,
    original_ends,
)
from ._passes import SourceLoader, check_options
from ._samplers import HGTSampler, HopSampler, SourceSampler
from ._sources import SamplingSource


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
        own = _checked(source, sampler, options, lambda: make(source))
        error: Exception | None = None
        try:
            given, input_nodes, input_id = node_input(data, source, input_nodes, options)
            if input_id is not None:
                options["input_id"] = input_id
            pyg.NodeLoader.__init__(
                self, data=given, node_sampler=own, input_nodes=input_nodes, **options
            )
            self.data = data_of_loader(data, source)
        except Exception as caught:
            error = caught
        self._open(own, seed, error)

    def _sampled(self, item: Any) -> Any:
        loader: Any = self
        index, draw_seed = item
        sampler = _over(loader.node_sampler, self._drawing)
        return sampler.sample_from_nodes(loader.input_data[index], draw_seed=draw_seed)

    def filter_fn(self, out: Any) -> Any:
        """The batch of a sample, transformed; collective where the graph spans ranks."""
        loader: Any = self
        if self._source.is_whole:
            return super().filter_fn(out)  # type: ignore[misc]
        if loader.transform_sampler_output:
            out = loader.transform_sampler_output(out)
        data = batch_of(self._fetching, self.data, out, loader.custom_cls)
        input_type = loader.input_data.input_type
        set_node_seeds(data, out, input_type if self._source.is_typed else None)
        return data if loader.transform is None else loader.transform(data)


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

    Args:
        data: ``Data`` or ``HeteroData``; the same from `graphshard.pyg.shard`; a
            `graphshard.servers.DistGraph`; or PyG's pair of a feature store and a graph store.
        num_neighbors: As for `HopSampler`.
        input_nodes: Seeds, as PyG takes them: None for all; a mask, ids, a type, or a type with
            those. Of sharded data they are rows of it, this rank's own; None is all that it has. Of
            a `DistGraph` they are ids before partitioning, or a `DistTensor` that masks nodes,
            which the trainers share evenly.
        input_time: Times of the seeds, by default those in ``time_attr``.
        replace: As for `HopSampler`.
        subgraph_type: As for `HopSampler`.
        disjoint: As for `HopSampler`.
        temporal_strategy: As for `HopSampler`.
        time_attr: As for `HopSampler`.
        weight_attr: As for `HopSampler`.
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
        def make(source: SamplingSource) -> HopSampler:
            return HopSampler(
                source,
                num_neighbors,
                subgraph_type if directed else "induced",
                replace,
                disjoint,
                temporal_strategy,
                time_attr,
                weight_attr,
                seed=seed,
            )

        options = {
            "given_times": {"input_time": (input_time, time_attr, False)},
            "input_time": input_time,
            "transform": transform,
            "transform_sampler_output": transform_sampler_output,
            "filter_per_worker": filter_per_worker,
            **kwargs,
        }
        self._set_up(data, neighbor_sampler, make, input_nodes, seed, options)


class HGTLoader(_NodeSeeds, pyg.HGTLoader):
    """PyG's ``HGTLoader`` over a typed graph, here, in parts on ranks, or on graph servers.

    Args:
        data: As for `NeighborLoader`, with types.
        num_samples: As for `HGTSampler`.
        input_nodes: As for `NeighborLoader`.
        is_sorted: As for `NeighborLoader`.
        transform: As for `NeighborLoader`.
        transform_sampler_output: As for `NeighborLoader`.
        filter_per_worker: As for `NeighborLoader`.
        seed: As for `NeighborLoader`.
        **kwargs: As for `NeighborLoader`.

    Raises:
        TypeError: As for `NeighborLoader`.
        ValueError: As for `HGTSampler`; on all ranks.
        NotImplementedError: As for `NeighborLoader`.
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

        def make(source: SamplingSource) -> HGTSampler:
            return HGTSampler(source, num_samples, seed=seed)

        self._set_up(data, None, make, input_nodes, seed, options)


class LinkNeighborLoader(SourceLoader, pyg.LinkNeighborLoader):
    """PyG's ``LinkNeighborLoader`` over a graph here, in parts on ranks, or on graph servers.

    See `NeighborLoader`. Negatives are drawn alike from all nodes, so that some may be edges; they
    depend on the draw and on the edges of the batch.

    Args:
        data: As for `NeighborLoader`.
        num_neighbors: As for `HopSampler`.
        edge_label_index: Edges to start from, ``[2, n]``; a relation; or both; None for all. Of
            sharded data: its ``edge_index`` or some columns of it, None for all that this rank has;
            or a plain tensor of ids of nodes before partitioning, as of a `DistGraph`.
        edge_label: A label for each edge.
        edge_label_time: A time for each edge; neighbours are not later.
        replace: As for `HopSampler`.
        subgraph_type: As for `HopSampler`.
        disjoint: As for `HopSampler`.
        temporal_strategy: As for `HopSampler`.
        neg_sampling: PyG's ``NegativeSampling``, ``"binary"`` or ``"triplet"``.
        neg_sampling_ratio: PyG's old name of binary negatives, this many for each edge.
        time_attr: As for `HopSampler`.
        weight_attr: As for `HopSampler`.
        transform: As for `NeighborLoader`.
        transform_sampler_output: As for `NeighborLoader`.
        is_sorted: As for `NeighborLoader`.
        filter_per_worker: As for `NeighborLoader`.
        neighbor_sampler: As for `NeighborLoader`.
        directed: As for `NeighborLoader`.
        seed: As for `NeighborLoader`.
        **kwargs: As for `NeighborLoader`.

    Raises:
        TypeError: As for `NeighborLoader`.
        ValueError: As for `NeighborLoader`.
        NotImplementedError: As for `NeighborLoader`.
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

        def make() -> HopSampler:
            return HopSampler(
                source,
                num_neighbors,
                subgraph_type if directed else "induced",
                replace,
                disjoint,
                temporal_strategy,
                time_attr,
                weight_attr,
                seed=seed,
            )

        kwargs["given_times"] = {"edge_label_time": (edge_label_time, time_attr, True)}
        own = _checked(source, neighbor_sampler, kwargs, make)
        error: Exception | None = None
        try:
            neg_sampling = NegativeSampling.cast(neg_sampling)
            if neg_sampling_ratio:
                neg_sampling = NegativeSampling("binary", neg_sampling_ratio)
            etype, ends = named_ends(data, source, edge_label_index)
        except Exception as caught:
            error = caught
        source.share(error)
        ends = original_ends(data, source, etype, ends)
        label = edge_label
        if neg_sampling is not None and neg_sampling.is_binary() and edge_label is not None:
            label = labels_on_all_ranks(source, edge_label)
        try:
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
            self.data = data_of_loader(data, source)
        except Exception as caught:
            error = caught
        self._open(own, seed, error)

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
        if self.transform_sampler_output:
            out = self.transform_sampler_output(out)
        data = batch_of(self._fetching, self.data, out, self.custom_cls)
        input_type = self.input_data.input_type if self._source.is_typed else None
        set_link_seeds(data, out, input_type, self.neg_sampling)
        return data if self.transform is None else self.transform(data)


def _checked(
    source: SamplingSource, sampler: Any, options: dict[str, Any], make: Callable[[], SourceSampler]
) -> Any:
    """The sampler of a loader, given or made, after its options were checked; on all ranks.

    Args:
        source: Of the graph.
        sampler: What the user gave.
        options: Of torch's loader, and times that need others.
        make: Makes a sampler; where the source is collective, so is this.
    """
    error: Exception | None = None
    try:
        check_options(options)
        _check_sampler(sampler, source)
        _check_times(options.pop("given_times", None))
    except (NotImplementedError, TypeError, ValueError) as caught:
        error = caught
    source.share(error)
    if sampler is not None:
        return sampler
    made = None
    try:
        made = make()
    except (TypeError, ValueError) as caught:
        error = caught
    source.share(error)
    return made


def _check_times(names: Mapping[str, Any] | None) -> None:
    """Raise unless times of seeds and the name of those of neighbours are given together."""
    for name, (times, time_attr, is_needed) in (names or {}).items():
        if (times is not None and time_attr is None) or (
            is_needed and times is None and time_attr is not None
        ):
            raise ValueError(
                f"{name} are times of seeds, and time_attr names those of neighbours; give both"
                + (" or neither" if is_needed else "")
            )


def _check_sampler(given: Any, source: SamplingSource) -> None:
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
    made = getattr(sampler, "_of_thread", None)
    if made is None or made.source is not source:
        made = sampler._of_thread = copy.copy(sampler)
        made.source, made.are_checked = source, True
    return made
