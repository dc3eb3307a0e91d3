# SPDX-License-Identifier: Apache-2.0
"""Samplers whose batches are subgraphs: ShaDow, GraphSAINT, ClusterGCN."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..._base.files import check_regular
from ..._base.typing import CanonicalEType
from ...errors import GraphValueError
from ...graph import EID, NID, Graph, node_subgraph, remove_edges
from ...graph.structure import by_first_occurrence, places_of
from ...ops import Adjacency
from ...sampling.graph_store import graph_store_of
from ...sampling.lazy_features import (
    FeatureNames,
    check_named,
    read_named,
    set_lazy,
    without_features,
)
from ...sampling.sampler import (
    DrawSeed,
    LayerFanout,
    NeighborSampler,
    Sampler,
    by_relation,
    by_type,
    only_if_plain,
)
from ..sampling.walks import ONE_OUT_EDGE, walks_along
from ..transforms._partition import metis_partition_assignment


class SubgraphSampler(Sampler):
    """Base of samplers that give the graph of some nodes and of all edges between them.

    It has every feature of the graph that it is drawn from, gathered when read; see [Note: lazy
    features]. Ids are in ``ndata[NID]`` and ``edata[EID]``.

    Args:
        prefetch_ndata: Names of node features that a loader gathers ahead of the training loop; on
            a typed graph also node type to names.
    """

    def __init__(
        self,
        prefetch_ndata: FeatureNames = None,
        prefetch_edata: FeatureNames = None,
        output_device: torch.device | str | None = None,
    ) -> None:
        self.prefetch_ndata = prefetch_ndata or ()
        self.prefetch_edata = prefetch_edata or ()
        self.output_device = output_device

    def induced(self, g: Graph, nodes: dict[str, Tensor]) -> Graph:
        """The subgraph of some nodes, each of them once, with ids and without features."""
        named = self.prefetch_ndata, self.prefetch_edata
        check_named(lambda t: g.nodes[t].data, g.ntypes, named[0], "prefetch_ndata")
        check_named(lambda t: g.edges[t].data, g.canonical_etypes, named[1], "prefetch_edata")
        return node_subgraph(without_features(g), nodes)

    def with_features(self, g: Graph, subgraph: Graph) -> Graph:
        """A subgraph that has ids, with the features of the graph, where batches shall be."""
        for ntype in g.ntypes:
            set_lazy(g.nodes[ntype].data, subgraph.nodes[ntype].data, NID)
        for etype in g.canonical_etypes:
            set_lazy(g.edges[etype].data, subgraph.edges[etype].data, EID)
        return subgraph if self.output_device is None else subgraph.to(self.output_device)

    def prefetch(self, batch: Any) -> None:
        """Gather the features that were named, for a batch that ``sample`` returned."""
        subgraph = batch[-1] if isinstance(batch, tuple) else batch
        read_named(subgraph.nodes, subgraph.ntypes, self.prefetch_ndata)
        read_named(subgraph.edges, subgraph.canonical_etypes, self.prefetch_edata)


class ShaDowKHopSampler(SubgraphSampler):
    """Draws neighbours hop by hop, and gives the graph of all nodes found and all edges between.

    Source: Zeng et al., "Decoupling the Depth and Scope of Graph Neural Networks", NeurIPS 2021,
    https://arxiv.org/abs/2201.07858.

    Args:
        fanouts: Neighbours per node, one number (or relation to number) per hop, the last for the
            seeds; -1 for all.

    Example:
        >>> from graphshard.data import load_dataset
        >>> cora, sampler = load_dataset("cora").graph, ShaDowKHopSampler([5, 10])
        >>> input_nodes, output_nodes, subgraph = sampler.sample(cora, torch.tensor([3, 8]))
        >>> subgraph.ndata["_ID"][:2], len(input_nodes) == subgraph.num_nodes()
        (tensor([3, 8]), True)
    """

    def __init__(
        self,
        fanouts: Sequence[LayerFanout],
        replace: bool = False,
        prob: str | None = None,
        prefetch_node_feats: FeatureNames = None,
        prefetch_edge_feats: FeatureNames = None,
        output_device: torch.device | str | None = None,
    ) -> None:
        super().__init__(prefetch_node_feats, prefetch_edge_feats, output_device)
        self._sampler = NeighborSampler(fanouts, prob=prob, replace=replace)
        self.fanouts, self.replace, self.prob = self._sampler.fanouts, replace, prob

    def sample(
        self, g: Graph, seed_nodes: Any, exclude_eids: Any = None, draw_seed: DrawSeed | None = None
    ) -> tuple[Any, Any, Graph]:
        """The subgraph around some nodes.

        A seed that is given several times has a node for each, in the order given: all of them
        have the same in-edges, and out-edges leave from the first.

        Args:
            exclude_eids: Ids of edges that must neither be drawn nor be in the subgraph, or
                relation to ids.

        Returns:
            ``(input_nodes, output_nodes, subgraph)``: the subgraph's nodes, which begin with the
            seeds; the seeds; and the subgraph.
        """
        store = graph_store_of(g)
        seeds = by_type(store, seed_nodes, "seed_nodes")
        excluded = by_relation(store, exclude_eids, "exclude_eids")
        draw_seed = DrawSeed.fresh() if draw_seed is None else draw_seed
        blocks = self._sampler.draw(store, seeds, draw_seed, excluded=excluded, with_eids=False)
        drawn = {t: blocks[0].srcnodes[t].data[NID] for t in g.ntypes}
        distinct = {t: by_first_occurrence(ids) for t, ids in drawn.items()}
        subgraph = self.induced(g, distinct)
        if any(len(ids) < len(drawn[t]) for t, ids in distinct.items()):
            subgraph = _repeated(subgraph, drawn, distinct)
        subgraph = _without(subgraph, excluded or {})
        is_plain = len(g.ntypes) == 1 and not isinstance(seed_nodes, dict)
        given = only_if_plain(seeds) if is_plain else seeds
        return only_if_plain(drawn), given, self.with_features(g, subgraph)


def _repeated(subgraph: Graph, drawn: dict[str, Tensor], distinct: dict[str, Tensor]) -> Graph:
    """A subgraph of distinct nodes with a node for each time that one was drawn."""
    rows, first = {}, {}
    for ntype, ids in drawn.items():
        ascending, order = torch.sort(distinct[ntype])
        rows[ntype] = order[torch.searchsorted(ascending, ids)]
        first[ntype] = places_of(rows[ntype], len(distinct[ntype])).to(ids.dtype)
    relations, eids = {}, {}
    for etype in subgraph.canonical_etypes:
        near = rows[etype[2]].to(subgraph.idtype)
        src, _, edges = subgraph.in_edges(near, "all", etype)
        degrees = subgraph.in_degrees(near, etype)
        dst = torch.arange(len(near), device=near.device).repeat_interleave(degrees.long())
        relations[etype] = Adjacency(
            first[etype[0]][src.long()],
            dst.to(subgraph.idtype),
            len(drawn[etype[0]]),
            len(near),
            check=False,
        )
        eids[etype] = subgraph.edges[etype].data[EID][edges.long()]
    new = Graph({ntype: len(ids) for ntype, ids in drawn.items()}, relations)
    for ntype, ids in drawn.items():
        new.nodes[ntype].data[NID] = ids
    for etype, ids in eids.items():
        new.edges[etype].data[EID] = ids
    return new


def _without(subgraph: Graph, excluded: dict[CanonicalEType, Tensor]) -> Graph:
    """A subgraph without edges of some ids of the graph that it is from."""
    eids = {}
    for etype, ids in excluded.items():
        is_excluded = torch.isin(subgraph.edges[etype].data[EID], ids)
        eids[etype] = is_excluded.nonzero().squeeze(1).to(subgraph.idtype)
    return remove_edges(subgraph, eids) if any(map(len, eids.values())) else subgraph


# In the place of a layer's index in `DrawSeed.key`.
_SAINT_KEY = -5


class SAINTSampler(SubgraphSampler):
    """Draws the nodes of a subgraph; a batch is a `Graph`.

    Source: Zeng et al., "GraphSAINT: Graph Sampling Based Inductive Learning Method", ICLR 2020,
    https://arxiv.org/abs/1907.04931. Its corrections of loss and aggregation for how likely nodes
    and edges are drawn are the model's business.

    Args:
        mode: ``"node"`` draws nodes in proportion to their out-degrees; ``"edge"`` draws edges
            from u to v in proportion to 1 / deg(u) + 1 / deg(v), and takes their ends; ``"walk"``
            takes the nodes on random walks from nodes drawn uniformly.
        budget: How many nodes or edges are drawn, with replacement; for walks a pair, how many and
            how long.

    Example:
        >>> from graphshard.data import load_dataset
        >>> sampler = SAINTSampler("walk", (20, 4))
        >>> subgraph = sampler.sample(load_dataset("cora").graph, None)
        >>> 5 < subgraph.num_nodes() <= 100
        True
    """

    def __init__(
        self,
        mode: str,
        budget: int | tuple[int, int],
        cache: bool = True,
        prefetch_ndata: FeatureNames = None,
        prefetch_edata: FeatureNames = None,
        output_device: torch.device | str | None = "cpu",
    ) -> None:
        super().__init__(prefetch_ndata, prefetch_edata, output_device)
        if mode not in ("node", "edge", "walk"):
            raise GraphValueError(f"mode must be 'node', 'edge' or 'walk' (got {mode!r})")
        numbers = list(budget) if isinstance(budget, tuple | list) else [budget]
        whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers)
        if len(numbers) != (2 if mode == "walk" else 1) or not whole:
            raise GraphValueError(
                f"budget must be {'(walks, steps)' if mode == 'walk' else 'a number'} for mode "
                f"{mode!r} (got {budget!r})"
            )
        self.mode, self.budget, self.cache = mode, budget, cache
        self._numbers = numbers
        self._last_sums: tuple[weakref.ref[Graph], Tensor] | None = None

    def sample(self, g: Graph, indices: Any = None, draw_seed: DrawSeed | None = None) -> Graph:
        """A subgraph of ``g``."""
        _check_one_relation(g, "SAINTSampler")
        draw_seed = DrawSeed.fresh() if draw_seed is None else draw_seed
        generator = torch.Generator().manual_seed(draw_seed.key(_SAINT_KEY, 0))
        if self.mode == "node":
            nodes = self._drawn(g, lambda g: g.out_degrees().clamp(min=1), generator)
        elif self.mode == "edge":
            edges = self._drawn(g, _edge_weights, generator).unique()
            src, dst = g.find_edges(edges.to(g.idtype))
            nodes = torch.cat([src, dst])
        else:
            num_roots, length = self._numbers if g.num_nodes() else (0, 0)
            roots = torch.randint(max(g.num_nodes(), 1), (num_roots,), generator=generator)
            path = [g.canonical_etypes[0]] * length
            options = dict.fromkeys(path, ONE_OUT_EDGE)
            roots = roots.to(g.device, g.idtype)
            traces, _ = walks_along(g, roots, path, options, None, draw_seed)
            nodes = traces[traces >= 0]
        subgraph = self.induced(g, {g.ntypes[0]: nodes.unique().to(g.idtype)})
        return self.with_features(g, subgraph)

    def _drawn(
        self, g: Graph, weights: Callable[[Graph], Tensor], generator: torch.Generator
    ) -> Tensor:
        """Places drawn in proportion to weights, with replacement."""
        last = self._last_sums
        if last is not None and last[0]() is g:
            sums = last[1]
        else:
            sums = weights(g).double().cumsum(0)
            if self.cache:
                self._last_sums = weakref.ref(g), sums
        if sums.numel() == 0:
            return sums.long()
        drawn = torch.rand(self._numbers[0], generator=generator, dtype=torch.float64)
        indices = torch.searchsorted(sums, drawn.to(sums.device) * sums[-1], right=True)
        return indices.clamp_(max=len(sums) - 1)


def _check_one_relation(g: Graph, sampler: str) -> None:
    if not g.is_homogeneous:
        raise GraphValueError(
            f"{sampler} takes a graph of one relation (got {g.canonical_etypes}); make one with "
            "to_homogeneous"
        )


def _edge_weights(g: Graph) -> Tensor:
    src, dst = (side.long() for side in g.edges())
    arriving, leaving = (d.double().clamp(min=1) for d in (g.in_degrees(), g.out_degrees()))
    return 1 / arriving[dst] + 1 / leaving[src]


_KEYS = {"partition_offset", "partition_node_ids"}


class ClusterGCNSampler(SubgraphSampler):
    """Divides a graph into clusters; a batch is the graph of the nodes of some of them.

    Source: Chiang et al., "Cluster-GCN: An Efficient Algorithm for Training Deep and Large Graph
    Convolutional Networks", KDD 2019, https://arxiv.org/abs/1905.07953.

    Args:
        k: Number of clusters; a loader over this sampler iterates over ``torch.arange(k)``.
        cache_path: File that keeps the clusters (safetensors); what is there is used again. None
            keeps none.
        balance_ntypes: ``[num_nodes]`` a class for each node; clusters get alike many of each.

    Raises:
        DGLError: A graph of several types, another mode, or a file at ``cache_path`` that holds no
            clusters, or those of another graph or ``k``.
        MetisError: METIS is not there, or failed.

    Example:
        >>> from graphshard.data import load_dataset
        >>> cora = load_dataset("cora").graph
        >>> sampler = ClusterGCNSampler(cora, 10, cache_path=None)
        >>> sampler.sample(cora, torch.tensor([0, 1])).num_nodes() < cora.num_nodes()
        True
    """

    def __init__(
        self,
        g: Graph,
        k: int,
        cache_path: str | os.PathLike[str] | None = "cluster_gcn.safetensors",
        balance_ntypes: Tensor | Sequence[int] | None = None,
        balance_edges: bool = False,
        mode: str = "k-way",
        prefetch_ndata: FeatureNames = None,
        prefetch_edata: FeatureNames = None,
        output_device: torch.device | str | None = None,
    ) -> None:
        super().__init__(prefetch_ndata, prefetch_edata, output_device)
        _check_one_relation(g, "ClusterGCNSampler")
        if not isinstance(k, int) or isinstance(k, bool) or k < 1:
            raise GraphValueError(f"k must be a positive number of clusters (got {k!r})")
        if mode not in ("k-way", "recursive"):
            raise GraphValueError(f"mode must be 'k-way' or 'recursive' (got {mode!r})")
        path = None if cache_path is None else Path(cache_path)
        if path is not None and path.exists():
            clusters = _read(path, k, g.num_nodes())
        else:
            parts = _clusters(g, k, balance_ntypes, balance_edges, mode)
            sizes = torch.bincount(parts, minlength=k)
            offset = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
            order = torch.argsort(parts, stable=True)
            clusters = {"partition_offset": offset, "partition_node_ids": order}
            if path is not None:
                _write(clusters, path)
        self.partition_offset = clusters["partition_offset"]
        self.partition_node_ids = clusters["partition_node_ids"]

    def sample(self, g: Graph, partition_ids: Any) -> Graph:
        """The graph of all nodes of some clusters."""
        numbers = torch.as_tensor(partition_ids).reshape(-1).tolist()
        offset = self.partition_offset.tolist()
        if any(not 0 <= number < len(offset) - 1 for number in numbers):
            raise GraphValueError(f"clusters must be in [0, {len(offset) - 1}) (got {numbers})")
        rows = [self.partition_node_ids[offset[n] : offset[n + 1]] for n in numbers]
        nodes = torch.cat([self.partition_node_ids[:0], *rows]).to(g.device, g.idtype)
        return self.with_features(g, self.induced(g, {g.ntypes[0]: nodes}))


def _clusters(
    g: Graph, k: int, balance_ntypes: Tensor | Sequence[int] | None, balance_edges: bool, mode: str
) -> Tensor:
    num_nodes = g.num_nodes()
    if k == 1 or num_nodes <= k:
        return torch.arange(num_nodes) % k
    shape = (num_nodes,) if balance_ntypes is None else torch.as_tensor(balance_ntypes).shape
    if shape != (num_nodes,):
        raise GraphValueError(
            f"balance_ntypes must have one class for each of {num_nodes} nodes (got shape "
            f"{tuple(shape)})"
        )
    return metis_partition_assignment(g.long(), k, balance_ntypes, balance_edges, mode)


def _read(path: Path, k: int, num_nodes: int) -> dict[str, Tensor]:
    cure = f"remove {path}, or give another cache_path"
    try:
        check_regular(path)
        clusters = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise GraphValueError(f"the file of clusters cannot be read ({error}); {cure}") from None
    if set(clusters) != _KEYS or any(
        x.dim() != 1 or x.dtype != torch.int64 for x in clusters.values()
    ):
        raise GraphValueError(f"the file holds no clusters (it has {sorted(clusters)}); {cure}")
    offset, nodes = clusters["partition_offset"], clusters["partition_node_ids"]
    if len(offset) != k + 1:
        raise GraphValueError(f"the file has {len(offset) - 1} clusters and not k={k}; {cure}")
    rising = int(offset[0]) == 0 and bool((offset.diff() >= 0).all())
    if len(nodes) != num_nodes or not rising or int(offset[-1]) != num_nodes:
        raise GraphValueError(
            f"the file has clusters of {len(nodes)} nodes, and the graph has {num_nodes}; {cure}"
        )
    if not torch.equal(nodes.sort().values, torch.arange(num_nodes)):
        raise GraphValueError(f"the file does not have each node in one cluster; {cure}")
    return clusters


def _write(clusters: dict[str, Tensor], path: Path) -> None:
    """Whole or not at all, also where several processes write at a time."""
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        whole = Path(folder) / path.name
        save_file(clusters, whole)
        os.replace(whole, path)
