# SPDX-License-Identifier: Apache-2.0
"""EdgePredictionSampler: from a batch of edges to their end nodes, negatives and blocks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._base.typing import CanonicalEType, EType
from ...fullbatch import GraphShardManager
from ...graph import EID, NID, Graph
from ...ops import Adjacency
from ..graph_store import graph_store_of
from ..lazy_features import FeatureNames, check_named, read_named, set_lazy
from ._block_sampler import Sampler, takes
from ._exclude import Exclude, check_exclude, edges_to_exclude
from ._ids import by_relation, checked_ids, only_if_plain, relation_named
from ._negative import Pairs
from ._neighbor_sampler import DrawSeed, IdTables


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
        negative_sampler: Any = None,
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
        kept, (edges, negatives) = _compacted(g, [edges, negatives])
        pair_graph = _pair_graph(g, kept, edges)
        for etype in g.canonical_etypes:
            eids = seeds.get(etype, torch.empty(0, dtype=store.idtype, device=store.device))
            pair_graph.edges[etype].data[EID] = eids
            if isinstance(g, Graph):
                set_lazy(g.edges[etype].data, pair_graph.edges[etype].data, EID)
        pair_graphs = [pair_graph]
        if self.negative_sampler is not None:
            pair_graphs.append(_pair_graph(g, kept, negatives))

        excluded = edges_to_exclude(
            g, seeds, as_given, self.exclude, self.reverse_eids, self.reverse_etypes
        )
        excluded_ids = None
        if excluded is not None:
            plain = len(g.canonical_etypes) == 1
            excluded_ids = only_if_plain(excluded) if plain else excluded
        keyed = {"draw_seed": draw_seed} if self._is_keyed else {}
        drawn_from = g if self.g_sampling is None else self.g_sampling
        sampled = self.sampler.sample(drawn_from, only_if_plain(kept), excluded_ids, **keyed)
        return (sampled[0], *pair_graphs, sampled[-1])

    def prefetch(self, batch: Any) -> None:
        """Gather the features that were named, for a batch that `sample` returned."""
        pair_graph = batch[1]
        read_named(pair_graph.edges, pair_graph.canonical_etypes, self.prefetch_labels)
        if hasattr(self.sampler, "prefetch"):
            self.sampler.prefetch((batch[0], None, batch[-1]))

    def _negatives(self, g: Any, eids: Any, draw_seed: DrawSeed) -> dict[CanonicalEType, Pairs]:
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
    negative_sampler: Any = None,
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
    kept, local = {}, {}
    for ntype, of_type in ends.items():
        kept[ntype], places = tables.renumber(ntype, none, torch.cat([none, *of_type]))
        local[ntype] = iter(places.split([part.numel() for part in of_type]))
    return kept, [
        {etype: (next(local[etype[0]]), next(local[etype[2]])) for etype in group}
        for group in groups
    ]


def _pair_graph(g: Any, kept: Mapping[str, Tensor], pairs: Mapping[CanonicalEType, Pairs]) -> Graph:
    """A graph of some pairs over chosen nodes of ``g``, whose ids and features the nodes have."""
    store = graph_store_of(g)
    none = torch.empty(0, dtype=store.idtype, device=store.device)
    counts = {ntype: ids.numel() for ntype, ids in kept.items()}
    new = Graph(
        counts,
        {
            etype: Adjacency(
                *pairs.get(etype, (none, none)), counts[etype[0]], counts[etype[2]], check=False
            )
            for etype in g.canonical_etypes
        },
    )
    for ntype, ids in kept.items():
        new.nodes[ntype].data[NID] = ids
        if isinstance(g, Graph):
            set_lazy(g.nodes[ntype].data, new.nodes[ntype].data, NID)
    return new
