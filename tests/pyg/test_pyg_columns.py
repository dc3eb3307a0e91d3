# SPDX-License-Identifier: Apache-2.0
"""What a PyG object has besides dense tensors: lists, arrays, sparse rows, values of the graph.

The oracle is PyG: ``subgraph`` of the nodes that a rank owns, layers on whole sparse rows, and the
edges of the whole graph. Uses no process group, and 2 and 3 gloo ranks; of 3 the last has no node.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg_nn
from torch_geometric.data import Data, HeteroData

import graphshard
import graphshard.pyg
from graphshard.comm import share_error
from graphshard.testing import run_ranks

NUM_NODES = 9


def plain_data() -> Data:
    nodes = torch.arange(NUM_NODES)
    ends = torch.stack([nodes.repeat(2), torch.cat([(nodes + 1) % 9, (nodes + 4) % 9])])
    return Data(
        x=torch.eye(NUM_NODES, dtype=torch.float64),
        edge_index=ends,
        names=[f"node {i}" for i in range(NUM_NODES)],
        ages=list(range(NUM_NODES)),
        letters=np.array(list("abcdefghi")),
        heights=np.arange(NUM_NODES) / 2,
        kinds=[f"edge {i}" for i in range(18)],
        classes=["u", "v"],
        title="abcdefghi",
        seed=torch.tensor(3),
    )


def typed_data() -> HeteroData:
    """Users and items, and nothing back."""
    data = HeteroData(classes=["u", "v"], title="shop", scale=torch.tensor(2.0))
    data["user"].x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    data["user"].names = [f"user {i}" for i in range(6)]
    data["item"].x = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    data["item"].prices = np.arange(8)
    data["item"].currency = "EUR"
    users = torch.randint(0, 6, (20,), generator=torch.Generator().manual_seed(2))
    items = torch.arange(20) % 8
    data["user", "buys", "item"].edge_index = torch.stack([users, items])
    data["user", "buys", "item"].edge_attr = torch.arange(20.0).view(-1, 1)
    data["user", "buys", "item"].notes = [str(i) for i in range(20)]
    return data


def owners(count: int, world_size: int) -> torch.Tensor:
    """The last rank of several has no node."""
    return torch.arange(count) * 7 % 5 % max(1, world_size - 1)


def equal(found: Any, expected: Any) -> bool:
    return bool(np.array_equal(np.asarray(found), np.asarray(expected)))


def check_columns(rank: int, world_size: int) -> None:
    whole = plain_data()
    part = graphshard.pyg.shard(whole, owners(NUM_NODES, world_size))
    lists = whole.clone()
    del lists.letters, lists.heights  # which PyG's subgraph does not cut
    expected = lists.subgraph(part.n_id)
    for name in ("names", "ages"):
        assert part[name] == expected[name]
    assert equal(part.letters, whole.letters[part.n_id.numpy()])
    assert equal(part.heights, whole.heights[part.n_id.numpy()])
    assert part.kinds == [whole.kinds[edge] for edge in part.e_id.tolist()]
    assert (part.classes, part.title, int(part.seed)) == (["u", "v"], "abcdefghi", 3)

    typed = typed_data()
    cuts = {"user": owners(6, world_size), "item": owners(8, world_size)}
    mine = graphshard.pyg.shard(typed, cuts)
    subset = {ntype: mine[ntype].n_id for ntype in typed.node_types}
    assert mine["user"].names == [typed["user"].names[i] for i in subset["user"].tolist()]
    assert equal(mine["item"].prices, typed["item"].prices[subset["item"].numpy()])
    buys = mine["user", "buys", "item"]
    assert buys.notes == [str(edge) for edge in buys.e_id.tolist()]
    assert mine["item"].currency == "EUR"
    assert (mine.classes, mine.title, float(mine.scale)) == (["u", "v"], "shop", 2.0)

    for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc):
        sparse = plain_data()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls two of them beta
            sparse.x = sparse.x.to_sparse(layout=layout)
            part = graphshard.pyg.shard(sparse, owners(NUM_NODES, world_size))
        assert part.x.layout == layout
        assert torch.equal(part.x.to_dense(), whole.x[part.n_id])
        for make in (pyg_nn.GCNConv, pyg_nn.GATConv):
            torch.manual_seed(0)
            layer = make(NUM_NODES, 4).double()
            expected = layer(sparse.x, whole.edge_index)
            torch.testing.assert_close(layer(part.x, part.edge_index), expected[part.n_id])
            model = graphshard.pyg.parallelize(layer, sparse, owners(NUM_NODES, world_size))
            torch.testing.assert_close(model(sparse.x, sparse.edge_index), expected)
        with pytest.raises(NotImplementedError, match=r"pass x\.to_dense\(\)"):
            pyg_nn.SAGEConv(NUM_NODES, 4).double()(part.x, part.edge_index)
        with pytest.raises(ValueError, match="make it dense with to_dense"):
            rows = Data(x=part.x, edge_index=part.edge_index, n_id=part.n_id, e_id=part.e_id)
            graphshard.pyg.NeighborLoader(rows, [2], batch_size=2)
    for name in ("names", "letters"):
        part = graphshard.pyg.shard(whole, owners(NUM_NODES, world_size))
        for other in {"names", "ages", "letters", "kinds"} - {name}:
            del part[other]
        with pytest.raises(ValueError, match=f"take it off with data.pop.'{name}'"):
            graphshard.pyg.NeighborLoader(part, [2], batch_size=2)
        del part[name]
        for batch in graphshard.pyg.NeighborLoader(part, [2], batch_size=2):
            assert equal(batch.heights, whole.heights[batch.n_id.numpy()])
            assert batch.classes == ["u", "v"]
    share_error(None)


def check_one_relation(rank: int, world_size: int) -> None:
    whole = typed_data()
    del whole["user"].names
    etype = ("user", "buys", "item")
    del whole[etype].notes
    cuts = {"user": owners(6, world_size), "item": owners(8, world_size)}
    part = graphshard.pyg.shard(whole, cuts)
    users, items = whole[etype].edge_index
    loaders: dict[str, Any] = {
        "hops": graphshard.pyg.NeighborLoader(part, [-1], input_nodes="item", batch_size=2),
        "budget": graphshard.pyg.HGTLoader(part, [6], ("item", None), batch_size=2),
        "links": graphshard.pyg.LinkNeighborLoader(
            part, [-1], edge_label_index=etype, batch_size=4
        ),
    }
    for name, loader in loaders.items():
        seen = []
        for batch in loader:
            for ntype in whole.node_types:
                store = batch[ntype]
                assert torch.equal(store.x, whole[ntype].x[store.n_id]), name
            row, col = batch[etype].edge_index
            edges = batch[etype].e_id
            assert torch.equal(batch["user"].n_id[row], users[edges]), name
            assert torch.equal(batch["item"].n_id[col], items[edges]), name
            assert torch.equal(batch[etype].edge_attr, whole[etype].edge_attr[edges]), name
            if name != "links":  # all users of an item fit
                seeds = batch["item"].n_id[: batch["item"].batch_size]
                expected = torch.isin(items, seeds).nonzero().view(-1)
                assert torch.equal(edges.sort().values, expected), name
                seen.append(seeds)
            else:
                ends = batch[etype].edge_label_index
                chosen = part[etype].e_id[batch[etype].input_id]
                assert torch.equal(batch["user"].n_id[ends[0]], users[chosen])
                assert torch.equal(batch["item"].n_id[ends[1]], items[chosen])
                seen.append(chosen)
        ids = part[etype].e_id if name == "links" else part["item"].n_id
        assert torch.equal(torch.cat([*seen, ids[:0]]).sort().values, ids.sort().values), name


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_columns_travel_with_their_nodes_and_edges(world_size: int) -> None:
    if world_size == 1:
        check_columns(0, 1)
    else:
        run_ranks(check_columns, world_size)


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_loaders_of_types_that_are_sources_or_destinations(world_size: int) -> None:
    if world_size == 1:
        check_one_relation(0, 1)
    else:
        run_ranks(check_one_relation, world_size)


def test_a_relation_of_the_name_of_untyped_edges_stays_typed() -> None:
    data = HeteroData()
    data["_N"].x = torch.eye(3)
    data["_N", "_E", "_N"].edge_index = torch.tensor([[0, 1], [1, 2]])
    part = graphshard.pyg.shard(data)
    assert isinstance(part, HeteroData)
    assert torch.equal(part["_N"].x, data["_N"].x)
