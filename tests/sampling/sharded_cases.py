# SPDX-License-Identifier: Apache-2.0
"""Sharded graphs for the tests of structures and row sources, and batches in original ids."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import graphshard
from graphshard._base.typing import CanonicalEType
from graphshard.fullbatch import GraphShardManager, PartitionData, RelationEdges
from graphshard.graph import EID, NID, Block
from graphshard.sampling import (
    DrawSeed,
    LaborSampler,
    MultiLayerFullNeighborSampler,
    NeighborSampler,
)
from graphshard.sampling.graph_store import LocalGraphStore

sys.path.insert(0, str(Path(__file__).parents[1] / "fullbatch"))
from shards import graph_of, plain_graph, typed_graph, write_parts

__all__ = ["graph_of", "plain_graph", "typed_graph", "write_parts"]

SAMPLERS: dict[str, Callable[[], Any]] = {
    "uniform": lambda: NeighborSampler([4, 3, 2]),
    "all": lambda: MultiLayerFullNeighborSampler(2),
    "weighted": lambda: NeighborSampler([3, 2], prob="w"),
    "mask": lambda: NeighborSampler([3, -1], mask="m"),
    "replace": lambda: NeighborSampler([3, 2], replace=True),
    "weighted replace": lambda: NeighborSampler([3, 2], prob="w", replace=True),
    "labor": lambda: LaborSampler([3, 2]),
    "weighted labor": lambda: LaborSampler([3, 2], prob="w"),
    "out": lambda: NeighborSampler([3, 2], edge_dir="out"),
    "out weighted": lambda: NeighborSampler([3, 2], edge_dir="out", prob="w"),
    "out labor": lambda: LaborSampler([3, 2], edge_dir="out"),
    "excluded": lambda: NeighborSampler([3, 2]),
    "out excluded": lambda: NeighborSampler([-1, 2], edge_dir="out"),
    "none": lambda: NeighborSampler([0, 2]),
    "without eids": lambda: NeighborSampler([3, 2]),
    "repeated": lambda: NeighborSampler([3, 2]),
    "out repeated labor": lambda: LaborSampler([3, 2], edge_dir="out"),
}


DRAW_SEED = DrawSeed(11, epoch=2, step=5)


def seeds_of(graph: graphshard.Graph, rank: int) -> dict[str, Tensor]:
    """Original ids of a rank's seeds: of any owner, in any order, none on the third rank."""
    generator = torch.Generator().manual_seed(20 + rank)
    return {
        t: torch.randperm(graph.num_nodes(t), generator=generator)[: 0 if rank == 2 else 5]
        for t in graph.ntypes
    }


