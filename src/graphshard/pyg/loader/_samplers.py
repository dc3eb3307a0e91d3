# SPDX-License-Identifier: Apache-2.0
"""HopSampler, HGTSampler: samplers of PyG's interface over any source, without pyg-lib.

They take and give ids as the graph had them before it was partitioned. Only edges keep the ids
under which they are stored; ``edge_permutation`` has the others, and PyG's loaders read it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch_geometric.sampler import (
    BaseSampler,
    EdgeSamplerInput,
    HeteroSamplerOutput,
    NegativeSampling,
    NodeSamplerInput,
    SamplerOutput,
)
from torch_geometric.sampler.base import NumNeighbors, SubgraphType
from torch_geometric.sampler.neighbor_sampler import edge_sample, node_sample

from ..._base.typing import CanonicalEType
from ...comm.collectives import all_gather
from ...sampling import DrawSeed
from ...sampling.sampler import only_if_plain
from ._draws import HopPlan, HopSample, TimeLimit, relation_key, sample_budget, sample_hops
from ._sources import SamplingSource, source_of

_NEGATIVES = 1 << 22
"""Stands in the key of a draw where hops have their number."""

_ROUNDS = 6


class SourceSampler(BaseSampler):
    """Base of the samplers here; making one of a graph that spans ranks is collective.

    Arguments that are not described here are those of `HopSampler`.

    Attributes:
        are_checked: Whether seeds are known to be in range, so that ranks need not ask each other.
    """

    def __init__(self, graph: Any, seed: int | None = None) -> None:
        self.source: SamplingSource = source_of(graph)
        own = DrawSeed.fresh().seed if seed is None else seed
        with self.source.shared_errors():
            if not isinstance(own, int) or not -(2**63) <= own < 2**63:
                raise ValueError(f"seed must be a 64-bit integer, or None (got {seed!r})")
        state = self.source.state
        self.seed = int(all_gather(state, torch.tensor([own]), type(self).__name__)[0])
        self._is_seeded = seed is not None or self.source.is_collective
        self.are_checked = False
        self._num_draws = 0

    @property
    def edge_permutation(self) -> Any:
        """From ids of edges in samples to ids before partitioning; None where they are the same.

        Not a tensor, which would be as long as the graph has edges: indexing it reads what is
        asked for. Of a typed graph, relation to that.
        """
        source = self.source
        if source.is_whole:
            return None
        originals = {etype: EdgeOriginals(source, etype) for etype in source.etypes}
        return originals if source.is_typed else next(iter(originals.values()))

    def _seed_of_call(self, given: DrawSeed | None) -> DrawSeed:
        """Which draw a call makes; without a seed, one from torch's generator."""
        worker = torch.utils.data.get_worker_info()
        if worker is not None and not self.source.is_fork_safe:
            raise RuntimeError(
                "a graph in parts cannot be sampled in worker processes, which have no connection "
                f"to where it is (in worker {worker.id}); pass num_workers=0, or use "
                "graphshard.pyg.NeighborLoader, which works ahead in threads"
            )
        if given is not None:
            return given
        if not self._is_seeded:
            return DrawSeed.fresh()
        self._num_draws += 1
        return DrawSeed(self.seed, 0, self._num_draws - 1)

    def _stored(self, seeds: Tensor | Mapping[Any, Tensor]) -> dict[str, Tensor]:
        """Node type to ids of the source, checked on all ranks."""
        source = self.source
        by_type = seeds if isinstance(seeds, Mapping) else {None: seeds}
        named: dict[Any, Tensor] = {source.kind(t): ids.cpu() for t, ids in by_type.items()}
        if not self.are_checked:
            with source.shared_errors() if source.is_collective else nullcontext():
                for ntype, ids in named.items():
                    if ntype not in source.ntypes:
                        raise ValueError(
                            f"seeds must be nodes of one of the types {source.ntypes} (got "
                            f"{ntype!r})"
                        )
                    source.check(ntype, ids.to(torch.int64))
        return {ntype: source.stored(ntype, ids) for ntype, ids in named.items()}

    def _output(self, sample: HopSample) -> SamplerOutput | HeteroSamplerOutput:
        """What PyG's loaders take; collective where the source is."""
        by_kind: dict[str, Any] = {
            "node": self.source.original(sample.nodes),  # type: ignore[arg-type]
            "row": sample.src,
            "col": sample.dst,
            "edge": dict(sample.eids),
            "batch": sample.seed_of,
            "num_sampled_nodes": sample.num_nodes,
            "num_sampled_edges": sample.num_edges,
        }
        if self.source.is_typed:
            return HeteroSamplerOutput(**by_kind)
        return SamplerOutput(**{name: of and only_if_plain(of) for name, of in by_kind.items()})


