# SPDX-License-Identifier: Apache-2.0
"""What is drawn for a batch of seeds: here for edges, in `_neighbor_sampler` for nodes.

`EdgePredictionSampler` goes from a batch of edges to their end nodes, negative pairs and blocks.

Edges that a model is to predict are excluded before neighbours are drawn, not removed afterwards,
so that a node that has enough other neighbours still gets as many as the fanout says.

A negative sampler is anything that is called with a graph and edge ids and returns pairs; a user's
own may be a plain function. Those here draw for each edge by its id, as [Note: keyed draws] says of
neighbours: the same negatives come out whatever else is in the batch and on whichever rank it is.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .._base.typing import CanonicalEType, EdgeIds, EType
from ..fullbatch import GraphShardManager
from ..graph import EID, NID, Graph
from ..ops import Adjacency
from ..ops.counter_random import below, key_state, states, unit, word
from ._neighbor_sampler import BlockSampler as BlockSampler
from ._neighbor_sampler import DistNeighborSampler as DistNeighborSampler
from ._neighbor_sampler import (
    DrawSeed,
    IdTables,
    Sampler,
    by_relation,
    checked_ids,
    only_if_plain,
    relation_named,
    takes,
)
from ._neighbor_sampler import LaborSampler as LaborSampler
from ._neighbor_sampler import LayerFanout as LayerFanout
from ._neighbor_sampler import MultiLayerFullNeighborSampler as MultiLayerFullNeighborSampler
from ._neighbor_sampler import MultiLayerNeighborSampler as MultiLayerNeighborSampler
from ._neighbor_sampler import NeighborSampler as NeighborSampler
from ._neighbor_sampler import by_type as by_type
from ._neighbor_sampler import refuse_unnamed as refuse_unnamed
from .graph_store import graph_store_of
from .lazy_features import FeatureNames, check_named, read_named, set_lazy

Exclude: TypeAlias = str | Tensor | Mapping[EType, Tensor] | Callable[[Any], Any] | None
"""``None``, ``"self"``, ``"reverse_id"``, ``"reverse_types"``, edge ids, or a function of ids."""

MODES = ("self", "reverse_id", "reverse_types")

Pairs: TypeAlias = tuple[Tensor, Tensor]
"""Source and destination of each pair."""

NEGATIVES = -1
"""Stands in `DrawSeed.key` where draws of neighbours have the index of a layer."""

_DOMAIN = 0x2545F4914F6CDD1D
_MAX_ROUNDS = 64


def check_exclude(
    exclude: Exclude,
    reverse_eids: Tensor | Mapping[EType, Tensor] | None,
    reverse_etypes: Mapping[EType, EType] | None,
) -> None:
    """Raise a ValueError where the arguments do not say what to exclude."""
    is_mode = isinstance(exclude, str)
    is_other = exclude is None or callable(exclude) or isinstance(exclude, Tensor | Mapping)
    if not (exclude in MODES if is_mode else is_other):
        raise (ValueError if is_mode else TypeError)(
            f"exclude must be None, one of {list(MODES)}, edge ids, or a function of the batch's "
            f"edge ids (got {repr(exclude) if is_mode else type(exclude).__name__})"
        )
    if is_mode and exclude == "reverse_id" and reverse_eids is None:
        raise ValueError(
            "exclude='reverse_id' needs reverse_eids: for every edge id that of its reverse, "
            "or relation to that"
        )
    if is_mode and exclude == "reverse_types" and reverse_etypes is None:
        raise ValueError(
            "exclude='reverse_types' needs reverse_etypes: from each relation to its reverse"
        )


def edges_to_exclude(
    g: Any,
    seeds: Mapping[CanonicalEType, Tensor],
    as_given: Any,
    exclude: Exclude,
    reverse_eids: Tensor | Mapping[EType, Tensor] | None = None,
    reverse_etypes: Mapping[EType, EType] | None = None,
) -> dict[CanonicalEType, Tensor] | None:
    """Ids of the edges that must not be drawn for a batch of edges.

    Arguments that are not described here are those of `EdgePredictionSampler`.

    Args:
        as_given: The same as a user's function sees them: a tensor where there is one relation.
    """
    store = graph_store_of(g)
    if exclude is None:
        return None
    if callable(exclude):
        return by_relation(store, exclude(as_given), "what exclude returned", leave_out=True)
    if not isinstance(exclude, str):  # a map may be of a graph that had more edges
        return by_relation(store, exclude, "exclude", leave_out=True)
    if exclude == "self":
        return dict(seeds)
    if exclude == "reverse_id":
        assert reverse_eids is not None
        return {
            etype: torch.cat([eids, _reverse(g, etype, reverse_eids, eids)])
            for etype, eids in seeds.items()
        }
    assert reverse_etypes is not None
    reverse_of = {
        relation_named(store, there): relation_named(store, back)
        for there, back in reverse_etypes.items()
    }
    excluded: dict[CanonicalEType, list[Tensor]] = {}
    for etype, eids in seeds.items():
        excluded.setdefault(etype, []).append(eids)
        if etype in reverse_of:
            back = reverse_of[etype]
            if g.num_edges(back) != g.num_edges(etype):
                raise ValueError(
                    f"reverse_etypes needs relations of equal size, edge e of one being the "
                    f"reverse of edge e of the other (got {g.num_edges(etype)} edges of {etype} "
                    f"and {g.num_edges(back)} of {back})"
                )
            # Partitioning gives the edges of each relation ids of their own.
            reverse_edges = getattr(g, "reverse_edges", None)
            reverses = eids if reverse_edges is None else reverse_edges(eids, etype, back)
            excluded.setdefault(back, []).append(reverses)
    return {etype: torch.cat(ids) for etype, ids in excluded.items()}


def find_exclude_eids(
    g: Any,
    seed_edges: Any,
    exclude: Exclude,
    reverse_eids: Tensor | Mapping[EType, Tensor] | None = None,
    reverse_etypes: Mapping[EType, EType] | None = None,
    output_device: torch.device | str | None = None,
) -> Any:
    """Ids of the edges that must not be drawn for some edges.

    Arguments that are not described here are those of `EdgePredictionSampler`.

    Args:
        output_device: Where they shall be; by default where the graph is.

    Returns:
        Ids as ``seed_edges`` are given, plain or by relation; None where ``exclude`` is.
    """
    check_exclude(exclude, reverse_eids, reverse_etypes)
    seeds = by_relation(graph_store_of(g), seed_edges, "seed_edges") or {}
    is_plain = not isinstance(seed_edges, Mapping)
    as_given = only_if_plain(seeds) if is_plain else dict(seeds)
    excluded = edges_to_exclude(g, seeds, as_given, exclude, reverse_eids, reverse_etypes)
    if excluded is None:
        return None
    if output_device is not None:
        excluded = {etype: ids.to(output_device) for etype, ids in excluded.items()}
    return only_if_plain(excluded) if is_plain else excluded


def _reverse(
    g: Any, etype: CanonicalEType, reverse_eids: Tensor | Mapping[EType, Tensor], eids: Tensor
) -> Tensor:
    """Ids of the reverses of some edges of a relation.

    What has one row for each edge may be a tensor that lies elsewhere, as a
    `graphshard.servers.DistTensor`, so it is asked for these rows alone.
    """
    store = graph_store_of(g)
    of_relation: Any = reverse_eids
    if isinstance(reverse_eids, Mapping):
        named = {relation_named(store, name): ids for name, ids in reverse_eids.items()}
        if etype not in named:
            raise ValueError(f"reverse_eids has no entry for {etype}; it has {list(named)}")
        of_relation = named[etype]
    if not hasattr(of_relation, "shape"):
        of_relation = torch.as_tensor(of_relation)
    num_edges = store.num_edges(etype)
    if len(of_relation.shape) != 1 or of_relation.shape[0] < num_edges:
        raise ValueError(
            f"reverse_eids must have one id for each of the {num_edges} edges of {etype} (got "
            f"shape {tuple(of_relation.shape)})"
        )
    at = eids.to(of_relation.device) if isinstance(of_relation, Tensor) else eids.cpu()
    reverses = torch.as_tensor(of_relation[at])
    return checked_ids(reverses, num_edges, f"reverse_eids of {etype}", store, leave_out=True)


class NegativeSampler(ABC):
    """Base of the negative samplers here: called with a graph and edge ids, or relation to ids.

    Args:
        k: Pairs per edge.

    Raises:
        ValueError: ``k`` is not a positive integer.
    """

    def __init__(self, k: int) -> None:
        if not isinstance(k, int) or isinstance(k, bool) or k < 1:
            raise ValueError(f"k must be a positive number of pairs per edge (got {k!r})")
        self.k = k

    def __call__(
        self, g: Any, eids: EdgeIds, draw_seed: DrawSeed | None = None
    ) -> Pairs | dict[CanonicalEType, Pairs]:
        """Negative pairs for some edges.

        Args:
            draw_seed: Which draw to make; by default one from torch's generator.

        Returns:
            ``(sources, destinations)``, or relation to that where ``eids`` is a dictionary.

        Raises:
            TypeError: Ids without a relation on a graph of several.
            ValueError: An unknown relation, or an id that is out of range.
        """
        draw_seed = DrawSeed.fresh() if draw_seed is None else draw_seed
        pairs = {}
        for etype, of_relation in (by_relation(graph_store_of(g), eids, "eids") or {}).items():
            key = draw_seed.key(NEGATIVES, g.canonical_etypes.index(etype))
            streams = states(key_state(key, _DOMAIN), of_relation.to(torch.int64))
            source, destination = self._pairs(g, etype, of_relation, streams)
            pairs[etype] = source.to(g.idtype), destination.to(g.idtype)
        return pairs if isinstance(eids, Mapping) else next(iter(pairs.values()))

    @abstractmethod
    def _pairs(self, g: Any, etype: CanonicalEType, eids: Tensor, streams: Tensor) -> Pairs:
        """Pairs for the edges of one relation, from one stream of random words for each."""


class PerSourceUniform(NegativeSampler):
    """Keeps the source of each edge and draws ``k`` destinations for it, any node alike.

    A pair may by chance be an edge of the graph; `GlobalUniform` draws none that is.

    Example:
        >>> from graphshard.graph import graph
        >>> g = graph(([0, 1, 2], [1, 2, 3]))
        >>> source, destination = PerSourceUniform(2)(g, torch.tensor([1, 2]))
        >>> source, len(destination)
        (tensor([1, 1, 2, 2]), 4)
    """

    def _pairs(self, g: Any, etype: CanonicalEType, eids: Tensor, streams: Tensor) -> Pairs:
        source = g.find_edges(eids, etype=etype)[0]
        words = word(streams[:, None], torch.arange(self.k, device=streams.device))
        destination = _any_of(g.num_nodes(etype[2]), words.view(-1))
        return source.repeat_interleave(self.k), destination


Uniform = PerSourceUniform


class GlobalUniform(NegativeSampler):
    """Draws both ends among all nodes; what is an edge of the graph is drawn anew.

    On a graph that is so dense that free pairs are hard to hit, there may be fewer than ``k`` for
    an edge.

    Args:
        exclude_self_loops: Draw no pair of a node with itself.
        replace: Whether a pair may appear several times among those for one batch.
        redundancy: At most ``1 + redundancy`` tries for each pair; by default many.

    Raises:
        ValueError: ``k`` is not a positive integer, or ``redundancy`` is negative.

    Example:
        >>> from graphshard.graph import graph
        >>> g = graph(([0, 1, 2], [1, 2, 3]))
        >>> source, destination = GlobalUniform(2)(g, torch.tensor([1, 2]))
        >>> len(source), g.has_edges_between(source, destination).any()
        (4, tensor(False))
    """

    def __init__(
        self,
        k: int,
        exclude_self_loops: bool = True,
        replace: bool = False,
        redundancy: float | None = None,
    ) -> None:
        super().__init__(k)
        if redundancy is not None and redundancy < 0:
            raise ValueError(f"redundancy must not be negative (got {redundancy})")
        self.exclude_self_loops, self.replace = exclude_self_loops, replace
        self.max_rounds = _MAX_ROUNDS if redundancy is None else 1 + int(-(-redundancy // 1))

    def _pairs(self, g: Any, etype: CanonicalEType, eids: Tensor, streams: Tensor) -> Pairs:
        source_type, _, target_type = etype
        num_src, num_dst, k = g.num_nodes(source_type), g.num_nodes(target_type), self.k
        num_streams = streams.numel()
        streams = streams.repeat_interleave(k)
        slot = torch.arange(k, device=streams.device).repeat(num_streams)
        code = torch.full_like(streams, -1)
        open_slots = torch.arange(streams.numel(), device=streams.device)
        if num_src == 0 or num_dst == 0:
            open_slots = open_slots[:0]
        for attempt in range(self.max_rounds):
            if open_slots.numel() == 0:
                break
            counter = 2 * (attempt * k + slot[open_slots])
            source = _any_of(num_src, word(streams[open_slots], counter))
            destination = _any_of(num_dst, word(streams[open_slots], counter + 1))
            good = ~g.has_edges_between(source.to(g.idtype), destination.to(g.idtype), etype=etype)
            if self.exclude_self_loops and source_type == target_type:
                good &= source != destination
            drawn = source * num_dst + destination
            if not self.replace:
                good &= ~torch.isin(drawn, code)
                good &= _is_first(drawn, good)
            code[open_slots[good]] = drawn[good]
            open_slots = open_slots[~good]
        code = code[code >= 0]
        return code // max(num_dst, 1), code % max(num_dst, 1)


def global_uniform_negative_sampling(
    g: Any,
    num_samples: int,
    exclude_self_loops: bool = True,
    replace: bool = False,
    etype: EType | None = None,
    redundancy: float | None = None,
) -> Pairs:
    """Draw pairs of nodes that no edge of a relation joins; see `GlobalUniform`.

    Args:
        num_samples: How many pairs; where free pairs are hard to hit, there may be fewer.
        etype: The relation; by default the first.
        redundancy: At most ``1 + redundancy`` tries for each pair; by default many.

    Returns:
        ``(sources, destinations)``, in the graph's idtype.

    Raises:
        ValueError: ``num_samples`` or ``redundancy`` is negative, or an unknown relation.

    Example:
        >>> from graphshard.graph import graph
        >>> g = graph(([0, 1, 2], [1, 2, 3]))
        >>> source, destination = global_uniform_negative_sampling(g, 4)
        >>> len(source), g.has_edges_between(source, destination).any()
        (4, tensor(False))
    """
    if num_samples < 0:
        raise ValueError(f"num_samples must not be negative (got {num_samples})")
    relation = g.canonical_etypes[0] if etype is None else g.to_canonical_etype(etype)
    key = DrawSeed.fresh().key(NEGATIVES, g.canonical_etypes.index(relation))
    streams = states(key_state(key, _DOMAIN), torch.arange(int(num_samples), device=g.device))
    sampler = GlobalUniform(1, exclude_self_loops, replace, redundancy)
    source, destination = sampler._pairs(g, relation, streams, streams)
    return source.to(g.idtype), destination.to(g.idtype)


def _any_of(count: int, words: Tensor) -> Tensor:
    """A number in [0, count) from each random word."""
    if count < 2**31:
        return below(words, count)
    return (unit(words) * count).to(torch.int64).clamp_(max=count - 1)


def _is_first(values: Tensor, counted: Tensor) -> Tensor:
    """Which of the values that count are the first of their kind."""
    places = torch.arange(values.numel(), device=values.device)
    places = torch.where(counted, places, values.numel())
    _, group = torch.unique(values, return_inverse=True)
    first = torch.full_like(places, values.numel()).scatter_reduce(0, group, places, "amin")
    return counted & (first[group] == places)


class EdgePredictionSampler(Sampler):
    """Makes a sampler of blocks for nodes into one for edges; see `as_edge_prediction_sampler`.

    Args:
        sampler: Draws blocks for the end nodes: an object whose ``sample(g, nodes, exclude_eids)``
            returns a tuple of which the first is the input nodes and the last the blocks.
        exclude: Which edges must not be drawn: ``None``; ``"self"``, the batch's own;
            ``"reverse_id"``, also their reverses by ``reverse_eids``; ``"reverse_types"``, also
            their reverses by ``reverse_etypes``; edge ids; or a function of the batch's ids.
        reverse_eids: For every edge id that of its reverse; on a graph of several relations,
            relation to that.
        reverse_etypes: Relation to the relation that holds its reverse edges under the same ids;
            of a `graphshard.servers.DistGraph`, the ids before it was partitioned.
        negative_sampler: Called with the graph and the batch's edge ids, as they were given;
            returns ``(sources, destinations)``, or relation to that.
        prefetch_labels: Names of edge features that a loader puts into the pair graph's ``edata``.
        g_sampling: A graph of the same nodes and relations that neighbours are drawn from in place
            of the graph that has the edges. As with DGL, nothing is excluded then.

    Raises:
        TypeError: The sampler cannot exclude edges, or is one for edges already.
        ValueError: ``exclude`` is none of these, or lacks the argument that it needs.
    """

    def __init__(
        self,
        sampler: Any,
        exclude: Exclude = None,
        reverse_eids: Tensor | Mapping[EType, Tensor] | None = None,
        reverse_etypes: Mapping[EType, EType] | None = None,
        negative_sampler: Callable[..., Any] | None = None,
        prefetch_labels: FeatureNames = None,
        g_sampling: Any = None,
    ) -> None:
        if isinstance(sampler, EdgePredictionSampler):
            raise TypeError(
                "the sampler draws for edges already (got an EdgePredictionSampler); give the one "
                "that it was made of, or a loader that takes it as it is, such as DataLoader"
            )
        if len(inspect.signature(sampler.sample).parameters) < 3:
            raise TypeError(
                f"{type(sampler).__name__}.sample must take (g, indices, exclude_eids) to sample "
                "for edges; give it a third parameter, the ids of edges that must not be drawn"
            )
        check_exclude(exclude, reverse_eids, reverse_etypes)
        self.sampler = sampler
        self.g_sampling = g_sampling
        self.exclude = exclude if g_sampling is None else None
        self.reverse_eids = reverse_eids
        self.reverse_etypes = reverse_etypes
        self.negative_sampler = negative_sampler
        self.prefetch_labels = prefetch_labels or ()
        self.output_device = getattr(sampler, "output_device", None)
        self._is_keyed = takes(sampler.sample, "draw_seed")
        self._has_keyed_negatives = negative_sampler is not None and takes(
            negative_sampler, "draw_seed"
        )

    def sample(self, g: Any, seed_edges: Any, draw_seed: DrawSeed | None = None) -> tuple[Any, ...]:
        """The edges of a batch, negative pairs, and blocks that compute all their end nodes.

        The pair graph has the batch's edges in the order given, under all relations of ``g``; its
        nodes are the ends of edges and of negative pairs, in order of first appearance, with ids
        in ``ndata[NID]`` and ``edata[EID]``. The negative pair graph is over the same nodes, which
        are also the destinations of the last block, in the same order.

        Args:
            g: The graph: a `Graph`, a `graphshard.servers.DistGraph`, or a `GraphStore` that
                has a method ``find_edges(eids, etype=...)`` besides.
            seed_edges: Edge ids, or relation to ids.
            draw_seed: Which draw to make; by default one from torch's generator.

        Returns:
            ``(input_nodes, pair_graph, blocks)``, or, with a negative sampler,
            ``(input_nodes, pair_graph, negative_pair_graph, blocks)``.

        Raises:
            TypeError: ``g`` has no edges by id, or ids without a relation on a graph of several.
            ValueError: An unknown relation, or an id that is out of range.
        """
        if isinstance(g, GraphShardManager) or not callable(getattr(g, "find_edges", None)):
            raise TypeError(
                "edges can be sampled from a Graph that is whole in this process or from a "
                f"DistGraph, which find edges by id (got {type(g).__name__}); sample nodes with "
                "graphshard.sampling.DataLoader"
            )
        store = graph_store_of(g)
        draw_seed = DrawSeed.fresh() if draw_seed is None else draw_seed
        seeds = by_relation(store, seed_edges, "indices") or {}
        as_given = dict(seeds) if isinstance(seed_edges, Mapping) else only_if_plain(seeds)
        if isinstance(g, Graph):
            labels, etypes = self.prefetch_labels, g.canonical_etypes
            check_named(lambda t: g.edges[t].data, etypes, labels, "prefetch_labels")

        edges = {etype: g.find_edges(eids, etype=etype) for etype, eids in seeds.items()}
        negatives = self._negatives(g, as_given, draw_seed)
        nodes, (edges, negatives) = _compacted(g, [edges, negatives])
        pair_graph = _pair_graph(g, nodes, edges)
        for etype in g.canonical_etypes:
            eids = seeds.get(etype, torch.empty(0, dtype=store.idtype, device=store.device))
            pair_graph.edges[etype].data[EID] = eids
            if isinstance(g, Graph):
                set_lazy(g.edges[etype].data, pair_graph.edges[etype].data, EID)
        pair_graphs = [pair_graph]
        if self.negative_sampler is not None:
            pair_graphs.append(_pair_graph(g, nodes, negatives))

        excluded: Any = edges_to_exclude(
            g, seeds, as_given, self.exclude, self.reverse_eids, self.reverse_etypes
        )
        if excluded is not None and len(g.canonical_etypes) == 1:
            excluded = only_if_plain(excluded)
        keyed = {"draw_seed": draw_seed} if self._is_keyed else {}
        drawn_from = g if self.g_sampling is None else self.g_sampling
        sampled = self.sampler.sample(drawn_from, only_if_plain(nodes), excluded, **keyed)
        return (sampled[0], *pair_graphs, sampled[-1])

    def prefetch(self, batch: Any) -> None:
        """Gather the features that were named, for a batch that `sample` returned."""
        pair_graph = batch[1]
        read_named(pair_graph.edges, pair_graph.canonical_etypes, self.prefetch_labels)
        if hasattr(self.sampler, "prefetch"):
            self.sampler.prefetch((batch[0], None, batch[-1]))

    def _negatives(self, g: Any, eids: EdgeIds, draw_seed: DrawSeed) -> dict[CanonicalEType, Pairs]:
        """Relation to negative pairs, checked."""
        if self.negative_sampler is None:
            return {}
        keyed = {"draw_seed": draw_seed} if self._has_keyed_negatives else {}
        pairs = self.negative_sampler(g, eids, **keyed)
        store = graph_store_of(g)
        if not isinstance(pairs, Mapping):
            if len(g.canonical_etypes) != 1:
                raise TypeError(
                    "a negative sampler must return a dictionary from relation to (sources, "
                    f"destinations) because the graph has the relations {g.canonical_etypes}"
                )
            pairs = {g.canonical_etypes[0]: pairs}
        checked = {}
        for name, (source, destination) in pairs.items():
            etype = relation_named(store, name)
            num_src, num_dst = g.num_nodes(etype[0]), g.num_nodes(etype[2])
            source = checked_ids(source, num_src, f"negative sources of {etype}", store)
            what = f"negative destinations of {etype}"
            destination = checked_ids(destination, num_dst, what, store)
            if source.shape != destination.shape:
                raise ValueError(
                    f"a negative sampler must return as many sources as destinations (got "
                    f"{source.numel()} and {destination.numel()} of {etype})"
                )
            checked[etype] = source, destination
        return checked


def as_edge_prediction_sampler(
    sampler: Any,
    exclude: Exclude = None,
    reverse_eids: Tensor | Mapping[EType, Tensor] | None = None,
    reverse_etypes: Mapping[EType, EType] | None = None,
    negative_sampler: Callable[..., Any] | None = None,
    prefetch_labels: FeatureNames = None,
) -> EdgePredictionSampler:
    """A sampler of blocks for edges, out of one for nodes.

    With it a loader takes edge ids and yields ``(input_nodes, pair_graph, blocks)`` to classify
    edges, or with a negative sampler ``(input_nodes, pair_graph, negative_pair_graph, blocks)`` to
    tell edges from pairs that are none. Arguments and errors are those of `EdgePredictionSampler`.

    Edges are excluded before neighbours are drawn. Two edges of which each gives the other away,
    as those of an undirected graph, should both be excluded: give ``"reverse_id"`` or
    ``"reverse_types"``.

    Example:
        >>> from graphshard.data import load_dataset
        >>> from graphshard.dgl.dataloading import NeighborSampler
        >>> from graphshard.dgl.dataloading.negative_sampler import Uniform
        >>> sampler = as_edge_prediction_sampler(
        ...     NeighborSampler([10, 5]), exclude="self", negative_sampler=Uniform(3)
        ... )
        >>> cora = load_dataset("cora").graph
        >>> inputs, pairs, negatives, blocks = sampler.sample(cora, torch.arange(4))
        >>> pairs.num_edges(), negatives.num_edges(), blocks[-1].num_dst_nodes() - pairs.num_nodes()
        (4, 12, 0)
    """
    return EdgePredictionSampler(
        sampler, exclude, reverse_eids, reverse_etypes, negative_sampler, prefetch_labels
    )


def _compacted(
    g: Any, groups: Sequence[Mapping[CanonicalEType, Pairs]]
) -> tuple[dict[str, Tensor], list[dict[CanonicalEType, Pairs]]]:
    """The nodes that occur in some pairs, by type, and the pairs numbered by their places there."""
    ends: dict[str, list[Tensor]] = {ntype: [] for ntype in g.ntypes}
    for group in groups:
        for etype, pair in group.items():
            ends[etype[0]].append(pair[0])
            ends[etype[2]].append(pair[1])
    store = graph_store_of(g)
    tables = IdTables.of(store)
    none = torch.empty(0, dtype=store.idtype, device=store.device)
    nodes, local = {}, {}
    for ntype, of_type in ends.items():
        nodes[ntype], numbers = tables.renumber(ntype, none, torch.cat([none, *of_type]))
        local[ntype] = iter(numbers.split([part.numel() for part in of_type]))
    return nodes, [
        {etype: (next(local[etype[0]]), next(local[etype[2]])) for etype in group}
        for group in groups
    ]


def _pair_graph(
    g: Any, nodes: Mapping[str, Tensor], pairs: Mapping[CanonicalEType, Pairs]
) -> Graph:
    """A graph of some pairs over chosen nodes of ``g``, whose ids and features the nodes have."""
    store = graph_store_of(g)
    none = torch.empty(0, dtype=store.idtype, device=store.device)
    counts = {ntype: ids.numel() for ntype, ids in nodes.items()}
    new = Graph(
        counts,
        {
            etype: Adjacency(
                *pairs.get(etype, (none, none)), counts[etype[0]], counts[etype[2]], check=False
            )
            for etype in g.canonical_etypes
        },
    )
    for ntype, ids in nodes.items():
        new.nodes[ntype].data[NID] = ids
        if isinstance(g, Graph):
            set_lazy(g.nodes[ntype].data, new.nodes[ntype].data, NID)
    return new
