# SPDX-License-Identifier: Apache-2.0
"""Nodes that other parts read lie together: how many runs of rows each part sends to each other."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

import graphshard.testing
from graphshard import Graph, graph, heterograph
from graphshard.partition import load_partition, partition_graph
from graphshard.partition._graph_source import GraphSource
from graphshard.partition._node_order import NUM_DIGITS
from graphshard.partition._streamed import places_by_readers


def random_edges(num_src: int, num_dst: int, count: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(n, (count,), generator=generator) for n in (num_src, num_dst))


def runs_sent(g: Graph, num_parts: int, folder: Path) -> dict[str, dict[tuple[int, int], int]]:
    """Partition a graph; per node type, how many runs of rows each (owner, reader) pair is."""
    mapping = partition_graph(g, "g", num_parts, str(folder), quiet=True, return_mapping=True)
    assert mapping is not None
    book = load_partition(str(folder / "g.json"), 0)[3]
    old = mapping[0] if isinstance(mapping[0], dict) else {"_N": mapping[0]}
    new = {ntype: torch.argsort(ids) for ntype, ids in old.items()}
    read: dict[str, dict[tuple[int, int], list[torch.Tensor]]] = {ntype: {} for ntype in g.ntypes}
    for etype in g.canonical_etypes:
        src, dst = g.edges(etype=etype)
        src, dst = new[etype[0]][src], new[etype[2]][dst]
        owners, readers = book.nid2partid(src, etype[0]), book.nid2partid(dst, etype[2])
        for pair in itertools.permutations(range(num_parts), 2):
            ids = src[(owners == pair[0]) & (readers == pair[1])]
            read[etype[0]].setdefault(pair, []).append(ids)
    return {
        ntype: {
            pair: int((torch.unique(torch.cat(ids)).diff() != 1).sum()) + 1
            for pair, ids in of_type.items()
            if torch.cat(ids).numel()
        }
        for ntype, of_type in read.items()
    }


@pytest.mark.parametrize("num_parts", [2, 3, 4, 7])
def test_rows_for_a_reader_are_few_runs(num_parts: int, tmp_path: Path) -> None:
    """With the edges in one direction only: who is read is not who reads."""
    g = graph(random_edges(6000, 6000, 9000, 0), num_nodes=6000)
    runs = runs_sent(g, num_parts, tmp_path)["_N"]
    assert len(runs) == num_parts * (num_parts - 1)
    most = [1, *(2**digit for digit in range(num_parts - 2))]
    for owner in range(num_parts):
        mine = sorted(count for (sender, _), count in runs.items() if sender == owner)
        assert all(count <= limit for count, limit in zip(mine, most, strict=True)), (mine, most)


def test_each_type_of_its_own(tmp_path: Path) -> None:
    edges = {
        ("user", "likes", "item"): random_edges(900, 700, 2500, 0),
        ("item", "in", "user"): random_edges(700, 900, 900, 1),
        ("user", "knows", "user"): random_edges(900, 900, 700, 2),
    }
    found = runs_sent(heterograph(edges), 3, tmp_path)
    assert list(found) == ["item", "user"]
    for runs in found.values():
        assert len(runs) == 6
        assert set(runs.values()) == {1}


@pytest.mark.parametrize("num_parts", [1, 2, 5, 40])
def test_places_are_equal_where_readers_are(num_parts: int) -> None:
    """0 for nobody; with more readers than digits, those that read most count."""
    source = GraphSource(graph(random_edges(3000, 3000, 5000, 3), num_nodes=3000))
    parts = np.random.default_rng(4).integers(0, num_parts, 3000)
    src, dst = (ids.numpy() for ids in source.edges(0))
    reads = np.zeros((3000, num_parts), dtype=bool)
    reads[src, parts[dst]] = True
    reads[np.arange(3000), parts] = False
    places = places_by_readers(source, parts.astype(np.uint16), num_parts, 1)
    for part in range(num_parts):
        mine = parts == part
        weights = np.bincount(parts[dst[mine[src]]], minlength=num_parts)
        weights[part] = 0
        most = np.argsort(-weights, kind="stable")[:NUM_DIGITS]
        sets = np.packbits(reads[mine][:, most], axis=1)[:, 0]
        places_of = {code: set(places[mine][sets == code]) for code in np.unique(sets)}
        assert all(len(found) == 1 for found in places_of.values())
        assert len(set.union(*places_of.values())) == len(places_of)
        assert places_of.get(0, {0}) == {0}


def test_an_empty_graph() -> None:
    source = GraphSource(graph((torch.arange(0), torch.arange(0)), num_nodes=5))
    assert places_by_readers(source, np.arange(5, dtype=np.uint16) % 2, 2, 1).tolist() == [0] * 5


def train_once(rank: int, world_size: int, folder: str) -> None:
    """With two parts a full-batch layer sends slices of its rows."""
    data = graphshard.load_dgl_partition_data(f"{folder}/g.json", rank)
    sharded = graphshard.construct_full_graph(data, mode="sequential")
    plan = sharded._structure.halo(sharded.canonical_etypes).plan
    sent = plan.sent[1 - rank]
    assert sent.is_slice
    assert len(sent) > 100
    rows = torch.randn(plan.num_rows, 8)
    assert sent.of(rows).untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()


def test_two_workers_send_slices(tmp_path: Path) -> None:
    g = graph(random_edges(2000, 2000, 9000, 5), num_nodes=2000)
    partition_graph(g, "g", 2, str(tmp_path), quiet=True)
    graphshard.testing.run_ranks(train_once, 2, str(tmp_path))