class HopSampler(SourceSampler):
    """Draws neighbours hop by hop, of a graph here, in parts on ranks, or on graph servers.

    It goes where PyG takes a ``BaseSampler``: ``NodeLoader(data, HopSampler(graph, [10, 5]))``,
    ``NeighborLoader(..., neighbor_sampler=)``. A graph that spans ranks is sampled by all of them
    together: every rank makes the same calls, and none in a worker process. Of a graph on servers
    all trainers make a sampler together, and then each samples for itself.

    Args:
        graph: ``Data`` or ``HeteroData``, also what `graphshard.pyg.shard` gave; a
            `graphshard.servers.DistGraph`; or PyG's pair of a feature store and a graph store.
        num_neighbors: Neighbours per node for each hop, -1 for all; on a typed graph also relation
            to that.
        subgraph_type: ``"directional"``: the edges that were drawn. ``"bidirectional"``: also their
            reverses. ``"induced"``: all edges between the nodes that were found.
        disjoint: Every seed has a subgraph of its own.
        temporal_strategy: ``"uniform"``: any neighbours that are there in time; ``"last"``: the
            latest of them.
        time_attr: Name of the column of times, of nodes or of edges. Neighbours are then not later
            than the seed, and subgraphs are disjoint.
        weight_attr: Name of the edge feature to draw in proportion to.
        seed: Of the draws, the same on all ranks; by default torch's generator gives it.

    Raises:
        TypeError: ``graph`` is nothing of the above.
        ValueError: Arguments that do not fit the graph or each other.
    """

    def __init__(
        self,
        graph: Any,
        num_neighbors: Any,
        subgraph_type: Any = "directional",
        replace: bool = False,
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: str | None = None,
        weight_attr: str | None = None,
        *,
        seed: int | None = None,
    ) -> None:
        super().__init__(graph, seed)
        is_given = isinstance(num_neighbors, NumNeighbors)
        if not isinstance(num_neighbors, NumNeighbors | list | tuple | dict):
            raise TypeError(
                "num_neighbors must be a list with a number for each hop, or relation to that (got "
                f"{num_neighbors!r})"
            )
        self.num_neighbors = num_neighbors if is_given else NumNeighbors(num_neighbors)
        kinds = [kind.value for kind in SubgraphType]
        if subgraph_type not in [*SubgraphType, *kinds]:
            raise ValueError(f"subgraph_type must be one of {kinds} (got {subgraph_type!r})")
        self.subgraph_type = SubgraphType(subgraph_type)
        self.keep_orig_edges = False
        source = self.source
        time = _time_limit(source, time_attr, temporal_strategy, replace)
        if weight_attr is not None and not any(
            weight_attr in source.names.get(etype, {}) for etype in source.etypes
        ):
            raise ValueError(
                f"weight_attr={weight_attr!r} must be a feature of edges (there are "
                f"{ {etype: source.columns(etype) for etype in source.etypes} })"
            )
        self.plan = HopPlan(
            _per_relation(self.num_neighbors, source),
            replace,
            weight_attr,
            disjoint,
            self.subgraph_type == SubgraphType.induced,
            time,
        )
        if self.plan.induced and self.plan.is_disjoint:
            raise ValueError(
                "disjoint and temporal sampling have one subgraph for each seed, and "
                "subgraph_type='induced' takes all edges between all nodes; use 'directional' or "
                "'bidirectional'"
            )

    @property
    def is_hetero(self) -> bool:
        """Whether samples are ``HeteroSamplerOutput``."""
        return self.source.is_typed

    @property
    def disjoint(self) -> bool:
        """Whether every seed has a subgraph of its own."""
        return self.plan.is_disjoint

    @property
    def is_temporal(self) -> bool:
        """Whether times limit what is drawn."""
        return self.plan.time is not None

    def sample_from_nodes(
        self, index: NodeSamplerInput, draw_seed: DrawSeed | None = None, **kwargs: Any
    ) -> SamplerOutput | HeteroSamplerOutput:
        """The subgraph around some nodes; collective where the graph spans ranks.

        Args:
            index: The nodes, by their ids before partitioning.
            draw_seed: Which draw to make; by default the next one.

        Raises:
            ValueError: An id that the graph does not have, or seeds without a time; on all ranks.
            RuntimeError: A worker process, of a graph that is not whole in it.
        """
        draw_seed = self._seed_of_call(draw_seed)
        input_type = index.input_type if self.source.is_typed else None
        if self.source.is_typed and input_type is None:
            raise ValueError(
                "seeds of a typed graph need a type: pass input_nodes=(type, ids) (the graph has "
                f"{self.source.ntypes})"
            )
        inputs = NodeSamplerInput(index.input_id, index.node, index.time, input_type)
        return self._finished(
            node_sample(inputs, lambda seed, time: self._sample(seed, time, draw_seed))
        )

    def sample_from_edges(
        self,
        index: EdgeSamplerInput,
        neg_sampling: NegativeSampling | None = None,
        draw_seed: DrawSeed | None = None,
    ) -> SamplerOutput | HeteroSamplerOutput:
        """The subgraph around the ends of some edges; collective where the graph spans ranks.

        Args:
            index: The edges, by ids of nodes before partitioning.
            neg_sampling: Of pairs that are taken for no edges. Some of them may be edges.
            draw_seed: Which draw to make; by default the next one.

        Raises:
            ValueError: As for `sample_from_nodes`.
            RuntimeError: As for `sample_from_nodes`.
        """
        draw_seed = self._seed_of_call(draw_seed)
        source = self.source
        num_nodes: Any = {ntype: source.count(ntype) for ntype in source.ntypes}
        if not source.is_typed:
            num_nodes = num_nodes[source.ntypes[0]]
        etype: CanonicalEType = tuple(index.input_type) if source.is_typed else source.etypes[0]
        negatives = None
        if neg_sampling is not None:
            negatives = KeyedNegatives(
                neg_sampling, source, self.plan.time, index, etype, draw_seed
            )
        is_empty = negatives is not None and negatives.is_triplet() and index.row.numel() == 0
        is_triplet = negatives is not None and negatives.is_triplet()

        def sample(seed: Any, time: Any) -> SamplerOutput | HeteroSamplerOutput:
            out = self._sample(seed, time, draw_seed)
            return _by_edge(out, index.row.numel(), is_triplet) if self.disjoint else out

        out = edge_sample(
            index,
            sample,
            num_nodes,
            self.disjoint,
            None,
            None if is_empty else negatives,
        )
        if is_empty:  # PyG's shapes of triplets need one
            assert negatives is not None
            none = negatives.sample(0, "dst")
            of_each = none if negatives.amount == 1 else none.view(0, int(negatives.amount))
            out.metadata = (index.input_id, none, none, of_each, index.time)
        return self._finished(out)

    def _sample(
        self, seed: Any, seed_time: Any, draw_seed: DrawSeed
    ) -> SamplerOutput | HeteroSamplerOutput:
        source = self.source
        seeds = self._stored(seed)
        times = None
        if seed_time is not None:
            by_type = seed_time if isinstance(seed_time, Mapping) else {None: seed_time}
            times = {str(source.kind(t)): values.cpu() for t, values in by_type.items()}
        return self._output(sample_hops(source, self.plan, seeds, draw_seed, times))

    def _finished(self, out: Any) -> Any:
        if self.subgraph_type == SubgraphType.bidirectional:
            return out.to_bidirectional(keep_orig_edges=self.keep_orig_edges)
        return out