def excluded_of(graph: graphshard.Graph, rank: int) -> dict[CanonicalEType, Tensor]:
    """Original ids of the edges that a rank excludes; a quarter of all, other ones on each rank."""
    generator = torch.Generator().manual_seed(30 + rank)
    found = {}
    for etype in graph.canonical_etypes:
        count = graph.num_edges(etype)
        found[etype] = torch.randperm(count, generator=generator)[: count // 4]
    return {} if rank == 1 else found


def edge_features(graph: graphshard.Graph, etype: CanonicalEType) -> dict[str, Tensor]:
    """Weights and a mask by original edge id."""
    generator = torch.Generator().manual_seed(40)
    weights = torch.rand(graph.num_edges(etype), generator=generator)
    weights[::5] = 0
    return {"w": weights, "m": torch.rand(weights.shape, generator=generator) < 0.6}


class Translation:
    """Between original ids and those of the partitioned graph, for all nodes and edges."""

    def __init__(self, all_data: str | Sequence[PartitionData], num_parts: int = 0) -> None:
        if isinstance(all_data, str):
            all_data = [
                graphshard.load_dgl_partition_data(all_data, part) for part in range(num_parts)
            ]
        self._old: dict[Any, Tensor] = {}
        for ntype in all_data[0].node_type_names:
            ids = [data.node_features[f"{ntype}/orig_id"] for data in all_data]
            self._old[ntype] = torch.cat(ids)
        for etype in all_data[0].canonical_etypes:
            ids = [data.edge_features[f"{':'.join(etype)}/orig_id"] for data in all_data]
            self._old[etype] = torch.cat(ids)

    def old(self, kind: str | CanonicalEType, ids: Tensor) -> Tensor:
        return self._old[kind][ids]

    def new(self, kind: str | CanonicalEType, ids: Tensor) -> Tensor:
        return torch.argsort(self._old[kind])[ids]


def shuffled(data: PartitionData) -> PartitionData:
    """The same part with its edges in another order, but for those of one destination."""
    generator = torch.Generator().manual_seed(70)
    edges, features = {}, dict(data.edge_features)
    for etype, e in data.edges.items():
        rank_of_row = torch.randperm(data.num_owned(etype[2]), generator=generator)
        order = torch.argsort(rank_of_row[e.dst.long()], stable=True)
        edges[etype] = RelationEdges(e.src_part[order], e.src[order], e.dst[order])
        key = f"{':'.join(etype)}/orig_id"
        features[key] = features[key][order]
    return replace(data, edges=edges, edge_features=features)


def manager_of(
    data: str | PartitionData, rank: int, graph: graphshard.Graph | None = None
) -> GraphShardManager:
    """A rank's part, with edge features if the whole graph is given."""
    if isinstance(data, str):
        data = graphshard.load_dgl_partition_data(data, rank)
    manager = graphshard.construct_full_graph(data)
    for etype in manager.canonical_etypes if graph is not None else ():
        for name, values in edge_features(graph, etype).items():
            manager.edges[etype].data[name] = values[manager.original_edge_ids[etype]]
    return manager


def sample(
    name: str,
    structure: Any,
    graph: graphshard.Graph,
    rank: int,
    translation: Translation | None = None,
) -> list[dict[str, Tensor]]:
    """The blocks of a rank's batch, in original ids."""
    seeds = seeds_of(graph, rank)
    if "repeated" in name:
        seeds = {t: torch.cat([ids, ids[:3].flip(0), ids[:1]]) for t, ids in seeds.items()}
    excluded = excluded_of(graph, rank) if "excluded" in name else None
    if translation is not None:
        seeds = {t: translation.new(t, ids) for t, ids in seeds.items()}
        if excluded is not None:
            excluded = {e: translation.new(e, ids) for e, ids in excluded.items()}
    blocks = SAMPLERS[name]().draw(
        structure,
        seeds,
        DRAW_SEED,
        excluded=excluded,
        with_eids=name != "without eids",
    )
    return [in_original_ids(block, translation, "out" in name.split()) for block in blocks]


def in_original_ids(
    block: Block, translation: Translation | None, turned: bool
) -> dict[str, Tensor]:
    """Everything about a block. Local numbers need no translation: they count first appearances."""

    def old(name: Any, ids: Tensor) -> Tensor:
        return ids if translation is None else translation.old(name, ids)

    found = {}
    for ntype in block.srctypes:
        found[f"src {ntype}"] = old(ntype, block.srcnodes[ntype].data[NID])
    for ntype in block.dsttypes:
        found[f"dst {ntype}"] = old(ntype, block.dstnodes[ntype].data[NID])
    for etype in block.canonical_etypes:
        name = " ".join(etype)
        found[f"u {name}"], found[f"v {name}"] = block.edges(etype=etype)
        if EID in block.edges[etype].data:
            of_graph = etype[::-1] if turned else etype
            found[f"e {name}"] = old(of_graph, block.edges[etype].data[EID])
    return found


def expected(kind: str, num_ranks: int) -> dict[str, list[list[dict[str, Tensor]]]]:
    """By name of the sampler and by rank, what one process draws from the whole graph."""
    graph = graph_of(kind)
    for etype in graph.canonical_etypes:
        for name, values in edge_features(graph, etype).items():
            graph.edges[etype].data[name] = values
    structure = LocalGraphStore(graph)
    return {
        name: [sample(name, structure, graph, rank) for rank in range(num_ranks)]
        for name in SAMPLERS
    }


def assert_same_blocks(got: Any, wanted: Any, what: str) -> None:
    assert len(got) == len(wanted), what
    for number, (one, other) in enumerate(zip(got, wanted, strict=True)):
        assert one.keys() == other.keys(), f"{what}, block {number}"
        for key in one:
            assert torch.equal(one[key], other[key]), f"{what}, block {number}, {key}"


def left_behind(*folders: str | Path) -> list[str]:
    """Shared files that have a name and keep it; other runs may make some at any time."""
    places = [Path(folder) for folder in (*folders, "/dev/shm", tempfile.gettempdir())]

    def named() -> set[str]:
        return {
            str(place / name)
            for place in places
            if place.is_dir()
            for name in os.listdir(place)
            if len(name) == len("graphshard-") + 32 and name.startswith("graphshard-")
        }

    found = named()
    if found:
        time.sleep(0.5)
    return sorted(found & named())
