# SPDX-License-Identifier: Apache-2.0
"""PyG's loaders over a graph that spans ranks: what one process samples of the whole graph.

Uses no process group, and 3 gloo ranks, with --all also 2 and 5, of which the last has no node; one
start for all checks of a number.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import HeteroData
from torch_geometric.loader import LinkLoader, NodeLoader
from torch_geometric.sampler import NegativeSampling

import graphshard
import graphshard.pyg
from graphshard.partition import partition_graph
from graphshard.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parent))

import loader_graphs as lg


def sharded(world_size: int) -> tuple[Any, Any]:
    whole = lg.plain_data()
    return whole, graphshard.pyg.shard(whole, lg.owners(lg.NUM_NODES, world_size))


def sharded_typed(world_size: int) -> tuple[Any, Any]:
    whole = lg.typed_data()
    parts = {ntype: lg.owners(count, world_size) for ntype, count in lg.SIZES.items()}
    return whole, graphshard.pyg.shard(whole, parts)


def check_nodes(rank: int, world_size: int) -> None:
    whole, data = sharded(world_size)
    mine = data.n_id[data.train_mask]
    for number, (name, case) in enumerate(lg.NODE_CASES.items()):
        loader = graphshard.pyg.NeighborLoader(
            data, **case, input_nodes=data.train_mask, batch_size=4, seed=11, num_workers=number % 3
        )
        sampler = lg.samplers_of(whole, case)
        seen = []
        for step, batch in enumerate(loader):
            seeds = batch.n_id[: batch.batch_size]
            assert torch.equal(data.n_id[batch.input_id], seeds), name
            lg.assert_is_sample(batch, lg.node_sample(sampler, seeds, step), whole)
            seen.append(seeds)
        assert len(seen) == len(loader) == -(-20 // max(1, world_size - 1) // 4) or world_size > 2
        assert torch.equal(torch.cat(seen), mine)
        loader.close()


def check_typed(rank: int, world_size: int) -> None:
    whole, data = sharded_typed(world_size)
    fanouts = {lg.ETYPES[0]: [3, 2], lg.ETYPES[1]: [2, -1], lg.ETYPES[2]: [0, 2]}
    for case in (
        {"num_neighbors": fanouts},
        {"num_neighbors": [2, 2], "disjoint": True},
        {"num_neighbors": [2, 2], "time_attr": "time"},
        {"num_neighbors": [2], "subgraph_type": "induced"},
    ):
        loader = graphshard.pyg.NeighborLoader(data, **case, input_nodes="a", batch_size=7, seed=11)
        sampler = lg.samplers_of(whole, case)
        for step, batch in enumerate(loader):
            assert isinstance(batch, HeteroData)
            seeds = batch["a"].n_id[: batch["a"].batch_size]
            lg.assert_is_sample(batch, lg.node_sample(sampler, seeds, step, "a"), whole)
    loader = graphshard.pyg.HGTLoader(
        data, {"a": [3, 2], "b": [4]}, "a", batch_size=7, seed=11, num_workers=1
    )
    sampler = graphshard.pyg.HGTSampler(whole, {"a": [3, 2], "b": [4]}, seed=11)
    for step, batch in enumerate(loader):
        seeds = batch["a"].n_id[: batch["a"].batch_size]
        lg.assert_is_sample(batch, lg.node_sample(sampler, seeds, step, "a"), whole)


def check_links(rank: int, world_size: int) -> None:
    whole, data = sharded(world_size)
    ends = whole.edge_index[:, data.e_id]
    for case, negative in (
        ({"num_neighbors": [3, 2]}, None),
        ({"num_neighbors": [3, 2]}, NegativeSampling("binary", 1.5)),
        ({"num_neighbors": [2]}, NegativeSampling("triplet", 2)),
        ({"num_neighbors": [2], "disjoint": True}, NegativeSampling("binary")),
    ):
        loader = graphshard.pyg.LinkNeighborLoader(
            data, **case, neg_sampling=negative, batch_size=50, seed=11
        )
        sampler = lg.samplers_of(whole, case)
        for step, batch in enumerate(loader):
            of_batch = ends[:, batch.input_id]
            expected = lg.link_sample(sampler, of_batch, step, None, negative)
            lg.assert_is_sample(batch, expected, whole)
            if negative is not None and negative.is_triplet():
                assert torch.equal(batch.n_id[batch.src_index], of_batch[0])
                assert torch.equal(batch.n_id[batch.dst_pos_index], of_batch[1])
                assert torch.equal(batch.dst_neg_index, expected.metadata[3])
                continue
            count = of_batch.shape[1]
            assert torch.equal(batch.n_id[batch.edge_label_index[:, :count]], of_batch)
            assert torch.equal(batch.edge_label_index, expected.metadata[1])
    labels = (data.e_id % 2).long()
    loader = graphshard.pyg.LinkNeighborLoader(
        data, [2], data.edge_index, labels, neg_sampling="binary", batch_size=50, shuffle=True
    )
    for batch in loader:
        count = len(batch.input_id)
        assert torch.equal(batch.edge_label[:count], labels[batch.input_id] + 1)
        assert not batch.edge_label[count:].any()

    whole, data = sharded_typed(world_size)
    etype = lg.ETYPES[0]
    case = {"num_neighbors": [2, 2]}
    loader = graphshard.pyg.LinkNeighborLoader(
        data, **case, edge_label_index=etype, batch_size=60, seed=11
    )
    sampler = lg.samplers_of(whole, case)
    ends = whole[etype].edge_index[:, data[etype].e_id]
    for step, batch in enumerate(loader):
        of_batch = ends[:, batch[etype].input_id]
        lg.assert_is_sample(batch, lg.link_sample(sampler, of_batch, step, etype, None), whole)


def check_loaders_of_pyg(rank: int, world_size: int) -> None:
    whole, data = sharded(world_size)
    features, edges = graphshard.pyg.RemoteFeatureStore(data), graphshard.pyg.RemoteGraphStore(data)
    sampler = graphshard.pyg.HopSampler(data, [4, 3], seed=11)
    alone = lg.samplers_of(whole, {"num_neighbors": [4, 3]})
    seeds = torch.arange(rank, lg.NUM_NODES, 7)[:6]
    for step, batch in enumerate(NodeLoader((features, edges), sampler, seeds, batch_size=3)):
        expected = lg.node_sample(alone, seeds[step * 3 : step * 3 + 3], step)
        assert torch.equal(batch.n_id, expected.node)
        assert torch.equal(batch.e_id, expected.edge)
        assert torch.equal(batch.x, whole.x[batch.n_id])
        assert torch.equal(batch.edge_index, torch.stack([expected.row, expected.col]))
    row, col, _ = edges.coo()
    assert torch.equal(torch.stack([row, col]), whole.edge_index)
    assert features.get_tensor_size(attr_name="x", group_name=None) == (lg.NUM_NODES, 3)
    index = torch.tensor([5, 59, 5])
    assert torch.equal(features.get_tensor(None, "x", index), whole.x[index])
    assert torch.equal(features.get_tensor(None, "edge_attr", None), whole.edge_attr)
    with pytest.raises(KeyError, match="no feature 'z'"):
        features.get_tensor(None, "z", index)
    with pytest.raises(ValueError, match=r"in \[0, 60\)"):
        next(iter(NodeLoader((features, edges), sampler, torch.tensor([60 * (rank == 0)]))))

    whole, data = sharded_typed(world_size)
    stores = graphshard.pyg.RemoteFeatureStore(data), graphshard.pyg.RemoteGraphStore(data)
    sampler = graphshard.pyg.HopSampler(data, [2, 2], seed=11)
    etype = lg.ETYPES[0]
    ends = whole[etype].edge_index[:, rank : rank + 4]
    (batch,) = LinkLoader(stores, sampler, (etype, ends), batch_size=4)
    for ntype in lg.SIZES:
        assert torch.equal(batch[ntype].x, whole[ntype].x[batch[ntype].n_id])
    for other in lg.ETYPES:
        index = batch[other].edge_index
        found = torch.stack([batch[other[0]].n_id[index[0]], batch[other[2]].n_id[index[1]]])
        assert torch.equal(found, whole[other].edge_index[:, batch[other].e_id])


def check_changes(rank: int, world_size: int) -> None:
    """Columns that are set, or written to, are in the next loader; passes may be left early."""
    whole, data = sharded(world_size)
    seeds = torch.arange(data.num_nodes)

    def first(**options: Any) -> Any:
        loader = graphshard.pyg.NeighborLoader(data, [2], seeds, batch_size=8, **options)
        for _ in range(2):
            batch = next(iter(loader))
        return batch

    batch = first(num_workers=1)
    assert torch.equal(batch.x, whole.x[batch.n_id])
    data.x += 1
    batch = first()
    assert torch.equal(batch.x, whole.x[batch.n_id] + 1)
    data.x.data -= 5
    batch = first()
    assert torch.equal(batch.x, whole.x[batch.n_id] + 1 - 5)
    data.extra = data.n_id.double()
    batch = first(num_workers=1)
    assert torch.equal(batch.extra, batch.n_id.double())


def check_written_weights(rank: int, world_size: int) -> None:
    """Weights written where torch does not count it are those of the next pass."""
    _, data = sharded(world_size)
    loader = graphshard.pyg.NeighborLoader(
        data, [-1], torch.arange(data.num_nodes), batch_size=100, weight_attr="edge_weight"
    )
    (before,) = loader
    for odd in (0, 1):
        data.edge_weight.data.copy_(data.e_id % 2 == odd)
        (batch,) = loader
        drawn = batch.e_id.sort().values
        assert torch.equal(drawn, data.e_id[data.e_id % 2 == odd].sort().values)
    assert len(before.e_id) == int((data.e_id % 7 != 0).sum())
    loader.close()


def check_errors(rank: int, world_size: int) -> None:
    _, data = sharded(world_size)
    loader = graphshard.pyg.NeighborLoader
    with pytest.raises(ValueError, match="rows of the sharded data"):
        loader(data, [2], torch.tensor([1000] if rank == 0 else [], dtype=torch.int64))
    with pytest.raises(ValueError, match="a mask of input_nodes"):
        loader(data, [2], torch.ones(lg.NUM_NODES + 1, dtype=torch.bool))
    with pytest.raises(NotImplementedError, match="worker processes"):
        loader(data, [2], data.train_mask, worker_init_fn=print)
    with pytest.raises(ValueError, match="induced"):
        loader(data, [2], data.train_mask, disjoint=True, subgraph_type="induced")
    with pytest.raises(ValueError, match="column of nodes or one of edges"):
        loader(data, [2], data.train_mask, time_attr="when")
    for wrong in (  # on one rank alone
        {"num_neighbors": [-3]},
        {"num_neighbors": 2},
        {"input_time": torch.ones(1)},
        {"neighbor_sampler": 3},
        {"seed": "a"},
        {"batch_size": -1},
        {"timeout": 3},
    ):
        with pytest.raises((TypeError, ValueError, NotImplementedError)):
            loader(data, **{"num_neighbors": [2], "batch_size": 4, **(wrong if rank == 0 else {})})
    links = graphshard.pyg.LinkNeighborLoader
    for wrong in (
        {"edge_label_index": torch.tensor([[100], [1]])},
        {"edge_label_index": torch.rand(2, 3)},
        {"edge_label_index": torch.ones(3, dtype=torch.int64)},
        {"neg_sampling": "none"},
        {"edge_label_time": torch.ones(1)},
        {"edge_label": torch.ones(3)},
    ):
        given = {"edge_label_index": torch.tensor([[1], [2]])}
        with pytest.raises((TypeError, ValueError)):
            links(data, [2], **{**given, **(wrong if rank == 0 else {})})
    assert len(loader(data, [2], data.train_mask)) >= 1


def check_folder(rank: int, world_size: int, folder: str) -> None:
    """A partition folder, whose nodes and edges have other ids than before."""
    for kind, whole in (("plain", lg.plain_data()), ("typed", lg.typed_data())):
        data = graphshard.pyg.shard(f"{folder}/{kind}/{kind}.json")
        ntype = "a" if kind == "typed" else None
        case = {"num_neighbors": [3, 2]}
        loader = graphshard.pyg.NeighborLoader(
            data, **case, input_nodes=ntype, batch_size=9, seed=11, num_workers=1
        )
        sampler = lg.samplers_of(whole, case)
        for step, batch in enumerate(loader):
            store = batch if ntype is None else batch[ntype]
            seeds = store.n_id[: store.batch_size]
            lg.assert_is_sample(batch, lg.node_sample(sampler, seeds, step, ntype), whole)


def all_checks(rank: int, world_size: int, folder: str) -> None:
    check_folder(rank, world_size, folder)
    check_nodes(rank, world_size)
    check_typed(rank, world_size)
    check_links(rank, world_size)
    check_loaders_of_pyg(rank, world_size)
    check_changes(rank, world_size)
    check_written_weights(rank, world_size)
    check_errors(rank, world_size)


def partitioned(num_parts: int, folder: Path) -> str:
    for kind, data in (("plain", lg.plain_data()), ("typed", lg.typed_data())):
        graph = graphshard.data.from_pyg(data)
        partition_graph(graph, kind, num_parts, folder / kind, part_method="random", quiet=True)
    return str(folder)


def test_batches_of_one_part(tmp_path: Path) -> None:
    all_checks(0, 1, partitioned(1, tmp_path))


MANY = [pytest.param(count, marks=pytest.mark.exhaustive) for count in (2, 5)]


@pytest.mark.parametrize("world_size", [3, *MANY])
def test_batches_are_those_of_one_process(world_size: int, tmp_path: Path) -> None:
    run_ranks(all_checks, world_size, partitioned(world_size, tmp_path), timeout=120.0)