class HGTSampler(SourceSampler):
    """Draws a number of nodes of each type in each hop, as the Heterogeneous Graph Transformer.

    Source: Hu, Dong, Wang and Sun, "Heterogeneous Graph Transformer", WWW 2020,
    https://arxiv.org/abs/2003.01332. Goes where PyG takes a ``BaseSampler``; see `HopSampler`,
    also for the other arguments.

    Args:
        num_samples: Nodes of each type for each hop; or node type to that.

    Raises:
        TypeError: ``graph`` is nothing to sample from.
        ValueError: A graph without types, or samples of a type that it does not have.
    """

    def __init__(
        self,
        graph: Any,
        num_samples: Sequence[int] | Mapping[str, Sequence[int]],
        *,
        seed: int | None = None,
    ) -> None:
        super().__init__(graph, seed)
        ntypes = self.source.ntypes
        if not self.source.is_typed:
            raise ValueError(
                "HGT samples a graph with types (got one without); use NeighborLoader for it"
            )
        if not isinstance(num_samples, Mapping):
            num_samples = {ntype: list(num_samples) for ntype in ntypes}
        unknown = set(num_samples) - set(ntypes)
        if unknown:
            raise ValueError(
                f"num_samples must name types of the graph, {ntypes} (got {sorted(unknown)})"
            )
        if any(n < 0 for each in num_samples.values() for n in each):
            raise ValueError(f"num_samples must be 0 or more nodes (got {dict(num_samples)})")
        self.num_samples = {ntype: list(each) for ntype, each in num_samples.items()}

    def sample_from_nodes(
        self, index: NodeSamplerInput, draw_seed: DrawSeed | None = None, **kwargs: Any
    ) -> HeteroSamplerOutput:
        """The subgraph around some nodes; as `HopSampler.sample_from_nodes`."""
        draw_seed = self._seed_of_call(draw_seed)
        seeds = self._stored({index.input_type: index.node})
        out = self._output(sample_budget(self.source, self.num_samples, seeds, draw_seed))
        out.metadata = (index.input_id, index.time)
        return out

    def sample_from_edges(self, index: Any, neg_sampling: Any = None) -> Any:
        """Not defined for this sampler.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "HGT sampling starts from nodes; use LinkNeighborLoader for edges"
        )


class EdgeOriginals:
    """Ids that edges of one relation had before partitioning, read when indexed."""

    def __init__(self, source: SamplingSource, etype: CanonicalEType) -> None:
        self._source, self._etype = source, etype

    def __len__(self) -> int:
        return self._source.count(self._etype)

    def __getitem__(self, edge: Tensor) -> Tensor:
        """Collective where the source is."""
        return self._source.original({self._etype: edge})[self._etype]


def _by_edge(out: Any, num_edges: int, is_triplet: bool) -> Any:
    """A sample around ends of edges, the seed of each subgraph replaced by its edge.

    Seeds are the sources and then the destinations, each those of the edges and of negatives. PyG
    takes the number of a seed modulo the number of edges, which is the edge only where the sources
    are a multiple of these, as they are not with half a negative for each edge.
    """
    batches = list(out.batch.values()) if isinstance(out.batch, dict) else [out.batch]
    num_seeds = max((int(batch.max()) + 1 for batch in batches if batch.numel()), default=0)
    if num_edges == 0 or num_seeds == 0:
        return out
    seeds = torch.arange(num_seeds)
    num_sources = num_edges if is_triplet else num_seeds // 2
    edges = torch.where(seeds < num_sources, seeds, seeds - num_sources) % num_edges
    if isinstance(out.batch, dict):
        out.batch = {ntype: edges[batch] for ntype, batch in out.batch.items()}
    else:
        out.batch = edges[out.batch]
    return out


class KeyedNegatives(NegativeSampling):
    """Negatives that depend on the draw and on the edges of the batch, ``index``, alone.

    ``time`` limits them to nodes that are there when the edge is.
    """

    def __init__(
        self,
        given: NegativeSampling,
        source: SamplingSource,
        time: TimeLimit | None,
        index: EdgeSamplerInput,
        etype: CanonicalEType,
        draw_seed: DrawSeed,
    ) -> None:
        super().__init__(given.mode, given.amount, given.src_weight, given.dst_weight)
        self._source, self._time, self._index, self._etype = source, time, index, etype
        edges = torch.cat([index.row, index.col]).to(torch.int64)
        batch = zlib.crc32(edges.numpy().tobytes())
        key = relation_key(draw_seed, _NEGATIVES, etype) ^ batch
        self._generator = torch.Generator().manual_seed(key)

    def sample(self, num_samples: int, endpoint: Any, num_nodes: int | None = None) -> Tensor:
        """Nodes at one end, by their ids before partitioning."""
        ntype = self._etype[0] if endpoint == "src" else self._etype[2]
        weight = self.src_weight if endpoint == "src" else self.dst_weight
        count = self._source.count(ntype)
        if weight is not None and weight.numel() != count:
            raise ValueError(
                f"the weights of negatives must be one for each of the {count} nodes of type "
                f"{ntype!r} (got {weight.numel()})"
            )
        time, of_edges = self._time, self._index.time
        if time is None or time.of_edges or of_edges is None:
            return self._any(num_samples, weight, count)
        if time.name not in self._source.names.get(ntype, {}):
            return self._any(num_samples, weight, count)
        tries = torch.stack([self._any(num_samples, weight, count) for _ in range(_ROUNDS)])
        rows = self._source.stored(ntype, tries.view(-1))
        times = self._source.fetch([(ntype, [time.name], rows)])[0][0].cpu().view(_ROUNDS, -1)
        early = times <= of_edges.repeat(math.ceil(self.amount))[:num_samples]
        first = early.to(torch.int8).argmax(0)
        earliest = self._source.earliest(ntype, time.name)
        return torch.where(early.any(0), tries.gather(0, first[None])[0], earliest)

    def _any(self, num_samples: int, weight: Tensor | None, count: int) -> Tensor:
        if num_samples == 0:
            return torch.empty(0, dtype=torch.int64)
        if weight is not None:
            return torch.multinomial(
                weight, num_samples, replacement=True, generator=self._generator
            )
        return torch.randint(count, (num_samples,), generator=self._generator)


def _time_limit(
    source: SamplingSource, name: str | None, strategy: str, replace: bool
) -> TimeLimit | None:
    if strategy not in ("uniform", "last"):
        raise ValueError(f"temporal_strategy must be 'uniform' or 'last' (got {strategy!r})")
    if name is None:
        return None
    of_nodes = any(name in source.names.get(ntype, {}) for ntype in source.ntypes)
    of_edges = any(name in source.names.get(etype, {}) for etype in source.etypes)
    if of_nodes == of_edges:
        both = "both nodes and edges have it" if of_nodes else "neither have it"
        raise ValueError(f"time_attr={name!r} must be a column of nodes or one of edges ({both})")
    if strategy == "last" and replace:
        raise ValueError(
            "temporal_strategy='last' takes the latest neighbours, each of them once; leave "
            "replace out, or use 'uniform'"
        )
    return TimeLimit(name, of_edges, strategy)  # type: ignore[arg-type]


def _per_relation(numbers: NumNeighbors, source: SamplingSource) -> dict[CanonicalEType, list[int]]:
    if source.is_typed:
        fanouts = numbers.get_values(source.etypes)
    else:
        values = numbers.get_values()
        if isinstance(values, dict):
            raise ValueError(
                f"num_neighbors must be a list of numbers, one for each hop, because the graph has "
                f"no types (got {values})"
            )
        fanouts = {source.etypes[0]: values}
    for etype, values in fanouts.items():
        for number in values:
            if not isinstance(number, int) or isinstance(number, bool) or number < -1:
                raise ValueError(
                    "num_neighbors must be integers of at least -1, which is all neighbours (got "
                    f"{number!r} for {etype})"
                )
    return {etype: list(values) for etype, values in fanouts.items()}
