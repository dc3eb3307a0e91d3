# SPDX-License-Identifier: Apache-2.0
"""Stores of a user's own give the batches and rows of the built-in ones. 0 and 2 gloo ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_cases import (
    Translation,
    edge_features,
    graph_of,
    in_original_ids,
    manager_of,
    write_parts,
)
from torch import Tensor

import graphshard
from graphshard._base.typing import CanonicalEType
from graphshard.dgl import dataloading
from graphshard.graph import EID, Block
from graphshard.ops import draw_neighbors
from graphshard.sampling import (
    DataLoader,
    DistNeighborSampler,
    DrawOptions,
    FeatureRequest,
    FeatureStore,
    GraphStore,
    LaborSampler,
    NeighborRequest,
    NeighborSampler,
    SampledNeighbors,
)
from graphshard.testing import run_ranks


class OwnGraph:
    """Compressed rows in tensors; has no ``__dict__`` to keep anything in."""

    __slots__ = ("canonical_etypes", "lists", "ntypes", "num", "weights")
    idtype, device = torch.int64, torch.device("cpu")
    group: dist.ProcessGroup | None = None

    def __init__(self, graph: graphshard.Graph) -> None:
        self.ntypes: Sequence[str] = list(graph.ntypes)
        self.canonical_etypes: Sequence[CanonicalEType] = list(graph.canonical_etypes)
        self.num = {t: graph.num_nodes(t) for t in graph.ntypes}
        self.lists = {}
        self.weights = {}
        for etype in graph.canonical_etypes:
            src, dst = graph.edges(etype=etype)
            for edge_dir, near, far in (("in", dst, src), ("out", src, dst)):
                eids = torch.argsort(near, stable=True)
                degrees = torch.bincount(near, minlength=self.num[etype[2 * (edge_dir == "in")]])
                indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
                self.lists[etype, edge_dir] = indptr, far[eids], eids
            self.weights[etype] = edge_features(graph, etype)

    def num_nodes(self, ntype: str) -> int:
        return self.num[ntype]

    def num_edges(self, etype: CanonicalEType) -> int:
        return self.lists[etype, "in"][2].numel()

    def sample_neighbors(
        self,
        requests: Sequence[NeighborRequest],
        options: DrawOptions,
        excluded: Mapping[CanonicalEType, Tensor] | None = None,
    ) -> list[SampledNeighbors]:
        found = []
        for request in requests:
            indptr, neighbors, eids = self.lists[request.etype, options.edge_dir]
            weights = None
            if options.weights is not None:
                weights = self.weights[request.etype][options.weights].float()[eids]
            absent = (excluded or {}).get(request.etype, torch.arange(0))
            counts, positions, picked = draw_neighbors(
                indptr,
                request.nodes,
                request.fanout,
                request.key,
                request.nodes,
                indices=neighbors,
                replace=options.replace,
                prob=weights,
                labor_ids=neighbors if options.labor else None,
                excluded=torch.isin(eids, absent),
            )
            found.append(
                SampledNeighbors(counts, picked, eids[positions] if options.with_eids else None)
            )
        return found

    def on(self, group: dist.ProcessGroup | None) -> OwnGraph:
        return self


class TranslatedGraph:
    """A graph in other ids that every rank reaches on its own, as one on a server would be."""

    def __init__(self, base: OwnGraph, translation: Translation, group: Any) -> None:
        self.base, self.translation, self.group = base, translation, group
        self.ntypes, self.canonical_etypes = base.ntypes, base.canonical_etypes
        self.idtype, self.device = base.idtype, base.device
        self.num_nodes, self.num_edges = base.num_nodes, base.num_edges

    def sample_neighbors(
        self,
        requests: Sequence[NeighborRequest],
        options: DrawOptions,
        excluded: Mapping[CanonicalEType, Tensor] | None = None,
    ) -> list[SampledNeighbors]:
        assert not excluded
        near, far = (2, 0) if options.edge_dir == "in" else (0, 2)
        old, new = self.translation.old, self.translation.new
        asked = [
            NeighborRequest(r.etype, old(r.etype[near], r.nodes), r.fanout, r.key) for r in requests
        ]
        return [
            SampledNeighbors(
                found.counts,
                new(r.etype[far], found.neighbors),
                new(r.etype, found.eids) if isinstance(found.eids, Tensor) else None,
            )
            for r, found in zip(requests, self.base.sample_neighbors(asked, options), strict=True)
        ]

    def on(self, group: dist.ProcessGroup | None) -> TranslatedGraph:
        assert group is None or group.size() == self.group.size()
        return self


class OwnFeatures:
    """Columns that are computed from ids."""

    def __init__(self, translation: Translation | None = None) -> None:
        self.translation = translation
        self.num_fetches, self.is_closed = 0, False

    def feature_names(self, kind: str | CanonicalEType) -> Collection[str]:
        return ["x", "y"] if isinstance(kind, str) else ["z"]

    def column(self, name: str, kind: str | CanonicalEType, ids: Tensor) -> Tensor:
        if self.translation is not None:
            ids = self.translation.old(kind, ids)
        scale = {"x": torch.tensor([1.0, 0.5]), "y": torch.tensor(3), "z": torch.tensor(-1.0)}[name]
        return ids.view(-1, *[1] * scale.dim()) * scale

    def fetch(self, requests: Sequence[FeatureRequest]) -> list[dict[str, Tensor]]:
        self.num_fetches += 1
        return [{name: self.column(name, r.kind, r.ids) for name in r.names} for r in requests]

    def on(self, group: dist.ProcessGroup | None) -> OwnFeatures:
        return self

    def close(self) -> None:
        self.is_closed = True


def with_features(graph: Any, ids: Mapping[Any, Tensor]) -> Any:
    """A built-in graph that has what `OwnFeatures` has."""
    own = OwnFeatures()
    for ntype in graph.ntypes:
        for name in own.feature_names(ntype):
            graph.nodes[ntype].data[name] = own.column(name, ntype, ids[ntype])
    for etype in graph.canonical_etypes:
        graph.edges[etype].data["z"] = own.column("z", etype, ids[etype])
    return graph


def whole(kind: str) -> Any:
    graph = graph_of(kind)
    for etype in graph.canonical_etypes:
        for name, values in edge_features(graph, etype).items():
            graph.edges[etype].data[name] = values
    ids = {t: torch.arange(graph.num_nodes(t)) for t in graph.ntypes}
    ids |= {t: torch.arange(graph.num_edges(t)) for t in graph.canonical_etypes}
    return with_features(graph, ids)


NAMED: dict[str, Any] = {
    "prefetch_node_feats": ["x"],
    "prefetch_labels": ["x", "y"],
    "prefetch_edge_feats": ["z"],
}

SAMPLERS = {
    "uniform": lambda: NeighborSampler([3, 2], **NAMED),
    "weighted": lambda: NeighborSampler([3, 2], prob="w", **NAMED),
    "mask": lambda: NeighborSampler([-1, 2], mask="m", **NAMED),
    "out": lambda: NeighborSampler([3, 2], edge_dir="out", **NAMED),
    "labor": lambda: LaborSampler([3, 2], **NAMED),
    "replace": lambda: NeighborSampler([3, 2], replace=True, **NAMED),
}


def contents(
    blocks: Sequence[Block], translation: Translation | None = None, turned: bool = False
) -> list[dict[str, Tensor]]:
    """Ids, edges and features that were named, in original ids."""
    found = [in_original_ids(block, translation, turned) for block in blocks]
    for ntype in blocks[0].srctypes:
        found[0][f"x {ntype}"] = blocks[0].srcnodes[ntype].data["x"]
        for name in ("x", "y"):
            found[-1][f"label {name} {ntype}"] = blocks[-1].dstnodes[ntype].data[name]
    for block, of_block in zip(blocks, found, strict=True):
        for etype in block.canonical_etypes:
            assert EID in block.edges[etype].data
            of_block[f"z {etype}"] = block.edges[etype].data["z"]
    return found


def assert_same(found: Any, wanted: Any) -> None:
    assert len(found) == len(wanted) > 1
    for batch, other in zip(found, wanted, strict=True):
        for one, two in zip(batch, other, strict=True):
            assert one.keys() == two.keys()
            for key in one:
                assert torch.equal(one[key], two[key]), key


@pytest.mark.parametrize("name", list(SAMPLERS))
@pytest.mark.parametrize("kind", ["plain", "typed"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_are_those_of_the_built_in_stores(kind: str, name: str, prefetch: int) -> None:
    graph, features = whole(kind), OwnFeatures()
    seeds = {t: torch.arange(graph.num_nodes(t)) for t in graph.ntypes}
    options: dict[str, Any] = {"shuffle": True, "seed": 5, "prefetch": prefetch}
    wanted = DataLoader(graph, seeds, SAMPLERS[name](), 7, **options)
    found = DataLoader(
        OwnGraph(graph), seeds, SAMPLERS[name](), 7, feature_store=features, **options
    )
    in_order = [contents(batch) for batch in wanted]
    assert_same([contents(batch) for batch in found], in_order)
    assert features.num_fetches == len(found)
    found.close()
    assert not features.is_closed  # it is the user's
    options["batch_size"] = 7
    local = dataloading.DataLoader(graph, seeds, SAMPLERS[name](), **options)
    own = dataloading.DataLoader(
        OwnGraph(graph), seeds, SAMPLERS[name](), feature_store=features, **options
    )
    assert_same([contents(b[-1]) for b in own], [contents(b[-1]) for b in local])


def test_either_store_serves_beside_a_built_in_one() -> None:
    graph = whole("typed")
    seeds = {t: torch.arange(graph.num_nodes(t)) for t in graph.ntypes}
    wanted = [contents(b) for b in DataLoader(graph, seeds, SAMPLERS["uniform"](), 9, seed=1)]
    bare = graph_of("typed")
    for loader in (
        DataLoader(bare, seeds, SAMPLERS["uniform"](), 9, seed=1, feature_store=OwnFeatures()),
        DataLoader(
            OwnGraph(bare),
            seeds,
            DistNeighborSampler(
                [3, 2],
                input_node_features={"x": {t: graph.nodes[t].data["x"] for t in graph.ntypes}},
                output_node_features={
                    n: {t: graph.nodes[t].data[n] for t in graph.ntypes} for n in "xy"
                },
            ),
            9,
            seed=1,
            edge_ids=True,
        ),
    ):
        for batch, other in zip(loader, wanted, strict=True):
            for etype in batch[0].canonical_etypes:
                for block, of_block in zip(batch, other, strict=True):
                    data = block.edges[etype].data
                    data["z"] = OwnFeatures().column("z", etype, data[EID])
                    assert torch.equal(data["z"], of_block[f"z {etype}"])
            assert_same([contents(batch)] * 2, [other] * 2)


def on_ranks(rank: int, world_size: int, kind: str, parts: str, prefetch: int) -> Any:
    graph = graph_of(kind)
    manager, translation = manager_of(parts, rank, graph), Translation(parts, world_size)
    ids: dict[Any, Tensor] = {**manager.original_ids, **manager.original_edge_ids}
    seeds = {t: translation.new(t, own) for t, own in manager.original_ids.items()}
    features = OwnFeatures(translation)
    stores: tuple[tuple[Any, FeatureStore | None], ...] = (
        (with_features(manager, ids), None),
        (manager, features),
        (TranslatedGraph(OwnGraph(graph), translation, dist.group.WORLD), features),
    )
    found = []
    for name in ("uniform", "weighted", "out"):
        for store, feature_store in stores:
            loader = DataLoader(
                store,
                seeds,
                SAMPLERS[name](),
                4,
                shuffle=True,
                seed=3,
                prefetch=prefetch,
                transport="collective",
                feature_store=feature_store,
            )
            batches = [contents(batch, translation, name == "out") for batch in loader]
            found.append(batches)
            loader.close()
    return found


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("kind", ["plain", "typed"])
def test_ranks_share_stores_of_a_users_own(tmp_path: Path, kind: str, prefetch: int) -> None:
    parts = write_parts(tmp_path, graph_of(kind), 2, "random")
    for found in run_ranks(on_ranks, 2, kind, parts, prefetch):
        for first in range(0, len(found), 3):
            wanted, *others = found[first : first + 3]
            for other in others:
                assert_same(other, wanted)


def test_the_protocols_are_those_of_the_built_in_stores() -> None:
    graph: GraphStore = OwnGraph(graph_of("plain"))
    features: FeatureStore = OwnFeatures()
    assert graph.num_nodes(graph.ntypes[0]) == graph_of("plain").num_nodes()
    assert set(features.feature_names("_N")) == {"x", "y"}


class Half:
    sample_neighbors = OwnGraph.sample_neighbors
    ntypes = ("a",)


def test_mistakes() -> None:
    graph, features = graph_of("plain"), OwnFeatures()
    seeds = torch.arange(4)
    lacks = r"Half lacks canonical_etypes, idtype, device, group, num_nodes, num_edges, on\)"
    with pytest.raises(TypeError, match=lacks):
        DataLoader(Half(), seeds, NeighborSampler([2]), 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"prefetch_labels names 'q', .* \(it has \['x', 'y'\]\)"):
        sampler = NeighborSampler([2], prefetch_labels=["q"])
        DataLoader(graph, seeds, sampler, 2, feature_store=features)
    with pytest.raises(ValueError, match="prefetch_node_feats names 'x'"):
        sampler = NeighborSampler([2], prefetch_node_feats=["x"])
        DataLoader(OwnGraph(graph), seeds, sampler, 2)
    rows = torch.zeros(graph.num_nodes(), 2)
    with pytest.raises(TypeError, match="from feature_store or from input_node_features, not from"):
        given = DistNeighborSampler([2], input_node_features={"x": rows})
        DataLoader(graph, seeds, given, 2, feature_store=features)
    with pytest.raises(ValueError, match="cache_bytes keeps remote rows of the graph's own"):
        DataLoader(graph, seeds, NeighborSampler([2]), 2, cache_bytes=9, feature_store=features)
    with pytest.raises(TypeError, match=r"feature_store gives what a BlockSampler names .* \(got"):
        edges = dataloading.as_edge_prediction_sampler(NeighborSampler([2]))
        dataloading.DataLoader(graph, seeds, edges, feature_store=features)


@pytest.mark.parametrize(
    ("counts", "neighbors", "message"),
    [
        ([1, 1], [0, 1, 2], r"neighbours of each of 3 nodes .* \(got counts of shape \(2,\)"),
        ([2, 2, -1], [0, 1, 2], "the least of them -1"),
        ([3, 3, 3], [0, 1, 2], r"must give 9 neighbours .* \(got torch.int64 of shape \(3,\)"),
        ([0, 0, 0], [0, 1, 2], "must give 0 neighbours"),
        ([1, 1, 1], [0, 1, 99], r"neighbours in \[0, \d+\) for .* \(got 99\)"),
        ([1, 1, 1], [0, -1, 2], r"\(got -1\)"),
        ([1, 1, 1], [0.0, 1.0, 2.0], "got torch.float32"),
    ],
)
def test_answers_that_are_no_edges(counts: Any, neighbors: Any, message: str) -> None:
    class Wrong(OwnGraph):
        def sample_neighbors(self, *_: Any) -> list[SampledNeighbors]:
            columns = torch.tensor(counts), torch.tensor(neighbors)
            return [SampledNeighbors(*columns, torch.arange(len(neighbors)))]

    wrong = Wrong(graph_of("plain"))
    with pytest.raises(ValueError, match=f"Wrong.sample_neighbors .*{message}"):
        NeighborSampler([2]).sample(wrong, torch.arange(3))
    with pytest.raises(ValueError, match="must give a SampledNeighbors for each of 1 requests"):
        Wrong.sample_neighbors = lambda *_: []  # type: ignore[assignment,method-assign,misc]
        NeighborSampler([2]).sample(wrong, torch.arange(3))
